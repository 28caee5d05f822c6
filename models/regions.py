"""Single regions as whole models: what benchmarks time one fused kernel against.

Each builder gives an unfused graph with symbolic batch and sequence, spelled with plain operators.
"""

import math

import numpy as np
import onnx

from models.graph import GraphWriter

OPSET = 17


def attention(*, heads: int = 12, size: int = 64, causal: bool = False, masked: bool = False) -> onnx.ModelProto:
    """q, k, v: f32 [batch, seq, heads · size] → y of the same shape; `masked` adds an int64 mask [batch, seq]."""
    g = GraphWriter(OPSET)
    width = heads * size
    names = [g.input(name, np.float32, ("batch", "seq", width)) for name in ("q", "k", "v")]
    split = g.constant([0, 0, heads, size])
    q, k, v = (g.op("Transpose", g.op("Reshape", name, split), perm=[0, 2, 1, 3]) for name in names)
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    scores = g.op("Mul", scores, g.constant(1 / math.sqrt(size)))
    if masked:
        mask = g.op("Unsqueeze", g.input("mask", np.int64, ("batch", "seq")), g.constant([1, 2]))
        hidden = g.op("Sub", g.constant(1.0), g.op("Cast", mask, to=onnx.TensorProto.FLOAT))
        scores = g.op("Add", scores, g.op("Mul", hidden, g.constant(-10000.0)))
    if causal:
        length = g.op("Gather", g.op("Shape", names[0]), g.constant(1), axis=0)
        index = g.op("Range", g.constant(0), length, g.constant(1))
        row, column = (g.op("Unsqueeze", index, g.constant([axis])) for axis in (1, 0))
        seen = g.op("LessOrEqual", column, row)
        scores = g.op("Where", seen, scores, g.constant(-math.inf))
    y = g.op("MatMul", g.op("Softmax", scores, axis=-1), v)
    g.op("Reshape", g.op("Transpose", y, perm=[0, 2, 1, 3]), g.constant([0, 0, width]), out="y")
    g.output("y", np.float32, ("batch", "seq", width))
    return g.finish()


def skip_layer_norm(*, hidden: int = 768) -> onnx.ModelProto:
    """x, skip: f32 [batch, seq, hidden] → y = LayerNorm(x + skip)."""
    g = GraphWriter(OPSET)
    x, skip = (g.input(name, np.float32, ("batch", "seq", hidden)) for name in ("x", "skip"))
    gamma, beta = (g.normal((hidden,), std=0.1, mean=mean) for mean in (1.0, 0.0))
    g.op("LayerNormalization", g.op("Add", x, skip), gamma, beta, axis=-1, epsilon=1e-12, out="y")
    g.output("y", np.float32, ("batch", "seq", hidden))
    return g.finish()


def linear(*, depth: int, columns: int, gelu: bool = False) -> onnx.ModelProto:
    """x: f32 [batch, seq, depth] → y = x · W + b [batch, seq, columns], with an exact GELU on request."""
    g = GraphWriter(OPSET)
    x = g.input("x", np.float32, ("batch", "seq", depth))
    y = g.op("MatMul", x, g.normal((depth, columns), std=depth**-0.5))
    y = g.op("Add", y, g.normal((columns,), std=0.1), out=None if gelu else "y")
    if gelu:
        inner = g.op("Erf", g.op("Div", y, g.constant(math.sqrt(2))))
        half = g.op("Mul", y, g.op("Add", inner, g.constant(1.0)))
        g.op("Mul", half, g.constant(0.5), out="y")
    g.output("y", np.float32, ("batch", "seq", columns))
    return g.finish()
