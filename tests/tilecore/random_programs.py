"""Random tile programs: every statement of the language over tiles that data do not fill, put together by a seed.

What a program computes is bounded and smooth, so that float32 and float64 agree to rounding: a difference is a fault.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from random_moves import MOVES

from tilecore import language as T
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Sym, const
from tilecore.contract.spec import Tensor
from tilecore.ir import Program, updated_tensors
from tilecore.language import Handle, Value
from tilecore.trace import trace

SIZES = (0, 1, 1, 2, 3, 5, 7, 8, 11, 16, 17, 19, 33)
BLOCKS = (1, 3, 4, 5, 8, 16, 24)
UPDATED = (DType.F32, DType.F64, DType.I32, DType.I64, DType.I16, DType.I8)
Rng = np.random.Generator


@dataclass(frozen=True)
class RandomProgram:
    """A program, and arrays for its inputs."""

    seed: int
    program: Program
    arrays: dict[str, np.ndarray]


def random_program(seed: int) -> RandomProgram:
    """The program of `seed`. TileError and the like where the language refuses it."""
    rng = np.random.default_rng(seed)
    rows, columns, depth = (int(rng.choice(SIZES)) for _ in range(3))
    symbolic = [bool(rng.random() < 0.4) for _ in range(3)]
    names = ("M", "N", "K")
    m, n, k = (Sym(s) if s_ else const(v) for s, s_, v in zip(names, symbolic, (rows, columns, depth), strict=True))
    turned = bool(rng.random() < 0.5)
    shapes: dict[str, tuple[Expr, ...]] = {
        "X": (m, n), "A": (m, k), "B": (n, k) if turned else (k, n), "R": (n, n), "bias": (n,), "keep": (m, n),
        "Y": (m, n), "Z": (m,), "W": (n,),
    }  # fmt: skip
    kinds = {
        "keep": DType.BOOL,
        "X": DType.F16 if rng.random() < 0.2 else DType.F32,
        "W": UPDATED[int(rng.integers(len(UPDATED)))],
    }
    operands = {name: Tensor(name, kinds.get(name, DType.F32), shape) for name, shape in shapes.items()}
    levels = (int(rng.choice(SIZES)), 2 * int(rng.choice(SIZES)))
    packed = str(rng.choice(["int4", "uint4"]))

    def kernel(
        X: Handle, A: Handle, B: Handle, R: Handle, bias: Handle, keep: Handle, Y: Handle, Z: Handle, W: Handle,
        Q: T.Tensor(levels, packed),  # type: ignore[valid-type]
    ) -> None:  # fmt: skip
        _Writer(rng, X, A, B, R, bias, keep, W, Q, turned=turned).write(Y, Z)

    program = trace(kernel, operands=operands)
    sizes = {"M": rows, "N": columns, "K": depth}
    arrays: dict[str, np.ndarray] = {}
    for tensor in (*program.inputs, *updated_tensors(program)):
        shape = tuple(sizes[d.name] if isinstance(d, Sym) else int(str(d)) for d in tensor.shape)
        arrays[tensor.name] = _values(rng, tensor.dtype, shape)
    return RandomProgram(seed, program, arrays)


def _values(rng: Rng, dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    if dtype is DType.U8:  # pairs of 4-bit integers
        return rng.integers(0, 256, shape).astype(np.uint8)
    values = rng.standard_normal(shape)
    return values > 0 if dtype is DType.BOOL else (values * 4 if dtype.is_int else values).astype(dtype.row.numpy)


@dataclass
class _Writer:
    """Writes the body of one kernel: keeps the tiles that hold something by now."""

    rng: Rng
    X: Handle
    A: Handle
    B: Handle
    R: Handle
    bias: Handle
    keep: Handle
    W: Handle
    Q: Handle
    turned: bool
    tiles: list[Handle] = field(default_factory=list[Handle])
    rows: list[Handle] = field(default_factory=list[Handle])
    m: Any = None
    n: Any = None
    bm: int = 0
    bn: int = 0
    joining: str = "add"  # one kind for all tasks: sums and maxima of one element do not commute

    def write(self, Y: Handle, Z: Handle) -> None:
        """A grid over blocks of rows, or of rows and columns; some statements; one or two outputs."""
        rng, (rows, columns) = self.rng, self.X.shape
        self.bm = int(rng.choice(BLOCKS))
        whole = isinstance(columns, int) and rng.random() < 0.5
        self.bn = max(1, int(columns)) if whole and isinstance(columns, int) else int(rng.choice(BLOCKS))
        steps, self.joining = rng.integers(2, 8), str(rng.choice(["add", "max", "min"]))
        with T.Kernel(T.ceildiv(rows, self.bm), T.ceildiv(columns, self.bn)) as (m, n):
            self.m, self.n = m, n
            self.load()
            moves: list[Callable[[], None]] = [
                self.load, self.compute, self.compute, self.update, self.reduce, self.reduce, self.row, self.product,
                self.second_product, self.branch, self.loop, self.whole_numbers, self.narrow, self.running,
                self.seen_otherwise, self.columns, self.turns, self.row_by_row, self.branches, self.update_output,
                self.update_output, self.four_bits, self.levels_product, self.parts, self.truth, self.reducer,
                *(functools.partial(move, self) for move in MOVES),
            ]  # fmt: skip
            for _ in range(steps):
                moves[int(rng.integers(len(moves)))]()
            value = self.pick(self.tiles)
            if rng.random() < 0.3:
                T.copy(value, Y[m * self.bm, n * self.bn])
            else:
                for i, j in T.Parallel(self.bm, self.bn):
                    Y[m * self.bm + i, n * self.bn + j] = self.expression(i, j) + value[i, j]
            total = self.reduced(value, "sum") if whole or not self.rows else self.pick(self.rows)
            with T.If(n == 0):
                for i in T.Parallel(self.bm):
                    Z[m * self.bm + i] = total[i]

    def pick(self, handles: list[Handle]) -> Handle:
        return handles[int(self.rng.integers(len(handles)))]

    def tile(self) -> Handle:
        scope = T.alloc_shared if self.rng.random() < 0.3 else T.alloc_fragment
        return scope((self.bm, self.bn), T.float32)

    def load(self) -> None:
        tile = self.tile()
        T.copy(self.X[self.m * self.bm, self.n * self.bn], tile)
        self.tiles.append(tile)

    def compute(self) -> None:
        tile = self.tile()
        for i, j in T.Parallel(self.bm, self.bn):
            tile[i, j] = self.expression(i, j)
        self.tiles.append(tile)

    def update(self) -> None:
        tile = self.pick(self.tiles)
        for i, j in T.Parallel(self.bm, self.bn):
            tile[i, j] = T.tanh(tile[i, j] * 0.5) + self.expression(i, j) * 0.25

    def reduce(self) -> None:
        self.rows.append(self.reduced(self.pick(self.tiles), str(self.rng.choice(["sum", "max", "min"]))))

    def reduced(self, tile: Handle, kind: str) -> Handle:
        result = T.alloc_fragment((self.bm,), T.float32)
        if self.rng.random() < 0.3:
            T.fill(result, 0.5)
            T.reduce(tile, result, kind, dim=1, clear=False)
        else:
            T.reduce(tile, result, kind, dim=1)
        return result

    def row(self) -> None:
        result = T.alloc_fragment((self.bm,), T.float32)
        source = self.pick(self.rows) if self.rows else None
        for i in T.Parallel(self.bm):
            value = T.sigmoid(source[i]) if source is not None else T.cast(self.m * self.bm + i, T.float32) * 0.01
            result[i] = value * 0.5 + 0.25
        self.rows.append(result)

    def product(self) -> None:
        bk = int(self.rng.choice(BLOCKS))
        a, c = T.alloc_shared((self.bm, bk), T.float32), T.alloc_fragment((self.bm, self.bn), T.float32)
        b = T.alloc_shared((self.bn, bk) if self.turned else (bk, self.bn), T.float32)
        T.clear(c)
        for k in T.Pipelined(T.ceildiv(self.A.shape[1], bk)):
            T.copy(self.A[self.m * self.bm, k * bk], a)
            T.copy(self.B[self.n * self.bn, k * bk] if self.turned else self.B[k * bk, self.n * self.bn], b)
            T.gemm(a, b, c, transpose_B=self.turned)
        self.tiles.append(c)

    def second_product(self) -> None:
        left, b = self.pick(self.tiles), T.alloc_shared((self.bn, self.bn), T.float32)
        c, small = T.alloc_fragment((self.bm, self.bn), T.float32), T.alloc_shared((self.bm, self.bn), T.float32)
        for i, j in T.Parallel(self.bm, self.bn):
            small[i, j] = T.tanh(left[i, j])
        T.copy(self.R[self.n * self.bn, self.n * self.bn], b)
        T.gemm(small, b, c, transpose_B=bool(self.rng.random() < 0.5), clear=True)
        self.tiles.append(c)

    def branch(self) -> None:
        tile, bound = self.pick(self.tiles), int(self.rng.integers(3))
        with T.If(self.m == bound):
            for i, j in T.Parallel(self.bm, self.bn):
                tile[i, j] = tile[i, j] * 0.5 + self.expression(i, j) * 0.5
        if self.rng.random() < 0.5:
            with T.Else():
                for i, j in T.Parallel(self.bm, self.bn):
                    tile[i, j] = T.abs(tile[i, j])

    def loop(self) -> None:
        tile, count = self.pick(self.tiles), int(self.rng.integers(1, 4))
        stop = count if self.rng.random() < 0.5 else T.min(self.m + 1, count)
        for s in (T.unroll if isinstance(stop, int) and self.rng.random() < 0.3 else T.serial)(0, stop):
            for i, j in T.Parallel(self.bm, self.bn):
                tile[i, j] = tile[i, j] * 0.5 + T.cast(s, T.float32) * 0.125

    def whole_numbers(self) -> None:
        """Integers that are exact on both sides, through operators on bits and a tile of their type."""
        rng, dtype = self.rng, str(self.rng.choice(["int8", "int16", "int32", "int64", "uint8"]))
        numbers, tile = T.alloc_fragment((self.bm, self.bn), dtype), self.tile()
        shift, kind = int(rng.integers(1, 3)), int(rng.integers(5))
        for i, j in T.Parallel(self.bm, self.bn):
            v = T.cast(T.round(self.exact(i, j)), T.int32)
            v = [v * 3 + 1, (v << shift) ^ 5, (v >> shift) | 2, (v + 7) % 5, (v - 3) // 4][kind]
            numbers[i, j] = T.cast(T.abs(v) if dtype == "uint8" else v, dtype)
        if rng.random() < 0.5:
            total = T.alloc_fragment((self.bm,), "int32")
            wide = T.alloc_fragment((self.bm, self.bn), "int32")
            T.copy(numbers, wide)
            T.reduce(wide, total, str(rng.choice(["sum", "max", "bitxor", "bitor"])), dim=1)
            for i, j in T.Parallel(self.bm, self.bn):
                tile[i, j] = T.cast(total[i] % 16, T.float32) * 0.0625
        else:
            for i, j in T.Parallel(self.bm, self.bn):
                tile[i, j] = T.cast(numbers[i, j], T.float32) * 0.03125
        self.tiles.append(tile)

    def narrow(self) -> None:
        """A tile of 16-bit floats that hold whole numbers."""
        small, tile = T.alloc_shared((self.bm, self.bn), str(self.rng.choice(["float16", "bfloat16"]))), self.tile()
        for i, j in T.Parallel(self.bm, self.bn):
            small[i, j] = T.round(self.exact(i, j)) + 1.0
        for i, j in T.Parallel(self.bm, self.bn):
            small[i, j] = T.max(small[i, j], 0.0) * 2.0
        if self.rng.random() < 0.5:
            T.copy(small, tile)
        else:
            for i, j in T.Parallel(self.bm, self.bn):
                tile[i, j] = T.cast(small[i, j], T.float32) * 0.0625
        self.tiles.append(tile)

    def exact(self, i: Any, j: Any) -> Value:
        """A value of the data without an error of rounding."""
        return T.cast(self.X[self.m * self.bm + i, self.n * self.bn + j], T.float32) * 4.0

    def running(self) -> None:
        rng, result = self.rng, self.tile()
        (T.cumsum if rng.random() < 0.6 else T.cummax)(
            self.pick(self.tiles), result, dim=int(rng.integers(2)), reverse=bool(rng.random() < 0.5)
        )
        for i, j in T.Parallel(self.bm, self.bn):
            result[i, j] = T.tanh(result[i, j] * 0.125)
        self.tiles.append(result)

    def seen_otherwise(self) -> None:
        source, tile, turned = self.pick(self.tiles), self.tile(), bool(self.rng.random() < 0.5)
        flat = T.reshape(source, (self.bn, self.bm) if turned else (self.bm * self.bn,))
        bits = T.view(source, dtype="int32")
        for i, j in T.Parallel(self.bm, self.bn):
            place = i * self.bn + j
            other = flat[place // self.bm, place % self.bm] if turned else flat[place]
            tile[i, j] = other * 0.5 + T.reinterpret(bits[i, j], T.float32) * 0.25
        self.tiles.append(tile)

    def columns(self) -> None:
        source, tile, column = self.pick(self.tiles), self.tile(), T.alloc_fragment((self.bn,), T.float32)
        T.reduce(source, column, str(self.rng.choice(["sum", "max", "min"])), dim=0)
        for i, j in T.Parallel(self.bm, self.bn):
            tile[i, j] = T.tanh(column[j] * 0.25) + source[i, j] * 0.5
        self.tiles.append(tile)

    def turns(self) -> None:
        tile, count = self.pick(self.tiles), T.alloc_local((1,), "int32")
        count[0] = T.cast(self.m % 3, T.int32)
        with T.While(count[0] < int(self.rng.integers(1, 5))):
            for i, j in T.Parallel(self.bm, self.bn):
                tile[i, j] = tile[i, j] * 0.5 + T.cast(count[0], T.float32) * 0.125
            count[0] = count[0] + 1

    def row_by_row(self) -> None:
        source, result = self.pick(self.tiles), T.alloc_fragment((self.bm,), T.float32)
        for i in T.Parallel(self.bm):
            result[i] = 0.25
            for j in T.serial(int(self.rng.integers(2)), self.bn):
                with T.If(source[i, j] > 0):
                    result[i] = result[i] * 0.5 + source[i, j] * 0.25
            result[i] = T.tanh(result[i])
        self.rows.append(result)

    def branches(self) -> None:
        tile, deep = self.pick(self.tiles), bool(self.rng.random() < 0.5)
        with T.If(self.m % 2 == 0):
            with T.If(self.n > 0):
                self.scale(tile, 0.5)
            if deep:
                with T.Else():
                    for s in T.serial(T.min(self.n + 2, 3)):
                        self.scale(tile, 0.75)
                        with T.If(s == 1):
                            self.scale(tile, -1.0)

    def update_output(self) -> None:
        """Elements, neighbours or a row of an output that other tasks, other turns and other points join with, too."""
        rng, source = self.rng, self.pick(self.tiles)
        join = {"add": T.atomic_add, "max": T.atomic_max, "min": T.atomic_min}[self.joining]
        match int(rng.integers(5)):
            case 0:  # every row of the block meets in one element
                for i, j in T.Parallel(self.bm, self.bn):
                    join(self.W[self.n * self.bn + j], self.counted(source[i, j], i, j))
            case 1:
                column = T.alloc_fragment((self.bn,), self.W.dtype)
                for j in T.Parallel(self.bn):
                    column[j] = self.counted(source[0, j], 0, j)
                join(self.W[self.n * self.bn : self.n * self.bn + self.bn], column)
            case 2:  # places that data choose
                for i, j in T.Parallel(self.bm, self.bn):
                    place = T.cast(T.abs(self.exact(i, j)), T.int64) % 7
                    with T.If(self.keep[self.m * self.bm + i, self.n * self.bn + j]):
                        join(self.W[place], self.counted(source[i, j], i, j))
            case 3:
                for s in T.serial(T.min(self.m + 1, 3)):
                    with T.If(self.n % 2 == 0):
                        join(self.W[s * 2], self.counted(source[0, 0], s, 0))
            case _:
                row = T.alloc_fragment((self.bm, 4), self.W.dtype)
                for i, j in T.Parallel(self.bm, 4):
                    row[i, j] = self.counted(source[i, 0], i, j)
                for i in T.Parallel(self.bm):
                    if self.joining == "add":
                        T.atomic_addx4(self.W[self.n + i], row[i, 0])
                    else:
                        join(self.W[self.n + i], row[i, 3])

    def counted(self, value: Value, i: Any, j: Any) -> Value:
        """`value`, or a whole number of the point, in the type of W."""
        whole = (self.m * self.bm + i) * 3 - (self.n * self.bn + j)
        return T.cast(whole % 11 - 5, self.W.dtype) if self.W.dtype.is_int else T.cast(T.tanh(value), self.W.dtype)

    def four_bits(self) -> None:
        """Packed 4-bit integers read element by element, and numbers cut to four bits."""
        tile, cut = self.tile(), str(self.rng.choice(["int4", "uint4"]))
        for i, j in T.Parallel(self.bm, self.bn):
            level = T.cast(self.Q[self.m * self.bm + i, self.n * self.bn + j], T.int32)
            number = T.cast(T.round(self.exact(i, j)), T.int32) + level
            tile[i, j] = T.cast(level, T.float32) * 0.125 + T.cast(T.cast(number, cut), T.float32) * 0.0625
        self.tiles.append(tile)

    def levels_product(self) -> None:
        """A product whose right side is unpacked from 4-bit integers: scaled floats, or whole numbers."""
        whole, bk = bool(self.rng.random() < 0.4), int(self.rng.choice(BLOCKS))
        kind, total = (T.int8, T.int32) if whole else (T.float32, T.float32)
        a, b = T.alloc_shared((self.bm, bk), kind), T.alloc_shared((self.bn, bk), kind)
        c, tile = T.alloc_fragment((self.bm, self.bn), total), self.tile()
        T.clear(c)
        for k in T.Pipelined(T.ceildiv(self.Q.shape[1], bk)):
            for i, j in T.Parallel(self.bm, bk):
                number = T.cast((self.m + i * 3 + k * bk + j) % 9 - 4, kind)
                a[i, j] = number if whole else number * 0.125
            for i, j in T.Parallel(self.bn, bk):
                level = T.cast(self.Q[self.n * self.bn + i, k * bk + j], kind)
                b[i, j] = level if whole else level * 0.125
            T.gemm(a, b, c, transpose_B=True)
        for i, j in T.Parallel(self.bm, self.bn):
            tile[i, j] = T.tanh(T.cast(c[i, j], T.float32) * 0.0625)
        self.tiles.append(tile)

    def parts(self) -> None:
        """A slice of a tile filled, another copied, and the transposed tile."""
        source, tile, turned = self.pick(self.tiles), self.tile(), T.alloc_fragment((self.bn, self.bm), T.float32)
        cut = int(self.rng.integers(self.bm))
        T.copy(source, tile)
        T.fill(tile[cut : cut + 1, :], 0.25)
        T.copy(source[cut : self.bm, :], tile[0 : self.bm - cut, :])
        T.transpose(tile, turned)
        result = self.tile()
        for i, j in T.Parallel(self.bm, self.bn):
            result[i, j] = turned[j, i] * 0.5 + T.ldexp(tile[i, j], T.cast(j % 3, T.int32) - 2)
        self.tiles.append(result)

    def truth(self) -> None:
        """A tile of flags, and whether any or all of them are set."""
        flags, tile = T.alloc_fragment((self.bm, self.bn), T.bool), self.pick(self.tiles)
        for i, j in T.Parallel(self.bm, self.bn):
            flags[i, j] = (self.exact(i, j) > 1.0) | self.keep[self.m * self.bm + i, self.n * self.bn + j]
        found = (T.any_of if self.rng.random() < 0.5 else T.all_of)(flags)
        with T.If(found):
            self.scale(tile, 0.5)
        for i, j in T.Parallel(self.bm, self.bn):
            tile[i, j] = T.if_then_else(flags[i, j], tile[i, j], T.clamp(tile[i, j], -0.5, 0.5))

    def reducer(self) -> None:
        kind, source = str(self.rng.choice(["sum", "max", "min"])), self.pick(self.tiles)
        result = T.alloc_reducer((self.bm,), T.float32, op=kind)
        T.fill(result, 0.25)
        for i, j in T.Parallel(self.bm, self.bn):
            value = T.tanh(source[i, j]) * 0.5
            result[i] = {"sum": lambda a, b: a + b, "max": T.max, "min": T.min}[kind](result[i], value)
        T.finalize_reducer(result)
        self.rows.append(result)

    def scale(self, tile: Handle, factor: float) -> None:
        for i, j in T.Parallel(self.bm, self.bn):
            tile[i, j] = tile[i, j] * factor

    def expression(self, i: Value, j: Value, level: int = 0) -> Value:
        """A random smooth value over one element of the block."""
        rng, r, c = self.rng, self.m * self.bm + i, self.n * self.bn + j
        leaves = [
            lambda: self.pick(self.tiles)[i, j],
            lambda: self.X[r, c] * 1.0 if self.X.dtype is DType.F32 else T.cast(self.X[r, c], T.float32),
            lambda: self.bias[c] * 0.5,
            lambda: (self.pick(self.rows) if self.rows else self.pick(self.tiles))[(i,) if self.rows else (i, j)],
            lambda: T.if_then_else(self.keep[r, c], 0.75, -0.25),
            lambda: T.cast(r - c, T.float32) * 0.0625,
        ]
        if level >= 3 or rng.random() < 0.3:
            return leaves[int(rng.integers(len(leaves)))]()
        one = self.expression(i, j, level + 1)
        match int(rng.integers(10)):
            case 0:
                return T.tanh(one)
            case 1:
                return T.sigmoid(one)
            case 2:
                return T.abs(one)
            case 3:
                return T.exp(T.min(one, 0.0))
            case 4:
                return one / (T.abs(self.expression(i, j, level + 1)) + 1.0)
            case 5:
                return T.if_then_else(c <= r, one, self.expression(i, j, level + 1))
            case 6:
                return T.max(one, self.expression(i, j, level + 1))
            case 7:
                return one - self.expression(i, j, level + 1) * 0.5
            case 8:
                return T.tanh(one) * self.expression(i, j, level + 1)
            case _:
                return one + self.expression(i, j, level + 1)
