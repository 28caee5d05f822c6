"""Quantised values: the element rules of QuantizeLinear and DequantizeLinear, and levels told apart from their scale.

A quantised element is a level (a small integer less its zero point) times a scale. The rules write both operators in
that form, with ONNX's meaning: rounding is half to even, results saturate, the scale divides. `levels` reads any
expression of that form back, however it was spelled, so that a contraction can sum levels as integers.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fuser.element import ONE, ZERO, Element, Index, dtype_of
from tilecore.contract.dtype import DType, from_onnx
from tilecore.contract.expr import Const, Expr, Load, Op, Var, apply, binary, cast, const, select, unary, variables

BYTES = (DType.I8, DType.U8)
NARROW = (DType.I4, DType.U4, DType.I2, DType.U2)  # several in a byte
INTEGERS = (*NARROW, *BYTES, DType.I16, DType.I32)


@dataclass(frozen=True, slots=True)
class Levels:
    """`value` (an integer within ±`limit`) times `scale` (None for 1), which the summed index does not change."""

    value: Expr
    limit: int
    scale: Expr | None


def level(value: Expr, zero: Expr | None) -> Expr:
    """The integer element less its zero point, in 32 bits."""
    wide = cast(value, DType.I32)
    return wide if zero is None else wide - cast(zero, DType.I32)


def requantized(value: Expr, zero: Expr | None, dtype: DType) -> Expr:
    """saturate(round(value) + zero) as `dtype`, for an f32 `value`; NaN becomes the smallest."""
    shift = const(0, DType.I32) if zero is None else cast(zero, DType.I32)
    low, high = (cast(const(end, DType.I32) - shift, DType.F32) for end in dtype.range)
    rounded = unary("round", value)
    clamped = select(binary("gt", rounded, low), rounded, low)
    clamped = select(binary("lt", clamped, high), clamped, high)
    return cast(cast(clamped, DType.I32) + shift, dtype)


def dequantize(e: Element) -> Expr:
    """DequantizeLinear of every opset: (x − zero) · scale, per tensor, per axis or in blocks along the axis."""
    where = _parameter_index(e)
    scale = e.read(1, where)
    value = e.read(0, e.index)
    if value.dtype not in INTEGERS:
        raise e.error(f"{value.dtype} is not an integer of at most 32 bits")
    zero = _zero_of(e, where)
    real = cast(level(value, zero), DType.F32) * cast(scale, DType.F32)
    code = e.attribute("output_dtype", 0)
    return cast(real, _named(e, int(code)) if code else scale.dtype)


def _zero_of(e: Element, where: Index) -> Expr | None:
    """The zero point beside the scale at `where`, or the only one, whatever its rank."""
    if not e.has(2):
        return None
    shape = e.shape(2)
    if len(shape) != len(where) and not all(dim == ONE for dim in shape):
        raise e.error(f"its zero point has {len(shape)} axes and its scale has {len(where)}")
    return e.read(2, where if len(shape) == len(where) else tuple(ZERO for _ in shape))


def quantize(e: Element) -> Expr:
    """QuantizeLinear of every opset: saturate(round(x / scale) + zero)."""
    target = _result_type(e)
    if target not in BYTES and target is not DType.I16:
        raise e.error(f"levels of {target} have no rule")
    if e.attribute("precision", 0) not in (0, DType.F32.row.onnx):
        raise e.error("a division in another precision than f32 has no rule")
    where = _parameter_index(e)
    scale = cast(e.read(1, where), DType.F32)
    zero = _zero_of(e, where)
    return requantized(cast(e.read(0, e.index), DType.F32) / scale, zero, target)


def quantized_pair(name: str) -> Callable[[Element], Expr]:
    """QLinearAdd and QLinearMul: (A, scale, zero), (B, scale, zero), scale and zero of the result."""

    def rule(e: Element) -> Expr:
        real = [
            cast(level(e.broadcast(i), _single(e, i + 2)), DType.F32) * cast(_required(e, i + 1), DType.F32)
            for i in (0, 3)
        ]
        return requantized(binary(name, *real) / _required(e, 6), _single(e, 7), dtype_of(e.result, e.shapes))

    return rule


def quantized_unary(function: Callable[[Element, Expr], Expr]) -> Callable[[Element], Expr]:
    """QLinearSigmoid and the like: (X, scale, zero), scale and zero of the result."""

    def rule(e: Element) -> Expr:
        real = cast(level(e.broadcast(0), _single(e, 2)), DType.F32) * _required(e, 1)
        return requantized(function(e, real) / _required(e, 3), _single(e, 4), dtype_of(e.result, e.shapes))

    return rule


def _required(e: Element, position: int) -> Expr:
    found = _single(e, position)
    if found is None:
        raise e.error(f"input {position} is missing")
    return found


def _single(e: Element, position: int) -> Expr | None:
    """Input `position`, a single number, or None where it is left out."""
    if not e.has(position):
        return None
    shape = e.shape(position)
    if any(dim != ONE for dim in shape):
        raise e.error(f"input {position} has more than one element")
    return e.read(position, tuple(ZERO for _ in shape))


def _result_type(e: Element) -> DType:
    if e.has(2):
        return e.dtype(2)
    code = e.attribute("output_dtype", 0)
    return _named(e, int(code)) if code else DType.U8


def _named(e: Element, code: int) -> DType:
    try:
        return from_onnx(code)
    except KeyError:
        raise e.error(f"the compiler has no type {code}") from None


def _parameter_index(e: Element) -> Index:
    """Where the scale (and the zero point, which has its shape) of this element is."""
    shape = e.shape(1)
    if not shape or all(dim == ONE for dim in shape):
        return tuple(ZERO for _ in shape)
    axis = e.axis(default=1, rank=len(e.index))
    block = int(e.attribute("block_size", 0))
    if block:
        if len(shape) != len(e.index):
            raise e.error(f"the scale of a blocked quantisation has {len(shape)} axes, its input {len(e.index)}")
        return tuple(at // block if position == axis else at for position, at in enumerate(e.index))
    if len(shape) != 1:
        raise e.error(f"a scale of {len(shape)} axes needs block_size")
    return (e.index[axis],)


# -- levels in an expression ------------------------------------------------------------------------------------------


def levels(expr: Expr, inner: Var) -> Levels | None:
    """`expr` as levels times a scale that `inner` does not change; None when it has another form."""
    if isinstance(expr, Op) and expr.name == "mul" and expr.dtype is DType.F32:
        for part, factor in (expr.args, expr.args[::-1]):
            found = None if inner in variables(factor) else levels(part, inner)
            if found is not None:
                return Levels(found.value, found.limit, factor if found.scale is None else found.scale * factor)
        return None
    if isinstance(expr, Op) and expr.name == "sub" and expr.dtype is DType.F32:  # cast(x) − cast(zero), both exact
        sides = [_exact_integer(side) for side in expr.args]
        return None if sides[0] is None or sides[1] is None else whole(sides[0] - sides[1])
    found = _exact_integer(expr)
    return None if found is None else whole(found)


def _exact_integer(expr: Expr) -> Expr | None:
    """The 32-bit integer that an f32 expression is a cast of, or the whole number that a constant is."""
    if isinstance(expr, Const) and expr.dtype.is_float and float(expr.value).is_integer() and abs(expr.value) < 1 << 15:
        return const(int(expr.value), DType.I32)
    if isinstance(expr, Op) and expr.name == "cast" and expr.dtype is DType.F32:
        source = expr.args[0]
        if source.dtype in INTEGERS and bounds(source) is not None:
            return cast(source, DType.I32)
    return None


def whole(value: Expr) -> Levels | None:
    """An integer expression as levels of 16 bits; None when it is not proved to fit them."""
    found = bounds(value)
    if found is None or found[0] < -(1 << 15) or found[1] >= 1 << 15:
        return None
    bare = (
        value.args[0]
        if isinstance(value, Op) and value.name == "cast" and value.args[0].dtype in (*NARROW, *BYTES)
        else value
    )
    return Levels(cast(bare, DType.I16), max(-found[0], found[1]), None)


def bounds(expr: Expr) -> tuple[int, int] | None:
    """Inclusive bounds of an integer expression over narrow elements, by intervals; None when it may wrap."""
    match expr:
        case Const():
            found = (int(expr.value), int(expr.value))
        case Load() if expr.dtype in (*NARROW, *BYTES, DType.I16):
            found = expr.dtype.range
        case Op(name="cast", args=(source,)) if source.dtype in INTEGERS:
            found = bounds(source)
            if expr.dtype in BYTES and (found is None or not _within(found, expr.dtype)):
                found = expr.dtype.range  # whatever it is the lowest bits of
        case Op(name="add", args=(left, right)):
            sides = bounds(left), bounds(right)
            found = None if sides[0] is None or sides[1] is None else _sum(sides[0], sides[1])
        case Op(name="mul", args=(left, right)):
            sides = bounds(left), bounds(right)
            found = None if sides[0] is None or sides[1] is None else _product(sides[0], sides[1])
        case Op(name="select", args=(_, yes, no)):
            sides = bounds(yes), bounds(no)
            found = None if sides[0] is None or sides[1] is None else _hull(sides[0], sides[1])
        case _:
            return None
    return found if found is not None and _within(found, expr.dtype) else None


def _within(found: tuple[int, int], dtype: DType) -> bool:
    low, high = dtype.range
    return low <= found[0] and found[1] <= high


def _sum(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return a[0] + b[0], a[1] + b[1]


def _product(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    corners = [x * y for x in a for y in b]
    return min(corners), max(corners)


def _hull(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return min(a[0], b[0]), max(a[1], b[1])


def fits_sum(left: Levels, right: Levels, depth: Expr) -> bool:
    """Whether `depth` products of such levels are proved to fit 32 bits."""
    return isinstance(depth, Const) and left.limit * right.limit * int(depth.value) < 1 << 31


def scaled(acc: Expr, left: Levels, right: Levels) -> Expr:
    """The real value of an integer sum."""
    value = cast(acc, DType.F32)
    factors = [side.scale for side in (left, right) if side.scale is not None]
    if not factors:
        return value
    return value * (factors[0] if len(factors) == 1 else apply("mul", *factors))
