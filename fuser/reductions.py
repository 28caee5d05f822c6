"""Every operator that reduces over axes and perhaps normalises by the result, as steps of a row program.

Comes in: a node, a reader of elements and the row's frame. Goes out: the node's outputs as expressions over step
variables, the steps appended in order. The arithmetic is the operator's own: two passes for a variance.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from fuser.element import Index, LiftError, attribute, broadcast_index, number, shape_of
from fuser.frame import Rows
from fuser.growth import Made
from fuser.lift import Inliner
from fuser.precision import hidden, in_f32
from fuser.shapes import Shapes
from fuser.softmax import reduced_axes, softmax_axes
from tilecore.contract.expr import Expr, binary, cast, const, select, unary


@dataclass(frozen=True, slots=True)
class Call:
    """One reduction to translate."""

    node: ir.Node
    rows: Rows
    reader: Inliner

    def value(self, position: int) -> ir.Value | None:
        """Input `position`, None when left out."""
        return self.node.inputs[position] if position < len(self.node.inputs) else None

    def read(self, position: int) -> Expr:
        """The element of input `position` under numpy broadcasting to the whole shape."""
        value = self.value(position)
        if value is None:
            raise LiftError(f"{self.node.op_type} {self.node.name!r} has no input {position}")
        index = broadcast_index(self.rows.full, self.rows.shape, shape_of(value, self.rows.shapes))
        return self.reader.at(value, index)

    def channel(self, position: int) -> Expr:
        """The element of input `position`, a vector over axis 1."""
        value = self.value(position)
        if value is None:
            raise LiftError(f"{self.node.op_type} {self.node.name!r} has no input {position}")
        return self.reader.at(value, (self.rows.full[1],))

    def number(self, name: str, default: float) -> float:
        """A float attribute."""
        return number(self.node, name, default)


def _wide(value: Expr) -> Expr:
    if not value.dtype.is_float:
        raise LiftError(f"reductions of {value.dtype} are left alone; f16, bf16, f32 and f64 have steps")
    return in_f32(value)


Translation = Callable[[Call], tuple[Expr | None, ...]]


def _reduce(make: Callable[[Rows, Expr], Expr]) -> Translation:
    def translate(call: Call) -> tuple[Expr | None, ...]:
        value = call.read(0)
        return (cast(make(call.rows, _wide(value)), value.dtype),)

    return translate


def _log_sum_exp(rows: Rows, x: Expr) -> Expr:
    """An infinite maximum is not subtracted: infinity less itself is no number."""
    largest = rows.reduce("max", x)
    top = select(unary("isinf", largest), 0.0, largest)
    return top + unary("log", rows.reduce("sum", unary("exp", x - top)))


REDUCTIONS: dict[str, Translation] = {
    "ReduceSum": _reduce(lambda rows, x: rows.reduce("sum", x)),
    "ReduceMean": _reduce(lambda rows, x: rows.mean(x)),
    "ReduceMax": _reduce(lambda rows, x: rows.reduce("max", x)),
    "ReduceMin": _reduce(lambda rows, x: rows.reduce("min", x)),
    "ReduceProd": _reduce(lambda rows, x: rows.reduce("prod", x)),
    "ReduceSumSquare": _reduce(lambda rows, x: rows.reduce("sum", x * x)),
    "ReduceL1": _reduce(lambda rows, x: rows.reduce("sum", unary("abs", x))),
    "ReduceL2": _reduce(lambda rows, x: unary("sqrt", rows.reduce("sum", x * x))),
    "ReduceLogSum": _reduce(lambda rows, x: unary("log", rows.reduce("sum", x))),
    "ReduceLogSumExp": _reduce(_log_sum_exp),
}


def _softmax(call: Call) -> tuple[Expr | None, ...]:
    value = call.read(0)
    x = hidden(_wide(value), value.dtype)
    weight = unary("exp", x - call.rows.reduce("max", x))
    total = call.rows.reduce("sum", weight)
    return (cast(weight * (_one(total) / total), value.dtype),)


def _log_softmax(call: Call) -> tuple[Expr | None, ...]:
    value = call.read(0)
    x = hidden(_wide(value), value.dtype)
    shifted = x - call.rows.reduce("max", x)
    return (cast(shifted - unary("log", call.rows.reduce("sum", unary("exp", shifted))), value.dtype),)


def _one(like: Expr) -> Expr:
    return const(1.0, like.dtype)


def _normalise(call: Call, x: Expr, epsilon: float) -> tuple[Expr, Expr, Expr]:
    """(normalised, mean, 1/deviation) of a value in f32 or f64, in two passes."""
    mean = call.rows.mean(x)
    centred = x - mean
    scale = unary("rsqrt", call.rows.mean(centred * centred) + epsilon)
    return centred * scale, mean, scale


def _affine(call: Call, value: Expr, scale: int, bias: int) -> Expr:
    """The learned scale and bias, which may broadcast; both in the value's own type."""
    value = value * call.read(scale)
    return value + call.read(bias) if call.value(bias) is not None else value


def _layer_norm(call: Call) -> tuple[Expr | None, ...]:
    value = call.read(0)
    normal, mean, scale = _normalise(call, _wide(value), call.number("epsilon", 1e-5))
    return _affine(call, cast(normal, value.dtype), 1, 2), mean, scale


def _rms(call: Call, x: Expr) -> tuple[Expr, Expr]:
    scale = unary("rsqrt", call.rows.mean(x * x) + call.number("epsilon", 1e-5))
    return x * scale, scale


def _rms_norm(call: Call) -> tuple[Expr | None, ...]:
    value = call.read(0)
    normal, scale = _rms(call, _wide(value))
    return cast(normal, value.dtype) * call.read(1), scale


def _skip(call: Call, bias: int) -> Expr:
    total = call.read(0) + call.read(1)
    return total + call.read(bias) if call.value(bias) is not None else total


def _skip_layer_norm(call: Call) -> tuple[Expr | None, ...]:
    total = _skip(call, 4)
    normal, mean, scale = _normalise(call, _wide(total), call.number("epsilon", 1e-12))
    return _affine(call, cast(normal, total.dtype), 2, 3), mean, scale, total


def _skip_rms_norm(call: Call) -> tuple[Expr | None, ...]:
    total = _skip(call, 3)
    normal, scale = _rms(call, _wide(total))
    return cast(normal, total.dtype) * call.read(2), None, scale, total


def _instance_norm(call: Call) -> tuple[Expr | None, ...]:
    value = call.read(0)
    normal, _, _ = _normalise(call, _wide(value), call.number("epsilon", 1e-5))
    return (cast(normal, value.dtype) * call.channel(1) + call.channel(2),)


def _mean_variance(call: Call) -> tuple[Expr | None, ...]:
    value = call.read(0)
    x = _wide(value)
    centred = x - call.rows.mean(x)
    deviation = unary("sqrt", call.rows.mean(centred * centred))
    return (cast(centred / (deviation + 1e-9), value.dtype),)  # the constant is the standard's


def _lp_norm(call: Call) -> tuple[Expr | None, ...]:
    value = call.read(0)
    x = _wide(value)
    if int(attribute(call.node, "p", 2)) == 1:
        norm = call.rows.reduce("sum", unary("abs", x))
    else:
        norm = unary("sqrt", call.rows.reduce("sum", x * x))
    zero = const(0.0, x.dtype)
    return (cast(select(binary("eq", norm, zero), zero, x / norm), value.dtype),)  # 0, not 0 / 0, by the standard


NORMS: dict[tuple[str, str], Translation] = {
    ("", "Softmax"): _softmax,
    ("", "LogSoftmax"): _log_softmax,
    ("", "LayerNormalization"): _layer_norm,
    ("", "RMSNormalization"): _rms_norm,
    ("", "LpNormalization"): _lp_norm,
    ("", "InstanceNormalization"): _instance_norm,
    ("", "MeanVarianceNormalization"): _mean_variance,
    ("", "SimplifiedLayerNormalization"): _rms_norm,
    ("com.microsoft", "SimplifiedLayerNormalization"): _rms_norm,
    ("com.microsoft", "SkipLayerNormalization"): _skip_layer_norm,
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): _skip_rms_norm,
}


def _domain(node: ir.Node) -> str:
    return "" if node.domain == "ai.onnx" else node.domain


def is_reduction(node: ir.Node) -> bool:
    """Whether `translate` knows the operator."""
    return (_domain(node) == "" and node.op_type in REDUCTIONS) or (_domain(node), node.op_type) in NORMS


def axes_of_reduction(node: ir.Node, shapes: Shapes, opset: int) -> tuple[int, ...]:
    """The axes that the node reduces over. LiftError when they are known at run time only."""
    if node.op_type in REDUCTIONS:
        return reduced_axes(node, shapes, opset)
    source = node.inputs[0]
    if source is None:
        raise LiftError(f"{node.op_type} {node.name!r} has no input")
    rank = len(shape_of(source, shapes))
    if node.op_type in ("Softmax", "LogSoftmax"):
        return softmax_axes(node, rank, opset)
    if node.op_type == "InstanceNormalization":
        return tuple(range(2, rank))
    if node.op_type == "MeanVarianceNormalization":
        axes = [int(axis) for axis in attribute(node, "axes", (0, 2, 3))]
        if any(not -rank <= axis < rank for axis in axes):  # as the default's last one, where there are three
            raise LiftError(f"{node.op_type} {node.name!r} reduces over axes {axes} of a tensor that has {rank}")
        return tuple(sorted({axis % rank for axis in axes}))
    axis = int(attribute(node, "axis", -1)) % rank
    if node.op_type == "LpNormalization":
        return (axis,)
    return (rank - 1,) if node.op_type.startswith("Skip") else tuple(range(axis, rank))


def translate(node: ir.Node, rows: Rows, where: Mapping[ir.Value, Index], reader: Inliner) -> Made | None:
    """The outputs of a reduction over the frame's own columns; None for other nodes. LiftError when it cannot be one.

    `where` says where the program's element stands in the values that are inside.
    """
    if not is_reduction(node):
        return None
    source = node.inputs[0]
    if source is None:
        raise LiftError(f"{node.op_type} {node.name!r} has no input")
    before = len(rows.steps)
    translation = REDUCTIONS.get(node.op_type) or NORMS[_domain(node), node.op_type]
    try:
        frame = rows.of(source, axes_of_reduction(node, rows.shapes, rows.opset), where)
        results = translation(Call(node, frame, reader))
    except (LiftError, TypeError) as error:
        del rows.steps[before:]
        raise LiftError(f"{node.op_type} {node.name!r}: {error}") from error
    made: dict[ir.Value, tuple[Index, Expr]] = {}
    for value, expr in zip(node.outputs, results, strict=False):
        place = frame.place(value)
        if expr is not None and place is not None:
            made[value] = (place, expr)
    if len(made) < len([value for value in node.outputs if value.name]):
        raise LiftError(f"{node.op_type} {node.name!r} has outputs that the row program does not make")
    return made
