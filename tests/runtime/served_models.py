"""Tiny models for the server's tests, and a server process over them."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from proto.open_inference_pb2_grpc import GRPCInferenceServiceStub
from runtime.server.loading import Loader
from runtime.server.serve import RunningServer, ServerOptions
from runtime.server.settings import Settings
from runtime.server.transport import TransportOptions

ROOT = Path(__file__).resolve().parents[2]
Shape = Sequence[int | str | None]


def save_graph(path: Path, nodes: list[onnx.NodeProto], inputs: Any, outputs: Any, *, weights: Any = ()) -> None:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, list(weights))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)


def value(name: str, kind: int, shape: Shape) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def save_double(path: Path, *, factor: float = 2.0) -> None:
    """y = factor * x, with x of [batch, 4]."""
    save_graph(
        path,
        [helper.make_node("Mul", ["x", "factor"], ["y"])],
        [value("x", TensorProto.FLOAT, ["batch", 4])],
        [value("y", TensorProto.FLOAT, ["batch", 4])],
        weights=[numpy_helper.from_array(np.array(factor, dtype=np.float32), "factor")],
    )


def save_pair(path: Path) -> None:
    """total = a + b and difference = a - b, with one symbol for the first dim of both."""
    save_graph(
        path,
        [helper.make_node("Add", ["a", "b"], ["total"]), helper.make_node("Sub", ["a", "b"], ["difference"])],
        [value(name, TensorProto.INT64, ["rows", 3]) for name in ("a", "b")],
        [value(name, TensorProto.INT64, ["rows", 3]) for name in ("total", "difference")],
    )


def save_identity(path: Path, kind: int) -> None:
    """y = x for one element type, of any extent."""
    save_graph(path, [helper.make_node("Identity", ["x"], ["y"])], [value("x", kind, ["n"])], [value("y", kind, ["n"])])


def save_lookup(path: Path) -> None:
    """Rows of a table of 10; an id outside of it makes the model fail."""
    table = numpy_helper.from_array(np.arange(20, dtype=np.float32).reshape(10, 2), "table")
    save_graph(
        path,
        [helper.make_node("Gather", ["table", "ids"], ["rows"])],
        [value("ids", TensorProto.INT64, ["n"])],
        [value("rows", TensorProto.FLOAT, ["n", 2])],
        weights=[table],
    )


def save_slow(path: Path) -> None:
    """y = x after `steps` products of a 256 × 256 matrix, so that a caller chooses how long a run takes."""
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["state", "identity"], ["next"]),
            helper.make_node("Identity", ["go"], ["still"]),
        ],
        "body",
        [
            value("step", TensorProto.INT64, []),
            value("go", TensorProto.BOOL, []),
            value("state", TensorProto.FLOAT, [256, 256]),
        ],
        [value("still", TensorProto.BOOL, []), value("next", TensorProto.FLOAT, [256, 256])],
    )
    save_graph(
        path,
        [
            helper.make_node("Expand", ["x", "extents"], ["start"]),
            helper.make_node("Loop", ["steps", "", "start"], ["end"], body=body),
            helper.make_node("ReduceMax", ["end"], ["y"], keepdims=0),
        ],
        [value("x", TensorProto.FLOAT, [1]), value("steps", TensorProto.INT64, [])],
        [value("y", TensorProto.FLOAT, [])],
        weights=[
            numpy_helper.from_array(np.eye(256, dtype=np.float32), "identity"),
            numpy_helper.from_array(np.array([256, 256]), "extents"),
        ],
    )


def plain_loader(cache: Path, optimize: Callable[[Path, Path, Settings], None] | None = None) -> Loader:
    """A loader without a compiler: what it optimises is a copy, unless `optimize` does something else."""

    def copy(model: Path, output: Path, settings: Settings) -> None:
        shutil.copy(model, output)

    def open_session(path: Path, settings: Settings, fused: bool) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    return Loader(optimize=optimize or copy, open_session=open_session, cache=cache)


@contextmanager
def running(root: Path, loader: Loader, **options: Any) -> Generator[tuple[RunningServer, Any]]:
    """A server of this process and a stub that talks to it."""
    server = RunningServer(ServerOptions(transport=TransportOptions(port=0), **options))
    try:
        server.load(root, loader)
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield server, GRPCInferenceServiceStub(channel)
    finally:
        assert server.drain()


class ServerProcess:
    """`tilefuse serve` in a process of its own, on a free port of the loopback interface."""

    def __init__(self, repository: Path, cache: Path, *flags: str) -> None:
        environment = {
            **os.environ,
            "TILEFUSE_CACHE": str(cache),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        command = [sys.executable, "-m", "runtime.cli", "serve", str(repository), "--port", "0", *flags]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self.url = self.status_url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))
            listening = re.search(r"listening on (127\.0\.0\.1:\d+)", line)
            if listening:
                self.url = listening[1]
            status = re.search(r"status page at (http://127\.0\.0\.1:\d+)", line)
            if status:
                self.status_url = status[1]
            if re.search(r"\bready\b", line):
                self._ready.set()
        self._ready.set()

    def wait_ready(self, seconds: float = 150) -> "ServerProcess":
        """Wait until all models are loaded."""
        if not self._ready.wait(seconds) or self.process.poll() is not None:
            self.process.kill()
            raise AssertionError(self.log)
        return self

    def wait_exit(self, seconds: float = 150) -> int:
        """Wait for the process to end and for the rest of its log."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._reader.join(seconds)
        return status

    def stop(self) -> int:
        """Send SIGTERM and wait."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait_exit()
