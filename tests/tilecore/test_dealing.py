"""Dealing out tasks: chunks as hosts cut them, and when the last core is done."""

import ctypes
import random
from itertools import pairwise
from pathlib import Path

import pytest

from tilecore.compile import HEADERS
from tilecore.dealing import Tasks, busiest, cuts
from tilecore.toolchain import Source, find_toolchain

CLOCK = 1e9  # a cycle is a nanosecond
HOST = """
#include "tile_chunks.h"
static int64_t group_of, work_of;
static int64_t group(const int64_t* symbols) { (void)symbols; return group_of; }
static int64_t work(const int64_t* symbols) { (void)symbols; return work_of; }
__attribute__((visibility("default"))) int64_t host_cuts(int64_t tasks, int64_t of_group, int64_t of_work,
                                                        int64_t cores, int64_t* first) {
    const tile_kernel kernel = {.group = group, .work = work};
    group_of = of_group, work_of = of_work;
    const tile_chunks cut = tile_cut(&kernel, NULL, tasks, cores);
    for (int64_t chunk = 0; chunk <= cut.count; chunk++) first[chunk] = tile_first_task(&cut, chunk);
    return cut.count;
}
"""


@pytest.mark.parametrize(
    ("cycles", "times", "cores", "expected"),
    [
        ([100_000.0], 4, 2, 200_000.0),
        ([100_000.0], 5, 2, 300_000.0),
        ([96_000.0, 32_000.0], 3, 2, 224_000.0),  # 96, 32, 96 and 32, 96, 32
        ([96_000.0, 32_000.0], 3, 1, 384_000.0),
        ([70_000.0, 10_000.0, 10_000.0, 10_000.0], 1, 2, 70_000.0),  # the second core takes over what is left
        ([4_000.0], 2, 2, 8_000.0),  # not worth waking another thread for
        ([50_000.0, 0.0], 2, 3, 50_000.0),
    ],
)
def test_the_last_core_is_done_when_nobody_has_more_to_take(
    cycles: list[float], times: int, cores: int, expected: float
) -> None:
    assert busiest(Tasks(cycles, times), cores, CLOCK) == pytest.approx(expected)


@pytest.mark.parametrize(("tasks", "longest"), [(6, 100_000.0), (12, 50_000.0), (1200, 500.0 * 38)])
def test_a_share_of_the_longest_chunk_is_what_uneven_cores_lose(tasks: int, longest: float) -> None:
    """Of 1200 tasks, hosts make 32 chunks of 37 or 38."""
    taken = busiest(Tasks([600_000.0 / tasks], tasks), 2, CLOCK, uneven=0.1)
    assert taken == pytest.approx(300_000 + 0.1 * longest)


@pytest.mark.parametrize(("thought", "expected"), [(None, 8_000.0), (9_000, 8_000.0), (20_000, 4_000.0)])
def test_hosts_share_out_a_call_that_they_think_is_long(thought: int | None, expected: float) -> None:
    assert busiest(Tasks([1_000.0], 8), 2, CLOCK, thought=thought) == pytest.approx(expected)


def test_no_core_idles_while_there_is_work() -> None:
    """Whoever takes what comes next is done at most one chunk after an even share."""
    rng = random.Random(3)
    for _ in range(200):
        cycles = [rng.uniform(1e4, 1e6) for _ in range(rng.randint(1, 40))]
        tasks = Tasks(cycles, rng.randint(1, 5))
        cores = rng.randint(2, 9)
        bounds = cuts(len(cycles) * tasks.times, group=1, cores=cores, nanoseconds=int(tasks.total))
        whole = [*cycles] * tasks.times
        longest = max(sum(whole[start:end]) for start, end in pairwise(bounds))
        taken = busiest(tasks, cores, CLOCK)
        assert max(longest, tasks.total / cores) <= taken * (1 + 1e-9)
        assert taken <= (tasks.total / cores + longest) * (1 + 1e-9)


@pytest.mark.cpu
def test_chunks_are_cut_as_hosts_cut_them(object_cache: Path) -> None:
    toolchain = find_toolchain(object_cache)
    source = Source(HOST, include=(HEADERS,))
    host = ctypes.CDLL(str(toolchain.library([toolchain.object(source)]))).host_cuts
    host.argtypes = [ctypes.c_int64] * 4 + [ctypes.POINTER(ctypes.c_int64)]
    host.restype = ctypes.c_int64
    rng = random.Random(5)
    for _ in range(2000):
        group, cores = rng.choice((1, 1, 3, 8, 22)), rng.randint(1, 8)
        count, work = group * rng.randint(1, 200), rng.choice((5_000, 12_000, 90_000, 10_000_000))
        first = (ctypes.c_int64 * 4096)()
        chunks = host(count, group, work, cores, first)
        assert cuts(count, group=group, cores=cores, nanoseconds=work) == first[: chunks + 1]
