"""Leaves out the regions whose kernels are wrong, until what is left computes what the original does.

Comes in: a way to build the model without some of its regions, and a way to check what was built. Goes out: the build
that passed, and the suspects: every region that was left out, with the values that show what is wrong. Invariant: what
is handed back was checked as it is; a fault of no region is not hidden but raised.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy.typing as npt

from runtime.verify import FusedError, Verdict

Array = npt.NDArray[Any]
Key = tuple[str, ...]  # of a region: the names of its outputs


class RepairError(RuntimeError):
    """The fused model is wrong and no region is to blame; the message says what is wrong."""


class Built(Protocol):
    """A model that was built: the keys of its regions in order, and ways to run it."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """One per region, in graph order."""
        ...

    def check(self) -> Verdict:
        """Compare with the original; FusedError when it fails on inputs that the original accepts."""
        ...

    def around(self, key: Key, feeds: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        """The inputs (but weights) and outputs of a region that was left out, when the model runs on `feeds`."""
        ...


B = TypeVar("B", bound=Built)


@dataclass(frozen=True, slots=True)
class Suspect:
    """A region that was left out, its fault, and the values around it; `actual` is empty if the kernel did not run."""

    key: Key
    problem: str
    inputs: Mapping[str, Array] = field(default_factory=dict[str, Array], repr=False)
    expected: Mapping[str, Array] = field(default_factory=dict[str, Array], repr=False)
    actual: Mapping[str, Array] = field(default_factory=dict[str, Array], repr=False)


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a build did not pass, the inputs that show it, and the regions that are found wrong by themselves."""

    problem: str
    feeds: Mapping[str, Array] | None
    suspects: tuple[Suspect, ...]


def repair(build: Callable[[frozenset[Key]], B]) -> tuple[B, tuple[Suspect, ...]]:
    """The build that passes with the fewest regions left out that were found wrong. RepairError when none passes."""
    suspects: dict[Key, Suspect] = {}
    while True:
        built = build(frozenset(suspects))
        failure = _check(built)
        if failure is None:
            return built, tuple(suspects.values())
        found = {suspect.key: suspect for suspect in failure.suspects if suspect.key in built.keys}
        if not found:
            suspect = _search(build, built.keys, frozenset(suspects), failure)
            found = {suspect.key: suspect}
        suspects |= found


def _check(built: Built) -> _Failure | None:
    try:
        verdict = built.check()
    except FusedError as error:
        return _Failure(str(error), error.feeds, ())
    if verdict.ok:
        return None
    suspects: list[Suspect] = []
    for region in verdict.regions:
        key = tuple(output.name for output in region.outputs)
        problem = "; ".join(f"{output.name!r}: {output.fault}" for output in region.outputs if output.fault)
        suspects.append(Suspect(key, problem, region.inputs, region.expected, region.actual))
    return _Failure(verdict.mismatch or "the models differ", verdict.feeds, tuple(suspects))


def _search(
    build: Callable[[frozenset[Key]], B], keys: tuple[Key, ...], without: frozenset[Key], failure: _Failure
) -> Suspect:
    """The first region with which the model fails, by bisection over how many regions are fused."""
    good, bad = 0, len(keys)  # the first `good` regions pass, the first `bad` fail
    if _check(build(without | frozenset(keys))) is not None or bad == 0:
        raise RepairError(f"{failure.problem}; also with no region fused, so that no kernel is to blame")
    while bad - good > 1:
        middle = (good + bad) // 2
        found = _check(build(without | frozenset(keys[middle:])))
        if found is None:
            good = middle
        else:
            bad, failure = middle, found
    key = keys[bad - 1]
    if failure.feeds is None:
        return Suspect(key, failure.problem)
    inputs, expected = build(without | frozenset(keys[good:])).around(key, failure.feeds)
    return Suspect(key, failure.problem, inputs, expected)
