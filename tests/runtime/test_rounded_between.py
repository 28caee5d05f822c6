"""`--precision bf16` stores what only operands of products read as bfloat16: where, and with the same numbers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper

from models.graph import GraphWriter
from runtime.bench_regions import bench_regions
from runtime.compile import fuse, optimize
from runtime.options import Options
from runtime.session import DOMAIN, load
from runtime.verify import verify

pytestmark = pytest.mark.cpu
OPTIONS = replace(Options.from_environment(), precision="bf16", fuse_all=True)
DEPTH, WIDTH = 48, 80
Reader = Callable[[GraphWriter, str], None]


def layers(path: Path, more: Reader = lambda g, h: None, *, between: str = "Relu") -> Path:
    """y = f(x · A + a) · B + b, and what `more` makes of f(x · A + a), which is called "h"."""
    g = GraphWriter(17, seed=3)
    x = g.input("x", np.float32, ("batch", "seq", DEPTH))
    h = g.op("Add", g.op("MatMul", x, g.normal((DEPTH, WIDTH), std=0.1)), g.normal((WIDTH,), std=0.1))
    h = g.op(between, h, out="h")
    g.op("Add", g.op("MatMul", h, g.normal((WIDTH, 32), std=0.1)), g.normal((32,), std=0.1), out="y")
    g.output("y", np.float32, ("batch", "seq", 32))
    more(g, h)
    onnx.save(g.finish(), path)
    return path


def narrow_values(path: Path) -> set[str]:
    """Names of values between nodes that are bfloat16."""
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    stored = {tensor.name for tensor in model.graph.initializer}
    typed = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
    return {name for name, kind in typed.items() if kind == TensorProto.BFLOAT16 and name not in stored}


def fused(original: Path) -> Path:
    path = original.with_suffix(".fused.onnx")
    assert not optimize(original, path, options=OPTIONS, progress=lambda stage: None).faults
    assert verify(original, path).ok
    return path


@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (1, 37), (3, 64)])
def test_a_layer_that_the_next_one_rounds_is_stored_rounded(shape: tuple[int, int], tmp_path: Path) -> None:
    original = layers(tmp_path / "a.onnx")
    path = fused(original)
    assert narrow_values(path) == {"h"}
    weights = [numpy_helper.to_array(tensor).astype(np.float64) for tensor in onnx.load(original).graph.initializer]
    (a, b), (bias, last) = (sorted((w for w in weights if w.ndim == n), key=lambda w: -w.size) for n in (2, 1))
    x = np.random.default_rng(5).standard_normal((*shape, DEPTH), dtype=np.float32)
    inner = np.maximum(rounded(x) @ rounded(a) + bias, 0)
    want = rounded(inner) @ rounded(b) + last
    for provider in (False, True):
        (got,) = load(path, provider=provider).run(None, {"x": x})
        np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=4e-3)  # sums near a middle round either way
    bodies = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(np.asarray(bodies.run(None, {"x": x})[0]), want, rtol=0, atol=4e-3)


def rounded(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def test_what_is_not_finite_arrives_as_it_would(tmp_path: Path) -> None:
    """3e38 · 2 is inf in float32, and 3.4e38 rounds to inf in bfloat16: both before and after."""
    original = layers(tmp_path / "a.onnx")
    wide = original.with_suffix(".wide.onnx")
    options = replace(OPTIONS, precision="f32")
    optimize(original, wide, options=options, progress=lambda stage: None)
    x = np.random.default_rng(5).standard_normal((1, 6, DEPTH), dtype=np.float32)
    x[0, 1, 3], x[0, 2, 5], x[0, 3, 7] = np.nan, np.inf, -np.inf
    got, want = (np.asarray(load(path).run(None, {"x": x})[0]) for path in (fused(original), wide))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))
    assert np.isfinite(got[0, [0, 4, 5]]).all()


def output(g: GraphWriter, h: str) -> None:
    g.output(h, np.float32, ("batch", "seq", WIDTH))


def other_operator(g: GraphWriter, h: str) -> None:
    g.op("CumSum", h, g.constant(np.array(1)), out="z")
    g.output("z", np.float32, ("batch", "seq", WIDTH))


def sum_in_float32(g: GraphWriter, h: str) -> None:
    g.op("Add", g.op("MatMul", h, g.normal((WIDTH, WIDTH), std=0.1)), h, out="z")
    g.output("z", np.float32, ("batch", "seq", WIDTH))


def branch(g: GraphWriter, h: str) -> None:
    """Reads it in the bodies of an If."""

    def body() -> None:
        g.op("CumSum", h, g.constant(np.array(1)), out="part")
        g.output("part", np.float32, ("batch", "seq", WIDTH))

    flag = g.input("flag", np.bool_, ())
    g.op("If", flag, out="z", then_branch=g.body("then", body), else_branch=g.body("else", body))
    g.output("z", np.float32, ("batch", "seq", WIDTH))


@pytest.mark.parametrize("more", [output, other_operator, sum_in_float32, branch])
def test_what_else_reads_it_keeps_it_wide(more: Reader, tmp_path: Path) -> None:
    assert narrow_values(fused(layers(tmp_path / "a.onnx", more))) == set()


def second_product(g: GraphWriter, h: str) -> None:
    g.op("Sigmoid", g.op("MatMul", h, g.normal((WIDTH, 16), std=0.1)), out="z")
    g.output("z", np.float32, ("batch", "seq", 16))


def shape_of_it(g: GraphWriter, h: str) -> None:
    g.op("Identity", g.op("Shape", h), out="z")
    g.output("z", np.int64, (3,))


@pytest.mark.parametrize("more", [second_product, shape_of_it])
def test_what_rounds_it_too_or_asks_for_its_shape_does_not(more: Reader, tmp_path: Path) -> None:
    assert narrow_values(fused(layers(tmp_path / "a.onnx", more))) == {"h"}


def test_a_region_that_is_left_out_reads_what_it_did(tmp_path: Path) -> None:
    """Its nodes run in ONNX Runtime, in float32: so the layer before stores that."""
    original = layers(tmp_path / "a.onnx")
    whole = fuse(original, OPTIONS, lambda stage: None, {}, frozenset())
    assert [[value.name for value in part.region.stored] for part in whole.parts] == [["h"], ["h"]]
    less = fuse(original, OPTIONS, lambda stage: None, {}, frozenset({whole.parts[1].outputs}))
    (part,), (dropped,) = less.parts, less.dropped
    assert not part.region.stored
    assert [value.name for value in dropped.region.stored] == ["h"]  # as it was when it was found wrong


def test_regions_with_such_inputs_are_timed_alone(tmp_path: Path) -> None:
    original = layers(tmp_path / "a.onnx")
    timings = bench_regions(fused(original), original, seconds=0.01)
    assert len(timings) == len([n for n in onnx.load(fused(original)).graph.node if n.domain == DOMAIN]) == 2


@pytest.mark.parametrize("scale", ["scores", "queries"])
def test_queries_keys_and_values_are_stored_rounded_unless_they_are_scaled_first(scale: str, tmp_path: Path) -> None:
    g = GraphWriter(17, seed=3)
    x = g.input("x", np.float32, ("batch", "seq", 64))
    heads: list[str] = []
    for name in "qkv":
        part = g.op("Add", g.op("MatMul", x, g.normal((64, 64), std=0.2)), g.normal((64,), std=0.2), out=name)
        if name == "q" and scale == "queries":
            part = g.op("Mul", part, g.constant(np.float32(0.3)))
        part = g.op("Reshape", part, g.constant(np.array([0, 0, 2, 32])))
        heads.append(g.op("Transpose", part, perm=[0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]))
    scores = g.op("MatMul", *heads[:2])
    scores = g.op("Mul", scores, g.constant(np.float32(0.3))) if scale == "scores" else scores
    mixed = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), heads[2]), perm=[0, 2, 1, 3])
    mixed = g.op("Reshape", mixed, g.constant(np.array([0, 0, 64])), out="mixed")
    g.op("Add", g.op("MatMul", mixed, g.normal((64, 64), std=0.2)), x, out="y")
    g.output("y", np.float32, ("batch", "seq", 64))
    onnx.save(g.finish(), tmp_path / "a.onnx")
    want = {"q", "k", "v", "mixed"} - ({"q"} if scale == "queries" else set())
    assert narrow_values(fused(tmp_path / "a.onnx")) & {"q", "k", "v", "mixed"} == want
