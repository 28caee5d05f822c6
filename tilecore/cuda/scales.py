"""Factors of scores, kept out of the scores: a tile s = raw · c stays raw, and every reader multiplies by c.

A maximum of s is c times one of raw (c > 0), and an exponential of (s − m) takes the factor into the multiply-add that
it needs anyway, so the factor costs nothing. Comes in: a program. Goes out: the same mathematics; rounding differs by
the last bits of a score. Where a tile is used in any other way than elementwise or in a maximum, it stays as it is.
"""

import math
from dataclasses import replace

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Op, apply, binary, const, loads, rewrite
from tilecore.ir import Buffer, Copy, Fill, For, Gemm, If, Join, Parallel, Program, Reduce, Stmt, Store, statements


def keep_scale(program: Program) -> Program:
    """`program` with the first positive factor of a tile of scores moved to its readers."""
    for stmt in statements(program.body):
        if isinstance(stmt, Parallel) and len(stmt.body) == 1:
            store = stmt.body[0]
            factor = _factor(store.value) if isinstance(store.target, Buffer) and len(stmt.axes) == 2 else None
            if factor is not None:
                moved = _move(program, stmt, factor)
                if moved is not None:
                    return moved
    return program


def unscaled(value: Expr) -> tuple[Expr, float]:
    """(x, c) of x · c in f32: integers wrap and divide otherwise, and 16-bit floats round, where factors move."""
    factor = 1.0
    while isinstance(value, Op) and value.dtype is DType.F32:
        match value:
            case Op(name="mul", args=(inner, Const(value=c)) | (Const(value=c), inner)):
                value, factor = inner, factor * float(c)
            case Op(name="div", args=(inner, Const(value=c))) if c != 0:
                value, factor = inner, factor / float(c)
            case _:
                break
    return value, factor


def _factor(value: Expr) -> float | None:
    """c > 0 where `value` is x · c, with −inf where masks say so."""
    match value:
        case Op(name="select", args=(_, yes, no)):
            found = {_factor(side) for side in (yes, no) if side != const(-math.inf, DType.F32)}
            return found.pop() if len(found) == 1 else None
        case Op(name="mul", args=(Load(source=Buffer()), Const(value=c))) if 0 < c < math.inf:
            return float(c)
        case Op(name="mul", args=(Const(value=c), Load(source=Buffer()))) if 0 < c < math.inf:
            return float(c)
        case _:
            return None


def _without(value: Expr) -> Expr:
    match value:
        case Op(name="select", args=(condition, yes, no)):
            return apply("select", condition, _without(yes), _without(no))
        case Op(name="mul", args=(first, second)):
            return second if isinstance(first, Const) else first
        case _:
            return value


def _move(program: Program, at: Parallel, factor: float) -> Program | None:
    scaled = at.body[0].target
    assert isinstance(scaled, Buffer)
    tops = {stmt.dst for stmt in statements(program.body) if isinstance(stmt, Reduce) and stmt.src == scaled
            and stmt.kind in ("max", "fmax")}  # fmt: skip
    units = {scaled, *tops}
    copies: set[object] = {stmt.dst.source for stmt in statements(program.body) if isinstance(stmt, Copy)
              and stmt.src.source in tops and isinstance(stmt.dst.source, Buffer)}  # fmt: skip
    if not all(_keeps(stmt, at, scaled, tops) for stmt in statements(program.body)):
        return None
    move = _Move(at, scaled, units, copies, factor)
    body = _block(program.body, move)
    return replace(program, body=body) if move.settled else None


def _keeps(stmt: Stmt, at: Parallel, scaled: Buffer, tops: set[Buffer]) -> bool:
    """Whether a statement leaves units as the rewrite assumes them."""
    match stmt:
        case If():  # what holds after it would depend on the side taken
            return all(not _writes_tile(inner) for inner in statements((stmt,)))
        case Gemm():
            return stmt.a != scaled and stmt.b != scaled and not ({stmt.a, stmt.b, stmt.c} & tops)
        case Fill():
            return stmt.dst not in tops
        case Reduce():
            return stmt.dst not in tops or (stmt.src == scaled and stmt.kind in ("max", "fmax"))
        case Join():
            return stmt.buffer != scaled and (stmt.buffer not in tops or stmt.kind in ("max", "fmax"))
        case Copy():
            return stmt.dst.source not in tops
        case Parallel() if stmt is not at:
            return all(store.target not in tops or not _reads(store.value, {scaled, *tops}) for store in stmt.body)
        case _:
            return True


def _reads(value: Expr, tiles: set[Buffer]) -> bool:
    return any(load.source in tiles for load in loads(value))


def _writes_tile(stmt: Stmt) -> bool:
    match stmt:
        case If() | For() | Parallel():
            return False
        case Store():
            return isinstance(stmt.target, Buffer)
        case _:
            return True


class _Move:
    """What a walk over the program carries: the tiles that hold values over the factor at this point."""

    def __init__(self, at: Parallel, scaled: Buffer, units: set[Buffer], copies: set[object], factor: float) -> None:
        self.at, self.scaled, self.copies, self.factor = at, scaled, copies, factor
        self.units = units
        self.now: set[object] = set()
        self.now |= units - {scaled}
        self.settled = True  # loops leave tiles as they found them, and all that reads those over the factor knows it

    def times(self, node: Expr) -> Expr | None:
        """A load of such a tile, times the factor."""
        if isinstance(node, Load) and node.source in self.now:
            return binary("mul", node, const(self.factor, DType.F32))
        return None


def _block(body: tuple[Stmt, ...], move: _Move) -> tuple[Stmt, ...]:
    return tuple(_statement(stmt, move) for stmt in body)


def _statement(stmt: Stmt, move: _Move) -> Stmt:
    match stmt:
        case For():
            before = move.now.copy()
            body = _block(stmt.body, move)
            move.settled &= move.now == before
            return replace(stmt, body=body)
        case If():
            return replace(stmt, then=_block(stmt.then, move), otherwise=_block(stmt.otherwise, move))
        case Reduce() if stmt.src in move.now:  # c times a maximum is one; a sum's readers would take it for one of s
            move.settled &= stmt.kind in ("max", "fmax")
            return stmt
        case Fill() if stmt.dst == move.scaled:
            move.now.discard(stmt.dst)
            return stmt
        case Copy() if move.scaled in (stmt.src.source, stmt.dst.source):
            move.settled &= stmt.src.source not in move.now
            move.now.discard(stmt.dst.source)
            return stmt
        case Copy():
            if stmt.dst.source in move.copies and isinstance(stmt.dst.source, Buffer):
                move.now.add(stmt.dst.source) if stmt.src.source in move.now else move.now.discard(stmt.dst.source)
            return stmt
        case Gemm() if stmt.c == move.scaled:
            move.settled &= stmt.clear or stmt.c not in move.now
            move.now.discard(stmt.c)
            return stmt
        case Parallel() if stmt is move.at:
            store = stmt.body[0]
            move.now.discard(move.scaled)
            value = _without(rewrite(store.value, move.times))
            move.now.add(move.scaled)
            return replace(stmt, body=(replace(store, value=value),))
        case Parallel():
            stores: list[Store] = []
            for store in stmt.body:
                value = rewrite(store.value, move.times)
                if store.target in move.units and store.target != move.scaled:  # a first maximum, such as a sink
                    value = binary("mul", value, const(1.0 / move.factor, DType.F32))
                stores.append(replace(store, value=value))
                if store.target in move.copies or store.target == move.scaled:
                    move.now.discard(store.target)
            return replace(stmt, body=tuple(stores))
        case _:
            return stmt
