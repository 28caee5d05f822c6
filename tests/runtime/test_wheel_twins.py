"""Decomposed Attention cases of the installed onnx wheel, end to end: one region each, and the wheel's own numbers."""

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.backend.test.case.node import collect_testcases

from runtime.compile import optimize
from runtime.options import Options
from runtime.session import load

pytestmark = pytest.mark.cpu

SEED, COUNT = 20, 4  # drawn anew with every release of the wheel, alike on every run
TELLING = ("fullymasked_qk_matmul_output_mode3_zero", "4d_with_qk_matmul_softcap", "local_window_gqa_rank4_mask")


def twins() -> list[Any]:
    """Some twins by chance, and those that asked most of the fuser: kept scores, empty rows, softmax in float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the wheel makes its data with numpy, overflows included
        cases = collect_testcases("Attention")
    found = [case for case in cases if case.name.endswith("_expanded") and "bf16" not in case.name]
    telling = [case for case in found if any(part in case.name for part in TELLING)]
    return [*telling, *random.Random(SEED).sample([case for case in found if case not in telling], COUNT)]


def test_twins_are_one_region_with_the_wheels_numbers(tmp_path: Path) -> None:
    cases = twins()
    assert len(cases) >= len(TELLING) + COUNT
    for case in cases:
        path, output = tmp_path / "model.onnx", tmp_path / "fused.onnx"
        onnx.save(case.model, path)
        report = optimize(path, output, options=Options.from_environment(), progress=lambda stage: None, verify=False)
        assert [region.kind for region in report.regions] == ["attention"], case.name
        inputs, wanted = case.data_sets[0]
        names = [value.name for value in case.model.graph.input]
        got: list[Any] = list(load(output).run(None, dict(zip(names, inputs, strict=True))))
        for value, expected in zip(got, wanted, strict=True):
            assert value.dtype == expected.dtype, case.name
            np.testing.assert_allclose(value, expected, rtol=case.rtol, atol=case.atol, err_msg=case.name)
