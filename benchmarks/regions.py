"""Fused regions against ONNX Runtime's defaults: python -m benchmarks.regions [--quick] [--json FILE]

Each case is a whole model that fuses to one kernel (two with a padding mask, which models share between layers). Both
versions run in one process in turns on THREADS threads, fp32, random data. Out: one row per case, `{"case", "unit",
"ours", "peers": {name: value}, "floor", "error"}`: medians in microseconds; `floor` is the multiply-adds at the
machine's measured peak or the bytes (each tensor once) at its measured copy rate, whichever is longer; `error` is the
largest error relative to the output's own size that `verify` found.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from whole_models import Row, measure_peak

from models import regions
from models.graph import write
from runtime.bench import bench
from runtime.compile import optimize
from runtime.options import Options
from runtime.verify import verify

THREADS = 2
SECONDS, QUICK_SECONDS = 5.0, 1.5
HEADS, SIZE, HIDDEN = 12, 64, 768
COPIES = 8  # of each thread in one measurement


@dataclass(frozen=True)
class Case:
    """One region: how to build it, its inputs' shape, its multiply-adds and the bytes that it must move."""

    name: str
    build: Callable[[], onnx.ModelProto]
    inputs: dict[str, tuple[int, ...]]
    multiply_adds: int
    moved: int


def attention_case(seq: int, *, causal: bool = False, masked: bool = False) -> Case:
    """Attention at batch 1 with 12 heads of 64."""
    shape = (1, seq, HEADS * SIZE)
    inputs = dict.fromkeys(("q", "k", "v"), shape) | ({"mask": (1, seq)} if masked else {})
    pairs = seq * (seq + 1) // 2 if causal else seq * seq
    label = "causal" if causal else "padding mask" if masked else "no mask"
    return Case(
        f"attention S={seq}, {label}",
        lambda: regions.attention(causal=causal, masked=masked),
        inputs,
        2 * HEADS * SIZE * pairs,
        4 * 4 * seq * HEADS * SIZE,
    )


def linear_case(rows: int, depth: int, columns: int, *, gelu: bool = False) -> Case:
    """A projection with bias, and GELU on request."""
    return Case(
        f"linear {rows}×{depth}×{columns}{' + GELU' if gelu else ''}",
        lambda: regions.linear(depth=depth, columns=columns, gelu=gelu),
        {"x": (1, rows, depth)},
        rows * depth * columns,
        4 * (rows * depth + depth * columns + rows * columns),
    )


CASES = (
    attention_case(512),
    attention_case(512, masked=True),
    attention_case(512, causal=True),
    attention_case(128),
    attention_case(1500),
    Case(
        "skip + LayerNorm 512×768",
        regions.skip_layer_norm,
        {"x": (1, 512, HIDDEN), "skip": (1, 512, HIDDEN)},
        0,
        4 * 3 * 512 * HIDDEN,
    ),
    linear_case(128, 768, 768),
    linear_case(128, 768, 3072, gelu=True),
    linear_case(128, 3072, 768),
    linear_case(512, 768, 768),
    linear_case(512, 768, 3072, gelu=True),
    linear_case(512, 3072, 768),
    linear_case(1, 768, 768),
)  # fmt: skip
QUICK = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the first cases only, measured briefly")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    options = replace(Options.from_environment(), threads=THREADS)
    peak, copy_rate = measure_peak(options, THREADS), measure_copy_rate()
    print(
        f"peak: {peak / 1e9:.1f} G multiply-adds/s, copy {copy_rate / 1e9:.1f} GB/s (read + written), {THREADS} threads"
    )
    cases = [case for case in CASES if arguments.only in case.name]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tilefuse-bench-") as folder:
        for case in cases[:QUICK] if arguments.quick else cases:
            seconds = QUICK_SECONDS if arguments.quick else SECONDS
            rows.append(
                run(
                    case,
                    Path(folder),
                    options,
                    floor=max(case.multiply_adds / peak, case.moved / copy_rate),
                    seconds=seconds,
                )
            )
            print(describe(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def run(case: Case, folder: Path, options: Options, *, floor: float, seconds: float) -> Row:
    """Builds, fuses, checks and times one case."""
    original = write(case.build(), folder / "region.onnx")
    fused = folder / "region.fused.onnx"
    report = optimize(original, fused, options=options, progress=lambda stage: None, verify=False)
    if report.misses or report.nodes_after != len(report.regions):
        sys.exit(f"{case.name}: not all of it is fused: {report.misses}")
    feeds = make_feeds(case)
    verdict = verify(original, fused, inputs=feeds)
    if not verdict.ok:
        sys.exit(f"{case.name}: the fused model is wrong: {verdict.mismatch}")
    result = bench(fused, original, inputs=feeds, threads=THREADS, seconds=seconds)
    error = max(output.max_rel for output in verdict.outputs)
    peers = {"onnxruntime": result.original.median_ms * 1e3}
    return Row(case.name, "µs", result.fused.median_ms * 1e3, peers, floor * 1e6, error)


def make_feeds(case: Case) -> dict[str, np.ndarray[Any, Any]]:
    """Standard normal inputs; a mask with the last tenth hidden."""
    rng = np.random.default_rng(0)
    feeds: dict[str, np.ndarray[Any, Any]] = {}
    for name, shape in case.inputs.items():
        if name == "mask":
            feeds[name] = (np.arange(shape[-1]) < shape[-1] * 0.9).astype(np.int64)[None]
        else:
            feeds[name] = rng.standard_normal(shape, dtype=np.float32)
    return feeds


def measure_copy_rate() -> float:
    """Bytes per second of copies on THREADS threads that fit the last-level cache, reads and writes counted."""
    pairs = [np.random.default_rng(0).standard_normal((2, 512 * 768), dtype=np.float32) for _ in range(THREADS)]
    best = float("inf")
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(50):
            start = time.perf_counter()
            list(pool.map(lambda pair: [np.copyto(pair[1], pair[0]) for _ in range(COPIES)], pairs))
            best = min(best, time.perf_counter() - start)
    return THREADS * COPIES * 2 * pairs[0][0].nbytes / best


def describe(row: Row) -> str:
    """One line for people."""
    peer = row.peers["onnxruntime"]
    return (
        f"{row.case:32} {row.ours:9.0f} µs  onnxruntime {peer:9.0f} µs  {peer / row.ours:5.2f}×  "
        f"{row.floor / row.ours:4.0%} of the floor's speed  error {row.error:.1e}"
    )


if __name__ == "__main__":
    main()
