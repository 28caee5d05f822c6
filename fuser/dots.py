"""Every operator that multiplies and sums over an axis, in one form: out[o…] = Σ_k left[…] · right[…], then a tail.

Comes in: a node. Goes out: a `Dot`, which says where element (o…, k) of either operand is and what is done with the
sum. MatMul of any rank, Gemm, FusedMatMul, two-operand Einsum and Conv of one group are Dots, and so are the operators
that multiply quantised integers: their operands are levels, their sum is an integer, their tail scales it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import onnx_ir as ir

from fuser.element import (
    ONE,
    ZERO,
    At,
    Index,
    LiftError,
    Shape,
    attribute,
    broadcast_index,
    dtype_of,
    flatten,
    shape_of,
    unflatten,
)
from fuser.quantized import level, requantized
from fuser.shapes import Shapes
from fuser.windows import windows_of
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Var, cast, const, nonnegative, select
from tilecore.contract.narrow import is_deep
from tilecore.contract.panel import packed_level

BYTES_LEVEL = 4  # the accuracy level of MatMulNBits that permits activations in bytes
DOMAINS = ("", "ai.onnx", "com.microsoft")
Operands = Callable[[Index, Expr], tuple[Index, Index]]
Tail = Callable[[Expr, Index, At], Expr]
Decode = Callable[[At, Index], Expr]


@dataclass(frozen=True, slots=True)
class Zero:
    """A zero point: `at(index)` is where that of the operand's element `index` is."""

    value: ir.Value
    at: Callable[[Index], Index]


@dataclass(frozen=True, slots=True)
class Dot:
    """One contraction. `locate(o, k)` gives the indices into `left` and `right`; `finish(acc, o, at)` the result."""

    node: ir.Node
    left: ir.Value
    right: ir.Value
    depth: Expr
    locate: Operands
    finish: Tail
    zeros: tuple[Zero | None, Zero | None] = (None, None)  # of integer operands: their zero points
    integer: bool = False  # operands are levels that are summed as 32-bit integers
    decode: Decode | None = None  # the right operand's element (k, n), where `right` stores it in another form
    inside: Callable[[Index], Expr] | None = None  # whether an index of the left operand is an element; others are 0
    byte_block: int = 0  # a licence to round the left operand to bytes in blocks of so many steps of the sum

    def read(self, side: int, at: At, index: Index) -> Expr:
        """The element of the left (0) or right (1) operand at `index`: for integers, less its zero point."""
        if side and self.decode is not None:
            return self.decode(at, index)
        element = at(self.right if side else self.left, index)
        if self.integer:
            zero = self.zeros[side]
            element = level(element, None if zero is None else at(zero.value, zero.at(index)))
        if side or self.inside is None:
            return element
        return select(self.inside(index), element, const(element.dtype.row.numpy.type(0).item(), element.dtype))

    @property
    def out(self) -> ir.Value:
        """The value that the node makes."""
        return self.node.outputs[0]


def is_dot(node: ir.Node) -> bool:
    """Whether `dot_of` knows the operator."""
    return node.op_type in (_CONTRIB if node.domain == "com.microsoft" else _READERS) and node.domain in DOMAINS


def rounds_operands(node: ir.Node, shapes: Shapes) -> bool:
    """Whether operands of `node` are rounded where a region's are: a sum of many products of floats.

    LiftError for a contraction whose operands are no tensors of floats, so that nothing around it could round them.
    """
    if not is_dot(node):
        return False
    dot = dot_of(node, shapes)
    if dot.integer or dot.decode is not None:
        raise LiftError(f"{node.op_type} {node.name!r} multiplies packed or integer operands")
    return is_deep(dot.depth)


def dot_of(node: ir.Node, shapes: Shapes) -> Dot:
    """The node as a Dot. LiftError, with what was found, for the uses of the operator that are not one."""
    reader = (_CONTRIB if node.domain == "com.microsoft" else _READERS)[node.op_type]
    dtype = dtype_of(node.outputs[0], shapes)
    if reader in _INTEGER_READERS:
        return reader(node, shapes, dtype)
    if dtype not in (DType.F32, DType.F16, DType.BF16):
        raise LiftError(
            f"{node.op_type} {node.name!r} is {dtype}; f32, f16 and bf16 accumulate in f32",
            node=node,
            advice="convert the model to float32 where that is accurate enough",
        )
    return reader(node, shapes, dtype)


def _inputs(node: ir.Node, count: int) -> tuple[ir.Value, ...]:
    found = tuple(value for value in node.inputs[:count] if value is not None)
    if len(found) != count:
        raise LiftError(f"{node.op_type} {node.name!r} has {len(found)} of {count} operands")
    return found


def _plain(dtype: DType, scale: float = 1.0) -> Tail:
    return lambda acc, index, at: cast(acc if scale == 1.0 else acc * scale, dtype)


def _matmul(node: ir.Node, shapes: Shapes, dtype: DType) -> Dot:
    left, right = _inputs(node, 2)
    return _matmul_of(node, shapes, left, right, _plain(dtype, float(attribute(node, "alpha", 1.0))))


def _matmul_of(node: ir.Node, shapes: Shapes, left: ir.Value, right: ir.Value, finish: Tail) -> Dot:
    a, b, out = shape_of(left, shapes), shape_of(right, shapes), shape_of(node.outputs[0], shapes)
    if attribute(node, "transBatchA", 0) or attribute(node, "transBatchB", 0):
        raise LiftError(f"{node.op_type} {node.name!r} moves batch axes")
    turn_a, turn_b = bool(attribute(node, "transA", 0)), bool(attribute(node, "transB", 0))
    if not a or not b:
        raise LiftError(f"{node.op_type} {node.name!r} has a scalar operand")

    def locate(o: Index, k: Expr) -> tuple[Index, Index]:
        rest, shape = list(o), list(out)
        n = () if len(b) == 1 else (rest.pop(),)
        if n:
            shape.pop()
        m = () if len(a) == 1 else (rest.pop(),)
        if m:
            shape.pop()
        batch_a = broadcast_index(tuple(rest), tuple(shape), a[:-2])
        batch_b = broadcast_index(tuple(rest), tuple(shape), b[:-2])
        return (*batch_a, *((k, *m) if turn_a else (*m, k))), (*batch_b, *((*n, k) if turn_b else (k, *n)))

    return Dot(node, left, right, a[-2 if turn_a else -1], locate, finish)


def _gemm(node: ir.Node, shapes: Shapes, dtype: DType) -> Dot:
    left, right = _inputs(node, 2)
    a, out = shape_of(left, shapes), shape_of(node.outputs[0], shapes)
    turn_a, turn_b = bool(attribute(node, "transA", 0)), bool(attribute(node, "transB", 0))
    alpha, beta = float(attribute(node, "alpha", 1.0)), float(attribute(node, "beta", 1.0))
    bias = node.inputs[2] if len(node.inputs) > 2 else None

    def locate(o: Index, k: Expr) -> tuple[Index, Index]:
        m, n = o
        return ((k, m) if turn_a else (m, k)), ((n, k) if turn_b else (k, n))

    def finish(acc: Expr, o: Index, at: At) -> Expr:
        total = acc if alpha == 1.0 else acc * alpha
        if bias is not None and beta != 0.0:
            term = cast(at(bias, broadcast_index(o, out, shape_of(bias, shapes))), DType.F32)
            total = total + (term if beta == 1.0 else term * beta)
        return cast(total, dtype)

    return Dot(node, left, right, a[0 if turn_a else 1], locate, finish)


def _conv(node: ir.Node, shapes: Shapes, dtype: DType) -> Dot:
    image, weight = _inputs(node, 2)
    bias = node.inputs[2] if len(node.inputs) > 2 else None

    def finish(acc: Expr, o: Index, at: At) -> Expr:
        return cast(acc if bias is None else acc + cast(at(bias, (o[1],)), DType.F32), dtype)

    return _conv_of(node, shapes, image, weight, finish)


def _conv_of(node: ir.Node, shapes: Shapes, image: ir.Value, weight: ir.Value, finish: Tail) -> Dot:
    """Σ over taps and channels. What there is more of runs fastest: channels, or places along the last axis."""
    x, w = shape_of(image, shapes), shape_of(weight, shapes)
    windows = windows_of(node, x, w, shape_of(node.outputs[0], shapes))
    channels_last = nonnegative(x[1] - w[-1])
    inner = (*w[2:], x[1]) if channels_last else (x[1], *w[2:])

    def locate(o: Index, k: Expr) -> tuple[Index, Index]:
        digits = unflatten(k, inner)
        channel, taps = (digits[-1], digits[:-1]) if channels_last else (digits[0], digits[1:])
        return (o[0], channel, *windows.places(o[2:], taps)), (o[1], channel, *taps)

    depth = flatten(tuple(dim - 1 for dim in inner), inner) + 1
    return Dot(node, image, weight, depth, locate, finish, inside=lambda index: windows.inside(index[2:]))


def _einsum(node: ir.Node, shapes: Shapes, dtype: DType) -> Dot:
    equation = str(attribute(node, "equation", "")).replace(" ", "")
    if len(node.inputs) != 2:
        raise LiftError(
            f"Einsum {node.name!r} has {len(node.inputs)} operands; two are supported",
            node=node,
            advice="write it as several Einsums of two operands each",
        )
    left, right = _inputs(node, 2)
    inputs, _, output = equation.partition("->")
    terms = inputs.split(",")
    if "->" not in equation:
        letters = sorted(c for c in set(inputs) if c.isalpha() and inputs.count(c) == 1)
        output = ("..." if "..." in inputs else "") + "".join(letters)
    shape_pair = (shape_of(left, shapes), shape_of(right, shapes))
    out_shape = shape_of(node.outputs[0], shapes)
    labels = [_labels(term, len(shape)) for term, shape in zip(terms, shape_pair, strict=True)]
    out_labels = _labels(output, len(out_shape))
    sizes: dict[str, Expr] = {}
    for names, shape in zip(labels, shape_pair, strict=True):
        if len(set(names)) != len(names):
            raise LiftError(f"Einsum {node.name!r} ({equation}) repeats an index within one operand")
        for name, dim in zip(names, shape, strict=True):
            sizes[name] = dim if sizes.get(name, ONE) == ONE else sizes[name]
    inner = [name for name in sizes if name not in out_labels]
    if any(name not in labels[0] or name not in labels[1] for name in inner):
        raise LiftError(f"Einsum {node.name!r} ({equation}) sums over an index that only one operand has")
    inner_shape = tuple(sizes[name] for name in inner)

    def locate(o: Index, k: Expr) -> tuple[Index, Index]:
        where = dict(zip(out_labels, o, strict=True)) | dict(zip(inner, unflatten(k, inner_shape), strict=True))
        spread = {name: (sizes[name],) for name in sizes}
        picked = [
            tuple(
                broadcast_index((where[name],), spread[name], (dim,))[0] for name, dim in zip(names, shape, strict=True)
            )
            for names, shape in zip(labels, shape_pair, strict=True)
        ]
        return picked[0], picked[1]

    depth = flatten(tuple(dim - 1 for dim in inner_shape), inner_shape) + 1
    return Dot(node, left, right, depth, locate, _plain(dtype))


# -- operators on integers --------------------------------------------------------------------------------------------


def _matmul_integer(node: ir.Node, shapes: Shapes, dtype: DType) -> Dot:
    """MatMulInteger: the sum itself, in 32 bits."""
    left, right = _inputs(node, 2)
    plain = _matmul_of(node, shapes, left, right, lambda acc, index, at: acc)
    return replace(plain, integer=True, zeros=(_zero(node, 2, shapes, left, -2), _zero(node, 3, shapes, right, -1)))


def _matmul_integer_to_float(node: ir.Node, shapes: Shapes, dtype: DType) -> Dot:
    """MatMulIntegerToFloat: A, B, scale of A, scale of B, zero points, bias."""
    left, right, left_scale, right_scale = _inputs(node, 4)
    bias = node.inputs[6] if len(node.inputs) > 6 else None
    out = shape_of(node.outputs[0], shapes)

    def finish(acc: Expr, o: Index, at: At) -> Expr:
        scale = _spread(at, left_scale, shapes, ()) * _spread(at, right_scale, shapes, o[-1:])
        value = cast(acc, DType.F32) * cast(scale, DType.F32)
        return cast(
            value
            if bias is None
            else value + cast(at(bias, broadcast_index(o, out, shape_of(bias, shapes))), DType.F32),
            dtype,
        )

    plain = _matmul_of(node, shapes, left, right, finish)
    return replace(plain, integer=True, zeros=(_zero(node, 4, shapes, left, -2), _zero(node, 5, shapes, right, -1)))


def _qlinear_matmul(node: ir.Node, shapes: Shapes, dtype: DType) -> Dot:
    """QLinearMatMul: (A, scale, zero), (B, scale, zero), scale and zero of the result."""
    found = _inputs(node, 8)
    left, right = found[0], found[3]

    def finish(acc: Expr, o: Index, at: At) -> Expr:
        places = ((1, o[-2:-1]), (4, o[-1:]), (6, o[-2:-1]))
        left_scale, right_scale, out_scale = (
            cast(_spread(at, found[position], shapes, place), DType.F32) for position, place in places
        )
        scale = left_scale * right_scale / out_scale
        return requantized(cast(acc, DType.F32) * scale, _spread(at, found[7], shapes, o[-2:-1]), dtype)

    plain = _matmul_of(node, shapes, left, right, finish)
    return replace(plain, integer=True, zeros=(_zero(node, 2, shapes, left, -2), _zero(node, 5, shapes, right, -1)))


def _conv_integer(node: ir.Node, shapes: Shapes, dtype: DType) -> Dot:
    """ConvInteger: the sum itself."""
    image, weight = _inputs(node, 2)
    plain = _conv_of(node, shapes, image, weight, lambda acc, index, at: acc)
    return replace(plain, integer=True, zeros=(_zero(node, 2, shapes, image, 1), _zero(node, 3, shapes, weight, 0)))


def _qlinear_conv(node: ir.Node, shapes: Shapes, dtype: DType) -> Dot:
    """QLinearConv: (X, scale, zero), (W, scale, zero), scale and zero of the result, bias as a sum."""
    found = _inputs(node, 8)
    image, weight = found[0], found[3]
    bias = node.inputs[8] if len(node.inputs) > 8 else None

    def finish(acc: Expr, o: Index, at: At) -> Expr:
        scale = _spread(at, found[1], shapes, ()) * _spread(at, found[4], shapes, o[1:2])
        scale = scale / _spread(at, found[6], shapes, ())
        total = acc if bias is None else acc + at(bias, (o[1],))
        return requantized(cast(total, DType.F32) * scale, _spread(at, found[7], shapes, ()), dtype)

    plain = _conv_of(node, shapes, image, weight, finish)
    return replace(plain, integer=True, zeros=(_zero(node, 2, shapes, image, 1), _zero(node, 5, shapes, weight, 0)))


def _qgemm(node: ir.Node, shapes: Shapes, dtype: DType) -> Dot:
    """QGemm: (A, scale, zero), (B, scale, zero), bias as a sum, then scale and zero of the result, or an f32 result."""
    found = _inputs(node, 6)
    left, right = found[0], found[3]
    if float(attribute(node, "alpha", 1.0)) != 1.0:
        raise LiftError(f"QGemm {node.name!r} has an alpha other than 1")
    rest = [node.inputs[i] if len(node.inputs) > i else None for i in (6, 7, 8)]
    out = shape_of(node.outputs[0], shapes)
    turn_a, turn_b = bool(attribute(node, "transA", 0)), bool(attribute(node, "transB", 0))

    def locate(o: Index, k: Expr) -> tuple[Index, Index]:
        m, n = o
        return ((k, m) if turn_a else (m, k)), ((n, k) if turn_b else (k, n))

    def finish(acc: Expr, o: Index, at: At) -> Expr:
        bias, out_scale, out_zero = rest
        total = acc if bias is None else acc + at(bias, broadcast_index(o, out, shape_of(bias, shapes)))
        scale = _spread(at, found[1], shapes, ()) * _spread(at, found[4], shapes, o[1:])
        if out_scale is None or dtype is DType.F32:
            return cast(total, DType.F32) * scale
        zero = None if out_zero is None else _spread(at, out_zero, shapes, ())
        return requantized(cast(total, DType.F32) * (scale / _spread(at, out_scale, shapes, ())), zero, dtype)

    depth = shape_of(left, shapes)[0 if turn_a else 1]
    zeros = (_zero(node, 2, shapes, left, 0), _zero(node, 5, shapes, right, 0 if turn_b else 1))
    return Dot(node, left, right, depth, locate, finish, zeros, integer=True)


def _matmul_n_bits(node: ir.Node, shapes: Shapes, dtype: DType) -> Dot:
    """MatMulNBits: A, packed levels of B [n, blocks, bytes], scales, zero points, group indices, bias.

    Blocks run along the summed axis; an `accuracy_level` of 4 lets a runtime round A to bytes in the same blocks.
    """
    left, right, scales = _inputs(node, 3)
    zeros, groups, bias = (node.inputs[i] if len(node.inputs) > i else None for i in (3, 4, 5))
    bits, block = int(attribute(node, "bits", 4)), int(attribute(node, "block_size", 0))
    depth, columns = int(attribute(node, "K", 0)), int(attribute(node, "N", 0))
    where = f"{node.op_type} {node.name!r}"
    if groups is not None:
        raise LiftError(
            f"{where} permutes its blocks (g_idx)",
            node=node,
            advice="quantise without act-order: blocks are then runs of rows",
        )
    if bits not in (4, 8) or block < 2 or int(attribute(node, "weight_prepacked", 0)):
        raise LiftError(
            f"{where} has {bits} bits in blocks of {block}; 4 and 8 bits that are not prepacked are supported",
            node=node,
            advice="quantise the weights to 4 or 8 bits",
        )
    blocks = -(-depth // block)
    stored, scale_shape = shape_of(right, shapes), shape_of(scales, shapes)
    if stored != (const(columns), const(blocks), const(block * bits // 8)):
        raise LiftError(f"{where} has weights of [{', '.join(map(str, stored))}], not [N, blocks, bytes of a block]")
    packed_zeros = zeros is not None and dtype_of(zeros, shapes) is DType.U8

    def of_block(at: At, value: ir.Value, shape: Shape, n: Expr, number: Expr, width: int) -> Expr:
        """Element `number` of the `width` that column n has, in a matrix or a flat vector."""
        return at(value, (n, number) if len(shape) == 2 else (n * width + number,))

    def decode(at: At, index: Index) -> Expr:
        k, n = index
        number, within, half = k // const(block), k % const(block), const(8 // bits)
        value = packed_level(at(right, (n, number, within // half)), within, bits)
        real: Expr = cast(value, DType.F32)
        if zeros is None:
            real = real - float(1 << (bits - 1))
        elif packed_zeros:
            width = -(-blocks * bits // 8)
            found = of_block(at, zeros, shape_of(zeros, shapes), n, number // half, width)
            real = real - cast(packed_level(found, number, bits), DType.F32)
        else:
            real = real - cast(of_block(at, zeros, shape_of(zeros, shapes), n, number, blocks), DType.F32)
        return real * cast(of_block(at, scales, scale_shape, n, number, blocks), DType.F32)

    def locate(o: Index, k: Expr) -> tuple[Index, Index]:
        return (*o[:-1], k), (k, o[-1])

    def finish(acc: Expr, o: Index, at: At) -> Expr:
        return cast(acc if bias is None else acc + cast(at(bias, o[-1:]), DType.F32), dtype)

    licence = block if int(attribute(node, "accuracy_level", 0)) == BYTES_LEVEL else 0
    return Dot(node, left, right, const(depth), locate, finish, decode=decode, byte_block=licence)


def _zero(node: ir.Node, position: int, shapes: Shapes, operand: ir.Value, axis: int) -> Zero | None:
    """Input `position` as the zero point of `operand`: one for all, one per step of `axis`, or broadcast to it."""
    value = node.inputs[position] if position < len(node.inputs) else None
    if value is None:
        return None
    shape, whole = shape_of(value, shapes), shape_of(operand, shapes)
    if len(shape) > 1 and len(shape) != len(whole):
        raise LiftError(f"{node.op_type} {node.name!r}: a zero point of {len(shape)} axes for {len(whole)}")

    def at(index: Index) -> Index:
        if all(dim == ONE for dim in shape):
            return tuple(ZERO for _ in shape)
        if len(shape) == 1:
            return broadcast_index((index[axis],), (whole[axis],), shape)
        return broadcast_index(index, whole, shape)

    return Zero(value, at)


def _spread(at: At, value: ir.Value, shapes: Shapes, index: Index) -> Expr:
    """A scale or zero point of the result: one for all, or one per `index`. LiftError for any other shape."""
    shape = shape_of(value, shapes)
    if all(dim == ONE for dim in shape):
        return at(value, tuple(ZERO for _ in shape))
    if len(shape) != 1 or not index:
        raise LiftError(
            f"{value.name!r} has the shape [{', '.join(map(str, shape))}]; one number or a vector is needed"
        )
    return at(value, index)


def _labels(term: str, rank: int) -> list[str]:
    """One name per axis; the axes of an ellipsis are numbered from the back."""
    before, dots, after = term.partition("...")
    if not dots:
        return list(term)
    count = rank - len(before) - len(after)
    return [*before, *(f"...{i}" for i in reversed(range(count))), *after]


_READERS: dict[str, Callable[[ir.Node, Shapes, DType], Dot]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _conv,
    "Einsum": _einsum,
    "MatMulInteger": _matmul_integer,
    "QLinearMatMul": _qlinear_matmul,
    "ConvInteger": _conv_integer,
    "QLinearConv": _qlinear_conv,
}
_CONTRIB: dict[str, Callable[[ir.Node, Shapes, DType], Dot]] = {
    "FusedMatMul": _matmul,
    "TransposeMatMul": _matmul,
    "MatMulIntegerToFloat": _matmul_integer_to_float,
    "QGemm": _qgemm,
    "MatMulNBits": _matmul_n_bits,
}
_INTEGER_READERS = (_matmul_integer, _matmul_integer_to_float, _qlinear_matmul, _conv_integer, _qlinear_conv, _qgemm)


def axes_of(shape: Shape, prefix: str) -> Index:
    """One variable per dim, and 0 where the dim is 1."""
    return tuple(ZERO if dim == ONE else Var(f"{prefix}{i}", extent=dim) for i, dim in enumerate(shape))
