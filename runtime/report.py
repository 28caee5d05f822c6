"""What `optimize` and `explain` say: regions that were fused, what was not and why."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RegionReport:
    """One fused region: its original nodes, the values it reads and makes, its operator and its kernel."""

    kind: str
    label: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    op: str
    kernel: str


@dataclass(frozen=True, slots=True)
class MissReport:
    """A node that was worth fusing and was left alone, with the reason."""

    kind: str
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome for one model; `output` and `library` are None when nothing was written."""

    input: str
    output: str | None
    library: str | None
    nodes_before: int
    nodes_after: int
    regions: tuple[RegionReport, ...]
    misses: tuple[MissReport, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values, tuples as lists."""
        return {
            **asdict(self),
            "regions": [{key: _plain(value) for key, value in asdict(region).items()} for region in self.regions],
            "misses": [asdict(miss) for miss in self.misses],
        }


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
