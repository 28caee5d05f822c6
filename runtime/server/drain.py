"""A thread pool that knows whether all the work it accepted is done.

gRPC hands each call to its pool the moment that it accepts it, so the pool's count and the calls in progress together
tell when nothing that was accepted is still unanswered.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class CountingPool:
    """The part of `ThreadPoolExecutor` that gRPC uses, with a count of tasks that are waiting or running."""

    def __init__(self, workers: int) -> None:
        self._pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="tilefuse-grpc")
        self._lock = threading.Lock()
        self._pending = 0

    @property
    def pending(self) -> int:
        """Tasks that are waiting or running."""
        with self._lock:
            return self._pending

    def submit(self, task: Callable[..., Any], *arguments: Any, **named: Any) -> Future[Any]:
        """Run `task` in a thread of the pool."""
        with self._lock:
            self._pending += 1
        try:
            future = self._pool.submit(task, *arguments, **named)
        except RuntimeError:  # the pool was shut down: the task will not run
            self._finished(None)
            raise
        future.add_done_callback(self._finished)
        return future

    def shutdown(self, *, wait: bool) -> None:
        """Take no more tasks; with `wait`, return when the last one is done."""
        self._pool.shutdown(wait=wait)

    def _finished(self, _: Future[Any] | None) -> None:
        with self._lock:
            self._pending -= 1
