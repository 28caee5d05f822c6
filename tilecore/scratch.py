"""Scratch that need not be written: what was just stored is handed on by name, and what nothing reads is not stored.

Comes in: statements of a loop program. Goes out: the same without stores that have no effect.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from tilecore.contract.expr import Const, Expr, Load, Op, Sym, Var, const, loads, substitute
from tilecore.loops import (
    Blocks,
    Branch,
    Fold,
    Let,
    Loop,
    LoopProgram,
    LoopStmt,
    Memory,
    Once,
    Put,
    Repeat,
    VectorLoop,
    loop_statements,
)

Part = TypeVar("Part", bound=Let | Put | Fold)


def hand_on(body: tuple[LoopStmt, ...]) -> tuple[LoopStmt, ...]:
    """`body`, in which an element that was stored as a named value is that value until its memory is written again."""
    known: dict[Expr, Expr] = {}
    done: list[LoopStmt] = []
    for stmt in body:
        match stmt:
            case Put():
                stmt = substituted(stmt, known)
                known = _without(known, {stmt.memory})
                if isinstance(stmt.value, Var) and stmt.guard is None and not stmt.update and stmt.odd is None:
                    known[Load(stmt.memory, (stmt.offset,))] = stmt.value
            case VectorLoop():
                known = _without(known, {part.memory for part in stmt.body if isinstance(part, Put)})
                parts = tuple(substituted(part, known) for part in stmt.body)
                stmt = replace(stmt, stop=substitute(stmt.stop, known), body=parts)
            case _:
                known = {}
        done.append(stmt)
    return tuple(done)


def _without(known: dict[Expr, Expr], written: set[Memory]) -> dict[Expr, Expr]:
    return {load: value for load, value in known.items() if not any(part.source in written for part in loads(load))}


def substituted(part: Part, values: dict[Expr, Expr]) -> Part:
    """`part` with every expression in it rewritten, and without a guard that always holds."""
    if not isinstance(part, Put):
        return replace(part, value=substitute(part.value, values))
    guard, odd = (None if one is None else substitute(one, values) for one in (part.guard, part.odd))
    offset, value = substitute(part.offset, values), substitute(part.value, values)
    return replace(part, offset=offset, value=value, guard=None if guard == const(True) else guard, odd=odd)


def drop_unread(program: LoopProgram) -> LoopProgram:
    """`program` without stores to scratch that nothing reads, and without scratch that is no longer mentioned."""
    while True:
        read = {memory for stmt in program.body for memory in _read(stmt)}
        unread = {memory for memory in program.memories if memory.kind == "scratch" and memory not in read}
        written = {stmt.memory for stmt in loop_statements(program.body) if isinstance(stmt, Put)}
        if unread.isdisjoint(written):
            memories = tuple(memory for memory in program.memories if memory not in unread)
            return replace(program, memories=memories)
        program = replace(program, body=_dropped(program.body, unread))


def _read(node: object) -> Iterator[Memory]:
    """Memories that a statement mentions other than as where an element is stored."""
    match node:
        case Memory():
            yield node
        case Const() | Sym() | Var() | Op() | Load():
            yield from (load.source for load in loads(node) if isinstance(load.source, Memory))
        case Put():
            yield from _read((node.offset, node.value, node.guard, node.odd, node.memory if node.update else None))
        case tuple():
            for part in node:  # pyright: ignore[reportUnknownVariableType]
                yield from _read(part)  # pyright: ignore[reportUnknownArgumentType]
        case _ if is_dataclass(node):
            for field in fields(node):
                yield from _read(getattr(node, field.name))
        case _:
            pass


def _dropped(body: tuple[Any, ...], unread: set[Memory]) -> tuple[Any, ...]:
    """`body` without stores to `unread`, and without loops in which nothing is left."""
    kept: list[LoopStmt] = []
    for stmt in body:
        match stmt:
            case Put() if stmt.memory in unread:
                continue
            case Branch():
                then, otherwise = _dropped(stmt.then, unread), _dropped(stmt.otherwise, unread)
                if then or otherwise:
                    kept.append(replace(stmt, then=then, otherwise=otherwise))
            case Loop() | Repeat() | Once() | VectorLoop() | Blocks():
                inner = _dropped(stmt.body, unread)
                if inner or isinstance(stmt, Repeat | Blocks):
                    kept.append(replace(stmt, body=inner))
            case _:
                kept.append(stmt)
    return tuple(kept)
