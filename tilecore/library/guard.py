"""What a guard that makes NaN probabilities 0 leaves of a row: Σ 0 · V, which is NaN where V is not finite."""

from collections.abc import Callable

from tilecore import language as T
from tilecore.language import Handle, Value
from tilecore.value import Operand


def restore_unweighted(
    o: Handle,
    total: Handle,
    load: Callable[[Value, Handle], None],
    like: Handle,
    tiles: tuple[Operand, Operand],
    rows: Operand,
) -> None:
    """Make rows of `o` whose sum of weights is NaN Σ 0 · V: `load` brings a tile of V, as `like`, for n in tiles.

    Tiles without such a row among the `rows` that there are, which is nearly all, only look for one.
    """
    values = T.alloc_shared(like.shape, like.dtype)
    unweighted = T.alloc_fragment((like.shape[1],), o.dtype)
    worst = T.alloc_fragment((1,), o.dtype)
    present = T.alloc_fragment((1, total.shape[0]), o.dtype)
    for r, i in T.Parallel(*present.shape):
        present[r, i] = T.if_then_else(i < rows, total[i], -T.infinity)
    T.reduce_max(present, worst, dim=1)
    with T.If(T.isnan(worst[0])):
        T.clear(unweighted)
        for n in T.serial(*tiles):
            load(n, values)
            for j, e in T.Parallel(*values.shape):
                values[j, e] *= 0.0
            T.reduce_sum(values, unweighted, dim=0, clear=False)
        for i, e in T.Parallel(*o.shape):
            o[i, e] = T.if_then_else(T.isnan(total[i]), unweighted[e], o[i, e])
