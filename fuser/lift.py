"""Element rules by operator, and their inlining: an element of any value as an expression over chosen inputs.

Comes in: a model, its shapes, and a `leaf` function that says which values to read instead of computing. Goes out:
scalar expressions. Invariant: an expression is exact for every index inside the value's shape, or LiftError is raised.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import onnx_ir as ir

from fuser.element import ZERO, Element, Index, LiftError, content_of, dtype_of
from fuser.lift_pointwise import CONTRIB, COSTS, POINTWISE
from fuser.lift_views import GENERATORS, VIEWS, constant_element, pick
from fuser.precision import in_f32
from fuser.settle import settled
from fuser.shapes import Shapes
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, cast

Rule = Callable[[Element], Expr]
Leaf = Callable[[ir.Value, Index], Expr | None]
KEEPS_TYPE = frozenset(("Cast", "CastLike", "Where"))  # pointwise rules that choose or convert, but do not compute
PICKED = 16  # integers among which an element is picked by selects
DEPTH = 200  # nodes in one chain; deeper ones would exhaust Python's stack


def rule_of(node: ir.Node) -> Rule | None:
    """The element rule of a node; None for operators that have none (contractions, reductions, control flow)."""
    if node.domain in ("", "ai.onnx"):
        return VIEWS.get(node.op_type) or POINTWISE.get(node.op_type) or GENERATORS.get(node.op_type)
    return CONTRIB.get(node.op_type) if node.domain == "com.microsoft" else None


def is_view(node: ir.Node) -> bool:
    """Whether the node only moves or repeats elements."""
    return node.domain in ("", "ai.onnx") and node.op_type in VIEWS


def is_generator(node: ir.Node) -> bool:
    """Whether the node's elements depend on its index and small integers only."""
    return node.domain in ("", "ai.onnx") and node.op_type in GENERATORS


def is_pointwise(node: ir.Node) -> bool:
    """Whether each element is computed from the inputs' elements at the same place."""
    rule = rule_of(node)
    return rule is not None and not is_view(node) and not is_generator(node)


def is_cumulative(node: ir.Node) -> bool:
    """Whether the node gives a sum so far at every step."""
    return node.domain in ("", "ai.onnx") and node.op_type == "CumSum"


def _steady_sum(e: Element) -> Expr:
    """An element of a CumSum over one number, which is the same at every index."""
    value = settled(e.read(0, e.index))
    (axis,) = e.integers(1)
    if not isinstance(value, Const) or not isinstance(axis, Const) or not value.dtype.is_int:
        raise e.error("it sums what differs from element to element")
    place = int(axis.value) % len(e.index)
    before, dim = e.index[place], e.shape(0)[place]
    count = dim - 1 - before if e.attribute("reverse", 0) else before
    return cast(count if e.attribute("exclusive", 0) else count + 1, value.dtype) * value


def cost_of(node: ir.Node) -> int:
    """Rough cost of one element of a pointwise node, in multiplications; 0 for the others."""
    return COSTS.get(node.op_type, 1) if is_pointwise(node) else 0


@dataclass(slots=True)
class Inliner:
    """Writes elements of values as expressions, down to the values for which `leaf` gives one."""

    shapes: Shapes
    opset: int
    leaf: Leaf
    _memo: dict[tuple[ir.Value, Index], Expr] = field(default_factory=dict[tuple[ir.Value, Index], Expr])
    _depth: int = 0

    def at(self, value: ir.Value, index: Index) -> Expr:
        """The element of `value` at `index`. LiftError when it cannot be written over the leaves."""
        key = (value, index)
        if key not in self._memo:
            self._memo[key] = self._element(value, index)
        return self._memo[key]

    def _element(self, value: ir.Value, index: Index) -> Expr:
        found = self.leaf(value, index)
        if found is None:
            found = known_element(value, index, self.shapes)
        if found is not None:
            return found
        if self._depth >= DEPTH:
            raise LiftError(
                f"the chain above {value.name!r} is longer than {DEPTH} nodes",
                node=value.producer(),
                advice=f"make {value.name!r} an output of the model: it is then computed before this region",
            )
        self._depth += 1
        try:
            return self.compute(value, index)
        finally:
            self._depth -= 1

    def compute(self, value: ir.Value, index: Index) -> Expr:
        """The element of `value` by the rule of its node, even where `leaf` would read it."""
        node = value.producer()
        rule = None if node is None else rule_of(node) or (_steady_sum if is_cumulative(node) else None)
        if node is None or rule is None:
            what = (
                "is not an input of the region"
                if node is None
                else f"comes from {node.op_type}, which has no element rule"
            )
            raise LiftError(f"{value.name!r} {what}", node=node)
        typed = not is_pointwise(node) or node.op_type in KEEPS_TYPE
        at = self.at if typed else self._at_wide
        try:
            found = rule(Element(node, value.index() or 0, index, at, self.shapes, self.opset))
            return found if typed or found.dtype is not DType.F32 else cast(found, dtype_of(value, self.shapes))
        except LiftError as error:
            error.node = error.node or node
            raise
        except (TypeError, KeyError) as error:
            raise LiftError(f"{node.op_type} {node.name!r}: {error}", node=node) from error

    def _at_wide(self, value: ir.Value, index: Index) -> Expr:
        """Arithmetic on 16-bit floats is float32 and rounded once, which is what a correctly rounded one gives."""
        return in_f32(self.at(value, index))


def known_element(value: ir.Value, index: Index, shapes: Shapes) -> Expr | None:
    """An element that needs no load: of a patterned constant, or of integers that shape inference knows."""
    constant = constant_element(value, index, shapes)
    if constant is not None or value.const_value is not None:
        return constant
    content = content_of(value, shapes)
    if content is None or len(index) > 1 or len(content) > PICKED:
        return None
    return cast(pick(content, index[0] if index else ZERO), dtype_of(value, shapes))
