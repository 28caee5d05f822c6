"""Tile recommendation: ranks tile extents for a machine by a cost model that says why.

Comes in: a spec and a hardware profile. Goes out: values for the tunable extents of the spec's kernel, best first,
each with its predicted cost; those that cannot work, with the reason. The model is a roofline per task: the cycles of
its products or of moving their operands from the cache that they fit, whichever is larger, plus its pointwise work;
then the tasks spread over the cores. Dims known at run time only are taken at several nominal sizes; the cost is
relative to the cycles that the products alone need, averaged over them.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import Evaluator
from tilecore.contract.expr import Const, Expr, Load, Op, Var
from tilecore.contract.panel import PANEL
from tilecore.contract.spec import AttentionSpec, ContractionSpec, RowSpec, ScanSpec, Spec, Tensor, extent_of
from tilecore.emit_expr import operation_count
from tilecore.emit_host import symbol_order
from tilecore.engine import BYTES_LANES, Engine, engine_for
from tilecore.library.schedule import splits
from tilecore.profile import HardwareProfile
from tilecore.target import ASKING_BLOCKS, BLOCK, Target

NOMINAL = (128, 512)  # sizes of a dim that is known at run time only
TASK_CYCLES = 1500.0  # of starting a grid point: its offsets, first touches and last stores
ROW_TASK_CYCLES = 100.0  # of a task of a row program: it makes no panels and has no accumulators
HIDDEN = 0.75  # share of the shorter of two things at once that the longer one hides
ROW_CYCLES = 150.0  # of the statistics of one row in one step of an online softmax
LOOP_CYCLES = 12.0  # of starting a vector loop over one row
MAKE_OPERATIONS = 3  # loading, storing and stepping, per vector of an operand that is computed into a tile
ROUND_OPERATIONS = 8  # per vector of a left operand that is rounded to bytes
CHUNKS_PER_CORE, INLINE_NANOSECONDS, CHUNK_NANOSECONDS = 16, 10_000, 2_500  # of `tile_chunks.h`
EXP_CYCLES = 18.0  # per vector of scores: exponential, maximum, sum


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration, its predicted cost (1 is the products' own cycles), and the reason if it was rejected.

    `cycles` are those of the whole call at one set of sizes; of ranked ones, `cost` in cycles at the smallest nominal
    size: extents that suit another size better would make the figure of that size alone erratic.
    """

    config: Mapping[str, int]
    cost: float
    why: str
    rejected: str
    cycles: float


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A configuration and why it was chosen."""

    config: Mapping[str, int]
    why: str


class NoConfigurationError(ValueError):
    """No extents of a kernel's tiles fit the machine."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of an element of either operand of a product where it reads them, and what multiplies them."""

    a: int
    b: int
    engine: Engine


@dataclass(frozen=True, slots=True)
class Machine:
    """What costs are computed for: a machine, and a size for every symbol."""

    profile: HardwareProfile
    target: Target
    sizes: Mapping[str, int]

    def size(self, extent: Expr) -> int:
        """A dim as a number."""
        if isinstance(extent, Const):
            return int(extent.value)
        return int(Evaluator({}, self.sizes)(extent))

    def rate(self, footprint: float) -> float:
        """Bytes per cycle of the smallest cache that holds `footprint` bytes."""
        profile = self.profile
        levels = ((profile.l1, profile.l1_bytes), (profile.l2, profile.l2_bytes), (profile.l3, profile.l3_bytes))
        return next((rate for capacity, rate in levels if footprint <= 0.8 * capacity), profile.dram_bytes)

    def product(self, rows: int, columns: int, depth: int, sizes: Sizes, *, beside: bool = False) -> float:
        """Cycles of one block of products: multiply-adds, or the traffic of A and B, and the accumulators.

        Panels of B are walked once, rows of A once per panel; each block of the engine reads its panel again. Results
        that are finished `beside` the next block never leave the first cache.
        """
        engine = sizes.engine
        panels = -(-columns // engine.columns)
        tiles = -(-rows // engine.rows) * panels
        steps = -(-depth // engine.depth) * engine.depth
        multiply = tiles * engine.rows * engine.columns * steps / engine.rate
        panel, strip = sizes.b * depth * engine.columns, sizes.a * engine.rows * depth
        left = sizes.a * rows * depth
        traffic = tiles * panel / self.rate(panel + strip) + panels * left / self.rate(panel + left)
        accumulators = 0.0 if beside else 8 * rows * columns / self.rate(4 * rows * columns)  # read and written
        return _overlap(multiply, traffic) + engine.cycles * tiles + accumulators

    def spread(self, tasks: int, cycles: float) -> float:
        """Cycles of the busiest core, when chunks of whole tasks are dealt out as `tile_chunks.h` cuts them."""
        cores, nanoseconds = self.profile.cores, tasks * cycles / self.profile.clock * 1e9
        worth = int(nanoseconds / CHUNK_NANOSECONDS) if nanoseconds >= INLINE_NANOSECONDS else 1
        chunks = max(min(tasks, CHUNKS_PER_CORE * cores, worth), 1)
        return math.ceil(-(-chunks // cores) * tasks / chunks) * cycles


def recommend(spec: Spec, profile: HardwareProfile, target: Target) -> Recommendation:
    """The best candidate. NoConfigurationError lists every candidate with its reason when none fits."""
    ranked = rank(spec, profile, target)
    fitting = [candidate for candidate in ranked if not candidate.rejected]
    if not fitting:
        reasons = "\n".join(f"  {dict(candidate.config)}: {candidate.rejected}" for candidate in ranked)
        raise NoConfigurationError(f"no configuration fits:\n{reasons}")
    best = fitting[0]
    return Recommendation(best.config, best.why)


def rank(spec: Spec, profile: HardwareProfile, target: Target) -> list[Candidate]:
    """Every candidate, best first; rejected ones last."""
    machines = [Machine(profile, target, nominal_sizes(spec, nominal)) for nominal in NOMINAL]
    ranked: list[Candidate] = []
    for config in _configurations(spec, machines[-1]):
        found = [cost_of(spec, config, machine) for machine in machines]
        rejected = next((candidate.rejected for candidate in found if candidate.rejected), "")
        mean = sum(candidate.cost for candidate in found) / len(found)
        own = found[0].cycles / found[0].cost if found[0].cost else 0.0
        ranked.append(Candidate(config, mean, found[-1].why, rejected, mean * own))
    return sorted(ranked, key=lambda candidate: (bool(candidate.rejected), candidate.cost))


def nominal_sizes(spec: Spec, nominal: int) -> dict[str, int]:
    """A size for every symbol: `nominal`, but 1 for the first of several, which is the batch in every common model."""
    names = symbol_order(spec.inputs)
    return {name: 1 if len(names) > 1 and name == names[0] else nominal for name in names}


def _configurations(spec: Spec, machine: Machine) -> Iterator[dict[str, int]]:
    match spec:
        case AttentionSpec():
            rows = (32, 64, 96, 128) if _engine(spec.q.value, machine).rows == BLOCK else (12, 24, 48, 96)
            for block_m, block_n in product(rows, (32, 64, 128, 256, 512)):
                yield {"block_m": block_m, "block_n": block_n}
        case ContractionSpec():
            depth = machine.size(spec.a.shape[2])
            step = max(spec.byte_block, PANEL)
            depths = sorted({_depth_block(depth, block, step) for block in (384, 768, 1536, 4096)})
            narrow = _is_stored(spec.a.value) and not spec.byte_block  # else what is made of a serves more columns
            widths = (32, 64, 128, 256) if narrow else (32, 64, 128, 256, 512, 768)
            rows = (24, 48, 96, 192)
            if spec.acc.dtype is DType.I32 and machine.target.lanes == BYTES_LANES:
                rows = (64, 128, 192)  # sums of columns are taken once for all rows
            if _engine(spec.a.value, machine).rows == BLOCK:
                rows, widths, depths = (32, 64, 128, 256), (*widths, 384, 1536, 3072), depths[-1:]
            for block_m, block_n, block_k in product(rows, widths, depths):
                yield {"block_m": block_m, "block_n": block_n, "block_k": block_k}
        case RowSpec():
            for block_m in (1, 2, 4, 8, 16, 32, 64):
                yield {"block_m": block_m}
        case ScanSpec():
            whole = 1 if spec.column is None else machine.size(extent_of(spec.column))
            columns = -(-whole // PANEL) * PANEL
            for block_n in sorted({min(block, columns) for block in (16, 32, 64, 128, 256)} if splits(spec) else {1}):
                yield {"block_n": block_n}


def cost_of(spec: Spec, config: Mapping[str, int], machine: Machine) -> Candidate:
    """One configuration on a machine, for its sizes."""
    match spec:
        case AttentionSpec():
            return _attention(spec, config, machine)
        case ContractionSpec():
            return _contraction(spec, config, machine)
        case RowSpec():
            return _row(spec, config, machine)
        case ScanSpec():
            return _scan(spec, config, machine)


def _overlap(work: float, traffic: float) -> float:
    """Two things that run at once: the longer one, and what it does not hide of the other."""
    return max(work, traffic) + (1 - HIDDEN) * min(work, traffic)


def _contraction(spec: ContractionSpec, config: Mapping[str, int], machine: Machine) -> Candidate:
    batch, rows, depth = (machine.size(extent) for extent in spec.a.shape)
    columns = machine.size(spec.b.shape[2])
    m, n, k = min(config["block_m"], rows), min(config["block_n"], columns), min(config["block_k"], depth)
    steps = -(-depth // max(k, 1))
    count = len(spec.products)
    sizes = _sizes(spec, machine)
    operands = sizes.a * m * depth + (sizes.b * n * k + 4 * m * n) * count
    epilogue = sum(operation_count(result.value) for result in spec.outputs) + 2 * count
    beside = sizes.engine.beside and steps == 1
    compute = steps * machine.product(m, n, k, sizes, beside=beside) * count
    fetch = count * sizes.b * n * depth / machine.rate(sizes.b * columns * depth * count)
    if beside and operands - 4 * m * n * count <= 0.8 * machine.profile.l2:  # B stays from one task to the next
        fetch /= -(-rows // config["block_m"])
    fetch += sizes.a * m * depth / machine.rate(operands)
    made = 0.0 if _is_stored(spec.a.value) else m * depth * (operation_count(spec.a.value) + MAKE_OPERATIONS)
    made += m * depth * ROUND_OPERATIONS if spec.byte_block else 0.0
    for part in spec.products:  # once while the rows move
        read = spec.byte_block or _is_stored(part.b.value)
        whole = 0 if read else operation_count(part.b.value) + MAKE_OPERATIONS
        made += n * depth * whole / max(-(-rows // config["block_m"]), 1)
    waits = beside and m < ASKING_BLOCKS * BLOCK
    finish, busy = m * n * epilogue / machine.target.lanes, compute + fetch if waits else _overlap(compute, fetch)
    per_task = (_overlap(busy, finish) if beside else busy + finish) + made / machine.target.lanes + TASK_CYCLES
    tasks = batch * -(-rows // config["block_m"]) * -(-columns // config["block_n"])
    own = batch * rows * columns * depth * count / machine.profile.macs_per_cycle / machine.profile.cores
    why = f"{operands >> 10} KiB of operands, {steps} depth steps, {tasks} tasks"
    rejected = ""
    if 4 * m * n * count > machine.profile.l2 // 2 and not beside:
        rejected = (
            f"an accumulator of {4 * m * n * count >> 10} KiB leaves no room in an L2 of {machine.profile.l2 >> 10} KiB"
        )
    elif (
        4 * n * k > machine.profile.l2 // 2 and not spec.byte_block and any(_unpacks(p.b.value) for p in spec.products)
    ):
        rejected = f"unpacked weights of {4 * n * k >> 10} KiB do not stay in an L2 of {machine.profile.l2 >> 10} KiB"
    cycles = machine.spread(tasks, per_task)
    return Candidate(config, cycles / max(own, 1.0), why, rejected, cycles)


def _depth_block(depth: int, limit: int, unit: int) -> int:
    """The largest step of at most `limit`, in units, that divides the depth without a tail, else `limit`."""
    if depth <= limit:
        return max(1, depth)
    even = (step for step in range(limit - limit % unit, limit // 2, -unit) if depth % step == 0)
    return next(even, limit)


def _engine(value: Expr, machine: Machine) -> Engine:
    """What multiplies a left operand of these elements."""
    return engine_for(value.dtype, machine.profile, machine.target)


def _sizes(spec: ContractionSpec, machine: Machine) -> Sizes:
    """Constants that are read in place keep their own size, all else is as wide as the engine takes it."""
    if spec.byte_block:
        return Sizes(1, 1, engine_for(DType.I8, machine.profile, machine.target))
    engine = engine_for(DType.I16 if spec.acc.dtype is DType.I32 else spec.a.dtype, machine.profile, machine.target)
    stored = [_without_casts(part.b.value) for part in spec.products]
    right = max(value.dtype.row.bytes if isinstance(value, Load) else engine.bytes for value in stored)
    return Sizes(engine.bytes, min(right, engine.bytes), engine)


def _is_stored(value: Expr) -> bool:
    """Whether a product may read an operand where it is: floats as they are, weights of either kind through a cast."""
    if isinstance(value, Load):
        return True
    inner = _without_casts(value)
    return isinstance(inner, Load) and isinstance(inner.source, Tensor) and inner.source.constant


def _without_casts(value: Expr) -> Expr:
    while isinstance(value, Op) and value.name == "cast":
        value = value.args[0]
    return value


def _unpacks(value: Expr) -> bool:
    """Whether the elements of a right operand of floats are computed, so that they are written to memory first."""
    value = _without_casts(value)
    return value.dtype is DType.F32 and isinstance(value, Op)


def _attention(spec: AttentionSpec, config: Mapping[str, int], machine: Machine) -> Candidate:
    batch, heads, queries, depth = (machine.size(extent) for extent in spec.q.shape)
    keys, width = machine.size(spec.v.shape[2]), machine.size(spec.v.shape[3])
    m, n = min(config["block_m"], queries), min(config["block_n"], keys)
    steps, lanes = -(-keys // config["block_n"]), machine.target.lanes
    tiles = 4 * (m * n + m * width + m * depth)
    engine = _engine(spec.q.value, machine)
    sizes = Sizes(engine.bytes, engine.bytes, engine)
    products = machine.product(m, n, depth, sizes) + machine.product(m, width, n, sizes)
    vectors = m * n / lanes * (EXP_CYCLES + operation_count(spec.score) / 2)
    traffic = 4 * m * n * 4 / machine.rate(tiles)
    per_task = steps * (products + vectors + traffic + m * (ROW_CYCLES + 2 * width / lanes)) + TASK_CYCLES
    blocks = -(-queries // config["block_m"])
    tasks = batch * heads * blocks
    own = batch * heads * queries * keys * (depth + width) / machine.profile.macs_per_cycle / machine.profile.cores
    rejected = ""
    if tiles > machine.profile.l2 // 2:
        rejected = f"tiles of {tiles >> 10} KiB do not leave room in an L2 of {machine.profile.l2 >> 10} KiB"
    why = f"{tiles >> 10} KiB of tiles, {steps} key steps, {tasks} tasks"
    cycles = machine.spread(tasks, per_task)
    return Candidate(config, cycles / max(own, 1.0), why, rejected, cycles)


def _row(spec: RowSpec, config: Mapping[str, int], machine: Machine) -> Candidate:
    rows, columns = machine.size(extent_of(spec.row)), machine.size(extent_of(spec.column))
    tiles = 1 + sum(step.kind == "tile" for step in spec.steps)
    block = config["block_m"]
    streams = tiles + len(spec.inputs) + len(spec.outputs)  # what passes a cache between two uses of a tile's row
    footprint = 4 * columns * streams * min(block, rows)
    passes = 2 + len(spec.steps) + len(spec.outputs)
    per_task = 4 * columns * block * passes / machine.rate(footprint) + ROW_TASK_CYCLES
    tasks = -(-rows // block)
    own = 4 * columns * rows * passes / machine.profile.l1_bytes / machine.profile.cores
    why = f"{footprint >> 10} KiB of rows, {tasks} tasks"
    cycles = machine.spread(tasks, per_task)
    return Candidate(config, cycles / max(own, 1.0), why, "", cycles)


def _scan(spec: ScanSpec, config: Mapping[str, int], machine: Machine) -> Candidate:
    columns = 1 if spec.column is None else machine.size(extent_of(spec.column))
    block = min(config["block_n"], columns) if splits(spec) else columns

    def cycles(axes: tuple[Var, ...], program: Expr) -> float:
        """Of one program of a step: its vectors' operations, loads and stores, and the start of each row's loop."""
        sizes = [block if axis == spec.column else machine.size(extent_of(axis)) for axis in axes] or [1]
        rows = math.prod(sizes[:-1])
        return rows * (-(-sizes[-1] // machine.target.lanes) * (2 + operation_count(program)) + LOOP_CYCLES)

    step = sum(cycles(state.axes, state.update) for state in spec.states)
    step += sum(cycles((total.over, *total.axes), total.value) for total in spec.totals)
    query = sum(cycles((total.over, *total.axes), total.value) for total in spec.reads)
    per_task = machine.size(extent_of(spec.time)) * step + machine.size(extent_of(spec.query)) * query + TASK_CYCLES
    tasks = machine.size(extent_of(spec.group)) * -(-columns // max(block, 1))
    own = tasks * per_task / machine.profile.cores
    kept = sum(
        4 * math.prod(block if axis == spec.column else machine.size(extent_of(axis)) for axis in state.axes)
        for state in spec.states
    )
    share = columns / max(block, 1)  # of the whole: what one block does again for every other block is a loss
    why = f"{kept >> 10} KiB of state, {tasks} tasks"
    total = machine.spread(tasks, per_task)
    return Candidate(config, total / max(own, 1.0) * per_task * share, why, "", total)
