"""Masks that whole tiles satisfy: when is every condition on positions true for all elements that a warpgroup has?"""

from collections.abc import Iterator, Mapping

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Op, Var, apply, cast, const, loads, rewrite, walk
from tilecore.graph import split_affine

Spread = Mapping[Var, tuple[Expr, Expr]]  # the first and the last value of a variable in the tile


def inside(value: Expr, spread: Spread) -> tuple[tuple[Expr, ...], Expr] | None:
    """(numbers that are all at least 0 where every mask holds, the value without those masks); None without masks."""
    held: dict[Expr, Expr] = {}
    needed: list[Expr] = []
    for node in walk(value):
        if not (isinstance(node, Op) and node.name == "select") or loads(node.args[0]):
            continue
        slacks = list(_slacks(node.args[0], spread))
        if slacks and None not in slacks:
            held[node.args[0]] = const(True)
            needed += [slack for slack in slacks if slack is not None]
    if not held:
        return None
    return tuple(dict.fromkeys(needed)), rewrite(value, held.get)


def _slacks(condition: Expr, spread: Spread) -> Iterator[Expr | None]:
    match condition:
        case Op(name="and", args=(left, right)):
            yield from _slacks(left, spread)
            yield from _slacks(right, spread)
        case Op(name="lt" | "le" | "gt" | "ge", args=(left, right)) if left.dtype.is_int:
            if condition.name in ("gt", "ge"):
                left, right = right, left
            yield _least(_index(right) - _index(left) - int(condition.name in ("lt", "gt")), spread)
        case _:
            yield None


def _least(slack: Expr, spread: Spread) -> Expr | None:
    """The smallest value of `slack` in the tile, when it is linear in the tile's variables."""
    for var, (first, last) in spread.items():
        coefficient, rest = split_affine(slack, var)
        if rest is None or not isinstance(coefficient, Const):
            return None
        slack = rest + coefficient * (first if coefficient.value >= 0 else last)
    return slack


def _index(expr: Expr) -> Expr:
    """An integer in i64; positions fit every integer type."""
    if isinstance(expr, Const):
        return const(int(expr.value))
    if isinstance(expr, Op) and expr.name == "cast" and expr.args[0].dtype.is_int:
        return _index(expr.args[0])
    if isinstance(expr, Op) and expr.name in ("add", "sub", "mul", "neg"):
        return apply(expr.name, *map(_index, expr.args))
    return cast(expr, DType.I64)
