"""Lowering: tile program + plan → loop program.

Tile operations become loops over flat memory: consecutive row-wise statements share one loop over rows (`rows.py` joins
what is inside), products become register tiles, copies become packing loops or vanish where the source can be read in
place, and copies that do not depend on the fastest grid axis are kept across it (`Once`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from tilecore.addresses import Addresses, Slot, live_var, panel_size, row_stride, slot_size
from tilecore.ahead import touch_ahead
from tilecore.byte_streams import in_bytes
from tilecore.contract.dtype import DType
from tilecore.contract.expr import (
    Const,
    Expr,
    Load,
    Op,
    Sym,
    Var,
    binary,
    cast,
    const,
    loads,
    nonnegative,
    select,
    substitute,
    variables,
    walk,
)
from tilecore.contract.few_rows import FEW_ROWS
from tilecore.contract.panel import PANEL
from tilecore.contract.spec import Place, View
from tilecore.digits import in_digits
from tilecore.graph import Axis, TileGraph, buffers_of, depth_axes, gemm_axes, read_within, split_affine
from tilecore.infer import Plan
from tilecore.ir import (
    Assert,
    Buffer,
    Copy,
    CumSum,
    Fill,
    For,
    Gemm,
    If,
    Join,
    Parallel,
    Print,
    Reduce,
    Stmt,
    Store,
    While,
)
from tilecore.loops import (
    FIRST_TASK,
    Branch,
    Check,
    FewRows,
    Let,
    Loop,
    LoopProgram,
    LoopStmt,
    Memory,
    Mma,
    Once,
    Operand,
    PackTransposed,
    Put,
    Repeat,
    RoundRows,
    Say,
    Touch,
    VectorLoop,
    loop_statements,
    written,
)
from tilecore.operands import Lying, index_of, operands_in_place, operands_lying, source_index, stored_rows
from tilecore.rows import is_row_wise, lower_rows, put_of
from tilecore.scratch import drop_unread
from tilecore.sharing import share_copies
from tilecore.streams import Computed, computed_operands, whole_depth

TURN = 4  # rows of b that are unpacked together
ROWS_AHEAD = 16  # of those that are packed: as long as the third cache takes


@dataclass(frozen=True, slots=True)
class Kept:
    """A copy done once per value of `index` and kept while the fastest grid axis moves."""

    index: Expr
    count: Expr


@dataclass(frozen=True, slots=True)
class Lowering:
    """What every step needs: the plan, addresses, products' operands read in place, and copies that are kept."""

    plan: Plan
    addresses: Addresses
    in_place: dict[str, Operand]
    kept: dict[Copy, Kept]
    computed: dict[str, Computed]  # right operands that products of few rows compute as they go, by buffer
    lying: dict[str, Lying]  # right operands that products of few rows read where they lie, by buffer
    never_many: Collection[str]  # those of them that no product needs packed

    def live(self, axis: Axis, full: Expr) -> Expr:
        """How many elements of an axis the work covers."""
        return self.plan.extent(axis, full)

    def filled(self, axis: Axis, full: Expr) -> Expr:
        """How many elements of an axis a copy fills."""
        return self.plan.filled(axis, full)


def lower(plan: Plan) -> LoopProgram:
    """The loop program of a plan."""
    program = plan.program
    tensors = {
        tensor.name: Memory(tensor.name, tensor.dtype, _size(tensor.shape), kind, position)
        for kind, group in (("input", program.inputs), ("output", program.outputs))
        for position, tensor in enumerate(group)
    }
    plan = _resolved(plan, Addresses(plan, tensors, {}))
    addresses = Addresses(plan, tensors, {})
    in_place = operands_in_place(plan, addresses)
    lying = {name: one for name, one in operands_lying(plan, addresses).items() if _may_lie(one, plan, in_place)}
    never_many = [name for name, one in lying.items() if nonnegative(FEW_ROWS - _first_rows(one.gemm, plan))]
    kept = _kept_copies(plan.graph, (*in_place, *never_many))
    slots: dict[str, Slot] = {}
    for buffer in program.buffers:
        if buffer.name in in_place or buffer.name in never_many:
            continue
        size = slot_size(plan, buffer)
        copies = next((kept[c] for c in kept if c.dst.source == buffer), None)
        total = size * copies.count if copies else size
        shift = size * copies.index if copies else const(0)
        slots[buffer.name] = Slot(Memory(buffer.name, buffer.dtype, total, "scratch"), size, shift)
    addresses = replace(addresses, slots=slots)
    computed = computed_operands(plan, addresses, (*in_place, *lying))
    lowering = Lowering(plan, addresses, in_place, kept, computed, lying, never_many)
    body = tuple(_body(program.body, lowering))
    rounded = (part.memory for stmt in loop_statements(body) if isinstance(stmt, RoundRows) for part in stmt.made)
    turns = {memory.name: memory for memory in written(body) if memory.kind == "scratch"}  # rows in flight need fewer
    scratch = (turns.get(slot.memory.name, slot.memory) for slot in slots.values())
    memories = (*tensors.values(), *scratch, *dict.fromkeys(rounded))
    spans = any(isinstance(stmt, Loop) and FIRST_TASK in variables(stmt.start) for stmt in body)
    made = LoopProgram(program.name, program.grid, memories, body, plan.register_tile, spans=spans)
    return touch_ahead(share_copies(drop_unread(made)))


def _resolved(plan: Plan, addresses: Addresses) -> Plan:
    """The plan with extents that data says as loads of flat memory."""
    live, needed = ({i: addresses.resolve(count) for i, count in of.items()} for of in (plan.live, plan.needed))
    return replace(plan, live=live, needed=needed)


def _size(shape: tuple[Expr, ...]) -> Expr:
    size: Expr = const(1)
    for extent in shape:
        size = size * extent
    return size


def _body(body: tuple[Stmt, ...], lowering: Lowering) -> Iterator[LoopStmt]:
    """Statements in order, runs of row-wise ones together."""
    position = 0
    while position < len(body):
        run = 0
        while position + run < len(body) and is_row_wise(
            body[position + run], body[position : position + run], lowering.plan
        ):
            run += 1
        if run:
            yield from lower_rows(body[position : position + run], lowering.plan, lowering.addresses)
            position += run
        else:
            yield from _statement(body[position], lowering)
            position += 1


def _statement(stmt: Stmt, lowering: Lowering) -> Iterator[LoopStmt]:
    match stmt:
        case For():
            start, stop = (lowering.addresses.resolve(bound) for bound in (stmt.start, _stop(stmt)))
            if _stop(stmt) - stmt.start == const(1):
                yield Let(stmt.var, start)
                yield from _body(stmt.body, lowering)
            else:
                yield from _steps(stmt, start, stop, lowering)
        case While():
            body = tuple(_body(stmt.body, lowering))
            yield Repeat(lowering.addresses.resolve(stmt.condition), body, stmt.span)
        case Print():
            yield from _print(stmt, lowering)
        case Assert():
            yield Check(lowering.addresses.resolve(stmt.condition), stmt.message, stmt.span)
        case If():
            yield Branch(
                lowering.addresses.resolve(stmt.condition),
                tuple(_body(stmt.then, lowering)),
                tuple(_body(stmt.otherwise, lowering)),
            )
        case Gemm() if stmt.b.name in lowering.lying:
            yield from _lying_or_packed(stmt, lowering.lying[stmt.b.name], lowering)
        case Gemm() if stmt.b.name in lowering.computed:
            yield from _few_or_many(stmt, lowering.computed[stmt.b.name], lowering)
        case Gemm():
            yield _product(stmt, lowering)
        case Copy():
            yield from _copy(stmt, lowering)
        case Parallel():
            yield from _elementwise(stmt, lowering)
        case Fill():
            yield from _fill(stmt, lowering)
        case Store():
            yield put_of(stmt, lowering.addresses, {})
        case Join():
            raise ValueError(
                f"T.join of {stmt.buffer.name}: tasks of a split meet on a GPU; a CPU kernel has a split of 1"
            )
        case Reduce() | CumSum():
            raise ValueError(f"{stmt}: expand_reductions has not run")


def _print(stmt: Print, lowering: Lowering) -> Iterator[LoopStmt]:
    """One line per element of a buffer, or one with all the values."""
    if not isinstance(stmt.values, Buffer):
        yield Say(stmt.message, tuple(lowering.addresses.resolve(value) for value in stmt.values), stmt.span)
        return
    axes = tuple(live_var(f"{stmt.values.name}_{i}", extent) for i, extent in enumerate(stmt.values.shape))
    text = f"{stmt.message} {stmt.values.name}".strip()
    inner: LoopStmt = Say(text, (*axes, lowering.addresses.load(stmt.values, axes)), stmt.span)
    for axis in reversed(axes):
        inner = _loop(axis, (inner,))
    yield inner


def _stop(loop: For) -> Expr:
    assert loop.var.extent is not None
    return loop.var.extent


def _elementwise(stmt: Parallel, lowering: Lowering) -> Iterator[LoopStmt]:
    """Loops over all axes but one, vectors along that one."""
    at: dict[Expr, Expr] = {}
    live: dict[Var, Var] = {}
    for axis in stmt.axes:
        assert axis.extent is not None
        live[axis] = live_var(axis.name, lowering.live(axis, axis.extent))
        at[axis] = live[axis]
    vector = lowering.plan.vector_axis[stmt]
    puts = tuple(put_of(store, lowering.addresses, at) for store in stmt.body)
    inner: tuple[LoopStmt, ...] = puts
    if vector is not None:
        inner = (in_digits(_vector(live[vector], puts)),)
    for axis in reversed(stmt.axes):
        if axis != vector:
            inner = (_loop(live[axis], inner),)
    yield from inner


def _vector(var: Var, body: tuple[Put, ...]) -> VectorLoop:
    assert var.extent is not None
    return VectorLoop(var, var.extent, body)


def _loop(var: Var, body: tuple[LoopStmt, ...]) -> Loop:
    assert var.extent is not None
    return Loop(var, const(0), var.extent, body)


def _fill(stmt: Fill, lowering: Lowering) -> Iterator[LoopStmt]:
    """Every element of the buffer's live part, along its rows."""
    axes = tuple(
        live_var(f"{stmt.dst.name}_{i}", lowering.live((stmt.dst.name, i), extent))
        for i, extent in enumerate(stmt.dst.shape)
    )
    put = put_of(Store(stmt.dst, axes, stmt.value, stmt.span), lowering.addresses, {})
    yield _nest(axes, put)


def _nest(axes: tuple[Var, ...], put: Put) -> LoopStmt:
    inner: LoopStmt = in_digits(_vector(axes[-1], (put,)))
    for axis in reversed(axes[:-1]):
        inner = _loop(axis, (inner,))
    return inner


# ---- products


def _rows(gemm: Gemm, plan: Plan) -> Expr:
    return plan.extent((gemm.c.name, 0), gemm.c.shape[0])


def _product(gemm: Gemm, lowering: Lowering) -> Mma:
    return _product_with(gemm, _operand(gemm.b, lowering, swapped=False), lowering)


def _product_with(gemm: Gemm, b: Operand, lowering: Lowering) -> Mma:
    _, (_, columns) = gemm_axes(gemm)
    depth, _ = depth_axes(gemm)
    return Mma(
        _operand(gemm.a, lowering, swapped=gemm.transpose_a),
        b,
        _operand(gemm.c, lowering, swapped=False),
        _rows(gemm, lowering.plan),
        lowering.live(columns, gemm.c.shape[1]),
        lowering.live(depth, gemm.a.shape[depth[1]]),
        gemm.clear,
        lowering.plan.register_tile,
        gemm.span,
    )


def _first_rows(gemm: Gemm, plan: Plan) -> Expr:
    """The rows of the first task: as many as there are, up to a tile."""
    first: dict[Expr, Expr] = {axis: const(0) for axis in plan.program.grid}
    return substitute(_rows(gemm, plan), first)


def _may_lie(lying: Lying, plan: Plan, in_place: Mapping[str, Operand]) -> bool:
    """Whether few rows may meet a large right operand, which is to be packed, and the left one has the right strides.

    For more rows, what packing takes is less than what panels save; where rows are as many as columns or the depth,
    few of them have little to pack.
    """
    gemm, rows = lying.gemm, _first_rows(lying.gemm, plan)
    if gemm.b.name in in_place or gemm.c.dtype is not DType.F32 or nonnegative(rows - (FEW_ROWS + 1)):
        return False
    sizes = {part for i, extent in enumerate(gemm.b.shape) for part in walk(plan.extent((gemm.b.name, i), extent))}
    symbols = {part for part in sizes if isinstance(part, Sym)}
    if symbols and symbols <= set(walk(rows)):
        return False
    left = in_place.get(gemm.a.name)
    side_by_side = not gemm.transpose_a and (left is None or left.column == const(1))
    return side_by_side or lying.operand.column == const(1)


def _lying_or_packed(gemm: Gemm, lying: Lying, lowering: Lowering) -> Iterator[LoopStmt]:
    """Few rows read b where it lies; for more, it is packed first."""
    there = _product_with(gemm, lying.operand, lowering)
    few = FewRows(
        there.a, there.b, there.c, there.rows, there.columns, there.depth, gemm.clear, lying.rounded, gemm.span
    )
    if gemm.b.name in lowering.never_many:
        yield few
    else:
        condition = binary("le", _first_rows(gemm, lowering.plan), const(FEW_ROWS))
        yield Branch(condition, (few,), (*_filled_copy(lying.copy, lowering), _product(gemm, lowering)))


def _steps(loop: For, start: Expr, stop: Expr, lowering: Lowering) -> Iterator[LoopStmt]:
    """A loop; where it is over the depth of products whose right operands are computed, two forms of it."""
    gemms = [stmt for stmt in loop.body if isinstance(stmt, Gemm) and stmt.b.name in lowering.computed]
    products = {stmt: _product(stmt, lowering) for stmt in gemms}
    streams = whole_depth(loop, products, lowering.computed, lowering.plan, lowering.addresses)
    if streams:
        licences = [stmt.byte_block for stmt in loop.body if isinstance(stmt, Gemm)]
        rounded = in_bytes(streams, licences)
        if rounded:
            yield from rounded
            return
        lowering = replace(lowering, computed={})
    body = Loop(loop.var, start, stop, tuple(_body(loop.body, lowering)), 1, loop.span)
    yield Branch(binary("le", streams[0].rows, const(FEW_ROWS)), streams, (body,)) if streams else body


def _few_or_many(gemm: Gemm, computed: Computed, lowering: Lowering) -> Iterator[LoopStmt]:
    """Few rows use elements of b as they compute them; for more, b is computed into memory first.

    Where the left operand may be rounded to bytes, any number of rows uses the levels that b is made of.
    """
    product = _product(gemm, lowering)
    few = binary("le", product.rows, const(FEW_ROWS))
    stream = computed.stream(product, gemm)
    rounded = in_bytes((stream,), (gemm.byte_block,))
    if rounded:
        yield from rounded
    else:
        yield Branch(few, (stream,), (*_filled_copy(computed.copy, lowering), product))


def _operand(buffer: Buffer, lowering: Lowering, *, swapped: bool) -> Operand:
    if buffer.name in lowering.in_place:
        found = lowering.in_place[buffer.name]
        return replace(found, row=found.column, column=found.row) if swapped else found
    slot = lowering.addresses.slots[buffer.name]
    layout = lowering.plan.layouts[buffer.name]
    if layout.kind == "panels":
        pairs = buffer.dtype is DType.BF16
        return Operand(slot.memory, slot.shift, panel_size(lowering.plan, buffer), const(1), pairs)
    row, column = row_stride(buffer), const(1)
    return Operand(slot.memory, slot.shift, column if swapped else row, row if swapped else column)


# ---- copies


def _copy(copy: Copy, lowering: Lowering) -> Iterator[LoopStmt]:
    if isinstance(copy.dst.source, Buffer) and copy.dst.source.name in (
        *lowering.in_place,
        *lowering.computed,
        *lowering.lying,
    ):
        return
    yield from _filled_copy(copy, lowering)


def _filled_copy(copy: Copy, lowering: Lowering) -> Iterator[LoopStmt]:
    body = tuple(_copy_loops(copy, lowering))
    kept = lowering.kept.get(copy)
    if kept and isinstance(copy.dst.source, Buffer):
        yield Once(kept.index, kept.count, copy.dst.source.name, body)
    else:
        yield from body


def _copy_loops(copy: Copy, lowering: Lowering) -> Iterator[LoopStmt]:
    source, target = copy.src, copy.dst
    if isinstance(target.source, Buffer) and lowering.plan.layouts[target.source.name].kind == "panels":
        yield from _pack(copy, target.source, lowering)
        return
    walked = source if isinstance(source.source, Buffer) and not isinstance(target.source, Buffer) else target
    axes: list[Expr] = []
    loops: list[Var] = []
    for i, extent in enumerate(walked.shape):
        live = extent
        if isinstance(walked.source, Buffer) and walked.shape == walked.source.shape:
            live = lowering.filled((walked.source.name, i), extent)
        axis = live_var(f"{walked.source.name}_{i}", live)
        one = extent == const(1)
        axes.append(const(0) if one else axis)
        if not one:
            loops.append(axis)
    inner = tuple(axes)
    src_index = (
        tuple(o + a for o, a in zip(source.origin, inner, strict=True))
        if walked is source
        else index_of(source, target, inner)
    )
    dst_index = (
        tuple(o + a for o, a in zip(target.origin, inner, strict=True))
        if walked is target
        else index_of(target, source, inner)
    )
    assert not isinstance(source.source, Place)
    value = cast(Load(source.source, src_index), target.source.dtype)
    assert not isinstance(target.source, View)
    put = put_of(Store(target.source, dst_index, value, copy.span), lowering.addresses, {})
    yield _nest(tuple(loops), put) if loops else put


def _pack(copy: Copy, buffer: Buffer, lowering: Lowering) -> Iterator[LoopStmt]:
    """Fill packed panels, by 16-column strips of the source, or by transposing a source that is contiguous in depth."""
    layout = lowering.plan.layouts[buffer.name]
    columns = lowering.filled((buffer.name, layout.column), buffer.shape[layout.column])
    depth_extent = lowering.filled((buffer.name, 1 - layout.column), buffer.shape[1 - layout.column])
    slot = lowering.addresses.slots[buffer.name]
    size = panel_size(lowering.plan, buffer)
    transposed = _transposed_source(copy, buffer, lowering)
    if transposed:
        rounded = transposed.memory.dtype is DType.F32 and copy.src.source.dtype is DType.BF16
        yield PackTransposed(transposed, slot.memory, slot.shift, size, columns, depth_extent, rounded, copy.span)
        return
    panel = live_var("panel", (columns + (PANEL - 1)) // PANEL)
    lane = live_var("lane", binary("min", const(PANEL), columns - panel * PANEL))
    position = panel * PANEL + lane
    depth = live_var("depth", depth_extent)
    inner = (position, depth) if layout.column == 0 else (depth, position)
    assert isinstance(copy.src.source, View | Buffer)
    value = lowering.addresses.resolve(cast(Load(copy.src.source, source_index(copy, inner)), buffer.dtype))
    start = slot.shift + panel * size
    if buffer.dtype is DType.BF16:
        row, puts = _pairs(value, depth, lambda pair: (slot.memory, start + pair * (2 * PANEL) + lane * 2), copy)
    else:
        turns = live_var("turn", depth_extent // TURN)
        # what rows of b share, such as a byte that holds two of them, is loaded once
        several = binary("mod", depth_extent, const(TURN)) == const(0) and _shared(value, depth)
        row, places = (turns, [turns * TURN + place for place in range(TURN)]) if several else (depth, [depth])
        puts = [
            Put(slot.memory, start + place * PANEL + lane, substitute(value, {depth: place}), None, copy.span)
            for place in places
        ]
    ahead = tuple(_rows_ahead(value, depth, lane, row))
    loops = (row, panel) if ahead else (panel, row)  # a row's lines lie side by side
    yield _loop(loops[0], (_loop(loops[1], (*ahead, _vector(lane, tuple(puts)))),))


def _rows_ahead(value: Expr, depth: Var, lane: Var, row: Var) -> Iterator[Touch]:
    """Ask for the line of a row to come: rows of a model's tensors lie pages apart, where no prefetcher looks."""
    if row is depth and isinstance(value, Load) and isinstance(value.source, Memory) and value.source.kind == "input":
        offset = value.index[0]
        step, rest = split_affine(offset, lane)
        if step == const(1) and rest is not None and not loads(offset):
            yield Touch(value.source, substitute(rest, {depth: depth + ROWS_AHEAD}), False)


def _pairs(
    value: Expr, depth: Var, address: Callable[[Expr], tuple[Memory, Expr]], copy: Copy
) -> tuple[Var, list[Put]]:
    """Two rows at a time: the loop variable and what is stored at `address` of its pair."""
    assert depth.extent is not None
    pair = live_var("pair", (depth.extent + 1) // 2)
    even, odd = (substitute(value, {depth: pair * 2 + half}) for half in (0, 1))
    if binary("mod", depth.extent, const(2)) != const(0):
        # past an odd depth, 0 meets whatever stands beside the left operand's last element
        odd = select(binary("lt", pair * 2 + 1, depth.extent), odd, const(0, DType.BF16))
    memory, offset = address(pair)
    return pair, [Put(memory, offset, even, None, copy.span, odd=odd)]


def _shared(value: Expr, depth: Var) -> bool:
    """Whether what a row of b needs depends on its number modulo something."""
    return any(isinstance(part, Op) and part.name == "mod" and depth in variables(part) for part in walk(value))


def _transposed_source(copy: Copy, buffer: Buffer, lowering: Lowering) -> Operand | None:
    view = copy.src.source
    operand = stored_rows(copy, view, buffer, lowering.plan, lowering.addresses) if isinstance(view, View) else None
    if operand and lowering.plan.layouts[buffer.name].column == 1:
        operand = replace(operand, row=operand.column, column=operand.row)
    return operand if operand and operand.column == const(1) and operand.row != const(1) else None


def _kept_copies(graph: TileGraph, in_place: Collection[str]) -> dict[Copy, Kept]:
    """Copies from views that do not depend on the fastest grid axis, one slot per step of the loops they follow."""
    kept: dict[Copy, Kept] = {}
    program = graph.program
    if not program.grid or program.grid[0].extent == const(1):
        return kept
    writers: dict[str, int] = {}
    found: list[tuple[Copy, tuple[For, ...]]] = []

    def scan(body: tuple[Stmt, ...], loops: tuple[For, ...], *, conditional: bool) -> None:
        for stmt in body:
            match stmt:
                case For():
                    scan(stmt.body, (*loops, stmt), conditional=conditional)
                case While():
                    scan(stmt.body, loops, conditional=True)
                case If():
                    scan(stmt.then, loops, conditional=True)
                    scan(stmt.otherwise, loops, conditional=True)
                case Copy() if isinstance(stmt.dst.source, Buffer):
                    writers[stmt.dst.source.name] = writers.get(stmt.dst.source.name, 0) + 1
                    if isinstance(stmt.src.source, View) and not conditional:
                        found.append((stmt, loops))
                case _:
                    for buffer in buffers_of(stmt)[1]:
                        writers[buffer.name] = writers.get(buffer.name, 0) + 1

    scan(program.body, (), conditional=False)
    fastest = program.grid[0]
    for copy, loops in found:
        buffer = copy.dst.source
        assert isinstance(buffer, Buffer)
        used = frozenset[Var]().union(*(variables(position) for position in copy.src.origin))
        if any(isinstance(load.source, Buffer) for position in copy.src.origin for load in loads(position)):
            continue
        if writers[buffer.name] > 1 or buffer.name in in_place or fastest in used or copy.dst.shape != buffer.shape:
            continue
        if not read_within(graph, buffer, used):
            continue
        index: Expr = const(0)
        count: Expr = const(1)
        for loop in loops:
            if loop.var not in used:
                continue
            trips = _at_most(_stop(loop), frozenset({fastest}))
            if trips is None or variables(trips):
                break
            index, count = index * trips + loop.var, count * trips
        else:
            kept[copy] = Kept(index, count)
    return kept


def _at_most(stop: Expr, moving: frozenset[Var]) -> Expr | None:
    """An upper bound of `stop` without `moving` and without loads: sides of minima, in sums and quotients that grow."""
    if not (moving & variables(stop) or loads(stop)):
        return stop
    match stop:
        case Op(name="min"):
            return next((side for side in (_at_most(arg, moving) for arg in stop.args) if side is not None), None)
        case Op(name="max" | "add", args=(left, right)):
            sides = _at_most(left, moving), _at_most(right, moving)
            return None if sides[0] is None or sides[1] is None else binary(stop.name, sides[0], sides[1])
        case Op(name="floordiv", args=(value, Const() as divisor)):
            bound = _at_most(value, moving)
            return None if bound is None else binary("floordiv", bound, divisor)
        case Op(name="mul", args=(value, Const(value=factor))) if factor > 0:
            bound = _at_most(value, moving)
            return None if bound is None else binary("mul", bound, const(factor))
        case _:
            return None
