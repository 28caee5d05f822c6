"""Rows of a table that data chooses: an index out of range is refused, as ONNX Runtime refuses it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest

from models.graph import GraphWriter, write
from runtime import session
from runtime.compile import optimize
from runtime.options import Options

pytestmark = pytest.mark.cpu

ROWS, WIDTH = 20, 16
Array = npt.NDArray[Any]


def embedding() -> onnx.ModelProto:
    """LayerNormalization of word rows (by ids, 32 bits) + position rows (by ids + 2)."""
    g = GraphWriter(17)
    ids, places = g.input("ids", np.int32, ("b", "s")), g.input("places", np.int64, ("b", "s"))
    words = g.op("Gather", g.normal((ROWS, WIDTH), std=1.0), ids)
    positions = g.op("Gather", g.normal((ROWS + 2, WIDTH), std=1.0), g.op("Add", places, g.constant(2)))
    scale, bias = g.normal((WIDTH,), std=1.0), g.normal((WIDTH,), std=1.0)
    g.op("LayerNormalization", g.op("Add", words, positions), scale, bias, out="y")
    g.output("y", np.float32, [None] * 3)
    return g.finish()


def elements() -> onnx.ModelProto:
    """The softmax of elements that another input chooses, plus rows chosen by pairs."""
    g = GraphWriter(17)
    x, which = g.input("x", np.float32, ("b", ROWS)), g.input("ids", np.int64, ("b", WIDTH))
    pairs = g.input("places", np.int64, ("b", 2))
    chosen = g.op("GatherElements", g.op("Tanh", x), which, axis=1)
    rows = g.op("GatherND", g.normal((3, ROWS, WIDTH), std=1.0), pairs)
    g.op("Softmax", g.op("Add", chosen, rows), out="y")
    g.output("y", np.float32, [None] * 2)
    return g.finish()


def sessions(model: onnx.ModelProto, folder: Path) -> tuple[ort.InferenceSession, ort.InferenceSession]:
    path, output = write(model, folder / "model.onnx"), folder / "fused.onnx"
    report = optimize(path, output, options=Options.from_environment(), progress=lambda _: None)
    gathers = [node for node in onnx.load(output).graph.node if node.op_type.startswith("Gather")]
    assert not report.faults
    assert not gathers
    plain = ort.SessionOptions()
    plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(path, plain), session.load(output)


def agree(original: ort.InferenceSession, ours: ort.InferenceSession, feeds: Mapping[str, Array]) -> None:
    (wanted,), (found,) = (of.run(None, dict(feeds)) for of in (original, ours))
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-4, atol=1e-5)


def refuse(original: ort.InferenceSession, ours: ort.InferenceSession, feeds: Mapping[str, Array], text: str) -> None:
    with pytest.raises(Exception, match=r"(?i)out of (data bounds|range)|invalid ind"):
        original.run(None, dict(feeds))
    with pytest.raises(Exception, match=text):
        ours.run(None, dict(feeds))


def test_an_embedding_refuses_indices_beyond_its_table(tmp_path: Path) -> None:
    original, ours = sessions(embedding(), tmp_path)
    ids, places = np.arange(-ROWS, ROWS, dtype=np.int32).reshape(2, ROWS), np.tile(np.arange(ROWS), (2, 1))
    agree(original, ours, {"ids": ids, "places": places})
    agree(original, ours, {"ids": ids, "places": np.full_like(places, -ROWS - 4)})  # the row that is first
    for wrong in (ROWS, -ROWS - 1, 2**31 - 1, -(2**31)):
        broken = ids.copy()
        broken[1, 7] = wrong
        text = f"index {wrong} is out of range: a table of {ROWS} rows takes {-ROWS} to {ROWS - 1}"
        refuse(original, ours, {"ids": broken, "places": places}, text)
    for wrong in (ROWS, -ROWS - 5, 2**40):
        broken = places.copy()
        broken[0, 3] = wrong
        refuse(
            original, ours, {"ids": ids, "places": broken}, f"index {wrong + 2} is out of range: a table of {ROWS + 2}"
        )
    empty = np.zeros((0, 4))
    agree(original, ours, {"ids": empty.astype(np.int32), "places": empty.astype(np.int64)})


def test_chosen_elements_and_pairs_are_checked(tmp_path: Path) -> None:
    original, ours = sessions(elements(), tmp_path)
    random = np.random.default_rng(0)
    feeds = {
        "x": random.standard_normal((4, ROWS)).astype(np.float32),
        "ids": random.integers(-ROWS, ROWS, (4, WIDTH)),
        "places": np.array([[0, 0], [2, ROWS - 1], [-3, -ROWS], [1, 5]]),
    }
    agree(original, ours, feeds)
    for name, place, wrong, rows in [
        ("ids", (2, 3), ROWS, ROWS),
        ("places", (1, 0), 3, 3),
        ("places", (3, 1), -ROWS - 1, ROWS),
    ]:
        broken = {key: value.copy() for key, value in feeds.items()}
        broken[name][place] = wrong
        refuse(original, ours, broken, f"index {wrong} is out of range: a table of {rows} rows")
