"""Products by packed levels on CUDA: how they are found, what is refused, machine code; on a card, against float64."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_arrays import TOLERANCE, error, run
from cuda_arrays import arrays as card_arrays
from cuda_specs import BF16, F16, F32, LevelForm, axis, level_spec, tensor

from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import evaluate
from tilecore.contract.expr import Load, Sym, binary, cast, const
from tilecore.contract.reshape import turned
from tilecore.contract.spec import ContractionSpec, View
from tilecore.cuda.compile import build, candidates, compile_cuda, generate
from tilecore.cuda.decoding import decoding_of, exact_of
from tilecore.cuda.errors import CudaError
from tilecore.cuda.launch import Launcher
from tilecore.cuda.profile import H100
from tilecore.interpret import interpret
from tilecore.library import kernel_for
from tilecore.trace import trace

FORM = LevelForm(16, 256, 512)


def weights(form: LevelForm, arrays: dict[str, Any]) -> np.ndarray:
    """The decoded matrix [N, K] in float64, by numpy alone."""
    stored, scale = arrays["levels"], arrays["scale"].astype(np.float64)
    if form.bits == 4:
        stored = np.stack([stored & 15, stored >> 4], -1)
    levels = stored.reshape(form.columns, -1).astype(np.float64)
    if form.zero == "middle":
        zero = np.full(scale.shape, 0.0 if form.signed else float(1 << (form.bits - 1)))
    else:
        zero = arrays["zero"]
        if form.zero == "packed" and form.bits == 4:
            zero = np.stack([zero & 15, zero >> 4], -1).reshape(form.columns, -1)
        zero = zero[:, : scale.shape[1]].astype(np.float64)
    groups = levels.reshape(*scale.shape, form.group)
    whole = ((groups - zero[..., None]) * scale[..., None]).reshape(form.columns, -1)[:, : form.depth]
    return whole.astype(np.float32).astype(form.dtype.row.numpy).astype(np.float64)


def random_arrays(form: LevelForm, rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {}
    for one in level_spec(replace(form, rows=rows)).inputs:
        shape = [int(str(dim)) for dim in one.shape]
        if one.dtype in (DType.U8, DType.I8):
            found[one.name] = rng.integers(0, 256, shape).astype(np.uint8).view(one.dtype.row.numpy)
        else:
            found[one.name] = rng.standard_normal(shape).astype(one.dtype.row.numpy)
    return found


@pytest.mark.parametrize(
    ("form", "bits", "run", "exact"),
    [
        (FORM, 4, 128, True),
        (replace(FORM, group=32, zero="middle"), 4, 32, True),
        (replace(FORM, scale=F32), 4, 128, False),  # a scale that halves do not have
        (replace(FORM, bits=8, group=64), 8, 64, True),
        (replace(FORM, bits=8, group=256, signed=True, zero="middle"), 8, 256, True),
    ],
)
def test_levels_are_found_and_what_goes_with_them(form: LevelForm, bits: int, run: int, exact: bool) -> None:
    other = turned(level_spec(form))
    assert other is not None
    found = decoding_of(other.a)
    assert (found.bits, found.run, found.rows, found.pitch) == (bits, run, 256, 512 * bits // 8)
    assert (found.flip, found.offset) == ((128, -128) if form.signed else (0, 0))
    assert (exact_of(found) is not None) is exact


def test_levels_are_told_by_what_is_done_to_bytes_and_not_by_how_it_is_spelt() -> None:
    """The same nibbles by a product and a remainder, of a matrix of bytes without an axis of groups."""
    w, n, k = tensor("w", DType.U8, 64, 128), axis("n", 64), axis("k", 256)
    byte = cast(Load(w, (n, k // 2)), DType.I32)
    shift = cast(k % 2, DType.I32) * const(15, DType.I32) + const(1, DType.I32)
    nibble = binary("mod", binary("floordiv", byte, shift), const(16, DType.I32))
    view = View("w", (axis("g", 1), n, k), cast(cast(nibble, F32) * 0.5, BF16))
    found = decoding_of(view)
    assert (found.bits, found.pitch, found.flip, found.offset, found.run) == (4, 128, 0, 0, 256)


def test_levels_in_another_order_are_refused() -> None:
    w, n, k = tensor("w", DType.U8, 64, 128), axis("n", 64), axis("k", 256)
    byte = cast(Load(w, (n, k // 2)), DType.I32)
    shift = cast(const(1) + (1 - k % 2) * 15, DType.I32)  # high bits first
    level = binary("mod", binary("floordiv", byte, shift), const(16, DType.I32))
    view = View("w", (axis("g", 1), n, k), cast(cast(level, F32), BF16))
    with pytest.raises(CudaError, match="not 4 bits of a byte in their order, the first ones low"):
        decoding_of(view)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (replace(FORM, group=8), "change within 16 elements"),
        (replace(FORM, depth=40, group=40), "rows of 20 bytes: tensor copies need multiples of 16"),
    ],
)
def test_what_cannot_be_decoded_is_refused_with_the_reason(form: LevelForm, message: str) -> None:
    with pytest.raises(CudaError, match=message):
        candidates(level_spec(form), H100)


@pytest.mark.parametrize("form", [replace(FORM, depth=300, rows=3), replace(FORM, bits=8, group=32, zero="bytes")])
def test_the_program_of_levels_means_what_numpy_says(form: LevelForm) -> None:
    spec = level_spec(form)
    (choice, *_) = candidates(spec, H100)
    assert isinstance(choice.spec, ContractionSpec)
    function, operands = kernel_for(choice.spec)
    program = trace(function, inputs=spec.inputs, operands=operands, extents=choice.config)
    arrays = random_arrays(form, int(str(form.rows)))
    expected = arrays["x"].astype(np.float64) @ weights(form, arrays).T
    for result in (interpret(program, arrays, wide=False)["y"], evaluate(spec, arrays, wide=False)["y"]):
        assert np.linalg.norm(result.astype(np.float64) - expected) < TOLERANCE[BF16] * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("form", "verb"),
    [
        (LevelForm(1, 8192, 8192), "warp_product_bf16("),
        (LevelForm(16, 8192, 8192, group=32), "wgmma"),  # a thread's share of the depth would be of several groups
        (LevelForm(64, 8192, 8192), "wgmma"),
    ],
)
def test_few_columns_are_multiplied_by_warps(form: LevelForm, verb: str) -> None:
    (choice, *_) = candidates(level_spec(form), H100)
    text = generate(level_spec(form), choice, label="Kernel").text
    assert verb in text
    assert ("warp_product" in text) is (verb != "wgmma")


def test_results_of_many_rows_are_turned_on_their_way_out() -> None:
    spec = level_spec(LevelForm(2048, 8192, 8192))
    (choice, *_) = candidates(spec, H100)
    assert "store_turned(" in generate(spec, choice, label="Kernel").text


@pytest.mark.cpu
@pytest.mark.parametrize("form", [FORM, LevelForm(300, 1000, 1000, 8, 64, F16, "bytes"), replace(FORM, scale=F32)])
def test_kernels_of_levels_build_for_hopper_without_a_card(form: LevelForm, object_cache: Path) -> None:
    pytest.importorskip("nvidia", reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
    kernel = compile_cuda(level_spec(form), label="Kernel", cache_directory=object_cache)
    assert (kernel.cubin.report.spills, kernel.cubin.report.stack) == (0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "form",
    [
        LevelForm(1, 1024, 1024),
        LevelForm(16, 1000, 1000, group=32, dtype=F16, zero="middle"),
        LevelForm(3, 520, 4096, 8, signed=True, zero="middle"),
        LevelForm(33, 264, 1096, 8, 64, F16, "bytes"),
        LevelForm(100, 1001, 2048, zero="bytes"),
        LevelForm(64, 4096, 4096),
        LevelForm(40, 1000, 1120, group=32),  # long steps, of several groups each
        LevelForm(128, 520, 1024, 8, signed=True, zero="middle"),
        LevelForm(Sym("M"), 512, 512, scale=F32),
        LevelForm(300, 1016, 640, 8, 256),
        LevelForm(1000, 1032, 768, group=16, dtype=F16),
        LevelForm(520, 768, 512, 8, dtype=F16, scale=F32, zero="packed"),
    ],
)
def test_products_by_levels(form: LevelForm, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    found = run(level_spec(form), tmp_path, torch, M=77)
    arrays = {name: array.cpu().numpy() for name, array in found.items()}
    arrays |= {name: arrays[name].astype(np.int64) for name in ("levels", "zero") if name in arrays}
    expected = found["x"] @ torch.from_numpy(weights(form, arrays)).cuda().T
    assert error(found["y"], expected) < TOLERANCE[form.dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16])
def test_warps_read_what_they_multiply_before_it_is_overwritten(rows: int, tmp_path: Path) -> None:
    """Short steps in many slots: each run gives the same bits. Slots handed back with reads under way did not."""
    torch = pytest.importorskip("torch")
    spec = level_spec(LevelForm(rows, 8192, 8192))
    (choice, *_) = candidates(spec, H100)
    short = replace(choice, config={**choice.config, "block_k": 128, "split": 4}, stages=8)
    kernel = Launcher(build(generate(spec, short, label="Kernel"), tmp_path))
    found = card_arrays(spec, torch, {})
    results = []
    for _ in range(100):
        found["y"].fill_(float("nan"))
        kernel(found, stream=torch.cuda.current_stream().cuda_stream)
        results.append(found["y"].clone())
    assert all(bool(torch.equal(one, results[0])) for one in results)


def test_warps_hand_back_a_slot_when_the_next_tile_has_come() -> None:
    spec = level_spec(LevelForm(1, 8192, 8192))
    (choice, *_) = candidates(spec, H100)
    loop = generate(spec, choice, label="Kernel").text.split("for (int k = first", 1)[1].split("++slot", 1)[0]
    assert "empty_a_b + 8 * before" in loop
    assert "empty_a_b + 8 * slot" not in loop
