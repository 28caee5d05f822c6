"""Where a model keeps tensors outside its own file.

In: a parsed model. Out: the locations that it names. Invariant: every tensor that ONNX Runtime may read is looked at,
those of subgraphs, attributes and functions too.
"""

from collections.abc import Iterable, Iterator

import onnx


def external_locations(model: onnx.ModelProto) -> tuple[str, ...]:
    """The distinct `location` entries of the model's external tensors, as written, in order of appearance."""
    found = dict.fromkeys(
        entry.value for tensor in _tensors(model) for entry in tensor.external_data if entry.key == "location"
    )
    return tuple(found)


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    yield from _of_graph(model.graph)
    for function in model.functions:
        yield from _of_nodes(function.node)


def _of_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    yield from _of_sparse(graph.sparse_initializer)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            yield from _of_sparse((attribute.sparse_tensor, *attribute.sparse_tensors))
            if attribute.HasField("g"):
                yield from _of_graph(attribute.g)
            for graph in attribute.graphs:
                yield from _of_graph(graph)


def _of_sparse(tensors: Iterable[onnx.SparseTensorProto]) -> Iterator[onnx.TensorProto]:
    for tensor in tensors:
        yield tensor.values
        yield tensor.indices
