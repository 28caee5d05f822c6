"""Tiles and operands of the tile language: allocating, copying, products, reductions, updates, and seeing otherwise.

Comes in: handles of tiles and operands. Goes out: statements on whole tiles appended to the trace in progress.
"""

import builtins
import enum
from collections.abc import Callable
from typing import Any, NoReturn

from tilecore import ir
from tilecore.contract.dtype import DType
from tilecore.contract.expr import (
    Expr,
    Load,
    Sym,
    Var,
    binary,
    cast,
    const,
    select,
    substitute,
    unary,
)
from tilecore.contract.spec import Place, View
from tilecore.errors import TileError, user_frame, user_span
from tilecore.scalars import dtype_of, int4, packed_type
from tilecore.tracer import (
    Handle,
    Region,
    TensorType,
    allocate,
    current,
    names_assigned,
    reshaped_index,
    tiles_of,
    written_tile,
)
from tilecore.value import Operand, Value, assigned, check_size, described, extent
from tilecore.whole import Writing, apart, buffer_of, converted, copy, own_buffer, tile_of

Flag = builtins.bool


def alloc_shared(shape: Any, dtype: Any, scope: str = "shared") -> Handle:
    """A tile of data staged for reuse by the whole task."""
    return allocate(shape, _held(dtype), "shared")


def alloc_fragment(shape: Any, dtype: Any, scope: str = "fragment") -> Handle:
    """A tile of accumulators or row statistics, kept in registers where it fits."""
    return allocate(shape, _held(dtype), "fragment")


alloc_local = alloc_fragment  # a task is one thread here


def alloc_var(dtype: "DType | str", init: Operand | None = None, scope: str = "local") -> Any:
    """One element, `v[0]`; in `T.prim_func` and `jit` the name itself is the element: `v = 1` stores, `v + 1` loads."""
    handle = allocate((1,), dtype_of(dtype), "fragment")
    if init is not None:
        fill(handle, init)
    return handle


def alloc_reducer(shape: Any, dtype: "DType | str", op: str = "sum", replication: str | None = None) -> Handle:
    """A tile into which `T.Parallel` joins values along one axis that it leaves out: `r[i] += x[i, j]` over (i, j).

    `op` is "sum", "max" or "min"; fill it with what that begins from.
    """
    if op not in ("sum", "max", "min"):
        _fail(f"a reducer of kind {op!r}", 'op="sum", "max" or "min"')
    handle = allocate(shape, dtype_of(dtype), "fragment")
    current("T.alloc_reducer").reducers[handle.source.name] = op
    return handle


def finalize_reducer(reducer: Handle, **hints: Any) -> None:
    """Nothing is left to do: a task is one thread here, whose values are joined at once."""
    own_buffer(reducer, "T.finalize_reducer")


def _held(dtype: Any) -> DType:
    """The type that tiles of `dtype` have: a 4-bit integer stands in a byte."""
    packed = packed_type(dtype)
    return dtype_of(dtype) if packed is None else DType.I8 if packed is int4 else DType.U8


class _TensorForm:
    """`T.Tensor`: called or indexed."""

    def __call__(self, shape: Any, dtype: Any = DType.F32, data: Handle | None = None) -> Any:
        """The annotation of a parameter that is a whole dense tensor; with `data`, that tensor in another shape."""
        dims = shape if isinstance(shape, tuple | list) else (shape,)
        packed = packed_type(dtype)
        for dim in dims:
            if isinstance(dim, int) and dim < 0:
                _fail(f"a tensor with a dim of {dim}", "dims of at least 0, or T.dynamic")
        check_size([extent(dim) for dim in dims], _held(dtype).row.bytes, "a tensor")
        kind = TensorType(tuple(extent(dim) for dim in dims), _held(dtype), "" if packed is None else packed.value)
        return kind if data is None else view(data, dims, dtype)

    def __getitem__(self, form: Any) -> Any:
        shape, dtype = form
        return self(shape, dtype)


Tensor = _TensorForm()
Buffer = Tensor


def dynamic(names: str, dtype: Any = None) -> Any:
    """An extent known at run time, by name, which must be a whole dim of an input; several for "m, n"."""
    found = tuple(Value(Sym(name)) for name in _split(names))
    return found[0] if len(found) == 1 else found


symbolic = dynamic


class _DynamicForm:
    """`T.dyn`, indexed by a name: `T.dyn["n"]` is `T.dynamic("n")`."""

    def __getitem__(self, names: str) -> Any:
        return dynamic(names)


dyn = _DynamicForm()


def _split(names: str) -> list[str]:
    return names.replace(",", " ").split()


def const_(names: Any, dtype: Any = None) -> Any:
    """Extents that the arguments of a `jit` kernel give before it is compiled: `M, N = T.const("M, N")`.

    `T.const(number, dtype)` is that number.
    """
    if not isinstance(names, str):
        return Value(const(names, None if dtype is None else dtype_of(dtype)))
    eager = current("T.const").eager
    if eager is None:
        _fail("T.const outside of a jit kernel that declares its tensors", "a Python number, or T.dynamic")
    found: list[Any] = []
    for name in _split(names):
        eager.named[name] = None
        known = None if eager.constants is None else eager.constants.get(name)
        if eager.constants is not None and known is None:
            _fail(f"the extent {name} of T.const is a dim of no argument", f"{name}=… in compile()")
        found.append(Value(Sym(name)) if known is None else known)
    return found[0] if len(found) == 1 else tuple(found)


def empty(shape: Any, dtype: "DType | str" = DType.F32) -> Handle:
    """A tensor that a `jit` kernel makes and returns."""
    tracer = current("T.empty")
    if tracer.eager is None:
        _fail("T.empty outside of a jit kernel that declares its tensors", "a parameter, with its position in out_idx")
    name = tracer.unique(names_assigned(user_frame(), 1, "out")[0])
    handle = tracer.operand(name, Tensor(shape, dtype))
    tracer.eager.made.append(handle)
    return handle


def alloc_global(shape: Any, dtype: "DType | str") -> Handle:
    """A tensor that one `T.Kernel` of a function writes and a later one reads; a call makes it."""
    tracer = current("T.alloc_global")
    handle = tracer.operand(tracer.unique(names_assigned(user_frame(), 1, "workspace")[0]), Tensor(shape, dtype))
    assert handle.place is not None
    tracer.workspaces.append(handle.place.tensor)
    return handle


# ---- statements


def gemm(
    a: Handle, b: Handle, c: Handle, transpose_A: Flag = False, transpose_B: Flag = False, policy: Any = None,
    clear_accum: Flag = False, *, clear: Flag = False, register_tile: tuple[int, int] | None = None,
    byte_block: int = 0, **hints: Any,
) -> None:  # fmt: skip
    """`c` += `a` · `b`; `clear` (or `clear_accum`) overwrites `c`.

    `register_tile` = (rows, vectors) of accumulators is what a CPU keeps in registers; it is chosen otherwise.
    `byte_block` permits to round `a` to bytes, with one scale for every so many steps of the depth. `policy`
    and `hints` (`k_pack`, `wg_wait`, …) are for GPUs.
    """
    clears = clear or clear_accum
    span, tracer = user_span(), current("T.gemm")
    with Writing(c, "T.gemm", keeps=not clears) as total:
        left, right = (apart(buffer_of(tile, "T.gemm"), total) for tile in (a, b))
        left, right = _of_one_type(left, right)
        narrow = total.dtype in (DType.F16, DType.BF16) and left.dtype in (DType.F16, DType.BF16, DType.F32)
        wide = tile_of(total.shape, DType.F32) if narrow else total
        if register_tile is not None:
            tracer.annotations.append(ir.Annotation("register_tile", wide.name, register_tile, span))
        product = ir.Gemm(left, right, wide, transpose_A, transpose_B, clears or narrow, byte_block, span)
        tracer.emit(product, writes=wide)
        if narrow:  # summed in f32, and rounded once
            axes = tuple(Var(tracer.unique("i"), extent=dim) for dim in total.shape)
            value: Expr = Load(wide, axes)
            value = value if clears else binary("add", cast(Load(total, axes), DType.F32), value)
            store = ir.Store(total, axes, cast(value, total.dtype), span)
            tracer.emit(ir.Parallel(axes, (store,), span), writes=total)


def _of_one_type(left: ir.Buffer, right: ir.Buffer) -> tuple[ir.Buffer, ir.Buffer]:
    """Operands of two types in the one that holds both, as scalars have it. Others are left for the verifier."""
    kinds = {left.dtype, right.dtype}
    if len(kinds) == 1 or kinds == {DType.F16, DType.BF16} or DType.BOOL in kinds or len({k.is_int for k in kinds}) > 1:
        return left, right
    wider = left.dtype if left.dtype.row.bytes > right.dtype.row.bytes else right.dtype
    common = DType.I16 if kinds == {DType.I8, DType.U8} else wider
    found = [tile if tile.dtype is common else converted(tile, common) for tile in (left, right)]
    return found[0], found[1]


class GemmWarpPolicy(enum.Enum):
    """How warps share a product on a GPU; on a CPU it changes nothing."""

    Square = 0
    FullRow = 1
    FullCol = 2


def fill(dst: Any, value: Operand) -> None:
    """Every element of `dst`, a tile, a slice of a tile or an output, or one element, = `value`."""
    tracer, span = current("T.fill"), user_span()
    if isinstance(dst, Region | Value) or (isinstance(dst, Handle) and not isinstance(dst.source, ir.Buffer)):
        _fill_part(dst, value)
        return
    target = own_buffer(Handle(dst.source) if dst.bits is None else dst, "T.fill")  # in whatever shape
    stored = assigned(value, target.dtype)
    tracer.uses(stored)
    tracer.emit(ir.Fill(target, stored.expr, span), writes=target)


def _fill_part(dst: Region | Value | Handle, value: Operand) -> None:
    tracer, span = current("T.fill"), user_span()
    place = written_tile(dst)
    target = place.source
    assert not isinstance(target, View)
    axes = tuple(Var(tracer.unique("i"), extent=size) for size in place.shape)
    position = tuple(start + axis for start, axis in zip(place.origin, axes, strict=True)) if axes else place.origin
    stored = assigned(value, target.dtype)
    tracer.uses(stored)
    store = ir.Store(target, position, stored.expr, span)
    tracer.emit(ir.Parallel(axes, (store,), span) if axes else store, writes=target)


def clear(dst: Any) -> None:
    """Every element of `dst`, as in `fill`, = 0."""
    fill(dst, False if dst.dtype is DType.BOOL else 0)


def reduce(src: Handle, dst: Handle, kind: str, dim: int = -1, clear: Flag = True, **hints: Any) -> None:
    """`dst` = the `kind` of `src` over axis `dim` (see `ir.Reduce`); joined with the old `dst` unless `clear`.

    `hints` (`batch`, …), of all reductions, are for GPUs.
    """
    what = f"T.reduce_{kind}"
    source = buffer_of(src, what)
    axis = axis_of(source, src, dim)
    with Writing(dst, what, keeps=not clear) as target:
        _reduce(source, target, kind, axis, clear)


def _reduce(source: ir.Buffer, target: ir.Buffer, kind: str, axis: int, clear: Flag) -> None:
    related = source.dtype is not target.dtype and source.dtype.row.kind == target.dtype.row.kind
    if related and source.dtype.row.bytes > target.dtype.row.bytes:  # rounded, or cut off, once
        wide = tile_of(target.shape, source.dtype) if clear else converted(target, source.dtype)
        _reduce(source, wide, kind, axis, clear)
        copy(Handle(wide), Handle(target))
        return
    if related:
        source = converted(source, target.dtype)
    statement = ir.Reduce(kind, source, target, axis, clear, user_span())
    current("T.reduce").emit(statement, writes=target)


def join(tile: Handle, kind: str) -> None:
    """`tile` = the `kind` (as in `reduce`) of what all tasks of the kernel's `split` have in it."""
    target = own_buffer(tile, "T.join")
    tracer = current("T.join")
    if tracer.split is not None:
        tracer.emit(ir.Join(kind, target, tracer.split, user_span()), writes=target)


def reduce_sum(src: Handle, dst: Handle, dim: int = -1, clear: Flag = True, **hints: Any) -> None:
    """`dst` = the sum of `src` over axis `dim`; 0 over no elements."""
    reduce(src, dst, "sum", dim, clear)


def reduce_max(
    src: Handle, dst: Handle, dim: int = -1, clear: Flag = True, *, nan_propagate: Flag = True, **hints: Any
) -> None:  # fmt: skip
    """`dst` = the largest of `src` over axis `dim`, NaN if any is; -inf over no elements.

    Without `nan_propagate` elements that are NaN count for nothing, which costs a third.
    """
    reduce(src, dst, "max" if nan_propagate else "fmax", dim, clear)


def reduce_min(
    src: Handle, dst: Handle, dim: int = -1, clear: Flag = True, *, nan_propagate: Flag = True, **hints: Any
) -> None:  # fmt: skip
    """`dst` = the smallest of `src` over axis `dim`, NaN if any is; inf over no elements.

    Without `nan_propagate` elements that are NaN count for nothing.
    """
    if not nan_propagate and src.dtype.is_float:
        largest = const(float("inf"), src.dtype)
        src = _each(src, "T.reduce_min", lambda x: Value(select(unary("isnan", x.expr), largest, x.expr)))
    reduce(src, dst, "min", dim, clear)


def reduce_prod(src: Handle, dst: Handle, dim: int = -1, clear: Flag = True, **hints: Any) -> None:
    """`dst` = the product of `src` over axis `dim`; 1 over no elements."""
    reduce(src, dst, "prod", dim, clear)


def reduce_absmax(
    src: Handle, dst: Handle, dim: int = -1, clear: Flag = True, *, nan_propagate: Flag = True, **hints: Any
) -> None:  # fmt: skip
    """`dst` = the largest magnitude of `src` over axis `dim`, as in `reduce_max`; 0 over no elements."""
    source = buffer_of(_magnitudes(src, dst, "T.reduce_absmax"), "T.reduce_absmax")
    axis = axis_of(source, src, dim)
    with Writing(dst, "T.reduce_absmax", keeps=not clear) as target:
        if clear:
            fill(Handle(target), 0)
        _reduce(source, target, "max" if nan_propagate else "fmax", axis, clear=False)


def reduce_abssum(src: Handle, dst: Handle, dim: int = -1, clear: Flag = True, **hints: Any) -> None:
    """`dst` = the sum of the magnitudes of `src` over axis `dim`."""
    reduce(_magnitudes(src, dst, "T.reduce_abssum"), dst, "sum", dim, clear)


def reduce_bitand(src: Handle, dst: Handle, dim: int = -1, clear: Flag = True, **hints: Any) -> None:
    """`dst` = the bits that are set in every element of `src` along axis `dim`; all bits over no elements."""
    reduce(src, dst, "bitand", dim, clear)


def reduce_bitor(src: Handle, dst: Handle, dim: int = -1, clear: Flag = True, **hints: Any) -> None:
    """`dst` = the bits that are set in any element of `src` along axis `dim`."""
    reduce(src, dst, "bitor", dim, clear)


def reduce_bitxor(src: Handle, dst: Handle, dim: int = -1, clear: Flag = True, **hints: Any) -> None:
    """`dst` = the bits that are set in an odd number of elements of `src` along axis `dim`."""
    reduce(src, dst, "bitxor", dim, clear)


def cumsum(src: Handle, dst: Handle | None = None, dim: int = 0, reverse: Flag = False) -> None:
    """`dst` (or `src` itself) = the running sums of `src` along axis `dim`, from its end with `reverse`."""
    with Writing(src if dst is None else dst, "T.cumsum", keeps=dst is None) as target:
        source, axis = running(src, dst, target, dim, "T.cumsum")
        current("T.cumsum").emit(ir.CumSum(source, target, axis, reverse, user_span()), writes=target)


def running(src: Handle, dst: Handle | None, target: ir.Buffer, dim: int, what: str) -> tuple[ir.Buffer, int]:
    """Source (`target` itself without `dst`) and axis of a statement that goes along one axis of a tile."""
    source = target if dst is None else buffer_of(src, what)
    if source.shape != target.shape or source.dtype is not target.dtype:
        _fail(f"{what} of {src} into {Handle(target)}", "a result of the same shape and type")
    return source, axis_of(source, src, dim)


def axis_of(source: ir.Buffer, tile: Handle, dim: int) -> int:
    """The axis that `dim` is, which counts from the end where it is negative."""
    rank = len(source.shape)
    if not -rank <= dim < rank:
        _fail(f"{tile} has no axis {dim}", f"dim between {-rank} and {rank - 1}")
    return dim % rank


def atomic_add(
    dst: Any, value: Any, memory_order: str | None = None, return_prev: Flag = False, **hints: Any
) -> None:  # fmt: skip
    """Add `value` to an element, or a tile to a rectangle, of an output that other tasks add to as well.

    The output holds what the caller gave, or 0 where the call makes it.
    """
    _update(dst, value, "add", return_prev)


def atomic_max(
    dst: Any, value: Any, memory_order: str | None = None, return_prev: Flag = False, **hints: Any
) -> None:  # fmt: skip
    """Raise an element, or a rectangle, of an output to `value`."""
    _update(dst, value, "max", return_prev)


def atomic_min(
    dst: Any, value: Any, memory_order: str | None = None, return_prev: Flag = False, **hints: Any
) -> None:  # fmt: skip
    """Lower an element, or a rectangle, of an output to `value`."""
    _update(dst, value, "min", return_prev)


def _update(dst: Any, value: Any, kind: str, return_prev: Flag) -> None:
    tracer = current(f"T.atomic_{kind}")
    if return_prev:
        _fail(
            f"T.atomic_{kind} with return_prev: an output that tasks join with is not read",
            "one task that counts in a cell (T.alloc_var), or T.cumsum of counts in a second T.Kernel",
        )
    if isinstance(dst, Value) and not isinstance(value, Handle | Region):
        update_element(dst, value, kind)
        return
    source, target = tiles_of(value, dst)
    span = user_span()
    if not isinstance(target.source, Place) or not isinstance(source.source, ir.Buffer):
        _fail(f"T.atomic_{kind} of {described(value)} to {described(dst)}", "a tile buffer added to an output")
    walked = [(axis, size) for axis, size in enumerate(source.shape) if size != const(1)]
    axes = tuple(Var(tracer.unique("i"), extent=size) for _, size in walked)
    place = dict(zip((axis for axis, _ in walked), axes, strict=True))
    read = tuple(start + place.get(axis, const(0)) for axis, start in enumerate(source.origin))
    wide = [axis for axis, size in enumerate(target.shape) if size != const(1)]
    if [target.shape[axis] for axis in wide] != [size for _, size in walked]:
        _fail(f"T.atomic_{kind} of a tile to a rectangle of another shape", "the same extents, those of 1 apart")
    moved = dict(zip(wide, axes, strict=True))
    written = tuple(start + moved.get(axis, const(0)) for axis, start in enumerate(target.origin))
    item = cast(Load(source.source, read), target.source.dtype)
    store = ir.Store(target.source, written, item, span, None, kind)
    tracer.emit(ir.Parallel(axes, (store,), span) if axes else store)


def update_element(dst: Value, value: Any, kind: str) -> None:
    """Join `value` with one element of an output, or of a tile."""
    tracer, found = current(f"T.atomic_{kind}"), dst.expr
    if not isinstance(found, Load):
        _fail(f"T.atomic_{kind} of {described(dst)}", "an element of an output: C[i, j]")
    position = tuple(Value(entry) for entry in found.index)
    source = found.source
    if isinstance(source, ir.Buffer):  # a task is one thread: nothing comes between
        joined = {"add": lambda: dst + value}.get(kind)
        new = joined() if joined else Value(binary(kind, found, assigned(value, dst.dtype).expr), dst.reads)
        tracer.store(source, found.index, assigned(new, dst.dtype), position)
        return
    place = source if isinstance(source, Place) else tracer.places.get(source) if isinstance(source, View) else None
    if place is None:
        _fail(f"{getattr(source, 'name', source)} is an input: it cannot be updated", "an output operand")
    tracer.store(place, found.index, assigned(value, place.dtype), position, kind)


# ---- seeing otherwise


def view(src: Handle, shape: Any = None, dtype: Any = None) -> Handle:
    """`src` in another shape of as many elements, and its bits as a dtype as wide: nothing is moved."""
    sizes = src.shape if shape is None else shape if isinstance(shape, tuple | list) else (shape,)
    dims = tuple(extent(size) for size in sizes)
    if count_of(dims) != count_of(src.extents):
        text = ", ".join(map(str, dims))
        _fail(
            f"{src} has {count_of(src.extents)} elements, [{text}] has {count_of(dims)}", "a shape of as many elements"
        )
    bits = None if dtype is None or dtype_of(dtype) is src.dtype else dtype_of(dtype)
    if bits is not None and bits.row.bytes != src.dtype.row.bytes:
        _fail(f"{src} seen as {bits}, which is not as wide", "a dtype of as many bytes")
    if isinstance(src.source, ir.Buffer):
        inner = src.source.shape
        return Handle(src.source, None, None if dims == inner else dims, bits or src.bits)
    if bits is not None or not isinstance(src.source, View):
        _fail(f"{src} cannot be seen as {bits or 'another shape'}", "T.reinterpret of its elements")
    return _reshaped_operand(src, src.source, dims)


def reshape(src: Handle, shape: Any) -> Handle:
    """`src` in another shape of as many elements: nothing is moved."""
    return view(src, shape)


def _reshaped_operand(src: Handle, source: View, dims: tuple[Expr, ...]) -> Handle:
    tracer = current("T.reshape")
    name = tracer.unique(f"{source.name}_reshaped")
    axes = tuple(Var(f"{name}_{i}", extent=dim) for i, dim in enumerate(dims))
    moved: dict[Expr, Expr] = dict(zip(source.axes, reshaped_index(axes, dims, source.shape), strict=True))
    place = None
    if src.place is not None:
        inside = dict(zip(src.place.axes, reshaped_index(axes, dims, src.place.shape), strict=True))
        at: dict[Expr, Expr] = dict(inside.items())
        place = Place(src.place.tensor, axes, tuple(substitute(entry, at) for entry in src.place.index))
    handle = Handle(View(name, axes, substitute(source.value, moved)), place)
    tracer.add(handle)
    return handle


def count_of(dims: tuple[Expr, ...]) -> Expr:
    """How many elements a shape has."""
    total: Expr = const(1)
    for dim in dims:
        total = total * dim
    return total


# ---- annotations and hints


class LayoutHint(enum.Enum):
    """Layouts for `T.annotate_layout`: rows, packed panels of an axis, or whatever suits (swizzles are for GPUs)."""

    ROWS = "rows"
    PANELS_0 = "panels of axis 0"
    PANELS_1 = "panels of axis 1"
    ANY = "any"


def rows() -> LayoutHint:
    """Rows, each padded to whole panels."""
    return LayoutHint.ROWS


def panels(axis: int) -> LayoutHint:
    """Packed panels whose elements along `axis` stand side by side: what a product wants of its right operand."""
    if axis not in (0, 1):
        _fail(f"panels of axis {axis}", "0 or 1")
    return LayoutHint.PANELS_1 if axis else LayoutHint.PANELS_0


def annotate_layout(layouts: Any) -> None:
    """Say how tiles lie in memory; inference decides for the others. A layout that cannot be is an error."""
    tracer = current("T.annotate_layout")
    for tile, layout in dict(layouts).items():
        if not isinstance(layout, LayoutHint):
            _fail(f"{described(layout)} is no layout", "T.rows(), T.panels(axis) or make_swizzled_layout(tile)")
        if layout is not LayoutHint.ANY:
            buffer = own_buffer(tile, "T.annotate_layout")
            tracer.annotations.append(ir.Annotation("layout", buffer.name, layout.value, user_span()))


def annotate_reference(top: Handle) -> None:
    """Say that no result depends on the running maximum `top`, but through the range of what is computed under it: that
    may be left under an earlier one, which saves a GPU most of the reductions.
    """
    tracer = current("T.annotate_reference")
    tracer.annotations.append(
        ir.Annotation("reference", own_buffer(top, "T.annotate_reference").name, "maximum", user_span())
    )


def annotate_tasks(count: int) -> None:
    """How many neighbouring tasks, along the first axis of the grid first, one thread takes at a time."""
    if count < 1:
        _fail(f"{count} tasks at a time", "at least 1")
    current("T.annotate_tasks").annotations.append(ir.Annotation("tasks", "", count, user_span()))


def use_swizzle(*arguments: Any, **hints: Any) -> None:
    """The order of tiles for a GPU's cache: nothing on a CPU."""


no_set_max_nreg = annotate_l2_hit_ratio = annotate_padding = use_swizzle
disable_warp_group_reg_alloc = sync_threads = use_swizzle


def annotate_safe_value(values: Any) -> None:
    """What lies outside of tensors. It is 0 here: TileError for another number."""
    for tensor, value in dict(values).items():
        if value != 0:
            _fail(f"{value!r} outside of {described(tensor)}, where 0 is read", f"T.if_then_else(inside, …, {value!r})")


def _magnitudes(src: Handle, dst: Handle, what: str) -> Handle:
    """The magnitudes of `src`, in the type of `dst` where that is wider: -128 has none in int8."""
    source = buffer_of(src, what)
    if source.dtype.row.kind == dst.dtype.row.kind and source.dtype.row.bytes < dst.dtype.row.bytes:
        source = converted(source, dst.dtype)
    return _each(Handle(source), what, abs)


def _each(src: Handle, what: str, function: Callable[[Value], Value]) -> Handle:
    """A tile of `function` of every element."""
    source, tracer, span = buffer_of(src, what), current(what), user_span()
    tile = tile_of(source.shape, source.dtype)
    axes = tuple(Var(tracer.unique("i"), extent=dim) for dim in source.shape)
    value = function(Value(Load(source, axes))).expr
    tracer.emit(ir.Parallel(axes, (ir.Store(tile, axes, value, span),), span), writes=tile)
    return Handle(tile)


def _fail(message: str, instead: str) -> NoReturn:
    raise TileError(message, user_span(), instead=instead)
