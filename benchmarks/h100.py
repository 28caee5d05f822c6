"""CUDA kernels beside torch's (cuBLAS, cuDNN) on one card: correct first, then medians of interleaved graph replays.

    python -m benchmarks.h100 [--quick] [--json FILE] [--cache FOLDER]

Inputs are random. Peers of a case take turns in shuffled order in one process, because the power cap moves clocks by
more than kernels differ; a ratio is one of this run only.
"""

import argparse
import importlib
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Var, binary, cast, const, select
from tilecore.contract.spec import AttentionSpec, ContractionSpec, Place, Result, Spec, Tensor, View
from tilecore.cuda.compile import compile_cuda
from tilecore.cuda.launch import Launcher

torch: Any = importlib.import_module("torch")  # untyped: machines without a card need not have it
attention_backends: Any = importlib.import_module("torch.nn.attention")

PRODUCTS = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 14336, 4096), (2048, 2048, 2048), (512, 4096, 4096),
            (128, 4096, 4096), (16, 4096, 4096))  # fmt: skip
TOKENS, MODEL = 16384, 2048  # of attention: batch times length, heads times width
LENGTHS = (512, 1024, 2048, 4096, 16384)
TOLERANCE = 4e-3  # of the norm, bf16 against the peer in float32
PEAK = 989.4e12  # bf16 operations a second of an H100 at its full clock, which the power cap does not allow for long
ROUNDS, TARGET_MS = 11, 5.0  # of one peer: measurements, and the length of each


@dataclass(frozen=True)
class Case:
    """What is compared: our spec with its arrays, the peer, the operations of one call."""

    name: str
    spec: Spec
    arrays: dict[str, Any]
    output: str
    peer_name: str
    peer: Callable[[], Any]
    flops: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three products and two lengths")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "tilefuse" / "cuda")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for make in cases(quick=options.quick):
        row = measured(make(), options.cache)
        rows.append(row)
        print("{name:34} {peer_name} {peer_tflops:6.0f}  ours {tflops:6.0f} TFLOP/s  {ratio:5.3f}  "
              "error {error:.1e}  {why}".format(**row), flush=True)  # fmt: skip
    if options.json:
        named = [
            {
                "case": row["name"], "unit": "us", "ours": row["us"], "peers": {row["peer_name"]: row["peer_us"]},
                "floor": row["floor_us"], "error": row["error"],
            }
            for row in rows
        ]  # fmt: skip
        options.json.write_text(json.dumps(named, indent=1) + "\n")


def cases(*, quick: bool) -> list[Callable[[], Case]]:
    """Every case, made when its turn comes: arrays of one at a time."""
    found: list[Callable[[], Case]] = []
    for shape in PRODUCTS[:3] if quick else PRODUCTS:
        found.append(lambda shape=shape: product_case(*shape))
    for width in (128, 64):
        for length in (1024, 4096) if quick else LENGTHS:
            for causal in (False, True):
                found.append(lambda width=width, length=length, causal=causal: attention_case(width, length, causal))
    return found


def measured(case: Case, cache: Path) -> dict[str, Any]:
    """The row of a case. ValueError when the results differ."""
    kernel = compile_cuda(case.spec, label="Benchmark", cache_directory=cache)
    launch = Launcher(kernel)

    def ours() -> None:
        launch(case.arrays, stream=torch.cuda.current_stream().cuda_stream)

    case.arrays[case.output].fill_(float("nan"))
    ours()
    expected = case.peer().float()
    error = float((case.arrays[case.output].float() - expected).norm() / expected.norm())
    if not error < TOLERANCE:
        raise ValueError(f"{case.name}: the results differ by {error:.2e} of the norm")
    peer_ms, ours_ms = interleaved([replay(case.peer), replay(ours)])
    return {
        "name": case.name, "peer_name": case.peer_name, "peer_us": peer_ms * 1e3, "us": ours_ms * 1e3,
        "floor_us": case.flops / PEAK * 1e6,
        "peer_tflops": case.flops / peer_ms / 1e9, "tflops": case.flops / ours_ms / 1e9, "ratio": peer_ms / ours_ms,
        "error": error, "why": kernel.why,
    }  # fmt: skip


def replay(run: Callable[[], Any]) -> Callable[[], None]:
    """One call as a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def interleaved(runs: list[Callable[[], None]]) -> list[float]:
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


def random_array(*shape: int) -> Any:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def tensor(name: str, *shape: int) -> Tensor:
    return Tensor(name, DType.BF16, tuple(const(dim) for dim in shape))


def axes(**extents: int) -> tuple[Var, ...]:
    return tuple(Var(name, extent=const(extent)) for name, extent in extents.items())


def product_case(rows: int, columns: int, depth: int) -> Case:
    """C = A · Bᵀ, both contiguous along the depth."""
    x, w, y = tensor("x", rows, depth), tensor("w", columns, depth), tensor("y", rows, columns)
    g, m, n, k = axes(g=1, m=rows, n=columns, k=depth)
    acc = Var("acc", DType.F32)
    result = Result(Place(y, (g, m, n), (m, n)), cast(acc, DType.BF16))
    left, right = View("left", (g, m, k), Load(x, (m, k))), View("right", (g, k, n), Load(w, (n, k)))
    spec = ContractionSpec((x, w), left, right, acc, (result,))
    arrays = {"x": random_array(rows, depth), "w": random_array(columns, depth), "y": random_array(rows, columns)}
    room = torch.empty_like(arrays["y"])
    return Case(
        f"product {rows} x {columns} x {depth}", spec, arrays, "y", "cuBLAS",
        lambda: torch.mm(arrays["x"], arrays["w"].T, out=room), 2.0 * rows * columns * depth,
    )  # fmt: skip


def attention_case(width: int, length: int, causal: bool) -> Case:
    """Self-attention of `TOKENS` tokens in rows of `length`."""
    shape = (TOKENS // length, MODEL // width, length, width)
    q, k, v, o = (tensor(name, *shape) for name in "qkvo")
    b, h, i, j, d, e = axes(b=shape[0], h=shape[1], i=length, j=length, d=width, e=width)
    raw, acc = Var("raw", DType.F32), Var("acc", DType.F32)
    score: Expr = raw * const(width**-0.5, DType.F32)
    if causal:
        score = select(binary("le", j, i), score, const(-float("inf"), DType.F32))
    result = Result(Place(o, (b, h, i, e), (b, h, i, e)), cast(acc, DType.BF16))
    views = (View("query", (b, h, i, d), Load(q, (b, h, i, d))), View("key", (b, h, j, d), Load(k, (b, h, j, d))),
             View("value", (b, h, j, e), Load(v, (b, h, j, e))))  # fmt: skip
    spec = AttentionSpec((q, k, v), *views, raw, (b, h, i, j), score, acc, (result,))
    arrays = {name: random_array(*shape) for name in "qkvo"}

    def peer() -> Any:
        with attention_backends.sdpa_kernel(attention_backends.SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                arrays["q"], arrays["k"], arrays["v"], is_causal=causal
            )

    flops = 4.0 * TOKENS * MODEL * length * (0.5 if causal else 1.0)
    name = f"attention D={width} S={length}{' causal' if causal else ''}"
    return Case(name, spec, arrays, "o", "cuDNN", peer, flops)


if __name__ == "__main__":
    main()
