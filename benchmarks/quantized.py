"""Quantised linear layers against ONNX Runtime and OpenVINO: python -m benchmarks.quantized [--quick] [--json FILE]

Each case is a whole model that fuses to one kernel: int8 with quantised input and output (QDQ), beside our own float32
layer of the same shape, or MatMulNBits, beside ONNX Runtime's kernels at accuracy levels 0 (float32 activations, as
ours) and 4 (activations rounded to bytes). All take turns in one process on THREADS threads, random data. Out: rows in
the common form, `{"case", "unit", "ours", "peers": {name: value}, "floor", "error"}`, medians in microseconds; `floor`
is the time of the multiply-adds at the measured peak of products of bytes, or of reading the weights and their scales
once at the measured rate of the cache level that holds them, whichever is longer; `error` is the largest error relative
to the output's own size that `verify` found.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from kernels import Machine, Point
from whole_models import Feeds, Row, describe, openvino_run, time_in_turns

from models import quantized, regions
from runtime.bench import bound_run, default_session
from runtime.compile import optimize
from runtime.options import Options
from runtime.session import load
from runtime.verify import verify
from tilecore.measure import measure_profile
from tilecore.toolchain import find_toolchain

THREADS = 2
SECONDS, QUICK_SECONDS = 4.0, 1.0
Runs = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Case:
    """One layer: rows × depth × columns; `bits` and `block` of weights that MatMulNBits packs, else int8 (QDQ).

    `zeros`: every block has a zero point.
    """

    rows: int
    depth: int
    columns: int
    bits: int = 0
    block: int = 0
    zeros: bool = False

    @property
    def name(self) -> str:
        """What the row is called."""
        points = " with zero points" if self.zeros else ""
        kind = f"int{self.bits} weights in blocks of {self.block}{points}" if self.bits else "int8 QDQ"
        return f"{kind} {self.rows}×{self.depth}×{self.columns}"

    @property
    def bytes(self) -> int:
        """What the weights take: levels, a float32 scale per block, and zero points of as many bits as the levels."""
        levels, bits = self.depth * self.columns, self.bits or 8
        blocks = levels // self.block if self.block else 0
        return levels * bits // 8 + blocks * 4 + (blocks * bits // 8 if self.zeros else 0)


CASES = (
    Case(128, 768, 768),
    Case(1, 4096, 4096, 4, 32),
    Case(128, 768, 3072),
    Case(128, 3072, 768),
    Case(512, 768, 3072),
    Case(512, 3072, 768),
    Case(1, 4096, 4096, 4, 128),
    Case(1, 4096, 4096, 8, 32),
    Case(1, 4096, 4096, 4, 16),
    Case(1, 4096, 4096, 4, 64),
    Case(1, 4096, 4096, 4, 32, zeros=True),
    Case(1, 4096, 4099, 4, 32),
    Case(1, 4096, 4096, 8, 128),
    Case(1, 4096, 4099, 8, 32, zeros=True),
    Case(16, 4096, 4096, 4, 32),
    Case(128, 4096, 4096, 4, 32),
)
QUICK = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the first cases only, measured briefly")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    options = replace(Options.from_environment(), threads=THREADS)
    measured = measure_profile(find_toolchain(options.cache / "objects", options.compiler), progress=lambda stage: None)
    machine = Machine(measured, THREADS, "int8")
    seconds = QUICK_SECONDS if arguments.quick else SECONDS
    rows: list[Row] = []
    chosen = [case for case in CASES if arguments.only in case.name]
    with tempfile.TemporaryDirectory(prefix="tilefuse-bench-") as folder:
        for case in chosen[:QUICK] if arguments.quick else chosen:
            products = case.rows * case.depth * case.columns
            floor = machine.floor(Point(case.name, {}, products, case.bytes))
            measure = _packed if case.bits else _coded
            rows.append(measure(case, Path(folder), options, floor * 1e6, seconds))
            print(describe(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _coded(case: Case, folder: Path, options: Options, floor: float, seconds: float) -> Row:
    model = quantized.linear(depth=case.depth, columns=case.columns)
    feeds = {"x": np.random.default_rng(0).standard_normal((1, case.rows, case.depth), dtype=np.float32)}
    ours, theirs, error = _sessions(model, "coded", feeds, folder, options)
    plain, _, _ = _sessions(regions.linear(depth=case.depth, columns=case.columns), "plain", feeds, folder, options)
    found = {"ours": ours, "onnxruntime": theirs, "ours in float32": plain}
    runs: Runs = {name: bound_run(session, feeds) for name, session in found.items()}
    runs |= {
        name: run for name, (run, _) in openvino_run(folder / "coded.onnx", feeds, options.precision, THREADS).items()
    }
    times = _micros(runs, seconds)
    return Row(case.name, "µs", times.pop("ours"), times, floor, error)


def _packed(case: Case, folder: Path, options: Options, floor: float, seconds: float) -> Row:
    feeds = {"x": np.random.default_rng(0).standard_normal((case.rows, case.depth), dtype=np.float32)}
    runs: Runs = {}
    error = 0.0
    for level in (0, 4):
        model = quantized.packed(
            depth=case.depth, columns=case.columns, bits=case.bits, block=case.block, level=level, zeros=case.zeros
        )
        ours, theirs, error = _sessions(model, f"packed{level}", feeds, folder, options)
        runs |= {f"ours level {level}": bound_run(ours, feeds), f"onnxruntime level {level}": bound_run(theirs, feeds)}
    times = _micros(runs, seconds)
    ours = min(times.pop(f"ours level {level}") for level in (0, 4))
    return Row(case.name, "µs", ours, times, floor, error)


def _sessions(
    model: onnx.ModelProto, name: str, feeds: Feeds, folder: Path, options: Options
) -> tuple[ort.InferenceSession, ort.InferenceSession, float]:
    """The fused and the original model, and the largest relative error. Exits where the product is not fused."""
    original, fused = folder / f"{name}.onnx", folder / f"{name}.fused.onnx"
    onnx.save(model, original)
    report = optimize(original, fused, options=options, progress=lambda stage: None, verify=False)
    if not any(region.kind == "contraction" for region in report.regions):
        sys.exit(f"{name}: the product is not fused: {report.misses}")
    verdict = verify(original, fused, inputs=feeds)
    if not verdict.ok:
        sys.exit(f"{name}: the fused model is wrong: {verdict.mismatch}")
    sessions = load(fused, threads=THREADS), default_session(original, THREADS)
    return *sessions, max(output.max_rel for output in verdict.outputs)


def _micros(runs: Runs, seconds: float) -> dict[str, float]:
    medians, _ = time_in_turns(runs, seconds)
    return {name: time * 1e3 for name, time in medians.items()}


if __name__ == "__main__":
    main()
