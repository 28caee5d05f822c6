"""Saving: where weights go, that a failure leaves nothing behind, and that references stay right."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from fuser import save as module
from fuser.load import load
from fuser.save import save
from models import bert

FEEDS = {name: np.ones((2, 5), np.int64) for name in bert.INPUTS}


def result(path: Path) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    return np.asarray(ort.InferenceSession(path, options).run(None, FEEDS)[0])


def locations(path: Path) -> set[str]:
    """The external files that a model refers to."""
    tensors = onnx.load(path, load_external_data=False).graph.initializer
    return {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}


def add_weight(model: ir.Model, size: int) -> None:
    """A new weight that the graph uses: what packing does."""
    first = model.graph.inputs[0]
    extra = ir.Value(name="extra", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([size]))
    extra.const_value = ir.LazyTensor(
        lambda: ir.tensor(np.zeros(size, np.int64)), dtype=ir.DataType.INT64, shape=ir.Shape([size]), name="extra"
    )
    model.graph.register_initializer(extra)
    kept = ir.node("Slice", [extra, *(scalar(model, number) for number in (0, 1))])
    total = ir.node("Add", [first, kept.outputs[0]])
    first.replace_all_uses_with(total.outputs[0])
    total.replace_input_with(0, first)
    model.graph.insert_before(model.graph[0], [kept, total])


def scalar(model: ir.Model, number: int) -> ir.Value:
    value = ir.Value(name=f"number_{number}", const_value=ir.tensor(np.array([number])))
    model.graph.register_initializer(value)
    return value


def test_small_models_are_one_file(tmp_path: Path) -> None:
    before, after = bert.build(tmp_path / "in.onnx"), tmp_path / "out.onnx"
    save(load(before), after)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.onnx", "out.onnx"]
    np.testing.assert_array_equal(result(before), result(after))


def test_external_weights_stay_where_they_are(tmp_path: Path) -> None:
    before, after = bert.build(tmp_path / "in.onnx", external=True), tmp_path / "out.onnx"
    model = load(before)
    add_weight(model, 1000)
    save(model, after)
    assert locations(after) == {"in.onnx.data", "out.onnx.data"}
    assert 8000 <= (tmp_path / "out.onnx.data").stat().st_size < (tmp_path / "in.onnx.data").stat().st_size // 2
    np.testing.assert_array_equal(result(before), result(after))


def test_external_weights_are_copied_to_another_folder(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    before, after = bert.build(tmp_path / "in.onnx", external=True), tmp_path / "other" / "out.onnx"
    save(load(before), after)
    assert locations(after) == {"out.onnx.data"}
    np.testing.assert_array_equal(result(before), result(after))


def test_a_model_may_replace_itself(tmp_path: Path) -> None:
    path = bert.build(tmp_path / "in.onnx", external=True)
    expected = result(path)
    model = load(path)
    add_weight(model, 1000)
    save(model, path)
    assert locations(path) == {"in.onnx.data"}
    np.testing.assert_array_equal(result(path), expected)


def test_many_weights_go_to_a_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = bert.build(tmp_path / "in.onnx"), tmp_path / "out.onnx"
    monkeypatch.setattr(module, "INLINE_LIMIT", 10_000)
    model = load(before)
    save(model, after)
    assert locations(after) == {"out.onnx.data"}
    assert after.stat().st_size < before.stat().st_size // 2
    np.testing.assert_array_equal(result(before), result(after))
    assert not any(isinstance(v.const_value, ir.ExternalTensor) for v in model.graph.initializers.values())


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    before, after = bert.build(tmp_path / "in.onnx", external=True), tmp_path / "out.onnx"
    after.write_bytes(b"what was there")
    model = load(before)
    add_weight(model, 1000)

    def fail() -> ir.TensorProtocol:
        raise OSError("no space")

    model.graph.initializers["extra"].const_value = ir.LazyTensor(
        fail, dtype=ir.DataType.INT64, shape=ir.Shape([1000]), name="extra"
    )
    with pytest.raises(OSError, match="no space"):
        save(model, after)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.onnx", "in.onnx.data", "out.onnx"]
    assert after.read_bytes() == b"what was there"
