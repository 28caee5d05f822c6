"""The trace in progress and what the author's text holds: handles of tiles and operands, slices, scopes.

Comes in: calls of the language. Goes out: statements appended to the innermost scope, each with the span of the
author's text. A value read from a tile may be used until that tile is written.
"""

import dis
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Var, apply, cast, const, reinterpret, walk
from tilecore.contract.spec import Place, Tensor, View, tensor_view
from tilecore.errors import TileError, user_frame, user_span
from tilecore.ir import Annotation, Assert, Buffer, For, Parallel, Stmt, Store, Tile
from tilecore.span import Span, span_of_frame
from tilecore.value import Reads, Value, assigned, check_size, described, extent, index, plain, reinterpreted


@dataclass(frozen=True, slots=True)
class TensorType:
    """`T.Tensor(shape, dtype)`: the annotation of a kernel parameter that is a whole tensor.

    `packed`: two 4-bit integers to a byte, the first in its low half, along the last axis: "int4" or "uint4". `dtype`
    is then the type of the elements as kernels see them.
    """

    shape: tuple[Expr, ...]
    dtype: DType
    packed: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """A tile buffer or an operand in the kernel's text. A tensor operand has a `source` to read, a `place` to write.

    A buffer may be seen in another shape of as many elements (`dims`), or its bits as another type as wide (`bits`).
    """

    source: Buffer | View | Place
    place: Place | None = None
    dims: tuple[Expr, ...] | None = None
    bits: DType | None = None

    @property
    def extents(self) -> tuple[Expr, ...]:
        """The shape as expressions."""
        return self.source.shape if self.dims is None else self.dims

    @property
    def shape(self) -> tuple[Value | int, ...]:
        """The extents: Python ints where they are known."""
        return tuple(plain(dim) for dim in self.extents)

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self.bits or self.source.dtype

    @property
    def data(self) -> "Handle":
        """The memory of a tensor, for `T.Tensor(shape, dtype, A.data)`: the same elements in another shape."""
        return self

    @property
    def is_seen_otherwise(self) -> bool:
        """Whether shape or type differ from those of the buffer."""
        return self.dims is not None or self.bits is not None

    def __getitem__(self, position: Any) -> Any:
        parts = self._parts(position)
        if any(isinstance(part, slice) for part in parts):
            kept = tuple(axis for axis, part in enumerate(parts) if isinstance(part, slice))
            return Region(self, self._tile(parts), kept)
        entries = self._entries(parts)
        reads: Reads = frozenset().union(*(entry.reads for entry in entries))
        if isinstance(self.source, Buffer):
            reads |= {(self.source.name, current("reading a tile").versions[self.source.name])}
        found = Value(Load(self.source, self.inner(tuple(entry.expr for entry in entries)), user_span()), reads)
        return found if self.bits is None else reinterpreted(found, self.bits)

    def inner(self, position: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """Where the element at `position` lies in the source."""
        return position if self.dims is None else reshaped_index(position, self.dims, self.source.shape)

    def __setitem__(self, position: Any, value: Any) -> None:
        tracer = current("an assignment to a tile")
        parts = self._parts(position)
        if any(isinstance(part, slice) for part in parts):
            _fail("a slice cannot be assigned", "T.copy(source, tile[…]) or T.fill(tile, value)")
        target = self.target("assigned")
        entries = self._entries(parts)
        stored = assigned(value, self.dtype)
        if self.bits is not None:
            stored = reinterpreted(stored, target.dtype)
        tracer.store(target, self.inner(tuple(entry.expr for entry in entries)), stored, entries)

    def __iter__(self) -> Iterator[Any]:
        _fail(f"{self.source.name} cannot be iterated", "`for i, j in T.Parallel(*tile.shape):` and tile[i, j]")

    def _refuse(self, *_: object) -> NoReturn:
        _fail(
            f"arithmetic of {self}, which is a whole tile",
            "`for i, j in T.Parallel(*tile.shape):` and elements, tile[i, j]",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __mod__ = __pow__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.extents))
        return f"{_noun(self.source)} {self.source.name}: {self.dtype}[{dims}]"

    def target(self, how: str) -> Buffer | Place:
        """What a write to this handle writes. TileError when it is a read-only view."""
        target = self.place or self.source
        if isinstance(target, View):
            _fail(f"{target.name} is an input: it cannot be {how}", "write a fragment or an output operand")
        return target

    def _parts(self, position: Any) -> tuple[Any, ...]:
        parts = position if isinstance(position, tuple) else (position,)
        if len(parts) != len(self.extents):
            wanted = f"{len(self.extents)} ax{'i' if len(self.extents) == 1 else 'e'}s"
            _fail(f"{self} has {wanted}, found {len(parts)} index{'es' if len(parts) != 1 else ''}", "one per axis")
        return parts

    def _entries(self, parts: tuple[Any, ...]) -> tuple[Value, ...]:
        return tuple(index(_counted(part, dim)) for part, dim in zip(parts, self.extents, strict=True))

    def _tile(self, parts: tuple[Any, ...]) -> Tile:
        if self.is_seen_otherwise:
            _fail(f"a slice of {self}, which is another tile seen otherwise", "T.copy it to a tile of its own first")
        origin: list[Expr] = []
        shape: list[Expr] = []
        for part, dim in zip(parts, self.source.shape, strict=True):
            if not isinstance(part, slice):
                origin.append(extent(_counted(part, dim)))
                shape.append(const(1))
                continue
            if part.step is not None:
                _fail("a slice of a tile has no step", "T.Parallel with tile[i, 2 * j]")
            start = const(0) if part.start is None else extent(_counted(part.start, dim))
            stop = dim if part.stop is None else extent(_counted(part.stop, dim))
            origin.append(start)
            shape.append(stop - start)
        return Tile(self.source, tuple(origin), tuple(shape))


def _counted(position: Any, dim: Expr) -> Any:
    """`position`; a negative Python number counts from the end of an axis, as Python does."""
    negative = isinstance(position, int) and not isinstance(position, bool) and position < 0
    return Value(dim + position) if negative else position


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A slice of a handle: a side of `T.copy`."""

    handle: Handle
    tile: Tile
    axes: tuple[int, ...]  # those that a slice goes along; a number picks from the others

    @property
    def source(self) -> Buffer | View | Place:
        """What it is a slice of."""
        return self.handle.source

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self.handle.dtype

    def __str__(self) -> str:
        return f"slice of {self.handle}"


def reshaped_index(position: tuple[Expr, ...], dims: tuple[Expr, ...], shape: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Where the element at `position` of a row-major `dims` lies in `shape`, of as many elements."""
    flat: Expr = const(0)
    for entry, dim in zip(position, dims, strict=True):
        flat = flat * dim + entry
    found: list[Expr] = []
    for dim in reversed(shape[1:]):
        found.append(flat % dim)
        flat = flat // dim
    return (flat, *reversed(found)) if shape else ()


@dataclass(slots=True, eq=False)  # two that look alike, one in the other, are two
class Scope:
    """A body being traced. A loop remembers the tile versions before it and values read then but used inside it.

    Inside `T.Parallel` a `T.If` is a guard of the stores in it.
    """

    kind: str  # "kernel", "loop", "parallel", "T.If" or "T.Else"
    span: Span
    body: list[Stmt] = field(default_factory=list)
    elementwise: bool = False
    axes: tuple[Var, ...] = ()  # of a T.Parallel
    guard: Value | None = None
    begin: int = 0  # statements of the body around it before a guarded one
    tested: tuple[int, "Scope"] | None = None  # statements before a T.Else may follow, and the scope of its T.If
    before: dict[str, int] = field(default_factory=dict)
    inside: dict[str, int] = field(default_factory=dict)
    carried: dict[str, TileError] = field(default_factory=dict)


class SignatureKnownError(Exception):
    """The tensors of a kernel are declared: raised at `T.Kernel` where that was all to be known."""


@dataclass(slots=True, eq=False)
class Eager:
    """A kernel that declares its tensors in its body. `constants` gives what `T.const` names, once it is known."""

    constants: Mapping[str, int] | None = None
    declared: dict[str, TensorType] = field(default_factory=dict)
    named: dict[str, None] = field(default_factory=dict)  # by T.const, in order
    made: list[Handle] = field(default_factory=list)  # by T.empty


@dataclass(frozen=True, slots=True)
class Part:
    """One `T.Kernel` of a function, traced."""

    grid: tuple[Var, ...]
    body: tuple[Stmt, ...]
    buffers: tuple[Buffer, ...]
    threads: Any
    annotations: tuple[Annotation, ...]
    span: Span


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
    split: Var | None = None  # the axis of the grid whose tasks `T.join` brings together
    parts: list[Part] = field(default_factory=list)
    annotations: list[Annotation] = field(default_factory=list)
    flags: set[str] = field(default_factory=set[str])  # buffers with what conditions inside T.Parallel were
    reducers: dict[str, str] = field(default_factory=dict)  # buffer → kind
    spread: set[Var] = field(default_factory=set[Var])  # axes that a `Parallel` of the program has
    vector_axes: dict[Var, Span] = field(default_factory=dict)  # axes of open T.Parallel loops that vectors run along
    handles: list[Handle] = field(default_factory=list)  # operands beside the parameters
    eager: Eager | None = None
    workspaces: list[Tensor] = field(default_factory=list)  # tensors that hand results from one T.Kernel to the next
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
        """Start a body. A parallel body takes stores, and loops over them, only."""
        self._check_whole()
        elementwise = bool(self.scopes) and self.scopes[-1].elementwise
        scope = Scope(kind, span, elementwise=elementwise or kind == "parallel")
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
        if self.scopes[-1].elementwise and not isinstance(stmt, Store | For | Parallel):
            _fail(
                f"T.{type(stmt).__name__.lower()} inside T.Parallel: it works on whole tiles",
                "T.serial for a loop that checks its elements; T.assert_(T.all_of(flags)) for a tile of them"
                if isinstance(stmt, Assert)
                else "T.Parallel over elements only; move this statement out of the loop",
            )
        self.scopes[-1].body.append(stmt)
        if isinstance(writes, Buffer):
            self.versions[writes.name] = self.tick()

    def store(
        self,
        target: Buffer | Place,
        position: tuple[Expr, ...],
        value: Value,
        used: tuple[Value, ...],
        update: str = "",
    ) -> None:
        """Append a store of one element, under the guards around it."""
        guards = [self._guard(level) for level, scope in enumerate(self.scopes) if scope.guard is not None]
        self.uses(value, *used, *guards)
        guard = None
        for test in guards:
            guard = test.expr if guard is None else apply("and", guard, test.expr)
        self.emit(Store(target, position, value.expr, user_span(), guard, update), writes=target)

    def _guard(self, level: int) -> Value:
        """The condition of a T.If inside T.Parallel, as it was where the T.If stands: once something that it read is
        written, flags of every point, which a tile holds.
        """
        scope, guard = self.scopes[level], self.scopes[level].guard
        assert guard is not None
        axes = tuple(axis for around in self.scopes[:level] for axis in around.axes)
        extents = tuple(axis.extent for axis in axes if axis.extent is not None)
        moving = any(isinstance(atom, Var) for dim in extents for atom in walk(dim))
        if moving or all(self.versions[name] == version for name, version in guard.reads):
            return guard
        if any(name in self.flags for name, _ in guard.reads):
            return guard
        flags = Buffer(self.unique("flags"), DType.BOOL, extents, "fragment", scope.span)
        self.buffers.append(flags)
        self.flags.add(flags.name)
        self.versions[flags.name] = self.tick()
        self.scopes[level - 1].body.insert(scope.begin, Store(flags, axes, guard.expr, scope.span))
        scope.guard = Value(Load(flags, axes, scope.span), frozenset({(flags.name, self.versions[flags.name])}))
        return scope.guard

    def finish(self, body: tuple[Stmt, ...], threads: Any, span: Span) -> None:
        """The end of a `T.Kernel`: what it allocated is gone."""
        part = Part(self.grid or (), body, tuple(self.buffers), threads, tuple(self.annotations), span)
        self.parts.append(part)
        self.buffers, self.annotations, self.grid = [], [], None

    def declare(self, name: str, value: Any, annotation: Any) -> Any:
        """A parameter declared in the body of a kernel: `A: T.Tensor(…)`."""
        if not isinstance(annotation, TensorType) or self.eager is None:
            return value
        self.eager.declared[name] = annotation
        return self.operand(name, annotation)

    def operand(self, name: str, kind: TensorType) -> Handle:
        """A new tensor operand."""
        handle = tensor_handle(name, kind)
        self.taken.add(name)
        self.add(handle)
        return handle

    def add(self, handle: Handle) -> None:
        """Take in an operand made by the kernel."""
        self.handles.append(handle)
        if isinstance(handle.source, View) and handle.place is not None:
            self.places[handle.source] = handle.place

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


def tensor_handle(name: str, kind: TensorType) -> Handle:
    """A tensor as an operand. TileError for a packed one with an odd last dim."""
    if not kind.packed:
        tensor = Tensor(name, kind.dtype, kind.shape)
        view = tensor_view(tensor)
        return Handle(view, Place(tensor, view.axes, view.axes))
    last = kind.shape[-1] if kind.shape else const(1)
    if not isinstance(last, Const) or last.value % 2:
        _fail(f"{name} is {kind.packed} with a last dim of {last}", "an even number: two elements share a byte")
    axes = tuple(Var(f"{name}_{i}", extent=dim) for i, dim in enumerate(kind.shape))
    tensor = Tensor(name, DType.U8, (*kind.shape[:-1], last // 2))
    byte = Load(tensor, (*axes[:-1], axes[-1] // 2))
    low = apply("shr", byte, cast((axes[-1] % 2) * 4, DType.U8))
    value = apply("bitand", low, const(15, DType.U8))
    if kind.packed == "int4":  # the sign is bit 3: up to bit 7 and down again
        moved = reinterpret(apply("shl", value, const(4, DType.U8)), DType.I8)
        value = apply("shr", moved, const(4, DType.I8))
    return Handle(View(name, axes, value))


_ACTIVE: ContextVar[Tracer | None] = ContextVar("tilecore_trace", default=None)


def current(what: str) -> Tracer:
    """The trace in progress. TileError when there is none."""
    tracer = _ACTIVE.get()
    if tracer is None:
        _fail(f"{what} outside of a trace", "tilecore.trace.trace(kernel, …): a kernel is not called directly")
    return tracer


def active() -> Tracer | None:
    """The trace in progress, where there is one."""
    return _ACTIVE.get()


@contextmanager
def tracing(tracer: Tracer) -> Generator[None, None, None]:
    """Make `tracer` the trace in progress."""
    token = _ACTIVE.set(tracer)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


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


def unpacked(frame: FrameType) -> int | None:
    """Into how many names the author's statement takes the result of this call apart; None where it does not."""
    following = next((item for item in dis.get_instructions(frame.f_code) if item.offset > frame.f_lasti), None)
    return following.arg if following is not None and following.opname == "UNPACK_SEQUENCE" else None


def allocate(shape: Any, dtype: DType, scope: str) -> Handle:
    """A new tile buffer, named after the variable it is assigned to."""
    tracer = current(f"T.alloc_{scope}")
    if not tracer.scopes:
        _fail("a tile allocated outside of T.Kernel", "`with T.Kernel(…) as …:` first")
    dims = tuple(extent(dim) for dim in (shape if isinstance(shape, tuple | list) else (shape,)))
    for dim in dims:
        if any(isinstance(atom, Var) for atom in walk(dim)):
            _fail(f"a tile extent is {dim}, which a loop or the grid changes", "numbers, or dims of tensors")
        if isinstance(dim, Const) and dim.value < 0:
            _fail(f"a tile extent is {dim.value}", "extents of at least 0")
    check_size(dims, dtype.row.bytes, "a tile")
    frame = user_frame()
    name = tracer.unique(names_assigned(frame, 1, scope)[0])
    buffer = Buffer(name, dtype, dims, scope, span_of_frame(frame))
    tracer.buffers.append(buffer)
    tracer.versions[name] = tracer.tick()
    return Handle(buffer)


def settled(handle: Handle) -> Handle:
    """`handle`; one that sees a buffer otherwise is copied to a buffer of its own first."""
    if not handle.is_seen_otherwise or not isinstance(handle.source, Buffer):
        return handle
    tracer, span = current("a tile seen otherwise"), user_span()
    buffer = Buffer(tracer.unique(handle.source.name), handle.dtype, handle.extents, handle.source.scope, span)
    tracer.buffers.append(buffer)
    tracer.versions[buffer.name] = tracer.tick()
    axes = tuple(Var(tracer.unique("i"), extent=dim) for dim in buffer.shape)
    value = handle[tuple(Value(axis) for axis in axes)]
    tracer.emit(Parallel(axes, (Store(buffer, axes, value.expr, span),), span), writes=buffer)
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


def written_tile(side: Any) -> Tile:
    """A slice, or an element (whose tile has no shape), as what a statement writes."""
    return _side(side, writes=True)


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
    if isinstance(side, Handle) and side.is_seen_otherwise:
        if writes:
            _fail(f"{side} is another tile seen otherwise", "stores of elements in T.Parallel, or a tile of its own")
        side = settled(side)
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
