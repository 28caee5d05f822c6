"""The kernels of the compiler: one per kind of region, in the tile language; `kernel_for` picks by the spec."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tilecore.contract.spec import AttentionSpec, ContractionSpec, RowSpec, ScanSpec, Spec
from tilecore.library.attention import attention
from tilecore.library.attention_two_pass import attention_in_two_passes
from tilecore.library.epilogue import Epilogue
from tilecore.library.matmul import matmul
from tilecore.library.row import row
from tilecore.library.scan import scan
from tilecore.library.schedule import schedule
from tilecore.library.score import needs_shares, score_of


def kernel_for(spec: Spec) -> tuple[Callable[..., None], dict[str, Any]]:
    """The kernel that computes `spec` and its operands by parameter, as `trace` takes them; views get its names."""
    places = tuple(result.place for result in spec.outputs)
    match spec:
        case AttentionSpec():
            operands: dict[str, Any] = {
                "Q": replace(spec.q, name="Q"),
                "K": replace(spec.k, name="K"),
                "V": replace(spec.v, name="V"),
                "score": score_of(spec),
            }
            return attention_in_two_passes if needs_shares(spec) else attention, operands | {"outputs": places}
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
