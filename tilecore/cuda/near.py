"""tanh of small numbers by a polynomial: where no element of a warp is larger, which special functions need not tell.

Comes in: the value of an element program. Goes out: how large fragment elements may be, and what stands for tanh then.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Op, loads, walk
from tilecore.cuda.scales import unscaled
from tilecore.cuda.values import literal
from tilecore.ir import Buffer

WIDEST_NEAR = 0.5  # what `tile_tanh_near` is for
FACTORS = (1e-4, 1e4)  # of what its coefficients, products of up to 9 of them, are normal numbers


@dataclass(frozen=True, slots=True)
class Near:
    """`texts` hold where |element x of `buffer`| ≤ `limit` for all of a warp."""

    buffer: Buffer
    limit: Const
    texts: Mapping[Expr, str]


def near_tanh(value: Expr) -> Near | None:
    """The form of `value` for small elements, where tanh is of one fragment's element times constants."""
    texts: dict[Expr, str] = {}
    found: dict[tuple[Buffer, float], None] = {}
    for node in walk(value):
        scaled, factor = unscaled(node)
        if not (isinstance(scaled, Op) and scaled.name == "tanh" and scaled.dtype is DType.F32):
            continue
        element, inner = unscaled(scaled.args[0])
        if not (isinstance(element, Load) and isinstance(element.source, Buffer)):
            return None
        if any(not FACTORS[0] <= abs(number) <= FACTORS[1] for number in (inner, factor)):
            return None
        found[element.source, inner] = None
        numbers = ", ".join(literal(Const(number, DType.F32)) for number in (inner, factor))
        texts[node] = f"tile_tanh_near({element.source.name}[x], {numbers})"
    if len(found) != 1 or any(len(load.index) != 2 for load in loads(value) if isinstance(load.source, Buffer)):
        return None
    ((buffer, inner),) = found
    return Near(buffer, Const(WIDEST_NEAR / abs(inner), DType.F32), texts)
