"""Finds recurrences that are spelled as sums: φ(Q)(φ(K)ᵀV) with its normaliser, and its causal form with CumSum.

Comes in: a contraction over time, or a CumSum. Goes out: a draft of one scan region with the sums that share operands
with it, the sums over states that read it out, and what follows. Invariant: what runs along with the steps (CumSum)
and what reads a state after the last one (contractions) never meet in one region.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from fuser.cuts import Cuts, sample
from fuser.dots import axes_of, dot_of, is_dot
from fuser.element import ONE, ZERO, Index, LiftError, attribute, content_of, dtype_of, shape_of
from fuser.equations import Carried, Equation, Equations, cell_of
from fuser.growth import Frame, Growth, Made, grow
from fuser.lift import Inliner, is_cumulative, is_pointwise
from fuser.loops import KINDS, is_total, total_of
from fuser.lower import Draft
from fuser.recurrence import draft_of
from tilecore.contract.expr import Const, Expr, Load, Var, const, loads, rewrite, substitute, variables
from tilecore.contract.spec import Cell, Tensor, extent_of


def from_sum(node: ir.Node, cuts: Cuts) -> Draft:
    """The region of a CumSum, or of a contraction that others read out. LiftError when there is none."""
    first = _fold(node, cuts, 0)
    _check_order(first)
    sharing = [first]
    for other in cuts.remains.nodes:
        if other is not node and other in cuts.remains.alive and is_cumulative(other) == is_cumulative(node):
            fold = _sharing(other, first, cuts, len(sharing))
            sharing += [] if fold is None else [fold]
    try:
        return _Recurrence(cuts, sharing).draft()
    except LiftError:
        if len(sharing) == 1:
            raise
        return _Recurrence(cuts, [first]).draft()


@dataclass(frozen=True, slots=True)
class Fold:
    """One sum over `time`: the state that carries it, and the element (`where`, `value`) of what the node makes."""

    node: ir.Node
    time: Var
    state: Carried
    term: Expr
    where: Index
    value: Expr
    products: frozenset[ir.Node]  # contractions that sum over nothing, computed for the term

    def sources(self) -> set[Tensor]:
        """The tensors that are summed, weights apart."""
        found = {load.source for load in loads(self.term) if isinstance(load.source, Tensor)}
        return {source for source in found if not source.constant}


def _sharing(node: ir.Node, first: Fold, cuts: Cuts, number: int) -> Fold | None:
    """A sum over the same steps of something that `first` sums as well."""
    if any(value in cuts.remains.makers for value in node.outputs):
        return None
    if not (is_cumulative(node) or is_dot(node) or KINDS.get(node.op_type) == "sum"):
        return None
    try:
        fold = _fold(node, cuts, number)
    except LiftError:  # it may be a region of its own, and says why where it is not
        return None
    return fold if fold.time == first.time and fold.sources() & first.sources() else None


def _fold(node: ir.Node, cuts: Cuts, number: int) -> Fold:
    if is_cumulative(node):
        return _cumulative(node, cuts, number)
    if is_dot(node):
        dot = dot_of(node, cuts.shapes)
        if any(cuts.is_weight(value) for value in (dot.left, dot.right)):
            raise LiftError(f"{node.op_type} {node.name!r} multiplies by weights", node=node)
    made: list[Equation] = []
    products: set[ir.Node] = set()
    reader = _terms(cuts, products)
    element = total_of(node, cuts, reader, made, f"s{number}.")
    if len(made) != 1 or made[0].over is None:
        raise LiftError(f"{node.op_type} {node.name!r} sums over nothing", node=node)
    (sum_of,) = made
    assert sum_of.over is not None
    time = Var("t", extent=extent_of(sum_of.over))
    term = substitute(sum_of.value, {sum_of.over: time})
    axes = axes_of(shape_of(node.outputs[0], cuts.shapes), f"s{number}_")
    own = substitute(term, dict(zip(sum_of.axes, axes, strict=True)))
    return Fold(node, time, _carried(sum_of.cell, axes, own), own, axes, element(axes), frozenset(products))


def _cumulative(node: ir.Node, cuts: Cuts, number: int) -> Fold:
    source, axis_of = node.inputs[:2]
    where = None if axis_of is None else content_of(axis_of, cuts.shapes)
    if source is None or where is None or len(where) != 1 or not isinstance(where[0], Const):
        raise LiftError(
            "the axis along which it sums is known at run time only",
            node=node,
            advice="make the axis a constant of the model",
        )
    shape = shape_of(source, cuts.shapes)
    axis = int(where[0].value) % len(shape)
    time = Var("t", extent=shape[axis])
    now = shape[axis] - 1 - time if attribute(node, "reverse", 0) else time
    axes = axes_of(shape, f"s{number}_")
    axes = (*axes[:axis], *axes[axis + 1 :])
    index = (*axes[:axis], now, *axes[axis:])
    cell = cell_of(f"s{number}", dtype_of(source, cuts.shapes), (*shape[:axis], *shape[axis + 1 :]))
    products: set[ir.Node] = set()
    term = _terms(cuts, products).at(source, index)
    state = _carried(cell, axes, term)
    read = state.old if attribute(node, "exclusive", 0) else state.update.cell
    return Fold(node, time, state, term, index, Load(read, axes), frozenset(products))


def _carried(cell: Cell, axes: Index, term: Expr) -> Carried:
    after = Cell(f"{cell.name}.next", cell.dtype, cell.shape)
    return Carried(cell, Equation(cell, axes, const(0.0, cell.dtype)), Equation(after, axes, Load(cell, axes) + term))


def _terms(cuts: Cuts, products: set[ir.Node]) -> Inliner:
    """Reads what is summed; products that sum over nothing are computed there, and added to `products`."""

    def product(value: ir.Value, index: Index) -> Expr | None:
        node = cuts.remains.producer(value)
        if node is None or not is_dot(node) or value in cuts.remains.makers or len(cuts.remains.users_of(value)) > 1:
            return None
        if dot_of(node, cuts.shapes).depth != ONE:
            return None
        products.add(node)
        return total_of(node, cuts, reader, [])(index)

    reader = cuts.reader("inside", bound=product)
    return reader


def _check_order(fold: Fold) -> None:
    """LiftError for a contraction along memory of few elements: scores of queries and keys rather than a state."""
    if is_cumulative(fold.node):
        return
    if all(dim == ONE for dim in fold.state.old.shape):
        raise LiftError("it sums to one number", node=fold.node)
    reads = [load for load in loads(fold.term) if fold.time in variables(load)]
    along = all(fold.time in variables(load.index[-1]) for load in reads)
    if along and sample(extent_of(fold.time)) <= max(sample(dim) for dim in fold.state.old.shape):
        raise LiftError("it sums along memory, which a contraction does better", node=fold.node)


@dataclass(slots=True)
class _Recurrence:
    """A region that is being put together: the sums that are carried, and what follows them."""

    cuts: Cuts
    folds: list[Fold]
    equations: Equations = field(init=False)
    growth: Growth = field(init=False)
    aligned: dict[Expr, Expr] = field(default_factory=dict[Expr, Expr])  # axes found to be the time

    def __post_init__(self) -> None:
        self.folds.sort(key=lambda fold: -len(fold.state.old.shape))  # the first state decides on the columns
        self.equations = Equations(self.folds[0].time, [fold.state for fold in self.folds])
        order = self.cuts.remains.position
        nodes = sorted((fold.node for fold in self.folds), key=order.__getitem__)
        where = {fold.node.outputs[0]: fold.where for fold in self.folds}
        value = {fold.node.outputs[0]: fold.value for fold in self.folds}
        frame = Frame(lambda out: None, self.made, lambda node, growth: ())
        self.growth = Growth(self.cuts, where, value, nodes, frame, mode="inside", bound=self.element)

    def draft(self) -> Draft:
        """The region. LiftError when nothing reads the sums out."""
        for fold in self.folds:
            self.growth.check_sources(fold.term)
        extent = grow(self.growth)
        if not extent.results:
            raise LiftError("nothing reads the result")
        if len(self.folds) > 1 and len(extent.results) > 1:
            raise LiftError("what the sums make is not joined")
        self._prune([self.growth.value[out] for out in extent.results])
        if not self.equations.states or not (self.equations.reads or is_cumulative(self.folds[0].node)):
            raise LiftError("no other contraction reads the sums")
        nodes = frozenset(extent.nodes).union(*(fold.products for fold in self.folds))
        return draft_of(self.equations, self.growth, extent.results, nodes, self.cuts)

    def _prune(self, programs: list[Expr]) -> None:
        """Leave out equations that no result needs."""
        states = {cell: state for state in self.equations.states for cell in (state.old, state.update.cell)}
        totals = {total.cell: total for total in (*self.equations.totals, *self.equations.reads)}
        needed: set[Cell] = set()
        while programs:
            cells = {load.source for load in loads(programs.pop()) if isinstance(load.source, Cell)} - needed
            needed |= cells
            programs += [states[cell].update.value for cell in cells if cell in states]
            programs += [totals[cell].value for cell in cells if cell in totals]
        kept = [state for state in self.equations.states if {state.old, state.update.cell} & needed]
        self.equations.states = kept
        self.equations.totals = [total for total in self.equations.totals if total.cell in needed]
        self.equations.reads = [total for total in self.equations.reads if total.cell in needed]

    def element(self, value: ir.Value, index: Index) -> Expr | None:
        """Any element of a value inside, at the time of the step where it has one."""
        if value not in self.growth.value:
            return None
        moved: dict[Expr, Expr] = {}
        for own, asked in zip(self.growth.where[value], index, strict=True):
            if own == asked:
                continue
            if self._is_now(own) and isinstance(asked, Var) and asked != self.equations.time:
                if self.aligned.setdefault(asked, own) != own:
                    raise LiftError(f"{value.name!r} runs along with the steps the other way round")
            elif isinstance(own, Var) and own != self.equations.time and moved.get(own, asked) == asked:
                moved[own] = asked
            elif own != ZERO or asked != ZERO:
                raise LiftError(f"{value.name!r} is also read at another step or element of it")
        return substitute(self.growth.value[value], moved)

    def _is_now(self, entry: Expr) -> bool:
        time = self.equations.time
        return entry in (time, extent_of(time) - 1 - time)

    def made(self, node: ir.Node, where: Mapping[ir.Value, Index], reader: Inliner) -> Made | None:
        """What a contraction, a reduction or pointwise work makes of values inside."""
        self.aligned.clear()
        if is_total(node):
            return self._total(node, reader)
        if not is_pointwise(node) or len(node.outputs) != 1:
            return None
        out = node.outputs[0]
        shape = shape_of(out, self.cuts.shapes)
        same = [v for v in node.inputs if v is not None and v in self.growth.value and self._shape(v) == shape]
        axes = self.growth.where[same[0]] if same else axes_of(shape, f"p{len(self.growth.nodes)}_")
        expr = reader.compute(out, axes)
        return {out: (tuple(substitute(axis, self.aligned) for axis in axes), substitute(expr, self.aligned))}

    def _shape(self, value: ir.Value) -> tuple[Expr, ...]:
        return shape_of(value, self.cuts.shapes)

    def _total(self, node: ir.Node, reader: Inliner) -> Made:
        """A sum over an axis of states: in a step, or after the last one."""
        if is_dot(node):
            dot = dot_of(node, self.cuts.shapes)
            if self.cuts.is_weight(dot.left) or self.cuts.is_weight(dot.right):
                raise LiftError(f"{node.op_type} multiplies by weights: it is a contraction of its own")
        steps = is_cumulative(self.folds[0].node)
        into, name = (self.equations.totals, "r") if steps else (self.equations.reads, "q")
        known = len(into)
        sums = {total.cell for total in into}
        element: Callable[[Index], Expr] = total_of(node, self.cuts, reader, into, name)
        out = node.outputs[0]
        if len(into) == known:
            axes = axes_of(self._shape(out), f"p{len(self.growth.nodes)}_")
            expr = element(axes)
            return {out: (tuple(substitute(axis, self.aligned) for axis in axes), substitute(expr, self.aligned))}
        whole = into.pop()
        if any(load.source in sums for load in loads(whole.value)):
            raise LiftError(f"{node.op_type} sums what was read out already")
        if whole.over in self.aligned or (steps and not self.aligned):
            raise LiftError(f"{node.op_type} sums over the steps, or over none of them")
        kept = [i for i, axis in enumerate(whole.axes) if axis not in self.aligned]
        cell = Cell(whole.cell.name, whole.cell.dtype, tuple(whole.cell.shape[i] for i in kept))

        def load(expr: Expr) -> Expr | None:
            if not isinstance(expr, Load) or expr.source != whole.cell:
                return None
            return Load(cell, tuple(expr.index[i] for i in kept))

        value = substitute(whole.value, self.aligned)
        now = tuple(substitute(axis, self.aligned) for axis in whole.axes)
        found = rewrite(element(now), load)
        into.append(Equation(cell, tuple(whole.axes[i] for i in kept), value, whole.over, whole.kind))
        return {out: (now, found)}
