"""The packed layout of a constant right-hand matrix B[k, n]: panels of `PANEL` columns, each contiguous in k.

`packed[p, k, j] = B[k, p * PANEL + j]`, columns past n are zero. The width is the same for every instruction set, so
that one packed weight serves every variant in a library.
"""

from dataclasses import dataclass

import numpy as np

from tilecore.contract.evaluate import Evaluator
from tilecore.contract.expr import Const, Expr, Load, Var, const, floordiv, nonnegative, variables
from tilecore.contract.spec import Tensor, View

PANEL = 16


@dataclass(frozen=True, slots=True)
class Rows:
    """A constant as a matrix [count, columns] that a view reads at row `at` (of k) and its own column n.

    `by_column`: the constant has the columns first, as a transposed weight does.
    """

    count: int
    by_column: bool
    at: Expr


def rows_of(load: Load, view: View) -> Rows | None:
    """The constant that a B view reads as rows of all its columns, or None when it is not one.

    The rows of a weight are k itself, those of packed levels k // 2, those of scales in blocks k // block: row 0 first,
    and none left out up to the last that is read.
    """
    _, k, n = view.axes
    columns, depth = n.extent, k.extent
    if not isinstance(columns, Const) or not isinstance(depth, Const) or view.shape[0] != const(1):
        return None
    if not isinstance(load.source, Tensor) or not load.source.constant:
        return None
    size = 1
    flat: Expr = const(0)
    for position, dim in zip(load.index, load.source.shape, strict=True):
        if not isinstance(dim, Const):
            return None
        size, flat = size * int(dim.value), flat * dim + position
    count, rest = divmod(size, int(columns.value))
    if rest or not count:
        return None
    for by_column, step in ((True, count), (False, 1)):
        base = flat - n * step
        at = base if by_column else floordiv(base, columns)
        exact = by_column or at * columns == base
        if exact and variables(at) <= {k} and nonnegative(at) and nonnegative(count - 1 - at):
            return Rows(count, by_column, at) if _in_order(at, k, int(depth.value)) else None
    return None


def _in_order(at: Expr, k: Var, depth: int) -> bool:
    walked = np.broadcast_to(Evaluator({}, {})(at, {k: np.arange(depth)}), (depth,))
    return depth > 0 and walked[0] == 0 and bool(np.isin(np.diff(walked), (0, 1)).all())


def pack(matrix: np.ndarray) -> np.ndarray:
    """B[k, n] → panels [ceil(n / PANEL), k, PANEL], same dtype, contiguous."""
    rows, columns = matrix.shape
    panels = -(-columns // PANEL)
    padded = np.zeros((rows, panels * PANEL), matrix.dtype)
    padded[:, :columns] = matrix
    return np.ascontiguousarray(padded.reshape(rows, panels, PANEL).transpose(1, 0, 2))


def unpack(panels: np.ndarray, columns: int) -> np.ndarray:
    """The inverse of `pack`: panels [p, k, PANEL] → B[k, columns]."""
    count, rows, width = panels.shape
    return np.ascontiguousarray(panels.transpose(1, 0, 2).reshape(rows, count * width)[:, :columns])
