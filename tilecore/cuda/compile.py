"""From a region's spec to a CUDA kernel: the compiler's path, one call per arrow.

    spec ─ canonical ─ kernel_for ─ trace ─ keep_scale ─ infer_roles ─ plan_kernel ─ emit_cuda ─ build_cubin ─► CudaKernel
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tilecore.contract.spec import Spec, check
from tilecore.cuda.emit_cuda import emit_cuda
from tilecore.cuda.errors import CudaError
from tilecore.cuda.kernel import KernelPlan, plan_kernel
from tilecore.cuda.nvrtc import Cubin, build_cubin
from tilecore.cuda.profile import H100, GpuProfile
from tilecore.cuda.recommend import choices
from tilecore.cuda.roles import infer_roles
from tilecore.cuda.scales import keep_scale
from tilecore.library import kernel_for
from tilecore.trace import trace
from tilecore.verify import verify

PLACEHOLDER = "KERNEL_NAME"


@dataclass(frozen=True, slots=True)
class CudaSource:
    """A kernel as text."""

    name: str
    plan: KernelPlan
    text: str
    why: str


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """A built kernel: its plan says what it takes, `Launcher` runs it."""

    name: str
    plan: KernelPlan
    source: str
    cubin: Cubin
    why: str


def generate(spec: Spec, *, label: str, profile: GpuProfile = H100, config: Mapping[str, int] | None = None,
             stages: int | None = None) -> CudaSource:  # fmt: skip
    """CUDA C++ for `spec`; `config` and `stages` overrule recommendation. CudaError lists why each candidate failed."""
    check(spec)
    function, operands = kernel_for(spec)
    refused: list[str] = []
    for choice in choices(spec, profile):
        if config is not None:
            choice = replace(choice, config=dict(config), why="given")
        if stages is not None:
            choice = replace(choice, stages=stages)
        program = keep_scale(trace(function, inputs=spec.inputs, operands=operands, extents=choice.config))
        verify(program)
        try:
            plan = plan_kernel(infer_roles(program), profile, stages=choice.stages)
            text = emit_cuda(plan, PLACEHOLDER)
        except CudaError as error:
            refused.append(f"{dict(choice.config)}, {choice.stages} stages: {error}")
            if config is not None:
                break
            continue
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        name = f"{label}_{digest}"
        return CudaSource(name, plan, text.replace(PLACEHOLDER, name), choice.why)
    raise CudaError("\n".join(dict.fromkeys(refused)))


def build(source: CudaSource, cache_directory: Path) -> CudaKernel:
    """The kernel, built by NVRTC or taken from the cache. CudaError when it spills or serialises its products."""
    cubin = build_cubin(source.text, arch=source.plan.profile.arch, cache_directory=cache_directory)
    return CudaKernel(source.name, source.plan, source.text, cubin, source.why)
