"""Races of a `Parallel`: its points run in any order, so no two may write one element, nor one read another's.

Comes in: a `Parallel`. Goes out: nothing, or a TileError at the store or load at fault. What cannot be proved apart is
refused: a store must reach a different element at every point, by indices linear in the axes, or at places that data
choose, which are the author's, unless what stands there is read.
"""

import itertools
import math

from tilecore.contract.expr import (
    Const,
    Expr,
    Op,
    Sym,
    Var,
    from_polynomial,
    loads,
    nonnegative,
    polynomial,
    substitute,
    variables,
)
from tilecore.errors import TileError
from tilecore.ir import Parallel, Store, expressions
from tilecore.span import Span

Index = tuple[Expr, ...]


def check_parallel(parallel: Parallel) -> None:
    """Raise TileError unless the points of `parallel` are independent of each other."""
    for store in parallel.body:
        missing = [] if store.update else _uncovered(store.index, parallel.axes)
        chosen = _chosen_by_data(store.index)
        if missing and (not set(missing) <= chosen or _reads(parallel, store.target)):
            raise TileError(_shared(store, missing), store.span, instead=_advice(store, missing, chosen))
    for first, second in itertools.combinations(parallel.body, 2):
        both = bool(first.update) and first.update == second.update
        if first.target == second.target and not both and not _apart(first.index, second.index, parallel.axes):
            raise TileError(
                f"{_element(second)} may be written by another point as {_element(first)}",
                second.span,
                instead="two T.Parallel loops, one after the other",
            )
    for store in parallel.body:
        for load in (load for expr in expressions(store) for load in loads(expr)):
            for other in parallel.body:
                if load.source == other.target and not _apart(load.index, other.index, parallel.axes):
                    raise TileError(
                        f"{load} is read here and may be written by another point as {_element(other)}",
                        load.span if isinstance(load.span, Span) else store.span,
                        instead="write another tile, or T.copy this one first and read the copy",
                    )


def _shared(store: Store, missing: list[Var]) -> str:
    names = ", ".join(axis.name for axis in missing)
    known = not any(axis in variables(entry) for axis in missing for entry in store.index)
    how = f"is written by every point of {names}" if known else f"is not proved to be written by one point of {names}"
    return f"{_element(store)} {how}: the points of T.Parallel must write different elements"


def _advice(store: Store, missing: list[Var], chosen: set[Var]) -> str:
    if set(missing) <= chosen:
        return "T.atomic_add, T.atomic_max or T.atomic_min, or T.serial, where data may choose one element twice"
    return (
        "T.reduce_sum, T.reduce_max or T.reduce_min over a tile for a sum, maximum or minimum; "
        "otherwise index it by every axis, or drop the axis from T.Parallel"
    )


def _chosen_by_data(index: Index) -> set[Var]:
    """Axes that what is loaded for `index` depends on."""
    inner = [entry for part in index for load in loads(part) for entry in load.index]
    return {var for entry in inner for var in variables(entry)}


def _reads(parallel: Parallel, target: object) -> bool:
    return any(load.source == target for store in parallel.body for expr in expressions(store) for load in loads(expr))


def _element(store: Store) -> str:
    return f"{store.target.name}[{', '.join(map(str, store.index))}]"


def _uncovered(index: Index, axes: tuple[Var, ...]) -> list[Var]:
    """Axes that `index` does not tell apart: different points of them may share an element."""
    left = [axis for axis in axes if axis.extent != Const(1, axis.dtype)]
    joined = [  # x // n and x % n together are x
        quotient * entry.args[1] + entry
        for entry in index
        if isinstance(entry, Op) and entry.name == "mod"
        for quotient in index
        if quotient is not entry
    ]
    progress = True
    while progress:
        progress = False
        for entry in (*index, *joined):
            free = [axis for axis in left if axis in variables(entry)]
            if free and _separates(entry, free):
                left = [axis for axis in left if axis not in free]
                progress = True
    return left


def _separates(entry: Expr, axes: list[Var]) -> bool:
    """Whether `entry` takes a different value for every combination of `axes`, all else equal."""
    factors = {axis: _factor(entry, axis) for axis in axes}
    if any(factor is None for factor in factors.values()):
        return False
    if len(axes) == 1:
        return True
    for order in itertools.permutations(axes):
        reach: Expr = Const(0, entry.dtype)
        for axis in order:  # digits of a mixed radix number, lowest first
            factor = factors[axis]
            if factor is None or axis.extent is None or not nonnegative(factor - reach - 1):
                break
            reach = reach + factor * (axis.extent - 1)
        else:
            return True
    return False


def _factor(entry: Expr, axis: Var) -> Expr | None:
    """The factor of `axis` in `entry` when it is linear in it with a factor of symbols that is never 0, else None."""
    terms = {
        term: amount for term, amount in polynomial(entry).items() if any(axis in variables(atom) for atom in term)
    }
    rests: dict[tuple[Expr, ...], int] = {}
    for term, amount in terms.items():
        rest = list(term)
        if axis not in rest:
            return None
        rest.remove(axis)
        if not all(isinstance(atom, Sym) for atom in rest):
            return None
        rests[tuple(rest)] = amount
    factor = from_polynomial(rests)
    return factor if nonnegative(factor - 1) or nonnegative(-factor - 1) else None


def tasks_meet(index: Index, task: Var, points: tuple[Var, ...]) -> bool:
    """Whether tasks `task` and `task` + 1 are proved to write one element, `points` being what each walks through.

    They do where the index is the same for both, or where a step along one of `points`, which appears in the same entry
    only, is as long as the step from one task to the next.
    """
    if task.extent in (Const(0, task.dtype), Const(1, task.dtype)):
        return False
    moved = [entry for entry in index if task in variables(entry)]
    numbers: list[dict[Expr, Expr]] = [{task: Const(number, task.dtype)} for number in (0, 1)]
    if all(substitute(entry, numbers[0]) == substitute(entry, numbers[1]) for entry in moved):
        return True
    stride = _factor(moved[0], task) if len(moved) == 1 else None
    if stride is None:
        return False
    for point in points:
        step = _factor(moved[0], point) if sum(point in variables(entry) for entry in index) == 1 else None
        if isinstance(step, Const) and isinstance(stride, Const) and isinstance(point.extent, Const):
            steps, rest = divmod(int(stride.value), int(step.value))
            if rest == 0 and 0 < abs(steps) < point.extent.value:
                return True
    return False


def _apart(first: Index, second: Index, axes: tuple[Var, ...]) -> bool:
    """Whether two points can meet only where they are one point: equal indices, or indices that never meet."""
    if first == second:
        return True
    fresh: dict[Expr, Expr] = {axis: Var(f"{axis.name}'", axis.dtype, axis.extent) for axis in axes}
    for left, entry in zip(first, second, strict=True):
        right = substitute(entry, fresh)
        if nonnegative(left - right - 1) or nonnegative(right - left - 1):
            return True
        gap = polynomial(left - right)
        offset = gap.pop((), 0)
        divisor = math.gcd(*gap.values())
        if divisor and offset % divisor:
            return True
    return False
