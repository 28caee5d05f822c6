"""The choice of a token against plain float64 arithmetic, its distribution, and what it does not depend on."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from runtime.server.generation.sampling import LogitsError, Sampling, choose

DRAWS = 4000


def expected_shares(logits: NDArray[np.float32], sampling: Sampling) -> NDArray[np.float64]:
    """The probability of every token, written down from the definitions."""
    scaled = logits.astype(np.float64) / sampling.temperature
    shares = np.exp(scaled) / np.exp(scaled).sum()
    order = sorted(range(len(shares)), key=lambda token: (-shares[token], token))
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = sum(shares[token] for token in order)
    nucleus: list[int] = []
    for token in order:
        nucleus.append(token)
        if sum(shares[kept] for kept in nucleus) >= sampling.top_p * total:
            break
    kept = np.zeros_like(shares)
    kept[nucleus] = shares[nucleus]
    return kept / kept.sum()


def draw(logits: NDArray[np.float32], sampling: Sampling, count: int) -> NDArray[np.int64]:
    return np.bincount([choose(logits, sampling, place=place) for place in range(count)], minlength=len(logits))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, seed=1),
        Sampling(0.5, seed=2),
        Sampling(3.0, seed=3),
        Sampling(1.0, top_k=4, seed=4),
        Sampling(1.0, top_p=0.8, seed=5),
        Sampling(1.5, top_k=6, top_p=0.7, seed=2**64 - 1),
    ],
    ids=str,
)
def test_tokens_come_with_their_probability(sampling: Sampling) -> None:
    logits = np.random.default_rng(0).normal(size=12).astype(np.float32)
    shares = expected_shares(logits, sampling)
    counts = draw(logits, sampling, DRAWS)
    assert not counts[shares == 0].any()
    found = stats.chisquare(counts[shares > 0], DRAWS * shares[shares > 0])
    assert found.pvalue > 1e-2


def test_the_chi_square_test_can_fail() -> None:
    logits = np.random.default_rng(0).normal(size=12).astype(np.float32)
    counts = draw(logits, Sampling(1.0), DRAWS)
    assert stats.chisquare(counts, DRAWS * expected_shares(logits, Sampling(1.4))).pvalue < 1e-3


def test_a_large_vocabulary_has_the_candidates_of_the_definition() -> None:
    """The nucleus of flat logits is larger than what is sorted at first."""
    logits = np.random.default_rng(1).normal(size=2000).astype(np.float32)
    for sampling in (Sampling(1.0, top_p=0.9), Sampling(1.0, top_k=1000, top_p=0.95), Sampling(0.3, top_p=0.2)):
        shares = expected_shares(logits, sampling)
        chosen = {choose(logits, sampling, place=place) for place in range(100)}
        assert shares[list(chosen)].min() > 0
        bounds = np.cumsum(shares)
        for place in range(50):
            key = np.array([sampling.seed, place], dtype=np.uint64)
            random = np.random.Generator(np.random.Philox(key=key)).random()
            assert choose(logits, sampling, place=place) == np.searchsorted(bounds, random, side="right")


def test_among_equals_the_lowest_number_counts() -> None:
    logits = np.array([0, 1, 1, 1, 0], dtype=np.float32)
    assert choose(logits, Sampling(), place=0) == 1
    assert {choose(logits, Sampling(1.0, top_k=2), place=place) for place in range(200)} == {1, 2}
    assert {choose(logits, Sampling(1.0, top_p=0.3), place=place) for place in range(200)} == {1, 2}


def test_tokens_that_are_ruled_out_never_come() -> None:
    logits = np.array([-np.inf, 0, -np.inf, 0], dtype=np.float32)
    assert {choose(logits, Sampling(5.0), place=place) for place in range(200)} == {1, 3}
    assert {choose(logits, Sampling(5.0, top_k=4, top_p=0.999999), place=place) for place in range(200)} == {1, 3}


def test_seed_and_place_alone_make_the_random_number() -> None:
    logits = np.random.default_rng(0).normal(size=50).astype(np.float32)
    sampling = Sampling(1.0, seed=7)
    tokens = [choose(logits, sampling, place=place) for place in range(100)]
    assert tokens == [choose(logits, sampling, place=place) for place in range(100)]
    assert tokens != [choose(logits, Sampling(1.0, seed=8), place=place) for place in range(100)]
    nudged = logits + np.random.default_rng(1).normal(size=50).astype(np.float32) * 1e-7
    assert tokens == [choose(nudged, sampling, place=place) for place in range(100)]


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_refused(wrong: float) -> None:
    logits = np.array([0, wrong, 1], dtype=np.float32)
    for sampling in (Sampling(), Sampling(1.0)):
        with pytest.raises(LogitsError, match="token 1"):
            choose(logits, sampling, place=0)
    with pytest.raises(LogitsError, match="-inf"):
        choose(np.full(3, -np.inf, dtype=np.float32), Sampling(), place=0)
