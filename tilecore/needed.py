"""Which elements of an axis can matter: index predicates that leave only neutral elements past a point cut the work.

A causal score is −inf for every key after the last query of the tile. A comparison in the program only suggests the
point; that everything past it is neutral for every reduction over the axis is proved by `padding`.
"""

from collections.abc import Iterator, Mapping

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Op, Var, binary, const, loads, nonnegative, substitute, variables, walk
from tilecore.contract.spec import Place
from tilecore.graph import TileGraph, split_affine
from tilecore.ir import Buffer, Copy, Parallel, Print, Tile, expressions, statements
from tilecore.padding import Beyond, not_neutral


def needed_extents(graph: TileGraph, live: Mapping[int, Expr]) -> dict[int, Expr]:
    """Axis class → number of elements that can matter, for the classes where a predicate bounds it."""
    extents, elsewhere = class_extents(graph), touched_elsewhere(graph)
    stored = _stored_classes(graph)
    needed: dict[int, Expr] = {}
    for index, bound in dict.fromkeys(_suggestions(graph)):
        if index in stored or index in elsewhere or index not in extents or not in_scope(graph, index, bound):
            continue
        current = needed.get(index, live.get(index, extents[index]))
        if nonnegative(bound - current) or not_neutral(Beyond(graph, {index: bound}, outside=False)):
            continue
        needed[index] = binary("max", binary("min", current, bound), const(0))
    return needed


def class_extents(graph: TileGraph) -> dict[int, Expr]:
    """The extent of each class; a class whose members differ (a window into a larger buffer) has none."""
    shapes = {(b.name, i): extent for b in graph.program.buffers for i, extent in enumerate(b.shape)}
    found: dict[int, set[Expr]] = {}
    for axis, index in graph.classes.items():
        extent = axis.extent if isinstance(axis, Var) else shapes[axis]
        assert extent is not None
        found.setdefault(index, set()).add(extent)
    return {index: next(iter(extents)) for index, extents in found.items() if len(extents) == 1}


def touched_elsewhere(graph: TileGraph) -> set[int]:
    """Classes of which some element is read, or writes, by another index than that of a point of its own.

    Such a read (`s[i + 1]`, `s[0]`, `s[k]` in a loop over k, a slice that begins elsewhere, a tile that is printed) may
    be of an element past the live ones, and such a write (`flat[8 * i + j]`) may be of one that others read, so that
    none may be left out.
    """
    found: set[int] = set()

    def look(expr: Expr, own: tuple[Var, ...]) -> None:
        for load in loads(expr):
            if isinstance(load.source, Buffer):
                name = load.source.name
                found.update(graph.classes[name, i] for i, entry in enumerate(load.index) if entry not in own)

    around: dict[int, tuple[Var, ...]] = {}  # by the identity of stores
    for stmt in statements(graph.program.body):
        if isinstance(stmt, Parallel):
            around.update({id(store): stmt.axes for store in stmt.body})
            moved = (e for store in stmt.body if isinstance(store.target, Buffer) for e in store.index)
            found |= {graph.classes[axis] for e in moved if e not in stmt.axes for axis in variables(e) & {*stmt.axes}}
        if isinstance(stmt, Copy):
            found |= {graph.classes[axis] for axis in (*_moved_axes(stmt.src, reads=True), *_moved_axes(stmt.dst))}
        for expr in expressions(stmt):
            look(expr, around.get(id(stmt), ()))
        if isinstance(stmt, Print) and isinstance(stmt.values, Buffer):
            found.update(graph.classes[stmt.values.name, i] for i in range(len(stmt.values.shape)))
    return found


def _moved_axes(tile: Tile, *, reads: bool = False) -> Iterator[tuple[str, int]]:
    """Axes of a buffer along which a side of a copy does not begin at its first element, or reads that one alone."""
    if isinstance(tile.source, Buffer):
        for axis, (start, size) in enumerate(zip(tile.origin, tile.shape, strict=True)):
            if start != const(0) or (reads and size == const(1)):
                yield tile.source.name, axis


def in_scope(graph: TileGraph, index: int, bound: Expr) -> bool:
    """Whether the loop variables of `bound` are in scope wherever the class is walked."""
    members = graph.axes_of(index)
    buffers = {axis[0] for axis in members if not isinstance(axis, Var)}
    loop_vars = {loop.var for node in graph.nodes for loop in node.loops}
    used = variables(bound) & loop_vars
    for node in graph.nodes:
        touched = {b.name for b in (*node.reads, *node.writes)} & buffers
        walks = isinstance(node.stmt, Parallel) and any(axis in members for axis in node.stmt.axes)
        if (touched or walks) and not used <= {loop.var for loop in node.loops}:
            return False
    return True


def _stored_classes(graph: TileGraph) -> set[int]:
    """Classes along which results leave the tile: none of their elements may be left out."""
    stored: set[int] = set()
    for node in graph.nodes:
        if isinstance(node.stmt, Parallel):
            for store in node.stmt.body:
                if isinstance(store.target, Place):
                    used = frozenset[Var]().union(*(variables(position) for position in store.index))
                    stored |= {graph.classes[axis] for axis in node.stmt.axes if axis in used}
        else:
            copied = {b.name for b in node.reads} if not node.writes else set[str]()
            stored |= {own for axis, own in graph.classes.items() if not isinstance(axis, Var) and axis[0] in copied}
    return stored


def _suggestions(graph: TileGraph) -> Iterator[tuple[int, Expr]]:
    """(class, bound) for comparisons that fail for every element at or past the bound, whatever the other axes."""
    for node in graph.nodes:
        if not isinstance(node.stmt, Parallel):
            continue
        for store in node.stmt.body:
            for part in walk(store.value):
                if isinstance(part, Op) and part.name in ("lt", "le", "gt", "ge") and part.args[0].dtype is DType.I64:
                    yield from _upper_bounds(part, node.stmt, graph)


def _upper_bounds(comparison: Op, around: Parallel, graph: TileGraph) -> Iterator[tuple[int, Expr]]:
    left, right = comparison.args if comparison.name in ("lt", "le") else comparison.args[::-1]
    slack = right - left - (1 if comparison.name in ("lt", "gt") else 0)  # holds where slack ≥ 0
    for axis in around.axes:
        factor, rest = split_affine(slack, axis)
        if factor != const(-1) or rest is None or loads(rest):
            continue
        largest = _largest(rest, tuple(other for other in around.axes if other != axis))
        if largest is not None:
            yield graph.classes[axis], largest + 1


def _largest(expr: Expr, axes: tuple[Var, ...]) -> Expr | None:
    """`expr` at the values of `axes` that make it largest; None where it is not affine in them."""
    for axis in axes:
        factor, rest = split_affine(expr, axis)
        if rest is None or not isinstance(factor, Const) or axis.extent is None:
            return None
        expr = substitute(expr, {axis: axis.extent - 1 if factor.value > 0 else const(0)})
    return expr
