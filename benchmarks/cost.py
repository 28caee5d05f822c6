"""Fits the cost model to this machine and says how well it predicts: python -m benchmarks.cost [--quick] [--json FILE]

In: the grid of `cost_cases.py`. Every case is fused (whatever is predicted), run against ONNX Runtime's default session
on one thread, in turns, in seconds of that thread. Coefficients of `tilecore.terms` are the non-negative ones with the
least squares of relative errors, outliers weighed less. Out: predicted beside measured for every case, the cases where
the prediction decides wrongly, and with `--fit` tilecore/costs.py written anew for this machine's row of the table of
profiles.

A machine may be slowed down by others: every turn also times a trivial session, and times are scaled by how much slower
that is than at its best. `--keep FILE` holds measurements: cases found there are not measured again; removing the file
starts anew. --json writes `{"case", "unit", "ours", "peers": {"onnxruntime": …}, "floor", "error"}`: microseconds;
`error` is how far the predicted ratio is from the measured one, as a factor less 1.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from cost_cases import CostCase, cost_cases
from onnx import helper
from whole_models import Row

from fuser.find import find
from fuser.load import load as load_graph
from fuser.unfused import work_of
from runtime import inputs as model_inputs
from runtime.bench import bound_run, default_session
from runtime.compile import optimize
from runtime.cost import TIE, TIE_OF_ATTENTION
from runtime.options import Options
from runtime.session import load
from tilecore.canonical import canonical
from tilecore.costs import COSTS
from tilecore.predict import costs_for, nominal
from tilecore.profile import HardwareProfile, detect_profile
from tilecore.recommend import Machine, rank
from tilecore.terms import kernel_terms, operator_terms

SECONDS, QUICK_SECONDS = 0.35, 0.1
QUICK = 20  # every so many cases
LEAST = 0.15  # microseconds: what a session's own time hides
SLOWEST = 0.45  # of the machine at its best: beyond that, scaling says little
CLEAR = 0.15  # a measured gain or loss below this is neither
OUTLIER = 0.2  # log of a relative error that weighs half
ROUNDS = 15
TABLE = Path(__file__).parent.parent / "tilecore" / "costs.py"
HEADER = '''"""Coefficients of `tilecore.terms` per row of the table of profiles: `benchmarks/cost.py --fit`."""

from collections.abc import Mapping

'''
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """Microseconds of a case beside a session that does nothing: fused, by ONNX Runtime; and that session's own."""

    fused: float
    unfused: float
    tick: float


@dataclass(frozen=True)
class Point:
    """A case with its measured seconds and the terms of both sides."""

    name: str
    kind: str
    fused: float
    unfused: float
    fused_terms: Mapping[str, float]
    unfused_terms: Mapping[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few cases only, measured briefly")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="read and write measurements there")
    parser.add_argument("--fit", action="store_true", help="write the coefficients to tilecore/costs.py")
    arguments = parser.parse_args()
    cases = list(cost_cases())
    cases = cases[::QUICK] if arguments.quick else cases
    kept: dict[str, Measured] = {}
    if arguments.keep and arguments.keep.exists():
        kept = {name: Measured(**entry) for name, entry in json.loads(arguments.keep.read_text()).items()}
    options = replace(Options.from_environment(), fuse_all=True, threads=1, target=detect_profile().target.name)
    for case in cases:
        if name_of(case) not in kept:
            kept[name_of(case)] = measure(case, options, QUICK_SECONDS if arguments.quick else SECONDS)
            print(f"{name_of(case)}: {kept[name_of(case)]}", flush=True)
        if arguments.keep:
            arguments.keep.write_text(json.dumps({name: asdict(entry) for name, entry in kept.items()}, indent=0))
    profile = replace(nominal(detect_profile()), cores=1)
    best = min(entry.tick for entry in kept.values())
    points = [point_of(case, kept[name_of(case)], best, profile) for case in cases]
    costs = {**costs_for(profile)}
    if not arguments.quick:  # as many cases as coefficients say nothing
        costs = fitted([(p.fused_terms, p.fused) for p in points]) | fitted(
            [(p.unfused_terms, p.unfused) for p in points]
        )
    rows = [row_of(point, costs) for point in points]
    report(points, rows, costs)
    if arguments.fit:
        write_costs(profile.name, costs)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def name_of(case: CostCase) -> str:
    """What rows and measurements call it."""
    return f"{case.kind}: {case.name}"


def measure(case: CostCase, options: Options, seconds: float) -> Measured:
    """Times the case on one thread."""
    with tempfile.TemporaryDirectory(prefix="tilefuse-cost-") as text:
        folder = Path(text)
        model = case.build()
        onnx.save(model, folder / "model.onnx")
        optimize(folder / "model.onnx", folder / "fused.onnx", options=options, progress=lambda _: None, verify=False)
        feeds = model_inputs.generate(model, sizes={}, seed=0, masks=False)
        onnx.save(trivial(feeds), folder / "trivial.onnx")
        sessions = [load(folder / "fused.onnx", threads=1)]
        sessions += [default_session(folder / f"{name}.onnx", 1) for name in ("model", "trivial")]
        runs = [bound_run(session, feeds) for session in sessions[:2]]
        runs.append(bound_run(sessions[2], {**feeds, "tick": np.zeros(1, np.float32)}))
        fused, unfused, tick = in_turns(runs, seconds)
    return Measured(fused - tick, unfused - tick, tick)


def trivial(feeds: Mapping[str, npt.NDArray[Any]]) -> onnx.ModelProto:
    """A model that takes the same inputs and computes one number."""
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    one = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (1,)) for name in ("tick", "tock")]
    graph = helper.make_graph([helper.make_node("Relu", ["tick"], ["tock"])], "trivial", [*inputs, one[0]], one[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def in_turns(runs: Sequence[Callable[[], None]], seconds: float) -> list[float]:
    """Median microseconds of this thread of each run."""
    counts: list[int] = []
    for run in runs:
        for _ in range(3):
            run()
        start = time.perf_counter()
        run()
        counts.append(max(1, min(200, int(1e-3 / max(time.perf_counter() - start, 1e-7)))))
    taken: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + seconds
    while len(taken[0]) < 5 or time.perf_counter() < end:
        for run, count, times in zip(runs, counts, taken, strict=True):
            run()  # the others' data leave the caches
            start = time.thread_time()
            for _ in range(count):
                run()
            times.append((time.thread_time() - start) / count * 1e6)
    return [statistics.median(times) for times in taken]


def point_of(case: CostCase, measured: Measured, best: float, profile: HardwareProfile) -> Point:
    """The case's terms, and its times as they are when nothing slows the machine down."""
    speed = min(1.0, max(SLOWEST, best / measured.tick))
    machine = Machine(profile, profile.target, {})
    fused: dict[str, float] = {}
    unfused: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="tilefuse-cost-") as folder:
        onnx.save(case.build(), Path(folder) / "model.onnx")
        found = find(load_graph(Path(folder) / "model.onnx"))
        for region in found.regions:
            spec = canonical(region.spec)
            add(fused, kernel_terms(spec, rank(spec, profile, profile.target)[0].config, machine))
            works = work_of(region.nodes, found.shapes, {})
            for work in works:
                add(unfused, operator_terms(work, sum(work.weights for work in works), machine))
    ours, theirs = (max(us, LEAST) * speed * 1e-6 for us in (measured.fused, measured.unfused))
    return Point(name_of(case), case.kind, ours, theirs, fused, unfused)


def add(total: dict[str, float], terms: Mapping[str, float]) -> None:
    """Sums by name."""
    for name, seconds in terms.items():
        total[name] = total.get(name, 0.0) + seconds


def fitted(observations: Sequence[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """Coefficients by term; those that come out as 0 are left out."""
    names = sorted({name for terms, _ in observations for name, value in terms.items() if value > 0})
    table = np.array([[terms.get(name, 0.0) / seconds for name in names] for terms, seconds in observations])
    scale = np.linalg.norm(table, axis=0)
    table /= scale
    weights = np.ones(len(table))
    solution = np.zeros(len(names))
    for _ in range(ROUNDS):
        solution = least_squares(table * weights[:, None], weights)
        predicted = table @ solution
        error = np.abs(np.log(np.maximum(predicted, 1e-3)))
        weights = 1 / np.sqrt(1 + (error / OUTLIER) ** 2) / np.maximum(1, predicted)
    return {name: float(f"{value:.4g}") for name, value in zip(names, solution / scale, strict=True) if value > 0}


def least_squares(table: Array, wanted: Array) -> Array:
    """The x ≥ 0 with the least |table · x − wanted|: the active set method of Lawson and Hanson (1974)."""
    count = table.shape[1]
    x, free = np.zeros(count), np.zeros(count, bool)
    for _ in range(3 * count):
        slope = table.T @ (wanted - table @ x)
        if free.all() or slope[~free].max() < 1e-9:
            break
        free[np.argmax(np.where(free, -np.inf, slope))] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(table[:, free], wanted, rcond=None)[0]
            if trial[free].min() > 0:
                break
            stuck = free & (trial <= 0)
            x = x + np.min(x[stuck] / (x[stuck] - trial[stuck])) * (trial - x)
            free &= x > 1e-12
        x = trial
    return x


def row_of(point: Point, costs: Mapping[str, float]) -> Row:
    """The case with how far its predicted ratio is off."""
    predicted, measured = ratio_of(point, costs), point.unfused / point.fused
    error = math.exp(abs(math.log(predicted / measured))) - 1
    return Row(point.name, "µs", point.fused * 1e6, {"onnxruntime": point.unfused * 1e6}, 0.0, error)


def ratio_of(point: Point, costs: Mapping[str, float]) -> float:
    """How many times as fast as its nodes the region is predicted to be."""
    return total(point.unfused_terms, costs) / total(point.fused_terms, costs)


def total(terms: Mapping[str, float], costs: Mapping[str, float]) -> float:
    """Predicted seconds."""
    return sum(costs.get(name, 0.0) * seconds for name, seconds in terms.items())


def report(points: Sequence[Point], rows: Sequence[Row], costs: Mapping[str, float]) -> None:
    """Prints every case, errors by kind, and the decisions that are wrong."""
    wrong: list[str] = []
    for point in points:
        gain, predicted = point.unfused / point.fused, ratio_of(point, costs)
        fused, unfused = total(point.fused_terms, costs), total(point.unfused_terms, costs)
        line = (
            f"{point.name:42} fused {point.fused * 1e6:9.1f} µs (predicted {fused * 1e6:9.1f})  "
            f"onnxruntime {point.unfused * 1e6:9.1f} ({unfused * 1e6:9.1f})  {gain:6.2f}× ({predicted:.2f}×)"
        )
        print(line)
        declined = predicted * (TIE_OF_ATTENTION if point.kind == "attention" else TIE) < 1
        if (gain < 1 - CLEAR and not declined) or (gain > 1 + CLEAR and declined):
            wrong.append(line)
    for kind in dict.fromkeys(point.kind for point in points):
        errors = [row.error for row, point in zip(rows, points, strict=True) if point.kind == kind]
        print(
            f"{kind}: half of the ratios within {np.median(errors):.0%}, "
            f"nine tenths within {np.quantile(errors, 0.9):.0%}"
        )
    print(f"{len(points) - len(wrong)} of {len(points)} decided rightly; not:", *wrong, sep="\n  ")


def write_costs(name: str, costs: Mapping[str, float]) -> None:
    """Put the coefficients of a row into tilecore/costs.py, those of other rows staying."""
    lines: list[str] = []
    for row, values in sorted({**COSTS, name: costs}.items()):
        lines += [
            f'    "{row}": {{',
            *(f'        "{term}": {value:g},' for term, value in sorted(values.items())),
            "    },",
        ]
    text = "\n".join(lines)
    TABLE.write_text(f"{HEADER}COSTS: Mapping[str, Mapping[str, float]] = {{\n{text}\n}}\n")


if __name__ == "__main__":
    main()
