"""Every graph of the catalogues is valid, runs at two sizes, and means the same to two independent evaluators."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from models.attention import SPELLINGS
from models.catalogue import Entry
from models.traps import TRAPS
from runtime.compare import is_rounding
from runtime.oracle import evaluate

ENTRIES = (*SPELLINGS, *TRAPS)


def plain_session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def test_names_are_unique() -> None:
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names)


def check_validity(model: onnx.ModelProto) -> None:
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_symbolic_graph_is_valid_and_agrees_between_evaluators(entry: Entry) -> None:
    model = entry.build(dynamic=True)
    check_validity(model)
    session = plain_session(model)
    names = [output.name for output in model.graph.output]
    for sizes in entry.sizes:
        feeds = entry.feeds(sizes)
        truth = evaluate(model, Path(), feeds, names).values
        for name, value in zip(names, session.run(names, feeds), strict=True):
            found, wanted = np.asarray(value), truth[name]
            assert found.shape == wanted.shape
            assert np.array_equal(np.isnan(found), np.isnan(wanted)), f"{name} at {sizes}"
            assert is_rounding(found, wanted), f"{name} at {sizes}"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_static_graph_is_the_symbolic_one_at_its_first_sizes(entry: Entry) -> None:
    feeds = entry.feeds(entry.sizes[0])
    static = entry.build(dynamic=False)
    check_validity(static)
    values = (*static.graph.input, *static.graph.output)
    assert all(dim.HasField("dim_value") for value in values for dim in value.type.tensor_type.shape.dim)
    results = [plain_session(model).run(None, feeds) for model in (static, entry.build(dynamic=True))]
    for alone, symbolic in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(alone), np.asarray(symbolic))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("bert_infinite", np.isnan), ("guarded", np.isfinite), ("clipped", np.isfinite), ("bert_lowest", np.isfinite)],
)
def test_row_without_visible_keys_gives_what_the_graph_says(name: str, expected: Callable[..., np.ndarray]) -> None:
    (entry,) = (entry for entry in SPELLINGS if entry.name == name)
    feeds = entry.feeds(entry.sizes[0])
    assert not feeds["mask"][1].any(), "the feeds should hide every key of row 1"
    (y,) = plain_session(entry.build(dynamic=True)).run(None, feeds)
    assert expected(np.asarray(y)[1]).all()
    assert np.isfinite(np.asarray(y)[[0, 2]]).all()


def test_masks_matter() -> None:
    """Otherwise a fuser that drops the mask would pass."""
    for entry in SPELLINGS:
        feeds = entry.feeds(entry.sizes[0])
        if "mask" not in feeds:
            continue
        session = plain_session(entry.build(dynamic=True))
        masked = np.asarray(session.run(["y"], feeds)[0])
        seen = np.asarray(session.run(["y"], feeds | {"mask": np.ones_like(feeds["mask"])})[0])
        assert np.abs(masked[0] - seen[0]).max() > 1e-2, entry.name
