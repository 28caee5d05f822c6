"""Makes a region of contractions: their operands' layouts as views, what follows them as their epilogue.

Comes in: `Factors` of one `Dot` that no attention took, or of several that multiply the same left operand. Goes out: a
draft. The axes that only the left operand has become rows, those that only the right has become columns, the others
batch; a constant operand is always put on the right.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fuser.cuts import Cuts, data_inputs
from fuser.dots import Dot, axes_of
from fuser.element import Index, LiftError, flatten, shape_of, unflatten
from fuser.growth import Growth, grow
from fuser.lift import is_view
from fuser.lower import Draft, result
from fuser.quantized import Levels, fits_sum, levels, scaled, whole
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Var, const, loads, substitute, variables
from tilecore.contract.spec import ContractionSpec, Product, Tensor, View

KIND = "contraction"
SIBLINGS = 3  # contractions of one left operand in one region


@dataclass(frozen=True, slots=True)
class Factors:
    """One contraction as a product of views: `where` its element (b, m, n) stands in the node's output.

    `sums` are the operands' levels and scales where the views are levels that are summed as integers.
    """

    dot: Dot
    a: View
    b: View
    where: Index
    sums: tuple[Levels, Levels] | None

    @property
    def weighs(self) -> bool:
        """Whether the right operand is made of weights."""
        sources = [load.source for load in loads(self.b.value)]
        return bool(sources) and all(isinstance(source, Tensor) and source.constant for source in sources)

    @property
    def acc_type(self) -> DType:
        """The type of the sum."""
        return DType.F32 if self.sums is None else DType.I32

    def total(self, acc: Expr) -> Expr:
        """What the contraction's tail takes of the sum `acc`: a real number, or the operator's own integer."""
        return acc if self.sums is None or self.dot.integer else scaled(acc, *self.sums)


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
        if factors.weighs and factors.a == first.a and factors.b.axes == first.b.axes:
            found += [factors] if known.isdisjoint(load.source for load in loads(factors.b.value)) else []
    return found


def factors_of(dot: Dot, cuts: Cuts) -> Factors:
    """The operands of `dot` as views. LiftError when they cannot be written as such."""
    o = axes_of(shape_of(dot.out, cuts.shapes), "o")
    inner = Var("k", extent=dot.depth)
    left_index, right_index = dot.locate(o, inner)
    reader = cuts.reader("view")
    sides = [(dot.read(side, reader.at, index), index) for side, index in enumerate((left_index, right_index))]
    if cuts.is_weight(dot.left) and not cuts.is_weight(dot.right):
        sides.reverse()
    b, m, n, renamed = split_axes(o, sides[0][1], sides[1][1])
    left, right = (substitute(side, renamed) for side, _ in sides)
    where = tuple(substitute(index, renamed) for index in o)
    sums = _integers(dot, left, right, inner)
    if sums is not None:
        left, right = sums[0].value, sums[1].value
    return Factors(dot, View("a", (b, m, inner), left), View("b", (b, inner, n), right), where, sums)


def draft_alone(dot: Dot, cuts: Cuts) -> Draft:
    """The region around one contraction. LiftError when there is none."""
    return draft_of([factors_of(dot, cuts)], cuts)


def draft_of(parts: Sequence[Factors], cuts: Cuts) -> Draft:
    """The region around contractions of one left operand. LiftError when there is none."""
    accs = [Var(f"acc{number or ''}", part.acc_type) for number, part in enumerate(parts)]
    reader = cuts.reader("side")
    values = [part.dot.finish(part.total(acc), part.where, reader.at) for part, acc in zip(parts, accs, strict=True)]
    outs = [part.dot.out for part in parts]
    where = {out: part.where for out, part in zip(outs, parts, strict=True)}
    growth = Growth(cuts, where, dict(zip(outs, values, strict=True)), [part.dot.node for part in parts])
    for part, value in zip(parts, values, strict=True):
        growth.check_sources(value)
        growth.check_sources(part.b.value)
    growth.check_sources(parts[0].a.value)
    extent = grow(growth)
    if not extent.results:
        raise LiftError("nothing reads the result")
    b, m, inner = parts[0].a.axes
    n = parts[0].b.axes[2]
    results = tuple(result(cuts, out, (b, m, n), growth.where[out], growth.value[out]) for out in extent.results)
    products = [Product(part.b, acc) for part, acc in zip(parts, accs, strict=True)]

    def spec(inputs: tuple[Tensor, ...]) -> ContractionSpec:
        first, *siblings = products
        return ContractionSpec(inputs, parts[0].a, first.b, first.acc, results, siblings=tuple(siblings))

    programs = (parts[0].a.value, *(part.b.value for part in parts), *(r.value for r in results),
                *(i for r in results for i in r.place.index), b, m, n, inner)  # fmt: skip
    label = " + ".join(node.op_type for node in extent.nodes)
    return Draft(KIND, label, frozenset(extent.nodes), extent.results, programs, spec)


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
