"""Kernels for sm_80: refusals and text; computed by an emulated block of threads; cubins, and results on a card.

Cards of other architectures run the same text, built for their own.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from card_emulator import TYPES, emulate
from cuda_arrays import TOLERANCE, arrays, error
from cuda_specs import (
    BF16,
    F8,
    F16,
    F32,
    AttentionForm,
    LatentForm,
    LevelForm,
    ProductForm,
    RowForm,
    attention_spec,
    latent_spec,
    level_spec,
    product_spec,
    row_spec,
)
from machine_code import disassemble

from tilecore.contract.expr import Const, Sym
from tilecore.contract.spec import Spec, Tensor, outputs_of
from tilecore.cuda import driver
from tilecore.cuda.compile import CudaKernel, CudaSource, build, candidates, compile_cuda, generate
from tilecore.cuda.errors import CudaError
from tilecore.cuda.kernel import KernelPlan
from tilecore.cuda.launch import Launcher
from tilecore.cuda.nvrtc import FOLDER, HEADERS
from tilecore.cuda.profile import A100
from tilecore.cuda.recommend import Choice
from tilecore.cuda.warp_choices import ATTENTION_TILES, PRODUCT_TILES

M, K, S = Sym("M"), Sym("K"), Sym("S")


def first(spec: Spec) -> CudaSource:
    """The text of the best candidate."""
    return generate(spec, candidates(spec, A100)[0], label="Kernel", profile=A100)


def plan_of(source: CudaSource) -> KernelPlan:
    """Of a kernel that is made of products."""
    assert isinstance(source.plan, KernelPlan)
    return source.plan


# ---- what is decided, and refused ----


def test_the_text_of_a_kernel_is_the_same_every_time() -> None:
    spec = product_spec(ProductForm(1000, 1016, 1032))
    assert first(spec).text == first(spec).text


def test_products_are_of_warps_with_strips_of_rows_that_share_what_they_fetch() -> None:
    plan = plan_of(first(product_spec(ProductForm(4096, 4096, 4096))))
    assert (plan.roles.block_rows, plan.roles.strips, plan.threads) == (256, 2, 256)
    assert plan.roles.fragments == {"c": 128 // 2 * 2}
    assert plan.maps == ()
    assert len(plan.staged_stores) == 1
    assert plan.shared_bytes <= A100.shared_bytes


def test_few_rows_become_columns_so_that_the_long_operand_is_read_once() -> None:
    plan = plan_of(first(product_spec(ProductForm(16, 4096, 4096))))
    assert plan.roles.fragments == {"c": 16 // 2}
    assert max(ring.slots for ring in plan.rings) >= 6


@pytest.mark.parametrize(("extent", "verbs"), [(1032, {"copy"}), (1001, {"gather"}), (K, {"copy", "gather"})])
def test_rows_that_are_no_units_of_16_bytes_are_gathered(extent: Any, verbs: set[str]) -> None:
    text = first(product_spec(ProductForm(512, 512, extent))).text
    assert {verb for verb in ("copy", "gather") if f"{verb}_tile<" in text} == verbs


def test_a_tile_that_registers_cannot_hold_is_refused_with_what_it_takes() -> None:
    choice = Choice({"block_m": 256, "block_n": 256, "block_k": 64}, 2, "given", strips=2)
    with pytest.raises(CudaError, match=r"256 registers of tiles \(c: 256\) in threads that have 255"):
        generate(product_spec(ProductForm(512, 512, 512)), choice, label="Kernel", profile=A100)


def test_shared_memory_that_is_not_there_is_refused_with_its_parts() -> None:
    choice = Choice({"block_m": 128, "block_n": 128, "block_k": 64}, 8, "given")
    with pytest.raises(CudaError, match=r"where a100 has 166912: a: 16384 bytes x 8; b: 16384 bytes x 8; take fewer"):
        generate(product_spec(ProductForm(512, 512, 512)), choice, label="Kernel", profile=A100)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (
            product_spec(ProductForm(512, 512, 512, F8, output=BF16)),
            "products of f8e4m3: sm_80 has a form for f16 and bf16",
        ),
        (level_spec(LevelForm(16, 512, 512)), "decoded for sm_90a alone, a100 is sm_80"),
        (latent_spec(LatentForm(2, 128, 1024)), "heads of 576 elements: attention for sm_80 has 64 and 128"),
        (attention_spec(AttentionForm(1, 2, 64, 64, 96)), "heads of 96 elements: attention for sm_80 has 64 and 128"),
    ],
)
def test_what_is_made_for_hopper_alone_is_refused_by_name(spec: Spec, reason: str) -> None:
    with pytest.raises(CudaError, match=reason):
        first(spec)


@pytest.mark.parametrize(
    ("arch", "card", "runs"),
    [
        ("sm_80", (8, 0), True), ("sm_80", (8, 9), True), ("sm_80", (9, 0), False), ("sm_80", (7, 5), False),
        ("sm_90a", (9, 0), True), ("sm_90a", (8, 0), False), ("sm_90a", (10, 0), False), ("sm_90", (9, 0), True),
    ],
)  # fmt: skip
def test_which_cards_run_a_cubin(arch: str, card: tuple[int, int], runs: bool) -> None:
    assert driver.runs_on(arch, card) is runs


# ---- computed by an emulated block ----


def random_arrays(spec: Spec, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Random inputs and outputs of NaN."""
    generator = np.random.default_rng(0)

    def shape(tensor: Tensor) -> list[int]:
        return [int(dim.value) if isinstance(dim, Const) else sizes[str(dim)] for dim in tensor.shape]

    found = {one.name: generator.standard_normal(shape(one)).astype(TYPES[one.dtype]) for one in spec.inputs}
    return found | {one.name: np.full(shape(one), np.nan).astype(TYPES[one.dtype]) for one in outputs_of(spec)}


def product_of(found: Mapping[str, Any], form: ProductForm) -> Any:
    """C in float64."""
    value = found["x"] @ (found["w"] if form.right_rows else found["w"].T)
    value = value + found.get("bias", 0.0) + found.get("residual", 0.0)
    if form.program == "gelu":
        value = 0.5 * value * (1 + np.tanh(0.7978845608 * (value + 0.044715 * value**3)))
    return value


def attention_of(found: Mapping[str, Any], form: AttentionForm) -> Any:
    """O in float64."""
    keys, values = (np.repeat(found[name], form.groups, 1) for name in ("k", "v"))
    scores = found["q"] @ keys.swapaxes(-1, -2) * form.width**-0.5
    i, j = (np.arange(size) for size in scores.shape[-2:])
    if form.program == "cap":
        scores = 30 * np.tanh(scores / 30)
    if form.program == "sharp":
        scores = 4 * np.tanh(scores)
    if form.program == "slope":
        scores = scores + (j[None] - i[:, None]) * 0.0625
    scores = scores + found.get("bias", 0.0)
    if form.causal:
        scores = np.where(j[None] > i[:, None], -np.inf, scores)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ values


def relative(result: Any, expected: Any) -> float:
    """Error of the norm."""
    return float(np.linalg.norm(result - expected) / np.linalg.norm(expected))


def in_float64(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one.astype(np.float64) for name, one in found.items()}


def emulated(spec: Spec, folder: Path, choice: Choice | None = None, **sizes: int) -> dict[str, Any]:
    """All arrays after a run by two blocks, in float64."""
    source = generate(spec, choice or candidates(spec, A100)[0], label="Kernel", profile=A100)
    found = random_arrays(spec, sizes)
    emulate(source, found, sizes, folder)
    return in_float64(found)


def product_tile(rows: int, columns: int, strips: int, blocks: int) -> Choice:
    """A tile of the table."""
    return Choice({"block_m": rows, "block_n": columns, "block_k": 64}, 2, "given", blocks=blocks, strips=strips)


ORDER = """
extern "C" int order(int turn, int block, int blocks, int rows, int heads, int* row, int* head) {
  return mixed_tile(turn, block, blocks, rows, heads, paired_heads(blocks, rows, heads), *row, *head);
}
"""


@pytest.mark.cpu
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_every_tile_of_uneven_work_is_taken_once_and_blocks_end_together(tmp_path: Path) -> None:
    headers = [(FOLDER / name).read_text(encoding="utf-8") for name in HEADERS]
    starts = ("balanced_tile", "paired_heads")
    parts = [text[text.index(f"TILE_FN int {name}") :] for text, name in zip(headers, starts, strict=True)]
    path = tmp_path / "order.cpp"
    path.write_text("\n".join(("#define TILE_FN static", *parts, ORDER)))
    subprocess.run(["g++", "-shared", "-fPIC", "-o", path.with_suffix(".so"), path], check=True)
    order = ctypes.CDLL(str(path.with_suffix(".so"))).order
    row, head = ctypes.c_int(), ctypes.c_int()

    def taken(block: int, blocks: int, rows: int, heads: int) -> Iterator[tuple[int, int]]:
        for turn in count():
            found = order(turn, block, blocks, rows, heads, ctypes.byref(row), ctypes.byref(head))
            if found == 0:
                return
            if found == 1:
                yield row.value, head.value

    slowest: dict[tuple[int, int], float] = {}
    shapes = [(1, 1), (1, 7), (3, 5), (7, 40), (22, 33), (33, 64), (128, 16), (32, 64), (16, 128), (4, 512)]
    for rows, heads in shapes:
        for blocks in {1, min(rows * heads, 8), min(rows * heads, 132)}:
            tiles = [list(taken(block, blocks, rows, heads)) for block in range(blocks)]
            assert sorted(chain.from_iterable(tiles)) == [(row, head) for row in range(rows) for head in range(heads)]
            work = [sum(row + 2 for row, _ in own) for own in tiles]
            slowest[rows, heads] = max(work) * blocks / sum(work)
    assert slowest[128, 16] < 1.01  # in pairs alone 1.03
    assert slowest[16, 128] < 1.01
    assert max(slowest[rows, heads] for rows, heads in shapes[-4:]) < 1.04


@pytest.mark.cpu
@pytest.mark.parametrize(
    "form",
    [
        ProductForm(M, 136, 200),
        ProductForm(150, 200, 96, F16, right_rows=True, program="gelu"),
        ProductForm(129, 101, K, F16, right_rows=True, program="bias"),
        ProductForm(70, 136, 99, program="residual"),
        ProductForm(70, 100, 96, output=F32),
        ProductForm(1, 136, 512, F16),
        ProductForm(33, 136, 512, right_rows=True, program="residual"),
    ],
)
def test_products_of_emulated_warps(form: ProductForm, object_cache: Path) -> None:
    found = emulated(product_spec(form), object_cache, M=77, K=99)
    assert relative(found["y"], product_of(found, form)) < TOLERANCE[form.output or form.dtype]


@pytest.mark.cpu
@pytest.mark.parametrize("tile", PRODUCT_TILES)
def test_every_tile_of_products(tile: tuple[int, int, int, int], object_cache: Path) -> None:
    form = ProductForm(tile[0] + 5, tile[1] + 8, 136)
    found = emulated(product_spec(form), object_cache, product_tile(*tile))
    assert relative(found["y"], product_of(found, form)) < TOLERANCE[form.dtype]


@pytest.mark.cpu
@pytest.mark.parametrize(
    "form",
    [
        AttentionForm(1, 2, 130, 130, 64, F16, causal=True),
        AttentionForm(1, 2, S, S, 128, causal=True),
        AttentionForm(1, 4, 70, 177, 128, groups=4),
        AttentionForm(1, 2, 130, 130, 128, F16, causal=True, program="cap"),
        AttentionForm(1, 2, 130, 200, 64, program="cap"),  # no maximum is needed
        AttentionForm(1, 2, 100, 131, 64, program="sharp"),
        AttentionForm(1, 2, 100, 131, 64, program="slope"),
        AttentionForm(1, 2, 100, 131, 64, F16, program="bias"),
        AttentionForm(1, 8, 1, 300, 128, F16, groups=4, program="bias"),
        AttentionForm(2, 2, 5, S, 64, groups=2),
    ],
)
def test_attention_of_emulated_warps(form: AttentionForm, object_cache: Path) -> None:
    found = emulated(attention_spec(form), object_cache, S=137)
    assert relative(found["o"], attention_of(found, form)) < TOLERANCE[form.dtype]


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("width", "number"), [(width, n) for width, tiles in ATTENTION_TILES.items() for n in range(len(tiles))]
)
def test_every_tile_of_attention(width: int, number: int, object_cache: Path) -> None:
    form = AttentionForm(1, 1, 140, 140, width)
    spec = attention_spec(form)
    found = emulated(spec, object_cache, candidates(spec, A100)[number])
    assert relative(found["o"], attention_of(found, form)) < TOLERANCE[form.dtype]


def masked(found: dict[str, Any]) -> dict[str, Any]:
    """Rows of which every key is hidden, keys hidden from all, and numbers that are none or infinite."""
    found["bias"][3] = found["bias"][70:75] = -np.inf
    found["bias"][:, 40:60] = -np.inf
    found["v"][0, 0, 5, 7] = np.inf
    found["v"][0, 1, 6, 9] = found["q"][0, 1, 80, 2] = np.nan
    return found


@pytest.mark.cpu
def test_hidden_rows_and_numbers_that_are_none_are_as_in_the_formula(object_cache: Path) -> None:
    form = AttentionForm(1, 2, 100, 131, 64, F16, program="bias")
    spec = attention_spec(form)
    found = masked(random_arrays(spec, {}))
    emulate(first(spec), found, {}, object_cache)
    agree(in_float64(found), form)


def agree(found: Mapping[str, Any], form: AttentionForm) -> None:
    """The same elements are NaN and infinite, the others close."""
    expected, result = attention_of(found, form), found["o"]
    assert np.isnan(expected[0, :, 3]).all()
    assert np.isinf(expected[0, 0, 0, 7])
    np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(result), np.isinf(expected))
    there = np.isfinite(expected)
    assert relative(result[there], expected[there]) < TOLERANCE[form.dtype]


@pytest.mark.cpu
def test_the_emulator_finds_a_slot_that_is_written_too_early(object_cache: Path) -> None:
    form = ProductForm(128, 128, 512)
    spec = product_spec(form)
    source = generate(spec, product_tile(128, 128, 1, 1), label="Kernel", profile=A100)
    wrong = replace(source, text=source.text.replace("copies_wait<0>();\n      __syncthreads();", "copies_wait<0>();"))
    assert wrong.text != source.text
    found = random_arrays(spec, {})
    emulate(wrong, found, {}, object_cache)
    found = in_float64(found)
    assert not relative(found["y"], product_of(found, form)) < TOLERANCE[form.dtype]


# ---- cubins ----

CASES: dict[str, Callable[[], Spec]] = {
    "product": lambda: product_spec(ProductForm(4096, 4096, 4096)),
    "guarded": lambda: product_spec(ProductForm(129, 1001, K, F16, right_rows=True, program="bias")),
    "gelu": lambda: product_spec(ProductForm(M, 4096, 512, program="gelu")),
    "few rows": lambda: product_spec(ProductForm(16, 4096, 4096)),
    "attention": lambda: attention_spec(AttentionForm(2, 4, S, S, 128, causal=True)),
    "narrow": lambda: attention_spec(AttentionForm(2, 4, 4096, 4096, 64, F16, program="slope")),
    "decode": lambda: attention_spec(AttentionForm(1, 32, 1, 8192, 128, F16, groups=4)),
}


def built(spec: Spec, cache: Path) -> CudaKernel:
    pytest.importorskip("nvidia", reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
    return compile_cuda(spec, label="Kernel", cache_directory=cache, profile=A100)


@pytest.mark.cpu
@pytest.mark.parametrize("case", CASES)
def test_the_best_candidate_builds_without_spills_for_warps(case: str, object_cache: Path, tmp_path: Path) -> None:
    spec = CASES[case]()
    kernel = built(spec, object_cache)
    assert kernel.why == candidates(spec, A100)[0].why
    assert (kernel.cubin.report.spills, kernel.cubin.report.stack) == (0, 0)
    assert kernel.cubin.report.registers * kernel.plan.threads * kernel.plan.blocks <= A100.registers
    text = "\n".join(disassemble(kernel.cubin.image, tmp_path, whole=True))
    assert "HMMA.16816.F32" in text
    assert "LDSM.16" in text
    assert "LDGSTS.E.BYPASS" in text
    assert not {"LDL", "STL"} & set(disassemble(kernel.cubin.image, tmp_path))


@pytest.mark.cpu
def test_rows_have_one_text_for_all_cards(object_cache: Path) -> None:
    spec = row_spec(RowForm("rmsnorm", 512, 4096))
    kernel = built(spec, object_cache)
    assert kernel.source == compile_cuda(spec, label="Kernel", cache_directory=object_cache).source
    assert kernel.plan.profile.arch == "sm_80"


# ---- on a card ----


def own_profile() -> Any:
    """The profile of an A100, for whatever card there is."""
    driver.ensure_context(0)
    major, minor = driver.capability(0)
    return A100 if major == 8 else replace(A100, arch=f"sm_{major}{minor}")


def run(spec: Spec, cache: Path, torch: Any, found: dict[str, Any]) -> dict[str, Any]:
    """All arrays in float64 after a run."""
    kernel = compile_cuda(spec, label="Kernel", cache_directory=cache, profile=own_profile())
    dense = {name: array.contiguous() for name, array in found.items()}
    Launcher(kernel)(dense, stream=torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return {name: array.double().cpu().numpy() for name, array in dense.items()}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "form",
    [
        ProductForm(1024, 1024, 1024),
        ProductForm(M, 1016, 1032),
        ProductForm(129, 1001, 1001, program="bias"),
        ProductForm(500, 520, 512, F16, right_rows=True, program="gelu"),
        ProductForm(640, 768, K, F16, right_rows=True, program="residual"),
        ProductForm(300, 100, 512, output=F32),
        ProductForm(1, 4096, 4096),
        ProductForm(33, 1288, 8192, program="gelu"),
    ],
)
def test_products_on_a_card(form: ProductForm, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    spec = product_spec(form)
    found = run(spec, tmp_path, torch, arrays(spec, torch, {"M": 777, "K": 99}))
    assert relative(found["y"], product_of(found, form)) < TOLERANCE[form.output or form.dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("tile", PRODUCT_TILES)
def test_every_tile_of_products_on_a_card(tile: tuple[int, int, int, int], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    form = ProductForm(1000, 1000, 1000)
    spec, profile = product_spec(form), own_profile()
    kernel = build(generate(spec, product_tile(*tile), label="Kernel", profile=profile), tmp_path)
    found = arrays(spec, torch, {})
    Launcher(kernel)(found, stream=torch.cuda.current_stream().cuda_stream)
    assert error(found["y"], found["x"].double() @ found["w"].double().T) < TOLERANCE[form.dtype]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "form",
    [
        AttentionForm(2, 4, 1024, 1024, 64),
        AttentionForm(2, 3, 333, 333, 64, F16, causal=True),
        AttentionForm(2, 3, S, S, 128, causal=True),
        AttentionForm(2, 8, 256, 777, 128, groups=4),
        AttentionForm(1, 4, 520, 520, 128, F16, causal=True, program="cap"),
        AttentionForm(1, 4, 520, 520, 64, program="slope"),
        AttentionForm(2, 4, 200, 331, 64, F16, program="bias"),
        AttentionForm(1, 32, 1, 8000, 128, F16, groups=4),
        AttentionForm(3, 16, 1, S, 64, groups=8, program="cap"),
    ],
)
def test_attention_on_a_card(form: AttentionForm, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    spec = attention_spec(form)
    found = run(spec, tmp_path, torch, arrays(spec, torch, {"S": 700}))
    assert relative(found["o"], attention_of(found, form)) < TOLERANCE[form.dtype]


@pytest.mark.gpu
def test_hidden_rows_on_a_card(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    form = AttentionForm(1, 2, 100, 131, 64, F16, program="bias")
    spec = attention_spec(form)
    agree(run(spec, tmp_path, torch, masked(arrays(spec, torch, {}))), form)


@pytest.mark.gpu
def test_a_cubin_of_another_card_is_refused_by_name(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    driver.ensure_context(0)
    if driver.capability(0)[0] == 8:
        pytest.skip("this card runs cubins for sm_80")
    spec = product_spec(ProductForm(64, 64, 64))
    launch = Launcher(compile_cuda(spec, label="Kernel", cache_directory=tmp_path, profile=A100))
    with pytest.raises(CudaError, match=r"was built for sm_80, this card has compute capability"):
        launch(arrays(spec, torch, {}))
