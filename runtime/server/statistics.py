"""Counters of one model version.

In: one record per request. Out: `ModelStatistics` messages. Invariant: all counters of a message are from one moment.
"""

import threading
import time
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field

from proto import open_inference_pb2 as pb
from runtime.server.generation.counters import Counters


@dataclass(frozen=True)
class Timing:
    """Nanoseconds that one answered request spent: waiting, reading its inputs, in the session, writing its outputs."""

    queue: int
    input: int
    infer: int
    output: int


@dataclass
class _Total:
    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def message(self) -> pb.StatisticDuration:
        return pb.StatisticDuration(count=self.count, ns=self.ns)


@dataclass
class _Phases:
    input: _Total = field(default_factory=_Total)
    infer: _Total = field(default_factory=_Total)
    output: _Total = field(default_factory=_Total)

    def add(self, input_ns: int, infer_ns: int, output_ns: int) -> None:
        self.input.add(input_ns)
        self.infer.add(infer_ns)
        self.output.add(output_ns)


BUCKETS_MS = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Upper bounds of the latency histogram; there is one more bucket above."""


@dataclass(frozen=True)
class Totals:
    """Counters at one moment; times in nanoseconds."""

    success: int
    failure: int
    rows: int
    executions: int
    request_ns: int
    queue_ns: int
    input_ns: int
    infer_ns: int
    output_ns: int
    latencies: tuple[int, ...]
    """Answered requests by latency, as `BUCKETS_MS` divides it."""


class Statistics:
    """Thread-safe counters since the model was loaded."""

    def __init__(self) -> None:
        self.generation = Counters()
        self._lock = threading.Lock()
        self._success = _Total()
        self._failure = _Total()
        self._queue = _Total()
        self._phases = _Phases()
        self._by_batch: defaultdict[int, _Phases] = defaultdict(_Phases)
        self._executions = 0
        self._rows = 0
        self._last_ms = 0
        self._latencies = [0] * (len(BUCKETS_MS) + 1)

    def record_success(self, timing: Timing, *, rows: int) -> None:
        """Count an answered request of `rows` batched rows; 1 for a model without a batch dim."""
        now = time.time_ns() // 1_000_000
        took = timing.queue + timing.input + timing.infer + timing.output
        bucket = bisect_left(BUCKETS_MS, took / 1e6)
        with self._lock:
            self._success.add(took)
            self._queue.add(timing.queue)
            self._phases.add(timing.input, timing.infer, timing.output)
            self._rows += rows
            self._last_ms = now
            self._latencies[bucket] += 1

    def record_execution(self, rows: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Count a run of the session, of one request or a batch."""
        with self._lock:
            self._executions += 1
            self._by_batch[rows].add(input_ns, infer_ns, output_ns)

    def record_failure(self, ns: int) -> None:
        """Count a request that was refused or failed after `ns` nanoseconds."""
        with self._lock:
            self._failure.add(ns)

    def totals(self) -> Totals:
        """The counters, all of one moment."""
        with self._lock:
            return Totals(
                success=self._success.count,
                failure=self._failure.count,
                rows=self._rows,
                executions=self._executions,
                request_ns=self._success.ns,
                queue_ns=self._queue.ns,
                input_ns=self._phases.input.ns,
                infer_ns=self._phases.infer.ns,
                output_ns=self._phases.output.ns,
                latencies=tuple(self._latencies),
            )

    def message(self, name: str, version: int) -> pb.ModelStatistics:
        """The counters as the protocol has them."""
        with self._lock:
            phases = self._phases
            return pb.ModelStatistics(
                name=name,
                version=str(version),
                last_inference=self._last_ms,
                inference_count=self._rows,
                execution_count=self._executions,
                inference_stats=pb.InferStatistics(
                    success=self._success.message(),
                    fail=self._failure.message(),
                    queue=self._queue.message(),
                    compute_input=phases.input.message(),
                    compute_infer=phases.infer.message(),
                    compute_output=phases.output.message(),
                ),
                batch_stats=[
                    pb.InferBatchStatistics(
                        batch_size=rows,
                        compute_input=batch.input.message(),
                        compute_infer=batch.infer.message(),
                        compute_output=batch.output.message(),
                    )
                    for rows, batch in sorted(self._by_batch.items())
                ],
            )
