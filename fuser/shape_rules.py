"""Output shapes of the standard ONNX operators, one rule per operator (or family), opsets 7 and newer.

Comes in: a `Call`. Goes out: a shape per output, None where it cannot be told. A rule never guesses: a dim that
depends on values (NonZero) becomes a fresh symbol.
"""

from collections.abc import Callable, Mapping

from fuser.dims import INFINITE, ONE, ZERO, Dims, Shape, dim, integer, product
from fuser.shape_call import Call, Result, constant_of
from tilecore.contract.expr import Expr

Rule = Callable[[Call], Result]


def same(call: Call) -> Result:
    """As the first input, for every output."""
    return [call.shape(0)] * len(call.node.outputs)


def broadcast(call: Call) -> Result:
    """Numpy broadcasting of all inputs."""
    shapes = call.shapes()
    return [None if shapes is None else call.dims.broadcast_shapes(*shapes)]


def as_second(call: Call) -> Result:
    """As the second input (GatherElements by its indices)."""
    return [call.shape(1)]


def scalar(_: Call) -> Result:
    """A 0-d result."""
    return [()]


# -- contractions -----------------------------------------------------------------------------------------------------


def matmul_shape(dims: Dims, a: Shape, b: Shape) -> Shape:
    """The shape of numpy's matmul; the inner dims are recorded as equal."""
    if not a or not b:
        return ()
    left = a if len(a) > 1 else (ONE, *a)
    right = b if len(b) > 1 else (*b, ONE)
    dims.must_equal(left[-1], right[-2])
    batch = dims.broadcast_shapes(left[:-2], right[:-2])
    rows = left[-2:-1] if len(a) > 1 else ()
    columns = right[-1:] if len(b) > 1 else ()
    return (*batch, *rows, *columns)


def matmul(call: Call) -> Result:
    """MatMul and MatMulInteger."""
    a, b = call.shape(0), call.shape(1)
    return [None if a is None or b is None else matmul_shape(call.dims, a, b)]


def qlinear_matmul(call: Call) -> Result:
    """QLinearMatMul: operands at inputs 0 and 3."""
    a, b = call.shape(0), call.shape(3)
    return [None if a is None or b is None else matmul_shape(call.dims, a, b)]


def gemm(call: Call) -> Result:
    """Gemm, with transposes."""
    a, b = call.shape(0), call.shape(1)
    if a is None or b is None:
        return [None]
    a = a[::-1] if call.integer("transA") else a
    b = b[::-1] if call.integer("transB") else b
    call.dims.must_equal(a[1], b[0])
    return [(a[0], b[1])]


def einsum(call: Call) -> Result:
    """Einsum, with ellipsis and implicit output; dims of one letter broadcast."""
    shapes = call.shapes()
    equation = call.string("equation").replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    if shapes is None or len(terms) != len(shapes):
        return [None]
    letters: dict[str, Expr] = {}
    dots: Shape = ()
    for term, shape in zip(terms, shapes, strict=True):
        head, ellipsis, tail = term.partition("...")
        if ellipsis:
            dots = call.dims.broadcast_shapes(dots, shape[len(head) : len(shape) - len(tail)])
        sizes = (*shape[: len(head)], *(shape[len(shape) - len(tail) :] if tail else ()))
        for letter, size in zip(head + tail, sizes, strict=True):
            letters[letter] = call.dims.broadcast(letters.get(letter, ONE), size)
    if not arrow:
        joined = inputs.replace(",", "").replace("...", "")
        output = ("..." if "..." in inputs else "") + "".join(sorted(x for x in letters if joined.count(x) == 1))
    head, ellipsis, tail = output.partition("...")
    return [(*(letters[x] for x in head), *(dots if ellipsis else ()), *(letters[x] for x in tail))]


# -- views ------------------------------------------------------------------------------------------------------------


def transpose(call: Call) -> Result:
    """Transpose; reversed without `perm`."""
    shape = call.shape(0)
    if shape is None:
        return [None]
    order = call.integers("perm") or list(range(len(shape)))[::-1]
    return [tuple(shape[axis] for axis in order)]


def reshape(call: Call) -> Result:
    """Reshape: 0 copies a dim (unless `allowzero`), -1 is what is left."""
    old = call.shape(0)
    target = call.dims_in(1)
    if target is None:
        wanted = call.shape(1)
        rank = integer(wanted[0]) if wanted else None
        return [None if rank is None else tuple(call.fresh(str(axis)) for axis in range(rank))]
    safe = tuple(
        size if size == dim(-1) or call.dims.nonnegative(size) else call.fresh(str(axis))
        for axis, size in enumerate(target)
    )
    return [reshaped(call.dims, old, safe, keep_zero=bool(call.integer("allowzero")))]


def reshaped(dims: Dims, old: Shape | None, target: Shape, *, keep_zero: bool = False) -> Shape | None:
    """The shape that Reshape gives; None when a -1 cannot be resolved because `old` is unknown."""
    new = list(target)
    if not keep_zero:
        for axis, size in enumerate(new):
            if size == ZERO:
                if old is None or axis >= len(old):
                    return None
                new[axis] = old[axis]
    free = [axis for axis, size in enumerate(new) if size == dim(-1)]
    if free:
        if old is None or len(free) > 1:
            return None
        rest = [size for axis, size in enumerate(new) if axis != free[0]]
        left = list(old)
        for size in list(rest):  # equal dims cancel, so that a dim of 0 elsewhere is no matter
            if size in left:
                left.remove(size)
                rest.remove(size)
        new[free[0]] = dims.divide(product(left), product(rest))
    elif old is not None:
        dims.same_count(old, new)
    return tuple(new)


def flatten(call: Call) -> Result:
    """Flatten to 2-D at `axis`."""
    shape = call.shape(0)
    if shape is None:
        return [None]
    axis = call.integer("axis", 1)
    axis += len(shape) if axis < 0 else 0
    return [(product(shape[:axis]), product(shape[axis:]))]


def squeeze(call: Call) -> Result:
    """Squeeze of the given axes, or of every axis that is known to be 1 when all others are known not to be."""
    shape = call.shape(0)
    if shape is None:
        return [None]
    axes = call.ints_of("axes", 1)
    if axes is None:
        if call.has(1) or any(size != ONE and not call.dims.nonnegative(size - 2) for size in shape):
            return [None]
        return [tuple(size for size in shape if size != ONE)]
    dropped = {axis % len(shape) for axis in axes}
    return [tuple(size for axis, size in enumerate(shape) if axis not in dropped)]


def unsqueeze(call: Call) -> Result:
    """Unsqueeze at the given axes of the result."""
    shape, axes = call.shape(0), call.ints_of("axes", 1)
    if shape is None or axes is None:
        return [None]
    rank = len(shape) + len(axes)
    new = {axis % rank for axis in axes}
    rest = iter(shape)
    return [tuple(ONE if axis in new else next(rest) for axis in range(rank))]


def expand(call: Call) -> Result:
    """Expand: broadcasting with the wanted shape."""
    shape, target = call.shape(0), call.dims_in(1)
    return [None if shape is None or target is None else call.dims.broadcast_shapes(shape, target)]


def tile(call: Call) -> Result:
    """Tile: each dim times its repeat."""
    shape, repeats = call.shape(0), call.dims_in(1)
    if shape is None:
        return [None]
    if repeats is None:
        return [tuple(call.fresh(str(axis)) for axis in range(len(shape)))]
    return [tuple(size * count for size, count in zip(shape, repeats, strict=True))]


def concat(call: Call) -> Result:
    """Concat: sizes add up along `axis`, the others are equal."""
    shapes = call.shapes()
    if shapes is None:
        return [None]
    axis = call.integer("axis") % max(len(shapes[0]), 1)
    total: Expr = ZERO
    rest = list(shapes[0])
    for shape in shapes:
        total = total + shape[axis]
        rest = [
            a if i == axis else call.dims.must_equal(a, b) for i, (a, b) in enumerate(zip(rest, shape, strict=True))
        ]
    return [(*rest[:axis], total, *rest[axis + 1 :])]


def split(call: Call) -> Result:
    """Split by sizes, or evenly into as many parts as there are outputs (the last one smaller)."""
    shape = call.shape(0)
    count = len(call.node.outputs)
    if shape is None:
        return [None] * count
    axis = call.integer("axis") % len(shape)
    given = call.integers("split")
    sizes = tuple(map(dim, given)) if given is not None else call.dims_in(1)
    if sizes is None and call.has(1):
        sizes = tuple(call.fresh(str(part)) for part in range(count))
    if sizes is None:
        whole = shape[axis]
        each = call.dims.divide(whole, dim(count))
        if call.attribute("num_outputs") is not None and each * count != whole:
            each = call.dims.ceiling(whole, dim(count))
        sizes = (*[each] * (count - 1), whole - each * (count - 1))
    return [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]


def slice_bounds(call: Call) -> tuple[Shape, Shape, list[int], list[int]] | None:
    """Starts, ends, axes and steps of a Slice; None when axes or steps are not constant or bounds are unknown."""
    if call.version < 10:
        starts, ends, axes, steps = call.integers("starts"), call.integers("ends"), call.integers("axes"), None
        if starts is None or ends is None:
            return None
        first, last = tuple(map(dim, starts)), tuple(map(dim, ends))
    else:
        first, last = call.dims_in(1), call.dims_in(2)
        if first is None or last is None:
            return None
        axes = call.ints_in(3) if call.has(3) else None
        steps = call.ints_in(4) if call.has(4) else None
        if (call.has(3) and axes is None) or (call.has(4) and steps is None):
            return None
    axes = list(range(len(first))) if axes is None else axes
    return first, last, axes, [1] * len(first) if steps is None else steps


def slice_(call: Call) -> Result:
    """Slice, with negative and clamped bounds, and any step."""
    shape, bounds = call.shape(0), slice_bounds(call)
    if shape is None:
        return [None]
    new = list(shape)
    if bounds is None:
        axes = call.integers("axes") if call.version < 10 else call.ints_in(3) if call.has(3) else None
        touched = range(len(shape)) if axes is None else [axis % len(shape) for axis in axes]
        for axis in touched:
            new[axis] = call.fresh(str(axis))
        return [tuple(new)]
    for start, end, axis, step in zip(*bounds, strict=True):
        position = axis % len(shape)
        size = sliced(call.dims, shape[position], start, end, step)
        new[position] = call.fresh(str(position)) if size is None else size
    return [tuple(new)]


def sliced(dims: Dims, size: Expr, start: Expr, end: Expr, step: int) -> Expr | None:
    """The number of elements that `start:end:step` takes out of `size`; None when the sign of a bound is unknown."""
    low = slice_bound(dims, size, start, backwards=step < 0)
    high = slice_bound(dims, size, end, backwards=step < 0)
    if low is None or high is None:
        return None
    length = high - low if step > 0 else low - high
    count = length if abs(step) == 1 else dims.ceiling(length, dim(abs(step)))
    return dims.simplest(dims.maximum(count, ZERO))


def slice_bound(dims: Dims, size: Expr, bound: Expr, *, backwards: bool = False) -> Expr | None:
    """A bound of a Slice as a clamped position: in [0, size], or [-1, size - 1] going backwards."""
    value = integer(bound)
    top = size - 1 if backwards else size
    bottom = dim(-1) if backwards else ZERO
    if value is not None and value >= INFINITE:
        return top
    if value is not None and value <= -INFINITE:
        return bottom
    if dims.nonnegative(bound):
        return dims.minimum(bound, top)
    if dims.nonnegative(-bound - 1):
        return dims.maximum(bound + size, bottom)
    return None


def gather(call: Call) -> Result:
    """Gather: the indices' shape takes the place of the axis."""
    data, indices = call.shape(0), call.shape(1)
    if data is None or indices is None:
        return [None]
    axis = call.integer("axis") % len(data)
    return [(*data[:axis], *indices, *data[axis + 1 :])]


def gather_nd(call: Call) -> Result:
    """GatherND."""
    data, indices = call.shape(0), call.shape(1)
    depth = integer(indices[-1]) if indices else None
    if data is None or indices is None or depth is None:
        return [None]
    batch = call.integer("batch_dims")
    return [(*indices[:-1], *data[batch + depth :])]


def pad(call: Call) -> Result:
    """Pad by constant or symbolic amounts."""
    shape = call.shape(0)
    if shape is None:
        return [None]
    given = call.integers("pads")
    pads = tuple(map(dim, given)) if given is not None else call.dims_in(1)
    axes = call.ints_in(3) if call.has(3) else list(range(len(shape)))
    if pads is None or axes is None:
        return [tuple(call.fresh(str(axis)) for axis in range(len(shape)))]
    new = list(shape)
    for position, axis in enumerate(axes):
        new[axis] = shape[axis] + pads[position] + pads[position + len(axes)]
    return [tuple(new)]


def depth_to_space(call: Call) -> Result:
    """DepthToSpace."""
    shape, block = call.shape(0), call.integer("blocksize", 1)
    if shape is None:
        return [None]
    n, c, h, w = shape
    return [(n, call.dims.divide(c, dim(block * block)), h * block, w * block)]


def space_to_depth(call: Call) -> Result:
    """SpaceToDepth."""
    shape, block = call.shape(0), call.integer("blocksize", 1)
    if shape is None:
        return [None]
    n, c, h, w = shape
    return [(n, c * (block * block), call.dims.divide(h, dim(block)), call.dims.divide(w, dim(block)))]


# -- reductions and generators ----------------------------------------------------------------------------------------


def reduce(call: Call) -> Result:
    """ReduceSum and its kin; `axes` an attribute or an input."""
    shape = call.shape(0)
    if shape is None:
        return [None]
    axes = call.ints_of("axes", 1)
    keep = call.integer("keepdims", 1)
    if axes is None and call.has(1) and call.shape(1) != (ZERO,):
        return [tuple(call.fresh(str(axis)) for axis in range(len(shape)))] if keep else [None]
    if not axes:
        if call.integer("noop_with_empty_axes"):
            return [shape]
        axes = list(range(len(shape)))
    gone = {axis % len(shape) for axis in axes}
    kept = ((ONE if axis in gone else size, axis in gone) for axis, size in enumerate(shape))
    return [tuple(size for size, reduced in kept if keep or not reduced)]


def arg_reduce(call: Call) -> Result:
    """ArgMax and ArgMin."""
    shape = call.shape(0)
    if shape is None:
        return [None]
    axis = call.integer("axis") % len(shape)
    middle = (ONE,) if call.integer("keepdims", 1) else ()
    return [(*shape[:axis], *middle, *shape[axis + 1 :])]


def top_k(call: Call) -> Result:
    """TopK: values and indices."""
    shape = call.shape(0)
    if shape is None:
        return [None, None]
    axis = call.integer("axis", -1) % len(shape)
    count = call.dims_in(1) if call.has(1) else (dim(call.integer("k")),)
    new = (*shape[:axis], count[0] if count else call.fresh("k"), *shape[axis + 1 :])
    return [new, new]


def shape_of(call: Call) -> Result:
    """Shape, with `start` and `end`."""
    shape = call.shape(0)
    if shape is None:
        return [(call.fresh("rank"),)]
    return [(dim(len(shape[shape_window(call, len(shape))])),)]


def shape_window(call: Call, rank: int) -> slice:
    """Which dims a Shape node gives."""
    end = call.attribute("end")
    return slice(call.integer("start"), rank if end is None else end.as_int())


def from_content(call: Call) -> Result:
    """ConstantOfShape, RandomNormal and others: the first input is the shape."""
    target = call.dims_in(0)
    if target is None:
        given = call.shape(0)
        rank = integer(given[0]) if given else None
        return [None if rank is None else tuple(call.fresh(str(axis)) for axis in range(rank))]
    return [target]


def from_attribute(call: Call) -> Result:
    """RandomNormal and RandomUniform: the shape is an attribute."""
    given = call.integers("shape")
    return [None if given is None else tuple(map(dim, given))]


def range_(call: Call) -> Result:
    """Range: ceil((limit - start) / delta) elements, at least 0."""
    start, limit, delta = (call.dims_in(index) for index in range(3))
    step = integer(delta[0]) if delta else None
    if not start or not limit or not step:
        return [(call.fresh("0"),)]
    length = limit[0] - start[0] if step > 0 else start[0] - limit[0]
    count = length if abs(step) == 1 else call.dims.ceiling(length, dim(abs(step)))
    return [(call.dims.maximum(count, ZERO),)]


def one_hot(call: Call) -> Result:
    """OneHot: a new axis of `depth`."""
    shape, depth = call.shape(0), call.dims_in(1)
    if shape is None:
        return [None]
    axis = call.integer("axis", -1) % (len(shape) + 1)
    return [(*shape[:axis], depth[0] if depth else call.fresh("depth"), *shape[axis:])]


def non_zero(call: Call) -> Result:
    """NonZero: [rank, how many there are]."""
    shape = call.shape(0)
    return [None if shape is None else (dim(max(len(shape), 1)), call.fresh("count"))]


def compress(call: Call) -> Result:
    """Compress: a data-dependent number along `axis`."""
    shape, axis = call.shape(0), call.attribute("axis")
    if axis is None:
        return [(call.fresh("count"),)]
    if shape is None:
        return [None]
    position = axis.as_int() % len(shape)
    return [(*shape[:position], call.fresh("count"), *shape[position + 1 :])]


def constant(call: Call) -> Result:
    """A Constant node that was not lifted."""
    value = constant_of(call.node)
    return [None if value is None else tuple(dim(int(size)) for size in value.shape.numpy())]


# -- normalisation ----------------------------------------------------------------------------------------------------


def layer_normalization(call: Call) -> Result:
    """LayerNormalization and kin: the statistics keep the reduced axes as 1."""
    shape = call.shape(0)
    if shape is None:
        return [None] * len(call.node.outputs)
    axis = call.integer("axis", -1) % len(shape)
    statistics = (*shape[:axis], *[ONE] * (len(shape) - axis))
    return [shape, statistics, statistics][: len(call.node.outputs)]


def batch_normalization(call: Call) -> Result:
    """BatchNormalization: per-channel statistics beside the result."""
    shape, channel = call.shape(0), call.shape(1)
    return [shape, *[channel] * (len(call.node.outputs) - 1)]


def quantized_range(call: Call) -> Result:
    """DynamicQuantizeLinear: y, scale, zero point."""
    return [call.shape(0), (), ()]


SAME = (
    "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Cast CastLike Ceil Celu Clip Cos Cosh CumProd CumSum "
    "DequantizeLinear Dropout Elu Erf Exp EyeLike Floor Gelu GroupNormalization HardSigmoid HardSwish Hardmax Identity "
    "InstanceNormalization IsInf IsNaN LRN LeakyRelu Log LogSoftmax LpNormalization MeanVarianceNormalization Mish Neg "
    "Not QuantizeLinear RMSNormalization RandomNormalLike RandomUniformLike Reciprocal Relu ReverseSequence "
    "RotaryEmbedding Round ScatterElements Scatter ScatterND Selu Shrink Sigmoid Sign Sin Sinh Softmax Softplus "
    "Softsign Sqrt Swish Tan Tanh TensorScatter ThresholdedRelu Trilu Bernoulli"
)
BROADCAST = (
    "Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min "
    "Mod Mul Or PRelu Pow Sub Sum Where Xor"
)
REDUCE = "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare"

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(SAME.split(), same),
    **dict.fromkeys(BROADCAST.split(), broadcast),
    **{f"Reduce{name}": reduce for name in REDUCE.split()},
    "ArgMax": arg_reduce,
    "ArgMin": arg_reduce,
    "BatchNormalization": batch_normalization,
    "Compress": compress,
    "Concat": concat,
    "Constant": constant,
    "ConstantOfShape": from_content,
    "DepthToSpace": depth_to_space,
    "DynamicQuantizeLinear": quantized_range,
    "Einsum": einsum,
    "Expand": expand,
    "Flatten": flatten,
    "Gather": gather,
    "GatherElements": as_second,
    "GatherND": gather_nd,
    "Gemm": gemm,
    "LayerNormalization": layer_normalization,
    "MatMul": matmul,
    "MatMulInteger": matmul,
    "NonZero": non_zero,
    "OneHot": one_hot,
    "Pad": pad,
    "QLinearMatMul": qlinear_matmul,
    "RandomNormal": from_attribute,
    "RandomUniform": from_attribute,
    "Range": range_,
    "Reshape": reshape,
    "Shape": shape_of,
    "Size": scalar,
    "Slice": slice_,
    "SpaceToDepth": space_to_depth,
    "Split": split,
    "Squeeze": squeeze,
    "Tile": tile,
    "TopK": top_k,
    "Transpose": transpose,
    "Unsqueeze": unsqueeze,
}
