"""Operands that are computed from packed levels: which byte holds a level, and what else its value depends on.

Comes in: a view over (g, row, k) whose value is a program of bytes, of 4 or 8 bits a level, and of what is the same for
runs of k, such as scales and zero points of groups. Goes out: a `Decoding`. Nothing is told by how the program is
spelt: offsets are evaluated for every k, what is done to a byte for every byte. CudaError for a view of another kind.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import Evaluator
from tilecore.contract.expr import Const, Expr, Load, Op, Var, children, const, loads, rewrite, variables, walk
from tilecore.contract.spec import Tensor, View
from tilecore.cuda.errors import CudaError
from tilecore.cuda.vectors import flat_offset
from tilecore.graph import split_affine

LEVEL = Var("level", DType.I32)
RUNS = (256, 128, 64, 32, 16)  # of k, longest first
DEEPEST = 1 << 24
BYTES = np.arange(256)


@dataclass(frozen=True, slots=True)
class Decoding:
    """Level k of row n stands in byte n · `pitch` + k · `bits` // 8 of `tensor`, the first in the low bits. LEVEL is
    (those bits xor `flip`) + `offset`; `value` is a program of LEVEL, the row, and what is the same for `run` elements
    of k.
    """

    tensor: Tensor
    depth: int
    bits: int
    pitch: int
    flip: int
    offset: int
    value: Expr
    run: int

    @property
    def rows(self) -> int:
        """Rows of bytes."""
        return math.prod(_extent(dim) for dim in self.tensor.shape) // self.pitch

    @property
    def levels(self) -> tuple[int, int]:
        """The smallest and the largest level."""
        return self.offset, self.offset + (1 << self.bits) - 1


def is_plain(view: View) -> bool:
    """Whether a view is elements of a tensor as they are."""
    return isinstance(view.value, Load)


def decoding_of(view: View) -> Decoding:
    """How a computed view is decoded. CudaError, which says what it is instead, for one that is not."""
    g, row, k = view.axes
    depth = k.extent
    if not isinstance(depth, Const) or not isinstance(row.extent, Const):
        raise CudaError(f"{view.name} is {view.value} over a depth of {depth}: weights have extents that are known")
    if int(depth.value) > DEEPEST:
        raise CudaError(f"{view.name} is {depth} deep: weights that are decoded are looked at up to {DEEPEST}")
    every = np.arange(int(depth.value))
    if g in variables(view.value):
        raise CudaError(f"{view.name} differs along {g.name}: levels are those of one matrix")
    found: dict[Load, tuple[int, int]] = {}
    for load in loads(view.value):
        if isinstance(load.source, Tensor) and load.dtype in (DType.U8, DType.I8):
            place = _placed(load, row, k, every)
            if place is not None:
                found[load] = place
    if len(found) != 1:
        names = ", ".join(sorted({load.source.name for load in loads(view.value)}))
        raise CudaError(
            f"operand {view.name} is {view.value}, computed from {names}: tensor copies bring f16 or bf16 tensors as "
            "they are, and levels of 4 or 8 bits of rows of bytes; compute such a prologue in a kernel of its own"
        )
    ((load, (bits, pitch)),) = found.items()
    level = _level_of(view.value, load)
    flip, offset = _pattern(level, load, k, bits, every, view.name)
    value = rewrite(view.value, lambda node: LEVEL if node == level else None)
    assert isinstance(load.source, Tensor)
    run = _run(value, row, k, every, view.name)
    if pitch % 16 or math.prod(_extent(dim) for dim in load.source.shape) % pitch:
        raise CudaError(f"{load.source.name} has rows of {pitch} bytes: tensor copies need multiples of 16")
    return Decoding(load.source, len(every), bits, pitch, flip, offset, value, run)


def _extent(dim: Expr) -> int:
    if not isinstance(dim, Const):
        raise CudaError(f"a tensor of levels has an extent of {dim}: weights have extents that are known")
    return int(dim.value)


def _placed(load: Load, row: Var, k: Var, every: np.ndarray) -> tuple[int, int] | None:
    """(bits, pitch) when bytes follow each other along k as levels of that many bits do."""
    assert isinstance(load.source, Tensor)
    if not all(isinstance(dim, Const) for dim in load.source.shape):
        return None
    pitch, rest = split_affine(flat_offset(load.source, load.index), row)
    if rest is None or not isinstance(pitch, Const) or set(variables(rest)) != {k} or loads(rest):
        return None
    offsets = _along(rest, k, every)
    for bits in (8, 4):
        if bool((offsets == every * bits // 8).all()):
            return bits, int(pitch.value)
    return None


def _along(expr: Expr, k: Var, every: np.ndarray) -> np.ndarray:
    return np.broadcast_to(Evaluator({}, {})(expr, {k: every}), every.shape)


def _level_of(value: Expr, load: Load) -> Expr:
    """The largest integer that is computed from the byte alone."""
    best: Expr = load
    for node in walk(value):
        if node.dtype.is_int and load in loads(node) and all(one == load for one in _reached(node)):
            best = node
    return best


def _reached(expr: Expr) -> Iterator[Load]:
    """Loads in it, those of indices apart."""
    if isinstance(expr, Load):
        yield expr
        return
    for part in children(expr):
        yield from _reached(part)


def _pattern(level: Expr, load: Load, k: Var, bits: int, every: np.ndarray, name: str) -> tuple[int, int]:
    """(flip, offset) such that `level` is (bits of the byte xor flip) + offset, for every byte and every k."""
    byte = Var("byte", load.dtype)
    program = rewrite(level, lambda node: byte if node == load else None)
    if not variables(program) <= {byte, k}:
        raise CudaError(f"levels of {name} depend on {', '.join(sorted(var.name for var in variables(program)))}")
    ks = every[:, None] if k in variables(program) else every[:1, None]
    stored = BYTES.astype(np.uint8).view(load.dtype.row.numpy)[None]
    found = np.asarray(Evaluator({}, {})(program, {byte: stored, k: ks}), np.int64)
    patterns = (BYTES[None] >> (ks * bits % 8)) & ((1 << bits) - 1)
    for flip in (0, 1 << (bits - 1)):
        offset = int(found[0, 0]) - flip
        if bool((found == (patterns ^ flip) + offset).all()) and abs(offset) <= 256:
            return flip, offset
    raise CudaError(f"levels of {name} are {level}: not {bits} bits of a byte in their order, the first ones low")


def _run(value: Expr, row: Var, k: Var, every: np.ndarray, name: str) -> int:
    """Elements of k, from a multiple of their number, for which all but the level is the same."""
    along: list[np.ndarray] = []

    def visit(expr: Expr) -> None:
        if isinstance(expr, Load):
            for entry in expr.index:
                _, rest = split_affine(entry, row)
                if rest is None or not variables(rest) <= {k} or loads(rest):
                    raise CudaError(f"{name} reads {expr}: rows and groups of k, each by itself, are what it may read")
                along.append(_along(rest, k, every))
        elif not loads(expr) and k in variables(expr):
            if not variables(expr) <= {k}:
                raise CudaError(f"{name} computes {expr}: of rows and of k apart is what it may compute")
            along.append(_along(expr, k, every))
        else:
            for part in children(expr):
                visit(part)

    visit(value)
    for run in RUNS:
        if all(bool((values == values[every // run * run]).all()) for values in along):
            return run
    raise CudaError(f"{name} has values beside the level that change within {RUNS[-1]} elements: take longer groups")


def bound(expr: Expr) -> int | None:
    """What an integer that is at least 0 does not exceed; None where that is not known."""
    match expr:
        case Const() if expr.dtype.is_int or float(expr.value).is_integer():
            return int(expr.value) if expr.value >= 0 else None
        case Load() if expr.dtype is DType.U8:
            return 255
        case Op(name="cast", args=(inner,)) if inner.dtype.is_int and expr.dtype in (DType.I32, DType.I64, DType.F32):
            return bound(inner)
        case Op(name="mod", args=(inner, Const() as size)) if bound(inner) is not None and size.value > 0:
            return int(size.value) - 1
        case Op(name="floordiv", args=(inner, Const() as size)) if size.value > 0:
            most = bound(inner)
            return None if most is None else most // int(size.value)
        case Op(name="select", args=(_, yes, no)):
            both = (bound(yes), bound(no))
            return None if both[0] is None or both[1] is None else max(both[0], both[1])
        case _:
            return None


ZERO = const(0.0, DType.F32)


@dataclass(frozen=True, slots=True)
class Exact:
    """The value is (LEVEL − `zero`) · `scale` rounded once: the difference is a small integer, the scale a half."""

    zero: Expr
    most: int  # what `zero` does not exceed
    scale: Load


def exact_of(decoding: Decoding) -> Exact | None:
    """The exact form, with which arithmetic in halves gives the same bits as the program in f32."""
    match decoding.value:
        case Op(name="cast", args=(Op(name="mul", args=args),), dtype=dtype) if dtype in (DType.F16, DType.BF16):
            for real, factor in (args, args[::-1]):
                scale = factor.args[0] if isinstance(factor, Op) and factor.name == "cast" else None
                if not isinstance(scale, Load) or scale.dtype is not dtype:
                    continue
                match real:
                    case Op(name="sub", args=(Op(name="cast", args=(inner,)), zero)) if inner == LEVEL:
                        most = bound(zero)
                    case Op(name="cast", args=(inner,)) if inner == LEVEL:
                        zero, most = ZERO, 0
                    case _:
                        continue
                if most is not None and most <= 255:
                    return Exact(zero, most, scale)
            return None
        case _:
            return None
