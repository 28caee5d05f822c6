"""Graphs that look like something a fuser knows and are not, or that break it: a catalogue with inputs to run them.

A fuser may fuse any of them, as written, or leave them alone. What it must not do is change the numbers, the outputs'
names or their shapes. Most come from faults reported against public optimisers.
"""

import math
from collections.abc import Callable

import numpy as np
from onnx import TensorProto

from models import blocks
from models.attention_parts import (
    HEADS,
    HIDDEN,
    WIDTH,
    block,
    divided,
    finish,
    join,
    mask_input,
    padding_bias,
    products,
    project,
    softmax,
    split,
)
from models.catalogue import Entry, Sizes
from models.graph import GraphWriter

# --- attention that is not the usual one -----------------------------------------------------------------------------


def _other_scale(g: GraphWriter, x: str) -> str:
    """Divided by 5, which is not √d."""
    query, key, value = project(g, x)
    scores = g.op("Div", products(g, query, key), g.constant(5.0))
    return finish(g, g.op("Add", scores, padding_bias(g, mask_input(g), -10000.0)), value)


def _scale_per_head(g: GraphWriter, x: str) -> str:
    """A learned scale per head, as in Swin v2."""
    query, key, value = project(g, x)
    scales = g.normal((HEADS, 1, 1), std=0.2, mean=0.5, name="scales")
    return finish(g, g.op("Mul", products(g, query, key), scales), value)


def _mask_after(g: GraphWriter, x: str) -> str:
    """The mask is added to the probabilities."""
    query, key, value = project(g, x)
    weights = g.op("Add", softmax(g, divided(g, query, key)), padding_bias(g, mask_input(g), -0.5))
    return join(g, g.op("MatMul", weights, value))


def _weak_mask(g: GraphWriter, x: str) -> str:
    """-5 at hidden keys: they still count."""
    query, key, value = project(g, x)
    return finish(g, g.op("Add", divided(g, query, key), padding_bias(g, mask_input(g), -5.0)), value)


def _subtracted_mask(g: GraphWriter, x: str) -> str:
    """The mask is subtracted: only hidden keys count."""
    query, key, value = project(g, x)
    return finish(g, g.op("Sub", divided(g, query, key), padding_bias(g, mask_input(g), -10000.0)), value)


def _mask_of_queries(g: GraphWriter, x: str) -> str:
    """The mask hides queries, not keys: [batch, 1, seq, 1]."""
    query, key, value = project(g, x)
    turned = g.op("Transpose", padding_bias(g, mask_input(g), -3.0), perm=[0, 1, 3, 2])
    return finish(g, g.op("Mul", divided(g, query, key), turned), value)


def _softmax_over_queries(g: GraphWriter, x: str) -> str:
    query, key, value = project(g, x)
    weights = g.op("Softmax", divided(g, query, key), axis=2)
    return join(g, g.op("MatMul", weights, value))


def _softmax_over_heads(g: GraphWriter, x: str) -> str:
    query, key, value = project(g, x)
    weights = g.op("Softmax", divided(g, query, key), axis=1)
    return join(g, g.op("MatMul", weights, value))


def _old_softmax(g: GraphWriter, x: str) -> str:
    """Softmax of opset 12 with axis 1: over heads, queries and keys together."""
    query, key, value = project(g, x)
    return join(g, g.op("MatMul", g.op("Softmax", divided(g, query, key), axis=1), value))


def _same_key_and_value(g: GraphWriter, x: str) -> str:
    """K and V are one tensor, and Q reads it too."""
    shared = split(g, blocks.linear(g, x, (HIDDEN, HIDDEN)))
    return finish(g, divided(g, shared, shared), shared)


def _swapped_query(g: GraphWriter, x: str) -> str:
    """Q · K without a Transpose of K: over positions, where sizes happen to allow it (8 tokens of 8 channels)."""
    query, key, value = project(g, x)
    return finish(g, g.op("Div", g.op("MatMul", query, key), g.constant(math.sqrt(WIDTH))), value)


def _reread_scores(g: GraphWriter, x: str) -> str:
    """The scores are read again after the softmax."""
    query, key, value = project(g, x)
    scores = divided(g, query, key)
    weights = g.op("Add", softmax(g, scores), g.op("Mul", scores, g.constant(0.1)))
    return join(g, g.op("MatMul", weights, value))


def _wide_bias(g: GraphWriter) -> None:
    """A bias with more batches than the scores: it widens the result. x [1, seq, 32], m [batch, 1, seq, seq]."""
    x = g.input("x", np.float32, (1, "seq", HIDDEN))
    m = g.input("m", np.float32, ("batch", 1, "seq", "seq"))
    query, key, value = project(g, blocks.layer_norm(g, x, HIDDEN))
    weights = softmax(g, g.op("Add", divided(g, query, key), m))
    context = g.op("Transpose", g.op("MatMul", weights, value), perm=[0, 2, 1, 3])
    dense = blocks.linear(g, g.op("Reshape", context, g.constant([0, 0, HIDDEN])), (HIDDEN, HIDDEN))
    blocks.layer_norm(g, g.op("Add", dense, x), HIDDEN, out="y")
    g.output("y", np.float32, ("batch", "seq", HIDDEN))


# --- activations -----------------------------------------------------------------------------------------------------


def _gelu_like(divisor: float, *, shown: bool = False) -> Callable[[GraphWriter], None]:
    """x · (1 + erf(x / divisor)) / 2; `shown` makes erf an output too."""

    def write(g: GraphWriter) -> None:
        x = g.input("x", np.float32, ("rows", 8))
        error = g.op("Erf", g.op("Div", x, g.constant(divisor)), out="e" if shown else None)
        both = g.op("Mul", x, g.op("Add", error, g.constant(1.0)))
        g.op("Mul", both, g.constant(0.5), out="y")
        g.output("y", np.float32, ("rows", 8))
        if shown:
            g.output("e", np.float32, ("rows", 8))

    return write


def _gelu_of_two(g: GraphWriter) -> None:
    """x · (1 + erf(z / √2)) / 2 with another z."""
    x, z = g.input("x", np.float32, ("rows", 8)), g.input("z", np.float32, ("rows", 8))
    error = g.op("Erf", g.op("Div", z, g.constant(math.sqrt(2.0))))
    g.op("Mul", g.op("Mul", x, g.op("Add", error, g.constant(1.0))), g.constant(0.5), out="y")
    g.output("y", np.float32, ("rows", 8))


def _quick_gelu(alpha: float) -> Callable[[GraphWriter], None]:
    """x · sigmoid(alpha · x)."""

    def write(g: GraphWriter) -> None:
        x = g.input("x", np.float32, ("rows", 8))
        scaled = x if alpha == 1.0 else g.op("Mul", x, g.constant(alpha))
        g.op("Mul", x, g.op("Sigmoid", scaled), out="y")
        g.output("y", np.float32, ("rows", 8))

    return write


# --- row reductions --------------------------------------------------------------------------------------------------


def _norm_like(
    *,
    dims: tuple[int | str, ...] = ("rows", 8),
    gamma: tuple[int, ...] | None = (8,),
    beta: tuple[int, ...] | None = (8,),
    power: float = 2.0,
    keepdims: int = 1,
    out_dims: tuple[int | str, ...] | None = None,
    axis: int = -1,
) -> Callable[[GraphWriter], None]:
    """A LayerNorm in pieces, with one thing changed."""

    def write(g: GraphWriter) -> None:
        x = g.input("x", np.float32, dims)
        centred = g.op("Sub", x, g.op("ReduceMean", x, axes=[axis], keepdims=keepdims))
        raised = g.op("Pow", centred, g.constant(power))
        variance = g.op("ReduceMean", raised, axes=[axis], keepdims=keepdims)
        deviation = g.op("Sqrt", g.op("Add", variance, g.constant(1e-5)))
        pieces: list[tuple[str, tuple[int, ...] | None]] = [("Mul", gamma), ("Add", beta)]
        wanted = [(kind, shape) for kind, shape in pieces if shape is not None]
        value = g.op("Div", centred, deviation, out=None if wanted else "y")
        for i, (kind, shape) in enumerate(wanted):
            weight = g.normal(shape or (), std=1.0)
            value = g.op(kind, value, weight, out="y" if i == len(wanted) - 1 else None)
        g.output("y", np.float32, out_dims or dims)

    return write


def _skip_norm(skip_dims: tuple[int | str, ...], *, wide_gamma: bool = False) -> Callable[[GraphWriter], None]:
    """LayerNormalization of a + s, with s broadcast or gamma of rank 3."""

    def write(g: GraphWriter) -> None:
        a = g.input("a", np.float32, ("batch", "seq", 8))
        s = g.input("s", np.float32, skip_dims)
        shape = (1, 1, 8) if wide_gamma else (8,)
        gamma, beta = g.normal(shape, std=1.0, name="gamma"), g.normal(shape, std=1.0, name="beta")
        g.op("LayerNormalization", g.op("Add", a, s), gamma, beta, axis=-1, out="y")
        g.output("y", np.float32, ("batch", "seq", 8))

    return write


def _shown_sum(g: GraphWriter) -> None:
    """The sum before the norm, and its mean, are outputs too."""
    a = g.input("a", np.float32, ("batch", "seq", 8))
    s = g.input("s", np.float32, ("batch", "seq", 8))
    total = g.op("Add", a, s, out="total")
    gamma, beta = g.normal((8,), std=1.0, name="gamma"), g.normal((8,), std=1.0, name="beta")
    g.ops("LayerNormalization", total, gamma, beta, axis=-1, outs=("y", "mean"))
    g.output("y", np.float32, ("batch", "seq", 8))
    g.output("total", np.float32, ("batch", "seq", 8))
    g.output("mean", np.float32, ("batch", "seq", 1))


def _norm_over_two(g: GraphWriter) -> None:
    """LayerNormalization over the last two axes."""
    x = g.input("x", np.float32, ("batch", 3, 8))
    gamma, beta = g.normal((3, 8), std=1.0, name="gamma"), g.normal((3, 8), std=1.0, name="beta")
    g.op("LayerNormalization", x, gamma, beta, axis=1, out="y")
    g.output("y", np.float32, ("batch", 3, 8))


def _rms_of_half(g: GraphWriter) -> None:
    """RMSNorm of float16 with float32 inside: squares of large values overflow float16."""
    x = g.input("x", np.float16, ("rows", 8))
    big = g.op("Mul", x, g.constant(5000.0, np.float16))
    wide = g.op("Cast", big, to=TensorProto.FLOAT)
    normed = blocks.rms_norm(g, wide, 8)
    g.op("Cast", normed, to=TensorProto.FLOAT16, out="y")
    g.output("y", np.float16, ("rows", 8))


def _softmax_by_hand(g: GraphWriter) -> None:
    """exp(x) / sum(exp(x)) without the maximum: overflows where the operator does not."""
    x = g.input("x", np.float32, ("rows", 8))
    raised = g.op("Exp", g.op("Mul", x, g.constant(60.0)))
    g.op("Div", raised, g.op("ReduceSum", raised, g.constant([-1]), keepdims=1), out="y")
    g.output("y", np.float32, ("rows", 8))


# --- contractions and shapes -----------------------------------------------------------------------------------------


def _gemm_with_transposed_bias(g: GraphWriter) -> None:
    """The bias of a Gemm is a matrix that comes out of a Transpose."""
    x, c = g.input("x", np.float32, ("rows", 4)), g.input("c", np.float32, (5, "rows"))
    g.op("Gemm", x, g.normal((4, 5), std=0.5), g.op("Transpose", c, perm=[1, 0]), out="y")
    g.output("y", np.float32, ("rows", 5))


def _gemm_with_factors(g: GraphWriter) -> None:
    """alpha, beta, transA, and a column as bias."""
    x, c = g.input("x", np.float32, (4, "rows")), g.input("c", np.float32, ("rows", 1))
    g.op("Gemm", x, g.normal((5, 4), std=0.5), c, alpha=0.5, beta=-2.0, transA=1, transB=1, out="y")
    g.output("y", np.float32, ("rows", 5))


def _wide_epilogue(g: GraphWriter) -> None:
    """What is added to the product has more rows than it."""
    x, c = g.input("x", np.float32, (1, 4)), g.input("c", np.float32, ("rows", 5))
    g.op("Add", g.op("MatMul", x, g.normal((4, 5), std=0.5)), c, out="y")
    g.output("y", np.float32, ("rows", 5))


def _product_of_vectors(g: GraphWriter) -> None:
    """MatMul of a matrix and a vector, then a scalar product."""
    x = g.input("x", np.float32, ("rows", 4))
    column = g.op("MatMul", x, g.normal((4,), std=0.5))
    g.op("MatMul", column, column, out="y")
    g.output("y", np.float32, ())


def _shared_product(g: GraphWriter) -> None:
    """One product is a graph output, the input of an epilogue, and both factors of another product."""
    x = g.input("x", np.float32, ("rows", 8))
    product = g.op("MatMul", x, g.normal((8, 8), std=0.3), out="p")
    g.op("Relu", g.op("Add", product, g.normal((8,), std=0.3)), out="y")
    g.op("MatMul", g.op("Transpose", product, perm=[1, 0]), product, out="z")
    g.output("p", np.float32, ("rows", 8))
    g.output("y", np.float32, ("rows", 8))
    g.output("z", np.float32, (8, 8))


def _shape_from_another(g: GraphWriter) -> None:
    """A Reshape whose shape is computed and reshaped itself."""
    x = g.input("x", np.float32, ("batch", 2, 2))
    wanted = g.op("Reshape", g.shape(g.extent(x, 0, "batch"), -1), g.constant([2]))
    g.op("Reshape", x, wanted, out="y")
    g.output("y", np.float32, ("batch", 4))


def _shape_of_another(g: GraphWriter) -> None:
    """x takes the shape of a second input with the same number of elements."""
    x, like = g.input("x", np.float32, ("rows", 6)), g.input("like", np.float32, (2, "rows", 3))
    shape = g.op("Shape", like)
    g.op("Mul", g.op("Reshape", x, shape), g.constant(2.0), out="y")
    g.output("y", np.float32, (2, "rows", 3))


def _initializer_as_output(g: GraphWriter) -> None:
    """An output that is a weight, and one that is an input."""
    x = g.input("x", np.float32, ("rows", 8))
    weight = g.normal((8, 8), std=0.3, name="w")
    g.op("MatMul", x, weight, out="y")
    g.op("Identity", x, out="z")
    g.output("y", np.float32, ("rows", 8))
    g.output(weight, np.float32, (8, 8))
    g.output("z", np.float32, ("rows", 8))


ROWS: tuple[Sizes, Sizes] = ({"rows": 3}, {"rows": 5})
NO_SYMBOLS: tuple[Sizes, Sizes] = ({}, {})

TRAPS: tuple[Entry, ...] = (
    Entry("other_scale", "a scale that is not 1/√d", block(_other_scale)),
    Entry("scale_per_head", "a learned scale per head", block(_scale_per_head)),
    Entry("mask_after_softmax", "the mask is added after the softmax", block(_mask_after)),
    Entry("weak_mask", "-5 as mask value", block(_weak_mask)),
    Entry("subtracted_mask", "the mask is subtracted", block(_subtracted_mask)),
    Entry("mask_of_queries", "the mask multiplies, along the queries", block(_mask_of_queries)),
    Entry("softmax_over_queries", "axis 2", block(_softmax_over_queries)),
    Entry("softmax_over_heads", "axis 1", block(_softmax_over_heads)),
    Entry("same_key_and_value", "Q, K and V are one tensor", block(_same_key_and_value)),
    Entry(
        "swapped_query",
        "Q K without Transpose",
        block(_swapped_query),
        sizes=({"batch": 3, "seq": 8}, {"batch": 2, "seq": 8}),
    ),
    Entry("reread_scores", "the scores are read after the softmax", block(_reread_scores)),
    Entry("wide_bias", "a bias wider than the scores", _wide_bias),
    Entry("old_softmax", "Softmax of opset 12, axis 1", block(_old_softmax), opset=12),
    Entry("gelu_wrong_constant", "erf(x), not erf(x / √2)", _gelu_like(1.0), sizes=ROWS),
    Entry("gelu_shown", "erf is an output too", _gelu_like(math.sqrt(2.0), shown=True), sizes=ROWS),
    Entry("gelu_of_two", "x and z differ", _gelu_of_two, sizes=ROWS),
    Entry("quick_gelu_1", "SiLU", _quick_gelu(1.0), sizes=ROWS),
    Entry("quick_gelu_1702", "alpha 1.702", _quick_gelu(1.702), sizes=ROWS),
    Entry("quick_gelu_13", "alpha 1.3", _quick_gelu(1.3), sizes=ROWS),
    Entry(
        "norm_gamma_per_row",
        "gamma [3, 1], one per row",
        _norm_like(dims=("batch", 3, 8), gamma=(3, 1)),
        sizes=({"batch": 2}, {"batch": 5}),
    ),
    Entry(
        "norm_wide_gamma",
        "gamma wider than x",
        _norm_like(gamma=(2, 1, 8), beta=None, out_dims=(2, "rows", 8)),
        sizes=ROWS,
    ),
    Entry(
        "norm_without_keepdims",
        "keepdims=0 on [1, 1]",
        _norm_like(dims=(1, 1), gamma=(2,), beta=None, keepdims=0, out_dims=(1, 2)),
        sizes=NO_SYMBOLS,
    ),
    Entry(
        "norm_without_keepdims_square",
        "keepdims=0 on a square: the mean of row j goes to column j",
        _norm_like(dims=(8, 8), keepdims=0),
        sizes=NO_SYMBOLS,
    ),
    Entry("norm_fourth_power", "Pow 4", _norm_like(power=4.0), sizes=ROWS),
    Entry("norm_third_power", "Pow 3: NaN where the sum is negative", _norm_like(power=3.0), sizes=ROWS),
    Entry(
        "norm_rank_1", "rank 1, gamma of one element", _norm_like(dims=(4,), gamma=(1,), beta=None), sizes=NO_SYMBOLS
    ),
    Entry("norm_over_rows", "over axis 0", _norm_like(axis=0), sizes=ROWS),
    Entry("norm_over_two", "LayerNormalization over two axes", _norm_over_two, sizes=({"batch": 2}, {"batch": 5})),
    Entry("skip_broadcast", "skip [1, seq, 8]", _skip_norm((1, "seq", 8))),
    Entry("skip_row", "skip [8]", _skip_norm((8,))),
    Entry("skip_wide_gamma", "gamma [1, 1, 8]", _skip_norm(("batch", "seq", 8), wide_gamma=True)),
    Entry("skip_shown", "sum and mean are outputs too", _shown_sum),
    Entry("rms_of_half", "float16 whose squares overflow", _rms_of_half, sizes=ROWS),
    Entry("softmax_by_hand", "softmax without maximum: NaN on overflow", _softmax_by_hand, sizes=ROWS),
    Entry("gemm_transposed_bias", "the bias is transposed", _gemm_with_transposed_bias, sizes=ROWS),
    Entry("gemm_factors", "alpha, beta, transA, column bias", _gemm_with_factors, sizes=ROWS),
    Entry("wide_epilogue", "the addend has more rows than the product", _wide_epilogue, sizes=ROWS),
    Entry("product_of_vectors", "MatMul of vectors", _product_of_vectors, sizes=ROWS),
    Entry("shared_product", "a product with three readers", _shared_product, sizes=ROWS),
    Entry("shape_from_another", "a computed shape, reshaped", _shape_from_another, sizes=({"batch": 3}, {"batch": 5})),
    Entry("shape_of_another", "the shape of another input", _shape_of_another, sizes=ROWS),
    Entry("weight_as_output", "a weight and an input are outputs", _initializer_as_output, sizes=ROWS),
)
