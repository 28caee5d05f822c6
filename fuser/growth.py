"""Growing a region forward from its anchor: the pointwise work and layout changes that follow it.

Comes in: the anchor's value and its element. Goes out: every value that the region then makes, each with its element
and with where it stands. Invariant: each value inside is read only at the element that the program is computing, and
nothing that the region reads depends on what it makes.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import onnx_ir as ir

from fuser.cuts import Cuts
from fuser.dots import is_dot
from fuser.element import ONE, ZERO, Index, LiftError, shape_of
from fuser.graph import OUTSIDE, User
from fuser.lift import Inliner, Leaf, is_pointwise, rule_of
from fuser.lift_views import forward_index
from fuser.region import Region
from tilecore.contract.expr import Expr, loads
from tilecore.contract.spec import Cell

LIMIT = 64  # nodes that one region grows by
RESULTS = 3  # outputs of one region
BRANCHES = 8  # dead ends that are left before growing stops


Made = Mapping[ir.Value, tuple[Index, Expr]]


@dataclass(frozen=True, slots=True)
class Frame:
    """What a row region adds: `place` of a value by itself, `special` for nodes without an element rule.

    `special` gives the node's outputs with where they stand and what they are; None for nodes that it does not know.
    `behind` gives the nodes, in order, that make what a node reads of the same rows, and that are better inside too.
    """

    place: Callable[[ir.Value], Index | None]
    special: Callable[[ir.Node, Mapping[ir.Value, Index], Inliner], Made | None]
    behind: Callable[[ir.Node, "Growth"], Sequence[ir.Node]]


@dataclass(slots=True)
class Growth:
    """What is inside: `where` each value's element stands, `value` what it is, `nodes` the nodes that make them.

    `aside` gives elements of other values, before the cuts decide on them.
    """

    cuts: Cuts
    where: dict[ir.Value, Index]
    value: dict[ir.Value, Expr]
    nodes: list[ir.Node]
    frame: Frame | None = None
    mode: str = "side"  # how other operands are read, see `Cuts`
    bound: Leaf | None = None  # elements of values inside, where they may be read at other places than their own
    aside: Leaf | None = None
    refused: dict[ir.Node, LiftError] = field(default_factory=dict[ir.Node, LiftError])
    reader: Inliner = field(init=False)
    _checked: set[ir.Value] = field(default_factory=set[ir.Value])

    def __post_init__(self) -> None:
        self.reader = self._reader()

    def _reader(self) -> Inliner:
        return self.cuts.reader(self.mode, bound=self.bound or self._bound)

    def _bound(self, value: ir.Value, index: Index) -> Expr | None:
        if value not in self.value:
            return None if self.aside is None else self.aside(value, index)
        if index != self.where[value]:
            raise LiftError(f"{value.name!r} is also read at another element of it")
        return self.value[value]

    def open_values(self) -> list[ir.Value]:
        """The values inside that something outside reads, in the order they were made."""
        inside: set[User] = set(self.nodes)
        return [value for value in self.where if self.cuts.remains.users_of(value) - inside]

    def add(self, node: ir.Node) -> bool:
        """Take a node in. False, with the reason in `refused`, when that is not allowed."""
        try:
            made = self._made(node)
            for _, expr in made.values():
                self.check_sources(expr)
        except LiftError as error:
            error.node = error.node or node
            self.refused[node] = error
            return False
        for value, (where, expr) in made.items():
            self.where[value] = where
            self.value[value] = expr
        self.nodes.append(node)
        return True

    def add_all(self, nodes: Sequence[ir.Node]) -> bool:
        """Take all of `nodes` in, or none of them: False then."""
        where, value, count = dict(self.where), dict(self.value), len(self.nodes)
        for node in nodes:
            if not self.add(node):
                self.where, self.value = where, value
                del self.nodes[count:]
                self.reader = self._reader()
                return False
        return True

    def retreat(self, count: int) -> None:
        """Give up all nodes but the first `count`."""
        for node in self.nodes[count:]:
            for out in node.outputs:
                self.where.pop(out, None)
                self.value.pop(out, None)
        del self.nodes[count:]

    def loaded(self) -> set[ir.Value]:
        """What the programs of the values inside load."""
        sources = (load.source for value in self.value.values() for load in loads(value))
        return {self.cuts.values[source.name] for source in sources if not isinstance(source, Cell)}

    def _made(self, node: ir.Node) -> Made:
        if node not in self.cuts.remains.alive or any(value in self.cuts.remains.makers for value in node.outputs):
            raise LiftError(f"{node.op_type} belongs to another region")
        special = self.frame.special(node, self.where, self.reader) if self.frame is not None else None
        if special is not None:
            return special
        if len(node.outputs) != 1:
            raise LiftError(f"{node.op_type} has {len(node.outputs)} outputs")
        out = node.outputs[0]
        moved = self._moved(node)
        if moved is not None:
            return {out: moved}
        if not is_pointwise(node):
            raise LiftError(f"{node.op_type} is neither pointwise nor a change of layout")
        where = self._place(node)
        return {out: (where, self.reader.compute(out, where))}

    def check_sources(self, expr: Expr) -> None:
        """LiftError when the expression loads something that depends on the region."""
        sources = (load.source for load in loads(expr))
        fresh = {self.cuts.values[source.name] for source in sources if not isinstance(source, Cell)} - self._checked
        if not fresh:
            return
        producers = {node for value in self.where if (node := value.producer()) is not None}
        if self.cuts.remains.reaches(fresh, producers):
            raise LiftError("another operand depends on this region's result")
        self._checked |= fresh

    def _moved(self, node: ir.Node) -> tuple[Index, Expr] | None:
        """A change of layout of a value inside."""
        source = node.inputs[0] if node.inputs else None
        if source is None or source not in self.value:
            return None
        where = forward_index(node, self.where[source], self.cuts.shapes)
        return None if where is None else (where, self.value[source])

    def _place(self, node: ir.Node) -> Index:
        """Where the region's element stands in the output of a pointwise node."""
        out = node.outputs[0]
        if self.frame is not None:
            size = shape_of(out, self.cuts.shapes)
            same = (v for v in node.inputs if v in self.where and self.cuts.shapes.shape(v) == size)
            where = next((self.where[v] for v in same), self.frame.place(out))
            if where is None:
                raise LiftError(f"{node.op_type} {node.name!r} has another shape than the rows")
            return where
        first = next(value for value in node.inputs if value is not None and value in self.value)
        shape, source = shape_of(out, self.cuts.shapes), shape_of(first, self.cuts.shapes)
        extra = len(shape) - len(source)
        if extra < 0 or any(dim != ONE for dim in shape[:extra]) or shape[extra:] != source:
            raise LiftError(f"{node.op_type} {node.name!r} broadcasts the result to a larger shape")
        return (*(ZERO for _ in shape[:extra]), *self.where[first])


@dataclass(frozen=True, slots=True)
class Extent:
    """A stopping point: which nodes the region has then, and which values it must give out."""

    nodes: tuple[ir.Node, ...]
    results: tuple[ir.Value, ...]


def grow(growth: Growth, *, limit: int = LIMIT) -> Extent:
    """Take in followers as long as that leads to fewer or equally many results; the last good stop.

    A branch that leads nowhere is left, and the others are followed without it.
    """
    best = Extent(tuple(growth.nodes), tuple(growth.open_values()))
    left: set[ir.Node] = set()
    for _ in range(BRANCHES):
        best, astray = _follow(growth, best, left, limit)
        if astray is None:
            break
        left.add(astray)
        growth.retreat(len(best.nodes))
    return best


def _follow(growth: Growth, best: Extent, left: Set[ir.Node], limit: int) -> tuple[Extent, ir.Node | None]:
    """Followers in graph order, but for those `left`: the last good stop, and the first that was taken after it."""
    remains = growth.cuts.remains
    done = {*left, *growth.refused, *growth.nodes}
    queue = {node for value in growth.where for node in remains.nodes_using(value)} - done
    astray: ir.Node | None = None
    for _ in range(limit):
        if not queue:
            break
        node = min(queue, key=remains.position.__getitem__)
        queue.discard(node)
        behind = growth.frame.behind(node, growth) if growth.frame is not None else ()
        if not (behind and growth.add_all([*behind, node])) and not growth.add(node):
            continue
        astray = astray or node
        made = [out for inside in (*behind, node) if inside in growth.nodes for out in inside.outputs]
        queue |= {user for out in made for user in remains.nodes_using(out) if user not in growth.refused}
        queue -= {*growth.nodes, *left}
        results = growth.open_values()
        if any(unpacks(growth, value) for value in results):
            continue
        if len(results) <= len(best.results) or acceptable(growth, results):
            best, astray = Extent(tuple(growth.nodes), tuple(results)), None
    return best, astray


def unpacks(growth: Growth, value: ir.Value) -> bool:
    """Whether the value only widens bytes made inside for readers that can unpack them: the bytes are to be stored."""
    node, cuts = value.producer(), growth.cuts
    if node is None or not any(s in growth.value and cuts.widens(s, value) for s in node.inputs if s is not None):
        return False
    users = cuts.remains.users_of(value)
    return bool(users) and all(isinstance(user, ir.Node) and (rule_of(user) or is_dot(user)) for user in users)


def acceptable(growth: Growth, results: list[ir.Value]) -> bool:
    """One result, or more of which all but the last are needed in memory by others in any case."""
    if len(results) <= 1:
        return True
    users = [growth.cuts.remains.users_of(value) for value in results[:-1]]
    return len(results) <= RESULTS and all(
        OUTSIDE in found or any(isinstance(user, Region) for user in found) for found in users
    )
