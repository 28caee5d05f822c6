"""The interpreter: bounds, poison, loops, casts and what it refuses to run."""

from typing import Any

import numpy as np
import pytest
from kernel_texts import program_of

from tilecore import language as T
from tilecore.interpret import interpret
from tilecore.language import Handle

RNG = np.random.default_rng(7)


def test_loads_outside_of_a_source_are_zero_and_stores_outside_are_dropped() -> None:
    def kernel(D: Handle, F: Handle) -> None:
        with T.Kernel(T.ceildiv(D.shape[0], 4)) as m:
            s = T.alloc_shared((4, 8), T.float32)
            total = T.alloc_fragment((8,), T.float32)
            T.copy(D[m * 4, 2], s)
            T.reduce_sum(s, total, dim=0)
            for i, j in T.Parallel(4, 8):
                F[m * 4 + i, j] = total[j] + s[i, j]

    array = RNG.standard_normal((6, 8)).astype(np.float32)
    padded = np.zeros((8, 10))
    padded[:6, :8] = array
    shifted = padded[:, 2:].reshape(2, 4, 8)
    want = (shifted + shifted.sum(axis=1, keepdims=True)).reshape(8, 8)[:6]
    np.testing.assert_allclose(interpret(program_of(kernel), {"D": array})["F"], want, rtol=1e-14)


def test_elements_that_nothing_wrote_show() -> None:
    def kernel(C: Handle, I: Handle) -> None:  # noqa: E741
        with T.Kernel(4) as m:
            s = T.alloc_fragment((8,), T.float32)
            n = T.alloc_fragment((8,), T.int64)
            for j in T.Parallel(4):
                s[j] = 1.0
                n[j] = 1
            for j in T.Parallel(8):
                C[m, j] = s[j]
            I[m] = n[4]

    out = interpret(program_of(kernel), {})
    assert np.isnan(out["C"][:, 4:]).all()
    assert (out["C"][:4, :4] == 1).all()
    assert np.isnan(out["C"][4:]).all()
    assert (out["I"] == np.iinfo(np.int64).min).all()


def test_gemm_transposed_each_way() -> None:
    def kernel(A: Handle, B: Handle, C: Handle, transpose_a: bool = False, transpose_b: bool = False) -> None:
        with T.Kernel(1) as m:
            a = T.alloc_shared((8, 8), T.float32)
            b = T.alloc_shared((8, 8), T.float32)
            c = T.alloc_fragment((8, 8), T.float32)
            T.copy(A, a)
            T.copy(B, b)
            T.fill(c, 1.0)
            T.gemm(a, b, c, transpose_A=bool(transpose_a), transpose_B=bool(transpose_b))
            T.gemm(a, b, c)
            T.copy(c, C[m * 8, 0])

    a, b = (RNG.standard_normal((8, 8)).astype(np.float32) for _ in range(2))
    for left in (0, 1):
        for right in (0, 1):
            got = interpret(program_of(kernel, transpose_a=left, transpose_b=right), {"A": a, "B": b})["C"]
            wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
            turned = (wide_a.T if left else wide_a) @ (wide_b.T if right else wide_b)
            np.testing.assert_allclose(got, 1 + turned + wide_a @ wide_b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "function"), [("sum", np.sum), ("max", np.max), ("min", np.min), ("prod", np.prod)])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_reductions_cleared_and_joined(name: str, function: Any, dim: int) -> None:
    reduction = {"sum": T.reduce_sum, "max": T.reduce_max, "min": T.reduce_min, "prod": T.reduce_prod}[name]

    def kernel(A: Handle, C: Handle) -> None:
        with T.Kernel(2) as m:
            a = T.alloc_shared((8, 8), T.float32)
            t = T.alloc_fragment((8,), T.float32)
            T.copy(A, a)
            T.fill(t, 0.5)
            with T.If(m == 0):
                reduction(a, t, dim=dim)
            with T.Else():
                reduction(a, t, dim=dim, clear=False)
            T.copy(t, C[m, 0])

    a = RNG.standard_normal((8, 8)).astype(np.float32)
    got = interpret(program_of(kernel), {"A": a})["C"]
    plain = function(a.astype(np.float64), axis=dim)
    np.testing.assert_allclose(got[0], plain, rtol=1e-12)
    np.testing.assert_allclose(got[1], function(np.stack([plain, np.full(8, 0.5)]), axis=0), rtol=1e-12)


def test_nan_survives_maximum_and_minimum() -> None:
    def kernel(A: Handle, C: Handle) -> None:
        with T.Kernel(1) as m:
            a = T.alloc_shared((8, 8), T.float32)
            t = T.alloc_fragment((8,), T.float32)
            T.copy(A, a)
            T.reduce_max(a, t, dim=1)
            for j in T.Parallel(8):
                C[m, j] = T.min(t[j], 0.0)

    a = RNG.standard_normal((8, 8)).astype(np.float32)
    a[3, 5] = np.nan
    got = interpret(program_of(kernel), {"A": a})["C"][0]
    assert list(np.flatnonzero(np.isnan(got))) == [3]


def test_loops_run_in_order_from_their_start() -> None:
    def kernel(C: Handle) -> None:
        with T.Kernel(8) as m:
            s = T.alloc_fragment((1,), T.float32)
            T.clear(s)
            for n in T.serial(2, m):
                s[0] = s[0] * 10.0 + T.cast(n, T.float32)
            C[m, 0] = s[0]

    got = interpret(program_of(kernel), {})["C"][:, 0]
    np.testing.assert_array_equal(got, [0, 0, 0, 2, 23, 234, 2345, 23456])


def test_narrow_runs_round_to_the_tile_s_type() -> None:
    def kernel(A: Handle, C: Handle) -> None:
        with T.Kernel(8) as m:
            h = T.alloc_fragment((8,), T.float16)
            T.copy(A[m, 0], h)
            for j in T.Parallel(8):
                C[m, j] = h[j] * 3.0

    a = RNG.standard_normal((8, 8)).astype(np.float32)
    got = interpret(program_of(kernel), {"A": a}, wide=False)["C"]
    np.testing.assert_array_equal(got, (a.astype(np.float16) * np.float16(3)).astype(np.float32))


def test_gathers_read_where_an_index_tensor_says() -> None:
    def kernel(A: Handle, I: Handle, C: Handle) -> None:  # noqa: E741
        with T.Kernel(8) as m:
            for j in T.Parallel(8):
                C[m, j] = A[I[m], j]

    a = RNG.standard_normal((8, 8)).astype(np.float32)
    index = np.array([7, 0, 3, 3, 8, -1, 2, 1])
    want = np.where(((index >= 0) & (index < 8))[:, None], a[np.clip(index, 0, 7)], 0)
    np.testing.assert_array_equal(interpret(program_of(kernel), {"A": a, "I": index})["C"], want)


def test_what_it_does_not_run() -> None:
    def kernel(A: Handle, D: Handle, F: Handle, block: Any = T.auto) -> None:
        with T.Kernel(T.ceildiv(8, block)) as m:
            s = T.alloc_shared((block, 8), T.float32)
            T.copy(A[m * block, 0], s)
            for i, j in T.Parallel(block, 8):
                F[m * block + i, j] = s[i, j] + D[0, j]

    array = np.zeros((8, 8), np.float32)
    with pytest.raises(ValueError, match="kernel has tunables block: trace it with extents"):
        interpret(program_of(kernel), {"A": array, "D": array})
    program = program_of(kernel, block=4)
    with pytest.raises(ValueError, match="no array for the input D"):
        interpret(program, {"A": array})
    with pytest.raises(ValueError, match=r"A: f32\[8, 8\] is given with shape \(64,\)"):
        interpret(program, {"A": array.reshape(-1), "D": array})
    with pytest.raises(ValueError, match=r"A: f32\[8, 8\] should be \(8, 8\) here, and is \(4, 16\)"):
        interpret(program, {"A": array.reshape(4, 16), "D": array})
