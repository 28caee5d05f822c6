"""Optimising a fused model again changes nothing, and no model's inputs and outputs are changed by it."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from test_bodies import run
from test_rewrite import check_interface, fused

from fuser.find import find
from fuser.load import load
from fuser.save import save
from models.attention import SPELLINGS
from models.bodies import BODIES
from models.catalogue import Entry
from models.graph import GraphWriter, write
from models.traps import TRAPS

ENTRIES = (*SPELLINGS, *TRAPS, *BODIES)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_fused_model_has_nothing_left_to_fuse(entry: Entry, tmp_path: Path) -> None:
    path, once, twice = (tmp_path / f"{name}.onnx" for name in ("model", "once", "twice"))
    write(entry.build(dynamic=True), path)
    fused(path, once)
    model = load(once)
    found = find(model)
    save(found.model, twice)
    assert not found.regions
    check_interface(path, twice)
    before, after = onnx.load(once), onnx.load(twice)
    assert after.graph.node == before.graph.node
    assert after.functions == before.functions
    assert after.graph.initializer == before.graph.initializer


def odd_interface() -> onnx.ModelProto:
    """Outputs that are a weight, an input, an input through nodes that do nothing, and one value under two names."""
    g = GraphWriter(17)
    x = g.input("x", np.float32, ("rows", 64))
    g.input("unused", np.int64, ("others", 3))
    weight = g.normal((64, 64), std=0.1, name="w")
    product = g.op("Relu", g.op("MatMul", x, weight), out="y")
    g.op("Identity", product, out="again")
    g.op("Identity", g.op("Identity", x), out="same")
    g.op("Dropout", weight, out="weight_again")
    g.op("Cast", x, to=onnx.TensorProto.FLOAT, out="cast")
    for name, dims in (
        ("y", ("rows", 64)), ("again", ("rows", 64)), (weight, (64, 64)), ("same", ("rows", 64)),
        ("weight_again", (64, 64)), ("cast", ("rows", 64)),
    ):  # fmt: skip
        g.output(name, np.float32, dims)
    return g.finish()


def test_outputs_that_nothing_computes_keep_their_names_order_and_dims(tmp_path: Path) -> None:
    path, output = write(odd_interface(), tmp_path / "model.onnx"), tmp_path / "fused.onnx"
    assert fused(path, output).op_types
    check_interface(path, output)
    feeds: dict[str, Any] = {"x": np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)}
    feeds["unused"] = np.zeros((2, 3), np.int64)
    for found, wanted in zip(run(output, feeds), run(path, feeds), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
