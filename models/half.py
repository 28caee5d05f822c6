"""A model in 16-bit floats: every float32 tensor, constant, cast and value of a model in float16 or bfloat16 instead.

Comes in: a model in float32. Goes out: the same graph in the other type, as an exporter that was told `.half()` writes
it. Constants beyond the type's range become its largest: masks of finfo(float32).min are finfo(float16).min then.
"""

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

TYPES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
DTYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")


def in_half(model: onnx.ModelProto, kind: str, *, keep: frozenset[str] = frozenset()) -> onnx.ModelProto:
    """`model` in `kind` ("float16" or "bfloat16"). Operators named in `keep` stay float32, between casts."""
    half = onnx.ModelProto()
    half.CopyFrom(model)
    code = TYPES[kind]
    graph = half.graph
    for tensor in graph.initializer:
        _convert(tensor, code)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in DTYPE_ATTRIBUTES and attribute.i == TensorProto.FLOAT:
                attribute.i = code
            if attribute.HasField("t"):
                _convert(attribute.t, code)
            if node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                number = np.array(
                    attribute.f if attribute.name == "value_float" else list(attribute.floats), np.float32
                )
                attribute.CopyFrom(helper.make_attribute("value", _tensor(number, "", code)))
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = code
    if keep:
        _keep(graph, keep, code)
    return half


def _keep(graph: onnx.GraphProto, keep: frozenset[str], code: int) -> None:
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type not in keep:
            nodes.append(node)
            continue
        for i, name in enumerate(node.input):
            node.input[i] = f"{name}.wide{len(nodes)}"
            nodes.append(helper.make_node("Cast", [name], [node.input[i]], to=TensorProto.FLOAT))
        output = node.output[0]
        node.output[0] = f"{output}.wide"
        nodes += [node, helper.make_node("Cast", [node.output[0]], [output], to=code)]
    del graph.node[:]
    graph.node.extend(nodes)


def _convert(tensor: TensorProto, code: int) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        tensor.CopyFrom(_tensor(numpy_helper.to_array(tensor), tensor.name, code))


def _tensor(array: np.ndarray, name: str, code: int) -> TensorProto:
    dtype = helper.tensor_dtype_to_np_dtype(code)
    largest = float(ml_dtypes.finfo(dtype).max)
    finite = np.where(np.isfinite(array), np.clip(array, -largest, largest), array)
    return numpy_helper.from_array(finite.astype(dtype), name)
