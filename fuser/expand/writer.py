"""Writes the definition of one operator as an ONNX function, in operators of the model's own opset.

Comes in: the node, what is known of its inputs, and the model's opset. Goes out: an `ir.Function` with the node's
inputs and outputs. Invariant: only operators that stand at the model's opset are used, each in the form that it has
there (axes as attributes or as inputs).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from fuser.element import attribute
from fuser.shapes import Shapes
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr

DOMAIN = "tilefuse.form"  # of the functions, while they are being put in


class FormError(ValueError):
    """A use of an operator that has no definition here; the message says what was found and what is supported."""


@dataclass(slots=True)
class Form:
    """A call of an operator, and its definition while it is written; `parameters` are its formal inputs."""

    node: ir.Node
    shapes: Shapes
    opset: int
    version: int  # the opset version of the node's own domain
    parameters: list[ir.Value] = field(default_factory=list[ir.Value])
    nodes: list[ir.Node] = field(default_factory=list[ir.Node])
    captured: list[ir.Value] = field(default_factory=list[ir.Value])  # what the node's graphs read: inputs that follow

    def __post_init__(self) -> None:
        self.parameters = [ir.Value(name=f"{self.name}/input_{i}") for i, _ in enumerate(self.node.inputs)]

    @property
    def name(self) -> str:
        """What the node is called in names and messages."""
        return self.node.name or self.node.outputs[0].name or self.node.op_type

    # -- the call -----------------------------------------------------------------------------------------------------

    def has(self, position: int) -> bool:
        """Whether input `position` is given."""
        return position < len(self.node.inputs) and self.node.inputs[position] is not None

    def gives(self, position: int) -> bool:
        """Whether output `position` is asked for."""
        return position < len(self.node.outputs) and bool(self.node.outputs[position].name)

    def input(self, position: int) -> ir.Value:
        """Formal input `position`. FormError when it is left out."""
        if not self.has(position):
            raise FormError(f"its input {position} is missing")
        return self.parameters[position]

    def shape(self, position: int) -> tuple[Expr, ...]:
        """The shape of input `position`. FormError when it is unknown or left out."""
        value = self.node.inputs[position] if self.has(position) else None
        shape = None if value is None else self.shapes.shape(value)
        if shape is None:
            raise FormError(f"the shape of its input {position} is not known")
        return shape

    def rank(self, position: int) -> int:
        """The rank of input `position`."""
        return len(self.shape(position))

    def size(self, position: int, axis: int) -> int:
        """A dim of input `position` that must be a number. FormError when it is not."""
        dim = self.shape(position)[axis]
        if not isinstance(dim, Const):
            raise FormError(f"dim {axis} of its input {position} is {dim}; it has to be a number")
        return int(dim.value)

    def vector_or_number(self, position: int) -> ir.Value:
        """Input `position` as a vector, or a scalar where it has one element. FormError for more axes."""
        shape = self.shape(position)
        if len(shape) > 1:
            raise FormError(f"its input {position} has {len(shape)} axes; a number or a vector is supported")
        one = len(shape) == 1 and shape[0] == Const(1, DType.I64)
        return self.scalar(self.input(position)) if one else self.input(position)

    def dtype(self, position: int) -> ir.DataType:
        """The element type of input `position`. FormError when it is unknown or left out."""
        value = self.node.inputs[position] if self.has(position) else None
        dtype = None if value is None else self.shapes.dtype(value)
        if dtype is None:
            raise FormError(f"the element type of its input {position} is not known")
        return dtype

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute, or `default`."""
        return attribute(self.node, name, default)

    def refuse_attributes(self, **plain: Any) -> None:
        """FormError when an attribute has another value than the one that is supported."""
        for name, value in plain.items():
            found = self.attribute(name, value)
            if found != value:
                raise FormError(f"its attribute {name} is {found!r}; only {value!r} is supported")

    def refuse_inputs(self, **positions: int) -> None:
        """FormError when one of these optional inputs is given."""
        for name, position in positions.items():
            if self.has(position):
                raise FormError(f"its input {name} is not supported: leave it out")

    # -- the definition -----------------------------------------------------------------------------------------------

    def ops(self, op_type: str, inputs: Sequence[ir.Value | None], count: int, **attributes: Any) -> list[ir.Value]:
        """A node of the standard domain with `count` outputs."""
        number = len(self.nodes)
        given = [ir.convenience.convert_attribute(name, value) for name, value in attributes.items()]
        name = f"{self.name}/{op_type}_{number}"
        outputs = [ir.Value(name=name if count == 1 else f"{name}_{i}") for i in range(count)]
        self.nodes.append(ir.Node("", op_type, inputs, given, outputs=outputs, name=name))
        return outputs

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """A node with one output."""
        return self.ops(op_type, inputs, 1, **attributes)[0]

    def constant(self, array: np.ndarray, dtype: ir.DataType | None = None) -> ir.Value:
        """A constant; `dtype` for types that numpy does not have itself."""
        tensor = ir.tensor(array) if dtype is None else ir.tensor(array.astype(dtype.numpy()), dtype=dtype)
        return self.op("Constant", value=tensor)

    def number(self, value: float, like: ir.DataType) -> ir.Value:
        """A scalar of a float type."""
        return self.constant(np.array(value), like)

    def ints(self, *values: int) -> ir.Value:
        """A vector of int64."""
        return self.constant(np.array(values, np.int64))

    def integer(self, value: int) -> ir.Value:
        """A scalar int64."""
        return self.constant(np.array(value, np.int64))

    def dim(self, value: ir.Value, axis: int) -> ir.Value:
        """One dim of a value, as a vector of one element."""
        return self.op("Gather", self.op("Shape", value), self.ints(axis), axis=0)

    def scalar(self, vector: ir.Value) -> ir.Value:
        """The element of a vector of one element, as a scalar."""
        return self.squeeze(vector, 0)

    def squeeze(self, value: ir.Value, *axes: int) -> ir.Value:
        """Squeeze in the form of the opset."""
        if self.opset < 13:
            return self.op("Squeeze", value, axes=axes)
        return self.op("Squeeze", value, self.ints(*axes))

    def unsqueeze(self, value: ir.Value, *axes: int) -> ir.Value:
        """Unsqueeze in the form of the opset."""
        if self.opset < 13:
            return self.op("Unsqueeze", value, axes=axes)
        return self.op("Unsqueeze", value, self.ints(*axes))

    def mean(self, value: ir.Value, axis: int) -> ir.Value:
        """ReduceMean over one axis, which stays as 1, in the form of the opset."""
        if self.opset < 18:
            return self.op("ReduceMean", value, axes=(axis,), keepdims=1)
        return self.op("ReduceMean", value, self.ints(axis), keepdims=1)

    def split(self, value: ir.Value, sizes: Sequence[int], axis: int) -> list[ir.Value]:
        """Split into known sizes in the form of the opset."""
        if self.opset < 13:
            return self.ops("Split", [value], len(sizes), split=tuple(sizes), axis=axis)
        return self.ops("Split", [value, self.ints(*sizes)], len(sizes), axis=axis)

    def slice(self, value: ir.Value, start: int, end: int, axis: int, step: int = 1) -> ir.Value:
        """A slice with literal bounds."""
        if self.opset < 10:
            if step != 1:
                raise FormError(f"slices with a step need opset 10; the model has {self.opset}")
            return self.op("Slice", value, starts=(start,), ends=(end,), axes=(axis,))
        return self.op("Slice", value, self.ints(start), self.ints(end), self.ints(axis), self.ints(step))

    def reshape(self, value: ir.Value, *sizes: "int | ir.Value") -> ir.Value:
        """Reshape to sizes that are numbers (0 keeps the dim, −1 is what is left) or vectors of one element."""
        if all(isinstance(size, int) for size in sizes):
            return self.op("Reshape", value, self.ints(*(size for size in sizes if isinstance(size, int))))
        return self.op("Reshape", value, self.vector(*sizes))

    def vector(self, *sizes: "int | ir.Value") -> ir.Value:
        """Sizes as one vector."""
        return self.op("Concat", *(self.ints(s) if isinstance(s, int) else s for s in sizes), axis=0)

    def range(self, length: ir.Value) -> ir.Value:
        """0, 1, … below `length`, a scalar int64."""
        if self.opset < 11:
            raise FormError(f"its positions need Range of opset 11; the model has opset {self.opset}")
        return self.op("Range", self.integer(0), length, self.integer(1))

    def larger(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """The maximum of integers, which Max takes since opset 12."""
        return self.op("Max", a, b) if self.opset >= 12 else self.op("Where", self.op("Less", a, b), b, a)

    def smaller(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """The minimum of integers, which Min takes since opset 12."""
        return self.op("Min", a, b) if self.opset >= 12 else self.op("Where", self.op("Less", a, b), a, b)

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Cast to a type."""
        return self.op("Cast", value, to=int(dtype))

    def function(self, key: str, outputs: Sequence[ir.Value | None]) -> ir.Function:
        """The function, with one output per output of the node that is asked for."""
        given = [value for i, value in enumerate(outputs) if value is not None and self.gives(i)]
        if len(given) != sum(self.gives(i) for i in range(len(self.node.outputs))):
            raise FormError("one of its outputs has no definition")
        graph = ir.Graph(self.parameters, given, nodes=self.nodes, opset_imports={"": self.opset}, name=key)
        return ir.Function(DOMAIN, key, graph=graph, attributes=())
