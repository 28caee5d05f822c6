"""Where a convolution reads its input: one place per spatial axis, and whether it lies inside or in the padding.

Comes in: a convolution's node, the shapes of its input, weight and result. Goes out: `Windows`, or LiftError for the
uses of the operator that are no single contraction. A place in the padding reads as 0, and is multiplied as such:
0 · inf is NaN there, as it is in a graph that pads first.
"""

from dataclasses import dataclass

import onnx_ir as ir

from fuser.element import ZERO, Index, LiftError, Shape, attribute
from tilecore.contract.expr import Expr, apply, binary, const

MODES = ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")


@dataclass(frozen=True, slots=True)
class Windows:
    """How windows slide over the spatial axes of `sizes` elements: steps between them, steps inside, padding before.

    `before` and `after` say how many places of padding there are at either end.
    """

    sizes: Shape
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: Shape
    after: Shape

    def places(self, windows: Index, taps: Index) -> Index:
        """Where tap `taps` of window `windows` reads, axis by axis; in the padding it is below 0 or past the end."""
        return tuple(
            window * stride + tap * dilation - pad
            for window, tap, stride, dilation, pad in zip(
                windows, taps, self.strides, self.dilations, self.before, strict=True
            )
        )

    def inside(self, places: Index) -> Expr:
        """Whether places lie in the input: a bool, constant where nothing is padded."""
        found: Expr = const(True)
        for place, size, before, after in zip(places, self.sizes, self.before, self.after, strict=True):
            if before != ZERO:
                found = apply("and", found, binary("ge", place, ZERO))
            if after != ZERO:
                found = apply("and", found, binary("lt", place, size))
        return found


def windows_of(node: ir.Node, x: Shape, w: Shape, out: Shape) -> Windows:
    """The windows of a convolution of one group. LiftError when it is none, or its padding is negative or unknown."""
    rank = len(x) - 2
    where = f"{node.op_type} {node.name!r}"
    groups = int(attribute(node, "group", 1))
    if groups != 1:
        raise LiftError(
            f"{where} has {groups} groups of channels: each is a contraction of its own, of few channels",
            node=node,
            advice="nothing to do: ONNX Runtime runs convolutions of several groups",
        )
    strides = tuple(int(step) for step in attribute(node, "strides", (1,) * rank))
    dilations = tuple(int(step) for step in attribute(node, "dilations", (1,) * rank))
    mode = str(attribute(node, "auto_pad", "NOTSET"))
    pads = tuple(int(pad) for pad in attribute(node, "pads", (0,) * (2 * rank)))
    if mode not in MODES or min((0, *pads)) < 0 or rank < 1:
        raise LiftError(f"{where} has the padding {pads}, auto_pad {mode!r}, on {rank} axes", node=node)
    if mode == "VALID":
        pads = (0,) * (2 * rank)
    before, after = tuple(map(const, pads[:rank])), tuple(map(const, pads[rank:]))
    if mode.startswith("SAME"):
        spans = ((taps - 1) * dilation + 1 for taps, dilation in zip(w[2:], dilations, strict=True))
        total = tuple(
            binary("max", (count - 1) * stride + span - size, ZERO)
            for count, stride, span, size in zip(out[2:], strides, spans, x[2:], strict=True)
        )
        less = tuple(pad // const(2) for pad in total)
        more = tuple(pad - half for pad, half in zip(total, less, strict=True))
        before, after = (less, more) if mode == "SAME_UPPER" else (more, less)
    return Windows(x[2:], strides, dilations, before, after)
