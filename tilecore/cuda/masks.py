"""Masks that whole tiles satisfy: when is every condition on positions true for all elements that a warpgroup has?

Conditions may be flags of keys as well, which lie in a line beside the tile: all of them are set then, or none where
they are negated.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Op, Var, apply, cast, const, rewrite, walk
from tilecore.graph import split_affine
from tilecore.ir import Buffer

Spread = Mapping[Var, tuple[Expr, Expr]]  # the first and the last value of a variable in the tile


@dataclass(frozen=True, slots=True)
class Flags:
    """All flags of a line are set, or, if `negated`, none is."""

    line: Buffer
    negated: bool


@dataclass(frozen=True, slots=True)
class Inside:
    """Every mask holds where all numbers of `needed` are at least 0 and all of `flags` are so; `value` is without those
    masks.
    """

    needed: tuple[Expr, ...]
    flags: tuple[Flags, ...]
    value: Expr


def inside(value: Expr, spread: Spread) -> Inside | None:
    """What it takes that the masks of a value hold; None without masks."""
    held: dict[Expr, Expr] = {}
    needed: list[Expr | Flags] = []
    for node in walk(value):
        if not (isinstance(node, Op) and node.name == "select"):
            continue
        conditions = list(_conditions(node.args[0], spread))
        if conditions and None not in conditions:
            held[node.args[0]] = const(True)
            needed += [condition for condition in conditions if condition is not None]
    if not held:
        return None
    found = dict.fromkeys(needed)
    slacks = tuple(one for one in found if not isinstance(one, Flags))
    return Inside(slacks, tuple(one for one in found if isinstance(one, Flags)), rewrite(value, held.get))


def _conditions(condition: Expr, spread: Spread) -> Iterator[Expr | Flags | None]:
    match condition:
        case Op(name="and", args=(left, right)):
            yield from _conditions(left, spread)
            yield from _conditions(right, spread)
        case Load(source=Buffer() as line) if line.dtype is DType.BOOL and len(line.shape) == 1:
            yield Flags(line, negated=False)
        case Op(name="not", args=(Load(source=Buffer() as line),)) if line.dtype is DType.BOOL and len(line.shape) == 1:
            yield Flags(line, negated=True)
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
