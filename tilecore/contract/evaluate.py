"""The numpy meaning of expressions and specs: the oracle of every test, in float64 or in the spec's own types.

Comes in: an expression (or spec) and an environment of arrays. Goes out: arrays. Nothing here is fast.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Op, Source, Sym, Var, loads
from tilecore.contract.few_rows import with_wide_operands
from tilecore.contract.ops import OPS
from tilecore.contract.spec import (
    TOP,
    TOTAL,
    AttentionSpec,
    Cell,
    ContractionSpec,
    Place,
    Result,
    RowSpec,
    ScanSpec,
    Spec,
    Tensor,
    Total,
    View,
    extent_of,
)

Arrays = Mapping[str, Any]  # tensor name → array
REDUCE: dict[str, Any] = {"sum": np.sum, "max": np.max, "fmax": np.fmax.reduce, "min": np.min, "prod": np.prod}
NEUTRAL: dict[str, float] = {"sum": 0.0, "max": -np.inf, "fmax": -np.inf, "min": np.inf, "prod": 1.0}


class Evaluator:
    """Evaluates expressions over numpy arrays, broadcasting. `wide` computes every float type in float64.

    Loads of a `Tensor` read `arrays`; of a `View`, what it computes; of any other source (a tile buffer), `tiles`.
    """

    def __init__(
        self, arrays: Arrays, symbols: Mapping[str, int], *, wide: bool = True, tiles: Arrays | None = None
    ) -> None:
        self.arrays = arrays
        self.symbols = symbols
        self.wide = wide
        self.tiles = {} if tiles is None else tiles

    def numpy_type(self, dtype: DType) -> np.dtype:
        """The numpy type that values of `dtype` are computed in."""
        return np.dtype(np.float64) if self.wide and dtype.is_float else dtype.row.numpy

    def __call__(self, expr: Expr, env: Mapping[Var, Any] | None = None) -> Any:
        """The value of `expr` with its variables taken from `env`; arrays broadcast against each other."""
        memo: dict[int, Any] = {}
        with np.errstate(all="ignore"):
            return self._value(expr, env or {}, memo)

    def _value(self, expr: Expr, env: Mapping[Var, Any], memo: dict[int, Any]) -> Any:
        if id(expr) in memo:
            return memo[id(expr)]
        match expr:
            case Const():
                value = np.asarray(expr.value, self.numpy_type(expr.dtype))
            case Sym():
                value = np.asarray(self.symbols[expr.name], np.int64)
            case Var():
                value = np.asarray(env[expr], self.numpy_type(expr.dtype))
            case Op():
                args = [self._value(arg, env, memo) for arg in expr.args]
                if expr.name == "reinterpret":
                    args[0] = np.asarray(args[0]).astype(expr.args[0].dtype.row.numpy).view(expr.dtype.row.numpy)
                value = np.asarray(OPS[expr.name].numpy(*args)).astype(self.numpy_type(expr.dtype))
            case Load():
                value = self._load(expr, [self._value(index, env, memo) for index in expr.index])
        memo[id(expr)] = value
        return value

    def _load(self, load: Load, index: list[Any]) -> Any:
        return self.read(load.source, index).astype(self.numpy_type(load.dtype))

    def read(self, source: Source, index: list[Any]) -> Any:
        """The elements of `source` at `index`, one array per axis, broadcasting; 0 outside of its extents."""
        if isinstance(source, View):
            env = dict(zip(source.axes, index, strict=True))
            sizes = tuple(self(extent, env) for extent in source.shape)
            return _guarded(index, sizes, lambda safe: self(source.value, dict(zip(source.axes, safe, strict=True))))
        array = np.asarray((self.arrays if isinstance(source, Tensor) else self.tiles)[source.name])
        return _guarded(index, array.shape, lambda safe: array[tuple(safe)])


def _guarded(index: list[Any], sizes: tuple[Any, ...], read: Callable[[list[Any]], Any]) -> Any:
    """`read` at `index`, moved to 0 where it is outside of `sizes`; those elements are 0."""
    inside = [(entry >= 0) & (entry < size) for entry, size in zip(index, sizes, strict=True)]
    everywhere = np.asarray(True)
    for part in inside:
        everywhere = everywhere & part
    if any(np.all(size <= 0) for size in sizes):
        return np.zeros(np.shape(everywhere))
    value = read([np.where(part, entry, 0) for part, entry in zip(inside, index, strict=True)])
    return np.where(everywhere, value, np.zeros((), value.dtype))


def bind(spec: Spec, arrays: Arrays) -> dict[str, int]:
    """Symbol values from the shapes of the input arrays. ValueError when two dims of one symbol differ."""
    values: dict[str, int] = {}
    for tensor in spec.inputs:
        for dim, size in zip(tensor.shape, np.shape(arrays[tensor.name]), strict=True):
            if isinstance(dim, Sym) and values.setdefault(dim.name, size) != size:
                raise ValueError(f"{tensor.name}: {dim.name} is {size} here and {values[dim.name]} elsewhere")
    return values


def evaluate(spec: Spec, arrays: Arrays, *, wide: bool = True) -> dict[str, np.ndarray]:
    """Every output of `spec` for the given inputs, by the definition in `spec.py`. Unwritten elements are NaN or -1."""
    symbols = bind(spec, arrays)
    run = Evaluator(arrays, symbols, wide=wide)
    with np.errstate(all="ignore"):
        match spec:
            case ContractionSpec():
                axes, env = _contraction(spec, run)
            case AttentionSpec():
                axes, env = _attention(spec, run)
            case RowSpec():
                axes, env = _row(spec, run)
            case ScanSpec():
                return _Recurrence(spec, Evaluator(arrays, symbols, wide=wide, tiles={})).run()
    results: dict[str, np.ndarray] = {}
    for result in spec.outputs:
        grid = _grid(result.place.axes, run)
        renamed = {place_axis: grid[place_axis] for place_axis in result.place.axes}
        values = {var: value for var, value in env.items() if var not in axes} | renamed
        if len(result.place.axes) < len(axes):  # a per-row result: the column axis is dropped from every value
            values = {var: _first_column(value, len(axes)) for var, value in values.items()}
        kept = _kept(spec, result.place, renamed, run)
        results[result.place.name] = _store(result.place, run(result.value, values), renamed, run, kept)
    return results


def _first_column(value: Any, rank: int) -> Any:
    """A per-row value that was kept with one column; of no columns at all, nothing can be meant."""
    return value[..., 0] if np.ndim(value) == rank and np.shape(value)[-1] else value


def _grid(axes: tuple[Var, ...], run: Evaluator) -> dict[Var, Any]:
    sizes = [int(run(extent_of(axis))) for axis in axes]
    return dict(zip(axes, np.meshgrid(*map(np.arange, sizes), indexing="ij", sparse=True), strict=True))


def view_array(view: View, run: Evaluator) -> Any:
    """The whole view as one dense array."""
    sizes = tuple(int(run(extent)) for extent in view.shape)
    return np.broadcast_to(run(view.value, _grid(view.axes, run)), sizes)


def _kept(spec: Spec, place: Place, grid: Mapping[Var, Any], run: Evaluator) -> Any:
    """Which elements of the grid of a place exist."""
    if not isinstance(spec, AttentionSpec) or spec.length is None:
        return True
    b, h, query = place.axes[:3]
    return grid[query] < run(spec.length, dict(zip(spec.score_axes[:2], (grid[b], grid[h]), strict=True)))


def _store(place: Place, value: Any, env: Mapping[Var, Any], run: Evaluator, kept: Any = True) -> np.ndarray:
    sizes = tuple(int(run(extent)) for extent in place.shape)
    shape = tuple(int(run(dim)) for dim in place.tensor.shape)
    dtype = run.numpy_type(place.dtype)
    poison = np.nan if place.dtype.is_float else False if place.dtype is DType.BOOL else np.array(-1).astype(dtype)
    out = np.full(shape, poison, dtype)
    index = tuple(np.broadcast_to(run(i, env), sizes) for i in place.index)
    kept = np.broadcast_to(kept, sizes)
    out[tuple(i[kept] for i in index)] = np.broadcast_to(value, sizes)[kept]
    return out


def _contraction(spec: ContractionSpec, run: Evaluator) -> tuple[tuple[Var, ...], dict[Var, Any]]:
    kind = run.numpy_type(spec.acc.dtype)  # narrow integers are summed in the accumulator's type
    left = view_array(spec.a, run).astype(kind)
    products = {product.acc: np.matmul(left, view_array(product.b, run).astype(kind)) for product in spec.products}
    return spec.outputs[0].place.axes, {**products}


def _attention(spec: AttentionSpec, run: Evaluator) -> tuple[tuple[Var, ...], dict[Var, Any]]:
    if spec.wide_alone and int(run(extent_of(spec.score_axes[2]))) == 1:
        spec = with_wide_operands(spec)
    q, k, v = (view_array(view, run) for view in (spec.q, spec.k, spec.v))
    if spec.length is not None:
        count = np.asarray(run(spec.length, _grid(spec.score_axes[:2], run)))[..., None, None]
        q, k, v = (np.where(np.arange(side.shape[2])[:, None] < count, side, 0) for side in (q, k, v))
    kind = run.numpy_type(spec.raw.dtype)  # narrow integers are summed in the placeholder's type
    env = {**_grid(spec.score_axes, run), spec.raw: np.matmul(q.astype(kind), np.swapaxes(k, -1, -2).astype(kind))}
    sizes = tuple(int(run(extent_of(axis))) for axis in spec.score_axes)
    scores = np.broadcast_to(run(spec.score, env), sizes)
    if spec.length is not None:
        scores = np.where(np.arange(sizes[-1]) < run(spec.length, env), scores, -np.inf)
    if spec.sink is not None:
        sink = view_array(spec.sink, run)[..., None]
        scores = np.concatenate([scores, sink], axis=-1)
    env[TOP] = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = (np.exp2 if spec.binary else np.exp)(scores - env[TOP])
    env[TOTAL] = np.where(env[TOP] == -np.inf, 0.0, weights.sum(axis=-1, keepdims=True))
    weights = (weights / env[TOTAL])[..., : sizes[-1]]
    if spec.nan_guard:
        weights = np.where(np.isnan(weights), 0, weights)
    for step in spec.reductions:
        value = np.broadcast_to(run(step.value, env), sizes)
        env[step.var] = REDUCE[step.kind](value, axis=-1, keepdims=True, initial=NEUTRAL[step.kind])
    env[spec.probability] = weights
    if spec.weight is not None:
        weights = np.broadcast_to(run(spec.weight, env), sizes)
    return spec.score_axes, {spec.acc: np.matmul(weights, v), **env}


def _row(spec: RowSpec, run: Evaluator) -> tuple[tuple[Var, ...], dict[Var, Any]]:
    env: dict[Var, Any] = _grid((spec.row, spec.column), run)
    sizes = tuple(int(run(extent_of(axis))) for axis in (spec.row, spec.column))
    for step in spec.steps:
        value = np.broadcast_to(run(step.value, env), sizes)
        if step.kind == "tile":
            env[step.var] = value
        elif sizes[1] == 0:
            env[step.var] = np.full((sizes[0], 1), NEUTRAL[step.kind])
        else:
            env[step.var] = REDUCE[step.kind](value, axis=1, keepdims=True)
    return (spec.row, spec.column), env


class _Recurrence:
    """A scan, step by step. Cells are dense arrays over (group, *axes), computed when a program asks for them."""

    def __init__(self, spec: ScanSpec, run: Evaluator) -> None:
        self.spec = spec
        self.evaluator = run
        self.cells: dict[str, Any] = {}
        run.tiles = self.cells
        self.made = {state.new.name: (state.axes, state.update) for state in spec.states}

    def run(self) -> dict[str, np.ndarray]:
        """Every output."""
        spec = self.spec
        for state in spec.states:
            self.cells[state.cell.name] = self.program(state.initial, state.axes, {})
        steps = self.phase(spec.time, spec.totals, commit=True)
        queries = self.phase(spec.query, spec.reads, commit=False)
        results: dict[str, np.ndarray] = {}
        for result in spec.outputs:
            axes = result.place.axes
            phase = steps if spec.time in axes else queries if spec.query in axes else None
            value = self.program(result.value, axes[1:], {}) if phase is None else phase[result.place.name]
            results[result.place.name] = _store(result.place, value, _grid(axes, self.evaluator), self.evaluator)
        return results

    def phase(self, clock: Var, totals: tuple[Total, ...], *, commit: bool) -> dict[str, Any]:
        """All steps of one clock; gives the outputs over it, (group, clock, …). `commit` carries states on."""
        outputs = [result for result in self.spec.outputs if clock in result.place.axes]
        stacked: dict[str, list[Any]] = {result.place.name: [] for result in outputs}
        by_name = {total.cell.name: total for total in totals}
        count = int(self.evaluator(extent_of(clock)))
        for now in range(count):
            for name in [*by_name, *(self.made if commit else ())]:
                self.cells.pop(name, None)
            for result in outputs:
                axes = tuple(axis for axis in result.place.axes[1:] if axis != clock)
                stacked[result.place.name].append(self.program(result.value, axes, {clock: now}, by_name))
            if commit:
                self.cells |= {
                    state.cell.name: self.cell(state.new.name, {clock: now}, by_name) for state in self.spec.states
                }
        return {
            result.place.name: np.stack(stacked[result.place.name], axis=1) if count else self.empty(result)
            for result in outputs
        }

    def empty(self, result: Result) -> np.ndarray:
        """The values of an output over a clock without steps."""
        return np.zeros([int(self.evaluator(extent)) for extent in result.place.shape])

    def cell(self, name: str, env: dict[Var, Any], totals: Mapping[str, Total]) -> Any:
        """The array of a cell, computed if it is not known yet."""
        if name not in self.cells:
            if name in self.made:
                axes, update = self.made[name]
                self.cells[name] = self.program(update, axes, env, totals)
            else:
                total = totals[name]
                values = self.program(total.value, (*total.axes, total.over), env, totals)
                kind = total.kind
                empty = np.full(values.shape[:-1], NEUTRAL[kind])
                self.cells[name] = REDUCE[kind](values, axis=-1) if values.shape[-1] else empty
        return self.cells[name]

    def program(
        self, expr: Expr, axes: tuple[Var, ...], env: dict[Var, Any], totals: Mapping[str, Total] | None = None
    ) -> Any:
        """`expr` over (group, *axes) as a dense array."""
        for load in loads(expr):
            if isinstance(load.source, Cell):
                self.cell(load.source.name, env, totals or {})
        whole = (self.spec.group, *axes)
        sizes = tuple(int(self.evaluator(extent_of(axis))) for axis in whole)
        return np.broadcast_to(self.evaluator(expr, {**env, **_grid(whole, self.evaluator)}), sizes)
