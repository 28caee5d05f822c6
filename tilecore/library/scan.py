"""The scan kernel: one text for every recurrence over a time axis, whatever its state, its gates and its read-out."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tilecore import language as T
from tilecore.contract.evaluate import NEUTRAL
from tilecore.contract.expr import Expr, Load, Var, rewrite, substitute
from tilecore.contract.spec import Cell, ScanSpec, State, Total, extent_of
from tilecore.language import Handle, Value
from tilecore.library.schedule import Item, Schedule, Sweep, made_by, row_of
from tilecore.value import plain

JOIN = {"sum": lambda x, y: x + y, "prod": lambda x, y: x * y, "max": T.max, "min": T.min}
Point = tuple[Any, ...]
At = dict[Var, Any]


def scan(outputs: tuple[Handle, ...], *, spec: ScanSpec, schedule: Schedule, block_n: Any = T.auto) -> None:
    """Every step of `spec` in order, its reads after the last one, and its outputs, for a block of columns."""
    columns = 1 if spec.column is None else plain(extent_of(spec.column))
    if not schedule.split:
        block_n = columns
    with T.Kernel(T.ceildiv(columns, block_n), plain(extent_of(spec.group))) as (n, g):
        cells = Cells(spec, g, n * block_n, block_n)
        for state in spec.states:
            cells.keep(state.cell, state.axes)
            shared = state.cell.name in schedule.in_place
            cells.keep(state.new, state.axes, cells.tiles[state.cell] if shared else None)
            for point, at in cells.points(state.axes):
                cells.tiles[state.cell][point] = cells.value(state.initial, at)
        for total in (*spec.totals, *spec.reads):
            cells.keep(total.cell, total.axes)
        for t in T.serial(plain(extent_of(spec.time))):
            for sweep in schedule.steps:
                compute(sweep, cells, {spec.time: t})
            store(outputs, cells, {spec.time: t})
            for state in spec.states:
                if state.cell.name not in schedule.in_place:
                    T.copy(cells.tiles[state.new], cells.tiles[state.cell])
        if any(spec.query in result.place.axes for result in spec.outputs):
            for q in T.serial(plain(extent_of(spec.query))):
                for sweep in schedule.queries:
                    compute(sweep, cells, {spec.query: q})
                store(outputs, cells, {spec.query: q})
        store(outputs, cells, {})


def compute(sweep: Sweep, cells: "Cells", now: At) -> None:
    """The cells of one sweep: row by row together, or one of them whole."""
    for item in sweep.items:
        if isinstance(item, Total) and row_of(item, cells.spec.column) is not None:
            T.fill(cells.tiles[item.cell], NEUTRAL[item.kind])
    if sweep.rows is not None:
        for i in T.serial(plain(sweep.rows)):
            for item in sweep.items:
                add_row(item, i, cells, now)
        return
    (item,) = sweep.items
    tile = cells.tiles[made_by(item)]
    if isinstance(item, State):
        for point, at in cells.points(item.axes):
            tile[point] = cells.value(item.update, now | at)
        return
    terms = T.alloc_fragment((*tile.shape, plain(extent_of(item.over))), item.cell.dtype)
    for (*point, k), at in cells.points((*item.axes, item.over), flat=not item.axes):
        terms[(*point, k)] = cells.value(item.value, now | at)
    T.reduce(terms, tile, item.kind, dim=1)


def add_row(item: Item, i: Value, cells: "Cells", now: At) -> None:
    """Row `i` of a state, or what it adds to a total."""
    tile, row = cells.tiles[made_by(item)], row_of(item, cells.spec.column)
    assert row is not None
    if isinstance(item, State):
        for point, at in cells.points(item.axes[1:]):
            tile[(i, *point)] = cells.value(item.update, now | at | {row: i})
        return
    for point, at in cells.points(item.axes):
        tile[point] = JOIN[item.kind](tile[point], cells.value(item.value, now | at | {row: i}))


def store(outputs: tuple[Handle, ...], cells: "Cells", now: At) -> None:
    """The outputs over the clock in `now`; those over neither clock when it is empty."""
    clocks = {cells.spec.time, cells.spec.query}
    for C, result in zip(outputs, cells.spec.outputs, strict=True):
        if set(now) != clocks & set(result.place.axes):
            continue
        inner = tuple(axis for axis in result.place.axes[1:] if axis not in now)
        if not inner:
            C[(cells.group, *now.values())] = cells.value(result.value, now)
            continue
        for _, at in cells.points(inner):
            C[(cells.group, *now.values(), *(at[axis] for axis in inner))] = cells.value(result.value, now | at)


@dataclass(slots=True)
class Cells:
    """The tiles of a task's cells. `group` is the task's group, its columns are `width` from `origin`."""

    spec: ScanSpec
    group: Value
    origin: Value
    width: Any
    tiles: dict[Cell, Handle] = field(default_factory=dict[Cell, Handle])
    split: set[Cell] = field(default_factory=set[Cell])  # those whose last axis is the column

    def keep(self, cell: Cell, axes: tuple[Var, ...], tile: Handle | None = None) -> None:
        """A tile for the cell, or `tile` itself."""
        if axes and axes[-1] == self.spec.column:
            self.split.add(cell)
        self.tiles[cell] = tile or T.alloc_fragment([self.extent(axis) for axis in axes] or [1], cell.dtype)

    def extent(self, axis: Var) -> Any:
        """How much of an axis the task covers."""
        return self.width if axis == self.spec.column else plain(extent_of(axis))

    def points(self, axes: tuple[Var, ...], *, flat: bool = False) -> Iterator[tuple[Point, At]]:
        """All points of `axes` in any order: the index into a tile, and what each axis is there; `flat`: one row."""
        extents = [*([1] if flat or not axes else []), *(self.extent(axis) for axis in axes)]
        for found in T.Parallel(*extents):
            point = found if isinstance(found, tuple) else (found,)
            inner = point[len(point) - len(axes) :]
            at = zip(axes, inner, strict=True)
            yield point, {axis: i + self.origin if axis == self.spec.column else i for axis, i in at}

    def value(self, expr: Expr, at: At) -> Value:
        """The program `expr` where its axes are `at`: loads of cells become loads of their tiles."""
        now: dict[Expr, Expr] = {
            var: T.cast(i, T.int64).expr for var, i in (at | {self.spec.group: self.group}).items()
        }
        reads = frozenset[tuple[str, int]]()

        def local(node: Expr) -> Expr | None:
            nonlocal reads
            if not isinstance(node, Load) or not isinstance(node.source, Cell):
                return None
            index = [Value(position) for position in node.index[1:]]
            if node.source in self.split:
                index[-1] = index[-1] - self.origin
            found = self.tiles[node.source][tuple(index) or (0,)]
            reads |= found.reads
            return found.expr

        return Value(rewrite(substitute(expr, now), local), reads)
