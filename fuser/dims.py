"""Dim arithmetic for shape inference: exact for every symbol ≥ 0, under facts that hold whenever the model runs.

Comes in: i64 expressions of `tilecore.contract.expr`. Goes out: the same, canonical. Two kinds of fact are gathered on
the way, both implied by the model running without an error: equalities (the inner dims of a MatMul) and bounds (a
constant mask of 1024 rows sliced to `seq` and added to `seq` rows means `seq ≤ 1024`). Where two dims meet that only
a name or the size of a table makes equal, that is assumed, as bounds that a fused node has to check.

Invariant: unlike the folding in `tilecore.contract.expr`, nothing here assumes that a symbol is at least 1; a past of
length 0 is common.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from math import prod
from operator import add, mul

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Op, Poly, Sym, from_polynomial, polynomial, substitute, symbols, walk

Shape = tuple[Expr, ...]
INFINITE = 2**31 - 1  # a Slice end this large means "to the end": no dim reaches it
DEPTH = 6  # nesting of min, max and select that a proof looks into
CHOICES = frozenset({"min", "max", "select"})
ONE = Const(1, DType.I64)
ZERO = Const(0, DType.I64)


def dim(value: int | Expr) -> Expr:
    """A literal or expression as an i64 expression."""
    return Const(int(value), DType.I64) if isinstance(value, int) else value


def integer(expr: Expr) -> int | None:
    """The value of a literal; None for anything else."""
    return int(expr.value) if isinstance(expr, Const) else None


def product(dims: Iterable[Expr]) -> Expr:
    """The product of some dims; 1 for none."""
    total: Expr = ONE
    for factor in dims:
        total = total * factor
    return total


@dataclass(frozen=True, slots=True)
class Facts:
    """What must hold in every run without an error: `equal` maps a dim to what it equals, each of `bounds` is ≥ 0.

    So is `holds` of each of `conditions`, of which nothing follows for other dims. Those that are `assumed` may
    be broken by a run of the original: fused models refuse such runs.
    """

    equal: tuple[tuple[Expr, Expr], ...] = ()
    bounds: tuple[Expr, ...] = ()
    conditions: tuple[Expr, ...] = ()
    assumed: tuple[Expr, ...] = ()

    def joined(self, other: "Facts") -> "Facts":
        """Both; where both say what a dim equals, these facts do."""
        equal = {**dict(other.equal), **dict(self.equal)}
        order = dict.fromkeys((*dict(self.equal), *equal))
        lists = (
            tuple(dict.fromkeys((*getattr(self, name), *getattr(other, name))))
            for name in ("bounds", "conditions", "assumed")
        )
        return Facts(tuple((dim, equal[dim]) for dim in order), *lists)

    @property
    def checks(self) -> tuple[Expr, ...]:
        """Expressions that are at least 0 exactly where bounds and conditions hold."""
        return (*self.bounds, *map(holds, self.conditions))


@dataclass(slots=True)
class Dims:
    """Dim arithmetic under `facts`; gathers more of them in `found`. `fresh` are symbols that inference made up.

    `whole` are symbols that are a dim of a model input by themselves, `hints` what the names of others say, over these.
    """

    facts: Facts
    fresh: set[Sym] = field(default_factory=set[Sym])
    whole: frozenset[Sym] = frozenset()
    hints: Mapping[Expr, Expr] = field(default_factory=dict[Expr, Expr])
    found: Facts = field(default_factory=Facts)
    recording: bool = True  # off in bodies of loops: they may never run, and no iteration checks the last results
    _bounds: list[Poly] = field(init=False)
    _equal: dict[Expr, Expr] = field(init=False)

    def __post_init__(self) -> None:
        self._bounds = [polynomial(bound) for bound in self.facts.bounds]
        self._equal = dict(self.facts.equal)
        for old, new in self.facts.equal:
            for _ in self._equal:  # a chain of equalities ends after at most as many steps as there are
                new = substitute(new, self._equal)
            self._equal[old] = new

    def within(self, facts: Facts) -> "Dims":
        """Dim arithmetic where `facts` hold too, which gathers facts of its own."""
        inner = Dims(self.facts.joined(facts), fresh=self.fresh, whole=self.whole, hints=self.hints)
        inner._bounds += self._bounds
        return inner

    def known(self, expr: Expr) -> Expr:
        """What a dim (a symbol or an undecided broadcast) is known to equal; the dim itself when nothing is known."""
        return self._equal.get(expr, expr)

    def symbol(self, name: str) -> Expr:
        """A symbol for a dim that nothing is known of."""
        made = Sym(name)
        self.fresh.add(made)
        return self.known(made)

    # -- proofs ---------------------------------------------------------------------------------------------------

    def nonnegative(self, expr: Expr) -> bool:
        """True when `expr` ≥ 0 is proved for all symbols ≥ 0 that agree with the facts. False means "not proved"."""
        return self._proved(polynomial(expr), self._bounds, DEPTH)

    def _proved(self, poly: Poly, bounds: Sequence[Poly], depth: int) -> bool:
        if self._follows(poly, bounds, depth):
            return True
        if depth == 0:
            return False
        outer = dict.fromkeys(atom for term in poly for atom in term if isinstance(atom, Op))
        inner = (node for atom in outer for node in walk(atom) if isinstance(node, Op))
        choice = next((node for node in inner if node.name in CHOICES), None)
        if choice is not None:  # the innermost one first
            return all(
                self._proved(_put(poly, choice, value), [*(_put(b, choice, value) for b in bounds), *extra], depth - 1)
                for value, extra in self._cases(choice)
            )
        for atom in outer:
            if atom.name == "floordiv" and all(c < 0 for term, c in poly.items() if atom in term):
                x, n = atom.args
                if self._proved(polynomial(x), bounds, depth - 1):  # 0 ≤ x // n ≤ x
                    count = integer(n)
                    scaled = _put({t: c for t, c in poly.items() if atom in t}, atom, x)
                    rest = {t: c for t, c in poly.items() if atom not in t}
                    if count and all(c % count == 0 for c in scaled.values()):
                        scaled = {t: c // count for t, c in scaled.items()}
                    return self._proved(_minus(rest, scaled, -1), bounds, depth - 1)
        return False

    def _follows(self, poly: Poly, bounds: Sequence[Poly], depth: int) -> bool:
        """`poly` ≥ 0 by its signs, by one bound (once or twice), or by two bounds of the case in hand."""
        if self._plainly(poly, bounds, depth):
            return True
        one = (_minus(poly, bound, times) for bound in bounds for times in (1, 2))
        two = (_minus(_minus(poly, a), b) for a, b in combinations(bounds[len(self._bounds) :], 2))
        return any(self._plainly(rest, bounds, depth) for rest in chain(one, two))

    def _plainly(self, poly: Poly, bounds: Sequence[Poly], depth: int) -> bool:
        if any(coefficient < 0 for coefficient in poly.values()):
            return False
        return all(self._at_least_zero(atom, bounds, depth) for atom in {atom for term in poly for atom in term})

    def _at_least_zero(self, atom: Expr, bounds: Sequence[Poly], depth: int) -> bool:
        if isinstance(atom, Sym):
            return True
        if not isinstance(atom, Op) or depth == 0:
            return False
        if atom.name == "mod":
            return True
        args = atom.args[1:] if atom.name == "select" else atom.args
        proofs = (self._proved(polynomial(arg), bounds, depth - 1) for arg in args)
        if atom.name in ("min", "select", "floordiv"):
            return all(proofs)
        return any(proofs) if atom.name == "max" else False

    @staticmethod
    def _cases(atom: Op) -> list[tuple[Expr, list[Poly]]]:
        """The values that a min, max or select may have, each with the bound that then holds (a ≤ b, or b ≤ a - 1)."""
        if atom.name == "select":
            return [(atom.args[1], []), (atom.args[2], [])]
        small, large = atom.args if atom.name == "min" else atom.args[::-1]
        a, b = atom.args
        return [(a, [polynomial(large - small)]), (b, [polynomial(small - large - 1)])]

    # -- operations -----------------------------------------------------------------------------------------------

    def minimum(self, a: Expr, b: Expr) -> Expr:
        """The smaller of two integers."""
        if self.nonnegative(b - a):
            return a
        if self.nonnegative(a - b):
            return b
        return Op("min", _ordered(a, b), DType.I64)

    def maximum(self, a: Expr, b: Expr) -> Expr:
        """The larger of two integers."""
        if self.nonnegative(a - b):
            return a
        if self.nonnegative(b - a):
            return b
        return Op("max", _ordered(a, b), DType.I64)

    def simplest(self, expr: Expr) -> Expr:
        """A symbol that `expr` equals, where nested min and max hide it; else `expr` itself."""
        if not any(isinstance(atom, Op) and atom.name in ("min", "max") for term in polynomial(expr) for atom in term):
            return expr
        for symbol in sorted(symbols(expr), key=str):
            if self.nonnegative(expr - symbol) and self.nonnegative(symbol - expr):
                return symbol
        return expr

    def compare(self, name: str, a: Expr, b: Expr) -> Expr:
        """`a name b` for "eq", "ne", "lt", "le", "gt" or "ge", decided where the facts allow it."""
        if name in ("gt", "ge"):
            a, b, name = b, a, {"gt": "lt", "ge": "le"}[name]
        below, above = self.nonnegative(b - a - 1), self.nonnegative(a - b - 1)
        if name in ("eq", "ne") and (a == b or below or above):
            return Const((a == b) is (name == "eq"), DType.BOOL)
        if name in ("lt", "le"):
            if below or (name == "le" and self.nonnegative(b - a)):
                return Const(True, DType.BOOL)
            if above or (name == "lt" and self.nonnegative(a - b)):
                return Const(False, DType.BOOL)
        return Op(name, (a, b), DType.BOOL)

    def divide(self, total: Expr, by: Expr) -> Expr:
        """`total / by` where the model only runs if it divides: the exact quotient, else a floor division."""
        exact = divide_exactly(total, by)
        return self.floor(total, by) if exact is None else exact

    def floor(self, total: Expr, by: Expr) -> Expr:
        """`total // by` for `by` ≥ 1, with every multiple of it taken out."""
        quotient, rest = self._split(total, by)
        if rest != ZERO and isinstance(rest, Op) and rest.name == "floordiv":  # (x // a) // b = x // (a · b)
            return quotient + self.floor(rest.args[0], rest.args[1] * by)
        return quotient if rest == ZERO else quotient + Op("floordiv", (rest, by), DType.I64)

    def remainder(self, total: Expr, by: Expr) -> Expr:
        """`total % by` for `by` ≥ 1."""
        _, rest = self._split(total, by, keep=True)
        if rest == ZERO or (self.nonnegative(rest) and self.nonnegative(by - rest - 1)):
            return rest
        return Op("mod", (rest, by), DType.I64)

    def _split(self, total: Expr, by: Expr, *, keep: bool = False) -> tuple[Expr, Expr]:
        """total = quotient · by + rest; a rest that is proved below `by` is dropped unless `keep`."""
        quotient: Expr = ZERO
        rest: Expr = ZERO
        step = integer(by)
        for monomial, coefficient in polynomial(total).items():
            term = product(monomial) * coefficient
            exact = divide_exactly(term, by)
            if exact is None and step:
                whole, part = divmod(coefficient, step)
                exact, term = product(monomial) * whole, product(monomial) * part
                rest = rest + term
            elif exact is None:
                exact, rest = ZERO, rest + term
            quotient = quotient + exact
        whole_quotient = divide_exactly(rest, by)
        if whole_quotient is not None:
            return quotient + whole_quotient, ZERO
        inside = self.nonnegative(rest) and self.nonnegative(by - rest - 1)
        return quotient, ZERO if inside and not keep else rest

    def ceiling(self, total: Expr, by: Expr) -> Expr:
        """`total / by`, rounded up; `by` ≥ 1."""
        return self.floor(total + by - 1, by)

    def broadcast(self, a: Expr, b: Expr) -> Expr:
        """The dim that numpy broadcasting of `a` and `b` gives; a select of the two when either may be 1."""
        for x, y in ((a, b), (b, a)):
            if x in (y, ONE):
                return y
            if isinstance(x, Const) and isinstance(y, Const):
                return x if y == ONE else y if x == ONE else x
            if self.nonnegative(x - 2):  # the other is 1 or the same
                return x
            if self._one_only_with(y, x):
                self.must_equal(y, x)
                return x
        common = self._inside_tables(a, b)
        if common is not None:
            return common
        candidates = sorted({*candidates_of(a), *candidates_of(b)}, key=str)
        result = candidates[-1]
        for candidate in reversed(candidates[:-1]):
            result = Op("select", (_equals(candidate, ONE), result, candidate), DType.I64)
        self._record(condition=_either(_either(_equals(a, b), _equals(a, ONE)), _equals(b, ONE)))
        return self._named_alike(a, b, self.known(result))

    def broadcast_shapes(self, *shapes: Shape) -> Shape:
        """Numpy broadcasting of whole shapes."""
        rank = max(map(len, shapes), default=0)
        result: list[Expr] = [ONE] * rank
        for shape in shapes:
            for axis, size in enumerate(shape, rank - len(shape)):
                result[axis] = self.broadcast(result[axis], size)
        return tuple(result)

    def _one_only_with(self, small: Expr, large: Expr) -> bool:
        """True when `small` = 1 implies `large` = 1: small is min(large, c) with c ≥ 2."""
        if not (isinstance(small, Op) and small.name == "min" and large in small.args):
            return False
        other = small.args[1] if small.args[0] == large else small.args[0]
        return self.nonnegative(other - 2)

    # -- assumptions ----------------------------------------------------------------------------------------------

    def _inside_tables(self, a: Expr, b: Expr) -> Expr | None:
        """The dim that `a` and `b` both are if no slice reaches beyond what it slices; None when they are not then.

        Without that, they could differ where one is 1. It is noted, to be checked.
        """
        needed: list[Expr] = []
        left, right = (self._unclamped(side, needed) for side in (a, b))
        if left != right or not all(symbols(bound) <= self.whole for bound in needed):
            return None
        needed = [bound for bound in dict.fromkeys(needed) if not self.nonnegative(bound)]
        if needed and not self.recording:
            return None
        for bound in needed:
            self._record(bound=bound, assumed=True)
        return left

    def _named_alike(self, a: Expr, b: Expr, result: Expr) -> Expr:
        """`result`, the broadcast of `a` and `b`; the dim that both are called after where names say that it is one.

        Only that the broadcast is so long is noted, to be checked: a dim of 1 may still be broadcast.
        """
        if not self.hints or not self.recording or len(candidates_of(result)) == 1:
            return result
        left, right = (self.simplest(self._hinted(side)) for side in (a, b))
        if left != right or left not in candidates_of(result) or not symbols(result) <= self.whole:
            return result
        self._record(equal=(result, left))
        self._record(condition=_equals(result, left), assumed=True)
        return left

    def _hinted(self, expr: Expr) -> Expr:
        """`expr` where every name of a dim tells the truth."""
        if not isinstance(expr, Op):
            return self.hints.get(expr, expr)
        return self._rebuilt(expr, [self._hinted(arg) for arg in expr.args])

    def _unclamped(self, expr: Expr, needed: list[Expr]) -> Expr:
        """What `expr` is where no minimum with a number is that number; adds what that takes."""
        if not isinstance(expr, Op):
            return expr
        args = [self._unclamped(arg, needed) for arg in expr.args]
        for size, limit in (args, args[::-1]) if expr.name == "min" else ():
            if isinstance(limit, Const) and not isinstance(size, Const):
                needed.append(limit - size)
                return size
        return self._rebuilt(expr, args)

    def _rebuilt(self, expr: Op, args: Sequence[Expr]) -> Expr:
        rules = {"add": add, "mul": mul, "min": self.minimum, "max": self.maximum}
        rule = rules.get(expr.name)
        return Op(expr.name, tuple(args), expr.dtype) if rule is None else rule(*args)

    # -- facts ----------------------------------------------------------------------------------------------------

    def exists(self, shape: Shape) -> Shape:
        """Note that dims of a tensor are at least 0; gives the shape back."""
        for size in shape:
            if isinstance(size, Op) and not self.nonnegative(size):
                self._bounds.append(polynomial(size))
        return shape

    def must_equal(self, a: Expr, b: Expr) -> Expr:
        """Record that the model only runs if a = b; gives the simpler of the two."""
        if a == b:
            return a
        for x, y in ((a, b), (b, a)):
            if isinstance(x, Op) and x.name == "min" and y in x.args:
                other = x.args[1] if x.args[0] == y else x.args[0]
                self._record(bound=other - y)
                return y
            if x in self.fresh or (isinstance(x, Op) and x.name == "select" and y in candidates_of(x)):
                if x not in symbols(y):
                    self._record(equal=(x, y))
                return y
        for x, y in ((a, b), (b, a)):
            if isinstance(x, Sym) and isinstance(y, Const):
                self._record(equal=(x, y))
                return y
        if isinstance(a, Sym) and isinstance(b, Sym):
            self._record(equal=(b, a))
            return a
        for x, y in ((a, b), (b, a)):
            if x in self.whole and isinstance(y, Op) and symbols(y) <= self.whole and not self._leads_back(x, y):
                self._record(equal=(x, y))
                return y
        self._settle(a, b)
        return a

    def _leads_back(self, old: Expr, new: Expr) -> bool:
        """Whether putting `new` for a symbol `old` could go round in circles, together with what is known so far."""
        known = (*self.facts.equal, *self.found.equal)
        replaced = {old, *(key for key, _ in known)}
        return bool(symbols(new) & replaced) or any(old in symbols(value) for _, value in known)

    def _settle(self, a: Expr, b: Expr) -> tuple[Expr, Expr] | None:
        """Record which dim a broadcast that was not decided has, where that follows from a = b; gives the two."""
        rest = polynomial(a - b)
        for term, coefficient in rest.items():
            if len(term) == 1 and coefficient in (1, -1) and len(candidates_of(term[0])) > 1:
                value = term[0] - (a - b) * coefficient
                if value in candidates_of(term[0]):
                    self._record(equal=(term[0], value))
                    return term[0], value
        return None

    def same_count(self, old: Sequence[Expr], new: Sequence[Expr]) -> None:
        """Record what follows from as many elements in `old` as in `new`.

        Dims of both are left out. Where one of them may be 0, the others need not be equal: that they are is assumed.
        """
        left, common = list(old), list[Expr]()
        right = list[Expr]()
        for size in new:
            if size in left:
                left.remove(size)
                common.append(size)
            else:
                right.append(size)
        counts = [integer(product(size for size in side if isinstance(size, Const))) for side in (left, right)]
        rest = [[size for size in side if not isinstance(size, Const)] for side in (left, right)]
        if counts[0] != counts[1] or not counts[0] or [len(side) for side in rest] != [1, 1]:
            return
        found = self._settle(rest[0][0], rest[1][0])
        if found is not None and not all(self.nonnegative(size - 1) for size in common):
            self._record(condition=_equals(*found), assumed=True)

    def must_hold(self, bound: Expr) -> None:
        """Record that the model only runs if `bound` ≥ 0."""
        if not self.nonnegative(bound):
            self._record(bound=bound)

    def _record(
        self,
        *,
        equal: tuple[Expr, Expr] | None = None,
        bound: Expr | None = None,
        condition: Expr | None = None,
        assumed: bool = False,
    ) -> None:
        if not self.recording:
            return
        known = self.found
        equalities = known.equal + ((equal,) if equal and equal[0] not in dict(known.equal) else ())
        bounds, conditions = _with(known.bounds, bound), _with(known.conditions, condition)
        check = bound if condition is None else holds(condition)
        self.found = Facts(equalities, bounds, conditions, _with(known.assumed, check) if assumed else known.assumed)


def _with(known: tuple[Expr, ...], new: Expr | None) -> tuple[Expr, ...]:
    return known if new is None or new in known else (*known, new)


def _equals(a: Expr, b: Expr) -> Expr:
    return Op("eq", (a, b), DType.BOOL)


def _either(a: Expr, b: Expr) -> Expr:
    return Op("or", (a, b), DType.BOOL)


def holds(condition: Expr) -> Expr:
    """0 where a condition holds, -1 where it does not: a condition as a bound."""
    return Op("select", (condition, ZERO, Const(-1, DType.I64)), DType.I64)


def candidates_of(expr: Expr) -> tuple[Expr, ...]:
    """The dims that a broadcast dim may be: (a, b) for `broadcast(a, b)` that was not decided; (expr,) for others."""
    if isinstance(expr, Op) and expr.name == "select":
        condition, rest, candidate = expr.args
        if condition == _equals(candidate, ONE):
            return (candidate, *candidates_of(rest))
    return (expr,)


def divide_exactly(total: Expr, by: Expr) -> Expr | None:
    """The polynomial q with q · by = total, or None when there is none."""
    divisor = polynomial(by)
    if not divisor:
        return None
    rest = polynomial(total)
    lead = max(divisor, key=_order)
    quotient: Poly = {}
    while rest:
        top = max(rest, key=_order)
        factors = list(top)
        for atom in lead:
            if atom not in factors:
                return None
            factors.remove(atom)
        if rest[top] % divisor[lead]:
            return None
        term: Poly = {tuple(factors): rest[top] // divisor[lead]}
        quotient = _minus(quotient, term, -1)
        rest = _minus(rest, polynomial(from_polynomial(term) * by))
    return from_polynomial(quotient)


def _order(monomial: tuple[Expr, ...]) -> tuple[int, list[str]]:
    """Graded, then lexicographic: a monomial order, so that division of a multiple leaves no remainder."""
    return len(monomial), sorted(map(str, monomial))


def _minus(left: Poly, right: Poly, factor: int = 1) -> Poly:
    total = dict(left)
    for monomial, coefficient in right.items():
        total[monomial] = total.get(monomial, 0) - factor * coefficient
    return {monomial: coefficient for monomial, coefficient in total.items() if coefficient}


def _put(poly: Poly, atom: Expr, value: Expr) -> Poly:
    """`poly` with `atom` replaced by `value`, at any depth."""
    total: Expr = ZERO
    for monomial, coefficient in poly.items():
        total = total + product(_replaced(factor, atom, value) for factor in monomial) * coefficient
    return polynomial(total)


def _replaced(expr: Expr, atom: Expr, value: Expr) -> Expr:
    """As `substitute`, but without the folding that takes symbols to be at least 1."""
    if expr == atom:
        return value
    if not isinstance(expr, Op):
        return expr
    args = tuple(_replaced(arg, atom, value) for arg in expr.args)
    if args == expr.args:
        return expr
    if expr.name == "add":
        return args[0] + args[1]
    return args[0] * args[1] if expr.name == "mul" else Op(expr.name, args, expr.dtype)


def _ordered(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    return (a, b) if str(a) <= str(b) else (b, a)


def literal_product(dims: Iterable[Expr]) -> int | None:
    """The product of dims that are all literals, else None."""
    values = [integer(size) for size in dims]
    return None if None in values else prod(value for value in values if value is not None)
