"""TileFuse in one screen: fuse an ONNX model, check it, run it, serve it.

tilefuse.optimize("model.onnx", "fused.onnx")      # writes fused.onnx and fused.so
session = tilefuse.load("fused.onnx")              # an onnxruntime.InferenceSession
tilefuse.serve("repository")                       # gRPC, until SIGTERM
tilefuse.connect("localhost:8001").infer("model", {"x": array})
kernel = tilefuse.jit(function)                    # a kernel of your own in the tile language, over numpy arrays
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from onnxruntime import InferenceSession

import tilecore
from runtime import compile as compiler
from runtime import session
from runtime import verify as verifier
from runtime.client import Client
from runtime.options import Options
from runtime.report import Report
from runtime.server.compiling import make_loader
from runtime.server.serve import ServerOptions
from runtime.server.serve import serve as run_server
from runtime.server.transport import TransportOptions
from runtime.verify import Verdict

Target = Literal["cpu", "cuda", "cuda-sm80"]

__all__ = ["Client", "Report", "Verdict", "connect", "explain", "jit", "load", "optimize", "serve", "verify"]


def optimize(
    model: str | Path,
    output: str | Path,
    *,
    verify: bool = True,
    inputs: Mapping[str, np.ndarray] | None = None,
    save_repro: str | Path | None = None,
    target: Target | None = None,
    unpad: str | None = None,
    precision: Literal["f32", "bf16"] = "f32",
    threads: int | None = None,
) -> Report:
    """Fuse `model`, write it to `output` with its library beside it, and say what was fused and what was not.

    With `verify`, the fused model is compared with the original first, on `inputs` or on generated ones. A region whose
    kernel is wrong is then left out and stands in the report's `faults`; with `save_repro`, a folder there shows the
    fault. With the target "cuda", the library has kernels for NVIDIA Hopper cards, too, with "cuda-sm80" ones for cards
    of compute capability 8.x (README, limits).
    `unpad` names the input [batch, length] that is 0 at padding: what the model computes for each token by itself is
    then computed for the tokens only, and outputs [batch, length, …] are 0 at the padding. With `precision` "bf16",
    operands of contractions and attention are rounded to bfloat16; sums, norms and softmax stay float32. Kernels are
    made for sessions of so many `threads`: by default those of TILEFUSE_THREADS, else one per core.
    """
    return compiler.optimize(
        Path(model),
        Path(output),
        options=replace(_options(target, unpad, threads), precision=precision),
        progress=lambda stage: None,
        verify=verify,
        inputs=inputs,
        repros=None if save_repro is None else Path(save_repro),
    )


def explain(
    model: str | Path, *, html: str | Path | None = None, target: Target | None = None, threads: int | None = None
) -> Report:
    """Say what `optimize` would do; with `html`, write a page that shows the graph, its regions and their kernels."""
    page = None if html is None else Path(html)
    return compiler.explain(Path(model), options=_options(target, threads=threads), page=page)


def _options(target: Target | None, unpad: str | None = None, threads: int | None = None) -> Options:
    options = replace(Options.from_environment(), unpad=unpad)
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads is {threads}, expected at least 1")
        options = replace(options, threads=threads)
    return options if target is None else replace(options, target=target)


def verify(original: str | Path, fused: str | Path, *, inputs: Mapping[str, np.ndarray] | None = None) -> Verdict:
    """Compare every output of the two models, on `inputs` or on generated ones."""
    return verifier.verify(Path(original), Path(fused), inputs=inputs)


def load(
    path: str | Path, *, provider: bool = False, cuda: bool = False, threads: int | None = None
) -> InferenceSession:
    """Open a fused model; with `provider`, through the plugin execution provider instead of custom ops; with `cuda`, on
    an NVIDIA card (needs onnxruntime-gpu).
    """
    return session.load(path, provider=provider, cuda=cuda, threads=threads)


def serve(repository: str | Path, *, host: str = "127.0.0.1", port: int = 8001) -> None:
    """Serve a folder of `NAME/VERSION/model.onnx` over gRPC until SIGTERM or SIGINT; main thread only."""
    options = ServerOptions(transport=TransportOptions(host=host, port=port))
    run_server(Path(repository), make_loader(Options.from_environment()), options=options)


def connect(url: str, *, timeout: float = 60.0) -> Client:
    """A client for the server at `url`, HOST:PORT."""
    return Client(url, timeout=timeout)


def jit(function: Callable[..., Any] | None = None, *, out_idx: Sequence[int] | int | None = None) -> Any:
    """Decorate a kernel in the tile language (docs/language.md), so that calling it compiles and runs it.

    `tilecore.jit` with the cache, compiler and threads that the environment gives.
    """
    options = Options.from_environment()
    return tilecore.jit(
        function, out_idx=out_idx, threads=options.threads or 0, cache=options.cache, compiler=options.compiler
    )
