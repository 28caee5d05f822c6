"""Puts the page together while the compiler works: the graph is drawn before it is rewritten, the rest afterwards.

Comes in: a model with its regions, then the rewritten model, the report and what the compiler dumped. Goes out: the
file. Invariant: boxes of both drawings name regions by their number in the report.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from fuser.body import DOMAIN
from fuser.coverage import Workload
from fuser.region import Region
from runtime.page.drawing import Drawing, draw
from runtime.page.write import KernelText, write_page
from runtime.report import Report
from tilecore.compile import Kernel


@dataclass(frozen=True, slots=True)
class Sketch:
    """The drawing of the model as it was, and the nodes that only compute shapes."""

    drawing: Drawing
    plumbing: frozenset[ir.Node]


def sketch(model: ir.Model, regions: Sequence[Region], workload: Workload) -> Sketch:
    """Draw the model, which must not be rewritten yet."""
    plumbing = frozenset(node for node in model.graph if node not in workload.flops)
    numbers: dict[ir.Node, int] = {}
    for number, region in enumerate(regions):
        for node in region.nodes:
            numbers.setdefault(node, number)  # what two regions compute is drawn with the first
    return Sketch(draw(model, numbers, {}, plumbing), plumbing)


def finish(
    path: Path,
    drawn: Sketch,
    report: Report,
    *,
    rewritten: ir.Model,
    kernels: Sequence[Kernel],
    texts: Mapping[str, str],
    target: str,
) -> None:
    """Write the page. `kernels` are those of the report's regions, `texts` what compiling them dumped, by stage.

    The C text shown is that for `target`, or the first one where there is none for it.
    """
    makers = {name: number for number, region in enumerate(report.regions) for name in region.outputs}
    fused = [node for node in rewritten.graph if node.domain == DOMAIN and node.outputs[0].name in makers]
    numbers = {node: makers[node.outputs[0].name or ""] for node in fused}
    labels = {node: f"{report.regions[number].kind} {number}" for node, number in numbers.items()}
    described = {
        region.op: _described(kernel, texts, target) for region, kernel in zip(report.regions, kernels, strict=True)
    }
    after = draw(rewritten, numbers, labels, drawn.plumbing)
    write_page(path, report, before=drawn.drawing, after=after, kernels=described)


def _described(kernel: Kernel, texts: Mapping[str, str], target: str) -> KernelText:
    if target not in kernel.sources:
        target = next(iter(kernel.sources))
    source = kernel.sources[target]
    return KernelText(texts[f"30_program_{kernel.name}.txt"], source, target, kernel.why)
