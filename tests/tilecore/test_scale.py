"""The factor of all scores moves to the queries only where every use of the dot product has it, and moves once."""

from dataclasses import replace

import numpy as np
import pytest
from tile_specs import AttentionForm, attention_case

from tilecore.contract.evaluate import evaluate
from tilecore.contract.expr import Expr, Var, binary, unary
from tilecore.contract.spec import AttentionSpec
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
