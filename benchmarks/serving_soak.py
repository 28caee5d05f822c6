"""Runs the server under changing traffic for minutes; says whether memory stayed flat and all answers were right.

    python -m benchmarks.serving_soak [--seconds 600] [--processes N] [--quick] [--json FILE]

Clients send batches of varying shapes to a batched, padded model and to a plain one, and stream tokens from a decoder,
several answers at a time and in turns of one sequence. Some cancel, some processes are killed while they wait, and the
models are loaded again and again: on request, or with several server processes as their files change. The exit status
is 1 if an answer was wrong, a request was lost, or the memory of all server processes grew by more than 5 % after the
first fifth.
"""

import argparse
import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from models import decoder
from proto import open_inference_pb2 as pb
from proto.open_inference_pb2_grpc import GRPCInferenceServiceStub

GROWTH = 1.05
DEADLINE = 300
"""Seconds until a request counts as lost; on a busy machine, processes stand still for long."""
CONFIG = "max_batch_size: 16 dynamic_batching { preferred_batch_size: [ 8 ] }"
PADDING = "optimize = false\n[padding]\ndim = 'length'\nbuckets = [16, 64, 256]\nmask = 'mask'\n"
DECODER = "optimize = false\n[generation]\nstreams = 8\ncontext = 128\ncache_mib = 4\n"
LONGEST = 24
"""Tokens of the longest answer."""
OVER = ("the sequence is over", "sequence '1' is not known")
"""What a turn is told if the model was loaded anew since the one before."""
MODELS = ("padded", "plain", "decoder")
EXPECTED = {grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}  # only for calls that are cut on purpose


@dataclass
class Tally:
    """What the clients saw; safe enough, as each field is only added to under the lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    answered: int = 0
    tokens: int = 0
    cut: int = 0
    reloads: int = 0
    killed: int = 0
    faults: list[str] = field(default_factory=list[str])

    def add(self, name: str, more: int = 1) -> None:
        """Count one more, or several."""
        with self.lock:
            setattr(self, name, getattr(self, name) + more)

    def fault(self, text: str) -> None:
        """Note what must not happen."""
        with self.lock:
            self.faults.append(text)


def save_model(path: Path) -> None:
    """y = ids + ids, of [batch, length], with a mask that it does not read but as a factor of 1."""
    value = helper.make_tensor_value_info
    shape = ["batch", "length"]
    nodes = [
        helper.make_node("Add", ["ids", "ids"], ["twice"]),
        helper.make_node("Mul", ["twice", "mask"], ["y"]),
    ]
    inputs = [value(name, TensorProto.INT64, shape) for name in ("ids", "mask")]
    graph = helper.make_graph(nodes, "graph", inputs, [value("y", TensorProto.INT64, shape)])
    path.parent.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9), path)


def request_for(model: str, ids: np.ndarray[Any, Any]) -> pb.ModelInferRequest:
    """Ask `model` for twice the ids."""
    request = pb.ModelInferRequest(model_name=model)
    for name, array in (("ids", ids), ("mask", np.ones_like(ids))):
        request.inputs.add(name=name, datatype="INT64", shape=ids.shape)
        request.raw_input_contents.append(array.tobytes())
    return request


def keep_asking(url: str, seed: int, tally: Tally, stop: threading.Event) -> None:
    """Send requests of random shapes, cancel some, and check every answer."""
    chance = np.random.default_rng(seed)
    with grpc.insecure_channel(url, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        while not stop.is_set():
            ids = chance.integers(0, 2**40, (int(chance.integers(1, 9)), int(chance.integers(1, 257))))
            request = request_for(("padded", "plain")[int(chance.integers(2))], ids)
            call = stub.ModelInfer.future(request, timeout=DEADLINE)
            cut = chance.random() < 0.03
            if cut:
                time.sleep(float(chance.random()) * 0.002)
                call.cancel()
            try:
                answer = call.result()
            except grpc.FutureCancelledError:
                tally.add("cut")
                continue
            except grpc.RpcError as error:
                failed: Any = error
                if not (cut and failed.code() in EXPECTED):
                    tally.fault(f"{failed.code().name}: {failed.details()}")
                continue
            if not np.array_equal(np.frombuffer(answer.raw_output_contents[0], dtype=np.int64), ids.ravel() * 2):
                tally.fault(f"a wrong answer to ids of {ids.shape}")
            tally.add("answered")


@dataclass(frozen=True)
class Answer:
    """A prompt and the tokens that the decoder answers it with."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


def known_answers(path: Path, count: int = 24) -> list[Answer]:
    """What the decoder in `path` answers by itself, always from the whole context; no token is nearly another one."""
    session, chance = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]), random.Random(0)
    found: list[Answer] = []
    while len(found) < count:
        context = [chance.randrange(100) for _ in range(chance.randint(1, 30))]
        prompt = tuple(context)
        for _ in range(LONGEST):
            feeds: dict[str, Any] = {
                one.name: np.zeros(
                    [one.shape[0] if isinstance(one.shape[0], int) else 1, one.shape[1], 0, one.shape[3]]
                )
                for one in session.get_inputs()
                if one.name.startswith("past")
            }
            feeds = {name: array.astype(np.float32) for name, array in feeds.items()}
            feeds |= {"input_ids": np.array([context]), "attention_mask": np.ones((1, len(context)), np.int64)}
            feeds["position_ids"] = np.arange(len(context))[None]
            logits = np.asarray(session.run(["logits"], feeds)[0])[0, -1]
            second, first = np.sort(logits)[-2:]
            if first - second < 1e-3:
                break
            context.append(int(np.argmax(logits)))
        else:
            found.append(Answer(prompt, tuple(context[len(prompt) :])))
    return found


def tokens_request(prompt: Sequence[int], most: int, identifier: int, turn: tuple[bool, bool] | None = None) -> Any:
    """Ask for tokens; `turn`: as the first, and as the last, of a sequence."""
    request = pb.ModelInferRequest(model_name="decoder", id=str(identifier))
    request.inputs.add(name="input_ids", datatype="INT64", shape=[1, len(prompt)])
    request.raw_input_contents.append(np.array(prompt, np.int64).tobytes())
    request.parameters["max_tokens"].int64_param = most
    if turn is not None:
        request.parameters["sequence_id"].int64_param = 1
        request.parameters["sequence_start"].bool_param, request.parameters["sequence_end"].bool_param = turn
    return request


def keep_generating(url: str, seed: int, answers: Sequence[Answer], tally: Tally, stop: threading.Event) -> None:
    """Open one stream after the other: several answers at a time, or one in two turns; cut some short."""
    chance = random.Random(seed)
    with grpc.insecure_channel(url, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        while not stop.is_set():
            asked = chance.sample(answers, chance.randint(1, 4))
            most = [chance.randint(2, LONGEST) for _ in asked]
            try:
                if chance.random() < 0.3:
                    _take_turns(stub, asked[0], most[0], tally)
                else:
                    _ask_together(stub, asked, most, tally, cut=chance.random() < 0.1)
            except grpc.RpcError as error:
                failed: Any = error
                tally.fault(f"stream: {failed.code().name}: {failed.details()}")


def _ask_together(stub: Any, asked: Sequence[Answer], most: Sequence[int], tally: Tally, *, cut: bool) -> None:
    requests = [tokens_request(one.prompt, count, at) for at, (one, count) in enumerate(zip(asked, most, strict=True))]
    call = stub.ModelStreamInfer(iter(requests), timeout=DEADLINE)
    found: list[list[int]] = [[] for _ in asked]
    for message in call:
        if message.error_message:
            tally.fault(message.error_message)
            return
        answer = message.infer_response
        found[int(answer.id)].append(int(np.frombuffer(answer.raw_output_contents[0], np.int64)[0]))
        if cut and sum(map(len, found)) > 3:
            call.cancel()
            tally.add("cut")
            return
    for tokens, one, count in zip(found, asked, most, strict=True):
        if tokens != list(one.tokens[:count]):
            tally.fault(f"tokens {tokens} where {one.tokens[:count]} were right")
        tally.add("answered")
        tally.add("tokens", len(tokens))


def _take_turns(stub: Any, one: Answer, most: int, tally: Tally) -> None:
    """Half of the answer in the first turn, the rest in the second, which adds nothing to the context."""
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    call = stub.ModelStreamInfer(iter(requests.get, None), timeout=DEADLINE)
    found: list[int] = []
    half = most // 2
    turns = ((one.prompt, half, (True, False)), ((), most - half, (False, True)))
    for at, (prompt, count, turn) in enumerate(turns):
        requests.put(tokens_request(prompt, count, at, turn))
        for message in call:
            if message.error_message:
                if at == 0 or not any(text in message.error_message for text in OVER):
                    tally.fault(message.error_message)
                requests.put(None)
                return
            found.append(int(np.frombuffer(message.infer_response.raw_output_contents[0], np.int64)[0]))
            if message.infer_response.parameters["triton_final_response"].bool_param:
                break
    requests.put(None)
    if found != list(one.tokens[:most]) or next(call, None) is not None:
        tally.fault(f"tokens {found} in two turns where {one.tokens[:most]} were right")
    tally.add("answered")
    tally.add("tokens", len(found))


def keep_reloading(url: str, folder: Path, *, polled: bool, tally: Tally, stop: threading.Event) -> None:
    """Have a model loaded again every second or so, changed on disk."""
    with grpc.insecure_channel(url) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        while not stop.wait(1):
            name = MODELS[tally.reloads % len(MODELS)]
            os.utime(folder / name / "1" / "model.onnx")
            try:
                if not polled:
                    stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=name), timeout=DEADLINE)
            except grpc.RpcError as error:
                failed: Any = error
                tally.fault(f"reload: {failed.code().name}: {failed.details()}")
            tally.add("reloads")


def keep_killing(url: str, folder: Path, tally: Tally, stop: threading.Event) -> None:
    """Start a client process every few seconds and kill it while it waits."""
    chance = random.Random(1)
    while not stop.wait(4):
        client = subprocess.Popen([sys.executable, "-m", "benchmarks.serving_soak", "--client", url, str(folder)])
        time.sleep(2.5 + 2 * chance.random())
        client.send_signal(signal.SIGKILL)
        client.wait()
        tally.add("killed")


def be_client(url: str, folder: Path) -> None:
    """Send requests of both kinds until killed."""
    tally, stop = Tally(), threading.Event()
    answers = known_answers(folder / "decoder" / "1" / "model.onnx", count=4)
    streams = threading.Thread(target=keep_generating, args=(url, os.getpid(), answers, tally, stop))
    streams.start()
    keep_asking(url, os.getpid(), tally, stop)


def resident(process: int) -> int:
    """Bytes of a process and those below it in memory."""
    try:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        return 0
    return (int(found[1]) * 1024 if found else 0) + sum(resident(int(child)) for child in children)


def start_server(
    folder: Path, *, models: Sequence[str] = MODELS, prefix: Sequence[str] = (), processes: int = 1
) -> tuple[subprocess.Popen[str], str]:
    """A server of `models` on a free port, once all of its processes are ready; its command begins with `prefix`."""
    flags = ["--port", "0"]
    if processes > 1:
        flags += ["--processes", str(processes), "--model-control-mode", "poll", "--poll-seconds", "0.5"]
    else:
        flags += ["--model-control-mode", "explicit"]
        flags += [flag for model in models for flag in ("--load-model", model)]
    command = [*prefix, sys.executable, "-m", "runtime.cli", "serve", str(folder), *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    url, ready = "", 0
    assert process.stderr is not None
    for line in process.stderr:
        found = re.search(r"listening on (\S+:\d+)", line)
        url = found[1] if found else url
        ready += line.rstrip().endswith("ready")
        if ready == processes:
            threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True).start()
            return process, url
    raise SystemExit("the server did not start")


def save_repository(folder: Path) -> Path:
    """The three models; gives the file of the decoder."""
    for model, toml in (("padded", PADDING), ("plain", "optimize = false\n")):
        save_model(folder / model / "1" / "model.onnx")
        (folder / model / "config.pbtxt").write_text(CONFIG)
        (folder / model / "tilefuse.toml").write_text(toml)
    path = folder / "decoder" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    decoder.build(path)
    (folder / "decoder" / "tilefuse.toml").write_text(DECODER)
    return path


def soak(seconds: float, processes: int) -> tuple[Tally, list[int], int]:
    """What the clients saw, the server's memory over time, and its exit status after a SIGTERM once they are done."""
    tally, stop = Tally(), threading.Event()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        answers = known_answers(save_repository(folder))
        process, url = start_server(folder, processes=processes)
        threads = [threading.Thread(target=keep_asking, args=(url, seed, tally, stop)) for seed in range(8)]
        threads += [
            threading.Thread(target=keep_generating, args=(url, seed, answers, tally, stop)) for seed in range(4)
        ]
        reloading = {"polled": processes > 1, "tally": tally, "stop": stop}
        threads += [threading.Thread(target=keep_reloading, args=(url, folder), kwargs=reloading)]
        threads += [threading.Thread(target=keep_killing, args=(url, folder, tally, stop))]
        for thread in threads:
            thread.start()
        memory: list[int] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end and process.poll() is None:
            time.sleep(min(1.0, seconds / 50))
            memory.append(resident(process.pid))
        stop.set()
        for thread in threads:
            thread.join()
        process.send_signal(signal.SIGTERM)
        status = process.wait(DEADLINE)
    return tally, memory, status


def main() -> None:
    """Parse the arguments, soak, and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--quick", action="store_true", help="30 seconds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--processes", type=int, default=1, help="of the server, on one port")
    parser.add_argument("--client", nargs=2, metavar=("URL", "FOLDER"), help="only send requests, until killed")
    arguments = parser.parse_args()
    if arguments.client:
        be_client(arguments.client[0], Path(arguments.client[1]))
    tally, memory, status = soak(30 if arguments.quick else arguments.seconds, arguments.processes)
    fifth = max(1, len(memory) // 5)
    early, late = np.median(memory[fifth : 2 * fifth]), np.median(memory[-fifth:])
    growth = float(late / early)
    print(f"{tally.answered} answered ({tally.tokens} tokens in streams), {tally.cut} cancelled, ", end="")
    print(f"{tally.reloads} reloads, {tally.killed} clients killed")
    print(f"memory {early / 2**20:.1f} MiB, at the end {late / 2**20:.1f} MiB ({growth:.3f}); exit status {status}")
    for fault in tally.faults[:20]:
        print(f"FAULT: {fault}")
    several = f", {arguments.processes} processes" if arguments.processes > 1 else ""
    if arguments.json:
        rows = [
            {
                "case": f"memory, late over early{several}",
                "unit": "ratio",
                "ours": growth,
                "peers": {},
                "floor": GROWTH,
            },
            {"case": f"faults{several}", "unit": "count", "ours": len(tally.faults), "peers": {}, "floor": 0},
        ]
        arguments.json.write_text(json.dumps([{**row, "error": None} for row in rows]))
    if tally.faults or growth > GROWTH or status != 0:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
