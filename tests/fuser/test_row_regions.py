"""Row programs: which nodes they take in, their steps and results."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from region_oracle import Scanned, check_regions, scanned

from models.graph import GraphWriter
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
