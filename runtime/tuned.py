"""What tuning has found, kept between runs: measured times by program, machine and sizes.

A record holds, for one kernel's spec on one kind of machine, the microseconds of each configuration by the sizes at
which it was timed. The configuration to use is the one that is best over all of them. Files appear whole.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log
from pathlib import Path

from runtime.fingerprint import compiler_fingerprint
from runtime.options import Options
from tilecore.compile import prepare
from tilecore.contract.spec import Spec
from tilecore.profile import machine_key
from tilecore.records import write_json

Config = Mapping[str, int]
Times = dict[str, dict[str, float]]  # shape class → configuration as text → microseconds


class TunedError(Exception):
    """A record cannot be read; one line that says which and what to do."""


@dataclass(frozen=True, slots=True)
class TunedStore:
    """The records of this kind of machine, for calls on `threads` threads."""

    folder: Path
    threads: int

    def path(self, spec: Spec) -> Path:
        """The record of `spec`, in any spelling that gives the same kernel."""
        digest = hashlib.sha256(repr(prepare(spec)[0]).encode()).hexdigest()[:24]
        return self.folder / f"{digest}.{self.threads}.json"

    def times(self, spec: Spec) -> Times:
        """What was measured for `spec`; empty when nothing was. TunedError when the record is broken."""
        path = self.path(spec)
        if not path.exists():
            return {}
        try:
            found = json.loads(path.read_text())
            return {str(c): {str(k): float(v) for k, v in row.items()} for c, row in found["microseconds"].items()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise TunedError(f"{path} is not a record of tuning ({error!r}); delete it and tune again") from error

    def add(self, spec: Spec, shape_class: str, times: Mapping[str, float]) -> None:
        """Keep measured times of one shape class, in the place of older ones of the same class."""
        write_json(self.path(spec), {"microseconds": {**self.times(spec), shape_class: dict(times)}})

    def best(self, spec: Spec) -> Config | None:
        """The configuration to use for `spec`; None when it was not tuned on this machine."""
        times = self.times(spec)
        common = set.intersection(*(set(row) for row in times.values())) if times else set[str]()
        if not common:
            return None
        return parse_config(min(sorted(common), key=lambda text: _relative(text, times)))


def tuned_store(options: Options, threads: int) -> TunedStore:
    """The records in the user's cache. Another version of the compiler has its own: its kernels are others."""
    return TunedStore(options.cache / "tuned" / f"{machine_key()}-{compiler_fingerprint()[:12]}", threads)


def shape_class(sizes: Mapping[str, int]) -> str:
    """The class of sizes: each rounded up to a power of two."""
    return ",".join(f"{name}={1 << (size - 1).bit_length()}" for name, size in sorted(sizes.items())) or "static"


def config_text(config: Config) -> str:
    """A configuration as the key of a record."""
    return " ".join(f"{name}={value}" for name, value in sorted(config.items()))


def parse_config(text: str) -> Config:
    """What `config_text` wrote. ValueError for anything else."""
    return {name: int(value) for name, _, value in (part.partition("=") for part in text.split())}


def _relative(text: str, times: Times) -> float:
    """Geometric mean over shape classes of a configuration's time by the best one's."""
    return exp(sum(log(row[text] / min(row.values())) for row in times.values()) / len(times))
