"""Other programs that work for us, and how to end them: a compiler must not outlive, or hold up, whoever asked for it.

Each runs in a process group of its own, so that what it started itself ends with it.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Sequence


class StoppedError(RuntimeError):
    """The command was ended before its time, or not begun: its result is not wanted any more."""


class Commands:
    """Commands that run now. Threads may share one of these."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def run(
        self, command: Sequence[str], *, given: str | None = None, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` to its end, with `given` as its standard input and its output kept.

        subprocess.TimeoutExpired when it takes longer than `timeout` seconds, OSError when it cannot be run,
        StoppedError after `stop`.
        """
        entry = None if given is None else subprocess.PIPE
        with self._lock:
            if self._stopped:
                raise StoppedError(command[0])
            process = subprocess.Popen(
                command, stdin=entry, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
                process_group=0,
            )  # fmt: skip
            self._running.add(process)
        try:
            said, complained = process.communicate(given, timeout)
        except BaseException:
            _end(process)
            process.communicate()
            raise
        finally:
            with self._lock:
                self._running.remove(process)
        if self._stopped:
            raise StoppedError(command[0])
        return subprocess.CompletedProcess(command, process.returncode, said, complained)

    def stop(self) -> None:
        """End what runs, and let nothing begin from now on."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
