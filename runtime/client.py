"""A client of the Open Inference Protocol over gRPC: numpy arrays in, numpy arrays out.

In: the address of a server, such as `localhost:8001`, of TileFuse or any other that speaks it. Out: arrays by name.
Invariant: what the server refuses is raised as `ClientError` with the server's own words.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import grpc
import numpy as np
from numpy.typing import ArrayLike

from proto import open_inference_pb2 as pb
from proto.open_inference_pb2_grpc import GRPCInferenceServiceStub
from runtime.wire import (
    BY_WIRE,
    BYTES,
    Array,
    WireError,
    check_shape,
    datatype_of,
    decode_contents,
    decode_raw,
    encode_raw,
)

LARGEST_MESSAGE = 2**31 - 1

Response = TypeVar("Response")


class ClientError(Exception):
    """The server refused a call, could not be reached, or sent what cannot be read."""


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of a served model; -1 in `shape` is any extent."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelInfo:
    """What a server says about a model."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


class Client:
    """A connection to one server. Safe to share between threads; use it as a context manager or call `close`."""

    def __init__(self, url: str, *, timeout: float = 60.0) -> None:
        """Connect to `url`, HOST:PORT, when first used; every call may take `timeout` seconds."""
        self._timeout = timeout
        self._url = url.removeprefix("grpc://")
        self._channel = grpc.insecure_channel(
            self._url,
            options=(
                ("grpc.max_send_message_length", LARGEST_MESSAGE),
                ("grpc.max_receive_message_length", LARGEST_MESSAGE),
            ),
        )
        self._stub: Any = GRPCInferenceServiceStub(self._channel)

    def __enter__(self) -> "Client":
        """The client itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        self.close()

    def close(self) -> None:
        """Close the connection; calls in flight are cancelled."""
        self._channel.close()

    def ready(self, model: str = "", *, version: str = "") -> bool:
        """Whether the server, or one model of it, can answer now. A server that is not there is not ready."""
        try:
            if model:
                return self._call(self._stub.ModelReady, pb.ModelReadyRequest(name=model, version=version)).ready
            return self._call(self._stub.ServerReady, pb.ServerReadyRequest()).ready
        except ClientError as error:
            if isinstance(error.__cause__, grpc.RpcError) and error.__cause__.code() is grpc.StatusCode.UNAVAILABLE:
                return False
            raise

    def metadata(self, model: str, *, version: str = "") -> ModelInfo:
        """Versions, inputs and outputs of a model.

        Raises:
            ClientError: there is no such model, or no server.
        """
        answer = self._call(self._stub.ModelMetadata, pb.ModelMetadataRequest(name=model, version=version))
        return ModelInfo(
            name=answer.name,
            versions=tuple(answer.versions),
            platform=answer.platform,
            inputs=tuple(TensorInfo(entry.name, entry.datatype, tuple(entry.shape)) for entry in answer.inputs),
            outputs=tuple(TensorInfo(entry.name, entry.datatype, tuple(entry.shape)) for entry in answer.outputs),
        )

    def infer(
        self, model: str, inputs: Mapping[str, ArrayLike], *, outputs: Sequence[str] = (), version: str = ""
    ) -> dict[str, Array]:
        """Run a model: its inputs by name in, the named outputs (all when none is named) out.

        Fixed-size results are read-only views of the received bytes; text comes as object arrays of `str`.

        Raises:
            ClientError: the server refused the request, or an input cannot be sent.
        """
        request = pb.ModelInferRequest(model_name=model, model_version=version)
        for name, value in inputs.items():
            array = np.asarray(value)
            try:
                raw = encode_raw(array)
            except WireError as error:
                raise ClientError(f"input {name!r}: {error}") from error
            request.inputs.add(name=name, datatype=datatype_of(array).wire, shape=array.shape)
            request.raw_input_contents.append(raw)
        for name in outputs:
            request.outputs.add(name=name)
        return _read(self._call(self._stub.ModelInfer, request))

    def generate(
        self,
        model: str,
        prompt: Sequence[int],
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        version: str = "",
        timeout: float | None = None,
    ) -> Generator[int]:
        """Yield the tokens of a model's answer as they come; closing the iterator ends the answer.

        With a `temperature` of 0 the likeliest token is taken. The whole answer may take `timeout` seconds; None: any.

        Raises:
            ClientError: the server refused the request, failed in the middle, or the model does not generate.
        """
        request = pb.ModelInferRequest(model_name=model, model_version=version)
        request.inputs.add(name="input_ids", datatype="INT64", shape=[1, len(prompt)])
        request.raw_input_contents.append(np.array(prompt, dtype=np.int64).tobytes())
        parameters = request.parameters
        for key, number in (("max_tokens", max_tokens), ("top_k", top_k or None)):
            if number is not None:
                parameters[key].int64_param = number
        if seed is not None:
            parameters["seed"].uint64_param = seed
        parameters["temperature"].double_param = temperature
        parameters["top_p"].double_param = top_p
        parameters["ignore_eos"].bool_param = ignore_eos
        if stop_token_ids:
            parameters["stop_token_ids"].string_param = ",".join(map(str, stop_token_ids))
        yield from self._tokens(request, timeout)

    def _tokens(self, request: pb.ModelInferRequest, timeout: float | None) -> Generator[int]:
        call = self._stub.ModelStreamInfer(iter([request]), timeout=timeout)
        try:
            for message in call:
                if message.error_message:
                    raise ClientError(message.error_message)
                outputs = _read(message.infer_response)
                if "token_ids" not in outputs:
                    raise ClientError(f"model {request.model_name} does not generate tokens")
                yield int(outputs["token_ids"][0, 0])
        except grpc.RpcError as error:
            raise self._refusal(error) from error
        finally:
            call.cancel()

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=self._timeout)
        except grpc.RpcError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: Any) -> ClientError:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return ClientError(f"no server answers at {self._url}: {error.details()}")
        return ClientError(f"{error.code().name}: {error.details()}")


def random_inputs(info: ModelInfo, *, seed: int = 0) -> dict[str, Array]:
    """Inputs that suit most models: one row, 8 for any other free extent; small ids, ones for masks and flags.

    Raises:
        ClientError: the model has an input of a datatype that this client does not know.
    """
    random = np.random.default_rng(seed)
    inputs: dict[str, Array] = {}
    for tensor in info.inputs:
        datatype = BY_WIRE.get(tensor.datatype)
        if datatype is None:
            raise ClientError(f"input {tensor.name!r} has the unknown datatype {tensor.datatype!r}")
        shape = tuple((1 if axis == 0 else 8) if dim < 0 else dim for axis, dim in enumerate(tensor.shape))
        if datatype is BYTES:
            inputs[tensor.name] = np.full(shape, "text", dtype=object)
        elif datatype.dtype.kind == "b" or "mask" in tensor.name.lower():
            inputs[tensor.name] = np.ones(shape, dtype=datatype.dtype)
        elif datatype.dtype.kind in "iu":
            inputs[tensor.name] = random.integers(0, 2, shape).astype(datatype.dtype)
        else:
            inputs[tensor.name] = random.standard_normal(shape).astype(datatype.dtype)
    return inputs


def _read(answer: pb.ModelInferResponse) -> dict[str, Array]:
    raw = answer.raw_output_contents
    if raw and len(raw) != len(answer.outputs):
        raise ClientError(f"the server sent {len(answer.outputs)} outputs, but {len(raw)} raw contents")
    results: dict[str, Array] = {}
    for index, entry in enumerate(answer.outputs):
        datatype = BY_WIRE.get(entry.datatype)
        if datatype is None:
            raise ClientError(f"output {entry.name!r} has the unknown datatype {entry.datatype!r}")
        shape = tuple(entry.shape)
        try:
            count = check_shape(shape, itemsize=1, limit=LARGEST_MESSAGE)
            results[entry.name] = (
                decode_raw(raw[index], datatype=datatype, shape=shape, count=count)
                if raw
                else decode_contents(entry.contents, datatype=datatype, shape=shape, count=count)
            )
        except WireError as error:
            raise ClientError(f"output {entry.name!r}: {error}") from error
    return results
