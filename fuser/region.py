"""What the scan hands on: regions to fuse, and misses with their reasons."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from tilecore.contract.spec import Spec


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of a region as one kernel and of its nodes one by one, for `sizes` of the symbolic dims.

    `tie` is the factor that such predictions err by: closer ones say nothing.
    """

    fused: float
    unfused: float
    sizes: Mapping[str, int]
    tie: float = 1.0

    @property
    def text(self) -> str:
        """Both figures in one line: seconds fused, seconds unfused."""
        return f"{self.fused:.3e} {self.unfused:.3e}"


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A set of nodes that one kernel replaces.

    `inputs` stand in the order of `spec.inputs`, `outputs` in the order of the spec's results; `nodes` are in
    topological order. `label` is for the report only ("attention, causal", "LayerNorm + skip"). All nodes are in one
    graph; `body` says in which ("" for the model's own, "/layer/If.then_branch" for a branch).
    """

    kind: str  # "attention", "contraction" or "row"
    label: str
    nodes: tuple[ir.Node, ...]
    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]
    spec: Spec
    body: str = ""
    predicted: Prediction | None = None
    narrow: bool = False  # operands of its contractions are rounded to bfloat16
    kept_wide: int = 0  # rows that share each element, where operands could be rounded and these are too few
    stored: frozenset[ir.Value] = frozenset()  # those inputs and outputs that lie in memory as bfloat16


@dataclass(frozen=True, slots=True)
class Miss:
    """Something worth fusing that was left alone, and why.

    `node` names the anchor that the search started from and `op` is its operator. `reached` says what had been found
    before the condition `reason` failed, at the node `failed` ("" where no single node is at fault), and `advice` what
    would make it fuse.
    """

    kind: str
    node: str
    reason: str
    op: str = ""
    reached: str = ""
    failed: str = ""
    advice: str = ""
    body: str = ""


def name_of(node: ir.Node) -> str:
    """What reports call a node: its name, or its first output's, or its operator."""
    return node.name or (node.outputs[0].name if node.outputs else None) or node.op_type
