"""Attention as exporters and hand-written models spell it: a catalogue of small blocks, each with inputs to run it.

`SPELLINGS` is what a fuser must find attention in, whatever the layout, the mask, the scale or the leftovers; the
spellings with positions, caches and grouped heads are in `models.attention_positions`.
"""

import math

import numpy as np
from onnx import TensorProto

from models import blocks
from models.attention_parts import (
    HEADS,
    HEADS_FIRST,
    HIDDEN,
    KEYS_LAST,
    LONGEST,
    LOWEST,
    WIDTH,
    block,
    causal_bias,
    divided,
    finish,
    join,
    mask_input,
    multiplied,
    padding_bias,
    products,
    project,
    seq,
    softmax,
    split,
    square,
    widen,
)
from models.attention_positions import POSITION_SPELLINGS
from models.catalogue import Entry
from models.graph import GraphWriter

Spelling = Entry

# --- masks and scales ------------------------------------------------------------------------------------------------


def _bert(g: GraphWriter, x: str, *, hidden: float = -10000.0) -> str:
    query, key, value = project(g, x)
    bias = padding_bias(g, mask_input(g), hidden)
    return finish(g, g.op("Add", divided(g, query, key), bias), value)


def _bert_lowest(g: GraphWriter, x: str) -> str:
    return _bert(g, x, hidden=LOWEST)


def _bert_infinite(g: GraphWriter, x: str) -> str:
    """A hidden key has -inf and a visible one 0, by Where, since 0 · -inf would be NaN."""
    query, key, value = project(g, x)
    return finish(g, g.op("Add", divided(g, query, key), _infinite_bias(g)), value)


def _infinite_bias(g: GraphWriter) -> str:
    visible = g.op("Cast", widen(g, mask_input(g)), to=TensorProto.BOOL)
    return g.op("Where", visible, g.constant(0.0), g.constant(-math.inf))


def _guarded(g: GraphWriter, x: str) -> str:
    """-inf, and NaN turned to 0 after the softmax: a row without visible keys gives 0."""
    query, key, value = project(g, x)
    weights = softmax(g, g.op("Add", multiplied(g, query, key), _infinite_bias(g)))
    kept = g.op("Where", g.op("IsNaN", weights), g.constant(0.0), weights)
    return join(g, g.op("MatMul", kept, value))


def _clipped(g: GraphWriter, x: str) -> str:
    """-inf raised to the lowest float by Max: a row without visible keys gives the mean."""
    query, key, value = project(g, x)
    scores = g.op("Add", multiplied(g, query, key), _infinite_bias(g))
    return finish(g, g.op("Max", scores, g.constant(LOWEST)), value)


def _multiplied(g: GraphWriter, x: str) -> str:
    query, key, value = project(g, x)
    bias = padding_bias(g, mask_input(g), -10000.0)
    return finish(g, g.op("Add", multiplied(g, query, key), bias), value)


def _unmasked(g: GraphWriter, x: str) -> str:
    query, key, value = project(g, x)
    return finish(g, divided(g, query, key), value)


def _root_on_both(g: GraphWriter, x: str) -> str:
    query, key, value = project(g, x)
    bias = padding_bias(g, mask_input(g), LOWEST)
    root = g.constant(math.sqrt(1 / math.sqrt(WIDTH)))
    turned = g.op("Transpose", key, perm=[0, 1, 3, 2])
    scores = g.op("MatMul", g.op("Mul", query, root), g.op("Mul", turned, root))
    return finish(g, g.op("Add", scores, bias), value)


def _computed_scale(g: GraphWriter, x: str) -> str:
    """1 / √d read off the shape of Q, its root on both factors."""
    query, key, value = project(g, x)
    last = g.op("Slice", g.op("Shape", query), g.constant([-1]), g.constant([np.iinfo(np.int64).max]))
    width = g.op("Sqrt", g.op("Cast", last, to=TensorProto.FLOAT))
    root = g.op("Sqrt", g.op("Div", g.constant([1.0]), width))
    turned = g.op("Transpose", key, perm=[0, 1, 3, 2])
    scores = g.op("MatMul", g.op("Mul", query, root), g.op("Mul", turned, root))
    return finish(g, scores, value)


def _scaled_query(g: GraphWriter, x: str) -> str:
    query, key, value = project(g, x)
    scaled = g.op("Mul", query, g.constant(1 / math.sqrt(WIDTH)))
    return finish(g, g.op("Add", products(g, scaled, key), padding_bias(g, mask_input(g), -10000.0)), value)


def _boolean_where(g: GraphWriter, x: str) -> str:
    """DistilBERT: Equal, Reshape, Expand to the scores' shape, Where."""
    query, key, value = project(g, x)
    mask = mask_input(g)
    batch, length = g.extent(mask, 0, "batch"), g.extent(mask, 1, "seq")
    hidden = g.op("Reshape", g.op("Equal", mask, g.constant(0)), g.shape(batch, 1, 1, length))
    wide = g.op("Expand", hidden, g.shape(batch, HEADS, length, length))
    scaled = g.op("Div", query, g.constant(math.sqrt(WIDTH)))
    hidden = g.op("Cast", wide, to=TensorProto.BOOL)
    return finish(g, g.op("Where", hidden, g.constant(LOWEST), products(g, scaled, key)), value)


def _boolean_input(g: GraphWriter, x: str) -> str:
    """A boolean mask joined with a causal one by And, expanded, then Where with -inf and a guard."""
    query, key, value = project(g, x)
    mask = widen(g, mask_input(g, np.bool_))
    lower = square(g, np.tril(np.ones((LONGEST, LONGEST), bool))[None, None], seq(g, x), seq(g, x))
    visible = g.op("And", mask, lower)
    weights = softmax(g, g.op("Where", visible, multiplied(g, query, key), g.constant(-math.inf)))
    kept = g.op("Where", g.op("IsNaN", weights), g.constant(0.0), weights)
    return join(g, g.op("MatMul", kept, value))


def _additive_input(g: GraphWriter, x: str) -> str:
    query, key, value = project(g, x)
    bias = g.input("score_bias", np.float32, ("batch", 1, "seq", "seq"))
    return finish(g, g.op("Add", multiplied(g, query, key), bias), value)


def _soft_cap(g: GraphWriter, x: str) -> str:
    query, key, value = project(g, x)
    scores = multiplied(g, query, key)
    capped = g.op("Mul", g.op("Tanh", g.op("Div", scores, g.constant(5.0))), g.constant(5.0))
    return finish(g, g.op("Add", capped, causal_bias(g, x)), value)


def _half_precision(g: GraphWriter, x: str) -> str:
    """float16 throughout, the softmax in float32."""
    query, key, value = project(g, x, dtype=np.float16)
    scale = g.constant(1 / math.sqrt(WIDTH), np.float16)
    full = np.triu(np.full((LONGEST, LONGEST), -65504, np.float16), 1)[None, None]
    scores = g.op("Add", g.op("Mul", products(g, query, key), scale), square(g, full, seq(g, x), seq(g, x)))
    weights = softmax(g, g.op("Cast", scores, to=TensorProto.FLOAT))
    return join(g, g.op("MatMul", g.op("Cast", weights, to=TensorProto.FLOAT16), value))


# --- layouts ---------------------------------------------------------------------------------------------------------


def _key_straight(g: GraphWriter, x: str) -> str:
    query = split(g, blocks.linear(g, x, (HIDDEN, HIDDEN)))
    key = split(g, blocks.linear(g, x, (HIDDEN, HIDDEN)), perm=KEYS_LAST)
    value = split(g, blocks.linear(g, x, (HIDDEN, HIDDEN)))
    scores = g.op("Div", g.op("MatMul", query, key), g.constant(math.sqrt(WIDTH)))
    return finish(g, g.op("Add", scores, padding_bias(g, mask_input(g), -10000.0)), value)


def _packed_split(g: GraphWriter, x: str) -> str:
    packed = blocks.linear(g, x, (HIDDEN, 3 * HIDDEN))
    parts = g.ops("Split", packed, g.constant([HIDDEN] * 3), outs=(None,) * 3, axis=2)
    query, key, value = (split(g, part) for part in parts)
    bias = padding_bias(g, mask_input(g), -10000.0)
    return finish(g, g.op("Add", divided(g, query, key), bias), value)


def _packed_slices(g: GraphWriter, x: str) -> str:
    packed = blocks.linear(g, x, (HIDDEN, 3 * HIDDEN))
    parts = [
        g.op("Slice", packed, g.constant([i * HIDDEN]), g.constant([(i + 1) * HIDDEN]), g.constant([-1]))
        for i in range(3)
    ]
    query, key, value = (split(g, part) for part in parts)
    return finish(g, multiplied(g, query, key), value)


def _packed_gather(g: GraphWriter, x: str) -> str:
    """ViT: [batch, seq, 3, heads, width], transposed, one Gather each."""
    packed = blocks.linear(g, x, (HIDDEN, 3 * HIDDEN))
    five = g.op("Reshape", packed, g.constant([0, 0, 3, HEADS, WIDTH]))
    turned = g.op("Transpose", five, perm=[2, 0, 3, 1, 4])
    query, key, value = (g.op("Gather", turned, g.constant(i), axis=0) for i in range(3))
    return finish(g, multiplied(g, query, key), value)


def _packed_by_head(g: GraphWriter, x: str) -> str:
    """GPT-NeoX: [batch, seq, heads, 3 · width], then split."""
    packed = blocks.linear(g, x, (HIDDEN, 3 * HIDDEN))
    wide = g.op("Transpose", g.op("Reshape", packed, g.constant([0, 0, HEADS, 3 * WIDTH])), perm=list(HEADS_FIRST))
    query, key, value = g.ops("Split", wide, g.constant([WIDTH] * 3), outs=(None,) * 3, axis=3)
    return finish(g, g.op("Add", divided(g, query, key), causal_bias(g, x)), value)


def _gemm(g: GraphWriter, x: str) -> str:
    """Gemm between Reshapes."""
    rows = g.op("Reshape", x, g.constant([-1, HIDDEN]))
    shape = g.shape(g.extent(x, 0, "batch"), seq(g, x), HEADS, WIDTH)
    query, key, value = (
        g.op("Transpose", g.op("Reshape", blocks.gemm(g, rows, (HIDDEN, HIDDEN)), shape), perm=list(HEADS_FIRST))
        for _ in range(3)
    )
    bias = padding_bias(g, mask_input(g), -10000.0)
    return finish(g, g.op("Add", divided(g, query, key), bias), value)


def _three_dims(g: GraphWriter, x: str) -> str:
    """Batch and heads in one dim, as diffusers write it; no bias."""
    length = seq(g, x)
    flat = g.shape(-1, length, WIDTH)
    query, key, value = (g.op("Reshape", part, flat) for part in project(g, x, bias=False))
    scores = g.op("Mul", g.op("MatMul", query, g.op("Transpose", key, perm=[0, 2, 1])), g.constant(WIDTH**-0.5))
    context = g.op("MatMul", softmax(g, scores), value)
    return join(g, g.op("Reshape", context, g.shape(-1, HEADS, length, WIDTH)))


def _sequence_first(g: GraphWriter, x: str) -> str:
    """nn.MultiheadAttention: [seq, batch, hidden], heads folded into the batch, K transposed by 120."""
    turned = g.op("Transpose", x, perm=[1, 0, 2])
    packed = blocks.linear(g, turned, (HIDDEN, 3 * HIDDEN))
    parts = g.ops("Split", packed, g.constant([HIDDEN] * 3), outs=(None,) * 3, axis=2)
    length = seq(g, x)
    shape = g.shape(length, -1, WIDTH)
    query, key, value = (g.op("Reshape", part, shape) for part in parts)
    scaled = g.op("Transpose", g.op("Mul", query, g.constant(WIDTH**-0.5)), perm=[1, 0, 2])
    scores = g.op("MatMul", scaled, g.op("Transpose", key, perm=[1, 2, 0]))
    context = g.op("MatMul", softmax(g, scores), g.op("Transpose", value, perm=[1, 0, 2]))
    rows = g.op("Reshape", g.op("Transpose", context, perm=[1, 0, 2]), g.shape(length, -1, HIDDEN))
    return g.op("Transpose", rows, perm=[1, 0, 2])


def _computed_shapes(g: GraphWriter, x: str) -> str:
    """Every Reshape through Shape, Gather, Unsqueeze and Concat."""
    parts: list[str] = []
    for _ in range(3):
        projected = blocks.linear(g, x, (HIDDEN, HIDDEN))
        shape = g.shape(g.extent(x, 0, "batch"), seq(g, x), HEADS, WIDTH)
        parts.append(g.op("Transpose", g.op("Reshape", projected, shape), perm=list(HEADS_FIRST)))
    bias = padding_bias(g, mask_input(g), -10000.0)
    weights = softmax(g, g.op("Add", divided(g, parts[0], parts[1]), bias))
    rows = g.op("Transpose", g.op("MatMul", weights, parts[2]), perm=list(HEADS_FIRST))
    return g.op("Reshape", rows, g.shape(g.extent(x, 0, "batch"), seq(g, x), HIDDEN))


def _einsum(g: GraphWriter, x: str) -> str:
    query, key, value = (
        g.op("Reshape", blocks.linear(g, x, (HIDDEN, HIDDEN)), g.constant([0, 0, HEADS, WIDTH])) for _ in range(3)
    )
    scores = g.op("Einsum", query, key, equation="bqhd,bkhd->bhqk")
    weights = softmax(g, g.op("Mul", scores, g.constant(WIDTH**-0.5)))
    context = g.op("Einsum", weights, value, equation="bhqk,bkhd->bqhd")
    return g.op("Reshape", context, g.constant([0, 0, HIDDEN]))


def _keys_first(g: GraphWriter, x: str) -> str:
    """K Qᵀ, softmax over axis -2, Vᵀ times that."""
    query, key, value = project(g, x)
    scores = g.op("Mul", products(g, key, query), g.constant(WIDTH**-0.5))
    weights = g.op("Softmax", scores, axis=-2)
    context = g.op("MatMul", g.op("Transpose", value, perm=[0, 1, 3, 2]), weights)
    rows = g.op("Transpose", context, perm=[0, 3, 1, 2])
    return g.op("Reshape", rows, g.constant([0, 0, HIDDEN]))


# --- leftovers and other consumers -----------------------------------------------------------------------------------


def _leftovers(g: GraphWriter, x: str) -> str:
    """Dropout, Identity, Mul by 1, Add of 0 and a double Transpose on the way."""
    query, key, value = project(g, x)
    scores = g.op("Add", divided(g, query, key), padding_bias(g, mask_input(g), -10000.0))
    scores = g.op("Add", g.op("Mul", scores, g.constant(1.0)), g.constant(0.0))
    weights = g.op("Dropout", softmax(g, scores), g.constant(0.1), g.constant(False, np.bool_))
    twice = g.op("Transpose", g.op("Transpose", value, perm=[0, 1, 3, 2]), perm=[0, 1, 3, 2])
    return join(g, g.op("MatMul", g.op("Identity", weights), twice))


def _decomposed(g: GraphWriter, x: str) -> str:
    """The softmax in its five pieces."""
    query, key, value = project(g, x)
    scores = g.op("Add", divided(g, query, key), padding_bias(g, mask_input(g), -10000.0))
    top = g.op("ReduceMax", scores, axes=[-1], keepdims=1)
    raised = g.op("Exp", g.op("Sub", scores, top))
    total = g.op("ReduceSum", raised, g.constant([-1]), keepdims=1)
    return join(g, g.op("MatMul", g.op("Div", raised, total), value))


def _shown_weights(g: GraphWriter, x: str) -> str:
    """The probabilities are a second output."""
    query, key, value = project(g, x)
    scores = g.op("Add", divided(g, query, key), padding_bias(g, mask_input(g), -10000.0))
    weights = g.op("Softmax", scores, axis=-1, out="weights")
    g.output("weights", np.float32, ("batch", HEADS, "seq", "seq"))
    return join(g, g.op("MatMul", weights, value))


def _cross(g: GraphWriter, x: str) -> str:
    """Keys and values from another sequence, of another length."""
    memory = g.input("memory", np.float32, ("batch", "keys", HIDDEN))
    mask = g.input("mask", np.int64, ("batch", "keys"))
    query = split(g, blocks.linear(g, x, (HIDDEN, HIDDEN)))
    key = split(g, blocks.linear(g, memory, (HIDDEN, HIDDEN)))
    value = split(g, blocks.linear(g, memory, (HIDDEN, HIDDEN)))
    return finish(g, g.op("Add", divided(g, query, key), padding_bias(g, mask, -10000.0)), value)


CROSS_SIZES = ({"batch": 3, "seq": 7, "keys": 5}, {"batch": 2, "seq": 4, "keys": 11})

SPELLINGS: tuple[Spelling, ...] = (
    Entry("bert_div", "Div by √d, (1 - mask) · -10000", block(_bert)),
    Entry("bert_lowest", "Div by √d, (1 - mask) · the lowest float", block(_bert_lowest)),
    Entry("bert_infinite", "-inf at hidden keys: NaN where none is visible", block(_bert_infinite)),
    Entry("bert_mul", "Mul by 1/√d", block(_multiplied)),
    Entry("unmasked", "no mask", block(_unmasked)),
    Entry("root_on_both", "√scale on Q and on K", block(_root_on_both)),
    Entry("computed_scale", "the scale from Shape, Cast and Sqrt", block(_computed_scale)),
    Entry("scaled_query", "the scale on Q alone", block(_scaled_query)),
    Entry("guarded", "-inf and a NaN guard: 0 where no key is visible", block(_guarded)),
    Entry("clipped", "-inf raised by Max", block(_clipped)),
    Entry("boolean_where", "Equal, Expand, Where", block(_boolean_where)),
    Entry("boolean_input", "boolean mask And causal, Where with -inf, guard", block(_boolean_input)),
    Entry("additive_input", "the bias is an input", block(_additive_input)),
    Entry("soft_cap", "Div, Tanh, Mul on the scores, causal", block(_soft_cap)),
    Entry("half_precision", "float16 with a float32 softmax", block(_half_precision, dtype=np.float16)),
    Entry("key_straight", "K transposed by 0231 at once", block(_key_straight)),
    Entry("packed_split", "one projection and Split", block(_packed_split)),
    Entry("packed_slices", "one projection and three Slices", block(_packed_slices)),
    Entry("packed_gather", "one projection, five dims, three Gathers", block(_packed_gather)),
    Entry("packed_by_head", "one projection, split within each head", block(_packed_by_head)),
    Entry("gemm", "Gemm between Reshapes", block(_gemm)),
    Entry("three_dims", "batch and heads in one dim", block(_three_dims)),
    Entry("sequence_first", "[seq, batch, hidden]", block(_sequence_first)),
    Entry("computed_shapes", "every Reshape through Shape and Concat", block(_computed_shapes)),
    Entry("einsum", "two Einsums", block(_einsum)),
    Entry("keys_first", "softmax over axis -2", block(_keys_first)),
    Entry("leftovers", "Dropout, Identity, · 1, + 0, double Transpose", block(_leftovers)),
    Entry("decomposed", "the softmax in pieces", block(_decomposed)),
    Entry("shown_weights", "the probabilities are an output too", block(_shown_weights)),
    Entry("cross", "keys of another sequence", block(_cross), sizes=CROSS_SIZES),
    *POSITION_SPELLINGS,
)
