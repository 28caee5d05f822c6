"""One `ModelStreamInfer` call from its first request for tokens on.

In: the call's requests, read by a thread of its own, and the engines' events. Out: responses as they come, those of
different requests mixed. Invariants: an error is its request's and does not end the call; when the call ends, by
whichever side, everything that it held is let go at once.

Sequences belong to the call that began them: no other client can continue one, or take its name.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import grpc

from proto import open_inference_pb2 as pb
from runtime.server.budget import Budget
from runtime.server.dataplane import shown
from runtime.server.errors import InvalidRequestError, UnsupportedError
from runtime.server.generation.engine import Engine
from runtime.server.generation.requests import Wanted, read_request, token_message
from runtime.server.generation.streams import Event, Failed, Job, Produced, Sequence
from runtime.server.handlers import status_of
from runtime.server.model import Model
from runtime.server.operations.observe import Observer
from runtime.server.repository import Repository

Context = grpc.ServicerContext
Key = tuple[str, str, int | str]


@dataclass(frozen=True)
class Calls:
    """What a conversation needs of the service."""

    repository: Repository
    budget: Budget
    byte_limit: int
    observer: Observer
    idle: Callable[[Context], AbstractContextManager[None]]
    """Inside, the call waits for its client, and may be cut by a shutdown."""
    answer: Callable[[pb.ModelInferRequest, Context], Iterator[pb.ModelStreamInferResponse]]
    """Answers a request to a model that does not generate."""
    failure: Callable[[pb.ModelInferRequest, Exception], pb.ModelStreamInferResponse]
    """The response that tells of an error."""


@dataclass(eq=False)
class _Held:
    """A sequence of this call."""

    sequence: Sequence
    model: Model
    engine: Engine
    answering: bool = False
    """A request to it is open; for the idle time, the engine's own view is too early."""
    idle_since: float = 0.0


@dataclass(frozen=True)
class _Open:
    """A request that is being answered."""

    request: pb.ModelInferRequest
    wanted: Wanted
    held: _Held
    key: Key | None
    size: int
    started: int
    """Nanoseconds since the epoch."""


class _Ended:
    """The call is over."""


class _ReadAll:
    """The client sends no more requests."""


@dataclass(frozen=True)
class _Broken:
    """The requests cannot be read any further."""

    error: Exception


class Conversation:
    """Answers the requests of one call. For its own thread only, but for the inbox."""

    def __init__(self, calls: Calls, context: Context) -> None:
        self._calls = calls
        self._context = context
        self._inbox: queue.SimpleQueue[pb.ModelInferRequest | Event | _Ended | _ReadAll | _Broken] = queue.SimpleQueue()
        self._turn = threading.Semaphore(0)
        self._jobs: dict[Job, _Open] = {}
        self._sequences: dict[Key, _Held] = {}

    def answers(
        self, first: pb.ModelInferRequest, rest: Iterator[pb.ModelInferRequest]
    ) -> Iterator[pb.ModelStreamInferResponse]:
        """The responses to the first request for tokens and to all requests after it."""
        if not self._context.add_callback(lambda: self._inbox.put(_Ended())):
            return
        threading.Thread(target=self._read, args=(rest,), name="tilefuse-requests", daemon=True).start()
        try:
            yield from self._take(first)
            reading = True
            while reading or self._jobs:
                item = self._next()
                if isinstance(item, _Ended) or not self._context.is_active():
                    return
                if isinstance(item, _Broken):
                    raise item.error
                if isinstance(item, _ReadAll):
                    reading = False
                elif isinstance(item, (Produced, Failed)):
                    yield self._tell(item)
                else:
                    yield from self._take(item)
        finally:
            self._close()

    def _read(self, requests: Iterator[pb.ModelInferRequest]) -> None:
        """Put requests into the inbox, one when the one before was taken."""
        try:
            for request in requests:
                self._inbox.put(request)
                self._turn.acquire()
        except Exception as error:  # noqa: BLE001 - the call's own thread raises it
            self._inbox.put(_Broken(error))
        else:
            self._inbox.put(_ReadAll())

    def _next(self) -> Any:
        """The next thing that happened. Lets go of sequences that were idle for too long meanwhile."""
        while True:
            limits = [
                held.idle_since + held.engine.settings.idle_seconds
                for held in self._sequences.values()
                if not held.answering
            ]
            left = max(0.0, min(limits) - time.monotonic()) if limits else None
            try:
                if self._jobs:
                    return self._inbox.get(timeout=left)
                with self._calls.idle(self._context):
                    return self._inbox.get(timeout=left)
            except queue.Empty:
                self._let_go_idle()

    def _let_go_idle(self) -> None:
        now = time.monotonic()
        for key, held in list(self._sequences.items()):
            if not held.answering and now >= held.idle_since + held.engine.settings.idle_seconds:
                held.engine.let_go(held.sequence)
                del self._sequences[key]

    def _take(self, request: pb.ModelInferRequest) -> Iterator[pb.ModelStreamInferResponse]:
        """Begin to answer a request."""
        try:
            if not generates(self._calls.repository, request):
                yield from self._calls.answer(request, self._context)
                return
            size = request.ByteSize()
            self._calls.budget.take(size)
            try:
                self._submit(request, size)
            except BaseException:
                self._calls.budget.give_back(size)
                raise
        except Exception as error:  # noqa: BLE001 - it is the request's
            yield self._calls.failure(request, error)
        finally:
            self._turn.release()

    def _submit(self, request: pb.ModelInferRequest, size: int) -> None:
        with ExitStack() as stack:
            model = stack.enter_context(self._calls.repository.lease(request.model_name, request.model_version))
            engine = model.engine
            if engine is None:  # it was replaced between the two looks
                raise UnsupportedError(f"model {model.name} does not generate any more")
            wanted = read_request(
                request,
                engine.settings,
                vocabulary=engine.abilities.vocabulary,
                byte_limit=self._calls.byte_limit,
            )
            key = None if wanted.sequence is None else (model.name, request.model_version, wanted.sequence)
            held = self._continued(key) if key is not None and not wanted.start else None
            fresh = held is None
            if held is None:
                self._check_start(key)
                held = _Held(Sequence(), model, engine)
            job = self._job(wanted, held)
            if fresh and key is not None and key in self._sequences:
                self._end_sequence(key)
            lease = stack.pop_all() if fresh else ExitStack()
            if fresh:
                held.sequence.ended = lease.close
            try:
                held.engine.submit(job)
            except BaseException:
                lease.close()
                raise
        held.answering = True
        if key is not None:
            self._sequences[key] = held
        self._jobs[job] = _Open(request, wanted, held, key, size, time.time_ns())

    def _job(self, wanted: Wanted, held: _Held) -> Job:
        """The request as the engine sees it. InvalidRequestError: it does not fit the context."""
        settings = held.engine.settings
        known = held.sequence.tokens + len(wanted.prompt)
        if not known or (held.sequence.tokens == 0 and not len(wanted.prompt)):
            raise InvalidRequestError("the prompt has no tokens")
        room = settings.context - known
        if room < 1:
            raise InvalidRequestError(
                f"the context has {known} tokens, but this model is served with at most {settings.context}, prompt and "
                "answer together"
            )
        if wanted.max_tokens is not None and wanted.max_tokens > room:
            raise InvalidRequestError(
                f"max_tokens is {wanted.max_tokens}, but behind a context of {known} tokens there is room for {room}"
            )
        return Job(
            held.sequence,
            wanted.prompt,
            max_tokens=wanted.max_tokens if wanted.max_tokens is not None else min(room, settings.max_tokens),
            sink=self._inbox.put,
            backlog=self._inbox.qsize,
            sampling=wanted.sampling,
            stops=wanted.stops,
            logits=wanted.logits,
            keep=wanted.sequence is not None and not wanted.end,
            timeout=wanted.timeout,
        )

    def _continued(self, key: Key) -> _Held:
        held = self._sequences.get(key)
        if held is None or held.sequence.gone:
            self._sequences.pop(key, None)
            raise InvalidRequestError(
                f"sequence {shown(str(key[2]))} is not known: the first request of a sequence has sequence_start, "
                "it belongs to the stream that began it, and it ends when it is idle for too long, fails, or its model "
                "is unloaded"
            )
        return held

    def _check_start(self, key: Key | None) -> None:
        held = self._sequences.get(key) if key is not None else None
        if key is not None and held is not None and held.sequence.busy:
            raise InvalidRequestError(
                f"sequence {shown(str(key[2]))} is being answered; wait for its last token before it starts anew"
            )

    def _end_sequence(self, key: Key) -> None:
        held = self._sequences.pop(key)
        held.engine.let_go(held.sequence)

    def _tell(self, event: Event) -> pb.ModelStreamInferResponse:
        """The response to what the engine says; after the last one, the request is over."""
        opened = self._jobs[event.job]
        model = opened.held.model
        if isinstance(event, Failed):
            self._over(event.job, error=event.error)
            return self._calls.failure(opened.request, event.error)
        message = token_message(model.name, model.version, opened.request.id, opened.wanted, event)
        if event.reason:
            self._over(event.job, reason=event.reason)
        return pb.ModelStreamInferResponse(infer_response=message)

    def _over(self, job: Job, *, reason: str = "", error: Exception | None = None) -> None:
        opened = self._jobs.pop(job)
        self._calls.budget.give_back(opened.size)
        opened.held.answering = False
        opened.held.idle_since = time.monotonic()
        if opened.key is not None and opened.held.sequence.gone:
            self._sequences.pop(opened.key, None)
        first = (job.first - job.submitted) / 1e6 if job.first else None
        fields: dict[str, Any] = {
            "model": opened.held.model.name,
            "prompt_tokens": len(job.prompt),
            "tokens": job.made,
            "finish_reason": reason or "error",
        }
        if first is not None:
            fields["first_token_ms"] = round(first, 3)
        status = grpc.StatusCode.OK if error is None else status_of(error)[0]
        self._calls.observer.tell("generate", self._context, since=opened.started, status=status, fields=fields)

    def _close(self) -> None:
        """Let go of everything."""
        for job, opened in self._jobs.items():
            opened.held.engine.cancel(job)
            self._calls.budget.give_back(opened.size)
        for held in self._sequences.values():
            held.engine.let_go(held.sequence)
        self._turn.release()


def generates(repository: Repository, request: pb.ModelInferRequest) -> bool:
    """Whether the request is to a model that generates. NotFoundError: there is no such model."""
    return repository.find(request.model_name, request.model_version).engine is not None
