"""Start, readiness, failure and shutdown of the server as a process."""

import json
import signal
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from served_models import ServerProcess, save_double, save_slow

from proto import open_inference_pb2 as pb
from proto.open_inference_pb2_grpc import GRPCInferenceServiceStub

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def repository(root: Path) -> Path:
    save_slow(root / "slow" / "1" / "model.onnx")
    (root / "slow" / "tilefuse.toml").write_text("optimize = false\n")
    return root


def slow_request(steps: int, *, value: float = 7) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="slow")
    request.inputs.add(name="x", datatype="FP32", shape=[1])
    request.inputs.add(name="steps", datatype="INT64", shape=[])
    request.raw_input_contents.extend([np.array([value], dtype=np.float32).tobytes(), np.array(steps).tobytes()])
    return request


def steps_for(stub: Any, seconds: float) -> int:
    """How many steps of the slow model take about that long here."""
    stub.ModelInfer(slow_request(10))
    started = time.perf_counter()
    stub.ModelInfer(slow_request(200))
    return int(200 * seconds / (time.perf_counter() - started))


def test_sigterm_answers_what_is_in_flight_and_queued(tmp_path: Path) -> None:
    server = ServerProcess(repository(tmp_path / "models"), tmp_path / "cache", "--workers", "2").wait_ready()
    statuses: list[int] = []
    try:
        with grpc.insecure_channel(server.url) as channel:
            stub: Any = GRPCInferenceServiceStub(channel)
            health: Any = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(service="slow"))
            watcher = threading.Thread(target=lambda: statuses.extend(entry.status for entry in _until_end(watch)))
            watcher.start()
            steps = steps_for(stub, 0.8)
            running = [stub.ModelInfer.future(slow_request(steps)) for _ in range(4)]  # two run, two wait for a worker
            time.sleep(0.3)  # all four have arrived
            server.process.send_signal(signal.SIGTERM)
            for future in running:
                answer = future.result(timeout=60)
                assert np.frombuffer(answer.raw_output_contents[0], dtype=np.float32).tolist() == [7.0]
            assert server.wait_exit() == 0, server.log
            watcher.join(10)
    finally:
        server.process.kill()
    assert statuses[0] == SERVING
    assert statuses[-1] == NOT_SERVING


def test_sigterm_under_load_loses_no_accepted_request(tmp_path: Path) -> None:
    """100 requests wait and 6 clients keep sending when the signal comes. What the server's log calls answered, and
    nothing else, has reached the clients; the rest was refused before it was taken.
    """
    flags = ("--workers", "4", "--log-calls", "--log-format", "json", "--status-port", "0")
    server = ServerProcess(repository(tmp_path / "models"), tmp_path / "cache", *flags).wait_ready()
    stop = threading.Event()
    try:
        with ThreadPoolExecutor(6) as pool, grpc.insecure_channel(server.url) as channel:
            stub: Any = GRPCInferenceServiceStub(channel)
            steps = max(1, steps_for(stub, 0.05))
            senders = [pool.submit(_keep_sending, server.url, seed, stop) for seed in range(6)]
            waiting = [stub.ModelInfer.future(slow_request(steps, value=number)) for number in range(100)]
            unanswered = _wait_until_all_arrived(server, waiting, senders=len(senders))
            server.process.send_signal(signal.SIGTERM)
            for number, future in enumerate(waiting):
                assert _answer(future.result(timeout=60)) == [number]
            assert server.wait_exit() == 0, server.log[-5:]
            stop.set()
            sent = [sender.result(timeout=30) for sender in senders]
    finally:
        stop.set()
        server.process.kill()
    assert unanswered > 20
    assert min(sent) > 0
    lines = [json.loads(line) for line in server.log if '"ModelInfer"' in line or "/ModelInfer" in line]
    answered = sum(line.get("status") == "OK" for line in lines)
    assert answered == 2 + len(waiting) + sum(sent)  # 2 measured how long a step takes


def _wait_until_all_arrived(server: ServerProcess, waiting: list[Any], *, senders: int) -> int:
    """Wait until the server has accepted all of `waiting`, beside one call of each sender; how many are unanswered."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{server.status_url}/status.json", timeout=10) as answer:
            accepted = json.load(answer)["calls"]
        unanswered = sum(not future.done() for future in waiting)
        if accepted >= unanswered + senders:
            return unanswered
        time.sleep(0.002)
    raise AssertionError("the calls did not arrive")


def _answer(response: pb.ModelInferResponse) -> list[float]:
    return np.frombuffer(response.raw_output_contents[0], dtype=np.float32).tolist()


def _keep_sending(url: str, seed: int, stop: threading.Event) -> int:
    """Ask one request after the other until the server takes no more; how many were answered."""
    answered = 0
    with grpc.insecure_channel(url, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        while not stop.is_set():
            value = 1000 * seed + answered % 1000
            try:
                answer = stub.ModelInfer(slow_request(1, value=value), timeout=60)
            except grpc.RpcError as error:
                failed: Any = error
                assert failed.code() is grpc.StatusCode.UNAVAILABLE, failed  # not taken: safe to send elsewhere
                return answered
            assert _answer(answer) == [value]
            answered += 1
    return answered


def _until_end(watch: Any) -> list[Any]:
    """What a stream gives before the server ends it."""
    seen: list[Any] = []
    try:
        for entry in watch:
            seen.append(entry)
    except grpc.RpcError as error:
        ended: Any = error
        assert ended.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED), ended
    return seen


def test_a_call_over_the_drain_limit_is_said_to_be_lost(tmp_path: Path) -> None:
    server = ServerProcess(repository(tmp_path / "models"), tmp_path / "cache", "--drain-seconds", "0.2").wait_ready()
    try:
        with grpc.insecure_channel(server.url) as channel:
            stub: Any = GRPCInferenceServiceStub(channel)
            steps = steps_for(stub, 20)
            running = stub.ModelInfer.future(slow_request(steps))
            time.sleep(0.3)
            started = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.wait_exit() == 1
            assert time.monotonic() - started < 10
            assert running.exception(timeout=10) is not None
    finally:
        server.process.kill()
    assert any("were lost" in line for line in server.log)


def test_sigint_stops_an_idle_server_at_once(tmp_path: Path) -> None:
    server = ServerProcess(repository(tmp_path / "models"), tmp_path / "cache").wait_ready()
    started = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    assert server.wait_exit() == 0, server.log
    assert time.monotonic() - started < 10


def test_a_model_that_fails_stops_the_server_with_its_reason(tmp_path: Path) -> None:
    root = repository(tmp_path / "models")
    (root / "broken" / "1").mkdir(parents=True)
    (root / "broken" / "1" / "model.onnx").write_bytes(b"\xff" * 100)
    (root / "empty").mkdir()
    server = ServerProcess(root, tmp_path / "cache")
    assert server.wait_exit() == 1
    assert "error:" in server.log[-1]
    assert "broken: version 1" in server.log[-1]
    assert "is not an ONNX model" in server.log[-1]
    assert "empty: no version found" in server.log[-1]
    assert not any("Traceback" in line for line in server.log)


def test_a_port_that_is_taken_is_an_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = ServerProcess(repository(tmp_path / "models"), tmp_path / "cache", "--port", str(port))
        assert server.wait_exit() == 1
    assert f"cannot listen on 127.0.0.1:{port}" in server.log[-1]
    assert not any("Traceback" in line for line in server.log)


def test_a_repository_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "nowhere", tmp_path / "cache")
    assert server.wait_exit() == 1
    assert "is not a folder" in server.log[-1]


def test_the_default_address_is_this_machine_only(tmp_path: Path) -> None:
    save_double(tmp_path / "models" / "double" / "1" / "model.onnx")
    (tmp_path / "models" / "double" / "tilefuse.toml").write_text("optimize = false\n")
    server = ServerProcess(tmp_path / "models", tmp_path / "cache").wait_ready()
    try:
        assert server.url.startswith("127.0.0.1:")
    finally:
        assert server.stop() == 0
