"""Traces for OpenTelemetry, sent over OTLP/gRPC. Needs the `telemetry` extra; nothing is imported without it.

In: the endpoint. Out: a `Tracer`. Invariant: exporting happens in a thread of its own and never delays a call.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind

from runtime.server.direct import CallContext
from runtime.server.operations.observe import PREFIX, STATUS_CODE


class OtlpTracer:
    """Makes one server span per call."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "tilefuse"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tilefuse")

    @contextmanager
    def span(self, name: str, context: CallContext) -> Generator[Any]:
        """A span of the call, under the caller's if the metadata name one."""
        carrier = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        service, _, method = name.removeprefix("/").partition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
        with self._tracer.start_as_current_span(
            name.removeprefix("/"), context=extract(carrier), kind=SpanKind.SERVER, attributes=attributes
        ) as span:
            yield span

    def record(self, name: str, *, since: int, code: int, fields: dict[str, Any]) -> None:
        """A span from `since`, in nanoseconds, to now, under the span of the call."""
        attributes = {STATUS_CODE: code, **{f"{PREFIX}{key}": value for key, value in fields.items()}}
        self._tracer.start_span(name, start_time=since, attributes=attributes).end()

    def shutdown(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def trace_to(endpoint: str) -> OtlpTracer:
    """A tracer that sends to `endpoint`, such as http://localhost:4317."""
    return OtlpTracer(OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://")))
