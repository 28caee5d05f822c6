"""A spec over other tensors: renamed, or of another type."""

from collections.abc import Mapping
from dataclasses import replace

from tilecore.contract.expr import Expr, Load, rewrite
from tilecore.contract.spec import AttentionSpec, ContractionSpec, Result, RowSpec, ScanSpec, Spec, Tensor, View


def with_tensors(spec: Spec, names: Mapping[Tensor, Tensor], places: Mapping[Tensor, Tensor]) -> Spec:
    """`spec` with other inputs (`names`, all of them, in their order) and other outputs (`places`, likewise)."""

    def expression(expr: Expr) -> Expr:
        return rewrite(expr, lambda node: _renamed(node, names))

    def view(old: View) -> View:
        return replace(old, value=expression(old.value))

    lookups = tuple(replace(lookup, position=expression(lookup.position)) for lookup in spec.lookups)
    spec = replace(spec, lookups=lookups)
    outputs = tuple(
        Result(
            replace(result.place, tensor=places[result.place.tensor], index=tuple(map(expression, result.place.index))),
            expression(result.value),
        )
        for result in spec.outputs
    )
    inputs = tuple(names.values())
    match spec:
        case AttentionSpec():
            sink = view(spec.sink) if spec.sink else None
            return replace(
                spec, inputs=inputs, q=view(spec.q), k=view(spec.k), v=view(spec.v), sink=sink,
                score=expression(spec.score), outputs=outputs,
                reductions=tuple(replace(step, value=expression(step.value)) for step in spec.reductions),
                weight=None if spec.weight is None else expression(spec.weight),
                length=None if spec.length is None else expression(spec.length),
            )  # fmt: skip
        case ContractionSpec():
            siblings = tuple(replace(product, b=view(product.b)) for product in spec.siblings)
            return replace(spec, inputs=inputs, a=view(spec.a), b=view(spec.b), outputs=outputs, siblings=siblings)
        case RowSpec():
            steps = tuple(replace(step, value=expression(step.value)) for step in spec.steps)
            return replace(spec, inputs=inputs, steps=steps, outputs=outputs)
        case ScanSpec():
            states = tuple(
                replace(state, initial=expression(state.initial), update=expression(state.update))
                for state in spec.states
            )
            totals, reads = (
                tuple(replace(total, value=expression(total.value)) for total in group)
                for group in (spec.totals, spec.reads)
            )
            return replace(spec, inputs=inputs, states=states, totals=totals, reads=reads, outputs=outputs)


def _renamed(node: Expr, names: Mapping[Tensor, Tensor]) -> Expr | None:
    if isinstance(node, Load) and isinstance(node.source, Tensor) and node.source in names:
        return Load(names[node.source], node.index, node.span)  # others have been renamed, under a cast that fell away
    return None
