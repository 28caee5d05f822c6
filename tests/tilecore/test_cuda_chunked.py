"""Linear attention and the chunk scan of Mamba-2: the texts against float64, cubins and their code, runs on a card."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chunked_forms import (
    TYPES,
    LinearForm,
    ScanForm,
    exact_scan,
    linear_operands,
    scan_arrays,
    scan_operands,
)
from cuda_arrays import TOLERANCE, error
from cuda_specs import BF16, F16, F32, tensor
from machine_code import disassemble

from tilecore import language as T
from tilecore.contract.expr import Sym, loads
from tilecore.contract.spec import Tensor
from tilecore.cuda.chunked import compile_chunk_scan, compile_linear_attention
from tilecore.cuda.compile import CudaKernel, CudaSource, compile_tiles, generate_tiles
from tilecore.cuda.errors import CudaError
from tilecore.cuda.kernel import KernelPlan
from tilecore.cuda.launch import Launcher
from tilecore.cuda.recommend import Choice
from tilecore.cuda.views import inline_views
from tilecore.interpret import interpret
from tilecore.ir import Parallel
from tilecore.language import Handle
from tilecore.library.chunk_scan import chunk_scan
from tilecore.library.linear_attention import linear_attention
from tilecore.trace import trace

PLAIN = LinearForm(8, 32, 4096, 128, 128)
MAMBA = ScanForm(8, 4096, 80, 64, 128, 256)


def exact_linear(q: Any, k: Any, v: Any) -> np.ndarray:
    """Of [B, H, S, D] in float64."""
    return np.tril(q @ k.swapaxes(-1, -2)) @ v


def linear_source(form: LinearForm, **config: int) -> CudaSource:
    choice = Choice({"chunk": 64, "block_e": min(form.width, 128)} | config, 3, "given")
    return generate_tiles(linear_attention, linear_operands(form), choice, label="Kernel")


def scan_source(**config: int) -> CudaSource:
    choice = Choice({"block_m": 128, "block_k": 64} | config, 3, "given")
    return generate_tiles(chunk_scan, scan_operands(MAMBA), choice, label="Kernel")


def early_line(A: Handle, B: Handle, L: Handle, out: Handle) -> None:
    """out = A · Bᵀ in two halves of the depth, plus L per row; A, B[128, 128]."""
    with T.Kernel(1) as _:
        left = T.alloc_shared((128, 64), A.dtype)
        right = T.alloc_shared((128, 64), B.dtype)
        line = T.alloc_shared((128,), L.dtype)
        more, other = T.alloc_shared((128, 64), A.dtype), T.alloc_shared((128, 64), B.dtype)
        c = T.alloc_fragment((128, 128), T.float32)
        add = T.alloc_fragment((128,), T.float32)
        T.copy(A[0, 0], left)
        T.copy(B[0, 0], right)
        T.copy(L[0], line)
        T.gemm(left, right, c, transpose_B=True, clear=True)
        for i in T.Parallel(128):
            add[i] = line[i]
        for k in T.Pipelined(1, 2):
            T.copy(A[0, k * 64], more)
            T.copy(B[0, k * 64], other)
            T.gemm(more, other, c, transpose_B=True)
        for i, j in T.Parallel(128, 128):
            out[i, j] = T.cast(c[i, j] + add[i], out.dtype)


def line_operands() -> dict[str, Any]:
    return {"A": tensor("a", F16, 128, 128), "B": tensor("b", F16, 128, 128), "L": tensor("line", F32, 128),
            "out": tensor("o", F16, 128, 128)}  # fmt: skip


def plan_of(source: CudaSource) -> KernelPlan:
    assert isinstance(source.plan, KernelPlan)
    return source.plan


@pytest.mark.parametrize("form", [LinearForm(2, 2, 100, 16, 24), LinearForm(1, 3, 33, 8, 8, steps_first=True)])
def test_chunks_and_a_state_give_linear_attention(form: LinearForm) -> None:
    program = trace(linear_attention, operands=linear_operands(form), extents={"chunk": 16, "block_e": 8})
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((form.batch, form.heads, 100 if form.steps == 100 else 33, columns))
              for name, columns in (("q", form.depth), ("k", form.depth), ("v", form.width))}  # fmt: skip
    expected = exact_linear(**arrays)
    if form.steps_first:
        arrays = {name: array.swapaxes(1, 2) for name, array in arrays.items()}
    result = interpret(program, arrays)["o"]
    result = result.swapaxes(1, 2) if form.steps_first else result
    assert np.linalg.norm(result - expected) < 1e-12 * np.linalg.norm(expected)


@pytest.mark.parametrize("form", [ScanForm(2, 100, 4, 8, 16, 32, 2), ScanForm(1, 64, 2, 8, 8, 64)])
@pytest.mark.parametrize("heads", [1, 2])
def test_a_chunk_scan_is_what_its_steps_say(form: ScanForm, heads: int) -> None:
    program = trace(chunk_scan, operands=scan_operands(form), extents={"block_m": 16, "block_k": 8, "heads": heads})
    arrays = scan_arrays(form)
    expected = exact_scan(form, arrays)
    for found in (program, inline_views(program)):
        result = interpret(found, arrays)["o"]
        assert np.linalg.norm(result - expected) < 1e-6 * np.linalg.norm(expected)  # log2 e is a float32 constant


def shifted(X: Handle, out: Handle) -> None:
    """out[i] = X[i − 2] + X[i + 3]."""
    with T.Kernel(1) as _:
        for i in T.Parallel(8):
            out[i] = X[i - 2] + X[i + 3]


def test_a_load_outside_of_a_view_is_nothing_when_it_is_inlined() -> None:
    program = trace(shifted, operands={"X": tensor("x", F32, 6), "out": tensor("o", F32, 8)})
    inlined = inline_views(program)
    (loop,) = [stmt for stmt in inlined.body if isinstance(stmt, Parallel)]
    assert all(isinstance(load.source, Tensor) for load in loads(loop.body[0].value))
    x = np.arange(1.0, 7.0)
    expected = np.array([0, 0, *x]) + np.array([*x[3:], 0, 0, 0, 0, 0])
    assert (interpret(inlined, {"x": x})["o"] == expected).all()
    assert (interpret(program, {"x": x})["o"] == expected).all()


def test_the_state_stays_in_registers_and_scores_are_shared() -> None:
    source = linear_source(PLAIN)
    roles = plan_of(source).roles
    assert (roles.consumers, roles.parts, roles.block_rows) == (2, 1, 128)
    assert roles.shared == {"scores": 2}
    assert roles.exchanged == ("inside",)
    assert roles.fragments == {"scores": 16, "state": 64, "o1": 32}
    assert len(plan_of(source).staged_stores) == 1
    assert plan_of(source).maps[-1].box == (1, 1, 64, 64)
    assert "store_turned(" in source.text
    assert "state[x] = pair" not in source.text


def test_one_warpgroup_shares_its_scores_with_nobody() -> None:
    assert plan_of(linear_source(PLAIN, block_e=64)).roles.shared == {"scores": 1}


def test_vectors_of_a_chunk_arrive_as_lines() -> None:
    plan = plan_of(scan_source(heads=1))
    rings = [[tile.buffer.name for tile in ring.tiles] for ring in plan.rings]
    assert rings == [["c1", "state"], ["here"], ["cb1", "decay", "delta"], ["x1"]]
    assert [one.name for one in plan.maps if not one.swizzled] == ["map_here", "map_decay", "map_delta"]


def test_a_slot_that_elements_are_read_from_is_free_when_all_warps_have_read() -> None:
    """And CB's, which two heads read, when the second has."""
    lines = scan_source(heads=2).text.splitlines()
    inside = next(i for i, line in enumerate(lines) if "for (int k = first" in line)
    freed = next(i for i in range(inside, len(lines)) if "barrier_arrive(empty_cb1_decay_delta" in lines[i])
    assert "named_sync(5 + warpgroup, 128);" in lines[freed - 1]
    assert sum("fetch_fragment(cb1_at" in line for line in lines[inside:freed]) == 2
    assert all("fetch_fragment(cb1_at" not in line for line in lines[freed:])


def test_a_slot_is_not_free_while_a_product_reads_another_tile_of_it() -> None:
    """The line arrives with the product's operands and is read before that is waited for."""
    source = generate_tiles(early_line, line_operands(), Choice({}, 2, "given"), label="Kernel")
    assert [tile.buffer.name for tile in plan_of(source).rings[0].tiles] == ["left", "right", "line1"]
    body = source.text[source.text.index("registers_raise") :]
    assert body.index("products_wait<0>()") < body.index("barrier_arrive(empty_left_right_line1")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (LinearForm(1, 1, 64, 80, 64), "linear attention of 80 and 64 columns: both must be multiples of 64"),
        (LinearForm(1, 1, 64, 64, Sym("E")), "columns of V: E is not known when the kernel is built"),  # type: ignore[arg-type]
    ],
)
def test_widths_without_a_kernel_are_refused(form: LinearForm, message: str, tmp_path: Path) -> None:
    with pytest.raises(CudaError, match=message):
        compile_linear_attention(linear_operands(form), label="Kernel", cache_directory=tmp_path)


def test_chunks_that_tiles_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CudaError, match="chunks of 96 steps: a multiple of 64 is needed"):
        compile_chunk_scan(scan_operands(ScanForm(1, 96, 1, 64, 64, 96)), label="Kernel", cache_directory=tmp_path)


def linear_kernel(form: LinearForm, cache: Path) -> CudaKernel:
    return compile_linear_attention(linear_operands(form), label="Kernel", cache_directory=cache)


def scan_kernel(form: ScanForm, cache: Path) -> CudaKernel:
    return compile_chunk_scan(scan_operands(form), label="Kernel", cache_directory=cache)


@pytest.mark.cpu
@pytest.mark.parametrize("form", [PLAIN, LinearForm(2, 4, 4096, 64, 64, F16), MAMBA], ids=["128", "64", "mamba"])
def test_machine_code_and_resources(form: LinearForm | ScanForm, object_cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("nvidia", reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
    kernel = linear_kernel(form, object_cache) if isinstance(form, LinearForm) else scan_kernel(form, object_cache)
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
        LinearForm(1, 2, 77, 128, 128, F16),
        LinearForm(20, 8, 1000, 128, 128, steps_first=True),
        LinearForm(3, 2, Sym("S"), 64, 128, F16, steps_first=True),
        LinearForm(2, 2, 130, 128, 64),
        LinearForm(1, 140, 65, 64, 256),
        LinearForm(1, 1, 1, 256, 64, F16),
    ],
)
def test_linear_attention(form: LinearForm, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    steps = form.steps if isinstance(form.steps, int) else 321
    kind = getattr(torch, TYPES[form.dtype])
    inner = (steps, form.heads) if form.steps_first else (form.heads, steps)
    found = {name: torch.randn(form.batch, *inner, columns, device="cuda").to(kind)
             for name, columns in (("q", form.depth), ("k", form.depth), ("v", form.width))}  # fmt: skip
    found["o"] = torch.full_like(found["v"], float("nan"))
    Launcher(linear_kernel(form, tmp_path))(found, stream=torch.cuda.current_stream().cuda_stream)
    q, k, v, o = (found[name].double().transpose(1, 2) if form.steps_first else found[name].double() for name in "qkvo")
    assert error(o, (q @ k.mT).tril() @ v) < TOLERANCE[form.dtype] * 1.5  # three roundings in a row


@pytest.mark.gpu
@pytest.mark.parametrize(
    "form",
    [
        ScanForm(2, 512, 4, 64, 128, 256),
        ScanForm(1, 300, 6, 64, 64, 128, 2),  # the last chunk is cut short
        ScanForm(2, 100, 3, 128, 128, 64, decays=F32),
        ScanForm(1, 257, 40, 64, 128, 256, dtype=BF16, decays=F32),
        ScanForm(3, 768, 80, 64, 128, 256),
    ],
)
def test_chunk_scan(form: ScanForm, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    kinds = {one.name: getattr(torch, TYPES[one.dtype]) for one in scan_operands(form).values()}
    found = {name: torch.tensor(array, device="cuda").to(kinds[name]) for name, array in scan_arrays(form).items()}
    found["o"] = torch.full_like(found["x"], float("nan"))
    Launcher(scan_kernel(form, tmp_path))(found, stream=torch.cuda.current_stream().cuda_stream)
    expected = exact_scan(form, {name: array.double().cpu().numpy() for name, array in found.items() if name != "o"})
    assert error(found["o"].cpu(), torch.tensor(expected)) < TOLERANCE[form.dtype] * 1.5


@pytest.mark.gpu
def test_a_line_beside_the_operands_of_a_product(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    kernel = compile_tiles(
        early_line, line_operands(), [Choice({}, 2, "given")], label="Kernel", cache_directory=tmp_path
    )
    found = {name: torch.randn(128, 128, device="cuda").half() for name in "abo"}
    found["line"] = torch.randn(128, device="cuda")
    Launcher(kernel)(found, stream=torch.cuda.current_stream().cuda_stream)
    expected = found["a"].double() @ found["b"].double().T + found["line"].double()[:, None]
    assert error(found["o"], expected) < TOLERANCE[F16]
