"""Output shapes of convolutions, pools, resizes and recurrent layers.

Comes in: a `Call`. Goes out: a shape per output; spatial sizes are floor divisions of symbolic sizes where needed.
"""

from collections.abc import Mapping, Sequence
from math import floor

from fuser.dims import ONE, ZERO, Dims, Shape, dim, integer
from fuser.shape_call import Call, Result
from fuser.shape_rules import Rule
from tilecore.contract.expr import Expr


def window_sizes(call: Call, spatial: Shape, kernel: Sequence[Expr], *, pools: bool = False) -> Shape:
    """Spatial sizes after sliding `kernel` with the node's strides, pads and dilations.

    A convolution whose kernel does not fit raises an error. A pool divides toward zero then, and refuses empty inputs:
    a window that is larger than its input gives one element.
    """
    rank = len(spatial)
    strides = call.integers("strides") or [1] * rank
    dilations = call.integers("dilations") or [1] * rank
    pads = call.integers("pads") or [0] * (2 * rank)
    mode = call.string("auto_pad", "NOTSET")
    ceil_mode = call.integer("ceil_mode")
    result: list[Expr] = []
    for axis, (size, extent) in enumerate(zip(spatial, kernel, strict=True)):
        stride = dim(strides[axis])
        if mode in ("SAME_UPPER", "SAME_LOWER"):
            result.append(call.dims.ceiling(size, stride))
            continue
        before, after = (0, 0) if mode == "VALID" else (pads[axis], pads[axis + rank])
        room = size + (before + after - 1) - (extent - 1) * dilations[axis]
        if pools:
            call.dims.must_hold(size - 1)
        if ceil_mode:
            steps = call.dims.ceiling(room, stride)
        else:
            steps = _truncated(call.dims, room, stride) if pools else call.dims.floor(room, stride)
        count = steps + 1
        if ceil_mode:  # the last window must start inside the input or its left padding
            count = call.dims.minimum(count, call.dims.floor(size + (before - 1), stride) + 1)
        result.append(count)
    return tuple(result)


def _truncated(dims: Dims, total: Expr, by: Expr) -> Expr:
    """`total / by` rounded toward zero, for `by` ≥ 1."""
    if dims.nonnegative(total):
        return dims.floor(total, by)
    below = ZERO if dims.nonnegative(total + by - 1) else dims.floor(dims.maximum(0 - total, ZERO), by)
    return dims.floor(dims.maximum(total, ZERO), by) - below


def convolution(call: Call, weight_at: int = 1) -> Result:
    """Conv: [n, out channels, …]."""
    x, w = call.shape(0), call.shape(weight_at)
    if x is None or w is None:
        return [None]
    return [(x[0], w[0], *window_sizes(call, x[2:], w[2:]))]


def qlinear_convolution(call: Call) -> Result:
    """QLinearConv: the weight is input 3."""
    return convolution(call, 3)


def transposed_convolution(call: Call) -> Result:
    """ConvTranspose, by strides, pads and output padding, or by `output_shape`."""
    x, w = call.shape(0), call.shape(1)
    if x is None or w is None:
        return [None]
    rank = len(x) - 2
    channels = w[1] * call.integer("group", 1)
    given = call.integers("output_shape")
    if given is not None:
        return [(x[0], channels, *map(dim, given[-rank:]))]
    strides = call.integers("strides") or [1] * rank
    dilations = call.integers("dilations") or [1] * rank
    pads = call.integers("pads") or [0] * (2 * rank)
    extra = call.integers("output_padding") or [0] * rank
    mode = call.string("auto_pad", "NOTSET")
    spatial: list[Expr] = []
    for axis in range(rank):
        full = (x[axis + 2] - 1) * strides[axis] + extra[axis] + (w[axis + 2] - 1) * dilations[axis] + 1
        if mode in ("SAME_UPPER", "SAME_LOWER"):
            spatial.append(x[axis + 2] * strides[axis])
        else:
            spatial.append(full - (0 if mode == "VALID" else pads[axis] + pads[axis + rank]))
    return [(x[0], channels, *spatial)]


def pool(call: Call) -> Result:
    """MaxPool, AveragePool and LpPool; MaxPool's indices have the same shape."""
    x, kernel = call.shape(0), call.integers("kernel_shape")
    if x is None or kernel is None:
        return [None] * len(call.node.outputs)
    shape = (*x[:2], *window_sizes(call, x[2:], tuple(map(dim, kernel)), pools=True))
    return [shape] * len(call.node.outputs)


def global_pool(call: Call) -> Result:
    """GlobalAveragePool and kin: every spatial dim is 1."""
    x = call.shape(0)
    return [None if x is None else (*x[:2], *[ONE] * (len(x) - 2))]


def scaled(dims: Dims, size: Expr, factor: float) -> Expr | None:
    """floor(size · factor), for a literal size or a factor that is whole or one over a whole number."""
    value = integer(size)
    if value is not None:
        return dim(floor(value * factor))
    if factor == int(factor):
        return size * int(factor)
    inverse = round(1 / factor) if factor > 0 else 0
    if inverse and 1 / inverse == factor and inverse & (inverse - 1) == 0:  # exact in floating point
        return dims.floor(size, dim(inverse))
    return None


def resize(call: Call) -> Result:
    """Resize and Upsample: by constant scales or by (symbolic) sizes, of some axes or all."""
    shape = call.shape(0)
    if shape is None:
        return [None]
    old = call.node.op_type == "Upsample" or call.version < 11
    axes = call.integers("axes") or list(range(len(shape)))
    axes = [axis % len(shape) for axis in axes]
    new: list[Expr | None] = list(shape)
    sizes = call.dims_in(3) if not old and call.has(3) else None
    scales = call.floats_in(1 if old else 2) if call.has(1 if old else 2) else None
    if sizes and call.string("keep_aspect_ratio_policy", "stretch") == "stretch":
        for axis, size in zip(axes, sizes, strict=True):
            new[axis] = size
    elif scales:
        for axis, factor in zip(axes, scales, strict=True):
            new[axis] = scaled(call.dims, shape[axis], factor)
    else:
        for axis in axes:
            new[axis] = None
    return [tuple(call.fresh(str(axis)) if size is None else size for axis, size in enumerate(new))]


def grid_sample(call: Call) -> Result:
    """GridSample: [n, c] of the input, spatial dims of the grid."""
    x, grid = call.shape(0), call.shape(1)
    return [None if x is None or grid is None else (*x[:2], *grid[1:-1])]


def recurrent(call: Call) -> Result:
    """LSTM, GRU and RNN: the sequence, then the last states."""
    x, w = call.shape(0), call.shape(2)
    if x is None or w is None:
        return [None] * len(call.node.outputs)
    hidden, directions = w[2], w[0]
    if call.integer("layout"):
        batch, length = x[:2]
        whole, last = (batch, length, directions, hidden), (batch, directions, hidden)
    else:
        length, batch = x[:2]
        whole, last = (length, directions, batch, hidden), (directions, batch, hidden)
    return [whole, last, last][: len(call.node.outputs)]


RULES: Mapping[str, Rule] = {
    "AveragePool": pool,
    "Conv": convolution,
    "ConvInteger": convolution,
    "ConvTranspose": transposed_convolution,
    "GRU": recurrent,
    "GlobalAveragePool": global_pool,
    "GlobalLpPool": global_pool,
    "GlobalMaxPool": global_pool,
    "GridSample": grid_sample,
    "LSTM": recurrent,
    "LpPool": pool,
    "MaxPool": pool,
    "QLinearConv": qlinear_convolution,
    "RNN": recurrent,
    "Resize": resize,
    "Upsample": resize,
}
