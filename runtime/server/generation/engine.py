"""Generates tokens for all streams of one model: continuous batching.

In: `Job`s, from any thread. Out: events through their sinks, from the engine's own thread, which lives as long as there
are jobs. Invariants: a stream's tokens are those that it would get by itself; every admitted job has the bytes of its
longest answer set aside, so that none fails half-way for lack of room; what a cancelled job held is free before the
next run.

A turn is one step of every stream that is being answered, then a piece of the prompts that wait, so that a long prompt
delays a step by one piece. Jobs that are not admitted wait in order of arrival.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from onnxruntime import InferenceSession

from runtime.server.errors import (
    ExhaustedError,
    InvalidRequestError,
    RequestError,
    TimedOutError,
)
from runtime.server.generation.blocks import Block, Place, Tokens, empty_block, gather, run_decoder
from runtime.server.generation.decoder import Decoder
from runtime.server.generation.grouping import group_prompts, group_steps
from runtime.server.generation.probe import Abilities
from runtime.server.generation.sampling import LogitsError, choose
from runtime.server.generation.streams import LENGTH, STOP, Event, Failed, Job, Produced, Sequence
from runtime.server.settings import Generation
from runtime.server.statistics import BACKEND, CANCELED, REJECTED, Statistics

LOG = logging.getLogger("tilefuse.server")
PAUSE_AT, GO_ON_AT = 64, 8
"""Events that wait for a slow client when its job pauses, and when it goes on."""
LOOK_SECONDS = 0.02
"""How often to look for room, for slow clients and for timeouts when there is nothing to run."""


class Engine:
    """Generates for one loaded model."""

    def __init__(
        self,
        session: InferenceSession,
        decoder: Decoder,
        abilities: Abilities,
        *,
        settings: Generation,
        statistics: Statistics,
        weight_bytes: int,
    ) -> None:
        self.settings = settings
        self.decoder = decoder
        self.abilities = abilities
        self.counters = statistics.generation
        self._session = session
        self._statistics = statistics
        self._weight_bytes = weight_bytes
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._active: list[Job] = []
        self._kept: set[Sequence] = set()
        self._reserved = 0
        self._running = False
        self._retired = False

    @property
    def waiting(self) -> int:
        """Jobs that wait for their turn."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Jobs that are being answered."""
        return len(self._active)

    @property
    def kept(self) -> int:
        """Sequences whose cache is kept for their next request."""
        return len(self._kept)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of caches that are set aside."""
        return self._reserved

    def submit(self, job: Job) -> None:
        """Take a job; its events come through its sink.

        Raises:
            InvalidRequestError: its sequence is being answered, or is over.
            ExhaustedError: there is no room to wait, or never will be for one that long.
        """
        sequence, settings = job.sequence, self.settings
        with self._changed:
            if sequence.gone:
                raise InvalidRequestError("the sequence is over: its cache was let go; start it anew")
            if sequence.busy:
                raise InvalidRequestError("the sequence is being answered; wait for the last token of that answer")
            needed = self._needed(job)
            if needed > settings.cache_bytes:
                raise ExhaustedError(
                    f"a context of {needed // self.decoder.token_bytes} tokens takes {needed} bytes of cache, but all "
                    f"streams together have {settings.cache_bytes}"
                )
            if len(self._waiting) >= settings.waiting:
                raise ExhaustedError(f"{len(self._waiting)} streams wait already: try again later")
            sequence.busy = True
            self._kept.discard(sequence)
            job.submitted = time.perf_counter_ns()
            pending = [] if sequence.pending is None else [sequence.pending]
            job.left = np.concatenate([np.array(pending, dtype=np.int64), job.prompt])
            self._waiting.append(job)
            if not self._running:
                self._running = True
                threading.Thread(target=self._work, name="tilefuse-generate", daemon=True).start()
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """End a job; nobody waits for its events any more."""
        with self._changed:
            job.cancelled = True
            if job in self._waiting:
                self._waiting.remove(job)
                self._drop(job)
            self._changed.notify_all()

    def let_go(self, sequence: Sequence) -> None:
        """Free the cache of a sequence that no job works on."""
        with self._changed:
            if not sequence.busy:
                self._let_go(sequence)
            self._changed.notify_all()

    def retire(self) -> None:
        """Answer what was taken, and keep no sequences any more: the model was unloaded or replaced."""
        with self._changed:
            self._retired = True
            for sequence in list(self._kept):
                self._let_go(sequence)
            self._changed.notify_all()

    # --- under the lock ----------------------------------------------------------------------------------------------

    def _needed(self, job: Job) -> int:
        return (job.sequence.tokens + len(job.prompt) + job.max_tokens) * self.decoder.token_bytes

    def _let_go(self, sequence: Sequence) -> None:
        if sequence.gone:
            return
        sequence.gone, sequence.place = True, None
        self._reserved -= sequence.reserved
        sequence.reserved = 0
        self._kept.discard(sequence)
        sequence.ended()

    def _end(self, job: Job, *, keep: bool) -> None:
        """The job is over; its cache is kept or let go."""
        job.over = True
        sequence = job.sequence
        sequence.busy = False
        if not keep or job.cancelled or self._retired:
            self._let_go(sequence)
            return
        size = sequence.tokens * self.decoder.token_bytes
        self._reserved -= sequence.reserved - size
        sequence.reserved = size
        self._kept.add(sequence)

    def _drop(self, job: Job) -> None:
        """End a job that was cancelled."""
        self._statistics.record_failure(time.perf_counter_ns() - job.submitted, CANCELED)
        self._end(job, keep=False)

    def _admit(self) -> list[Event]:
        """Let in whom there is room for, in their order; gives the errors of those who wait in vain."""
        now = time.perf_counter_ns()
        failed: list[Event] = []
        for job in list(self._waiting):
            if job.timeout is not None and now - job.submitted > job.timeout * 1e9:
                self._waiting.remove(job)
                failed.append(self._refused(job, TimedOutError("the request waited longer than its timeout")))
        while self._waiting and len(self._active) < self.settings.streams:
            job = self._waiting[0]
            more = self._needed(job) - job.sequence.reserved
            if self._reserved + more > self.settings.cache_bytes:
                if self._active or self._kept:
                    break
                # what is set aside belongs to sequences that wait here as well, so no room will come
                reason = ExhaustedError("the caches of sequences that wait leave no room: end one, or start anew later")
                failed.append(self._refused(self._waiting.popleft(), reason))
                continue
            self._waiting.popleft()
            self._reserved += more
            job.sequence.reserved += more
            job.admitted = now
            self._active.append(job)
        return failed

    def _refused(self, job: Job, error: Exception) -> Failed:
        """Say no to a job that waited; a context that it would have continued stays."""
        self._statistics.record_failure(time.perf_counter_ns() - job.submitted, REJECTED)
        self._end(job, keep=job.keep and job.sequence.place is not None)
        return Failed(job, error)

    # --- the engine's thread -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                for job in [job for job in self._active if job.cancelled]:
                    self._active.remove(job)
                    self._drop(job)
                failed = self._admit()
                if not self._active and not self._waiting:
                    self._running = False
                idle = not self._active
            for event in failed:
                event.job.sink(event)
            if not self._running:
                return
            if idle or not self._turn():
                with self._changed:
                    self._changed.wait(LOOK_SECONDS)

    def _turn(self) -> bool:
        """One step of every stream, and one piece of prompts; False when there was nothing to run."""
        jobs = list(self._active)
        try:
            for job in jobs:
                self._look_at_client(job)
            stepping = [job for job in jobs if not len(job.left) and not job.paused]
            for group in group_steps(
                stepping, self.abilities, token_bytes=self.decoder.token_bytes, worth=self._weight_bytes
            ):
                self._step(group)
            reading = [job for job in jobs if len(job.left) and not job.cancelled]
            if reading:
                self._read(reading)
        except Exception as error:
            LOG.error("generation failed", exc_info=error)
            for job in jobs:
                self._fail(job, error)
            return True
        return bool(stepping or reading)

    def _look_at_client(self, job: Job) -> None:
        """Pause a job whose client does not take its tokens, alone in a block, so that the others' can go."""
        paused, job.paused = job.paused, job.backlog() > (GO_ON_AT if job.paused else PAUSE_AT)
        place = job.sequence.place
        if job.paused and not paused and place is not None:
            job.sequence.place = Place(self._alone(place), 0, place.length)

    def _step(self, jobs: list[Job]) -> None:
        """The next token of each."""
        started = time.perf_counter_ns()
        try:
            jobs, block = self._join(jobs)
            tokens = [np.array([job.sequence.pending], dtype=np.int64) for job in jobs]
            joined = time.perf_counter_ns()
            logits = self._run(jobs, tokens, block)
        except RequestError as error:
            self._one_by_one(jobs, error, self._step)
            return
        ran = time.perf_counter_ns()
        self.counters.record_step(len(jobs))
        for job, row in zip(jobs, logits, strict=True):
            job.step_ns += ran - joined
            self._produce(job, row)
        self._statistics.record_execution(len(jobs), joined - started, ran - joined, time.perf_counter_ns() - ran)

    def _read(self, reading: list[Job]) -> None:
        """A piece of the first prompt, or all of it and of others."""
        jobs = group_prompts(reading, self.abilities, most=self.settings.prefill)
        piece = self.decoder.most_new or self.settings.prefill
        size = piece if self.abilities.pieces else max(len(job.left) for job in jobs)
        tokens = [job.left[:size] for job in jobs]
        started = time.perf_counter_ns()
        try:
            places = [job.sequence.place for job in jobs]
            first = places[0]
            block = empty_block(self.decoder, len(jobs)) if first is None else self._alone(first)
            logits = self._run(jobs, tokens, block)
        except RequestError as error:
            self._one_by_one(jobs, error, self._read)
            return
        ran = time.perf_counter_ns()
        self.counters.record_prompt(sum(map(len, tokens)))
        for job, sent, row in zip(jobs, tokens, logits, strict=True):
            job.read_ns += ran - started
            job.left = job.left[len(sent) :]
            if not len(job.left):
                self._produce(job, row)
            else:  # others have their turn before its next piece
                with self._changed:
                    self._active.remove(job)
                    self._active.append(job)
        self._statistics.record_execution(len(jobs), 0, ran - started, time.perf_counter_ns() - ran)

    def _one_by_one(self, jobs: list[Job], error: RequestError, work: Callable[[list[Job]], None]) -> None:
        """After a run failed: the jobs run one by one, so that only the culprits fail."""
        if len(jobs) == 1:
            self._fail(jobs[0], error)
            return
        for job in jobs:
            work([job])

    def _run(self, jobs: list[Job], tokens: list[Tokens], block: Block) -> NDArray[np.float32]:
        lengths = [job.sequence.length for job in jobs]
        logits, block = run_decoder(self._session, self.decoder, tokens, past=block, lengths=lengths)
        for row, (job, sent, length) in enumerate(zip(jobs, tokens, lengths, strict=True)):
            job.sequence.place = Place(block, row, length + len(sent))
        return logits

    def _join(self, jobs: list[Job]) -> tuple[list[Job], Block]:
        """The jobs in the order of their block's rows, and the block: the one they are in, if they are all of it."""
        places = [(job, _place(job)) for job in jobs]
        block = places[0][1].block
        if block.rows == len(jobs) and all(place.block is block for _, place in places):
            places.sort(key=lambda pair: pair[1].row)
            return [job for job, _ in places], block
        joined = gather(self.decoder, [place for _, place in places])
        self.counters.record_copy(sum(place.length for _, place in places) * self.decoder.token_bytes)
        for row, (job, place) in enumerate(places):
            job.sequence.place = Place(joined, row, place.length)
        return jobs, joined

    def _alone(self, place: Place) -> Block:
        if place.block.rows == 1 and place.length == place.block.extent:
            return place.block
        self.counters.record_copy(place.length * self.decoder.token_bytes)
        return gather(self.decoder, [place])

    def _produce(self, job: Job, logits: NDArray[np.float32]) -> None:
        """Choose the job's next token and send it."""
        if job.cancelled or job.over:
            return
        sequence = job.sequence
        try:
            token = choose(logits, job.sampling, place=sequence.length)
        except LogitsError as error:
            self._fail(job, InvalidRequestError(f"no token can be chosen: {error}"))
            return
        now = time.perf_counter_ns()
        self.counters.record_token(now - (job.last or job.submitted), first=not job.made)
        job.first = job.first or now
        job.last = now
        job.made += 1
        sequence.pending = token
        reason = STOP if token in job.stops else LENGTH if job.made == job.max_tokens else ""
        if reason:
            self._finish(job)
        job.sink(Produced(job, token, logits.copy() if job.logits else None, reason))

    def _finish(self, job: Job) -> None:
        place = _place(job)
        if job.keep:  # by itself, as the block goes on without it
            block = self._alone(place)
            job.sequence.place = Place(block, 0, place.length)
        with self._changed:
            self._active.remove(job)
            self._end(job, keep=job.keep)
        waited = job.admitted - job.submitted
        rest = max(0, job.last - job.submitted - waited - job.read_ns - job.step_ns)
        self._statistics.record_success(1, queue=waited, reading=job.read_ns, running=job.step_ns, writing=rest)

    def _fail(self, job: Job, error: Exception) -> None:
        if job.over:
            return
        with self._changed:
            if job in self._active:
                self._active.remove(job)
            self._end(job, keep=False)
        self._statistics.record_failure(time.perf_counter_ns() - job.submitted, BACKEND)
        job.sink(Failed(job, error))


def _place(job: Job) -> Place:
    assert job.sequence.place is not None
    return job.sequence.place
