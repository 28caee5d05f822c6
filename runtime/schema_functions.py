"""Puts the definitions that the ONNX standard gives in the place of operators that ONNX Runtime has no kernels for.

Comes in: a model as a protobuf. Goes out: a copy in which these operators (`fuser.expand.standard.WITHOUT_KERNEL`) are
their schema's function bodies, inlined by onnx itself: `verify` runs it as the original, so that the original rounds
after every node as a runtime would, and no code of the fuser takes part.
"""

from collections.abc import Iterable

import onnx
from onnx import helper, inliner

from fuser.expand.standard import WITHOUT_KERNEL


def in_pieces(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with definitions inlined. Raises RuntimeError or ValueError where onnx cannot inline one."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    opsets = {entry.domain: entry.version for entry in copy.opset_import}
    for nodes in (copy.graph.node, *(function.node for function in copy.functions)):
        _complete(nodes, opsets)
    names = [(domain, name) for domain, name in WITHOUT_KERNEL]
    return inliner.inline_selected_functions(copy, names, exclude=False, inline_schema_functions=True)


def _complete(nodes: Iterable[onnx.NodeProto], opsets: dict[str, int]) -> None:
    """Write out what onnx's inliner loses: attributes left at their defaults, and weights of graphs in attributes."""
    for node in nodes:
        if (node.domain, node.op_type) in WITHOUT_KERNEL:
            schema = onnx.defs.get_schema(node.op_type, opsets.get(node.domain, 1), node.domain)
            given = {attribute.name for attribute in node.attribute}
            node.attribute.extend(
                attribute.default_value
                for name, attribute in schema.attributes.items()
                if name not in given and attribute.default_value.name
            )
        for graph in (graph for attribute in node.attribute for graph in (attribute.g, *attribute.graphs)):
            _complete(graph.node, opsets)
            if (node.domain, node.op_type) in WITHOUT_KERNEL:
                weights = [helper.make_node("Constant", [], [each.name], value=each) for each in graph.initializer]
                inner = [*weights, *graph.node]
                del graph.initializer[:], graph.node[:]
                graph.node.extend(inner)
