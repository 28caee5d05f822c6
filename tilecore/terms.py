"""What a call costs, term by term: nominal seconds of one core that fitted coefficients turn into predictions.

Comes in: a spec with its tile extents, or an operator's counts; a machine. Goes out: `Terms`, nominal seconds by name.
Vector work is in vectors at one per cycle, products at the machine's peak, traffic at the rate of the cache that holds
it, fixed costs in units of a microsecond; so a coefficient says how far from the nominal rate a machine is, and means
the same on another machine. Terms of kernels begin with the spec's kind, those of operators with "op".
"""

import math
from collections.abc import Mapping
from typing import Protocol

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Op, Var, const, loads, substitute, variables, walk
from tilecore.contract.few_rows import FEW_ROWS
from tilecore.contract.panel import PANEL, rows_of
from tilecore.contract.spec import (
    AttentionSpec,
    ContractionSpec,
    RowSpec,
    ScanSpec,
    Spec,
    Tensor,
    View,
    extent_of,
)
from tilecore.emit_expr import instructions_of, operation_count
from tilecore.emit_stream import ROWS
from tilecore.engine import engine_for
from tilecore.infer import choose_register_tile
from tilecore.recommend import Machine, key_bounds, needed_keys

Terms = Mapping[str, float]


class Operator(Protocol):
    """The counts of one operator: see `fuser.unfused.Work`."""

    @property
    def kind(self) -> str:
        """What sort of work it is, such as "pointwise"."""
        ...

    @property
    def elements(self) -> int:
        """Elements that it makes or reads, whichever are more."""
        ...

    @property
    def rows(self) -> int:
        """Rows of them."""
        ...

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        ...

    @property
    def weights(self) -> int:
        """Bytes of constants that a product reads."""
        ...

    @property
    def multiply_adds(self) -> int:
        """Of a product, else 0."""
        ...

    @property
    def packed(self) -> int:
        """Elements of right operands that are packed in every call."""
        ...

    @property
    def groups(self) -> int:
        """Products of matrices."""
        ...


MICROSECOND = 1e-6
NEAR_SHARE, SHARED_SHARE = 0.8, 0.2  # of a cache, that data may fill to count as lying there: others use it too


def kernel_terms(spec: Spec, config: Mapping[str, int], machine: Machine) -> Terms:
    """The terms of one call of a kernel with these tile extents."""
    match spec:
        case RowSpec():
            return _row(spec, machine)
        case ContractionSpec():
            return _contraction(spec, config, machine)
        case AttentionSpec():
            return _attention(spec, config, machine)
        case ScanSpec():
            return _scan(spec, machine)


def operator_terms(work: Operator, weights: int, machine: Machine) -> Terms:
    """The terms of one operator that a runtime without fusion runs; `weights` are the bytes of all of a region's."""
    lanes, clock = machine.target.lanes, machine.profile.clock
    terms = {
        "op call": MICROSECOND,
        **_traffic("op", work.moved, machine),
        **_traffic("op weights", weights, machine, share=work.weights / max(weights, 1)),
    }
    if not work.multiply_adds:
        terms[f"op {work.kind}"] = work.elements / lanes / clock
        terms[f"op {work.kind} rows"] = work.rows / clock
        return terms
    columns = max(1, work.elements // max(work.rows, 1))
    wide = work.multiply_adds * (-(-columns // PANEL) * PANEL / columns if columns > 1 else 1)
    return terms | {
        f"op {work.kind}": wide / _operator_rate(work.kind, machine) / clock,
        f"op {work.kind} copies": work.packed / lanes / clock,
        f"op {work.kind} groups": work.groups / clock,
    }


def _row(spec: RowSpec, machine: Machine) -> Terms:
    rows, columns = machine.size(extent_of(spec.row)), machine.size(extent_of(spec.column))
    moving = {spec.column, *(step.var for step in spec.steps if step.kind == "tile")}
    programs = [step.value for step in spec.steps] + [result.value for result in spec.outputs]
    parts = {part for program in programs for part in walk(program)}
    own = [part for part in parts if isinstance(part, Op) and moving & variables(part)]  # others: once per row
    vectors = -(-columns // machine.target.lanes)
    reductions = sum(step.kind != "tile" for step in spec.steps)
    scattered = sum(isinstance(part, Load) and not _contiguous(part, spec.column) for part in parts)
    scattered += sum(
        not _follows(result.place.index, spec.column) for result in spec.outputs if spec.column in result.place.axes
    )
    clock = machine.profile.clock
    return {
        "row call": MICROSECOND,
        "row vectors": rows * vectors * sum(instructions_of(part) for part in own) / clock,
        "row loads": rows * vectors * len(programs) / clock,
        "row loops": rows * len(programs) / clock,
        "row tails": rows * (columns % machine.target.lanes > 0) * len(programs) / clock,
        "row reductions": rows * reductions / clock,
        "row reduced": rows * vectors * reductions / clock,
        "row scattered": rows * columns * scattered / clock,
        **_traffic("row", _moved(spec, machine), machine),
    }


def _contiguous(load: Load, column: Var) -> bool:
    """Whether neighbouring columns are neighbours in memory, or one element serves them all."""
    return _follows(load.index, column) or not any(column in variables(index) for index in load.index)


def _follows(index: tuple[Expr, ...], column: Var) -> bool:
    """Whether an index moves along its last axis as `column` does."""
    if not index or any(column in variables(part) for part in index[:-1] if not _is_quotient(part)):
        return False
    return column in variables(index[-1])


def _is_quotient(part: Expr) -> bool:
    return isinstance(part, Op) and part.name == "floordiv"


def _contraction(spec: ContractionSpec, config: Mapping[str, int], machine: Machine) -> Terms:
    batch, rows, depth = (machine.size(extent) for extent in spec.a.shape)
    columns, lanes = machine.size(spec.b.shape[2]), machine.target.lanes
    clock, count = machine.profile.clock, len(spec.products)
    tiles = -(-rows // config["block_m"])
    tile = choose_register_tile(machine.target)
    width = -(-columns // PANEL) * PANEL
    integer = any(product.acc.dtype is DType.I32 for product in spec.products)
    stored = [product.b for product in spec.products if _stored(product.b)]
    weights = sum(_bytes(source, machine) for view in stored for source in _sources(view))
    copied = depth * columns * (count - len(stored)) if rows > FEW_ROWS else 0  # few rows read it where it lies
    unpacked = 0 if integer or spec.byte_block else depth * columns * sum(_computed(view) for view in stored)
    streamed = batch * unpacked * -(-rows // max(ROWS)) if rows <= FEW_ROWS else 0
    left = 0 if isinstance(spec.a.value, Load) and _follows(spec.a.value.index, spec.a.axes[2]) else rows * depth
    gathered = rows * depth if _is_gathered(spec.a) else 0  # once: a left operand that is computed is kept
    epilogue = sum(operation_count(result.value) + 1 for result in spec.outputs)
    scattered = sum(not _follows(result.place.index, result.place.axes[2]) for result in spec.outputs)
    products = batch * rows * width * depth * count / _rate(DType.I16 if integer else spec.a.dtype, machine) / clock
    calls = batch * -(-rows // tile.rows) * -(-width // tile.columns(lanes)) * count
    kind = "levels" if integer else "bytes" if spec.byte_block else "products"
    return {
        "contraction call": MICROSECOND,
        f"contraction {kind}": products,
        "contraction tiles": calls * -(-depth // config["block_k"]) / clock,
        "contraction rows": batch * rows * -(-columns // config["block_n"]) / clock,
        "contraction tasks": batch * tiles * -(-columns // config["block_n"]) / clock,
        "contraction copies": batch * copied / lanes / clock,
        "contraction streaming": streamed / lanes / clock,
        "contraction unpacking": 0.0 if streamed else batch * tiles * unpacked / lanes / clock,
        "contraction left": batch * left * -(-columns // config["block_n"]) / lanes / clock,
        "contraction epilogue": batch * rows * width * epilogue / lanes / clock,
        "contraction scattered": batch * (rows * columns * scattered + gathered) / clock,
        **_traffic("contraction", _moved(spec, machine), machine),
        **_traffic("contraction weights", weights, machine, share=batch),
    }  # fmt: skip


def _is_gathered(view: View) -> bool:
    """Whether a computed left operand is made of elements that do not lie side by side along the depth."""
    depth = view.axes[2]

    def step(index: Expr) -> Expr:
        return substitute(index, {depth: const(1)}) - substitute(index, {depth: const(0)})

    def in_runs(load: Load) -> bool:
        *outer, last = (step(index) for index in load.index)
        return all(moved == const(0) for moved in outer) and last in (const(0), const(1))

    return not isinstance(view.value, Load) and not all(in_runs(load) for load in loads(view.value) if load.index)


def _attention(spec: AttentionSpec, config: Mapping[str, int], machine: Machine) -> Terms:
    batch, heads, queries, depth = (machine.size(extent) for extent in spec.q.shape)
    keys, width = machine.size(spec.v.shape[2]), machine.size(spec.v.shape[3])
    clock, lanes = machine.profile.clock, machine.target.lanes
    blocks = -(-queries // config["block_m"])
    share = _needed_share(spec, config, machine)
    pairs = batch * heads * queries * keys * share
    own = {part for part in walk(spec.score) if isinstance(part, Op)}
    packed = scattered = 0
    for view, size in ((spec.k, depth), (spec.v, width)):  # heads that share a key are packed once
        there = sum(math.prod(map(machine.size, source.shape)) for source in _sources(view))
        elements = min(there, batch * heads * keys * size)
        packed += elements if queries > FEW_ROWS else 0  # few queries read them where they lie
        scattered += 0 if _contiguous_view(view) else elements
    return {
        "attention call": MICROSECOND,
        "attention products": pairs * (depth + width) / _rate(spec.q.dtype, machine) / clock,
        "attention scores": pairs * (1 + sum(instructions_of(part) for part in own)) / lanes / clock,
        "attention weights": pairs / lanes / clock,
        "attention rows": batch * heads * queries * max(1.0, -(-keys // config["block_n"]) * share) / clock,
        "attention tasks": batch * heads * blocks / clock,
        "attention copies": packed / lanes / clock,
        "attention scattered": scattered / clock,
        **_traffic("attention", _moved(spec, machine), machine),
    }


def _scan(spec: ScanSpec, machine: Machine) -> Terms:
    columns = 1 if spec.column is None else machine.size(extent_of(spec.column))
    lanes, clock = machine.target.lanes, machine.profile.clock
    steps = machine.size(extent_of(spec.group)) * machine.size(extent_of(spec.time))
    queries = machine.size(extent_of(spec.group)) * machine.size(extent_of(spec.query))
    programs = [(steps, state.axes, state.update) for state in spec.states]
    programs += [(steps, (total.over, *total.axes), total.value) for total in spec.totals]
    programs += [(queries, (total.over, *total.axes), total.value) for total in spec.reads]
    vectors = loops = 0.0
    for times, axes, program in programs:
        sizes = [columns if axis == spec.column else machine.size(extent_of(axis)) for axis in axes] or [1]
        rows = times * math.prod(sizes[:-1])
        own = sum(instructions_of(part) for part in walk(program) if isinstance(part, Op))
        vectors += rows * -(-sizes[-1] // lanes) * (own + 2)
        loops += rows
    return {
        "scan call": MICROSECOND,
        "scan vectors": vectors / clock,
        "scan loops": loops / clock,
        **_traffic("scan", _moved(spec, machine), machine),
    }


def _rate(dtype: DType, machine: Machine) -> float:
    """Multiply-adds per cycle of operands of that type."""
    return engine_for(dtype if dtype in (DType.BF16, DType.I16) else DType.F32, machine.profile, machine.target).rate


def _operator_rate(kind: str, machine: Machine) -> float:
    """Multiply-adds per cycle of a runtime's products: of bytes where it has levels, else of f32."""
    return machine.profile.int8_per_cycle if kind == "levels" else machine.profile.macs_per_cycle


def _traffic(what: str, moved: float, machine: Machine, *, share: float = 1) -> Terms:
    """Seconds to move a share of so many bytes, named after where all fit: a core's own cache, the shared one, none."""
    profile = machine.profile
    if moved <= NEAR_SHARE * profile.l2:
        return {f"{what} near": share * moved / profile.l2_bytes / profile.clock}
    if moved <= SHARED_SHARE * profile.l3:
        return {f"{what} shared": share * moved / profile.l3_bytes / profile.clock}
    return {f"{what} far": share * moved / profile.dram_bytes / profile.clock}


def _moved(spec: Spec, machine: Machine) -> float:
    """Bytes of every input and output once, a contraction's weights apart."""
    apart = isinstance(spec, ContractionSpec)
    moved = sum(_bytes(tensor, machine) for tensor in spec.inputs if not (apart and tensor.constant))
    return moved + sum(_bytes(result.place.tensor, machine) for result in spec.outputs)


def _bytes(tensor: Tensor, machine: Machine) -> int:
    return tensor.dtype.row.bytes * math.prod(map(machine.size, tensor.shape))


def _sources(view: View) -> list[Tensor]:
    return [source for source in dict.fromkeys(load.source for load in loads(view.value)) if isinstance(source, Tensor)]


def _stored(view: View) -> bool:
    """Whether the operand lies in memory as panels: a constant that was packed when the model was optimised."""
    return any(rows_of(load, view) is not None for load in loads(view.value))


def _computed(view: View) -> bool:
    """Whether elements are unpacked from what is stored."""
    return not isinstance(view.value, Load)


def _contiguous_view(view: View) -> bool:
    """Whether the view's last axis is the last one in memory."""
    return all(_contiguous(load, view.axes[-1]) for load in loads(view.value))


def _needed_share(spec: AttentionSpec, config: Mapping[str, int], machine: Machine) -> float:
    """The share of (query, key) tiles that the score's index predicates leave."""
    queries, keys = machine.size(spec.q.shape[2]), machine.size(spec.k.shape[2])
    seen = needed_keys(key_bounds(spec, machine), queries, keys, config)
    return sum(seen) / (keys * len(seen)) if keys and seen else 1.0
