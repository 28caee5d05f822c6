"""Starts the servers that ours is measured beside: grpcio with bytes, KServe's SDK and MLServer, on processor 0.

In: a model y = x + x named `plain`, and the interpreters of the peers' own environments. Out: `Peer`s that listen and
have answered one request rightly. Invariant: all run one model in ONNX Runtime, on one thread of one process.

    python -m venv /tmp/kserve && /tmp/kserve/bin/pip install kserve==0.21.0 onnxruntime
    python -m venv /tmp/mlserver && /tmp/mlserver/bin/pip install mlserver==1.7.1 onnxruntime
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from proto import open_inference_pb2 as pb

METHOD = "/inference.GRPCInferenceService/ModelInfer"
LIMITS = (("grpc.max_receive_message_length", 2**30), ("grpc.max_send_message_length", 2**30))
START_SECONDS = 120
KSERVE = """
import sys
import onnxruntime as ort
from kserve import InferOutput, InferResponse, Model, ModelServer

class Plain(Model):
    def __init__(self, path):
        super().__init__("plain")
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.ready = True

    def predict(self, payload, headers=None, response_headers=None):
        (y,) = self.session.run(None, {"x": payload.inputs[0].as_numpy()})
        output = InferOutput("y", list(y.shape), "FP32")
        output.set_data_from_numpy(y, binary_data=True)
        return InferResponse(payload.id or "id", "plain", [output])

ModelServer(http_port=int(sys.argv[2]), grpc_port=int(sys.argv[3]), workers=1).start([Plain(sys.argv[1])])
"""
MLSERVER = """
import onnxruntime as ort
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse

class Plain(MLModel):
    async def load(self):
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession("model.onnx", options, providers=["CPUExecutionProvider"])
        return True

    async def predict(self, payload):
        (y,) = self.session.run(None, {"x": NumpyCodec.decode_input(payload.inputs[0])})
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", y)])
"""


@dataclass(frozen=True)
class Peer:
    """A server that listens."""

    name: str
    port: int
    process: subprocess.Popen[Any]


class PeerError(Exception):
    """A peer does not start or answers wrongly."""


def pinned(processor: int, command: list[str]) -> list[str]:
    """The command, on one processor where `taskset` is installed."""
    return ["taskset", "-c", str(processor), *command] if shutil.which("taskset") else command


def request_of(count: int) -> bytes:
    """A request to `plain` with `count` floats."""
    request = pb.ModelInferRequest(model_name="plain", raw_input_contents=[np.ones(count, dtype=np.float32).tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[count])
    return request.SerializeToString()


def answer_with_canned_bytes(port: int) -> None:
    """The ceiling of grpcio: a server that takes bytes and answers with as many."""
    canned: dict[int, bytes] = {}

    def answer(data: bytes, context: grpc.ServicerContext) -> bytes:
        return canned.setdefault(len(data), data)

    server = grpc.server(futures.ThreadPoolExecutor(16), options=LIMITS)
    handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(answer)}
    service = "inference.GRPCInferenceService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


def start_bytes() -> Peer:
    """grpcio alone."""
    port = _free_port()
    command = [sys.executable, "-m", "benchmarks.serving", "--bytes", str(port)]
    return _started("grpcio, bytes", port, command, Path.cwd(), echo=True)


def start_kserve(python: Path, model: Path, folder: Path) -> Peer:
    """KServe's SDK."""
    port = _free_port()
    folder.mkdir()
    (folder / "server.py").write_text(KSERVE)
    command = [str(python), "server.py", str(model), str(_free_port()), str(port)]
    return _started("KServe SDK", port, command, folder)


def start_mlserver(python: Path, model: Path, folder: Path) -> Peer:
    """MLServer, its model in the server's own process."""
    port = _free_port()
    (folder / "plain").mkdir(parents=True)
    shutil.copy(model, folder / "model.onnx")
    (folder / "plain_runtime.py").write_text(MLSERVER)
    (folder / "plain" / "model-settings.json").write_text(
        json.dumps({"name": "plain", "implementation": "plain_runtime.Plain"})
    )
    settings = {"host": "127.0.0.1", "http_port": _free_port(), "metrics_port": _free_port(), "grpc_port": port}
    settings |= {"parallel_workers": 0, "debug": False, "grpc_max_message_length": 2**30}
    (folder / "settings.json").write_text(json.dumps(settings))
    return _started("MLServer", port, [str(python.parent / "mlserver"), "start", "."], folder)


def processor_seconds(process: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for_answer(name: str, port: int, process: subprocess.Popen[Any], *, echo: bool = False) -> None:
    """Return when the server has answered a request, rightly unless it only echoes.

    Raises:
        PeerError: it ended, took too long, or answered wrongly.
    """
    deadline = time.monotonic() + START_SECONDS
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=LIMITS) as channel:
        call = channel.unary_unary(METHOD)
        while True:
            try:
                data = call(request_of(4), timeout=5)
                break
            except grpc.RpcError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise PeerError(f"{name} does not answer: {error}") from error
                time.sleep(0.2)
    if not echo:
        response = pb.ModelInferResponse.FromString(data)
        values = response.raw_output_contents[:1] or [
            np.array(response.outputs[0].contents.fp32_contents, "f4").tobytes()
        ]
        if values[0] != np.full(4, 2, dtype=np.float32).tobytes():
            raise PeerError(f"{name} answers wrongly")


def _started(name: str, port: int, command: list[str], folder: Path, *, echo: bool = False) -> Peer:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") if not echo else open(os.devnull, "wb") as log:
        process = subprocess.Popen(pinned(0, command), cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        wait_for_answer(name, port, process, echo=echo)
    except PeerError:
        process.kill()
        raise
    return Peer(name, port, process)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
