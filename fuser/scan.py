"""Finds everything worth fusing in a model: regions, and misses with their reasons.

Comes in: a model and its shapes. Goes out: regions in graph order, those in bodies of If, Loop and Scan last, and
misses. Invariants: a region's nodes are in one graph, no node that a region's outputs come from is computed by another
region, every output of a graph is still made by someone, and a graph with each region as one node has no cycle.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from fuser import attention, contraction, folds, join, recurrence, row
from fuser.cuts import Cuts, is_plumbing
from fuser.dots import Dot, is_dot
from fuser.element import LiftError, stage
from fuser.graph import Remains, bodies
from fuser.lift import is_cumulative, is_pointwise, is_view
from fuser.loops import is_iteration
from fuser.lower import Draft, lower
from fuser.ragged import Tables, packed, tables_of
from fuser.reductions import is_reduction
from fuser.region import Miss, Region, name_of
from fuser.shapes import Shapes
from fuser.softmax import exponentials, sites_of
from fuser.unfused import work_of
from fuser.unrolled import Unrolled, unrolled
from fuser.worth import EVERYTHING, CostModel, misread

STAYS = "nothing to do in the model: ONNX Runtime runs it, and regions end before it"
LEFT_ALONE: dict[tuple[str, str], tuple[str, str, str]] = {
    # operators worth fusing that no finder knows: kind, reason and advice
    ("com.microsoft", "GatherBlockQuantized"): (
        "row",
        "GatherBlockQuantized reads a few rows of a packed table: there is no work to share with a neighbour",
        STAYS,
    ),
    ("com.microsoft", "QLinearSoftmax"): (
        "row",
        "QLinearSoftmax looks exponentials up in a table of rounded integers, which is no softmax of real numbers",
        "keep Softmax in floats between DequantizeLinear and QuantizeLinear",
    ),
    ("", "DynamicQuantizeLinear"): (
        "row",
        "DynamicQuantizeLinear needs the range of its whole input before its first level; regions see single rows",
        "quantise activations with fixed scales (QuantizeLinear, DequantizeLinear)",
    ),
    ("", "TensorScatter"): (
        "row",
        "TensorScatter writes new entries into a cache, and a region would copy the whole cache",
        "nothing to do in the model: bind one buffer to the cache before and after, and ONNX Runtime writes in place",
    ),
    **{
        ("", name): ("row", f"{name} writes a few elements, and a region would copy all the others", STAYS)
        for name in ("ScatterElements", "ScatterND", "Scatter")
    },
    **{
        ("", name): ("row", f"{name} gives places rather than values: it has no translation into a row program", STAYS)
        for name in ("ArgMax", "ArgMin", "TopK", "Hardmax")
    },
}


NEAR = 8  # contractions after one that are looked at as its siblings
ADVICE: dict[str, str] = {  # what would make a region, by the kind that was looked for
    "attention": "express {failed} in operators that read or move single elements (pointwise work, changes of layout)",
    "contraction": "express {failed} as a MatMul, Gemm, two-operand Einsum or Conv of one group, of floats",
    "scan": "write a step as arithmetic, contractions and reductions on states and inputs; {failed} is not",
    "row": "express {failed} as Reduce operators or a normalisation over whole rows, with pointwise work around it",
}


@dataclass(frozen=True, slots=True)
class _Place:
    """A graph to scan: the body it is (see `Region.body`), inputs of its own and of the graphs around it, its facts."""

    body: str
    graph: ir.Graph
    inputs: tuple[ir.Value, ...]
    shapes: Shapes


@dataclass(slots=True)
class _Scan:
    """The state of the scan of one graph."""

    place: _Place
    cuts: Cuts
    dots: dict[ir.Value, Dot]
    cost: CostModel
    tables: Tables | None  # of an unpadded graph
    regions: list[Region] = field(default_factory=list[Region])
    misses: dict[ir.Node, Miss] = field(default_factory=dict[ir.Node, Miss])
    faults: dict[ir.Node, Miss] = field(default_factory=dict[ir.Node, Miss])  # of ours: they stay, whatever is found

    def lowered(self, draft: Draft) -> Region:
        """The region of a draft. LiftError when there is none."""
        return replace(lower(draft, self.cuts, self.place.inputs), body=self.place.body)

    def drafted(self, kind: str, node: ir.Node, find: Callable[[], Draft | None]) -> Draft | None:
        """What `find` drafts. Anything but a LiftError is a fault of ours: a miss says so, and the search goes on."""
        try:
            return find()
        except LiftError:
            raise
        except Exception as error:  # one rule that is wrong must not cost the whole model
            fault = LiftError(f"a fault of TileFuse: {type(error).__name__}: {error}", advice="please report the model")
            self.faults[node] = replace(_miss(kind, node, fault), body=self.place.body)
            raise fault from error

    def attempt(self, kind: str, node: ir.Node, find: Callable[[], Draft | None]) -> None:
        """Take the region that `find` drafts, or note why there is none."""
        try:
            draft = self.drafted(kind, node, find)
            if draft is None:
                return
            with stage(f"{draft.label}: the whole program was found"):
                region = self.lowered(draft)
        except LiftError as error:
            self.miss(kind, node, error)
            return
        try:
            if self.cuts.remains.waits(region):  # a smaller region may do without
                raise LiftError(
                    "as one node it would wait for its own result: what it reads is made of what it computes",
                    advice="nothing to do in the model: smaller regions take its parts",
                )
            self.take(self.judged(region))
        except LiftError as error:
            self.miss(kind, node, error)

    def judged(self, region: Region) -> Region:
        """The region with what it is predicted to cost. LiftError when the cost model declines it."""
        refused = self.cost.refuses(region.spec)
        if refused is not None:
            raise LiftError(refused, advice="nothing to do in the model: it has no kernel of this form yet")
        sizes = self.cost.sizes(region.spec)
        predicted = self.cost.predict(region.spec, work_of(region.nodes, self.cuts.shapes, sizes), sizes)
        if predicted is not None and not self.cost.accepts(predicted) and not misread(region.nodes):
            fused, unfused = (f"{seconds * 1e6:.1f} µs" for seconds in (predicted.fused, predicted.unfused))
            times = predicted.unfused / predicted.fused
            reason = f"predicted {times:.2f}× as fast: {fused} as one kernel, {unfused} as it is"
            raise LiftError(reason, advice="nothing to do in the model; --all forces it")
        return replace(region, predicted=predicted)

    def take(self, region: Region) -> None:
        """Let the region make its outputs from here on."""
        self.regions.append(region)
        self.cuts.remains.take(region)
        self.cuts.forget()
        for taken in region.nodes:  # a contraction may be taken that was missed as attention: that miss stays
            if taken in self.misses and self.misses[taken].kind == region.kind:
                del self.misses[taken]

    def miss(self, kind: str, node: ir.Node, error: LiftError) -> None:
        """Note a miss; the first kind that was tried says most, and a fault more than any."""
        if node in self.faults:
            return
        self.misses.setdefault(node, replace(_miss(kind, node, error), body=self.place.body))


def _miss(kind: str, node: ir.Node, error: LiftError) -> Miss:
    failed = "" if error.node is None else f"{error.node.op_type} {name_of(error.node)}"
    return Miss(
        kind,
        name_of(node),
        str(error),
        op=node.op_type,
        reached="; ".join(error.reached) or f"the anchor, {node.op_type}",
        failed=failed,
        advice=error.advice or ADVICE[kind].format(failed=failed or f"{node.op_type} {name_of(node)}"),
    )


def scan(model: ir.Model, shapes: Shapes, cost: CostModel = EVERYTHING) -> tuple[tuple[Region, ...], tuple[Miss, ...]]:
    """All regions of the model's graph and of the bodies in it, in graph order, and what was left alone."""
    opset = model.graph.opset_imports.get("", 1)
    regions: list[Region] = []
    misses: list[Miss] = []
    places = [_Place("", model.graph, tuple(model.graph.inputs), shapes)]
    for place in places:  # grows by the bodies of what is left of each
        state = _scan(place, opset, cost, None if place.body else tables_of(model, shapes))
        found = _acyclic(state)
        fused = {node for region in found if region.kind == attention.KIND for node in region.nodes}
        regions += found
        misses += [miss for node, miss in state.misses.items() if node not in fused]
        misses += state.faults.values()
        for node in state.cuts.remains.nodes:
            for name, inner in bodies(node) if _free(state, node) else ():
                body = f"{place.body}/{name_of(node).lstrip('/')}.{name}"
                places.append(_Place(body, inner, (*inner.inputs, *place.inputs), place.shapes.inside(inner)))
    return tuple(regions), tuple(misses)


def _scan(place: _Place, opset: int, cost: CostModel, tables: Tables | None) -> _Scan:
    """The scan of one graph."""
    shapes = place.shapes
    remains = Remains(place.graph, lambda node: is_plumbing(node, shapes))
    cuts = Cuts(shapes, opset, remains, sites_of(place.graph, shapes, opset), exponentials(place.graph))
    dots, refused = attention.dots_of(remains.nodes, cuts)
    state = _Scan(place, cuts, dots, cost, tables)
    for node, error in refused.items():
        state.miss("contraction", node, error)
    for node in remains.nodes:
        domain = "" if node.domain == "ai.onnx" else node.domain
        if (domain, node.op_type) in LEFT_ALONE and not is_plumbing(node, shapes):
            kind, reason, advice = LEFT_ALONE[domain, node.op_type]
            state.miss(kind, node, LiftError(reason, node=node, advice=advice))
    for found in unrolled(remains.nodes, shapes):
        state.miss("scan", found.last, _written_out(found))
    # the deepest structure first
    for finder in (_attentions, _recurrences, _contractions, _reductions, _joins, _pointwise):
        finder(state)
    return state


def _written_out(found: Unrolled) -> LiftError:
    """Why a recurrence that an exporter unrolled is no scan region."""
    return LiftError(
        f"its {found.count} steps of {', '.join(found.operators)} were written out one by one",
        node=found.last,
        advice="export the loop over time as a Scan or Loop; as it is, the model runs for the length of its trace only",
    )


def _acyclic(state: _Scan) -> tuple[Region, ...]:
    """The regions in graph order, without those that would wait for each other."""
    order = state.cuts.remains.position
    regions = sorted(state.regions, key=lambda region: order[region.nodes[-1]])
    while circular := state.cuts.remains.circular(regions):
        widest = max(circular, key=lambda region: order[region.nodes[-1]] - order[region.nodes[0]])
        regions.remove(widest)
        state.miss(widest.kind, widest.nodes[-1], LiftError("as one node it would wait for its own result"))
    return tuple(regions)


def _attentions(state: _Scan) -> None:
    for dot in list(state.dots.values()):
        if dot.node in state.cuts.remains.alive:
            why = "" if state.tables is None else _without_padding(state, dot, state.tables)
            if why is not None:
                state.attempt(attention.KIND, dot.node, lambda dot=dot, why=why: _padded(state, dot, why))


def _padded(state: _Scan, dot: Dot, why: str) -> Draft | None:
    """Attention over padded tensors; `why`, if any, it is not over the tokens alone."""
    draft = attention.find(dot, state.dots, state.cuts)
    return replace(draft, label=f"{draft.label}, padded: {why}") if draft is not None and why else draft


def _without_padding(state: _Scan, dot: Dot, tables: Tables) -> str | None:
    """Take the attention that ends in `dot` over tokens alone. None when that is done, else why it is not."""
    try:
        draft = state.drafted(attention.KIND, dot.node, lambda: attention.find(dot, state.dots, state.cuts))
        region = None if draft is None else state.judged(state.lowered(packed(draft, tables, state.cuts)))
        if region is not None and state.cuts.remains.waits(region):
            raise LiftError("as one node it would wait for its own result")
    except LiftError as error:
        return str(error)
    if region is None:
        return ""
    state.take(region)
    return None


def _recurrences(state: _Scan) -> None:
    for node in state.cuts.remains.nodes:
        if is_iteration(node) and _free(state, node):
            state.attempt(recurrence.KIND, node, lambda node=node: recurrence.from_iteration(node, state.cuts))
    for node in state.cuts.remains.nodes:
        if is_cumulative(node) and _free(state, node) and not is_plumbing(node, state.cuts.shapes):
            state.attempt(recurrence.KIND, node, lambda node=node: folds.from_sum(node, state.cuts))
    for node in state.cuts.remains.nodes:
        if is_dot(node) and _free(state, node):
            try:
                draft = state.drafted(recurrence.KIND, node, lambda node=node: folds.from_sum(node, state.cuts))
            except LiftError:  # then it is a contraction of its own
                continue
            state.attempt(recurrence.KIND, node, lambda draft=draft: draft)


def _free(state: _Scan, node: ir.Node) -> bool:
    """Whether the node is still computed by itself."""
    remains = state.cuts.remains
    return node in remains.alive and not any(value in remains.makers for value in node.outputs)


def _contractions(state: _Scan) -> None:
    """Siblings first: contractions of one left operand, as many as one region may hold, from each one on."""
    families: dict[ir.Value, list[Dot]] = {}
    for dot in state.dots.values():
        families.setdefault(contraction.origin_of(dot, state.cuts), []).append(dot)
    for dot in state.dots.values():
        if not _free(state, dot.node):
            continue
        family = families[contraction.origin_of(dot, state.cuts)]
        later = [other for other in family[family.index(dot) + 1 :] if _free(state, other.node)][:NEAR]
        joint = [lambda dot=dot: contraction.draft_of_slices(dot, state.cuts), *_siblings(state, dot, later)]
        if not any(_merge(state, dot.node, find) for find in joint):
            state.attempt(contraction.KIND, dot.node, lambda dot=dot: contraction.draft_alone(dot, state.cuts))


def _siblings(state: _Scan, dot: Dot, later: list[Dot]) -> list[Callable[[], Draft | None]]:
    """`dot` with those of `later` that make one region with it, as many as one region may hold first."""
    family = contraction.siblings_of(dot, later, state.cuts) if later else []
    counts = range(min(len(family), contraction.SIBLINGS), 1, -1)
    return [lambda count=count: contraction.draft_of(family[:count], state.cuts) for count in counts]


def _merge(state: _Scan, node: ir.Node, find: Callable[[], Draft | None]) -> bool:
    """Take the region of several products that `find` drafts, if the cost model says that it pays."""
    try:
        draft = state.drafted(contraction.KIND, node, find)
        region = None if draft is None else state.judged(state.lowered(draft))
    except LiftError:  # then each is a region of its own, and says why where it is not
        return False
    if region is None or state.cuts.remains.waits(region) or not state.cost.merges(region.spec):
        return False
    state.take(region)
    return True


def _reductions(state: _Scan) -> None:
    for node in state.cuts.remains.nodes:
        if is_reduction(node) and _free(state, node) and not is_plumbing(node, state.cuts.shapes):
            state.attempt(row.KIND, node, lambda node=node: row.from_reduction(node, state.cuts))


def _joins(state: _Scan) -> None:
    """Groups from their last node backwards, so that each is as large as can be; those of one reader together."""
    for node in reversed(state.cuts.remains.nodes):
        if not (is_pointwise(node) or is_view(node)) or not _free(state, node) or is_plumbing(node, state.cuts.shapes):
            continue
        peers = join.peers_of(node, state.cuts)
        for ends in ((node, *peers), (node,)) if peers else ((node,),):
            try:
                draft = state.drafted(row.KIND, node, lambda ends=ends: join.draft_of(ends, state.cuts))
                if draft is None or (len(ends) > 1 and _apart(state, draft)):
                    continue
            except LiftError:  # its parts may still be programs of their own
                continue
            state.attempt(row.KIND, node, lambda draft=draft: draft)
            break


def _apart(state: _Scan, draft: Draft) -> bool:
    """Whether one result of the draft is made from another, so that they cannot come from one node."""
    makers = {node for out in draft.outputs if (node := out.producer()) is not None}
    return state.cuts.remains.reaches(state.lowered(draft).inputs, makers)


def _pointwise(state: _Scan) -> None:
    for node in state.cuts.remains.nodes:
        if is_pointwise(node) and _free(state, node) and not is_dot(node):
            try:
                draft = state.drafted(row.KIND, node, lambda node=node: row.from_pointwise(node, state.cuts))
            except LiftError:  # single pointwise nodes are not worth a word
                continue
            state.attempt(row.KIND, node, lambda draft=draft: draft)
