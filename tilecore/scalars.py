"""Scalars of the tile language: their types, and functions of values that give values.

Comes in: symbolic values and Python numbers. Goes out: symbolic values; nothing is appended to the program.
"""

import enum
import math
from typing import Any

import ml_dtypes
import numpy as np

from tilecore.contract.dtype import DType
from tilecore.value import Operand, Value, choose, convert, dtype_of, operate, reinterpreted


class PackedType(enum.Enum):
    """4-bit integers, two to a byte in memory: a dtype of operands and of casts, held as int8 and uint8."""

    INT4 = "int4"
    UINT4 = "uint4"


int4, uint4 = PackedType.INT4, PackedType.UINT4


def packed_type(dtype: Any) -> PackedType | None:
    """The 4-bit type that `dtype` is or names; None for any other."""
    if isinstance(dtype, PackedType):
        return dtype
    return next((packed for packed in PackedType if packed.value == dtype), None)


class Infinity(float):
    """A Python number that takes the float type of what it meets; `T.infinity(dtype)` is the same number."""

    def __call__(self, dtype: "DType | str" = DType.F32) -> float:
        """The infinity of `dtype`, which every float type has."""
        dtype_of(dtype)
        return math.inf


infinity = Infinity(math.inf)


def min_value(dtype: "DType | str") -> float | int:
    """The smallest number of `dtype`: for floats the negative one of largest magnitude."""
    found = dtype_of(dtype)
    return _limits(found)[0]


def max_value(dtype: "DType | str") -> float | int:
    """The largest finite number of `dtype`."""
    return _limits(dtype_of(dtype))[1]


def if_then_else(condition: Operand, yes: Operand, no: Operand) -> Value:
    """`yes` where `condition` holds, else `no`; only the chosen side is evaluated, so it may guard a load."""
    return choose(condition, yes, no)


Select = if_then_else


def cast(value: Operand, dtype: "DType | PackedType | str") -> Value:
    """`value` as `dtype`: float to int truncates, a bool becomes 0 or 1.

    A 4-bit integer is the lowest four bits, held as int8 or uint8.
    """
    packed = packed_type(dtype)
    if packed is None:
        return convert(value, dtype_of(dtype))
    whole = convert(value, DType.I32)
    if packed is uint4:
        return convert(whole & 15, DType.U8)
    return convert((whole << 28) >> 28, DType.I8)


def Cast(dtype: "DType | PackedType | str", value: Operand) -> Value:
    """`value` as `dtype`: `T.cast` with its arguments the other way round."""
    return cast(value, dtype)


def reinterpret(value: Any, dtype: Any) -> Value:
    """The bits of `value` as `dtype`, which must be as wide; the arguments may stand in either order."""
    if isinstance(value, DType | str):
        value, dtype = dtype, value
    return reinterpreted(value, dtype_of(dtype))


def ldexp(x: Operand, exponent: Operand) -> Value:
    """`x` · 2 to the power `exponent`, a whole number: in two steps, so that large exponents meet small numbers."""
    first = operate("floordiv", exponent, 2)
    rest = operate("sub", exponent, first)
    like = x.dtype if isinstance(x, Value) and x.dtype.is_float else DType.F32
    return operate("mul", operate("mul", x, exp2(convert(first, like))), exp2(convert(rest, like)))


def bitwise_and(x: Operand, y: Operand) -> Value:
    """The bits that are set in both."""
    return operate("and", x, y)


def bitwise_or(x: Operand, y: Operand) -> Value:
    """The bits that are set in either."""
    return operate("or", x, y)


def bitwise_xor(x: Operand, y: Operand) -> Value:
    """The bits that are set in one of them."""
    return operate("xor", x, y)


def bitwise_not(x: Operand) -> Value:
    """The bits that are not set."""
    return operate("not", x)


def shift_left(x: Operand, count: Operand) -> Value:
    """`x` << `count`, the count modulo the bits of the type."""
    return operate("shl", x, count)


def shift_right(x: Operand, count: Operand) -> Value:
    """`x` >> `count`, the count modulo the bits of the type; the sign fills up."""
    return operate("shr", x, count)


def floordiv(x: Operand, y: Operand) -> Value:
    """`x` // `y`, rounded down."""
    return operate("floordiv", x, y)


def floormod(x: Operand, y: Operand) -> Value:
    """`x` % `y`, with the sign of `y`."""
    return operate("mod", x, y)


def ceildiv(value: Any, divisor: Any) -> Any:
    """`value` / `divisor` rounded up; a Python int for two of them."""
    return (
        -(-value // divisor)
        if isinstance(value, int) and isinstance(divisor, int)
        else (value + divisor - 1) // divisor
    )


def share(first: Any, last: Any, part: Operand, parts: int) -> tuple[Any, Any]:
    """First and last (exclusive) of [`first`, `last`) that task `part` of `parts` does, in order, as even as can be."""
    if parts == 1:
        return first, last
    each = ceildiv(last - first, parts)
    return first + part * each, min(last, first + (part + 1) * each)


def exp(x: Operand) -> Value:
    """e to the power `x`."""
    return operate("exp", x)


def exp2(x: Operand) -> Value:
    """2 to the power `x`."""
    return operate("exp2", x)


def log(x: Operand) -> Value:
    """The natural logarithm of `x`."""
    return operate("log", x)


def log2(x: Operand) -> Value:
    """The logarithm of `x` to base 2."""
    return operate("log2", x)


def sqrt(x: Operand) -> Value:
    """The square root of `x`."""
    return operate("sqrt", x)


def rsqrt(x: Operand) -> Value:
    """1 / sqrt(`x`)."""
    return operate("rsqrt", x)


def tanh(x: Operand) -> Value:
    """The hyperbolic tangent of `x`."""
    return operate("tanh", x)


def erf(x: Operand) -> Value:
    """The error function of `x`."""
    return operate("erf", x)


def sigmoid(x: Operand) -> Value:
    """1 / (1 + exp(-`x`))."""
    return operate("sigmoid", x)


def sin(x: Operand) -> Value:
    """The sine of `x`, in radians."""
    return operate("sin", x)


def cos(x: Operand) -> Value:
    """The cosine of `x`, in radians."""
    return operate("cos", x)


def floor(x: Operand) -> Value:
    """The largest whole number at most `x`, in the type of `x`."""
    return operate("floor", x)


def ceil(x: Operand) -> Value:
    """The smallest whole number at least `x`, in the type of `x`."""
    return operate("ceil", x)


def isnan(x: Operand) -> Value:
    """True where `x` is NaN."""
    return operate("isnan", x)


def isinf(x: Operand) -> Value:
    """True where `x` is infinite."""
    return operate("isinf", x)


def sign(x: Operand) -> Value:
    """-1, 0 or 1 by the sign of `x`."""
    return operate("sign", x)


def pow(x: Operand, y: Operand) -> Value:
    """`x` to the power `y`."""
    return operate("pow", x, y)


def abs(x: Operand) -> Value:
    """The magnitude of `x`."""
    return operate("abs", x)


def round(x: Operand) -> Value:
    """The nearest whole number, halves to even, in the type of `x`."""
    return operate("round", x)


def max(x: Operand, y: Operand) -> Value:
    """The larger of `x` and `y`, NaN if either is."""
    return operate("max", x, y)


def min(x: Operand, y: Operand) -> Value:
    """The smaller of `x` and `y`, NaN if either is."""
    return operate("min", x, y)


def clamp(x: Operand, min_val: Operand, max_val: Operand) -> Value:
    """`x`, moved to `min_val` or `max_val` where it lies beyond them; NaN stays NaN."""
    return max(min(x, max_val), min_val)


def isfinite(x: Operand) -> Value:
    """True where `x` is neither NaN nor infinite."""
    return operate("not", operate("or", isnan(x), isinf(x)))


def _limits(dtype: DType) -> tuple[float | int, float | int]:
    if dtype is DType.BOOL:
        return 0, 1
    limits = np.iinfo(dtype.row.numpy) if dtype.is_int else ml_dtypes.finfo(dtype.row.numpy)
    kind = int if dtype.is_int else float
    return kind(limits.min), kind(limits.max)


float64, float32, float16, bfloat16 = DType.F64, DType.F32, DType.F16, DType.BF16
int64, int32, int16, int8, uint8 = DType.I64, DType.I32, DType.I16, DType.I8, DType.U8
bool = DType.BOOL
