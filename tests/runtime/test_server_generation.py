"""Streams of tokens over the wire, asked by Triton's client and by raw messages."""

import http.client
import json
import queue
import re
import shutil
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from generating_models import answer_alone, open_session
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from playwright.sync_api import expect, sync_playwright
from served_models import ServerProcess, plain_loader, running, save_double
from token_streams import CONFIG, MODEL, Stream, request_for, save_repository, token_of, wait_until

from models import decoder
from proto import open_inference_pb2 as pb
from proto.open_inference_pb2_grpc import GRPCInferenceServiceStub
from runtime.cli import main
from runtime.client import Client, ClientError
from runtime.server.generation.sampling import Sampling
from runtime.server.operations.traces import OtlpTracer
from runtime.server.serve import RunningServer


@pytest.fixture(scope="module")
def session() -> Any:
    return open_session(MODEL)


@pytest.fixture(scope="module")
def eos(session: Any) -> int:
    """A token that no answer here has unless a test asks for it."""
    answers = {token for prompt in ([1, 2, 3], [4], [5, 6]) for token in answer_alone(session, prompt, 60)}
    return next(token for token in range(100) if token not in answers)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, eos: int) -> Path:
    return save_repository(tmp_path_factory.mktemp("repository"), eos=eos)


@pytest.fixture(scope="module")
def served(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[RunningServer, Any]]:
    loader = plain_loader(tmp_path_factory.mktemp("cache"))
    with running(root, loader, status_port=0) as both:
        yield both


@pytest.fixture
def server(served: tuple[RunningServer, Any]) -> RunningServer:
    return served[0]


@pytest.fixture
def stub(served: tuple[RunningServer, Any]) -> Any:
    return served[1]


@pytest.fixture
def stream(stub: Any) -> Iterator[Stream]:
    opened = Stream(stub)
    yield opened
    opened.call.cancel()
    opened.end()


def engine_of(server: RunningServer) -> Any:
    return server.repository.find("llama", "").engine


def test_triton_client_streams_tokens_of_many_requests(server: RunningServer, session: Any) -> None:
    """On one stream, answers of different requests come mixed; each is whole, marked at its end, and right."""
    events: queue.Queue[Any] = queue.Queue()
    client = triton.InferenceServerClient(f"127.0.0.1:{server.port}")
    client.start_stream(callback=lambda result, error: events.put((result, error)))
    prompts = {f"r{n}": [1 + n, 2, 3 + n] * (n + 1) for n in range(5)}
    for name, prompt in prompts.items():
        tensor = triton.InferInput("input_ids", [1, len(prompt)], "INT64")
        tensor.set_data_from_numpy(np.array([prompt]))
        sampled = {"temperature": "0.7", "top_p": "0.9", "top_k": 30, "seed": 5} if name == "r1" else {}
        client.async_stream_infer(
            "llama",
            [tensor],
            request_id=name,
            enable_empty_final_response=True,
            parameters={"max_tokens": 12, "ignore_eos": True, **sampled},
        )
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    reasons: dict[str, str] = {}
    while len(reasons) < len(prompts):
        result, error = events.get(timeout=20)
        assert error is None
        response: Any = result.get_response()
        assert response.id not in reasons
        tokens[response.id].append(int(result.as_numpy("token_ids")[0, 0]))
        if response.parameters["triton_final_response"].bool_param:
            reasons[response.id] = response.parameters["finish_reason"].string_param
    client.stop_stream()
    described: Any = client.get_model_config("llama", as_json=True)
    client.close()
    for name, prompt in prompts.items():
        sampling = Sampling(0.7, 30, 0.9, 5) if name == "r1" else Sampling()
        assert tokens[name] == answer_alone(session, prompt, 12, sampling)
    assert set(reasons.values()) == {"length"}
    assert described["config"]["model_transaction_policy"] == {"decoupled": True}


def test_a_sequence_continues_from_its_cache(stub: Any, server: RunningServer, stream: Stream, session: Any) -> None:
    """Turns of two sequences, with ids of both kinds, have the answers of their whole contexts."""
    context: dict[Any, list[int]] = {7: [], "chat": []}
    before = engine_of(server).counters.totals().prompt_tokens
    for turn in range(3):
        for name, said in context.items():
            prompt = [turn + 1, 2]
            last = turn == 2
            found = stream.ask(
                prompt, sequence_id=name, sequence_start=turn == 0, sequence_end=last, max_tokens=4, ignore_eos=True
            )
            assert found == answer_alone(session, [*said, *prompt], 4)
            said += [*prompt, *found]
    read = engine_of(server).counters.totals().prompt_tokens - before
    assert read == 2 * (2 + 3 + 3)  # what is new, and the last token of the answer before
    wait_until(lambda: engine_of(server).reserved_bytes == 0)
    gone = stream.ask([1], sequence_id=7)
    assert "sequence '7' is not known" in gone


def test_sequences_belong_to_their_stream_and_end_when_idle(stub: Any, server: RunningServer, stream: Stream) -> None:
    assert len(stream.ask([1], sequence_id=1, sequence_start=True)) == 5
    assert engine_of(server).kept == 1
    other = Stream(stub)
    assert "[INVALID_ARGUMENT] sequence '1' is not known" in other.ask([1], sequence_id=1)
    other.end()
    wait_until(lambda: engine_of(server).kept == 0)
    assert engine_of(server).reserved_bytes == 0
    assert "is not known" in stream.ask([1], sequence_id=1)
    assert len(stream.ask([1], sequence_id=1, sequence_start=True)) == 5
    assert len(stream.ask([1], sequence_id=1, sequence_start=True)) == 5  # starts anew
    assert engine_of(server).kept == 1
    stream.end()
    list(stream.call)
    wait_until(lambda: engine_of(server).kept == 0)


def test_an_id_in_flight_cannot_be_used_again(stream: Stream) -> None:
    stream.send(request_for([1], sequence_id=3, sequence_start=True, max_tokens=150, id="a", ignore_eos=True))
    next(stream.call)
    for start in (False, True):
        stream.send(request_for([1], sequence_id=3, sequence_start=start, id="b"))
    errors, tokens = [], 1
    for message in stream.call:
        if message.error_message:
            assert message.infer_response.id == "b"
            errors.append(message.error_message)
        else:
            tokens += 1
            if message.infer_response.parameters["triton_final_response"].bool_param:
                break
    assert tokens == 150
    assert len(errors) == 2
    assert all("is being answered" in error for error in errors)


def test_outputs_stop_tokens_and_typed_contents(stream: Stream, session: Any, eos: int) -> None:
    whole = answer_alone(session, [1, 2, 3], 20)
    stop = whole[6]
    expected = whole[: whole.index(stop) + 1]
    assert stream.ask([1, 2, 3], max_tokens=20, stop_token_ids=f"{eos}, {stop}") == expected
    assert stream.ask([1, 2, 3], max_tokens=20, stop_token_ids=stop) == expected
    request = request_for([1, 2, 3], max_tokens=20)
    request.inputs.add(name="stop_token_ids", datatype="INT64", shape=[2])
    request.raw_input_contents.append(np.array([stop, eos]).tobytes())
    for name in ("logits", "token_ids"):
        request.outputs.add(name=name)
    stream.send(request)
    found = stream.answer()
    assert found[-1].parameters["finish_reason"].string_param == "stop"
    assert [token_of(one) for one in found] == expected
    for one, token in zip(found, expected, strict=True):
        assert (one.outputs[1].name, list(one.outputs[1].shape)) == ("logits", [1, 100])
        assert np.frombuffer(one.raw_output_contents[1], dtype=np.float32).argmax() == token
    typed = pb.ModelInferRequest(model_name="llama")
    entry = typed.inputs.add(name="input_ids", datatype="INT64", shape=[1, 3])
    entry.contents.int64_contents.extend([1, 2, 3])
    stream.send(typed)
    assert [one.outputs[0].contents.int64_contents[0] for one in stream.answer()] == whole[:5]


def test_end_tokens_of_the_settings(root: Path, tmp_path: Path, session: Any) -> None:
    whole = answer_alone(session, [1, 2, 3], 20)
    decoder.build(tmp_path / "models" / "llama" / "1" / "model.onnx")
    (tmp_path / "models" / "llama" / "tilefuse.toml").write_text(CONFIG % whole[4])
    with running(tmp_path / "models", plain_loader(tmp_path / "cache")) as (_, stub):
        stream = Stream(stub)
        assert stream.ask([1, 2, 3], max_tokens=20) == whole[: whole.index(whole[4]) + 1]
        assert stream.ask([1, 2, 3], max_tokens=20, ignore_eos=True) == whole
        stream.end()


def test_the_seed_that_was_drawn_is_told_and_repeats_the_answer(stream: Stream) -> None:
    stream.send(request_for([1, 2], temperature=1.5, max_tokens=20, ignore_eos=True))
    found = stream.answer()
    seed = found[-1].parameters["seed"].uint64_param
    again = stream.ask([1, 2], temperature=1.5, max_tokens=20, seed=seed, ignore_eos=True)
    assert again == [token_of(one) for one in found]
    assert again != stream.ask([1, 2], temperature=1.5, max_tokens=20, seed=seed + 1, ignore_eos=True)


def test_other_models_are_answered_on_the_same_stream(stream: Stream) -> None:
    stream.send(request_for([1], max_tokens=150, ignore_eos=True))
    next(stream.call)
    double = pb.ModelInferRequest(
        model_name="double", id="plain", raw_input_contents=[np.ones(4, np.float32).tobytes()]
    )
    double.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    stream.send(double)
    stream.send(pb.ModelInferRequest(model_name="nobody", id="nobody"))
    found: dict[str, Any] = {}
    while found.keys() != {"plain", "nobody"}:
        message = next(stream.call)
        if message.infer_response.id:
            found[message.infer_response.id] = message
    assert np.frombuffer(found["plain"].infer_response.raw_output_contents[0], np.float32).tolist() == [2] * 4
    assert "[NOT_FOUND]" in found["nobody"].error_message


def test_model_infer_runs_the_model_as_it_is(stub: Any) -> None:
    request = pb.ModelInferRequest(model_name="llama")
    feeds = {"input_ids": np.array([[1, 2]]), "attention_mask": np.ones((1, 2), np.int64)}
    feeds |= {"position_ids": np.array([[0, 1]])}
    for name, array in feeds.items():
        request.inputs.add(name=name, datatype="INT64", shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    for layer in range(2):
        for part in ("key", "value"):
            request.inputs.add(name=f"past_key_values.{layer}.{part}", datatype="FP32", shape=[1, 2, 0, 8])
            request.raw_input_contents.append(b"")
    request.outputs.add(name="logits")
    assert list(stub.ModelInfer(request).outputs[0].shape) == [1, 2, 100]


def test_model_infer_says_where_sequences_are_kept(stub: Any) -> None:
    request = pb.ModelInferRequest(model_name="llama")
    request.parameters["sequence_id"].int64_param = 5
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request)
    failed: Any = caught.value
    assert failed.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "sequences are those of ModelStreamInfer" in failed.details()


def test_who_cannot_even_wait_is_told(stub: Any, server: RunningServer) -> None:
    streams = [Stream(stub) for _ in range(3)]
    for stream in streams:
        for _ in range(30):
            stream.send(request_for([1], max_tokens=50, ignore_eos=True))
    refused = answered = 0
    for stream in streams:
        stream.end()
        for message in stream.call:
            if message.error_message:
                assert "[RESOURCE_EXHAUSTED] 64 streams wait already" in message.error_message
                refused += 1
            else:
                answered += message.infer_response.parameters["triton_final_response"].bool_param
    assert refused + answered == 90
    assert answered >= 64
    wait_until(lambda: engine_of(server).reserved_bytes == 0)


@pytest.mark.parametrize("how", ["cancel", "deadline", "connection"])
def test_a_call_that_ends_frees_its_caches_at_once(
    server: RunningServer, stub: Any, session: Any, how: str, stream: Stream
) -> None:
    """One answer, one kept sequence and some that wait are gone; a neighbour's answer is whole."""
    engine = engine_of(server)
    stream.send(request_for([1, 2, 3], max_tokens=150, ignore_eos=True))
    next(stream.call)
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        victim = Stream(GRPCInferenceServiceStub(channel), **({"timeout": 0.3} if how == "deadline" else {}))
        assert len(victim.ask([1], sequence_id=1, sequence_start=True, max_tokens=2)) == 2
        for _ in range(30):
            victim.send(request_for([1], max_tokens=190, ignore_eos=True))
        next(victim.call)
        assert engine.active > 1
        if how == "cancel":
            victim.call.cancel()
        if how != "connection":
            with pytest.raises(grpc.RpcError):
                list(victim.call)
    victim.end()
    wait_until(lambda: engine.active <= 1 and not engine.waiting and not engine.kept, 2)
    wait_until(lambda: engine.reserved_bytes in (0, 153 * 256), 2)
    assert len(stream.answer()) == 149


def get(server: RunningServer, path: str) -> str:
    assert server.status is not None
    connection = http.client.HTTPConnection("127.0.0.1", server.status.port, timeout=10)
    connection.request("GET", path)
    return connection.getresponse().read().decode()


def test_metrics_status_and_statistics_tell_of_tokens(server: RunningServer, stub: Any, stream: Stream) -> None:
    def metric(name: str, suffix: str = "") -> float:
        found = re.search(rf'^{name}{{[^}}]*model="llama"[^}}]*}} (\S+)$', get(server, "/metrics"), re.MULTILINE)
        assert found, name
        return float(found[1])

    before = {name: metric(f"tilefuse_generation_{name}_total") for name in ("tokens", "prompt_tokens", "steps")}
    counted = stub.ModelStatistics(pb.ModelStatisticsRequest(name="llama")).model_stats[0].inference_stats.success.count
    first = metric("tilefuse_time_to_first_token_seconds_count")
    stream.ask([1, 2, 3], max_tokens=4, ignore_eos=True)
    assert metric("tilefuse_generation_tokens_total") == before["tokens"] + 4
    assert metric("tilefuse_generation_prompt_tokens_total") == before["prompt_tokens"] + 3
    assert metric("tilefuse_generation_steps_total") == before["steps"] + 3
    assert metric("tilefuse_time_to_first_token_seconds_count") == first + 1
    assert metric("tilefuse_time_per_token_seconds_count") >= 3
    after = stub.ModelStatistics(pb.ModelStatisticsRequest(name="llama")).model_stats[0]
    assert after.inference_stats.success.count == counted + 1
    stream.send(request_for([1], sequence_id=1, sequence_start=True, max_tokens=3))
    stream.answer()
    row = next(model for model in json.loads(get(server, "/status.json"))["models"] if model["name"] == "llama")
    assert row["generation"]["kept"] == 1
    assert row["generation"]["cache_bytes"] == metric("tilefuse_generation_cache_bytes") == 4 * 256
    assert row["generation"]["cache_limit"] == 2**20
    assert row["generation"]["tokens"] >= before["tokens"] + 7
    assert metric("tilefuse_generation_kept_sequences") == 1
    double = next(model for model in json.loads(get(server, "/status.json"))["models"] if model["name"] == "double")
    assert "generation" not in double


@pytest.mark.browser
def test_the_status_page_tells_of_tokens(root: Path, tmp_path: Path, chromium: str) -> None:
    with running(root, plain_loader(tmp_path / "cache"), status_port=0) as (server, stub), sync_playwright() as play:
        stream = Stream(stub)
        stream.ask([1, 2, 3], max_tokens=4, ignore_eos=True, sequence_id=1, sequence_start=True)
        assert server.status is not None
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("pageerror", lambda error: pytest.fail(f"the page's script failed: {error}"))
        page.goto(f"http://127.0.0.1:{server.status.port}/")
        rows = page.locator("#models tr")
        expect(rows.nth(1)).to_contain_text(re.compile(r"4 tokens generated · 0 streams, \d kept sequences"))
        expect(rows.nth(1)).to_contain_text(re.compile(r"of 1 MiB · 1\.0 streams per step · first token \d+\.\d ms"))
        expect(rows.nth(0)).not_to_contain_text("tokens")
        stream.ask([1], max_tokens=3, ignore_eos=True)
        expect(rows.nth(1)).to_contain_text("7 tokens generated")
        browser.close()
        stream.end()


def test_spans_and_log_tell_of_each_request(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tilefuse.calls")
    exporter = InMemorySpanExporter()
    monkeypatch.setattr("runtime.server.serve.make_tracer", lambda endpoint: OtlpTracer(exporter))
    with running(root, plain_loader(tmp_path / "cache"), trace_endpoint="memory", log_calls=True) as (_, stub):
        stream = Stream(stub)
        stream.ask([1, 2, 3], max_tokens=4, ignore_eos=True)
        stream.end()
        list(stream.call)
    (line,) = [record.getMessage() for record in caplog.records if "method=generate " in record.getMessage()]
    assert re.search(
        r"status=OK ms=\S+ model=llama prompt_tokens=3 tokens=4 finish_reason=length first_token_ms=", line
    )
    spans = {span.name: span for span in exporter.get_finished_spans()}
    span, call = spans["generate"], spans["inference.GRPCInferenceService/ModelStreamInfer"]
    assert span.parent is not None
    assert call.context is not None
    assert span.parent.span_id == call.context.span_id
    assert span.attributes is not None
    assert span.attributes["tilefuse.model"] == "llama"
    assert span.attributes["tilefuse.tokens"] == 4
    assert span.attributes["tilefuse.prompt_tokens"] == 3
    assert span.attributes["tilefuse.finish_reason"] == "length"
    assert span.attributes["rpc.grpc.status_code"] == 0


def test_unloading_waits_for_answers_and_ends_sequences(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "models")
    options = {"control_mode": "explicit", "load_models": ("llama",)}
    with running(tmp_path / "models", plain_loader(tmp_path / "cache"), **options) as (_, stub):
        kept = Stream(stub)
        assert len(kept.ask([1], sequence_id=1, sequence_start=True)) == 5
        busy = Stream(stub)
        busy.send(request_for([1], max_tokens=190, ignore_eos=True))
        next(busy.call)
        stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="llama"), timeout=10)
        assert len(busy.answer()) == 189
        assert "[NOT_FOUND]" in kept.ask([1], sequence_id=1)
        stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="llama"))
        assert "is not known" in kept.ask([1], sequence_id=1)
        assert len(kept.ask([1], sequence_id=1, sequence_start=True)) == 5
        decoder.build(tmp_path / "models" / "llama" / "1" / "model.onnx", seed=1)
        stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="llama"))
        assert "is not known" in kept.ask([1], sequence_id=1)
        kept.end()
        busy.end()


def test_sigterm_answers_what_was_accepted_and_cuts_what_is_idle(root: Path, tmp_path: Path) -> None:
    process = ServerProcess(root, tmp_path / "cache").wait_ready()
    with grpc.insecure_channel(process.url) as channel:
        stub = GRPCInferenceServiceStub(channel)
        idle = Stream(stub)
        assert len(idle.ask([1], sequence_id=1, sequence_start=True)) == 5
        busy = Stream(stub)
        busy.send(request_for([1], max_tokens=190, ignore_eos=True))
        next(busy.call)
        stopping = threading.Thread(target=process.stop)
        stopping.start()
        assert len(busy.answer()) == 189
        with pytest.raises(grpc.RpcError):
            list(idle.call)
        stopping.join()
        assert process.process.returncode == 0, process.log
        idle.end()
        busy.end()


def test_our_client_generates(server: RunningServer, session: Any) -> None:
    with Client(f"127.0.0.1:{server.port}") as client:
        tokens = client.generate("llama", [1, 2, 3], max_tokens=8, ignore_eos=True)
        assert next(tokens) == answer_alone(session, [1, 2, 3], 1)[0]
        assert [*tokens] == answer_alone(session, [1, 2, 3], 8)[1:]
        sampled = client.generate("llama", [4], max_tokens=9, temperature=0.9, top_p=0.9, seed=3, ignore_eos=True)
        assert [*sampled] == answer_alone(session, [4], 9, Sampling(0.9, 0, 0.9, 3))
        with pytest.raises(ClientError, match=r"INVALID_ARGUMENT.*token 1000 is none"):
            list(client.generate("llama", [1000]))
        with pytest.raises(ClientError, match="unknown input 'input_ids'"):
            list(client.generate("double", [1]))
    engine = engine_of(server)
    with Client(f"127.0.0.1:{server.port}") as client:
        answer = client.generate("llama", [1], max_tokens=190, ignore_eos=True)
        next(answer)
        answer.close()
        wait_until(lambda: not engine.active)


def test_settings_that_do_not_fit_are_told(tmp_path: Path) -> None:
    save_double(tmp_path / "double" / "1" / "model.onnx")
    toml = tmp_path / "double" / "tilefuse.toml"
    for text, reason in (
        ("[generation]\nstreams = 4", "tilefuse.toml has \\[generation\\], but the model cannot generate: it has no"),
        ("[generation]\nstreams = 0", "generation.streams is 0, but it must be 1 or more"),
        ("[generation]\nstream = 4", "unknown key 'generation.stream'"),
        ("[generation]\ncontext = '9'", "generation.context is '9', but it must be of type int"),
        ("[generation]\neos_token_ids = [-1]", "it must be a list of tokens"),
    ):
        toml.write_text("optimize = false\n" + text)
        with pytest.raises(Exception, match=reason), running(tmp_path, plain_loader(tmp_path / "cache")):
            pass
    decoder.build(tmp_path / "llama" / "1" / "model.onnx")
    (tmp_path / "llama" / "tilefuse.toml").write_text("optimize = false\n[generation]\nenabled = false")
    toml.write_text("optimize = false\n")
    with running(tmp_path, plain_loader(tmp_path / "cache")) as (server, _):
        assert server.repository.find("llama", "").engine is None


def test_the_command_prints_tokens(server: RunningServer, session: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["generate", f"127.0.0.1:{server.port}", *arguments])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    expected = answer_alone(session, [1, 2, 3], 6)
    status, out, _ = run("llama", "1,2,3", "--max-tokens", "6", "--ignore-eos")
    assert (status, out.split()) == (0, [str(token) for token in expected])
    stop = expected[2]
    status, out, _ = run("llama", "1 2 3", "--stop", str(stop), "--max-tokens", "6", "--json")
    assert json.loads(out)["tokens"] == expected[: expected.index(stop) + 1]
    sampled = answer_alone(session, [1], 5, Sampling(0.5, 7, 0.9, 3))
    options = ("--temperature", "0.5", "--top-k", "7", "--top-p", "0.9", "--seed", "3", "--max-tokens", "5")
    assert run("llama", "1", *options, "--ignore-eos")[1].split() == [str(token) for token in sampled]
    status, _, errors = run("llama", "1000")
    assert status == 1
    assert errors.startswith("error: [INVALID_ARGUMENT] token 1000 is none of the model's")
    status, _, errors = run("llama", "hello")
    assert status == 2
    assert "is no list of tokens such as 1,2,3" in errors
