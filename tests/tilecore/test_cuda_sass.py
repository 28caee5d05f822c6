"""Machine code of CUDA kernels, without a card: tensor cores and tensor copies are there, local memory is not."""

from pathlib import Path

import pytest
from cuda_specs import (
    F16,
    AttentionForm,
    LatentForm,
    ProductForm,
    RowForm,
    attention_spec,
    latent_spec,
    product_spec,
    row_spec,
)
from machine_code import disassemble

from tilecore.contract.spec import Spec
from tilecore.cuda.compile import CudaKernel, compile_cuda

pytestmark = pytest.mark.cpu
PRODUCT = product_spec(ProductForm(4096, 4096, 4096))
ATTENTION = attention_spec(AttentionForm(2, 4, 4096, 4096, 128, causal=True))
DECODE = attention_spec(AttentionForm(1, 32, 1, 8192, 128, F16, groups=4))
LATENT = latent_spec(LatentForm(64, 128, 8192))
FEW_ROWS = product_spec(ProductForm(16, 4096, 4096))
ROWS = row_spec(RowForm("rmsnorm", 8192, 4096))


def built(spec: Spec, cache: Path) -> CudaKernel:
    pytest.importorskip("nvidia", reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
    return compile_cuda(spec, label="Kernel", cache_directory=cache)


@pytest.mark.parametrize(
    ("spec", "there"),
    [
        (PRODUCT, {"HGMMA", "UTMALDG", "UTMASTG", "SYNCS"}),
        (ATTENTION, {"HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "MUFU"}),
        (DECODE, {"HGMMA", "UTMALDG", "ATOMG"}),
        (LATENT, {"HGMMA", "UTMALDG", "USETMAXREG"}),
        (FEW_ROWS, {"HGMMA", "UTMALDG"}),
        (ROWS, {"LDG", "STG", "SHFL", "MUFU"}),
    ],
    ids=["product", "attention", "decode", "latent", "few rows", "rows"],
)
def test_machine_code_has_what_the_kernel_is_made_of(
    spec: Spec, there: set[str], object_cache: Path, tmp_path: Path
) -> None:
    found = disassemble(built(spec, object_cache).cubin.image, tmp_path)
    assert there <= set(found)
    assert not {"LDL", "STL", "HMMA"} & set(found)  # local memory, and products of single warps


@pytest.mark.parametrize("spec", [PRODUCT, ATTENTION, DECODE, LATENT, FEW_ROWS, ROWS])
def test_memory_is_left_alone_until_the_launch_before_has_ended(spec: Spec, object_cache: Path, tmp_path: Path) -> None:
    """The compiler may move reads of constant memory, but not in front of that wait."""
    found = list(disassemble(built(spec, object_cache).cubin.image, tmp_path))  # in the order of their first places
    reads = [found.index(name) for name in ("LDG", "STG", "UTMALDG", "UTMASTG") if name in found]
    assert reads
    assert found.index("ACQBULK") < min(reads)


def test_a_dump_has_a_file_per_stage(object_cache: Path) -> None:
    written: dict[str, str] = {}
    pytest.importorskip("nvidia", reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
    kernel = compile_cuda(ROWS, label="Kernel", cache_directory=object_cache, dump=written.__setitem__)
    assert set(written) == {
        f"{stage}_{kernel.name}.{end}"
        for stage, end in (("30_program", "txt"), ("50_config", "txt"), ("70_kernel", "cu"), ("80_build", "log"))
    }
    assert written[f"70_kernel_{kernel.name}.cu"] == kernel.source
    assert "0 bytes spilled" in written[f"80_build_{kernel.name}.log"]


def test_products_are_issued_back_to_back(object_cache: Path, tmp_path: Path) -> None:
    """One step of 64 elements of the depth is four products, and nothing else multiplies."""
    kernel = built(PRODUCT, object_cache)
    assert disassemble(kernel.cubin.image, tmp_path)["HGMMA"] == 4


@pytest.mark.parametrize("spec", [PRODUCT, ATTENTION, DECODE, LATENT, FEW_ROWS, ROWS])
def test_resources_are_known_without_a_card(spec: Spec, object_cache: Path) -> None:
    kernel = built(spec, object_cache)
    report = kernel.cubin.report
    assert (report.spills, report.stack) == (0, 0)
    assert 0 < report.registers * kernel.plan.threads <= kernel.plan.profile.registers
    assert kernel.plan.shared_bytes <= kernel.plan.profile.shared_bytes
