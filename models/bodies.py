"""Graphs whose work is in the bodies of If, Loop and Scan: merged decoders, and what goes wrong around captured values.

Every entry has a body that reads values from outside of it. Flags are inputs of type bool; `flagged` sets them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from models import blocks
from models.attention_parts import HEADS, HIDDEN, LONGEST, LOWEST, WIDTH, join, multiplied, softmax, split
from models.catalogue import Entry, Sizes
from models.graph import Dim, GraphWriter

CACHE_SIZES: tuple[Sizes, Sizes] = ({"batch": 2, "seq": 5, "past": 4}, {"batch": 3, "seq": 1, "past": 7})
SEQUENCE_SIZES: tuple[Sizes, Sizes] = ({"batch": 2, "seq": 5}, {"batch": 3, "seq": 8})
ROWS: tuple[Sizes, Sizes] = ({"rows": 70}, {"rows": 33})
Dims = tuple[Dim | None, ...]


def flagged(feeds: Mapping[str, npt.NDArray[Any]], *, flag: bool) -> dict[str, npt.NDArray[Any]]:
    """The inputs with every flag set to `flag`."""
    return {name: np.full_like(value, flag) if value.dtype == np.bool_ else value for name, value in feeds.items()}


def _choose(
    g: GraphWriter, flag: str, yes: Callable[[], None], no: Callable[[], None], *, outs: int = 1
) -> tuple[str, ...]:
    """An If; both branches declare `outs` outputs."""
    return g.ops("If", flag, outs=(None,) * outs, then_branch=g.body("yes", yes), else_branch=g.body("no", no))


def _body(g: GraphWriter, make: Callable[[], str], *dims: Dim | None) -> Callable[[], None]:
    """A branch with one f32 output."""
    return lambda: g.output(make(), np.float32, dims)


# --- decoders --------------------------------------------------------------------------------------------------------


def _merged_decoder(g: GraphWriter, *, nested: bool = False) -> None:
    """A decoder layer with a cache: an If chooses between past and present, and the present alone.

    x [batch, seq, 32] and past keys and values → y and the present ones. With `nested`, another If is in one branch.
    """
    x = g.input("x", np.float32, ("batch", "seq", HIDDEN))
    pasts = [g.input(f"past_{kind}", np.float32, ("batch", HEADS, "past", WIDTH)) for kind in ("key", "value")]
    flag = g.input("use_cache", np.bool_, (1,))
    weights = [g.normal((HIDDEN, HIDDEN), std=HIDDEN**-0.5) for _ in range(4)]
    full = g.initializer(np.triu(np.full((LONGEST, LONGEST), LOWEST, np.float32), 1)[None, None], "mask")
    present: Dims = ("batch", HEADS, None, WIDTH)

    def layer(*, cached: bool) -> Callable[[], None]:
        def write() -> None:
            normed = blocks.layer_norm(g, x, HIDDEN)
            query, key, value = (split(g, g.op("MatMul", normed, weight)) for weight in weights[:3])
            if cached:
                key, value = (g.op("Concat", *parts, axis=2) for parts in zip(pasts, (key, value), strict=True))
            end = g.vector(g.extent(key, 2, "past + seq" if cached else "seq"))
            start = g.op("Sub", end, g.vector(g.extent(x, 1, "seq")))
            rows = g.op("Slice", full, start, end, g.constant([2]), g.constant([1]))
            bias = g.op("Slice", rows, g.constant([0]), end, g.constant([3]), g.constant([1]))
            weighted = softmax(g, g.op("Add", multiplied(g, query, key), bias))
            context = join(g, g.op("MatMul", weighted, value))
            g.output(g.op("Add", g.op("MatMul", context, weights[3]), x), np.float32, ("batch", "seq", HIDDEN))
            for part in (key, value):
                g.output(part, np.float32, present)

        return write

    def inner() -> None:
        parts = _choose(g, more, layer(cached=True), layer(cached=False), outs=3)
        for part, dims in zip(parts, (("batch", "seq", HIDDEN), present, present), strict=True):
            g.output(part, np.float32, dims)

    more = g.op("Not", g.op("Not", flag)) if nested else flag
    parts = _choose(g, flag, inner if nested else layer(cached=True), layer(cached=False), outs=3)
    hidden = blocks.gelu(g, blocks.linear(g, blocks.layer_norm(g, parts[0], HIDDEN), (HIDDEN, 48)))
    for part, name, dims in zip(
        (hidden, *parts[1:]), ("y", "keys", "values"), (("batch", "seq", 48), present, present), strict=True
    ):
        g.op("Identity", part, out=name)
        g.output(name, np.float32, dims)


def _nested_decoder(g: GraphWriter) -> None:
    _merged_decoder(g, nested=True)


def _looped_layers(g: GraphWriter) -> None:
    """x goes through one feed-forward layer several times: Loop with captured weights, and each result stacked."""
    x = g.input("x", np.float32, ("batch", "seq", HIDDEN))
    first, second = (g.normal((HIDDEN, HIDDEN), std=HIDDEN**-0.5) for _ in range(2))

    def write() -> None:
        g.input("step", np.int64, ())
        going = g.input("going", np.bool_, ())
        state = g.input("state", np.float32, ("batch", "seq", HIDDEN))
        wide = blocks.gelu(g, g.op("MatMul", blocks.layer_norm(g, state, HIDDEN), first))
        after = g.op("Add", g.op("MatMul", wide, second), state)
        g.output(g.op("Identity", going), np.bool_, ())
        g.output(after, np.float32, ("batch", "seq", HIDDEN))
        g.output(g.op("Relu", after), np.float32, ("batch", "seq", HIDDEN))

    last, every = g.ops("Loop", g.constant(3), g.constant(True), x, outs=("y", "all"), body=g.body("layer", write))
    g.output(last, np.float32, ("batch", "seq", HIDDEN))
    g.output(every, np.float32, (3, "batch", "seq", HIDDEN))


def _growing_loop(g: GraphWriter) -> None:
    """A carried value gets longer in every iteration: x [rows, 8] with one more copy of its first row each time."""
    x = g.input("x", np.float32, ("rows", 8))
    weight = g.normal((8, 8), std=0.3)

    def write() -> None:
        g.input("step", np.int64, ())
        going = g.input("going", np.bool_, ())
        state = g.input("state", np.float32, (None, 8))
        row = g.op("Slice", state, g.constant([0]), g.constant([1]), g.constant([0]))
        longer = g.op("Concat", g.op("Tanh", g.op("MatMul", state, weight)), row, axis=0)
        g.output(g.op("Identity", going), np.bool_, ())
        g.output(longer, np.float32, (None, 8))

    (last,) = g.ops("Loop", g.constant(3), g.constant(True), x, outs=(None,), body=g.body("grow", write))
    g.op("Relu", last, out="y")
    g.output("y", np.float32, (None, 8))


def _scanned_rows(g: GraphWriter) -> None:
    """A recurrence over the sequence, one step per iteration of a Scan: h = tanh(h U + LayerNorm(x) W)."""
    x = g.input("x", np.float32, ("batch", "seq", HIDDEN))
    first, second = (g.normal((HIDDEN, HIDDEN), std=0.2) for _ in range(2))
    zero = g.op("Mul", g.op("ReduceMean", x, axes=[1], keepdims=0), g.constant(0.0))

    def write() -> None:
        state = g.input("state", np.float32, ("batch", HIDDEN))
        token = g.input("token", np.float32, ("batch", HIDDEN))
        mixed = g.op("Add", g.op("MatMul", state, first), g.op("MatMul", blocks.layer_norm(g, token, HIDDEN), second))
        after = g.op("Tanh", mixed)
        g.output(after, np.float32, ("batch", HIDDEN))
        g.output(g.op("Identity", after), np.float32, ("batch", HIDDEN))

    last, every = g.ops(
        "Scan", zero, x, outs=("last", "y"), body=g.body("step", write), num_scan_inputs=1,
        scan_input_axes=[1], scan_output_axes=[1],
    )  # fmt: skip
    g.output(last, np.float32, ("batch", HIDDEN))
    g.output(every, np.float32, ("batch", "seq", HIDDEN))


# --- captured values -------------------------------------------------------------------------------------------------


def _captured_between(g: GraphWriter) -> None:
    """A product, a branch that reads it, and their sum: the sum must not become the product's epilogue."""
    x, flag = g.input("x", np.float32, ("rows", 8)), g.input("flag", np.bool_, ())
    product = g.op("MatMul", x, g.normal((8, 8), std=0.3))
    (branch,) = _choose(
        g,
        flag,
        _body(g, lambda: g.op("Softmax", product, axis=-1), "rows", 8),
        _body(g, lambda: g.op("Mul", product, g.constant(3.0)), "rows", 8),
    )
    g.op("Relu", g.op("Add", product, branch), out="y")
    g.output("y", np.float32, ("rows", 8))


def _captured_inside(g: GraphWriter) -> None:
    """What stands in the middle of an attention, the scores, is read by a branch as well."""
    x, flag = g.input("x", np.float32, ("batch", "seq", HIDDEN)), g.input("flag", np.bool_, ())
    weights = [g.normal((HIDDEN, HIDDEN), std=HIDDEN**-0.5) for _ in range(3)]
    query, key, value = (split(g, g.op("MatMul", x, weight)) for weight in weights)
    scores = multiplied(g, query, key)
    g.op("Identity", join(g, g.op("MatMul", softmax(g, scores), value)), out="y")
    g.output("y", np.float32, ("batch", "seq", HIDDEN))
    (peak,) = _choose(
        g,
        flag,
        _body(g, lambda: g.op("ReduceMax", scores, axes=[3], keepdims=0), "batch", HEADS, "seq"),
        _body(g, lambda: g.op("ReduceMean", scores, axes=[3], keepdims=0), "batch", HEADS, "seq"),
    )
    g.op("Identity", peak, out="peak")
    g.output("peak", np.float32, ("batch", HEADS, "seq"))


def _passed_through(g: GraphWriter) -> None:
    """One branch gives an outer value and a weight as they are, the other computes both."""
    x, flag = g.input("x", np.float32, ("rows", 8)), g.input("flag", np.bool_, ())
    product = g.op("MatMul", x, g.normal((8, 8), std=0.3))
    weight = g.normal((8,), std=1.0)

    def same() -> None:
        g.output(g.op("Identity", product), np.float32, ("rows", 8))
        g.output(g.op("Identity", weight), np.float32, (8,))

    def other() -> None:
        g.output(g.op("Tanh", g.op("Add", product, weight)), np.float32, ("rows", 8))
        g.output(g.op("ReduceMax", product, axes=[0], keepdims=0), np.float32, (8,))

    first, second = _choose(g, flag, same, other, outs=2)
    g.op("Mul", first, second, out="y")
    g.output("y", np.float32, ("rows", 8))


def _other_length(g: GraphWriter) -> None:
    """The branches give different lengths, and a sum after them shows that both are what they are."""
    x, flag = g.input("x", np.float32, ("batch", "seq", HIDDEN)), g.input("flag", np.bool_, ())
    dims: Dims = ("batch", None, HIDDEN)
    (longer,) = _choose(
        g,
        flag,
        _body(g, lambda: g.op("Concat", x, g.op("Neg", x), axis=1), *dims),
        _body(g, lambda: g.op("Tanh", x), *dims),
    )
    blocks.layer_norm(g, blocks.linear(g, longer, (HIDDEN, HIDDEN)), HIDDEN, out="y")
    g.output("y", np.float32, dims)


def _needs_equal(g: GraphWriter) -> None:
    """One branch runs only where two dims agree; the other runs where they do not."""
    x = g.input("x", np.float32, ("rows", 8))
    z = g.input("z", np.float32, ("others", 8))
    flag = g.input("flag", np.bool_, ())
    weight = g.normal((8, 8), std=0.3)
    (chosen,) = _choose(
        g,
        flag,
        _body(g, lambda: g.op("Relu", g.op("MatMul", g.op("Concat", x, z, axis=0), weight)), None, 8),
        _body(
            g, lambda: g.op("Einsum", x, g.op("Tanh", z), g.op("MatMul", z, weight), equation="nd,nd,ne->ne"), None, 8
        ),
    )
    g.op("Tanh", chosen, out="y")
    g.output("y", np.float32, (None, 8))


def _known_branch(g: GraphWriter) -> None:
    """Exported squeeze: an If whose condition the shapes decide."""
    x = g.input("x", np.float32, ("batch", 1, "seq", HIDDEN))
    size = g.op("Gather", g.op("Shape", x), g.constant(1), axis=0)
    (flat,) = _choose(
        g,
        g.op("Equal", size, g.constant(1)),
        _body(g, lambda: g.op("Squeeze", x, g.constant([1])), "batch", "seq", HIDDEN),
        _body(g, lambda: g.op("Identity", x), None, None, None, None),
    )
    dense = blocks.linear(g, flat, (HIDDEN, HIDDEN))
    blocks.layer_norm(g, blocks.gelu(g, dense), HIDDEN, out="y")
    g.output("y", np.float32, ("batch", "seq", HIDDEN))


def _norms_in_a_branch(g: GraphWriter) -> None:
    """Norm-like chains that ONNX Runtime's own optimiser mistakes for LayerNormalization, inside of branches."""
    x, flag = g.input("x", np.float32, (40, 40)), g.input("flag", np.bool_, ())
    gamma, beta = g.normal((40,), std=1.0, name="gamma"), g.normal((40,), std=1.0, name="beta")

    def chain(power: float, keepdims: int) -> str:
        centred = g.op("Sub", x, g.op("ReduceMean", x, axes=[-1], keepdims=keepdims))
        variance = g.op("ReduceMean", g.op("Pow", centred, g.constant(power)), axes=[-1], keepdims=keepdims)
        normed = g.op("Div", centred, g.op("Sqrt", g.op("Add", variance, g.constant(1e-5))))
        return g.op("Add", g.op("Mul", normed, gamma), beta)

    fourth, square = (_body(g, lambda p=p, k=k: chain(p, k), 40, 40) for p, k in ((4.0, 1), (2.0, 0)))
    (chosen,) = _choose(g, flag, fourth, square)
    g.op("Identity", chosen, out="y")
    g.output("y", np.float32, (40, 40))


BODIES: tuple[Entry, ...] = (
    Entry("merged_decoder", "an If chooses with or without past", _merged_decoder, sizes=CACHE_SIZES),
    Entry("nested_decoder", "an If in a branch of an If", _nested_decoder, sizes=CACHE_SIZES),
    Entry("looped_layers", "a Loop over one layer", _looped_layers, sizes=SEQUENCE_SIZES),
    Entry("growing_loop", "a Loop whose state grows", _growing_loop, sizes=ROWS),
    Entry("scanned_rows", "a Scan over tokens", _scanned_rows, sizes=SEQUENCE_SIZES),
    Entry("captured_between", "a branch between a product and its sum", _captured_between, sizes=ROWS),
    Entry("captured_inside", "a branch reads attention scores", _captured_inside, sizes=SEQUENCE_SIZES),
    Entry("passed_through", "a branch gives outer values", _passed_through, sizes=ROWS),
    Entry("other_length", "branches of different lengths", _other_length, sizes=SEQUENCE_SIZES),
    Entry(
        "needs_equal",
        "a branch that needs equal dims",
        _needs_equal,
        sizes=({"rows": 40, "others": 40}, {"rows": 33, "others": 33}),
    ),
    Entry("known_branch", "a condition that shapes decide", _known_branch, sizes=SEQUENCE_SIZES),
    Entry("norms_in_a_branch", "norm-like chains in branches", _norms_in_a_branch, sizes=({}, {})),
)
