"""Recurrences that are linear attention: a state to which each step adds one outer product, read out by one sum.

Comes in: a `ScanSpec`. Goes out: the operands of `library.linear_attention`, which takes steps in chunks: since
S[t] = S[c] + Σ_{c < s ≤ t} k[s] v[s]ᵀ, q[t]ᵀ S[t] is q[t]ᵀ S[c] plus the sum of (q[t] · k[s]) v[s] inside the chunk.
Terms and factors of the spec's programs are told apart by what they depend on; a spec that has any other is refused.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, TypeVar

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Op, Var, cast, const, loads, rewrite, unary, variables
from tilecore.contract.spec import Cell, Result, ScanSpec, State, Total, View
from tilecore.cuda.errors import CudaError
from tilecore.cuda.values import HALVES
from tilecore.library.epilogue import Epilogue, Formula
from tilecore.library.gated_linear_attention import gated_linear_attention
from tilecore.library.linear_attention import linear_attention

Item = TypeVar("Item")
KINDS = "CUDA kernels have recurrences of one state S = decay S + weight k vᵀ, read out by one sum over q · S"
LOG2E = math.log2(math.e)


def linear_kernel(spec: ScanSpec) -> tuple[Callable[..., None], dict[str, Any]]:
    """The kernel and its operands by parameter. CudaError for any other recurrence, with what was found."""
    state, total = _only(spec.states, "states"), _only(spec.totals, "sums")
    column = spec.column
    if column is None or len(state.axes) != 2 or state.axes[1] != column or spec.reads:
        raise CudaError(f"a state over {', '.join(map(str, state.axes))}: {KINDS}")
    kept, added = _terms(spec, state)
    key, value, weights = _sides(added, state)
    query, inclusive = _read_out(spec, state, total)
    operands: dict[str, Any] = {
        "Q": _view("Q", query, spec, total.over),
        "K": _view("K", key, spec, state.axes[0]),
        "V": _view("V", value, spec, column),
        "outputs": tuple(result.place for result in spec.outputs),
        "start": Formula((spec.group, *state.axes), state.initial),
        "results": tuple(_result(spec, state, total, result) for result in spec.outputs),
    }
    if not kept and not weights:
        return linear_attention, operands | {"inclusive": inclusive}
    if not inclusive:
        raise CudaError(f"a decaying state that is read before its step is added: {KINDS}, after the step")
    at = (spec.group, spec.time)
    decay = reduce(lambda one, other: one + other, map(_logarithm, kept), const(0.0, DType.F32))
    weight = reduce(lambda one, other: one * other, weights, const(1.0, DType.F32))
    return gated_linear_attention, operands | {"decay": Formula(at, decay), "weight": Formula(at, weight)}


def _only(items: Sequence[Item], what: str) -> Item:
    if len(items) != 1:
        raise CudaError(f"a recurrence of {len(items)} {what}: {KINDS}")
    return items[0]


def _terms(spec: ScanSpec, state: State) -> tuple[list[Expr], list[Expr]]:
    """Factors of the old state, itself left out, and of what is added to it."""
    old = Load(state.cell, (spec.group, *state.axes))
    terms = [list(_parts(term, "mul")) for term in _parts(state.update, "add")]
    holders = [factors for factors in terms if old in factors]
    others = [factors for factors in terms if old not in factors]
    if len(holders) != 1 or len(others) != 1 or holders[0].count(old) != 1:
        raise CudaError(f"a state that becomes {state.update}: {KINDS}")
    kept = [factor for factor in holders[0] if factor != old]
    for factor in kept:
        if set(state.axes) & set(variables(factor)) or _cells(factor):
            raise CudaError(f"a state that decays by {factor}, which is not one number per step: {KINDS}")
    return kept, others[0]


def _sides(factors: list[Expr], state: State) -> tuple[Expr, Expr, list[Expr]]:
    """(k, v, weights): what depends on rows, on columns, and on neither."""
    row, column = state.axes
    keys = [factor for factor in factors if row in variables(factor)]
    values = [factor for factor in factors if column in variables(factor)]
    if len(keys) != 1 or len(values) != 1 or keys == values or any(map(_cells, factors)):
        raise CudaError(f"a state to which {' · '.join(map(str, factors))} is added: {KINDS}")
    return keys[0], values[0], [factor for factor in factors if factor not in (keys[0], values[0])]


def _logarithm(factor: Expr) -> Expr:
    """Its logarithm to base 2, for factors that are at least 0 whatever they are computed from."""
    match factor:
        case Op(name="exp", args=(power,)):
            return cast(power, DType.F32) * const(LOG2E, DType.F32)
        case Op(name="exp2", args=(power,)):
            return cast(power, DType.F32)
        case Op(name="cast", args=(inner,)) if inner.dtype.is_float:
            return _logarithm(inner)
        case Op(name="sigmoid"):
            return unary("log2", cast(factor, DType.F32))
        case Const(value=number) if number > 0:
            return const(math.log2(number), DType.F32)
        case _:
            raise CudaError(
                f"a state that decays by {factor}, which may be negative: exp, sigmoid and constants may not"
            )


def _read_out(spec: ScanSpec, state: State, total: Total) -> tuple[Expr, bool]:
    """(q, whether a step reads what it has added itself)."""
    factors = list(_parts(total.value, "mul"))
    reads = {Load(cell, (spec.group, total.over, state.axes[1])): cell for cell in (state.new, state.cell)}
    found = [factor for factor in factors if factor in reads]
    others = [factor for factor in factors if factor not in reads]
    column = state.axes[1]
    plain = len(found) == 1 and len(others) == 1 and column not in variables(others[0]) and not _cells(others[0])
    if total.kind != "sum" or total.axes != (column,) or not plain or total.over.extent != state.axes[0].extent:
        raise CudaError(f"a {total.kind} of {total.value} over {total.over}: {KINDS}")
    return others[0], found[0].source == state.new  # type: ignore[union-attr]


def _result(spec: ScanSpec, state: State, total: Total, result: Result) -> tuple[bool, Epilogue]:
    """(whether every step has it, its program over what is read out, or over the last state)."""
    acc = Var("acc", DType.F32)
    axes = result.place.axes
    stepwise = spec.time in axes
    if stepwise and axes == (spec.group, spec.time, spec.column):
        source: Expr = Load(total.cell, (spec.group, total.axes[0]))
    elif not stepwise and len(axes) == 3 and (axes[0], axes[2]) == (spec.group, spec.column):
        source = Load(state.cell, axes)
    else:
        raise CudaError(f"output {result.place.name} over {', '.join(map(str, axes))}: {KINDS}")
    value = rewrite(result.value, lambda node: acc if node == source else None)
    if _cells(value):
        raise CudaError(f"output {result.place.name} is {result.value}, which reads more than {source}: {KINDS}")
    return stepwise, Epilogue((acc,), Result(result.place, value))


def _view(name: str, value: Expr, spec: ScanSpec, axis: Var) -> View:
    """16-bit elements as they lie in memory; the products widen them."""
    if isinstance(value, Op) and value.name == "cast" and value.dtype is DType.F32 and value.args[0].dtype in HALVES:
        value = value.args[0]
    return View(name, (spec.group, spec.time, axis), value)


def _parts(expr: Expr, name: str) -> Iterator[Expr]:
    """Terms of a sum, or factors of a product."""
    if isinstance(expr, Op) and expr.name == name:
        for arg in expr.args:
            yield from _parts(arg, name)
    else:
        yield expr


def _cells(expr: Expr) -> bool:
    return any(isinstance(load.source, Cell) for load in loads(expr))
