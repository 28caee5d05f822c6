"""The double precision evaluator: more exact than float32, with the overflows and NaNs of float32."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from models import bert
from runtime.oracle import OracleError, evaluate


def one_op(
    op: str, x: np.ndarray, *, opset: int = 17, weights: dict[str, np.ndarray] | None = None, **attributes: Any
) -> onnx.ModelProto:
    weights = weights or {}
    node = helper.make_node(op, ["x", *weights], ["y"], name="the_node", **attributes)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def value_of(op: str, x: np.ndarray, **rest: Any) -> np.ndarray:
    return evaluate(one_op(op, x, **rest), Path(), {"x": x}, ["y"]).values["y"]


def test_products_are_exact_to_double_precision() -> None:
    random = np.random.default_rng(0)
    x, w = random.standard_normal((3, 500)).astype(np.float32), random.standard_normal((500, 4)).astype(np.float32)
    found = evaluate(one_op("MatMul", x, weights={"w": w}), Path(), {"x": x}, ["y"])
    np.testing.assert_allclose(found.values["y"], x.astype(np.float64) @ w.astype(np.float64), rtol=1e-13)
    assert found.longest == 500


def test_erf_is_not_rounded_to_single_precision() -> None:
    (value,) = value_of("Erf", np.array([0.5], np.float32))
    assert value == pytest.approx(0.5204998778130465, abs=1e-15)


@pytest.mark.parametrize(("dtype", "big"), [(np.float32, 3e38), (np.float16, 60000.0)])
def test_values_overflow_as_the_model_does(dtype: type, big: float) -> None:
    x = np.array([big, -big, 1.0], dtype)
    np.testing.assert_array_equal(value_of("Add", x, weights={"w": x}), [np.inf, -np.inf, 2.0])


def test_casts_keep_double_precision_but_the_target_overflow() -> None:
    x = np.array([1.0 + 2**-20, 1e6], np.float32)
    np.testing.assert_array_equal(value_of("Cast", x, to=TensorProto.FLOAT16), [1.0 + 2**-20, np.inf])


def test_softmax_before_opset_13_normalises_the_flattened_rows() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    old = value_of("Softmax", x, opset=12, axis=1)
    np.testing.assert_allclose(old.sum(axis=(1, 2)), 1.0, rtol=1e-12)
    np.testing.assert_allclose(value_of("Softmax", x, opset=12), old)
    np.testing.assert_allclose(value_of("Softmax", x, opset=13, axis=1).sum(axis=1), 1.0, rtol=1e-12)


@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 2, 3), (2, 3, 0)], ids=str)
def test_softmax_before_opset_13_of_nothing_is_empty(shape: tuple[int, ...]) -> None:
    assert value_of("Softmax", np.zeros(shape, np.float32), opset=11, axis=2).shape == shape


def test_gather_elements_takes_fewer_rows_than_the_data_has() -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    indices = np.array([[3, 0], [1, 1]])
    np.testing.assert_array_equal(value_of("GatherElements", x, weights={"i": indices}, axis=1), [[3, 0], [5, 5]])


def test_branches_read_outer_values_and_weights() -> None:
    def branch(name: str, op: str) -> onnx.GraphProto:
        node = helper.make_node(op, ["x", "w"], [name])
        return helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])])

    graph = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], then_branch=branch("a", "Add"), else_branch=branch("b", "Mul"))],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [2]),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
        [numpy_helper.from_array(np.array([3.0, 4.0], np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    x = np.array([1.0, 2.0], np.float32)
    for flag, expected in ((True, [4.0, 6.0]), (False, [3.0, 8.0])):
        values = evaluate(model, Path(), {"x": x, "c": np.array(flag)}, ["y"]).values
        np.testing.assert_array_equal(values["y"], expected)


def test_external_weights_are_read_when_used(tmp_path: Path) -> None:
    size = bert.Size(layers=1, hidden=16, heads=2, vocab=20)
    feeds = {name: np.ones((2, 5), np.int64) for name in bert.INPUTS}
    path = bert.build(tmp_path / "bert.onnx", size=size, external=True)
    bare = onnx.load(str(path), load_external_data=False)
    found = evaluate(bare, tmp_path, feeds, ["last_hidden_state"]).values["last_hidden_state"]
    inside = evaluate(bert.model(size=size), Path(), feeds, ["last_hidden_state"]).values["last_hidden_state"]
    np.testing.assert_array_equal(found, inside)


def test_unknown_operator_is_named() -> None:
    x = np.ones((2, 2), np.float32)
    model = one_op("Frobnicate", x)
    with pytest.raises(OracleError, match=r"node 'the_node' \(Frobnicate\) cannot be evaluated"):
        evaluate(model, Path(), {"x": x}, ["y"])
