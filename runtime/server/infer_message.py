"""The request and the answer of ModelInfer as bytes: tensors do not pass through protobuf, which would copy them twice.

In: the bytes of a request, or a message of a stream; the parts of an answer. Out: `InferRequest`; the answer's bytes.
Invariant: a request is what protobuf reads in the same bytes. What is not plain to see in them is left to protobuf.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from google.protobuf.message import DecodeError

from proto import open_inference_pb2 as pb
from runtime.server.errors import InvalidRequestError
from runtime.wire import Buffer

LONGEST_HEADER = 4096
"""Bytes of a header that is worth to be looked up by its bytes; typed contents are part of it and may be long."""
_NAME, _VERSION, _ID, _RAW = (number << 3 | 2 for number in (1, 2, 3, 7))  # tags in ModelInferRequest
_LAST_TAG = 15 << 3 | 2
_ANSWER_ID, _ANSWER_RAW = bytes([3 << 3 | 2]), bytes([6 << 3 | 2])  # and in ModelInferResponse


@dataclass(slots=True)
class InferRequest:
    """One request."""

    model_name: str
    model_version: str
    id: str
    header: bytes | None
    """All but the id and the raw contents: requests of equal headers ask for the same. None: it is not at hand."""
    raw: Sequence[Buffer]
    """The raw contents."""
    size: int
    """Bytes of the whole."""
    parsed: pb.ModelInferRequest | None = None

    def message(self) -> pb.ModelInferRequest:
        """The request as protobuf has it; of one with a header, without id and raw contents.

        Raises:
            InvalidRequestError: the header is none.
        """
        if self.parsed is None:
            assert self.header is not None
            self.parsed = _parse(self.header, self.size)
        return self.parsed


def read_request(data: bytes) -> InferRequest:
    """The request in `data`.

    Raises:
        InvalidRequestError: it is none; of one with a header, `message` may say so later.
    """
    return _split(data) or of_message(_parse(data, len(data)))


def of_message(message: pb.ModelInferRequest) -> InferRequest:
    """The request that `message` is."""
    raw = message.raw_input_contents
    return InferRequest(message.model_name, message.model_version, message.id, None, raw, message.ByteSize(), message)


def _parse(data: bytes, size: int) -> pb.ModelInferRequest:
    try:
        return pb.ModelInferRequest.FromString(data)
    except DecodeError as error:
        raise InvalidRequestError(f"the {size} bytes are no ModelInferRequest") from error


def _split(data: bytes) -> InferRequest | None:
    """The request in `data` if its header is short and the raw contents come last, as all writers put them; else None.

    Only the outermost fields are read: each is a tag, a length as a varint, and so many bytes.
    """
    name = version = identifier = b""
    id_start = id_end = -1
    header_end, end = -1, len(data)
    raw: list[Buffer] = []
    view = memoryview(data)
    at = 0
    try:
        while at < end:
            tag = data[at]
            if tag & 7 != 2 or not _NAME <= tag <= _LAST_TAG:
                return None
            size, start = data[at + 1], at + 2
            if size > 127:
                size, start = _long_varint(data, at + 1)
            stop = start + size
            if stop > end:
                return None
            if tag == _RAW:
                if header_end < 0:
                    header_end = at
                raw.append(view[start:stop])
            elif header_end >= 0:
                return None
            elif tag == _NAME:
                name = data[start:stop]
            elif tag == _VERSION:
                version = data[start:stop]
            elif tag == _ID:
                if id_start >= 0:
                    return None
                id_start, id_end, identifier = at, stop, data[start:stop]
            at = stop
        header = data[:header_end] if raw else data
        if id_start >= 0:
            header = header[:id_start] + header[id_end:]
        if len(header) > LONGEST_HEADER:
            return None
        return InferRequest(name.decode(), version.decode(), identifier.decode(), header, raw, end)
    except (IndexError, UnicodeDecodeError):
        return None


def _long_varint(data: bytes, at: int) -> tuple[int, int]:
    """A length of several bytes at `at`, and where it ends. IndexError: it does not end."""
    value = shift = 0
    while shift < 35:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise IndexError("the length has more than 32 bits")


def answer_bytes(head: bytes, identifier: str, raw: Sequence[Buffer]) -> bytes:
    """The answer with the fields of `head`, the request's id and the raw contents, copied once."""
    parts: list[Buffer] = [head]
    if identifier:
        text = identifier.encode()
        parts += (_ANSWER_ID, _varint(len(text)), text)
    for content in raw:
        parts += (_ANSWER_RAW, _varint(len(content)), content)
    return b"".join(parts)


@lru_cache(1024)
def _varint(value: int) -> bytes:
    if value < 128:
        return bytes((value,))
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
