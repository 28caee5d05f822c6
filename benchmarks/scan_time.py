"""How long finding regions takes in a large graph: python -m benchmarks.scan_time [--quick] [--json FILE]

The model is a stack of encoder layers with two thousand (`--quick`) or five thousand nodes after loading, symbolic
batch and length. Times are user seconds of this process, so that other processes do not count. "Scan and lower" is the
search with lowering to specs and the cost model's questions; "half" is the same for half the layers, which shows
whether time grows with size alone. Out: a row `{"case", "unit", "ours", "peers", "floor", "error"}` per stage; there
is no peer.
"""

import argparse
import json
import resource
import tempfile
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from whole_models import Row

from fuser.load import load
from fuser.scan import scan
from fuser.shapes import infer
from models import bert
from runtime.cost import machine_cost
from tilecore.profile import detect_profile

LAYERS, QUICK_LAYERS = 80, 32


@dataclass(frozen=True)
class Stages:
    """User seconds per stage for one graph."""

    case: str
    nodes: int
    regions: int
    load: float
    infer: float
    scan: float


def main() -> None:
    """Measure both sizes, print a line each, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller graph")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    arguments = parser.parse_args()
    layers = QUICK_LAYERS if arguments.quick else LAYERS
    measured = [measure("half", layers // 2), measure("whole", layers)]
    for row in measured:
        print(
            f"{row.case:6} {row.nodes:6} nodes, {row.regions:4} regions: "
            f"load {row.load:.2f} s, infer {row.infer:.2f} s, scan and lower {row.scan:.2f} s"
        )
    if arguments.json:
        rows = [
            Row(f"{graph.case}, {graph.nodes} nodes: {stage}", "s", seconds, {}, 0.0, 0.0)
            for graph in measured
            for stage, seconds in (("load", graph.load), ("infer", graph.infer), ("scan and lower", graph.scan))
        ]
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def measure(case: str, layers: int) -> Stages:
    """One stack of so many layers."""
    with tempfile.TemporaryDirectory() as folder:
        path = bert.build(Path(folder) / "stack.onnx", size=bert.Size(layers=layers))
        times = [user_seconds()]
        model = load(path)
        times.append(user_seconds())
        shapes = infer(model)
        times.append(user_seconds())
        profile = detect_profile()
        regions, _ = scan(model, shapes, machine_cost(profile, profile.target, fuse_all=False))
        times.append(user_seconds())
        taken = [after - before for before, after in pairwise(times)]
        return Stages(case, len(list(model.graph)), len(regions), *taken)


def user_seconds() -> float:
    """User time of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


if __name__ == "__main__":
    main()
