"""Causal attention without softmax, o[t] = Σ_{s ≤ t} (q[t] · k[s]) v[s], in chunks that a state joins."""

from typing import Any

from tilecore import language as T
from tilecore.language import Handle
from tilecore.library.epilogue import Epilogue, Formula


def linear_attention(
    Q: Handle,
    K: Handle,
    V: Handle,
    outputs: tuple[Handle, ...],
    *,
    start: Formula,
    inclusive: bool,
    results: tuple[tuple[bool, Epilogue], ...],
    chunk: Any = T.auto,
    block_e: Any = T.auto,
) -> None:
    """Outputs of Q, K[g, t, d] and V[g, t, e]: `results` over (g, t, e) are programs of what a step reads out of the
    sum of `start` and all k vᵀ up to it (its own too if `inclusive`); those over (g, d, e), of the whole sum.

    Everything stands on its side: rows are columns of V, so that the state, S[e, d], stays in the registers in which it
    is summed and is multiplied from there.
    """
    groups, steps, D = Q.shape
    E = V.shape[2]
    with T.Kernel(T.ceildiv(E, block_e), groups) as (e, g):
        q = T.alloc_shared((chunk, D), Q.dtype)
        k = T.alloc_shared((chunk, D), K.dtype)
        v = T.alloc_shared((chunk, block_e), V.dtype)
        scores = T.alloc_fragment((chunk, chunk), T.float32)
        inside = T.alloc_shared((chunk, chunk), V.dtype)
        state = T.alloc_fragment((block_e, D), T.float32)
        before = T.alloc_shared((block_e, D), Q.dtype)
        o = T.alloc_fragment((block_e, chunk), T.float32)
        for i, d in T.Parallel(block_e, D):
            state[i, d] = start(g, d, e * block_e + i)
        for n in T.Pipelined(T.ceildiv(steps, chunk)):
            T.copy(Q[g, n * chunk, 0], q)
            T.copy(K[g, n * chunk, 0], k)
            T.gemm(k, q, scores, transpose_B=True, clear=True)
            T.copy(state, before)
            T.gemm(before, q, o, transpose_B=True, clear=True)
            for s, t in T.Parallel(chunk, chunk):
                scores[s, t] = T.if_then_else(s <= t if inclusive else s < t, scores[s, t], 0.0)
            T.copy(scores, inside)
            T.copy(V[g, n * chunk, e * block_e], v)
            T.gemm(v, inside, o, transpose_A=True)
            T.gemm(v, k, state, transpose_A=True)
            for target, (stepwise, result) in zip(outputs, results, strict=True):
                if stepwise:
                    for i, t in T.Parallel(block_e, chunk):
                        step, column = n * chunk + t, e * block_e + i
                        target[g, step, column] = result((o[i, t],), g, step, column)
        for target, (stepwise, result) in zip(outputs, results, strict=True):
            if not stepwise:
                for i, d in T.Parallel(block_e, D):
                    target[g, d, e * block_e + i] = result((state[i, d],), g, d, e * block_e + i)
