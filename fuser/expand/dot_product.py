"""Scaled dot-product attention in pieces: what the definitions of all attention operators end in.

Comes in: query, key and value of shape [batch, heads, length, width] as values of a definition. Goes out: the result of
the same layout. The order is that of the operators: scale, soft-cap, additive terms, then what is hidden altogether.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fuser.expand.writer import Form


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores are made of the products of query and key.

    `keep` is a boolean tensor that broadcasts to the scores: false entries weigh nothing. `sink`, of a shape that
    broadcasts to [batch, heads, queries, 1], is one more logit that takes weight and gives none.
    """

    scale: float
    softcap: float = 0.0
    added: Sequence[ir.Value] = ()
    keep: ir.Value | None = None
    sink: ir.Value | None = None


def attend(form: Form, q: ir.Value, k: ir.Value, v: ir.Value, scores: Scores, *, dtype: ir.DataType) -> ir.Value:
    """softmax(scores(q · kᵀ)) · v."""
    result = form.op("MatMul", q, form.op("Transpose", k, perm=(0, 1, 3, 2)))
    if scores.scale != 1.0:
        result = form.op("Mul", result, form.number(scores.scale, dtype))
    if scores.softcap:
        cap = form.number(scores.softcap, dtype)
        result = form.op("Mul", form.op("Tanh", form.op("Div", result, cap)), cap)
    for term in scores.added:
        result = form.op("Add", result, term)
    if scores.keep is not None:
        result = form.op("Where", scores.keep, result, form.number(float("-inf"), dtype))
    if scores.sink is None:
        return form.op("MatMul", form.op("Softmax", result, axis=-1), v)
    rows = form.op("Shape", form.slice(result, 0, 1, 3))
    logits = form.op("Concat", result, form.op("Expand", scores.sink, rows), axis=-1)
    weights = form.slice(form.op("Softmax", logits, axis=-1), 0, -1, 3)
    return form.op("MatMul", weights, v)


def split_heads(form: Form, value: ir.Value, heads: int, *, width: int = -1) -> ir.Value:
    """[batch, length, heads · width] → [batch, heads, length, width]."""
    return form.op("Transpose", form.reshape(value, 0, 0, heads, width), perm=(0, 2, 1, 3))


def join_heads(form: Form, value: ir.Value, hidden: int) -> ir.Value:
    """[batch, heads, length, width] → [batch, length, heads · width]."""
    return form.reshape(form.op("Transpose", value, perm=(0, 2, 1, 3)), 0, 0, hidden)


def repeat_heads(form: Form, value: ir.Value, groups: int, heads: int, width: int) -> ir.Value:
    """[batch, groups, length, width] → [batch, heads, length, width]: each head as often as queries share it."""
    if groups == heads:
        return value
    one = form.unsqueeze(value, 2)
    times = form.vector(1, 1, heads // groups, 1, 1)
    wide = form.op("Expand", one, times)
    return form.reshape(wide, 0, heads, -1, width)
