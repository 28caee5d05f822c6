"""Reductions whose result has another type than what is reduced: against integers, or float64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilecore
from tilecore import language as T

pytestmark = pytest.mark.cpu
M, N = 6, 21  # neither divides a vector
RNG = np.random.default_rng(13)
NUMPY: dict[str, Any] = {
    "float64": np.float64, "float32": np.float32, "float16": np.float16, "int32": np.int32, "int8": np.int8,
}  # fmt: skip
ORACLES: dict[str, Callable[..., Any]] = {
    "sum": np.sum, "abssum": lambda x, axis: np.abs(x).sum(axis), "absmax": lambda x, axis: np.abs(x).max(axis)
}  # fmt: skip


@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("kind", ["sum", "absmax", "abssum"])
@pytest.mark.parametrize(
    ("given", "made"),
    [("int8", "int32"), ("int32", "int8"), ("float32", "float16"), ("float16", "float64"), ("float64", "float32")],
)
def test_reductions_into_another_type(object_cache: Path, given: str, made: str, kind: str, clear: bool) -> None:
    """In the wider of both: -128 has a magnitude in int32, and a sum is rounded, or cut off, once."""

    @T.prim_func
    def kernel(A: T.Tensor((M, N), given), B: T.Tensor((M,), made)) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a, b = T.alloc_fragment((M, N), given), T.alloc_fragment((M,), made)
            T.copy(A, a)
            T.fill(b, 3)
            getattr(T, f"reduce_{kind}")(a, b, dim=1, clear=clear)
            T.copy(b, B)

    low, high = (-128, 128) if given == "int8" else (-9999, 10000)
    x = RNG.integers(low, high, (M, N)).astype(NUMPY[given])
    x[0, 0], x[1, :2] = low, (60000, -60000) if given == "float32" else (low, low + 1)
    wide = x.astype(np.float64 if "float" in given else np.int64)
    wanted = ORACLES[kind](wide, axis=1)
    if not clear:
        join = {"sum": np.add, "abssum": np.add, "min": np.minimum}.get(kind, np.maximum)
        wanted = join(wanted, 3)
    with np.errstate(over="ignore"):
        exact = wanted.astype(NUMPY[made])
    np.testing.assert_allclose(
        tilecore.compile(kernel, out_idx=1, cache=object_cache)(x).astype(np.float64),
        exact.astype(np.float64),
        rtol=0 if "int" in made else 1e-6,
    )
