"""Times of chunks that `tile_time.c` takes."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest

from tilecore.compile import HEADERS
from tilecore.toolchain import Source, find_toolchain

TASKS, ROUNDS = 16, 50
KERNEL = """
static pthread_t ran_by[16]; /* each task, in the last round */
static int64_t tasks(const int64_t* symbols) { (void)symbols; return 16; }
static int64_t group(const int64_t* symbols) { (void)symbols; return 1; }
static int64_t claimed_work(const int64_t* symbols) { return symbols[0]; }
static void run(const int64_t* symbols, const void* const* inputs, void* const* outputs, void* scratch, int64_t* copied,
                int64_t begin, int64_t end) {
    (void)inputs; (void)outputs; (void)scratch; (void)copied;
    volatile int64_t sum = 0;
    for (int64_t i = 0; i < symbols[1] * (end - begin); i++) sum += i;
    for (int64_t task = begin; task < end; task++) ran_by[task] = pthread_self();
}
__attribute__((visibility("default"))) int32_t threads_that_ran(void) {
    int32_t found = 0;
    for (int i = 0; i < 16; i++) {
        int seen = 0;
        for (int j = 0; j < i; j++) seen |= pthread_equal(ran_by[i], ran_by[j]);
        found += !seen;
    }
    return found;
}
__attribute__((visibility("default"))) double seconds(int64_t claimed, int64_t steps, int32_t threads) {
    const tile_kernel kernel = {.tasks = tasks, .group = group, .work = claimed_work, .run = run};
    const int64_t symbols[] = {claimed, steps};
    return tile_time(&kernel, symbols, NULL, NULL, NULL, 0, threads, 50);
}
"""
Seconds = Callable[[int, int, int], float]
pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def library(object_cache: Path) -> ctypes.CDLL:
    toolchain = find_toolchain(object_cache)
    source = Source((HEADERS / "tile_time.c").read_text() + KERNEL, ("-pthread",), (HEADERS,))
    return ctypes.CDLL(str(toolchain.library([toolchain.object(source)])))


@pytest.fixture(scope="module")
def seconds(library: ctypes.CDLL) -> Seconds:
    function = library.seconds
    function.restype = ctypes.c_double
    function.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int32]
    return function


@pytest.mark.parametrize("claimed", [500_000, 100_000_000], ids=["time", "processor time"])
def test_asking_a_clock_is_not_counted(seconds: Seconds, claimed: int) -> None:
    """Tasks that do nothing: processor time takes half a microsecond to ask for, and is asked twice for every chunk."""
    assert 0 <= min(seconds(claimed, 0, 1) for _ in range(5)) < TASKS * 0.15e-6


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_the_work(library: ctypes.CDLL, seconds: Seconds, threads: int) -> None:
    assert seconds(100_000_000, 20_000, threads) > 0
    assert library.threads_that_ran() == threads
