"""Operands of products that are read where they are: the copy to a tile is left out.

Comes in: a plan and the addresses of its tensors. Goes out: by buffer, where a product finds the operand in memory.
That takes a source that is plain, affine and of the strides that the register tile reads, and elements as they are
stored: constants in panels may be narrower than the tile, as products widen what they read.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilecore.addresses import Addresses, live_var
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Op, Var, const, loads, variables
from tilecore.contract.panel import PANEL
from tilecore.contract.spec import View
from tilecore.graph import read_within, split_affine, tile_axes
from tilecore.infer import Plan
from tilecore.ir import Buffer, Copy, For, Gemm, If, Stmt, Tile, While
from tilecore.loops import Memory, Operand

GROUPS = {DType.BF16: 2, DType.I8: 4, DType.U8: 4}  # rows of panels that lie side by side, by the type in memory
IN_PANELS = {  # types in memory that a product can read panels of, by the type of the tile
    DType.F32: (DType.F32, DType.F16, DType.BF16),
    DType.I16: (DType.I16, DType.I8, DType.U8),
}


@dataclass(frozen=True, slots=True)
class Lying:
    """The right operand of `gemm`, which it can read where it lies, `row` along the sum; the copy that packs it.

    `rounded`: to bf16 on the way.
    """

    gemm: Gemm
    copy: Copy
    operand: Operand
    rounded: bool


def operands_in_place(plan: Plan, addresses: Addresses) -> dict[str, Operand]:
    """Operands whose copy can be left out: the source is plain, affine and of the right strides."""
    found: dict[str, Operand] = {}
    for copy, view, buffer in _copied_once(plan):
        widened = plan.layouts[buffer.name].kind == "panels" and view.dtype in IN_PANELS.get(buffer.dtype, ())
        if buffer.dtype is view.dtype or widened:
            operand = _in_place(copy, view, buffer, plan, addresses)
            if operand:
                found[buffer.name] = operand
    return found


def operands_lying(plan: Plan, addresses: Addresses) -> dict[str, Lying]:
    """Right operands of one product that lie in rows of one of their axes: neighbours are neighbours in memory."""
    found: dict[str, Lying] = {}
    gemms = [node.stmt for node in plan.graph.nodes if isinstance(node.stmt, Gemm)]
    bodies = list(_bodies(plan.program.body))
    for copy, view, buffer in _copied_once(plan):
        readers = [gemm for gemm in gemms if buffer in (gemm.a, gemm.b)]
        if len(readers) != 1 or plan.layouts[buffer.name].kind != "panels":
            continue
        if not any(copy in body and readers[0] in body[body.index(copy) :] for body in bodies):
            continue
        column = plan.layouts[buffer.name].column
        operand = stored_rows(copy, view, buffer, plan, addresses)
        if operand and const(1) in (operand.row, operand.column):
            turned = operand if column == 1 else replace(operand, row=operand.column, column=operand.row)
            rounded = operand.memory.dtype is DType.F32 and view.dtype is DType.BF16
            found[buffer.name] = Lying(readers[0], copy, turned, rounded)
    return found


def stored_rows(copy: Copy, view: View, buffer: Buffer, plan: Plan, addresses: Addresses) -> Operand | None:
    """The matrix of floats in memory that fills packed panels, by the buffer's axes; None where it is computed."""
    if buffer.dtype not in (DType.F32, DType.BF16):
        return None
    kinds = (DType.F32, DType.F16, DType.BF16) if buffer.dtype is DType.F32 else (DType.F32, DType.BF16)
    if view.dtype is DType.BF16:  # rounded on the way, or as it is
        kinds = (DType.F32, DType.BF16)
        match view.value:
            case Op(name="cast", args=(stored,)) if stored.dtype is DType.F32:
                view = replace(view, value=stored)
            case _:
                pass
    elif view.dtype not in IN_PANELS.get(buffer.dtype, ()):
        return None
    first, second = (live_var(name, plan.filled((buffer.name, i), buffer.shape[i])) for i, name in enumerate("rc"))
    load = addresses.unguarded(as_stored(view), source_index(copy, (first, second)))
    return affine_operand(load, first, second) if load and load.dtype in kinds else None


def _bodies(body: tuple[Stmt, ...]) -> Iterator[tuple[Stmt, ...]]:
    yield body
    for stmt in body:
        match stmt:
            case For() | While():
                yield from _bodies(stmt.body)
            case If():
                yield from _bodies(stmt.then)
                yield from _bodies(stmt.otherwise)
            case _:
                pass


def _copied_once(plan: Plan) -> Iterator[tuple[Copy, View, Buffer]]:
    """Copies of whole tiles of two axes that alone fill a buffer, which products alone read, at the same place."""
    writers: dict[str, int] = {}
    other_readers: set[str] = set()
    for node in plan.graph.nodes:
        for buffer in node.writes:
            writers[buffer.name] = writers.get(buffer.name, 0) + 1
        if not isinstance(node.stmt, Gemm):
            other_readers |= {buffer.name for buffer in node.reads}
    for node in plan.graph.nodes:
        copy = node.stmt
        if (
            not isinstance(copy, Copy)
            or not isinstance(copy.src.source, View)
            or not isinstance(copy.dst.source, Buffer)
        ):
            continue
        buffer = copy.dst.source
        if any(isinstance(load.source, Buffer) for start in copy.src.origin for load in loads(start)):
            continue  # where it begins may have changed when the product reads it
        if not read_within(plan.graph, buffer, frozenset[Var]().union(*map(variables, copy.src.origin))):
            continue  # read after the loop, as its last turn left it
        alone = writers[buffer.name] == 1 and buffer.name not in other_readers
        if alone and copy.dst.shape == buffer.shape and len(buffer.shape) == 2:
            yield copy, copy.src.source, buffer


def _in_place(copy: Copy, view: View, buffer: Buffer, plan: Plan, addresses: Addresses) -> Operand | None:
    layout = plan.layouts[buffer.name]
    extents = [plan.filled((buffer.name, i), buffer.shape[i]) for i in (0, 1)]
    if layout.kind == "rows":
        row, column = live_var("row", extents[0]), live_var("column", extents[1])
        load = addresses.unguarded(view, source_index(copy, (row, column)))
        operand = affine_operand(load, row, column) if load else None
        aligned = buffer.dtype is DType.F32 or (operand is not None and operand.column == const(1))
        return operand if aligned else None  # levels of integers are read two at a time
    group = group_of_rows(view)
    if group > 1:
        return _groups_in_place(copy, view, extents, layout.column, addresses, group)
    depth = live_var("depth", extents[1 - layout.column])
    panel = live_var("panel", (extents[layout.column] + (PANEL - 1)) // PANEL)
    lane = live_var("lane", const(PANEL))
    position = panel * PANEL + lane
    load = addresses.unguarded(
        as_stored(view), source_index(copy, (position, depth) if layout.column == 0 else (depth, position))
    )
    if load is None or load.dtype not in IN_PANELS.get(buffer.dtype, ()):
        return None
    if load.dtype in (DType.I8, DType.U8):
        return None  # products read bytes in pairs of rows only
    across, rest = split_affine(load.index[0], lane)
    if rest is None or across != const(1):
        return None
    operand = affine_operand(Load(load.source, (rest,)), panel, depth)
    return operand if operand and operand.column == const(PANEL) else None


def group_of_rows(view: View) -> int:
    """How many rows lie side by side where the view is bytes or bf16 of panels (`contract/panel.py`), else 1."""
    stored = as_stored(view).value
    group = GROUPS.get(stored.dtype, 1)
    grouped = isinstance(stored, Load) and stored.source.shape[2:] == (const(PANEL), const(group))
    return group if grouped else 1


def _groups_in_place(
    copy: Copy, view: View, extents: list[Expr], column: int, addresses: Addresses, group: int
) -> Operand | None:
    """Panels in groups of rows: `row` is from panel to panel, `column` from row to row on average."""
    several = live_var("several", (extents[1 - column] + (group - 1)) // group)
    each = live_var("each", const(group))
    panel = live_var("panel", (extents[column] + (PANEL - 1)) // PANEL)
    lane = live_var("lane", const(PANEL))
    position, depth = panel * PANEL + lane, several * group + each
    load = addresses.unguarded(
        as_stored(view), source_index(copy, (position, depth) if column == 0 else (depth, position))
    )
    if load is None:
        return None
    rest: Expr | None = load.index[0]
    for var, step in ((lane, group), (each, 1), (several, group * PANEL)):
        if rest is None:
            return None
        across, rest = split_affine(rest, var)
        if across != const(step):
            return None
    if rest is None:
        return None
    step, base = split_affine(rest, panel)
    assert isinstance(load.source, Memory)
    return None if base is None else Operand(load.source, base, step, const(PANEL), pairs=True)


def as_stored(view: View) -> View:
    """The view without the cast that widens its elements: products and packing widen what they read."""
    match view.value:
        case Op(name="cast", args=(stored,)) if stored.dtype in IN_PANELS.get(view.dtype, ()):
            return replace(view, value=stored)
        case _:
            return view


def affine_operand(load: Load, row: Var, column: Var) -> Operand | None:
    """The matrix that `load` is of `row` and `column`, None where it is not affine in them."""
    assert isinstance(load.source, Memory)
    row_step, rest = split_affine(load.index[0], row)
    if rest is None:
        return None
    column_step, base = split_affine(rest, column)
    if base is None or column in variables(row_step):
        return None
    return Operand(load.source, base, row_step, column_step)


def source_index(copy: Copy, inner: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Position in the source tile of element `inner` of the destination tile."""
    return index_of(copy.src, copy.dst, inner)


def index_of(outer: Tile, inner_tile: Tile, inner: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Position in `outer` of element `inner` of a tile with as many axes, those of extent 1 left aside."""
    index = list(outer.origin)
    for left, right in tile_axes(outer, inner_tile):
        index[left] = outer.origin[left] + inner[right]
    return tuple(index)
