"""Tile recommendation for Hopper: products by a model of waves, copies and products; attention by measured shapes.

Comes in: a spec and a card. Goes out: candidates for the kernel's extents and stages, best first, each with its reason.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tilecore.contract.expr import Const, Expr
from tilecore.contract.reshape import heads_as_queries, turned
from tilecore.contract.spec import AttentionSpec, ContractionSpec, RowSpec, ScanSpec, Spec, View, extent_of, outputs_of
from tilecore.cuda.decoding import Decoding, decoding_of, is_plain
from tilecore.cuda.errors import CudaError
from tilecore.cuda.linear import linear_kernel
from tilecore.cuda.profile import GpuProfile
from tilecore.cuda.roles import CHUNK, DECODED, GROUP_ROWS, SWIZZLE, WARP_COLUMNS, WIDEST
from tilecore.cuda.row_plan import MAX_THREADS, row_vector
from tilecore.library.score import score_of

NOMINAL = 4096  # of an extent that is known at run time only
DEPTH = 64  # of one step: 128 bytes, one swizzled chunk
PRODUCT_TILES = ((128, 256), (128, 192), (128, 128), (128, 64), (64, 256), (64, 128), (64, 64))
# sums of 8 bits take twice the registers
SHORT_TILES = ((192, 128), (128, 192), (128, 128), (128, 64), (64, 192), (64, 128), (64, 64))
MAX_STAGES, BARRIERS = 8, 1024
SHORT = 2048  # queries
FEW = 64  # rows of a product that make it a matter of bandwidth, and queries of a tile
SPLITS = (1, 2, 4, 8)
DEEP, DEEP_STAGES = 256, 12  # depth of a step and stages where all that counts is bytes in flight
WARP_DEPTH = 256  # of a step of warps that multiply by themselves
DECODED_ROWS = 128  # of a tile of levels
DECODE_CYCLES = 33  # for 64 of the depth of such a tile, per bit of a level and 4 more
LEAST_STAGES = 3  # with steps of levels that are twice as long
LEAST_STEPS = 2  # of a part of the keys
JOIN_CYCLES = 2500  # of an exchange in a cluster
ROW_THREADS, RUNS, MAX_ELEMENTS = 128, 2, 64  # of a row that is long; of a thread: runs wanted, elements at most
BLOCK_THREADS = 256  # of a block of short rows
# head dim: (warpgroups, keys of a tile), best first; longer rows of scores where fewer warpgroups share the registers
ATTENTION_TILES = {64: ((3, 128), (2, 128), (2, 64)), 128: ((2, 128), (2, 96), (2, 64))}


@dataclass(frozen=True, slots=True)
class Choice:
    """Extents of the kernel, stages of its rings, and why."""

    config: Mapping[str, int]
    stages: int
    why: str
    threads: int = 0  # of a block, where they are a choice
    overlap: bool = False  # whether products of two iterations are in flight at the same time
    reference: bool = False  # whether maxima that need not rise are left out where they can be
    blocks: int = 1  # that share a processor
    apart: bool = False  # whether tasks of a split need not run at the same time
    strips: int = 1  # of 16 rows that a warp has, where warps multiply
    spec: Spec | None = None  # the region told in another way, where that suits the card


def choices(spec: Spec, profile: GpuProfile, *, rows: int | None = None) -> Iterator[Choice]:
    """Candidates, best first. CudaError for a region without a CUDA kernel.

    `rows` is what to take rows of a product for that are known at run time only.
    """
    match spec:
        case ContractionSpec():
            yield from _products(spec, profile, rows or NOMINAL)
        case AttentionSpec():
            yield from _attention(spec, profile)
        case RowSpec():
            yield from row_choices(spec)
        case ScanSpec():
            yield from _linear(spec, profile)


def size_of(extent: Expr | None, typical: int = NOMINAL) -> int:
    """An extent, or what to take it for."""
    return int(extent.value) if isinstance(extent, Const) else typical


def _products(spec: ContractionSpec, profile: GpuProfile, typical: int) -> Iterator[Choice]:
    batch, rows, depth = size_of(spec.a.shape[0]), size_of(spec.a.shape[1], typical), size_of(spec.a.shape[2])
    if not is_plain(spec.b):
        other = turned(spec)
        if other is None:
            raise CudaError("products that share a left operand and have levels: one by one they have a kernel")
        yield from _decoded(other, profile, rows)
        return
    other = turned(spec) if rows <= FEW else None
    if other is not None:
        yield from _few_rows(other, profile, rows)
    columns = size_of(spec.b.shape[2])
    count = len(spec.products)
    size = spec.a.dtype.row.bytes
    step = SWIZZLE // size  # of the depth
    ranked: list[tuple[float, int, int]] = []
    for block_m, block_n in PRODUCT_TILES if size > 1 else SHORT_TILES:
        if count * block_n > 256:
            continue
        tiles = batch * -(-rows // block_m) * -(-columns // block_n)
        waves = -(-tiles // profile.processors)
        products = 2.0 * block_m * block_n * count * DEPTH / profile.flops_per_cycle  # of as many bytes
        copies = (block_m + count * block_n) * SWIZZLE / profile.copy_bytes if size > 1 else 0.0  # as measured
        cycles = waves * (-(-depth // step) * max(products, copies) + profile.start_cycles)
        ranked.append((cycles, block_m, block_n))
    for cycles, block_m, block_n in sorted(ranked):
        stage = SWIZZLE * (block_m + count * block_n)
        staging = block_m // 64 * 2 * 64 * 128
        stages = min(MAX_STAGES, (profile.shared_bytes - staging - BARRIERS - 1024) // stage)
        config = {"block_m": block_m, "block_n": block_n, "block_k": step}
        yield Choice(config, stages, f"{block_m} x {block_n}: {cycles:.0f} cycles, {stages} stages")


def _few_rows(spec: ContractionSpec, profile: GpuProfile, columns: int) -> Iterator[Choice]:
    """The long operand is read once; tasks share the depth where there are too few tiles for all processors."""
    batch, rows, depth = (size_of(extent) for extent in spec.a.shape)
    block_n = -(-columns // 16) * 16
    size = spec.a.dtype.row.bytes
    deep = DEEP * 2 // size
    ranked: list[tuple[float, int, int]] = []
    for block_m in (64, 128):
        tiles = batch * -(-rows // block_m)
        for split in SPLITS:
            room = profile.clusters(split)
            active = min(tiles, room) * split
            rate = min(profile.copy_bytes / 2, profile.memory_bytes / active)  # bytes a cycle of one processor
            share = -(-depth // deep // split) * deep
            cycles = -(-tiles // room) * (1.0 * size * share * block_m / rate + JOIN_CYCLES * (split > 1))
            ranked.append((cycles, block_m, split))
    for cycles, block_m, split in sorted(ranked):
        stage = 2 * DEEP * (block_m + block_n)
        exchange = block_m * block_n * 4
        stages = min(DEEP_STAGES, (profile.shared_bytes - exchange - BARRIERS - 1024) // stage)
        config = {"block_m": block_m, "block_n": block_n, "block_k": deep, "split": split}
        yield Choice(config, stages, f"turned, {block_m} x {block_n}, {split} parts: {cycles:.0f} cycles", spec=spec)


def _decoded(spec: ContractionSpec, profile: GpuProfile, columns: int) -> Iterator[Choice]:
    """Levels as the left operand: decoded in registers, by as many threads for few columns as for many."""
    batch, rows, depth = (size_of(extent) for extent in spec.a.shape)
    decoding = decoding_of(spec.a)
    bits = decoding.bits
    ranked: list[tuple[float, int, int, int, int, int]] = []
    for block_n in sorted({-(-columns // 8) * 8} if columns <= 128 else {128, 256, min(256, -(-columns // 8) * 8)}):
        blocks = 2 if block_n <= WARP_COLUMNS and decoding.run >= DECODED else 1  # warps multiply by themselves
        tiles = batch * -(-rows // DECODED_ROWS) * -(-columns // block_n)
        for split in SPLITS:
            if split > 1 and tiles * split > profile.processors:
                continue
            block_k, stages = _decoded_steps(decoding, block_n, split, profile, blocks=blocks)
            room = profile.clusters(split)
            active = min(tiles, room) * split
            steps = -(-depth // block_k // split) * block_k / DEPTH
            levels = DECODED_ROWS * DEPTH * bits / 8
            products = 2.0 * DECODED_ROWS * block_n * DEPTH / profile.flops_per_cycle
            memory = levels / min(profile.copy_bytes / 2, profile.memory_bytes / active)
            copies = (levels + 2.0 * block_n * DEPTH) / profile.copy_bytes
            step = max(products, memory, copies, DECODE_CYCLES * (bits + 4))
            cycles = -(-tiles // room) * (steps * step + profile.start_cycles) + JOIN_CYCLES * (split > 1)
            ranked.append((cycles, block_n, block_k, split, stages, blocks))
    for cycles, block_n, block_k, split, stages, blocks in sorted(ranked):
        config = {"block_m": DECODED_ROWS, "block_n": block_n, "block_k": block_k, "split": split}
        if stages >= 2:
            why = f"levels, {block_n} columns, {split} parts: {cycles:.0f} cycles"
            yield Choice(config, stages, why, blocks=blocks, spec=spec)


def _decoded_steps(
    decoding: Decoding, block_n: int, split: int, profile: GpuProfile, *, blocks: int
) -> tuple[int, int]:
    """(depth of a step, stages): long steps where three of them fit and their levels are of few groups. Of two `blocks`
    that share a processor one may be the next launch's, which sets itself up before this one has ended.
    """
    exchange = DECODED_ROWS * block_n * (4 if split > 1 else 0)
    taken = exchange + DECODED_ROWS * 2 * block_n * (block_n % 16 == 0) + BARRIERS + 1024

    def stages(depth: int) -> int:
        stage = DECODED_ROWS * depth * decoding.bits // 8 + 2 * block_n * depth
        return min(DEEP_STAGES, (profile.shared_bytes // blocks - taken) // stage)

    longer = WARP_DEPTH if blocks > 1 else 2 * DECODED
    deep = decoding.run >= DECODED and stages(longer) >= LEAST_STAGES
    depth = longer if deep else longer // 2
    return depth, stages(depth)


def _decode(spec: AttentionSpec, width: int, profile: GpuProfile) -> Iterator[Choice]:
    """Few queries: one warpgroup, as many keys in flight as fit, parts of the keys where processors would idle."""
    batch, heads = (int(extent.value) if isinstance(extent, Const) else 16 for extent in spec.q.shape[:2])
    keys = min(128, 16384 // width)
    steps = -(-size_of(spec.k.shape[2]) // keys)
    each = -(-steps // max(1, min(profile.processors // (batch * heads), steps // LEAST_STEPS)))
    split = -(-steps // each)  # none is left without keys
    if split > 1:  # short: what is under way at once is waited for at once
        config = {"block_m": 64, "block_n": 8192 // width, "split": split}
        yield Choice(config, 3, f"{8192 // width} keys a step, {split} parts of the keys", spec=spec, apart=True)
    stages = min(DEEP_STAGES, (profile.shared_bytes - 2 * 64 * width - 4 * BARRIERS) // (4 * keys * width))
    yield Choice({"block_m": 64, "block_n": keys, "split": 1}, stages, f"{keys} keys a step", spec=spec)


def _attention(spec: AttentionSpec, profile: GpuProfile) -> Iterator[Choice]:
    width = max(size_of(spec.q.shape[3]), size_of(spec.v.shape[3]))
    shared = heads_as_queries(spec) or spec
    if size_of(spec.v.shape[3]) > WIDEST:
        why = "64 queries, 64 keys a step, values' columns shared by two warpgroups"
        yield Choice({"block_m": GROUP_ROWS, "block_n": 64}, 2, why, spec=shared)
        return
    if width not in ATTENTION_TILES:
        raise CudaError(f"heads of {width} elements: CUDA attention has 64, 128 and values of more than {WIDEST}")
    queries = shared.q.shape[2]
    if isinstance(queries, Const) and int(queries.value) <= FEW // 4:
        yield from _decode(shared, width, profile)
    tiles = ATTENTION_TILES[width]
    if size_of(spec.q.shape[2]) <= SHORT and score_of(spec).bounds:
        tiles = tuple(sorted(tiles, key=lambda tile: tile[0] > 2))  # 192 rows are too coarse there
    for groups, keys in tiles:
        config = {"block_m": 64 * groups, "block_n": keys}
        why = f"{groups} warpgroups of 64 queries, {keys} keys a step"
        yield Choice(config, 2, f"{why}, softmax beside products", overlap=True, reference=True)
        yield Choice(config, 2, f"{why}, softmax beside products, every maximum", overlap=True)
        yield Choice(config, 2, why)


def _linear(spec: ScanSpec, profile: GpuProfile) -> Iterator[Choice]:
    """Two warpgroups share a group's columns where there are groups enough for all processors, else one has its own."""
    _, form = linear_kernel(spec)
    sides: tuple[View, View] = form["Q"], form["V"]
    depth, width = (side.shape[2] for side in sides)
    for extent in (depth, width):
        if not isinstance(extent, Const) or int(extent.value) % CHUNK:
            raise CudaError(f"linear attention of {depth} and {width} columns: multiples of {CHUNK} are needed")
    groups = size_of(spec.group.extent)
    wide = 2 * GROUP_ROWS
    blocks = [GROUP_ROWS]
    if size_of(width) % wide == 0:
        fills = groups * size_of(width) // wide >= profile.processors // 2
        blocks.insert(0 if fills else 1, wide)
    for block in blocks:
        for stages in (3, 2):
            config = {"chunk": CHUNK, "block_e": block}
            yield Choice(config, stages, f"chunks of {CHUNK} steps, {block} columns of values, {stages} stages")


def row_choices(spec: RowSpec) -> Iterator[Choice]:
    """Threads per row so that each has about `RUNS` runs of columns: enough loads in flight, few enough registers. A
    short row, or one whose threads do not meet, is one access of its threads.
    """
    columns = extent_of(spec.column)
    if not isinstance(columns, Const):
        raise CudaError(f"rows of {columns} columns: CUDA keeps rows in registers and must know their width")
    width = int(columns.value)
    vector = row_vector((*spec.inputs, *outputs_of(spec)), width)
    runs = -(-width // vector)
    meets = any(step.kind != "tile" for step in spec.steps)
    wanted = RUNS if runs > ROW_THREADS and meets else 1
    ranked: list[tuple[float, int]] = []
    for lanes in (1, 2, 4, 8, 16, *range(32, MAX_THREADS + 1, 32)):
        chunks = -(-runs // lanes)
        if chunks * vector > MAX_ELEMENTS or lanes >= 2 * runs:
            continue
        waste = chunks * lanes / runs  # threads without a column idle
        ranked.append((waste * 8 + abs(chunks - wanted) + (lanes > 512) * 2, lanes))
    if not ranked:
        raise CudaError(f"rows of {width} columns in runs of {vector}: more than the registers of a block hold")
    for _, lanes in sorted(ranked):
        rows = max(1, BLOCK_THREADS // lanes) if lanes <= 32 else 1
        yield Choice({"block_m": rows}, 1, f"{rows} rows a block, {lanes} threads a row", rows * lanes)
