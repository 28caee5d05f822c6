"""Grid points that share kept copies although they differ in more than the fastest axis: heads on one of keys.

Comes in: a loop program. Goes out: the same, with how many neighbours along the second grid axis find the same copies
(`Once`): as many as let no expression inside any of them change. All of them then copy once. Where nothing else is
kept, rows of inputs that are rounded to bytes are: blocks of columns that follow each other, as beside few rows, round
them once.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

from tilecore.contract.expr import Const, Expr, Load, Op, Sym, Var, const, substitute, variables, walk
from tilecore.loops import LoopProgram, LoopStmt, Once, RoundRows, loop_statements, written


def share_copies(program: LoopProgram) -> LoopProgram:
    """`program` with its `sharing`."""
    bodies = [stmt for stmt in loop_statements(program.body) if isinstance(stmt, Once)]
    if not bodies:
        return _round_once(program)
    if len(program.grid) < 2 or not isinstance(program.grid[1].extent, Const):
        return program
    axis, size = program.grid[1], int(program.grid[1].extent.value)
    if size == 0:  # no grid point at all
        return program
    copied = list(dict.fromkeys(expr for once in bodies for part in once.body for expr in _expressions(part)))
    tried = sorted({size, *_divisors(copied, axis)}, reverse=True)
    return replace(program, sharing=next((n for n in tried if size % n == 0 and _alike(copied, axis, size, n)), 1))


def _round_once(program: LoopProgram) -> LoopProgram:
    """`program` with what it rounds kept, if that is the same for all of the second grid axis.

    Products that share a left operand each have it rounded: all but the first find it done.
    """
    program = replace(program, body=tuple(_without_repeats(program.body)))
    rounded = [stmt for stmt in loop_statements(program.body) if isinstance(stmt, RoundRows)]
    if not rounded or len(program.grid) < 2:
        return program
    moved = any(program.grid[1] in variables(expr) for stmt in rounded for expr in _expressions(stmt))
    if moved or any(stmt not in program.body or stmt.a.memory.kind != "input" for stmt in rounded):
        return program

    def kept(stmt: LoopStmt) -> LoopStmt:
        return Once(const(0), const(1), stmt.levels.memory.name, (stmt,)) if isinstance(stmt, RoundRows) else stmt

    return replace(program, body=tuple(kept(stmt) for stmt in program.body), steady=True)


def _without_repeats(body: tuple[LoopStmt, ...]) -> Iterator[LoopStmt]:
    done: list[RoundRows] = []
    for stmt in body:
        if stmt in done:
            continue
        changed = written((stmt,))
        done = [rounding for rounding in done if rounding.a.memory not in changed]
        if isinstance(stmt, RoundRows):
            done.append(stmt)
        yield stmt


def _divisors(exprs: list[Expr], axis: Var) -> Iterator[int]:
    """Constants by which something of the axis is divided with rounding."""
    for node in (node for expr in exprs for node in walk(expr)):
        if isinstance(node, Op) and node.name == "floordiv" and axis in variables(node):
            divisor = node.args[1]
            if isinstance(divisor, Const) and divisor.value > 1:
                yield int(divisor.value)


def _alike(exprs: list[Expr], axis: Var, size: int, count: int) -> bool:
    """Whether each expression is the same at `count` neighbours."""
    among, group = Var("among", extent=const(count)), Var("group", extent=const(size // count))
    return all(among not in variables(substitute(expr, {axis: group * count + among})) for expr in exprs)


def _expressions(part: object) -> Iterator[Expr]:
    """Every expression of a statement and what it consists of, extents of loop variables included."""
    if isinstance(part, Const | Op | Load | Sym):
        yield part
    elif isinstance(part, Var):
        if part.extent is not None:
            yield part.extent
        yield part
    elif isinstance(part, tuple):
        for each in part:  # type: ignore[reportUnknownVariableType]
            yield from _expressions(each)
    elif is_dataclass(part) and not isinstance(part, type):
        for each in fields(part):
            yield from _expressions(getattr(part, each.name))
