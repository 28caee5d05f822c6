"""DequantizeLinear of weights of 4 and 2 bits, from file to result: they stay packed, several to a byte.

The oracle dequantises the same levels in numpy and multiplies in double precision; where ONNX Runtime has the operator
for the type, `optimize` has compared with it as well.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from runtime.compile import optimize
from runtime.options import Options
from runtime.session import DOMAIN, load
from tilecore.profile import detect_profile

pytestmark = pytest.mark.cpu
KINDS = {
    "int4": (TensorProto.INT4, np.dtype(ml_dtypes.int4)),
    "uint4": (TensorProto.UINT4, np.dtype(ml_dtypes.uint4)),
    "int2": (TensorProto.INT2, np.dtype(ml_dtypes.int2)),
    "uint2": (TensorProto.UINT2, np.dtype(ml_dtypes.uint2)),
}


@dataclass(frozen=True)
class Weight:
    """A weight [depth, columns], as [columns, depth] when `turned`: one scale, one per column, or one per block."""

    kind: str
    depth: int
    columns: int
    scales: str
    zeros: bool = True
    turned: bool = False
    block: int = 16


WEIGHTS = (
    Weight("int4", 64, 40, "block"),
    Weight("uint4", 64, 33, "block", block=32),
    Weight("int4", 48, 24, "block", zeros=False, turned=True),
    Weight("uint4", 45, 24, "column"),
    Weight("int4", 45, 17, "column", turned=True),
    Weight("uint4", 31, 20, "one"),
    Weight("int4", 128, 128, "one", zeros=False),
    Weight("int2", 64, 24, "block"),
    Weight("uint2", 30, 24, "column"),
)


def parts_of(weight: Weight, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
    """Levels, scale, zero point (all [depth, columns] or fewer) and the operator's attributes."""
    info = ml_dtypes.iinfo(KINDS[weight.kind][1])
    shape = {"one": (), "column": (weight.columns,), "block": (-(-weight.depth // weight.block), weight.columns)}
    given = shape[weight.scales]
    levels = rng.integers(int(info.min), int(info.max) + 1, (weight.depth, weight.columns))
    zero = rng.integers(int(info.min), int(info.max) + 1, given) if weight.zeros else np.zeros(given, np.int64)
    last = 0 if weight.turned else 1
    attributes: dict[str, dict[str, Any]] = {
        "one": {},
        "column": {"axis": last},
        "block": {"axis": 1 - last, "block_size": weight.block},
    }
    return levels, rng.uniform(0.01, 0.03, given).astype(np.float32), np.asarray(zero), attributes[weight.scales]


def model_of(weight: Weight, rng: np.random.Generator) -> tuple[onnx.ModelProto, np.ndarray]:
    """x [S, depth] times the weight, and the weight in double precision."""
    code, _ = KINDS[weight.kind]
    levels, scale, zero, attributes = parts_of(weight, rng)
    wide = [np.repeat(p, weight.block, 0)[: weight.depth] if weight.scales == "block" else p for p in (scale, zero)]
    exact = (levels - wide[1]) * wide[0].astype(np.float64)

    def narrow(name: str, values: np.ndarray) -> onnx.TensorProto:
        stored = values.T if weight.turned and values.ndim == 2 else values
        return helper.make_tensor(name, code, stored.shape, stored.ravel().tolist())

    turned = scale.T if weight.turned and scale.ndim == 2 else scale
    constants = [
        narrow("levels", levels),
        helper.make_tensor("scale", TensorProto.FLOAT, turned.shape, turned.ravel().tolist()),
        narrow("zero", zero),
    ]
    inputs = ["levels", "scale", "zero"] if weight.zeros else ["levels", "scale"]
    unpack = helper.make_node("DequantizeLinear", inputs, ["w"], **attributes)
    product = helper.make_node("Gemm", ["x", "w"], ["y"], transB=1) if weight.turned else helper.make_node(
        "MatMul", ["x", "w"], ["y"]
    )  # fmt: skip
    graph = helper.make_graph(
        [unpack, product],
        "narrow",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["S", weight.depth])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["S", weight.columns])],
        constants[: len(inputs)],
    )
    opset = 25 if weight.kind.endswith("2") else 21
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11), exact


@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
def test_narrow_weights_stay_packed_and_are_right(weight: Weight, tmp_path: Path, object_cache: Path) -> None:
    rng = np.random.default_rng(weight.depth)
    model, exact = model_of(weight, rng)
    original, fused = tmp_path / "original.onnx", tmp_path / "fused.onnx"
    onnx.save(model, original)
    options = replace(Options(cache=object_cache.parent), fuse_all=True, target=detect_profile().target.name)
    report = optimize(original, fused, options=options, progress=lambda stage: None)
    assert not report.faults
    graph = onnx.load(fused).graph
    assert [node.domain for node in graph.node] == [DOMAIN]
    bits = int(weight.kind[-1])
    stored = max(len(tensor.raw_data) for tensor in graph.initializer if tensor.data_type == TensorProto.UINT8)
    assert stored == -(-weight.columns // 16) * 16 * -(-weight.depth * bits // 8)
    session = load(fused)
    for rows in (1, 7):
        x = rng.standard_normal((rows, weight.depth)).astype(np.float32)
        want = x.astype(np.float64) @ exact
        bound = 4e-7 * float((np.abs(x) @ np.abs(exact)).max())
        np.testing.assert_allclose(np.asarray(session.run(None, {"x": x})[0]), want, rtol=0, atol=bound)
