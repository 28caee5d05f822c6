"""Finds recurrences over a time axis: a Scan or Loop whose body is arithmetic on states, sums and inputs.

Comes in: a node. Goes out: a draft of the region with what follows the node's results, or a refusal that says what in
the body stands in the way.
"""

import onnx_ir as ir

from fuser.cuts import Cuts
from fuser.element import LiftError
from fuser.equations import Equations, Frame, Stored
from fuser.growth import Growth, grow
from fuser.loops import recurrence_of
from fuser.lower import Draft, result
from tilecore.contract.expr import Const, Expr
from tilecore.contract.spec import Cell, ScanSpec, Tensor

KIND = "scan"
LARGEST = 1 << 16  # elements that a group carries or sums in one cell


def from_iteration(node: ir.Node, cuts: Cuts) -> Draft:
    """The region of a Scan or Loop. LiftError when its body is no recurrence."""
    equations, made = recurrence_of(node, cuts)
    where = {value: index for value, (index, _) in made.items()}
    value = {out: expr for out, (_, expr) in made.items()}
    growth = Growth(cuts, where, value, [node])
    extent = grow(growth)
    if not extent.results:
        raise LiftError("nothing reads the result")
    return draft_of(equations, growth, extent.results, frozenset(extent.nodes), cuts)


def draft_of(
    equations: Equations, growth: Growth, outputs: tuple[ir.Value, ...], nodes: frozenset[ir.Node], cuts: Cuts
) -> Draft:
    """The draft that gives out `outputs`, of which `growth` knows the elements."""
    equations.results = [Stored(growth.where[out], growth.value[out]) for out in outputs]
    programs: tuple[Expr, ...] = tuple(equations.expressions())
    frame = Frame(equations)
    split = frame.equations
    states, totals, reads = frame.states(), frame.totals(split.totals), frame.totals(split.reads)
    for part in (*states, *totals, *reads):
        _check_size(part.cell)
    results = tuple(
        result(cuts, out, frame.axes_of(stored), tuple(map(frame, stored.where)), frame(stored.value))
        for out, stored in zip(outputs, split.results, strict=True)
    )

    def spec(inputs: tuple[Tensor, ...]) -> ScanSpec:
        return ScanSpec(inputs, frame.group, split.time, frame.column, states, totals, frame.query, reads, results)

    label = f"{KIND} of {len(states)} state{'s' if len(states) > 1 else ''}"
    return Draft(KIND, label, nodes, outputs, programs, spec)


def _check_size(cell: Cell) -> None:
    """LiftError unless a group's part of the cell is of a known size that fits the caches."""
    count = 1
    for dim in cell.shape[1:]:
        if not isinstance(dim, Const):
            raise LiftError(f"one group of it carries or sums {dim} elements side by side, which has to be a number")
        count *= int(dim.value)
    if count > LARGEST:
        raise LiftError(f"one group of it carries or sums {count} elements; at most {LARGEST} are kept in a kernel")
