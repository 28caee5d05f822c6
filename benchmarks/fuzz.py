"""Fuses random attention and checks it: python -m benchmarks.fuzz [--graphs N] [--seed S] [--jobs J] [--end-to-end]

With --log FILE, what became of each graph is added to that file as soon as it is known, and graphs that stand there
already are not done again: a long run may be stopped and taken up.

In: the mixes of `models.attention_mix`, one per seed. Each graph is scanned, and must be one attention region. Without
--end-to-end nothing is compiled: every region's spec is evaluated in float64 and compared with the nodes it replaces,
and the scanned model with the original, at two sizes of every symbolic dim. With it, the graph is optimised and run in
ONNX Runtime against the original. Out: a table by feature (graphs, fused, wrong), the reason of every miss, the seed of
every wrong graph; these are saved in --save. The exit status is 1 when a graph is wrong.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from whole_models import Row

from fuser.find import Found, find
from fuser.load import load
from models.attention_mix import FEATURES, Mix, build, feeds, seeded
from runtime.compile import CompileError, optimize
from runtime.inputs import InputError
from runtime.options import Options
from runtime.oracle import Mode, evaluate
from runtime.session import LoadError
from runtime.verify import VerifyError, verify
from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import evaluate as evaluate_spec

Array = npt.NDArray[Any]

QUICK = 40  # graphs
TOLERANCE = 1e-6  # of float64 results, relative to the largest element: constants of the model stay float32
ROUNDING = {DType.F16: 2.0**-11, DType.BF16: 2.0**-8}  # of an element that a spec stores in these types
FOLDED = 0.5  # roundings of the largest element: constants that a spec folds (√d) are rounded as the model says


@dataclass(frozen=True)
class Outcome:
    """What became of the graph of one seed. `wrong` says what differs, "" when nothing does."""

    seed: int
    options: dict[str, str]
    fused: bool
    wrong: str
    reasons: tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--graphs", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--seconds", type=float, help="begin no graph after this time")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} graphs")
    parser.add_argument("--end-to-end", action="store_true", help="compile and run in ONNX Runtime")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--log", type=Path, help="a line of JSON per graph; those in it are not done again")
    parser.add_argument("--save", type=Path, default=Path("fuzz-wrong"), help="folder for wrong graphs")
    arguments = parser.parse_args()
    count = QUICK if arguments.quick else arguments.graphs
    deadline = None if arguments.seconds is None else time.time() + arguments.seconds
    work = partial(attempt, end_to_end=arguments.end_to_end, save=arguments.save, deadline=deadline)
    seeds = range(arguments.seed, arguments.seed + count)
    done = [outcome for outcome in logged(arguments.log) if outcome.seed in seeds]
    known = {outcome.seed for outcome in done}
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for task in as_completed([pool.submit(work, seed) for seed in seeds if seed not in known]):
            if (outcome := task.result()) is None:
                continue
            done.append(outcome)
            if arguments.log is not None:
                with arguments.log.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
    done.sort(key=lambda outcome: outcome.seed)
    report(done)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows(done)], indent=1) + "\n")
    sys.exit(1 if any(outcome.wrong for outcome in done) else 0)


def logged(path: Path | None) -> list[Outcome]:
    """The graphs of an earlier run."""
    if path is None or not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [Outcome(**line | {"reasons": tuple(line["reasons"])}) for line in lines]


def attempt(seed: int, *, end_to_end: bool, save: Path, deadline: float | None) -> Outcome | None:
    """The outcome of one seed; None when the time is up. A wrong graph is saved."""
    if deadline is not None and time.time() > deadline:
        return None
    mix = seeded(seed)
    model = build(mix)
    with tempfile.TemporaryDirectory(prefix="tilefuse-fuzz-") as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(model, path)
        try:
            fused, reasons, wrong = (run if end_to_end else scan)(mix, model, path)
        except Exception as error:  # noqa: BLE001 - whatever the fuser raises is a finding, told with its place
            place = traceback.extract_tb(error.__traceback__)[-1]
            words = " ".join(str(error).split())[:300]
            fused, reasons = False, ()
            wrong = f"{type(error).__name__}: {words} ({Path(place.filename).name}:{place.lineno})"
    if wrong:
        save.mkdir(parents=True, exist_ok=True)
        onnx.save(model, save / f"{seed}.onnx")
        for i, sizes in enumerate(mix.sizes):
            np.savez(save / f"{seed}.inputs{i}.npz", allow_pickle=False, **feeds(mix, sizes, model))
    return Outcome(seed, dict(mix.options), fused, wrong, reasons)


def scan(mix: Mix, model: onnx.ModelProto, path: Path) -> tuple[bool, tuple[str, ...], str]:
    """Whether one attention was found, why not, and what is wrong, without a compiler."""
    found = find(load(path))
    reasons = tuple(f"{miss.kind} {miss.op}: {miss.reason}" for miss in found.misses if miss.kind == "attention")
    fused = sum(region.kind == "attention" for region in found.regions) == 1
    for sizes in mix.sizes:
        wrong = difference(found, model, feeds(mix, sizes, model))
        if wrong:
            return fused, reasons, f"{wrong} for {dict(sizes)}"
    return fused, reasons, ""


def difference(found: Found, model: onnx.ModelProto, inputs: dict[str, Array]) -> str:
    """The first value that is not what the original computes; "" when there is none."""
    outputs = [value.name for value in model.graph.output]
    names = {value.name or "" for region in found.regions for value in (*region.inputs, *region.outputs)}
    asked = sorted(names | set(outputs))
    loaded = ir.to_proto(found.model)
    ranged, unbounded = (
        evaluate(loaded, Path(), inputs, asked, mode=mode).values for mode in (Mode.RANGE, Mode.UNBOUNDED)
    )
    original = evaluate(model, Path(), inputs, outputs).values
    for name in outputs:
        if not close(ranged[name], original[name]):
            return f"{name}: the loaded model differs from the original"
    for region in found.regions:
        arrays = {tensor.name: ranged[tensor.name] for tensor in region.spec.inputs}
        results = evaluate_spec(region.spec, arrays)
        tensors = [result.place.tensor for result in region.spec.outputs]
        stored = {tensor.name: ROUNDING.get(tensor.dtype, 0.0) for tensor in tensors}
        for value in region.outputs:
            name = value.name or ""
            if not any(close(results[name], wanted[name], stored[name]) for wanted in (ranged, unbounded)):
                return f"{region.kind} region → {name}: the spec differs from the nodes"
    return ""


def close(actual: Array, expected: Array, rounding: float = 0.0) -> bool:
    """Same shape, same NaN and infinities, else equal up to `rounding` of each element (and FOLDED)."""
    if actual.shape != expected.shape:
        return False
    finite = np.isfinite(expected)
    scale = max(np.abs(expected[finite].astype(np.float64)).max(initial=0.0), TOLERANCE)
    with np.errstate(invalid="ignore"):
        allowed = (TOLERANCE + FOLDED * rounding) * scale + rounding * np.abs(expected.astype(np.float64))
        near = np.abs(actual.astype(np.float64) - expected.astype(np.float64)) <= allowed
    same = (actual == expected) | (np.isnan(actual.astype(np.float64)) & np.isnan(expected.astype(np.float64)))
    return bool(np.where(finite, near, same).all())


def run(mix: Mix, model: onnx.ModelProto, path: Path) -> tuple[bool, tuple[str, ...], str]:
    """Whether one attention was fused, why not, and what is wrong, with native kernels in ONNX Runtime."""
    output = path.with_name("model.fused.onnx")
    options = Options.from_environment()
    try:
        report = optimize(path, output, options=options, progress=lambda stage: None, verify=False)
        reasons = tuple(f"{miss.kind} {miss.op}: {miss.reason}" for miss in report.misses if miss.kind == "attention")
        fused = report.kinds.get("attention", 0) == 1
        if report.faults:
            return fused, reasons, f"left out as broken: {' '.join(report.faults[0].problem.split())[:300]}"
        for inputs in (None, *(feeds(mix, sizes, model) for sizes in mix.sizes)):
            verdict = verify(path, output) if inputs is None else verify(path, output, inputs=inputs)
            if not verdict.ok:
                nodes = ", ".join(region.node for region in verdict.regions) or "no region"
                return fused, reasons, f"{verdict.mismatch}; {nodes}"
    except (CompileError, InputError, LoadError, VerifyError) as error:
        return False, (), f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return fused, reasons, ""


def report(outcomes: Sequence[Outcome]) -> None:
    """The table, the misses by reason and the wrong graphs."""
    print(f"{'feature':12} {'option':20} {'graphs':>6} {'fused':>6} {'wrong':>6}")
    for feature, options in FEATURES.items():
        for option in options:
            chosen = [outcome for outcome in outcomes if outcome.options[feature] == option]
            print(f"{feature:12} {option:20} {counts(chosen)}")
    print(f"{'all':12} {'':20} {counts(outcomes)}")
    reasons = Counter("; ".join(o.reasons) or "no reason given" for o in outcomes if not o.fused)
    for reason, count in reasons.most_common():
        seeds = [o.seed for o in outcomes if not o.fused and ("; ".join(o.reasons) or "no reason given") == reason]
        print(f"missed {count} times, seeds {seeds[:8]}: {reason}")
    for outcome in outcomes:
        if outcome.wrong:
            print(f"wrong: seed {outcome.seed}: {outcome.wrong} ({Mix(outcome.options).text})")


def rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """Per option, and for all, how many graphs and the share that fused in percent; `error` counts wrong graphs."""
    groups = {"all": list(outcomes)} | {
        f"{feature}={option}": [outcome for outcome in outcomes if outcome.options[feature] == option]
        for feature, options in FEATURES.items()
        for option in options
    }
    return [
        Row(
            f"{case}, {len(group)} graphs",
            "% fused",
            100 * sum(o.fused for o in group) / len(group),
            {},
            100.0,
            sum(bool(o.wrong) for o in group),
        )
        for case, group in groups.items()
        if group
    ]


def counts(outcomes: Sequence[Outcome]) -> str:
    """Graphs, fused and wrong."""
    fused, wrong = sum(o.fused for o in outcomes), sum(bool(o.wrong) for o in outcomes)
    return f"{len(outcomes):6} {fused:6} {wrong:6}"


if __name__ == "__main__":
    main()
