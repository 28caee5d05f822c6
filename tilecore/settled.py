"""The points of a vector loop at which its index comparisons are settled, so that no vector needs a mask for them.

Comes in: a vector loop. Goes out: ranges of its points and the loop's body there, with every comparison of the loop's
variable with something that is the same for all points replaced by what it is in the range. Where all of them change
at points that are known, the ranges between these are all there are (rotated halves: two). Else there is one: a causal
score is a plain one up to the diagonal; a window settles both ends. Of the two sides of a comparison it lies on the
one that leaves more to compute: the other one is a constant as a rule, and soon passed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Op, Var, binary, const, loads, substitute, variables, walk
from tilecore.graph import split_affine
from tilecore.loops import Fold, Let, Put, VectorLoop
from tilecore.scratch import substituted

COMPARISONS = ("lt", "le", "gt", "ge")
MOST_RANGES = 3  # each has code of its own


@dataclass(frozen=True, slots=True)
class Settled:
    """`loop` has the body for points `first` (None: 0) to below its `stop`."""

    loop: VectorLoop
    first: Expr | None


def settled(loop: VectorLoop) -> tuple[Settled, ...]:
    """Ranges where no index comparison changes any more, in order; none for a loop without any comparison."""
    tests = _comparisons(loop)
    if not tests:
        return ()
    changes = [_change(test, loop.var) for test in tests]
    if isinstance(loop.stop, Const) and all(isinstance(change, Const) for change in changes):
        end = int(loop.stop.value)
        points = {int(change.value) for change in changes if isinstance(change, Const)}
        points = [0, *sorted(point for point in points if 0 < point < end), end]
        if len(points) <= MOST_RANGES + 1:
            return tuple(_between(loop, tests, *ends) for ends in pairwise(points))
    known: dict[Expr, Expr] = {}
    first: Expr | None = None
    stop = loop.stop
    for test in tests:
        holds = _size(loop, {test: const(True)}) >= _size(loop, {test: const(False)})
        lowest, end = _range(test, loop.var, holds=holds)
        if lowest is not None:
            first = lowest if first is None else binary("max", first, lowest)
        stop = stop if end is None else binary("min", stop, end)
        known[test] = const(holds)
    return (Settled(_with_known(loop, known, stop), first),)


def _between(loop: VectorLoop, tests: list[Op], first: int, stop: int) -> Settled:
    """The body for points from `first` to below `stop`, where no test changes."""
    known: dict[Expr, Expr] = {}
    for test in tests:
        slack = substitute(_slack(test), {loop.var: const(first)})
        assert isinstance(slack, Const)
        known[test] = const(slack.value >= 0)
    return Settled(_with_known(loop, known, const(stop)), const(first) if first else None)


def _with_known(loop: VectorLoop, known: dict[Expr, Expr], stop: Expr) -> VectorLoop:
    body = _kept(substituted(part, known) for part in loop.body)
    return replace(loop, stop=stop, body=tuple(part for part in body if not _never(part)))


def _never(part: Let | Put | Fold) -> bool:
    """Whether it stores nothing."""
    return isinstance(part, Put) and part.guard == const(False, DType.BOOL)


def _comparisons(loop: VectorLoop) -> list[Op]:
    """Comparisons of the variable, ± 1 times, with what the loop does not change."""
    written = {part.memory for part in loop.body if isinstance(part, Put)}
    named = {part.var for part in loop.body if isinstance(part, Let)}
    found: dict[Op, None] = {}
    for node in (node for part in loop.body for value in _values(part) for node in walk(value)):
        if isinstance(node, Op) and node.name in COMPARISONS and node.args[0].dtype is DType.I64:
            factor, rest = split_affine(_slack(node), loop.var)
            if rest is None or factor not in (const(1), const(-1)) or variables(rest) & named:
                continue
            if all(load.source not in written for load in loads(rest)):
                found[node] = None
    return list(found)


def _slack(test: Op) -> Expr:
    """What is at least 0 where `test` holds."""
    left, right = test.args if test.name in ("lt", "le") else test.args[::-1]
    return right - left - (1 if test.name in ("lt", "gt") else 0)


def _change(test: Op, var: Var) -> Expr:
    """The first point at which `test` is not what it was before."""
    lowest, end = _range(test, var, holds=True)
    change = end if lowest is None else lowest
    assert change is not None
    return change


def _range(test: Op, var: Var, *, holds: bool) -> tuple[Expr | None, Expr | None]:
    """(first, end) of the points where `test` is `holds`; None where nothing bounds them."""
    slack = _slack(test) if holds else const(-1) - _slack(test)
    factor, rest = split_affine(slack, var)
    assert rest is not None
    return (None, rest + 1) if factor == const(-1) else (const(0) - rest, None)


def _size(loop: VectorLoop, known: dict[Expr, Expr]) -> int:
    return sum(len(list(walk(substitute(value, known)))) for part in loop.body for value in _values(part))


def _values(part: Let | Put | Fold) -> tuple[Expr, ...]:
    return (part.value, part.guard) if isinstance(part, Put) and part.guard is not None else (part.value,)


def _kept(body: Iterator[Let | Put | Fold]) -> Iterator[Let | Put | Fold]:
    """Without stores of what stands there already."""
    named: dict[Expr, Expr] = {}
    written = set[object]()
    for part in body:
        if isinstance(part, Let):
            named[part.var] = part.value
        elif isinstance(part, Put):
            there = Load(part.memory, (part.offset,))
            plain = part.guard is None and not part.update and part.odd is None
            if plain and part.memory not in written and named.get(part.value, part.value) == there:
                continue
            written.add(part.memory)
        yield part
