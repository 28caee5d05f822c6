"""What a request costs the server, beside the least that grpcio can do, and what batching gives.

    python -m benchmarks.serving [--quick] [--json FILE]

Costs are processor time of the server process per request, with 8 in flight, so that neither the client's speed nor
other work on the machine counts. The floor is a grpcio handler that takes bytes and answers with the same bytes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from benchmarks.serving_soak import start_server
from proto import open_inference_pb2 as pb

METHOD = "/inference.GRPCInferenceService/ModelInfer"
LIMITS = (("grpc.max_receive_message_length", 2**30), ("grpc.max_send_message_length", 2**30))
SIZES = {"4 KB": (1024, 2000), "602 KB": (150_528, 300), "4 MB": (1_048_576, 60)}
IN_FLIGHT = 8


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


def request_of(count: int) -> bytes:
    """A request with `count` floats."""
    request = pb.ModelInferRequest(model_name="plain", raw_input_contents=[np.ones(count, dtype=np.float32).tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[count])
    return request.SerializeToString()


def answer_with_canned_bytes() -> None:
    """The floor: a server that takes bytes and answers with as many."""
    canned: dict[int, bytes] = {}

    def answer(data: bytes, context: grpc.ServicerContext) -> bytes:
        return canned.setdefault(len(data), data)

    server = grpc.server(futures.ThreadPoolExecutor(16), options=LIMITS)
    handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(answer)}
    service = "inference.GRPCInferenceService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    server.wait_for_termination()


def processor_seconds(process: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def microseconds_per_request(url: str, process: int, data: bytes, count: int) -> float:
    """Processor time of the server, for `count` requests of 8 clients."""
    with grpc.insecure_channel(url, options=LIMITS) as channel:
        call = channel.unary_unary(METHOD)
        call(data)

        def send() -> None:
            for _ in range(count // IN_FLIGHT):
                call(data)

        before = processor_seconds(process)
        threads = [threading.Thread(target=send) for _ in range(IN_FLIGHT)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return (processor_seconds(process) - before) / (count // IN_FLIGHT * IN_FLIGHT) * 1e6


def lone_overhead(url: str, model: Path, count: int) -> float:
    """Median milliseconds that a lone request of 4 KB takes beyond `session.run`."""
    data, x = request_of(1024), np.ones(1024, dtype=np.float32)
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    taken: tuple[list[float], list[float]] = ([], [])
    with grpc.insecure_channel(url) as channel:
        call = channel.unary_unary(METHOD)
        for _ in range(count):
            started = time.perf_counter()
            call(data)
            between = time.perf_counter()
            session.run(None, {"x": x})
            taken[0].append(between - started)
            taken[1].append(time.perf_counter() - between)
    return (statistics.median(taken[0]) - statistics.median(taken[1])) * 1e3


@contextmanager
def servers(folder: Path) -> Generator[tuple[tuple[str, int], tuple[str, int]]]:
    """Address and process of our server and of the floor."""
    for name in ("plain", "padded"):  # the names that `start_server` loads
        save_model(folder / name / "1" / "model.onnx")
        (folder / name / "tilefuse.toml").write_text("optimize = false\n")
    ours, url = start_server(folder)
    command = [sys.executable, "-m", "benchmarks.serving", "--floor"]
    floor = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert floor.stdout is not None
        yield (url, ours.pid), (f"127.0.0.1:{floor.stdout.readline().strip()}", floor.pid)
    finally:
        ours.terminate()
        floor.terminate()
        ours.wait()
        floor.wait()


def main() -> None:
    """Parse the arguments, measure, and print one line per case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the requests")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--floor", action="store_true", help="be the server that the floor is measured with")
    arguments = parser.parse_args()
    if arguments.floor:
        answer_with_canned_bytes()
        return
    share = 5 if arguments.quick else 1
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, servers(Path(name)) as (ours, floor):
        for size, (floats, count) in SIZES.items():
            data = request_of(floats)
            turns = [
                [microseconds_per_request(*server, data, count // share) for server in (ours, floor)] for _ in range(3)
            ]
            mine, least = (statistics.median(column) for column in zip(*turns, strict=True))
            rows.append({"case": f"{size}, 8 in flight", "unit": "us", "ours": mine, "floor": least})
        overhead = lone_overhead(ours[0], Path(name) / "plain" / "1" / "model.onnx", 1000 // share)
        rows.append({"case": "lone 4 KB over session.run, p50", "unit": "ms", "ours": overhead, "floor": None})
    for row in rows:
        beside = f", floor {row['floor']:.0f}, {row['floor'] / row['ours']:.2f} of it" if row["floor"] else ""
        print(f"{row['case']}: {row['ours']:.2f} {row['unit']}{beside}")
    if arguments.json:
        arguments.json.write_text(json.dumps([{**row, "peers": {}, "error": None} for row in rows]))


if __name__ == "__main__":
    main()
