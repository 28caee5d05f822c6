"""Levels that are a byte less one number for all of them, multiplied as these bytes where the processor can.

Comes in: a loop program. Goes out: the same with a second form of its body for processors that multiply bytes by bytes
(`Target.fused_dot`). There, what rows of a left operand are rounded to, or read as, is stored as bytes, of the sign
that the weights have not, as the instructions take them. Sums begin at what that leaves out: a number times the sums of
the weights' columns, which stand behind their panels (`panel.has_sums`). Levels that are made otherwise stay as they
are; their rows are looked at when they are multiplied (`tile_bytes.h`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from tilecore.contract.dtype import DType
from tilecore.contract.expr import (
    Const,
    Expr,
    Load,
    Op,
    Sym,
    Var,
    binary,
    cast,
    const,
    from_polynomial,
    loads,
    polynomial,
    rewrite,
    substitute,
    variables,
)
from tilecore.contract.panel import PANEL, groups_of
from tilecore.loops import (
    MULTIPLIES_BYTES,
    Branch,
    Fold,
    Let,
    Loop,
    LoopProgram,
    LoopStmt,
    Memory,
    Mma,
    Once,
    Operand,
    Put,
    Repeat,
    VectorLoop,
    loop_statements,
)
from tilecore.target import Target

GROUP = 4  # rows of bytes that are multiplied at once
I16, BYTES = DType.I16, (DType.I8, DType.U8)


@dataclass(frozen=True, slots=True)
class _Levels:
    """Levels are `byte`, an integer of 8 bits, plus `rest`, which is the same for all of them."""

    byte: Expr
    rest: Expr


def multiply_bytes(program: LoopProgram, target: Target) -> LoopProgram:
    """The form of `program` for processors that multiply bytes; itself where not all of its sums of levels are of such
    bytes. Its left operands and sums have memories of their own."""
    levels = [part for part in loop_statements(program.body) if isinstance(part, Mma) and part.a.memory.dtype is I16]
    lefts = {mma.a.memory: _shift(mma.a.memory, program) for mma in levels}
    if not levels or not target.fused_dot or any(shift is None for shift in lefts.values()):
        return program
    made = {left: Memory(f"{left.name}_bytes", DType.U8, left.size, "scratch") for left in lefts}
    made |= {mma.c.memory: replace(mma.c.memory, name=f"{mma.c.memory.name}_of_bytes") for mma in levels}
    kinds = {mma.a.memory: mma.b.memory.dtype for mma in levels}

    def in_bytes(stmt: LoopStmt) -> LoopStmt:
        match stmt:
            case Mma(a=Operand(memory=left)) if left in lefts:
                return replace(stmt, shift=lefts[left])
            case Put(memory=left) if left in lefts:
                return replace(stmt, value=_stored_byte(stmt.value, kinds[left]))
            case _:
                return stmt

    body = tuple(_renamed(stmt, made) for stmt in changed(program.body, in_bytes))
    kept = tuple(memory for memory in program.memories if memory not in made)
    return replace(program, body=body, memories=(*kept, *made.values()))


def by_processor(of_bytes: LoopProgram, plain: LoopProgram) -> LoopProgram:
    """Both forms in one program, of which `of_bytes` runs where the processor multiplies bytes."""

    def without(stmt: LoopStmt) -> LoopStmt:
        return replace(stmt, fused=False) if isinstance(stmt, Mma) and stmt.a.memory.dtype is I16 else stmt

    either = Branch(binary("lt", const(0), MULTIPLIES_BYTES), of_bytes.body, changed(plain.body, without))
    memories = tuple(dict.fromkeys((*plain.memories, *of_bytes.memories)))
    return replace(plain, body=(either,), memories=memories)


def changed(body: tuple[LoopStmt, ...], change: Callable[[LoopStmt], LoopStmt]) -> tuple[LoopStmt, ...]:
    """`body` with `change` of every statement, inner before outer."""
    done: list[LoopStmt] = []
    for stmt in body:
        match stmt:
            case Loop() | Repeat() | Once():
                stmt = replace(stmt, body=changed(stmt.body, change))
            case VectorLoop():
                parts = changed(stmt.body, change)
                stmt = replace(stmt, body=tuple(part for part in parts if isinstance(part, Let | Put | Fold)))
            case Branch():
                stmt = replace(stmt, then=changed(stmt.then, change), otherwise=changed(stmt.otherwise, change))
            case _:
                pass
        done.append(change(stmt))
    return tuple(done)


def _renamed(part: Any, made: Mapping[Memory, Memory]) -> Any:
    """A statement, or what it is made of, with other memories."""
    if isinstance(part, Memory):
        return made.get(part, part)
    if isinstance(part, Const | Load | Op | Sym | Var):
        return rewrite(part, lambda node: _load_of(node, made))
    if isinstance(part, tuple):
        return tuple(_renamed(each, made) for each in part)
    if isinstance(part, LoopStmt | Operand):
        return replace(part, **{each.name: _renamed(getattr(part, each.name), made) for each in fields(part)})
    return part


def _load_of(node: Expr, made: Mapping[Memory, Memory]) -> Expr | None:
    if not isinstance(node, Load) or not isinstance(node.source, Memory) or node.source not in made:
        return None
    return Load(made[node.source], node.index)


def _suits(mma: Mma, known: Mapping[Expr, Expr]) -> bool:
    """Levels in scratch times all rows of panels of bytes, with the sums of their columns behind them.

    `known` are numbers that variables stand for: the one step of a depth.
    """
    if not isinstance(mma.depth, Const) or mma.b.memory.dtype not in BYTES or not mma.b.pairs or not mma.clear:
        return False
    panel = groups_of(int(mma.depth.value), GROUP, sums=True) * GROUP * PANEL
    whole, offset = mma.b.row == const(panel), binary("mod", substitute(mma.b.offset, known), const(panel))
    left = mma.a.memory.dtype is DType.I16 and mma.a.memory.kind == "scratch" and mma.a.column == const(1)
    room = isinstance(mma.a.row, Const) and mma.a.row.value >= -(-int(mma.depth.value) // GROUP) * GROUP
    return whole and offset == const(0) and left and room


def _shift(left: Memory, program: LoopProgram) -> Expr | None:
    """The number that all levels of `left` have beside their byte, as it is stored; None where they are made otherwise,
    or something else than products by bytes of one type reads them."""
    parts = list(loop_statements(program.body))
    products = [part for part in parts if isinstance(part, Mma) and part.a.memory == left]
    kind, shifts = products[0].b.memory.dtype, set[Expr]()
    known: dict[Expr, Expr] = {
        part.var: part.value for part in parts if isinstance(part, Let) and isinstance(part.value, Const)
    }
    for stmt in parts:
        match stmt:
            case Mma() if stmt in products:
                if not _suits(stmt, known) or stmt.b.memory.dtype is not kind:
                    return None
            case Put(memory=memory) if memory == left:
                levels = _levels(stmt.value)
                if levels is None or stmt.update or stmt.odd is not None:
                    return None
                shifts.add(levels.rest - const(_moved(levels.byte, kind), DType.I32))
            case _ if _mentions(stmt, left):
                return None
            case _:
                pass
    return next(iter(shifts)) if len(shifts) == 1 else None


def _mentions(stmt: LoopStmt, memory: Memory) -> bool:
    """Whether a statement itself, not what stands inside it, touches `memory`."""
    for each in fields(stmt):
        value = getattr(stmt, each.name)
        for part in value if isinstance(value, tuple) else (value,):
            if part == memory or (isinstance(part, Operand) and part.memory == memory):
                return True
            if isinstance(part, Op | Load) and any(load.source == memory for load in loads(part)):
                return True
    return False


def _levels(value: Expr) -> _Levels | None:
    """`value`, of 16 bits, as a byte plus numbers made of constants and bytes of inputs, few enough not to wrap."""
    match value:
        case Op(name="cast", args=(total,), dtype=DType.I16) if total.dtype in (DType.I32, *BYTES):
            pass
        case _:
            total = value
    if total.dtype in BYTES:
        return _Levels(total, const(0, DType.I32))
    terms, most = polynomial(total), 255
    varying: Expr | None = None
    rest: dict[tuple[Expr, ...], int] = {}
    for term, times in terms.items():
        byte = _byte_in(term)
        if byte is not None and times == 1 and varying is None and not _stays(byte):
            varying = byte
            continue
        if term and (byte is None or not _stays(byte)):
            return None
        rest[() if byte is None else (cast(byte, DType.I32),)] = times
        most += abs(times) * (1 if byte is None else 255)
    if varying is None or most > DType.I16.range[1]:
        return None
    return _Levels(varying, from_polynomial(rest, DType.I32))


def _byte_in(term: tuple[Expr, ...]) -> Expr | None:
    match term:
        case (Op(name="cast", args=(byte,)),) if byte.dtype in BYTES:
            return byte
        case _:
            return None


def _stays(byte: Expr) -> bool:
    """Whether `byte` is the same all the time: made of inputs' numbers alone."""
    numbers = all(isinstance(load.source, Memory) and load.source.kind == "input" for load in loads(byte))
    return numbers and not variables(byte)


def _moved(byte: Expr, kind: DType) -> int:
    """What is added to a byte that meets bytes of type `kind`, so that one of both has a sign and one has none."""
    if byte.dtype is not kind:
        return 0
    return 128 if kind is DType.I8 else -128


def _stored_byte(value: Expr, kind: DType) -> Expr:
    levels = _levels(value)
    assert levels is not None
    moved = _moved(levels.byte, kind)
    if not moved:
        return levels.byte if levels.byte.dtype is DType.U8 else cast(cast(levels.byte, DType.I32), DType.U8)
    return cast(cast(levels.byte, DType.I32) + const(moved, DType.I32), DType.U8)
