"""The server's counters for Prometheus, under the names that Triton Inference Server gives them.

In: a repository and a budget, read when asked. Out: text in Prometheus' format. Invariant: nothing is counted here, so
metrics and ModelStatistics agree.
"""

import re
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.server.budget import Budget
from runtime.server.model import Model
from runtime.server.repository import Repository
from runtime.server.statistics import BUCKETS_MS, Totals

LABELS = ("model", "version")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_COUNTERS: tuple[tuple[str, str, Callable[[Totals], float]], ...] = (
    ("nv_inference_request_success", "Answered inference requests", lambda t: t.success),
    ("nv_inference_request_failure", "Inference requests that got an error", lambda t: t.failure),
    ("nv_inference_count", "Rows of the batch dim that were answered", lambda t: t.rows),
    ("nv_inference_exec_count", "Runs of the model", lambda t: t.executions),
    ("nv_inference_request_duration_us", "Time of answered requests in the server", lambda t: t.request_ns / 1e3),
    ("nv_inference_queue_duration_us", "Time that they waited for an instance", lambda t: t.queue_ns / 1e3),
    ("nv_inference_compute_input_duration_us", "Time that reading their inputs took", lambda t: t.input_ns / 1e3),
    ("nv_inference_compute_infer_duration_us", "Time that their runs took", lambda t: t.infer_ns / 1e3),
    ("nv_inference_compute_output_duration_us", "Time that writing their outputs took", lambda t: t.output_ns / 1e3),
)
# The library appends _total to the names of counters; Triton's have none.
_TOTAL = re.compile(r"^(# (?:HELP|TYPE) nv_\w+)_total ", re.MULTILINE)


class Metrics:
    """What a scrape gives."""

    def __init__(self, repository: Repository, budget: Budget) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_ServerCollector(repository, budget))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    def text(self) -> bytes:
        """All metrics as they are now."""
        return _TOTAL.sub(r"\1 ", generate_latest(self._registry).decode()).encode()


class _ServerCollector(Collector):
    def __init__(self, repository: Repository, budget: Budget) -> None:
        self._repository = repository
        self._budget = budget

    def collect(self) -> Iterator[Metric]:
        """One family per metric, one sample per model version."""
        models = [(model, model.statistics.totals()) for model in self._repository.models()]
        for name, text, value in _COUNTERS:
            family = Metric(name, text, "counter")
            for model, totals in models:
                family.add_sample(name, _labels(model), value(totals))
            yield family
        pending = GaugeMetricFamily("nv_inference_pending_request_count", "Waiting for an instance", labels=LABELS)
        running = GaugeMetricFamily("tilefuse_model_requests", "Requests that use the model now", labels=LABELS)
        fused = GaugeMetricFamily("tilefuse_model_fused_regions", "Fused nodes of the model", labels=LABELS)
        latency = HistogramMetricFamily(
            "tilefuse_request_latency_seconds", "Answered requests by their time in the server", labels=LABELS
        )
        for model, totals in models:
            values = tuple(_labels(model).values())
            pending.add_metric(values, model.scheduler.waiting)
            running.add_metric(values, model.usage.count)
            fused.add_metric(values, model.fused)
            latency.add_metric(values, _cumulated(totals), totals.request_ns / 1e9)
        yield from (pending, running, fused, latency)
        yield GaugeMetricFamily("tilefuse_in_flight_requests", "Requests in flight", value=self._budget.requests)
        yield GaugeMetricFamily("tilefuse_in_flight_bytes", "Bytes of requests in flight", value=self._budget.bytes)


def _labels(model: Model) -> dict[str, str]:
    return {"model": model.name, "version": str(model.version)}


def _cumulated(totals: Totals) -> list[tuple[str, float]]:
    """Buckets as Prometheus wants them: how many requests took at most so long."""
    bounds = [str(bound / 1000) for bound in BUCKETS_MS] + ["+Inf"]
    count = 0
    found: list[tuple[str, float]] = []
    for bound, more in zip(bounds, totals.latencies, strict=True):
        count += more
        found.append((bound, count))
    return found
