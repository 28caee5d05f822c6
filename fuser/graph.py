"""What the scan knows of a graph: order and users (fixed), and what is left of it while regions take nodes out.

Invariant of `Remains`: a node is alive exactly when one of its outputs, not made by a region, is still used by an alive
node, a region, a subgraph or the graph's outputs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fuser.region import Region

OUTSIDE = "outside"  # the user that stands for graph outputs and subgraphs
User = ir.Node | Region | str


@dataclass(slots=True)
class Remains:
    """The graph with some regions replaced by one node each."""

    nodes: tuple[ir.Node, ...]
    by_type: dict[str, list[ir.Node]]
    position: dict[ir.Node, int]
    captures: dict[ir.Node, frozenset[ir.Value]]
    users: dict[ir.Value, set[User]]
    alive: set[ir.Node]
    makers: dict[ir.Value, Region]

    def __init__(self, graph: ir.Graph, plumbing: Callable[[ir.Node], bool]) -> None:
        """`plumbing` nodes (shape arithmetic whose result is known) count as users of nothing."""
        self.nodes = tuple(graph)
        self.by_type = {}
        for node in self.nodes:
            self.by_type.setdefault(node.op_type, []).append(node)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.captures = {node: found for node in self.nodes if (found := frozenset(captured(node)))}
        self.users = {}
        self.alive = set(self.nodes)
        self.makers = {}
        for value in graph.outputs:
            self.users.setdefault(value, set()).add(OUTSIDE)
        for node in self.nodes:
            for value in node.inputs:
                if value is not None and not plumbing(node):
                    self.users.setdefault(value, set()).add(node)
            for value in self.captures.get(node, ()):
                self.users.setdefault(value, set()).add(OUTSIDE)
        for node in reversed(self.nodes):
            self._release(node)

    def producer(self, value: ir.Value) -> ir.Node | None:
        """The node of this graph that makes `value`; None for inputs, weights and values of outer graphs."""
        node = value.producer()
        return node if node in self.position else None

    def users_of(self, value: ir.Value) -> set[User]:
        """Who still reads `value`."""
        return self.users.get(value, set())

    def nodes_using(self, value: ir.Value) -> list[ir.Node]:
        """The alive nodes that read `value`, in order."""
        found = [user for user in self.users_of(value) if isinstance(user, ir.Node)]
        return sorted(found, key=self.position.__getitem__)

    def take(self, region: Region) -> None:
        """Replace a region: its node now makes the outputs; what only it needed dies."""
        for value in region.inputs:
            self.users.setdefault(value, set()).add(region)
        for value in region.outputs:
            self.makers[value] = region
        for value in region.outputs:
            producer = value.producer()
            if producer is not None:
                self._release(producer)

    def _release(self, node: ir.Node) -> None:
        pending = [node]
        while pending:
            current = pending.pop()
            if current not in self.alive or any(
                self.users_of(value) and value not in self.makers for value in current.outputs
            ):
                continue
            self.alive.discard(current)
            for value in current.inputs:
                if value is None:
                    continue
                self.users.get(value, set()).discard(current)
                producer = self.producer(value)
                if producer is not None:
                    pending.append(producer)

    def reaches(self, starts: Iterable[ir.Value], targets: set[ir.Node]) -> bool:
        """Whether some of `starts` depends on a node of `targets` (regions seen through)."""
        if not targets:
            return False
        low = min(self.position[node] for node in targets)
        seen: set[ir.Value] = set()
        stack = list(starts)
        while stack:
            value = stack.pop()
            node = self.producer(value)
            if value in seen or node is None or self.position[node] < low:
                continue
            seen.add(value)
            if node in targets:
                return True
            stack.extend(self.reads(node))
        return False

    def waits(self, region: Region) -> bool:
        """Whether an input of a region, which was not taken yet, depends on a result of it.

        Other regions count as one node. What the region computes and keeps to itself, others compute again.
        """
        results = set(region.outputs)
        low = min(self.position[node] for node in region.nodes)
        seen: set[ir.Value] = set()
        stack = list(region.inputs)
        while stack:
            value = stack.pop()
            node = self.producer(value)
            if value in seen or node is None:
                continue
            seen.add(value)
            maker = self.makers.get(value)
            last = node if maker is None else maker.nodes[-1]
            if value in results:
                return True
            if self.position[last] >= low:
                stack.extend(self.reads(node) if maker is None else maker.inputs)
        return False

    def reads(self, node: ir.Node) -> list[ir.Value]:
        """What the node reads, by its subgraphs too."""
        return [*(value for value in node.inputs if value is not None), *self.captures.get(node, ())]

    def circular(self, regions: Sequence[Region]) -> list[Region]:
        """The regions on a cycle, or between cycles, of the graph in which every region is one node."""
        makers = {value: region for region in regions for value in region.outputs}
        needs: dict[User, set[User]] = {item: set(self._needs(item, makers)) for item in (*self.nodes, *regions)}
        left = _waiting(needs)
        left = _waiting(_reversed({item: needs[item] & left for item in left}))
        return [region for region in regions if region in left]

    def _needs(self, item: User, makers: Mapping[ir.Value, Region]) -> list[User]:
        """The nodes and regions that make what the item reads."""
        if isinstance(item, str):
            return []
        values = self.reads(item) if isinstance(item, ir.Node) else item.inputs
        found = [makers.get(value) or self.producer(value) for value in values]
        return [maker for maker in found if maker is not None]


def _waiting(needs: Mapping[User, set[User]]) -> set[User]:
    """The items that can never come to their turn, when one may once all that it needs had theirs."""
    followers = _reversed(needs)
    missing = {item: len(needed) for item, needed in needs.items()}
    ready = [item for item, count in missing.items() if count == 0]
    while ready:
        for follower in followers[ready.pop()]:
            missing[follower] -= 1
            if missing[follower] == 0:
                ready.append(follower)
    return {item for item, count in missing.items() if count > 0}


def _reversed(needs: Mapping[User, set[User]]) -> dict[User, set[User]]:
    """Who needs each item."""
    followers: dict[User, set[User]] = {item: set() for item in needs}
    for item, needed in needs.items():
        for other in needed:
            followers[other].add(item)
    return followers


def bodies(node: ir.Node) -> list[tuple[str, ir.Graph]]:
    """The node's subgraphs by the attribute that each is in."""
    found: list[tuple[str, ir.Graph]] = []
    for name, attr in node.attributes.items():
        if attr.type == ir.AttributeType.GRAPH:
            found.append((name, attr.as_graph()))
        elif attr.type == ir.AttributeType.GRAPHS:
            found += [(f"{name}{number}", graph) for number, graph in enumerate(attr.as_graphs())]
    return found


def captured(node: ir.Node) -> set[ir.Value]:
    """Values of outer graphs that the node's subgraphs read."""
    return {value for _, graph in bodies(node) for value in captured_by(graph)}


def captured_by(graph: ir.Graph) -> set[ir.Value]:
    """Values of outer graphs that a subgraph reads."""
    own = {*graph.inputs, *graph.initializers.values()}
    for inner in graph:
        own.update(inner.outputs)
    reads = {value for inner in graph for value in inner.inputs if value is not None}
    reads |= {value for inner in graph for value in captured(inner)} | set(graph.outputs)
    return reads - own


def release(node: ir.Node) -> None:
    """Let the subgraphs of a node that nothing needs any more stop reading values of outer graphs."""
    for _, graph in bodies(node):
        for inner in graph.all_nodes():
            for index in range(len(inner.inputs)):
                inner.replace_input_with(index, None)
