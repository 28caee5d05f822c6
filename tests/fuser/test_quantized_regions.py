"""Quantised graphs: their contractions sum integers, and what a region computes is what the graph says.

Graphs are written by hand in the two forms that exist, QuantizeLinear/DequantizeLinear around float operators and
operators on integers, and judged by onnx.reference on the same inputs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from region_oracle import check_regions, scanned

from fuser.region import Region
from fuser.scan import scan
from fuser.shapes import infer
from fuser.simplify import simplify
from models.graph import GraphWriter
from tilecore.canonical import canonical
from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import evaluate
from tilecore.contract.expr import loads
from tilecore.contract.spec import AttentionSpec, ContractionSpec

RNG = np.random.default_rng(5)
F32, U8, I8 = TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT8


class Graph:
    """Nodes and constants of one graph, named as they come."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, value: object, dtype: type[np.generic]) -> str:
        """A constant's name."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value).astype(dtype), name))
        return name

    def add(self, op: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """A node's output."""
        name = f"{op}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=name, domain=domain, **attributes))
        return name

    def coded(self, value: str, scale: float, zero: int, dtype: type[np.generic] = np.uint8) -> str:
        """The value rounded to levels and back."""
        parameters = self.constant(scale, np.float32), self.constant(zero, dtype)
        return self.add("DequantizeLinear", self.add("QuantizeLinear", value, *parameters), *parameters)

    def model(self, inputs: dict[str, tuple[int, list[int | str]]], output: str, kind: int) -> onnx.ModelProto:
        """The checked model with one output."""
        graph = helper.make_graph(
            self.nodes,
            "quantised",
            [helper.make_tensor_value_info(name, dtype, shape) for name, (dtype, shape) in inputs.items()],
            [helper.make_tensor_value_info(output, kind, None)],
            self.constants,
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def regions_of(model: onnx.ModelProto) -> tuple[Region, ...]:
    loaded = ir.from_proto(model)
    simplify(loaded)
    return scan(loaded, infer(loaded))[0]


def check(model: onnx.ModelProto, feeds: dict[str, np.ndarray], regions: tuple[Region, ...]) -> None:
    """Every region in graph order computes what onnx.reference computes, to the level or to f32 rounding."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    del exposed.graph.output[:]
    made = [name for node in model.graph.node for name in node.output]
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in made)
    results = ReferenceEvaluator(exposed).run(None, feeds)
    known = {name: np.asarray(value) for name, value in zip(made, results, strict=True)} | feeds
    known |= {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for region in regions:
        arrays = {
            tensor.name: known[value.name or ""] if value.const_value is None else value.const_value.numpy()
            for tensor, value in zip(region.spec.inputs, region.inputs, strict=True)
        }
        computed = evaluate(region.spec, arrays)
        for value in region.outputs:
            got, want = computed[value.name or ""], known[value.name or ""]
            if want.dtype.kind in "iu":
                off = np.abs(got.astype(np.int64) - want.astype(np.int64))
                assert off.max() <= (1 if want.dtype.itemsize == 1 else 0), value.name
                assert np.count_nonzero(off) <= 0.01 * off.size, value.name
            else:
                scale = float(np.abs(want).max())
                np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * scale, err_msg=value.name)


def weights(graph: Graph, *, symmetric: bool, per_column: bool, blocks: int = 0) -> str:
    """A dequantised weight [16, 24] of int8."""
    levels = graph.constant(RNG.integers(-128, 128, (16, 24)), np.int8)
    shape = (16 // blocks, 24) if blocks else (24,) if per_column else ()
    scale = graph.constant(RNG.uniform(0.001, 0.02, shape), np.float32)
    zero = graph.constant(np.zeros(shape) if symmetric else RNG.integers(-9, 9, shape), np.int8)
    axis: dict[str, Any] = {"axis": 0, "block_size": blocks} if blocks else {"axis": 1} if per_column else {}
    return graph.add("DequantizeLinear", levels, scale, zero, **axis)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("per_column", [True, False])
@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_coded_matmul_sums_integers(symmetric: bool, per_column: bool, kind: type[np.generic]) -> None:
    graph = Graph()
    left = graph.coded("x", 0.02, 0 if symmetric else 7, kind)
    product = graph.add("MatMul", left, weights(graph, symmetric=symmetric, per_column=per_column))
    biased = graph.add("Add", product, graph.constant(RNG.standard_normal(24), np.float32))
    out = graph.add(
        "QuantizeLinear", graph.add("Gelu", biased), graph.constant(0.03, np.float32), graph.constant(3, kind)
    )
    model = graph.model({"x": (F32, ["B", "S", 16])}, out, U8 if kind is np.uint8 else I8)
    regions = regions_of(model)
    (region,) = (region for region in regions if region.kind == "contraction")
    assert isinstance(region.spec, ContractionSpec)
    assert (region.spec.a.dtype, region.spec.acc.dtype) == (DType.I16, DType.I32)
    assert region.outputs[0].name == out
    check(model, {"x": RNG.standard_normal((2, 5, 16)).astype(np.float32)}, regions)


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_rows_are_rounded_where_one_product_by_weights_reads_them(readers: int, kind: type[np.generic]) -> None:
    """Two products that are not siblings would each round them again: they read bytes."""
    graph = Graph()
    left = graph.coded("x", 0.02, 7, kind)
    out = graph.add("MatMul", left, weights(graph, symmetric=True, per_column=True))
    if readers == 2:
        other = weights(graph, symmetric=True, per_column=True)
        out = graph.add("Add", out, graph.add("MatMul", graph.add("Relu", left), other))
    model = graph.model({"x": (F32, ["S", 16])}, out, F32)
    regions = regions_of(model)
    sums = [region.spec for region in regions if isinstance(region.spec, ContractionSpec)]
    read = {load.source.name for spec in sums for load in loads(spec.a.value)}
    assert DType.I32 in {spec.acc.dtype for spec in sums}
    assert ("x" in read) == (readers == 1)
    x = RNG.standard_normal((40, 16)).astype(np.float32)
    x[0] = (np.arange(16) - 7.5) * np.float32(0.02)  # near the middle of two levels
    x[1, :4] = 9.0, -9.0, 1e6, -1e6  # beyond the last levels
    check(model, {"x": x}, regions)


def test_operands_that_are_rounded_and_summed_with_each_other_are_bytes_before() -> None:
    """A right operand would be rounded again for every block of rows."""
    graph = Graph()
    out = graph.add("MatMul", graph.coded("x", 0.02, 7), graph.coded("y", 0.03, 9))
    regions = regions_of(graph.model({"x": (F32, ["S", 16]), "y": (F32, [16, "T"])}, out, F32))
    (spec,) = [region.spec for region in regions if isinstance(region.spec, ContractionSpec)]
    names = {load.source.name for side in (spec.a, spec.b) for load in loads(side.value)}
    assert names.isdisjoint({"x", "y"})


def test_scales_in_blocks_of_the_sum_are_applied_on_loading() -> None:
    graph = Graph()
    out = graph.add("MatMul", graph.coded("x", 0.02, 7), weights(graph, symmetric=False, per_column=False, blocks=8))
    model = graph.model({"x": (F32, ["S", 16])}, out, F32)
    regions = regions_of(model)
    (region,) = (region for region in regions if region.kind == "contraction")
    assert isinstance(region.spec, ContractionSpec)
    assert region.spec.acc.dtype is DType.F32
    assert {tensor.dtype for tensor in region.spec.inputs if len(tensor.shape) == 2} >= {DType.I8, DType.U8}
    check(model, {"x": RNG.standard_normal((9, 16)).astype(np.float32)}, regions)


def test_a_scale_along_the_sum_is_not_taken_out() -> None:
    graph = Graph()
    levels = graph.constant(RNG.integers(-128, 128, (16, 24)), np.int8)
    scale = graph.constant(RNG.uniform(0.001, 0.02, 16), np.float32)
    right = graph.add("DequantizeLinear", levels, scale, axis=0)
    out = graph.add("MatMul", graph.coded("x", 0.02, 7), right)
    model = graph.model({"x": (F32, ["S", 16])}, out, F32)
    regions = regions_of(model)
    specs = [region.spec for region in regions if isinstance(region.spec, ContractionSpec)]
    assert [spec.acc.dtype for spec in specs] == [DType.F32]
    check(model, {"x": RNG.standard_normal((9, 16)).astype(np.float32)}, regions)


def test_layers_that_differ_in_scales_alone_share_a_kernel() -> None:
    graph = Graph()
    hidden = "x"
    for scale, zero in ((0.02, 7), (0.03, 0), (0.05, 200), (0.04, 9)):
        right = graph.add(
            "DequantizeLinear",
            graph.constant(RNG.integers(-128, 128, (16, 16)), np.int8),
            graph.constant(scale * 0.3217, np.float32),  # a prime: no sum lies in the middle of two levels
            graph.constant(0, np.int8),
        )
        product = graph.add("MatMul", graph.coded(hidden, scale, zero), right)
        hidden = graph.add("Relu", graph.coded(product, 0.04, zero))
    model = graph.model({"x": (F32, ["S", 16])}, hidden, F32)
    regions = regions_of(model)
    specs = [region.spec for region in regions if isinstance(region.spec, ContractionSpec)]
    assert [spec.acc.dtype for spec in specs] == [DType.I32] * 4
    assert canonical(specs[1]) == canonical(specs[2])  # the first one rounds x
    check(model, {"x": RNG.standard_normal((9, 16)).astype(np.float32)}, regions)


def test_a_number_that_is_more_than_a_scale_stays_known() -> None:
    graph = Graph()
    scale = graph.constant(0.02, np.float32)
    levels = graph.add("QuantizeLinear", "x", scale, graph.constant(7, np.uint8))
    real = graph.add("DequantizeLinear", levels, scale, graph.constant(9, np.uint8))
    model = graph.model({"x": (F32, ["S", 16])}, graph.add("Softmax", graph.add("Mul", real, scale)), F32)
    (region,) = regions_of(model)
    assert sorted(len(tensor.shape) for tensor in region.spec.inputs) == [0, 0, 2]
    check(model, {"x": RNG.standard_normal((9, 16)).astype(np.float32)}, (region,))


def _matmul_integer(graph: Graph) -> tuple[str, int]:
    right, zero = graph.constant(RNG.integers(-128, 128, (16, 24)), np.int8), graph.constant(-3, np.int8)
    total = graph.add("MatMulInteger", "q", right, graph.constant(120, np.uint8), zero)
    real = graph.add("Cast", total, to=F32)
    return graph.add("Mul", real, graph.constant(RNG.uniform(0.001, 0.02, 24), np.float32)), F32


def _qlinear_matmul(graph: Graph) -> tuple[str, int]:
    right = graph.constant(RNG.integers(-128, 128, (16, 24)), np.int8)
    left = "q", graph.constant(0.02, np.float32), graph.constant(120, np.uint8)
    scales = graph.constant(0.01, np.float32), graph.constant(0, np.int8)
    result = graph.constant(0.05, np.float32), graph.constant(100, np.uint8)
    return graph.add("QLinearMatMul", *left, right, *scales, *result), U8


def _spelled_out(graph: Graph) -> tuple[str, int]:
    """Zero points and scales in plain arithmetic, the weight's scale applied to the weight."""
    left = graph.add("Sub", graph.add("Cast", "q", to=F32), graph.constant(120, np.float32))
    levels = graph.add("Cast", graph.constant(RNG.integers(-128, 128, (16, 24)), np.int8), to=F32)
    right = graph.add("Mul", levels, graph.constant(RNG.uniform(0.001, 0.02, 24), np.float32))
    return graph.add("MatMul", graph.add("Mul", left, graph.constant(0.02, np.float32)), right), F32


@pytest.mark.parametrize("write", [_matmul_integer, _qlinear_matmul, _spelled_out])
def test_any_spelling_of_levels_sums_integers(write: Callable[[Graph], tuple[str, int]]) -> None:
    graph = Graph()
    out, kind = write(graph)
    model = graph.model({"q": (U8, ["B", "S", 16])}, out, kind)
    regions = regions_of(model)
    specs = [region.spec for region in regions if isinstance(region.spec, ContractionSpec)]
    assert [spec.acc.dtype for spec in specs] == [DType.I32]
    check(model, {"q": RNG.integers(0, 256, (2, 7, 16)).astype(np.uint8)}, regions)


def test_weights_that_are_dequantised_are_no_state_of_a_recurrence() -> None:
    graph = Graph()
    hidden = graph.add("MatMul", graph.coded("x", 0.02, 7), weights(graph, symmetric=True, per_column=False))
    narrow = graph.add("Transpose", weights(graph, symmetric=True, per_column=False), perm=[1, 0])
    out = graph.add("MatMul", graph.coded(graph.add("Relu", hidden), 0.05, 3), narrow)
    model = graph.model({"x": (F32, ["S", 16])}, out, F32)
    regions = regions_of(model)
    assert [region.kind for region in regions if region.kind != "row"] == ["contraction", "contraction"]
    check(model, {"x": RNG.standard_normal((40, 16)).astype(np.float32)}, regions)


def test_sums_that_may_overflow_stay_real() -> None:
    graph = Graph()
    right = graph.add("DequantizeLinear", graph.constant(np.ones((40000, 2)), np.int8), graph.constant(0.1, np.float32))
    out = graph.add("MatMul", graph.coded("x", 0.02, 7), right)
    specs = [region.spec for region in regions_of(graph.model({"x": (F32, ["S", 40000])}, out, F32))]
    assert [spec.acc.dtype for spec in specs if isinstance(spec, ContractionSpec)] == [DType.F32]


@pytest.mark.parametrize("probabilities", [True, False])
def test_coded_attention_is_one_region(probabilities: bool) -> None:
    graph = Graph()
    sides = [graph.coded(name, 0.02, zero) for name, zero in (("q", 120), ("k", 131), ("v", 128))]
    turned = graph.add("Transpose", sides[1], perm=[0, 1, 3, 2])
    scores = graph.coded(graph.add("MatMul", sides[0], turned), 0.05, 128)
    weighted = graph.add("Softmax", graph.add("Mul", scores, graph.constant(0.35, np.float32)), axis=-1)
    if probabilities:
        weighted = graph.coded(weighted, 1 / 255, 0)
    out = graph.add("MatMul", weighted, sides[2])
    shape: list[int | str] = ["B", 2, "S", 8]
    model = graph.model(dict.fromkeys("qkv", (F32, shape)), out, F32)
    regions = regions_of(model)
    (region,) = (region for region in regions if region.kind == "attention")
    assert isinstance(region.spec, AttentionSpec)
    assert region.spec.raw.dtype is DType.I32
    assert (region.spec.weight is not None) == probabilities
    known = {name: RNG.standard_normal((2, 2, 11, 8)).astype(np.float32) for name in "qkv"}
    check(model, known, regions)


def test_a_zero_point_of_one_element_may_have_more_axes_than_its_scale(tmp_path: Path) -> None:
    g = GraphWriter(21)
    x = g.input("x", np.uint8, ("rows", 8))
    zero = g.initializer(np.array([7], np.uint8))
    g.op("Relu", g.op("DequantizeLinear", x, g.initializer(np.array(0.5, np.float32)), zero, axis=0), out="y")
    g.output("y", np.float32, ("rows", 8))
    found = scanned(g.finish(), tmp_path)
    assert [region.kind for region in found.regions] == ["row"]
    check_regions(found, {"x": np.arange(24, dtype=np.uint8).reshape(3, 8)})


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_scales_of_coded_products_may_be_half(kind: type[np.generic], tmp_path: Path) -> None:
    """QLinearMatMul against the same sums in numpy: scales are powers of two, so that nothing is rounded but levels."""
    rng = np.random.default_rng(0)
    weight = rng.integers(-8, 8, (8, 4)).astype(np.int8)
    g = GraphWriter(21)
    a = g.input("a", np.uint8, ("rows", 8))

    def parameters(scale: float, zero: int, dtype: type[np.generic]) -> tuple[str, str]:
        return g.initializer(np.array(scale, kind)), g.initializer(np.array(zero, dtype))

    left, right, out = parameters(0.5, 3, np.uint8), parameters(0.25, 0, np.int8), parameters(2.0, 100, np.uint8)
    g.op("QLinearMatMul", a, *left, g.initializer(weight), *right, *out, out="y")
    g.output("y", np.uint8, ("rows", 4))
    (region,) = scanned(g.finish(), tmp_path).regions
    levels = rng.integers(0, 256, (5, 8)).astype(np.uint8)
    arrays = {
        tensor.name: levels if value.const_value is None else value.const_value.numpy()
        for tensor, value in zip(region.spec.inputs, region.inputs, strict=True)
    }
    (found,) = evaluate(region.spec, arrays).values()
    sums = (levels.astype(np.int64) - 3) @ weight.astype(np.int64)
    np.testing.assert_array_equal(found, np.clip(np.rint(sums * 0.5 * 0.25 / 2.0) + 100, 0, 255).astype(np.uint8))
