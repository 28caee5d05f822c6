"""The tile program: what tracing makes and every pass, the interpreter and the backends read.

A `Program` is a grid of independent tasks over one body of statements. Statements work on whole tiles (`Copy`,
`Gemm`, `Fill`, `Reduce`) or, inside `Parallel`, on elements (`Store`). Expressions are `tilecore.contract.expr`; a
`Load` reads a `Buffer`, a `View` or a `Tensor`.

Bounds: a load of a View or Tensor outside its extents gives 0, and a store to a Place outside its extents is dropped,
so that the last tile of an axis needs no special text. A tile buffer is never indexed out of bounds.

Tile extents may be symbols listed in `Program.tunables` (from `T.auto`): inference and recommendation work on those;
the kernel is then traced once more with numbers in their place, and only such programs are lowered.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

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
    """`c` (+)= `a` · `b` with either side transposed; `clear` overwrites `c`. Accumulates in the type of `c`.

    `byte_block`, if not 0, permits to round `a` to bytes in blocks of so many steps of the depth.
    """

    a: Buffer
    b: Buffer
    c: Buffer
    transpose_a: bool = False
    transpose_b: bool = False
    clear: bool = False
    byte_block: int = 0
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Reduce:
    """`dst` = `kind` of `src` over `axis`; joined with the old `dst` unless `clear`.

    Kinds are "sum", "prod", "min" and "max", which give NaN where any element is, "fmax", a maximum of the numbers, and
    for integers "bitand", "bitor" and "bitxor".
    """

    kind: str
    src: Buffer
    dst: Buffer
    axis: int
    clear: bool = True
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Join:
    """`buffer` = `kind` of itself over all tasks that differ in the grid's `axis` alone; each of them gets the result.

    Those tasks run at the same time and meet here. Kinds are those of `Reduce`.
    """

    kind: str
    buffer: Buffer
    axis: Var
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class CumSum:
    """`dst` = the running sums of `src` along `axis`, from its end with `reverse`; `dst` may be `src`."""

    src: Buffer
    dst: Buffer
    axis: int
    reverse: bool = False
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Store:
    """`target[index]` = `value` where `guard` (if any) holds; inside `Parallel`, or at statement level for one element.

    `update` "add", "max" or "min" joins `value` with what stands in `target`, a Place, in one step that no other task
    or point comes between: many may update one element.
    """

    target: Buffer | Place
    index: tuple[Expr, ...]
    value: Expr
    span: Span | None = field(default=None, compare=False, repr=False)
    guard: Expr | None = None
    update: str = ""


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
class While:
    """`body` again and again while the scalar bool `condition`, which reads tile buffers, holds."""

    condition: Expr
    body: tuple["Stmt", ...]
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Print:
    """Write `message` and the values, or the elements of a whole buffer, to standard output: a tool for debugging."""

    message: str
    values: tuple[Expr, ...] | Buffer
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Assert:
    """The call fails with `message` unless the scalar bool `condition` holds; the statements after it still run."""

    condition: Expr
    message: str
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class If:
    """`then` where the scalar bool `condition` holds, else `otherwise`."""

    condition: Expr
    then: tuple["Stmt", ...]
    otherwise: tuple["Stmt", ...] = ()
    span: Span | None = field(default=None, compare=False, repr=False)


Stmt = Copy | Fill | Gemm | Reduce | Join | CumSum | Store | Parallel | For | While | If | Print | Assert


@dataclass(frozen=True, slots=True)
class Annotation:
    """One decision that the kernel's author took away from inference, and where: see `tilecore.infer`.

    `what` is "layout" of the buffer `subject`, "vector_axis" of the `Parallel` over variables `subject`,
    "register_tile" of the products into the buffer `subject`, "reference" for a running maximum `subject` that results
    do not depend on, or "tasks" (how many neighbours one thread takes at a
    time).
    """

    what: str
    subject: str
    value: str | int | tuple[int, int]
    span: Span | None = field(default=None, compare=False, repr=False)


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
    annotations: tuple[Annotation, ...] = ()


def statements(body: tuple[Stmt, ...]) -> Iterator[Stmt]:
    """Every statement of `body`, outer before inner, in program order."""
    for stmt in body:
        yield stmt
        match stmt:
            case For() | While() | Parallel():
                yield from statements(stmt.body)
            case If():
                yield from statements(stmt.then)
                yield from statements(stmt.otherwise)
            case _:
                pass


def with_bodies(stmt: Stmt, change: Callable[[tuple[Stmt, ...]], tuple[Stmt, ...]]) -> Stmt:
    """`stmt` with `change` applied to every body of statements that it has; bodies of `Parallel` are left alone."""
    match stmt:
        case For() | While():
            return replace(stmt, body=change(stmt.body))
        case If():
            return replace(stmt, then=change(stmt.then), otherwise=change(stmt.otherwise))
        case _:
            return stmt


def expressions(stmt: Stmt) -> Iterator[Expr]:
    """The scalar expressions of one statement, those of its bodies apart."""
    match stmt:
        case Copy():
            yield from (*stmt.src.origin, *stmt.dst.origin)
        case Fill():
            yield stmt.value
        case Store():
            yield from (*stmt.index, stmt.value, *(() if stmt.guard is None else (stmt.guard,)))
        case Parallel():
            yield from (axis.extent for axis in stmt.axes if axis.extent is not None)
        case For():
            yield stmt.start
            if stmt.var.extent is not None:
                yield stmt.var.extent
        case While() | If() | Assert():
            yield stmt.condition
        case Print():
            if isinstance(stmt.values, tuple):
                yield from stmt.values
        case Gemm() | Reduce() | Join() | CumSum():
            return


def updated_tensors(program: Program) -> tuple[Tensor, ...]:
    """Outputs that some statement updates: what they hold before the call counts."""
    stores = (stmt for stmt in statements(program.body) if isinstance(stmt, Store) and stmt.update)
    return tuple(dict.fromkeys(store.target.tensor for store in stores if isinstance(store.target, Place)))
