"""Dim arithmetic against plain Python integers, for every small value of the symbols, 0 included."""

import itertools
from collections.abc import Iterator

import pytest

from fuser.dims import INFINITE, ZERO, Dims, Facts, candidates_of, dim, divide_exactly
from fuser.shape_rules import sliced
from tilecore.contract.evaluate import Evaluator
from tilecore.contract.expr import Const, Expr, Op, Sym, Var

N, M = Sym("n"), Sym("m")
PLAIN = Dims(Facts())


def values(expr: Expr, top: int = 6) -> Iterator[tuple[int, int, int]]:
    for n, m in itertools.product(range(top), repeat=2):
        yield n, m, int(Evaluator({}, {"n": n, "m": m})(expr))


@pytest.mark.parametrize(
    ("a", "b"), [(N, M), (N, dim(3)), (N + M, N), (N * 2, N), (N + 1, M), (PLAIN.minimum(N, M), N)]
)
def test_minimum_and_maximum_hold_for_all_values(a: Expr, b: Expr) -> None:
    for n, m, found in values(PLAIN.minimum(a, b)):
        x, y = (int(Evaluator({}, {"n": n, "m": m})(side)) for side in (a, b))
        assert found == min(x, y)
    for n, m, found in values(PLAIN.maximum(a, b)):
        x, y = (int(Evaluator({}, {"n": n, "m": m})(side)) for side in (a, b))
        assert found == max(x, y)


@pytest.mark.parametrize("start", [-9, -2, -1, 0, 1, 2, 9, -INFINITE])
@pytest.mark.parametrize("end", [-9, -1, 0, 1, 3, INFINITE])
@pytest.mark.parametrize("step", [1, 2, 3, -1, -2])
def test_slices_have_pythons_lengths(start: int, end: int, step: int) -> None:
    size = sliced(PLAIN, N, dim(start), dim(end), step)
    assert size is not None
    for n, _, found in values(size, top=8):
        assert found == len(range(n)[start:end:step])


def test_a_slice_up_to_a_sum_of_symbols() -> None:
    size = sliced(PLAIN, N + M, N, N + M, 1)
    assert size == M


def test_a_symbol_may_be_zero() -> None:
    assert PLAIN.minimum(dim(1), N) != dim(1)
    assert not isinstance(PLAIN.compare("eq", N, ZERO), Const)
    assert not isinstance(PLAIN.compare("eq", N + M, dim(1)), Const)
    assert PLAIN.compare("eq", N, dim(-1)) == Const(False, PLAIN.compare("eq", N, dim(-1)).dtype)


@pytest.mark.parametrize(
    ("total", "by", "quotient"),
    [
        (N * M * 12, M * 4, N * 3),
        ((N + M) * 7, N + M, dim(7)),
        ((N + M) * (N + 2) * M, N + 2, (N + M) * M),
        ((N * N) + N * M * 2 + M * M, N + M, N + M),
    ],
)
def test_exact_division_of_polynomials(total: Expr, by: Expr, quotient: Expr) -> None:
    assert divide_exactly(total, by) == quotient


@pytest.mark.parametrize(("total", "by"), [(N, dim(2)), (N + 1, N), (N, M), (N, ZERO), (N * M + 1, M)])
def test_no_exact_quotient(total: Expr, by: Expr) -> None:
    assert divide_exactly(total, by) is None


def test_broadcasting_two_symbols_stays_open() -> None:
    joined = PLAIN.broadcast(N, M)
    assert set(candidates_of(joined)) == {N, M}
    assert joined == PLAIN.broadcast(M, N) == PLAIN.broadcast(joined, N)
    for n, m, found in values(joined):
        if n == m or 1 in (n, m):
            assert found == (m if n == 1 else n)


@pytest.mark.parametrize(("a", "b", "joined"), [(N, dim(1), N), (N, N, N), (N, dim(8), dim(8)), (N + 2, M, N + 2)])
def test_broadcasting_that_is_decided(a: Expr, b: Expr, joined: Expr) -> None:
    assert PLAIN.broadcast(a, b) == PLAIN.broadcast(b, a) == joined


def test_a_sliced_buffer_bounds_the_symbol() -> None:
    dims = Dims(Facts())
    assert dims.broadcast(dims.minimum(N + M, dim(64)), N + M) == N + M
    assert dims.found.bounds == (64 - N - M,)
    later = Dims(dims.found)
    assert later.minimum(N + M, dim(64)) == N + M
    assert later.minimum(N, dim(64)) == N  # follows from n + m ≤ 64


def test_a_contraction_decides_a_broadcast() -> None:
    dims = Dims(Facts())
    joined = dims.broadcast(N, M)
    dims.must_equal(joined, M)
    assert Dims(dims.found).broadcast(N, M) == M


def test_nothing_is_recorded_where_it_may_not_run() -> None:
    dims = Dims(Facts(), recording=False)
    dims.must_equal(N, dim(4))
    assert dims.found == Facts()


def test_nested_minimum_is_seen_through() -> None:
    first = PLAIN.minimum(N, dim(1))
    rest = first + N - PLAIN.minimum(first + N, dim(1))
    assert isinstance(rest, Op)
    assert PLAIN.simplest(PLAIN.maximum(rest, ZERO)) == N


def test_multiples_of_a_sum_leave_a_quotient() -> None:
    """Rows of a batch that were made one axis and parted again: (b·(past + seq) + k) // (past + seq) is b."""
    past, seq, batch = Sym("past"), Sym("seq"), Sym("batch")
    b, k = Var("b", extent=batch), Var("k", extent=past + seq)
    flat, length = b * past + b * seq + k, past + seq
    assert flat // length == b
    assert flat % length == k
    assert (flat * 2 + 1) // length == b * 2 + (k * 2 + 1) // length
    assert (flat - b * seq) // length != b
    x, y = Sym("x"), Sym("y")
    value = x * past * 2 + x * seq * 2 - past - seq + y
    for p, q, i, j in itertools.product(range(1, 4), range(1, 4), range(4), range(9)):
        given = Evaluator({}, {"past": p, "seq": q, "x": i, "y": j})
        number = (2 * i - 1) * (p + q) + j
        assert int(given(value // length)) == number // (p + q)
        assert int(given(value % length)) == number % (p + q)
