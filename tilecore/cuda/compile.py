"""From a region's spec to a CUDA kernel: the compiler's path, one call per arrow.

spec ─ kernel_for ─ trace ─ keep_scale ─ infer_roles ─ plan_kernel ─ emit_cuda ─ build_cubin ─► CudaKernel
                                      └─ plan_rows ─ emit_rows, for programs over rows ─┘
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tilecore.compile import Dump
from tilecore.contract.expr import Const
from tilecore.contract.spec import AttentionSpec, ScanSpec, Spec, Tensor, check
from tilecore.cuda.beside import stage_elements
from tilecore.cuda.emit_cuda import emit_cuda
from tilecore.cuda.emit_rows import emit_rows
from tilecore.cuda.emit_warps import emit_warps
from tilecore.cuda.errors import CudaError, NoCandidateError
from tilecore.cuda.kernel import KernelPlan, plan_kernel
from tilecore.cuda.linear import linear_kernel
from tilecore.cuda.nvrtc import Cubin, build_cubin
from tilecore.cuda.profile import H100, GpuProfile
from tilecore.cuda.recommend import Choice, choices
from tilecore.cuda.roles import has_products, infer_roles
from tilecore.cuda.row_plan import RowPlan, plan_rows
from tilecore.cuda.scales import keep_scale
from tilecore.cuda.values import RESERVED
from tilecore.cuda.views import inline_views
from tilecore.cuda.warp_choices import warp_choices
from tilecore.cuda.warps import plan_warps
from tilecore.errors import TileError
from tilecore.ir import Program
from tilecore.library import kernel_for
from tilecore.printer import print_program
from tilecore.trace import trace
from tilecore.verify import verify

PLACEHOLDER = "KERNEL_NAME"
LARGEST = 1 << 31  # what extents are below
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class CudaSource:
    """A kernel as text."""

    name: str
    plan: KernelPlan | RowPlan
    text: str
    why: str


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """A built kernel: its plan says what it takes, `Launcher` runs it."""

    name: str
    plan: KernelPlan | RowPlan
    source: str
    cubin: Cubin
    why: str


def compile_cuda(
    spec: Spec, *, label: str, cache_directory: Path, profile: GpuProfile = H100,
    config: Mapping[str, int] | None = None, stages: int | None = None, dump: Dump | None = None,
) -> CudaKernel:  # fmt: skip
    """The best candidate that fits and builds. CudaError lists why each one failed.

    `dump` receives the program, the text and the resource report of the kernel taken, each with a file name.
    """
    found = candidates(spec, profile, config=config, stages=stages)
    return _first_built(
        found, lambda choice: generate(spec, choice, label=label, profile=profile), cache_directory, dump
    )


def compile_tiles(
    function: Callable[..., None], operands: Mapping[str, Any], found: Iterable[Choice], *, label: str,
    cache_directory: Path, profile: GpuProfile = H100, dump: Dump | None = None,
) -> CudaKernel:  # fmt: skip
    """A kernel in the tile language, with the first of the choices `found` that fits and builds; operands are views,
    places and tensors by parameter. CudaError lists why each one failed.
    """

    def source(choice: Choice) -> CudaSource:
        return generate_tiles(function, operands, choice, label=label, profile=profile)

    return _first_built(found, source, cache_directory, dump)


def _first_built(
    found: Iterable[Choice], source: Callable[[Choice], CudaSource], cache_directory: Path, dump: Dump | None
) -> CudaKernel:
    kernel = first_made(found, lambda choice: build(source(choice), cache_directory))
    if dump is not None:
        dump_stages(kernel, dump)
    return kernel


def first_made(found: Iterable[Choice], make: Callable[[Choice], Made]) -> Made:
    """What `make` gives for the first choice that it takes. NoCandidateError says why it took none."""
    refused: dict[str, str] = {}
    for choice in found:
        try:
            return make(choice)
        except CudaError as error:
            refused[f"{dict(choice.config)}, {choice.stages} stages, {choice.why}"] = str(error)
    raise NoCandidateError(refused)


def dump_stages(kernel: CudaKernel, dump: Dump) -> None:
    """What `TILEFUSE_DUMP` shows of a kernel."""
    report = kernel.cubin.report
    used = f"{report.registers} registers a thread at the start, {report.spills} bytes spilled"
    dump(f"30_program_{kernel.name}.txt", print_program(kernel.plan.program))
    dump(f"50_config_{kernel.name}.txt", kernel.why + "\n")
    dump(f"70_kernel_{kernel.name}.cu", kernel.source)
    dump(f"80_build_{kernel.name}.log", f"{used}, {kernel.plan.shared_bytes} bytes of shared memory\n")


def candidates(
    spec: Spec, profile: GpuProfile, *, config: Mapping[str, int] | None = None, stages: int | None = None,
    rows: int | None = None,
) -> tuple[Choice, ...]:  # fmt: skip
    """What recommendation says, best first; `config` and `stages` overrule it, `rows` are as for `choices`."""
    found = tuple((choices if profile.warpgroups else warp_choices)(spec, profile, rows=rows))
    if config is not None:
        found = (Choice(dict(config), found[0].stages, "given"),)
    return found if stages is None else tuple(replace(choice, stages=stages) for choice in found)


def _check_supported(spec: Spec) -> None:
    """CudaError for an attention that does more per key than weigh values."""
    if not isinstance(spec, AttentionSpec):
        return
    kept = [result.place.name for result in spec.outputs if spec.score_axes[3] in result.place.axes]
    if kept:
        raise CudaError(f"scores as outputs ({', '.join(kept)}): compute them by a product of their own")
    if spec.reductions:
        raise CudaError("reductions over the keys beside the softmax: compute them by a kernel of their own")
    if spec.weight is not None:
        raise CudaError("a program of the probabilities: no kernel of two passes over the keys yet")


def generate(spec: Spec, choice: Choice, *, label: str, profile: GpuProfile = H100) -> CudaSource:
    """CUDA C++ for `spec` with the extents of `choice`. CudaError where the card has no room or no form for it."""
    check(spec)
    return write(spec, choice, label=label, profile=profile)


def write(spec: Spec, choice: Choice, *, label: str, profile: GpuProfile = H100) -> CudaSource:
    """`generate` for a spec that was checked before its dims were merged: symbols are whole dims of none then."""
    _check_supported(spec)
    spec = choice.spec or spec
    if isinstance(spec, ScanSpec):
        function, operands = linear_kernel(spec)
    else:
        function, operands = kernel_for(spec)
        if isinstance(spec, AttentionSpec):  # no second loop over V for rows that a guard made 0
            operands["score"] = replace(operands["score"], exact=False)
    try:
        return generate_tiles(function, operands, choice, label=label, profile=profile, inputs=spec.inputs)
    except TileError as error:  # of a kernel that the user did not write
        raise CudaError(f"the kernel is refused: {error.message}") from error


def generate_tiles(
    function: Callable[..., None], operands: Mapping[str, Any], choice: Choice, *, label: str,
    profile: GpuProfile = H100, inputs: tuple[Tensor, ...] = (),
) -> CudaSource:  # fmt: skip
    """CUDA C++ for a kernel in the tile language, with operands as `trace` takes them."""
    program = trace(function, inputs=inputs, operands=operands, extents=choice.config, reserved=RESERVED)
    _check_extents(program)
    program = keep_scale(inline_views(program))
    verify(program)
    why = choice.why
    if has_products(program):
        if profile.warpgroups:
            plan, more = _planned(program, choice, profile)
            why += more
            text = emit_cuda(plan, PLACEHOLDER)
        else:
            roles = infer_roles(program, strips=choice.strips)
            plan = plan_warps(roles, profile, stages=choice.stages, blocks=choice.blocks)
            text = emit_warps(plan, PLACEHOLDER)
    else:
        plan = plan_rows(program, profile, threads=choice.threads)
        text = emit_rows(plan, PLACEHOLDER)
    name = f"{label}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return CudaSource(name, plan, text.replace(PLACEHOLDER, name), why)


def _check_extents(program: Program) -> None:
    """CudaError for tensors with an extent that no kernel counts up to; others are looked at when it is launched."""
    for tensor in (*program.inputs, *program.outputs):
        for dim in tensor.shape:
            if isinstance(dim, Const) and int(dim.value) >= LARGEST:
                raise CudaError(f"{tensor} has an extent of {dim}: kernels count in 32 bits, take parts of it")


def _planned(program: Program, choice: Choice, profile: GpuProfile) -> tuple[KernelPlan, str]:
    """The plan with tiles of what is read by element, or, where there is no room for them, without, and what is to be
    said of that.
    """

    def plan(one: Program) -> KernelPlan:
        roles = infer_roles(one, strips=choice.strips)
        return plan_kernel(
            roles,
            profile,
            stages=choice.stages,
            overlap=choice.overlap,
            reference=choice.reference,
            blocks=choice.blocks,
            apart=choice.apart,
        )

    staged = stage_elements(program)
    if staged == program:
        return plan(program), ""
    tiles = ", ".join(buffer.name for buffer in staged.buffers[len(program.buffers) :])
    try:
        return plan(staged), f"; {tiles} by tensor copies"
    except CudaError as error:
        return plan(program), f"; read by element, since with {tiles}: {error}"


def build(source: CudaSource, cache_directory: Path) -> CudaKernel:
    """The kernel, built by NVRTC or taken from the cache. CudaError when it spills or serialises its products."""
    cubin = build_cubin(source.text, arch=source.plan.profile.arch, cache_directory=cache_directory)
    return CudaKernel(source.name, source.plan, source.text, cubin, source.why)
