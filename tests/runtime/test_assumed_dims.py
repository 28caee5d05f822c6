"""Dims that a name or a table makes equal: calls that keep to it give the original's numbers, others are refused."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest

from models.graph import GraphWriter, write
from runtime import session
from runtime.compile import optimize
from runtime.options import Options

pytestmark = pytest.mark.cpu

Arrays = Mapping[str, npt.NDArray[np.float32]]
TABLE = 12


def named() -> onnx.ModelProto:
    """z depends on how long a broadcast with the mask is, and on nothing else of the mask; y is the broadcast."""
    g = GraphWriter(17)
    cache, x = g.input("cache", np.float32, ("b", "past", 8)), g.input("x", np.float32, ("b", "seq", 8))
    mask = g.input("mask", np.float32, ("b", "past + seq"))
    keys = g.op("ReduceMean", g.op("Concat", cache, x, axis=1), axes=[2], keepdims=0)
    joined = g.op("Add", keys, mask)
    length = g.op("Cast", g.op("Gather", g.op("Shape", joined), g.constant(1)), to=onnx.TensorProto.FLOAT)
    g.op("Hardmax", joined, out="y")
    g.op("Softmax", g.op("Tanh", g.op("Mul", x, length)), out="z")
    g.output("y", np.float32, [None] * 2)
    g.output("z", np.float32, [None] * 3)
    return g.finish()


def rotated() -> onnx.ModelProto:
    """Rows [past, past + seq) of a table are multiplied with x, and the result normalised."""
    g = GraphWriter(17)
    cache, x = g.input("cache", np.float32, ("b", "past", 8)), g.input("x", np.float32, ("b", "seq", 8))
    past = g.op("Slice", g.op("Shape", cache), g.constant([1]), g.constant([2]))
    seq = g.op("Slice", g.op("Shape", x), g.constant([1]), g.constant([2]))
    rows = g.op("Slice", g.normal((TABLE, 8), std=1.0), past, g.op("Add", past, seq), g.constant([0]))
    g.op("Softmax", g.op("Mul", x, rows), out="z")
    g.output("z", np.float32, [None] * 3)
    return g.finish()


def feeds(past: int, seq: int, mask: int | None = None) -> Arrays:
    random = np.random.default_rng([past, seq])
    shapes = {"cache": (2, past, 8), "x": (2, seq, 8)} | ({"mask": (2, mask)} if mask is not None else {})
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def fused(model: onnx.ModelProto, folder: Path) -> tuple[ort.InferenceSession, ort.InferenceSession]:
    path, output = write(model, folder / "model.onnx"), folder / "fused.onnx"
    report = optimize(path, output, options=Options.from_environment(), progress=lambda _: None)
    assert not report.faults
    assert any("Softmax" in region.label for region in report.regions), report
    plain = ort.SessionOptions()
    plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(path, plain), session.load(output)


def results(of: ort.InferenceSession, inputs: Arrays) -> list[npt.NDArray[np.float32]] | str:
    try:
        return [np.asarray(result) for result in of.run(None, dict(inputs))]
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's exceptions share no base but Exception
        return str(error)


def test_names_that_lie_give_no_wrong_number(tmp_path: Path) -> None:
    original, ours = fused(named(), tmp_path)
    for past, seq, mask, refused in [
        (3, 4, 7, False), (0, 5, 5, False), (0, 1, 1, False),
        (3, 4, 1, False),  # the name lies, but the broadcast is what it says
        (0, 1, 4, True),  # the original takes this: the mask is longer than the keys
        (3, 4, 6, True), (3, 4, 4, True),
    ]:  # fmt: skip
        wanted, found = (results(one, feeds(past, seq, mask)) for one in (original, ours))
        if refused:
            assert isinstance(found, str), (past, seq, mask)
        else:
            assert not isinstance(wanted, str)
            assert not isinstance(found, str), found
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_rows_beyond_a_table_are_refused(tmp_path: Path) -> None:
    original, ours = fused(rotated(), tmp_path)
    for past, seq in [(3, 4), (0, TABLE), (TABLE - 1, 1), (0, 1)]:
        wanted, found = (results(one, feeds(past, seq)) for one in (original, ours))
        assert not isinstance(wanted, str)
        assert not isinstance(found, str), found
        np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4, atol=1e-6)
    for past, seq in [(TABLE - 1, 3), (TABLE - 2, 5), (TABLE, 1)]:  # the first is a broadcast of one row originally
        found = results(ours, feeds(past, seq))
        assert isinstance(found, str)
        assert "past" in found
        assert "seq" in found


def two_inputs(*, apart: bool = False) -> onnx.ModelProto:
    """y is made of x and of how long another input with a dim of that name is; z of the other input alone."""
    g = GraphWriter(17)
    x, other = g.input("x", np.float32, ("n", 8)), g.input("other", np.float32, ("n", 8))
    length = g.op("Gather", g.op("Shape", x if apart else other), g.constant(0))
    g.op("Softmax", g.op("Tanh", g.op("Mul", x, g.op("Cast", length, to=onnx.TensorProto.FLOAT))), out="y")
    g.op("Softmax", g.op("Sqrt", g.op("Mul", other, other)), out="z")
    g.output("y", np.float32, [None] * 2)
    g.output("z", np.float32, [None] * 2)
    return g.finish()


def lengths(x: int, other: int) -> Arrays:
    random = np.random.default_rng(0)
    return {name: random.standard_normal((n, 8)).astype(np.float32) for name, n in (("x", x), ("other", other))}


def assert_same(original: ort.InferenceSession, ours: ort.InferenceSession, inputs: Arrays) -> None:
    wanted, found = results(original, inputs), results(ours, inputs)
    assert not isinstance(wanted, str)
    assert not isinstance(found, str), found
    for expected, value in zip(wanted, found, strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-6)


def test_dims_of_one_name_on_two_inputs_are_compared(tmp_path: Path) -> None:
    original, ours = fused(two_inputs(), tmp_path)
    assert_same(original, ours, lengths(4, 4))
    assert not isinstance(results(original, lengths(4, 6)), str)  # it does not compare them
    assert "dim 0: expected 4, found 6" in results(ours, lengths(4, 6))


def test_dims_of_one_name_that_never_meet_are_left_alone(tmp_path: Path) -> None:
    original, ours = fused(two_inputs(apart=True), tmp_path)
    assert_same(original, ours, lengths(4, 6))
