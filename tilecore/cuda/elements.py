"""Elements of tiles in shared memory, in the registers of the threads whose fragments stand beside them.

A tile of two axes that a tensor copy brought is fetched by matrix loads, which give the layout of a fragment, turned if
asked to. A line gives every thread the elements of its rows or of its columns. Lines of a chunk's steps are computed as
well: every warp has its own, so that no other has to be waited for.
"""

from collections.abc import Callable

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Var, loads
from tilecore.cuda.errors import CudaError
from tilecore.cuda.roles import CHUNK, Roles, Staged, extents
from tilecore.ir import Buffer, CumSum, Parallel

LINE_POSITION = "lane + 32 * y"  # of element y of a thread, where a warp computes a line


def readable(buffer: Buffer, index: tuple[Expr, ...], axes: tuple[Var, ...], roles: Roles) -> bool:
    """Whether a parallel loop over `axes` reads, or computes, `buffer` at `index` in another way than a fragment."""
    if buffer.name in roles.lines:
        return isinstance(index[0], Const) or index[0] in axes
    tile = roles.staged.get(buffer.name)
    return tile is not None and index in ((axes[1:], axes) if tile.line else (axes[::-1], axes))


def fetched_element(load: Load, axes: tuple[Var, ...], roles: Roles) -> str:
    """Element x of a fragment's thread, after `fetched_elements`."""
    assert isinstance(load.source, Buffer)
    name = load.source.name
    tile = roles.staged.get(name)
    if tile is not None and not tile.line:
        return f"element_{load.source.dtype}({name}_{'turned' if load.index == axes[::-1] else 'at'}, x)"
    (where,) = load.index
    if load.source.dtype is DType.BOOL:
        return f"(({name}_flags[x >> 2] >> (x & 1) * 8 & 255) != 0)"
    if isinstance(where, Const):
        return f"{name}_{where.value}"
    return f"{name}_columns[(x >> 2) * 2 + (x & 1)]" if where in axes[1:] else f"{name}_rows[x >> 1 & 1]"


def fetched_elements(stmt: Parallel, roles: Roles, where: tuple[str, str], slot: Callable[[Buffer], str]) -> list[str]:
    """What a parallel loop reads of such tiles, fetched before it. `where` is a thread's row and column of element x,
    `slot` that of a buffer's ring.
    """
    found = dict.fromkeys((load.source, load.index) for store in stmt.body for load in loads(store.value))
    lines: list[str] = []
    parts = roles.sharing(stmt.axes[0]) or 1
    for source, index in found:
        if not isinstance(source, Buffer) or source.dtype is DType.BOOL:
            continue
        if source.name in roles.lines:
            lines += _line(source, index[0], stmt, own_line(source), where, parts)
        elif source.name in roles.staged:
            tile = roles.staged[source.name]
            at = f"tile_{source.name} + {slot(source)} * {tile.bytes}"
            lines += (
                _line(source, index[0], stmt, at, where, parts) if tile.line else _matrix(stmt, roles, tile, at, index)
            )
    return lines


def fetched_flags(value: Expr, column: str, address: Callable[[Buffer], str]) -> list[str]:
    """The flags of a fragment's columns that a value reads, in pairs; `column` is that of element x."""
    lines: list[str] = []
    for source in dict.fromkeys(load.source for load in loads(value)):
        if isinstance(source, Buffer) and source.dtype is DType.BOOL:
            pairs = extents(source)[0] // 8
            lines += [
                f"u32 {source.name}_flags[{pairs}];",
                f"TILE_UNROLL for (int y = 0; y < {pairs}; y++) {{ const int x = 4 * y;",
                f"  {source.name}_flags[y] = line_half({address(source)} + {column});",
                "}",
            ]
    return lines


def own_line(buffer: Buffer) -> str:
    """Where a warp's own line lies."""
    return f"line_{buffer.name} + threadIdx.x / 32 * {4 * CHUNK}"


def _line(buffer: Buffer, index: Expr, stmt: Parallel, at: str, where: tuple[str, str], parts: int) -> list[str]:
    """One element, one per row half, or two neighbours per group of 8 of a warpgroup's columns."""
    name, dtype = buffer.name, buffer.dtype
    if isinstance(index, Const):
        return [f"const float {name}_{index.value} = line_{dtype}({at}, {index.value});"]
    if index in stmt.axes[1:]:
        pairs = extents(buffer)[0] // 8 // parts
        return [
            f"float {name}_columns[{2 * pairs}];",
            f"TILE_UNROLL for (int y = 0; y < {pairs}; y++) {{ const int x = 4 * y;",
            f"  line_pair_{dtype}({name}_columns + 2 * y, {at}, {where[1]});",
            "}",
        ]
    return [
        f"float {name}_rows[2];",
        "TILE_UNROLL for (int y = 0; y < 2; y++) { const int x = 2 * y;",
        f"  {name}_rows[y] = line_{dtype}({at}, {where[0]});",
        "}",
    ]


def _matrix(stmt: Parallel, roles: Roles, tile: Staged, at: str, index: tuple[Expr, ...]) -> list[str]:
    name = tile.buffer.name
    if tile.contiguous != 1 or roles.sharing(stmt.axes[0]) != 1:
        raise CudaError(
            f"{name} is read by element: such a tile is contiguous along its columns, which one warpgroup has"
        )
    rows, columns = extents(tile.buffer)
    if index == stmt.axes:
        to, words, verb = f"{name}_at", columns // 4, f"fetch_fragment({name}_at, {at} + group_row * 128, {rows * 128})"
    else:
        to, words, verb = f"{name}_turned", rows // 4, f"fetch_turned({name}_turned, {at} + group_row * {rows * 2})"
    return [f"u32 {to}[{words}];", f"{verb};"]


def computes_line(stmt: Parallel, roles: Roles) -> bool:
    """Whether a parallel loop computes the elements of a line."""
    return any(isinstance(store.target, Buffer) and store.target.name in roles.lines for store in stmt.body)


def computed(target: Buffer, roles: Roles, setup: list[str], value: str) -> list[str]:
    """An element program that computes a line, or a left operand in pairs; `value` after the lines of `setup`."""
    if target.name in roles.lines:
        return [
            "__syncwarp();",  # nobody reads what it was any more
            f"TILE_UNROLL for (int y = 0; y < {CHUNK // 32}; y++) {{",
            *("  " + line for line in setup),
            f"  line_write({own_line(target)}, {LINE_POSITION}, {value});",
            "}",
            "__syncwarp();",
        ]
    return [
        f"TILE_UNROLL for (int y = 0; y < {roles.packed[target.name]}; y++) {{",
        "  float v[2];",
        "  TILE_UNROLL for (int z = 0; z < 2; z++) { const int x = 2 * y + z;",
        *("    " + line for line in setup),
        f"    v[z] = {value};",
        "  }",
        f"  {target.name}[y] = pair_{target.dtype}(v[0], v[1]);",
        "}",
    ]


def summed(stmt: CumSum, roles: Roles) -> list[str]:
    """Running sums of a line in place. CudaError for any other."""
    if stmt.src != stmt.dst or stmt.reverse or stmt.src.name not in roles.lines:
        raise CudaError(f"T.cumsum of {stmt.src.name} into {stmt.dst.name}: CUDA sums lines of {CHUNK} in place")
    return [f"sum_line({own_line(stmt.src)});"]
