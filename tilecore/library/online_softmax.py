"""The softmax of a row that comes in tiles: weights under the maximum so far, and how that maximum rises."""

import math
from collections.abc import Callable

from tilecore import language as T
from tilecore.language import Handle, Value

LOG2E = math.log2(math.e)


def raise_tops(top: Handle, total: Handle, rescale: Handle, rise: Callable[[], None], *, unit: float = LOG2E) -> None:
    """Let `rise` take in more of each row's maximum; `rescale` brings earlier sums to it, as it does `total`.

    A maximum that leaves NaN out is as good: the weight of NaN makes the row NaN all the same.
    """
    T.copy(top, rescale)
    rise()
    for i in T.Parallel(*top.shape):
        rescale[i] = weight(rescale[i], top[i], unit=unit)
        total[i] *= rescale[i]


def join_parts(o: Handle, total: Handle, under: tuple[Handle, Handle] | None, *, unit: float = LOG2E) -> None:
    """Sum the parts of rows; `under` is (top, rescale), which brings them to the maximum of all, or None."""
    if under is not None:
        raise_tops(under[0], total, under[1], lambda: T.join(under[0], "fmax"), unit=unit)
        for i, e in T.Parallel(*o.shape):
            o[i, e] *= under[1][i]
    T.join(total, "sum")
    T.join(o, "sum")


def weight(score: Value, top: Value, *, unit: float = LOG2E) -> Value:
    """exp(score − top), and 0 where every score up to here is −inf; NaN and +inf give NaN, as softmax does.

    `unit`: how many powers of 2 a score of 1 is.
    """
    return T.exp2((score - T.if_then_else(top == -T.infinity, 0.0, top)) * unit)
