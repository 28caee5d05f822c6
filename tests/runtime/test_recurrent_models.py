"""Models with recurrences from file to result: one fused node each, and what ONNX Runtime gives for the original."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import tilefuse
from models.recurrences import recurrence_feeds, recurrence_models

pytestmark = pytest.mark.cpu
MODELS = recurrence_models()


@pytest.mark.parametrize("name", MODELS)
def test_a_recurrence_runs_as_one_node(name: str, tmp_path: Path) -> None:
    original, fused = tmp_path / "model.onnx", tmp_path / "fused.onnx"
    onnx.save(MODELS[name], original)
    report = tilefuse.optimize(original, fused)
    assert [region.kind for region in report.regions] == ["scan"]
    assert [node.domain for node in onnx.load(fused).graph.node] == ["tilefuse"]
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    plain, session = ort.InferenceSession(original, options), tilefuse.load(fused)
    for seq in (1, 7):
        feeds = recurrence_feeds(MODELS[name], 3, seq=seq)
        for got, want in zip(session.run(None, feeds), plain.run(None, feeds), strict=True):
            np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-4, atol=1e-5)
