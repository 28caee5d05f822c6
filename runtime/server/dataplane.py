"""The whole path of an inference request: message to arrays, arrays through the scheduler, arrays to message.

In: a loaded model and a `ModelInferRequest`. Out: a `ModelInferResponse`, or an error that says whose fault it is.
Invariant: a request that is wrong is refused before it can join a batch, and nothing is shared between requests.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proto import open_inference_pb2 as pb
from runtime.server.errors import AbandonedError, ExhaustedError, InvalidRequestError
from runtime.server.model import Model, Tensor
from runtime.server.padding import pad, trim
from runtime.server.scheduler import Entry
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

MOST_PARAMETERS = 64
"""The most parameters of a request or a tensor."""
LONGEST_ID = 1024
"""Characters of a request's id, which is echoed."""


@dataclass(frozen=True)
class Call:
    """One request with what its transport knows about it."""

    request: pb.ModelInferRequest
    wanted: Callable[[], bool]
    """Does the client still wait for the answer?"""
    byte_limit: int
    """The most bytes that one input, or the answer, may take."""
    notify: Callable[[Callable[[], None]], None] = lambda wake: None
    """Registers what to call when the client stops waiting."""


def infer(model: Model, call: Call) -> pb.ModelInferResponse:
    """Answer one request.

    Raises:
        RequestError: it gets no answer, and why.
    """
    started = time.perf_counter_ns()
    try:
        request = call.request
        feeds = read_inputs(model, call)
        outputs = choose_outputs(model, request)
        padding = model.settings.padding
        padded = pad(padding, model.inputs, feeds) if padding is not None else None
        entry = _entry(model, call, padded.feeds if padded else feeds, outputs)
        if not call.wanted():
            raise AbandonedError("the request was cancelled or its deadline passed before it could run")
        read = time.perf_counter_ns()
        results: Sequence[Array] = model.scheduler.run(entry)
        if padding is not None and padded is not None:
            results = trim(padding, outputs, results, padded.extent)
        split = time.perf_counter_ns()
        response = _write(model, call, outputs, results)
    except Exception:
        model.statistics.record_failure(time.perf_counter_ns() - started)
        raise
    timing = Timing(
        queue=entry.started - entry.queued,
        input=read - started + entry.joined - entry.started,
        infer=entry.ran - entry.joined,
        output=time.perf_counter_ns() - split,
    )
    model.statistics.record_success(timing, rows=entry.rows)
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
    known = model.by_name
    feeds: dict[str, Array] = {}
    symbols: dict[str, tuple[int, str]] = {}
    for index, sent in enumerate(request.inputs):
        name = sent.name
        tensor = known.get(name)
        if tensor is None:
            raise InvalidRequestError(f"unknown input {shown(name)}; the model has {', '.join(known) or 'none'}")
        if name in feeds:
            raise InvalidRequestError(f"input {name!r} is given twice")
        if raw and sent.HasField("contents"):
            raise InvalidRequestError(f"input {name!r} has contents, but raw_input_contents is used as well")
        try:
            datatype, shape = tensor.datatype, tuple(sent.shape)
            _check_type(tensor, sent)
            count = check_shape(shape, itemsize=_itemsize(tensor), limit=call.byte_limit)
            _check_shape(model, tensor, shape=shape, symbols=symbols)
            feeds[name] = (
                decode_raw(raw[index], datatype=datatype, shape=shape, count=count)
                if raw
                else decode_contents(sent.contents, datatype=datatype, shape=shape, count=count)
            )
        except WireError as error:
            raise InvalidRequestError(f"input {name!r}: {error}") from error
    if len(feeds) != len(known):
        missing = ", ".join(repr(name) for name in known if name not in feeds)
        raise InvalidRequestError(f"input {missing} is missing")
    return feeds


def choose_outputs(model: Model, request: pb.ModelInferRequest) -> tuple[Tensor, ...]:
    """The outputs that the request asks for, in its order; all of them when it names none.

    Raises:
        InvalidRequestError: a name is unknown or given twice.
    """
    if not request.outputs:
        return model.outputs
    known = {tensor.name: tensor for tensor in model.outputs}
    chosen: dict[str, Tensor] = {}
    for wanted in request.outputs:
        if wanted.name not in known:
            raise InvalidRequestError(f"unknown output {shown(wanted.name)}; the model has {', '.join(known)}")
        if wanted.name in chosen:
            raise InvalidRequestError(f"output {wanted.name!r} is asked for twice")
        chosen[wanted.name] = known[wanted.name]
    return tuple(chosen.values())


def shown(text: str) -> str:
    """What a client sent, quoted and short enough for a status message."""
    return repr(text if len(text) <= 64 else text[:61] + "...")


def _entry(model: Model, call: Call, feeds: dict[str, Array], outputs: Sequence[Tensor]) -> Entry:
    """The request as the scheduler sees it."""
    names = tuple(tensor.name for tensor in outputs)
    settings = model.settings
    entry = Entry(feeds, names, call.wanted, call.notify)
    if settings.max_batch_size:
        extents = {array.shape[0] for array in feeds.values()}
        if len(extents) > 1:
            raise InvalidRequestError(f"the batch has {' and '.join(map(str, sorted(extents)))} rows in its inputs")
        entry.rows = extents.pop() if extents else 1
        if settings.batching is not None:
            if entry.rows:
                entry.group = tuple((name, feeds[name].shape[1:]) for name in model.by_name)
            _read_queue_parameters(settings.batching.priorities, call.request, entry)
    return entry


def _read_queue_parameters(levels: int, request: pb.ModelInferRequest, entry: Entry) -> None:
    if not request.parameters:
        return
    priority = _whole_number(request, "priority")
    if priority and levels:
        if priority > levels:
            raise InvalidRequestError(f"parameter 'priority' is {priority}, but the model has levels 1 to {levels}")
        entry.priority = priority
    timeout = _whole_number(request, "timeout")
    if timeout:
        entry.timeout = timeout / 1e6


def _whole_number(request: pb.ModelInferRequest, key: str) -> int:
    """The parameter `key`, 0 when it is not there."""
    if key not in request.parameters:
        return 0
    sent = request.parameters[key]
    kind = sent.WhichOneof("parameter_choice")
    value = sent.uint64_param if kind == "uint64_param" else sent.int64_param
    if kind not in ("int64_param", "uint64_param") or value < 0:
        raise InvalidRequestError(f"parameter {key!r} must be a whole number, 0 or more")
    return value


def _refuse_parameters(request: pb.ModelInferRequest) -> None:
    """Refuse what would change the answer: silence about it would be a wrong answer."""
    if len(request.id) > LONGEST_ID:
        raise InvalidRequestError(f"the id has {len(request.id)} characters, at most {LONGEST_ID} are accepted")
    if len(request.parameters) > MOST_PARAMETERS:
        raise InvalidRequestError(f"{len(request.parameters)} parameters are more than the {MOST_PARAMETERS} accepted")
    for key in request.parameters:
        if key in ("sequence_id", "sequence_start", "sequence_end"):
            raise InvalidRequestError(f"parameter {key!r}: this model keeps no state between requests")
    for tensor in (*request.inputs, *request.outputs):
        if not tensor.parameters:
            continue
        if len(tensor.parameters) > MOST_PARAMETERS:
            raise InvalidRequestError(f"{shown(tensor.name)} has more than the {MOST_PARAMETERS} parameters accepted")
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
    wanted = tensor.wire_shape
    if len(shape) != len(wanted) or any(dim not in (-1, extent) for dim, extent in zip(wanted, shape, strict=True)):
        raise WireError(f"shape is {list(shape)}, but the model takes {list(wanted)}")
    limit = model.settings.max_batch_size
    if limit and shape[0] > limit:
        raise WireError(f"the batch has {shape[0]} rows, but max_batch_size is {limit}")
    for symbol, extent in zip(tensor.shape, shape, strict=True):
        if isinstance(symbol, str) and symbol:
            first, owner = symbols.setdefault(symbol, (extent, tensor.name))
            if first != extent:
                raise WireError(f"dim {symbol!r} is {extent}, but it is {first} in input {owner!r}")


def _write(model: Model, call: Call, outputs: Sequence[Tensor], results: Sequence[Array]) -> pb.ModelInferResponse:
    """The response: raw, unless the client sent typed contents and every output has a typed form."""
    request = call.request
    size = sum(array.nbytes for array in results)
    if size > call.byte_limit:
        raise ExhaustedError(f"the answer takes {size} bytes, more than the {call.byte_limit} of a message")
    response = pb.ModelInferResponse(model_name=model.name, model_version=str(model.version), id=request.id)
    typed = not request.raw_input_contents and all(tensor.datatype.contents for tensor in outputs)
    for tensor, result in zip(outputs, results, strict=True):
        entry = response.outputs.add(name=tensor.name, datatype=tensor.datatype.wire, shape=result.shape)
        if typed:
            entry.contents.CopyFrom(encode_contents(result))
        else:
            response.raw_output_contents.append(encode_raw(result))
    return response
