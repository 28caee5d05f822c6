"""Our client against a server process, in a process that has loaded Triton's client as well."""

import json
from collections.abc import Generator

import numpy as np
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto
from served_models import ServerProcess, save_double, save_identity, save_pair

from runtime.cli import main
from runtime.client import Client, ClientError, ModelInfo, TensorInfo, random_inputs
from runtime.wire import BY_WIRE

NAMES = ("bf16", "bool", "bytes", "fp16", "int64")
KINDS = (TensorProto.BFLOAT16, TensorProto.BOOL, TensorProto.STRING, TensorProto.FLOAT16, TensorProto.INT64)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[ServerProcess]:
    root = tmp_path_factory.mktemp("repository")
    save_double(root / "double" / "1" / "model.onnx")
    save_double(root / "double" / "2" / "model.onnx", factor=5.0)
    (root / "double" / "config.pbtxt").write_text("version_policy { all { } }")
    save_pair(root / "pair" / "1" / "model.onnx")
    for name, kind in zip(NAMES, KINDS, strict=True):
        save_identity(root / name / "1" / "model.onnx", kind)
    for folder in root.iterdir():
        (folder / "tilefuse.toml").write_text("optimize = false\n")
    process = ServerProcess(root, tmp_path_factory.mktemp("cache"))
    yield process.wait_ready()
    assert process.stop() == 0, process.log


@pytest.fixture
def client(server: ServerProcess) -> Generator[Client]:
    with Client(server.url) as opened:
        yield opened


def test_both_clients_work_in_one_process(server: ServerProcess, client: Client) -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    tensor = triton.InferInput("x", [2, 4], "FP32")
    tensor.set_data_from_numpy(x)
    theirs = triton.InferenceServerClient(server.url)
    try:
        result = theirs.infer("double", [tensor])
    finally:
        theirs.close()
    assert result is not None
    expected = result.as_numpy("y")
    np.testing.assert_array_equal(client.infer("double", {"x": x})["y"], expected)


def test_inference_by_name_version_and_output(client: Client) -> None:
    x = np.ones((1, 4), dtype=np.float32)
    assert client.infer("double", {"x": x}, version="1")["y"].tolist() == [[2.0] * 4]
    assert client.infer("double", {"x": x})["y"].tolist() == [[5.0] * 4]
    a = np.arange(3).reshape(1, 3)
    answer = client.infer("pair", {"a": a, "b": [[1, 1, 1]]}, outputs=["difference"])
    assert {name: array.tolist() for name, array in answer.items()} == {"difference": [[-1, 0, 1]]}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "bytes"])
def test_types_come_back_as_sent(client: Client, name: str) -> None:
    array = np.array([1, 0, 1]).astype(BY_WIRE[name.upper()].dtype)
    answer = client.infer(name, {"x": array})["y"]
    assert answer.dtype == array.dtype
    np.testing.assert_array_equal(answer, array)


def test_text_comes_back_as_text(client: Client) -> None:
    for array in (np.array(["é", ""], dtype=object), np.array(["é", ""]), np.array(["é".encode(), b""])):
        assert client.infer("bytes", {"x": array})["y"].tolist() == ["é", ""]


def test_metadata_and_readiness(client: Client) -> None:
    info = client.metadata("double")
    assert info == ModelInfo(
        name="double",
        versions=("1", "2"),
        platform="onnxruntime_onnx",
        inputs=(TensorInfo("x", "FP32", (-1, 4)),),
        outputs=(TensorInfo("y", "FP32", (-1, 4)),),
    )
    assert client.ready()
    assert client.ready("double", version="2")
    assert not client.ready("nobody")
    with Client("127.0.0.1:1") as nowhere:
        assert not nowhere.ready()


def test_refusals_are_errors_with_the_servers_words(client: Client) -> None:
    with pytest.raises(ClientError, match="NOT_FOUND: no model is named 'nobody'"):
        client.metadata("nobody")
    with pytest.raises(ClientError, match="INVALID_ARGUMENT: input 'x': datatype is 'FP64'"):
        client.infer("double", {"x": np.ones((1, 4))})
    with pytest.raises(ClientError, match="input 'x': elements of type complex128"):
        client.infer("double", {"x": np.ones((1, 4), dtype=complex)})
    with Client("127.0.0.1:1") as nowhere, pytest.raises(ClientError, match=r"no server answers at 127\.0\.0\.1:1"):
        nowhere.metadata("double")


def test_random_inputs_suit_the_model(client: Client) -> None:
    for name in ("double", "pair", *NAMES):
        info = client.metadata(name)
        inputs = random_inputs(info)
        assert {tensor.name for tensor in info.inputs} == set(inputs)
        assert client.infer(name, inputs)
    tensors = (TensorInfo("ids", "INT64", (-1, -1)), TensorInfo("attention_mask", "INT64", (-1, 5)))
    encoder = ModelInfo("encoder", ("1",), "", tensors, ())
    inputs = random_inputs(encoder)
    assert inputs["ids"].shape == (1, 8)
    assert inputs["attention_mask"].tolist() == [[1] * 5]


def test_the_command_prints_json_and_tables(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    archive = tmp_path_factory.mktemp("inputs") / "inputs.npz"
    np.savez(archive, x=np.array([[1, 2, 3, 4]], dtype=np.float32))
    with pytest.raises(SystemExit) as exit_:
        main(["infer", server.url, "double", "--inputs", str(archive), "--json"])
    assert exit_.value.code == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {
        "model": "double",
        "outputs": {"y": {"datatype": "FP32", "shape": [1, 4], "data": [[5.0, 10.0, 15.0, 20.0]]}},
    }
    with pytest.raises(SystemExit) as exit_:
        main(["infer", server.url, "double"])
    assert exit_.value.code == 0
    assert "float32" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_:
        main(["infer", server.url, "nobody", "--json"])
    assert exit_.value.code == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "error: NOT_FOUND: no model is named 'nobody'\n")
