"""Several server processes on one port: started together, ended together.

In: an address, a number, and what each process does. Out: whether all ended well. Invariants: the port is taken before
the first one starts, so that no stranger gets a share of the calls; there are all processes or none: when one ends, the
others are told to drain, and when the parent is gone, each drains by itself.

The kernel gives each *connection* to one of the processes (SO_REUSEPORT). Nothing is shared between them but the port
and the cache of optimised models.
"""

import logging
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing.connection import wait
from types import FrameType

from runtime.server.transport import ListenError

LOG = logging.getLogger("tilefuse.server")
_SPAWN = multiprocessing.get_context("spawn")  # a fork would copy gRPC's and ONNX Runtime's threads half


@contextmanager
def reserved_port(host: str, port: int) -> Generator[int]:
    """The port, ours but not listened on until the end of the block; 0 picks a free one.

    Raises:
        ListenError: it is taken, the address is not ours, or this system cannot share ports.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ListenError("this system has no SO_REUSEPORT, so that several processes cannot listen on one port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)  # fails where others listen, even if they share
            chosen = int(alone.getsockname()[1])
        with socket.socket(family, kind, protocol) as shared:
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            shared.bind((address[0], chosen, *address[2:]))
            yield chosen
    except OSError as error:
        raise ListenError(f"cannot listen on {host}:{port}: the port is taken or the address is not ours") from error


def run_together(work: Callable[[int], None], count: int) -> bool:
    """Run `work` with the numbers below `count`, each in a process of its own, until SIGTERM or SIGINT, which all of
    them get. True when each ended with status 0, and none before it was told to.

    `work` is sent to the processes, so it must be something that can be pickled.
    """
    processes = [_SPAWN.Process(target=_work, args=(work, number)) for number in range(count)]
    told = threading.Event()

    def pass_on(_: int, frame: FrameType | None) -> None:
        told.set()
        for process in processes:
            if process.is_alive():
                process.terminate()

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for process in processes:
            if not told.is_set():
                process.start()
        started = [process for process in processes if process.pid is not None]
        if told.is_set():  # also those that were being started when the signal came
            pass_on(signal.SIGTERM, None)
        wait([process.sentinel for process in started])
        if not told.is_set():
            LOG.error("a process of %d ended by itself: the others are told to stop", count)
            for process in started:
                process.terminate()
        for process in started:
            process.join()
        return told.is_set() and all(process.exitcode == 0 for process in started)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _work(work: Callable[[int], None], number: int) -> None:
    threading.Thread(target=_follow_parent, name="tilefuse-parent", daemon=True).start()
    work(number)


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
