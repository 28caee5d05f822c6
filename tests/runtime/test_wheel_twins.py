"""Cases of the installed onnx wheel, end to end: one region each, and the wheel's own numbers.

Decomposed Attention, and operators as such, some of which ONNX Runtime cannot run.
"""

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.backend.test.case.node import collect_testcases

from runtime.compile import optimize
from runtime.options import Options
from runtime.session import load

pytestmark = pytest.mark.cpu

SEED, COUNT = 20, 4  # drawn anew with every release of the wheel, alike on every run
TELLING = ("fullymasked_qk_matmul_output_mode3_zero", "4d_with_qk_matmul_softcap", "local_window_gqa_rank4_mask")
OPERATORS = {  # case of the wheel → the region that it becomes
    "flexattention_relative_positional": "attention",
    "flexattention_fp16": "attention",
    "linear_attention_gated_delta_gqa": "scan",
    "swiglu_alpha": "row",
    "swiglu_float16": "row",
}


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    """The wheel's cases by name, without "test_"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the wheel makes its data with numpy, overflows included
        return {case.name.removeprefix("test_"): case for case in collect_testcases(None)}


def twins(cases: dict[str, Any]) -> list[Any]:
    """Some twins by chance, and those that asked most of the fuser: kept scores, empty rows, softmax in float64."""
    named = (case for name, case in cases.items() if name.startswith("attention_") and name.endswith("_expanded"))
    found = [case for case in named if "bf16" not in case.name]
    telling = [case for case in found if any(part in case.name for part in TELLING)]
    return [*telling, *random.Random(SEED).sample([case for case in found if case not in telling], COUNT)]


def test_twins_are_one_region_with_the_wheels_numbers(cases: dict[str, Any], tmp_path: Path) -> None:
    chosen = twins(cases)
    assert len(chosen) >= len(TELLING) + COUNT
    for case in chosen:
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


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_run_with_our_kernel_and_without(name: str, cases: dict[str, Any], tmp_path: Path) -> None:
    case = cases[name]
    path, output = tmp_path / "model.onnx", tmp_path / "fused.onnx"
    onnx.save(case.model, path)
    report = optimize(path, output, options=Options.from_environment(), progress=lambda stage: None)
    assert [region.kind for region in report.regions] == [OPERATORS[name]], report.misses
    assert [node.domain for node in onnx.load(output).graph.node] == ["tilefuse"]
    inputs, wanted = case.data_sets[0]
    feeds = dict(zip([value.name for value in case.model.graph.input], inputs, strict=True))
    plain = ort.InferenceSession(output, providers=["CPUExecutionProvider"])  # runs the function bodies
    for session in (load(output), plain):
        for value, expected in zip(session.run(None, feeds), wanted, strict=True):
            np.testing.assert_allclose(np.asarray(value), expected, rtol=case.rtol, atol=case.atol)
