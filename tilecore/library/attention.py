"""The attention kernel: one text for every attention region, whatever its layouts, masks, biases and score program."""

from functools import partial
from typing import Any

from tilecore import language as T
from tilecore.language import Handle, Value
from tilecore.library.guard import restore_unweighted
from tilecore.library.online_softmax import running_softmax
from tilecore.library.per_key import keep_scores, key_reductions
from tilecore.library.score import Score


def attention(
    Q: Handle,
    K: Handle,
    V: Handle,
    outputs: tuple[Handle, ...],
    *,
    score: Score,
    block_m: Any = T.auto,
    block_n: Any = T.auto,
    split: int = 1,
) -> None:
    """O = softmax(score(Q · Kᵀ)) · V for Q[b, h, q, d], K[b, h, k, d], V[b, h, k, e] and outputs over (b, h, q, e).

    `split` tasks share the keys.
    """
    (B, H, _, D), E = Q.shape, V.shape[3]
    with T.Kernel(T.ceildiv(score.queries, block_m), H, B, split=split) as (m, h, b, part):
        keys = score.keys(b, h)
        q = T.alloc_shared((block_m, D), Q.dtype)
        k = T.alloc_shared((block_n, D), K.dtype)
        v = T.alloc_shared((block_n, E), V.dtype)
        s = T.alloc_fragment((block_m, block_n), score.dtype)
        o = T.alloc_fragment((block_m, E), score.dtype)
        softmax = running_softmax(block_m, score.dtype, bounded=score.bounded(V.dtype))
        raw = s if score.raw_dtype is s.dtype else T.alloc_fragment((block_m, block_n), score.raw_dtype)
        p = s if V.dtype is s.dtype else T.alloc_shared((block_m, block_n), V.dtype)
        beside = key_reductions(score, block_m, block_n)
        T.copy(Q[b, h, m * block_m, 0], q)
        T.clear(o)
        softmax.start(lambda i: T.if_then_else(part == 0, score.first(b, h, m * block_m + i), -T.infinity))

        def scored(n: Value, i: Value, j: Value) -> Value:
            logit = score(raw[i, j], b, h, m * block_m + i, n * block_n + j)
            return T.if_then_else(n * block_n + j < keys, logit, -T.infinity)

        first, last = score.key_tiles(m, block_m, block_n, keys)
        for n in T.Pipelined(*T.share(first, last, part, split)):
            T.copy(K[b, h, n * block_n, 0], k)
            T.gemm(q, k, raw, transpose_B=True, clear=True)
            keep_scores(score.taps(outputs, shared=False), raw, b, h, m * block_m, n * block_n)
            softmax.weigh(s, partial(scored, n))
            beside.add(b, h, m * block_m, n * block_n, keys)
            if p is not s:
                T.copy(s, p)
            softmax.rescale(o)
            T.copy(V[b, h, n * block_n, 0], v)
            T.gemm(p, v, o)
        if split > 1:
            softmax.join(o)
        if score.guards(V):
            restore_unweighted(o, softmax.total, lambda n, to: T.copy(V[b, h, n * block_n, 0], to), v, (first, last))
        for C, result in score.finals(outputs):
            with T.If(part == 0):
                for i, e in T.Parallel(block_m, E):
                    done = (score.finish(o[i, e], softmax.total[i], keys), *beside.at(i), *softmax.at(i))
                    C[b, h, m * block_m + i, e] = result(done, b, h, m * block_m + i, e)
