"""Statements of the tile language that are made of others: running maxima, transposition, any and all, neighbours.

Comes in: handles of tiles and operands. Goes out: loops and stores appended to the trace in progress.
"""

import builtins
from dataclasses import replace
from typing import Any, NoReturn

from tilecore import ir
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Load, Var, binary, const
from tilecore.errors import TileError, user_span
from tilecore.tiles import buffer_of, copy, count_of, reduce, running, target_of, update_element
from tilecore.tracer import Handle, Region, allocate, current, reshaped_index, settled
from tilecore.value import Value, assigned, convert, described, operate, plain

Flag = builtins.bool


def cummax(src: Handle, dst: Handle | None = None, dim: int = 0, reverse: Flag = False) -> None:
    """`dst` (or `src` itself) = the largest so far of `src` along axis `dim`, from its end with `reverse`."""
    source, target, axis = running(src, dst, dim, "T.cummax")
    tracer, span = current("T.cummax"), user_span()
    if source != target:
        copy(src, Handle(target))
    turn = Var(tracer.unique("k"), extent=target.shape[axis] - 1)
    axes = tuple(Var(tracer.unique("i"), extent=size) for size in target.shape)
    last = target.shape[axis] - 1
    places = (last - turn - 1, last - turn) if reverse else (turn + 1, turn)
    here, before = ((*axes[:axis], along, *axes[axis + 1 :]) for along in places)
    value = binary("max", Load(target, before), Load(target, here))
    others = tuple(each for position, each in enumerate(axes) if position != axis)
    store = ir.Store(target, here, value, span)
    body = ir.Parallel(others, (store,), span) if others else store
    tracer.emit(ir.For(turn, const(0), "serial", (body,), 1, span), writes=target)


def transpose(src: Handle, dst: Handle) -> None:
    """`dst`[…, j, i] = `src`[…, i, j] for tiles of two axes or more."""
    source, target = buffer_of(src, "T.transpose"), target_of(dst, "T.transpose")
    if len(source.shape) < 2 or target.shape != (*source.shape[:-2], source.shape[-1], source.shape[-2]):
        _fail(f"T.transpose of {src} into {dst}", "a result with the last two axes exchanged")
    tracer, span = current("T.transpose"), user_span()
    axes = tuple(Var(tracer.unique("i"), extent=size) for size in target.shape)
    value = assigned(Value(Load(source, (*axes[:-2], axes[-1], axes[-2]))), target.dtype).expr
    tracer.emit(ir.Parallel(axes, (ir.Store(target, axes, value, span),), span), writes=target)


def any_of(tile: Any) -> Value:
    """Whether any element of a tile, an operand or a slice is not 0."""
    return _joined_truth(tile, "T.any_of", "max")


def all_of(tile: Any) -> Value:
    """Whether every element of a tile, an operand or a slice is other than 0."""
    return _joined_truth(tile, "T.all_of", "min")


def _joined_truth(tile: Any, what: str, kind: str) -> Value:
    tracer, span = current(what), user_span()
    if isinstance(tile, Handle):
        tile = settled(tile)
    if not isinstance(tile, Handle | Region):
        _fail(f"{what} of {described(tile)}", "a tile, an operand or a slice of one")
    source = tile.source
    shape = tile.tile.shape if isinstance(tile, Region) else source.shape
    origin = tile.tile.origin if isinstance(tile, Region) else (const(0),) * len(shape)
    axes = tuple(Var(tracer.unique("i"), extent=size) for size in shape)
    flags = allocate((1, plain(count_of(shape))), DType.I32, "fragment")
    found = allocate((1,), DType.I32, "fragment")
    read = Value(Load(source, tuple(start + axis for start, axis in zip(origin, axes, strict=True))))
    truth = convert(read if read.dtype is DType.BOOL else operate("ne", read, 0), DType.I32)
    flat = reshaped_index(axes, shape, (count_of(shape),))
    assert isinstance(flags.source, ir.Buffer)
    store = ir.Store(flags.source, (const(0), *flat), truth.expr, span)
    tracer.emit(ir.Parallel(axes, (store,), span), writes=flags.source)
    reduce(flags, found, kind, dim=1)
    return found[0] != 0


def atomic_addx2(dst: Any, value: Any, **hints: Any) -> None:
    """Add two neighbours along the last axis, from the elements `dst` and `value` on."""
    _update_neighbours(dst, value, 2)


def atomic_addx4(dst: Any, value: Any, **hints: Any) -> None:
    """Add four neighbours along the last axis, from the elements `dst` and `value` on."""
    _update_neighbours(dst, value, 4)


def _update_neighbours(dst: Any, value: Any, count: int) -> None:
    sides: list[Load] = []
    for side in (dst, value):
        if not isinstance(side, Value) or not isinstance(side.expr, Load):
            _fail(f"T.atomic_addx{count} with {described(side)}", "the first element of each side: C[i, j]")
        sides.append(side.expr)
    for step in range(count):
        moved = [replace(side, index=(*side.index[:-1], side.index[-1] + step)) for side in sides]
        update_element(Value(moved[0], dst.reads), Value(moved[1], value.reads), "add")


def _fail(message: str, instead: str) -> NoReturn:
    raise TileError(message, user_span(), instead=instead)
