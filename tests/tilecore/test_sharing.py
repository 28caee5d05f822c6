"""Kept copies that neighbouring heads share, and ranges of vector loops where comparisons are settled."""

import numpy as np
import pytest
from tile_specs import AttentionForm, attention_case

from tilecore import language as T
from tilecore.compile import kernel_for, plan_of, prepare
from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import Evaluator
from tilecore.contract.expr import Expr, Load, Op, Var, binary, const, loads, select, substitute, walk
from tilecore.contract.spec import Tensor
from tilecore.loops import Fold, Memory, Put, VectorLoop
from tilecore.lower import lower
from tilecore.settled import settled
from tilecore.target import target_named
from tilecore.trace import trace


@pytest.mark.parametrize(
    ("heads", "groups", "mask", "sharing"),
    [(4, 1, "none", 1), (4, 2, "none", 2), (6, 3, "causal", 3), (4, 4, "bias", 4), (5, 2, "none", 1)],
)
def test_heads_that_share_keys_share_their_copies(heads: int, groups: int, mask: str, sharing: int) -> None:
    """Where the last group is not whole, a group of tasks would reach into the next batch."""
    spec = attention_case(AttentionForm(heads=heads, groups=groups, mask=mask), np.random.default_rng(0)).spec
    packed, _ = prepare(spec)
    function, operands = kernel_for(packed)
    program = trace(function, inputs=packed.inputs, operands=operands, extents={"block_m": 24, "block_n": 32})
    assert lower(plan_of(program, target_named("x86-64-v3"))).sharing == sharing


def test_a_grid_without_points_shares_nothing() -> None:
    def kernel(
        A: T.Tensor((96, 64), "float32"),  # type: ignore[valid-type]
        B: T.Tensor((64, 32), "float32"),  # type: ignore[valid-type]
        C: T.Tensor((96, 32), "float32"),  # type: ignore[valid-type]
    ) -> None:
        with T.Kernel(2, 0) as (m, _):
            a = T.alloc_shared((48, 64), "float32")
            b = T.alloc_shared((64, 32), "float32")
            c = T.alloc_fragment((48, 32), "float32")
            T.copy(A[m * 48, 0], a)
            T.copy(B, b)
            T.gemm(a, b, c, clear_accum=True)
            T.copy(c, C[m * 48, 0])

    assert lower(plan_of(trace(kernel), target_named("x86-64-v3"))).sharing == 1


J, ROW = Var("j"), Var("row")
SCORES, RESULT = Memory("scores", DType.F32, const(64), "scratch"), Memory("result", DType.F32, const(64), "scratch")
SCORE = Load(SCORES, (J,))
HIDDEN = const(-np.inf, DType.F32)


@pytest.mark.parametrize(
    ("value", "least"),
    [
        (select(binary("le", J, ROW), SCORE, HIDDEN), 20),
        (select(binary("gt", J, ROW), HIDDEN, SCORE), 20),
        (select(binary("ge", J, ROW - 5), SCORE, HIDDEN), 45),
        (select(binary("and", binary("lt", ROW - J, const(7)), binary("le", J, ROW)), SCORE, HIDDEN), 7),
        (select(binary("or", binary("lt", J, const(3)), binary("ge", J, ROW)), SCORE, HIDDEN), 0),
        (select(binary("lt", J, ROW), SCORE, select(binary("lt", J, ROW + 9), SCORE * 2.0, HIDDEN)), 9),
    ],
)
def test_a_settled_body_gives_the_same_in_its_range(value: Expr, least: int) -> None:
    loop = VectorLoop(J, const(64), (Put(RESULT, J, value), Fold("sum", Var("total"), value)))
    (found,) = settled(loop)
    at = {ROW: 20}
    number = Evaluator({}, {})
    first = 0 if found.first is None else int(number(found.first, at))
    stop = int(number(found.loop.stop, at))
    assert stop - first >= least
    scores = np.arange(64, dtype=np.float32)
    source = Tensor("scores", DType.F32, (const(64),))
    for before, after in zip(loop.body[-1:], found.loop.body[-1:], strict=True):
        for point in range(max(first, 0), min(stop, 64)):
            wanted, got = (
                float(Evaluator({"scores": scores}, {})(_of_tensor(part.value, source), {ROW: 20, J: point}))
                for part in (before, after)
            )
            assert got == wanted


def _of_tensor(value: Expr, source: Tensor) -> Expr:
    return substitute(value, {load: Load(source, load.index) for load in loads(value)})


def test_ranges_between_changes_at_known_points() -> None:
    """Rotated halves: each has one of two loads; and a middle that has both of two conditions."""
    halves = select(binary("lt", J, const(20)), SCORE, select(binary("ge", J, const(20)), SCORE * 2.0, HIDDEN))
    middle = select(binary("and", binary("ge", J, const(7)), binary("lt", J, const(50))), SCORE, HIDDEN)
    for value, ends in (
        (halves, [0, 20, 64]),
        (middle, [0, 7, 50, 64]),
        (select(binary("lt", J, const(99)), SCORE, HIDDEN), [0, 64]),
    ):
        ranges = settled(VectorLoop(J, const(64), (Put(RESULT, J, value),)))
        assert [found.first or const(0) for found in ranges] == [const(first) for first in ends[:-1]]
        assert [found.loop.stop for found in ranges] == [const(stop) for stop in ends[1:]]
        for found in ranges:
            (part,) = found.loop.body
            assert not any(isinstance(node, Op) and node.name == "select" for node in walk(part.value))


def test_a_loop_without_comparisons_is_not_split() -> None:
    assert settled(VectorLoop(J, const(64), (Put(RESULT, J, SCORE),))) == ()


def test_scores_that_stay_as_they_are_are_not_stored_again() -> None:
    value = select(binary("le", J, ROW), SCORE, HIDDEN)
    (found,) = settled(VectorLoop(J, const(64), (Put(SCORES, J, value), Fold("max", Var("top"), SCORE))))
    assert [type(part) for part in found.loop.body] == [Fold]
