"""What the scan asks of a cost model: what a region costs as one kernel and node by node, and whether it is worth one.

Comes in: a spec and the work of its nodes. Goes out: predicted seconds and decisions. The model of a machine lives
outside of the fuser; here is only what it needs to know of nodes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from fuser.cuts import data_inputs, is_plumbing
from fuser.dots import is_dot
from fuser.lift import cost_of, is_view
from fuser.region import Prediction
from fuser.shapes import Shapes
from tilecore.contract.expr import Const, Expr, Sym, const, rewrite
from tilecore.contract.spec import Spec

COPYLESS = frozenset(("Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity"))  # ONNX Runtime shares the memory
SLOW: Mapping[str, int] = {  # operations per element in ONNX Runtime, where they are more than the arithmetic
    "LayerNormalization": 24, "SkipLayerNormalization": 200, "SkipSimplifiedLayerNormalization": 200,
    "Softmax": 20, "LogSoftmax": 24, "Erf": 30, "Gelu": 34, "FastGelu": 34, "BiasGelu": 34, "QuickGelu": 30,
    "Transpose": 12, "Pow": 30, "InstanceNormalization": 24, "GroupNormalization": 24,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Work:
    """One node run by itself: bytes read and written, and its elements times vectorised operations for each.

    A contraction `multiplies`: what its products cost is asked of its spec.
    """

    moved: int
    operations: int
    multiplies: bool = False


class CostModel(Protocol):
    """Decisions that depend on the machine."""

    def merges(self, spec: Spec) -> bool:
        """Whether the products of a contraction are better off in one kernel than in one each."""
        ...

    def sizes(self, spec: Spec) -> Mapping[str, int]:
        """A typical size of every symbolic dim of the spec's inputs."""
        ...

    def predict(self, spec: Spec, nodes: tuple[Work, ...], sizes: Mapping[str, int]) -> Prediction | None:
        """What the region costs fused and not; None when that cannot be said."""
        ...

    def accepts(self, prediction: Prediction) -> bool:
        """Whether a region with this prediction is fused."""
        ...


@dataclass(frozen=True, slots=True)
class Everything:
    """The cost model that never objects."""

    def merges(self, spec: Spec) -> bool:
        """True."""
        return True

    def sizes(self, spec: Spec) -> Mapping[str, int]:
        """None are needed."""
        return {}

    def predict(self, spec: Spec, nodes: tuple[Work, ...], sizes: Mapping[str, int]) -> Prediction | None:
        """None."""
        return None

    def accepts(self, prediction: Prediction) -> bool:
        """True."""
        return True


EVERYTHING = Everything()


def misread(nodes: Iterable[ir.Node]) -> bool:
    """Whether ONNX Runtime's own optimiser may take the nodes for something else when it is left to them.

    It fuses decomposed normalisations without looking at `keepdims`, at the exponent or at how wide the scale is: a
    chain around a plain reduction must end inside of a region, whatever that costs.
    """
    return any(node.op_type.startswith("Reduce") for node in nodes)


def work_of(nodes: Iterable[ir.Node], shapes: Shapes, sizes: Mapping[str, int]) -> tuple[Work, ...]:
    """The work of each node that ONNX Runtime would run and that does more than share memory."""
    return tuple(
        _work(node, shapes, sizes) for node in nodes if node.op_type not in COPYLESS and not is_plumbing(node, shapes)
    )


def _work(node: ir.Node, shapes: Shapes, sizes: Mapping[str, int]) -> Work:
    made = sum(_count(value, shapes, sizes) for value in node.outputs)
    read = [(_count(value, shapes, sizes), _width(value, shapes)) for value in data_inputs(node)]
    moved = sum(_width(value, shapes) * _count(value, shapes, sizes) for value in node.outputs)
    moved += sum(width * (min(count, made) if is_view(node) else count) for count, width in read)
    if is_dot(node):
        return Work(moved, 0, multiplies=True)
    each = SLOW.get(node.op_type) or max(cost_of(node), 1)
    return Work(moved, max([made, *(count for count, _ in read)]) * each)


def _count(value: ir.Value, shapes: Shapes, sizes: Mapping[str, int]) -> int:
    count = 1
    for dim in shapes.shape(value) or ():
        count *= max(_size(dim, sizes), 0)
    return count


def _size(dim: Expr, sizes: Mapping[str, int]) -> int:
    if not isinstance(dim, Const):
        dim = rewrite(dim, lambda part: const(sizes.get(part.name, 1)) if isinstance(part, Sym) else None)
    return int(dim.value) if isinstance(dim, Const) else 1


def _width(value: ir.Value, shapes: Shapes) -> int:
    dtype = shapes.dtype(value)
    return 4 if dtype is None else max(1, dtype.bitwidth // 8)
