"""Loops inside T.Parallel, indices from the end, and statements that are made of others: against numpy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilecore
from tilecore import language as T
from tilecore.interpret import interpret
from tilecore.trace import trace_all

pytestmark = pytest.mark.cpu
M, N = 9, 20
RNG = np.random.default_rng(11)
Tensor: Any = T.Tensor
Check = Callable[..., None]


@pytest.fixture(scope="module")
def same(object_cache: Path) -> Check:
    """A kernel's last parameter, compiled and interpreted, is what numpy says."""

    def check(kernel: Any, arrays: list[np.ndarray], wanted: Any) -> None:
        compiled = tilecore.compile(kernel, out_idx=-1, cache=object_cache, threads=2)
        program = trace_all(kernel.function).programs[0]
        named = dict(zip(compiled.parameters, arrays, strict=False))
        for found in (compiled(*arrays), interpret(program, named)[compiled.parameters[-1]]):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)

    return check


def values(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def test_a_loop_inside_parallel_runs_for_every_point(same: Check) -> None:
    @T.prim_func
    def kernel(A: Tensor((M, N)), C: Tensor((M,))) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            total = T.alloc_fragment((M,), "float32")
            for i in T.Parallel(M):
                total[i] = 1.0
                for j in T.serial(N):
                    if A[i, j] > 0:
                        total[i] += A[i, j]
                    else:
                        total[i] -= 1.0
                C[i] = total[i] * 2

    a = values(M, N)
    same(kernel, [a], 2 * (1 + np.where(a > 0, a, -1).sum(1)))


def test_parallel_loops_inside_each_other_are_one(same: Check) -> None:
    @T.prim_func
    def kernel(A: Tensor((M, N)), C: Tensor((M, N))) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            for i in T.Parallel(M):
                if i < 5:
                    for j in T.Parallel(N // 4):
                        for v in T.vectorized(4):
                            C[i, j * 4 + v] = A[i, j * 4 + v] * 2
                else:
                    for j in T.unroll(N):
                        C[i, j] = A[i, j] * 3

    a = values(M, N)
    same(kernel, [a], np.where(np.arange(M)[:, None] < 5, a * 2, a * 3))


def test_a_reducer_in_loops_inside_each_other(same: Check) -> None:
    @T.prim_func
    def kernel(A: Tensor((M, N)), C: Tensor((M,))) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            total = T.alloc_reducer((M,), "float32")
            T.clear(total)
            for i in T.Parallel(M):
                for j in T.Parallel(N):
                    total[i] += A[i, j]
            T.finalize_reducer(total)
            T.copy(total, C)

    a = values(M, N)
    same(kernel, [a], a.sum(1))


def test_negative_numbers_count_from_the_end(same: Check) -> None:
    @T.prim_func
    def kernel(A: Tensor((M, N)), C: Tensor((4, 3))) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a = T.alloc_shared((4, 3), "float32")
            T.copy(A[-4:, -5:-2], a)
            a[-1, -1] = A[-1, -1]
            T.copy(a, C)

    a = values(M, N)
    wanted = a[-4:, -5:-2].copy()
    wanted[-1, -1] = a[-1, -1]
    same(kernel, [a], wanted)


def test_a_loop_that_begins_later_reads_what_came_before(same: Check) -> None:
    @T.prim_func
    def kernel(A: Tensor((N,)), C: Tensor((N,))) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a = T.alloc_shared((N,), "float32")
            T.copy(A, a)
            for k in T.serial(1, N):
                a[k] += a[k - 1] * 0.5
            for k in T.serial(2, N, 3):
                a[k - 2] = a[k]
            T.copy(a, C)

    a = values(N)
    wanted = a.copy()
    for k in range(1, N):
        wanted[k] += wanted[k - 1] * np.float32(0.5)
    for k in range(2, N, 3):
        wanted[k - 2] = wanted[k]
    same(kernel, [a], wanted)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dim", [0, -1])
def test_running_maxima(same: Check, dim: int, reverse: bool) -> None:
    @T.prim_func
    def kernel(A: Tensor((M, N)), C: Tensor((M, N))) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a, b = T.alloc_shared((M, N), "float32"), T.alloc_fragment((M, N), "float32")
            T.copy(A, a)
            T.cummax(a, b, dim=dim, reverse=reverse)
            T.copy(b, C)

    a = values(M, N)
    way = np.flip(a, dim) if reverse else a
    wanted = np.maximum.accumulate(way, dim)
    same(kernel, [a], np.flip(wanted, dim) if reverse else wanted)


def test_transpose_and_clamp(same: Check) -> None:
    @T.prim_func
    def kernel(A: Tensor((2, M, N)), C: Tensor((2, N, M))) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a, b = T.alloc_shared((2, M, N), "float32"), T.alloc_shared((2, N, M), "float32")
            T.copy(A, a)
            T.transpose(a, b)
            for n, i, j in T.Parallel(2, N, M):
                b[n, i, j] = T.if_then_else(T.isfinite(b[n, i, j]), T.clamp(b[n, i, j], -0.5, 0.75), 9.0)
            T.copy(b, C)

    a = values(2, M, N)
    a[0, 0, 0], a[1, 2, 3] = np.nan, -np.inf
    same(kernel, [a], np.where(np.isfinite(a), np.clip(a, -0.5, 0.75), 9).swapaxes(1, 2))


def test_any_and_all_of_a_tile_and_of_a_slice(same: Check) -> None:
    @T.prim_func
    def kernel(A: Tensor((6, M, N), "int32"), C: Tensor((6, 2), "int32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(6) as n:
            a = T.alloc_shared((M, N), "int32")
            T.copy(A[n, 0, 0], a)
            C[n, 1] = T.cast(T.all_of(A[n, 0:M, 0:N]), "int32")
            if T.any_of(a):
                C[n, 0] = 1
            else:
                C[n, 0] = 0

    a = (RNG.random((6, M, N)) < 0.005).astype(np.int32)
    a[0], a[1] = -7, 0
    same(kernel, [a], np.stack([a.any((1, 2)), a.all((1, 2))], 1))


def test_atomic_updates_of_neighbours(same: Check) -> None:
    @T.prim_func
    def kernel(A: Tensor((16, 8)), C: Tensor((8,))) -> None:  # type: ignore[valid-type]
        with T.Kernel(16) as n:
            for i in T.Parallel(4):
                T.atomic_addx2(C[i * 2], A[n, i * 2])
            for i in T.Parallel(2):
                T.atomic_addx4(C[i * 4], A[n, i * 4])

    a = values(16, 8)
    same(kernel, [a], 2 * a.sum(0))


def test_persistent_tasks_do_all_tiles(same: Check) -> None:
    @T.prim_func
    def kernel(A: Tensor((33, 50)), C: Tensor((33, 50))) -> None:  # type: ignore[valid-type]
        with T.Kernel(3):
            task = T.get_block_binding()
            T.assume(task < 3)
            a = T.alloc_shared((8, 16), "float32")
            for x, y in T.Persistent([T.ceildiv(33, 8), T.ceildiv(50, 16)], 3, task):
                T.copy(A[x * 8, y * 16], a)
                for i, j in T.Parallel(8, 16):
                    a[i, j] *= 2
                T.copy(a, C[x * 8, y * 16])

    a = values(33, 50)
    same(kernel, [a], a * 2)


def test_types_of_other_libraries_and_numbers_of_numpy(same: Check) -> None:
    two: Any = np.float32(2)

    @T.prim_func
    def kernel(A: Tensor((N,), np.float32), C: Tensor((N,), np.dtype("float32"))) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            for i in T.Parallel(N):
                C[i] = two * T.cast(A[i], T.dtype("float32")) - np.float64(1)

    a = values(N)
    same(kernel, [a], a * 2 - 1)


def test_parts_are_filled(same: Check) -> None:
    @T.prim_func
    def kernel(A: Tensor((8, 8)), C: Tensor((8, 9))) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a = T.alloc_shared((8, 8), "float32")
            T.copy(A, a)
            T.fill(a[2:4, 1:3], 7.0)
            T.clear(a[0, 0])
            T.clear(a[-1, :])
            T.copy(a, C[0:8, 0:8])
            T.fill(C[0:7, 8], 3)
            T.clear(C[7, 8])

    a = values(8, 8)
    wanted = np.concatenate([a, np.full((8, 1), 3)], 1)
    wanted[2:4, 1:3] = 7
    wanted[0, 0] = wanted[-1] = 0
    same(kernel, [a], wanted)


def test_slices_where_only_the_run_says_are_kept_inside_their_tile(same: Check) -> None:
    @T.prim_func
    def kernel(A: Tensor((M, N)), L: Tensor((2,), "int32"), C: Tensor((2, M, 5))) -> None:  # type: ignore[valid-type]
        with T.Kernel(2) as n:
            a, kept = T.alloc_fragment((M,), "float32"), T.alloc_shared((M, 4), "float32")
            T.fill(kept, -1)
            for k in T.serial(L[n]):
                T.copy(A[0:M, k], a)
                T.copy(a, kept[:, k])
            T.copy(kept, C[n, 0:M, 0:4])
            T.copy(kept[:, L[n] - 1], a)
            T.copy(a, C[n, 0:M, 4])

    a = values(M, N)
    wanted = np.full((2, M, 5), -1, np.float32)
    wanted[0, :, :3], wanted[1, :, :4] = a[:, :3], a[:, :4]
    wanted[0, :, 4], wanted[1, :, 4] = a[:, 2], 0
    same(kernel, [a, np.array([3, 9], np.int32)], wanted)


def test_a_kernel_without_results_builds(object_cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def kernel(A: Tensor((3,))) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            T.print(A[1])

    tilecore.compile(kernel, cache=object_cache)(np.arange(3, dtype=np.float32))
    assert "1" in capfd.readouterr().out


def test_no_memory_for_tiles_is_said(object_cache: Path) -> None:
    def kernel(C: Tensor((1,))) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a = T.alloc_shared((1 << 22, 1 << 24), "float32")  # more than an address can be, whatever is overcommitted
            T.clear(a)
            C[0] = a[0, 0]

    with pytest.raises(tilecore.KernelError, match=r"no memory for the \d+ bytes of its tiles"):
        tilecore.compile(kernel, out_idx=0, cache=object_cache)()


def test_a_condition_inside_parallel_is_what_it_was_where_the_if_stands(same: Check) -> None:
    """Its branches write what it has read: a tile by its own sign, three ways, and turn by turn."""

    @T.prim_func
    def kernel(A: Tensor((M, N)), C: Tensor((M, N))) -> None:  # type: ignore[valid-type]
        with T.Kernel(T.ceildiv(M, 4)) as m:
            a = T.alloc_shared((4, N), "float32")
            T.copy(A[m * 4, 0], a)
            for i, j in T.Parallel(4, N):
                if a[i, j] < 0:
                    a[i, j] = -2 * a[i, j]
                elif a[i, j] < 0.5:
                    a[i, j] = 7.0
                else:
                    a[i, j] = a[i, j] - 1
                    a[i, j] = a[i, j] * 3
                if a[i, j] > 0:
                    for _ in T.serial(3):
                        a[i, j] = a[i, j] - 0.4
                        if a[i, j] < 0:
                            a[i, j] = a[i, j] * 0.5
                        else:
                            a[i, j] = a[i, j] + 0.1
            T.copy(a, C[m * 4, 0])

    a = values(M, N)
    wanted = np.select([a < 0, a < 0.5], [-2 * a, np.full_like(a, 7)], 3 * (a - 1)).astype(np.float64)
    turned = wanted.copy()
    for _ in range(3):
        turned = np.where(turned - 0.4 < 0, (turned - 0.4) * 0.5, turned - 0.3)
    same(kernel, [a], np.where(wanted > 0, turned, wanted))


def test_the_folder_of_a_cache_may_be_a_text(object_cache: Path) -> None:
    def kernel(A: Tensor((4,)), C: Tensor((4,))) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            for i in T.Parallel(4):
                C[i] = A[i]

    a = values(4)
    np.testing.assert_array_equal(tilecore.compile(kernel, out_idx=1, cache=str(object_cache))(a), a)
