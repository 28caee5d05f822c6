"""Elements of views as elements of tensors: a load outside of a view is 0, and reads no memory.

Comes in: a program. Goes out: the same one, whose parallel loops load tensors and tiles alone. Conditions are left out
where they are proved.
"""

from dataclasses import replace
from functools import reduce

from tilecore.contract.expr import Expr, Load, apply, binary, const, nonnegative, rewrite, substitute
from tilecore.contract.spec import Tensor, View
from tilecore.ir import Parallel, Program, Stmt, with_bodies


def inline_views(program: Program) -> Program:
    """`program` without loads of views in its parallel loops."""
    return replace(program, body=_block(program.body))


def in_bounds(load: Load) -> bool:
    """Whether a load of a tensor is proved to be inside of it."""
    assert isinstance(load.source, Tensor)
    pairs = zip(load.index, load.source.shape, strict=True)
    return all(nonnegative(position) and nonnegative(extent - position - 1) for position, extent in pairs)


def _block(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    return tuple(_statement(stmt) for stmt in body)


def _statement(stmt: Stmt) -> Stmt:
    if not isinstance(stmt, Parallel):
        return with_bodies(stmt, _block)
    stores = tuple(replace(store, value=rewrite(store.value, _element)) for store in stmt.body)
    return replace(stmt, body=stores)


def _element(node: Expr) -> Expr | None:
    if not (isinstance(node, Load) and isinstance(node.source, View)):
        return None
    view = node.source
    needed: list[Expr] = []
    index: list[Expr] = []
    for position, extent in zip(node.index, view.shape, strict=True):
        if not nonnegative(position):
            needed.append(binary("ge", position, const(0)))
            position = binary("max", position, const(0))
        if not nonnegative(extent - position - 1):
            needed.append(binary("lt", position, extent))
            position = binary("min", position, extent - 1)
        index.append(position)
    value = substitute(view.value, dict(zip(view.axes, index, strict=True)))
    if not needed:
        return value
    return apply("select", reduce(lambda one, other: binary("and", one, other), needed), value, const(0, value.dtype))
