"""Loading, reloading and unloading under traffic, and the background optimiser."""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import pytest
from served_models import plain_loader, running, save_double, save_slow

from proto import open_inference_pb2 as pb
from runtime.server.control import Control
from runtime.server.errors import LoadFailedError, NotFoundError
from runtime.server.folders import RepositoryError
from runtime.server.model import ModelError
from runtime.server.repository import Repository
from runtime.server.settings import Settings
from runtime.server.warmup import made_up_inputs

UNFUSED = "optimize = false\n"
EXPLICIT: dict[str, Any] = {"control_mode": "explicit", "load_models": ("double",)}


def save(root: Path, name: str = "double", version: int = 1, factor: float = 2.0) -> None:
    save_double(root / name / str(version) / "model.onnx", factor=factor)
    (root / name / "tilefuse.toml").write_text(UNFUSED)


def ask(stub: Any, name: str = "double", version: str = "") -> float:
    request = pb.ModelInferRequest(model_name=name, model_version=version)
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    request.raw_input_contents.append(np.ones(4, dtype=np.float32).tobytes())
    return float(np.frombuffer(stub.ModelInfer(request).raw_output_contents[0], dtype=np.float32)[0])


def status(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error.code(), error.details()


def load(stub: Any, name: str = "double") -> None:
    stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=name))


def unload(stub: Any, name: str = "double") -> None:
    stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name=name))


def index(stub: Any) -> dict[tuple[str, str], str]:
    models = stub.RepositoryIndex(pb.RepositoryIndexRequest()).models
    return {(entry.name, entry.version): entry.state for entry in models}


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save(tmp_path / "models")
    return tmp_path / "models"


def test_models_come_and_go_on_request(root: Path, tmp_path: Path) -> None:
    save(root, "other", factor=5.0)
    with running(root, plain_loader(tmp_path / "cache"), control_mode="explicit", load_models=("other",)) as (_, stub):
        assert "model_repository" in stub.ServerMetadata(pb.ServerMetadataRequest()).extensions
        assert index(stub) == {("double", ""): "UNAVAILABLE", ("other", "1"): "READY"}
        assert status(lambda: ask(stub))[0] is grpc.StatusCode.NOT_FOUND
        load(stub)
        assert (ask(stub), ask(stub, "other")) == (2.0, 5.0)
        assert index(stub)["double", "1"] == "READY"
        unload(stub)
        assert status(lambda: ask(stub))[0] is grpc.StatusCode.NOT_FOUND
        assert index(stub)["double", "1"] == "UNAVAILABLE"
        assert not stub.ModelReady(pb.ModelReadyRequest(name="double")).ready
        assert status(lambda: unload(stub))[0] is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("name", ["", "..", "../models/double", "/double", "double\0", "nobody", "tilefuse.toml"])
def test_only_folders_of_the_repository_can_be_loaded(root: Path, tmp_path: Path, name: str) -> None:
    repository = Repository()
    control = Control(repository, root, plain_loader(tmp_path / "cache"), on_change=lambda name: None)
    with pytest.raises(NotFoundError, match="the repository has no model"):
        control.load(name)
    control.stop()
    assert not repository.models()


def test_a_client_cannot_send_files_or_settings(root: Path, tmp_path: Path) -> None:
    with running(root, plain_loader(tmp_path / "cache"), control_mode="explicit") as (_, stub):
        request = pb.RepositoryModelLoadRequest(model_name="double")
        request.parameters["file:1/model.onnx"].bytes_param = b"x"
        code, reason = status(lambda: stub.RepositoryModelLoad(request))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "not taken from clients" in reason
        elsewhere = pb.RepositoryModelLoadRequest(model_name="double", repository_name="http://elsewhere/models")
        assert status(lambda: stub.RepositoryModelLoad(elsewhere))[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert index(stub)["double", ""] != "READY"


def test_loading_on_request_is_off_unless_asked_for(root: Path, tmp_path: Path) -> None:
    with running(root, plain_loader(tmp_path / "cache")) as (_, stub):
        assert "model_repository" not in stub.ServerMetadata(pb.ServerMetadataRequest()).extensions
        for call in (load, unload):
            code, reason = status(lambda call=call: call(stub))
            assert code is grpc.StatusCode.UNIMPLEMENTED
            assert "--model-control-mode none" in reason
        assert ask(stub) == 2.0


def test_reloads_under_traffic_fail_no_request(root: Path, tmp_path: Path) -> None:
    """Every answer is that of a version that was served at some time, and none is refused."""
    stop = threading.Event()
    answers: list[float] = []

    def keep_asking(stub: Any) -> None:
        while not stop.is_set():
            answers.append(ask(stub))

    with running(root, plain_loader(tmp_path / "cache"), **EXPLICIT) as (_, stub), ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(keep_asking, stub) for _ in range(4)]
        try:
            for factor in range(3, 13):
                save(root, factor=float(factor))
                load(stub)
                assert ask(stub) == factor  # what was loaded is served from then on
        finally:
            stop.set()
        for future in asking:
            future.result()
    assert set(answers) <= {float(factor) for factor in range(2, 13)}
    assert len(set(answers)) > 2


def test_a_load_that_fails_changes_nothing(root: Path, tmp_path: Path) -> None:
    with running(root, plain_loader(tmp_path / "cache"), **EXPLICIT) as (
        server,
        stub,
    ):
        before = server.repository.find("double", "")
        (root / "double" / "1" / "model.onnx").write_bytes(b"\xff" * 100)
        code, reason = status(lambda: load(stub))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "double/1/model.onnx is not an ONNX model" in reason
        assert str(tmp_path) not in reason
        (root / "double" / "config.pbtxt").write_text("max_batch_size: many")
        assert status(lambda: load(stub))[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert server.repository.find("double", "") is before
        assert ask(stub) == 2.0
        assert index(stub) == {("double", "1"): "READY"}


def test_loads_that_fail_leak_nothing(root: Path, tmp_path: Path) -> None:
    def held() -> tuple[int, int]:
        """Open files, and threads."""
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    with running(root, plain_loader(tmp_path / "cache"), **EXPLICIT) as (_, stub):
        (root / "double" / "1" / "model.onnx").write_bytes(b"\xff" * 100)
        seen: list[tuple[int, int]] = []
        for _ in range(40):
            assert status(lambda: load(stub))[0] is grpc.StatusCode.FAILED_PRECONDITION
            seen.append(held())
        files, threads = seen[9]  # gRPC has its threads by then
        assert seen[-1][0] <= files + 2
        assert seen[-1][1] <= threads + 2
        assert ask(stub) == 2.0


def test_one_bad_version_keeps_all_old_ones(root: Path, tmp_path: Path) -> None:
    (root / "double" / "config.pbtxt").write_text("version_policy { all { } }")
    with running(root, plain_loader(tmp_path / "cache"), **EXPLICIT) as (_, stub):
        save(root, version=2, factor=3.0)
        save(root, version=3, factor=4.0)
        (root / "double" / "3" / "model.onnx").write_bytes(b"\xff")
        assert status(lambda: load(stub))[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert (ask(stub), index(stub)["double", "3"]) == (2.0, "UNAVAILABLE")
        shutil.rmtree(root / "double" / "3")
        load(stub)
        assert [ask(stub, version=version) for version in ("1", "2", "")] == [2.0, 3.0, 3.0]


def test_unloading_waits_for_what_runs(tmp_path: Path) -> None:
    root = tmp_path / "models"
    save_slow(root / "slow" / "1" / "model.onnx")
    (root / "slow" / "tilefuse.toml").write_text(UNFUSED)
    with running(root, plain_loader(tmp_path / "cache"), **{**EXPLICIT, "load_models": ("slow",)}) as (
        server,
        stub,
    ):
        request = pb.ModelInferRequest(model_name="slow")
        request.inputs.add(name="x", datatype="FP32", shape=[1])
        request.inputs.add(name="steps", datatype="INT64", shape=[])
        request.raw_input_contents.extend([np.float32(7).tobytes(), np.int64(400).tobytes()])
        running_call = stub.ModelInfer.future(request)
        until(lambda: server.repository.find("slow", "").usage.count == 1)
        unload(stub, "slow")
        assert running_call.done() or running_call.result(timeout=1)  # its answer left before unload's did
        assert np.frombuffer(running_call.result().raw_output_contents[0], dtype=np.float32).tolist() == [7.0]


def test_unloading_waits_for_models_that_were_replaced(tmp_path: Path) -> None:
    """Fused in the background, then loaded again: three models one after the other, each in use until let go of."""
    root = tmp_path / "models"
    save_double(root / "double" / "1" / "model.onnx")
    go = threading.Event()

    def optimize(model: Path, output: Path, settings: Settings) -> None:
        assert go.wait(30)
        shutil.copy(model, output)

    loader = plain_loader(tmp_path / "cache", optimize)
    with running(root, loader, **{**EXPLICIT, "load_models": ("double",)}) as (server, stub):
        models = [server.repository.take("double", "")]
        go.set()
        until(lambda: server.repository.find("double", "") is not models[0])
        models.append(server.repository.take("double", ""))
        os.utime(root / "double" / "1" / "model.onnx")
        load(stub)
        models.append(server.repository.take("double", ""))
        assert len(set(map(id, models))) == 3
        with ThreadPoolExecutor() as pool:
            unloading = pool.submit(unload, stub)
            until(lambda: not server.repository.versions("double"))
            for model in (models[2], models[0], models[1]):
                time.sleep(0.15)
                assert not unloading.done()
                model.usage.leave()
            unloading.result(20)


def test_polling_follows_the_folder(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "double" / "config.pbtxt").write_text("version_policy { all { } }")
    with running(root, plain_loader(tmp_path / "cache"), control_mode="poll", poll_seconds=0.1) as (server, stub):
        first = server.repository.find("double", "1")
        save_double(root / "double" / "2" / "model.onnx", factor=3.0)
        until(lambda: ask(stub) == 3.0)
        assert server.repository.find("double", "1") is first  # what did not change is not loaded again
        save(root, "new", factor=9.0)
        until(lambda: ("new", "1") in index(stub) and index(stub)["new", "1"] == "READY")
        assert ask(stub, "new") == 9.0
        (root / "double" / "2" / "model.onnx").write_bytes(b"\xff")
        until(lambda: "is not an ONNX model" in caplog.text)
        assert ask(stub) == 3.0
        failures = caplog.text.count("is not an ONNX model")
        time.sleep(0.5)
        assert caplog.text.count("is not an ONNX model") == failures  # tried once per change
        shutil.rmtree(root / "double" / "2")
        until(lambda: ask(stub) == 2.0)
        shutil.rmtree(root / "new")
        until(lambda: ("new", "1") not in index(stub))
        assert status(lambda: ask(stub, "new"))[0] is grpc.StatusCode.NOT_FOUND


def test_a_plain_model_is_served_while_it_is_optimised(tmp_path: Path) -> None:
    """The optimiser here makes a model that answers otherwise, so that one can see which is served."""
    root = tmp_path / "models"
    save_double(root / "double" / "1" / "model.onnx")
    go = threading.Event()

    def optimize(model: Path, output: Path, settings: Settings) -> None:
        assert go.wait(30)
        save_double(output, factor=4.0)

    with running(root, plain_loader(tmp_path / "cache", optimize)) as (server, stub):
        assert ask(stub) == 2.0
        assert server.repository.find("double", "").notes == ["served unfused until it has been optimised"]
        go.set()
        until(lambda: ask(stub) == 4.0)
        model = server.repository.find("double", "")
        assert model.notes == ["no region of it could be fused"]
        assert model.statistics.totals().success > 1  # the counters went on
    with running(root, plain_loader(tmp_path / "cache", optimize)) as (_, stub):
        assert ask(stub) == 4.0  # found in the cache


def test_a_model_that_cannot_be_optimised_stays_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "models"
    save_double(root / "double" / "1" / "model.onnx")

    def refuse(model: Path, output: Path, settings: Settings) -> None:
        raise ModelError("no C compiler was found")

    with running(root, plain_loader(tmp_path / "cache", refuse)) as (server, stub):
        until(lambda: "stays unfused: no C compiler was found" in caplog.text)
        assert ask(stub) == 2.0
        assert server.repository.find("double", "").notes == ["it could not be optimised: no C compiler was found"]


def test_a_model_that_was_reloaded_meanwhile_is_not_replaced(root: Path, tmp_path: Path) -> None:
    (root / "double" / "tilefuse.toml").unlink()
    go, done = threading.Event(), threading.Event()

    def optimize(model: Path, output: Path, settings: Settings) -> None:
        assert go.wait(30)
        save_double(output, factor=100.0)
        done.set()

    with running(root, plain_loader(tmp_path / "cache", optimize), **EXPLICIT) as (_, stub):
        save(root, factor=3.0)
        load(stub)
        go.set()
        assert done.wait(30)
        time.sleep(0.3)
        assert ask(stub) == 3.0


def test_unknown_keys_of_a_configuration_are_named(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "double" / "config.pbtxt").write_text(
        """
        # as Triton's users write it { not: this }
        name: "double" platform: "onnxruntime_onnx" max_batch_size: 8
        input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 2, 2 ] } } ]
        output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ], label_filename: "labels" ".txt" } ]
        instance_group [ { count: 2 kind: KIND_GPU gpus: [ 0 ] } ]
        optimization { execution_accelerators { gpu_execution_accelerator : [ { name : "tensorrt" } ] } }
        parameters { key: "intra_op_thread_count" value: { string_value: "1" } }
        parameters { key: "enable_mem_arena" value: { string_value: "1" } }
        response_cache < enable: true >
        """
    )
    with running(root, plain_loader(tmp_path / "cache")) as (server, stub):
        assert ask(stub) == 2.0
        config = stub.ModelConfig(pb.ModelConfigRequest(name="double")).config
        assert config.instance_group[0].count == 2
        assert config.parameters["intra_op_thread_count"].string_value == "1"
        assert server.repository.find("double", "").scheduler.instances == 2
    warned = [
        record.message.split("config.pbtxt: ")[1] for record in caplog.records if "config.pbtxt" in record.message
    ]
    assert warned == [
        "input.reshape is not supported and has no effect",
        "output.label_filename is not supported and has no effect",
        "instance_group.gpus is not supported and has no effect",
        "optimization is not supported and has no effect",
        "response_cache is not supported and has no effect",
        "instance_group kind KIND_GPU is not supported, the instances run on the CPU",
        "parameter 'enable_mem_arena' is not supported and has no effect",
    ]


def test_another_file_name_can_be_served(tmp_path: Path) -> None:
    root = tmp_path / "models"
    save_double(root / "double" / "1" / "net.onnx")
    (root / "double" / "config.pbtxt").write_text('default_model_filename: "net.onnx"')
    (root / "double" / "tilefuse.toml").write_text(UNFUSED)
    with running(root, plain_loader(tmp_path / "cache")) as (_, stub):
        assert ask(stub) == 2.0


def test_warm_up_covers_batch_sizes(root: Path, tmp_path: Path) -> None:
    (root / "double" / "config.pbtxt").write_text("max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 4 ] }")
    with running(root, plain_loader(tmp_path / "cache")) as (server, stub):
        model = server.repository.find("double", "")
        assert [feeds["x"].shape for feeds in made_up_inputs(model)] == [(1, 4), (4, 4), (8, 4)]
        assert model.statistics.totals().executions == 0
        assert ask(stub) == 2.0


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ('key: "x" value { data_type: TYPE_FP32 dims: 4 zero_data: true }', None),
        ('key: "x" value { data_type: TYPE_FP32 dims: 4 random_data: true }', None),
        ('key: "x" value { data_type: TYPE_FP32 dims: 4 input_data_file: "rows" }', None),
        ('key: "x" value { data_type: TYPE_FP32 dims: 4 input_data_file: "short" }', "takes 32 bytes, but 3"),
        ('key: "x" value { data_type: TYPE_FP32 dims: 4 input_data_file: "none" }', "No such file"),
        ('key: "x" value { data_type: TYPE_FP32 dims: 5 zero_data: true }', r"FP32 \[2, 5\], which does not fit"),
        ('key: "z" value { data_type: TYPE_FP32 dims: 4 zero_data: true }', "gives z, but the model takes x"),
    ],
)
def test_warm_up_runs_that_are_asked_for_must_succeed(
    root: Path, tmp_path: Path, inputs: str, problem: str | None
) -> None:
    (root / "double" / "warmup").mkdir()
    (root / "double" / "warmup" / "rows").write_bytes(np.ones(8, dtype=np.float32).tobytes())
    (root / "double" / "warmup" / "short").write_bytes(b"abc")
    (root / "double" / "config.pbtxt").write_text(
        f'max_batch_size: 8 model_warmup {{ name: "first" batch_size: 2 count: 2 inputs {{ {inputs} }} }}'
    )
    repository = Repository()
    control = Control(repository, root, plain_loader(tmp_path / "cache"), on_change=lambda name: None)
    try:
        if problem is None:
            control.load_all()
            assert repository.versions("double") == (1,)
        else:
            with pytest.raises(RepositoryError, match=problem):
                control.load_all()
    finally:
        control.stop()


def test_a_failed_load_on_request_names_the_model(root: Path, tmp_path: Path) -> None:
    (root / "double" / "1" / "model.onnx").write_bytes(onnx.ModelProto().SerializeToString())
    control = Control(Repository(), root, plain_loader(tmp_path / "cache"), on_change=lambda name: None)
    with pytest.raises(LoadFailedError, match="model double cannot be loaded: version 1: ONNX Runtime cannot load it"):
        control.load("double")
    control.stop()


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tilefuse.server")
