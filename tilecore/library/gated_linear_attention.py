"""Linear attention whose state decays, o[t] = Σ_{s ≤ t} d[s+1] … d[t] w[s] (q[t] · k[s]) v[s], in chunks."""

import math
from typing import Any

from tilecore import language as T
from tilecore.language import Handle
from tilecore.library.epilogue import Epilogue, Formula

LOG2E = math.log2(math.e)
LEAST = -150.0  # of a decay's logarithm: 2^-150 is 0 in float32, and differences of sums stay finite


def gated_linear_attention(
    Q: Handle, K: Handle, V: Handle, outputs: tuple[Handle, ...], *, start: Formula, decay: Formula, weight: Formula,
    results: tuple[tuple[bool, Epilogue], ...], chunk: Any = T.auto, block_e: Any = T.auto,
) -> None:  # fmt: skip
    """As `linear_attention`, where `decay` over (g, t) is the logarithm to base 2 of what the state is multiplied by
    before step t is added, and `weight` over (g, t) what the step counts. Factors are differences of such sums.
    """
    groups, steps, D = Q.shape
    E = V.shape[2]
    with T.Kernel(T.ceildiv(E, block_e), groups) as (e, g):
        q = T.alloc_shared((chunk, D), Q.dtype)
        k = T.alloc_shared((chunk, D), K.dtype)
        v = T.alloc_shared((chunk, block_e), V.dtype)
        sums = T.alloc_shared((chunk,), T.float32)
        own = T.alloc_shared((chunk,), T.float32)
        scores = T.alloc_fragment((chunk, chunk), T.float32)
        inside = T.alloc_shared((chunk, chunk), V.dtype)
        added = T.alloc_shared((block_e, chunk), V.dtype)
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
            for t in T.Parallel(chunk):
                step = n * chunk + t
                sums[t] = T.if_then_else(step < steps, T.max(decay(g, step), LEAST), 0.0)
            T.cumsum(sums)
            for t in T.Parallel(chunk):
                own[t] = T.if_then_else(n * chunk + t < steps, weight(g, n * chunk + t), 0.0)
            T.copy(V[g, n * chunk, e * block_e], v)
            for i, s in T.Parallel(block_e, chunk):
                added[i, s] = T.cast(v[s, i] * (T.exp2(sums[chunk - 1] - sums[s]) * own[s]), V.dtype)
            for i, d in T.Parallel(block_e, D):
                state[i, d] *= T.exp2(sums[chunk - 1])
            for s, t in T.Parallel(chunk, chunk):
                kept = scores[s, t] * (T.exp2(sums[t] - sums[s]) * own[s])
                scores[s, t] = T.if_then_else(s <= t, kept, 0.0)
            T.copy(scores, inside)
            for i, t in T.Parallel(block_e, chunk):
                o[i, t] *= T.exp2(sums[t])
            T.gemm(v, inside, o, transpose_A=True)
            T.gemm(added, k, state)
            for target, (stepwise, result) in zip(outputs, results, strict=True):
                if stepwise:
                    for i, t in T.Parallel(block_e, chunk):
                        step, column = n * chunk + t, e * block_e + i
                        target[g, step, column] = result((o[i, t],), g, step, column)
        for target, (stepwise, result) in zip(outputs, results, strict=True):
            if not stepwise:
                for i, d in T.Parallel(block_e, D):
                    target[g, d, e * block_e + i] = result((state[i, d],), g, d, e * block_e + i)
