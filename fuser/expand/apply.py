"""Puts definitions in the place of fused operators.

Comes in: a model, changed in place, and the operators to leave alone. Goes out: which operators were replaced, and
which have no definition, with the reason. Every node of a definition carries the name of its operator (`origin_of`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes import common

from fuser.expand import grouped_query, multi_head, positions, standard
from fuser.expand.writer import DOMAIN, Form, FormError
from fuser.shapes import Shapes

MARK = "tilefuse.form"  # the key of the operator, in the metadata of the nodes that define it
NAME = "tilefuse.form.name"
Definition = Callable[[Form, str], ir.Function]

CONTRIB: Mapping[str, Definition] = {  # domain com.microsoft
    "Attention": multi_head.attention,
    "EmbedLayerNormalization": positions.embed_layer_normalization,
    "GroupQueryAttention": grouped_query.grouped_query_attention,
    "MultiHeadAttention": multi_head.multi_head_attention,
    "RotaryEmbedding": positions.rotary_embedding,
}


@dataclass(frozen=True, slots=True)
class Expanded:
    """What became of the fused operators, by their keys: those now in pieces, and those without a definition."""

    done: frozenset[str]
    refused: Mapping[str, str]  # key → why it has no definition


def expand(model: ir.Model, shapes: Shapes, kept: Iterable[str]) -> Expanded:
    """Replace every operator that has a definition, but those of `kept`. `shapes` are those of this very model."""
    done: set[str] = set()
    refused: dict[str, str] = {}
    replaced: list[tuple[ir.Node, ir.Node]] = []
    for key, node in forms_of(model):
        if key in kept:
            continue
        definition = definition_of(node)
        if definition is None:
            continue
        version = _version(model, node.domain)
        form = Form(node, shapes, _version(model, ""), version)
        try:
            function = definition(form, key)
        except FormError as error:
            refused[key] = f"has no definition here: {error}"
            continue
        model.functions[function.identifier()] = function
        replaced.append((node, _call(form, key)))
        done.add(key)
    for node, call in replaced:
        _replace(node, call)
    if replaced:
        common.InlinePass(criteria=lambda function: function.domain == DOMAIN)(model)
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    return Expanded(frozenset(done), refused)


def forms_of(model: ir.Model) -> list[tuple[str, ir.Node]]:
    """The fused operators of the model, with keys that are the same in every copy of it."""
    found = [node for node in model.graph.all_nodes() if definition_of(node) is not None]
    return [(f"{node.op_type}.{number}", node) for number, node in enumerate(found)]


def definition_of(node: ir.Node) -> Definition | None:
    """How to write the operator's definition; None for operators that need none."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    if (domain, node.op_type) in standard.FORMS:
        return standard.define
    return CONTRIB.get(node.op_type) if domain == "com.microsoft" else None


def origin_of(node: ir.Node) -> str:
    """The key of the operator that the node defines a part of; empty for nodes of the model itself."""
    return node.metadata_props.get(MARK, "")


def own_names(nodes: Iterable[ir.Node]) -> tuple[str, ...]:
    """The names of the model's own nodes that these are, or are parts of."""
    return tuple(dict.fromkeys(node.metadata_props.get(NAME) or node.name or node.op_type for node in nodes))


def _version(model: ir.Model, domain: str) -> int:
    imports = model.graph.opset_imports
    return imports.get(domain, imports.get("ai.onnx", 1) if domain == "" else 1)


def _call(form: Form, key: str) -> ir.Node:
    """The call of the function `key` with the node's inputs; its attributes are bound when the body refers to them."""
    node = form.node
    outputs = [ir.Value(name=f"{form.name}/result_{i}") for i in range(len(node.outputs)) if form.gives(i)]
    attributes = standard.bound_attributes(node, form.version) if definition_of(node) is standard.define else []
    marks = {MARK: key, NAME: form.name}
    return ir.Node(DOMAIN, key, list(node.inputs), attributes, outputs=outputs, name=form.name, metadata_props=marks)


def _replace(node: ir.Node, call: ir.Node) -> None:
    given = [value for value in node.outputs if value.name]
    for old, new in zip(given, call.outputs, strict=True):
        new.type, new.shape = old.type, old.shape
    graph = node.graph
    if graph is None:
        raise ValueError(f"{node.op_type} {node.name!r} is in no graph")
    ir.convenience.replace_nodes_and_values(graph, node, [node], [call], given, list(call.outputs))
