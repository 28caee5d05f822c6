"""Puts definitions in the place of fused operators.

Comes in: a model, changed in place, and the operators to leave alone. Goes out: which operators were replaced, and
which have no definition, with the reason. Every node of a definition carries the name of its operator (`origin_of`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes import common

from fuser.expand import diffusion, grouped_query, integers, multi_head, positions, standard
from fuser.expand.writer import DOMAIN, Form, FormError
from fuser.graph import release
from fuser.shapes import Shapes

MARK = "tilefuse.form"  # the key of the operator, in the metadata of the nodes that define it
NAME = "tilefuse.form.name"
Definition = Callable[[Form, str], ir.Function]

CONTRIB: Mapping[str, Definition] = {  # domain com.microsoft
    "Attention": multi_head.attention,
    "BiasAdd": diffusion.bias_add,
    "BiasSplitGelu": diffusion.bias_split_gelu,
    "DynamicQuantizeMatMul": integers.dynamic_quantize_mat_mul,
    "EmbedLayerNormalization": positions.embed_layer_normalization,
    "FusedGemm": diffusion.fused_gemm,
    "GroupNorm": diffusion.group_norm,
    "GroupQueryAttention": grouped_query.grouped_query_attention,
    "MultiHeadAttention": multi_head.multi_head_attention,
    "QAttention": multi_head.quantized_attention,
    "RotaryEmbedding": positions.rotary_embedding,
    "SkipGroupNorm": diffusion.skip_group_norm,
}
WITHOUT_DEFINITION: Mapping[str, str] = {  # of the same domain: why
    "DecoderMaskedMultiHeadAttention": "it writes into a shared cache at a length that is known at run time only",
    "DecoderMaskedSelfAttention": "it writes into a shared cache at a length that is known at run time only",
    "LongformerAttention": "which tokens are global is known at run time only",
    "PackedAttention": "its sequences lie end to end, from offsets that are known at run time only",
    "PackedMultiHeadAttention": "its sequences lie end to end, from offsets that are known at run time only",
    "PagedAttention": "its cache lies in pages that are known at run time only",
    "SparseAttention": "which blocks it attends to is known at run time only",
}


@dataclass(frozen=True, slots=True)
class Expanded:
    """What became of the fused operators, by their keys: those now in pieces, and those without a definition."""

    done: frozenset[str]
    refused: Mapping[str, str]  # key → why it has no definition


def expand(model: ir.Model, shapes: Shapes, kept: Iterable[str]) -> Expanded:
    """Replace every operator that has a definition, but those of `kept`. `shapes` are those of this very model."""
    refused: dict[str, str] = {}
    forms = [(key, key, node) for key, node in forms_of(model) if key not in kept]
    done = {key for _, key, _ in forms}
    while forms:
        refused |= _put_in(model, shapes, forms)
        left = [node for node in model.graph.all_nodes() if origin_of(node) in done - refused.keys()]
        inner = [node for node in left if definition_of(node) is not None]  # a definition may use a fused operator
        forms = [(f"{origin_of(node)}.{number}", origin_of(node), node) for number, node in enumerate(inner)]
    return Expanded(frozenset(done - refused.keys()), refused)


def _put_in(model: ir.Model, shapes: Shapes, forms: Iterable[tuple[str, str, ir.Node]]) -> dict[str, str]:
    """Replace operators, each given with the name for its function and its key; gives why some have no definition."""
    refused: dict[str, str] = {}
    replaced: list[tuple[ir.Node, ir.Node]] = []
    for name, key, node in forms:
        definition = definition_of(node)
        if definition is None:
            continue
        form = Form(node, shapes, _version(model, ""), _version(model, node.domain))
        try:
            function = definition(form, name)
        except FormError as error:
            refused[key] = f"has no definition here: {error}"
            continue
        model.functions[function.identifier()] = function
        replaced.append((node, _call(form, name, key)))
    for node, call in replaced:
        _replace(node, call)
    if replaced:
        common.InlinePass(criteria=lambda function: function.domain == DOMAIN)(model)
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    return refused


def forms_of(model: ir.Model) -> list[tuple[str, ir.Node]]:
    """The fused operators of the model, with keys that are the same in every copy of it."""
    found = [node for node in model.graph.all_nodes() if definition_of(node) is not None]
    return [(f"{node.op_type}.{number}", node) for number, node in enumerate(found)]


def definition_of(node: ir.Node) -> Definition | None:
    """How to write the operator's definition; None for operators that need none."""
    if _kind(node) in standard.FORMS:
        return standard.define
    if node.domain != "com.microsoft":
        return None
    return _refuse if node.op_type in WITHOUT_DEFINITION else CONTRIB.get(node.op_type)


def _refuse(form: Form, _key: str) -> ir.Function:
    raise FormError(WITHOUT_DEFINITION[form.node.op_type])


def _kind(node: ir.Node) -> tuple[str, str]:
    return ("" if node.domain == "ai.onnx" else node.domain), node.op_type


def runs_in_pieces_only(node: ir.Node) -> bool:
    """Whether ONNX Runtime has no kernel for the operator itself."""
    domain, name = _kind(node)
    if domain == "com.microsoft":
        return name in diffusion.WITHOUT_KERNEL
    return (domain, name) in standard.WITHOUT_KERNEL


def origin_of(node: ir.Node) -> str:
    """The key of the operator that the node defines a part of; empty for nodes of the model itself."""
    return node.metadata_props.get(MARK, "")


def own_names(nodes: Iterable[ir.Node]) -> tuple[str, ...]:
    """The names of the model's own nodes that these are, or are parts of."""
    return tuple(dict.fromkeys(node.metadata_props.get(NAME) or node.name or node.op_type for node in nodes))


def _version(model: ir.Model, domain: str) -> int:
    imports = model.graph.opset_imports
    return imports.get(domain, imports.get("ai.onnx", 1) if domain == "" else 1)


def _call(form: Form, function: str, key: str) -> ir.Node:
    """The call of a function with the node's inputs; its attributes are bound when the body refers to them."""
    node = form.node
    outputs = [ir.Value(name=f"{form.name}/result_{i}") for i in range(len(node.outputs)) if form.gives(i)]
    attributes = standard.bound_attributes(node, form.version) if definition_of(node) is standard.define else []
    marks = {MARK: key, NAME: node.metadata_props.get(NAME) or form.name}
    inputs = [*node.inputs, *form.captured]
    return ir.Node(DOMAIN, function, inputs, attributes, outputs=outputs, name=form.name, metadata_props=marks)


def _replace(node: ir.Node, call: ir.Node) -> None:
    given = [value for value in node.outputs if value.name]
    for old, new in zip(given, call.outputs, strict=True):
        new.type, new.shape = old.type, old.shape
    graph = node.graph
    if graph is None:
        raise ValueError(f"{node.op_type} {node.name!r} is in no graph")
    ir.convenience.replace_nodes_and_values(graph, node, [node], [call], given, list(call.outputs))
    release(node)
