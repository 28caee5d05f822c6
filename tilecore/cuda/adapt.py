"""A region's spec as a card can run it: the same results, from operands that tensor copies can bring.

Comes in: a spec as the fuser makes it, whose products are of f32 views. Goes out: an `Adapted`: programs over rows that
write computed operands to scratch memory first, and the region itself, whose operands are then 16-bit tensors as they
lie. Widening casts go (products of 16-bit floats are exact in f32), constant factors of operands move behind the sums,
and dims that are read as one (`x[m // S, m % S]`) become one dim. An operand that had to be computed is rounded to the
16-bit type that it was computed from, as the operators of a 16-bit model round it; packed weights are decoded on their
way to the product, rounded alike.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from tilecore.contract.dtype import DType
from tilecore.contract.expr import (
    Const,
    Expr,
    Load,
    Op,
    Sym,
    Var,
    cast,
    children,
    const,
    loads,
    rewrite,
    substitute,
    symbols,
    variables,
)
from tilecore.contract.spec import (
    AttentionSpec,
    ContractionSpec,
    Place,
    Result,
    RowSpec,
    ScanSpec,
    Spec,
    Tensor,
    View,
    extent_of,
)
from tilecore.cuda.decoding import decoding_of
from tilecore.cuda.errors import CudaError
from tilecore.cuda.scales import unscaled
from tilecore.cuda.values import HALVES

SIZES = "sizes"
Staged = AttentionSpec | ContractionSpec | RowSpec
S = TypeVar("S", bound=Staged)


@dataclass(frozen=True, slots=True)
class Adapted:
    """What to launch in this order: a program per scratch tensor, then the region, which reads those by their names."""

    before: tuple[RowSpec, ...]
    scratch: tuple[Tensor, ...]
    spec: Spec


def adaptations(spec: Spec) -> Iterator[Adapted]:
    """Ways to run `spec`, the one with the least work first. CudaError for operands that are no 16-bit floats."""
    if isinstance(spec, ScanSpec):
        yield Adapted((), (), spec)
        return
    if isinstance(spec, RowSpec):
        yield Adapted((), (), merged(spec))
        return
    if isinstance(spec, AttentionSpec) and spec.length is not None:
        raise CudaError("there is no kernel for cards of attention over as many rows as data says")
    plain = _with_plain_operands(spec)
    levels = _with_levels(plain)
    if levels is not None:
        yield Adapted((), (), merged(levels))
        return
    moving = tuple(view for view in _operands(plain) if not _is_constant(view))
    computed = tuple(view for view in moving if not _is_plain(view))
    for views in dict.fromkeys((computed, moving)):  # as they lie, tensor copies may not take them
        yield _staged(plain, views)


def _with_levels(spec: AttentionSpec | ContractionSpec) -> ContractionSpec | None:
    """`spec` where its weights are packed levels that a card decodes on their way, rounded to the type of the other
    side, as the operators of a 16-bit model round them; else None.
    """
    if not isinstance(spec, ContractionSpec) or spec.siblings or not _is_plain(spec.a) or not _is_constant(spec.b):
        return None
    if _is_plain(spec.b):
        return None
    g, k, n = spec.b.axes
    value = spec.b.value if spec.b.dtype in HALVES else cast(spec.b.value, spec.a.dtype)
    try:
        decoding_of(replace(spec.b, axes=(g, n, k), value=value))
    except CudaError:  # what is said of other weights says more
        return None
    return replace(spec, b=replace(spec.b, value=value))


def _operands(spec: AttentionSpec | ContractionSpec) -> tuple[View, ...]:
    """The views that products multiply."""
    if isinstance(spec, AttentionSpec):
        return (spec.q, spec.k, spec.v)
    return (spec.a, *(product.b for product in spec.products))


def _is_plain(view: View) -> bool:
    return isinstance(view.value, Load) and view.value.dtype in HALVES


def _is_constant(view: View) -> bool:
    return all(isinstance(one.source, Tensor) and one.source.constant for one in loads(view.value))


def _with_plain_operands(spec: AttentionSpec | ContractionSpec) -> AttentionSpec | ContractionSpec:
    """Operands without widening casts and constant factors, which multiply the sums instead."""
    if isinstance(spec, AttentionSpec):
        (q, left), (k, right) = _unscaled(spec.q), _unscaled(spec.k)
        factor = left * right
        score = spec.score if factor == 1.0 else substitute(spec.score, {spec.raw: spec.raw * factor})
        outputs = spec.outputs
        if factor != 1.0:
            outputs = tuple(replace(one, value=substitute(one.value, {spec.raw: spec.raw * factor})) for one in outputs)
        return replace(spec, q=q, k=k, v=_narrow(spec.v), score=score, outputs=outputs)
    a, common = _unscaled(spec.a)
    rights = [_unscaled(product.b) for product in spec.products]
    scaled: dict[Expr, Expr] = {
        product.acc: product.acc * (common * factor)
        for product, (_, factor) in zip(spec.products, rights, strict=True)
        if common * factor != 1.0
    }
    siblings = tuple(replace(one, b=view) for one, (view, _) in zip(spec.siblings, rights[1:], strict=True))
    outputs = tuple(replace(one, value=substitute(one.value, scaled)) for one in spec.outputs)
    return replace(spec, a=a, b=rights[0][0], siblings=siblings, outputs=outputs)


def _unscaled(view: View) -> tuple[View, float]:
    """(the view without its constant factor, that factor)."""
    value, factor = unscaled(view.value)
    if factor == 0.0 or not math.isfinite(factor):
        return _narrow(view), 1.0
    return _narrow(replace(view, value=value)), factor


def _narrow(view: View) -> View:
    """The view without the cast that widens its load."""
    match view.value:
        case Op(name="cast", args=(Load() as load,)) if load.dtype in HALVES:
            return replace(view, value=load)
        case _:
            return view


def _staged(spec: AttentionSpec | ContractionSpec, computed: tuple[View, ...]) -> Adapted:
    """`spec` with every one of `computed` read from scratch memory, where a program over rows has put it."""
    before: list[RowSpec] = []
    scratch: list[Tensor] = []
    moved: dict[View, View] = {}
    dtype = _operand_type(spec)
    for view in computed:
        if view not in moved:
            tensor, rows, read = _computed(view, f"t{len(scratch)}", dtype, spec.inputs)
            scratch.append(tensor)
            before.append(rows)
            moved[view] = replace(view, value=read)
    if isinstance(spec, AttentionSpec):
        q, k, v = (moved.get(view, view) for view in (spec.q, spec.k, spec.v))
        spec = replace(spec, q=q, k=k, v=v)
    else:
        siblings = tuple(replace(one, b=moved.get(one.b, one.b)) for one in spec.siblings)
        spec = replace(spec, a=moved.get(spec.a, spec.a), b=moved.get(spec.b, spec.b), siblings=siblings)
    inputs = (*spec.inputs, *scratch)
    rows = tuple(merged(one) for one in before)
    return Adapted(rows, tuple(scratch), merged(replace(spec, inputs=inputs)))


def _operand_type(spec: AttentionSpec | ContractionSpec) -> DType:
    """The 16-bit type of what is multiplied. CudaError for wider floats, for two types, and for other weights."""
    moving = [view for view in _operands(spec) if not _is_constant(view)] or _operands(spec)
    kinds = {kind for view in moving for kind in _float_types(view)}
    if len(kinds) != 1 or not kinds <= set(HALVES):
        found = ", ".join(sorted(map(str, kinds))) or "no floats"
        raise CudaError(f"operands of {found}: products are of one 16-bit float type, f16 or bf16")
    for view in _operands(spec):
        if _is_constant(view) and not _is_plain(view):
            raise CudaError(
                f"weights that are {view.value}: in fused models they are read as f16 or bf16, and as levels of 4 or 8 "
                "bits in rows of a multiple of 16 bytes beside plain 16-bit activations"
            )
    return kinds.pop()


def _float_types(view: View) -> set[DType]:
    """The 16-bit type that a view is rounded to, or else those of the floats that it reads."""
    if view.value.dtype in HALVES:
        return {view.value.dtype}
    return {one.dtype for one in loads(view.value) if one.dtype.is_float}


def _computed(view: View, name: str, dtype: DType, inputs: tuple[Tensor, ...]) -> tuple[Tensor, RowSpec, Load]:
    """(the scratch tensor that holds a view, the program that fills it, its element at the view's axes).

    Axes that the view does not depend on have no dim; heads that share an element have one.
    """
    *leading, last = view.axes
    value = view.value if view.value.dtype in HALVES else cast(view.value, dtype)
    dims: list[Expr] = []
    index: list[Expr] = []
    for axis in leading:
        if axis not in variables(value) or extent_of(axis) == const(1):
            continue
        extent, divisor = extent_of(axis), _divisor(value, axis)
        shared = divisor > 1 and isinstance(extent, Const) and int(extent.value) % divisor == 0
        dims.append(extent // divisor if shared else extent)
        index.append(axis // divisor if shared else axis)
    rows: Expr = const(1)
    for extent in dims:
        rows = rows * extent
    row, column = Var("r", extent=rows), Var("c", extent=extent_of(last))
    moved: dict[Expr, Expr] = {axis: const(0) for axis in leading if extent_of(axis) == const(1)}
    inner: Expr = const(1)
    for number, (place, extent) in reversed(list(enumerate(zip(index, dims, strict=True)))):
        moved[place] = row // inner % extent if number else row // inner  # the slowest has no dim before it
        inner = inner * extent
    moved[last] = column
    tensor = Tensor(name, dtype, (*dims, extent_of(last)))
    flat = Tensor(name, dtype, (rows, extent_of(last)))
    result = Result(Place(flat, (row, column), (row, column)), substitute(value, moved))
    return tensor, RowSpec(inputs, row, column, (), (result,)), Load(tensor, (*index, last))


def _divisor(value: Expr, axis: Var) -> int:
    """c where `value` depends on `axis` through `axis // c` alone, else 1."""
    found = set(_quotients(value, axis))
    return found.pop() if len(found) == 1 else 1


def _quotients(expr: Expr, axis: Var) -> Iterator[int]:
    if expr == axis:
        yield 1
    elif isinstance(expr, Op) and expr.name == "floordiv" and expr.args[0] == axis and isinstance(expr.args[1], Const):
        yield int(expr.args[1].value)
    else:
        for part in children(expr):
            yield from _quotients(part, axis)


def merged(spec: S) -> S:
    """`spec` with neighbouring dims of tensors as one, wherever all accesses are at (e // D, e % D) of one e."""
    old = spec
    while found := next(_mergeable(spec), None):
        spec = _merge(spec, *found)
    return _bound(spec, {symbol for tensor in old.inputs for dim in tensor.shape for symbol in symbols(dim)})


def _bound(spec: S, needed: set[Sym]) -> S:
    """`spec` with every symbol as a whole dim of an input, if need be of one that nothing reads: `SIZES`."""
    whole = {dim for tensor in spec.inputs for dim in tensor.shape}
    if needed <= whole:
        return spec
    names = sorted(symbol.name for symbol in needed)
    sizes = Tensor(SIZES, DType.U8, tuple(Sym(name) for name in names))
    return replace(spec, inputs=(*spec.inputs, sizes))


def _mergeable(spec: Staged) -> Iterator[tuple[Tensor, int]]:
    accesses: dict[Tensor, list[tuple[Expr, ...]]] = {}
    for expr in _programs(spec):
        for load in loads(expr):
            if isinstance(load.source, Tensor):
                accesses.setdefault(load.source, []).append(load.index)
    for result in spec.outputs:
        accesses.setdefault(result.place.tensor, []).append(result.place.index)
    for tensor, found in accesses.items():
        for dim in range(len(tensor.shape) - 1):
            if all(_whole(index, dim, tensor.shape[dim + 1]) is not None for index in found):
                yield tensor, dim


def _whole(index: tuple[Expr, ...], dim: int, extent: Expr) -> Expr | None:
    """e where positions `dim` and the next are e // extent and e % extent."""
    match index[dim], index[dim + 1]:
        case Op(name="floordiv", args=(left, first)), Op(name="mod", args=(right, second)):
            return left if left == right and first == extent == second else None
        case _:
            return None


def _merge(spec: S, tensor: Tensor, dim: int) -> S:
    shape = tensor.shape
    new = replace(tensor, shape=(*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]))

    def index(old: tuple[Expr, ...]) -> tuple[Expr, ...]:
        whole = _whole(old, dim, shape[dim + 1])
        assert whole is not None
        return (*old[:dim], whole, *old[dim + 2 :])

    def change(node: Expr) -> Expr | None:
        if isinstance(node, Load) and node.source == tensor:
            return Load(new, index(node.index), node.span)
        return None

    def result(old: Result) -> Result:
        place = old.place
        if place.tensor == tensor:
            place = replace(place, tensor=new, index=index(place.index))
        return Result(place, rewrite(old.value, change))

    inputs = tuple(new if one == tensor else one for one in spec.inputs)
    outputs = tuple(result(one) for one in spec.outputs)
    return _over(replace(spec, inputs=inputs, outputs=outputs), lambda expr: rewrite(expr, change))


def _programs(spec: Staged) -> Iterable[Expr]:
    """Every expression of a spec that may load."""
    found: list[Expr] = [result.value for result in spec.outputs]

    def note(expr: Expr) -> Expr:
        found.append(expr)
        return expr

    _over(spec, note)
    return found


def _over(spec: S, change: Callable[[Expr], Expr]) -> S:
    """`spec` with `change` of every expression but those of its outputs."""

    def view(old: View) -> View:
        return replace(old, value=change(old.value))

    match spec:
        case AttentionSpec():
            return replace(
                spec,
                q=view(spec.q),
                k=view(spec.k),
                v=view(spec.v),
                sink=None if spec.sink is None else view(spec.sink),
                score=change(spec.score),
                weight=None if spec.weight is None else change(spec.weight),
                reductions=tuple(replace(step, value=change(step.value)) for step in spec.reductions),
            )
        case ContractionSpec():
            siblings = tuple(replace(one, b=view(one.b)) for one in spec.siblings)
            return replace(spec, a=view(spec.a), b=view(spec.b), siblings=siblings)
        case RowSpec():
            return replace(spec, steps=tuple(replace(step, value=change(step.value)) for step in spec.steps))
