"""The order of tasks where some of what rows read comes again after a number of rows, as a rotary table for every head.

Comes in: a loop program and the bytes that a core's own cache holds. Goes out: the same; where more than half of these
pass a core from one use of such a line to the next, tasks that read the same lines follow each other: they walk the
heads of a few positions before they go on to the next positions. Every line of the table is then read once. On a Zen 5
rotations of 32 heads of 128 over 512 positions take 0.7 of the time. Tensors that begin inside a line are left in
order, as vectors and tasks then share lines with their neighbours: 0.85 to 1.1 times as fast.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tilecore.contract.expr import Const, Expr, Load, Op, binary, const, loads, substitute, variables, walk
from tilecore.contract.spec import extent_of
from tilecore.graph import split_affine
from tilecore.loops import Fold, Let, Loop, LoopProgram, LoopStmt, Memory, Order, Put, VectorLoop, loop_statements

PAGE = 4096  # bytes
ROWS = Let | Put | Fold | VectorLoop | Loop  # what programs over rows are made of


def repeat_together(program: LoopProgram, near: int) -> LoopProgram:
    """`program` with its tasks in the order of what they read again, for calls where that is worth it."""
    statements = tuple(loop_statements(program.body))
    if len(program.grid) != 1 or program.spans or not all(isinstance(stmt, ROWS) for stmt in statements):
        return program
    parts = (stmt for stmt in statements if isinstance(stmt, Let | Put | Fold))
    found = ((load.source, _period(load, program)) for part in parts for load in _read(part))
    again = {memory: period for memory, period in found if period is not None}
    if len(set(again.values())) != 1:
        return program
    block, rows = next(iter(again.values()))
    tasks, passing, table = extent_of(program.grid[0]), const(0), const(0)
    for memory in program.memories:
        size = memory.size * (memory.dtype.bits // 8)
        table, passing = (table + size, passing) if memory in again else (table, passing + size)
    period = binary("floordiv", rows, block)
    between = table + binary("floordiv", passing * period, tasks)
    where = binary("ge", between, const(near // 2))
    run = _run(statements, block)
    for whole, part in ((rows, block * run), (tasks, period)):
        where = binary("and", where, binary("eq", binary("mod", whole, part), const(0)))
    if where == const(False) or tasks == const(0):
        return program
    across = tuple(memory for memory in program.memories if memory.kind != "scratch" and memory not in again)
    order = Order(where, period, binary("floordiv", tasks, period), run, across)
    return replace(program, order=order, body=tuple(map(_unasked, program.body)))


def _run(statements: Sequence[LoopStmt], block: Expr) -> int:
    """Tasks of `block` rows that are a page together: what is shorter is fetched line by line."""
    widths = [
        int(stmt.stop.value) for stmt in statements if isinstance(stmt, VectorLoop) and isinstance(stmt.stop, Const)
    ]
    assert isinstance(block, Const)
    return max(1, PAGE // (4 * max([*widths, 1]) * int(block.value)))


def _unasked(stmt: LoopStmt) -> LoopStmt:
    """`stmt` without asking for lines behind those that it reads: others are next."""
    if isinstance(stmt, Loop):
        return replace(stmt, body=tuple(map(_unasked, stmt.body)))
    return replace(stmt, far=stmt.large, ahead=()) if isinstance(stmt, VectorLoop) else stmt


def _read(part: Let | Put | Fold) -> Iterator[Load]:
    values = (part.value, part.offset, part.guard) if isinstance(part, Put) else (part.value,)
    yield from (load for value in values if value is not None for load in loads(value))


def _period(load: Load, program: LoopProgram) -> tuple[Expr, Expr] | None:
    """(rows of a task, rows after which the same is read), where all that a task changes in `load` is that."""
    task = program.grid[0]
    if not isinstance(load.source, Memory) or load.source.kind != "input" or task not in variables(load):
        return None
    found = {part for part in walk(load) if isinstance(part, Op) and part.name == "mod" and task in variables(part)}
    if len(found) != 1:
        return None
    (counted,) = found
    block, rest = split_affine(counted.args[0], task)
    if rest is None or not isinstance(block, Const) or int(block.value) < 1 or variables(counted.args[1]):
        return None
    if task in variables(substitute(load, {counted: const(0)})):
        return None
    return block, counted.args[1]
