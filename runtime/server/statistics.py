"""Counters of one model version.

In: one record per request. Out: `ModelStatistics` messages. Invariant: all counters of a message are from one moment.
"""

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

from proto import open_inference_pb2 as pb


@dataclass(frozen=True)
class Timing:
    """Nanoseconds that one answered request spent reading its inputs, in the session, and writing its outputs."""

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

    def add(self, timing: Timing) -> None:
        self.input.add(timing.input)
        self.infer.add(timing.infer)
        self.output.add(timing.output)


class Statistics:
    """Thread-safe counters since the model was loaded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._success = _Total()
        self._failure = _Total()
        self._phases = _Phases()
        self._by_batch: defaultdict[int, _Phases] = defaultdict(_Phases)
        self._rows = 0
        self._last_ms = 0

    def record_success(self, timing: Timing, *, rows: int) -> None:
        """Count an answered request of `rows` batched rows; 1 for a model without a batch dim."""
        now = time.time_ns() // 1_000_000
        with self._lock:
            self._success.add(timing.input + timing.infer + timing.output)
            self._phases.add(timing)
            self._by_batch[rows].add(timing)
            self._rows += rows
            self._last_ms = now

    def record_failure(self, ns: int) -> None:
        """Count a request that was refused or failed after `ns` nanoseconds."""
        with self._lock:
            self._failure.add(ns)

    def message(self, name: str, version: int) -> pb.ModelStatistics:
        """The counters as the protocol has them. Nothing queues, so `queue` counts requests and no time."""
        with self._lock:
            phases = self._phases
            return pb.ModelStatistics(
                name=name,
                version=str(version),
                last_inference=self._last_ms,
                inference_count=self._rows,
                execution_count=phases.infer.count,
                inference_stats=pb.InferStatistics(
                    success=self._success.message(),
                    fail=self._failure.message(),
                    queue=pb.StatisticDuration(count=self._success.count, ns=0),
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
