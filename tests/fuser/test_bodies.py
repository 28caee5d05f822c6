"""Bodies of If, Loop and Scan: what is fused in them, that captured values stay, and that the model means the same."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper
from region_oracle import check_regions, scanned
from test_rewrite import check_interface, fused

from fuser.load import load
from fuser.region import Region
from fuser.scan import scan
from fuser.shapes import infer
from models.bodies import BODIES, flagged
from models.catalogue import Entry
from models.graph import GraphWriter, write

DECODER = ["row", "contraction", "attention", "contraction"]
WITH_CACHE = ["row", "contraction", "row", "attention", "contraction"]  # new keys and values are appended

# Regions per body that the entry must have; what is left out is not looked at.
EXPECTED: dict[str, dict[str, list[str]]] = {
    "merged_decoder": {"/If.then_branch": WITH_CACHE, "/If.else_branch": DECODER},
    "nested_decoder": {
        "/If.else_branch": DECODER,
        "/If.then_branch/If.1.then_branch": WITH_CACHE,
        "/If.then_branch/If.1.else_branch": DECODER,
    },
    "looped_layers": {"/Loop.body": ["row", "contraction", "contraction"]},
    "growing_loop": {"/Loop.body": ["contraction", "row"]},
    "captured_inside": {"": ["contraction", "attention"]},
    "known_branch": {"": ["contraction", "row"]},
}


def run(path: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return [np.asarray(value) for value in ort.InferenceSession(path, options).run(None, feeds)]


def by_body(regions: tuple[Region, ...]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for region in regions:
        found.setdefault(region.body, []).append(region.kind)
    return found


@pytest.mark.parametrize("dynamic", [True, False], ids=["symbolic", "static"])
@pytest.mark.parametrize("entry", BODIES, ids=lambda entry: entry.name)
def test_a_model_with_bodies_means_the_same_through_its_functions(entry: Entry, dynamic: bool, tmp_path: Path) -> None:
    path = write(entry.build(dynamic=dynamic), tmp_path / "model.onnx")
    output = tmp_path / "fused.onnx"
    fused(path, output)
    onnx.checker.check_model(output)
    check_interface(path, output)
    for sizes in entry.sizes if dynamic else entry.sizes[:1]:
        for flag in (False, True):
            feeds = flagged(entry.feeds(sizes), flag=flag)
            for found, wanted in zip(run(output, feeds), run(path, feeds), strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", EXPECTED)
def test_regions_are_found_in_bodies(name: str, tmp_path: Path) -> None:
    entry = next(entry for entry in BODIES if entry.name == name)
    for dynamic in (True, False):
        found = scanned(entry.build(dynamic=dynamic), tmp_path)
        regions = by_body(found.regions)
        assert {body: regions.get(body) for body in EXPECTED[name]} == EXPECTED[name]
        for region in found.regions:
            assert len({node.graph for node in region.nodes}) == 1


def test_a_decoder_in_a_branch_means_what_its_nodes_compute(tmp_path: Path) -> None:
    """The same layer with its condition known: it is unfolded, so that the regions' specs can be evaluated."""
    entry = next(entry for entry in BODIES if entry.name == "merged_decoder")
    for flag in (True, False):
        model = entry.build(dynamic=True)
        index = next(i for i, value in enumerate(model.graph.input) if value.name == "use_cache")
        del model.graph.input[index]
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([flag]), "use_cache"))
        found = scanned(model, tmp_path)
        assert {region.body for region in found.regions} == {""}
        assert not any(node.op_type == "If" for node in found.model.graph)
        for sizes in entry.sizes:
            feeds = entry.feeds(sizes)
            del feeds["use_cache"]
            check_regions(found, feeds)


@pytest.mark.parametrize("name", ["merged_decoder", "looped_layers"])
def test_bodies_in_functions_with_external_weights_fuse_as_they_do_without(name: str, tmp_path: Path) -> None:
    """An If or Loop inside a model-local function, whose weights are inputs of the function and lie in a file."""
    entry = next(entry for entry in BODIES if entry.name == name)
    model = entry.build(dynamic=True)
    plain = write(model, tmp_path / "plain.onnx")
    graph = model.graph
    weights = [tensor.name for tensor in graph.initializer]
    given, made = [value.name for value in graph.input], [value.name for value in graph.output]
    function = helper.make_function("local", "Whole", [*given, *weights], made, graph.node, model.opset_import)
    del graph.node[:]
    graph.node.append(helper.make_node("Whole", [*given, *weights], made, domain="local"))
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("local", 1))
    folder = tmp_path / "in"
    folder.mkdir()
    path, output = folder / "model.onnx", tmp_path / "fused.onnx"
    onnx.save(model, path, save_as_external_data=True, location="model.data", size_threshold=16)
    assert (folder / "model.data").stat().st_size > 1000
    found = [scan(loaded, infer(loaded))[0] for loaded in (load(plain), load(path))]
    assert [len(regions) for regions in by_body(found[0]).values()] == [len(r) for r in by_body(found[1]).values()]
    assert sum(region.kind == "contraction" for region in found[1]) > 1
    fused(path, output)
    onnx.checker.check_model(output)
    for flag in (False, True):
        feeds = flagged(entry.feeds(entry.sizes[0]), flag=flag)
        for actual, expected in zip(run(output, feeds), run(plain, feeds), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_what_one_branch_needs_does_not_hold_in_the_other(tmp_path: Path) -> None:
    """`needs_equal` with dims that differ: only the branch that takes them runs."""
    entry = next(entry for entry in BODIES if entry.name == "needs_equal")
    path = write(entry.build(dynamic=True), tmp_path / "model.onnx")
    fused(path, tmp_path / "fused.onnx")
    feeds = flagged(entry.feeds({"rows": 40, "others": 37}), flag=True)
    for found, wanted in zip(run(tmp_path / "fused.onnx", feeds), run(path, feeds), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_branches_with_the_same_names_have_their_own_dims(tmp_path: Path) -> None:
    """Both branches call their values alike, as exporters do; dims that depend on data are not the same for that."""

    def nonzero(g: GraphWriter, x: str) -> None:
        rows = g.op("Squeeze", g.op("NonZero", x), g.constant([0]))
        g.output(g.op("Gather", g.op("Tanh", x), rows, axis=0), np.float32, (None,))

    g = GraphWriter(17)
    x, z = (g.input(name, np.float32, ("rows",)) for name in ("x", "z"))
    flag = g.input("flag", np.bool_, ())
    bodies = {f"{name}_branch": g.body(name, lambda v=v: nonzero(g, v)) for name, v in (("then", x), ("else", z))}
    g.ops("If", flag, outs=("y",), **bodies)
    g.output("y", np.float32, (None,))
    then, other = (list(graph.node) for graph in bodies.values())
    assert [node.output for node in then] == [node.output for node in other]
    model = load(write(g.finish(), tmp_path / "model.onnx"))
    shapes = infer(model)
    (branch,) = (node for node in model.graph if node.op_type == "If")
    results = [branch.attributes[name].as_graph().outputs[0] for name in ("then_branch", "else_branch")]
    dims = [shapes.shape(value) for value in (*results, branch.outputs[0])]
    assert len({str(dim) for dim in dims}) == 3


def test_names_are_unique_in_the_whole_model(tmp_path: Path) -> None:
    entry = next(entry for entry in BODIES if entry.name == "nested_decoder")
    model = load(write(entry.build(dynamic=True), tmp_path / "model.onnx"))
    values = [value.name for graph in model.graphs() for node in graph for value in node.outputs]
    nodes = [node.name for node in model.graph.all_nodes()]
    assert len(set(values)) == len(values)
    assert len(set(nodes)) == len(nodes)
