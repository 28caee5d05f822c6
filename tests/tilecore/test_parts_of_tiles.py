"""T.Parallel over a part of a tile: what lies beside the part stays what it was. Against numpy, on each target."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilecore
from tilecore import jitted
from tilecore import language as T
from tilecore.jitted import JitKernel
from tilecore.profile import detect_targets

pytestmark = pytest.mark.cpu
RNG = np.random.default_rng(5)


@pytest.fixture(params=detect_targets(), ids=lambda target: target.name)
def cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, object_cache: Path) -> Path:
    monkeypatch.setattr(jitted, "detect_target", lambda: request.param)
    return object_cache


def built(kernel: Any, cache: Path, out_idx: int | list[int] = -1) -> JitKernel:
    return tilecore.compile(kernel, out_idx=out_idx, cache=cache, threads=1)


def changing(shape: tuple[int, ...], parts: Sequence[tuple[int, ...]], dtype: str) -> Any:
    """Each of `parts`, from the first element of every axis on, doubled, and its number added."""

    @T.prim_func
    def kernel(A: T.Tensor(shape, dtype), B: T.Tensor(shape, dtype)) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            tile = T.alloc_fragment(shape, dtype)
            T.copy(A, tile)
            for number, part in enumerate(parts):
                if len(shape) == 1:
                    for i in T.Parallel(part[0]):
                        tile[i] = tile[i] * 2 + number
                else:
                    for i, j in T.Parallel(*part):
                        tile[i, j] = tile[i, j] * 2 + number
            T.copy(tile, B)

    return kernel


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((11,), [(4,)]), ((11,), [(11,), (4,)]), ((33,), [(17,), (33,), (5,)]), ((11, 16), [(11, 16), (4, 16)]),
        ((11, 16), [(4, 16), (11, 16)]), ((11, 40), [(11, 7)]), ((5, 40), [(3, 7), (5, 7), (3, 40), (5, 17)]),
    ],
)  # fmt: skip
def test_parts_one_after_the_other(
    cache: Path, shape: tuple[int, ...], parts: Sequence[tuple[int, ...]], dtype: str
) -> None:
    array = RNG.integers(-9, 9, shape).astype(dtype)
    wanted = array.astype(np.int64)
    for number, part in enumerate(parts):
        place = tuple(slice(0, size) for size in part)
        wanted[place] = wanted[place] * 2 + number
    np.testing.assert_array_equal(built(changing(shape, parts, dtype), cache)(array), wanted.astype(dtype))


def test_parts_between_reductions(cache: Path) -> None:
    """Rows of a part walk with statements of as many rows; one number of a row is stored for as many too."""

    @T.prim_func
    def kernel(
        A: T.Tensor((21, 40), "float32"),  # type: ignore[valid-type]
        B: T.Tensor((21, 40), "float32"),  # type: ignore[valid-type]
        S: T.Tensor((21,), "float32"),  # type: ignore[valid-type]
    ) -> None:
        with T.Kernel(T.ceildiv(21, 8)) as m:
            tile, sums = T.alloc_fragment((8, 40), "float32"), T.alloc_fragment((8,), "float32")
            T.copy(A[m * 8, 0], tile)
            T.reduce_sum(tile, sums, dim=1)
            for i in T.Parallel(3):
                sums[i] = T.exp(-T.abs(sums[i]))
            for i, j in T.Parallel(3, 40):
                tile[i, j] = tile[i, j] * sums[i]
            for i, j in T.Parallel(8, 9):
                tile[i, j] = tile[i, j] + sums[i]
            T.reduce_max(tile, sums, dim=1, clear=False)
            T.copy(tile, B[m * 8, 0])
            T.copy(sums, S[m * 8])

    array = RNG.standard_normal((21, 40)).astype(np.float32)
    values, totals = array.astype(np.float64), np.zeros(21)
    for first in range(0, 21, 8):
        rows = values[first : first + 8]
        sums = rows.sum(1)
        sums[:3] = np.exp(-np.abs(sums[:3]))
        rows[:3] *= sums[:3, None]
        rows[:, :9] += sums[:, None]
        totals[first : first + 8] = np.maximum(sums, rows.max(1))
    found, largest = built(kernel, cache, [1, 2])(array)
    np.testing.assert_allclose(found, values, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(largest, totals, rtol=1e-5, atol=1e-5)


def test_parts_beside_products(cache: Path) -> None:
    @T.prim_func
    def kernel(
        A: T.Tensor((11, 40), "float32"),  # type: ignore[valid-type]
        B: T.Tensor((40, 20), "float32"),  # type: ignore[valid-type]
        C: T.Tensor((11, 20), "float32"),  # type: ignore[valid-type]
    ) -> None:
        with T.Kernel(1) as _:
            a, b = T.alloc_shared((11, 40), "float32"), T.alloc_shared((40, 20), "float32")
            c = T.alloc_fragment((11, 20), "float32")
            T.copy(A, a)
            T.copy(B, b)
            for i, j in T.Parallel(11, 9):
                a[i, j] = 0.0
            for i, j in T.Parallel(7, 20):
                b[i, j] = b[i, j] + 1.0
            T.fill(c, 1.0)
            for i, j in T.Parallel(2, 5):
                c[i, j] = 5.0
            T.gemm(a, b, c)
            for i, j in T.Parallel(3, 20):
                c[i, j] = c[i, j] * 2.0
            for i, j in T.Parallel(11, 3):
                c[i, j] = c[i, j] + 1.0
            T.copy(c, C)

    a, b = (RNG.standard_normal(shape).astype(np.float32) for shape in ((11, 40), (40, 20)))
    left, right, wanted = a.astype(np.float64), b.astype(np.float64), np.ones((11, 20))
    left[:, :9], wanted[:2, :5] = 0, 5
    right[:7] += 1
    wanted += left @ right
    wanted[:3] *= 2
    wanted[:, :3] += 1
    np.testing.assert_allclose(built(kernel, cache)(a, b), wanted, rtol=1e-5, atol=1e-4)


def test_a_part_that_is_cleared_says_nothing_of_the_rest(cache: Path) -> None:
    """What lies behind the data is summed where it is not 0 in every row."""

    @T.prim_func
    def kernel(X: T.Tensor((4, 11), "float32"), Y: T.Tensor((4, 11), "float32"), S: T.Tensor((4,), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            x, tile = T.alloc_fragment((4, 16), "float32"), T.alloc_fragment((4, 16), "float32")
            total = T.alloc_fragment((4,), "float32")
            T.copy(X[0, 0], x)
            T.fill(tile, 0.25)
            for i, j in T.Parallel(1, 16):
                tile[i, j] = 0.0
            for j in T.Parallel(16):
                tile[2, j] = 0.0
            T.reduce_sum(tile, total, dim=1)
            for i, j in T.Parallel(4, 16):
                Y[i, j] = x[i, j] + tile[i, j]
            T.copy(total, S)

    array = RNG.standard_normal((4, 11)).astype(np.float32)
    added = np.array([[0], [0.25], [0], [0.25]], np.float32)
    found, total = built(kernel, cache, [1, 2])(array)
    np.testing.assert_array_equal(found, array + added)
    np.testing.assert_array_equal(total, 16 * added[:, 0])


def test_one_row_that_the_data_choose(cache: Path) -> None:
    """A slice of one row, and elements whose place is a remainder: outside of a tile is 0, or dropped."""

    @T.prim_func
    def kernel(A: T.Tensor((5, 9), "float32"), P: T.Tensor((4,), "int32"), B: T.Tensor((4, 9), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a, b, place = T.alloc_shared((5, 9), "float32"), T.alloc_fragment((4, 9), "float32"), T.alloc_var("int32")
            counts = T.alloc_fragment((8,), "float32")
            T.copy(A, a)
            T.fill(b, 3.0)
            T.clear(counts)
            for row in T.serial(4):
                place = P[row]
                T.copy(a[place - 1 : place, :], b[row : row + 1, :])
                T.copy(a[0:1, 0:4], b[place : place + 1, 2:6])
                counts[P[row] % 5] += 1.0
                counts[P[row] & 7] += 2.0
            for i, j in T.Parallel(4, 8):
                b[i, j] = b[i, j] + counts[j]
            T.copy(b, B)

    array, places = RNG.standard_normal((5, 9)).astype(np.float32), np.array([0, 5, 2, -7], np.int32)
    wanted, counts = np.full((4, 9), 3, np.float32), np.zeros(8, np.float32)
    for row, place in enumerate(places):
        wanted[row] = array[place - 1] if 0 < place <= 5 else 0
        if 0 <= place < 4:
            wanted[place, 2:6] = array[0, :4]
        counts[place % 5] += 1
        counts[place & 7] += 2
    wanted[:, :8] += counts
    np.testing.assert_array_equal(built(kernel, cache)(array, places), wanted)
