"""The points of a vector loop at which its index comparisons are settled, so that no vector needs a mask for them.

Comes in: a vector loop. Goes out: a range of its points and the loop's body there, with every comparison of the loop's
variable with something that is the same for all points replaced by what it is in the range. A causal score is a plain
one up to the diagonal; a window settles both ends. Of the two sides of a comparison the range lies on the one that
leaves more to compute: the other one is a constant as a rule, and soon passed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Op, Var, binary, const, loads, substitute, variables, walk
from tilecore.graph import split_affine
from tilecore.loops import Fold, Let, Put, VectorLoop
from tilecore.scratch import substituted

COMPARISONS = ("lt", "le", "gt", "ge")


@dataclass(frozen=True, slots=True)
class Settled:
    """`loop` has the body for points `first` (None: 0) to below its `stop`."""

    loop: VectorLoop
    first: Expr | None


def settled(loop: VectorLoop) -> Settled | None:
    """The range where no index comparison changes any more; None for a loop without any."""
    known: dict[Expr, Expr] = {}
    first: Expr | None = None
    stop = loop.stop
    for test in _comparisons(loop):
        holds = _size(loop, {test: const(True)}) >= _size(loop, {test: const(False)})
        lowest, end = _range(test, loop.var, holds=holds)
        if lowest is not None:
            first = lowest if first is None else binary("max", first, lowest)
        stop = stop if end is None else binary("min", stop, end)
        known[test] = const(holds)
    if not known:
        return None
    return Settled(replace(loop, stop=stop, body=tuple(_kept(substituted(part, known) for part in loop.body))), first)


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
