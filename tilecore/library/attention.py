"""The attention kernel: one text for every attention region, whatever its layouts, masks, biases and score program."""

from functools import partial
from typing import Any

from tilecore import language as T
from tilecore.language import Handle
from tilecore.library.guard import restore_unweighted
from tilecore.library.online_softmax import join_parts, raise_tops, weight
from tilecore.library.per_key import keep_scores, key_reductions
from tilecore.library.score import Score


def attention(Q: Handle, K: Handle, V: Handle, outputs: tuple[Handle, ...], *, score: Score, block_m: Any = T.auto,
              block_n: Any = T.auto, split: int = 1) -> None:  # fmt: skip
    """O = softmax(score(Q · Kᵀ)) · V for Q[b, h, q, d], K[b, h, k, d], V[b, h, k, e] and outputs over (b, h, q, e).

    `split` tasks share the keys. Exponentials of scores that cannot be large, and their sums, need no maximum.
    """
    (B, H, _, D), E = Q.shape, V.shape[3]
    with T.Kernel(T.ceildiv(score.queries, block_m), H, B, split=split) as (m, h, b, part):
        keys, bounded, unit = score.keys(b, h), score.bounded(V.dtype), score.unit
        q = T.alloc_shared((block_m, D), Q.dtype)
        k = T.alloc_shared((block_n, D), K.dtype)
        v = T.alloc_shared((block_n, E), V.dtype)
        s = T.alloc_fragment((block_m, block_n), score.dtype)
        o = T.alloc_fragment((block_m, E), score.dtype)
        total = T.alloc_fragment((block_m,), score.dtype)
        top = total if bounded else T.alloc_fragment((block_m,), score.dtype)
        rescale = total if bounded else T.alloc_fragment((block_m,), score.dtype)
        raw = s if score.raw_dtype is s.dtype else T.alloc_fragment((block_m, block_n), score.raw_dtype)
        p = s if V.dtype is s.dtype else T.alloc_shared((block_m, block_n), V.dtype)
        beside = key_reductions(score, block_m, block_n)
        if not score.tells_statistics:
            T.annotate_reference(top)
        T.copy(Q[b, h, m * block_m, 0], q)
        T.clear(o)
        for i in T.Parallel(block_m):
            top[i] = T.if_then_else(part == 0, score.first(b, h, m * block_m + i), -T.infinity)
            total[i] = weight(top[i], top[i], unit=unit)  # 0 where there is no sink, as of bounded scores
        tiles = score.key_tiles(m, block_m, block_n, keys)
        for n in T.Pipelined(*T.share(*tiles, part, split)):
            T.copy(K[b, h, n * block_n, 0], k)
            T.gemm(q, k, raw, transpose_B=True, clear=True)
            keep_scores(score.taps(outputs, shared=False), raw, b, h, m * block_m, n * block_n)
            for i, j in T.Parallel(block_m, block_n):
                logit = score(raw[i, j], b, h, m * block_m + i, n * block_n + j)
                logit = T.if_then_else(n * block_n + j < keys, logit, -T.infinity)
                s[i, j] = T.exp2(logit * unit) if bounded else logit
            if not bounded:
                rise = partial(T.reduce_max, s, top, dim=1, clear=False, nan_propagate=False)
                raise_tops(top, total, rescale, rise, unit=unit)
                for i, j in T.Parallel(block_m, block_n):
                    s[i, j] = weight(s[i, j], top[i], unit=unit)
            T.reduce_sum(s, total, dim=1, clear=False)
            beside.add(b, h, m * block_m, n * block_n, keys)
            if p is not s:
                T.copy(s, p)
            if not bounded:
                for i, e in T.Parallel(block_m, E):
                    o[i, e] *= rescale[i]
            T.copy(V[b, h, n * block_n, 0], v)
            T.gemm(p, v, o)
        if split > 1:
            join_parts(o, total, None if bounded else (top, rescale), unit=unit)
        if score.guards(V):
            rows = score.queries - m * block_m
            restore_unweighted(o, total, lambda n, to: T.copy(V[b, h, n * block_n, 0], to), v, tiles, rows)
        for C, result in score.finals(outputs):
            with T.If(part == 0):
                for i, e in T.Parallel(block_m, E):
                    done = (score.finish(o[i, e], total[i], keys), *beside.at(i), top[i], total[i])
                    C[b, h, m * block_m + i, e] = result(done, b, h, m * block_m + i, e)
