"""Row-wise statements: one loop over rows for a run of them, and inside it vector loops joined where they may be.

Comes in: consecutive `Parallel`, `Reduce` and `Fill` statements that walk the same axis class as their first axis and
touch only their own row of what the run writes. Goes out: one scalar loop over the live rows, or several with vectors
of rows between them (`row_phases.py`). Per row, a value stored by one vector loop and read at the same place by the
next is handed on in registers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tilecore.addresses import Addresses, conditions, conjunction, live_var
from tilecore.contract.expr import Expr, Load, Var, apply, binary, const, loads, substitute, variables
from tilecore.graph import buffers_of
from tilecore.infer import Plan
from tilecore.ir import Buffer, Fill, Parallel, Reduce, Stmt, Store, expressions
from tilecore.loops import Fold, Let, Loop, LoopStmt, Memory, Put, VectorLoop
from tilecore.row_phases import PHASE_ROWS, Phase, in_phases
from tilecore.rows_in_flight import in_flight
from tilecore.scratch import hand_on, substituted
from tilecore.span import Span

JOIN = {"sum": "add", "max": "max", "fmax": "max", "min": "min", "prod": "mul"}


def is_row_wise(stmt: Stmt, run: Sequence[Stmt], plan: Plan) -> bool:
    """Whether `stmt` can join the row loop of the statements `run` before it."""
    own = _row_class(stmt, plan)
    if own is None or any(own != _row_class(member, plan) for member in run[:1]):
        return False
    if any(_first_extent(stmt) != _first_extent(member) for member in run[:1]):  # a window into a larger tile
        return False
    together = (*run, stmt)
    written = {buffer.name for member in together for buffer in buffers_of(member)[1]}
    return all(_own_row_only(member, written) for member in together)


def _row_class(stmt: Stmt, plan: Plan) -> int | None:
    match stmt:
        case Parallel() if not stmt.axes[2:] and plan.vector_axis[stmt] is not None:
            if len(stmt.axes) == 2 and plan.vector_axis[stmt] != stmt.axes[1]:
                return None
            return plan.graph.classes[stmt.axes[0]]
        case Reduce() if len(stmt.src.shape) == 2 and len(stmt.dst.shape) == 1 and stmt.axis == 1:
            return plan.graph.classes[stmt.src.name, 0]
        case Fill() if len(stmt.dst.shape) <= 2:
            return plan.graph.classes[stmt.dst.name, 0]
        case _:
            return None


def _own_row_only(stmt: Stmt, written: set[str]) -> bool:
    """Every access to a buffer that the run writes is at the statement's own row."""
    if not isinstance(stmt, Parallel):
        return True
    row = stmt.axes[0]
    for store in stmt.body:
        accesses = [(load.source, load.index) for expr in expressions(store) for load in loads(expr)]
        accesses.append((store.target, store.index))  # type: ignore[arg-type]
        for source, index in accesses:
            if isinstance(source, Buffer) and source.name in written and (not index or index[0] != row):
                return False
    return True


def lower_rows(run: tuple[Stmt, ...], plan: Plan, addresses: Addresses) -> Iterator[LoopStmt]:
    """The loop over rows of a run; over one-dimensional statements alone, a vector loop along them."""
    first = run[0]
    own = _row_class(first, plan)
    assert own is not None
    row = live_var("row", plan.class_extent(own, _first_extent(first)))
    extent = row.extent
    assert extent is not None
    flat = all(
        (isinstance(stmt, Parallel) and len(stmt.axes) == 1) or (isinstance(stmt, Fill) and len(stmt.dst.shape) == 1)
        for stmt in run
    )
    if flat:
        loops = [
            VectorLoop(row, extent, (put,), not isinstance(stmt, Parallel) or _whole_rows(stmt, stmt.axes[0]))
            for stmt in run
            for put in _row_statement(stmt, row, plan, addresses)
            if isinstance(put, Put)
        ]
        yield from _joined(list(loops))
        return
    body = [part for number, stmt in enumerate(run) for part in _row_statement(stmt, row, plan, addresses, number)]
    body = _joined(body)
    phases = list(in_phases(body, row)) if _all_rows(run) else [Phase(tuple(body))]
    alone = run == plan.program.body and len(plan.program.grid) == 1 and len(phases) == 1
    flight = None
    if alone:
        block, task = _first_extent(first), plan.program.grid[0]
        flight = in_flight(body, row, block, task, span=first.span, finish=_finished)
    if flight is not None:
        yield flight
    elif len(phases) > 1:
        yield _blocks_of_rows(phases, row, first.span)
    else:
        yield from (_each_row(phase.body, row, const(0), extent, first.span) for phase in phases)


def _each_row(body: tuple[LoopStmt, ...], row: Var, start: Expr, stop: Expr, span: Span | None) -> Loop:
    return Loop(row, start, stop, _finished(body), 1, span)


def _finished(body: tuple[LoopStmt, ...]) -> tuple[LoopStmt, ...]:
    """The statements of one row, with what they hand on named."""
    return tuple(_named(hand_on(body)))


def _blocks_of_rows(phases: Sequence[Phase], row: Var, span: Span | None) -> Loop:
    """Phase after phase over a few rows at a time: what one leaves is in the first cache when the next one comes."""
    assert row.extent is not None
    block = Var("block")
    stop = binary("min", block + PHASE_ROWS, row.extent)
    beside = live_var("beside", stop - block)
    body: list[LoopStmt] = []
    for phase in phases:
        if phase.across:
            puts = (substituted(put, {row: block + beside}) for put in phase.body if isinstance(put, Put))
            body += _joined([VectorLoop(beside, stop - block, (put,), True) for put in puts])
        else:
            body.append(_each_row(phase.body, row, block, stop, span))
    return Loop(block, const(0), row.extent, tuple(body), PHASE_ROWS, span)


def _named(body: tuple[LoopStmt, ...]) -> Iterator[LoopStmt]:
    """`body` with names for what all columns of a vector loop read alike: no C compiler sees that its stores leave that
    alone."""
    for position, stmt in enumerate(body):
        if isinstance(stmt, VectorLoop):
            written = {part.memory for part in stmt.body if isinstance(part, Put)}
            shared = dict.fromkeys(
                load
                for part in stmt.body
                for value in _values(part)
                for load in loads(value)
                if isinstance(load.source, Memory) and load.source.kind == "scratch" and load.source not in written
                if stmt.var not in variables(load)
            )
            names: dict[Expr, Expr] = {}
            for number, load in enumerate(shared):
                assert isinstance(load.source, Memory)
                names[load] = name = Var(f"of_row{position}_{number}_{load.source.name}", load.dtype)
                yield Let(name, load)
            stmt = replace(stmt, body=tuple(substituted(part, names) for part in stmt.body))
        yield stmt


def _first_extent(stmt: Stmt) -> Expr:
    match stmt:
        case Parallel():
            extent = stmt.axes[0].extent
            assert extent is not None
            return extent
        case Reduce():
            return stmt.src.shape[0]
        case Fill():
            return stmt.dst.shape[0]
        case _:
            raise ValueError("not a row-wise statement")


def _row_statement(stmt: Stmt, row: Var, plan: Plan, addresses: Addresses, number: int = 0) -> Iterator[LoopStmt]:
    match stmt:
        case Parallel():
            yield from _parallel(stmt, row, plan, addresses)
        case Reduce():
            column = live_var(f"{stmt.src.name}_1", plan.extent((stmt.src.name, 1), stmt.src.shape[1]))
            total = Var(f"{stmt.dst.name}_{stmt.kind}_{number}", stmt.dst.dtype)
            assert column.extent is not None
            fold = Fold(stmt.kind, total, addresses.load(stmt.src, (row, column)), stmt.span)
            yield VectorLoop(column, column.extent, (fold,), True)
            value = total if stmt.clear else apply(JOIN[stmt.kind], addresses.load(stmt.dst, (row,)), total)
            yield Put(addresses.slots[stmt.dst.name].memory, addresses.offset(stmt.dst, (row,)), value, None, stmt.span)
        case Fill():
            yield from _fill(stmt, row, plan, addresses)
        case _:
            raise ValueError("not a row-wise statement")


def _fill(stmt: Fill, row: Var, plan: Plan, addresses: Addresses) -> Iterator[LoopStmt]:
    memory = addresses.slots[stmt.dst.name].memory
    if len(stmt.dst.shape) == 1:
        yield Put(memory, addresses.offset(stmt.dst, (row,)), stmt.value, None, stmt.span)
        return
    column = live_var(f"{stmt.dst.name}_1", plan.extent((stmt.dst.name, 1), stmt.dst.shape[1]))
    assert column.extent is not None
    put = Put(memory, addresses.offset(stmt.dst, (row, column)), stmt.value, None, stmt.span)
    yield VectorLoop(column, column.extent, (put,), True)


def _parallel(stmt: Parallel, row: Var, plan: Plan, addresses: Addresses) -> Iterator[LoopStmt]:
    at: dict[Expr, Expr] = {stmt.axes[0]: row}
    column: Var | None = None
    if len(stmt.axes) == 2:
        extent = stmt.axes[1].extent
        assert extent is not None
        column = live_var(stmt.axes[1].name, plan.extent(stmt.axes[1], extent))
        at[stmt.axes[1]] = column
    puts = tuple(put for store in stmt.body if not _keeps(put := put_of(store, addresses, at)))
    if not puts:
        return
    if column is None:
        yield from puts
    else:
        assert column.extent is not None
        yield VectorLoop(column, column.extent, puts, _whole_rows(stmt, stmt.axes[1]))


def _all_rows(run: Sequence[Stmt]) -> bool:
    """Whether what a run writes has no rows after those that it walks: vectors of rows reach into what follows them."""
    stores = (store for stmt in run if isinstance(stmt, Parallel) for store in stmt.body)
    written = (store.target for store in stores if isinstance(store.target, Buffer))
    return all(target.shape[0] == _first_extent(run[0]) for target in written)


def _keeps(put: Put) -> bool:
    """Whether the store puts back what stands there."""
    return put.value == Load(put.memory, (put.offset,)) and not put.update


def _whole_rows(stmt: Parallel, column: Var) -> bool:
    """Whether every store to a buffer runs along its rows from start to end, so that it may run into their padding."""
    return all(
        not isinstance(store.target, Buffer) or (store.index[-1] == column and store.target.shape[-1] == column.extent)
        for store in stmt.body
    )


def put_of(store: Store, addresses: Addresses, at: dict[Expr, Expr]) -> Put:
    """The store with its variables replaced by `at` and every address resolved."""
    index = tuple(substitute(position, at) for position in store.index)
    value = addresses.resolve(substitute(store.value, at))
    guard = None if store.guard is None else addresses.resolve(substitute(store.guard, at))
    if isinstance(store.target, Buffer):
        memory = addresses.slots[store.target.name].memory
        inside = conjunction(conditions(index, store.target.shape)) if guard is not None else None
        offset = addresses.offset(store.target, index)
    else:
        memory, offset, inside = addresses.place(store.target, index)
    guards = [test for test in (guard, None if inside is None else addresses.resolve(inside)) if test is not None]
    return Put(memory, addresses.resolve(offset), value, conjunction(guards), store.span, store.update)


def _joined(body: list[LoopStmt]) -> list[LoopStmt]:
    """Vector loops over the same extent become one, moving up past scalar statements that they do not depend on."""
    done: list[LoopStmt] = []
    for stmt in body:
        if isinstance(stmt, VectorLoop):
            position = _partner(done, stmt)
            earlier = done[position] if position is not None else None
            merged = _merge(earlier, stmt) if isinstance(earlier, VectorLoop) else None
            if merged and position is not None:
                done[position] = merged
                continue
        done.append(stmt)
    return done


def _partner(done: list[LoopStmt], loop: VectorLoop) -> int | None:
    """The vector loop before `loop` that it can move up to."""
    values = [value for part in loop.body for value in _values(part)]
    reads = {load.source for value in values for load in loads(value)}
    writes = {part.memory for part in loop.body if isinstance(part, Put)}
    names = {var for value in values for var in variables(value)}
    for position in reversed(range(len(done))):
        stmt = done[position]
        if isinstance(stmt, VectorLoop):
            return position
        if not isinstance(stmt, Put) or stmt.memory in reads | writes:
            return None
        loaded = {load.source for value in _values(stmt) for load in loads(value)}
        if loaded & writes or names & _totals(done[:position]):
            return None
    return None


def _totals(done: list[LoopStmt]) -> set[Var]:
    """The totals that vector loops of `done` compute: what uses one cannot move above its loop."""
    return {part.into for stmt in done if isinstance(stmt, VectorLoop) for part in stmt.body if isinstance(part, Fold)}


def _merge(first: VectorLoop, second: VectorLoop) -> VectorLoop | None:
    """One loop that does both per point; values that the first stores reach the second by name, not through memory."""
    if first.stop != second.stop or first.padded != second.padded:
        return None
    renamed = [substituted(part, {second.var: first.var}) for part in second.body]
    totals = {part.into for part in first.body if isinstance(part, Fold)}
    if any(variables(value) & totals for part in renamed for value in _values(part)):
        return None
    named: list[Let | Put | Fold] = []
    handed: dict[Expr, Expr] = {}
    written: set[Memory] = set()
    for part in first.body:
        if isinstance(part, Put):
            written.add(part.memory)
            if part.guard is None:
                value = part.value
                if not isinstance(value, Var):
                    name = Var(f"value{len(named)}_{part.memory.name}", value.dtype)
                    named.append(Let(name, value))
                    value = name
                handed[Load(part.memory, (part.offset,))] = value
                named.append(replace(part, value=value))
                continue
        named.append(part)
    body = [substituted(part, handed) for part in renamed]
    for part in body:
        if any(load.source in written for value in _values(part) for load in loads(value)):
            return None
        if isinstance(part, Put) and part.memory in written and Load(part.memory, (part.offset,)) not in handed:
            return None
        before = (load for other in named for value in _values(other) for load in loads(value))
        if isinstance(part, Put) and any(load.source == part.memory for load in before):
            return None
    return replace(first, body=(*named, *body))


def _values(part: Let | Put | Fold) -> tuple[Expr, ...]:
    """Every expression of a part, where it stores included."""
    if isinstance(part, Put):
        return (part.value, part.offset) if part.guard is None else (part.value, part.offset, part.guard)
    return (part.value,)
