"""`bench` on hand-written kernels: both models are timed, in turns, on inputs that fit."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import verify_models

from models.graph import GraphWriter, write
from runtime.bench import BenchResult, Timing, bench
from runtime.bench_regions import bench_regions
from runtime.compile import optimize
from runtime.inputs import InputError
from runtime.options import Options


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return verify_models.build_library(tmp_path_factory.mktemp("library") / "verify.so")


@pytest.mark.cpu
def test_both_models_are_timed(tmp_path: Path, library: Path) -> None:
    original, fused = verify_models.write(tmp_path, library, ["Linear_right", "Gelu_right"])
    result = bench(fused, original, threads=1, seconds=0.2)
    assert result.fused.runs >= 3
    assert result.original.runs >= 3
    assert 0 < result.fused.min_ms <= result.fused.median_ms
    assert result.shapes == {"x": (128, 8)}
    assert result.ratio == pytest.approx(result.original.median_ms / result.fused.median_ms)
    json = result.to_json()
    assert json["threads"] == 1
    assert json["shapes"] == {"x": [128, 8]}


@pytest.mark.cpu
def test_given_inputs_are_used_and_checked(tmp_path: Path, library: Path) -> None:
    original, fused = verify_models.write(tmp_path, library, ["Linear_right"])
    result = bench(fused, original, inputs={"x": np.zeros((5, 8), np.float32)}, seconds=0.01)
    assert result.shapes == {"x": (5, 8)}
    with pytest.raises(InputError, match="missing x"):
        bench(fused, original, inputs={}, seconds=0.01)


@pytest.mark.cpu
def test_wrong_calls_are_refused(tmp_path: Path, library: Path) -> None:
    original, fused = verify_models.write(tmp_path, library, ["Linear_right"])
    with pytest.raises(ValueError, match="seconds is 0, expected more than 0"):
        bench(fused, original, seconds=0)
    with pytest.raises(FileNotFoundError, match=r"nothing\.onnx"):
        bench(fused, tmp_path / "nothing.onnx")


def test_ratio_above_one_means_the_fused_model_is_faster() -> None:
    result = BenchResult(Timing(2.0, 1.5, 10), Timing(3.0, 2.5, 8), 2, {})
    assert result.ratio == 1.5
    assert str(result) == "fused 2 ms, original 3 ms, 1.50 times as fast (medians of 10 and 8 runs)"


@pytest.mark.cpu
def test_what_hangs_on_dims_alone_is_not_computed_before_it_is_timed(tmp_path: Path) -> None:
    """A table of distances that reads nothing but the length of its input: its nodes take their time, too."""
    graph = GraphWriter(18)
    x = graph.input("x", np.float32, (1, "length"))
    places = graph.op("Range", graph.constant(0), graph.op("Squeeze", graph.op("Shape", x, start=1)), graph.constant(1))
    away = graph.op("Sub", graph.op("Unsqueeze", places, graph.constant([1])), places)
    far = graph.op("Exp", graph.op("Cos", graph.op("Sin", graph.op("Cast", away, to=1))))
    graph.op("Add", far, x, out="y")
    graph.output("y", np.float32, ("length", "length"))
    original, fused = write(graph.finish(), tmp_path / "model.onnx"), tmp_path / "fused.onnx"
    options = replace(Options.from_environment(), fuse_all=True)
    optimize(original, fused, options=options, progress=lambda stage: None, verify=False)
    (timing,) = bench_regions(fused, original, inputs={"x": np.zeros((1, 2000), np.float32)}, threads=1, seconds=0.05)
    table, adding = np.ones((2000, 2000), np.float32), list[float]()
    for _ in range(9):
        start = time.perf_counter()
        np.add(table, table)
        adding.append(time.perf_counter() - start)
    assert timing.unfused_us > 3e6 * min(adding), "no more than the addition was timed"


@pytest.mark.cpu
def test_each_region_is_timed_alone(tmp_path: Path, library: Path) -> None:
    original, fused = verify_models.write(tmp_path, library, ["Linear_right", "Gelu_right"])
    timings = bench_regions(fused, original, threads=1, seconds=0.05)
    assert [timing.op for timing in timings] == ["Linear_right", "Gelu_right"]
    assert all(timing.times == 1 and timing.fused_us > 0 and timing.unfused_us > 0 for timing in timings)
    assert all(timing.predicted_fused_us is None for timing in timings)  # nobody predicted anything for these
    assert timings[0].to_json()["ratio"] == timings[0].unfused_us / timings[0].fused_us
    with pytest.raises(ValueError, match="seconds is 0, expected more than 0"):
        bench_regions(fused, original, seconds=0)
