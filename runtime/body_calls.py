"""Runs the bodies of If, Loop and Scan of a fused model, to see what every kernel in them is given and what it gives.

In: the fused model, the library beside it, and values of the main graph. Out: per fused node that ran in a body, its
first calls: the values of its inputs and outputs by name, in their own types. Everything else in the bodies is
evaluated as `oracle.py` does it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import helper
from onnx.reference.op_run import OpRun

from runtime import ort_values
from runtime.oracle import captured, evaluate, subgraphs
from runtime.session import DOMAIN

Array = npt.NDArray[Any]
CALLS = 3  # of one node: a loop may run it often


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the fused node `node`; `values` are those of its inputs and outputs by name."""

    node: onnx.NodeProto
    values: Mapping[str, Array]


def nodes_with_kernels(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The nodes of the main graph whose bodies hold fused nodes."""
    return [node for node in model.graph.node if any(True for _ in fused_nodes(node))]


def fused_nodes(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """The fused nodes in the bodies of `node`, however deep."""
    for graph in subgraphs(node):
        for inner in graph.node:
            if inner.domain == DOMAIN:
                yield inner
            yield from fused_nodes(inner)


def needs_of(node: onnx.NodeProto) -> set[str]:
    """The names that a node and its bodies read."""
    return {name for name in {*node.input, *captured(node)} if name}


def calls_in_bodies(model: onnx.ModelProto, library: Path, values: Mapping[str, Array]) -> list[Call]:
    """The first calls of every fused node in a body that runs; `values` has what `nodes_with_kernels` need.

    Raises OracleError for a body that cannot be evaluated, and what ONNX Runtime raises when a kernel fails.
    """
    recorder = _Recorder(model, library, [], {})
    operators = sorted({inner.op_type for node in nodes_with_kernels(model) for inner in fused_nodes(node)})
    kernels = [_operator(name, recorder) for name in operators]
    for node in nodes_with_kernels(model):
        feeds = {name: values[name] for name in sorted(needs_of(node)) if name in values}
        inputs = [_described(name, helper.np_dtype_to_tensor_dtype(value.dtype)) for name, value in feeds.items()]
        outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
        graph = helper.make_graph([node], "bodies", inputs, outputs)
        alone = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
        evaluate(alone, Path(), feeds, [output.name for output in outputs], operators=kernels)
    return recorder.calls


@dataclass(frozen=True, slots=True)
class _Recorder:
    model: onnx.ModelProto
    library: Path
    calls: list[Call]
    sessions: dict[str, ort.InferenceSession]

    def run(self, node: onnx.NodeProto, given: tuple[Array | None, ...]) -> list[Array]:
        """The kernel's outputs for `given`, in the order of the node's inputs."""
        types = _types(self.model)
        names = [name for name in node.input if name]
        feeds = {
            name: np.asarray(value, helper.tensor_dtype_to_np_dtype(types[name]), order="C")
            for name, value in zip(names, (value for value in given if value is not None), strict=True)
        }
        key = node.SerializeToString().hex()
        if key not in self.sessions:
            self.sessions[key] = self._session(node, types)
        outputs = [name for name in node.output if name]
        results = ort_values.run(self.sessions[key], outputs, feeds)
        if sum(call.node == node for call in self.calls) < CALLS:
            self.calls.append(Call(node, feeds | dict(zip(outputs, results, strict=True))))
        return results

    def _session(self, node: onnx.NodeProto, types: Mapping[str, int]) -> ort.InferenceSession:
        read, written = (
            [_described(name, types[name]) for name in dict.fromkeys(side) if name]
            for side in (node.input, node.output)
        )
        alone = helper.make_model(
            helper.make_graph([node], "kernel", read, written),
            opset_imports=self.model.opset_import,
            functions=self.model.functions,
            ir_version=self.model.ir_version,
        )
        options = ort.SessionOptions()
        options.register_custom_ops_library(str(self.library.resolve()))
        return ort.InferenceSession(alone.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _operator(name: str, recorder: _Recorder) -> type[OpRun]:
    """The fused operator `name` for onnx.reference: the kernel itself."""

    def run(self: OpRun, *given: Array | None) -> tuple[Array, ...]:
        return tuple(recorder.run(self.onnx_node, given))

    return type(name, (OpRun,), {"op_domain": DOMAIN, "_run": run})


def _types(model: onnx.ModelProto) -> dict[str, int]:
    """The element type of every value of the model and of its bodies that the file tells."""
    found: dict[str, int] = {}
    graphs = [model.graph]
    while graphs:
        graph = graphs.pop()
        for value in (*graph.input, *graph.output, *graph.value_info):
            found[value.name] = value.type.tensor_type.elem_type
        found |= {tensor.name: tensor.data_type for tensor in graph.initializer}
        graphs += [body for node in graph.node for body in subgraphs(node)]
    return found


def _described(name: str, kind: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, None)
