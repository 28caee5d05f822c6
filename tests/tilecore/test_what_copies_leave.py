"""What a copy leaves in a tile counts: zeros behind the data, and what the last turn of a loop, or a cell, brought."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilecore
from tilecore import language as T

pytestmark = pytest.mark.cpu
RNG = np.random.default_rng(23)
Tensor: Any = T.Tensor
Call = Callable[..., Any]
DATA = RNG.standard_normal((36, 16)).astype(np.float32)
PADDED = np.concatenate([DATA, np.zeros((4, 16), np.float32)]).reshape(5, 8, 16)
ORDER = np.array([4, 0, 3, 2, 1], np.int32)
WEIGHT = RNG.standard_normal((16, 96)).astype(np.float32)


@pytest.fixture(scope="module")
def call(object_cache: Path) -> Call:
    return lambda kernel, *arrays: tilecore.compile(kernel, out_idx=-1, cache=object_cache, threads=1)(*arrays)


@pytest.mark.parametrize("by_element", [False, True])
@pytest.mark.parametrize("by_data", [False, True])
def test_zeros_behind_the_data_are_stored_where_the_result_has_room(
    call: Call, by_data: bool, by_element: bool
) -> None:
    def kernel(A: Tensor((36, 16)), order: Tensor((5,), "int32"), C: Tensor((5, 8, 16))) -> None:  # type: ignore[valid-type]
        with T.Kernel(5) as n:
            a = T.alloc_shared((8, 16), "float32")
            start = order[n] * 8 if by_data else n * 8
            T.copy(A[start : start + 8, 0:16], a)
            if by_element:
                for i, j in T.Parallel(8, 16):
                    C[n, i, j] = a[i, j] + 1
            else:
                T.copy(a, C[n, 0:8, :])

    np.testing.assert_array_equal(call(kernel, DATA, ORDER), PADDED[ORDER if by_data else slice(None)] + by_element)


def test_a_strided_result_and_a_product_have_every_row(call: Call) -> None:
    def strided(A: Tensor((36,)), C: Tensor((80,))) -> None:  # type: ignore[valid-type]
        with T.Kernel(5) as n:
            for i in T.Parallel(8):
                C[n * 16 + 2 * i] = A[n * 8 + i]
                C[n * 16 + 2 * i + 1] = A[n * 8 + i] + 1

    def product(A: Tensor((36, 16)), B: Tensor((16, 96)), C: Tensor((5, 8, 96))) -> None:  # type: ignore[valid-type]
        with T.Kernel(5) as n:
            a, b = T.alloc_shared((8, 16), "float32"), T.alloc_shared((16, 96), "float32")
            c = T.alloc_fragment((8, 96), "float32")
            T.copy(A[n * 8, 0], a)
            T.copy(B, b)
            T.gemm(a, b, c, clear_accum=True)
            T.copy(c, C[n, 0:8, :])

    column = PADDED.reshape(40, 16)[:, 0]
    wanted = np.stack([column, column + 1], 1).reshape(80)
    np.testing.assert_array_equal(call(strided, np.ascontiguousarray(DATA[:, 0])), wanted)
    np.testing.assert_allclose(call(product, DATA, WEIGHT), PADDED @ WEIGHT, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("right", [False, True])
def test_an_operand_that_begins_where_a_cell_said(call: Call, right: bool) -> None:
    rows = 16 if right else 8

    def kernel(A: Tensor((36, 16)), B: Tensor((96, 16)), order: Tensor((5,), "int32"), C: Tensor((5, 8, 16))) -> None:  # type: ignore[valid-type]
        with T.Kernel(5) as n:
            at = T.alloc_local((1,), "int32")
            a, b = T.alloc_shared((8, 16), "float32"), T.alloc_shared((16, 16), "float32")
            c = T.alloc_fragment((8, 16), "float32")
            at[0] = order[n]
            T.copy(A[0 if right else at[0] * rows, 0], a)
            T.copy(B[at[0] * rows if right else 0, 0], b)
            at[0] = 100
            T.gemm(a, b, c, clear_accum=True)
            T.copy(c, C[n, 0:8, :])

    turned = np.ascontiguousarray(WEIGHT.T)
    found = call(kernel, DATA, turned, ORDER)
    wanted = PADDED[0] @ turned.reshape(6, 16, 16)[ORDER] if right else PADDED[ORDER] @ turned[:16]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_an_operand_is_what_the_last_turn_of_a_loop_brought(call: Call) -> None:
    def left(A: Tensor((36, 16)), B: Tensor((16, 96)), C: Tensor((8, 96))) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a, b = T.alloc_shared((8, 16), "float32"), T.alloc_shared((16, 96), "float32")
            c = T.alloc_fragment((8, 96), "float32")
            T.copy(B, b)
            for k in T.serial(4):
                T.copy(A[k * 8, 0], a)
            T.gemm(a, b, c, clear_accum=True)
            T.copy(c, C)

    def right(A: Tensor((36, 16)), B: Tensor((16, 96)), C: Tensor((36, 24))) -> None:  # type: ignore[valid-type]
        with T.Kernel(5, 1) as (n, _):
            a, b = T.alloc_shared((8, 16), "float32"), T.alloc_shared((16, 24), "float32")
            c = T.alloc_fragment((8, 24), "float32")
            T.copy(A[n * 8, 0], a)
            for k in T.serial(4):
                T.copy(B[0, k * 24], b)
            T.gemm(a, b, c, clear_accum=True)
            T.copy(c, C[n * 8, 0])

    np.testing.assert_allclose(call(left, DATA, WEIGHT), DATA[24:32] @ WEIGHT, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(call(right, DATA, WEIGHT), DATA @ WEIGHT[:, 72:], rtol=1e-4, atol=1e-4)


def test_a_tile_read_inside_a_loop_and_after_it(call: Call) -> None:
    def kernel(B: Tensor((16, 96)), C: Tensor((4, 8, 24))) -> None:  # type: ignore[valid-type]
        with T.Kernel(4, 1) as (n, _):
            b, c = T.alloc_shared((8, 24), "float32"), T.alloc_fragment((8, 24), "float32")
            T.clear(c)
            for k in T.serial(4):
                T.copy(B[0, k * 24], b)
                for i, j in T.Parallel(8, 24):
                    c[i, j] += b[i, j]
            for i, j in T.Parallel(8, 24):
                C[n, i, j] = c[i, j] + b[i, j]

    parts = WEIGHT[:8].reshape(8, 4, 24)
    wanted = np.broadcast_to(parts.sum(1) + parts[:, 3], (4, 8, 24))
    np.testing.assert_allclose(call(kernel, WEIGHT), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 9])
def test_a_grid_of_no_tasks_writes_nothing(call: Call, rows: int) -> None:
    def kernel(A: Tensor((rows, 5)), C: Tensor((rows, 5))) -> None:  # type: ignore[valid-type]
        with T.Kernel(T.ceildiv(rows, 4), 2) as (m, n):
            a = T.alloc_shared((4, 3), "float32")
            T.copy(A[m * 4, n * 3], a)
            T.copy(a, C[m * 4, n * 3])

    a = RNG.standard_normal((rows, 5)).astype(np.float32)
    np.testing.assert_array_equal(call(kernel, a), a)
