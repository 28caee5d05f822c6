"""Arrays for random regions, and how results are judged against float64."""

import math

import numpy as np

from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import Evaluator
from tilecore.contract.spec import Spec, Tensor, outputs_of

TOLERANCE = {DType.BF16: 3e-2, DType.F16: 6e-3, DType.F32: 3e-3}  # of an element and of the output's root mean square


def shape_of(tensor: Tensor, sizes: dict[str, int]) -> tuple[int, ...]:
    """The shape where symbols are `sizes`."""
    return tuple(int(Evaluator({}, sizes)(dim)) for dim in tensor.shape)


def drawn(tensor: Tensor, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Random elements: integers up to 1000, some of 64 bits that 32 do not hold, flags of which there may be none."""
    if tensor.dtype.is_float:
        found = rng.standard_normal(shape).astype(np.float32)
        return -np.abs(found) if tensor.name == "g" else found  # decays
    if tensor.dtype is DType.BOOL:
        return rng.random(shape) < (0.5 if rng.random() < 0.8 else 0.0)
    info = np.iinfo(tensor.dtype.row.numpy)
    found = rng.integers(max(info.min, -1000), min(info.max, 1000) + 1, shape).astype(tensor.dtype.row.numpy)
    if tensor.dtype is DType.I64:
        found.reshape(-1)[::7] = 1 << 32
    return found


def poisoned(tensor: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    """NaN, or a number that no program gives often."""
    if tensor.dtype.is_float:
        return np.full(shape, math.nan, np.float32)
    return np.full(shape, 77, tensor.dtype.row.numpy)


def in_float64(array: np.ndarray) -> np.ndarray:
    """Floats in float64, others as they are."""
    return array if array.dtype.kind in "iub" else array.astype(np.float64)


def tolerance_of(spec: Spec) -> float:
    """That of the coarsest floats."""
    return max(TOLERANCE[one.dtype] for one in (*spec.inputs, *outputs_of(spec)) if one.dtype in TOLERANCE)


def faults(found: np.ndarray, expected: np.ndarray, tolerance: float) -> str:
    """What differs, if anything does: where there is NaN, where infinity, and numbers."""
    if expected.dtype.kind in "iub":
        different = int((found != expected).sum())
        return f"integers of {different}" if different else ""
    finite = np.isfinite(expected)
    scale = math.sqrt(float(np.mean(expected[finite] ** 2))) if finite.any() else 1.0
    both = np.isfinite(found) & finite
    off = np.abs(np.where(both, found, 0) - np.where(both, expected, 0))
    wrong = off > tolerance * (np.abs(np.where(finite, expected, 0)) + max(scale, 1e-3))
    parts = {
        "NaN": np.isnan(found) != np.isnan(expected), "infinity": np.isinf(found) != np.isinf(expected), "value": wrong,
    }  # fmt: skip
    return ", ".join(f"{name} of {int(part.sum())}" for name, part in parts.items() if part.any())
