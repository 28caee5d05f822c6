"""Finds row programs: reductions over the same axes and the pointwise work before, between and after them.

Comes in: a reduction or a pointwise node that no other region took. Goes out: a draft. Several results are possible: a
residual sum that is also needed later is one more result of the normalisation that starts with it.
"""

import onnx_ir as ir

from fuser.cuts import Cuts, data_inputs, is_plumbing, sample, sample_count
from fuser.element import LiftError, shape_of
from fuser.frame import Rows
from fuser.growth import RESULTS, Extent, Frame, Growth, grow
from fuser.lift import cost_of, is_pointwise
from fuser.lift_views import backward_index
from fuser.lower import Draft, result
from fuser.reductions import axes_of_reduction, is_reduction, translate
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
    shape, axes = shape_of(source, cuts.shapes), axes_of_reduction(node, cuts.shapes, cuts.opset)
    rows = Rows.over(shape, axes, shapes=cuts.shapes, opset=cuts.opset)
    if not axes:
        raise LiftError("it reduces no axis", advice="nothing to do: it only copies, remove it from the model")
    before = _before(node, rows, cuts)
    try:
        return _draft([*before, node], rows, cuts)
    except LiftError:
        if not before:
            raise
    return _draft([node], Rows.over(shape, axes, shapes=cuts.shapes, opset=cuts.opset), cuts)


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
    return _draft([node], Rows.over(shape, tuple(range(first, len(shape))), shapes=cuts.shapes, opset=cuts.opset), cuts)


def _before(node: ir.Node, rows: Rows, cuts: Cuts) -> list[ir.Node]:
    """The nodes that make the reduction's inputs out of others, in order."""
    found: set[ir.Node] = set()
    source = node.inputs[0]
    if source is not None and rows.known.setdefault(source, rows.full):
        _follow(source, rows, cuts, found)
    for value in data_inputs(node)[1:2]:
        _follow(value, rows, cuts, found)
    return _ordered(found, cuts)


def _behind(node: ir.Node, rows: Rows, growth: Growth) -> list[ir.Node]:
    """What else makes the inputs of a node that reads a value inside, in order; empty where that is no gain.

    It is one if nothing else needs these nodes, and they reduce the same rows or load nothing that is not loaded yet.
    """
    found: set[ir.Node] = set()
    out = node.outputs[0]
    shape = growth.cuts.shapes.shape(out)
    for value in data_inputs(node):
        if value in growth.where and growth.cuts.shapes.shape(value) == shape:
            rows.known.setdefault(out, growth.where[value])
    for value in data_inputs(node) if is_pointwise(node) else ():
        if value not in growth.where:
            if out in rows.known and growth.cuts.shapes.shape(value) == shape:
                rows.known.setdefault(value, rows.known[out])
            _follow(value, rows, growth.cuts, found, inside=growth, reductions=True)
    inside = {node, *found, *growth.nodes}
    remains = growth.cuts.remains
    if not found or any(remains.users_of(made) - inside for part in found for made in part.outputs):
        return []
    if not any(is_reduction(part) for part in found):
        made = {value for part in found for value in part.outputs}
        sources = {value for part in found for value in data_inputs(part)} - made - growth.where.keys()
        read = frozenset[ir.Value]().union(*(growth.cuts.plan(value, "side").leaves for value in sources))
        if not read <= growth.loaded():
            return []
    return _ordered(found, growth.cuts)


def _follow(
    value: ir.Value,
    rows: Rows,
    cuts: Cuts,
    found: set[ir.Node],
    *,
    inside: Growth | None = None,
    reductions: bool = False,
) -> None:
    """Collect the pointwise nodes and layout changes of whole rows that make `value`, and note where they stand."""
    queue = [value]
    while queue and len(found) < BEFORE:
        current = queue.pop(0)
        node = cuts.remains.producer(current)
        place = rows.place(current)
        if node is None or node in found or place is None or not _is_free(node, cuts) or cuts.is_known(current):
            continue
        if inside is not None and current in inside.where:
            continue
        if is_pointwise(node):
            shape = cuts.shapes.shape(current)
            sources = data_inputs(node)
            rows.known.update((s, place) for s in sources if s not in rows.known and cuts.shapes.shape(s) == shape)
        elif reductions and is_reduction(node) and len(node.outputs) == 1:
            sources = data_inputs(node)[:1]
        else:
            back = backward_index(node, place, cuts.shapes)
            sources = data_inputs(node) if back is not None and _is_made(node.inputs[0], cuts) else []
            rows.known.update((s, back) for s in sources if back is not None and s not in rows.known)
        if sources:
            found.add(node)
            queue += sources


def _is_free(node: ir.Node, cuts: Cuts) -> bool:
    """Whether the node is still computed by itself."""
    return node in cuts.remains.alive and not any(value in cuts.remains.makers for value in node.outputs)


def _is_made(value: ir.Value | None, cuts: Cuts) -> bool:
    """Whether pointwise work makes the value."""
    node = None if value is None else cuts.remains.producer(value)
    return node is not None and is_pointwise(node) and _is_free(node, cuts)


def _ordered(nodes: set[ir.Node], cuts: Cuts) -> list[ir.Node]:
    return sorted(nodes, key=cuts.remains.position.__getitem__)


def _frame(rows: Rows) -> Frame:
    return Frame(
        rows.place,
        lambda node, where, reader: translate(node, rows, where, reader),
        lambda node, growth: _behind(node, rows, growth),
    )


def _draft(seeds: list[ir.Node], rows: Rows, cuts: Cuts) -> Draft:
    growth = Growth(cuts, {}, {}, [], frame=_frame(rows))
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
