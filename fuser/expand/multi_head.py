"""Definition of com.microsoft MultiHeadAttention, Attention and QAttention, as ONNX Runtime's CPU kernels compute them.

MultiHeadAttention takes projected (or packed) query, key and value; Attention projects its input itself. Masks of 0 and
1 add `mask_filter_value`, they do not exclude. Source: the operators' schema texts, checked against the kernels.
"""

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fuser.expand.dot_product import Scores, attend, join_heads, split_heads
from fuser.expand.writer import Form, FormError


def multi_head_attention(form: Form, key: str) -> ir.Function:
    """query, key, value, bias, key_padding_mask, attention_bias, past_key, past_value."""
    form.refuse_inputs(past_sequence_length=8, cache_indirection=9)
    if form.gives(3):
        raise FormError("its output qk is asked for, which has no definition")
    heads = _heads(form)
    q, k, v, widths = _operands(form, heads)
    presents: list[ir.Value | None] = [None, None]
    if form.has(6) != form.has(7):
        raise FormError("one of past_key and past_value is missing: give both or none")
    if form.has(6):
        k = form.op("Concat", form.input(6), k, axis=2)
        v = form.op("Concat", form.input(7), v, axis=2)
    presents = [form.op("Identity", k) if form.gives(1) else None, form.op("Identity", v) if form.gives(2) else None]
    if form.attribute("unidirectional", 0) and not _self_attention(form):
        raise FormError("it is unidirectional with other keys than queries, for which the order is not defined")
    scores = _scores(form, widths[0], q, k, mask=4, bias=5, dtype=form.dtype(0))
    result = attend(form, q, k, v, scores, dtype=form.dtype(0))
    return form.function(key, [join_heads(form, result, heads * widths[1]), *presents])


def attention(form: Form, key: str) -> ir.Function:
    """input, weights, bias, mask_index, past, attention_bias."""
    form.refuse_attributes(do_rotary=0, past_present_share_buffer=0)
    form.refuse_inputs(past_sequence_length=6)
    heads = _heads(form)
    hidden = form.size(1, 1)
    sizes = tuple(int(size) for size in form.attribute("qkv_hidden_sizes", (hidden // 3,) * 3))
    if sum(sizes) != hidden or sizes[0] != sizes[1] or any(size % heads for size in sizes):
        raise FormError(f"its hidden sizes {sizes} do not fit {heads} heads and {hidden} columns of weights")
    projected = form.op("MatMul", form.input(0), form.input(1))
    if form.has(2):
        projected = form.op("Add", projected, form.input(2))
    return _attended(form, key, projected, sizes, Positions(mask=3, past=4, bias=5), form.dtype(0))


def quantized_attention(form: Form, key: str) -> ir.Function:
    """input, weights, bias, their scales, mask_index, zero points of input and weights, past: QAttention.

    The scale and the zero point of the weights are one number, or one per column.
    """
    form.refuse_attributes(do_rotary=0, past_present_share_buffer=0)
    hidden = form.size(1, 1)
    if hidden % 3:
        raise FormError(f"its {hidden} columns of weights are no query, key and value of one size")
    zeros = [form.vector_or_number(i) if form.has(i) else None for i in (6, 7)]
    levels = form.op("MatMulInteger", form.input(0), form.input(1), *zeros)
    real = form.op("Mul", form.cast(levels, ir.DataType.FLOAT), form.vector_or_number(3))
    real = form.op("Mul", real, form.vector_or_number(4))
    projected = form.op("Add", real, form.input(2))
    sizes = (hidden // 3,) * 3
    return _attended(form, key, projected, sizes, Positions(mask=5, past=8, bias=None), ir.DataType.FLOAT)


@dataclass(frozen=True, slots=True)
class Positions:
    """Which inputs of the operator are its mask, its past and what is added to the scores."""

    mask: int
    past: int
    bias: int | None


def _attended(
    form: Form, key: str, projected: ir.Value, sizes: tuple[int, ...], positions: Positions, dtype: ir.DataType
) -> ir.Function:
    """What follows the projection to query, key and value."""
    heads = _heads(form)
    q, k, v = (split_heads(form, part, heads) for part in form.split(projected, sizes, 2))
    if form.has(positions.past):
        past = form.split(form.input(positions.past), (1, 1), 0)
        past_k, past_v = (form.squeeze(part, 0) for part in past)
        k, v = form.op("Concat", past_k, k, axis=2), form.op("Concat", past_v, v, axis=2)
    present = None
    if form.gives(1):
        if sizes[0] != sizes[2]:
            raise FormError(f"its present state is asked for, but key and value have sizes {sizes[1:]}")
        present = form.op("Concat", form.unsqueeze(k, 0), form.unsqueeze(v, 0), axis=0)
    scores = _scores(form, sizes[0] // heads, q, k, mask=positions.mask, bias=positions.bias, dtype=dtype)
    result = attend(form, q, k, v, scores, dtype=dtype)
    return form.function(key, [join_heads(form, result, sizes[2]), present])


def _heads(form: Form) -> int:
    heads = int(form.attribute("num_heads", 0))
    if heads < 1:
        raise FormError(f"its attribute num_heads is {heads}; it has to be at least 1")
    return heads


def _operands(form: Form, heads: int) -> tuple[ir.Value, ir.Value, ir.Value, tuple[int, int]]:
    """Query, key and value by head, and the widths of a head of query and of value."""
    if form.rank(0) == 5:
        width = form.size(0, 4)
        parts = form.split(form.input(0), (1, 1, 1), 3)
        q, k, v = (form.squeeze(part, 3) for part in parts)
        q, k, v = (_biased(form, part, heads, width, i, (width, width, width)) for i, part in enumerate((q, k, v)))
        return q, k, v, (width, width)
    width = _divided(form.size(0, 2), heads)
    query = form.reshape(form.input(0), 0, 0, heads, width)
    if form.rank(1) == 5:
        k, v = (form.squeeze(part, 3) for part in form.split(form.input(1), (1, 1), 3))
        parts = [_biased(form, part, heads, width, i, (width, width, width)) for i, part in enumerate((query, k, v))]
        return parts[0], parts[1], parts[2], (width, width)
    if form.rank(1) == 4:  # key and value come by head already, and without bias
        v_width = form.size(2, 3)
        q = _biased(form, query, heads, width, 0, (width, width, v_width))
        return q, form.input(1), form.input(2), (width, v_width)
    v_width = _divided(form.size(2, 2), heads)
    widths = (width, width, v_width)
    k = form.reshape(form.input(1), 0, 0, heads, width)
    v = form.reshape(form.input(2), 0, 0, heads, v_width)
    parts = [_biased(form, part, heads, widths[i], i, widths) for i, part in enumerate((query, k, v))]
    return parts[0], parts[1], parts[2], (width, v_width)


def _divided(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise FormError(f"its {heads} heads do not divide the hidden size {hidden}")
    return hidden // heads


def _biased(form: Form, value: ir.Value, heads: int, width: int, part: int, widths: tuple[int, int, int]) -> ir.Value:
    """[batch, length, heads, width] plus its part of the bias, as [batch, heads, length, width]."""
    if form.has(3):
        start = sum(heads * w for w in widths[:part])
        bias = form.slice(form.input(3), start, start + heads * width, 0)
        value = form.op("Add", value, form.reshape(bias, heads, width))
    return form.op("Transpose", value, perm=(0, 2, 1, 3))


def _self_attention(form: Form) -> bool:
    """Whether there are as many new keys as queries, in every call."""
    if form.rank(0) == 5:
        return True
    key = form.shape(1)
    return len(key) in (3, 5) and key[1] == form.shape(0)[1]


def _scores(
    form: Form, width: int, q: ir.Value, k: ir.Value, *, mask: int, bias: int | None, dtype: ir.DataType
) -> Scores:
    """Scale, masks and bias of any of the operators."""
    scale = float(form.attribute("scale", 0.0)) or 1 / math.sqrt(width)
    added: list[ir.Value] = []
    total = form.dim(k, 2)
    if form.has(mask):
        keep = _mask(form, mask, total)
        fill = form.number(float(form.attribute("mask_filter_value", -10000.0)), dtype)
        added.append(form.op("Where", keep, form.number(0.0, dtype), fill))
    if bias is not None and form.has(bias):
        added.append(form.input(bias))
    hidden = None
    if form.attribute("unidirectional", 0):
        queries = form.dim(q, 2)
        columns = form.range(form.scalar(total))
        rows = form.op("Add", form.range(form.scalar(queries)), form.op("Sub", total, queries))
        hidden = form.op("Not", form.op("Greater", columns, form.unsqueeze(rows, 1)))
    return Scores(scale, added=added, keep=hidden)


def _mask(form: Form, position: int, total: ir.Value) -> ir.Value:
    """A mask of any supported shape, as booleans that broadcast to the scores."""
    shape = form.shape(position)
    value = form.input(position)
    if len(shape) == 1:
        batch = form.shape(0)[0]
        if shape[0] != batch:
            raise FormError(f"its mask has shape [{shape[0]}]; one length per batch entry, [{batch}], is supported")
        columns = form.cast(form.range(form.scalar(total)), form.dtype(position))
        return form.unsqueeze(form.op("Less", columns, form.unsqueeze(value, 1)), 1, 2)
    if len(shape) == 2:
        value = form.unsqueeze(value, 1, 2)
    elif len(shape) == 3:
        value = form.unsqueeze(value, 1)
    else:
        raise FormError(f"its mask has {len(shape)} axes; 1, 2 and 3 are supported")
    return form.op("Greater", value, form.constant(np.array(0), form.dtype(position)))
