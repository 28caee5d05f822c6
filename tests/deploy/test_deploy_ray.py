"""The Ray Serve application: two replicas on this machine, called by Triton's client."""

import importlib
import os
import secrets
import socket
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from onnx import TensorProto, helper
from tritonclient import grpc as triton

from proto import open_inference_pb2 as pb
from proto.open_inference_pb2_grpc import GRPCInferenceServiceStub

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "ray"
OURS = os.pathsep.join([str(ROOT), str(FOLDER)])
sys.path.insert(0, str(FOLDER))

WHY = "Ray is not installed: pip install 'tilefuse[ray]'"
ray: Any = pytest.importorskip("ray", reason=WHY)
serve: Any = pytest.importorskip("ray.serve", reason=WHY)
yaml: Any = pytest.importorskip("yaml", reason=WHY)
ServeDeploySchema: Any = pytest.importorskip("ray.serve.schema", reason=WHY).ServeDeploySchema
tilefuse_ray: Any = importlib.import_module("tilefuse_ray")


def save_double(path: Path) -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "graph",
        [value("x", TensorProto.FLOAT, ["n", 4])],
        [value("y", TensorProto.FLOAT, ["n", 4])],
    )
    path.parent.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9), path)
    (path.parents[1] / "tilefuse.toml").write_text("optimize = false\n")


@contextmanager
def two_replicas(root: Path) -> Generator[str]:
    """The address of a cluster of this machine only."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 * 2**20,
            runtime_env={"env_vars": {"PYTHONPATH": OURS, "TILEFUSE_CACHE": str(root / "cache")}},
        )
        serve.start(
            proxy_location="HeadOnly",
            http_options={"port": 0, "host": "127.0.0.1"},
            grpc_options={"port": port, "grpc_servicer_functions": ["tilefuse_ray.add_to_server"]},
        )
        app = tilefuse_ray.Tilefuse.options(
            num_replicas=2, autoscaling_config=None, ray_actor_options={"num_cpus": 0.5}
        ).bind(str(root))
        serve.run(app, route_prefix="/")
        yield f"127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def sent(x: np.ndarray[Any, Any]) -> Any:
    tensor = triton.InferInput("x", x.shape, "FP32")
    tensor.set_data_from_numpy(x)
    return tensor


def double_request(**changes: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="double", raw_input_contents=[np.ones(4, dtype=np.float32).tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    for field, value in changes.items():
        setattr(request, field, value)
    return request


def check_triton_client(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("double")
    assert not client.is_model_ready("nobody")
    assert client.get_server_metadata().name == "tilefuse"
    assert [entry.name for entry in client.get_model_metadata("double").inputs] == ["x"]
    assert client.get_model_config("double").config.name == "double"
    assert [model.name for model in client.get_model_repository_index().models] == ["double"]
    for rows in (1, 3):
        x = np.arange(4 * rows, dtype=np.float32).reshape(rows, 4)
        np.testing.assert_array_equal(client.infer("double", [sent(x)]).as_numpy("y"), 2 * x)


def check_that_both_answer_and_each_client_gets_its_own(url: str) -> None:
    def ask(seed: int) -> int:
        """How many answers were wrong."""
        chance = np.random.default_rng(seed)
        client: Any = triton.InferenceServerClient(url)
        with client:
            xs = [chance.standard_normal((int(chance.integers(1, 9)), 4)).astype(np.float32) for _ in range(15)]
            return sum(not np.array_equal(client.infer("double", [sent(x)]).as_numpy("y"), 2 * x) for x in xs)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == [0] * 4
    other: Any = triton.InferenceServerClient(url)
    with other:  # the counters are those of the replica that answers
        counts = {other.get_inference_statistics("double").model_stats[0].inference_count for _ in range(30)}
    assert 0 < max(counts) < 4 * 15, counts  # the other has answered the rest
    assert 0 not in counts


REFUSED = {
    "an unknown model": (double_request(model_name="nobody"), grpc.StatusCode.NOT_FOUND, "no model is named 'nobody'"),
    "a path": (double_request(model_name="../double"), grpc.StatusCode.NOT_FOUND, "no model"),
    "an unknown version": (double_request(model_version="7"), grpc.StatusCode.NOT_FOUND, "no version '7'"),
    "no inputs": (pb.ModelInferRequest(model_name="double"), grpc.StatusCode.INVALID_ARGUMENT, "'x' is missing"),
}


def check_that_refusals_have_the_same_statuses_and_sentences(channel: grpc.Channel) -> None:
    stub: Any = GRPCInferenceServiceStub(channel)
    for case, (request, status, reason) in REFUSED.items():
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request)
        error: Any = caught.value
        assert error.code() is status, case
        assert reason in error.details()
        assert "Traceback" not in error.details()


def check_that_every_method_answers(channel: grpc.Channel) -> None:
    """A method that Ray cannot find in the replica would be INTERNAL."""
    for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
        if method.server_streaming:
            continue
        call = channel.unary_unary(f"/inference.GRPCInferenceService/{method.name}")
        for data in (b"", b"\xff" * 40):
            try:
                call(data, timeout=30)
            except grpc.RpcError as error:
                failed: Any = error
                assert failed.code() in (
                    grpc.StatusCode.INVALID_ARGUMENT,
                    grpc.StatusCode.NOT_FOUND,
                    grpc.StatusCode.UNIMPLEMENTED,
                ), (method.name, failed)
                assert "Traceback" not in failed.details()
            else:
                assert data == b"", method.name  # no message begins with these bytes


def check_that_a_stream_is_answered_in_order_and_survives_errors(channel: grpc.Channel) -> None:
    stub: Any = GRPCInferenceServiceStub(channel)
    requests = [double_request(id=str(number)) for number in range(3)]
    requests.insert(1, double_request(id="bad", model_name="nobody"))
    answers = list(stub.ModelStreamInfer(iter(requests), timeout=30))
    assert [answer.infer_response.id for answer in answers] == ["0", "bad", "1", "2"]
    assert [bool(answer.error_message) for answer in answers] == [False, True, False, False]
    assert answers[1].error_message.startswith("[NOT_FOUND]")


def check_health(channel: grpc.Channel) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    for service in ("", "double"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    for call, status in (
        (lambda: health.Check(health_pb2.HealthCheckRequest(service="nobody")), grpc.StatusCode.NOT_FOUND),
        (lambda: list(health.Watch(health_pb2.HealthCheckRequest())), grpc.StatusCode.UNIMPLEMENTED),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        error: Any = caught.value
        assert error.code() is status


def check_reflection(channel: grpc.Channel) -> None:
    services = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert services >= {"inference.GRPCInferenceService", "grpc.health.v1.Health"}


def test_two_replicas_answer_as_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test, as starting a cluster takes longer than all that is asked of it."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")  # a slow start is no fault
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "token").write_text(secrets.token_hex(32))
    save_double(tmp_path / "models" / "double" / "1" / "model.onnx")
    with two_replicas(tmp_path / "models") as url:
        with triton.InferenceServerClient(url) as client:
            check_triton_client(client)
        check_that_both_answer_and_each_client_gets_its_own(url)
        with grpc.insecure_channel(url) as channel:
            check_that_refusals_have_the_same_statuses_and_sentences(channel)
            check_that_every_method_answers(channel)
            check_that_a_stream_is_answered_in_order_and_survives_errors(channel)
            check_health(channel)
            check_reflection(channel)


def test_the_file_for_serve_deploy_is_right() -> None:
    """Ray's own schema reads it, and it names what is there."""
    config = ServeDeploySchema.model_validate(yaml.safe_load((FOLDER / "serve.yaml").read_text(encoding="utf-8")))
    [application] = config.applications
    module, _, name = application.import_path.partition(":")
    assert getattr(importlib.import_module(module), name) is tilefuse_ray.build
    assert [entry.name for entry in application.deployments] == [tilefuse_ray.Tilefuse.name]
    assert application.args.keys() == {"repository"}
    assert config.grpc_options.grpc_servicer_functions == ["tilefuse_ray.add_to_server"]
    assert tilefuse_ray.build(application.args)
    with pytest.raises(ValueError, match="exactly 'repository'"):
        tilefuse_ray.build({})
