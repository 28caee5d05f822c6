"""Counts what a model generates.

In: records of the engine. Out: totals of one moment. Invariant: times are counted for tokens that were generated, as
the engine has them; how long they take to reach the client is not known here.
"""

import threading
from bisect import bisect_left
from dataclasses import dataclass

FIRST_BUCKETS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
TOKEN_BUCKETS_MS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


@dataclass(frozen=True)
class Durations:
    """Counts by upper bound, one more above, and their sum in nanoseconds."""

    bounds_ms: tuple[float, ...]
    counts: tuple[int, ...]
    ns: int


@dataclass(frozen=True)
class GenerationTotals:
    """Counters at one moment."""

    prompt_tokens: int
    tokens: int
    steps: int
    """Runs that gave each of their streams a token."""
    step_rows: int
    """Streams of all these runs."""
    copied_bytes: int
    """Bytes of caches that were copied because other streams were to run together."""
    first: Durations
    """Time from a request to its first token."""
    between: Durations
    """Time between a token and the one before."""


class _Histogram:
    def __init__(self, bounds_ms: tuple[float, ...]) -> None:
        self._bounds = bounds_ms
        self._counts = [0] * (len(bounds_ms) + 1)
        self._ns = 0

    def add(self, ns: int) -> None:
        self._counts[bisect_left(self._bounds, ns / 1e6)] += 1
        self._ns += ns

    def durations(self) -> Durations:
        return Durations(self._bounds, tuple(self._counts), self._ns)


class Counters:
    """Thread-safe counters since the model was loaded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prompt_tokens = self._tokens = self._steps = self._step_rows = self._copied = 0
        self._first = _Histogram(FIRST_BUCKETS_MS)
        self._between = _Histogram(TOKEN_BUCKETS_MS)

    def record_prompt(self, tokens: int) -> None:
        """Count tokens of prompts that were read."""
        with self._lock:
            self._prompt_tokens += tokens

    def record_step(self, rows: int) -> None:
        """Count a run that gave `rows` streams a token each."""
        with self._lock:
            self._steps += 1
            self._step_rows += rows

    def record_copy(self, size: int) -> None:
        """Count bytes of caches that were copied."""
        with self._lock:
            self._copied += size

    def record_token(self, ns: int, *, first: bool) -> None:
        """Count a token, `ns` after the one before, or after the request if it is the first."""
        with self._lock:
            self._tokens += 1
            (self._first if first else self._between).add(ns)

    def totals(self) -> GenerationTotals:
        """The counters, all of one moment."""
        with self._lock:
            return GenerationTotals(
                prompt_tokens=self._prompt_tokens,
                tokens=self._tokens,
                steps=self._steps,
                step_rows=self._step_rows,
                copied_bytes=self._copied,
                first=self._first.durations(),
                between=self._between.durations(),
            )
