"""Stores of `T.Parallel` at places that data choose: every row somewhere else, outside of the result too."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilecore
from tilecore import TileError
from tilecore import language as T

pytestmark = pytest.mark.cpu
ROWS, COLUMNS = 45, 7
RNG = np.random.default_rng(19)


@pytest.mark.parametrize("kind", ["float32", "float16", "int8", "bool", "float64"])
@pytest.mark.parametrize("first", [0, -10])
def test_rows_and_elements(kind: str, first: int, object_cache: Path) -> None:
    @T.prim_func
    def kernel(
        X: T.Tensor((ROWS, COLUMNS), kind),  # type: ignore[valid-type]
        P: T.Tensor((ROWS,), "int32"),  # type: ignore[valid-type]
        Y: T.Tensor((ROWS, COLUMNS), kind),  # type: ignore[valid-type]
        Z: T.Tensor((ROWS,), kind),  # type: ignore[valid-type]
    ) -> None:
        with T.Kernel(1) as _:
            held = T.alloc_shared((ROWS,), kind)
            T.clear(Y)
            T.clear(held)
            for i, j in T.Parallel(ROWS, COLUMNS):
                Y[P[i], j] = X[i, j]
            for i in T.Parallel(ROWS):
                held[P[i] % ROWS] = X[i, 2]
            T.copy(held, Z)

    places = RNG.permutation(ROWS).astype(np.int32) + first
    x: Any = (RNG.standard_normal((ROWS, COLUMNS)) * 20).astype(kind)
    y, z = tilecore.compile(kernel, out_idx=[2, 3], cache=object_cache)(x, places.astype(np.int32))
    wanted, turned, inside = np.zeros_like(x), np.zeros_like(x[:, 0]), places >= 0
    wanted[places[inside]] = x[inside]
    turned[places % ROWS] = x[:, 2]
    np.testing.assert_array_equal(y, wanted)
    np.testing.assert_array_equal(z, turned)


def test_what_is_read_there_is_refused() -> None:
    @T.prim_func
    def kernel(P: T.Tensor((ROWS,), "int32"), Y: T.Tensor((ROWS,), "int32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            counts = T.alloc_shared((ROWS,), "int32")
            T.clear(counts)
            for i in T.Parallel(ROWS):
                counts[P[i] % ROWS] = counts[P[i] % ROWS] + 1
            T.copy(counts, Y)

    with pytest.raises(TileError) as caught:
        tilecore.compile(kernel, out_idx=1)
    text = str(caught.value)
    assert (
        "is not proved to be written by one point of i: the points of T.Parallel must write different elements" in text
    )
    assert "instead: T.atomic_add, T.atomic_max or T.atomic_min, or T.serial" in text
    assert "^^^^^^^^^^^^^^^^^^^" in text
