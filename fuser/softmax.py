"""Where a graph normalises by a softmax: the operator, exp of its logarithm, or exp(x − max x) / Σ exp(x − max x).

Comes in: nodes. Goes out: `Site`s: the probabilities, the scores, and the axes that are summed over. How the pieces are
brought together (axes kept or not, a reciprocal, log Σ exp x in place of the maximum) is read as expressions. Where no
quotient is a value of the graph, or no maximum is subtracted, `exponentials.py` reads the exponentials themselves.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import onnx_ir as ir

from fuser.element import ONE, ZERO, Index, LiftError, attribute, content_of, dtype_of, shape_of
from fuser.lift import Inliner, rule_of
from fuser.region import name_of
from fuser.shapes import Shapes
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Op, Var, apply, const, rewrite
from tilecore.contract.spec import Tensor

PIECES = 16  # nodes between two pieces of a softmax


@dataclass(frozen=True, slots=True)
class Site:
    """One softmax: `output` = softmax of `input` over `axes` (all of them together), by `nodes` up to `node`."""

    node: ir.Node
    input: ir.Value
    output: ir.Value
    axes: tuple[int, ...]
    nodes: frozenset[ir.Node]


def sites_of(nodes: Iterable[ir.Node], shapes: Shapes, opset: int) -> dict[ir.Value, Site]:
    """Every softmax, by its output."""
    found: dict[ir.Value, Site] = {}
    for node in nodes:
        if node.domain not in ("", "ai.onnx"):
            continue
        site = None
        if node.op_type == "Softmax":
            site = _operator(node, shapes, opset)
        elif node.op_type == "Exp":
            site = _exponential(node, shapes, opset) or _logarithmic(node, shapes, opset)
        elif node.op_type == "ReduceSum":
            found |= {site.output: site for site in _quotients(node, shapes, opset)}
        if site is not None:
            found[site.output] = site
    return found


def softmax_axes(node: ir.Node, rank: int, opset: int) -> tuple[int, ...]:
    """The axes that a Softmax or LogSoftmax sums over: before opset 13 the axis and all that follow it."""
    axis = int(attribute(node, "axis", -1 if opset >= 13 else 1)) % rank
    return (axis,) if opset >= 13 else tuple(range(axis, rank))


def exponentials(nodes: Iterable[ir.Node]) -> dict[ir.Value, Site]:
    """Every Exp by its output, as what may be a softmax but for a factor per row."""
    found = (node for node in nodes if node.op_type == "Exp" and node.domain in ("", "ai.onnx"))
    return {
        node.outputs[0]: Site(node, value, node.outputs[0], (), frozenset((node,)))
        for node in found
        if (value := node.inputs[0]) is not None
    }


def _operator(node: ir.Node, shapes: Shapes, opset: int) -> Site | None:
    value = node.inputs[0]
    shape = None if value is None else shapes.shape(value)
    if value is None or not shape:
        return None
    return Site(node, value, node.outputs[0], softmax_axes(node, len(shape), opset), frozenset((node,)))


def _exponential(node: ir.Node, shapes: Shapes, opset: int) -> Site | None:
    """exp(log softmax x)."""
    logarithm = None if node.inputs[0] is None else node.inputs[0].producer()
    if logarithm is None or logarithm.op_type != "LogSoftmax" or logarithm.graph is not node.graph:
        return None
    site = _operator(logarithm, shapes, opset)
    return None if site is None else Site(node, site.input, node.outputs[0], site.axes, site.nodes | {node})


def _quotients(total: ir.Node, shapes: Shapes, opset: int) -> Iterator[Site]:
    """What is divided by Σ exp(x): a softmax, however the sum is brought to its shape and divided by."""
    summed = total.inputs[0]
    exp = None if summed is None else summed.producer()
    if summed is None or exp is None or exp.op_type != "Exp" or exp.inputs[0] is None:
        return
    divisions = {node for node, _ in summed.uses() if node.op_type in ("Div", "Mul") and node.graph is total.graph}
    if not divisions:
        return
    try:
        axes = reduced_axes(total, shapes, opset)
        ends = _Ends(shapes, opset, axes, summed, total.outputs[0])
        scores, before = _unshifted(exp.inputs[0], exp, ends)
    except LiftError:  # shapes or axes that are known at run time only: not a softmax that can be told
        return
    for node in sorted(divisions, key=lambda node: node.name or "") if before else ():
        between = ends.between(node.outputs[0])
        if between is not None and ends.is_quotient(node.outputs[0]):
            pieces = frozenset((exp, total)) | between | before
            yield Site(node, scores, node.outputs[0], axes, pieces)


def _unshifted(x: ir.Value, exp: ir.Node, ends: "_Ends") -> tuple[ir.Value, frozenset[ir.Node]]:
    """`(s, nodes)` where `nodes` make x = s − max s over the axes, in any spelling; `(x, none)` where they do not."""
    shift = x.producer()
    if shift is None or shift.op_type != "Sub" or shift.graph is not exp.graph or shift.inputs[0] is None:
        return x, frozenset()
    scores = shift.inputs[0]
    for peak in (node for node, _ in scores.uses() if node.op_type in ("ReduceMax", "ReduceLogSumExp")):
        if peak.graph is not exp.graph or reduced_axes(peak, ends.shapes, ends.opset) != ends.axes:
            continue
        inner = replace(ends, whole=scores, row=peak.outputs[0])
        between = inner.between(x)
        if between is not None and inner.is_difference(x):
            return scores, between | {peak}
    return x, frozenset()


def _logarithmic(exp: ir.Node, shapes: Shapes, opset: int) -> Site | None:
    """exp(s − log Σ exp s), by ReduceLogSumExp."""
    x = exp.inputs[0]
    shift = None if x is None else x.producer()
    scores = shift.inputs[0] if shift is not None and shift.op_type == "Sub" else None
    if x is None or scores is None:
        return None
    for peak in (node for node, _ in scores.uses() if node.op_type == "ReduceLogSumExp"):
        try:
            ends = _Ends(shapes, opset, reduced_axes(peak, shapes, opset), scores, peak.outputs[0])
            found, before = _unshifted(x, exp, ends)
        except LiftError:  # as above
            continue
        if peak in before:
            return Site(exp, found, exp.outputs[0], ends.axes, before | {exp})
    return None


@dataclass(frozen=True, slots=True)
class _Ends:
    """A value and its reduction over `axes`, and how other values are made of these two."""

    shapes: Shapes
    opset: int
    axes: tuple[int, ...]
    whole: ir.Value
    row: ir.Value

    def between(self, value: ir.Value) -> frozenset[ir.Node] | None:
        """The nodes that make `value` of the two and of constants; None where it takes anything else."""
        found: set[ir.Node] = set()
        stack = [value]
        while stack:
            current = stack.pop()
            if current in (self.whole, self.row) or content_of(current, self.shapes) is not None:
                continue
            node = current.producer()
            if node is None or node in found:
                if node is None and (current.const_value is None or current.is_graph_input()):
                    return None
                continue
            if rule_of(node) is None or node.graph is not self.row.graph or len(found) > PIECES:
                return None
            found.add(node)
            stack += [source for source in node.inputs if source is not None]
        return frozenset(found)

    def is_quotient(self, value: ir.Value) -> bool:
        """Whether each element of `value` is the whole's at its place over the row's."""
        expr, whole, row = self._read(value)
        inverse = apply("div", const(1.0, row.dtype), row)
        return expr in (apply("div", whole, row), apply("mul", whole, inverse), apply("mul", inverse, whole))

    def is_difference(self, value: ir.Value) -> bool:
        """Whether each element of `value` is the whole's at its place minus the row's."""
        expr, whole, row = self._read(value)
        return expr == apply("sub", whole, row)

    def _read(self, value: ir.Value) -> tuple[Expr, Expr, Expr]:
        """An element of `value`, without roundings to 16 bits, and those of the two ends that it should be made of."""
        shape = shape_of(self.whole, self.shapes)
        index = tuple(ZERO if dim == ONE else Var(f"i{axis}", extent=dim) for axis, dim in enumerate(shape))
        kept = len(shape_of(self.row, self.shapes)) == len(shape)
        row = tuple(
            ZERO if axis in self.axes else part for axis, part in enumerate(index) if kept or axis not in self.axes
        )

        def load(end: ir.Value, where: Index) -> Expr:
            wide = DType.F64 if dtype_of(end, self.shapes) is DType.F64 else DType.F32
            return Load(Tensor(end.name or "", wide, shape_of(end, self.shapes)), where)

        reader = Inliner(self.shapes, self.opset, lambda v, i: load(v, i) if v in (self.whole, self.row) else None)
        if shape_of(value, self.shapes) != shape:  # broadcast to more than the whole
            return ZERO, load(self.whole, index), load(self.row, row)
        try:
            expr = reader.compute(value, index)
        except LiftError:
            return ZERO, load(self.whole, index), load(self.row, row)
        return _without_roundings(expr), load(self.whole, index), load(self.row, row)


def _without_roundings(expr: Expr) -> Expr:
    """`expr` without casts from one float type to another."""

    def visit(node: Expr) -> Expr | None:
        rounds = isinstance(node, Op) and node.name == "cast" and node.dtype.is_float and node.args[0].dtype.is_float
        return node.args[0] if isinstance(node, Op) and rounds else None

    return rewrite(expr, visit)


def reduced_axes(node: ir.Node, shapes: Shapes, opset: int) -> tuple[int, ...]:
    """The axes of a Reduce operator, counted from the front. LiftError when they are known at run time only."""
    value = node.inputs[0]
    if value is None:
        raise LiftError(f"{node.op_type} {node.name!r} has no input")
    rank = len(shape_of(value, shapes))
    listed = attribute(node, "axes")
    source = node.inputs[1] if len(node.inputs) > 1 else None
    if source is not None:
        content = content_of(source, shapes)
        if content is None or not all(isinstance(axis, Const) for axis in content):
            raise LiftError(
                f"the axes that {node.op_type} {name_of(node)} reduces over are computed at run time",
                node=node,
                advice="make the axes a constant of the model",
            )
        listed = [int(axis.value) for axis in content if isinstance(axis, Const)]
    if not listed:
        return () if int(attribute(node, "noop_with_empty_axes", 0)) and opset >= 13 else tuple(range(rank))
    return tuple(sorted(int(axis) % rank for axis in listed))
