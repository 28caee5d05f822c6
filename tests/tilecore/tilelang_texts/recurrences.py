# type: ignore
"""Linear attention and state spaces as written for TileLang: our own texts over its published surface."""

import tilelang
import tilelang.language as T

CHUNK = 64


@tilelang.jit(out_idx=[4], pass_configs={tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True})
def linear(B, S, H, DK, DV, dtype: T.dtype = T.float16, scale: float = None):
    factor, block = scale or DK**-0.5, 64

    @T.prim_func
    def main(
        Q: T.Tensor([B, S, H, DK], dtype),
        K: T.Tensor([B, S, H, DK], dtype),
        V: T.Tensor([B, S, H, DV], dtype),
        O: T.Tensor([B, S, H, DV], T.float32),
        last: T.Tensor([B, H, DK, DV], T.float32),
    ):
        with T.Kernel(tilelang.cdiv(DV, block), tilelang.cdiv(DK, block), B * H) as (x, y, bh):
            b, h = bh // H, bh % H
            q, k, v = (T.alloc_shared([CHUNK, block], dtype) for _ in range(3))
            state, held = T.alloc_fragment([block, block], T.float32), T.alloc_shared([block, block], dtype)
            s, p = T.alloc_fragment([CHUNK, CHUNK], T.float32), T.alloc_shared([CHUNK, CHUNK], dtype)
            o, out = T.alloc_fragment([CHUNK, block], T.float32), T.alloc_shared([CHUNK, block], T.float32)
            T.use_swizzle(10)
            T.clear(state)
            for n in T.Pipelined(0, tilelang.cdiv(S, CHUNK)):
                steps = slice(n * CHUNK, (n + 1) * CHUNK)
                for i, j in T.Parallel(CHUNK, block):
                    q[i, j] = Q[b, n * CHUNK + i, h, y * block + j] * factor
                T.copy(K[b, steps, h, y * block : (y + 1) * block], k)
                T.copy(V[b, steps, h, x * block : (x + 1) * block], v)
                T.gemm(q, k, s, clear_accum=True, transpose_B=True)
                for i, j in T.Parallel(CHUNK, CHUNK):
                    p[i, j] = T.if_then_else(i >= j, s[i, j], 0)
                T.gemm(p, v, o, clear_accum=True)
                T.copy(state, held)
                T.gemm(q, held, o)
                T.gemm(k, v, state, transpose_A=True)
                T.copy(o, out)
                T.atomic_add(O[b, steps, h, x * block : (x + 1) * block], out)
            T.copy(state, last[b, h, y * block : (y + 1) * block, x * block : (x + 1) * block])

    return main


@tilelang.jit(out_idx=3, pass_configs={"tl.disable_warp_specialized": True})
def retention(B, S, H, DK, DV, dtype: T.dtype = T.float16, scale: float = None):
    factor, block = scale or DK**-0.5, 64

    @T.prim_func
    def main(
        Q: T.Tensor([B, S, H, DK], dtype),
        K: T.Tensor([B, S, H, DK], dtype),
        V: T.Tensor([B, S, H, DV], dtype),
        O: T.Tensor([tilelang.cdiv(DK, block), B, S, H, DV], dtype),
    ):
        with T.Kernel(tilelang.cdiv(DV, block), tilelang.cdiv(DK, block), B * H) as (x, y, bh):
            b, h = bh // H, bh % H
            decay = T.alloc_var(T.float32)
            decay = T.log2(1 - T.exp2(-5.0 - 1.0 * h))
            q, k, v = (T.alloc_shared([CHUNK, block], dtype) for _ in range(3))
            state, held = T.alloc_fragment([block, block], T.float32), T.alloc_shared([block, block], dtype)
            s, p = T.alloc_fragment([CHUNK, CHUNK], T.float32), T.alloc_shared([CHUNK, CHUNK], dtype)
            o = T.alloc_fragment([CHUNK, block], T.float32)
            T.clear(state)
            for n in T.Pipelined(0, tilelang.cdiv(S, CHUNK)):
                steps = slice(n * CHUNK, (n + 1) * CHUNK)
                for i, j in T.Parallel(CHUNK, block):
                    q[i, j] = Q[b, n * CHUNK + i, h, y * block + j] * factor
                T.copy(K[b, steps, h, y * block : (y + 1) * block], k)
                T.copy(V[b, steps, h, x * block : (x + 1) * block], v)
                T.gemm(q, k, s, clear_accum=True, transpose_B=True)
                for i, j in T.Parallel(CHUNK, CHUNK):
                    p[i, j] = T.if_then_else(i >= j, s[i, j] * T.exp2((i - j) * decay), 0)
                T.copy(state, held)
                T.gemm(q, held, o, clear_accum=True)
                for i, j in T.Parallel(CHUNK, block):
                    o[i, j] *= T.exp2((i + 1) * decay)
                T.gemm(p, v, o)
                for i, j in T.Parallel(CHUNK, block):
                    v[i, j] = v[i, j] * T.exp2((CHUNK - i - 1) * decay)
                for i, j in T.Parallel(block, block):
                    state[i, j] *= T.exp2(CHUNK * decay)
                T.copy(o, O[y, b, steps, h, x * block : (x + 1) * block])
                T.gemm(k, v, state, transpose_A=True)

    return main


@tilelang.jit
def chunk_scan(cb, x, dt, dA_cumsum, C, prev_states, D, block_M=64, block_N=64, block_K=64, block_Dstate=128):
    batch, seqlen, chunk, groups, heads, width, dstate = T.const("batch, seqlen, chunk, groups, heads, width, dstate")
    chunks, dtype, log2e = T.ceildiv(seqlen, chunk), T.float16, 1.44269504
    cb: T.Tensor((batch, chunks, groups, chunk, chunk), dtype)
    x: T.Tensor((batch, seqlen, heads, width), dtype)
    dt: T.Tensor((batch, heads, chunks, chunk), dtype)
    dA_cumsum: T.Tensor((batch, heads, chunks, chunk), dtype)
    C: T.Tensor((batch, seqlen, groups, dstate), dtype)
    prev_states: T.Tensor((batch, chunks, heads, width, dstate), dtype)
    D: T.Tensor((heads), dtype)
    Output = T.empty((batch, seqlen, heads, width), dtype)
    columns = T.ceildiv(width, block_N)
    with T.Kernel(heads, T.ceildiv(chunk, block_M) * columns, batch * chunks, threads=128) as (h, tile, by):
        b, n, m, w = by % batch, by // batch, tile // columns * block_M, tile % columns * block_N
        start, group = n * chunk + m, h // (heads // groups)
        out, sums = T.alloc_fragment((block_M, block_N), T.float32), T.alloc_fragment((block_M,), T.float32)
        c, states = T.alloc_shared((block_M, block_Dstate), dtype), T.alloc_shared((block_N, block_Dstate), dtype)
        T.copy(dA_cumsum[b, h, n, m : m + block_M], sums)
        T.copy(C[b, start : start + block_M, group, 0:block_Dstate], c)
        T.copy(prev_states[b, n, h, w : w + block_N, 0:block_Dstate], states)
        T.gemm(c, states, out, transpose_B=True, clear_accum=True)
        for i, j in T.Parallel(block_M, block_N):
            out[i, j] *= T.exp2(sums[i] * log2e)
        scores, held = T.alloc_fragment((block_M, block_K), T.float32), T.alloc_fragment((block_M, block_K), dtype)
        inputs, later = T.alloc_shared((block_K, block_N), dtype), T.alloc_fragment((block_K), T.float32)
        steps = T.alloc_fragment((block_K), T.float32)
        for k in T.Pipelined(T.ceildiv(m + block_M, block_K), num_stages=2):
            T.copy(cb[b, n, group, m : m + block_M, k * block_K : (k + 1) * block_K], scores)
            T.copy(dA_cumsum[b, h, n, k * block_K : (k + 1) * block_K], later)
            T.copy(dt[b, h, n, k * block_K : (k + 1) * block_K], steps)
            for i, j in T.Parallel(block_M, block_K):
                decayed = scores[i, j] * T.exp2((sums[i] - later[j]) * log2e) * steps[j]
                held[i, j] = T.if_then_else(m + i >= k * block_K + j, decayed, 0)
            T.copy(x[b, n * chunk + k * block_K : n * chunk + (k + 1) * block_K, h, w : w + block_N], inputs)
            T.gemm(held, inputs, out)
        for i, j in T.Parallel(block_M, block_N):
            out[i, j] += x[b, start + i, h, w + j] * D[h]
        T.copy(out, Output[b, start : start + block_M, h, w : w + block_N])
    return Output


@tilelang.jit
def chunk_state(B, x, dt, dA_cumsum, block_M=64, block_N=64, block_K=64):
    batch, seqlen, chunk, groups, heads, width, dstate = T.const("batch, seqlen, chunk, groups, heads, width, dstate")
    chunks, dtype, log2e = T.ceildiv(seqlen, chunk), T.float16, 1.44269504
    B: T.Tensor((batch, seqlen, groups, dstate), dtype)
    x: T.Tensor((batch, seqlen, heads, width), dtype)
    dt: T.Tensor((batch, heads, chunks, chunk), dtype)
    dA_cumsum: T.Tensor((batch, heads, chunks, chunk), dtype)
    Output = T.empty((batch, chunks, heads, width, dstate), dtype)
    columns = T.ceildiv(dstate, block_N)
    with T.Kernel(heads, T.ceildiv(width, block_M) * columns, batch * chunks, threads=128) as (h, tile, by):
        b, n, m, d = by % batch, by // batch, tile // columns * block_M, tile % columns * block_N
        rows, turned = T.alloc_fragment((block_K, block_M), dtype), T.alloc_fragment((block_M, block_K), dtype)
        right, total = T.alloc_shared((block_K, block_N), dtype), T.alloc_fragment((block_M, block_N), T.float32)
        sums, steps = T.alloc_fragment((block_K), T.float32), T.alloc_fragment((block_K), T.float32)
        last = T.alloc_var(T.float32)
        last = T.cast(dA_cumsum[b, h, n, chunk - 1], T.float32)
        T.clear(total)
        for k in T.Pipelined(T.ceildiv(chunk, block_K), num_stages=2):
            at = n * chunk + k * block_K
            T.copy(x[b, at : at + block_K, h, m : m + block_M], rows)
            T.copy(dA_cumsum[b, h, n, k * block_K : (k + 1) * block_K], sums)
            T.copy(dt[b, h, n, k * block_K : (k + 1) * block_K], steps)
            for i, j in T.Parallel(block_M, block_K):
                turned[i, j] = rows[j, i] * T.exp2((last - sums[j]) * log2e) * steps[j]
            T.copy(B[b, at : at + block_K, h // (heads // groups), d : d + block_N], right)
            T.gemm(turned, right, total)
        T.copy(total, Output[b, n, h, m : m + block_M, d : d + block_N])
    return Output
