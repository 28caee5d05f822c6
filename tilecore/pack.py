"""Constant right-hand matrices as packed panels: done once at optimise time, so that a kernel reads them in place."""

from dataclasses import replace

from tilecore.contract.expr import Const, Load, const, loads, substitute
from tilecore.contract.panel import PANEL
from tilecore.contract.spec import ContractionSpec, Spec, Tensor, View


def pack_constants(spec: Spec) -> tuple[Spec, tuple[int, ...]]:
    """(`spec` with its constant B read from panels, positions of the inputs that are panels now); unchanged otherwise.

    B must read one constant matrix, of any type, that no other program reads, in an order that uses every element once;
    what it makes of the element (a zero point subtracted, a scale) stays as it is.
    """
    if not isinstance(spec, ContractionSpec):
        return spec, ()
    load = packable(spec.b)
    if load is None or not isinstance(load.source, Tensor):
        return spec, ()
    tensor = load.source
    others = [spec.a.value, *(result.value for result in spec.outputs)]
    if sum(load.source == tensor for load in loads(spec.b.value)) > 1 or any(
        load.source == tensor for other in others for load in loads(other)
    ):
        return spec, ()
    _, k, n = spec.b.axes
    depth, columns = spec.b.shape[1], spec.b.shape[2]
    panels = Tensor(tensor.name, tensor.dtype, ((columns + (PANEL - 1)) // PANEL, depth, const(PANEL)), True)
    view = replace(spec.b, value=substitute(spec.b.value, {load: Load(panels, (n // PANEL, k, n % PANEL))}))
    position = spec.inputs.index(tensor)
    inputs = (*spec.inputs[:position], panels, *spec.inputs[position + 1 :])
    return replace(spec, inputs=inputs, b=view), (position,)


def packable(view: View) -> Load | None:
    """The load in a B view of the one constant matrix that `contract.panel.pack` can hold; None without one."""
    _, k, n = view.axes
    fixed = all(isinstance(extent, Const) for extent in view.shape[1:]) and view.shape[0] == const(1)
    whole = [
        load
        for load in loads(view.value)
        if isinstance(load.source, Tensor)
        and load.source.constant
        and all(isinstance(dim, Const) for dim in load.source.shape)
        and sorted(str(position) for position in load.index if position != const(0)) == sorted((k.name, n.name))
    ]
    return whole[0] if fixed and len(whole) == 1 else None
