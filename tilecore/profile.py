"""Hardware profiles: what the cost model knows of a machine.

A row of the table, completed by what the system says of this machine (`detect_profile`), or measured (`measure.py`).
"""

import hashlib
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tilecore.target import TARGETS, Target, target_named, targets_for

TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """One CPU: caches in bytes per core (`l3` of one last cache), multiply-adds and bytes read of each level a cycle.

    All of it is of one core while all of them are at work.
    """

    name: str
    target: Target
    cores: int
    l1: int
    l2: int
    l3: int
    fma_per_cycle: float  # vector multiply-adds
    l1_bytes: float
    l2_bytes: float
    l3_bytes: float
    dram_bytes: float
    clock: float = 3.0e9  # cycles per second, under vector work
    int8_per_cycle: float = 0.0  # products of bytes that the best instruction for them does
    bf16_per_cycle: float = 0.0  # 0: no such instruction
    narrow: str = ""  # the row of the table of targets that products of bf16 take; "": they are widened
    kept: float = 1 / 3  # share of last caches that what a call reads and writes may take, for results to stay there
    shown: float = 0.75  # share of fetching a tile's keys and values for an attention that shows beside multiply-adds
    l3_cores: int = 0  # that share a last cache; 0: all of them

    @property
    def macs_per_cycle(self) -> float:
        """f32 multiply-adds per cycle of one core."""
        return self.fma_per_cycle * self.target.lanes

    @property
    def kept_bytes(self) -> int:
        """What a call on all cores may read and write for its results to stay in the last caches that these have."""
        return int(self.last_cache_bytes * self.kept)

    @property
    def last_cache_bytes(self) -> int:
        """Of the last caches that all cores have together."""
        return self.l3 * (-(-self.cores // self.l3_cores) if self.l3_cores else 1)

    def to_json(self) -> dict[str, object]:
        """The fields by name; the target is its name."""
        return {**asdict(self), "target": self.target.name}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "HardwareProfile":
        """What `to_json` gave. TypeError or ValueError for anything else."""
        values: dict[str, Any] = {**fields, "target": target_named(fields["target"])}
        profile = HardwareProfile(**values)
        numbers = {name: value for name, value in asdict(profile).items() if name not in ("name", "target", "narrow")}
        wrong = [n for n, value in numbers.items() if not isinstance(value, int | float) or value < 0]
        none = {"int8_per_cycle", "bf16_per_cycle", "l3_cores"}  # that may be 0
        wrong += [n for n, value in numbers.items() if n not in none and not value]
        if wrong:
            raise ValueError(f"not a positive number: {', '.join(wrong)}")
        if profile.narrow:
            target_named(profile.narrow)
        return profile


_V4, _V3, _ARM = (target for target in TARGETS if not target.base)
_AMX, _DOT = (target.name for target in TARGETS if target.base)

PROFILES: tuple[HardwareProfile, ...] = (
    HardwareProfile("zen4", _V4, 2, 32 << 10, 1 << 20, 32 << 20, 1.0, 64, 32, 20, 6, 3.7e9, 64, 32, _DOT, 2 / 3),
    HardwareProfile(
        "zen5", _V4, 2, 48 << 10, 1 << 20, 32 << 20, 2.0, 121, 60, 31, 8, 4.2e9, 128, 64, _DOT, 0.55, 0.05, 1
    ),
    HardwareProfile("zen3", _V3, 2, 32 << 10, 512 << 10, 32 << 20, 2.0, 64, 32, 20, 6, 3.0e9, 32),
    HardwareProfile("sapphire-rapids", _V4, 2, 48 << 10, 2 << 20, 60 << 20, 2.0, 128, 48, 12, 6, 2.6e9, 128, 512, _AMX),
    HardwareProfile("avx2-desktop", _V3, 4, 32 << 10, 256 << 10, 8 << 20, 2.0, 64, 32, 16, 6, 3.6e9, 32),
    HardwareProfile("graviton3", _ARM, 2, 64 << 10, 1 << 20, 32 << 20, 4.0, 48, 32, 12, 8, 2.6e9, 64, 32),
)
_AVX512 = {"avx512f", "avx512dq", "avx512bw", "avx512vl"}
NEEDED: Mapping[str, set[str]] = {  # flags in /proc/cpuinfo
    "x86-64-v4-amx": {*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"},
    "x86-64-v4-bf16": {*_AVX512, "avx512_bf16"},
    "x86-64-v4": _AVX512,
    "x86-64-v3": {"avx2", "fma"},
}
INTEL_VENDOR = "GenuineIntel"
INTEL = ("sapphire-rapids", "avx2-desktop")  # the rows that Intel's processors without one of their own are most like
AMD_VENDOR, AMD_ZEN5 = "AuthenticAMD", 26  # the family of Zen 5, as /proc/cpuinfo counts them: Zen 3 and 4 are 25


def profile_named(name: str) -> HardwareProfile:
    """The table's row. ValueError lists the rows."""
    for profile in PROFILES:
        if profile.name == name:
            return profile
    raise ValueError(f"unknown profile {name!r}; there are {', '.join(profile.name for profile in PROFILES)}")


def detect_profile(threads: int = 0) -> HardwareProfile:
    """This machine: the table's row for its best target, with the cores and caches that the system reports.

    With `threads`, no more of its cores than these have. Which cores share a last cache a virtual machine is not told,
    and measuring tells only where its host runs them at that moment: there the row says.
    """
    target = detect_target()
    base = _row_like(_cpu_line("vendor_id"), _cpu_line("cpu family"), target)
    found = {level: cache_size(level) for level in (1, 2, 3)}
    narrow = _narrow_target()
    return replace(
        base,
        narrow=narrow,
        bf16_per_cycle=base.bf16_per_cycle if narrow == base.narrow else 0.0,
        name=f"this machine ({platform.machine()})",
        cores=min(threads or count_cores(), count_cores()),
        l1=found[1] or base.l1,
        l2=found[2] or base.l2,
        l3=found[3] or base.l3,
        l3_cores=base.l3_cores if "hypervisor" in _cpu_line("flags").split() else _cores_of_last_cache(),
    )


def _row_like(vendor: str, family: str, target: Target) -> HardwareProfile:
    """The table's row for `target` that a processor is most like."""
    rows = [profile for profile in PROFILES if profile.target == target]
    newer = vendor == AMD_VENDOR and family.isdigit() and int(family) >= AMD_ZEN5
    wanted = INTEL if vendor == INTEL_VENDOR else ("zen5",) if newer else ()
    return next((row for row in rows if row.name in wanted), rows[0])


def detect_target() -> Target:
    """The best row of the target table that this machine runs, products of bf16 left aside."""
    return next(target for target in detect_targets() if not target.base)


def _narrow_target() -> str:
    """The row whose products of bf16 pay on this machine, as its library will choose: not vdpbf16ps of Intel."""
    best = detect_targets()[0]
    pays = bool(best.base) and (best.amx or _cpu_line("vendor_id") != INTEL_VENDOR)
    return best.name if pays else ""


def detect_targets() -> tuple[Target, ...]:
    """All rows of the target table that this machine runs, best first; the least of its family in any case."""
    rows, flags = targets_for(platform.machine()), set(_cpu_line("flags").split())
    return tuple(row for row in rows if NEEDED.get(row.name, set()) <= flags) or rows[-1:]


def machine_key() -> str:
    """A short name for this kind of machine: equal for equal processors with as many cores and the same caches."""
    parts = [platform.machine(), _cpu_line("model name"), _cpu_line("flags"), str(count_cores())]
    parts += [str(cache_size(level)) for level in (1, 2, 3)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def count_cores() -> int:
    """The cores that this process may run on; threads that share one count once."""
    threads = os.sched_getaffinity(0)
    return len({_core_of(thread) for thread in threads}) or 1


def _cores_of_last_cache() -> int:
    """The cores that share the first processor's last cache; 0 where the system does not say."""
    path = TOPOLOGY / "cpu0" / "cache" / "index3" / "shared_cpu_list"
    if not path.exists():
        return 0
    runs = [run.partition("-") for run in path.read_text().strip().split(",")]
    threads = [thread for first, _, last in runs for thread in range(int(first), int(last or first) + 1)]
    return len({_core_of(thread) for thread in threads})


def _core_of(thread: int) -> tuple[str, ...]:
    files = [TOPOLOGY / f"cpu{thread}" / "topology" / name for name in ("physical_package_id", "core_id")]
    return tuple(file.read_text().strip() for file in files) if all(map(Path.exists, files)) else (str(thread),)


def _cpu_line(field: str) -> str:
    """What /proc/cpuinfo says of the first processor; "" where it does not."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == field), "")


def cache_size(level: int) -> int | None:
    """Bytes of the data or unified cache of a level, from sysfs; None where the system does not say."""
    for entry in sorted((TOPOLOGY / "cpu0" / "cache").glob("index*")):
        if (entry / "level").read_text().strip() == str(level) and (
            entry / "type"
        ).read_text().strip() != "Instruction":
            text = (entry / "size").read_text().strip()
            return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
    return None
