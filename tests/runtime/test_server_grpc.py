"""The server as a process on the loopback interface, asked by Triton's client and by raw messages."""

import re
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from onnx import TensorProto
from served_models import (
    ServerProcess,
    save_double,
    save_identity,
    save_lookup,
    save_pair,
    save_slow,
)
from tritonclient.utils import InferenceServerException

from proto import open_inference_pb2 as pb
from proto.open_inference_pb2_grpc import GRPCInferenceServiceStub
from runtime.wire import DATATYPES, encode_raw

UNFUSED = "optimize = false\n"
KINDS = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "BF16": TensorProto.BFLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[ServerProcess]:
    root = tmp_path_factory.mktemp("repository")
    save_double(root / "double" / "1" / "model.onnx")
    save_double(root / "double" / "3" / "model.onnx", factor=3.0)
    (root / "double" / "config.pbtxt").write_text(
        'platform: "onnxruntime_onnx" max_batch_size: 8 version_policy { all {} } '
        'input { name: "x" data_type: TYPE_FP32 dims: 4 }'
    )
    save_pair(root / "pair" / "1" / "model.onnx")
    save_lookup(root / "lookup" / "1" / "model.onnx")
    save_slow(root / "slow" / "1" / "model.onnx")
    for name, kind in KINDS.items():
        save_identity(root / f"identity_{name.lower()}" / "1" / "model.onnx", kind)
    for folder in root.iterdir():
        (folder / "tilefuse.toml").write_text(UNFUSED)
    process = ServerProcess(root, tmp_path_factory.mktemp("cache"), "--workers", "8", "--message-mib", "4")
    yield process.wait_ready()
    assert process.stop() == 0, process.log


@pytest.fixture(scope="module")
def channel(server: ServerProcess) -> Generator[grpc.Channel]:
    with grpc.insecure_channel(server.url) as opened:
        yield opened


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> Any:
    return GRPCInferenceServiceStub(channel)


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Generator[Any]:
    opened = triton.InferenceServerClient(server.url)
    yield opened
    opened.close()


def triton_input(name: str, array: np.ndarray[Any, Any], datatype: str) -> Any:
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def test_triton_client_sees_the_server(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("double")
    assert client.is_model_ready("double", "3")
    assert not client.is_model_ready("double", "2")
    assert not client.is_model_ready("nobody")
    metadata = client.get_server_metadata(as_json=True)
    assert metadata["name"] == "tilefuse"
    assert metadata["extensions"] == ["model_configuration", "statistics", "schedule_policy", "sequence"]


def test_triton_client_sees_a_model(client: Any) -> None:
    metadata = client.get_model_metadata("double", as_json=True)
    assert metadata["versions"] == ["1", "3"]
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": ["-1", "4"]}]
    assert metadata["outputs"] == [{"name": "y", "datatype": "FP32", "shape": ["-1", "4"]}]
    config = client.get_model_config("double", as_json=True)["config"]
    assert config["max_batch_size"] == 8
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": ["4"]}]
    assert config["version_policy"] == {"all": {}}


def test_triton_client_infers_and_is_counted(client: Any) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    before = client.get_inference_statistics("double", "3", as_json=True)["model_stats"][0]
    result = client.infer("double", [triton_input("x", x, "FP32")], request_id="seven")
    np.testing.assert_array_equal(result.as_numpy("y"), x * 3)
    assert result.get_response().id == "seven"
    assert result.get_response().model_version == "3"
    old = client.infer("double", [triton_input("x", x, "FP32")], model_version="1")
    np.testing.assert_array_equal(old.as_numpy("y"), x * 2)
    after = client.get_inference_statistics("double", "3", as_json=True)["model_stats"][0]
    assert int(after["inference_count"]) == int(before.get("inference_count", 0)) + 3
    assert int(after["execution_count"]) == int(before.get("execution_count", 0)) + 1
    assert len(client.get_inference_statistics("double", as_json=True)["model_stats"]) == 2
    assert len(client.get_inference_statistics(as_json=True)["model_stats"]) == 5 + len(KINDS)


def test_triton_client_chooses_outputs(client: Any) -> None:
    a = np.array([[1, 2, 3]])
    result = client.infer(
        "pair",
        [triton_input("b", a * 5, "INT64"), triton_input("a", a, "INT64")],
        outputs=[triton.InferRequestedOutput("difference")],
    )
    np.testing.assert_array_equal(result.as_numpy("difference"), a - a * 5)
    assert result.as_numpy("total") is None


def test_repository_index(client: Any) -> None:
    models = client.get_model_repository_index(as_json=True)["models"]
    states = {(model["name"], model["version"]): model["state"] for model in models}
    assert states["double", "1"] == states["double", "3"] == states["pair", "1"] == "READY"


@pytest.mark.parametrize("name", list(KINDS))
def test_every_type_comes_back_as_sent(stub: Any, name: str) -> None:
    datatype = next(entry for entry in DATATYPES if entry.wire == name)
    array = np.array(["a", "é", ""], dtype=object) if name == "BYTES" else np.array([1, 0, 1]).astype(datatype.dtype)
    raw = encode_raw(array)
    request = pb.ModelInferRequest(model_name=f"identity_{name.lower()}", raw_input_contents=[raw])
    request.inputs.add(name="x", datatype=name, shape=[3])
    answer = stub.ModelInfer(request)
    assert answer.outputs[0].datatype == name
    assert list(answer.outputs[0].shape) == [3]
    assert list(answer.raw_output_contents) == [raw]


def test_triton_client_sends_text_and_half_floats(client: Any) -> None:
    text = np.array(["tile", "fuse"], dtype=object)
    answer = client.infer("identity_bytes", [triton_input("x", text, "BYTES")]).as_numpy("y")
    assert answer.tolist() == [b"tile", b"fuse"]
    half = np.array([0.5, -2.0], dtype=np.float16)
    np.testing.assert_array_equal(client.infer("identity_fp16", [triton_input("x", half, "FP16")]).as_numpy("y"), half)


def test_contents_are_answered_with_contents(stub: Any) -> None:
    request = pb.ModelInferRequest(model_name="double")
    entry = request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    entry.contents.fp32_contents.extend([1, 2, 3, 4])
    answer = stub.ModelInfer(request)
    assert list(answer.outputs[0].contents.fp32_contents) == [3, 6, 9, 12]
    assert not answer.raw_output_contents


def test_empty_batches_are_answered(client: Any) -> None:
    x = np.zeros((0, 4), dtype=np.float32)
    assert client.infer("double", [triton_input("x", x, "FP32")]).as_numpy("y").shape == (0, 4)


def raw_request(model: str = "pair", **changes: Any) -> pb.ModelInferRequest:
    """A right request for `pair`, with fields of the request replaced."""
    ones = np.ones((2, 3), dtype=np.int64).tobytes()
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[ones, ones])
    for name in ("a", "b"):
        request.inputs.add(name=name, datatype="INT64", shape=[2, 3])
    for field, value in changes.items():
        if isinstance(value, list):
            del getattr(request, field)[:]
            getattr(request, field).extend(value)
        else:
            setattr(request, field, value)
    return request


def sent(name: str = "a", datatype: str = "INT64", shape: tuple[int, ...] = (2, 3), **fields: Any) -> Any:
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape, **fields)


def both(**first: Any) -> pb.ModelInferRequest:
    """A request for `pair` whose first input is as given and whose second is right."""
    return raw_request(inputs=[sent(**first), sent("b")])


def edited(edit: Callable[[pb.ModelInferRequest], Any]) -> pb.ModelInferRequest:
    request = raw_request()
    edit(request)
    return request


def text_request(raw: bytes, count: int) -> pb.ModelInferRequest:
    return raw_request("identity_bytes", inputs=[sent("x", "BYTES", (count,))], raw_input_contents=[raw])


def shared_memory(request: pb.ModelInferRequest) -> None:
    request.inputs[0].parameters["shared_memory_region"].string_param = "region"


def classification(request: pb.ModelInferRequest) -> None:
    request.outputs.add(name="total").parameters["classification"].int64_param = 3


def fill(parameters: Any) -> None:
    """One parameter more than are accepted."""
    for number in range(65):
        parameters[f"key{number}"].int64_param = number


ONES = np.ones(6, dtype=np.int64).tobytes()
CONTENTS = pb.InferTensorContents(int64_contents=[1] * 6)
OUTPUT = pb.ModelInferRequest.InferRequestedOutputTensor
INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND

BAD: dict[str, tuple[pb.ModelInferRequest, grpc.StatusCode, str]] = {
    "too few bytes": (raw_request(raw_input_contents=[ONES[:-8], ONES]), INVALID, "takes 48 bytes, but 40"),
    "too many bytes": (raw_request(raw_input_contents=[ONES + ONES, ONES]), INVALID, "takes 48 bytes, but 96"),
    "odd number of bytes": (raw_request(raw_input_contents=[ONES[:-1], ONES]), INVALID, "but 47 were sent"),
    "no bytes": (raw_request(raw_input_contents=[b"", ONES]), INVALID, "but 0 were sent"),
    "a tensor too few": (raw_request(raw_input_contents=[ONES]), INVALID, "holds 1 tensors"),
    "a tensor too many": (raw_request(raw_input_contents=[ONES] * 3), INVALID, "holds 3 tensors"),
    "no data at all": (raw_request(raw_input_contents=[]), INVALID, "int64_contents holds 0"),
    "negative dim": (both(shape=(-1, 3)), INVALID, "dim -1"),
    "most negative dim": (both(shape=(-(2**63), 3)), INVALID, "between 0 and"),
    "huge dims": (both(shape=(2**40, 2**40)), INVALID, "between 0 and"),
    "dims that overflow": (both(shape=(2**31 - 1, 2**31 - 1)), INVALID, "that are accepted"),
    "a huge empty tensor": (both(shape=(2**31 - 1, 0)), INVALID, "that are accepted"),
    "rank too low": (both(shape=(6,)), INVALID, r"the model takes \[-1, 3\]"),
    "rank too high": (both(shape=(1,) * 40), INVALID, "40 dims"),
    "no shape": (both(shape=()), INVALID, r"shape is \[\]"),
    "wrong fixed dim": (both(shape=(3, 2)), INVALID, r"the model takes \[-1, 3\]"),
    "symbols that differ": (
        raw_request(inputs=[sent("a"), sent("b", shape=(1, 3))], raw_input_contents=[ONES, ONES[:24]]),
        INVALID,
        "dim 'rows' is 1, but it is 2",
    ),
    "unknown datatype": (both(datatype="FP7"), INVALID, "'FP7', but the model takes INT64"),
    "no datatype": (both(datatype=""), INVALID, "the model takes INT64"),
    "another datatype": (both(datatype="FP64"), INVALID, "the model takes INT64"),
    "raw and contents": (both(contents=CONTENTS), INVALID, "raw_input_contents is used as well"),
    "contents of another type": (
        raw_request(
            inputs=[sent(contents=pb.InferTensorContents(fp32_contents=[1.0] * 6)), sent("b", contents=CONTENTS)],
            raw_input_contents=[],
        ),
        INVALID,
        "belongs in int64_contents",
    ),
    "too few contents": (
        raw_request(
            inputs=[sent(contents=pb.InferTensorContents(int64_contents=[1])), sent("b", contents=CONTENTS)],
            raw_input_contents=[],
        ),
        INVALID,
        "holds 1",
    ),
    "one input twice": (raw_request(inputs=[sent("a"), sent("a")]), INVALID, "given twice"),
    "an unknown input": (raw_request(inputs=[sent("a"), sent("c")]), INVALID, "unknown input 'c'"),
    "a nameless input": (raw_request(inputs=[sent("a"), sent("")]), INVALID, "unknown input ''"),
    "an input too few": (raw_request(inputs=[sent("a")], raw_input_contents=[ONES]), INVALID, "'b' is missing"),
    "no inputs": (raw_request(inputs=[], raw_input_contents=[]), INVALID, "is missing"),
    "an unknown output": (raw_request(outputs=[OUTPUT(name="z")]), INVALID, "unknown output 'z'"),
    "one output twice": (raw_request(outputs=[OUTPUT(name="total")] * 2), INVALID, "asked for twice"),
    "no model": (raw_request(""), NOT_FOUND, "no model"),
    "an unknown model": (raw_request("nobody"), NOT_FOUND, "no model is named 'nobody'"),
    "a path as a model": (raw_request("../../etc/passwd"), NOT_FOUND, "no model"),
    "a model and a path": (raw_request("pair/../pair"), NOT_FOUND, "no model"),
    "a model with a zero byte": (raw_request("pair\0"), NOT_FOUND, "no model"),
    "a very long model name": (raw_request("n" * 100_000), NOT_FOUND, "no model"),
    "an unknown version": (raw_request(model_version="2"), NOT_FOUND, "no version '2'; served: 1"),
    "a version that is no number": (raw_request(model_version="one"), NOT_FOUND, "no version"),
    "a version with zeros": (raw_request(model_version="01"), NOT_FOUND, "no version"),
    "a version that is a path": (raw_request(model_version="../1"), NOT_FOUND, "no version"),
    "a version of other digits": (raw_request(model_version="١"), NOT_FOUND, "no version"),
    "text longer than the data": (text_request(b"\xff\xff\xff\x7fab", 1), INVALID, "claims 2147483647 bytes"),
    "text cut short": (text_request(b"\1\0", 1), INVALID, "at least 4 bytes"),
    "text left over": (text_request(b"\0\0\0\0x", 1), INVALID, "left over"),
    "text that is not text": (text_request(b"\2\0\0\0\xff\xfe", 1), INVALID, "not UTF-8"),
    "more text than data": (text_request(b"\0\0\0\0", 10**6), INVALID, "at least 4000000 bytes"),
    "a boolean of 2": (
        raw_request("identity_bool", inputs=[sent("x", "BOOL", (1,))], raw_input_contents=[b"\2"]),
        INVALID,
        "other than 0 and 1",
    ),
    "half floats as contents": (
        raw_request(
            "identity_fp16",
            inputs=[sent("x", "FP16", (1,), contents=pb.InferTensorContents(fp32_contents=[1]))],
            raw_input_contents=[],
        ),
        INVALID,
        "raw_input_contents",
    ),
    "too large a batch": (
        raw_request("double", inputs=[sent("x", "FP32", (9, 4))], raw_input_contents=[b"\0" * 144]),
        INVALID,
        "max_batch_size is 8",
    ),
    "an id outside of the table": (
        raw_request(
            "lookup", inputs=[sent("ids", shape=(1,))], raw_input_contents=[np.array([99], dtype=np.int64).tobytes()]
        ),
        INVALID,
        "cannot run on these inputs",
    ),
    "shared memory": (edited(shared_memory), INVALID, "shared memory is not supported"),
    "classification": (edited(classification), INVALID, "classification"),
    "tensors without inputs": (raw_request(inputs=[], raw_input_contents=[ONES]), INVALID, "lists 0 inputs"),
    "two kinds of contents": (
        raw_request(
            inputs=[
                sent(contents=pb.InferTensorContents(int64_contents=[1] * 6, fp32_contents=[1.0])),
                sent("b", contents=CONTENTS),
            ],
            raw_input_contents=[],
        ),
        INVALID,
        "int64_contents",
    ),
    "too many contents": (
        raw_request(
            inputs=[sent(contents=pb.InferTensorContents(int64_contents=[1] * 7)), sent("b", contents=CONTENTS)],
            raw_input_contents=[],
        ),
        INVALID,
        "holds 7",
    ),
    "a datatype in small letters": (both(datatype="int64"), INVALID, "'int64', but the model takes INT64"),
    "a very long datatype": (both(datatype="I" * 100_000), INVALID, "the model takes INT64"),
    "a very long input name": (raw_request(inputs=[sent("a"), sent("n" * 100_000)]), INVALID, "unknown input 'nnn"),
    "an input that is a path": (raw_request(inputs=[sent("a"), sent("../b")]), INVALID, "unknown input '../b'"),
    "an input with a zero byte": (raw_request(inputs=[sent("a"), sent("b\0")]), INVALID, "unknown input"),
    "a nameless output": (raw_request(outputs=[OUTPUT(name="")]), INVALID, "unknown output ''"),
    "a very long output name": (raw_request(outputs=[OUTPUT(name="n" * 100_000)]), INVALID, "unknown output 'nnn"),
    "dims whose product is above 64 bits": (both(shape=(2**62, 2**62, 2**62)), INVALID, "between 0 and"),
    "an empty tensor with data": (
        raw_request(inputs=[sent(shape=(0, 3)), sent("b", shape=(0, 3))]),
        INVALID,
        "takes 0 bytes, but 48",
    ),
    "half of a half float": (
        raw_request("identity_fp16", inputs=[sent("x", "FP16", (1,))], raw_input_contents=[b"\0"]),
        INVALID,
        "takes 2 bytes, but 1",
    ),
    "bfloats as contents": (
        raw_request(
            "identity_bf16",
            inputs=[sent("x", "BF16", (1,), contents=pb.InferTensorContents(fp32_contents=[1]))],
            raw_input_contents=[],
        ),
        INVALID,
        "raw_input_contents",
    ),
    "text of the greatest length": (text_request(b"\xff\xff\xff\xffab", 1), INVALID, "claims 4294967295 bytes"),
    "a negative id": (
        raw_request(
            "lookup", inputs=[sent("ids", shape=(1,))], raw_input_contents=[np.array([-99], dtype=np.int64).tobytes()]
        ),
        INVALID,
        "cannot run on these inputs",
    ),
    "a very long id": (raw_request(id="i" * 1025), INVALID, "the id has 1025 characters"),
    "too many parameters": (edited(lambda request: fill(request.parameters)), INVALID, "65 parameters"),
    "too many parameters of an input": (
        edited(lambda request: fill(request.inputs[0].parameters)),
        INVALID,
        "'a' has more than the 64 parameters",
    ),
    "an output in shared memory": (
        edited(
            lambda request: (
                request.outputs.add(name="total")
                .parameters["shared_memory_region"]
                .MergeFrom(pb.InferParameter(string_param="region"))
            )
        ),
        INVALID,
        "shared memory is not supported",
    ),
    "the end of a sequence": (
        edited(lambda request: request.parameters["sequence_end"].MergeFrom(pb.InferParameter(bool_param=True))),
        INVALID,
        "no state",
    ),
    "a sequence": (
        edited(lambda request: request.parameters["sequence_id"].MergeFrom(pb.InferParameter(int64_param=1))),
        INVALID,
        "no state",
    ),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_requests_are_refused_with_a_reason(stub: Any, case: str) -> None:
    request, status, reason = BAD[case]
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request)
    error: Any = caught.value
    assert error.code() is status, error.details()
    assert re.search(reason, error.details()), error.details()
    assert "Traceback" not in error.details()
    assert len(error.details()) < 500
    answer = stub.ModelInfer(raw_request())  # the server still answers
    assert np.frombuffer(answer.raw_output_contents[0], dtype=np.int64).tolist() == [2] * 6


def test_the_largest_message_is_enforced(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(raw_request(raw_input_contents=[b"\0" * 5 * 2**20, ONES]))
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_bytes_that_are_no_message_are_refused(channel: grpc.Channel) -> None:
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"\xff" * 40)
    error: Any = caught.value
    assert error.code() is INVALID
    assert error.details() == "the 40 bytes are no ModelInferRequest"


def test_what_is_not_built_says_so(stub: Any, client: Any) -> None:
    with pytest.raises(InferenceServerException, match=r"UNIMPLEMENTED.*RepositoryModelLoad"):
        client.load_model("double")
    for method, request in (
        (stub.RepositoryModelUnload, pb.RepositoryModelUnloadRequest(model_name="double")),
        (stub.SystemSharedMemoryStatus, pb.SystemSharedMemoryStatusRequest()),
        (stub.CudaSharedMemoryRegister, pb.CudaSharedMemoryRegisterRequest()),
        (stub.TraceSetting, pb.TraceSettingRequest()),
        (stub.LogSettings, pb.LogSettingsRequest()),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            method(request)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert re.search("not supported|server s|was started with --model-control-mode none", error.details())


def test_health_of_the_server_and_of_every_model(channel: grpc.Channel) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    for service in ("", "double", "pair"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="nobody"))
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_describes_all_services(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert set(database.get_services()) == {
        "inference.GRPCInferenceService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    pool = descriptor_pool.DescriptorPool(database)
    service = pool.FindServiceByName("inference.GRPCInferenceService")
    assert service.methods_by_name["ModelInfer"].input_type.fields_by_name["raw_input_contents"].number == 7


def test_no_client_gets_anothers_rows(server: ServerProcess) -> None:
    failures: list[str] = []

    def ask(seed: int) -> None:
        random = np.random.default_rng(seed)
        with grpc.insecure_channel(server.url, options=(("grpc.use_local_subchannel_pool", 1),)) as own:
            stub: Any = GRPCInferenceServiceStub(own)
            for _ in range(40):
                a = random.integers(0, 1000, (int(random.integers(1, 9)), 3))
                request = raw_request(
                    inputs=[sent(name, shape=a.shape) for name in ("a", "b")],
                    raw_input_contents=[a.tobytes(), (a * seed).tobytes()],
                    id=f"{seed}",
                )
                answer = stub.ModelInfer(request)
                total = np.frombuffer(answer.raw_output_contents[0], dtype=np.int64).reshape(a.shape)
                if answer.id != str(seed) or not np.array_equal(total, a + a * seed):
                    failures.append(f"client {seed} got {total.tolist()}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(1, 9)))
    assert not failures


def slow_request(steps: int) -> pb.ModelInferRequest:
    return raw_request(
        "slow",
        inputs=[sent("x", "FP32", (1,)), sent("steps", "INT64", ())],
        raw_input_contents=[np.array([7], dtype=np.float32).tobytes(), np.array(steps).tobytes()],
    )


def test_a_deadline_is_kept(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(slow_request(2000), timeout=0.1)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_other_calls_are_answered_while_a_model_runs(stub: Any) -> None:
    running = stub.ModelInfer.future(slow_request(20_000))
    assert stub.ServerLive(pb.ServerLiveRequest(), timeout=5).live
    answer = stub.ModelInfer(raw_request(), timeout=5)
    assert answer.model_name == "pair"
    assert not running.done()
    running.result(timeout=60)


def test_expired_requests_are_not_computed(stub: Any) -> None:
    """Their deadlines pass while all workers are busy."""

    def counted() -> int:
        return stub.ModelStatistics(pb.ModelStatisticsRequest(name="pair")).model_stats[0].inference_count

    before = counted()
    running = [stub.ModelInfer.future(slow_request(1000)) for _ in range(8)]  # as many as there are workers
    time.sleep(0.1)
    waiting = [stub.ModelInfer.future(raw_request(), timeout=0.05) for _ in range(20)]
    assert {future.code() for future in waiting} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    for future in running:
        future.result(timeout=60)
    assert counted() == before
