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
from tilecore.tiles import count_of, reduce, running, update_element
from tilecore.tracer import Handle, Region, allocate, current, reshaped_index, settled
from tilecore.value import Value, assigned, convert, described, lift, operate, plain
from tilecore.whole import Writing, apart, buffer_of, copy

Flag = builtins.bool


def cummax(src: Handle, dst: Handle | None = None, dim: int = 0, reverse: Flag = False) -> None:
    """`dst` (or `src` itself) = the largest so far of `src` along axis `dim`, from its end with `reverse`."""
    with Writing(src if dst is None else dst, "T.cummax", keeps=dst is None) as target:
        source, axis = running(src, dst, target, dim, "T.cummax")
        if source != target:
            copy(Handle(source), Handle(target))
        _running_maximum(target, axis, reverse)


def _running_maximum(target: ir.Buffer, axis: int, reverse: Flag) -> None:
    tracer, span = current("T.cummax"), user_span()
    turn = Var(tracer.unique("k"), extent=target.shape[axis] - 1)
    axes = tuple(Var(tracer.unique("i"), extent=size) for size in target.shape)
    last = target.shape[axis] - 1
    places = (last - turn - 1, last - turn) if reverse else (turn + 1, turn)
    here, before = ((*axes[:axis], along, *axes[axis + 1 :]) for along in places)
    value = binary("or" if target.dtype is DType.BOOL else "max", Load(target, before), Load(target, here))
    others = tuple(each for position, each in enumerate(axes) if position != axis)
    store = ir.Store(target, here, value, span)
    body = ir.Parallel(others, (store,), span) if others else store
    tracer.emit(ir.For(turn, const(0), "serial", (body,), 1, span), writes=target)


def transpose(src: Handle, dst: Handle) -> None:
    """`dst`[…, j, i] = `src`[…, i, j] for tiles of two axes or more."""
    tracer, span = current("T.transpose"), user_span()
    with Writing(dst, "T.transpose", keeps=False) as target:
        source = apart(buffer_of(src, "T.transpose"), target)
        if len(source.shape) < 2 or target.shape != (*source.shape[:-2], source.shape[-1], source.shape[-2]):
            _fail(f"T.transpose of {src} into {dst}", "a result with the last two axes exchanged")
        axes = tuple(Var(tracer.unique("i"), extent=size) for size in target.shape)
        value = assigned(Value(Load(source, (*axes[:-2], axes[-1], axes[-2]))), target.dtype).expr
        tracer.emit(ir.Parallel(axes, (ir.Store(target, axes, value, span),), span), writes=target)


def any_of(*tiles: Any) -> Value:
    """Whether any element of a tile, an operand or a slice is not 0; or any of several conditions holds."""
    return _joined_conditions("or", tiles) if _are_scalars(tiles) else _joined_truth(tiles[0], "T.any_of", "max")


def all_of(*tiles: Any) -> Value:
    """Whether every element of a tile, an operand or a slice is other than 0; or all of several conditions hold."""
    return _joined_conditions("and", tiles) if _are_scalars(tiles) else _joined_truth(tiles[0], "T.all_of", "min")


def _are_scalars(tiles: tuple[Any, ...]) -> bool:
    return len(tiles) != 1 or isinstance(tiles[0], Value | bool)


def _joined_conditions(name: str, conditions: tuple[Any, ...]) -> Value:
    found = lift(name == "and")
    for condition in conditions:
        if not isinstance(condition, Value | bool):
            _fail(f"T.{'all' if name == 'and' else 'any'}_of of {described(condition)} beside others", "conditions")
        found = operate(name, found, condition)
    return found


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
