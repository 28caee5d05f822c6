"""Loading: what is refused and how it is said, what is simplified, and that the interface of the graph survives."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from fuser.load import LoadError, load
from fuser.shape_call import CONTENT_LIMIT
from models import bert
from models.graph import write

HEADER = '<ir_version: 8, opset_import: ["" : 17]>\n'
PLAIN = "agraph (float[n, 4] x) => (float[n, 4] y) { a = Neg(x) y = Relu(a) }"


def parse(text: str, header: str = HEADER) -> onnx.ModelProto:
    return onnx.parser.parse_model(header + text)


def saved(folder: Path, model: onnx.ModelProto) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def loaded(folder: Path, text: str, header: str = HEADER) -> ir.Model:
    return load(saved(folder, parse(text, header)))


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options)
    return [np.asarray(result) for result in session.run(None, feeds)]


# -- what is refused --------------------------------------------------------------------------------------------------


def break_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = bert.build(folder / "model.onnx")
        path.write_bytes(change(path.read_bytes()))
        return path

    return make


def break_model(change: Callable[[onnx.ModelProto], None], text: str = PLAIN) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        model = parse(text)
        change(model)
        return saved(folder, model)

    return make


def lose_external(folder: Path) -> Path:
    path = bert.build(folder / "model.onnx", external=True)
    (folder / "model.onnx.data").unlink()
    return path


def cut_external(folder: Path) -> Path:
    path = bert.build(folder / "model.onnx", external=True)
    data = folder / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-100])
    return path


def link_external(folder: Path) -> Path:
    (folder / "elsewhere").mkdir()
    (folder / "models").mkdir()
    path = bert.build(folder / "models" / "model.onnx", external=True)
    data = folder / "models" / "model.onnx.data"
    data.rename(folder / "elsewhere" / "blob")
    data.symlink_to(folder / "elsewhere" / "blob")
    return path


def damage_weight(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((4, 4), np.float32), "w"))
    model.graph.initializer[0].raw_data = model.graph.initializer[0].raw_data[:-4]


def set_opset(version: int) -> Callable[[onnx.ModelProto], None]:
    return lambda model: setattr(model.opset_import[0], "version", version)


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda folder: folder / "nothing.onnx", "there is no such file"),
    "not a model": (break_bytes(lambda _: b"<html>not found</html>"), "not an ONNX model, or the file is cut short"),
    "empty": (break_bytes(lambda _: b""), "not an ONNX model, or the file is cut short \\(0 bytes\\)"),
    "truncated": (break_bytes(lambda data: data[: len(data) // 2]), "not an ONNX model, or the file is cut short"),
    "pointer": (break_bytes(lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0"), "Git LFS pointer"),
    "external file missing": (lose_external, "should be in .*model.onnx.data, which is missing"),
    "external file cut": (cut_external, "model.onnx.data has \\d+ bytes; the weights of .* end at byte \\d+"),
    "external file is a link": (link_external, "model.onnx.data is a link to another folder"),
    "old opset": (break_model(set_opset(6)), "opset 6 is not supported, 7 to \\d+ are"),
    "new opset": (break_model(set_opset(999)), "opset 999 is not supported"),
    "no opset": (break_model(lambda m: m.ClearField("opset_import")), "does not say which opset"),
    "undefined": (
        break_model(lambda m: m.graph.node[1].input.__setitem__(0, "ghost")),
        "a Relu node reads 'ghost', which nothing computes",
    ),
    "computed twice": (
        break_model(lambda m: m.graph.node.append(helper.make_node("Abs", ["x"], ["a"], name="again"))),
        "have the name 'a', the second from node 'again' \\(Abs\\)",
    ),
    "input twice": (break_model(lambda m: m.graph.input.append(m.graph.input[0])), "two inputs have the name 'x'"),
    "output from nowhere": (
        break_model(lambda m: m.graph.output.append(helper.make_tensor_value_info("z", 1, [1]))),
        "the output 'z' is not computed",
    ),
    "cycle": (break_model(lambda m: m.graph.node[0].input.__setitem__(0, "y")), "the graph has a cycle"),
    "damaged weight": (break_model(damage_weight), "'w' of shape \\[4, 4\\] has 60 bytes, not 64"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=list(REFUSED))
def test_bad_files_are_refused_in_one_line(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    path = make(tmp_path)
    with pytest.raises(LoadError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


# -- what is simplified -----------------------------------------------------------------------------------------------


def test_unsorted_nodes_are_sorted(tmp_path: Path) -> None:
    model = parse(PLAIN)
    nodes = list(reversed(model.graph.node))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    assert operators(load(saved(tmp_path, model))) == ["Neg", "Relu"]


def test_identities_dropouts_and_idle_casts_vanish(tmp_path: Path) -> None:
    model = loaded(
        tmp_path,
        """agraph (float[n, 4] x) => (float[n, 4] y) {
        a = Identity(x) b = Neg(a) r = Constant<value_float = 0.5>() c, mask = Dropout(b, r) d = Cast<to = 1>(c)
        e = Cast<to = 10>(d) f = Cast<to = 1>(e) y = Relu(f) }""",
    )
    assert operators(model) == ["Neg", "Cast", "Cast", "Relu"]


@pytest.mark.parametrize("mode", ["training", "mask"])
def test_a_dropout_that_does_something_stays(tmp_path: Path, mode: str) -> None:
    text = {
        "training": """agraph (float[n, 4] x, bool train) => (float[n, 4] y) {
            r = Constant<value_float = 0.5>() a, m = Dropout(x, r, train) y = Relu(a) }""",
        "mask": """agraph (float[n, 4] x) => (float[n, 4] y, bool[n, 4] m) { a, m = Dropout(x) y = Relu(a) }""",
    }[mode]
    assert "Dropout" in operators(loaded(tmp_path, text))


INTERFACES = {
    "input is output": "agraph (float[n, 4] x) => (float[n, 4] y) { y = Identity(x) }",
    "identity of an output": """agraph (float[n, 4] x) => (float[n, 4] a, float[n, 4] y, float[n, 4] z) {
        a = Neg(x) y = Identity(a) z = Identity(a) }""",
    "identity at the end": "agraph (float[n, 4] x) => (float[n, 4] y) { a = Neg(x) b = Abs(a) y = Identity(b) }",
    "inner value is output": "agraph (float[n, 4] x) => (float[n, 4] y, float[n, 4] a) { a = Neg(x) y = Relu(a) }",
    "constant is output": """agraph (float[n, 4] x) => (float[n, 4] y, int64[2] c) {
        c = Constant<value_ints = [1, 2]>() y = Relu(x) }""",
    "folded value is output": """agraph (float[n, 4] x) => (float[n, 4] y, int64[2] c) {
        a = Constant<value_ints = [1, 2]>() c = Add(a, a) y = Relu(x) }""",
    "branches with one name": """agraph (bool c, float[n, 4] x) => (float[n, 4] y) {
        y = If(c) <
            then_branch = t () => (float[n, 4] u) { k = Constant<value_float = 2.0>() h = Add(k, k) u = Mul(x, h) },
            else_branch = e () => (float[n, 4] u) { k = Constant<value_float = 3.0>() h = Mul(k, k) u = Mul(x, h) }>
        }""",
    "branch passes an outer value on": """agraph (bool c, float[n, 4] x) => (float[n, 4] y, float[n, 4] o) {
        o = Neg(x) y = If(c) <then_branch = t () => (float[n, 4] u) { u = Identity(o) },
                              else_branch = e () => (float[n, 4] v) { v = Identity(x) }> }""",
}


@pytest.mark.parametrize("text", INTERFACES.values(), ids=list(INTERFACES))
def test_the_interface_survives(tmp_path: Path, text: str) -> None:
    original = parse(text)
    model = ir.to_proto(load(saved(tmp_path, original)))
    assert list(map(str, model.graph.input)) == list(map(str, original.graph.input))
    assert list(map(str, model.graph.output)) == list(map(str, original.graph.output))
    for condition in (True, False):
        feeds: dict[str, np.ndarray] = {"x": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)}
        if len(original.graph.input) == 2:
            feeds["c"] = np.array(condition)
        for old, new in zip(run(original, feeds), run(model, feeds), strict=True):
            np.testing.assert_array_equal(old, new)


def test_what_only_a_branch_never_taken_reads_is_not_computed(tmp_path: Path) -> None:
    text = """agraph (float[n, 4] x) => (float[n, 4] y) {
        yes = Constant<value = bool {1}>() a = Neg(x) b = Exp(a)
        y = If(yes) <then_branch = t () => (float[n, 4] u) { u = Abs(a) },
                     else_branch = e () => (float[n, 4] v) { v = Add(a, b) }> }"""
    model = loaded(tmp_path, text)
    assert operators(model) == ["Neg", "Abs"]
    (reader,) = (node for node in model.graph if node.op_type == "Abs")
    assert reader.inputs[0] is not None
    assert [user.op_type for user, _ in reader.inputs[0].uses()] == ["Abs"]


FUNCTIONS = """<domain: "acme", opset_import: ["" : 17]>
    Gate <scale: float = 2.0> (p, q) => (r, s) {
        m = LeakyRelu<alpha: float = @scale>(p) r = Add(m, q) s = Identity(p) }"""


def test_functions_are_inlined(tmp_path: Path) -> None:
    header = '<ir_version: 8, opset_import: ["" : 17, "acme" : 1]>\n'
    text = """agraph (float[n, 4] x) => (float[n, 4] y, float[n, 4] z) {
        a, b = acme.Gate<scale = 3.0>(x, x) y, z = acme.Gate(a, b) }\n"""
    original = parse(text + FUNCTIONS, header)
    model = load(saved(tmp_path, original))
    assert not model.functions
    assert [value.name for value in model.graph.outputs] == ["y", "z"]
    feeds = {"x": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)}
    for old, new in zip(run(original, feeds), run(ir.to_proto(model), feeds), strict=True):
        np.testing.assert_array_equal(old, new)


def test_functions_of_another_opset_are_converted(tmp_path: Path) -> None:
    header = '<ir_version: 8, opset_import: ["" : 17, "acme" : 1]>\n'
    old_function = """<domain: "acme", opset_import: ["" : 11]>
        Sum (p) => (r) { r = ReduceSum<axes = [1], keepdims = 0>(p) }"""
    text = "agraph (float[n, 4] x) => (float[n] y) { y = acme.Sum(x) }\n"
    original = parse(text + old_function, header)
    feeds = {"x": np.ones((3, 4), np.float32)}
    np.testing.assert_array_equal(run(ir.to_proto(load(saved(tmp_path, original))), feeds)[0], np.full(3, 4))


def test_functions_of_another_opset_may_read_each_other(tmp_path: Path) -> None:
    header = '<ir_version: 8, opset_import: ["" : 17, "acme" : 1]>\n'
    old_function = """<domain: "acme", opset_import: ["" : 11]>
        Share (p) => (r) { e = Exp(p) s = ReduceSum<axes = [1]>(e) r = Div(e, s) }"""
    text = "agraph (float[n, 4] x) => (float[n, 4] y) { a = acme.Share(x) y = acme.Share(a) }\n"
    feeds = {"x": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)}
    wanted = feeds["x"].astype(np.float64)
    for _ in range(2):
        wanted = np.exp(wanted) / np.exp(wanted).sum(1, keepdims=True)
    (found,) = run(ir.to_proto(load(saved(tmp_path, parse(text + old_function, header)))), feeds)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_fused_nodes_are_left_alone(tmp_path: Path) -> None:
    header = '<ir_version: 8, opset_import: ["" : 17, "tilefuse" : 1, "acme" : 1]>\n'
    ours = FUNCTIONS.replace("acme", "tilefuse").replace("Gate", "Fused")
    text = "agraph (float[n, 4] x) => (float[n, 4] y) { a, b = acme.Gate(x, x) y, z = tilefuse.Fused(a, b) }\n"
    model = load(saved(tmp_path, parse(text + FUNCTIONS + "\n" + ours, header)))
    assert [node.domain for node in model.graph][-1] == "tilefuse"
    assert [name for _, name, _ in model.functions] == ["Fused"]


def test_shape_plumbing_of_static_dims_folds(tmp_path: Path) -> None:
    model = loaded(
        tmp_path,
        """agraph (float[2, n, 12] x) => (float[a, b, c, d] y) {
        s = Shape(x) i = Constant<value_int = 2>() w = Gather(s, i) four = Constant<value_int = 4>() each = Div(w, four)
        axis = Constant<value_ints = [0]>() last = Unsqueeze(each, axis) head = Constant<value_ints = [0, 0, 4]>()
        shape = Concat<axis = 0>(head, last) y = Reshape(x, shape) }""",
    )
    assert operators(model) == ["Reshape"]
    shape = model.graph[0].inputs[1]
    assert shape is not None
    assert shape.const_value is not None
    assert shape.const_value.numpy().tolist() == [0, 0, 4, 3]


def test_dynamic_results_and_large_ones_are_not_folded(tmp_path: Path) -> None:
    model = loaded(
        tmp_path,
        """agraph (float[n, n] x) => (float[n, n] y, float[a, b] z) {
        size = Constant<value_ints = [200, 200]>() mask = ConstantOfShape(size)
        s = Shape(x) o = Constant<value_ints = [0, 0]>() part = Slice(mask, o, s) y = Add(x, part) z = Neg(mask) }""",
    )
    assert operators(model) == ["ConstantOfShape", "Shape", "Slice", "Add", "Neg"]


def test_a_default_that_may_be_overridden_is_not_constant(tmp_path: Path) -> None:
    original = parse("agraph (float[n, 4] x, float[4] w) => (float[n, 4] y) { v = Neg(w) y = Add(x, v) }")
    original.graph.initializer.append(numpy_helper.from_array(np.ones(4, np.float32), "w"))
    assert operators(load(saved(tmp_path, original))) == ["Neg", "Add"]
    original.ir_version = 3  # there initializers had to be listed as inputs, and were constants
    model = load(saved(tmp_path, original))
    assert operators(model) == ["Add"]
    assert [value.name for value in model.graph.inputs] == ["x"]


def test_weights_of_external_files_stay_there(tmp_path: Path) -> None:
    model = load(bert.build(tmp_path / "model.onnx", external=True))
    tensors = [value.const_value for value in model.graph.initializers.values()]
    large = [t for t in tensors if isinstance(t, ir.ExternalTensor) and t.size > CONTENT_LIMIT]
    assert large
    assert all(tensor.raw is None for tensor in large)  # not even mapped


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_an_encoder_computes_the_same(tmp_path: Path, exporter: bert.Exporter) -> None:
    original = bert.model(exporter=exporter)
    model = load(write(original, tmp_path / "model.onnx"))
    assert len(model.graph) < len(original.graph.node)
    feeds: dict[str, np.ndarray] = {name: np.ones((2, 5), np.int64) for name in bert.INPUTS}
    feeds["attention_mask"][1, 3:] = 0
    np.testing.assert_array_equal(run(original, feeds)[0], run(ir.to_proto(model), feeds)[0])


def test_metadata_is_kept(tmp_path: Path) -> None:
    original = parse(PLAIN)
    original.metadata_props.add(key="author", value="somebody")
    assert load(saved(tmp_path, original)).metadata_props == {"author": "somebody"}


@pytest.mark.parametrize("kept", ["initializer", "Constant", "Constant of a function"])
@pytest.mark.parametrize("indices", [[0, 5, 9], [[0, 0], [1, 1], [2, 1]]], ids=["flat", "by axis"])
def test_sparse_weights_are_written_out(tmp_path: Path, indices: list[int] | list[list[int]], kept: str) -> None:
    """Against numpy: ONNX Runtime 1.32 crashes now and then on a sparse Constant of a function."""
    dense = np.zeros((4, 4), np.float32)
    dense[tuple(np.array(indices).T) if isinstance(indices[0], list) else np.unravel_index(indices, (4, 4))] = [1, 2, 3]
    values = numpy_helper.from_array(np.array([1, 2, 3], np.float32), "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array(indices), "at"), [4, 4])
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 4]) for name in "xy")
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    if kept != "initializer":
        nodes.insert(0, helper.make_node("Constant", [], ["w"], sparse_value=sparse))
    functions: list[onnx.FunctionProto] = []
    if kept == "Constant of a function":
        functions.append(helper.make_function("own", "Layer", ["x"], ["y"], nodes, opsets[:1]))
        nodes = [helper.make_node("Layer", ["x"], ["y"], domain="own")]
    graph = helper.make_graph(nodes, "g", [x], [y], sparse_initializer=[sparse] if kept == "initializer" else [])
    original = helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=functions)
    model = load(saved(tmp_path, original))
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 4), np.float32)}
    np.testing.assert_allclose(run(ir.to_proto(model), feeds)[0], feeds["x"] @ dense, rtol=1e-6)


def test_what_onnx_ir_cannot_read_is_one_line(tmp_path: Path) -> None:
    original = parse(PLAIN)
    values, at = (
        numpy_helper.from_array(np.ones(1, dtype), name) for dtype, name in ((np.float32, "w"), (np.int64, "i"))
    )
    odd = helper.make_attribute("odd", helper.make_sparse_tensor(values, at, [4, 4]))
    original.graph.node[0].attribute.append(odd)
    with pytest.raises(LoadError) as caught:
        load(saved(tmp_path, original))
    assert len(str(caught.value).splitlines()) == 1
