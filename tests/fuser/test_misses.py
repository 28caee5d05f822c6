"""A miss says from where the search started, how far it got, what failed at which node, and what would help."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from region_oracle import scanned

from fuser import row
from fuser.coverage import coverage_of, workload_of
from fuser.load import load
from fuser.region import Miss
from fuser.rewrite import Replacement, rewrite
from fuser.scan import scan
from fuser.shapes import infer
from models.graph import GraphWriter, write

Build = Callable[[GraphWriter], None]


def misses_of(build: Build, folder: Path) -> tuple[Miss, ...]:
    """What the scan leaves alone in a graph."""
    g = GraphWriter(17)
    build(g)
    model = load(write(g.finish("misses"), folder / "model.onnx"))
    return scan(model, infer(model))[1]


def double_attention(g: GraphWriter) -> None:
    """Attention of doubles: found whole, refused for its type."""
    q, k, v = (g.input(name, np.float64, ("b", 4, "n", 8)) for name in "qkv")
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    g.op("MatMul", g.op("Softmax", scores, axis=-1), v, out="y")
    g.output("y", np.float64, ("b", 4, "n", 8))


def weights_from_nowhere(g: GraphWriter) -> None:
    """A softmax of an input: no scores."""
    scores, v = g.input("scores", np.float32, ("b", 4, "n", "n")), g.input("v", np.float32, ("b", 4, "n", 8))
    g.op("MatMul", g.op("Softmax", scores, axis=-1), v, out="y")
    g.output("y", np.float32, ("b", 4, "n", 8))


def counting(g: GraphWriter) -> None:
    """A running sum, for which there is no region."""
    x = g.input("x", np.float32, ("b", 64))
    g.op("Exp", g.op("CumSum", x, g.constant(np.array(1))), out="y")
    g.output("y", np.float32, ("b", 64))


@pytest.mark.parametrize("build", [double_attention, weights_from_nowhere, counting])
def test_every_field_is_filled(build: Build, tmp_path: Path) -> None:
    misses = misses_of(build, tmp_path)
    assert misses
    for miss in misses:
        for text in (miss.kind, miss.node, miss.reason, miss.op, miss.reached, miss.advice):
            assert text


def reduced_by_data(g: GraphWriter) -> None:
    x, axes = g.input("x", np.float32, ("b", 64)), g.input("axes", np.int64, (1,))
    g.op("Relu", g.op("ReduceSum", x, axes), out="y")
    g.output("y", np.float32, (None, None))


def best_token(g: GraphWriter) -> None:
    g.op("ArgMax", g.input("x", np.float32, ("b", 64)), axis=-1, out="y")
    g.output("y", np.int64, ("b", 1))


def static_cache(g: GraphWriter) -> None:
    cache, new = (g.input(name, np.float32, ("b", 2, size, 8)) for name, size in (("cache", 16), ("new", 1)))
    g.op("TensorScatter", cache, new, g.input("at", np.int64, ("b",)), out="y")
    g.output("y", np.float32, ("b", 2, 16, 8))


def written_elements(g: GraphWriter) -> None:
    data, indices = g.input("data", np.float32, ("b", 8)), g.input("indices", np.int64, ("n", 1))
    g.op("ScatterND", data, indices, g.input("updates", np.float32, ("n", 8)), out="y")
    g.output("y", np.float32, ("b", 8))


def open_loop(g: GraphWriter) -> None:
    """As many steps as an input says."""

    def body() -> None:
        g.input("step", np.int64, ())
        g.op("Identity", g.input("going", np.bool_, ()), out="goes_on")
        g.op("Tanh", g.input("state", np.float32, ("b", 8)), out="next")
        g.output("goes_on", np.bool_, ())
        g.output("next", np.float32, ("b", 8))

    steps, first = g.input("steps", np.int64, ()), g.input("first", np.float32, ("b", 8))
    g.op("Loop", steps, "", first, out="y", body=g.body("body", body))
    g.output("y", np.float32, ("b", 8))


TOLD: dict[str, tuple[Build, str, str]] = {
    "axes from data": (
        reduced_by_data,
        "the axes that ReduceSum .* are computed at run time",
        "make the axes a constant",
    ),
    "a head": (best_token, "ArgMax gives places rather than values", "nothing to do in the model"),
    "a static cache": (static_cache, "a region would copy the whole cache", "bind one buffer"),
    "scattered updates": (written_elements, "ScatterND writes a few elements", "nothing to do in the model"),
    "an open loop": (open_loop, "known at run time only", "a dim of an input or a constant"),
}


@pytest.mark.parametrize(("build", "reason", "advice"), TOLD.values(), ids=list(TOLD))
def test_the_advice_is_for_what_failed(build: Build, reason: str, advice: str, tmp_path: Path) -> None:
    g = GraphWriter(24 if build is static_cache else 17)
    build(g)
    (miss,) = scanned(g.finish(), tmp_path).misses
    assert re.search(reason, miss.reason)
    assert advice in miss.advice


def test_a_rule_that_fails_costs_its_region_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise IndexError("tuple index out of range")

    g = GraphWriter(17)
    x = g.input("x", np.float32, ("b", 64))
    g.op("Relu", g.op("MatMul", g.op("Softmax", g.op("Exp", x)), g.normal((64, 8), std=1.0)), out="y")
    g.output("y", np.float32, ("b", 8))
    monkeypatch.setattr(row, "from_reduction", broken)
    found = scanned(g.finish(), tmp_path)
    assert [region.kind for region in found.regions if region.kind == "contraction"] == ["contraction"]
    (miss,) = [miss for miss in found.misses if miss.op == "Softmax"]  # though another search may take the node
    assert miss.reason == "a fault of TileFuse: IndexError: tuple index out of range"
    assert miss.advice == "please report the model"


def test_it_says_how_far_the_search_got(tmp_path: Path) -> None:
    (miss,) = [miss for miss in misses_of(weights_from_nowhere, tmp_path) if miss.kind == "attention"]
    assert miss.op == "MatMul"
    assert miss.reached.startswith("its weights come from the softmax")
    assert miss.failed.startswith("Softmax ")
    assert miss.reason == "the scores do not come from a contraction"


def test_the_node_at_fault_is_named(tmp_path: Path) -> None:
    misses = misses_of(double_attention, tmp_path)
    assert {miss.failed.split()[0] for miss in misses} == {"MatMul"}
    assert all("float32" in miss.advice for miss in misses)


def test_coverage_counts_what_the_regions_took(tmp_path: Path) -> None:
    g = GraphWriter(17)
    x = g.input("x", np.float32, (128, 64))
    product = g.op("MatMul", x, g.constant(np.ones((64, 32), np.float32)))
    total = g.op("Hardmax", g.op("Relu", product), axis=-1)
    g.op("Concat", total, total, axis=1, out="y")
    g.output("y", np.float32, (128, 64))
    model = load(write(g.finish("coverage"), tmp_path / "model.onnx"))
    shapes = infer(model)
    regions, _ = scan(model, shapes)
    workload = workload_of(model, shapes)
    nothing = coverage_of(workload, (), model)
    assert (nothing.nodes_fused, nothing.flops) == (0, 0.0)
    assert nothing.flops_left > 2 * 128 * 64 * 32
    fused = rewrite(model, [Replacement(region, f"Fused{number}") for number, region in enumerate(regions)])
    coverage = coverage_of(workload, regions, fused.model)
    assert (coverage.nodes_fused, coverage.nodes_left) == (2, 2)
    assert coverage.flops_fused == 2 * 128 * 64 * 32 + 128 * 32
    assert [mover.split()[0] for mover in coverage.movers] == ["Concat"]


@pytest.mark.parametrize("backwards", [False, True])
def test_a_recurrence_that_was_written_out_is_a_miss_of_its_own(backwards: bool, tmp_path: Path) -> None:
    steps = 6
    g = GraphWriter(18)
    decay, x = (g.input(name, np.float32, ("batch", 8, steps, 4)) for name in ("decay", "x"))
    state = g.input("state", np.float32, ("batch", 8, 4))
    for step in reversed(range(steps)) if backwards else range(steps):
        kept, new = (g.op("Gather", value, g.constant(np.array(step, np.int64)), axis=2) for value in (decay, x))
        state = g.op("Add", g.op("Mul", kept, state), new)
    g.op("Identity", state, out="y")
    g.output("y", np.float32, ("batch", 8, 4))
    (miss,) = [miss for miss in scanned(g.finish(), tmp_path).misses if miss.kind == "scan"]
    assert miss.reason == "its 6 steps of Mul, Add were written out one by one"
    assert "Scan or Loop" in miss.advice


def test_layers_with_weights_of_their_own_are_no_recurrence(tmp_path: Path) -> None:
    g = GraphWriter(18)
    x = g.input("x", np.float32, ("batch", 8))
    for _ in range(6):
        x = g.op("Add", g.op("Mul", x, g.normal((8,), std=1.0)), g.normal((8,), std=1.0))
    g.op("Identity", x, out="y")
    g.output("y", np.float32, ("batch", 8))
    assert not [miss for miss in scanned(g.finish(), tmp_path).misses if miss.kind == "scan"]


def test_an_initializer_that_is_an_input_too_is_named_where_it_makes_a_shape(tmp_path: Path) -> None:
    g = GraphWriter(18)
    x = g.input("x", np.float32, ("batch", "seq", 32))
    shape = g.initializer(np.array([0, 0, 4, 8], np.int64), "shape")
    g.op("Softmax", g.op("Tanh", g.op("Reshape", x, shape)), axis=-1, out="y")
    g.output("y", np.float32, (None,) * 4)
    model = g.finish()
    model.graph.input.append(onnx.helper.make_tensor_value_info(shape, onnx.TensorProto.INT64, [4]))
    miss = next(miss for miss in scanned(model, tmp_path).misses if miss.op == "Softmax")
    assert "makes it at run time by shape, an initializer that is an input too" in miss.reason
    assert miss.failed.startswith("Reshape ")
    assert "remove_initializer_from_input" in miss.advice


def test_scores_of_an_outer_graph_are_named(tmp_path: Path) -> None:
    g = GraphWriter(18)
    flag = g.input("flag", np.bool_, ())
    q, k, v = (g.input(name, np.float32, ("batch", 6, 8)) for name in "qkv")
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 2, 1]))

    def branch(factor: float) -> Callable[[], None]:
        def write_branch() -> None:
            weights = g.op("Softmax", g.op("Mul", scores, g.constant(factor)), axis=-1)
            g.output(g.op("MatMul", weights, v), np.float32, ("batch", 6, 8))

        return write_branch

    g.op("If", flag, out="y", then_branch=g.body("yes", branch(0.5)), else_branch=g.body("no", branch(2.0)))
    g.output("y", np.float32, ("batch", 6, 8))
    reasons = [miss.reason for miss in scanned(g.finish(), tmp_path).misses if miss.kind == "attention"]
    assert reasons == ["the scores are computed outside of the body that this is in"] * 2
