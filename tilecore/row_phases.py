"""Phases of a loop over rows: functions of one number per row, taken of many rows at once.

Comes in: the statements of one row, of which each touches only its own row of what they write, so that all rows may go
through the first of them before any goes through the rest. Goes out: the same in phases. The exponential of one number
takes as long as that of a vector, and what comes after it in the row waits for it: in an online softmax over 128 keys a
fifth of the time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilecore.ahead import most_of
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Op, Var, children, const, loads, variables, walk
from tilecore.graph import split_affine
from tilecore.loops import Fold, LoopStmt, Put, VectorLoop

AS_LONG_AS_VECTORS = {"exp", "exp_below", "exp2", "log", "log2", "tanh", "erf", "sigmoid"}
PHASE_ROWS = 16  # that go through the phases together: a vector of any instruction set
MOST_COLUMNS = 512  # of rows of which so many stay in the first cache from one phase to the next


@dataclass(frozen=True, slots=True)
class Phase:
    """Statements of one row; `across`: stores that are taken of whole vectors of rows."""

    body: tuple[LoopStmt, ...]
    across: bool = False


def in_phases(body: Sequence[LoopStmt], row: Var) -> Iterator[Phase]:
    """The statements of one row, cut around stores that are worth a loop of their own."""
    begun = at = 0
    while at < len(body) and _is_short(body):
        stop = at
        while stop < len(body) and _is_across(body[stop], row, body):
            stop += 1
        if _is_worth_it(body[at:stop]) and not _names(body[stop:]) & _totals(body[begun:at]):
            yield from _phases(body[begun:at])
            yield Phase(tuple(body[at:stop]), across=True)
            begun = stop
        at = max(stop, at + 1)
    yield from _phases(body[begun:])


def _phases(body: Sequence[LoopStmt]) -> Iterator[Phase]:
    if body:
        yield Phase(tuple(body))


def _is_short(body: Sequence[LoopStmt]) -> bool:
    columns = [most_of(stmt.stop) for stmt in body if isinstance(stmt, VectorLoop)]
    return all(most is not None and most <= MOST_COLUMNS for most in columns)


def _is_across(stmt: LoopStmt, row: Var, body: Sequence[LoopStmt]) -> bool:
    """Whether a store is of one float per row, and made of such floats and of what all rows share."""
    if not isinstance(stmt, Put) or stmt.guard is not None or stmt.update or stmt.memory.kind != "scratch":
        return False
    places = [Load(stmt.memory, (stmt.offset,)), *loads(stmt.value)]
    return (
        all(_is_one_float(place, row) for place in places)
        and split_affine(stmt.offset, row)[0] == const(1)
        and not variables(stmt.value) & _totals(body)
        and not _counts(stmt.value, row)
    )


def _is_one_float(place: Load, row: Var) -> bool:
    step, rest = split_affine(place.index[0], row)
    return rest is not None and step in (const(0), const(1)) and place.dtype is DType.F32


def _counts(value: Expr, row: Var) -> bool:
    """Whether the number of the row itself, not only where it lies, is a part of `value`."""
    if isinstance(value, Load):
        return False
    return value == row or any(_counts(part, row) for part in children(value))


def _is_worth_it(body: Sequence[LoopStmt]) -> bool:
    parts = [part for stmt in body if isinstance(stmt, Put) for part in walk(stmt.value)]
    return any(isinstance(part, Op) and part.name in AS_LONG_AS_VECTORS for part in parts)


def _totals(body: Sequence[LoopStmt]) -> set[Var]:
    """The results of vector loops, which are names and not in memory."""
    return {part.into for stmt in body if isinstance(stmt, VectorLoop) for part in stmt.body if isinstance(part, Fold)}


def _names(body: Sequence[LoopStmt]) -> set[Var]:
    parts = [part for stmt in body for part in (stmt.body if isinstance(stmt, VectorLoop) else (stmt,))]
    values = [part.value for part in parts if isinstance(part, Put | Fold)]
    return {name for value in values for name in variables(value)}
