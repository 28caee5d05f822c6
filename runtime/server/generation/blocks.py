"""Caches of several streams in one set of tensors, and one run of a decoder over them.

In: tokens of some streams and the block that holds their caches. Out: the logits of each one's last token, and a block
with the new positions. A stream's positions stand at the end of its row; what stands before is padding, which the mask
hides. Invariant: padding is zero, so that whatever a mask multiplies it with, nothing of another stream is in it.

The block that a run gives is the next run's input as it is; `gather` copies, when other streams are to run together.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnxruntime import InferenceSession, OrtValue

from runtime import ort_values
from runtime.server.errors import ExhaustedError, InvalidRequestError, RequestError
from runtime.server.generation.decoder import Cache, Decoder
from runtime.server.ort_errors import RUN_ERRORS

Tokens = NDArray[np.int64]
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, eq=False)
class Block:
    """The caches of `rows` streams, each tensor with `extent` positions."""

    tensors: tuple[OrtValue, ...]
    """In the order of the decoder's caches."""
    rows: int
    extent: int


@dataclass(frozen=True)
class Place:
    """Where a stream's cache is: the last `length` positions of a row."""

    block: Block
    row: int
    length: int


def empty_block(decoder: Decoder, rows: int) -> Block:
    """Caches without positions."""
    tensors = (np.zeros(cache.shape_for(rows, 0), dtype=cache.datatype.dtype) for cache in decoder.caches)
    return Block(tuple(ort_values.to_ort(tensor) for tensor in tensors), rows, 0)


def gather(decoder: Decoder, places: Sequence[Place]) -> Block:
    """A block with these streams in this order: their positions are copied, the padding is zero."""
    extent = max(place.length for place in places)
    tensors: list[OrtValue] = []
    for number, cache in enumerate(decoder.caches):
        joined = np.zeros(cache.shape_for(len(places), extent), dtype=cache.datatype.dtype)
        for row, place in enumerate(places):
            source = _bits(place.block.tensors[number], cache)[place.row]
            _last(joined.view(_BITS[joined.itemsize])[row], cache, place.length)[...] = _last(
                source, cache, place.length
            )
        tensors.append(ort_values.to_ort(joined))
    return Block(tuple(tensors), len(places), extent)


def run_decoder(
    session: InferenceSession, decoder: Decoder, tokens: Sequence[Tokens], *, past: Block, lengths: Sequence[int]
) -> tuple[NDArray[Any], Block]:
    """Run `tokens` of each row behind the `lengths` positions that its cache has.

    Rows with different numbers of tokens must all have empty caches. Gives the logits of each row's last token, float32
    [rows, vocabulary], and the block with the new positions.

    Raises:
        InvalidRequestError, ExhaustedError: the model could not run on these tokens.
    """
    new = max(len(row) for row in tokens)
    assert all(len(row) == new for row in tokens) or not past.extent
    feeds = {
        name: OrtValue.ortvalue_from_numpy(array) for name, array in _inputs(decoder, tokens, past, lengths).items()
    }
    feeds |= {cache.past: tensor for cache, tensor in zip(decoder.caches, past.tensors, strict=True)}
    outputs = [decoder.logits.name, *(cache.present for cache in decoder.caches)]
    try:
        logits, *presents = session.run_with_ort_values(outputs, feeds)
    except RUN_ERRORS as error:
        if "allocate memory" in str(error) or "bad_alloc" in str(error):
            raise ExhaustedError("the model ran out of memory") from error
        raise InvalidRequestError(
            f"the model cannot run on {new} tokens behind {max(lengths)}: a token is out of its range, or the context "
            "is too long for it"
        ) from error
    block = Block(tuple(presents), len(tokens), past.extent + new)
    _check_shapes(decoder, block)
    for row, sent in enumerate(tokens):
        if len(sent) < new:
            _clear(decoder, block, row, new - len(sent))
    last = _view(logits, decoder.logits.datatype.dtype)[:, -1].astype(np.float32)  # a copy: the view dies with logits
    return last, block


def _inputs(
    decoder: Decoder, tokens: Sequence[Tokens], past: Block, lengths: Sequence[int]
) -> dict[str, NDArray[np.generic]]:
    """The inputs besides the caches: tokens at the end of their rows, a mask that hides what is before them."""
    rows, new = len(tokens), max(len(row) for row in tokens)
    ids = np.zeros((rows, new), dtype=decoder.ids.datatype.dtype)
    mask = np.zeros((rows, past.extent + new), dtype=np.int64)
    positions = np.zeros((rows, new), dtype=np.int64)
    for row, (sent, length) in enumerate(zip(tokens, lengths, strict=True)):
        ids[row, new - len(sent) :] = sent
        mask[row, past.extent + new - len(sent) - length :] = 1
        positions[row, new - len(sent) :] = np.arange(length, length + len(sent))
    found: dict[str, NDArray[np.generic]] = {decoder.ids.name: ids}
    for port, array in ((decoder.mask, mask), (decoder.positions, positions)):
        if port is not None:
            found[port.name] = array.astype(port.datatype.dtype, copy=False)
    return found


class CacheShapeError(RequestError):
    """The model's caches do not grow by the new positions."""


def _check_shapes(decoder: Decoder, block: Block) -> None:
    for cache, tensor in zip(decoder.caches, block.tensors, strict=True):
        found, wanted = tuple(tensor.shape()), cache.shape_for(block.rows, block.extent)
        if found != wanted:
            raise CacheShapeError(f"output {cache.present!r} is {list(found)} where {list(wanted)} continues its cache")


def _clear(decoder: Decoder, block: Block, row: int, count: int) -> None:
    """Make the first `count` positions of a row zero."""
    for cache, tensor in zip(decoder.caches, block.tensors, strict=True):
        bits = _bits(tensor, cache)[row]
        bits[(slice(None),) * (cache.axis - 1) + (slice(0, count),)] = 0


def _last(row: NDArray[Any], cache: Cache, length: int) -> NDArray[Any]:
    """The last `length` positions of a row of a cache."""
    extent = row.shape[cache.axis - 1]
    return row[(slice(None),) * (cache.axis - 1) + (slice(extent - length, extent),)]


def _bits(tensor: OrtValue, cache: Cache) -> NDArray[Any]:
    """The tensor's own memory as whole numbers of its element's size; valid as long as the tensor is."""
    return _view(tensor, np.dtype(_BITS[cache.datatype.dtype.itemsize]))


def _view(tensor: OrtValue, dtype: np.dtype[Any]) -> NDArray[Any]:
    shape = tensor.shape()
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return np.zeros(shape, dtype=dtype)
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr())
    return np.frombuffer(memoryview(memory), dtype=dtype).reshape(shape)
