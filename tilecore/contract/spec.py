"""What the fuser asks the compiler for: one frozen spec per region, in logical views and scalar programs.

A region has *physical* inputs and outputs (`Tensor`, dense row-major, in the order of the fused node's inputs and
outputs) and *logical* operands: a `View` says what element (b, h, q, d) is, as an expression over loads of physical
inputs; a `Place` says where logical element (b, h, q, e) of a result goes. Transposes, reshapes, slices, broadcasts,
GQA head maps, rotary embeddings and pre-scales are therefore all the same thing: an expression.

`requires` are expressions of symbols that are at least 0 in every valid call (512 − seq where a table has 512 rows),
`lookups` say what indices that data brings are in one; a kernel refuses other calls.

Invariants (checked by `check`): every symbol of a spec appears as a whole dim of some input; views load only from
`inputs`; every element of every output is written exactly once by its `Place`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Source, Sym, Var, loads, substitute, symbols, variables


class SpecError(ValueError):
    """A spec that breaks an invariant of this module; the message names the tensor, axis or symbol."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A physical input or output of a region: dense, row-major. `constant` inputs are known at optimise time."""

    name: str
    dtype: DType
    shape: tuple[Expr, ...]
    constant: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class View:
    """A logical operand: its element at `axes` is `value`. Each axis is a `Var` with its extent."""

    name: str
    axes: tuple[Var, ...]
    value: Expr

    @property
    def dtype(self) -> DType:
        """Element type of the view."""
        return self.value.dtype

    @property
    def shape(self) -> tuple[Expr, ...]:
        """Extents of the axes; that of a ragged axis is in terms of other axes."""
        return tuple(extent_of(axis) for axis in self.axes)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a logical result goes: element `axes` is stored at `index` of `tensor`. The map is injective and onto."""

    tensor: Tensor
    axes: tuple[Var, ...]
    index: tuple[Expr, ...]

    @property
    def name(self) -> str:
        """Name of the physical output."""
        return self.tensor.name

    @property
    def dtype(self) -> DType:
        """Element type of the physical output."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[Expr, ...]:
        """Extents of the axes; that of a ragged axis is in terms of other axes."""
        return tuple(extent_of(axis) for axis in self.axes)


@dataclass(frozen=True, slots=True)
class Result:
    """One output of a region: `value`, a scalar program over the place's axes and the region's placeholders."""

    place: Place
    value: Expr


PROBABILITY = Var("p", DType.F32)  # what programs call the softmax's result
TOP = Var("top", DType.F32)  # and its row's maximum, of scores and sink: −inf where there are none
TOTAL = Var("total", DType.F32)  # and the row's Σ exp(score − top), the sink's exponential included


@dataclass(frozen=True, slots=True)
class Lookup:
    """Rows that data chooses: `position`, an i64 over loads of inputs, is in [-size, size) for all of `axes`."""

    axes: tuple[Var, ...]
    position: Expr
    size: Expr


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """O[b,h,q,e] = Σ_k softmax_k(score(Σ_d Q[b,h,q,d]·K[b,h,k,d])) · V[b,h,k,e].

    `score` is over `score_axes` = (b, h, q, k) and the f32 placeholder `raw` (the plain dot product). −inf scores weigh
    nothing; a row of −inf alone gives NaN, as softmax does, or 0 with `nan_guard` (a `Where(IsNaN(p), 0, p)`).
    `sink`, over (b, h, q), is one more logit whose weight is dropped. `outputs` are over (b, h, q, e) and `acc`.
    `weight`, over `score_axes` and the f32 placeholder `probability` (the softmax's result), is what V is multiplied
    by instead of that result, such as the result quantised; None for the result itself. Every program but `score` may
    read the row's `TOP` and `TOTAL`, whose TOTAL · exp(TOP) is Σ exp(score). Where q and k are i16 views,
    `raw` is their exact i32 sum. `reductions` are values over `score_axes` reduced over the keys, such as a mask's
    maximum: outputs over (b, h, q, e) and `weight` may read them. An output over `score_axes` is a program of `raw`
    and `probability`: scores or weights that are needed in memory too.

    `length`, over the axes b and h, says how many queries and how many keys there are: only the first `length` of
    either, at most as many as the axes have (which are then upper bounds), and none where it is below 1. Others are
    read, and nothing is written for them. It is an i64 over loads of inputs.

    `binary`: exponentials of scores are powers of 2, not of e.

    `wide_alone`: calls of one query do not round operands to bfloat16 (`few_rows.py`).
    """

    inputs: tuple[Tensor, ...]
    q: View
    k: View
    v: View
    raw: Var
    score_axes: tuple[Var, Var, Var, Var]
    score: Expr
    acc: Var
    outputs: tuple[Result, ...]
    nan_guard: bool = False
    sink: View | None = None
    probability: Var = PROBABILITY
    weight: Expr | None = None
    reductions: tuple["Step", ...] = ()
    requires: tuple[Expr, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    length: Expr | None = None
    binary: bool = False
    wide_alone: bool = False


@dataclass(frozen=True, slots=True)
class Product:
    """Σ_k A[b,m,k] · B[b,k,n] of a contraction, named by the placeholder `acc`."""

    b: View
    acc: Var


@dataclass(frozen=True, slots=True)
class ContractionSpec:
    """C[b,m,n] = Σ_k A[b,m,k] · B[b,k,n], then each of `outputs` over (b, m, n) and the placeholder `acc`.

    Floats are summed in an f32 `acc`. Integer operands are i16 views (a byte less its zero point fits) and are summed
    in an i32 `acc`, exactly modulo 2^32.

    `siblings` are more products of the same A, over the same axes: programs may use any of their placeholders.

    `byte_block`, if not 0, is a licence: kernels may round A, f32, to bytes with one scale for every `byte_block` steps
    of k, of which the largest becomes ±127 (`narrow.rounded_to_bytes`). What they compute is then right within that.
    """

    inputs: tuple[Tensor, ...]
    a: View
    b: View
    acc: Var
    outputs: tuple[Result, ...]
    requires: tuple[Expr, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    siblings: tuple[Product, ...] = ()
    byte_block: int = 0

    @property
    def products(self) -> tuple[Product, ...]:
        """Every product, the first one first."""
        return (Product(self.b, self.acc), *self.siblings)


@dataclass(frozen=True, slots=True)
class Step:
    """One value of a row program, named by `var`; later steps and results refer to it by that variable.

    `kind` "tile" gives a value per (row, column); "sum", "max", "min" and "prod" reduce `value` over the columns and
    give one per row (the neutral element where there are no columns).
    """

    var: Var
    kind: str
    value: Expr


@dataclass(frozen=True, slots=True)
class RowSpec:
    """A program over rows r and columns c: `steps` in order, then `outputs` over (r, c), or over (r,) alone."""

    inputs: tuple[Tensor, ...]
    row: Var
    column: Var
    steps: tuple[Step, ...]
    outputs: tuple[Result, ...]
    requires: tuple[Expr, ...] = ()
    lookups: tuple[Lookup, ...] = ()


@dataclass(frozen=True, slots=True)
class Cell:
    """A value of a scan's step, as other programs read it: a `Source` whose first axis is the spec's `group`."""

    name: str
    dtype: DType
    shape: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class State:
    """What a scan carries: `cell` is its value before the step, `new` after it, both over (group, *axes).

    `initial` is over (group, *axes); `update` over (group, time, *axes).
    """

    cell: Cell
    new: Cell
    axes: tuple[Var, ...]
    initial: Expr
    update: Expr


@dataclass(frozen=True, slots=True)
class Total:
    """`cell`, over (group, *axes), is the `kind` ("sum", "max", "min" or "prod") of `value` over `over`."""

    cell: Cell
    axes: tuple[Var, ...]
    over: Var
    kind: str
    value: Expr


@dataclass(frozen=True, slots=True)
class ScanSpec:
    """A recurrence: for every `group`, for `time` = 0, 1, …: S' = update(S, inputs at the time), S then being S'.

    Programs load inputs and cells, those at (group, …) only: `totals` are computed in every step, each from inputs,
    states before and after the step, and other totals. After the last step `reads` are computed for every `query`, from
    inputs, the states' cells, which then hold what is left, and other reads. An output over (group, time, …) is stored
    in every step, one over (group, query, …) for every query, any other after the last step from states alone.

    `column`, when given, is an axis that is last in every cell and output that has it and that nothing sums over: its
    elements are independent of each other. It is None when there is no such axis.
    """

    inputs: tuple[Tensor, ...]
    group: Var
    time: Var
    column: Var | None
    states: tuple[State, ...]
    totals: tuple[Total, ...]
    query: Var
    reads: tuple[Total, ...]
    outputs: tuple[Result, ...]
    requires: tuple[Expr, ...] = ()
    lookups: tuple[Lookup, ...] = ()


Spec = AttentionSpec | ContractionSpec | RowSpec | ScanSpec


def extent_of(axis: Var) -> Expr:
    """The extent of an index variable. SpecError when it has none."""
    if axis.extent is None:
        raise SpecError(f"axis {axis.name} has no extent: give its Var one")
    return axis.extent


def extents_at(operand: View | Place, index: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The extents of the axes where they are walked at `index`."""
    at: dict[Expr, Expr] = dict(zip(operand.axes, index, strict=True))
    return tuple(substitute(extent, at) for extent in operand.shape)


def outputs_of(spec: Spec) -> tuple[Tensor, ...]:
    """The physical outputs, in the order of the fused node's outputs."""
    return tuple(result.place.tensor for result in spec.outputs)


def views_of(spec: Spec) -> tuple[View, ...]:
    """The logical operands of the spec's kernel."""
    match spec:
        case AttentionSpec():
            return (spec.q, spec.k, spec.v) + ((spec.sink,) if spec.sink else ())
        case ContractionSpec():
            return (spec.a, *(product.b for product in spec.products))
        case RowSpec() | ScanSpec():
            return ()


def byte_block_of(spec: Spec) -> int:
    """The licence of a contraction to round its left operand to bytes; 0 for every other spec."""
    return spec.byte_block if isinstance(spec, ContractionSpec) else 0


def cells_of(spec: ScanSpec) -> set[Cell]:
    """Every cell that programs of the scan may load."""
    states = {cell for state in spec.states for cell in (state.cell, state.new)}
    return states | {total.cell for total in (*spec.totals, *spec.reads)}


def programs_of(spec: Spec) -> Iterator[Expr]:
    """Every program of the spec: of its operands, its steps, its results and where these go."""
    return (program for _, program in _programs(spec))


def _programs(spec: Spec) -> Iterator[tuple[str, Expr]]:
    for view in views_of(spec):
        yield f"view {view.name}", view.value
    if isinstance(spec, AttentionSpec):
        yield "score", spec.score
        if spec.weight is not None:
            yield "weight", spec.weight
        for step in spec.reductions:
            yield f"reduction {step.var.name}", step.value
        if spec.length is not None:
            yield "length", spec.length
    if isinstance(spec, RowSpec):
        for step in spec.steps:
            yield f"step {step.var.name}", step.value
    if isinstance(spec, ScanSpec):
        for state in spec.states:
            yield f"initial {state.cell.name}", state.initial
            yield f"update of {state.cell.name}", state.update
        for total in (*spec.totals, *spec.reads):
            yield f"total {total.cell.name}", total.value
    for lookup in spec.lookups:
        yield "the position of a lookup", lookup.position
    for result in spec.outputs:
        yield f"output {result.place.name}", result.value
        for position, index in enumerate(result.place.index):
            yield f"output {result.place.name} index {position}", index


def check(spec: Spec) -> None:
    """Raise SpecError unless the invariants of this module hold."""
    bound = {dim for tensor in spec.inputs for dim in tensor.shape if isinstance(dim, Sym)}
    names = [tensor.name for tensor in (*spec.inputs, *outputs_of(spec))]
    if len(set(names)) != len(names):
        raise SpecError(f"tensor names must be distinct, got {', '.join(names)}")
    for tensor in (*spec.inputs, *outputs_of(spec)):
        for position, dim in enumerate(tensor.shape):
            _check_symbols(f"dim {position} of {tensor.name}", dim, bound)
            if not isinstance(dim, Const) and variables(dim):
                raise SpecError(f"dim {position} of {tensor.name} is {dim}: a dim has no index variables")
    for expr in spec.requires:
        _check_symbols(f"requirement {expr} >= 0", expr, bound)
    known = set[Source](spec.inputs)
    if isinstance(spec, ScanSpec):
        known |= cells_of(spec)
    for what, program in _programs(spec):
        _check_symbols(what, program, bound)
        for axis in variables(program):
            if axis.extent is not None:
                _check_symbols(f"axis {axis.name} of {what}", axis.extent, bound)
        for load in loads(program):
            if load.source not in known:
                raise SpecError(f"{what} loads {load.source.name}, which is not an input of the region")
            if isinstance(spec, ScanSpec) and isinstance(load.source, Cell) and load.index[0] != spec.group:
                raise SpecError(f"{what} loads {load.source.name} of another group than its own")
    for result in spec.outputs:
        if len(result.place.index) != len(result.place.tensor.shape):
            raise SpecError(f"output {result.place.name} has {len(result.place.tensor.shape)} axes")
        if result.value.dtype is not result.place.dtype:
            raise SpecError(
                f"output {result.place.name} is {result.place.dtype}; its program gives {result.value.dtype}"
            )


def _check_symbols(what: str, expr: Expr, bound: set[Sym]) -> None:
    free = symbols(expr) - bound
    if free:
        names = ", ".join(sorted(symbol.name for symbol in free))
        raise SpecError(f"{what} uses {names}, which no input of the region has as a whole dim")


def tensor_view(tensor: Tensor, name: str = "") -> View:
    """The tensor itself as a view: one axis per dim."""
    axes = tuple(Var(f"{name or tensor.name}_{i}", extent=dim) for i, dim in enumerate(tensor.shape))
    return View(name or tensor.name, axes, Load(tensor, axes))
