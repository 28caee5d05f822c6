"""Operands in bfloat16: what `--precision bf16` makes of a spec.

Comes in: a spec in float32. Goes out: the same sums of operands that are rounded to bfloat16 first; sums, softmax and
everything else stay float32. Only products that sum over enough are changed: below `LEAST_DEPTH` terms there is nothing
to gain, and what looks like a product may be positions times frequencies, which 8 bits do not hold. A constant matrix
becomes a bfloat16 tensor where a kernel can have it in panels; its values are then rounded once, when it is stored.
"""

from collections.abc import Sequence
from dataclasses import replace

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Op, cast, loads
from tilecore.contract.panel import rows_of
from tilecore.contract.spec import AttentionSpec, ContractionSpec, Spec, Tensor, View, views_of

LEAST_DEPTH = 8


def narrowed(spec: Spec) -> Spec:
    """`spec` with bfloat16 operands; itself where it has no products of floats."""
    match spec:
        case AttentionSpec() if spec.raw.dtype is DType.F32:
            return replace(spec, q=_narrow(spec.q), k=_narrow(spec.k), v=_narrow(spec.v))
        case ContractionSpec() if spec.acc.dtype is DType.F32 and is_deep(spec.a.shape[2]):
            return _contraction(spec)
        case _:
            return spec


def is_deep(depth: Expr) -> bool:
    """Whether a sum over so much is worth narrower operands."""
    return not isinstance(depth, Const) or depth.value >= LEAST_DEPTH


def _contraction(spec: ContractionSpec) -> ContractionSpec:
    programs = [*(view.value for view in views_of(spec)), *(result.value for result in spec.outputs)]
    readers = [load.source for program in programs for load in loads(program)]
    stored: dict[Tensor, Tensor] = {}

    def right(view: View) -> View:
        load = _stored(view)
        if load is None or readers.count(load.source) > 1:
            return _narrow(view)
        assert isinstance(load.source, Tensor)
        stored[load.source] = replace(load.source, dtype=DType.BF16)
        return replace(view, value=Load(stored[load.source], load.index, load.span))

    a, b = _narrow(spec.a), right(spec.b)
    siblings = tuple(replace(product, b=right(product.b)) for product in spec.siblings)
    inputs: Sequence[Tensor] = [stored.get(tensor, tensor) for tensor in spec.inputs]
    return replace(spec, inputs=tuple(inputs), a=a, b=b, siblings=siblings)


def _narrow(view: View) -> View:
    """The view rounded; as it is where its elements are bfloat16 anyway."""
    value = _without_widening(view.value)
    return replace(view, value=value if value.dtype is DType.BF16 else cast(view.value, DType.BF16))


def _stored(view: View) -> Load | None:
    """The constant of floats that a right operand is, as rows of all its columns (`rows_of`)."""
    value = _without_widening(view.value)
    if not isinstance(value, Load) or value.dtype not in (DType.F32, DType.F16, DType.BF16):
        return None
    rows = rows_of(value, view)
    return value if rows is not None and rows.count > 1 and rows.at == view.axes[1] else None


def _without_widening(value: Expr) -> Expr:
    match value:
        case Op(name="cast", args=(inner,), dtype=DType.F32) if inner.dtype in (DType.F16, DType.BF16):
            return inner
        case _:
            return value
