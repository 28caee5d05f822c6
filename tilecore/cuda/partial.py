"""Row sums that the threads of a row keep apart until a loop ends: one exchange then, in place of one per iteration.

Comes in: a loop. Goes out: the names of row values that are only scaled by other row values and added to in it, so
that the sum over threads may be taken of the parts just as well.
"""

from tilecore.contract.expr import Expr, Load, Op, loads
from tilecore.graph import buffers_of
from tilecore.ir import Buffer, For, Parallel, Reduce, Stmt, Store


def partial_sums(loop: For, statistics: tuple[str, ...]) -> tuple[str, ...]:
    """Row values of `statistics` whose parts may stay apart in `loop`."""
    added = {stmt.dst for stmt in loop.body if isinstance(stmt, Reduce) and stmt.kind == "sum" and not stmt.clear}
    return tuple(
        buffer.name
        for buffer in sorted(added, key=lambda buffer: buffer.name)
        if buffer.name in statistics and all(_keeps_apart(stmt, buffer) for stmt in loop.body)
    )


def _keeps_apart(stmt: Stmt, buffer: Buffer) -> bool:
    match stmt:
        case Reduce(dst=dst) if dst == buffer:
            return stmt.kind == "sum" and not stmt.clear and stmt.src != buffer
        case Parallel():
            return all(_scales(store, buffer) for store in stmt.body)
        case For():
            return False
        case _:
            return all(buffer not in side for side in buffers_of(stmt))


def _scales(store: Store, buffer: Buffer) -> bool:
    """Whether a store leaves `buffer` alone or multiplies it by something else of its row."""
    if store.target != buffer:
        return all(load.source != buffer for load in loads(store.value))
    match store.value:
        case Op(name="mul", args=(Load() as first, Load() as second)):
            return _is(first, store) != _is(second, store)
        case _:
            return False


def _is(value: Expr, store: Store) -> bool:
    return isinstance(value, Load) and value.source == store.target and value.index == store.index
