"""Which nodes compute each token by itself, proved from their element rules.

Comes in: a graph, the mask of its tokens [batch, length] and what is known of shapes. Goes out: the nodes that are per
token and how each uses its inputs. A tensor leads by 2 axes when it is [batch, length, …], by 1 when it is
[batch·length, …]. A node is per token if every such tensor that it needs is read at the token's own place, and nothing
else depends on the place.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from fuser.dims import integer
from fuser.dots import dot_of, is_dot
from fuser.element import ZERO, Element, Index, LiftError, Shape, dtype_of, flatten, shape_of
from fuser.graph import bodies
from fuser.lift import rule_of
from fuser.reductions import axes_of_reduction, is_reduction
from fuser.shapes import Shapes
from tilecore.contract.expr import Expr, Var, symbols, variables

BY_CHANNEL = frozenset(("BatchNormalization", "GroupNormalization", "InstanceNormalization"))  # weights over axis 1
# The token's own element; one that is to be broadcast to all tokens first; one that has nothing to do with the token.
Use = Literal["own", "spread", "same"]
Uses = Mapping[ir.Value, Use]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The dims of the mask, and which tensors have them: [batch, length, …] leads by 2 axes, [batch·length, …] by 1."""

    shapes: Shapes
    dims: Shape
    opset: int

    def lead(self, value: ir.Value) -> int:
        """The leading axes that are the token; 0 when it has none, or when another dim is not a number."""
        shape = self.shapes.shape(value)
        if not shape or value.const_value is not None:
            return 0
        lead = 2 if shape[:2] == self.dims else 1 if shape[0] == self.dims[0] * self.dims[1] else 0
        return lead if all(integer(dim) is not None for dim in shape[lead:]) else 0

    def rest(self, value: ir.Value) -> list[int]:
        """The dims of a token's part."""
        return self._literal(value, self.lead(value))

    def numbers(self, value: ir.Value) -> list[int]:
        """The dims behind the first two (or the first, where it counts all tokens)."""
        return self._literal(value, self.lead(value) or 2)

    def _literal(self, value: ir.Value, start: int) -> list[int]:
        return [size for dim in shape_of(value, self.shapes)[start:] if (size := integer(dim)) is not None]

    def place(self, index: Index, lead: int) -> Expr:
        """Which token leading indices stand for."""
        return flatten(index[:lead], self.dims) if lead == 2 else index[0]


def per_token(graph: ir.Graph, mask: ir.Value, tokens: Tokens) -> dict[ir.Node, Uses]:
    """The nodes that compute each token by itself, together with a contraction by weights, and how they use inputs."""
    return _worthwhile(_per_token(graph, tokens, _shadow(graph, mask)))


def _shadow(graph: ir.Graph, mask: ir.Value) -> set[ir.Value]:
    """What moves, changes or reduces the mask, and so may say something at the padding: it is computed as it stands."""
    found = {mask}
    for node in graph:
        if any(value in found for value in node.inputs) and (rule_of(node) is not None or is_reduction(node)):
            found.update(node.outputs)
    return found


def _per_token(graph: ir.Graph, tokens: Tokens, shadow: set[ir.Value]) -> dict[ir.Node, Uses]:
    """The nodes that compute each token by itself, and how they use their inputs."""
    found: dict[ir.Node, Uses] = {}
    for node in graph:
        if any(value in shadow for value in node.inputs) or bodies(node):
            continue
        try:
            uses = _uses(node, tokens)
        except LiftError:  # no rule, or none for this use: it is left as it is
            continue
        if uses is not None and "own" in uses.values():
            found[node] = uses
    return found


def _uses(node: ir.Node, tokens: Tokens) -> dict[ir.Value, Use] | None:
    """How the node uses its inputs, when each of its outputs is a token's by itself; else None."""
    uses: dict[ir.Value, Use] = {}
    for number, output in enumerate(node.outputs):
        if not output.name:
            continue
        lead = tokens.lead(output)
        if not lead:
            return None
        shape = shape_of(output, tokens.shapes)
        index = tuple(Var(f"i{axis}", extent=dim) for axis, dim in enumerate(shape))
        found = _reads(node, number, index, tokens)
        if found is None:
            return None
        for value, at in found:
            use = _use_of(value, at, index, lead, tokens)
            if use is None or uses.setdefault(value, use) != use:
                return None
    return uses


def _use_of(value: ir.Value, at: Index, index: Index, lead: int, tokens: Tokens) -> Use | None:
    """How `value`, read at `at` for the output's element `index`, is used; None when it mixes tokens."""
    own = tokens.lead(value)
    if own and tokens.place(at, own) == tokens.place(index, lead):
        return "own" if not _depends(at[own:], index[:lead]) else None
    if not _depends(at, index[:lead]):
        return "same"
    spread = lead == 2 and len(at) == len(index) and value.const_value is None
    spread = spread and all(here in (there, ZERO) for here, there in zip(at[:2], index[:2], strict=True))
    return "spread" if spread and not _depends(at[2:], index[:2]) and _numbers(value, tokens) else None


def _numbers(value: ir.Value, tokens: Tokens) -> bool:
    return all(integer(dim) is not None for dim in shape_of(value, tokens.shapes)[2:])


def _depends(exprs: Iterable[Expr], places: Sequence[Expr]) -> bool:
    """Whether an expression depends on the token's place."""
    return any(place in variables(expr) for expr in exprs for place in places)


def _reads(node: ir.Node, output: int, index: Index, tokens: Tokens) -> list[tuple[ir.Value, Index]] | None:
    """What one element of an output reads, and where; None when its value depends on its place otherwise."""
    found: list[tuple[ir.Value, Index]] = []

    def at(value: ir.Value, where: Index) -> Expr:
        found.append((value, where))
        return Var(f"x{len(found)}", dtype_of(value, tokens.shapes))

    rule = rule_of(node)
    if rule is not None:
        result = rule(Element(node, output, index, at, tokens.shapes, tokens.opset))
    elif is_dot(node):
        dot = dot_of(node, tokens.shapes)
        left, right = dot.locate(index, Var("k", extent=dot.depth))
        for side, where in enumerate((left, right)):
            dot.read(side, at, where)
        result = dot.finish(Var("sum", dtype_of(dot.out, tokens.shapes)), index, at)
    elif is_reduction(node) and node.op_type not in BY_CHANNEL:
        return _reads_of_reduction(node, index, tokens)
    else:
        return None
    lead = tokens.lead(node.outputs[output])
    sizes = {symbol for dim in tokens.dims for symbol in symbols(dim)}
    return None if _depends((result,), index[:lead]) or sizes & symbols(result) else found


def _reads_of_reduction(node: ir.Node, index: Index, tokens: Tokens) -> list[tuple[ir.Value, Index]] | None:
    """The same for a reduction inside each token: operands of the source's shape are read there, constants anywhere."""
    source = node.inputs[0]
    lead = 0 if source is None else tokens.lead(source)
    if source is None or not lead or any(axis < lead for axis in axes_of_reduction(node, tokens.shapes, tokens.opset)):
        return None
    shape = shape_of(source, tokens.shapes)
    here = (*index[:lead], *(Var(f"j{axis}", extent=dim) for axis, dim in enumerate(shape[lead:])))
    found: list[tuple[ir.Value, Index]] = []
    for value in node.inputs:
        if value is None or value.const_value is not None:
            continue
        if tokens.shapes.shape(value) != shape:
            return None
        found.append((value, here))
    return found


def _worthwhile(found: Mapping[ir.Node, Uses]) -> dict[ir.Node, Uses]:
    """The nodes that are connected, through tokens' own values, with a contraction by weights."""
    above: dict[ir.Node, ir.Node] = {}

    def group(node: ir.Node) -> ir.Node:
        while node in above:
            node = above[node]
        return node

    for node, uses in found.items():
        for value in _own(uses):
            maker = value.producer()
            if maker is not None and maker in found and group(maker) is not group(node):
                above[group(maker)] = group(node)
    heavy = {group(node) for node in found if is_dot(node)}
    return {node: uses for node, uses in found.items() if group(node) in heavy}


def _own(uses: Uses) -> list[ir.Value]:
    return [value for value, use in uses.items() if use == "own"]
