"""Maxima that need not look for NaN, as softmax's: in a row program that gives NaN for such a row in any case.

Comes in: a row spec. Goes out: the same, where a "max" of float32 is an "fmax", which passes NaN over and costs half,
if every result of a row is NaN as soon as one of the maximum's operands is: exp(x − max) is NaN where x is, whatever
the maximum, and so is the sum of a row that holds one, and what is divided by that.
"""

from dataclasses import replace

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Op
from tilecore.contract.spec import RowSpec, Step

STRICT = frozenset((
    "add", "sub", "mul", "div", "neg", "abs", "sqrt", "rsqrt", "exp", "exp2", "log", "log2", "tanh", "erf", "sigmoid",
    "sin", "cos",
))  # operations of floats that give NaN where an operand is  # fmt: skip


def pass_over_nan(spec: RowSpec) -> RowSpec:
    """`spec` with maxima that look for NaN only where that changes a result."""
    steps = tuple(replace(step, kind="fmax") if _is_implied(step, spec) else step for step in spec.steps)
    return replace(spec, steps=steps)


def _is_implied(maximum: Step, spec: RowSpec) -> bool:
    if maximum.kind != "max" or maximum.var.dtype is not DType.F32:
        return False
    there: set[Expr] = {maximum.value}  # NaN in the column of such an operand
    everywhere: set[Expr] = set()  # NaN in its row
    for step in spec.steps:
        if step.kind == "tile" and _is_nan(step.value, everywhere):
            everywhere.add(step.var)
        elif step.kind == "tile" and _is_nan(step.value, there):
            there.add(step.var)
        elif step.kind == "sum" and _is_nan(step.value, there | everywhere):
            everywhere.add(step.var)
    return all(_is_nan(result.value, everywhere) for result in spec.outputs)


def _is_nan(value: Expr, known: set[Expr]) -> bool:
    """Whether `value` is NaN where one of `known` is."""
    if value in known:
        return True
    if not isinstance(value, Op) or value.name not in STRICT or not value.dtype.is_float:
        return False
    return any(_is_nan(arg, known) for arg in value.args)
