"""Constant matrices in packed panels, and the ONNX operators that unpack them again.

Comes in: a region and the index of a constant input. Goes out: a `Packing`: the panels (made when somebody reads them),
and how a function body gets the original tensor back, so that one stored copy serves kernel and body.

The kernel's matrix B[k, n] is a view of the constant: rows of all columns (so are the scales of blocks of rows), or of
a run of them, and then panels hold all columns for everyone; or every axis of the constant is a digit of k or of n, as
in split head axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fuser.region import Region
from fuser.shapes import Shapes
from tilecore.contract import panel
from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import Evaluator
from tilecore.contract.expr import Const, Load, Var, loads
from tilecore.contract.spec import View, byte_block_of, extent_of, views_of


class PackingError(ValueError):
    """A constant that cannot be stored in panels; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a constant of `shape` and the matrix [rows, columns] of a kernel correspond.

    `digits` are the extents that rows, then columns, split into, most significant first; `order` lists, per axis of the
    constant (joined where they are one digit), the position of its digit.
    """

    shape: tuple[int, ...]
    rows: int
    columns: int
    digits: tuple[int, ...]
    order: tuple[int, ...]
    dtype: DType
    group: int = 1  # rows that lie side by side
    sums: bool = False  # of the columns, behind them

    @property
    def panels(self) -> tuple[int, ...]:
        """Shape of the packed panels."""
        if self.group > 1:
            groups = panel.groups_of(self.rows, self.group, self.sums)
            return -(-self.columns // panel.PANEL), groups, panel.PANEL, self.group
        return -(-self.columns // panel.PANEL), panel.stored_rows(self.rows, self.dtype.bits), panel.PANEL

    @property
    def joined(self) -> bool:
        """Whether a byte of the panels holds several elements."""
        return self.dtype.bits < 8

    @property
    def kind(self) -> ir.DataType:
        """The element type of the panels."""
        return ir.DataType.UINT8 if self.joined else ir.DataType(self.dtype.row.onnx)

    def matrix(self, tensor: np.ndarray) -> np.ndarray:
        """The kernel's matrix B[k, n] of the constant."""
        sizes = [self.digits[position] for position in self.order]
        back = np.argsort(self.order)
        return tensor.reshape(sizes).transpose(back).reshape(self.rows, self.columns)

    def packed(self, tensor: ir.TensorProtocol, name: str) -> ir.LazyTensor:
        """The panels of a constant, computed whenever they are read."""

        def pack() -> ir.TensorProtocol:
            matrix = self.matrix(tensor.numpy())
            matrix = matrix if self.joined else matrix.astype(self.dtype.row.numpy)  # floats may be stored narrower
            whole = panel.join_bits(matrix, self.dtype.bits) if self.joined else matrix
            return ir.Tensor(panel.pack_groups(whole, self.group, sums=self.sums), dtype=self.kind, name=name)

        return ir.LazyTensor(pack, dtype=self.kind, shape=ir.Shape(self.panels), name=name)


@dataclass(frozen=True, slots=True)
class Narrowing:
    """A constant of floats that is stored as it lies, in a narrower type."""

    panels: tuple[int, ...]  # its shape
    dtype: DType

    @property
    def kind(self) -> ir.DataType:
        """The element type that is stored."""
        return ir.DataType(self.dtype.row.onnx)

    def packed(self, tensor: ir.TensorProtocol, name: str) -> ir.LazyTensor:
        """The rounded constant, computed whenever it is read."""

        def narrow() -> ir.TensorProtocol:
            return ir.Tensor(tensor.numpy().astype(self.dtype.row.numpy), dtype=self.kind, name=name)

        return ir.LazyTensor(narrow, dtype=self.kind, shape=ir.Shape(self.panels), name=name)


Storage = Packing | Narrowing


def storages(region: Region, panels: Sequence[int], shapes: Shapes) -> dict[int, Storage]:
    """How inputs of a region are stored that are not left as they are: those of `panels`, and constants of which the
    spec wants bfloat16. PackingError when one is not a constant matrix in some layout.
    """
    found: dict[int, Storage] = {index: packing(region, index) for index in panels}
    if not region.narrow:
        return found
    for index, (value, tensor) in enumerate(zip(region.inputs, region.spec.inputs, strict=True)):
        constant = None if value.is_graph_input() else value.const_value
        wider = shapes.dtype(value) not in (None, ir.DataType.BFLOAT16)
        if index not in found and constant is not None and tensor.dtype is DType.BF16 and wider:
            found[index] = Narrowing(tuple(int(size) for size in constant.shape.numpy()), DType.BF16)
    return found


def packing(region: Region, index: int) -> Packing:
    """How input `index` of the region is packed. PackingError when it is not a constant matrix in some layout."""
    value = region.inputs[index]
    if value.const_value is None or value.is_graph_input():
        raise PackingError(f"{value.name!r} is not constant: only weights can be packed")
    view, load = _view_of(region, index)
    shape = tuple(int(size) for size in value.const_value.shape.numpy())
    rows, columns = (_size(axis) for axis in view.axes[-2:])
    found = panel.rows_of(load, view)
    if found is not None:
        turned = found.turned > 1
        of_rows = (found.turned, found.count // found.turned) if turned else (found.count,)
        order = (1, 0) if turned else (0,)
        order = (len(of_rows), *order) if found.by_column else (*order, len(of_rows))
        group = panel.group_of(load, view, byte_block_of(region.spec))
        axes, sums = (*of_rows, found.columns), panel.has_sums(load, view)
        return Packing(shape, found.count, found.columns, axes, order, load.dtype, group, sums)
    if rows * columns != int(np.prod(shape, dtype=np.int64)):
        raise PackingError(
            f"{value.name!r} is {shape}; the matrix that is read of it is {rows}×{columns}, not all of it"
        )
    digits: list[tuple[int, int, int, int]] = []  # (0 for k or 1 for n, divisor, extent, axis of the constant)
    for axis, (expr, extent) in enumerate(zip(load.index, shape, strict=True)):
        if extent == 1:
            continue
        along = [_along(load, view, axis, which) for which in (0, 1)]
        which = 0 if along[0].any() else 1
        if along[0].any() == along[1].any():
            raise PackingError(f"{value.name!r}: its axis {axis} is {expr}, which is not made of rows or columns alone")
        divisor = int(np.argmax(along[which] != 0))
        if not np.array_equal(along[which], np.arange(along[which].size) // divisor % extent):
            raise PackingError(f"{value.name!r}: its axis {axis} is {expr}, not a digit of {view.axes[which - 2]}")
        digits.append((which, divisor, extent, axis))
    ranked = sorted(digits, key=lambda digit: (digit[0], -digit[1]))
    _check_complete(value, ranked, rows, columns)
    position = {axis: place for place, (_, _, _, axis) in enumerate(ranked)}
    order = tuple(position[axis] for _, _, _, axis in sorted(digits, key=lambda digit: digit[3]))
    digits_of = tuple(extent for _, _, extent, _ in ranked)
    return Packing(shape, rows, columns, digits_of, order, load.dtype)


def _view_of(region: Region, index: int) -> tuple[View, Load]:
    tensor = region.spec.inputs[index]
    for view in views_of(region.spec):
        found = next((load for load in loads(view.value) if load.source == tensor), None)
        if found is not None:
            return view, found
    raise PackingError(f"no operand of the region reads {tensor.name!r}")


def _size(axis: Var) -> int:
    extent = extent_of(axis)
    if not isinstance(extent, Const):
        raise PackingError(f"axis {axis} of the matrix has the dynamic extent {extent}")
    return int(extent.value)


def _along(load: Load, view: View, axis: int, which: int) -> np.ndarray:
    """The index into one axis of the constant while k (0) or n (1) runs and everything else is 0."""
    running = view.axes[which - 2]
    env = {other: np.zeros(1, np.int64) for other in view.axes}
    env[running] = np.arange(_size(running))
    return np.broadcast_to(Evaluator({}, {})(load.index[axis], env), env[running].shape)


def _check_complete(value: ir.Value, ranked: Sequence[tuple[int, int, int, int]], rows: int, columns: int) -> None:
    """The digits of k make up all of k, those of n all of n; so that the map is one to one."""
    for which, size in ((0, rows), (1, columns)):
        divisor = 1
        for _, step, extent, axis in reversed([digit for digit in ranked if digit[0] == which]):
            if step != divisor:
                raise PackingError(f"{value.name!r}: its axis {axis} steps every {step}, not {divisor}, elements")
            divisor *= extent
        if divisor != size:
            raise PackingError(f"{value.name!r}: its axes make up {divisor} of {size} {'columns' if which else 'rows'}")
