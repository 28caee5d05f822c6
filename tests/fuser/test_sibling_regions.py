"""Contractions of one left operand as one region: which are joined, what they give out, and what keeps them apart."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from region_oracle import Scanned, check_regions, scanned

from fuser.load import load
from fuser.packing import packing
from fuser.region import Prediction, Region
from fuser.scan import scan
from fuser.shapes import infer
from fuser.unfused import Work
from models.graph import GraphWriter
from tilecore.contract.evaluate import evaluate
from tilecore.contract.spec import ContractionSpec, Spec
from tilecore.pack import pack_constants

WIDTH = 8


def scan_graph(g: GraphWriter, folder: Path) -> Scanned:
    found = scanned(g.finish(), folder)
    check_regions(found, {"x": np.random.default_rng(0).standard_normal((2, 5, WIDTH)).astype(np.float32)})
    return found


def products(found: Scanned) -> list[tuple[int, int]]:
    """(products, outputs) of every contraction region, in order."""
    specs = [(region.spec, region.outputs) for region in found.of("contraction")]
    return [(len(spec.products), len(outputs)) for spec, outputs in specs if isinstance(spec, ContractionSpec)]


def start() -> tuple[GraphWriter, str]:
    g = GraphWriter(17)
    return g, g.input("x", np.float32, ("batch", "seq", WIDTH))


def give_out(g: GraphWriter, *values: str, columns: int = 6) -> None:
    for number, value in enumerate(values):
        g.op("Identity", value, out=f"y{number}")
        g.output(f"y{number}", np.float32, ("batch", "seq", columns))


def weigh(g: GraphWriter, x: str, rows: int = WIDTH, columns: int = 6) -> str:
    return g.op("MatMul", x, g.normal((rows, columns), std=1))


@pytest.mark.parametrize("count", [2, 3])
def test_projections_of_one_value_are_one_region(count: int, tmp_path: Path) -> None:
    g, x = start()
    give_out(g, *(g.op("Add", weigh(g, x), g.normal((6,), std=1)) for _ in range(count)))
    assert products(scan_graph(g, tmp_path)) == [(count, count)]


def test_four_projections_are_two_regions(tmp_path: Path) -> None:
    g, x = start()
    give_out(g, *(weigh(g, x) for _ in range(4)))
    assert products(scan_graph(g, tmp_path)) == [(3, 3), (1, 1)]


@pytest.mark.parametrize("activation", ["Sigmoid", "Erf"])
def test_a_gated_product_is_the_epilogue_of_both(activation: str, tmp_path: Path) -> None:
    g, x = start()
    gate, up = weigh(g, x), weigh(g, x)
    give_out(g, g.op("Mul", g.op("Mul", gate, g.op(activation, gate)), up))
    assert products(scan_graph(g, tmp_path)) == [(2, 1)]


def test_the_gate_may_come_after_its_partner(tmp_path: Path) -> None:
    g, x = start()
    up, gate = weigh(g, x), weigh(g, x)
    give_out(g, g.op("Mul", up, g.op("Tanh", gate)))
    assert products(scan_graph(g, tmp_path)) == [(2, 1)]


def test_reshaped_copies_of_one_value_are_the_same_operand(tmp_path: Path) -> None:
    g, x = start()
    flat = [g.op("Reshape", x, g.constant([-1, WIDTH], np.int64)) for _ in range(2)]
    back = [
        g.op("Reshape", g.op("Gemm", value, g.normal((WIDTH, 6), std=1)), g.shape(*dims))
        for value, dims in zip(flat, [(g.extent(x, 0, "batch"), g.extent(x, 1, "seq"), 6)] * 2, strict=True)
    ]
    give_out(g, *back)
    assert products(scan_graph(g, tmp_path)) == [(2, 2)]


def test_low_rank_updates_share_their_first_step(tmp_path: Path) -> None:
    g, x = start()
    bases, downs = [weigh(g, x) for _ in range(2)], [weigh(g, x, columns=2) for _ in range(2)]
    give_out(g, *(g.op("Add", base, weigh(g, down, rows=2)) for base, down in zip(bases, downs, strict=True)))
    assert (2, 2) in products(scan_graph(g, tmp_path))


def test_other_widths_other_values_and_equal_weights_stay_apart(tmp_path: Path) -> None:
    g, x = start()
    weight = g.normal((WIDTH, 6), std=1)
    give_out(
        g, weigh(g, g.op("Softmax", x)), g.op("MatMul", x, weight), g.op("Softmax", g.op("MatMul", x, weight), axis=1)
    )
    g.op("Identity", weigh(g, x, columns=3), out="narrow")
    g.output("narrow", np.float32, ("batch", "seq", 3))
    assert all(count == 1 for count, _ in products(scan_graph(g, tmp_path)))


def test_a_projection_that_waits_for_the_other_is_not_joined_to_it(tmp_path: Path) -> None:
    g, x = start()
    first = weigh(g, x)
    give_out(g, g.op("Add", weigh(g, x), g.op("Softmax", first, axis=-1)))
    found = scan_graph(g, tmp_path)
    assert products(found)[0] == (2, 2)  # the sum cannot be in it: it needs the softmax of one of the results


def test_a_weight_made_from_the_other_result_is_not_joined_to_it(tmp_path: Path) -> None:
    g, x = start()
    first = weigh(g, x)
    mean = g.op("ReduceMean", first, axes=[0, 1], keepdims=0)
    give_out(g, g.op("MatMul", x, g.op("Mul", g.normal((WIDTH, 6), std=1), mean)))
    assert all(count == 1 for count, _ in products(scan_graph(g, tmp_path)))


@dataclass(frozen=True)
class Never:
    """A cost model that wants every product alone."""

    def refuses(self, spec: Spec) -> None:
        return None

    def merges(self, spec: Spec) -> bool:
        return False

    def sizes(self, spec: Spec) -> Mapping[str, int]:
        return {}

    def predict(self, spec: Spec, nodes: tuple[Work, ...], sizes: Mapping[str, int]) -> None:
        return None

    def accepts(self, prediction: Prediction) -> bool:
        return True


def test_the_cost_model_is_asked(tmp_path: Path) -> None:
    g, x = start()
    give_out(g, *(weigh(g, x) for _ in range(3)))
    scan_graph(g, tmp_path)
    model = load(tmp_path / "model.onnx")
    regions, _ = scan(model, infer(model), Never())
    assert [len(region.outputs) for region in regions] == [1, 1, 1]


def test_every_bias_is_inside_when_norms_follow_some(tmp_path: Path) -> None:
    """The squares of the first norm lead to one more result: that branch is left, the other biases are still taken."""
    g, x = start()
    biased = [g.op("Add", weigh(g, x), g.normal((6,), std=1)) for _ in range(3)]
    square = [g.op("Mul", value, value) for value in biased[:2]]
    scale = [g.op("ReduceSum", value, g.constant([-1], np.int64), keepdims=1) for value in square]
    give_out(g, *(g.op("Mul", value, by) for value, by in zip(biased[:2], scale, strict=True)), biased[2])
    found = scan_graph(g, tmp_path)
    assert products(found) == [(3, 3)]
    (region,) = found.of("contraction")
    assert [node.op_type for node in region.nodes].count("Add") == 3


def packed(g: GraphWriter, x: str, columns: int, *, bias: bool = True) -> str:
    y = weigh(g, x, columns=columns)
    return g.op("Add", y, g.normal((columns,), std=1)) if bias else y


def by_split(g: GraphWriter, x: str, count: int, width: int) -> list[str]:
    return list(g.ops("Split", packed(g, x, count * width), outs=[None] * count, axis=-1))


def by_slices(g: GraphWriter, x: str, count: int, width: int) -> list[str]:
    y = packed(g, x, count * width)
    bounds = [(g.constant([i * width]), g.constant([(i + 1) * width])) for i in range(count)]
    return [g.op("Slice", y, *bound, g.constant([2])) for bound in reversed(bounds)]


def by_gather(g: GraphWriter, x: str, count: int, width: int) -> list[str]:
    y = packed(g, x, count * width, bias=False)
    y = g.op("Reshape", y, g.constant([0, 0, count, width]))
    return [g.op("Gather", y, g.constant(i), axis=2) for i in range(count)]


def by_convolution(g: GraphWriter, x: str, count: int, width: int) -> list[str]:
    channels = g.op("Transpose", x, perm=[0, 2, 1])
    y = g.op("Conv", channels, g.normal((count * width, WIDTH, 1), std=1), g.normal((count * width,), std=1))
    return list(g.ops("Split", y, outs=[None] * count, axis=1))


CUT = {"split": by_split, "slices": by_slices, "gather": by_gather, "convolution": by_convolution}


@pytest.mark.parametrize("cut", CUT.values(), ids=list(CUT))
@pytest.mark.parametrize("width", [16, 24])
def test_a_gate_and_its_partner_may_come_from_one_weight(
    cut: Callable[[GraphWriter, str, int, int], list[str]], width: int, tmp_path: Path
) -> None:
    g, x = start()
    gate, up = cut(g, x, 2, width)
    y = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
    y = g.op("Transpose", y, perm=[0, 2, 1]) if cut is by_convolution else y
    give_out(g, y, columns=width)
    found = scan_graph(g, tmp_path)
    assert products(found) == [(2, 1)]
    (region,) = found.of("contraction")
    weights = [tensor for tensor in region.spec.inputs if tensor.constant and len(tensor.shape) > 1]
    assert len(weights) == 1
    spec, positions = pack_constants(region.spec)
    place = region.spec.inputs.index(weights[0])
    assert (place in positions) == (width % 16 == 0)  # every slice begins at a panel, or none is packed
    for position in positions:
        tensor = region.inputs[position].const_value
        assert tensor is not None
        panels = packing(region, position).packed(tensor, "panels").numpy()
        assert panels.shape == tuple(int(str(dim)) for dim in spec.inputs[position].shape)
    check_packed(region, spec, positions)


def check_packed(region: Region, spec: Spec, positions: tuple[int, ...]) -> None:
    """The spec over panels computes what the spec over the weights does."""
    rng = np.random.default_rng(1)
    arrays: dict[str, np.ndarray] = {}
    for tensor, value in zip(region.spec.inputs, region.inputs, strict=True):
        shape = [{"batch": 2, "seq": 5}.get(str(dim)) or int(str(dim)) for dim in tensor.shape]
        arrays[tensor.name] = rng.standard_normal(shape) if value.const_value is None else value.const_value.numpy()
    stored = dict(arrays)
    for position in positions:
        tensor = region.inputs[position].const_value
        assert tensor is not None
        stored[spec.inputs[position].name] = packing(region, position).packed(tensor, "panels").numpy()
    expected = evaluate(region.spec, arrays)
    for name, value in evaluate(spec, stored).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-12, atol=1e-12)


def test_three_slices_of_one_weight_are_combined(tmp_path: Path) -> None:
    g, x = start()
    a, b, c = by_split(g, x, 3, 16)
    give_out(g, g.op("Add", g.op("Mul", a, g.op("Tanh", b)), c), columns=16)
    assert products(scan_graph(g, tmp_path)) == [(3, 1)]


def test_slices_that_are_needed_themselves_stay_one_product(tmp_path: Path) -> None:
    g, x = start()
    a, b = by_split(g, x, 2, 16)
    give_out(g, g.op("Mul", a, b), a, columns=16)
    assert products(scan_graph(g, tmp_path)) == [(1, 1)]


def test_slices_of_other_widths_and_interleaved_ones_stay_one_product(tmp_path: Path) -> None:
    g, x = start()
    wide, narrow = g.ops("Split", packed(g, x, 48), g.constant([32, 16]), outs=[None, None], axis=-1)
    give_out(g, g.op("Add", wide, g.op("Concat", narrow, narrow, axis=-1)), columns=32)
    g2, x2 = start()
    y = packed(g2, x2, 32)
    odd, even = (
        g2.op("Slice", y, g2.constant([i]), g2.constant([32]), g2.constant([2]), g2.constant([2])) for i in (0, 1)
    )
    give_out(g2, g2.op("Mul", odd, even), columns=16)
    for graph in (g, g2):
        assert products(scan_graph(graph, tmp_path)) == [(1, 1)]
