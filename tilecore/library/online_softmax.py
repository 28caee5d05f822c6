"""The softmax of a row that comes in tiles: weights under the maximum so far, and how parts of a row come together.

Scores that cannot be large need no maximum: their exponentials and sums of them are floats as they are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilecore import language as T
from tilecore.contract.dtype import DType
from tilecore.language import Handle, Value
from tilecore.value import Operand

LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class RunningSoftmax:
    """What is known of every row so far: the sum of its weights, and, as (top, rescale), their maximum and what brings
    earlier sums to it. Bounded scores have neither.
    """

    total: Handle
    under: tuple[Handle, Handle] | None

    def start(self, first: Callable[[Value], Operand]) -> None:
        """Begin with the logit `first` of each row."""
        if self.under is None:
            T.clear(self.total)
            return
        top, _ = self.under
        for i in T.Parallel(*top.shape):
            top[i] = first(i)
        for i in T.Parallel(*top.shape):
            self.total[i] = weight(top[i], top[i])

    def weigh(self, s: Handle, score: Callable[[Value, Value], Value]) -> None:
        """Make `s` the weights of the tile's scores."""
        for i, j in T.Parallel(*s.shape):
            s[i, j] = score(i, j) if self.under else T.exp2(score(i, j) * LOG2E)
        if self.under is None:
            T.reduce_sum(s, self.total, dim=1, clear=False)
        else:
            top, rescale = self.under
            online_softmax(s, top, self.total, rescale)

    def rescale(self, o: Handle) -> None:
        """Bring sums under the maximum before to the one now."""
        if self.under is not None:
            for i, e in T.Parallel(*o.shape):
                o[i, e] *= self.under[1][i]

    def at(self, row: Value) -> tuple[Operand, Operand]:
        """(maximum, sum under it) of a row."""
        return self.under[0][row] if self.under else 0.0, self.total[row]

    def join(self, o: Handle) -> None:
        """Bring parts of rows and their sums together."""
        if self.under is not None:
            join_parts(o, self.under[0], self.total, self.under[1])
        else:
            T.join(self.total, "sum")
            T.join(o, "sum")


def running_softmax(block_m: Any, dtype: DType, *, bounded: bool) -> RunningSoftmax:
    """The rows of a tile."""
    if bounded:
        total = T.alloc_fragment((block_m,), dtype)
        return RunningSoftmax(total, None)
    top = T.alloc_fragment((block_m,), dtype)
    total = T.alloc_fragment((block_m,), dtype)
    rescale = T.alloc_fragment((block_m,), dtype)
    return RunningSoftmax(total, (top, rescale))


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
