# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Ray is an extra: types are checked without it too.
"""The server as a Ray Serve application: every replica has the whole repository and answers every method.

In: a folder of models that every node can read. Out: an application for `serve deploy` or `serve.run`. Invariants:
requests reach a replica as the bytes that the client sent, and go through the same handlers as in `tilefuse serve`, so
that statuses and sentences are the same; nothing that only one replica would know is changed by a client.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext

from runtime.options import Options
from runtime.server.budget import Budget
from runtime.server.compiling import make_loader
from runtime.server.control import POLL, Control
from runtime.server.handlers import SERVICE, inference_handlers
from runtime.server.operations.observe import Observer
from runtime.server.repository import Repository
from runtime.server.servicer import InferenceService

WORKERS = 64
"""Calls that one replica works on at the same time."""
WAITING = 1024
"""Calls that may wait for a replica; more are answered RESOURCE_EXHAUSTED."""
MESSAGE_BYTES = 128 * 2**20
IN_FLIGHT_BYTES = 2**30
POLL_SECONDS = 15.0
HEALTH = "grpc.health.v1.Health"


@dataclass(frozen=True)
class Answer:
    """A response in bytes. Ray asks a response for its bytes by this method's name."""

    data: bytes

    def SerializeToString(self) -> bytes:
        """The bytes."""
        return self.data


class RefusedError(Exception):
    """A call ends with a status other than OK."""

    def __init__(self, status: grpc.StatusCode, reason: str) -> None:
        super().__init__(status, reason)  # both, as Ray pickles it
        self.status = status
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class ReplicaCall:
    """What a handler asks of gRPC's context, for a call that Ray has passed on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = False
        self._callbacks: list[Callable[[], None]] = []

    def is_active(self) -> bool:
        """Whether the client still waits."""
        return not self._ended

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Have `callback` called when the call ends; False if it has ended already."""
        with self._lock:
            if not self._ended:
                self._callbacks.append(callback)
            return not self._ended

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End the call with a status."""
        raise RefusedError(code, details)

    def end(self) -> None:
        """The call has been answered, or its client is gone."""
        with self._lock:
            self._ended = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


def add_to_server(servicer: Any, server: Any) -> None:
    """Register all methods with Ray's proxy, which replaces the handlers by its own: only names and kinds count."""
    del servicer
    handlers: dict[str, Any] = {}
    for method in SERVICE.methods:
        make = grpc.stream_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        handlers[method.name] = make(_unreachable)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))
    health = {
        "Check": grpc.unary_unary_rpc_method_handler(_unreachable),
        "Watch": grpc.unary_stream_rpc_method_handler(_unreachable),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(HEALTH, health),))


def _unreachable(request: Any, context: Any) -> NoReturn:
    raise AssertionError("Ray's proxy replaces this handler")


@dataclass(frozen=True)
class CallDetails(grpc.HandlerCallDetails):
    """Which method is called, in the form in which gRPC asks for its handler."""

    method: str
    invocation_metadata: Any = ()


def _unary(name: str) -> Callable[["Replica", bytes, RayServegRPCContext], Awaitable[Answer]]:
    async def method(self: "Replica", request: bytes, grpc_context: RayServegRPCContext) -> Answer:
        return await self.answer(name, request, grpc_context)

    method.__name__ = name
    return method


class Replica:
    """One process that answers calls; its methods have the protocol's names, as Ray wants it."""

    def __init__(self, repository: str) -> None:
        """Load all models of the folder `repository`. RepositoryError: one of them cannot be served."""
        logging.getLogger("tilefuse").setLevel(logging.INFO)
        models = Repository()
        self._repository = models
        self._service = InferenceService(
            models, byte_limit=MESSAGE_BYTES, budget=Budget(IN_FLIGHT_BYTES), control_mode=POLL
        )
        self._handlers = inference_handlers(self._service, Observer(False, None))
        self._pool = ThreadPoolExecutor(WORKERS, "call")
        loader = make_loader(Options.from_environment(), optimize_first=False)
        control = Control(models, Path(repository), loader, on_change=lambda name: None)  # Check looks when it is asked
        control.load_all()
        control.poll_every(POLL_SECONDS)
        self._service.control = control
        self._service.ready.set()

    async def answer(self, name: str, request: bytes, grpc_context: RayServegRPCContext) -> Answer:
        """Answer a call of one request; a status other than OK is set on Ray's context, with an empty response."""
        handler: Any = self._handlers.service(CallDetails(f"/{SERVICE.full_name}/{name}"))
        call = ReplicaCall()

        def work() -> bytes:
            return handler.response_serializer(handler.unary_unary(request, call))

        try:
            return Answer(await asyncio.get_running_loop().run_in_executor(self._pool, work))
        except RefusedError as error:
            grpc_context.set_code(error.status)
            grpc_context.set_details(error.reason)
            return Answer(b"")
        finally:
            call.end()

    async def ModelStreamInfer(
        self, request_stream: AsyncIterator[bytes], grpc_context: RayServegRPCContext
    ) -> AsyncIterator[Answer]:
        """Answer the requests of a stream one after the other; all of a stream reach the same replica."""
        handler: Any = self._handlers.service(CallDetails(f"/{SERVICE.full_name}/ModelStreamInfer"))
        loop = asyncio.get_running_loop()
        call = ReplicaCall()
        try:
            async for request in request_stream:
                answers: Iterator[Any] = handler.stream_stream(iter([request]), call)
                while (answer := await loop.run_in_executor(self._pool, next, answers, None)) is not None:
                    yield Answer(handler.response_serializer(answer))
        except RefusedError as error:
            grpc_context.set_code(error.status)
            grpc_context.set_details(error.reason)
            raise
        finally:
            call.end()

    async def Check(self, request: bytes, grpc_context: RayServegRPCContext) -> Answer:
        """Health of the server, or of the model that the request names."""
        try:
            name = health_pb2.HealthCheckRequest.FromString(request).service
        except DecodeError:
            grpc_context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
            grpc_context.set_details(f"the {len(request)} bytes are no HealthCheckRequest")
            return Answer(b"")
        if name and not self._repository.versions(name):
            grpc_context.set_code(grpc.StatusCode.NOT_FOUND)
            grpc_context.set_details("no model of this name is served")
            return Answer(b"")
        return Answer(health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING).SerializeToString())

    async def Watch(self, request: bytes, grpc_context: RayServegRPCContext) -> AsyncIterator[Answer]:
        """Not there: a stream would tell of one replica only. Clients are to ask again with Check."""
        reason = "Watch is not supported behind Ray, ask again with Check"
        grpc_context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        grpc_context.set_details(reason)
        raise RefusedError(grpc.StatusCode.UNIMPLEMENTED, reason)
        yield Answer(b"")  # makes this a stream

    ServerLive = _unary("ServerLive")
    ServerReady = _unary("ServerReady")
    ModelReady = _unary("ModelReady")
    ServerMetadata = _unary("ServerMetadata")
    ModelMetadata = _unary("ModelMetadata")
    ModelInfer = _unary("ModelInfer")
    ModelConfig = _unary("ModelConfig")
    ModelStatistics = _unary("ModelStatistics")
    RepositoryIndex = _unary("RepositoryIndex")
    RepositoryModelLoad = _unary("RepositoryModelLoad")
    RepositoryModelUnload = _unary("RepositoryModelUnload")
    SystemSharedMemoryStatus = _unary("SystemSharedMemoryStatus")
    SystemSharedMemoryRegister = _unary("SystemSharedMemoryRegister")
    SystemSharedMemoryUnregister = _unary("SystemSharedMemoryUnregister")
    CudaSharedMemoryStatus = _unary("CudaSharedMemoryStatus")
    CudaSharedMemoryRegister = _unary("CudaSharedMemoryRegister")
    CudaSharedMemoryUnregister = _unary("CudaSharedMemoryUnregister")
    TraceSetting = _unary("TraceSetting")
    LogSettings = _unary("LogSettings")


Tilefuse = serve.deployment(
    name="tilefuse",
    max_ongoing_requests=WORKERS,
    max_queued_requests=WAITING,
    graceful_shutdown_timeout_s=30,
    autoscaling_config={"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 8},
)(Replica)


def build(arguments: dict[str, str]) -> serve.Application:
    """The application; `arguments` has the key `repository`."""
    if set(arguments) != {"repository"}:
        raise ValueError(f"the arguments are {sorted(arguments)}, but there must be exactly 'repository', a folder")
    return Tilefuse.bind(arguments["repository"])
