"""Tile recommendation: ranks tile extents for a machine by a cost model that says why.

Comes in: a spec and a hardware profile. Goes out: values for the tunable extents of the spec's kernel, best first,
each with its predicted cost; those that cannot work, with the reason. The model is a roofline per task: the cycles of
its products or of moving their operands from the cache that they fit, whichever is larger, plus its pointwise work;
then the tasks spread over the cores. Dims known at run time only are taken at several nominal sizes; the cost is
relative to the cycles that the products alone need, averaged over them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import Evaluator
from tilecore.contract.expr import Const, Expr, Load, Op, Sym, Var, const, loads, variables
from tilecore.contract.few_rows import FEW_ROWS
from tilecore.contract.panel import PANEL
from tilecore.contract.spec import AttentionSpec, ContractionSpec, RowSpec, ScanSpec, Spec, Tensor, extent_of
from tilecore.cost import work_of
from tilecore.dealing import Tasks, busiest
from tilecore.emit_expr import operation_count
from tilecore.emit_host import symbol_order
from tilecore.engine import BYTES_LANES, Engine, engine_for
from tilecore.even_rows import height_of
from tilecore.library.schedule import splits
from tilecore.library.score import Bound, score_of
from tilecore.profile import HardwareProfile
from tilecore.rows_in_flight import FIRST_CACHE
from tilecore.target import ASKING_BLOCKS, BLOCK, Target, target_named

NOMINAL = (128, 512)  # sizes of a dim that is known at run time only
TASK_CYCLES = 10.0  # of starting a grid point: 0 to 10 with products of 32 steps and rows of 16 columns on a Zen 5
HEAD_TASK_CYCLES = 100.0  # of one of attention: 100 with 96 tokens there; of a recurrence, as much
REDUCTION_CYCLES = 45.0  # from a pass' last vector to what the next one begins with: 4,096 columns on a Zen 5
LEAST_ROWS = 4  # that a register tile of one row takes as long as: its multiply-adds wait for each other
LEAST_ROWS_OF_FLOATS = 2  # which have several sums a column: a load and a line asked for with each multiply-add
LEAST_SUMS = 8  # of one of more rows, for the same reason: two in a cycle, each for four
SIDE = 0.015  # of fetching B, for each panel past two that one row walks side by side: 0 to 6 %, by where pages lie
SIDE_PANELS = 4  # of pairs that it does
SUM_BYTES = 16  # of a sum that goes on later: its line is fetched, written back, read again and written back again
SHARPNESS = 8  # how little the shorter of two things at once adds to the longer one
HIDDEN = 0.75  # share of the shorter of two things at once that the longer one hides
SHOWN = 0.0625  # share of fetching rows of A for the first time that shows although products go on
UNASKED_CYCLES = 6.0  # of each score of a task's first row whose bias nothing asked for: 5 to 7 with 12 heads of 512²
ROW_CYCLES = 150.0  # of the statistics of one row in one step of an online softmax
LOOP_CYCLES = 12.0  # of starting a vector loop over one row
MAKE_OPERATIONS = 3  # loading, storing and stepping, per vector of an operand that is computed into a tile
ROUND_OPERATIONS = 8  # per vector of a left operand that is rounded to bytes
LEVEL_OPERATIONS = 2  # per vector of levels that become bytes
EXP_CYCLES = 18.0  # per vector of scores: exponential, maximum, sum
UNEVEN = 0.05  # share of a chunk by which one core is done after the other, as measured with 6 and 12 equal chunks
KeyBounds = Sequence[tuple[Bound, int]]


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
        busy = _overlap(multiply, traffic) if engine.beside else _at_once(multiply, traffic)
        return busy + engine.cycles * tiles + accumulators

    def spread(self, tasks: Tasks, thought: int | None = None) -> float:
        """Cycles until the last core is done, of a call that its host thinks takes so many nanoseconds."""
        return busiest(tasks, self.profile.cores, self.profile.clock, uneven=UNEVEN, thought=thought)


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
    """Every candidate, best first; rejected ones last.

    Of blocks that are as large as a known extent or larger, the smallest stands for all: they make the same work.
    """
    machines = [Machine(profile, target, nominal_sizes(spec, nominal)) for nominal in NOMINAL]
    ranked: list[Candidate] = []
    costs = [costs_of(spec, machine) for machine in machines]
    for config in _distinct(spec, _configurations(spec, machines[-1])):
        found = [cost(config) for cost in costs]
        rejected = next((candidate.rejected for candidate in found if candidate.rejected), "")
        mean = sum(candidate.cost for candidate in found) / len(found)
        own = found[0].cycles / found[0].cost if found[0].cost else 0.0
        ranked.append(Candidate(config, mean, found[-1].why, rejected, mean * own))
    return sorted(ranked, key=lambda c: (bool(c.rejected), float(f"{c.cost:.6g}")))  # the first of equal ones


def nominal_sizes(spec: Spec, nominal: int) -> dict[str, int]:
    """A size for every symbol: `nominal`, but 1 for the first of several, which is the batch in every common model.

    An only symbol that leads a shape [batch, 197, 768] is a batch too: it is as many times 197 as `nominal` has, or 1.
    """
    names = symbol_order(spec.inputs)
    if len(names) == 1:
        return {names[0]: max(1, nominal // _rows_of_one(spec, names[0]))}
    return {name: 1 if name == names[0] else nominal for name in names}


def _rows_of_one(spec: Spec, symbol: str) -> int:
    """How many rows one more of `symbol` adds to the inputs that it leads; 1 where it leads none."""
    shapes = [tensor.shape[1:-1] for tensor in spec.inputs if tensor.shape and tensor.shape[0] == Sym(symbol)]
    return max((math.prod(int(dim.value) for dim in shape if isinstance(dim, Const)) for shape in shapes), default=1)


def _distinct(spec: Spec, configs: Iterator[dict[str, int]]) -> list[dict[str, int]]:
    match spec:
        case AttentionSpec():
            extents = {"block_m": spec.q.shape[2], "block_n": spec.v.shape[2]}
        case ContractionSpec():
            extents = {"block_m": spec.a.shape[1], "block_n": spec.b.shape[2]}
        case RowSpec():
            extents = {"block_m": extent_of(spec.row)}
        case ScanSpec():
            extents = {}
    known = {name: int(extent.value) for name, extent in extents.items() if isinstance(extent, Const)}
    found = dict[tuple[int, ...], dict[str, int]]()
    for config in configs:
        work = tuple(min(block, max(known.get(name, block), 1)) for name, block in config.items())
        if work not in found or tuple(config.values()) < tuple(found[work].values()):
            found[work] = config
    return list(found.values())


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
    return costs_of(spec, machine)(config)


def costs_of(spec: Spec, machine: Machine) -> Callable[[Mapping[str, int]], Candidate]:
    """What tells the cost of any configuration on a machine, for its sizes."""
    match spec:
        case AttentionSpec():
            return partial(_attention, spec, machine, key_bounds(spec, machine), operation_count(spec.score))
        case ContractionSpec():
            return partial(_contraction, _counted(spec, machine), machine)
        case RowSpec():
            return partial(_row, spec, machine)
        case ScanSpec():
            return partial(_scan, spec, machine)


def _overlap(work: float, traffic: float) -> float:
    """Two things that run at once: the longer one, and what it does not hide of the other."""
    return max(work, traffic) + (1 - HIDDEN) * min(work, traffic)


def _at_once(work: float, traffic: float) -> float:
    """Two things that a core does at once: the longer one, and little more unless both are about as long."""
    return (work**SHARPNESS + traffic**SHARPNESS) ** (1 / SHARPNESS)


@dataclass(frozen=True, slots=True)
class Contraction:
    """What a contraction's cost depends on: its extents, and operations per element of what it makes and finishes."""

    batch: int
    rows: int
    depth: int
    columns: int
    products: int
    outputs: int
    sizes: Sizes
    making_left: int
    making_right: int
    again: int  # operations per element of A in every task that sums a part of the depth: levels become bytes there
    finishing: int
    unpacks: bool  # weights are written to the cache before they are multiplied
    in_strips: bool  # sums over the whole depth are finished in the first cache (`strips.py`)
    keeps_left: bool  # tasks go along the columns first
    thought: int  # nanoseconds that hosts think a call takes
    rounds_left: bool  # to bytes, which stay for the next columns where one block has all rows (`sharing.py`)


def _counted(spec: ContractionSpec, machine: Machine) -> Contraction:
    batch, rows, depth = (machine.size(extent) for extent in spec.a.shape)
    making = 0 if _is_stored(spec.a.value) else operation_count(spec.a.value) + MAKE_OPERATIONS
    levels = spec.acc.dtype is DType.I32 and machine.target.lanes == BYTES_LANES
    made = [p.b.value for p in spec.products if not spec.byte_block and not _is_stored(p.b.value)]
    return Contraction(
        batch,
        rows,
        depth,
        machine.size(spec.b.shape[2]),
        len(spec.products),
        len(spec.outputs),
        _sizes(spec, machine),
        making + (ROUND_OPERATIONS if spec.byte_block else 0),
        sum(operation_count(value) + MAKE_OPERATIONS for value in made),
        LEVEL_OPERATIONS if levels else 0,
        sum(operation_count(result.value) for result in spec.outputs) + 2 * len(spec.products),
        not spec.byte_block and any(_unpacks(p.b.value) for p in spec.products),
        (levels or spec.acc.dtype is DType.F32) and all(_is_constant(part.b.value) for part in spec.products),
        keeps_left(spec, machine.profile, machine.target),
        machine.size(work_of(spec)),
        bool(spec.byte_block),
    )


def keeps_left(spec: ContractionSpec, profile: HardwareProfile, target: Target) -> bool:
    """Whether tasks go along the columns first: rows of A that are computed are kept, and there are none of B.

    Not with tile registers: what multiplies as fast as they do reads panels out of the second cache, for the next rows,
    too. Those of bytes are chosen when a kernel runs, so that no engine tells of them.
    """
    computed = not _is_stored(spec.a.value) and not spec.byte_block
    constant = all(_is_constant(part.b.value) for part in spec.products)
    tiles = engine_for(spec.a.dtype, profile, target).beside
    if spec.acc.dtype is DType.I32:
        tiles = bool(profile.narrow) and target_named(profile.narrow).amx
    return computed and constant and not tiles


def _contraction(of: Contraction, machine: Machine, config: Mapping[str, int]) -> Candidate:
    m, n, k = min(config["block_m"], of.rows), min(config["block_n"], of.columns), min(config["block_k"], of.depth)
    operands = of.sizes.a * m * of.depth + (of.sizes.b * n * k + 4 * m * n) * of.products
    down, across = _cuts(of.rows, config["block_m"]), _cuts(of.columns, config["block_n"])
    if of.keeps_left and of.batch == 1:
        height = height_of(const(of.rows), config["block_m"], of.sizes.engine.rows)
        down = _cuts(of.rows, machine.size(height))
    cycles = {(high, wide): _task(of, config, machine, high, wide) for high in {*down} for wide in {*across}}
    tasks = Tasks([cycles[high, wide] for wide in across for high in down], of.batch)
    multiply_adds = of.batch * of.rows * of.columns * of.depth * of.products
    own = multiply_adds / machine.profile.macs_per_cycle / machine.profile.cores
    steps, sums, l2 = -(-of.depth // max(k, 1)), 4 * m * n * of.products, machine.profile.l2
    why = f"{operands >> 10} KiB of operands, {steps} depth steps, {len(tasks.cycles) * of.batch} tasks"
    rejected = ""
    if sums > l2 // 2 and not ((of.sizes.engine.beside or of.in_strips) and steps == 1):
        rejected = f"an accumulator of {sums >> 10} KiB leaves no room in an L2 of {l2 >> 10} KiB"
    elif 4 * n * k > l2 // 2 and of.unpacks:
        rejected = f"unpacked weights of {4 * n * k >> 10} KiB do not stay in an L2 of {l2 >> 10} KiB"
    total = machine.spread(tasks, of.thought)
    return Candidate(config, total / max(own, 1.0), why, rejected, total)


def _cuts(extent: int, block: int) -> list[int]:
    """The sizes of an axis' blocks: the last one is what is left."""
    return [block] * (extent // block) + [extent % block] * (extent % block > 0)


def _task(of: Contraction, config: Mapping[str, int], machine: Machine, m: int, n: int) -> float:
    """Cycles of one task of a contraction: `m` × `n` results."""
    down, across = max(-(-of.rows // config["block_m"]), 1), max(-(-of.columns // config["block_n"]), 1)
    finish = m * n * of.finishing / machine.target.lanes
    left, right = m * of.depth * of.making_left, n * of.depth * of.making_right
    again = m * of.depth * of.again if config["block_k"] < of.depth else 0
    if of.keeps_left or (of.rounds_left and down == 1):  # once for all columns by each core that works on the same rows
        left *= min(1.0, max(1.0, machine.profile.cores / down) / across)
    else:  # once while the rows move
        right /= down
    own = (left + right + again) / machine.target.lanes + TASK_CYCLES
    if not of.sizes.engine.beside:
        return _vector_products(of, config, machine, m, n) + finish + own
    busy = _tile_products(of, config, machine, m, n)
    return (_overlap(busy, finish) if config["block_k"] >= of.depth else busy + finish) + own


def _tile_products(of: Contraction, config: Mapping[str, int], machine: Machine, m: int, n: int) -> float:
    """Cycles of one task's products in tile registers, and of bringing their operands."""
    k, sizes = min(config["block_k"], of.depth), of.sizes
    beside, steps = k == of.depth, -(-of.depth // max(k, 1))
    right, left = of.products * sizes.b * n * of.depth, sizes.a * m * of.depth
    operands = left + (sizes.b * n * k + 4 * m * n) * of.products
    compute = steps * machine.product(m, n, k, sizes, beside=beside) * of.products
    fetch = right / machine.rate(sizes.b * of.columns * of.depth * of.products)
    if beside and operands - 4 * m * n * of.products <= 0.8 * machine.profile.l2:  # B stays from one task to the next
        fetch /= -(-of.rows // config["block_m"])
    fetch += left / machine.rate(operands)
    return compute + fetch if beside and m < ASKING_BLOCKS * BLOCK else _overlap(compute, fetch)


def _vector_products(of: Contraction, config: Mapping[str, int], machine: Machine, m: int, n: int) -> float:
    """Cycles of one task's products in vector registers, and of bringing their operands.

    An operand is fetched once from where it lies, then read again from where what passes between two reads leaves it:
    a panel of B for every strip of register tiles, the rows of A for every panel, all of a task's B for the next rows.
    Sums that go on in a further step of the depth are read and written where a whole step's operands leave them.
    Tiles ask for the next panel ahead, so that little of fetching shows. Nothing asks for rows of A: where two panels
    leave them no room in L2, multiply-adds wait for them at every panel.
    """
    count, sizes, engine = of.products, of.sizes, of.sizes.engine
    tiles, panels = 1 if m <= engine.alone else -(-m // engine.rows), -(-n // engine.columns)
    strips = -(-of.rows // config["block_m"])
    right, left = sizes.b * of.depth * n * count, sizes.a * of.depth * m
    whole = of.in_strips and config["block_k"] >= of.depth
    results = 4 * m * n * (of.outputs if whole else count + of.outputs)
    new, kept = machine.rate(sizes.b * of.depth * of.columns * count), machine.rate(right + left + results)
    panels_first = right / new if of.keeps_left else right / strips * (1 / new + (strips - 1) / kept)
    rows_first = left / machine.rate(sizes.a * of.depth * of.rows + (right if of.columns > config["block_n"] else 0))
    if m == 1 and sizes.a == 2:  # a panel of bytes is walked alone, of floats two
        panels_first *= 1 + SIDE * max(0, min(-(-n // PANEL), SIDE_PANELS) - 2)
    if of.keeps_left:  # written to the cache when they are computed
        rows_first = left / machine.rate(left + right)
    wide = -(-n // PANEL) * PANEL
    one_row = LEAST_ROWS_OF_FLOATS if sizes.a == 4 else LEAST_ROWS
    least = one_row if m == 1 else LEAST_SUMS * machine.target.lanes / min(wide, engine.columns)
    multiply = traffic = 0.0
    begun = 8 * m * n * count / machine.rate(0 if whole else 4 * m * n * count)  # sums, written and read to be finished
    for step in _cuts(of.depth, config["block_k"]):
        deep = -(-step // engine.depth) * engine.depth
        multiply += count * max(m, least) * wide * deep / engine.rate
        panel, strip, block = sizes.b * step * engine.columns, sizes.a * step * engine.rows, sizes.a * step * m
        traffic += count * (tiles - 1) * sizes.b * step * n / machine.rate(panel + strip)
        again = (count * panels - 1) * block / machine.rate(2 * panel + block)
        far = machine.rate(2 * panel + block) < machine.profile.l2_bytes
        traffic, begun = (traffic, begun + again) if far else (traffic + again, begun)
        traffic += SUM_BYTES * m * n * count / machine.rate(block + (sizes.b * step * n + 4 * m * n) * count)
        begun += count * engine.cycles * tiles * panels
    shown = (1 - HIDDEN) * panels_first + SHOWN * rows_first
    return _at_once(multiply, traffic + panels_first + rows_first) + shown + begun


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
    return _is_constant(value)


def _is_constant(value: Expr) -> bool:
    """Whether an operand is a weight, through casts: products read panels of it where they are."""
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


def _attention(
    spec: AttentionSpec, machine: Machine, bounds: KeyBounds, scoring: int, config: Mapping[str, int]
) -> Candidate:
    batch, heads, queries, depth = (machine.size(extent) for extent in spec.q.shape)
    keys, width = machine.size(spec.v.shape[2]), machine.size(spec.v.shape[3])
    m, n = min(config["block_m"], queries), min(config["block_n"], keys)
    tiles = 4 * (m * n + m * width + m * depth)
    blocks = _cuts(queries, config["block_m"])
    needed = needed_keys(bounds, queries, keys, config)
    head = machine.rate(4 * keys * (depth + width))
    lies = m <= FEW_ROWS and all(isinstance(_without_casts(part.value), Load) for part in (spec.k, spec.v))
    step = cache(lambda rows, size: _key_step(spec, machine, scoring, (rows, size), head, lies=lies))
    unasked = UNASKED_CYCLES if _has_bias(spec) else 0.0

    def cycles(rows: int, seen: int) -> float:
        whole, rest = divmod(seen, config["block_n"])
        steps = whole * step(rows, config["block_n"]) + (step(rows, rest) if rest else 0.0)
        return HEAD_TASK_CYCLES + unasked * seen + steps

    own = batch * heads * queries * keys * (depth + width) / machine.profile.macs_per_cycle / machine.profile.cores
    rejected = ""
    if tiles > machine.profile.l2 // 2:
        rejected = f"tiles of {tiles >> 10} KiB do not leave room in an L2 of {machine.profile.l2 >> 10} KiB"
    steps = -(-keys // max(config["block_n"], 1))
    why = f"{tiles >> 10} KiB of tiles, {steps} key steps, {len(blocks) * batch * heads} tasks"
    tasks = [cycles(rows, seen) for rows, seen in zip(blocks, needed, strict=True)]
    total = machine.spread(Tasks(tasks, batch * heads, len(blocks)), machine.size(work_of(spec)))
    return Candidate(config, total / max(own, 1.0), why, rejected, total)


def _has_bias(spec: AttentionSpec) -> bool:
    """Whether scores read a matrix of their own, along the queries and the keys."""
    *_, query, key = spec.score_axes
    return any({query, key} <= variables(load) for load in loads(spec.score))


def _key_step(
    spec: AttentionSpec, machine: Machine, scoring: int, block: tuple[int, int], head: float, *, lies: bool
) -> float:
    """Cycles of one step of a block of queries and keys, `scoring` operations per score.

    Every step fetches its keys and values, at `head` bytes a cycle, from where all those of a head stay; products read
    them there, once, where it `lies`, else in panels.
    """
    m, n = block
    depth, width, lanes = machine.size(spec.q.shape[3]), machine.size(spec.v.shape[3]), machine.target.lanes
    engine = _engine(spec.q.value, machine)
    sizes = Sizes(engine.bytes, engine.bytes, engine)
    if lies:  # as float32, whatever they are rounded to
        products = max(m, LEAST_ROWS) * n * (depth + width) / machine.profile.macs_per_cycle
    else:
        products = machine.product(m, n, depth, sizes) + machine.product(m, width, n, sizes)
    vectors = m * n / lanes * (EXP_CYCLES + scoring / 2)
    traffic = 4 * m * n * 4 / machine.rate(4 * (m * n + m * width + m * depth))
    fetch = machine.profile.shown * 4 * n * (depth + width) / head
    return products + vectors + traffic + fetch + m * (ROW_CYCLES + 2 * width / lanes)


def key_bounds(spec: AttentionSpec, machine: Machine) -> KeyBounds:
    """What a score's index predicates say of the keys that a query sees, with their offsets as numbers."""
    return [(bound, machine.size(bound.offset)) for bound in score_of(spec).bounds]


def needed_keys(bounds: KeyBounds, queries: int, keys: int, config: Mapping[str, int]) -> list[int]:
    """How many keys each block of queries computes scores of: they begin with a whole tile, and end where they may."""
    seen: list[int] = []
    for first in range(0, queries, config["block_m"]):
        last = min(first + config["block_m"], queries) - 1
        start, stop = 0, keys
        for bound, offset in bounds:
            query = last if bound.upper == (bound.query_factor > 0) else first
            limit = query * bound.query_factor + offset
            start, stop = (start, min(stop, limit + 1)) if bound.upper else (max(start, limit), stop)
        seen.append(max(0, stop - start // config["block_n"] * config["block_n"]) if stop > start else 0)
    return seen


def _row(spec: RowSpec, machine: Machine, config: Mapping[str, int]) -> Candidate:
    """Passes over blocks of rows, which find them in a cache, while other rows come from where all of them lie.

    Rows in flight (`rows_in_flight.py`) wait for nothing and stay in the first cache, whatever the block; others wait
    for a reduction at the end of a pass, once for all rows of a block. Tables of positions stay where a block fits.
    """
    rows, columns = machine.size(extent_of(spec.row)), machine.size(extent_of(spec.column))
    tiles = 1 + sum(step.kind == "tile" for step in spec.steps)
    block, streams = config["block_m"], tiles + len(spec.inputs) + len(spec.outputs)
    footprint = 4 * columns * streams * min(block, rows)  # what passes a cache between two uses of a tile's row
    passes, waits = 2 + len(spec.steps) + len(spec.outputs), sum(step.kind != "tile" for step in spec.steps)
    flies = 4 * columns * streams <= FIRST_CACHE if spec.steps else not _reads_again(spec, rows, columns, machine)
    work = 4 * columns * block * passes / machine.rate(0 if flies else footprint)
    moved = sum(_bytes(t, machine) for t in (*spec.inputs, *(result.place.tensor for result in spec.outputs)))
    fetch = moved * block / max(rows, 1) / machine.rate(moved)
    per_task = TASK_CYCLES + _overlap(work, fetch) + (0.0 if flies else waits * REDUCTION_CYCLES)
    tasks = -(-rows // block)
    own = 4 * columns * rows * passes / machine.profile.l1_bytes / machine.profile.cores
    why = f"{footprint >> 10} KiB of rows, {tasks} tasks"
    cycles = machine.spread(Tasks([per_task], tasks), machine.size(work_of(spec)))
    return Candidate(config, cycles / max(own, 1.0), why, "", cycles)


def _reads_again(spec: RowSpec, rows: int, columns: int, machine: Machine) -> bool:
    """Whether some input has several rows, each for several of the program's."""
    return any(columns < math.prod(map(machine.size, tensor.shape)) < rows * columns for tensor in spec.inputs)


def _bytes(tensor: Tensor, machine: Machine) -> int:
    return tensor.dtype.row.bytes * math.prod(machine.size(dim) for dim in tensor.shape)


def _scan(spec: ScanSpec, machine: Machine, config: Mapping[str, int]) -> Candidate:
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
    per_task = (
        machine.size(extent_of(spec.time)) * step + machine.size(extent_of(spec.query)) * query + HEAD_TASK_CYCLES
    )
    tasks = machine.size(extent_of(spec.group)) * -(-columns // max(block, 1))
    own = tasks * per_task / machine.profile.cores
    kept = sum(
        4 * math.prod(block if axis == spec.column else machine.size(extent_of(axis)) for axis in state.axes)
        for state in spec.states
    )
    share = columns / max(block, 1)  # of the whole: what one block does again for every other block is a loss
    why = f"{kept >> 10} KiB of state, {tasks} tasks"
    total = machine.spread(Tasks([per_task], tasks))
    return Candidate(config, total / max(own, 1.0) * per_task * share, why, "", total)
