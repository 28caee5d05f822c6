"""Quantised models from file to result: operators on integers, packed weights, what ONNX Runtime's quantizer writes.

Results are compared with ONNX Runtime's own kernels, its optimisations off; weights are small enough that none of its
sums of bytes saturates.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import quantization
from onnxruntime.quantization.calibrate import CalibrationDataReader

from models import bert
from runtime import inputs as model_inputs
from runtime.body_calls import fused_nodes
from runtime.compile import optimize
from runtime.options import Options
from runtime.session import DOMAIN, load
from runtime.verify import blame
from tilecore.profile import detect_profile

pytestmark = pytest.mark.cpu
U8, I8, F32 = np.uint8, np.int8, np.float32
MICROSOFT = "com.microsoft"
Writer = Callable[["Graph"], str]


class Graph:
    """Nodes and constants on one input of bytes."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(4)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def number(self, value: object, dtype: type[np.generic]) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value).astype(dtype), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.number(self.rng.integers(-60, 61, shape), I8)

    def add(self, op: str, *inputs: str, domain: str = MICROSOFT, **attributes: Any) -> str:
        name = f"{op}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=name, domain=domain, **attributes))
        return name


def _real(graph: Graph, value: str) -> str:
    return graph.add("Cast", value, domain="", to=TensorProto.FLOAT)


def _conv_integer(graph: Graph) -> str:
    total = graph.add("ConvInteger", "image", graph.weight(20, 16, 1, 1), graph.number(121, U8), domain="")
    return graph.add("Mul", _real(graph, total), graph.number(0.01, F32), domain="")


def _qlinear_conv(graph: Graph) -> str:
    left = "image", graph.number(0.02, F32), graph.number(121, U8)
    right = graph.weight(20, 16, 1, 1), graph.number(graph.rng.uniform(0.01, 0.02, 20), F32), graph.number([0] * 20, I8)
    bias = graph.number(graph.rng.integers(-900, 900, 20), np.int32)
    return graph.add("QLinearConv", *left, *right, graph.number(0.3, F32), graph.number(128, U8), bias, domain="")


def _qlinear_conv_of_taps(graph: Graph) -> str:
    """Several taps, apart from each other, over padding, which is the zero point of the image."""
    left = "image", graph.number(0.02, F32), graph.number(121, U8)
    right = graph.weight(20, 16, 2, 3), graph.number(graph.rng.uniform(0.01, 0.02, 20), F32), graph.number([0] * 20, I8)
    bias = graph.number(graph.rng.integers(-900, 900, 20), np.int32)
    return graph.add(
        "QLinearConv", *left, *right, graph.number(0.6, F32), graph.number(128, U8), bias, domain="",
        pads=[1, 1, 0, 2], strides=[1, 2], dilations=[2, 1],
    )  # fmt: skip


def _conv_integer_of_taps(graph: Graph) -> str:
    levels = "image", graph.weight(20, 16, 3, 2), graph.number(121, U8)
    total = graph.add("ConvInteger", *levels, domain="", pads=[1, 0, 1, 1])
    return graph.add("Mul", _real(graph, total), graph.number(0.01, F32), domain="")


def _qgemm(graph: Graph) -> str:
    left = "rows", graph.number(0.02, F32), graph.number(121, U8)
    right = graph.weight(24, 16), graph.number(graph.rng.uniform(0.01, 0.02, 24), F32), graph.number([0] * 24, I8)
    bias = graph.number(graph.rng.integers(-900, 900, 24), np.int32)
    return graph.add("QGemm", *left, *right, bias, graph.number(0.3, F32), graph.number(128, U8), transB=1)


def _integer_to_float(graph: Graph) -> str:
    scales = graph.number(0.02, F32), graph.number(graph.rng.uniform(0.01, 0.02, 24), F32)
    zeros = graph.number(121, U8), graph.number([0] * 24, I8)
    bias = graph.number(graph.rng.standard_normal(24), F32)
    return graph.add("MatMulIntegerToFloat", "rows", graph.weight(16, 24), *scales, *zeros, bias)


def _pointwise(graph: Graph) -> str:
    """QLinearSigmoid and QLinearLeakyRelu in one chain."""
    first = graph.add(
        "QLinearLeakyRelu", "rows", graph.number(0.05, F32), graph.number(121, U8), graph.number(0.04, F32),
        graph.number(30, U8), alpha=0.2,
    )  # fmt: skip
    scale, zero = graph.number(1 / 256, F32), graph.number(0, U8)
    return graph.add("QLinearSigmoid", first, graph.number(0.04, F32), graph.number(30, U8), scale, zero)


def _packed(graph: Graph) -> str:
    levels = graph.number(graph.rng.integers(0, 256, (24, 1, 8)), U8)
    scale, zero = graph.number(graph.rng.uniform(0.01, 0.02, (24, 1)), F32), graph.number([[0x37]] * 24, U8)
    return graph.add(
        "MatMulNBits", _real(graph, "rows"), levels, scale, zero, K=16, N=24, bits=4, block_size=16, accuracy_level=4
    )


WRITERS: tuple[Writer, ...] = (
    _conv_integer, _conv_integer_of_taps, _qlinear_conv, _qlinear_conv_of_taps, _qgemm, _integer_to_float, _pointwise,
    _packed,
)  # fmt: skip


def optimized(original: Path, cache: Path) -> Path:
    """The fused model, every region taken whatever its cost; `optimize` has verified it."""
    fused = original.with_name("fused.onnx")
    options = replace(Options(cache=cache), fuse_all=True, target=detect_profile().target.name)
    report = optimize(original, fused, options=options, progress=lambda stage: None)
    assert not report.faults
    return fused


@pytest.fixture(scope="module")
def operators(tmp_path_factory: pytest.TempPathFactory, object_cache: Path) -> tuple[Path, Path]:
    """Every operator in one model, each an output."""
    graph = Graph()
    results = [write(graph) for write in WRITERS]
    made = helper.make_graph(
        graph.nodes,
        "operators",
        [
            helper.make_tensor_value_info("image", TensorProto.UINT8, ["B", 16, "H", 5]),
            helper.make_tensor_value_info("rows", TensorProto.UINT8, ["S", 16]),
        ],
        [onnx.ValueInfoProto(name=name) for name in results],
        graph.constants,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    model = onnx.shape_inference.infer_shapes(helper.make_model(made, opset_imports=opsets, ir_version=10))
    kinds = {"QLinearConv": TensorProto.UINT8, "QGemm": TensorProto.UINT8, "QLinearSigmoid": TensorProto.UINT8}
    for output in model.graph.output:
        output.type.tensor_type.elem_type = kinds.get(output.name.rstrip("0123456789"), TensorProto.FLOAT)
    original = tmp_path_factory.mktemp("operators") / "original.onnx"
    onnx.save(model, original)
    return original, optimized(original, object_cache.parent)


def plain(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(path, options)


def test_operators_on_integers_are_fused_and_right(operators: tuple[Path, Path]) -> None:
    original, fused = operators
    assert {node.domain for node in onnx.load(fused).graph.node} == {DOMAIN}
    rng = np.random.default_rng(8)
    feeds = {
        "image": rng.integers(0, 256, (2, 16, 3, 5)).astype(U8),
        "rows": rng.integers(0, 256, (7, 16)).astype(U8),
    }
    session = plain(original)
    for output, want, got in zip(
        session.get_outputs(), session.run(None, feeds), load(fused).run(None, feeds), strict=True
    ):
        want, got = np.asarray(want), np.asarray(got)
        assert (got.dtype, got.shape) == (want.dtype, want.shape), output.name
        off = np.abs(got.astype(np.float64) - want.astype(np.float64))
        if want.dtype == U8:
            assert off.max() <= 1, output.name
            assert np.count_nonzero(off) <= 0.02 * off.size, output.name
        else:  # at accuracy level 4, ONNX Runtime itself rounds activations to bytes
            bound = 2e-2 if output.name.startswith("MatMulNBits") else 2e-6
            assert off.max() <= bound * np.abs(want).max(), output.name


class Samples(CalibrationDataReader):
    """A few generated inputs."""

    def __init__(self, path: Path) -> None:
        model = onnx.load(path)
        sizes = {"batch": 2, "seq": 12}
        self.feeds: Iterator[dict[str, np.ndarray]] = iter(
            [dict(model_inputs.generate(model, sizes=sizes, seed=seed)) for seed in range(3)]
        )

    def get_next(self) -> dict[str, np.ndarray]:
        """The next inputs, none after the last."""
        return next(self.feeds, {})


def _dynamic(source: Path, target: Path) -> None:
    quantization.quantize_dynamic(source, target, weight_type=quantization.QuantType.QInt8)


def _static(source: Path, target: Path) -> None:
    quantization.quantize_static(
        source,
        target,
        Samples(source),
        quant_format=quantization.QuantFormat.QDQ,
        op_types_to_quantize=["MatMul", "Add"],
        weight_type=quantization.QuantType.QInt8,
    )


BRANCHES = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[S, 8] x, bool c, int64 n) => (float[S, 8] y, float[S, 8] w)
    <float s = {0.1}, uint8 z = {3}, int8[8, 8] levels, float t = {0.02}, int8 o = {0}> {
        q = QuantizeLinear(x, s, z)
        r = DequantizeLinear(q, s, z)
        y = If (c) <then_branch = a () => (float[S, 8] u) {
                        k = DequantizeLinear(levels, t, o) p = MatMul(r, k) u = Relu(p) },
                    else_branch = b () => (float[S, 8] v) { v = Relu(r) }>
        w = Loop (n, , x) <body = d (int64 i, bool go, float[S, 8] h) => (bool more, float[S, 8] g) {
            more = Identity(go)
            e = QuantizeLinear(h, s, z) f = DequantizeLinear(e, s, z)
            l = DequantizeLinear(levels, t, o) m = MatMul(f, l) g = Tanh(m) }>
    }"""


@pytest.fixture(scope="module")
def branches(tmp_path_factory: pytest.TempPathFactory, object_cache: Path) -> tuple[Path, Path]:
    """A model with integer contractions in the bodies of an If and a Loop, and as fused."""
    model = onnx.parser.parse_model(BRANCHES)
    levels = np.random.default_rng(2).integers(-120, 121, (8, 8)).astype(I8)
    model.graph.initializer.append(numpy_helper.from_array(levels, "levels"))
    original = tmp_path_factory.mktemp("branches") / "original.onnx"
    onnx.save(model, original)
    return original, optimized(original, object_cache.parent)


def inner_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [inner for node in model.graph.node for inner in fused_nodes(node)]


def test_regions_in_bodies_sum_integers_and_are_right(branches: tuple[Path, Path]) -> None:
    original, fused = branches
    assert len(inner_nodes(onnx.load(fused))) == 2
    for count, flag in ((0, True), (3, False), (5, True)):
        x = np.random.default_rng(count).standard_normal((5, 8)).astype(F32)
        feeds = {"x": x, "c": np.array(flag), "n": np.array(count, np.int64)}
        for want, got in zip(plain(original).run(None, feeds), load(fused).run(None, feeds), strict=True):
            np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=1e-5)


def test_a_wrong_kernel_in_a_body_is_blamed(branches: tuple[Path, Path], tmp_path: Path) -> None:
    _, fused = branches
    model = onnx.load(fused)
    target = next(node for node in inner_nodes(model) if "g" in node.output)
    body = next(function for function in model.functions if function.name == target.op_type)
    next(node for node in body.node if node.op_type == "Tanh").op_type = "Sigmoid"
    wrong = tmp_path / "wrong.onnx"
    onnx.save(model, wrong)
    wrong.with_suffix(".so").write_bytes(fused.with_suffix(".so").read_bytes())
    feeds = {"x": np.ones((3, 8), F32), "c": np.array(True), "n": np.array(2, np.int64)}
    regions, unseen = blame(wrong, feeds)
    assert unseen is None
    assert {region.node for region in regions} == {target.name}


@pytest.mark.parametrize("quantize", [_dynamic, _static])
def test_what_the_quantizer_writes_is_summed_in_integers(
    quantize: Callable[[Path, Path], None], tmp_path: Path, object_cache: Path
) -> None:
    source, original = tmp_path / "float.onnx", tmp_path / "original.onnx"
    bert.build(source, exporter="dynamo", size=bert.Size(layers=1))
    quantize(source, original)
    fused = optimized(original, object_cache.parent)
    left = [node.op_type for node in onnx.load(fused).graph.node if node.domain != DOMAIN]
    assert not {"MatMul", "MatMulInteger", "Softmax", "LayerNormalization"} & set(left)
