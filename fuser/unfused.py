"""What a runtime without our kernels does for a region: its nodes as pieces of work, joined as ONNX Runtime joins them.

Comes in: nodes, shapes, a size for every symbolic dim. Goes out: one `Work` per operator that ONNX Runtime would run.
Its default session joins some neighbours before it runs them (GELU and Swish chains, a bias or activation with the
product before it, a swap of the last two axes with the product after it, levels with the product between them): these
count once. What only shares memory or computes shapes counts as nothing.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from fuser.cuts import data_inputs, is_plumbing
from fuser.dots import dot_of, is_dot
from fuser.element import LiftError, attribute
from fuser.graph import bodies
from fuser.lift import cost_of, is_view
from fuser.shapes import Shapes
from tilecore.contract.expr import Const, Expr, Sym, const, rewrite

COPYLESS = frozenset(("Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity"))  # ONNX Runtime shares the memory
KINDS: Mapping[str, str] = {
    **dict.fromkeys(("Softmax", "LogSoftmax"), "softmax"),
    **dict.fromkeys(
        ("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization", "InstanceNormalization",
         "GroupNormalization", "LpNormalization"), "norm"),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "EmbedLayerNormalization"), "skip"),
    "CumSum": "cumulate",
    **dict.fromkeys(("Loop", "Scan"), "loop"),
    **dict.fromkeys(("Cast", "Where", "QuantizeLinear"), "convert"),
    **dict.fromkeys(
        ("Erf", "Exp", "Tanh", "Sigmoid", "Log", "Pow", "Gelu", "FastGelu", "BiasGelu", "QuickGelu", "Softplus",
         "Swish", "Sin", "Cos", "Mish", "Elu", "Selu"), "function"),
}  # fmt: skip
BROADCASTING = frozenset(("pointwise", "convert", "function"))
DENSE, LEVELS, NIBBLES, UNPACKED = "dense", "levels", "nibbles", "unpacked"  # kinds of products
INTEGER = frozenset(("MatMulInteger", "MatMulIntegerToFloat", "QLinearMatMul", "QGemm", "ConvInteger", "QLinearConv"))
ACTIVATIONS = frozenset(("Relu", "LeakyRelu", "Sigmoid", "Tanh", "Clip", "HardSigmoid"))  # that products take in
QUANTIZERS = frozenset(("QuantizeLinear", "DequantizeLinear"))
GELU_REACH = 2  # nodes from an Erf to the ends of the chain that is joined with it


@dataclass(frozen=True, slots=True)
class Work:
    """One operator run by itself.

    `kind` says what a unit of it costs; `elements` are the most that it reads or makes, in `rows` along the last axis;
    `moved` bytes are read and written. Products have `multiply_adds`, `weights` bytes of constants, and `packed`
    elements of right operands that are none; `groups` are products of matrices.
    """

    kind: str
    elements: int
    rows: int
    moved: int
    weights: int = 0
    multiply_adds: int = 0
    packed: int = 0
    groups: int = 1


def work_of(nodes: Iterable[ir.Node], shapes: Shapes, sizes: Mapping[str, int]) -> tuple[Work, ...]:
    """The work of each operator that ONNX Runtime would run and that does more than share memory."""
    region = dict.fromkeys(node for node in nodes if not is_plumbing(node, shapes))
    joined = _joined(region, shapes)
    return tuple(
        _work(node, shapes, sizes, levels=node in joined.levels)
        for node in region
        if node.op_type not in COPYLESS and node not in joined.nodes
    )


@dataclass(frozen=True, slots=True)
class _Joined:
    """Nodes that ONNX Runtime runs as part of another one, and products that it runs on levels."""

    nodes: frozenset[ir.Node]
    levels: frozenset[ir.Node]


def _joined(region: Mapping[ir.Node, None], shapes: Shapes) -> _Joined:
    taken: set[ir.Node] = set()
    levels: set[ir.Node] = set()
    for node in region:
        if node.op_type == "Erf":
            taken |= _around(node, region)
        elif node.op_type == "Sigmoid":
            taken |= {user for user in _users(node, region) if user.op_type == "Mul" and node.inputs[0] in user.inputs}
        elif is_dot(node) or node.op_type == "Conv":
            before, after = _sides(node, region, shapes)
            taken |= before | after
            if any(other.op_type == "DequantizeLinear" for other in before):
                levels.add(node)
    return _Joined(frozenset(taken), frozenset(levels))


def _users(node: ir.Node, region: Mapping[ir.Node, None]) -> list[ir.Node]:
    return [user for value in node.outputs for user, _ in value.uses() if user in region]


def _around(erf: ir.Node, region: Mapping[ir.Node, None]) -> set[ir.Node]:
    """The rest of x·(1 + erf(x/√2))/2: the division before, the sum after, and up to two products."""
    found = {
        maker for value in erf.inputs if value is not None
        if (maker := value.producer()) is not None and maker in region and maker.op_type in ("Div", "Mul")
    }  # fmt: skip
    ends = [erf]
    for _ in range(GELU_REACH + 1):
        ends = [user for end in ends for user in _users(end, region) if user.op_type in ("Add", "Mul")]
        found.update(ends)
    return found


def _sides(node: ir.Node, region: Mapping[ir.Node, None], shapes: Shapes) -> tuple[set[ir.Node], set[ir.Node]]:
    """What ONNX Runtime joins with a product: what is before it, and what follows it."""
    before: set[ir.Node] = set()
    makers = [value.producer() for value in node.inputs[:2] if value is not None]
    if makers and all(maker is not None and maker.op_type == "DequantizeLinear" for maker in makers):
        before = {maker for maker in makers if maker is not None and maker in region}
    before |= {maker for maker in makers if maker is not None and maker in region and _swaps(maker)}
    after: set[ir.Node] = set()
    users = _users(node, region)
    flat = (shape := shapes.shape(node.outputs[0])) is not None and len(shape) == 2
    if len(users) == 1 and _scales(users[0], shapes):
        after.add(users[0])
        users = _users(users[0], region)
    if len(users) == 1 and flat and users[0].op_type == "Add" and _one_row(users[0], node, shapes):
        after.add(users[0])
        users = _users(users[0], region)
    if len(users) == 1 and users[0].op_type in ACTIVATIONS and (flat or node.op_type == "Conv"):
        after.add(users[0])
        users = _users(users[0], region)
    if before and len(users) == 1 and users[0].op_type in QUANTIZERS:
        after.add(users[0])
    return before, after


def _swaps(node: ir.Node) -> bool:
    """Whether the node swaps the last two axes."""
    if node.op_type != "Transpose":
        return False
    perm = node.attributes.get("perm")
    axes = list(perm.as_ints()) if perm is not None else []
    rank = len(axes)
    return rank > 1 and axes == [*range(rank - 2), rank - 1, rank - 2]


def _scales(node: ir.Node, shapes: Shapes) -> bool:
    """Whether the node multiplies by a single constant."""
    if node.op_type not in ("Mul", "Div") or len(node.inputs) != 2:
        return False
    return any(
        value is not None and value.const_value is not None and math.prod(value.const_value.shape.numpy()) == 1
        for value in node.inputs
    )


def _one_row(node: ir.Node, product: ir.Node, shapes: Shapes) -> bool:
    """Whether the node adds a vector to a product."""
    other = [value for value in node.inputs if value is not None and value.producer() is not product]
    shape = shapes.shape(other[0]) if len(other) == 1 else None
    return shape is not None and len(shape) == 1


def _work(node: ir.Node, shapes: Shapes, sizes: Mapping[str, int], *, levels: bool) -> Work:
    dims = [[_size(dim, sizes) for dim in shapes.shape(value) or ()] for value in node.outputs]
    made = sum(math.prod(shape) for shape in dims)
    read = [(_count(value, shapes, sizes), _width(value, shapes)) for value in data_inputs(node)]
    moved = sum(_width(value, shapes) * math.prod(shape) for value, shape in zip(node.outputs, dims, strict=True))
    moved += sum(width * (min(count, made) if is_view(node) else count) for count, width in read)
    if is_dot(node):
        return _product(node, shapes, sizes, dims[0], levels=levels)
    elements = max([made, *(count for count, _ in read)])
    kind = KINDS.get(node.op_type)
    if kind is None:
        kind = "move" if is_view(node) else "reduce" if node.op_type.startswith("Reduce") else "pointwise"
    if kind == "loop":
        return _loop(node, shapes, sizes, elements, moved)
    last = dims[0][-1] if dims[0] and kind != "reduce" else max(1, elements // max(made, 1))
    rows = elements // max(last, 1)
    if kind in BROADCASTING and all(count in (1, made) for count, _ in read):
        rows = 0  # one pass over all elements
    return Work(kind, elements * max(1, min(cost_of(node), 4)) if kind == "pointwise" else elements, rows, moved)


def _loop(node: ir.Node, shapes: Shapes, sizes: Mapping[str, int], elements: int, moved: int) -> Work:
    """Loop or Scan: a row per node of the body that runs, in every step."""
    inner = [part for _, graph in bodies(node) for part in graph if not is_plumbing(part, shapes)]
    if node.op_type == "Scan":
        first = node.inputs[-1]
        lengths = [0 if first is None else _axis(first, attribute(node, "scan_input_axes", [0])[-1], shapes, sizes)]
    else:
        carried = len(node.inputs) - 2
        lengths = [_axis(value, 0, shapes, sizes) for value in node.outputs[carried:]]
    return Work("loop", elements, max(1, *lengths, 1) * max(1, len(inner)), moved)


def _axis(value: ir.Value, axis: int, shapes: Shapes, sizes: Mapping[str, int]) -> int:
    shape = shapes.shape(value)
    return _size(shape[axis], sizes) if shape and -len(shape) <= axis < len(shape) else 1


def _product(node: ir.Node, shapes: Shapes, sizes: Mapping[str, int], out: list[int], *, levels: bool) -> Work:
    """A contraction. Bytes where ONNX Runtime reads levels that the model has as floats beside it."""
    made = math.prod(out)
    columns = out[-1] if out else 1
    rows = made // max(columns, 1)
    try:
        dot = dot_of(node, shapes)
    except LiftError:  # it is no anchor of ours, and only its size can be told
        return Work(DENSE, made, rows, 4 * made)
    kind = LEVELS if levels or node.op_type in INTEGER else DENSE
    if node.op_type == "MatMulNBits":
        kind = NIBBLES if attribute(node, "accuracy_level", 0) == 4 else UNPACKED
    bytes_of = {
        side: _count(side, shapes, sizes) * (1 if levels else _width(side, shapes)) for side in (dot.left, dot.right)
    }
    depth = _size(dot.depth, sizes)
    constant = dot.right.const_value is not None or levels
    weights = bytes_of[dot.right] if constant else 0
    moved = _width(node.outputs[0], shapes) * made + sum(bytes_of.values()) - weights
    if constant or node.op_type == "Conv":
        return Work(kind, made, rows, moved, weights, made * depth)
    packed = _count(dot.right, shapes, sizes)
    return Work(kind, made, rows, moved, 0, made * depth, packed, max(1, packed // max(depth * columns, 1)))


def _count(value: ir.Value, shapes: Shapes, sizes: Mapping[str, int]) -> int:
    return math.prod(_size(dim, sizes) for dim in shapes.shape(value) or ())


def _size(dim: Expr, sizes: Mapping[str, int]) -> int:
    if isinstance(dim, Sym):
        return max(0, sizes.get(dim.name, 1))
    if not isinstance(dim, Const):
        dim = rewrite(dim, lambda part: const(sizes.get(part.name, 1)) if isinstance(part, Sym) else None)
    return max(0, int(dim.value)) if isinstance(dim, Const) else 1


def _width(value: ir.Value, shapes: Shapes) -> int:
    dtype = shapes.dtype(value)
    return 4 if dtype is None else max(1, dtype.bitwidth // 8)
