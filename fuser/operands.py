"""Regions with bfloat16 operands, as `--precision bf16` asks for.

Comes in: a region in float32. Goes out: the same with operands of its contractions rounded, in the spec and (by
`Region.narrow`) in the function body, which casts them to bfloat16 and back; or the region as it was, where it has no
sums of many products of floats, or not of tensors that a body could cast.
"""

from dataclasses import replace

from fuser.dots import rounds_operands
from fuser.element import LiftError
from fuser.region import Region
from fuser.shapes import Shapes
from tilecore.contract.narrow import narrowed

OPSET = 13  # the first with casts to bfloat16


def narrow(region: Region, shapes: Shapes) -> Region:
    """`region` with bfloat16 operands, or itself."""
    try:
        if not any(rounds_operands(node, shapes) for node in region.nodes):
            return region
    except LiftError:
        return region
    spec = narrowed(region.spec)
    return region if spec is region.spec else replace(region, spec=spec, narrow=True)
