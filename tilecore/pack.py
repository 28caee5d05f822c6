"""Constant right-hand matrices as packed panels: done once at optimise time, so that a kernel reads them in place."""

from dataclasses import replace

from tilecore.contract.expr import Load, const, loads, substitute
from tilecore.contract.panel import PANEL, rows_of
from tilecore.contract.spec import ContractionSpec, Spec, Tensor


def pack_constants(spec: Spec) -> tuple[Spec, tuple[int, ...]]:
    """(`spec` with every constant that B is made of read from panels, positions of the inputs that are panels now).

    That is the matrix itself, of any type, and the scales and zero points that belong to blocks of its rows, where no
    other program reads them; what B makes of the elements stays as it is.
    """
    if not isinstance(spec, ContractionSpec):
        return spec, ()
    inputs, rights, positions = list(spec.inputs), [product.b for product in spec.products], list[int]()
    programs = [view.value for view in (spec.a, *rights)] + [result.value for result in spec.outputs]
    readers = [load.source for program in programs for load in loads(program)]
    for number, right in enumerate(rights):
        value = right.value
        for load in loads(right.value):
            rows = rows_of(load, right)
            if rows is None or rows.count == 1 or readers.count(load.source) > 1:
                continue
            _, _, n = right.axes
            count = (right.shape[2] + (PANEL - 1)) // PANEL
            panels = Tensor(load.source.name, load.dtype, (count, const(rows.count), const(PANEL)), True)
            value = substitute(value, {load: Load(panels, (n // PANEL, rows.at, n % PANEL))})
            position = [tensor.name for tensor in spec.inputs].index(load.source.name)
            inputs[position] = panels
            positions.append(position)
        rights[number] = replace(right, value=value)
    siblings = tuple(replace(old, b=new) for old, new in zip(spec.siblings, rights[1:], strict=True))
    return replace(spec, inputs=tuple(inputs), b=rights[0], siblings=siblings), tuple(sorted(positions))
