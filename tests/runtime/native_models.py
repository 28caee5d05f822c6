"""Models over the hand-written kernels of csrc/hand_kernels.c: each node has a function body that says the same."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

DOMAIN = "tilefuse"
OPSET = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]  # what ONNX Runtime 1.17 knows
IR_VERSION = 8
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
SAMPLER_OUTPUTS = (("mean", FLOAT, 2), ("rest", FLOAT, 2), ("fourfold", FLOAT, 1), ("triple", INT64, 2))


def _constant(name: str, values: Sequence[int] | Sequence[float], kind: int, dims: Sequence[int] = ()) -> NodeProto:
    return helper.make_node("Constant", [], [name], value=helper.make_tensor(name, kind, dims, values))


def _function(name: str, inputs: Sequence[str], outputs: Sequence[str], nodes: Sequence[NodeProto]) -> FunctionProto:
    return helper.make_function(DOMAIN, name, inputs, outputs, nodes, OPSET[:1])


def _scale_add(name: str) -> FunctionProto:
    return _function(
        name,
        ["x", "s"],
        ["y"],
        [
            helper.make_node("Mul", ["x", "s"], ["t"]),
            _constant("one", [1.0], FLOAT),
            helper.make_node("Add", ["t", "one"], ["y"]),
        ],
    )


FUNCTIONS = (
    _scale_add("ScaleAdd_0a"),
    _scale_add("Hungry_0e"),
    _function(
        "MeanSplit_0b",
        ["x"],
        ["mean", "rest"],
        [
            helper.make_node("ReduceMean", ["x"], ["mean"], axes=[1], keepdims=1),
            helper.make_node("Sub", ["x", "mean"], ["rest"]),
        ],
    ),
    _function(
        "Repeat_0c",
        ["x"],
        ["y"],
        [_constant("zero", [0.0], FLOAT, [1]), helper.make_node("Concat", ["x", "x", "zero"], ["y"], axis=0)],
    ),
    _function(
        "AddFirst_0f",
        ["x"],
        ["y"],
        [
            _constant("start", [0], INT64, [1]),
            _constant("stop", [1], INT64, [1]),
            helper.make_node("Slice", ["x", "start", "stop", "stop"], ["first"]),
            helper.make_node("Add", ["x", "first"], ["y"]),
        ],
    ),
    _function(
        "Triple_0d",
        ["x"],
        ["y"],
        [
            _constant("axis", [1], INT64, [1]),
            helper.make_node("Unsqueeze", ["x", "axis"], ["column"]),
            helper.make_node("Concat", ["column", "column", "column"], ["y"], axis=1),
        ],
    ),
)


def _node(op: str, inputs: Sequence[str], outputs: Sequence[str]) -> NodeProto:
    return helper.make_node(op, inputs, outputs, name=f"{op}_{outputs[0]}", domain=DOMAIN)


def _save(graph: GraphProto, path: Path) -> Path:
    used = {node.op_type for node in graph.node}
    model: ModelProto = helper.make_model(
        graph,
        opset_imports=OPSET,
        ir_version=IR_VERSION,
        functions=[function for function in FUNCTIONS if function.name in used],
    )
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(path))
    return path


def write_sampler(path: Path) -> Path:
    """Write a model with one node per kernel; its outputs are declared without dims."""
    graph = helper.make_graph(
        [
            _node("ScaleAdd_0a", ["x", "s"], ["scaled"]),
            _node("MeanSplit_0b", ["scaled"], ["mean", "rest"]),
            _node("Repeat_0c", ["flat"], ["twice"]),
            _node("Repeat_0c", ["twice"], ["fourfold"]),
            _node("Triple_0d", ["ids"], ["triple"]),
        ],
        "sampler",
        [
            helper.make_tensor_value_info("x", FLOAT, ["n", "m"]),
            helper.make_tensor_value_info("s", FLOAT, ["k"]),
            helper.make_tensor_value_info("flat", FLOAT, ["p"]),
            helper.make_tensor_value_info("ids", INT64, ["q"]),
        ],
        [helper.make_tensor_value_info(name, kind, [None] * rank) for name, kind, rank in SAMPLER_OUTPUTS],
    )
    return _save(graph, path)


def write_chain(path: Path, length: int, *, op: str = "ScaleAdd_0a") -> Path:
    """Write a model of `length` ScaleAdd nodes in a row: x [n, m], s [k] -> y [n, m]."""
    names = ["x", *(f"t{i}" for i in range(length - 1)), "y"]
    graph = helper.make_graph(
        [_node(op, [names[i], "s"], [names[i + 1]]) for i in range(length)],
        "chain",
        [helper.make_tensor_value_info("x", FLOAT, ["n", "m"]), helper.make_tensor_value_info("s", FLOAT, ["k"])],
        [helper.make_tensor_value_info("y", FLOAT, ["n", "m"])],
    )
    return _save(graph, path)


def write_add_first(path: Path) -> Path:
    """Write a model of one AddFirst: x [g, 4, m] -> y [g, 4, m]."""
    graph = helper.make_graph(
        [_node("AddFirst_0f", ["x"], ["y"])],
        "add_first",
        [helper.make_tensor_value_info("x", FLOAT, ["g", 4, "m"])],
        [helper.make_tensor_value_info("y", FLOAT, ["g", 4, "m"])],
    )
    return _save(graph, path)


def sample_feeds(n: int, m: int, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Return inputs of the sampler: x [n, m], s [m], flat [n], ids [n]."""
    random = np.random.default_rng(seed)
    return {
        "x": random.standard_normal((n, m), dtype=np.float32),
        "s": random.standard_normal(m, dtype=np.float32),
        "flat": random.standard_normal(n, dtype=np.float32),
        "ids": random.integers(-(2**40), 2**40, n),
    }


def expect_sample(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the sampler's outputs in float64, by name."""
    scaled = feeds["x"].astype(np.float64) * feeds["s"] + 1.0
    mean = scaled.mean(axis=1, keepdims=True) if scaled.shape[1] else np.full((scaled.shape[0], 1), np.nan)
    zero = np.zeros(1)
    twice = np.concatenate([feeds["flat"], feeds["flat"], zero])
    return {
        "mean": mean,
        "rest": scaled - mean,
        "fourfold": np.concatenate([twice, twice, zero]),
        "triple": np.stack([feeds["ids"]] * 3, axis=1),
    }
