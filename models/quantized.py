"""Linear layers with quantised weights, for tests and benchmarks; random weights, nothing from a trained model.

`linear`: x, float32 [1, rows, depth], rounded to bytes with one scale, times int8 weights with one scale per column,
plus a bias, rounded to bytes again, as ONNX Runtime's static quantiser writes it. `packed`: MatMulNBits, x float32
[rows, depth].
"""

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MICROSOFT = "com.microsoft"


def linear(*, depth: int, columns: int, seed: int = 0) -> onnx.ModelProto:
    """QuantizeLinear, DequantizeLinear, MatMul with dequantised weights, Add, QuantizeLinear, DequantizeLinear."""
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.5, 1.0, columns).astype(np.float32) / np.float32(127 * np.sqrt(depth))
    constants = {
        "levels": rng.integers(-127, 128, (depth, columns)).astype(np.int8),
        "scale": scale,
        "zero": np.zeros(columns, np.int8),
        "bias": rng.standard_normal(columns).astype(np.float32),
        "s": np.array(4 / 127, np.float32),
        "z": np.array(128, np.uint8),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
        helper.make_node("DequantizeLinear", ["levels", "scale", "zero"], ["w"], axis=1),
        helper.make_node("MatMul", ["xd", "w"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["sum"]),
        helper.make_node("QuantizeLinear", ["sum", "s", "z"], ["yq"]),
        helper.make_node("DequantizeLinear", ["yq", "s", "z"], ["y"]),
    ]
    return _model(nodes, constants, [1, "rows", depth], [1, "rows", columns])


def packed(
    *, depth: int, columns: int, bits: int, block: int, level: int, zeros: bool = False, seed: int = 0
) -> onnx.ModelProto:
    """MatMulNBits with one scale per `block` rows of a column, and a zero point if asked; `level`: accuracy_level."""
    rng = np.random.default_rng(seed)
    blocks = -(-depth // block)
    constants = {
        "levels": rng.integers(0, 256, (columns, blocks, block * bits // 8)).astype(np.uint8),
        "scale": rng.uniform(0.01, 0.03, (columns, blocks)).astype(np.float32),
    }
    if zeros:
        constants["zeros"] = rng.integers(0, 256, (columns, -(-blocks * bits // 8))).astype(np.uint8)
    sizes: dict[str, Any] = {"K": depth, "N": columns, "bits": bits, "block_size": block, "accuracy_level": level}
    node = helper.make_node("MatMulNBits", ["x", *constants], ["y"], domain=MICROSOFT, **sizes)
    return _model([node], constants, ["rows", depth], ["rows", columns])


def _model(
    nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], read: list[int | str], written: list[int | str]
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "quantised",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, read)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, written)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)
