"""Numbers that grow with positions, such as slopes of biases: one of the thread and constants in place of conversions.

Comes in: the value of an element program over rows and columns. Goes out: its parts that are a positions' linear form,
as a float, times a constant. Elements of a thread lie at constant distances from its first one, so that such a part is
that of the first element plus a constant; the sum is rounded where the integer would be exact up to 2^24.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Op, Var, variables, walk
from tilecore.graph import split_affine


@dataclass(frozen=True, slots=True)
class Slope:
    """`part` is `factor` times the integer `position`, which has these steps along rows and columns."""

    part: Expr
    factor: float
    position: Expr
    steps: tuple[int, int]


def slopes(value: Expr, axes: tuple[Var, Var]) -> tuple[Slope, ...]:
    """Such parts of a value, none in another one."""
    found = tuple(_slopes(value, axes))
    inner = {part for slope in found if isinstance(slope.part, Op) for part in slope.part.args}
    return tuple(slope for slope in found if slope.part not in inner)


def _slopes(value: Expr, axes: tuple[Var, Var]) -> Iterator[Slope]:
    for node in walk(value):
        match node:
            case Op(name="cast", args=(position,)):
                factor = 1.0
            case Op(name="mul", args=(Op(name="cast", args=(position,)), Const(value=c))):
                factor = float(c)
            case _:
                continue
        steps = _steps(position, axes)
        if node.dtype is DType.F32 and steps is not None:
            yield Slope(node, factor, position, steps)


def _steps(position: Expr, axes: tuple[Var, Var]) -> tuple[int, int] | None:
    if position.dtype is not DType.I64 or not set(axes) & variables(position):
        return None
    found: list[int] = []
    rest: Expr = position
    for axis in axes:
        step, other = split_affine(rest, axis)
        if other is None or not isinstance(step, Const):
            return None
        found.append(int(step.value))
        rest = other
    return found[0], found[1]
