"""The builders of encoders and of GPT-2: valid, deterministic, right at two sizes, in each exporter's spelling."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator

from models import bert, minilm, prenorm

SMALL = bert.Size(layers=2, hidden=32, heads=4, vocab=50)
MODELS = {
    "torchscript": lambda: bert.model(exporter="torchscript", size=SMALL),
    "dynamo": lambda: bert.model(exporter="dynamo", size=SMALL),
    "minilm": lambda: minilm.model(layers=2, hidden=32, heads=4, vocab=50),
    "minilm_opset_14": lambda: minilm.model(layers=2, hidden=32, heads=4, vocab=50, opset=14),
}


def evaluate(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    results: Any = ReferenceEvaluator(model).run(None, feeds)
    return np.asarray(results[0])


def encoder_feeds(batch: int, seq: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    mask = np.ones((batch, seq), np.int64)
    mask[0, 1] = 0
    mask[-1, seq - 2 :] = 0
    return {
        "input_ids": random.integers(0, 50, (batch, seq)),
        "attention_mask": mask,
        "token_type_ids": random.integers(0, 2, (batch, seq)),
    }


@pytest.mark.parametrize("kind", MODELS)
def test_encoder_agrees_between_evaluators_at_two_sizes(kind: str) -> None:
    model = MODELS[kind]()
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for batch, seq in ((3, 7), (2, 12)):
        feeds = encoder_feeds(batch, seq)
        found = np.asarray(session.run(None, feeds)[0])
        assert found.shape == (batch, seq, 32)
        np.testing.assert_allclose(found, evaluate(model, feeds), atol=2e-5)


@pytest.mark.parametrize("style", prenorm.SIZES)
def test_pre_norm_model_agrees_between_evaluators_at_two_batches(style: prenorm.Style) -> None:
    model = prenorm.model(style)
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    size = prenorm.Size()
    random = np.random.default_rng(0)
    for batch in (1, 3):
        feeds: dict[str, np.ndarray] = {
            "vit": {"pixel_values": random.standard_normal((batch, 3, size.image, size.image), dtype=np.float32)},
            "whisper": {"input_features": random.standard_normal((batch, size.mels, size.frames), dtype=np.float32)},
            "gpt2": {key: value for key, value in encoder_feeds(batch, 7).items() if key != "token_type_ids"},
        }[style]
        found = np.asarray(session.run(None, feeds)[0])
        assert found.shape[:2] == (batch, size.seq(style) or 7)
        np.testing.assert_allclose(found, evaluate(model, feeds), atol=2e-5)


def test_pre_norm_model_needs_heads_that_divide_hidden() -> None:
    with pytest.raises(ValueError, match="hidden=32, heads=5"):
        prenorm.model("vit", size=prenorm.Size(heads=5))


def test_the_two_exporters_spell_one_model() -> None:
    feeds = encoder_feeds(3, 7)
    results: list[np.ndarray] = []
    for exporter in ("torchscript", "dynamo"):
        model = bert.model(exporter=exporter, size=SMALL)
        results.append(evaluate(model, feeds))
    np.testing.assert_allclose(results[0], results[1], atol=2e-5)


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_spelling_has_what_makes_the_exporter_hard(exporter: bert.Exporter) -> None:
    counts = Counter(node.op_type for node in bert.model(exporter=exporter, size=SMALL).graph.node)
    assert counts["IsNaN"] == SMALL.layers
    assert counts["Softmax"] == SMALL.layers
    if exporter == "torchscript":
        assert counts["Erf"] == SMALL.layers
        assert counts["Expand"] == counts["Flatten"] == 1
        assert counts["Constant"] > 90
    else:
        assert counts["Gelu"] == SMALL.layers
        assert counts["GatherND"] == 1
        assert counts["Constant"] == 0


def test_weights_do_not_depend_on_the_process() -> None:
    first, second = (bert.model(size=SMALL, seed=3).SerializeToString(deterministic=True) for _ in range(2))
    assert first == second
    assert first != bert.model(size=SMALL, seed=4).SerializeToString(deterministic=True)


def test_fixed_shape_leaves_no_symbol() -> None:
    model = bert.model(size=SMALL, shape=(2, 9))
    values = (*model.graph.input, *model.graph.output)
    assert all(dim.HasField("dim_value") for value in values for dim in value.type.tensor_type.shape.dim)


def test_build_writes_weights_beside_the_model(tmp_path: Path) -> None:
    path = bert.build(tmp_path / "bert.onnx", size=SMALL, external=True)
    assert (tmp_path / "bert.onnx.data").stat().st_size > 10_000
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert np.isfinite(np.asarray(session.run(None, encoder_feeds(2, 5))[0])).all()


def test_minilm_build_writes_a_loadable_file(tmp_path: Path) -> None:
    path = minilm.build(tmp_path / "a" / "minilm.onnx", layers=1, hidden=32, heads=4, vocab=50)
    onnx.checker.check_model(str(path), full_check=True)


@pytest.mark.parametrize("build", [lambda: bert.Size(hidden=30, heads=4), lambda: minilm.model(hidden=30, heads=4)])
def test_heads_must_divide_hidden(build: object) -> None:
    assert callable(build)
    with pytest.raises(ValueError, match="hidden must be a multiple of heads, found hidden=30"):
        build()
