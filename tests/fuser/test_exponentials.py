"""Softmax written with exponentials: wherever the division stands, with or without a maximum, it is one region.

The region is checked in float64, and in float32 for where it is NaN: rows of −inf alone, of the lowest float alone
(whose exponentials are all 0), and rows whose exponentials overflow.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from onnx import ModelProto, TensorProto, helper
from region_oracle import Scanned, scanned

from models.graph import GraphWriter, write
from runtime.compile import optimize
from runtime.options import Options
from runtime.oracle import evaluate as evaluate_graph
from runtime.verify import verify
from tilecore.contract.evaluate import evaluate

AXIS = [-1]
Spelling = Callable[[GraphWriter, str, str], str]  # scores, values → result


def total(g: GraphWriter, x: str, kind: str = "ReduceSum", *, keep: bool = True) -> str:
    value = g.op(kind, x, g.constant(AXIS), keepdims=int(keep))
    return value if keep else g.op("Unsqueeze", value, g.constant(AXIS))


def shifted(g: GraphWriter, s: str) -> str:
    return g.op("Sub", s, total(g, s, "ReduceMax"))


def before(g: GraphWriter, s: str, v: str) -> str:
    e = g.op("Exp", s)
    return g.op("MatMul", g.op("Div", e, total(g, e)), v)


def before_by_reciprocal(g: GraphWriter, s: str, v: str) -> str:
    e = g.op("Exp", s)
    return g.op("MatMul", g.op("Mul", e, g.op("Reciprocal", total(g, e, keep=False))), v)


def before_by_two_exponentials(g: GraphWriter, s: str, v: str) -> str:
    return g.op("MatMul", g.op("Div", g.op("Exp", s), total(g, g.op("Exp", s))), v)


def after(g: GraphWriter, s: str, v: str) -> str:
    e = g.op("Exp", s)
    return g.op("Div", g.op("MatMul", e, v), total(g, e))


def after_by_two_exponentials(g: GraphWriter, s: str, v: str) -> str:
    return g.op("Div", g.op("MatMul", g.op("Exp", s), v), total(g, g.op("Exp", s), keep=False))


def after_with_a_maximum(g: GraphWriter, s: str, v: str) -> str:
    e = g.op("Exp", shifted(g, s))
    return g.op("Div", g.op("MatMul", e, v), total(g, e))


def with_epsilon(g: GraphWriter, s: str, v: str) -> str:
    e = g.op("Exp", s)
    return g.op("Div", g.op("MatMul", e, v), g.op("Add", total(g, e), g.constant(1e-3)))


def with_epsilon_before(g: GraphWriter, s: str, v: str) -> str:
    e = g.op("Exp", shifted(g, s))
    return g.op("MatMul", g.op("Div", e, g.op("Add", total(g, e), g.constant(0.5))), v)


def by_logarithm(g: GraphWriter, s: str, v: str) -> str:
    return g.op("MatMul", g.op("Exp", g.op("Sub", s, g.op("Log", total(g, g.op("Exp", s))))), v)


def by_logarithm_of_shifted(g: GraphWriter, s: str, v: str) -> str:
    x = shifted(g, s)
    return g.op("MatMul", g.op("Exp", g.op("Sub", x, g.op("Log", total(g, g.op("Exp", x))))), v)


def guarded(g: GraphWriter, s: str, v: str) -> str:
    e = g.op("Exp", s)
    p = g.op("Div", e, total(g, e))
    return g.op("MatMul", g.op("Where", g.op("IsNaN", p), g.constant(0.0), p), v)


SPELLED = [
    before, before_by_reciprocal, before_by_two_exponentials, after, after_by_two_exponentials, after_with_a_maximum,
    with_epsilon, with_epsilon_before, by_logarithm, by_logarithm_of_shifted, guarded,
]  # fmt: skip


def model(*spellings: Spelling, kept: bool = False) -> ModelProto:
    """softmax(q · kᵀ + mask) · v as each of `spellings` has it; with `kept`, the weights are a result too."""
    g = GraphWriter(18)
    q = g.input("q", np.float32, ("batch", 2, 5, 8))
    k, v = (g.input(name, np.float32, ("batch", 2, "keys", 8)) for name in "kv")
    mask = g.input("mask", np.float32, ("batch", 1, 5, "keys"))
    for number, spelled in enumerate(spellings):
        scores = g.op("Add", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), mask)
        g.op("Identity", spelled(g, scores, v), out=f"y{number or ''}")
        g.output(f"y{number or ''}", np.float32, ("batch", 2, 5, 8))
    built = g.finish()
    if kept:
        weights = next(node for node in reversed(built.graph.node) if node.op_type == "MatMul").input[0]
        shape = ("batch", 2, 5, "keys")
        built.graph.output.append(helper.make_tensor_value_info(weights, TensorProto.FLOAT, shape))
    return built


def attention(spelled: Spelling, folder: Path, *, kept: bool = False) -> Scanned:
    return scanned(model(spelled, kept=kept), folder)


def feeds(*, keys: int = 7, large: float = 0.0) -> dict[str, np.ndarray]:
    """Random operands; a mask with holes, a row of −inf, one of the lowest float, and one raised by `large`."""
    random = np.random.default_rng(keys)
    found = {"q": random.standard_normal((2, 2, 5, 8)).astype(np.float32)}
    found |= {name: random.standard_normal((2, 2, keys, 8)).astype(np.float32) for name in "kv"}
    mask = np.where(random.random((2, 1, 5, keys)) < 0.3, -np.inf, 0.0).astype(np.float32)
    mask[1, 0, 2] = -np.inf
    mask[0, 0, 1] = np.finfo(np.float32).min
    mask[0, 0, 3] = large
    mask[1, 0, 0] = -80.0  # exponentials of 1e-35
    return found | {"mask": mask}


def check(found: Scanned, given: dict[str, np.ndarray]) -> None:
    """The result in float32, which overflows, as the model's: NaN or infinite where that is, else close to float64."""
    (region,) = found.regions
    names = [value.name or "" for value in region.outputs]
    values = evaluate_graph(ir.to_proto(found.model), Path(), given, names).values
    with np.errstate(all="ignore"):
        narrow = evaluate(region.spec, {tensor.name: given[tensor.name] for tensor in region.spec.inputs}, wide=False)
    for name in names:
        finite = np.isfinite(values[name])
        np.testing.assert_array_equal(np.isfinite(narrow[name]), finite)
        scale = np.abs(values[name][finite]).max(initial=1.0)
        np.testing.assert_allclose(narrow[name][finite], values[name][finite], rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("spelled", SPELLED)
def test_every_spelling_is_one_region(spelled: Spelling, tmp_path: Path) -> None:
    found = attention(spelled, tmp_path)
    (region,) = found.regions
    assert region.kind == "attention"
    assert not found.misses
    check(found, feeds())
    check(found, feeds(keys=1))
    check(found, feeds(large=200.0))


@pytest.mark.parametrize("spelled", [before, after, after_with_a_maximum])
def test_halves_are_one_region_too(spelled: Spelling, tmp_path: Path) -> None:
    """Exponentials above 65,504 are finite in the region, as overflow upwards of 16 bits always is."""
    g = GraphWriter(18)
    q, k, v = (g.input(name, np.float16, ("batch", 2, 6, 8)) for name in "qkv")
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    g.op("Identity", spelled(g, scores, v), out="y")
    g.output("y", np.float16, ("batch", 2, 6, 8))
    found = scanned(g.finish(), tmp_path)
    (region,) = found.regions
    assert region.kind == "attention"
    random = np.random.default_rng(1)
    given = {name: random.standard_normal((2, 2, 6, 8)).astype(np.float16) for name in "qkv"}
    made = evaluate(region.spec, {tensor.name: given[tensor.name] for tensor in region.spec.inputs})["y"]
    wide = {name: array.astype(np.float64) for name, array in given.items()}
    weights = np.exp(wide["q"] @ np.swapaxes(wide["k"], -1, -2))
    expected = weights / weights.sum(axis=-1, keepdims=True) @ wide["v"]
    np.testing.assert_allclose(made, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("spelled", [before, after, after_with_a_maximum, by_logarithm])
def test_weights_that_are_kept_are_a_second_result(spelled: Spelling, tmp_path: Path) -> None:
    found = attention(spelled, tmp_path, kept=True)
    (region,) = found.regions
    assert len(region.outputs) == 2
    check(found, feeds())


def over_queries(g: GraphWriter, s: str, v: str) -> str:
    e = g.op("Exp", s)
    return g.op("Div", g.op("MatMul", e, v), g.op("ReduceSum", e, g.constant([2]), keepdims=1))


def of_other_scores(g: GraphWriter, s: str, v: str) -> str:
    other = g.op("Exp", g.op("Mul", s, g.constant(0.5)))
    return g.op("Div", g.op("MatMul", g.op("Exp", s), v), total(g, other))


def never_divided(g: GraphWriter, s: str, v: str) -> str:
    return g.op("MatMul", g.op("Exp", s), v)


def subtracted(g: GraphWriter, s: str, v: str) -> str:
    e = g.op("Exp", s)
    return g.op("Sub", g.op("MatMul", e, v), total(g, g.op("Tanh", e)))


@pytest.mark.parametrize(
    ("spelled", "reason"),
    [
        (of_other_scores, "ReduceSum is over something else than its scores"),
        (subtracted, "ReduceSum is over something else than its scores"),
        (over_queries, None),
        (never_divided, None),
    ],
)
def test_other_sums_are_no_softmax(spelled: Spelling, reason: str | None, tmp_path: Path) -> None:
    found = attention(spelled, tmp_path)
    assert not found.of("attention")
    missed = [miss for miss in found.misses if miss.kind == "attention"]
    assert [reason in miss.reason for miss in missed if reason] == [True] * bool(reason)


def silent(stage: str) -> None:
    """No progress is shown."""


@pytest.mark.cpu
def test_a_fused_library_computes_them(tmp_path: Path) -> None:
    path, output = write(model(before, after, by_logarithm, guarded), tmp_path / "model.onnx"), tmp_path / "fused.onnx"
    report = optimize(path, output, options=Options.from_environment(), progress=silent)
    assert [region.kind for region in report.regions] == ["attention"] * 4
    for given in (feeds(), feeds(keys=37, large=200.0)):
        assert verify(path, output, inputs=given).ok
