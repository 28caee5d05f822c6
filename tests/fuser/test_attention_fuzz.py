"""Attention put together at random: no region computes anything else than the nodes it replaces."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from region_oracle import check_regions, scanned

from models.attention_mix import FEATURES, Mix, build, draw, feeds

GRAPHS = 20


@st.composite
def mixes(sample: st.DrawFn) -> Mix:
    """One option per feature; it shrinks to the plain ones. float16 has its own tests: its tolerance is another."""

    def choose(feature: str, options: tuple[str, ...]) -> str:
        return "float32" if feature == "dtype" else sample(st.sampled_from(options))

    return draw(choose, seed=sample(st.integers(0, 2**16)))


@settings(
    max_examples=GRAPHS,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(mix=mixes())
def test_random_attention_keeps_its_meaning(mix: Mix, tmp_path: Path) -> None:
    model = build(mix)
    found = scanned(model, tmp_path)
    assert found.regions  # how many become one attention region is for benchmarks/fuzz.py to count
    for sizes in mix.sizes:
        check_regions(found, feeds(mix, sizes, model))


@pytest.mark.parametrize("feature", [name for name, options in FEATURES.items() if len(options) > 1])
def test_a_mix_of_every_option_builds_the_same_bytes_twice(feature: str) -> None:
    for option in FEATURES[feature]:
        mix = draw(lambda name, options, option=option: option if name == feature else options[0])
        assert build(mix).SerializeToString() == build(mix).SerializeToString()
        (first, *_), again = mix.sizes, build(mix)
        given_inputs = feeds(mix, first, again)
        assert set(given_inputs) == {value.name for value in again.graph.input}
        assert all(isinstance(value, np.ndarray) for value in given_inputs.values())
