"""What is proved of indices, such as that a loop over a whole dim stays inside it, and which numbers are folded."""

import math

import pytest

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Op, Sym, Var, binary, cast, const, floordiv, nonnegative

A, B = Sym("a"), Sym("b")


def halved(size: Expr) -> Expr:
    """The length after a step of 2."""
    return (size + 1) // 2


@pytest.mark.parametrize(
    "dim",
    [A, A * B, halved(A), halved(halved(A)), A * halved(B), halved(halved(A)) * halved(halved(B)), A // 3 + const(2)],
    ids=str,
)
def test_a_loop_over_a_dim_stays_inside_it(dim: Expr) -> None:
    index = Var("j", extent=dim)
    assert nonnegative(dim - index - 1)
    assert not nonnegative(dim - index - 2)
    assert nonnegative(index)


def test_an_index_of_another_dim_is_not_proved() -> None:
    assert not nonnegative(halved(A) - Var("j", extent=halved(B)) - 1)
    assert not nonnegative(halved(A) * B - Var("j", extent=halved(A) * A) - 1)


def test_rows_that_are_split_again_need_no_guard() -> None:
    """A row of n · m lies in one of n groups of m: where there is a row, neither dim is 0."""
    n, m = Sym("n"), Sym("m")
    row = Var("r", extent=n * m)
    assert nonnegative(n - 1 - floordiv(row, m))
    start = Var("s", extent=floordiv(n * m + 191, const(192)))
    tiled = start * 192 + Var("t", extent=binary("min", const(192), n * m - start * 192))
    assert nonnegative(n - 1 - floordiv(tiled, m))
    assert not nonnegative(n - 1)


def test_panels_of_the_last_tile_stay_inside_the_matrix() -> None:
    """A tile of 256 columns of 8000 has as many panels of 16 as there are left: a product reads them in place."""
    tile = Var("n", extent=const(32))
    live = binary("min", const(256), const(8000) - tile * 256)
    panel = Var("p", extent=(live + 15) // 16)
    assert nonnegative(const(499) - tile * 16 - panel)
    assert not nonnegative(const(498) - tile * 16 - panel)
    columns = Sym("columns")
    some = Var("n", extent=(columns + 255) // 256)
    panel = Var("p", extent=(binary("min", const(256), columns - some * 256) + 15) // 16)
    assert nonnegative((columns + 15) // 16 - 1 - some * 16 - panel)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(const(value), DType.I64) for value in (2.9, -2.9, 1e30, -1e30, math.inf, -math.inf, math.nan)]
    + [(const(value), DType.U8) for value in (-0.5, 255.5, 300, -1)],
    ids=str,
)
def test_numbers_that_a_type_has_not_are_converted_when_the_kernel_runs(value: Const, dtype: DType) -> None:
    found = cast(value, dtype)
    whole = math.trunc(value.value) if math.isfinite(value.value) else None
    low, high = dtype.range
    if whole is not None and low <= whole <= high:
        assert found == const(whole, dtype)
    else:
        assert found == Op("cast", (value,), dtype)
