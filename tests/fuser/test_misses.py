"""A miss says from where the search started, how far it got, what failed at which node, and what would help."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from region_oracle import scanned

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
