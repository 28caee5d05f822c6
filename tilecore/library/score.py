"""The score of an attention region as kernels see it: its pointwise program, the key tiles it needs and its finish.

Key tiles: an index predicate that makes the score exactly −inf where it fails, and is linear in the query and the key,
bounds the loop over keys. Only what cannot change any result is left out: −inf weighs nothing.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilecore import language as T
from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import NEUTRAL
from tilecore.contract.expr import (
    Const,
    Expr,
    Op,
    Var,
    apply,
    binary,
    cast,
    const,
    from_polynomial,
    loads,
    polynomial,
    substitute,
    variables,
)
from tilecore.contract.spec import TOP, TOTAL, AttentionSpec, Result, Step, View
from tilecore.language import Handle, Value
from tilecore.library.epilogue import Epilogue
from tilecore.library.online_softmax import LOG2E
from tilecore.value import Operand, plain, program

BOUNDED = 50.0  # of scores: their exponentials, and sums of 2^31 of them, are normal numbers in f32


@dataclass(frozen=True, slots=True)
class Bound:
    """Where the score is finite, `key` ≤ `query_factor` · query + `offset` (an upper bound), or ≥ (a lower one)."""

    upper: bool
    query_factor: int
    offset: Expr


@dataclass(frozen=True, slots=True)
class Score:
    """The program of the spec, with its sink and its outputs.

    A guarded row without weights is Σ 0 · V, which is NaN where V is not finite; not `exact`, it is 0.
    """

    spec: AttentionSpec
    bounds: tuple[Bound, ...]
    exact: bool = True

    @property
    def queries(self) -> Operand:
        """How many queries there are at most."""
        return plain(self.spec.q.shape[2])

    def keys(self, b: Operand, h: Operand) -> Operand:
        """How many keys there are, which are as many as queries where data says so."""
        if self.spec.length is None:
            return plain(self.spec.k.shape[2])
        length = binary("min", self.spec.length, self.spec.k.shape[2])
        return program(length, dict(zip(self.spec.score_axes[:2], (b, h), strict=True)))

    @property
    def reductions(self) -> tuple[Step, ...]:
        """What is reduced over the keys beside the scores."""
        return self.spec.reductions

    @property
    def row_vars(self) -> tuple[Var, ...]:
        """What programs may know of a row: its reductions, then its maximum and its sum."""
        return (*(step.var for step in self.spec.reductions), TOP, TOTAL)

    def finals(self, outputs: Sequence[Handle]) -> list[tuple[Handle, Epilogue]]:
        """The outputs over (b, h, q, e), and what they are: functions of the sum and the reductions."""
        accs = (self.spec.acc, *self.row_vars)
        pairs = zip(outputs, self.spec.outputs, strict=True)
        return [(out, Epilogue(accs, result)) for out, result in pairs if not is_per_key(self.spec, result)]

    def taps(self, outputs: Sequence[Handle], *, shared: bool) -> list[tuple[Handle, Epilogue]]:
        """The outputs over (b, h, q, k): functions of the dot product; where `shared` also of share and reductions."""
        known = (self.spec.probability, *self.row_vars) if shared else ()
        accs = (self.spec.raw, *known)
        pairs = zip(outputs, self.spec.outputs, strict=True)
        return [(out, Epilogue(accs, result)) for out, result in pairs if is_per_key(self.spec, result)]

    @property
    def dtype(self) -> DType:
        """The type of scores and sums."""
        return self.spec.acc.dtype

    def __call__(self, raw: Operand, b: Operand, h: Operand, q: Operand, k: Operand) -> Value:
        """The score for the dot product `raw`, in the type of sums."""
        arguments = {self.spec.raw: raw, **dict(zip(self.spec.score_axes, (b, h, q, k), strict=True))}
        return T.cast(program(self.spec.score, arguments), self.dtype)

    @property
    def tells_statistics(self) -> bool:
        """Whether something wants to know a row's maximum or the sum under it."""
        read = {var for result in self.spec.outputs for var in variables(result.value)}
        read |= {var for step in self.spec.reductions for var in variables(step.value)}
        return bool(read & {TOP, TOTAL})

    def bounded(self, values: DType) -> bool:
        """Whether every score is so small, or −inf, that weights without a maximum are floats, as factors of V too, and
        nothing else wants to know the maximum.
        """
        narrow = values is DType.F16 or self.dtype is DType.F16
        if self.spec.sink is not None or narrow or self.tells_statistics:
            return False
        return _magnitude(self.spec.score) <= BOUNDED

    @property
    def unit(self) -> float:
        """How many powers of 2 a score of 1 is."""
        return 1.0 if self.spec.binary else LOG2E

    @property
    def raw_dtype(self) -> DType:
        """The type of dot products: i32 of integer operands, else that of scores."""
        return self.spec.raw.dtype

    def weight(self, known: Sequence[Operand], *index: Operand) -> Value:
        """What V is multiplied by at (b, h, q, k), for the normalised probability and the values of `row_vars`."""
        arguments = dict(zip(self.spec.score_axes, index, strict=True))
        arguments |= zip((self.spec.probability, *self.row_vars), known, strict=True)
        return program(self.spec.probability if self.spec.weight is None else self.spec.weight, arguments)

    def part(self, step: Step, inside: Value, *index: Operand) -> Value:
        """What `step` reduces at (b, h, q, k), and its neutral element for keys that are not `inside`."""
        value = program(step.value, dict(zip(self.spec.score_axes, index, strict=True)))
        return T.if_then_else(inside, T.cast(value, step.var.dtype), NEUTRAL[step.kind])

    def first(self, b: Operand, h: Operand, q: Operand) -> Operand:
        """The logit that a row starts with: the sink's, or −inf, which weighs nothing."""
        sink: View | None = self.spec.sink
        if sink is None:
            return -T.infinity
        return T.cast(program(sink.value, dict(zip(sink.axes, (b, h, q), strict=True))), self.dtype)

    def share(self, weighted: Value, total: Value) -> Value:
        """A part of a row's sum over that sum: NaN, or 0 with the guard, where nothing weighs."""
        value = weighted / total
        return T.if_then_else((total > 0.0), value, 0.0) if self.spec.nan_guard else value

    def finish(self, weighted: Value, total: Value, keys: Operand) -> Value:
        """The output of a row: NaN, with the guard Σ 0 · V, where nothing weighs; 0 where there are no keys at all."""
        value = weighted / total
        if self.spec.nan_guard:
            value = T.if_then_else(total > 0.0, value, weighted if self.exact else 0.0)
        return value if isinstance(keys, int) and keys > 0 else T.if_then_else(keys == 0, 0.0, value)

    def guards(self, values: Handle) -> bool:
        """Whether rows with NaN weights are sums of 0 · V, which is NaN where `values` may not be finite."""
        return self.spec.nan_guard and self.exact and values.dtype.is_float

    def key_tiles(self, m: Value, block_m: Operand, block_n: Operand, keys: Operand) -> tuple[Operand, Operand]:
        """First and last (exclusive) key tile that query tile `m` needs."""
        start: Operand = 0
        stop = keys
        for bound in self.bounds:
            rows_end = bound.upper == (bound.query_factor > 0)
            query = m * block_m + block_m - 1 if rows_end else m * block_m
            limit = query * bound.query_factor + Value(bound.offset)
            if bound.upper:
                stop = T.min(stop, T.max(limit + 1, 0))
            else:
                start = T.max(start, limit)
        return (start if isinstance(start, int) else start // block_n), T.ceildiv(stop, block_n)


def score_of(spec: AttentionSpec) -> Score:
    """The score object of a spec."""
    if not _weighs_nothing(spec) or any(is_per_key(spec, result) for result in spec.outputs):
        return Score(spec, ())
    bounds = dict.fromkeys(_bounds(spec, spec.score))
    for step in spec.reductions:  # a key that is left out must count for nothing there too
        own = set(_bounds(spec, step.value)) if step.kind == "max" else set[Bound]()
        bounds = {bound: None for bound in bounds if bound in own}
    return Score(spec, tuple(bounds))


def is_per_key(spec: AttentionSpec, result: Result) -> bool:
    """Whether an output has an element per query and key, not per query and column of V."""
    return result.place.axes == spec.score_axes


def needs_shares(spec: AttentionSpec) -> bool:
    """Whether the normalised probability itself is read, so that a row's sum must be known before its first weight."""
    late = {spec.probability, TOP, TOTAL, *(step.var for step in spec.reductions)}
    taps = [result.value for result in spec.outputs if is_per_key(spec, result)]
    return spec.weight is not None or any(late & variables(value) for value in taps)


def _magnitude(score: Expr) -> float:
    """A bound of |score| wherever it is not −inf or NaN; infinite where none is known."""
    match score:
        case Const(value=value):
            return abs(float(value))
        case Op(name="tanh" | "sigmoid" | "erf" | "sin" | "cos"):
            return 1.0
        case Op(name="select", args=(_, yes, no)):
            return max((_magnitude(side) for side in (yes, no) if not _minus_infinity(side)), default=0.0)
        case Op(name="cast", args=(value,)) if score.dtype.is_float and value.dtype.is_float:
            return _magnitude(value)
        case Op(name="mul", args=(left, right)):
            return _magnitude(left) * _magnitude(right)
        case Op(name="div", args=(value, Const(value=factor))) if factor != 0:
            return _magnitude(value) / abs(float(factor))
        case Op(name="add" | "sub", args=(left, right)):
            return _magnitude(left) + _magnitude(right)
        case Op(name="neg" | "abs", args=(value,)):
            return _magnitude(value)
        case _:
            return math.inf


def _weighs_nothing(spec: AttentionSpec) -> bool:
    """Whether a probability of 0 gives a weight of 0: only then can keys that have it be left out."""
    if spec.weight is None:
        return True
    return substitute(spec.weight, {spec.probability: const(0.0)}) == const(0.0)


def _bounds(spec: AttentionSpec, value: Expr) -> Iterator[Bound]:
    _, _, query, key = spec.score_axes
    for slack in _needed(value):
        if slack.dtype is DType.I64:
            yield from _linear(slack, query, key)


def _needed(score: Expr) -> Iterator[Expr]:
    """Integers that are all at least 0 wherever `score` is not exactly −inf, whatever the other values in it are."""
    match score:
        case Op(name="select", args=(condition, yes, no)):
            if _minus_infinity(no):
                yield from _conjuncts(condition, True)
                yield from _needed(yes)
            elif _minus_infinity(yes):
                yield from _conjuncts(condition, False)
                yield from _needed(no)
        case Op(name="cast", args=(value,)) if score.dtype.is_float:
            yield from _needed(value)
        case Op(name="mul", args=(value, Const(value=factor)) | (Const(value=factor), value)) if (
            0 < factor < T.infinity
        ):
            yield from _needed(value)
        case Op(name="div", args=(value, Const(value=factor))) if 0 < factor < T.infinity:
            yield from _needed(value)
        case Op(name="add", args=(value, Const(value=term)) | (Const(value=term), value)) if abs(term) < T.infinity:
            yield from _needed(value)
        case Op(name="sub", args=(value, Const(value=term))) if abs(term) < T.infinity:
            yield from _needed(value)
        case _:
            pass


def _minus_infinity(expr: Expr) -> bool:
    return isinstance(expr, Const) and expr.value == -T.infinity


def _conjuncts(condition: Expr, holds: bool) -> Iterator[Expr]:
    """Integers that are all at least 0 where `condition` is `holds`."""
    if not isinstance(condition, Op):
        return
    if condition.name == "not":
        yield from _conjuncts(condition.args[0], not holds)
    elif condition.name == ("and" if holds else "or"):
        for part in condition.args:
            yield from _conjuncts(part, holds)
    elif condition.name in ("lt", "le", "gt", "ge") and condition.args[0].dtype.is_int:
        left, right = condition.args
        if condition.name in (("gt", "ge") if holds else ("lt", "le")):
            left, right = right, left
        strict = condition.name in (("lt", "gt") if holds else ("le", "ge"))
        yield from _slacks(_index(left), _index(right), 1 if strict else 0)


def _slacks(low: Expr, high: Expr, gap: int) -> Iterator[Expr]:
    """Expressions that are all at least 0 where `low` + `gap` ≤ `high`; |x| is both x and −x."""
    if isinstance(low, Op) and low.name == "abs":
        yield high - low.args[0] - gap
        yield high + low.args[0] - gap
    else:
        yield high - low - gap


def _index(expr: Expr) -> Expr:
    """An integer expression in i64: positions fit every integer type that a model counts them in."""

    def visit(node: Expr) -> Expr:
        if isinstance(node, Const):
            return const(node.value)
        if isinstance(node, Op) and node.name == "cast" and node.args[0].dtype.is_int:
            return visit(node.args[0])
        if isinstance(node, Op) and node.name in ("add", "sub", "mul", "neg", "abs"):
            return apply(node.name, *map(visit, node.args))
        return cast(node, DType.I64)

    return visit(expr)


def _linear(slack: Expr, query: Var, key: Var) -> Iterator[Bound]:
    """`slack` ≥ 0 as a bound of the key, when it is linear in query and key with nothing else but symbols."""
    terms = polynomial(slack)
    factors = {axis: terms.pop((axis,), 0) for axis in (query, key)}
    rest = from_polynomial(terms)
    if abs(factors[key]) != 1 or variables(rest) or loads(rest):
        return
    # key · (±1) + query · a + rest ≥ 0  ⇔  key ≤ query · a + rest, or key ≥ −(query · a + rest)
    upper = factors[key] < 0
    yield Bound(upper, factors[query] if upper else -factors[query], rest if upper else -rest)
