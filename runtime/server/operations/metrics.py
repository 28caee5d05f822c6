"""The server's counters for Prometheus, under the names that Triton Inference Server gives them.

In: a repository and a budget, read when asked. Out: text in Prometheus' format. Invariant: nothing is counted here, so
metrics and ModelStatistics agree.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.server.budget import Budget
from runtime.server.generation.counters import GenerationTotals
from runtime.server.generation.engine import Engine
from runtime.server.model import Model
from runtime.server.operations.machine_load import ProcessorUse, memory_use
from runtime.server.repository import Repository
from runtime.server.statistics import BUCKETS_MS, Totals

LABELS = ("model", "version")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_COUNTERS: tuple[tuple[str, str, Callable[[Totals], float]], ...] = (
    ("nv_inference_request_success", "Answered inference requests", lambda t: t.success),
    ("nv_inference_count", "Rows of the batch dim that were answered", lambda t: t.rows),
    ("nv_inference_exec_count", "Runs of the model", lambda t: t.executions),
    ("nv_inference_request_duration_us", "Time of answered requests in the server", lambda t: t.request_ns / 1e3),
    ("nv_inference_queue_duration_us", "Time that they waited for an instance", lambda t: t.queue_ns / 1e3),
    ("nv_inference_compute_input_duration_us", "Time that reading their inputs took", lambda t: t.input_ns / 1e3),
    ("nv_inference_compute_infer_duration_us", "Time that their runs took", lambda t: t.infer_ns / 1e3),
    ("nv_inference_compute_output_duration_us", "Time that writing their outputs took", lambda t: t.output_ns / 1e3),
)
_GENERATION_COUNTERS: tuple[tuple[str, str, Callable[[GenerationTotals], float]], ...] = (
    ("tokens", "Tokens that were generated", lambda t: t.tokens),
    ("prompt_tokens", "Tokens of prompts that were read", lambda t: t.prompt_tokens),
    ("steps", "Runs that gave each of their streams a token", lambda t: t.steps),
    ("step_rows", "Streams of these runs, added up", lambda t: t.step_rows),
    (
        "copied_bytes",
        "Bytes of caches copied as streams came and went",
        lambda t: t.copied_bytes,
    ),
)
_GENERATION_GAUGES: tuple[tuple[str, str, Callable[[Engine], float]], ...] = (
    ("streams", "Requests for tokens that are being answered", lambda e: e.active),
    ("kept_sequences", "Sequences whose cache is kept for their next request", lambda e: e.kept),
    ("cache_bytes", "Bytes of caches that are set aside", lambda e: e.reserved_bytes),
    ("cache_limit_bytes", "Bytes that caches may take", lambda e: e.settings.cache_bytes),
)
# The library appends _total to the names of counters; Triton's have none.
_TOTAL = re.compile(r"^(# (?:HELP|TYPE) nv_\w+)_total ", re.MULTILINE)


class Metrics:
    """What a scrape gives."""

    def __init__(self, repository: Repository, budget: Budget, calls: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_ServerCollector(repository, budget, calls))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    def text(self) -> bytes:
        """All metrics as they are now."""
        return _TOTAL.sub(r"\1 ", generate_latest(self._registry).decode()).encode()


class _ServerCollector(Collector):
    def __init__(self, repository: Repository, budget: Budget, calls: Callable[[], int]) -> None:
        self._repository = repository
        self._budget = budget
        self._calls = calls
        self._processors = ProcessorUse()

    def collect(self) -> Iterator[Metric]:
        """One family per metric, one sample per model version."""
        models = [(model, model.statistics.totals()) for model in self._repository.models()]
        for name, text, value in _COUNTERS:
            family = Metric(name, text, "counter")
            for model, totals in models:
                family.add_sample(name, _labels(model), value(totals))
            yield family
        failures = Metric("nv_inference_request_failure", "Inference requests that got an error", "counter")
        for model, totals in models:
            for reason, count in totals.failures.items():
                failures.add_sample(failures.name, {**_labels(model), "reason": reason}, count)
        yield failures
        pending = GaugeMetricFamily("nv_inference_pending_request_count", "Waiting for an instance", labels=LABELS)
        running = GaugeMetricFamily("tilefuse_model_requests", "Requests that use the model now", labels=LABELS)
        fused = GaugeMetricFamily("tilefuse_model_fused_regions", "Fused nodes of the model", labels=LABELS)
        latency = HistogramMetricFamily(
            "tilefuse_request_latency_seconds", "Answered requests by their time in the server", labels=LABELS
        )
        for model, totals in models:
            values = tuple(_labels(model).values())
            pending.add_metric(values, model.waiting)
            running.add_metric(values, model.usage.count)
            fused.add_metric(values, model.fused)
            latency.add_metric(values, _cumulated(BUCKETS_MS, totals.latencies), totals.request_ns / 1e9)
        yield from (pending, running, fused, latency)
        yield from _generation_metrics([model for model, _ in models])
        yield from self._machine()
        yield GaugeMetricFamily("tilefuse_open_calls", "Calls accepted and not answered yet", value=self._calls())
        yield GaugeMetricFamily("tilefuse_in_flight_requests", "Requests in flight", value=self._budget.requests)
        yield GaugeMetricFamily("tilefuse_in_flight_bytes", "Bytes of requests in flight", value=self._budget.bytes)

    def _machine(self) -> Iterator[Metric]:
        share, memory = self._processors.since_last(), memory_use()
        if share is not None:
            yield GaugeMetricFamily("nv_cpu_utilization", "Of all cores since the last scrape, 0 to 1", value=share)
        if memory is not None:
            yield GaugeMetricFamily("nv_cpu_memory_total_bytes", "The machine's memory", value=memory.total)
            yield GaugeMetricFamily("nv_cpu_memory_used_bytes", "What of it is not available", value=memory.used)


def _generation_metrics(models: Sequence[Model]) -> Iterator[Metric]:
    """What the models that generate tokens count."""
    engines = [(model, model.engine, model.engine.counters.totals()) for model in models if model.engine is not None]
    if not engines:
        return
    for name, text, count in _GENERATION_COUNTERS:
        counter = CounterMetricFamily(f"tilefuse_generation_{name}", text, labels=LABELS)
        for model, _, totals in engines:
            counter.add_metric(tuple(_labels(model).values()), count(totals))
        yield counter
    for name, text, value in _GENERATION_GAUGES:
        gauge = GaugeMetricFamily(f"tilefuse_generation_{name}", text, labels=LABELS)
        for model, engine, _ in engines:
            gauge.add_metric(tuple(_labels(model).values()), value(engine))
        yield gauge
    first = HistogramMetricFamily("tilefuse_time_to_first_token_seconds", "From request to first token", labels=LABELS)
    between = HistogramMetricFamily("tilefuse_time_per_token_seconds", "From one token to the next", labels=LABELS)
    for model, _, totals in engines:
        for family, durations in ((first, totals.first), (between, totals.between)):
            buckets = _cumulated(durations.bounds_ms, durations.counts)
            family.add_metric(tuple(_labels(model).values()), buckets, durations.ns / 1e9)
    yield from (first, between)


def _labels(model: Model) -> dict[str, str]:
    return {"model": model.name, "version": str(model.version)}


def _cumulated(bounds_ms: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Buckets as Prometheus wants them: how many took at most so long."""
    bounds = [str(bound / 1000) for bound in bounds_ms] + ["+Inf"]
    return [(bound, count) for bound, count in zip(bounds, itertools.accumulate(counts), strict=True)]
