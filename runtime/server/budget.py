"""Bounds the memory of what is in flight.

In: the bytes of each request, when it is taken up and when its answer has left. Out: leave to go on, or a refusal.
Invariant: the bytes of accepted requests never exceed the budget, unless a single request does by itself.
"""

import threading

from runtime.server.errors import ExhaustedError


class Budget:
    """Counts the requests in flight and their bytes."""

    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        self._limit = limit
        self._bytes = 0
        self._requests = 0

    @property
    def requests(self) -> int:
        """Requests that were accepted and whose answer has not left."""
        return self._requests

    @property
    def bytes(self) -> int:
        """Their bytes."""
        return self._bytes

    def take(self, size: int) -> None:
        """Accept a request of `size` bytes.

        Raises:
            ExhaustedError: the budget is spent.
        """
        with self._lock:
            if self._requests and self._bytes + size > self._limit:
                raise ExhaustedError(
                    f"{self._bytes} bytes of requests are in flight and this one has {size}, together more than the "
                    f"{self._limit} that are allowed: try again later"
                )
            self._bytes += size
            self._requests += 1

    def give_back(self, size: int) -> None:
        """The answer to a request of `size` bytes has left, or it ended without one."""
        with self._lock:
            self._bytes -= size
            self._requests -= 1
