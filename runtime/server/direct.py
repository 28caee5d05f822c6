"""Answers the calls of one unary method straight from gRPC core's completion queue.

In: a `grpc.Server` that is not started, a method, and a function from the bytes of a request to those of the answer.
Out: answered calls. Invariants: each call that is taken gets one status; at most `workers` of them are worked on, and
the bytes of others are not read yet; one thread takes events at any time, unless all that there may be are at work.

`grpc.server` changes threads three times for each call and pays twice as much for that as for everything else it does
with a small message. Here one thread, the leader, takes events and answers what is quick itself. Before anything that
may take long, the answering function calls `DirectCall.step_aside`, and another thread leads on. Where it did not, a
watch sees to that after a tenth of a second.

This is the part of grpcio that its own server stands on, which it does not promise to keep. `attach` gives None where
it is not as it was in 1.78 to 1.85, and the method is then left to `grpc.server`.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import grpc
from grpc._cython import cygrpc  # pyright: ignore[reportAttributeAccessIssue] - it has no types

LOG = logging.getLogger("tilefuse.server")
CORE: Any = cygrpc
WATCH_SECONDS = 0.1
_NO_FLAGS = 0
_NAMES = (
    "CompletionQueue",
    "CompletionType",
    "ReceiveCloseOnServerOperation",
    "ReceiveMessageOperation",
    "SendInitialMetadataOperation",
    "SendMessageOperation",
    "SendStatusFromServerOperation",
    "auth_context",
    "peer_identities",
)


class CallContext(Protocol):
    """What the functions that answer calls use of `grpc.ServicerContext`."""

    def is_active(self) -> bool:
        """Whether the client still waits."""
        ...

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Have `callback` called when the call is over; False if it is."""
        ...

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End the call with this status."""
        ...

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]] | None:
        """The call's headers."""
        ...

    def peer(self) -> str:
        """The client's address."""
        ...

    def peer_identities(self) -> Iterable[bytes] | None:
        """Who the client is, by its certificate."""
        ...

    def auth_context(self) -> Mapping[str, Any]:
        """What its certificate says."""
        ...


class AbortError(Exception):
    """`DirectCall.abort` was called."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code


class DirectCall:
    """One call: the context of whoever answers it, and its state."""

    __slots__ = (
        "_call",
        "_callbacks",
        "_calls",
        "_deadline",
        "_due",
        "_metadata",
        "_term",
        "_watched",
        "_working",
        "over",
    )

    def __init__(self, calls: "DirectCalls", event: Any) -> None:
        self._calls = calls
        self._call = event.call
        self._deadline: float = event.call_details.deadline
        self._metadata = event.invocation_metadata
        self._callbacks: list[Callable[[], None]] | None = []
        self._due = 0
        """Events that are still to come: that it is closed, that its status was sent, or both in one."""
        self._watched = False
        """Core tells when the client is gone. Before that, nobody can know but by the deadline."""
        self._term: Term | None = None
        """The term of the leader that answers it."""
        self._working = False
        self.over = False
        """Its status was sent, or the client is gone."""

    def is_active(self) -> bool:
        """Whether the client still waits."""
        return not self.over and time.time() < self._deadline

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Have `callback` called when the call is over; False if it is."""
        with self._calls.lock:
            if self._callbacks is None:
                return False
            self._callbacks.append(callback)
            return True

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End the call with this status. Always raises."""
        raise AbortError(code, details)

    def step_aside(self) -> None:
        """Let another thread take the next calls: what follows may take long."""
        self.watch_close()
        if self._term is not None:
            self._calls.resign(self._term)

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """The call's headers."""
        return self._metadata

    def peer(self) -> str:
        """The client's address."""
        return self._call.peer().decode()

    def peer_identities(self) -> Iterable[bytes] | None:
        """Who the client is, by its certificate."""
        return CORE.peer_identities(self._call)

    def auth_context(self) -> Mapping[str, Any]:
        """What its certificate says."""
        return {key.decode(): value for key, value in (CORE.auth_context(self._call) or {}).items()}

    def watch_close(self) -> None:
        """Ask to be told at once when the client is gone. Quick calls do without, which is an event less for each."""
        with self._calls.lock:
            if self._watched or self.over:
                return
            self._watched = True
            self._due += 1
        self._call.start_server_batch((CORE.ReceiveCloseOnServerOperation(_NO_FLAGS),), self._closed)

    def start_work(self) -> None:
        """Read the request, which is then answered. The lock is held."""
        self._working = True
        self._call.start_server_batch((CORE.ReceiveMessageOperation(_NO_FLAGS),), self._received)

    def refuse(self, code: grpc.StatusCode, details: str) -> None:
        """End the call without an answer."""
        number: Any = code.value[0]
        self._send((), number, details.encode())

    def _send(self, message: tuple[Any, ...], code: int, details: bytes) -> None:
        with self._calls.lock:
            if self.over:
                return
            self.over = True
            self._due += 1
            watched = self._watched
        start = CORE.SendInitialMetadataOperation(None, _NO_FLAGS)
        status = CORE.SendStatusFromServerOperation(None, code, details, _NO_FLAGS)
        closed = () if watched else (CORE.ReceiveCloseOnServerOperation(_NO_FLAGS),)
        self._call.start_server_batch((start, *message, status, *closed), self._event_came)

    def _received(self, event: Any) -> None:
        data = event.batch_operations[0].message()
        if data is not None:
            self._answer(data)
        elif not self.over:
            self.refuse(grpc.StatusCode.UNIMPLEMENTED, "the method takes exactly one request message")
        with self._calls.lock:
            self._working = False
            self._calls.work_ended(finished=self._callbacks is None)

    def _answer(self, data: bytes) -> None:
        self._term = self._calls.term
        try:
            answer = self._calls.answer(data, self)
        except AbortError as error:
            self.refuse(error.code, str(error))
        except Exception as error:
            LOG.error("a call failed unexpectedly", exc_info=error)
            self.refuse(grpc.StatusCode.INTERNAL, "internal error, the server's log has the details")
        else:
            self._send((CORE.SendMessageOperation(answer, _NO_FLAGS),), 0, b"")
        self._term = None

    def _closed(self, event: Any) -> None:
        self.over = True
        self._event_came(event)

    def _event_came(self, event: Any) -> None:
        with self._calls.lock:
            self._due -= 1
            if self._due:
                return
            callbacks, self._callbacks = self._callbacks, None
            if not self._working:
                self._calls.finished(self)
        for callback in callbacks or ():
            try:
                callback()
            except Exception as error:
                LOG.error("a callback failed", exc_info=error)


class Term:
    """The time in which one thread leads."""

    __slots__ = ("since",)

    def __init__(self) -> None:
        self.since = 0.0
        """When the event came that it is busy with; 0: it waits for one."""


class DirectCalls:
    """All calls of one method."""

    def __init__(
        self,
        server: Any,
        method: str,
        answer: Callable[[bytes, DirectCall], bytes],
        *,
        workers: int,
        waiting: int,
        admit: Callable[[DirectCall], None],
    ) -> None:
        """`answer` and `admit`, which is asked before the request is read, refuse a call by its `abort`."""
        self.lock = threading.Lock()
        self.answer = answer
        self.term: Term | None = None
        self._admit = admit
        self._method = method
        self._workers = workers
        self._waiting = waiting
        self._pending = self._active = 0
        self._deferred: deque[DirectCall] = deque()
        self._turn = threading.Lock()  # held while somebody leads
        self._followers = 0
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()
        self._queue = CORE.CompletionQueue()
        self._core = server._cy_server
        self._core.register_method(method)
        self._core.register_completion_queue(self._queue)

    @property
    def pending(self) -> int:
        """Calls that were taken and are not finished."""
        return self._pending

    def start(self) -> None:
        """Take calls. The server has been started."""
        self._turn.acquire()
        with self.lock:
            self._hand_over()
        watch = threading.Thread(target=self._watch, name="tilefuse-watch", daemon=True)
        watch.start()
        self._threads.append(watch)
        self._request()

    def close(self) -> None:
        """End the threads. The server has been stopped, and nothing is pending."""
        self._ended.set()
        self._queue.shutdown()
        for thread in self._threads:
            thread.join()

    def resign(self, term: Term) -> None:
        """End the term, if it has not ended: another thread leads from now on."""
        with self.lock:
            if self.term is term:
                self.term = None
                self._hand_over()

    def work_ended(self, *, finished: bool) -> None:
        """A call's answer was given; `finished`: and nothing more is to come. The lock is held."""
        self._active -= 1
        self._pending -= finished
        if self._deferred:
            self._active += 1
            self._deferred.popleft().start_work()

    def finished(self, call: DirectCall) -> None:
        """Nothing more is to come for a call. The lock is held."""
        self._pending -= 1
        if call in self._deferred:
            self._deferred.remove(call)

    def _request(self) -> None:
        try:
            self._core.request_registered_call(self._queue, self._queue, self._method, self._arrived)
        except ValueError:
            LOG.debug("no more calls are taken: the server is shutting down")

    def _arrived(self, event: Any) -> None:
        if not event.success:  # the server is shutting down
            return
        self._request()
        call = DirectCall(self, event)
        with self.lock:
            self._pending += 1
        refusal = self._refusal(call)
        with self.lock:
            if refusal is None and self._active < self._workers:
                self._active += 1
                call.start_work()
                return
            if refusal is None and len(self._deferred) >= self._waiting:
                refusal = AbortError(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls are waiting: try again later")
            if refusal is None:
                self._deferred.append(call)
        if refusal is None:
            call.watch_close()
        else:
            call.refuse(refusal.code, str(refusal))

    def _refusal(self, call: DirectCall) -> AbortError | None:
        """Why the call may not be made, if so."""
        try:
            self._admit(call)
        except AbortError as error:
            return error
        return None

    def _hand_over(self) -> None:
        """Let somebody lead. The lock is held, and nobody leads."""
        if self._followers:
            self._followers -= 1
        else:
            thread = threading.Thread(target=self._work, name=f"tilefuse-call-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._turn.release()

    def _work(self) -> None:
        while True:
            self._turn.acquire()
            term = self.term = Term()
            while self.term is term:
                event = self._queue.poll()
                if event.completion_type == CORE.CompletionType.queue_shutdown:
                    self._turn.release()  # the next one is told so as well
                    return
                term.since = time.monotonic()
                event.tag(event)
                term.since = 0.0
                event = None  # it holds the call, which core wants to see go
            with self.lock:
                self._followers += 1

    def _watch(self) -> None:
        """End the terms of leaders that an answer keeps busy."""
        while not self._ended.wait(WATCH_SECONDS):
            term = self.term
            if term is not None and 0.0 < term.since < time.monotonic() - WATCH_SECONDS:
                self.resign(term)


def attach(
    server: grpc.Server,
    method: str,
    answer: Callable[[bytes, DirectCall], bytes],
    *,
    workers: int,
    waiting: int,
    admit: Callable[[DirectCall], None] = lambda call: None,
) -> DirectCalls | None:
    """Answer `method`, a full name such as /package.Service/Method, from now on; None: this grpcio does not let us.

    `server` is one of `grpc.server` and not started.
    """
    core: Any = getattr(server, "_cy_server", None)
    if not all(hasattr(core, name) for name in ("register_method", "request_registered_call")) or not all(
        hasattr(CORE, name) for name in _NAMES
    ):
        LOG.warning(
            "grpcio %s is not as it was: %s is answered by its own server, more slowly", grpc.__version__, method
        )
        return None
    return DirectCalls(server, method, answer, workers=workers, waiting=waiting, admit=admit)
