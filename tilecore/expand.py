"""Passes that write what the CPU has no verb for in terms of what it has: each gives an equal program.

* `expand_reductions`: a reduction over any axis of any type, and a running sum, as a loop of elementwise statements.
  Sums over the last axis of two stay when they are of f32 or f64; those of 16-bit floats are summed in f32.
* `expand_products`: a product of types that no register tile takes, as a loop of elementwise statements.
* `widen_operands`: operands in 16-bit floats are widened to f32, bytes to 16 bits, where they are copied if nothing
  else reads them.
* `pack_operands`: a right operand that something else writes or reads is copied, so that only products see panels.

Library kernels need none of this and pass through unchanged.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Var, apply, cast, const
from tilecore.contract.spec import View
from tilecore.graph import buffers_of, build_graph
from tilecore.infer import FLOATS, LEVELS, NARROW, product_types
from tilecore.ir import (
    Buffer,
    Copy,
    CumSum,
    Fill,
    For,
    Gemm,
    Parallel,
    Program,
    Reduce,
    Stmt,
    Store,
    Tile,
    statements,
    with_bodies,
)
from tilecore.target import Target

NEUTRAL: Mapping[str, float | int] = {
    "sum": 0, "prod": 1, "max": -np.inf, "fmax": -np.inf, "min": np.inf, "bitand": -1, "bitor": 0, "bitxor": 0
}  # fmt: skip
JOIN = {"sum": "add", "prod": "mul", "max": "max", "fmax": "max", "min": "min",
        "bitand": "bitand", "bitor": "bitor", "bitxor": "bitxor"}  # fmt: skip
LOGIC_JOIN = {"max": "or", "bitor": "or", "min": "and", "bitand": "and", "bitxor": "ne"}  # of bools
WIDE = {DType.F16: DType.F32, DType.BF16: DType.F32, DType.I8: DType.I16, DType.U8: DType.I16}


def neutral(kind: str, dtype: DType) -> float | int:
    """What a reduction of `kind` over no elements of `dtype` gives: infinities of integers are their limits."""
    value = NEUTRAL[kind]
    if dtype is DType.BOOL:
        return int(LOGIC_JOIN[kind] == "and")
    if not dtype.is_int:
        return float(value)
    limits = np.iinfo(dtype.row.numpy)
    if kind == "bitand":
        return int(limits.max) if limits.min == 0 else -1
    return int(limits.min) if value == -np.inf else int(limits.max) if value == np.inf else int(value)


class _Names:
    """Names that a program does not use yet."""

    def __init__(self, program: Program) -> None:
        self.taken = {buffer.name for buffer in program.buffers} | {axis.name for axis in program.grid}
        self.taken |= {tensor.name for tensor in (*program.inputs, *program.outputs)}
        self.taken |= {view.name for view in program.views}
        for stmt in statements(program.body):
            if isinstance(stmt, For):
                self.taken.add(stmt.var.name)
            if isinstance(stmt, Parallel):
                self.taken |= {axis.name for axis in stmt.axes}

    def fresh(self, name: str) -> str:
        count = 0
        candidate = name
        while candidate in self.taken:
            count += 1
            candidate = f"{name}_{count}"
        self.taken.add(candidate)
        return candidate


def _axes(names: _Names, buffer: Buffer, shape: tuple[Expr, ...]) -> tuple[Var, ...]:
    return tuple(Var(names.fresh(f"{buffer.name}_{i}"), extent=extent) for i, extent in enumerate(shape))


def _each(axes: tuple[Var, ...], store: Store) -> Stmt:
    """`store` for every point of `axes`; without axes, once."""
    return Parallel(axes, (store,), store.span) if axes else store


# ---- reductions and running sums


def expand_reductions(program: Program) -> Program:
    """`program` in which every reduction is over the last of two axes, of f32 or f64, and there is no running sum."""
    names = _Names(program)
    buffers = list(program.buffers)

    def body(stmts: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        done: list[Stmt] = []
        for stmt in stmts:
            match stmt:
                case Reduce() if not _native(stmt):
                    done.extend(_reduction(stmt, names, buffers))
                case CumSum():
                    done.extend(_running_sum(stmt, names))
                case _:
                    done.append(with_bodies(stmt, body))
        return tuple(done)

    changed = body(program.body)
    return replace(program, body=changed, buffers=tuple(buffers))


def _native(stmt: Reduce) -> bool:
    last_of_two = len(stmt.src.shape) == 2 and stmt.axis == 1 and len(stmt.dst.shape) == 1
    kinds = (DType.F32,) if stmt.kind == "fmax" else (DType.F32, DType.F64)  # there is no fmax of vectors of doubles
    return last_of_two and stmt.src.dtype in kinds


def _reduction(stmt: Reduce, names: _Names, buffers: list[Buffer]) -> Iterator[Stmt]:
    src, dst = stmt.src, stmt.dst
    if src.dtype in (DType.F16, DType.BF16):
        yield from _in_f32(stmt, names, buffers)
        return
    if stmt.clear:
        yield Fill(dst, const(neutral(stmt.kind, dst.dtype), dst.dtype), stmt.span)
    others = tuple(extent for i, extent in enumerate(src.shape) if i != stmt.axis)
    axes = _axes(names, src, others)
    walked = Var(names.fresh("k"), extent=src.shape[stmt.axis])
    index = (*axes[: stmt.axis], walked, *axes[stmt.axis :])
    target: tuple[Expr, ...] = axes
    if len(dst.shape) == len(src.shape) or not axes:  # the reduced axis is kept
        target = (*axes[: stmt.axis], const(0), *axes[stmt.axis :])
    join = LOGIC_JOIN if src.dtype is DType.BOOL else JOIN
    joined = apply(join[stmt.kind], Load(dst, target), _number(stmt, Load(src, index)))
    yield For(walked, const(0), "serial", (_each(axes, Store(dst, target, joined, stmt.span)),), 1, stmt.span)


def _number(stmt: Reduce, value: Expr) -> Expr:
    """ "fmax" lets no NaN through."""
    if stmt.kind != "fmax":
        return value
    return apply("select", apply("isnan", value), const(neutral("fmax", value.dtype), value.dtype), value)


def _in_f32(stmt: Reduce, names: _Names, buffers: list[Buffer]) -> Iterator[Stmt]:
    """16-bit floats: widened, reduced, joined with what stood there and rounded once."""
    wide = Buffer(names.fresh(f"{stmt.src.name}_f32"), DType.F32, stmt.src.shape, "fragment", stmt.span)
    total = Buffer(names.fresh(f"{stmt.dst.name}_f32"), DType.F32, stmt.dst.shape, "fragment", stmt.span)
    buffers += [wide, total]
    yield _converted(stmt.src, wide, names, stmt)
    if not stmt.clear:
        yield _converted(stmt.dst, total, names, stmt)
    inner = Reduce(stmt.kind, wide, total, stmt.axis, stmt.clear, stmt.span)
    yield from (inner,) if _native(inner) else _reduction(inner, names, buffers)
    yield _converted(total, stmt.dst, names, stmt)


def _converted(src: Buffer, dst: Buffer, names: _Names, stmt: Stmt) -> Stmt:
    axes = _axes(names, dst, dst.shape)
    return _each(axes, Store(dst, axes, cast(Load(src, axes), dst.dtype), stmt.span))


def _running_sum(stmt: CumSum, names: _Names) -> Iterator[Stmt]:
    src, dst, extent = stmt.src, stmt.dst, stmt.src.shape[stmt.axis]
    axes = _axes(names, src, tuple(other for i, other in enumerate(src.shape) if i != stmt.axis))

    def at(position: Expr) -> tuple[Expr, ...]:
        place = extent - 1 - position if stmt.reverse else position
        return (*axes[: stmt.axis], place, *axes[stmt.axis :])

    if extent == const(0):
        return
    yield _each(axes, Store(dst, at(const(0)), Load(src, at(const(0))), stmt.span))
    step = Var(names.fresh("k"), extent=extent - 1)
    total = apply("add", Load(dst, at(step)), Load(src, at(step + 1)))
    yield For(step, const(0), "serial", (_each(axes, Store(dst, at(step + 1), total, stmt.span)),), 1, stmt.span)


# ---- products


def expand_products(program: Program) -> Program:
    """`program` in which every product is of types that a register tile takes."""
    names = _Names(program)

    def body(stmts: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        done: list[Stmt] = []
        for stmt in stmts:
            if isinstance(stmt, Gemm) and not _has_tile(stmt):
                done.extend(_product(stmt, names))
            else:
                done.append(with_bodies(stmt, body))
        return tuple(done)

    return replace(program, body=body(program.body))


def _has_tile(stmt: Gemm) -> bool:
    wide = tuple(WIDE.get(buffer.dtype, buffer.dtype) for buffer in (stmt.a, stmt.b))
    transposed_integers = stmt.transpose_a and stmt.c.dtype.is_int
    return (*wide, stmt.c.dtype) in (FLOATS, LEVELS) and not transposed_integers


def is_narrow(stmt: Gemm) -> bool:
    """Whether a product is one that some targets have instructions for as it is, without widening operands."""
    return (stmt.a.dtype, stmt.b.dtype, stmt.c.dtype) == NARROW and not stmt.transpose_a


def _product(stmt: Gemm, names: _Names) -> Iterator[Stmt]:
    a, b, c = stmt.a, stmt.b, stmt.c
    if stmt.clear:
        yield Fill(c, const(0, c.dtype), stmt.span)
    i, j = _axes(names, c, c.shape)
    depth = Var(names.fresh("k"), extent=a.shape[0 if stmt.transpose_a else 1])
    left = cast(Load(a, (depth, i) if stmt.transpose_a else (i, depth)), c.dtype)
    right = cast(Load(b, (j, depth) if stmt.transpose_b else (depth, j)), c.dtype)
    total = apply("add", Load(c, (i, j)), apply("mul", left, right))
    step = Parallel((i, j), (Store(c, (i, j), total, stmt.span),), stmt.span)
    yield For(depth, const(0), "serial", (step,), 1, stmt.span)


def widen_operands(program: Program, target: Target) -> Program:
    """`program` in which operands of products are f32, 16-bit integers, or bf16 where the target multiplies that."""
    kept = NARROW in product_types(target)
    narrow = {
        buffer.name
        for stmt in statements(program.body)
        if isinstance(stmt, Gemm) and _has_tile(stmt) and not (kept and is_narrow(stmt))
        for buffer in (stmt.a, stmt.b)
        if buffer.dtype in WIDE
    }
    if not narrow:
        return program
    widened = {
        buffer: replace(buffer, dtype=WIDE[buffer.dtype])
        for buffer in program.buffers
        if buffer.name in narrow and _only_copied(buffer, program)
    }
    names, buffers = _Names(program), [widened.get(buffer, buffer) for buffer in program.buffers]

    def body(stmts: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        done: list[Stmt] = []
        for stmt in stmts:
            match stmt:
                case Copy(dst=Tile(source=Buffer() as target)) if target in widened:
                    done.append(replace(stmt, dst=replace(stmt.dst, source=widened[target])))
                case Gemm() if _has_tile(stmt) and not (kept and is_narrow(stmt)):
                    done.extend(_widened(stmt, widened, names, buffers))
                case _:
                    done.append(with_bodies(stmt, body))
        return tuple(done)

    changed = body(program.body)
    return replace(program, body=changed, buffers=tuple(buffers))


def _only_copied(buffer: Buffer, program: Program) -> bool:
    """Whether copies of values of its own type are all that writes it, and products all that reads it."""
    for node in build_graph(program).nodes:
        if buffer in node.reads and not isinstance(node.stmt, Gemm):
            return False
        if buffer in node.writes:
            if not isinstance(node.stmt, Copy) or not isinstance(node.stmt.src.source, View):
                return False
            if node.stmt.src.source.dtype is not buffer.dtype:
                return False
    return True


def _widened(
    stmt: Gemm, widened: Mapping[Buffer, Buffer], names: _Names, buffers: list[Buffer]
) -> Iterator[Stmt]:  # fmt: skip
    made: dict[Buffer, Buffer] = {}
    for operand in (stmt.a, stmt.b):
        if operand in widened:
            made[operand] = widened[operand]
        elif operand.dtype in WIDE and operand not in made:
            dtype = WIDE[operand.dtype]
            wide = Buffer(names.fresh(f"{operand.name}_{dtype}"), dtype, operand.shape, "shared", stmt.span)
            buffers.append(wide)
            made[operand] = wide
            yield _converted(operand, wide, names, stmt)
    yield replace(stmt, a=made.get(stmt.a, stmt.a), b=made.get(stmt.b, stmt.b))


def pack_operands(program: Program) -> Program:
    """`program` in which a right operand is written by copies alone and read by products alone, in one orientation."""
    names, buffers = _Names(program), list(program.buffers)
    mixed = {buffer for buffer in program.buffers if not _only_right_operand(buffer, program)}

    def body(stmts: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        done: list[Stmt] = []
        for stmt in stmts:
            if isinstance(stmt, Gemm) and stmt.b in mixed:
                packed = Buffer(names.fresh(f"{stmt.b.name}_packed"), stmt.b.dtype, stmt.b.shape, "shared", stmt.span)
                buffers.append(packed)
                whole = tuple(Const(0, DType.I64) for _ in stmt.b.shape)
                done.append(Copy(Tile(stmt.b, whole, stmt.b.shape), Tile(packed, whole, stmt.b.shape), stmt.span))
                done.append(replace(stmt, b=packed))
            else:
                done.append(with_bodies(stmt, body))
        return tuple(done)

    changed = body(program.body)
    return replace(program, body=changed, buffers=tuple(buffers))


def _only_right_operand(buffer: Buffer, program: Program) -> bool:
    orientations: set[bool] = set()
    for stmt in statements(program.body):
        reads, writes = buffers_of(stmt)
        if buffer in writes and not (isinstance(stmt, Copy) and stmt.dst.shape == buffer.shape):
            return False
        if buffer in reads:
            if not isinstance(stmt, Gemm) or buffer in (stmt.a, stmt.c):
                return False
            orientations.add(stmt.transpose_b)
    return len(orientations) <= 1
