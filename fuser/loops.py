"""Reads Scan and Loop operators as recurrences: their bodies' elements as expressions of states and inputs at a step.

Comes in: a node. Goes out: its equations and, per output, which element they make; LiftError says why it is none. All
work in a body is inlined down to states, inputs, and sums over an axis (contractions, reductions), which become cells.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from fuser.cuts import Cuts
from fuser.dots import Dot, axes_of, dot_of, is_dot
from fuser.element import ONE, Index, LiftError, Shape, attribute, content_of, dtype_of, shape_of
from fuser.equations import Carried, Equation, Equations, cell_of
from fuser.lift import Inliner
from fuser.softmax import reduced_axes
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Var, cast, const
from tilecore.contract.spec import Cell

KINDS = {"ReduceSum": "sum", "ReduceMean": "sum", "ReduceMax": "max", "ReduceMin": "min", "ReduceProd": "prod"}
Outputs = dict[ir.Value, tuple[Index, Expr]]


@dataclass(frozen=True, slots=True)
class Iteration:
    """A Scan or Loop in one form. `entries` give elements of body inputs that are no states."""

    body: ir.Graph
    time: Var
    initial: tuple[ir.Value, ...]
    before: tuple[ir.Value, ...]
    after: tuple[ir.Value, ...]
    entries: dict[ir.Value, Callable[[Index], Expr]]
    stacked: tuple[tuple[ir.Value, int, bool], ...]  # body output, axis of time, backwards


def is_iteration(node: ir.Node) -> bool:
    """Whether the node repeats a body."""
    return node.domain in ("", "ai.onnx") and node.op_type in ("Scan", "Loop")


def recurrence_of(node: ir.Node, cuts: Cuts) -> tuple[Equations, Outputs]:
    """The equations of a Scan or Loop, and where each of its outputs' elements comes from."""
    it = _scan(node, cuts) if node.op_type == "Scan" else _loop(node, cuts)
    if not it.before:
        raise LiftError(f"{node.op_type} carries no state")
    body = _Body(it, cuts, Equations(it.time))
    made: Outputs = {}
    for number, value in enumerate(node.outputs[: len(it.before)]):
        axes = axes_of(shape_of(it.before[number], cuts.shapes), f"f{number}_")
        made[value] = axes, Load(body.old[it.before[number]], axes)
    body.carry()
    for number, (value, (source, axis, backwards)) in enumerate(
        zip(node.outputs[len(it.before) :], it.stacked, strict=True)
    ):
        axes = axes_of(shape_of(source, cuts.shapes), f"y{number}_")
        assert it.time.extent is not None
        now = it.time.extent - 1 - it.time if backwards else it.time
        made[value] = (*axes[:axis], now, *axes[axis:]), body.reader.at(source, axes)
    return body.equations, {value: element for value, element in made.items() if value.name}


def _graph(node: ir.Node) -> ir.Graph:
    attr = node.attributes.get("body")
    if attr is None:
        raise LiftError(f"{node.op_type} {node.name!r} has no body")
    return attr.as_graph()


def _given(values: Sequence[ir.Value | None], node: ir.Node) -> tuple[ir.Value, ...]:
    found = tuple(value for value in values if value is not None)
    if len(found) != len(values):
        raise LiftError(f"{node.op_type} {node.name!r} leaves out an input")
    return found


def _scan(node: ir.Node, cuts: Cuts) -> Iteration:
    if cuts.opset < 9:
        raise LiftError(
            "Scan before opset 9 has a batch axis and lengths", advice="convert the model to opset 9 or newer"
        )
    body = _graph(node)
    scanned = int(attribute(node, "num_scan_inputs"))
    states = len(body.inputs) - scanned
    inputs = _given(node.inputs, node)
    axes = attribute(node, "scan_input_axes") or [0] * scanned
    turned = attribute(node, "scan_input_directions") or [0] * scanned
    stacked = len(body.outputs) - states
    out_axes = attribute(node, "scan_output_axes") or [0] * stacked
    out_turned = attribute(node, "scan_output_directions") or [0] * stacked
    lengths: set[Expr] = set()
    outside = cuts.reader("inside")
    entries: dict[ir.Value, Callable[[Index], Expr]] = {}
    places = [int(axis) % len(shape_of(v, cuts.shapes)) for v, axis in zip(inputs[states:], axes, strict=True)]
    lengths = {shape_of(v, cuts.shapes)[axis] for v, axis in zip(inputs[states:], places, strict=True)}
    if len(lengths) != 1:
        raise LiftError(f"its inputs have {len(lengths)} lengths, {', '.join(sorted(map(str, lengths)))}")
    length = lengths.pop()
    time = Var("t", extent=length)
    for value, source, axis, back in zip(body.inputs[states:], inputs[states:], places, turned, strict=True):
        now = length - 1 - time if int(back) else time

        def entry(index: Index, source: ir.Value = source, axis: int = axis, now: Expr = now) -> Expr:
            return outside.at(source, (*index[:axis], now, *index[axis:]))

        entries[value] = entry
    outputs = tuple(
        (value, int(axis) % (len(shape_of(value, cuts.shapes)) + 1), bool(int(back)))
        for value, axis, back in zip(body.outputs[states:], out_axes, out_turned, strict=True)
    )
    before, after = tuple(body.inputs[:states]), tuple(body.outputs[:states])
    return Iteration(body, time, inputs[:states], before, after, entries, outputs)


def _loop(node: ir.Node, cuts: Cuts) -> Iteration:
    body = _graph(node)
    count, condition, *initial = node.inputs
    trips = None if count is None else content_of(count, cuts.shapes)
    if trips is None or len(trips) != 1:
        raise LiftError(
            "how often the loop runs is known at run time only",
            advice="make the number of steps a dim of an input or a constant, as in a loop over time",
        )
    if not (_is_true(condition, cuts) or condition is None) or not _is_true(body.outputs[0], cuts, body.inputs[1]):
        raise LiftError(
            "the loop may end early: its condition is computed in the body",
            advice="nothing to do for a search that ends early; a loop over time needs a condition that is always true",
        )
    time = Var("t", extent=trips[0])
    counter, keep_going, *before = body.inputs

    def step(index: Index) -> Expr:
        return cast(time, dtype_of(counter, cuts.shapes))

    entries: dict[ir.Value, Callable[[Index], Expr]] = {counter: step, keep_going: lambda index: const(True)}
    states = len(before)
    stacked = tuple((value, 0, False) for value in body.outputs[1 + states :])
    return Iteration(
        body, time, _given(initial, node), tuple(before), tuple(body.outputs[1 : 1 + states]), entries, stacked
    )


def _is_true(value: ir.Value | None, cuts: Cuts, same: ir.Value | None = None) -> bool:
    """Whether a condition always holds: the constant true, or the one that the body was entered with."""
    while value is not None and value is not same:
        node = value.producer()
        if node is None or node.op_type not in ("Identity", "Cast"):
            content = content_of(value, cuts.shapes)
            return content is not None and len(content) == 1 and content[0] == const(True)
        value = node.inputs[0]
    return value is not None


@dataclass(slots=True)
class _Body:
    """Elements of a body's values."""

    it: Iteration
    cuts: Cuts
    equations: Equations
    old: dict[ir.Value, Cell] = field(default_factory=dict[ir.Value, Cell])
    new: dict[ir.Value, Cell] = field(default_factory=dict[ir.Value, Cell])
    totals: dict[ir.Value, Callable[[Index], Expr]] = field(default_factory=dict[ir.Value, Callable[[Index], Expr]])
    computing: ir.Value | None = None
    reader: Inliner = field(init=False)
    outside: Inliner = field(init=False)
    own: frozenset[ir.Node] = field(init=False)

    def __post_init__(self) -> None:
        self.reader = Inliner(self.cuts.shapes, self.cuts.opset, self.leaf)
        self.outside = self.cuts.reader("inside")
        self.own = frozenset(self.it.body)
        for number, (before, after) in enumerate(zip(self.it.before, self.it.after, strict=True)):
            shape = self.shape(before)
            if shape != self.shape(after) or shape != self.shape(self.it.initial[number]):
                raise LiftError(f"what it carries as {before.name!r} changes its shape from step to step")
            dtype = dtype_of(before, self.cuts.shapes)
            self.old[before] = cell_of(f"s{number}", dtype, shape)
            if after not in self.old:
                self.new.setdefault(after, cell_of(f"s{number}.next", dtype, shape))

    def shape(self, value: ir.Value) -> Shape:
        """The shape of a value."""
        return shape_of(value, self.cuts.shapes)

    def leaf(self, value: ir.Value, index: Index) -> Expr | None:
        """What is not computed by an element rule."""
        if value in self.old:
            return Load(self.old[value], index)
        if value in self.new and value is not self.computing:
            return Load(self.new[value], index)
        if value in self.it.entries:
            return self.it.entries[value](index)
        node = value.producer()
        if node is None or node not in self.own:
            return self.outside.at(value, index)
        if value not in self.totals and (is_dot(node) or node.op_type in KINDS):
            self.totals[value] = total_of(node, self.cuts, self.reader, self.equations.totals)
        return self.totals[value](index) if value in self.totals else None

    def carry(self) -> None:
        """The equations of the states."""
        for number, (before, after) in enumerate(zip(self.it.before, self.it.after, strict=True)):
            axes = axes_of(self.shape(before), f"s{number}_")
            first = self._start(self.it.initial[number], axes)
            self.computing = after
            update = self.reader.at(after, axes) if after in self.old else self._computed(after, axes)
            self.computing = None
            old = self.old[before]
            new = self.new[after] if after in self.new and self._first(after) == number else None
            new = new or Cell(f"{old.name}.next", old.dtype, old.shape)
            equation = Equation(new, axes, update)
            self.equations.states.append(Carried(old, Equation(old, axes, first), equation))

    def _start(self, value: ir.Value, axes: Index) -> Expr:
        """An element of a first value; states mostly start as a constant of zeros."""
        tensor = value.const_value
        if tensor is not None and not value.is_graph_input() and tensor.size:
            array = tensor.numpy()
            if np.all(array == array.flat[0]):
                return const(array.flat[0].item(), dtype_of(value, self.cuts.shapes))
        return self.outside.at(value, axes)

    def _first(self, after: ir.Value) -> int:
        return self.it.after.index(after)

    def _computed(self, value: ir.Value, index: Index) -> Expr:
        found = self.leaf(value, index)
        return self.reader.compute(value, index) if found is None else found


def total_of(
    node: ir.Node, cuts: Cuts, reader: Inliner, totals: list[Equation], name: str = "r"
) -> Callable[[Index], Expr]:
    """A new cell for a contraction or a reduction, as an element of the node's output at any index."""
    out = node.outputs[0]
    axes = axes_of(shape_of(out, cuts.shapes), f"{name}{len(totals)}_")
    if is_dot(node):
        dot = dot_of(node, cuts.shapes)
        if dot.integer:
            raise LiftError(f"{node.op_type} {node.name!r} sums integers; recurrences are computed in f32", node=node)
        if dot.depth == ONE:

            def product(index: Index) -> Expr:
                left, right = dot.locate(index, const(0))
                value = _product(dot, reader, left, right)
                return dot.finish(value, index, reader.at)

            return product
        over = Var(f"k{len(totals)}", extent=dot.depth)
        left, right = dot.locate(axes, over)
        value = _product(dot, reader, left, right)
        cell = cell_of(f"{name}{len(totals)}", DType.F32, shape_of(out, cuts.shapes))
        totals.append(Equation(cell, axes, value, over, "sum"))
        return lambda index: dot.finish(Load(cell, index), index, reader.at)
    return _reduction(node, axes, cuts, reader, (totals, name))


def _product(dot: Dot, reader: Inliner, left: Index, right: Index) -> Expr:
    return cast(dot.read(0, reader.at, left), DType.F32) * cast(dot.read(1, reader.at, right), DType.F32)


def _reduction(
    node: ir.Node, axes: Index, cuts: Cuts, reader: Inliner, into: tuple[list[Equation], str]
) -> Callable[[Index], Expr]:
    totals, name = into
    source = node.inputs[0]
    assert source is not None
    shape = shape_of(source, cuts.shapes)
    reduced = [axis for axis in reduced_axes(node, cuts.shapes, cuts.opset) if shape[axis] != ONE]
    kept = int(attribute(node, "keepdims", 1))
    if len(reduced) > 1:
        raise LiftError(f"{node.op_type} {node.name!r} reduces {len(reduced)} axes at once")
    gone = set(reduced_axes(node, cuts.shapes, cuts.opset))

    def located(index: Index, at: Expr) -> Index:
        rest = iter(index)
        found: list[Expr] = []
        for axis in range(len(shape)):
            if axis in gone:
                if kept:
                    next(rest)
                found.append(at if axis in reduced else const(0))
            else:
                found.append(next(rest))
        return tuple(found)

    if not reduced:
        return lambda index: reader.at(source, located(index, const(0)))
    over = Var(f"k{len(totals)}", extent=shape[reduced[0]])
    dtype = dtype_of(source, cuts.shapes)
    cell = cell_of(f"{name}{len(totals)}", dtype, shape_of(node.outputs[0], cuts.shapes))
    totals.append(Equation(cell, axes, reader.at(source, located(axes, over)), over, KINDS[node.op_type]))
    count = cast(shape[reduced[0]], dtype)
    if node.op_type == "ReduceMean":
        return lambda index: Load(cell, index) / count
    return lambda index: Load(cell, index)


def is_total(node: ir.Node) -> bool:
    """Whether `total_of` knows the operator."""
    return is_dot(node) or (node.domain in ("", "ai.onnx") and node.op_type in KINDS)


__all__ = ["Outputs", "is_iteration", "is_total", "recurrence_of", "total_of"]
