"""The role-structured program between tiles and text: barrier rings, shared memory, tensor maps, parameters, threads.

Comes in: roles of buffers and a number of stages. Goes out: a `KernelPlan`, checked against the card: everything that
does not fit is refused here, with what was found, and never by the compiler.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Op, Sym, Var, const, loads, symbols, variables
from tilecore.contract.spec import Place, Tensor, View
from tilecore.cuda.beside import elements_beside
from tilecore.cuda.errors import CudaError
from tilecore.cuda.joins import Split, plan_split
from tilecore.cuda.overlap import Overlap, overlap_of
from tilecore.cuda.profile import GpuProfile
from tilecore.cuda.reference import Reference, reference_of
from tilecore.cuda.roles import (
    CHUNK,
    DECODED,
    GROUP_ROWS,
    MAX_BOX,
    MAX_RANK,
    Roles,
    Staged,
    extents,
    number,
    read_beside,
    stored_rectangle,
)
from tilecore.cuda.values import STORAGE
from tilecore.graph import buffers_of
from tilecore.ir import Copy, For, Gemm, Parallel, Program, Stmt, Store, statements

STAGING_CHUNKS = 2  # 64-column chunks that a warpgroup stages for one store
ALIGNMENT = 1024  # of swizzled tiles
ROW_SLOTS = 2  # exchanges of row values that may be under way at the same time
WARPGROUP = 128
LINE_BYTES_OF_WARPS = 4 * CHUNK * 4  # of a line that each warp of a warpgroup computes
# (consumers, blocks of a processor): registers of a consumer and a producer thread
ROLE_REGISTERS = {
    (1, 1): (0, 0), (2, 1): (240, 24), (3, 1): (160, 32),
    (2, 2): (104, 24), (1, 2): (208, 40), (1, 3): (136, 24),
}  # fmt: skip
RESERVED_BYTES = 1024  # of shared memory, per block
ONCE, OFTEN = 128, 256  # bytes that the L2 cache fetches at a time of what one block reads, and of what several do
PLAIN_REGISTERS = 140  # tile registers that fit beside a producer of one warp


@dataclass(frozen=True, slots=True)
class Ring:
    """Tiles that arrive together: a barrier pair per slot. Inside the loop there are `stages` slots, before it one or,
    where there is room for the next tile's, two. What element programs alone read in the loop may have one.
    """

    name: str
    tiles: tuple[Staged, ...]
    slots: int
    copies: tuple[Copy, ...]

    @property
    def decoded(self) -> bool:
        """Whether warps themselves read what is there, and free it one by one."""
        return any(tile.decoding is not None for tile in self.tiles)

    @property
    def bytes(self) -> int:
        """Bytes of one slot."""
        return sum(tile.bytes for tile in self.tiles)


@dataclass(frozen=True, slots=True)
class MapPlan:
    """A tensor map: of which tensor, the box in elements per dim, and how many bytes the L2 cache fetches at a time.
    `shape` is the dense tensor's, told as rows of bytes, where that is how it is copied.
    """

    name: str
    tensor: Tensor
    box: tuple[int, ...]
    fetched: int
    swizzled: bool = True
    shape: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """All that the printer needs."""

    roles: Roles
    profile: GpuProfile
    rings: tuple[Ring, ...]
    maps: tuple[MapPlan, ...]
    staged_stores: tuple[Parallel, ...]  # stores that go through shared memory by tensor copies
    pointers: tuple[Tensor, ...]
    symbols: tuple[Sym, ...]
    loop: For
    producer_threads: int
    role_registers: tuple[int, int]  # 0: as the compiler gives them
    balanced: bool  # tiles take different times: each block gets long and short ones
    grouped: bool
    turns: bool  # warpgroups take turns at issuing products
    split: Split
    overlap: Overlap | None
    blocks: int = 1  # that share a processor
    reference: Reference | None = None  # whose rise is left out where it can be

    @property
    def program(self) -> Program:
        """The tile program."""
        return self.roles.program

    @property
    def aligned(self) -> tuple[Tensor, ...]:
        """Tensors whose address must be a multiple of 16 bytes beside those of tensor copies."""
        return self.in_units

    @property
    def in_units(self) -> tuple[Tensor, ...]:
        """Tensors that threads copy or store 16 bytes at a time, where there are no tensor copies."""
        if self.profile.warpgroups:
            return ()
        found = [tile.tensor for ring in self.rings for tile in ring.tiles]
        found += [store.target.tensor for stmt in self.staged_stores for store in stmt.body
                  if isinstance(store.target, Place)]  # fmt: skip
        return tuple(dict.fromkeys(found))

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.roles.consumers * WARPGROUP + self.producer_threads

    @property
    def staging_bytes(self) -> int:
        """Shared memory of one warpgroup's staged stores. Without tensor copies they use the rings', free by then."""
        if not self.profile.warpgroups:
            return 0
        return max((staged_bytes(stmt) for stmt in self.staged_stores), default=0)

    @property
    def exchanged(self) -> tuple[tuple[str, int], ...]:
        """Operands in shared memory that are computed here, with their bytes, and what joins row values."""
        roles = self.roles
        tiles = {buffer.name: math.prod(extents(buffer)) * 2 for buffer in self.program.buffers}
        found = [(f"tile_{name}", tiles[name] * self.exchange_slots) for name in roles.exchanged]
        found += [(f"line_{name}", roles.consumers * LINE_BYTES_OF_WARPS) for name in roles.lines]
        return (*found, ("row_parts", ROW_SLOTS * roles.parts * GROUP_ROWS * 4)) if roles.parts > 1 else tuple(found)

    @property
    def exchange_slots(self) -> int:
        """Of an operand computed here. With two, who writes one has met the others since they read it."""
        return 1 if self.roles.parts > 1 else 2

    @property
    def ahead(self) -> int:
        """Tiles whose operands before the loop are there at the same time."""
        return max((ring.slots for ring in self.rings if ring.copies[0] in self.program.body), default=1)

    @property
    def barriers(self) -> int:
        """Barriers of all rings and exchanges."""
        if not self.profile.warpgroups:
            return 0
        meetings = 0 if self.split.apart else 2 * len(self.split.groups)
        judged = 2 if self.reference is not None else 0  # and a word of tiles to be computed again
        return sum(2 * ring.slots for ring in self.rings) + meetings + judged

    @property
    def cluster(self) -> int:
        """Blocks that share a tile."""
        return self.split.cluster

    @property
    def tile_axes(self) -> tuple[Var, ...]:
        """Axes of the grid that tell tiles apart."""
        return tuple(axis for axis in self.program.grid if axis != self.split.axis)

    @property
    def task_axes(self) -> tuple[Var, ...]:
        """Axes of the grid that tell apart what blocks take one after the other."""
        return self.program.grid if self.split.apart else self.tile_axes

    @property
    def task_words(self) -> int:
        """Words of a task in the workspace: counters, which are 0 before and after every launch, then its state."""
        return self.split.task_words(self.roles.consumers) if self.split.apart else 0

    @property
    def workspace(self) -> Tensor | None:
        """What tasks that run apart leave to whoever comes last."""
        if not self.split.apart:
            return None
        words: Expr = const(self.task_words)
        for axis in self.task_axes:
            assert axis.extent is not None
            words = words * axis.extent
        return Tensor("workspace", DType.F32, (words,))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        tiles = sum(ring.bytes * ring.slots for ring in self.rings)
        exchanges = sum(group.bytes for group in self.split.groups)
        own = sum(size for _, size in self.exchanged)
        return ALIGNMENT + tiles + own + self.roles.consumers * (self.staging_bytes + exchanges) + 8 * self.barriers


def plan_kernel(
    roles: Roles,
    profile: GpuProfile,
    *,
    stages: int,
    overlap: bool = False,
    reference: bool = False,
    blocks: int = 1,
    apart: bool = False,
) -> KernelPlan:
    """The plan for `stages` slots per ring and `blocks` that share a processor; tasks of a split run `apart` or as a
    cluster. CudaError where the card has no room or the program another structure.
    """
    program, loop = roles.program, loop_of(roles.program)
    rings = rings_of(roles, loop, stages)
    stores = tuple(stmt for stmt in statements(program.body) if isinstance(stmt, Parallel) and stageable(stmt, roles))
    consumers = roles.consumers
    products = [stmt for stmt in loop.body if isinstance(stmt, Gemm)]
    in_loop = [stmt for stmt in loop.body if not isinstance(stmt, Gemm | Copy)]
    busy = 32 if _computes(program) else 48 if roles.decoded is not None else PLAIN_REGISTERS
    wide = roles.registers > busy or bool(in_loop)
    if (consumers, blocks) not in ROLE_REGISTERS:
        raise CudaError(f"{blocks} blocks of {consumers} consumer warpgroups on one processor")
    own = ROLE_REGISTERS[consumers, blocks] if wide else (0, 0)
    split = plan_split(roles, apart=apart)
    plan = KernelPlan(
        roles,
        profile,
        rings,
        _maps(rings, stores, [axis for axis in program.grid if axis != split.axis]),
        stores,
        pointers_of(program, stores, () if roles.decoded is None else read_beside(roles.decoded)),
        symbols_of(program),
        loop,
        WARPGROUP if wide else 32,
        own,
        balanced=not split.apart and bound_by_grid(loop, program, split),
        grouped=grouped(rings, program),
        turns=_takes_turns(roles, products, in_loop),
        split=split,
        overlap=overlap_of(loop) if overlap and roles.parts == 1 and not _operands_read(program, rings) else None,
        blocks=blocks,
    )
    if reference and plan.overlap is not None and not split.groups:
        plan = replace(plan, reference=reference_of(program, loop))
    room = room_of(profile, blocks)
    if plan.shared_bytes > room and stages == 2:
        plan = replace(plan, rings=rings_of(roles, loop, stages, beside=1))
    ahead = replace(plan, rings=rings_of(roles, loop, stages, 2))
    if ahead.shared_bytes <= room:
        plan = ahead
    _check(plan, products)
    return plan


def loop_of(program: Program) -> For:
    """The one loop over tiles. CudaError for a program that has another structure."""
    loops = [stmt for stmt in program.body if isinstance(stmt, For)]
    if len(loops) != 1 or any(isinstance(stmt, For) for stmt in statements(loops[0].body)):
        raise CudaError(f"{program.name} has {len(loops)} loops over tiles; CUDA kernels have one, not nested")
    return loops[0]


def _takes_turns(roles: Roles, products: Sequence[Gemm], between: Sequence[Stmt]) -> bool:
    """Whether a warpgroup computes on scores, of which each iteration has its own, while another one multiplies."""
    several = roles.consumers > 1 and roles.parts == 1 and not roles.shared
    return several and len(products) > 1 and products[0].clear and bool(between)


def room_of(profile: GpuProfile, blocks: int) -> int:
    """Shared memory that each of several blocks on a processor may have."""
    return (profile.shared_bytes + RESERVED_BYTES) // blocks - RESERVED_BYTES


def rings_of(roles: Roles, loop: For, stages: int, ahead: int = 1, *, beside: int = 0) -> tuple[Ring, ...]:
    """Runs of tensor copies with nothing between them; `beside`, if not 0, are slots of what is read in the loop by
    element.
    """
    rings: list[Ring] = []
    elements = set(elements_beside(loop))
    for body, slots in ((roles.program.body, ahead), (loop.body, stages)):
        run: list[Copy] = []
        for stmt in (*body, None):
            if isinstance(stmt, Copy) and isinstance(stmt.src.source, View):
                if stmt.dst.source.name not in roles.held:
                    run.append(stmt)
            elif run:
                tiles = tuple(roles.staged[copy.dst.source.name] for copy in run)
                own = beside if beside and elements.issuperset(run) else slots
                rings.append(Ring("_".join(tile.buffer.name for tile in tiles), tiles, own, tuple(run)))
                run = []
    return tuple(rings)


def read_by_element(program: Program, rings: tuple[Ring, ...]) -> set[str]:
    """Names of rings with a tile that element programs read."""
    read = {buffer for stmt in statements(program.body) if isinstance(stmt, Parallel) for buffer in buffers_of(stmt)[0]}
    return {ring.name for ring in rings if any(tile.buffer in read for tile in ring.tiles)}


def _operands_read(program: Program, rings: tuple[Ring, ...]) -> set[str]:
    """Those of them whose tiles products read as well, or that come before the loop."""
    elements = set(elements_beside(loop_of(program)))
    return read_by_element(program, tuple(ring for ring in rings if not elements.issuperset(ring.copies)))


def stageable(stmt: Parallel, roles: Roles) -> bool:
    """Whether tensor copies can store it: a rectangle of 16-bit elements that they clip exactly.

    Tiles that two warpgroups share leave no room for it.
    """
    found = stored_rectangle(stmt)
    if found is None or roles.parts > 1 or roles.graph.classes[stmt.axes[0]] != roles.rows_class:
        return False
    place, (row_dim, column_dim), _ = found
    tensor = place.tensor
    shape = tensor.shape
    if not 2 <= len(shape) <= MAX_RANK or tensor.dtype.row.bytes != 2 or (shape[-1] % 8) != const(0):
        return False
    columns = number(extent_of_axis(stmt, 1), "a width")
    if turned_store(stmt):
        if columns % 16 or columns > MAX_BOX:
            return False
    elif column_dim != len(shape) - 1 or columns % CHUNK:
        return False
    blocks = (roles.block_rows, columns)
    for axis, dim in enumerate((row_dim, column_dim)):
        whole = any(place.index[dim] == var and shape[dim] == var.extent for var in place.axes)
        limit = _logical_extent(stmt, place, axis)
        if not whole and (limit is None or (limit % blocks[axis]) != const(0)):
            return False
    return True


def turned_store(stmt: Parallel) -> bool:
    """Whether a rectangle's tensor is contiguous along the rows of what is stored."""
    found = stored_rectangle(stmt)
    return found is not None and found[1][0] == len(found[0].tensor.shape) - 1


def staged_bytes(stmt: Parallel) -> int:
    """What a warpgroup stages of a store at a time."""
    columns = number(extent_of_axis(stmt, 1), "a width")
    if turned_store(stmt):
        return columns * 128
    return (STAGING_CHUNKS if columns // CHUNK % STAGING_CHUNKS == 0 else 1) * GROUP_ROWS * 128


def extent_of_axis(stmt: Parallel, axis: int) -> Expr:
    """The extent of a parallel axis."""
    extent = stmt.axes[axis].extent
    assert extent is not None
    return extent


def _logical_extent(stmt: Parallel, place: Place, axis: int) -> Expr | None:
    for var, position in zip(place.axes, stmt.body[0].index, strict=True):
        if stmt.axes[axis] in variables(position):
            return var.extent
    return None


def _maps(rings: tuple[Ring, ...], stores: tuple[Parallel, ...], axes: Iterable[Var]) -> tuple[MapPlan, ...]:
    """Of tiles that are copied and of staged stores; `axes` tell tiles of the result apart."""
    maps = [
        MapPlan(f"map_{tile.buffer.name}", tile.tensor, tile.box, _fetched(tile, axes), not tile.line, tile.shape)
        for ring in rings for tile in ring.tiles
    ]  # fmt: skip
    for position, stmt in enumerate(stores):
        found = stored_rectangle(stmt)
        assert found is not None
        place, (row_dim, column_dim), _ = found
        turned = turned_store(stmt)
        other = column_dim if turned else row_dim
        rows = number(extent_of_axis(stmt, 1), "a width") if turned else GROUP_ROWS
        maps.append(MapPlan(f"map_out{position}", place.tensor, _box(len(place.tensor.shape), other, rows), OFTEN))
    return tuple(maps)


def _fetched(tile: Staged, axes: Iterable[Var]) -> int:
    """What is read once streams best as it is asked for; what others read again is near by the next step."""
    walked = {axis for start in tile.origin for axis in variables(start)}
    return ONCE if all(axis in walked or axis.extent == const(1) for axis in axes) else OFTEN


def _box(rank: int, other: int, rows: int) -> tuple[int, ...]:
    return tuple(CHUNK if dim == rank - 1 else rows if dim == other else 1 for dim in range(rank))


def _expressions(stmt: Stmt) -> tuple[Expr, ...]:
    match stmt:
        case Parallel():
            return tuple(expr for store in stmt.body for expr in _stored_expressions(store))
        case Store():
            return _stored_expressions(stmt)
        case For():
            assert stmt.var.extent is not None
            return stmt.start, stmt.var.extent
        case Copy():
            return (*stmt.src.origin, *stmt.dst.origin)
        case _:
            return ()


def _stored_expressions(store: Store) -> tuple[Expr, ...]:
    own = store.target.index if isinstance(store.target, Place) else ()
    return (store.value, *store.index, *own)


def _computes(program: Program) -> bool:
    """Whether values are computed from products, beyond rounding them."""
    values = [store.value for stmt in statements(program.body) if isinstance(stmt, Parallel) for store in stmt.body]
    return any(_beyond_cast(value) for value in values)


def _beyond_cast(value: Expr) -> bool:
    while isinstance(value, Op) and value.name == "cast":
        value = value.args[0]
    return not isinstance(value, Load)


def pointers_of(program: Program, stores: tuple[Parallel, ...], more: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
    """Tensors that are read or written element by element; `more` are read beside levels."""
    found: dict[Tensor, None] = dict.fromkeys(more)
    for stmt in statements(program.body):
        for expr in _expressions(stmt):
            for load in loads(expr):
                if isinstance(load.source, Tensor):
                    found.setdefault(load.source)
        if isinstance(stmt, Parallel) and stmt not in stores:
            for store in stmt.body:
                if isinstance(store.target, Place):
                    found.setdefault(store.target.tensor)
    for tensor in found:
        if tensor.dtype not in STORAGE:
            raise CudaError(f"{tensor.name} is {tensor.dtype}; CUDA kernels read {', '.join(map(str, STORAGE))}")
    return tuple(found)


def symbols_of(program: Program) -> tuple[Sym, ...]:
    """Every extent that is known at run time only, by name."""
    dims = {symbol for tensor in (*program.inputs, *program.outputs) for dim in tensor.shape for symbol in symbols(dim)}
    return tuple(sorted(dims, key=lambda symbol: symbol.name))


def bound_by_grid(loop: For, program: Program, split: Split) -> bool:
    """Whether some tiles take longer than others."""
    assert loop.var.extent is not None
    return bool((set(program.grid) - {split.axis}) & {*variables(loop.start), *variables(loop.var.extent)})


def grouped(rings: tuple[Ring, ...], program: Program) -> bool:
    """Whether tiles of the first two grid axes share operands in both directions, as those of a matrix product do."""
    if len(program.grid) < 2:
        return False
    elements = set(elements_beside(loop_of(program)))
    used = [
        {axis for axis in program.grid[:2] for start in tile.origin if axis in variables(start)}
        for ring in rings if not elements.issuperset(ring.copies) for tile in ring.tiles
    ]  # fmt: skip
    return {program.grid[0]} in used and {program.grid[1]} in used


def _check(plan: KernelPlan, products: list[Gemm]) -> None:
    everywhere = [stmt for stmt in statements(plan.program.body) if isinstance(stmt, Gemm)]
    before = [stmt for stmt in plan.program.body[: plan.program.body.index(plan.loop)] if isinstance(stmt, Gemm)]
    if len(everywhere) != len(products) + len(before):
        raise CudaError(f"{plan.program.name} has products after its loop; CUDA kernels have them in it and before it")
    if not products:
        raise CudaError(f"the loop of {plan.program.name} has no product")
    _check_special(plan, products)
    check_room(plan)
    consumer, producer = plan.role_registers
    pool = plan.profile.registers // plan.threads // plan.blocks // 8 * 8 * plan.threads
    asked = (consumer * plan.roles.consumers + producer) * WARPGROUP
    if asked > pool:
        raise CudaError(f"{asked} registers for the roles of {plan.threads} threads, which start with {pool}")
    limit = consumer or (168 if plan.roles.consumers == 2 else 232)
    if plan.roles.registers + 26 > limit:
        names = ", ".join(f"{name}: {words}" for name, words in {**plan.roles.fragments, **plan.roles.packed}.items())
        raise CudaError(f"{plan.roles.registers} registers of tiles ({names}) in threads that have {limit}")


def check_room(plan: KernelPlan) -> None:
    """CudaError where a block's tiles do not fit its shared memory."""
    room = room_of(plan.profile, plan.blocks)
    if plan.shared_bytes <= room:
        return
    parts = [f"{tile.buffer.name}: {tile.bytes} bytes x {ring.slots}" for ring in plan.rings for tile in ring.tiles]
    parts += [f"staged stores: {plan.staging_bytes} bytes x {plan.roles.consumers}"] if plan.staging_bytes else []
    parts += [f"{name}: {size} bytes" for name, size in plan.exchanged]
    raise CudaError(
        f"{plan.shared_bytes} bytes of shared memory, where {plan.profile.name} has {room}: "
        f"{'; '.join(parts)}; take fewer stages or smaller tiles"
    )


def _check_special(plan: KernelPlan, products: list[Gemm]) -> None:
    """Refuse what operands of 8 bits or packed levels have no form for."""
    tile = plan.roles.decoded
    special = "decoded" if tile is not None else products[0].a.dtype if plan.roles.short_sums else None
    if special and any(not isinstance(stmt, Copy | Gemm) or getattr(stmt, "clear", False) for stmt in plan.loop.body):
        raise CudaError(f"products of {special} operands in a loop that does more than add them up: no CUDA form yet")
    if tile is None:
        return
    if products != [plan.loop.body[-1]] or len(plan.rings) != 1:
        raise CudaError(f"{tile.buffer.name} is decoded for one product, at the end of the loop")
    depth = extents(tile.buffer)[1]
    if not plan.roles.by_warps and depth not in (DECODED, 2 * DECODED):
        raise CudaError(
            f"tile {tile.buffer.name} is {depth} deep: warpgroups decode {DECODED} or {2 * DECODED} at a time"
        )
