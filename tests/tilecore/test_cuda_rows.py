"""Programs over rows on the CUDA backend: threads and runs of columns, text, resources; on a card against float64."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from card_emulator import emulate
from cuda_specs import BF16, F16, F32, RowForm, axis, row_spec, tensor

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Load, Sym, Var, binary, cast, const, select, unary
from tilecore.contract.spec import Place, Result, RowSpec, Spec, Step
from tilecore.cuda.compile import candidates, compile_cuda, generate
from tilecore.cuda.errors import CudaError
from tilecore.cuda.launch import Launcher
from tilecore.cuda.profile import A100, H100
from tilecore.cuda.row_plan import STATIC_BYTES, RowPlan
from tilecore.cuda.scales import keep_scale
from tilecore.cuda.vectors import STEP, run_start, uniform
from tilecore.interpret import interpret
from tilecore.ir import Reduce
from tilecore.library import kernel_for
from tilecore.trace import trace

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
    RowForm("softmax", 9000, 2048),  # more than caches keep
    RowForm("layernorm", 9000, 2048, F16),
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


def test_what_all_rows_read_comes_when_it_is_used_and_what_one_reads_at_once() -> None:
    layernorm, _ = planned(RowForm("layernorm", 8192, 4096))
    reductions = [at for at, stmt in enumerate(layernorm.program.body) if isinstance(stmt, Reduce)]
    assert [fetch.at for fetch in layernorm.fetches] == [0, reductions[1], reductions[1]]
    rmsnorm, _ = planned(RowForm("rmsnorm", 8192, 4096))
    (reduction,) = [at for at, stmt in enumerate(rmsnorm.program.body) if isinstance(stmt, Reduce)]
    assert rmsnorm.fetches[0].at == 0
    assert rmsnorm.fetches[1].at > reduction
    swiglu, _ = planned(RowForm("swiglu", 8192, 4096))
    assert [fetch.at for fetch in swiglu.fetches] == [0, 0]
    assert (swiglu.lanes, swiglu.chunks) == (512, 1)


def test_caches_are_spared_where_nothing_is_used_twice() -> None:
    for form, once in (
        (RowForm("softmax", 8192, 4096), "(i64)(8192) * 8192 > 33554432ll"),
        (RowForm("swiglu", Sym("R"), 4096), "(i64)(dim_R) * 8192 > 33554432ll"),
        (RowForm("rope", 8192, 128, positions=64), "false"),  # halves are read by two threads
    ):
        plan, text = planned(form)
        assert f"const bool once = {once};" in text
        assert plan.once is (once != "false")


def test_rows_that_warps_share_leave_an_eighth_of_the_threads_free() -> None:
    softmax, _ = planned(RowForm("softmax", 8192, 4096))
    assert 7 * (softmax.shared_bytes + STATIC_BYTES) <= H100.shared_bytes < 8 * softmax.shared_bytes
    for form in (RowForm("layernorm", 8192, 4096), RowForm("softmax", 8192, 256), RowForm("swiglu", 8192, 4096)):
        assert planned(form)[0].shared_bytes == 0


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


@pytest.mark.parametrize("kind", ["sum", "min", "max", "prod"])
def test_a_factor_of_what_is_reduced_counts(kind: str) -> None:
    """Factors of tiles go to their readers, of which only a maximum is one."""
    r, c = axis("r", 5), axis("c", 24)
    x, y = tensor("x", F32, 5, 24), tensor("y", F32, 5, 24)
    tile, total = Step(Var("t", F32), "tile", unary("tanh", Load(x, (r, c)))), Var("total", F32)
    steps = (tile, Step(Var("half", F32), "tile", tile.var * 0.5))
    steps = (*steps, Step(total, kind, steps[1].var))
    spec = RowSpec((x,), r, c, steps, (Result(Place(y, (r, c), (r, c)), steps[1].var + total * 3.0),))
    function, operands = kernel_for(spec)
    program = trace(function, inputs=spec.inputs, operands=operands, extents={"block_m": 1})
    given = np.random.default_rng(0).standard_normal((5, 24))
    half = np.tanh(given) * 0.5
    reduced = {"sum": np.sum, "min": np.min, "max": np.max, "prod": np.prod}[kind](half, axis=1, keepdims=True)
    for one in (program, keep_scale(program)):
        np.testing.assert_allclose(interpret(one, {"x": given})["y"], half + reduced * 3, rtol=1e-6, atol=1e-6)


@pytest.mark.cpu
def test_integers_wrap_as_their_types_do_and_keep_their_64_bits(object_cache: Path) -> None:
    """The text, run on the processor, against numpy's integers."""
    r, c = axis("r", 3), axis("c", 40)
    wide, small, byte = (tensor(name, dtype, 3, 40) for name, dtype in
                         (("wide", DType.I64), ("small", DType.I8), ("byte", DType.U8)))  # fmt: skip
    at = (r, c)
    shown = cast(Load(wide, at), DType.BOOL)
    sums = cast(Load(small, at) * 3, F32) + cast(Load(byte, at) + const(200, DType.U8), F32)
    narrowed = cast(cast(Load(wide, at) // 3, DType.U8), F32)
    scaled = cast(unary("abs", binary("max", Load(wide, at), c - 2**40)) % 1000003, F32)
    values = {"y": select(shown, sums, -1.0), "narrowed": narrowed, "scaled": scaled}
    results = tuple(Result(Place(tensor(name, F32, 3, 40), at, at), value) for name, value in values.items())
    spec = RowSpec((wide, small, byte), r, c, (), results)
    rng = np.random.default_rng(0)
    found: dict[str, np.ndarray] = {
        "wide": rng.integers(-(2**62), 2**62, (3, 40)) >> rng.integers(0, 62, (3, 40)) << 32,
        "small": rng.integers(-128, 128, (3, 40)).astype(np.int8),
        "byte": rng.integers(0, 256, (3, 40)).astype(np.uint8),
    } | {name: np.full((3, 40), np.nan, np.float32) for name in values}
    source = generate(spec, candidates(spec, A100)[0], label="Rows", profile=A100)
    assert isinstance(source.plan, RowPlan)
    emulate(source, found, {}, object_cache, blocks=-(-3 // source.plan.rows))
    wide_, small_, byte_ = found["wide"], found["small"], found["byte"]
    total = (small_ * np.int8(3)).astype(np.float32) + (byte_ + np.uint8(200)).astype(np.float32)
    np.testing.assert_array_equal(found["y"], np.where(wide_ != 0, total, -1))
    np.testing.assert_array_equal(found["narrowed"], (wide_ // 3).astype(np.uint8))
    np.testing.assert_array_equal(
        found["scaled"], (np.abs(np.maximum(wide_, np.arange(40) - 2**40)) % 1000003).astype(np.float32)
    )


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
    for one in (*spec.inputs, spec.outputs[0].place.tensor):
        shape = [77 if isinstance(dim, Sym) else int(dim.value) for dim in one.shape]  # type: ignore[union-attr]
        found[one.name] = torch.randn(*shape, device="cuda").to(types[one.dtype])
    found["y"].fill_(float("nan"))
    Launcher(compile_cuda(spec, label="Rows", cache_directory=object_cache))(
        found, stream=torch.cuda.current_stream().cuda_stream
    )
    torch.cuda.synchronize()
    want = expected(form, {name: array.double() for name, array in found.items()}, torch)
    error = float((found["y"].double() - want).norm() / want.norm())
    assert error < {BF16: 4e-3, F16: 5e-4, F32: 1e-6}[form.dtype]
