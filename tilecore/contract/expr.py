"""The one expression language: symbolic dims, index maps and scalar programs are all `Expr`.

Constants, symbols, variables, operations and loads, as frozen nodes that compare by structure. Integer arithmetic is
kept in a canonical form (a polynomial over atoms): index expressions are equal exactly when they print alike. Build
nodes with the functions here, never with `Op(...)`.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, Union, runtime_checkable

import numpy as np

from tilecore.contract.dtype import DType
from tilecore.contract.ops import OPS
from tilecore.contract.polynomials import divide, plus, times


@runtime_checkable
class Source(Protocol):
    """Whatever a `Load` can read: a region's input tensor, a tile buffer. `shape` entries are i64 expressions."""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        ...

    @property
    def dtype(self) -> DType:
        """The type of an element."""
        ...

    @property
    def shape(self) -> tuple["Expr", ...]:
        """Extents, i64 expressions."""
        ...


class _Arithmetic:
    """Python's operators on expressions; comparisons stay structural (use `binary("lt", …)` for a comparison node)."""

    __slots__ = ()

    def __add__(self, other: "Expr | int | float") -> "Expr":
        return binary("add", self, other)  # type: ignore[arg-type]

    def __radd__(self, other: int | float) -> "Expr":
        return binary("add", other, self)  # type: ignore[arg-type]

    def __sub__(self, other: "Expr | int | float") -> "Expr":
        return binary("sub", self, other)  # type: ignore[arg-type]

    def __rsub__(self, other: int | float) -> "Expr":
        return binary("sub", other, self)  # type: ignore[arg-type]

    def __mul__(self, other: "Expr | int | float") -> "Expr":
        return binary("mul", self, other)  # type: ignore[arg-type]

    def __rmul__(self, other: int | float) -> "Expr":
        return binary("mul", other, self)  # type: ignore[arg-type]

    def __truediv__(self, other: "Expr | int | float") -> "Expr":
        return binary("div", self, other)  # type: ignore[arg-type]

    def __rtruediv__(self, other: int | float) -> "Expr":
        return binary("div", other, self)  # type: ignore[arg-type]

    def __floordiv__(self, other: "Expr | int") -> "Expr":
        return binary("floordiv", self, other)  # type: ignore[arg-type]

    def __mod__(self, other: "Expr | int") -> "Expr":
        return binary("mod", self, other)  # type: ignore[arg-type]

    def __neg__(self) -> "Expr":
        return unary("neg", self)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Const(_Arithmetic):
    """A literal of one element type."""

    value: int | float | bool
    dtype: DType

    def __str__(self) -> str:
        return str(self.value) if self.dtype in (DType.I64, DType.BOOL) else f"{self.dtype}({self.value!r})"


@dataclass(frozen=True, slots=True)
class Sym(_Arithmetic):
    """A dim known at run time only; an i64 that is at least 0."""

    name: str

    @property
    def dtype(self) -> DType:
        """Always i64."""
        return DType.I64

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Var(_Arithmetic):
    """A bound variable. With `extent` it is an index in [0, extent); without, a scalar placeholder."""

    name: str
    dtype: DType = DType.I64
    extent: Union["Expr", None] = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Op(_Arithmetic):
    """One row of `ops.OPS` applied to `args`. `span` (a source position or None) does not take part in equality."""

    name: str
    args: tuple["Expr", ...]
    dtype: DType
    span: Any = field(default=None, compare=False, repr=False)
    digest: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", hash((self.name, self.args, self.dtype)))

    def __hash__(self) -> int:
        return self.digest

    def __str__(self) -> str:
        infix = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "lt": "<", "le": "<=",
                 "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "and": "and", "or": "or"}  # fmt: skip
        if self.name in infix:
            return f"({self.args[0]} {infix[self.name]} {self.args[1]})"
        called = {"cast": f"{self.dtype}", "reinterpret": f"bits_as_{self.dtype}"}.get(self.name, self.name)
        return f"{called}({', '.join(map(str, self.args))})"


@dataclass(frozen=True, slots=True)
class Load(_Arithmetic):
    """One element of `source` at `index` (one i64 expression per axis). Out of bounds is undefined: guard it."""

    source: Source
    index: tuple["Expr", ...]
    span: Any = field(default=None, compare=False, repr=False)
    digest: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.index) != len(self.source.shape):
            raise ValueError(f"{self.source.name} has {len(self.source.shape)} axes; indexed with {len(self.index)}")
        object.__setattr__(self, "digest", hash((self.source.name, self.index)))

    def __hash__(self) -> int:
        return self.digest

    @property
    def dtype(self) -> DType:
        """The source's element type."""
        return self.source.dtype

    def __str__(self) -> str:
        return f"{self.source.name}[{', '.join(map(str, self.index))}]"


Expr = Const | Sym | Var | Op | Load


def const(value: int | float | bool, dtype: DType | None = None) -> Const:
    """A literal; ints default to i64, floats to f32, bools to bool. The value is rounded to `dtype`."""
    if dtype is None:
        dtype = DType.BOOL if isinstance(value, bool) else DType.I64 if isinstance(value, int) else DType.F32
    if dtype.is_float:
        with np.errstate(over="ignore"):  # infinity, as rounding says
            return Const(float(np.asarray(value).astype(dtype.row.numpy)), dtype)
    return Const(bool(value) if dtype is DType.BOOL else int(value), dtype)


def _as_expr(value: "Expr | int | float | bool", like: DType) -> "Expr":
    plain = value.item() if isinstance(value, np.generic) else value
    return const(plain, like) if isinstance(plain, int | float | bool) else plain


def binary(name: str, left: "Expr | int | float", right: "Expr | int | float", *, span: Any = None) -> "Expr":
    """`OPS[name]` of two expressions; a Python number takes the other side's type. TypeError when the types differ."""
    if isinstance(left, int | float):
        if isinstance(right, int | float):
            raise TypeError("binary needs at least one expression")
        left = _as_expr(left, right.dtype)
    return apply(name, left, _as_expr(right, left.dtype), span=span)


def unary(name: str, value: "Expr", *, span: Any = None) -> "Expr":
    """`OPS[name]` of one expression."""
    return apply(name, value, span=span)


def select(condition: "Expr", yes: "Expr | int | float", no: "Expr | int | float", *, span: Any = None) -> "Expr":
    """`yes` where `condition` (bool) holds, else `no`; a load in the other side may be out of bounds."""
    first = _as_expr(yes, DType.F32 if isinstance(no, int | float) else no.dtype)
    return apply("select", condition, first, _as_expr(no, first.dtype), span=span)


def cast(value: "Expr", dtype: DType, *, span: Any = None) -> "Expr":
    """`value` as `dtype`; float to int truncates, int to int wraps, anything to bool is `!= 0`."""
    if value.dtype is dtype:
        return value
    if isinstance(value, Const) and (not dtype.is_int or dtype.range[0] - 1 < value.value < dtype.range[1] + 1):
        return const(value.value, dtype)
    return Op("cast", (value,), dtype, span)  # of what `dtype` has not: the machine's affair


def reinterpret(value: "Expr", dtype: DType, *, span: Any = None) -> "Expr":
    """The bits of `value` as `dtype`. TypeError unless both are as wide, and neither is bool."""
    if value.dtype.row.bytes != dtype.row.bytes or DType.BOOL in (value.dtype, dtype):
        raise TypeError(f"the bits of {value.dtype} are not those of a {dtype}")
    if isinstance(value, Const):
        return const(np.asarray(value.value).astype(value.dtype.row.numpy).view(dtype.row.numpy).item(), dtype)
    return Op("reinterpret", (value,), dtype, span)


def apply(name: str, *args: "Expr", span: Any = None) -> "Expr":
    """The node for operation `name`, folded where its value is known. TypeError on a wrong arity or mixed types."""
    if len(args) != OPS[name].arity:
        raise TypeError(f"{name} takes {OPS[name].arity} arguments, got {len(args)}")
    operands = args[1:] if name == "select" else args
    if len({arg.dtype for arg in operands}) > 1:
        raise TypeError(f"{name} of {' and '.join(str(arg.dtype) for arg in operands)}: cast one side first")
    if name == "select" and args[0].dtype is not DType.BOOL:
        raise TypeError(f"select needs a bool condition, got {args[0].dtype}")
    dtype = DType.BOOL if OPS[name].result == "bool" else args[-1].dtype
    if all(isinstance(arg, Const) for arg in args):
        folded = _fold(name, args, dtype)
        if folded is not None:
            return folded
    simpler = _integer(name, args) if dtype.is_int else None
    return simpler or _simplify(name, args) or Op(name, tuple(args), dtype, span)


def _fold(name: str, args: tuple["Expr", ...], dtype: DType) -> "Expr | None":
    values = [np.asarray(arg.value).astype(arg.dtype.row.numpy) for arg in args if isinstance(arg, Const)]
    if name in ("floordiv", "mod") and values[1] == 0:
        return None
    with np.errstate(all="ignore"):
        return const(np.asarray(OPS[name].numpy(*values)).item(), dtype)


def _simplify(name: str, args: tuple["Expr", ...]) -> "Expr | None":
    """Exact identities only: no rounding, NaN or inf behaviour changes."""
    first, last = args[0], args[-1]
    if name == "select":
        if isinstance(first, Const):
            return args[1] if first.value else args[2]
        return args[1] if args[1] == args[2] else None
    if name in ("and", "or"):
        for this, other in ((first, last), (last, first)):
            if isinstance(this, Const):
                return other if bool(this.value) is (name == "and") else this
    if name in ("mul", "max", "min"):
        neutral = {"mul": 1, "max": -np.inf, "min": np.inf}[name]
        for this, other in ((first, last), (last, first)):
            if isinstance(this, Const) and this.value == neutral:
                return other
    if name == "div" and isinstance(last, Const) and last.value == 1:
        return first
    if name == "not" and isinstance(first, Op) and first.name == "not":
        return first.args[0]
    if name in ("eq", "le", "ge", "lt", "gt", "ne") and not first.dtype.is_float:
        return const(name in ("eq", "le", "ge")) if first == last else _compare(name, first, last)
    return None


def _compare(name: str, left: "Expr", right: "Expr") -> "Expr | None":
    """An index comparison that the variables' extents decide."""
    if left.dtype is not DType.I64:
        return None
    if name in ("gt", "ge"):
        left, right, name = right, left, {"gt": "lt", "ge": "le"}[name]
    if name in ("lt", "ne", "eq") and (
        nonnegative(right - left - 1) or (name != "lt" and nonnegative(left - right - 1))
    ):
        return const(name != "eq")
    if name == "le" and nonnegative(right - left):
        return const(True)
    if name in ("lt", "le") and nonnegative(left - right - int(name == "le")):
        return const(False)
    return None


def children(expr: "Expr") -> tuple["Expr", ...]:
    """The operands of `expr`, index expressions of loads included."""
    return expr.args if isinstance(expr, Op) else expr.index if isinstance(expr, Load) else ()


def walk(expr: "Expr") -> Iterator["Expr"]:
    """Every distinct node below and including `expr`, operands first."""
    seen: set[int] = set()
    stack: list[tuple[Expr, bool]] = [(expr, False)]
    while stack:
        node, done = stack.pop()
        if done:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            parts = children(node)
            if parts:
                stack.append((node, True))
                stack.extend((child, False) for child in reversed(parts))
            else:
                yield node


def rewrite(expr: "Expr", change: Callable[["Expr"], "Expr | None"]) -> "Expr":
    """Rebuild `expr` bottom-up; `change` sees each rebuilt node and returns its replacement, or None to keep it."""
    done: dict[int, Expr] = {}
    for node in walk(expr):
        new: Expr = node
        parts = tuple(done[id(child)] for child in children(node))
        if any(part is not child for part, child in zip(parts, children(node), strict=True)):
            if isinstance(node, Op):
                build = {"cast": cast, "reinterpret": reinterpret}.get(node.name)
                new = build(parts[0], node.dtype, span=node.span) if build else apply(node.name, *parts, span=node.span)
            elif isinstance(node, Load):
                new = Load(node.source, parts, node.span)
        replaced = change(new)
        done[id(node)] = new if replaced is None else replaced
    return done[id(expr)]


def substitute(expr: "Expr", values: Mapping["Expr", "Expr"]) -> "Expr":
    """`expr` with every occurrence of a key of `values` (a Var, Sym or any node) replaced, all at once."""
    return rewrite(expr, values.get) if values else expr


def loads(expr: "Expr") -> tuple[Load, ...]:
    """Every distinct load in `expr`, inner ones first."""
    if not children(expr) and not isinstance(expr, Load):
        return ()
    return tuple(dict.fromkeys(node for node in walk(expr) if isinstance(node, Load)))


@lru_cache(maxsize=1 << 16)
def variables(expr: "Expr") -> frozenset[Var]:
    """Every variable in `expr`."""
    return frozenset(node for node in walk(expr) if isinstance(node, Var))


@lru_cache(maxsize=1 << 16)
def symbols(expr: "Expr") -> frozenset[Sym]:
    """Every symbol in `expr`, those in variables' extents excluded."""
    return frozenset(node for node in walk(expr) if isinstance(node, Sym))


# ---------------------------------------------------------------------------------------------------------------------
# Integer arithmetic: polynomials over atoms. An atom is any integer node that is not itself a sum or a product.

Monomial = tuple["Expr", ...]
_text: Callable[["Monomial"], str] = lru_cache(maxsize=1 << 16)(str)  # terms of sums are sorted by it again and again
Poly = dict[Monomial, int]


def polynomial(expr: "Expr") -> Poly:
    """The canonical polynomial of an integer expression: monomial → coefficient, zero coefficients left out."""
    if isinstance(expr, Const):
        return {(): int(expr.value)} if expr.value else {}
    if isinstance(expr, Op) and expr.name == "add":
        return plus(polynomial(expr.args[0]), polynomial(expr.args[1]))
    if isinstance(expr, Op) and expr.name == "mul":
        return times(polynomial(expr.args[0]), polynomial(expr.args[1]))
    return {(expr,): 1}


def from_polynomial(poly: Poly, dtype: DType = DType.I64) -> "Expr":
    """The expression of a polynomial: terms in a fixed order, `a % n + n * (a // n)` already joined to `a`."""
    if dtype is DType.I64:  # quotients are of dims and indices
        poly = _join_remainders(poly)
    total: Expr | None = None
    for monomial, coefficient in sorted(poly.items(), key=lambda term: (-len(term[0]), _text(term[0]))):
        term: Expr | None = None
        for atom in monomial:
            term = atom if term is None else Op("mul", (term, atom), dtype)
        coefficient = int(np.asarray(coefficient).astype(dtype.row.numpy))  # arithmetic of narrow types wraps
        if term is None:
            term = Const(coefficient, dtype)
        elif coefficient != 1:
            term = Op("mul", (term, Const(coefficient, dtype)), dtype)
        total = term if total is None else Op("add", (total, term), dtype)
    return Const(0, dtype) if total is None else total


def _join_remainders(poly: Poly) -> Poly:
    """Replace `c·m·(x % n) + c·m·n·(x // n)` by `c·m·x`, for any monomial m, until nothing changes."""
    for monomial, coefficient in poly.items():
        for atom in monomial:
            if not (isinstance(atom, Op) and atom.name == "mod"):
                continue
            value, divisor = atom.args
            rest = list(monomial)
            rest.remove(atom)
            scale: Poly = {tuple(rest): coefficient}
            partner = times(times(scale, polynomial(divisor)), polynomial(floordiv(value, divisor)))
            if partner and all(poly.get(term, 0) == amount for term, amount in partner.items()):
                joined = plus(plus(poly, partner, -1), {monomial: coefficient}, -1)
                return _join_remainders(plus(joined, times(scale, polynomial(value))))
    return poly


@lru_cache(maxsize=1 << 16)
def floordiv(value: "Expr", divisor: "Expr") -> "Expr":
    """`value // divisor` for a positive divisor, with every multiple of it taken out."""
    quotient, remainder = divide(polynomial(value), polynomial(divisor))
    rest = from_polynomial(remainder)
    if _inside(rest, divisor):
        return from_polynomial(quotient)
    if _inside(rest + divisor, divisor):
        return from_polynomial(quotient) - 1
    if isinstance(rest, Op) and rest.name == "floordiv":  # (x // a) // b = x // (a * b)
        tail = floordiv(rest.args[0], from_polynomial(times(polynomial(rest.args[1]), polynomial(divisor))))
    else:
        tail = Op("floordiv", (rest, divisor), DType.I64)
    return from_polynomial(plus(quotient, polynomial(tail)))


@lru_cache(maxsize=1 << 16)
def mod(value: "Expr", divisor: "Expr") -> "Expr":
    """`value % divisor` for a positive divisor, with every multiple of it taken out."""
    _, remainder = divide(polynomial(value), polynomial(divisor))
    rest = from_polynomial(remainder)
    if _inside(rest, divisor):
        return rest
    if _inside(rest + divisor, divisor):
        return rest + divisor
    if isinstance(rest, Op) and rest.name == "mod" and not divide(polynomial(rest.args[1]), polynomial(divisor))[1]:
        return mod(rest.args[0], divisor)  # (x % (a * n)) % n = x % n
    return Op("mod", (rest, divisor), DType.I64)


def _inside(value: "Expr", divisor: "Expr") -> bool:
    """Whether 0 ≤ value < divisor, where the dims of the divisor are at least 1: elsewhere there is no division."""
    return all(_nonnegative(bound, symbols(divisor)) for bound in (value, divisor - value - 1))


def nonnegative(expr: "Expr") -> bool:
    """True when the integer `expr` is proved ≥ 0 for all symbols ≥ 0 and variables in range; False is "not proved"."""
    return _nonnegative(expr, frozenset())


@lru_cache(maxsize=1 << 16)  # pure, and asked for the same dims over and over
def _nonnegative(expr: "Expr", above: frozenset["Sym"]) -> bool:
    """`nonnegative` where the symbols `above` are at least 1, as is the extent of every variable."""
    extents = [polynomial(var.extent) for var in variables(expr) if var.extent is not None]
    positive = above | {atom for extent in extents if len(extent) == 1 for term in extent for atom in term}
    domain = tuple(plus(extent, {(): -1}) for extent in extents if len(extent) > 1)
    return any(_all_nonnegative(bound, positive, domain) for bound in _lower_bounds(polynomial(expr), 12))


def _lower_bounds(poly: Poly, depth: int) -> Iterator[Poly]:
    """Polynomials in symbols alone that are nowhere above `poly`: one atom after another gives way to its bounds."""
    atoms = dict.fromkeys(atom for term in poly for atom in term if not isinstance(atom, Sym))
    if not atoms:
        yield poly
        return
    if depth == 0:
        return
    # Innermost first: its bounds are in terms of the others, as a variable's are of the dims of its extent.
    bounded = max(atoms, key=lambda atom: (_dependence(atom), isinstance(atom, Var), _depth(atom)))
    lows, highs = _range(bounded)
    wants_low = any(amount > 0 for term, amount in poly.items() if bounded in term)
    wants_high = any(amount < 0 for term, amount in poly.items() if bounded in term)
    for low in lows if wants_low else (None,):
        for high in (*highs, None) if wants_high else (None,):
            replaced = _bounded_below(poly, bounded, low, high)
            if replaced is not None:
                yield from _lower_bounds(replaced, depth - 1)


@lru_cache(maxsize=1 << 16)
def _dependence(atom: "Expr") -> int:
    """How many variables the bounds of an atom lean on, at any distance."""
    bounds = (atom.extent,) if isinstance(atom, Var) and atom.extent is not None else children(atom)
    inner = {var for bound in bounds for var in variables(bound)}
    return len(inner) + sum(_dependence(var) for var in inner if var != atom)


@lru_cache(maxsize=1 << 16)
def _depth(atom: "Expr") -> int:
    """How many nodes lie one below the other in an atom."""
    return 1 + max(map(_depth, children(atom)), default=0)


def _bounded_below(poly: Poly, atom: "Expr", low: "Expr | None", high: "Expr | None") -> Poly | None:
    """A polynomial that is nowhere above `poly`, without `atom`; None when its other factors may be negative."""
    new: Poly = {}
    for monomial, coefficient in poly.items():
        if atom not in monomial:
            new = plus(new, {monomial: coefficient})
            continue
        bound = low if coefficient > 0 else high
        rest = list(monomial)
        rest.remove(atom)
        if high is None and coefficient < 0 and isinstance(atom, Op) and atom.name == "floordiv":
            quotient, remainder = divide({tuple(rest): coefficient}, polynomial(atom.args[1]))
            if not remainder and _factors_nonnegative(tuple(rest)):  # n * (x // n) is at most x
                new = plus(new, times(quotient, polynomial(atom.args[0])))
                continue
        if bound is None or atom in rest or not _factors_nonnegative(tuple(rest)):
            return None
        new = plus(new, times({tuple(rest): coefficient}, polynomial(bound)))
    return new


def _factors_nonnegative(monomial: Monomial) -> bool:
    return all(isinstance(atom, Sym) or Const(0, DType.I64) in _range(atom)[0] for atom in monomial)


@lru_cache(maxsize=1 << 16)
def _range(atom: "Expr") -> tuple[tuple["Expr", ...], tuple["Expr", ...]]:
    """Inclusive lower and upper bounds of an atom: any number of each, all of them true."""
    zero = Const(0, DType.I64)
    if isinstance(atom, Var) and atom.extent is not None:
        return (zero,), tuple(extent - 1 for extent in _where_positive(atom.extent))
    if isinstance(atom, Op) and atom.name == "mod" and _is_divisor(atom.args[1]):
        return (zero,), (atom.args[1] - 1,) + ((atom.args[0],) if nonnegative(atom.args[0]) else ())
    if isinstance(atom, Op) and atom.name == "floordiv" and nonnegative(atom.args[0]):
        highs = dict.fromkeys((*_above_minima(atom.args[0]), *_upper_bounds(atom.args[0])))
        return (zero,), tuple(floordiv(high, atom.args[1]) for high in highs)
    if isinstance(atom, Op) and atom.name == "min":
        return (zero,) if all(nonnegative(arg) for arg in atom.args) else (), atom.args
    if isinstance(atom, Op) and atom.name == "max":
        return atom.args, ()
    return (), ()


def _where_positive(extent: "Expr") -> tuple["Expr", ...]:
    """Upper bounds of an extent where it is at least 1: a `max(x, 0)` that is no less than it is x then."""
    zero = Const(0, DType.I64)
    for atom in (term[0] for term in polynomial(extent) if len(term) == 1):
        if isinstance(atom, Op) and atom.name == "max" and zero in atom.args and nonnegative(atom - extent):
            positive = substitute(extent, {atom: next(arg for arg in (*atom.args, zero) if arg != zero)})
            return (extent, *_where_positive(positive))
    if isinstance(extent, Op) and extent.name == "min":
        return tuple(bound for arg in extent.args for bound in _where_positive(arg))
    return (extent,)


def _above_minima(expr: "Expr") -> tuple["Expr", ...]:
    """Upper bounds of a sum with a minimum in it: with each of the minimum's arguments in its place."""
    poly = polynomial(expr)
    minima = (term for term in poly if len(term) == 1 and isinstance(term[0], Op) and term[0].name == "min")
    term = next((term for term in minima if poly[term] > 0), ())
    return tuple(substitute(expr, {term[0]: arg}) for arg in children(term[0])) if term else ()


@lru_cache(maxsize=1 << 16)
def _upper_bounds(expr: "Expr") -> tuple["Expr", ...]:
    """A few inclusive upper bounds of `expr` in symbols alone."""
    lower = itertools.islice(_lower_bounds(times({(): -1}, polynomial(expr)), 12), 32)
    return tuple(dict.fromkeys(from_polynomial(times({(): -1}, bound)) for bound in lower))[:4]


@lru_cache(maxsize=1 << 16)
def _is_divisor(expr: "Expr") -> bool:
    """Whether `expr` is at least 1 where its symbols are: a division by dims stands only where none of them is 0."""
    plain = all(isinstance(atom, Sym) for term in polynomial(expr) for atom in term)
    return _all_nonnegative(polynomial(expr - 1), symbols(expr), ()) if plain else nonnegative(expr - 1)


def _all_nonnegative(poly: Poly, positive: Set["Expr"], domain: tuple[Poly, ...]) -> bool:
    """`poly` ≥ 0 where `positive` symbols are at least 1, the others at least 0, and so is each of `domain`."""
    shifted: Poly = {}
    for monomial, coefficient in poly.items():
        term: Poly = {(): coefficient}
        for atom in monomial:
            term = times(term, {(atom,): 1, (): 1} if atom in positive else {(atom,): 1})
        shifted = plus(shifted, term)
    return all(coefficient >= 0 for coefficient in shifted.values()) or any(
        _all_nonnegative(plus(poly, bound, -1), positive, domain[i + 1 :]) for i, bound in enumerate(domain)
    )


def _integer(name: str, args: tuple["Expr", ...]) -> "Expr | None":
    """The canonical form of an integer operation, or None when the node stands as it is."""
    dtype = args[-1].dtype
    if name in ("add", "sub"):
        poly = plus(polynomial(args[0]), polynomial(args[1]), 1 if name == "add" else -1)
        return from_polynomial(poly, dtype)
    if name == "mul":
        return from_polynomial(times(polynomial(args[0]), polynomial(args[1])), dtype)
    if name == "neg":
        return from_polynomial(times({(): -1}, polynomial(args[0])), dtype)
    if dtype is DType.I64 and name in ("floordiv", "mod") and _is_divisor(args[1]):
        return floordiv(*args) if name == "floordiv" else mod(*args)
    if dtype is DType.I64 and name in ("min", "max"):  # of indices: narrower sums may wrap around
        ordered = next(((a, b) for a, b in (args, args[::-1]) if nonnegative(a - b)), None)
        return None if ordered is None else ordered[name == "min"]
    return None
