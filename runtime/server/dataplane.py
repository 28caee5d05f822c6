"""The whole path of an inference request: bytes to arrays, arrays through the scheduler, arrays to bytes.

In: a loaded model and an `InferRequest`. Out: the bytes of a `ModelInferResponse`, or an error that says whose fault it
is. Invariant: a request that is wrong is refused before it can join a batch, and nothing is shared between requests but
what their headers say, which is found out once for requests of equal headers.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proto import open_inference_pb2 as pb
from runtime.server.errors import AbandonedError, ExhaustedError, InvalidRequestError
from runtime.server.infer_message import InferRequest, answer_bytes
from runtime.server.model import Model, Plan, SentTensor, Tensor
from runtime.server.padding import pad, trim
from runtime.server.scheduler import Entry
from runtime.server.statistics import failure_reason
from runtime.wire import (
    Array,
    WireError,
    check_shape,
    decode_contents,
    decode_raw,
    encode_contents,
    view_raw,
)

MOST_PARAMETERS = 64
"""The most parameters of a request or a tensor."""
LONGEST_ID = 1024
"""Characters of a request's id, which is echoed."""
MOST_PLANS = 256
"""Headers that are remembered for a model."""


@dataclass(slots=True)
class Call:
    """What the transport of a request knows about it."""

    wanted: Callable[[], bool]
    """Does the client still wait for the answer?"""
    byte_limit: int
    """The most bytes that one input, or the answer, may take."""
    notify: Callable[[Callable[[], None]], None] = lambda wake: None
    """Registers what to call when the client stops waiting."""
    step_aside: Callable[[], None] = lambda: None
    """Called, in the same thread, before what may take long."""


def infer(model: Model, request: InferRequest, call: Call) -> bytes:
    """Answer one request.

    Raises:
        RequestError: it gets no answer, and why.
    """
    started = time.perf_counter_ns()
    entry: Entry | None = None
    try:
        plan = _plan(model, request, call.byte_limit)
        feeds = read_inputs(plan, request)
        padding = model.settings.padding
        padded = pad(padding, model.inputs, feeds) if padding is not None else None
        entry = _entry(model, plan, padded.feeds if padded else feeds, request, call)
        if not call.wanted():
            raise AbandonedError("the request was cancelled or its deadline passed before it could run")
        read = time.perf_counter_ns()
        results: Sequence[Array] = model.scheduler.run(entry)
        split = time.perf_counter_ns()
        if padding is not None and padded is not None:
            results = trim(padding, plan.outputs, results, padded.extent)
        answer = _write(model, plan, request, results, call.byte_limit)
    except Exception as error:
        reason = failure_reason(error, ran=entry is not None and entry.started > 0)
        model.statistics.record_failure(time.perf_counter_ns() - started, reason)
        raise
    model.statistics.record_success(
        entry.rows,
        queue=entry.started - entry.queued,
        reading=read - started + entry.joined - entry.started,
        running=entry.ran - entry.joined,
        writing=time.perf_counter_ns() - split,
    )
    return answer


def _plan(model: Model, request: InferRequest, byte_limit: int) -> Plan:
    """What the request asks for. InvalidRequestError: naming the first thing that is wrong."""
    if len(request.id) > LONGEST_ID:
        raise InvalidRequestError(f"the id has {len(request.id)} characters, at most {LONGEST_ID} are accepted")
    header = request.header if request.raw else None  # typed contents are part of the header
    if header is not None:
        plan = model.plans.get(header)
        if plan is not None:
            return plan
    message = request.message()
    refuse_parameters(message, generates=model.engine is not None)
    if request.raw:
        _check_count(request, len(message.inputs))
    plan = Plan(*_announced(model, message, bool(request.raw), byte_limit))
    _read_batch(model, message, plan)
    if header is not None:
        if len(model.plans) >= MOST_PLANS:
            model.plans.clear()
        model.plans[header] = plan
    return plan


def _announced(
    model: Model, message: pb.ModelInferRequest, raw: bool, byte_limit: int
) -> tuple[tuple[SentTensor, ...], tuple[Tensor, ...], tuple[str, ...], bool]:
    """The tensors that the request lists: exactly the model's inputs, of its types and shapes; the outputs, and their
    names; whether the data are typed contents.
    """
    known = model.by_name
    sent: dict[str, SentTensor] = {}
    symbols: dict[str, tuple[int, str]] = {}
    for entry in message.inputs:
        name = entry.name
        tensor = known.get(name)
        if tensor is None:
            raise InvalidRequestError(f"unknown input {shown(name)}; the model has {', '.join(known) or 'none'}")
        if name in sent:
            raise InvalidRequestError(f"input {name!r} is given twice")
        if raw and entry.HasField("contents"):
            raise InvalidRequestError(f"input {name!r} has contents, but raw_input_contents is used as well")
        try:
            shape = tuple(entry.shape)
            _check_type(tensor, entry)
            count = check_shape(shape, itemsize=_itemsize(tensor), limit=byte_limit)
            _check_shape(model, tensor, shape=shape, symbols=symbols)
        except WireError as error:
            raise InvalidRequestError(f"input {name!r}: {error}") from error
        sent[name] = SentTensor(tensor, shape, count)
    if len(sent) != len(known):
        missing = ", ".join(repr(name) for name in known if name not in sent)
        raise InvalidRequestError(f"input {missing} is missing")
    outputs = choose_outputs(model, message)
    return tuple(sent.values()), outputs, tuple(tensor.name for tensor in outputs), not raw


def read_inputs(plan: Plan, request: InferRequest) -> dict[str, Array]:
    """The request's tensors by name.

    Raises:
        InvalidRequestError: the data do not fit what is announced.
    """
    raw = request.raw
    if raw:
        _check_count(request, len(plan.inputs))
    feeds: dict[str, Array] = {}
    for index, sent in enumerate(plan.inputs):
        tensor = sent.tensor
        datatype, shape, count = tensor.datatype, sent.shape, sent.count
        try:
            if raw:
                feeds[tensor.name] = decode_raw(raw[index], datatype=datatype, shape=shape, count=count)
            else:
                contents = request.message().inputs[index].contents
                feeds[tensor.name] = decode_contents(contents, datatype=datatype, shape=shape, count=count)
        except WireError as error:
            raise InvalidRequestError(f"input {tensor.name!r}: {error}") from error
    return feeds


def _check_count(request: InferRequest, listed: int) -> None:
    if len(request.raw) != listed:
        raise InvalidRequestError(
            f"raw_input_contents holds {len(request.raw)} tensors, but the request lists {listed} inputs"
        )


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


def _read_batch(model: Model, message: pb.ModelInferRequest, plan: Plan) -> None:
    """Put into the plan what the scheduler needs to know."""
    settings = model.settings
    if not settings.max_batch_size:
        return
    extents = {sent.shape[0] for sent in plan.inputs}
    if len(extents) > 1:
        raise InvalidRequestError(f"the batch has {' and '.join(map(str, sorted(extents)))} rows in its inputs")
    plan.rows = extents.pop() if extents else 1
    if settings.batching is not None:
        _read_queue_parameters(settings.batching.priorities, message, plan)


def _entry(model: Model, plan: Plan, feeds: dict[str, Array], request: InferRequest, call: Call) -> Entry:
    """The request as the scheduler sees it."""
    entry = Entry(
        feeds,
        plan.names,
        call.wanted,
        call.notify,
        call.step_aside,
        size=request.size,
        rows=plan.rows,
        priority=plan.priority,
        timeout=plan.timeout,
    )
    if model.settings.batching is not None and plan.rows:
        entry.group = tuple((name, feeds[name].shape[1:]) for name in model.by_name)
    return entry


def _read_queue_parameters(levels: int, request: pb.ModelInferRequest, plan: Plan) -> None:
    if not request.parameters:
        return
    priority = _whole_number(request, "priority")
    if priority and levels:
        if priority > levels:
            raise InvalidRequestError(f"parameter 'priority' is {priority}, but the model has levels 1 to {levels}")
        plan.priority = priority
    timeout = _whole_number(request, "timeout")
    if timeout:
        plan.timeout = timeout / 1e6


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


def refuse_parameters(request: pb.ModelInferRequest, *, generates: bool = False) -> None:
    """Refuse what would change the answer: silence about it would be a wrong answer. `generates`: as a decoder, the
    model keeps sequences for streams.
    """
    if len(request.parameters) > MOST_PARAMETERS:
        raise InvalidRequestError(f"{len(request.parameters)} parameters are more than the {MOST_PARAMETERS} accepted")
    for key in request.parameters:
        if key in ("sequence_id", "sequence_start", "sequence_end"):
            kept = "its sequences are those of ModelStreamInfer; ModelInfer takes the caches as inputs and"
            reason = f"{kept} keeps none" if generates else "this model keeps no state between requests"
            raise InvalidRequestError(f"parameter {key!r}: {reason}")
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


def _write(model: Model, plan: Plan, request: InferRequest, results: Sequence[Array], byte_limit: int) -> bytes:
    """The answer: raw, unless the client sent typed contents and every output has a typed form."""
    size = sum([array.nbytes for array in results])
    if size > byte_limit:
        raise ExhaustedError(f"the answer takes {size} bytes, more than the {byte_limit} of a message")
    if plan.typed and all(tensor.datatype.contents for tensor in plan.outputs):
        return answer_bytes(_head(model, plan, results, typed=True), request.id, ())
    shapes = tuple([array.shape for array in results])
    known, head = plan.answered
    if known != shapes or not head:
        head = _head(model, plan, results, typed=False)
        plan.answered = shapes, head
    return answer_bytes(head, request.id, [view_raw(array) for array in results])


def _head(model: Model, plan: Plan, results: Sequence[Array], *, typed: bool) -> bytes:
    """The answer but for the request's id and raw contents."""
    response = pb.ModelInferResponse(model_name=model.name, model_version=str(model.version))
    for tensor, result in zip(plan.outputs, results, strict=True):
        entry = response.outputs.add(name=tensor.name, datatype=tensor.datatype.wire, shape=result.shape)
        if typed:
            entry.contents.CopyFrom(encode_contents(result))
    return response.SerializeToString()
