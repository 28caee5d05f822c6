"""Tokens per second of 1, 8 and 32 streams, beside the same answers one after the other, and the time to the first.

    python -m benchmarks.serving_generation [--quick] [--json FILE]

A decoder with random weights (GPT-2's shape, 4 of its 12 layers, 16,000 tokens) is fused and served by a process of its
own. `one by one` is a single stream that asks for the same answers in turn. The floor is ONNX Runtime's own step loop
on the plain model, one stream, in this process, without a server. `error` is the number of answers that are not those
of one by one, unless the plain model's logits of the two tokens where they part are equal but for rounding.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime as ort
from serving_soak import start_server

from models import decoder
from runtime.client import Client

SIZE = decoder.Size(layers=4, hidden=768, heads=12, vocab=16000, positions=1024)
SMALL = decoder.Size(layers=2, hidden=256, heads=4, vocab=8000, positions=1024)
SETTINGS = "optimize_first = true\n[generation]\ncontext = 1024\nstreams = 32\n"
STREAMS = (1, 8, 32)
CLOSE = 1e-4
"""Difference of logits, as a share of the largest, that rounding explains."""


@dataclass
class Measured:
    """What the clients saw; each thread adds to the lists, which is safe."""

    seconds: float = 0.0
    tokens: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    first_ms: list[float] = field(default_factory=list[float])
    next_ms: list[float] = field(default_factory=list[float])

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(map(len, self.tokens.values())) / self.seconds


def prompts(count: int, vocab: int) -> list[list[int]]:
    """Prompts of 8 to 64 tokens."""
    random = np.random.default_rng(0)
    return [random.integers(0, vocab, random.integers(8, 65)).tolist() for _ in range(count)]


def ask(url: str, numbers: list[int], asked: list[list[int]], count: int, found: Measured) -> None:
    """The answers to some of the prompts, one after the other."""
    with Client(url) as client:
        for number in numbers:
            at = time.perf_counter()
            tokens: list[int] = []
            for token in client.generate("decoder", asked[number], max_tokens=count):
                now = time.perf_counter()
                (found.next_ms if tokens else found.first_ms).append((now - at) * 1e3)
                at = now
                tokens.append(token)
            found.tokens[number] = tokens


def measure(url: str, asked: list[list[int]], count: int, streams: int) -> Measured:
    """All prompts, spread over so many streams."""
    found = Measured()
    threads = [
        threading.Thread(target=ask, args=(url, list(range(first, len(asked), streams)), asked, count, found))
        for first in range(streams)
    ]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.seconds = time.perf_counter() - started
    return found


class PlainModel:
    """The model in ONNX Runtime, as it is."""

    def __init__(self, model: Path) -> None:
        self._session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        self._caches = {one.name: one.shape for one in self._session.get_inputs() if one.name.startswith("past")}
        self._outputs = ["logits", *(name.replace("past_key_values", "present") for name in self._caches)]

    def tokens_per_second(self, prompt: list[int], count: int) -> float:
        """Of a greedy loop for one stream, caches passed on without copies."""
        feeds, new, length = self._empty(), np.array([prompt]), 0
        started = time.perf_counter()
        for _ in range(count):
            logits, *presents = self._step(feeds, new, length)
            length += new.shape[1]
            feeds = dict(zip(self._caches, presents, strict=True))
            new = np.array([[int(np.asarray(logits.numpy())[0, -1].argmax())]])
        return count / (time.perf_counter() - started)

    def alike(self, prompt: list[int], one: list[int], other: list[int]) -> bool:
        """Whether two answers are the same, or part where two logits are equal but for rounding."""
        at = next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), None)
        if at is None:
            return True
        logits = np.asarray(self._step(self._empty(), np.array([prompt + one[:at]]), 0)[0].numpy())[0, -1]
        return abs(float(logits[one[at]] - logits[other[at]])) <= CLOSE * float(np.abs(logits).max())

    def _empty(self) -> dict[str, ort.OrtValue]:
        shapes = {
            name: [extent if isinstance(extent, int) else 0 for extent in dims] for name, dims in self._caches.items()
        }
        arrays = {name: np.zeros((1, *shape[1:]), dtype=np.float32) for name, shape in shapes.items()}
        return {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}

    def _step(self, caches: dict[str, ort.OrtValue], new: np.ndarray, length: int) -> list[ort.OrtValue]:
        total = length + new.shape[1]
        plain = {
            "input_ids": new,
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(length, total)[None],
        }
        feeds = caches | {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in plain.items()}
        return list(self._session.run_with_ort_values(self._outputs, feeds))


def main() -> None:
    """Parse the arguments, measure, and print one line per case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer and shorter answers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args()
    size, count, answers, rounds = (SMALL, 16, 32, 1) if options.quick else (SIZE, 48, 32, 2)
    asked = prompts(answers, size.vocab)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = decoder.build(Path(folder) / "decoder" / "1" / "model.onnx", style="gpt2", size=size)
        (Path(folder) / "decoder" / "tilefuse.toml").write_text(SETTINGS)
        server, url = start_server(Path(folder), models=("decoder",))
        try:
            measure(url, asked[:2], 4, 2)
            runs = {streams: [measure(url, asked, count, streams) for _ in range(rounds)] for streams in STREAMS}
            plain = PlainModel(model)
            floor = statistics.median(plain.tokens_per_second(asked[at], count) for at in range(3))
        finally:
            server.terminate()
            server.wait()
    alone = runs[1][0].tokens
    single = statistics.median(run.rate for run in runs[1])
    for streams, found in runs.items():
        rate = statistics.median(run.rate for run in found)
        wrong = sum(
            not plain.alike(asked[number], alone[number], run.tokens[number]) for run in found for number in alone
        )
        case = f"{streams} streams"
        rows.append(row(case, "tokens/s", rate, peers={"one by one": single}, floor=floor, error=wrong))
        for name, pick in (("first token", "first_ms"), ("each next token", "next_ms")):
            times = sorted(ms for run in found for ms in getattr(run, pick))
            median, late = times[len(times) // 2], times[int(len(times) * 0.99)]
            rows.append(row(f"{case}, {name}, p50", "ms", median))
            rows.append(row(f"{case}, {name}, p99", "ms", late))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    if any(entry["error"] for entry in rows):
        sys.exit("some answers differ from those of one stream")


def row(
    case: str,
    unit: str,
    ours: float,
    *,
    peers: dict[str, float] | None = None,
    floor: float | None = None,
    error: int | None = None,
) -> dict[str, object]:
    """One result, printed."""
    shown = "".join(f"   {name} {value:8.1f} ({ours / value:.2f} x)" for name, value in (peers or {}).items())
    if floor is not None:
        shown += f"   step loop {floor:8.1f}   {error} differ"
    print(f"{case:34} {ours:8.1f} {unit}{shown}", flush=True)
    return {"case": case, "unit": unit, "ours": ours, "peers": peers or {}, "floor": floor, "error": error}


if __name__ == "__main__":
    main()
