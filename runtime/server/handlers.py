"""Binds the service's methods to gRPC: bytes in, bytes out, errors as statuses.

In: an `InferenceService`. Out: a handler for every method of the protocol's service. Invariants: bytes that are no
message are INVALID_ARGUMENT; no unexpected exception's text reaches a client.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from proto import open_inference_pb2 as pb
from runtime.server import errors
from runtime.server.direct import CallContext
from runtime.server.infer_message import read_request
from runtime.server.operations.observe import Observer, Told

LOG = logging.getLogger("tilefuse.server")

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
INFER = "ModelInfer"
Context = CallContext

_STATUS: dict[type[Exception], grpc.StatusCode] = {
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.ExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.AbandonedError: grpc.StatusCode.CANCELLED,
    errors.TimedOutError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.LoadFailedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnsupportedError: grpc.StatusCode.UNIMPLEMENTED,
}


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """The status and the sentence that tell a client of `error`; one that is not meant for clients is logged."""
    status = _STATUS.get(type(error))
    if status is not None:
        return status, str(error)
    LOG.error("a request failed unexpectedly", exc_info=error)
    return grpc.StatusCode.INTERNAL, "internal error, the server's log has the details"


def inference_handlers(service: object, observer: Observer) -> grpc.GenericRpcHandler:
    """Handlers of all methods; `service` has one of the same name for each, of (request, context), or for streams of
    (requests, context) that yields. ModelInfer has the request and the answer as `infer_message` has them.
    """
    handlers: dict[str, Any] = {}
    for method in SERVICE.methods:
        work = getattr(service, method.name)
        name = f"/{SERVICE.full_name}/{method.name}"
        read = read_request if method.name == INFER else _reader(getattr(pb, method.input_type.name))
        serializer = bytes if method.name == INFER else getattr(pb, method.output_type.name).SerializeToString
        if method.server_streaming:
            handlers[method.name] = grpc.stream_stream_rpc_method_handler(
                _stream(name, read, work, observer), response_serializer=serializer
            )
        else:
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(
                _unary(name, read, work, observer), response_serializer=serializer
            )
    return grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)


def _reader(kind: Any) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return kind.FromString(data)
        except DecodeError as error:
            raise errors.InvalidRequestError(f"the {len(data)} bytes are no {kind.__name__}") from error

    return read


def _unary(
    name: str, read: Callable[[bytes], Any], work: Callable[[Any, Context], Any], observer: Observer
) -> Callable[[bytes, Context], Any]:
    def answer(data: bytes, context: Context) -> Any:
        try:
            return work(read(data), context)
        except Exception as error:  # noqa: BLE001 - every error becomes a status
            status, reason = status_of(error)
        context.abort(status, reason)
        raise AssertionError("ServicerContext.abort always raises")

    def observed(data: bytes, context: Context) -> Any:
        with observer.watch(name, context) as told:
            try:
                request = read(data)
                _tell_model(told, request)
                return work(request, context)
            except Exception as error:  # noqa: BLE001 - every error becomes a status
                told.status, reason = status_of(error)
        context.abort(told.status, reason)
        raise AssertionError("ServicerContext.abort always raises")

    return answer if observer.idle else observed


def _stream(
    name: str,
    read: Callable[[bytes], Any],
    work: Callable[[Iterator[Any], Context], Iterator[Any]],
    observer: Observer,
) -> Callable[[Iterator[bytes], Context], Iterator[Any]]:
    def answer(messages: Iterator[bytes], context: Context) -> Iterator[Any]:
        with observer.watch(name, context) as told:
            try:
                yield from work((read(data) for data in messages), context)
                return
            except grpc.RpcError:  # the client or the drain ended the stream while the next message was waited for
                told.status = grpc.StatusCode.CANCELLED
                return
            except Exception as error:  # noqa: BLE001 - every error becomes a status
                told.status, reason = status_of(error)
        if context.is_active():
            context.abort(told.status, reason)

    return answer


def _tell_model(told: Told, request: Any) -> None:
    model = getattr(request, "model_name", "") or getattr(request, "name", "")
    if model:
        told.fields["model"] = model[:128]
