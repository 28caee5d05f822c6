"""In what order a scan computes its cells, and which of them share one loop over rows.

Comes in: a spec. Goes out: sweeps. A *row* sweep is one loop: in iteration i it updates row i of states and adds what
row i contributes to totals, so that a state goes through the registers once. Everything else is a sweep of its own.
Invariant: nothing is read before it is computed, and no old state after it was overwritten.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tilecore.contract.expr import Expr, Load, Var, loads
from tilecore.contract.spec import Cell, ScanSpec, State, Total, extent_of

Item = State | Total


@dataclass(slots=True)
class Sweep:
    """`items` in order. `rows` is how many iterations their loop has; None for one item that is computed whole."""

    rows: Expr | None
    items: list[Item]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The sweeps of a step and of a query; `in_place` names the states whose new value may overwrite the old.

    `split` tells whether blocks of columns are tasks of their own: every output has columns.
    """

    steps: tuple[Sweep, ...]
    queries: tuple[Sweep, ...]
    in_place: frozenset[str]
    split: bool


def schedule(spec: ScanSpec) -> Schedule:
    """The schedule of a spec."""
    steps = _sweeps(spec, _ordered((*spec.states, *spec.totals)))
    queries = _sweeps(spec, _ordered(spec.reads))
    in_place = frozenset(state.cell.name for state in spec.states if _may_overwrite(state, spec, steps))
    return Schedule(tuple(steps), tuple(queries), in_place, splits(spec))


def splits(spec: ScanSpec) -> bool:
    """Whether columns can be dealt out: a task that repeats what has none must not store it again."""
    return spec.column is not None and all(spec.column in result.place.axes for result in spec.outputs)


def row_of(item: Item, column: Var | None) -> Var | None:
    """The axis that a loop over rows walks: the first of a state, the summed one of a total; None without columns."""
    if column is None or column not in item.axes:
        return item.over if isinstance(item, Total) and len(item.axes) > 1 else None
    if isinstance(item, Total):
        return item.over
    return item.axes[0] if len(item.axes) > 1 else None


def program_of(item: Item) -> Expr:
    """What the item computes per point."""
    return item.update if isinstance(item, State) else item.value


def made_by(item: Item) -> Cell:
    """The cell that the item computes."""
    return item.new if isinstance(item, State) else item.cell


def _reads(item: Item, cell: Cell) -> list[Load]:
    return [load for load in loads(program_of(item)) if load.source == cell]


def _ordered(items: Sequence[Item]) -> list[Item]:
    """Items after those that they read."""
    makers = {made_by(item): item for item in items}
    done: list[Item] = []

    def visit(item: Item) -> None:
        if item in done:
            return
        for load in loads(program_of(item)):
            if isinstance(load.source, Cell) and load.source in makers and makers[load.source] is not item:
                visit(makers[load.source])
        done.append(item)

    for item in items:
        visit(item)
    return done


def _sweeps(spec: ScanSpec, items: list[Item]) -> list[Sweep]:
    sweeps: list[Sweep] = []
    for item in items:
        row = row_of(item, spec.column)
        after = max((i for i, sweep in enumerate(sweeps) if _depends(item, sweep)), default=-1)
        target = None
        if row is not None:
            same = [i for i, s in enumerate(sweeps) if s.rows == extent_of(row)]
            target = next((i for i in same if i > after or (i == after and _per_row(item, row, sweeps[i]))), None)
        if target is None:
            sweeps.append(Sweep(None if row is None else extent_of(row), [item]))
        else:
            sweeps[target].items.append(item)
    return sweeps


def _depends(item: Item, sweep: Sweep) -> bool:
    return any(_reads(item, made_by(other)) for other in sweep.items)


def _per_row(item: Item, row: Var, sweep: Sweep) -> bool:
    """Whether all that the item reads of the sweep is the row of a state that the same iteration computes."""
    for other in sweep.items:
        for load in _reads(item, made_by(other)):
            if isinstance(other, Total) or load.index[1] != row:
                return False
    return True


def _may_overwrite(state: State, spec: ScanSpec, sweeps: list[Sweep]) -> bool:
    """Whether nothing reads the old state once the new one is being written, but each element of it for its own."""
    results = [result for result in spec.outputs if spec.time in result.place.axes]
    if any(load.source == state.cell for result in results for load in loads(result.value)):
        return False
    home = next(i for i, sweep in enumerate(sweeps) if state in sweep.items)
    for number, sweep in enumerate(sweeps):
        for position, item in enumerate(sweep.items):
            for load in _reads(item, state.cell):
                own = item is state and load.index[1:] == state.axes
                before = number < home or (
                    number == home
                    and position < sweep.items.index(state)
                    and load.index[1] == row_of(item, spec.column)
                )
                if not own and not before:
                    return False
    return True
