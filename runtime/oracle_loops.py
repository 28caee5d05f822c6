"""Scan and Loop as the standard means them, for an evaluator with gaps.

onnx.reference scans along axis 0 and forwards only, and joins what a Loop makes per step along its first axis instead
of stacking it. Comes in: a node and what it reads. Goes out: a node that it evaluates right, and what turns its outputs
into those of the first.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

Array = np.ndarray[Any, np.dtype[Any]]
LAYOUT = ("scan_input_axes", "scan_input_directions", "scan_output_axes", "scan_output_directions")


def straightened(node: onnx.NodeProto, scope: Mapping[str, Array]) -> tuple[onnx.NodeProto, dict[str, Array]]:
    """The node over inputs whose first axis is time, in order; `scope` with those inputs under names of their own."""
    count = next(attribute.i for attribute in node.attribute if attribute.name == "num_scan_inputs")
    first = len(node.input) - count
    turned = dict(scope)
    plain = onnx.NodeProto()
    plain.CopyFrom(node)
    del plain.attribute[:]
    plain.attribute.extend(attribute for attribute in node.attribute if attribute.name not in LAYOUT)
    for index, (axis, backwards) in enumerate(_layouts(node, "input", count)):
        name = f"{node.input[first + index]}#{index}"
        array = np.moveaxis(scope[node.input[first + index]], axis, 0)
        turned[name] = np.ascontiguousarray(array[::-1] if backwards else array)
        plain.input[first + index] = name
    return plain, turned


def turned_back(node: onnx.NodeProto, values: Sequence[Array]) -> list[Array]:
    """The outputs of the straightened node as those of `node`; every output of the node has a value."""
    count = next(attribute.i for attribute in node.attribute if attribute.name == "num_scan_inputs")
    states = len(node.input) - count
    stacked = values[states:]
    layouts = _layouts(node, "output", len(stacked))
    return [
        *values[:states],
        *(np.moveaxis(v[::-1] if back else v, 0, axis) for v, (axis, back) in zip(stacked, layouts, strict=True)),
    ]


def _layouts(node: onnx.NodeProto, side: str, count: int) -> list[tuple[int, bool]]:
    """Axis of time and whether it runs backwards, per scanned input or output."""
    known = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    axes = known.get(f"scan_{side}_axes") or [0] * count
    directions = known.get(f"scan_{side}_directions") or [0] * count
    return [(int(axis), bool(back)) for axis, back in zip(axes, directions, strict=True)]


def stacking(node: onnx.NodeProto, scope: Mapping[str, Array], opset: int) -> tuple[onnx.NodeProto, dict[str, Array]]:
    """The Loop with two axes of 1 before what every step gives out, so that joining along the first one stacks.

    A condition that is left out is true; onnx.reference takes no step then.
    """
    plain, known = onnx.NodeProto(), dict(scope)
    plain.CopyFrom(node)
    if not plain.input[1]:
        plain.input[1] = f"{node.output[0]}#go"
        known[plain.input[1]] = np.array(True)
    body = next(attribute.g for attribute in plain.attribute if attribute.name == "body")
    states = len(body.input) - 2
    for number, value in enumerate(list(body.output)[1 + states :]):
        name = f"{value.name}#{number}"
        if opset < 13:
            body.node.append(helper.make_node("Unsqueeze", [value.name], [name], axes=[0, 1]))
        else:
            body.initializer.append(numpy_helper.from_array(np.array([0, 1], np.int64), f"{name}.axes"))
            body.node.append(helper.make_node("Unsqueeze", [value.name, f"{name}.axes"], [name]))
        body.output[1 + states + number].CopyFrom(helper.make_empty_tensor_value_info(name))
    return plain, known


def stacked(node: onnx.NodeProto, values: Sequence[Array]) -> list[Array]:
    """The outputs of `node` from those of its `stacking` form."""
    body = next(attribute.g for attribute in node.attribute if attribute.name == "body")
    states = len(body.input) - 2
    return [*values[:states], *(np.squeeze(value, 1) for value in values[states:])]


def steps_of(node: onnx.NodeProto, known: Mapping[str, Array]) -> int:
    """How many steps a Scan takes, or a Loop at most; 1 when a Loop does not say."""
    if node.op_type == "Loop":
        return max(1, int(known[node.input[0]])) if node.input[0] else 1
    count = next(attribute.i for attribute in node.attribute if attribute.name == "num_scan_inputs")
    axis, _ = _layouts(node, "input", count)[0]
    return max(1, known[node.input[len(node.input) - count]].shape[axis])
