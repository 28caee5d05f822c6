"""Programs over rows on the CUDA backend: threads and runs of columns, text, resources; on a card against float64."""

from pathlib import Path
from typing import Any

import pytest
from cuda_specs import BF16, F16, F32, RowForm, row_spec

from tilecore.contract.expr import Sym, Var, binary, const
from tilecore.contract.spec import Spec
from tilecore.cuda.compile import candidates, compile_cuda, generate
from tilecore.cuda.errors import CudaError
from tilecore.cuda.launch import Launcher
from tilecore.cuda.profile import H100
from tilecore.cuda.row_plan import RowPlan
from tilecore.cuda.vectors import STEP, run_start, uniform

FORMS = [
    RowForm("rmsnorm", Sym("R"), 4096),
    RowForm("layernorm", Sym("R"), 5120, F16),
    RowForm("softmax", Sym("R"), 1000, F32),
    RowForm("softmax", 33, 131),
    RowForm("swiglu", 70, 14336),
    RowForm("rope", 6 * 50, 128, positions=50),
    RowForm("rope", 40, 24, F16, positions=8),
    RowForm("layernorm", 129, 768),
    RowForm("rmsnorm", 3, 30000),
]


def planned(form: RowForm) -> tuple[RowPlan, str]:
    spec = row_spec(form)
    source = generate(spec, next(iter(candidates(spec, H100))), label="Rows")
    assert isinstance(source.plan, RowPlan)
    return source.plan, source.text


def test_a_row_is_shared_so_that_each_thread_has_a_few_runs_of_16_bytes() -> None:
    plan, _ = planned(RowForm("rmsnorm", 8192, 4096))
    assert (plan.vector, plan.lanes, plan.rows, plan.chunks) == (8, 256, 1, 2)
    short, _ = planned(RowForm("rope", 8192, 128, positions=64))
    assert (short.vector, short.lanes, short.rows, short.chunks) == (8, 16, 16, 1)


def test_what_several_statements_read_is_fetched_once() -> None:
    plan, text = planned(RowForm("layernorm", 8192, 4096))
    assert [fetch.load.source.name for fetch in plan.fetches] == ["x", "weight", "bias"]
    assert text.count("x_data +") == 1


def test_rotated_halves_are_fetched_in_runs_only_where_they_exist() -> None:
    plan, text = planned(RowForm("rope", 300, 128, positions=50))
    assert len(plan.fetches) == 5
    assert sum(fetch.paths != () for fetch in plan.fetches) == 2
    assert text.count("clear_run") == 2
    narrow, _ = planned(RowForm("rope", 40, 24, F16, positions=8))  # half a row is no multiple of a run
    assert {fetch.load.source.name for fetch in narrow.fetches} == {"x", "cos", "sin"}


def test_a_width_without_runs_is_read_one_by_one() -> None:
    plan, text = planned(RowForm("softmax", 33, 131))
    assert plan.vector == 1
    assert not plan.fetches
    assert "x_data[" in text


@pytest.mark.parametrize(
    ("offset", "start"),
    [(STEP + 8, "8"), (STEP, "0"), (STEP + 4, None), (STEP * 2, None), ((STEP + 16) % const(32), "16")],
)
def test_runs_are_consecutive_and_aligned(offset: Any, start: str | None) -> None:
    found = run_start(offset, 8)
    assert (None if found is None else str(found)) == start


def test_conditions_that_split_a_run_are_not_uniform() -> None:
    run = Var("run") * 8 + STEP
    assert uniform(binary("lt", run, const(64)), 8)
    assert uniform(binary("ge", run, const(64)), 8)
    assert not uniform(binary("lt", run, const(60)), 8)
    assert not uniform(binary("le", run, const(64)), 8)
    assert not uniform(binary("eq", run, const(64)), 8)


def test_rows_wider_than_registers_or_of_unknown_width_are_refused() -> None:
    with pytest.raises(CudaError, match="rows of 100000 columns in runs of 8: more than the registers"):
        list(candidates(row_spec(RowForm("softmax", 8, 100000)), H100))
    spec = row_spec(RowForm("softmax", 8, 128))
    unknown = Var("c", extent=Sym("C"))
    with pytest.raises(CudaError, match="rows of C columns: CUDA keeps rows in registers"):
        list(candidates(type(spec)(spec.inputs, spec.row, unknown, spec.steps, spec.outputs), H100))


@pytest.mark.cpu
@pytest.mark.parametrize("form", FORMS[:6], ids=str)
def test_rows_build_without_a_card(form: RowForm, object_cache: Path) -> None:
    pytest.importorskip("nvidia", reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
    kernel = compile_cuda(row_spec(form), label="Rows", cache_directory=object_cache)
    assert kernel.cubin.report.spills == 0
    assert kernel.cubin.report.registers <= 128


def expected(form: RowForm, found: dict[str, Any], torch: Any) -> Any:
    """What a row program gives, in float64."""
    x = found["x"]
    match form.kind:
        case "rmsnorm":
            return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * found["weight"]
        case "layernorm":
            return torch.nn.functional.layer_norm(x, x.shape[-1:], found["weight"], found["bias"], 1e-5)
        case "softmax":
            return torch.softmax(x, -1)
        case "swiglu":
            return torch.nn.functional.silu(x) * found["up"]
        case _:
            half = x.shape[-1] // 2
            repeats = x.shape[0] // form.positions
            cos, sin = (found[name].repeat(repeats, 1) for name in ("cos", "sin"))
            return x * cos + torch.cat([-x[:, half:], x[:, :half]], -1) * sin


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_against_float64(form: RowForm, object_cache: Path) -> None:
    torch = pytest.importorskip("torch")
    types = {BF16: torch.bfloat16, F16: torch.float16, F32: torch.float32}
    spec: Spec = row_spec(form)
    found: dict[str, Any] = {}
    for tensor in (*spec.inputs, spec.outputs[0].place.tensor):
        shape = [77 if isinstance(dim, Sym) else int(dim.value) for dim in tensor.shape]  # type: ignore[union-attr]
        found[tensor.name] = torch.randn(*shape, device="cuda").to(types[tensor.dtype])
    found["y"].fill_(float("nan"))
    Launcher(compile_cuda(spec, label="Rows", cache_directory=object_cache))(
        found, stream=torch.cuda.current_stream().cuda_stream
    )
    torch.cuda.synchronize()
    want = expected(form, {name: array.double() for name, array in found.items()}, torch)
    error = float((found["y"].double() - want).norm() / want.norm())
    assert error < {BF16: 4e-3, F16: 5e-4, F32: 1e-6}[form.dtype]
