"""The tile language, imported as `T`: what the text of a kernel may use.

A kernel is an ordinary function run once by `tilecore.trace.trace`; these functions append statements to the program
being traced, or build scalar expressions. Loops over `T.Parallel` are elementwise; everything else works on whole
tiles.
"""

import builtins
import dataclasses
import math
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NoReturn, Self

from tilecore import ir
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Sym, Var
from tilecore.errors import TileError, user_frame, user_span
from tilecore.span import Span, span_of_frame
from tilecore.trace import AUTO, Handle, Scope, TensorType, allocate, current, names_assigned, tiles_of
from tilecore.value import Operand, Value, assigned, choose, convert, described, extent, index, lift, operate

auto = AUTO
Flag = builtins.bool  # T.bool is a dtype
infinity = math.inf  # a Python number: it takes the float type of what it meets


class Kernel:
    """The grid: `with T.Kernel(x, y) as (i, j):` runs its body for every point, in any order and in parallel."""

    def __init__(self, *extents: Operand, threads: int | None = None) -> None:
        self.tracer = current("T.Kernel")
        if not extents:
            _fail("T.Kernel needs at least one extent", "T.Kernel(1) for a single task")
        if self.tracer.grid is not None:
            _fail("a second T.Kernel in one kernel", "one T.Kernel per function; trace two functions")
        self.extents = [extent(size) for size in extents]
        self.threads = threads
        self.scope: Scope | None = None

    def __enter__(self) -> Any:
        frame = user_frame()
        names = names_assigned(frame, len(self.extents), "task")
        axes = [Var(self.tracer.unique(name), extent=size) for name, size in zip(names, self.extents, strict=True)]
        self.tracer.grid = tuple(axes)
        self.tracer.threads = self.threads
        self.scope = self.tracer.open("kernel", span_of_frame(frame))
        values = tuple(Value(axis) for axis in axes)
        return values[0] if len(values) == 1 else values

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self.scope is not None:
            self.tracer.body = self.tracer.close(self.scope)


def alloc_shared(shape: Any, dtype: "DType | str") -> Handle:
    """A tile of data staged for reuse by the whole task."""
    return allocate(shape, dtype_of(dtype), "shared")


def alloc_fragment(shape: Any, dtype: "DType | str") -> Handle:
    """A tile of accumulators or row statistics, kept in registers where it fits."""
    return allocate(shape, dtype_of(dtype), "fragment")


def copy(src: Any, dst: Any) -> None:
    """`dst` = `src`, cast to the type of `dst`. A side is a buffer, an operand at the tile's origin, or a slice."""
    source, target = tiles_of(src, dst)
    current("T.copy").emit(ir.Copy(source, target, user_span()), writes=target.source)


def gemm(
    a: Handle, b: Handle, c: Handle, *, transpose_A: Flag = False, transpose_B: Flag = False, clear: Flag = False
) -> None:
    """`c` += `a` · `b`; `clear` overwrites `c`."""
    left, right, total = (_buffer(tile, "T.gemm") for tile in (a, b, c))
    current("T.gemm").emit(ir.Gemm(left, right, total, transpose_A, transpose_B, clear, user_span()), writes=total)


def fill(dst: Handle, value: Operand) -> None:
    """Every element of `dst` = `value`."""
    target = _buffer(dst, "T.fill")
    stored = assigned(value, target.dtype)
    tracer = current("T.fill")
    tracer.uses(stored)
    tracer.emit(ir.Fill(target, stored.expr, user_span()), writes=target)


def clear(dst: Handle) -> None:
    """Every element of `dst` = 0."""
    fill(dst, False if dst.dtype is DType.BOOL else 0)


def reduce(src: Handle, dst: Handle, kind: str, dim: int = -1, clear: Flag = True) -> None:
    """`dst` = the `kind` of `src` over axis `dim` (see `ir.Reduce`); joined with the old `dst` unless `clear`."""
    source, target = _buffer(src, f"T.reduce_{kind}"), _buffer(dst, f"T.reduce_{kind}")
    rank = len(source.shape)
    if not -rank <= dim < rank:
        _fail(f"{src} has no axis {dim}", f"dim between {-rank} and {rank - 1}")
    current("T.reduce").emit(ir.Reduce(kind, source, target, dim % rank, clear, user_span()), writes=target)


def reduce_sum(src: Handle, dst: Handle, dim: int = -1, clear: Flag = True) -> None:
    """`dst` = the sum of `src` over axis `dim`; 0 over no elements."""
    reduce(src, dst, "sum", dim, clear)


def reduce_max(src: Handle, dst: Handle, dim: int = -1, clear: Flag = True, *, nan_propagate: bool = True) -> None:
    """`dst` = the largest of `src` over axis `dim`, NaN if any is; -inf over no elements.

    Without `nan_propagate` elements that are NaN count for nothing, which costs a third.
    """
    reduce(src, dst, "max" if nan_propagate else "fmax", dim, clear)


def reduce_min(src: Handle, dst: Handle, dim: int = -1, clear: Flag = True) -> None:
    """`dst` = the smallest of `src` over axis `dim`, NaN if any is; inf over no elements."""
    reduce(src, dst, "min", dim, clear)


def reduce_prod(src: Handle, dst: Handle, dim: int = -1, clear: Flag = True) -> None:
    """`dst` = the product of `src` over axis `dim`; 1 over no elements."""
    reduce(src, dst, "prod", dim, clear)


def Parallel(*extents: Operand) -> Iterator[Any]:
    """`for i, j in T.Parallel(m, n):` the body, stores only, for every point in any order."""
    frame = user_frame()
    return _parallel([extent(size) for size in extents], span_of_frame(frame))


def _parallel(extents: list[Expr], span: Span) -> Iterator[Any]:
    tracer = current("T.Parallel")
    names = names_assigned(user_frame(), len(extents), "i")
    axes = tuple(Var(tracer.unique(name), extent=size) for name, size in zip(names, extents, strict=True))
    scope = tracer.open("parallel", span)
    values = tuple(Value(axis) for axis in axes)
    whole = False
    try:
        yield values[0] if len(values) == 1 else values
        whole = True
    finally:
        if not whole:
            tracer.abandon(scope, "T.Parallel loop")
    body = tracer.close(scope)
    stores = tuple(stmt for stmt in body if isinstance(stmt, ir.Store))
    tracer.emit(ir.Parallel(axes, stores, span))


def Pipelined(start: Operand, stop: Operand | None = None, *, num_stages: int = 2) -> Iterator[Value]:
    """A loop in order whose copies run `num_stages` iterations ahead of their use."""
    return _loop(start, stop, "pipelined", num_stages)


def serial(start: Operand, stop: Operand | None = None) -> Iterator[Value]:
    """A loop in order."""
    return _loop(start, stop, "serial", 1)


def unroll(start: Operand, stop: Operand | None = None) -> Iterator[Value]:
    """A loop in order, written out by the back end."""
    return _loop(start, stop, "unrolled", 1)


def _loop(start: Operand, stop: Operand | None, kind: str, stages: int) -> Iterator[Value]:
    first, last = (0, start) if stop is None else (start, stop)
    bounds = index(first), index(last)
    tracer = current(f"a {kind} loop")
    tracer.uses(*bounds)
    return _iterations(bounds[0].expr, bounds[1].expr, kind, stages, user_span())


def _iterations(start: Expr, stop: Expr, kind: str, stages: int, span: Span) -> Iterator[Value]:
    tracer = current(f"a {kind} loop")
    var = Var(tracer.unique(names_assigned(user_frame(), 1, "n")[0]), extent=stop)
    scope = tracer.open("loop", span)
    whole = False
    try:
        yield Value(var)
        whole = True
    finally:
        if not whole:
            tracer.abandon(scope, "loop")
    tracer.emit(ir.For(var, start, kind, tracer.close(scope), stages, span))


class If:
    """`with T.If(condition):` runs its statements where the scalar condition holds; `with T.Else():` may follow."""

    def __init__(self, condition: Operand) -> None:
        self.tracer = current("T.If")
        self.condition = lift(condition)
        if self.condition.dtype is not DType.BOOL:
            _fail(f"the condition is {self.condition.dtype}", "a comparison: T.If(x != 0)")
        self.tracer.uses(self.condition)
        self.scope: Scope | None = None

    def __enter__(self) -> Self:
        self.scope = self.tracer.open("T.If", user_span())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self.scope is not None:
            body = self.tracer.close(self.scope)
            self.tracer.emit(ir.If(self.condition.expr, body, (), self.scope.span))


class Else:
    """The other side of the `T.If` just before it."""

    def __init__(self) -> None:
        self.tracer = current("T.Else")
        body = self.tracer.scopes[-1].body if self.tracer.scopes else []
        last = body[-1] if body else None
        if not isinstance(last, ir.If) or last.otherwise:
            _fail("T.Else without a T.If just before it", "`with T.If(condition):` first, on the same level")
        self.condition = last
        self.scope: Scope | None = None

    def __enter__(self) -> Self:
        self.scope = self.tracer.open("T.Else", user_span())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self.scope is not None:
            otherwise = self.tracer.close(self.scope)
            self.tracer.scopes[-1].body[-1] = dataclasses.replace(self.condition, otherwise=otherwise)


def if_then_else(condition: Operand, yes: Operand, no: Operand) -> Value:
    """`yes` where `condition` holds, else `no`; only the chosen side is evaluated, so it may guard a load."""
    return choose(condition, yes, no)


Select = if_then_else


def cast(value: Operand, dtype: "DType | str") -> Value:
    """`value` as `dtype`: float to int truncates, a bool becomes 0 or 1."""
    return convert(value, dtype_of(dtype))


def ceildiv(value: Any, divisor: Any) -> Any:
    """`value` / `divisor` rounded up; a Python int for two of them."""
    return (
        -(-value // divisor)
        if isinstance(value, int) and isinstance(divisor, int)
        else (value + divisor - 1) // divisor
    )


def exp(x: Operand) -> Value:
    """e to the power `x`."""
    return operate("exp", x)


def exp2(x: Operand) -> Value:
    """2 to the power `x`."""
    return operate("exp2", x)


def log(x: Operand) -> Value:
    """The natural logarithm of `x`."""
    return operate("log", x)


def log2(x: Operand) -> Value:
    """The logarithm of `x` to base 2."""
    return operate("log2", x)


def sqrt(x: Operand) -> Value:
    """The square root of `x`."""
    return operate("sqrt", x)


def rsqrt(x: Operand) -> Value:
    """1 / sqrt(`x`)."""
    return operate("rsqrt", x)


def tanh(x: Operand) -> Value:
    """The hyperbolic tangent of `x`."""
    return operate("tanh", x)


def erf(x: Operand) -> Value:
    """The error function of `x`."""
    return operate("erf", x)


def sigmoid(x: Operand) -> Value:
    """1 / (1 + exp(-`x`))."""
    return operate("sigmoid", x)


def sin(x: Operand) -> Value:
    """The sine of `x`, in radians."""
    return operate("sin", x)


def cos(x: Operand) -> Value:
    """The cosine of `x`, in radians."""
    return operate("cos", x)


def floor(x: Operand) -> Value:
    """The largest whole number at most `x`, in the type of `x`."""
    return operate("floor", x)


def ceil(x: Operand) -> Value:
    """The smallest whole number at least `x`, in the type of `x`."""
    return operate("ceil", x)


def isnan(x: Operand) -> Value:
    """True where `x` is NaN."""
    return operate("isnan", x)


def isinf(x: Operand) -> Value:
    """True where `x` is infinite."""
    return operate("isinf", x)


def sign(x: Operand) -> Value:
    """-1, 0 or 1 by the sign of `x`."""
    return operate("sign", x)


def pow(x: Operand, y: Operand) -> Value:
    """`x` to the power `y`."""
    return operate("pow", x, y)


def abs(x: Operand) -> Value:
    """The magnitude of `x`."""
    return operate("abs", x)


def round(x: Operand) -> Value:
    """The nearest whole number, halves to even, in the type of `x`."""
    return operate("round", x)


def max(x: Operand, y: Operand) -> Value:
    """The larger of `x` and `y`, NaN if either is."""
    return operate("max", x, y)


def min(x: Operand, y: Operand) -> Value:
    """The smaller of `x` and `y`, NaN if either is."""
    return operate("min", x, y)


def Tensor(shape: Any, dtype: "DType | str") -> Any:
    """The annotation of a kernel parameter that is a whole dense tensor: `A: T.Tensor((M, K), T.float32)`."""
    dims = shape if isinstance(shape, tuple | list) else (shape,)
    return TensorType(tuple(extent(dim) for dim in dims), dtype_of(dtype))


def dynamic(name: str) -> Value:
    """An extent known at run time, by name; it must be a whole dim of an input."""
    return Value(Sym(name))


def dtype_of(dtype: "DType | str") -> DType:
    """A dtype, or its name ("float32"). TileError for any other."""
    if isinstance(dtype, DType):
        return dtype
    for label, known in _DTYPES.items():
        if dtype == label:
            return known
    return _fail(f"no dtype {dtype!r}", f"one of {', '.join(_DTYPES)}")


def _buffer(tile: Any, what: str) -> ir.Buffer:
    if isinstance(tile, Handle) and isinstance(tile.source, ir.Buffer):
        return tile.source
    return _fail(f"{what} works on whole tile buffers, found {described(tile)}", "T.copy it to a buffer first")


def _fail(message: str, instead: str) -> NoReturn:
    raise TileError(message, user_span(), instead=instead)


float64, float32, float16, bfloat16 = DType.F64, DType.F32, DType.F16, DType.BF16
int64, int32, int16, int8, uint8 = DType.I64, DType.I32, DType.I16, DType.I8, DType.U8
bool = DType.BOOL

_DTYPES = {
    "float64": float64,
    "float32": float32,
    "float16": float16,
    "bfloat16": bfloat16,
    "int64": int64,
    "int32": int32,
    "int16": int16,
    "int8": int8,
    "uint8": uint8,
    "bool": bool,
}
