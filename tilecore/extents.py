"""Extents that a kernel of one's own leaves open (`T.auto`): tried one after the other, and chosen by what they keep.

Comes in: a function, the extents that were given, a machine. Goes out: the rest, and why. A candidate has to trace, its
tiles have to fit in half of the second cache, and there should be a task for every core; of those that do, the one with
the most multiply-adds per element that it copies wins, or the most elements per task where there is no product, and the
smaller of two alike. Nothing is measured: `tilecore.autotune` does that.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from tilecore.contract.evaluate import Evaluator
from tilecore.contract.expr import Expr, Sym, walk
from tilecore.contract.spec import View, extent_of
from tilecore.errors import TileError
from tilecore.ir import Copy, Gemm, Parallel, Program, statements
from tilecore.profile import HardwareProfile
from tilecore.trace import AUTO, trace_all
from tilecore.tracer import Eager

CANDIDATES = (16, 32, 64, 128)
NOMINAL = 512  # of a dim that is known at run time only


@dataclass(frozen=True, slots=True)
class _Scored:
    """A candidate: whether every core has a task, what it keeps, its elements, and the extents."""

    busy: bool
    reuse: float
    elements: int
    extents: Mapping[str, int]


def open_extents(function: Callable[..., Any]) -> tuple[str, ...]:
    """Parameters that are `T.auto`."""
    return tuple(name for name, p in inspect.signature(function).parameters.items() if p.default is AUTO)


def complete_extents(
    function: Callable[..., Any],
    given: Mapping[str, int],
    profile: HardwareProfile,
    *,
    operands: Mapping[str, Any],
    solved: Mapping[str, int] | None = None,
) -> tuple[dict[str, int], str]:
    """(every extent that is not an operand, why). TileError when no candidate traces or fits, with the last reason.

    `solved` are extents that `T.const` names, of a function that declares its tensors.
    """
    missing = _missing(function, {*given, *operands})
    if not missing:
        return dict(given), "given"
    found = _ranked(function, given, profile, operands, solved)
    best = found[0]
    chosen = ", ".join(f"{name} = {best.extents[name]}" for name in missing)
    why = f"{chosen}: of {len(found)} candidates that fit, {best.reuse:.1f} per element copied, the most"
    return dict(best.extents), why


def rank_extents(function: Callable[..., Any], profile: HardwareProfile) -> list[Mapping[str, int]]:
    """Every candidate for the extents that are open, best first. TileError when none traces or fits."""
    return [one.extents for one in _ranked(function, {}, profile, {}, None)]


def _missing(function: Callable[..., Any], given: Collection[str]) -> list[str]:
    return [name for name in open_extents(function) if name not in given]


def _ranked(
    function: Callable[..., Any],
    given: Mapping[str, int],
    profile: HardwareProfile,
    operands: Mapping[str, Any],
    solved: Mapping[str, int] | None,
) -> list[_Scored]:
    missing = _missing(function, {*given, *operands})
    found: list[_Scored] = []
    refused: TileError | None = None
    for sizes in product(CANDIDATES, repeat=len(missing)):
        extents = {**given, **dict(zip(missing, sizes, strict=True))}
        try:
            eager = None if solved is None else Eager(solved)
            programs = trace_all(function, operands=operands, extents=extents, eager=eager).programs
            found.append(_scored(programs, extents, profile))
        except TileError as error:
            refused = error
    if not found:
        assert refused is not None
        raise refused
    return sorted(found, key=lambda one: (not one.busy, -one.reuse, one.elements))


def _scored(programs: tuple[Program, ...], extents: Mapping[str, int], profile: HardwareProfile) -> _Scored:
    work = copied = elements = 0
    busy = True
    for program in programs:
        at = _Sizes(program)
        held = sum(at.product(buffer.shape) * buffer.dtype.row.bytes for buffer in program.buffers)
        if held > profile.l2 // 2:
            raise TileError(f"tiles of {held} bytes, where half of the second cache is {profile.l2 // 2}", program.span)
        busy = busy and at.product(tuple(extent_of(axis) for axis in program.grid)) >= profile.cores
        elements += sum(at.product(buffer.shape) for buffer in program.buffers)
        for stmt in statements(program.body):
            match stmt:
                case Gemm():
                    work += at.product((*stmt.c.shape, stmt.a.shape[0 if stmt.transpose_a else 1]))
                case Copy() if isinstance(stmt.src.source, View):
                    copied += at.product(stmt.dst.shape)
                case Parallel() if not any(isinstance(other, Gemm) for other in statements(program.body)):
                    work += at.product(tuple(extent_of(axis) for axis in stmt.axes))
                case _:
                    pass
    return _Scored(busy, work / max(copied, 1) if copied else float(work), elements, extents)


class _Sizes:
    """Extents as numbers, dims of arrays taken as `NOMINAL`."""

    def __init__(self, program: Program) -> None:
        dims = [dim for tensor in (*program.inputs, *program.outputs) for dim in tensor.shape]
        symbols = {node.name: NOMINAL for dim in dims for node in walk(dim) if isinstance(node, Sym)}
        self.run = Evaluator({}, symbols)

    def product(self, shape: tuple[Expr, ...]) -> int:
        total = 1
        for extent in shape:
            total *= int(self.run(extent))
        return total
