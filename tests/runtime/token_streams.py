"""Calls of ModelStreamInfer to a model that generates, message by message, and the repository that they are sent to."""

import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from served_models import save_double

from models import decoder
from proto import open_inference_pb2 as pb

CONFIG = """
optimize = false
[generation]
streams = 8
waiting = 64
cache_mib = 1
context = 200
max_tokens = 5
prefill = 16
eos_token_ids = [%d]
idle_seconds = 0.3
"""
MODEL = decoder.model(style="llama")


def save_repository(root: Path, *, eos: int) -> Path:
    """A decoder and a model that generates nothing."""
    decoder.build(root / "llama" / "1" / "model.onnx")
    (root / "llama" / "tilefuse.toml").write_text(CONFIG % eos)
    save_double(root / "double" / "1" / "model.onnx")
    (root / "double" / "tilefuse.toml").write_text("optimize = false\n")
    return root


def request_for(prompt: Any, **parameters: Any) -> pb.ModelInferRequest:
    """A request for tokens; the parameters by the types of their values."""
    request = pb.ModelInferRequest(model_name="llama", id=str(parameters.pop("id", "")))
    ids = np.array(prompt, dtype=np.int64)
    request.inputs.add(name="input_ids", datatype="INT64", shape=(1, ids.size) if ids.ndim < 2 else ids.shape)
    request.raw_input_contents.append(ids.tobytes())
    for key, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(request.parameters[key], kind, value)
    return request


class Stream:
    """A call of ModelStreamInfer, to which requests can be added."""

    def __init__(self, stub: Any, **options: Any) -> None:
        self._requests: queue.SimpleQueue[pb.ModelInferRequest | None] = queue.SimpleQueue()
        self.call = stub.ModelStreamInfer(iter(self._requests.get, None), **options)

    def send(self, request: pb.ModelInferRequest) -> None:
        self._requests.put(request)

    def end(self) -> None:
        self._requests.put(None)

    def answer(self) -> list[Any]:
        """The infer responses up to one that is the last, or the error's text."""
        found: list[Any] = []
        for message in self.call:
            if message.error_message:
                return [message.error_message]
            found.append(message.infer_response)
            if found[-1].parameters["triton_final_response"].bool_param:
                return found
        return found

    def ask(self, prompt: Any, **parameters: Any) -> list[int] | str:
        """The tokens of one answer, or the error's text."""
        self.send(request_for(prompt, **parameters))
        found = self.answer()
        return found[0] if isinstance(found[0], str) else [token_of(one) for one in found]


def token_of(response: Any) -> int:
    assert [(one.name, one.datatype, list(one.shape)) for one in response.outputs][:1] == [
        ("token_ids", "INT64", [1, 1])
    ]
    return int(np.frombuffer(response.raw_output_contents[0], dtype=np.int64)[0])


def wait_until(true: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)
