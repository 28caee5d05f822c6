"""Where products have few rows, and what rounding their operands to bfloat16 would cost there.

A product of up to `FEW_ROWS` rows reads its right operand where it lies, once or twice. Of float32 elements that is all
it does with each but a few multiply-adds: rounding them on the way costs more than narrower products could save. What
lies in memory as bfloat16 costs nothing, what is computed is rounded where it is made, and weights are rounded when
they are stored.
"""

from dataclasses import replace

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Op, cast
from tilecore.contract.reshape import heads_as_queries, single_query
from tilecore.contract.spec import AttentionSpec, ContractionSpec, Spec, View

FEW_ROWS = 8  # up to so many, computing elements again for every four rows beats writing them to memory


def rounded_on_the_way(spec: Spec) -> int:
    """How many rows use each element of right operands that would be rounded whenever they are read, where that is few;
    else 0: rounding then pays, or there is none.

    Where the number of rows is known at run time only, they may be many.
    """
    match spec:
        case AttentionSpec():
            shared = heads_as_queries(spec) or spec
            return _few(shared.q.shape[2]) if _rounds(shared.k) or _rounds(shared.v) else 0
        case ContractionSpec():
            return _few(spec.a.shape[1]) if all(_rounds(product.b) for product in spec.products) else 0
        case _:
            return 0


def wide_alone(spec: Spec) -> Spec:
    """`spec`, with operands as they are for calls of one query, where the number of queries is a dim that may be 1 and
    rounding does not pay then.
    """
    single = single_query(spec) if isinstance(spec, AttentionSpec) else None
    if single is None or not rounded_on_the_way(single[1]):
        return spec
    assert isinstance(spec, AttentionSpec)
    return replace(spec, wide_alone=True)


def one_query(spec: AttentionSpec) -> tuple[Expr, AttentionSpec] | None:
    """(the dim, the spec of a call where it is 1), as `single_query`, with the operands of such a call."""
    single = single_query(spec)
    if single is None or not spec.wide_alone:
        return single
    return single[0], with_wide_operands(single[1])


def with_wide_operands(spec: AttentionSpec) -> AttentionSpec:
    """`spec` with operands in float32 that are not rounded."""
    return replace(spec, q=_widened(spec.q), k=_widened(spec.k), v=_widened(spec.v), wide_alone=False)


def _few(rows: Expr) -> int:
    return int(rows.value) if isinstance(rows, Const) and rows.value <= FEW_ROWS else 0


def _rounds(view: View) -> bool:
    """Whether elements lie in memory as wider floats, and are rounded when they are read."""
    value = view.value
    if not isinstance(value, Op) or value.name != "cast" or value.dtype is not DType.BF16:
        return False
    stored = value.args[0]
    if isinstance(stored, Op) and stored.name == "cast":
        stored = stored.args[0]
    return isinstance(stored, Load)


def _widened(view: View) -> View:
    match view.value:
        case Op(name="cast", args=(value,), dtype=DType.BF16):
            return replace(view, value=cast(value, DType.F32))
        case value:
            return replace(view, value=cast(value, DType.F32))
