"""Convolutions as contractions over taps and channels: every stride, dilation and padding, and what is refused."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from region_oracle import Scanned, check_regions, scanned

from fuser.packing import packing
from models.graph import GraphWriter
from tilecore.contract.panel import rows_of, unpack
from tilecore.contract.spec import ContractionSpec

SAMPLE = {"batch": 2, "length": 17, "height": 7}


@dataclass(frozen=True)
class Case:
    """`channels` inputs and `columns` results; `size` of the spatial axes, a name for one that is not known."""

    taps: tuple[int, ...]
    size: tuple[int | str, ...] = ("length",)
    channels: int = 5
    columns: int = 6
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    bias: bool = True

    def feeds(self, seed: int = 0, **sizes: int) -> dict[str, np.ndarray]:
        """Random inputs."""
        known = SAMPLE | self.sizes | sizes
        spatial = (size if isinstance(size, int) else known[size] for size in self.size)
        shape = [known["batch"], self.channels, *spatial]
        return {"x": np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)}


CASES: dict[str, Case] = {
    "of three, padded": Case((3,), attributes={"pads": [1, 1]}),
    "strided": Case((3,), attributes={"pads": [1, 1], "strides": [2]}),
    "strided, even": Case((3,), attributes={"pads": [1, 1], "strides": [2]}, sizes={"length": 16}),
    "dilated, more behind": Case((3,), attributes={"pads": [1, 4], "dilations": [3]}),
    "more before, few channels": Case((5,), channels=2, attributes={"pads": [3, 0], "strides": [3]}),
    "longer than the input": Case((7,), attributes={"pads": [4, 3]}, sizes={"length": 2}),
    "valid": Case((4,), attributes={"auto_pad": "VALID", "strides": [2]}, bias=False),
    "same, upper": Case((4,), attributes={"auto_pad": "SAME_UPPER"}),
    "same, lower, strided": Case((4,), attributes={"auto_pad": "SAME_LOWER", "strides": [3]}),
    "same, upper, wide strides": Case((2,), attributes={"auto_pad": "SAME_UPPER", "strides": [5]}),
    "whole vectors of channels": Case((3,), channels=32, columns=17, attributes={"pads": [1, 1]}),
    "of a plane": Case((3, 2), ("height", 9), attributes={"pads": [1, 0, 2, 1], "strides": [2, 1]}),
    "dilated in a plane": Case((2, 3), ("height", 9), 3, attributes={"dilations": [2, 3], "pads": [0, 2, 1, 2]}),
    "patches": Case((4, 4), (8, 12), channels=3, columns=16, attributes={"strides": [4, 4]}),
    "of a volume": Case((2, 2, 2), (4, 3, 5), channels=2, attributes={"pads": [1, 0, 0, 0, 1, 0]}),
    "of one": Case((1,), attributes={"strides": [2], "pads": [1, 0]}),
}


def model_of(case: Case, *, weight: np.ndarray | None = None) -> onnx.ModelProto:
    """x → Conv → Relu → y."""
    g = GraphWriter(17)
    x = g.input("x", np.float32, ("batch", case.channels, *case.size))
    shape = (case.columns, case.channels, *case.taps)
    made = g.normal(shape, std=0.3) if weight is None else g.initializer(weight)
    operands = [x, made, *([g.normal((case.columns,), std=1, name="bias")] if case.bias else [])]
    g.op("Relu", g.op("Conv", *operands, kernel_shape=list(case.taps), **case.attributes), out="y")
    g.output("y", np.float32, ("batch", case.columns, *(None for _ in case.size)))
    return g.finish()


def only(found: Scanned) -> ContractionSpec:
    (region,) = found.of("contraction")
    assert isinstance(region.spec, ContractionSpec)
    return region.spec


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_windows_read_what_the_operator_reads(case: Case, tmp_path: Path) -> None:
    found = scanned(model_of(case), tmp_path)
    assert only(found).outputs[0].place.tensor.name == "y"  # with what follows
    check_regions(found, case.feeds())


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 16])
def test_a_length_that_is_known_at_run_time_may_be_any(length: int, tmp_path: Path) -> None:
    case = Case((3,), attributes={"pads": [1, 2], "strides": [2]})
    check_regions(scanned(model_of(case), tmp_path), case.feeds(length=length))


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_padding_is_a_zero_that_is_multiplied(odd: float, tmp_path: Path) -> None:
    weight = np.ones((6, 5, 3), np.float32)
    weight[1, 2, 0] = odd
    case = Case((3,), attributes={"pads": [1, 1]})
    found = scanned(model_of(case, weight=weight), tmp_path)
    check_regions(found, case.feeds())


def test_weights_are_packed_by_taps_of_all_channels(tmp_path: Path) -> None:
    found = scanned(model_of(CASES["whole vectors of channels"]), tmp_path)
    (region,) = found.of("contraction")
    spec = only(found)
    (load,) = (load for load in [spec.b.value])
    rows = rows_of(load, spec.b)  # pyright: ignore[reportArgumentType]
    assert rows is not None
    assert (rows.count, rows.by_column, rows.turned) == (96, True, 3)
    index = next(i for i, tensor in enumerate(spec.inputs) if tensor == load.source)  # pyright: ignore
    value = region.inputs[index].const_value
    assert value is not None
    panels = packing(region, index).packed(value, "panels").numpy()
    matrix = value.numpy().transpose(2, 1, 0).reshape(96, 17)
    np.testing.assert_array_equal(unpack(panels, 17), matrix)


def test_groups_are_missed_with_a_reason(tmp_path: Path) -> None:
    g = GraphWriter(17)
    x = g.input("x", np.float32, ("batch", 6, "length"))
    g.op("Conv", x, g.normal((6, 3, 3), std=1), out="y", group=2)
    g.output("y", np.float32, ("batch", 6, None))
    (miss,) = scanned(g.finish(), tmp_path).misses
    assert miss.kind == "contraction"
    assert "has 2 groups of channels" in miss.reason


def test_what_lies_between_two_convolutions_is_fused_with_the_first(tmp_path: Path) -> None:
    g = GraphWriter(17)
    x = g.input("x", np.float32, ("batch", 4, "length"))
    h = g.op("Tanh", g.op("Conv", x, g.normal((8, 4, 3), std=0.3), g.normal((8,), std=1), pads=[1, 1]))
    z = g.op("Conv", h, g.normal((6, 8, 3), std=0.3), pads=[1, 1], strides=[2])
    g.op("Transpose", z, perm=[0, 2, 1], out="y")
    g.output("y", np.float32, ("batch", None, 6))
    found = scanned(g.finish(), tmp_path)
    assert [region.label for region in found.regions] == ["Conv + Tanh", "Conv + Transpose"]
    check_regions(found, {"x": np.random.default_rng(0).standard_normal((2, 4, 9), dtype=np.float32)})


def levels(*shape: int, dtype: Any, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype)


def test_padding_of_levels_is_their_zero_point(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(levels(6, 5, 3, dtype=np.int8, seed=1), "w")
    zero = numpy_helper.from_array(np.asarray(121, np.uint8), "zero")
    node = helper.make_node("ConvInteger", ["x", "w", "zero"], ["y"], pads=[1, 2], strides=[2])
    x = helper.make_tensor_value_info("x", TensorProto.UINT8, ["batch", 5, "length"])
    y = helper.make_tensor_value_info("y", TensorProto.INT32, ["batch", 6, None])
    graph = helper.make_graph([node], "levels", [x], [y], [weight, zero])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    found = scanned(model, tmp_path)
    only(found)
    check_regions(found, {"x": levels(2, 5, 9, dtype=np.uint8, seed=2)})
