"""Every primitive of the tile language, compiled and run: against float64 or integer numpy, and the interpreter."""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilecore
from tilecore import language as T
from tilecore.call import KernelError
from tilecore.interpret import interpret
from tilecore.jitted import JitKernel
from tilecore.trace import trace_all

pytestmark = pytest.mark.cpu
M, N = 6, 21  # neither divides a vector
RNG = np.random.default_rng(7)
Compile = Callable[..., JitKernel]


@pytest.fixture(scope="module")
def build(object_cache: Path) -> Compile:
    def built(kernel: Any, **options: Any) -> JitKernel:
        return tilecore.compile(kernel, cache=object_cache, threads=2, **options)

    return built


def both(build: Compile, kernel: Any, *arrays: np.ndarray) -> np.ndarray:
    """The last parameter of `kernel`, compiled; checked against the interpreter on the way."""
    compiled = build(kernel, out_idx=-1)
    result = compiled(*arrays)
    names = compiled.parameters
    wanted = interpret(trace_all(kernel.function).programs[0], dict(zip(names, arrays, strict=False)))[names[-1]]
    tolerance = 1e-2 if result.itemsize == 2 else 1e-5
    np.testing.assert_allclose(np.asarray(result, wanted.dtype), wanted, rtol=tolerance, atol=1e-5)
    return result


DTYPES: dict[str, Any] = {
    "float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
    "int64": np.int64, "int32": np.int32, "int16": np.int16, "int8": np.int8, "uint8": np.uint8,
}  # fmt: skip


def reducing(kind: str, dtype: str, dim: int) -> Any:
    function = getattr(T, f"reduce_{kind}")
    kept = (M, N)[1 - dim]

    @T.prim_func
    def kernel(A: T.Tensor((M, N), dtype), B: T.Tensor((kept,), dtype)) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a = T.alloc_fragment((M, N), dtype)
            b = T.alloc_fragment((kept,), dtype)
            T.copy(A, a)
            function(a, b, dim=dim)
            T.copy(b, B)

    return kernel


ORACLES: dict[str, Callable[..., Any]] = {
    "sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod,
    "abssum": lambda x, axis: np.abs(x).sum(axis), "absmax": lambda x, axis: np.abs(x).max(axis),
    "bitand": np.bitwise_and.reduce, "bitor": np.bitwise_or.reduce, "bitxor": np.bitwise_xor.reduce,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dtype", "dim"),
    [("sum", "float32", 1), ("sum", "float64", 0), ("max", "float16", 1), ("min", "bfloat16", 0),
     ("prod", "float32", 0), ("abssum", "float32", 1), ("absmax", "int32", 1), ("max", "int8", 0), ("sum", "int64", 1),
     ("bitand", "int32", 1), ("bitor", "uint8", 0), ("bitxor", "int16", 1), ("sum", "float16", 1)],
)  # fmt: skip
def test_reductions(build: Compile, kind: str, dtype: str, dim: int) -> None:
    element = DTYPES[dtype]
    values = RNG.standard_normal((M, N)) if "float" in dtype else RNG.integers(-3, 100, (M, N))
    array = values.astype(element)
    result = both(build, reducing(kind, dtype, dim), array)
    wide = array.astype(np.float64 if "float" in dtype else np.int64)
    wanted = ORACLES[kind](wide, axis=dim)
    np.testing.assert_allclose(result.astype(wanted.dtype), wanted, rtol=2e-2 if "16" in dtype else 1e-6, atol=1e-6)


@pytest.mark.parametrize(("dim", "reverse"), [(0, False), (0, True), (1, False), (1, True)])
def test_running_sums(build: Compile, dim: int, reverse: bool) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a = T.alloc_shared((M, N), "float32")
            T.copy(A, a)
            T.cumsum(a, dim=dim, reverse=reverse)
            T.copy(a, B)

    array = RNG.standard_normal((M, N)).astype(np.float32)
    way = (
        slice(None, None, -1) if reverse and dim == 0 else slice(None),
        slice(None, None, -1 if reverse and dim else 1),
    )
    wanted = np.cumsum(array.astype(np.float64)[way], axis=dim)[way]
    np.testing.assert_allclose(both(build, kernel, array), wanted, rtol=1e-5, atol=1e-5)


def test_updates_of_one_element_by_many_tasks(build: Compile) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((64, N), "float32"), S: T.Tensor((N,), "float32"), L: T.Tensor((1,), "int32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(64) as m:
            a = T.alloc_fragment((N,), "float32")
            T.copy(A[m, 0], a)
            T.atomic_add(S[0], a)
            T.atomic_max(L[0], T.cast(m, T.int32))

    array = RNG.standard_normal((64, N)).astype(np.float32)
    sums, largest = np.ones(N, np.float32), np.array([-1], np.int32)
    assert build(kernel)(array, sums, largest) is None
    np.testing.assert_allclose(sums, 1 + array.astype(np.float64).sum(0), rtol=1e-4, atol=1e-4)
    assert largest[0] == 63
    made, _ = build(kernel, out_idx=[1, 2])(array)
    np.testing.assert_allclose(made, array.astype(np.float64).sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["add", "max", "min"])
def test_updates_of_every_type_by_many_tasks(build: Compile, dtype: str, kind: str) -> None:
    """Elements that data choose, some left out, and a rectangle: whole numbers, which are exact in any order."""
    join = getattr(T, f"atomic_{kind}")

    @T.prim_func
    def kernel(
        P: T.Tensor((200,), "int32"),  # type: ignore[valid-type]
        A: T.Tensor((200,), dtype),  # type: ignore[valid-type]
        S: T.Tensor((7,), dtype),  # type: ignore[valid-type]
        Q: T.Tensor((3, 20), dtype),  # type: ignore[valid-type]
    ) -> None:
        with T.Kernel(10) as m:
            a = T.alloc_fragment((1, 20), dtype)
            T.copy(A[m * 20 : m * 20 + 20], a)
            for i in T.Parallel(20):
                if i != 3:
                    join(S[P[m * 20 + i]], A[m * 20 + i])
            join(Q[m % 3, 0], a)

    places, kept = RNG.integers(0, 7, 200).astype(np.int32), np.arange(200) % 20 != 3
    array = RNG.integers(0 if dtype == "uint8" else -4, 5, 200).astype(DTYPES[dtype])
    wide = array.astype(np.float64)
    sums, rows, oracle = np.ones(7), np.ones((3, 20)), {"add": np.add, "max": np.maximum, "min": np.minimum}[kind]
    given = sums.astype(DTYPES[dtype]), rows.astype(DTYPES[dtype])
    oracle.at(sums, places[kept], wide[kept])
    for m in range(10):
        rows[m % 3] = oracle(rows[m % 3], wide[m * 20 : m * 20 + 20])
    build(kernel)(places, array, *given)
    for found, wanted in zip(given, (sums, rows), strict=True):
        np.testing.assert_array_equal(found.astype(np.float64), wanted)


def test_while_and_cells(build: Compile) -> None:
    """The integer square root, by counting: the number of turns is data."""

    @T.prim_func
    def kernel(A: T.Tensor((M,), "int32"), B: T.Tensor((M,), "int32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(M) as m:
            root = T.alloc_var(T.int32)
            root = 0
            while (root + 1) * (root + 1) <= A[m]:
                root = root + 1
            B[m] = root

    array = np.array([0, 1, 3, 99, 100, 12345], np.int32)
    np.testing.assert_array_equal(both(build, kernel, array), np.sqrt(array).astype(np.int32))


def test_python_control_flow_on_symbolic_values(build: Compile) -> None:
    @T.macro
    def clipped(x: Any, low: float, high: float) -> Any:
        return low if x < low else high if x > high else x

    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(M) as m:
            for j in T.Parallel(N):
                if 2 < j < 9 and not (m == 1 or j == 4):
                    B[m, j] = clipped(A[m, j], -0.5, 0.5)
                elif j == 4:
                    B[m, j] = min(A[m, j], 0.0)
                else:
                    B[m, j] = j * 0.5

    array = RNG.standard_normal((M, N)).astype(np.float32)
    j, m = np.arange(N)[None], np.arange(M)[:, None]
    inside = (j > 2) & (j < 9) & ~((m == 1) | (j == 4))
    wanted = np.where(inside, np.clip(array, -0.5, 0.5), np.where(j == 4, np.minimum(array, 0), j * 0.5))
    np.testing.assert_array_equal(both(build, kernel, array), wanted.astype(np.float32))


def test_branches_loops_and_steps(build: Compile) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M,), "float32"), n: T.int32) -> None:  # type: ignore[valid-type]
        with T.Kernel(M) as m:
            total = T.alloc_var(T.float32, init=0.0)
            for j in T.serial(1, n, 3):
                if j % 2 == 0:
                    total += A[m, j]
                else:
                    total -= A[m, j]
            for v in T.unroll(2):
                total += v
            B[m] = total

    array = RNG.standard_normal((M, N)).astype(np.float32)
    result = np.empty(M, np.float32)
    build(kernel)(array, result, N)
    signs = np.where(np.arange(1, N, 3) % 2 == 0, 1, -1)
    np.testing.assert_allclose(result, (array[:, 1::3].astype(np.float64) * signs).sum(1) + 1, rtol=1e-5, atol=1e-6)


def test_bits_shifts_and_other_types(build: Compile) -> None:
    """Nibbles with their sign, and a float built from its bits."""

    @T.prim_func
    def kernel(A: T.Tensor((N,), "uint8"), B: T.Tensor((2, N), "int8"), F: T.Tensor((N,), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            for v in T.vectorized(N):
                low = (A[v] & 15) << 4
                B[0, v] = T.reinterpret(T.int8, low) >> 4
                B[1, v] = T.reinterpret(~A[v] ^ T.cast(255, T.uint8), T.int8) >> 4
                F[v] = T.reinterpret((T.cast(A[v], T.int32) & 127 | 64) << 23, T.float32)

    array = RNG.integers(0, 256, N).astype(np.uint8)
    nibbles, floats = build(kernel, out_idx=[1, 2])(array)
    np.testing.assert_array_equal(nibbles[0], (array << 4).view(np.int8) >> 4)
    np.testing.assert_array_equal(nibbles[1], array.view(np.int8) >> 4)
    np.testing.assert_array_equal(floats, ((array.astype(np.int32) & 127 | 64) << 23).view(np.float32))


def test_ldexp_reaches_where_its_factor_does_not(build: Compile) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((N,), "float32"), E: T.Tensor((N,), "int32"), B: T.Tensor((N,), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            for i in T.Parallel(N):
                B[i] = T.ldexp(A[i], E[i])

    array = RNG.standard_normal(N).astype(np.float32)
    exponents = RNG.integers(-120, 121, N).astype(np.int32)
    np.testing.assert_array_equal(build(kernel, out_idx=2)(array, exponents), np.ldexp(array, exponents))
    np.testing.assert_array_equal(
        build(kernel, out_idx=2)(np.full(N, 2.0**-100, np.float32), np.full(N, 200, np.int32)), np.full(N, 2.0**100)
    )


@pytest.mark.parametrize("packed", ["int4", "uint4"])
def test_packed_operands(build: Compile, packed: str) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((M, 20), packed), B: T.Tensor((M, 20), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a = T.alloc_shared((M, 20), packed)
            T.copy(A, a)
            for i, j in T.Parallel(M, 20):
                B[i, j] = a[i, j]

    array = RNG.integers(0, 256, (M, 10)).astype(np.uint8)
    halves = np.stack([array & 15, array >> 4], -1).reshape(M, 20).astype(np.int8)
    wanted = (halves << 4).astype(np.int8) >> 4 if packed == "int4" else halves
    np.testing.assert_array_equal(build(kernel, out_idx=1)(array), wanted.astype(np.float32))


@pytest.mark.parametrize("packed", ["int4", "uint4"])
@pytest.mark.parametrize("given", ["float32", "int32"])
def test_casts_to_four_bits_keep_the_lowest(build: Compile, packed: str, given: str) -> None:
    held = "int8" if packed == "int4" else "uint8"

    @T.prim_func
    def kernel(A: T.Tensor((40,), given), B: T.Tensor((40,), held)) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            for i in T.Parallel(40):
                B[i] = T.cast(A[i], packed)

    array = np.arange(-20, 20).astype(given)
    wanted = [(n + 8) % 16 - 8 if packed == "int4" else n % 16 for n in range(-20, 20)]
    np.testing.assert_array_equal(build(kernel, out_idx=1)(array), np.array(wanted, held))


def test_views_of_tiles_and_operands(build: Compile) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), "float32"), B: T.Tensor((2, 12), "float32"), C: T.Tensor((24,), "int32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a = T.alloc_shared((3, 8), "float32")
            T.copy(T.reshape(A, (3, 8)), a)
            seen = T.view(a, (2, 12))
            for i, j in T.Parallel(2, 12):
                seen[i, j] = seen[i, j] * 2.0
            bits = T.view(a, (24,), dtype="int32")
            for i in T.Parallel(24):
                C[i] = bits[i]
            rows = T.alloc_fragment((2, 12), "float32")
            T.copy(seen, rows)
            T.copy(rows, B)

    array = RNG.standard_normal((4, 6)).astype(np.float32)
    doubled, bits = build(kernel, out_idx=[1, 2])(array)
    np.testing.assert_array_equal(doubled, (array * 2).reshape(2, 12))
    np.testing.assert_array_equal(bits, (array * 2).reshape(24).view(np.int32))


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int8", "int32"])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_every_type(build: Compile, dtype: str, transposed: bool) -> None:
    total = {"float64": "float64", "int8": "int32", "int32": "int32"}.get(dtype, "float32")
    shape = (N, M) if transposed else (M, N)

    @T.prim_func
    def kernel(A: T.Tensor(shape, dtype), B: T.Tensor((N, 18), dtype), C: T.Tensor((M, 18), total)) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a, b = T.alloc_shared(shape, dtype), T.alloc_shared((N, 18), dtype)
            c = T.alloc_fragment((M, 18), total)
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, transpose_A=transposed, clear_accum=True)
            T.copy(c, C)

    def array(*dims: int) -> np.ndarray:
        values = RNG.standard_normal(dims) if "float" in dtype else RNG.integers(-100, 100, dims)
        return values.astype(DTYPES[dtype])

    a, b = array(*shape), array(N, 18)
    wide = np.float64 if "float" in dtype else np.int64
    left = a.astype(wide).T if transposed else a.astype(wide)
    np.testing.assert_allclose(build(kernel, out_idx=2)(a, b), left @ b.astype(wide), rtol=1e-5, atol=1e-4)


def test_one_tile_on_both_sides_of_products(build: Compile) -> None:
    """Plain rows and packed panels of one buffer, which is also computed: each product gets what it needs."""

    @T.prim_func
    def kernel(A: T.Tensor((16, 16), "float32"), B: T.Tensor((16, 16), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a = T.alloc_shared((16, 16), "float32")
            b = T.alloc_fragment((16, 16), "float32")
            T.copy(A, a)
            T.gemm(a, a, b, clear=True)
            T.gemm(a, b, a2 := T.alloc_fragment((16, 16), "float32"), transpose_B=True, clear=True)
            T.copy(a2, B)

    array = RNG.standard_normal((16, 16)).astype(np.float32)
    wide = array.astype(np.float64)
    np.testing.assert_allclose(both(build, kernel, array), wide @ (wide @ wide).T, rtol=1e-4, atol=1e-4)


def test_reducers_join_along_the_axis_they_leave_out(build: Compile) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M,), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            total = T.alloc_reducer((M,), "float32", op="sum")
            T.clear(total)
            for i, j in T.Parallel(M, N):
                total[i] += A[i, j] * A[i, j]
            T.finalize_reducer(total)
            T.copy(total, B)

    array = RNG.standard_normal((M, N)).astype(np.float32)
    np.testing.assert_allclose(both(build, kernel, array), (array.astype(np.float64) ** 2).sum(1), rtol=1e-5)


def test_a_failed_assertion_is_an_error_with_its_place(build: Compile) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((M,), "float32"), B: T.Tensor((M,), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(M) as m:
            assert A[m] >= 0, "a root of a negative number"
            B[m] = T.sqrt(A[m])

    compiled = build(kernel, out_idx=1)
    np.testing.assert_array_equal(compiled(np.full(M, 4, np.float32)), np.full(M, 2, np.float32))
    with pytest.raises(tilecore.KernelError, match="a root of a negative number") as caught:
        compiled(np.full(M, -4, np.float32))
    assert "^" in str(caught.value)
    assert compiled(np.full(M, 9, np.float32))[0] == 3


def test_assertions_of_calls_at_once_are_told_apart(build: Compile) -> None:
    """Also where two kernels of one text have one library."""

    @T.prim_func
    def kernel(A: T.Tensor((40,), "float32"), B: T.Tensor((40,), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(5) as m:
            T.assert_(A[m * 8] >= 0, "below 0")  # noqa: PT009
            T.copy(A[m * 8 : m * 8 + 8], B[m * 8 : m * 8 + 8])

    kernels = [build(kernel, out_idx=-1) for _ in range(2)]
    good, bad = np.ones(40, np.float32), np.ones(40, np.float32)
    bad[16] = -1

    def fails(number: int) -> bool:
        try:
            kernels[number % 2](bad if number % 3 == 0 else good)
        except KernelError:
            return True
        return False

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(fails, range(120))) == [number % 3 == 0 for number in range(120)]


def test_print_writes_values_and_tiles(build: Compile, capfd: pytest.CaptureFixture[str]) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((2,), "float32"), B: T.Tensor((2,), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as m:
            a = T.alloc_fragment((2,), "float32")
            T.copy(A, a)
            T.print("100% of", a[0], m)
            T.print(a, msg="tile")
            T.copy(a, B)

    build(kernel, out_idx=1)(np.array([1.5, 2.5], np.float32))
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out.splitlines() == ["100% of 1.5 0", "tile a 0 1.5", "tile a 1 2.5"]


def test_two_grids_hand_a_tensor_on(build: Compile) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32")) -> None:  # type: ignore[valid-type]
        sums = T.alloc_global((M,), "float32")
        with T.Kernel(M) as m:
            a, total = T.alloc_fragment((1, N), "float32"), T.alloc_fragment((1,), "float32")
            T.copy(A[m, 0], a)
            T.reduce_sum(a, total, dim=1)
            sums[m] = total[0]
        with T.Kernel(M) as m:
            for j in T.Parallel(N):
                B[m, j] = A[m, j] / sums[M - 1 - m]

    array = RNG.uniform(0.5, 1, (M, N)).astype(np.float32)
    wanted = array / array.astype(np.float64).sum(1)[::-1, None]
    np.testing.assert_allclose(build(kernel, out_idx=1)(array), wanted, rtol=1e-5)


def test_data_decides_where_tiles_lie(build: Compile) -> None:
    """Rows of sequences of different lengths, one after the other, as variable-length attention reads them."""

    @T.prim_func
    def kernel(A: T.Tensor((17, 5), "float32"), at: T.Tensor((4,), "int32"), B: T.Tensor((3, 5), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(3) as b:
            start, end = at[b], at[b + 1]
            rows = T.alloc_shared((4, 5), "float32")
            total = T.alloc_fragment((5,), "float32")
            T.clear(total)
            for k in T.serial(T.ceildiv(end - start, 4)):
                T.copy(A[start + k * 4 : start + (k + 1) * 4, :], rows)
                for i in T.serial(4):
                    for j in T.Parallel(5):
                        total[j] += T.if_then_else(k * 4 + i < end - start, rows[i, j], 0.0)
            T.copy(total, B[b, 0])

    array, ends = RNG.standard_normal((17, 5)).astype(np.float32), np.array([0, 3, 12, 17], np.int32)
    wanted = [array[a:b].astype(np.float64).sum(0) for a, b in pairwise(ends)]
    np.testing.assert_allclose(build(kernel, out_idx=2)(array, ends), wanted, rtol=1e-5, atol=1e-5)


def test_elements_past_the_data_that_are_read_elsewhere_are_computed(build: Compile) -> None:
    """Row 2 of the last tile lies past the data, and every row of the product reads its column."""
    rows = T.dynamic("rows")

    @T.prim_func
    def kernel(A: T.Tensor((rows, 8), "float32"), B: T.Tensor((rows,), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(T.ceildiv(rows, 3)) as m:
            a, b = T.alloc_shared((3, 8), "float32"), T.alloc_fragment((3, 8), "float32")
            c, t = T.alloc_fragment((3, 3), "float32"), T.alloc_fragment((3,), "float32")
            T.copy(A[m * 3, 0], a)
            for i, j in T.Parallel(3, 8):
                b[i, j] = a[i, j] + 1.0
            T.gemm(a, b, c, transpose_B=True, clear=True)
            for i in T.Parallel(3):
                t[i] = c[i, 2]
            T.copy(t, B[m * 3])

    array = RNG.standard_normal((11, 8)).astype(np.float32)
    padded = np.concatenate([array, np.zeros((1, 8))]).reshape(4, 3, 8)
    wanted = np.einsum("tik,tk->ti", padded, padded[:, 2] + 1).reshape(12)[:11]
    np.testing.assert_allclose(both(build, kernel, array), wanted, rtol=1e-5, atol=1e-5)


def test_two_reductions_into_one_tile_side_by_side(build: Compile) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M,), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a, b = T.alloc_shared((M, N), "float32"), T.alloc_fragment((M, N), "float32")
            s = T.alloc_fragment((M,), "float32")
            T.copy(A, a)
            for i, j in T.Parallel(M, N):
                b[i, j] = a[i, j] * 2.0
            T.reduce_max(a, s, dim=1)
            T.reduce_max(b, s, dim=1, clear=False)
            T.copy(s, B)

    array = RNG.standard_normal((M, N)).astype(np.float32)
    np.testing.assert_array_equal(both(build, kernel, array), np.maximum(array, array * 2).max(1))


def test_both_sides_of_a_branch_may_need_what_stands_before_it(build: Compile) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(M) as m:
            a = T.alloc_fragment((1, N), "float32")
            T.copy(A[m, 0], a)
            with T.If(m % 2 == 0):
                for j in T.Parallel(N):
                    a[0, j] = a[0, j] * T.cast(m * m + 3, T.float32)
            with T.Else():
                for j in T.Parallel(N):
                    a[0, j] = a[0, j] + T.exp2(T.cast(m * 5, T.float32) * 0.125)
            T.copy(a, B[m, 0])

    array = RNG.standard_normal((M, N)).astype(np.float32)
    m = np.arange(M)[:, None]
    wanted = np.where(m % 2 == 0, array * (m * m + 3), array + np.exp2(m * 5 / 8))
    np.testing.assert_allclose(both(build, kernel, array), wanted, rtol=1e-5, atol=1e-5)


def test_exp2_over_its_whole_range(build: Compile) -> None:
    """To a few units in the last place, 0 below 2⁻¹²⁵, inf above the largest float, and every kind of NaN stays one."""
    points = np.concatenate([
        RNG.uniform(-125, 128, 4000), RNG.uniform(-1, 1, 96), np.arange(-125, 128), np.linspace(127.5, 128, 65)[:-1],
    ]).astype(np.float32)  # fmt: skip
    nans = np.array([0x7FC00000, 0x7FC00001, 0x7FFFFFFF, 0xFFC001FF, 0x7F800001], np.uint32).view(np.float32)
    edges = np.array([128, 129, 1000, np.inf, -126, -127, -1000, -np.inf, 0.0, -0.0], np.float32)
    x = np.concatenate([points, nans, edges])
    count = x.size

    @T.prim_func
    def kernel(A: T.Tensor((count,), "float32"), B: T.Tensor((count,), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            for i in T.Parallel(count):
                B[i] = T.exp2(A[i])

    y = build(kernel, out_idx=-1)(x)
    exact = np.exp2(points.astype(np.float64))
    assert np.max(np.abs(y[: points.size] - exact) / exact) < 4e-7
    assert np.isnan(y[points.size : points.size + nans.size]).all()
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(y[-edges.size :], np.exp2(edges), rtol=0, atol=2.0**-125)


def test_cells_in_tuples_comprehensions_and_with_annotations(build: Compile) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, 4), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(M) as m:
            low, high = T.alloc_var(T.float32, init=0.0), T.alloc_var(T.float32)
            first, second = (T.alloc_var(T.float32) for _ in range(2))
            count: Any = T.alloc_var(T.int32, init=0)
            high, first = 0.0, A[m, 0]
            second = first * 2.0
            while count < N:
                value = A[m, count]
                low = min(low, value)
                if value > high:
                    high = value
                count = count + 1
            for j in T.Parallel(4):
                B[m, j] = low if j == 0 else high if j == 1 else first if j == 2 else second

    array = RNG.standard_normal((M, N)).astype(np.float32)
    ends = np.minimum(array.min(1), 0), np.maximum(array.max(1), 0)
    wanted = np.stack([*ends, array[:, 0], array[:, 0] * 2], 1)
    np.testing.assert_array_equal(both(build, kernel, array), wanted)
