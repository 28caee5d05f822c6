"""BERT encoders with random weights in the spellings of PyTorch's two exporters, scaled dot product attention included.

In: input_ids, attention_mask, token_type_ids, int64 [batch, seq]. Out: last_hidden_state, float32 [batch, seq, hidden].

`torchscript`: opset 17, constants as nodes, the mask gathered by flat index arithmetic, expanded and turned into 0 or
-inf, a NaN guard after the softmax, the context reshaped through sizes of other tensors, GELU in pieces, output dims
under names of their own. `dynamo`: opset 20, constants as initializers, the mask by GatherND, 0 or the lowest float,
K transposed as [batch * head, seq, d], GELU as one operator.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx

from models import blocks
from models.graph import Dim, Extent, GraphWriter, write

Exporter = Literal["torchscript", "dynamo"]
EPSILON = 1e-12
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True)
class Size:
    """Extents of an encoder; the defaults are small enough for tests."""

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    vocab: int = 100
    positions: int = 512

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden must be a multiple of heads, found hidden={self.hidden}, heads={self.heads}")

    @property
    def head_width(self) -> int:
        """Channels of one head."""
        return self.hidden // self.heads


BASE = Size(layers=12, hidden=768, heads=12, vocab=30522)


def build(
    path: Path, *, exporter: Exporter = "torchscript", size: Size | None = None, seed: int = 0, external: bool = False
) -> Path:
    """Writes the model to `path`, its weights beside it if `external`, and returns the path."""
    return write(model(exporter=exporter, size=size, seed=seed), path, external=external)


def model(
    *,
    exporter: Exporter = "torchscript",
    size: Size | None = None,
    seed: int = 0,
    shape: tuple[int, int] | None = None,
) -> onnx.ModelProto:
    """The encoder; `shape` fixes (batch, seq), otherwise both are symbolic."""
    size = size or Size()
    sizes = None if shape is None else {"batch": shape[0], "seq": shape[1]}
    if exporter == "dynamo":
        g = GraphWriter(20, seed=seed, sizes=sizes)
        _dynamo(g, size)
    else:
        g = GraphWriter(17, seed=seed, sizes=sizes, constants="nodes")
        _torchscript(g, size)
    return g.finish()


def _inputs(g: GraphWriter) -> tuple[str, str, str]:
    ids, mask, types = (g.input(name, np.int64, ("batch", "seq")) for name in INPUTS)
    return ids, mask, types


def _embed(g: GraphWriter, size: Size, ids: str, types: str, positions: str) -> str:
    words = g.op("Gather", g.normal((size.vocab, size.hidden), std=0.05, name="words"), ids)
    kinds = g.op("Gather", g.normal((2, size.hidden), std=0.05, name="token_types"), types)
    places = g.op("Gather", g.normal((size.positions, size.hidden), std=0.05, name="positions"), positions)
    return blocks.layer_norm(g, g.op("Add", g.op("Add", words, kinds), places), size.hidden, epsilon=EPSILON)


def _encoder(
    g: GraphWriter, size: Size, x: str, attention: Callable[[str], str], linear: Callable[[str, tuple[int, int]], str]
) -> None:
    """Post-norm layers from `x` to the graph output."""
    for layer in range(size.layers):
        out = "last_hidden_state" if layer == size.layers - 1 else None
        with g.scope(f"encoder/layer.{layer}"):
            with g.scope("attention"):
                dense = linear(attention(x), (size.hidden, size.hidden))
                attended = blocks.layer_norm(g, g.op("Add", dense, x), size.hidden, epsilon=EPSILON)
            with g.scope("intermediate"):
                wide = blocks.gelu(g, linear(attended, (size.hidden, 4 * size.hidden)))
            with g.scope("output"):
                narrow = linear(wide, (4 * size.hidden, size.hidden))
                x = blocks.layer_norm(g, g.op("Add", narrow, attended), size.hidden, epsilon=EPSILON, out=out)


# --- TorchScript -----------------------------------------------------------------------------------------------------


def _torchscript(g: GraphWriter, size: Size) -> None:
    ids, mask, types = _inputs(g)
    seq = g.extent(ids, 1, "seq")
    with g.scope("embeddings"):
        every = g.constant(np.arange(size.positions, dtype=np.int64)[None])
        positions = g.op("Slice", every, g.constant([0]), g.vector(seq), g.constant([1]), g.constant([1]))
        x = _embed(g, size, ids, types, positions)
    batch = g.extent(x, 0, "batch")
    allowed = torchscript_mask(g, mask, x, batch, seq)

    def attention(value: str) -> str:
        extents = (batch, seq) if value == x else (g.extent(value, 0, "batch"), g.extent(value, 1, "seq"))
        with g.scope("self"):
            return _torchscript_attention(g, size, value, allowed, extents)

    _encoder(g, size, x, attention, lambda value, sizes: blocks.linear(g, value, sizes))
    dims: tuple[Dim, ...] = ("batch", "seq")
    if not g.static:
        dims = tuple(f"LayerNormalizationlast_hidden_state_dim_{axis}" for axis in range(2))
    g.output("last_hidden_state", np.float32, (*dims, size.hidden))


def torchscript_mask(g: GraphWriter, mask: str, x: str, batch: Extent, seq: Extent, *, causal: bool = False) -> str:
    """Which keys each query may see, bool [batch, 1, seq, seq]: mask.flatten()[b * seq + k], and q >= 0 or, of a causal
    model, k <= q, expanded."""
    flags = g.op("Cast", mask, to=onnx.TensorProto.BOOL)
    queries = g.extent(x, 1, "seq")
    keys = g.extent(flags, 1, "seq")

    def arange(extent: Extent, axes: tuple[int, int, int]) -> str:
        limit = extent if isinstance(extent, str) else g.constant(extent)
        value = g.op("Range", g.constant(0), g.op("Cast", limit, to=onnx.TensorProto.INT64), g.constant(1))
        for axis in axes:
            value = g.op("Unsqueeze", value, g.constant([axis]))
        return value

    b = arange(batch, (1, 2, 3))
    q = arange(seq, (0, 1, 3))
    k = arange(keys, (0, 1, 2))
    true = g.op(
        "ConstantOfShape",
        g.constant([], np.int64),
        value=onnx.helper.make_tensor("value", onnx.TensorProto.BOOL, [1], [True]),
    )
    may = g.op("LessOrEqual", k, q) if causal else g.op("GreaterOrEqual", q, g.constant(0))
    every = g.op("And", true, g.op("Cast", may, to=onnx.TensorProto.BOOL))
    row = g.op("Gather", g.op("Shape", flags), g.constant([1]), axis=0)
    index = g.op("Add", k, g.op("Mul", b, row))
    picked = g.op("Gather", g.op("Flatten", flags, axis=2), index, axis=0)
    shape = g.op("Shape", index)
    flat = g.op("Reshape", picked, g.constant([-1]), allowzero=0)
    shaped = g.op("Reshape", flat, g.op("Concat", shape, axis=0), allowzero=0)
    seen = g.op("And", every, g.op("Cast", shaped, to=onnx.TensorProto.BOOL))
    wanted = g.op("Reshape", g.shape(batch, -1, queries, keys), g.constant([-1]), allowzero=0)
    ones = g.op(
        "ConstantOfShape",
        g.op("Shape", wanted),
        value=onnx.helper.make_tensor("value", onnx.TensorProto.INT64, [1], [1]),
    )
    keep = g.op("Equal", wanted, g.op("Mul", ones, g.constant(-1)))
    return g.op("Expand", seen, g.op("Where", keep, ones, wanted))


def _torchscript_attention(g: GraphWriter, size: Size, x: str, allowed: str, extents: tuple[Extent, Extent]) -> str:
    batch, seq = extents
    width = size.head_width
    shapes = [g.shape(batch, seq, -1, width) for _ in range(3)]
    parts = [g.op("Reshape", blocks.linear(g, x, (size.hidden, size.hidden)), shape, allowzero=0) for shape in shapes]
    query = g.op("Transpose", parts[0], perm=[0, 2, 1, 3])
    value = g.op("Transpose", parts[2], perm=[0, 2, 1, 3])
    queries = g.extent(query, 2, "seq")
    key = g.op("Transpose", parts[1], perm=[0, 2, 3, 1])
    root = math.sqrt(1 / math.sqrt(width))
    scores = g.op("MatMul", g.op("Mul", query, g.constant(root)), g.op("Mul", key, g.constant(root)))
    zero, lowest = g.constant([0.0]), g.constant([-math.inf])
    weights = g.op("Softmax", g.op("Add", scores, g.op("Where", allowed, zero, lowest)), axis=-1)
    guarded = g.op("Where", g.op("IsNaN", weights), g.constant([0.0]), weights)
    context = g.op("MatMul", guarded, value)
    channels = g.op("Gather", g.op("Shape", value), g.constant(3), axis=0)
    heads_first = g.shape(g.extent(context, 0, "batch"), -1, queries, channels)
    rows = g.op("Transpose", g.op("Reshape", context, heads_first, allowzero=0), perm=[0, 2, 1, 3])
    return g.op("Reshape", rows, g.shape(batch, seq, -1), allowzero=0)


# --- dynamo ----------------------------------------------------------------------------------------------------------


def _dynamo(g: GraphWriter, size: Size) -> None:
    ids, mask, types = _inputs(g)
    batch = g.op("Shape", types, start=0, end=1)
    seq = g.op("Shape", types, start=1, end=2)
    with g.scope("embeddings"):
        every = g.initializer(np.arange(size.positions, dtype=np.int64)[None], "position_ids")
        positions = g.op("Slice", every, g.constant([0]), seq, g.constant([1]), g.constant([1]))
        x = _embed(g, size, ids, types, positions)
    bias = _dynamo_mask(g, mask, batch, seq)
    split = g.op("Concat", batch, seq, g.constant([-1]), g.constant([size.head_width]), axis=0)
    joined = g.op("Concat", batch, seq, g.constant([-1]), axis=0)

    def linear(value: str, sizes: tuple[int, int]) -> str:
        product = g.op("MatMul", value, g.normal(sizes, std=1 / math.sqrt(sizes[0])))
        return g.op("Add", product, g.normal((sizes[1],), std=0.1, name="bias"))

    def attention(value: str) -> str:
        with g.scope("self"):
            projected = [linear(value, (size.hidden, size.hidden)) for _ in range(3)]
            return _dynamo_attention(g, size, projected, bias, split, joined)

    _encoder(g, size, x, attention, linear)
    g.output("last_hidden_state", np.float32, ("batch", "seq", size.hidden))


def _dynamo_mask(g: GraphWriter, mask: str, batch: str, seq: str) -> str:
    """0 where a key is seen, the lowest float where not, [batch, 1, seq, seq]."""
    flags = g.op("Cast", mask, to=onnx.TensorProto.BOOL)
    zero, one = g.constant(0), g.constant(1)
    rows = g.op("Range", zero, g.op("Squeeze", batch), one)
    columns = g.op("Range", zero, g.op("Squeeze", seq), one)
    b = g.op("Unsqueeze", g.op("Unsqueeze", rows, g.constant([1, 2])), g.constant([3]))
    wide = g.op("Unsqueeze", columns, g.constant([0, 1]))
    q = g.op("Unsqueeze", wide, g.constant([3]))
    k = g.op("Unsqueeze", wide, g.constant([2]))
    every = g.op("And", g.constant(True, np.bool_), g.op("GreaterOrEqual", q, zero))
    shape = g.op("Shape", g.op("Max", b, k), start=0)
    last = g.constant([-1])
    indices = [g.op("Unsqueeze", g.op("Expand", value, shape), last) for value in (b, k)]
    seen = g.op("GatherND", flags, g.op("Concat", *indices, axis=-1), batch_dims=0)
    return g.op("Where", g.op("And", every, seen), g.constant(0.0), g.constant(np.finfo(np.float32).min))


def _dynamo_attention(g: GraphWriter, size: Size, projected: list[str], bias: str, split: str, joined: str) -> str:
    query, key, value = (
        g.op("Transpose", g.op("Reshape", part, split, allowzero=1), perm=[0, 2, 1, 3]) for part in projected
    )
    shape = g.op("Shape", key, start=0)
    last, second_last = g.constant([-1]), g.constant([-2])
    seq_at_end = g.op("Slice", shape, second_last, last)
    width_at_end = g.op("Slice", shape, last, g.constant([np.iinfo(np.int64).max]))
    leading = g.op("Slice", shape, g.constant([np.iinfo(np.int64).min]), second_last)
    flat = g.op("Reshape", key, g.op("Concat", last, seq_at_end, width_at_end, axis=0), allowzero=0)
    turned = g.op("Transpose", flat, perm=[0, 2, 1])
    key = g.op("Reshape", turned, g.op("Concat", leading, width_at_end, seq_at_end, axis=0), allowzero=0)
    root = g.constant(math.sqrt(1 / math.sqrt(size.head_width)))
    scores = g.op("MatMul", g.op("Mul", query, root), g.op("Mul", key, root))
    weights = g.op("Softmax", g.op("Add", scores, bias), axis=-1)
    guarded = g.op("Where", g.op("IsNaN", weights), g.constant(0.0), weights)
    context = g.op("Transpose", g.op("MatMul", guarded, value), perm=[0, 2, 1, 3])
    return g.op("Reshape", context, joined, allowzero=1)
