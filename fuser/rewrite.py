"""Puts fused nodes into a model: every region becomes one node of domain `tilefuse` with its original body as function.

Comes in: a loaded model and one `Replacement` per region. Goes out: the model, changed in place. It is valid ONNX that
runs without any library, through the functions; its inputs and outputs are what they were.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes import common

from fuser.body import DOMAIN, RewriteError, function_of
from fuser.expand.apply import own_names
from fuser.graph import captured, release
from fuser.packing import Packing, Storage, storages
from fuser.region import Region
from fuser.shapes import Shapes, infer
from tilecore.contract.expr import Const, Expr

VERSION = 1  # of the domain
IR_VERSION = 8  # the oldest that has model-local functions


@dataclass(frozen=True, slots=True)
class Replacement:
    """A region, the operator that takes its place, and which inputs that wants packed into panels."""

    region: Region
    op_type: str
    panels: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The model, and the names to register kernels under.

    `op_types` has the operator of each replacement, in order. It is the replacement's own, unless an earlier one of
    that name has a different body: then it is another name for the same kernel; `aliases` maps it to the kernel's.
    """

    model: ir.Model
    op_types: tuple[str, ...]
    aliases: Mapping[str, str]


def rewrite(model: ir.Model, replacements: Sequence[Replacement]) -> Rewritten:
    """Replace all regions. `model` is changed. RewriteError or PackingError when a region cannot be replaced."""
    if not replacements:
        return Rewritten(model, (), {})
    shapes = infer(model)
    packings = [storages(r.region, r.panels, shapes) for r in replacements]
    functions: dict[str, ir.Function] = {}
    op_types: list[str] = []
    for replacement, packed in zip(replacements, packings, strict=True):
        op_types.append(_register(replacement, packed, functions, shapes, model))
    surgery = _Surgery(model, shapes, {}, {})
    for replacement, packed, op_type in zip(replacements, packings, op_types, strict=True):
        surgery.replace(replacement.region, op_type, packed)
    model.functions.update({function.identifier(): function for function in functions.values()})
    model.graph.opset_imports[DOMAIN] = VERSION
    model.ir_version = max(model.ir_version, IR_VERSION)
    for replacement in replacements:
        _let_go(replacement.region)
    for graph in model.graphs():
        graph.sort()
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedFunctionsPass()(model)
    aliases = {new: r.op_type for new, r in zip(op_types, replacements, strict=True) if new != r.op_type}
    return Rewritten(model, tuple(op_types), aliases)


def _let_go(region: Region) -> None:
    """Nodes that nothing needs any more stop reading values of outer graphs in their bodies."""
    dead: set[ir.Node] = set()
    for node in reversed(region.nodes):
        users = {use.node for value in node.outputs for use in value.uses()}
        if users - dead or any(value.is_graph_output() for value in node.outputs):
            continue
        dead.add(node)
        release(node)


def _register(
    replacement: Replacement,
    packed: Mapping[int, Storage],
    functions: dict[str, ir.Function],
    shapes: Shapes,
    model: ir.Model,
) -> str:
    """Add the region's function unless an equal one is there; gives its name."""
    name = replacement.op_type
    opsets = model.graph.opset_imports
    function = function_of(replacement.region, name, packings=packed, shapes=shapes, opsets=opsets)
    body = _bytes(function)
    if name in functions and _bytes(functions[name]) != body:
        name = f"{name}_{hashlib.sha256(body).hexdigest()[:8]}"
        function.name = name
    functions.setdefault(name, function)
    return name


def _bytes(function: ir.Function) -> bytes:
    return ir.to_proto(function).SerializeToString(deterministic=True)


@dataclass(slots=True)
class _Surgery:
    """The graph while regions are being replaced. `moved` maps values of replaced regions to fused nodes' outputs."""

    model: ir.Model
    shapes: Shapes
    moved: dict[ir.Value, ir.Value]
    packed: dict[tuple[object, ...], ir.Value]

    def replace(self, region: Region, op_type: str, packings: Mapping[int, Storage]) -> None:
        """Put one node in the place of a region. What only the region needed dies later."""
        last = region.nodes[-1]
        graph = last.graph
        if graph is None or any(node.graph is not graph for node in region.nodes):
            raise RewriteError(f"{region.label}: its nodes are not all in one graph")
        inputs = [self._input(value, packings.get(index)) for index, value in enumerate(region.inputs)]
        self._check_convex(region, inputs)
        self._check_types(region, packings)
        outputs = [self._output(value, value in region.stored) for value in region.outputs]
        node = ir.Node(DOMAIN, op_type, inputs, outputs=outputs, name=self._name(region))
        node.metadata_props["tilefuse.label"] = region.label
        node.metadata_props["tilefuse.nodes"] = ", ".join(own_names(region.nodes))
        if region.predicted is not None:
            node.metadata_props["tilefuse.predicted"] = region.predicted.text
        graph.insert_after(last, node)
        for old, new in zip(region.outputs, outputs, strict=True):
            name = old.name
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            old.name = f"{name}.unfused"  # it may live on when a node outside needs another output of its producer
            new.name = name
            self.moved[old] = new

    def _input(self, value: ir.Value, packed: Storage | None) -> ir.Value:
        element = self.shapes.dtype(value)
        value = self.moved.get(value, value)
        if value.type is None and element is not None:
            value.type = ir.TensorType(element)  # the file tells what kernels read, in bodies too
        tensor = value.const_value
        if packed is None or tensor is None:
            return value
        place = (tensor.location, tensor.offset, tensor.path) if isinstance(tensor, ir.ExternalTensor) else id(tensor)
        key = (place, packed)
        if key not in self.packed:
            name = f"{value.name}.{'panels' if isinstance(packed, Packing) else packed.dtype}{len(self.packed)}"
            panels = ir.Value(name=name, shape=ir.Shape(packed.panels), type=ir.TensorType(packed.kind))
            panels.const_value = packed.packed(tensor, name)
            self.model.graph.register_initializer(panels)
            self.packed[key] = panels
        return self.packed[key]

    def _check_types(self, region: Region, packings: Mapping[int, Storage]) -> None:
        """Only what is packed, or stored by a fused node, may be of another type than the model has."""
        for index, (value, tensor) in enumerate(zip(region.inputs, region.spec.inputs, strict=True)):
            found = ir.DataType.BFLOAT16 if value in region.stored else self.shapes.dtype(value)
            if found is not None and int(found) != tensor.dtype.row.onnx and index not in packings:
                raise RewriteError(f"{region.label}: its kernel reads {value.name!r} as {tensor.dtype}; it is {found}")

    def _output(self, value: ir.Value, rounded: bool) -> ir.Value:
        """The fused node's output: as declared when it is a graph output, with symbolic dims elsewhere."""
        dtype, shape = value.type, value.shape
        known, element = self.shapes.shape(value), self.shapes.dtype(value)
        if known is not None and (shape is None or not value.is_graph_output()):
            shape = ir.Shape([_dim(size) for size in known])
        if element is not None and (dtype is None or not value.is_graph_output()):
            dtype = ir.TensorType(ir.DataType.BFLOAT16 if rounded else element)
        return ir.Value(name=f"{value.name}.fused", type=dtype, shape=shape, metadata_props=dict(value.metadata_props))

    def _name(self, region: Region) -> str:
        """The node's name: the kind of region and where it is, by its last node."""
        return f"tilefuse/{region.kind}/{region.nodes[-1].name or region.outputs[0].name}"

    def _check_convex(self, region: Region, inputs: Sequence[ir.Value]) -> None:
        """No input may depend on an output."""
        outputs = set(region.outputs)
        seen: set[ir.Value] = set()
        stack = list(inputs)
        while stack:
            value = stack.pop()
            if value in outputs:
                raise RewriteError(f"{region.label}: one of its inputs depends on its output {value.name!r}")
            if value in seen:
                continue
            seen.add(value)
            producer = value.producer()
            if producer is not None:
                stack.extend(source for source in producer.inputs if source is not None)
                stack.extend(captured(producer))


def _dim(size: Expr) -> int | str:
    return int(size.value) if isinstance(size, Const) else str(size)
