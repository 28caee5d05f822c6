"""Arrays in and out of ONNX Runtime, bfloat16 included, which its numpy interface does not know.

In: a session, names of outputs, arrays by input name (bfloat16 as ml_dtypes has it). Out: arrays in the order of the
names. The invariant: element types are kept.
"""

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnxruntime import InferenceSession, OrtValue

Array = npt.NDArray[Any]
Run = Callable[[Sequence[str], Mapping[str, Array]], list[Array]]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ORT_BFLOAT16 = "tensor(bfloat16)"


def run(session: InferenceSession, names: Sequence[str], feeds: Mapping[str, Array]) -> list[Array]:
    """The outputs `names` of a session; raises what ONNX Runtime raises."""
    return runner(session)(names, feeds)


def runner(session: InferenceSession) -> Run:
    """What `run` does with `session`, for many runs: what the session says about its tensors is asked once."""
    if ORT_BFLOAT16 in (argument.type for argument in (*session.get_inputs(), *session.get_outputs())):
        return lambda names, feeds: _run_ort_values(session, names, feeds)
    inner: Any = getattr(session, "_sess", None)
    if inner is None:
        return lambda names, feeds: [np.asarray(value) for value in session.run(names, feeds)]
    # What `session.run` does around this takes longer than a small model: it looks at every input in Python first.
    return lambda names, feeds: inner.run(names, feeds, None)


def _run_ort_values(session: InferenceSession, names: Sequence[str], feeds: Mapping[str, Array]) -> list[Array]:
    values = {name: to_ort(array) for name, array in feeds.items()}
    return [_from_ort(value) for value in session.run_with_ort_values(list(names), values)]


def to_ort(array: Array) -> OrtValue:
    """The array as an OrtValue, which may share its memory."""
    array = np.asarray(array, order="C")  # ascontiguousarray gives a number an axis
    if array.dtype == BFLOAT16:
        return OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)
    return OrtValue.ortvalue_from_numpy(array)


def _from_ort(value: OrtValue) -> Array:
    if value.data_type() != ORT_BFLOAT16:
        return np.asarray(value.numpy())
    shape = value.shape()
    data = ctypes.string_at(value.data_ptr(), math.prod(shape) * BFLOAT16.itemsize)
    return np.frombuffer(data, dtype=BFLOAT16).reshape(shape)
