"""CUDA kernels on a card against float64: odd sizes, orders of the right operand, epilogues, masks, shared heads."""

import math
from pathlib import Path

import pytest
from cuda_arrays import TOLERANCE, arrays, error, launch, run
from cuda_specs import (
    BF16,
    F8,
    F16,
    F32,
    AttentionForm,
    LatentForm,
    ProductForm,
    attention_spec,
    latent_spec,
    product_spec,
)

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Sym
from tilecore.cuda.compile import compile_cuda
from tilecore.cuda.errors import CudaError
from tilecore.cuda.launch import Launcher

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "form",
    [
        ProductForm(1024, 1024, 1024),
        ProductForm(Sym("M"), 1016, 1032),
        ProductForm(129, 1001, 1001, program="bias"),
        ProductForm(1, 264, 4096, F16),
        ProductForm(500, 520, 512, F16, right_rows=True, program="gelu"),
        ProductForm(520, 640, 4096, program="gelu"),
        ProductForm(500, 768, 512, program="silu"),
        ProductForm(640, 768, 512, program="residual"),
        ProductForm(300, 100, 512, output=F32),
        ProductForm(1, 4096, 4096),
        ProductForm(16, 1000, 2056, F16, program="bias"),
        ProductForm(33, 1288, 8192, program="gelu"),
        ProductForm(7, 520, 4096, right_rows=True, program="residual"),
        ProductForm(1024, 768, 1024, F8, output=BF16, program="scales"),
        ProductForm(Sym("M"), 1001, 1008, F8, output=F16),
        ProductForm(5, 520, 2000, DType.F8E5M2, output=BF16),
    ],
)
def test_products(form: ProductForm, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    found = run(product_spec(form), tmp_path, torch, M=77)
    expected = found["x"] @ (found["w"] if form.right_rows else found["w"].T)
    expected = expected + found.get("bias", 0.0) + found.get("residual", 0.0)
    if form.program == "scales":
        expected = expected * found["left_scale"] * found["right_scale"]
    if form.program == "gelu":
        expected = torch.nn.functional.gelu(expected, approximate="tanh")
    if form.program == "silu":
        expected = torch.nn.functional.silu(expected)
    assert error(found["y"], expected) < TOLERANCE[form.output or form.dtype]


@pytest.mark.parametrize(
    "form",
    [
        LatentForm(2, 128, 1024),
        LatentForm(3, 128, 1001, dtype=BF16),
        LatentForm(1, 16, Sym("S")),
        LatentForm(140, 64, 200),  # blocks take a second tile
        LatentForm(2, 100, 65, latent=384, rotary=128),
    ],
)
def test_decoding_from_a_latent_cache(form: LatentForm, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    found = run(latent_spec(form), tmp_path, torch, S=77)
    scores = found["q"][:, :, 0] @ found["c"].mT * (form.latent // 4 + form.rotary) ** -0.5
    expected = torch.softmax(scores, -1) @ found["c"][..., : form.latent]
    assert error(found["o"][:, :, 0], expected) < TOLERANCE[form.dtype]


@pytest.mark.parametrize(
    "form",
    [
        AttentionForm(2, 4, 1024, 1024, 64),
        AttentionForm(2, 3, 333, 333, 64, F16, causal=True),
        AttentionForm(2, 3, Sym("S"), Sym("S"), 128, causal=True),
        AttentionForm(2, 8, 256, 777, 128, groups=4),
        AttentionForm(1, 4, 520, 520, 128, F16, causal=True, program="cap"),
        AttentionForm(1, 4, 520, 520, 64, program="slope"),
        AttentionForm(1, 4, 520, 520, 64, causal=True, program="bias"),
        AttentionForm(1, 4, 520, 520, 128, program="cap"),  # no maximum is needed
        AttentionForm(1, 4, 333, 777, 64, causal=True, program="cap"),
        AttentionForm(1, 4, 520, 1000, 128, program="sharp"),
        AttentionForm(1, 4, 520, 520, 64, F16, causal=True, program="sharp"),
        AttentionForm(2, 4, 500, 1000, 128, program="bias"),  # a tile beside each of keys
        AttentionForm(2, 4, 2100, 520, 64, F16, program="bias"),
        AttentionForm(1, 2, 4000, 200, 128, F16, causal=True, program="bias"),
        AttentionForm(3, 4, 500, 1008, 128, program="kept"),
        AttentionForm(3, 4, 500, 1008, 64, F16, program="hidden"),
        AttentionForm(3, 4, 500, 1001, 128, program="hidden"),  # rows that tensor copies cannot bring
        AttentionForm(2, 2, 1000, 1008, 128, causal=True, program="kept"),
        AttentionForm(2, 8, 1, 4000, 128, F16, groups=4, program="kept"),
        AttentionForm(3, 4, 500, 1000, 128, program="key bias"),
        AttentionForm(3, 4, 500, 1000, 64, F16, program="key bias"),
        AttentionForm(2, 4, 200, 331, 64, F16, program="bias"),  # keys behind the last one count for nothing
        AttentionForm(2, 4, 1, 331, 128, groups=4, program="bias"),
        AttentionForm(1, 32, 1, 8000, 128, F16, groups=4),
        AttentionForm(3, 16, 1, Sym("S"), 64, groups=8, program="cap"),
        AttentionForm(2, 8, 1, 3000, 128, groups=8),
        AttentionForm(2, 4, 1, 1000, 128),
        AttentionForm(1, 8, 5, 4096, 128, F16, groups=2),
    ],
)
def test_attention(form: AttentionForm, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    found = run(attention_spec(form), tmp_path, torch, S=700)
    keys, values = (found[name].repeat_interleave(form.groups, 1) for name in ("k", "v"))
    scores = found["q"] @ keys.transpose(-1, -2) * form.width**-0.5
    i, j = (torch.arange(size, device="cuda", dtype=torch.float64) for size in scores.shape[-2:])
    distance = j[None] - i[:, None]
    if form.program == "cap":
        scores = 30 * torch.tanh(scores / 30)
    if form.program == "slope":
        scores = scores + distance * 0.0625
    if form.program == "sharp":
        scores = 4 * torch.tanh(scores)
    bias = found.get("bias", torch.zeros_like(scores))
    scores = scores + (bias[:, None, None] if form.program == "key bias" else bias)
    if "flags" in found:
        scores = scores.masked_fill((found["flags"] == (form.program == "hidden"))[:, None, None], -torch.inf)
    if form.causal:
        scores = scores.masked_fill(distance > 0, -torch.inf)
    assert error(found["o"], torch.softmax(scores, -1) @ values) < TOLERANCE[form.dtype]


@pytest.mark.parametrize("program", ["cap", "kept", "bias"])
def test_numbers_that_are_none_stay_in_their_rows(program: str, tmp_path: Path) -> None:
    """A row of NaN is NaN, infinite scores count as in the formula, and a row without a key is NaN."""
    torch = pytest.importorskip("torch")
    spec = attention_spec(AttentionForm(2, 2, 300, 528, 128, program=program))
    given = arrays(spec, torch, {})
    given["q"][0, 0, 5] = math.nan
    given["q"][0, 1, 6, 3] = math.inf
    if program == "kept":
        given["flags"][1] = False
    if program == "bias":
        given["bias"][7], given["bias"][8, 200:] = -math.inf, -math.inf
    found = {name: array.double() for name, array in launch(spec, tmp_path, torch, given).items()}
    scores = found["q"] @ found["k"].mT * 128**-0.5
    if program == "cap":
        scores = 30 * torch.tanh(scores / 30)
    scores = scores + found.get("bias", 0.0)
    if program == "kept":
        scores = scores.masked_fill((found["flags"] == 0)[:, None, None], -math.inf)
    expected = torch.softmax(scores, -1) @ found["v"]
    assert (found["o"].isnan() == expected.isnan()).all()
    assert expected.isnan().any()
    there = ~expected.isnan()
    if there.any():
        assert error(found["o"][there], expected[there]) < TOLERANCE[BF16]


@pytest.mark.parametrize("hostile", ["grows", "peak", "large peak", "lowest", "masked", "values", "nan", "inf", "few"])
@pytest.mark.parametrize(
    "form",
    [
        AttentionForm(1, 3, 300, 712, 128, program="bias"),
        AttentionForm(1, 3, 712, 712, 64, causal=True, program="bias"),
        AttentionForm(1, 140, 200, 520, 64, F16, program="bias"),  # several tiles of a block
        AttentionForm(1, 3, 300, 712, 128, F16, program="bias"),
    ],
)
def test_scores_that_outgrow_the_maximum_so_far(form: AttentionForm, hostile: str, object_cache: Path) -> None:
    """A first maximum is kept as the reference of weights: what that does not bear is computed again."""
    torch = pytest.importorskip("torch")
    spec = attention_spec(form)
    given = arrays(spec, torch, {})
    bias, keys = given["bias"], given["bias"].shape[1]
    if hostile == "grows":
        bias += 0.5 * torch.arange(keys, device="cuda")
    if hostile in ("peak", "large peak", "few"):
        rows = slice(70, 75) if hostile == "few" else slice(None)
        bias[rows, 400:403] += 14.0 if hostile == "peak" else 300.0
    if hostile in ("lowest", "masked"):
        bias[:, :270] = torch.finfo(bias.dtype).min if hostile == "lowest" else -math.inf
    if hostile == "values":  # finite only if weights stay small
        bias[:, 400:403] += 18.0
        given["v"] *= 100.0 if form.dtype is F16 else 1e31
    if hostile in ("nan", "inf"):
        given["q"][0, 1, 77, 3] = getattr(math, hostile)
        given["v"][0, 2, 3, 5] = getattr(math, hostile)  # the keys that a causal mask hides are not read
    found = {name: array.double() for name, array in launch(spec, object_cache, torch, given).items()}
    scores = found["q"] @ found["k"].mT * form.width**-0.5 + found["bias"]
    i, j = (torch.arange(size, device="cuda") for size in scores.shape[-2:])
    if form.causal:
        scores = scores.masked_fill(j[None] > i[:, None], -math.inf)
    expected = torch.softmax(scores, -1) @ found["v"]
    assert (found["o"].isnan() == expected.isnan()).all()
    assert (found["o"][expected.isinf()] == expected[expected.isinf()]).all()
    assert error(found["o"][expected.isfinite()], expected[expected.isfinite()]) < TOLERANCE[form.dtype]


def test_rows_that_are_not_aligned_are_refused_with_the_fix(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    spec = product_spec(ProductForm(64, 64, 1001))
    found = arrays(spec, torch, {}) | {"x": torch.randn(64, 1001, device="cuda", dtype=torch.bfloat16)}
    kernel = Launcher(compile_cuda(spec, label="Kernel", cache_directory=tmp_path))
    with pytest.raises(CudaError, match=r"x has a pitch of 2002 bytes along dim 0: .* pad its rows to a multiple of 8"):
        kernel(found)


def test_nothing_is_done_for_results_of_no_elements_and_nothing_summed_over_no_depth(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    rows = product_spec(ProductForm(Sym("M"), 64, 64))
    assert launch(rows, tmp_path, torch, arrays(rows, torch, {"M": 0}))["y"].shape == (0, 64)
    depth = product_spec(ProductForm(64, 64, Sym("K")))
    with pytest.raises(CudaError, match=r"[xw] is \[64, 0\]: it is empty, and nothing can be summed over it"):
        launch(depth, tmp_path, torch, arrays(depth, torch, {"K": 0}))
