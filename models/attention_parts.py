"""The pieces that attention spellings share: projections, head layouts, scores, masks, and the block around them.

Every spelling is a block x [batch, seq, 32] -> LayerNorm -> attention -> projection -> + x -> LayerNorm -> y, with four
heads of eight channels, so that regions must end correctly on both sides.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from models import blocks
from models.graph import Extent, GraphWriter

HIDDEN = 32
HEADS = 4
WIDTH = 8
LOWEST = float(np.finfo(np.float32).min)
LONGEST = 64  # rows of the constant buffers that symbolic graphs slice
HEADS_FIRST = (0, 2, 1, 3)
KEYS_LAST = (0, 2, 3, 1)


def block(
    attend: Callable[[GraphWriter, str], str], *, rms: bool = False, dtype: npt.DTypeLike = np.float32
) -> Callable[[GraphWriter], None]:
    """The writer of a whole block around `attend`, which turns the normalised x into the joined context."""

    def write(g: GraphWriter) -> None:
        x = g.input("x", dtype, ("batch", "seq", HIDDEN))
        normed = blocks.rms_norm(g, x, HIDDEN) if rms else blocks.layer_norm(g, x, HIDDEN, dtype=dtype)
        dense = blocks.linear(g, attend(g, normed), (HIDDEN, HIDDEN), dtype=dtype)
        blocks.layer_norm(g, g.op("Add", dense, x), HIDDEN, out="y", dtype=dtype)
        g.output("y", dtype, ("batch", "seq", HIDDEN))

    return write


def split(g: GraphWriter, x: str, *, heads: int = HEADS, perm: Sequence[int] = HEADS_FIRST, width: int = WIDTH) -> str:
    """[batch, seq, heads * width] as [batch, heads, seq, width], or in another order."""
    return g.op("Transpose", g.op("Reshape", x, g.constant([0, 0, heads, width])), perm=list(perm))


def join(g: GraphWriter, context: str) -> str:
    """[batch, heads, seq, width] as [batch, seq, heads * width]."""
    rows = g.op("Transpose", context, perm=list(HEADS_FIRST))
    return g.op("Reshape", rows, g.constant([0, 0, HIDDEN]))


def project(
    g: GraphWriter, x: str, *, bias: bool = True, key_heads: int = HEADS, dtype: npt.DTypeLike = np.float32
) -> tuple[str, str, str]:
    """Q, K and V as [batch, heads, seq, width] by three linear layers."""
    query = split(g, blocks.linear(g, x, (HIDDEN, HIDDEN), bias=bias, dtype=dtype))
    narrow = (HIDDEN, key_heads * WIDTH)
    key = split(g, blocks.linear(g, x, narrow, bias=bias, dtype=dtype), heads=key_heads)
    value = split(g, blocks.linear(g, x, narrow, bias=bias, dtype=dtype), heads=key_heads)
    return query, key, value


def products(g: GraphWriter, query: str, key: str) -> str:
    """Q Kᵀ."""
    return g.op("MatMul", query, g.op("Transpose", key, perm=[0, 1, 3, 2]))


def divided(g: GraphWriter, query: str, key: str) -> str:
    """Q Kᵀ / √width."""
    return g.op("Div", products(g, query, key), g.constant(math.sqrt(WIDTH)))


def multiplied(g: GraphWriter, query: str, key: str) -> str:
    """Q Kᵀ · (1 / √width)."""
    return g.op("Mul", products(g, query, key), g.constant(1 / math.sqrt(WIDTH)))


def softmax(g: GraphWriter, scores: str) -> str:
    """Softmax over the keys."""
    return g.op("Softmax", scores, axis=-1)


def finish(g: GraphWriter, scores: str, value: str) -> str:
    """Softmax, times V, heads joined."""
    return join(g, g.op("MatMul", softmax(g, scores), value))


def mask_input(g: GraphWriter, dtype: npt.DTypeLike = np.int64) -> str:
    """The input `mask` [batch, seq]: 1 where a key may be seen."""
    return g.input("mask", dtype, ("batch", "seq"))


def widen(g: GraphWriter, mask: str) -> str:
    """[batch, keys] as [batch, 1, 1, keys]."""
    return g.op("Unsqueeze", g.op("Unsqueeze", mask, g.constant([1])), g.constant([2]))


def padding_bias(g: GraphWriter, mask: str, hidden: float) -> str:
    """(1 - mask) · hidden, [batch, 1, 1, keys]."""
    visible = g.op("Cast", widen(g, mask), to=TensorProto.FLOAT)
    return g.op("Mul", g.op("Sub", g.constant(1.0), visible), g.constant(hidden))


def seq(g: GraphWriter, x: str) -> Extent:
    """The length of x [batch, seq, …]."""
    return g.extent(x, 1, "seq")


def square(g: GraphWriter, full: npt.NDArray[np.generic], rows: Extent, columns: Extent) -> str:
    """The top left [..., rows, columns] of a constant: cut now when static, sliced by the graph otherwise."""
    if isinstance(rows, int) and isinstance(columns, int):
        return g.constant(np.ascontiguousarray(full[..., :rows, :columns]))
    axes = (full.ndim - 2, full.ndim - 1)
    value = g.constant(full)
    for axis, extent in zip(axes, (rows, columns), strict=True):
        value = g.op("Slice", value, g.constant([0]), g.vector(extent), g.constant([axis]), g.constant([1]))
    return value


def causal_bias(g: GraphWriter, x: str) -> str:
    """0 on and below the diagonal, the lowest float above: [1, 1, seq, seq]."""
    full = np.triu(np.full((LONGEST, LONGEST), LOWEST, np.float32), 1)[None, None]
    return square(g, full, seq(g, x), seq(g, x))
