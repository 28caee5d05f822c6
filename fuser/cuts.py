"""Where a region stops looking back: which values it reads as inputs, and which it computes from others.

Comes in: what is left of the graph. Goes out: a decision per value. A value is computed inside a region when it is a
view, when it is index arithmetic, or when computing it costs little and loads fewer bytes than it has (for q, k and v:
at most twice as many, since rotary tables come with them). Everything else is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import onnx_ir as ir

from fuser.element import LiftError, Shape, content_of, dtype_of, shape_of
from fuser.graph import OUTSIDE, Remains
from fuser.lift import (
    Inliner,
    Leaf,
    cost_of,
    is_cumulative,
    is_generator,
    is_pointwise,
    is_view,
    known_element,
    rule_of,
)
from fuser.lift_views import GATHERS
from fuser.region import Region
from fuser.settle import settled
from fuser.shapes import Shapes
from fuser.softmax import Site
from tilecore.contract.expr import Const, Expr, Load, Op, Sym, Var, const, loads, rewrite, walk
from tilecore.contract.spec import Tensor

SAMPLE = 128  # what every symbolic dim counts as where sizes are compared
LOADING = 8  # multiplications per element that the operand of a plain contraction may cost: it is read several times
BUDGET = 32  # multiplications per element that a side operand may cost
BYTE_TYPES = (ir.DataType.INT8, ir.DataType.UINT8)
FEW_BYTES = 64  # loads of so little (a few scalars) are no reason to keep a value
SHAPED = frozenset({"ConstantOfShape", "EyeLike", "Shape", "Size"})  # what they make depends on a shape alone
NOTHING: frozenset[ir.Value] = frozenset()


@dataclass(frozen=True, slots=True)
class Plan:
    """What computing a value inside a region takes: the values to load, and multiplications per element."""

    leaves: frozenset[ir.Value]
    cost: int


@dataclass(slots=True)
class Cuts:
    """Decisions by mode: "view" looks through views and what unpacks smaller values (a contraction's operands),
    "operand" is for q, k and v, "inside" for what the steps
    of a scan read, "side" for others."""

    shapes: Shapes
    opset: int
    remains: Remains
    sites: dict[ir.Value, Site]
    exponentials: dict[ir.Value, Site]  # of values that may be those of a softmax but for a factor per row
    tensors: dict[ir.Value, Tensor] = field(default_factory=dict[ir.Value, Tensor])
    values: dict[str, ir.Value] = field(default_factory=dict[str, ir.Value])
    _known: dict[ir.Value, bool] = field(default_factory=dict[ir.Value, bool])
    _plans: dict[tuple[ir.Value, str], Plan] = field(default_factory=dict[tuple[ir.Value, str], Plan])
    _homes: dict[ir.Value, tuple[bool, bool]] = field(default_factory=dict[ir.Value, tuple[bool, bool]])
    _weights: dict[ir.Value, bool] = field(default_factory=dict[ir.Value, bool])

    def forget(self) -> None:
        """Drop decisions that depend on who uses what; call it after a region was taken."""
        self._plans.clear()

    def tensor(self, value: ir.Value) -> Tensor:
        """The value as a region's tensor. LiftError when its shape or type is unknown."""
        if value not in self.tensors:
            constant = value.const_value is not None and not value.is_graph_input()
            shape = shape_of(value, self.shapes)
            self.tensors[value] = Tensor(value.name or "", dtype_of(value, self.shapes), shape, constant)
            self.values[value.name or ""] = value
        return self.tensors[value]

    def load(self, value: ir.Value, index: tuple[Expr, ...]) -> Expr:
        """A load of the value."""
        return Load(self.tensor(value), index)

    def reader(
        self,
        mode: str,
        *,
        anchors: frozenset[ir.Value] = NOTHING,
        through: frozenset[ir.Value] = NOTHING,
        bound: Leaf | None = None,
    ) -> Inliner:
        """An inliner that loads `anchors`, never stops at `through`, asks `bound` first and the plans last."""

        def leaf(value: ir.Value, index: tuple[Expr, ...]) -> Expr | None:
            found = bound(value, index) if bound is not None else None
            if found is not None:
                return found
            if value in anchors:
                return self.load(value, index)
            if self.is_known(value):
                return None
            if self.is_outer(value):
                return self.load(value, index)
            if value in through:
                return None
            return self.load(value, index) if value in self.plan(value, mode).leaves else None

        return Inliner(self.shapes, self.opset, leaf)

    def is_outer(self, value: ir.Value) -> bool:
        """Whether a node of another graph makes the value: a body reads what is outside of it as it is."""
        return value.producer() is not None and self.remains.producer(value) is None

    def is_weight(self, value: ir.Value) -> bool:
        """Whether the value is a constant of the model, or views and pointwise work make it of constants alone."""
        if value not in self._weights:
            node, own = value.producer(), value.const_value is not None and not value.is_graph_input()
            made = node is not None and rule_of(node) is not None and bool(data_inputs(node))
            self._weights[value] = own or (
                node is not None and made and all(self.is_weight(source) for source in data_inputs(node))
            )
        return self._weights[value]

    def is_known(self, value: ir.Value) -> bool:
        """Whether the value's elements need no load: a pattern of the index, or small known integers."""
        if value not in self._known:
            self._known[value] = self._is_known(value)
        return self._known[value]

    def _is_known(self, value: ir.Value) -> bool:
        shape = self.shapes.shape(value)
        if shape is None or value.is_graph_input() or is_parameter(value):
            return False
        index = tuple(Var(f"i{axis}", extent=dim) for axis, dim in enumerate(shape))
        try:
            return known_element(value, index, self.shapes) is not None
        except LiftError:
            return False

    def plan(self, value: ir.Value, mode: str) -> Plan:
        """How to get at the elements of `value`."""
        key = (value, mode)
        if key not in self._plans:
            self._plans[key] = self._plan(value, mode)
        return self._plans[key]

    def _plan(self, value: ir.Value, mode: str) -> Plan:
        whole = Plan(frozenset({value}), 0)
        if self.is_known(value):
            return Plan(NOTHING, 1)
        node = self.remains.producer(value)
        if node is None or value in self.remains.makers or rule_of(node) is None:
            return whole if node is None or not self._is_steady(value, node) else Plan(NOTHING, 1)
        if is_pointwise(node) and self.is_home(value) and self.size(value) > FEW_BYTES:
            return whole
        parts = [self.plan(source, mode) for source in data_inputs(node)]
        leaves = NOTHING.union(*(part.leaves for part in parts))
        cost = cost_of(node) + sum(part.cost for part in parts)
        if is_generator(node):
            return Plan(leaves, cost) if not leaves else whole
        users = self.remains.users_of(value)
        if is_view(node):
            if node.op_type in GATHERS:
                index = self.plan(node.inputs[1], "side") if node.inputs[1] is not None else whole
                if (index.leaves and not self._looks_up(value, mode)) or index.cost > BUDGET // 2:
                    return whole
                leaves |= index.leaves
                cost += index.cost
            moves = len(leaves) == 1 and cost == 0 and node.op_type == "Concat"  # parts of one value in another order
            if (
                leaves
                and node.op_type in ("Concat", "Pad")
                and (OUTSIDE in users or (not moves and (mode == "view" or len(users) > 1)))
            ):
                return whole
            return Plan(leaves, cost)
        if not leaves:
            if cost > BUDGET and (cost := self._operations(value)) > BUDGET // 2:
                return whole
            return Plan(leaves, cost)
        if OUTSIDE in users or any(isinstance(u, Region) for u in users):
            return whole
        if mode == "operand" and len(users) > 1 and all(len(part.leaves) > 0 for part in parts):
            return whole
        count = sample_count(self.tensor(value).shape)
        loaded = sum(min(self.size(leaf), count * self.tensor(leaf).dtype.row.bytes) for leaf in leaves)
        if mode == "view" and (2 * loaded > self.size(value) or cost > LOADING):
            return whole
        allowed = 2 * self.size(value) if mode in ("operand", "inside") else self.size(value) - 1
        return Plan(leaves, cost) if cost <= BUDGET and loaded <= max(allowed, FEW_BYTES) else whole

    def _looks_up(self, value: ir.Value, mode: str) -> bool:
        """Whether rows of a table, chosen by data, are read where they are needed: each costs as much as its copy.

        An index out of range is to be seen, so that there must be a NaN to show it.
        """
        return mode == "side" and OUTSIDE not in self.remains.users_of(value) and self.tensor(value).dtype.is_float

    def _is_steady(self, value: ir.Value, node: ir.Node) -> bool:
        """Whether the value is a CumSum of what is the same number everywhere."""
        if not is_cumulative(node) or value in self.remains.makers or self.plan(data_inputs(node)[0], "side").leaves:
            return False
        try:
            return not loads(self._generic(value))
        except LiftError:
            return False

    def _operations(self, value: ir.Value) -> int:
        """Operations of an element of index arithmetic, once all that is known of indices has been used."""
        try:
            return sum(isinstance(part, Op) for part in walk(settled(self._generic(value))))
        except LiftError:
            return BUDGET + 1

    def _generic(self, value: ir.Value) -> Expr:
        """The element of a value at any index."""
        index = tuple(Var(f"i{axis}", extent=dim) for axis, dim in enumerate(shape_of(value, self.shapes)))
        return self.reader("side").compute(value, index)

    def size(self, value: ir.Value) -> int:
        """Bytes of a value, every symbolic dim taken as `SAMPLE`."""
        tensor = self.tensor(value)
        return tensor.dtype.row.bytes * sample_count(tensor.shape)

    def is_home(self, value: ir.Value) -> bool:
        """Whether the value belongs to a contraction's or reduction's region: pointwise work with no view between."""
        return self._home(value)[0]

    def _home(self, value: ir.Value) -> tuple[bool, bool]:
        """(home, and so by a reduction, whose results keep their consumers whatever their shape)."""
        if not self._homes:
            for node in self.remains.nodes:
                self._homes.update((out, self._home_of(node, out)) for out in node.outputs)
        return self._homes.get(value, (False, False))

    def widens(self, source: ir.Value, value: ir.Value) -> bool:
        """Whether `value` is made of single bytes of `source` and has larger elements: the bytes are what to keep."""
        narrow = self.shapes.dtype(source), self.shapes.dtype(value)
        return narrow[0] in BYTE_TYPES and narrow[1] is not None and narrow[1] not in BYTE_TYPES

    def _home_of(self, node: ir.Node, value: ir.Value) -> tuple[bool, bool]:
        if rule_of(node) is None:
            return True, node.op_type.startswith("Reduce")
        if not is_pointwise(node):
            return False, False
        known = [
            (source, self._homes.get(source, (False, False)))
            for source in node.inputs
            if source is not None and not self.widens(source, value)
        ]
        rows = any(row for _, (_, row) in known)
        shape = self.shapes.shape(value)
        return rows or any(home and self.shapes.shape(source) == shape for source, (home, _) in known), rows


def data_inputs(node: ir.Node) -> list[ir.Value]:
    """The inputs whose elements the node's output elements are made of."""
    if is_generator(node) and node.op_type in SHAPED:
        return []
    if not is_view(node):
        return [value for value in node.inputs if value is not None]
    positions = {"Concat": range(len(node.inputs)), "Pad": (0, 2), "Trilu": (0, 1)}.get(node.op_type, (0,))
    return [value for i in positions if i < len(node.inputs) and (value := node.inputs[i]) is not None]


PARAMETERS: Mapping[str, tuple[int, ...]] = {  # which inputs are scales and zero points
    "QuantizeLinear": (1, 2),
    "DequantizeLinear": (1, 2),
    "QLinearMatMul": (1, 2, 4, 5, 6, 7),
}


def is_parameter(value: ir.Value) -> bool:
    """Whether a constant is nothing but one scale or zero point, which differ from layer to layer of a model.

    Regions read them when they run, so that layers share a kernel. That nothing is subtracted from a weight is known,
    and so is what has fewer bits than kernels read.
    """
    tensor, uses = value.const_value, value.uses()
    if tensor is None or tensor.size != 1 or not uses or tensor.dtype.itemsize < 1:
        return False
    if any(index not in PARAMETERS.get(node.op_type, ()) for node, index in uses):
        return False
    of_weights = any(source is not None and source.const_value is not None for source in _levels_of(value))
    return tensor.dtype.is_floating_point() or not of_weights or bool(tensor.numpy().item())


def _levels_of(value: ir.Value) -> list[ir.Value | None]:
    """The tensors that a scale or zero point belongs to, as far as they are inputs of the same node."""
    first = {index: 0 if index < 3 else 3 for index in PARAMETERS["QLinearMatMul"][:4]}
    return [node.inputs[first[index]] for node, index in value.uses() if index in first]


def is_plumbing(node: ir.Node, shapes: Shapes) -> bool:
    """Whether all that the node computes is known: shape arithmetic that costs nothing and holds nothing alive."""
    return bool(node.outputs) and all(content_of(value, shapes) is not None for value in node.outputs)


@cache
def sample(dim: Expr) -> int:
    """The size of a dim, every symbol taken as `SAMPLE`."""
    result = rewrite(dim, lambda node: const(SAMPLE) if isinstance(node, Sym) else None)
    return int(result.value) if isinstance(result, Const) else SAMPLE


def sample_count(shape: Shape) -> int:
    """The number of elements of a shape, every symbol taken as `SAMPLE`."""
    count = 1
    for dim in shape:
        count *= max(1, sample(dim))
    return count


def trail(
    value: ir.Value, targets: frozenset[ir.Value], *, limit: int = 400
) -> tuple[frozenset[ir.Value], list[ir.Value]]:
    """The values between `value` and those of `targets` that views and pointwise work make it of, and these targets.

    Targets come nearest first. Only nodes of the graph that `value` is in are looked through, and chains that visit
    more than `limit` values are not followed to their end.
    """
    last = value.producer()
    home = None if last is None else last.graph
    order: list[ir.Value] = [value]
    seen = {value}
    reached: list[ir.Value] = []
    for current in order:
        if current in targets:
            reached.append(current)
            continue
        node = current.producer()
        if node is None or node.graph is not home or rule_of(node) is None or len(order) > limit:
            continue
        for source in data_inputs(node):
            if source not in seen:
                seen.add(source)
                order.append(source)
    between: set[ir.Value] = set(reached)
    grew = True
    while grew:
        grew = False
        for current in reversed(order):
            node = current.producer()
            if current in between or node is None or rule_of(node) is None:
                continue
            if any(source in between for source in data_inputs(node)):
                between.add(current)
                grew = True
    return frozenset(between - set(reached)), reached
