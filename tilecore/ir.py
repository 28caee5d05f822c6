"""The tile program: what tracing makes and every pass, the interpreter and the backends read.

A `Program` is a grid of independent tasks over one body of statements. Statements work on whole tiles (`Copy`,
`Gemm`, `Fill`, `Reduce`) or, inside `Parallel`, on elements (`Store`). Expressions are `tilecore.contract.expr`; a
`Load` reads a `Buffer`, a `View` or a `Tensor`.

Bounds: a load of a View or Tensor outside its extents gives 0, and a store to a Place outside its extents is dropped,
so that the last tile of an axis needs no special text. A tile buffer is never indexed out of bounds.

Tile extents may be symbols listed in `Program.tunables` (from `T.auto`): inference and recommendation work on those;
the kernel is then traced once more with numbers in their place, and only such programs are lowered.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Sym, Var
from tilecore.contract.spec import Place, Tensor, View
from tilecore.span import Span


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tile of one task: `scope` "shared" (packed or staged data) or "fragment" (accumulators, row statistics)."""

    name: str
    dtype: DType
    shape: tuple[Expr, ...]
    scope: str
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangle of a source: `shape` elements from `origin`; leading axes of extent 1 may be dropped by the copy."""

    source: Buffer | View | Place
    origin: tuple[Expr, ...]
    shape: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """`dst` = `src`, casting to the type of `dst`. Axes of extent 1 in either tile are matched away from the left."""

    src: Tile
    dst: Tile
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Fill:
    """Every element of `dst` = `value`."""

    dst: Buffer
    value: Expr
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Gemm:
    """`c` (+)= `a` · `b` with either side transposed; `clear` overwrites `c`. Accumulates in the type of `c`."""

    a: Buffer
    b: Buffer
    c: Buffer
    transpose_a: bool = False
    transpose_b: bool = False
    clear: bool = False
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Reduce:
    """`dst` = `kind` of `src` over `axis`; joined with the old `dst` unless `clear`.

    Kinds are "sum", "prod", "min" and "max", which give NaN where any element is, and "fmax", a maximum of the numbers.
    """

    kind: str
    src: Buffer
    dst: Buffer
    axis: int
    clear: bool = True
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Store:
    """`target[index]` = `value`; only inside `Parallel`, or at statement level for a single element."""

    target: Buffer | Place
    index: tuple[Expr, ...]
    value: Expr
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Parallel:
    """`body` for every point of `axes`, in any order: no point reads what another writes."""

    axes: tuple[Var, ...]
    body: tuple[Store, ...]
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class For:
    """`body` for `var` = `start` … `var.extent` − 1 in order. `kind`: "serial", "unrolled" or "pipelined"."""

    var: Var
    start: Expr
    kind: str
    body: tuple["Stmt", ...]
    stages: int = 1
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class If:
    """`then` where the scalar bool `condition` holds, else `otherwise`."""

    condition: Expr
    then: tuple["Stmt", ...]
    otherwise: tuple["Stmt", ...] = ()
    span: Span | None = field(default=None, compare=False, repr=False)


Stmt = Copy | Fill | Gemm | Reduce | Store | Parallel | For | If


@dataclass(frozen=True, slots=True)
class Program:
    """One kernel: for every point of `grid` (any order, in parallel), `body` with its own `buffers`."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    views: tuple[View, ...]
    places: tuple[Place, ...]
    grid: tuple[Var, ...]
    buffers: tuple[Buffer, ...]
    body: tuple[Stmt, ...]
    tunables: tuple[Sym, ...] = ()
    threads: int | None = None
    span: Span | None = field(default=None, compare=False, repr=False)


def statements(body: tuple[Stmt, ...]) -> Iterator[Stmt]:
    """Every statement of `body`, outer before inner, in program order."""
    for stmt in body:
        yield stmt
        match stmt:
            case For() | Parallel():
                yield from statements(stmt.body)
            case If():
                yield from statements(stmt.then)
                yield from statements(stmt.otherwise)
            case _:
                pass
