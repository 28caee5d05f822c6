"""What an attention computes beside its result: reductions over the keys, masks of its own, scores that others need.

Comes in: the values between an attention's contractions and its softmax. Goes out: which more are computed inside, what
is reduced over the keys while they pass (a mask's row maximum), and *taps*: values per query and key that something
outside reads, as further results. Invariant: a tap's place is one-to-one and onto, proved from its index.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import onnx_ir as ir

from fuser.cuts import BUDGET, FEW_BYTES, Cuts, data_inputs, sample_count, trail
from fuser.element import ONE, Index, LiftError, Shape, attribute, dtype_of, flatten, shape_of, unflatten
from fuser.growth import Growth
from fuser.lift import Leaf, rule_of
from fuser.softmax import reduced_axes
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Op, Var, cast, substitute, variables, walk
from tilecore.contract.spec import Step, extent_of

KINDS = {"ReduceMax": "max", "ReduceMin": "min", "ReduceSum": "sum"}
FLOATS = (DType.F32, DType.F16, DType.BF16)


@dataclass(slots=True)
class KeyReductions:
    """Reductions over the keys that only one attention reads: `steps` by value and index, as they are met."""

    cuts: Cuts
    key: Var
    through: frozenset[ir.Value]
    nodes: frozenset[ir.Node]
    steps: dict[tuple[ir.Value, Index], Step] = field(default_factory=dict[tuple[ir.Value, Index], Step])

    def leaf(self, value: ir.Value, index: Index) -> Expr | None:
        """The variable that stands for a reduction's element; None for every other value."""
        node = value.producer()
        if node is None or node not in self.nodes:
            return None
        if (value, index) not in self.steps:
            var = Var(f"r{len(self.steps)}", DType.F32)
            self.steps[value, index] = Step(var, KINDS[node.op_type], self._reduced(node, index))
        return cast(self.steps[value, index].var, dtype_of(value, self.cuts.shapes))

    def _reduced(self, node: ir.Node, index: Index) -> Expr:
        """The element that is reduced, at the key."""
        source = data_inputs(node)[0]
        (axis,) = reduced_axes(node, self.cuts.shapes, self.cuts.opset)
        kept = bool(attribute(node, "keepdims", 1))
        full = (*index[:axis], self.key, *index[axis + 1 if kept else axis :])
        value = self.cuts.reader("side", through=self.through).at(source, full)
        return cast(value, DType.F32)


def key_reductions(
    cuts: Cuts, weights: ir.Value, through: frozenset[ir.Value], users: frozenset[ir.Node], key: Var
) -> KeyReductions:
    """The reductions over the keys that make `weights` beside the softmax, where nothing else reads them.

    `through` are the values between the softmax and `weights`, `users` what the region computes besides.
    """
    reductions = (node for kind in KINDS for node in cuts.remains.by_type.get(kind, ()))
    candidates = {node.outputs[0]: node for node in reductions if _is_key_reduction(node, cuts, key)}
    between, reached = trail(weights, frozenset(candidates))
    users = users | _makers(through)
    own = frozenset(candidates[value] for value in reached if private(cuts, value, users))
    values = frozenset(value for value in between if private(cuts, value, users)) | through
    inputs = [node.inputs[0] for node in own if node.inputs[0] is not None]
    inside = absorbed(cuts, values, users | own, inputs)
    return KeyReductions(cuts, key, inside, own)


def _is_key_reduction(node: ir.Node, cuts: Cuts, key: Var) -> bool:
    if node.domain not in ("", "ai.onnx") or node.inputs[0] is None:
        return False
    try:
        shape = shape_of(node.inputs[0], cuts.shapes)
        axes = reduced_axes(node, cuts.shapes, cuts.opset)
        floats = dtype_of(node.inputs[0], cuts.shapes) in FLOATS
    except LiftError:  # a shape, type or axes that nobody knows: a reduction of its own at most
        return False
    return floats and len(axes) == 1 and shape[axes[0]] == extent_of(key)


def _makers(values: Iterable[ir.Value]) -> frozenset[ir.Node]:
    return frozenset(node for value in values if (node := value.producer()) is not None)


def private(cuts: Cuts, value: ir.Value, users: frozenset[ir.Node]) -> bool:
    """Whether all that is made of `value` goes into `users`, through nothing but element rules."""
    stack, seen = [value], {value}
    while stack:
        for user in cuts.remains.users_of(stack.pop()):
            if user in users:
                continue
            if not isinstance(user, ir.Node) or rule_of(user) is None or len(seen) > BUDGET:
                return False
            fresh = set(user.outputs) - seen
            seen |= fresh
            stack += fresh
    return True


def absorbed(
    cuts: Cuts, through: frozenset[ir.Value], users: frozenset[ir.Node], roots: Iterable[ir.Value] = ()
) -> frozenset[ir.Value]:
    """`through` and the values that it is made of which cost less to compute again per element than to store once.

    That is so where nothing but `users` and the makers of `through` needs them, and they load at most twice the bytes
    that they have: a stored value is written once and read once more.
    """
    inside = set(through)
    users = users | _makers(through)
    pending = [source for value in through if (node := value.producer()) is not None for source in node.inputs]
    pending += roots
    while pending:
        value = pending.pop()
        if value is None or value in inside:
            continue
        for leaf in cuts.plan(value, "side").leaves:
            node = cuts.remains.producer(leaf)
            if leaf not in inside and node is not None and _pays(cuts, leaf, node) and private(cuts, leaf, users):
                inside.add(leaf)
                pending += data_inputs(node)
    return frozenset(inside)


def _pays(cuts: Cuts, value: ir.Value, node: ir.Node) -> bool:
    if rule_of(node) is None or value in cuts.remains.makers or cuts.is_outer(value):
        return False
    plans = [cuts.plan(source, "side") for source in data_inputs(node)]
    leaves = {leaf for plan in plans for leaf in plan.leaves}
    count = sample_count(shape_of(value, cuts.shapes))
    loaded = sum(min(cuts.size(leaf), count * cuts.tensor(leaf).dtype.row.bytes) for leaf in leaves)
    return loaded <= max(2 * cuts.size(value), FEW_BYTES) and sum(plan.cost for plan in plans) <= 2 * BUDGET


@dataclass(frozen=True, slots=True)
class Tap:
    """A value per query and key that is a result too: `index` and `program` over the attention's axes."""

    value: ir.Value
    index: Index
    program: Expr


def taps_of(
    cuts: Cuts,
    start: tuple[ir.Value, Index, Expr],
    through: frozenset[ir.Value],
    inner: frozenset[ir.Node],
    aside: Leaf,
) -> list[Tap]:
    """The values from `start` on, within `through`, that a node outside of `inner` reads; `start` is one of them.

    `start` has a value, the index of its element and the element; `aside` gives elements of values beside them.
    """
    value, where, expr = start
    growth = Growth(cuts, {value: where}, {value: expr}, [], aside=aside)
    order = sorted(_makers(through), key=cuts.remains.position.__getitem__)
    for node in order:
        if any(source in growth.value for source in node.inputs if source is not None):
            growth.add(node)
    found = [value for value in growth.where if cuts.remains.users_of(value) - inner]
    return [Tap(value, growth.where[value], without_f64(growth.value[value])) for value in found]


def check_tap(tap: Tap, axes: frozenset[Var], cuts: Cuts) -> None:
    """LiftError unless the tap's element stands at one place of its own for every point of `axes`, and fills it."""
    shape = shape_of(tap.value, cuts.shapes)
    if not _is_onto(tap.index, shape, axes):
        raise LiftError(f"{tap.value.name!r} does not have one element per batch, head, query and key")


def _is_onto(index: Index, shape: Shape, axes: frozenset[Var]) -> bool:
    """Whether `index` splits and joins the axes, each of them once, into the dims of `shape`."""
    left = set(axes)
    parts = [(entry, dim) for entry, dim in zip(index, shape, strict=True) if dim != ONE]
    while parts:
        names = variables(parts[0][0])
        if not names or not names <= left:
            return False
        left -= names
        if len(names) == 1:
            (axis,) = names
            count = next((i for i, (entry, _) in enumerate(parts) if variables(entry) != names), len(parts))
            dims = tuple(dim for _, dim in parts[:count])
            if tuple(entry for entry, _ in parts[:count]) != unflatten(axis, dims) or _size(dims) != extent_of(axis):
                return False
            parts = parts[count:]
            continue
        group = tuple(sorted(names, key=lambda axis: axis.name))
        extents = tuple(extent_of(axis) for axis in group)
        if flatten(group, extents) != parts[0][0] or _size(extents) != parts[0][1]:
            return False
        parts = parts[1:]
    return not left


def without_f64(expr: Expr) -> Expr:
    """`expr` without casts to f64 and back, which change nothing. LiftError when it computes in f64."""
    pairs = {node: cast(_uncast(node), DType.F32) for node in walk(expr) if node.dtype is DType.F32}
    result = substitute(expr, {node: plain for node, plain in pairs.items() if plain != node})
    if any(node.dtype is DType.F64 for node in walk(result)):
        raise LiftError("the probabilities go through f64 arithmetic, which would be computed in f32")
    return result


def _uncast(node: Expr) -> Expr:
    """x of an f32 `cast(cast(x, f64), f32)`; else the node."""
    match node:
        case Op(name="cast", args=(Op(name="cast", args=(value,), dtype=DType.F64),)) if value.dtype is DType.F32:
            return value
        case _:
            return node


def _size(dims: Shape) -> Expr:
    return flatten(tuple(dim - 1 for dim in dims), dims) + 1
