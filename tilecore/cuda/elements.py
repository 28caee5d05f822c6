"""Elements of tiles that tensor copies brought, in the registers of the threads whose fragments stand beside them.

A tile of two axes is fetched by matrix loads, which give the layout of a fragment; a line gives every thread the
elements of its rows, or of its columns.
"""

from collections.abc import Callable

from tilecore.contract.expr import loads
from tilecore.cuda.errors import CudaError
from tilecore.cuda.roles import Roles, Staged, extents
from tilecore.ir import Buffer, Parallel


def staged_element(tile: Staged, *, by_column: bool) -> str:
    """Element x of a fragment's thread, after `fetched_elements`."""
    name, dtype = tile.buffer.name, tile.buffer.dtype
    if not tile.line:
        return f"element_{dtype}({name}_at, x)"
    index = "(x >> 2) * 2 + (x & 1)" if by_column else "x >> 1 & 1"
    return f"{name}_{'columns' if by_column else 'rows'}[{index}]"


def fetched_elements(stmt: Parallel, roles: Roles, where: tuple[str, str], slot: Callable[[Buffer], str]) -> list[str]:
    """What a parallel loop reads of staged tiles, fetched before it. `where` is a thread's row and column of element x,
    `slot` that of a buffer's ring.
    """
    found = dict.fromkeys(
        (load.source.name, len(load.index) == 1 and load.index[0] in stmt.axes[1:])
        for store in stmt.body for load in loads(store.value)
        if isinstance(load.source, Buffer) and load.source.name in roles.staged
    )  # fmt: skip
    lines: list[str] = []
    for name, by_column in found:
        tile = roles.staged[name]
        at = f"tile_{name} + {slot(tile.buffer)} * {tile.bytes}"
        if tile.line:
            lines += _line(stmt, tile, at, where[by_column], by_column)
        else:
            lines += _matrix(stmt, roles, tile, at)
    return lines


def _line(stmt: Parallel, tile: Staged, at: str, position: str, by_column: bool) -> list[str]:
    """One element per row half, or two neighbours per group of 8 columns."""
    name, dtype = tile.buffer.name, tile.buffer.dtype
    if by_column:
        pairs = extents(tile.buffer)[0] // 8
        return [
            f"float {name}_columns[{2 * pairs}];",
            f"TILE_UNROLL for (int y = 0; y < {pairs}; y++) {{ const int x = 4 * y;",
            f"  line_pair_{dtype}({name}_columns + 2 * y, {at}, {position});",
            "}",
        ]
    return [
        f"float {name}_rows[2];",
        "TILE_UNROLL for (int y = 0; y < 2; y++) { const int x = 2 * y;",
        f"  {name}_rows[y] = line_{dtype}({at}, {position});",
        "}",
    ]


def _matrix(stmt: Parallel, roles: Roles, tile: Staged, at: str) -> list[str]:
    name = tile.buffer.name
    if tile.contiguous != 1 or roles.sharing(stmt.axes[0]) != 1:
        raise CudaError(
            f"{name} is read by element: such a tile is contiguous along its columns, which one warpgroup has"
        )
    words = extents(tile.buffer)[1] // 4
    return [
        f"u32 {name}_at[{words}];",
        f"fetch_fragment({name}_at, {at} + group_row * 128, {tile.chunk_rows * 128});",
    ]
