"""What the scan asks of a cost model: what a region costs as one kernel and node by node, and whether it is worth one.

Comes in: a spec and the work of its nodes. Goes out: predicted seconds and decisions. The model of a machine lives
outside of the fuser; here is only what it needs to know of nodes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from fuser.region import Prediction
from fuser.unfused import Work
from tilecore.contract.spec import Spec


class CostModel(Protocol):
    """Decisions that depend on the machine."""

    def refuses(self, spec: Spec) -> str | None:
        """Why the machine has no kernel for a region, where that is known before it is compiled."""
        ...

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


def _nothing(spec: Spec) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Everything:
    """The cost model that predicts nothing, and objects to nothing but what `refusal` gives a reason against."""

    refusal: Callable[[Spec], str | None] = _nothing

    def refuses(self, spec: Spec) -> str | None:
        """What `refusal` says."""
        return self.refusal(spec)

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
