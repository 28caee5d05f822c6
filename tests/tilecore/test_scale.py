"""The factor of all scores moves to the queries only where every use of the dot product has it, and moves once."""

from dataclasses import replace

import numpy as np
import pytest
from tile_specs import AttentionForm, attention_case

from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import evaluate
from tilecore.contract.expr import Expr, Var, binary, cast, const, select, unary
from tilecore.contract.spec import TOP, TOTAL, AttentionSpec
from tilecore.scale import scale_queries


def with_score(score: Expr) -> tuple[AttentionSpec, dict[str, np.ndarray]]:
    case = attention_case(AttentionForm(), np.random.default_rng(0))
    assert isinstance(case.spec, AttentionSpec)
    return replace(case.spec, score=score), dict(case.arrays)


def raw() -> Var:
    spec = attention_case(AttentionForm(), np.random.default_rng(0)).spec
    assert isinstance(spec, AttentionSpec)
    return spec.raw


@pytest.mark.parametrize(
    "score",
    [
        raw() * 0.3,
        binary("div", raw(), 7.0),
        raw() * 0.3 * 0.25,
        unary("tanh", raw() * 0.5 * 0.2) * 5.0,
        binary("max", raw() * 0.5, unary("tanh", raw() * 0.5)),
    ],
)
def test_a_shared_factor_moves(score: Expr) -> None:
    spec, arrays = with_score(score)
    moved = scale_queries(spec)
    assert isinstance(moved, AttentionSpec)
    assert moved.q != spec.q
    for name, value in evaluate(spec, arrays).items():
        np.testing.assert_allclose(evaluate(moved, arrays)[name], value, rtol=1e-5, atol=1e-5)


def test_a_dot_product_that_is_given_out_stays() -> None:
    spec, _ = with_score(raw() * 0.3)
    shown = replace(spec.outputs[0], value=spec.raw)
    kept = replace(spec, outputs=(*spec.outputs, shown))
    assert scale_queries(kept) is kept


@pytest.mark.parametrize(
    "score", [raw(), raw() + raw() * 0.5, raw() * 0.5 + raw() * 0.25, raw() * 0.0, raw() * float("inf")]
)
def test_anything_else_stays(score: Expr) -> None:
    spec, _ = with_score(score)
    assert scale_queries(spec) is spec


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16])
def test_queries_of_16_bits_stay(dtype: DType) -> None:
    """Rounded with the factor they are other numbers than the model's, and a softmax of large scores shows that."""
    spec, _ = with_score(raw() * 0.3)
    narrow = replace(spec, q=replace(spec.q, value=cast(spec.q.value, dtype)))
    assert scale_queries(narrow) is narrow


def chosen(no: Expr) -> Expr:
    axes = with_score(raw())[0].score_axes
    return select(binary("le", axes[3], axes[2]), raw() * 0.3, no)


MINUS_INFINITY = const(-np.inf, DType.F32)


@pytest.mark.parametrize("score", [raw() * 0.3, chosen(MINUS_INFINITY)])
def test_exponentials_of_plain_dot_products_are_of_base_2(score: Expr) -> None:
    spec, arrays = with_score(score)
    moved = scale_queries(spec)
    assert isinstance(moved, AttentionSpec)
    assert moved.binary
    for name, value in evaluate(spec, arrays).items():
        np.testing.assert_allclose(evaluate(moved, arrays)[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("score", [raw() * 0.3 + 1.0, chosen(const(-1e30, DType.F32)), unary("tanh", raw() * 0.3)])
def test_other_scores_keep_their_base(score: Expr) -> None:
    moved = scale_queries(with_score(score)[0])
    assert isinstance(moved, AttentionSpec)
    assert not moved.binary


@pytest.mark.parametrize("var", [TOP, TOTAL])
def test_statistics_that_are_given_out_keep_their_base(var: Var) -> None:
    spec, arrays = with_score(raw() * 0.3)
    told = replace(spec, outputs=(replace(spec.outputs[0], value=spec.acc + var), *spec.outputs[1:]))
    moved = scale_queries(told)
    assert isinstance(moved, AttentionSpec)
    assert not moved.binary
    for name, value in evaluate(told, arrays).items():
        np.testing.assert_allclose(evaluate(moved, arrays)[name], value, rtol=1e-5, atol=1e-5)


def test_a_sink_keeps_the_base() -> None:
    case = attention_case(AttentionForm(sink=True), np.random.default_rng(0))
    assert isinstance(case.spec, AttentionSpec)
    moved = scale_queries(replace(case.spec, score=case.spec.raw * 0.3))
    assert isinstance(moved, AttentionSpec)
    assert not moved.binary
