"""Tile recommendation for cards whose warps multiply by themselves (sm_80), from the figures of their profile.

Comes in: a spec and a card. Goes out: candidates for extents, strips of a warp, stages and blocks of a processor, best
first, each with its reason. A step of the depth costs its products and what warps fetch of shared memory for them,
which add up as measured, or else what is copied there.
"""

from collections.abc import Iterator

from tilecore.contract.expr import Const
from tilecore.contract.reshape import heads_as_queries, turned
from tilecore.contract.spec import AttentionSpec, ContractionSpec, RowSpec, ScanSpec, Spec
from tilecore.cuda.decoding import is_plain
from tilecore.cuda.errors import CudaError
from tilecore.cuda.kernel import ALIGNMENT, room_of
from tilecore.cuda.profile import GpuProfile
from tilecore.cuda.recommend import FEW, NOMINAL, Choice, row_choices, size_of
from tilecore.cuda.roles import SWIZZLE
from tilecore.cuda.values import HALVES

STEP = 64  # of the depth: 128 bytes, one chunk
# rows and columns of a tile, strips of a warp, blocks of a processor that registers allow
PRODUCT_TILES = (
    (256, 128, 2, 1), (128, 256, 1, 1), (128, 128, 2, 1), (128, 128, 1, 1), (128, 64, 1, 2), (64, 128, 1, 2),
    (64, 64, 1, 3),
)  # fmt: skip
MOST_STAGES, FEW_STAGES = 5, 8
FETCHED = 128.0  # bytes a cycle of shared memory
WAITS = 300  # cycles of a step in which a block waits, and no other one has work
# head dim: (queries, keys, strips, blocks) of a tile, best first
ATTENTION_TILES = {
    64: ((128, 64, 2, 2), (64, 64, 1, 3)),
    128: ((128, 32, 2, 2), (64, 64, 1, 2), (64, 32, 1, 2)),
}  # fmt: skip


def warp_choices(spec: Spec, profile: GpuProfile, *, rows: int | None = None) -> Iterator[Choice]:
    """Candidates, best first. CudaError for a region without a kernel on such cards; `rows` are as for `choices`."""
    match spec:
        case ContractionSpec():
            yield from _products(spec, profile, rows or NOMINAL)
        case AttentionSpec():
            yield from _attention(spec, profile)
        case RowSpec():
            yield from row_choices(spec)
        case ScanSpec():
            raise CudaError(f"recurrences have kernels for sm_90a alone, {profile.name} is {profile.arch}")


def _products(spec: ContractionSpec, profile: GpuProfile, typical: int) -> Iterator[Choice]:
    batch, rows = size_of(spec.a.shape[0]), size_of(spec.a.shape[1], typical)
    depth, columns = size_of(spec.a.shape[2]), size_of(spec.b.shape[2])
    if spec.a.dtype not in HALVES:
        raise CudaError(f"products of {spec.a.dtype}: {profile.arch} has a form for {' and '.join(map(str, HALVES))}")
    if not is_plain(spec.b):
        raise CudaError(f"weights that are computed are decoded for sm_90a alone, {profile.name} is {profile.arch}")
    other = turned(spec) if rows <= FEW else None
    if other is not None:
        yield from _few_rows(other, profile, rows)
    count = len(spec.products)
    ranked: list[tuple[float, int, int, int, int, int]] = []
    for block_m, block_n, strips, most in PRODUCT_TILES:
        if count * block_n * strips > 256:
            continue
        stage = SWIZZLE * (block_m + count * block_n)
        blocks = next(one for one in range(most, 0, -1) if 2 * stage + ALIGNMENT <= room_of(profile, one) or one == 1)
        stages = min(MOST_STAGES, (room_of(profile, blocks) - ALIGNMENT) // stage)
        tiles = batch * -(-rows // block_m) * -(-columns // block_n)
        warps = block_m // 16 // strips
        products = 2.0 * block_m * block_n * count * STEP / profile.flops_per_cycle
        fetched = STEP / 16 * 512 * warps * (strips + count * block_n / 16) / FETCHED
        together = min(blocks, -(-tiles // profile.processors))
        step = max(products + fetched, stage / profile.copy_bytes) + WAITS * (together == 1)
        waves = -(-tiles // (profile.processors * together))
        cycles = waves * (together * -(-depth // STEP) * step + profile.start_cycles)
        ranked.append((cycles, block_m, block_n, strips, stages, blocks))
    for cycles, block_m, block_n, strips, stages, blocks in sorted(ranked):
        config = {"block_m": block_m, "block_n": block_n, "block_k": STEP}
        why = f"{block_m} x {block_n}, {strips} strips a warp: {cycles:.0f} cycles, {stages} stages"
        yield Choice(config, stages, why, blocks=blocks, strips=strips)


def _few_rows(spec: ContractionSpec, profile: GpuProfile, columns: int) -> Iterator[Choice]:
    """The long operand is read once, by as many blocks as there are; what counts is bytes in flight."""
    block_n = -(-columns // 16) * 16
    tiles = size_of(spec.a.shape[0]) * -(-size_of(spec.a.shape[1]) // 64)
    blocks = 2 if tiles > profile.processors else 1
    for block_k in (128, 64):
        stage = 2 * block_k * (64 + block_n)
        stages = min(FEW_STAGES, (room_of(profile, blocks) - ALIGNMENT) // stage)
        config = {"block_m": 64, "block_n": block_n, "block_k": block_k}
        yield Choice(config, stages, f"turned, 64 x {block_n}, {stages} stages", spec=spec, blocks=blocks)


def _attention(spec: AttentionSpec, profile: GpuProfile) -> Iterator[Choice]:
    width = max(size_of(spec.q.shape[3]), size_of(spec.v.shape[3]))
    if width not in ATTENTION_TILES:
        raise CudaError(f"heads of {width} elements: attention for {profile.arch} has 64 and 128")
    shared = heads_as_queries(spec) or spec
    queries = shared.q.shape[2]
    if isinstance(queries, Const) and int(queries.value) <= FEW // 4:
        for keys, stages, blocks in ((8192 // width, 3, 1), (4096 // width, 2, 2)):
            config = {"block_m": 64, "block_n": keys}
            yield Choice(config, stages, f"few queries, {keys} keys a step", blocks=blocks, spec=shared)
    for rows, keys, strips, blocks in ATTENTION_TILES[width]:
        config = {"block_m": rows, "block_n": keys}
        why = f"{rows} queries, {keys} keys a step, {strips} strips a warp"
        yield Choice(config, 2, why, blocks=blocks, strips=strips)
