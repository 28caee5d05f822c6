"""How the server turns a model file into a session: the compiler and ONNX Runtime behind a `Loader`."""

import logging
from pathlib import Path

import onnx
import onnxruntime as ort

from runtime import session
from runtime.compile import CompileError, optimize
from runtime.fingerprint import compiler_fingerprint
from runtime.options import Options
from runtime.server.model import ModelError
from runtime.server.repository import Loader
from runtime.server.settings import Settings

LOG = logging.getLogger("tilefuse.server")


def make_loader(options: Options) -> Loader:
    """A loader that keeps what it optimises in `options.cache` and runs sessions with `options.threads`."""

    def optimize_model(model: Path, output: Path) -> None:
        try:
            report = optimize(model, output, options=options, progress=lambda stage: None)
        except CompileError as error:
            raise ModelError(str(error)) from error
        for fault in report.faults:
            LOG.error(
                "%s: a fault of TileFuse, its %s region %s is wrong and was left out: %s",
                *(model, fault.kind, fault.label, fault.problem),
            )

    def open_session(model: Path, settings: Settings) -> ort.InferenceSession:
        threads = settings.threads if settings.threads is not None else options.threads
        if not _has_kernels(model):
            return _open_plain(model, threads)
        try:
            return session.load(model, provider=settings.provider, threads=threads)
        except session.LoadError as error:
            raise ModelError(str(error)) from error

    fingerprint = f"{compiler_fingerprint()} {options.target}"
    return Loader(optimize=optimize_model, open_session=open_session, cache=options.cache, fingerprint=fingerprint)


def _has_kernels(model: Path) -> bool:
    """Whether the model has fused nodes; those must find their library."""
    functions = onnx.load_model(model, load_external_data=False).functions
    return any(function.domain == session.DOMAIN for function in functions)


def _open_plain(model: Path, threads: int | None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
    return ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
