"""Chooses the next token from a model's logits.

In: one row of logits, the parameters of its stream, the token's place in the stream's context. Out: a token. Invariant:
nothing but these decides, so a stream's tokens do not depend on which others ran beside it. All arithmetic is float64.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST_LOOK = 256
"""How many of the likeliest tokens are sorted at first, in search of those that make up top-p."""


class LogitsError(Exception):
    """The model's logits are no numbers that a token could be chosen by."""


@dataclass(frozen=True)
class Sampling:
    """How to choose; the defaults take the likeliest token."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the likeliest token, the one with the lowest number among equals."""
    top_k: int = 0
    """Choose among so many of the likeliest; 0: among all."""
    top_p: float = 1.0
    """Of those, choose among the fewest likeliest whose probabilities add up to this; 1: among all."""
    seed: int = 0
    """Below 2**64. With the token's place in the context it makes the random number."""


def choose(logits: NDArray[Any], sampling: Sampling, *, place: int) -> int:
    """The token for `logits` [vocabulary] at `place` of the context.

    Raises:
        LogitsError: there is a NaN among them, or no largest one.
    """
    best = int(np.argmax(logits))  # a NaN counts as the largest
    if not np.isfinite(logits[best]):
        raise LogitsError(f"the model's logits have {float(logits[best])} for token {best}")
    if sampling.temperature == 0:
        return best
    tokens, weights = _candidates(logits, sampling)
    bounds = np.cumsum(weights)
    random = np.random.Generator(np.random.Philox(key=np.array([sampling.seed, place], dtype=np.uint64))).random()
    # in the order of the tokens, not of their weights: a difference in the last bits cannot swap two of them
    at = int(np.searchsorted(bounds, random * bounds[-1], side="right"))
    return int(tokens[min(at, len(tokens) - 1)])


def _candidates(logits: NDArray[Any], sampling: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens to choose among, in rising order, and their weights."""
    tokens = np.arange(len(logits))
    if 0 < sampling.top_k < len(logits):  # before the exponentials, which cost the most
        tokens = np.sort(_likeliest(logits, sampling.top_k))
    scaled = logits[tokens].astype(np.float64)
    weights = np.exp((scaled - scaled.max()) / sampling.temperature)
    if sampling.top_p < 1:
        kept = np.sort(_nucleus(weights, sampling.top_p))
        tokens, weights = tokens[kept], weights[kept]
    return tokens, weights


def _likeliest(weights: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Places of the `count` largest weights, largest first, the first among equals."""
    if count >= len(weights):
        return np.argsort(-weights, kind="stable")
    least = np.partition(weights, len(weights) - count)[len(weights) - count]
    above = np.flatnonzero(weights > least)
    equal = np.flatnonzero(weights == least)[: count - len(above)]
    return np.concatenate([above[np.argsort(-weights[above], kind="stable")], equal])


def _nucleus(weights: NDArray[np.float64], share: float) -> NDArray[np.int64]:
    """Places of the fewest largest weights that add up to `share` of all; at least one."""
    wanted = share * weights.sum()
    count = FIRST_LOOK
    while True:
        places = _likeliest(weights, count)
        sums = np.cumsum(weights[places])
        if sums[-1] >= wanted or len(places) == len(weights):
            return places[: int(np.searchsorted(sums, wanted)) + 1]
        count *= 8
