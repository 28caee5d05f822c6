"""The row kernel: one text for every program of reductions over the last axes and pointwise work around them."""

from typing import Any

from tilecore import language as T
from tilecore.contract.expr import Var
from tilecore.contract.spec import RowSpec, Step, extent_of
from tilecore.language import Handle, Value
from tilecore.value import plain, program


def row(outputs: tuple[Handle, ...], *, spec: RowSpec, block_m: Any = T.auto) -> None:
    """Each step of `spec` over a tile of whole rows, then its outputs, over (r, c) or over (r,)."""
    rows, columns = plain(extent_of(spec.row)), plain(extent_of(spec.column))
    with T.Kernel(T.ceildiv(rows, block_m)) as m:
        tiles: dict[Var, Handle] = {}
        for step in spec.steps:
            tile = tiles.get(step.value) if isinstance(step.value, Var) and step.kind != "tile" else None
            if tile is None or len(tile.shape) == 1:
                tile = T.alloc_fragment((block_m, columns), step.value.dtype)
                for i, j in T.Parallel(block_m, columns):
                    tile[i, j] = program(step.value, values(spec, tiles, m * block_m + i, i, j))
            tiles[step.var] = tile if step.kind == "tile" else reduced(step, tile)
        for C, result in zip(outputs, spec.outputs, strict=True):
            if len(C.shape) == 2:
                for i, j in T.Parallel(block_m, columns):
                    C[m * block_m + i, j] = program(result.value, values(spec, tiles, m * block_m + i, i, j))
            else:
                for i in T.Parallel(block_m):
                    C[m * block_m + i] = program(result.value, values(spec, tiles, m * block_m + i, i, None))


def reduced(step: Step, tile: Handle) -> Handle:
    """The reduction of `tile` over its columns, one value per row."""
    result = T.alloc_fragment(tile.shape[:1], step.var.dtype)
    T.reduce(tile, result, step.kind, dim=1)
    return result


def values(spec: RowSpec, tiles: dict[Var, Handle], r: Value, i: Value, j: Value | None) -> dict[Var, Value]:
    """What the variables of a row program stand for at row `r`, which is row `i` of the tile, and column `j`."""
    found = {spec.row: r} | ({} if j is None else {spec.column: j})
    for var, tile in tiles.items():
        if len(tile.shape) == 1:
            found[var] = tile[i]
        elif j is not None:
            found[var] = tile[i, j]
    return found
