"""Convolutions from file to result: compiled for AVX2 and for this machine, in float32 and with bfloat16 operands."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest

from models.graph import GraphWriter, write
from runtime.compile import optimize
from runtime.options import Options
from runtime.session import DOMAIN, load
from tilecore.profile import detect_profile

pytestmark = pytest.mark.cpu

LAYERS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {  # weight [columns, channels, taps …], attributes
    "padded": ((40, 33, 3), {"pads": [1, 1]}),
    "strided": ((24, 33, 3), {"pads": [1, 1], "strides": [2]}),
    "dilated": ((17, 33, 5), {"pads": [3, 1], "dilations": [2]}),
    "plane": ((20, 32, 3, 2), {"pads": [1, 0, 1, 1], "strides": [2, 1]}),
    "patches": ((48, 3, 16, 16), {"strides": [16, 16]}),
}
INPUTS = {"sound": (33,), "image": (32, 5), "picture": (3, 32)}
READ = {"padded": "sound", "strided": "sound", "dilated": "sound", "plane": "image", "patches": "picture"}


def original(path: Path) -> Path:
    g = GraphWriter(17)
    for name, shape in INPUTS.items():
        g.input(name, np.float32, ("batch", *shape, f"{name}_length"))
    for name, (shape, attributes) in LAYERS.items():
        weight = g.normal(shape, std=1 / np.sqrt(np.prod(shape[1:])), name=f"{name}_weight")
        made = g.op("Conv", READ[name], weight, g.normal(shape[:1], std=1, name=f"{name}_bias"), **attributes)
        g.op("Relu", made, out=name)
        g.output(name, np.float32, ("batch", shape[0], *(None for _ in shape[2:])))
    return write(g.finish(), path)


def convolved(x: np.ndarray, w: np.ndarray, bias: np.ndarray, attributes: dict[str, Any]) -> np.ndarray:
    """The layer in float64, tap by tap."""
    rank = w.ndim - 2
    strides, dilations = (attributes.get(name, [1] * rank) for name in ("strides", "dilations"))
    pads = attributes.get("pads", [0] * 2 * rank)
    padded = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)])
    sizes = [
        (size - (taps - 1) * dilation - 1) // stride + 1
        for size, taps, stride, dilation in zip(padded.shape[2:], w.shape[2:], strides, dilations, strict=True)
    ]
    total = np.zeros((len(x), len(w), *sizes))
    for tap in np.ndindex(*w.shape[2:]):
        places = tuple(
            slice(at * dilation, at * dilation + (size - 1) * stride + 1, stride)
            for at, dilation, stride, size in zip(tap, dilations, strides, sizes, strict=True)
        )
        total += np.einsum("bc...,oc->bo...", padded[:, :, *places], w[:, :, *tap].astype(np.float64))
    return np.maximum(total + bias.reshape(-1, *[1] * rank), 0)


@pytest.fixture(scope="module", params=["float32", "bf16"])
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, object_cache: Path
) -> tuple[Path, dict[str, Path], str]:
    folder = tmp_path_factory.mktemp("convolutions")
    model, fused = original(folder / "model.onnx"), dict[str, Path]()
    for target in ("x86-64-v3", detect_profile().target.name):
        options = Options(cache=object_cache.parent, fuse_all=True, target=target, precision=request.param)
        fused[target] = folder / f"{target}.onnx"
        report = optimize(model, fused[target], options=options, progress=lambda stage: None)
        assert not report.faults
        assert {node.domain for node in onnx.load(fused[target]).graph.node} == {DOMAIN}
    return model, fused, request.param


@pytest.mark.parametrize("length", [16, 17, 50, 131])
def test_results_are_those_of_the_operator(models: tuple[Path, dict[str, Path], str], length: int) -> None:
    path, fused, precision = models
    random = np.random.default_rng(length)
    feeds = {name: random.standard_normal((2, *shape, length), dtype=np.float32) for name, shape in INPUTS.items()}
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    runtime = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    theirs = dict(zip(LAYERS, runtime.run(list(LAYERS), feeds), strict=True))

    def operand(array: np.ndarray) -> np.ndarray:
        return array.astype(ml_dtypes.bfloat16).astype(np.float64) if precision == "bf16" else array

    for where in fused.values():
        ours = load(where).run(list(LAYERS), feeds)
        for (name, (_, attributes)), got in zip(LAYERS.items(), ours, strict=True):
            x, w = operand(feeds[READ[name]]), operand(weights[f"{name}_weight"])
            want = convolved(x, w, weights[f"{name}_bias"], attributes)
            assert np.asarray(got).shape == np.asarray(theirs[name]).shape == want.shape
            np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=2e-5, err_msg=f"{name} of {where}")
            if precision == "float32":
                np.testing.assert_allclose(np.asarray(got), np.asarray(theirs[name]), rtol=0, atol=2e-5, err_msg=name)


def test_function_bodies_say_the_same_without_the_library(models: tuple[Path, dict[str, Path], str]) -> None:
    _, fused, precision = models
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal((1, *shape, 35), dtype=np.float32) for name, shape in INPUTS.items()}
    where = list(fused.values())[-1]
    bodies = ort.InferenceSession(where, providers=["CPUExecutionProvider"]).run(list(LAYERS), feeds)
    for name, got, body in zip(LAYERS, load(where).run(list(LAYERS), feeds), bodies, strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(body), rtol=0, atol=2e-5, err_msg=f"{name}, {precision}")


def test_what_is_padded_meets_infinite_weights_as_zero(tmp_path: Path, object_cache: Path) -> None:
    """0 · inf is NaN, as where a graph pads first."""
    weight = np.ones((20, 16, 3), np.float32)
    weight[3, 5, 0] = np.inf
    g = GraphWriter(17)
    x = g.input("x", np.float32, (1, 16, "length"))
    g.op("Conv", x, g.initializer(weight), out="y", pads=[1, 1])
    g.output("y", np.float32, (1, 20, "length"))
    path = write(g.finish(), tmp_path / "model.onnx")
    options = replace(Options(cache=object_cache.parent), fuse_all=True, target=detect_profile().target.name)
    optimize(path, tmp_path / "fused.onnx", options=options, progress=lambda stage: None)
    feeds = {"x": np.ones((1, 16, 9), np.float32)}
    (ours,) = load(tmp_path / "fused.onnx").run(None, feeds)
    expected = np.full((1, 20, 9), 48, np.float32)
    expected[:, :, [0, -1]] = 32
    expected[0, 3], expected[0, 3, 0] = np.inf, np.nan
    np.testing.assert_array_equal(np.asarray(ours), expected)
    (theirs,) = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feeds)
    np.testing.assert_array_equal(np.asarray(theirs), expected)
