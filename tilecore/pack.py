"""Constant right-hand matrices as packed panels: done once at optimise time, so that a kernel reads them in place."""

from dataclasses import replace

from tilecore.contract.expr import Const, Load, const, loads, substitute
from tilecore.contract.panel import PANEL
from tilecore.contract.spec import ContractionSpec, Spec, Tensor, View


def pack_constants(spec: Spec) -> tuple[Spec, tuple[int, ...]]:
    """(`spec` with every constant B read from panels, positions of the inputs that are panels now).

    B must read one constant matrix, of any type, that no other program reads, in an order that uses every element once;
    what it makes of the element (a zero point subtracted, a scale) stays as it is.
    """
    if not isinstance(spec, ContractionSpec):
        return spec, ()
    inputs, rights, positions = list(spec.inputs), [product.b for product in spec.products], list[int]()
    for number, right in enumerate(rights):
        load = packable(right)
        if load is None or not isinstance(load.source, Tensor):
            continue
        tensor = load.source
        programs = [view.value for view in (spec.a, *rights)] + [result.value for result in spec.outputs]
        if sum(other.source == tensor for program in programs for other in loads(program)) > 1:
            continue
        _, k, n = right.axes
        depth, columns = right.shape[1], right.shape[2]
        panels = Tensor(tensor.name, tensor.dtype, ((columns + (PANEL - 1)) // PANEL, depth, const(PANEL)), True)
        value = substitute(right.value, {load: Load(panels, (n // PANEL, k, n % PANEL))})
        rights[number] = replace(right, value=value)
        position = spec.inputs.index(tensor)
        inputs[position] = panels
        positions.append(position)
    siblings = tuple(replace(old, b=new) for old, new in zip(spec.siblings, rights[1:], strict=True))
    return replace(spec, inputs=tuple(inputs), b=rights[0], siblings=siblings), tuple(positions)


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
