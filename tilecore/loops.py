"""The loop program: what lowering makes of a tile program and what a CPU printer reads.

Every load and store addresses flat memory (`Memory`, one element offset). Statements are scalar loops, vector loops,
the register-tile product and panel packing; nothing here knows C.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Var
from tilecore.span import Span
from tilecore.target import RegisterTile


@dataclass(frozen=True, slots=True)
class Memory:
    """Flat memory of `size` elements: an input, an output (both by position) or a piece of the task's scratch."""

    name: str
    dtype: DType
    size: Expr
    kind: str  # "input", "output" or "scratch"
    position: int = 0

    @property
    def shape(self) -> tuple[Expr, ...]:
        """One axis: the element offset."""
        return (self.size,)


@dataclass(frozen=True, slots=True)
class Let:
    """A name for a value in the statements that follow; inside a vector loop, for one value per point."""

    var: Var
    value: Expr


@dataclass(frozen=True, slots=True)
class Loop:
    """`body` for `var` = `start`, `start` + `step`, … below `stop`."""

    var: Var
    start: Expr
    stop: Expr
    body: tuple["LoopStmt", ...]
    step: int = 1
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Branch:
    """`then` where `condition` holds, else `otherwise`."""

    condition: Expr
    then: tuple["LoopStmt", ...]
    otherwise: tuple["LoopStmt", ...] = ()


@dataclass(frozen=True, slots=True)
class Repeat:
    """`body` while `condition`, tested before every turn, holds."""

    condition: Expr
    body: tuple["LoopStmt", ...]
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Say:
    """Write `message` and the values on a line of standard output."""

    message: str
    values: tuple[Expr, ...]
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Check:
    """Remember that `message` is to be reported unless `condition` holds."""

    condition: Expr
    message: str
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Put:
    """`memory[offset]` = `value`, where `guard` (if any) holds; joined by `update` in one step where that is given.

    With `odd`, pairs: `memory[offset + 1]` = `odd` beside it, in whole panels of 16-bit floats.
    """

    memory: Memory
    offset: Expr
    value: Expr
    guard: Expr | None = None
    span: Span | None = field(default=None, compare=False, repr=False)
    update: str = ""
    odd: Expr | None = None


@dataclass(frozen=True, slots=True)
class Fold:
    """Inside a vector loop: join `value` of every point into the scalar `into` by `kind`, starting at the neutral."""

    kind: str
    into: Var
    value: Expr
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class VectorLoop:
    """`body` for `var` = 0 … `stop` − 1, many at a time. `padded`: the scratch that it writes may be
    overwritten up to the next whole vector. Where `large` holds, results go past the caches. Where `far` does, or
    without it, `ahead` is asked for; what will be written is not, if it goes past them. `at_once`: vectors that have
    sums of their own, where that is decided before it is printed. Where `backwards` holds, vectors go from the
    last to the first, unless results go past the caches."""

    var: Var
    stop: Expr
    body: tuple[Let | Put | Fold, ...]
    padded: bool = False
    large: Expr | None = None
    far: Expr | None = None
    ahead: tuple["Touch", ...] = ()
    at_once: int | None = None
    backwards: Expr | None = None


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix in memory: element (r, c) is at `offset` + r · `row` + c · `column`, or panels in `pairs` (bytes: fours)
    of rows."""

    memory: Memory
    offset: Expr
    row: Expr
    column: Expr
    pairs: bool = False


@dataclass(frozen=True, slots=True)
class Mma:
    """c[rows × columns] (+)= a[rows × depth] · b[depth × columns], b in panels `b.row` elements apart.

    `among`: its first row, and how many there are of those that meet these panels one strip after another. `shift`: a's
    bytes are levels less that number, which meets the sums of b's columns behind its panels. Without `fused`, integers
    take no instruction that multiplies and adds at once.
    """

    a: Operand
    b: Operand
    c: Operand
    rows: Expr
    columns: Expr
    depth: Expr
    clear: bool
    tile: RegisterTile
    span: Span | None = field(default=None, compare=False, repr=False)
    among: tuple[Expr, Expr] | None = None
    shift: Expr | None = None
    fused: bool = True


@dataclass(frozen=True, slots=True)
class FewRows:
    """c[rows × columns] (+)= a[rows × depth] · b[depth × columns] for few rows, b read where it lies: no panels.

    One of b's steps is 1; where that is the row's, so is a's column step. `rounded`: b to bf16 on the way.
    """

    a: Operand
    b: Operand
    c: Operand
    rows: Expr
    columns: Expr
    depth: Expr
    clear: bool
    rounded: bool = False
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Stream:
    """c[rows × columns] (+)= Σ_g factor(g) · Σ_p a[row, g · size + p] · value(g, p), for few rows.

    `value` and `factor` (None for 1) make elements of b over `panel`, `lane`, `group` and `position` where they are
    used. Lanes past the last column are computed, and stored into the padding of c. `size` is None for one group.
    `most` are numbers that bound rows and depth.
    """

    a: Operand
    c: Operand
    rows: Expr
    columns: Expr
    depth: Expr
    value: Expr
    factor: Expr | None
    size: int | None
    panel: Var
    lane: Var
    group: Var
    position: Var
    clear: bool
    most: tuple[Expr, Expr]
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class RoundRows:
    """`levels`[row][k] = `a`[row][k] as bytes: in every block of `block` the largest is ±127. Zeros up to whole blocks.

    `scales` has (scale, sum of the levels) of every block, row by row. `levels` may be wider than bytes.
    """

    a: Operand
    rows: Expr
    depth: Expr
    block: int
    levels: Operand
    scales: Operand
    span: Span | None = field(default=None, compare=False, repr=False)

    @property
    def made(self) -> tuple[Operand, Operand]:
        """What is written."""
        return self.levels, self.scales


@dataclass(frozen=True, slots=True)
class ByteStream:
    """c[rows × columns] (+)= Σ_g factor · scale_a · (Σ_p levels_a · levels_b + rest · Σ_p levels_a), g over `groups`.

    Sums over a group are of integers; `levels` and `scales` are what `RoundRows` made of a. Levels of b have `bits`
    bits; those of a group lie from `offset` of `b` on, in fours of bytes, consecutive rows in a byte. `offset`,
    `factor` and `rest` (None for 1 and 0) are over `panel`, `group` and, the latter two, `lane`.
    """

    levels: Operand
    scales: Operand
    c: Operand
    rows: Expr
    columns: Expr
    groups: Expr
    block: int
    b: Memory
    offset: Expr
    bits: int
    factor: Expr | None
    rest: Expr | None
    panel: Var
    lane: Var
    group: Var
    clear: bool
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Products of one left operand, block by block, and `body` for every vector of a block when all of it is summed.

    A block begins at `origin`; `body` is about row `row` and columns `column`, … of it, and reads `results`: of every
    product, 32 elements a row. It runs while the next block is multiplied.
    """

    products: tuple[Mma, ...]
    results: tuple[Memory, ...]
    origin: tuple[Var, Var]
    row: Var
    column: Var
    body: tuple[Let | Put, ...]
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class PackTransposed:
    """Panels[p][k][lane] = source[p · PANEL + lane][k] for a source contiguous in k: `columns` × `depth` elements.

    `rounded`: to bf16 on the way; into panels of bf16, in pairs of k.
    """

    source: Operand
    panels: Memory
    offset: Expr
    panel: Expr  # elements between panels
    columns: Expr
    depth: Expr
    rounded: bool = False
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Once:
    """`body` unless it has run for flag `index` since the grid point last moved to others than share it."""

    index: Expr
    count: Expr  # flags
    name: str
    body: tuple["LoopStmt", ...]


@dataclass(frozen=True, slots=True)
class Touch:
    """Ask for the cache line of `memory[offset]`, to read it or to `write` it; nothing is read: any offset will do."""

    memory: Memory
    offset: Expr
    write: bool


LoopStmt = (
    Let
    | Loop
    | Branch
    | Repeat
    | Say
    | Check
    | Put
    | Fold
    | VectorLoop
    | Mma
    | FewRows
    | Stream
    | Blocks
    | RoundRows
    | ByteStream
    | PackTransposed
    | Once
    | Touch
)


@dataclass(frozen=True, slots=True)
class Order:
    """Where `where` holds and `passing` begin at whole lines, `times` runs of tasks that are `apart` from each other
    are neighbours in the order of tasks. `run`: tasks of one."""

    where: Expr
    apart: Expr
    times: Expr
    run: int
    passing: tuple[Memory, ...]


FIRST_TASK, PAST_TASKS = Var("first_task"), Var("past_tasks")  # of those that a thread is given at once
MULTIPLIES_BYTES = Var("multiplies_bytes")  # 1 where the running processor multiplies bytes by bytes, else 0


@dataclass(frozen=True, slots=True)
class LoopProgram:
    """`body` for every point of `grid`; the first grid axis moves fastest. `memories` are inputs, outputs, scratch.

    If `spans`, `body` is for all tasks from FIRST_TASK to below PAST_TASKS at once, and mentions no axis of the grid.

    `sharing` neighbours along the second grid axis find the same kept copies. If `steady`, what is kept depends on the
    first axis and not on the second, all of which shares it where the first has one point.
    """

    name: str
    grid: tuple[Var, ...]
    memories: tuple[Memory, ...]
    body: tuple[LoopStmt, ...]
    tile: RegisterTile
    sharing: int = 1
    steady: bool = False
    spans: bool = False
    order: Order | None = None


def loop_statements(body: tuple[LoopStmt, ...]) -> Iterator[LoopStmt]:
    """Every statement of `body`, outer before inner."""
    for stmt in body:
        yield stmt
        match stmt:
            case Loop() | Repeat() | Once() | VectorLoop() | Blocks():
                yield from loop_statements(stmt.body)
            case Branch():
                yield from loop_statements(stmt.then)
                yield from loop_statements(stmt.otherwise)
            case _:
                pass


def written(body: tuple[LoopStmt, ...]) -> set[Memory]:
    """Memories that statements change."""
    changed: set[Memory] = set()
    for stmt in loop_statements(body):
        match stmt:
            case Put():
                changed.add(stmt.memory)
            case Mma() | FewRows() | Stream() | ByteStream():
                changed.add(stmt.c.memory)
            case RoundRows():
                changed.update(part.memory for part in stmt.made)
            case PackTransposed():
                changed.add(stmt.panels)
            case _:
                pass
    return changed
