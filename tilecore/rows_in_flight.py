"""Rows in flight: while the results of one row are stored, the next one is reduced already.

Comes in: the statements of one row, each of which touches only its own row of what they write: stages, which are a loop
along the columns and the numbers that follow from it, every one waiting for the one before. Goes out: a loop in which
stage i is at row t − i, and the loops of all stages are one. What a stage waits for (the lanes of a sum, a square root,
lines of a row that no cache near by has) then passes while the others compute, and lines are read and written at an
even rate. On a Zen 5 a layer norm of 768 columns is 1.2 to 1.35 times as fast so, one of 2,048 1.06 times, and one of
4,096 0.8 times: rows in flight have to stay in the first cache.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Op, Var, binary, const, loads, substitute, variables, walk
from tilecore.emit_expr import instructions_of
from tilecore.graph import split_affine
from tilecore.loops import FIRST_TASK, PAST_TASKS, Branch, Fold, Let, Loop, LoopStmt, Memory, Put, VectorLoop
from tilecore.scratch import substituted
from tilecore.span import Span

FIRST_CACHE = 40 << 10  # bytes of rows that mostly stay in a first cache of 32 to 48 KiB
SHORT, MIDDLE = 8, 24  # instructions of a vector of all stages: below, sums would wait for themselves
Stage = tuple[Put | VectorLoop, ...]
Part = TypeVar("Part", bound=Let | Put | Fold)
Finish = Callable[[tuple[LoopStmt, ...]], tuple[LoopStmt, ...]]


def in_flight(
    body: Sequence[LoopStmt], row: Var, block: Expr, task: Var, *, span: Span | None, finish: Finish
) -> Loop | None:
    """The loop over the rows of all tasks of a call, with `body` for each row, in flight; None where that is not
    possible, or would not pay.

    `row` < `block` is a row of `task`. `finish` is applied to statements of a row that nothing else comes between.
    Scratch has a row for each that is in flight, taken in turns.
    """
    stages = _stages(body)
    stop = None if row.extent is None else _stop(row.extent, block, task)
    if stages is None or stop is None or not _stays(stages, row):
        return None
    turns = 1 << (len(stages) - 1).bit_length()
    memories = _by_turns(stages, row, turns)
    if memories is None:
        return None
    step, start, behind = Var("step"), FIRST_TASK * block, len(stages) - 1
    moved = [_moved(stage, (row, task), (step - number, block, turns), memories) for number, stage in enumerate(stages)]
    moved = [tuple(_renamed(stmt, number) for stmt in stage) for number, stage in enumerate(moved)]
    count = sum(map(_instructions, map(_loop_of, moved)))
    copies = 4 if count <= SHORT else 2 if count <= MIDDLE else 1
    moved = [_at_once(stage, copies) for stage in moved]
    edges = (Branch(_within(step, start + number, stop + number), finish(stage)) for number, stage in enumerate(moved))
    branch = Branch(_within(step, start + behind, stop), finish(_together(moved)), tuple(edges))
    return Loop(step, start, stop + behind, (branch,), 1, span)


def _stop(extent: Expr, block: Expr, task: Var) -> Expr | None:
    """One past the last row of a call's tasks, of which all but the last of all have `block` rows; None if that is not
    known."""
    if extent == block:
        return PAST_TASKS * block
    match extent:
        case Op(name="min", args=args) if block in args:
            rest = args[0] if args[1] == block else args[1]
            rows = rest + task * block
            return None if task in variables(rows) else binary("min", PAST_TASKS * block, rows)
        case _:
            return None


def _within(step: Var, first: Expr, end: Expr) -> Expr:
    return binary("and", binary("ge", step, first), binary("lt", step, end))


def _stages(body: Sequence[LoopStmt]) -> list[Stage] | None:
    """The statements of `body` up to each loop and what follows it; None where they do not form such stages."""
    stages: list[list[Put | VectorLoop]] = [[]]
    for stmt in body:
        if not isinstance(stmt, Put | VectorLoop) or (isinstance(stmt, Put) and stmt.update):
            return None
        if isinstance(stmt, VectorLoop) and any(isinstance(other, VectorLoop) for other in stages[-1]):
            stages.append([])
        stages[-1].append(stmt)
    loops = [stmt for stmt in body if isinstance(stmt, VectorLoop)]
    if len(stages) < 2 or len({loop.stop for loop in loops}) > 1 or not all(_reduces(loop) for loop in loops[:-1]):
        return None
    found = [tuple(stage) for stage in stages]
    for number, stage in enumerate(found):
        elsewhere = {name for other in (*found[:number], *found[number + 1 :]) for name in _totals(other)}
        if any(variables(value) & elsewhere for stmt in stage for value in _values(stmt)):
            return None
    return found


def _instructions(loop: VectorLoop) -> int:
    """Of a vector: without addresses, and what all columns share."""
    own = {loop.var, *(part.var for part in loop.body if isinstance(part, Let))}
    parts = [part for step in loop.body for part in walk(step.value) if not own.isdisjoint(variables(part))]
    return sum(instructions_of(part) for part in parts if isinstance(part, Op) and part.dtype is not DType.I64)


def _reduces(loop: VectorLoop) -> bool:
    return any(isinstance(part, Fold) for part in loop.body)


def _totals(stage: Stage) -> set[Var]:
    return {part.into for stmt in stage if isinstance(stmt, VectorLoop) for part in stmt.body if isinstance(part, Fold)}


def _loop_of(stage: Stage) -> VectorLoop:
    return next(stmt for stmt in stage if isinstance(stmt, VectorLoop))


def _parts(stmt: Put | VectorLoop) -> tuple[Let | Put | Fold, ...]:
    return stmt.body if isinstance(stmt, VectorLoop) else (stmt,)


def _values(stmt: Put | VectorLoop) -> Iterator[Expr]:
    for part in _parts(stmt):
        yield part.value
        if isinstance(part, Put):
            yield from (value for value in (part.offset, part.guard, part.odd) if value is not None)


def _places(stage: Stage) -> Iterator[Load]:
    """Every element that a stage reads or writes."""
    for stmt in stage:
        yield from (load for value in _values(stmt) for load in loads(value))
        yield from (Load(part.memory, (part.offset,)) for part in _parts(stmt) if isinstance(part, Put))


def _stays(stages: Sequence[Stage], row: Var) -> bool:
    """Whether the rows that are in flight, and what they share, stay in the first cache."""
    walked: set[tuple[object, int]] = set()
    for number, stage in enumerate(stages):
        loop = _loop_of(stage)
        for place in _places((loop,)):
            if loop.var in variables(place):
                walked.add((place.source, number if row in variables(place) else -1))
    columns = _loop_of(stages[0]).stop
    wide = sum(source.dtype.row.bytes for source, _ in walked if isinstance(source, Memory))
    return isinstance(columns, Const) and int(columns.value) * wide <= FIRST_CACHE


def _by_turns(stages: Sequence[Stage], row: Var, turns: int) -> Mapping[Memory, Memory] | None:
    """Scratch with room for `turns` rows, by what it stands for; None where a row of it is not found by its number."""
    found: dict[Memory, Memory] = {}
    for place in (place for stage in stages for place in _places(stage)):
        memory = place.source
        if not isinstance(memory, Memory) or memory.kind != "scratch":
            continue
        if any(isinstance(load.source, Memory) and load.source.kind == "scratch" for load in loads(place.index[0])):
            return None
        width, rest = split_affine(place.index[0], row)
        if rest is None or not isinstance(width, Const) or int(width.value) < 1:
            return None
        if found.setdefault(memory, replace(memory, size=width * turns)).size != width * turns:
            return None
    return found


def _moved(
    stage: Stage, names: tuple[Var, Var], place: tuple[Expr, Expr, int], memories: Mapping[Memory, Memory]
) -> Stage:
    """`stage` at a row counted through all tasks; `names` are its row in a task and that task, `place` is the row, the
    rows of a task and how many of scratch there are."""
    (row, task), (at, block, turns), turn = names, place, Var("turn")
    read = (load for stmt in stage for value in _values(stmt) for load in loads(value))
    kept: dict[Expr, Expr] = {}
    for load in read:
        if isinstance(load.source, Memory) and load.source in memories:
            kept[load] = Load(memories[load.source], (substitute(load.index[0], {row: turn}),))
    there: dict[Expr, Expr] = {row: binary("mod", at, block), task: binary("floordiv", at, block)}
    there[turn] = binary("mod", at, const(turns))

    def placed(part: Part) -> Part:
        part = substituted(part, kept)
        if isinstance(part, Put) and part.memory in memories:
            part = replace(part, memory=memories[part.memory], offset=substitute(part.offset, {row: turn}))
        return substituted(part, there)

    return tuple(
        placed(stmt) if isinstance(stmt, Put) else replace(stmt, body=tuple(map(placed, stmt.body))) for stmt in stage
    )


def _renamed(loop: Put | VectorLoop, number: int) -> Put | VectorLoop:
    """A statement with its own names for what it gives names."""
    if isinstance(loop, Put):
        return loop
    column = Var(f"{loop.var.name}_{number}", loop.var.dtype, loop.var.extent)
    names: dict[Expr, Var] = {loop.var: column}
    for part in loop.body:
        if isinstance(part, Let):
            names[part.var] = Var(f"{part.var.name}_{number}", part.var.dtype)
    body = (substituted(part, dict[Expr, Expr](names)) for part in loop.body)
    named = (replace(part, var=names[part.var]) if isinstance(part, Let) else part for part in body)
    return replace(loop, var=column, body=tuple(named))


def _at_once(stage: Stage, copies: int) -> Stage:
    return tuple(replace(stmt, at_once=copies) if isinstance(stmt, VectorLoop) else stmt for stmt in stage)


def _together(stages: Sequence[Stage]) -> tuple[LoopStmt, ...]:
    """The stages with one loop for all of them; they are at different rows."""
    loops = [_loop_of(stage) for stage in stages]
    first = loops[0]
    body = tuple(substituted(part, {loop.var: first.var}) for loop in loops for part in loop.body)
    before = [stage[: stage.index(loop)] for stage, loop in zip(stages, loops, strict=True)]
    after = [stage[stage.index(loop) + 1 :] for stage, loop in zip(stages, loops, strict=True)]
    return (
        *(stmt for part in before for stmt in part),
        replace(first, body=body, padded=all(loop.padded for loop in loops)),
        *(stmt for part in after for stmt in part),
    )
