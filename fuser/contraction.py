"""Makes a region of contractions: their operands' layouts as views, what follows them as their epilogue.

Comes in: `Factors` of one `Dot` that no attention took, or of several that multiply the same left operand. Goes out: a
draft. The axes that only the left operand has become rows, those that only the right has become columns, the others
batch; a constant operand is always put on the right.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fuser.cuts import Cuts, data_inputs
from fuser.dots import Dot, axes_of
from fuser.element import ONE, ZERO, At, Index, LiftError, flatten, shape_of, unflatten
from fuser.graph import User
from fuser.growth import Growth, grow
from fuser.lift import is_view
from fuser.lower import Draft, result
from fuser.quantized import Levels, fits_sum, levels, scaled, whole
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Op, Var, const, loads, substitute, variables
from tilecore.contract.spec import ContractionSpec, Product, Tensor, View

KIND = "contraction"
SIBLINGS = 3  # contractions of one left operand in one region
SLICES = frozenset({"Split", "Slice", "Gather"})
FOLLOWED = 6  # nodes after a contraction among which slices are looked for


@dataclass(frozen=True, slots=True)
class Factors:
    """One contraction as a product of views: `where` its element (b, m, n) stands in `out`, which `tail` makes of it.

    `out` is the node's output, or a part of what follows it (see `slices_of`); `nodes` lead to it. `sums` are the
    operands' levels and scales where the views are levels that are summed as integers. `byte_block` is the operator's
    licence to round the left operand.
    """

    a: View
    b: View
    out: ir.Value
    where: Index
    tail: Callable[[Expr, At], Expr]
    nodes: tuple[ir.Node, ...]
    sums: tuple[Levels, Levels] | None
    byte_block: int = 0

    @property
    def weighs(self) -> bool:
        """Whether the right operand is made of weights."""
        sources = [load.source for load in loads(self.b.value)]
        return bool(sources) and all(isinstance(source, Tensor) and source.constant for source in sources)

    @property
    def acc_type(self) -> DType:
        """The type of the sum."""
        return DType.F32 if self.sums is None else DType.I32


def origin_of(dot: Dot, cuts: Cuts) -> ir.Value:
    """The value that the left operand is a change of layout of: siblings have the same one."""
    value = dot.right if cuts.is_weight(dot.left) and not cuts.is_weight(dot.right) else dot.left
    while (node := value.producer()) is not None and is_view(node) and len(data_inputs(node)) == 1:
        value = data_inputs(node)[0]
    return value


def siblings_of(dot: Dot, others: Sequence[Dot], cuts: Cuts) -> list[Factors]:
    """`dot` and those of `others` that multiply the same view by other weights of as many columns."""
    try:
        first = factors_of(dot, cuts)
    except LiftError:  # the attempt to fuse it alone will say so
        return []
    found = [first] if first.weighs else []
    for other in others if found else ():
        try:
            factors = factors_of(other, cuts)
        except LiftError:
            continue
        known = {load.source for part in found for load in loads(part.b.value)}
        alike = factors.b.axes == first.b.axes and factors.byte_block == first.byte_block
        if factors.weighs and factors.a == first.a and alike:
            found += [factors] if known.isdisjoint(load.source for load in loads(factors.b.value)) else []
    return found


def factors_of(dot: Dot, cuts: Cuts) -> Factors:
    """The operands of `dot` as views. LiftError when they cannot be written as such."""
    rounded = _rounded_rows(dot, cuts)
    found = _factors(dot, cuts, rounded) if rounded else None
    return _factors(dot, cuts, frozenset()) if found is None or found.sums is None else found


def _factors(dot: Dot, cuts: Cuts, through: frozenset[ir.Value]) -> Factors:
    """The operands of `dot` as views, which look through these values."""
    o = axes_of(shape_of(dot.out, cuts.shapes), "o")
    inner = Var("k", extent=dot.depth)
    left_index, right_index = dot.locate(o, inner)
    reader = cuts.reader("view", through=through)
    sides = [(dot.read(side, reader.at, index), index) for side, index in enumerate((left_index, right_index))]
    if cuts.is_weight(dot.left) and not cuts.is_weight(dot.right):
        sides.reverse()
    b, m, n, renamed = split_axes(o, sides[0][1], sides[1][1])
    left, right = (substitute(side, renamed) for side, _ in sides)
    where = tuple(substitute(index, renamed) for index in o)
    sums = _integers(dot, left, right, inner)
    if sums is not None:
        left, right = sums[0].value, sums[1].value

    def tail(acc: Expr, at: At) -> Expr:
        """The operator's own result: it takes a real number, or the integer where it is one that multiplies levels."""
        return dot.finish(acc if sums is None or dot.integer else scaled(acc, *sums), where, at)

    views = View("a", (b, m, inner), left), View("b", (b, inner, n), right)
    return Factors(*views, dot.out, where, tail, (dot.node,), sums, dot.byte_block)


def draft_alone(dot: Dot, cuts: Cuts) -> Draft:
    """The region around one contraction. LiftError when there is none."""
    return draft_of([factors_of(dot, cuts)], cuts)


def draft_of(parts: Sequence[Factors], cuts: Cuts) -> Draft:
    """The region around contractions of one left operand. LiftError when there is none."""
    accs, growth = _seed(parts, cuts)
    extent = grow(growth)
    if not extent.results:
        raise LiftError("nothing reads the result")
    b, m, inner = parts[0].a.axes
    n = parts[0].b.axes[2]
    results = tuple(result(cuts, out, (b, m, n), growth.where[out], growth.value[out]) for out in extent.results)
    products = [Product(part.b, acc) for part, acc in zip(parts, accs, strict=True)]

    def spec(inputs: tuple[Tensor, ...]) -> ContractionSpec:
        first, *siblings = products
        return ContractionSpec(
            inputs, parts[0].a, first.b, first.acc, results, siblings=tuple(siblings), byte_block=parts[0].byte_block
        )

    programs = (parts[0].a.value, *(part.b.value for part in parts), *(r.value for r in results),
                *(i for r in results for i in r.place.index), b, m, n, inner)  # fmt: skip
    label = " + ".join(node.op_type for node in extent.nodes)
    return Draft(KIND, label, frozenset(extent.nodes), extent.results, programs, spec)


def _seed(parts: Sequence[Factors], cuts: Cuts) -> tuple[list[Var], Growth]:
    """A placeholder for each sum, and the parts to grow from."""
    accs = [Var(f"acc{number or ''}", part.acc_type) for number, part in enumerate(parts)]
    reader = cuts.reader("side")
    where = {part.out: part.where for part in parts}
    values = {part.out: part.tail(acc, reader.at) for part, acc in zip(parts, accs, strict=True)}
    growth = Growth(cuts, where, values, list(dict.fromkeys(node for part in parts for node in part.nodes)))
    for part in parts:
        growth.check_sources(values[part.out])
        growth.check_sources(part.b.value)
    growth.check_sources(parts[0].a.value)
    return accs, growth


def draft_of_slices(dot: Dot, cuts: Cuts) -> Draft | None:
    """The region around one contraction whose columns are cut into slices that are then combined; None for others.

    The sums of a gate and of what it gates, from one packed weight, are so combined before they are stored.
    """
    slices = slices_of(dot, cuts)
    if not slices:
        return None
    draft = draft_of(slices, cuts)
    stored = sum(cuts.size(value) for value in draft.outputs)
    return draft if stored < sum(cuts.size(part.out) for part in slices) else None


def slices_of(dot: Dot, cuts: Cuts) -> list[Factors]:
    """What `dot` leads to, as slices of as many columns each, if nothing reads it but them; [] otherwise.

    Each is a contraction of its own, by the same columns of the weight.
    """
    whole = factors_of(dot, cuts) if _may_be_cut(dot, cuts) else None
    if whole is None or not whole.weighs:
        return []
    (acc,), growth = _seed([whole], cuts)
    extent = grow(growth)
    users = cuts.remains.users_of(extent.results[0]) if len(extent.results) == 1 else set[User]()
    readers = [user for user in users if isinstance(user, ir.Node) and user.op_type in SLICES and not user.domain]
    outs = [out for node in readers for out in node.outputs if cuts.remains.users_of(out)]
    if len(readers) < len(users) or not 1 < len(outs) <= SIBLINGS:
        return []
    source = extent.results[0]
    value = growth.value[source]
    n = whole.b.axes[2]
    found: list[Factors] = []
    for out in outs:
        columns = _columns_of(out, source, growth.where[source], n, cuts)
        node = out.producer()
        if columns is None or node is None:
            return []
        start, axis, where = columns
        moved: dict[Expr, Expr] = {n: axis + start}

        def tail(own: Expr, at: At, moved: dict[Expr, Expr] = moved) -> Expr:
            return substitute(value, {acc: own, **moved})

        b = View("b", (*whole.b.axes[:2], axis), substitute(whole.b.value, moved))
        found.append(Factors(whole.a, b, out, where, tail, (*extent.nodes, node), whole.sums, whole.byte_block))
    found.sort(key=lambda part: cuts.remains.position[part.nodes[-1]])
    return found if all(part.b.axes == found[0].b.axes for part in found) else []


def _columns_of(out: ir.Value, source: ir.Value, where: Index, n: Var, cuts: Cuts) -> tuple[Expr, Var, Index] | None:
    """The first column of a slice of `source`, its columns, and where they stand in it; None when it has no such.

    `where` says where column n stands in `source`. A run of the axis that is n, or that is its leading digit n // step,
    is a run of columns, and all rows of these.
    """
    shape, size = shape_of(out, cuts.shapes), shape_of(source, cuts.shapes)
    index, dropped = axes_of(shape, "s"), len(size) - len(shape)
    read = cuts.reader("view", anchors=frozenset((source,))).compute(out, index)
    if not isinstance(read, Load) or dropped not in (0, 1):
        return None
    for axis, dim in enumerate(size):
        own = (*index[:axis], *(ZERO,) * dropped, *index[axis:])
        length = ONE if dropped else shape[axis]
        first, step = read.index[axis] - own[axis], _step_of(where[axis], n, dim)
        if length == dim or step is None or read.index != _with(own, axis, own[axis] + first):
            continue
        width = length * step
        if not isinstance(first, Const) or not isinstance(width, Const):
            return None
        columns, start = Var(n.name, extent=width), first * step
        moved = tuple(substitute(part, {n: columns + start}) for part in where)
        return start, columns, _with(moved, axis, *(() if dropped else (moved[axis] - first,)))
    return None


def _step_of(place: Expr, n: Var, dim: Expr) -> Expr | None:
    """How many columns one step of an axis is, when column n stands at `place` of its `dim` and all n are in order."""
    if place == n:
        return ONE
    match place:
        case Op(name="floordiv", args=(inner, step)) if (
            inner == n and isinstance(step, Const) and dim * step == n.extent
        ):
            return step
        case _:
            return None


def _rounded_rows(dot: Dot, cuts: Cuts) -> frozenset[ir.Value]:
    """The levels that rows by weights are, where one product alone reads them: rounded floats, and what they mean.

    Its kernel rounds rows once for all of its columns, so that their bytes need no pass of their own. Levels that
    another region may store as results of its own stay what is read, and so do images, whose elements meet many taps.
    """
    if (
        cuts.is_weight(dot.left)
        or not cuts.is_weight(dot.right)
        or shape_of(dot.left, cuts.shapes)[-1:] != (dot.depth,)
    ):
        return frozenset()
    chain = [dot.left]
    node = cuts.remains.producer(dot.left)
    if node is not None and node.op_type == "DequantizeLinear" and node.inputs[0] is not None:
        chain.append(node.inputs[0])
        node = cuts.remains.producer(node.inputs[0])
    if node is None or node.op_type != "QuantizeLinear" or cuts.is_home(chain[-1]):
        return frozenset()
    alone = all(len(cuts.remains.users_of(value)) == 1 and value not in cuts.remains.makers for value in chain)
    return frozenset(chain) if alone else frozenset()


def _with(index: Index, axis: int, *part: Expr) -> Index:
    """The index with `part` in the place of one axis."""
    return (*index[:axis], *part, *index[axis + 1 :])


def _may_be_cut(dot: Dot, cuts: Cuts) -> bool:
    """Whether slices are among the first nodes that follow."""
    nodes = cuts.remains.nodes_using(dot.out)
    for node in nodes:  # grows by what follows each
        if node.op_type in SLICES and not node.domain:
            return True
        followers = (user for value in node.outputs for user in cuts.remains.nodes_using(value))
        nodes += [user for user in followers if user not in nodes] if len(nodes) < FOLLOWED else []
    return False


def _integers(dot: Dot, left: Expr, right: Expr, inner: Var) -> tuple[Levels, Levels] | None:
    """The operands as levels to be summed as integers; None where that is not what the graph says, exactly."""
    if dot.integer:
        wholes = whole(left), whole(right)
        if wholes[0] is None or wholes[1] is None:
            raise LiftError(f"{dot.node.op_type} {dot.node.name!r} multiplies integers that 16 bits do not hold")
        return wholes[0], wholes[1]
    found = levels(left, inner), levels(right, inner)
    if found[0] is None or found[1] is None or not fits_sum(found[0], found[1], dot.depth):
        return None
    return found[0], found[1]


def split_axes(o: Index, left: Index, right: Index) -> tuple[Var, Var, Var, dict[Expr, Expr]]:
    """(b, m, n) and what each axis of the output is in them."""
    axes = [axis for axis in o if isinstance(axis, Var)]
    in_left = frozenset(var for index in left for var in variables(index))
    in_right = frozenset(var for index in right for var in variables(index))
    rows = [axis for axis in axes if axis not in in_right]
    columns: list[Var] = []
    for axis in reversed(axes):  # trailing axes of the right operand alone, rows between them left aside
        if axis in rows:
            continue
        if axis in in_left:
            break
        columns.insert(0, axis)
    batch = [axis for axis in axes if axis not in rows and axis not in columns]
    renamed: dict[Expr, Expr] = {}

    def joined(name: str, group: list[Var]) -> Var:
        extents = tuple(axis.extent or const(1) for axis in group)
        var = Var(name, extent=flatten(tuple(extent - 1 for extent in extents), extents) + 1)
        renamed.update(zip(group, unflatten(var, extents), strict=True))
        return var

    return joined("b", batch), joined("m", rows), joined("n", columns), renamed
