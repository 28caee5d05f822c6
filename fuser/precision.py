"""The precision policy: what 16-bit floats are computed in inside a region.

Comes in: a spec whose programs round to float16 or bfloat16 after every operator, as the model's nodes do. Goes out:
the spec that is compiled: 16-bit tensors are widened when they are read, arithmetic is float32, results are rounded
when they are stored. Invariant: no program of the result computes in 16 bits.

What is left out, and what is kept:

* A rounding between two operators is left out. The result is nearer to exact arithmetic than the model's own, and what
  overflows float16 on the way (a sum of squares, QKᵀ before its scale) does not.
* An operation that jumps sees its operands rounded to their declared type: comparisons, IsInf, Floor, Ceil, Round,
  Sign, and casts to integers and bool. A threshold such as `x <= -65504` decides as it does in the model, up to the
  rounding of x itself. Casts of integers to 16 bits round too, so that a counter saturates where it does in the model.
* Attention scores, and what a softmax reads, that overflow float16 downwards are −inf: two masks of −65504 that are
  added hide a key completely, and a row that is hidden so is NaN, or 0 under a guard. Overflow upwards is the
  model's failure and is not reproduced. A single mask of −65504 stays finite, as it is in the model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilecore.contract.dtype import DType
from tilecore.contract.expr import (
    Const,
    Expr,
    Load,
    Op,
    Source,
    Var,
    apply,
    binary,
    cast,
    children,
    const,
    select,
    walk,
)
from tilecore.contract.spec import (
    AttentionSpec,
    ContractionSpec,
    Result,
    RowSpec,
    ScanSpec,
    Spec,
    State,
    Step,
    Total,
    View,
    cells_of,
)

HALF = frozenset((DType.F16, DType.BF16))
JUMPS = frozenset(("lt", "le", "gt", "ge", "eq", "ne", "isinf", "floor", "ceil", "round", "sign", "floordiv", "mod"))
KEEPS = frozenset(("select", "neg", "abs", "min", "max"))  # give one of their operands, rounded if that is
F16_LOWEST = -65520.0  # this and below rounds to −inf in float16


@dataclass(frozen=True, slots=True)
class Renamed:
    """Steps of a row program and cells of a scan that were 16 bits wide, and what they are in f32."""

    steps: Mapping[Var, Var]
    cells: Mapping[Source, Source]


NOTHING = Renamed({}, {})


def in_f32(value: Expr) -> Expr:
    """`value`, in f32 if it is a 16-bit float."""
    return cast(value, DType.F32) if value.dtype in HALF else value


def hidden(score: Expr, dtype: DType) -> Expr:
    """An f32 score whose declared type is `dtype`: −inf where that type overflows downwards."""
    if dtype is not DType.F16:
        return score
    return select(binary("le", score, F16_LOWEST), const(-math.inf), score)


def without_halves(expr: Expr) -> Expr:
    """`expr` in float32 arithmetic, as `widened` makes the programs of a spec."""
    return _wide(expr, NOTHING)


def widened(spec: Spec) -> Spec:
    """The spec in float32 arithmetic; see the module docstring. A spec without 16-bit floats comes back as it is."""
    match spec:
        case AttentionSpec():
            return replace(
                spec,
                q=_view(spec.q),
                k=_view(spec.k),
                v=_view(spec.v),
                score=_score(spec.score),
                sink=None if spec.sink is None else _view(spec.sink),
                weight=None if spec.weight is None else _wide(spec.weight, NOTHING),
                reductions=tuple(replace(step, value=_score(step.value)) for step in spec.reductions),
                outputs=_results(spec.outputs, NOTHING),
            )
        case ContractionSpec():
            siblings = tuple(replace(product, b=_view(product.b)) for product in spec.siblings)
            outputs = _results(spec.outputs, NOTHING)
            return replace(spec, a=_view(spec.a), b=_view(spec.b), siblings=siblings, outputs=outputs)
        case ScanSpec():
            return _scan(spec)
        case RowSpec():
            halves = [step.var for step in spec.steps if step.var.dtype in HALF]
            names = Renamed({var: Var(var.name, DType.F32, var.extent) for var in halves}, {})
            steps = tuple(
                Step(names.steps.get(step.var, step.var), step.kind, _wide(step.value, names)) for step in spec.steps
            )
            return replace(spec, steps=steps, outputs=_results(spec.outputs, names))


def _scan(spec: ScanSpec) -> ScanSpec:
    wide = {cell: replace(cell, dtype=DType.F32) if cell.dtype in HALF else cell for cell in cells_of(spec)}
    names = Renamed({}, {cell: new for cell, new in wide.items() if cell.dtype in HALF})

    def total(old: Total) -> Total:
        return replace(old, cell=wide[old.cell], value=_wide(old.value, names))

    states = tuple(
        State(wide[s.cell], wide[s.new], s.axes, _wide(s.initial, names), _wide(s.update, names)) for s in spec.states
    )
    return replace(
        spec,
        states=states,
        totals=tuple(map(total, spec.totals)),
        reads=tuple(map(total, spec.reads)),
        outputs=_results(spec.outputs, names),
    )


def _view(view: View) -> View:
    return replace(view, value=_wide(view.value, NOTHING))


def _results(results: tuple[Result, ...], names: Renamed) -> tuple[Result, ...]:
    return tuple(Result(made.place, _stored(made.value, names)) for made in results)


def _stored(value: Expr, names: Renamed) -> Expr:
    """The program of a result: rounded once, and not at all where it is a 16-bit element as it was read."""
    wide = _wide(value, names)
    if isinstance(wide, Op) and wide.name == "cast" and wide.args[0].dtype is value.dtype:
        return wide.args[0]
    return cast(wide, value.dtype)


def _score(score: Expr) -> Expr:
    """The score program; where it is made of more than the dot product and constant factors, it can be a mask."""
    wide = _wide(score, NOTHING)
    declared = score.args[0].dtype if isinstance(score, Op) and score.name == "cast" else score.dtype
    masks = any(isinstance(node, Load) or (isinstance(node, Op) and node.name in ("add", "sub")) for node in walk(wide))
    return hidden(wide, declared) if masks else wide


def _wide(expr: Expr, names: Renamed) -> Expr:
    """`expr` without 16-bit arithmetic, in f32 where it was 16 bits wide."""
    made: dict[int, Expr] = {}  # node → its value, in f32 for 16-bit nodes
    exact: set[int] = set()  # 16-bit nodes whose f32 value is one of their type
    for node in walk(expr):
        parts = tuple(made[id(child)] for child in children(node))
        if node.dtype in HALF:
            made[id(node)] = _half(node, parts, names)
            if _is_exact(node, names, exact):
                exact.add(id(node))
        elif isinstance(node, Op):
            made[id(node)] = _other(node, parts, exact)
        elif isinstance(node, Load):
            made[id(node)] = Load(node.source, parts, node.span)
        else:
            made[id(node)] = node
    return made[id(expr)]


def _half(node: Expr, parts: tuple[Expr, ...], names: Renamed) -> Expr:
    """The f32 value of a 16-bit node; `parts` are its operands' values."""
    match node:
        case Const():
            return const(node.value, DType.F32)
        case Var():
            return names.steps[node] if node in names.steps else cast(node, DType.F32)
        case Load():
            if node.source in names.cells:
                return Load(names.cells[node.source], parts, node.span)
            return cast(Load(node.source, parts, node.span), DType.F32)
        case Op(name="cast"):
            from_integer = node.args[0].dtype.is_int
            return cast(cast(parts[0], node.dtype) if from_integer else parts[0], DType.F32)
        case Op():
            return apply(node.name, *parts, span=node.span)
        case _:
            raise ValueError(f"{node} is no 16-bit float")


def _is_exact(node: Expr, names: Renamed, exact: set[int]) -> bool:
    match node:
        case Const():
            return True
        case Load():
            return node.source not in names.cells
        case Var():
            return node not in names.steps
        case Op(name="cast", args=(value,)):
            return not value.dtype.is_float
        case Op():
            operands = [arg for arg in node.args if arg.dtype in HALF]
            return node.name in KEEPS and all(id(arg) in exact for arg in operands)
        case _:
            return False


def _other(node: Op, parts: tuple[Expr, ...], exact: set[int]) -> Expr:
    """An operation with another result than a 16-bit float."""
    jumps = node.name in JUMPS or (node.name == "cast" and not node.dtype.is_float)
    if jumps:
        parts = tuple(_declared(arg, part, exact) for arg, part in zip(node.args, parts, strict=True))
    if node.name == "cast":
        return cast(parts[0], node.dtype, span=node.span)
    return apply(node.name, *parts, span=node.span)


def _declared(arg: Expr, part: Expr, exact: set[int]) -> Expr:
    """The operand of an operation that jumps: rounded to 16 bits where it was declared so."""
    while isinstance(arg, Op) and arg.name == "cast" and arg.dtype.is_float and arg.dtype not in HALF:
        arg = arg.args[0]
    if arg.dtype not in HALF or id(arg) in exact:
        return part
    return cast(cast(part, arg.dtype), part.dtype)
