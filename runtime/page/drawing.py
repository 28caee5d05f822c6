"""What the page draws of a graph: a box per node, input and output, with its place, its region and its neighbours.

Comes in: a model, before or after regions were rewritten. Goes out: a `Drawing`, in JSON terms. Weights are not drawn.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from fuser.graph import captured
from fuser.region import name_of
from runtime.page.layout import place

LETTER = 6.6  # pixels of one letter of a label, on average
MARGIN = 18.0
LONGEST_LABEL = 26


@dataclass(frozen=True, slots=True)
class Box:
    """One box: its label, the whole name, and what it is: "node", "shape" (arithmetic on dims), "input" or "output"."""

    label: str
    name: str
    kind: str
    region: int | None = None  # index of the region that it belongs to or stands for


@dataclass(frozen=True, slots=True)
class Drawing:
    """Boxes in topological order, and edges as pairs of their indices with the name of the value."""

    boxes: tuple[Box, ...]
    edges: tuple[tuple[int, int, str], ...]

    def to_json(self) -> dict[str, Any]:
        """Boxes as [x, y, width, label, name, kind, region], edges as [from, to, value, points or null]."""
        widths = [LETTER * len(box.label) + MARGIN for box in self.boxes]
        late = frozenset(i for i, box in enumerate(self.boxes) if box.kind in ("input", "shape"))
        placement = place(widths, [(source, target) for source, target, _ in self.edges], late=late)
        boxes = [
            [round(x, 1), round(y, 1), round(width, 1), box.label, box.name, box.kind, box.region]
            for box, width, (x, y) in zip(self.boxes, widths, placement.centres, strict=True)
        ]
        edges = [
            [source, target, name, None if route is None else [round(c, 1) for point in route for c in point]]
            for (source, target, name), route in zip(self.edges, placement.routes, strict=True)
        ]
        return {
            "boxes": boxes, "edges": edges, "width": round(placement.width, 1), "height": round(placement.height, 1),
        }  # fmt: skip


def draw(
    model: ir.Model, regions: Mapping[ir.Node, int], labels: Mapping[ir.Node, str], plumbing: frozenset[ir.Node]
) -> Drawing:
    """The drawing of the model's top-level graph, whose nodes must be sorted. `labels` replace operators' names."""
    boxes: list[Box] = []
    made: dict[ir.Value, int] = {}
    for value in model.graph.inputs:
        if value.const_value is None:
            made[value] = len(boxes)
            boxes.append(Box(_short(value.name or "?"), value.name or "", "input"))
    edges: dict[tuple[int, int], str] = {}
    for node in model.graph:
        index = len(boxes)
        kind = "shape" if node in plumbing else "node"
        boxes.append(Box(_short(labels.get(node, node.op_type)), name_of(node), kind, regions.get(node)))
        for value in (*node.inputs, *sorted(captured(node), key=lambda value: value.name or "")):
            if value in made:
                edges.setdefault((made[value], index), value.name or "")
        made.update((value, index) for value in node.outputs)
    for value in model.graph.outputs:
        if value in made:
            edges[made[value], len(boxes)] = value.name or ""
        boxes.append(Box(_short(value.name or "?"), value.name or "", "output"))
    return Drawing(tuple(boxes), tuple((source, target, name) for (source, target), name in edges.items()))


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_LABEL else f"…{text[1 - LONGEST_LABEL :]}"
