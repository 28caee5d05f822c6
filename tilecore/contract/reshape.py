"""Regions of few rows, told in another way: the same results with the long axis where tiles have their rows.

Comes in: a spec. Goes out: an equal one, or None where there is no such form. Nothing but index maps changes.
"""

from dataclasses import replace

from tilecore.contract.expr import Const, Expr, Load, Op, Sym, Var, children, const, rewrite, substitute
from tilecore.contract.spec import AttentionSpec, ContractionSpec, Place, Result, Tensor, View, extent_of


def turned(spec: ContractionSpec) -> ContractionSpec | None:
    """Cᵀ = Bᵀ · Aᵀ: columns of B become rows of tiles, of which a card has 64 at a time, and rows of A columns.

    None for siblings, which share their left operand.
    """
    if spec.siblings:
        return None
    outputs: list[Result] = []
    for result in spec.outputs:
        g, m, n = result.place.axes
        outputs.append(replace(result, place=replace(result.place, axes=(g, n, m))))
    left, right = (View(view.name, (g, y, x), view.value) for view in (spec.b, spec.a) for g, x, y in (view.axes,))
    return replace(spec, a=left, b=right, outputs=tuple(outputs))


def heads_as_queries(spec: AttentionSpec) -> AttentionSpec | None:
    """With one query per head, the heads that share keys and values as the queries of one.

    None with several queries, where no heads share, and for what else is told by head and query.
    """
    _, h, q, _ = spec.score_axes
    if extent_of(q) != const(1) or spec.weight is not None or spec.reductions or spec.length is not None:
        return None
    group = _shared_by(spec)
    heads = extent_of(h)
    if group is None or not isinstance(heads, Const) or int(heads.value) % group:
        return None
    shared, member = Var("group", extent=const(int(heads.value) // group)), Var("member", extent=const(group))

    def expression(expr: Expr, head: Var, query: Var | None) -> Expr:
        moved: dict[Expr, Expr] = {head: shared * group + member}
        return substitute(expr, moved if query is None else moved | {query: const(0)})

    def queries(view: View) -> View:
        b, head, query, *rest = view.axes
        return View(view.name, (b, shared, member, *rest), expression(view.value, head, query))

    def keys(view: View) -> View:
        b, head, key, column = view.axes
        return View(view.name, (b, shared, key, column), expression(view.value, head, None))

    def result(old: Result) -> Result:
        b, head, query, last = old.place.axes
        index = tuple(expression(entry, head, query) for entry in old.place.index)
        place = Place(old.place.tensor, (b, shared, member, last), index)
        return Result(place, expression(old.value, head, query))

    b, _, _, k = spec.score_axes
    return replace(
        spec,
        q=queries(spec.q),
        k=keys(spec.k),
        v=keys(spec.v),
        score_axes=(b, shared, member, k),
        score=expression(spec.score, h, q),
        sink=None if spec.sink is None else queries(spec.sink),
        outputs=tuple(result(old) for old in spec.outputs),
    )


def single_query(spec: AttentionSpec) -> tuple[Sym, AttentionSpec] | None:
    """(the dim, the spec where it is 1) for a number of queries that is a dim known at run time only; None where it is
    not, or where the keys are as many.
    """
    dim = extent_of(spec.score_axes[2])
    if not isinstance(dim, Sym):
        return None
    one: dict[Expr, Expr] = {dim: const(1)}

    def tensor(old: Tensor) -> Tensor:
        return replace(old, shape=tuple(substitute(extent, one) for extent in old.shape))

    def expression(expr: Expr) -> Expr:
        return rewrite(expr, node)

    def node(old: Expr) -> Expr | None:
        match old:
            case Sym() if old == dim:
                return const(1)
            case Var() if old.extent is not None:
                return replace(old, extent=substitute(old.extent, one))
            case Load() if isinstance(old.source, Tensor):
                return Load(tensor(old.source), old.index, old.span)
            case _:
                return None

    def axis(old: Var) -> Var:
        found = expression(old)
        assert isinstance(found, Var)
        return found

    def view(old: View) -> View:
        return View(old.name, tuple(map(axis, old.axes)), expression(old.value))

    def result(old: Result) -> Result:
        place = old.place
        index = tuple(map(expression, place.index))
        return Result(Place(tensor(place.tensor), tuple(map(axis, place.axes)), index), expression(old.value))

    b, h, q, k = map(axis, spec.score_axes)
    if isinstance(extent_of(k), Const) and not isinstance(extent_of(spec.score_axes[3]), Const):
        return None
    return dim, replace(
        spec,
        inputs=tuple(map(tensor, spec.inputs)),
        q=view(spec.q),
        k=view(spec.k),
        v=view(spec.v),
        score_axes=(b, h, q, k),
        score=expression(spec.score),
        sink=None if spec.sink is None else view(spec.sink),
        outputs=tuple(map(result, spec.outputs)),
        weight=None if spec.weight is None else expression(spec.weight),
        reductions=tuple(replace(step, value=expression(step.value)) for step in spec.reductions),
        requires=tuple(map(expression, spec.requires)),
    )


def _shared_by(spec: AttentionSpec) -> int | None:
    """How many heads read the same keys and values: both depend on the head through its quotient by that alone, or not
    at all, and then every head reads the same.
    """
    found: set[int | None] = set()
    for view in (spec.k, spec.v):
        found |= _quotients(view.value, view.axes[1])
    heads = extent_of(spec.k.axes[1])
    if not found and isinstance(heads, Const):
        return int(heads.value) if heads.value != 1 else None
    divisor = found.pop() if len(found) == 1 else None
    return divisor if divisor is not None and divisor > 1 else None


def _quotients(expr: Expr, head: Var) -> set[int | None]:
    """Constants that `head` is divided by; None where it is used in any other way."""
    if expr == head:
        return {None}
    if isinstance(expr, Op) and expr.name == "floordiv" and expr.args[0] == head and isinstance(expr.args[1], Const):
        return {int(expr.args[1].value)}
    return {found for part in children(expr) for found in _quotients(part, head)}
