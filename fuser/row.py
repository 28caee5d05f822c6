"""Finds row programs: reductions over the same axes and the pointwise work before, between and after them.

Comes in: a reduction or a pointwise node that no other region took. Goes out: a draft. Several results are possible: a
residual sum that is also needed later is one more result of the normalisation that starts with it.
"""

import onnx_ir as ir

from fuser.cuts import Cuts, data_inputs, is_plumbing, sample, sample_count
from fuser.element import LiftError, shape_of
from fuser.growth import RESULTS, Extent, Frame, Growth, grow
from fuser.lift import cost_of, is_pointwise
from fuser.lower import Draft, result
from fuser.reductions import Rows, axes_of_reduction, is_reduction, translate
from tilecore.contract.expr import Const, Expr, Load, Op, Var, substitute, variables, walk
from tilecore.contract.spec import Result, RowSpec, Step, Tensor

KIND = "row"
BEFORE = 16  # nodes that a row program takes in before its first reduction
HEAVY = 10  # multiplications per element that make one pointwise node worth a kernel
SMALL = 2  # a single number is not worth a kernel
DEAR = frozenset({"exp", "exp2", "log", "log2", "sin", "cos", "tanh", "erf", "sigmoid", "pow", "div", "sqrt", "rsqrt"})
NARROW = 16  # columns that a pointwise program has at least, where the shape has as many


def from_reduction(node: ir.Node, cuts: Cuts) -> Draft:
    """The row program around a reduction. LiftError when it cannot be written as one, or is that reduction alone."""
    source = node.inputs[0]
    if source is None:
        raise LiftError("it has no input")
    rows = Rows(
        cuts.shapes, cuts.opset, shape_of(source, cuts.shapes), axes_of_reduction(node, cuts.shapes, cuts.opset)
    )
    if not rows.axes:
        raise LiftError("it reduces no axis", advice="nothing to do: it only copies, remove it from the model")
    before = _before(node, rows, cuts)
    try:
        return _draft([*before, node], rows, cuts)
    except LiftError:
        if not before:
            raise
    return _draft([node], Rows(cuts.shapes, cuts.opset, rows.shape, rows.axes), cuts)


def from_pointwise(node: ir.Node, cuts: Cuts) -> Draft | None:
    """The row program of a pointwise chain that starts at `node`; None when it is too small to be worth a kernel."""
    shape = shape_of(node.outputs[0], cuts.shapes)
    if sample_count(shape) < SMALL or is_plumbing(node, cuts.shapes) or cuts.is_known(node.outputs[0]):
        return None
    first = len(shape)
    width = 1
    while first > 0 and width < NARROW:
        first -= 1
        width *= max(1, sample(shape[first]))
    return _draft([node], Rows(cuts.shapes, cuts.opset, shape, tuple(range(first, len(shape)))), cuts)


def _before(node: ir.Node, rows: Rows, cuts: Cuts) -> list[ir.Node]:
    """The pointwise nodes that make the reduction's input out of others, in order."""
    found: set[ir.Node] = set()
    queue = data_inputs(node)[:2]
    while queue and len(found) < BEFORE:
        value = queue.pop(0)
        producer = cuts.remains.producer(value)
        if producer is None or producer in found or value in cuts.remains.makers or not is_pointwise(producer):
            continue
        if producer not in cuts.remains.alive or rows.place(value) is None or cuts.is_known(value):
            continue
        found.add(producer)
        queue += data_inputs(producer)
    return sorted(found, key=cuts.remains.position.__getitem__)


def _draft(seeds: list[ir.Node], rows: Rows, cuts: Cuts) -> Draft:
    growth = Growth(cuts, {}, {}, [], frame=Frame(rows.place, lambda node, reader: translate(node, rows, reader)))
    for seed in seeds:
        if not growth.add(seed):
            raise growth.refused[seed]
    extent = grow(growth)
    if not extent.results:
        raise LiftError("nothing reads the result")
    if len(extent.results) > RESULTS:
        raise LiftError(f"it would have {len(extent.results)} results")
    _worth(extent)
    columns = frozenset({rows.column})
    steps, values = _share(rows.steps, [growth.value[out] for out in extent.results], growth, rows)
    results: list[Result] = []
    for out, value in zip(extent.results, values, strict=True):
        stands = frozenset(var for index in growth.where[out] for var in variables(index))  # a layout change may follow
        per_row = not columns & stands and rows.column.extent != Const(1, rows.column.dtype)
        axes = (rows.row,) if per_row else (rows.row, rows.column)
        if per_row and columns & variables(value):
            raise LiftError(f"{out.name!r} has one element per row but depends on the column")
        results.append(result(cuts, out, axes, growth.where[out], value))

    def spec(inputs: tuple[Tensor, ...]) -> RowSpec:
        return RowSpec(inputs, rows.row, rows.column, steps, tuple(results))

    programs = (*(step.value for step in steps), *(r.value for r in results),
                *(i for r in results for i in r.place.index), rows.row, rows.column)  # fmt: skip
    label = " + ".join(node.op_type for node in extent.nodes)
    return Draft(KIND, label, frozenset(extent.nodes), extent.results, programs, spec)


def _worth(extent: Extent) -> None:
    """LiftError for a single light node: a kernel of its own gains nothing."""
    (first, *others) = extent.nodes
    if others:
        return
    if is_reduction(first) and not first.op_type.startswith("Reduce"):
        return
    if cost_of(first) < HEAVY:
        raise LiftError(
            "there is no other work around it to fuse it with", advice="nothing to do: alone it runs as fast as it is"
        )


def _share(
    steps: list[Step], values: list[Expr], growth: Growth, rows: Rows
) -> tuple[tuple[Step, ...], tuple[Expr, ...]]:
    """Drop the steps that no result needs; make a step of what several programs compute per column, if it is dear."""
    kept: list[Step] = []
    needed = {var for value in values for var in variables(value)}
    for step in reversed(steps):
        if step.var in needed:
            kept.insert(0, step)
            needed |= variables(step.value)
    tiles: dict[Expr, Expr] = {}
    columns: set[Var] = {rows.column}
    for candidate in (*growth.value.values(), *(step.value for step in kept)):
        tile = substitute(candidate, tiles)
        if not columns & variables(tile) or not _dear(tile):
            continue
        programs = [step.value for step in kept] + values
        users = [i for i, program in enumerate(programs) if any(part == tile for part in walk(program))]
        if len(users) < 2 or users[0] >= len(kept):
            continue
        var = Var(f"tile{len(kept)}", tile.dtype)
        tiles[tile] = var
        columns.add(var)
        kept = [Step(s.var, s.kind, substitute(s.value, {tile: var})) for s in kept]
        kept.insert(users[0], Step(var, "tile", tile))
        values = [substitute(value, {tile: var}) for value in values]
    return tuple(kept), tuple(values)


def _dear(expr: Expr) -> bool:
    """Whether keeping a row of the value is cheaper than computing it again."""
    parts = list(walk(expr))
    loaded = sum(isinstance(part, Load) for part in parts)
    return loaded > 1 or any(isinstance(part, Op) and part.name in DEAR for part in parts)
