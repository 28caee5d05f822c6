"""The chunk scan of Mamba-2, and what it asked of the generator: against float64, cubins and their code, on a card."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chunked_forms import (
    TYPES,
    ScanForm,
    exact_scan,
    scan_arrays,
    scan_operands,
)
from cuda_arrays import TOLERANCE, error
from cuda_specs import BF16, F16, F32, tensor
from machine_code import disassemble

from tilecore import language as T
from tilecore.contract.expr import loads
from tilecore.contract.spec import Tensor
from tilecore.cuda.chunked import compile_chunk_scan
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
from tilecore.trace import trace

MAMBA = ScanForm(8, 4096, 80, 64, 128, 256)


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


def plan_of(source: CudaSource | CudaKernel) -> KernelPlan:
    assert isinstance(source.plan, KernelPlan)
    return source.plan


@pytest.mark.parametrize("form", [ScanForm(2, 100, 4, 8, 16, 32, 2), ScanForm(1, 64, 2, 8, 8, 64)])
def test_a_chunk_scan_is_what_its_steps_say(form: ScanForm) -> None:
    program = trace(chunk_scan, operands=scan_operands(form), extents={"block_m": 16, "block_k": 8})
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


def test_vectors_of_a_chunk_arrive_as_lines() -> None:
    plan = plan_of(scan_source())
    rings = [[tile.buffer.name for tile in ring.tiles] for ring in plan.rings]
    assert rings == [["c1", "state"], ["here"], ["cb1", "decay", "delta"], ["x1"]]
    assert [one.name for one in plan.maps if not one.swizzled] == ["map_here", "map_decay", "map_delta"]


def test_a_slot_that_elements_are_read_from_is_free_when_all_warps_have_read() -> None:
    lines = scan_source().text.splitlines()
    inside = next(i for i, line in enumerate(lines) if "for (int k = first" in line)
    freed = next(i for i in range(inside, len(lines)) if "barrier_arrive(empty_cb1_decay_delta" in lines[i])
    assert "named_sync(5 + warpgroup, 128);" in lines[freed - 1]
    assert any("fetch_fragment(cb1_at" in line for line in lines[inside:freed])
    assert all("fetch_fragment(cb1_at" not in line for line in lines[freed:])


def test_a_slot_is_not_free_while_a_product_reads_another_tile_of_it() -> None:
    """The line arrives with the product's operands and is read before that is waited for."""
    source = generate_tiles(early_line, line_operands(), Choice({}, 2, "given"), label="Kernel")
    assert [tile.buffer.name for tile in plan_of(source).rings[0].tiles] == ["left1", "right", "line1"]
    body = source.text[source.text.index("registers_raise") :]
    assert body.index("products_wait<0>()") < body.index("barrier_arrive(empty_left1_right_line1")


def test_chunks_that_tiles_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CudaError, match="chunks of 96 steps: a multiple of 64 is needed"):
        compile_chunk_scan(scan_operands(ScanForm(1, 96, 1, 64, 64, 96)), label="Kernel", cache_directory=tmp_path)


def scan_kernel(form: ScanForm, cache: Path) -> CudaKernel:
    return compile_chunk_scan(scan_operands(form), label="Kernel", cache_directory=cache)


@pytest.mark.cpu
def test_machine_code_and_resources(object_cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("nvidia", reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
    kernel = scan_kernel(MAMBA, object_cache)
    assert (kernel.cubin.report.spills, kernel.cubin.report.stack) == (0, 0)
    assert plan_of(kernel).blocks * (kernel.plan.shared_bytes + 1024) <= kernel.plan.profile.shared_bytes + 1024
    found = disassemble(kernel.cubin.image, tmp_path)
    assert {"HGMMA", "LDSM", "UTMALDG", "UTMASTG", "SYNCS"} <= set(found)
    assert not {"LDL", "STL", "HMMA"} & set(found)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "form",
    [
        ScanForm(2, 512, 4, 64, 128, 256),
        ScanForm(1, 300, 6, 64, 64, 128, 2),  # the last chunk is cut short
        ScanForm(2, 100, 3, 128, 128, 64, decays=F32),
        ScanForm(1, 257, 40, 64, 128, 256, dtype=BF16, decays=F32),
        ScanForm(3, 768, 80, 64, 128, 256),
        ScanForm(1, 192, 2, 128, 64, 192, decays=BF16, dtype=BF16),
    ],
)
def test_chunk_scan(form: ScanForm, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    kinds = {one.name: getattr(torch, TYPES[one.dtype]) for one in scan_operands(form).values()}
    found = {name: torch.tensor(array, device="cuda").to(kinds[name]) for name, array in scan_arrays(form).items()}
    found["o"] = torch.full_like(found["x"], float("nan"))
    Launcher(scan_kernel(form, tmp_path))(found, stream=torch.cuda.current_stream().cuda_stream)
    expected = exact_scan(form, {name: array.double().cpu().numpy() for name, array in found.items() if name != "o"})
    assert error(found["o"].cpu(), torch.tensor(expected)) < TOLERANCE[form.dtype]


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
