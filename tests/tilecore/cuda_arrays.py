"""Running CUDA kernels on a card from tests: arrays of a spec, one launch, the error against float64."""

from pathlib import Path
from typing import Any

from cuda_specs import BF16, F16, F32

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const
from tilecore.contract.spec import Spec, Tensor, outputs_of
from tilecore.cuda.compile import compile_cuda
from tilecore.cuda.launch import Launcher

TOLERANCE = {BF16: 4e-3, F16: 5e-4, F32: 1e-5}  # of the norm


def arrays(spec: Spec, torch: Any, sizes: dict[str, int]) -> dict[str, Any]:
    """Random inputs, rows of matrices padded to 16 bytes, and outputs of NaN."""
    types = {BF16: torch.bfloat16, F16: torch.float16, F32: torch.float32,
             DType.F8E4M3: torch.float8_e4m3fn, DType.F8E5M2: torch.float8_e5m2}  # fmt: skip
    bytes_of = {DType.U8: (torch.uint8, 0, 256), DType.I8: (torch.int8, -128, 128)}

    def shape(tensor: Tensor) -> list[int]:
        return [int(dim.value) if isinstance(dim, Const) else sizes[str(dim)] for dim in tensor.shape]

    found: dict[str, Any] = {}
    for tensor in spec.inputs:
        *outer, inner = shape(tensor)
        if tensor.dtype in bytes_of:
            kind, lowest, beyond = bytes_of[tensor.dtype]
            found[tensor.name] = torch.randint(lowest, beyond, (*outer, inner), device="cuda", dtype=kind)
            continue
        if tensor.dtype is DType.BOOL:  # whole tiles of each, then both
            found[tensor.name] = torch.rand(*outer, inner, device="cuda") < 0.5
            found[tensor.name][..., :256], found[tensor.name][..., 256:384] = True, False
            continue
        width = 16 // tensor.dtype.row.bytes
        padded = -(-inner // width) * width if len(outer) == 1 and tensor.name in ("x", "w") else inner
        found[tensor.name] = torch.randn(*outer, padded, device="cuda").to(types[tensor.dtype])[..., :inner]
    for tensor in outputs_of(spec):
        found[tensor.name] = torch.full(shape(tensor), float("nan"), device="cuda", dtype=types[tensor.dtype])
    return found


def launch(
    spec: Spec, cache: Path, torch: Any, found: dict[str, Any], *, stages: int | None = None, **config: int
) -> dict[str, Any]:
    """`found` after a run of the kernel of `spec`, with the extents of `config` if there are any."""
    kernel = compile_cuda(spec, label="Kernel", cache_directory=cache, config=config or None, stages=stages)
    bits = {name: one.view(torch.uint8) if "float8" in str(one.dtype) else one for name, one in found.items()}
    Launcher(kernel)(bits, stream=torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return found


def run(spec: Spec, cache: Path, torch: Any, **sizes: int) -> dict[str, Any]:
    """All arrays of `spec`, random inputs and the kernel's outputs, in float64."""
    return {name: array.double() for name, array in launch(spec, cache, torch, arrays(spec, torch, sizes)).items()}


def error(result: Any, expected: Any) -> float:
    """Of the norm."""
    return float((result.double() - expected).norm() / expected.norm())
