"""Hardware profiles: what the cost model knows of a machine, read from the system or taken from a table."""

import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path

from tilecore.target import TARGETS, Target, targets_for


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """One CPU: caches in bytes per core (`l3` shared), multiply-adds per cycle, bytes per cycle of each level."""

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
    clock: float = 3.0e9  # cycles per second

    @property
    def macs_per_cycle(self) -> float:
        """f32 multiply-adds per cycle of one core."""
        return self.fma_per_cycle * self.target.lanes


_V4, _V3, _ARM = TARGETS

PROFILES: tuple[HardwareProfile, ...] = (
    HardwareProfile("zen4", _V4, 2, 32 << 10, 1 << 20, 32 << 20, 1.0, 64, 32, 20, 6),
    HardwareProfile("zen3", _V3, 2, 32 << 10, 512 << 10, 32 << 20, 2.0, 64, 32, 20, 6),
    HardwareProfile("sapphire-rapids", _V4, 2, 48 << 10, 2 << 20, 60 << 20, 2.0, 128, 48, 12, 6),
    HardwareProfile("avx2-desktop", _V3, 4, 32 << 10, 256 << 10, 8 << 20, 2.0, 64, 32, 16, 6),
    HardwareProfile("graviton3", _ARM, 2, 64 << 10, 1 << 20, 32 << 20, 4.0, 48, 32, 12, 8),
)


def profile_named(name: str) -> HardwareProfile:
    """The table's row. ValueError lists the rows."""
    for profile in PROFILES:
        if profile.name == name:
            return profile
    raise ValueError(f"unknown profile {name!r}; there are {', '.join(profile.name for profile in PROFILES)}")


def detect_profile() -> HardwareProfile:
    """This machine: the table's row for its best target, with the cores and caches that the system reports."""
    target = detect_target()
    base = next(profile for profile in PROFILES if profile.target == target)
    found = {level: _cache_size(level) for level in (1, 2, 3)}
    return replace(
        base,
        name=f"this machine ({platform.machine()})",
        cores=os.cpu_count() or 1,
        l1=found[1] or base.l1,
        l2=found[2] or base.l2,
        l3=found[3] or base.l3,
    )


def detect_target() -> Target:
    """The best row of the target table that this machine runs."""
    rows = targets_for(platform.machine())
    flags = _cpu_flags()
    for target in rows:
        needed = {"x86-64-v4": {"avx512f", "avx512dq", "avx512bw", "avx512vl"}, "x86-64-v3": {"avx2", "fma"}}
        if needed.get(target.name, set()) <= flags:
            return target
    return rows[-1]


def _cpu_flags() -> set[str]:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return set()
    for line in path.read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split(":", 1)[1].split())
    return set()


def _cache_size(level: int) -> int | None:
    """Bytes of the data or unified cache of a level, from sysfs; None where the system does not say."""
    for entry in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if (entry / "level").read_text().strip() == str(level) and (
            entry / "type"
        ).read_text().strip() != "Instruction":
            text = (entry / "size").read_text().strip()
            return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
    return None
