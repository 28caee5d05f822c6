"""Element rules, one operator at a time, against onnx.reference."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from fuser.element import Index, LiftError, shape_of
from fuser.lift import Inliner, known_element
from fuser.shapes import infer
from tilecore.contract.dtype import from_numpy
from tilecore.contract.evaluate import Evaluator, view_array
from tilecore.contract.expr import Expr, Load, Var
from tilecore.contract.spec import Tensor, View


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def whole(*shape: int, low: int = -9, high: int = 9, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape)


SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -2.5, 3e38], np.float32)


@dataclass(frozen=True)
class Case:
    """One node: its data inputs, constant inputs (None for one left out), attributes."""

    op: str
    data: tuple[np.ndarray, ...]
    constants: tuple[np.ndarray | None, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    opset: int = 21
    outputs: int = 1

    def __str__(self) -> str:
        sizes = "_".join("x".join(map(str, array.shape)) for array in self.data)
        return f"{self.op}_{self.opset}_{sizes}_{'_'.join(map(str, self.attributes.values()))}"


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


X = normal(2, 3, 4)
CASES = (
    Case("Transpose", (X,), attributes={"perm": [2, 0, 1]}),
    Case("Transpose", (X,)),
    Case("Reshape", (X,), (ints(6, 4),)),
    Case("Reshape", (normal(2, 6, 4),), (ints(2, 3, 2, 4),)),
    Case("Reshape", (normal(4, 6),), (ints(3, 8),)),
    Case("Reshape", (normal(2, 3, 4),), (ints(0, 2, -1),)),
    Case("Reshape", (normal(1, 4, 1),), (ints(2, 1, 2),)),
    Case("Flatten", (X,), attributes={"axis": 2}),
    Case("Squeeze", (normal(2, 1, 3, 1),), (ints(1),)),
    Case("Unsqueeze", (X,), (ints(0, -1),)),
    Case("Unsqueeze", (X,), attributes={"axes": [1]}, opset=11),
    Case("Expand", (normal(3, 1),), (ints(2, 1, 4),)),
    Case("Tile", (normal(2, 3),), (ints(2, 3),)),
    Case("Concat", (normal(2, 2), normal(2, 1, seed=1), normal(2, 3, seed=2)), attributes={"axis": -1}),
    Case("Split", (normal(2, 7),), (ints(2, 4, 1),), {"axis": 1}, outputs=3),
    Case("Slice", (normal(5, 6),), (ints(1, -2), ints(4, 9), ints(0, 1), ints(2, 1))),
    Case("Slice", (normal(5, 6),), (ints(-1), ints(-9), ints(1), ints(-2))),
    Case("Slice", (normal(5, 6),), attributes={"starts": [1], "ends": [100], "axes": [1]}, opset=9),
    Case("Gather", (X, whole(2, 2, low=-3, high=3)), attributes={"axis": 1}),
    Case("GatherElements", (normal(3, 4), whole(2, 4, low=-3, high=3)), attributes={"axis": 0}),
    Case("GatherND", (normal(2, 3, 4), whole(2, 5, 2, low=0, high=2)), attributes={"batch_dims": 0}),
    Case("GatherND", (normal(2, 3, 4), whole(2, 5, 1, low=0, high=3)), attributes={"batch_dims": 1}),
    Case("DepthToSpace", (normal(1, 8, 2, 3),), attributes={"blocksize": 2}),
    Case("DepthToSpace", (normal(1, 8, 2, 3),), attributes={"blocksize": 2, "mode": "CRD"}),
    Case("SpaceToDepth", (normal(1, 2, 4, 6),), attributes={"blocksize": 2}),
    Case("Pad", (normal(2, 3),), (ints(1, 0, 0, 2), np.array(7, np.float32))),
    Case("Trilu", (normal(3, 5),), (np.array(1),), {"upper": 1}),
    Case("Trilu", (normal(5, 3),), (np.array(-1),), {"upper": 0}),
    Case("OneHot", (whole(4, low=-5, high=5),), (np.array(5), np.array([2.0, 3.0], np.float32)), {"axis": 0}),
    Case("EyeLike", (normal(3, 4),), attributes={"k": 1}),
    *(Case(op, (SPECIAL,)) for op in ("Abs", "Neg", "Exp", "Sign", "Floor", "Ceil", "Relu", "IsNaN", "IsInf")),
    *(Case(op, (normal(7),)) for op in ("Sqrt", "Log", "Sin", "Cos", "Tanh", "Sigmoid", "Reciprocal", "Round", "Erf")),
    *(Case(op, (normal(7),)) for op in ("Gelu", "Elu", "Selu", "Celu", "Softplus", "Softsign", "Mish", "HardSwish")),
    *(Case(op, (normal(7),)) for op in ("HardSigmoid", "LeakyRelu", "ThresholdedRelu", "Shrink")),
    Case("Gelu", (normal(7),), attributes={"approximate": "tanh"}),
    Case("PRelu", (normal(2, 7), normal(7, seed=1))),
    *(Case(op, (normal(2, 1, 3), normal(4, 1, seed=1))) for op in ("Add", "Sub", "Mul", "Div", "Less", "Equal")),
    *(Case(op, (normal(3, 1), normal(4, seed=1), normal(1, seed=2))) for op in ("Max", "Min", "Sum")),
    Case("Mean", (normal(3), normal(3, seed=1), normal(3, seed=2))),
    *(Case(op, (SPECIAL, SPECIAL[::-1].copy())) for op in ("Max", "Min", "LessOrEqual", "Greater", "GreaterOrEqual")),
    Case("Div", (whole(20), whole(20, low=1, seed=1))),
    Case("Div", (whole(20), -whole(20, low=1, seed=1))),
    Case("Mod", (whole(20), -whole(20, low=1, seed=1))),
    Case("Mod", (whole(20), -whole(20, low=1, seed=1)), attributes={"fmod": 1}),
    Case("Pow", (normal(5),), (np.array(2.0, np.float32),)),
    Case("Pow", (normal(5),), (np.array(3.0, np.float32),)),
    Case("Pow", (normal(5),), (np.array(4.0, np.float32),)),
    Case("Pow", (whole(5),), (np.array(2.0, np.float32),)),
    Case("Clip", (SPECIAL[1:],), (np.array(-1, np.float32), np.array(2, np.float32))),
    Case("Clip", (normal(5),), (None, np.array(0, np.float32))),
    Case("Clip", (normal(5),), attributes={"min": -0.5, "max": 0.5}, opset=6),
    Case("Where", (whole(2, 1) > 0, normal(3), normal(2, 3, seed=1))),
    Case("And", (whole(4) > 0, whole(4, seed=1) > 0)),
    Case("Xor", (whole(4) > 0, whole(4, seed=1) > 0)),
    Case("Not", (whole(4) > 0,)),
    Case("Cast", (normal(6) * 5,), attributes={"to": onnx.TensorProto.INT64}),
    Case("Cast", (whole(6),), attributes={"to": onnx.TensorProto.BOOL}),
    Case("IsInf", (SPECIAL,), attributes={"detect_negative": 0}),
    Case("Dropout", (normal(5),)),
    Case("BatchNormalization", (normal(2, 3, 4),), (*(normal(3, seed=i) for i in (1, 2, 3)), np.abs(normal(3)))),
    Case(
        "DequantizeLinear", (whole(2, 3).astype(np.int8), normal(3), whole(3).astype(np.int8)), attributes={"axis": 1}
    ),
)


def model_of(case: Case) -> onnx.ModelProto:
    kind = helper.np_dtype_to_tensor_dtype
    names = [f"x{i}" for i in range(len(case.data))]
    inputs = [helper.make_tensor_value_info(n, kind(a.dtype), a.shape) for n, a in zip(names, case.data, strict=True)]
    constants = {f"c{i}": array for i, array in enumerate(case.constants) if array is not None}
    names += ["" if array is None else f"c{i}" for i, array in enumerate(case.constants)]
    outputs = [f"y{i}" for i in range(case.outputs)]
    node = helper.make_node(case.op, names, outputs, name="node", **case.attributes)
    graph = helper.make_graph(
        [node],
        "case",
        inputs,
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", case.opset)], ir_version=8)


def lifted(case: Case) -> list[View]:
    """Each output of the case as a view over its inputs."""
    model = ir.from_proto(model_of(case))
    shapes = infer(model)

    def leaf(value: ir.Value, index: Index) -> Expr | None:
        name = value.name or ""
        if known_element(value, index, shapes) is not None or name[0] not in "xc":
            return None
        array = (case.data if name[0] == "x" else case.constants)[int(name[1:])]
        assert array is not None
        return Load(Tensor(name, from_numpy(array.dtype), shape_of(value, shapes)), index)

    reader = Inliner(shapes, case.opset, leaf)
    views: list[View] = []
    for value in model.graph.outputs:
        axes = tuple(Var(f"i{axis}", extent=dim) for axis, dim in enumerate(shape_of(value, shapes)))
        views.append(View(value.name or "", axes, reader.at(value, axes)))
    return views


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule_agrees_with_the_reference(case: Case) -> None:
    feeds = {f"x{i}": array for i, array in enumerate(case.data)}
    with np.errstate(all="ignore"):
        expected = [np.asarray(array) for array in ReferenceEvaluator(model_of(case)).run(None, feeds)]
    run = Evaluator(feeds | {f"c{i}": array for i, array in enumerate(case.constants)}, {}, wide=False)
    for view, array in zip(lifted(case), expected, strict=True):
        actual = view_array(view, run)
        assert actual.shape == array.shape
        assert actual.dtype == array.dtype
        np.testing.assert_allclose(actual, array, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("opset", [6, 11, 21])
@pytest.mark.parametrize("bounds", [{}, {"min": -1.0}, {"max": 1.0}], ids=str)
def test_what_clip_is_not_told_is_the_last_finite_number(opset: int, bounds: dict[str, float]) -> None:
    """Against ONNX Runtime: onnx.reference lets infinities through."""
    given = tuple(np.array(bounds[key], np.float32) if key in bounds else None for key in ("min", "max"))
    case = Case("Clip", (SPECIAL[1:],), given if opset > 6 else (), bounds if opset == 6 else {}, opset)
    session = ort.InferenceSession(model_of(case).SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x0": SPECIAL[1:]})
    (view,) = lifted(case)
    constants = {f"c{i}": array for i, array in enumerate(case.constants) if array is not None}
    actual = view_array(view, Evaluator({"x0": SPECIAL[1:]} | constants, {}, wide=False))
    np.testing.assert_array_equal(actual, np.asarray(expected))


def test_splitting_an_axis_leaves_the_others_alone() -> None:
    (view,) = lifted(Case("Reshape", (normal(2, 5, 12),), (ints(2, 5, 3, 4),)))
    assert str(view.value) == "x0[i0, i1, ((i2 * 4) + i3)]"


def test_unknown_operator_is_named() -> None:
    with pytest.raises(LiftError, match=r"CumSum.*it sums what differs from element to element"):
        lifted(Case("CumSum", (normal(3),), (np.array(0),)))


def test_training_dropout_is_refused() -> None:
    case = Case("Dropout", (normal(3),), (np.array(0.5, np.float32), np.array(True)))
    with pytest.raises(LiftError, match="training mode"):
        lifted(case)


def test_reflected_padding_is_refused() -> None:
    with pytest.raises(LiftError, match="only constant padding"):
        lifted(Case("Pad", (normal(3),), (ints(1, 1),), {"mode": "reflect"}))


BANDS = {
    "causal": np.tril(np.ones((6, 6), bool)),
    "window": np.tril(np.triu(np.ones((6, 6), bool), -2)),
    "additive": np.triu(np.full((4, 7), -np.inf, np.float32), 1),
    "zeros": np.zeros((5, 5), np.float32),
    "counting": np.arange(24)[None],
    "grid": np.arange(24).reshape(4, 6) * 3 + 5,
}


@pytest.mark.parametrize("name", BANDS)
def test_patterned_constants_need_no_load(name: str) -> None:
    constant = BANDS[name]
    (view,) = lifted(Case("Add" if constant.dtype != bool else "And", (np.zeros_like(constant),), (constant,)))
    assert "c0" not in str(view.value)
    run = Evaluator({"x0": np.zeros_like(constant) if constant.dtype != bool else np.ones_like(constant)}, {})
    np.testing.assert_array_equal(view_array(view, run), constant)


def test_irregular_constants_are_not_taken_for_a_pattern() -> None:
    mask = np.tril(np.ones((6, 6), bool))
    mask[3, 1] = False
    (view,) = lifted(Case("And", (mask,), (mask,)))
    assert "c0[" in str(view.value)
