"""Finds pointwise work whose pieces are put together again: rotated halves, a cache with new entries appended.

Comes in: a node that nothing has taken, the last of such a group. Goes out: the draft of one row program without
reductions, or None. The forward search of `row` ends at a Concat, because each of its parts is another element; here
the element of the result is written backwards, so that every part is computed where it is stored.
"""

from collections.abc import Sequence

import onnx_ir as ir

from fuser.cuts import Cuts, data_inputs, sample, sample_count
from fuser.dots import axes_of
from fuser.element import LiftError, attribute, dtype_of, shape_of
from fuser.frame import Rows
from fuser.graph import User
from fuser.growth import RESULTS, Frame, Growth, grow
from fuser.lift import is_pointwise, is_view, rule_of
from fuser.lift_views import FREE_VIEWS, GATHERS
from fuser.lower import Draft, result
from fuser.region import Region
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Op, Var, cast, nonnegative
from tilecore.contract.spec import AttentionSpec, RowSpec, Tensor

KIND = "row"
LIMIT = 64  # nodes of one group
SMALL = 2  # a single number is not worth a kernel
NARROW = 16  # columns that the program has at least, where the shape has as many
REPEATS = frozenset(
    {"Expand", "Tile", "Pad", "Trilu"}
)  # views under which work would be done more than once, or in vain


def draft_of(ends: Sequence[ir.Node], cuts: Cuts) -> Draft | None:
    """The groups that end in `ends`, values of one shape; None when they join nothing or do too little."""
    group = sorted({part for end in ends for part in _group(end, cuts)}, key=cuts.remains.position.__getitem__)
    copies = [part for part in group if part.op_type not in FREE_VIEWS]
    computes = any(is_pointwise(part) for part in group)
    if not _joins(group) or not (computes or (len(copies) > 1 and not _only_appends(ends, group, cuts))):
        return None
    outs = [out for end in ends for out in end.outputs]
    shape = shape_of(outs[0], cuts.shapes)
    if len(outs) != len(ends) or sample_count(shape) < SMALL or not dtype_of(outs[0], cuts.shapes).is_float:
        return None
    rows = Rows.over(shape, _columns(shape), shapes=cuts.shapes, opset=cuts.opset)
    reader = cuts.reader("side", through=frozenset(value for part in group for value in part.outputs))
    values = {out: reader.at(out, rows.full) for out in outs}
    frame = Frame(rows.place, lambda *_: None, lambda *_: ())
    growth = Growth(cuts, dict.fromkeys(outs, rows.full), values, group, frame=frame)
    extent = grow(growth)
    results = tuple(
        result(cuts, made, (rows.row, rows.column), growth.where[made], growth.value[made]) for made in extent.results
    )
    if not results:
        raise LiftError("nothing reads the result")

    def spec(inputs: tuple[Tensor, ...]) -> RowSpec:
        return RowSpec(inputs, rows.row, rows.column, (), results)

    programs = (*(r.value for r in results), *(i for r in results for i in r.place.index), rows.row, rows.column)
    label = " + ".join(part.op_type for part in extent.nodes)
    return Draft(KIND, label, frozenset(extent.nodes), extent.results, programs, spec)


def peers_of(node: ir.Node, cuts: Cuts) -> list[ir.Node]:
    """Other values of the same shape that are put together for a region which reads `node` too: a cache's K and V."""
    remains, (out, *more) = cuts.remains, node.outputs
    readers = {user for user in remains.users_of(out) if isinstance(user, Region)}
    if more or not readers or node.op_type != "Concat":
        return []
    found: list[ir.Node] = []
    for other in remains.nodes:
        made = other.outputs[0]
        if other is node or other.op_type != "Concat" or other not in remains.alive or made in remains.makers:
            continue
        same = cuts.shapes.shape(made) == cuts.shapes.shape(out) and cuts.shapes.dtype(made) == cuts.shapes.dtype(out)
        if same and readers & remains.users_of(made):
            found.append(other)
    return found[: RESULTS - 1]


def _group(last: ir.Node, cuts: Cuts) -> tuple[ir.Node, ...]:
    """The pointwise and view nodes that only `last` needs, in order."""
    remains = cuts.remains
    group: set[User] = {last}
    waiting = _sources(last, cuts)
    while waiting and len(group) < LIMIT:
        node = max(waiting, key=remains.position.__getitem__)  # all its users have been looked at
        waiting.discard(node)
        if any(remains.users_of(value) - group for value in node.outputs):
            continue
        group.add(node)
        waiting |= _sources(node, cuts) - group
    nodes = [node for node in group if isinstance(node, ir.Node)]
    return tuple(sorted(nodes, key=remains.position.__getitem__))


def _sources(node: ir.Node, cuts: Cuts) -> set[ir.Node]:
    """The nodes that make the data of `node` and may belong to a group."""
    found: set[ir.Node] = set()
    for value in data_inputs(node):
        producer = value.producer()
        if producer is None or producer not in cuts.remains.alive or cuts.is_known(value):
            continue
        if any(out in cuts.remains.makers for out in producer.outputs):
            continue
        views = is_view(producer) and producer.op_type not in REPEATS | GATHERS
        if views or is_pointwise(producer) or is_clamped(producer, cuts):
            found.add(producer)
    return found


def is_clamped(node: ir.Node, cuts: Cuts) -> bool:
    """Whether a gather's computed indices are proved inside for every value that they are computed from.

    Then no value, however wrong, makes a kernel read elsewhere: min(max(i, 0), dim − 1) is such an index.
    """
    data, indices = node.inputs[:2] if len(node.inputs) > 1 else (None, None)
    if node.op_type != "GatherElements" or data is None or indices is None:
        return False
    axes = axes_of(shape_of(indices, cuts.shapes), "i")
    axis = int(attribute(node, "axis", 0)) % len(axes)
    try:
        place = cast(cuts.reader("side", through=_computed(indices)).at(indices, axes), DType.I64)
    except LiftError:
        return False
    size = shape_of(data, cuts.shapes)[axis]
    return _starts_inside(place, Var("held", extent=size)) and nonnegative(size - 1 - place)


def _starts_inside(place: Expr, held: Var) -> bool:
    """Whether `place` is at least 0 where the axis of `held` has an element: kernels guard reads of empty tensors."""
    if isinstance(place, Op) and place.name in ("min", "max"):
        found = [_starts_inside(arg, held) for arg in place.args]
        return all(found) if place.name == "min" else any(found)
    return nonnegative(place + held)


def _computed(value: ir.Value) -> frozenset[ir.Value]:
    """The value and all above it that element rules make of others."""
    found: set[ir.Value] = set()
    stack = [value]
    while stack and len(found) < LIMIT:
        current = stack.pop()
        node = current.producer()
        if current in found or node is None or rule_of(node) is None:
            continue
        found.add(current)
        stack += data_inputs(node)
    return frozenset(found)


def _only_appends(ends: Sequence[ir.Node], group: Sequence[ir.Node], cuts: Cuts) -> bool:
    """Whether attention reads caches of the caller's, with entries of the caller's: Concats move them just as well."""
    users = {user for end in ends for out in end.outputs for user in cuts.remains.users_of(out)}
    if not any(isinstance(user, Region) and isinstance(user.spec, AttentionSpec) for user in users):
        return False
    made = {value for node in group for value in node.outputs}
    return all(value in made or value.producer() is None for node in group for value in data_inputs(node))


def _joins(group: Sequence[ir.Node]) -> bool:
    return any(node.op_type == "Concat" or node.op_type in GATHERS for node in group)


def _columns(shape: tuple[Expr, ...]) -> tuple[int, ...]:
    """The trailing axes that are the program's columns."""
    first, width = len(shape), 1
    while first > 0 and width < NARROW:
        first -= 1
        width *= max(1, sample(shape[first]))
    return tuple(range(first, len(shape)))
