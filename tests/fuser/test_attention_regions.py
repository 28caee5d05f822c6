"""Attention regions in detail: what becomes an index predicate, what is loaded, and why others are refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from region_oracle import Scanned, check_regions, scanned

from models import traps
from models.attention import SPELLINGS
from models.catalogue import Entry
from models.graph import GraphWriter
from tilecore.contract.expr import loads, variables
from tilecore.contract.spec import AttentionSpec

ENTRIES: dict[str, Entry] = {entry.name: entry for entry in (*SPELLINGS, *traps.TRAPS)}


def attention_of(found: Scanned) -> AttentionSpec:
    (region,) = found.of("attention")
    assert isinstance(region.spec, AttentionSpec)
    return region.spec


def entry_of(name: str, folder: Path, *, dynamic: bool = True) -> Scanned:
    return scanned(ENTRIES[name].build(dynamic=dynamic), folder)


@pytest.mark.parametrize("name", ["causal_constant", "causal_trilu", "causal_range", "window"])
@pytest.mark.parametrize("dynamic", [True, False])
def test_masks_by_position_load_nothing(name: str, dynamic: bool, tmp_path: Path) -> None:
    found = entry_of(name, tmp_path, dynamic=dynamic)
    spec = attention_of(found)
    assert not loads(spec.score)
    assert {spec.score_axes[2], spec.score_axes[3]} <= variables(spec.score)
    assert "by position" in found.of("attention")[0].label


@pytest.mark.parametrize("name", ["guarded", "boolean_input"])
def test_nan_guards_are_kept(name: str, tmp_path: Path) -> None:
    assert attention_of(entry_of(name, tmp_path)).nan_guard


def test_no_guard_is_invented(tmp_path: Path) -> None:
    assert not attention_of(entry_of("bert_infinite", tmp_path)).nan_guard


def test_the_sink_is_a_logit_of_its_own(tmp_path: Path) -> None:
    spec = attention_of(entry_of("sink", tmp_path))
    assert spec.sink is not None
    assert len(spec.sink.axes) == 3


@pytest.mark.parametrize("name", ["grouped", "grouped_gather", "single_key_head"])
def test_keys_of_head_groups_are_read_where_they_are(name: str, tmp_path: Path) -> None:
    spec = attention_of(entry_of(name, tmp_path))
    (load,) = loads(spec.k.value)
    key, query = load.source.shape, loads(spec.q.value)[0].source.shape
    assert str(key[-1]) != str(query[-1]) or len(key) == 4  # fewer heads are stored than are used


def test_the_packed_projection_is_one_input(tmp_path: Path) -> None:
    spec = attention_of(entry_of("packed_gather", tmp_path))
    sources = {load.source.name for view in (spec.q, spec.k, spec.v) for load in loads(view.value)}
    assert len(sources) == 1


def test_rotary_embedding_is_part_of_the_views(tmp_path: Path) -> None:
    spec = attention_of(entry_of("rotary", tmp_path))
    assert len(loads(spec.q.value)) >= 3  # two halves of q and the tables
    assert len(loads(spec.v.value)) == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("softmax_over_queries", "the softmax sums over axis 2"),
        ("softmax_over_heads", "the softmax sums over axis 1"),
        ("old_softmax", "the softmax sums over 3 axes"),
    ],
)
def test_refusals_name_the_reason(name: str, reason: str, tmp_path: Path) -> None:
    found = entry_of(name, tmp_path)
    assert not found.of("attention")
    (miss,) = [miss for miss in found.misses if miss.kind == "attention"]
    assert reason in miss.reason


def test_scores_of_no_product_are_refused(tmp_path: Path) -> None:
    g = GraphWriter(17)
    s, v = g.input("s", np.float32, ("batch", 4, 6)), g.input("v", np.float32, ("batch", 6, 8))
    g.op("MatMul", g.op("Softmax", s), v, out="y")
    g.output("y", np.float32, ("batch", 4, 8))
    found = scanned(g.finish(), tmp_path)
    assert [miss.reason for miss in found.misses] == ["the scores do not come from a contraction"]


def test_a_factor_per_query_moves_behind_the_sum(tmp_path: Path) -> None:
    g = GraphWriter(17)
    q, k, v = (g.input(name, np.float32, ("batch", 6, 8)) for name in "qkv")
    gate = g.input("gate", np.float32, ("batch", 6, 1))
    weights = g.op("Softmax", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 2, 1])))
    g.op("MatMul", g.op("Mul", weights, gate), v, out="y")
    g.output("y", np.float32, ("batch", 6, 8))
    found = scanned(g.finish(), tmp_path)
    assert any(load.source.name == "gate" for load in loads(attention_of(found).outputs[0].value))
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal((2, 6, 8)).astype(np.float32) for name in "qkv"}
    check_regions(found, feeds | {"gate": random.standard_normal((2, 6, 1)).astype(np.float32)})


def test_symbols_without_an_input_take_a_graph_input(tmp_path: Path) -> None:
    """A mask by Range: `keys` only stands in a sum of dims of the region's own inputs."""
    g = GraphWriter(17)
    q, past, new = (g.input(n, np.float32, ("batch", d, 8)) for n, d in (("q", "seq"), ("past", "old"), ("new", "seq")))
    keys = g.op("Concat", past, new, axis=1, out="present")
    weights = g.op("Softmax", g.op("MatMul", q, g.op("Transpose", keys, perm=[0, 2, 1])))
    g.op("MatMul", weights, keys, out="y")
    g.output("present", np.float32, ("batch", "old + seq", 8))
    g.output("y", np.float32, ("batch", "seq", 8))
    spec = attention_of(scanned(g.finish(), tmp_path))
    assert [tensor.name for tensor in spec.inputs] == ["q", "present", "past"]  # past binds `old`, nothing loads it


def reduced(g: GraphWriter, kind: str, x: str, axis: int, *, keep: bool) -> str:
    """A reduction over one axis of x [batch, 6, 6]; where the axis is dropped, Unsqueeze brings it back."""
    value = g.op(kind, x, g.constant([axis]), keepdims=int(keep))
    return value if keep else g.op("Unsqueeze", value, g.constant([axis]))


def powers(g: GraphWriter, x: str, *, keep: bool = True) -> str:
    return g.op("Exp", g.op("Sub", x, reduced(g, "ReduceMax", x, -1, keep=keep)))


def dropped_axes(g: GraphWriter, x: str) -> str:
    e = powers(g, x, keep=False)
    return g.op("Div", e, reduced(g, "ReduceSum", e, -1, keep=False))


def reciprocal(g: GraphWriter, x: str) -> str:
    e = powers(g, x)
    return g.op("Mul", g.op("Reciprocal", reduced(g, "ReduceSum", e, -1, keep=True)), e)


def log_sum(g: GraphWriter, x: str) -> str:
    return g.op("Exp", g.op("Sub", x, reduced(g, "ReduceLogSumExp", x, -1, keep=False)))


def no_less_than_nothing(g: GraphWriter, x: str) -> str:
    """JAX: the maximum from −inf on, brought back to the shape of the scores, as is the sum."""
    shape = g.op("Shape", x)
    top = g.op("Max", reduced(g, "ReduceMax", x, -1, keep=False), g.constant(np.array(-np.inf, np.float32)))
    e = g.op("Exp", g.op("Sub", x, g.op("Expand", top, shape)))
    return g.op("Div", e, g.op("Expand", reduced(g, "ReduceSum", e, -1, keep=False), shape))


def sums_at_another_axis(g: GraphWriter, x: str) -> str:
    e = powers(g, x)
    total = g.op("ReduceSum", e, g.constant([-1]), keepdims=0)
    return g.op("Div", e, g.op("Unsqueeze", total, g.constant([1])))  # the sum of row j under column j


def maximum_of_columns(g: GraphWriter, x: str) -> str:
    e = g.op("Exp", g.op("Sub", x, reduced(g, "ReduceMax", x, 1, keep=True)))
    return g.op("Div", e, reduced(g, "ReduceSum", e, -1, keep=True))


def least_score_subtracted(g: GraphWriter, x: str) -> str:
    return g.op("Softmax", g.op("Sub", x, reduced(g, "ReduceMin", x, -1, keep=True)))


def of_more_axes(g: GraphWriter, x: str) -> str:
    """Row i of every sum under row i of the scores of every batch: [batch, batch, 6, 6], and back to three axes."""
    e = powers(g, x)
    total = g.op("Unsqueeze", reduced(g, "ReduceSum", e, -1, keep=True), g.constant([1]))
    return g.op("ReduceMean", g.op("Div", e, total), g.constant([0]), keepdims=0)


def square_attention(
    weights: Callable[[GraphWriter, str], str], folder: Path, *, batch: int | str = "batch"
) -> Scanned:
    """`weights` of q · kᵀ + mask, times v, for six queries and six keys."""
    g = GraphWriter(18)
    q, k, v = (g.input(name, np.float32, (batch, 6, 8)) for name in "qkv")
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 2, 1]))
    scores = g.op("Add", scores, g.input("mask", np.float32, (batch, 6, 6)))
    g.op("MatMul", weights(g, scores), v, out="y")
    g.output("y", np.float32, (batch, 6, 8))
    return scanned(g.finish(), folder)


def masked_feeds() -> dict[str, np.ndarray]:
    """Random operands, and a mask that hides single keys and one whole row."""
    random = np.random.default_rng(4)
    feeds = {name: random.standard_normal((2, 6, 8)).astype(np.float32) for name in "qkv"}
    mask = np.where(random.random((2, 6, 6)) < 0.3, -np.inf, 0.0).astype(np.float32)
    mask[1, 2] = -np.inf
    return feeds | {"mask": mask}


@pytest.mark.parametrize("batch", ["batch", 1])
@pytest.mark.parametrize("weights", [dropped_axes, reciprocal, log_sum, no_less_than_nothing])
def test_pieces_of_a_softmax_fuse_however_they_are_brought_together(
    weights: Callable[[GraphWriter, str], str], batch: int | str, tmp_path: Path
) -> None:
    """As the softmax that they are: nothing computes a sum of exponentials again to undo a division."""
    found = square_attention(weights, tmp_path, batch=batch)
    (region,) = found.regions
    assert (region.kind, region.label) == ("attention", "attention, masked")
    assert not any(miss.kind == "attention" for miss in found.misses)
    check_regions(found, {name: value[-1:] if batch == 1 else value for name, value in masked_feeds().items()})


@pytest.mark.parametrize("weights", [sums_at_another_axis, maximum_of_columns, of_more_axes])
def test_what_only_looks_like_a_softmax_is_none(weights: Callable[[GraphWriter, str], str], tmp_path: Path) -> None:
    found = square_attention(weights, tmp_path)
    assert not found.of("attention")
    check_regions(found, masked_feeds())


def test_where_attention_would_wait_for_itself_its_parts_are_regions(tmp_path: Path) -> None:
    found = square_attention(least_score_subtracted, tmp_path)
    assert [region.kind for region in found.regions] == ["contraction", "row", "contraction"]
    assert any("wait for its own result" in miss.reason for miss in found.misses if miss.kind == "attention")
    check_regions(found, masked_feeds())
