"""Tile recommendation for Hopper: products by a model of waves, copies and products; attention by measured shapes.

Comes in: a spec and a card. Goes out: candidates for the kernel's extents and stages, best first, each with its reason.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tilecore.contract.expr import Const, Expr
from tilecore.contract.spec import AttentionSpec, ContractionSpec, Spec
from tilecore.cuda.errors import CudaError
from tilecore.cuda.profile import GpuProfile

NOMINAL = 4096  # of an extent that is known at run time only
DEPTH = 64  # of one step: 128 bytes, one swizzled chunk
PRODUCT_TILES = ((128, 256), (128, 192), (128, 128), (128, 64), (64, 256), (64, 128), (64, 64))
MAX_STAGES, BARRIERS = 8, 1024
SHORT = 1024  # queries
# head dim: (warpgroups, keys of a tile), best first; longer rows of scores where fewer warpgroups share the registers
ATTENTION_TILES = {64: ((3, 128), (2, 128), (2, 64)), 128: ((2, 128), (2, 96), (2, 64))}


@dataclass(frozen=True, slots=True)
class Choice:
    """Extents of the kernel, stages of its rings, and why."""

    config: Mapping[str, int]
    stages: int
    why: str


def choices(spec: Spec, profile: GpuProfile) -> Iterator[Choice]:
    """Candidates, best first. CudaError for a region without a CUDA kernel."""
    match spec:
        case ContractionSpec():
            yield from _products(spec, profile)
        case AttentionSpec():
            yield from _attention(spec)
        case _:
            raise CudaError(f"{type(spec).__name__} has no CUDA kernel yet: contractions and attention have")


def _size(extent: Expr | None) -> int:
    return int(extent.value) if isinstance(extent, Const) else NOMINAL


def _products(spec: ContractionSpec, profile: GpuProfile) -> Iterator[Choice]:
    batch, rows, depth = (_size(extent) for extent in spec.a.shape)
    columns = _size(spec.b.shape[2])
    count = len(spec.products)
    ranked: list[tuple[float, int, int]] = []
    for block_m, block_n in PRODUCT_TILES:
        if count * block_n > 256:
            continue
        tiles = batch * -(-rows // block_m) * -(-columns // block_n)
        waves = -(-tiles // profile.processors)
        products = 2.0 * block_m * block_n * count * DEPTH / profile.flops_per_cycle
        copies = 2.0 * (block_m + count * block_n) * DEPTH / profile.copy_bytes
        cycles = waves * (-(-depth // DEPTH) * max(products, copies) + profile.start_cycles)
        ranked.append((cycles, block_m, block_n))
    for cycles, block_m, block_n in sorted(ranked):
        stage = 2 * DEPTH * (block_m + count * block_n)
        staging = block_m // 64 * 2 * 64 * 128
        stages = min(MAX_STAGES, (profile.shared_bytes - staging - BARRIERS - 1024) // stage)
        config = {"block_m": block_m, "block_n": block_n, "block_k": DEPTH}
        yield Choice(config, stages, f"{block_m} x {block_n}: {cycles:.0f} cycles, {stages} stages")


def _attention(spec: AttentionSpec) -> Iterator[Choice]:
    width = max(_size(spec.q.shape[3]), _size(spec.v.shape[3]))
    if width not in ATTENTION_TILES:
        raise CudaError(f"heads of {width} elements: CUDA attention has 64 and 128")
    tiles = ATTENTION_TILES[width]
    if _size(spec.q.shape[2]) <= SHORT:
        tiles = tuple(sorted(tiles, key=lambda tile: tile[0] > 2))  # 192 rows are too coarse there
    for groups, keys in tiles:
        config = {"block_m": 64 * groups, "block_n": keys}
        yield Choice(config, 2, f"{groups} warpgroups of 64 queries, {keys} keys a step")
