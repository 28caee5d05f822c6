"""What is told of each call: a line in the log and an OpenTelemetry span, both off unless asked for.

In: calls as `handlers` runs them. Out: records and spans. Invariant: a span continues the trace that the caller's
`traceparent` names, and carries the status, never data of tensors.
"""

import importlib
import logging
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from runtime.server.direct import CallContext
from runtime.server.operations.logs import CALL

LOG = logging.getLogger("tilefuse.calls")
STATUS_CODE = "rpc.grpc.status_code"
PREFIX = "tilefuse."
"""Of the attributes of spans that are ours."""


class TracingError(Exception):
    """Traces were asked for, but OpenTelemetry is not installed."""


class Tracer(Protocol):
    """Starts a span around a call."""

    def span(self, name: str, context: CallContext) -> AbstractContextManager[Any]:
        """A context manager that gives an OpenTelemetry span."""
        ...

    def record(self, name: str, *, since: int, code: int, fields: dict[str, Any]) -> None:
        """A span of something inside the current call that began at `since`, in nanoseconds, and ends now."""
        ...

    def shutdown(self) -> None:
        """Send what is left."""
        ...


@dataclass
class Told:
    """What a call turns out to be; whoever answers it fills this in."""

    status: grpc.StatusCode = grpc.StatusCode.OK
    fields: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Observer:
    """Watches calls."""

    log_calls: bool = False
    tracer: Tracer | None = None

    @property
    def idle(self) -> bool:
        """Nothing is to be told, so that calls need not be watched."""
        return not self.log_calls and self.tracer is None

    @contextmanager
    def watch(self, method: str, context: CallContext) -> Generator[Told]:
        """Tell of the call inside the block."""
        told = Told()
        started = time.perf_counter()
        spans = self.tracer.span(method, context) if self.tracer is not None else nullcontext()
        with spans as span:
            try:
                yield told
            finally:
                milliseconds = (time.perf_counter() - started) * 1000
                if span is not None:
                    span.set_attribute(STATUS_CODE, told.status.value[0])
                    for key, value in told.fields.items():
                        span.set_attribute(f"{PREFIX}{key}", value)
                self._log(method, context, told=told, milliseconds=milliseconds)

    def tell(
        self, name: str, context: CallContext, *, since: int, status: grpc.StatusCode, fields: dict[str, Any]
    ) -> None:
        """Tell of one request among those of a stream: it began at `since`, in nanoseconds, and ends now."""
        if self.tracer is not None:
            self.tracer.record(name, since=since, code=status.value[0], fields=fields)
        self._log(name, context, told=Told(status, fields), milliseconds=(time.time_ns() - since) / 1e6)

    def _log(self, method: str, context: CallContext, *, told: Told, milliseconds: float) -> None:
        if self.log_calls:
            shown = {"method": method, "status": told.status.name, "ms": round(milliseconds, 3), **told.fields}
            text = " ".join(f"{key}={value}" for key, value in shown.items())
            LOG.info("%s", text, extra={CALL: {**shown, "peer": context.peer()}})


def make_tracer(endpoint: str) -> Tracer:
    """A tracer that sends to `endpoint`, such as http://localhost:4317.

    Raises:
        TracingError: OpenTelemetry is not installed.
    """
    try:
        traces = importlib.import_module("runtime.server.operations.traces")
    except ImportError as error:
        raise TracingError(f"traces need OpenTelemetry: pip install 'tilefuse[telemetry]' ({error})") from error
    return traces.trace_to(endpoint)
