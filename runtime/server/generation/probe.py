"""Finds out by running a decoder what may be done with it.

In: a session and its decoder. Out: `Abilities`, or a `NotADecoderError`. Invariant: what is allowed here gave the same
logits as each stream by itself, in one run from an empty cache, so streams may be put together in that way.

The cache itself must work: a prompt cut in two has the logits of the whole. What else may fail has a slower way: a
model that takes no account of its mask, or numbers padding too, runs rows of equal length only; one that computes a
scale from all rows, as dynamic quantisation does, runs one row at a time and prompts in one piece.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnxruntime import InferenceSession

from runtime.server.errors import RequestError
from runtime.server.generation.blocks import Block, Place, Tokens, empty_block, gather, run_decoder
from runtime.server.generation.decoder import Decoder, NotADecoderError

CLOSE = {"FP16": 2e-2, "BF16": 1e-1}
"""Difference of logits, as a share of the largest, that rounding explains; `CLOSE_FP32` for all other types."""
CLOSE_FP32 = 1e-4
ALIKE = 0.1
"""The share up to which a cache can be said to continue its prompt, though not to the last bits."""
LONG, SHORT = 7, 3


@dataclass(frozen=True)
class Abilities:
    """What gives the logits of a stream by itself."""

    vocabulary: int
    rows: bool
    """Several streams of equal lengths in one run."""
    padding: bool
    """And of different lengths, padded at the front and hidden by the mask."""
    pieces: bool
    """A prompt in several runs."""


def probe(session: InferenceSession, decoder: Decoder, *, seed: int = 0) -> Abilities:
    """Run the decoder on random tokens.

    Raises:
        NotADecoderError: it cannot run on an empty cache, or its cache does not continue a prompt.
    """
    last = decoder.logits.shape[2]
    vocabulary = last if isinstance(last, int) else _first_logits(session, decoder).shape[1]
    close = CLOSE.get(decoder.logits.datatype.wire, CLOSE.get(decoder.caches[0].datatype.wire, CLOSE_FP32))
    random = np.random.default_rng(seed)
    long, short, other = (random.integers(0, vocabulary, size) for size in (LONG, SHORT, LONG))
    if decoder.most_new is not None:
        return _fixed(session, decoder, vocabulary, long)
    whole = {len(tokens): _alone(session, decoder, tokens) for tokens in (long, short)}
    difference = _difference(_in_pieces(session, decoder, long), whole[LONG])
    if not difference <= ALIKE:
        raise NotADecoderError(
            f"its cache does not continue a prompt: logits differ by {difference:.2g} of the largest one", likely=True
        )
    pieces = difference <= close
    if decoder.one_row or not pieces:
        return Abilities(vocabulary, rows=False, padding=False, pieces=pieces)
    expected = np.stack([whole[LONG], _alone(session, decoder, other)])
    rows = _difference(_continued(session, decoder, [long, other], padded=False), expected) <= close
    padding = False
    if rows and decoder.mask is not None:
        expected = np.stack([whole[LONG], whole[SHORT]])
        found = [_continued(session, decoder, [long, short], padded=padded) for padded in (False, True)]
        found.append(_prompts(session, decoder, [long, short])[0])
        padding = all(_difference(logits, expected) <= close for logits in found)
    return Abilities(vocabulary, rows=rows, padding=padding, pieces=pieces)


def _first_logits(session: InferenceSession, decoder: Decoder) -> NDArray[Any]:
    return _alone(session, decoder, np.zeros(decoder.most_new or 1, dtype=np.int64))[None]


def _alone(session: InferenceSession, decoder: Decoder, tokens: Tokens) -> NDArray[Any]:
    """The last logits of a prompt by itself."""
    try:
        return run_decoder(session, decoder, [tokens], past=empty_block(decoder, 1), lengths=[0])[0][0]
    except RequestError as error:
        raise NotADecoderError(f"it does not run on an empty cache: {error}", likely=True) from error


def _in_pieces(session: InferenceSession, decoder: Decoder, tokens: Tokens) -> NDArray[Any]:
    try:
        _, block = run_decoder(session, decoder, [tokens[:3]], past=empty_block(decoder, 1), lengths=[0])
        _, block = run_decoder(session, decoder, [tokens[3:5]], past=block, lengths=[3])
        return run_decoder(session, decoder, [tokens[5:]], past=block, lengths=[5])[0][0]
    except RequestError as error:
        raise NotADecoderError(f"it does not run on a cache: {error}", likely=True) from error


def _fixed(session: InferenceSession, decoder: Decoder, vocabulary: int, tokens: Tokens) -> Abilities:
    """Of a model that takes so many new tokens and no others: there is no whole prompt to compare pieces with."""
    if decoder.most_new != 1:
        raise NotADecoderError(f"it takes exactly {decoder.most_new} new tokens, but must take 1", likely=True)
    block = empty_block(decoder, 1)
    try:
        for length, token in enumerate(tokens):
            _, block = run_decoder(session, decoder, [token[None]], past=block, lengths=[length])
    except RequestError as error:
        raise NotADecoderError(f"it does not run on a cache: {error}", likely=True) from error
    return Abilities(vocabulary, rows=False, padding=False, pieces=True)


def _prompts(session: InferenceSession, decoder: Decoder, prompts: list[Tokens]) -> tuple[NDArray[Any], Block]:
    """Prompts in one run, padded."""
    try:
        return run_decoder(
            session, decoder, prompts, past=empty_block(decoder, len(prompts)), lengths=[0] * len(prompts)
        )
    except RequestError:
        nothing = np.full((len(prompts), 1), np.nan, dtype=np.float32)
        return nothing, empty_block(decoder, len(prompts))


def _continued(session: InferenceSession, decoder: Decoder, prompts: list[Tokens], *, padded: bool) -> NDArray[Any]:
    """The last logits of prompts whose last tokens run together; what is before runs padded in one run, or apart."""
    heads = [prompt[:-1] for prompt in prompts]
    if padded:
        block = _prompts(session, decoder, heads)[1]
    else:
        alone = [_prompts(session, decoder, [head])[1] for head in heads]
        block = gather(decoder, [Place(one, 0, one.extent) for one in alone])
    try:
        last = [prompt[-1:] for prompt in prompts]
        return run_decoder(session, decoder, last, past=block, lengths=[len(head) for head in heads])[0]
    except RequestError:
        return np.full((len(prompts), 1), np.nan, dtype=np.float32)


def _difference(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """The largest difference as a share of the largest logit; NaN if there is one anywhere."""
    return float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))
