"""Attention whose probabilities go through a program of their own, such as being rounded to levels, before V.

The program needs the normalised probability, so that a row's whole sum must be known before its first weight.
"""

from functools import partial
from typing import Any

from tilecore import language as T
from tilecore.language import Handle
from tilecore.library.online_softmax import raise_tops, weight
from tilecore.library.per_key import key_reductions
from tilecore.library.score import Score


def as_operand(weights: Handle, operand: Handle) -> Handle:
    """`weights` in the type of `operand`, which is another tile where that differs."""
    if operand is not weights:
        T.copy(weights, operand)
    return operand


def attention_in_two_passes(Q: Handle, K: Handle, V: Handle, outputs: tuple[Handle, ...], *,
                            score: Score, block_m: Any = T.auto, block_n: Any = T.auto) -> None:  # fmt: skip
    """O = weight(softmax(score(Q · Kᵀ))) · V: a pass for each row's maximum and sum, one for the weights."""
    (B, H, _, D), E = Q.shape, V.shape[3]
    with T.Kernel(T.ceildiv(score.queries, block_m), H, B) as (m, h, b):
        keys = score.keys(b, h)
        q = T.alloc_shared((block_m, D), Q.dtype)
        k, again = (T.alloc_shared((block_n, D), K.dtype) for _ in range(2))
        v = T.alloc_shared((block_n, E), V.dtype)
        s, p = (T.alloc_fragment((block_m, block_n), score.dtype) for _ in range(2))
        o = T.alloc_fragment((block_m, E), score.dtype)
        top, total, rescale = (T.alloc_fragment((block_m,), score.dtype) for _ in range(3))
        factor = p if V.dtype is p.dtype else T.alloc_shared((block_m, block_n), V.dtype)
        raw = s if score.raw_dtype is s.dtype else T.alloc_fragment((block_m, block_n), score.raw_dtype)
        remade = p if score.raw_dtype is p.dtype else T.alloc_fragment((block_m, block_n), score.raw_dtype)
        beside = key_reductions(score, block_m, block_n)
        T.copy(Q[b, h, m * block_m, 0], q)
        T.clear(o)
        for i in T.Parallel(block_m):
            top[i] = score.first(b, h, m * block_m + i)
            total[i] = weight(top[i], top[i], unit=score.unit)
        for n in T.Pipelined(*score.key_tiles(m, block_m, block_n, keys)):
            T.copy(K[b, h, n * block_n, 0], k)
            T.gemm(q, k, raw, transpose_B=True, clear=True)
            for i, j in T.Parallel(block_m, block_n):
                logit = score(raw[i, j], b, h, m * block_m + i, n * block_n + j)
                s[i, j] = T.if_then_else(n * block_n + j < keys, logit, -T.infinity)
            rise = partial(T.reduce_max, s, top, dim=1, clear=False, nan_propagate=False)
            raise_tops(top, total, rescale, rise, unit=score.unit)
            for i, j in T.Parallel(block_m, block_n):
                s[i, j] = weight(s[i, j], top[i], unit=score.unit)
            T.reduce_sum(s, total, dim=1, clear=False)
            beside.add(b, h, m * block_m, n * block_n, keys)
        for n in T.Pipelined(*score.key_tiles(m, block_m, block_n, keys)):
            T.copy(K[b, h, n * block_n, 0], again)
            T.gemm(q, again, remade, transpose_B=True, clear=True)
            for Y, result in score.taps(outputs, shared=True):
                for i, j in T.Parallel(block_m, block_n):
                    row, key = m * block_m + i, n * block_n + j
                    share = score.share(weight(score(remade[i, j], b, h, row, key), top[i], unit=score.unit), total[i])
                    known = (remade[i, j], share, *beside.at(i), top[i], total[i])
                    Y[b, h, row, key] = result(known, b, h, row, key)
            for i, j in T.Parallel(block_m, block_n):
                row, key = m * block_m + i, n * block_n + j
                share = score.share(weight(score(remade[i, j], b, h, row, key), top[i], unit=score.unit), total[i])
                used = score.weight((share, *beside.at(i), top[i], total[i]), b, h, row, key)
                p[i, j] = T.if_then_else(key < keys, used, 0.0)
            T.copy(V[b, h, n * block_n, 0], v)
            T.gemm(as_operand(p, factor), v, o)
        for C, result in score.finals(outputs):
            for i, e in T.Parallel(block_m, E):
                done = (o[i, e], *beside.at(i), top[i], total[i])
                C[b, h, m * block_m + i, e] = result(done, b, h, m * block_m + i, e)
