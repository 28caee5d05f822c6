"""From a loaded model to its regions: fused operators are put in pieces first, and put back where that did not pay.

Comes in: a model as `load` gives it. Goes out: the model that the regions are of, with its shapes, regions and misses.
Invariant: an operator is in pieces in the result only if all of its work is inside regions, or if ONNX Runtime has no
kernel for it; else what is left outside may move data (a cache that grows by Concat), prepare masks and indices, or
round to the range of a whole tensor (DynamicQuantizeLinear, as the operator does itself), never compute other floats.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from fuser.cuts import is_plumbing
from fuser.expand.apply import expand, forms_of, origin_of, runs_in_pieces_only
from fuser.graph import bodies
from fuser.lift import is_generator, is_view
from fuser.region import Miss, Region, name_of
from fuser.scan import scan
from fuser.shapes import Shapes, infer
from fuser.simplify import simplify
from fuser.unpad import write_tables
from fuser.worth import EVERYTHING, CostModel

KIND = "operator"


@dataclass(frozen=True, slots=True)
class Found:
    """The regions of `model`, what was missed, and what is known of shapes."""

    model: ir.Model
    shapes: Shapes
    regions: tuple[Region, ...]
    misses: tuple[Miss, ...]


def find(model: ir.Model, cost: CostModel = EVERYTHING) -> Found:
    """All regions of a model. The model itself is not changed unless it is the one in the result."""
    forms = dict(forms_of(model))
    if not forms:
        write_tables(model)
        shapes = infer(model)
        return Found(model, shapes, *scan(model, shapes, cost))
    kept: dict[str, str] = {}
    while True:
        copy = model.clone()
        expanded = expand(copy, infer(copy), kept)
        simplify(copy)
        write_tables(copy)
        shapes = infer(copy)
        regions, misses = scan(copy, shapes, cost)
        outside = _outside(copy, shapes, regions)
        failed = {
            key: _reason(key, copy, outside[key], misses)
            for key in expanded.done
            if key in outside and not runs_in_pieces_only(forms[key])
        }
        if not failed:
            left = {**expanded.refused, **kept}
            return Found(copy, shapes, regions, (*misses, *_missed(forms, left)))
        kept |= failed


def _outside(model: ir.Model, shapes: Shapes, regions: Iterable[Region]) -> Mapping[str, list[ir.Node]]:
    """By operator, the nodes of its definition that compute floats and are in no region."""
    makers = {value: region for region in regions for value in region.outputs}
    found: dict[str, list[ir.Node]] = {}
    seen: set[ir.Value] = set()
    stack = list(model.graph.outputs)
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in makers:
            stack += makers[value].inputs
            continue
        node = value.producer()
        if node is None:
            continue
        stack += [source for source in node.inputs if source is not None]
        stack += [result for _, graph in bodies(node) for result in graph.outputs]
        key = origin_of(node)
        dtype = shapes.dtype(value)
        floats = dtype is None or dtype.is_floating_point()
        first = node.op_type == "DynamicQuantizeLinear"
        if key and floats and not (first or is_view(node) or is_generator(node) or is_plumbing(node, shapes)):
            found.setdefault(key, []).append(node)
    return found


def _reason(key: str, model: ir.Model, outside: Iterable[ir.Node], misses: Iterable[Miss]) -> str:
    """Why an operator does not fuse: what the scan says of its pieces, else which of them stay outside."""
    names = {name_of(node) for node in model.graph.all_nodes() if origin_of(node) == key}
    said = [miss.reason for miss in misses if miss.node in names]
    if said:
        return f"is left whole: in its definition, {said[0]}"
    kinds = ", ".join(sorted({node.op_type for node in outside}))
    return f"is left whole: of its definition, {kinds} would stay outside of every region"


def _missed(forms: Mapping[str, ir.Node], left: Mapping[str, str]) -> list[Miss]:
    """The operators that stay as they are."""
    return [
        Miss(
            "attention" if "Attention" in node.op_type else "row",
            name_of(node),
            f"{node.op_type} {left[key]}",
            op=node.op_type,
            reached=f"the anchor, {node.op_type}, and its definition",
            failed=f"{node.op_type} {name_of(node)}",
            advice=f"export {node.op_type} in pieces, or use it without what the reason names",
        )
        for key, node in forms.items()
        if key in left
    ]
