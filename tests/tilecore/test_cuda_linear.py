"""Recurrences that are linear attention: proofs and refusals, the text against float64, cubins, runs on a card."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chunked_forms import TYPES, LinearForm, exact_linear, linear_arrays, linear_spec
from cuda_arrays import TOLERANCE, error
from cuda_specs import BF16, F16, F32
from machine_code import disassemble

from tilecore.contract.evaluate import evaluate
from tilecore.contract.expr import Load, Sym, cast, const, unary
from tilecore.contract.spec import ScanSpec, outputs_of
from tilecore.cuda.compile import CudaKernel, CudaSource, candidates, compile_cuda, generate
from tilecore.cuda.errors import CudaError
from tilecore.cuda.kernel import KernelPlan
from tilecore.cuda.launch import Launcher
from tilecore.cuda.linear import linear_kernel
from tilecore.cuda.profile import H100
from tilecore.interpret import interpret
from tilecore.trace import trace

PLAIN = LinearForm(8, 32, 4096, 128, 128)
SMALL = LinearForm(2, 3, 33, 16, 24, F16)


def source_of(form: LinearForm, **config: int) -> CudaSource:
    spec = linear_spec(form)
    (choice, *_) = candidates(spec, H100, config={"chunk": 64, **config} if config else None)
    return generate(spec, choice, label="Kernel")


def plan_of(source: CudaSource | CudaKernel) -> KernelPlan:
    assert isinstance(source.plan, KernelPlan)
    return source.plan


@pytest.mark.parametrize(
    "form",
    [
        SMALL,
        replace(SMALL, steps_first=True, scale=0.25),
        replace(SMALL, past=True, present=True),
        replace(SMALL, late=True, past=True),
        replace(SMALL, decay="exp", weighted=True, past=True, present=True),
        replace(SMALL, decay="sigmoid", steps_first=True, present=True),
        replace(SMALL, decay="constant"),
        replace(SMALL, weighted=True, scale=2.0),
    ],
)
def test_chunks_and_a_state_are_the_recurrence(form: LinearForm) -> None:
    spec = linear_spec(form)
    function, operands = linear_kernel(spec)
    program = trace(function, inputs=spec.inputs, operands=operands, extents={"chunk": 16, "block_e": 8})
    arrays = linear_arrays(form, 33)
    expected, state = exact_linear(form, arrays)
    for found, tolerance in ((interpret(program, arrays), 1e-6), (evaluate(spec, arrays), 1e-12)):
        assert np.linalg.norm(found["o"] - expected) < tolerance * np.linalg.norm(expected)
        if form.present:
            assert np.linalg.norm(found["present"] - state) < tolerance * np.linalg.norm(state)


def test_a_decay_of_nothing_forgets_and_gives_no_nan() -> None:
    form = replace(SMALL, decay="exp", present=True)
    spec = linear_spec(form)
    function, operands = linear_kernel(spec)
    program = trace(function, inputs=spec.inputs, operands=operands, extents={"chunk": 16, "block_e": 8})
    arrays = linear_arrays(form, 33)
    arrays["g"][:, [3, 4, 20], :] = -np.inf
    arrays["g"][:, 25, 1] = -1e30
    expected, state = exact_linear(form, arrays)
    found = interpret(program, arrays)
    assert np.linalg.norm(found["o"] - expected) < 1e-6 * np.linalg.norm(expected)
    assert np.linalg.norm(found["present"] - state) < 1e-6 * np.linalg.norm(state)


def refusals() -> list[tuple[str, ScanSpec, str]]:
    """Recurrences of other kinds."""
    spec = linear_spec(LinearForm(1, 1, 64, 64, 64))
    (state,), (total,) = spec.states, spec.totals
    old = Load(state.cell, (spec.group, *state.axes))
    _, added = state.update.args  # type: ignore[union-attr]
    key, value = added.args  # type: ignore[union-attr]
    read = total.value.args  # type: ignore[union-attr]

    clock = cast(spec.time, F32)
    late = linear_spec(LinearForm(1, 1, 64, 64, 64, decay="exp", late=True))

    def changed(update: Any) -> ScanSpec:
        return replace(spec, states=(replace(state, update=update),))

    return [
        ("decay per column", changed(old * unary("exp", value) + key * value), "which is not one number per step"),
        ("unknown sign", changed(old * clock + key * value), "which may be negative"),
        ("negative", changed(old * const(-0.5, F32) + key * value), "which may be negative"),
        ("late decay", late, "read before its step is added"),
        ("gate", changed(old + key * value * unary("sigmoid", key)), "to which .* is added"),
        ("twice", changed(old + old + key * value), "becomes"),
        ("square", changed(old + key * key), "to which .* is added"),
        ("max", replace(spec, totals=(replace(total, kind="max"),)), "a max of"),
        ("read twice", replace(spec, totals=(replace(total, value=read[0] * read[1] * read[1]),)), "a sum of"),
        ("two sums", replace(spec, totals=(total, total)), "a recurrence of 2 sums"),
        ("no column", replace(spec, column=None), "a state over d, e"),
    ]


@pytest.mark.parametrize(("spec", "message"), [pytest.param(*rest, id=name) for name, *rest in refusals()])
def test_other_recurrences_are_refused_with_what_was_found(spec: ScanSpec, message: str, tmp_path: Path) -> None:
    with pytest.raises(CudaError, match=message):
        compile_cuda(spec, label="Kernel", cache_directory=tmp_path)


def test_an_output_that_reads_the_state_beside_its_sum_is_refused() -> None:
    spec = linear_spec(LinearForm(1, 1, 64, 64, 64))
    (result,), (state,) = spec.outputs, spec.states
    more = result.value + cast(Load(state.cell, (spec.group, const(0), state.axes[1])), BF16)
    with pytest.raises(CudaError, match=r"output o is .*, which reads more than"):
        linear_kernel(replace(spec, outputs=(replace(result, value=more),)))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (LinearForm(1, 1, 64, 80, 64), "linear attention of 80 and 64 columns: multiples of 64 are needed"),
        (
            LinearForm(1, 1, 64, 64, 64, F32),
            r"operand [QKV] is .*: tensor copies bring f16, bf16",
        ),
        (LinearForm(1, 1, 64, 256, 64), r"256 registers of tiles \(scores: 32, state: 128, o1: 32, before1: 64\)"),
    ],
)
def test_forms_without_a_kernel_are_refused(form: LinearForm, message: str, tmp_path: Path) -> None:
    with pytest.raises(CudaError, match=message):
        compile_cuda(linear_spec(form), label="Kernel", cache_directory=tmp_path)


def test_the_state_stays_in_registers_and_scores_are_shared() -> None:
    source = source_of(PLAIN)
    roles = plan_of(source).roles
    assert (roles.consumers, roles.parts, roles.block_rows) == (2, 1, 128)
    assert roles.shared == {"scores": 2}
    assert roles.exchanged == ("inside",)
    assert roles.fragments == {"scores": 16, "state": 64, "o1": 32}
    assert len(plan_of(source).staged_stores) == 1
    assert plan_of(source).maps[-1].box == (1, 1, 64, 64)
    assert "store_turned(" in source.text


def test_decays_are_summed_by_every_warp_and_values_packed_in_registers() -> None:
    source = source_of(replace(PLAIN, decay="exp", weighted=True))
    roles = plan_of(source).roles
    assert roles.lines == ("sums", "own1")  # kernels have an `own` themselves
    assert roles.packed == {"added": 16, "before1": 32}
    assert ("line_sums", 2 * 4 * 64 * 4) in plan_of(source).exchanged
    assert source.text.count("sum_line(") == 1
    assert "fetch_turned(v1_turned" in source.text


def test_one_warpgroup_shares_its_scores_with_nobody() -> None:
    assert plan_of(source_of(PLAIN, block_e=64)).roles.shared == {"scores": 1}


@pytest.mark.parametrize(
    ("form", "block"), [(PLAIN, 128), (replace(PLAIN, batch=1), 64), (replace(PLAIN, width=64), 64)]
)
def test_columns_are_split_where_groups_are_few(form: LinearForm, block: int) -> None:
    (choice, *_) = candidates(linear_spec(form), H100)
    assert choice.config["block_e"] == block


@pytest.mark.cpu
@pytest.mark.parametrize(
    "form",
    [
        PLAIN,
        LinearForm(2, 4, Sym("S"), 64, 64, F16, steps_first=True, past=True, present=True),
        replace(PLAIN, decay="exp", weighted=True, present=True),
    ],
    ids=["plain", "with states", "gated"],
)
def test_machine_code_and_resources(form: LinearForm, object_cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("nvidia", reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
    kernel = compile_cuda(linear_spec(form), label="Kernel", cache_directory=object_cache)
    assert (kernel.cubin.report.spills, kernel.cubin.report.stack) == (0, 0)
    assert kernel.plan.shared_bytes <= kernel.plan.profile.shared_bytes
    found = disassemble(kernel.cubin.image, tmp_path)
    assert {"HGMMA", "UTMALDG", "UTMASTG", "SYNCS"} <= set(found)
    assert not {"LDL", "STL", "HMMA"} & set(found)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "form",
    [
        LinearForm(2, 3, 200, 64, 64),
        LinearForm(1, 2, 77, 128, 128, F16, scale=0.125),
        LinearForm(20, 8, 1000, 128, 128, steps_first=True),
        LinearForm(3, 2, Sym("S"), 64, 128, F16, steps_first=True, past=True, present=True),
        LinearForm(2, 2, 130, 128, 64, past=True, present=True),
        LinearForm(1, 140, 65, 64, 256, late=True),
        LinearForm(1, 1, 1, 128, 64, F16),
        LinearForm(2, 3, 200, 64, 64, F16, decay="exp", weighted=True, past=True, present=True),
        LinearForm(20, 8, 300, 128, 128, steps_first=True, decay="sigmoid", present=True),
        LinearForm(3, 2, Sym("S"), 64, 128, F16, decay="constant"),
        LinearForm(1, 3, 77, 128, 64, F16, steps_first=True, weighted=True),
    ],
)
def test_linear_attention(form: LinearForm, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    check(form, linear_arrays(form, form.steps if isinstance(form.steps, int) else 321), torch, tmp_path)


@pytest.mark.gpu
def test_states_that_are_forgotten(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    form = LinearForm(1, 4, 200, 64, 64, F16, decay="exp", present=True)
    arrays = linear_arrays(form, 200)
    arrays["g"][:, [3, 4, 70, 127, 128], :] = -np.inf
    arrays["g"][:, 150, 1] = -1e30
    check(form, arrays, torch, tmp_path)


def check(form: LinearForm, arrays: dict[str, np.ndarray], torch: Any, cache: Path) -> None:
    """Run the kernel of a form on a card."""
    spec = linear_spec(form)
    kinds = {one.name: getattr(torch, TYPES[one.dtype]) for one in (*spec.inputs, *outputs_of(spec))}
    found = {name: torch.tensor(array, device="cuda").to(kinds[name]) for name, array in arrays.items()}
    expected, state = exact_linear(form, {name: array.double().cpu().numpy() for name, array in found.items()})
    results = {"o": expected, "present": state} if form.present else {"o": expected}
    for name, result in results.items():
        found[name] = torch.full(result.shape, float("nan"), device="cuda", dtype=kinds[name])
    launch = Launcher(compile_cuda(spec, label="Kernel", cache_directory=cache))
    launch(found, stream=torch.cuda.current_stream().cuda_stream)
    for name, result in results.items():  # scores, states and decayed values are rounded on the way
        assert error(found[name].cpu(), torch.tensor(result)) < TOLERANCE[form.dtype] * 1.5
