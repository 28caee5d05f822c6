"""The grid of single kernels against their peers.

    python -m benchmarks.kernels [--quick] [--threads N] [--json FILE] [--page FILE] [--plot FILE]

Each case is a whole model that fuses to one kernel (stacks of linears: one a layer). Ours, ONNX Runtime (its defaults,
and its own fused operator where it has one for the case) and OpenVINO where it is installed take turns in one process,
fp32, random data. With `--precision bf16` ours and OpenVINO round operands of products to bfloat16, our float32 kernel
is a peer, and cases without products are left out. Out: rows in the common form, `{"case", "unit", "ours", "peers":
{name: value}, "floor", "error"}`, medians in microseconds; `floor` is the longest of three times: the multiply-adds at
the measured peak, the exponentials or GELUs of programs over rows at theirs, and the bytes (each tensor once) at the
measured rate of the cache level that holds them, read or copied; of bytes that no cache holds, what reading or copying
as many takes in turn with the case, as neighbours of a virtual machine move that rate by half from one minute to the
next. Cases named `copy:` are 2 · x + 1 and x + y + 1 over as many bytes as the programs over rows move, which is what
can be reached of these floors through a session; "onnxruntime fused" is one operator there, x · 2 or x + y. Inputs
begin at a cache line. The first size of every kernel is checked by `verify`; `error` is the largest difference from
ONNX Runtime relative to the root mean square of the output's row. Cases of odd sizes are followed by their time per
multiply-add relative to that of the round size.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from cached_attention import bind_cache, grouped_query_attention
from chart import plot
from onnx import TensorProto, helper
from tables import summary, table
from whole_models import Row

from models import regions
from models.graph import write
from runtime.bench import bound_run, default_session, turn
from runtime.compile import optimize
from runtime.options import Options
from runtime.session import load
from runtime.verify import verify
from tilecore.aligned import aligned
from tilecore.measure import Measured, load_probes, measure_profile, moving
from tilecore.toolchain import find_toolchain

SECONDS, QUICK_SECONDS = 1.0, 0.4  # of one case, all peers together
TURNS = 3  # of each at least
LARGEST_ERROR = {"f32": 1e-3, "bf16": 0.1}  # `verify` judges properly; this only finds sizes at which a kernel breaks
PRODUCTS = {"f32": "f32 multiply-adds", "bf16": "bf16 products", "int8": "int8 products"}  # the rate that bounds them
LONG_MS = 400.0  # a run that takes longer is its own turn
Feeds = dict[str, np.ndarray[Any, Any]]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Point:
    """One size of a family: its inputs' shapes, its multiply-adds, the bytes that it must move and which way.

    `weights` are elements of constants, which are as wide as the precision says, and not in `moved`.
    """

    name: str
    inputs: Shapes
    multiply_adds: int
    moved: int
    weights: int = 0
    copies: bool = False  # moves as much out as in
    exponentials: int = 0
    gelus: int = 0
    round: str = ""  # the case with round sizes that this one is beside
    quick: bool = False


@dataclass(frozen=True)
class Family:
    """Points of one model; `peer` is ONNX Runtime's own fused operator for the same, and `bind_peer` gives it feeds."""

    build: Callable[[], onnx.ModelProto]
    points: tuple[Point, ...]
    peer: Callable[[], onnx.ModelProto] | None = None
    bind_peer: Callable[[ort.InferenceSession, Feeds], Callable[[], object]] = bound_run


# ---- the grid


def linears() -> Iterator[Family]:
    """Bias + GELU over the four shapes of BERT, and a weight of 64 MB for one row."""
    for depth, columns in ((768, 768), (768, 3072), (3072, 768), (768, 2304)):
        rows = (1, 7, 128, 512, 1024)
        yield linear(depth, columns, rows, quick=128 if columns == 3072 else 0)
    yield linear(4096, 4096, (1,))
    yield linear(761, 3067, (127, 509), beside={127: "128×768×3072", 509: "512×768×3072"})


def linear(
    depth: int, columns: int, rows: tuple[int, ...], *, quick: int = 0, beside: Mapping[int, str] | None = None
) -> Family:
    """Bias + GELU at some numbers of rows."""
    points = tuple(
        Point(
            f"linear {m}×{depth}×{columns} + GELU",
            {"x": (1, m, depth)},
            m * depth * columns,
            4 * (m * depth + m * columns),
            depth * columns,
            round=f"linear {beside[m]} + GELU" if beside else "",
            quick=m == quick,
        )
        for m in rows
    )
    return Family(lambda: regions.linear(depth=depth, columns=columns, gelu=True), points)


def stacks() -> Iterator[Family]:
    """One row through so many of these layers that each one's weights come out of memory, as in generating text."""
    for hidden, inner, layers in ((768, 768, 56), (768, 3072, 28), (768, 2304, 36)):
        weights = layers * hidden * inner
        point = Point(
            f"{layers} linears 1×{hidden}×{inner}{'' if inner == hidden else ' and back'} + GELU",
            {"x": (1, 1, hidden)},
            weights,
            0,
            weights,
        )
        widths = (*(hidden, inner) * (layers // 2), hidden)
        yield Family(lambda widths=widths: regions.linears(widths=widths, gelu=True), (point,))


@dataclass(frozen=True)
class Heads:
    """Query heads, heads of keys and values, and the size of each."""

    queries: int
    keys: int
    size: int

    @property
    def name(self) -> str:
        """As in the names of cases."""
        return f"H={self.queries}{'' if self.queries == self.keys else f'/{self.keys}'} D={self.size}"


SMALL, LARGE = Heads(12, 12, 64), Heads(32, 8, 128)
WINDOW = 256
ODD = {129: 128, 509: 512}  # lengths, and the round ones beside them


def attentions() -> Iterator[Family]:
    """Every mask at every size; a bias of every head only up to what fits the memory of a small machine."""
    sizes = (128, 384, 512, 1500, 2048, 4096)
    for heads in (SMALL, LARGE):
        for mask in ("plain", "causal", "window", "padding", "shared bias", "bias"):
            at = sizes[:4] if mask == "bias" else sizes
            odd = (129, 509) if heads is SMALL and mask == "plain" else ()
            quick = 512 if heads is SMALL and mask in ("plain", "causal") else 0
            yield attention(heads, mask, (*at, *odd), quick=quick)


def attention(heads: Heads, mask: str, sizes: tuple[int, ...], *, quick: int = 0) -> Family:
    """One mask at some lengths."""
    points: list[Point] = []
    for seq in sizes:
        inputs = {"q": (1, seq, heads.queries * heads.size)}
        inputs |= dict.fromkeys(("k", "v"), (1, seq, heads.keys * heads.size))
        inputs |= {"mask": (1, seq)} if mask == "padding" else {}
        inputs |= {"bias": (1, heads.queries if mask == "bias" else 1, seq, seq)} if "bias" in mask else {}
        width = min(seq, WINDOW) if mask == "window" else seq
        pairs = seq * width - width * (width - 1) // 2 if mask in ("causal", "window") else seq * seq
        moved = 4 * sum(prod(shape) for shape in (*inputs.values(), inputs["q"]))
        beside = attention_name(heads, mask, ODD[seq]) if seq in ODD else ""
        points.append(
            Point(
                attention_name(heads, mask, seq),
                inputs,
                2 * heads.queries * heads.size * pairs,
                moved,
                round=beside,
                quick=seq == quick,
            )
        )
    grouped = None if heads.keys == heads.queries else heads.keys

    def build() -> onnx.ModelProto:
        causal, window = mask in ("causal", "window"), WINDOW if mask == "window" else None
        return regions.attention(
            heads=heads.queries,
            kv_heads=grouped,
            size=heads.size,
            causal=causal,
            window=window,
            masked=mask == "padding",
            bias=mask == "bias",
            shared_bias=mask == "shared bias",
        )

    fused = mask != "window" and grouped is None
    return Family(build, tuple(points), (lambda: multi_head_attention(heads, mask)) if fused else None)


def attention_name(heads: Heads, mask: str, seq: int) -> str:
    """What a case is called."""
    return f"attention {heads.name} S={seq}, {mask}"


def multi_head_attention(heads: Heads, mask: str) -> onnx.ModelProto:
    """ONNX Runtime's own operator for the same."""
    width = heads.queries * heads.size
    names = ["q", "k", "v", "", "", ""]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("batch", "seq", width)) for name in "qkv"]
    if mask == "padding":
        names[4] = "mask32"
        infos.append(helper.make_tensor_value_info("mask", TensorProto.INT64, ("batch", "seq")))
    if "bias" in mask:
        names[5] = "bias"
        shape = (1, heads.queries if mask == "bias" else 1, "seq", "seq")
        infos.append(helper.make_tensor_value_info("bias", TensorProto.FLOAT, shape))
    nodes = [helper.make_node("Cast", ["mask"], ["mask32"], to=TensorProto.INT32)] if mask == "padding" else []
    attributes: dict[str, Any] = {"num_heads": heads.queries, "unidirectional": int(mask == "causal")}
    nodes.append(helper.make_node("MultiHeadAttention", names, ["y"], domain="com.microsoft", **attributes))
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ("batch", "seq", width))
    opsets = [helper.make_opsetid("", regions.OPSET), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph(nodes, "attention", infos, [out]), opset_imports=opsets, ir_version=8)


def decodes() -> Iterator[Family]:
    """One query over a cache."""
    points = tuple(
        Point(
            f"decode {LARGE.name} KV={past}",
            {
                "q": (1, LARGE.queries, 1, LARGE.size),
                **dict.fromkeys(("k", "v"), (1, LARGE.keys, past, LARGE.size)),
            },
            2 * LARGE.queries * LARGE.size * past,
            4 * 2 * LARGE.keys * LARGE.size * past,
            quick=past == 2048,
        )
        for past in (512, 2048, 8192, 32768)
    )
    sizes = {"heads": LARGE.queries, "kv_heads": LARGE.keys, "size": LARGE.size}
    yield Family(lambda: regions.decode(**sizes), points, lambda: grouped_query_attention(**sizes), bind_cache)


def rows() -> Iterator[Family]:
    """Programs over rows: norms at BERT's and at a large width, pointwise work, rotations."""
    for hidden in (768, 4096):
        for rms in (False, True):
            for skip in (False, True):
                shapes: Shapes = dict.fromkeys(("x", "skip") if skip else ("x",), (1, 512, hidden))
                name = f"{'skip + ' if skip else ''}{'RMSNorm' if rms else 'LayerNorm'} 512×{hidden}"
                yield Family(
                    lambda hidden=hidden, rms=rms, skip=skip: regions.norm(hidden=hidden, rms=rms, skip=skip),
                    (row(name, shapes, "x", quick=skip and hidden == 768 and not rms),),
                )
    for kind, shape in (("softmax", (1, 6144, 512)), ("gelu", (1, 512, 3072)), ("swiglu", (1, 512, 11008))):
        shapes: Shapes = dict.fromkeys(("x", "up") if kind == "swiglu" else ("x",), shape)
        name, function = f"{kind} {shape[1]}×{shape[2]}", "gelus" if kind == "gelu" else "exponentials"
        yield Family(
            lambda kind=kind, width=shape[2]: regions.pointwise(kind, hidden=width),
            (replace(row(name, shapes, "x", quick=kind == "gelu"), **{function: prod(shape)}),),
        )
    shapes = {"x": (1, 32, 512, 128), "cos": (512, 128), "sin": (512, 128)}
    yield Family(regions.rope, (row("RoPE 32×512×128", shapes, "x"),))


def copies() -> Iterator[Family]:
    """Next to no work on the bytes of each program over rows: what a session reaches of the floors that these have."""
    doubled = ((512, 768), (512, 4096), (6144, 512), (512, 3072), (16384, 128))
    summed = ((512, 768), (512, 4096), (512, 11008))
    for kind, names, all_sizes in (("double", ("x",), doubled), ("sum", ("x", "up"), summed)):
        for rows, width in all_sizes:
            case = f"copy: {'2·x' if kind == 'double' else 'x + y'} + 1 {rows}×{width}"
            point = row(case, dict.fromkeys(names, (1, rows, width)), "x")
            yield Family(
                lambda kind=kind, width=width: regions.pointwise(kind, hidden=width),
                (point,),
                lambda names=names: one_operator(names),
            )


def one_operator(names: tuple[str, ...]) -> onnx.ModelProto:
    """y = x · 2, or x + up."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, "rows", "width")) for name in (*names, "y")]
    two = helper.make_tensor("two", TensorProto.FLOAT, (), (2.0,))
    node = helper.make_node("Add", names, ["y"]) if len(names) == 2 else helper.make_node("Mul", ["x", "two"], ["y"])
    graph = helper.make_graph([node], "copy", tensors[:-1], tensors[-1:], [two] if len(names) == 1 else [])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", regions.OPSET)], ir_version=8)


def row(name: str, inputs: Shapes, like: str, *, quick: bool = False) -> Point:
    """A program that gives out a tensor as large as input `like`."""
    moved = 4 * (sum(map(prod, inputs.values())) + prod(inputs[like]))
    return Point(name, inputs, 0, moved, copies=True, quick=quick)


# ---- measuring


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one case of each kind, measured briefly")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--plot", type=Path, help="where to draw the ratios, as SVG or PNG")
    parser.add_argument("--page", type=Path, help="write the rows to this file as Markdown")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--threads", type=int, default=2, choices=(1, 2))
    parser.add_argument("--precision", default="f32", choices=("f32", "bf16"))
    arguments = parser.parse_args()
    options = replace(  # also where ONNX Runtime is known to be faster
        Options.from_environment(), fuse_all=True, precision=arguments.precision, threads=arguments.threads
    )
    toolchain = find_toolchain(options.cache / "objects", options.compiler)
    measured, library = measure_profile(toolchain, progress=lambda stage: None), load_probes(toolchain)
    machine = Machine(measured, arguments.threads, arguments.precision)
    print(machine.text)
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tilefuse-bench-") as folder:
        for family in (*linears(), *stacks(), *attentions(), *decodes(), *rows(), *copies()):
            points = [p for p in family.points if arguments.only in p.name and (p.quick or not arguments.quick)]
            if options.precision == "bf16":
                points = [point for point in points if point.multiply_adds]
            if not points:
                continue
            sessions = Sessions.of(family, Path(folder), options, arguments.threads)
            check(points[0], sessions)
            for point in points:
                seconds = QUICK_SECONDS if arguments.quick else SECONDS
                found.append(run(point, sessions, machine, library, seconds))
                print(describe(found[-1], point, found), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    if arguments.page:
        every = [asdict(one) for one in found]
        arguments.page.write_text("\n".join((*summary(every), "", *table(every))) + "\n")
    if arguments.plot:
        plot([asdict(one) for one in found], arguments.plot)


@dataclass(frozen=True)
class Machine:
    """What the machine does at best on some threads, with operands of products in `precision`."""

    measured: Measured
    threads: int
    precision: str

    def rate(self, name: str) -> float:
        """A measured rate of all threads."""
        rate = self.measured.rate(name)
        return rate.alone if self.threads == 1 else rate.together * self.threads

    def floor(self, point: Point, moving: float | None = None) -> float:
        """Seconds that nothing can be faster than; `moving`: those that moving its bytes took in turn with it."""
        moved, level = self.moved(point), self.level(point)
        if moving is None:
            moving = moved / 2 / self.rate(f"{level} copies") if point.copies else moved / self.rate(f"{level} reads")
        functions = point.exponentials / self.rate("exponentials"), point.gelus / self.rate("GELUs")
        return max(point.multiply_adds / self.products, *functions, moving)

    def moved(self, point: Point) -> int:
        """Bytes, weights among them."""
        return point.moved + point.weights * (2 if self.precision == "bf16" else 4)

    def level(self, point: Point) -> str:
        """The cache that holds what a point moves, or DRAM."""
        profile = self.measured.profile
        room = (("L2", profile.l2 * self.threads), ("L3", profile.l3))
        return next((name for name, size in room if self.moved(point) <= 0.8 * size), "DRAM")

    @property
    def products(self) -> float:
        """Multiply-adds a second; those of float32 where there is no instruction for narrower ones."""
        return self.rate(PRODUCTS[self.precision]) or self.rate(PRODUCTS["f32"])

    @property
    def text(self) -> str:
        """The rates that floors are made of."""
        names = ("L2 reads", "L2 copies", "L3 reads", "L3 copies", "DRAM reads", "DRAM copies")
        rates = ", ".join(f"{name} {self.rate(name) / 1e9:.0f}" for name in names)
        return f"{self.threads} threads at best: {self.products / 1e9:.0f} G multiply-adds/s; GB/s: {rates}"


@dataclass(frozen=True)
class Sessions:
    """One family's models: paths, sessions of ONNX Runtime, and what binds inputs to each peer."""

    original: Path
    fused: Path
    ours: ort.InferenceSession
    peer: ort.InferenceSession
    runners: Mapping[str, Callable[[Feeds], Callable[[], object]]]
    largest_error: float

    @staticmethod
    def of(family: Family, folder: Path, options: Options, threads: int) -> "Sessions":
        """Builds and fuses the model. Exits where not all of it becomes one kernel."""
        original, fused = write(family.build(), folder / "kernel.onnx"), folder / "kernel.fused.onnx"
        fuse(family, original, fused, options)
        found = {"ours": load(fused, threads=threads), "onnxruntime": default_session(original, threads)}
        if options.precision != "f32":
            wide = fused.with_name("kernel.f32.onnx")
            fuse(family, original, wide, replace(options, precision="f32"))
            found["ours f32"] = load(wide, threads=threads)
        runners: dict[str, Callable[[Feeds], Callable[[], object]]] = {
            name: (lambda feeds, session=session: bound_run(session, feeds)) for name, session in found.items()
        }
        if family.peer is not None:
            peer = default_session(write(family.peer(), folder / "peer.onnx"), threads)
            runners["onnxruntime fused"] = lambda feeds: family.bind_peer(peer, feeds)
        runners |= openvino_runner(original, threads, options.precision)
        limit = LARGEST_ERROR[options.precision]
        return Sessions(original, fused, found["ours"], found["onnxruntime"], runners, limit)


def fuse(family: Family, original: Path, fused: Path, options: Options) -> None:
    """Exits where not all of a model becomes one kernel."""
    report = optimize(original, fused, options=options, progress=lambda stage: None, verify=False)
    if report.misses or report.nodes_after != len(report.regions):
        sys.exit(f"{family.points[0].name}: not all of it is fused: {report.misses}")


def openvino_runner(path: Path, threads: int, precision: str) -> dict[str, Callable[[Feeds], Callable[[], object]]]:
    """OpenVINO where it is installed, else nothing."""
    if importlib.util.find_spec("openvino") is None:
        return {}
    openvino: Any = importlib.import_module("openvino")
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(str(path), "CPU", settings)

    def bind(feeds: Feeds) -> Callable[[], object]:
        request = compiled.create_infer_request()
        request.infer(feeds)
        return request.infer  # the inputs stay bound

    ran = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()  # f32 where it has nothing narrower
    return {"openvino" if ran == "f32" else f"openvino {ran}": bind}


def check(point: Point, sessions: Sessions) -> None:
    """Exits where the fused model is wrong."""
    verdict = verify(sessions.original, sessions.fused, inputs=make_feeds(point))
    if not verdict.ok:
        sys.exit(f"{point.name}: the fused model is wrong: {verdict.mismatch}")


def run(point: Point, sessions: Sessions, machine: Machine, library: ctypes.CDLL, seconds: float) -> Row:
    """Times one case."""
    feeds = make_feeds(point)
    ours, other = (np.asarray(session.run(None, feeds)[0]) for session in (sessions.ours, sessions.peer))
    error = float((np.abs(ours - other).max(-1) / np.sqrt(np.square(other).mean(-1))).max())
    if not error < sessions.largest_error:
        sys.exit(f"{point.name}: differs from ONNX Runtime by {error:.2g} of a row's root mean square")
    runs = {name: bind(feeds) for name, bind in sessions.runners.items()}
    took: list[float] = []
    if machine.level(point) == "DRAM":
        move = moving(library, machine.moved(point), machine.threads, copies=point.copies)
        runs["moving"] = lambda: took.append(move())
    medians = time_in_turns(runs, seconds)
    medians.pop("moving", None)  # with the start of threads
    floor = machine.floor(point, statistics.median(took) if took else None)
    return Row(point.name, "µs", medians.pop("ours"), medians, floor * 1e6, error)


def time_in_turns(runs: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median microseconds of each."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    long: set[str] = set()
    for name, call in runs.items():
        if timed(call) > LONG_MS or timed(call) > LONG_MS:  # the first also warms up
            long.add(name)
    end, turns = time.perf_counter() + seconds, 0
    while turns < TURNS or time.perf_counter() < end:
        for name, call in runs.items():
            taken[name] += [timed(call)] if name in long else turn(call)
        turns += 1
    return {name: statistics.median(times) * 1e3 for name, times in taken.items()}


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of one run."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def make_feeds(point: Point) -> Feeds:
    """Standard normal inputs; a mask with the last tenth hidden."""
    rng = np.random.default_rng(0)
    feeds: Feeds = {}
    for name, shape in point.inputs.items():
        if name == "mask":
            feeds[name] = (np.arange(shape[-1]) < shape[-1] * 0.9).astype(np.int64)[None]
        else:
            feeds[name] = aligned(rng.standard_normal(shape, dtype=np.float32))
    return feeds


def describe(row: Row, point: Point, before: list[Row]) -> str:
    """One line for people."""
    peers = ", ".join(f"{name} {value:.0f} ({value / row.ours:.2f}×)" for name, value in row.peers.items())
    text = f"{row.case:38} {row.ours:9.0f} µs, {row.floor / row.ours:4.0%} of the floor's speed; {peers}"
    beside = next((other for other in before if other.case == point.round), None)
    if beside is not None:
        slower = (row.ours / row.floor) / (beside.ours / beside.floor)
        text += f"; {slower:.2f} times as long per multiply-add as {beside.case}"
    return text


if __name__ == "__main__":
    main()
