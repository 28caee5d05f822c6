"""The kernels of the compiler: one per kind of region, in the tile language; `kernel_for` picks by the spec."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from tilecore.contract.expr import Var, binary, substitute
from tilecore.contract.spec import (
    AttentionSpec,
    ContractionSpec,
    Place,
    RowSpec,
    ScanSpec,
    Spec,
    View,
    extent_of,
)
from tilecore.library.attention import attention
from tilecore.library.attention_two_pass import attention_in_two_passes
from tilecore.library.epilogue import Epilogue
from tilecore.library.matmul import matmul
from tilecore.library.row import row
from tilecore.library.scan import scan
from tilecore.library.schedule import schedule
from tilecore.library.score import needs_shares, score_of

Ragged = TypeVar("Ragged", View, Place)


def kernel_for(spec: Spec) -> tuple[Callable[..., None], dict[str, Any]]:
    """The kernel that computes `spec` and its operands by parameter, as `trace` takes them; views get its names."""
    places = tuple(result.place for result in spec.outputs)
    match spec:
        case AttentionSpec():
            operands: dict[str, Any] = {
                "Q": _ragged(replace(spec.q, name="Q"), spec),
                "K": _ragged(replace(spec.k, name="K"), spec),
                "V": _ragged(replace(spec.v, name="V"), spec),
                "score": score_of(spec),
            }
            outputs = tuple(_ragged(place, spec) for place in places)
            return attention_in_two_passes if needs_shares(spec) else attention, operands | {"outputs": outputs}
        case ContractionSpec():
            accs = tuple(product.acc for product in spec.products)
            epilogue = tuple(Epilogue(accs, result) for result in spec.outputs)
            rights = tuple(replace(product.b, name=f"B{number or ''}") for number, product in enumerate(spec.products))
            operands = {
                "A": replace(spec.a, name="A"),
                "B": rights,
                "epilogue": epilogue,
                "byte_block": spec.byte_block,
            }
            return matmul, operands | {"outputs": places}
        case RowSpec():
            return row, {"outputs": places, "spec": spec}
        case ScanSpec():
            return scan, {"outputs": places, "spec": spec, "schedule": schedule(spec)}


def _ragged(operand: Ragged, spec: AttentionSpec) -> Ragged:
    """An operand over (b, h, rows, columns), with as many rows as the spec's `length` says."""
    if spec.length is None:
        return operand
    b, h, rows, column = operand.axes
    length = substitute(spec.length, dict(zip(spec.score_axes[:2], (b, h), strict=True)))
    row = Var(rows.name, extent=binary("min", length, extent_of(rows)))
    axes = (b, h, row, column)
    if isinstance(operand, View):
        return replace(operand, axes=axes, value=substitute(operand.value, {rows: row}))
    return replace(operand, axes=axes, index=tuple(substitute(index, {rows: row}) for index in operand.index))
