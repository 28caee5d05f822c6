"""Attention whose masks, scores or probabilities others need too: further results, and reductions over the keys."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from region_oracle import Scanned, check_regions, scanned

from models.graph import GraphWriter
from tilecore.contract.expr import variables
from tilecore.contract.spec import AttentionSpec

BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 3, 5, 7, 8
Build = Callable[[GraphWriter, str, str], str]


def model_of(build: Build, folder: Path, *, dynamic: bool = False) -> Scanned:
    """softmax(q · kᵀ) · v with `build(g, scores, mask)` for the weights; it may add outputs of its own."""
    rows, keys = ("rows", "keys") if dynamic else (QUERIES, KEYS)
    g = GraphWriter(18)
    q = g.input("q", np.float32, (BATCH, HEADS, rows, WIDTH))
    k, v = (g.input(name, np.float32, (BATCH, HEADS, keys, WIDTH)) for name in "kv")
    mask = g.input("mask", np.float32, (BATCH, HEADS, rows, keys))
    weights = build(g, g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), mask)
    g.op("MatMul", weights, v, out="y")
    g.output("y", np.float32, (BATCH, HEADS, rows, WIDTH))
    return scanned(g.finish(), folder)


def show(g: GraphWriter, value: str, name: str, keys: int | str = KEYS, rows: int | str = QUERIES) -> str:
    """The value, as an output of the model."""
    g.op("Identity", value, out=name)
    g.output(name, np.float32, (BATCH, HEADS, rows, keys))
    return value


def feeds() -> dict[str, np.ndarray]:
    """Random operands; the mask has holes and hides whole rows."""
    random = np.random.default_rng(3)
    shapes = {"q": (QUERIES, WIDTH), "k": (KEYS, WIDTH), "v": (KEYS, WIDTH)}
    values = {name: random.standard_normal((BATCH, HEADS, *shape), np.float32) for name, shape in shapes.items()}
    mask = np.where(random.random((BATCH, HEADS, QUERIES, KEYS)) < 0.4, -np.inf, 0.0).astype(np.float32)
    mask[0, 1, 2] = -np.inf
    return values | {"mask": mask}


def with_guard(g: GraphWriter, scores: str, mask: str) -> str:
    """Rows that the mask hides completely weigh nothing, as the definition of the operator Attention has it."""
    shares = g.op("Softmax", g.op("Add", scores, mask))
    top = g.op("ReduceMax", mask, g.constant(np.array([-1], np.int64)))
    hidden = g.op("Equal", top, g.constant(np.array(-np.inf, np.float32)))
    return g.op("Where", hidden, g.constant(np.array(0, np.float32)), shares)


def only_attention(found: Scanned) -> AttentionSpec:
    (region,) = found.regions
    assert isinstance(region.spec, AttentionSpec)
    return region.spec


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_guard_by_the_masks_maximum_is_reduced_over_the_keys(dynamic: bool, tmp_path: Path) -> None:
    found = model_of(with_guard, tmp_path, dynamic=dynamic)
    spec = only_attention(found)
    (step,) = spec.reductions
    assert step.kind == "max"
    assert step.var in variables(spec.outputs[0].value)
    assert spec.weight is None  # the condition is applied to the sum: one pass
    assert not spec.nan_guard
    check_regions(found, feeds())


def test_a_score_of_nan_in_an_open_row_stays_nan(tmp_path: Path) -> None:
    found = model_of(with_guard, tmp_path)
    given = feeds()
    given["q"][0, 0, 1, 0] = np.nan
    given["q"][0, 1, 2, 0] = np.nan  # a hidden row: 0 whatever its scores
    check_regions(found, given)


@pytest.mark.parametrize("stage", ["raw", "masked"])
def test_scores_are_a_second_result(stage: str, tmp_path: Path) -> None:
    def build(g: GraphWriter, scores: str, mask: str) -> str:
        masked = g.op("Add", scores, mask)
        show(g, scores if stage == "raw" else masked, "shown")
        return g.op("Softmax", masked)

    found = model_of(build, tmp_path)
    spec = only_attention(found)
    assert [result.place.axes == spec.score_axes for result in spec.outputs] == [False, True]
    check_regions(found, feeds())


@pytest.mark.parametrize("guard", [False, True])
def test_probabilities_are_a_second_result(guard: bool, tmp_path: Path) -> None:
    """Before the guard NaN, behind it 0: each output is what stands at its place in the model."""

    def build(g: GraphWriter, scores: str, mask: str) -> str:
        shares = g.op("Softmax", g.op("Add", scores, mask))
        zero = g.constant(np.array(0, np.float32))
        safe = g.op("Where", g.op("IsNaN", shares), zero, shares)
        show(g, safe if guard else shares, "shown")
        return safe

    found = model_of(build, tmp_path)
    assert len(only_attention(found).outputs) == 2
    check_regions(found, feeds())


def test_scores_and_probabilities_together(tmp_path: Path) -> None:
    def build(g: GraphWriter, scores: str, mask: str) -> str:
        return show(g, with_guard(g, show(g, scores, "scores"), mask), "shares")

    found = model_of(build, tmp_path)
    assert len(only_attention(found).outputs) == 3
    check_regions(found, feeds())


def test_a_mask_that_others_read_too_is_not_computed_twice(tmp_path: Path) -> None:
    def build(g: GraphWriter, scores: str, mask: str) -> str:
        twice = show(g, g.op("Add", mask, mask), "shown")
        return g.op("Softmax", g.op("Add", scores, twice))

    found = model_of(build, tmp_path)
    (region,) = found.of("attention")
    assert "mask" not in {value.name for value in region.inputs}
    check_regions(found, feeds())


def test_shared_probabilities_of_broadcast_values_are_refused(tmp_path: Path) -> None:
    """One set of probabilities for several heads of V: their place is not one per head."""
    g = GraphWriter(18)
    q, k = g.input("q", np.float32, (BATCH, 1, QUERIES, WIDTH)), g.input("k", np.float32, (BATCH, 1, KEYS, WIDTH))
    v = g.input("v", np.float32, (BATCH, HEADS, KEYS, WIDTH))
    shares = g.op("Softmax", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), out="shares")
    g.op("MatMul", shares, v, out="y")
    g.output("shares", np.float32, (BATCH, 1, QUERIES, KEYS))
    g.output("y", np.float32, (BATCH, HEADS, QUERIES, WIDTH))
    found = scanned(g.finish(), tmp_path)
    assert not found.of("attention")
    assert any("does not have one element per batch, head, query and key" in miss.reason for miss in found.misses)
