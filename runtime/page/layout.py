"""Places the nodes of a graph in layers, so that data flows down: Sugiyama's method, made for graphs of thousands.

Comes in: boxes with widths, and edges. Goes out: a position per box, and the points of every edge. Invariants: boxes do
not overlap, an edge goes down at least one layer, and time grows little faster than the number of edges.

Layers are longest paths. Edges that span many layers are not routed: they would cross everything, and their number of
points would grow with the square of the graph; the page shows them as labelled stubs. Order within a layer comes from
barycentres (Sugiyama, Tagawa and Toda, 1981). Columns are the least squares solution that keeps the order and the
gaps, found by pooling adjacent violators.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

LAYER = 46.0  # pixels from one layer to the next
GAP = 14.0  # between boxes of a layer
LONGEST = 6  # layers that a routed edge spans at most
SWEEPS = 4
BEND = 6.0  # the width that a passing edge keeps free


@dataclass(frozen=True, slots=True)
class Placement:
    """Centres of boxes, corner points of routed edges (None for stubs), and the size of it all, in pixels."""

    centres: tuple[tuple[float, float], ...]
    routes: tuple[tuple[tuple[float, float], ...] | None, ...]
    width: float
    height: float


def place(widths: Sequence[float], edges: Sequence[tuple[int, int]], *, late: frozenset[int]) -> Placement:
    """Lay out boxes 0 to len(widths) - 1, which stand in topological order.

    `late` boxes stand just above their first reader instead of as early as they can.
    """
    layers = _layers(len(widths), edges, late)
    sizes, depth = list(widths), list(layers)
    chains: list[list[int] | None] = []
    above: list[list[int]] = [[] for _ in widths]
    for source, target in edges:
        span = layers[target] - layers[source]
        if span > LONGEST:
            chains.append(None)
            continue
        chain = [source]
        for step in range(1, span):
            depth.append(layers[source] + step)
            sizes.append(BEND)
            above.append([])
            chain.append(len(sizes) - 1)
        chain.append(target)
        for upper, lower in pairwise(chain):
            above[lower].append(upper)
        chains.append(chain)
    below: list[list[int]] = [[] for _ in sizes]
    for lower, uppers in enumerate(above):
        for upper in uppers:
            below[upper].append(lower)
    rows = _order(depth, above, below)
    columns = _columns(rows, sizes, above, below)
    left = min((x - width / 2 for x, width in zip(columns, sizes, strict=True)), default=0.0)
    points = [(x - left + GAP, (layer + 0.5) * LAYER) for x, layer in zip(columns, depth, strict=True)]
    routes = tuple(None if chain is None else tuple(points[item] for item in chain) for chain in chains)
    right = max((x + width / 2 for (x, _), width in zip(points, sizes, strict=True)), default=0.0)
    return Placement(tuple(points[: len(widths)]), routes, right + GAP, len(rows) * LAYER)


def _layers(count: int, edges: Sequence[tuple[int, int]], late: frozenset[int]) -> list[int]:
    """The longest path to each box; `late` ones then sink as far as their readers let them."""
    readers: list[list[int]] = [[] for _ in range(count)]
    for source, target in edges:
        readers[source].append(target)
    layers = [0] * count
    for source in range(count):
        for target in readers[source]:
            layers[target] = max(layers[target], layers[source] + 1)
    for source in reversed(range(count)):
        if source in late and readers[source]:
            layers[source] = max(layers[source], min(layers[target] for target in readers[source]) - 1)
    return layers


def _order(depth: Sequence[int], above: Sequence[Sequence[int]], below: Sequence[Sequence[int]]) -> list[list[int]]:
    """The boxes of every layer from left to right."""
    rows: list[list[int]] = [[] for _ in range(max(depth, default=-1) + 1)]
    for item, layer in enumerate(depth):
        rows[layer].append(item)
    rank = [0.0] * len(depth)

    def settle(row: list[int]) -> None:
        middle = (len(row) - 1) / 2  # so that rows of different lengths compare
        for number, item in enumerate(row):
            rank[item] = number - middle

    for row in rows:
        settle(row)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        neighbours = above if down else below
        for row in rows if down else reversed(rows):
            row.sort(key=lambda item: _mean([rank[other] for other in neighbours[item]], rank[item]))
            settle(row)
    return rows


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _columns(
    rows: Sequence[Sequence[int]],
    sizes: Sequence[float],
    above: Sequence[Sequence[int]],
    below: Sequence[Sequence[int]],
) -> list[float]:
    """Centres: each as near to the mean of its neighbours as order and gaps allow, swept down and up."""
    columns = [0.0] * len(sizes)
    for row in rows:
        for item, x in zip(row, _pooled([0.0] * len(row), row, sizes), strict=True):
            columns[item] = x
    for sweep in range(2 * SWEEPS):
        down = sweep % 2 == 0
        neighbours = above if down else below
        for row in rows if down else reversed(rows):
            wanted = [_mean([columns[other] for other in neighbours[item]], columns[item]) for item in row]
            for item, x in zip(row, _pooled(wanted, row, sizes), strict=True):
                columns[item] = x
    return columns


def _pooled(wanted: Sequence[float], row: Sequence[int], sizes: Sequence[float]) -> list[float]:
    """Centres in the given order and without overlap that have the least squared distance from those wanted."""
    offsets: list[float] = []
    for number, item in enumerate(row):
        previous = offsets[-1] + (sizes[row[number - 1]] + sizes[item]) / 2 + GAP if number else 0.0
        offsets.append(previous)
    blocks: list[tuple[float, int]] = []  # mean and count of runs that touch
    for x, offset in zip(wanted, offsets, strict=True):
        mean, count = x - offset, 1
        while blocks and blocks[-1][0] > mean:
            before, number = blocks.pop()
            mean, count = (before * number + mean * count) / (number + count), number + count
        blocks.append((mean, count))
    means = [mean for mean, count in blocks for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]
