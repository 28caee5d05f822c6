"""Metrics, the status page, logs, traces, the configuration file, and tools of others against the server."""

import http.client
import json
import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from playwright.sync_api import expect, sync_playwright
from prometheus_client.parser import text_string_to_metric_families
from served_models import ServerProcess, plain_loader, running, save_double, save_lookup

from proto import open_inference_pb2 as pb
from runtime.server.errors import AbandonedError, ExhaustedError, InvalidRequestError, TimedOutError
from runtime.server.operations.logs import CALL, JsonFormatter
from runtime.server.operations.machine_load import ProcessorUse, memory_use
from runtime.server.operations.observe import Observer
from runtime.server.operations.traces import OtlpTracer
from runtime.server.option_table import OPTIONS, ConfigError, build_options, read_file
from runtime.server.serve import RunningServer
from runtime.server.statistics import failure_reason

GAUGES = {
    "nv_inference_pending_request_count",
    "nv_cpu_utilization",
    "nv_cpu_memory_total_bytes",
    "nv_cpu_memory_used_bytes",
}
TRITONS = GAUGES | {
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
}
"""What Triton's list of metrics has for a server without a GPU and a cache of responses."""
HOSTILE = "x<img src=q onerror=document.title='broken'>"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_double(tmp_path / "models" / "double" / "1" / "model.onnx")
    save_lookup(tmp_path / "models" / "lookup" / "1" / "model.onnx")
    for name in ("double", "lookup"):
        (tmp_path / "models" / name / "tilefuse.toml").write_text("optimize = false\n")
    return tmp_path / "models"


@pytest.fixture
def served(root: Path, tmp_path: Path) -> Generator[tuple[RunningServer, Any]]:
    with running(root, plain_loader(tmp_path / "cache"), status_port=0) as both:
        yield both


def ask(stub: Any, rows: int = 1, **fields: Any) -> pb.ModelInferResponse:
    request = pb.ModelInferRequest(model_name="double")
    request.inputs.add(name="x", datatype="FP32", shape=[rows, 4])
    request.raw_input_contents.append(np.ones(4 * rows, dtype=np.float32).tobytes())
    return stub.ModelInfer(request, **fields)


def fail(stub: Any) -> None:
    with pytest.raises(grpc.RpcError):
        stub.ModelInfer(pb.ModelInferRequest(model_name="double"))


def get(server: RunningServer, path: str, *, method: str = "GET", host: str = "") -> tuple[int, str, dict[str, str]]:
    assert server.status is not None
    connection = http.client.HTTPConnection("127.0.0.1", server.status.port, timeout=10)
    connection.request(method, path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.headers)


def test_metrics_have_tritons_names_and_agree_with_the_statistics(served: tuple[RunningServer, Any]) -> None:
    server, stub = served
    for rows in (1, 2, 3):
        ask(stub, rows)
    fail(stub)
    status, text, _ = get(server, "/metrics")
    assert status == 200
    labels = '{model="double",version="1"}'
    assert f"nv_inference_request_success{labels} 3.0" in text
    for reason, count in (("OTHER", 1), ("REJECTED", 0), ("CANCELED", 0), ("BACKEND", 0)):
        assert f'nv_inference_request_failure{{model="double",reason="{reason}",version="1"}} {count}.0' in text
    assert "# TYPE nv_inference_request_success counter" in text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    lines = re.findall(r'^(\w+)\{model="double",version="1"\} (\S+)$', text, re.MULTILINE)
    values = {name: float(value) for name, value in lines}
    counted = stub.ModelStatistics(pb.ModelStatisticsRequest(name="double")).model_stats[0]
    assert values["nv_inference_count"] == counted.inference_count == 3
    assert values["nv_inference_exec_count"] == counted.execution_count == 3
    for name, duration in (
        ("request", counted.inference_stats.success),
        ("queue", counted.inference_stats.queue),
        ("compute_input", counted.inference_stats.compute_input),
        ("compute_infer", counted.inference_stats.compute_infer),
        ("compute_output", counted.inference_stats.compute_output),
    ):
        assert values[f"nv_inference_{name}_duration_us"] == pytest.approx(duration.ns / 1e3)
    assert values["nv_inference_pending_request_count"] == 0
    assert values["tilefuse_request_latency_seconds_count"] == 3
    assert "process_resident_memory_bytes" in families
    assert families.keys() >= TRITONS
    assert all((families[name].type == "gauge") is (name in GAUGES) for name in TRITONS)
    assert 0 <= families["nv_cpu_utilization"].samples[0].value <= 1
    total, used = (families[f"nv_cpu_memory_{name}_bytes"].samples[0].value for name in ("total", "used"))
    assert 2**28 < used < total
    assert families["tilefuse_open_calls"].samples[0].value == 0


@pytest.mark.parametrize(
    ("error", "ran", "reason"),
    [
        (ExhaustedError("full"), False, "REJECTED"),
        (TimedOutError("late"), False, "REJECTED"),
        (AbandonedError("gone"), False, "CANCELED"),
        (AbandonedError("gone"), True, "CANCELED"),
        (InvalidRequestError("out of range"), True, "BACKEND"),
        (ExhaustedError("memory"), True, "BACKEND"),
        (InvalidRequestError("wrong shape"), False, "OTHER"),
        (ValueError("ours"), False, "OTHER"),
    ],
)
def test_failures_are_told_apart_as_triton_does(error: Exception, ran: bool, reason: str) -> None:
    assert failure_reason(error, ran=ran) == reason


def test_a_run_that_fails_is_the_models_failure(served: tuple[RunningServer, Any]) -> None:
    server, stub = served
    request = pb.ModelInferRequest(model_name="lookup")
    for tensor in server.repository.find("lookup", "").inputs:
        shape = [extent if isinstance(extent, int) else 1 for extent in tensor.shape]
        request.inputs.add(name=tensor.name, datatype=tensor.datatype.wire, shape=shape)
        request.raw_input_contents.append(np.full(shape, 10_000, tensor.datatype.dtype).tobytes())
    with pytest.raises(grpc.RpcError):
        stub.ModelInfer(request)
    assert 'nv_inference_request_failure{model="lookup",reason="BACKEND",version="1"} 1.0' in get(server, "/metrics")[1]


def test_the_processors_use_is_that_since_the_last_look(tmp_path: Path) -> None:
    stat, missing = tmp_path / "stat", tmp_path / "missing"
    stat.write_text("cpu  100 0 100 800 0 0 0 0 0 0\n")
    use = ProcessorUse(stat)
    stat.write_text("cpu  160 10 130 870 20 3 7 0 60 0\ncpu0 1 2 3\n")  # 110 of 200 ticks at work
    assert use.since_last() == pytest.approx(0.55)
    assert use.since_last() == 0
    assert ProcessorUse(missing).since_last() is None
    assert memory_use(missing) is None


def test_the_status_port_is_read_only_and_answers_this_machine_only(served: tuple[RunningServer, Any]) -> None:
    server, _ = served
    assert get(server, "/ready")[:2] == (200, "ready\n")
    assert get(server, "/live")[0] == 200
    assert get(server, "/nothing")[0] == 404
    assert get(server, "/../../etc/passwd")[0] == 404
    assert get(server, "/", host="evil.example")[0] == 403
    assert get(server, "/", host="localhost:80")[0] == 200
    for method in ("POST", "PUT", "DELETE"):
        assert get(server, "/status.json", method=method)[0] == 501
    status, page, headers = get(server, "/")
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert not re.search(r"https?://|src=|href=", page)
    assert get(server, "/", method="HEAD")[:2] == (200, "")
    found = json.loads(get(server, "/status.json")[1])
    assert [(model["name"], model["state"]) for model in found["models"]] == [("double", "READY"), ("lookup", "READY")]


@pytest.mark.browser
def test_the_status_page_in_a_browser(root: Path, tmp_path: Path, chromium: str) -> None:
    with running(root, plain_loader(tmp_path / "cache"), status_port=0) as (server, stub), sync_playwright() as play:
        for _ in range(20):
            ask(stub, 2)
        fail(stub)
        server.repository.find("lookup", "").notes.append(HOSTILE)
        assert server.status is not None
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 600})
        page.on("pageerror", lambda error: pytest.fail(f"the page's script failed: {error}"))
        page.goto(f"http://127.0.0.1:{server.status.port}/")
        expect(page.locator("#summary")).to_contain_text("ready")
        rows = page.locator("#models tr")
        expect(rows).to_have_count(2)
        cells = rows.nth(0).locator("td")
        expect(cells).to_have_text(
            ["double", "1", "READY", "0", "0", "0", "20", "1", "1.0", re.compile(r"^\d+\.\d\d$"), re.compile("0.25 ms")]
        )
        assert rows.nth(0).locator(".bars span").count() == 16
        first, last = cells.nth(0).bounding_box(), cells.nth(10).bounding_box()
        assert first is not None
        assert last is not None
        assert first["width"] > 200  # room for names and notes
        assert last["x"] + last["width"] <= 1200  # and all of the table is to be seen
        expect(rows.nth(1)).to_contain_text(HOSTILE)  # shown as text
        assert page.title() == "TileFuse server"
        ask(stub)
        expect(cells.nth(6)).to_have_text("21")  # it refreshes itself
        page.screenshot(path=str(tmp_path / "status.png"), full_page=True)
        browser.close()


def test_logs_as_json_are_one_object_per_line() -> None:
    record = logging.LogRecord("tilefuse.server", logging.INFO, "file.py", 1, "a\n%s", ("b",), None)
    try:
        raise ValueError("x\ny")
    except ValueError:
        record.exc_info = sys.exc_info()
    line = JsonFormatter().format(record)
    assert "\n" not in line
    fields = json.loads(line)
    assert (fields["level"], fields["message"]) == ("INFO", "a\nb")
    assert "ValueError" in fields["exception"]


def test_calls_are_logged_when_asked_for(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tilefuse.calls")
    with running(root, plain_loader(tmp_path / "cache"), log_calls=True) as (_, stub):
        ask(stub)
        fail(stub)
        list(stub.ModelStreamInfer(iter([])))
    told = [getattr(record, CALL) for record in caplog.records if hasattr(record, CALL)]
    assert [(call["method"].rpartition("/")[2], call["status"], call.get("model")) for call in told] == [
        ("ModelInfer", "OK", "double"),
        ("ModelInfer", "INVALID_ARGUMENT", "double"),
        ("ModelStreamInfer", "OK", None),
    ]
    assert all(call["ms"] >= 0 and call["peer"].startswith("ipv4:") for call in told)


def test_spans_continue_the_callers_trace() -> None:
    exporter = InMemorySpanExporter()
    tracer = OtlpTracer(exporter)

    class Call:
        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            return (("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"),)

    call: Any = Call()
    with Observer(tracer=tracer).watch("/inference.GRPCInferenceService/ModelInfer", call) as told:
        told.fields["model"] = "double"
        told.status = grpc.StatusCode.NOT_FOUND
    tracer.shutdown()
    (span,) = exporter.get_finished_spans()
    assert span.name == "inference.GRPCInferenceService/ModelInfer"
    assert span.context is not None
    assert f"{span.context.trace_id:x}" == "a" * 32
    assert span.parent is not None
    assert f"{span.parent.span_id:x}" == "b" * 16
    attributes: Any = span.attributes
    assert (attributes["rpc.grpc.status_code"], attributes["tilefuse.model"]) == (5, "double")


def test_nothing_is_watched_by_default() -> None:
    assert Observer().idle


def test_the_file_and_the_flags_have_the_same_settings(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text(
        "port = 0\nworkers = 7\nmessage_mib = 5\nconnection_age_seconds = 60\nload_model = ['a', 'b']\n"
        "model_control_mode = 'explicit'\nlog_calls = true\ntls_cert = 'server.pem'\n"
    )
    options = build_options(read_file(path))
    assert (options.workers, options.transport.message_bytes, options.load_models) == (7, 5 * 2**20, ("a", "b"))
    assert options.transport.tls_cert == Path("server.pem")
    assert build_options({}) == build_options({option.name: option.default for option in OPTIONS})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ports = 1", "unknown key 'ports'; the keys are host, port"),
        ("port = '1'", "must be of type int"),
        ("port = true", "must be of type int"),
        ("port = 70000", "at least 0 and at most 65535"),
        ("drain_seconds = -1", "must be at least 0"),
        ("compression = 'zip'", "must be none, deflate, gzip"),
        ("load_model = 'a'", "must be a list"),
        ("port = ", "Invalid value"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "server.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_file(path)
    assert str(path) in str(caught.value)


def test_flags_override_the_file_and_other_peoples_tools_work(root: Path, tmp_path: Path) -> None:
    """grpcurl finds the service by reflection, and calls it; requests and answers compressed."""
    path = tmp_path / "server.toml"
    path.write_text("log_format = 'json'\ncompression = 'gzip'\nworkers = 3\nport = 1\nconnection_age_seconds = 30\n")
    process = ServerProcess(root, tmp_path / "cache", "--config", str(path), "--status-port", "0").wait_ready()
    try:
        assert all(json.loads(line)["level"] for line in process.log)
        grpcurl = shutil.which("grpcurl") or str(Path(sys.executable).with_name("grpcurl"))
        sent = {
            "model_name": "double",
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "contents": {"fp32_contents": [1, 2, 3, 4]}}],
        }
        method = "inference.GRPCInferenceService/ModelInfer"
        command = [grpcurl, "-plaintext", "-d", json.dumps(sent), process.url, method]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["outputs"][0]["contents"] == {"fp32_contents": [2, 4, 6, 8]}
        with grpc.insecure_channel(process.url, compression=grpc.Compression.Deflate) as channel:
            from_stub = channel.unary_unary(f"/{method}", pb.ModelInferRequest.SerializeToString, lambda data: data)
            request = pb.ModelInferRequest(model_name="double")
            request.inputs.add(name="x", datatype="FP32", shape=[1000, 4])
            request.raw_input_contents.append(b"\0" * 16_000)
            answer = pb.ModelInferResponse.FromString(from_stub(request, timeout=20))
            assert answer.raw_output_contents[0] == b"\0" * 16_000
    finally:
        assert process.stop() == 0, process.log
