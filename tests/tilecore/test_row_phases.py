"""Phases of rows: the exponentials of row statistics are taken of vectors of rows, and results stay what they were."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilecore
from tilecore import language as T
from tilecore.compile import plan_of
from tilecore.contract.expr import Expr, Op, loads, variables, walk
from tilecore.loops import Let, Loop, LoopStmt, Put, VectorLoop, loop_statements
from tilecore.lower import lower
from tilecore.row_phases import MOST_COLUMNS
from tilecore.target import target_named
from tilecore.trace import trace

rows = T.dynamic("rows")
ROWS = 24  # of a tile: not a multiple of a vector of any instruction set that has a whole one in it


def log_softmax_kernel(columns: int) -> Callable[..., None]:
    """y = x − log Σ exp x: a number of the row between two loops over its columns."""
    tensor: Any = T.Tensor((rows, columns), T.float32)

    def kernel(X: tensor, Y: tensor) -> None:  # type: ignore[valid-type]
        with T.Kernel(T.ceildiv(rows, ROWS)) as m:
            x = T.alloc_fragment((ROWS, columns), T.float32)
            top, total = T.alloc_fragment((ROWS,), T.float32), T.alloc_fragment((ROWS,), T.float32)
            T.copy(X[m * ROWS, 0], x)
            T.reduce_max(x, top, dim=1)
            for i, j in T.Parallel(ROWS, columns):
                x[i, j] -= top[i]
            e = T.alloc_fragment((ROWS, columns), T.float32)
            for i, j in T.Parallel(ROWS, columns):
                e[i, j] = T.exp(x[i, j])
            T.reduce_sum(e, total, dim=1)
            for i in T.Parallel(ROWS):
                total[i] = T.log(total[i])
            for i, j in T.Parallel(ROWS, columns):
                Y[m * ROWS + i, j] = x[i, j] - total[i]

    return kernel


def lowered(columns: int) -> tuple[LoopStmt, ...]:
    program = trace(log_softmax_kernel(columns))
    return lower(plan_of(program, target_named("x86-64-v3"))).body


def values_in(stmt: VectorLoop | Loop) -> Iterator[Expr]:
    return (part.value for part in stmt.body if isinstance(part, Put | Let))


def takes(name: str, stmt: LoopStmt) -> bool:
    """Whether a loop itself applies a function."""
    if not isinstance(stmt, VectorLoop | Loop):
        return False
    return any(isinstance(part, Op) and part.name == name for value in values_in(stmt) for part in walk(value))


def test_a_function_of_one_number_per_row_is_taken_of_vectors_of_rows() -> None:
    found = [stmt for stmt in loop_statements(lowered(64)) if takes("log", stmt)]
    assert [type(stmt) for stmt in found] == [VectorLoop]


def test_long_rows_are_gone_through_once() -> None:
    found = [stmt for stmt in loop_statements(lowered(MOST_COLUMNS + 16)) if takes("log", stmt)]
    assert [type(stmt) for stmt in found] == [Loop]


def test_what_all_columns_of_a_row_read_alike_is_named_before_them() -> None:
    for stmt in loop_statements(lowered(64)):
        if isinstance(stmt, VectorLoop):
            found = [load for value in values_in(stmt) for load in loads(value) if stmt.var not in variables(load)]
            assert found == []


@pytest.mark.cpu
@pytest.mark.parametrize("columns", [1, 17, 64, MOST_COLUMNS + 1])
@pytest.mark.parametrize("count", [1, 7, 16, 24, 25, 40])
def test_results_of_any_number_of_rows(count: int, columns: int, object_cache: Path) -> None:
    x = np.random.default_rng(columns).standard_normal((count, columns)).astype(np.float32) * 3
    x[0, 0], x[-1, -1] = np.inf if count > 2 else 1.0, np.nan if count > 3 else 2.0
    made = tilecore.jit(log_softmax_kernel(columns), out_idx=-1, cache=object_cache)(x)
    with np.errstate(invalid="ignore"):
        wide = x.astype(np.float64) - x.max(1, keepdims=True)
        wanted = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-5)
