"""Models with bodies, optimised: run by default as a user runs them, they give the original's numbers either way."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from models.bodies import BODIES, flagged
from models.catalogue import Entry
from models.graph import write
from runtime.compile import optimize
from runtime.options import Options
from runtime.verify import verify

pytestmark = pytest.mark.cpu

CHECKED = ("nested_decoder", "growing_loop", "norms_in_a_branch")


def silent(stage: str) -> None:
    """No progress is shown."""


@pytest.mark.parametrize("entry", [e for e in BODIES if e.name in CHECKED], ids=lambda entry: entry.name)
def test_a_fused_body_gives_the_original_numbers_in_a_default_session(entry: Entry, tmp_path: Path) -> None:
    path, output = write(entry.build(dynamic=True), tmp_path / "model.onnx"), tmp_path / "fused.onnx"
    report = optimize(path, output, options=Options.from_environment(), progress=silent, verify=False)
    assert any(region.body for region in report.regions)
    for flag in (False, True):
        verdict = verify(path, output, inputs=flagged(entry.feeds(entry.sizes[1]), flag=flag))
        assert verdict.ok, verdict


def test_generated_inputs_try_both_branches(tmp_path: Path) -> None:
    entry = next(entry for entry in BODIES if entry.name == "merged_decoder")
    path, output = write(entry.build(dynamic=True), tmp_path / "model.onnx"), tmp_path / "fused.onnx"
    optimize(path, output, options=Options.from_environment(), progress=silent)
    verdict = verify(path, output)
    assert verdict.ok
    assert any("flags true" in case for case in verdict.cases)
    assert any("flags false" in case for case in verdict.cases)


def test_the_default_optimiser_breaks_the_norms_in_a_branch_when_they_are_left_to_it(tmp_path: Path) -> None:
    """What the session above is proof against: if this fails, ONNX Runtime was mended and that test is weaker."""
    entry = next(entry for entry in BODIES if entry.name == "norms_in_a_branch")
    path = write(entry.build(dynamic=True), tmp_path / "model.onnx")
    plain = ort.SessionOptions()
    plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    wrong = 0
    for flag in (False, True):
        feeds = flagged(entry.feeds({}), flag=flag)
        (wanted,) = ort.InferenceSession(path, plain).run(None, feeds)
        (found,) = ort.InferenceSession(path).run(None, feeds)
        wrong += not np.allclose(np.asarray(found), np.asarray(wanted), rtol=1e-3, atol=1e-3, equal_nan=True)
    assert wrong
