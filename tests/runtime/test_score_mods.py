"""Programs of scores through the whole path: FlexAttention's graphs in attributes, and buckets of distances."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper, parser

from runtime.compile import optimize
from runtime.options import Options
from runtime.session import load
from runtime.verify import verify

pytestmark = pytest.mark.cpu

B, H, S, D = 2, 2, 9, 8
CAP = 2.5


def model() -> onnx.ModelProto:
    """Two operators: scores are capped and biased by an input, and an inner value; probabilities are gated.

    Names in the graphs are those that the definition itself uses, and both operators have the same ones.
    """
    cap = numpy_helper.from_array(np.array(CAP, np.float32), "Scale")
    score = parser.parse_graph("""
        score (float[B,H,L,S] Q) => (float[B,H,L,S] Y) {
            Prob = Div(Q, Scale)
            Score = Tanh(Prob)
            K = Mul(Score, Scale)
            Y = Add(K, bias)
        }""")
    score.initializer.append(cap)
    prob = parser.parse_graph("""
        prob (float[B,H,L,S] Score) => (float[B,H,L,S] Prob) {
            Prob = Mul(Score, gate)
        }""")
    parts = [("query", "hidden"), ("hidden", "output")]
    nodes = [helper.make_node("Sigmoid", ["logit"], ["gate"])]
    nodes += [
        helper.make_node(
            "FlexAttention", [source, "K", "V"], [target], domain="ai.onnx.preview", score_mod=score, prob_mod=prob
        )
        for source, target in parts
    ]
    heads = ["batch", H, "length", D]
    inputs = {"query": heads, "K": heads, "V": heads, "bias": ["length", "length"], "logit": [1]}
    graph = helper.make_graph(
        nodes,
        "flex",
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info("output", onnx.TensorProto.FLOAT, heads)],
    )
    imports = [helper.make_opsetid("", 23), helper.make_opsetid("ai.onnx.preview", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def wanted(feeds: dict[str, npt.NDArray[np.float32]]) -> npt.NDArray[np.float64]:
    """The same in float64."""
    query, keys, values, bias, logit = (value.astype(np.float64) for value in feeds.values())
    for _ in range(2):
        scores = np.tanh(query @ keys.swapaxes(-1, -2) / np.sqrt(D) / CAP) * CAP + bias
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        query = weights / weights.sum(-1, keepdims=True) / (1 + np.exp(-logit)) @ values
    return query


def test_graphs_in_attributes_become_part_of_one_kernel(tmp_path: Path) -> None:
    source, output = tmp_path / "model.onnx", tmp_path / "fused.onnx"
    onnx.save(model(), source)
    report = optimize(source, output, options=Options.from_environment(), progress=lambda _: None)
    assert [region.kind for region in report.regions] == ["attention", "attention"], report.misses
    fused = onnx.load(output)
    assert {node.domain for node in fused.graph.node} == {"tilefuse"}
    rng = np.random.default_rng(0)
    shapes = {"query": (B, H, S, D), "K": (B, H, S, D), "V": (B, H, S, D), "bias": (S, S), "logit": (1,)}
    feeds = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    verdict = verify(source, output, inputs=feeds)
    assert verdict.ok
    assert not verdict.unmeasured
    plain = ort.InferenceSession(output, providers=["CPUExecutionProvider"])  # the function bodies, without our library
    for session in (load(output), plain):
        (result,) = session.run(None, feeds)
        np.testing.assert_allclose(np.asarray(result), wanted(feeds), rtol=2e-5, atol=2e-5)


BUCKETS = """
    <ir_version: 9, opset_import: ["": 17]>
    buckets (float[batch, 2, length, 8] q, float[batch, 2, length, 8] k, float[batch, 2, length, 8] v,
             float[8, 2] table) => (float[batch, 2, length, 8] y)
    <int64 zero = {0}, int64 one = {1}, int64 exact = {4}, int64 last = {7}, int64[1] first = {0},
     int64[1] second = {1}, float step = {4}, float limit = {2.0794415}, float lowest = {-3.4028235e38}> {
        shape = Shape(q)
        two = Constant <value_int: int = 2> ()
        length = Gather(shape, two)
        place = Range(zero, length, one)
        row = Unsqueeze(place, second)
        column = Unsqueeze(place, first)
        back = Sub(row, column)
        distance = Max(back, zero)
        near = Less(distance, exact)
        wide = Cast <to: int = 1> (distance)
        steps = Div(wide, step)
        logarithm = Log(steps)
        part = Div(logarithm, limit)
        scaled = Mul(part, step)
        whole = Cast <to: int = 7> (scaled)
        far = Add(whole, exact)
        capped = Min(far, last)
        bucket = Where(near, distance, capped)
        gathered = Gather(table, bucket)
        bias = Transpose <perm: ints = [2, 0, 1]> (gathered)
        turned = Transpose <perm: ints = [0, 1, 3, 2]> (k)
        products = MatMul(q, turned)
        biased = Add(products, bias)
        seen = LessOrEqual(column, row)
        masked = Where(seen, biased, lowest)
        weights = Softmax <axis: int = -1> (masked)
        y = MatMul(weights, v)
    }"""


def test_the_logarithm_of_no_distance_is_never_taken_for_a_bucket(tmp_path: Path) -> None:
    """T5's decoder: the logarithm of 0, as an integer, is what Where leaves out."""
    source, output = tmp_path / "model.onnx", tmp_path / "fused.onnx"
    onnx.save(parser.parse_model(BUCKETS), source)
    report = optimize(source, output, options=Options.from_environment(), progress=lambda _: None)
    assert [region.kind for region in report.regions] == ["attention"], report.misses
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 2, 40, 8)).astype(np.float32) for _ in range(3))
    table = rng.normal(size=(8, 2)).astype(np.float32)
    (result,) = load(output).run(None, {"q": q, "k": k, "v": v, "table": table})
    distance = np.maximum(np.subtract.outer(np.arange(40), np.arange(40)), 0)
    far = 4 + np.log(np.maximum(distance, 4) / 4) / np.log(8) * 4 + 1e-6
    bias = table[np.where(distance < 4, distance, np.minimum(far.astype(int), 7))].transpose(2, 0, 1)
    scores = (q.astype(np.float64) @ k.swapaxes(-1, -2) + bias) + np.where(np.tri(40, dtype=bool), 0, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted_result = weights / weights.sum(-1, keepdims=True) @ v
    np.testing.assert_allclose(np.asarray(result), wanted_result, rtol=2e-5, atol=2e-5)
