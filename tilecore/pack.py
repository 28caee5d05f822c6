"""Constant right-hand matrices as packed panels: done once at optimise time, so that a kernel reads them in place."""

from collections.abc import Mapping
from dataclasses import replace

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Source, binary, cast, const, loads, select, substitute
from tilecore.contract.panel import PANEL, Rows, group_of, groups_of, has_sums, packed_level, rows_of, stored_rows
from tilecore.contract.spec import ContractionSpec, Spec, Tensor, View


def pack_constants(spec: Spec) -> tuple[Spec, tuple[int, ...]]:
    """(`spec` with every constant that B is made of read from panels, positions of the inputs that are panels now).

    That is the matrix itself, of any type, and the scales and zero points that belong to blocks of its rows, where only
    right operands read them; what B makes of the elements stays as it is. Several products may read columns of one
    matrix.
    """
    if not isinstance(spec, ContractionSpec):
        return spec, ()
    names = [tensor.name for tensor in spec.inputs]
    inputs, rights, positions = list(spec.inputs), [product.b for product in spec.products], set[int]()
    places = _packable(spec)
    for number, right in enumerate(rights):
        value = right.value
        for load in loads(right.value):
            rows = places.get((number, load))
            if rows is None:
                continue
            group = group_of(load, right, spec.byte_block)
            panels = _panels(load, rows, group, has_sums(load, right))
            value = substitute(value, {load: _element(load, panels, rows, right, group)})
            position = names.index(load.source.name)
            inputs[position] = panels
            positions.add(position)
        rights[number] = replace(right, value=value)
    siblings = tuple(replace(old, b=new) for old, new in zip(spec.siblings, rights[1:], strict=True))
    return replace(spec, inputs=tuple(inputs), b=rights[0], siblings=siblings), tuple(sorted(positions))


def _packable(spec: ContractionSpec) -> Mapping[tuple[int, Load], Rows]:
    """By product and load, how constants are read that can be panels: for all their readers in the same way."""
    programs = [spec.a.value, *(result.value for result in spec.outputs)]
    other = {load.source for program in programs for load in loads(program)}
    forms: dict[Source, list[tuple[Rows, int] | None]] = {}
    found: dict[tuple[int, Load], Rows] = {}
    for number, product in enumerate(spec.products):
        for load in loads(product.b.value):
            rows = rows_of(load, product.b)
            if rows is None or load.source in other or (rows.count == 1 and load.dtype.bits >= 8):
                forms.setdefault(load.source, []).append(None)
                continue
            group = group_of(load, product.b, spec.byte_block)
            forms.setdefault(load.source, []).append((replace(rows, at=const(0), start=0), group))
            found[number, load] = rows
    same = {source for source, seen in forms.items() if None not in seen and len(set(seen)) == 1}
    return {key: rows for key, rows in found.items() if key[1].source in same}


def _panels(load: Load, rows: Rows, group: int, sums: bool) -> Tensor:
    """The tensor of panels that a constant becomes."""
    bits, count = load.dtype.bits, const(-(-rows.columns // PANEL))
    depth = const(groups_of(stored_rows(rows.count, bits), group, sums))
    shape = (count, depth, const(PANEL)) if group == 1 else (count, depth, const(PANEL), const(group))
    return Tensor(load.source.name, load.dtype if bits >= 8 else DType.U8, shape, True)


def _element(load: Load, panels: Tensor, rows: Rows, view: View, group: int) -> Expr:
    """What `load` reads, from panels: the element itself, or its bits of a byte."""
    bits, n = load.dtype.bits, view.axes[2]
    panel = n // PANEL + rows.start // PANEL
    if group > 1:
        return Load(panels, (panel, rows.at // group, n % PANEL, rows.at % group))
    if bits >= 8:
        return Load(panels, (panel, rows.at, n % PANEL))
    level = packed_level(Load(panels, (panel, rows.at // (8 // bits), n % PANEL)), rows.at, bits)
    if load.dtype.range[0] < 0:
        level = select(binary("ge", level, const(1 << (bits - 1), DType.I32)), level - (1 << bits), level)
    return cast(level, DType.I8)
