"""Rewriting: the model computes the same through the function bodies, is valid ONNX, and keeps its interface."""

import collections
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from fuser.body import RewriteError
from fuser.load import load
from fuser.packing import PackingError, packing
from fuser.region import Region
from fuser.rewrite import Replacement, Rewritten, rewrite
from fuser.save import save
from fuser.scan import scan
from fuser.shapes import infer
from models import bert
from models.attention import SPELLINGS
from models.catalogue import Entry
from models.graph import write
from models.traps import TRAPS
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Load, Sym, Var, const
from tilecore.contract.spec import ContractionSpec, Place, Result, Tensor, View, outputs_of

ENTRIES = (*TRAPS, *SPELLINGS)


def session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(path, options)


def run(path: Path, feeds: dict[str, npt.NDArray[np.generic]]) -> list[np.ndarray]:
    return [np.asarray(result) for result in session(path).run(None, feeds)]


def replacements(regions: Sequence[Region]) -> list[Replacement]:
    """An operator per spec, with every weight packed that can be."""
    made: list[Replacement] = []
    for region in regions:
        panels = tuple(index for index in range(len(region.inputs)) if is_packable(region, index))
        text = f"{region.spec} {panels}"
        for index, tensor in enumerate((*region.spec.inputs, *outputs_of(region.spec))):
            text = text.replace(repr(tensor.name), f"tensor {index}")
        made.append(Replacement(region, f"Fused_{hashlib.sha256(text.encode()).hexdigest()[:8]}", panels))
    return made


def is_packable(region: Region, index: int) -> bool:
    if not isinstance(region.spec, ContractionSpec):
        return False
    try:
        packing(region, index)
    except PackingError:
        return False
    return True


def fused(path: Path, output: Path) -> Rewritten:
    model = load(path)
    regions, _ = scan(model, infer(model))
    rewritten = rewrite(model, replacements(regions))
    save(rewritten.model, output)
    return rewritten


def check_interface(before: Path, after: Path) -> None:
    old, new = (onnx.load(path, load_external_data=False) for path in (before, after))
    assert list(map(str, new.graph.input)) == list(map(str, old.graph.input))
    assert list(map(str, new.graph.output)) == list(map(str, old.graph.output))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_catalogue_computes_the_same_without_the_library(tmp_path: Path, entry: Entry) -> None:
    before, after = write(entry.build(dynamic=True), tmp_path / "in.onnx"), tmp_path / "out.onnx"
    fused(before, after)
    check_interface(before, after)
    onnx.checker.check_model(str(after), full_check=True)
    for sizes in entry.sizes:
        feeds = entry.feeds(sizes)
        for old, new in zip(run(before, feeds), run(after, feeds), strict=True):
            assert old.dtype == new.dtype
            np.testing.assert_allclose(new, old, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("external", [False, True])
def test_an_encoder(tmp_path: Path, exporter: bert.Exporter, external: bool) -> None:
    before, after = bert.build(tmp_path / "in.onnx", exporter=exporter, external=external), tmp_path / "out.onnx"
    rewritten = fused(before, after)
    check_interface(before, after)
    onnx.checker.check_model(str(after), full_check=True)
    kinds = collections.Counter(node.domain for node in rewritten.model.graph)
    assert kinds["tilefuse"] > kinds[""]
    assert len(rewritten.model.functions) < kinds["tilefuse"]  # the layers share their functions
    assert not rewritten.aliases
    for batch, seq in ((2, 5), (1, 1), (3, 8)):
        feeds: dict[str, npt.NDArray[np.generic]] = {name: np.ones((batch, seq), np.int64) for name in bert.INPUTS}
        for old, new in zip(run(before, feeds), run(after, feeds), strict=True):
            np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5)


def test_onnx_infers_shapes_through_the_functions(tmp_path: Path) -> None:
    fused(bert.build(tmp_path / "in.onnx"), tmp_path / "out.onnx")
    model = onnx.load(tmp_path / "out.onnx")
    del model.graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    known = {value.name for value in (*inferred.graph.value_info, *inferred.graph.output)}
    assert {name for node in model.graph.node for name in node.output} <= known


def test_symbolic_dims_are_recorded(tmp_path: Path) -> None:
    model = fused(bert.build(tmp_path / "in.onnx"), tmp_path / "out.onnx").model
    node = next(node for node in model.graph if node.domain == "tilefuse" and not node.outputs[0].is_graph_output())
    assert node.outputs[0].shape == ir.Shape(["batch", "seq", 32])
    assert node.metadata_props["tilefuse.label"]
    assert node.metadata_props["tilefuse.nodes"]


def test_a_rewritten_model_loads_and_is_left_alone(tmp_path: Path) -> None:
    once, twice = tmp_path / "once.onnx", tmp_path / "twice.onnx"
    fused(bert.build(tmp_path / "in.onnx"), once)
    model = load(once)
    save(rewrite(model, []).model, twice)
    assert [node.op_type for node in onnx.load(once).graph.node] == [
        node.op_type for node in onnx.load(twice).graph.node
    ]
    feeds: dict[str, npt.NDArray[np.generic]] = {name: np.ones((2, 5), np.int64) for name in bert.INPUTS}
    np.testing.assert_array_equal(run(once, feeds)[0], run(twice, feeds)[0])


# -- by hand ----------------------------------------------------------------------------------------------------------


def linear(shape: tuple[int, int] = (4, 20)) -> onnx.ModelProto:
    """Two linear layers with one weight, and an extra reader of the first product."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        agraph (float[n, 4] x) => (float[n, 20] y, float[n, 20] z) {
        a = MatMul(x, w) y = Relu(a) b = Neg(x) c = MatMul(b, w) z = Relu(c) }""")
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    return model


def by_hand(model: ir.Model, product: str, result: str, *, nodes: Sequence[str] | None = None) -> Region:
    """The region of a MatMul and what follows it up to `result`."""
    named = {value.name: value for node in model.graph for value in (*node.inputs, *node.outputs) if value is not None}
    named |= {value.name: value for value in model.graph.outputs}
    matmul = named[product].producer()
    assert matmul is not None
    left, weight = matmul.inputs
    assert left is not None
    assert weight is not None
    rows = Sym("n")
    x, w = Tensor(left.name or "", DType.F32, (rows, const(4))), Tensor("w", DType.F32, (const(4), const(20)), True)
    y = Tensor(result, DType.F32, (rows, const(20)))
    b, m, k, n = (
        Var("b", extent=const(1)),
        Var("m", extent=rows),
        Var("k", extent=const(4)),
        Var("n", extent=const(20)),
    )
    acc = Var("acc", DType.F32)
    spec = ContractionSpec(
        (x, w), View("a", (b, m, k), Load(x, (m, k))), View("b", (b, k, n), Load(w, (k, n))), acc,
        (Result(Place(y, (b, m, n), (m, n)), acc),),
    )  # fmt: skip
    taken = [node for node in model.graph if node.outputs[0].name in (nodes or (product, result))]
    return Region("contraction", f"linear to {result}", tuple(taken), (left, weight), (named[result],), spec)


def test_equal_weights_are_packed_once_and_the_original_goes(tmp_path: Path) -> None:
    before, after = write(linear(), tmp_path / "in.onnx"), tmp_path / "out.onnx"
    model = load(before)
    regions = [by_hand(model, "a", "y"), by_hand(model, "c", "z")]
    rewritten = rewrite(model, [Replacement(region, "FusedLinear", (1,)) for region in regions])
    save(rewritten.model, after)
    assert list(rewritten.model.graph.initializers) == ["w.panels0"]
    assert rewritten.op_types == ("FusedLinear", "FusedLinear")
    assert len(rewritten.model.functions) == 1
    stored = onnx.numpy_helper.to_array(onnx.load(after).graph.initializer[0])
    assert stored.shape == (2, 4, 16)
    feeds: dict[str, npt.NDArray[np.generic]] = {
        "x": np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    }
    for old, new in zip(run(before, feeds), run(after, feeds), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_weight_that_is_read_elsewhere_stays(tmp_path: Path) -> None:
    model = load(write(linear(), tmp_path / "in.onnx"))
    rewritten = rewrite(model, [Replacement(by_hand(model, "a", "y"), "FusedLinear", (1,))])
    assert sorted(rewritten.model.graph.initializers) == ["w", "w.panels0"]
    assert [node.op_type for node in rewritten.model.graph].count("MatMul") == 1


def test_an_inner_value_that_is_read_outside_is_still_computed(tmp_path: Path) -> None:
    original = linear()
    original.graph.output.append(onnx.helper.make_tensor_value_info("a", onnx.TensorProto.FLOAT, ["n", 20]))
    before, after = write(original, tmp_path / "in.onnx"), tmp_path / "out.onnx"
    model = load(before)
    save(rewrite(model, [Replacement(by_hand(model, "a", "y"), "FusedLinear")]).model, after)
    check_interface(before, after)
    feeds: dict[str, npt.NDArray[np.generic]] = {
        "x": np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    }
    for old, new in zip(run(before, feeds), run(after, feeds), strict=True):
        np.testing.assert_array_equal(old, new)


def test_one_kernel_with_two_bodies_gets_an_alias(tmp_path: Path) -> None:
    original = linear()
    original.graph.node[4].op_type = "Sigmoid"
    model = load(write(original, tmp_path / "in.onnx"))
    regions = [by_hand(model, "a", "y"), by_hand(model, "c", "z")]
    rewritten = rewrite(model, [Replacement(region, "FusedLinear") for region in regions])
    first, second = rewritten.op_types
    assert first == "FusedLinear"
    assert second.startswith("FusedLinear_")
    assert rewritten.aliases == {second: "FusedLinear"}
    assert {name for _, name, _ in rewritten.model.functions} == {first, second}


def test_a_region_that_would_make_a_cycle_is_refused(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        agraph (float[n, 4] x, float[4, 20] w) => (float[n, 20] y) {
        a = MatMul(x, w) s = Sigmoid(a) y = Mul(a, s) }""")
    loaded = load(write(model, tmp_path / "in.onnx"))
    whole = by_hand(loaded, "a", "y", nodes=("a", "y"))
    outside = next(node.outputs[0] for node in loaded.graph if node.op_type == "Sigmoid")
    inner = next(node.outputs[0] for node in loaded.graph if node.op_type == "MatMul")
    broken = Region(
        whole.kind, "broken", whole.nodes, (*whole.inputs, outside), (*whole.outputs, inner), whole.spec
    )  # fmt: skip
    with pytest.raises(RewriteError, match="broken: one of its inputs depends on its output 'a'"):
        rewrite(loaded, [Replacement(broken, "FusedBroken")])


def test_a_region_that_lacks_an_input_is_refused(tmp_path: Path) -> None:
    model = load(write(linear(), tmp_path / "in.onnx"))
    whole = by_hand(model, "a", "y")
    lacking = Region(whole.kind, "lacking", whole.nodes, whole.inputs[1:], whole.outputs, whole.spec)
    with pytest.raises(RewriteError, match=r"lacking: node .* reads 'x', which is no input of the region"):
        rewrite(model, [Replacement(lacking, "FusedLacking")])


def test_regions_inside_a_branch(tmp_path: Path) -> None:
    original = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        agraph (bool c, float[n, 4] x) => (float[n, 20] y) {
        y = If(c) <then_branch = t () => (float[n, 20] u) { a = MatMul(x, w) u = Relu(a) },
                   else_branch = e () => (float[n, 20] v) { d = MatMul(x, w) v = Sigmoid(d) }> }""")
    weight = np.random.default_rng(0).standard_normal((4, 20)).astype(np.float32)
    original.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    before, after = write(original, tmp_path / "in.onnx"), tmp_path / "out.onnx"
    model = load(before)
    branch = model.graph[0].attributes["then_branch"].as_graph()
    inner = ir.Model(branch, ir_version=8)
    region = by_hand(inner, "a", "u")
    save(rewrite(model, [Replacement(region, "FusedLinear", (1,))]).model, after)
    onnx.checker.check_model(str(after), full_check=True)
    assert [node.op_type for node in model.graph[0].attributes["then_branch"].as_graph()] == ["FusedLinear"]
    for condition in (True, False):
        x = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
        feeds: dict[str, npt.NDArray[np.generic]] = {"c": np.array(condition), "x": x}
        np.testing.assert_array_equal(run(before, feeds)[0], run(after, feeds)[0])


def test_shape_arithmetic_is_rebuilt_in_the_body(tmp_path: Path) -> None:
    """A body reads the dims of its inputs, and nothing of the graph around it."""
    original = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        agraph (float[n, 4] x) => (float[a] y) {
        s = Shape(x) zero = Constant<value_ints = [0]>() n = Gather(s, zero) twenty = Constant<value_ints = [20]>()
        count = Mul(n, twenty) most = Max(count, zero) float = Cast<to = 1>(most) two = Constant<value_floats = [2.0]>()
        half = Div(float, two) floor = Floor(half) each = Cast<to = 7>(floor) doubled = Add(each, each)
        a = MatMul(x, w) y = Reshape(a, doubled) }""")
    weight = np.random.default_rng(0).standard_normal((4, 20)).astype(np.float32)
    original.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    before, after = write(original, tmp_path / "in.onnx"), tmp_path / "out.onnx"
    model = load(before)
    rewritten = rewrite(model, [Replacement(by_hand(model, "a", "y"), "FusedLinear")])
    save(rewritten.model, after)
    assert [node.op_type for node in rewritten.model.graph] == ["FusedLinear"]
    onnx.checker.check_model(str(after), full_check=True)
    x = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    feeds: dict[str, npt.NDArray[np.generic]] = {"x": x}
    np.testing.assert_array_equal(run(before, feeds)[0], run(after, feeds)[0])
