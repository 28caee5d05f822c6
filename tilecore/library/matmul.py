"""The matmul kernel: one text for every contraction region, whatever its layouts, prologues and epilogue programs."""

from typing import Any

from tilecore import language as T
from tilecore.language import Handle
from tilecore.library.epilogue import Epilogue


def matmul(
    A: Handle,
    B: tuple[Handle, ...],
    outputs: tuple[Handle, ...],
    *,
    epilogue: tuple[Epilogue, ...],
    block_m: Any = T.auto,
    block_n: Any = T.auto,
    block_k: Any = T.auto,
    split: int = 1,
    byte_block: int = 0,
    columns_first: bool = False,
    most_rows: int = 0,
) -> None:
    """C = epilogue(A · B, …) for A[g, m, k], each B[g, k, n] and outputs over (g, m, n); `split` tasks share a sum.

    `byte_block`: A may be rounded to bytes, in blocks of so many steps of k. `columns_first`: a task's neighbours have
    the same rows, so that a tile of A that is computed is kept from one to the next, instead of one of B. `most_rows`:
    how many the rows of a g are at most, where they differ.
    """
    batch, rows, depth = A.shape
    rows = most_rows or rows
    down, across = T.ceildiv(rows, block_m), T.ceildiv(B[0].shape[2], block_n)

    def task(m: Any, n: Any, g: Any, s: Any) -> None:
        a = T.alloc_shared((block_m, block_k), A.dtype)
        products: list[tuple[Handle, Handle, Handle]] = []
        for right in B:
            b = T.alloc_shared((block_k, block_n), right.dtype)
            c = T.alloc_fragment((block_m, block_n), epilogue[0].dtype)
            T.clear(c)
            products.append((right, b, c))
        for k in T.Pipelined(*T.share(0, T.ceildiv(depth, block_k), s, split)):
            T.copy(A[g, m * block_m, k * block_k], a)
            for right, b, c in products:
                T.copy(right[g, k * block_k, n * block_n], b)
                T.gemm(a, b, c, byte_block=byte_block)
        for _, _, c in products:
            T.join(c, "sum")
        for C, result in zip(outputs, epilogue, strict=True):
            with T.If(s == 0):
                for i, j in T.Parallel(block_m, block_n):
                    row, column = m * block_m + i, n * block_n + j
                    C[g, row, column] = result(tuple(c[i, j] for _, _, c in products), g, row, column)

    if columns_first:
        with T.Kernel(across, down, batch, split=split) as (n, m, g, s):
            task(m, n, g, s)
    else:
        with T.Kernel(down, across, batch, split=split) as (m, n, g, s):
            task(m, n, g, s)
