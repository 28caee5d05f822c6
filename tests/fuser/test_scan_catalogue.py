"""Every graph of the catalogues: what is fused, and that each region's spec means what its nodes compute."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from region_oracle import Scanned, check_regions, scanned

from models.attention import SPELLINGS
from models.catalogue import Entry
from models.traps import TRAPS

# Spellings without one attention region, and what the report says of them (nothing: no contraction is left to name).
NOT_FUSED: dict[str, tuple[str, ...]] = {
    "linear_attention": (),  # has no softmax
}


def assert_attention(found: Scanned, entry: Entry, not_fused: Mapping[str, tuple[str, ...]]) -> None:
    """One attention region, or the expected reason."""
    reasons = [miss.reason for miss in found.misses if miss.kind == "attention"]
    if entry.name not in not_fused:
        assert len(found.of("attention")) == 1, reasons
        assert not reasons
        return
    assert not found.of("attention")
    assert len(reasons) == len(not_fused[entry.name])
    for part, reason in zip(not_fused[entry.name], reasons, strict=True):
        assert part in reason


@pytest.mark.parametrize("entry", SPELLINGS, ids=lambda entry: entry.name)
def test_a_spelling_is_one_attention_region(entry: Entry, tmp_path: Path) -> None:
    found = scanned(entry.build(dynamic=True), tmp_path)
    assert_attention(found, entry, NOT_FUSED)
    for sizes in entry.sizes:
        check_regions(found, entry.feeds(sizes))


@pytest.mark.parametrize("entry", SPELLINGS, ids=lambda entry: entry.name)
def test_a_spelling_with_fixed_dims_is_one_attention_region(entry: Entry, tmp_path: Path) -> None:
    found = scanned(entry.build(dynamic=False), tmp_path)
    assert_attention(found, entry, NOT_FUSED)
    check_regions(found, entry.feeds(entry.sizes[0]))


@pytest.mark.parametrize("entry", TRAPS, ids=lambda entry: entry.name)
def test_traps_keep_their_meaning(entry: Entry, tmp_path: Path) -> None:
    found = scanned(entry.build(dynamic=True), tmp_path)
    for sizes in entry.sizes:
        check_regions(found, entry.feeds(sizes))
