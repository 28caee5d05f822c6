"""Inferred shapes, types and contents against what ONNX Runtime computes, value by value, at two sizes a symbol."""

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from fuser.shapes import Shapes, infer
from models import bert
from models.attention import SPELLINGS
from models.attention_positions import POSITION_SPELLINGS
from models.catalogue import Entry
from models.traps import TRAPS
from tilecore.contract.evaluate import Evaluator
from tilecore.contract.expr import Sym, symbols

ENTRIES = (*TRAPS, *POSITION_SPELLINGS, *SPELLINGS)


def parse(text: str, *, opset: int = 17) -> onnx.ModelProto:
    header = f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n'
    return onnx.parser.parse_model(header + text)


def values_of(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every value of the top-level graph that is a tensor."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    declared = {output.name for output in wide.graph.output}
    for node in model.graph.node:
        wide.graph.output.extend(
            onnx.ValueInfoProto(name=name) for name in node.output if name and name not in declared
        )
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(wide.SerializeToString(), options)
    names = [output.name for output in session.get_outputs()]
    return {name: np.asarray(result) for name, result in zip(names, session.run(names, dict(feeds)), strict=True)}


def check(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Shapes:
    """What was inferred is what is computed. Dims over symbols that no input has are not checked."""
    graph = ir.from_proto(model)
    shapes = infer(graph)
    sizes: dict[str, int] = {}
    for value in graph.graph.inputs:
        for size, actual in zip(shapes.shape(value) or (), feeds[value.name or ""].shape, strict=True):
            if isinstance(size, Sym):
                sizes[size.name] = actual
    evaluate = Evaluator({}, sizes, wide=False)
    actual = values_of(model, feeds)
    for node in graph.graph:
        for value in node.outputs:
            if not value.name or value.name not in actual:
                continue
            where = f"{value.name} ({node.op_type})"
            array = actual[value.name]
            shape, dtype, content = shapes.shape(value), shapes.dtype(value), shapes.content(value)
            assert shape is not None, where
            assert len(shape) == array.ndim, where
            for size, real in zip(shape, array.shape, strict=True):
                if not symbols(size) & shapes.fresh:
                    assert int(evaluate(size)) == real, f"{where}: {size}"
            assert dtype is not None, where
            assert dtype.numpy() == array.dtype, where
            if content is not None:
                known = np.array([evaluate(item) for item in content.flat]).reshape(content.shape)
                np.testing.assert_array_equal(known, array, where)
    return shapes


def fresh_dims(shapes: Shapes) -> list[str]:
    return [v.name or "" for v, shape in shapes.shapes.items() if any(symbols(size) & shapes.fresh for size in shape)]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_catalogue(entry: Entry) -> None:
    for sizes in entry.sizes:
        shapes = check(entry.build(dynamic=True), entry.feeds(sizes))
        assert not fresh_dims(shapes)


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_bert_has_no_unexplained_dim(exporter: bert.Exporter) -> None:
    model = bert.model(exporter=exporter)
    for batch, seq in ((2, 5), (1, 1)):
        ids = np.ones((batch, seq), np.int64)
        shapes = check(model, dict.fromkeys(bert.INPUTS, ids))
        assert not fresh_dims(shapes)
    (output,) = ir.from_proto(model).graph.outputs
    found = next(shape for value, shape in shapes.shapes.items() if value.name == output.name)
    assert list(map(str, found)) == ["batch", "seq", "32"]


PLUMBING = {
    "reshape by shape": """agraph (float[n, m, 12] x) => (float[a, b, c, d] y) {
        s = Shape(x) zero = Constant<value_int = 0>() one = Constant<value_int = 1>()
        n = Gather(s, zero) m = Gather(s, one) axis = Constant<value_ints = [0]>()
        n1 = Unsqueeze(n, axis) m1 = Unsqueeze(m, axis) tail = Constant<value_ints = [3, -1]>()
        shape = Concat<axis = 0>(n1, m1, tail) y = Reshape(x, shape) }""",
    "minus one over a product": """agraph (float[n, m, 12] x) => (float[a, b] y) {
        s = Shape<start = 1, end = 2>(x) minus = Constant<value_ints = [-1]>()
        shape = Concat<axis = 0>(minus, s) flat = Reshape(x, shape) y = Transpose(flat) }""",
    "zero copies": """agraph (float[n, m, 12] x) => (float[a, b, c, d] y) {
        shape = Constant<value_ints = [0, 0, 4, 3]>() y = Reshape(x, shape) }""",
    "flattened and back": """agraph (float[n, m, 12] x) => (float[a, b, c] z) {
        flat = Flatten<axis = 2>(x) s = Shape(x) z = Reshape(flat, s) }""",
    "halves": """agraph (float[n, m, 12] x) => (float[a, b, c] y) {
        s = Shape(x) two = Constant<value_ints = [2]>() i = Constant<value_ints = [1]>()
        m = Gather(s, i) half = Div(m, two) rest = Mod(m, two) zero = Constant<value_ints = [0]>()
        y = Slice(x, zero, half, i) }""",
    "expand by where": """agraph (float[n, 1, 12] x, float[n, m, 12] z) => (float[a, b, c] y) {
        s = Shape(z) minus = Constant<value_int = -1>() three = Constant<value_ints = [3]>()
        k = ConstantOfShape<value = int64[1] {1}>(three) other = Mul(k, minus)
        test = Equal(s, other) shape = Where(test, k, s) y = Expand(x, shape) }""",
    "range and comparison": """agraph (float[n, m, 12] x) => (bool[a, b] y) {
        s = Shape(x) one = Constant<value_int = 1>() zero = Constant<value_int = 0>()
        m = Gather(s, one) i = Range(zero, m, one) a = Constant<value_ints = [0]>() b = Constant<value_ints = [1]>()
        row = Unsqueeze(i, a) column = Unsqueeze(i, b) y = LessOrEqual(row, column) }""",
    "squeeze and size": """agraph (float[n, 1, m] x) => (float[a, b] y, int64 z) {
        one = Constant<value_ints = [1]>() y = Squeeze(x, one) z = Size(x) }""",
    "pad and tile": """agraph (float[n, m, 12] x) => (float[a, b, c] y) {
        pads = Constant<value_ints = [0, 2, 0, 0, 1, 0]>() wide = Pad(x, pads)
        times = Constant<value_ints = [2, 1, 3]>() y = Tile(wide, times) }""",
    "reversed steps": """agraph (float[n, m, 12] x) => (float[a, b, c] y) {
        s = Constant<value_ints = [-1]>() e = Constant<value_ints = [-9223372036854775807]>()
        axis = Constant<value_ints = [1]>() step = Constant<value_ints = [-2]>() y = Slice(x, s, e, axis, step) }""",
    "float detour": """agraph (float[n, m, 12] x) => (float[a, b, c] y) {
        s = Shape(x) i = Constant<value_ints = [1]>() m = Gather(s, i) f = Cast<to = 1>(m)
        two = Constant<value_float = 2.0>() q = Div(f, two) up = Ceil(q) k = Cast<to = 7>(up)
        zero = Constant<value_ints = [0]>() y = Slice(x, zero, k, i) }""",
    "product of dims": """agraph (float[n, m, 12] x) => (float[a] y) {
        s = Shape(x) p = ReduceProd<keepdims = 1>(s) y = Reshape(x, p) }""",
    "split unevenly": """agraph (float[n, m, 12] x) => (float[a, b, c] y, float[d, e, f] z) {
        sizes = Constant<value_ints = [5, 7]>() y, z = Split<axis = 2>(x, sizes) }""",
}
OPERATORS = {
    "einsum": """agraph (float[n, m, 12] x, float[12, 5] w) => (float[a, b, c] y) {
        y = Einsum<equation = "...k,kj->...j">(x, w) }""",
    "conv": """agraph (float[n, 3, m, 16] x, float[8, 3, 3, 3] w) => (float[a, b, c, d] y) {
        y = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(x, w) }""",
    "transposed conv": """agraph (float[n, 3, m, 16] x, float[3, 8, 3, 3] w) => (float[a, b, c, d] y) {
        y = ConvTranspose<strides = [2, 2], output_padding = [1, 1]>(x, w) }""",
    "pools": """agraph (float[n, 3, m, 16] x) => (float[a, b, c, d] y, float[e, f, g, h] z) {
        y = MaxPool<kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1, pads = [1, 1, 1, 1]>(x)
        z = GlobalAveragePool(x) }""",
    "resize": """agraph (float[n, 3, m, 16] x) => (float[a, b, c, d] y) {
        scales = Constant<value_floats = [1.0, 1.0, 2.0, 0.5]>() y = Resize<mode = "nearest">(x, , scales) }""",
    "reductions": """agraph (float[n, m, 12] x) => (float[a, b] y, float z, float[c, d, e] w) {
        axes = Constant<value_ints = [1]>() y = ReduceSum<keepdims = 0>(x, axes) z = ReduceMax<keepdims = 0>(x)
        w = ReduceMean<axes = [-1]>(x) }""",
    "top k": """agraph (float[n, m, 12] x) => (float[a, b, c] y, int64[d, e, f] z) {
        k = Constant<value_ints = [4]>() y, z = TopK(x, k) }""",
    "normalised": """agraph (float[n, m, 12] x, float[12] w) => (float[a, b, c] y, float[d, e, f] mean) {
        y, mean, deviation = LayerNormalization(x, w) }""",
    "one hot": """agraph (int64[n, m] i) => (float[a, b, c] y) {
        depth = Constant<value_int = 7>() values = Constant<value_floats = [0.0, 1.0]>()
        y = OneHot(i, depth, values) }""",
    "gathers": """agraph (float[n, m, 12] x, int64[k, 2] i) => (float[a, b] y, float[c, d, e, f] z) {
        y = GatherND(x, i) z = Gather<axis = 1>(x, i) }""",
    "quantised": """agraph (float[n, m, 12] x) => (float[a, b, c] y) {
        q, scale, zero = DynamicQuantizeLinear(x) y = DequantizeLinear(q, scale, zero) }""",
    "gemm": """agraph (float[n, 12] x, float[5, 12] w) => (float[a, b] y) { y = Gemm<transB = 1>(x, w) }""",
    "vectors": """agraph (float[n, m, 12] x, float[12] w) => (float[a, b] y) { y = MatMul(x, w) }""",
    "lstm": """agraph (float[n, m, 12] x, float[1, 20, 12] w, float[1, 20, 5] r) =>
        (float[a, b, c, d] y, float[e, f, g] h) { y, h, c = LSTM<hidden_size = 5>(x, w, r) }""",
    "without a rule": "agraph (float[n, 4, 4] x) => (float[a] y) { y = Det(x) }",
}


def feeds_of(model: onnx.ModelProto, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    feeds: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        shape = [size.dim_value or sizes[size.dim_param] for size in tensor.shape.dim]
        if tensor.elem_type == onnx.TensorProto.INT64:
            feeds[value.name] = random.integers(0, 2, shape)
        else:
            feeds[value.name] = random.standard_normal(shape).astype(np.float32)
    return feeds


@pytest.mark.parametrize("text", [*PLUMBING.values(), *OPERATORS.values()], ids=[*PLUMBING, *OPERATORS])
def test_operators(text: str) -> None:
    model = parse(text)
    for sizes in ({"n": 2, "m": 7, "k": 3}, {"n": 3, "m": 4, "k": 1}):
        shapes = check(model, feeds_of(model, sizes))
        assert not fresh_dims(shapes)


@pytest.mark.parametrize("text", PLUMBING.values(), ids=list(PLUMBING))
def test_plumbing_at_size_zero_and_one(text: str) -> None:
    """Dims of 1 must not be taken for others; a first dim of 0 must survive."""
    model = parse(text)
    check(model, feeds_of(model, {"n": 1, "m": 1}))
    if "product" not in text:
        check(model, feeds_of(model, {"n": 1, "m": 2}))


OLD = {
    "attributes for axes": (
        9,
        """agraph (float[n, m, 12] x) => (float[a, b] y) {
        one = Unsqueeze<axes = [0]>(x) all = Squeeze<axes = [0]>(one)
        part = Slice<axes = [2], starts = [1], ends = [-2]>(all)
        y = ReduceSum<axes = [2], keepdims = 0>(part) }""",
    ),
    "split by attribute": (
        11,
        """agraph (float[n, m, 12] x) => (float[a, b, c] y, float[d, e, f] z) {
        y, z = Split<axis = 2, split = [4, 8]>(x) }""",
    ),
    "pad by attribute": (
        9,
        """agraph (float[n, m, 12] x) => (float[a, b, c] y) { y = Pad<pads = [0, 1, 0, 0, 2, 0]>(x) }""",
    ),
    "upsample": (
        9,
        """agraph (float[n, 3, m, 16] x) => (float[a, b, c, d] y) {
        s = Constant<value = float[4] {1.0, 1.0, 2.0, 2.0}>() y = Upsample(x, s) }""",
    ),
}


@pytest.mark.parametrize(("opset", "text"), OLD.values(), ids=list(OLD))
def test_older_opsets(opset: int, text: str) -> None:
    model = parse(text, opset=opset)
    assert not fresh_dims(check(model, feeds_of(model, {"n": 2, "m": 7})))


def test_newer_split_is_uneven() -> None:
    model = parse(
        """agraph (float[n, m, 10] x) => (float[a, b, c] y, float[d, e, f] z) {
        y, z = Split<axis = 1, num_outputs = 2>(x) }""",
        opset=18,
    )
    check(model, feeds_of(model, {"n": 2, "m": 7}))
    check(model, feeds_of(model, {"n": 2, "m": 8}))


ATTENTION = {
    "packed heads": (
        23,
        """agraph (float[n, q, 32] Q, float[n, k, 16] K, float[n, k, 16] V) => (float[a, b, c] y) {
        y = Attention<q_num_heads = 4, kv_num_heads = 2>(Q, K, V) }""",
    ),
    "four axes and past": (
        23,
        """agraph (float[n, 4, q, 8] Q, float[n, 4, k, 8] K, float[n, 4, k, 8] V, float[n, 4, p, 8] pk,
        float[n, 4, p, 8] pv) => (float[a, b, c, d] y) { y, ok, ov = Attention(Q, K, V, , pk, pv) }""",
    ),
    "multi head": (
        17,
        """agraph (float[n, q, 32] Q, float[n, k, 32] K, float[n, k, 32] V) => (float[a, b, c] y) {
        y = com.microsoft.MultiHeadAttention<num_heads = 4>(Q, K, V) }""",
    ),
    "skip norm": (
        17,
        """agraph (float[n, q, 32] x, float[n, q, 32] s, float[32] g) => (float[a, b, c] y, float[d, e, f] sum) {
        y, mean, deviation, sum = com.microsoft.SkipLayerNormalization(x, s, g) }""",
    ),
    "fused matmul": (
        17,
        """agraph (float[n, q, 32] x, float[n, k, 32] s) => (float[a, b, c] y) {
        y = com.microsoft.FusedMatMul<transB = 1>(x, s) }""",
    ),
    "gelu": (17, "agraph (float[n, q, 32] x) => (float[a, b, c] y) { y = com.microsoft.FastGelu(x) }"),
}


@pytest.mark.parametrize(("opset", "text"), ATTENTION.values(), ids=list(ATTENTION))
def test_attention_operators(opset: int, text: str) -> None:
    model = parse(text, opset=opset)
    assert not fresh_dims(check(model, feeds_of(model, {"n": 2, "q": 3, "k": 5, "p": 4})))


def test_branches_keep_what_they_agree_on() -> None:
    model = parse("""agraph (bool c, float[n, m] x) => (float[a, b] y) {
        y = If(c) <then_branch = t () => (float[n, m] u) { u = Neg(x) },
                   else_branch = e () => (float[n, k] v) { v = Concat<axis = 1>(x, x) }> }""")
    graph = ir.from_proto(model).graph
    shapes = infer(ir.from_proto(model))
    found = next(shape for value, shape in shapes.shapes.items() if value.name == "y")
    assert found[0] == Sym("n")
    assert found[1] in shapes.fresh
    assert graph.outputs[0].name == "y"


def test_loops_keep_what_the_body_keeps() -> None:
    model = parse("""agraph (int64 count, bool go, float[n, m] x)
        => (float[a, b] y, float[c, d] z, float[e, f, g] each) {
        y, z, each = Loop(count, go, x, x) <body = b (int64 i, bool more, float[p, q] s, float[r, t] w)
            => (bool more2, float[p, q] s2, float[u, v] w2, float[p, q] out) {
            more2 = Identity(more) s2 = Neg(s) w2 = Concat<axis = 0>(w, s) out = Abs(s) }> }""")
    shapes = infer(ir.from_proto(model))
    found = {value.name: shape for value, shape in shapes.shapes.items()}
    assert found["y"] == (Sym("n"), Sym("m"))
    assert found["z"][0] in shapes.fresh
    assert found["z"][1] == Sym("m")
    assert found["each"][1:] == (Sym("n"), Sym("m"))


def test_scan_has_the_length_of_its_input() -> None:
    model = parse("""agraph (float[m] s, float[n, m] x) => (float[a] last, float[b, c] all) {
        last, all = Scan(s, x) <num_scan_inputs = 1, body = b (float[p] acc, float[q] row)
            => (float[p] next, float[p] out) {
            next = Add(acc, row) out = Neg(next) }> }""")
    found = {value.name: shape for value, shape in infer(ir.from_proto(model)).shapes.items()}
    assert found["all"] == (Sym("n"), Sym("m"))
    assert found["last"] == (Sym("m"),)


def test_bounds_tell_how_far_the_model_runs() -> None:
    shapes = infer(ir.from_proto(bert.model()))
    batch, seq = Sym("batch"), Sym("seq")
    assert shapes.bounds(frozenset({batch, seq})) == (512 - seq,)
    assert shapes.bounds(frozenset({batch})) == ()


def test_an_exporters_names_are_not_facts() -> None:
    """Two outputs of NonZero are recorded under one name, but may differ."""
    model = parse(
        "agraph (float[n] x, float[n] y) => (int64[one, k] a, int64[one, k] b) { a = NonZero(x) b = NonZero(y) }"
    )
    shapes = infer(ir.from_proto(model))
    found = {value.name: shape for value, shape in shapes.shapes.items()}
    assert found["a"][1] != found["b"][1]


def test_an_unknown_operator_keeps_recorded_numbers_only() -> None:
    model = parse("agraph (float[n, 4] x) => (float[n, 8] y) { z = com.acme.Mystery(x) y = Identity(z) }")
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, ["n", 8]))
    shapes = infer(ir.from_proto(model))
    found = {value.name: shape for value, shape in shapes.shapes.items()}
    assert found["z"][0] in shapes.fresh
    assert str(found["z"][1]) == "8"


def test_an_initializer_that_is_an_input_is_not_constant() -> None:
    model = parse("agraph (float[n, 4] x, int64[2] s) => (float[a, b] y) { y = Reshape(x, s) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 2]), "s"))
    shapes = infer(ir.from_proto(model))
    found = {value.name: shape for value, shape in shapes.shapes.items()}
    assert all(size in shapes.fresh for size in found["y"])


def test_functions_are_seen_through() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17, "tilefuse" : 1]>
        agraph (float[n, 4] x, float[4, 6] w) => (float[a, b] y) { y = tilefuse.Fused(x, w) }
        <domain: "tilefuse", opset_import: ["" : 17]> Fused (p, q) => (r) { m = MatMul(p, q) r = Relu(m) }""")
    found = {value.name: shape for value, shape in infer(ir.from_proto(model)).shapes.items()}
    assert list(map(str, found["y"])) == ["n", "6"]


def test_a_dim_that_the_exporter_did_not_know_has_no_number_and_no_shared_name() -> None:
    """-1 and "?" say nothing: two of them need not be equal."""
    given = [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [-1, 3, "?", "?"])]
    result = [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", given, result)
    model = ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)]))
    assert [str(size) for size in infer(model).shape(model.graph.outputs[0]) or ()] == ["x.0", "3", "x.2", "x.3"]


@pytest.mark.parametrize("attributes", ["kernel_shape=[3, 3]", "kernel_shape=[3, 3], strides=[2, 3]",
                                        "kernel_shape=[3, 3], strides=[3, 3], ceil_mode=1",
                                        "kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 0]"])  # fmt: skip
@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool"])
def test_a_pool_whose_window_is_larger_than_its_input_gives_one_element(operator: str, attributes: str) -> None:
    model = parse(f"agraph (float[n, 2, h, w] x) => (float[n, 2, p, q] y) {{ y = {operator} <{attributes}> (x) }}")
    for height in (2, 3, 4, 7):
        check(model, {"x": np.ones((1, 2, height, 8), np.float32)})
