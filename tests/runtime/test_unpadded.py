"""Fused models that leave out padding: checked where tokens are, refused where the original does not ignore padding."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from models import blocks, minilm
from models.graph import GraphWriter, write
from runtime.compile import CompileError, optimize
from runtime.options import Options
from runtime.session import load
from runtime.unpadded import padding_mask, with_first_token

HIDDEN = 64


def test_every_sequence_of_generated_inputs_has_a_token() -> None:
    mask = np.array([[1, 0], [0, 0]])
    shown = with_first_token({"mask": mask, "x": np.zeros(1)}, "mask")
    assert shown["mask"].tolist() == [[1, 0], [1, 0]]
    assert mask.tolist() == [[1, 0], [0, 0]]
    assert with_first_token({"mask": mask}, None)["mask"] is mask


def unpadded(model: Path, output: Path) -> None:
    options = replace(Options.from_environment(), unpad="attention_mask")
    optimize(model, output, options=options, progress=lambda stage: None)


@pytest.mark.cpu
def test_a_fused_encoder_is_right_at_tokens_and_zero_at_padding(tmp_path: Path) -> None:
    path = minilm.build(tmp_path / "model.onnx", layers=1, hidden=HIDDEN, heads=2, vocab=50)
    fused = tmp_path / "fused.onnx"
    unpadded(path, fused)
    assert padding_mask(onnx.load(fused)) == "attention_mask"
    rng = np.random.default_rng(0)
    for lengths in ((7, 40, 1), (3, 3, 3), (129,)):
        size = max(lengths)
        mask = (np.arange(size) < np.array(lengths)[:, None]).astype(np.int64)
        feeds = {
            "input_ids": rng.integers(0, 50, mask.shape),
            "attention_mask": mask,
            "token_type_ids": rng.integers(0, 2, mask.shape),
        }
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        expected = np.asarray(session.run(None, feeds)[0])
        actual = np.asarray(load(fused).run(None, feeds)[0])
        np.testing.assert_allclose(actual, np.where(mask[..., None] != 0, expected, 0), atol=2e-5, rtol=0)


@pytest.mark.cpu
def test_every_sequence_gets_what_it_gets_alone(tmp_path: Path) -> None:
    """Masks with holes, sequences without tokens and empty batches; the oracle runs the tokens of one sequence."""
    path = minilm.build(tmp_path / "model.onnx", layers=2, hidden=HIDDEN, heads=2, vocab=50)
    fused = tmp_path / "fused.onnx"
    unpadded(path, fused)
    labels = [entry.value for node in onnx.load(fused).graph.node for entry in node.metadata_props]
    assert labels.count("attention, masked, ragged") == 2
    original = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    session = load(fused)
    rng = np.random.default_rng(1)
    masks = [rng.random((5, 37)) < share for share in (0.1, 0.5, 0.9)]
    masks += [np.zeros((2, 3), np.bool_), np.ones((1, 1), np.bool_), np.zeros((0, 4), np.bool_)]
    masks[0][2] = False
    for mask in masks:
        ids, types = rng.integers(0, 50, mask.shape), rng.integers(0, 2, mask.shape)
        feeds = {"input_ids": ids, "attention_mask": mask.astype(np.int64), "token_type_ids": types}
        answer = np.asarray(session.run(None, feeds)[0])
        assert answer.shape == (*mask.shape, HIDDEN)
        assert not answer[~mask].any()
        for number in np.flatnonzero(mask.any(axis=1)):
            last = int(np.flatnonzero(mask[number])[-1]) + 1
            alone = {name: value[number : number + 1, :last] for name, value in feeds.items()}
            expected = np.asarray(original.run(None, alone)[0])[0]
            kept = mask[number, :last]
            np.testing.assert_allclose(answer[number, :last][kept], expected[kept], atol=2e-5, rtol=0)


@pytest.mark.cpu
def test_a_model_that_does_not_ignore_padding_is_refused(tmp_path: Path) -> None:
    """A mean over all places counts the padding: without it the result would be another one."""
    g = GraphWriter(17)
    x = g.input("x", np.float32, ("batch", "seq", HIDDEN))
    g.input("attention_mask", np.int64, ("batch", "seq"))
    y = blocks.linear(g, x, (HIDDEN, HIDDEN))
    mean = g.op("ReduceMean", y, axes=[1], keepdims=0)
    g.output(mean, np.float32, ("batch", HIDDEN))
    path = write(g.finish(), tmp_path / "model.onnx")
    with pytest.raises(CompileError, match="differs from the original"):
        unpadded(path, tmp_path / "fused.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
