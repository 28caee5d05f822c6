"""Judges whether two results of one computation differ by rounding alone.

In: what the original gives, what the candidate gives, and (where it could be had) the same in double precision. Out:
the errors and the verdict of one output. `interface_change` compares what two models take and give.

The allowance of an element has two parts. The first is the original's own rounding error, measured against double
precision, the largest of the element's row or column, times NOISE_FACTOR: a result may be somewhat further from the
truth than the original is, never further than that. The column counts because a channel with a large gain is off in
every row, by luck in some more than in others. The second covers rows where the original is right by luck: summing K
products of random sign one after the other gives a standard error of u * sqrt(K / 2) of the result's root mean square,
u being half the spacing of the numbers at 1; SUM_FACTOR * u * sqrt(K) is about six of these. NaN must meet NaN and
infinity the same infinity. Where an output is beyond its allowance, the original is run again on inputs that are moved
by a rounding, and what these runs are off counts as its own error (`Truth.others`): a softmax of large scores turns the
last bit of a score into many bits of a weight, and how many differs from row to row.

Models in 16-bit floats are judged by double precision itself: kernels compute in float32 and round where they store, so
that a result is nearer to the truth than a model that rounds after every node is. HALF_NOISE_FACTOR times that model's
error is allowed (of the row, or of the median row, which luck does not touch), and HALF_FLOOR roundings. ONNX Runtime's
own result says little there: it skips most roundings. And where float16 overflows on the way (a sum of squares), what
the same formula gives without overflow is right as well: an element passes if it agrees with either.

Models whose operands were rounded to bfloat16 on demand are judged the same way: by double precision, and by what
rounding the operands of the original does to it.

Integers and booleans must be equal, except where rounding decided the original's too.

Models that quantise inside round to levels, where a difference in the last bit can become a whole level. For their
regions (`compare_region`), a result is right where it agrees with the original or with double precision (ONNX Runtime
saturates sums of bytes on some processors), and a small share of elements may be off by about one level. Between the
outputs of whole models (`compare_signal`) such levels add up: DRIFT_FACTOR times what rounding alone does to the
original is allowed (see `drift_of`), never less than one level's share of the result, nor half of the result or more.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx

Array = npt.NDArray[Any]

NOISE_FACTOR = 8.0
SUM_FACTOR = 4.0
HALF_NOISE_FACTOR = 4.0
HALF_FLOOR = 8.0  # roundings of the root mean square
UNKNOWN_LENGTH = 4096  # reduction length assumed where the original could not be evaluated in double precision
UNKNOWN_FACTOR = 16.0  # and the factor that then stands for the unmeasured error of a whole model

PLAUSIBLE_NOISE = 2048.0  # a median error above this many unit roundoffs of the output is no rounding
PLAUSIBLE_SHARE = 0.1  # nor is one above this share of the root mean square

NEAR_OVERFLOW = 2.0**-10  # of the largest number: parts of a sum may be this much larger than the sum

FLIPPED_SHARE = 0.02  # of the elements of a region's output that may be a level off
FLIPPED_SIZE = 1 / 64  # of the largest element: a level of a real result, and what one level does to its neighbours
DRIFT_FACTOR = 4.0
SIGNAL_DRIFT = 0.5  # relative root mean square between quantised models; unrelated outputs differ by more than 1

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


def is_rounding(expected: Array, truth: Array, *, step: float = 0.0) -> bool:
    """Whether the original and double precision are close enough to be the same computation.

    They are not where the double precision evaluator gives an operator another meaning than the runtime does: its
    result says nothing about rounding then. `step` is an absolute error that the original's last operator is known to
    make, whatever the size of its result.
    """
    if expected.dtype not in UNIT_ROUNDOFF:
        return True
    wide = expected.astype(np.float64)
    known = np.isfinite(wide) & np.isfinite(truth)
    if not known.any():
        return True
    rms = math.sqrt(float(np.mean(np.square(wide[known]))))
    limit = min(PLAUSIBLE_NOISE * UNIT_ROUNDOFF[expected.dtype], PLAUSIBLE_SHARE)
    return float(np.median(np.abs(wide[known] - truth[known]))) <= max(limit * rms, step)


@dataclass(frozen=True)
class Truth:
    """One output of the original in double precision, of the output's shape.

    `rounded` is the same with every node's result rounded to its type, `unbounded` without the overflow of 16-bit
    types, `real` without any; None where they are no different or not needed. `longest` is the longest reduction of the
    model. `others` are what the original gives for inputs that are a rounding off, where that was asked.

    What is a number in `real` and overflows in the original is infinite or NaN, whichever comes of the order of its
    sums (∞ − ∞, ∞ · 0): the fused model's may be the other. So may be what nearly overflows, as parts of sums may.
    """

    value: Array
    longest: int
    rounded: Array | None = None
    unbounded: Array | None = None
    real: Array | None = None
    others: tuple[Array, ...] = ()


def compare(name: str, expected: Array, actual: Array, *, truth: Truth | None) -> OutputError:
    """Judges output `name`; `truth` is None where the original could not be evaluated in double precision."""
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        found = f"{actual.dtype}{list(actual.shape)}, expected {expected.dtype}{list(expected.shape)}"
        return OutputError(name, 0.0, 0.0, 0.0, f"is {found}")
    if expected.dtype not in UNIT_ROUNDOFF:
        return _compare_exact(name, expected, actual, truth)
    return _compare_floats(name, expected, actual, truth)


def compare_region(name: str, expected: Array, actual: Array, *, truth: Truth | None) -> OutputError:
    """Judges output `name` of a region that quantises: as the original or `truth`, but for flipped levels."""
    strict = compare(name, expected, actual, truth=truth)
    if strict.fault is None or expected.shape != actual.shape or expected.dtype != actual.dtype:
        return strict
    if truth is not None and expected.dtype in UNIT_ROUNDOFF:
        exact = compare(name, truth.value.astype(expected.dtype), actual, truth=truth)
        if exact.fault is None:
            return exact
    centers = [expected.astype(np.float64)] + ([] if truth is None else [truth.value.astype(np.float64)])
    off = np.min([np.abs(center - actual.astype(np.float64)) for center in centers], axis=0)
    if expected.dtype in UNIT_ROUNDOFF:
        level = FLIPPED_SIZE * float(np.abs(centers[0][np.isfinite(centers[0])]).max(initial=0.0))
        wrong = off > strict.allowed
    else:
        level = 1.0 if expected.dtype.itemsize == 1 and expected.dtype.kind in "iu" else 0.0
        wrong = off > 0
    wrong |= np.isnan(off)
    if float(off.max(initial=0.0)) <= level and int(wrong.sum()) <= max(1, FLIPPED_SHARE * off.size):
        return OutputError(name, strict.max_abs, strict.max_rel, level, None)
    return strict


def drift_of(expected: Array, other: Array) -> float:
    """The root mean square of the difference, relative to that of `expected`; over what is finite in both."""
    wide, second = expected.astype(np.float64), other.astype(np.float64)
    known = np.isfinite(wide) & np.isfinite(second)
    if not known.any():
        return 0.0
    size = math.sqrt(float(np.mean(np.square(wide[known]))))
    drift = math.sqrt(float(np.mean(np.square(wide[known] - second[known]))))
    return drift / size if size else float(drift > 0)


@dataclass(frozen=True)
class OutputCost:
    """What a narrower precision that was asked for costs an output: the root mean square of the difference, relative to
    that of the original's, and the cosine between both."""

    name: str
    drift: float
    cosine: float


def cost_of(name: str, expected: Array, actual: Array) -> OutputCost:
    """The cost of output `name`, over what is finite in both."""
    wide, other = expected.astype(np.float64), actual.astype(np.float64)
    known = np.isfinite(wide) & np.isfinite(other)
    size = math.sqrt(float(np.square(wide[known]).sum()) * float(np.square(other[known]).sum()))
    return OutputCost(
        name, drift_of(expected, actual), float((wide[known] * other[known]).sum()) / size if size else 1.0
    )


def compare_signal(name: str, expected: Array, actual: Array, *, own: float | None) -> OutputError:
    """Judges output `name` of a whole model that quantises; its regions are to be judged one by one.

    `own`: how far rounding alone moves the original (see `drift_of`), None where that is not known.
    """
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return compare(name, expected, actual, truth=None)
    wide, other = expected.astype(np.float64), actual.astype(np.float64)
    known = np.isfinite(wide) & np.isfinite(other)
    size = math.sqrt(float(np.mean(np.square(wide[known])))) if known.any() else 0.0
    largest = float(np.abs(wide[known] - other[known]).max(initial=0.0))
    limit = SIGNAL_DRIFT if own is None else min(max(DRIFT_FACTOR * own, FLIPPED_SIZE), SIGNAL_DRIFT)
    drift = drift_of(expected, actual)
    fault = None
    if drift > limit:
        fault = f"differs by {drift:.3g} of its root mean square, {size:.3g}; {limit:.3g} is allowed"
    elif not np.array_equal(np.isfinite(wide), np.isfinite(other)):
        fault = "is not finite where the original is, or the other way round"
    return OutputError(name, largest, largest / size if size else largest, limit * size, fault)


def _compare_exact(name: str, expected: Array, actual: Array, truth: Truth | None) -> OutputError:
    wrong = expected != actual
    if truth is not None:
        wrong &= expected == truth.value
        if truth.rounded is not None:
            wrong &= actual != truth.rounded
    if expected.dtype.kind not in "iu" or not expected.size:
        largest = float(wrong.any())
    else:
        largest = float(np.abs(expected.astype(np.float64) - actual.astype(np.float64)).max())
    if not wrong.any():
        return OutputError(name, largest, largest, 0.0, None)
    place = _place(wrong)
    return OutputError(name, largest, largest, 0.0, f"{_at(place)} is {actual[place]}, expected {expected[place]}")


@dataclass(frozen=True)
class _Judged:
    """Per element: whether it is finite where the reference is, how far off it is, and how far it may be."""

    same_kind: Array
    difference: Array
    allowed: Array

    @property
    def wrong(self) -> Array:
        """The elements that do not agree."""
        return ~self.same_kind | (self.difference > self.allowed)


def _compare_floats(name: str, expected: Array, actual: Array, truth: Truth | None) -> OutputError:
    wide, other = expected.astype(np.float64), actual.astype(np.float64)
    finite = np.isfinite(wide)
    rms = math.sqrt(float(np.mean(np.square(wide[finite])))) if finite.any() else 0.0
    allowed = _allowance(wide, truth, unit=UNIT_ROUNDOFF[expected.dtype], rms=rms)
    if truth is not None and truth.rounded is not None:
        wide = np.where(finite & np.isfinite(truth.value), truth.value, wide)
    judged = _judge(wide, other, allowed)
    if truth is not None and truth.unbounded is not None and judged.wrong.any():
        judged = _or_unbounded(judged, expected, other, truth, truth.unbounded)
    if truth is not None and truth.real is not None:
        judged = replace(judged, same_kind=judged.same_kind | _overflows(wide, other, truth.real, allowed))
    difference, allowed = judged.difference, judged.allowed
    largest = float(difference.max(initial=0.0))
    relative = largest / rms if rms else largest
    if not judged.same_kind.all():
        place = _place(~judged.same_kind)
        fault = f"{_at(place)} is {actual[place]}, expected {expected.dtype.type(wide[place])}"
        return OutputError(name, largest, relative, float(allowed[place]), fault)
    if not difference.size:
        return OutputError(name, 0.0, 0.0, 0.0, None)
    place = _place(difference - allowed)
    limit = float(allowed[place])
    if difference[place] <= limit:
        return OutputError(name, largest, relative, limit, None)
    count = int((difference > allowed).sum())
    fault = (
        f"{_at(place)} is {other[place]:.9g}, expected {wide[place]:.9g} within {limit:.3g}"
        f" ({count} of {difference.size} elements are off)"
    )
    return OutputError(name, largest, relative, limit, fault)


def _judge(wide: Array, other: Array, allowed: Array) -> _Judged:
    finite = np.isfinite(wide)
    same_kind = np.where(finite, np.isfinite(other), (wide == other) | (np.isnan(wide) & np.isnan(other)))
    comparable = finite & np.isfinite(other)
    difference = np.where(comparable, np.abs(np.subtract(wide, other, where=comparable, out=np.zeros_like(wide))), 0.0)
    return _Judged(same_kind, difference, allowed)


def _overflows(wide: Array, other: Array, real: Array, allowed: Array) -> Array:
    """Where a real number overflows float32, or nearly: the original or the other one has it, or neither has."""
    limit = NEAR_OVERFLOW * np.finfo(np.float32).max
    lost = ~np.isfinite(other) & ((np.abs(wide) > limit) | np.isnan(wide))
    with np.errstate(invalid="ignore"):
        held = ~np.isfinite(wide) & (np.abs(real) > limit) & (np.abs(other - real) <= allowed)
    return np.isfinite(real) & (lost | held)


def _or_unbounded(judged: _Judged, expected: Array, other: Array, truth: Truth, unbounded: Array) -> _Judged:
    """The elements that disagree with the original, judged by the same formula without overflow instead."""
    with np.errstate(over="ignore"):
        wide = unbounded.astype(expected.dtype).astype(np.float64)
    finite = np.isfinite(wide)
    rms = math.sqrt(float(np.mean(np.square(wide[finite])))) if finite.any() else 0.0
    rounded = None if truth.rounded is None else np.where(np.isfinite(truth.rounded), truth.rounded, unbounded)
    exact = Truth(unbounded, truth.longest, rounded, others=truth.others)
    second = _judge(wide, other, _allowance(wide, exact, unit=UNIT_ROUNDOFF[expected.dtype], rms=rms))
    better = judged.wrong & ~second.wrong
    return _Judged(
        judged.same_kind | better,
        np.where(better, second.difference, judged.difference),
        np.where(better, second.allowed, judged.allowed),
    )


def _allowance(wide: Array, truth: Truth | None, *, unit: float, rms: float) -> Array:
    """Absolute error allowed per element."""
    if truth is None:
        floor = UNKNOWN_FACTOR * SUM_FACTOR * unit * math.sqrt(UNKNOWN_LENGTH) * rms
        return np.full(wide.shape, floor)
    if truth.rounded is not None:
        row = _row_noise(truth.rounded, truth)
        floor = (
            HALF_FLOOR * unit * rms + SUM_FACTOR * UNIT_ROUNDOFF[np.dtype(np.float32)] * math.sqrt(truth.longest) * rms
        )
        typical = float(np.median(row)) if row.size else 0.0
        return np.broadcast_to(HALF_NOISE_FACTOR * np.maximum(row, typical) + floor, wide.shape)
    floor = SUM_FACTOR * unit * math.sqrt(truth.longest) * rms
    noise = np.maximum(_row_noise(wide, truth), _column_noise(wide, truth))
    return np.broadcast_to(NOISE_FACTOR * noise + floor, wide.shape)


def _row_noise(value: Array, truth: Truth) -> Array:
    """The largest error of each row, of the last axis."""
    noise = _noise(value, truth)
    return noise.max(axis=-1, keepdims=True, initial=0.0) if noise.ndim else noise


def _column_noise(value: Array, truth: Truth) -> Array:
    """The largest error of each column, over all axes but the last; 0 where there is no other axis."""
    noise = _noise(value, truth)
    return noise.max(axis=tuple(range(noise.ndim - 1)), initial=0.0) if noise.ndim > 1 else np.zeros(())


def _noise(value: Array, truth: Truth) -> Array:
    """The error of each element: the largest of the runs that there are."""
    return np.max([_distance(each.astype(np.float64), truth.value) for each in (value, *truth.others)], axis=0)


def _distance(left: Array, right: Array) -> Array:
    """|left − right| where both are finite, else 0."""
    known = np.isfinite(left) & np.isfinite(right)
    return np.where(known, np.abs(np.subtract(left, right, where=known, out=np.zeros_like(left))), 0.0)


def _place(weights: Array) -> tuple[int, ...]:
    """Index of the largest weight."""
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(weights)), weights.shape))


def _at(place: tuple[int, ...]) -> str:
    return f"element [{', '.join(map(str, place))}]"


def interface_change(original: onnx.ModelProto, fused: onnx.ModelProto) -> str | None:
    """What differs in the names, order or types of inputs and outputs."""
    for kind, before, after in (
        ("inputs", _interface(original, original.graph.input), _interface(fused, fused.graph.input)),
        ("outputs", _interface(original, original.graph.output), _interface(fused, fused.graph.output)),
    ):
        if before != after:
            return f"the fused model's {kind} are {after}, the original's {before}"
    return None


def _interface(model: onnx.ModelProto, values: Iterable[onnx.ValueInfoProto]) -> list[tuple[str, str]]:
    """Names and element types, in order; initializers that old models list as inputs are left out."""
    constants = {tensor.name for tensor in model.graph.initializer}
    return [
        (value.name, onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type))
        for value in values
        if value.name not in constants
    ]
