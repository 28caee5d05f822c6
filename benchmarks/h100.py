"""CUDA kernels beside torch's (cuBLAS, cuDNN) and Triton's on one card: correct first, then medians of interleaved
graph replays.

    python -m benchmarks.h100 [--quick] [--only WORD] [--json FILE] [--plot FILE]

Inputs are random. Peers of a case take turns in shuffled order in one process, because the power cap moves clocks by
more than kernels differ; a ratio is one of this run only. What is bound by memory takes turns over several sets of
inputs, which together do not fit the L2 cache. Rows are compared with a copy of as many bytes.
"""

import argparse
import importlib
import json
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.options import Options
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Var, binary, cast, const, select, unary
from tilecore.contract.panel import packed_level
from tilecore.contract.spec import (
    AttentionSpec,
    Cell,
    ContractionSpec,
    Place,
    Result,
    RowSpec,
    ScanSpec,
    Spec,
    State,
    Step,
    Tensor,
    Total,
    View,
    outputs_of,
)
from tilecore.cuda.chunked import compile_chunk_scan
from tilecore.cuda.compile import CudaKernel, compile_cuda
from tilecore.cuda.launch import Launcher

torch: Any = importlib.import_module("torch")  # untyped: machines without a card need not have it
attention_backends: Any = importlib.import_module("torch.nn.attention")
triton_kernels: Any = importlib.import_module("benchmarks.h100_triton")

PRODUCTS = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 14336, 4096), (2048, 2048, 2048), (512, 4096, 4096),
            (128, 4096, 4096), (16, 4096, 4096), (1, 4096, 4096), (16, 8192, 8192), (1, 8192, 8192))  # fmt: skip
LEVELS = ((1, 4), (16, 4), (64, 4), (128, 4), (512, 4), (2048, 4), (1, 8), (16, 8))  # rows, bits of a weight
WEIGHTS, GROUP = 8192, 128  # of products by packed weights: columns and depth, elements that share a scale
EIGHTHS = (4096, 8192)  # of cubic products of 8-bit floats
TOKENS, MODEL = 16384, 2048  # of attention: batch times length, heads times width
LENGTHS = (512, 1024, 2048, 4096, 16384)
HEADS, SHARED, WIDTH = 32, 8, 128  # of decode
CACHES = ((1, 8192), (1, 32768), (2, 8192), (4, 8192), (16, 8192), (16, 32768), (64, 8192), (64, 32768))
LATENT, ROTARY, LATENT_HEADS = 512, 64, 128  # of decode from a latent cache
LATENT_CACHES = ((64, 8192), (128, 8192))
LINEAR, LINEAR_BATCH = (1024, 4096), 8  # of linear attention: steps, with HEADS heads of WIDTH columns
SCAN_HEADS, SCAN_WIDTH, SCAN_STATE, CHUNK = 80, 64, 128, 256  # of Mamba-2's chunk scan, 8 x 4096 steps
ROWS, COLUMNS, POSITIONS = 8192, 4096, 2048
TOLERANCE = 4e-3  # of the norm, against the first peer in float32
PEAK = 989.4e12  # bf16 operations a second of an H100 at its full clock, which the power cap does not allow for long
BANDWIDTH = 3.35e12  # bytes a second of its memory, of which a copy reaches 3.0e12
ROUNDS, TARGET_MS = 9, 4.0  # of one peer: measurements, and the length of each
L2_BYTES = 150e6  # of all sets of inputs together, three times what the cache holds
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Tiles:
    """A kernel in the tile language with operands of its own: how to compile it, its arrays, its result's name."""

    compiled: Callable[..., CudaKernel]
    arrays: Callable[[], Arrays]
    output: str


@dataclass(frozen=True)
class Case:
    """What is compared: our spec or kernel, the peers by name, the first one being the reference, and the work of a
    call.
    """

    name: str
    spec: Spec | Tiles
    peers: dict[str, Callable[[Arrays], Any]]
    flops: float = 0.0
    bytes: float = 0.0
    reference: Callable[[Arrays], Any] | None = None  # where the first peer does not compute the same

    @property
    def output(self) -> str:
        """Name of the result."""
        return self.spec.output if isinstance(self.spec, Tiles) else outputs_of(self.spec)[0].name

    @property
    def floor_us(self) -> float:
        """What operations or bytes take at least."""
        return max(self.flops / PEAK, self.bytes / BANDWIDTH) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cases of each kind")
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--plot", type=Path, help="where to draw the ratios, as SVG")
    options, environment = parser.parse_args(), Options.from_environment()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for make in cases(quick=options.quick):
        case = make()
        if options.only in case.name:
            rows.append(measured(case, environment))
            print(line(rows[-1]), flush=True)
            torch.cuda.empty_cache()
    beside = [row["peers"]["Triton"] / row["ours"] for row in rows if "Triton" in row["peers"]]
    if beside:
        mean = math.exp(statistics.fmean(map(math.log, beside)))
        print(f"geometric mean beside Triton, {len(beside)} cases: {mean:.2f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.plot:
        options.plot.write_text(plot(rows))


def line(row: dict[str, Any]) -> str:
    """A row as text: times, then how many times faster than each peer."""
    peers = "  ".join(f"{name} {us:8.1f} ({us / row['ours']:.3f})" for name, us in row["peers"].items())
    return f"{row['case']:34} ours {row['ours']:8.1f} us  {peers}  floor {row['floor']:.1f}  error {row['error']:.1e}"


def cases(*, quick: bool) -> list[Callable[[], Case]]:
    """Every case, made when its turn comes."""
    found: list[Callable[[], Case]] = []
    for shape in PRODUCTS[::3] if quick else PRODUCTS:
        found.append(lambda shape=shape: product_case(*shape))
    for rows, bits in LEVELS[::3] if quick else LEVELS:
        found.append(lambda rows=rows, bits=bits: level_case(rows, bits))
    for size in EIGHTHS[::2] if quick else EIGHTHS:
        found.append(lambda size=size: eighth_case(size))
    for width in (128, 64):
        for length in (1024, 4096) if quick else LENGTHS:
            for causal in (False, True):
                found.append(lambda width=width, length=length, causal=causal: attention_case(width, length, causal))
    for batch, keys in CACHES[::3] if quick else CACHES:
        found.append(lambda batch=batch, keys=keys: decode_case(batch, keys))
    for batch, keys in LATENT_CACHES[::2] if quick else LATENT_CACHES:
        found.append(lambda batch=batch, keys=keys: latent_case(batch, keys))
    for length in LINEAR[::2] if quick else LINEAR:
        found.append(lambda length=length: linear_case(length))
    found.append(scan_case)
    for kind in ("rmsnorm", "layernorm", "softmax", "swiglu", "rope"):
        found.append(lambda kind=kind: row_case(kind))
    return found


def measured(case: Case, environment: Options) -> dict[str, Any]:
    """The row of a case. ValueError when a result differs from the first peer's."""
    cache = environment.cache / "cuda"
    folder = environment.dump

    def dump(name: str, text: str) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")

    if isinstance(case.spec, Tiles):
        kernel = case.spec.compiled(label="Benchmark", cache_directory=cache, dump=dump)
    else:
        kernel = compile_cuda(case.spec, label="Benchmark", cache_directory=cache, dump=dump)
    launch = Launcher(kernel)

    def ours(arrays: Arrays) -> None:
        launch(arrays, stream=torch.cuda.current_stream().cuda_stream)

    sets = [arrays_of(case.spec) for _ in range(1 if case.flops else max(2, math.ceil(L2_BYTES / case.bytes)))]
    error = checked(case, ours, sets[0])
    runs = {"ours": ours, **case.peers}
    times = interleaved([replay(run, sets) for run in runs.values()])
    us = {name: ms / len(sets) * 1e3 for name, ms in zip(runs, times, strict=True)}
    return {
        "case": case.name, "unit": "us", "ours": us.pop("ours"), "peers": us, "floor": case.floor_us, "error": error,
        "why": kernel.why,
    }  # fmt: skip


def checked(case: Case, ours: Callable[[Arrays], None], arrays: Arrays) -> float:
    """Our error against the first peer, of the norm; the others' are checked as well."""
    reference, *others = case.peers.items()
    if case.reference is not None:
        reference, others = ("float32", case.reference), []
    expected = reference[1](arrays).float().clone()
    errors: list[float] = []
    for name, run in (*others, ("ours", ours)):
        arrays[case.output].fill_(math.nan)
        run(arrays)
        errors.append(float((arrays[case.output].float() - expected).norm() / expected.norm()))
        if not errors[-1] < TOLERANCE:
            raise ValueError(f"{case.name}: {name} differs from {reference[0]} by {errors[-1]:.2e} of the norm")
    return errors[-1]


def replay(run: Callable[[Arrays], Any], sets: list[Arrays]) -> Callable[[], None]:
    """One call per set of inputs as a CUDA graph."""
    for arrays in sets:
        run(arrays)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for arrays in sets:
            run(arrays)
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


def arrays_of(spec: Spec | Tiles) -> Arrays:
    """Random inputs, and room for the outputs."""
    if isinstance(spec, Tiles):
        return spec.arrays()
    types = {DType.BF16: torch.bfloat16, DType.F16: torch.float16, DType.F32: torch.float32,
             DType.F8E4M3: torch.float8_e4m3fn}  # fmt: skip

    def random_of(one: Tensor) -> Any:
        shape = [int(str(dim)) for dim in one.shape]
        if one.dtype is DType.U8:
            return torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)
        return torch.randn(*shape, device="cuda").to(types[one.dtype])

    return {one.name: random_of(one) for one in (*spec.inputs, *outputs_of(spec))}


def tensor(name: str, *shape: int, dtype: DType = DType.BF16) -> Tensor:
    return Tensor(name, dtype, tuple(const(dim) for dim in shape))


def axes(**extents: int) -> tuple[Var, ...]:
    return tuple(Var(name, extent=const(extent)) for name, extent in extents.items())


def product_case(rows: int, columns: int, depth: int) -> Case:
    """C = A · Bᵀ, both contiguous along the depth; what few rows make a matter of bandwidth is counted in bytes."""
    x, w, y = tensor("x", rows, depth), tensor("w", columns, depth), tensor("y", rows, columns)
    g, m, n, k = axes(g=1, m=rows, n=columns, k=depth)
    acc = Var("acc", DType.F32)
    result = Result(Place(y, (g, m, n), (m, n)), cast(acc, DType.BF16))
    left, right = View("left", (g, m, k), Load(x, (m, k))), View("right", (g, k, n), Load(w, (n, k)))
    spec = ContractionSpec((x, w), left, right, acc, (result,))
    flops = 2.0 * rows * columns * depth if rows > 64 else 0.0
    moved = 0.0 if flops else 2.0 * (rows * depth + columns * depth + rows * columns)
    peers = {"cuBLAS": lambda a: torch.mm(a["x"], a["w"].T, out=a["y"])}
    return Case(f"product {rows} x {columns} x {depth}", spec, peers, flops, moved)


def level_case(rows: int, bits: int) -> Case:
    """C = A · Bᵀ by weights of 4 or 8 bits, groups of `GROUP` with a scale and a packed zero point; beside them cuBLAS
    with the same weights in bf16.
    """
    groups, each = WEIGHTS // GROUP, const(8 // bits)
    x, y = tensor("x", rows, WEIGHTS), tensor("y", rows, WEIGHTS)
    levels = tensor("levels", WEIGHTS, groups, GROUP * bits // 8, dtype=DType.U8)
    scale, zero = tensor("scale", WEIGHTS, groups), tensor("zero", WEIGHTS, groups * bits // 8, dtype=DType.U8)
    g, m, n, k = axes(g=1, m=rows, n=WEIGHTS, k=WEIGHTS)
    number, within = k // const(GROUP), k % const(GROUP)
    level = packed_level(Load(levels, (n, number, within // each)), within, bits)
    real = cast(level, DType.F32) - cast(packed_level(Load(zero, (n, number // each)), number, bits), DType.F32)
    value = cast(real * cast(Load(scale, (n, number)), DType.F32), DType.BF16)
    acc = Var("acc", DType.F32)
    result = Result(Place(y, (g, m, n), (m, n)), cast(acc, DType.BF16))
    views = View("left", (g, m, k), Load(x, (m, k))), View("right", (g, k, n), value)

    def dense(arrays: Arrays) -> Any:
        if "dense" not in arrays:
            parts = [arrays[name] for name in ("levels", "zero")]
            if bits == 4:
                parts = [torch.stack([part & 15, part >> 4], -1) for part in parts]
            whole, zeros = parts[0].view(WEIGHTS, groups, GROUP), parts[1].reshape(WEIGHTS, groups, 1)
            arrays["dense"] = (
                ((whole.float() - zeros) * arrays["scale"].float()[..., None]).view(WEIGHTS, -1).bfloat16()
            )
        return arrays["dense"]

    peers = {
        "cuBLAS bf16": lambda a: torch.mm(a["x"], dense(a).T, out=a["y"]),
        "Triton": lambda a: triton_kernels.levels(a["x"], a["levels"], a["scale"], a["zero"], a["y"], bits, GROUP),
    }
    moved = WEIGHTS * (WEIGHTS * bits / 8 + groups * (2 + bits / 8)) + 4.0 * rows * WEIGHTS
    flops = 2.0 * rows * WEIGHTS * WEIGHTS if rows > 64 else 0.0
    spec = ContractionSpec((x, levels, scale, zero), *views, acc, (result,))
    return Case(f"int{bits} product {rows} x {WEIGHTS} x {WEIGHTS}", spec, peers, flops, moved)


def eighth_case(size: int) -> Case:
    """C = A · Bᵀ of 8-bit floats with a scale for each side; cuBLASLt with and without its fast sums."""
    x, w = (tensor(name, size, size, dtype=DType.F8E4M3) for name in "xw")
    y, left, right = tensor("y", size, size), *(tensor(name, 1, dtype=DType.F32) for name in ("left", "right"))
    g, m, n, k = axes(g=1, m=size, n=size, k=size)
    acc = Var("acc", DType.F32)
    value = cast(acc * Load(left, (const(0),)) * Load(right, (const(0),)), DType.BF16)
    views = View("a", (g, m, k), Load(x, (m, k))), View("b", (g, k, n), Load(w, (n, k)))
    spec = ContractionSpec((x, w, left, right), *views, acc, (Result(Place(y, (g, m, n), (m, n)), value),))

    def scaled(fast: bool) -> Callable[[Arrays], Any]:
        return lambda a: torch._scaled_mm(
            a["x"], a["w"].T, scale_a=a["left"], scale_b=a["right"], out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    def exact(arrays: Arrays) -> Any:
        return arrays["x"].float() @ arrays["w"].float().T * (arrays["left"] * arrays["right"])

    peers = {"cuBLASLt": scaled(fast=False), "cuBLASLt fast": scaled(fast=True)}
    # as many operations as take a cubic bf16 product of half the time
    return Case(f"fp8 product {size}^3", spec, peers, 1.0 * size**3, reference=exact)


def attention_of(shape: tuple[int, ...], keys: tuple[int, ...], dtype: DType, causal: bool) -> AttentionSpec:
    """Attention of [B, H, S, D] over keys of [B, H', K, D]."""
    q, o = (tensor(name, *shape, dtype=dtype) for name in "qo")
    k, v = (tensor(name, *keys, dtype=dtype) for name in "kv")
    b, h, i, j, d, e = axes(b=shape[0], h=shape[1], i=shape[2], j=keys[2], d=shape[3], e=shape[3])
    raw, acc = Var("raw", DType.F32), Var("acc", DType.F32)
    score: Expr = raw * const(shape[3] ** -0.5, DType.F32)
    if causal:
        score = select(binary("le", j, i), score, const(-float("inf"), DType.F32))
    group = binary("floordiv", h, const(shape[1] // keys[1])) if shape[1] != keys[1] else h
    result = Result(Place(o, (b, h, i, e), (b, h, i, e)), cast(acc, dtype))
    views = (View("query", (b, h, i, d), Load(q, (b, h, i, d))), View("key", (b, h, j, d), Load(k, (b, group, j, d))),
             View("value", (b, h, j, e), Load(v, (b, group, j, e))))  # fmt: skip
    return AttentionSpec((q, k, v), *views, raw, (b, h, i, j), score, acc, (result,))


def cudnn(arrays: Arrays, *, causal: bool = False, grouped: bool = False) -> Any:
    with attention_backends.sdpa_kernel(attention_backends.SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(
            arrays["q"], arrays["k"], arrays["v"], is_causal=causal, enable_gqa=grouped
        )


def attention_case(width: int, length: int, causal: bool) -> Case:
    """Self-attention of `TOKENS` tokens in rows of `length`."""
    shape = (TOKENS // length, MODEL // width, length, width)
    peers: dict[str, Callable[[Arrays], Any]] = {
        "cuDNN": lambda a: cudnn(a, causal=causal),
        "Triton": lambda a: triton_kernels.attention(a["q"], a["k"], a["v"], a["o"], causal),
    }
    flops = 4.0 * TOKENS * MODEL * length * (0.5 if causal else 1.0)
    name = f"attention D={width} S={length}{' causal' if causal else ''}"
    return Case(name, attention_of(shape, shape, DType.BF16, causal), peers, flops=flops)


def decode_case(batch: int, keys: int) -> Case:
    """One query per head over a cache that groups of heads share."""
    spec = attention_of((batch, HEADS, 1, WIDTH), (batch, SHARED, keys, WIDTH), DType.F16, causal=False)
    peers: dict[str, Callable[[Arrays], Any]] = {
        "cuDNN": lambda a: cudnn(a, grouped=True),
        "Triton": lambda a: triton_kernels.decode(a["q"], a["k"], a["v"], a["o"]),
    }
    return Case(f"decode B={batch} K={keys}", spec, peers, bytes=4.0 * batch * SHARED * keys * WIDTH)


def latent_case(batch: int, keys: int) -> Case:
    """One query per head over one cache of all heads, whose rows are keys and, as far as `LATENT` goes, values."""
    width, scale = LATENT + ROTARY, (LATENT // 4 + ROTARY) ** -0.5
    q, c = tensor("q", batch, LATENT_HEADS, 1, width, dtype=DType.F16), tensor("c", batch, keys, width, dtype=DType.F16)
    o = tensor("o", batch, LATENT_HEADS, 1, LATENT, dtype=DType.F16)
    b, h, i, j, d, e = axes(b=batch, h=LATENT_HEADS, i=1, j=keys, d=width, e=LATENT)
    raw, acc = Var("raw", DType.F32), Var("acc", DType.F32)
    views = (View("query", (b, h, i, d), Load(q, (b, h, i, d))), View("key", (b, h, j, d), Load(c, (b, j, d))),
             View("value", (b, h, j, e), Load(c, (b, j, e))))  # fmt: skip
    result = Result(Place(o, (b, h, i, e), (b, h, i, e)), cast(acc, DType.F16))
    spec = AttentionSpec((q, c), *views, raw, (b, h, i, j), raw * const(scale, DType.F32), acc, (result,))

    def matrices(arrays: Arrays) -> Any:
        queries, cache = arrays["q"][:, :, 0], arrays["c"]
        weights = torch.softmax(torch.baddbmm(queries.new_zeros(1), queries, cache.mT, beta=0, alpha=scale), -1)
        return torch.bmm(weights, cache[..., :LATENT], out=arrays["o"][:, :, 0])

    def exact(arrays: Arrays) -> Any:
        queries, cache = arrays["q"][:, :, 0].float(), arrays["c"].float()
        return (torch.softmax(queries @ cache.mT * scale, -1) @ cache[..., :LATENT])[:, :, None]

    peers: dict[str, Callable[[Arrays], Any]] = {
        "torch": matrices,
        "Triton": lambda a: triton_kernels.latent(a["q"], a["c"], a["o"], scale),
    }
    flops = 2.0 * batch * LATENT_HEADS * keys * (width + LATENT)
    return Case(f"latent decode B={batch} K={keys}", spec, peers, flops, 2.0 * batch * keys * width, reference=exact)


def linear_case(length: int) -> Case:
    """Linear attention of f16 [B, S, H, D], scaled as softmax's scores are."""
    scale, shape = WIDTH**-0.5, (LINEAR_BATCH, length, HEADS, WIDTH)
    g, t, d, e, over, query = axes(g=LINEAR_BATCH * HEADS, t=length, d=WIDTH, e=WIDTH, over=WIDTH, query=1)
    q, k, v, o = (tensor(name, *shape, dtype=DType.F16) for name in "qkvo")
    extents = tuple(const(extent) for extent in (LINEAR_BATCH * HEADS, WIDTH, WIDTH))
    old, new = (Cell(name, DType.F32, extents) for name in ("s", "s.next"))
    read = Cell("r", DType.F32, (extents[0], extents[2]))

    def at(one: Tensor, column: Var) -> Expr:
        return cast(Load(one, (g // HEADS, t, g % HEADS, column)), DType.F32)

    state = State(old, new, (d, e), const(0.0, DType.F32), Load(old, (g, d, e)) + at(k, d) * at(v, e))
    total = Total(read, (e,), over, "sum", at(q, over) * Load(new, (g, over, e)))
    value = cast(Load(read, (g, e)) * const(scale, DType.F32), DType.F16)
    result = Result(Place(o, (g, t, e), (g // HEADS, t, g % HEADS, e)), value)
    spec = ScanSpec((q, k, v), g, t, e, (state,), (total,), query, (), (result,))

    def exact(found: Arrays) -> Any:
        """In float32, chunk by chunk."""
        q, k, v = (found[name].float().transpose(1, 2).unflatten(2, (-1, 64)) for name in "qkv")
        states = (k.mT @ v).cumsum(2)
        before = torch.cat([torch.zeros_like(states[:, :, :1]), states[:, :, :-1]], 2)
        return ((((q @ k.mT).tril() @ v) + q @ before) * scale).flatten(2, 3).transpose(1, 2)

    peers: dict[str, Callable[[Arrays], Any]] = {
        "Triton": lambda a: triton_kernels.linear(a["q"], a["k"], a["v"], a["o"], scale),
    }
    tokens = float(LINEAR_BATCH * length * HEADS)
    flops = 2.0 * tokens * WIDTH * (64 + 2 * WIDTH)  # half of the scores of chunks of 64 steps, states in and out
    return Case(f"linear attention S={length}", spec, peers, flops, 8.0 * tokens * WIDTH, reference=exact)


def scan_case() -> Case:
    """The chunk scan of Mamba-2, f16, all of its vectors too."""
    B, S, H, P, N, L = LINEAR_BATCH, LINEAR[-1], SCAN_HEADS, SCAN_WIDTH, SCAN_STATE, CHUNK
    chunks = S // L
    shapes = {"cb": (B, chunks, 1, L, L), "x": (B, S, H, P), "dt": (B, H, chunks, L), "da": (B, H, chunks, L),
              "c": (B, S, 1, N), "states": (B, chunks, H, P, N), "d": (H,), "o": (B, S, H, P)}  # fmt: skip
    given = {name: tensor(name, *shape, dtype=DType.F16) for name, shape in shapes.items()}
    names = {"CB": "cb", "X": "x", "dt": "dt", "dA": "da", "C": "c", "states": "states", "D": "d", "out": "o"}
    operands = {parameter: given[name] for parameter, name in names.items()}

    def arrays() -> Arrays:
        found = {name: torch.randn(shape, device="cuda", dtype=torch.float16) for name, shape in shapes.items()}
        found["dt"] = torch.rand(shapes["dt"], device="cuda").half()
        found["da"] = -(torch.rand(shapes["da"], device="cuda") * 0.05).cumsum(-1).half()
        return found

    def exact(found: Arrays) -> Any:
        """In float32, sequence by sequence."""
        results: list[Any] = []
        for b in range(B):
            cb, x, dt, da, c, states = (found[name][b].float() for name in ("cb", "x", "dt", "da", "c", "states"))
            apart = (da[..., :, None] - da[..., None, :]).clamp(max=0).exp()  # [H, chunks, L, L]
            weights = (cb[:, 0] * apart * dt[..., None, :]).tril()
            x = x.unflatten(0, (chunks, L)).permute(2, 0, 1, 3)
            before = c[:, 0].unflatten(0, (chunks, L)) @ states.transpose(0, 1).mT
            out = weights @ x + da.exp()[..., None] * before + found["d"].float()[:, None, None, None] * x
            results.append(out.permute(1, 2, 0, 3).flatten(0, 1))
        return torch.stack(results)

    def compiled(**options: Any) -> CudaKernel:
        return compile_chunk_scan(operands, **options)

    peers: dict[str, Callable[[Arrays], Any]] = {
        "Triton": lambda a: triton_kernels.chunk_scan(*(a[name] for name in shapes))
    }
    tokens = float(B * S * H)
    moved = 2.0 * sum(math.prod(shape) for shape in shapes.values())
    flops = 2.0 * tokens * P * (L / 2 + N)
    return Case("Mamba-2 chunk scan", Tiles(compiled, arrays, "o"), peers, flops, moved, reference=exact)


def row_case(kind: str) -> Case:
    """A program over rows of `COLUMNS`, or of heads for the rotary embedding; a copy moves as many bytes."""
    rows, columns = (ROWS * COLUMNS // WIDTH, WIDTH) if kind == "rope" else (ROWS, COLUMNS)
    r, c = axes(r=rows, c=columns)
    x, y = tensor("x", rows, columns), tensor("y", rows, columns)
    inputs, steps, value = [x], list[Step](), cast(Load(x, (r, c)), DType.F32)
    size = float(columns)

    def more(name: str, *shape: int) -> Expr:
        inputs.append(tensor(name, *shape))
        index = {1: (c,), 2: (r % POSITIONS if kind == "rope" else r, c)}[len(shape)]
        return cast(Load(inputs[-1], index), DType.F32)

    def step(name: str, how: str, what: Expr) -> Expr:
        steps.append(Step(Var(name, DType.F32), how, what))
        return steps[-1].var

    match kind:
        case "rmsnorm":
            scale = unary("rsqrt", step("squares", "sum", value * value) / size + 1e-5)
            result = value * scale * more("weight", columns)
        case "layernorm":
            centred = step("centred", "tile", value - step("total", "sum", value) / size)
            scale = unary("rsqrt", step("squares", "sum", centred * centred) / size + 1e-5)
            result = centred * scale * more("weight", columns) + more("bias", columns)
        case "softmax":
            weight = step("weight", "tile", unary("exp", value - step("top", "max", value)))
            result = weight / step("total", "sum", weight)
        case "swiglu":
            result = value * unary("sigmoid", value) * more("up", rows, columns)
        case _:
            half = columns // 2
            other = select(binary("lt", c, const(half)), unary("neg", cast(Load(x, (r, c + half)), DType.F32)),
                           cast(Load(x, (r, c - half)), DType.F32))  # fmt: skip
            result = value * more("cos", POSITIONS, columns) + other * more("sin", POSITIONS, columns)
    spec = RowSpec(tuple(inputs), r, c, tuple(steps), (Result(Place(y, (r, c), (r, c)), cast(result, DType.BF16)),))
    streams = 3 if kind == "swiglu" else 2
    peers = {"copy": (lambda a: a["y"].copy_(a["x"])) if streams == 2 else _copy_of_three}
    return Case(f"rows {kind}", spec, peers, bytes=2.0 * streams * rows * columns, reference=REFERENCES[kind])


def _rotated(arrays: Arrays) -> Any:
    x, half = arrays["x"].float(), WIDTH // 2
    cos, sin = (arrays[name].float().repeat(x.shape[0] // POSITIONS, 1) for name in ("cos", "sin"))
    return x * cos + torch.cat([-x[:, half:], x[:, :half]], -1) * sin


REFERENCES: dict[str, Callable[[Arrays], Any]] = {
    "rmsnorm": lambda a: torch.nn.functional.rms_norm(a["x"].float(), (COLUMNS,), a["weight"].float(), 1e-5),
    "layernorm": lambda a: torch.nn.functional.layer_norm(
        a["x"].float(), (COLUMNS,), a["weight"].float(), a["bias"].float(), 1e-5
    ),
    "softmax": lambda a: torch.softmax(a["x"].float(), -1),
    "swiglu": lambda a: torch.nn.functional.silu(a["x"].float()) * a["up"].float(),
    "rope": _rotated,
}


def _copy_of_three(arrays: Arrays) -> Any:
    return torch.add(arrays["x"], arrays["up"], out=arrays["y"])  # two read, one written


def plot(rows: list[dict[str, Any]]) -> str:
    """Bars of how many times faster than each peer, as SVG."""
    bars = [(row["case"], name, us / row["ours"]) for row in rows for name, us in row["peers"].items()]
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="820" height="{20 + 16 * len(bars)}" font-size="11">']
    for number, (case, name, ratio) in enumerate(bars):
        at = 14 + 16 * number
        colour = "#4a7" if ratio >= 1 else "#c75"
        lines.append(f'<text x="4" y="{at + 10}">{case} / {name}</text>')
        lines.append(f'<rect x="300" y="{at}" width="{150 * min(ratio, 3):.0f}" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{304 + 150 * min(ratio, 3):.0f}" y="{at + 10}">{ratio:.2f}</text>')
    end = 20 + 16 * len(bars)
    return "\n".join([*lines, f'<line x1="450" x2="450" y1="10" y2="{end}" stroke="#333"/>', "</svg>", ""])


if __name__ == "__main__":
    main()
