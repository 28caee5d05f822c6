"""The softmax of a row that comes in tiles: weights under the maximum so far, and how parts of a row come together."""

import math

from tilecore import language as T
from tilecore.language import Handle, Value

LOG2E = math.log2(math.e)


def online_softmax(s: Handle, top: Handle, total: Handle, rescale: Handle) -> None:
    """Turn scores into weights under the row maximum so far; `rescale` brings earlier sums to that maximum."""
    T.copy(top, rescale)
    T.reduce_max(s, top, dim=1, clear=False, nan_propagate=False)  # its weight makes the row NaN all the same
    for i in T.Parallel(*top.shape):
        rescale[i] = weight(rescale[i], top[i])
        total[i] *= rescale[i]
    for i, j in T.Parallel(*s.shape):
        s[i, j] = weight(s[i, j], top[i])
    T.reduce_sum(s, total, dim=1, clear=False)


def join_parts(o: Handle, top: Handle, total: Handle, rescale: Handle) -> None:
    """Bring the parts of a row to the maximum of them all, and sum them."""
    T.copy(top, rescale)
    T.join(top, "fmax")
    for i in T.Parallel(*top.shape):
        rescale[i] = weight(rescale[i], top[i])
        total[i] *= rescale[i]
    for i, e in T.Parallel(*o.shape):
        o[i, e] *= rescale[i]
    T.join(total, "sum")
    T.join(o, "sum")


def weight(score: Value, top: Value) -> Value:
    """exp(score − top), and 0 where every score up to here is −inf; NaN and +inf give NaN, as softmax does."""
    return T.exp2((score - T.if_then_else(top == -T.infinity, 0.0, top)) * LOG2E)
