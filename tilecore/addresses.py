"""Addresses: where the elements of tiles, views and tensors lie in flat memory, and which loads need a guard.

`Addresses` is built once per program from the plan; `resolve` turns a tile-level expression into one whose loads
address `Memory`. A load that is not proved inside its tensor is guarded: outside it gives 0, as the IR says.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tilecore.contract.dtype import DType
from tilecore.contract.expr import (
    Expr,
    Load,
    Var,
    apply,
    binary,
    const,
    nonnegative,
    rewrite,
    select,
    substitute,
)
from tilecore.contract.panel import PANEL
from tilecore.contract.spec import Place, Tensor, View, extents_at
from tilecore.infer import Plan
from tilecore.ir import Buffer
from tilecore.loops import Memory
from tilecore.target import BLOCK

LINE = 64  # bytes of a line of the caches
CROWDED = 8 * LINE  # rows a multiple of this apart lie in an eighth of a cache's sets, or in fewer


def ceil_to(extent: Expr, multiple: int) -> Expr:
    """`extent` rounded up to a multiple."""
    return (extent + (multiple - 1)) // multiple * multiple


def flat_offset(index: tuple[Expr, ...], shape: tuple[Expr, ...]) -> Expr:
    """Row-major offset of `index` in a dense tensor of `shape`."""
    offset: Expr = const(0)
    for position, extent in zip(index, shape, strict=True):
        offset = offset * extent + position
    return offset


@dataclass(frozen=True, slots=True)
class Slot:
    """A buffer's memory: `size` elements per copy of it, `count` copies (more than one when copies are kept)."""

    memory: Memory
    size: Expr
    shift: Expr  # offset of the copy in use


@dataclass(frozen=True, slots=True)
class Addresses:
    """Flat memories of a program's tensors and buffers."""

    plan: Plan
    tensors: Mapping[str, Memory]
    slots: Mapping[str, Slot]

    def offset(self, buffer: Buffer, index: tuple[Expr, ...]) -> Expr:
        """Element offset of `buffer[index]`, its slot's shift included."""
        return self.slots[buffer.name].shift + layout_offset(self.plan, buffer, index)

    def load(self, buffer: Buffer, index: tuple[Expr, ...]) -> Expr:
        """The load of one element of a buffer."""
        return Load(self.slots[buffer.name].memory, (self.offset(buffer, index),))

    def resolve(self, expr: Expr) -> Expr:
        """`expr` with every load in terms of flat memory, guarded where it is not proved inside."""

        def change(node: Expr) -> Expr | None:
            if not isinstance(node, Load):
                return None
            match node.source:
                case Buffer() as buffer:
                    return self.load(buffer, _clamped(node.index, buffer.shape))
                case View() as view:
                    inside = self.resolve(self.view_element(view, node.index))
                    return _guarded(inside, node.index, self.extents(view, node.index))
                case Tensor() as tensor:
                    return _guarded(self.tensor_element(tensor, node.index), node.index, tensor.shape)
                case _:
                    return None

        return rewrite(expr, change)

    def extents(self, operand: View | Place, index: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """The extents of a view or place where it is walked at `index`."""
        return tuple(map(self.resolve, extents_at(operand, index)))

    def view_element(self, view: View, index: tuple[Expr, ...]) -> Expr:
        """The view's program at `index`, without a guard; still in terms of tensors."""
        at: dict[Expr, Expr] = dict(zip(view.axes, index, strict=True))
        return substitute(view.value, at)

    def tensor_element(self, tensor: Tensor, index: tuple[Expr, ...]) -> Load:
        """One element of a tensor, without a guard."""
        return Load(self.tensors[tensor.name], (flat_offset(index, tensor.shape),))

    def place(self, place: Place, index: tuple[Expr, ...]) -> tuple[Memory, Expr, Expr | None]:
        """Memory, offset and guard of a store to a place: dropped outside its extents."""
        at: dict[Expr, Expr] = dict(zip(place.axes, index, strict=True))
        target = tuple(substitute(position, at) for position in place.index)
        guard = conjunction(conditions(index, self.extents(place, index)))
        return self.tensors[place.tensor.name], flat_offset(target, place.tensor.shape), guard

    def unguarded(self, view: View, index: tuple[Expr, ...]) -> Load | None:
        """The single plain load that the view is at `index`, if every position is proved inside the tensor.

        Rows may begin where an input says.
        """
        value = self.view_element(view, index)
        if not isinstance(value, Load) or not isinstance(value.source, Tensor):
            return None
        index = tuple(map(self.resolve, value.index))
        return None if conditions(index, value.source.shape) else self.tensor_element(value.source, index)


def layout_offset(plan: Plan, buffer: Buffer, index: tuple[Expr, ...]) -> Expr:
    """Element offset inside one copy of a buffer, by its layout."""
    layout = plan.layouts[buffer.name]
    if layout.kind == "panels":
        column, depth = index[layout.column], index[1 - layout.column]
        start = column // PANEL * panel_size(plan, buffer)
        if buffer.dtype is DType.BF16:  # in pairs of the summed axis
            return start + depth // 2 * (2 * PANEL) + column % PANEL * 2 + depth % 2
        return start + depth * PANEL + column % PANEL
    if len(index) == 1:
        return index[0]
    return flat_offset(index, (*buffer.shape[:-1], row_stride(buffer)))


def row_stride(buffer: Buffer) -> Expr:
    """Elements between rows of a buffer in rows layout: whole panels, so that vectors may run past the last column.

    Rows that would share few sets of a cache get a line between them: products read and write up to 32 at once.
    """
    columns = ceil_to(buffer.shape[-1], PANEL)
    if len(buffer.shape) != 2 or buffer.dtype not in (DType.BF16, DType.F32):
        return columns
    crowded = binary("mod", columns, const(CROWDED // buffer.dtype.row.bytes)) == const(0)
    return columns + LINE // buffer.dtype.row.bytes if crowded else columns


def panel_size(plan: Plan, buffer: Buffer) -> Expr:
    """Elements of one packed panel of a buffer: whole pairs of bf16."""
    depth = buffer.shape[1 - plan.layouts[buffer.name].column]
    return (ceil_to(depth, 2) if buffer.dtype is DType.BF16 else depth) * PANEL


def slot_size(plan: Plan, buffer: Buffer) -> Expr:
    """Elements of one copy of a buffer, padding included: tile registers read whole blocks of rows."""
    layout = plan.layouts[buffer.name]
    if layout.kind == "panels":
        return (buffer.shape[layout.column] + (PANEL - 1)) // PANEL * panel_size(plan, buffer)
    size = row_stride(buffer)
    for extent in buffer.shape[:-1]:
        size = size * (ceil_to(extent, BLOCK) if plan.target.amx and buffer.dtype is DType.BF16 else extent)
    return size


def conditions(index: tuple[Expr, ...], shape: tuple[Expr, ...]) -> list[Expr]:
    """What is left to test for `index` to lie inside `shape`."""
    tests: list[Expr] = []
    for position, extent in zip(index, shape, strict=True):
        if not nonnegative(position):
            tests.append(binary("ge", position, const(0)))
        if not nonnegative(extent - position - 1):
            tests.append(binary("lt", position, extent))
    return tests


def conjunction(tests: list[Expr]) -> Expr | None:
    """All of `tests`, or None when there are none."""
    result: Expr | None = None
    for test in tests:
        result = test if result is None else apply("and", result, test)
    return result


def _clamped(index: tuple[Expr, ...], shape: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """`index` moved inside where it is not proved to be: a test around it drops what is read there then."""
    safe: list[Expr] = []
    for position, extent in zip(index, shape, strict=True):
        low = position if nonnegative(position) else binary("max", position, const(0))
        safe.append(low if nonnegative(extent - position - 1) else binary("min", low, extent - 1))
    return tuple(safe)


def _guarded(value: Expr, index: tuple[Expr, ...], shape: tuple[Expr, ...]) -> Expr:
    guard = conjunction(conditions(index, shape))
    if guard is None:
        return value
    zero = const(False) if value.dtype is DType.BOOL else const(0, value.dtype)
    return select(guard, value, zero)


def live_var(name: str, extent: Expr) -> Var:
    """An index variable for a loop over the live elements of an axis."""
    return Var(name, extent=extent)
