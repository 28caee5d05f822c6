"""The packed layout of a constant right-hand matrix B[k, n]: panels of `PANEL` columns, each contiguous in k.

`packed[p, k, j] = B[k, p * PANEL + j]`, columns past n are zero. The width is the same for every instruction set, so
that one packed weight serves every variant in a library. Where elements have fewer than 8 bits, a byte of a panel holds
those of consecutive rows, the first in the low bits.

What instructions multiply in groups of g rows lies in such groups instead (`group_of`): bf16 in pairs, bytes of sums of
integers in fours, and so do stored bytes of levels that meet activations in bytes:
`packed[p, k // g, j, k % g] = B[k, p * PANEL + j]`, rows past k are zero.

Behind the fours of rows of bytes that sums of integers multiply, a panel has one group more (`has_sums`): the sums of
its columns in 32 bits. What a left operand's bytes differ by from its levels is that times these.
"""

from dataclasses import dataclass

import numpy as np

from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import Evaluator
from tilecore.contract.expr import (
    Const,
    Expr,
    Load,
    Op,
    binary,
    cast,
    const,
    floordiv,
    nonnegative,
    select,
    variables,
)
from tilecore.contract.spec import Tensor, View

PANEL = 16


@dataclass(frozen=True, slots=True)
class Rows:
    """A constant as a matrix [count, columns] that a view reads at row `at` (of k) and column `start` + n.

    `by_column`: the constant has the columns first, as a transposed weight does. `start` is where a panel begins.
    `turned`: rows of the constant have two digits that `at` has the other way round, this many of the lower one (the
    taps of a convolution whose channels are summed first); 1 where they lie in order.
    """

    count: int
    by_column: bool
    at: Expr
    columns: int
    start: int
    turned: int = 1


def rows_of(load: Load, view: View) -> Rows | None:
    """The constant that a B view reads as rows of all its columns or a run of them, or None when it is not one.

    The rows of a weight are k itself, those of packed levels k // 2, those of scales in blocks k // block: row 0 first,
    and none left out up to the last that is read.
    """
    _, k, n = view.axes
    width, depth = n.extent, k.extent
    if not isinstance(width, Const) or not isinstance(depth, Const) or view.shape[0] != const(1):
        return None
    if not isinstance(load.source, Tensor) or not load.source.constant:
        return None
    size, sizes = 1, [1]
    flat: Expr = const(0)
    for position, dim in zip(load.index, load.source.shape, strict=True):
        if not isinstance(dim, Const):
            return None
        size, flat = size * int(dim.value), flat * dim + position
        sizes.append(size)
    if size == 0 or depth.value == 0 or width.value == 0:
        return None
    forms = dict.fromkeys(
        [(True, int(width.value)), (False, int(width.value))]  # all columns, whatever axes they are spread over
        + [form for before in sizes[1:-1] for form in ((True, before), (False, size // before))]
    )
    found = (_rows(flat, view, size, by_column, columns) for by_column, columns in forms)
    return next((rows for rows in found if rows is not None), None)


def _rows(flat: Expr, view: View, size: int, by_column: bool, columns: int) -> Rows | None:
    """Element `flat` of a constant of `size` elements, if that is a row of `columns`, or of those from `start` on."""
    _, k, n = view.axes
    width, depth = view.shape[2], view.shape[1]
    count, rest = divmod(size, columns)
    if rest or not count or not isinstance(width, Const) or not isinstance(depth, Const):
        return None
    base = flat - n * (count if by_column else 1)
    if not variables(base) <= {k}:
        return None
    first = int(Evaluator({}, {})(base, {k: np.zeros(1, np.int64)}).flat[0])
    start, past = divmod(first, count) if by_column else (first, 0)
    if past or start % PANEL or not 0 <= start <= columns - int(width.value):
        return None
    base = base - start * (count if by_column else 1)
    at = base if by_column else floordiv(base, const(columns))
    if not (by_column or at * columns == base) or not nonnegative(at) or not nonnegative(count - 1 - at):
        return None
    walked = np.broadcast_to(Evaluator({}, {})(at, {k: np.arange(int(depth.value))}), (int(depth.value),))
    if walked[0] == 0 and np.isin(np.diff(walked), (0, 1)).all():
        return Rows(count, by_column, at, columns, start)
    turned = int(walked[1]) if count > 1 and depth == const(count) else 0
    if turned < 1 or count % turned:
        return None
    in_turn = np.arange(count).reshape(-1, turned).T.ravel()
    return Rows(count, by_column, k, columns, start, turned) if np.array_equal(walked, in_turn) else None


def packed_level(stored: Expr, position: Expr, bits: int) -> Expr:
    """Level number `position` of those that lie packed in bytes, low bits first, given its byte; in 32 bits."""
    wide = cast(stored, DType.I32)
    if bits == 8:
        return wide
    levels, result = 1 << bits, binary("floordiv", wide, 1 << (8 - bits))
    for place in reversed(range(8 // bits - 1)):
        here = binary("mod", binary("floordiv", wide, 1 << (bits * place)) if place else wide, levels)
        result = select(binary("eq", position % (8 // bits), const(place)), here, result)
    return result


def stored_rows(count: int, bits: int) -> int:
    """Rows of bytes that hold `count` rows of elements."""
    return -(-count * bits // 8) if bits < 8 else count


def join_bits(matrix: np.ndarray, bits: int) -> np.ndarray:
    """Integers of `bits` bits [rows, columns] → bytes [stored rows, columns]; rows past the last are zero."""
    each = 8 // bits
    whole = np.zeros((stored_rows(len(matrix), bits) * each, matrix.shape[1]), np.uint8)
    whole[: len(matrix)] = matrix.astype(np.int8).view(np.uint8) & ((1 << bits) - 1)
    return sum((whole[place::each] << (bits * place) for place in range(1, each)), start=whole[::each])


def group_of(load: Load, view: View, byte_block: int = 0) -> int:
    """Rows that lie side by side in the panels that `load` of a right operand becomes; 1 in plain ones.

    `byte_block` is the contraction's licence: with one, bytes of levels (not of the few zero points) lie in fours.
    """
    rows, depth = rows_of(load, view), view.shape[1]
    if rows is None or rows.count == 1 or not isinstance(depth, Const):
        return 1
    match view.value:
        case Load(dtype=DType.BF16) if rows.at == view.axes[1]:
            return 2
        case Op(name="cast", args=(stored,), dtype=DType.I16) if stored == load and load.dtype in (DType.I8, DType.U8):
            return 4 if rows.at == view.axes[1] else 1
        case _:
            return 4 if byte_block and load.dtype is DType.U8 and rows.count * 2 >= depth.value else 1


def has_sums(load: Load, view: View) -> bool:
    """Whether the panels that `load` of a right operand becomes end with the sums of their columns: bytes, in fours."""
    match view.value:
        case Op(name="cast", args=(stored,), dtype=DType.I16) if stored == load:
            return group_of(load, view) == 4
        case _:
            return False


def groups_of(rows: int, group: int, sums: bool) -> int:
    """Groups that a panel of so many rows has."""
    return -(-rows // group) + sums


def pack_groups(matrix: np.ndarray, group: int, *, sums: bool = False) -> np.ndarray:
    """B[k, n] → panels [ceil(n / PANEL), groups, PANEL, group], same dtype, contiguous; `pack` for groups of 1.

    `sums`: the last group of a panel is the int32 sums of its columns.
    """
    if group == 1:
        return pack(matrix)
    rows, columns = matrix.shape
    padded = np.zeros((-(-rows // group) * group, columns), matrix.dtype)
    padded[:rows] = matrix
    panels = pack(padded)
    grouped = np.ascontiguousarray(panels.reshape(len(panels), -1, group, PANEL).transpose(0, 1, 3, 2))
    if not sums:
        return grouped
    totals = pack(matrix.astype(np.int32).sum(axis=0, dtype=np.int32, keepdims=True)).view(matrix.dtype)
    return np.concatenate([grouped, totals.reshape(len(panels), 1, PANEL, group)], axis=1)


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
