"""A factor of all scores, moved to the queries: one multiplication per query element instead of one per score.

Comes in: an attention spec. Goes out: the same mathematics, with `raw * c` in the score program turned into `raw` and
the view of Q multiplied by c. Only where every use of `raw` is that product, in float32, for a finite factor other than
0; rounding differs by the last bit of each query element.
"""

import math
from dataclasses import replace

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Op, Var, binary, children, const, substitute, variables, walk
from tilecore.contract.spec import AttentionSpec, Spec


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
    value = binary("mul", spec.q.value, const(factor, DType.F32))
    return replace(spec, q=replace(spec.q, value=value), score=score)


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
