"""Tile recommendation: ranks tile extents for a machine by a cost model that says why.

Comes in: a spec and a hardware profile. Goes out: values for the tunable extents of the spec's kernel, best first,
each with its predicted cycles; those that cannot work, with the reason. The model is a roofline per task: the cycles
of its products and of its pointwise work, or of moving its operands from the cache that they fit, whichever is
larger; then the tasks spread over the cores.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from tilecore.contract.evaluate import Evaluator
from tilecore.contract.expr import Const, Expr, symbols
from tilecore.contract.spec import AttentionSpec, ContractionSpec, RowSpec, Spec, extent_of
from tilecore.emit_expr import operation_count
from tilecore.infer import choose_register_tile
from tilecore.profile import HardwareProfile
from tilecore.target import Target

NOMINAL = 256  # a dim that is known at run time only
TASK_CYCLES = 300.0
CALL_CYCLES = 40.0  # of one product


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration, its predicted cycles of the slowest core, and the reason if it was rejected."""

    config: Mapping[str, int]
    cycles: float
    why: str
    rejected: str = ""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A configuration and why it was chosen."""

    config: Mapping[str, int]
    why: str


def recommend(spec: Spec, profile: HardwareProfile, target: Target) -> Recommendation:
    """The best candidate. ValueError lists every candidate with its reason when none fits."""
    ranked = rank(spec, profile, target)
    fitting = [candidate for candidate in ranked if not candidate.rejected]
    if not fitting:
        reasons = "\n".join(f"  {dict(candidate.config)}: {candidate.rejected}" for candidate in ranked)
        raise ValueError(f"no configuration fits:\n{reasons}")
    best = fitting[0]
    return Recommendation(best.config, best.why)


def rank(spec: Spec, profile: HardwareProfile, target: Target) -> list[Candidate]:
    """Every candidate, best first; rejected ones last."""
    return sorted(
        _candidates(spec, profile, target), key=lambda candidate: (bool(candidate.rejected), candidate.cycles)
    )


def _candidates(spec: Spec, profile: HardwareProfile, target: Target) -> Iterator[Candidate]:
    match spec:
        case AttentionSpec():
            for block_m, block_n in product((12, 24, 48, 96), (32, 64, 128, 256, 512)):
                yield _attention(spec, {"block_m": block_m, "block_n": block_n}, profile, target)
        case ContractionSpec():
            depth = size(spec.a.shape[2])
            depths = sorted({min(depth, block) for block in (256, 512, 768, 1024, 1536, 2048)})
            for block_m, block_n, block_k in product((24, 48, 96, 192), (32, 64, 128, 256), depths):
                yield _contraction(spec, {"block_m": block_m, "block_n": block_n, "block_k": block_k}, profile, target)
        case RowSpec():
            for block_m in (1, 2, 4, 8, 16, 32, 64):
                yield _row(spec, {"block_m": block_m}, profile)


def size(extent: Expr) -> int:
    """A dim as a number: its own, or with `NOMINAL` for every symbol."""
    if isinstance(extent, Const):
        return int(extent.value)
    return int(Evaluator({}, {symbol.name: NOMINAL for symbol in symbols(extent)})(extent))


def _bytes_per_cycle(profile: HardwareProfile, footprint: float) -> float:
    for capacity, rate in (
        (profile.l1, profile.l1_bytes),
        (profile.l2, profile.l2_bytes),
        (profile.l3, profile.l3_bytes),
    ):
        if footprint <= 0.8 * capacity:
            return rate
    return profile.dram_bytes


def _product_cycles(rows: int, columns: int, depth: int, profile: HardwareProfile, target: Target) -> float:
    """One block of products: multiply-adds, or the traffic of its register tiles from L1 and L2."""
    tile = choose_register_tile(target)
    width = tile.columns(target.lanes)
    padded = -(-columns // width) * width
    multiply = rows * padded * depth / profile.macs_per_cycle
    panel = depth * width * 4
    loads = padded / width * (-(-rows // tile.rows)) * panel / _bytes_per_cycle(profile, panel + tile.rows * depth * 4)
    accumulate = 2 * rows * padded * 4 / profile.l1_bytes
    tiles = -(-rows // tile.rows) * padded / width
    return max(multiply, loads) + accumulate + CALL_CYCLES * tiles


def _spread(tasks: int, cycles: float, profile: HardwareProfile) -> float:
    """Cycles of the busiest core."""
    return (
        -(-tasks // min(profile.cores, max(tasks, 1))) * cycles
        if tasks < 4 * profile.cores
        else tasks * cycles / profile.cores
    )


def _contraction(
    spec: ContractionSpec, config: Mapping[str, int], profile: HardwareProfile, target: Target
) -> Candidate:
    batch, rows, depth = (size(extent) for extent in spec.a.shape)
    columns = size(spec.b.shape[2])
    m, n, k = min(config["block_m"], rows), min(config["block_n"], columns), config["block_k"]
    steps = -(-depth // k)
    operands = 4 * (m * depth + n * k + m * n)
    epilogue = sum(operation_count(result.value) for result in spec.outputs) + 2
    compute = steps * _product_cycles(m, n, min(k, depth), profile, target)
    pointwise = m * n * epilogue / target.lanes
    fetch = 4 * (n * depth) / _bytes_per_cycle(profile, 4 * columns * depth) + 4 * m * depth / _bytes_per_cycle(
        profile, operands
    )
    per_task = max(compute, fetch) + pointwise + TASK_CYCLES
    tasks = batch * -(-rows // config["block_m"]) * -(-columns // config["block_n"])
    why = f"{operands >> 10} KiB of operands, {steps} depth steps, {tasks} tasks"
    rejected = ""
    if 4 * m * n > profile.l2 // 2:
        rejected = f"the accumulator of {4 * m * n >> 10} KiB leaves no room in an L2 of {profile.l2 >> 10} KiB"
    return Candidate(config, _spread(tasks, per_task, profile), why, rejected)


def _attention(spec: AttentionSpec, config: Mapping[str, int], profile: HardwareProfile, target: Target) -> Candidate:
    batch, heads, queries, depth = (size(extent) for extent in spec.q.shape)
    keys, width = size(spec.v.shape[2]), size(spec.v.shape[3])
    m, n = min(config["block_m"], queries), min(config["block_n"], keys)
    steps = -(-keys // config["block_n"])
    tiles = 4 * (m * n + m * width + m * depth + n * (depth + width))
    score = operation_count(spec.score) + 24  # the exponential, the maximum and the sum
    pointwise = m * n * score / target.lanes / 2 + m * width * 2 / target.lanes + m * 40
    compute = _product_cycles(m, n, depth, profile, target) + _product_cycles(m, width, n, profile, target)
    fetch = 4 * m * n * 4 / _bytes_per_cycle(profile, tiles)
    pack = keys * (depth + width) * 4 / profile.l2_bytes * 2 / max(1, -(-queries // config["block_m"]))
    per_task = steps * (compute + pointwise + fetch) + pack + TASK_CYCLES
    tasks = batch * heads * -(-queries // config["block_m"])
    rejected = f"tiles of {tiles >> 10} KiB do not fit an L2 of {profile.l2 >> 10} KiB" if tiles > profile.l2 else ""
    return Candidate(
        config,
        _spread(tasks, per_task, profile),
        f"{tiles >> 10} KiB of tiles, {steps} key steps, {tasks} tasks",
        rejected,
    )


def _row(spec: RowSpec, config: Mapping[str, int], profile: HardwareProfile) -> Candidate:
    rows, columns = size(extent_of(spec.row)), size(extent_of(spec.column))
    tiles = 1 + sum(step.kind == "tile" for step in spec.steps)
    block = config["block_m"]
    footprint = 4 * columns * tiles * min(block, rows)
    passes = 2 + len(spec.steps) + len(spec.outputs)
    per_task = 4 * columns * block * passes / _bytes_per_cycle(profile, footprint) + TASK_CYCLES
    tasks = -(-rows // block)
    return Candidate(config, _spread(tasks, per_task, profile), f"{footprint >> 10} KiB of tiles, {tasks} tasks")
