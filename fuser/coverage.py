"""How much of a model its regions cover: nodes, floating-point operations, and the data movement that is left.

Comes in: a scanned model, then its regions and the rewritten model. Goes out: a `Coverage`. Invariant: a node counts as
fused exactly when a region computes it and the rewritten model does not; nodes that only compute shapes count nowhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fuser.body import DOMAIN
from fuser.cuts import is_plumbing, sample_count
from fuser.element import attribute
from fuser.lift import cost_of, is_view
from fuser.lift_views import FREE_VIEWS, GATHERS
from fuser.region import Region, name_of
from fuser.shapes import Shapes

SCATTERS = frozenset({"ScatterND", "ScatterElements", "TensorScatter"})
ROW_COST = 4  # operations per element of a reduction or normalisation, roughly


@dataclass(frozen=True, slots=True)
class Coverage:
    """What share of a model is in regions.

    `flops_…` count a multiply-add as two, every symbolic dim taken as 128. `movers` are the operators left that copy
    elements without computing, as "Transpose name (why)".
    """

    nodes_fused: int
    nodes_left: int
    flops_fused: int
    flops_left: int
    movers: tuple[str, ...]

    @property
    def nodes(self) -> float:
        """The share of nodes inside regions; 0 for an empty model."""
        return self.nodes_fused / max(self.nodes_fused + self.nodes_left, 1)

    @property
    def flops(self) -> float:
        """The share of floating-point operations inside regions; 0 for a model without any."""
        return self.flops_fused / max(self.flops_fused + self.flops_left, 1)


@dataclass(frozen=True, slots=True)
class Workload:
    """Operations of every node that computes or moves data, while the graph is as it was; `movers` copy elements."""

    flops: Mapping[ir.Node, int]
    movers: frozenset[ir.Node]


def workload_of(model: ir.Model, shapes: Shapes) -> Workload:
    """The workload of a model that is not rewritten yet."""
    nodes = [node for node in model.graph.all_nodes() if not is_plumbing(node, shapes)]
    movers = {
        node
        for node in nodes
        if node.domain in ("", "ai.onnx")
        and ((is_view(node) and node.op_type not in FREE_VIEWS) or node.op_type in SCATTERS)
    }
    return Workload({node: flops_of(node, shapes) for node in nodes}, frozenset(movers))


def coverage_of(workload: Workload, regions: Sequence[Region], rewritten: ir.Model) -> Coverage:
    """The coverage of `regions` once they are rewritten."""
    left = [node for node in rewritten.graph.all_nodes() if node in workload.flops]
    fused = {node for region in regions for node in region.nodes if node in workload.flops} - set(left)
    return Coverage(
        len(fused),
        len(left),
        sum(workload.flops[node] for node in fused),
        sum(workload.flops[node] for node in left),
        tuple(f"{node.op_type} {name_of(node)} ({_reason(node)})" for node in left if node in workload.movers),
    )


def _reason(node: ir.Node) -> str:
    """Why an operator that moves data is in no region, from who reads its result."""
    if node.op_type in SCATTERS:
        return "it writes where data says; a region writes every element of its results once"
    if any(out.is_graph_output() for out in node.outputs):
        return "its result is an output of the model, and nothing else is done to it"
    if node.op_type in GATHERS:
        return "it picks by data, where an index out of range has to be an error"
    readers = [user for out in node.outputs for user in out.consumers() if user.domain != DOMAIN]
    if readers:
        return f"{readers[0].op_type} {name_of(readers[0])}, which is in no region, reads its result from memory"
    return "regions read its result more often than it costs to move once"


def flops_of(node: ir.Node, shapes: Shapes) -> int:
    """Operations of one node, every symbolic dim taken as 128; 0 where shapes are not known or nothing is computed."""
    counter = _PRODUCTS.get(node.op_type)
    if counter is not None:
        return counter(node, shapes)
    if is_view(node):
        return 0
    made = sum(_count(value, shapes) for value in node.outputs[:1])
    if cost_of(node):
        return cost_of(node) * made
    read = max((_count(value, shapes) for value in node.inputs if value is not None), default=0)
    return ROW_COST * max(made, read) if node.outputs and read else 0


def _count(value: ir.Value | None, shapes: Shapes) -> int:
    shape = None if value is None else shapes.shape(value)
    return 0 if shape is None else sample_count(shape)


def _dim(node: ir.Node, position: int, axis: int, shapes: Shapes) -> int:
    """One dim of an input; 0 where it is not known."""
    value = node.inputs[position] if position < len(node.inputs) else None
    shape = None if value is None else shapes.shape(value)
    if shape is None or not -len(shape) <= axis < len(shape):
        return 0
    return sample_count((shape[axis],))


def _matmul(node: ir.Node, shapes: Shapes) -> int:
    axis = -2 if int(attribute(node, "transA", 0)) else -1
    return 2 * _count(node.outputs[0], shapes) * _dim(node, 0, axis, shapes)


def _conv(weight: int) -> Callable[[ir.Node, Shapes], int]:
    def count(node: ir.Node, shapes: Shapes) -> int:
        kernel = node.inputs[weight]
        filters = max(_dim(node, weight, 0, shapes), 1)
        return 2 * _count(node.outputs[0], shapes) * _count(kernel, shapes) // filters

    return count


def _einsum(node: ir.Node, shapes: Shapes) -> int:
    """The product of all index sizes, times the operands: exact for two operands."""
    sizes: dict[str, int] = {}
    equation = str(attribute(node, "equation", "")).replace(" ", "")
    for term, value in zip(equation.partition("->")[0].split(","), node.inputs, strict=False):
        shape = None if value is None else shapes.shape(value)
        if shape is None or len(shape) != len(term):
            return 0
        sizes.update(
            {name: max(sizes.get(name, 1), sample_count((dim,))) for name, dim in zip(term, shape, strict=True)}
        )
    total = len(node.inputs)
    for size in sizes.values():
        total *= size
    return total


def _attention(node: ir.Node, shapes: Shapes) -> int:
    """Scores and weighted sum of an attention operator with separate q, k and v."""
    keys = _dim(node, 1, -2, shapes) or _dim(node, 0, -2, shapes)
    return 4 * _count(node.inputs[0], shapes) * keys


_PRODUCTS: Mapping[str, Callable[[ir.Node, Shapes], int]] = {
    **dict.fromkeys(("MatMul", "Gemm", "FusedMatMul", "TransposeMatMul", "MatMulInteger", "MatMulNBits"), _matmul),
    **dict.fromkeys(("QLinearMatMul", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QGemm"), _matmul),
    **dict.fromkeys(("Conv", "ConvInteger", "ConvTranspose", "FusedConv"), _conv(1)),
    "QLinearConv": _conv(3),
    "Einsum": _einsum,
    **dict.fromkeys(("Attention", "MultiHeadAttention", "GroupQueryAttention", "FlexAttention"), _attention),
}
