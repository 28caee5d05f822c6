"""Every scalar function of the tile language in every type, and every cast: run against float64 or integers.

One kernel per type has all functions as rows of its output, so that there are few to build.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilecore
from tilecore import language as T

pytestmark = pytest.mark.cpu
COUNT = 45  # divides no vector
RNG = np.random.default_rng(11)
erf = np.vectorize(math.erf)
FLOATS: dict[str, Any] = {
    "float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
}  # fmt: skip
INTEGERS: dict[str, Any] = {
    "int64": np.int64, "int32": np.int32, "int16": np.int16, "int8": np.int8, "uint8": np.uint8,
}  # fmt: skip
TYPES: dict[str, Any] = {**FLOATS, **INTEGERS, "bool": np.bool_}
ROUNDING = {"float64": 1e-12, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}

Function = Callable[..., Any]
UNARY: dict[str, tuple[Function, Function]] = {
    "exp": (T.exp, np.exp), "exp2": (T.exp2, np.exp2), "sin": (T.sin, np.sin), "cos": (T.cos, np.cos),
    "tanh": (T.tanh, np.tanh), "erf": (T.erf, erf), "sigmoid": (T.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "abs": (T.abs, np.abs), "sign": (T.sign, np.sign), "floor": (T.floor, np.floor), "ceil": (T.ceil, np.ceil),
    "round": (T.round, np.rint), "neg": (lambda x: -x, np.negative),
    "log": (lambda x: T.log(T.abs(x) + 0.5), lambda x: np.log(np.abs(x) + 0.5)),
    "log2": (lambda x: T.log2(T.abs(x) + 0.5), lambda x: np.log2(np.abs(x) + 0.5)),
    "sqrt": (lambda x: T.sqrt(T.abs(x)), lambda x: np.sqrt(np.abs(x))),
    "rsqrt": (lambda x: T.rsqrt(T.abs(x) + 0.5), lambda x: 1 / np.sqrt(np.abs(x) + 0.5)),
    "ldexp": (lambda x: T.ldexp(x, 3), lambda x: np.ldexp(x, 3)),
}  # fmt: skip
BINARY: dict[str, tuple[Function, Function]] = {
    "add": (lambda x, y: x + y, np.add), "sub": (lambda x, y: x - y, np.subtract),
    "mul": (lambda x, y: x * y, np.multiply), "div": (lambda x, y: x / y, np.divide),
    "pow": (lambda x, y: T.pow(T.abs(x) + 0.5, y), lambda x, y: np.power(np.abs(x) + 0.5, y)),
    "power": (lambda x, y: (T.abs(x) + 0.5) ** y, lambda x, y: np.power(np.abs(x) + 0.5, y)),
    "min": (T.min, np.minimum), "max": (T.max, np.maximum),
    "select": (lambda x, y: T.Select(x < y, x, y + 1), lambda x, y: np.where(x < y, x, y + 1)),
}  # fmt: skip
WHOLE: dict[str, tuple[Function, Function]] = {
    "add": (lambda x, y: x + y, np.add), "sub": (lambda x, y: x - y, np.subtract),
    "mul": (lambda x, y: x * y, np.multiply), "floordiv": (T.floordiv, np.floor_divide),
    "floormod": (T.floormod, np.mod), "//": (lambda x, y: x // y, np.floor_divide), "%": (lambda x, y: x % y, np.mod),
    "and": (T.bitwise_and, np.bitwise_and), "or": (T.bitwise_or, np.bitwise_or), "xor": (T.bitwise_xor, np.bitwise_xor),
    "not": (lambda x, y: T.bitwise_not(x), lambda x, y: np.invert(x)),
    "shl": (lambda x, y: T.shift_left(x, 3), lambda x, y: np.left_shift(x, 3)),
    "shr": (lambda x, y: T.shift_right(x, 2), lambda x, y: np.right_shift(x, 2)),
    "min": (T.min, np.minimum), "max": (T.max, np.maximum), "abs": (lambda x, y: T.abs(x), lambda x, y: np.abs(x)),
    "sign": (lambda x, y: T.sign(x), lambda x, y: np.sign(x)), "neg": (lambda x, y: -x, lambda x, y: np.negative(x)),
    "select": (lambda x, y: T.if_then_else(x <= y, x, y), lambda x, y: np.where(x <= y, x, y)),
}  # fmt: skip
BEYOND: dict[str, tuple[Function, Function]] = {  # what is so of numbers, and not of a type's
    "max": (lambda x, y: T.max(x + 1, x), lambda x, y: np.maximum(x + 1, x)),
    "min": (lambda x, y: T.min(x - 3, x), lambda x, y: np.minimum(x - 3, x)),
    "//": (lambda x, y: (x * 2) // 2, lambda x, y: (x * 2) // 2),
    ">": (lambda x, y: T.Select(x + 1 > x, x, y), lambda x, y: np.where(x + 1 > x, x, y)),
    "<": (lambda x, y: T.Select(-x < x, x, y), lambda x, y: np.where(-x < x, x, y)),
}  # fmt: skip
COMPARISONS: dict[str, tuple[Function, Function]] = {
    "<": (lambda x, y: x < y, np.less), "<=": (lambda x, y: x <= y, np.less_equal),
    ">": (lambda x, y: x > y, np.greater), ">=": (lambda x, y: x >= y, np.greater_equal),
    "==": (lambda x, y: x == y, np.equal), "!=": (lambda x, y: x != y, np.not_equal),
}  # fmt: skip


def table(functions: list[Function], given: str, made: str) -> Any:
    """A kernel with one output row for each function of x[j] and y[j]."""

    @T.prim_func
    def kernel(
        X: T.Tensor((COUNT,), given),  # type: ignore[valid-type]
        Y: T.Tensor((COUNT,), given),  # type: ignore[valid-type]
        Z: T.Tensor((len(functions), COUNT), made),  # type: ignore[valid-type]
    ) -> None:
        with T.Kernel(1) as _:
            for j in T.Parallel(COUNT):
                for row, function in enumerate(functions):
                    Z[row, j] = function(X[j], Y[j])

    return kernel


def of_first(functions: tuple[Function, Function]) -> tuple[Function, Function]:
    """A function of one number, and its oracle, as functions of the first of two."""
    return lambda x, y: functions[0](x), lambda x, y: functions[1](x)


def results(functions: list[Function], given: str, made: str, cache: Path, *arrays: np.ndarray) -> np.ndarray:
    return tilecore.compile(table(functions, given, made), out_idx=-1, threads=1, cache=cache)(*arrays)


@pytest.mark.parametrize("dtype", FLOATS)
def test_functions_of_floats(dtype: str, object_cache: Path) -> None:
    x, y = (RNG.uniform(-3, 3, COUNT).astype(FLOATS[dtype]) for _ in range(2))
    x[:6] = [0.5, 1.5, -2.5, 0.0, 2.0, -1.0]
    y[:3] = x[:3]
    given = [*map(of_first, UNARY.values()), *BINARY.values()]
    names = [*UNARY, *BINARY]
    found = results([f for f, _ in given], dtype, dtype, object_cache, x, y).astype(np.float64)
    wide = x.astype(np.float64), y.astype(np.float64)
    for name, row, (_, oracle) in zip(names, found, given, strict=True):
        np.testing.assert_allclose(row, oracle(*wide), rtol=3 * ROUNDING[dtype], atol=ROUNDING[dtype], err_msg=name)


def test_sine_and_cosine_are_right_to_the_last_digit_far_from_zero(object_cache: Path) -> None:
    """Vectors up to 8192 by polynomials, beyond it by libm; both in one call."""
    near, far = RNG.uniform(-8192, 8192, 40 * COUNT), RNG.uniform(-1e6, 1e6, 2 * COUNT)
    multiples = np.arange(-40 * COUNT, 40 * COUNT) * (np.pi / 2)  # where one of them is next to nothing
    x = np.concatenate([near, far, multiples, [8192.0, -8192.0, 0.0, -0.0]]).astype(np.float32)
    x.resize(-(-x.size // COUNT) * COUNT)
    kernel = tilecore.compile(
        table([lambda x, y: T.sin(x), lambda x, y: T.cos(x)], "float32", "float32"), out_idx=-1, cache=object_cache
    )
    for part in x.reshape(-1, COUNT):
        wide = part.astype(np.float64)
        np.testing.assert_allclose(kernel(part, part), [np.sin(wide), np.cos(wide)], rtol=2e-7, atol=1e-14)
    zeros = np.full(COUNT, -0.0, np.float32)
    assert np.signbit(kernel(zeros, zeros)[0]).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_no_number_in_functions_of_floats(dtype: str, object_cache: Path) -> None:
    x = np.resize(np.array([np.nan, np.inf, -np.inf, 0.0, 1.0]), COUNT).astype(FLOATS[dtype])
    y = np.repeat(np.array([np.nan, np.inf, -np.inf, 0.0, 1.0]), COUNT // 5).astype(FLOATS[dtype])
    kept = ["exp", "exp2", "tanh", "erf", "sigmoid", "abs", "floor", "ceil", "round", "neg", "sqrt"]
    given = [of_first(UNARY[name]) for name in kept]
    given += [BINARY[name] for name in ("add", "sub", "mul", "div", "min", "max")]
    given.append((lambda x, y: T.infinity + x * 0, lambda x, y: np.inf + x * 0))
    found = results([f for f, _ in given], dtype, dtype, object_cache, x, y).astype(np.float64)
    with np.errstate(all="ignore"):
        wanted = [oracle(x.astype(np.float64), y.astype(np.float64)) for _, oracle in given]
    for name, row, right in zip([*kept, "+", "-", "*", "/", "min", "max", "infinity"], found, wanted, strict=True):
        np.testing.assert_allclose(row, right, rtol=3 * ROUNDING[dtype], atol=ROUNDING[dtype], err_msg=name)
    tests: list[tuple[Function, Function]] = [
        (lambda x, y: T.isnan(x), lambda x, y: np.isnan(x)), (lambda x, y: T.isinf(x), lambda x, y: np.isinf(x)),
        *COMPARISONS.values(),
    ]  # fmt: skip
    flags = results([f for f, _ in tests], dtype, "bool", object_cache, x, y)
    for row, (_, oracle) in zip(flags, tests, strict=True):
        np.testing.assert_array_equal(row, oracle(x.astype(np.float64), y.astype(np.float64)))


def whole(dtype: str, *, zero: bool = True) -> np.ndarray:
    """Numbers of an integer type: both ends of its range, small ones and any."""
    low, high = int(T.min_value(dtype)), int(T.max_value(dtype))
    array = RNG.integers(low, high, COUNT, dtype=np.int64, endpoint=True)
    array[:20] = RNG.integers(-5 if low else 0, 6, 20)
    array[-4:] = [low, high, 1, low]
    return np.where(array == 0, 3, array).astype(INTEGERS[dtype]) if not zero else array.astype(INTEGERS[dtype])


@pytest.mark.parametrize("dtype", INTEGERS)
def test_functions_of_integers_wrap_around(dtype: str, object_cache: Path) -> None:
    x, y = whole(dtype), whole(dtype, zero=False)
    y[-4:-2] = 1 if dtype == "uint8" else -1  # also of the smallest number, which is its own negative
    found = results([f for f, _ in WHOLE.values()], dtype, dtype, object_cache, x, y)
    with np.errstate(over="ignore"):
        for name, row, (_, oracle) in zip(WHOLE, found, WHOLE.values(), strict=True):
            np.testing.assert_array_equal(row, oracle(x, y), err_msg=name)
    flags = results([f for f, _ in COMPARISONS.values()], dtype, "bool", object_cache, x, y)
    for name, row, (_, oracle) in zip(COMPARISONS, flags, COMPARISONS.values(), strict=True):
        np.testing.assert_array_equal(row, oracle(x, y), err_msg=name)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32"])
def test_sums_that_wrap_around_are_not_compared_as_if_they_did_not(dtype: str, object_cache: Path) -> None:
    """Neither by us nor by the C compiler, which takes its signed sums to stay in range."""
    x, y = whole(dtype), whole(dtype)
    found = results([f for f, _ in BEYOND.values()], dtype, dtype, object_cache, x, y)
    with np.errstate(over="ignore"):
        for name, row, (_, oracle) in zip(BEYOND, found, BEYOND.values(), strict=True):
            np.testing.assert_array_equal(row, oracle(x, y), err_msg=name)


@pytest.mark.parametrize("given", TYPES)
def test_every_cast(given: str, object_cache: Path) -> None:
    """Floats truncate, integers keep their lowest bits, a bool is 0 or 1, and whatever is not 0 is true."""
    if given == "bool":
        x = RNG.integers(0, 2, COUNT).astype(np.bool_)
    elif given in INTEGERS:
        x = whole(given)
    else:
        x = RNG.uniform(-100, 100, COUNT).astype(FLOATS[given])
        x[:7] = [0.0, -0.0, 0.5, -0.5, 1.0, -1.75, 99.0]

    @T.prim_func
    def kernel(
        X: T.Tensor((COUNT,), given), a: T.Tensor((COUNT,), "float64"), b: T.Tensor((COUNT,), "float32"),  # type: ignore[valid-type]
        c: T.Tensor((COUNT,), "float16"), d: T.Tensor((COUNT,), "bfloat16"), e: T.Tensor((COUNT,), "int64"),  # type: ignore[valid-type]
        f: T.Tensor((COUNT,), "int32"), g: T.Tensor((COUNT,), "int16"), h: T.Tensor((COUNT,), "int8"),  # type: ignore[valid-type]
        i: T.Tensor((COUNT,), "uint8"), k: T.Tensor((COUNT,), "bool"),  # type: ignore[valid-type]
    ) -> None:  # fmt: skip
        with T.Kernel(1) as _:
            for j in T.Parallel(COUNT):
                for made, place in zip(TYPES, (a, b, c, d, e, f, g, h, i, k), strict=True):
                    place[j] = T.cast(T.abs(X[j]) if signless(given, made) else X[j], made)

    outputs = tilecore.compile(kernel, out_idx=range(1, 11), threads=1, cache=object_cache)(x)
    for (made, numpy), found in zip(TYPES.items(), outputs, strict=True):
        values = np.abs(x) if signless(given, made) else x
        values = values.astype(np.float32) if given in ("float16", "bfloat16") else values
        with np.errstate(over="ignore"):
            wanted = values != 0 if made == "bool" else values.astype(numpy)
        np.testing.assert_array_equal(found, wanted, err_msg=f"{given} to {made}")


def signless(given: str, made: str) -> bool:
    """Floats below 0 are no number of an unsigned type."""
    return given in FLOATS and made == "uint8"


@pytest.mark.parametrize(("given", "made"), [
    ("float32", "int32"), ("int32", "float32"), ("float64", "int64"), ("int64", "float64"), ("float16", "int16"),
    ("int16", "bfloat16"), ("bfloat16", "int16"), ("uint8", "int8"), ("int8", "uint8"), ("bfloat16", "float16"),
])  # fmt: skip
def test_bits_as_another_type(given: str, made: str, object_cache: Path) -> None:
    x = RNG.uniform(1, 100, COUNT).astype(TYPES[given])
    found = results([lambda x, y: T.reinterpret(x, made)], given, made, object_cache, x, x)[0]
    np.testing.assert_array_equal(found.view(TYPES[given]), x)


@pytest.mark.parametrize("made", ["float16", "bfloat16"])
@pytest.mark.parametrize("count", [1, 40])  # by scalars, and by vectors
def test_float64_is_rounded_to_16_bits_once(made: str, count: int, object_cache: Path) -> None:
    """Rounded to float32 on the way, what lies just beside the middle of two neighbours would go to the even one."""
    digits, least, most = {
        "float16": (11, -14, 65504.0),
        "bfloat16": (8, -126, float(ml_dtypes.finfo("bfloat16").max)),
    }[made]
    half = 2.0**-digits
    given = [
        1 + half,
        1 + half + 2.0**-50,
        1 + half - 2.0**-50,
        1 + 3 * half - 2.0**-45,
        most * (1 + half * 0.499999999),
    ]
    given += [most * (1 + half), 2.0 ** (least - digits) * (1 + 2.0**-40), 2.0 ** (least - digits), 1e-60, 5e-324, 0.0]
    given += [np.inf, np.nan, 2.0**200, *RNG.standard_normal(40).tolist()]
    x = np.array([sign * value for value in given for sign in (1.0, -1.0)])

    @T.prim_func
    def kernel(X: T.Tensor((len(x),), "float64"), Y: T.Tensor((len(x),), made)) -> None:  # type: ignore[valid-type]
        with T.Kernel(T.ceildiv(len(x), count)) as b:
            for i in T.Parallel(count):
                Y[b * count + i] = T.cast(X[b * count + i], made)

    found = tilecore.compile(kernel, out_idx=1, cache=object_cache)(x).astype(np.float64)
    wanted = np.array([rounded(value, digits, least, most) for value in x.tolist()])
    np.testing.assert_array_equal(found, wanted)


def rounded(value: float, digits: int, least: int, most: float) -> float:
    """To the nearest number of so many binary digits, halves to even; `least` is the exponent of the first normal."""
    if not np.isfinite(value) or value == 0:
        return value
    step = 2.0 ** (max(int(np.frexp(value)[1]) - 1, least) - digits + 1)
    nearest = float(np.round(value / step)) * step
    return nearest if abs(nearest) <= most else float(np.copysign(np.inf, value))


def test_logic_of_bools(object_cache: Path) -> None:
    x, y = (RNG.integers(0, 2, COUNT).astype(np.bool_) for _ in range(2))
    given: list[tuple[Function, Function]] = [
        (lambda x, y: x & y, np.logical_and), (lambda x, y: x | y, np.logical_or), (lambda x, y: ~x, lambda x, y: ~x),
        (lambda x, y: x ^ y, np.logical_xor), (T.bitwise_and, np.logical_and),
        (lambda x, y: T.if_then_else(x, y, ~y), lambda x, y: np.where(x, y, ~y)),
    ]  # fmt: skip
    found = results([f for f, _ in given], "bool", "bool", object_cache, x, y)
    for row, (_, oracle) in zip(found, given, strict=True):
        np.testing.assert_array_equal(row, oracle(x, y))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_limits(dtype: str) -> None:
    info = ml_dtypes.iinfo(TYPES[dtype]) if dtype in INTEGERS else ml_dtypes.finfo(TYPES[dtype])
    assert T.min_value(dtype) == info.min
    assert T.max_value(dtype) == info.max


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_limits_in_kernels(dtype: str, object_cache: Path) -> None:
    """Where reductions begin, too."""
    low, high = T.min_value(dtype), T.max_value(dtype)

    def kernel(A: T.Tensor((3, 9), dtype), C: T.Tensor((4, 9), dtype)) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a, most = T.alloc_shared((3, 9), dtype), T.alloc_fragment((9,), dtype)
            T.copy(A, a)
            T.reduce_max(a, most, dim=0)
            T.copy(most, C[0, :])
            for j in T.Parallel(9):
                C[1, j] = T.max(A[0, j], low)
                C[2, j], C[3, j] = low, high

    a = (RNG.standard_normal((3, 9)) * 9).astype(TYPES[dtype])
    found = tilecore.compile(kernel, out_idx=1, cache=object_cache)(a)
    np.testing.assert_array_equal(found, np.stack([a.max(0), a[0], np.full_like(a[0], low), np.full_like(a[0], high)]))


def test_numbers_of_python_as_integers(object_cache: Path) -> None:
    """Casts keep the lowest bits, as numpy's of arrays do; patterns of bits may be written without a sign."""

    def kernel(A: T.Tensor((8,), "int8"), C: T.Tensor((8, 8), "int8")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            for i in T.Parallel(8):
                C[0, i], C[1, i], C[2, i] = A[i] & 0xF0, A[i] | 0x80, A[i] ^ 255
                C[3, i], C[4, i], C[5, i] = T.cast(300, "int8"), T.cast(-1.9, "int8"), T.cast(True, "int8")
                C[6, i] = T.cast(T.cast(A[i], "int32") & 0xFFFF0000, "int8")
                C[7, i] = T.cast(T.cast(1e20, "int32") >> 24, "int8")

    a = np.array([0, 1, -1, 127, -128, 5, 77, -7], np.int8)
    ones, patterns = np.ones_like(a), np.array([0xF0, 0x80, 255], np.uint8).view(np.int8)
    wanted = [a & patterns[0], a | patterns[1], a ^ patterns[2], 44 * ones, -ones, ones, 0 * ones, -128 * ones]
    np.testing.assert_array_equal(tilecore.compile(kernel, out_idx=1, cache=object_cache)(a), np.stack(wanted))


def test_types_by_their_names(object_cache: Path) -> None:
    x = RNG.uniform(-3, 3, COUNT).astype(np.float32)
    given: list[Function] = [
        lambda x, y: x.astype("int32").astype("float32"), lambda x, y: T.isinf(x / 0.0).astype("float"),
        lambda x, y: T.float16(x).astype(T.float32), lambda x, y: T.Cast("half", x).astype("float32"),
    ]  # fmt: skip
    found = results(given, "float32", "float32", object_cache, x, x)
    half = x.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(found, np.stack([np.trunc(x), np.ones(COUNT, np.float32), half, half]))
    with pytest.raises(tilecore.TileError, match="no dtype 'f99'"):
        results([lambda x, y: x.astype("f99")], "float32", "float32", object_cache, x, x)
