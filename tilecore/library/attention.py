"""The attention kernel: one text for every attention region, whatever its layouts, masks, biases and score program."""

import math
from typing import Any

from tilecore import language as T
from tilecore.language import Handle, Value
from tilecore.library.per_key import keep_scores, key_reductions
from tilecore.library.score import Score

LOG2E = math.log2(math.e)


def attention(
    Q: Handle,
    K: Handle,
    V: Handle,
    outputs: tuple[Handle, ...],
    *,
    score: Score,
    block_m: Any = T.auto,
    block_n: Any = T.auto,
) -> None:
    """O = softmax(score(Q · Kᵀ)) · V for Q[b, h, q, d], K[b, h, k, d], V[b, h, k, e] and outputs over (b, h, q, e)."""
    B, H, queries, D = Q.shape
    keys, E = V.shape[2:]
    with T.Kernel(T.ceildiv(queries, block_m), H, B) as (m, h, b):
        q = T.alloc_shared((block_m, D), Q.dtype)
        k = T.alloc_shared((block_n, D), K.dtype)
        v = T.alloc_shared((block_n, E), V.dtype)
        s = T.alloc_fragment((block_m, block_n), score.dtype)
        o = T.alloc_fragment((block_m, E), score.dtype)
        top = T.alloc_fragment((block_m,), score.dtype)
        total = T.alloc_fragment((block_m,), score.dtype)
        rescale = T.alloc_fragment((block_m,), score.dtype)
        raw = s if score.raw_dtype is s.dtype else T.alloc_fragment((block_m, block_n), score.raw_dtype)
        p = s if V.dtype is s.dtype else T.alloc_shared((block_m, block_n), V.dtype)
        beside = key_reductions(score, block_m, block_n)
        T.copy(Q[b, h, m * block_m, 0], q)
        T.clear(o)
        for i in T.Parallel(block_m):
            top[i] = score.first(b, h, m * block_m + i)
        for i in T.Parallel(block_m):
            total[i] = weight(top[i], top[i])
        for n in T.Pipelined(*score.key_tiles(m, block_m, block_n, keys)):
            T.copy(K[b, h, n * block_n, 0], k)
            T.gemm(q, k, raw, transpose_B=True, clear=True)
            keep_scores(score.taps(outputs, shared=False), raw, b, h, m * block_m, n * block_n)
            for i, j in T.Parallel(block_m, block_n):
                logit = score(raw[i, j], b, h, m * block_m + i, n * block_n + j)
                s[i, j] = T.if_then_else(n * block_n + j < keys, logit, -T.infinity)
            online_softmax(s, top, total, rescale)
            beside.add(b, h, m * block_m, n * block_n, keys)
            for i, e in T.Parallel(block_m, E):
                o[i, e] *= rescale[i]
            T.copy(V[b, h, n * block_n, 0], v)
            if p is not s:
                T.copy(s, p)
            T.gemm(p, v, o)
        for C, result in score.finals(outputs):
            for i, e in T.Parallel(block_m, E):
                done = (score.finish(o[i, e], total[i], keys), *beside.at(i))
                C[b, h, m * block_m + i, e] = result(done, b, h, m * block_m + i, e)


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


def weight(score: Value, top: Value) -> Value:
    """exp(score − top), and 0 where every score up to here is −inf; NaN and +inf give NaN, as softmax does."""
    return T.exp2((score - T.if_then_else(top == -T.infinity, 0.0, top)) * LOG2E)
