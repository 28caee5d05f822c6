"""Judges whether two results of one computation differ by rounding alone.

In: what the original gives, what the candidate gives, and (where it could be had) the same in double precision. Out:
the errors and the verdict of one output.

The allowance of an element has two parts. The first is the original's own rounding error, measured against double
precision, the largest of the element's row, times NOISE_FACTOR: a result may be somewhat further from the truth than
the original is, never further than that. The second covers rows where the original is right by luck: summing K
products of random sign one after the other gives a standard error of u * sqrt(K / 2) of the result's root mean square,
u being half the spacing of the numbers at 1; SUM_FACTOR * u * sqrt(K) is about six of these. NaN must meet NaN and
infinity the same infinity. Integers and booleans must be equal, except where rounding decided the original's too.
"""

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

NOISE_FACTOR = 8.0
SUM_FACTOR = 4.0
UNKNOWN_LENGTH = 4096  # reduction length assumed where the original could not be evaluated in double precision
UNKNOWN_FACTOR = 16.0  # and the factor that then stands for the unmeasured error of a whole model

PLAUSIBLE_NOISE = 2048.0  # a median error above this many unit roundoffs of the output is no rounding

UNIT_ROUNDOFF = {
    np.dtype(dtype): float(ml_dtypes.finfo(dtype).eps) / 2
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
}


@dataclass(frozen=True)
class OutputError:
    """How far one output is off.

    `max_abs` is the largest absolute difference of finite elements, `max_rel` the same over the root mean square of the
    original's finite elements, `allowed` the allowance of the element that came closest to it or exceeded it most.
    `fault` says what is wrong, None when nothing is.
    """

    name: str
    max_abs: float
    max_rel: float
    allowed: float
    fault: str | None

    def to_json(self) -> dict[str, object]:
        """Keys `name`, `max_abs`, `max_rel`, `allowed` (absolute) and `fault`."""
        return {
            "name": self.name,
            "max_abs": self.max_abs,
            "max_rel": self.max_rel,
            "allowed": self.allowed,
            "fault": self.fault,
        }


def is_rounding(expected: Array, truth: Array) -> bool:
    """Whether the original and double precision are close enough to be the same computation.

    They are not where the double precision evaluator gives an operator another meaning than the runtime does: its
    result says nothing about rounding then.
    """
    if expected.dtype not in UNIT_ROUNDOFF:
        return True
    wide = expected.astype(np.float64)
    known = np.isfinite(wide) & np.isfinite(truth)
    if not known.any():
        return True
    rms = math.sqrt(float(np.mean(np.square(wide[known]))))
    return float(np.median(np.abs(wide[known] - truth[known]))) <= PLAUSIBLE_NOISE * UNIT_ROUNDOFF[expected.dtype] * rms


def compare(name: str, expected: Array, actual: Array, *, truth: Array | None, longest: int) -> OutputError:
    """Judges output `name`. `truth` is the original in double precision, of the same shape."""
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        found = f"{actual.dtype}{list(actual.shape)}, expected {expected.dtype}{list(expected.shape)}"
        return OutputError(name, 0.0, 0.0, 0.0, f"is {found}")
    if expected.dtype not in UNIT_ROUNDOFF:
        return _compare_exact(name, expected, actual, truth)
    return _compare_floats(name, expected, actual, truth, longest)


def _compare_exact(name: str, expected: Array, actual: Array, truth: Array | None) -> OutputError:
    wrong = expected != actual
    if truth is not None:
        wrong &= expected == truth
    if expected.dtype.kind not in "iu" or not expected.size:
        largest = float(wrong.any())
    else:
        largest = float(np.abs(expected.astype(np.float64) - actual.astype(np.float64)).max())
    if not wrong.any():
        return OutputError(name, largest, largest, 0.0, None)
    place = _place(wrong)
    return OutputError(name, largest, largest, 0.0, f"{_at(place)} is {actual[place]}, expected {expected[place]}")


def _compare_floats(name: str, expected: Array, actual: Array, truth: Array | None, longest: int) -> OutputError:
    unit = UNIT_ROUNDOFF[expected.dtype]
    wide, other = expected.astype(np.float64), actual.astype(np.float64)
    finite = np.isfinite(wide)
    same_kind = np.where(finite, np.isfinite(other), (wide == other) | (np.isnan(wide) & np.isnan(other)))
    comparable = finite & np.isfinite(other)
    difference = np.where(comparable, np.abs(np.subtract(wide, other, where=comparable, out=np.zeros_like(wide))), 0.0)
    rms = math.sqrt(float(np.mean(np.square(wide[finite])))) if finite.any() else 0.0
    allowed = _allowance(wide, truth, unit=unit, rms=rms, longest=longest)
    largest = float(difference.max(initial=0.0))
    relative = largest / rms if rms else largest
    if not same_kind.all():
        place = _place(~same_kind)
        fault = f"{_at(place)} is {actual[place]}, expected {expected[place]}"
        return OutputError(name, largest, relative, float(allowed[place]), fault)
    if not difference.size:
        return OutputError(name, 0.0, 0.0, 0.0, None)
    place = _place(difference - allowed)
    limit = float(allowed[place])
    if difference[place] <= limit:
        return OutputError(name, largest, relative, limit, None)
    count = int((difference > allowed).sum())
    fault = (
        f"{_at(place)} is {actual[place]:.9g}, expected {expected[place]:.9g} within {limit:.3g}"
        f" ({count} of {difference.size} elements are off)"
    )
    return OutputError(name, largest, relative, limit, fault)


def _allowance(wide: Array, truth: Array | None, *, unit: float, rms: float, longest: int) -> Array:
    """Absolute error allowed per element."""
    if truth is None:
        floor = UNKNOWN_FACTOR * SUM_FACTOR * unit * math.sqrt(UNKNOWN_LENGTH) * rms
        return np.full(wide.shape, floor)
    known = np.isfinite(wide) & np.isfinite(truth)
    noise = np.where(known, np.abs(np.subtract(wide, truth, where=known, out=np.zeros_like(wide))), 0.0)
    row = noise.max(axis=-1, keepdims=True, initial=0.0) if noise.ndim else noise
    floor = SUM_FACTOR * unit * math.sqrt(longest) * rms
    return np.broadcast_to(NOISE_FACTOR * row + floor, wide.shape)


def _place(weights: Array) -> tuple[int, ...]:
    """Index of the largest weight."""
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(weights)), weights.shape))


def _at(place: tuple[int, ...]) -> str:
    return f"element [{', '.join(map(str, place))}]"
