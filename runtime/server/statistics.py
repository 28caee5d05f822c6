"""Counters of one model version.

In: one record per request. Out: `ModelStatistics` messages. Invariant: all counters of a message are from one moment.
"""

import threading
import time
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass

from proto import open_inference_pb2 as pb
from runtime.server.errors import AbandonedError, ExhaustedError, TimedOutError
from runtime.server.generation.counters import Counters

REJECTED, CANCELED, BACKEND, OTHER = "REJECTED", "CANCELED", "BACKEND", "OTHER"
REASONS: tuple[str, ...] = (REJECTED, CANCELED, BACKEND, OTHER)
"""Why requests failed, in Triton's words: the queue refused them, their client left, their run failed, all else."""


def failure_reason(error: Exception, *, ran: bool) -> str:
    """Which of `REASONS` an error is; `ran`: the model was run for the request."""
    if isinstance(error, AbandonedError):
        return CANCELED
    if ran:
        return BACKEND
    return REJECTED if isinstance(error, ExhaustedError | TimedOutError) else OTHER


@dataclass(slots=True)
class _Phases:
    """How often, and the nanoseconds of the three phases of a run."""

    count: int = 0
    reading: int = 0
    running: int = 0
    writing: int = 0

    def add(self, reading: int, running: int, writing: int) -> None:
        self.count += 1
        self.reading += reading
        self.running += running
        self.writing += writing

    def messages(self) -> dict[str, pb.StatisticDuration]:
        return {
            "compute_input": pb.StatisticDuration(count=self.count, ns=self.reading),
            "compute_infer": pb.StatisticDuration(count=self.count, ns=self.running),
            "compute_output": pb.StatisticDuration(count=self.count, ns=self.writing),
        }


BUCKETS_MS = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Upper bounds of the latency histogram; there is one more bucket above."""
BUCKETS_NS = tuple(int(bound * 1_000_000) for bound in BUCKETS_MS)


@dataclass(frozen=True)
class Totals:
    """Counters at one moment; times in nanoseconds."""

    success: int
    failures: dict[str, int]
    """By reason."""
    rows: int
    executions: int
    request_ns: int
    queue_ns: int
    input_ns: int
    infer_ns: int
    output_ns: int
    latencies: tuple[int, ...]
    """Answered requests by latency, as `BUCKETS_MS` divides it."""

    @property
    def failure(self) -> int:
        """Failed requests."""
        return sum(self.failures.values())


class Statistics:
    """Thread-safe counters since the model was loaded."""

    def __init__(self) -> None:
        self.generation = Counters()
        self._lock = threading.Lock()
        self._answered = _Phases()
        self._answered_ns = 0
        self._queue_ns = 0
        self._failed: dict[str, int] = dict.fromkeys(REASONS, 0)
        self._failed_ns = 0
        self._by_batch: defaultdict[int, _Phases] = defaultdict(_Phases)
        self._executions = 0
        self._rows = 0
        self._last_ms = 0
        self._latencies = [0] * (len(BUCKETS_NS) + 1)

    def record_success(self, rows: int, *, queue: int, reading: int, running: int, writing: int) -> None:
        """Count an answered request of `rows` batched rows (1 for a model without a batch dim): nanoseconds that it
        waited, that its inputs were read, that the session ran, and that its outputs were written.
        """
        took = queue + reading + running + writing
        now = time.time_ns() // 1_000_000
        bucket = bisect_left(BUCKETS_NS, took)
        with self._lock:
            self._answered.add(reading, running, writing)
            self._answered_ns += took
            self._queue_ns += queue
            self._rows += rows
            self._last_ms = now
            self._latencies[bucket] += 1

    def record_execution(self, rows: int, reading: int, running: int, writing: int) -> None:
        """Count a run of the session, of one request or a batch."""
        with self._lock:
            self._executions += 1
            self._by_batch[rows].add(reading, running, writing)

    def record_failure(self, ns: int, reason: str) -> None:
        """Count a request that was refused or failed after `ns` nanoseconds, for one of `REASONS`."""
        with self._lock:
            self._failed[reason] += 1
            self._failed_ns += ns

    def totals(self) -> Totals:
        """The counters, all of one moment."""
        with self._lock:
            return Totals(
                success=self._answered.count,
                failures=dict(self._failed),
                rows=self._rows,
                executions=self._executions,
                request_ns=self._answered_ns,
                queue_ns=self._queue_ns,
                input_ns=self._answered.reading,
                infer_ns=self._answered.running,
                output_ns=self._answered.writing,
                latencies=tuple(self._latencies),
            )

    def message(self, name: str, version: int) -> pb.ModelStatistics:
        """The counters as the protocol has them."""
        with self._lock:
            answered = self._answered.count
            return pb.ModelStatistics(
                name=name,
                version=str(version),
                last_inference=self._last_ms,
                inference_count=self._rows,
                execution_count=self._executions,
                inference_stats=pb.InferStatistics(
                    success=pb.StatisticDuration(count=answered, ns=self._answered_ns),
                    fail=pb.StatisticDuration(count=sum(self._failed.values()), ns=self._failed_ns),
                    queue=pb.StatisticDuration(count=answered, ns=self._queue_ns),
                    **self._answered.messages(),
                ),
                batch_stats=[
                    pb.InferBatchStatistics(batch_size=rows, **batch.messages())
                    for rows, batch in sorted(self._by_batch.items())
                ],
            )
