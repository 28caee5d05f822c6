"""The scan of Mamba-2 inside its chunks: what the steps of a chunk and the state before it give each of its steps."""

import math
from typing import Any

from tilecore import language as T
from tilecore.language import Handle

LOG2E = math.log2(math.e)


def chunk_scan(
    CB: Handle, X: Handle, dt: Handle, dA: Handle, C: Handle, states: Handle, D: Handle, out: Handle, *,
    block_m: Any = T.auto, block_k: Any = T.auto,
) -> None:  # fmt: skip
    """out[t] = e^dA[t] C[t] · states + Σ_{s ≤ t} CB[t, s] e^(dA[t] − dA[s]) dt[s] X[s] + D X[t] for a chunk's steps.

    CB[b, chunk, group, t, s], X and out[b, step, h, p], dt and dA[b, h, chunk, t] (dA summed from the chunk's start),
    C[b, step, group, n], states[b, chunk, h, p, n], D[h].
    """
    B, chunks, groups, L, _ = CB.shape
    H, P = X.shape[2:]
    N = C.shape[3]
    with T.Kernel(T.ceildiv(L, block_m), H, B * chunks) as (m, h, z):
        b, chunk, group = z // chunks, z % chunks, h // (H // groups)
        row, step = m * block_m, chunk * L
        c = T.alloc_shared((block_m, N), C.dtype)
        state = T.alloc_shared((P, N), states.dtype)
        here = T.alloc_shared((block_m,), dA.dtype)
        cb = T.alloc_shared((block_m, block_k), CB.dtype)
        x = T.alloc_shared((block_k, P), X.dtype)
        delta = T.alloc_shared((block_k,), dt.dtype)
        decay = T.alloc_shared((block_k,), dA.dtype)
        own = T.alloc_fragment((block_m,), T.float32)
        skip = T.alloc_fragment((block_m,), T.float32)
        weights = T.alloc_fragment((block_m, block_k), T.float32)
        w = T.alloc_shared((block_m, block_k), X.dtype)
        o = T.alloc_fragment((block_m, P), T.float32)
        T.copy(C[b, step + row : step + row + block_m, group, 0:N], c)
        T.copy(states[b, chunk, h, 0, 0], state)
        T.gemm(c, state, o, transpose_B=True, clear=True)
        T.copy(dA[b, h, chunk, row], here)
        for i in T.Parallel(block_m):
            own[i] = T.cast(here[i], T.float32)
            skip[i] = T.cast(D[h], T.float32)
        for i, p in T.Parallel(block_m, P):
            o[i, p] *= T.exp2(own[i] * LOG2E)
        for k in T.Pipelined(T.ceildiv(row + block_m, block_k)):
            T.copy(CB[b, chunk, group, row, k * block_k], cb)
            T.copy(dA[b, h, chunk, k * block_k], decay)
            T.copy(dt[b, h, chunk, k * block_k], delta)
            for i, j in T.Parallel(block_m, block_k):
                t, s = row + i, k * block_k + j
                weight = cb[i, j] * T.exp2((own[i] - decay[j]) * LOG2E) * delta[j]
                weights[i, j] = T.if_then_else(s < t, weight, T.if_then_else(s == t, weight + skip[i], 0.0))
            T.copy(weights, w)
            T.copy(X[b, step + k * block_k : step + (k + 1) * block_k, h, 0:P], x)
            T.gemm(w, x, o)
        for i, p in T.Parallel(block_m, P):
            out[b, step + row + i, h, p] = T.cast(o[i, p], out.dtype)
