"""From a region's spec to a kernel: the compiler's path, one call per arrow.

    spec ─ canonical ─ pack ─ kernel_for ─ trace ─ recommend ─ infer ─ lower ─ emit ─► Kernel

A kernel is C text per instruction set, named by the hash of that text: equal specs give one kernel.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tilecore.canonical import canonical
from tilecore.clears import start_from_products
from tilecore.contract.spec import Spec, check, outputs_of
from tilecore.copies import expand_buffer_copies
from tilecore.cost import work_of
from tilecore.emit_c import emit_c
from tilecore.emit_expr import ELEMENT, EmitError
from tilecore.emit_host import Signature
from tilecore.infer import infer
from tilecore.ir import Program
from tilecore.library import kernel_for
from tilecore.lower import lower
from tilecore.pack import pack_constants
from tilecore.printer import print_program
from tilecore.profile import HardwareProfile
from tilecore.recommend import Recommendation, recommend
from tilecore.target import Target
from tilecore.trace import trace
from tilecore.verify import verify

HEADERS = Path(__file__).parent / "csrc"
PLACEHOLDER = "KERNEL_NAME"
PASSES: tuple[Callable[[Program], Program], ...] = (
    expand_buffer_copies,  # first: later stages know elementwise statements, not copies between buffers
    start_from_products,  # needs single-trip loops as the kernel wrote them
)
Dump = Callable[[str, str], None]  # (stage, text)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled spec: `spec` with packed inputs, which inputs those are, and C text by target name."""

    name: str
    kernel: str  # the tile kernel's function
    spec: Spec
    packed: tuple[int, ...]
    config: Mapping[str, int]
    sources: Mapping[str, str]
    why: str  # what recommendation decided, in words


def compile_spec(
    spec: Spec, *, label: str, profile: HardwareProfile, targets: tuple[Target, ...],
    config: Mapping[str, int] | None = None, dump: Dump | None = None,
) -> Kernel:  # fmt: skip
    """The kernel for `spec`; `label` starts its name; `config` overrules recommendation.

    SpecError for a broken spec, EmitError or InferenceError for one that this backend has no code for.
    """
    check(spec)
    _check_types(spec)
    packed_spec, packed = pack_constants(canonical(spec))
    function, operands = kernel_for(packed_spec)

    choice = Recommendation(dict(config), "given") if config else recommend(packed_spec, profile, targets[0])
    program = trace(function, inputs=packed_spec.inputs, operands=operands, extents=choice.config)
    signature = Signature(PLACEHOLDER, packed_spec.inputs, outputs_of(packed_spec), work_of(packed_spec), spec.requires)
    texts = {target.name: _emit(program, signature, target) for target in targets}
    digest = hashlib.sha256("\0".join(texts[name] for name in sorted(texts)).encode()).hexdigest()[:12]
    name = f"Fused{label}_{digest}"
    sources = {target: text.replace(PLACEHOLDER, name) for target, text in texts.items()}
    kernel = Kernel(name, function.__name__, packed_spec, packed, choice.config, sources, choice.why)
    if dump:
        _dump_stages(kernel, program, dump)
    return kernel


def _check_types(spec: Spec) -> None:
    for tensor in (*spec.inputs, *outputs_of(spec)):
        if tensor.dtype not in ELEMENT:
            known = ", ".join(str(dtype) for dtype in ELEMENT)
            raise EmitError(f"a {tensor.dtype} tensor: CPU kernels read and write only {known} yet")


def _emit(program: Program, signature: Signature, target: Target) -> str:
    for rewrite in PASSES:
        program = rewrite(program)
        verify(program)
    plan = infer(program, target)
    return emit_c(lower(plan), signature, target)


def _dump_stages(kernel: Kernel, program: Program, dump: Dump) -> None:
    dump(f"30_program_{kernel.name}.txt", print_program(program))
    dump(f"50_config_{kernel.name}.txt", f"{dict(kernel.config)}\n{kernel.why}\n")
    for target, text in kernel.sources.items():
        dump(f"70_kernel_{kernel.name}_{target}.c", text)
