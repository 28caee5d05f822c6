"""The whole path of an inference request: message to arrays, arrays through the session, arrays to message.

In: a loaded model and a `ModelInferRequest`. Out: a `ModelInferResponse`, or an error that says whose fault it is.
Invariant: a request that is wrong is refused before the session sees it, and nothing is shared between requests.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proto import open_inference_pb2 as pb
from runtime import ort_values
from runtime.server.model import Model, Tensor
from runtime.server.ort_errors import RUN_ERRORS
from runtime.server.repository import shown
from runtime.server.statistics import Timing
from runtime.wire import (
    Array,
    WireError,
    check_shape,
    decode_contents,
    decode_raw,
    encode_contents,
    encode_raw,
)


class InvalidRequestError(Exception):
    """The request cannot be answered as it is; the message is fit for the client."""


class ExhaustedError(Exception):
    """The request needs more memory than there is."""


class AbandonedError(Exception):
    """The client no longer waits: it cancelled, or its deadline passed before the session ran."""


@dataclass(frozen=True)
class Call:
    """One request with what its transport knows about it."""

    request: pb.ModelInferRequest
    wanted: Callable[[], bool]
    """Does the client still wait for the answer?"""
    byte_limit: int
    """The most bytes that one input may take."""


def infer(model: Model, call: Call) -> pb.ModelInferResponse:
    """Answer one request.

    Raises:
        InvalidRequestError, ExhaustedError, AbandonedError: as they say.
    """
    started = time.perf_counter_ns()
    try:
        feeds = read_inputs(model, call)
        outputs = choose_outputs(model, call.request)
        if not call.wanted():
            raise AbandonedError("the request was cancelled or its deadline passed before it could run")
        read = time.perf_counter_ns()
        results = _run(model, feeds, outputs)
        ran = time.perf_counter_ns()
        response = _write(model, call.request, outputs, results)
    except (InvalidRequestError, ExhaustedError, AbandonedError):
        model.statistics.record_failure(time.perf_counter_ns() - started)
        raise
    timing = Timing(input=read - started, infer=ran - read, output=time.perf_counter_ns() - ran)
    model.statistics.record_success(timing, rows=_rows(model, feeds))
    return response


def read_inputs(model: Model, call: Call) -> dict[str, Array]:
    """The request's tensors by name: exactly the model's inputs, of its types and shapes.

    Raises:
        InvalidRequestError: naming the first thing that is wrong.
    """
    request = call.request
    _refuse_parameters(request)
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequestError(
            f"raw_input_contents holds {len(raw)} tensors, but the request lists {len(request.inputs)} inputs"
        )
    known = {tensor.name: tensor for tensor in model.inputs}
    feeds: dict[str, Array] = {}
    symbols: dict[str, tuple[int, str]] = {}
    for index, sent in enumerate(request.inputs):
        tensor = known.get(sent.name)
        if tensor is None:
            raise InvalidRequestError(f"unknown input {shown(sent.name)}; the model has {', '.join(known) or 'none'}")
        if sent.name in feeds:
            raise InvalidRequestError(f"input {sent.name!r} is given twice")
        if raw and sent.HasField("contents"):
            raise InvalidRequestError(f"input {sent.name!r} has contents, but raw_input_contents is used as well")
        try:
            _check_type(tensor, sent)
            count = check_shape(sent.shape, itemsize=_itemsize(tensor), limit=call.byte_limit)
            _check_shape(model, tensor, shape=tuple(sent.shape), symbols=symbols)
            datatype, shape = tensor.datatype, tuple(sent.shape)
            feeds[sent.name] = (
                decode_raw(raw[index], datatype=datatype, shape=shape, count=count)
                if raw
                else decode_contents(sent.contents, datatype=datatype, shape=shape, count=count)
            )
        except WireError as error:
            raise InvalidRequestError(f"input {sent.name!r}: {error}") from error
    missing = [name for name in known if name not in feeds]
    if missing:
        raise InvalidRequestError(f"input {', '.join(map(repr, missing))} is missing")
    return feeds


def choose_outputs(model: Model, request: pb.ModelInferRequest) -> tuple[Tensor, ...]:
    """The outputs that the request asks for, in its order; all of them when it names none.

    Raises:
        InvalidRequestError: a name is unknown or given twice.
    """
    known = {tensor.name: tensor for tensor in model.outputs}
    chosen: dict[str, Tensor] = {}
    for wanted in request.outputs:
        if wanted.name not in known:
            raise InvalidRequestError(f"unknown output {shown(wanted.name)}; the model has {', '.join(known)}")
        if wanted.name in chosen:
            raise InvalidRequestError(f"output {wanted.name!r} is asked for twice")
        chosen[wanted.name] = known[wanted.name]
    return tuple(chosen.values()) or model.outputs


def _refuse_parameters(request: pb.ModelInferRequest) -> None:
    """Refuse what would change the answer: silence about it would be a wrong answer."""
    for key in request.parameters:
        if key in ("sequence_id", "sequence_start", "sequence_end"):
            raise InvalidRequestError(f"parameter {key!r}: this server keeps no state between requests")
    for tensor in (*request.inputs, *request.outputs):
        for key in tensor.parameters:
            if key.startswith("shared_memory"):
                raise InvalidRequestError(f"{shown(tensor.name)}: shared memory is not supported, send the data")
            if key == "classification":
                raise InvalidRequestError(f"{shown(tensor.name)}: the classification extension is not supported")


def _check_type(tensor: Tensor, sent: pb.ModelInferRequest.InferInputTensor) -> None:
    if sent.datatype != tensor.datatype.wire:
        raise WireError(f"datatype is {shown(sent.datatype)}, but the model takes {tensor.datatype.wire}")


def _itemsize(tensor: Tensor) -> int:
    return 4 if tensor.datatype.dtype.hasobject else tensor.datatype.dtype.itemsize  # text: at least its length


def _check_shape(model: Model, tensor: Tensor, *, shape: tuple[int, ...], symbols: dict[str, tuple[int, str]]) -> None:
    wanted = list(tensor.wire_shape)
    if len(shape) != len(wanted) or any(dim not in (-1, extent) for dim, extent in zip(wanted, shape, strict=True)):
        raise WireError(f"shape is {list(shape)}, but the model takes {wanted}")
    limit = model.settings.max_batch_size
    if limit and shape[0] > limit:
        raise WireError(f"the batch has {shape[0]} rows, but max_batch_size is {limit}")
    for symbol, extent in zip(tensor.shape, shape, strict=True):
        if isinstance(symbol, str) and symbol:
            first, owner = symbols.setdefault(symbol, (extent, tensor.name))
            if first != extent:
                raise WireError(f"dim {symbol!r} is {extent}, but it is {first} in input {owner!r}")


def _run(model: Model, feeds: dict[str, Array], outputs: Sequence[Tensor]) -> list[Array]:
    """Run the session, which releases the interpreter lock meanwhile."""
    try:
        return ort_values.run(model.session, [tensor.name for tensor in outputs], feeds)
    except RUN_ERRORS as error:
        # The inputs have the right types and shapes, yet the model could not run on them: an index out of a table's
        # range, or lengths that do not broadcast. ONNX Runtime tells these apart from lack of memory in words only.
        if "allocate memory" in str(error) or "bad_alloc" in str(error):
            raise ExhaustedError("the model ran out of memory on inputs of these shapes") from error
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())
        raise InvalidRequestError(
            f"the model cannot run on these inputs ({shapes}): a value or length is out of range"
        ) from error


def _write(
    model: Model, request: pb.ModelInferRequest, outputs: Sequence[Tensor], results: Sequence[Array]
) -> pb.ModelInferResponse:
    """The response: raw, unless the client sent typed contents and every output has a typed form."""
    response = pb.ModelInferResponse(model_name=model.name, model_version=str(model.version), id=request.id)
    typed = not request.raw_input_contents and all(tensor.datatype.contents for tensor in outputs)
    for tensor, result in zip(outputs, results, strict=True):
        entry = response.outputs.add(name=tensor.name, datatype=tensor.datatype.wire, shape=result.shape)
        if typed:
            entry.contents.CopyFrom(encode_contents(result))
        else:
            response.raw_output_contents.append(encode_raw(result))
    return response


def _rows(model: Model, feeds: dict[str, Array]) -> int:
    if model.settings.max_batch_size == 0 or not feeds:
        return 1
    return next(iter(feeds.values())).shape[0]
