"""How much work a spec is: operations and bytes, as expressions of its dims."""

from tilecore.contract.expr import Expr, Var, const
from tilecore.contract.spec import AttentionSpec, ContractionSpec, RowSpec, ScanSpec, Spec, Total, extent_of
from tilecore.emit_expr import operation_count

FLOPS_PER_NS = 50  # of one core, a middling fp32 rate: estimates of a call's length need no more
ELEMENTS_PER_NS = 2


def flops_of(spec: Spec) -> Expr:
    """Multiply-adds count two; pointwise work is not counted for attention and contractions."""
    match spec:
        case AttentionSpec():
            b, h, q, d = spec.q.shape
            keys, e = spec.v.shape[2], spec.v.shape[3]
            return b * h * q * keys * (d + e) * 2
        case ContractionSpec():
            g, m, k = spec.a.shape
            return g * m * k * spec.b.shape[2] * (2 * len(spec.products))
        case RowSpec():
            points = extent_of(spec.row) * extent_of(spec.column)
            programs = [step.value for step in spec.steps] + [result.value for result in spec.outputs]
            return points * (sum(operation_count(program) for program in programs) + len(programs))
        case ScanSpec():
            steps, queries = (_flops_of_totals(totals) for totals in (spec.totals, spec.reads))
            for state in spec.states:
                steps = steps + _points(state.axes) * (operation_count(state.update) + 1)
            return extent_of(spec.group) * (extent_of(spec.time) * steps + extent_of(spec.query) * queries)


def _flops_of_totals(totals: tuple[Total, ...]) -> Expr:
    flops: Expr = const(0)
    for total in totals:
        flops = flops + _points((*total.axes, total.over)) * (operation_count(total.value) + 1)
    return flops


def _points(axes: tuple[Var, ...]) -> Expr:
    points: Expr = const(1)
    for axis in axes:
        points = points * extent_of(axis)
    return points


def work_of(spec: Spec) -> Expr:
    """Nanoseconds of one core for a whole call, roughly: what a host needs to decide on threads."""
    if isinstance(spec, RowSpec | ScanSpec):
        return flops_of(spec) // ELEMENTS_PER_NS // 8 + const(0)
    return flops_of(spec) // FLOPS_PER_NS
