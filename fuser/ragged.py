"""Attention over sequences without their padding: packed rows of tokens and where each sequence begins.

Comes in: the draft of an attention in an unpadded model, whose padded operands are put back from tokens and of whose
result only tokens are read. Goes out: the same attention over the tokens' rows, as long as each sequence is.

A token that counts need not be among the first: everything else that is read by position (a relative bias, a causal
mask) is read where `rows` says that the token stands. What must be shown is that the mask hides keys: where it is 0, a
constant as low as masks use is added to the score, or chosen. Like all that `--unpad` does, leaving these keys out then
follows from the promise that the model ignores its padding.
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from fuser.cuts import Cuts
from fuser.dims import divide_exactly
from fuser.element import Index, LiftError, attribute, flatten, shape_of
from fuser.lift import Inliner, rule_of
from fuser.lower import Draft
from fuser.shapes import Shapes, describe
from fuser.unpad import MASK_KEY, PLACES, ROWS, SHOWN, STARTS
from fuser.visibility import by_position
from tilecore.contract.dtype import DType
from tilecore.contract.expr import (
    Const,
    Expr,
    Load,
    Op,
    Var,
    binary,
    const,
    polynomial,
    rewrite,
    substitute,
    variables,
)
from tilecore.contract.spec import AttentionSpec, Place, Result, View, extent_of

HIDDEN = -1000.0  # what masks add to hide a key is lower: -10000, -1e9, the lowest float, -inf


@dataclass(frozen=True, slots=True)
class Tables:
    """What an unpadded model knows of its tokens (`fuser.unpad`); `made` is what elements of the mask are part of."""

    mask: ir.Value
    rows: ir.Value
    places: ir.Value
    starts: ir.Value
    shown: ir.Value
    made: frozenset[ir.Value]


def tables_of(model: ir.Model, shapes: Shapes) -> Tables | None:
    """The tables of an unpadded model; None for any other."""
    graph = model.graph
    values = {value.name: value for value in (*graph.inputs, *(out for node in graph for out in node.outputs))}
    names = (model.metadata_props.get(MASK_KEY), ROWS, PLACES, STARTS, SHOWN)
    found = [values.get(name) for name in names]
    known = [value for value in found if value is not None and shapes.shape(value) is not None]
    if len(known) != len(names):
        return None
    made = {known[0]}
    for node in graph:
        if rule_of(node) is not None and any(value in made for value in node.inputs):
            made.update(node.outputs)
    return Tables(*known, made=frozenset(made))


def packed(draft: Draft, tables: Tables, cuts: Cuts) -> Draft:
    """The attention over the tokens' rows. LiftError says why it stays padded."""
    spec = draft.spec(())
    assert isinstance(spec, AttentionSpec)
    if any(result.place.axes == spec.score_axes for result in spec.outputs):
        raise LiftError("its scores or probabilities are read by something else")
    _, length = shape_of(tables.mask, cuts.shapes)
    for axis, noun in zip(spec.score_axes[2:], ("queries", "keys"), strict=True):
        if axis.extent != length:
            raise LiftError(f"it has {describe((extent_of(axis),))} {noun}, the mask {describe((length,))} places")
    gathers = [_reader(value, tables, cuts) for value in draft.outputs]
    sequences = {_sequence(result, spec, length) for result in spec.outputs}
    if len(sequences) != 1:
        raise LiftError("its results are of different sequences")
    ragged = _Ragged(tables, cuts, spec, sequences.pop(), length)
    made = ragged.spec_of([node.outputs[0] for node in gathers])
    return Draft(
        draft.kind,
        f"{draft.label}, ragged",
        draft.core | frozenset(ragged.scatters),
        tuple(node.outputs[0] for node in gathers),
        tuple(_programs(made)),
        lambda inputs: replace(made, inputs=inputs),
    )


def _reader(value: ir.Value, tables: Tables, cuts: Cuts) -> ir.Node:
    """The only reader of a result, which takes its tokens."""
    users = cuts.remains.users_of(value)
    found = [user for user in users if isinstance(user, ir.Node) and _takes_tokens(user, tables)]
    if len(users) != 1 or len(found) != 1:
        raise LiftError(f"its result {value.name!r} is read as a padded tensor")
    return found[0]


def _takes_tokens(node: ir.Node, tables: Tables) -> bool:
    return node.op_type == "Gather" and node.inputs[1] is tables.rows and int(attribute(node, "axis", 0)) == 0


def _sequence(result: Result, spec: AttentionSpec, length: Expr) -> Expr:
    """Which sequence a batch and head of the result belong to."""
    query = spec.score_axes[2]
    place = result.place
    at: dict[Expr, Expr] = dict(zip(place.axes[:3], spec.score_axes[:3], strict=True))
    found = divide_exactly(substitute(place.index[0], at) - query, length)
    if found is None or variables(found) - set(spec.score_axes[:2]):
        raise LiftError(f"the rows of its result {place.name!r} are in another order than the tokens")
    return found


@dataclass(slots=True)
class _Ragged:
    """One attention on its way: `sequence` is that of a batch and head, `scatters` are what it does without."""

    tables: Tables
    cuts: Cuts
    spec: AttentionSpec
    sequence: Expr
    length: Expr
    scatters: set[ir.Node] = field(default_factory=set[ir.Node])

    @property
    def first(self) -> Expr:
        """The sequence's first token. Never outside of a tensor of tokens, whatever the table says."""
        return binary("max", self.cuts.load(self.tables.starts, (self.sequence,)), const(0))

    def spec_of(self, outputs: Sequence[ir.Value]) -> AttentionSpec:
        """The attention over tokens, with the rows of `outputs` in the place of its results."""
        old, key = self.spec, self.spec.score_axes[3]
        score = self.expanded(old.score)
        steps = [replace(step, value=self.expanded(step.value)) for step in old.reductions]
        reduced = all(step.kind == "max" and _hides(self.masked(step.value, 0), HIDDEN) for step in steps)
        if not reduced or not _hides(self.masked(score, 0), HIDDEN):
            raise LiftError(f"nothing shows that {self.tables.mask.name!r} hides its keys")
        (tokens,) = shape_of(self.tables.rows, self.cuts.shapes)
        end = binary("min", self.cuts.load(self.tables.starts, (self.sequence + 1,)), tokens)
        weight = None if old.weight is None else self.at_tokens(self.expanded(old.weight))
        return replace(
            old,
            q=self.view(old.q),
            k=self.view(old.k),
            v=self.view(old.v),
            sink=None if old.sink is None else self.view(old.sink),
            score=by_position(self.at_tokens(score), key),
            weight=None if weight == old.probability else weight,
            reductions=tuple(replace(step, value=self.at_tokens(step.value)) for step in steps),
            outputs=tuple(map(self.result, old.outputs, outputs)),
            length=end - self.first,
        )

    def view(self, view: View) -> View:
        """An operand at tokens; the axes of views are those of scores but for columns."""
        return replace(view, value=self.at_tokens(view.value))

    def result(self, result: Result, output: ir.Value) -> Result:
        """A result that goes to rows of tokens."""
        place = result.place
        index = (self.first + place.axes[2], *place.index[1:])
        return Result(Place(self.cuts.tensor(output), place.axes, index), self.at_tokens(result.value))

    def expanded(self, expr: Expr) -> Expr:
        """`expr` with what elements of the mask are part of written out, so that they show."""
        inliner = Inliner(self.cuts.shapes, self.cuts.opset, self._leaf)

        def visit(node: Expr) -> Expr | None:
            value = self.cuts.values.get(node.source.name) if isinstance(node, Load) else None
            if not isinstance(node, Load) or value is None or value not in self.tables.made:
                return None
            try:
                return inliner.at(value, node.index)
            except LiftError:  # it is read as it is
                return None

        return rewrite(expr, visit)

    def _leaf(self, value: ir.Value, index: Index) -> Expr | None:
        inside = value in self.tables.made and value is not self.tables.mask
        return None if inside or self.cuts.is_known(value) else self.cuts.load(value, index)

    def masked(self, expr: Expr, seen: int) -> Expr:
        """`expr` where the mask is 1 at the query and `seen` at the key."""
        query, key = self.spec.score_axes[2:]

        def visit(node: Expr) -> Expr | None:
            place = self._place_in_mask(node)
            return None if place not in (query, key) else _number(1 if place == query else seen, node.dtype)

        return rewrite(expr, visit)

    def _place_in_mask(self, node: Expr) -> Expr | None:
        """Where in the own sequence the mask is read, if it is."""
        if not isinstance(node, Load) or node.source != self.cuts.tensor(self.tables.mask):
            return None
        sequence, place = node.index
        return place if sequence == self.sequence else None

    def at_tokens(self, expr: Expr) -> Expr:
        """`expr` with its query and key counted among the tokens of their sequence."""
        axes = self.spec.score_axes[2:]
        rows = {axis: self.cuts.load(self.tables.rows, (self.first + axis,)) for axis in axes}
        kept: dict[Expr, Expr] = {}  # what needs no change, by its name on the way
        marks: set[Expr] = set()  # of these, elements of the mask, which are not 0

        def visit(node: Expr) -> Expr | None:
            place = self._place_in_mask(node)
            if place in axes:
                name = Var(f"kept{len(kept)}", node.dtype)
                kept[name] = self.cuts.load(self.tables.shown, (self.first + place,))
                marks.add(name)
                return const(True) if node.dtype is DType.BOOL else name
            if _is_order(node, axes):
                name = Var(f"kept{len(kept)}", DType.BOOL)
                kept[name] = node
                return name
            return _truth(node, marks)

        padded: dict[Expr, Expr] = {axis: row - self.sequence * self.length for axis, row in rows.items()}
        moved = substitute(rewrite(expr, visit), padded)
        back = {row: self.first + axis for axis, row in rows.items()}
        return substitute(rewrite(moved, lambda node: self._unscattered(node, back)), kept)

    def _unscattered(self, node: Expr, tokens: Mapping[Expr, Expr]) -> Expr | None:
        """A load of a padded tensor at a token's place as a load of the tensor of tokens that was put back."""
        if not isinstance(node, Load) or node.source.name not in self.cuts.values:
            return None
        maker = self.cuts.values[node.source.name].producer()
        if maker is not None and maker.op_type == "Reshape" and maker.inputs[0] is not None:
            maker = maker.inputs[0].producer()
        if maker is None or maker.op_type != "ScatterND" or maker.inputs[1] is not self.tables.places:
            return None
        listed, dims = maker.inputs[2], node.source.shape
        lead = 1 if dims[0] != shape_of(self.tables.mask, self.cuts.shapes)[0] else 2
        token = tokens.get(flatten(node.index[:lead], dims[:lead]))
        if listed is None or token is None or len(shape_of(listed, self.cuts.shapes)) != len(dims) - lead + 1:
            return None
        self.scatters.add(maker)
        return self.cuts.load(listed, (token, *node.index[lead:]))


def _number(value: int, dtype: DType) -> Const:
    return const(bool(value) if dtype is DType.BOOL else value, dtype)


def _is_order(node: Expr, axes: tuple[Var, Var]) -> bool:
    """Whether the node compares which of query and key comes first: tokens are in the order of their places."""
    if not isinstance(node, Op) or node.name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        return False
    low, high = node.args if node.name in ("lt", "le") else node.args[::-1]
    if low.dtype is not DType.I64:
        return False
    slack = high - low - (1 if node.name in ("lt", "gt") else 0)
    terms = dict(polynomial(slack))
    rest = terms.pop((), 0)
    query, key = ((axis,) for axis in axes)
    return terms in ({query: 1, key: -1}, {query: -1, key: 1}) and rest in (
        (0,) if node.name in ("eq", "ne") else (0, -1)
    )


def _truth(node: Expr, marks: Set[Expr]) -> Expr | None:
    """What a test of an element of the mask for 0 gives where it is not 0."""
    match node:
        case Op(name="cast", args=(value,), dtype=DType.BOOL) if value in marks:
            return const(True)
        case Op(name="eq" | "ne", args=(value, Const(value=0)) | (Const(value=0), value)) if _unchanged(value) in marks:
            return const(node.name == "ne")
        case _:
            return None


def _unchanged(value: Expr) -> Expr:
    """`value` before a cast that leaves it 0 or not: integers as floats."""
    match value:
        case Op(name="cast", args=(inner,)) if value.dtype.is_float and inner.dtype.is_int:
            return inner
        case _:
            return value


def _hides(score: Expr, limit: float) -> bool:
    """Whether a score is at most `limit`, but for what is added to that."""
    match score:
        case Const(value=value):
            return float(value) <= limit
        case Op(name="add" | "min", args=args):
            return any(_hides(arg, limit) for arg in args)
        case Op(name="sub", args=(left, right)):
            return _hides(left, limit) or (isinstance(right, Const) and -float(right.value) <= limit)
        case Op(name="select", args=(_, yes, no)):
            return _hides(yes, limit) and _hides(no, limit)
        case Op(name="max", args=args):
            return all(_hides(arg, limit) for arg in args)
        case Op(name="mul", args=(value, Const(value=factor)) | (Const(value=factor), value)) if 0 < factor < math.inf:
            return _hides(value, limit / factor)
        case Op(name="div", args=(value, Const(value=factor))) if 0 < factor < math.inf:
            return _hides(value, limit * factor)
        case Op(name="cast", args=(value,)) if value.dtype.is_float:
            return _hides(value, limit)
        case _:
            return False


def _programs(spec: AttentionSpec) -> Iterator[Expr]:
    """Every expression of the attention."""
    yield from (view.value for view in (spec.q, spec.k, spec.v))
    yield from spec.score_axes
    yield spec.score
    yield from (part for part in (spec.weight, spec.length) if part is not None)
    yield from (step.value for step in spec.reductions)
    if spec.sink is not None:
        yield spec.sink.value
    for result in spec.outputs:
        yield from (result.value, *result.place.axes, *result.place.index)
