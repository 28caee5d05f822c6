"""Function bodies: what a fused node computes, in standard ONNX operators.

Comes in: a region, what is known of shapes, and how its weights are packed. Goes out: a model-local function of domain
`tilefuse`. Its inputs and outputs are the region's; packed weights are unpacked first; shape arithmetic is rebuilt from
the dims of the inputs. Names are canonical: regions that compute the same thing the same way have equal functions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from fuser.dots import rounds_operands
from fuser.graph import captured
from fuser.packing import Packing, Storage
from fuser.region import Region
from fuser.shape_call import Content
from fuser.shapes import Shapes
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Op, binary, const
from tilecore.contract.panel import PANEL
from tilecore.contract.spec import AttentionSpec, extent_of

DOMAIN = "tilefuse"
COPY_LIMIT = 64 * 1024  # bytes of a constant that a body may hold; larger ones are inputs of the region
HALF = 1 << 26  # integers below its square are doubles
OPERATORS: Mapping[str, str] = {
    "add": "Add", "mul": "Mul", "sub": "Sub", "floordiv": "Div", "mod": "Mod", "min": "Min", "max": "Max",
    "eq": "Equal", "lt": "Less", "le": "LessOrEqual", "and": "And", "or": "Or", "not": "Not", "select": "Where",
    "div": "Div", "floor": "Floor", "ceil": "Ceil", "round": "Round", "sqrt": "Sqrt", "pow": "Pow", "abs": "Abs",
}  # fmt: skip


class RewriteError(RuntimeError):
    """A region that cannot become one node; a fault of this library. The message names the region and the value."""


def function_of(
    region: Region, name: str, *, packings: Mapping[int, Storage], shapes: Shapes, opsets: Mapping[str, int]
) -> ir.Function:
    """The region's nodes as a function called `name`. `packings` are per input index. RewriteError when that fails."""
    body = _Body(region, shapes, opsets.get("", 1))
    inputs = [body.parameter(value, index) for index, value in enumerate(region.inputs)]
    for index, stored in packings.items():
        body.unpack(region.inputs[index], stored)
    for value in region.inputs:
        if value in region.stored:
            body.widen(value)
    for node in region.nodes:
        body.copy(node)
    outputs: list[ir.Value] = []
    for index, value in enumerate(region.outputs):
        result = body.values.get(value)
        if result is None or result.producer() is None:
            raise RewriteError(f"{region.label}: no node of the region computes its output {value.name!r}")
        if value in region.stored:
            result = body.emit("Cast", result, to=int(ir.DataType.BFLOAT16))
        result.name = f"output_{index}"
        outputs.append(result)
    used = {node.domain for node in body.nodes}
    imports = {domain: version for domain, version in opsets.items() if domain in used or domain == ""}
    graph = ir.Graph(inputs, outputs, nodes=body.nodes, opset_imports=imports, name=name)
    return ir.Function(DOMAIN, name, graph=graph, attributes=())


def _same(a: ir.Attr) -> ir.Attr:
    return ir.Attr(a.name, a.type, a.value)


@dataclass(slots=True)
class _Body:
    """A body that is being written. `values` maps the region's values to the body's."""

    region: Region
    shapes: Shapes
    opset: int
    nodes: list[ir.Node] = field(default_factory=list[ir.Node])
    values: dict[ir.Value, ir.Value] = field(default_factory=dict[ir.Value, ir.Value])
    constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = field(
        default_factory=dict[tuple[str, tuple[int, ...], bytes], ir.Value]
    )
    dims: dict[Expr, ir.Value] = field(default_factory=dict[Expr, ir.Value])
    rounded: dict[ir.Value, ir.Value] = field(default_factory=dict[ir.Value, ir.Value])
    count: int = 0

    def parameter(self, value: ir.Value, index: int) -> ir.Value:
        """Input `index` of the function, standing for `value`."""
        parameter = ir.Value(name=f"input_{index}")
        self.values[value] = parameter
        return parameter

    def emit(
        self, op_type: str, *inputs: ir.Value | None, **attributes: int | Sequence[int] | ir.TensorProtocol
    ) -> ir.Value:
        """A node with one output."""
        given = [ir.convenience.convert_attribute(name, value) for name, value in attributes.items()]
        return self._append("", op_type, inputs, given, 1)[0]

    def _append(
        self, domain: str, op_type: str, inputs: Sequence[ir.Value | None], attributes: Sequence[ir.Attr], count: int
    ) -> Sequence[ir.Value]:
        number = len(self.nodes)
        outputs = [ir.Value(name=f"value_{self.count + index}") for index in range(count)]
        self.count += count
        self.nodes.append(ir.Node(domain, op_type, inputs, attributes, outputs=outputs, name=f"{op_type}_{number}"))
        return outputs

    def constant(self, array: np.ndarray, tensor: ir.TensorProtocol | None = None) -> ir.Value:
        """A Constant node; equal ones are shared."""
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self.constants:
            if self.opset < 9 and array.dtype.kind != "f":
                self.constants[key] = self._cast_constant(array)
            else:
                given = ir.Tensor(array, name="") if tensor is None else ir.Tensor(array, dtype=tensor.dtype, name="")
                self.constants[key] = self.emit("Constant", value=given)
        return self.constants[key]

    def _cast_constant(self, array: np.ndarray) -> ir.Value:
        """Integers and bools before opset 9, where Constant holds floats only: doubles hold halves exactly."""

        def whole(part: np.ndarray) -> ir.Value:
            value = self.emit("Constant", value=ir.Tensor(np.asarray(part, np.float64), name=""))
            return self.emit("Cast", value, to=int(ir.DataType.from_numpy(array.dtype)))

        if array.dtype.kind == "b" or array.size == 0 or max(abs(int(array.min())), abs(int(array.max()))) < HALF**2:
            return whole(array)
        high = self.emit("Mul", whole(array // HALF), whole(np.asarray(HALF)))
        return self.emit("Add", high, whole(array % HALF))

    def ints(self, *values: int) -> ir.Value:
        """A constant int64 vector."""
        return self.constant(np.array(values, np.int64))

    # -- weights ------------------------------------------------------------------------------------------------------

    def unpack(self, value: ir.Value, stored: Storage) -> None:
        """What is stored → the tensor that the region's nodes read."""
        result = self._unpanelled(value, stored) if isinstance(stored, Packing) else self.values[value]
        self.values[value] = result
        if stored.dtype is DType.BF16:
            self.widen(value)

    def widen(self, value: ir.Value) -> None:
        """What is stored as bfloat16 → the type that the region's nodes read."""
        kept = self.shapes.dtype(value)
        if kept is not None and kept != ir.DataType.BFLOAT16:
            result = self.emit("Cast", self.values[value], to=int(kept))
            self.rounded[result] = result
            self.values[value] = result

    def _unpanelled(self, value: ir.Value, packing: Packing) -> ir.Value:
        """Panels → matrix → the tensor as it was, of the type that is stored."""
        columns = packing.panels[0] * PANEL
        if packing.group > 1:
            result = self.emit("Transpose", self.values[value], perm=[1, 3, 0, 2])
            result = self.emit("Reshape", result, self.ints(packing.group * packing.panels[1], columns))
            if packing.rows != packing.group * packing.panels[1]:
                result = self._first(result, packing.rows, axis=0)
        else:
            result = self.emit("Transpose", self.values[value], perm=[1, 0, 2])
        if packing.group == 1 and (columns != packing.columns or packing.joined):
            result = self.emit("Reshape", result, self.ints(packing.panels[1], columns))
        if columns != packing.columns:
            result = self._first(result, packing.columns, axis=1)
        if packing.joined:
            result = self._split_bits(result, packing)
        sizes = tuple(packing.digits)
        result = self.emit("Reshape", result, self.ints(*sizes))
        if packing.order != tuple(range(len(packing.order))):
            result = self.emit("Transpose", result, perm=list(packing.order))
        if tuple(sizes[position] for position in packing.order) != packing.shape:
            result = self.emit("Reshape", result, self.ints(*packing.shape))
        return result

    def _first(self, value: ir.Value, count: int, *, axis: int) -> ir.Value:
        if self.opset < 10:
            return self.emit("Slice", value, starts=[0], ends=[count], axes=[axis])
        return self.emit("Slice", value, self.ints(0), self.ints(count), self.ints(axis))

    def _split_bits(self, value: ir.Value, packing: Packing) -> ir.Value:
        """Bytes [stored rows, columns] → the elements [rows, columns] that they hold."""
        bits, each = packing.dtype.bits, 8 // packing.dtype.bits
        levels = self.constant(np.array(1 << bits, np.int32))
        rest, parts = self.emit("Cast", value, to=int(ir.DataType.INT32)), list[ir.Value]()
        for _ in range(each):
            parts.append(self.emit("Unsqueeze", self.emit("Mod", rest, levels), self.ints(1)))
            rest = self.emit("Div", rest, levels)
        result = self.emit("Concat", *parts, axis=1)
        result = self.emit("Reshape", result, self.ints(packing.panels[1] * each, packing.columns))
        if packing.panels[1] * each != packing.rows:
            result = self._first(result, packing.rows, axis=0)
        if packing.dtype.range[0] < 0:  # the upper half of the levels stands for negative numbers
            half = self.constant(np.array(1 << (bits - 1), np.int32))
            result = self.emit("Sub", self.emit("Mod", self.emit("Add", result, half), levels), half)
        return self.emit("Cast", result, to=packing.dtype.row.onnx)

    # -- nodes --------------------------------------------------------------------------------------------------------

    def copy(self, node: ir.Node) -> None:
        """One node of the region."""
        inputs = [None if value is None else self.read(value, node) for value in node.inputs]
        if self.region.narrow and rounds_operands(node, self.shapes):
            inputs[:2] = [self._rounded(value, node.inputs[i]) for i, value in enumerate(inputs[:2])]
        for value in sorted(captured(node), key=lambda value: value.name or ""):
            self.read(value, node)
        attributes = self._attributes(node, self.values)
        outputs = self._append(node.domain, node.op_type, inputs, attributes, len(node.outputs))
        for old, new in zip(node.outputs, outputs, strict=True):
            if not old.name:
                new.name = ""
            self.values[old] = new

    def _rounded(self, value: ir.Value | None, original: ir.Value | None) -> ir.Value | None:
        """An operand of a contraction, to bfloat16 and back."""
        kept = None if original is None else self.shapes.dtype(original)
        if value is None or kept is None or kept == ir.DataType.BFLOAT16:
            return value
        if value not in self.rounded:
            narrow = self.emit("Cast", value, to=int(ir.DataType.BFLOAT16))
            back, spec = self.emit("Cast", narrow, to=int(kept)), self.region.spec
            if isinstance(spec, AttentionSpec) and spec.wide_alone:
                alone = self.dim(binary("eq", extent_of(spec.score_axes[2]), const(1)))
                back = self.emit("Where", alone, value, back)
            self.rounded[value] = back
        return self.rounded[value]

    def _attributes(self, node: ir.Node, values: Mapping[ir.Value, ir.Value]) -> list[ir.Attr]:
        """The node's attributes; subgraphs are copied, with `values` for what they read from outside."""
        found: list[ir.Attr] = []
        for a in node.attributes.values():
            if a.type == ir.AttributeType.GRAPHS:
                raise RewriteError(f"{self.region.label}: node {node.name!r} ({node.op_type}) has lists of subgraphs")
            is_graph = a.type == ir.AttributeType.GRAPH
            found.append(ir.AttrGraph(a.name, self._graph(a.as_graph(), values)) if is_graph else _same(a))
        return found

    def _graph(self, graph: ir.Graph, outer: Mapping[ir.Value, ir.Value]) -> ir.Graph:
        """A copy of a subgraph under canonical names."""
        values = dict(outer)

        def fresh(old: ir.Value) -> ir.Value:
            name = f"value_{self.count}" if old.name else ""
            self.count += 1
            values[old] = ir.Value(name=name, type=old.type, shape=old.shape)
            return values[old]

        inputs = [fresh(value) for value in graph.inputs]
        for value in graph.initializers.values():
            if value.const_value is None:
                raise RewriteError(f"{self.region.label}: the constant {value.name!r} of a subgraph has no data")
            values[value] = self.constant(value.const_value.numpy(), value.const_value)
        nodes: list[ir.Node] = []
        for node in graph:
            sources = [None if value is None else values[value] for value in node.inputs]
            attributes = self._attributes(node, values)
            outputs = [fresh(value) for value in node.outputs]
            name = f"{node.op_type}_{self.count}"
            nodes.append(ir.Node(node.domain, node.op_type, sources, attributes, outputs=outputs, name=name))
        results = [values[value] for value in graph.outputs]
        return ir.Graph(inputs, results, nodes=nodes, name=f"body_{self.count}")

    def read(self, value: ir.Value, node: ir.Node) -> ir.Value:
        """A value that a node of the region reads: an input, an inner value, a constant, or arithmetic on dims."""
        if value not in self.values:
            tensor = value.const_value
            content = self.shapes.content(value)
            if tensor is not None and not value.is_graph_input() and tensor.nbytes <= COPY_LIMIT:
                self.values[value] = self.constant(tensor.numpy(), tensor)
            elif content is not None and self.shapes.dtype(value) is not None:
                self.values[value] = self.content(content, self.shapes.dtype(value))
            else:
                raise RewriteError(
                    f"{self.region.label}: node {node.name!r} ({node.op_type}) reads {value.name!r}, which is no input "
                    "of the region, is not computed in it and is not known"
                )
        return self.values[value]

    # -- arithmetic on dims -------------------------------------------------------------------------------------------

    def content(self, content: Content, dtype: ir.DataType | None) -> ir.Value:
        """A small tensor of known content, from the dims of the inputs."""
        items: list[Expr] = list(content.flat)
        literals = [item for item in items if isinstance(item, Const)]
        if len(literals) == len(items) and dtype is not None:
            array = np.array([item.value for item in literals]).astype(dtype.numpy())
            return self.constant(array.reshape(content.shape))
        runs = [self.dim(item) for item in items]
        result = self.emit("Concat", *runs, axis=0) if len(runs) > 1 else runs[0]
        if content.ndim != 1:
            result = self.emit("Reshape", result, self.ints(*content.shape))
        if dtype is not None and int(dtype) != items[0].dtype.row.onnx:
            result = self.emit("Cast", result, to=int(dtype))
        return result

    def dim(self, expr: Expr) -> ir.Value:
        """An expression over dims of the inputs as a vector of one element."""
        if expr not in self.dims:
            self.dims[expr] = self._dim(expr)
        return self.dims[expr]

    def _dim(self, expr: Expr) -> ir.Value:
        if isinstance(expr, Const):
            return self.constant(np.array([expr.value], expr.dtype.row.numpy))
        for index, value in enumerate(self.region.inputs):
            shape = self.region.spec.inputs[index].shape
            if expr in shape:
                whole = self.emit("Shape", self.values[value])
                return self.emit("Gather", whole, self.ints(shape.index(expr)), axis=0)
        if isinstance(expr, Op) and expr.name == "cast":
            return self.emit("Cast", self.dim(expr.args[0]), to=expr.dtype.row.onnx)
        if isinstance(expr, Op) and expr.name in OPERATORS:
            return self.emit(OPERATORS[expr.name], *(self.dim(arg) for arg in expr.args))
        raise RewriteError(f"{self.region.label}: the dim {expr} cannot be had from the dims of the region's inputs")
