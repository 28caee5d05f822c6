"""Tracing: a kernel, an ordinary Python function, is run once with symbolic values and leaves a `Program`.

Comes in: the function, its operands (logical views and places, or tensors) and, for `T.auto` parameters, numbers or
nothing. Goes out: a verified `Program` in which every statement has the span of the author's text. Names of buffers and
variables are those the author assigned to, made unique.
"""

import dis
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Sym, Var, const, walk
from tilecore.contract.spec import Place, Tensor, View, tensor_view
from tilecore.errors import TileError, user_frame, user_span
from tilecore.ir import Buffer, For, If, Parallel, Program, Stmt, Store, Tile
from tilecore.span import Span, span_of_frame
from tilecore.value import Reads, Value, assigned, described, extent, index, plain
from tilecore.verify import verify


class Auto:
    """The type of `T.auto`: a tile extent left to recommendation."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "T.auto"


AUTO = Auto()


@dataclass(frozen=True, slots=True)
class TensorType:
    """`T.Tensor(shape, dtype)`: the annotation of a kernel parameter that is a whole tensor."""

    shape: tuple[Expr, ...]
    dtype: DType


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """A tile buffer or an operand in the kernel's text. A tensor operand has a `source` to read, a `place` to write."""

    source: Buffer | View | Place
    place: Place | None = None

    @property
    def shape(self) -> tuple[Value | int, ...]:
        """The extents: Python ints where they are known."""
        return tuple(plain(dim) for dim in self.source.shape)

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self.source.dtype

    def __getitem__(self, position: Any) -> Any:
        parts = self._parts(position)
        if any(isinstance(part, slice) for part in parts):
            return Region(self, self._tile(parts))
        entries = tuple(index(part) for part in parts)
        reads: Reads = frozenset().union(*(entry.reads for entry in entries))
        if isinstance(self.source, Buffer):
            reads |= {(self.source.name, current("reading a tile").versions[self.source.name])}
        return Value(Load(self.source, tuple(entry.expr for entry in entries), user_span()), reads)

    def __setitem__(self, position: Any, value: Any) -> None:
        tracer = current("an assignment to a tile")
        parts = self._parts(position)
        if any(isinstance(part, slice) for part in parts):
            _fail("a slice cannot be assigned", "T.copy(source, tile[…]) or T.fill(tile, value)")
        target = self.target("assigned")
        entries = tuple(index(part) for part in parts)
        stored = assigned(value, target.dtype)
        tracer.uses(stored, *entries)
        tracer.emit(Store(target, tuple(entry.expr for entry in entries), stored.expr, user_span()), writes=target)

    def __iter__(self) -> Iterator[Any]:
        _fail(f"{self.source.name} cannot be iterated", "`for i, j in T.Parallel(*tile.shape):` and tile[i, j]")

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.source.shape))
        return f"{_noun(self.source)} {self.source.name}: {self.dtype}[{dims}]"

    def target(self, how: str) -> Buffer | Place:
        """What a write to this handle writes. TileError when it is a read-only view."""
        target = self.place or self.source
        if isinstance(target, View):
            _fail(f"{target.name} is an input: it cannot be {how}", "write a fragment or an output operand")
        return target

    def _parts(self, position: Any) -> tuple[Any, ...]:
        parts = position if isinstance(position, tuple) else (position,)
        if len(parts) != len(self.source.shape):
            wanted = f"{len(self.source.shape)} ax{'i' if len(self.source.shape) == 1 else 'e'}s"
            _fail(f"{self} has {wanted}, found {len(parts)} index{'es' if len(parts) != 1 else ''}", "one per axis")
        return parts

    def _tile(self, parts: tuple[Any, ...]) -> Tile:
        origin: list[Expr] = []
        shape: list[Expr] = []
        for part, dim in zip(parts, self.source.shape, strict=True):
            if not isinstance(part, slice):
                origin.append(extent(part))
                shape.append(const(1))
                continue
            if part.step is not None:
                _fail("a slice of a tile has no step", "T.Parallel with tile[i, 2 * j]")
            start = const(0) if part.start is None else extent(part.start)
            stop = dim if part.stop is None else extent(part.stop)
            origin.append(start)
            shape.append(stop - start)
        return Tile(self.source, tuple(origin), tuple(shape))


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A slice of a handle: a side of `T.copy`."""

    handle: Handle
    tile: Tile

    @property
    def source(self) -> Buffer | View | Place:
        """What it is a slice of."""
        return self.handle.source

    def __str__(self) -> str:
        return f"slice of {self.handle}"


@dataclass(slots=True)
class Scope:
    """A body being traced. A loop remembers the tile versions before it and values read then but used inside it."""

    kind: str  # "kernel", "loop", "parallel", "T.If" or "T.Else"
    span: Span
    body: list[Stmt] = field(default_factory=list)
    before: dict[str, int] = field(default_factory=dict)
    inside: dict[str, int] = field(default_factory=dict)
    carried: dict[str, TileError] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Tracer:
    """The state of one trace. It lives from the call of the kernel to its return and is seen by no pass."""

    kernel: str
    span: Span
    taken: set[str]
    places: dict[View, Place] = field(default_factory=dict)
    scopes: list[Scope] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    versions: dict[str, int] = field(default_factory=dict)
    clock: int = 0
    grid: tuple[Var, ...] | None = None
    body: tuple[Stmt, ...] = ()
    threads: int | None = None
    broken: TileError | None = None

    def unique(self, name: str) -> str:
        """`name`, or `name1`, `name2`, …: names of buffers and variables are distinct in a program."""
        candidate, count = name, 0
        while candidate in self.taken:
            count += 1
            candidate = f"{name}{count}"
        self.taken.add(candidate)
        return candidate

    def open(self, kind: str, span: Span) -> Scope:
        """Start a body. A parallel body takes stores only."""
        self._check_whole()
        if self.scopes and self.scopes[-1].kind == "parallel":
            outer = self.scopes[-1].span
            raise TileError(
                f"a {kind} inside T.Parallel (line {outer.line})",
                span,
                instead="one T.Parallel over all axes; T.if_then_else in place of T.If; loops around T.Parallel",
            )
        scope = Scope(kind, span)
        if kind == "loop":
            scope.before = dict(self.versions)
            self.versions = {name: self.tick() for name in self.versions}
            scope.inside = dict(self.versions)
        self.scopes.append(scope)
        return scope

    def close(self, scope: Scope) -> tuple[Stmt, ...]:
        """End a body and give its statements."""
        self._check_whole()
        self.scopes.remove(scope)
        for name, version in scope.inside.items():
            if self.versions[name] == version:
                self.versions[name] = scope.before[name]
            elif name in scope.carried:
                raise scope.carried[name]
        return tuple(scope.body)

    def tick(self) -> int:
        """A number for the state of a tile that no other state has."""
        self.clock += 1
        return self.clock

    def emit(self, stmt: Stmt, *, writes: Buffer | View | Place | None = None) -> None:
        """Append `stmt` to the innermost body and note what it writes."""
        self._check_whole()
        if not self.scopes:
            _fail("a statement outside of T.Kernel", "`with T.Kernel(…) as …:` around the body of the kernel")
        if self.scopes[-1].kind == "parallel" and not isinstance(stmt, Store):
            _fail(
                f"T.{type(stmt).__name__.lower()} inside T.Parallel: it works on whole tiles",
                "T.Parallel over elements only; move this statement out of the loop",
            )
        self.scopes[-1].body.append(stmt)
        if isinstance(writes, Buffer):
            self.versions[writes.name] = self.tick()

    def uses(self, *values: Value) -> None:
        """Refuse values read from a tile that was written since, by a later iteration of a loop in between too."""
        for value in values:
            for name, version in sorted(value.reads):
                if self.versions[name] == version:
                    continue
                read = next(
                    (node for node in walk(value.expr) if isinstance(node, Load) and node.source.name == name), None
                )
                line = f" on line {read.span.line}" if read is not None and isinstance(read.span, Span) else ""
                error = TileError(
                    f"this value was read from {name}{line}, and {name} is written before it is used here",
                    user_span(),
                    instead="read it again here, or keep the old value in another fragment",
                )
                loop = next((scope for scope in self.scopes if scope.before.get(name) == version), None)
                if loop is None:
                    raise error
                loop.carried.setdefault(name, error)

    def abandon(self, scope: Scope, what: str) -> None:
        """A loop body was left early: remembered, because an error raised while a generator closes would be lost."""
        self.broken = self.broken or TileError(
            f"this {what} was left by break, return or an error: a traced loop body runs exactly once",
            scope.span,
            instead="`with T.If(condition):` around the rest of the body",
        )

    def _check_whole(self) -> None:
        if self.broken is not None:
            raise self.broken


_ACTIVE: ContextVar[Tracer | None] = ContextVar("tilecore_trace", default=None)


def current(what: str) -> Tracer:
    """The trace in progress. TileError when there is none."""
    tracer = _ACTIVE.get()
    if tracer is None:
        _fail(f"{what} outside of a trace", "tilecore.trace.trace(kernel, …): a kernel is not called directly")
    return tracer


def trace(
    kernel: Callable[..., None],
    *,
    inputs: tuple[Tensor, ...] = (),
    operands: Mapping[str, Any] | None = None,
    extents: Mapping[str, int] | None = None,
    debug: bool = False,
) -> Program:
    """The program of `kernel`.

    `operands` gives parameters by name: a View, Place or Tensor, a tuple of them, or any object of the library's own
    (a score, an epilogue), passed as it is; parameters annotated `T.Tensor(…)` need none. `inputs` are the physical
    tensors that views load from. `extents` gives a number for every `T.auto` parameter; None leaves them symbolic.
    TileError for a wrong kernel; `debug` keeps the front end's own frames in its traceback.
    """
    try:
        return _trace(kernel, inputs, dict(operands or {}), extents)
    except TileError as error:
        if debug:
            raise
        raise error.with_traceback(None) from None


def _trace(
    kernel: Callable[..., None],
    inputs: tuple[Tensor, ...],
    operands: dict[str, Any],
    extents: Mapping[str, int] | None,
) -> Program:
    code = kernel.__code__
    span = Span(code.co_filename, code.co_firstlineno, 0, code.co_firstlineno, 0)
    arguments, tunables = _arguments(kernel, span, operands, extents)
    handles = [handle for argument in arguments.values() for handle in _handles(argument)]
    tensors = list(inputs)
    for handle in handles:
        if handle.place is not None:
            tensors.append(handle.place.tensor)
    taken = {handle.source.name for handle in handles} | {tensor.name for tensor in tensors}
    taken |= {sym.name for tensor in tensors for dim in tensor.shape for sym in walk(dim) if isinstance(sym, Sym)}
    for tunable in tunables:
        if tunable.name in taken:
            raise TileError(f"{tunable.name} is T.auto, and a tensor or a dynamic extent has that name", span)
    tracer = Tracer(kernel.__name__, span, taken | {tunable.name for tunable in tunables})
    tracer.places.update(
        {handle.source: handle.place for handle in handles if isinstance(handle.source, View) and handle.place}
    )
    token = _ACTIVE.set(tracer)
    try:
        kernel(**arguments)
    finally:
        _ACTIVE.reset(token)
    if tracer.broken is not None:
        raise tracer.broken
    if tracer.grid is None:
        raise TileError(f"{kernel.__name__} has no grid", span, instead="`with T.Kernel(…) as …:` around its body")
    program = _program(tracer, inputs, handles, tunables)
    verify(program)
    return program


def _arguments(
    kernel: Callable[..., None], span: Span, operands: dict[str, Any], extents: Mapping[str, int] | None
) -> tuple[dict[str, Any], tuple[Sym, ...]]:
    arguments: dict[str, Any] = {}
    tunables: list[Sym] = []
    numbers = dict(extents or {})
    for name, parameter in inspect.signature(kernel, eval_str=True).parameters.items():
        if name in operands:
            arguments[name] = _wrapped(operands.pop(name))
        elif isinstance(parameter.annotation, TensorType):
            kind = parameter.annotation
            arguments[name] = _wrapped(Tensor(name, kind.dtype, kind.shape))
        elif name in numbers:
            arguments[name] = int(numbers.pop(name))
        elif isinstance(parameter.default, Auto):
            if extents is not None:
                raise TileError(f"no extent for {name}, which is T.auto", span, instead=f'extents={{"{name}": 64, …}}')
            tunables.append(Sym(name))
            arguments[name] = Value(Sym(name))
        elif parameter.default is parameter.empty:
            raise TileError(
                f"no operand for the parameter {name} of {kernel.__name__}",
                span,
                instead=f'operands={{"{name}": …}}, or the annotation {name}: T.Tensor(shape, dtype)',
            )
    unknown = ", ".join(sorted([*operands, *numbers]))
    if unknown:
        raise TileError(f"{kernel.__name__} has no parameter {unknown}", span)
    return arguments, tuple(tunables)


def _wrapped(operand: Any) -> Any:
    match operand:
        case View() | Place():
            return Handle(operand)
        case Tensor():
            view = tensor_view(operand)
            return Handle(view, Place(operand, view.axes, view.axes))
        case tuple():
            return tuple(_wrapped(part) for part in operand)
        case _:
            return operand


def _handles(argument: Any) -> Iterator[Handle]:
    if isinstance(argument, Handle):
        yield argument
    elif isinstance(argument, tuple):
        for part in argument:
            yield from _handles(part)


def _program(tracer: Tracer, inputs: tuple[Tensor, ...], handles: list[Handle], tunables: tuple[Sym, ...]) -> Program:
    """A tensor operand that is written is an output, any other an input."""
    written = _written(tracer.body)
    places: list[Place] = []
    views: list[View] = []
    tensors = list(inputs)
    for handle in handles:
        if isinstance(handle.source, Place):
            places.append(handle.source)
        elif handle.place is not None and handle.place in written:
            places.append(handle.place)
        elif isinstance(handle.source, View):
            views.append(handle.source)
            if handle.place is not None and handle.place.tensor not in tensors:
                tensors.append(handle.place.tensor)
    return Program(
        name=tracer.kernel,
        inputs=tuple(tensors),
        outputs=tuple(dict.fromkeys(place.tensor for place in places)),
        views=tuple(views),
        places=tuple(places),
        grid=tracer.grid or (),
        buffers=tuple(tracer.buffers),
        body=tracer.body,
        tunables=tunables,
        threads=tracer.threads,
        span=tracer.span,
    )


def _written(body: tuple[Stmt, ...]) -> set[Place]:
    found: set[Place] = set()
    for stmt in body:
        match stmt:
            case Parallel() | For():
                found |= _written(stmt.body)
            case If():
                found |= _written(stmt.then) | _written(stmt.otherwise)
            case Store() if isinstance(stmt.target, Place):
                found.add(stmt.target)
            case _:
                target = getattr(getattr(stmt, "dst", None), "source", None)
                if isinstance(target, Place):
                    found.add(target)
    return found


def names_assigned(frame: FrameType, count: int, default: str) -> tuple[str, ...]:
    """The `count` names that the author's statement binds to the result of the call in progress, read from its code."""
    code = dis.get_instructions(frame.f_code)
    names: list[str] = []
    for instruction in (item for item in code if item.offset > frame.f_lasti):
        if instruction.opname == "UNPACK_SEQUENCE" and not names and instruction.arg == count:
            continue
        if not instruction.opname.startswith("STORE_") or len(names) >= count:
            break
        bound = instruction.argval
        names.extend(bound if isinstance(bound, tuple) else [str(bound)])
    good = [name if name.isidentifier() and name != "_" else default for name in names[:count]]
    return tuple(good) + (default,) * (count - len(good))


def allocate(shape: Any, dtype: DType, scope: str) -> Handle:
    """A new tile buffer, named after the variable it is assigned to."""
    tracer = current(f"T.alloc_{scope}")
    if not tracer.scopes:
        _fail("a tile allocated outside of T.Kernel", "`with T.Kernel(…) as …:` first")
    dims = tuple(extent(dim) for dim in (shape if isinstance(shape, tuple | list) else (shape,)))
    for dim in dims:
        if isinstance(dim, Const) and dim.value < 0:
            _fail(f"a tile extent is {dim.value}", "extents of at least 0")
    frame = user_frame()
    name = tracer.unique(names_assigned(frame, 1, scope)[0])
    buffer = Buffer(name, dtype, dims, scope, span_of_frame(frame))
    tracer.buffers.append(buffer)
    tracer.versions[name] = tracer.tick()
    return Handle(buffer)


def tiles_of(source: Any, target: Any) -> tuple[Tile, Tile]:
    """Both sides of a copy as tiles. A bare index is an origin: its extents come from the other side, aligned right."""
    read, write = _side(source, writes=False), _side(target, writes=True)
    if read.shape and write.shape:
        return read, write
    if not read.shape and not write.shape:
        _fail("neither side of this copy says how large it is", "a whole tile or a slice on one side")
    known = write.shape or read.shape
    if not read.shape:
        return Tile(read.source, read.origin, _aligned(known, read)), write
    return read, Tile(write.source, write.origin, _aligned(known, write))


def _aligned(shape: tuple[Expr, ...], tile: Tile) -> tuple[Expr, ...]:
    rank = len(tile.origin)
    extra = len(shape) - rank
    if extra > 0 and any(dim != const(1) for dim in shape[:extra]):
        dims = ", ".join(map(str, shape))
        _fail(f"a tile of [{dims}] does not fit {tile.source.name}, which has {rank} axes", "a slice on both sides")
    return (const(1),) * max(-extra, 0) + shape[max(extra, 0) :]


def _side(side: Any, *, writes: bool) -> Tile:
    tracer = current("T.copy")
    if isinstance(side, Value) and isinstance(side.expr, Load):
        tracer.uses(side)
        origin, source = side.expr.index, side.expr.source
        handle = Handle(source, tracer.places.get(source) if isinstance(source, View) else None)  # type: ignore[arg-type]
        return Tile(handle.target("copied to") if writes else handle.source, origin, ())
    if isinstance(side, Region):
        source = side.handle.target("copied to") if writes else side.handle.source
        return Tile(source, side.tile.origin, side.tile.shape)
    if not isinstance(side, Handle):
        _fail(f"expected a tile, found {described(side)}", "a buffer, an operand indexed at its origin, or a slice")
    source = side.target("copied to") if writes else side.source
    return Tile(source, (const(0),) * len(source.shape), source.shape)


def _noun(source: Buffer | View | Place) -> str:
    match source:
        case Buffer():
            return source.scope
        case View():
            return "view"
        case Place():
            return "output"


def _fail(message: str, instead: str) -> NoReturn:
    raise TileError(message, user_span(), instead=instead)
