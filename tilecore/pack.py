"""Constant right-hand matrices as packed panels: done once at optimise time, so that a kernel reads them in place."""

from dataclasses import replace

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, binary, cast, const, loads, select, substitute
from tilecore.contract.panel import PANEL, Rows, in_pairs, packed_level, rows_of, stored_rows
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
            bits = load.dtype.bits
            if rows is None or (rows.count == 1 and bits >= 8) or readers.count(load.source) > 1:
                continue
            kind = load.dtype if bits >= 8 else DType.U8
            count = (right.shape[2] + (PANEL - 1)) // PANEL
            if in_pairs(right):
                _, k, n = right.axes
                panels = Tensor(
                    load.source.name, kind, (count, const(-(-rows.count // 2)), const(PANEL), const(2)), True
                )
                value = substitute(value, {load: Load(panels, (n // PANEL, k // 2, n % PANEL, k % 2))})
            else:
                depth = const(stored_rows(rows.count, bits))
                panels = Tensor(load.source.name, kind, (count, depth, const(PANEL)), True)
                value = substitute(value, {load: _element(load, panels, rows, right.axes[2])})
            position = [tensor.name for tensor in spec.inputs].index(load.source.name)
            inputs[position] = panels
            positions.append(position)
        rights[number] = replace(right, value=value)
    siblings = tuple(replace(old, b=new) for old, new in zip(spec.siblings, rights[1:], strict=True))
    return replace(spec, inputs=tuple(inputs), b=rights[0], siblings=siblings), tuple(sorted(positions))


def _element(load: Load, panels: Tensor, rows: Rows, n: Expr) -> Expr:
    """What `load` reads, from panels: the element itself, or its bits of a byte."""
    bits = load.dtype.bits
    if bits >= 8:
        return Load(panels, (n // PANEL, rows.at, n % PANEL))
    level = packed_level(Load(panels, (n // PANEL, rows.at // (8 // bits), n % PANEL)), rows.at, bits)
    if load.dtype.range[0] < 0:
        level = select(binary("ge", level, const(1 << (bits - 1), DType.I32)), level - (1 << bits), level)
    return cast(level, DType.I8)
