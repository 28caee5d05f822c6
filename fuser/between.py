"""What only operands of products read lies in memory as bfloat16, where `--precision bf16` rounds those anyway.

Comes in: regions whose operands are rounded (`operands.py`). Goes out: the same, where the results of one that every
reader rounds first are stored rounded: the same numbers in half the bytes, and readers need no copy of their own.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from fuser.graph import bodies
from fuser.region import Region
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Op, cast, children, walk
from tilecore.contract.spec import Result, Spec, Tensor, outputs_of, programs_of
from tilecore.contract.tensors import with_tensors

SHAPES_ONLY = frozenset(("Shape", "Size"))  # operators to which an element's type makes no difference


def store_rounded(graph: ir.Graph, regions: Sequence[Region], among: Collection[Region]) -> tuple[Region, ...]:
    """The regions, in their order; `among` are those that will be nodes of `graph`, the others are left as they are."""
    sources = {value: region for region in among for value in region.outputs}
    nodes, fused = _alive(graph, sources)
    readers: dict[ir.Value, list[Region]] = {}
    for region in fused:
        for value in region.inputs:
            readers.setdefault(value, []).append(region)

    def is_rounded_by_all(value: ir.Value) -> bool:
        others = {use.node for use in value.uses() if use.node in nodes and use.node.op_type not in SHAPES_ONLY}
        if others or value.is_graph_output() or not readers.get(value):
            return False
        return all(_rounds(region, value) for region in readers[value])

    rounded = {
        value
        for region in fused
        for value, tensor in zip(region.outputs, outputs_of(region.spec), strict=True)
        if tensor.dtype is DType.F32 and is_rounded_by_all(value)
    }
    return tuple(_stored(region, rounded) if region in among else region for region in regions)


def _alive(graph: ir.Graph, sources: Mapping[ir.Value, Region]) -> tuple[set[ir.Node], set[Region]]:
    """What the graph's outputs need once every region is one node: nodes that stay as they are, and regions."""
    nodes, fused = set[ir.Node](), set[Region]()
    left: list[ir.Value | None] = [*graph.outputs]
    while left:
        value = left.pop()
        region = None if value is None else sources.get(value)
        node = None if value is None or region is not None else value.producer()
        if region is not None and region not in fused:
            fused.add(region)
            left += region.inputs
        if node is not None and node not in nodes:
            nodes.add(node)
            left += node.inputs
            for _, body in bodies(node):
                left.extend(body.outputs)
    return nodes, fused


def _rounds(region: Region, value: ir.Value) -> bool:
    """Whether the region's kernel reads the value by loads that it rounds to bfloat16, and in no other way."""
    tensor = region.spec.inputs[region.inputs.index(value)]
    return region.narrow and region.inputs.count(value) == 1 and _is_rounded(region.spec, tensor)


def _is_rounded(spec: Spec, tensor: Tensor) -> bool:
    def reads(expr: Expr) -> bool:
        return isinstance(expr, Load) and expr.source == tensor

    for program in programs_of(spec):
        if reads(program):
            return False
        for node in walk(program):
            rounds = isinstance(node, Op) and node.name == "cast" and node.dtype is DType.BF16
            if not rounds and any(map(reads, children(node))):
                return False
    return True


def _stored(region: Region, rounded: set[ir.Value]) -> Region:
    """The region with those of its inputs and outputs in bfloat16."""
    spec = region.spec
    own = frozenset(value for value in (*region.inputs, *region.outputs) if value in rounded)
    if not own:
        return region
    inputs = _narrowed(region.inputs, spec.inputs, own)
    places = _narrowed(region.outputs, outputs_of(spec), own)
    spec = with_tensors(spec, inputs, places)
    outputs = tuple(Result(result.place, cast(result.value, result.place.tensor.dtype)) for result in spec.outputs)
    return replace(region, spec=replace(spec, outputs=outputs), stored=own)


def _narrowed(
    values: Sequence[ir.Value], tensors: Sequence[Tensor], own: frozenset[ir.Value]
) -> Mapping[Tensor, Tensor]:
    return {
        tensor: replace(tensor, dtype=DType.BF16) if value in own else tensor
        for value, tensor in zip(values, tensors, strict=True)
    }
