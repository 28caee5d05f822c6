"""Scan with any axes and directions for an evaluator that knows axis 0 and forwards only.

Comes in: a Scan node and what it reads. Goes out: an equal node over turned inputs, and what turns its outputs back.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

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
