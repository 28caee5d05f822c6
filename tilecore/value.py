"""Symbolic scalars: Python's operators on a `Value` build contract expressions, with the dtype rules of the language.

Comes in: Values and Python numbers. Goes out: Values. A Python number takes the type of the other side; floats widen
to the wider float, integers to the wider integer; an integer that meets a float becomes one; a float never becomes an
integer, nor a bool a number, without `T.cast`. A Value has no truth, no length and no int: whatever would ask for one
is refused with its position.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from tilecore.contract.dtype import DType, type_name
from tilecore.contract.expr import Const, Expr, Load, Op, Sym, Var, apply, cast, const, reinterpret, select, substitute
from tilecore.contract.spec import Place
from tilecore.errors import TileError, user_span

Number = int | float | bool
Reads = frozenset[tuple[str, int]]  # tile buffers a value was read from, each with its version at that moment


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One scalar of the kernel, known when it runs. `reads` lets a use after the buffer changed be refused."""

    expr: Expr
    reads: Reads = frozenset()

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self.expr.dtype

    def __add__(self, other: "Operand") -> "Value":
        return operate("add", self, other)

    def __radd__(self, other: "Operand") -> "Value":
        return operate("add", other, self)

    def __sub__(self, other: "Operand") -> "Value":
        return operate("sub", self, other)

    def __rsub__(self, other: "Operand") -> "Value":
        return operate("sub", other, self)

    def __mul__(self, other: "Operand") -> "Value":
        return operate("mul", self, other)

    def __rmul__(self, other: "Operand") -> "Value":
        return operate("mul", other, self)

    def __truediv__(self, other: "Operand") -> "Value":
        return operate("div", self, other)

    def __rtruediv__(self, other: "Operand") -> "Value":
        return operate("div", other, self)

    def __floordiv__(self, other: "Operand") -> "Value":
        return operate("floordiv", self, other)

    def __rfloordiv__(self, other: "Operand") -> "Value":
        return operate("floordiv", other, self)

    def __mod__(self, other: "Operand") -> "Value":
        return operate("mod", self, other)

    def __rmod__(self, other: "Operand") -> "Value":
        return operate("mod", other, self)

    def __pow__(self, other: "Operand") -> "Value":
        return operate("pow", self, other)

    def __rpow__(self, other: "Operand") -> "Value":
        return operate("pow", other, self)

    def __neg__(self) -> "Value":
        return operate("neg", self)

    def __abs__(self) -> "Value":
        return operate("abs", self)

    def __invert__(self) -> "Value":
        return operate("not", self)

    def __and__(self, other: "Operand") -> "Value":
        return operate("and", self, other)

    def __rand__(self, other: "Operand") -> "Value":
        return operate("and", other, self)

    def __or__(self, other: "Operand") -> "Value":
        return operate("or", self, other)

    def __ror__(self, other: "Operand") -> "Value":
        return operate("or", other, self)

    def __xor__(self, other: "Operand") -> "Value":
        return operate("xor", self, other)

    def __rxor__(self, other: "Operand") -> "Value":
        return operate("xor", other, self)

    def __lshift__(self, other: "Operand") -> "Value":
        return operate("shl", self, other)

    def __rlshift__(self, other: "Operand") -> "Value":
        return operate("shl", other, self)

    def __rshift__(self, other: "Operand") -> "Value":
        return operate("shr", self, other)

    def __rrshift__(self, other: "Operand") -> "Value":
        return operate("shr", other, self)

    def astype(self, dtype: "DType | str") -> "Value":
        """This value as `dtype`, a type or its name."""
        return convert(self, dtype_of(dtype))

    def __lt__(self, other: "Operand") -> "Value":
        return operate("lt", self, other)

    def __le__(self, other: "Operand") -> "Value":
        return operate("le", self, other)

    def __gt__(self, other: "Operand") -> "Value":
        return operate("gt", self, other)

    def __ge__(self, other: "Operand") -> "Value":
        return operate("ge", self, other)

    def __eq__(self, other: "Operand") -> "Value":  # type: ignore[override]
        return operate("eq", self, other)

    def __ne__(self, other: "Operand") -> "Value":  # type: ignore[override]
        return operate("ne", self, other)

    __hash__ = None  # type: ignore[assignment]

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: object, **options: object) -> "Value":
        """Operators whose left side is a number of numpy; numpy's other functions have their names in `T`."""
        name = UFUNCS.get(ufunc.__name__)
        if name is None or method != "__call__" or options:
            raise TileError(
                f"numpy's {ufunc.__name__} of the symbolic value {_shown(self.expr)}",
                user_span(),
                instead=f"the language's own functions: T.{_OF_NUMPY.get(ufunc.__name__, ufunc.__name__)}",
            )
        return operate(name, *operands)

    def __bool__(self) -> bool:
        raise TileError(
            f"{_shown(self.expr)} is symbolic: it has no truth value while the kernel is traced",
            user_span(),
            instead="T.if_then_else(condition, a, b) for a value, `with T.If(condition):` for statements; "
            "&, | and ~ for and, or and not; (a < b) & (b < c) for a < b < c",
        )

    def __int__(self) -> int:
        raise self._refusal("int", "T.cast(value, T.int64) for a value of another type")

    def __float__(self) -> float:
        raise self._refusal("float", "T.cast(value, T.float32) for a value of another type")

    def __index__(self) -> int:
        raise self._refusal(
            "Python index", "`for i in T.serial(n):` in place of range(n); T.Parallel for elements of a tile"
        )

    def __len__(self) -> int:
        raise self._refusal("length", ".shape of the tile that the value comes from")

    def __iter__(self) -> NoReturn:
        raise self._refusal("sequence", "`for i in T.serial(n):`")

    def _refusal(self, what: str, instead: str) -> TileError:
        message = f"{_shown(self.expr)} is symbolic: it has no {what} while the kernel is traced"
        return TileError(message, user_span(), instead=instead)


Operand = Value | Number
UFUNCS = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "floor_divide": "floordiv", "remainder": "mod",
    "power": "pow", "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "left_shift": "shl",
    "right_shift": "shr", "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "equal": "eq",
    "not_equal": "ne",
}  # fmt: skip
_OF_NUMPY = {"absolute": "abs", "maximum": "max", "minimum": "min", "rint": "round"}


def lift(value: object, like: DType | None = None) -> Value:
    """`value` as a Value; a Python number takes the type `like`, or i64, f32 or bool by its own kind."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Value):
        if isinstance(value.expr, Load) and isinstance(value.expr.source, Place):
            raise TileError(
                f"{value.expr.source.name} is an output: it can be written, not read",
                user_span(),
                instead="keep the value in a fragment and store that",
            )
        return value
    if not isinstance(value, int | float | bool):
        raise TileError(
            f"expected a scalar, found {described(value)}",
            user_span(),
            instead="index a tile with one value per axis, inside `for … in T.Parallel(…)`",
        )
    _check_range(value, like)
    if like is None:
        return Value(const(value))
    own = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
    if own == "float" and like.is_int:
        return Value(const(value, DType.F32))
    if own != like.row.kind and not (own == "int" and like.is_float):
        raise TileError(
            f"cannot mix {like} and the Python {own} {value!r}",
            user_span(),
            instead=f"T.cast(…, {name_of(DType.F32 if own == 'float' else like)}) on one side",
        )
    return Value(const(value, like))


def _check_range(number: Number, like: DType | None) -> None:
    """TileError for a whole number that the integers of `like` do not reach."""
    if not isinstance(number, int) or (like is not None and not like.is_int):
        return
    dtype = like or DType.I64
    low, high = dtype.range
    if not low <= number <= high:
        raise TileError(
            f"{number} is no {dtype}: these are {low} to {high}",
            user_span(),
            instead=f"a wider type on the other side, or T.cast({number}, {name_of(dtype)}), "
            f"its lowest {dtype.bits} bits",
        )


def operate(name: str, *operands: object) -> Value:
    """`OPS[name]` of operands brought to one type. TileError when they have none in common."""
    values = together(operands, of_bits=name in LOGIC)
    kind = values[0].dtype.row.kind
    if name in LOGIC or name in ("shl", "shr"):
        return _bitwise(name, values)
    if kind == "bool" and name not in ("eq", "ne"):
        raise TileError(
            f"{name} of bool", user_span(), instead="T.if_then_else(x, 1.0, 0.0) for a number, &, |, ~ for logic"
        )
    if name == "div" and kind == "int":
        raise TileError(
            f"/ of {values[0].dtype} and {values[-1].dtype}",
            user_span(),
            instead="// for a whole quotient, or T.cast both to a float first",
        )
    if kind == "int" and name in _FLOAT_ONLY:
        raise TileError(
            f"{name} of {values[0].dtype}", user_span(), instead=f"T.{name}(T.cast(x, T.float32)) for a float result"
        )
    if kind == "float" and name in ("floordiv", "mod"):
        raise TileError(
            f"{'//' if name == 'floordiv' else '%'} of {values[0].dtype}",
            user_span(),
            instead="T.floor(x / y) for a whole quotient",
        )
    return Value(apply(name, *(value.expr for value in values), span=user_span()), reads_of(values))


LOGIC = {"and": "bitand", "or": "bitor", "xor": "bitxor", "not": "bitnot"}  # operators of bools → of integers' bits


def _bitwise(name: str, values: tuple[Value, ...]) -> Value:
    """&, |, ^, ~, << and >>: logic of bools, bits of integers. Of indices they are arithmetic where they can be."""
    dtype, right = values[0].dtype, values[-1].expr
    if dtype.is_float or (dtype is DType.BOOL and name in ("shl", "shr")):
        raise TileError(
            f"{name} needs {'bools or ' if name in LOGIC else ''}integers, found {dtype}",
            user_span(),
            instead="compare first: (x > 0) & (y > 0); T.reinterpret(x, T.int32) for the bits of a float",
        )
    reads, span = reads_of(values), user_span()
    if dtype is DType.BOOL:
        logic = {"xor": "ne"}.get(name, name)
        return Value(apply(logic, *(value.expr for value in values), span=span), reads)
    if dtype is DType.I64 and isinstance(right, Const) and name in ("shl", "shr", "and"):
        number = int(right.value)
        if name == "and" and number >= 0 and number & (number + 1) == 0:
            return Value(apply("mod", values[0].expr, const(number + 1), span=span), reads)
        if name != "and" and 0 <= number < 63:
            power = const(1 << number)
            return Value(apply("mul" if name == "shl" else "floordiv", values[0].expr, power, span=span), reads)
    return Value(apply(LOGIC.get(name, name), *(value.expr for value in values), span=span), reads)


def reinterpreted(value: object, dtype: DType) -> Value:
    """The bits of `value` as `dtype`, which must be as wide."""
    found = lift(value)
    try:
        return Value(reinterpret(found.expr, dtype, span=user_span()), found.reads)
    except TypeError as error:
        raise TileError(str(error), user_span(), instead="T.cast(value, …) for its number") from None


_FLOAT_ONLY = frozenset(
    ("sqrt", "rsqrt", "exp", "exp2", "log", "log2", "sin", "cos", "tanh", "erf", "sigmoid", "floor", "ceil", "round",
     "isnan", "isinf", "pow")
)  # fmt: skip


def choose(condition: object, yes: object, no: object) -> Value:
    """`yes` where `condition` holds, else `no`."""
    test = lift(condition)
    if test.dtype is not DType.BOOL:
        raise TileError(
            f"the condition is {test.dtype}", user_span(), instead="a comparison: T.if_then_else(x != 0, …, …)"
        )
    first, second = together((yes, no))
    return Value(select(test.expr, first.expr, second.expr, span=user_span()), reads_of((test, first, second)))


def dtype_of(dtype: Any) -> DType:
    """A dtype, its name ("float32") or another library's type of that name. TileError for any other."""
    found = dtype if isinstance(dtype, DType) else _DTYPES.get(type_name(dtype))
    if found is None:
        raise TileError(f"no dtype {dtype!r}", user_span(), instead=f"one of {', '.join(_DTYPES)}")
    return found


def convert(value: object, dtype: DType) -> Value:
    """`value` as `dtype`, whatever its type; a number becomes a constant."""
    if isinstance(value, int | float | bool):
        return Value(const(_folded(value, dtype) if dtype.is_int else value, dtype))
    found = lift(value)
    return found if found.dtype is dtype else Value(cast(found.expr, dtype, span=user_span()), found.reads)


def assigned(value: object, dtype: DType) -> Value:
    """`value` as it is stored into an element of `dtype`: floats narrow or widen, other kinds are not mixed."""
    found = lift(value, dtype)
    if found.dtype.row.kind != dtype.row.kind and not (found.dtype.is_int and dtype.is_float):
        raise TileError(
            f"cannot store {found.dtype} into an element of {dtype}",
            user_span(),
            instead=f"T.cast(value, {name_of(dtype)})",
        )
    return convert(found, dtype)


def together(operands: tuple[object, ...], *, of_bits: bool = False) -> tuple[Value, ...]:
    """The operands as Values of one type. `of_bits`: a number may be a pattern of all bits, such as 0xFF of an int8."""
    known = [lift(operand) for operand in operands if not _is_number(operand)]
    if not known:
        floats = any(isinstance(operand, float) for operand in operands)
        return tuple(lift(operand, DType.F32 if floats else None) for operand in operands)
    dtype = known[0].dtype
    for value in known[1:]:
        dtype = _wider(dtype, value.dtype)
    if dtype.is_int and any(isinstance(operand, float) for operand in operands):
        dtype = DType.F32
    if of_bits and dtype.is_int:
        operands = tuple(_pattern(operand, dtype) if isinstance(operand, int) else operand for operand in operands)
    return tuple(lift(operand, dtype) if _is_number(operand) else convert(lift(operand), dtype) for operand in operands)


def _pattern(number: int, dtype: DType) -> int:
    """A number of all bits of `dtype` as the one of its range with these bits."""
    low, high = dtype.range
    return _folded(number, dtype) if low <= number <= high - low else number


def _folded(number: Number, dtype: DType) -> int:
    """A Python number as an integer of `dtype`, as casts make it: whole ones keep their lowest bits."""
    low, high = dtype.range
    if isinstance(number, float):
        with np.errstate(invalid="ignore"):
            return int(np.float64(number).astype(dtype.row.numpy))
    return (int(number) - low) % (high - low + 1) + low


def _is_number(operand: object) -> bool:
    return isinstance(operand, int | float | bool | np.generic)


def _wider(left: DType, right: DType) -> DType:
    if left is right:
        return left
    if left.row.kind == right.row.kind and left.row.bytes != right.row.bytes:
        return left if left.row.bytes > right.row.bytes else right
    if {left.row.kind, right.row.kind} == {"int", "float"}:
        return left if left.is_float else right
    narrow = right if left.is_float else left
    raise TileError(
        f"cannot mix {left} and {right}",
        user_span(),
        instead=f"T.cast(the {narrow} side, {name_of(left if narrow is right else right)})",
    )


def reads_of(values: tuple[Value, ...]) -> Reads:
    """What a value computed from `values` was read from."""
    return frozenset().union(*(value.reads for value in values))


def index(value: object) -> Value:
    """`value` as an i64 index."""
    found = lift(value)
    if not found.dtype.is_int:
        raise TileError(
            f"an index must be an integer, found {found.dtype}", user_span(), instead="T.cast(value, T.int64)"
        )
    return Value(_wide(found.expr), found.reads)


def _wide(expr: Expr) -> Expr:
    """An integer as i64, sums and products computed as such: start + 8 - start is 8 there, whatever an i32 holds."""
    if isinstance(expr, Op) and expr.name in ("add", "sub", "mul") and expr.dtype is DType.I32:
        return apply(expr.name, *map(_wide, expr.args), span=expr.span)
    divisor = _divisor(expr)
    if isinstance(expr, Op) and divisor:
        return apply("mod", cast(expr.args[0], DType.I64), const(divisor), span=expr.span)
    return expr if expr.dtype is DType.I64 else cast(expr, DType.I64, span=user_span())


def _divisor(expr: Expr) -> int:
    """n of x % n and x & (n - 1), remainders whose range is known; 0 of anything else."""
    if not isinstance(expr, Op) or expr.name not in ("mod", "bitand") or not isinstance(expr.args[1], Const):
        return 0
    number = int(expr.args[1].value)
    if expr.name == "mod":
        return max(number, 0)
    return number + 1 if number >= 0 and number & (number + 1) == 0 else 0


LARGEST = 1 << 48  # bytes that an address reaches; sizes and strides of more would wrap around


def extent(value: object) -> Expr:
    """`value`, a Python int or an integer Value, as the extent of an axis. TileError for one beyond any memory."""
    if isinstance(value, int) and value > LARGEST:
        raise TileError(f"an extent of {value}", user_span(), instead=f"at most {LARGEST}: no memory holds more")
    return index(value).expr


def check_size(extents: Sequence[Expr], bytes_each: int, what: str) -> None:
    """TileError for known extents that are together more than a memory has addresses for."""
    known = [int(dim.value) for dim in extents if isinstance(dim, Const)]
    size = math.prod(known) * bytes_each
    if size > LARGEST:
        dims = ", ".join(map(str, extents))
        raise TileError(f"{what} of [{dims}] is {size} bytes", user_span(), instead="smaller extents, and more tasks")


def plain(expr: Expr) -> "Value | int":
    """An extent as kernels see it: a Python int when it is known, else a Value."""
    return int(expr.value) if isinstance(expr, Const) else Value(expr)


def program(expr: Expr, arguments: Mapping[Var, "Operand"]) -> Value:
    """The scalar program `expr` with its variables replaced: how a spec's pointwise work enters a kernel."""
    values = {var: convert(lift(argument, var.dtype), var.dtype) for var, argument in arguments.items()}
    substituted = substitute(expr, {var: value.expr for var, value in values.items()})
    return Value(substituted, reads_of(tuple(values.values())))


_NAMES = {
    DType.F64: "T.float64",
    DType.F32: "T.float32",
    DType.F16: "T.float16",
    DType.BF16: "T.bfloat16",
    DType.F8E4M3: "float8_e4m3",
    DType.F8E5M2: "float8_e5m2",
    DType.I64: "T.int64",
    DType.I32: "T.int32",
    DType.I16: "T.int16",
    DType.I8: "T.int8",
    DType.U8: "T.uint8",
    DType.I4: "T.int4",
    DType.U4: "T.uint4",
    DType.I2: "int2",
    DType.U2: "uint2",
    DType.BOOL: "T.bool",
}


def name_of(dtype: DType) -> str:
    """How a kernel's author spells `dtype`."""
    return _NAMES[dtype]


def described(value: Any) -> str:
    """A value of any kind in an error message."""
    if hasattr(value, "source"):
        return str(value)
    if isinstance(value, Value):
        return f"the {value.dtype} {_shown(value.expr)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {', '.join(map(described, value)) or 'nothing'}"  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return f"{type(value).__name__} {value!r}"


def _shown(expr: Expr) -> str:
    text = str(expr)
    if isinstance(expr, Sym | Var):
        return text
    return text if len(text) <= 60 else f"this {expr.dtype} value"


_DTYPES = {
    "float64": DType.F64,
    "float32": DType.F32,
    "float16": DType.F16,
    "bfloat16": DType.BF16,
    "int64": DType.I64,
    "int32": DType.I32,
    "int16": DType.I16,
    "int8": DType.I8,
    "uint8": DType.U8,
    "bool": DType.BOOL,
    "float": DType.F32,
    "double": DType.F64,
    "half": DType.F16,
    "int": DType.I32,
}
