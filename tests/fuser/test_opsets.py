"""Every opset from 7 on: operators whose attributes became inputs or whose meaning changed, fused and run both ways."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_bodies import run
from test_rewrite import check_interface, fused

from fuser.body import _Body  # pyright: ignore[reportPrivateUsage]
from fuser.region import Region
from fuser.shapes import Shapes

OPSETS = (7, 8, 9, 10, 11, 12, 13, 14, 17, 18, 21, 22, 23, 24, 25, 27, onnx.defs.onnx_opset_version())
WIDTH = 64


class Writer:
    """Nodes in the spelling of one opset."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def op(self, kind: str, *inputs: str, count: int = 1, **attributes: Any) -> str:
        outputs = [f"v{len(self.nodes)}_{i}" for i in range(count)]
        self.nodes.append(helper.make_node(kind, list(inputs), outputs, name=f"n{len(self.nodes)}", **attributes))
        return outputs[0]

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def moved(self, kind: str, x: str, since: int, **values: Any) -> str:
        """`values` as attributes before opset `since`, as inputs from then on."""
        if self.opset < since:
            return self.op(kind, x, **values)
        whole = [self.constant(v, np.float32 if isinstance(v, float) else np.int64) for v in values.values()]
        return self.op(kind, x, *whole)


def softmax_then_norm(g: Writer, x: str) -> str:
    """Softmax over axis 1 of [batch, 3, 64]: before 13 over both axes together; a mean whose axes became an input."""
    weights = g.op("Softmax", x, axis=1)
    if g.opset < 18:
        return g.op("Sub", weights, g.op("ReduceMean", weights, axes=[2], keepdims=1))
    return g.op("Sub", weights, g.op("ReduceMean", weights, g.constant([2], np.int64), keepdims=1))


def attributes_that_moved(g: Writer, x: str) -> str:
    """Clip (11), Slice (10), Unsqueeze and Squeeze (13)."""
    low = g.moved("Clip", x, 11, min=-0.5, max=0.75)
    part = g.moved("Slice", low, 10, starts=[0], ends=[2], axes=[1])
    wide = g.moved("Unsqueeze", part, 13, axes=[0])
    return g.op("Tanh", g.op("Mul", g.moved("Squeeze", wide, 13, axes=[0]), g.constant(3.0)))


def summed(g: Writer, x: str) -> str:
    """ReduceSum (13), after a product and a residual."""
    y = g.op("Add", g.op("MatMul", x, g.constant(np.eye(WIDTH) * 0.5)), x)
    return g.op("Div", y, g.op("Add", g.op("Abs", summed_over_last(g, y)), g.constant(1.0)))


def summed_over_last(g: Writer, y: str) -> str:
    if g.opset < 13:
        return g.op("ReduceSum", y, axes=[2], keepdims=1)
    return g.op("ReduceSum", y, g.constant([2], np.int64), keepdims=1)


def dropped(g: Writer, x: str) -> str:
    """Dropout in inference: ratio an attribute before 12, an input from then on, with training_mode false."""
    if g.opset < 12:
        kept = g.op("Dropout", x, ratio=0.3)
    else:
        kept = g.op("Dropout", x, g.constant(0.3), g.constant(False, np.bool_))
    return g.op("Relu", g.op("MatMul", kept, g.constant(np.eye(WIDTH)[:, ::-1] * 0.25)))


def batch_norm(g: Writer, x: str) -> str:
    """BatchNormalization over axis 1, between pointwise work."""
    statistics = [g.constant(np.linspace(low, low + 1, 3)) for low in (0.5, -0.3, 0.1, 0.7)]
    return g.op("Relu", g.op("BatchNormalization", g.op("Mul", x, g.constant(2.0)), *statistics))


def attention(g: Writer, x: str) -> str:
    """Heads of one projection: Split (13), Reshape, an additive mask by Unsqueeze (13), Softmax over axis 3."""
    packed = g.op("MatMul", x, g.constant(np.sin(np.arange(WIDTH * 3 * WIDTH)).reshape(WIDTH, -1) / 4))
    sizes = [WIDTH] * 3
    if g.opset < 13:
        g.op("Split", packed, count=3, split=sizes, axis=2)
    else:
        g.op("Split", packed, g.constant(sizes, np.int64), count=3, axis=2)
    q, k, v = (g.op("Reshape", part, g.constant([0, 0, 4, -1], np.int64)) for part in g.nodes[-1].output)
    scores = g.op("MatMul", g.op("Transpose", q, perm=[0, 2, 1, 3]), g.op("Transpose", k, perm=[0, 2, 3, 1]))
    mask = g.moved("Unsqueeze", g.constant([[0.0, -1e4, -1e4], [0.0, 0.0, -1e4], [0.0, 0.0, 0.0]]), 13, axes=[0])
    weights = g.op("Softmax", g.op("Add", g.op("Div", scores, g.constant(4.0)), mask), axis=3)
    mixed = g.op("Transpose", g.op("MatMul", weights, g.op("Transpose", v, perm=[0, 2, 1, 3])), perm=[0, 2, 1, 3])
    return g.op("Reshape", mixed, g.constant([0, 0, -1], np.int64))


KINDS = (softmax_then_norm, attributes_that_moved, summed, dropped, batch_norm, attention)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_spelling_of_an_opset_means_the_same_fused(kind: Any, opset: int, tmp_path: Path) -> None:
    g = Writer(opset)
    g.nodes.append(helper.make_node("Identity", [kind(g, "x")], ["y"]))
    dims = ["batch", 2 if kind is attributes_that_moved else 3, WIDTH]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, WIDTH])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, dims)
    model = helper.make_model(
        helper.make_graph(g.nodes, "g", [x], [y], g.weights),
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=8,
    )
    onnx.checker.check_model(model, full_check=True)
    path, output = tmp_path / "model.onnx", tmp_path / "fused.onnx"
    onnx.save(model, path)
    op_types = fused(path, output).op_types
    assert len(op_types) == 2 if kind is attention else op_types
    check_interface(path, output)
    for batch in (1, 5):
        feeds = {"x": np.random.default_rng(batch).standard_normal((batch, 3, WIDTH)).astype(np.float32)}
        for found, wanted in zip(run(output, feeds), run(path, feeds), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_dropout_in_training_stays_as_it_is(tmp_path: Path) -> None:
    g = Writer(13)
    kept = g.op("Dropout", "x", g.constant(0.0), g.constant(True, np.bool_))
    g.nodes.append(helper.make_node("Relu", [kept], ["y"]))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 64]) for name in ("x", "y")]
    graph = helper.make_graph(g.nodes, "g", values[:1], values[1:], g.weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), tmp_path / "m.onnx")
    rewritten = fused(tmp_path / "m.onnx", tmp_path / "fused.onnx")
    assert "Dropout" in [node.op_type for node in rewritten.model.graph]


def test_large_integers_are_exact_in_functions_of_old_opsets() -> None:
    """Constant has no integers before opset 9: they are put together from doubles."""
    wanted = np.array([-1, 0, 7, 2**53 + 1, np.iinfo(np.int64).max, np.iinfo(np.int64).min + 1], np.int64)
    body = _Body(cast(Region, None), cast(Shapes, None), 8)
    value = body.constant(wanted)
    value.name = "value"
    graph = ir.Graph([], [value], nodes=body.nodes, opset_imports={"": 8}, name="g")
    for node in body.nodes:
        for output in node.outputs:
            output.type = ir.TensorType(ir.DataType.INT64 if node.op_type != "Constant" else ir.DataType.DOUBLE)
            output.shape = ir.Shape([6]) if output is value else None
    model = ir.to_proto(ir.Model(graph, ir_version=8)).SerializeToString()
    (found,) = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {})
    np.testing.assert_array_equal(np.asarray(found), wanted)
