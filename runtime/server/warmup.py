"""Runs a model before it is ready, so that no client pays for what only first runs cost.

In: a loaded model. Out: nothing; its counters are not touched. Invariant: the runs that config.pbtxt asks for must
succeed; those made up here, one per batch size and bucket, may fail, which the log says.
"""

import itertools
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from runtime.server.errors import RequestError
from runtime.server.model import Model, ModelError, Tensor, run_session
from runtime.server.settings import Warmup, WarmupInput
from runtime.wire import Array, Datatype, WireError, decode_raw

LOG = logging.getLogger("tilefuse.server")
FREE_EXTENT = 8
"""What a dim that may be anything is in runs that are made up."""
SECONDS = 30.0
"""How long the made-up runs of one model may take."""


def warm_up(model: Model) -> None:
    """Run the model.

    Raises:
        ModelError: a run that config.pbtxt asks for fails, or does not fit the model.
    """
    outputs = tuple(tensor.name for tensor in model.outputs)
    for warmup in model.settings.warmups:
        try:
            feeds = {sent.name: _content(sent) for sent in warmup.inputs}
            _check(model, warmup)
            for _ in range(warmup.count):
                run_session(model.session, feeds, outputs)
        except (RequestError, WireError, OSError) as error:
            raise ModelError(f"model_warmup {warmup.name!r}: {error}") from error
    if model.settings.warmups or not model.settings.auto_warmup or model.engine is not None:
        return  # an engine's probe has run the model
    deadline = time.monotonic() + SECONDS
    for feeds in made_up_inputs(model):
        try:
            run_session(model.session, feeds, outputs)
        except RequestError as error:
            LOG.warning("%s version %d is not warmed up: %s", model.name, model.version, error)
            return
        if time.monotonic() > deadline:
            LOG.warning("%s version %d: warming up was cut off after %g s", model.name, model.version, SECONDS)
            return


def made_up_inputs(model: Model) -> Iterator[dict[str, Array]]:
    """Inputs of zeros (ones for the mask of padded positions) for each batch size and each bucket."""
    settings = model.settings
    sizes: tuple[int, ...] = (1,)
    if settings.max_batch_size and settings.batching is not None:
        sizes = tuple(sorted({1, *settings.batching.preferred, settings.max_batch_size}))
    buckets = settings.padding.buckets if settings.padding is not None else (FREE_EXTENT,)
    for size, bucket in itertools.product(sizes, buckets):
        yield {tensor.name: _made_up(model, tensor, size, bucket) for tensor in model.inputs}


def _made_up(model: Model, tensor: Tensor, rows: int, bucket: int) -> Array:
    padding = model.settings.padding
    shape = [
        extent if isinstance(extent, int) else (bucket if padding and extent == padding.dim else FREE_EXTENT)
        for extent in tensor.shape
    ]
    if model.settings.max_batch_size:
        shape[0] = rows
    elif shape and not isinstance(tensor.shape[0], int):
        shape[0] = 1
    if padding is not None and tensor.name == padding.mask:
        return np.ones(shape, dtype=tensor.datatype.dtype)
    return _zeros(tensor.datatype, tuple(shape))


def _zeros(datatype: Datatype, shape: tuple[int, ...]) -> Array:
    return np.full(shape, "", dtype=object) if datatype.dtype.hasobject else np.zeros(shape, dtype=datatype.dtype)


def _content(sent: WarmupInput) -> Array:
    if sent.content == "zero":
        return _zeros(sent.datatype, sent.shape)
    if sent.content == "random":
        random = np.random.default_rng(0)
        if sent.datatype.dtype.hasobject:
            raise WireError(f"input {sent.name!r} is text, for which there is no random data")
        return (random.random(sent.shape) * 2).astype(sent.datatype.dtype)  # 0 and 1 where they are whole numbers
    data = Path(sent.content).read_bytes()
    return decode_raw(data, datatype=sent.datatype, shape=sent.shape, count=int(np.prod(sent.shape, dtype=object)))


def _check(model: Model, warmup: Warmup) -> None:
    names = {sent.name for sent in warmup.inputs}
    if names != model.by_name.keys():
        raise WireError(f"it gives {', '.join(sorted(names))}, but the model takes {', '.join(model.by_name)}")
    for sent in warmup.inputs:
        tensor = model.by_name[sent.name]
        fits = len(sent.shape) == len(tensor.shape) and all(
            wanted in (-1, extent) for wanted, extent in zip(tensor.wire_shape, sent.shape, strict=True)
        )
        if sent.datatype is not tensor.datatype or not fits:
            raise WireError(f"input {sent.name!r} is {sent.datatype.wire} {list(sent.shape)}, which does not fit")
