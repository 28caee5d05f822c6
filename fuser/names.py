"""Names that tell every value and node of a model apart, in whichever body of If, Loop or Scan it is.

Comes in: a model, changed in place. Goes out: the same model with the names of the main graph as they were, and those
of the bodies' values and nodes unique in the whole model. Two branches may use one name for different values, but
symbols of dims and weights that move to the main graph are told apart by name.
"""

import onnx_ir as ir


def name_apart(model: ir.Model) -> None:
    """Rename values and nodes of bodies whose name is taken already; values without a name keep having none."""
    values: set[str] = set()
    nodes: set[str] = set()
    for value in _values(model.graph):
        values.add(value.name or "")
    for node in model.graph:
        nodes.add(node.name or "")
    for graph in model.graph.subgraphs():
        for value in _values(graph):
            if value.name:
                value.name = _free(value.name, values)
        for node in graph:
            if node.name:
                node.name = _free(node.name, nodes)


def _values(graph: ir.Graph) -> list[ir.Value]:
    """The graph's own values, each once."""
    own = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    return list(dict.fromkeys(own))


def _free(name: str, taken: set[str]) -> str:
    """`name`, or with a number behind it when it is taken; the result is taken then."""
    result, number = name, 1
    while result in taken:
        result, number = f"{name}.{number}", number + 1
    taken.add(result)
    return result
