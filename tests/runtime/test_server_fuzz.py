"""Mutated messages against the handler of ModelInfer: every one is answered or refused as the client's fault, in time.

Most go to the handler without a network, so that there can be many; some over gRPC.
"""

import random
import resource
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from onnx import TensorProto
from served_models import plain_loader, running, save_double, save_identity, save_lookup, save_pair

from proto import open_inference_pb2 as pb
from runtime.server.handlers import SERVICE, inference_handlers
from runtime.server.operations.observe import Observer
from runtime.server.serve import RunningServer

MESSAGES = 20_000
OVER_GRPC = 500
SECONDS = 2.0  # no single message may take longer
GROWTH = 200 * 2**20  # bytes of memory that all of them together may cost
FAULTS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class AbortedError(Exception):
    """What `abort` raises, with what it was given."""

    def __init__(self, status: grpc.StatusCode, reason: str) -> None:
        super().__init__(status, reason)
        self.status, self.reason = status, reason


class Context:
    """A call whose client waits."""

    def __init__(self) -> None:
        self._ends: list[Callable[[], None]] = []

    def is_active(self) -> bool:
        return True

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self._ends.append(callback)
        return True

    def abort(self, status: grpc.StatusCode, reason: str) -> None:
        raise AbortedError(status, reason)

    def end(self) -> None:
        for callback in self._ends:
            callback()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[RunningServer, Any]]:
    root: Path = tmp_path_factory.mktemp("models")
    save_double(root / "double" / "1" / "model.onnx")
    (root / "double" / "config.pbtxt").write_text(
        "max_batch_size: 8 dynamic_batching { priority_levels: 2 default_priority_level: 1 }"
    )
    save_pair(root / "pair" / "1" / "model.onnx")
    save_lookup(root / "lookup" / "1" / "model.onnx")
    save_identity(root / "text" / "1" / "model.onnx", TensorProto.STRING)
    for folder in root.iterdir():
        (folder / "tilefuse.toml").write_text("optimize = false\n")
    with running(root, plain_loader(tmp_path_factory.mktemp("cache"))) as both:
        yield both


def seeds() -> list[bytes]:
    """Right requests: raw and typed, numbers and text, with parameters and outputs."""
    ones = np.ones((2, 3), dtype=np.int64)
    pair = pb.ModelInferRequest(model_name="pair", id="id", raw_input_contents=[ones.tobytes()] * 2)
    for name in ("a", "b"):
        pair.inputs.add(name=name, datatype="INT64", shape=[2, 3])
    pair.outputs.add(name="total")
    typed = pb.ModelInferRequest(model_name="double", model_version="1")
    typed.inputs.add(name="x", datatype="FP32", shape=[1, 4]).contents.fp32_contents.extend([1, 2, 3, 4])
    typed.parameters["priority"].int64_param = 2
    lookup = pb.ModelInferRequest(model_name="lookup", raw_input_contents=[np.arange(5).tobytes()])
    lookup.inputs.add(name="ids", datatype="INT64", shape=[5])
    text = pb.ModelInferRequest(model_name="text", raw_input_contents=[b"\2\0\0\0ab\0\0\0\0"])
    text.inputs.add(name="x", datatype="BYTES", shape=[2])
    return [message.SerializeToString() for message in (pair, typed, lookup, text)]


VARINTS = (b"\0", b"\x7f", b"\xff\xff\xff\xff\x07", b"\xff" * 9 + b"\1", b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\1")


def mutated(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """One to four changes: bits, bytes, lengths, pieces of other messages, or a field of the message itself."""
    found = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(found) + 1)
        match chance.randrange(7):
            case 0 if at < len(found):
                found[at] ^= 1 << chance.randrange(8)
            case 1:
                found[at:at] = chance.randbytes(chance.randint(1, 8))
            case 2:
                del found[at : at + chance.randint(1, 8)]
            case 3:
                del found[at:]
            case 4:
                found[at : at + 1] = chance.choice(VARINTS)
            case 5:
                other = chance.choice(others)
                start = chance.randrange(len(other))
                found[at:at] = other[start : start + chance.randint(1, len(other))]
            case _:
                return changed_field(data, chance)
    return bytes(found)


def changed_field(data: bytes, chance: random.Random) -> bytes:
    """A message that still parses, with a value that is wrong."""
    request = pb.ModelInferRequest.FromString(data)
    tensor = request.inputs[chance.randrange(len(request.inputs))]
    match chance.randrange(6):
        case 0:
            tensor.shape[:] = [
                chance.choice((-1, 0, 1, 2, 2**31 - 1, 2**40, -(2**63))) for _ in range(chance.randrange(20))
            ]
        case 1:
            tensor.datatype = chance.choice(("FP32", "INT64", "BYTES", "BF16", "bool", "", "\0"))
        case 2:
            tensor.name = chance.choice(("a", "x", "", "../x", "n" * 5000))
        case 3:
            request.model_name = chance.choice(("pair", "double", "text", "../pair", "pair/1", "", "\0"))
        case 4:
            request.raw_input_contents.append(chance.randbytes(chance.randrange(64)))
        case _:
            parameter = request.parameters[chance.choice(("priority", "timeout", "sequence_id", "other"))]
            parameter.int64_param = chance.choice((-(2**63), -1, 0, 1, 2, 3, 2**63 - 1))
    return request.SerializeToString()


def test_mutated_messages_are_refused_or_answered(served: tuple[RunningServer, Any]) -> None:
    server, stub = served
    service: Any = server.service
    details: Any = SimpleNamespace(method=f"/{SERVICE.full_name}/ModelInfer", invocation_metadata=())
    handler: Any = inference_handlers(service, Observer()).service(details)
    chance, right = random.Random(7), seeds()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    outcomes: dict[str, int] = {}
    for number in range(MESSAGES):
        data = mutated(right[number % len(right)], right, chance)
        context = Context()
        started = time.perf_counter()
        try:
            handler.response_serializer(handler.unary_unary(data, context))
            outcome = "OK"
            reason = ""
        except AbortedError as error:
            outcome, reason = error.status.name, error.reason
        finally:
            context.end()
        assert outcome == "OK" or outcome in {status.name for status in FAULTS}, (number, data, reason)
        assert len(reason) < 700, (number, data)
        assert "Traceback" not in reason
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        assert time.perf_counter() - started < SECONDS, (number, data)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < GROWTH
    assert outcomes["OK"] > 100  # some mutations do no harm
    assert outcomes["INVALID_ARGUMENT"] > MESSAGES / 4
    assert outcomes["NOT_FOUND"] > 100
    call = stub.ModelInfer(pb.ModelInferRequest.FromString(right[0]))
    assert np.frombuffer(call.raw_output_contents[0], dtype=np.int64).tolist() == [2] * 6


def test_mutated_messages_over_grpc(served: tuple[RunningServer, Any]) -> None:
    server, stub = served
    chance, right = random.Random(8), seeds()
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        for name in ("ModelInfer", "ModelConfig", "ModelStatistics", "RepositoryIndex", "RepositoryModelLoad"):
            call = channel.unary_unary(f"/{SERVICE.full_name}/{name}")
            for number in range(OVER_GRPC // 5):
                try:
                    call(mutated(right[number % len(right)], right, chance), timeout=10)
                except grpc.RpcError as error:
                    failed: Any = error
                    assert failed.code() in {*FAULTS, grpc.StatusCode.UNIMPLEMENTED}, (name, failed.details())
        stream = channel.stream_stream(f"/{SERVICE.full_name}/ModelStreamInfer")
        for number in range(50):
            messages = [right[0], mutated(right[number % len(right)], right, chance), right[0]]
            try:
                answers = [pb.ModelStreamInferResponse.FromString(data) for data in stream(iter(messages), timeout=10)]
            except grpc.RpcError as error:
                failed = error
                assert failed.code() is grpc.StatusCode.INVALID_ARGUMENT, failed.details()
                continue
            assert len(answers) == 3
            assert not answers[0].error_message
            assert not answers[2].error_message  # one bad request of a stream spoils no other
    assert stub.ServerLive(pb.ServerLiveRequest()).live
