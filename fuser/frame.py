"""The frame of a row program: which element of a value the program is at, in every layout that the value may have.

Comes in: the shape that the program's first reduction is over, and its axes. Goes out: places, an index per value over
the program's row and column. Invariant: a frame's `full` index is a bijection between (row, column) and the elements
of its shape, and `kept` depends on the row alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import onnx_ir as ir

from fuser.element import ONE, ZERO, Index, LiftError, Shape, flatten, shape_of, unflatten
from fuser.shapes import Shapes
from tilecore.contract.expr import Expr, Var, cast, variables
from tilecore.contract.spec import Step


@dataclass(frozen=True, slots=True)
class Rows:
    """A shape split into rows and columns, and the steps so far.

    `full` is the program's element in a tensor of that shape, `kept` the row's in one whose `axes` are 1. `known` has
    the places of values that their shape does not tell.
    """

    shapes: Shapes
    opset: int
    shape: Shape
    axes: tuple[int, ...]
    row: Var
    column: Var
    full: Index
    kept: Index
    steps: list[Step] = field(default_factory=list[Step])
    known: dict[ir.Value, Index] = field(default_factory=dict[ir.Value, Index])

    @classmethod
    def over(cls, shape: Shape, axes: tuple[int, ...], *, shapes: Shapes, opset: int) -> Self:
        """The frame whose columns are the elements along `axes`, all of them together."""
        outer = tuple(dim for axis, dim in enumerate(shape) if axis not in axes)
        row, column = Var("r", extent=_product(outer)), Var("c", extent=_product(tuple(shape[axis] for axis in axes)))
        rows, columns = iter(unflatten(row, outer)), iter(unflatten(column, tuple(shape[axis] for axis in axes)))
        full = tuple(next(columns if axis in axes else rows) for axis in range(len(shape)))
        return cls(shapes, opset, shape, axes, row, column, full, _kept(full, axes))

    def relaid(self, shape: Shape, full: Index, axes: tuple[int, ...]) -> Self:
        """The same rows and columns in another layout, `full` being the program's element there.

        LiftError unless the elements along `axes` are just the columns of one row: the layout has all the elements,
        what is kept does not depend on the column, and there are as many along `axes` as the row has columns.
        """
        kept = _kept(full, axes)
        if _product(shape) != _product(self.shape):
            raise LiftError("it reduces another number of elements than the row program's")
        if any(self.column in variables(index) for index in kept):
            raise LiftError("it reduces along other axes than the row program's")
        if _product(tuple(shape[axis] for axis in axes)) != _product(tuple(self.shape[axis] for axis in self.axes)):
            raise LiftError("it reduces over another number of elements than the row program's")
        return replace(self, shape=shape, axes=axes, full=full, kept=kept)

    def place(self, value: ir.Value) -> Index | None:
        """Where the program's element stands in a value: a known one, or one of the whole shape or of one per row."""
        if value in self.known:
            return self.known[value]
        shape = self.shapes.shape(value)
        if shape == self.shape:
            return self.full
        if shape == tuple(ONE if axis in self.axes else dim for axis, dim in enumerate(self.shape)):
            return self.kept
        if shape == tuple(dim for axis, dim in enumerate(self.shape) if axis not in self.axes):
            return self.dropped
        return None

    def of(self, source: ir.Value, axes: tuple[int, ...], where: Mapping[ir.Value, Index]) -> Self:
        """The frame of a reduction of `source`, which stands at `where` if it is inside. LiftError when it has none."""
        shape = shape_of(source, self.shapes)
        full = where.get(source, self.place(source))
        if full is None:
            raise LiftError("it reduces another shape than the row program's")
        if (shape, full, axes) == (self.shape, self.full, self.axes):
            return self
        return self.relaid(shape, full, axes)

    @property
    def dropped(self) -> Index:
        """The row's index without the reduced axes."""
        return tuple(index for axis, index in enumerate(self.kept) if axis not in self.axes)

    def reduce(self, kind: str, value: Expr) -> Expr:
        """One more reducing step."""
        var = Var(f"{kind}{len(self.steps)}", value.dtype)
        self.steps.append(Step(var, kind, value))
        return var

    def mean(self, value: Expr) -> Expr:
        """The mean over the columns."""
        count = cast(self.column.extent or ONE, value.dtype)
        return self.reduce("sum", value) / count


def _kept(full: Index, axes: tuple[int, ...]) -> Index:
    return tuple(ZERO if axis in axes else index for axis, index in enumerate(full))


def _product(dims: Shape) -> Expr:
    return flatten(tuple(dim - 1 for dim in dims), dims) + 1
