"""Vector loops whose index is two digits of something, taken apart: so that no vector divides.

Comes in: a vector loop of stores over a known number of points. Goes out: where its body divides the loop's variable by
a number of whole vectors that the points are a multiple of (channels of a convolution's taps, columns of a head), a
loop over quotients of a vector loop over remainders, and these two in place of the division.
"""

from dataclasses import replace

from tilecore.addresses import live_var
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Op, Var, const, variables, walk
from tilecore.contract.panel import PANEL
from tilecore.loops import Fold, Let, Loop, LoopStmt, Put, VectorLoop
from tilecore.scratch import substituted


def in_digits(loop: VectorLoop) -> LoopStmt:
    """The loop, or one over the higher digit of its variable around it."""
    if not isinstance(loop.stop, Const) or any(isinstance(part, Fold) for part in loop.body):
        return loop
    points = int(loop.stop.value)
    sizes = {size for part in loop.body for value in _values(part) for size in _divisors(value, loop.var)}
    low = min((size for size in sizes if PANEL <= size < points and points % size == 0), default=None)
    if low is None:
        return loop
    high, column = live_var(f"{loop.var.name}_high", const(points // low)), live_var(loop.var.name, const(low))
    point = high * low + column
    places: dict[Expr, Expr] = {loop.var: point}
    for size in (size for size in sizes if size % low == 0):
        places[point // size] = high // (size // low)
        places[point % size] = high % (size // low) * low + column
    body = tuple(substituted(part, places) for part in loop.body)
    return Loop(high, const(0), const(points // low), (replace(loop, var=column, stop=const(low), body=body),))


def _divisors(value: Expr, var: Var) -> set[int]:
    """The numbers by which index arithmetic in `value` divides what moves with `var`."""
    return {
        int(part.args[1].value)
        for part in walk(value)
        if isinstance(part, Op) and part.name in ("floordiv", "mod") and part.dtype is DType.I64
        if isinstance(part.args[1], Const) and var in variables(part.args[0])
    }


def _values(part: Let | Put | Fold) -> list[Expr]:
    found = [part.value] if isinstance(part, Let | Fold) else [part.value, part.offset, part.guard, part.odd]
    return [value for value in found if value is not None]
