"""From what a finder found to a region with a checked spec: inputs, symbols and the nodes of the function body.

Comes in: values to give out, the expressions over loads, and a function from inputs to the spec. Goes out: a `Region`.
Invariant: the region's nodes compute its outputs from its inputs and from values whose content is known, nothing else.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from fuser.cuts import Cuts
from fuser.dots import axes_of
from fuser.element import Index, LiftError, content_of, shape_of
from fuser.graph import captured
from fuser.lift import rule_of
from fuser.lift_views import GATHERS, gathered
from fuser.precision import widened
from fuser.region import Region, name_of
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Sym, Var, cast, loads, symbols, variables, walk
from tilecore.contract.spec import Cell, Lookup, Place, Result, Spec, SpecError, Tensor, check

COPY_LIMIT = 64 * 1024  # bytes of a constant that a function body may hold; larger ones become inputs


@dataclass(frozen=True, slots=True)
class Draft:
    """A region without its inputs. `core` are the nodes that have no element rule but belong to it."""

    kind: str
    label: str
    core: frozenset[ir.Node]
    outputs: tuple[ir.Value, ...]
    programs: tuple[Expr, ...]
    spec: Callable[[tuple[Tensor, ...]], Spec]


def result(cuts: Cuts, value: ir.Value, axes: Sequence[Var], index: Index, program: Expr) -> Result:
    """The result that stores `program` as element `index` of `value`, for every element `axes` of the region."""
    if not index:
        raise LiftError(
            f"{value.name!r} is a single number", advice="nothing to do: a single number is not worth a kernel"
        )
    return Result(Place(cuts.tensor(value), tuple(axes), index), program)


def lower(draft: Draft, cuts: Cuts, model_inputs: Iterable[ir.Value]) -> Region:
    """The region. LiftError when its symbols cannot be bound or its spec breaks an invariant."""
    sources = (load.source for expr in draft.programs for load in loads(expr))
    inputs = list(dict.fromkeys(cuts.values[source.name] for source in sources if not isinstance(source, Cell)))
    nodes = _body(draft, inputs, cuts)
    outputs = tuple(cuts.tensor(value) for value in draft.outputs)
    tensors = tuple(cuts.tensor(value) for value in inputs)
    inputs += _binders(draft, (*tensors, *outputs), inputs, tuple(model_inputs), cuts)
    final = tuple(cuts.tensor(value) for value in inputs)
    bound = frozenset(dim for tensor in final for dim in tensor.shape if isinstance(dim, Sym))
    looked_up = _lookups(nodes, inputs, cuts)
    spec = widened(replace(draft.spec(final), requires=cuts.shapes.bounds(bound), lookups=looked_up))
    try:
        check(spec)
    except SpecError as error:
        raise LiftError(
            str(error), advice="report the model: the program that was found breaks a rule of ours"
        ) from error
    return Region(draft.kind, draft.label, nodes, tuple(inputs), draft.outputs, spec)


def _lookups(nodes: Iterable[ir.Node], inputs: Sequence[ir.Value], cuts: Cuts) -> tuple[Lookup, ...]:
    """The indices that data brings to the region's gathers, where integers of its inputs make them."""
    found: list[Lookup] = []
    reader = cuts.reader("side", anchors=frozenset(inputs))
    known = {cuts.tensor(value) for value in inputs}
    for node in nodes:
        data, index = node.inputs[:2] if node.op_type in GATHERS else (None, None)
        if data is None or index is None or cuts.is_known(index):
            continue
        shape = shape_of(index, cuts.shapes)
        axes = axes_of(shape, "at")
        for at, size in gathered(node, axes, shape_of(data, cuts.shapes)):
            try:
                position = cast(reader.at(index, at), DType.I64)
            except LiftError:  # made in a way that no expression says: the gather gives NaN out of range
                continue
            sources = {load.source for load in loads(position)}
            if sources and sources <= known and all(map(_is_integer, walk(position))):
                found.append(Lookup(tuple(axis for axis in axes if axis in variables(position)), position, size))
    return tuple(dict.fromkeys(found))


def _is_integer(part: Expr) -> bool:
    """Whether a part of an index is something that no rounding or narrow type changes."""
    return part.dtype in (DType.I64, DType.BOOL) or (isinstance(part, Load) and not part.dtype.is_float)


def _body(draft: Draft, inputs: list[ir.Value], cuts: Cuts) -> tuple[ir.Node, ...]:
    """The nodes between inputs and outputs, in order. Values that only the body needs are added to `inputs`."""
    found: set[ir.Node] = set()
    stack = list(draft.outputs)
    known = set(inputs)
    while stack:
        value = stack.pop()
        if value in known:
            continue
        node = cuts.remains.producer(value)
        if content_of(value, cuts.shapes) is not None and node not in draft.core:
            continue
        if value.const_value is not None and value.const_value.nbytes <= COPY_LIMIT and not value.is_graph_input():
            continue
        if (
            node is None
            or value in cuts.remains.makers
            or (node not in draft.core and not _is_inlined(node, value, cuts))
        ):
            inputs.append(value)
            known.add(value)
        elif node not in found:
            found.add(node)
            stack.extend(source for source in node.inputs if source is not None)
            stack.extend(sorted(captured(node), key=lambda value: value.name or ""))
    return tuple(sorted(found, key=cuts.remains.position.__getitem__))


def _is_inlined(node: ir.Node, value: ir.Value, cuts: Cuts) -> bool:
    return rule_of(node) is not None or not cuts.plan(value, "side").leaves


def _binders(
    draft: Draft, tensors: tuple[Tensor, ...], inputs: list[ir.Value], model_inputs: tuple[ir.Value, ...], cuts: Cuts
) -> list[ir.Value]:
    """Model inputs that the region takes for the sake of their dims."""
    exprs: list[Expr] = [dim for tensor in tensors for dim in tensor.shape]
    for program in draft.programs:
        exprs += [program, *(axis.extent for axis in variables(program) if axis.extent is not None)]
    needed = {symbol for expr in exprs for symbol in symbols(expr)}
    bound = {dim for value in inputs for dim in cuts.tensor(value).shape if isinstance(dim, Sym)}
    extra: list[ir.Value] = []
    for symbol in sorted(needed - bound, key=lambda s: s.name):
        if symbol in bound:
            continue
        source = next((v for v in model_inputs if symbol in (cuts.shapes.shape(v) or ())), None)
        if source is None:
            raise _unbound(symbol, cuts)
        extra.append(source)
        bound |= {dim for dim in cuts.tensor(source).shape if isinstance(dim, Sym)}
    return extra


def _unbound(symbol: Sym, cuts: Cuts) -> LiftError:
    """Why a dim cannot be told from inputs: who makes it, and of what."""
    name = symbol.name.rpartition(".")[0] or symbol.name
    maker = next((node for node in cuts.remains.nodes if any(out.name == name for out in node.outputs)), None)
    reason = f"no input of the region or the model has {symbol} as a whole dim"
    if maker is None:
        return LiftError(reason, advice=f"fix the dim, or give the model an input that has {symbol} as a dim")
    reason += f": {maker.op_type} {name_of(maker)} makes it at run time"
    default = next(
        (v for v in maker.inputs if v is not None and v.is_graph_input() and v.const_value is not None), None
    )
    if default is None:
        return LiftError(
            reason, node=maker, advice=f"fix the dim, or give the model an input that has {symbol} as a dim"
        )
    return LiftError(
        f"{reason} by {default.name}, an initializer that is an input too, so that a caller may replace it",
        node=maker,
        advice="take it out of the inputs: python -m onnxruntime.tools.remove_initializer_from_input",
    )
