"""One loaded model version: its session and the tensors it promises.

In: an ONNX Runtime session and the folder's settings. Out: a `Model` whose inputs and outputs the protocol can carry.
Invariant: the declared shapes agree with the session's, so what the metadata says is what is checked and what runs.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from onnxruntime import InferenceSession

from runtime.server.settings import DeclaredTensor, Settings
from runtime.server.statistics import Statistics
from runtime.wire import BY_ONNX, Datatype

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


@dataclass(frozen=True)
class Model:
    """A model version that is ready to run."""

    name: str
    version: int
    session: InferenceSession
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    settings: Settings
    statistics: Statistics = field(default_factory=Statistics)


class NodeArgument(Protocol):
    """What ONNX Runtime says about an input or output."""

    name: str
    type: str
    shape: Sequence[Dim]


def describe(name: str, version: int, *, session: InferenceSession, settings: Settings) -> Model:
    """The model behind `session`, checked against `settings`.

    Raises:
        ModelError: a tensor has a type that the protocol does not carry, or the settings declare something else.
    """
    inputs = tuple(_tensor(argument) for argument in session.get_inputs())
    outputs = tuple(_tensor(argument) for argument in session.get_outputs())
    if settings.max_batch_size > 0:
        for tensor in (*inputs, *outputs):
            if not tensor.shape or isinstance(tensor.shape[0], int):
                raise ModelError(
                    f"config.pbtxt sets max_batch_size {settings.max_batch_size}, but the first dim of {tensor.name!r} "
                    f"is not dynamic: its shape is {list(tensor.shape)}"
                )
    return Model(
        name=name,
        version=version,
        session=session,
        inputs=_refine(inputs, settings.inputs, batched=settings.max_batch_size > 0),
        outputs=_refine(outputs, settings.outputs, batched=settings.max_batch_size > 0),
        settings=settings,
    )


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
