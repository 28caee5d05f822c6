"""What an element rule sees: one output element of one node, and how to read elements of its inputs.

Comes in: a node, an output, one i64 expression per axis of that output. Goes out: the scalar expression of that
element. Invariant: a rule only builds expressions that are exact for every element inside the output's shape.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import onnx_ir as ir

from fuser.shapes import Shapes
from tilecore.contract.dtype import DType, from_onnx
from tilecore.contract.expr import Const, Expr, Op, Sym, Var, const, nonnegative, select

Index = tuple[Expr, ...]
Shape = tuple[Expr, ...]
At = Callable[[ir.Value, Index], Expr]
ONE = const(1)
ZERO = const(0)


class LiftError(ValueError):
    """An element that cannot be written as an expression, or a region that cannot be formed; the message says why.

    `node` is the node at fault where one is, `advice` what would make it fuse, `reached` what a search had found before
    it met the fault, outermost first (see `stage`).
    """

    def __init__(self, reason: str, *, node: ir.Node | None = None, advice: str = "") -> None:
        super().__init__(reason)
        self.node = node
        self.advice = advice
        self.reached: tuple[str, ...] = ()


@contextmanager
def stage(found: str, *, node: ir.Node | None = None) -> Generator[None]:
    """What a search has found: a LiftError from inside says so, and names `node` unless it knows a node itself."""
    try:
        yield
    except LiftError as error:
        error.reached = (found, *error.reached)
        error.node = error.node or node
        raise


def joined(errors: Sequence[LiftError]) -> LiftError:
    """Several failed attempts as one: every reason, and the details of the attempt that got furthest."""
    furthest = max(errors, key=lambda error: len(error.reached))
    result = LiftError(
        "; ".join(dict.fromkeys(str(error) for error in errors)), node=furthest.node, advice=furthest.advice
    )
    result.reached = furthest.reached
    return result


@dataclass(frozen=True, slots=True)
class Element:
    """One element of output `output` of `node`, at `index`; `at` gives elements of inputs."""

    node: ir.Node
    output: int
    index: Index
    at: At
    shapes: Shapes
    opset: int

    def error(self, reason: str, *, advice: str = "") -> LiftError:
        """A LiftError that names this node."""
        return LiftError(f"{self.node.op_type} {self.node.name!r}: {reason}", node=self.node, advice=advice)

    def has(self, position: int) -> bool:
        """Whether input `position` is given."""
        return position < len(self.node.inputs) and self.node.inputs[position] is not None

    def operand(self, position: int) -> ir.Value:
        """Input `position`. LiftError when it is left out."""
        value = self.node.inputs[position] if position < len(self.node.inputs) else None
        if value is None:
            raise self.error(f"input {position} is missing")
        return value

    def shape(self, position: int) -> Shape:
        """Shape of input `position`. LiftError when it is unknown."""
        return shape_of(self.operand(position), self.shapes)

    def dtype(self, position: int) -> DType:
        """Element type of input `position`."""
        return dtype_of(self.operand(position), self.shapes)

    @property
    def result(self) -> ir.Value:
        """The output that the element belongs to."""
        return self.node.outputs[self.output]

    @property
    def result_shape(self) -> Shape:
        """Shape of that output."""
        return shape_of(self.result, self.shapes)

    def read(self, position: int, index: Index) -> Expr:
        """The element of input `position` at `index`."""
        return self.at(self.operand(position), index)

    def broadcast(self, position: int) -> Expr:
        """The element of input `position` that numpy broadcasting pairs with this output element."""
        return self.read(position, broadcast_index(self.index, self.result_shape, self.shape(position)))

    def attribute(self, name: str, default: Any = None) -> Any:
        """The value of an attribute, or `default`."""
        return attribute(self.node, name, default)

    def number(self, name: str, default: float) -> float:
        """The value of a float attribute, or `default`: float32 in either case, which a float64 result shows."""
        return number(self.node, name, default)

    def integers(self, position: int) -> tuple[Expr, ...]:
        """Input `position` as known integers (a flat tuple). LiftError when its content is not known."""
        content = content_of(self.operand(position), self.shapes)
        if content is None:
            raise self.error(f"input {position} ({self.operand(position).name}) is computed at run time")
        return content

    def axis(self, name: str = "axis", *, default: int, rank: int) -> int:
        """An axis attribute, counted from the front."""
        value = int(self.attribute(name, default))
        return value + rank if value < 0 else value


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """The value of attribute `name` of `node`, or `default` when it is not set."""
    found = node.attributes.get(name)
    return default if found is None or found.value is None else found.value


def number(node: ir.Node, name: str, default: float) -> float:
    """The value of a float attribute of `node`, or `default`; ONNX has both in float32."""
    return float(np.float32(attribute(node, name, default)))


def shape_of(value: ir.Value, shapes: Shapes) -> Shape:
    """The shape of a value. LiftError when its rank is unknown."""
    shape = shapes.shape(value)
    if shape is None:
        raise LiftError(
            f"the shape of {value.name!r} is not known",
            node=value.producer(),
            advice=f"record its shape in the model (value_info of {value.name!r}), or export with fixed dims",
        )
    return shape


def content_of(value: ir.Value, shapes: Shapes) -> tuple[Expr, ...] | None:
    """The integers in a small tensor, flat; None when they are not known."""
    content = shapes.content(value)
    if content is None:
        return None
    return tuple(item if isinstance(item, Const | Sym | Var | Op) else const(int(item)) for item in np.ravel(content))


def dtype_of(value: ir.Value, shapes: Shapes) -> DType:
    """The element type of a value. LiftError when it is unknown or one that the compiler does not have."""
    dtype = shapes.dtype(value)
    if dtype is None:
        raise LiftError(
            f"the element type of {value.name!r} is not known",
            node=value.producer(),
            advice=f"record its type in the model (value_info of {value.name!r})",
        )
    try:
        return from_onnx(int(dtype))
    except KeyError:
        raise LiftError(
            f"{value.name!r} is {dtype.name}, which the compiler has no type for",
            node=value.producer(),
            advice=f"store {value.name!r} in a floating-point or integer type of 8 bits or more",
        ) from None


def broadcast_index(index: Index, shape: Shape, source: Shape) -> Index:
    """The index into a `source`-shaped operand that broadcasting pairs with `index` into `shape`.

    A source dim that may be 1 at run time is read under a test, never assumed to be equal.
    """
    picked: list[Expr] = []
    for position, dim in zip(index[len(index) - len(source) :], source, strict=True):
        extent = shape[len(shape) - len(source) + len(picked)]
        if dim == ONE:
            picked.append(ZERO)
        elif dim == extent or nonnegative(dim - 2):
            picked.append(position)
        else:
            picked.append(select(Op("eq", (dim, ONE), DType.BOOL), ZERO, position))
    return tuple(picked)


def flatten(index: Index, shape: Shape) -> Expr:
    """The row-major position of `index` in `shape`."""
    total: Expr = ZERO
    for position, dim in zip(index, shape, strict=True):
        total = total * dim + position
    return total


def unflatten(flat: Expr, shape: Shape) -> Index:
    """The index into `shape` at row-major position `flat`, which lies inside."""
    index: list[Expr] = []
    rest, remaining = flat, [dim for dim in shape if dim != ONE]
    for dim in reversed(shape):
        if dim == ONE:
            index.append(ZERO)
            continue
        remaining.pop()
        index.append(rest % dim if remaining else rest)
        rest = rest // dim
    return tuple(reversed(index))


def reindex(index: Index, source: Shape, target: Shape) -> Index:
    """The index into `target` of the element that has `index` in `source`, when the one is a reshape of the other.

    Runs of dims with equal products are matched first, so that splitting and joining axes leaves the others alone.
    """
    result: list[Expr] = []
    i = j = 0
    while i < len(source) or j < len(target):
        i2, j2 = _match(source[i:], target[j:])
        parts = [(p, d) for p, d in zip(index[i : i + i2], source[i : i + i2], strict=True) if d != ONE]
        wanted = target[j : j + j2]
        if len(parts) == 1 and sum(dim != ONE for dim in wanted) == 1:
            result.extend(ZERO if dim == ONE else parts[0][0] for dim in wanted)
        else:
            flat = flatten(tuple(p for p, _ in parts), tuple(d for _, d in parts))
            result.extend(unflatten(flat, wanted))
        i, j = i + i2, j + j2
    return tuple(result)


@lru_cache(maxsize=1 << 12)
def _match(source: Shape, target: Shape) -> tuple[int, int]:
    """How many leading dims of each have the same product, as few as possible; all of them when none have."""
    left = _products(source)
    right = _products(target)
    for total in range(1, len(source) + len(target)):
        for i in range(max(0, total - len(target)), min(total, len(source)) + 1):
            if left[i] == right[total - i]:
                return i, total - i
    return len(source), len(target)


def _products(shape: Shape) -> list[Expr]:
    products: list[Expr] = [ONE]
    for dim in shape:
        products.append(products[-1] * dim)
    return products
