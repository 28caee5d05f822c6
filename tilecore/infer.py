"""Tile inference: completes what the kernel's author left open, by constraints on the tile graph.

Comes in: a concrete program and a target. Goes out: a `Plan`: for every axis class how many elements are live, for
every buffer its layout, for every `Gemm` its register tile, for every `Parallel` its vector axis.

Constraints in order of strength: what an operation demands (a right-hand operand must lie in packed panels, a
register tile must fit the register file), then what edges carry (an axis class has one live extent), then free
choices (the vector axis is the contiguous one). Two strict demands that differ are a conflict that names both uses.

Live extents: the last tile of an axis reaches past the data. Where it does not matter what stands there (nothing
reduces over the axis, or what stands there is neutral for every reduction), all work is cut to the live elements, and
the masks that the kernel's text needs for its meaning are proved away.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Var, binary, const, loads, nonnegative
from tilecore.graph import Axis, TileGraph, build_graph, split_affine, stored_whole
from tilecore.ir import Buffer, Gemm, Parallel, Program, Reduce
from tilecore.needed import class_extents, in_scope, needed_extents, touched_elsewhere
from tilecore.padding import Beyond, not_neutral
from tilecore.span import Span
from tilecore.target import RegisterTile, Target

ProductTypes = tuple[DType, DType, DType]  # of a, b and c of T.gemm
FLOATS: ProductTypes = (DType.F32, DType.F32, DType.F32)
LEVELS: ProductTypes = (DType.I16, DType.I16, DType.I32)
NARROW: ProductTypes = (DType.BF16, DType.BF16, DType.F32)  # where the target has instructions for it


def product_types(target: Target) -> tuple[ProductTypes, ...]:
    """What register tiles of a target multiply."""
    return (FLOATS, LEVELS, NARROW) if target.multiplies_bf16 else (FLOATS, LEVELS)


class InferenceError(ValueError):
    """Two constraints that cannot both hold, or a demand that the target cannot meet; names both uses."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a buffer lies in memory. "rows": row-major, last axis padded to whole panels. "panels": packed panels of
    `column` (the axis whose elements stand side by side), each contiguous along the other axis."""

    kind: str
    column: int
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What inference decided; keyed by buffer name, axis, or the identity of a statement's operands."""

    program: Program
    graph: TileGraph
    target: Target
    live: Mapping[int, Expr]  # axis class → elements that exist, where that is below the extent
    needed: Mapping[int, Expr]  # axis class → elements that can matter, where that is fewer still
    layouts: Mapping[str, Layout]
    register_tile: RegisterTile
    vector_axis: Mapping[Parallel, Var | None]
    tasks: int | None = None  # neighbours that one thread takes at a time; None leaves that to kept copies

    def extent(self, axis: Axis, full: Expr) -> Expr:
        """Elements of `axis` that work must cover."""
        return self.class_extent(self.graph.classes[axis], full)

    def class_extent(self, index: int, full: Expr) -> Expr:
        """Elements of an axis class that work must cover."""
        return self.needed.get(index, self.live.get(index, full))

    def filled(self, axis: Axis, full: Expr) -> Expr:
        """Elements of `axis` that a copy must fill: a kept copy serves tasks that need more than this one does."""
        return self.live.get(self.graph.classes[axis], full)


def infer(program: Program, target: Target) -> Plan:
    """The plan for a concrete program. InferenceError when constraints conflict."""
    graph = build_graph(program)
    _check_reductions(graph)
    layouts = _layouts(graph, annotated_layouts(program), target)
    given = {note.subject: int(note.value) for note in program.annotations if note.what == "vector_axis"}  # type: ignore[arg-type]
    vector_axis = {
        node.stmt: _given_axis(node.stmt, given) or choose_vector_axis(node.stmt, layouts)
        for node in graph.nodes
        if isinstance(node.stmt, Parallel)
    }
    live = _live_extents(graph)
    needed = needed_extents(graph, live)
    return Plan(
        program, graph, target, live, needed, layouts, register_tile(program, target), vector_axis, tasks_of(program)
    )


def describe_plan(plan: Plan) -> str:
    """The plan as text: what each axis class covers, how each buffer lies, and the register tile."""
    lines = [f"register tile {plan.register_tile.rows} rows × {plan.register_tile.vectors} vectors, {plan.target.name}"]
    for buffer in plan.program.buffers:
        layout = plan.layouts[buffer.name]
        lines.append(f"{buffer.scope} {buffer.name}: {layout.kind}, side by side along axis {layout.column}")
    for index in sorted(set(plan.graph.classes.values())):
        members = ", ".join(
            str(axis) if isinstance(axis, Var) else f"{axis[0]}.{axis[1]}" for axis in plan.graph.axes_of(index)
        )
        live, needed = plan.live.get(index), plan.needed.get(index)
        extents = (f", live {live}" if live else "") + (f", needed {needed}" if needed else "")
        lines.append(f"axis class {index}: {members}{extents}")
    for stmt, axis in plan.vector_axis.items():
        axes = ", ".join(each.name for each in stmt.axes)
        lines.append(f"parallel {axes}: vectors along {axis.name if axis else 'none'}")
    if plan.tasks is not None:
        lines.append(f"threads take {plan.tasks} tasks at a time")
    return "\n".join(lines) + "\n"


def choose_register_tile(target: Target, columns: int = 64) -> RegisterTile:
    """The tile with the most multiply-adds per load that fits the register file, at most 8 rows and `columns` wide."""
    candidates = [
        RegisterTile(rows, vectors)
        for rows in range(1, 9)
        for vectors in range(target.smallest_vectors, columns // target.lanes + 1, target.smallest_vectors)
        if target.fits(RegisterTile(rows, vectors))
    ]
    return max(candidates, key=lambda t: (t.rows * t.vectors / (t.rows + t.vectors), t.vectors))


MOST_ALONE = 12  # rows of one tile: where they lie a multiple of 4 KB apart, all share one set of the first cache


def choose_tall_tiles(target: Target, *, again: bool) -> tuple[RegisterTile, ...]:
    """The widest tile for each number of rows above the chosen tile's that one tile holds, least first.

    They read B once for all rows, and do more multiply-adds than loads. `again`: multiply-adds may take B as it lies.
    """
    full = choose_register_tile(target)
    found: list[RegisterTile] = []
    for rows in range(full.rows + 1, MOST_ALONE + 1):
        tiles = [RegisterTile(rows, vectors) for vectors in halves(full.vectors, target)]
        fitting = [tile for tile in tiles if target.fits(tile)]
        fitting += [tile for tile in tiles if again and target.fits_tightly(tile)]
        if fitting and rows * fitting[0].vectors > rows + fitting[0].vectors:
            found.append(fitting[0])
    return tuple(found)


def halves(vectors: int, target: Target) -> tuple[int, ...]:
    """Widths of tiles for what is left of the columns: half as wide each, down to one panel."""
    small = target.smallest_vectors
    return (small,) if vectors <= small else (vectors, *halves(max(vectors // 2 // small, 1) * small, target))


def _layouts(graph: TileGraph, given: Mapping[str, Layout], target: Target) -> dict[str, Layout]:
    layouts = dict(given)
    for node in graph.nodes:
        if not isinstance(node.stmt, Gemm):
            continue
        gemm = node.stmt
        _check_gemm_types(gemm, target)
        demands = (
            (gemm.b, Layout("panels", 0 if gemm.transpose_b else 1, gemm.span)),
            (gemm.a, Layout("rows", 1, gemm.span)),
            (gemm.c, Layout("rows", 1, gemm.span)),
        )
        for buffer, demand in demands:
            known = layouts.setdefault(buffer.name, demand)
            if (known.kind, known.column) != (demand.kind, demand.column):
                raise InferenceError(_conflict(buffer.name, known, demand))
    for buffer in graph.program.buffers:
        layouts.setdefault(buffer.name, Layout("rows", len(buffer.shape) - 1))
    return layouts


TILE_ROWS = range(3, 9)  # one and two rows take tiles of their own
ANNOTATED = {"rows": ("rows", None), "panels of axis 0": ("panels", 0), "panels of axis 1": ("panels", 1)}


def annotated_layouts(program: Program) -> dict[str, Layout]:
    """The layouts that the kernel's text gives. InferenceError for two that differ."""
    shapes = {buffer.name: buffer.shape for buffer in program.buffers}
    found: dict[str, Layout] = {}
    for note in program.annotations:
        if note.what != "layout" or note.subject not in shapes:
            continue
        kind, column = ANNOTATED[str(note.value)]
        rank = len(shapes[note.subject])
        if kind == "panels" and rank != 2:
            raise InferenceError(_at(note.span, f"{note.subject} has {rank} axes; packed panels have 2"))
        layout = Layout(kind, rank - 1 if column is None else column, note.span)
        known = found.setdefault(note.subject, layout)
        if (known.kind, known.column) != (layout.kind, layout.column):
            raise InferenceError(_conflict(note.subject, known, layout))
    return found


def register_tile(program: Program, target: Target) -> RegisterTile:
    """The register tile that a product's text gives, or the best. InferenceError for two, or one that does not fit."""
    notes = [note for note in program.annotations if note.what == "register_tile"]
    for note in notes[1:]:
        if note.value != notes[0].value:
            raise InferenceError(
                "a kernel has one register tile\n"
                + _at(notes[0].span, f"it is {notes[0].value} here")
                + "\n"
                + _at(note.span, f"and {note.value} here")
            )
    if not notes:
        return choose_register_tile(target)
    rows, vectors = notes[0].value  # type: ignore[misc]
    tile = RegisterTile(int(rows), int(vectors))
    if (
        tile.rows not in TILE_ROWS
        or tile.vectors < 1
        or tile.vectors % target.smallest_vectors
        or not target.fits(tile)
    ):
        need = tile.rows * tile.vectors + tile.vectors + 1
        raise InferenceError(
            _at(
                notes[0].span,
                f"a register tile of {tile.rows} rows × {tile.vectors} vectors takes {need} of {target.registers} "
                f"registers; tiles have {TILE_ROWS[0]} to {TILE_ROWS[-1]} rows, and vectors come in multiples of "
                f"{target.smallest_vectors}",
            )
        )
    return tile


def tasks_of(program: Program) -> int | None:
    """How many tasks the kernel's text gives a thread at a time. InferenceError for two numbers."""
    notes = [note for note in program.annotations if note.what == "tasks"]
    for note in notes[1:]:
        if note.value != notes[0].value:
            both = [_at(each.span, f"{each.value} tasks at a time") for each in (notes[0], note)]
            raise InferenceError("threads take tasks in one way\n" + "\n".join(both))
    return int(notes[0].value) if notes else None  # type: ignore[arg-type]


def _given_axis(parallel: Parallel, given: Mapping[str, int]) -> Var | None:
    names = ",".join(axis.name for axis in parallel.axes)
    return parallel.axes[given[names]] if names in given else None


def _at(span: Span | None, message: str) -> str:
    return span.render(message) if span else message


def _check_reductions(graph: TileGraph) -> None:
    for node in graph.nodes:
        stmt = node.stmt
        if isinstance(stmt, Reduce) and (len(stmt.src.shape) != 2 or stmt.axis != 1):
            message = f"this target reduces the last axis of two; here it is axis {stmt.axis} of {len(stmt.src.shape)}"
            raise InferenceError(stmt.span.render(message) if stmt.span else message)


def _check_gemm_types(gemm: Gemm, target: Target) -> None:
    found = (gemm.a.dtype, gemm.b.dtype, gemm.c.dtype)
    where = f"{gemm.span}: " if gemm.span else ""
    if gemm.transpose_a and found in (LEVELS, NARROW):
        raise InferenceError(f"{where}T.gemm of integers and bf16 reads {gemm.a.name} along its rows: no transpose_A")
    if found not in product_types(target):
        known = " or ".join(f"{a} · {b} → {c}" for a, b, c in product_types(target))
        raise InferenceError(
            f"{where}T.gemm on this target takes tiles of {known}; "
            + ", ".join(f"{buffer.name} is {buffer.dtype}" for buffer in (gemm.a, gemm.b, gemm.c))
        )


def _conflict(buffer: str, known: Layout, demand: Layout) -> str:
    def use(layout: Layout) -> str:
        what = f"packed panels of axis {layout.column}" if layout.kind == "panels" else "plain rows"
        return layout.span.render(f"needs {buffer} as {what}") if layout.span else f"needs it as {what}"

    return f"{buffer} is used in two layouts; copy it into a second buffer\n{use(known)}\n{use(demand)}"


def choose_vector_axis(parallel: Parallel, layouts: Mapping[str, Layout]) -> Var | None:
    """The axis along which most stores are contiguous: the last one unless its stores stride."""
    scores: dict[Var, int] = dict.fromkeys(parallel.axes, 0)
    for store in parallel.body:
        column = layouts[store.target.name].column if isinstance(store.target, Buffer) else len(store.index) - 1
        for axis in parallel.axes:
            coefficient, rest = split_affine(store.index[column], axis)
            scores[axis] += 1 if rest is not None and coefficient == const(1) else 0
    best = max(reversed(parallel.axes), key=lambda axis: scores[axis])
    return best if scores[best] else None


def _live_extents(graph: TileGraph) -> dict[int, Expr]:
    """Classes that may be cut, checked until the choice is consistent: dropping one can take away another's reason."""
    candidates: dict[int, tuple[Expr, Expr]] = {}  # class → (bound, live extent)
    elsewhere = touched_elsewhere(graph) | stored_whole(graph)
    for index, extent in class_extents(graph).items():
        if index in elsewhere:
            continue
        own = [bound for bound in graph.bounds if graph.classes[bound.axis] == index]
        real = [bound for bound in own if not nonnegative(bound.limit - extent)]
        if any(isinstance(load.source, Buffer) for bound in real for load in loads(bound.limit)):
            continue  # where the data ends is computed by the kernel itself
        if real and all(a.limit == b.limit for a, b in pairwise(real)) and in_scope(graph, index, real[0].limit):
            count = binary("min", extent, real[0].limit)
            ragged = bool(loads(count))  # a tile may begin behind the last element
            candidates[index] = (real[0].limit, binary("max", count, const(0)) if ragged else count)
    while True:
        bad = not_neutral(Beyond(graph, {index: bound for index, (bound, _) in candidates.items()}))
        if not bad:
            return {index: live for index, (_, live) in candidates.items()}
        for index in bad:
            del candidates[index]
