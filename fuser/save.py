"""Writes a rewritten model, whole or not at all, without ever holding all of its weights.

Comes in: a model and where to put it. Goes out: `OUT.onnx`, and `OUT.onnx.data` beside it when the weights are too many
for one protobuf message or came from external files. External weights below the output's folder stay where they are.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

INLINE_LIMIT = 1 << 30  # bytes of weights in the model file; protobuf itself ends at 2 GiB
SMALL = 1024  # bytes up to which a tensor always stays in the model file
ALIGNMENT = 4096  # of weights in the data file, so that a runtime can map them


@dataclass(frozen=True, slots=True)
class _Placed:
    """A weight of the data file."""

    value: ir.Value
    offset: int
    length: int


def save(model: ir.Model, path: Path) -> None:
    """Write the model to `path`, replacing what is there. The model is not changed. OSError as the system raises it."""
    path = Path(path)
    data = path.with_name(f"{path.name}.data")
    everything = (value for graph in model.graphs() for value in graph.initializers.values())
    values = [value for value in everything if value.const_value is not None]
    references = {value: _kept(value.const_value, path, data) for value in values}
    kept = {value: tensor for value, tensor in references.items() if tensor is not None}
    loose = [value for value in values if value not in kept]
    stream = _has_external(values) or sum(_size(value) for value in loose) > INLINE_LIMIT
    streamed = list(_placed(loose)) if stream else []
    before = {value: value.const_value for value in values}
    with ExitStack() as undo:
        new_model, new_data = _temporary(path, undo), _temporary(data, undo)
        undo.callback(lambda: [setattr(value, "const_value", tensor) for value, tensor in before.items()])
        if streamed:
            _write(streamed, new_data)
        for value, tensor in kept.items():
            value.const_value = tensor
        for value in loose:
            value.const_value = _in_memory(value.const_value)
        for place in streamed:
            value = place.value
            value.const_value = _reference(value, data.name, place.offset, place.length, path.parent)
        new_model.write_bytes(ir.to_proto(model).SerializeToString())
        if streamed:
            os.replace(new_data, data)
        os.replace(new_model, path)


def _temporary(path: Path, undo: ExitStack) -> Path:
    """A name in the same folder that is gone when `undo` runs, unless it was moved to its place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    undo.callback(temporary.unlink, missing_ok=True)
    return temporary


def _has_external(values: list[ir.Value]) -> bool:
    return any(isinstance(value.const_value, ir.ExternalTensor) for value in values)


def _in_memory(tensor: ir.TensorProtocol | None) -> ir.TensorProtocol | None:
    """A small tensor of an external file as one of the model file: runtimes read shapes only there."""
    if not isinstance(tensor, ir.ExternalTensor) or tensor.nbytes > SMALL:
        return tensor
    return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, shape=tensor.shape, name=tensor.name)


def _size(value: ir.Value) -> int:
    return 0 if value.const_value is None else value.const_value.nbytes


def _kept(tensor: ir.TensorProtocol | None, path: Path, data: Path) -> ir.ExternalTensor | None:
    """A reference to where an external weight is already, if that is below the output's folder and stays there."""
    if not isinstance(tensor, ir.ExternalTensor) or tensor.nbytes <= SMALL:
        return None
    file = Path(tensor.path).resolve()
    folder = path.parent.resolve()
    if not file.is_relative_to(folder) or file == data.resolve():
        return None
    location = file.relative_to(folder).as_posix()
    return ir.ExternalTensor(
        location,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name or "",
        base_dir=folder,
    )


def _placed(values: list[ir.Value]) -> Iterator[_Placed]:
    offset = 0
    for value in values:
        length = _size(value)
        if length <= SMALL or value.const_value is None or value.const_value.dtype == ir.DataType.STRING:
            continue
        yield _Placed(value, offset, length)
        offset = -(-(offset + length) // ALIGNMENT) * ALIGNMENT


def _write(places: list[_Placed], path: Path) -> None:
    """One weight after the other; only one is in memory at a time."""
    with path.open("wb") as file:
        for place in places:
            tensor = place.value.const_value
            if tensor is None:
                continue
            file.seek(place.offset)
            if isinstance(tensor, ir.ExternalTensor):
                tensor.tofile(file)  # from file to file
            else:
                file.write(tensor.tobytes())


def _reference(value: ir.Value, location: str, offset: int, length: int, folder: Path) -> ir.ExternalTensor:
    tensor = value.const_value
    if tensor is None:
        raise ValueError(f"{value.name!r} has no weights")
    return ir.ExternalTensor(
        location,
        offset,
        length,
        tensor.dtype,
        shape=ir.Shape(tensor.shape.numpy()),
        name=value.name or "",
        base_dir=folder,
    )
