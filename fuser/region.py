"""What the scan hands on: regions to fuse, and misses with their reasons."""

from dataclasses import dataclass

import onnx_ir as ir

from tilecore.contract.spec import Spec


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A set of nodes that one kernel replaces.

    `inputs` stand in the order of `spec.inputs`, `outputs` in the order of the spec's results; `nodes` are in
    topological order. `label` is for the report only ("attention, causal", "LayerNorm + skip").
    """

    kind: str  # "attention", "contraction" or "row"
    label: str
    nodes: tuple[ir.Node, ...]
    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]
    spec: Spec


@dataclass(frozen=True, slots=True)
class Miss:
    """Something worth fusing that was left alone: which node, and a reason that a user can act on."""

    kind: str
    node: str
    reason: str
