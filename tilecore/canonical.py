"""Names by position: specs that differ only in the names of their tensors become equal, and so share one kernel."""

from collections.abc import Mapping
from dataclasses import replace

from tilecore.contract.expr import Expr, Load, rewrite
from tilecore.contract.spec import (
    AttentionSpec,
    ContractionSpec,
    Result,
    RowSpec,
    ScanSpec,
    Spec,
    Tensor,
    View,
    outputs_of,
)


def canonical(spec: Spec, *, constants: bool = True) -> Spec:
    """`spec` with its inputs named x0, x1, … and its outputs y0, y1, …

    Without `constants`, nothing is known of any input when kernels are made: their layout is then the model's own.
    """
    names = {
        tensor: replace(tensor, name=f"x{i}", constant=tensor.constant and constants)
        for i, tensor in enumerate(spec.inputs)
    }
    places = {tensor: replace(tensor, name=f"y{i}") for i, tensor in enumerate(outputs_of(spec))}

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
    if isinstance(node, Load) and isinstance(node.source, Tensor):
        return Load(names[node.source], node.index, node.span)
    return None
