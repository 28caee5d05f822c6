"""Decides which requests of one model run together, and when.

In: an `Entry` per request, from the thread that answers it. Out: the entry's own results or error. Invariants: an entry
gets its own rows or an error, whatever becomes of the others in its batch; nothing waits while an instance is idle; an
entry that nobody waits for any more is not run.

There are no threads here. A request that finds an instance idle runs in its own thread. When a run ends, its thread
forms the next batch and wakes the first request of that to lead it, so that a lone request costs no change of threads.
Before a request waits, or runs on a model whose runs were not quick of late, it says so by its `step_aside`.
"""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime.server.errors import AbandonedError, ExhaustedError, RequestError, TimedOutError
from runtime.server.settings import Batching, QueuePolicy
from runtime.wire import Array

Feeds = Mapping[str, Array]
Execute = Callable[[Feeds, tuple[str, ...]], list[Array]]
"""Runs the model on inputs by name and gives the outputs of these names; raises `RequestError`."""
NS = 1_000_000_000
QUICK_NS = 200_000
"""Runs of so many nanoseconds are quicker than the change of threads that `step_aside` may cost."""
QUICK_BYTES = 65_536
"""Larger requests are not taken to be quick."""
LOG = logging.getLogger("tilefuse.server")


@dataclass(eq=False, slots=True)
class Entry:
    """One request. What is below the line belongs to the scheduler."""

    feeds: Feeds
    outputs: tuple[str, ...]
    wanted: Callable[[], bool]
    """Does the client still wait?"""
    notify: Callable[[Callable[[], None]], None] = lambda wake: None
    """Registers what to call when the client stops waiting."""
    step_aside: Callable[[], None] = lambda: None
    """Called before what may take long, in the thread that answers the request."""
    size: int = 0
    """Bytes of the request."""
    rows: int = 1
    group: Hashable = None
    """Entries of one group have equal types and shapes but for the batch dim; None runs alone."""
    priority: int = 0
    """A level; 0 is the default."""
    timeout: float | None = None
    """Seconds that it may wait; None: as the queue policy says."""

    results: list[Array] = field(default_factory=list)
    error: Exception | None = None
    queued: int = 0
    started: int = 0
    joined: int = 0
    ran: int = 0
    batch_rows: int = 0
    level: int = 0
    expires: int | None = None
    late: bool = False
    done: bool = False
    batch: "list[Entry] | None" = None
    wake: threading.Event | None = None


class Scheduler:
    """The instances of one loaded model and the requests that wait for them."""

    def __init__(
        self,
        execute: Execute,
        *,
        instances: int,
        batching: Batching | None = None,
        max_rows: int = 0,
        on_execution: Callable[[int, int, int, int], None] = lambda rows, joining, running, splitting: None,
    ) -> None:
        """`on_execution` is told the rows of every run, and the nanoseconds of its three phases."""
        self._execute = execute
        self._batching = batching
        self._policies = dict(batching.policies) if batching else {}
        self._max_rows = max_rows
        self._on_execution = on_execution
        self._lock = threading.Lock()
        self._idle = self.instances = instances
        self._waiting: list[Entry] = []
        self._preferred = batching.preferred if batching else ()
        self._usual_ns = 0.0  # of a run, lately

    @property
    def waiting(self) -> int:
        """The number of requests that wait for an instance."""
        return len(self._waiting)

    def run(self, entry: Entry) -> list[Array]:
        """The entry's outputs. Blocks until they are there.

        Raises:
            RequestError: the queue is full, the entry waited too long, was cancelled, or the model cannot run on it.
        """
        entry.queued = time.perf_counter_ns()
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
                entry.batch = [entry]
            else:
                self._enqueue(entry)
        if entry.batch is None or entry.size > QUICK_BYTES or self._usual_ns > QUICK_NS:
            entry.step_aside()
        if entry.batch is None:
            self._wait(entry)
        if entry.batch is not None:
            try:
                self._run_batch(entry.batch)
            finally:
                self._pass_on()
        if entry.error is not None:
            raise entry.error
        return entry.results

    def _policy(self, entry: Entry) -> QueuePolicy:
        if self._batching is None:
            return QueuePolicy()
        return self._policies.get(entry.level, self._batching.policy)

    def _enqueue(self, entry: Entry) -> None:
        """Put the entry in its place: by level, then by arrival; late ones after all others of their level."""
        batching = self._batching
        if batching is not None and batching.priorities:
            entry.level = entry.priority or batching.default_priority
        policy = self._policy(entry)
        if policy.largest and sum(1 for other in self._waiting if other.level == entry.level) >= policy.largest:
            raise ExhaustedError(f"the queue is full: max_queue_size {policy.largest} requests wait already")
        timeout = policy.timeout
        if entry.timeout is not None and policy.override:
            timeout = entry.timeout if timeout is None else min(timeout, entry.timeout)
        if timeout is not None:
            entry.expires = entry.queued + int(timeout * NS)
        entry.wake = threading.Event()
        self._insert(entry)

    def _insert(self, entry: Entry) -> None:
        place = (entry.level, entry.late)
        at = len(self._waiting)
        while at > 0 and (self._waiting[at - 1].level, self._waiting[at - 1].late) > place:
            at -= 1
        self._waiting.insert(at, entry)

    def _wait(self, entry: Entry) -> None:
        """Return when the entry is to lead a batch or is done; raise when it is neither and no longer waits."""
        wake = entry.wake
        assert wake is not None
        entry.notify(wake.set)
        while True:
            limit = None if entry.expires is None else max(0, entry.expires - time.perf_counter_ns()) / NS
            wake.wait(limit)
            with self._lock:
                wake.clear()
                if entry.batch is not None or entry.done:
                    return
                if entry in self._waiting:
                    self._drop_or_delay(entry, time.perf_counter_ns())
                    if entry.done:
                        return

    def _drop_or_delay(self, entry: Entry, now: int) -> None:
        """Take out an entry that nobody waits for, or whose time is over; put it last if that is the policy."""
        expired = entry.expires is not None and now >= entry.expires
        if not entry.wanted():
            error: RequestError = AbandonedError("the request was cancelled or its deadline passed while it waited")
        elif not expired:
            return
        elif self._policy(entry).delay:
            self._waiting.remove(entry)
            entry.expires, entry.late = None, True
            self._insert(entry)
            return
        else:
            waited = (now - entry.queued) / 1e6
            error = TimedOutError(f"the request waited {waited:.0f} ms, longer than its queue's timeout")
        self._waiting.remove(entry)
        self._finish(entry, error)

    def _finish(self, entry: Entry, error: Exception | None = None) -> None:
        entry.error = error
        entry.done = True
        if entry.wake is not None:
            entry.wake.set()

    def _pass_on(self) -> None:
        """Give the instance that became free to the next batch, if there is one."""
        with self._lock:
            if not self._waiting:
                self._idle += 1
                return
            now = time.perf_counter_ns()
            for entry in list(self._waiting):
                self._drop_or_delay(entry, now)
            if not self._waiting:
                self._idle += 1
                return
            batch = self._form(now)
            self._waiting = [entry for entry in self._waiting if entry not in batch]
            leader = batch[0]
            leader.batch = batch
            assert leader.wake is not None
            leader.wake.set()

    def _form(self, now: int) -> list[Entry]:
        """The entries that run next: those of the first one's group, or of one that fills a preferred batch."""
        first = self._waiting[0]
        if first.group is None or self._batching is None:
            return [first]
        batch = self._together(first)
        if self._preferred and now - first.queued < self._batching.passed_over * NS:
            seen = {first.group}
            for entry in self._waiting:
                if entry.level != first.level or entry.late or self._rows(batch) in self._preferred:
                    break
                if entry.group is not None and entry.group not in seen:
                    seen.add(entry.group)
                    other = self._together(entry)
                    batch = other if self._rows(other) in self._preferred else batch
        return batch

    def _together(self, first: Entry) -> list[Entry]:
        """As many of a group as may run at once; as many as make a preferred batch, if they do."""
        chosen: list[Entry] = []
        rows, best = 0, 0
        for entry in self._waiting:
            if entry.group != first.group or rows + entry.rows > self._max_rows:
                continue
            chosen.append(entry)
            rows += entry.rows
            if rows in self._preferred:
                best = len(chosen)
        return chosen[:best] if best else chosen

    def _rows(self, batch: Sequence[Entry]) -> int:
        return sum(entry.rows for entry in batch)

    def _run_batch(self, batch: list[Entry]) -> None:
        """Run the entries together; where that fails, each by itself, so that only the culprits do."""
        started = time.perf_counter_ns()
        try:
            if len(batch) == 1:
                self._run_alone(batch[0], started)
                return
            for entry in batch:
                entry.started = started
            self._run_together(batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the entries, whose threads raise it
            if len(batch) == 1:
                self._finish(batch[0], error)
                return
            if not isinstance(error, RequestError):
                LOG.error("a batch of %d requests failed and is run one by one: %s", len(batch), error)
            for entry in batch:
                self._run_batch([entry])

    def _run_alone(self, entry: Entry, started: int) -> None:
        entry.started = entry.joined = started
        entry.results = self._execute(entry.feeds, entry.outputs)
        entry.ran = ran = time.perf_counter_ns()
        self._note_time(ran - started)
        entry.batch_rows = entry.rows
        self._on_execution(entry.rows, 0, ran - started, 0)
        self._finish(entry)

    def _note_time(self, took: int) -> None:
        more = took - self._usual_ns
        self._usual_ns += more / 8 if more > 0 else more / 2  # a run that was interrupted says little

    def _run_together(self, batch: list[Entry]) -> None:
        started = batch[0].started
        feeds = {name: np.concatenate([entry.feeds[name] for entry in batch]) for name in batch[0].feeds}
        outputs = tuple(dict.fromkeys(name for entry in batch for name in entry.outputs))
        joined = time.perf_counter_ns()
        results = self._execute(feeds, outputs)
        ran = time.perf_counter_ns()
        self._note_time(ran - joined)
        rows = self._rows(batch)
        for name, array in zip(outputs, results, strict=True):
            if array.shape[0] != rows:
                raise BatchError(f"output {name!r} has {array.shape[0]} rows for a batch of {rows}, do not batch")
        by_name = dict(zip(outputs, results, strict=True))
        at = 0
        for entry in batch:
            entry.results = [by_name[name][at : at + entry.rows] for name in entry.outputs]
            at += entry.rows
        for entry in batch:
            entry.joined, entry.ran, entry.batch_rows = joined, ran, rows
        self._on_execution(rows, joined - started, ran - joined, time.perf_counter_ns() - ran)
        for entry in batch:
            self._finish(entry)


class BatchError(Exception):
    """A model gave a batch back with another number of rows; its requests are then run one by one."""
