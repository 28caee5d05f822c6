"""Definitions that the ONNX standard itself gives: the function body of an operator's schema.

Comes in: a node of a standard domain. Goes out: its function, with attributes bound. Only operators that nothing else
in the fuser knows are looked up here; see `FORMS`. What graphs in attributes read from outside (`score_mod` of
FlexAttention may) becomes further inputs of the function, `Form.captured`.
"""

from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol, cast

import onnx
import onnx_ir as ir

from fuser.expand.writer import DOMAIN, Form, FormError
from fuser.graph import bodies, captured_by

FORMS = frozenset(
    {
        ("", "Attention"),
        ("", "GroupNormalization"),
        ("", "LinearAttention"),
        ("", "RotaryEmbedding"),
        ("", "SwiGLU"),
        ("", "Swish"),
        ("ai.onnx.preview", "FlexAttention"),
    }
)
WITHOUT_KERNEL = frozenset(  # ONNX Runtime runs these at no opset, or not at the newest: their pieces, it does
    {("", "SwiGLU"), ("", "Swish"), ("ai.onnx.preview", "FlexAttention")}
)


class Schema(Protocol):
    """What is used of `onnx.defs.OpSchema`, whose type stub leaves function bodies out."""

    attributes: Mapping[str, Any]
    has_function: bool
    function_opset_versions: Sequence[int]
    has_context_dependent_function: bool
    context_dependent_function_opset_versions: Sequence[int]

    def get_function_with_opset_version(self, version: int, /) -> bytes:
        """The body, a serialised FunctionProto."""
        ...

    def get_context_dependent_function_with_opset_version(
        self, version: int, node: bytes, types: Sequence[bytes], /
    ) -> bytes:
        """The body for one node and the types of its inputs."""
        ...


def define(form: Form, key: str) -> ir.Function:
    """The schema's function body for this node. FormError when the standard has none for the model's opset."""
    node = form.node
    version = form.version
    try:
        schema = cast("Schema", onnx.defs.get_schema(node.op_type, version, node.domain))
    except onnx.defs.SchemaError as error:
        raise FormError(f"ONNX has no {node.op_type} at opset {version}") from error
    text = _body(schema, form, version)
    proto = onnx.FunctionProto.FromString(text)
    _check_operators(proto, form.opset)
    proto.domain, proto.name = DOMAIN, key
    _keep_outputs(proto, form)
    for attribute, graph in bodies(form.node):
        outside = sorted(captured_by(graph), key=lambda value: value.name or "")
        form.captured += outside
        proto.input.extend(f"{attribute}/{value.name}" for value in outside)
    del proto.opset_import[:]
    proto.opset_import.append(onnx.helper.make_opsetid("", form.opset))
    for number, inner in enumerate(proto.node):
        inner.name = f"{form.name}/{inner.op_type}_{number}"
    _prefix_values(proto, f"{form.name}/")
    return ir.from_proto(proto)


def bound_attributes(node: ir.Node, version: int) -> list[ir.Attr]:
    """The attributes that a body refers to: those of the node, and the schema's defaults for the others."""
    schema = onnx.defs.get_schema(node.op_type, version, node.domain)
    found = [a for a in node.attributes.values() if a.type not in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)]
    names = {attr.name for attr in node.attributes.values()}
    defaults = [
        ir.from_proto(attr.default_value)
        for name, attr in schema.attributes.items()
        if name not in names and attr.default_value.name
    ]
    return [*found, *defaults]


def _body(schema: Schema, form: Form, version: int) -> bytes:
    if schema.has_function:
        return schema.get_function_with_opset_version(max(schema.function_opset_versions))
    if not schema.has_context_dependent_function:
        raise FormError(f"ONNX defines {form.node.op_type} of opset {version} in words only")
    proto = ir.to_proto(form.node)
    for attribute in proto.attribute:
        if attribute.HasField("g"):
            _write_apart(attribute.g, f"{attribute.name}/")
    names = {attr.name for attr in proto.attribute}
    for name, attr in schema.attributes.items():
        if name not in names and attr.default_value.name:
            proto.attribute.append(attr.default_value)
    types = [_type(form, position).SerializeToString() for position in range(len(form.node.inputs))]
    newest = max(schema.context_dependent_function_opset_versions)
    try:
        return schema.get_context_dependent_function_with_opset_version(newest, proto.SerializeToString(), types)
    except (RuntimeError, ValueError) as error:
        raise FormError(f"ONNX gives no definition for this use: {str(error).splitlines()[0]}") from error


def _write_apart(graph: onnx.GraphProto, prefix: str) -> None:
    """A graph as it may stand inside of the definition: no weights, no name that the definition itself has.

    onnx puts such a graph's nodes between its own, but loses its initializers and renames only what is not nested.
    """
    weights = [onnx.helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in graph.initializer]
    nodes = [*weights, *graph.node]
    del graph.initializer[:], graph.node[:]
    graph.node.extend(nodes)
    _prefix_nodes(graph.node, prefix, frozenset())
    for value in (*graph.input, *graph.output):
        value.name = f"{prefix}{value.name}"


def _type(form: Form, position: int) -> onnx.TypeProto:
    if not form.has(position):
        return onnx.TypeProto()
    sizes = [str(dim) if not hasattr(dim, "value") else int(str(dim)) for dim in form.shape(position)]
    return onnx.helper.make_tensor_type_proto(int(form.dtype(position)), sizes)


def _keep_outputs(proto: onnx.FunctionProto, form: Form) -> None:
    kept = [name for position, name in enumerate(proto.output) if form.gives(position)]
    del proto.output[:]
    proto.output.extend(kept)
    del proto.input[len(form.node.inputs) :]


def _prefix_values(proto: onnx.FunctionProto, prefix: str) -> None:
    """Names of inner values that say where they come from."""
    inputs = set(proto.input)
    outputs = [f"{prefix}{name}" for name in proto.output]
    del proto.output[:]
    proto.output.extend(outputs)
    _prefix_nodes(proto.node, prefix, inputs)


def _prefix_nodes(nodes: Iterable[onnx.NodeProto], prefix: str, own: AbstractSet[str]) -> None:
    """The same in nodes and in what their subgraphs read from outside; `own` names stay."""

    def rename(names: MutableSequence[str], kept: AbstractSet[str]) -> None:
        for index, name in enumerate(names):
            if name and name not in kept:
                names[index] = f"{prefix}{name}"

    for node in nodes:
        rename(node.input, own)
        rename(node.output, own)
        for graph in (attr.g for attr in node.attribute if attr.HasField("g")):
            inner = {value.name for value in (*graph.input, *graph.initializer)}
            inner |= {name for made in graph.node for name in made.output}
            _prefix_nodes(graph.node, prefix, own | inner)
            for value in graph.output:
                value.name = value.name if value.name in own | inner else f"{prefix}{value.name}"


def _check_operators(proto: onnx.FunctionProto, opset: int) -> None:
    """Every operator of the body exists at the model's opset, with the attributes and inputs that the body gives it."""
    for node in proto.node:
        try:
            schema = onnx.defs.get_schema(node.op_type, opset, "")
        except onnx.defs.SchemaError as error:
            raise FormError(f"its definition uses {node.op_type}, which opset {opset} does not have") from error
        variadic = any(entry.option == onnx.defs.OpSchema.FormalParameterOption.Variadic for entry in schema.inputs)
        given = {attribute.name for attribute in node.attribute}
        if given - set(schema.attributes) or (len(node.input) > len(schema.inputs) and not variadic):
            raise FormError(f"its definition uses {node.op_type} in a form that opset {opset} does not have")
