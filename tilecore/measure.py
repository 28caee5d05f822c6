"""Measures this machine: clock, products and bytes per cycle, alone and with all cores at work.

Comes in: a toolchain. Goes out: a `HardwareProfile` and the rates that it was made from. Every probe counts processor
time, and the best of many short runs counts: what else runs on the machine makes single runs worse, never better.
"""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from tilecore.compile import HEADERS
from tilecore.profile import HardwareProfile, cache_size, detect_profile
from tilecore.toolchain import Source, Toolchain

ROUNDS = 60_000  # of a probe of products: well under a millisecond
CLOCK_ROUNDS = 20_000
TRIES = 20
PASSES = 3  # neighbours of a virtual machine come and go by the second
MOVED = 4 << 20  # bytes of one run, or the whole of what does not fit
ROW = 2 * 12 * 64  # a multiple of the bytes that the probes of memory take at a time
LEVELS = (("L1", "l1", 0.5), ("L2", "l2", 0.5), ("L3", "l3", 0.3), ("DRAM", "l3", 4.0))  # name, cache, share of it
MOST = 512 << 20  # bytes of one buffer
PAGE = 4096  # loads across two lines would take twice as long
READ_IN_ALL = 1 << 30  # bytes of the tries of one pass
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Rate:
    """One measured figure, of one core: alone, and while all of them do the same. Units per second."""

    name: str
    unit: str
    alone: float
    together: float


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured profile and its rates, in the order of measuring."""

    profile: HardwareProfile
    rates: tuple[Rate, ...]
    caches_known: bool  # else their sizes are those of the table

    def rate(self, name: str) -> Rate:
        """The rate called `name`."""
        return next(rate for rate in self.rates if rate.name == name)


@dataclass(frozen=True, slots=True)
class Probe:
    """A function of the probes: what its rate is called, and its arguments, one list per thread or one for all."""

    name: str
    unit: str
    function: str
    arguments: Sequence[Sequence[object]]
    tries: int = TRIES


@dataclass(frozen=True, slots=True)
class Probes:
    """The compiled probes and how many threads run them."""

    library: ctypes.CDLL
    cores: int

    def measure(self, probe: Probe) -> Rate:
        """Best of the probe's tries, on one core and on all."""
        function = getattr(self.library, probe.function)
        function.restype = ctypes.c_double

        def run(thread: int) -> float:
            arguments = probe.arguments[thread % len(probe.arguments)]
            return max(function(*arguments) for _ in range(probe.tries))

        with ThreadPoolExecutor(self.cores) as pool:
            together = list(pool.map(run, range(self.cores)))
        return Rate(probe.name, probe.unit, run(0), sum(together) / self.cores)


def measure_profile(toolchain: Toolchain, *, progress: Progress) -> Measured:
    """This machine as measured, in some seconds. BuildError without a working compiler."""
    base = detect_profile()
    probes, wanted = Probes(load_probes(toolchain), base.cores), _probes(base)
    rates: dict[str, Rate] = {}
    for turn in range(PASSES):
        for probe in wanted:
            progress(f"{probe.name}, pass {turn + 1} of {PASSES}")
            found = probes.measure(probe)
            best = rates.get(probe.name, found)
            rates[probe.name] = replace(
                found, alone=max(found.alone, best.alone), together=max(found.together, best.together)
            )
    known = all(cache_size(level) for level in (1, 2, 3))
    return Measured(_profile(base, {rate.name: rate.together for rate in rates.values()}), tuple(rates.values()), known)


def load_probes(toolchain: Toolchain) -> ctypes.CDLL:
    """The functions of `tile_probe.c`, which return rates per second. BuildError without a working compiler."""
    source = (HEADERS / "tile_probe.c").read_text()
    library = ctypes.CDLL(str(toolchain.library([toolchain.object(Source(source, ("-march=native",), (HEADERS,)))])))
    for name in ("probe_read", "probe_copy"):
        getattr(library, name).restype = ctypes.c_double
    return library


def moving(library: ctypes.CDLL, size: int, threads: int, *, copies: bool) -> Callable[[], float]:
    """A function that reads `size` bytes out of memory on some threads, or copies half of them to the other half.

    It returns the seconds of the slowest thread, starting it left out; what it moves is its own.
    """
    part = max(size // threads // ROW, 1) * ROW
    buffer = _page_aligned(part * threads)
    function, pool = library.probe_copy if copies else library.probe_read, ThreadPoolExecutor(threads)

    def one(thread: int) -> float:
        at = ctypes.c_void_p(buffer.ctypes.data + thread * part)
        return part / (2 if copies else 1) / function(at, ctypes.c_int64(part), ctypes.c_int64(1))

    return lambda: max(pool.map(one, range(threads)))


def _probes(base: HardwareProfile) -> list[Probe]:
    """What is measured of a machine whose caches are those of `base`, with buffers to read and copy."""
    values = (ctypes.c_float * 2)(0.5, 0.25)
    clock, products = [[ctypes.c_int64(CLOCK_ROUNDS)]], [[ctypes.c_int64(ROUNDS), values]]
    found = [
        Probe("scalar clock", "Hz", "probe_clock", clock),
        Probe("f32 multiply-adds", "/s", "probe_fma", products),
        Probe("clock under vector work", "Hz", "probe_clock", clock),
        Probe("exponentials", "/s", "probe_exp", products),
        Probe("GELUs", "/s", "probe_gelu", products),
        Probe("int8 products", "/s", "probe_bytes", products),
        Probe("bf16 products", "/s", "probe_bf16", products),
    ]
    for level, cache, share in LEVELS:
        size = min(int(getattr(base, cache) * share) // ROW * ROW, MOST)
        buffers = [_page_aligned(size) for _ in range(base.cores if level != "L3" else 1)]
        repeats, tries = max(1, MOVED // size), min(TRIES, max(1, READ_IN_ALL // size))
        arguments = [
            [b.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(size), ctypes.c_int64(repeats)] for b in buffers
        ]
        found.append(Probe(f"{level} reads", "B/s", "probe_read", arguments, tries))
        if level == "L3":  # a buffer that all cores read fits; to write, each needs its own part
            part = size // base.cores // ROW * ROW
            arguments = [
                [ctypes.c_void_p(buffers[0].ctypes.data + core * part), ctypes.c_int64(part), ctypes.c_int64(repeats)]
                for core in range(base.cores)
            ]
        found.append(Probe(f"{level} copies", "B/s", "probe_copy", arguments, tries))
    return found


def _page_aligned(size: int) -> np.ndarray:
    """Ones, of so many bytes, that begin where a page does."""
    memory = np.ones(size // 4 + PAGE // 4, np.float32)
    first = -memory.ctypes.data % PAGE // 4
    return memory[first : first + size // 4]


def _profile(base: HardwareProfile, together: dict[str, float]) -> HardwareProfile:
    """The profile of these rates per second, in cycles of the clock that vector work leaves."""
    clock = together["clock under vector work"]
    read = {level: round(together[f"{level} reads"] / clock, 2) for level, _, _ in LEVELS}
    return replace(
        base,
        name=base.name.replace("this machine", "this machine, measured"),
        fma_per_cycle=round(together["f32 multiply-adds"] / clock / base.target.lanes, 2),
        l1_bytes=read["L1"],
        l2_bytes=read["L2"],
        l3_bytes=read["L3"],
        dram_bytes=read["DRAM"],
        clock=clock,
        int8_per_cycle=round(together["int8 products"] / clock, 1),
        bf16_per_cycle=round(together["bf16 products"] / clock, 1),
    )
