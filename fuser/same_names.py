"""Dims of one name on several inputs of a model: one size, by the standard, and compared when the model runs.

A kernel binds each symbol once and compares every other dim of its own inputs with it. What a region knows of a dim may
come from an input that it does not read (Shape → Range, a mask by position). So where two inputs that share a name both
have a part in a region, some node takes both. Comes in: the regions that are fused. Goes out: the same regions, some
with inputs more. ONNX Runtime itself does not compare such dims.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import onnx_ir as ir

from fuser.element import LiftError, dtype_of, shape_of
from fuser.graph import captured
from fuser.region import Region
from fuser.shapes import Shapes
from tilecore.contract.expr import Sym, symbols, variables
from tilecore.contract.spec import Spec, Tensor, programs_of

MOST_INPUTS = 48  # of a node that compares dims: a kernel may have 64


def compared(
    regions: Sequence[Region], model: ir.Model, shapes: Shapes, accepts: Callable[[Region], bool]
) -> tuple[Region, ...]:
    """The regions, of which some take model inputs more so that dims of one name are compared.

    A region gets inputs only if `accepts` says that it has a kernel with them.
    """
    kept = list(regions)
    inputs = {value: tensor for value in model.graph.inputs if (tensor := _tensor(value, shapes)) is not None}
    origins = _origins(model.graph, inputs)
    for symbol in sorted({dim for value in inputs for dim in shape_of(value, shapes)}, key=str):
        if not isinstance(symbol, Sym):
            continue
        holders = frozenset(value for value in inputs if symbol in shape_of(value, shapes))
        for group in _joined([_parts(region, symbol, holders, origins) for region in kept]):
            own = [region for region in kept if region.nodes[0].graph is model.graph]
            linked = _joined([frozenset(region.inputs) & group for region in own], group)
            _link(kept, own, linked, inputs, accepts)
    return tuple(kept)


def _link(
    kept: list[Region],
    own: Sequence[Region],
    groups: Sequence[frozenset[ir.Value]],
    inputs: dict[ir.Value, Tensor],
    accepts: Callable[[Region], bool],
) -> None:
    """Give regions that always run, as few as can be, an input of each group; those like no other first."""
    missing = list(groups) if len(groups) > 1 else []
    linked: frozenset[ir.Value] = frozenset()
    labels = [region.label for region in own]
    for region in sorted(own, key=lambda region: labels.count(region.label)):
        if not missing:
            return
        has = set(region.inputs)
        extra = [_first(linked)] if linked and not linked & has else []
        absent = [_first(group) for group in missing if not group & has]
        extra += absent[: max(0, MOST_INPUTS - len(has) - len(extra))]
        spec = replace(region.spec, inputs=(*region.spec.inputs, *(inputs[value] for value in extra)))
        new = replace(region, inputs=(*region.inputs, *extra), spec=spec)
        if accepts(new):
            kept[kept.index(region)] = new
            done = [group for group in missing if group & {*has, *extra}]
            linked = linked.union(*done)
            missing = [group for group in missing if group not in done]


def _first(group: frozenset[ir.Value]) -> ir.Value:
    return min(group, key=lambda value: value.name or "")


def _tensor(value: ir.Value, shapes: Shapes) -> Tensor | None:
    """The model input as a region's input; None for one that need not be given, or that no kernel can take."""
    if value.const_value is not None:
        return None
    try:
        return Tensor(value.name or "", dtype_of(value, shapes), shape_of(value, shapes))
    except LiftError:  # a sequence, strings, a shape of unknown rank
        return None


def _origins(graph: ir.Graph, inputs: Iterable[ir.Value]) -> dict[ir.Node, frozenset[ir.Value]]:
    """The model inputs that every node depends on, in its values or its shapes."""
    known: dict[ir.Value, frozenset[ir.Value]] = {value: frozenset((value,)) for value in inputs}
    found: dict[ir.Node, frozenset[ir.Value]] = {}
    nothing: frozenset[ir.Value] = frozenset()
    for node in graph:
        sources = [*(value for value in node.inputs if value is not None), *captured(node)]
        found[node] = nothing.union(*(known.get(value, nothing) for value in sources))
        known.update((out, found[node]) for out in node.outputs)
        for attribute in node.attributes.values():
            if attribute.type is ir.AttributeType.GRAPH:
                found.update((inner, found[node]) for inner in attribute.as_graph().all_nodes())
    return found


def _parts(
    region: Region, symbol: Sym, holders: frozenset[ir.Value], origins: dict[ir.Node, frozenset[ir.Value]]
) -> frozenset[ir.Value]:
    """The inputs with a dim of that name that have a part in the region, if its programs know the dim."""
    if symbol not in _symbols(region.spec):
        return frozenset()
    return holders & frozenset[ir.Value]().union(*(origins[node] for node in region.nodes))


def _symbols(spec: Spec) -> set[Sym]:
    programs = list(programs_of(spec))
    found = {symbol for program in programs for symbol in symbols(program)}
    extents = (axis.extent for program in programs for axis in variables(program))
    return found | {symbol for extent in extents if extent is not None for symbol in symbols(extent)}


def _joined(
    sets: Iterable[frozenset[ir.Value]], single: frozenset[ir.Value] = frozenset()
) -> list[frozenset[ir.Value]]:
    """The sets, those that overlap as one; every value of `single` is one by itself."""
    found: list[frozenset[ir.Value]] = []
    for part in (*(frozenset((value,)) for value in single), *sets):
        touching = [other for other in found if other & part]
        found = [other for other in found if other not in touching]
        joined = part.union(*touching)
        found += [joined] if joined else []
    return found
