"""A MiniLM-sized sentence encoder with random weights, spelled as PyTorch's TorchScript exporter spells eager BERT.

In: input_ids, attention_mask, token_type_ids, int64 [batch, seq]. Out: last_hidden_state, float32 [batch, seq, hidden].
It stands in for the trained model where that is not installed: same operators, same sizes, no meaning.
"""

import math
from pathlib import Path

import numpy as np
import onnx

from models import blocks
from models.graph import GraphWriter, write

POSITIONS = 512


def build(
    path: Path,
    *,
    layers: int = 6,
    hidden: int = 384,
    heads: int = 12,
    vocab: int = 30522,
    seed: int = 0,
    opset: int = 17,
) -> Path:
    """Writes the model to `path` and returns it."""
    return write(model(layers=layers, hidden=hidden, heads=heads, vocab=vocab, seed=seed, opset=opset), path)


def model(
    *, layers: int = 6, hidden: int = 384, heads: int = 12, vocab: int = 30522, seed: int = 0, opset: int = 17
) -> onnx.ModelProto:
    """The encoder; below opset 17 LayerNorm is spelled in pieces. Raises ValueError when heads do not divide hidden."""
    if hidden % heads:
        raise ValueError(f"hidden must be a multiple of heads, found hidden={hidden} and heads={heads}")
    g = GraphWriter(opset, seed=seed, constants="nodes")
    ids = g.input("input_ids", np.int64, ("batch", "seq"))
    mask = g.input("attention_mask", np.int64, ("batch", "seq"))
    types = g.input("token_type_ids", np.int64, ("batch", "seq"))
    bias = _mask_bias(g, mask)
    with g.scope("embeddings"):
        x = _embeddings(g, (ids, types), (vocab, hidden))
    for layer in range(layers):
        out = "last_hidden_state" if layer == layers - 1 else None
        with g.scope(f"encoder/layer.{layer}"):
            x = _layer(g, x, bias, hidden=hidden, heads=heads, out=out)
    g.output("last_hidden_state", np.float32, ("batch", "seq", hidden))
    return g.finish()


def _mask_bias(g: GraphWriter, mask: str) -> str:
    """(1 - mask) * the lowest float, [batch, 1, 1, seq]."""
    wide = g.op("Unsqueeze", g.op("Unsqueeze", mask, g.constant([1])), g.constant([2]))
    inverted = g.op("Sub", g.constant(1.0), g.op("Cast", wide, to=onnx.TensorProto.FLOAT))
    return g.op("Mul", inverted, g.constant(np.finfo(np.float32).min))


def _embeddings(g: GraphWriter, inputs: tuple[str, str], sizes: tuple[int, int]) -> str:
    ids, types = inputs
    vocab, hidden = sizes
    seq = g.extent(ids, 1, "seq")
    every = g.constant(np.arange(POSITIONS, dtype=np.int64)[None])
    positions = g.op("Slice", every, g.constant([0]), g.vector(seq), g.constant([1]), g.constant([1]))
    words = g.op("Gather", g.normal((vocab, hidden), std=0.05, name="words"), ids)
    kinds = g.op("Gather", g.normal((2, hidden), std=0.05, name="token_types"), types)
    places = g.op("Gather", g.normal((POSITIONS, hidden), std=0.05, name="positions"), positions)
    return blocks.layer_norm(g, g.op("Add", g.op("Add", words, kinds), places), hidden, epsilon=1e-12)


def _layer(g: GraphWriter, x: str, bias: str, *, hidden: int, heads: int, out: str | None) -> str:
    with g.scope("attention"):
        context = _attention(g, x, bias, hidden=hidden, heads=heads)
        dense = blocks.linear(g, context, (hidden, hidden))
        attended = blocks.layer_norm(g, g.op("Add", dense, x), hidden, epsilon=1e-12)
    with g.scope("intermediate"):
        wide = blocks.gelu(g, blocks.linear(g, attended, (hidden, 4 * hidden)))
    with g.scope("output"):
        narrow = blocks.linear(g, wide, (4 * hidden, hidden))
        return blocks.layer_norm(g, g.op("Add", narrow, attended), hidden, epsilon=1e-12, out=out)


def _attention(g: GraphWriter, x: str, bias: str, *, hidden: int, heads: int) -> str:
    """Softmax(Q Kᵀ / √d + bias) V, heads joined: [batch, seq, hidden]. K goes straight to [batch, head, d, seq]."""
    width = hidden // heads

    def split(value: str, perm: list[int]) -> str:
        shape = g.shape(g.extent(value, 0, "batch"), g.extent(value, 1, "seq"), heads, width)
        return g.op("Transpose", g.op("Reshape", value, shape, allowzero=0), perm=perm)

    query = split(blocks.linear(g, x, (hidden, hidden)), [0, 2, 1, 3])
    key = split(blocks.linear(g, x, (hidden, hidden)), [0, 2, 3, 1])
    value = split(blocks.linear(g, x, (hidden, hidden)), [0, 2, 1, 3])
    scores = g.op("Div", g.op("MatMul", query, key), g.constant(math.sqrt(width)))
    weights = g.op("Softmax", g.op("Add", scores, bias), axis=-1)
    context = g.op("Transpose", g.op("MatMul", weights, value), perm=[0, 2, 1, 3])
    shape = g.shape(g.extent(context, 0, "batch"), g.extent(context, 1, "seq"), hidden)
    return g.op("Reshape", context, shape, allowzero=0)
