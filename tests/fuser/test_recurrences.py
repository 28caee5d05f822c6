"""Recurrences, however they are spelled, become one scan region that means what the model does."""

from pathlib import Path

import onnx
import pytest
from region_oracle import check_regions, scanned

from models.recurrences import both_ways_model, early_exit_model, recurrence_feeds, recurrence_models
from tilecore.contract.spec import ScanSpec

MODELS = recurrence_models()
STATES = {"linear-attention": 2, "linear-einsum": 2, "causal-cumsum": 2}  # others carry one


@pytest.mark.parametrize("name", MODELS)
def test_one_region_that_means_the_same(name: str, tmp_path: Path) -> None:
    found = scanned(MODELS[name], tmp_path)
    assert [region.kind for region in found.regions] == ["scan"], found.misses
    spec = found.regions[0].spec
    assert isinstance(spec, ScanSpec)
    assert len(spec.states) == STATES.get(name, 1)
    for seq in (1, 5):
        check_regions(found, recurrence_feeds(MODELS[name], 1, seq=seq))


def test_heads_are_groups_of_their_own(tmp_path: Path) -> None:
    (region,) = scanned(MODELS["scan-gated"], tmp_path).regions
    assert isinstance(region.spec, ScanSpec)
    assert str(region.spec.group.extent) == "(batch * 2)"
    assert [len(state.axes) for state in region.spec.states] == [2]
    assert region.spec.column is not None
    assert str(region.spec.column.extent) == "9"


def test_sums_in_opposite_directions_are_kept_apart(tmp_path: Path) -> None:
    found = scanned(both_ways_model(), tmp_path)
    assert len(found.of("scan")) == 2, found.misses
    for seq in (1, 5):
        check_regions(found, recurrence_feeds(both_ways_model(), 1, seq=seq))


def test_a_loop_that_may_end_early_is_left_with_the_reason(tmp_path: Path) -> None:
    found = scanned(early_exit_model(), tmp_path)
    assert not found.of("scan")
    assert [miss.reason for miss in found.misses if miss.kind == "scan"] == [
        "the loop may end early: its condition is computed in the body"
    ]


def test_models_are_valid() -> None:
    for model in (*MODELS.values(), early_exit_model()):
        onnx.checker.check_model(model)
