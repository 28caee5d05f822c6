"""Fused operators through the whole path: their kernels against ONNX Runtime's own."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from operator_cases import run
from test_expand_contrib import CASES

from runtime.compile import optimize
from runtime.options import Options
from runtime.session import load

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("name", ["GroupQueryAttention: rotary decode", "MultiHeadAttention: past, unidirectional"])
def test_a_fused_operator_computes_what_the_kernel_does(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = case.model(dynamic=True)
    onnx.save(model, tmp_path / "model.onnx")
    output = tmp_path / "fused.onnx"
    options = Options.from_environment()
    report = optimize(tmp_path / "model.onnx", output, options=options, progress=lambda _: None, verify=False)
    assert [region.kind for region in report.regions].count("attention") == 1, report.misses
    assert not any(node.op_type == case.op for node in onnx.load(output).graph.node)
    for value, wanted in zip(load(output).run(None, case.feeds()), run(model, case.feeds()), strict=True):
        np.testing.assert_allclose(np.asarray(value), wanted, rtol=1e-4, atol=1e-5)


def test_the_fused_model_also_runs_without_its_library(tmp_path: Path) -> None:
    case = CASES["RotaryEmbedding: partial"]
    model = case.model(dynamic=True)
    onnx.save(model, tmp_path / "model.onnx")
    options = Options.from_environment()
    output = tmp_path / "fused.onnx"
    optimize(tmp_path / "model.onnx", output, options=options, progress=lambda _: None)
    (value,) = run(onnx.load(output), case.feeds())
    np.testing.assert_allclose(value, run(model, case.feeds())[0], rtol=1e-4, atol=1e-5)
