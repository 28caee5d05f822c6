"""Makes a region of a contraction: its operands' layouts as views, what follows it as its epilogue.

Comes in: a `Dot` that no attention took. Goes out: a draft. The axes that only the left operand has become rows, those
that only the right has become columns, the others batch; a constant operand is always put on the right.
"""

import onnx_ir as ir

from fuser.cuts import Cuts
from fuser.dots import Dot, axes_of
from fuser.element import Index, LiftError, flatten, shape_of, unflatten
from fuser.growth import Growth, grow
from fuser.lower import Draft, result
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Var, const, substitute, variables
from tilecore.contract.spec import ContractionSpec, Tensor, View

ACC = Var("acc", DType.F32)
KIND = "contraction"


def draft_of(dot: Dot, cuts: Cuts) -> Draft:
    """The region around `dot`. LiftError when its operands cannot be written as views."""
    o = axes_of(shape_of(dot.out, cuts.shapes), "o")
    inner = Var("k", extent=dot.depth)
    left_index, right_index = dot.locate(o, inner)
    left, right = (dot.left, left_index), (dot.right, right_index)
    if _constant(dot.left) and not _constant(dot.right):
        left, right = right, left
    b, m, n, renamed = split_axes(o, left[1], right[1])
    reader = cuts.reader("view")
    views = [substitute(reader.at(*side), renamed) for side in (left, right)]
    a_view = View("a", (b, m, inner), views[0])
    b_view = View("b", (b, inner, n), views[1])
    where = tuple(substitute(index, renamed) for index in o)
    value = dot.finish(ACC, where, cuts.reader("side").at)
    growth = Growth(cuts, {dot.out: where}, {dot.out: value}, [dot.node])
    growth.check_sources(value)
    extent = grow(growth)
    if not extent.results:
        raise LiftError("nothing reads the result")
    results = tuple(result(cuts, out, (b, m, n), growth.where[out], growth.value[out]) for out in extent.results)

    def spec(inputs: tuple[Tensor, ...]) -> ContractionSpec:
        return ContractionSpec(inputs, a_view, b_view, ACC, results)

    programs = (*views, *(r.value for r in results), *(i for r in results for i in r.place.index), b, m, n, inner)
    label = " + ".join(node.op_type for node in extent.nodes)
    return Draft(KIND, label, frozenset(extent.nodes), extent.results, programs, spec)


def _constant(value: ir.Value) -> bool:
    return value.const_value is not None and not value.is_graph_input()


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
