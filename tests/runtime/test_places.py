"""Where outputs may be written, what is said where not, and which leftovers are removed."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from runtime.compile import CompileError, explain, optimize
from runtime.options import Options
from runtime.places import LEFT_BEHIND, PlaceError, check_output, check_place, passing, reason

OLD = LEFT_BEHIND + 60


@pytest.fixture
def model(tmp_path: Path) -> Path:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "graph", [x], [y])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def folder_model(tmp_path: Path) -> Path:
    (tmp_path / "taken.onnx").mkdir()
    return tmp_path / "taken.onnx"


def folder_library(tmp_path: Path) -> Path:
    (tmp_path / "out.so").mkdir()
    return tmp_path / "out.onnx"


def linked(tmp_path: Path) -> Path:
    (tmp_path / "linked.onnx").symlink_to(tmp_path / "model.onnx")
    return tmp_path / "linked.onnx"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (lambda folder: folder / "out", "must end in .onnx"),
        (lambda folder: folder / "none" / "out.onnx", "none is not a folder: make it first"),
        (folder_model, "taken.onnx is a folder: name a file"),
        (folder_library, "out.so is a folder: name a file"),
        (lambda folder: Path("/proc/out.onnx"), "cannot write to the folder /proc: .*; name another one"),
        (lambda folder: folder / "model.onnx", "model.onnx is the model itself, which would be lost: name another"),
        (linked, "linked.onnx is the model itself"),
    ],
    ids=["suffix", "no folder", "model", "library", "not writable", "itself", "itself, linked"],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    place: Callable[[Path], Path], words: str, model: Path, tmp_path: Path
) -> None:
    output = place(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CompileError, match=words):
        optimize(model, output, options=Options(cache=tmp_path / "cache"), progress=lambda stage: pytest.fail(stage))
    assert sorted(tmp_path.iterdir()) == before


def test_a_page_has_a_place_too(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="cannot write to the folder /proc: "):
        explain(model, options=Options(cache=tmp_path / "cache"), page=Path("/proc/page.html"))
    with pytest.raises(PlaceError, match="is a folder: name a file"):
        check_place(tmp_path)


def test_weights_of_the_original_are_not_replaced(tmp_path: Path) -> None:
    """A model that was renamed, but not its weights: what takes its old name would write its weights over them."""
    weight = numpy_helper.from_array(np.arange(4096, dtype=np.float32).reshape(64, 64), "w")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 64]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "graph", [x], [y], [weight])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    old, renamed, data = tmp_path / "model.onnx", tmp_path / "renamed.onnx", tmp_path / "model.onnx.data"
    onnx.save(proto, old, save_as_external_data=True, location=data.name, size_threshold=0)
    old.rename(renamed)
    before = data.read_bytes()
    with pytest.raises(CompileError, match=r"its weights would replace .*model\.onnx\.data, which holds those of"):
        optimize(renamed, old, options=Options(cache=tmp_path / "cache"), progress=lambda stage: None)
    assert data.read_bytes() == before
    assert sorted(path.name for path in tmp_path.glob("*model*")) == [data.name]


def test_only_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    output = tmp_path / "out[1].onnx"  # a name that a shell would take for a pattern
    left = passing(output, 123)
    old = [left.model, left.library, left.weights, *(tmp_path / f".out[1].onnx{d}.9.tmp" for d in ("", ".data"))]
    kept = [
        passing(output, 124).model,  # somebody is at work on it
        *(
            tmp_path / name
            for name in ("out[1].onnx", "out[1].so", ".out[1].notes.onnx", ".out1.123.onnx", ".out.1.so")
        ),
    ]
    for path in (*old, *kept):
        path.touch()
        os.utime(path, (time.time() - OLD, time.time() - OLD))
    os.utime(kept[0])
    check_output(output, tmp_path / "model.onnx")
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_passing_files_are_not_named_to_the_user() -> None:
    assert reason(OSError(28, "No space left on device", "/x/.out.12.onnx")) == "No space left on device"
    assert reason(OSError(28, "No space left on device", "/c/k.so", None, "/x/.o.so")) == "No space left on device"
    assert reason(OSError(13, "Permission denied", "/x/model.data")) == "Permission denied (/x/model.data)"
    assert reason(OSError("odd")) == "odd"
