"""The direct way of ModelInfer: one thread leads, none is kept from it, limits hold, bytes mean what protobuf says."""

import random
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from served_models import plain_loader, running, save_double, save_slow

from proto import open_inference_pb2 as pb
from runtime.server.direct import DirectCall, DirectCalls, attach
from runtime.server.errors import InvalidRequestError
from runtime.server.infer_message import answer_bytes, read_request

METHOD = "/test.Echo/Call"


@contextmanager
def echo(
    answer: Any, *, kind: str = "unary_unary", workers: int = 4, waiting: int = 8
) -> Generator[tuple[DirectCalls, Any]]:
    """A server of one method, and what calls it."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    calls = attach(server, METHOD, answer, workers=workers, waiting=waiting)
    assert calls is not None
    server.start()
    calls.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield calls, getattr(channel, kind)(METHOD)
    server.stop(0).wait()
    deadline = time.monotonic() + 10
    while calls.pending and time.monotonic() < deadline:
        time.sleep(0.01)
    assert calls.pending == 0
    calls.close()


def test_calls_are_answered_and_forgotten() -> None:
    with echo(lambda data, call: data[::-1]) as (calls, call):
        assert {call(bytes([number, 7])) for number in range(50)} == {bytes([7, number]) for number in range(50)}
        deadline = time.monotonic() + 10
        while calls.pending and time.monotonic() < deadline:
            time.sleep(0.01)
        assert calls.pending == 0


@pytest.mark.parametrize("polite", [True, False])
def test_a_slow_answer_keeps_no_other_waiting(polite: bool) -> None:
    """Whether it steps aside, or the watch has to see to that."""
    release = threading.Event()

    def answer(data: bytes, call: DirectCall) -> bytes:
        if data == b"slow":
            if polite:
                call.step_aside()
            assert release.wait(30)
        return data

    with echo(answer) as (_, call):
        slow = [call.future(b"slow") for _ in range(2)]
        assert call(b"quick", timeout=20) == b"quick"
        assert not any(future.done() for future in slow)
        release.set()
        assert [future.result(timeout=20) for future in slow] == [b"slow", b"slow"]
        assert call(b"quick", timeout=20) == b"quick"


def test_limits_of_workers_and_waiting() -> None:
    release, begun = threading.Event(), threading.Semaphore(0)

    def answer(data: bytes, call: DirectCall) -> bytes:
        call.step_aside()
        begun.release()
        assert release.wait(30)
        return data

    with echo(answer, workers=2, waiting=1) as (calls, call):
        held = [call.future(b"%d" % number) for number in range(2)]
        for _ in held:
            assert begun.acquire(timeout=20)
        cut = call.future(b"cut")
        while calls.pending < 3:
            time.sleep(0.01)
        with pytest.raises(grpc.RpcError) as caught:
            call(b"too many", timeout=20)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        cut.cancel()  # who waits no longer makes room
        while calls.pending > 2:
            time.sleep(0.01)
        late = call.future(b"late")
        while calls.pending < 3:
            time.sleep(0.01)
        assert not begun.acquire(timeout=0.1)  # no more than two are worked on
        release.set()
        assert [future.result(timeout=20) for future in (*held, late)] == [b"0", b"1", b"late"]


def test_statuses_and_callbacks() -> None:
    ended = threading.Semaphore(0)

    def answer(data: bytes, call: DirectCall) -> bytes:
        assert call.add_callback(ended.release)
        if data == b"refuse":
            call.abort(grpc.StatusCode.NOT_FOUND, "nö")
        if data == b"break":
            raise ValueError("a secret")
        return data

    with echo(answer) as (_, call):
        for data, code, details in (
            (b"refuse", grpc.StatusCode.NOT_FOUND, "nö"),
            (b"break", grpc.StatusCode.INTERNAL, "internal error, the server's log has the details"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(data, timeout=20)
            error: Any = caught.value
            assert (error.code(), error.details()) == (code, details)
        assert call(b"fine", timeout=20) == b"fine"
        for _ in range(3):
            assert ended.acquire(timeout=20)


@pytest.mark.parametrize("aside", [True, False])
def test_a_client_that_goes_away(aside: bool) -> None:
    """A call that has stepped aside is told at once; a quick one is answered in vain. Both are forgotten."""
    begun, gone, noticed = threading.Event(), threading.Event(), threading.Event()

    def answer(data: bytes, call: DirectCall) -> bytes:
        if data == b"cut":
            if aside:
                call.step_aside()
                assert call.add_callback(noticed.set)
            begun.set()
            assert gone.wait(30)
            assert not aside or noticed.wait(20)
            assert call.is_active() is not aside
        return data

    with echo(answer) as (calls, call):
        cut = call.future(b"cut")
        assert begun.wait(20)
        cut.cancel()
        gone.set()
        assert call(b"next", timeout=20) == b"next"
        deadline = time.monotonic() + 10
        while calls.pending and time.monotonic() < deadline:
            time.sleep(0.01)
        assert calls.pending == 0


def test_a_call_without_a_message_is_refused() -> None:
    with echo(lambda data, call: data, kind="stream_unary") as (_, call):
        with pytest.raises(grpc.RpcError) as caught:
            call(iter(()), timeout=20)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


def test_without_the_parts_of_grpcio_there_is_no_direct_way(tmp_path: Path) -> None:
    other: Any = SimpleNamespace(_cy_server=SimpleNamespace(register_method=None))
    assert attach(other, METHOD, lambda data, call: data, workers=1, waiting=1) is None
    save_double(tmp_path / "models" / "double" / "1" / "model.onnx")
    with running(tmp_path / "models", plain_loader(tmp_path / "cache"), direct=False) as (_, stub):
        x = np.arange(4, dtype=np.float32)
        request = pb.ModelInferRequest(model_name="double", raw_input_contents=[x.tobytes()])
        request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
        assert np.frombuffer(stub.ModelInfer(request).raw_output_contents[0], dtype=np.float32).tolist() == [0, 2, 4, 6]


def test_a_model_that_was_quick_and_is_slow_keeps_no_other_waiting(tmp_path: Path) -> None:
    save_double(tmp_path / "models" / "double" / "1" / "model.onnx")
    save_slow(tmp_path / "models" / "slow" / "1" / "model.onnx")

    def steps(count: int) -> pb.ModelInferRequest:
        raw = [np.ones(1, dtype=np.float32).tobytes(), np.array(count, dtype=np.int64).tobytes()]
        request = pb.ModelInferRequest(model_name="slow", raw_input_contents=raw)
        request.inputs.add(name="x", datatype="FP32", shape=[1])
        request.inputs.add(name="steps", datatype="INT64", shape=[])
        return request

    other = pb.ModelInferRequest(model_name="double", raw_input_contents=[bytes(16)])
    other.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    with running(tmp_path / "models", plain_loader(tmp_path / "cache")) as (_, stub):
        for _ in range(20):
            stub.ModelInfer(steps(0))
        slow = stub.ModelInfer.future(steps(3000))
        time.sleep(0.05)
        stub.ModelInfer(other, timeout=20)
        assert not slow.done()
        slow.cancel()


def test_bytes_are_read_as_protobuf_reads_them() -> None:
    chance = random.Random(5)
    request = pb.ModelInferRequest(
        model_name="m", model_version="1", id="é", raw_input_contents=[b"abc", b"", bytes(300)]
    )
    request.inputs.add(name="x", datatype="FP32", shape=[1, -1, 2**40])
    request.parameters["priority"].int64_param = 3
    seeds = [request.SerializeToString()]
    request.id = ""
    seeds.append(request.SerializeToString() + b"\x1a\x01i")  # the id behind the raw contents
    seeds.append(request.SerializeToString() + b"\x0a\x02mm\x1a\x01a\x1a\x01b\xfa\x01\x02ok\x80\x02\x05")
    del request.raw_input_contents[:]
    seeds.append(request.SerializeToString())
    short = 0
    for _ in range(4000):
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.randrange(3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        data = bytes(data[: chance.choice((len(data), chance.randrange(len(data))))])
        try:
            expected = pb.ModelInferRequest.FromString(data)
        except DecodeError:
            with pytest.raises(InvalidRequestError, match=f"the {len(data)} bytes are no ModelInferRequest"):
                read_request(data).message()
            continue
        found = read_request(data)
        short += found.header is not None
        assert (found.model_name, found.model_version, found.id) == (
            expected.model_name,
            expected.model_version,
            expected.id,
        )
        assert [bytes(content) for content in found.raw] == list(expected.raw_input_contents)
        if found.header is not None:
            expected.id = ""
            del expected.raw_input_contents[:]
        assert found.message() == expected
    assert short > 500


def test_answers_are_what_protobuf_writes() -> None:
    head = pb.ModelInferResponse(model_name="m", model_version="3")
    head.outputs.add(name="y", datatype="FP32", shape=[2])
    for raw in ([], [b""], [bytes(127), bytes(128)], [bytes(70_000)]):
        for identifier in ("", "é" * 100):
            expected = pb.ModelInferResponse(id=identifier, raw_output_contents=raw)
            expected.MergeFrom(head)
            found = pb.ModelInferResponse.FromString(answer_bytes(head.SerializeToString(), identifier, raw))
            assert found == expected
