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


@pytest.mark.parametrize("rows", [1, 5, 7, 12])
def test_a_slice_that_begins_elsewhere_brings_the_zeros_behind_the_data(call: Call, rows: int) -> None:
    count = T.dynamic("rows")

    def up(X: Tensor((count, 16)), Y: Tensor((count, 16))) -> None:  # type: ignore[valid-type]
        with T.Kernel(T.ceildiv(count, 5)) as m:
            a, b = T.alloc_shared((5, 16), "float32"), T.alloc_fragment((5, 16), "float32")
            T.copy(X[m * 5, 0], a)
            T.copy(a, b)
            T.copy(a[1:5, :], b[0:4, :])
            T.copy(b, Y[m * 5, 0])

    def down(X: Tensor((count, 16)), Y: Tensor((count, 16))) -> None:  # type: ignore[valid-type]
        with T.Kernel(T.ceildiv(count, 5)) as m:
            a = T.alloc_shared((5, 16), "float32")
            T.fill(a, 0.5)
            T.copy(X[m * 5 : m * 5 + 4, :], a[1:5, :])
            T.copy(a, Y[m * 5, 0])

    data = DATA[:rows]
    tiles = np.zeros((-(-rows // 5) * 5, 16), np.float32)
    tiles[:rows] = data
    tiles = tiles.reshape(-1, 5, 16)
    raised = np.concatenate([tiles[:, 1:], tiles[:, 4:]], axis=1).reshape(-1, 16)[:rows]
    lowered = np.concatenate([np.full_like(tiles[:, :1], 0.5), tiles[:, :4]], axis=1).reshape(-1, 16)[:rows]
    np.testing.assert_array_equal(call(up, data), raised)
    np.testing.assert_array_equal(call(down, data), lowered)


@pytest.mark.parametrize("rows", [5, 7, 11])
def test_elements_that_lie_elsewhere_in_a_flat_tile_are_all_written(call: Call, rows: int) -> None:
    """Whether all of a tile is set counts what lies behind the data, which is 0 there."""
    count = T.dynamic("rows")

    def flagged(X: Tensor((count, 16)), Y: Tensor((count,))) -> None:  # type: ignore[valid-type]
        with T.Kernel(T.ceildiv(count, 5)) as m:
            a, flags = T.alloc_shared((5, 16), "float32"), T.alloc_fragment((5, 16), "bool")
            T.copy(X[m * 5, 0], a)
            for i, j in T.Parallel(5, 16):
                flags[i, j] = a[i, j] != 0
            whole = T.all_of(flags)
            for i in T.Parallel(5):
                Y[m * 5 + i] = T.if_then_else(whole, 1.0, 0.0)

    def flat(X: Tensor((count, 16)), Y: Tensor((count,))) -> None:  # type: ignore[valid-type]
        with T.Kernel(T.ceildiv(count, 5)) as m:
            line, least = T.alloc_fragment((1, 80), "float32"), T.alloc_fragment((1,), "float32")
            for i, j in T.Parallel(5, 16):
                line[0, 16 * i + j] = X[m * 5 + i, j]
            T.reduce_min(line, least, dim=1)
            for i in T.Parallel(5):
                Y[m * 5 + i] = least[0]

    data = np.abs(DATA[:rows]) + 1
    last = [1.0 if rows % 5 == 0 else 0.0] * (rows % 5 or 5)
    np.testing.assert_array_equal(call(flagged, data), [1.0] * (rows - len(last)) + last)
    tiles = np.zeros((-(-rows // 5) * 5, 16), np.float32)
    tiles[:rows] = data
    np.testing.assert_array_equal(call(flat, data), tiles.reshape(-1, 80).min(1).repeat(5)[:rows])


@pytest.mark.parametrize("columns", [3, 4, 7])
def test_a_row_alone_behind_the_data_is_zero(call: Call, columns: int) -> None:
    """Rows of a right operand that is one row, packed for the product: there are fewer of them than columns."""

    def kernel(A: Tensor((5, 24), "int8"), B: Tensor((3, 24), "int8"), C: Tensor((5, columns), "int32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(columns) as n:
            a, b = T.alloc_shared((5, 24), "int8"), T.alloc_shared((1, 24), "int8")
            c = T.alloc_fragment((5, 1), "int32")
            T.copy(A, a)
            for i, j in T.Parallel(1, 24):
                b[i, j] = B[n + i, j]
            T.gemm(a, b, c, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(5, 1):
                C[i, n + j] = c[i, j]

    a, b = (RNG.integers(-9, 9, (rows, 24)).astype(np.int8) for rows in (5, 3))
    padded = np.concatenate([b, np.zeros((4, 24), np.int8)])[:columns]
    np.testing.assert_array_equal(call(kernel, a, b), a.astype(np.int64) @ padded.T)


@pytest.mark.parametrize("product", [False, True])
def test_a_wider_array_counts_where_a_narrower_one_beside_it_has_ended(call: Call, product: bool) -> None:
    def kernel(A: Tensor((6, 19)), B: Tensor((6, 32)), C: Tensor((6, 19)), D: Tensor((6, 6))) -> None:  # type: ignore[valid-type]
        with T.Kernel(2) as m:
            a, b = T.alloc_shared((3, 24), "float32"), T.alloc_shared((3, 24), "float32")
            c, total = T.alloc_fragment((3, 6), "float32"), T.alloc_fragment((3,), "float32")
            T.copy(A[m * 3, 0], a)
            T.copy(B[m * 3, 0], b)
            for i, j in T.Parallel(3, 24):
                C[m * 3 + i, j] = a[i, j] + b[i, j]
            if product:
                other = T.alloc_shared((6, 24), "float32")
                T.copy(B[0, 0], other)
                T.gemm(b, other, c, transpose_B=True, clear_accum=True)
            else:
                T.reduce_sum(b, total, dim=1)
                for i, j in T.Parallel(3, 6):
                    c[i, j] = total[i]
            T.copy(c, D[m * 3, 0])

    a, b = (RNG.standard_normal((6, columns)).astype(np.float32) for columns in (19, 32))
    live = b[:, :24].astype(np.float64)
    wanted = live @ live.T if product else live.sum(1, keepdims=True) + np.zeros((6, 6))
    np.testing.assert_allclose(call(kernel, a, b, np.zeros_like(a)), wanted, rtol=1e-5, atol=1e-5)
