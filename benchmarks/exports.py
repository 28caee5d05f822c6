"""Fuses and verifies every model of a folder: python -m benchmarks.exports DIR [--quick] [--scan] [--json FILE]

In: a folder of ONNX files. Out: one row per model: nodes before and after, regions by kind, attention found and fused,
the shares of floating-point operations and nodes inside regions, operators left that move data, the verdict with the
largest relative error, and seconds. `--scan` finds regions and compiles and runs nothing. A model that cannot be fused
or run is a row with the reason. The exit status is 1 when a fused model is wrong or a region had to be left out.

Models are taken from the smallest file on, until `--seconds` are over. Rows are written to `--json` as they come; rows
of other models that stand there are kept, each with the day and machine of its run. `--page` writes all rows as
Markdown.
"""

import argparse
import datetime
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from fuser.coverage import coverage_of, workload_of
from fuser.find import find
from fuser.load import LoadError as ModelError
from fuser.load import load
from fuser.rewrite import Replacement, rewrite
from runtime.compile import CompileError, optimize
from runtime.inputs import InputError
from runtime.options import Options
from runtime.report import Report
from runtime.session import LoadError
from runtime.verify import VerifyError, verify

QUICK = 6  # models, the smallest files first
SCANNED = "not run"
PAGE_HEAD = """# Real exports

What `tilefuse optimize` makes of exports of PyTorch models, old exporter (`ts`) and new (`dynamo`), weights drawn at
random, layers reduced. `python -m benchmarks.exports DIR --json FILE --page FILE` writes this page;
[the rows](../benchmarks/results/exports.json) have the reason of every miss. "ok" was fused, run and compared with the
original, and what the cost model of that machine predicts to be slower as one kernel was left outside; "not run" was
only scanned (`--scan`), without the cost model. Every symbolic dim counts as 128. Where and when each row was made:
"""


@dataclass(frozen=True)
class Sweep:
    """One model's row. `verdict` is "ok", "not run", "wrong: …" or "failed: …"; `error` is relative to the output."""

    model: str
    verdict: str
    seconds: float
    error: float | None = None
    nodes_before: int = 0
    nodes_after: int = 0
    regions: dict[str, int] = field(default_factory=dict[str, int])
    attention_found: int = 0
    attention_fused: int = 0
    flops: float = 0.0
    nodes: float = 0.0
    movers: tuple[str, ...] = ()
    misses: tuple[str, ...] = ()
    run: str = ""  # day and machine


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--quick", action="store_true", help=f"the {QUICK} smallest models only")
    parser.add_argument("--scan", action="store_true", help="only find regions: no kernels, no cost model, no runs")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--page", type=Path, help="write the rows to this file as Markdown")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no model after this time")
    parser.add_argument("--only", default="", help="models whose file name contains this")
    arguments = parser.parse_args()
    models = sorted(path for path in arguments.folder.glob("*.onnx") if arguments.only in path.name)
    if not models:
        sys.exit(f"{arguments.folder}: no ONNX models with {arguments.only!r} in their names")
    models.sort(key=lambda path: path.stat().st_size)
    kept = read(arguments.json) if arguments.json is not None and arguments.json.is_file() else {}
    rows: list[Sweep] = []
    where, end = f"{datetime.date.today().isoformat()}, {machine()}", time.monotonic() + arguments.seconds
    for model in models[:QUICK] if arguments.quick else models:
        if time.monotonic() > end:
            break
        row = replace(survey(model) if arguments.scan else sweep(model), run=where)
        rows.append(row)
        print(describe(row), flush=True)
        kept[row.model] = row
        if arguments.json is not None:
            text = json.dumps([asdict(kept[name]) for name in sorted(kept)], indent=1)
            arguments.json.write_text(text + "\n")
    wrong = [row.model for row in rows if row.verdict not in ("ok", SCANNED)]
    if not arguments.scan:
        print(f"{len(rows) - len(wrong)} of {len(rows)} models are fused and right")
    if wrong:
        print(f"not: {', '.join(wrong)}")
    if arguments.page is not None:
        arguments.page.write_text(page([kept[name] for name in sorted(kept)]))
    sys.exit(1 if any(row.verdict.startswith("wrong") for row in rows) else 0)


def read(path: Path) -> dict[str, Sweep]:
    """Rows that were written before, by model."""
    rows = [
        Sweep(**line | {"movers": tuple(line["movers"]), "misses": tuple(line["misses"])})
        for line in json.loads(path.read_text())
    ]
    return {row.model: row for row in rows}


def machine() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return f"{len(names)}× {' '.join(names[0].split())}" if names else "unknown processor"


def page(rows: Sequence[Sweep]) -> str:
    """The rows as a page in Markdown, with the reason of every operator that still moves data."""
    runs = {run: f"{letter}" for letter, run in zip("abcdefghij", sorted({row.run for row in rows}), strict=False)}
    lines = [PAGE_HEAD, *(f"* {letter}: {run or 'an earlier version'}" for run, letter in runs.items()), ""]
    kinds = ("contraction", "row", "scan")
    heads = ["model", "nodes", "after", "attention", *kinds, "FLOPs inside", "nodes inside", "moves left", "verdict"]
    lines += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in rows:
        left = Counter(mover.split()[0] for mover in row.movers)
        cells = [
            *(row.model.removesuffix(".onnx"), row.nodes_before, row.nodes_after),
            f"{row.attention_fused} of {row.attention_found}",
            *(row.regions.get(kind, 0) for kind in kinds),
            *(f"{share:.1%}" for share in (row.flops, row.nodes)),
            ", ".join(f"{count} {operator}" for operator, count in left.items()) or "–",
            f"{row.verdict} ({runs[row.run]})",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "Moves left, and why:", "", *moves_left(rows)]
    return "\n".join(lines) + "\n"


def moves_left(rows: Sequence[Sweep]) -> Iterator[str]:
    """A line per operator and reason, with the models."""
    models: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for mover in row.movers:
            words, _, reason = mover.partition(" (")
            models.setdefault((words.split()[0], reason.rstrip(")")), []).append(row.model.removesuffix(".onnx"))
    for (operator, reason), names in models.items():
        yield f"* {operator} in {', '.join(dict.fromkeys(names))}: {reason}."


def sweep(model: Path) -> Sweep:
    """Fuses one model and compares it with the original."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tilefuse-sweep-") as folder:
        fused = Path(folder) / "fused.onnx"
        try:
            report = optimize(
                model, fused, options=Options.from_environment(), progress=lambda stage: None, verify=False
            )
            verdict = verify(model, fused)
        except (CompileError, InputError, LoadError, VerifyError) as error:
            return Sweep(model.name, f"failed: {' '.join(str(error).split())[:300]}", time.monotonic() - start)
    words = (
        "ok"
        if verdict.ok
        else f"wrong: {verdict.mismatch}; {', '.join(r.node for r in verdict.regions) or 'no region'}"
    )
    error = max((output.max_rel for output in verdict.outputs), default=None)
    return _row(model.name, report, words, error, time.monotonic() - start)


def survey(model: Path) -> Sweep:
    """The regions of one model, which is not run."""
    start = time.monotonic()
    try:
        loaded = load(model)
    except ModelError as error:
        return Sweep(model.name, f"failed: {' '.join(str(error).split())[:300]}", time.monotonic() - start)
    before = sum(1 for _ in loaded.graph.all_nodes())
    found = find(loaded)
    workload = workload_of(found.model, found.shapes)
    parts = [Replacement(region, f"Fused{number}") for number, region in enumerate(found.regions)]
    rewritten = rewrite(found.model, parts).model
    coverage = coverage_of(workload, found.regions, rewritten)
    kinds = dict(Counter(region.kind for region in found.regions))
    fused = kinds.get("attention", 0)
    return Sweep(
        model.name,
        SCANNED,
        time.monotonic() - start,
        nodes_before=before,
        nodes_after=sum(1 for _ in rewritten.graph),
        regions=kinds,
        attention_found=fused + sum(miss.kind == "attention" for miss in found.misses),
        attention_fused=fused,
        flops=coverage.flops,
        nodes=coverage.nodes,
        movers=coverage.movers,
        misses=tuple(f"{miss.kind} {miss.op} {miss.node}: {miss.reason}" for miss in found.misses),
    )


def _row(name: str, report: Report, verdict: str, error: float | None, seconds: float) -> Sweep:
    fused = report.kinds.get("attention", 0)
    missed = sum(miss.kind == "attention" for miss in report.misses)
    return Sweep(
        name,
        verdict,
        seconds,
        error=error,
        nodes_before=report.nodes_before,
        nodes_after=report.nodes_after,
        regions=report.kinds,
        attention_found=fused + missed,
        attention_fused=fused,
        flops=report.coverage.flops,
        nodes=report.coverage.nodes,
        movers=report.coverage.movers,
        misses=tuple(f"{miss.kind} {miss.op} {miss.node}: {miss.reason}" for miss in report.misses),
    )


def describe(row: Sweep) -> str:
    """One line for people."""
    if row.verdict.startswith("failed"):
        return f"{row.model:28} {row.verdict}"
    kinds = " ".join(f"{kind} {count}" for kind, count in row.regions.items())
    movers: dict[str, int] = {}
    for mover in row.movers:
        movers[mover.split()[0]] = movers.get(mover.split()[0], 0) + 1
    left = " ".join(f"{operator} {count}" for operator, count in movers.items()) or "none"
    return (
        f"{row.model:28} {row.nodes_before:4} → {row.nodes_after:3} nodes  attention {row.attention_fused} of "
        f"{row.attention_found}  flops {row.flops:6.1%}  nodes {row.nodes:6.1%}  [{kinds}]  movers left: {left}  "
        f"{row.verdict}, error {row.error or 0:.1e}, {row.seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
