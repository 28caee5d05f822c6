"""Finds recurrences whose steps were written out one by one: the same work at places 0, 1, 2, … of the same tensors.

Comes in: the nodes of a graph. Goes out: per recurrence its last step and how many there are, for a miss: such a model
runs for the length that it was traced with only, and no single step is worth a kernel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fuser.cuts import data_inputs
from fuser.element import content_of
from fuser.lift import is_pointwise, is_view
from fuser.shapes import Shapes
from tilecore.contract.expr import Const

STEPS = 4  # as many equal steps are no coincidence
REACH = 16  # nodes of one step that are looked through

Places = dict[ir.Value, int]  # tensor → the place along some axis that a step reads


@dataclass(frozen=True, slots=True)
class Unrolled:
    """`count` steps, each of them made of `operators`; `last` ends the last one."""

    last: ir.Node
    count: int
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Step:
    previous: ir.Node | None
    operators: tuple[str, ...]
    places: Places


def unrolled(nodes: Sequence[ir.Node], shapes: Shapes) -> list[Unrolled]:
    """Every recurrence of at least `STEPS` steps, in graph order."""
    steps = {node: _step(node, shapes) for node in nodes if is_pointwise(node) and len(node.outputs) == 1}
    counts: dict[ir.Node, int] = {}
    for node, step in steps.items():
        before = None if step.previous is None else steps.get(step.previous)
        follows = before is not None and _follows(step, before)
        counts[node] = counts.get(step.previous, 1) + 1 if follows and step.previous is not None else 1
    inside = {step.previous for node, step in steps.items() if counts[node] > 1}
    ends = [node for node, count in counts.items() if count >= STEPS and node not in inside]
    within = {value.producer() for node in ends for value in node.inputs if value is not None}
    return [Unrolled(node, counts[node], steps[node].operators) for node in ends if node not in within]


def _follows(step: _Step, before: _Step) -> bool:
    """Whether a step reads what the one before reads, one place on (or back)."""
    if not step.places or step.places.keys() != before.places.keys():
        return False
    moves = {place - before.places[source] for source, place in step.places.items()}
    return moves in ({1}, {-1})


def _step(node: ir.Node, shapes: Shapes) -> _Step:
    """What leads to `node` from the nearest value of its operator and shape, and what it reads at fixed places."""
    shape = shapes.shape(node.outputs[0])
    operators, places = [node.op_type], Places()
    queue, previous = list(data_inputs(node)), None
    for value in queue:
        producer = value.producer()
        if producer is None or len(queue) > REACH:
            continue
        if producer.op_type == node.op_type and shapes.shape(value) == shape and is_pointwise(producer):
            previous = previous or producer
        elif is_pointwise(producer) and shapes.shape(value) == shape:
            operators.append(producer.op_type)
            queue += data_inputs(producer)
        else:
            places.update(_places(value, shapes))
    return _Step(previous, tuple(reversed(operators)), places)


def _places(value: ir.Value, shapes: Shapes) -> Iterator[tuple[ir.Value, int]]:
    """The tensor and the place in it that a value is a part of, changes of layout aside."""
    node = value.producer()
    while node is not None and is_view(node) and node.inputs[0] is not None:
        source = node.inputs[0]
        if node.op_type == "Split":
            yield source, value.index() or 0
            return
        if node.op_type in ("Gather", "Slice") and len(node.inputs) > 1 and node.inputs[1] is not None:
            content = content_of(node.inputs[1], shapes)
            if content is not None and len(content) == 1 and isinstance(content[0], Const):
                yield source, int(content[0].value)
            return
        value, node = source, source.producer()
