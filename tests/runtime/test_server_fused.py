"""Plain models are fused when the server loads them, and fused ones are served with their library."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from served_models import ServerProcess

from models import minilm
from runtime.client import Client
from runtime.unpadded import padding_mask

pytestmark = pytest.mark.cpu

TOLERANCE = 1e-4  # absolute, where a LayerNorm leaves a root mean square of 1: far above float32 rounding
LOAD_SECONDS = 240.0


def encoder(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    return minilm.build(path, layers=1, hidden=64, heads=2, vocab=50)


def feeds(batch: int, length: int) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(batch)
    mask = np.ones((batch, length), dtype=np.int64)
    mask[-1, length // 2 :] = 0
    return {
        "input_ids": random.integers(0, 50, (batch, length)),
        "attention_mask": mask,
        "token_type_ids": np.zeros((batch, length), dtype=np.int64),
    }


def expected(model: Path, inputs: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, inputs)[0])


def check_answers(server: ServerProcess, original: Path, *, hides_padding: bool = False) -> None:
    with Client(server.url) as client:
        for batch, length in ((1, 7), (3, 20)):
            inputs = feeds(batch, length)
            answer = np.asarray(client.infer("encoder", inputs)["last_hidden_state"], dtype=np.float32)
            wanted = expected(original, inputs)
            if hides_padding:
                wanted = np.where(inputs["attention_mask"][..., None] != 0, wanted, 0)
            np.testing.assert_allclose(answer, wanted, atol=TOLERANCE, rtol=0)


@dataclass(frozen=True)
class Served:
    """A repository with a plain model that was served once, and the cache that this filled."""

    repository: Path
    original: Path
    cache: Path
    log: tuple[str, ...]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("served")
    original = encoder(folder / "models" / "encoder" / "1" / "model.onnx")
    server = ServerProcess(folder / "models", folder / "cache", "--optimize-first").wait_ready(LOAD_SECONDS)
    try:
        check_answers(server, original)
    finally:
        assert server.stop() == 0, server.log
    return Served(folder / "models", original, folder / "cache", tuple(server.log))


def test_a_plain_model_is_fused_at_load_and_found_in_the_cache_next_time(served: Served) -> None:
    (home,) = (served.cache / "models").iterdir()
    functions = onnx.load(home / "model.onnx", load_external_data=False).functions
    assert any(function.domain == "tilefuse" for function in functions)
    assert (home / "model.so").is_file()
    assert any("optimising" in line for line in served.log)
    server = ServerProcess(served.repository, served.cache).wait_ready()
    try:
        check_answers(server, served.original)
    finally:
        assert server.stop() == 0, server.log
    assert not any("optimising" in line for line in server.log)


@pytest.fixture
def fused(served: Served, tmp_path: Path) -> Path:
    """A repository with the fused model and its library."""
    (home,) = (served.cache / "models").iterdir()
    shutil.copytree(home, tmp_path / "fused" / "encoder" / "1")
    return tmp_path / "fused"


def test_a_fused_model_is_served_as_it_is(fused: Path, served: Served, tmp_path: Path) -> None:
    server = ServerProcess(fused, tmp_path / "other").wait_ready()
    try:
        check_answers(server, served.original)
    finally:
        assert server.stop() == 0, server.log
    assert not (tmp_path / "other" / "models").exists()


def test_a_fused_model_without_its_library_is_refused(fused: Path, tmp_path: Path) -> None:
    (fused / "encoder" / "1" / "model.so").unlink()
    server = ServerProcess(fused, tmp_path / "other")
    assert server.wait_exit() == 1
    assert "model.so" in server.log[-1]
    assert "is missing" in server.log[-1]


def test_a_library_with_another_hash_is_refused(fused: Path, tmp_path: Path) -> None:
    library = fused / "encoder" / "1" / "model.so"
    library.write_bytes(library.read_bytes() + b"\0")  # loads as before, but is not what was written with the model
    server = ServerProcess(fused, tmp_path / "other")
    assert server.wait_exit() == 1
    assert "its content is not what was written with model.onnx" in server.log[-1]


def test_a_model_without_a_hash_of_its_library_is_refused(fused: Path, tmp_path: Path) -> None:
    path = fused / "encoder" / "1" / "model.onnx"
    model = onnx.load(path)
    del model.metadata_props[:]
    onnx.save(model, path)
    server = ServerProcess(fused, tmp_path / "other")
    assert server.wait_exit() == 1
    assert "does not record the hash of its library" in server.log[-1]


def test_a_plain_model_answers_before_it_is_fused(served: Served, tmp_path: Path) -> None:
    server = ServerProcess(served.repository, tmp_path / "cache").wait_ready()
    try:
        check_answers(server, served.original)
        assert not any("served fused" in line for line in server.log)
        deadline = time.monotonic() + LOAD_SECONDS
        while not any("encoder version 1 is now served fused" in line for line in server.log):
            assert time.monotonic() < deadline, server.log
            time.sleep(0.1)
        check_answers(server, served.original)
    finally:
        assert server.stop() == 0, server.log


UNPADDED = """
[padding]
dim = "seq"
buckets = [32]
mask = "attention_mask"
unpad = true
"""


def check_texts_in_flight(server: ServerProcess, original: Path, *, senders: int = 8, texts: int = 6) -> None:
    """Texts of mixed lengths, some with holes and one without tokens, sent at once: each gets what it gets alone."""

    def send(number: int) -> None:
        random = np.random.default_rng(number)
        with Client(server.url) as client:
            for turn in range(texts):
                shape = (1 + turn % 2, int(random.integers(1, 33)))
                mask = (random.random(shape) < 0.8).astype(np.int64)
                mask[:, 0] = 0 if (number, turn) == (0, 0) else 1
                inputs = {
                    "input_ids": random.integers(0, 50, shape),
                    "attention_mask": mask,
                    "token_type_ids": random.integers(0, 2, shape),
                }
                answer = np.asarray(client.infer("encoder", inputs)["last_hidden_state"], dtype=np.float32)
                wanted = np.where(mask[..., None] != 0, expected(original, inputs), 0)
                np.testing.assert_allclose(answer, wanted, atol=TOLERANCE, rtol=0)

    with ThreadPoolExecutor(senders) as pool:
        list(pool.map(send, range(senders)))  # raises what a sender raised


def padded(repository: Path, model: Path) -> None:
    """The model as one that is padded, and fused without its padding."""
    folder = repository / "encoder"
    (folder / "1").mkdir(parents=True)
    shutil.copy(model, folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text('platform: "onnxruntime_onnx" max_batch_size: 8 dynamic_batching {}')
    (folder / "tilefuse.toml").write_text(UNPADDED)


def test_a_padded_model_is_fused_without_its_padding(served: Served, tmp_path: Path) -> None:
    padded(tmp_path / "models", served.original)
    cache = tmp_path / "cache"
    cache.mkdir()
    for shared in ("objects", "kernels"):
        (cache / shared).symlink_to(served.cache / shared)
    server = ServerProcess(tmp_path / "models", cache, "--optimize-first").wait_ready(LOAD_SECONDS)
    try:
        check_answers(server, served.original, hides_padding=True)
        check_texts_in_flight(server, served.original)
    finally:
        assert server.stop() == 0, server.log
    (home,) = (cache / "models").iterdir()
    fused = onnx.load(home / "model.onnx", load_external_data=False)
    assert padding_mask(fused) == "attention_mask"
    assert any(entry.value.endswith("ragged") for node in fused.graph.node for entry in node.metadata_props)


def test_a_fused_model_that_computes_padding_is_no_model_without(fused: Path, tmp_path: Path) -> None:
    padded(tmp_path / "models", fused / "encoder" / "1" / "model.onnx")
    shutil.copy(fused / "encoder" / "1" / "model.so", tmp_path / "models" / "encoder" / "1" / "model.so")
    server = ServerProcess(tmp_path / "models", tmp_path / "other")
    assert server.wait_exit() == 1
    assert "`tilefuse optimize --unpad attention_mask`" in server.log[-1]
