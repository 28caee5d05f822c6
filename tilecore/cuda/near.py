"""tanh of small numbers by a polynomial: where no element of a warp is larger, which special functions need not tell.

Comes in: the value of an element program. Goes out: how large fragment elements may be, and what stands for tanh then.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tilecore.contract.expr import Const, Expr, Load, Op, loads, walk
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
        scaled, factor = _unscaled(node)
        if not (isinstance(scaled, Op) and scaled.name == "tanh"):
            continue
        element, inner = _unscaled(scaled.args[0])
        if not (isinstance(element, Load) and isinstance(element.source, Buffer)):
            return None
        if any(not FACTORS[0] <= abs(number) <= FACTORS[1] for number in (inner, factor)):
            return None
        found[element.source, inner] = None
        numbers = ", ".join(literal(Const(number, value.dtype)) for number in (inner, factor))
        texts[node] = f"tile_tanh_near({element.source.name}[x], {numbers})"
    if len(found) != 1 or any(len(load.index) != 2 for load in loads(value) if isinstance(load.source, Buffer)):
        return None
    ((buffer, inner),) = found
    return Near(buffer, Const(WIDEST_NEAR / abs(inner), value.dtype), texts)


def _unscaled(value: Expr) -> tuple[Expr, float]:
    """(x, c) of x · c."""
    factor = 1.0
    while isinstance(value, Op) and value.name in ("mul", "div"):
        match value:
            case Op(name="mul", args=(inner, Const(value=c)) | (Const(value=c), inner)):
                value, factor = inner, factor * float(c)
            case Op(name="div", args=(inner, Const(value=c))) if c != 0:
                value, factor = inner, factor / float(c)
            case _:
                break
    return value, factor
