"""What was assumed of dims is checked by fused nodes: which of them have to, and how a region comes to check.

Comes in: the regions that are fused, and what was assumed of their graphs. Goes out: the same regions, some of them
with checks. A kernel refuses a call that breaks one of its spec's `requires`, so that an assumption holds for all nodes
of a graph once one node that always runs there checks it. Invariant: a region stays only if that is so.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from fuser.element import dtype_of, shape_of
from fuser.region import Region
from fuser.shapes import Shapes
from tilecore.contract.expr import Expr, Sym, symbols
from tilecore.contract.spec import Tensor


@dataclass(frozen=True, slots=True)
class Assumption:
    """`bound` ≥ 0 was assumed of `graph`: the model's own, or a branch of an If."""

    graph: ir.Graph
    bound: Expr


def assumptions_of(model: ir.Model, shapes: Shapes) -> tuple[Assumption, ...]:
    """Everything that was assumed; of branches what their outer graphs do not assume."""
    main = tuple(Assumption(model.graph, bound) for bound in shapes.facts.assumed)
    inner = (
        Assumption(graph, bound)
        for graph, facts in shapes.branches.items()
        for bound in facts.assumed
        if bound not in shapes.facts.assumed
    )
    return (*main, *inner)


def checked(
    regions: Sequence[Region],
    assumptions: Iterable[Assumption],
    shapes: Shapes,
    inputs: Sequence[ir.Value],
    accepts: Callable[[Region], bool],
) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
    """The regions with checks, and those that nothing can check. `inputs` are those of the model.

    A region gets a check only if `accepts` says that it has a kernel with it.
    """
    kept, lost = list(regions), list[Region]()
    for assumption in assumptions:
        for group in _unchecked(assumption, kept):
            candidates = ((region, _checking(region, assumption.bound, inputs, shapes)) for region in group)
            found = next(((old, new) for old, new in candidates if new is not None and accepts(new)), None)
            if found is None:
                lost += group
                kept = [region for region in kept if region not in group]
            else:
                kept[kept.index(found[0])] = found[1]
    return tuple(kept), tuple(lost)


def _unchecked(assumption: Assumption, regions: Sequence[Region]) -> tuple[tuple[Region, ...], ...]:
    """Groups of which one region each must check the assumption, and none does yet; the best one for that first.

    Regions of the graph itself always run, so that one is enough; of those in bodies of its nodes, each must check. A
    region like no other is better than one of many, which share a kernel.
    """
    own = [region for region in regions if region.nodes[0].graph is assumption.graph]
    bodies = set(assumption.graph.subgraphs()) - {assumption.graph}
    inside = [region for region in regions if region.nodes[0].graph in bodies]
    if any(assumption.bound in region.spec.requires for region in own):
        return ()
    users = Counter(region.label for region in own)
    group = sorted(own, key=lambda region: users[region.label])
    alone = tuple((region,) for region in inside if assumption.bound not in region.spec.requires)
    return (tuple(group),) if group else alone


def _checking(region: Region, bound: Expr, inputs: Sequence[ir.Value], shapes: Shapes) -> Region | None:
    """The region with model inputs that have the dims of `bound`, which it then checks; None if no input has one."""
    known = {dim for tensor in region.spec.inputs for dim in tensor.shape if isinstance(dim, Sym)}
    extra: list[ir.Value] = []
    for symbol in sorted(symbols(bound), key=lambda symbol: symbol.name):
        if symbol in known:
            continue
        source = next((value for value in inputs if symbol in (shapes.shape(value) or ())), None)
        if source is None:
            return None
        extra.append(source)
        known |= {dim for dim in shape_of(source, shapes) if isinstance(dim, Sym)}
    tensors = tuple(Tensor(v.name or "", dtype_of(v, shapes), shape_of(v, shapes)) for v in extra)
    requires = tuple(dict.fromkeys((*region.spec.requires, bound)))
    spec = replace(region.spec, inputs=(*region.spec.inputs, *tensors), requires=requires)
    return replace(region, inputs=(*region.inputs, *extra), spec=spec)
