"""GELU in products of f32, however they are spelled: y (1 + erf(y / sqrt(2))) / 2, times anything.

Comes in: a product. Goes out: y and what GELU of it is multiplied by. The vectors of some instruction sets have a
shorter way to it than by erf.
"""

import math
from dataclasses import dataclass

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Op, binary, const

NEAR = 1e-6  # relative: √½ comes as a rounded number, or as the reciprocal of one


@dataclass(frozen=True, slots=True)
class Gelu:
    """`factor` · GELU(`argument`)."""

    argument: Expr
    factor: Expr


def gelu_of(product: Expr) -> Gelu | None:
    """The product as GELU; None where it is something else."""
    number, factors = _factors(product)
    for term in factors:
        argument = _argument(term)
        if argument is None:
            continue
        rest = list(factors)
        rest.remove(term)
        if argument not in rest:
            return None
        rest.remove(argument)
        factor: Expr = const(2 * number, DType.F32)
        for other in rest:
            factor = binary("mul", factor, other)
        return Gelu(argument, factor)
    return None


def _factors(value: Expr) -> tuple[float, list[Expr]]:
    """A number and what it is multiplied by."""
    match value:
        case Const():
            return float(value.value), []
        case Op(name="mul", args=(left, right)) if value.dtype is DType.F32:
            (first, some), (second, others) = _factors(left), _factors(right)
            return first * second, some + others
        case Op(name="div", args=(left, Const() as divisor)) if value.dtype is DType.F32 and divisor.value:
            number, factors = _factors(left)
            return number / float(divisor.value), factors
        case _:
            return 1.0, [value]


def _argument(term: Expr) -> Expr | None:
    """y of 1 + erf(y / √2)."""
    match term:
        case Op(name="add", args=(Op(name="erf", args=(scaled,)), Const(value=1))):
            pass
        case Op(name="add", args=(Const(value=1), Op(name="erf", args=(scaled,)))):
            pass
        case _:
            return None
    number, factors = _factors(scaled)
    return factors[0] if len(factors) == 1 and math.isclose(number, math.sqrt(0.5), rel_tol=NEAR) else None
