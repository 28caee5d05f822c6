"""Regions with bfloat16 operands, as `--precision bf16` asks for.

Comes in: a region in float32. Goes out: the same with operands of its contractions rounded, in the spec and (by
`Region.narrow`) in the function body, which casts them to bfloat16 and back; or the region as it was, where it has no
sums of many products of floats, or not of tensors that a body could cast, or where rounding costs more than it saves.
"""

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir

from fuser.between import store_rounded
from fuser.dots import rounds_operands
from fuser.element import LiftError
from fuser.region import Region
from fuser.shapes import Shapes
from tilecore.contract.few_rows import rounded_on_the_way, wide_alone
from tilecore.contract.narrow import narrowed
from tilecore.contract.spec import AttentionSpec

OPSET = 13  # the first with casts to bfloat16
BFLOAT16 = "bfloat16"


def narrow(region: Region, shapes: Shapes) -> Region:
    """`region` with bfloat16 operands, or itself."""
    try:
        if not any(rounds_operands(node, shapes) for node in region.nodes):
            return region
    except LiftError:
        return region
    spec = narrowed(region.spec)
    return region if spec is region.spec else replace(region, spec=spec, narrow=True)


def where_it_pays(graph: ir.Graph, wide: Sequence[Region], narrow: Sequence[Region]) -> tuple[Region, ...]:
    """The regions of `narrow`, but those of `wide` where few rows would round much of what lies in memory in float32.

    Which of it does is known only when it is known who else rounds it (`store_rounded`): so until nothing changes.
    """
    kept = list(narrow)
    while True:
        stored = store_rounded(graph, kept, set(kept))
        dear = [number for number, region in enumerate(stored) if region.narrow and rounded_on_the_way(region.spec)]
        for number in dear:
            rows = rounded_on_the_way(stored[number].spec)
            kept[number] = replace(wide[number], kept_wide=rows)
        if not dear:
            alone = [region.narrow and wide_alone(region.spec) is not region.spec for region in stored]
            return tuple(
                replace(region, spec=wide_alone(region.spec)) if own else region
                for region, own in zip(kept, alone, strict=True)
            )


def operands_of(region: Region) -> str:
    """What operands of its products are, in words, where rounding them was asked for; "" where it has none to round."""
    if region.kept_wide:
        return f"float32, as few rows ({region.kept_wide}) use each element: rounding it would cost more than it saves"
    if not region.narrow:
        return ""
    alone = isinstance(region.spec, AttentionSpec) and region.spec.wide_alone
    return f"{BFLOAT16}, but float32 with one query: rounding would cost more than it saves" if alone else BFLOAT16
