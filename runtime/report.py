"""What `optimize` and `explain` say: regions that were fused, their share of the model, what was not fused and why.

Comes in: what the compiler found. Goes out: frozen reports, and the same as JSON. Invariant: a key that a release had
keeps its meaning.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from fuser.coverage import Coverage


@dataclass(frozen=True, slots=True)
class RegionReport:
    """One fused region: its original nodes, the values it reads and makes, its operator and its kernel.

    `body` is the body of If, Loop or Scan that it is in, "" for the model's own graph.
    """

    kind: str
    label: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    op: str
    kernel: str
    body: str = ""
    predicted_fused: float | None = None
    """Seconds of one call of the kernel, predicted for batch 1 and 128 for every other symbolic dim."""
    predicted_unfused: float | None = None
    """Seconds of the region's nodes one by one, as ONNX Runtime runs them."""
    measured_fused: float | None = None
    """Seconds of one call, as `bench --per-region` measured it; None where no such measurements were given."""
    measured_unfused: float | None = None
    """Seconds of the nodes, from the same measurement."""
    target: str = "cpu"
    """"cuda" where the library has a kernel for NVIDIA cards beside the processor's."""
    byte_block: int = 0
    """Where not 0, kernels may round activations to bytes, in blocks of so many: the operator's accuracy_level permits
    it."""
    operands: str = ""
    """With `--precision bf16`, what the operands of its products are: "bfloat16", or float32 and why; "" for none."""


@dataclass(frozen=True, slots=True)
class MissReport:
    """Something that was worth fusing and was left alone.

    `node` is the anchor that the search started from and `op` its operator; `reached` says how far the search got,
    `reason` the condition that failed, `failed` the node that it failed at ("" for none), `advice` what would make it
    fuse.
    """

    kind: str
    node: str
    reason: str
    op: str = ""
    reached: str = ""
    failed: str = ""
    advice: str = ""
    body: str = ""


@dataclass(frozen=True, slots=True)
class FaultReport:
    """A region left out because its kernel is wrong or does not compile: a fault of this library, to be reported.

    `repro` is the folder that has the region alone with inputs and outputs, None when none was asked for.
    """

    kind: str
    label: str
    nodes: tuple[str, ...]
    outputs: tuple[str, ...]
    problem: str
    repro: str | None = None


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
    coverage: Coverage
    faults: tuple[FaultReport, ...] = ()
    fused_before: int = 0
    """Nodes of the input that are fused already; such a model is left as it is."""

    def with_timings(self, timings: Mapping[str, tuple[float, float]]) -> "Report":
        """The report with measured seconds, fused and unfused, of the regions whose operators `timings` has."""
        regions = tuple(
            replace(region, measured_fused=found[0], measured_unfused=found[1]) if found else region
            for region in self.regions
            for found in (timings.get(region.op),)
        )
        return replace(self, regions=regions)

    @property
    def kinds(self) -> dict[str, int]:
        """How many regions there are of each kind, most first."""
        return dict(Counter(region.kind for region in self.regions).most_common())

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values, tuples as lists; `coverage` also has the shares `nodes` and `flops`."""
        coverage = asdict(self.coverage) | {"nodes": self.coverage.nodes, "flops": self.coverage.flops}
        return _plain(asdict(self)) | {"coverage": _plain(coverage), "kinds": self.kinds}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
