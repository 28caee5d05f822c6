"""Models over csrc/verify_kernels.c: the fused one, and the original that its function bodies come from."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import native_build
import numpy as np
import onnx
from onnx import FunctionProto, TensorProto, helper, inliner, numpy_helper

from runtime import native

DOMAIN = "tilefuse"
OPSETS = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]


def build_library(output: Path) -> Path:
    """Link the shim with the kernels of this file's models."""
    sources = [*map(str, native.SHIM_SOURCES), str(native_build.SOURCES / "verify_kernels.c")]
    command = [*native_build.find_compiler(), *native.COMPILE_FLAGS, *native.LINK_FLAGS, *native_build.INCLUDES]
    done = subprocess.run([*command, *sources, "-lm", "-o", str(output)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return output


def _scalar(name: str, value: float) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=helper.make_tensor(name, TensorProto.FLOAT, [], [value]))


def _body(op: str) -> FunctionProto:
    kind = op.split("_")[0]
    if kind == "Linear":
        return helper.make_function(
            DOMAIN, op, ["x", "w"], ["y"], [helper.make_node("MatMul", ["x", "w"], ["y"])], OPSETS[:1]
        )
    if kind == "Root":
        return helper.make_function(DOMAIN, op, ["x"], ["y"], [helper.make_node("Sqrt", ["x"], ["y"])], OPSETS[:1])
    nodes = [
        _scalar("root", 2**0.5),
        _scalar("one", 1.0),
        _scalar("half", 0.5),
        helper.make_node("Div", ["x", "root"], ["d"]),
        helper.make_node("Erf", ["d"], ["e"]),
        helper.make_node("Add", ["e", "one"], ["a"]),
        helper.make_node("Mul", ["x", "a"], ["m"]),
        helper.make_node("Mul", ["m", "half"], ["y"]),
    ]
    return helper.make_function(DOMAIN, op, ["x"], ["y"], nodes, OPSETS[:1])


def write(folder: Path, library: Path, ops: Sequence[str], *, external: bool = False) -> tuple[Path, Path]:
    """Write `original.onnx`, and `fused.onnx` with its library: x [n, 8] through `ops` in a row, to y [n, 8]."""
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []
    random = np.random.default_rng(0)
    for i, op in enumerate(ops):
        read = ["x" if i == 0 else f"t{i}"]
        if op.startswith("Linear"):
            weight = random.standard_normal((8, 8)).astype(np.float32)
            weights.append(numpy_helper.from_array(weight, f"w{i}"))
            read.append(f"w{i}")
        written = "y" if i == len(ops) - 1 else f"t{i + 1}"
        nodes.append(helper.make_node(op, read, [written], name=f"node_{i}", domain=DOMAIN))
    described = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "chain", described[:1], described[1:], weights)
    functions = [_body(op) for op in dict.fromkeys(ops)]
    model = helper.make_model(graph, opset_imports=OPSETS, ir_version=8, functions=functions)
    onnx.checker.check_model(model, full_check=True)
    shutil.copy(library, folder / "fused.so")
    plain = inliner.inline_local_functions(model)
    for name, content in (("original", plain), ("fused", model)):
        path = folder / f"{name}.onnx"
        if external:
            onnx.save(content, path, save_as_external_data=True, location=f"{name}.data", size_threshold=0)
        else:
            onnx.save(content, path)
    return folder / "original.onnx", folder / "fused.onnx"
