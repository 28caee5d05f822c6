"""Constant right-hand matrices as packed panels: done once at optimise time, so that a kernel reads them in place."""

from dataclasses import replace

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, const, loads
from tilecore.contract.panel import PANEL
from tilecore.contract.spec import ContractionSpec, Spec, Tensor, View


def pack_constants(spec: Spec) -> tuple[Spec, tuple[int, ...]]:
    """(`spec` with its constant B read from panels, positions of the inputs that are panels now); unchanged otherwise.

    B must be one load of a constant f32 matrix that no other program reads, in an order that uses every element once.
    """
    if not isinstance(spec, ContractionSpec):
        return spec, ()
    value = spec.b.value
    if not isinstance(value, Load) or not isinstance(value.source, Tensor) or not packable(spec.b):
        return spec, ()
    tensor = value.source
    others = [spec.a.value, *(result.value for result in spec.outputs)]
    if any(load.source == tensor for other in others for load in loads(other)):
        return spec, ()
    _, k, n = spec.b.axes
    depth, columns = spec.b.shape[1], spec.b.shape[2]
    panels = Tensor(tensor.name, tensor.dtype, ((columns + (PANEL - 1)) // PANEL, depth, const(PANEL)), True)
    view = replace(spec.b, value=Load(panels, (n // PANEL, k, n % PANEL)))
    position = spec.inputs.index(tensor)
    inputs = (*spec.inputs[:position], panels, *spec.inputs[position + 1 :])
    return replace(spec, inputs=inputs, b=view), (position,)


def packable(view: View) -> bool:
    """Whether a B view is a constant f32 matrix that `contract.panel.pack` can hold."""
    value = view.value
    if not isinstance(value, Load) or not isinstance(value.source, Tensor):
        return False
    tensor, (_, k, n) = value.source, view.axes
    fixed = all(isinstance(extent, Const) for extent in (*tensor.shape, view.shape[1], view.shape[2]))
    if not (tensor.constant and tensor.dtype is DType.F32 and fixed and view.shape[0] == const(1)):
        return False
    used: list[Expr] = [position for position in value.index if position != const(0)]
    return sorted(map(str, used)) == sorted((k.name, n.name))
