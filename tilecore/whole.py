"""Copies, and what statements on whole tiles work on: a tile itself, or one of its own with what a slice holds.

Comes in: handles of tiles and operands, and slices of them. Goes out: buffers, with copies before and after a statement
appended to the trace in progress where its operand or its result is not a whole tile.
"""

from types import TracebackType
from typing import Any, NoReturn

from tilecore import ir
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Var, binary, const, nonnegative, select, walk
from tilecore.contract.spec import View
from tilecore.errors import TileError, user_span
from tilecore.tracer import Handle, Region, allocate, current, settled, tiles_of
from tilecore.value import Value, assigned, described, plain, reinterpreted


def copy(src: Any, dst: Any, **hints: Any) -> None:
    """`dst` = `src`, cast to the type of `dst`. A side is a buffer, an operand at the tile's origin, or a slice.

    `hints` (`coalesced_width`, `disable_tma`, …) are for GPUs.
    """
    source, target = tiles_of(src, dst)
    if source.source == target.source and isinstance(source.source, ir.Buffer) and source != target:
        buffer = tile_of(source.shape, source.source.dtype)  # parts of one tile, which may overlap
        _emit_copy(source, ir.Tile(buffer, tuple(const(0) for _ in source.shape), source.shape))
        source = ir.Tile(buffer, tuple(const(0) for _ in source.shape), source.shape)
    _emit_copy(source, target)


def _emit_copy(source: ir.Tile, target: ir.Tile) -> None:
    if _open_axes(source) or _open_axes(target):
        _copy_inside(source, target)
        return
    current("T.copy").emit(ir.Copy(source, target, user_span()), writes=target.source)


def _open_axes(tile: ir.Tile) -> list[int]:
    """Axes along which a slice of a tile buffer begins where only the run says, and may reach outside."""
    if not isinstance(tile.source, ir.Buffer):
        return []
    return [
        axis
        for axis, (start, size, dim) in enumerate(zip(tile.origin, tile.shape, tile.source.shape, strict=True))
        if any(isinstance(n, Load) or (isinstance(n, Var) and not isinstance(n.extent, Const)) for n in walk(start))
        and not (nonnegative(start) and nonnegative(dim - start - size))
    ]


def _copy_inside(source: ir.Tile, target: ir.Tile) -> None:
    """The copy as stores of elements: what would be written outside of a tile is dropped, and 0 is read there."""
    tracer, span = current("T.copy"), user_span()
    if [size for size in source.shape if size != const(1)] != [size for size in target.shape if size != const(1)]:
        _fail("the two sides of this copy differ in their extents", "the same extents, those of 1 apart")
    axes = tuple(Var(tracer.unique("i"), extent=size) for size in source.shape if size != const(1))
    read, written = (_walked(tile, axes) for tile in (source, target))
    value = assigned(Value(Load(source.source, read)), target.source.dtype).expr
    for axis in _open_axes(source):
        value = select(_within(read[axis], source.source.shape[axis]), value, const(0, value.dtype))
    guard: Expr | None = None
    for axis in _open_axes(target):
        test = _within(written[axis], target.source.shape[axis])
        guard = test if guard is None else binary("and", guard, test)
    assert not isinstance(target.source, View)
    store = ir.Store(target.source, written, value, span, guard)
    tracer.emit(ir.Parallel(axes, (store,), span) if axes else store, writes=target.source)


def _walked(tile: ir.Tile, axes: tuple[Var, ...]) -> tuple[Expr, ...]:
    left = iter(axes)
    sides = zip(tile.origin, tile.shape, strict=True)
    return tuple(start if size == const(1) else start + next(left) for start, size in sides)


def _within(entry: Expr, dim: Expr) -> Expr:
    return binary("and", binary("ge", entry, const(0)), binary("lt", entry, dim))


def converted(source: ir.Buffer, dtype: DType) -> ir.Buffer:
    """A tile with the elements of `source` in another type."""
    tile = tile_of(source.shape, dtype)
    copy(Handle(source), Handle(tile))
    return tile


def tile_of(shape: tuple[Expr, ...], dtype: DType) -> ir.Buffer:
    """A new tile."""
    tile = allocate(tuple(plain(dim) for dim in shape), dtype, "fragment")
    assert isinstance(tile.source, ir.Buffer)
    return tile.source


def own_buffer(tile: Any, what: str) -> ir.Buffer:
    """The buffer of a tile that is one. TileError for a slice, an operand or a tile seen otherwise."""
    if isinstance(tile, Handle) and isinstance(tile.source, ir.Buffer) and not tile.is_seen_otherwise:
        return tile.source
    return _fail(f"{what} of {described(tile)}", "a whole tile, as T.alloc_shared or T.alloc_fragment made it")


def buffer_of(tile: Any, what: str) -> ir.Buffer:
    """A buffer that is read as a whole; a slice, an operand or a tile seen otherwise is copied first."""
    if isinstance(tile, Handle) and isinstance(tile.source, ir.Buffer):
        found = settled(tile).source
        assert isinstance(found, ir.Buffer)
        return found
    if not isinstance(tile, Handle | Region):
        return _fail(f"{what} works on whole tiles, found {described(tile)}", "a tile, an operand or a slice of one")
    return _copied(tile)


def apart(source: ir.Buffer, target: ir.Buffer) -> ir.Buffer:
    """`source`, in a tile of its own where a statement writes it, too."""
    return _copied(Handle(source)) if source == target else source


def _copied(tile: Handle | Region) -> ir.Buffer:
    buffer = tile_of(_kept(tile), tile.dtype)
    copy(tile, Handle(buffer))
    return buffer


def _kept(tile: Handle | Region) -> tuple[Expr, ...]:
    """The extents of a slice without the axes that a number picks, as numpy has it."""
    return tuple(tile.tile.shape[axis] for axis in tile.axes) if isinstance(tile, Region) else tile.extents


class Writing:
    """`with Writing(dst, what, keeps=…) as buffer:` a statement writes `buffer`, which becomes `dst`.

    That is the buffer of a whole tile, else one of its own; with `keeps` it begins with what `dst` holds.
    """

    def __init__(self, tile: Any, what: str, *, keeps: bool) -> None:
        if not isinstance(tile, Handle | Region):
            _fail(f"{what} writes a tile, found {described(tile)}", "a tile, an output or a slice of one")
        if not isinstance(tile.source, ir.Buffer):
            (tile.handle if isinstance(tile, Region) else tile).target(f"written by {what}")
        self.tile = tile
        self.keeps = keeps
        self.whole = isinstance(tile, Handle) and isinstance(tile.source, ir.Buffer) and not tile.is_seen_otherwise
        self.buffer: ir.Buffer | None = None

    def __enter__(self) -> ir.Buffer:
        tile = self.tile
        if self.whole:
            assert isinstance(tile.source, ir.Buffer)
            self.buffer = tile.source
        elif self.keeps:
            self.buffer = buffer_of(tile, "a statement")
        else:
            self.buffer = tile_of(_kept(tile), tile.dtype)
        return self.buffer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None or self.whole or self.buffer is None:
            return
        tile = self.tile
        if isinstance(tile, Region) or not isinstance(tile.source, ir.Buffer):
            copy(Handle(self.buffer), tile)
            return
        tracer, span = current("a tile seen otherwise"), user_span()
        axes = tuple(Var(tracer.unique("i"), extent=dim) for dim in tile.extents)
        value = Value(Load(self.buffer, axes))
        if tile.bits is not None:
            value = reinterpreted(value, tile.source.dtype)
        store = ir.Store(tile.source, tile.inner(axes), value.expr, span)
        tracer.emit(ir.Parallel(axes, (store,), span), writes=tile.source)


def _fail(message: str, instead: str) -> NoReturn:
    raise TileError(message, user_span(), instead=instead)
