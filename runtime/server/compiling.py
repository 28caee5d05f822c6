"""How the server turns a model file into a session: the compiler and ONNX Runtime behind a `Loader`.

The compiler runs in a process of its own, at low priority: it is Python too, and would hold the interpreter lock that
answering requests needs.
"""

import json
import logging
import subprocess
import sys
import threading
from pathlib import Path

import onnxruntime as ort

from runtime import session
from runtime.fingerprint import compiler_fingerprint
from runtime.options import Options
from runtime.server.loading import Loader
from runtime.server.model import ModelError
from runtime.server.settings import Settings

LOG = logging.getLogger("tilefuse.server")

_OPTIMIZE = """
import os, sys
os.nice(10)
from runtime.cli import main
main(sys.argv[1:])
"""


class Compiler:
    """Runs `tilefuse optimize`, one model at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def optimize(self, model: Path, output: Path, settings: Settings) -> None:
        """Fuse `model` for sessions with those settings and write it to `output`.

        Raises:
            ModelError: it cannot be fused, or the server is stopping.
        """
        command = [sys.executable, "-c", _OPTIMIZE, "optimize", str(model), "-o", str(output), "--json"]
        command += [] if settings.unpad is None else ["--unpad", settings.unpad]
        command += [] if settings.threads is None else ["--threads", str(settings.threads)]
        with self._lock:
            if self._stopped:
                raise ModelError("the server is stopping")
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self._process = process
        printed, errors = process.communicate()
        with self._lock:
            self._process = None
            if self._stopped:
                raise ModelError("the server is stopping")
        if process.returncode != 0:
            said = errors.strip().splitlines() or [f"exit status {process.returncode}"]
            raise ModelError(said[-1].removeprefix("error: "))
        for fault in json.loads(printed)["faults"]:
            LOG.error("%s: a fault of TileFuse, a region is wrong and was left out: %s", model, json.dumps(fault))

    def stop(self) -> None:
        """End a run and start no more."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.terminate()


def make_loader(options: Options, *, optimize_first: bool = False) -> Loader:
    """A loader that keeps what it optimises in `options.cache` and runs sessions with `options.threads`."""
    compiler = Compiler()

    def open_session(model: Path, settings: Settings, fused: bool) -> ort.InferenceSession:
        threads = settings.threads if settings.threads is not None else options.threads
        if not fused:
            return _open_plain(model, threads)
        try:
            return session.load(model, provider=settings.provider, threads=threads, recorded=True)
        except session.LoadError as error:
            raise ModelError(str(error)) from error

    return Loader(
        optimize=compiler.optimize,
        open_session=open_session,
        cache=options.cache,
        fingerprint=f"{compiler_fingerprint()} {options.target} {options.threads or 'all'} threads",
        optimize_first=optimize_first,
        stop=compiler.stop,
    )


def _open_plain(model: Path, threads: int | None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
    return ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
