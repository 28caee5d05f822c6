"""Lines asked for ahead: what the next task copies first and what this one stores last, fetched while products run.

Comes in: a loop program. Goes out: the same with `Touch` statements before its first product, for tiles that are walked
row by row in inputs and outputs. A task reads and writes other rows than the one before it, each in a page of
its own, so that no hardware prefetcher sees them coming; waiting for them took a few per cent of an attention kernel's
time, more where others use the same caches.

Rows of an input beside scores, as a bias has them, are walked a few at a time between products. What takes longest of
these few, their exponentials, asks for the rows after them, or for the first of the next step of keys: a bias out of
memory took a sixth of an attention's time on a Zen 5, of which two thirds are gone.
"""

from collections.abc import Iterator
from dataclasses import replace

from tilecore.contract.expr import Const, Expr, Op, Var, binary, const, loads, select, substitute, variables
from tilecore.graph import split_affine
from tilecore.loops import (
    FewRows,
    Loop,
    LoopProgram,
    LoopStmt,
    Memory,
    Mma,
    Put,
    Stream,
    Touch,
    VectorLoop,
    loop_statements,
)

LINE_BYTES = 64
MOST_BYTES = 65536  # of one tile: a quarter of the smallest second-level cache, where lines that the first loses stay


def touch_ahead(program: LoopProgram) -> LoopProgram:
    """`program` with the rows that the next task copies and this one stores touched before the first product."""
    at = next((i for i, stmt in enumerate(program.body) if _multiplies(stmt)), None)
    if at is None or not program.grid:
        return program
    task = program.grid[0]
    reads = [touch for stmt in program.body[:at] for touch in _touches(stmt, task, write=False)]
    writes = [touch for stmt in program.body[at + 1 :] for touch in _touches(stmt, task, write=True)]
    return replace(program, body=(*program.body[:at], *reads, *writes, *_with_rows_ahead(program.body[at:], None)))


def _multiplies(stmt: LoopStmt) -> bool:
    return any(isinstance(part, Mma | FewRows | Stream) for part in loop_statements((stmt,)))


def _touches(stmt: LoopStmt, task: Var, *, write: bool) -> Iterator[LoopStmt]:
    """Loops over the lines that a vector loop in a loop over rows walks: in outputs, or a task later in inputs."""
    if not isinstance(stmt, Loop) or stmt.step != 1:
        return
    for inner in stmt.body:
        if not isinstance(inner, VectorLoop):
            continue
        for memory, offset in dict.fromkeys(_walked(inner, write=write)):
            size = max(1, memory.dtype.bits // 8)
            rows, columns = most_of(stmt.stop), most_of(inner.stop)
            if rows is None or columns is None or rows * columns * size > MOST_BYTES:
                continue
            if task not in variables(offset) or loads(offset) or loads(stmt.stop):
                continue  # what a table says for another task is not read
            at: dict[Expr, Expr] = {} if write else {task: task + 1}
            line = Var("line")
            touch = Touch(memory, substitute(substitute(offset, {inner.var: line}), at), write)
            lines = Loop(line, const(0), inner.stop, (touch,), LINE_BYTES // size)
            yield Loop(stmt.var, stmt.start, substitute(stmt.stop, at), (lines,), 1, stmt.span)


def _with_rows_ahead(body: tuple[LoopStmt, ...], around: Loop | None) -> tuple[LoopStmt, ...]:
    """`body`, in whose blocks of rows a later loop over the columns asks for rows that an earlier one reads."""
    done: list[LoopStmt] = []
    for stmt in body:
        if isinstance(stmt, Loop) and stmt.step == 1 and _multiplies(stmt):
            stmt = replace(stmt, body=_with_rows_ahead(stmt.body, stmt))
        elif isinstance(stmt, Loop) and stmt.step != 1 and around is not None:
            stmt = _asking(stmt, around)
        done.append(stmt)
    return tuple(done)


def _asking(blocks: Loop, around: Loop) -> Loop:
    """Blocks of rows, in which the second loop along a row asks for what the first one reads of inputs, a block on."""
    rows = [stmt for stmt in blocks.body if isinstance(stmt, Loop) and stmt.step == 1]
    if len(rows) < 2:
        return blocks
    first, row = rows[0], rows[0].var
    later = next((loop for stmt in rows[1:] for loop in stmt.body if isinstance(loop, VectorLoop)), None)
    if later is None or any(stmt.var != row for stmt in rows) or later.far is not None:
        return blocks
    same = [loop for loop in first.body if isinstance(loop, VectorLoop) and loop.stop == later.stop]
    found = dict.fromkeys((place, loop.var) for loop in same for place in _walked(loop, write=False))
    next_row = row + binary("min", const(blocks.step), blocks.stop)
    inside = binary("lt", next_row, blocks.stop)  # else it is in the next step's tile
    at: dict[Expr, Expr] = {
        row: select(inside, next_row, next_row - blocks.stop),
        around.var: select(inside, around.var, around.var + 1),
    }
    ahead = tuple(
        Touch(memory, substitute(offset, {**at, column: later.var}), write=False)
        for (memory, offset), column in found
        if row in variables(offset) and not loads(offset)
    )
    asking = replace(later, ahead=ahead)
    body = [
        replace(stmt, body=tuple(asking if part is later else part for part in stmt.body))
        if isinstance(stmt, Loop)
        else stmt
        for stmt in blocks.body
    ]
    return replace(blocks, body=tuple(body))


def _walked(loop: VectorLoop, *, write: bool) -> Iterator[tuple[Memory, Expr]]:
    """Memories of inputs (or outputs) that `loop` walks along, element by element, and where."""
    for part in loop.body:
        if write:
            found = [(part.memory, part.offset)] if isinstance(part, Put) and part.memory.kind == "output" else []
        else:
            found = list(_inputs(part.value))
        for memory, offset in found:
            step, rest = split_affine(offset, loop.var)
            if step == const(1) and rest is not None:
                yield memory, offset


def _inputs(value: Expr) -> Iterator[tuple[Memory, Expr]]:
    for load in loads(value):
        if isinstance(load.source, Memory) and load.source.kind == "input":
            yield load.source, load.index[0]


def most_of(extent: Expr) -> int | None:
    """A constant that `extent` never exceeds, where one stands in it."""
    match extent:
        case Const(value=value):
            return int(value)
        case Op(name="min", args=args):
            known = [bound for bound in map(most_of, args) if bound is not None]
            return min(known, default=None)
        case _:
            return None
