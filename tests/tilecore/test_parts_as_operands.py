"""Slices, operands and tiles seen otherwise, where statements work on whole tiles; and names that TileLang has."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilecore
from tilecore import TileError
from tilecore import language as T
from tilecore.jitted import JitKernel

pytestmark = pytest.mark.cpu
S, M, N = 3, 12, 21
RNG = np.random.default_rng(17)
X = RNG.standard_normal((S, M, N)).astype(np.float32)
WIDE = X.astype(np.float64)


@pytest.fixture(scope="module")
def build(object_cache: Path) -> Callable[..., JitKernel]:
    return partial(tilecore.compile, cache=object_cache, threads=1)


def near(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * max(1.0, float(np.abs(wanted).max())))


def test_products_of_slices(build: Any) -> None:
    """As in a ring of stages that a kernel turns by hand; the result is a slice, too."""

    @T.prim_func
    def kernel(A: T.Tensor((S, M, N), "float32"), B: T.Tensor((S, M, M), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a, b = T.alloc_shared((S, M, N), "float32"), T.alloc_fragment((S, M, M), "float32")
            T.copy(A, a)
            T.clear(b)
            for s in T.Pipelined(S):
                for _turn in T.serial(2):
                    T.gemm(a[s, :, :], a[S - 1 - s, :, :], b[s, :, :], transpose_B=True)
            T.copy(b, B)

    near(build(kernel, out_idx=1)(X), np.stack([2 * WIDE[s] @ WIDE[S - 1 - s].T for s in range(S)]))


def test_running_and_reduced_slices(build: Any) -> None:
    @T.prim_func
    def kernel(
        A: T.Tensor((S, M, N), "float32"),  # type: ignore[valid-type]
        B: T.Tensor((S, M, N), "float32"),  # type: ignore[valid-type]
        C: T.Tensor((M,), "float32"),  # type: ignore[valid-type]
        D: T.Tensor((N, M), "float32"),  # type: ignore[valid-type]
    ) -> None:
        with T.Kernel(1) as _:
            a = T.alloc_shared((S, M, N), "float32")
            T.copy(A, a)
            T.cumsum(a[1, :, :], dim=1)
            T.cumsum(a[0, 2:9, 3:10], a[2, 2:9, 3:10], dim=0, reverse=True)
            T.cummax(a[0, :, :], dim=0)
            T.copy(a, B)
            T.reduce_sum(A[2, :, :], C, dim=1)
            T.transpose(A[1, :, :], D)

    b, c, d = build(kernel, out_idx=[1, 2, 3])(X)
    wanted = WIDE.copy()
    wanted[1] = WIDE[1].cumsum(1)
    wanted[2, 2:9, 3:10] = WIDE[0, 2:9, 3:10][::-1].cumsum(0)[::-1]
    wanted[0] = np.maximum.accumulate(WIDE[0], 0)
    near(b, wanted)
    near(c, WIDE[2].sum(1))
    np.testing.assert_array_equal(d, X[1].T)


def test_a_tile_seen_otherwise_is_written(build: Any) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((S, M, N), "float32"), B: T.Tensor((S, M, N), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a = T.alloc_shared((S, M, N), "float32")
            T.copy(A, a)
            T.cumsum(T.reshape(a, (S * M, N)), dim=0)
            T.copy(a, B)

    near(build(kernel, out_idx=1)(X), WIDE.reshape(S * M, N).cumsum(0).reshape(S, M, N))


@pytest.mark.parametrize("down", [1, -1, 3])
@pytest.mark.parametrize("from_data", [False, True])
def test_parts_of_one_tile_over_each_other(build: Any, down: int, from_data: bool) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), P: T.Tensor((1,), "int32"), B: T.Tensor((M, N), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a = T.alloc_shared((M, N), "float32")
            T.copy(A, a)
            start = T.max(down, 0) if not from_data else P[0]
            T.copy(a[start - down : start - down + M - 3, :], a[start : start + M - 3, 0:N])
            T.copy(a, B)

    start, wanted = max(down, 0), X[0].copy()
    wanted[start : start + M - 3] = X[0][start - down : start - down + M - 3]
    np.testing.assert_array_equal(build(kernel, out_idx=2)(X[0], np.array([start], np.int32)), wanted)


def test_a_tile_that_is_operand_and_result(build: Any) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((M, M), "float32"), B: T.Tensor((M, M), "float32"), C: T.Tensor((M, M), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a, b = T.alloc_fragment((M, M), "float32"), T.alloc_fragment((M, M), "float32")
            T.copy(A, a)
            T.copy(A, b)
            T.gemm(a, b, a)
            T.transpose(b, b)
            T.copy(a, B)
            T.copy(b, C)

    square = X[0, :, :M].copy()
    b, c = build(kernel, out_idx=[1, 2])(square)
    near(b, square.astype(np.float64) @ square + square)
    np.testing.assert_array_equal(c, square.T)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("clear", [False, True])
def test_products_that_round_to_16_bits(build: Any, kind: str, clear: bool) -> None:
    """Each product is summed in f32 and rounded once."""
    element: Any = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[kind]

    @T.prim_func
    def kernel(A: T.Tensor((M, 40), kind), B: T.Tensor((40, N), kind), C: T.Tensor((M, N), kind)) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a, b, c = T.alloc_shared((M, 20), kind), T.alloc_shared((20, N), kind), T.alloc_fragment((M, N), kind)
            T.fill(c, 3)
            for k in T.Pipelined(2):
                T.copy(A[0, k * 20], a)
                T.copy(B[k * 20, 0], b)
                T.gemm(a, b, c, clear_accum=clear)
            T.copy(c, C)

    a, b = (RNG.integers(-9, 10, shape).astype(element) for shape in ((M, 40), (40, N)))
    wanted = np.full((M, N), 3, element)
    for k in (0, 20):
        product = a[:, k : k + 20].astype(np.float64) @ b[k : k + 20].astype(np.float64)
        wanted = (product + (0 if clear else wanted.astype(np.float64))).astype(element)
    found = build(kernel, out_idx=2)(a, b)
    np.testing.assert_array_equal(found.astype(np.float64), wanted.astype(np.float64))


@pytest.mark.parametrize(
    ("left", "right", "total"),
    [("int8", "uint8", "int32"), ("int16", "int8", "int32"), ("float16", "float32", "float32"),
     ("float32", "bfloat16", "float32"), ("float64", "float32", "float64")],
)  # fmt: skip
def test_operands_of_two_types(build: Any, left: str, right: str, total: str) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((M, 17), left), B: T.Tensor((17, N), right), C: T.Tensor((M, N), total)) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a, b, c = T.alloc_shared((M, 17), left), T.alloc_shared((17, N), right), T.alloc_fragment((M, N), total)
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, clear_accum=True)
            T.copy(c, C)

    def drawn(kind: str, *shape: int) -> np.ndarray:
        low, high = {"int8": (-128, 128), "uint8": (0, 256)}.get(kind, (-99, 100))
        return RNG.integers(low, high, shape).astype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)

    a, b = drawn(left, M, 17), drawn(right, 17, N)
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_array_equal(build(kernel, out_idx=2)(a, b), wanted)


def test_outputs_as_results(build: Any) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32"), C: T.Tensor((N,), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(threads=128):
            T.fill(B, 2.0)
            T.reduce_max(A, C, dim=0)

    b, c = build(kernel, out_idx=[1, 2])(X[0])
    np.testing.assert_array_equal(b, 2.0)
    np.testing.assert_array_equal(c, X[0].max(0))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("kind", "oracle"),
    [("max", np.any), ("min", np.all), ("bitor", np.any), ("bitand", np.all), ("bitxor", np.logical_xor.reduce)],
)
def test_reductions_of_bools(build: Any, kind: str, oracle: Any, axis: int) -> None:
    """Vectors run over either axis; the C compiler has no maximum of bools."""
    kept = (M, N)[1 - axis]

    @T.prim_func
    def kernel(A: T.Tensor((M, N), "bool"), B: T.Tensor((kept,), "bool"), C: T.Tensor((M, N), "bool")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a, b = T.alloc_fragment((M, N), "bool"), T.alloc_fragment((kept,), "bool")
            T.copy(A, a)
            T.reduce(a, b, kind, dim=axis)
            T.copy(b, B)
            T.cummax(a, dim=axis)
            T.copy(a, C)

    x = RNG.random((M, N)) < 0.2 if kind != "min" else RNG.random((M, N)) < 0.9
    x[:, 0], x[0] = True, True
    b, c = build(kernel, out_idx=[1, 2])(x)
    np.testing.assert_array_equal(b, oracle(x, axis=axis))
    np.testing.assert_array_equal(c, np.logical_or.accumulate(x, axis))


def test_sums_of_bools_are_refused_with_what_to_write() -> None:
    @T.prim_func
    def kernel(A: T.Tensor((M, N), "bool"), B: T.Tensor((M,), "bool")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a, b = T.alloc_fragment((M, N), "bool"), T.alloc_fragment((M,), "bool")
            T.copy(A, a)
            T.reduce_sum(a, b, dim=1)
            T.copy(b, B)

    with pytest.raises(TileError, match=r"T\.reduce_sum of bool") as caught:
        tilecore.compile(kernel, out_idx=1)
    assert "T.cast of its elements to a tile of int32 for a count" in str(caught.value)
    assert "^^^^^^^^^^^^^^^^^^^^^^^^^" in str(caught.value)


def test_numbers_that_are_none_may_count_for_nothing(build: Any) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M,), "float32"), C: T.Tensor((M,), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            T.reduce_min(A, B, dim=1, nan_propagate=False)
            T.reduce_absmax(A, C, dim=1, nan_propagate=False, batch=1)

    x = X[0].copy()
    x[0, 3], x[1] = np.nan, np.nan
    b, c = build(kernel, out_idx=[1, 2])(x)
    np.testing.assert_array_equal(b, np.fmin.reduce(x, 1, initial=np.inf))
    np.testing.assert_array_equal(c, np.fmax.reduce(np.abs(x), 1, initial=0))


def test_names_and_forms_of_tilelang(build: Any) -> None:
    rows, columns = T.dynamic("rows columns")
    count = T.dyn["count"]

    @T.prim_func
    def kernel(
        A: T.Tensor((rows, columns), "float32"),  # type: ignore[valid-type]
        V: T.Tensor((count,), "float32"),  # type: ignore[valid-type]
        B: T.Tensor((rows, columns), "float32"),  # type: ignore[valid-type]
        C: T.Tensor((count,), "bool"),  # type: ignore[valid-type]
        D: T.Tensor((rows,), "float32"),  # type: ignore[valid-type]
    ) -> None:
        with T.Kernel(rows) as (m,):
            for (j,) in T.Parallel(columns):
                B[m, j] = T.clamp(A[m, j], min_val=-1.0, max_val=1.0) + T.__exp(A[m, j])  # type: ignore[attr-defined]
            total = T.alloc_var("float32", init=0.0)
            for i, j in T.grid(2, columns):
                total = total + A[m, j] * (i + 1)
            D[m] = total
            if m == 0:
                for k in T.serial(count):
                    C[k] = T.any_of(V[k] > 1.0, T.all_of(V[k] < 0.0, V[k] > -0.5))

    v = X[1, 0]
    b, c, d = build(kernel, out_idx=[2, 3, 4])(X[0], v)
    near(b, np.clip(WIDE[0], -1, 1) + np.exp(WIDE[0]))
    np.testing.assert_array_equal(c, (v > 1) | ((v < 0) & (v > -0.5)))
    near(d, 3 * WIDE[0].sum(1))
