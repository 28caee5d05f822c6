"""Gates: where y is multiplied by tanh(p(y)) + 1 or a sigmoid of p(y), as GELU and SiLU do, elements share reciprocals.

Comes in: the value of an element program. Goes out: the exponent u of the gate 1 / (1 + 2^u) and the value with GATE
for it. Two special functions take a multiprocessor as long as 16 other instructions; four elements' gates have one
reciprocal in common, of a product that stays finite since u is at most 30: a gate is off by 2⁻³⁰ at most. NaN in y
makes a gate that is none, hence y is a factor of whatever the gate is in, and p must not make NaN of what is none.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import Evaluator
from tilecore.contract.expr import Const, Expr, Load, Op, Var, children, const, loads, substitute, variables, walk

GATE = Var("gate", DType.F32)
INNER = Var("inner", DType.F32)
MAGNITUDES = np.exp2(np.arange(-149, 128)).astype(np.float32)
NUMBERS = np.concatenate([sign * np.append(MAGNITUDES, np.float32(np.inf)) for sign in (1, -1)])


@dataclass(frozen=True, slots=True)
class Gate:
    """`value` is a program of GATE = 1 / (1 + 2^`exponent`)."""

    exponent: Expr
    value: Expr


def gate_of(value: Expr) -> Gate | None:
    """The one gate of a program, or None where it has none, or several."""
    found = [(node, gate) for node in walk(value) if (gate := _gate(node)) is not None]
    if len(found) != 1:
        return None
    ((node, (inner, factor)),) = found
    if not any(_weighed(value, node, y) and _tame(inner, y) for y in dict.fromkeys(_factors_beside(value, node))):
        return None
    step = 2.0 if factor == 2.0 else 1.0
    exponent = _scaled(inner, -step * math.log2(math.e))
    products = [one for one in walk(value) if node in (own := list(_factors(one))) and len(own) > 1]
    return Gate(exponent, substitute(value, {products[-1]: _gated(products[-1], node, factor)}))


def _gated(product: Expr, node: Expr, factor: float) -> Expr:
    """A product with GATE · `factor` for `node`, all its constants as one."""
    own = [one for one in _factors(product) if one != node]
    amount = factor * math.prod(float(one.value) for one in own if isinstance(one, Const))
    rest = math.prod((one for one in own if not isinstance(one, Const)), start=GATE)
    return _scaled(rest, amount)


def _gate(node: Expr) -> tuple[Expr, float] | None:
    """(z, c) where a node is c / (1 + exp(−c · z))."""
    match node:
        case Op(name="sigmoid", args=(inner,), dtype=DType.F32):
            return inner, 1.0
        case Op(name="add", args=(Op(name="tanh", args=(inner,)), Const(value=1)), dtype=DType.F32):
            return inner, 2.0
        case Op(name="add", args=(Const(value=1), Op(name="tanh", args=(inner,))), dtype=DType.F32):
            return inner, 2.0
        case _:
            return None


def _scaled(value: Expr, factor: float) -> Expr:
    """value · factor; what `value` is a multiple of already, once."""
    match value:
        case Op(name="mul", args=(Const(value=c), inner)) | Op(name="mul", args=(inner, Const(value=c))):
            return _scaled(inner, factor * float(c))
        case _:
            return value if factor == 1.0 else value * const(factor, DType.F32)


def _factors(product: Expr) -> Iterator[Expr]:
    if isinstance(product, Op) and product.name == "mul":
        for part in product.args:
            yield from _factors(part)
    else:
        yield product


def _factors_beside(value: Expr, node: Expr) -> Iterator[Expr]:
    """Factors of all products that have `node` as a factor."""
    for product in walk(value):
        factors = list(_factors(product))
        if len(factors) > 1 and node in factors:
            yield from (one for one in factors if one != node and loads(one))


def _weighed(expr: Expr, node: Expr, y: Expr) -> bool:
    """Whether `node` is in products with `y` alone."""
    if expr == node:
        return False
    factors = list(_factors(expr))
    if len(factors) == 1:
        return isinstance(expr, Load) or all(_weighed(part, node, y) for part in children(expr))
    return y in factors or all(_weighed(part, node, y) for part in factors)


def _tame(inner: Expr, y: Expr) -> bool:
    """Whether `inner` is of `y` alone, and NaN where that is NaN alone."""
    program = substitute(inner, {y: INNER})
    if loads(program) or variables(program) != frozenset({INNER}):
        return False
    with np.errstate(all="ignore"):
        return not bool(np.isnan(np.asarray(Evaluator({}, {}, wide=False)(program, {INNER: NUMBERS}))).any())
