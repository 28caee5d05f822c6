"""Every graph of the catalogues: what is fused, and that each region's spec means what its nodes compute."""

from pathlib import Path

import pytest
from region_oracle import check_regions, scanned

from models.attention import SPELLINGS
from models.catalogue import Entry
from models.traps import TRAPS

# Spellings without one attention region, and what the report says of them (nothing: no contraction is left to name).
NOT_FUSED = {
    "shown_weights": "needed elsewhere too",
    "linear_attention": None,  # has no softmax
}
FORMS = {"symbolic": True, "static": False}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("entry", SPELLINGS, ids=lambda entry: entry.name)
def test_a_spelling_is_one_attention_region(entry: Entry, form: str, tmp_path: Path) -> None:
    found = scanned(entry.build(dynamic=FORMS[form]), tmp_path)
    reasons = [miss.reason for miss in found.misses if miss.kind == "attention"]
    if entry.name in NOT_FUSED:
        expected = NOT_FUSED[entry.name]
        assert not found.of("attention")
        assert [expected in reason for reason in reasons] == ([True] if expected else [])  # pyright: ignore[reportOperatorIssue]
    else:
        assert len(found.of("attention")) == 1, reasons
        assert not reasons


@pytest.mark.parametrize("entry", (*SPELLINGS, *TRAPS), ids=lambda entry: entry.name)
def test_regions_mean_what_their_nodes_compute(entry: Entry, tmp_path: Path) -> None:
    found = scanned(entry.build(dynamic=True), tmp_path)
    for sizes in entry.sizes:
        check_regions(found, entry.feeds(sizes))


@pytest.mark.parametrize("entry", (*SPELLINGS, *TRAPS), ids=lambda entry: entry.name)
def test_regions_of_static_graphs_mean_what_their_nodes_compute(entry: Entry, tmp_path: Path) -> None:
    found = scanned(entry.build(dynamic=False), tmp_path)
    check_regions(found, entry.feeds(entry.sizes[0]))
