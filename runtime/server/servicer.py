"""The protocol's methods over the repository and the data plane.

In: gRPC requests. Out: responses, or an error that `handlers` makes a status. Invariant: every method that is not built
answers UNIMPLEMENTED, with a sentence.
"""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from typing import Any, NoReturn

import grpc

from proto import open_inference_pb2 as pb
from runtime.server.budget import Budget
from runtime.server.config_message import PLATFORM, config_message, tensor_message
from runtime.server.control import EXPLICIT, Control
from runtime.server.dataplane import Call, infer
from runtime.server.direct import CallContext, DirectCall
from runtime.server.errors import InvalidRequestError, NotFoundError, UnavailableError, UnsupportedError
from runtime.server.generation.conversation import Calls, Conversation, generates
from runtime.server.generation.requests import FINAL
from runtime.server.handlers import status_of
from runtime.server.infer_message import InferRequest, of_message
from runtime.server.model import Model
from runtime.server.operations.observe import Observer
from runtime.server.repository import READY, Repository

SERVER_NAME = "tilefuse"
EXTENSIONS = ("model_configuration", "statistics", "schedule_policy", "sequence")
"""What works beyond the core of the protocol, under the names that its extensions have."""
ON_REQUEST = "model_repository"
"""The extension that the explicit control mode adds."""
_NO_SHARED_MEMORY = "shared memory is not supported, send tensors in the request"

Context = grpc.ServicerContext


def _refusal(method: str, reason: str) -> Callable[["InferenceService", Any, Context], NoReturn]:
    """A method that is not built."""

    def refuse(service: "InferenceService", request: Any, context: Context) -> NoReturn:
        raise UnsupportedError(f"{method}: {reason}")

    return refuse


class InferenceService:
    """Answers every method of `GRPCInferenceService`.

    `ready` is set by whoever loads the models, and cleared for shutdown.
    """

    def __init__(
        self,
        repository: Repository,
        *,
        byte_limit: int,
        budget: Budget,
        control_mode: str,
        observer: Observer | None = None,
    ) -> None:
        self.ready = threading.Event()
        self.control: Control | None = None
        self._repository = repository
        self._byte_limit = byte_limit
        self._budget = budget
        self._mode = control_mode
        self._version = installed_version()
        self._streams_lock = threading.Lock()
        self._idle_streams: set[Context] = set()
        self._calls = Calls(
            repository=repository,
            budget=budget,
            byte_limit=byte_limit,
            observer=observer or Observer(),
            idle=self._idle,
            answer=self._answer_in_stream,
            failure=stream_failure,
        )

    def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        """The process answers, so it lives."""
        return pb.ServerLiveResponse(live=True)

    def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        """All models are loaded and the server is not shutting down."""
        return pb.ServerReadyResponse(ready=self.ready.is_set())

    def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        """The model can answer; one that is not loaded is not ready, which is no error."""
        try:
            self._repository.find(request.name, request.version)
        except NotFoundError:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=True)

    def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        """Name, version, and the extensions that work."""
        extensions = [*EXTENSIONS, ON_REQUEST] if self._mode == EXPLICIT else EXTENSIONS
        return pb.ServerMetadataResponse(name=SERVER_NAME, version=self._version, extensions=extensions)

    def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        """Inputs and outputs of a model."""
        model = self._repository.find(request.name, request.version)
        return pb.ModelMetadataResponse(
            name=model.name,
            versions=[str(version) for version in self._repository.versions(model.name)],
            platform=PLATFORM,
            inputs=[tensor_message(tensor) for tensor in model.inputs],
            outputs=[tensor_message(tensor) for tensor in model.outputs],
        )

    def ModelInfer(self, request: InferRequest, context: CallContext) -> bytes:
        """Run a model."""
        size = request.size
        self._budget.take(size)
        if not context.add_callback(lambda: self._budget.give_back(size)):  # the call ended before it began
            self._budget.give_back(size)
        return self._infer(request, context)

    def ModelStreamInfer(
        self, requests: Iterator[pb.ModelInferRequest], context: Context
    ) -> Iterator[pb.ModelStreamInferResponse]:
        """Answer the requests of a stream, in their order; an error is its request's and does not end the stream.

        From the first request to a model that generates tokens on, requests are answered at the same time.
        """
        while True:
            with self._idle(context):
                request = next(requests, None)
            if request is None:
                return
            try:
                converse = generates(self._repository, request)
            except NotFoundError:
                converse = False  # the answer says so
            if converse:
                yield from Conversation(self._calls, context).answers(request, requests)
                return
            yield from self._answer_in_stream(request, context)

    def _answer_in_stream(
        self, request: pb.ModelInferRequest, context: Context
    ) -> Iterator[pb.ModelStreamInferResponse]:
        """The one answer to a request."""
        size = request.ByteSize()
        try:
            self._budget.take(size)
            try:
                answer = pb.ModelInferResponse.FromString(self._infer(of_message(request), context))
                answer.parameters[FINAL].bool_param = True
                yield pb.ModelStreamInferResponse(infer_response=answer)
            finally:
                self._budget.give_back(size)
        except Exception as error:
            if not context.is_active():
                raise
            yield stream_failure(request, error)

    def _infer(self, request: InferRequest, context: CallContext) -> bytes:
        call = Call(context.is_active, self._byte_limit, partial(_notify, context))
        if isinstance(context, DirectCall):
            call.step_aside = context.step_aside
        model = self._repository.take(request.model_name, request.model_version)
        try:
            return infer(model, request, call)
        finally:
            model.usage.leave()

    def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        """A model's configuration, completed from the model itself."""
        return pb.ModelConfigResponse(config=config_message(self._repository.find(request.name, request.version)))

    def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        """Counters of one model, or of all when no name is given."""
        if request.name and request.version:
            models: tuple[Model, ...] = (self._repository.find(request.name, request.version),)
        elif request.name:
            self._repository.find(request.name, "")
            models = tuple(model for model in self._repository.models() if model.name == request.name)
        else:
            models = self._repository.models()
        return pb.ModelStatisticsResponse(
            model_stats=[model.statistics.message(model.name, model.version) for model in models]
        )

    def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        """Every version that was found, with its state."""
        _refuse_repository(request.repository_name)
        return pb.RepositoryIndexResponse(
            models=[
                pb.RepositoryIndexResponse.ModelIndex(
                    name=entry.name,
                    version=str(entry.version) if entry.version else "",
                    state=entry.state,
                    reason=entry.reason,
                )
                for entry in self._repository.index()
                if entry.state == READY or not request.ready
            ]
        )

    def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        """Load a model, or load it again as it is on disk now; answered when it is ready."""
        control = self._explicit("RepositoryModelLoad")
        _refuse_repository(request.repository_name)
        if request.parameters:
            raise InvalidRequestError(
                "parameters are not accepted: files and configurations are not taken from clients"
            )
        control.load(request.model_name)
        return pb.RepositoryModelLoadResponse()

    def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        """Take a model out; answered when no request uses it any more."""
        control = self._explicit("RepositoryModelUnload")
        _refuse_repository(request.repository_name)
        if strange := request.parameters.keys() - {"unload_dependents"}:
            raise InvalidRequestError(f"parameters {', '.join(map(repr, sorted(strange)))} are not known")
        control.unload(request.model_name, wanted=context.is_active)
        return pb.RepositoryModelUnloadResponse()

    SystemSharedMemoryStatus = _refusal("SystemSharedMemoryStatus", _NO_SHARED_MEMORY)
    SystemSharedMemoryRegister = _refusal("SystemSharedMemoryRegister", _NO_SHARED_MEMORY)
    SystemSharedMemoryUnregister = _refusal("SystemSharedMemoryUnregister", _NO_SHARED_MEMORY)
    CudaSharedMemoryStatus = _refusal("CudaSharedMemoryStatus", _NO_SHARED_MEMORY)
    CudaSharedMemoryRegister = _refusal("CudaSharedMemoryRegister", _NO_SHARED_MEMORY)
    CudaSharedMemoryUnregister = _refusal("CudaSharedMemoryUnregister", _NO_SHARED_MEMORY)
    TraceSetting = _refusal("TraceSetting", "traces are set up when the server starts, not on request")
    LogSettings = _refusal("LogSettings", "log settings are fixed when the server starts")

    def end_idle_streams(self) -> None:
        """Cancel the streams that wait for their client's next request."""
        with self._streams_lock:
            for context in self._idle_streams:
                context.cancel()

    @contextmanager
    def _idle(self, context: Context) -> Generator[None]:
        with self._streams_lock:
            self._idle_streams.add(context)
        try:
            yield
        finally:
            with self._streams_lock:
                self._idle_streams.discard(context)

    def _explicit(self, method: str) -> Control:
        if self._mode != EXPLICIT:
            raise UnsupportedError(
                f"{method}: the server was started with --model-control-mode {self._mode}; only with explicit are "
                "models loaded and unloaded on request"
            )
        if self.control is None:
            raise UnavailableError("the server is starting")
        return self.control


def stream_failure(request: pb.ModelInferRequest, error: Exception) -> pb.ModelStreamInferResponse:
    """The response of a stream that tells of an error."""
    status, reason = status_of(error)
    failed = pb.ModelInferResponse(model_name=request.model_name[:128], id=request.id[:1024])
    failed.parameters[FINAL].bool_param = True
    return pb.ModelStreamInferResponse(error_message=f"[{status.name}] {reason}", infer_response=failed)


def _notify(context: CallContext, wake: Callable[[], None]) -> None:
    """Have `wake` called when the client stops waiting, be it now."""
    if not context.add_callback(wake):
        wake()


def installed_version() -> str:
    """The version of the installed distribution."""
    try:
        return metadata.version("tilefuse")
    except metadata.PackageNotFoundError:
        return "not installed"  # it runs from a checkout


def _refuse_repository(name: str) -> None:
    if name:
        raise InvalidRequestError("repository_name is given, but this server has one repository, without a name")
