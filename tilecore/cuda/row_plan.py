"""Row programs on a card: which threads have which columns, and what of a row is fetched at once.

Comes in: a concrete program of the row kernel and the threads of a block. Goes out: a `RowPlan`. `lanes` threads share
a row; each has chunks of `vector` neighbouring columns in registers. Whatever the row reads in such runs is fetched
before anything is computed, once, however many statements read it: loads in flight are what bandwidth is made of.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Op, Sym, Var, const, loads, substitute, variables
from tilecore.contract.spec import Place, Tensor
from tilecore.cuda.errors import CudaError
from tilecore.cuda.kernel import MapPlan, pointers_of, room_of, symbols_of
from tilecore.cuda.profile import GpuProfile
from tilecore.cuda.roles import extents, number
from tilecore.cuda.vectors import STEP, flat_offset, reads_memory, run_start, uniform
from tilecore.ir import Parallel, Program, Reduce, Store, statements

WORD, WIDEST = 4, 16  # bytes of a register and of one instruction's access
WARP, MAX_THREADS = 32, 1024
CROWD, MANY_THREADS = 1792, 256  # of a processor, and of a block of which there are several on it
STATIC_BYTES = 2048  # that a block's reductions may have
PACKED = (DType.F32, DType.F16, DType.BF16, DType.I32)  # what comes in runs
RUN = Var("run")  # which run of columns
Path = tuple[tuple[Expr, bool], ...]  # conditions under which a value is needed, and what they are then


@dataclass(frozen=True, slots=True)
class Fetch:
    """A run of elements per chunk that goes to registers before statement `at`; `paths` are the ways that need it, ()
    for always. `once`: of a row alone, and nothing else reads it.
    """

    name: str
    load: Load
    start: Expr  # of the run, in RUN
    paths: tuple[Path, ...]
    at: int
    once: bool


@dataclass(frozen=True, slots=True)
class RowPlan:
    """All that the printer needs. `row` and `column` stand for the axes of every statement."""

    program: Program
    profile: GpuProfile
    threads: int
    rows: int  # of a block
    columns: int
    vector: int
    row: Var
    column: Var
    fetches: tuple[Fetch, ...]
    pointers: tuple[Tensor, ...]
    symbols: tuple[Sym, ...]
    maps: tuple[MapPlan, ...] = ()
    cluster: int = 1
    blocks: int = 1

    @property
    def workspace(self) -> None:
        """Rows share nothing."""

    @property
    def task_axes(self) -> tuple[Var, ...]:
        """The grid."""
        return self.program.grid

    @property
    def shared_bytes(self) -> int:
        """Shared memory that nothing uses, where warps meet for their row and a processor had room for all its threads:
        with an eighth fewer of them memory is faster. What all rows read is in the cache that this memory is taken
        from, and such programs take the registers to be fewer.
        """
        meets = any(isinstance(stmt, Reduce) for stmt in self.program.body)
        shared = any(self.row not in variables(fetch.start) for fetch in self.fetches)
        if not meets or shared or not WARP < self.lanes <= MANY_THREADS or not self.once:
            return 0
        return (room_of(self.profile, CROWD // self.threads) - STATIC_BYTES) // 1024 * 1024

    @property
    def lanes(self) -> int:
        """Threads that share a row."""
        return self.threads // self.rows

    @property
    def once(self) -> bool:
        """Whether what rows read and write is used once each. Where two runs share what they read, caches matter."""
        own = [fetch.once for fetch in self.fetches if self.row in variables(fetch.start)]
        return bool(own) and all(own)

    @property
    def width(self) -> int:
        """Bytes of the widest element of a result."""
        return max(tensor.dtype.row.bytes for tensor in self.program.outputs)

    @property
    def runs(self) -> int:
        """Runs of a row."""
        return self.columns // self.vector

    @property
    def chunks(self) -> int:
        """Runs of a thread."""
        return -(-self.runs // self.lanes)

    @property
    def aligned(self) -> tuple[Tensor, ...]:
        """Tensors that are read or written in runs, whose address must be a multiple of 16 bytes."""
        stored = [store.target.tensor for store in _stores(self.program) if isinstance(store.target, Place)]
        return tuple(dict.fromkeys([*(fetch.load.source for fetch in self.fetches), *stored]))  # type: ignore[list-item]


def row_vector(tensors: tuple[Tensor, ...], columns: int) -> int:
    """Columns of a run: 16 bytes of the narrowest floats, as far as the width of a row allows."""
    narrow = min((tensor.dtype.row.bytes for tensor in tensors if tensor.dtype.is_float), default=WORD)
    return math.gcd(WIDEST // narrow, columns)


def plan_rows(program: Program, profile: GpuProfile, *, threads: int) -> RowPlan:
    """The plan for blocks of `threads`. CudaError for rows that registers cannot hold or statements without a form."""
    shapes = {extents(buffer) for buffer in program.buffers if len(buffer.shape) == 2}
    pairs = [stmt for stmt in statements(program.body) if isinstance(stmt, Parallel) and len(stmt.axes) == 2]
    if not pairs or len(program.grid) != 1:
        raise CudaError(f"{program.name} is no program over rows and columns")
    rows, columns = (number(_extent(axis), "an extent of a row tile") for axis in pairs[0].axes)
    for shape in shapes | {tuple(number(_extent(axis), "an extent") for axis in stmt.axes) for stmt in pairs}:
        if shape != (rows, columns):
            raise CudaError(
                f"tiles of {shape[0]} x {shape[1]} and {rows} x {columns} in {program.name}: rows have one width"
            )
    if threads % rows or threads > MAX_THREADS or columns == 0:
        raise CudaError(f"{threads} threads cannot share {rows} rows of {columns} columns")
    vector = row_vector((*program.inputs, *program.outputs), columns)
    (task,) = program.grid
    total = _place_rows(program, pairs)
    row, column = Var("row", extent=total), Var("column", extent=const(columns))
    plan = RowPlan(program, profile, threads, rows, columns, vector, row, column, (), pointers_of(program, ()),
                   symbols_of(program))  # fmt: skip
    fetches = tuple(_fetches(plan, task))
    return RowPlan(program, profile, threads, rows, columns, vector, row, column, fetches, plan.pointers, plan.symbols)


def _place_rows(program: Program, pairs: list[Parallel]) -> Expr:
    """How many rows there are: what the axis of rows of any output says."""
    (task,) = program.grid
    for stmt in statements(program.body):
        if isinstance(stmt, Parallel):
            for store in stmt.body:
                if isinstance(store.target, Place):
                    for axis, index in zip(store.target.axes, store.index, strict=True):
                        if stmt.axes[0] in variables(index) or task in variables(index):
                            return _extent(axis)
    raise CudaError(f"{program.name} stores no rows")


def _extent(axis: Var) -> Expr:
    assert axis.extent is not None
    return axis.extent


def canonical(plan: RowPlan, stmt: Parallel, expr: Expr) -> Expr:
    """`expr` of a statement over the plan's `row` and `column`."""
    (task,) = plan.program.grid
    moved: dict[Expr, Expr] = {stmt.axes[0]: plan.row - task * plan.rows}
    if len(stmt.axes) == 2:
        moved[stmt.axes[1]] = plan.column
    return substitute(expr, moved)


def in_runs(plan: RowPlan, expr: Expr) -> Expr:
    """`expr` with the column as a run and a step in it."""
    return substitute(expr, {plan.column: RUN * plan.vector + STEP})


def run_of(plan: RowPlan, tensor: Tensor, index: tuple[Expr, ...]) -> Expr | None:
    """Where the run of elements at `index` starts, when one instruction can move it."""
    if tensor.dtype not in PACKED or plan.vector * tensor.dtype.row.bytes % WORD:
        return None
    return run_start(in_runs(plan, flat_offset(tensor, index)), plan.vector)


def _fetches(plan: RowPlan, task: Var) -> Iterator[Fetch]:
    found: dict[Load, list[Path]] = {}
    firsts: dict[Load, int] = {}
    for position, stmt in enumerate(plan.program.body):
        if isinstance(stmt, Parallel) and len(stmt.axes) == 2:
            for store in stmt.body:
                for load, path in _needed(canonical(plan, stmt, store.value), ()):
                    found.setdefault(load, []).append(path)
                    firsts.setdefault(load, position)
    alone = Counter(load.source for load in found)
    count = 0
    for load, paths in found.items():
        assert isinstance(load.source, Tensor)
        if plan.column not in variables(load):
            continue
        start = run_of(plan, load.source, load.index)
        ways = () if () in paths else tuple(dict.fromkeys(paths))
        conditions = [condition for way in ways for condition, _ in way]
        if start is None or not all(
            uniform(in_runs(plan, condition), plan.vector) and not loads(condition) for condition in conditions
        ):
            continue
        at: dict[Expr, Expr] = {plan.column: RUN * plan.vector}
        moved = tuple(tuple((substitute(condition, at), holds) for condition, holds in way) for way in ways)
        once = plan.row in variables(start) and alone[load.source] == 1
        yield Fetch(f"{load.source.name}_run{count}", load, start, moved, _place(plan, start, firsts[load]), once)
        count += 1


def _place(plan: RowPlan, start: Expr, first: int) -> int:
    """Before which statement a run is fetched: all of a row's own before anything else, since loads in flight are what
    bandwidth is made of; what all rows read, which a cache has, when it is used, since registers are what rows in
    flight are made of. The last of several reductions is a time to wait for it.
    """
    waits = [position for position, stmt in enumerate(plan.program.body[:first]) if isinstance(stmt, Reduce)]
    if plan.row in variables(start) or not waits:
        return 0
    return waits[-1] if len(waits) > 1 else first


def _needed(expr: Expr, path: Path) -> Iterator[tuple[Load, Path]]:
    """Every load from memory, with the selects that it stands behind."""
    if isinstance(expr, Op) and expr.name == "select" and reads_memory(expr):
        condition, yes, no = expr.args
        yield from _needed(condition, path)
        yield from _needed(yes, (*path, (condition, True)))
        yield from _needed(no, (*path, (condition, False)))
        return
    if isinstance(expr, Load):
        if isinstance(expr.source, Tensor):
            yield expr, path
        for entry in expr.index:
            yield from _needed(entry, path)
    elif isinstance(expr, Op):
        for arg in expr.args:
            yield from _needed(arg, path)


def _stores(program: Program) -> Iterator[Store]:
    for stmt in statements(program.body):
        if isinstance(stmt, Parallel):
            yield from stmt.body
