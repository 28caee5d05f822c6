"""The wire format agrees with Triton's, lives beside it, and says how to build its stubs."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pool
from tritonclient.grpc import model_config_pb2, service_pb2

from proto import open_inference_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
THEIRS: dict[str, Any] = {
    name: message
    for module in (service_pb2, model_config_pb2)
    for name, message in module.DESCRIPTOR.message_types_by_name.items()
}
OURS: dict[str, Any] = dict(pb.DESCRIPTOR.message_types_by_name)


def differences(ours: Any, theirs: Any) -> list[str]:
    """Fields and nested messages of ours that are not the same in theirs."""
    found: list[str] = []
    for field in ours.fields:
        other = theirs.fields_by_name.get(field.name)
        if other is None or (field.number, field.type) != (other.number, other.type):
            found.append(f"{ours.full_name}.{field.name}")
        elif field.is_repeated != other.is_repeated:
            found.append(f"{ours.full_name}.{field.name} repeated")
        elif field.message_type is not None and field.message_type.full_name != other.message_type.full_name:
            found.append(f"{ours.full_name}.{field.name} of {field.message_type.full_name}")
    for nested in ours.nested_types:
        found += differences(nested, theirs.nested_types_by_name[nested.name])
    return found


@pytest.mark.parametrize("name", list(OURS))
def test_messages_have_tritons_fields(name: str) -> None:
    assert differences(OURS[name], THEIRS[name]) == []


def test_requests_and_responses_are_complete() -> None:
    for name, theirs in service_pb2.DESCRIPTOR.message_types_by_name.items():  # a config's other keys are named on load
        if name in OURS:
            assert {field.name for field in theirs.fields} == {field.name for field in OURS[name].fields}


def test_the_service_has_tritons_methods() -> None:
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    ours = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    assert {(m.name, m.input_type.full_name, m.output_type.full_name) for m in ours} == {
        (m.name, m.input_type.full_name, m.output_type.full_name) for m in theirs
    }


def test_data_types_have_tritons_numbers() -> None:
    assert dict(pb.DataType.items()) == dict(model_config_pb2.DataType.items())


def test_the_messages_are_not_in_the_default_pool() -> None:
    default: Any = descriptor_pool.Default()
    assert default.FindMessageTypeByName("inference.ModelInferRequest").file.name == "grpc_service.proto"
    assert pb.ModelInferRequest.DESCRIPTOR.file.name == "proto/open_inference.proto"
    theirs: Any = service_pb2
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[b"ab"])
    request.parameters["k"].int64_param = 3
    assert theirs.ModelInferRequest.FromString(request.SerializeToString()).parameters["k"].int64_param == 3


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A plain checkout's proto folder, without stubs."""
    (tmp_path / "proto").mkdir()
    for name in ("__init__.py", "generate.py", "open_inference.proto"):
        shutil.copy(ROOT / "proto" / name, tmp_path / "proto")
    return tmp_path


def python(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def test_missing_stubs_name_the_command_that_makes_them(checkout: Path) -> None:
    finished = python(checkout, "-c", "from proto import open_inference_pb2")
    assert finished.returncode == 1
    assert "run `python -m proto.generate`" in finished.stderr.splitlines()[-1]


def test_stubs_can_be_generated_and_imported(checkout: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is a build requirement, not one of the tests")
    assert python(checkout, "-m", "proto.generate").returncode == 0
    code = "from proto import open_inference_pb2 as p, open_inference_pb2_grpc; print(p.__file__)"
    finished = python(checkout, "-c", code)
    assert finished.stdout.strip() == str(checkout / "proto" / "open_inference_pb2.py"), finished.stderr
    assert (checkout / "proto" / "open_inference_pb2.pyi").is_file()
