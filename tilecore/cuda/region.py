"""From a region's spec to what a library holds of it for cards: adapted, compiled, and written as C around the cubins.

spec ─ adaptations ─ candidates ─ write ─ check_maps ─ build ─ emit_launch ─► CudaRegion
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from tilecore.canonical import canonical
from tilecore.compile import Dump
from tilecore.contract.expr import Const, Expr, Sym, binary, const
from tilecore.contract.reshape import single_query
from tilecore.contract.spec import AttentionSpec, ContractionSpec, Spec, check, outputs_of
from tilecore.cuda.adapt import Adapted, adaptations
from tilecore.cuda.compile import CudaKernel, CudaSource, build, candidates, dump_stages, first_made, write
from tilecore.cuda.emit_launch import Launch, Signature, check_maps, emit_launch
from tilecore.cuda.errors import CudaError, NoCandidateError
from tilecore.cuda.profile import H100, GpuProfile
from tilecore.cuda.recommend import Choice
from tilecore.emit_host import symbol_order

PLACEHOLDER = "REGION_NAME"
FEW = 16  # rows of a product that are a matter of reading its weights
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class CudaRegion:
    """A region's kernels for cards: `source` is C text that defines `symbol`, a `tile_cuda_kernel`."""

    symbol: str
    source: str
    kernels: tuple[CudaKernel, ...]  # in the order of their launches


def refusal(spec: Spec, profile: GpuProfile = H100) -> str | None:
    """Why no CUDA kernel can be written for `spec`; None when one can. No compiler is needed to know."""
    try:
        check(spec)
        _first(canonical(replace(spec, lookups=())), profile, "Kernel", lambda source: source)
    except CudaError as error:
        return str(error)
    return None


def compile_region(
    spec: Spec, *, label: str, cache_directory: Path, profile: GpuProfile = H100, dump: Dump | None = None
) -> CudaRegion:
    """The kernels of `spec`, built. CudaError says why there are none.

    `spec` must be canonical, as the host's kernel beside it is: both go by the order of inputs, outputs and symbols.
    """
    check(spec)
    spec = replace(spec, lookups=())  # indices lie on the card: nobody looks at them before the call

    def make(source: CudaSource) -> CudaKernel:
        return build(source, cache_directory)

    adapted, kernels = _first(spec, profile, label, make)
    launches = [Launch(kernel) for kernel in kernels[:-1]]

    def few(one: Spec, rows: int | None = None) -> CudaKernel:
        return _made(one, profile, label, make, rows=rows)

    launches += _by_rows(adapted.spec, kernels[-1], few)
    symbols = tuple(Sym(name) for name in symbol_order(spec.inputs))
    inputs, outputs = (tuple(tensor.name for tensor in side) for side in (spec.inputs, outputs_of(spec)))
    text = emit_launch(launches, Signature(inputs, outputs, symbols, adapted.scratch), PLACEHOLDER)
    symbol = f"tile_cuda_{label}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if dump is not None:
        for launch in launches:
            dump_stages(launch.kernel, dump)
    return CudaRegion(symbol, text.replace(PLACEHOLDER, symbol), tuple(launch.kernel for launch in launches))


def _by_rows(spec: Spec, many: CudaKernel, few: Callable[..., CudaKernel]) -> list[Launch]:
    """The kernel of a region, and another one where a number that is known at run time only is small: for products of
    few rows, and for attention of a single query.
    """
    rows: Expr
    try:
        match spec:
            case ContractionSpec() if not isinstance(spec.a.shape[1], Const):
                rows, other = spec.a.shape[1], few(spec, FEW)
                conditions = binary("le", rows, const(FEW)), binary("gt", rows, const(FEW))
            case AttentionSpec() if (single := single_query(spec)) is not None:
                rows, other = single[0], few(single[1])
                conditions = binary("eq", rows, const(1)), binary("ne", rows, const(1))
            case _:
                return [Launch(many)]
    except CudaError:  # then the one serves all
        return [Launch(many)]
    if other.source == many.source:
        return [Launch(many)]
    return [Launch(other, conditions[0]), Launch(many, conditions[1])]


def _first(
    spec: Spec, profile: GpuProfile, label: str, make: Callable[[CudaSource], Made]
) -> tuple[Adapted, tuple[Made, ...]]:
    """The first adaptation whose programs all have a candidate that `make` takes. CudaError with the first reason."""
    reasons: list[str] = []
    for adapted in _tried(spec, reasons):
        try:
            return adapted, tuple(_made(one, profile, label, make) for one in (*adapted.before, adapted.spec))
        except CudaError as error:
            reasons.append(str(error))
    raise CudaError(reasons[0])


def _tried(spec: Spec, reasons: list[str]) -> Iterator[Adapted]:
    try:
        yield from adaptations(spec)
    except CudaError as error:
        reasons.append(str(error))


def _made(
    spec: Spec, profile: GpuProfile, label: str, make: Callable[[CudaSource], Made], *, rows: int | None = None
) -> Made:
    """What `make` gives for the best candidate that it takes. CudaError with the reason of the best one."""

    def made(choice: Choice) -> Made:
        source = write(spec, choice, label=label, profile=profile)
        check_maps(source.plan)
        return make(source)

    try:
        return first_made(candidates(spec, profile, rows=rows), made)
    except NoCandidateError as error:
        raise CudaError(error.reasons[0]) from error
