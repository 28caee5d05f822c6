"""The cost model's part in the scan: what it declines is a miss with both figures, and what must be fused stays so."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from fuser.find import find
from fuser.load import load
from fuser.region import Prediction
from fuser.rewrite import Replacement, rewrite
from fuser.unfused import Work
from fuser.worth import CostModel
from models import bert, quantized, regions
from models.graph import GraphWriter
from runtime.cost import machine_cost
from tilecore.contract.dtype import DType
from tilecore.contract.spec import ContractionSpec, Spec
from tilecore.profile import profile_named

ZEN3 = profile_named("zen3")


@dataclass(frozen=True)
class Miser:
    """A cost model that never sees a gain."""

    def refuses(self, spec: Spec) -> None:
        return None

    def merges(self, spec: Spec) -> bool:
        return True

    def sizes(self, spec: Spec) -> Mapping[str, int]:
        return {}

    def predict(self, spec: Spec, nodes: tuple[Work, ...], sizes: Mapping[str, int]) -> Prediction:
        return Prediction(2e-6, 1e-6, sizes)

    def accepts(self, prediction: Prediction) -> bool:
        return prediction.fused <= prediction.unfused


def softmax(folder: Path) -> Path:
    g = GraphWriter(17)
    x = g.input("x", np.float32, (4, 64))
    g.op("Softmax", x, out="y", axis=-1)
    g.output("y", np.float32, (4, 64))
    onnx.save(g.finish(), folder / "model.onnx")
    return folder / "model.onnx"


def flat_norm(folder: Path) -> Path:
    """A normalisation whose mean keeps no axis: left to ONNX Runtime, it would be taken for another one."""
    g = GraphWriter(17)
    x = g.input("x", np.float32, (8, 8))
    centred = g.op("Sub", x, g.op("ReduceMean", x, axes=[-1], keepdims=0))
    variance = g.op("ReduceMean", g.op("Mul", centred, centred), axes=[-1], keepdims=1)
    g.op("Div", centred, g.op("Sqrt", g.op("Add", variance, g.constant(1e-5, np.float32))), out="y")
    g.output("y", np.float32, (8, 8))
    onnx.save(g.finish(), folder / "model.onnx")
    return folder / "model.onnx"


def test_a_region_without_a_gain_is_a_miss_with_both_figures(tmp_path: Path) -> None:
    found = find(load(softmax(tmp_path)), Miser())
    assert not found.regions
    (miss,) = found.misses
    assert "predicted 0.50× as fast: 2.0 µs as one kernel, 1.0 µs as it is" in miss.reason
    assert "--all" in miss.advice


def test_chains_that_a_session_misreads_are_fused_whatever_they_cost(tmp_path: Path) -> None:
    found = find(load(flat_norm(tmp_path)), Miser())
    (region,) = found.regions
    assert {"Sub", "ReduceMean", "Sqrt", "Div"} <= {node.op_type for node in region.nodes}
    assert not any("predicted" in miss.reason for miss in found.misses)


def test_all_declines_nothing() -> None:
    loss = Prediction(1.0, 0.5, {})
    assert not machine_cost(ZEN3, ZEN3.target, fuse_all=False).accepts(loss)
    assert machine_cost(ZEN3, ZEN3.target, fuse_all=True).accepts(loss)


@pytest.mark.parametrize(("depth", "columns"), [(64, 172), (768, 768), (768, 2048), (2048, 5632)])
def test_gated_products_are_expected_to_pay(depth: int, columns: int, tmp_path: Path) -> None:
    g = GraphWriter(17)
    x = g.input("x", np.float32, ("batch", "seq", depth))
    gate, up = (g.op("MatMul", x, g.normal((depth, columns), std=1)) for _ in range(2))
    g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up, out="y")
    g.output("y", np.float32, ("batch", "seq", columns))
    onnx.save(g.finish(), tmp_path / "model.onnx")
    (region,) = find(load(tmp_path / "model.onnx"), machine_cost(ZEN3, ZEN3.target, fuse_all=False)).regions
    assert isinstance(region.spec, ContractionSpec)
    assert len(region.spec.products) == 2


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_an_encoder_is_fused_as_without_a_cost_model(exporter: bert.Exporter, tmp_path: Path) -> None:
    path = bert.build(tmp_path / "bert.onnx", exporter=exporter, size=bert.Size(hidden=384, heads=12))
    cost: CostModel = machine_cost(ZEN3, ZEN3.target, fuse_all=False)
    judged, free = find(load(path), cost), find(load(path))
    assert sorted(r.kind for r in judged.regions) == sorted(r.kind for r in free.regions)
    assert not judged.misses
    assert all(r.predicted is not None and cost.accepts(r.predicted) for r in judged.regions)


def test_predictions_are_noted_on_the_fused_nodes(tmp_path: Path) -> None:
    found = find(load(softmax(tmp_path)), machine_cost(ZEN3, ZEN3.target, fuse_all=True))
    (region,) = found.regions
    model = rewrite(found.model, [Replacement(region, "Fused")]).model
    (node,) = model.graph
    assert region.predicted is not None
    assert node.metadata_props["tilefuse.predicted"] == region.predicted.text


@pytest.mark.parametrize(("depth", "columns"), [(768, 768), (768, 3072), (3072, 768)])
def test_sums_of_levels_are_not_left_alone(depth: int, columns: int, tmp_path: Path) -> None:
    """Regions around one would take the operators by which ONNX Runtime knows that it may sum integers."""
    path = tmp_path / "model.onnx"
    onnx.save(quantized.linear(depth=depth, columns=columns), path)
    found = find(load(path), machine_cost(ZEN3, ZEN3.target, fuse_all=False))
    (region,) = (region for region in found.regions if isinstance(region.spec, ContractionSpec))
    assert isinstance(region.spec, ContractionSpec)
    assert region.spec.acc.dtype is DType.I32


def test_products_of_bytes_are_predicted_by_what_multiplies_bytes(tmp_path: Path) -> None:
    """128 × 768 × 3072 of levels on one core of a Sapphire Rapids: 0.5 ms, and 2.7 ms in float32."""
    profile = replace(profile_named("sapphire-rapids"), cores=1)
    taken: list[float] = []
    for name, model in (
        ("levels", quantized.linear(depth=768, columns=3072)),
        ("floats", regions.linear(depth=768, columns=3072)),
    ):
        onnx.save(model, tmp_path / f"{name}.onnx")
        found = find(load(tmp_path / f"{name}.onnx"), machine_cost(profile, profile.target, fuse_all=False))
        (region,) = (region for region in found.regions if isinstance(region.spec, ContractionSpec))
        assert region.predicted is not None
        taken.append(region.predicted.fused)
        assert name == "floats" or region.predicted.fused <= 1.1 * region.predicted.unfused
    assert taken[0] < taken[1] / 2


@pytest.mark.parametrize("cores", [1, 2, 16])
@pytest.mark.parametrize("name", ["sapphire-rapids", "zen5"])
def test_operands_in_bfloat16_are_judged_as_such(name: str, cores: int, tmp_path: Path) -> None:
    """Both have instructions for such products, which take at most half the time of float32's: none is left alone."""
    path = tmp_path / "model.onnx"
    onnx.save(regions.linear(depth=3072, columns=768), path)
    profile = replace(profile_named(name), cores=cores)
    taken: list[float] = []
    for narrow in (True, False):
        cost = machine_cost(profile, profile.target, fuse_all=not narrow, narrow=narrow)
        (region,) = find(load(path), cost).regions
        assert region.predicted is not None
        taken.append(region.predicted.fused)
    assert taken[0] < taken[1] / 2


@pytest.mark.parametrize("cores", [2, 4, 8, 16, 32])
def test_many_cores_leave_no_product_alone(cores: int, tmp_path: Path) -> None:
    """There ONNX Runtime loses more between its threads: on 16 of a Sapphire Rapids it takes 1.25 times our time."""
    profile = replace(profile_named("sapphire-rapids"), cores=cores, l3=300 << 20)
    for depth, columns in ((768, 768), (768, 3072), (3072, 768), (768, 2304)):
        path = tmp_path / "model.onnx"
        onnx.save(regions.linear(depth=depth, columns=columns), path)
        found = find(load(path), machine_cost(profile, profile.target, fuse_all=False))
        assert not found.misses, (depth, columns)
        assert len(found.regions) == 1


def test_a_few_microseconds_say_nothing() -> None:
    """Predictions leave out most of what a small operator costs by being one at all."""
    cost = machine_cost(ZEN3, ZEN3.target, fuse_all=False)
    assert cost.accepts(Prediction(7.2e-6, 2.5e-6, {}))
    assert not cost.accepts(Prediction(720e-6, 250e-6, {}))


def test_functions_that_are_called_for_each_element_are_expected_to_cost_that(tmp_path: Path) -> None:
    """libm takes 4 to 16 ns for a power or a function of double precision; vectors of exp and sin take less than 1."""
    cost, kernels = machine_cost(ZEN3, ZEN3.target, fuse_all=True), dict[str, float]()
    for name, dtype in (("Mul", np.float32), ("Sin", np.float32), ("Pow", np.float32), ("Exp", np.float64)):
        g = GraphWriter(17)
        x = g.input("x", dtype, (512, 768))
        y = g.op(name, x, x) if name in ("Mul", "Pow") else g.op(name, x)
        g.op("Add", g.op("Mul", y, x), x, out="y")
        g.output("y", dtype, (512, 768))
        onnx.save(g.finish(), tmp_path / "model.onnx")
        (region,) = find(load(tmp_path / "model.onnx"), cost).regions
        assert region.predicted is not None
        kernels[name] = region.predicted.fused / (512 * 768 / ZEN3.cores) * 1e9  # ns for each element of a core
    assert kernels["Mul"] < kernels["Sin"] < kernels["Mul"] + 2
    assert 3.5 < kernels["Pow"] < 12
    assert 3.5 < kernels["Exp"] < 16
