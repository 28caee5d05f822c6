"""Evaluates an ONNX model in double precision, to tell rounding from wrong results.

In: a model (weights may stay in external files), its folder, inputs, a `Mode`. Out: every requested value in float64,
and the longest reduction that was met. The meaning of the operators is onnx.reference's; nodes run one at a time, so
only the weights of one node are widened at once. No runtime takes part: what ONNX Runtime has no kernels for, such as
bfloat16 on a CPU, is evaluated all the same.
"""

import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, inliner, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from runtime.oracle_images import IMAGE_OPS
from runtime.oracle_loops import stacked, stacking, steps_of, straightened, turned_back
from tilecore.contract.narrow import LEAST_DEPTH

Array = npt.NDArray[Any]

FLOATS: dict[int, np.dtype[Any]] = {
    TensorProto.FLOAT: np.dtype(np.float32),
    TensorProto.FLOAT16: np.dtype(np.float16),
    TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    TensorProto.DOUBLE: np.dtype(np.float64),
}


BYTES_LEVEL = 4  # the accuracy_level of MatMulNBits that permits activations in bytes
MULTIPLIED = {"MatMul": 2, "Gemm": 2, "FusedMatMul": 2, "Einsum": 2, "Conv": 2, "Attention": 3, "FlexAttention": 3}
HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
SIGMOID_STEP = 2.0**-22  # ONNX Runtime's Sigmoid is 0.5 + p/q: right to that, however small the result is, 0 below -18
COMPARED = frozenset(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsInf", "IsNaN"))
STEPPING = frozenset(("Floor", "Ceil", "Round", "ArgMax", "ArgMin", "NonZero")) | COMPARED
FLATTENED_BEFORE_13 = frozenset(("Softmax", "LogSoftmax", "Hardmax"))  # onnx.reference has their later meaning only


class OracleError(Exception):
    """The model cannot be evaluated in double precision; the message names the node and why."""


class Erf(OpRun):
    """Erf in double precision; onnx.reference rounds it to float32."""

    op_domain = ""

    def _run(self, x: Array) -> tuple[Array]:
        flat = [math.erf(value) for value in x.ravel().tolist()]
        return (np.array(flat, dtype=x.dtype).reshape(x.shape),)


class GatherElements(OpRun):
    """GatherElements whose indices may be smaller than the data on the other axes; onnx.reference refuses these."""

    op_domain = ""

    def _run(self, data: Array, indices: Array, axis: int = 0) -> tuple[Array]:
        axis %= data.ndim
        window = tuple(slice(None) if i == axis else slice(size) for i, size in enumerate(indices.shape))
        return (np.take_along_axis(data[window], indices, axis),)


class DequantizeLinear(OpRun):
    """DequantizeLinear of every opset in double precision; onnx.reference has it from 19 on."""

    op_domain = ""

    def _run(self, x: Array, scale: Array, zero: Array | None = None, **settings: Any) -> tuple[Array]:
        factor, shift = _parameters(x, scale, zero, settings)
        return ((x.astype(np.float64) - shift) * factor,)


class QuantizeLinear(OpRun):
    """QuantizeLinear of every opset to the integer types of numpy; onnx.reference has it from 19 on."""

    op_domain = ""

    def _run(self, x: Array, scale: Array, zero: Array | None = None, **settings: Any) -> tuple[Array]:
        code = settings.get("output_dtype") or TensorProto.UINT8
        kind = np.dtype(helper.tensor_dtype_to_np_dtype(code)) if zero is None else zero.dtype
        factor, shift = _parameters(x, scale, zero, settings)
        limits = np.iinfo(kind)
        return (np.clip(np.rint(x / factor) + shift, limits.min, limits.max).astype(kind),)


class MatMulNBits(OpRun):
    """ONNX Runtime's product with packed 4-bit or 8-bit weights; `accuracy_level` is a licence for `Mode.BYTES`."""

    op_domain = "com.microsoft"

    def _run(
        self, a: Array, b: Array, scales: Array, zeros: Array | None = None, groups: Array | None = None,
        bias: Array | None = None, **settings: Any,
    ) -> tuple[Array]:  # fmt: skip
        if groups is not None:
            raise ValueError("g_idx is not supported")
        bits = settings.get("bits") or 4
        columns, depth, block = (int(settings[name]) for name in ("N", "K", "block_size"))
        blocks = -(-depth // block)
        levels = _unpacked(b, bits).reshape(columns, blocks, block)
        zero: Any = float(1 << (bits - 1))
        if zeros is not None:
            packed = zeros.dtype == np.uint8
            zero = (_unpacked(zeros.reshape(columns, -1), bits)[:, :blocks] if packed else zeros).reshape(
                columns, blocks, 1
            )
        weight = (levels - zero) * scales.reshape(columns, blocks, 1)
        product = a @ weight.reshape(columns, -1)[:, :depth].T
        return (product if bias is None else product + bias,)


class DynamicQuantizeMatMul(OpRun):
    """ONNX Runtime's product of levels, with one scale for all of A; its kernel saturates on some processors."""

    op_domain = "com.microsoft"

    def _run(
        self, a: Array, b: Array, scale: Array, zero: Array | None = None, bias: Array | None = None
    ) -> tuple[Array]:
        low, high = min(float(a.min(initial=0.0)), 0.0), max(float(a.max(initial=0.0)), 0.0)
        step = (high - low) / 255 or 1.0
        shift = np.clip(np.rint(-low / step), 0, 255)
        levels = np.clip(np.rint(a / step) + shift, 0, 255) - shift
        product = levels @ (b.astype(np.float64) - (0.0 if zero is None else zero)) * (step * scale)
        return (product if bias is None else product + bias,)


def _unpacked(stored: Array, bits: int) -> Array:
    """Levels of the last axis, low bits of each byte first, in double precision."""
    parts = [stored >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(*stored.shape[:-1], -1).astype(np.float64)


class MeanVarianceNormalization(OpRun):
    """MeanVarianceNormalization in double precision; the body that onnx.reference runs has float32 constants."""

    op_domain = ""

    def _run(self, x: Array, axes: Sequence[int] = (0, 2, 3)) -> tuple[Array]:
        centred = x - x.mean(axis=tuple(axes), keepdims=True)
        return (centred / (np.sqrt(np.square(centred).mean(axis=tuple(axes), keepdims=True)) + 1e-9),)


NEW_OPS: list[type[OpRun]] = [
    *(Erf, GatherElements, DequantizeLinear, QuantizeLinear),
    *(MatMulNBits, DynamicQuantizeMatMul, MeanVarianceNormalization),
    *IMAGE_OPS,
]


def _parameters(x: Array, scale: Array, zero: Array | None, settings: Mapping[str, Any]) -> tuple[Array, Array]:
    """Scale and zero point in double precision, in a shape that broadcasts against `x`."""
    axis, block = settings.get("axis"), settings.get("block_size")
    axis = (1 if axis is None else axis) % max(x.ndim, 1)

    def spread(value: Array) -> Array:
        value = np.asarray(value).astype(np.float64)
        if value.size == 1:
            return value.reshape(())
        if block:
            return np.repeat(value, block, axis)[tuple(map(slice, x.shape))]
        return value.reshape([-1 if i == axis else 1 for i in range(x.ndim)])

    return spread(scale), spread(np.zeros(1) if zero is None else zero)


class Mode(enum.Enum):
    """What is left of the types that the model declares for what its nodes compute."""

    RANGE = enum.auto()  # what overflows a type is infinite; nothing is rounded
    UNBOUNDED = enum.auto()  # neither: the same formula over the real numbers
    BYTES = enum.auto()  # as RANGE, but left operands of products that permit it are rounded to bytes, in blocks
    OPERANDS = enum.auto()  # as BYTES, and operands of other contractions and attention are rounded to bfloat16
    ROUNDED = enum.auto()  # as BYTES, and every result is rounded to its type: as a careful runtime computes
    STEPPED = enum.auto()  # as RANGE, but every Sigmoid is too small by SIGMOID_STEP, or 0: the worst of ONNX Runtime's


@dataclass(frozen=True)
class Evaluation:
    """Values by name, floats widened to float64, and the longest sum of products or row reduction on the way.

    `overflowed`: the float types that some finite result did not fit, of those that the model computes it in.
    """

    values: Mapping[str, Array]
    longest: int
    overflowed: frozenset[np.dtype[Any]]


def has_half(model: onnx.ModelProto) -> bool:
    """Whether the model computes in 16-bit floats anywhere: then its nodes round much more than ONNX Runtime may."""
    called = {node.op_type for node in model.graph.node}
    bodies = (function.node for function in model.functions if function.name in called)
    nodes = [*model.graph.node, *chain.from_iterable(bodies)]
    tensors = [*model.graph.initializer, *(a.t for n in nodes for a in n.attribute if a.HasField("t"))]
    values = (*model.graph.input, *model.graph.output, *model.graph.value_info)
    targets = (a.i for node in nodes if node.op_type == "Cast" for a in node.attribute if a.name == "to")
    kinds = {*(t.data_type for t in tensors), *(v.type.tensor_type.elem_type for v in values), *targets}
    return not kinds.isdisjoint(HALF)


def evaluate(
    model: onnx.ModelProto,
    folder: Path,
    feeds: Mapping[str, Array],
    names: Sequence[str],
    *,
    mode: Mode = Mode.RANGE,
    operators: Sequence[type[OpRun]] = (),
    decided: Mapping[str, Array] | None = None,
) -> Evaluation:
    """The values `names` of `model` for `feeds`; external weights are read from `folder` when used.

    `operators` are known beside the standard's; what is `decided` (see `jumps`) is not computed.

    Raises OracleError for operators that onnx.reference does not know or cannot run.
    """
    if model.functions:
        model = inliner.inline_local_functions(model)
    graph = model.graph
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    weights = {tensor.name: tensor for tensor in graph.initializer}
    known: dict[str, Array] = {}
    precision: dict[str, np.dtype[Any]] = {}
    for name, value in feeds.items():
        known[name], precision[name] = _widen(value), value.dtype
    nested = any(subgraphs(node) for node in graph.node)
    last_use = {} if nested else {name: i for i, node in enumerate(graph.node) for name in node.input}
    longest, settled = 1, decided or {}
    overflowed: set[np.dtype[Any]] = set()
    for i, node in enumerate(graph.node):
        for name in weights.keys() & ({*node.input} | captured(node)) - known.keys():
            value = numpy_helper.to_array(weights[name], str(folder))
            known[name], precision[name] = _widen(value), value.dtype
        given = _rounded_operands(node, known, mode)
        results = _run_node(node, opsets, given, [*NEW_OPS, *operators])
        kind = _precision(node, precision)
        for name, value in (results | {name: settled[name] for name in results if name in settled}).items():
            stepped = mode is Mode.STEPPED and node.op_type == "Sigmoid"
            known[name] = _in_type(np.maximum(value - SIGMOID_STEP, 0.0) if stepped else _widen(value), kind, mode)
            precision[name] = kind
            overflowed |= {kind} if _overflows(value, kind) else set()
        longest = max(longest, _reduction_length(node, known))
        for name in node.input:
            if last_use.get(name) == i and name not in names:
                known.pop(name, None)
    for name in names:
        if name not in known and name in weights:
            known[name] = _widen(numpy_helper.to_array(weights[name], str(folder)))
    return Evaluation({name: known[name] for name in names}, longest, frozenset(overflowed))


def all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node of the model, of its functions and subgraphs."""
    groups = [model.graph.node, *(function.node for function in model.functions)]
    while groups:
        for node in groups.pop():
            groups += [graph.node for attribute in node.attribute for graph in (attribute.g, *attribute.graphs)]
            yield node


def jumps(node: onnx.NodeProto) -> tuple[str, ...]:
    """Those outputs of `node` that jump where a float input moves by a rounding."""
    if node.domain:
        return ()
    if node.op_type == "TopK":
        return tuple(node.output[1:])
    target = next((attribute.i for attribute in node.attribute if attribute.name == "to"), TensorProto.FLOAT)
    stepping = node.op_type in STEPPING or (node.op_type == "Cast" and target not in FLOATS)
    return tuple(node.output) if stepping else ()


def without_licences(model: onnx.ModelProto) -> bytes | None:
    """The model without the licences to round operands that its nodes give a runtime; None where they give none."""
    settings = [each for node in all_nodes(model) if node.op_type == "MatMulNBits" for each in node.attribute]
    licences = [setting for setting in settings if setting.name == "accuracy_level" and setting.i]
    levels = [setting.i for setting in licences]
    for setting in licences:
        setting.i = 0
    exact = model.SerializeToString() if licences else None
    for setting, level in zip(licences, levels, strict=True):
        setting.i = level
    return exact


def permits_bytes(node: onnx.NodeProto) -> bool:
    """Whether the left operand of `node` may be rounded to bytes."""
    settings = (attribute for attribute in node.attribute if attribute.name == "accuracy_level")
    return node.op_type == "MatMulNBits" and any(attribute.i == BYTES_LEVEL for attribute in settings)


def permits(model: onnx.ModelProto) -> bool:
    """Whether some node of the model permits to round its left operand to bytes."""
    return any(map(permits_bytes, all_nodes(model)))


def _rounded_operands(node: onnx.NodeProto, known: Mapping[str, Array], mode: Mode) -> Mapping[str, Array]:
    """`known` with what `node` multiplies and sums rounded, as `mode` says, where it sums enough of them."""
    if mode in (Mode.BYTES, Mode.OPERANDS, Mode.ROUNDED) and permits_bytes(node):
        block = next(attribute.i for attribute in node.attribute if attribute.name == "block_size")
        return {**known, node.input[0]: _in_bytes(known[node.input[0]], block)}
    count = MULTIPLIED.get(node.op_type, 0) if mode is Mode.OPERANDS else 0
    if not count or _reduction_length(node, known) < LEAST_DEPTH:
        return known
    floats = [name for name in node.input[:count] if name in known and known[name].dtype == np.float64]
    return {**known, **{name: known[name].astype(ml_dtypes.bfloat16).astype(np.float64) for name in floats}}


def _in_bytes(value: Array, block: int) -> Array:
    """Rows of `value` rounded so that the largest of every `block` elements is 127 steps from 0."""
    width = value.shape[-1]
    padded = np.zeros((*value.shape[:-1], -(-width // block) * block))
    padded[..., :width] = value
    blocks = padded.reshape(*value.shape[:-1], -1, block)
    with np.errstate(all="ignore"):
        step = np.abs(blocks).max(axis=-1, keepdims=True) / 127
        rounded = np.where(step == 0, 0.0, np.rint(blocks / step) * step)
    return rounded.reshape(padded.shape)[..., :width]


def _run_node(
    node: onnx.NodeProto, opsets: Mapping[str, int], known: Mapping[str, Array], operators: list[type[OpRun]]
) -> dict[str, Array]:
    """The node's outputs in double precision."""
    wide = _widen_node(node)
    flattened = node.op_type in FLATTENED_BEFORE_13 and not node.domain and opsets.get("", 1) < 13
    missing = [name for name in node.input if name and name not in known]
    if missing:
        raise OracleError(f"node {node.name!r} ({node.op_type}) reads {missing[0]!r}, which nothing computes")
    scope = {name: known[name] for name in {*node.input, *captured(node)} if name in known}
    if flattened:
        scope[node.input[0]] = _flatten(wide, scope[node.input[0]])
    repeated = node.op_type if not node.domain and all(node.output) else ""
    if repeated == "Scan":
        wide, scope = straightened(wide, scope)
    elif repeated == "Loop":
        wide, scope = stacking(wide, scope, opsets.get("", 1))
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(scope[name].dtype), scope[name].shape)
        for name in dict.fromkeys(wide.input)
        if name
    ]
    names = [name for name in node.output if name]
    outputs = [helper.make_empty_tensor_value_info(name) for name in names]
    graph = helper.make_graph([wide], "node", inputs, outputs)
    try:
        with np.errstate(all="ignore"):
            evaluator = ReferenceEvaluator(graph, opsets=dict(opsets), new_ops=operators)
            values: Any = evaluator.run(names, scope)
    except Exception as error:
        raise OracleError(f"node {node.name!r} ({node.op_type}) cannot be evaluated: {error}") from error
    if repeated in ("Scan", "Loop"):
        values = (turned_back if repeated == "Scan" else stacked)(node, values)
    shape = known[node.input[0]].shape if flattened else None
    arrays = [np.asarray(value) if shape is None else np.reshape(value, shape) for value in values]
    return dict(zip(names, arrays, strict=True))


def _flatten(node: onnx.NodeProto, value: Array) -> Array:
    """The matrix that Softmax of opset 12 and before normalises the rows of; `node` gets the matching axis."""
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("axis", 1))
    return value.reshape(math.prod(value.shape[:axis]), math.prod(value.shape[axis:]))


def _widen(value: Array) -> Array:
    return value.astype(np.float64) if value.dtype in FLOATS.values() else value


def _in_type(value: Array, kind: np.dtype[Any], mode: Mode) -> Array:
    """A result in float64 as `mode` wants it for the precision that the model computes it in."""
    if value.dtype != np.float64 or kind not in FLOATS.values() or kind == np.float64 or mode is Mode.UNBOUNDED:
        return value
    if mode is Mode.ROUNDED:
        with np.errstate(over="ignore"):
            return value.astype(kind).astype(np.float64)
    if _fits(value, kind):
        return value
    return np.where(np.abs(value) > _limit(kind), np.copysign(np.inf, value), value)


def _fits(value: Array, kind: np.dtype[Any]) -> bool:
    """Whether all are numbers within the range of `kind`: two passes that make no copies, where most end."""
    return not value.size or bool(value.max() <= _limit(kind) and value.min() >= -_limit(kind))


def _limit(kind: np.dtype[Any]) -> float:
    """The largest number that rounds to a finite one."""
    info = ml_dtypes.finfo(kind)
    return float(info.max) * (1 + float(info.eps) / 4)


def _overflows(value: Array, kind: np.dtype[Any]) -> bool:
    if value.dtype != np.float64 or kind not in FLOATS.values() or kind == np.float64:
        return False
    return not _fits(value, kind) and bool((np.isfinite(value) & (np.abs(value) > _limit(kind))).any())


def _precision(node: onnx.NodeProto, precision: Mapping[str, np.dtype[Any]]) -> np.dtype[Any]:
    """The float type that the model itself computes the node's outputs in."""
    attributes = {attribute.name: attribute for attribute in node.attribute}
    for name in ("to", "dtype", "output_dtype"):
        if name in attributes:
            return FLOATS.get(attributes[name].i, np.dtype(np.float64))
    if "value" in attributes:
        return FLOATS.get(attributes["value"].t.data_type, np.dtype(np.float64))
    if node.op_type == "CastLike":
        return precision.get(node.input[1], np.dtype(np.float32))
    kinds = (precision[name] for name in node.input if name in precision and precision[name] in FLOATS.values())
    return next(kinds, np.dtype(np.float32))


def _widen_node(node: onnx.NodeProto) -> onnx.NodeProto:
    """The node with casts and constants of narrower floats made double, in its subgraphs too."""
    wide = onnx.NodeProto()
    wide.CopyFrom(node)
    for attribute in wide.attribute:
        if attribute.name in ("to", "dtype", "output_dtype") and attribute.i in FLOATS:
            attribute.i = TensorProto.DOUBLE
        if attribute.HasField("t") and attribute.t.data_type in FLOATS:
            attribute.t.CopyFrom(numpy_helper.from_array(_widen(numpy_helper.to_array(attribute.t))))
        for graph in _graphs(attribute):
            _widen_graph(graph)
    return wide


def _widen_graph(graph: onnx.GraphProto) -> None:
    nodes = [_widen_node(node) for node in graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    for tensor in graph.initializer:
        if tensor.data_type in FLOATS:
            tensor.CopyFrom(numpy_helper.from_array(_widen(numpy_helper.to_array(tensor)), tensor.name))
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type in FLOATS:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE


def _graphs(attribute: onnx.AttributeProto) -> Iterable[onnx.GraphProto]:
    return (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs


def subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The bodies of a node."""
    return [graph for attribute in node.attribute for graph in _graphs(attribute)]


def captured(node: onnx.NodeProto) -> set[str]:
    """Every name that the node's subgraphs read, their own values included."""
    names: set[str] = set()
    for graph in subgraphs(node):
        names.update(value.name for value in graph.output)
        for inner in graph.node:
            names.update(inner.input)
            names |= captured(inner)
    return names


def _reduction_length(node: onnx.NodeProto, known: Mapping[str, Array]) -> int:
    """How many terms one output element of the node sums."""
    shapes = [known[name].shape for name in node.input if name in known]
    if not shapes or not (shapes[0] or node.op_type == "Loop"):
        return 1
    match node.op_type:
        case (
            "MatMul"
            | "MatMulNBits"
            | "MatMulInteger"
            | "Softmax"
            | "LogSoftmax"
            | "LayerNormalization"
            | "RMSNormalization"
        ):
            return shapes[0][-1]
        case "Gemm":
            turned = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
            return shapes[0][0] if turned else shapes[0][-1]
        case "Conv" | "ConvTranspose":
            return math.prod(shapes[1][1:])
        case "Scan" | "Loop":  # every step sums at most along an axis of a state, and adds to what the last one left
            return steps_of(node, known) * max(size for shape in shapes for size in shape or (1,))
        case "LinearAttention":
            heads = next(attribute.i for attribute in node.attribute if attribute.name == "q_num_heads")
            return shapes[0][1] * (shapes[0][-1] // heads)
        case "GroupNorm" | "SkipGroupNorm":
            return math.prod(shapes[0][1:])
        case "Einsum" | "Attention" | "FlexAttention":
            return max(size for shape in shapes for size in shape)
        case name if name.startswith("Reduce") or name in ("GlobalAveragePool", "CumSum", "InstanceNormalization"):
            output = known[node.output[0]]
            return max(1, math.prod(shapes[0]) // max(1, output.size)) if name != "CumSum" else max(shapes[0])
        case _:
            return 1
