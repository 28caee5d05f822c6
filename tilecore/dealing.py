"""Dealing out the tasks of a call to cores: how long the busiest of them works.

Comes in: the cycles of each task, in their order. Goes out: cycles until the last core is done, when chunks of whole
tasks are cut as `tile_chunks.h` cuts them: a core works through a range of its own, then takes over chunks of others.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

CHUNKS_PER_CORE, INLINE_NANOSECONDS, CHUNK_NANOSECONDS = 16, 10_000, 1_250  # of `tile_chunks.h`


@dataclass(frozen=True, slots=True)
class Tasks:
    """The cycles of tasks that come again `times` times; `group` of them share copies."""

    cycles: Sequence[float]
    times: int = 1
    group: int = 1

    @property
    def total(self) -> float:
        """Cycles of all of them."""
        return sum(self.cycles) * self.times


def busiest(tasks: Tasks, cores: int, clock: float, *, uneven: float = 0.0, thought: int | None = None) -> float:
    """Cycles from the first task to the last of a call on so many cores of `clock` cycles per second.

    Cores are never equally fast: a share of the longest chunk, `uneven`, is what the last one is late by. A host cuts
    a call that it thinks takes `thought` nanoseconds; where that is not given, it knows.
    """
    total, count = tasks.total, len(tasks.cycles) * tasks.times
    if cores == 1 or count <= 1:
        return total
    sums = list(accumulate(tasks.cycles, initial=0.0))
    nanoseconds = int(total / clock * 1e9) if thought is None else thought
    bounds = cuts(count, group=tasks.group, cores=cores, nanoseconds=nanoseconds)
    ends = [task // len(tasks.cycles) * sums[-1] + sums[task % len(tasks.cycles)] for task in bounds]
    chunks = [end - start for start, end in pairwise(ends)]
    return _last_done(chunks, cores) + uneven * max(chunks)


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
