"""The life of a server: bind, load, answer, drain.

In: a repository folder and where to listen. Out: whether the shutdown lost a call. Invariant: an accepted call is
answered, unless it takes longer than the drain limit.

Calls run on threads (`grpc.server`), not on an event loop (`grpc.aio`): measured on small tensors, threads answer 1.2
to 1.7 times as many, ONNX Runtime releases the interpreter lock while it computes, and the path stays plain code. The
event loop's lead on large tensors is a matter of memory: glibc gives buffers of megabytes back to the kernel after
every request and pays for their pages again; `_keep_freed_memory` stops that. A request's bytes are read only once a
thread takes the call, so `workers` bounds the memory of what is in flight.
"""

import ctypes
import logging
import platform
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from proto import open_inference_pb2 as pb
from proto.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from runtime.server.drain import CountingPool
from runtime.server.repository import Loader, Repository, RepositoryError
from runtime.server.servicer import InferenceService

LOG = logging.getLogger("tilefuse.server")

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LARGEST_MESSAGE = 2**31 - 2**20
"""Protobuf cannot hold more than 2 GiB."""


class ListenError(Exception):
    """The server cannot listen where it was told to."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where and how to serve."""

    host: str = "127.0.0.1"
    port: int = 8001
    """0 picks a free one."""
    workers: int = 16
    """Calls that are worked on at the same time; more wait."""
    waiting: int = 1024
    """Calls that may wait; more are answered RESOURCE_EXHAUSTED."""
    message_bytes: int = 128 * 2**20
    """The largest request and response."""
    drain_seconds: float = 30.0
    """How long a shutdown waits for calls in flight."""


class RunningServer:
    """A server that listens. Models are loaded by `load`; `drain` ends it."""

    def __init__(self, options: ServerOptions) -> None:
        if not 0 < options.message_bytes <= LARGEST_MESSAGE:
            raise ListenError(f"message size is {options.message_bytes} bytes, but 1 to {LARGEST_MESSAGE} are possible")
        self.options = options
        self.repository = Repository()
        self._service = InferenceService(self.repository, byte_limit=options.message_bytes)
        self._health = health.HealthServicer()
        self._pool = CountingPool(options.workers)
        self._server = grpc.server(
            self._pool,  # pyright: ignore[reportArgumentType] - gRPC calls submit only
            options=(
                ("grpc.max_receive_message_length", options.message_bytes),
                ("grpc.max_send_message_length", options.message_bytes),
                ("grpc.so_reuseport", 0),  # a second server on the same port is a mistake, not a share of the load
            ),
            maximum_concurrent_rpcs=options.workers + options.waiting,
        )
        add_GRPCInferenceServiceServicer_to_server(self._service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._health.set(health.OVERALL_HEALTH, NOT_SERVING)
        _add_reflection(self._server)
        self.port = _bind(self._server, options)
        self._server.start()
        LOG.info("listening on %s:%d", options.host, self.port)

    def load(self, root: Path, loader: Loader) -> None:
        """Load the repository and declare the server ready.

        Raises:
            RepositoryError: a model cannot be served.
        """
        self.repository.load(root, loader)
        for model in self.repository.models():
            self._health.set(model.name, SERVING)
        self._health.set(health.OVERALL_HEALTH, SERVING)
        self._service.ready.set()
        LOG.info("ready")

    def drain(self) -> bool:
        """Stop taking calls, answer those in flight, and stop. True when none was lost.

        Streams that never end by themselves, such as health watches, are cut once everything else is done.
        """
        self._service.ready.clear()
        self._health.enter_graceful_shutdown()
        # The limit is ours to keep: when gRPC's own grace ends, it cancels calls, and none would be left to count.
        self._server.stop(self.options.drain_seconds + 60)
        deadline = time.monotonic() + self.options.drain_seconds
        while self._busy() and time.monotonic() < deadline:
            time.sleep(0.02)
        lost = self._busy()
        self._server.stop(0).wait(1.0)
        self._pool.shutdown(wait=not lost)
        return not lost

    def _busy(self) -> bool:
        return self._pool.pending > 0 or self._service.active > 0


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


def _bind(server: grpc.Server, options: ServerOptions) -> int:
    host = f"[{options.host}]" if ":" in options.host else options.host
    try:
        port = server.add_insecure_port(f"{host}:{options.port}")
    except RuntimeError as error:
        raise ListenError(
            f"cannot listen on {host}:{options.port}: the port is taken or the address is not ours"
        ) from error
    if port == 0:
        raise ListenError(f"cannot listen on {host}:{options.port}")
    return port


def _add_reflection(server: grpc.Server) -> None:
    """Describe our services. Their files come from different descriptor pools, so they are copied into one."""
    pool = descriptor_pool.DescriptorPool()
    names: list[str] = []
    for module in (pb, health_pb2, reflection_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
        names += [service.full_name for service in module.DESCRIPTOR.services_by_name.values()]
    reflection.enable_server_reflection(names, server, pool=pool)


def _keep_freed_memory() -> None:
    """Have glibc keep up to 1 GiB of freed buffers for the next request; elsewhere there is nothing to set."""
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
    mallopt(mmap_threshold, 32 * 2**20)
    mallopt(trim_threshold, 2**30)
    mallopt(top_pad, 64 * 2**20)
