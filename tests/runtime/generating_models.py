"""A decoder as the engine has it, and the oracle of its answers: the whole context from the start for every token."""

import queue
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from runtime.server.generation.decoder import recognise
from runtime.server.generation.engine import Engine
from runtime.server.generation.probe import probe
from runtime.server.generation.sampling import Sampling, choose
from runtime.server.generation.streams import Event, Failed, Job, Produced, Sequence
from runtime.server.model import Tensor
from runtime.server.settings import Generation
from runtime.server.statistics import Statistics
from runtime.wire import BY_ONNX


def open_session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def tensors(arguments: Items[Any]) -> list[Tensor]:
    return [Tensor(one.name, BY_ONNX[one.type], tuple(one.shape)) for one in arguments]


def start_engine(session: ort.InferenceSession, *, weight_bytes: int = 0, **settings: Any) -> Engine:
    chosen = Generation(**settings)
    decoder = recognise(tensors(session.get_inputs()), tensors(session.get_outputs()), chosen)
    return Engine(
        session,
        decoder,
        probe(session, decoder),
        settings=chosen,
        statistics=Statistics(),
        weight_bytes=weight_bytes,
    )


def last_logits(session: ort.InferenceSession, tokens: Items[int]) -> NDArray[np.float32]:
    """The logits behind the whole context, from an empty cache."""
    feeds: dict[str, NDArray[Any]] = {}
    for argument in session.get_inputs():
        if argument.name == "input_ids":
            feeds[argument.name] = np.array([tokens])
        elif argument.name == "attention_mask":
            feeds[argument.name] = np.ones((1, len(tokens)), np.int64)
        elif argument.name == "position_ids":
            feeds[argument.name] = np.arange(len(tokens))[None]
        else:
            shape = [extent if isinstance(extent, int) else 0 for extent in argument.shape]
            feeds[argument.name] = np.zeros((1, *shape[1:]), np.float32)
    return np.asarray(session.run(["logits"], feeds)[0])[0, -1]


def answer_alone(
    session: ort.InferenceSession, prompt: Items[int], count: int, sampling: Sampling | None = None
) -> list[int]:
    """The answer of `count` tokens to a prompt."""
    context = list(prompt)
    for _ in range(count):
        context.append(choose(last_logits(session, context), sampling or Sampling(), place=len(context)))
    return context[len(prompt) :]


class Listener:
    """Jobs of one client, and what came of them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.tokens: dict[Job, list[int]] = {}
        self.logits: dict[Job, list[NDArray[np.float32]]] = {}
        self.ends: dict[Job, str | Exception] = {}

    def job(self, prompt: Items[int], max_tokens: int, **fields: Any) -> Job:
        job = Job(
            fields.pop("sequence", None) or Sequence(),
            np.array(prompt, dtype=np.int64),
            max_tokens,
            self.inbox.put,
            fields.pop("backlog", lambda: 0),
            **fields,
        )
        self.tokens[job], self.logits[job] = [], []
        return job

    def submit(self, prompt: Items[int], max_tokens: int, **fields: Any) -> Job:
        job = self.job(prompt, max_tokens, **fields)
        self.engine.submit(job)
        return job

    def take(self, seconds: float = 30) -> Event:
        event = self.inbox.get(timeout=seconds)
        assert event.job not in self.ends, "an event after the last"
        if isinstance(event, Failed):
            self.ends[event.job] = event.error
        else:
            assert isinstance(event, Produced)
            self.tokens[event.job].append(event.token)
            if event.logits is not None:
                self.logits[event.job].append(event.logits)
            if event.reason:
                self.ends[event.job] = event.reason
        return event

    def take_all(self, *jobs: Job) -> None:
        """Take events until these jobs are over."""
        while not all(job in self.ends for job in jobs):
            self.take()
