"""Rounds one dim of a request up to a bucket, and cuts the answer back.

In: inputs whose dim the settings name. Out: inputs of the bucket's extent, the mask 0 in what was added; outputs of the
request's own extent. Invariant: what a client gets has no row or column that it did not send.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.server.errors import InvalidRequestError
from runtime.server.model import Tensor
from runtime.server.settings import Padding
from runtime.wire import Array


@dataclass(frozen=True)
class Padded:
    """Inputs of a bucket's extent, and the extent that was sent."""

    feeds: dict[str, Array]
    extent: int


def pad(padding: Padding, inputs: Sequence[Tensor], feeds: dict[str, Array]) -> Padded:
    """The inputs with `padding.dim` rounded up to its bucket.

    Raises:
        InvalidRequestError: the request is longer than the largest bucket.
    """
    axes = {tensor.name: tensor.shape.index(padding.dim) for tensor in inputs if padding.dim in tensor.shape}
    extent = feeds[padding.mask].shape[axes[padding.mask]]
    at = bisect_left(padding.buckets, extent)
    if at == len(padding.buckets):
        raise InvalidRequestError(
            f"dim {padding.dim!r} of {padding.mask!r} is {extent}, but this model takes at most {padding.buckets[-1]}"
        )
    wanted = padding.buckets[at]
    if wanted == extent:
        return Padded(feeds, extent)
    values = dict(padding.values)
    padded = dict(feeds)
    for name, axis in axes.items():
        array = feeds[name]
        shape = list(array.shape)
        shape[axis] = wanted
        fill = 0 if name == padding.mask else values.get(name, 0)
        larger = np.full(shape, fill, dtype=array.dtype)
        larger[(slice(None),) * axis + (slice(extent),)] = array
        padded[name] = larger
    return Padded(padded, extent)


def trim(padding: Padding, outputs: Sequence[Tensor], results: Sequence[Array], extent: int) -> list[Array]:
    """The outputs without what the padding added to them."""
    return [
        array[tuple(slice(extent) if dim == padding.dim else slice(None) for dim in tensor.shape)]
        for tensor, array in zip(outputs, results, strict=True)
    ]
