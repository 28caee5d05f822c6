# type: ignore
"""Programs over rows as written for TileLang, for `test_tilelang_examples.py`: our own texts over its surface."""

import tilelang
import tilelang.language as T


@tilelang.jit
def add(A, B, block_m, block_n, in_dtype, out_dtype, threads):
    M, N = T.const("M, N")
    A: T.Tensor((M, N), in_dtype)
    B: T.Tensor((M, N), in_dtype)
    C = T.empty((M, N), out_dtype)
    with T.Kernel(T.ceildiv(N, block_n), T.ceildiv(M, block_m), threads=threads) as (bx, by):
        a, b = T.alloc_shared((block_m, block_n), in_dtype), T.alloc_shared((block_m, block_n), in_dtype)
        c = T.alloc_fragment((block_m, block_n), out_dtype)
        T.copy(A[by * block_m, bx * block_n], a)
        T.copy(B[by * block_m, bx * block_n], b)
        for i, j in T.Parallel(block_m, block_n):
            c[i, j] = a[i, j] + b[i, j]
        T.copy(c, C[by * block_m, bx * block_n])
    return C


@tilelang.jit(pass_configs={"tl.disable_tma_lower": True})
def rms_norm(A, block_m):
    M, N = T.const("M, N")
    A: T.Tensor((M, N), T.float)
    B = T.empty((M, N), T.float)
    with T.Kernel(T.ceildiv(M, block_m), threads=128) as bx:
        x, squares = T.alloc_fragment((block_m, N), T.float), T.alloc_fragment((block_m, N), T.float)
        scale = T.alloc_fragment((block_m,), T.float)
        T.copy(A[bx * block_m : (bx + 1) * block_m, :], x)
        for i, j in T.Parallel(block_m, N):
            squares[i, j] = x[i, j] * x[i, j]
        T.reduce_sum(squares, scale, dim=1)
        for i in T.Parallel(block_m):
            scale[i] = T.rsqrt(scale[i] / N + 1e-12)
        for i, j in T.Parallel(block_m, N):
            x[i, j] *= scale[i]
        T.copy(x, B[bx * block_m : (bx + 1) * block_m, :])
    return B


@tilelang.jit(pass_configs={"tl.disable_tma_lower": True})
def rms_norm_in_steps(A, block_m, block_k):
    M, N = T.const("M, N")
    A: T.Tensor((M, N), T.float)
    B = T.empty((M, N), T.float)
    with T.Kernel(T.ceildiv(M, block_m), threads=128) as bx:
        x, squares = T.alloc_shared((block_m, block_k), T.float), T.alloc_fragment((block_m, block_k), T.float)
        scale, steps = T.alloc_fragment((block_m,), T.float), T.ceildiv(N, block_k)
        T.clear(squares)
        for k in T.Serial(steps):
            T.copy(A[bx * block_m, k * block_k], x)
            for i, j in T.Parallel(block_m, block_k):
                squares[i, j] += x[i, j] * x[i, j]
        T.reduce_sum(squares, scale, dim=1)
        for i in T.Parallel(block_m):
            scale[i] = T.rsqrt(scale[i] / N + 1e-12)
        for k in T.Serial(steps):  # the last columns are in the cache still
            T.copy(A[bx * block_m, (steps - 1 - k) * block_k], x)
            for i, j in T.Parallel(block_m, block_k):
                x[i, j] *= scale[i]
            T.copy(x, B[bx * block_m, (steps - 1 - k) * block_k])
    return B


@tilelang.jit(out_idx=[-3, -2, -1])
def layer_norm(N, D, eps=1e-5, block_m=1, threads=256, in_dtype="bfloat16", out_dtype="bfloat16"):
    @T.prim_func
    def main(
        X: T.Tensor((N, D), in_dtype),
        gamma: T.Tensor((D,), in_dtype),
        beta: T.Tensor((D,), in_dtype),
        Y: T.Tensor((N, D), out_dtype),
        Mean: T.Tensor((N,), "float"),
        Rstd: T.Tensor((N,), "float"),
    ):
        with T.Kernel(T.ceildiv(N, block_m), threads=threads) as bx:
            held, x = T.alloc_shared((block_m, D), in_dtype), T.alloc_fragment((block_m, D), "float")
            g, b = T.alloc_shared((D,), in_dtype), T.alloc_shared((D,), in_dtype)
            squares, total = T.alloc_fragment((block_m, D), "float"), T.alloc_fragment((block_m,), "float")
            mean, rstd = T.alloc_fragment((block_m,), "float"), T.alloc_fragment((block_m,), "float")
            T.copy(X[bx * block_m, 0], held)
            T.copy(gamma, g)
            T.copy(beta, b)
            for i, j in T.Parallel(block_m, D):
                x[i, j] = T.Cast("float", held[i, j])
            share = T.float32(1.0) / T.Cast("float", D)
            T.reduce_sum(x, total, dim=1)
            for i in T.Parallel(block_m):
                mean[i] = total[i] * share
            for i, j in T.Parallel(block_m, D):
                squares[i, j] = (x[i, j] - mean[i]) * (x[i, j] - mean[i])
            T.reduce_sum(squares, total, dim=1)
            for i in T.Parallel(block_m):
                rstd[i] = T.rsqrt(total[i] * share + T.Cast("float", eps))
                Mean[bx * block_m + i] = mean[i]
                Rstd[bx * block_m + i] = rstd[i]
            for i, j in T.Parallel(block_m, D):
                norm = (x[i, j] - mean[i]) * rstd[i]
                held[i, j] = T.Cast(out_dtype, norm * T.Cast("float", g[j]) + T.Cast("float", b[j]))
            T.copy(held, Y[bx * block_m, 0])

    return main


@tilelang.jit(out_idx=[-3])
def layer_norm_backward(N, D, block_m=32, threads=256, in_dtype="bfloat16"):
    @T.prim_func
    def main(
        DY: T.Tensor((N, D), in_dtype),
        X: T.Tensor((N, D), in_dtype),
        gamma: T.Tensor((D,), in_dtype),
        Mean: T.Tensor((N,), "float"),
        Rstd: T.Tensor((N,), "float"),
        DX: T.Tensor((N, D), in_dtype),
        DGamma: T.Tensor((D,), "float"),
        DBeta: T.Tensor((D,), "float"),
    ):
        with T.Kernel(T.ceildiv(N, block_m), threads=threads) as bx:
            dy, x = T.alloc_shared((1, D), in_dtype), T.alloc_shared((1, D), in_dtype)
            scaled, hat, both = (T.alloc_fragment((1, D), "float") for _ in range(3))
            sums, products = T.alloc_fragment((1,), "float"), T.alloc_fragment((1,), "float")
            by_gamma, by_beta = T.alloc_fragment((D,), "float"), T.alloc_fragment((D,), "float")
            g = T.alloc_shared((D,), in_dtype)
            T.copy(gamma, g)
            T.clear(by_gamma)
            T.clear(by_beta)
            for k in T.serial(block_m):
                row = bx * block_m + k
                T.copy(DY[row, 0], dy)
                T.copy(X[row, 0], x)
                mean, rstd = Mean[row], Rstd[row]
                for i, j in T.Parallel(1, D):
                    hat[i, j] = (T.Cast("float", x[i, j]) - mean) * rstd
                    scaled[i, j] = T.Cast("float", dy[i, j]) * T.Cast("float", g[j])
                    both[i, j] = scaled[i, j] * hat[i, j]
                T.reduce_sum(scaled, sums, dim=1)
                T.reduce_sum(both, products, dim=1)
                for i, j in T.Parallel(1, D):
                    slope = scaled[i, j] - sums[0] / D - hat[i, j] * products[0] / D
                    x[i, j] = T.Cast(in_dtype, rstd * slope)
                    by_gamma[j] += T.Cast("float", dy[i, j]) * hat[i, j]
                    by_beta[j] += T.Cast("float", dy[i, j])
                T.copy(x, DX[row, 0])
            for j in T.Parallel(D):
                T.atomic_add(DGamma[j], by_gamma[j], memory_order="relaxed")
                T.atomic_add(DBeta[j], by_beta[j], memory_order="relaxed")

    return main


M, N = T.dynamic("M"), T.dynamic("N")


@tilelang.jit
def softmax(X, BLOCK_M=1, BLOCK_N=8192, dtype: T.dtype = T.float16):
    X: T.Tensor([M, N], dtype)
    Y = T.empty([M, N], dtype)
    log2e = 1.44269504
    with T.Kernel(T.ceildiv(M, BLOCK_M), threads=128) as m:
        x, top = T.alloc_fragment([BLOCK_M, BLOCK_N], dtype), T.alloc_fragment([BLOCK_M], dtype)
        powers = T.alloc_fragment([BLOCK_M, BLOCK_N], T.float32)
        total, lse = T.alloc_fragment([BLOCK_M], T.float32), T.alloc_fragment([BLOCK_M], T.float32)
        T.fill(lse, -T.infinity(T.float32))
        for n in T.Pipelined(T.ceildiv(N, BLOCK_N)):
            T.copy(X[m * BLOCK_M, n * BLOCK_N], x)
            for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                x[i, j] = T.if_then_else(n * BLOCK_N + j < N, x[i, j], -T.infinity(dtype))
            T.reduce_max(x, top, dim=1, clear=True)
            for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                powers[i, j] = T.exp2(x[i, j] * log2e - top[i] * log2e)
            T.reduce_sum(powers, total, dim=1, clear=True)
            for i in T.Parallel(BLOCK_M):
                lse[i] = top[i] * log2e + T.log2(T.exp2(lse[i] - top[i] * log2e) + total[i])
        for n in T.Pipelined(T.ceildiv(N, BLOCK_N)):
            T.copy(X[m * BLOCK_M, n * BLOCK_N], x)
            for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                x[i, j] = T.exp2(x[i, j] * log2e - lse[i])
            T.copy(x, Y[m * BLOCK_M, n * BLOCK_N])
    return Y


@tilelang.jit
def largest(logits, count, block_m, threads=128):
    M, N = T.const("M, N")
    logits: T.Tensor([M, N], T.float32)
    gates = T.empty([M, count], T.float32)
    indices = T.empty([M, count], T.int32)
    with T.Kernel(T.ceildiv(M, block_m), threads=threads) as bx:
        left, top = T.alloc_fragment([block_m, N], dtype=T.float32), T.alloc_fragment([block_m], dtype=T.float32)
        place, at = T.alloc_fragment([block_m, N], T.int32), T.alloc_fragment([block_m], T.int32)
        T.copy(logits[bx * block_m, 0], left)
        for k in T.serial(count):
            T.reduce_max(left, top, dim=1, clear=True)
            for i, j in T.Parallel(block_m, N):
                place[i, j] = T.if_then_else(top[i] == left[i, j], j, -1)
            T.reduce_max(place, at, dim=1, clear=True)
            for i, j in T.Parallel(block_m, N):
                left[i, j] = T.if_then_else(j == at[i], -10000.0, left[i, j])
            for i in T.Parallel(block_m):
                gates[bx * block_m + i, k] = top[i]
                indices[bx * block_m + i, k] = at[i]
    return gates, indices


@tilelang.jit(out_idx=[-1], pass_configs={tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True})
def running_sums(
    B, S, H, chunk_size=64, is_varlen=False, head_first=False, reverse=False, input_dtype=T.float16,
    output_dtype=T.float32, block_S=64, threads=256, use_fragment=False,
):  # fmt: skip
    shape = (B, H, S) if head_first else (B, S, H)

    @T.prim_func
    def kernel(G: T.Tensor(shape, dtype=input_dtype), Sums: T.Tensor(shape, dtype=output_dtype)):
        with T.Kernel(T.ceildiv(S, block_S), B * H, threads=threads) as (bs, bbh):
            b, h = bbh // H, bbh % H
            tile = (T.alloc_fragment if use_fragment else T.alloc_shared)((1, block_S), dtype=output_dtype)
            if head_first:
                T.copy(G[b, h, bs * block_S : (bs + 1) * block_S], tile)
            else:
                T.copy(G[b, bs * block_S : (bs + 1) * block_S, h], tile)
            T.cumsum(tile, dim=1, reverse=reverse)
            if head_first:
                T.copy(tile, Sums[b, h, bs * block_S : (bs + 1) * block_S])
            else:
                T.copy(tile, Sums[b, bs * block_S : (bs + 1) * block_S, h])

    return kernel


@tilelang.jit(pass_configs={tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True})
def mixed_streams(a, b, c, d, x, hc: int, hidden: int, n_thr: int = 128, h_blk: int = 16) -> tilelang.JITKernel:
    n = T.dynamic("num_tokens")
    a: T.Tensor((n, hc, hc), T.float32)
    b: T.Tensor((n, hc, hidden), T.bfloat16)
    c: T.Tensor((n, hc), T.float32)
    d: T.Tensor((n, hidden), T.bfloat16)
    x: T.Tensor((n, hc, hidden), T.bfloat16)
    with T.Kernel(n, threads=n_thr) as token:
        mix, own = T.alloc_fragment((hc, hc), T.float32), T.alloc_fragment(hc, T.float32)
        streams, out = T.alloc_fragment((hc, h_blk), T.float32), T.alloc_fragment((hc, h_blk), T.float32)
        T.copy(a[token, 0, 0], mix)
        T.copy(c[token, 0], own)
        for block in T.Pipelined(T.ceildiv(hidden, h_blk), num_stages=2):
            T.copy(b[token, 0, block * h_blk], streams)
            for i, j in T.Parallel(hc, h_blk):
                out[i, j] = own[i] * T.cast(d[token, block * h_blk + j], T.float32)
                for s in T.serial(hc):
                    out[i, j] += mix[s, i] * streams[s, j]
            T.copy(out, x[token, 0, block * h_blk])
