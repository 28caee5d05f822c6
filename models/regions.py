"""Single regions as whole models: what benchmarks time one fused kernel against.

Each builder gives an unfused graph with symbolic batch and sequence, spelled with plain operators.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import onnx

from models.graph import GraphWriter

OPSET = 17


def attention(
    *,
    heads: int = 12,
    size: int = 64,
    kv_heads: int | None = None,
    causal: bool = False,
    masked: bool = False,
    window: int | None = None,
    bias: bool = False,
    shared_bias: bool = False,
) -> onnx.ModelProto:
    """q, k, v: f32 [batch, seq, heads · size] → y like q; keys and values may have fewer heads, `kv_heads`.

    `masked` adds an int64 mask [batch, seq], `bias` a f32 input [1, heads, seq, seq], `shared_bias` one that all
    heads share, [1, 1, seq, seq]. If `causal`, queries see themselves and what is before them, no further back than
    `window` keys.
    """
    g = GraphWriter(OPSET)
    groups = kv_heads or heads
    names = [
        g.input(n, np.float32, ("batch", "seq", count * size))
        for n, count in zip("qkv", (heads, groups, groups), strict=True)
    ]
    counts = (heads, groups, groups)
    q, k, v = (_split_heads(g, name, count, size) for name, count in zip(names, counts, strict=True))
    if groups != heads:
        k, v = (_repeat_heads(g, x, groups, heads // groups, size) for x in (k, v))
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    scores = g.op("Mul", scores, g.constant(1 / math.sqrt(size)))
    if masked:
        mask = g.op("Unsqueeze", g.input("mask", np.int64, ("batch", "seq")), g.constant([1, 2]))
        hidden = g.op("Sub", g.constant(1.0), g.op("Cast", mask, to=onnx.TensorProto.FLOAT))
        scores = g.op("Add", scores, g.op("Mul", hidden, g.constant(-10000.0)))
    if bias or shared_bias:
        scores = g.op("Add", scores, g.input("bias", np.float32, (1, 1 if shared_bias else heads, "seq", "seq")))
    if causal:
        length = g.op("Gather", g.op("Shape", names[0]), g.constant(1), axis=0)
        index = g.op("Range", g.constant(0), length, g.constant(1))
        row, column = (g.op("Unsqueeze", index, g.constant([axis])) for axis in (1, 0))
        seen = g.op("LessOrEqual", column, row)
        if window is not None:
            seen = g.op("And", seen, g.op("Less", g.op("Sub", row, column), g.constant(window)))
        scores = g.op("Where", seen, scores, g.constant(-math.inf))
    y = g.op("MatMul", g.op("Softmax", scores, axis=-1), v)
    g.op("Reshape", g.op("Transpose", y, perm=[0, 2, 1, 3]), g.constant([0, 0, heads * size]), out="y")
    g.output("y", np.float32, ("batch", "seq", heads * size))
    return g.finish()


def _split_heads(g: GraphWriter, x: str, heads: int, size: int) -> str:
    return g.op("Transpose", g.op("Reshape", x, g.constant([0, 0, heads, size])), perm=[0, 2, 1, 3])


def _repeat_heads(g: GraphWriter, x: str, groups: int, times: int, size: int) -> str:
    """[batch, groups, seq, size] → [batch, groups · times, seq, size], as exporters repeat heads of keys and values."""
    shape = g.op("Shape", x)
    batch, seq = (g.op("Gather", shape, g.constant([axis]), axis=0) for axis in (0, 2))
    wide = g.op("Concat", batch, g.constant([groups, times]), seq, g.constant([size]), axis=0)
    flat = g.op("Concat", batch, g.constant([groups * times]), seq, g.constant([size]), axis=0)
    return g.op("Reshape", g.op("Expand", g.op("Unsqueeze", x, g.constant([2])), wide), flat)


def decode(*, heads: int = 32, kv_heads: int = 8, size: int = 128) -> onnx.ModelProto:
    """q: f32 [batch, heads, 1, size] over caches k, v: f32 [batch, kv_heads, past, size] → y like q."""
    g = GraphWriter(OPSET)
    q = g.input("q", np.float32, ("batch", heads, 1, size))
    caches = [g.input(name, np.float32, ("batch", kv_heads, "past", size)) for name in ("k", "v")]
    k, v = (_repeat_heads(g, x, kv_heads, heads // kv_heads, size) for x in caches)
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    weights = g.op("Softmax", g.op("Mul", scores, g.constant(1 / math.sqrt(size))), axis=-1)
    g.op("MatMul", weights, v, out="y")
    g.output("y", np.float32, ("batch", heads, 1, size))
    return g.finish()


def norm(*, hidden: int = 768, rms: bool = False, skip: bool = False) -> onnx.ModelProto:
    """x (and `skip`): f32 [batch, seq, hidden] → y = LayerNorm or RMSNorm of x (+ skip), in plain operators."""
    g = GraphWriter(OPSET)
    x = g.input("x", np.float32, ("batch", "seq", hidden))
    if skip:
        x = g.op("Add", x, g.input("skip", np.float32, ("batch", "seq", hidden)))
    gamma = g.normal((hidden,), std=0.1, mean=1.0)
    if rms:
        square = g.op("ReduceMean", g.op("Pow", x, g.constant(2.0)), axes=[-1])
        root = g.op("Sqrt", g.op("Add", square, g.constant(1e-6)))
        g.op("Mul", g.op("Div", x, root), gamma, out="y")
    else:
        g.op("LayerNormalization", x, gamma, g.normal((hidden,), std=0.1), axis=-1, epsilon=1e-12, out="y")
    g.output("y", np.float32, ("batch", "seq", hidden))
    return g.finish()


def pointwise(kind: str, *, hidden: int = 3072) -> onnx.ModelProto:
    """f32 [batch, seq, hidden] → same shape: "softmax", "gelu" or "double" of x, "swiglu" or "sum" of x and `up`.

    "double" is 2 · x + 1 and "sum" x + up + 1: next to nothing is computed, in two nodes.
    """
    g = GraphWriter(OPSET)
    x = g.input("x", np.float32, ("batch", "seq", hidden))
    if kind == "softmax":
        g.op("Softmax", x, axis=-1, out="y")
    elif kind == "gelu":
        _gelu(g, x, out="y")
    elif kind == "double":
        g.op("Add", g.op("Mul", x, g.constant(2.0)), g.constant(1.0), out="y")
    elif kind in ("swiglu", "sum"):
        up = g.input("up", np.float32, ("batch", "seq", hidden))
        if kind == "sum":
            g.op("Add", g.op("Add", x, up), g.constant(1.0), out="y")
        else:
            g.op("Mul", g.op("Mul", x, g.op("Sigmoid", x)), up, out="y")
    else:
        raise ValueError(f"no pointwise region {kind!r}: there are softmax, gelu, double, swiglu and sum")
    g.output("y", np.float32, ("batch", "seq", hidden))
    return g.finish()


def rope(*, heads: int = 32, size: int = 128) -> onnx.ModelProto:
    """x: f32 [batch, heads, seq, size], cos, sin: f32 [seq, size] → y = x · cos + rotated halves of x · sin."""
    g = GraphWriter(OPSET)
    x = g.input("x", np.float32, ("batch", heads, "seq", size))
    cos, sin = (g.input(name, np.float32, ("seq", size)) for name in ("cos", "sin"))
    low, high = g.ops("Split", x, g.constant([size // 2, size // 2]), axis=-1, outs=(None, None))
    turned = g.op("Concat", g.op("Neg", high), low, axis=-1)
    g.op("Add", g.op("Mul", x, cos), g.op("Mul", turned, sin), out="y")
    g.output("y", np.float32, ("batch", heads, "seq", size))
    return g.finish()


def skip_layer_norm(*, hidden: int = 768) -> onnx.ModelProto:
    """x, skip: f32 [batch, seq, hidden] → y = LayerNorm(x + skip)."""
    return norm(hidden=hidden, skip=True)


def _gelu(g: GraphWriter, x: str, *, out: str | None) -> str:
    """The exact GELU of x."""
    inner = g.op("Erf", g.op("Div", x, g.constant(math.sqrt(2))))
    half = g.op("Mul", x, g.op("Add", inner, g.constant(1.0)))
    return g.op("Mul", half, g.constant(0.5), out=out)


def linear(*, depth: int, columns: int, gelu: bool = False) -> onnx.ModelProto:
    """x: f32 [batch, seq, depth] → y = x · W + b [batch, seq, columns], with an exact GELU on request."""
    return linears(widths=(depth, columns), gelu=gelu)


def linears(*, widths: Sequence[int], gelu: bool = False) -> onnx.ModelProto:
    """x: f32 [batch, seq, widths[0]] → y [batch, seq, widths[-1]], through one linear layer to each further width."""
    g = GraphWriter(OPSET)
    y = g.input("x", np.float32, ("batch", "seq", widths[0]))
    for layer, (depth, columns) in enumerate(pairwise(widths)):
        out = "y" if layer == len(widths) - 2 else None
        y = g.op("MatMul", y, g.normal((depth, columns), std=depth**-0.5))
        y = g.op("Add", y, g.normal((columns,), std=0.1), out=None if gelu else out)
        if gelu:
            y = _gelu(g, y, out=out)
    g.output("y", np.float32, ("batch", "seq", widths[-1]))
    return g.finish()
