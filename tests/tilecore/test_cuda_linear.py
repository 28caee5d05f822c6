"""Recurrences that are linear attention: proofs and refusals, the text against float64, cubins, runs on a card."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chunked_forms import TYPES, LinearForm, linear_spec
from cuda_arrays import TOLERANCE, error
from cuda_specs import BF16, F16, F32
from machine_code import disassemble

from tilecore.contract.evaluate import evaluate
from tilecore.contract.expr import Load, Sym, cast, const, unary
from tilecore.contract.spec import ScanSpec
from tilecore.cuda.compile import CudaKernel, CudaSource, candidates, compile_cuda, generate
from tilecore.cuda.errors import CudaError
from tilecore.cuda.kernel import KernelPlan
from tilecore.cuda.launch import Launcher
from tilecore.cuda.linear import linear_operands
from tilecore.cuda.profile import H100
from tilecore.interpret import interpret
from tilecore.library.linear_attention import linear_attention
from tilecore.trace import trace

PLAIN = LinearForm(8, 32, 4096, 128, 128)
SMALL = LinearForm(2, 3, 33, 16, 24, F16)


def exact(form: LinearForm, arrays: dict[str, Any]) -> tuple[Any, Any]:
    """(o, the last state) of [B, H, S, D] in the arrays' precision."""
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    scores = q @ k.swapaxes(-1, -2)
    t = np.arange(scores.shape[-1])
    seen = t[None] < t[:, None] + (0 if form.late else 1)
    out = (scores * (seen if isinstance(q, np.ndarray) else q.new_tensor(seen))) @ v
    state = k.swapaxes(-1, -2) @ v
    if form.past:
        out, state = out + q @ arrays["past"], state + arrays["past"]
    return out * form.scale, state


def source_of(form: LinearForm, **config: int) -> CudaSource:
    spec = linear_spec(form)
    (choice, *_) = candidates(spec, H100, config={"chunk": 64, **config} if config else None)
    return generate(spec, choice, label="Kernel")


def plan_of(source: CudaSource | CudaKernel) -> KernelPlan:
    assert isinstance(source.plan, KernelPlan)
    return source.plan


def random_arrays(form: LinearForm, steps: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of [B, H, S, D]."""
    rng = np.random.default_rng(seed)
    shapes = {name: (form.batch, form.heads, steps, form.width if name == "v" else form.depth) for name in "qkv"}
    if form.past:
        shapes["past"] = (form.batch, form.heads, form.depth, form.width)
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def in_memory(form: LinearForm, arrays: dict[str, Any]) -> dict[str, Any]:
    """Of [B, S, H, D] where the form says so."""
    turned = form.steps_first
    return {
        name: one.swapaxes(1, 2) if turned and name in ("q", "k", "v", "o") else one for name, one in arrays.items()
    }


@pytest.mark.parametrize(
    "form",
    [
        SMALL,
        replace(SMALL, steps_first=True, scale=0.25),
        replace(SMALL, past=True, present=True),
        replace(SMALL, late=True, past=True),
    ],
)
def test_chunks_and_a_state_are_the_recurrence(form: LinearForm) -> None:
    spec = linear_spec(form)
    program = trace(linear_attention, inputs=spec.inputs, operands=linear_operands(spec),
                    extents={"chunk": 16, "block_e": 8})  # fmt: skip
    arrays = random_arrays(form, 33)
    given = in_memory(form, arrays)
    expected, state = exact(form, arrays)
    for found in (interpret(program, given), evaluate(spec, given)):
        found = in_memory(form, dict(found))
        assert np.linalg.norm(found["o"] - expected) < 1e-12 * np.linalg.norm(expected)
        if form.present:
            assert np.linalg.norm(found["present"] - state) < 1e-12 * np.linalg.norm(state)


def refusals() -> list[tuple[str, ScanSpec, str]]:
    """Recurrences of other kinds."""
    spec = linear_spec(LinearForm(1, 1, 64, 64, 64))
    (state,), (total,) = spec.states, spec.totals
    old = Load(state.cell, (spec.group, *state.axes))
    added = state.update - old
    key, value = added.args  # type: ignore[union-attr]
    read = total.value.args  # type: ignore[union-attr]

    def changed(update: Any) -> ScanSpec:
        return replace(spec, states=(replace(state, update=update),))

    return [
        (
            "decay",
            changed(old * const(0.5, F32) + key * value),
            r"becomes .*; decays and other terms have no kernel yet",
        ),
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
        linear_operands(replace(spec, outputs=(replace(result, value=more),)))


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
    [PLAIN, LinearForm(2, 4, Sym("S"), 64, 64, F16, steps_first=True, past=True, present=True)],
    ids=["plain", "with states"],
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
    ],
)
def test_linear_attention(form: LinearForm, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    spec = linear_spec(form)
    steps = form.steps if isinstance(form.steps, int) else 321
    kind = getattr(torch, TYPES[form.dtype])
    found = {name: torch.tensor(array, device="cuda").to(kind) for name, array in random_arrays(form, steps).items()}
    expected, state = exact(form, {name: array.double() for name, array in found.items()})
    found = {name: array.contiguous() for name, array in in_memory(form, found).items()}
    found["o"] = torch.full_like(found["v"], float("nan"))
    found["present"] = torch.full((form.batch, form.heads, form.depth, form.width), float("nan"), device="cuda").to(
        kind
    )
    launch = Launcher(compile_cuda(spec, label="Kernel", cache_directory=tmp_path))
    launch(found, stream=torch.cuda.current_stream().cuda_stream)
    assert error(in_memory(form, found)["o"], expected) < TOLERANCE[form.dtype] * 1.5  # scores and state are rounded
    if form.present:
        assert error(found["present"], state) < TOLERANCE[form.dtype]
