"""The scan kernel: its definition against plain loops, the traced program and the machine code against both."""

from pathlib import Path

import numpy as np
import pytest
from scan_specs import ScanCase, scan_cases

from tilecore.call import load_kernel
from tilecore.compile import compile_spec
from tilecore.contract.evaluate import evaluate
from tilecore.interpret import interpret
from tilecore.library import kernel_for, scan
from tilecore.library.schedule import schedule
from tilecore.profile import detect_profile
from tilecore.toolchain import find_toolchain
from tilecore.trace import trace

FORMS = tuple(scan_cases(0))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("time", [1, 5])
def test_the_definition_is_what_plain_loops_give(form: str, time: int) -> None:
    case = scan_cases(1, time=time)[form]
    got = evaluate(case.spec, case.arrays)
    assert list(got) == list(case.expected)
    for name, value in case.expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block_n", [4, 16])
def test_the_traced_kernel(form: str, block_n: int) -> None:
    case = scan_cases(2, time=3)[form]
    kernel, operands = kernel_for(case.spec)
    extents = {"block_n": block_n if case.spec.column else 1}
    got = interpret(trace(kernel, inputs=case.spec.inputs, operands=operands, extents=extents), case.arrays)
    for name, value in case.expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


def test_one_pass_over_the_state_updates_and_reads_it() -> None:
    for form, passes in (("delta", 2), ("selective", 1), ("prefix", 1)):
        plan = schedule(scan_cases(3)[form].spec)
        assert len(plan.steps) == passes, form
        assert len(plan.in_place) == (form != "prefix"), f"{form}: an old state that is stored must outlive the step"


def test_the_scan_kernel_is_short() -> None:
    text = Path(scan.__code__.co_filename).read_text().split("@dataclass")[0]
    body = text[text.index("def scan") :]
    assert len(body.splitlines()) < 80


@pytest.fixture(scope="module")
def compiled(object_cache: Path) -> dict[str, list[np.ndarray]]:
    """Every form at two lengths of time by one kernel each, from machine code."""
    profile, toolchain = detect_profile(), find_toolchain(object_cache)
    results: dict[str, list[np.ndarray]] = {}
    for form, case in scan_cases(4).items():
        kernel = compile_spec(case.spec, label="Test", profile=profile, targets=(profile.target,))
        call = load_kernel(kernel, profile.target, toolchain)
        for time in (0, 1, 5):
            sized = scan_cases(4, time=time)[form]
            results[f"{form}{time}"] = list(call(*(sized.arrays[tensor.name] for tensor in case.spec.inputs)))
    return results


@pytest.mark.cpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("time", [0, 1, 5])
def test_machine_code(form: str, time: int, compiled: dict[str, list[np.ndarray]]) -> None:
    case: ScanCase = scan_cases(4, time=time)[form]
    for value, (name, expected) in zip(compiled[f"{form}{time}"], case.expected.items(), strict=True):
        scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
        np.testing.assert_allclose(value, expected, rtol=0, atol=3e-6 * scale, err_msg=name)
