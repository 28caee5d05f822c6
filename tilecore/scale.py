"""A factor of all scores, moved to the queries: one multiplication per query element instead of one per score.

Comes in: an attention spec. Goes out: the same mathematics, with `raw * c` in the score program turned into `raw` and
the view of Q multiplied by c. Only where every use of `raw` is that product, in float32, for a finite factor other than
0; rounding differs by the last bit of each query element, which queries in 16 bits have none to spare for. Where scores
are then nothing but dot products, or −inf, and only their softmax is wanted, c takes in log2(e), too: exponentials are
of base 2 then, without a product for each.
"""

import math
from dataclasses import replace

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Op, Var, binary, children, const, substitute, variables, walk
from tilecore.contract.spec import TOP, TOTAL, AttentionSpec, Spec
from tilecore.library.online_softmax import LOG2E


def scale_queries(spec: Spec) -> Spec:
    """`spec` with the factor of its scores, if they have one, in the view of Q."""
    if not isinstance(spec, AttentionSpec) or spec.q.value.dtype is not DType.F32:
        return spec
    if any(spec.raw in variables(result.value) for result in spec.outputs):  # the dot product itself is given out
        return spec
    factors = set(_factors(spec.score, spec.raw))
    factor = factors.pop() if len(factors) == 1 else None
    if factor is None or factor == 0 or not math.isfinite(factor):
        return spec
    score = substitute(spec.score, {node: spec.raw for node in walk(spec.score) if spec.raw in children(node)})
    powers_of_two = _is_product(score, spec.raw) and _is_plain_softmax(spec)
    value = binary("mul", spec.q.value, const(factor * (LOG2E if powers_of_two else 1.0), DType.F32))
    return replace(spec, q=replace(spec.q, value=value), score=score, binary=powers_of_two)


def _is_product(score: Expr, raw: Var) -> bool:
    """Whether a score is the dot product itself or −inf, whichever is chosen without looking at it."""
    match score:
        case Op(name="select", args=(condition, yes, no)):
            sides = (_is_product(side, raw) or side == const(-math.inf, side.dtype) for side in (yes, no))
            return raw not in variables(condition) and all(sides)
        case _:
            return score == raw


def _is_plain_softmax(spec: AttentionSpec) -> bool:
    """Whether nothing but the softmax sees scores, their maximum and the sum under it, and no sink is among them."""
    seen = [*(result.value for result in spec.outputs), *(step.value for step in spec.reductions)]
    seen += [] if spec.weight is None else [spec.weight]
    hidden = {spec.raw, TOP, TOTAL}
    return spec.sink is None and not spec.binary and not any(hidden & set(variables(value)) for value in seen)


def _factors(score: Expr, raw: Var) -> set[float | None]:
    """The factor of `raw` at each of its uses; None at a use without one."""
    return {_factor(node, raw) for node in walk(score) if raw in children(node)} or {None}


def _factor(expr: Expr, raw: Var) -> float | None:
    """c where `expr` is `raw * c` or `raw / (1/c)`."""
    match expr:
        case Op(name="mul", args=(value, Const(value=factor)) | (Const(value=factor), value)) if value == raw:
            return float(factor)
        case Op(name="div", args=(value, Const(value=divisor))) if value == raw and divisor != 0:
            return 1.0 / float(divisor)
        case _:
            return None
