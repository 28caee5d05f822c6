"""Simplifies index arithmetic by what is known where an element exists: an axis that has an index is not empty.

Comes in: an integer or bool expression over index variables. Goes out: an expression that is equal to it for every
index inside the variables' extents; nothing else is assumed.
"""

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Op, Sym, Var, apply, cast, children, select, substitute, variables


def settled(expr: Expr) -> Expr:
    """`expr` with min(1, n) settled for an axis of n elements, and each side of a choice under its own condition."""
    extents = {axis: axis.extent for axis in variables(expr) if isinstance(axis.extent, Sym)}
    fewer = {dim: Sym(f"{dim.name}.rest") for dim in extents.values()}
    longer: dict[Expr, Expr] = {dim: rest + 1 for dim, rest in fewer.items()}
    inner: dict[Expr, Expr] = {axis: Var(axis.name, extent=longer[dim]) for axis, dim in extents.items()}
    outer: dict[Expr, Expr] = {new: old for old, new in inner.items()}
    outer |= {rest: dim - 1 for dim, rest in fewer.items()}
    return substitute(_by_case(substitute(expr, longer | inner)), outer)


def _by_case(expr: Expr) -> Expr:
    """Rebuilt top down; past `i < n` an index is written as n more than another, so that what follows from it shows."""
    match expr:
        case Op(name="select", args=(Op(name="lt", args=(Var() as axis, Const() as limit)) as test, yes, no)) if (
            axis.extent is not None
        ):
            later = Var(f"{axis.name}.later", extent=axis.extent - limit)
            past = _by_case(substitute(no, {axis: later + limit}))
            return select(test, _by_case(yes), substitute(past, {later: axis - limit}))
        case Op(name="cast", args=(value,)):
            return cast(_by_case(value), expr.dtype)
        case Op() if expr.dtype in (DType.I64, DType.BOOL) and children(expr):
            return apply(expr.name, *map(_by_case, expr.args))
        case _:
            return expr
