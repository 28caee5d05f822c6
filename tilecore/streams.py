"""Right operands that are computed, such as weights of 4 bits, in products of few rows.

Comes in: a plan. Goes out: which copies into panels need not be made when there are few rows, because the product can
compute each element where it uses it; and the loop statement that does so. A factor of the elements that is the same in
a run of rows (a scale in blocks) is taken out of the sum over the run: one multiplication instead of one per element.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from tilecore.addresses import Addresses, live_var
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Op, Var, binary, const, loads, substitute, variables
from tilecore.contract.panel import PANEL
from tilecore.contract.spec import Tensor, View, extent_of
from tilecore.graph import split_affine, tile_axes
from tilecore.infer import Plan
from tilecore.ir import Buffer, Copy, For, Gemm
from tilecore.loops import Mma, Stream

GROUP = 4  # rows of bytes that may lie side by side in panels (`panel.group_of`)
GROUPS = (256, 128, 64, 32, 16)  # rows that may share a factor, the most first


@dataclass(frozen=True, slots=True)
class Computed:
    """A right operand, the copy that would fill it, and its element at (panel, lane) and row `depth`."""

    copy: Copy
    value: Expr
    panel: Var
    lane: Var
    depth: Var

    def stream(self, product: Mma, gemm: Gemm, most_depth: Expr | None = None) -> Stream:
        """The statement that does the work of `product`, which is `gemm`, without the copy."""
        group, position = Var("group", extent=product.depth), Var("position", extent=product.depth)
        value, factor, size = _factored(self.value, self.depth, group, position)
        most = (gemm.c.shape[0], gemm.a.shape[1] if most_depth is None else most_depth)
        return Stream(
            product.a, product.c, product.rows, product.columns, product.depth, value, factor, size,
            self.panel, self.lane, group, position, product.clear, most, product.span,
        )  # fmt: skip


def computed_operands(plan: Plan, addresses: Addresses, others: Collection[str]) -> dict[str, Computed]:
    """By buffer, `others` apart: right operands of one product that the copy before it computes from inputs."""
    found: dict[str, Computed] = {}
    uses: dict[str, int] = {}
    for node in plan.graph.nodes:
        for buffer in (*node.reads, *node.writes):
            uses[buffer.name] = uses.get(buffer.name, 0) + 1
    rights = {node.stmt.b.name for node in plan.graph.nodes if isinstance(node.stmt, Gemm)}
    for node in plan.graph.nodes:
        copy = node.stmt
        if not isinstance(copy, Copy) or not isinstance(copy.dst.source, Buffer):
            continue
        buffer = copy.dst.source
        once = uses[buffer.name] == 2 and copy.dst.shape == buffer.shape
        if once and buffer.name in rights and buffer.name not in others and buffer.dtype is DType.F32:
            computed = _computed(copy, buffer, plan, addresses)
            if computed:
                found[buffer.name] = computed
    return found


def whole_depth(
    loop: For, products: Mapping[Gemm, Mma], computed: Mapping[str, Computed], plan: Plan, addresses: Addresses
) -> tuple[Stream, ...]:
    """What does the work of a whole loop over depth, so that panels are read from end to end; () if nothing does.

    The loop has to be copies and products alone, its left operands read in place.
    """
    gemms = [stmt for stmt in loop.body if isinstance(stmt, Gemm)]
    if not gemms or any(not isinstance(stmt, Gemm | Copy) for stmt in loop.body) or loop.start != const(0):
        return ()
    streams: list[Stream] = []
    for gemm in gemms:
        there, product = computed.get(gemm.b.name), products.get(gemm)
        if there is None or product is None or product.a.memory.kind == "scratch" or gemm.clear:
            return ()
        column = plan.layouts[gemm.b.name].column
        step = gemm.b.shape[1 - column]
        source = there.copy.src
        assert isinstance(source.source, View)
        axis = next(left for left, right in tile_axes(source, there.copy.dst) if right == 1 - column)
        depth = source.source.shape[axis]
        first: dict[Expr, Expr] = {loop.var: const(0)}
        start = substitute(product.a.offset, first)
        along = start + loop.var * step * product.a.column
        if extent_of(loop.var) != (depth + (step - 1)) // step or source.origin[axis] != loop.var * step:
            return ()
        if product.a.offset != along or loop.var in variables(product.rows) | variables(product.columns):
            return ()
        origin = tuple(substitute(position, first) for position in source.origin)
        copy = replace(there.copy, src=replace(source, origin=origin))
        whole = _computed(copy, gemm.b, plan, addresses, depth)
        if whole is None:
            return ()
        product = replace(product, a=replace(product.a, offset=start), depth=depth)
        streams.append(whole.stream(product, gemm, depth))
    return tuple(streams)


def _computed(
    copy: Copy, buffer: Buffer, plan: Plan, addresses: Addresses, depth_extent: Expr | None = None
) -> Computed | None:
    view, column = copy.src.source, plan.layouts[buffer.name].column
    if not isinstance(view, View) or not isinstance(view.value, Op):
        return None
    columns, rows = (plan.filled((buffer.name, axis), buffer.shape[axis]) for axis in (column, 1 - column))
    panel = live_var("panel", (columns + (PANEL - 1)) // PANEL)
    lane = live_var("lane", binary("min", const(PANEL), columns - panel * PANEL))
    depth = live_var("depth", rows if depth_extent is None else depth_extent)
    inner: list[Expr] = [depth, depth]
    inner[column] = panel * PANEL + lane
    index = list(copy.src.origin)
    for left, right in tile_axes(copy.src, copy.dst):
        index[left] = index[left] + inner[right]
    element = addresses.view_element(view, tuple(index))
    whole = isinstance(view.shape[-1], Const) and int(view.shape[-1].value) % PANEL == 0
    if not whole and not all(_in_panels(load) for load in loads(element) if lane in variables(load)):
        return None  # lanes past the last column would be read outside of the tensor
    value = addresses.resolve(Load(view, tuple(index)))
    steps = [split_affine(load.index[0], lane) for load in loads(value)]
    if any(rest is None or step not in (const(0), const(1), const(GROUP)) for step, rest in steps):
        return None  # neighbours in a row of b are not neighbours in memory, nor groups of rows
    return Computed(copy, value, panel, lane, depth)


def _in_panels(load: Load) -> bool:
    return isinstance(load.source, Tensor) and load.source.constant and load.source.shape[2:3] == (const(PANEL),)


def _factored(value: Expr, depth: Var, group: Var, position: Var) -> tuple[Expr, Expr | None, int | None]:
    """(what is left, the factor, rows that share it): the factor that most rows share."""
    if isinstance(value, Op) and value.name == "mul":
        for size in (None, *GROUPS):
            row = position if size is None else group * size + Var(position.name, extent=const(size))
            for factor, rest in (value.args, value.args[::-1]):
                there = substitute(factor, {depth: row})
                if not {var.name for var in variables(there)} & {position.name}:
                    inner = substitute(rest, {depth: row})
                    return substitute(inner, {Var(position.name, extent=const(size or 0)): position}), there, size
    return substitute(value, {depth: position}), None, None
