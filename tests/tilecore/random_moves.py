"""More statements for random tile programs: other types, axes, layouts and ways to loop than `random_programs` has.

Each move takes the writer of a kernel's body and leaves a tile of it, or changes one. Integers and 16-bit floats hold
whole numbers that are exact on both sides; what meets float32 tiles is bounded and smooth.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from tilecore import language as T
from tilecore.language import Handle, Value

PRODUCTS = (  # types of the operands and of the sums
    ("float64", "float64"), ("float16", "float32"), ("bfloat16", "float32"), ("int8", "int32"), ("uint8", "int32"),
    ("int16", "int32"), ("float32", "float64"), ("float32", "float32"), ("int32", "int32"),
)  # fmt: skip
INTEGERS = ("int8", "uint8", "int16", "int32", "int64")


class Writer(Protocol):
    """What moves use of the writer in `random_programs`."""

    rng: np.random.Generator
    A: Handle
    Q: Handle
    tiles: list[Handle]
    rows: list[Handle]
    m: Any
    n: Any
    bm: int
    bn: int

    def pick(self, handles: list[Handle]) -> Handle:
        """One of them."""
        ...

    def tile(self) -> Handle:
        """A new tile of the block."""
        ...

    def exact(self, i: Any, j: Any) -> Value:
        """A value of the data without an error of rounding."""
        ...


Move = Callable[[Writer], None]


def whole(w: Writer, i: Any, j: Any, dtype: str, salt: int = 0) -> Value:
    """A small whole number of a place, not below 0 where `dtype` has no sign."""
    number = (w.m * 5 + w.n * 3 + i * 7 + j * 11 + salt) % 9
    return T.cast(number if dtype == "uint8" else number - 4, dtype)


def shrunk(w: Writer, tile: Handle) -> None:
    """A tile of the block in whatever type, as one of float32 that is bounded."""
    result = w.tile()
    for i, j in T.Parallel(w.bm, w.bn):
        result[i, j] = T.tanh(T.cast(tile[i, j], T.float32) * 0.03125)
    w.tiles.append(result)


def typed_product(w: Writer) -> None:
    """A product of whole numbers in any type, either operand transposed, once or summed over turns."""
    rng = w.rng
    kind, total = PRODUCTS[int(rng.integers(len(PRODUCTS)))]
    bk, left, right = int(rng.choice([1, 2, 5, 8, 17])), bool(rng.random() < 0.4), bool(rng.random() < 0.5)
    a = T.alloc_shared((bk, w.bm) if left else (w.bm, bk), kind)
    b = T.alloc_shared((w.bn, bk) if right else (bk, w.bn), kind)
    c = T.alloc_fragment((w.bm, w.bn), total)
    if rng.random() < 0.3 and kind == "float32" and total == kind:
        T.annotate_layout({b: T.panels(0 if right else 1)})
    fill, turns = rng.random() < 0.5, int(rng.integers(1, 4))
    T.fill(c, 2 if fill else 0)
    for s in T.Pipelined(turns, num_stages=int(rng.integers(1, 4))):
        for i, j in T.Parallel(*a.shape):
            a[i, j] = whole(w, i, j, kind)
        for i, j in T.Parallel(*b.shape):
            b[i, j] = whole(w, i, j + s, kind, 2)
        T.gemm(a, b, c, transpose_A=left, transpose_B=right, clear_accum=not fill and turns == 1)
    shrunk(w, c)


def three_axes(w: Writer) -> None:
    """A tile of three axes: running sums along one, a reduction over another."""
    rng, deep = w.rng, int(w.rng.integers(1, 4))
    kind = str(rng.choice(["int32", "float32", "float64", "int64", "float16"]))
    tile, axis = T.alloc_fragment((w.bm, deep, w.bn), kind), int(rng.integers(3))
    for i, s, j in T.Parallel(w.bm, deep, w.bn):
        tile[i, s, j] = whole(w, i + s, j, kind)
    if rng.random() < 0.5:
        T.cumsum(tile, dim=int(rng.integers(3)), reverse=bool(rng.random() < 0.5))
    shape = tuple(size for place, size in enumerate((w.bm, deep, w.bn)) if place != axis)
    result = T.alloc_fragment(shape, kind)
    T.fill(result, 1)
    op = str(rng.choice(["sum", "max", "min", "absmax", "abssum"]))
    getattr(T, f"reduce_{op}")(tile, result, dim=axis, clear=bool(rng.random() < 0.5))
    seen = T.alloc_fragment((w.bm, w.bn), kind)
    for i, j in T.Parallel(w.bm, w.bn):
        seen[i, j] = result[[(0, j), (i, j), (i, 0)][axis]]
    shrunk(w, seen)


def integers(w: Writer) -> None:
    """Whole numbers that wrap around, shift by counts from data, divide with signs, and are compared."""
    rng, dtype = w.rng, str(w.rng.choice(INTEGERS))
    a, b = (T.alloc_fragment((w.bm, w.bn), dtype) for _ in range(2))
    for i, j in T.Parallel(w.bm, w.bn):
        a[i, j] = T.cast(T.cast(T.round(w.exact(i, j) * 64.0), T.int32) * 37, dtype)
        b[i, j] = T.cast((w.m * 13 + i * 3 + j * 5) % 7 + 1, dtype)
    negative = dtype != "uint8" and rng.random() < 0.5
    kinds: list[Callable[[Value, Value], Value]] = [
        lambda x, y: x >> y, lambda x, y: x << y, lambda x, y: x // (-y if negative else y), lambda x, y: x & ~y,
        lambda x, y: x % (-y if negative else y), lambda x, y: x * y + x, lambda x, y: x ^ (y - x), lambda x, y: -x | y,
        lambda x, y: T.max(T.min(x, y), y - x), lambda x, y: T.if_then_else((x < y) | (x == -y), y, x),
        lambda x, y: T.cast(T.cast(x, T.int64) * 3, dtype), lambda x, y: T.abs(x) - y,
    ]  # fmt: skip
    first, second = (kinds[int(rng.integers(len(kinds)))] for _ in range(2))
    for i, j in T.Parallel(w.bm, w.bn):
        a[i, j] = second(first(a[i, j], b[i, j]), b[i, j])
    if rng.random() < 0.5:
        total = T.alloc_fragment((w.bm,), dtype)
        T.reduce(a, total, str(rng.choice(["sum", "max", "min", "bitand", "bitor", "bitxor", "prod"])), dim=1)
        for i, j in T.Parallel(w.bm, w.bn):
            a[i, j] = total[i] ^ a[i, j]
    result = w.tile()
    for i, j in T.Parallel(w.bm, w.bn):
        result[i, j] = T.cast(a[i, j] & 31, T.float32) * 0.03125
    w.tiles.append(result)


def other_type(w: Writer) -> None:
    """A reduction whose result has another type than what is reduced, wider or narrower, begun from 0 or not."""
    rng, pairs = (
        w.rng,
        (("int8", "int32"), ("int32", "int8"), ("int16", "int64"), ("float16", "float32"), ("float32", "float64")),
    )
    given, made = pairs[int(rng.integers(len(pairs)))]
    tile, axis = T.alloc_fragment((w.bm, w.bn), given), int(rng.integers(2))
    result, seen = T.alloc_fragment((w.bm if axis else w.bn,), made), T.alloc_fragment((w.bm, w.bn), made)
    for i, j in T.Parallel(w.bm, w.bn):
        number = T.cast(w.m * 5 + i * 37 + j * 101, T.int32)
        tile[i, j] = T.cast(number * 64, given) if given.startswith("int") else whole(w, i, j, given)
    T.fill(result, 3)
    op = str(rng.choice(["sum", "max", "min", "absmax", "abssum"]))
    getattr(T, f"reduce_{op}")(tile, result, dim=axis, clear=bool(rng.random() < 0.5))
    for i, j in T.Parallel(w.bm, w.bn):
        seen[i, j] = result[i] if axis else result[j]
    shrunk(w, seen)


def steps_of_floats(w: Writer) -> None:
    """Functions of floats that jump, where the data are multiples of 1/8, halves and signed zeros among them."""
    rng, result = w.rng, w.tile()
    kinds = [T.floor, T.ceil, T.round, T.sign, lambda x: T.if_then_else(T.isfinite(x / x), x, 0.5), T.abs,
             lambda x: T.reinterpret(T.reinterpret(x, T.int32) & 0x7FFFFFFF, T.float32),
             lambda x: T.cast(T.cast(x, T.int8), T.float32), lambda x: T.if_then_else(x == 0, 1.0 / x, x) * 0.0 + x,
             lambda x: T.cast(x != 0.0, T.float32)]  # fmt: skip
    kind = kinds[int(rng.integers(len(kinds)))]
    for i, j in T.Parallel(w.bm, w.bn):
        value = T.clamp(T.round(w.exact(i, j) * 2.0) * 0.5, -100.0, 100.0)
        result[i, j] = T.clamp(T.if_then_else(T.isnan(kind(value)), -1.0, kind(value)), -8.0, 8.0) * 0.125
    w.tiles.append(result)


def cells(w: Writer) -> None:
    """One element that loops and branches on data assign."""
    rng, source, result = w.rng, w.pick(w.tiles), w.tile()
    held, count = T.alloc_var("float32"), T.alloc_var("int32")
    T.copy(source, result)
    held[0], count[0] = 0.5, 0
    step = int(rng.integers(1, 3))
    for i in T.serial(0, w.bm, step):
        with T.If(source[i, 0] > held[0]):
            held[0] = T.tanh(source[i, 0])
            count[0] = count[0] + 1
        with T.Else():
            count[0] = count[0] * 2 + 1
    with T.While(count[0] > 3):
        count[0] = count[0] // 2
    for j in T.vectorized(w.bn):
        result[count[0] % w.bm, j] = held[0]
    w.tiles.append(result)


def moved_parts(w: Writer) -> None:
    """Slices that begin where the run says, partly outside of their tile, and rows cleared."""
    rng, source, result = w.rng, w.pick(w.tiles), w.tile()
    T.fill(result, 0.25)
    size = int(rng.integers(1, w.bm + 1))
    held = T.alloc_local((2,), "int64")
    for place in range(2):
        held[place] = T.cast(T.round(w.exact(place, 0)), T.int64) % (w.bm + 2)
    first, second = held[0], held[1] - 1
    T.copy(source[first : first + size, :], result[second : second + size, :])
    T.clear(result[int(rng.integers(w.bm)), 0 : w.bn])
    w.tiles.append(result)


def parts_changed(w: Writer) -> None:
    """Elements of a part of a tile, and the numbers of a part of its rows, beside statements on all of them."""
    rng, tile, total = w.rng, w.pick(w.tiles), T.alloc_fragment((w.bm,), T.float32)
    T.reduce(tile, total, str(rng.choice(["sum", "max", "min"])), dim=1)
    for _ in range(int(rng.integers(1, 4))):
        high, wide = (int(rng.integers(1, size + 1)) for size in (w.bm, w.bn))
        if rng.random() < 0.5:
            high, wide = (w.bm, wide) if rng.random() < 0.5 else (high, w.bn)
        if rng.random() < 0.4:
            for i in T.Parallel(high):
                total[i] = T.tanh(total[i] * 0.25)
        for i, j in T.Parallel(high, wide):
            tile[i, j] = T.tanh(tile[i, j]) + T.tanh(total[i]) * 0.25
    w.rows.append(total)


def checked(w: Writer) -> None:
    """Assertions that hold, in the open and under a condition."""
    source = w.pick(w.tiles)
    T.device_assert((source[0, 0] < 1e30) | T.isnan(source[0, 0]), "far too large")
    with T.If(w.m > 0):
        T.device_assert(w.m * w.bm >= w.bm, "no block before this one")


def dealt(w: Writer) -> None:
    """Points dealt out to turns, each of which changes one row."""
    tile, turns = w.pick(w.tiles), int(w.rng.integers(1, 4))
    for t in T.serial(turns):
        for x, y in T.Persistent([w.bm, 2], turns, t):
            for j in T.Parallel(w.bn):
                tile[x, j] = T.tanh(tile[x, j] * 0.5) + T.cast(y, T.float32) * 0.25


def whole_rows(w: Writer) -> None:
    """A tile as wide as the data are deep, which only the run may say: reduced, multiplied with itself, walked."""
    rng, deep, result = w.rng, w.A.shape[1], w.tile()
    a, c, total = T.alloc_shared((w.bm, deep), T.float32), T.alloc_fragment((w.bm, w.bm), T.float32), None
    T.copy(w.A[w.m * w.bm, 0], a)
    T.gemm(a, a, c, transpose_B=True, clear_accum=True)
    total = T.alloc_fragment((w.bm,), T.float32)
    if rng.random() < 0.5:
        T.fill(total, -1.0)
        T.reduce(a, total, str(rng.choice(["max", "sum"])), dim=1, clear=False)
    else:
        T.clear(total)
        for k in T.serial(deep):
            for i in T.Parallel(w.bm):
                total[i] = total[i] * 0.5 + a[i, k]
    for i, j in T.Parallel(w.bm, w.bn):
        result[i, j] = T.tanh(c[i, j % w.bm] * 0.125) + T.tanh(total[i]) * 0.5
    w.tiles.append(result)


def along_rows(w: Writer) -> None:
    """Stores whose vectors run along an axis that is asked for, and a tile that lies in rows."""
    source, result, axis = w.pick(w.tiles), T.alloc_shared((w.bm, w.bn), T.float32), int(w.rng.integers(2))
    T.annotate_layout({result: T.rows()})
    for i, j in T.Parallel(w.bm, w.bn, vector_axis=axis):
        result[i, j] = T.tanh(source[i, j]) * 0.75 + T.cast(i * 2 + j, T.float32) * 0.015625
    w.tiles.append(result)


def doubles(w: Writer) -> None:
    """Float64 arithmetic and reductions."""
    rng, source = w.rng, w.pick(w.tiles)
    wide, total = T.alloc_fragment((w.bm, w.bn), "float64"), T.alloc_fragment((w.bm,), "float64")
    axis = int(rng.integers(2))
    for i, j in T.Parallel(w.bm, w.bn):
        x = T.cast(source[i, j], T.float64)
        wide[i, j] = T.tanh(x) + T.exp(-T.abs(x)) * T.sin(x)
    column = T.alloc_fragment((w.bn,), "float64")
    target = column if axis == 0 else total
    T.reduce(wide, target, str(rng.choice(["sum", "max", "min"])), dim=axis)
    for i, j in T.Parallel(w.bm, w.bn):
        wide[i, j] = wide[i, j] * 4.0 + T.tanh(column[j] if axis == 0 else total[i])
    shrunk(w, wide)


def levels_tile(w: Writer) -> None:
    """Packed levels copied to a tile of bytes, past the end of the data too."""
    dtype = "int8" if w.Q.dtype is T.int8 else "uint8"
    held = T.alloc_shared((w.bm, w.bn), dtype)
    T.copy(w.Q[w.m * w.bm, w.n * w.bn], held)
    shrunk(w, held)


def parts_as_operands(w: Writer) -> None:
    """Slices of a tile of three axes as operands and results of statements on whole tiles, and rows over each other."""
    rng, deep, source, result = w.rng, int(w.rng.integers(1, 4)), w.pick(w.tiles), w.tile()
    kind = str(rng.choice(["float32", "float16", "bfloat16"]))
    stack, total = T.alloc_shared((deep, w.bm, w.bn), T.float32), T.alloc_fragment((w.bm, w.bm), kind)
    for s in T.serial(deep):
        for i, j in T.Parallel(w.bm, w.bn):
            stack[s, i, j] = T.tanh(source[i, j]) + T.cast(s, T.float32) * 0.25
    first, last = int(rng.integers(deep)), int(rng.integers(deep))
    T.cumsum(stack[first, :, :], dim=int(rng.integers(2)), reverse=bool(rng.random() < 0.5))
    if w.bm > 1:
        down = int(rng.integers(1, w.bm))
        T.copy(stack[last, : w.bm - down, :], stack[last, down:, :])
    narrow = T.alloc_shared((deep, w.bm, w.bn), kind)
    for s, i, j in T.Parallel(deep, w.bm, w.bn):  # whole numbers: 16-bit sums of them are exact
        narrow[s, i, j] = whole(w, i + s, j, kind)
    T.fill(total, 1)
    for s in T.Pipelined(deep):
        T.gemm(narrow[s, :, :], narrow[deep - 1 - s, :, :], total, transpose_B=True)
    row = T.alloc_fragment((w.bm,), T.float32)
    T.reduce(stack[last, :, :], row, str(rng.choice(["sum", "max"])), dim=1)
    for i, j in T.Parallel(w.bm, w.bn):
        x = T.cast(total[i, j % w.bm], T.float32) * 0.03125
        result[i, j] = T.tanh(x) + T.tanh(stack[first, i, j] * 0.25) * 0.5 + T.tanh(row[i] * 0.125)
    w.tiles.append(result)


def joined_flags(w: Writer) -> None:
    """Reductions of bools, along either axis, begun from what is there or not."""
    rng, source, axis = w.rng, w.pick(w.tiles), int(w.rng.integers(2))
    held, result, tile = (
        T.alloc_shared((w.bm, w.bn), "bool"),
        T.alloc_fragment((w.bm if axis else w.bn,), "bool"),
        w.tile(),
    )
    for i, j in T.Parallel(w.bm, w.bn):
        held[i, j] = w.exact(i, j) > 0.5 * ((i + j) % 3) - 0.5
    T.fill(result, bool(rng.random() < 0.5))
    kind = str(rng.choice(["max", "min", "bitand", "bitor", "bitxor"]))
    T.reduce(held, result, kind, dim=axis, clear=bool(rng.random() < 0.5))
    if rng.random() < 0.5:
        T.cummax(held, dim=int(rng.integers(2)), reverse=bool(rng.random() < 0.5))
    for i, j in T.Parallel(w.bm, w.bn):
        tile[i, j] = T.if_then_else(result[i if axis else j] ^ held[i, j], source[i, j], 0.5)
    w.tiles.append(tile)


def scattered(w: Writer) -> None:
    """Rows that go where a tile of numbers says, each somewhere else."""
    source, result, place = w.pick(w.tiles), w.tile(), T.alloc_local((w.bm,), "int64")
    steps = [step for step in range(1, w.bm + 1) if math.gcd(step, w.bm) == 1]
    step, shift = int(w.rng.choice(steps)), int(w.rng.integers(w.bm))
    for i in T.Parallel(w.bm):
        place[i] = (i * step + shift + w.m) % w.bm
    for i, j in T.Parallel(w.bm, w.bn):
        result[place[i] % w.bm, j] = T.tanh(source[i, j]) + T.cast(i, T.float32) * 0.015625
    w.tiles.append(result)


def flags(w: Writer) -> None:
    """A tile of bools joined by logic and turned."""
    source, turned = w.pick(w.tiles), T.alloc_fragment((w.bn, w.bm), "bool")
    held = T.alloc_shared((w.bm, w.bn), "bool")
    for i, j in T.Parallel(w.bm, w.bn):
        held[i, j] = (w.exact(i, j) > 0.0) ^ ((w.m + i) % 2 == 0)
    T.transpose(held, turned)
    result = w.tile()
    for i, j in T.Parallel(w.bm, w.bn):
        result[i, j] = T.if_then_else(~turned[j, i] & (held[i, 0] == held[0, j]), source[i, j], 0.5)
    w.tiles.append(result)


MOVES: tuple[Move, ...] = (
    typed_product, typed_product, three_axes, other_type, integers, integers, steps_of_floats, cells, moved_parts,
    parts_changed, parts_changed, checked, dealt,
    whole_rows, along_rows, doubles, levels_tile, flags, joined_flags, scattered, parts_as_operands, parts_as_operands,
)  # fmt: skip
