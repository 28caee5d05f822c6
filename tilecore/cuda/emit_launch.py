"""Built kernels of a region as C: cubins, and the functions that tell a host how to launch them (`tile_cuda.h`).

Comes in: kernels in the order of their launches, with the tensors of the region. Goes out: a translation unit that
needs `tile_cuda.h` and nothing else, the same bytes for the same kernels. Sizes that kernels count in 32 bits are
checked by what is generated here, pitches that tensor copies need are checked here.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilecore.contract.expr import Const, Expr, Sym, const, select
from tilecore.contract.spec import Tensor, extent_of
from tilecore.cuda.adapt import SIZES
from tilecore.cuda.compile import CudaKernel
from tilecore.cuda.driver import MAP_TYPES, PROMOTIONS, swizzle_of
from tilecore.cuda.errors import CudaError
from tilecore.cuda.joins import COUNTER_WORDS
from tilecore.cuda.kernel import KernelPlan, MapPlan
from tilecore.cuda.row_plan import RowPlan
from tilecore.emit_host import size_text

PITCH = 16  # bytes that every pitch of a tensor map is a multiple of
MAX_MAPS, MAX_POINTERS, MAX_SCRATCH, MAX_LAUNCHES = 16, 80, 8, 9  # as in tile_cuda.h
WORDS_PER_LINE = 8


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and, where others of the region take its place for some sizes, when it is launched."""

    kernel: CudaKernel
    when: Expr | None = None


@dataclass(frozen=True, slots=True)
class Signature:
    """What a host sees: names of inputs and outputs in order, symbols in the order of the array, scratch tensors."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    symbols: tuple[Sym, ...]
    scratch: tuple[Tensor, ...]

    @property
    def positions(self) -> dict[str, int]:
        """Where a tensor stands, by its name."""
        names = (*self.inputs, *self.outputs, *(tensor.name for tensor in self.scratch))
        return {name: position for position, name in enumerate(names)}


def check_maps(plan: KernelPlan | RowPlan) -> None:
    """CudaError where a tensor map would have a pitch that is no multiple of 16 bytes, or that is not known to be."""
    for one in plan.maps:
        step = PITCH // one.tensor.dtype.row.bytes
        last = one.tensor.shape[-1] if one.shape is None else const(one.shape[-1])
        if last % step != const(0):
            raise CudaError(
                f"{one.tensor} has rows of {last} elements: tensor copies need rows that are a "
                f"multiple of {step}; pad the model's dim, or fix it to such a size"
            )


def emit_launch(launches: Sequence[Launch], signature: Signature, symbol: str) -> str:
    """The text that defines `symbol`, a `tile_cuda_kernel`."""
    kernels = [launch.kernel for launch in launches]
    workspaces = (_workspace(number, launch.kernel.plan) for number, launch in enumerate(launches))
    signature = replace(signature, scratch=(*signature.scratch, *(one for one in workspaces if one is not None)))
    if len(kernels) > MAX_LAUNCHES or len(signature.scratch) > MAX_SCRATCH:
        raise CudaError(f"{len(kernels)} launches and {len(signature.scratch)} scratch tensors: too many for one node")
    names = {dim.name: f"n{position}" for position, dim in enumerate(signature.symbols)}
    lines = ['#include "tile_cuda.h"', ""]
    rows: list[str] = []
    for number, launch in enumerate(launches):
        text, row = _launch(number, launch, signature, names)
        lines += text
        rows.append(row)
    lines += ["static const tile_cuda_launch launches[] = {", *(f"    {row}," for row in rows), "};"]
    lines += _scratch(signature, names)
    lines += _check(kernels, names)
    arch = kernels[0].plan.profile.arch
    number = arch.removeprefix("sm_").rstrip("a")
    major, minor, exact = number[:-1], number[-1], int(arch.endswith("a"))
    lines += [
        f"extern const tile_cuda_kernel {symbol};",
        f'const tile_cuda_kernel {symbol} = {{"{arch}", {major}, {minor}, {exact}, {len(kernels)}, '
        f"{len(signature.scratch)}, launches, scratch, check}};",
    ]
    return "\n".join(lines) + "\n"


def _workspace(number: int, plan: KernelPlan | RowPlan) -> Tensor | None:
    """Of a launch, as a scratch tensor of its own."""
    return None if plan.workspace is None else replace(plan.workspace, name=f"workspace_{number}")


def _launch(
    number: int, launch: Launch, signature: Signature, names: Mapping[str, str]
) -> tuple[list[str], str]:  # fmt: skip
    """(definitions, the row of the table) of one kernel."""
    kernel, plan = launch.kernel, launch.kernel.plan
    if len(plan.maps) > MAX_MAPS or len(plan.pointers) > MAX_POINTERS:
        raise CudaError(f"{kernel.name} has {len(plan.maps)} tensor maps and {len(plan.pointers)} pointers: too many")
    positions = signature.positions
    order = [dim.name for dim in signature.symbols]
    lines = _image(number, kernel.cubin.image)
    maps = [_map(one, positions[one.tensor.name]) for one in plan.maps]
    lines += _table("tile_cuda_map", f"maps_{number}", maps)
    workspace = _workspace(number, plan)
    pointers = [tensor.name for tensor in plan.pointers] + ([] if workspace is None else [workspace.name])
    lines += _table("int32_t", f"pointers_{number}", [str(positions[name]) for name in pointers])
    lines += _table("int32_t", f"symbols_{number}", [str(order.index(dim.name)) for dim in plan.symbols])
    tiles: Expr = const(1)
    for axis in plan.task_axes:
        tiles = tiles * extent_of(axis)
    if launch.when is not None:
        tiles = select(launch.when, tiles, const(0))
    lines += _function(f"int64_t tiles_{number}(const int64_t* symbols)", [f"return {size_text(tiles, names)};"], names)
    cases = [
        f"case {index}: {' '.join(_dims(one, names))} break;" for index, one in enumerate(plan.maps)
    ]  # fmt: skip
    body = ["(void)dims;", "switch (map) {", *cases, "default: break;", "}"]
    lines += _function(f"void dims_{number}(const int64_t* symbols, int32_t map, uint64_t* dims)", body, names)
    blocks = plan.blocks if isinstance(plan, KernelPlan) else 0
    counts = f"{len(plan.maps)}, {len(pointers)}, {len(plan.symbols)}"
    counted = (COUNTER_WORDS, plan.task_words) if isinstance(plan, KernelPlan) and plan.split.apart else (0, 0)
    tables = ", ".join(
        f"{name}_{number}" if some else "NULL"
        for name, some in (("maps", plan.maps), ("pointers", pointers), ("symbols", plan.symbols))
    )
    row = (
        f'{{"{kernel.name}", image_{number}, {plan.threads}, {plan.cluster}, {plan.shared_bytes}, {blocks}, '
        f"{counted[0]}, {counted[1]}, {counts}, {tables}, tiles_{number}, dims_{number}}}"
    )
    return lines, row


def _image(number: int, image: bytes) -> list[str]:
    """A cubin as 64-bit words: hosts are little-endian, as cards are."""
    padded = image + bytes(-len(image) % 8)
    words = [f"0x{word:x}" for (word,) in struct.iter_unpack("<Q", padded)]
    rows = [", ".join(words[at : at + WORDS_PER_LINE]) for at in range(0, len(words), WORDS_PER_LINE)]
    return [f"static const uint64_t image_{number}[] = {{", *(f"    {row}," for row in rows), "};"]


def _map(one: MapPlan, position: int) -> str:
    sizes = ", ".join(str(extent) for extent in reversed(one.box))
    dtype = one.tensor.dtype
    swizzle = swizzle_of(dtype, one.box, swizzled=one.swizzled)
    numbers = position, MAP_TYPES[dtype], len(one.box), dtype.row.bytes, swizzle, PROMOTIONS[one.fetched]
    return f"{{{', '.join(map(str, numbers))}, {{{sizes}}}}}"


def _table(kind: str, name: str, entries: Sequence[str]) -> list[str]:
    return [f"static const {kind} {name}[] = {{{', '.join(entries)}}};"] if entries else []


def _dims(one: MapPlan, names: Mapping[str, str]) -> list[str]:
    shape = one.tensor.shape if one.shape is None else tuple(const(extent) for extent in one.shape)
    return [f"dims[{axis}] = (uint64_t)({size_text(extent, names)});" for axis, extent in enumerate(reversed(shape))]


def _function(head: str, body: Sequence[str], names: Mapping[str, str]) -> list[str]:
    lines = [f"    const int64_t {name} = symbols[{i}]; (void){name};" for i, name in enumerate(names.values())]
    return [f"static {head} {{", "    (void)symbols;", *lines, *(f"    {line}" for line in body), "}"]


def _scratch(signature: Signature, names: Mapping[str, str]) -> list[str]:
    cases = [
        f"case {number}: return (size_t)({size_text(_count(tensor), names)} * {tensor.dtype.row.bytes});"
        for number, tensor in enumerate(signature.scratch)
    ]
    body = ["switch (index) {", *cases, "default: return 0;", "}"]
    return _function("size_t scratch(const int64_t* symbols, int32_t index)", body, names)


def _check(kernels: Sequence[CudaKernel], names: Mapping[str, str]) -> list[str]:
    """Extents below 2^31 everywhere, and element counts where a kernel divides positions."""
    checks: dict[str, None] = {}
    for kernel in kernels:
        program = kernel.plan.program
        for tensor in (*program.inputs, *program.outputs):
            if tensor.name == SIZES:
                continue
            sizes = [(f"dim {axis} of", extent) for axis, extent in enumerate(tensor.shape)]
            if "tile_floordiv" in kernel.source:
                sizes.append(("the number of elements of", _count(tensor)))
            for what, size in sizes:
                if isinstance(size, Const) and int(size.value) < 2**31:
                    continue
                checks[f'TILE_CUDA_CHECK_BELOW_2_31({size_text(size, names)}, "{what} {tensor.name}")'] = None
    head = "int32_t check(const int64_t* symbols, char* error, size_t error_size)"
    return _function(head, ["(void)error; (void)error_size;", *checks, "return 0;"], names)


def _count(tensor: Tensor) -> Expr:
    total: Expr = const(1)
    for extent in tensor.shape:
        total = total * extent
    return total
