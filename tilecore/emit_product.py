"""The product of a block as C: the register tiles of `tile_cpu.h` stamped out, and the function that covers a block.

Full tiles first; the last rows go in two even tiles rather than a full one and a sliver. Rows that are all there are
take tiles of their own. Two rows take wider ones, because there each row of B is read for little work and many must be
in flight, as does one row; of floats one row takes narrow ones, with several sums a column. Up to twelve rows of floats
take narrower ones that hold all of them, because B then is fetched once, beside the work. The last rows of many take
such a tile, too.

Compiling that takes longer than the rest of a kernel, and it is the same for every kernel whose text does not ask for a
register tile of its own. Products of floats are therefore units that the kernels of a library share: these call them by
name, and linking adds what is called.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from tilecore.contract.dtype import DType
from tilecore.contract.expr import const
from tilecore.contract.panel import PANEL
from tilecore.infer import choose_register_tile, choose_tall_tiles, halves
from tilecore.loops import FewRows, Mma
from tilecore.target import RegisterTile, Target

WIDE_ROWS = (1, 2)
ONE_ROW_PANELS = 2  # side by side; as many as fit where weights come out of memory
FEW_ROWS = 4  # of floats in a tile that asks for its own rows of B: it does so little for each that fetching shows
Widths = Mapping[int, tuple[int, ...]]  # rows → vectors of the tiles to use, widest first


@dataclass(frozen=True, slots=True)
class ProductKind:
    """One kind of register tile: the C types of a, b and c in memory, the macro that stamps it and how it is called."""

    function: str
    types: tuple[str, str, str]
    stamp: str
    tile: str  # name of a stamped tile, before its shape
    one_row: str = ""  # the macro of tiles for one row alone, where they are others


@dataclass(frozen=True, slots=True)
class SharedUnit:
    """A translation unit that defines one function, for the kernels that call it."""

    function: str
    text: str


KINDS: dict[tuple[DType, DType, DType, bool], ProductKind] = {  # by the types of a, b and c in memory, and b's pairs
    (DType.F32, DType.F32, DType.F32, False): ProductKind(
        "product",
        ("float", "float", "float"),
        "TILE_MMA({rows}, {vectors}, mma_, f32, float, {own})",
        "mma_",
        "TILE_MMA_ONE({vectors}, mma_, f32, float)",
    ),
    **{
        (DType.F32, dtype, DType.F32, False): ProductKind(  # b is widened when it is read
            f"product_{dtype}",
            ("float", "uint16_t", "float"),
            f"TILE_MMA({{rows}}, {{vectors}}, mma_{dtype}_, {dtype}, uint16_t, {{own}})",
            f"mma_{dtype}_",
            f"TILE_MMA_ONE({{vectors}}, mma_{dtype}_, {dtype}, uint16_t)",
        )
        for dtype in (DType.F16, DType.BF16)
    },
    (DType.F32, DType.BF16, DType.F32, True): ProductKind(  # b is widened when it is read
        "product_pairs", ("float", "uint16_t", "float"), "TILE_MMA_PAIRS({rows}, {vectors})", "mma_pairs_"
    ),
    (DType.BF16, DType.BF16, DType.F32, True): ProductKind(
        "product_narrow", ("uint16_t", "uint16_t", "float"), "TILE_MMA_NARROW({rows}, {vectors}, {own})", "mma_narrow_"
    ),
    **{
        (DType.I16, dtype, DType.I32, dtype is not DType.I16): ProductKind(
            f"product_{dtype}",
            ("int16_t", element, "int32_t"),
            f"TILE_DOT({{rows}}, {{vectors}}, {dtype}, {element})",
            f"dot_{dtype}_",
        )
        for dtype, element in ((DType.I16, "int16_t"), (DType.I8, "int8_t"), (DType.U8, "uint8_t"))
    },
    **{
        (DType.U8, dtype, DType.I32, True): ProductKind(
            f"level_product_{dtype}",
            ("uint8_t", element, "int32_t"),
            f"TILE_BYTES({{rows}}, {{vectors}}, {dtype}, {element})",
            f"bytes_{dtype}_",
        )
        for dtype, element in ((DType.I8, "int8_t"), (DType.U8, "uint8_t"))
    },
}


BYTES = {"int8_t": "i8", "uint8_t": "u8"}  # right operands that some processors multiply by bytes, by C type


def kind_of(mma: Mma) -> ProductKind:
    """The kind of a product's register tile."""
    kind = KINDS[mma.a.memory.dtype, mma.b.memory.dtype, mma.c.memory.dtype, mma.b.pairs]
    return kind if mma.fused else replace(kind, function=f"{kind.function}_plain")


def in_tiles(kind: ProductKind) -> bool:
    """Whether a target with tile registers uses them for products of that kind."""
    return kind.types[:2] == ("uint16_t", "uint16_t")


def asks_ahead(kind: ProductKind, target: Target) -> bool:
    """Whether register tiles of that kind ask for the panels after theirs: such a product takes `Mma.among`, too."""
    return _can_ask(kind) and not (target.amx and in_tiles(kind))


def _can_ask(kind: ProductKind) -> bool:
    return kind.stamp.startswith(("TILE_MMA(", "TILE_MMA_NARROW("))


def product_function(kind: ProductKind, tile: RegisterTile, target: Target) -> str:
    """The C name of the product of that kind: the library's, if kernels share it, else the kernel's own."""
    if not asks_ahead(kind, target) or tile != choose_register_tile(target):
        return kind.function
    return f"tile_{kind.function}_{target.name.replace('-', '_')}"


FEW_LEFT = {"f32": "float", "bf16": "uint16_t"}  # C types of left operands of few rows, by how they are read
FEW_RIGHT = {"f32": "float", "f16": "uint16_t", "bf16": "uint16_t", "rounded": "float"}
FEW_ARGUMENTS = (
    "(const {a}* restrict a, int64_t lda, int64_t step, const {b}* restrict b, int64_t ldb,\n"
    "    float* restrict c, int64_t ldc, int64_t rows, int64_t columns, int64_t depth, int clear);"
)


def few_function(few: FewRows, target: Target) -> str:
    """The C name of a product of few rows: all are of the library, by form, types and instruction set."""
    right = "rounded" if few.rounded else few.b.memory.dtype
    form = "sum" if few.b.column == const(1) else "dot"
    return _few_name(form, str(few.a.memory.dtype), str(right), target)


def _few_name(form: str, left: str, right: str, target: Target) -> str:
    return f"tile_few_{form}_{left}_{right}_{target.name.replace('-', '_')}"


def few_declaration(few: FewRows, target: Target) -> str:
    """The C declaration of that function."""
    right = "rounded" if few.rounded else str(few.b.memory.dtype)
    arguments = FEW_ARGUMENTS.format(a=FEW_LEFT[str(few.a.memory.dtype)], b=FEW_RIGHT[right])
    return f"void {few_function(few, target)}{arguments}"


def _few_units(texts: Iterable[str], target: Target) -> Iterator[SharedUnit]:
    for form, (left, a), (right, b) in product(("dot", "sum"), FEW_LEFT.items(), FEW_RIGHT.items()):
        name = _few_name(form, left, right, target)
        if any(f"{name}(" in text for text in texts):
            head = f"/* Products of few rows for {target.name} that kernels share. */"
            stamp = f"TILE_FEW_{form.upper()}({name}, {left}, {a}, {right}, {b})"
            yield SharedUnit(name, f'{head}\n#include "tile_few.h"\n{stamp}\n')


def shared_units(texts: Collection[str], target: Target) -> tuple[SharedUnit, ...]:
    """The units with what is shared among kernels and called in `texts`."""
    tile = choose_register_tile(target)
    shared = {product_function(kind, tile, target): kind for kind in KINDS.values()}
    return tuple(
        SharedUnit(name, _unit_text(replace(kind, function=name), tile, target))
        for name, kind in shared.items()
        if name != kind.function and any(f"{name}(" in text for text in texts)
    ) + tuple(_few_units(texts, target))


def _unit_text(kind: ProductKind, tile: RegisterTile, target: Target) -> str:
    head = (f"/* Products for {target.name} that kernels share. */", '#include "tile_cpu.h"')
    return "\n".join((*head, *_product(kind, tile, target, linkage=""))) + "\n"


def product_text(kind: ProductKind, tile: RegisterTile, target: Target) -> list[str]:
    """C lines that give `product(a, lda, step, b, panel, c, ldc, rows, columns, depth, clear)` of that kind.

    Sums of integers have a second form for processors with an instruction for them, chosen when it runs.
    """
    function = product_function(kind, tile, target)
    if function != kind.function:
        a, b, c = kind.types
        return [
            f"void {function}(const {a}* restrict a, int64_t lda, int64_t step, const {b}* restrict b, int64_t panel,",
            f"    {c}* restrict c, int64_t ldc, int64_t rows, int64_t columns, int64_t depth, int clear,",
            "    int64_t first, int64_t all);",
        ]
    if kind.stamp.startswith("TILE_BYTES("):
        name = BYTES[kind.types[1]]
        bytes_ = replace(kind, function=f"product_{name}_bytes")
        return [*_product(bytes_, tile, target), f"TILE_LEVEL_PRODUCT({name}, {kind.types[1]})"]
    if not target.fused_dot or not kind.stamp.startswith("TILE_DOT(") or kind.function.endswith("_plain"):
        return _product(kind, tile, target)
    plain = replace(kind, function=f"{kind.function}_plain")
    fused = replace(
        kind,
        function=f"{kind.function}_fused",
        stamp=kind.stamp.replace("TILE_DOT(", "TILE_DOT_FUSED("),
        tile=kind.tile.replace("dot_", "fused_"),
    )
    own, few = list[str](), fused.function
    a, b, c = kind.types
    if b in BYTES:
        name = BYTES[b]
        stamp, stamped = kind.stamp.replace("TILE_DOT(", "TILE_BYTES("), kind.tile.replace("dot_", "bytes_")
        bytes_ = ProductKind(f"{kind.function}_bytes", ("uint8_t", b, c), stamp, stamped)
        own = [*_product(bytes_, tile, target), f"TILE_BYTE_PRODUCT_{name}"]
        few = f"rows > TILE_FEW_BYTE_ROWS ? byte_{kind.function} : {fused.function}"
    arguments = "a, lda, step, b, panel, c, ldc, rows, columns, depth, clear"
    return [
        *_product(plain, tile, target),
        *_product(fused, tile, target),
        *own,
        f"static void {kind.function}(const {a}* a, int64_t lda, int64_t step, const {b}* b, int64_t panel,",
        f"                    {c}* c, int64_t ldc, int64_t rows, int64_t columns, int64_t depth, int clear) {{",
        "    static int8_t known; /* 0: not asked yet */",
        f"    const int fused = TILE_ASKED(known, {target.fused_dot});",
        f"    (!fused ? {plain.function} : {few})({arguments});",
        "}",
    ]


def _product(kind: ProductKind, tile: RegisterTile, target: Target, *, linkage: str = "static ") -> list[str]:
    alone = {rows: _down(max(_widest(rows, target), tile.vectors), target) for rows in WIDE_ROWS}
    if kind.one_row:  # its columns have several sums each
        alone[1] = _down(_widest(1, target), target)
    if asks_ahead(kind, target) and tile == choose_register_tile(target):
        tall = choose_tall_tiles(target, again=_reads_again(kind))
        alone |= {narrow.rows: halves(narrow.vectors, target) for narrow in tall}
    widths = {rows: halves(tile.vectors, target) for rows in range(1, tile.rows + 1)} | alone
    stamped = [_stamp(kind, RegisterTile(rows, vectors), tile, target) for rows in widths for vectors in widths[rows]]
    if target.amx and in_tiles(kind):
        rows = replace(kind, function=f"{kind.function}_rows")
        return [
            *stamped,
            *_function(rows, tile, widths, alone, target, linkage),
            f"TILE_AMX_PRODUCT({kind.function}, {rows.function})",
        ]
    return [*stamped, *_function(kind, tile, widths, alone, target, linkage)]


def _reads_again(kind: ProductKind) -> bool:
    """Whether multiply-adds of that kind may take a vector of B out of memory, as it lies there."""
    return kind.types == ("float", "float", "float")


def _stamp(kind: ProductKind, tile: RegisterTile, full: RegisterTile, target: Target) -> str:
    if not target.fits(tile):
        return f"TILE_MMA_TIGHT({tile.rows}, {tile.vectors}, {kind.tile})"
    if kind.one_row and tile.rows == 1:
        return kind.one_row.format(vectors=tile.vectors)
    few = 0 if in_tiles(kind) else FEW_ROWS  # pairs of bf16: one row loses a tenth by asking
    own = int(tile.rows <= few or tile.rows > full.rows)
    return kind.stamp.format(rows=tile.rows, vectors=tile.vectors, own=own)


def _down(vectors: int, target: Target) -> tuple[int, ...]:
    """Widths for one or two rows: that one, two panels and one. Each column is a sum that waits for itself."""
    small = target.smallest_vectors
    return tuple(sorted({vectors, min(2 * small, vectors), small}, reverse=True))


def _widest(rows: int, target: Target) -> int:
    step = target.smallest_vectors
    return max(v for v in range(step, 4 * PANEL // target.lanes + 1, step) if target.fits(RegisterTile(rows, v)))


def _side_by_side(vectors: int, widths: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Where tiles of these widths begin that are so many vectors wide together, and how wide each is."""
    first = 0
    for wide in widths:
        while first + wide <= vectors:
            yield first, wide
            first += wide


def _function(
    kind: ProductKind, tile: RegisterTile, widths: Widths, alone: Widths, target: Target, linkage: str
) -> Iterator[str]:
    a, b, c = kind.types
    ahead = asks_ahead(kind, target)
    whole = "TILE_CALL_ALONE" if _can_ask(kind) else "TILE_CALL"
    yield f"{linkage}void {kind.function}(const {a}* restrict a, int64_t lda, int64_t step, const {b}* restrict b,"
    yield f"                    int64_t panel, {c}* restrict c, int64_t ldc, int64_t rows, int64_t columns,"
    yield f"                    int64_t depth, int clear{', int64_t first, int64_t all' if ahead else ''}) {{"
    yield "    const int64_t panels = (columns + TILE_PANEL - 1) / TILE_PANEL;"
    yield "    int64_t p = 0;"
    for rows, group in alone.items():
        yield f"    if (rows == {rows}) {{"
        for vectors in group:
            count = vectors * target.lanes // PANEL
            asked = "tile_from_memory && " if kind.one_row and rows == 1 and count > ONE_ROW_PANELS else ""
            call = f"{whole}({kind.tile}{rows}x{vectors}, 0, p)"
            yield f"        for (; {asked}p + {count} <= panels; p += {count}) {call};"
        yield "        return;"
        yield "    }"
    for vectors in widths[tile.rows]:
        count = vectors * target.lanes // PANEL
        yield f"    for (; p + {count} <= panels; p += {count}) {{"
        if ahead:
            yield f"        TILE_SHARE({tile.rows}, {count});"
        yield "        for (int64_t i = 0, r; i < rows; i += r) {"
        yield f"            r = TILE_ROWS(rows - i, {tile.rows}, {max(widths)});"
        yield "            switch (r) {"
        for rows in sorted((rows for rows in widths if rows < 2 * tile.rows), reverse=True):
            call = "TILE_CALL_AHEAD" if ahead and rows <= tile.rows else whole
            calls = (
                f"{call}({kind.tile}{rows}x{wide}, i, p + {first * target.lanes // PANEL});"
                for first, wide in _side_by_side(vectors, widths[rows])
            )
            yield f"            case {rows}: {' '.join(calls)} break;"
        yield "            default: break;"
        yield "            }"
        yield "        }"
        yield "    }"
    yield "}"
