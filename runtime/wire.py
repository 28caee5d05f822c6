"""Tensors on the wire: numpy arrays to and from the two encodings of the Open Inference Protocol.

Server and client share it. In: a datatype, a shape and raw bytes or typed contents from the other side. Out: arrays, or
a `WireError` with a plain reason.
Invariant: every size is computed in Python integers and compared with what was sent before anything is allocated.

BYTES tensors are numpy object arrays of `str`: ONNX strings are UTF-8 text.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from proto import open_inference_pb2 as pb

Array = NDArray[np.generic]
Buffer = bytes | memoryview
"""Bytes of a tensor; a memoryview has one dim of bytes."""

LARGEST_DIM = 2**31 - 1
"""The largest extent of one dim that is accepted."""
LARGEST_RANK = 16
"""The most dims that a tensor may have."""


class WireError(Exception):
    """What was sent cannot be read as a tensor; the message is fit for the other side to see."""


@dataclass(frozen=True)
class Datatype:
    """One element type under its three names."""

    wire: str
    """The protocol's name, such as FP32."""
    onnx: str
    """ONNX Runtime's name of a tensor of it, such as tensor(float)."""
    config: str
    """The name in config.pbtxt, such as TYPE_FP32."""
    dtype: np.dtype[np.generic]
    """Little-endian element type; object for BYTES."""
    contents: str | None
    """The field of InferTensorContents that holds it; None: it travels only raw."""


DATATYPES: tuple[Datatype, ...] = (
    Datatype("BOOL", "tensor(bool)", "TYPE_BOOL", np.dtype(np.bool_), "bool_contents"),
    Datatype("UINT8", "tensor(uint8)", "TYPE_UINT8", np.dtype("u1"), "uint_contents"),
    Datatype("UINT16", "tensor(uint16)", "TYPE_UINT16", np.dtype("<u2"), "uint_contents"),
    Datatype("UINT32", "tensor(uint32)", "TYPE_UINT32", np.dtype("<u4"), "uint_contents"),
    Datatype("UINT64", "tensor(uint64)", "TYPE_UINT64", np.dtype("<u8"), "uint64_contents"),
    Datatype("INT8", "tensor(int8)", "TYPE_INT8", np.dtype("i1"), "int_contents"),
    Datatype("INT16", "tensor(int16)", "TYPE_INT16", np.dtype("<i2"), "int_contents"),
    Datatype("INT32", "tensor(int32)", "TYPE_INT32", np.dtype("<i4"), "int_contents"),
    Datatype("INT64", "tensor(int64)", "TYPE_INT64", np.dtype("<i8"), "int64_contents"),
    Datatype("FP16", "tensor(float16)", "TYPE_FP16", np.dtype("<f2"), None),
    Datatype("BF16", "tensor(bfloat16)", "TYPE_BF16", np.dtype(ml_dtypes.bfloat16), None),
    Datatype("FP32", "tensor(float)", "TYPE_FP32", np.dtype("<f4"), "fp32_contents"),
    Datatype("FP64", "tensor(double)", "TYPE_FP64", np.dtype("<f8"), "fp64_contents"),
    Datatype("BYTES", "tensor(string)", "TYPE_STRING", np.dtype(object), "bytes_contents"),
)
BY_WIRE = {datatype.wire: datatype for datatype in DATATYPES}
BY_ONNX = {datatype.onnx: datatype for datatype in DATATYPES}
BY_CONFIG = {datatype.config: datatype for datatype in DATATYPES}
BYTES = BY_WIRE["BYTES"]
BF16 = BY_WIRE["BF16"]
_BY_DTYPE = {datatype.dtype: datatype for datatype in DATATYPES}
_PLAIN = frozenset(datatype.dtype for datatype in DATATYPES if datatype.dtype.kind in "biuf")
"""Elements that numpy itself lays out as the protocol wants them."""


def datatype_of(array: Array) -> Datatype:
    """The datatype that carries `array`; text arrays of any width are BYTES.

    Raises:
        WireError: no datatype of the protocol holds such elements.
    """
    if array.dtype.kind in "OUS":
        return BYTES
    found = _BY_DTYPE.get(array.dtype.newbyteorder("<"))
    if found is None:
        raise WireError(f"elements of type {array.dtype} cannot be sent; the protocol carries {', '.join(BY_WIRE)}")
    return found


def check_shape(shape: Sequence[int], *, itemsize: int, limit: int) -> int:
    """The number of elements of `shape`, refusing shapes that no request of at most `limit` bytes can describe.

    Zero extents do not excuse the others: [2**40, 0] is refused, as a model may reduce over the empty dim.

    Raises:
        WireError: a dim is negative or too large, there are too many, or the bytes exceed `limit`.
    """
    if len(shape) > LARGEST_RANK:
        raise WireError(f"shape has {len(shape)} dims, at most {LARGEST_RANK} are accepted")
    for extent in shape:
        if not 0 <= extent <= LARGEST_DIM:
            raise WireError(f"shape {list(shape)} has dim {extent}, each must be between 0 and {LARGEST_DIM}")
    if math.prod(max(extent, 1) for extent in shape) * itemsize > limit:
        raise WireError(f"shape {list(shape)} needs more than the {limit} bytes that are accepted")
    return math.prod(shape)


def decode_raw(data: Buffer, *, datatype: Datatype, shape: Sequence[int], count: int) -> Array:
    """The array in `data`: `count` row-major little-endian elements, a view where it is aligned for them.

    Raises:
        WireError: the number of bytes does not fit, or the elements are not of the datatype.
    """
    if datatype is BYTES:
        return _as_text(_split_bytes(bytes(data), count), shape)
    dtype = datatype.dtype
    expected = count * dtype.itemsize
    if len(data) != expected:
        raise WireError(f"shape {list(shape)} of {datatype.wire} takes {expected} bytes, but {len(data)} were sent")
    array = np.frombuffer(data, dtype)
    if dtype.kind == "b" and np.any(array.view(np.uint8) > 1):
        raise WireError("a BOOL tensor holds bytes other than 0 and 1")
    if not array.flags.aligned:
        array = array.copy()
    return array if len(shape) == 1 else array.reshape(shape)


def decode_contents(contents: pb.InferTensorContents, *, datatype: Datatype, shape: Sequence[int], count: int) -> Array:
    """The array in the typed field that belongs to `datatype`.

    Raises:
        WireError: another field is filled, the count does not fit, or a value is out of the datatype's range.
    """
    if datatype.contents is None:
        raise WireError(f"{datatype.wire} has no typed contents, send it in raw_input_contents")
    filled = [descriptor.name for descriptor, _ in contents.ListFields()]
    strangers = [name for name in filled if name != datatype.contents]
    if strangers:
        raise WireError(f"{datatype.wire} belongs in {datatype.contents}, but {', '.join(strangers)} is filled")
    values = getattr(contents, datatype.contents)
    if len(values) != count:
        raise WireError(f"shape {list(shape)} has {count} elements, but {datatype.contents} holds {len(values)}")
    if datatype is BYTES:
        return _as_text(list(values), shape)
    wide = np.array(values, dtype=_contents_dtype(datatype))
    if datatype.dtype.kind in "iu" and wide.size:
        bounds = np.iinfo(datatype.dtype.name)
        if int(wide.min()) < bounds.min or int(wide.max()) > bounds.max:
            raise WireError(f"{datatype.contents} holds a value outside {datatype.wire}, {bounds.min} to {bounds.max}")
    return wide.astype(datatype.dtype, copy=False).reshape(shape)


def encode_raw(array: Array) -> bytes:
    """The raw bytes of `array`.

    Raises:
        WireError: the elements are not of a datatype of the protocol, or not text where they must be.
    """
    return bytes(view_raw(array))


def view_raw(array: Array) -> Buffer:
    """The raw bytes of `array`, in its own memory where they lie there as the protocol wants them.

    Raises:
        WireError: the elements are not of a datatype of the protocol, or not text where they must be.
    """
    if array.dtype in _PLAIN and array.flags.c_contiguous and array.size:
        return array.data.cast("B")
    datatype = datatype_of(array)
    if datatype is BYTES:
        return b"".join(struct.pack("<I", len(item)) + item for item in _as_utf8(array))
    if array.size == 0:
        return b""
    plain = np.ascontiguousarray(array.astype(datatype.dtype, copy=False))
    return plain.reshape(-1).view(np.uint8).data


def encode_contents(array: Array) -> pb.InferTensorContents:
    """The typed contents of `array`.

    Raises:
        WireError: the datatype has no field for typed contents.
    """
    datatype = datatype_of(array)
    if datatype.contents is None:
        raise WireError(f"{datatype.wire} has no typed contents")
    contents = pb.InferTensorContents()
    values: list[object] = list(_as_utf8(array)) if datatype is BYTES else array.ravel().tolist()
    getattr(contents, datatype.contents).extend(values)  # extend(list) is several times faster than extend(ndarray)
    return contents


def _contents_dtype(datatype: Datatype) -> np.dtype[np.generic]:
    narrow = {"int_contents": np.dtype("<i4"), "uint_contents": np.dtype("<u4")}
    return narrow.get(datatype.contents or "", datatype.dtype)


def _split_bytes(data: bytes, count: int) -> list[bytes]:
    if count * 4 > len(data):
        raise WireError(f"{count} BYTES elements take at least {count * 4} bytes, but {len(data)} were sent")
    items: list[bytes] = []
    at = 0
    for index in range(count):
        if at + 4 > len(data):
            raise WireError(f"BYTES element {index} has no length: the data end after {len(data)} bytes")
        (length,) = struct.unpack_from("<I", data, at)
        at += 4
        if length > len(data) - at:
            raise WireError(f"BYTES element {index} claims {length} bytes, but {len(data) - at} are left")
        items.append(data[at : at + length])
        at += length
    if at != len(data):
        raise WireError(f"{len(data) - at} bytes are left over after {count} BYTES elements")
    return items


def _as_text(items: Sequence[bytes], shape: Sequence[int]) -> Array:
    array = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        try:
            array[index] = item.decode("utf-8")
        except UnicodeDecodeError as error:
            raise WireError(f"BYTES element {index} is not UTF-8 text ({error.reason})") from error
    return array.reshape(shape)


def _as_utf8(array: Array) -> list[bytes]:
    items: list[bytes] = []
    for item in array.ravel().tolist():
        if isinstance(item, str):
            items.append(item.encode("utf-8"))
        elif isinstance(item, bytes):
            items.append(item)
        else:
            raise WireError(f"a BYTES tensor holds str or bytes, but here is a {type(item).__name__}")
    return items
