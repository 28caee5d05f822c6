"""The product of a block as C: the register tiles of `tile_cpu.h` stamped out, and the function that covers a block.

Full tiles first; the last rows go in two even tiles rather than a full one and a sliver; one or two rows alone take
wider tiles, because there each row of B is read for little work and many must be in flight.
"""

from collections.abc import Iterator, Mapping

from tilecore.contract.panel import PANEL
from tilecore.target import RegisterTile, Target

WIDE_ROWS = (1, 2)
Widths = Mapping[int, tuple[int, ...]]  # rows → vectors of the tiles to use, widest first


def product_text(tile: RegisterTile, target: Target) -> list[str]:
    """C lines that define `product(a, lda, step, b, panel, c, ldc, rows, columns, depth, clear)`."""
    small = target.smallest_vectors
    widths = {rows: tuple(dict.fromkeys((tile.vectors, small))) for rows in range(1, tile.rows + 1)}
    widths |= {rows: tuple(dict.fromkeys((_widest(rows, target), tile.vectors, small))) for rows in WIDE_ROWS}
    stamped = [f"TILE_MMA({rows}, {vectors})" for rows, group in widths.items() for vectors in group]
    return [*stamped, *_function(tile, widths, target)]


def _widest(rows: int, target: Target) -> int:
    step = target.smallest_vectors
    return max(v for v in range(step, 4 * PANEL // target.lanes + 1, step) if target.fits(RegisterTile(rows, v)))


def _function(tile: RegisterTile, widths: Widths, target: Target) -> Iterator[str]:
    yield "static void product(const float* restrict a, int64_t lda, int64_t step, const float* restrict b,"
    yield "                    int64_t panel, float* restrict c, int64_t ldc, int64_t rows, int64_t columns,"
    yield "                    int64_t depth, int clear) {"
    yield "    const int64_t panels = (columns + TILE_PANEL - 1) / TILE_PANEL;"
    yield "    int64_t p = 0;"
    for rows in WIDE_ROWS:
        yield f"    if (rows == {rows}) {{"
        for vectors in widths[rows]:
            count = vectors * target.lanes // PANEL
            yield f"        for (; p + {count} <= panels; p += {count}) TILE_CALL({rows}x{vectors}, 0);"
        yield "        return;"
        yield "    }"
    for vectors in widths[tile.rows]:
        count = vectors * target.lanes // PANEL
        yield f"    for (; p + {count} <= panels; p += {count}) {{"
        yield "        for (int64_t i = 0, r; i < rows; i += r) {"
        yield f"            r = TILE_ROWS(rows - i, {tile.rows});"
        yield "            switch (r) {"
        for rows in range(tile.rows, 0, -1):
            yield f"            case {rows}: TILE_CALL({rows}x{vectors}, i); break;"
        yield "            default: break;"
        yield "            }"
        yield "        }"
        yield "    }"
    yield "}"
