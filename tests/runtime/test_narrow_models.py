"""`--precision bf16` from file to result: what is rounded, what that costs, and that a wrong kernel is still found."""

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from models import bert, regions
from models.graph import GraphWriter, write
from runtime import inputs
from runtime.compile import CompileError
from runtime.compile import optimize as compile_model
from runtime.options import Options
from runtime.original import Original
from runtime.session import DOMAIN, load
from runtime.verify import verify
from tilefuse import Report, optimize

pytestmark = pytest.mark.cpu
UNIT = 2.0**-9  # half the spacing of bfloat16 at 1


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Report]:
    folder = tmp_path_factory.mktemp("encoder")
    original, fused = bert.build(folder / "bert.onnx"), folder / "fused.onnx"
    return original, fused, optimize(original, fused, precision="bf16")


def test_an_encoder_passes_and_verify_says_what_rounding_costs(encoder: tuple[Path, Path, Report]) -> None:
    original, fused, report = encoder
    assert not report.faults
    verdict = verify(original, fused)
    assert verdict.ok
    (cost,) = verdict.costs
    assert UNIT / 2 < cost.drift < 1e-2
    assert cost.cosine > 0.9999


def test_weights_are_stored_once_in_16_bits_and_norms_stay_wide(encoder: tuple[Path, Path, Report]) -> None:
    model = onnx.load(encoder[1])
    onnx.checker.check_model(model, full_check=True)
    kinds = {t.name: t.data_type for t in model.graph.initializer if "panels" in t.name}
    assert kinds
    assert set(kinds.values()) == {TensorProto.BFLOAT16}
    wide = [t for t in model.graph.initializer if t.data_type == TensorProto.FLOAT and "embeddings" not in t.name]
    assert not any(len(t.dims) > 1 and min(t.dims) > 8 for t in wide)
    rows = [n for n in model.graph.node if n.domain == DOMAIN and n.op_type.startswith("FusedRow")]
    bodies = {function.name: function for function in model.functions}
    assert rows
    assert not any(node.op_type == "Cast" and helper.get_node_attr_value(node, "to") == TensorProto.BFLOAT16
                   for row in rows for node in bodies[row.op_type].node)  # fmt: skip


def test_function_bodies_say_the_same_without_the_library(encoder: tuple[Path, Path, Report]) -> None:
    original, fused, _ = encoder
    feeds = inputs.generate(onnx.load(original), sizes={"batch": 2, "seq": 24, "batch_size": 2, "sequence": 24}, seed=1)
    (ours,) = load(fused).run(None, feeds)
    (bodies,) = ort.InferenceSession(str(fused), providers=["CPUExecutionProvider"]).run(None, feeds)
    (exact,) = ort.InferenceSession(str(original), providers=["CPUExecutionProvider"]).run(None, feeds)
    ours, bodies, exact = (np.asarray(x, np.float64) for x in (ours, bodies, exact))
    size = np.sqrt(np.square(exact).mean())
    assert np.sqrt(np.square(ours - bodies).mean()) < 0.8 * np.sqrt(np.square(exact - bodies).mean()) < 1e-2 * size


def test_a_wrong_weight_is_found(encoder: tuple[Path, Path, Report], tmp_path: Path) -> None:
    original, fused, _ = encoder
    model = onnx.load(fused)
    tensor = next(t for t in model.graph.initializer if "panels" in t.name)
    weight = numpy_helper.to_array(tensor).copy()
    weight.reshape(-1)[:64] = ml_dtypes.bfloat16(1.0)
    tensor.CopyFrom(numpy_helper.from_array(weight, tensor.name))
    onnx.save(model, tmp_path / "wrong.onnx")
    (tmp_path / "wrong.so").write_bytes(fused.with_suffix(".so").read_bytes())
    assert not verify(original, tmp_path / "wrong.onnx").ok


def test_a_linear_layer_is_that_of_rounded_operands(tmp_path: Path) -> None:
    original = write(regions.linear(depth=65, columns=50), tmp_path / "linear.onnx")
    optimize(original, tmp_path / "fused.onnx", precision="bf16")
    weight, bias = (numpy_helper.to_array(t).astype(np.float64) for t in onnx.load(original).graph.initializer)
    x = np.random.default_rng(0).standard_normal((1, 7, 65), dtype=np.float32)
    (got,) = load(tmp_path / "fused.onnx").run(None, {"x": x})
    narrow = [a.astype(ml_dtypes.bfloat16).astype(np.float64) for a in (x, weight)]
    np.testing.assert_allclose(np.asarray(got), narrow[0] @ narrow[1] + bias, rtol=0, atol=2e-5)


def test_positions_times_frequencies_stay_exact(tmp_path: Path) -> None:
    """An outer product sums nothing, and 8 bits do not hold a position."""
    frequencies = numpy_helper.from_array(np.linspace(1, 0.001, 32, dtype=np.float32)[None], "frequencies")
    nodes = [
        helper.make_node("MatMul", ["positions", "frequencies"], ["angle"]),
        helper.make_node("Sin", ["angle"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ("n", w)) for n, w in (("positions", 1), ("y", 32))]
    graph = helper.make_graph(nodes, "angles", values[:1], values[1:], [frequencies])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "a.onnx")
    optimize(tmp_path / "a.onnx", tmp_path / "b.onnx", precision="bf16")
    x = np.arange(1000, dtype=np.float32)[:, None]
    (got,) = load(tmp_path / "b.onnx").run(None, {"positions": x})
    want = np.sin(x.astype(np.float64) @ numpy_helper.to_array(frequencies).astype(np.float64))
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=2e-4)


def bucketed(*, unknown: bool = False) -> onnx.ModelProto:
    """x W and, for each row, one of a table: row 10 is 10 * 0.7, which is 7 in float32 and less in double precision.

    `unknown`: an operator comes after them that onnx.reference does not know.
    """
    g = GraphWriter(17)
    x = g.input("x", np.float32, ("n", 64))
    rows = g.op("Squeeze", g.op("Shape", x, start=0, end=1), g.constant([0]))
    order = g.op("Cast", g.op("Range", g.constant(np.int64(0)), rows, g.constant(np.int64(1))), to=TensorProto.FLOAT)
    bucket = g.op("Cast", g.op("Mul", order, g.constant(np.float32(0.7))), to=TensorProto.INT64)
    table = g.op("Gather", g.normal((200, 48), std=10.0), bucket)
    y = g.op("Add", g.op("MatMul", x, g.normal((64, 48), std=1.0)), table)
    if unknown:
        y = g.op("Squeeze", g.op("ExpandDims", y, g.constant(np.int32(0)), domain="com.microsoft"), g.constant([0]))
    g.op("Identity", y, out="y")
    g.output("y", np.float32, ("n", 48))
    model = g.finish()
    if unknown:
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def test_what_rounding_decides_is_in_double_precision_what_the_original_decided(tmp_path: Path) -> None:
    model = bucketed()
    original = Original.of(model, model.SerializeToString(), tmp_path)
    x = np.random.default_rng(0).standard_normal((21, 64), dtype=np.float32)
    (expected,) = original.run(["y"], {"x": x})
    found, reason = original.truth({"x": x}, {"y": expected}, decided=original.decisions({"x": x}))
    assert reason is None
    table, weight = (numpy_helper.to_array(t) for t in model.graph.initializer if 48 in t.dims)
    rows = (np.arange(21, dtype=np.float32) * np.float32(0.7)).astype(np.int64)
    assert rows[10] == 7 > 10 * float(np.float32(0.7))
    exact = x.astype(np.float64) @ weight.astype(np.float64) + table[rows]
    np.testing.assert_allclose(found["y"].value, exact, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("unknown", [False, True], ids=["decided by rounding", "unknown operator"])
def test_no_kernel_is_blamed_for_what_double_precision_does_not_tell(unknown: bool, tmp_path: Path) -> None:
    original, fused = write(bucketed(unknown=unknown), tmp_path / "model.onnx"), tmp_path / "fused.onnx"
    report = compile_model(
        original,
        fused,
        options=replace(Options.from_environment(), fuse_all=True, precision="bf16"),
        progress=lambda _: None,
    )
    assert "contraction" in [region.kind for region in report.regions]
    assert not report.faults
    verdict = verify(original, fused)
    assert verdict.ok
    assert (verdict.unmeasured is not None) == unknown
    wrong = onnx.load(fused)
    for tensor in wrong.graph.initializer:
        if tensor.data_type == TensorProto.BFLOAT16:
            tensor.raw_data = bytes(len(tensor.raw_data))
    onnx.save(wrong, tmp_path / "wrong.onnx")
    (tmp_path / "wrong.so").write_bytes(fused.with_suffix(".so").read_bytes())
    assert not verify(original, tmp_path / "wrong.onnx").ok


def test_older_opsets_are_refused_with_what_to_do(tmp_path: Path) -> None:
    model = regions.linear(depth=16, columns=16)
    model.opset_import[0].version = 12
    path = write(model, tmp_path / "old.onnx")
    with pytest.raises(CompileError, match=r"--precision bf16 needs opset 13.*the model has 12: convert it"):
        optimize(path, tmp_path / "fused.onnx", precision="bf16")
