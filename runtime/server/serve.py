"""The life of a server: bind, load, answer, drain.

In: a repository folder and `ServerOptions`. Out: whether the shutdown lost a call. Invariant: an accepted call is
answered, unless it takes longer than the drain limit.

Calls run on threads (`grpc.server`), not on an event loop (`grpc.aio`): measured on small tensors, threads answer 1.2
to 1.7 times as many, ONNX Runtime releases the interpreter lock while it computes, and the path stays plain code.
ModelInfer takes a shorter way (`direct`) and answers two to three times as many. The event loop's lead on large tensors
is a matter of memory: glibc gives buffers of megabytes back to the kernel after every request and pays for their pages
again; `_keep_freed_memory` stops that. A request's bytes are read only once its call may be worked on, so `workers`
bounds the memory of what is in flight.
"""

import ctypes
import gc
import logging
import platform
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from runtime.server.budget import Budget
from runtime.server.control import EXPLICIT, MODES, NONE, POLL, Control
from runtime.server.direct import DirectCall, DirectCalls, attach
from runtime.server.drain import CountingPool
from runtime.server.errors import RequestError
from runtime.server.folders import RepositoryError
from runtime.server.handlers import INFER, SERVICE, inference_handlers
from runtime.server.loading import Loader
from runtime.server.operations.access import Access, AccessInterceptor, check_access, group_of
from runtime.server.operations.observe import Observer, make_tracer
from runtime.server.operations.status import StatusServer
from runtime.server.repository import Repository
from runtime.server.servicer import InferenceService, installed_version
from runtime.server.transport import (
    COMPRESSIONS,
    ListenError,
    TransportOptions,
    add_reflection,
    bind,
    channel_options,
    is_loopback,
)

LOG = logging.getLogger("tilefuse.server")

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How to serve."""

    transport: TransportOptions = field(default_factory=TransportOptions)
    workers: int = 64
    """Calls that are worked on at the same time; more wait. A call that waits in a model's queue is one of them."""
    waiting: int = 1024
    """Calls that may wait for a worker; more are answered RESOURCE_EXHAUSTED."""
    in_flight_bytes: int = 2**30
    """Bytes of the requests that are worked on; one more is answered RESOURCE_EXHAUSTED."""
    drain_seconds: float = 30.0
    """How long a shutdown waits for calls in flight."""
    control_mode: str = NONE
    """none: load all models at start. poll: and follow changes of the folder. explicit: load on request."""
    load_models: tuple[str, ...] = ()
    """With explicit: what to load at start."""
    poll_seconds: float = 15.0
    access: Access | None = None
    """Who may call what; None: everybody everything that is enabled."""
    status_host: str = "127.0.0.1"
    status_port: int | None = None
    """Of the status page and the metrics; 0 picks a free one, None: there is none."""
    direct: bool = True
    """Answer ModelInfer straight from gRPC core, where grpcio lets us."""
    log_calls: bool = False
    """Log a line for every call."""
    trace_endpoint: str = ""
    """Where to send OpenTelemetry traces; empty: nowhere."""


@dataclass(frozen=True)
class MethodDetails(grpc.HandlerCallDetails):
    """A method whose handler is asked for."""

    method: str
    invocation_metadata: Any = ()


class RunningServer:
    """A server that listens. Models are loaded by `load`; `drain` ends it."""

    def __init__(self, options: ServerOptions) -> None:
        if options.control_mode not in MODES:
            raise ListenError(f"the model control mode is {options.control_mode!r}, but it must be {', '.join(MODES)}")
        _check_access(options)
        self.options = options
        self.repository = Repository()
        self._control: Control | None = None
        self._budget = Budget(options.in_flight_bytes)
        self._tracer = make_tracer(options.trace_endpoint) if options.trace_endpoint else None
        observer = Observer(options.log_calls, self._tracer)
        self.service = InferenceService(
            self.repository,
            byte_limit=options.transport.message_bytes,
            budget=self._budget,
            control_mode=options.control_mode,
            observer=observer,
        )
        self._health = health.HealthServicer()
        self._pool = CountingPool(options.workers)
        self._server = grpc.server(
            self._pool,  # pyright: ignore[reportArgumentType] - gRPC calls submit only
            options=channel_options(options.transport),
            maximum_concurrent_rpcs=options.workers + options.waiting,
            compression=COMPRESSIONS[options.transport.compression],
            interceptors=[] if options.access is None else [AccessInterceptor(options.access)],
        )
        handlers = inference_handlers(self.service, observer)
        self._server.add_generic_rpc_handlers((handlers,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._health.set(health.OVERALL_HEALTH, NOT_SERVING)
        add_reflection(self._server)
        self.port = bind(self._server, options.transport)
        self._direct = self._attach(handlers) if options.direct else None
        self.status = self._start_status(options)
        self._server.start()
        if self._direct is not None:
            self._direct.start()
        LOG.info("listening on %s:%d", options.transport.host, self.port)

    def load(self, root: Path, loader: Loader) -> None:
        """Load the repository as the control mode says, and declare the server ready.

        Raises:
            RepositoryError: a model cannot be served.
        """
        control = self._control = Control(self.repository, root, loader, on_change=self._show_health)
        options = self.options
        if options.control_mode == EXPLICIT:
            control.list_all()
            for name in options.load_models:
                try:
                    control.load(name)
                except RequestError as error:
                    raise RepositoryError(str(error)) from error
        else:
            try:
                control.load_all()
            except RepositoryError as error:
                if options.control_mode != POLL or not root.is_dir():
                    raise
                LOG.error("%s", error)
        if options.control_mode == POLL:
            control.poll_every(options.poll_seconds)
        self.service.control = control
        self._health.set(health.OVERALL_HEALTH, SERVING)
        self.service.ready.set()
        LOG.info("ready")

    def drain(self) -> bool:
        """Stop taking calls, answer those in flight, and stop. True when none was lost.

        Streams that wait for their client, and those that never end by themselves, such as health watches, are cut.
        """
        self.service.ready.clear()
        self._health.enter_graceful_shutdown()
        if self._control is not None:
            self._control.stop()
        # The limit is ours to keep: when gRPC's own grace ends, it cancels calls, and none would be left to count.
        self._server.stop(self.options.drain_seconds + 60)
        deadline = time.monotonic() + self.options.drain_seconds
        while self._busy() and time.monotonic() < deadline:
            self.service.end_idle_streams()
            time.sleep(0.02)
        lost = self._busy()
        self._server.stop(0).wait(1.0)
        self._pool.shutdown(wait=not lost)
        if self._direct is not None and not lost:
            self._direct.close()
        if self.status is not None:
            self.status.stop()
        if self._tracer is not None:
            self._tracer.shutdown()
        return not lost

    def _attach(self, handlers: grpc.GenericRpcHandler) -> DirectCalls | None:
        """Have ModelInfer answered directly, by the same handler and under the same rules."""
        options, method = self.options, f"/{SERVICE.full_name}/{INFER}"
        handler: Any = handlers.service(MethodDetails(method))

        def admit(call: DirectCall) -> None:
            if options.access is not None:
                check_access(options.access, call, group_of(method))

        return attach(
            self._server, method, handler.unary_unary, workers=options.workers, waiting=options.waiting, admit=admit
        )

    def _start_status(self, options: ServerOptions) -> StatusServer | None:
        if options.status_port is None:
            return None
        status = StatusServer(
            options.status_host,
            options.status_port,
            repository=self.repository,
            budget=self._budget,
            calls=self._open_calls,
            ready=self.service.ready.is_set,
            version=installed_version(),
        )
        LOG.info("status page at http://%s:%d", options.status_host, status.port)
        return status

    def _open_calls(self) -> int:
        """Calls that were accepted and are not answered, those that wait for a worker included."""
        return self._pool.pending + (self._direct.pending if self._direct is not None else 0)

    def _busy(self) -> bool:
        return self._open_calls() > 0 or self._budget.requests > 0

    def _show_health(self, name: str) -> None:
        self._health.set(name, SERVING if self.repository.versions(name) else NOT_SERVING)


def _check_access(options: ServerOptions) -> None:
    """Refuse rules that cannot work or would give secrets away. ListenError."""
    transport, access = options.transport, options.access
    if access is not None and access.uses_tokens and transport.tls_cert is None and not is_loopback(transport.host):
        raise ListenError(f"bearer tokens would travel in the clear to {transport.host}: give tls_cert and tls_key")
    if access is not None and access.uses_subjects and transport.tls_client_ca is None:
        raise ListenError("rules name subjects of client certificates, but tls_client_ca is not given")
    if transport.tls_cert is None and not is_loopback(transport.host):
        LOG.warning("listening on %s without TLS: anybody on the way can read and change the calls", transport.host)


def serve(root: Path, loader: Loader, *, options: ServerOptions) -> bool:
    """Serve `root` until SIGTERM or SIGINT. True when the shutdown answered every call that was accepted.

    Raises:
        ListenError: the address is taken or no address.
        RepositoryError: a model cannot be served.
    """
    _keep_freed_memory()
    signals = _Signals()
    with signals.caught():
        server = RunningServer(options)
        try:
            server.load(root, loader)
            gc.collect()
            gc.freeze()  # what was imported and loaded stays: no later collection need look through it
            signals.interrupt = False
        except (RepositoryError, KeyboardInterrupt) as error:
            server.drain()
            if isinstance(error, RepositoryError):
                raise
            return True
        signals.stop.wait()
        LOG.info("stopping: answering the calls in flight, for at most %g s", options.drain_seconds)
        return server.drain()


class _Signals:
    """SIGTERM and SIGINT: they interrupt the main thread while models load, and set `stop` from then on."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.interrupt = True

    @contextmanager
    def caught(self) -> Generator[None]:
        """Handle both signals inside the block."""
        previous = {number: signal.signal(number, self._arrived) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        self.stop.set()
        if self.interrupt:
            self.interrupt = False
            raise KeyboardInterrupt


def _keep_freed_memory() -> None:
    """Have glibc keep up to 1 GiB of freed buffers for the next request; elsewhere there is nothing to set."""
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
    mallopt(mmap_threshold, 32 * 2**20)
    mallopt(trim_threshold, 2**30)
    mallopt(top_pad, 64 * 2**20)
