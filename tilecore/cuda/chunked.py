"""The chunk scan of Mamba-2 on a card: its operands, and the extents of its kernel.

Comes in: the operands of `library.chunk_scan` by parameter, as `trace` takes them. Goes out: a built kernel, or a
CudaError that says which extent does not fit.
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

# stages, blocks that share a processor: what a tile waits for, others compute beside; best first
TILES = ((2, 3), (3, 2), (2, 2), (2, 1))


def compile_chunk_scan(
    operands: Mapping[str, Any], *, label: str, cache_directory: Path, profile: GpuProfile = H100,
    dump: Dump | None = None,
) -> CudaKernel:  # fmt: skip
    """The kernel for CB, X, dt, dA, C, states, D and out in the layouts of `library.chunk_scan`: f16 or bf16, dt, dA
    and D also f32. Chunks are multiples of 64 steps.
    """
    return compile_tiles(chunk_scan, operands, _choices(operands["CB"].shape[3]), label=label,
                         cache_directory=cache_directory, profile=profile, dump=dump)  # fmt: skip


def _choices(steps: Expr) -> Iterator[Choice]:
    if not isinstance(steps, Const) or int(steps.value) % GROUP_ROWS:
        raise CudaError(f"chunks of {steps} steps: a multiple of {GROUP_ROWS} is needed")
    for stages, blocks in TILES:
        why = f"{GROUP_ROWS} by {CHUNK} steps, {stages} stages, {blocks} blocks on a processor"
        yield Choice({"block_m": GROUP_ROWS, "block_k": CHUNK}, stages, why, blocks=blocks)
