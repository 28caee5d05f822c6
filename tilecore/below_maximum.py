"""Exponentials of what lies below a maximum, as softmax's: they cannot overflow, which spares steps.

Comes in: a row spec. Goes out: the same, where exp(x − max) of floats is "exp_below" if max is the row's largest x.
"""

from collections.abc import Mapping
from dataclasses import replace

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Op, Var, substitute, unary, walk
from tilecore.contract.spec import RowSpec


def without_overflow(spec: RowSpec) -> RowSpec:
    """`spec` with exponentials that need no care for large operands."""
    largest = {step.var: step.value for step in spec.steps if step.kind in ("max", "fmax")}
    steps = tuple(replace(step, value=_below(step.value, largest)) for step in spec.steps)
    outputs = tuple(replace(result, value=_below(result.value, largest)) for result in spec.outputs)
    return replace(spec, steps=steps, outputs=outputs)


def _below(value: Expr, largest: Mapping[Var, Expr]) -> Expr:
    found: dict[Expr, Expr] = {}
    for part in walk(value):
        match part:
            case Op(name="exp", args=(Op(name="sub", args=(x, Var() as top)) as less,), dtype=DType.F32):
                if top in largest and largest[top] == x:
                    found[part] = unary("exp_below", less)
            case _:
                pass
    return substitute(value, found)
