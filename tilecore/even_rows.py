"""Rows of a product dealt out evenly: blocks of as many rows each, where tiles of a fixed height would leave a sliver.

Comes in: a contraction without a batch and how many rows a tile has. Goes out: an equal one whose batch are the blocks,
with as many ragged rows each as all of them together need. A block of few rows reads all weights for little work, and
where tasks go along the columns it is another core's than the rows before it, which then waits for memory.
"""

from dataclasses import replace

from tilecore.contract.expr import Expr, Var, binary, const, nonnegative, substitute
from tilecore.contract.spec import ContractionSpec, Place, Product, Result, View, extent_of


def height_of(rows: Expr, block: int, unit: int) -> Expr:
    """Rows of a block: the fewest, in whole `unit`s but at most `block`, of which no more blocks are needed."""
    blocks = binary("max", -(-rows // block), const(1))
    units = -(-rows // (blocks * unit))
    return binary("min", binary("max", units * unit, const(unit)), const(block))


def even_rows(spec: ContractionSpec, block: int, unit: int) -> ContractionSpec:
    """`spec` with blocks of even height as its batch; itself where it has a batch, or one block at most."""
    batch, rows = (extent_of(axis) for axis in spec.a.axes[:2])
    if batch != const(1) or nonnegative(const(block) - rows):
        return spec
    height = height_of(rows, block, unit)
    part = Var("part", extent=-(-rows // height))
    row = Var("row_of_part", extent=binary("min", height, rows - part * height))

    def moved(value: Expr, g: Var, m: Var | None = None) -> Expr:
        there: dict[Expr, Expr] = {g: const(0)}
        return substitute(value, there if m is None else there | {m: part * height + row})

    def right(view: View) -> View:
        g, k, n = view.axes
        return View(view.name, (part, k, n), moved(view.value, g))

    def result(old: Result) -> Result:
        g, m, n = old.place.axes
        index = tuple(moved(entry, g, m) for entry in old.place.index)
        return Result(Place(old.place.tensor, (part, row, n), index), moved(old.value, g, m))

    g, m, k = spec.a.axes
    return replace(
        spec,
        a=View(spec.a.name, (part, row, k), moved(spec.a.value, g, m)),
        b=right(spec.b),
        siblings=tuple(Product(right(product.b), product.acc) for product in spec.siblings),
        outputs=tuple(map(result, spec.outputs)),
    )
