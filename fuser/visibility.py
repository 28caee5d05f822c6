"""Which keys a query sees by position alone, however a mask says so: chosen, added, or computed and then added.

Comes in: the score of an attention. Goes out: the same score as `select(sees, rest, −inf)`, with `sees`
a condition on indices only. Invariant: every softmax over the keys has the same weights, as long as no hidden key's
score is NaN or +inf, which an added mask lets through. A finite mask (finfo.min) is only taken for −inf where that is
proved: each row has a key that it does not hide, and no dot product of finite operands could make up for it.
"""

import math
from dataclasses import dataclass

from fuser.settle import settled
from tilecore.contract.dtype import DType
from tilecore.contract.expr import (
    Const,
    Expr,
    Op,
    Var,
    apply,
    cast,
    const,
    loads,
    nonnegative,
    polynomial,
    rewrite,
    select,
    substitute,
    variables,
)

CASES = 8  # constants that one tree of conditions may choose from
DOT = 2.0**125  # a dot product beyond this has all but overflowed
FADED = 110.0  # exp(−110) is 0 in float32
TRUE = const(True)
MINUS_INFINITY = -math.inf


@dataclass(frozen=True, slots=True)
class Seen:
    """An expression where `sees` holds is `rest`; elsewhere it is at most `hidden` more than its other terms."""

    sees: Expr
    rest: Expr
    hidden: float = MINUS_INFINITY


def by_position(score: Expr, key: Var) -> Expr:
    """The score with what position alone hides as its outermost choice; the score itself where there is none."""
    found = _seen(_cases(score), -FADED)
    if found.sees != TRUE and (found.hidden == MINUS_INFINITY or _fades(found, key)):
        return select(found.sees, found.rest, MINUS_INFINITY)
    found = _seen(_cases(score), MINUS_INFINITY)
    return score if found.sees == TRUE else select(found.sees, found.rest, MINUS_INFINITY)


def _seen(expr: Expr, limit: float) -> Seen:
    """Splits off conditions under which `expr` is not hidden by a constant of at most `limit`."""
    if not expr.dtype.is_float:
        return Seen(TRUE, expr)
    match expr:
        case Op(name="select", args=(condition, yes, no)):
            for wanted, shown, other in ((True, yes, no), (False, no, yes)):
                if isinstance(other, Const) and other.value <= limit:
                    sees, left = _parts(condition, wanted)
                    inner = _seen(shown, limit)
                    rest = inner.rest if left == TRUE else select(left, inner.rest, other)
                    return Seen(apply("and", sees, inner.sees), rest, max(inner.hidden, float(other.value)))
        case Op(name="add" | "min" as name, args=(left, right)):
            one, two = _seen(left, limit), _seen(right, limit)
            rest = apply(name, one.rest, two.rest)
            if name == "add" and const(0.0, expr.dtype) in (one.rest, two.rest):
                rest = two.rest if one.rest == const(0.0, expr.dtype) else one.rest
            return Seen(apply("and", one.sees, two.sees), rest, max(one.hidden, two.hidden))
        case Op(name="sub", args=(left, right)):
            one = _seen(left, limit)
            return Seen(one.sees, one.rest - right, one.hidden)
        case Op(name="mul" | "div" as name, args=(value, Const(value=factor) as scale)) if 0 < factor < math.inf:
            one = _seen(value, limit)
            hidden = one.hidden * factor if name == "mul" else one.hidden / factor
            return Seen(one.sees, apply(name, one.rest, scale), hidden)
        case Op(name="mul", args=(Const() as scale, value)):
            return _seen(value * scale, limit)
        case Op(name="cast", args=(value,)) if value.dtype.is_float:
            one = _seen(value, limit)
            return Seen(one.sees, cast(one.rest, expr.dtype), one.hidden)
        case _:
            pass
    return Seen(TRUE, expr)


def _parts(condition: Expr, wanted: bool) -> tuple[Expr, Expr]:
    """(what position alone decides, the rest) of `condition` being `wanted`: both hold exactly when it does."""
    if isinstance(condition, Op) and condition.name == "select" and not _reads(condition):
        test, yes, no = condition.args
        either = apply("and", test, yes), apply("and", apply("not", test), no)
        condition = apply("or", *either)
    if isinstance(condition, Op):
        if condition.name == "not":
            return _parts(condition.args[0], not wanted)
        if condition.name == ("and" if wanted else "or"):
            (a, b), (c, d) = (_parts(part, wanted) for part in condition.args)
            return apply("and", a, c), apply("and", b, d)
    whole = condition if wanted else apply("not", condition)
    if _reads(whole):
        return TRUE, whole
    whole = settled(whole)
    return (whole, TRUE) if variables(whole) else (TRUE, whole)


def _reads(condition: Expr) -> bool:
    """Whether data takes part: loads, or placeholders such as a dot product."""
    return bool(loads(condition)) or any(var.extent is None for var in variables(condition))


def _fades(found: Seen, key: Var) -> bool:
    """Whether every row has a key that is seen, next to which the weight of a hidden one is exactly 0."""
    size = _magnitude(found.rest)
    if size is None or not found.hidden + 2 * size <= -FADED:
        return False
    extent = key.extent
    assert extent is not None
    for witness in _borders(found.sees, key):
        inside = nonnegative(witness) and nonnegative(extent - 1 - witness)
        if inside and substitute(found.sees, {key: witness}) == TRUE:
            return True
    return False


def _borders(condition: Expr, key: Var) -> list[Expr]:
    """The last keys for which comparisons in a condition hold: one of them is seen wherever any is, as a rule."""
    if not isinstance(condition, Op):
        return []
    if condition.name in ("and", "or", "not"):
        return [border for part in condition.args for border in _borders(part, key)]
    if condition.name not in ("lt", "le", "gt", "ge") or condition.args[0].dtype is not DType.I64:
        return []
    slack = condition.args[1] - condition.args[0]
    factor = polynomial(slack).get((key,), 0)
    if abs(factor) != 1:
        return []
    rest = substitute(slack, {key: const(0)})
    border = rest if factor < 0 else -rest
    return [border, border - 1, border + 1]


def _magnitude(expr: Expr) -> float | None:
    """A bound of |expr| for finite operands of the dot product; None where data may be anything."""
    match expr:
        case Const(value=value):
            return abs(float(value))
        case Var(extent=None):
            return DOT
        case Op(name="tanh" | "sin" | "cos" | "erf" | "sigmoid"):
            return 1.0
        case Op(name="select", args=(_, yes, no)):
            parts = [_magnitude(yes), _magnitude(no)]
            return None if None in parts else max(part for part in parts if part is not None)
        case Op(name="add" | "sub", args=(left, right)):
            one, two = _magnitude(left), _magnitude(right)
            return None if one is None or two is None else one + two
        case Op(name="mul", args=(left, right)):
            one, two = _magnitude(left), _magnitude(right)
            return None if one is None or two is None else one * two
        case Op(name="div", args=(left, Const(value=value))) if value:
            one = _magnitude(left)
            return None if one is None else one / abs(float(value))
        case Op(name="cast" | "neg" | "abs", args=(value,)) if value.dtype.is_float:
            return _magnitude(value)
        case _:
            return None


def _cases(score: Expr) -> Expr:
    """Arithmetic of constants that conditions choose, as one choice of constants: (1 − float(c)) · −1e9 and its kin."""

    def visit(node: Expr) -> Expr | None:
        if not isinstance(node, Op) or not node.dtype.is_float:
            return None
        if node.name == "cast" and node.args[0].dtype is DType.BOOL:
            return select(node.args[0], const(1.0, node.dtype), const(0.0, node.dtype))
        counts = [_leaves(arg) for arg in node.args]
        chooses = any(isinstance(arg, Op) for arg in node.args)
        if node.name == "select" or not chooses or 0 in counts or math.prod(counts) > CASES:
            return None
        return _distributed(node, node.args)

    return rewrite(score, visit)


def _leaves(expr: Expr) -> int:
    """How many constants a tree of conditions chooses from; 0 for an expression that is none."""
    if isinstance(expr, Const):
        return 1
    if not (isinstance(expr, Op) and expr.name == "select" and expr.dtype.is_float):
        return 0
    yes, no = (_leaves(branch) for branch in expr.args[1:])
    return yes + no if yes and no else 0


def _distributed(node: Op, args: tuple[Expr, ...]) -> Expr:
    for position, arg in enumerate(args):
        if isinstance(arg, Op):
            condition, *branches = arg.args
            parts = [_distributed(node, (*args[:position], branch, *args[position + 1 :])) for branch in branches]
            return select(condition, *parts)
    return cast(args[0], node.dtype) if node.name == "cast" else apply(node.name, *args)
