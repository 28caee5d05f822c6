"""Joins of tasks that share a result. The tasks of a split are the blocks of one cluster, or they run apart.

Comes in: roles. Goes out: groups of joins that follow each other, each with one exchange. In a cluster every block
writes its part of the joined tiles to its own shared memory, all meet at a barrier, and each reads the parts in the
same order. For those that run apart see `apart.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tilecore.contract.expr import Const, Expr, Var, binary, const, substitute
from tilecore.contract.spec import Place
from tilecore.cuda.errors import CudaError
from tilecore.cuda.roles import GROUP_ROWS, Roles
from tilecore.graph import buffers_of
from tilecore.ir import Buffer, Copy, Fill, For, If, Join, Parallel, Stmt, Store, statements

WARP_ROWS, HALF_ROWS = 16, 8  # of a fragment: rows of a warp, and of each half of its elements
MAX_CLUSTER, MOST_APART = 16, 128  # tasks of a split
COUNTER_WORDS = 32  # in front of every task's state; the first task's count the others
REDUCTIONS = {"sum": "Sum", "max": "Max", "fmax": "Fmax", "min": "Min", "prod": "Prod"}


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Joins with one exchange. `first_only`: nothing but the split's first task reads what comes out."""

    joins: tuple[Join, ...]
    words: int  # of one thread
    threads: int  # of a warpgroup that have a row worth joining
    halves: int  # of a fragment's elements that have
    first_only: bool
    teams: int = 1  # of a warpgroup's warps, which take turns at parts where tasks run apart
    rooms: int = 1  # of what is exchanged

    @property
    def bytes(self) -> int:
        """Of one warpgroup's exchange."""
        return 4 * self.words * self.threads * self.rooms


@dataclass(frozen=True, slots=True)
class Split:
    """The grid's axis whose tasks share a result, and what they exchange: as one cluster, or, with `state`, apart. The
    state is what a task leaves to whoever comes last, and how many words of a thread each buffer is.
    """

    axis: Var | None = None  # None: no split
    tasks: int = 1
    groups: tuple[JoinGroup, ...] = ()
    state: tuple[tuple[Buffer, int], ...] = ()

    @property
    def apart(self) -> bool:
        """Whether tasks need not run at the same time."""
        return bool(self.state)

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return 1 if self.apart else self.tasks

    @property
    def words(self) -> int:
        """That a task's warpgroup leaves."""
        return sum(count for _, count in self.state) * self.groups[0].threads

    def task_words(self, consumers: int) -> int:
        """Words of a task in the workspace."""
        return COUNTER_WORDS + consumers * self.words


def plan_split(roles: Roles, *, apart: bool = False) -> Split:
    """The split of a program. CudaError for more tasks than a cluster has blocks, and where tasks cannot be `apart`."""
    body = roles.program.body
    joins = [stmt for stmt in body if isinstance(stmt, Join)]
    if not joins:
        return Split()
    axis, most = joins[0].axis, MOST_APART if apart else MAX_CLUSTER
    if not isinstance(axis.extent, Const) or int(axis.extent.value) > most:
        what = "those that run apart are at most" if apart else "a cluster has at most"
        raise CudaError(f"a split into {axis.extent} tasks: {what} {most}")
    rows = _live_rows(roles)
    warps = min(GROUP_ROWS // WARP_ROWS, -(-rows // WARP_ROWS))
    halves = 1 if rows <= HALF_ROWS else 2
    groups: list[JoinGroup] = []
    for run in _runs(body):
        words = sum(words_of(join.buffer, roles) * halves // 2 for join in run)
        after = body[body.index(run[-1]) + 1 :]
        teams = min(GROUP_ROWS // WARP_ROWS // warps, int(axis.extent.value)) if apart else 1
        rooms = 1 if not apart else 0 if teams == 1 else teams - (not any(isinstance(one, Join) for one in after))
        groups.append(JoinGroup(run, words, 32 * warps, halves, _first_only(after, axis, run), teams, rooms))
    state = tuple((buffer, words_of(buffer, roles) * halves // 2) for buffer in _state(body, axis)) if apart else ()
    return Split(axis, int(axis.extent.value), tuple(groups), state)


def _state(body: tuple[Stmt, ...], axis: Var) -> tuple[Buffer, ...]:
    """What joins and what comes between them read of a task. CudaError where that cannot be done for tasks that are
    gone: between joins there are values of registers, and what follows is the first task's and reads what was joined.
    """
    places = [at for at, stmt in enumerate(body) if isinstance(stmt, Join)]
    joined: set[Buffer] = set()
    made: set[Buffer] = set()
    state: dict[Buffer, None] = {}
    for stmt in body[places[0] : places[-1] + 1]:
        reads, writes = buffers_of(stmt)
        state |= dict.fromkeys(buffer for buffer in reads if buffer not in made)
        if isinstance(stmt, Join):
            joined.add(stmt.buffer)
        elif not _in_registers(stmt) or joined & set(writes):
            raise CudaError(f"{stmt} comes between joins: tasks that run apart compute values of their own there")
        made |= set(writes)
    first, made = binary("eq", axis, const(0)), set(joined)
    for stmt in body[places[-1] + 1 :]:
        alone = isinstance(stmt, If) and stmt.condition == first
        for inner in statements((stmt,)):
            reads, writes = buffers_of(inner)
            if not set(reads) <= made or not (alone or _in_registers(inner)):
                raise CudaError(f"{inner} follows joins: what tasks that run apart do there is the first one's")
            made |= set(writes)
    return tuple(state)


def _in_registers(stmt: Stmt) -> bool:
    match stmt:
        case Copy():
            return isinstance(stmt.src.source, Buffer) and isinstance(stmt.dst.source, Buffer)
        case Parallel():
            return all(isinstance(one.target, Buffer) for one in stmt.body)
        case Store():
            return isinstance(stmt.target, Buffer)
        case _:
            return isinstance(stmt, Fill)


def words_of(buffer: Buffer, roles: Roles) -> int:
    """Words of a thread that may be joined. CudaError for another buffer."""
    if buffer.name in roles.fragments:
        return roles.fragments[buffer.name]
    if buffer.name in roles.statistics:
        return 2
    raise CudaError(f"{buffer.name} is joined, which is no result of a product and no row value")


def _runs(body: tuple[Stmt, ...]) -> Iterator[tuple[Join, ...]]:
    run: list[Join] = []
    for stmt in (*body, None):
        if isinstance(stmt, Join):
            run.append(stmt)
        elif run:
            yield tuple(run)
            run = []


def _first_only(after: tuple[Stmt, ...], axis: Var, run: tuple[Join, ...]) -> bool:
    first = binary("eq", axis, const(0))
    joined = {join.buffer for join in run}
    for stmt in after:
        if isinstance(stmt, If) and stmt.condition == first:
            continue
        inner = [one for one in statements((stmt,)) if not isinstance(one, For | If)]
        if any(joined & set(buffers_of(one)[0]) for one in inner):
            return False
    return True


def _live_rows(roles: Roles) -> int:
    """Rows of a tile that any output has, when that is known."""
    program, graph = roles.program, roles.graph
    alone: Mapping[Expr, Expr] = {axis: const(0) for axis in program.grid if axis.extent == const(1)}
    most = 0
    for bound in graph.bounds:
        stores = isinstance(bound.stmt, Parallel) and any(isinstance(one.target, Place) for one in bound.stmt.body)
        if stores and graph.classes[bound.axis] == roles.rows_class:
            limit = substitute(bound.limit, alone)
            most = max(most, int(limit.value) if isinstance(limit, Const) else roles.block_rows)
    return min(most, roles.block_rows) if most else roles.block_rows


def joined_words(group: JoinGroup, roles: Roles) -> Iterator[tuple[Join, str, str, int]]:
    """Of every join: itself, a loop over the words of a thread, which element word x is, and where its words begin."""
    offset = 0
    for join in group.joins:
        count = words_of(join.buffer, roles) * group.halves // 2
        yield join, word_loop(count), element_index(join.buffer, group, roles), offset
        offset += count


def word_loop(count: int) -> str:
    """The head of a loop over words of a thread."""
    return f"TILE_UNROLL for (int x = 0; x < {count}; x++)"


def element_index(buffer: Buffer, group: JoinGroup, roles: Roles) -> str:
    """Which element of a buffer word x is."""
    if group.halves == 2:
        return "x"
    return "(x / 2 * 4 + x % 2)" if buffer.name in roles.fragments else "0"


def join_text(group: JoinGroup, number: int, split: Split, roles: Roles) -> list[str]:
    """One exchange of a consumer warpgroup."""
    own = f"exchange_{number} + warpgroup * {group.bytes} + thread * 4"
    body: list[str] = []
    reads: list[str] = []
    for join, loop, index, offset in joined_words(group, roles):
        at = f"{own} + ({offset} + x) * {4 * group.threads}"
        name = join.buffer.name
        body.append(f"{loop} exchange_write({at}, {name}[{index}]);")
        reads.append(f"{loop} {name}[{index}] = exchange_read<{REDUCTIONS[join.kind]}, {split.cluster}>({at});")
    some = f"if (thread < {group.threads}) " if group.threads < 128 else ""
    first = f"if ({split.axis.name} == 0) " if group.first_only and split.axis is not None else ""
    meet = "named_sync(5 + warpgroup, 128);"
    return [
        "{  // " + ", ".join(f"{join.kind} of {join.buffer.name}" for join in group.joins) + " over the cluster",
        f"  cluster_wait(done_{number}, joined ^ 1);",
        *([f"  {some}{{", *("    " + line for line in body), "  }"]),
        f"  {meet}",
        f"  if (thread < {split.cluster}) cluster_arrive(ready_{number}, thread);",
        f"  cluster_wait(ready_{number}, joined);",
        *([f"  {first}{some}{{", *("    " + line for line in reads), "  }"]),
        f"  {meet}",
        f"  if (thread < {split.cluster}) cluster_arrive(done_{number}, thread);",
        "}",
    ]
