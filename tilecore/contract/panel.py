"""The packed layout of a constant right-hand matrix B[k, n]: panels of `PANEL` columns, each contiguous in k.

`packed[p, k, j] = B[k, p * PANEL + j]`, columns past n are zero. The width is the same for every instruction set, so
that one packed weight serves every variant in a library.
"""

import numpy as np

PANEL = 16


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
