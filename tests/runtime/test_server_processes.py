"""Several processes on one port: each gets connections, all drain together, none is left when one dies."""

import os
import re
import signal
import socket
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from served_models import ServerProcess, save_double, save_slow

from proto import open_inference_pb2 as pb
from proto.open_inference_pb2_grpc import GRPCInferenceServiceStub
from runtime.cli.serve import serve_repository
from runtime.server.option_table import ConfigError
from runtime.server.processes import reserved_port
from runtime.server.transport import ListenError

CONNECTIONS = 24  # the kernel gives all of them to one of two processes once in 8 million times
START_SECONDS = 120


def started(tmp_path: Path) -> ServerProcess:
    """Two processes that are both ready."""
    for name, save in (("double", save_double), ("slow", save_slow)):
        save(tmp_path / "models" / name / "1" / "model.onnx")
        (tmp_path / "models" / name / "tilefuse.toml").write_text("optimize = false\n")
    server = ServerProcess(tmp_path / "models", tmp_path / "cache", "--processes", "2", "--status-port", "0")
    deadline = time.monotonic() + START_SECONDS
    while sum(line.endswith(" ready") for line in server.log) < 2:
        assert server.process.poll() is None, server.log
        assert time.monotonic() < deadline, server.log
        time.sleep(0.05)
    return server


def answered(server: ServerProcess) -> list[int]:
    """The requests for doubles that each process has answered."""
    counts: list[int] = []
    for line in list(server.log):
        if found := re.search(r"status page at (http://\S+)", line):
            text = urllib.request.urlopen(f"{found[1]}/metrics", timeout=20).read().decode()
            count = re.search(r'^nv_inference_request_success\{model="double",version="1"\} (\d+)', text, re.MULTILINE)
            counts.append(int(count[1]) if count else 0)
    return counts


def request_for_double() -> pb.ModelInferRequest:
    raw = np.array([1, 2, 3, 4], dtype=np.float32).tobytes()
    request = pb.ModelInferRequest(model_name="double", raw_input_contents=[raw])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    return request


def request_for_slow(steps: int) -> pb.ModelInferRequest:
    raw = [np.ones(1, dtype=np.float32).tobytes(), np.array(steps, dtype=np.int64).tobytes()]
    request = pb.ModelInferRequest(model_name="slow", raw_input_contents=raw)
    request.inputs.add(name="x", datatype="FP32", shape=[1])
    request.inputs.add(name="steps", datatype="INT64", shape=[])
    return request


def test_processes_share_a_port_and_drain_together(tmp_path: Path) -> None:
    server = started(tmp_path)
    with ExitStack() as stack:
        options = (("grpc.use_local_subchannel_pool", 1),)  # else channels of one address share a connection
        channels = [stack.enter_context(grpc.insecure_channel(server.url, options)) for _ in range(CONNECTIONS)]
        stubs: list[Any] = [GRPCInferenceServiceStub(channel) for channel in channels]
        for stub in stubs:
            answer = stub.ModelInfer(request_for_double(), timeout=60)
            assert np.frombuffer(answer.raw_output_contents[0], dtype=np.float32).tolist() == [2, 4, 6, 8]
        counts = answered(server)
        assert len(counts) == 2
        assert sum(counts) == CONNECTIONS
        assert all(counts)

        slow = [stub.ModelInfer.future(request_for_slow(30), timeout=120) for stub in stubs]
        for stub in stubs:  # what is sent after it on the same connection was accepted after it
            stub.ServerLive(pb.ServerLiveRequest(), timeout=60)
        server.process.send_signal(signal.SIGTERM)
        assert [future.code() for future in slow] == [grpc.StatusCode.OK] * CONNECTIONS, server.log
    assert server.wait_exit(60) == 0, server.log


def test_a_process_that_dies_takes_the_others_along(tmp_path: Path) -> None:
    server = started(tmp_path)
    parent = server.process.pid
    children = [int(number) for number in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    workers = [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    assert server.wait_exit(60) == 1
    assert any("ended by itself" in line for line in server.log), server.log
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=5)


def test_loading_on_request_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only one process: use poll"):
        serve_repository(tmp_path, None, processes=2, model_control_mode="explicit")


def test_status_ports_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 processes need as many ports"):
        serve_repository(tmp_path, None, processes=2, status_port=65535)


def test_a_port_is_reserved_for_one_server() -> None:
    with reserved_port("127.0.0.1", 0) as port:
        assert port > 0
        with pytest.raises(ListenError, match="taken"), reserved_port("127.0.0.1", port):
            pass
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ListenError, match="taken"), reserved_port("127.0.0.1", other.getsockname()[1]):
            pass
