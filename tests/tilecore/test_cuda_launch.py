"""CUDA kernels on a card against float64: odd sizes, orders of the right operand, epilogues, masks, shared heads."""

from pathlib import Path
from typing import Any

import pytest
from cuda_specs import BF16, F16, F32, AttentionForm, ProductForm, attention_spec, product_spec

from tilecore.contract.expr import Const, Sym
from tilecore.contract.spec import Spec, Tensor, outputs_of
from tilecore.cuda.compile import compile_cuda
from tilecore.cuda.errors import CudaError
from tilecore.cuda.launch import Launcher

pytestmark = pytest.mark.gpu
TOLERANCE = {BF16: 4e-3, F16: 5e-4, F32: 1e-5}  # of the norm


def arrays(spec: Spec, torch: Any, sizes: dict[str, int]) -> dict[str, Any]:
    """Random inputs, rows of matrices padded to 16 bytes, and outputs of NaN."""
    types = {BF16: torch.bfloat16, F16: torch.float16, F32: torch.float32}

    def shape(tensor: Tensor) -> list[int]:
        return [int(dim.value) if isinstance(dim, Const) else sizes[str(dim)] for dim in tensor.shape]

    found: dict[str, Any] = {}
    for tensor in spec.inputs:
        *outer, inner = shape(tensor)
        padded = -(-inner // 8) * 8 if len(outer) == 1 and tensor.name in ("x", "w") else inner
        found[tensor.name] = torch.randn(*outer, padded, device="cuda").to(types[tensor.dtype])[..., :inner]
    for tensor in outputs_of(spec):
        found[tensor.name] = torch.full(shape(tensor), float("nan"), device="cuda", dtype=types[tensor.dtype])
    return found


def run(spec: Spec, cache: Path, torch: Any, **sizes: int) -> dict[str, Any]:
    found = arrays(spec, torch, sizes)
    launch = Launcher(compile_cuda(spec, label="Kernel", cache_directory=cache))
    launch(found, stream=torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return found


def error(result: Any, expected: Any) -> float:
    return float((result.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    "form",
    [
        ProductForm(1024, 1024, 1024),
        ProductForm(Sym("M"), 1016, 1032),
        ProductForm(129, 1001, 1001, program="bias"),
        ProductForm(1, 264, 4096, F16),
        ProductForm(500, 520, 512, F16, right_rows=True, program="gelu"),
        ProductForm(640, 768, 512, program="residual"),
        ProductForm(300, 100, 512, output=F32),
    ],
)
def test_products(form: ProductForm, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    found = {name: array.double() for name, array in run(product_spec(form), tmp_path, torch, M=77).items()}
    expected = found["x"] @ (found["w"] if form.right_rows else found["w"].T)
    expected = expected + found.get("bias", 0.0) + found.get("residual", 0.0)
    if form.program == "gelu":
        expected = torch.nn.functional.gelu(expected, approximate="tanh")
    assert error(found["y"], expected) < TOLERANCE[form.output or form.dtype]


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
    ],
)
def test_attention(form: AttentionForm, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    found = {name: array.double() for name, array in run(attention_spec(form), tmp_path, torch, S=700).items()}
    keys, values = (found[name].repeat_interleave(form.groups, 1) for name in ("k", "v"))
    scores = found["q"] @ keys.transpose(-1, -2) * form.width**-0.5
    i, j = (torch.arange(size, device="cuda", dtype=torch.float64) for size in scores.shape[-2:])
    distance = j[None] - i[:, None]
    if form.program == "cap":
        scores = 30 * torch.tanh(scores / 30)
    if form.program == "slope":
        scores = scores + distance * 0.0625
    scores = scores + found.get("bias", 0.0)
    if form.causal:
        scores = scores.masked_fill(distance > 0, -torch.inf)
    assert error(found["o"], torch.softmax(scores, -1) @ values) < TOLERANCE[form.dtype]


def test_rows_that_are_not_aligned_are_refused_with_the_fix(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    spec = product_spec(ProductForm(64, 64, 1001))
    found = arrays(spec, torch, {}) | {"x": torch.randn(64, 1001, device="cuda", dtype=torch.bfloat16)}
    launch = Launcher(compile_cuda(spec, label="Kernel", cache_directory=tmp_path))
    with pytest.raises(CudaError, match=r"x has a pitch of 2002 bytes along dim 0: .* pad its rows to a multiple of 8"):
        launch(found)
