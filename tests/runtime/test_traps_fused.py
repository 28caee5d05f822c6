"""Graphs that ONNX Runtime's own optimiser miscompiles: fused, they are right in a session as a user makes it."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from models.graph import write
from models.traps import TRAPS
from runtime.compile import optimize
from runtime.options import Options
from runtime.verify import verify

pytestmark = pytest.mark.cpu

MISCOMPILED = ("norm_without_keepdims", "norm_without_keepdims_square", "norm_fourth_power", "norm_third_power")


def silent(stage: str) -> None:
    """No progress is shown."""


@pytest.mark.parametrize("name", MISCOMPILED)
def test_a_miscompiled_graph_is_right_once_it_is_fused(name: str, tmp_path: Path) -> None:
    entry = next(entry for entry in TRAPS if entry.name == name)
    path, output = write(entry.build(dynamic=True), tmp_path / "model.onnx"), tmp_path / "fused.onnx"
    optimize(path, output, options=Options.from_environment(), progress=silent, verify=False)
    for sizes in entry.sizes:
        verdict = verify(path, output, inputs=entry.feeds(sizes))
        assert verdict.ok, verdict


@pytest.mark.parametrize("name", MISCOMPILED)
def test_the_graph_as_it_was_is_wrong_in_a_default_session(name: str, tmp_path: Path) -> None:
    """What the test above is proof against: if this fails, ONNX Runtime was mended and that one is weaker."""
    entry = next(entry for entry in TRAPS if entry.name == name)
    path, feeds = write(entry.build(dynamic=True), tmp_path / "model.onnx"), entry.feeds(entry.sizes[0])
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    (wanted,) = ort.InferenceSession(path, options).run(None, feeds)
    quiet = ort.SessionOptions()
    quiet.log_severity_level = 4
    session = ort.InferenceSession(path, quiet)
    if name == "norm_without_keepdims":
        with pytest.raises(Exception, match="LayerNorm"):  # ONNX Runtime's exceptions share no base but Exception
            session.run(None, feeds)
        return
    (found,) = session.run(None, feeds)
    assert not np.allclose(np.asarray(found), np.asarray(wanted), rtol=1e-3, atol=1e-3, equal_nan=True)
