"""Causal attention without softmax, O[t] = Σ_{s ≤ t} (q[t] · k[s]) v[s], in chunks that a state joins."""

from typing import Any

from tilecore import language as T
from tilecore.language import Handle


def linear_attention(
    Q: Handle, K: Handle, V: Handle, out: Handle, *, scale: float = 1.0, chunk: Any = T.auto, block_e: Any = T.auto
) -> None:
    """out[b, h, t, e] of Q and K[b, h, t, d] and V[b, h, t, e].

    Everything stands on its side: rows are columns of V, so that the state, S[e, d] = Σ v[s, e] k[s, d] over all chunks
    before, stays in the registers in which it is summed and is multiplied from there.
    """
    B, H, steps, D = Q.shape
    E = V.shape[3]
    with T.Kernel(T.ceildiv(E, block_e), H, B) as (e, h, b):
        q = T.alloc_shared((chunk, D), Q.dtype)
        k = T.alloc_shared((chunk, D), K.dtype)
        v = T.alloc_shared((chunk, block_e), V.dtype)
        scores = T.alloc_fragment((chunk, chunk), T.float32)
        inside = T.alloc_shared((chunk, chunk), V.dtype)
        state = T.alloc_fragment((block_e, D), T.float32)
        before = T.alloc_shared((block_e, D), Q.dtype)
        o = T.alloc_fragment((block_e, chunk), T.float32)
        T.clear(state)
        for n in T.Pipelined(T.ceildiv(steps, chunk)):
            T.copy(Q[b, h, n * chunk, 0], q)
            T.copy(K[b, h, n * chunk, 0], k)
            T.gemm(k, q, scores, transpose_B=True, clear=True)
            T.copy(state, before)
            T.gemm(before, q, o, transpose_B=True, clear=True)
            for s, t in T.Parallel(chunk, chunk):
                scores[s, t] = T.if_then_else(s <= t, scores[s, t], 0.0)
            T.copy(scores, inside)
            T.copy(V[b, h, n * chunk, e * block_e], v)
            T.gemm(v, inside, o, transpose_A=True)
            T.gemm(v, k, state, transpose_A=True)
            for i, t in T.Parallel(block_e, chunk):
                out[b, h, n * chunk + t, e * block_e + i] = T.cast(o[i, t] * scale, out.dtype)
