"""Where a graph normalises by a softmax: the operator, exp of its logarithm, or exp(x − max x) / Σ exp(x − max x).

Comes in: nodes. Goes out: `Site`s: the probabilities, the scores, and the axes that are summed over.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from fuser.element import LiftError, attribute, content_of, shape_of
from fuser.region import name_of
from fuser.shapes import Shapes
from tilecore.contract.expr import Const


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
            site = _exponential(node, shapes, opset)
        elif node.op_type == "Div":
            site = _pieces(node, shapes, opset)
        if site is not None:
            found[site.output] = site
    return found


def softmax_axes(node: ir.Node, rank: int, opset: int) -> tuple[int, ...]:
    """The axes that a Softmax or LogSoftmax sums over: before opset 13 the axis and all that follow it."""
    axis = int(attribute(node, "axis", -1 if opset >= 13 else 1)) % rank
    return (axis,) if opset >= 13 else tuple(range(axis, rank))


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


def _pieces(node: ir.Node, shapes: Shapes, opset: int) -> Site | None:
    numerator, denominator = node.inputs
    exp = None if numerator is None else numerator.producer()
    total = None if denominator is None else denominator.producer()
    if exp is None or total is None or exp.op_type != "Exp" or total.op_type != "ReduceSum":
        return None
    shifted = exp.inputs[0].producer() if exp.inputs[0] is not None else None
    if total.inputs[0] is not numerator or shifted is None or shifted.op_type != "Sub":
        return None
    scores, top = shifted.inputs
    peak = None if top is None else top.producer()
    if scores is None or peak is None or peak.op_type != "ReduceMax" or peak.inputs[0] is not scores:
        return None
    pieces = frozenset((node, exp, total, shifted, peak))
    if any(piece.graph is not node.graph for piece in pieces):
        return None
    try:
        axes = [reduced_axes(reduce, shapes, opset) for reduce in (total, peak)]
    except LiftError:  # axes that are computed at run time: not a softmax that can be told
        return None
    if axes[0] != axes[1] or not all(int(attribute(reduce, "keepdims", 1)) for reduce in (total, peak)):
        return None
    return Site(node, scores, node.outputs[0], axes[0], pieces)


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
