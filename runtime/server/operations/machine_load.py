"""How busy the machine's processors and memory are, as Triton's metrics tell it.

In: `/proc`, read when asked. Out: shares and bytes; nothing where there is no such file. Invariant: the utilisation is
that since it was last asked for.
"""

import re
import threading
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of the machine's memory."""

    total: int
    used: int


class ProcessorUse:
    """The share of all cores' time that was spent working."""

    def __init__(self, path: Path = Path("/proc/stat")) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._busy, self._all = self._read() or (0, 0)

    def since_last(self) -> float | None:
        """Between 0 and 1, since the last call; None: the system does not tell."""
        with self._lock:
            read = self._read()
            if read is None:
                return None
            busy, all_time = read[0] - self._busy, read[1] - self._all
            self._busy, self._all = read
        return min(1.0, max(0.0, busy / all_time)) if all_time > 0 else 0.0

    def _read(self) -> tuple[int, int] | None:
        """Ticks of work, and all ticks, since the machine started."""
        try:
            first = self._path.read_text().splitlines()[0]
        except OSError:
            return None
        user, nice, system, idle, waiting, *more = map(int, first.split()[1:9])  # what guests used is part of user
        working = user + nice + system + sum(more)
        return working, working + idle + waiting


def memory_use(path: Path = Path("/proc/meminfo")) -> MemoryUse | None:
    """The machine's memory; None: the system does not tell."""
    try:
        found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", path.read_text(), re.MULTILINE))
        total, free = int(found["MemTotal"]), int(found["MemAvailable"])
    except (OSError, KeyError):
        return None
    return MemoryUse(total * 1024, (total - free) * 1024)
