"""One node as a shape rule sees it: its inputs' shapes and contents, its attributes, and dim arithmetic.

Comes in: a node and what is known of its inputs. Goes out, from the accessors: expressions, or None where unknown.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import onnx_ir as ir

from fuser.dims import Dims, Shape, integer
from tilecore.contract.dtype import DType, from_numpy
from tilecore.contract.expr import Const, Expr

Content = np.ndarray  # of object dtype: an Expr per element, 0-d for a scalar
CONTENT_LIMIT = 1024  # elements: shape plumbing is far smaller


@dataclass(slots=True)
class Known:
    """What inference has found so far, per value."""

    shapes: dict[ir.Value, Shape] = field(default_factory=dict[ir.Value, Shape])
    contents: dict[ir.Value, Content] = field(default_factory=dict[ir.Value, Content])
    dtypes: dict[ir.Value, ir.DataType] = field(default_factory=dict[ir.Value, ir.DataType])

    def copy(self) -> "Known":
        """An independent copy."""
        return Known(dict(self.shapes), dict(self.contents), dict(self.dtypes))


@dataclass(frozen=True, slots=True)
class Call:
    """A node whose outputs are being inferred. `version` is the opset version of the node's domain."""

    node: ir.Node
    known: Known
    dims: Dims
    version: int

    def input(self, index: int) -> ir.Value | None:
        """The input value at `index`; None when it is left out."""
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def has(self, index: int) -> bool:
        """True when the input is given."""
        return self.input(index) is not None

    def shape(self, index: int) -> Shape | None:
        """Shape of an input; None when it is unknown or the input is left out."""
        value = self.input(index)
        return None if value is None else self.known.shapes.get(value)

    def shapes(self) -> list[Shape] | None:
        """Shapes of all given inputs; None when one is unknown."""
        found = [self.known.shapes.get(value) for value in self.node.inputs if value is not None]
        return None if any(shape is None for shape in found) else [shape for shape in found if shape is not None]

    def dtype(self, index: int) -> ir.DataType | None:
        """Element type of an input."""
        value = self.input(index)
        return None if value is None else self.known.dtypes.get(value)

    def content(self, index: int) -> Content | None:
        """The elements of a small input as expressions; None when they are not known."""
        value = self.input(index)
        return None if value is None else self.known.contents.get(value)

    def dims_in(self, index: int) -> Shape | None:
        """The elements of a 1-D (or scalar) integer input as a flat tuple."""
        content = self.content(index)
        if content is None or any(e.dtype is not DType.I64 for e in content.flat):
            return None
        return tuple(content.flat)

    def ints_in(self, index: int) -> list[int] | None:
        """The elements of an integer input that is constant."""
        found = self.dims_in(index)
        values = None if found is None else [integer(e) for e in found]
        return None if values is None or None in values else [value for value in values if value is not None]

    def floats_in(self, index: int) -> list[float] | None:
        """The elements of a float input that is constant."""
        content = self.content(index)
        if content is None or not all(isinstance(e, Const) for e in content.flat):
            return None
        return [float(e.value) for e in content.flat]

    def attribute(self, name: str) -> ir.Attr | None:
        """An attribute that has a value."""
        found = self.node.attributes.get(name)
        return None if found is None or found.is_ref() else found

    def integer(self, name: str, default: int = 0) -> int:
        """An int attribute."""
        found = self.attribute(name)
        return default if found is None else found.as_int()

    def integers(self, name: str) -> list[int] | None:
        """An ints attribute; None when it is not there."""
        found = self.attribute(name)
        return None if found is None else list(found.as_ints())

    def string(self, name: str, default: str = "") -> str:
        """A string attribute."""
        found = self.attribute(name)
        return default if found is None else found.as_string()

    def ints_of(self, name: str, index: int) -> list[int] | None:
        """Constant ints that older opsets give as attribute `name` and newer ones as input `index`."""
        found = self.integers(name)
        return self.ints_in(index) if found is None else found

    def fresh(self, label: str = "") -> Expr:
        """A symbol for an output dim of which nothing is known; the same one every time inference comes by."""
        return self.dims.symbol(f"{self.node.outputs[0].name}.{label}" if label else str(self.node.outputs[0].name))


Result = Sequence[Shape | None]  # one entry per output; missing ones are unknown


def constant_of(node: ir.Node) -> ir.TensorProtocol | None:
    """The tensor of a Constant node, in whichever attribute it is; None for strings and sparse tensors."""
    for name, attribute in node.attributes.items():
        if name == "value":
            return attribute.as_tensor()
        if name in ("value_int", "value_ints"):
            return ir.tensor(np.array(attribute.value, np.int64))
        if name in ("value_float", "value_floats"):
            return ir.tensor(np.array(attribute.value, np.float32))
    return None


def contents_of(array: np.ndarray) -> Content | None:
    """A constant array as expressions: integers of any width as i64, floats as they are; None for other types."""
    kind = array.dtype.kind
    if kind not in "biuf":
        return None
    dtype = DType.BOOL if kind == "b" else DType.I64 if kind in "iu" else from_numpy(array.dtype)
    content = np.empty(array.size, object)
    content[:] = _literals(array.tobytes(), array.dtype.str, dtype)
    return content.reshape(array.shape)


@lru_cache(maxsize=1 << 14)
def _literals(data: bytes, numpy: str, dtype: DType) -> tuple[Const, ...]:
    """The elements of an array; inference comes by the same constants several times."""
    return tuple(Const(value, dtype) for value in np.frombuffer(data, numpy).tolist())
