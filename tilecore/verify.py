"""The verifier of tile programs: it runs after tracing and after every pass, and is never switched off.

Comes in: a program. Goes out: nothing, or a TileError with the span of the statement at fault. It accepts a program
only if every name is declared and in scope, shapes and types agree, tile buffers are indexed inside their extents and
written before they are read, and no two points of a `Parallel`, nor two tasks of the grid, write the same elements.
"""

from dataclasses import dataclass, field, replace

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Op, Sym, Var, children, const, loads, nonnegative, variables
from tilecore.contract.spec import Place, Tensor, View
from tilecore.errors import TileError
from tilecore.graph import buffers_of
from tilecore.ir import (
    Assert,
    Buffer,
    Copy,
    CumSum,
    Fill,
    For,
    Gemm,
    If,
    Join,
    Parallel,
    Print,
    Program,
    Reduce,
    Stmt,
    Store,
    Tile,
    While,
    expressions,
    statements,
)
from tilecore.races import check_parallel, tasks_meet
from tilecore.span import Span

SCOPES = ("shared", "fragment")
REDUCTIONS = ("sum", "max", "fmax", "min", "prod", "bitand", "bitor", "bitxor")
OF_BOOLS = ("max", "min", "bitand", "bitor", "bitxor")
UPDATES = ("add", "max", "min")
UPDATED_TYPES = (
    DType.F64, DType.F32, DType.F16, DType.BF16, DType.I64, DType.I32, DType.I16, DType.I8, DType.U8,
)  # fmt: skip
LOOPS = ("serial", "unrolled", "pipelined")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a check stands: variables in scope, those that an enclosing `If` tests, and the statement's span."""

    scope: frozenset[Var]
    tested: frozenset[Var | Load] = frozenset()
    span: Span | None = None
    points: tuple[Var, ...] = ()  # axes of the `Parallel` around

    def inside(self, axes: tuple[Var, ...]) -> "_Place":
        """The same place with loop variables added. TileError for a name that is already a variable."""
        for axis in axes:
            if any(axis.name == other.name for other in self.scope):
                raise TileError(f"the loop variable {axis.name} hides another of that name", self.span)
        return replace(self, scope=self.scope | set(axes))


@dataclass(slots=True)
class _Checker:
    """The declarations of a program, and the buffers written so far in program order."""

    program: Program
    symbols: frozenset[Sym] = frozenset()
    written: set[str] = field(default_factory=set)


def verify(program: Program) -> None:
    """Raise TileError unless `program` is well formed."""
    _check_declarations(program)
    dims = {dim for tensor in program.inputs for dim in tensor.shape if isinstance(dim, Sym)}
    checker = _Checker(program, frozenset(dims | set(program.tunables)))
    outside = _Place(frozenset(), span=program.span)
    for buffer in program.buffers:
        for dim in buffer.shape:
            _extent(checker, dim, replace(outside, span=buffer.span), f"an extent of {buffer.name}")
    for axis in program.grid:
        if axis.extent is None:
            raise TileError(f"{program.name}: grid axis {axis.name} has no extent", program.span)
        _extent(checker, axis.extent, outside, f"the extent of {axis.name}")
    _block(checker, program.body, outside.inside(program.grid))


def _check_declarations(program: Program) -> None:
    for what, names in (
        ("buffers", [buffer.name for buffer in program.buffers]),
        ("views", [view.name for view in program.views]),
        ("tensors", [tensor.name for tensor in (*program.inputs, *program.outputs)]),
        ("grid axes", [axis.name for axis in program.grid]),
    ):
        double = sorted({name for name in names if names.count(name) > 1})
        if double:
            raise TileError(f"{program.name}: two {what} are named {', '.join(double)}", program.span)
    for buffer in program.buffers:
        if buffer.scope not in SCOPES:
            raise TileError(f"{buffer.name} has scope {buffer.scope!r}, not one of {', '.join(SCOPES)}", buffer.span)
    for place in program.places:
        if place.tensor not in program.outputs:
            raise TileError(f"{place.name} is written but is not an output of {program.name}", program.span)


def _block(checker: _Checker, body: tuple[Stmt, ...], where: _Place) -> None:
    for stmt in body:
        _statement(checker, stmt, replace(where, span=stmt.span))


def _statement(checker: _Checker, stmt: Stmt, where: _Place) -> None:
    match stmt:
        case Copy():
            _copy(checker, stmt, where)
        case Fill():
            _expression(checker, stmt.value, where)
            _type(stmt.value.dtype, stmt.dst, where)
            _write(checker, stmt.dst, where)
        case Gemm():
            _gemm(checker, stmt, where)
        case Reduce():
            _reduce(checker, stmt, where)
        case Join():
            _join(checker, stmt, where)
        case CumSum():
            _cumsum(checker, stmt, where)
        case Print():
            if isinstance(stmt.values, Buffer):
                _declared(checker, stmt.values, where)
                _read(checker, stmt.values, where)
            for value in expressions(stmt):
                _expression(checker, value, where)
        case Assert():
            _condition(checker, stmt.condition, where)
        case Store():
            _store(checker, stmt, where)
        case Parallel():
            inner = _loop(checker, stmt.axes, where)
            for store in stmt.body:
                _store(checker, store, replace(inner, span=store.span, points=stmt.axes))
            check_parallel(stmt)
        case For():
            if stmt.kind not in LOOPS or stmt.stages < 1:
                raise TileError(f"a loop of kind {stmt.kind!r} with {stmt.stages} stages", stmt.span)
            _extent(checker, stmt.start, where, "the start of a loop")
            _block(checker, stmt.body, _loop(checker, (stmt.var,), where))
        case While():
            _while(checker, stmt, where)
        case If():
            _condition(checker, stmt.condition, where)
            inner = replace(where, tested=where.tested | _tested(stmt.condition))
            before = set(checker.written)
            _block(checker, stmt.then, inner)
            after, checker.written = checker.written, before
            _block(checker, stmt.otherwise, inner)
            checker.written |= after


def _condition(checker: _Checker, condition: Expr, where: _Place) -> None:
    _expression(checker, condition, where)
    if condition.dtype is not DType.BOOL:
        raise TileError(f"the condition is {condition.dtype}, not bool", where.span)


def _while(checker: _Checker, stmt: While, where: _Place) -> None:
    _condition(checker, stmt.condition, where)
    read = {load.source.name for load in loads(stmt.condition) if isinstance(load.source, Buffer)}
    written = {buffer.name for inner in statements(stmt.body) for buffer in buffers_of(inner)[1]}
    if not read & written:
        raise TileError(
            "nothing in the loop changes its condition",
            where.span,
            instead="a condition that reads a tile which the body writes, such as `flag = T.alloc_var(T.bool)`",
        )
    _block(checker, stmt.body, replace(where, tested=where.tested | _tested(stmt.condition)))


def _join(checker: _Checker, stmt: Join, where: _Place) -> None:
    if stmt.kind not in REDUCTIONS:
        raise TileError(f"a join of kind {stmt.kind!r}, not one of {', '.join(REDUCTIONS)}", where.span)
    if stmt not in checker.program.body:
        raise TileError(
            f"{stmt.buffer.name} is joined inside a loop or T.If, where tasks need not meet",
            where.span,
            instead="T.join on the level of the kernel's body",
        )
    if stmt.axis not in checker.program.grid:
        raise TileError(f"{stmt.axis.name} is no axis of the grid of {checker.program.name}", where.span)
    _declared(checker, stmt.buffer, where)
    _read(checker, stmt.buffer, where)


def _cumsum(checker: _Checker, stmt: CumSum, where: _Place) -> None:
    for tile in (stmt.src, stmt.dst):
        _declared(checker, tile, where)
    if not 0 <= stmt.axis < len(stmt.src.shape):
        raise TileError(f"{stmt.src.name} has no axis {stmt.axis}", where.span)
    if stmt.src.dtype is DType.BOOL:
        raise TileError("a running sum of bool", where.span, instead="T.cummax for whether any was true so far")
    if stmt.src.shape != stmt.dst.shape:
        raise TileError(
            f"cumsum of {_shape(stmt.src.shape)} {stmt.src.name} into {_shape(stmt.dst.shape)} {stmt.dst.name}",
            where.span,
            instead="a result of the same shape",
            against=_allocated(stmt.src, stmt.dst),
        )
    _type(stmt.src.dtype, stmt.dst, where)
    _read(checker, stmt.src, where)
    _write(checker, stmt.dst, where)


def _loop(checker: _Checker, axes: tuple[Var, ...], where: _Place) -> _Place:
    for axis in axes:
        if axis.extent is None or axis.dtype is not DType.I64:
            raise TileError(f"the loop variable {axis.name} has no extent", where.span)
        _extent(checker, axis.extent, where, f"the extent of {axis.name}")
    return where.inside(axes)


def _copy(checker: _Checker, stmt: Copy, where: _Place) -> None:
    for tile in (stmt.src, stmt.dst):
        _tile(checker, tile, where)
    source, target = stmt.src.source, stmt.dst.source
    if isinstance(source, Place):
        raise TileError(f"{source.name} is an output: it cannot be copied from", where.span)
    if isinstance(target, View):
        raise TileError(f"{target.name} is an input: it cannot be copied to", where.span)
    if source == target:
        raise TileError(f"{target.name} is copied to itself", where.span, instead="copy through another tile")
    shapes = [_without_ones(tile.shape) for tile in (stmt.src, stmt.dst)]
    if shapes[0] != shapes[1]:
        raise TileError(
            f"copy of {_shape(stmt.src.shape)} from {source.name} to {_shape(stmt.dst.shape)} of {target.name}",
            where.span,
            instead="tiles with the same extents, those of 1 apart",
            against=_allocated(source, target),
        )
    if isinstance(source, Buffer):
        _read(checker, source, where)
    _write(checker, target, where)
    if isinstance(target, Place):
        points = tuple(Var(f"{target.name}_{axis}", extent=size) for axis, size in enumerate(stmt.dst.shape))
        index = tuple(start + point for start, point in zip(stmt.dst.origin, points, strict=True))
        _check_tasks(checker, target, index, replace(where, points=points))


def _tile(checker: _Checker, tile: Tile, where: _Place) -> None:
    name, dims = tile.source.name, tile.source.shape
    _declared(checker, tile.source, where)
    if not len(tile.origin) == len(tile.shape) == len(dims):
        raise TileError(f"a tile of {len(tile.origin)} axes of {name}, which has {len(dims)}", where.span)
    for axis, (start, size, dim) in enumerate(zip(tile.origin, tile.shape, dims, strict=True)):
        _extent(checker, start, where, f"the origin of a tile of {name}")
        _extent(checker, size, where, f"the extent of a tile of {name}")
        if variables(size):
            raise TileError(
                f"the extent of axis {axis} of this tile of {name} is {size}: it may not depend on a loop",
                where.span,
                instead="a slice start : start + extent with a fixed extent",
            )
        if isinstance(tile.source, Buffer) and not (nonnegative(start) and nonnegative(dim - start - size)):
            raise TileError(
                f"axis {axis} of {name} has extent {dim}; this tile may reach from {start} to {start + size}",
                where.span,
                instead="a slice inside the tile buffer",
                against=_allocated(tile.source),
            )


def _gemm(checker: _Checker, stmt: Gemm, where: _Place) -> None:
    a, b, c = stmt.a, stmt.b, stmt.c
    for tile in (a, b, c):
        _declared(checker, tile, where)
        if len(tile.shape) != 2:
            raise TileError(f"gemm needs tiles of 2 axes; {tile.name} has {len(tile.shape)}", where.span)
    m, depth = reversed(a.shape) if stmt.transpose_a else a.shape
    depth_b, n = reversed(b.shape) if stmt.transpose_b else b.shape
    if depth != depth_b:
        raise TileError(
            f"gemm sums over {depth} elements of {a.name} and {depth_b} of {b.name}",
            where.span,
            instead="tiles that agree there, or transpose_A / transpose_B",
            against=_allocated(a, b),
        )
    if c.shape != (m, n):
        message = f"gemm gives {_shape((m, n))}; {c.name} is {_shape(c.shape)}"
        raise TileError(message, where.span, against=_allocated(a, b, c))
    if a.dtype is not b.dtype:
        raise TileError(
            f"gemm of {a.dtype} and {b.dtype}", where.span, instead="T.copy one to a tile of the other type"
        )
    wide = (DType.F32, DType.F64) if a.dtype.is_float else (DType.I32, DType.I64)
    if c.dtype not in wide or c.dtype.row.bytes < a.dtype.row.bytes:
        raise TileError(f"gemm of {a.dtype} cannot accumulate in {c.dtype}", where.span, instead=f"one of {wide}")
    if c in (a, b):
        raise TileError(f"gemm reads and writes {c.name}", where.span, instead="another tile for the result")
    for tile in (a, b) if stmt.clear else (a, b, c):
        _read(checker, tile, where)
    _write(checker, c, where)


def _reduce(checker: _Checker, stmt: Reduce, where: _Place) -> None:
    src, dst = stmt.src, stmt.dst
    for tile in (src, dst):
        _declared(checker, tile, where)
    if stmt.kind not in REDUCTIONS:
        raise TileError(f"a reduction of kind {stmt.kind!r}, not one of {', '.join(REDUCTIONS)}", where.span)
    if not 0 <= stmt.axis < len(src.shape):
        raise TileError(f"{src.name} has no axis {stmt.axis}", where.span)
    left = src.shape[: stmt.axis] + src.shape[stmt.axis + 1 :]
    if dst.shape != left and dst.shape != (*src.shape[: stmt.axis], const(1), *src.shape[stmt.axis + 1 :]):
        raise TileError(
            f"{src.name} without axis {stmt.axis} is {_shape(left)}; {dst.name} is {_shape(dst.shape)}",
            where.span,
            against=_allocated(src, dst),
        )
    _type(src.dtype, dst, where)
    if stmt.kind.startswith("bit") and src.dtype.is_float:
        raise TileError(
            f"T.reduce_{stmt.kind} of {src.dtype}: it joins the bits of integers, or bools", where.span,
            instead="T.reinterpret of its elements into a tile of integers first",
        )  # fmt: skip
    if src.dtype is DType.BOOL and stmt.kind not in OF_BOOLS:
        raise TileError(
            f"T.reduce_{stmt.kind} of bool", where.span,
            instead="T.cast of its elements to a tile of int32 for a count; T.reduce_max for any, T.reduce_min for all",
        )  # fmt: skip
    if src == dst:
        raise TileError(f"{src.name} is reduced into itself", where.span, instead="another tile for the result")
    for tile in (src,) if stmt.clear else (src, dst):
        _read(checker, tile, where)
    _write(checker, dst, where)


def _store(checker: _Checker, stmt: Store, where: _Place) -> None:
    target = stmt.target
    if len(stmt.index) != len(target.shape):
        raise TileError(f"{target.name} has {len(target.shape)} axes; stored with {len(stmt.index)}", where.span)
    for entry in stmt.index:
        _extent(checker, entry, where, f"an index of {target.name}")
    if stmt.guard is not None:
        _condition(checker, stmt.guard, where)
        where = replace(where, tested=where.tested | _tested(stmt.guard))
    if isinstance(target, Buffer):
        _check_inside(Load(target, stmt.index), where, where.tested if stmt.guard is not None else frozenset())
    elif not stmt.update:
        _check_tasks(checker, target, stmt.index, where)
    _update(stmt, where)
    _expression(checker, stmt.value, where)
    _type(stmt.value.dtype, target, where)
    _write(checker, target, where)


def _update(stmt: Store, where: _Place) -> None:
    if not stmt.update:
        return
    if stmt.update not in UPDATES or not isinstance(stmt.target, Place):
        raise TileError(f"an update of {stmt.target.name} by {stmt.update!r}", where.span)
    if stmt.target.dtype not in UPDATED_TYPES:
        known = ", ".join(map(str, UPDATED_TYPES))
        raise TileError(
            f"T.atomic_{stmt.update} of {stmt.target.dtype} elements", where.span, instead=f"a tensor of one of {known}"
        )


def _check_tasks(checker: _Checker, target: Place, index: tuple[Expr, ...], where: _Place) -> None:
    """Every axis of the grid must be told apart by what is written, or tested by an `If` around it."""
    used = frozenset[Var | Load]().union(*(variables(entry) for entry in index)) | where.tested
    for axis in checker.program.grid:
        if axis.extent not in (const(0), const(1)) and axis not in used:
            raise TileError(
                f"every task of {axis.name} writes the same elements of {target.name}",
                where.span,
                instead=f"an index with {axis.name} in it, or no such axis in T.Kernel",
            )
        if not where.tested & {axis, *where.points} and tasks_meet(index, axis, where.points):
            raise TileError(
                f"neighbouring tasks of {axis.name} write the same elements of {target.name}, at "
                f"[{', '.join(map(str, index))}]",
                where.span,
                instead=f"an index that differs for every {axis.name}, such as {axis.name} * block + i",
            )


def _expression(checker: _Checker, expr: Expr, where: _Place) -> None:
    seen: set[tuple[int, frozenset[Var | Load]]] = set()

    def visit(node: Expr, guards: frozenset[Var | Load]) -> None:
        if (id(node), guards) in seen:
            return
        seen.add((id(node), guards))
        _leaf(checker, node, where)
        if isinstance(node, Load) and isinstance(node.source, Buffer):
            _check_inside(node, where, guards)
        inner = guards
        if isinstance(node, Op) and node.name == "select":
            visit(node.args[0], guards)
            inner = guards | _tested(node.args[0])
        for child in children(node):
            visit(child, inner)

    visit(expr, where.tested)


def _leaf(checker: _Checker, node: Expr, where: _Place) -> None:
    match node:
        case Var() if node not in where.scope:
            raise TileError(
                f"{node.name} is used outside of its loop",
                where.span,
                instead="a fragment for what the loop hands on: a traced body runs once, for all its iterations",
            )
        case Sym() if node not in checker.symbols:
            raise TileError(
                f"{node.name} is not a dim of any input of {checker.program.name}",
                where.span,
                instead="an input with it as a whole dim",
            )
        case Load():
            source = node.source
            if isinstance(source, Place):
                raise TileError(f"{source.name} is an output: it cannot be read", where.span)
            _declared(checker, source, where)
            if isinstance(source, Buffer):
                _read(checker, source, where)
            for entry in node.index:
                if entry.dtype is not DType.I64:
                    raise TileError(f"an index of {source.name} is {entry.dtype}, not i64", where.span)
        case _:
            pass


def _allocated(*operands: object) -> list[tuple[Span, str]]:
    """Where tiles got their extents: the other side of what contradicts them."""
    buffers = dict.fromkeys(each for each in operands if isinstance(each, Buffer))
    return [(each.span, f"{each.name} is {_shape(each.shape)}") for each in buffers if isinstance(each.span, Span)]


def _tested(condition: Expr) -> frozenset[Var | Load]:
    """What a condition may keep in bounds: the variables and the elements that it mentions."""
    return variables(condition) | frozenset(loads(condition))


def _check_inside(load: Load, where: _Place, guards: frozenset[Var | Load]) -> None:
    """The index is proved inside the buffer, or a select or `If` around it tests what the index is made of."""
    for axis, (entry, dim) in enumerate(zip(load.index, load.source.shape, strict=True)):
        inside = nonnegative(entry) and nonnegative(dim - entry - 1)
        if not inside and not (_tested(entry) & guards):
            raise TileError(
                f"axis {axis} of {load.source.name} has extent {dim}; the index {entry} is not proved inside it",
                load.span if isinstance(load.span, Span) else where.span,
                instead="loop extents no larger than the tile's, or T.if_then_else around a read that may be outside",
                against=_allocated(load.source),
            )


def _extent(checker: _Checker, expr: Expr, where: _Place, what: str) -> None:
    if expr.dtype is not DType.I64:
        raise TileError(f"{what} is {expr.dtype}, not i64", where.span)
    _expression(checker, expr, where)


def _declared(checker: _Checker, source: object, where: _Place) -> None:
    program = checker.program
    match source:
        case Buffer():
            known = source in program.buffers
        case View():
            known = source in program.views
        case Tensor():
            known = source in program.inputs
        case Place():
            known = source in program.places
        case _:
            known = False
    if not known and isinstance(source, View) and any(place.name == source.name for place in program.places):
        raise TileError(f"{source.name} is written by this kernel: it cannot be read", where.span)
    if not known:
        raise TileError(f"{getattr(source, 'name', source)} is not declared by {program.name}", where.span)


def _read(checker: _Checker, buffer: Buffer, where: _Place) -> None:
    if buffer.name not in checker.written:
        raise TileError(
            f"{buffer.name} is read here and nothing has written it",
            where.span,
            instead=f"T.clear({buffer.name}), T.fill or T.copy first",
        )


def _write(checker: _Checker, target: Buffer | View | Place, where: _Place) -> None:
    _declared(checker, target, where)
    if isinstance(target, Buffer):
        checker.written.add(target.name)


def _type(found: DType, target: Buffer | Place, where: _Place) -> None:
    if found is not target.dtype:
        raise TileError(f"a value of {found} for {target.name}, which is {target.dtype}", where.span)


def _without_ones(shape: tuple[Expr, ...]) -> tuple[Expr, ...]:
    return tuple(dim for dim in shape if not (isinstance(dim, Const) and dim.value == 1))


def _shape(shape: tuple[Expr, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
