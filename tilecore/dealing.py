"""Dealing out the tasks of a call to cores: how long the busiest of them works.

Comes in: the cycles of tasks, in their order. Goes out: cycles until the last core is done, when chunks of whole
tasks are cut as `tile_chunks.h` cuts them: a core works through a range of its own, then takes over chunks of others.
"""

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

CHUNKS_PER_CORE, INLINE_NANOSECONDS, CHUNK_NANOSECONDS = 16, 10_000, 2_500  # of `tile_chunks.h`


Run = tuple[float, int]  # the cycles of a task, and how many like it follow each other


@dataclass(frozen=True, slots=True)
class Tasks:
    """Rows of tasks, each row so many times, and all of them `times` times; `group` tasks share copies."""

    rows: Sequence[tuple[Sequence[Run], int]]
    times: int = 1
    group: int = 1

    @property
    def count(self) -> int:
        """How many there are."""
        return self.times * sum(sum(count for _, count in row) * often for row, often in self.rows)

    @property
    def total(self) -> float:
        """Cycles of all of them."""
        return self.times * sum(sum(cycles * count for cycles, count in row) * often for row, often in self.rows)

    def before(self, bounds: Sequence[int]) -> list[float]:
        """Cycles of all tasks before each bound."""
        times = max(self.times, 1)
        once, cycles = max(self.count // times, 1), self.total / times
        rows = [(_Sums.of(row), often) for row, often in self.rows]
        return [bound // once * cycles + _within(rows, bound % once) for bound in bounds]


@dataclass(frozen=True, slots=True)
class _Sums:
    """A row: where each run begins, in tasks and in cycles, ends included, and the cycles of one task of each."""

    tasks: list[int]
    cycles: list[float]
    each: list[float]

    @staticmethod
    def of(row: Sequence[Run]) -> "_Sums":
        tasks = list(accumulate((count for _, count in row), initial=0))
        cycles = list(accumulate((one * count for one, count in row), initial=0.0))
        return _Sums(tasks, cycles, [one for one, _ in row])

    def before(self, task: int) -> float:
        run = min(bisect_right(self.tasks, task) - 1, len(self.each) - 1)
        return self.cycles[run] + (task - self.tasks[run]) * self.each[run]


def _within(rows: Sequence[tuple[_Sums, int]], task: int) -> float:
    """Cycles of all tasks before one of those that come `times` times."""
    cycles = 0.0
    for row, often in rows:
        size = row.tasks[-1]
        if task < size * often:
            return cycles + task // size * row.cycles[-1] + row.before(task % size)
        cycles, task = cycles + often * row.cycles[-1], task - size * often
    return cycles


def busiest(tasks: Tasks, cores: int, clock: float) -> float:
    """Cycles from the first task to the last of a call on so many cores of `clock` cycles per second."""
    total, count = tasks.total, tasks.count
    if cores == 1 or count <= 1:
        return total
    ends = tasks.before(cuts(count, group=tasks.group, cores=cores, nanoseconds=int(total / clock * 1e9)))
    return _last_done([end - start for start, end in pairwise(ends)], cores)


def cuts(count: int, *, group: int, cores: int, nanoseconds: int) -> list[int]:
    """The first task of every chunk of a call of `count` tasks that takes so long on one core, and `count`."""
    worth = nanoseconds // CHUNK_NANOSECONDS if nanoseconds >= INLINE_NANOSECONDS else 1
    most = min(CHUNKS_PER_CORE * cores, worth)
    groups = count // group
    parts = min(-(-most // groups), group)
    units = groups * parts
    chunks = units if groups < most else most
    starts = (units * chunk // chunks for chunk in range(chunks + 1))
    return [unit // parts * group + unit % parts * group // parts for unit in starts]


def _last_done(chunks: Sequence[float], cores: int) -> float:
    """When the last of `cores` is done: who is free first takes its own next chunk, else one that others have left."""
    bounds = [len(chunks) * core // cores for core in range(cores + 1)]
    taken, victims = bounds[:-1], list(range(cores))
    free = [(0.0, core) for core in range(cores)]
    last = 0.0
    while free:
        now, core = heapq.heappop(free)
        owner = victims[core]
        while owner < core + cores and taken[owner % cores] == bounds[owner % cores + 1]:
            owner += 1
        victims[core] = owner
        if owner == core + cores:
            last = max(last, now)
            continue
        chunk = taken[owner % cores]
        taken[owner % cores] += 1
        heapq.heappush(free, (now + chunks[chunk], core))
    return last
