"""The tile graph: tile operations as nodes, the buffers between them as edges, and the axes that they share.

Comes in: a verified program. Goes out: `TileGraph`, in which every buffer axis and every `Parallel` variable belongs
to one *axis class*: axes that any operation walks together (row i of S is row i of Q and of O). Inference decides per
class.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tilecore.contract.expr import Const, Expr, Load, Var, const, loads, nonnegative, polynomial
from tilecore.contract.spec import Place, View, extents_at
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
)

Axis = tuple[str, int] | Var  # (buffer name, axis), or a Parallel variable


@dataclass(frozen=True, slots=True)
class Bound:
    """An access that leaves the data behind `limit` elements: along an axis, element i is outside for i ≥ `limit`."""

    axis: Axis
    limit: Expr  # may be above the extent; in grid and loop variables
    stmt: Stmt


@dataclass(frozen=True, slots=True)
class Node:
    """One tile operation with the buffers it reads and writes, and the loops around it, outermost first."""

    stmt: Stmt
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    loops: tuple[For, ...]


@dataclass(frozen=True, slots=True)
class TileGraph:
    """Nodes in program order, the class of every axis, and the bounds that accesses put on classes."""

    program: Program
    nodes: tuple[Node, ...]
    classes: dict[Axis, int]
    bounds: tuple[Bound, ...]

    def axes_of(self, index: int) -> tuple[Axis, ...]:
        """All members of a class."""
        return tuple(axis for axis, own in self.classes.items() if own == index)


def build_graph(program: Program) -> TileGraph:
    """The tile graph of a program."""
    nodes = tuple(_nodes(program.body, ()))
    parent: dict[Axis, Axis] = {(b.name, i): (b.name, i) for b in program.buffers for i in range(len(b.shape))}

    def find(axis: Axis) -> Axis:
        parent.setdefault(axis, axis)
        while parent[axis] != axis:
            axis = parent[axis]
        return axis

    for node in nodes:
        for left, right in _shared_axes(node.stmt):
            parent[find(left)] = find(right)
    roots = {root: number for number, root in enumerate(dict.fromkeys(find(axis) for axis in parent))}
    classes = {axis: roots[find(axis)] for axis in parent}
    bounds = tuple(bound for node in nodes for bound in _bounds(node.stmt))
    return TileGraph(program, nodes, classes, bounds)


def _nodes(body: tuple[Stmt, ...], around: tuple[For, ...]) -> Iterator[Node]:
    for stmt in body:
        reads, writes = buffers_of(stmt)
        match stmt:
            case For() | While() | If():
                if reads:  # by its bounds or its condition
                    yield Node(stmt, reads, (), around)
                inner = (*around, stmt) if isinstance(stmt, For) else around
                for part in (stmt.then, stmt.otherwise) if isinstance(stmt, If) else (stmt.body,):
                    yield from _nodes(part, inner)
            case _:
                yield Node(stmt, reads, writes, around)


def buffers_of(stmt: Stmt) -> tuple[tuple[Buffer, ...], tuple[Buffer, ...]]:
    """Buffers that a statement, its bodies apart, reads and writes."""
    loaded = tuple(dict.fromkeys(b for expr in expressions(stmt) for b in _loaded(expr)))
    match stmt:
        case Copy():
            reads = [stmt.src.source] if isinstance(stmt.src.source, Buffer) else []
            writes = [stmt.dst.source] if isinstance(stmt.dst.source, Buffer) else []
            return (*reads, *loaded), tuple(writes)
        case Fill():
            return loaded, (stmt.dst,)
        case Gemm():
            return (stmt.a, stmt.b) + (() if stmt.clear else (stmt.c,)), (stmt.c,)
        case Reduce():
            return (stmt.src,) + (() if stmt.clear else (stmt.dst,)), (stmt.dst,)
        case Join():
            return (stmt.buffer,), (stmt.buffer,)
        case CumSum():
            return (stmt.src,), (stmt.dst,)
        case Store():
            return loaded, (stmt.target,) if isinstance(stmt.target, Buffer) else ()
        case Parallel():
            found = [*loaded, *(b for store in stmt.body for expr in expressions(store) for b in _loaded(expr))]
            written = dict.fromkeys(s.target for s in stmt.body if isinstance(s.target, Buffer))
            return tuple(dict.fromkeys(found)), tuple(written)
        case Print() if isinstance(stmt.values, Buffer):
            return (stmt.values,), ()
        case For() | While() | If() | Print() | Assert():
            return loaded, ()


def _loaded(expr: Expr) -> Iterator[Buffer]:
    return (load.source for load in loads(expr) if isinstance(load.source, Buffer))


BufferAxis = tuple[str, int]


def gemm_axes(gemm: Gemm) -> tuple[tuple[BufferAxis, BufferAxis], tuple[BufferAxis, BufferAxis]]:
    """((m of a, m of c), (n of b, n of c))."""
    am = 1 if gemm.transpose_a else 0
    bn = 0 if gemm.transpose_b else 1
    return ((gemm.a.name, am), (gemm.c.name, 0)), ((gemm.b.name, bn), (gemm.c.name, 1))


def depth_axes(gemm: Gemm) -> tuple[BufferAxis, BufferAxis]:
    """(k of a, k of b)."""
    return (gemm.a.name, 0 if gemm.transpose_a else 1), (gemm.b.name, 1 if gemm.transpose_b else 0)


def tile_axes(src: Tile, dst: Tile) -> tuple[tuple[int, int], ...]:
    """Axes of two tiles that a copy walks together: those left after extents of 1, matched in order."""
    one: Expr = const(1)
    left = [i for i, extent in enumerate(src.shape) if extent != one]
    right = [i for i, extent in enumerate(dst.shape) if extent != one]
    return tuple(zip(left, right, strict=True))


def _shared_axes(stmt: Stmt) -> Iterator[tuple[Axis, Axis]]:
    match stmt:
        case Gemm():
            yield from gemm_axes(stmt)
            yield depth_axes(stmt)
        case Reduce():
            kept = [i for i in range(len(stmt.src.shape)) if i != stmt.axis]
            skip = len(stmt.dst.shape) == len(stmt.src.shape)  # the reduced axis is kept, with an extent of 1
            yield from (((stmt.src.name, i), (stmt.dst.name, i if skip else j)) for j, i in enumerate(kept))
        case CumSum():
            yield from (((stmt.src.name, i), (stmt.dst.name, i)) for i in range(len(stmt.src.shape)))
        case Copy(src=Tile(source=Buffer() as a), dst=Tile(source=Buffer() as b)):
            yield from (((a.name, i), (b.name, j)) for i, j in tile_axes(stmt.src, stmt.dst))
        case Parallel():
            for var in stmt.axes:
                yield var, var
            for store in stmt.body:
                for buffer, index in _buffer_accesses(store):
                    yield from (((buffer.name, i), e) for i, e in enumerate(index) if e in stmt.axes)  # type: ignore[misc]
        case _:
            return


def _buffer_accesses(store: Store) -> Iterator[tuple[Buffer, tuple[Expr, ...]]]:
    if isinstance(store.target, Buffer):
        yield store.target, store.index
    for expr in expressions(store):
        for load in loads(expr):
            if isinstance(load.source, Buffer):
                yield load.source, load.index


def _bounds(stmt: Stmt) -> Iterator[Bound]:
    """Where an access to a view or place may leave it along an axis walked one by one."""
    match stmt:
        case Copy():
            for tile, other in ((stmt.src, stmt.dst), (stmt.dst, stmt.src)):
                if isinstance(tile.source, Buffer) or not isinstance(other.source, Buffer):
                    continue
                pairs = tile_axes(tile, other)
                for outer, inner in pairs:
                    limit = extents_at(tile.source, tile.origin)[outer] - tile.origin[outer]
                    yield Bound((other.source.name, inner), limit, stmt)
        case Parallel():
            for store in stmt.body:
                yield from _element_bounds(stmt, store)
        case _:
            return


def read_within(graph: TileGraph, buffer: Buffer, used: frozenset[Var]) -> bool:
    """Whether every read of `buffer` stands inside those loops whose variables are in `used`, not after them."""
    moving = used & {loop.var for node in graph.nodes for loop in node.loops}
    return all(moving <= {loop.var for loop in node.loops} for node in graph.nodes if buffer in node.reads)


def stored_whole(graph: TileGraph) -> set[int]:
    """Classes along which some result has room for every element: what lies behind the data is stored there too."""
    found: set[int] = set()
    for node in graph.nodes:
        for extents, bounds in _results(node.stmt):
            for axis, extent in extents.items():
                if all(nonnegative(bound.limit - extent) for bound in bounds if bound.axis == axis):
                    found.add(graph.classes[axis])
    return found


def _results(stmt: Stmt) -> Iterator[tuple[dict[Axis, Expr], list[Bound]]]:
    """For each place that a statement writes: the axes that it walks, with their extents, and where it is left."""
    match stmt:
        case Copy() if isinstance(stmt.dst.source, Place) and isinstance(stmt.src.source, Buffer):
            source = stmt.src.source
            yield {(source.name, axis): size for axis, size in enumerate(source.shape)}, list(_bounds(stmt))
        case Parallel():
            for store in stmt.body:
                if isinstance(store.target, Place):
                    index_alone = Store(store.target, store.index, const(0))
                    extents: dict[Axis, Expr] = {axis: axis.extent for axis in stmt.axes if axis.extent is not None}
                    yield extents, list(_element_bounds(stmt, index_alone))
        case _:
            return


def _element_bounds(stmt: Parallel, store: Store) -> Iterator[Bound]:
    accesses: list[tuple[View | Place, tuple[Expr, ...]]] = []
    if isinstance(store.target, Place):
        accesses.append((store.target, store.index))
    values = (load for expr in expressions(store) for load in loads(expr))
    accesses.extend((load.source, load.index) for load in values if isinstance(load.source, View))
    for source, index in accesses:
        for extent, position in zip(extents_at(source, index), index, strict=True):
            for var in stmt.axes:
                coefficient, rest = split_affine(position, var)
                if coefficient == const(1) and rest is not None:
                    yield Bound(var, extent - rest, stmt)


def split_affine(expr: Expr, var: Var) -> tuple[Expr, Expr | None]:
    """(c, r) with expr = c · var + r and neither mentioning var; r is None when there is no such form."""
    coefficient: Expr = const(0)
    rest: Expr = const(0)
    for monomial, amount in polynomial(expr).items():
        term: Expr = const(amount)
        seen = 0
        for atom in monomial:
            if atom == var:
                seen += 1
            elif _mentions(atom, var):
                return const(0), None
            else:
                term = term * atom
        if seen > 1:
            return const(0), None
        if seen:
            coefficient = coefficient + term
        else:
            rest = rest + term
    return coefficient, rest


def _mentions(expr: Expr, var: Var) -> bool:
    if isinstance(expr, Load):
        return any(_mentions(index, var) for index in expr.index)
    if isinstance(expr, Const):
        return False
    return expr == var or any(_mentions(arg, var) for arg in getattr(expr, "args", ()))
