"""Attention spellings with positions, caches, grouped heads and images: the second half of the catalogue."""

import math

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from models import blocks
from models.attention_parts import (
    HEADS,
    HEADS_FIRST,
    HIDDEN,
    LONGEST,
    LOWEST,
    WIDTH,
    block,
    causal_bias,
    divided,
    finish,
    join,
    multiplied,
    products,
    project,
    seq,
    softmax,
    split,
    square,
)
from models.catalogue import Entry
from models.graph import Extent, GraphWriter

END = 2**62  # a Slice end beyond every dim, as exporters write it
GROUPS = 2

# --- causal masks, windows and biases of the position ----------------------------------------------------------------


def _causal_constant(g: GraphWriter, x: str) -> str:
    """GPT-2: a boolean buffer, sliced, then Where."""
    query, key, value = project(g, x)
    lower = square(g, np.tril(np.ones((LONGEST, LONGEST), bool))[None, None], seq(g, x), seq(g, x))
    return finish(g, g.op("Where", lower, divided(g, query, key), g.constant(LOWEST)), value)


def _causal_trilu(g: GraphWriter, x: str) -> str:
    """Ones expanded to the scores' shape, Trilu, Where with -inf."""
    query, key, value = project(g, x)
    scores = divided(g, query, key)
    shape = g.op("Slice", g.op("Shape", scores), g.constant([2]), g.constant([4]))
    ones = g.op("Expand", g.constant(1.0), shape)
    lower = g.op("Cast", g.op("Trilu", ones, upper=0), to=TensorProto.BOOL)
    return finish(g, g.op("Where", lower, scores, g.constant(-math.inf)), value)


def _causal_range(g: GraphWriter, x: str) -> str:
    """Query position >= key position, both by Range."""
    query, key, value = project(g, x)
    length = seq(g, x)
    limit = length if isinstance(length, str) else g.constant(length)
    positions = g.op("Range", g.constant(0), limit, g.constant(1))
    rows = g.op("Unsqueeze", positions, g.constant([1]))
    visible = g.op("GreaterOrEqual", rows, g.op("Unsqueeze", positions, g.constant([0])))
    return finish(g, g.op("Where", visible, multiplied(g, query, key), g.constant(LOWEST)), value)


def _window(g: GraphWriter, x: str) -> str:
    """The last three keys only: an additive constant."""
    query, key, value = project(g, x)
    distance = np.arange(LONGEST)[:, None] - np.arange(LONGEST)[None]
    full = np.where((distance >= 0) & (distance < 3), 0.0, LOWEST).astype(np.float32)[None, None]
    return finish(g, g.op("Add", divided(g, query, key), square(g, full, seq(g, x), seq(g, x))), value)


def _alibi(g: GraphWriter, x: str) -> str:
    """A slope per head times the key position, and a causal mask."""
    query, key, value = project(g, x)
    slopes = np.array([2.0 ** -(2 * head + 1) for head in range(HEADS)], np.float32)
    full = (slopes[:, None, None] * np.arange(LONGEST, dtype=np.float32))[None]
    bias = square(g, np.ascontiguousarray(full), 1, seq(g, x)) if g.static else _alibi_sliced(g, full, seq(g, x))
    scores = g.op("Add", multiplied(g, query, key), bias)
    return finish(g, g.op("Add", scores, causal_bias(g, x)), value)


def _alibi_sliced(g: GraphWriter, full: npt.NDArray[np.float32], length: Extent) -> str:
    return g.op("Slice", g.constant(full), g.constant([0]), g.vector(length), g.constant([3]), g.constant([1]))


def _relative_bias(g: GraphWriter, x: str) -> str:
    """T5: a table gathered by the bucket of the distance; no scale, no projection bias."""
    query, key, value = project(g, x, bias=False)
    distance = np.clip(np.arange(LONGEST)[None] - np.arange(LONGEST)[:, None], -5, 4) + 5
    buckets = square(g, distance.astype(np.int64), seq(g, x), seq(g, x))
    gathered = g.op("Gather", g.normal((10, HEADS), std=1.0, name="table"), buckets)
    bias = g.op("Unsqueeze", g.op("Transpose", gathered, perm=[2, 0, 1]), g.constant([0]))
    return finish(g, g.op("Add", products(g, query, key), bias), value)


def _sink(g: GraphWriter, x: str) -> str:
    """A learned score per head joined before the softmax and cut off after it."""
    query, key, value = project(g, x)
    scores = g.op("Add", multiplied(g, query, key), causal_bias(g, x))
    sinks = g.constant(np.linspace(-1, 1, HEADS, dtype=np.float32).reshape(1, HEADS, 1, 1))
    wide = g.op("Expand", sinks, g.shape(g.extent(x, 0, "batch"), HEADS, seq(g, x), 1))
    weights = softmax(g, g.op("Concat", scores, wide, axis=-1))
    cut = g.op("Slice", weights, g.constant([0]), g.constant([-1]), g.constant([3]))
    return join(g, g.op("MatMul", cut, value))


# --- rotary positions ------------------------------------------------------------------------------------------------


def _rotation(width: int, *, interleaved: bool = False) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """cos and sin, [1, 1, LONGEST, width]."""
    angles = np.arange(LONGEST)[:, None] / 100.0 ** (np.arange(width // 2)[None] / (width // 2))
    wide = np.repeat(angles, 2, axis=1) if interleaved else np.concatenate([angles, angles], axis=1)
    return np.cos(wide).astype(np.float32)[None, None], np.sin(wide).astype(np.float32)[None, None]


def _rotate_half(g: GraphWriter, x: str, length: Extent, width: int) -> str:
    """x cos + [-x2, x1] sin, x [..., length, width]."""
    cos, sin = _rotation(width)
    first = g.op("Slice", x, g.constant([0]), g.constant([width // 2]), g.constant([3]))
    second = g.op("Slice", x, g.constant([width // 2]), g.constant([END]), g.constant([3]))
    turned = g.op("Concat", g.op("Neg", second), first, axis=-1)
    left = g.op("Mul", x, square(g, cos, length, width))
    return g.op("Add", left, g.op("Mul", turned, square(g, sin, length, width)))


def _rotary(g: GraphWriter, x: str) -> str:
    query, key, value = project(g, x)
    query, key = (_rotate_half(g, part, seq(g, x), WIDTH) for part in (query, key))
    return finish(g, g.op("Add", divided(g, query, key), causal_bias(g, x)), value)


def _rotary_interleaved(g: GraphWriter, x: str) -> str:
    """GPT-J: even and odd channels are the pairs."""
    cos, sin = _rotation(WIDTH, interleaved=True)

    def rotate(part: str) -> str:
        steps = [g.constant([END]), g.constant([3]), g.constant([2])]
        even, odd = (g.op("Slice", part, g.constant([start]), *steps) for start in (0, 1))
        pairs = [g.op("Unsqueeze", value, g.constant([4])) for value in (g.op("Neg", odd), even)]
        turned = g.op("Reshape", g.op("Concat", *pairs, axis=4), g.constant([0, 0, 0, WIDTH]))
        left = g.op("Mul", part, square(g, cos, seq(g, x), WIDTH))
        return g.op("Add", left, g.op("Mul", turned, square(g, sin, seq(g, x), WIDTH)))

    query, key, value = project(g, x)
    return finish(g, divided(g, rotate(query), rotate(key)), value)


def _rotary_partial(g: GraphWriter, x: str) -> str:
    """The first half of the channels only."""

    def rotate(part: str) -> str:
        turning = g.op("Slice", part, g.constant([0]), g.constant([WIDTH // 2]), g.constant([3]))
        resting = g.op("Slice", part, g.constant([WIDTH // 2]), g.constant([END]), g.constant([3]))
        return g.op("Concat", _rotate_half(g, turning, seq(g, x), WIDTH // 2), resting, axis=-1)

    query, key, value = project(g, x)
    return finish(g, divided(g, rotate(query), rotate(key)), value)


def _normed_query(g: GraphWriter, x: str) -> str:
    """RMSNorm on each head of Q and K, then rotary."""

    def normed(width: int) -> str:
        part = g.op("Reshape", blocks.linear(g, x, (HIDDEN, HIDDEN)), g.constant([0, 0, HEADS, width]))
        heads = g.op("Transpose", blocks.rms_norm(g, part, width), perm=list(HEADS_FIRST))
        return _rotate_half(g, heads, seq(g, x), width)

    query, key = normed(WIDTH), normed(WIDTH)
    value = split(g, blocks.linear(g, x, (HIDDEN, HIDDEN)))
    return finish(g, g.op("Add", multiplied(g, query, key), causal_bias(g, x)), value)


# --- grouped heads and caches ----------------------------------------------------------------------------------------


def _repeat(g: GraphWriter, part: str, batch: Extent, length: Extent) -> str:
    """[batch, GROUPS, length, width] with every head twice, by Unsqueeze, Expand and Reshape."""
    each = HEADS // GROUPS
    wide = g.op("Expand", g.op("Unsqueeze", part, g.constant([2])), g.shape(batch, GROUPS, each, length, WIDTH))
    return g.op("Reshape", wide, g.shape(batch, HEADS, length, WIDTH))


def _grouped(g: GraphWriter, x: str) -> str:
    query, key, value = project(g, x, key_heads=GROUPS)
    batch, length = g.extent(x, 0, "batch"), seq(g, x)
    key, value = (_repeat(g, part, batch, length) for part in (key, value))
    return finish(g, g.op("Add", multiplied(g, query, key), causal_bias(g, x)), value)


def _grouped_gather(g: GraphWriter, x: str) -> str:
    """Heads repeated by a constant Gather."""
    query, key, value = project(g, x, key_heads=GROUPS)
    order = g.constant([head * GROUPS // HEADS for head in range(HEADS)])
    key, value = (g.op("Gather", part, order, axis=1) for part in (key, value))
    return finish(g, multiplied(g, query, key), value)


def _single_key_head(g: GraphWriter, x: str) -> str:
    """Multi-query attention: one head of keys, broadcast by MatMul."""
    query, key, value = project(g, x, key_heads=1)
    return finish(g, g.op("Add", multiplied(g, query, key), causal_bias(g, x)), value)


def _cache_bias(g: GraphWriter, x: str, total: Extent) -> str:
    """Causal with the queries at the end of the keys: rows past..past + seq of the full mask, columns 0..total."""
    full = np.triu(np.full((LONGEST, LONGEST), LOWEST, np.float32), 1)[None, None]
    length = seq(g, x)
    if isinstance(length, int) and isinstance(total, int):
        return g.constant(np.ascontiguousarray(full[..., total - length : total, :total]))
    end = g.vector(total)
    start = g.op("Sub", end, g.vector(length))
    rows = g.op("Slice", g.constant(full), start, end, g.constant([2]), g.constant([1]))
    return g.op("Slice", rows, g.constant([0]), end, g.constant([3]), g.constant([1]))


def _with_past(g: GraphWriter, key: str, value: str, heads: int) -> tuple[str, str]:
    """Past and present joined; the result is an output."""
    joined: list[str] = []
    for part, kind in ((key, "key"), (value, "value")):
        past = g.input(f"past_{kind}", np.float32, ("batch", heads, "past", WIDTH))
        joined.append(g.op("Concat", past, part, axis=2, out=f"present_{kind}"))
        g.output(f"present_{kind}", np.float32, ("batch", heads, "past + seq", WIDTH))
    return joined[0], joined[1]


def _cached(g: GraphWriter, x: str) -> str:
    query, key, value = project(g, x)
    key, value = _with_past(g, key, value, HEADS)
    total = g.extent(key, 2, "past + seq")
    return finish(g, g.op("Add", divided(g, query, key), _cache_bias(g, x, total)), value)


def _llama(g: GraphWriter, x: str) -> str:
    """RMSNorm before, rotary, cache, grouped heads, causal."""
    query, key, value = project(g, x, bias=False, key_heads=GROUPS)
    query, key = (_rotate_half(g, part, seq(g, x), WIDTH) for part in (query, key))
    key, value = _with_past(g, key, value, GROUPS)
    batch, total = g.extent(x, 0, "batch"), g.extent(key, 2, "past + seq")
    key, value = (_repeat(g, part, batch, total) for part in (key, value))
    return finish(g, g.op("Add", multiplied(g, query, key), _cache_bias(g, x, total)), value)


def _latent(g: GraphWriter, x: str) -> str:
    """Multi-head latent attention: keys and values from a narrow latent, a rotary part shared by all heads."""
    plain, turning, outer = 8, 4, 8
    latent = blocks.rms_norm(g, blocks.linear(g, x, (HIDDEN, 16), bias=False), 16)
    both = split(g, blocks.linear(g, latent, (16, HEADS * (plain + outer)), bias=False), width=plain + outer)
    key, value = g.ops("Split", both, g.constant([plain, outer]), outs=(None, None), axis=3)
    wide = split(g, blocks.linear(g, x, (HIDDEN, HEADS * (plain + turning)), bias=False), width=plain + turning)
    query, query_turning = g.ops("Split", wide, g.constant([plain, turning]), outs=(None, None), axis=3)
    key_turning = g.op("Unsqueeze", blocks.linear(g, x, (HIDDEN, turning), bias=False), g.constant([1]))
    shared = _rotate_half(g, key_turning, seq(g, x), turning)
    spread = g.op("Expand", shared, g.shape(g.extent(x, 0, "batch"), HEADS, seq(g, x), turning))
    query = g.op("Concat", query, _rotate_half(g, query_turning, seq(g, x), turning), axis=-1)
    key = g.op("Concat", key, spread, axis=-1)
    scores = g.op("Mul", products(g, query, key), g.constant((plain + turning) ** -0.5))
    return finish(g, g.op("Add", scores, causal_bias(g, x)), value)


# --- others ----------------------------------------------------------------------------------------------------------


def _operator(g: GraphWriter, x: str) -> str:
    """The Attention operator of opset 23 with a bias."""
    query, key, value = project(g, x)
    return join(g, g.op("Attention", query, key, value, causal_bias(g, x)))


def _linear_attention(g: GraphWriter, x: str) -> str:
    """elu + 1 as feature map, no softmax: not attention to a fuser that knows softmax only."""
    query, key, value = project(g, x)
    query, key = (g.op("Add", g.op("Elu", part), g.constant(1.0)) for part in (query, key))
    state = g.op("MatMul", g.op("Transpose", key, perm=[0, 1, 3, 2]), value)
    total = g.op("Unsqueeze", g.op("ReduceSum", key, g.constant([2]), keepdims=0), g.constant([-1]))
    return join(g, g.op("Div", g.op("MatMul", query, state), g.op("MatMul", query, total)))


def _windowed_image(g: GraphWriter) -> None:
    """Swin: a bias per head and a mask per window, added through a 5-D Reshape; x [4 · batch, 6, 32]."""
    windows, tokens = 4, 6
    x = g.input("x", np.float32, ("rows", tokens, HIDDEN))
    query, key, value = project(g, x)
    bias = g.normal((1, HEADS, tokens, tokens), std=1.0, name="table")
    scores = g.op("Add", multiplied(g, query, key), bias)
    lines = np.arange(windows)[:, None, None] == np.arange(tokens)[None, :, None]
    full = np.where(lines | lines.transpose(0, 2, 1), -100.0, 0.0).astype(np.float32)
    five = g.op("Reshape", scores, g.constant([-1, windows, HEADS, tokens, tokens]))
    masked = g.op("Add", five, g.constant(full[None, :, None]))
    scores = g.op("Reshape", masked, g.constant([-1, HEADS, tokens, tokens]))
    g.op("Add", blocks.linear(g, finish(g, scores, value), (HIDDEN, HIDDEN)), x, out="y")
    g.output("y", np.float32, ("rows", tokens, HIDDEN))


def _convolved_image(g: GraphWriter) -> None:
    """The VAE of diffusion models: 1×1 convolutions, one head, channels first."""
    height, width = 2, 3
    x = g.input("x", np.float32, ("batch", HIDDEN, height, width))

    def convolve(value: str) -> str:
        weight = g.normal((HIDDEN, HIDDEN, 1, 1), std=HIDDEN**-0.5)
        return g.op("Conv", value, weight, g.normal((HIDDEN,), std=0.1, name="bias"))

    flat = g.constant([0, 0, height * width])
    query, key, value = (g.op("Reshape", convolve(x), flat) for _ in range(3))
    scores = g.op("MatMul", g.op("Transpose", query, perm=[0, 2, 1]), key)
    weights = softmax(g, g.op("Mul", scores, g.constant(HIDDEN**-0.5)))
    context = g.op("MatMul", value, g.op("Transpose", weights, perm=[0, 2, 1]))
    image = g.op("Reshape", context, g.constant([0, 0, height, width]))
    g.op("Add", x, convolve(image), out="y")
    g.output("y", np.float32, ("batch", HIDDEN, height, width))


CACHE_SIZES = ({"batch": 3, "seq": 4, "past": 5}, {"batch": 2, "seq": 1, "past": 9})

POSITION_SPELLINGS: tuple[Entry, ...] = (
    Entry("causal_constant", "a boolean buffer and Where", block(_causal_constant)),
    Entry("causal_trilu", "Trilu of ones, -inf", block(_causal_trilu)),
    Entry("causal_range", "Range >= Range", block(_causal_range)),
    Entry("window", "a sliding window as an additive constant", block(_window)),
    Entry("alibi", "a slope per head times the key position", block(_alibi)),
    Entry("relative_bias", "T5's bucket table, no scale", block(_relative_bias, rms=True)),
    Entry("sink", "a learned sink score per head", block(_sink)),
    Entry("rotary", "rotate-half rotary positions", block(_rotary)),
    Entry("rotary_interleaved", "interleaved rotary positions", block(_rotary_interleaved)),
    Entry("rotary_partial", "rotary on half the channels", block(_rotary_partial)),
    Entry("normed_query", "RMSNorm on Q and K, rotary", block(_normed_query)),
    Entry("grouped", "grouped heads by Expand", block(_grouped)),
    Entry("grouped_gather", "grouped heads by Gather", block(_grouped_gather)),
    Entry("single_key_head", "multi-query by broadcasting", block(_single_key_head)),
    Entry("cached", "Concat of past and present, both outputs", block(_cached), sizes=CACHE_SIZES),
    Entry("llama", "rotary, cache, grouped heads", block(_llama, rms=True), sizes=CACHE_SIZES),
    Entry("latent", "latent keys and values, shared rotary part", block(_latent)),
    Entry("operator", "the Attention operator", block(_operator), opset=23),
    Entry("linear_attention", "elu + 1, no softmax", block(_linear_attention)),
    Entry("windowed_image", "Swin's windows", _windowed_image, sizes=({"rows": 8}, {"rows": 4})),
    Entry("convolved_image", "1×1 convolutions", _convolved_image, sizes=({"batch": 3}, {"batch": 2})),
)
