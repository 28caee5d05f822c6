"""Recurrences as equations over whole tensors, and their split into independent groups with a scan spec for one.

Comes in: states, totals and results, each an expression over its own axes that loads cells at any element of them. Goes
out: a `Frame` that rewrites them per group. Nothing is assumed about layouts: which axes are independent follows from
how the equations read each other. An axis is a group's when every program reads all cells at its own place along it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fuser.element import ONE, Index, LiftError, Shape, flatten, unflatten
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Op, Var, const, loads, nonnegative, rewrite, substitute, variables
from tilecore.contract.spec import Cell, State, Total, extent_of

WIDE = 8  # columns that are worth a vector loop


@dataclass(frozen=True, slots=True)
class Equation:
    """`cell`[axes] = `value`, or its `kind` over the axis `over`. Axes of extent 1 are not variables but 0."""

    cell: Cell
    axes: Index
    value: Expr
    over: Var | None = None
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Carried:
    """A state: its first value and its update, which makes `update.cell` of `old`."""

    old: Cell
    initial: Equation
    update: Equation


@dataclass(frozen=True, slots=True)
class Stored:
    """A result: element `where` of a tensor is `value`."""

    where: Index
    value: Expr


@dataclass(slots=True)
class Equations:
    """What is computed at every `time`, and after the last one: `totals` in a step, `reads` from final states."""

    time: Var
    states: list[Carried] = field(default_factory=list[Carried])
    totals: list[Equation] = field(default_factory=list[Equation])
    reads: list[Equation] = field(default_factory=list[Equation])
    results: list[Stored] = field(default_factory=list[Stored])

    def programs(self) -> Iterator[Equation]:
        """Every equation of a cell."""
        for state in self.states:
            yield state.initial
            yield state.update
        yield from self.totals
        yield from self.reads

    def expressions(self) -> Iterator[Expr]:
        """Everything that may load an input."""
        for equation in self.programs():
            yield equation.value
            yield from (axis for axis in equation.axes if isinstance(axis, Var))
            if equation.over is not None:
                yield equation.over
        for result in self.results:
            yield result.value
            yield from result.where
        yield self.time

    def mapped(self, change: "Change") -> "Equations":
        """The equations with every cell and expression changed."""

        def one(equation: Equation) -> Equation:
            return change.equation(equation)

        states = [Carried(change.cell(s.old), one(s.initial), one(s.update)) for s in self.states]
        results = [Stored(tuple(map(change, r.where)), change(r.value)) for r in self.results]
        return Equations(self.time, states, [*map(one, self.totals)], [*map(one, self.reads)], results)


Slot = tuple[str, int]  # a cell's name and the position of an axis
Key = Slot | Var


@dataclass(slots=True)
class Change:
    """Splits axes in two: every variable of `split` into a quotient and a remainder by a number, slots likewise."""

    split: dict[Key, int]

    def parts(self, dim: Expr, by: int) -> tuple[Expr, Expr]:
        """The extents of both digits."""
        return dim // const(by), const(by)

    def variable(self, axis: Var) -> Index:
        """The digits of a variable; itself when it is not split."""
        if axis not in self.split:
            return (axis,)
        high, low = self.parts(extent_of(axis), self.split[axis])
        return tuple(
            const(0) if dim == ONE else Var(f"{axis.name}{tag}", extent=dim) for dim, tag in ((high, "h"), (low, "l"))
        )

    def cell(self, cell: Cell) -> Cell:
        """The cell with its split axes in two."""
        shape: list[Expr] = []
        for position, dim in enumerate(cell.shape):
            by = self.split.get((cell.name, position))
            shape += [dim] if by is None else self.parts(dim, by)
        return Cell(cell.name, cell.dtype, tuple(shape))

    def __call__(self, expr: Expr) -> Expr:
        """The expression over the digits."""
        digits: dict[Expr, Expr] = {}
        for axis in variables(expr):
            if axis in self.split:
                high, low = self.variable(axis)
                digits[axis] = high * self.split[axis] + low
        return rewrite(substitute(expr, digits), self._load)

    def _load(self, node: Expr) -> Expr | None:
        if not isinstance(node, Load) or not isinstance(node.source, Cell):
            return None
        index: list[Expr] = []
        for position, entry in enumerate(node.index):
            by = self.split.get((node.source.name, position))
            index += [entry] if by is None else [entry // const(by), entry % const(by)]
        return Load(self.cell(node.source), tuple(index))

    def equation(self, equation: Equation) -> Equation:
        """One equation over the digits."""
        axes: list[Expr] = []
        for axis in equation.axes:
            axes += self.variable(axis) if isinstance(axis, Var) else (axis,)
        over = equation.over
        if over is not None and over in self.split:
            raise LiftError(f"it sums over an axis of {over.extent} that it also reads in parts")
        return Equation(self.cell(equation.cell), tuple(axes), self(equation.value), over, equation.kind)


@dataclass(slots=True)
class Classes:
    """Which axes are one axis, by how programs read cells; `inner` are those that a program reads out of place."""

    equations: Equations
    parent: dict[Key, Key] = field(default_factory=dict[Key, Key])
    inner: set[Key] = field(default_factory=set[Key])
    wanted: dict[Key, int] = field(default_factory=dict[Key, int])  # axes read by a quotient, and of what number

    def __post_init__(self) -> None:
        for equation in self.equations.programs():
            for position, axis in enumerate(equation.axes):
                if isinstance(axis, Var):
                    self.join((equation.cell.name, position), axis)
            self.read(equation.value)
            if equation.over is not None:
                self.inner.add(equation.over)
        for state in self.equations.states:
            for position in range(len(state.old.shape)):
                self.join((state.old.name, position), (state.update.cell.name, position))
        for result in self.equations.results:
            self.read(result.value)
        self.inner = {self.find(key) for key in self.inner}

    def find(self, key: Key) -> Key:
        """The representative of an axis."""
        while self.parent.get(key, key) != key:
            key = self.parent[key]
        return key

    def join(self, left: Key, right: Key) -> None:
        """Both are the same axis."""
        self.parent[self.find(left)] = self.find(right)

    def read(self, expr: Expr) -> None:
        """Note where the expression reads cells."""
        for load in loads(expr):
            if not isinstance(load.source, Cell):
                continue
            for position, (entry, dim) in enumerate(zip(load.index, load.source.shape, strict=True)):
                slot = (load.source.name, position)
                if dim == ONE:
                    continue
                if isinstance(entry, Var):
                    self.join(slot, entry)
                    continue
                if self.equations.time in variables(entry):
                    raise LiftError(f"a state is read at {entry}, which depends on the step")
                self.inner.update((slot, *variables(entry)))
                self.wanted.update(_quotient(entry))

    def splits(self) -> dict[Key, int]:
        """Axes to split in two, so that what is read by a quotient is read in place: all members of their classes."""
        found: dict[Key, int] = {}
        for key, by in self.wanted.items():
            members = self.members(key)
            extents = {self.extent(member) for member in members}
            if all(isinstance(extent, Const) and extent.value % by == 0 for extent in extents):
                if any(found.get(member, by) != by for member in members):
                    continue
                found |= dict.fromkeys(members, by)
        return found

    def members(self, key: Key) -> list[Key]:
        """All axes of a class."""
        root = self.find(key)
        return [other for other in {*self.parent, root} if self.find(other) == root]

    def extent(self, key: Key) -> Expr:
        """The extent of one axis."""
        if isinstance(key, Var):
            return extent_of(key)
        cells = {equation.cell.name: equation.cell for equation in self.equations.programs()}
        cells |= {state.old.name: state.old for state in self.equations.states}
        return cells[key[0]].shape[key[1]]


def _quotient(entry: Expr) -> dict[Key, int]:
    """The variable that the index divides by a number."""
    if isinstance(entry, Op) and entry.name in ("floordiv", "mod"):
        value, divisor = entry.args
        if isinstance(value, Var) and isinstance(divisor, Const) and divisor.value > 1:
            return {value: int(divisor.value)}
    return {}


@dataclass(slots=True)
class Frame:
    """The split: what one group computes. Programs and cells come out in the terms of a `ScanSpec`."""

    equations: Equations
    group: Var = field(init=False)
    column: Var | None = field(init=False)
    query: Var = field(init=False)
    _classes: Classes = field(init=False)
    _outer: list[Key] = field(init=False)
    _digits: dict[Key, Expr] = field(init=False)

    def __post_init__(self) -> None:
        self._classes = Classes(self.equations)
        while splits := self._classes.splits():
            self.equations = self.equations.mapped(Change(splits))
            self._classes = Classes(self.equations)
        free = self._free()
        query = self._query(free)
        column = self._column([axis for axis in free if axis != query])
        self._outer = [axis for axis in free if axis not in (query, column) and self._everywhere(axis)]
        dims = tuple(self._classes.extent(axis) for axis in self._outer)
        self.group = Var("g", extent=flatten(tuple(dim - 1 for dim in dims), dims) + 1)
        self.column = None if column is None else Var("column", extent=self._classes.extent(column))
        self.query = Var("query", extent=ONE if query is None else self._classes.extent(query))
        self._digits = dict(zip(self._outer, unflatten(self.group, dims), strict=True))
        if column is not None and self.column is not None:
            self._digits[column] = self.column
        if query is not None:
            self._digits[query] = self.query

    # -- which axes are what -------------------------------------------------------------------------------------------

    def _axes(self, axes: Iterable[Expr]) -> list[Key]:
        return [self._classes.find(axis) for axis in axes if isinstance(axis, Var) and axis != self.equations.time]

    def _places(self) -> Iterator[list[Key]]:
        """The axes of every cell and of every result."""
        for equation in self.equations.programs():
            yield self._axes(equation.axes)
        for result in self.equations.results:
            yield self._axes(_variables(result))

    def _free(self) -> list[Key]:
        """Axes along which nothing is read out of place, in the order of the first cells that have them."""
        places = list(self._places())
        order = dict.fromkeys(axis for axes in places for axis in axes)
        doubled = {axis for axes in places for axis in axes if axes.count(axis) > 1}
        return [axis for axis in order if axis not in self._classes.inner and axis not in doubled]

    def _everywhere(self, axis: Key) -> bool:
        return all(axis in axes for axes in self._places())

    def _query(self, free: list[Key]) -> Key | None:
        """The axis of the read-out that no state has."""
        states = {axis for s in self.equations.states for axis in self._axes(s.update.axes)}
        reads = [self._axes(equation.axes) for equation in self.equations.reads]
        found = [axis for axis in free if axis not in states and reads and all(axis in axes for axes in reads)]
        return found[0] if found else None

    def _column(self, free: list[Key]) -> Key | None:
        """The axis for vector loops: the last free one of the first state, if it is wide or there is no other."""
        first = self._axes(self.equations.states[0].update.axes)
        found = [axis for axis in first if axis in free]
        wide = [axis for axis in found if _wide(self._classes.extent(axis))]
        if wide:
            return wide[-1]
        return found[-1] if found and len(found) == len(first) else None

    # -- in the terms of one group -------------------------------------------------------------------------------------

    def inner(self, axes: Iterable[Expr]) -> tuple[Var, ...]:
        """The axes of a program that are left, the column last."""
        own = [axis for axis in axes if isinstance(axis, Var) and axis != self.equations.time]
        left = [axis for axis in own if self._classes.find(axis) not in self._digits]
        has_column = self.column is not None and any(self(axis) == self.column for axis in own)
        return (*left, self.column) if has_column and self.column is not None else tuple(left)

    def cell(self, cell: Cell) -> Cell:
        """What is left of a cell."""
        return Cell(cell.name, cell.dtype, (extent_of(self.group), *(cell.shape[i] for i in self._kept(cell))))

    def _kept(self, cell: Cell) -> list[int]:
        """The axes of a cell that a group has, the column last."""
        rows: list[int] = []
        columns: list[int] = []
        for position, dim in enumerate(cell.shape):
            root = self._classes.find((cell.name, position))
            if dim == ONE or root in self._outer or self._digits.get(root, const(0)) == self.query:
                continue
            (columns if root in self._digits else rows).append(position)
        return [*rows, *columns]

    def __call__(self, expr: Expr) -> Expr:
        """An expression in the terms of one group."""
        own: dict[Expr, Expr] = {}
        for axis in variables(expr):
            digit = self._digits.get(self._classes.find(axis))
            if digit is not None:
                own[axis] = digit

        def load(node: Expr) -> Expr | None:
            if not isinstance(node, Load) or not isinstance(node.source, Cell):
                return None
            return Load(self.cell(node.source), (self.group, *(node.index[i] for i in self._kept(node.source))))

        return rewrite(substitute(expr, own), load)

    def states(self) -> tuple[State, ...]:
        """The spec's states."""
        return tuple(
            State(
                self.cell(s.old), self.cell(s.update.cell), self.inner(s.update.axes),
                self(substitute(s.initial.value, dict(_renaming(s)))), self(s.update.value),
            )
            for s in self.equations.states
        )  # fmt: skip

    def totals(self, equations: Iterable[Equation]) -> tuple[Total, ...]:
        """The spec's totals."""
        return tuple(
            Total(self.cell(e.cell), self.inner(e.axes), e.over, e.kind, self(e.value))
            for e in equations
            if e.over is not None
        )

    def axes_of(self, result: Stored) -> tuple[Var, ...]:
        """The axes of a result's place: the group, the step or the query, and what is left."""
        cells = {load.source for load in loads(result.value)}
        made = {e.cell for e in self.equations.totals} | {s.update.cell for s in self.equations.states}
        read = {e.cell for e in self.equations.reads}
        axes = _variables(result)
        inner = self.inner(axes)
        if cells & made or self.equations.time in axes:
            return (self.group, self.equations.time, *inner)
        return (self.group, self.query, *inner) if cells & read else (self.group, *inner)


def _variables(result: Stored) -> list[Var]:
    """The axes of a result, in the order of its index."""
    found = [axis for entry in result.where for axis in _in_order(entry)]
    return list(dict.fromkeys(found))


def _in_order(expr: Expr) -> list[Var]:
    return sorted(variables(expr), key=lambda axis: axis.name)


def _renaming(state: Carried) -> Iterator[tuple[Expr, Expr]]:
    """The axes of the first value as those of the update."""
    for old, new in zip(state.initial.axes, state.update.axes, strict=True):
        if old != new:
            yield old, new


def _wide(extent: Expr) -> bool:
    return isinstance(extent, Const) and nonnegative(extent - WIDE)


def cell_of(name: str, dtype: DType, shape: Shape) -> Cell:
    """A cell of whole tensors. LiftError for types that a step does not compute in."""
    if dtype is not DType.F32:
        raise LiftError(
            f"it carries or sums {dtype}; recurrences are computed in f32",
            advice="nothing to do for integers, such as positions: ONNX Runtime sums them; cast other types to float32",
        )
    return Cell(name, dtype, shape)
