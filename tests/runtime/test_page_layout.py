"""Graphs are laid out without overlaps, downwards, and in time that grows no faster than they do."""

import random
import time
from collections import defaultdict
from itertools import pairwise

import pytest

from runtime.page.layout import GAP, LONGEST, place

Edges = list[tuple[int, int]]


def chain_with_branches(count: int, seed: int = 0) -> Edges:
    """A long graph such as transformers have: a trunk, short side branches, a few edges from the very top."""
    draw = random.Random(seed)
    edges = [(max(0, i - draw.choice((1, 1, 1, 2, 3))), i) for i in range(1, count)]
    edges += [(draw.randrange(max(0, i - 30), i), i) for i in range(1, count) if draw.random() < 0.3]
    edges += [(0, i) for i in range(1, count) if draw.random() < 0.02]
    return sorted(set(edges))


@pytest.mark.parametrize("count", [1, 2, 50, 400])
def test_boxes_do_not_overlap_and_edges_go_down(count: int) -> None:
    widths = [30.0 + 7 * (i % 9) for i in range(count)]
    edges = chain_with_branches(count)
    found = place(widths, edges, late=frozenset())
    layers: dict[float, list[tuple[float, float]]] = defaultdict(list)
    for (x, y), width in zip(found.centres, widths, strict=True):
        layers[y].append((x - width / 2, x + width / 2))
        assert x - width / 2 >= 0
        assert x + width / 2 <= found.width
        assert 0 < y < found.height
    for row in layers.values():
        for (_, right), (left, _) in pairwise(sorted(row)):
            assert left - right >= GAP - 1e-6
    for (source, target), route in zip(edges, found.routes, strict=True):
        assert found.centres[source][1] < found.centres[target][1]
        if route is None:
            continue
        assert (route[0], route[-1]) == (found.centres[source], found.centres[target])
        assert len(route) <= LONGEST + 1
        assert all(upper < lower for (_, upper), (_, lower) in pairwise(route))


def test_late_boxes_stand_above_their_first_reader() -> None:
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (5, 4)]
    early, late = (place([20.0] * 6, sorted(edges), late=frozenset(boxes)) for boxes in ((), (5,)))
    assert early.centres[5][1] == early.centres[0][1]
    assert late.centres[5][1] == late.centres[3][1]


def test_a_straight_chain_is_straight() -> None:
    found = place([20.0, 60.0, 30.0], [(0, 1), (1, 2)], late=frozenset())
    assert len({x for x, _ in found.centres}) == 1


def test_an_empty_graph_has_no_size() -> None:
    assert place([], [], late=frozenset()).centres == ()


def test_two_thousand_boxes_take_seconds_at_most() -> None:
    start = time.perf_counter()
    place([80.0] * 2000, chain_with_branches(2000), late=frozenset())
    assert time.perf_counter() - start < 5
