"""The three kernels against the definition of their specs: layouts, odd sizes, blocks, masks, NaN and inf."""

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tile_specs import MASKS, AttentionForm, Case, attention_case, contraction_case, row_case, siblings_case

from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import evaluate
from tilecore.contract.expr import Expr, unary
from tilecore.contract.spec import TOP, TOTAL, AttentionSpec, Place, Result, Tensor, check, extent_of
from tilecore.interpret import interpret
from tilecore.ir import For, Program, statements
from tilecore.library import kernel_for
from tilecore.library.attention import attention
from tilecore.library.online_softmax import join_parts, raise_tops, weight
from tilecore.library.score import score_of
from tilecore.trace import trace

TOLERANCE = 1e-6  # of the kernels' f32 constants (log2 e); everything else is float64


def traced(case: Case, extents: Mapping[str, int] | None) -> Program:
    kernel, operands = kernel_for(case.spec)
    return trace(kernel, inputs=case.spec.inputs, operands=operands, extents=extents)


def compare(case: Case, **extents: int) -> None:
    got = interpret(traced(case, extents), case.arrays)
    want = evaluate(case.spec, case.arrays)
    assert list(got) == list(want)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True, err_msg=name)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("block_m", "block_n"), [(3, 2), (4, 8), (16, 5)])
def test_attention_with_each_mask(mask: str, block_m: int, block_n: int) -> None:
    form = AttentionForm(mask=mask, batch=1 + (block_m == 16), queries=7, keys=11)
    compare(attention_case(form, np.random.default_rng(1)), block_m=block_m, block_n=block_n)


@pytest.mark.parametrize("poison", ["query-nan", "query-inf", "query-minus", "key-nan", "key-inf", "key-minus"])
@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
@pytest.mark.parametrize("guard", [False, True])
def test_attention_carries_nan_and_inf_as_softmax_does(poison: str, mask: str, guard: bool) -> None:
    form = AttentionForm(mask=mask, poison=poison, guard=guard, batch=1, heads=1)
    compare(attention_case(form, np.random.default_rng(2)), block_m=4, block_n=3)


@pytest.mark.parametrize("poison", ["value-nan", "value-inf"])
@pytest.mark.parametrize("mask", ["none", "padding"])
@pytest.mark.parametrize("guard", [False, True])
def test_attention_carries_nan_and_inf_of_values(poison: str, mask: str, guard: bool) -> None:
    form = AttentionForm(mask=mask, guard=guard, poison=poison, heads=1)
    compare(attention_case(form, np.random.default_rng(3)), block_m=4, block_n=3)


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("logit", [None, 0.5, np.inf, -np.inf, np.nan])
def test_rows_without_any_weight(guard: bool, logit: float | None) -> None:
    form = AttentionForm(mask="padding", heads=1, guard=guard, sink=logit is not None)
    case = attention_case(form, np.random.default_rng(4))
    assert np.isneginf(case.arrays["mask"][0]).all()
    if logit is not None:
        case.arrays["logit"][0] = logit
    compare(case, block_m=4, block_n=3)


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("sink", [False, True])
def test_attention_over_no_keys_is_zero(guard: bool, sink: bool) -> None:
    case = attention_case(AttentionForm(keys=0, guard=guard, sink=sink), np.random.default_rng(5))
    compare(case, block_m=4, block_n=3)
    assert not interpret(traced(case, {"block_m": 4, "block_n": 3}), case.arrays)["out"].any()


@pytest.mark.parametrize("form", [AttentionForm(queries=0), AttentionForm(batch=0)])
def test_attention_of_nothing(form: AttentionForm) -> None:
    compare(attention_case(form, np.random.default_rng(6)), block_m=4, block_n=3)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    form=st.builds(
        AttentionForm,
        batch=st.integers(1, 2),
        heads=st.sampled_from([2, 4]),
        groups=st.sampled_from([1, 2]),
        queries=st.integers(1, 9),
        keys=st.integers(1, 12),
        depth=st.sampled_from([2, 4]),
        mask=st.sampled_from(MASKS),
        rope=st.booleans(),
        softcap=st.booleans(),
        sink=st.booleans(),
        guard=st.booleans(),
        two_outputs=st.booleans(),
    ),
    block_m=st.integers(1, 8),
    block_n=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_any_attention(form: AttentionForm, block_m: int, block_n: int, seed: int) -> None:
    compare(attention_case(form, np.random.default_rng(seed)), block_m=block_m, block_n=block_n)


@pytest.mark.parametrize("mask", ["none", "causal", "padding", "rows"])
@pytest.mark.parametrize("known", [TOP, TOTAL, TOP + unary("log", TOTAL)], ids=["maximum", "sum", "logarithm"])
def test_row_statistics_of_bounded_scores_are_those_under_the_maximum(mask: str, known: Expr) -> None:
    """Scores under a soft-cap need no maximum, unless somebody wants to know it or the sum under it."""
    case = attention_case(AttentionForm(mask=mask, softcap=True, keys=11), np.random.default_rng(8))
    assert isinstance(case.spec, AttentionSpec)
    assert score_of(case.spec).bounded(DType.F32) is (mask != "padding")  # whose floats may be large
    axes = case.spec.outputs[0].place.axes
    place = Place(Tensor("known", DType.F32, tuple(extent_of(axis) for axis in axes)), axes, axes)
    spec = replace(case.spec, outputs=(*case.spec.outputs, Result(place, known)))
    check(spec)
    assert not score_of(spec).bounded(DType.F32)
    compare(Case(spec, case.arrays), block_m=4, block_n=3)


def key_loop(program: Program) -> For:
    return next(stmt for stmt in statements(program.body) if isinstance(stmt, For))


@pytest.mark.parametrize(
    ("mask", "start", "stop"),
    [
        ("none", "0", "(((K + -1) // block_n) + 1)"),
        ("causal", "0", "(((min(K, ((block_m * m) + block_m)) + -1) // block_n) + 1)"),
        ("rows", "0", "(((K + -1) // block_n) + 1)"),
        ("select", "0", "(((K + -1) // block_n) + 1)"),
    ],
)
def test_key_loop_is_clipped_by_index_predicates_alone(mask: str, start: str, stop: str) -> None:
    loop = key_loop(traced(attention_case(AttentionForm(mask=mask), np.random.default_rng(0)), None))
    assert str(loop.start) == start
    assert str(loop.var.extent) == stop


def test_a_window_clips_the_key_loop_at_both_ends() -> None:
    loop = key_loop(traced(attention_case(AttentionForm(mask="window"), np.random.default_rng(0)), None))
    assert str(loop.start) == "(max(0, ((block_m * m) + -2)) // block_n)"
    assert str(loop.var.extent) == "(((min(K, ((block_m * m) + block_m)) + -1) // block_n) + 1)"
    loop = key_loop(traced(attention_case(AttentionForm(mask="near"), np.random.default_rng(0)), None))
    assert str(loop.start) == "(max(0, ((block_m * m) + -2)) // block_n)"
    assert str(loop.var.extent) == "(((min(K, (((block_m * m) + block_m) + 2)) + -1) // block_n) + 1)"


def test_a_bias_after_the_causal_select_stops_the_clipping() -> None:
    """−inf plus a bias that could be NaN or +inf is not −inf: every key counts."""
    loop = key_loop(traced(attention_case(AttentionForm(mask="both"), np.random.default_rng(0)), None))
    assert str(loop.var.extent) == "(((K + -1) // block_n) + 1)"


def lines_of(function: Callable[..., object]) -> int:
    """Lines of text without the description, comments and blank lines."""
    text = textwrap.dedent(inspect.getsource(function)).replace(f'"""{function.__doc__}"""', "")
    return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("#"))


def test_the_attention_kernel_is_short() -> None:
    """With all that it calls for its softmax."""
    assert sum(map(lines_of, (attention, raise_tops, join_parts, weight))) <= 71


@pytest.mark.parametrize("seed", range(12))
def test_matmul(seed: int) -> None:
    rows, columns, depth = ((1, 5, 3), (9, 7, 11), (4, 16, 8))[seed // 4]
    case = contraction_case(seed, rows=rows, columns=columns, depth=depth, batch=1 + seed % 2)
    compare(case, block_m=1 + seed % 5, block_n=3 + seed % 4, block_k=1 + seed % 7)


@pytest.mark.parametrize("rows", [0, 5])
def test_matmul_over_no_depth(rows: int) -> None:
    compare(contraction_case(1, rows=rows, columns=3, depth=0), block_m=4, block_n=4, block_k=4)


@pytest.mark.parametrize(("kind", "count"), [("gated", 2), ("apart", 3)])
def test_products_that_share_their_left_operand(kind: str, count: int) -> None:
    compare(siblings_case(kind, rows=5, columns=7, depth=6, count=count), block_m=4, block_n=4, block_k=4)


def test_matmul_carries_nan_and_inf() -> None:
    case = contraction_case(1, rows=5, columns=6, depth=7)
    case.arrays["a"][1, 0, 2] = np.nan
    case.arrays["a"][3, 0, 2] = np.inf
    compare(case, block_m=2, block_n=4, block_k=3)


@pytest.mark.parametrize("kind", ["layernorm", "softmax", "pointwise", "reductions", "index"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 5), (4, 16), (0, 3), (3, 0)])
def test_row(kind: str, dynamic: bool, rows: int, columns: int) -> None:
    compare(row_case(kind, rows=rows, columns=columns, dynamic=dynamic), block_m=3)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_row_carries_nan_and_inf(value: float) -> None:
    case = row_case("softmax", rows=4, columns=5, dynamic=True)
    case.arrays["x"][1, 2] = value
    compare(case, block_m=3)


def test_narrow_types_round_as_the_program_says() -> None:
    case = contraction_case(0, rows=5, columns=6, depth=7)
    got = interpret(traced(case, {"block_m": 4, "block_n": 4, "block_k": 4}), case.arrays, wide=False)
    assert got["c"].dtype == np.float32
    assert got["t"].dtype == np.float16
    want = evaluate(case.spec, case.arrays)
    np.testing.assert_allclose(got["t"].astype(np.float64), want["t"], rtol=2**-10, atol=2**-10)
