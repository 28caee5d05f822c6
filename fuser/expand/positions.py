"""Definitions of operators about positions: com.microsoft RotaryEmbedding and EmbedLayerNormalization.

Source: the operators' schema texts, checked against ONNX Runtime's CPU kernels.
"""

import numpy as np
import onnx_ir as ir

from fuser.expand.dot_product import join_heads, split_heads
from fuser.expand.writer import Form, FormError


def rotary_embedding(form: Form, key: str) -> ir.Function:
    """input, position_ids, cos_cache, sin_cache; the input is [b, s, hidden] or [b, heads, s, width]."""
    form.refuse_attributes(is_packed_batching=0, scale=1.0)
    half = form.size(2, 1)
    if form.rank(0) == 4:
        value, width = form.input(0), form.size(0, 3)
    else:
        hidden = form.size(0, 2)
        heads = int(form.attribute("num_heads", 0)) or hidden // (2 * half)
        if hidden % heads:
            raise FormError(f"its {heads} heads do not divide the hidden size {hidden}")
        width = hidden // heads
        value = split_heads(form, form.input(0), heads, width=width)
    positions = form.input(1)
    if form.rank(1) == 1:  # the first position; the others follow
        positions = form.unsqueeze(form.op("Add", positions, form.range(form.scalar(form.dim(value, 2)))), 0)
    elif form.rank(1) != 2:
        raise FormError(f"its positions have {form.rank(1)} axes; 1 and 2 are supported")
    result = rotate(
        form, value, (form.input(2), form.input(3)), positions, half=half, width=width,
        interleaved=bool(form.attribute("interleaved", 0)),
    )  # fmt: skip
    if form.rank(0) == 3:
        result = join_heads(form, result, form.size(0, 2))
    return form.function(key, [result])


def rotate(
    form: Form,
    value: ir.Value,
    tables: tuple[ir.Value, ir.Value],
    positions: ir.Value,
    *,
    half: int,
    width: int,
    interleaved: bool,
) -> ir.Value:
    """Rotary embedding of [batch, heads, length, width] by the positions [batch or 1, length].

    The first 2 · `half` columns turn, by pairs of neighbours if `interleaved`, else by pairs of first and second half.
    """
    cos, sin = (form.unsqueeze(form.op("Gather", table, positions, axis=0), 1) for table in tables)
    turned = value if width == 2 * half else form.slice(value, 0, 2 * half, 3)
    if interleaved:
        a, b = (form.slice(turned, start, 2 * half, 3, step=2) for start in (0, 1))
    else:
        a, b = form.split(turned, (half, half), 3)
    first = form.op("Sub", form.op("Mul", a, cos), form.op("Mul", b, sin))
    second = form.op("Add", form.op("Mul", a, sin), form.op("Mul", b, cos))
    if interleaved:
        pairs = form.op("Concat", form.unsqueeze(first, 4), form.unsqueeze(second, 4), axis=4)
        parts = [form.op("Reshape", pairs, form.op("Shape", turned))]
    else:
        parts = [first, second]
    if width != 2 * half:
        parts.append(form.slice(value, 2 * half, width, 3))
    return parts[0] if len(parts) == 1 else form.op("Concat", *parts, axis=3)


def embed_layer_normalization(form: Form, key: str) -> ir.Function:
    """input_ids, segment_ids, word, position and segment tables, gamma, beta, mask, position_ids."""
    words = form.op("Gather", form.input(2), form.input(0), axis=0)
    if form.has(8):
        places = form.op("Gather", form.input(3), form.input(8), axis=0)
    else:
        length = form.scalar(form.dim(form.input(0), 1))
        places = form.op("Gather", form.input(3), form.range(length), axis=0)
    total = form.op("Add", words, places)
    if form.has(1):
        total = form.op("Add", total, form.op("Gather", form.input(4), form.input(1), axis=0))
    normal = layer_normalization(form, total, form.input(5), form.input(6), form.attribute("epsilon", 1e-12))
    index = _mask_index(form) if form.gives(1) else None
    return form.function(key, [normal, index, total if form.gives(2) else None])


def layer_normalization(form: Form, value: ir.Value, gamma: ir.Value, beta: ir.Value, epsilon: float) -> ir.Value:
    """LayerNormalization over the last axis, in pieces where the opset has no such operator."""
    if form.opset >= 17:
        return form.op("LayerNormalization", value, gamma, beta, axis=-1, epsilon=float(epsilon))
    centred = form.op("Sub", value, form.op("ReduceMean", value, axes=(-1,), keepdims=1))
    variance = form.op("ReduceMean", form.op("Mul", centred, centred), axes=(-1,), keepdims=1)
    deviation = form.op("Sqrt", form.op("Add", variance, form.number(epsilon, form.dtype(2))))
    return form.op("Add", form.op("Mul", form.op("Div", centred, deviation), gamma), beta)


def _mask_index(form: Form) -> ir.Value:
    """How many words each batch entry has: the number of ones in the mask; 0 without a mask."""
    if form.has(7):
        ones = form.op("Equal", form.input(7), form.constant(np.array(1, np.int32)))
        count = form.cast(ones, ir.DataType.INT32)
        if form.opset < 13:
            return form.op("ReduceSum", count, axes=(1,), keepdims=0)
        return form.op("ReduceSum", count, form.ints(1), keepdims=0)
    return form.op("ConstantOfShape", form.dim(form.input(0), 0), value=ir.tensor(np.zeros(1, np.int32)))
