"""Joins of tasks that share a result: the tasks of a split are the blocks of one cluster and read each other's memory.

Comes in: roles. Goes out: groups of joins that follow each other, each with one exchange: every block writes its part
of the joined tiles to its own shared memory, all meet at a barrier, and each reads the parts in the same order.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tilecore.contract.expr import Const, Expr, Var, binary, const, substitute
from tilecore.contract.spec import Place
from tilecore.cuda.errors import CudaError
from tilecore.cuda.roles import GROUP_ROWS, Roles
from tilecore.graph import buffers_of
from tilecore.ir import Buffer, For, If, Join, Parallel, Stmt, statements

WARP_ROWS, HALF_ROWS = 16, 8  # of a fragment: rows of a warp, and of each half of its elements
MAX_CLUSTER = 16
REDUCTIONS = {"sum": "Sum", "max": "Max", "fmax": "Fmax", "min": "Min", "prod": "Prod"}


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Joins with one exchange. `first_only`: nothing but the split's first task reads what comes out."""

    joins: tuple[Join, ...]
    words: int  # of one thread
    threads: int  # of a warpgroup that have a row worth joining
    halves: int  # of a fragment's elements that have
    first_only: bool

    @property
    def bytes(self) -> int:
        """Of one warpgroup's exchange."""
        return 4 * self.words * self.threads


@dataclass(frozen=True, slots=True)
class Split:
    """The grid's axis whose tasks are one cluster, and what they exchange. An `axis` of None: no split."""

    axis: Var | None = None
    cluster: int = 1
    groups: tuple[JoinGroup, ...] = ()


def plan_split(roles: Roles) -> Split:
    """The split of a program. CudaError for more tasks than a cluster has blocks."""
    body = roles.program.body
    joins = [stmt for stmt in body if isinstance(stmt, Join)]
    if not joins:
        return Split()
    axis = joins[0].axis
    if not isinstance(axis.extent, Const) or int(axis.extent.value) > MAX_CLUSTER:
        raise CudaError(f"a split into {axis.extent} tasks: a cluster has at most {MAX_CLUSTER} blocks")
    rows = _live_rows(roles)
    warps = min(GROUP_ROWS // WARP_ROWS, -(-rows // WARP_ROWS))
    halves = 1 if rows <= HALF_ROWS else 2
    groups: list[JoinGroup] = []
    for run in _runs(body):
        words = sum(_words(join.buffer, roles) * halves // 2 for join in run)
        after = body[body.index(run[-1]) + 1 :]
        groups.append(JoinGroup(run, words, 32 * warps, halves, _first_only(after, axis, run)))
    return Split(axis, int(axis.extent.value), tuple(groups))


def _words(buffer: Buffer, roles: Roles) -> int:
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


def join_text(group: JoinGroup, number: int, split: Split, roles: Roles) -> list[str]:
    """One exchange of a consumer warpgroup."""
    own = f"exchange_{number} + warpgroup * {group.bytes} + thread * 4"
    body: list[str] = []
    reads: list[str] = []
    offset = 0
    for join in group.joins:
        count = _words(join.buffer, roles) * group.halves // 2
        index = "x" if group.halves == 2 else "(x / 2 * 4 + x % 2)" if join.buffer.name in roles.fragments else "0"
        at = f"{own} + ({offset} + x) * {4 * group.threads}"
        loop = f"TILE_UNROLL for (int x = 0; x < {count}; x++)"
        kind = REDUCTIONS[join.kind]
        name = join.buffer.name
        body.append(f"{loop} exchange_write({at}, {name}[{index}]);")
        reads.append(f"{loop} {name}[{index}] = exchange_read<{kind}, {split.cluster}>({at});")
        offset += count
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
