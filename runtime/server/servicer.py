"""The protocol's methods over the repository and the data plane.

In: gRPC requests. Out: responses, or a status with one plain sentence. Invariant: no unexpected exception's text
reaches a client, and every method that is not built answers UNIMPLEMENTED, by name.
"""

import logging
import threading
from collections.abc import Callable
from importlib import metadata
from typing import Any, NoReturn, TypeVar

import grpc

from proto import open_inference_pb2 as pb
from runtime.server.dataplane import AbandonedError, Call, ExhaustedError, InvalidRequestError, infer
from runtime.server.model import Model, Tensor
from runtime.server.repository import NotFoundError, Repository
from runtime.server.settings import MODEL_FILE, Every, Latest, Specific, VersionPolicy

LOG = logging.getLogger("tilefuse.server")

SERVER_NAME = "tilefuse"
PLATFORM = "onnxruntime_onnx"
EXTENSIONS = ("model_configuration", "statistics")
"""What works beyond the core of the protocol, under the names that its extensions have."""

_STATUS: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFoundError, grpc.StatusCode.NOT_FOUND),
    (ExhaustedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (AbandonedError, grpc.StatusCode.CANCELLED),
)
_NO_SHARED_MEMORY = "shared memory is not supported, send tensors in the request"

Context = grpc.ServicerContext
Response = TypeVar("Response")


def _refusal(method: str, reason: str) -> Callable[["InferenceService", Any, Context], NoReturn]:
    """A method that is not built."""

    def refuse(service: "InferenceService", request: Any, context: Context) -> NoReturn:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method}: {reason}")
        raise AssertionError("ServicerContext.abort always raises")

    return refuse


class InferenceService:
    """Answers every method of `GRPCInferenceService`.

    `ready` is set by whoever loads the models, and cleared for shutdown. `active` counts inference requests whose
    answer has not left yet.
    """

    def __init__(self, repository: Repository, *, byte_limit: int) -> None:
        self.ready = threading.Event()
        self._repository = repository
        self._byte_limit = byte_limit
        self._version = _installed_version()
        self._lock = threading.Lock()
        self._active = 0

    @property
    def active(self) -> int:
        """The number of inference requests in flight."""
        with self._lock:
            return self._active

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
        return pb.ServerMetadataResponse(name=SERVER_NAME, version=self._version, extensions=list(EXTENSIONS))

    def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        """Inputs and outputs of a model."""
        model = _answer(context, lambda: self._repository.find(request.name, request.version))
        return pb.ModelMetadataResponse(
            name=model.name,
            versions=[str(version) for version in self._repository.versions(model.name)],
            platform=PLATFORM,
            inputs=[_tensor_metadata(tensor) for tensor in model.inputs],
            outputs=[_tensor_metadata(tensor) for tensor in model.outputs],
        )

    def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        """Run a model."""
        with self._lock:
            self._active += 1
        if not context.add_callback(self._finished):  # the call ended before it began
            self._finished()
        call = Call(request=request, wanted=context.is_active, byte_limit=self._byte_limit)
        return _answer(context, lambda: infer(self._repository.find(request.model_name, request.model_version), call))

    def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        """A model's configuration, completed from the model itself."""
        model = _answer(context, lambda: self._repository.find(request.name, request.version))
        return pb.ModelConfigResponse(config=_config(model))

    def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        """Counters of one model, or of all when no name is given."""
        if request.name:
            models = (_answer(context, lambda: self._repository.find(request.name, request.version)),)
        else:
            models = self._repository.models()
        return pb.ModelStatisticsResponse(
            model_stats=[model.statistics.message(model.name, model.version) for model in models]
        )

    def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        """Every version that was found, with its state."""
        return pb.RepositoryIndexResponse(
            models=[
                pb.RepositoryIndexResponse.ModelIndex(
                    name=entry.name, version=str(entry.version), state=entry.state, reason=entry.reason
                )
                for entry in self._repository.index()
                if entry.state == "READY" or not request.ready
            ]
        )

    ModelStreamInfer = _refusal("ModelStreamInfer", "streaming is not supported, use ModelInfer")
    RepositoryModelLoad = _refusal("RepositoryModelLoad", "models are loaded when the server starts, not on request")
    RepositoryModelUnload = _refusal("RepositoryModelUnload", "models stay until the server stops")
    SystemSharedMemoryStatus = _refusal("SystemSharedMemoryStatus", _NO_SHARED_MEMORY)
    SystemSharedMemoryRegister = _refusal("SystemSharedMemoryRegister", _NO_SHARED_MEMORY)
    SystemSharedMemoryUnregister = _refusal("SystemSharedMemoryUnregister", _NO_SHARED_MEMORY)
    CudaSharedMemoryStatus = _refusal("CudaSharedMemoryStatus", _NO_SHARED_MEMORY)
    CudaSharedMemoryRegister = _refusal("CudaSharedMemoryRegister", _NO_SHARED_MEMORY)
    CudaSharedMemoryUnregister = _refusal("CudaSharedMemoryUnregister", _NO_SHARED_MEMORY)
    TraceSetting = _refusal("TraceSetting", "tracing is not supported")
    LogSettings = _refusal("LogSettings", "log settings are fixed when the server starts")

    def _finished(self) -> None:
        with self._lock:
            self._active -= 1


def _answer(context: Context, work: Callable[[], Response]) -> Response:
    """What `work` returns, or the status that its error means."""
    try:
        return work()
    except Exception as error:
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), None)
        reason = str(error)
        if status is None:
            LOG.exception("a request failed unexpectedly")
            status, reason = grpc.StatusCode.INTERNAL, "internal error, the server's log has the details"
    context.abort(status, reason)
    raise AssertionError("ServicerContext.abort always raises")


def _installed_version() -> str:
    try:
        return metadata.version("tilefuse")
    except metadata.PackageNotFoundError:
        return "not installed"  # it runs from a checkout


def _tensor_metadata(tensor: Tensor) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(
        name=tensor.name, datatype=tensor.datatype.wire, shape=tensor.wire_shape
    )


def _config(model: Model) -> pb.ModelConfig:
    batched = model.settings.max_batch_size > 0
    return pb.ModelConfig(
        name=model.name,
        platform=PLATFORM,
        backend="onnxruntime",
        default_model_filename=MODEL_FILE,
        version_policy=_version_policy(model.settings.version_policy),
        max_batch_size=model.settings.max_batch_size,
        input=[
            pb.ModelInput(
                name=tensor.name,
                data_type=tensor.datatype.config,
                dims=tensor.wire_shape[1:] if batched else tensor.wire_shape,
            )
            for tensor in model.inputs
        ],
        output=[
            pb.ModelOutput(
                name=tensor.name,
                data_type=tensor.datatype.config,
                dims=tensor.wire_shape[1:] if batched else tensor.wire_shape,
            )
            for tensor in model.outputs
        ],
    )


def _version_policy(policy: VersionPolicy) -> pb.ModelVersionPolicy:
    match policy:
        case Latest(count=count):
            return pb.ModelVersionPolicy(latest=pb.ModelVersionPolicy.Latest(num_versions=count))
        case Specific(versions=versions):
            return pb.ModelVersionPolicy(specific=pb.ModelVersionPolicy.Specific(versions=versions))
        case Every():
            return pb.ModelVersionPolicy(all=pb.ModelVersionPolicy.All())
