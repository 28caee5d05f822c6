"""One loaded model version: its session and the tensors it promises.

In: an ONNX Runtime session and the folder's settings. Out: a `Model` whose inputs and outputs the protocol can carry.
Invariant: the declared shapes agree with the session's, so what the metadata says is what is checked and what runs.
"""

import dataclasses
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from onnxruntime import InferenceSession

from runtime import ort_values
from runtime.server.errors import ExhaustedError, InvalidRequestError
from runtime.server.generation.engine import Engine
from runtime.server.ort_errors import RUN_ERRORS
from runtime.server.scheduler import Feeds, Scheduler
from runtime.server.settings import DeclaredTensor, Padding, Settings
from runtime.server.statistics import Statistics
from runtime.wire import BY_ONNX, Array, Datatype

LEAST_INSTANCES = 4

Dim = int | str | None
"""A fixed extent, a symbol whose extent is the same in all inputs of a request, or any extent."""


class ModelError(Exception):
    """A model cannot be served; the message says why."""


@dataclass(frozen=True)
class Tensor:
    """An input or output of a model, with all of its dims."""

    name: str
    datatype: Datatype
    shape: tuple[Dim, ...]

    @property
    def wire_shape(self) -> tuple[int, ...]:
        """The shape as the protocol writes it: -1 for any extent."""
        return tuple(extent if isinstance(extent, int) else -1 for extent in self.shape)


@dataclass(frozen=True, slots=True)
class SentTensor:
    """An input as a request announces it."""

    tensor: Tensor
    shape: tuple[int, ...]
    count: int
    """Elements."""


@dataclass(slots=True)
class Plan:
    """What a request asks of a model, but for its data; it was found to be right."""

    inputs: tuple[SentTensor, ...]
    outputs: tuple[Tensor, ...]
    names: tuple[str, ...]
    """Of the outputs."""
    typed: bool
    """The data are typed contents."""
    rows: int = 1
    """Rows of the batch; 1 for a model without a batch dim."""
    priority: int = 0
    timeout: float | None = None
    answered: tuple[tuple[tuple[int, ...], ...], bytes] = ((), b"")
    """Shapes of the last answer's outputs, and the part of that answer that follows from them."""


class Usage:
    """How many requests are using a model; one that is retired takes no more and can be waited for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # taken by itself, as a Condition's own methods are slower
        self._changed = threading.Condition(self._lock)
        self._count = 0

    @property
    def count(self) -> int:
        """Requests that use the model now."""
        return self._count

    def enter(self) -> None:
        """Count a request in."""
        with self._lock:
            self._count += 1

    def leave(self) -> None:
        """Count a request out."""
        with self._lock:
            self._count -= 1
            if self._count == 0:
                self._changed.notify_all()

    def wait_idle(self, seconds: float | None = None) -> bool:
        """Wait until no request uses the model; False when that took longer than `seconds`."""
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while self._count:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
        return True


@dataclass(frozen=True, eq=False)
class Model:
    """A model version that is ready to run."""

    name: str
    version: int
    session: InferenceSession
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    settings: Settings
    scheduler: Scheduler
    statistics: Statistics
    fused: int = 0
    """How many fused nodes run with their kernels."""
    engine: Engine | None = None
    """Generates tokens for streams, if the model is a decoder with a cache."""
    notes: list[str] = field(default_factory=list[str])
    """What whoever runs the server should know: why it is not fused, for instance."""
    usage: Usage = field(default_factory=Usage)
    plans: dict[bytes, Plan] = field(default_factory=dict[bytes, Plan], repr=False)
    """By the header of the requests that ask for them."""
    by_name: dict[str, Tensor] = field(init=False, repr=False)
    """The inputs by name."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {tensor.name: tensor for tensor in self.inputs})

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return self.scheduler.waiting + (self.engine.waiting if self.engine is not None else 0)

    def retire(self) -> None:
        """The model is not served any more: let go of what is kept for requests to come."""
        if self.engine is not None:
            self.engine.retire()


class NodeArgument(Protocol):
    """What ONNX Runtime says about an input or output."""

    name: str
    type: str
    shape: Sequence[Dim]


def describe(
    name: str,
    version: int,
    *,
    session: InferenceSession,
    settings: Settings,
    fused: int = 0,
    note: str = "",
    statistics: Statistics | None = None,
) -> Model:
    """The model behind `session`, checked against `settings`; it goes on with `statistics` if they are given.

    Raises:
        ModelError: a tensor has a type that the protocol does not carry, or the settings declare something else.
    """
    inputs = tuple(_tensor(argument) for argument in session.get_inputs())
    outputs = tuple(_tensor(argument) for argument in session.get_outputs())
    batched = settings.max_batch_size > 0
    if batched:
        for tensor in (*inputs, *outputs):
            if not tensor.shape or isinstance(tensor.shape[0], int):
                raise ModelError(
                    f"config.pbtxt sets max_batch_size {settings.max_batch_size}, but the first dim of {tensor.name!r} "
                    f"is not dynamic: its shape is {list(tensor.shape)}"
                )
    inputs = _refine(inputs, settings.inputs, batched=batched)
    if settings.padding is not None:
        _check_padding(settings.padding, inputs)
    counted = statistics or Statistics()
    return Model(
        name=name,
        version=version,
        session=session,
        inputs=inputs,
        outputs=_refine(outputs, settings.outputs, batched=batched),
        settings=settings,
        scheduler=_scheduler(session, settings, counted),
        statistics=counted,
        fused=fused,
        notes=[note] if note else [],
    )


def _scheduler(session: InferenceSession, settings: Settings, statistics: Statistics) -> Scheduler:
    run = ort_values.runner(session)
    default = 1 if settings.batching is not None else max(LEAST_INSTANCES, os.cpu_count() or 1)
    return Scheduler(
        partial(_run, run),
        instances=settings.instances or default,
        batching=settings.batching,
        max_rows=settings.max_batch_size,
        on_execution=statistics.record_execution,
    )


def run_session(session: InferenceSession, feeds: Feeds, outputs: tuple[str, ...]) -> list[Array]:
    """The outputs of these names. Runs without the interpreter lock.

    Raises:
        InvalidRequestError, ExhaustedError: the model could not run on these inputs.
    """
    return _run(ort_values.runner(session), feeds, outputs)


def _run(run: ort_values.Run, feeds: Feeds, outputs: tuple[str, ...]) -> list[Array]:
    try:
        return run(outputs, feeds)
    except RUN_ERRORS as error:
        # The inputs have the right types and shapes, yet the model could not run on them: an index out of a table's
        # range, or lengths that do not broadcast. ONNX Runtime tells these apart from lack of memory in words only.
        if "allocate memory" in str(error) or "bad_alloc" in str(error):
            raise ExhaustedError("the model ran out of memory on inputs of these shapes") from error
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())
        raise InvalidRequestError(
            f"the model cannot run on these inputs ({shapes}): a value or length is out of range"
        ) from error


def _check_padding(padding: Padding, inputs: Sequence[Tensor]) -> None:
    """The settings fit the model: what is padded can be told, and hidden, by name."""
    padded = {tensor.name: tensor for tensor in inputs if padding.dim in tensor.shape}
    if padding.mask not in padded:
        raise ModelError(
            f"tilefuse.toml pads dim {padding.dim!r} with mask {padding.mask!r}, but the inputs with that dim are "
            f"{', '.join(padded) or 'none'}"
        )
    for name, _ in padding.values:
        if name not in padded:
            raise ModelError(f"tilefuse.toml has padding.values.{name}, but no input of that name has {padding.dim!r}")
    for tensor in padded.values():
        if tensor.datatype.dtype.hasobject or tensor.shape.count(padding.dim) > 1:
            raise ModelError(f"input {tensor.name!r} cannot be padded: it is text, or has {padding.dim!r} twice")


def _tensor(argument: NodeArgument) -> Tensor:
    datatype = BY_ONNX.get(argument.type)
    if datatype is None:
        raise ModelError(f"{argument.name!r} is a {argument.type}, which the protocol cannot carry")
    return Tensor(argument.name, datatype, tuple(argument.shape))


def _refine(tensors: Sequence[Tensor], declared: Sequence[DeclaredTensor], *, batched: bool) -> tuple[Tensor, ...]:
    """Put declared fixed extents in place of dynamic ones."""
    by_name = {tensor.name: tensor for tensor in tensors}
    for declaration in declared:
        tensor = by_name.get(declaration.name)
        if tensor is None:
            raise ModelError(f"config.pbtxt declares {declaration.name!r}, but the model has {', '.join(by_name)}")
        dims = (-1, *declaration.dims) if batched else declaration.dims
        agree = len(dims) == len(tensor.shape) and all(
            not isinstance(extent, int) or dim == extent for dim, extent in zip(dims, tensor.shape, strict=True)
        )
        if declaration.datatype is not tensor.datatype or not agree:
            raise ModelError(
                f"config.pbtxt declares {declaration.name!r} as {declaration.datatype.wire} {list(dims)}, "
                f"but the model has {tensor.datatype.wire} {list(tensor.wire_shape)}"
            )
        shape = tuple(extent if dim == -1 else dim for dim, extent in zip(dims, tensor.shape, strict=True))
        by_name[declaration.name] = dataclasses.replace(tensor, shape=shape)
    return tuple(by_name.values())
