"""Definition of com.microsoft GroupQueryAttention, as ONNX Runtime's CPU kernel computes it.

Every batch entry b has `past` = 0 tokens in the cache when all tokens are new, else seqlens_k[b] + 1 − s. New keys and
values follow the cached ones, zeros fill the rest of the present caches. A query sees the keys up to itself, none
past seqlens_k[b], and with a window only the nearest. Source: the operator's schema text, checked against the kernel.
"""

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fuser.expand.dot_product import Scores, attend, join_heads, repeat_heads, split_heads
from fuser.expand.positions import rotate
from fuser.expand.writer import Form, FormError

UNSUPPORTED = {"k_scale": 12, "v_scale": 13, "q_norm_weight": 14, "k_norm_weight": 15, "query_seqlens": 16}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Heads of query and of key, and the width of a head."""

    heads: int
    groups: int
    width: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens as values of the definition: `new` and `total` are vectors of one element, `past` is [batch, 1]."""

    new: ir.Value
    total: ir.Value
    past: ir.Value


def grouped_query_attention(form: Form, key: str) -> ir.Function:
    """query, key, value, past_key, past_value, seqlens_k, total_sequence_length, cos_cache, sin_cache, position_ids,
    attention_bias, head_sink."""
    form.refuse_attributes(causal=1, sliding_window_cache=0, qk_output=0, k_quant_type="NONE", v_quant_type="NONE")
    form.refuse_inputs(**UNSUPPORTED)
    if form.gives(3):
        raise FormError("its output output_qk is asked for, which has no definition")
    sizes = _sizes(form)
    q, k, v = _operands(form, sizes)
    lengths = _lengths(form, q)
    if form.attribute("do_rotary", 0):
        half = form.size(7, 1)
        tables = (form.input(7), form.input(8))
        positions = _positions(form, lengths)
        interleaved = bool(form.attribute("rotary_interleaved", 0))
        q, k = (
            rotate(form, x, tables, positions, half=half, width=sizes.width, interleaved=interleaved) for x in (q, k)
        )
    if form.has(3):
        index, valid = _places(form, lengths)
        k, v = (_appended(form, form.input(3 + i), x, index, valid) for i, x in enumerate((k, v)))
    presents = [form.op("Identity", x) if form.gives(1 + i) else None for i, x in enumerate((k, v))]
    if form.has(3):
        k, v = (_first(form, x, lengths.total) for x in (k, v))
    k, v = (repeat_heads(form, x, sizes.groups, sizes.heads, sizes.width) for x in (k, v))
    scores = Scores(
        float(form.attribute("scale", 0.0)) or 1 / math.sqrt(sizes.width),
        softcap=float(form.attribute("softcap", 0.0)),
        added=[form.input(10)] if form.has(10) else [],
        keep=_keep(form, lengths),
        sink=_sink(form),
    )
    result = attend(form, q, k, v, scores, dtype=form.dtype(0))
    return form.function(key, [join_heads(form, result, sizes.heads * sizes.width), *presents])


def _sizes(form: Form) -> Sizes:
    heads, groups = int(form.attribute("num_heads", 0)), int(form.attribute("kv_num_heads", 0))
    if heads < 1 or groups < 1 or heads % groups:
        raise FormError(f"its {groups} key heads do not divide its {heads} query heads")
    parts = heads if form.has(1) else heads + 2 * groups
    hidden = form.size(0, 2)
    if hidden % parts:
        raise FormError(f"its hidden size {hidden} is not a multiple of {parts} heads")
    return Sizes(heads, groups, hidden // parts)


def _operands(form: Form, sizes: Sizes) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Query, key and value by head; they may come packed."""
    if form.has(1):
        parts = [form.input(i) for i in range(3)]
    else:
        widths = [sizes.width * count for count in (sizes.heads, sizes.groups, sizes.groups)]
        parts = form.split(form.input(0), widths, 2)
    counts = (sizes.heads, sizes.groups, sizes.groups)
    q, k, v = (split_heads(form, part, n, width=sizes.width) for part, n in zip(parts, counts, strict=True))
    return q, k, v


def _lengths(form: Form, q: ir.Value) -> Lengths:
    new = form.dim(q, 2)
    if not form.has(3):
        return Lengths(new, new, form.constant(np.zeros((1, 1), np.int64)))
    source = form.node.inputs[6]
    content = None if source is None else form.shapes.content(source)
    if content is None:
        raise FormError(
            "its total_sequence_length is only known at run time: it has to be a constant or the dim of a model input, "
            "such as Shape(attention_mask)[1]"
        )
    total = form.reshape(form.cast(form.input(6), ir.DataType.INT64), 1)
    seen = form.op("Add", form.cast(form.input(5), ir.DataType.INT64), form.integer(1))
    past = form.op("Sub", form.reshape(seen, -1, 1), new)
    return Lengths(new, total, form.op("Where", form.op("Equal", new, total), form.integer(0), past))


def _positions(form: Form, lengths: Lengths) -> ir.Value:
    """The position of every new token, [batch or 1, s]: counted on from the cache, or as given.

    Of given positions the kernel uses only the very first when all tokens are new.
    """
    steps = form.range(form.scalar(lengths.new))
    if not form.has(9):
        return form.op("Add", lengths.past, steps)
    given = form.input(9)
    first = form.slice(form.slice(given, 0, 1, 0), 0, 1, 1)
    counted = form.op("Add", first, steps)
    return form.op("Where", form.op("Equal", lengths.new, lengths.total), counted, given)


def _places(form: Form, lengths: Lengths) -> tuple[ir.Value, ir.Value]:
    """For every place of the present cache: where it is in (past, new), and whether it holds a token. [b, 1, t, 1]."""
    room = form.dim(form.input(3), 2)
    places = form.range(form.scalar(form.larger(room, lengths.total)))
    step = form.op("Sub", places, lengths.past)
    cached = form.op("Less", step, form.integer(0))
    valid = form.op("Less", step, lengths.new)
    appended = form.op("Where", valid, form.op("Add", step, room), form.integer(0))
    index = form.op("Where", cached, places, appended)
    end = form.op("Sub", form.op("Add", room, lengths.new), form.integer(1))
    index = form.smaller(form.larger(index, form.integer(0)), end)  # whatever seqlens_k says, no read is outside
    return form.unsqueeze(index, 1, 3), form.unsqueeze(valid, 1, 3)


def _appended(form: Form, past: ir.Value, new: ir.Value, index: ir.Value, valid: ir.Value) -> ir.Value:
    """The present cache."""
    both = form.op("Concat", past, new, axis=2)
    whole = form.op("Shape", both)
    sizes = [form.op("Gather", whole, form.ints(axis), axis=0) for axis in (0, 1, 3)]
    shape = form.vector(sizes[0], sizes[1], form.dim(index, 2), sizes[2])
    gathered = form.op("GatherElements", both, form.op("Expand", index, shape), axis=2)
    return form.op("Where", valid, gathered, form.number(0.0, form.dtype(0)))


def _first(form: Form, value: ir.Value, length: ir.Value) -> ir.Value:
    """The first `length` keys of a cache."""
    return form.op("Slice", value, form.ints(0), length, form.ints(2))


def _keep(form: Form, lengths: Lengths) -> ir.Value:
    """Which keys a query sees, [batch or 1, 1, s, t]."""
    keys = form.range(form.scalar(lengths.total))
    rows = form.op("Add", form.range(form.scalar(lengths.new)), lengths.past)
    last = form.unsqueeze(rows, 2)  # the query's own place
    ends = form.reshape(form.cast(form.input(5), ir.DataType.INT64), -1, 1, 1)
    seen = form.op("And", form.op("LessOrEqual", keys, last), form.op("LessOrEqual", keys, ends))
    window = int(form.attribute("local_window_size", -1))
    if window > 0:
        near = form.op("Greater", keys, form.op("Sub", last, form.integer(window)))
        seen = form.op("And", seen, near)
    return form.unsqueeze(seen, 1)


def _sink(form: Form) -> ir.Value | None:
    if form.has(11):
        return form.reshape(form.input(11), 1, -1, 1, 1)
    if not int(form.attribute("smooth_softmax", 0)):
        return None
    return form.constant(np.zeros((1, 1, 1, 1)), form.dtype(0))
