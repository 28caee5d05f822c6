"""Linear attention and the chunk scan of Mamba-2 on a card: what the kernels of the library take, and their extents.

Comes in: the operands of `library.linear_attention` or `library.chunk_scan` by parameter, as `trace` takes them. Goes
out: a built kernel, or a CudaError that says which extent does not fit.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tilecore.compile import Dump
from tilecore.contract.expr import Const, Expr
from tilecore.cuda.compile import CudaKernel, compile_tiles
from tilecore.cuda.errors import CudaError
from tilecore.cuda.profile import H100, GpuProfile
from tilecore.cuda.recommend import Choice
from tilecore.cuda.roles import CHUNK, GROUP_ROWS
from tilecore.library.chunk_scan import chunk_scan
from tilecore.library.linear_attention import linear_attention

STEPS = 64  # of a chunk: its scores are one warpgroup's rows
STAGES = (3, 2)  # tried in turn
# of a chunk scan: steps of a tile, heads, stages, blocks that share a processor; best first
SCAN_TILES = ((64, 1, 3, 2), (64, 1, 2, 2), (64, 1, 3, 1), (64, 1, 2, 1))


def compile_linear_attention(
    operands: Mapping[str, Any], *, label: str, cache_directory: Path, profile: GpuProfile = H100,
    scale: float = 1.0, dump: Dump | None = None,
) -> CudaKernel:  # fmt: skip
    """The kernel for Q, K, V and out over (batch, head, step, column); `scale` is a factor of the result."""
    found = _linear_choices(operands["Q"].shape, operands["V"].shape, profile)
    given = {**operands, "scale": scale}
    return compile_tiles(linear_attention, given, found, label=label, cache_directory=cache_directory,
                         profile=profile, dump=dump)  # fmt: skip


def compile_chunk_scan(
    operands: Mapping[str, Any], *, label: str, cache_directory: Path, profile: GpuProfile = H100,
    dump: Dump | None = None,
) -> CudaKernel:  # fmt: skip
    """The kernel for CB, X, dt, dA, C, states, D and out in the layouts of `library.chunk_scan`."""
    groups, length = operands["CB"].shape[2:4]
    heads = _number(operands["X"].shape[2], "heads") // _number(groups, "groups")
    found = _scan_choices(length, heads)
    return compile_tiles(chunk_scan, operands, found, label=label, cache_directory=cache_directory,
                         profile=profile, dump=dump)  # fmt: skip


def _linear_choices(keys: tuple[Expr, ...], values: tuple[Expr, ...], profile: GpuProfile) -> Iterator[Choice]:
    """Two warpgroups where columns and heads are enough for all processors, else one."""
    depth, width = (_number(shape[3], what) for shape, what in ((keys, "columns of Q"), (values, "columns of V")))
    if depth % CHUNK or width % CHUNK:
        raise CudaError(f"linear attention of {depth} and {width} columns: both must be multiples of {CHUNK}")
    heads = 1
    for extent in values[:2]:
        heads *= int(extent.value) if isinstance(extent, Const) else profile.processors
    wide = width % (2 * GROUP_ROWS) == 0 and heads * width // (2 * GROUP_ROWS) >= profile.processors // 2
    for block in (2 * GROUP_ROWS, GROUP_ROWS) if wide else (GROUP_ROWS,):
        for stages in STAGES:
            config = {"chunk": STEPS, "block_e": block}
            yield Choice(config, stages, f"chunks of {STEPS} steps, {block} columns of values, {stages} stages")


def _scan_choices(steps: Expr, heads: int) -> Iterator[Choice]:
    """`heads` share CB."""
    length = _number(steps, "the length of a chunk")
    if length % GROUP_ROWS:
        raise CudaError(f"chunks of {length} steps: a multiple of {GROUP_ROWS} is needed")
    for rows, together, stages, blocks in SCAN_TILES:
        if length % rows == 0 and heads % together == 0:
            config = {"block_m": rows, "block_k": STEPS, "heads": together}
            why = f"{rows} steps by {STEPS} steps of {together} heads, {stages} stages, {blocks} blocks on a processor"
            yield Choice(config, stages, why, blocks=blocks)


def _number(extent: Expr, what: str) -> int:
    if not isinstance(extent, Const):
        raise CudaError(f"{what}: {extent} is not known when the kernel is built")
    return int(extent.value)
