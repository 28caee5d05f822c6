"""From a region's spec to a kernel: the compiler's path, one call per arrow.

    spec ─ canonical ─ pack ─ kernel_for ─ trace ─ recommend ─ infer ─ lower ─ emit ─► Kernel

A kernel is C text per instruction set, named by the hash of that text: equal specs give one kernel.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tilecore.back_and_forth import walk_back_and_forth
from tilecore.below_maximum import without_overflow
from tilecore.blocks import finish_in_blocks
from tilecore.canonical import canonical
from tilecore.clears import start_from_products
from tilecore.contract.expr import Expr, binary, const
from tilecore.contract.few_rows import one_query
from tilecore.contract.reshape import heads_as_queries
from tilecore.contract.spec import AttentionSpec, ContractionSpec, RowSpec, Spec, Tensor, check, outputs_of
from tilecore.copies import expand_buffer_copies
from tilecore.cost import work_of
from tilecore.emit_c import emit_c
from tilecore.emit_expr import ELEMENT, EmitError
from tilecore.emit_host import Signature, Special, symbol_order
from tilecore.engine import engine_for
from tilecore.even_rows import even_rows
from tilecore.expand import expand_products, expand_reductions, is_narrow, pack_operands, widen_operands
from tilecore.implied_nan import pass_over_nan
from tilecore.infer import Plan, describe_plan, infer
from tilecore.ir import Gemm, Program, statements
from tilecore.large_results import store_past_caches
from tilecore.level_bytes import by_processor, multiply_bytes
from tilecore.library import kernel_for
from tilecore.loops import LoopProgram
from tilecore.lower import lower
from tilecore.pack import pack_constants
from tilecore.printer import print_program
from tilecore.profile import HardwareProfile
from tilecore.recommend import Recommendation, keeps_left, recommend
from tilecore.scale import scale_queries
from tilecore.strips import finish_in_strips
from tilecore.target import Target
from tilecore.task_order import repeat_together
from tilecore.trace import trace
from tilecore.verify import verify

HEADERS = Path(__file__).parent / "csrc"
PLACEHOLDER = "KERNEL_NAME"
MAX_SYMBOLS, MAX_RANK = 32, 8  # TILE_MAX_SYMBOLS and TILE_MAX_RANK
MAX_INPUTS, MAX_OUTPUTS = 64, 16  # TILE_MAX_INPUTS and TILE_MAX_OUTPUTS of hosts
Dump = Callable[[str, str], None]  # (stage, text)


class OnCards(Protocol):
    """What a region has for NVIDIA cards: C text that defines `symbol`, a `tile_cuda_kernel`."""

    @property
    def symbol(self) -> str:
        """The C name."""
        ...

    @property
    def source(self) -> str:
        """The translation unit."""
        ...


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
    cards: OnCards | None = None  # what the same library has for NVIDIA cards beside it


def compile_spec(
    spec: Spec, *, label: str, profile: HardwareProfile, targets: tuple[Target, ...],
    config: Mapping[str, int] | None = None, dump: Dump | None = None,
) -> Kernel:  # fmt: skip
    """The kernel for `spec`; `label` starts its name; `config` overrules recommendation.

    SpecError for a broken spec; EmitError, InferenceError or NoConfigurationError for one that this backend has no
    code for.
    """
    check(spec)
    packed_spec, packed = prepare(spec)
    _check_limits(packed_spec)
    target = profile.target if profile.target in targets else targets[0]
    choice = Recommendation(dict(config), "given") if config else recommend(packed_spec, profile, target)
    function, operands = _kernel_of(packed_spec, choice.config, profile, target)
    program = trace(function, inputs=packed_spec.inputs, operands=operands, extents=choice.config)
    special = _of_one_query(packed_spec, profile, target)
    sides = packed_spec.inputs, outputs_of(packed_spec)
    signature = Signature(PLACEHOLDER, *sides, work_of(packed_spec), spec.requires, packed_spec.lookups)
    needed = targets_of(program, targets)
    sizes = profile.kept_bytes, profile.l2
    texts = {target.name: _emit(program, special, signature, target, sizes) for target in needed}
    name = kernel_name(label, texts)
    sources = {target: text.replace(PLACEHOLDER, name) for target, text in texts.items()}
    kernel = Kernel(name, function.__name__, packed_spec, packed, choice.config, sources, choice.why)
    if dump:
        _dump_stages(kernel, program, needed, dump)
        if special:
            dump(f"31_program_{kernel.name}_where_{special.condition}.txt", print_program(special.program))
    return kernel


def _kernel_of(
    spec: Spec, config: Mapping[str, int], profile: HardwareProfile, target: Target
) -> tuple[Callable[..., None], dict[str, Any]]:
    """The kernel and its operands. Tasks that go along the columns have blocks of even height."""
    if not isinstance(spec, ContractionSpec) or not keeps_left(spec, profile, target):
        return kernel_for(spec)
    block = config["block_m"]
    even = even_rows(spec, block, engine_for(spec.a.dtype, profile, target).rows)
    function, operands = kernel_for(even)
    return function, operands | {"columns_first": True} | ({} if even is spec else {"most_rows": block})


def prepare(spec: Spec) -> tuple[Spec, tuple[int, ...]]:
    """The spec as kernels are made for it, equal for specs that give one kernel, and which inputs are packed."""
    if isinstance(spec, AttentionSpec):
        spec = heads_as_queries(spec) or spec  # keys and values of heads that share them are read once
    if isinstance(spec, RowSpec):
        spec = without_overflow(pass_over_nan(spec))
    return pack_constants(scale_queries(canonical(spec)))


@dataclass(frozen=True, slots=True)
class _Special:
    """A tile program for calls whose dims fulfil `condition`."""

    condition: Expr
    program: Program


def _of_one_query(spec: Spec, profile: HardwareProfile, target: Target) -> _Special | None:
    """A program for calls with a single query, where keys and values are read once for the heads that share them, or
    are not rounded; None where neither is so, or the number of queries is known.
    """
    if not isinstance(spec, AttentionSpec) or (found := one_query(spec)) is None:
        return None
    condition, single = found
    shared = heads_as_queries(single)
    if shared is None and not spec.wide_alone:
        return None
    own = scale_queries(shared or single)
    function, operands = kernel_for(own)
    config = recommend(own, profile, target).config
    program = trace(function, inputs=own.inputs, operands=operands, extents=config)
    return _Special(binary("eq", condition, const(1)), program)


def kernel_name(label: str, texts: Mapping[str, str]) -> str:
    """The name of a kernel by its texts, in which PLACEHOLDER stands for it."""
    digest = hashlib.sha256("\0".join(texts[target] for target in sorted(texts)).encode()).hexdigest()[:12]
    return f"Fused{label}_{digest}"


def targets_of(program: Program, targets: tuple[Target, ...]) -> tuple[Target, ...]:
    """Those of `targets` that `program` needs code for: without products of bf16, a row's base does."""
    narrow = any(isinstance(stmt, Gemm) and is_narrow(stmt) for stmt in statements(program.body))
    names = {target.name for target in targets}
    return tuple(target for target in targets if narrow or target.base not in names)


def _check_limits(spec: Spec) -> None:
    """Refuse what the backend or the kernel ABI (`tile_kernel.h`) has no room for."""
    symbols = symbol_order(spec.inputs)
    if len(symbols) > MAX_SYMBOLS:
        raise EmitError(f"{len(symbols)} symbolic dims: a kernel has room for {MAX_SYMBOLS}")
    for what, count, room in (
        ("inputs", len(spec.inputs), MAX_INPUTS),
        ("outputs", len(outputs_of(spec)), MAX_OUTPUTS),
    ):
        if count > room:
            raise EmitError(f"{count} {what}: a call of a kernel has room for {room}")
    check_limits((*spec.inputs, *outputs_of(spec)))


def check_limits(tensors: tuple[Tensor, ...]) -> None:
    """Refuse tensors that the backend or the kernel ABI has no room for."""
    for tensor in tensors:
        if len(tensor.shape) > MAX_RANK:
            raise EmitError(f"a tensor of {len(tensor.shape)} dims: a kernel has room for {MAX_RANK}")
        if tensor.dtype not in ELEMENT:
            known = ", ".join(str(dtype) for dtype in ELEMENT)
            advice = "; fewer bits are read as constant weights of contractions" if tensor.dtype.bits < 8 else ""
            raise EmitError(f"a {tensor.dtype} tensor: CPU kernels read and write only {known} yet{advice}")


def _emit(
    program: Program, special: _Special | None, signature: Signature, target: Target, sizes: tuple[int, int]
) -> str:
    """The C text; `sizes` are bytes from which on calls are large and far, as `store_past_caches` takes them."""
    own = special and Special(special.condition, _lowered(special.program, target))
    made = store_past_caches(walk_back_and_forth(_lowered(program, target)), *sizes)
    made = repeat_together(made, sizes[1])
    return emit_c(made, signature, target, own)


def _lowered(program: Program, target: Target) -> LoopProgram:
    plain = lower(plan_of(program, target))
    of_bytes = multiply_bytes(plain, target)
    finished = _finished(plain, target)
    return finished if of_bytes is plain else by_processor(_finished(of_bytes, target), finished)


def _finished(program: LoopProgram, target: Target) -> LoopProgram:
    return finish_in_strips(finish_in_blocks(program, target), target)


def passes_for(target: Target) -> tuple[Callable[[Program], Program], ...]:
    """What a program goes through before inference."""
    return (
        expand_reductions,  # before copies: what it makes of 16-bit floats is elementwise already
        expand_products,  # before operands are widened, as it needs none widened
        expand_buffer_copies,  # later stages know elementwise statements, not copies between buffers
        start_from_products,  # needs single-trip loops as the kernel wrote them
        partial(widen_operands, target=target),
        pack_operands,  # last: the copies that it makes fill panels and must stay copies
    )


def plan_of(program: Program, target: Target) -> Plan:
    """What inference decides for `program` after every pass."""
    for rewrite in passes_for(target):
        program = rewrite(program)
        verify(program)
    return infer(program, target)


def _dump_stages(kernel: Kernel, program: Program, targets: tuple[Target, ...], dump: Dump) -> None:
    dump(f"30_program_{kernel.name}.txt", print_program(program))
    for target in targets:
        dump(f"40_plan_{kernel.name}_{target.name}.txt", describe_plan(plan_of(program, target)))
    dump(f"50_config_{kernel.name}.txt", f"{dict(kernel.config)}\n{kernel.why}\n")
    for target, text in kernel.sources.items():
        dump(f"70_kernel_{kernel.name}_{target}.c", text)
