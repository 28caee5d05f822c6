"""Element rules of operators that only move, repeat or generate elements.

Comes in: an `Element`. Goes out: an element of one of its inputs at another index (or a select between two), or an
expression of the index alone. Nothing here computes with data.
"""

import math
from collections.abc import Callable, Iterable

import numpy as np
import onnx_ir as ir

from fuser.element import (
    ONE,
    ZERO,
    Element,
    Index,
    Shape,
    attribute,
    dtype_of,
    reindex,
    shape_of,
)
from fuser.shapes import Shapes
from tilecore.contract.dtype import DType, from_onnx
from tilecore.contract.expr import Const, Expr, Var, apply, binary, cast, const, loads, nonnegative, select


def _identity(e: Element) -> Expr:
    return e.read(0, e.index)


def _dropout(e: Element) -> Expr:
    if e.output != 0:
        raise e.error("the mask of a Dropout is not supported")
    if e.has(2) and e.integers(2) != (const(0),):
        raise e.error("training mode drops elements at random")
    return e.read(0, e.index)


def _transpose(e: Element) -> Expr:
    return e.read(0, inverse_permutation(e.index, permutation(e.node, len(e.index))))


def permutation(node: ir.Node, rank: int) -> tuple[int, ...]:
    """The `perm` of a Transpose; axes reversed when it is left out."""
    return tuple(attribute(node, "perm") or reversed(range(rank)))


def inverse_permutation(index: Index, perm: tuple[int, ...]) -> Index:
    """Index into the input of a Transpose from an index into its output."""
    source = list(index)
    for position, axis in enumerate(perm):
        source[axis] = index[position]
    return tuple(source)


def _reshape(e: Element) -> Expr:
    return e.read(0, reindex(e.index, e.result_shape, e.shape(0)))


def _expand(e: Element) -> Expr:
    return e.broadcast(0)


def _tile(e: Element) -> Expr:
    return e.read(0, tuple(_wrapped(i, dim) for i, dim in zip(e.index, e.shape(0), strict=True)))


def _wrapped(position: Expr, dim: Expr) -> Expr:
    return ZERO if dim == ONE else position % dim


def _concat(e: Element) -> Expr:
    axis = e.axis(default=0, rank=len(e.index))
    start: Expr = ZERO
    parts: list[tuple[Expr, int, Expr]] = []  # end, operand, start
    for position, value in enumerate(e.node.inputs):
        if value is None:
            continue
        end = start + e.shape(position)[axis]
        parts.append((end, position, start))
        start = end
    here = e.index[axis]

    def part(position: int, begin: Expr) -> Expr:
        return e.read(position, (*e.index[:axis], here - begin, *e.index[axis + 1 :]))

    _, last, begin = parts[-1]
    result: Expr | None = None
    for end, position, begin_of in reversed(parts[:-1]):
        test = binary("lt", here, end)
        if test == const(True):
            result = part(position, begin_of)
        elif test != const(False):
            otherwise = part(last, begin) if result is None else result
            result = select(test, part(position, begin_of), otherwise)
    return part(last, begin) if result is None else result


def _split(e: Element) -> Expr:
    axis = e.axis(default=0, rank=len(e.index))
    start: Expr = ZERO
    for value in e.node.outputs[: e.output]:
        start = start + shape_of(value, e.shapes)[axis]
    return e.read(0, (*e.index[:axis], e.index[axis] + start, *e.index[axis + 1 :]))


def _slice(e: Element) -> Expr:
    rank = len(e.index)
    if e.opset < 10:
        starts = tuple(const(int(i)) for i in e.attribute("starts", ()))
        axes = tuple(int(i) for i in e.attribute("axes", range(len(starts))))
        steps = (1,) * len(starts)
    else:
        starts = e.integers(1)
        axes = tuple(_literal(e, i) for i in e.integers(3)) if e.has(3) else tuple(range(len(starts)))
        steps = tuple(_literal(e, i) for i in e.integers(4)) if e.has(4) else (1,) * len(starts)
    index = list(e.index)
    shape = e.shape(0)
    for start, axis, step in zip(starts, axes, steps, strict=True):
        axis %= rank
        index[axis] = index[axis] * step + first_of_slice(start, shape[axis], step)
    return e.read(0, tuple(index))


def first_of_slice(start: Expr, dim: Expr, step: int) -> Expr:
    """Where a Slice along a dim begins. A start past the end matters only when it is clamped: for negative steps."""
    if step < 0:
        last = dim - 1
        if isinstance(start, Const):
            return last + start + 1 if start.value < 0 else binary("min", start, last)
        return binary("min", select(binary("lt", start, ZERO), start + dim, start), last)
    if nonnegative(start):
        return start
    if isinstance(start, Const) or nonnegative(-start - 1):
        return binary("max", start + dim, ZERO)
    return select(binary("lt", start, ZERO), binary("max", start + dim, ZERO), start)


def _literal(e: Element, value: Expr) -> int:
    if not isinstance(value, Const):
        raise e.error(f"{value} is known at run time only")
    return int(value.value)


def _in_range(position: Expr, dim: Expr) -> Expr:
    """A gather index counted from the front. One that comes from data is kept inside, so that no input reads beyond."""
    if nonnegative(position):
        return position
    if isinstance(position, Const):
        return position + dim
    wrapped = select(binary("lt", position, ZERO), position + dim, position)
    if not loads(position):
        return wrapped
    return binary("min", binary("max", wrapped, ZERO), dim - 1)


def _gather(e: Element) -> Expr:
    shape = e.shape(0)
    axis = e.axis(default=0, rank=len(shape))
    width = len(e.shape(1))
    position = cast(e.read(1, e.index[axis : axis + width]), DType.I64)
    found = e.read(0, (*e.index[:axis], _in_range(position, shape[axis]), *e.index[axis + width :]))
    return _shown(found, ((position, shape[axis]),))


def _gather_elements(e: Element) -> Expr:
    shape = e.shape(0)
    axis = e.axis(default=0, rank=len(shape))
    position = cast(e.read(1, e.index), DType.I64)
    found = e.read(0, (*e.index[:axis], _in_range(position, shape[axis]), *e.index[axis + 1 :]))
    return _shown(found, ((position, shape[axis]),))


def _gather_nd(e: Element) -> Expr:
    shape, indices = e.shape(0), e.shape(1)
    batch = int(e.attribute("batch_dims", 0))
    count = _literal(e, indices[-1])
    outer = e.index[: len(indices) - 1]
    positions = [(cast(e.read(1, (*outer, const(i))), DType.I64), shape[batch + i]) for i in range(count)]
    picked = tuple(_in_range(position, dim) for position, dim in positions)
    return _shown(e.read(0, (*outer[:batch], *picked, *e.index[len(indices) - 1 :])), positions)


def gathered(node: ir.Node, index: Index, shape: Shape) -> list[tuple[Index, Expr]]:
    """Where a gather finds the positions that belong to `index` in its indices, each with the dim that it is for.

    `shape` is that of the data; of GatherND's indices the last axis of `index` is left out of account.
    """
    if node.op_type != "GatherND":
        return [(index, shape[int(attribute(node, "axis", 0)) % len(shape)])]
    batch = int(attribute(node, "batch_dims", 0))
    extent = index[-1].extent if isinstance(index[-1], Var) else ONE
    count = int(extent.value) if isinstance(extent, Const) else 0
    return [((*index[:-1], const(i)), shape[batch + i]) for i in range(count)]


def _shown(found: Expr, positions: Iterable[tuple[Expr, Expr]]) -> Expr:
    """`found`, but NaN where a position that comes from data is out of range: the operator itself fails there."""
    if not found.dtype.is_float:
        return found
    inside: Expr = const(True)
    for position, dim in positions:
        if loads(position):
            inside = apply("and", inside, apply("and", binary("ge", position, -dim), binary("lt", position, dim)))
    return select(inside, found, math.nan)


def _depth_to_space(e: Element) -> Expr:
    block = int(e.attribute("blocksize"))
    n, c, y, x = e.index
    channels = e.result_shape[1]
    dy, dx = y % const(block), x % const(block)
    channels_first = e.attribute("mode", "DCR") == "CRD"
    channel = (c * block + dy) * block + dx if channels_first else (dy * block + dx) * channels + c
    return e.read(0, (n, channel, y // const(block), x // const(block)))


def _space_to_depth(e: Element) -> Expr:
    block = int(e.attribute("blocksize"))
    n, c, y, x = e.index
    channels = e.shape(0)[1]
    phase = c // channels
    return e.read(0, (n, c % channels, y * block + phase // const(block), x * block + phase % const(block)))


def _pad(e: Element) -> Expr:
    if e.attribute("mode", "constant") != "constant":
        raise e.error("only constant padding has a rule")
    rank = len(e.index)
    pads = tuple(const(int(i)) for i in e.attribute("pads", ())) if e.opset < 11 else e.integers(1)
    axes = tuple(_literal(e, i) % rank for i in e.integers(3)) if e.has(3) else tuple(range(rank))
    dtype = e.dtype(0)
    fill: Expr = const(dtype.row.numpy.type(e.attribute("value", 0.0)).item(), dtype)
    if e.opset >= 11 and e.has(2):
        fill = e.read(2, tuple(ZERO for _ in e.shape(2)))
    index = list(e.index)
    inside: Expr = const(True)
    for position, axis in enumerate(axes):
        index[axis] = index[axis] - pads[position]
        inside = apply("and", inside, binary("ge", index[axis], ZERO))
        inside = apply("and", inside, binary("lt", index[axis], e.shape(0)[axis]))
    return select(inside, e.read(0, tuple(index)), fill)


def _trilu(e: Element) -> Expr:
    diagonal: Expr = e.read(1, tuple(ZERO for _ in e.shape(1))) if e.has(1) else ZERO
    row, column = e.index[-2:]
    keep = binary("ge" if e.attribute("upper", 1) else "le", column, row + diagonal)
    value = e.read(0, e.index)
    return select(keep, value, const(value.dtype.row.numpy.type(0).item(), value.dtype))


def _range(e: Element) -> Expr:
    start, step = (e.read(i, ()) for i in (0, 2))
    return start + cast(e.index[0], start.dtype) * step


def _constant_of_shape(e: Element) -> Expr:
    value = e.attribute("value")
    if value is None:
        return const(0.0)
    return const(value.numpy().ravel()[0].item(), from_onnx(int(value.dtype)))


def _eye_like(e: Element) -> Expr:
    code = e.attribute("dtype")
    dtype = e.dtype(0) if code is None else from_onnx(int(code))
    row, column = e.index
    return cast(binary("eq", column, row + int(e.attribute("k", 0))), dtype)


def _one_hot(e: Element) -> Expr:
    axis = e.axis(default=-1, rank=len(e.index))
    depth = e.result_shape[axis]
    hot = _in_range(cast(e.read(0, (*e.index[:axis], *e.index[axis + 1 :])), DType.I64), depth)
    return select(binary("eq", e.index[axis], hot), e.read(2, (ONE,)), e.read(2, (ZERO,)))


def _shape(e: Element) -> Expr:
    dims = e.shape(0)
    start, end = int(e.attribute("start", 0)), e.attribute("end")
    return pick(dims[slice(start, None if end is None else int(end))], e.index[0])


def _size(e: Element) -> Expr:
    total: Expr = ONE
    for dim in e.shape(0):
        total = total * dim
    return total


def pick(values: tuple[Expr, ...], position: Expr) -> Expr:
    """`values[position]`, as selects when the position is not a literal."""
    if isinstance(position, Const):
        return values[int(position.value)]
    result = values[-1]
    for number in reversed(range(len(values) - 1)):
        result = select(binary("eq", position, const(number)), values[number], result)
    return result


VIEWS: dict[str, Callable[[Element], Expr]] = {
    "Identity": _identity,
    "Dropout": _dropout,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Flatten": _reshape,
    "Squeeze": _reshape,
    "Unsqueeze": _reshape,
    "Expand": _expand,
    "Tile": _tile,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "Pad": _pad,
    "Trilu": _trilu,
}

GENERATORS: dict[str, Callable[[Element], Expr]] = {
    "Range": _range,
    "ConstantOfShape": _constant_of_shape,
    "EyeLike": _eye_like,
    "OneHot": _one_hot,
    "Shape": _shape,
    "Size": _size,
}

GATHERS = frozenset({"Gather", "GatherElements", "GatherND"})
FREE_VIEWS = frozenset({"Identity", "Dropout", "Reshape", "Flatten", "Squeeze", "Unsqueeze"})  # no byte is copied
BIJECTIONS = frozenset({"Identity", "Dropout", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze"})


def forward_index(node: ir.Node, index: Index, shapes: Shapes) -> Index | None:
    """Where the element at `index` of a bijective view's input stands in its first output; None for other nodes."""
    source = node.inputs[0]
    if node.domain or node.op_type not in BIJECTIONS or source is None:
        return None
    if node.op_type in ("Identity", "Dropout"):
        return index
    if node.op_type == "Transpose":
        return tuple(index[axis] for axis in permutation(node, len(index)))
    return reindex(index, shape_of(source, shapes), shape_of(node.outputs[0], shapes))


def backward_index(node: ir.Node, index: Index, shapes: Shapes) -> Index | None:
    """Where the element at `index` of a bijective view's first output stands in its input; None for other nodes."""
    source = node.inputs[0]
    if node.domain or node.op_type not in BIJECTIONS or source is None:
        return None
    if node.op_type in ("Identity", "Dropout"):
        return index
    if node.op_type == "Transpose":
        order = permutation(node, len(index))
        return tuple(index[order.index(axis)] for axis in range(len(index)))
    return reindex(index, shape_of(node.outputs[0], shapes), shape_of(source, shapes))


# ---------------------------------------------------------------------------------------------------------------------
# Constants that are a pattern of their index


def constant_element(value: ir.Value, index: Index, shapes: Shapes) -> Expr | None:
    """The element of a constant as an expression without loads: uniform, counting or banded tensors; else None."""
    tensor = value.const_value
    if tensor is None or tensor.size == 0 or tensor.size > 1 << 24:
        return None
    dtype = dtype_of(value, shapes)
    if tensor.size > 16 and not _may_be_pattern(tensor, dtype):
        return None
    array = tensor.numpy()
    if dtype.is_float and array.size > 1 and len(np.unique(array.ravel()[:64])) > 3:
        return None
    if array.size == 1 or np.all(array == array.flat[0]):
        return const(array.flat[0].item(), dtype)
    if all(isinstance(i, Const) for i in index):
        return const(array[tuple(int(i.value) for i in index if isinstance(i, Const))].item(), dtype)
    return _counting(array, index, dtype) or _banded(array, index, dtype)


def _may_be_pattern(tensor: ir.TensorProtocol, dtype: DType) -> bool:
    """Weights are not worth reading: only integers and square-looking masks are."""
    if dtype.is_float:
        sizes = [int(size) for size in tensor.shape.numpy()]
        return len(sizes) >= 2 and sizes[-2] > 1
    return True


def _counting(array: np.ndarray, index: Index, dtype: DType) -> Expr | None:
    """start + Σ step · i over the axes."""
    if not dtype.is_int:
        return None
    start = int(array.flat[0])
    steps = [int(array.take(1, axis).flat[0]) - start if size > 1 else 0 for axis, size in enumerate(array.shape)]
    grid = np.meshgrid(*map(np.arange, array.shape), indexing="ij", sparse=True)
    if not np.array_equal(array, start + sum(step * axis for step, axis in zip(steps, grid, strict=True))):
        return None
    total: Expr = const(start)
    for step, position in zip(steps, index, strict=True):
        total = total + position * step
    return cast(total, dtype)


def _banded(array: np.ndarray, index: Index, dtype: DType) -> Expr | None:
    """At most three bands of equal values along the diagonals of the last two axes (causal and window masks)."""
    if array.ndim < 2:
        return None
    matrix = array.reshape(-1, *array.shape[-2:])[0]
    if min(matrix.shape) < 2 or len(np.unique(matrix[:: max(1, len(matrix) // 8)])) > 3:
        return None
    if not np.array_equal(matrix[1:, 1:], matrix[:-1, :-1]) or not np.all(array == matrix):  # the same for every batch
        return None
    diagonals = np.concatenate([matrix[:0:-1, 0], matrix[0]])  # from column - row = 1 - rows upwards
    borders = [int(i) + 1 for i in np.flatnonzero(diagonals[1:] != diagonals[:-1])]
    if len(borders) > 2:
        return None
    offset = index[-1] - index[-2]
    result: Expr = const(diagonals[-1].item(), dtype)
    for border in reversed(borders):
        below = binary("lt", offset, const(border - (len(matrix) - 1)))
        result = select(below, const(diagonals[border - 1].item(), dtype), result)
    return result
