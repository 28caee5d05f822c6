"""Recommendation against an exhaustive search: python -m benchmarks.recommend [--quick] [--json FILE] [--only TEXT]

Every configuration that fits the machine is built, for single regions with an open length, and timed at each length;
ranked are those for a region of that length. Out: one row per case and number of threads, `{"case", "unit", "ours",
"peers", "floor", "error"}`: `ours` is the time of the configuration recommended first, `peers` those of the best of the
first five and of the best of all, in microseconds, `floor` the best of all again and `error` its lead over the first.
Then: in how many cases the first is within 5 % of the best, and in how many one of the first five is. All are timed
briefly, those that may be the best and the first five again, longer, until few are left: the luckiest of many is not
the best.
"""

import argparse
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import onnx
from whole_models import Row

from fuser.find import find
from fuser.load import load
from models import quantized, regions
from models.graph import write
from runtime.cost import machine_cost
from runtime.machine import machine_profile
from runtime.options import Options
from tilecore.compile import HEADERS, Kernel, prepare
from tilecore.contract.spec import Spec
from tilecore.emit_host import symbol_order
from tilecore.profile import HardwareProfile
from tilecore.recommend import Candidate, rank
from tilecore.search import TURN_SECONDS, make_kernel, time_kernels
from tilecore.toolchain import Source, find_toolchain

NEAR = 1.05
TOP = 5
SIEVE = ((3, math.inf), (8, 1.4), (40, 1.15))  # turns, and how near to the best so far takes part in them
QUICK_SIEVE = ((2, math.inf), (5, 1.4))
MOST_SECONDS = 1.5  # of the turns of one step


@dataclass(frozen=True)
class Case:
    """A region and the length of its sequence."""

    name: str
    build: Callable[[], onnx.ModelProto]
    seq: int


def linear(rows: int, depth: int, columns: int) -> Case:
    gelu = columns == 3072
    name = f"linear {rows}x{depth}x{columns}{' + GELU' if gelu else ''}"
    return Case(name, lambda: regions.linear(depth=depth, columns=columns, gelu=gelu), rows)


def attention(seq: int, *, causal: bool = False) -> Case:
    return Case(f"attention S={seq}{' causal' if causal else ''}", lambda: regions.attention(causal=causal), seq)


def wide_attention(seq: int, *, causal: bool) -> Case:
    name = f"attention S={seq} 32/8x128{' causal' if causal else ''}"
    return Case(name, lambda: regions.attention(heads=32, kv_heads=8, size=128, causal=causal), seq)


def decode(past: int) -> Case:
    return Case(f"decode KV={past}", lambda: regions.decode(heads=32, kv_heads=8, size=128), past)


def levels(rows: int, depth: int, columns: int) -> Case:
    return Case(f"int8 {rows}x{depth}x{columns}", lambda: quantized.linear(depth=depth, columns=columns), rows)


def packed(rows: int, bits: int) -> Case:
    return Case(
        f"int{bits} weights {rows}x4096x4096",
        lambda: quantized.packed(depth=4096, columns=4096, bits=bits, block=32, level=4),
        rows,
    )


SHAPES = ((768, 768), (768, 3072), (3072, 768), (768, 2304))
CASES = (
    *(linear(rows, depth, columns) for rows in (1, 7, 128, 512, 1024) for depth, columns in SHAPES),
    *(attention(seq, causal=causal) for seq in (128, 384, 512, 1500) for causal in (False, True)),
    Case("attention S=1500 window 256", lambda: regions.attention(causal=True, window=256), 1500),
    Case("attention S=512 masked", lambda: regions.attention(masked=True), 512),
    Case("attention S=512 bias", lambda: regions.attention(bias=True), 512),
    *(wide_attention(512, causal=causal) for causal in (False, True)),
    *(decode(past) for past in (512, 2048, 8192)),
    *(levels(rows, depth, columns) for rows in (128, 512) for depth, columns in ((768, 3072), (3072, 768))),
    *(packed(rows, bits) for rows in (1, 16) for bits in (4, 8)),
    Case("skip + LayerNorm 512x768", regions.skip_layer_norm, 512),
    Case("RMSNorm 512x4096", lambda: regions.norm(hidden=4096, rms=True), 512),
    Case("softmax 6144x512", lambda: regions.pointwise("softmax", hidden=512), 6144),
    Case("GELU 512x3072", lambda: regions.pointwise("gelu"), 512),
    Case("SwiGLU 512x11008", lambda: regions.pointwise("swiglu", hidden=11008), 512),
    Case("RoPE 32x512x128", regions.rope, 512),
)
QUICK = ("linear 128x768x768", "attention S=128", "skip + LayerNorm 512x768")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three cases, timed briefly")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="how many threads a call has")
    parser.add_argument("--times", type=Path, help="write the time of every configuration to this file")
    arguments = parser.parse_args()
    options = Options.from_environment()
    profile, sieve = machine_profile(options), QUICK_SIEVE if arguments.quick else SIEVE
    cases = [c for c in CASES if arguments.only in c.name and (not arguments.quick or c.name in QUICK)]
    rows: list[Row] = []
    hits: list[tuple[bool, bool]] = []
    every: dict[str, list[tuple[str, float]]] = {}
    built: dict[Spec, dict[str, Kernel]] = {}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for case in cases:
            spec, open_spec = spec_of(case, profile), spec_of(replace(case, seq=0), profile)
            if open_spec not in built:
                built[open_spec] = build(open_spec, profile, pool)
            kernels = built[open_spec]
            for threads in arguments.threads:
                own = replace(profile, cores=threads)
                ranked = [c for c in rank(spec, own, own.target) if not c.rejected]
                row, times = run(case, kernels, ranked, own, options, sieve)
                rows.append(row)
                every[row.case] = times
                hits.append((row.ours <= NEAR * row.floor, row.peers["best of five"] <= NEAR * row.floor))
                print(f"{describe(row)}  {times[0][0]} first, best {min(times, key=lambda t: t[1])[0]}", flush=True)
                if arguments.times:
                    arguments.times.write_text(json.dumps(every, indent=1) + "\n")
    first, five = (sum(column) for column in zip(*hits, strict=True))
    print(f"within {NEAR - 1:.0%} of the best: the first in {first} of {len(hits)} cases, one of {TOP} in {five}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def spec_of(case: Case, profile: HardwareProfile) -> Spec:
    """The region's spec, batch 1; a length of 0 leaves it open."""
    model = case.build()
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "batch":
                dim.dim_value = 1
            elif dim.dim_param and case.seq:
                dim.dim_value = case.seq
    with tempfile.TemporaryDirectory(prefix="tilefuse-bench-") as folder:
        found = find(load(write(model, Path(folder) / "m.onnx")), machine_cost(profile, profile.target, fuse_all=True))
        (region,) = found.regions
        return prepare(region.spec)[0]


def build(spec: Spec, profile: HardwareProfile, pool: ProcessPoolExecutor) -> dict[str, Kernel]:
    """A kernel for every configuration, whatever the machine thinks of it."""
    configs = {str(c.config): c.config for c in rank(spec, profile, profile.target)}
    jobs = {text: pool.submit(make_object, spec, config, profile) for text, config in configs.items()}
    return {text: job.result() for text, job in jobs.items()}


def make_object(spec: Spec, config: Mapping[str, int], profile: HardwareProfile) -> Kernel:
    """A kernel whose object is in the cache from now on."""
    options = Options.from_environment()
    kernel = make_kernel(spec, config, profile)
    toolchain = find_toolchain(options.cache / "objects", options.compiler)
    toolchain.object(Source(kernel.sources[profile.target.name], profile.target.flags, (HEADERS,)))
    return kernel


def run(
    case: Case, kernels: dict[str, Kernel], ranked: list[Candidate], profile: HardwareProfile, options: Options,
    sieve: Sequence[tuple[int, float]],
) -> tuple[Row, list[tuple[str, float]]]:  # fmt: skip
    """The row of one case, and microseconds of every configuration in the order of ranking."""
    toolchain = find_toolchain(options.cache / "objects", options.compiler)
    order = [kernels[str(candidate.config)] for candidate in ranked]
    symbols = [dict.fromkeys(symbol_order(order[0].spec.inputs), case.seq)]

    def micros_of(chosen: list[Kernel], turns: int) -> list[float]:
        timed = time_kernels(
            chosen, symbols, target=profile.target, toolchain=toolchain, threads=profile.cores, turns=turns
        )
        return [one.seconds[0] * 1e6 for one in timed]

    lead, best = [1.0] * len(order), TURN_SECONDS * 1e6  # of the best of the same turns: others had another machine
    for turns, near in sieve:
        chosen = [i for i in range(len(order)) if i < TOP or lead[i] <= near]
        room = MOST_SECONDS * 1e6 / sum(max(lead[i] * best, TURN_SECONDS * 1e6) for i in chosen)
        taken = micros_of([order[i] for i in chosen], max(sieve[0][0], min(turns, int(room))))
        best = min(taken)
        for i, time in zip(chosen, taken, strict=True):
            lead[i] = time / best
    micros = [one * best for one in lead]
    peers = {"best of five": min(micros[:TOP]), "best of all": best}
    row = Row(f"{case.name}, {profile.cores} threads", "us", micros[0], peers, best, micros[0] / best - 1)
    names = [" ".join(f"{name[6:]}={value}" for name, value in c.config.items()) for c in ranked]
    return row, list(zip(names, micros, strict=True))


def describe(row: Row) -> str:
    """One line for people."""
    five = row.floor / row.peers["best of five"]
    return f"{row.case:40} first {row.ours:9.1f} us, {row.floor / row.ours:4.0%} of the best; of five {five:4.0%}"


if __name__ == "__main__":
    main()
