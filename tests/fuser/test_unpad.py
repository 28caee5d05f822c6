"""Models without their padding against the models themselves: equal at the tokens, zero at the padding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from fuser.load import load
from fuser.unpad import UnpadError, hide_padding, unpad
from models import bert, blocks, minilm
from models.graph import GraphWriter, write

Array = np.ndarray[Any, Any]
HIDDEN, VOCABULARY = 32, 50
ENCODERS: dict[str, Callable[[Path], Path]] = {
    "MiniLM": lambda path: minilm.build(path, layers=2, hidden=HIDDEN, heads=2, vocab=VOCABULARY),
    "BERT, TorchScript": lambda path: bert.build(path, exporter="torchscript", size=bert.Size(layers=2)),
    "BERT, dynamo": lambda path: bert.build(path, exporter="dynamo", size=bert.Size(layers=2)),
}
MASKS = {
    "lengths": [[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0]],
    "holes": [[1, 0, 1, 0, 1, 1, 0], [1, 1, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1, 1]],
    "left": [[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1]],
    "all": [[1] * 7] * 3,
}


def feeds_for(session: ort.InferenceSession, mask: Array) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    feeds: dict[str, Array] = {}
    for value in session.get_inputs():
        if value.name == "attention_mask":
            feeds[value.name] = mask.astype(np.bool_ if value.type == "tensor(bool)" else np.int64)
        elif value.type == "tensor(float)":
            feeds[value.name] = rng.standard_normal((*mask.shape, HIDDEN), dtype=np.float32)
        else:
            feeds[value.name] = rng.integers(0, 2, mask.shape)
    return feeds


def session_of(model: str | bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(model: str | bytes, feeds: dict[str, Array], names: list[str] | None = None) -> list[Array]:
    return [np.asarray(result) for result in session_of(model).run(names, feeds)]


def unpadded(path: Path, mask: str = "attention_mask") -> onnx.ModelProto:
    model = load(path)
    unpad(model, mask)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def check(path: Path, mask: Array) -> onnx.ModelProto:
    """Every output of the changed model against the original's; returns the changed model."""
    changed = unpadded(path)
    original = session_of(str(path))
    feeds = feeds_for(original, mask)
    results = run(changed.SerializeToString(), feeds)
    for value, expected, actual in zip(original.get_outputs(), run(str(path), feeds), results, strict=True):
        assert actual.dtype == expected.dtype
        if expected.shape[:2] == mask.shape:
            expected = np.where(mask.reshape(*mask.shape, *[1] * (expected.ndim - 2)) != 0, expected, 0)
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5, err_msg=value.name)
    return changed


def rows_of(changed: onnx.ModelProto, feeds: dict[str, Array], op_type: str) -> list[tuple[int, ...]]:
    """The shapes that the results of `op_type` have in a run."""
    changed = onnx.ModelProto.FromString(changed.SerializeToString())
    names = [node.output[0] for node in changed.graph.node if node.op_type == op_type]
    changed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return [found.shape for found in run(changed.SerializeToString(), feeds, names)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("encoder", ENCODERS)
def test_encoders_give_the_same_at_every_token(tmp_path: Path, encoder: str, mask: str) -> None:
    path = ENCODERS[encoder](tmp_path / "model.onnx")
    check(path, np.array(MASKS[mask]))


def test_projections_and_norms_see_tokens_only(tmp_path: Path) -> None:
    path = ENCODERS["MiniLM"](tmp_path / "model.onnx")
    mask = np.array(MASKS["lengths"])
    changed = check(path, mask)
    feeds = feeds_for(session_of(str(path)), mask)
    tokens = int(mask.sum())
    assert set(rows_of(changed, feeds, "LayerNormalization")) == {(1, tokens, HIDDEN)}
    inner = [shape for shape in rows_of(changed, feeds, "MatMul") if len(shape) == 3]
    assert len(inner) == 12
    assert {shape[:2] for shape in inner} == {(1, tokens)}


def begin(path: Path, *, mask_type: type = np.int64) -> tuple[GraphWriter, str, str]:
    """A graph with a mask and one projection of its input."""
    g = GraphWriter(17)
    x = g.input("x", np.float32, ("batch", "seq", HIDDEN))
    mask = g.input("attention_mask", mask_type, ("batch", "seq"))
    return g, blocks.linear(g, x, (HIDDEN, HIDDEN)), mask


def end(g: GraphWriter, path: Path, result: str, dims: tuple[int | str, ...], dtype: type = np.float32) -> Path:
    g.output(result, dtype, dims)
    return write(g.finish(), path)


def test_means_by_the_mask_are_right(tmp_path: Path) -> None:
    g, y, mask = begin(tmp_path)
    wide = g.op("Unsqueeze", g.op("Cast", mask, to=onnx.TensorProto.FLOAT), g.constant([2]))
    total = g.op("ReduceSum", g.op("Mul", y, wide), g.constant([1]), keepdims=0)
    mean = g.op("Div", total, g.op("ReduceSum", wide, g.constant([1]), keepdims=0))
    check(end(g, tmp_path / "m.onnx", mean, ("batch", HIDDEN)), np.array(MASKS["holes"]))


def test_maxima_over_shown_tokens_are_right(tmp_path: Path) -> None:
    """What a Where by the mask writes at the padding must survive: it is not put back as zero."""
    g, y, mask = begin(tmp_path, mask_type=np.bool_)
    low = g.op("Where", g.op("Unsqueeze", mask, g.constant([2])), y, g.constant(np.float32(-1e9)))
    best = g.op("ReduceMax", g.op("Sub", low, g.constant(np.float32(100.0))), axes=[1], keepdims=0)
    check(end(g, tmp_path / "m.onnx", best, ("batch", HIDDEN)), np.array(MASKS["lengths"]))


def test_the_first_token_is_its_sequences_own(tmp_path: Path) -> None:
    g, y, _ = begin(tmp_path)
    first = g.op("Gather", y, g.constant(0), axis=1)
    check(end(g, tmp_path / "m.onnx", first, ("batch", HIDDEN)), np.array(MASKS["holes"]))


def test_tokens_in_one_flat_dim_are_tokens_too(tmp_path: Path) -> None:
    g, y, _ = begin(tmp_path)
    flat = g.op("Reshape", y, g.constant([-1, HIDDEN]))
    z = blocks.gelu(g, blocks.gemm(g, flat, (HIDDEN, 2 * HIDDEN)))
    shape = g.op("Concat", g.op("Shape", y, start=0, end=2), g.constant([2 * HIDDEN]), axis=0)
    back = g.op("Reshape", blocks.layer_norm(g, z, 2 * HIDDEN), shape)
    path = end(g, tmp_path / "m.onnx", back, ("batch", "seq", 2 * HIDDEN))
    mask = np.array(MASKS["lengths"])
    changed = check(path, mask)
    feeds = feeds_for(session_of(str(path)), mask)
    assert rows_of(changed, feeds, "Gemm") == [(int(mask.sum()), 2 * HIDDEN)]


def test_softmax_split_slice_and_concat_inside_a_token_are_per_token(tmp_path: Path) -> None:
    g, y, _ = begin(tmp_path)
    left, right = g.ops("Split", y, g.constant([8, HIDDEN - 8]), outs=(None, None), axis=2)
    weights = g.op("Softmax", g.op("Slice", right, g.constant([3]), g.constant([11]), g.constant([2])), axis=-1)
    z = blocks.linear(g, g.op("Concat", g.op("Mul", left, weights), weights, axis=-1), (16, HIDDEN))
    mask = np.array(MASKS["holes"])
    path = end(g, tmp_path / "m.onnx", z, ("batch", "seq", HIDDEN))
    changed = check(path, mask)
    assert {shape[:2] for shape in rows_of(changed, feeds_for(session_of(str(path)), mask), "Softmax")} == {
        (1, int(mask.sum()))
    }


def test_classes_at_the_padding_are_zero(tmp_path: Path) -> None:
    """Outputs that are computed from padded tensors are hidden all the same, in their own type."""
    g, y, _ = begin(tmp_path)
    best = g.op("ArgMax", y, axis=-1, keepdims=0)
    check(end(g, tmp_path / "m.onnx", best, ("batch", "seq"), np.int64), np.array(MASKS["lengths"]))


def test_what_mixes_tokens_reads_padded_tensors(tmp_path: Path) -> None:
    """A softmax, a norm and a transposition over the sequence are not per token: they see zeros at the padding."""
    g, y, mask = begin(tmp_path)
    hidden = g.op("Mul", y, g.op("Unsqueeze", g.op("Cast", mask, to=onnx.TensorProto.FLOAT), g.constant([2])))
    total = g.op("CumSum", hidden, g.constant(1))
    turned = g.op("Transpose", total, perm=[0, 2, 1])
    z = blocks.linear(g, g.op("Transpose", turned, perm=[0, 2, 1]), (HIDDEN, HIDDEN))
    check(end(g, tmp_path / "m.onnx", z, ("batch", "seq", HIDDEN)), np.array(MASKS["holes"]))


def test_a_batch_of_one_place_is_no_token_axis(tmp_path: Path) -> None:
    """A value [batch, seq, seq] leads with the mask's dims, but its rest is not a number: it stays padded."""
    g, y, mask = begin(tmp_path)
    scores = g.op("MatMul", y, g.op("Transpose", y, perm=[0, 2, 1]))
    bias = g.op("Mul", g.op("Sub", g.constant(1.0), g.op("Cast", mask, to=onnx.TensorProto.FLOAT)), g.constant(-1e9))
    shown = g.op("Softmax", g.op("Add", scores, g.op("Unsqueeze", bias, g.constant([1]))), axis=-1)
    z = blocks.linear(g, g.op("MatMul", shown, y), (HIDDEN, HIDDEN))
    check(end(g, tmp_path / "m.onnx", z, ("batch", "seq", HIDDEN)), np.array(MASKS["lengths"]))


def test_hidden_padding_changes_nothing_else(tmp_path: Path) -> None:
    path = ENCODERS["MiniLM"](tmp_path / "model.onnx")
    model = ir.from_proto(onnx.load(path))
    hide_padding(model, "attention_mask")
    original, mask = session_of(str(path)), np.array(MASKS["holes"])
    feeds = feeds_for(original, mask)
    (expected,) = run(str(path), feeds)
    (actual,) = run(ir.to_proto(model).SerializeToString(), feeds)
    np.testing.assert_array_equal(actual, np.where(mask[..., None] != 0, expected, 0))


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ("mask", "no input 'mask' to tell padding by; its inputs are x, attention_mask"),
        ("x", r"the mask 'x' is .*, expected \[batch, length\]"),
    ],
)
def test_what_cannot_be_the_mask_is_refused(tmp_path: Path, mask: str, reason: str) -> None:
    g, y, _ = begin(tmp_path)
    path = end(g, tmp_path / "m.onnx", y, ("batch", "seq", HIDDEN))
    with pytest.raises(UnpadError, match=reason):
        unpadded(path, mask)


def test_a_model_without_projections_is_refused(tmp_path: Path) -> None:
    g = GraphWriter(17)
    x = g.input("x", np.float32, ("batch", "seq", HIDDEN))
    g.input("attention_mask", np.int64, ("batch", "seq"))
    path = end(g, tmp_path / "m.onnx", g.op("Relu", x), ("batch", "seq", HIDDEN))
    with pytest.raises(UnpadError, match="nothing would be saved"):
        unpadded(path)


def test_an_old_opset_is_refused(tmp_path: Path) -> None:
    path = minilm.build(tmp_path / "old.onnx", layers=1, hidden=HIDDEN, heads=2, vocab=VOCABULARY, opset=12)
    with pytest.raises(UnpadError, match="opset 13 or later; this one has 12"):
        unpadded(path)
