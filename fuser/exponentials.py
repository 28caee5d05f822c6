"""A softmax that is written with exponentials of the scores themselves: exp(s + r) is p · Σ exp(s) · exp(r).

Comes in: the scores s of an attention as a graph computes them, and reductions over its keys. Goes out: what each of
them is in the row's maximum `TOP`, its sum `TOTAL` and the softmax p. Where the division stands (before or after the
second product), whether a maximum is subtracted, and how many Exp nodes there are makes no difference. Without a
maximum, Σ exp(s) = `TOTAL` · exp(`TOP`) is infinite or 0 where the graph's own sum is, so that a row is NaN there too.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import reduce

import onnx_ir as ir

from fuser.beside import FLOATS
from fuser.cuts import NOTHING, Cuts, data_inputs, sample_count, trail
from fuser.element import At, Index, LiftError, attribute, dtype_of, shape_of
from fuser.lift import Leaf, rule_of
from fuser.precision import without_halves
from fuser.softmax import Site, reduced_axes
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Op, Var, apply, cast, const, rewrite, select, substitute, unary, variables
from tilecore.contract.spec import TOP, TOTAL, extent_of

SUMS = ("ReduceSum", "ReduceLogSumExp")
ADVICE = "use Softmax, or divide by ReduceSum of the same exponentials over the keys: the weights are the same"


@dataclass(slots=True)
class RowReductions:
    """Reductions over the keys of what is made of the scores; a `row` variable stands for each until `base` is known.

    `base` is the score s that all of them are made of, `index` the element of a reduction that a variable is.
    """

    cuts: Cuts
    key: Var
    nodes: dict[ir.Value, ir.Node]
    through: frozenset[ir.Value]
    at: At | None = None  # reads an element inside
    base: Expr | None = None
    index: dict[Var, tuple[ir.Value, Index]] = field(default_factory=dict[Var, tuple[ir.Value, Index]])
    used: set[ir.Node] = field(default_factory=set[ir.Node])
    made: frozenset[ir.Value] = NOTHING  # what element rules make of them, with no more elements
    _known: dict[Var, Expr] = field(default_factory=dict[Var, Expr])

    def leaf(self, value: ir.Value, index: Index) -> Expr | None:
        """The variable for an element of a reduction; None for every other value."""
        if value not in self.nodes:
            return None
        var = next((var for var, place in self.index.items() if place == (value, index)), None)
        var = var or Var(f"row{len(self.index)}", DType.F32)
        self.index[var] = (value, index)
        self.used.add(self.nodes[value])
        return cast(var, dtype_of(value, self.cuts.shapes))

    def resolved(self, expr: Expr) -> Expr:
        """`expr` with what its variables are. LiftError where one is no maximum or sum of this softmax's scores."""
        return substitute(expr, {var: self._meaning(var) for var in variables(expr) if var in self.index})

    def moved(self, renamed: dict[Expr, Expr]) -> "RowReductions":
        """The same reductions where the axes have other names."""
        base = None if self.base is None else substitute(self.base, renamed)
        return replace(self, base=base, _known={})

    def settle(self, score: Expr) -> tuple[Expr, Expr]:
        """(s, the factor that makes p the exponential) of `score` = s + what does not change along the keys."""
        self.base, rest = self._split(score)
        return self.base, _mass(None if rest is None else self.resolved(rest))

    def element(self, value: ir.Value, index: Index) -> Expr | None:
        """An element of a reduction, or of what is made of it, in `TOP` and `TOTAL`; None for every other value."""
        if value in self.made and self.at is not None:
            return self.resolved(self.at(value, index))
        found = self.leaf(value, index)
        return None if found is None else self.resolved(found)

    def _split(self, expr: Expr) -> tuple[Expr, Expr | None]:
        """(s, r) of s + r, with r made of variables of rows alone; None for no r."""
        found = variables(expr) & self.index.keys()
        if not found:
            return expr, None
        plain = without_halves(expr)
        if isinstance(plain, Op) and plain.name in ("add", "sub"):
            left, right = plain.args
            if self._is_row(right):
                base, rest = self._split(left)
                return base, _plus(rest, right if plain.name == "add" else unary("neg", right))
            if self._is_row(left) and plain.name == "add":
                base, rest = self._split(right)
                return base, _plus(rest, left)
        raise LiftError(
            "its exponentials are not of the scores plus what is the same for all keys",
            node=next(node for var in found if (node := self.nodes[self.index[var][0]])),
            advice=ADVICE,
        )

    def _is_row(self, expr: Expr) -> bool:
        return variables(expr) <= self.index.keys()

    def _meaning(self, var: Var) -> Expr:
        if var not in self._known:
            self._known[var] = self._read(*self.index[var])
        return self._known[var]

    def _read(self, value: ir.Value, index: Index) -> Expr:
        node = self.nodes[value]
        source = data_inputs(node)[0]
        (axis,) = reduced_axes(node, self.cuts.shapes, self.cuts.opset)
        kept = bool(attribute(node, "keepdims", 1))
        if self.at is None or self.base is None:
            raise LiftError("the scores are not known yet")
        full = (*index[:axis], self.key, *index[axis + 1 if kept else axis :])
        inside = self.at(source, full)
        if node.op_type == "ReduceSum":
            inside = without_halves(inside)
            inside = inside.args[0] if isinstance(inside, Op) and inside.name == "exp" else const(0.0)
        base, rest = self._split(inside)
        if without_halves(base) != without_halves(self.base):
            raise LiftError(f"{node.op_type} is over something else than its scores", node=node, advice=ADVICE)
        rest = None if rest is None else self.resolved(rest)
        if node.op_type == "ReduceSum":
            return _mass(rest)
        peak = TOP if node.op_type == "ReduceMax" else TOP + unary("log", TOTAL)
        return _plus(peak, rest) or const(0.0)


def _mass(rest: Expr | None) -> Expr:
    """Σ exp(s + rest) over the keys: TOTAL itself where the maximum is what is subtracted."""
    power = _plus(TOP, rest)
    return TOTAL if power is None else TOTAL * unary("exp", power)


def _plus(value: Expr | None, rest: Expr | None) -> Expr | None:
    """The sum of the two; a maximum that is added and subtracted goes, as it may be so large that it hides the rest."""
    terms = [term for part in (value, rest) if part is not None for term in _terms(part, negative=False)]
    for term in list(terms):
        minus = unary("neg", term)
        if term == TOP and term in terms and minus in terms:
            terms.remove(term)
            terms.remove(minus)
    return reduce(lambda left, right: left + right, terms) if terms else None


def _terms(expr: Expr, *, negative: bool) -> Iterator[Expr]:
    """What is added up in `expr`, or in −expr."""
    match expr:
        case Op(name="add" | "sub", args=(left, right)):
            yield from _terms(left, negative=negative)
            yield from _terms(right, negative=negative != (expr.name == "sub"))
        case Op(name="neg", args=(value,)):
            yield from _terms(value, negative=not negative)
        case _:
            yield unary("neg", expr) if negative else expr


def row_reductions(cuts: Cuts, site: Site, anchors: frozenset[ir.Value], key: Var) -> RowReductions | None:
    """The reductions over as many keys that read what is made of `anchors`, if there is a sum of exponentials in it."""
    found: dict[ir.Value, ir.Node] = {}
    through = trail(site.input, anchors)[0] | {site.input, site.output}
    sums = False
    for kind in ("ReduceMax", *SUMS):
        for node in cuts.remains.by_type.get(kind, ()):
            if node not in cuts.remains.alive or not _is_over_keys(node, cuts, key):
                continue
            between, reached = trail(data_inputs(node)[0], anchors.union(found))
            if not reached:
                continue
            found[node.outputs[0]] = node
            through |= between
            sums |= kind == "ReduceLogSumExp" or any(_is_exp(value) for value in between)
    made = _made_of(found, cuts)
    return RowReductions(cuts, key, found, (through | made) - anchors, made=made) if sums else None


def _made_of(reductions: Iterable[ir.Value], cuts: Cuts) -> frozenset[ir.Value]:
    """The values that element rules make of reductions, as long as they have no more elements."""
    found: set[ir.Value] = set()
    stack = list(reductions)
    while stack:
        value = stack.pop()
        count = sample_count(shape_of(value, cuts.shapes))
        for user in cuts.remains.nodes_using(value):
            out = user.outputs[0]
            if rule_of(user) is None or out in found or sample_count(cuts.shapes.shape(out) or ()) > count:
                continue
            found.add(out)
            stack.append(out)
    return frozenset(found)


def _is_exp(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type == "Exp"


def _is_over_keys(node: ir.Node, cuts: Cuts, key: Var) -> bool:
    try:
        source = data_inputs(node)[0]
        shape, axes = shape_of(source, cuts.shapes), reduced_axes(node, cuts.shapes, cuts.opset)
        floats = dtype_of(source, cuts.shapes) in FLOATS
    except LiftError:  # a shape, type or axes that nobody knows: no reduction of this softmax
        return False
    return floats and len(axes) == 1 and shape[axes[0]] == extent_of(key)


def finished(expr: Expr) -> Expr:
    """`expr` with (x · m) / m as x · (m / m): 1, or NaN where the sum m is infinite or 0; x keeps its digits."""

    def visit(node: Expr) -> Expr | None:
        match node:
            case Op(name="div", args=(Op(name="mul", args=(value, mass)), total)) if mass == total:
                return value * (mass / total)
            case _:
                return None

    return rewrite(expr, visit)


def unless_empty(value: Expr, keys: Expr) -> Expr:
    """`value`, and 0 where there are no keys at all: a sum of weights over none."""
    return select(apply("eq", keys, const(0, keys.dtype)), const(0.0), value)


def either(first: Leaf, second: Leaf) -> Leaf:
    """What the first gives, else what the second gives."""

    def leaf(value: ir.Value, index: Index) -> Expr | None:
        found = first(value, index)
        return second(value, index) if found is None else found

    return leaf


def of_shares(expr: Expr, placeholder: Var, factor: Expr) -> Expr:
    """`expr` of an exponential, or of a sum weighted by exponentials, where it is `placeholder` · `factor`."""
    return finished(substitute(expr, {placeholder: placeholder * factor}))
