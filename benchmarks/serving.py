"""How fast requests are answered, beside grpcio's ceiling, KServe's SDK and MLServer, and what batching gives.

    python -m benchmarks.serving [--quick] [--json FILE] [--kserve PYTHON] [--mlserver PYTHON] [--texts]

Servers run on processor 0 and the load generator, h2load, on processor 1, with 8 requests in flight; turns are
interleaved, and medians are told. The ceiling is a grpcio handler that takes bytes and answers with as many. --kserve
and --mlserver name the interpreters of environments that have them (serving_peers says how to make these). A lone
request is sent by grpcio, as Python's clients do, which takes most of the time itself, and by h2load, which is C.

--texts measures a sentence encoder of MiniLM's size with 32 texts of mixed lengths in flight: batched without padding;
batched and padded to the longest; to five buckets; one by one, the same requests to a model that does not batch; and
one in flight. The bound is the multiply-adds that the texts need at the processor's measured peak.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper
from serving_peers import (
    LIMITS,
    METHOD,
    Peer,
    answer_with_canned_bytes,
    pinned,
    processor_seconds,
    request_of,
    start_bytes,
    start_kserve,
    start_mlserver,
    wait_for_answer,
)
from serving_soak import start_server
from whole_models import measure_peak

from models import minilm
from proto import open_inference_pb2 as pb
from runtime.options import Options

SIZES = {"4 KB": (1024, 6000), "602 KB": (150_528, 400), "4 MB": (1_048_576, 80)}
IN_FLIGHT = 8
TURNS = 3
TEXTS_IN_FLIGHT = 32
TEXT_LENGTHS = (4, 40)  # tokens of a sentence
BATCHED = "max_batch_size: 32 dynamic_batching { }"
PADDED = "[padding]\ndim = 'seq'\nbuckets = [40]\nmask = 'attention_mask'\n"
BUCKETS = "[padding]\ndim = 'seq'\nbuckets = [8, 16, 24, 32, 40]\nmask = 'attention_mask'\n"
UNPADDED = f"{PADDED}unpad = true\n"
LAYERS, HIDDEN = 6, 384  # of MiniLM
OURS, CEILING = "ours", "grpcio, bytes"


@dataclass
class Row:
    """One case; `peers` by name."""

    case: str
    unit: str
    ours: float | None
    peers: dict[str, float] = field(default_factory=dict[str, float])
    floor: float | None = None
    error: str | None = None


def save_model(path: Path) -> None:
    """y = x + x for floats of [n]."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "graph",
        [value("x", TensorProto.FLOAT, ["n"])],
        [value("y", TensorProto.FLOAT, ["n"])],
    )
    path.parent.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9), path)


def turn(peer: Peer, body: Path, count: int) -> tuple[float, float]:
    """Requests per second, and microseconds of processor time of the server for each, with 8 in flight."""
    command = ["h2load", "-n", str(count), "-c", str(IN_FLIGHT), "-m", "1", "-w", "24", "-W", "28", "-d", str(body)]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers", f"http://127.0.0.1:{peer.port}{METHOD}"]
    before = processor_seconds(peer.process.pid)
    told = subprocess.run(pinned(1, command), capture_output=True, text=True, check=True).stdout
    used = processor_seconds(peer.process.pid) - before
    rate, done = re.search(r"([\d.]+) req/s", told), re.search(r"(\d+) succeeded", told)
    if rate is None or done is None or int(done[1]) != count:
        raise SystemExit(f"{peer.name} did not answer {count} requests:\n{told}")
    return float(rate[1]), used / count * 1e6


def measure_sizes(peers: Sequence[Peer], folder: Path, share: int) -> list[Row]:
    """Rate and cost by size; the first peer is ours, the second the ceiling."""
    rows: list[Row] = []
    for size, (floats, count) in SIZES.items():
        data, body = request_of(floats), folder / "body"
        body.write_bytes(b"\0" + len(data).to_bytes(4, "big") + data)
        turns = [[turn(peer, body, count // share) for peer in peers] for _ in range(TURNS)]
        for at, unit in enumerate(("requests/s", "us of the server")):
            found = {
                peer.name: statistics.median(taken[number][at] for taken in turns) for number, peer in enumerate(peers)
            }
            floor = found.pop(CEILING)
            rows.append(Row(f"{size}, {IN_FLIGHT} in flight", unit, found.pop(OURS), found, floor))
    return rows


def lone_overhead(peer: Peer, model: Path, count: int) -> float:
    """Median milliseconds that a lone request of 4 KB takes beyond `session.run`, its client included."""
    data, x = request_of(1024), np.ones(1024, dtype=np.float32)
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    taken: tuple[list[float], list[float]] = ([], [])
    with grpc.insecure_channel(f"127.0.0.1:{peer.port}") as channel:
        call = channel.unary_unary(METHOD)
        for _ in range(count):
            started = time.perf_counter()
            call(data)
            between = time.perf_counter()
            session.run(None, {"x": x})
            taken[0].append(between - started)
            taken[1].append(time.perf_counter() - between)
    return (statistics.median(taken[0]) - statistics.median(taken[1])) * 1e3


def lone_overhead_in_c(peer: Peer, model: Path, body: Path, count: int) -> float:
    """The same with h2load as the client, one request after the other on one connection."""
    log = body.with_suffix(".log")
    command = ["h2load", "-n", str(count), "-c", "1", "-m", "1", "-d", str(body), f"--log-file={log}"]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers", f"http://127.0.0.1:{peer.port}{METHOD}"]
    subprocess.run(pinned(1, command), capture_output=True, check=True)
    taken = [float(line.split()[2]) / 1e3 for line in log.read_text().splitlines()]
    log.unlink()
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    x, runs = np.ones(1024, dtype=np.float32), list[float]()
    for _ in range(count):
        started = time.perf_counter()
        session.run(None, {"x": x})
        runs.append((time.perf_counter() - started) * 1e3)
    return statistics.median(taken) - statistics.median(runs)


def measure_lone(peers: Sequence[Peer], model: Path, body: Path, count: int) -> list[Row]:
    """What a lone request takes beyond `session.run`, by client; turns of the peers are interleaved."""
    data = request_of(1024)
    body.write_bytes(b"\0" + len(data).to_bytes(4, "big") + data)
    clients: dict[str, Callable[[Peer], float]] = {
        "": lambda peer: lone_overhead(peer, model, count // TURNS),
        ", client in C": lambda peer: lone_overhead_in_c(peer, model, body, count // TURNS),
    }
    rows: list[Row] = []
    for client, measure in clients.items():
        turns = [[measure(peer) for peer in peers] for _ in range(TURNS)]
        found = {peer.name: statistics.median(turn[at] for turn in turns) for at, peer in enumerate(peers)}
        floor, ours = found.pop(CEILING), found.pop(OURS)
        rows.append(Row(f"lone 4 KB over session.run, p50{client}", "ms", ours, found, floor))
    return rows


def text_of(model: str, length: int, chance: np.random.Generator) -> bytes:
    """A request for the embedding of one text."""
    ids = chance.integers(1000, 30_000, (1, length))
    request = pb.ModelInferRequest(model_name=model)
    for name, array in (("input_ids", ids), ("attention_mask", np.ones_like(ids)), ("token_type_ids", ids * 0)):
        request.inputs.add(name=name, datatype="INT64", shape=ids.shape)
        request.raw_input_contents.append(array.tobytes())
    return request.SerializeToString()


def texts_per_second(url: str, model: str, count: int, in_flight: int) -> tuple[float, float, float]:
    """Rate, and the median and 99th percentile of the milliseconds that an answer takes."""
    chance = np.random.default_rng(3)
    texts = iter([text_of(model, int(length), chance) for length in chance.integers(*TEXT_LENGTHS, count)])
    lock, taken = threading.Lock(), list[float]()
    with grpc.insecure_channel(url, options=LIMITS) as channel:
        call = channel.unary_unary(METHOD)

        def send() -> None:
            while True:
                with lock:
                    text = next(texts, None)
                if text is None:
                    return
                started = time.perf_counter()
                call(text)
                taken.append((time.perf_counter() - started) * 1e3)

        started = time.perf_counter()
        threads = [threading.Thread(target=send) for _ in range(in_flight)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rate = count / (time.perf_counter() - started)
    return rate, statistics.median(taken), float(np.percentile(taken, 99))


def measure_texts(folder: Path, share: int) -> list[Row]:
    """Texts of mixed lengths, as the module says."""
    path = folder / "batched" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    minilm.build(path)
    models = {"batched": UNPADDED, "padded": PADDED, "buckets": BUCKETS}
    for name in ("padded", "buckets", "single"):
        shutil.copytree(folder / "batched", folder / name)
    for name, padding in models.items():
        (folder / name / "config.pbtxt").write_text(BATCHED)
        (folder / name / "tilefuse.toml").write_text(f"threads = 1\noptimize_first = true\n{padding}")
    (folder / "single" / "tilefuse.toml").write_text("threads = 1\ninstances = 1\noptimize_first = true\n")
    process, url = start_server(folder, models=(*models, "single"), prefix=pinned(0, []))
    os.sched_setaffinity(0, {1})
    cases: dict[str, Callable[[], tuple[float, float, float]]] = {
        "batched": lambda: texts_per_second(url, "batched", 640 // share, TEXTS_IN_FLIGHT),
        "padded to the longest": lambda: texts_per_second(url, "padded", 640 // share, TEXTS_IN_FLIGHT),
        "five buckets": lambda: texts_per_second(url, "buckets", 640 // share, TEXTS_IN_FLIGHT),
        "one by one": lambda: texts_per_second(url, "single", 640 // share, TEXTS_IN_FLIGHT),
        "one in flight": lambda: texts_per_second(url, "single", 320 // share, 1),
    }
    try:
        turns = [{name: run() for name, run in cases.items()} for _ in range(TURNS)]
    finally:
        process.terminate()
        process.wait()
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    found = {name: [statistics.median(one[name][at] for one in turns) for at in range(3)] for name in cases}
    ours, bound = found.pop("batched"), texts_at_peak()
    case = f"MiniLM, texts of {TEXT_LENGTHS[0]} to {TEXT_LENGTHS[1] - 1} tokens, {TEXTS_IN_FLIGHT} in flight"
    return [
        Row(case, unit, ours[at], {name: values[at] for name, values in found.items()}, bound if at == 0 else None)
        for at, unit in enumerate(("texts/s", "ms p50", "ms p99"))
    ]


def texts_at_peak() -> float:
    """Texts a second if one core did nothing but their projections' multiply-adds, at its measured peak."""
    tokens = sum(range(*TEXT_LENGTHS)) / len(range(*TEXT_LENGTHS))
    return measure_peak(Options.from_environment(), 1) / (tokens * LAYERS * 12 * HIDDEN**2)


def start_ours(folder: Path) -> Peer:
    """Our server, with the model as `plain`."""
    save_model(folder / "plain" / "1" / "model.onnx")
    (folder / "plain" / "tilefuse.toml").write_text("optimize = false\nthreads = 1\n")
    process, url = start_server(folder, models=("plain",), prefix=pinned(0, []))
    peer = Peer(OURS, int(url.rpartition(":")[2]), process)
    wait_for_answer(peer.name, peer.port, process)
    return peer


def measure(arguments: argparse.Namespace, folder: Path, share: int) -> list[Row]:
    """All rows that were asked for."""
    if arguments.texts:
        return measure_texts(folder / "texts", share)
    if shutil.which("h2load") is None:
        return [Row("sizes", "requests/s", None, error="h2load is not installed: apt-get install nghttp2-client")]
    with ExitStack() as stack:
        peers: list[Peer] = []

        def keep(peer: Peer) -> None:
            stack.callback(peer.process.wait)
            stack.callback(peer.process.terminate)
            peers.append(peer)

        keep(start_ours(folder / "models"))
        keep(start_bytes())
        model = folder / "models" / "plain" / "1" / "model.onnx"
        for name, python, start in (
            ("kserve", arguments.kserve, start_kserve),
            ("mlserver", arguments.mlserver, start_mlserver),
        ):
            if python is None:
                print(f"{name}: not measured, as --{name} names no interpreter that has it")
            else:
                keep(start(python.absolute(), model, folder / name))
        rows = measure_sizes(peers, folder, share)
        rows += measure_lone(peers, model, folder / "body", 1500 // share)
    return rows


def main() -> None:
    """Parse the arguments, measure, and print one line per case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the requests")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--kserve", type=Path, metavar="PYTHON")
    parser.add_argument("--mlserver", type=Path, metavar="PYTHON")
    parser.add_argument("--texts", action="store_true", help="measure a sentence encoder instead")
    parser.add_argument("--bytes", type=int, metavar="PORT", help="be the server that is the ceiling")
    arguments = parser.parse_args()
    if arguments.bytes:
        answer_with_canned_bytes(arguments.bytes)
        return
    with tempfile.TemporaryDirectory() as name:
        rows = measure(arguments, Path(name), 5 if arguments.quick else 1)
    for row in rows:
        bound = "the bound" if arguments.texts else CEILING
        beside = dict(row.peers) | ({bound: row.floor} if row.floor is not None else {})
        ours = row.ours
        shown = [
            f"{name} {value:.4g} (ours is {ours / value:.2f} of it)" for name, value in beside.items() if ours and value
        ]
        print(f"{row.case}: {row.error or f'{ours:.4g} {row.unit}'}" + "".join(f"; {text}" for text in shown))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
