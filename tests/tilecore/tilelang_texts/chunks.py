# type: ignore
"""Parts of a gated delta rule as written for TileLang: our own texts over its published surface."""

import tilelang
import tilelang.language as T


@tilelang.jit(out_idx=[-1])
def scaled_products(B, S, H, DK, chunk_size=64, in_dtype=T.bfloat16, out_dtype=T.bfloat16, sum_dtype=T.float32,
                    use_g=True, block_S=64, block_DK=64, threads=256, num_stages=0):  # fmt: skip
    assert chunk_size == block_S

    @T.prim_func
    def kernel(
        K: T.Tensor((B, S, H, DK), dtype=in_dtype),
        Beta: T.Tensor((B, S, H), dtype=in_dtype),
        G: T.Tensor((B, S, H), dtype=sum_dtype),
        A: T.Tensor((B, S, H, block_S), dtype=out_dtype),
    ):
        with T.Kernel(T.ceildiv(S, block_S), B * H, threads=threads) as (n, bh):
            b, h = bh // H, bh % H
            k, scaled = T.alloc_shared((block_S, block_DK), in_dtype), T.alloc_fragment((block_S, block_DK), in_dtype)
            a, gate = T.alloc_fragment((block_S, block_S), sum_dtype), T.alloc_shared((block_S,), sum_dtype)
            T.clear(a)
            for i_k in T.Pipelined(T.ceildiv(DK, block_DK), num_stages=num_stages):
                T.copy(K[b, n * block_S : (n + 1) * block_S, h, i_k * block_DK : (i_k + 1) * block_DK], k)
                for i, j in T.Parallel(block_S, block_DK):
                    scaled[i, j] = k[i, j] * Beta[b, n * block_S + i, h]
                T.gemm(scaled, k, a, transpose_B=True)
            for i in T.Parallel(block_S):
                gate[i] = G[b, n * block_S + i, h] if use_g else 0.0
            for i, j in T.Parallel(block_S, block_S):
                apart = gate[i] - gate[j]
                a[i, j] = a[i, j] * T.exp(apart) if apart <= 0 and i > j else 0.0
            T.copy(a, A[b, n * block_S : (n + 1) * block_S, h, :])

    return kernel


@tilelang.jit(out_idx=[-1])
def outputs(B, S, H, DK, DV, in_dtype, out_dtype, sum_dtype, gate_dtype, chunk_size, scale, use_g, block_S=64,
            block_DK=64, block_DV=64, threads=256, num_stages=0):  # fmt: skip
    @T.prim_func
    def kernel(
        Q: T.Tensor((B, S, H, DK), dtype=in_dtype),
        K: T.Tensor((B, S, H, DK), dtype=in_dtype),
        V: T.Tensor((B, S, H, DV), dtype=in_dtype),
        HIDDEN: T.Tensor((B, S // block_S, H, DK, DV), dtype=in_dtype),
        G: T.Tensor((B, S, H), dtype=gate_dtype),
        O: T.Tensor((B, S, H, DV), dtype=out_dtype),
    ):
        with T.Kernel(T.ceildiv(DV, block_DV), T.ceildiv(S, block_S), B * H) as (i_v, n, bh):
            b, h, steps, columns = bh // H, bh % H, slice(n * block_S, (n + 1) * block_S), slice(None)
            columns = slice(i_v * block_DV, (i_v + 1) * block_DV)
            q, k = (T.alloc_shared((block_S, block_DK), in_dtype) for _ in range(2))
            v, state = T.alloc_shared((block_S, block_DV), in_dtype), T.alloc_shared((block_DK, block_DV), in_dtype)
            a, o = T.alloc_fragment((block_S, block_S), sum_dtype), T.alloc_fragment((block_S, block_DV), sum_dtype)
            weights, gate = T.alloc_shared((block_S, block_S), in_dtype), T.alloc_shared((block_S,), gate_dtype)
            T.clear(a)
            T.clear(o)
            for i_k in T.Pipelined(T.ceildiv(DK, block_DK), num_stages=num_stages):
                depth = slice(i_k * block_DK, (i_k + 1) * block_DK)
                T.copy(Q[b, steps, h, depth], q)
                T.copy(K[b, steps, h, depth], k)
                T.copy(HIDDEN[b, n, h, depth, columns], state)
                T.gemm(q, state, o)
                T.gemm(q, k, a, transpose_B=True)
            for i in T.Parallel(block_S):
                gate[i] = G[b, n * block_S + i, h]
            for i, j in T.Parallel(block_S, block_DV):
                o[i, j] *= T.exp(gate[i])
            for i, j in T.Parallel(block_S, block_S):
                if i < j or gate[i] > gate[j]:
                    weights[i, j] = 0
                    continue
                weights[i, j] = a[i, j] * T.exp(gate[i] - gate[j])
            T.copy(V[b, steps, h, columns], v)
            T.gemm(weights, v, o)
            for i, j in T.Parallel(block_S, block_DV):
                o[i, j] *= scale
            T.copy(o, O[b, steps, h, columns])

    return kernel


@tilelang.jit(out_idx=[-2, -1])
def weighted(B, S, H, DK, DV, in_dtype, out_dtype, gate_dtype, sum_dtype, chunk_size, block_S=64, block_DK=64,
             block_DV=64, threads=256, num_stages=0):  # fmt: skip
    @T.prim_func
    def kernel(
        K: T.Tensor((B, S, H, DK), dtype=in_dtype),
        V: T.Tensor((B, S, H, DV), dtype=in_dtype),
        Beta: T.Tensor((B, S, H), dtype=in_dtype),
        G: T.Tensor((B, S, H), dtype=gate_dtype),
        A: T.Tensor((B, S, H, block_S), dtype=out_dtype),
        W: T.Tensor((B, S, H, DK), dtype=out_dtype),
        U: T.Tensor((B, S, H, DV), dtype=out_dtype),
    ):
        with T.Kernel(T.ceildiv(S, block_S), B * H, threads=threads) as (n, bh):
            b, h, steps = bh // H, bh % H, slice(n * block_S, (n + 1) * block_S)
            a, scale = T.alloc_shared((block_S, block_S), out_dtype), T.alloc_shared((2, block_S), gate_dtype)
            T.copy(A[b, steps, h, :], a)
            for i in T.Parallel(block_S):
                scale[0, i] = T.cast(Beta[b, n * block_S + i, h], gate_dtype)
                scale[1, i] = scale[0, i] * T.exp(G[b, n * block_S + i, h])
            for source, result, size, block, row in ((V, U, DV, block_DV, 0), (K, W, DK, block_DK, 1)):
                x, y = T.alloc_shared((block_S, block), in_dtype), T.alloc_fragment((block_S, block), sum_dtype)
                for turn in T.Pipelined(T.ceildiv(size, block), num_stages=num_stages):
                    T.copy(source[b, steps, h, turn * block : (turn + 1) * block], x)
                    for i, j in T.Parallel(block_S, block):
                        x[i, j] = T.cast(x[i, j] * scale[row, i], in_dtype)
                    T.gemm(a, x, y, clear_accum=True)
                    T.copy(y, result[b, steps, h, turn * block : (turn + 1) * block])

    return kernel
