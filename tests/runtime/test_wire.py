from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto import open_inference_pb2 as pb
from runtime.wire import (
    BY_WIRE,
    BYTES,
    DATATYPES,
    WireError,
    check_shape,
    datatype_of,
    decode_contents,
    decode_raw,
    encode_contents,
    encode_raw,
)

FIXED = [datatype for datatype in DATATYPES if datatype is not BYTES]


def sample(name: str) -> np.ndarray[Any, Any]:
    values = np.array([[0, 1, 1], [1, 0, 1]])
    return values.astype(BY_WIRE[name].dtype)


@pytest.mark.parametrize("name", [datatype.wire for datatype in FIXED])
def test_raw_round_trip(name: str) -> None:
    array = sample(name)
    back = decode_raw(encode_raw(array), datatype=datatype_of(array), shape=[2, 3], count=6)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize("name", [datatype.wire for datatype in FIXED if datatype.contents])
def test_contents_round_trip(name: str) -> None:
    array = sample(name)
    back = decode_contents(encode_contents(array), datatype=datatype_of(array), shape=[2, 3], count=6)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


@given(st.lists(st.text(), max_size=5))
def test_text_round_trip(items: list[str]) -> None:
    array = np.array([*items, ""], dtype=object)[:-1]
    shape = [len(items)]
    raw = decode_raw(encode_raw(array), datatype=BYTES, shape=shape, count=len(items))
    typed = decode_contents(encode_contents(array), datatype=BYTES, shape=shape, count=len(items))
    assert raw.tolist() == typed.tolist() == items


def test_raw_layout_is_the_protocols() -> None:
    assert encode_raw(np.array([[1, 2], [3, 4]], dtype=np.int16).T) == bytes([1, 0, 3, 0, 2, 0, 4, 0])
    assert encode_raw(np.array([1], dtype=">i4")) == bytes([1, 0, 0, 0])
    assert encode_raw(np.array([1.0], dtype=ml_dtypes.bfloat16)) == b"\x80\x3f"
    assert encode_raw(np.array(["é", b"ab"], dtype=object)) == b"\x02\0\0\0\xc3\xa9\x02\0\0\0ab"


@given(st.binary(max_size=40), st.integers(0, 12))
def test_any_bytes_are_read_or_refused(data: bytes, count: int) -> None:
    try:
        array = decode_raw(data, datatype=BYTES, shape=[count], count=count)
    except WireError:
        return
    assert encode_raw(array) == data


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ([-1], "dim -1"),
        ([2**40, 2**40], "dim 1099511627776"),
        ([2**31 - 1, 0], "more than the 1000 bytes"),
        ([16, 16], "more than the 1000 bytes"),
        ([1] * 17, "17 dims"),
    ],
)
def test_shapes_refused(shape: list[int], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        check_shape(shape, itemsize=4, limit=1000)


def test_shapes_accepted() -> None:
    assert check_shape([], itemsize=4, limit=1000) == 1
    assert check_shape([0, 7], itemsize=4, limit=1000) == 0
    assert check_shape([5, 50], itemsize=4, limit=1000) == 250


@pytest.mark.parametrize(
    ("name", "data", "count", "reason"),
    [
        ("FP32", b"\0" * 7, 2, "takes 8 bytes, but 7 were sent"),
        ("FP32", b"\0" * 12, 2, "takes 8 bytes, but 12 were sent"),
        ("BOOL", b"\0\2", 2, "other than 0 and 1"),
        ("BYTES", b"\xff\xff\xff\x7f", 1, "claims 2147483647 bytes, but 0 are left"),
        ("BYTES", b"\1\0\0", 1, "at least 4 bytes"),
        ("BYTES", b"\0\0\0\0\0\0\0\0", 1, "left over"),
        ("BYTES", b"\4\0\0\0\0\0\0\0", 2, "no length"),
        ("BYTES", b"\1\0\0\0\xff", 1, "not UTF-8"),
    ],
)
def test_raw_refused(name: str, data: bytes, count: int, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode_raw(data, datatype=BY_WIRE[name], shape=[count], count=count)


@pytest.mark.parametrize(
    ("name", "contents", "reason"),
    [
        ("FP32", pb.InferTensorContents(fp32_contents=[1]), "has 2 elements, but fp32_contents holds 1"),
        ("FP32", pb.InferTensorContents(fp64_contents=[1, 2]), "belongs in fp32_contents, but fp64_contents"),
        ("FP32", pb.InferTensorContents(fp32_contents=[1, 2], int_contents=[1]), "but int_contents is filled"),
        ("INT8", pb.InferTensorContents(int_contents=[1, 300]), "outside INT8, -128 to 127"),
        ("UINT16", pb.InferTensorContents(uint_contents=[1, 65536]), "outside UINT16, 0 to 65535"),
        ("FP16", pb.InferTensorContents(fp32_contents=[1, 2]), "send it in raw_input_contents"),
    ],
)
def test_contents_refused(name: str, contents: pb.InferTensorContents, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode_contents(contents, datatype=BY_WIRE[name], shape=[2], count=2)


def test_elements_without_a_datatype_are_refused() -> None:
    with pytest.raises(WireError, match="complex64"):
        encode_raw(np.zeros(2, dtype=np.complex64))
    with pytest.raises(WireError, match="here is a int"):
        encode_raw(np.array([1], dtype=object))
