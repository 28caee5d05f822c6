"""Grid, loops, branches and checks of the tile language: what gives statements their order.

Comes in: extents and conditions. Goes out: scopes of the trace in progress, whose statements end up in one `For`,
`While`, `If` or `Parallel`; inside `T.Parallel`, guards of stores.
"""

import builtins
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from tilecore import ir
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Op, Var, const, substitute, variables
from tilecore.errors import TileError, user_frame, user_span
from tilecore.span import Span, span_of_frame
from tilecore.tracer import Handle, Scope, SignatureKnownError, Tracer, current, names_assigned, unpacked
from tilecore.value import Operand, Value, check_size, extent, index, lift, operate


class Kernel:
    """The grid: `with T.Kernel(x, y) as (i, j):` runs its body for every point, in any order and in parallel."""

    def __init__(self, *extents: Operand, split: int | None = None, threads: Any = None, **hints: Any) -> None:
        """`split` adds one more axis: that many tasks share each point, and `T.join` joins what they have found.

        With a split of 1 that axis is the number 0, and the program is the one without it. `threads` and `hints`
        (`prelude`, `cluster_dims`, …) are for GPUs; on a CPU they change nothing.
        """
        self.tracer = current("T.Kernel")
        self.span = user_span()
        if self.tracer.eager is not None and self.tracer.eager.constants is None:
            raise SignatureKnownError
        if self.tracer.grid is not None:
            _fail("a second T.Kernel in one kernel", "one T.Kernel per function; trace two functions")
        self.extents = [extent(size) for size in extents or (1,)]
        check_size(self.extents, 1, "a grid")
        self.split = split
        self.threads = threads
        self.scope: Scope | None = None

    def __enter__(self) -> Any:
        frame = user_frame()
        names = names_assigned(frame, len(self.extents) + (self.split is not None), "task")
        _check_unpacked(frame, len(names), "T.Kernel")
        if self.split is not None and self.split > 1:
            self.extents.append(extent(self.split))
        axes = [Var(self.tracer.unique(name), extent=size) for name, size in zip(names, self.extents, strict=False)]
        self.tracer.grid = tuple(axes)
        self.scope = self.tracer.open("kernel", span_of_frame(frame))
        values = tuple(Value(axis) for axis in axes)
        if self.split is not None and self.split > 1:
            self.tracer.split = axes[-1]
        elif self.split is not None:
            values = (*values, lift(0))
        return values[0] if len(values) == 1 and unpacked(frame) is None else values

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self.scope is not None:
            self.tracer.finish(self.tracer.close(self.scope), self.threads, self.span)


def Parallel(*extents: Operand, vector_axis: int | None = None, **hints: Any) -> Iterator[Any]:
    """`for i, j in T.Parallel(m, n):` the body, stores only, for every point in any order.

    `vector_axis` says along which of the axes vectors run; it is chosen otherwise. `hints` (`coalesced_width`, …) are
    for GPUs.
    """
    span = span_of_frame(user_frame())
    if vector_axis is not None and not -len(extents) <= vector_axis < len(extents):
        raise TileError(f"a T.Parallel of {len(extents)} axes has no axis {vector_axis}", span)
    return _parallel([extent(size) for size in extents], span, vector_axis)


def vectorized(start: Operand, stop: Operand | None = None) -> Iterator[Any]:
    """`for v in T.vectorized(n):` a `T.Parallel` over one axis."""
    first, last = (0, start) if stop is None else (start, stop)
    span = span_of_frame(user_frame())
    begin, end = index(first), index(last)
    points = _parallel([(end - begin).expr], span, 0)
    return points if stop is None else (begin + point for point in points)


def _parallel(extents: list[Expr], span: Span, vector_axis: int | None = None) -> Iterator[Any]:
    tracer = current("T.Parallel")
    names = names_assigned(user_frame(), len(extents), "i")
    _check_unpacked(user_frame(), len(names), "T.Parallel")
    axes = tuple(Var(tracer.unique(name), extent=size) for name, size in zip(names, extents, strict=True))
    scope = tracer.open("parallel", span)
    scope.axes = axes
    values = tuple(Value(axis) for axis in axes)
    whole, alone = False, len(values) == 1 and unpacked(user_frame()) is None
    try:
        yield values[0] if alone else values
        whole = True
    finally:
        if not whole:
            tracer.abandon(scope, "T.Parallel loop")
    body = tracer.close(scope)
    if vector_axis is not None:
        tracer.vector_axes[axes[vector_axis % len(axes)]] = span
    if tracer.scopes[-1].elementwise:
        tracer.emit(ir.Parallel(axes, body, span))  # type: ignore[arg-type]  # `_spread` takes it apart
        return
    for stmt in _spread(tracer, body, axes, span):
        tracer.emit(stmt)
    tracer.vector_axes.clear()


def _spread(tracer: Tracer, body: tuple[ir.Stmt, ...], axes: tuple[Var, ...], span: Span) -> Iterator[ir.Stmt]:
    """`body` for every point of `axes`: statements one after the other, each for all points, which are independent."""
    for loops, run in itertools.groupby(body, lambda stmt: not isinstance(stmt, ir.Store)):
        if not loops:
            yield from _pointwise(tracer, tuple(stmt for stmt in run if isinstance(stmt, ir.Store)), axes, span)
            continue
        for stmt in run:
            moving = [axis.name for expr in ir.expressions(stmt) for axis in axes if axis in variables(expr)]
            if moving:
                raise TileError(
                    f"the bounds of this loop differ between points of T.Parallel: they depend on {moving[0]}",
                    stmt.span,
                    instead=f"bounds without {moving[0]}, and `if` in the body of the loop",
                )
            if isinstance(stmt, ir.For):
                yield dataclasses.replace(stmt, body=tuple(_spread(tracer, stmt.body, axes, span)))
            elif isinstance(stmt, ir.Parallel):
                yield from _spread(tracer, stmt.body, (*axes, *stmt.axes), span)


def _pointwise(
    tracer: Tracer, stores: tuple[ir.Store, ...], axes: tuple[Var, ...], span: Span
) -> Iterator[ir.Stmt]:  # fmt: skip
    """One `Parallel` with axes of its own, and a reduction for each store to a reducer."""
    own = tuple(_own(tracer, axis) for axis in axes)
    fresh: dict[Expr, Expr] = dict(zip(axes, own, strict=True))
    stores = tuple(
        dataclasses.replace(
            store,
            index=tuple(substitute(entry, fresh) for entry in store.index),
            value=substitute(store.value, fresh),
            guard=None if store.guard is None else substitute(store.guard, fresh),
        )
        for store in stores
    )
    for axis, place in zip(axes, own, strict=True):
        if axis in tracer.vector_axes:
            names = ",".join(each.name for each in own)
            note = ir.Annotation("vector_axis", names, own.index(place), tracer.vector_axes[axis])
            tracer.annotations.append(note)
    plain = tuple(store for store in stores if not _reduces(tracer, store, own))
    if plain:
        yield ir.Parallel(own, plain, span)
    for store in stores:
        if store not in plain:
            yield from _reduced_into(tracer, store, own)


def _own(tracer: Tracer, axis: Var) -> Var:
    """`axis` where it is used first, after that another of its extent: no two loops share a variable."""
    if axis not in tracer.spread:
        tracer.spread.add(axis)
        return axis
    return Var(tracer.unique(axis.name), extent=axis.extent)


def _reduces(tracer: Tracer, store: ir.Store, axes: tuple[Var, ...]) -> builtins.bool:
    """Whether a store to a reducer leaves out one axis: every point along it adds to one element."""
    return (
        store.target.name in tracer.reducers
        and len(store.index) == len(axes) - 1
        and [entry for entry in axes if entry in store.index] == list(store.index)
    )


def _reduced_into(tracer: Tracer, store: ir.Store, axes: tuple[Var, ...]) -> Iterator[ir.Stmt]:
    """`r[i] += value` over (i, j), as a tile of values and its reduction over j."""
    kind = tracer.reducers[store.target.name]
    own = Load(store.target, store.index)
    operation = store.value
    joins = isinstance(operation, Op) and operation.name == REDUCERS[kind]
    arguments: tuple[Expr, ...] = operation.args if isinstance(operation, Op) and joins else (operation, operation)
    if own not in arguments or not isinstance(store.target, ir.Buffer):
        raise TileError(
            f"{store.target.name} is a reducer: each point joins one value with it", store.span,
            instead=f"{store.target.name}[…] += value" if kind == "sum" else f"T.{kind}({store.target.name}[…], value)",
        )  # fmt: skip
    value = arguments[1] if arguments[0] == own else arguments[0]
    shape = tuple(axis.extent for axis in axes if axis.extent is not None)
    tile = ir.Buffer(tracer.unique(f"{store.target.name}_values"), store.target.dtype, shape, "fragment", store.span)
    tracer.buffers.append(tile)
    tracer.versions[tile.name] = tracer.tick()
    written = ir.Store(tile, axes, value, store.span, store.guard)
    if store.guard is not None:
        yield ir.Fill(tile, const({"sum": 0.0, "max": -math.inf, "min": math.inf}[kind], tile.dtype), store.span)
    yield ir.Parallel(axes, (written,), store.span)
    missing = next(number for number, axis in enumerate(axes) if axis not in store.index)
    yield ir.Reduce(kind, tile, store.target, missing, False, store.span)


REDUCERS = {"sum": "add", "max": "max", "min": "min"}


def Pipelined(start: Operand, stop: Operand | None = None, num_stages: int = 2, **hints: Any) -> Iterator[Value]:
    """A loop in order whose copies run `num_stages` iterations ahead of their use. `hints` are for GPUs."""
    return _loop(start, stop, "pipelined", builtins.max(1, num_stages))


def Persistent(domain: Sequence[Operand], wave_size: Operand, task: Operand, group_size: Any = None) -> Iterator[Any]:
    """`for x, y in T.Persistent([m, n], tasks, t):` the points of [m, n] that task `t` of `tasks` does, in order.

    They are dealt out one by one, the first axis moving fastest. `group_size` is for the caches of GPUs.
    """
    total: Any = 1
    for size in domain:
        total = total * size
    turns = (total - index(task) + wave_size - 1) // wave_size
    return (_point(domain, turn * wave_size + task) for turn in _loop(turns, None, "serial", 1))


def _point(domain: Sequence[Operand], number: Value) -> Any:
    found: list[Value] = []
    for size in domain[:-1]:
        found.append(number % size)
        number = number // size
    return (*found, number) if found else number


def serial(
    start: Operand, stop: Operand | None = None, step: Operand | None = None, **hints: Any
) -> Iterator[Value]:  # fmt: skip
    """A loop in order."""
    if step is None:
        return _loop(start, stop, "serial", 1)
    return _stepped(start, stop, step, "serial")


def unroll(
    start: Operand, stop: Operand | None = None, step: Operand | None = None, **hints: Any
) -> Iterator[Value]:  # fmt: skip
    """A loop in order, written out by the back end."""
    if step is None:
        return _loop(start, stop, "unrolled", 1)
    return _stepped(start, stop, step, "unrolled")


def grid(*extents: Operand) -> Iterator[Any]:
    """`for i, j in T.grid(m, n):` one loop in order inside another."""
    alone = len(extents) == 1 and unpacked(user_frame()) is None
    return (point[0] if alone else point for point in _nested(extents))


def _nested(extents: Sequence[Operand]) -> Iterator[tuple[Value, ...]]:
    if not extents:
        yield ()
        return
    for first in _loop(extents[0], None, "serial", 1):
        for others in _nested(extents[1:]):
            yield (first, *others)


Serial, Unroll, Vectorized = serial, unroll, vectorized


def _stepped(start: Operand, stop: Operand | None, step: Operand, kind: str) -> Iterator[Value]:
    first, last = (0, start) if stop is None else (start, stop)
    if isinstance(step, int) and step < 1:
        _fail(f"a loop with a step of {step}", "a step of at least 1")
    begin, stride = index(first), index(step)
    return (begin + turn * stride for turn in _loop((index(last) - begin + stride - 1) // stride, None, kind, 1))


def _loop(start: Operand, stop: Operand | None, kind: str, stages: int) -> Iterator[Value]:
    first, last = (0, start) if stop is None else (start, stop)
    bounds = index(first), index(last)
    tracer = current(f"a {kind} loop")
    tracer.uses(*bounds)
    begin, end = (bound.expr for bound in bounds)
    span = user_span()
    if isinstance(begin, Const) and begin.value:  # counted from 0, so that indices are proved inside tiles
        return (bounds[0] + turn for turn in _iterations(const(0), end - begin, kind, stages, span))
    return _iterations(begin, end, kind, stages, span)


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
        begin = len(self.tracer.scopes[-1].body) if self.tracer.scopes else 0
        self.scope = self.tracer.open("T.If", user_span())
        if self.scope.elementwise:
            self.scope.guard, self.scope.begin = self.condition, begin
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self.scope is not None:
            body = self.tracer.close(self.scope)
            around = self.tracer.scopes[-1]
            if self.scope.elementwise:
                around.body.extend(body)
                around.tested = (len(around.body), self.scope)
            elif self.condition.expr == const(True):  # known while tracing: no condition at all
                around.body.extend(body)
            else:
                self.tracer.emit(ir.If(self.condition.expr, body, (), self.scope.span))


class Else:
    """The other side of the `T.If` just before it."""

    def __init__(self) -> None:
        self.tracer = current("T.Else")
        around = self.tracer.scopes[-1] if self.tracer.scopes else None
        last = around.body[-1] if around is not None and around.body else None
        self.condition: ir.If | None = None
        self.tested: Scope | None = None  # the T.If inside T.Parallel that this is the other side of
        if around is not None and around.elementwise and around.tested and around.tested[0] == len(around.body):
            self.tested = around.tested[1]
        elif isinstance(last, ir.If) and not last.otherwise:
            self.condition = last
        else:
            _fail("T.Else without a T.If just before it", "`with T.If(condition):` first, on the same level")
        self.scope: Scope | None = None

    def __enter__(self) -> Self:
        self.scope = self.tracer.open("T.Else", user_span())
        if self.tested is not None and self.tested.guard is not None:
            self.scope.guard, self.scope.begin = operate("not", self.tested.guard), self.tested.begin
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None or self.scope is None:
            return
        otherwise = self.tracer.close(self.scope)
        around = self.tracer.scopes[-1]
        if self.condition is None:
            around.body.extend(otherwise)
        else:
            around.body[-1] = dataclasses.replace(self.condition, otherwise=otherwise)


class While:
    """`with T.While(condition):` runs its statements again and again while the condition, read anew, holds."""

    def __init__(self, condition: Operand) -> None:
        self.tracer = current("T.While")
        self.condition = lift(condition)
        if self.condition.dtype is not DType.BOOL:
            _fail(f"the condition is {self.condition.dtype}", "a comparison: T.While(x != 0)")
        if self.tracer.scopes and self.tracer.scopes[-1].elementwise:
            _fail("a T.While inside T.Parallel", "T.While around T.Parallel, or T.serial with `if` in its body")
        self.tracer.uses(self.condition)
        self.scope: Scope | None = None

    def __enter__(self) -> Self:
        self.scope = self.tracer.open("loop", user_span())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self.scope is not None:
            body = self.tracer.close(self.scope)
            self.tracer.emit(ir.While(self.condition.expr, body, self.scope.span))


def assert_(condition: Operand, message: str = "the assertion does not hold") -> None:
    """The call of the kernel fails with `message` and this place unless `condition` holds."""
    tracer, test = current("T.assert_"), lift(condition)
    if test.dtype is not DType.BOOL:
        _fail(f"the condition is {test.dtype}", "a comparison: T.assert_(x != 0, message)")
    tracer.uses(test)
    tracer.emit(ir.Assert(test.expr, str(message), user_span()))


device_assert = assert_


def assume(condition: Operand) -> None:
    """What the author knows to hold. Nothing is made of it: `T.assert_` checks it."""
    if lift(condition).dtype is not DType.BOOL:
        _fail(f"the condition is {lift(condition).dtype}", "a comparison: T.assume(x >= 0)")


def get_block_binding(axis: int = 0) -> Value:
    """The index of this task along one axis of `T.Kernel`, as `with T.Kernel(…) as …` names it."""
    return get_block_bindings()[axis]


def get_block_bindings() -> tuple[Value, ...]:
    """The indices of this task along every axis of `T.Kernel`."""
    grid = current("T.get_block_binding").grid
    if grid is None:
        _fail("T.get_block_binding outside of T.Kernel", "`with T.Kernel(…) as …:` first")
    return tuple(Value(axis) for axis in grid)


def print(*values: Any, msg: str = "") -> None:
    """Write numbers, or all elements of one tile, to standard output when the kernel runs: for debugging."""
    tracer = current("T.print")
    texts = [value for value in values if isinstance(value, str)]
    others = [value for value in values if not isinstance(value, str)]
    message = " ".join([msg, *texts]).strip()
    if len(others) == 1 and isinstance(others[0], Handle) and isinstance(others[0].source, ir.Buffer):
        tracer.emit(ir.Print(message, others[0].source, user_span()))
        return
    numbers = tuple(lift(value) for value in others)
    tracer.uses(*numbers)
    tracer.emit(ir.Print(message, tuple(number.expr for number in numbers), user_span()))


def _check_unpacked(frame: FrameType, count: int, what: str) -> None:
    wanted = unpacked(frame)
    if wanted is not None and wanted != count:
        _fail(f"{what} of {count} extents and {wanted} names", "one name for each extent")


def _fail(message: str, instead: str) -> NoReturn:
    raise TileError(message, user_span(), instead=instead)
