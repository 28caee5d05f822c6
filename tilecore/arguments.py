"""The arrays of a call: checked against the kernel's tensors, symbols read off their shapes, outputs made.

Comes in: numpy arrays, or whatever gives its memory by DLPack. Goes out: numpy arrays over the same memory and the
values of all symbols; or an error that names the parameter, what was found, what was expected and what to do. Nothing
is copied and nothing is cast.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tilecore.call import KernelError
from tilecore.contract.dtype import DType, type_name
from tilecore.contract.evaluate import Evaluator
from tilecore.contract.expr import Expr, Sym, symbols
from tilecore.contract.spec import Tensor


def as_array(name: str, value: Any) -> np.ndarray:
    """The memory of an argument. KernelError when it is no array on this machine's processor."""
    if isinstance(value, np.ndarray):
        return value
    if not hasattr(value, "__dlpack__"):
        raise KernelError(f"{name} is a {type(value).__name__}: expected a numpy array, or one that offers __dlpack__")
    library = importlib.import_module(type(value).__module__.partition(".")[0])
    if type_name(getattr(value, "dtype", None)) == "bfloat16" and hasattr(
        library, "int16"
    ):  # which numpy does not take by DLPack
        return as_array(name, value.view(library.int16)).view(DType.BF16.row.numpy)
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise KernelError(
            f"{name} is a {type(value).__name__} whose memory cannot be shared: {error}. Pass a dense array in the "
            "memory of the processor, without gradients, of a type that numpy has"
        ) from error


def like(value: Any, array: np.ndarray) -> Any:
    """`array` in the library of `value`, an argument that came by DLPack."""
    module = importlib.import_module(type(value).__module__.partition(".")[0])
    if not hasattr(module, "from_dlpack"):
        return array
    if array.dtype == DType.BF16.row.numpy:
        return module.from_dlpack(array.view(np.int16)).view(module.bfloat16)
    return module.from_dlpack(array)


def bind(tensors: Sequence[Tensor], arrays: Mapping[str, np.ndarray], known: Mapping[str, int]) -> dict[str, int]:
    """The value of every symbol; every array checked. KernelError for the first that does not fit."""
    values = dict(known)
    places: dict[str, str] = {}
    for tensor in tensors:
        array = arrays.get(tensor.name)
        if array is None:
            continue
        _check_form(tensor, array)
        for axis, dim in enumerate(tensor.shape):
            if isinstance(dim, Sym) and dim.name not in values:
                values[dim.name] = array.shape[axis]
                places[dim.name] = f"dim {axis} of {tensor.name}"
    for tensor in tensors:
        if tensor.name in arrays:
            _check_dims(tensor, arrays[tensor.name], values, places)
    return values


def _check_form(tensor: Tensor, array: np.ndarray) -> None:
    wanted = tensor.dtype.row.numpy
    if array.dtype != wanted:
        raise KernelError(f"{tensor}: found {array.dtype}, expected {wanted}; {tensor.name}.astype(…) converts")
    if array.ndim != len(tensor.shape):
        raise KernelError(f"{tensor}: found {array.ndim} dims {array.shape}, expected {len(tensor.shape)}")
    if not array.flags.c_contiguous:
        strides = tuple(stride // array.itemsize for stride in array.strides)
        raise KernelError(
            f"{tensor}: found strides of {strides} elements for shape {array.shape}, expected dense rows; "
            f"np.ascontiguousarray({tensor.name}) makes them so"
        )
    if not array.flags.aligned:
        raise KernelError(f"{tensor}: its memory is not aligned to {array.itemsize} bytes; {tensor.name}.copy() is")


def _check_dims(tensor: Tensor, array: np.ndarray, values: Mapping[str, int], places: Mapping[str, str]) -> None:
    for axis, (dim, found) in enumerate(zip(tensor.shape, array.shape, strict=True)):
        wanted = size(dim, values, f"dim {axis} of {tensor.name}")
        if wanted != found:
            name = next((symbol.name for symbol in symbols(dim) if symbol.name in places), "")
            why = f" as {name} is {values[name]} by {places[name]}" if name else ""
            raise KernelError(f"{tensor}: dim {axis} is {found}, expected {wanted}{why}; its shape is {array.shape}")


def size(dim: Expr, values: Mapping[str, int], what: str) -> int:
    """A dim with its symbols replaced. KernelError for a symbol that no argument gives."""
    for symbol in symbols(dim):
        if symbol.name not in values:
            raise KernelError(f"{what} is {dim}, and no argument says what {symbol.name} is")
    return int(Evaluator({}, values)(dim))


def check_written(tensor: Tensor, array: np.ndarray, others: Mapping[str, np.ndarray]) -> None:
    """An output that the caller gave must be writable, and no other argument's memory."""
    if not array.flags.writeable:
        raise KernelError(f"{tensor} is written, and the array given for it is read-only")
    for name, other in others.items():
        if name != tensor.name and np.may_share_memory(array, other):
            raise KernelError(f"{tensor} is written, and shares memory with {name}: give it an array of its own")
