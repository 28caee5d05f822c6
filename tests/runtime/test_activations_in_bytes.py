"""MatMulNBits at accuracy level 4: activations are rounded to bytes in blocks, as the attribute permits, no further.

The oracle unpacks the weights in numpy, rounds the activations and multiplies in double precision.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from fuser.scan import scan
from fuser.shapes import infer
from models import quantized
from runtime.compile import optimize
from runtime.options import Options
from runtime.oracle import Mode, evaluate
from runtime.session import load
from runtime.verify import verify
from tilecore.compile import compile_spec, prepare
from tilecore.contract.spec import ContractionSpec
from tilecore.profile import detect_profile, profile_named
from tilecore.target import TARGETS

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Layer:
    """One product: K, N, bits, block size and kind of zero points; `wave` is applied to its input first. What is alike
    but for its `letter` becomes one region."""

    depth: int
    columns: int
    bits: int
    block: int
    zeros: str = ""
    wave: bool = False
    letter: str = ""

    @property
    def name(self) -> str:
        """What the output is called."""
        return f"y{self.depth}_{self.columns}_{self.bits}_{self.block}{self.zeros}{'w' * self.wave}{self.letter}"


LAYERS = (
    Layer(192, 48, 4, 32),
    Layer(192, 40, 4, 16, "packed"),  # columns that fill no panel
    Layer(192, 48, 8, 64, "packed"),
    Layer(200, 32, 4, 128, "float"),  # the last block has fewer rows
    Layer(200, 32, 8, 16),  # bytes: so has this one
    Layer(24, 16, 4, 32),  # less than one block
    Layer(512, 32, 4, 256, wave=True),  # the left operand is computed
    Layer(192, 1040, 4, 32),  # several blocks of columns, beside rows that are rounded once
    *(Layer(256, 1040, 4, 32, letter=letter) for letter in "qkv"),  # and once for three of them
    Layer(320, 48, 4, 32, letter="q"),
    Layer(320, 48, 8, 32, letter="k"),  # levels of other bits meet rows in another order
    Layer(320, 48, 4, 32, "packed", letter="v"),
)


def constants_of(layer: Layer) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([layer.depth + layer.block, *map(ord, layer.letter)])
    blocks = -(-layer.depth // layer.block)
    made = {
        "B": rng.integers(0, 256, (layer.columns, blocks, layer.block * layer.bits // 8)).astype(np.uint8),
        "scales": rng.uniform(0.01, 0.03, (layer.columns, blocks)).astype(np.float32),
    }
    if layer.zeros == "packed":
        made["zeros"] = rng.integers(0, 256, (layer.columns, -(-blocks * layer.bits // 8))).astype(np.uint8)
    if layer.zeros == "float":
        made["zeros"] = rng.uniform(0, 15, (layer.columns, blocks)).astype(np.float32)
    return {f"{layer.name}.{name}": value for name, value in made.items()}


def model_of(layers: tuple[Layer, ...], level: int = 4) -> onnx.ModelProto:
    nodes: list[onnx.NodeProto] = []
    constants: dict[str, np.ndarray] = {}
    for layer in layers:
        own = constants_of(layer)
        constants |= own
        read, zero = f"x{layer.depth}", f"{layer.name}.zeros"
        if layer.wave:
            nodes.append(helper.make_node("Mul", [read, read], [f"{layer.name}.square"]))
            read = f"{layer.name}.square"
        inputs = [read, f"{layer.name}.B", f"{layer.name}.scales", zero if zero in own else ""]
        sizes: dict[str, Any] = {"K": layer.depth, "N": layer.columns, "bits": layer.bits, "block_size": layer.block}
        nodes.append(
            helper.make_node("MatMulNBits", inputs, [layer.name], domain="com.microsoft", accuracy_level=level, **sizes)
        )
    depths = dict.fromkeys(layer.depth for layer in layers)
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info(f"x{depth}", TensorProto.FLOAT, ["S", depth]) for depth in depths],
        [helper.make_tensor_value_info(layer.name, TensorProto.FLOAT, ["S", layer.columns]) for layer in layers],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def unpacked(stored: np.ndarray, bits: int) -> np.ndarray:
    parts = [stored >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, -1).reshape(len(stored), -1).astype(np.float64)


def weight_of(layer: Layer) -> np.ndarray:
    """The weight [K, N] in double precision."""
    own = {name.split(".")[1]: value for name, value in constants_of(layer).items()}
    blocks = -(-layer.depth // layer.block)
    zeros = np.full((layer.columns, blocks), 2.0 ** (layer.bits - 1))
    if layer.zeros:
        zeros = own["zeros"].astype(np.float64)
        zeros = unpacked(own["zeros"], layer.bits)[:, :blocks] if layer.zeros == "packed" else zeros
    levels = unpacked(own["B"].reshape(layer.columns, -1), layer.bits)
    zero, scale = (np.repeat(part, layer.block, 1) for part in (zeros, own["scales"].astype(np.float64)))
    return ((levels - zero) * scale)[:, : layer.depth].T


def in_bytes(x: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """(x rounded to bytes in blocks, the step of every element), in double precision."""
    rounded, steps = np.empty(x.shape), np.empty(x.shape)
    for first in range(0, x.shape[1], block):
        part = x[:, first : first + block].astype(np.float64)
        step = np.abs(part).max(axis=1, keepdims=True) / 127
        rounded[:, first : first + block] = np.rint(part / np.where(step, step, 1)) * step
        steps[:, first : first + block] = step
    return rounded, steps


def read_by(layer: Layer, feeds: Arrays) -> np.ndarray:
    x = feeds[f"x{layer.depth}"]
    return x * x if layer.wave else x


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, object_cache: Path) -> tuple[Path, Path]:
    """All layers in one model, fused; `optimize` has verified it."""
    folder = tmp_path_factory.mktemp("bytes")
    original, fused = folder / "original.onnx", folder / "fused.onnx"
    onnx.save(model_of(LAYERS), original)
    options = replace(Options(cache=object_cache.parent), fuse_all=True, target=detect_profile().target.name)
    report = optimize(original, fused, options=options, progress=lambda stage: None)
    assert not report.faults
    assert not report.misses
    assert {region.byte_block for region in report.regions} == {layer.block for layer in LAYERS}
    assert sum(region.label.count("MatMulNBits") == 3 for region in report.regions) == 2, "siblings"
    return original, fused


@pytest.mark.cpu
@pytest.mark.parametrize("rows", [1, 3, 9, 67])
def test_products_are_those_of_rounded_activations(models: tuple[Path, Path], rows: int) -> None:
    rng = np.random.default_rng(rows)
    feeds = {f"x{d}": rng.standard_normal((rows, d), np.float32) for d in {layer.depth for layer in LAYERS}}
    results = [np.asarray(result) for result in load(models[1]).run(None, feeds)]
    given = dict(zip((layer.name for layer in LAYERS), results, strict=True))
    for layer in LAYERS:
        x, weight = read_by(layer, feeds), weight_of(layer)
        rounded, steps = in_bytes(x, layer.block)
        size = np.abs(x.astype(np.float64)) @ np.abs(weight)
        off = np.abs(given[layer.name] - rounded @ weight)
        # an element half-way between two levels may go either way: one step of it in every row at most
        assert np.quantile(off / size, 0.9) < 2e-6, layer.name
        assert (off <= 1.01 * (steps.max() * np.abs(weight)).max() + 2e-6 * size).all(), layer.name
        exact = x.astype(np.float64) @ weight
        assert (np.abs(given[layer.name] - exact) <= steps / 2 @ np.abs(weight) + 2e-6 * size).all(), layer.name
        assert np.abs(given[layer.name] - exact).max() > 1e-4 * np.abs(exact).max(), "nothing was rounded"


@pytest.mark.cpu
def test_blocks_that_are_not_finite_and_blocks_of_next_to_nothing(models: tuple[Path, Path]) -> None:
    feeds = {f"x{d}": np.ones((5, d), np.float32) for d in {layer.depth for layer in LAYERS}}
    for value in feeds.values():
        value[0, 3], value[1, 5] = np.nan, np.inf
        value[2], value[3] = 0, 1e-38
    given = load(models[1]).run(None, feeds)
    for layer, result in zip(LAYERS, given, strict=True):
        assert np.isnan(np.asarray(result)[:2]).all(), layer.name
        np.testing.assert_array_equal(np.asarray(result)[2:4], 0, layer.name)
        rounded, _ = in_bytes(read_by(layer, feeds)[4:], layer.block)
        np.testing.assert_allclose(np.asarray(result)[4:], rounded @ weight_of(layer), rtol=0, atol=1e-4)


@pytest.mark.cpu
def test_verify_allows_what_rounding_activations_costs_and_no_more(models: tuple[Path, Path], tmp_path: Path) -> None:
    original, fused = models
    verdict = verify(original, fused)
    assert verdict.ok
    assert all(1e-4 < cost.drift < 2e-2 for cost in verdict.costs)
    other = onnx.load(original)
    scales = next(tensor for tensor in other.graph.initializer if tensor.name == f"{LAYERS[0].name}.scales")
    moved = numpy_helper.to_array(scales) * np.float32(1.1)
    scales.CopyFrom(numpy_helper.from_array(moved, scales.name))
    onnx.save(other, tmp_path / "other.onnx")
    assert not verify(tmp_path / "other.onnx", fused).ok
    exact = onnx.load(original)
    for node in exact.graph.node:
        for attribute in node.attribute:
            attribute.i = 0 if attribute.name == "accuracy_level" else attribute.i
    onnx.save(exact, tmp_path / "exact.onnx")
    assert not verify(tmp_path / "exact.onnx", fused).ok, "without the licence, rounded activations are an error"


def test_oracle_rounds_in_blocks_only_where_that_is_permitted() -> None:
    layer = LAYERS[3]
    feeds = {"x200": np.random.default_rng(0).standard_normal((4, 200), np.float32)}
    weight, rounded = weight_of(layer), in_bytes(feeds["x200"], layer.block)[0]
    exact = feeds["x200"].astype(np.float64) @ weight
    for level, mode, expected in ((4, Mode.BYTES, rounded @ weight), (4, Mode.RANGE, exact), (0, Mode.BYTES, exact)):
        found = evaluate(model_of((layer,), level), Path(), feeds, [layer.name], mode=mode).values[layer.name]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


def test_the_licence_is_a_part_of_the_spec_and_of_the_kernel() -> None:
    texts: dict[int, str] = {}
    profile = profile_named("zen3")
    for level in (0, 1, 4):
        model = ir.from_proto(quantized.packed(depth=256, columns=64, bits=4, block=32, level=level))
        (region,), _ = scan(model, infer(model))
        assert isinstance(region.spec, ContractionSpec)
        assert region.spec.byte_block == (32 if level == 4 else 0)
        kernel = compile_spec(region.spec, label="Contraction", profile=profile, targets=TARGETS)
        for text in kernel.sources.values():
            assert ("dot_levels_4(" in text) == (level == 4)
        texts[level] = kernel.name
        panels = prepare(region.spec)[0].inputs[1].shape
        assert len(panels) == (4 if level == 4 else 3)
    assert texts[0] == texts[1] != texts[4]


def test_products_with_and_without_the_licence_do_not_share_a_kernel() -> None:
    proto = model_of((LAYERS[0], replace(LAYERS[0], columns=96), replace(LAYERS[0], zeros="packed")))
    proto.graph.node[2].attribute.remove(next(a for a in proto.graph.node[2].attribute if a.name == "accuracy_level"))
    model = ir.from_proto(proto)
    regions, _ = scan(model, infer(model))
    blocks = [region.spec.byte_block for region in regions if isinstance(region.spec, ContractionSpec)]
    assert sorted(blocks) == [0, 32, 32]
