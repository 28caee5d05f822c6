"""Graphs of operators put together at random: pointwise work, reductions, norms, products, views, indices, casts.

Comes in: a seed. Goes out: a model and inputs for it. Each node is run by ONNX Runtime as it is written, so that what
it refuses, or what grows large, is left out. Invariants: operators that jump (Floor, comparisons, casts to integers)
read only what was computed without rounding, and logarithms, roots and quotients stay away from 0, so that results
may be compared by a tolerance; equal seeds give equal bytes.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]
LARGEST, ELEMENTS, RANK = 1e3, 4000, 5  # magnitudes, elements and axes of values that are kept
OPSETS = (13, 14, 17, 18, 20, 21)
SMOOTH = ("Abs", "Neg", "Relu", "Tanh", "Sigmoid", "Erf", "Sin", "Cos", "Softplus", "Softsign", "Elu", "LeakyRelu")
LATER = (("Mish", 18), ("HardSwish", 14), ("Gelu", 20))  # with the opset that has them
JUMPS = ("Floor", "Ceil", "Round", "Sign", "IsNaN", "IsInf")
COMPARISONS = ("Less", "Greater", "Equal", "LessOrEqual", "GreaterOrEqual")
EXACT = frozenset((
    *("Abs", "Neg", "Relu", "Add", "Sub", "Mul", "Max", "Min", "ReduceMax", "ReduceMin", "Where", "Transpose"),
    *("Reshape", "Slice", "Concat", "Split", "Unsqueeze", "Expand", "Tile", "Pad", "Trilu", "Gather", *JUMPS),
    *("Cast", "And", "Or", "Xor", "Not", "Mod", *COMPARISONS),
))  # give what has no rounding for what has none  # fmt: skip


@dataclass(frozen=True)
class Value:
    """A value of the graph with what it holds, and whether that was computed without rounding."""

    name: str
    array: Array
    exact: bool = True


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    """ONNX Runtime without its optimisations."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _described(value: Value) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(
        value.name, helper.np_dtype_to_tensor_dtype(value.array.dtype), value.array.shape
    )


class RandomGraph:
    """A graph that grows by `step`."""

    def __init__(self, seed: int, *, nodes: int = 12) -> None:
        self.random, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.opset = self.random.choice(OPSETS)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[Value] = []
        b, s, c = self.random.choice((1, 2, 3)), self.random.choice((1, 3, 5, 7)), self.random.choice((4, 6, 8, 17))
        shapes = [(b, s, c), (b, s, c), (c,), (b, s, 1), (s, c), (b, s, c)]
        kinds = [np.float32, np.float32, np.float32, np.float32, np.float64, np.int64]
        self.inputs = [Value(f"x{i}", self.filled(*entry)) for i, entry in enumerate(zip(shapes, kinds, strict=True))]
        self.values = list(self.inputs)
        for _ in range(nodes):
            self.random.choice(STEPS)(self)

    def filled(self, shape: Sequence[int], dtype: Any) -> Array:
        """Quarters from -2 to 2, or whole numbers."""
        return np.asarray(self.numbers.integers(-8, 9, shape) / (4 if np.dtype(dtype).kind == "f" else 1)).astype(dtype)

    def constant(self, array: Any, dtype: Any = np.int64) -> Value:
        self.constants.append(Value(f"k{len(self.constants)}", np.asarray(array, dtype)))
        return self.constants[-1]

    def pick(self, kinds: str = "f", *, rank: int = 0, exact: bool = False) -> Value | None:
        """A value, the latest more often."""
        found = [
            v for v in self.values if v.array.dtype.kind in kinds and v.array.ndim >= rank and (v.exact or not exact)
        ]
        return self.random.choices(found, range(1, len(found) + 1))[0] if found else None

    def beside(self, value: Value) -> Value:
        """A value of the same type that broadcasts with `value`, or a constant."""
        found = [v for v in self.values if v.array.dtype == value.array.dtype and _broadcast(v, value)]
        if found and self.random.random() < 0.7:
            return self.random.choice(found)
        shape = [self.random.choice((1, dim)) for dim in value.array.shape]
        kind = value.array.dtype
        array = self.numbers.random(shape) < 0.5 if kind.kind == "b" else self.filled(shape, kind)
        return self.constant(array, kind)

    def add(self, op: str, *inputs: Value, outputs: int = 1, **attributes: Any) -> list[Value]:
        """Writes a node; nothing when ONNX Runtime refuses it or its results are of no use."""
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        node = helper.make_node(op, [v.name for v in inputs], names, name=f"n{len(self.nodes)}", **attributes)
        given = {value.name: value for value in inputs}
        alone = self._model([node], list(given.values()), [helper.make_empty_tensor_value_info(name) for name in names])
        try:
            arrays = session(alone).run(None, {name: value.array for name, value in given.items()})
        except Exception:  # noqa: BLE001 - ONNX Runtime's exceptions share no other base: this node is not for it
            return []
        exact = op in EXACT and all(value.exact for value in inputs)
        made = [
            Value(n, np.asarray(a), exact or np.asarray(a).dtype.kind != "f")
            for n, a in zip(names, arrays, strict=True)
        ]
        if not all(_kept(value.array) for value in made):
            return []
        self.nodes.append(node)
        self.values += made
        return made

    def axis(self, value: Value) -> int:
        return self.random.randrange(-value.array.ndim, value.array.ndim)

    def _model(
        self, nodes: list[onnx.NodeProto], inputs: list[Value], outputs: list[onnx.ValueInfoProto]
    ) -> onnx.ModelProto:
        weights = {value.name: value for value in self.constants if any(value.name in node.input for node in nodes)}
        graph = helper.make_graph(
            nodes,
            "random",
            [_described(value) for value in inputs if value.name not in weights],
            outputs,
            [numpy_helper.from_array(value.array, value.name) for value in weights.values()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)

    def model(self) -> onnx.ModelProto:
        """Outputs are what no node reads, and one value that some node reads."""
        read = {name for node in self.nodes for name in node.input}
        computed = [value for value in self.values if value.name.startswith("v")]
        shown = [value for value in computed if value.name not in read]
        shown += [value for value in computed if value.name in read][-2:-1]
        kinds = [helper.np_dtype_to_tensor_dtype(value.array.dtype) for value in shown]
        outputs = [helper.make_tensor_value_info(v.name, kind, None) for v, kind in zip(shown, kinds, strict=True)]
        return self._model(self.nodes, self.inputs, outputs)

    def feeds(self) -> dict[str, Array]:
        return {value.name: value.array for value in self.inputs}


def _kept(array: Array) -> bool:
    if array.size > ELEMENTS or array.ndim > RANK:
        return False
    return array.dtype.kind == "b" or not array.size or bool(np.abs(array.astype(np.float64)).max() < LARGEST)


def _broadcast(a: Value, b: Value) -> bool:
    try:
        np.broadcast_shapes(a.array.shape, b.array.shape)
    except ValueError:
        return False
    return True


def _pointwise(g: RandomGraph) -> None:
    later = [op for op, opset in LATER if g.opset >= opset]
    if value := g.pick():
        g.add(g.random.choice((*SMOOTH, *later)), value)


def _away_from_zero(g: RandomGraph) -> None:
    """Roots, logarithms and quotients of 1/2 + |x|."""
    if not (value := g.pick()):
        return
    for size in g.add("Abs", value):
        for safe in g.add("Add", size, g.constant(0.5, value.array.dtype)):
            op = g.random.choice(("Sqrt", "Log", "Reciprocal", "Div"))
            g.add(op, *((g.beside(safe), safe) if op == "Div" else (safe,)))


def _jump(g: RandomGraph) -> None:
    if value := g.pick(exact=True):
        g.add(g.random.choice(JUMPS), value)


def _two(g: RandomGraph) -> None:
    if value := g.pick(g.random.choice(("f", "f", "fi"))):
        pair = [value, g.beside(value)]
        g.random.shuffle(pair)
        g.add(g.random.choice(("Add", "Sub", "Mul", "Max", "Min", "Sum", "Mean")), *pair)


def _flag(g: RandomGraph) -> None:
    flag = g.pick("b")
    if flag and g.random.random() < 0.7:
        op = g.random.choice(("And", "Or", "Xor", "Not", "Where", "Where"))
        chosen = g.pick() if op == "Where" else g.beside(flag)
        more = () if op == "Not" or not chosen else (chosen, g.beside(chosen)) if op == "Where" else (chosen,)
        g.add(op, flag, *more)
    elif value := g.pick("fi", exact=True):
        other = g.beside(value)
        if other.exact:
            g.add(g.random.choice(COMPARISONS), value, other)


def _reduction(g: RandomGraph) -> None:
    if not (value := g.pick(rank=1)):
        return
    op = g.random.choice(
        ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceSumSquare", "ReduceL2")
    )
    axes = [g.axis(value)]
    keep = {"keepdims": g.random.choice((0, 1))}
    if op == "ReduceSum" or g.opset >= 18:
        g.add(op, value, g.constant(axes), **keep)
    else:
        g.add(op, value, axes=axes, **keep)


def _norm(g: RandomGraph) -> None:
    if not (value := g.pick(rank=2)):
        return
    shape, kind = value.array.shape, value.array.dtype
    op = g.random.choice(("Softmax", "LogSoftmax", "LpNormalization", "LayerNormalization", "InstanceNormalization"))
    if op == "LayerNormalization":
        weight = [g.constant(g.filled(shape[-1:], kind), kind) for _ in range(2)]
        g.add(op, value, *weight, epsilon=0.1, outputs=g.random.choice((1, 3)))
    elif op == "InstanceNormalization":
        g.add(op, value, *(g.constant(g.filled(shape[1:2], kind), kind) for _ in range(2)), epsilon=0.1)
    elif op == "LpNormalization" and not value.exact:  # what is nearly 0 may become anything
        return
    else:
        g.add(op, value, axis=g.axis(value))


def _product(g: RandomGraph) -> None:
    if not (value := g.pick(rank=1)):
        return
    kind, depth = value.array.dtype, value.array.shape[-1]
    if value.array.ndim == 2 and g.random.random() < 0.4:
        other = g.constant(g.filled((3, depth), kind), kind)
        g.add("Gemm", value, other, transB=1, alpha=0.5)
    elif value.array.ndim == 3 and g.random.random() < 0.3:
        weight = g.constant(g.filled((5, value.array.shape[1], 3), kind) / 4, kind)
        g.add("Conv", value, weight, pads=[2, 0], strides=[g.random.choice((1, 2))])
    elif value.array.ndim >= 2 and g.random.random() < 0.4:
        axes = [*range(value.array.ndim - 2), value.array.ndim - 1, value.array.ndim - 2]
        for turned in g.add("Transpose", value, perm=axes):
            g.add("MatMul", value, turned)
    else:
        g.add("MatMul", value, g.constant(g.filled((depth, g.random.choice((1, 8, 17))), kind) / 4, kind))


def _view(g: RandomGraph) -> None:
    if not (value := g.pick(g.random.choice(("f", "fib")), rank=1)):
        return
    rank, axis = value.array.ndim, g.axis(value)
    size = value.array.shape[axis]
    match g.random.choice(
        ("Transpose", "Reshape", "Slice", "Concat", "Split", "Unsqueeze", "Expand", "Tile", "Pad", "Gather", "Trilu")
    ):
        case "Transpose":
            g.add("Transpose", value, perm=g.random.sample(range(rank), rank))
        case "Reshape":
            g.add(
                "Reshape", value, g.constant(g.random.choice(([-1], [0, -1], [1, -1, 1], [*value.array.shape[::-1]])))
            )
        case "Slice":
            start, stop, step = g.random.choice(((0, size - 1, 1), (-1, -(10**9), -1), (1, 10**9, 2), (-2, 10**9, 1)))
            g.add("Slice", value, *(g.constant([number]) for number in (start, stop, axis, step)))
        case "Concat":
            g.add("Concat", value, g.beside(value), value, axis=axis)
        case "Split" if size > 1:
            g.add("Split", value, g.constant([1, size - 1]), axis=axis, outputs=2)
        case "Unsqueeze":
            g.add("Unsqueeze", value, g.constant([axis]))
        case "Expand":
            g.add("Expand", value, g.constant([2] + [1] * rank))
        case "Tile":
            g.add("Tile", value, g.constant([g.random.choice((1, 2)) for _ in range(rank)]))
        case "Pad":
            g.add("Pad", value, g.constant([g.random.choice((0, 0, 1)) for _ in range(2 * rank)]))
        case "Gather":
            g.add("Gather", value, g.constant(g.numbers.integers(-size, size, (2, 3))), axis=axis)
        case _:
            g.add("Trilu", value, g.constant(g.random.choice((-1, 0, 1))), upper=g.random.choice((0, 1)))


def _whole(g: RandomGraph) -> None:
    if value := g.pick("i"):
        divisor = g.constant(g.random.choice((-3, 2, 5)))
        op = g.random.choice(("Add", "Mul", "Div", "Mod", "Gather"))
        table = g.constant(g.filled((17, 3), np.float32), np.float32)
        g.add(op, *((table, value) if op == "Gather" else (value, divisor)))


def _cast(g: RandomGraph) -> None:
    if value := g.pick("fib", exact=True):
        g.add(
            "Cast",
            value,
            to=g.random.choice((TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.BOOL)),
        )


STEPS: Sequence[Callable[[RandomGraph], None]] = (
    *(
        _pointwise,
        _pointwise,
        _away_from_zero,
        _jump,
        _two,
        _two,
        _two,
        _flag,
        _flag,
        _reduction,
        _reduction,
        _norm,
        _norm,
    ),
    *(_product, _product, _view, _view, _view, _whole, _cast),
)
