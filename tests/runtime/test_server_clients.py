"""Clients that are not Python's, and connections that end: by age, and because a client pings too often."""

import csv
import shutil
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from served_models import plain_loader, save_double, save_slow

import proto
from proto import open_inference_pb2 as pb
from proto.open_inference_pb2_grpc import GRPCInferenceServiceStub
from runtime.server.serve import RunningServer, ServerOptions
from runtime.server.transport import TransportOptions

NODE = shutil.which("node")
PERF_ANALYZER = shutil.which("perf_analyzer")
PACKAGES = "require('@grpc/grpc-js'); require('@grpc/proto-loader')"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("clients")
    save_double(root / "models" / "double" / "1" / "model.onnx")
    save_slow(root / "models" / "slow" / "1" / "model.onnx")
    return root


@contextmanager
def served(root: Path, **transport: float) -> Generator[str]:
    """The address of a server."""
    options: Any = transport
    server = RunningServer(ServerOptions(transport=TransportOptions(port=0, **options), drain_seconds=150))
    try:
        server.load(root / "models", plain_loader(root / "cache"))
        yield f"127.0.0.1:{server.port}"
    finally:
        assert server.drain()


def double_request(values: list[float]) -> pb.ModelInferRequest:
    raw = np.array(values, dtype=np.float32).tobytes()
    request = pb.ModelInferRequest(model_name="double", raw_input_contents=[raw])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    return request


def slow_request(steps: int) -> pb.ModelInferRequest:
    raw = [np.ones(1, dtype=np.float32).tobytes(), np.array(steps, dtype=np.int64).tobytes()]
    request = pb.ModelInferRequest(model_name="slow", raw_input_contents=raw)
    request.inputs.add(name="x", datatype="FP32", shape=[1])
    request.inputs.add(name="steps", datatype="INT64", shape=[])
    return request


def test_grpc_js(models: Path) -> None:
    """npm install --prefix DIR @grpc/grpc-js @grpc/proto-loader; NODE_PATH=DIR/node_modules pytest …"""
    if NODE is None or subprocess.run([NODE, "-e", PACKAGES], capture_output=True).returncode:
        pytest.skip("node with @grpc/grpc-js and @grpc/proto-loader is not there")
    script = Path(__file__).with_name("grpc_js_client.js")
    definition = Path(proto.__file__).with_name("open_inference.proto")
    with served(models) as address:
        ended = subprocess.run([NODE, script, address, definition], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_what_perf_analyzer_calls(models: Path) -> None:
    """The calls of perf_analyzer, whose program needs glibc 2.38: what it looks at first, the counters that it takes
    the difference of, and requests one by one and over a stream.
    """
    with served(models) as address, grpc.insecure_channel(address) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        assert stub.ServerReady(pb.ServerReadyRequest()).ready
        assert stub.ModelReady(pb.ModelReadyRequest(name="double")).ready
        extensions = set(stub.ServerMetadata(pb.ServerMetadataRequest()).extensions)
        assert {"model_configuration", "statistics"} <= extensions
        metadata = stub.ModelMetadata(pb.ModelMetadataRequest(name="double"))
        assert [(entry.name, entry.datatype) for entry in metadata.inputs] == [("x", "FP32")]
        config = stub.ModelConfig(pb.ModelConfigRequest(name="double")).config
        assert (config.name, config.max_batch_size) == ("double", 0)
        assert [entry.name for entry in config.input] == ["x"]

        asked = pb.ModelStatisticsRequest(name="double")
        (before,) = stub.ModelStatistics(asked).model_stats
        for number in range(5):
            request = double_request([number, 2, 3, 4])
            request.id = str(number)
            request.outputs.add(name="y")
            request.parameters["timeout"].uint64_param = 0
            request.parameters["priority"].uint64_param = 0
            assert stub.ModelInfer(request, timeout=30).id == str(number)
        (after,) = stub.ModelStatistics(asked).model_stats
        assert after.inference_count - before.inference_count == 5
        assert after.execution_count - before.execution_count == 5
        for phase in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
            counts = [getattr(one.inference_stats, phase).count for one in (before, after)]
            assert counts[1] - counts[0] == 5, phase
        assert after.inference_stats.compute_infer.ns > before.inference_stats.compute_infer.ns

        requests = [double_request([number, 0, 0, 0]) for number in range(3)]
        for number, request in enumerate(requests):
            request.id = str(number)
            request.parameters["triton_enable_empty_final_response"].bool_param = True
        answers = list(stub.ModelStreamInfer(iter(requests), timeout=30))
        assert [(answer.infer_response.id, answer.error_message) for answer in answers] == [
            (str(number), "") for number in range(3)
        ]
        (refused,) = stub.ModelStreamInfer(iter([pb.ModelInferRequest(model_name="nobody")]), timeout=30)
        assert refused.error_message
        for answer in (*answers, refused):  # what clients of decoupled models wait for
            assert answer.infer_response.parameters["triton_final_response"].bool_param


@pytest.mark.parametrize("flags", [(), ("--async",), ("--async", "--streaming"), ("--request-rate-range", "100")])
def test_perf_analyzer(models: Path, flags: tuple[str, ...]) -> None:
    """pip install perf-analyzer, on a system with glibc 2.38 or newer; elsewhere the package has no program."""
    if PERF_ANALYZER is None or subprocess.run([PERF_ANALYZER, "--version"], capture_output=True).returncode:
        pytest.skip("perf_analyzer is not there")
    with served(models) as address:
        command = [PERF_ANALYZER, "-m", "double", "-u", address, "-i", "grpc", "--shape", "x:1,4", *flags]
        command += ["--request-count", "200", "--verbose-csv", "-f", str(models / "measured.csv")]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        with grpc.insecure_channel(address) as channel:
            stub: Any = GRPCInferenceServiceStub(channel)
            (counted,) = stub.ModelStatistics(pb.ModelStatisticsRequest(name="double")).model_stats
    with (models / "measured.csv").open() as file:
        (measured,) = csv.DictReader(file)
    assert float(measured["Inferences/Second"]) > 0
    assert float(measured["Server Compute Infer"]) > 0  # by the difference of our statistics
    assert counted.inference_stats.success.count >= 200
    assert counted.inference_stats.fail.count == 0


def test_old_connections_are_renewed_and_no_call_is_lost(models: Path) -> None:
    with served(models, connection_age_seconds=0.5, connection_grace_seconds=30) as address:
        changes: list[grpc.ChannelConnectivity] = []
        with grpc.insecure_channel(address) as channel:
            channel.subscribe(changes.append)
            stub: Any = GRPCInferenceServiceStub(channel)
            end = time.monotonic() + 2.5
            while time.monotonic() < end or changes.count(grpc.ChannelConnectivity.READY) < 2:
                answer = stub.ModelInfer(double_request([1, 2, 3, 4]), timeout=20)
                assert np.frombuffer(answer.raw_output_contents[0], dtype=np.float32).tolist() == [2, 4, 6, 8]
                assert time.monotonic() < end + 30, changes


@pytest.mark.parametrize("allowed", [True, False])
def test_clients_that_ping_too_often_are_cut_off(models: Path, allowed: bool) -> None:
    pings = (("grpc.keepalive_time_ms", 100), ("grpc.http2.max_pings_without_data", 0))
    options = (*pings, ("grpc.keepalive_timeout_ms", 20_000), ("grpc.use_local_subchannel_pool", 1))
    with (
        served(models, least_ping_seconds=0.01 if allowed else 300) as address,
        grpc.insecure_channel(address, options=options) as channel,
    ):
        stub: Any = GRPCInferenceServiceStub(channel)
        slow = stub.ModelInfer.future(slow_request(500 if allowed else 60_000), timeout=60)
        if allowed:
            assert slow.result().raw_output_contents
            return
        error = slow.exception()
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "too many pings" in error.details().lower()
