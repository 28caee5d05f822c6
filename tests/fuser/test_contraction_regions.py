"""Contractions: how operands become rows, columns and batch, and how far epilogues grow."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from region_oracle import Scanned, check_regions, scanned

from models.graph import GraphWriter
from tilecore.contract.spec import ContractionSpec


def feeds(model: onnx.ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    sizes = {"batch": 2, "seq": 5}
    return {
        value.name: random.standard_normal(
            [dim.dim_value or sizes[dim.dim_param] for dim in value.type.tensor_type.shape.dim]
        ).astype(np.float32)
        for value in model.graph.input
    }


def scan_graph(g: GraphWriter, folder: Path) -> Scanned:
    model = g.finish()
    found = scanned(model, folder)
    check_regions(found, feeds(model))
    return found


def only(found: Scanned) -> ContractionSpec:
    (region,) = found.of("contraction")
    assert isinstance(region.spec, ContractionSpec)
    return region.spec


def extents(spec: ContractionSpec) -> tuple[str, str, str]:
    b, m, _ = spec.a.axes
    return str(b.extent), str(m.extent), str(spec.b.axes[2].extent)


def test_a_weight_sees_one_long_matrix(tmp_path: Path) -> None:
    g = GraphWriter(17)
    x = g.input("x", np.float32, ("batch", "seq", 8))
    g.op("MatMul", x, g.normal((8, 6), std=1), out="y")
    g.output("y", np.float32, ("batch", "seq", 6))
    spec = only(scan_graph(g, tmp_path))
    assert extents(spec) == ("1", "(batch * seq)", "6")
    assert [tensor.constant for tensor in spec.inputs] == [False, True]


def test_batched_operands_keep_their_batch(tmp_path: Path) -> None:
    g = GraphWriter(17)
    x, z = g.input("x", np.float32, ("batch", 3, "seq", 8)), g.input("z", np.float32, ("batch", 3, 8, 4))
    g.op("MatMul", x, z, out="y")
    g.output("y", np.float32, ("batch", 3, "seq", 4))
    assert extents(only(scan_graph(g, tmp_path))) == ("(batch * 3)", "seq", "4")


def test_a_constant_left_operand_goes_to_the_right(tmp_path: Path) -> None:
    g = GraphWriter(17)
    x = g.input("x", np.float32, ("batch", 8, "seq"))
    g.op("MatMul", g.normal((6, 8), std=1), x, out="y")
    g.output("y", np.float32, ("batch", 6, "seq"))
    spec = only(scan_graph(g, tmp_path))
    assert spec.b.value.source.constant  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    assert extents(spec)[2] == "6"


@pytest.mark.parametrize(("turn_a", "turn_b"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_gemm_factors_and_transposes(turn_a: int, turn_b: int, tmp_path: Path) -> None:
    g = GraphWriter(17)
    x = g.input("x", np.float32, (8, "seq") if turn_a else ("seq", 8))
    weight = g.normal((6, 8) if turn_b else (8, 6), std=1)
    g.op("Gemm", x, weight, g.normal((1, 6), std=1), out="y", alpha=0.5, beta=2.0, transA=turn_a, transB=turn_b)
    g.output("y", np.float32, ("seq", 6))
    assert extents(only(scan_graph(g, tmp_path))) == ("1", "seq", "6")


@pytest.mark.parametrize(
    ("equation", "left", "right", "out"),
    [
        ("bshd,hde->bse", ("batch", "seq", 3, 4), (3, 4, 5), ("batch", "seq", 5)),
        ("bsd,dhe->bhse", ("batch", "seq", 4), (4, 3, 5), ("batch", 3, "seq", 5)),
        ("...ij,...kj->...ik", ("batch", "seq", 4), ("batch", 6, 4), ("batch", "seq", 6)),
        ("ij,jk", ("seq", 4), (4, 6), ("seq", 6)),
    ],
)
def test_einsum(equation: str, left: tuple, right: tuple, out: tuple, tmp_path: Path) -> None:
    g = GraphWriter(17)
    x, z = g.input("x", np.float32, left), g.input("z", np.float32, right)
    g.op("Einsum", x, z, out="y", equation=equation)
    g.output("y", np.float32, out)
    only(scan_graph(g, tmp_path))


def test_convolutions_of_one_pixel(tmp_path: Path) -> None:
    g = GraphWriter(17)
    x = g.input("x", np.float32, ("batch", 6, 3, "seq"))
    g.op("Conv", x, g.normal((5, 6, 1, 1), std=1), g.normal((5,), std=1), out="y")
    g.output("y", np.float32, ("batch", 5, 3, "seq"))
    assert extents(only(scan_graph(g, tmp_path)))[2] == "5"


def test_f64_is_missed_with_a_reason(tmp_path: Path) -> None:
    g = GraphWriter(17)
    x = g.input("x", np.float64, ("seq", 8))
    g.op("MatMul", x, g.normal((8, 6), std=1, dtype=np.float64), out="y")
    g.output("y", np.float64, ("seq", 6))
    found = scanned(g.finish(), tmp_path)
    assert not found.regions
    assert "is f64; f32, f16 and bf16 accumulate in f32" in found.misses[0].reason


def test_an_inner_value_that_is_an_output_is_a_second_result(tmp_path: Path) -> None:
    g = GraphWriter(17)
    x = g.input("x", np.float32, ("seq", 8))
    h = g.op("MatMul", x, g.normal((8, 6), std=1), out="h")
    g.op("Tanh", g.op("Add", h, g.normal((6,), std=1)), out="y")
    g.output("h", np.float32, ("seq", 6))
    g.output("y", np.float32, ("seq", 6))
    (region,) = scan_graph(g, tmp_path).regions
    assert [value.name for value in region.outputs] == ["h", "y"]


def test_growth_stops_where_the_result_is_broadcast(tmp_path: Path) -> None:
    g = GraphWriter(17)
    x, z = g.input("x", np.float32, ("seq", 8)), g.input("z", np.float32, ("batch", "seq", 6))
    g.op("Add", g.op("MatMul", x, g.normal((8, 6), std=1)), z, out="y")
    g.output("y", np.float32, ("batch", "seq", 6))
    (region,) = scan_graph(g, tmp_path).of("contraction")
    assert region.label == "MatMul"


def test_growth_does_not_wait_for_itself(tmp_path: Path) -> None:
    """y = h + softmax(h): the addend depends on the product, so that Add is no epilogue of it."""
    g = GraphWriter(17)
    x = g.input("x", np.float32, ("seq", 8))
    h = g.op("MatMul", x, g.normal((8, 6), std=1))
    g.op("Add", h, g.op("Softmax", h), out="y")
    g.output("y", np.float32, ("seq", 6))
    found = scan_graph(g, tmp_path)
    assert [region.label for region in found.regions] == ["MatMul", "Softmax + Add"]


def test_layout_changes_after_a_product_are_its_own(tmp_path: Path) -> None:
    g = GraphWriter(17)
    x = g.input("x", np.float32, ("batch", "seq", 8))
    h = g.op("MatMul", x, g.normal((8, 6), std=1))
    heads = g.op("Reshape", h, g.constant([0, 0, 2, 3]))
    g.op("Transpose", heads, perm=[0, 2, 1, 3], out="y")
    g.output("y", np.float32, ("batch", 2, "seq", 3))
    (region,) = scan_graph(g, tmp_path).regions
    assert region.label == "MatMul + Reshape + Transpose"
