"""Runs the server under changing traffic for minutes; says whether memory stayed flat and all answers were right.

    python -m benchmarks.serving_soak [--seconds 600] [--quick] [--json FILE]

Clients send batches of varying shapes to a batched, padded model and to a plain one, some cancel, some processes are
killed while they wait, and the models are loaded again and again. The server runs in a process of its own. The exit
status is 1 if an answer was wrong, a request was lost, or memory grew by more than 5 % after the first fifth.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
from onnx import TensorProto, helper

from proto import open_inference_pb2 as pb
from proto.open_inference_pb2_grpc import GRPCInferenceServiceStub

GROWTH = 1.05
CONFIG = "max_batch_size: 16 dynamic_batching { preferred_batch_size: [ 8 ] }"
PADDING = "optimize = false\n[padding]\ndim = 'length'\nbuckets = [16, 64, 256]\nmask = 'mask'\n"
EXPECTED = {grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}  # only for calls that are cut on purpose


@dataclass
class Tally:
    """What the clients saw; safe enough, as each field is only added to under the lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    answered: int = 0
    cut: int = 0
    reloads: int = 0
    killed: int = 0
    faults: list[str] = field(default_factory=list[str])

    def add(self, name: str) -> None:
        """Count one more."""
        with self.lock:
            setattr(self, name, getattr(self, name) + 1)

    def fault(self, text: str) -> None:
        """Note what must not happen."""
        with self.lock:
            self.faults.append(text)


def save_model(path: Path) -> None:
    """y = ids + ids, of [batch, length], with a mask that it does not read but as a factor of 1."""
    value = helper.make_tensor_value_info
    shape = ["batch", "length"]
    nodes = [
        helper.make_node("Add", ["ids", "ids"], ["twice"]),
        helper.make_node("Mul", ["twice", "mask"], ["y"]),
    ]
    inputs = [value(name, TensorProto.INT64, shape) for name in ("ids", "mask")]
    graph = helper.make_graph(nodes, "graph", inputs, [value("y", TensorProto.INT64, shape)])
    path.parent.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9), path)


def request_for(model: str, ids: np.ndarray[Any, Any]) -> pb.ModelInferRequest:
    """Ask `model` for twice the ids."""
    request = pb.ModelInferRequest(model_name=model)
    for name, array in (("ids", ids), ("mask", np.ones_like(ids))):
        request.inputs.add(name=name, datatype="INT64", shape=ids.shape)
        request.raw_input_contents.append(array.tobytes())
    return request


def keep_asking(url: str, seed: int, tally: Tally, stop: threading.Event) -> None:
    """Send requests of random shapes, cancel some, and check every answer."""
    chance = np.random.default_rng(seed)
    with grpc.insecure_channel(url, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        while not stop.is_set():
            ids = chance.integers(0, 2**40, (int(chance.integers(1, 9)), int(chance.integers(1, 257))))
            request = request_for(("padded", "plain")[int(chance.integers(2))], ids)
            call = stub.ModelInfer.future(request, timeout=60)
            cut = chance.random() < 0.03
            if cut:
                time.sleep(float(chance.random()) * 0.002)
                call.cancel()
            try:
                answer = call.result()
            except grpc.FutureCancelledError:
                tally.add("cut")
                continue
            except grpc.RpcError as error:
                failed: Any = error
                if not (cut and failed.code() in EXPECTED):
                    tally.fault(f"{failed.code().name}: {failed.details()}")
                continue
            if not np.array_equal(np.frombuffer(answer.raw_output_contents[0], dtype=np.int64), ids.ravel() * 2):
                tally.fault(f"a wrong answer to ids of {ids.shape}")
            tally.add("answered")


def keep_reloading(url: str, folder: Path, tally: Tally, stop: threading.Event) -> None:
    """Load a model again every second or so, changed on disk."""
    with grpc.insecure_channel(url) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        while not stop.wait(1):
            os.utime(folder / "padded" / "1" / "model.onnx")
            try:
                stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="padded"), timeout=60)
            except grpc.RpcError as error:
                failed: Any = error
                tally.fault(f"reload: {failed.code().name}: {failed.details()}")
            tally.add("reloads")


def keep_killing(url: str, tally: Tally, stop: threading.Event) -> None:
    """Start a client process every few seconds and kill it while it waits."""
    chance = random.Random(1)
    while not stop.wait(4):
        client = subprocess.Popen([sys.executable, "-m", "benchmarks.serving_soak", "--client", url])
        time.sleep(1.5 + chance.random())
        client.send_signal(signal.SIGKILL)
        client.wait()
        tally.add("killed")


def resident(process: int) -> int:
    """Bytes of a process in memory."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def start_server(
    folder: Path, *, models: Sequence[str] = ("padded", "plain"), prefix: Sequence[str] = ()
) -> tuple[subprocess.Popen[str], str]:
    """A server of `models` on a free port, once it is ready; its command begins with `prefix`."""
    flags = ["--port", "0", "--model-control-mode", "explicit"]
    flags += [flag for model in models for flag in ("--load-model", model)]
    command = [*prefix, sys.executable, "-m", "runtime.cli", "serve", str(folder), *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    url = ""
    assert process.stderr is not None
    for line in process.stderr:
        found = re.search(r"listening on (\S+:\d+)", line)
        url = found[1] if found else url
        if line.rstrip().endswith("ready"):
            threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True).start()
            return process, url
    raise SystemExit("the server did not start")


def soak(seconds: float) -> tuple[Tally, list[int], int]:
    """What the clients saw, the server's memory over time, and its exit status after a SIGTERM once they are done."""
    tally, stop = Tally(), threading.Event()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, toml in (("padded", PADDING), ("plain", "optimize = false\n")):
            save_model(folder / model / "1" / "model.onnx")
            (folder / model / "config.pbtxt").write_text(CONFIG)
            (folder / model / "tilefuse.toml").write_text(toml)
        process, url = start_server(folder)
        threads = [threading.Thread(target=keep_asking, args=(url, seed, tally, stop)) for seed in range(8)]
        threads += [threading.Thread(target=keep_reloading, args=(url, folder, tally, stop))]
        threads += [threading.Thread(target=keep_killing, args=(url, tally, stop))]
        for thread in threads:
            thread.start()
        memory: list[int] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end and process.poll() is None:
            time.sleep(min(1.0, seconds / 50))
            memory.append(resident(process.pid))
        stop.set()
        for thread in threads:
            thread.join()
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
    return tally, memory, status


def main() -> None:
    """Parse the arguments, soak, and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--quick", action="store_true", help="30 seconds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--client", metavar="URL", help="only send requests to a server, until killed")
    arguments = parser.parse_args()
    if arguments.client:
        keep_asking(arguments.client, os.getpid(), Tally(), threading.Event())
    tally, memory, status = soak(30 if arguments.quick else arguments.seconds)
    fifth = max(1, len(memory) // 5)
    early, late = np.median(memory[fifth : 2 * fifth]), np.median(memory[-fifth:])
    growth = float(late / early)
    print(f"{tally.answered} answered, {tally.cut} cancelled, {tally.reloads} reloads, {tally.killed} clients killed")
    print(f"memory {early / 2**20:.1f} MiB, at the end {late / 2**20:.1f} MiB ({growth:.3f}); exit status {status}")
    for fault in tally.faults[:20]:
        print(f"FAULT: {fault}")
    if arguments.json:
        rows = [
            {"case": "memory, late over early", "unit": "ratio", "ours": growth, "peers": {}, "floor": GROWTH},
            {"case": "faults", "unit": "count", "ours": len(tally.faults), "peers": {}, "floor": 0},
        ]
        arguments.json.write_text(json.dumps([{**row, "error": None} for row in rows]))
    if tally.faults or growth > GROWTH or status != 0:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
