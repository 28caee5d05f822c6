"""Row programs: which nodes they take in, their steps and results."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import parser
from region_oracle import Scanned, check_regions, scanned

from models.graph import GraphWriter
from tilecore.contract.evaluate import evaluate
from tilecore.contract.spec import RowSpec


def scan_graph(g: GraphWriter, folder: Path) -> Scanned:
    model = g.finish()
    found = scanned(model, folder)
    random = np.random.default_rng(0)
    sizes = {"batch": 2, "seq": 5}
    feeds = {
        value.name: random.standard_normal(
            [dim.dim_value or sizes[dim.dim_param] for dim in value.type.tensor_type.shape.dim]
        ).astype(np.float32)
        for value in model.graph.input
    }
    check_regions(found, feeds)
    return found


def kinds(found: Scanned) -> list[str]:
    (region,) = found.regions
    assert isinstance(region.spec, RowSpec)
    return [step.kind for step in region.spec.steps]


def rows(g: GraphWriter) -> str:
    return g.input("x", np.float32, ("batch", "seq", 8))


def test_skip_and_layer_norm_are_one_program_of_two_results(tmp_path: Path) -> None:
    g = GraphWriter(17)
    x, skip = rows(g), g.input("skip", np.float32, ("batch", "seq", 8))
    total = g.op("Add", x, skip, out="total")
    g.op("LayerNormalization", total, g.normal((8,), std=1), g.normal((8,), std=1), out="y")
    g.output("total", np.float32, ("batch", "seq", 8))
    g.output("y", np.float32, ("batch", "seq", 8))
    found = scan_graph(g, tmp_path)
    assert kinds(found) == ["tile", "sum", "sum"]  # x + skip is kept for the later passes
    assert [value.name for value in found.regions[0].outputs] == ["total", "y"]


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize(("opset", "axis"), [(17, -1), (17, 1), (12, 1), (12, 2)])
def test_softmax_sums_over_the_axes_of_its_opset(op: str, opset: int, axis: int, tmp_path: Path) -> None:
    g = GraphWriter(opset)
    g.op(op, rows(g), axis=axis, out="y")
    g.output("y", np.float32, ("batch", "seq", 8))
    found = scan_graph(g, tmp_path)
    kinds(found)
    spec = found.regions[0].spec
    assert isinstance(spec, RowSpec)
    columns = {(17, -1): "8", (17, 1): "seq", (12, 1): "(seq * 8)", (12, 2): "8"}
    assert str(spec.column.extent) == columns[opset, axis]


REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "SumSquare", "L1", "L2", "LogSumExp")


@pytest.mark.parametrize("axes", [[-1], [1, 2], [1]])
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_with_work_around_them(name: str, axes: list[int], keep: int, tmp_path: Path) -> None:
    g = GraphWriter(17)
    x = rows(g)
    attributes: dict[str, Any] = {"axes": axes} if name != "Sum" else {}
    inputs = [g.op("Exp", x), *([g.constant(axes)] if name == "Sum" else [])]
    g.op("Sqrt", g.op(f"Reduce{name}", *inputs, keepdims=keep, **attributes), out="y")
    dims = ["batch", "seq", 8]
    for axis in axes:
        dims[axis] = 1
    g.output("y", np.float32, [dim for i, dim in enumerate(dims) if keep or (i - 3 not in axes and i not in axes)])
    assert len(scan_graph(g, tmp_path).of("row")) == 1


def test_the_logarithm_of_a_sum_of_powers_may_be_infinite(tmp_path: Path) -> None:
    """Infinity less infinity never takes part. Against ONNX Runtime: onnx.reference has NaN for −inf alone."""
    g = GraphWriter(17)
    g.op("Neg", g.op("ReduceLogSumExp", rows(g), axes=[-1]), out="y")
    g.output("y", np.float32, ("batch", "seq", 1))
    model = g.finish()
    (region,) = scanned(model, tmp_path).regions
    x = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32)
    x[0, 0, 3], x[0, 1], x[0, 2, :2], x[1, 0, 0] = np.inf, -np.inf, (np.inf, -np.inf), np.nan
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x})
    np.testing.assert_allclose(evaluate(region.spec, {"x": x})["y"], np.asarray(expected), rtol=1e-5)


def test_a_reduction_alone_is_missed_with_a_reason(tmp_path: Path) -> None:
    g = GraphWriter(17)
    g.op("ReduceMean", rows(g), axes=[-1], out="y")
    g.output("y", np.float32, ("batch", "seq", 1))
    found = scan_graph(g, tmp_path)
    assert not found.regions
    assert [miss.reason for miss in found.misses] == ["there is no other work around it to fuse it with"]


def test_reductions_over_different_axes_are_two_programs(tmp_path: Path) -> None:
    g = GraphWriter(17)
    first = g.op("Softmax", rows(g), axis=-1)
    g.op("Softmax", first, axis=1, out="y")
    g.output("y", np.float32, ("batch", "seq", 8))
    assert [region.label for region in scan_graph(g, tmp_path).regions] == ["Softmax", "Softmax"]


def test_a_mean_per_row_is_a_result_of_its_own(tmp_path: Path) -> None:
    g = GraphWriter(17)
    x = rows(g)
    mean = g.op("ReduceMean", x, axes=[-1], out="mean")
    g.op("Sub", x, mean, out="y")
    g.output("mean", np.float32, ("batch", "seq", 1))
    g.output("y", np.float32, ("batch", "seq", 8))
    (region,) = scan_graph(g, tmp_path).regions
    assert [len(result.place.axes) for result in region.spec.outputs] == [1, 2]


def test_pointwise_chains_need_two_nodes_or_a_heavy_one(tmp_path: Path) -> None:
    g = GraphWriter(20)
    x = rows(g)
    g.op("Neg", x, out="light")
    g.op("Gelu", x, out="heavy")
    g.op("Mul", g.op("Add", x, x), x, out="two")
    for name in ("light", "heavy", "two"):
        g.output(name, np.float32, ("batch", "seq", 8))
    assert sorted(region.label for region in scan_graph(g, tmp_path).regions) == ["Add + Mul", "Gelu"]


def test_a_value_read_at_another_row_is_no_part_of_the_program(tmp_path: Path) -> None:
    """keepdims=0 on a square input: the means run along the columns when they are subtracted."""
    g = GraphWriter(17)
    x = g.input("x", np.float32, (8, 8))
    g.op("Exp", g.op("Sub", x, g.op("ReduceMean", x, axes=[-1], keepdims=0)), out="y")
    g.output("y", np.float32, (8, 8))
    found = scan_graph(g, tmp_path)
    assert [region.label for region in found.regions] == ["Sub + Exp"]


def group_norm(g: GraphWriter, x: str) -> str:
    """Normalised over channel groups of 2 and the image, by a mean of squares; scaled per channel."""
    grouped = g.op("Reshape", x, g.constant([0, 2, -1]))
    mean = g.op("ReduceMean", grouped, axes=[2])
    square = g.op("ReduceMean", g.op("Mul", grouped, grouped), axes=[2])
    variance = g.op("Sub", square, g.op("Mul", mean, mean))
    deviation = g.op("Sqrt", g.op("Add", variance, g.constant(1e-5, np.float32)))
    normal = g.op("Div", g.op("Sub", grouped, mean), deviation)
    normal = g.op("Reshape", normal, g.op("Shape", x))
    return g.op("Mul", normal, g.normal((4, 1, 1), std=1))


def instance_norm(g: GraphWriter, x: str) -> str:
    """The same by InstanceNormalization, as PyTorch exports it."""
    grouped = g.op("Reshape", x, g.constant([0, 2, -1]))
    ones, zeros = g.constant([1, 1], np.float32), g.constant([0, 0], np.float32)
    normal = g.op("Reshape", g.op("InstanceNormalization", grouped, ones, zeros), g.op("Shape", x))
    return g.op("Add", g.op("Mul", normal, g.normal((4, 1, 1), std=1)), g.normal((4, 1, 1), std=1))


@pytest.mark.parametrize("dims", [("batch", 4, 3, 5), ("batch", 4, "seq", "seq")])
@pytest.mark.parametrize("norm", [group_norm, instance_norm])
def test_a_group_norm_between_activations_is_one_program(norm: Any, dims: tuple[Any, ...], tmp_path: Path) -> None:
    g = GraphWriter(17)
    x = g.input("x", np.float32, dims)
    y = norm(g, g.op("Tanh", x))
    g.op("Mul", y, g.op("Sigmoid", y), out="y")
    g.output("y", np.float32, dims)
    found = scan_graph(g, tmp_path)
    assert kinds(found) == ["tile", "sum", "sum"]
    assert str(found.regions[0].spec.row.extent) == "(batch * 2)"  # pyright: ignore[reportAttributeAccessIssue]


def test_other_normalisations_over_several_axes_are_one_program(tmp_path: Path) -> None:
    g = GraphWriter(17)
    x = g.input("x", np.float32, ("batch", 4, "seq", 3))
    y = g.op("MeanVarianceNormalization", x)
    g.op("InstanceNormalization", y, g.normal((4,), std=1), g.normal((4,), std=1), out="y")
    g.output("y", np.float32, ("batch", 4, "seq", 3))
    found = scan_graph(g, tmp_path)
    assert [region.kind for region in found.regions] == ["row", "row"]  # their rows differ


def test_axes_that_a_tensor_does_not_have_are_a_miss(tmp_path: Path) -> None:
    """Those of MeanVarianceNormalization that are not given are for four axes; ONNX Runtime passes over the last."""
    g = GraphWriter(17)
    g.op("MeanVarianceNormalization", g.op("Exp", g.input("x", np.float32, (3, 4, 5))), out="y")
    g.output("y", np.float32, (3, 4, 5))
    found = scanned(g.finish(), tmp_path)
    assert not any(node.op_type == "MeanVarianceNormalization" for region in found.regions for node in region.nodes)
    assert any("axes [0, 2, 3] of a tensor that has 3" in miss.reason for miss in found.misses)


def test_reductions_along_other_axes_stay_apart(tmp_path: Path) -> None:
    """Of a square, where shapes alone do not tell the axes."""
    g = GraphWriter(17)
    x = g.op("Exp", g.input("x", np.float32, (5, 5)))
    total = g.op("ReduceMean", x, axes=[1])
    g.op("Div", g.op("Sub", x, total), g.op("ReduceMean", g.op("Abs", total), axes=[0]), out="y")
    g.output("y", np.float32, (5, 5))
    found = scan_graph(g, tmp_path)
    assert all(len(kinds_of(region)) < 2 for region in found.regions)


def kinds_of(region: Any) -> list[str]:
    return [step.kind for step in region.spec.steps if step.kind != "tile"]


def test_what_a_chain_reads_twice_is_inside(tmp_path: Path) -> None:
    """x / 2 of a GELU comes before the rest in no region of its own, in whatever order the nodes stand."""
    g = GraphWriter(17)
    x = rows(g)
    inner = g.op("Add", g.op("Erf", g.op("Mul", x, g.constant(0.70710678, np.float32))), g.constant(1, np.float32))
    g.op("Mul", g.op("Mul", x, g.constant(0.5, np.float32)), inner, out="y")
    g.output("y", np.float32, ("batch", "seq", 8))
    found = scan_graph(g, tmp_path)
    assert len(found.regions[0].nodes) == 5


def test_defaults_of_float_attributes_are_float32_in_float64_models(tmp_path: Path) -> None:
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        agraph (double[n, 4] x, double[4] scale) => (double[n, 4] y) { y = LayerNormalization(x, scale) }""")
    (region,) = scanned(model, tmp_path).regions
    x, scale = np.random.default_rng(0).normal(size=(3, 4)) / 100, np.ones(4)
    centred = x - x.mean(1, keepdims=True)
    wanted = centred / np.sqrt((centred**2).mean(1, keepdims=True) + np.float64(np.float32(1e-5)))
    np.testing.assert_allclose(evaluate(region.spec, {"x": x, "scale": scale})["y"], wanted, rtol=1e-13)
