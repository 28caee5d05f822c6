"""CUDA kernels beside those of every library that is installed, on one card: correct first, then medians of interleaved
graph replays.

    python -m benchmarks.h100 [--quick] [--only WORD] [--jobs N] [--json FILE] [--plot FILE]

Peers are torch's cuBLAS, cuBLASLt and cuDNN, and Triton, TileLang, quack and FlashAttention 4 where they are installed.
Inputs are random, and the result of everybody is compared with float32 before anything is timed. Peers of a case take
turns in shuffled order in one process, because the power cap moves clocks by more than kernels differ; a ratio is one
of this run only. What is bound by memory takes turns over several sets of inputs, which together do not fit the L2
cache. Rows are compared with a copy of as many bytes.
"""

import argparse
import json
import math
import multiprocessing
import random
import statistics
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import h100_attention
import h100_products
import h100_rows
from chart import plot
from h100_case import Arrays, Case, Run, Tiles, torch

from runtime.options import Options
from tilecore.cuda.compile import CudaKernel, compile_cuda
from tilecore.cuda.errors import CudaError
from tilecore.cuda.launch import Launcher

TOLERANCE = 4e-3  # of the norm, against float32
SLACK = 8e-3  # for others, some of which round more
ROUNDS, TARGET_MS = 9, 4.0  # of one peer: measurements, and the length of each
L2_BYTES = 150e6  # of all sets of inputs together, three times what the cache holds
AMONG = ("attention", "decode", "latent decode", "levels", "linear", "scan")  # kinds that the mean beside Triton is of
COPY_BYTES = 1 << 30  # of the copy that says what memory can do


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cases of each kind")
    parser.add_argument(
        "--only", default="", help="cases whose names have one of these words, with commas between them"
    )
    parser.add_argument("--jobs", type=int, default=0, help="processes that run every case once first, to compile all")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--plot", type=Path, help="where to draw the ratios, as SVG or PNG")
    options, environment = parser.parse_args(), Options.from_environment()
    if not torch.cuda.is_available():
        raise SystemExit("there is no card that torch can use: kernels are built anywhere, but are timed on one")
    if options.jobs:
        compile_all(len(cases(quick=options.quick)), options, environment)
    torch.manual_seed(0)
    memory = copy_rate()
    print(f"{torch.cuda.get_device_name()}, copy {memory / 1e12:.2f} TB/s, torch {torch.__version__}", flush=True)
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    for make in cases(quick=options.quick):
        case = make()
        if wanted(case, options.only):
            try:
                rows.append(measured(case, environment, memory))
                print(line(rows[-1]), flush=True)
            except (ValueError, RuntimeError) as error:  # the other cases are worth knowing all the same
                wrong.append(f"{case.name}: {error}")
                print(f"WRONG: {wrong[-1]}", flush=True)
            torch.cuda.empty_cache()
    print(summary(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot)
    if wrong:
        raise SystemExit("\n".join(wrong))


def cases(*, quick: bool) -> list[Callable[[], Case]]:
    """Every case, made when its turn comes."""
    modules = (h100_products, h100_attention, h100_rows)
    return list(chain.from_iterable(module.cases(quick=quick) for module in modules))


def wanted(case: Case, only: str) -> bool:
    return any(word in case.name for word in only.split(","))


def compile_all(count: int, options: argparse.Namespace, environment: Options) -> None:
    """Run everything of every case once, in several processes, so that kernels are in the caches on disk."""
    work = [(index, options.quick, options.only, environment) for index in range(count)]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        pool.map(_compiled, work, chunksize=1)


def _compiled(work: tuple[int, bool, str, Options]) -> None:
    index, quick, only, environment = work
    case = cases(quick=quick)[index]()
    if not wanted(case, only):
        return
    try:
        ours = launcher(case, kernel_of(case, environment))
    except CudaError as error:  # it is raised again where it is measured
        print(f"{case.name}: {error}", flush=True)
        return
    arrays = case.arrays()
    for run in (ours, *case.peers.values()):
        outcome(run, arrays)


def kernel_of(case: Case, environment: Options) -> CudaKernel:
    """Ours, compiled or from the cache."""
    folder = environment.dump

    def dump(name: str, text: str) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")

    compiled = case.spec.compiled if isinstance(case.spec, Tiles) else compile_cuda
    subject = () if isinstance(case.spec, Tiles) else (case.spec,)
    return compiled(*subject, label="Benchmark", cache_directory=environment.cache / "cuda", dump=dump)


def launcher(case: Case, kernel: CudaKernel) -> Run:
    launch = Launcher(kernel)
    tensors = {tensor.name for tensor in launch.tensors}

    def run(arrays: Arrays) -> Any:
        given = {name: array for name, array in arrays.items() if name in tensors}
        launch(given, stream=torch.cuda.current_stream().cuda_stream)
        return arrays[case.output]

    return run


def measured(case: Case, environment: Options, memory: float) -> dict[str, Any]:
    """The row of a case. ValueError when our result is wrong; peers that fail, or are wrong, are told in "left out"."""
    kernel = kernel_of(case, environment)
    runs = {"ours": launcher(case, kernel), **case.peers}
    by_bytes = case.bytes / memory > case.flops / case.rate
    sets = [case.arrays() for _ in range(max(2, math.ceil(L2_BYTES / case.bytes)) if by_bytes else 1)]
    errors, left_out = checked(case, runs, sets[0])
    graphs: dict[str, Callable[[], None]] = {}
    for name, run in ({name: runs[name] for name in errors} | dict(case.copies)).items():
        try:
            graphs[name] = replay(run, sets)
        except Exception as error:  # what others raise is theirs to choose
            if name == "ours":
                raise
            left_out[name] = f"no graph of it: {error}"[:200]
    times = interleaved(list(graphs.values()))
    us = {name: ms / len(sets) * 1e3 for name, ms in zip(graphs, times, strict=True)}
    floor = max(case.flops / case.rate, case.bytes / memory) * 1e6
    return {
        "case": case.name, "kind": case.kind, "unit": "us", "ours": us.pop("ours"), "peers": us, "floor": floor,
        "error": errors["ours"], "errors": errors, "left out": left_out, "why": kernel.why,
    }  # fmt: skip


def checked(case: Case, runs: dict[str, Run], arrays: Arrays) -> tuple[dict[str, float], dict[str, str]]:
    """(everybody's error against float32, of the norm; why others are left out)."""
    expected = case.reference(arrays).float()
    errors: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for name, run in runs.items():
        arrays[case.output].fill_(math.nan)
        found = outcome(run, arrays)
        if isinstance(found, Exception):
            if name == "ours":
                raise found
            left_out[name] = f"{type(found).__name__}: {found}"[:200]
            continue
        error = float((found.float().reshape(expected.shape) - expected).norm() / expected.norm())
        if not error < (TOLERANCE if name == "ours" else SLACK):
            said = f"differs from float32 by {error:.2e} of the norm"
            if name == "ours":
                raise ValueError(f"ours {said}")
            left_out[name] = said
            continue
        errors[name] = error
    return errors, left_out


def outcome(run: Run, arrays: Arrays) -> Any:
    """What a run gives, or what it raised."""
    try:
        found = run(arrays)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  # what others raise is theirs to choose
        return error
    return found


def replay(run: Run, sets: Sequence[Arrays]) -> Callable[[], None]:
    """One call per set of inputs as a CUDA graph."""
    for arrays in sets:
        run(arrays)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for arrays in sets:
            run(arrays)
    return graph.replay


def interleaved(runs: Sequence[Callable[[], None]]) -> list[float]:
    """The median time of each in ms."""
    repeats = [max(3, int(TARGET_MS / elapsed(run, 3))) for run in runs]
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS):
        for index in random.sample(range(len(runs)), len(runs)):
            times[index].append(elapsed(runs[index], repeats[index]))
    return [statistics.median(found) for found in times]


def elapsed(run: Callable[[], None], repeats: int) -> float:
    """ms of one call."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / repeats


def copy_rate() -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    (ms,) = interleaved([lambda: target.copy_(source)])
    return 2e3 * COPY_BYTES / ms


def line(row: dict[str, Any]) -> str:
    """A row as text: times, then how many times faster than each peer."""
    peers = "  ".join(f"{name} {us:.1f} ({us / row['ours']:.3f})" for name, us in row["peers"].items())
    out = "".join(f"  {name} left out: {why}" for name, why in row["left out"].items())
    return f"{row['case']:34} {row['ours']:8.1f} us, floor {row['floor']:.1f}, error {row['error']:.1e}  {peers}{out}"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Geometric means of the times of peers over ours; what programs of scores cost."""
    lines: list[str] = []
    for peer in dict.fromkeys(name for row in rows for name in row["peers"]):
        ratios = [row["peers"][peer] / row["ours"] for row in rows if row["kind"] in AMONG and peer in row["peers"]]
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            lines.append(f"geometric mean beside {peer} of {', '.join(AMONG)} ({len(ratios)} cases): {mean:.2f}")
    plain = {row["case"]: row["ours"] for row in rows}.get("attention D=128 S=4096")
    for row in rows:
        if row["kind"] == "program" and plain is not None and "window" not in row["case"]:
            lines.append(f"{row['case']}: {plain / row['ours']:.2f} of the speed without")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
