# type: ignore
"""Attention as written for TileLang, for `test_tilelang_examples.py`: our own texts over its published surface."""

import tilelang
import tilelang.language as T

LOG2E = 1.44269504


@T.macro
def soften(scores, weights, out, top, before, rescale, part, total, scale, rows, keys, dim):
    """One step of the online softmax: `scores` become `weights`, and what was summed before is rescaled."""
    T.copy(top, before)
    T.reduce_max(scores, top, dim=1, clear=False)
    for i in T.Parallel(rows):
        rescale[i] = T.exp2(before[i] * scale - top[i] * scale)
    for i, j in T.Parallel(rows, keys):
        scores[i, j] = T.exp2(scores[i, j] * scale - top[i] * scale)
    T.reduce_sum(scores, part, dim=1)
    for i in T.Parallel(rows):
        total[i] = total[i] * rescale[i] + part[i]
    T.copy(scores, weights)
    for i, j in T.Parallel(rows, dim):
        out[i, j] *= rescale[i]


@tilelang.jit(out_idx=[3], pass_configs={tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True})
def heads_first(batch, heads, seq_q, seq_kv, dim, is_causal, block_M=64, block_N=64, num_stages=1, threads=128):
    scale, past, dtype = dim**-0.5 * LOG2E, seq_kv - seq_q, T.float16

    @T.prim_func
    def main(
        Q: T.Tensor([batch, heads, seq_q, dim], dtype),
        K: T.Tensor([batch, heads, seq_kv, dim], dtype),
        V: T.Tensor([batch, heads, seq_kv, dim], dtype),
        Output: T.Tensor([batch, heads, seq_q, dim], dtype),
    ):
        with T.Kernel(T.ceildiv(seq_q, block_M), heads, batch, threads=threads) as (bx, h, b):
            q, out = T.alloc_shared([block_M, dim], dtype), T.alloc_fragment([block_M, dim], T.float32)
            k, v = T.alloc_shared([block_N, dim], dtype), T.alloc_shared([block_N, dim], dtype)
            s, p = T.alloc_fragment([block_M, block_N], T.float32), T.alloc_fragment([block_M, block_N], dtype)
            top, before, rescale, part, total = (T.alloc_fragment([block_M], T.float32) for _ in range(5))
            T.copy(Q[b, h, bx * block_M : (bx + 1) * block_M, :], q)
            T.fill(out, 0)
            T.fill(total, 0)
            T.fill(top, -T.infinity(T.float32))
            steps = T.ceildiv(seq_kv, block_N)
            if is_causal:
                steps = T.min(steps, T.ceildiv((bx + 1) * block_M + past, block_N))
            for n in T.Pipelined(steps, num_stages=num_stages):
                T.copy(K[b, h, n * block_N : (n + 1) * block_N, :], k)
                for i, j in T.Parallel(block_M, block_N):
                    hidden = n * block_N + j >= seq_kv
                    if is_causal:
                        hidden = hidden or bx * block_M + i + past < n * block_N + j
                    s[i, j] = T.if_then_else(hidden, -T.infinity(T.float32), 0)
                T.gemm(q, k, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                soften(s, p, out, top, before, rescale, part, total, scale, block_M, block_N, dim)
                T.copy(V[b, h, n * block_N : (n + 1) * block_N, :], v)
                T.gemm(p, v, out, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(block_M, dim):
                out[i, j] /= total[i]
            T.copy(out, Output[b, h, bx * block_M : (bx + 1) * block_M, :])

    return main


@tilelang.jit(out_idx=[3], pass_configs={tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True})
def heads_last(batch, heads, seq_len, dim, is_causal, groups=1, block_M=64, block_N=64, num_stages=1, threads=128):
    scale, dtype = dim**-0.5 * LOG2E, T.float16

    @T.prim_func
    def main(
        Q: T.Tensor([batch, seq_len, heads, dim], dtype),
        K: T.Tensor([batch, seq_len, heads // groups, dim], dtype),
        V: T.Tensor([batch, seq_len, heads // groups, dim], dtype),
        Output: T.Tensor([batch, seq_len, heads, dim], dtype),
    ):
        with T.Kernel(T.ceildiv(seq_len, block_M), heads, batch, threads=threads) as (bx, h, b):
            q, out = T.alloc_shared([block_M, dim], dtype), T.alloc_fragment([block_M, dim], T.float32)
            k, v = T.alloc_shared([block_N, dim], dtype), T.alloc_shared([block_N, dim], dtype)
            s, p = T.alloc_fragment([block_M, block_N], T.float32), T.alloc_fragment([block_M, block_N], dtype)
            top, before, rescale, part, total = (T.alloc_fragment([block_M], T.float32) for _ in range(5))
            T.copy(Q[b, bx * block_M : (bx + 1) * block_M, h, :], q)
            T.clear(out)
            T.clear(total)
            T.fill(top, -T.infinity(T.float32))
            steps = T.ceildiv((bx + 1) * block_M if is_causal else seq_len, block_N)
            for n in T.Pipelined(steps, num_stages=num_stages):
                T.copy(K[b, n * block_N : (n + 1) * block_N, h // groups, :], k)
                if is_causal:
                    for i, j in T.Parallel(block_M, block_N):
                        s[i, j] = T.if_then_else(bx * block_M + i >= n * block_N + j, 0, -T.infinity(T.float32))
                else:
                    for i, j in T.Parallel(block_M, block_N):
                        s[i, j] = T.if_then_else(n * block_N + j >= seq_len, -T.infinity(T.float32), 0)
                T.gemm(q, k, s, transpose_B=True)
                soften(s, p, out, top, before, rescale, part, total, scale, block_M, block_N, dim)
                T.copy(V[b, n * block_N : (n + 1) * block_N, h // groups, :], v)
                T.gemm(p, v, out)
            for i, j in T.Parallel(block_M, dim):
                out[i, j] /= total[i]
            T.copy(out, Output[b, bx * block_M : (bx + 1) * block_M, h, :])

    return main


@tilelang.jit(out_idx=[6])
def sequences(batch_size, groups, UQ, UKV, heads, dim, is_causal, block_M=64, block_N=64, num_stages=1, threads=128):
    scale, dtype = dim**-0.5 * LOG2E, T.float16

    @T.prim_func
    def main(
        Q: T.Tensor([UQ, heads, dim], dtype),
        K: T.Tensor([UKV, heads // groups, dim], dtype),
        V: T.Tensor([UKV, heads // groups, dim], dtype),
        cu_q: T.Tensor([batch_size + 1], T.int32),
        cu_k: T.Tensor([batch_size + 1], T.int32),
        longest: T.int32,
        Output: T.Tensor([UQ, heads, dim], dtype),
    ):
        with T.Kernel(T.ceildiv(longest, block_M), heads, batch_size, threads=threads) as (bx, h, b):
            q, out = T.alloc_shared([block_M, dim], dtype), T.alloc_fragment([block_M, dim], T.float32)
            k, v = T.alloc_shared([block_N, dim], dtype), T.alloc_shared([block_N, dim], dtype)
            s, p = T.alloc_fragment([block_M, block_N], T.float32), T.alloc_fragment([block_M, block_N], dtype)
            top, before, rescale, part, total = (T.alloc_fragment([block_M], T.float32) for _ in range(5))
            first_q, first_k = cu_q[b], cu_k[b]
            queries, keys = cu_q[b + 1] - first_q, cu_k[b + 1] - first_k
            T.copy(Q[first_q + bx * block_M : first_q + bx * block_M + block_M, h, :], q)
            T.fill(out, 0)
            T.fill(total, 0)
            T.fill(top, -T.infinity(T.float32))
            reach = T.min(keys, keys - queries + (bx + 1) * block_M) if is_causal else keys
            for n in T.Pipelined(T.ceildiv(reach, block_N), num_stages=num_stages):
                T.copy(K[first_k + n * block_N : first_k + n * block_N + block_N, h // groups, :], k)
                for i, j in T.Parallel(block_M, block_N):
                    hidden = n * block_N + j >= keys or bx * block_M + i >= queries
                    if is_causal:
                        hidden = hidden or bx * block_M + i + keys - queries < n * block_N + j
                    s[i, j] = T.if_then_else(hidden, -1e9, 0)
                T.gemm(q, k, s, transpose_B=True)
                soften(s, p, out, top, before, rescale, part, total, scale, block_M, block_N, dim)
                T.copy(V[first_k + n * block_N : first_k + n * block_N + block_N, h // groups, :], v)
                T.gemm(p, v, out)
            for i, d in T.Parallel(block_M, dim):
                if bx * block_M + i < queries:
                    Output[first_q + bx * block_M + i, h, d] = out[i, d] / total[i]

    return main


@tilelang.jit(out_idx=[3])
def with_sinks(batch, heads, seq_q, seq_kv, dim, window_size=None, block_M=64, block_N=64, dtype=T.float16):
    scale, past = dim**-0.5 * LOG2E, seq_kv - seq_q

    @T.prim_func
    def main(
        Q: T.Tensor([batch, heads, seq_q, dim], dtype),
        K: T.Tensor([batch, heads, seq_kv, dim], dtype),
        V: T.Tensor([batch, heads, seq_kv, dim], dtype),
        Output: T.Tensor([batch, heads, seq_q, dim], dtype),
        Sinks: T.Tensor([heads], dtype),
    ):
        with T.Kernel(T.ceildiv(seq_q, block_M), heads, batch, threads=128) as (bx, h, b):
            q, out = T.alloc_shared([block_M, dim], dtype), T.alloc_fragment([block_M, dim], T.float32)
            k, v = T.alloc_shared([block_N, dim], dtype), T.alloc_shared([block_N, dim], dtype)
            s, p = T.alloc_fragment([block_M, block_N], T.float32), T.alloc_fragment([block_M, block_N], dtype)
            top, before, rescale, part, total = (T.alloc_fragment([block_M], T.float32) for _ in range(5))
            T.copy(Q[b, h, bx * block_M, 0], q)
            T.fill(out, 0)
            T.fill(total, 0)
            T.fill(top, -T.infinity(T.float32))
            stop = T.min(T.ceildiv(seq_kv, block_N), T.ceildiv((bx + 1) * block_M + past, block_N))
            start = T.alloc_var("int32")
            if window_size is not None:
                start = T.max(0, (bx * block_M + past - window_size) // block_N)
            else:
                start = 0
            for n in T.Pipelined(start, stop, num_stages=1):
                T.copy(K[b, h, n * block_N, 0], k)
                for i, j in T.Parallel(block_M, block_N):
                    query, key = bx * block_M + i + past, n * block_N + j
                    seen = query >= key
                    if window_size is not None:
                        seen = query >= key and key > query - window_size
                    s[i, j] = T.if_then_else(seen, 0, -T.infinity(T.float32))
                T.gemm(q, k, s, transpose_B=True)
                T.copy(top, before)
                T.reduce_max(s, top, dim=1, clear=False)
                for i in T.Parallel(block_M):
                    top[i] = T.if_then_else(top[i] == -T.infinity(T.float32), 0, top[i])
                    rescale[i] = T.exp2(before[i] * scale - top[i] * scale)
                for i, j in T.Parallel(block_M, block_N):
                    s[i, j] = T.exp2(s[i, j] * scale - top[i] * scale)
                T.reduce_sum(s, part, dim=1)
                T.copy(s, p)
                for i in T.Parallel(block_M):
                    total[i] = total[i] * rescale[i] + part[i]
                for i, j in T.Parallel(block_M, dim):
                    out[i, j] *= rescale[i]
                T.copy(V[b, h, n * block_N, 0], v)
                T.gemm(p, v, out)
            for i in T.Parallel(block_M):
                total[i] += T.exp2(Sinks[h] * LOG2E - top[i] * scale)
            for i, j in T.Parallel(block_M, dim):
                out[i, j] /= total[i]
            T.copy(out, Output[b, h, bx * block_M, 0])

    return main


@tilelang.jit(out_idx=[4])
def decode(batch, heads, groups, seqlen_kv, dim, block_N, block_H, num_split, num_stages, threads):
    scale, dtype, shared = dim**-0.5 * LOG2E, T.float16, heads // groups
    rows, each = min(block_H, shared), seqlen_kv // num_split

    @T.prim_func
    def main(
        Q: T.Tensor([batch, heads, dim], dtype),
        K: T.Tensor([batch, seqlen_kv, groups, dim], dtype),
        V: T.Tensor([batch, seqlen_kv, groups, dim], dtype),
        mask: T.Tensor([batch, seqlen_kv, groups], "uint8"),
        Output: T.Tensor([batch, heads, dim], dtype),
    ):
        lse = T.alloc_global([batch, heads, num_split], dtype)
        partial = T.alloc_global([batch, heads, num_split, dim], dtype)
        with T.Kernel(batch, heads // rows, num_split, threads=threads) as (b, h, z):
            q, out = T.alloc_shared([block_H, dim], dtype), T.alloc_fragment([block_H, dim], T.float32)
            k, v = T.alloc_shared([block_N, dim], dtype), T.alloc_shared([block_N, dim], dtype)
            s, p = T.alloc_fragment([block_H, block_N], T.float32), T.alloc_fragment([block_H, block_N], dtype)
            top, before, rescale, part, total = (T.alloc_fragment([block_H], T.float32) for _ in range(5))
            seen, group = T.alloc_fragment([block_N], "uint8"), h // (shared // rows)
            T.copy(Q[b, h * rows : h * rows + block_H, :], q)
            T.fill(out, 0)
            T.fill(total, 0)
            T.fill(top, -T.infinity(T.float32))
            for n in T.Pipelined(T.ceildiv(each, block_N), num_stages=num_stages):
                start = z * each + n * block_N
                T.copy(K[b, start : start + block_N, group, :], k)
                T.copy(mask[b, start : start + block_N, group], seen)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(block_H, block_N):
                    valid = (seen[j] != 0) & (n * block_N + j < each)
                    s[i, j] = T.if_then_else(valid, s[i, j], -T.infinity(T.float32))
                soften(s, p, out, top, before, rescale, part, total, scale, block_H, block_N, dim)
                T.copy(V[b, start : start + block_N, group, :], v)
                T.gemm(p, v, out)
            for i, j in T.Parallel(block_H, dim):
                out[i, j] /= total[i]
            for i in T.Parallel(block_H):
                total[i] = T.log2(total[i]) + top[i] * scale
            for i in T.Parallel(block_H):
                if i < rows:
                    lse[b, h * rows + i, z] = total[i]
            final = T.alloc_shared([rows, dim], dtype)
            T.copy(out[:rows, :], final)
            T.copy(final, partial[b, h * rows : (h + 1) * rows, z, :])
        with T.Kernel(heads, batch, threads=128) as (h, b):
            best, both = T.alloc_var(T.float32, init=-T.infinity(T.float32)), T.alloc_var(T.float32, init=0.0)
            sums = T.alloc_fragment([dim], T.float32)
            T.clear(sums)
            for z in T.serial(num_split):
                best = T.max(best, T.cast(lse[b, h, z], T.float32))
            for z in T.serial(num_split):
                weight = T.alloc_var(T.float32)
                weight = T.exp2(lse[b, h, z] - best)
                both += weight
                for i in T.Parallel(dim):
                    sums[i] += partial[b, h, z, i] * weight
            for i in T.Parallel(dim):
                Output[b, h, i] = sums[i] / both

    return main


@tilelang.jit(out_idx=[3])
def two_grids(batch, heads, seqlen_q, seqlen_kv, dim, is_causal, block_M, block_N, parts=4):
    scale, dtype, each = dim**-0.5 * LOG2E, T.float16, seqlen_kv // parts

    @T.prim_func
    def main(
        Q: T.Tensor([batch, seqlen_q, heads, dim], dtype),
        K: T.Tensor([batch, seqlen_kv, heads, dim], dtype),
        V: T.Tensor([batch, seqlen_kv, heads, dim], dtype),
        Output: T.Tensor([batch, seqlen_q, heads, dim], dtype),
    ):
        lse = T.alloc_global([batch, heads, parts, seqlen_q], dtype)
        partial = T.alloc_global([batch, seqlen_q, heads, parts, dim], dtype)
        with T.Kernel(T.ceildiv(seqlen_q, block_M), heads * batch, parts, threads=128) as (x, y, z):
            h, b = y % heads, y // heads
            q, out = T.alloc_shared([block_M, dim], dtype), T.alloc_fragment([block_M, dim], T.float32)
            k, v = T.alloc_shared([block_N, dim], dtype), T.alloc_shared([block_N, dim], dtype)
            s, p = T.alloc_fragment([block_M, block_N], T.float32), T.alloc_fragment([block_M, block_N], dtype)
            top, before, rescale, part, total = (T.alloc_fragment([block_M], T.float32) for _ in range(5))
            T.copy(Q[b, x * block_M : (x + 1) * block_M, h, :], q)
            T.fill(out, 0)
            T.fill(total, 0)
            T.fill(top, -T.infinity(T.float32))
            for n in T.Pipelined(T.ceildiv(each, block_N), num_stages=2):
                keys = slice(z * each + n * block_N, z * each + (n + 1) * block_N)
                T.copy(K[b, keys, h, :], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                soften(s, p, out, top, before, rescale, part, total, scale, block_M, block_N, dim)
                T.copy(V[b, keys, h, :], v)
                T.gemm(p, v, out)
            for i, j in T.Parallel(block_M, dim):
                out[i, j] /= total[i]
            for i in T.Parallel(block_M):
                total[i] = T.log2(total[i]) + top[i] * scale
            T.copy(total, lse[b, h, z, x * block_M : (x + 1) * block_M])
            T.copy(out, partial[b, x * block_M : (x + 1) * block_M, h, z, :])
        with T.Kernel(T.ceildiv(seqlen_q, block_M), heads, batch, threads=128) as (x, h, b):
            found, best = T.alloc_fragment([parts, block_M], dtype), T.alloc_fragment([block_M], T.float32)
            piece, sums = T.alloc_fragment([block_M, dim], dtype), T.alloc_fragment([block_M, dim], T.float32)
            total, weight = T.alloc_fragment([block_M], T.float32), T.alloc_fragment([block_M], T.float32)
            T.clear(total)
            T.clear(sums)
            T.copy(lse[b, h, :, x * block_M : (x + 1) * block_M], found)
            T.reduce_max(found, best, dim=0, clear=True)
            for n in T.Pipelined(parts):
                T.copy(found[n, :], weight)
                for i in T.Parallel(block_M):
                    total[i] += T.exp2(weight[i] - best[i])
            for n in T.Pipelined(parts, num_stages=2):
                T.copy(partial[b, x * block_M : (x + 1) * block_M, h, n, :], piece)
                for i in T.Parallel(block_M):
                    weight[i] = T.exp2(found[n, i] - best[i]) / total[i]
                for i, j in T.Parallel(block_M, dim):
                    sums[i, j] += piece[i, j] * weight[i]
            T.copy(sums, Output[b, x * block_M : (x + 1) * block_M, h, :], disable_tma=True)

    return main


@tilelang.jit(out_idx=[-2, -1])
def decode_with_maxima(
    batch, heads, k_heads, max_seqlen_kv, total_seqlen_k, dim, has_sink, block_N=64, block_H=64, num_split=1,
    num_stages=1, threads=128,
):  # fmt: skip
    """One query per sequence; beside its output, the largest weight of every block of keys."""
    scale, dtype, parts = dim**-0.5 * LOG2E, T.float16, -(-max_seqlen_kv // block_N)
    shared = min(block_H, heads // k_heads)

    @T.prim_func
    def main(
        Q: T.Tensor([batch, heads, dim], dtype),
        K: T.Tensor([total_seqlen_k, k_heads, dim], dtype),
        V: T.Tensor([total_seqlen_k, k_heads, dim], dtype),
        starts: T.Tensor([batch + 1], T.int32),
        sinks: T.Tensor([heads], T.float32),
        Output: T.Tensor([batch, heads, dim], dtype),
        S: T.Tensor([batch, heads, parts], dtype),
    ):
        with T.Kernel(batch, heads // shared, num_split, threads=threads) as (b, h, _):
            q, out = T.alloc_shared([block_H, dim], dtype), T.alloc_fragment([block_H, dim], T.float32)
            k, v = T.alloc_shared([block_N, dim], dtype), T.alloc_shared([block_N, dim], dtype)
            s, p = T.alloc_fragment([block_H, block_N], T.float32), T.alloc_fragment([block_H, block_N], dtype)
            top, before, rescale, part, total = (T.alloc_fragment([block_H], T.float32) for _ in range(5))
            tops, final = T.alloc_shared([block_H, parts], T.float32), T.alloc_shared([shared, dim], dtype)
            group, start, length = h // (heads // k_heads // shared), starts[b], starts[b + 1] - starts[b]
            T.copy(Q[b, h * shared : h * shared + block_H, :], q)
            T.clear(out)
            T.clear(total)
            T.fill(top, -T.infinity(T.float32))
            T.fill(tops, -T.infinity(T.float32))
            for n in T.Pipelined(T.ceildiv(length, block_N), num_stages=num_stages):
                T.copy(K[start + n * block_N : start + (n + 1) * block_N, group, :], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(block_H, block_N):
                    s[i, j] = T.if_then_else(n * block_N + j < length, s[i, j], -T.infinity(T.float32))
                T.reduce_max(s, part, dim=1)
                T.copy(part, tops[:, n])
                soften(s, p, out, top, before, rescale, part, total, scale, block_H, block_N, dim)
                T.copy(V[start + n * block_N : start + (n + 1) * block_N, group, :], v)
                T.gemm(p, v, out)
            if has_sink:
                for i in T.Parallel(block_H):
                    total[i] += sinks[h * shared + i]
            for i, j in T.Parallel(block_H, dim):
                out[i, j] /= total[i]
            for i, n in T.Parallel(block_H, parts):
                tops[i, n] = T.exp2((tops[i, n] - top[i]) * scale) / total[i]
            T.copy(out[:shared, :], final)
            T.copy(final, Output[b, h * shared : (h + 1) * shared, :])
            T.copy(tops[:shared, :], S[b, h * shared : (h + 1) * shared, :])

    return main


@tilelang.jit
def chosen_blocks(Q, K, V, BlockIndices, dim, is_causal, scale=None, block_size=64, groups=1, selected_blocks=16):
    """Every query reads the blocks of keys that its indices name; a head of keys serves `groups` heads of queries."""
    batch, heads, seq_len = T.const("batch, heads, seq_len")
    kv, width, rate = heads // groups, tilelang.math.next_power_of_2(dim), (scale or dim**-0.5) * LOG2E
    Q: T.Tensor([batch, seq_len, heads, dim], T.float16)
    K: T.Tensor([batch, seq_len, kv, dim], T.float16)
    V: T.Tensor([batch, seq_len, kv, dim], T.float16)
    BlockIndices: T.Tensor([batch, seq_len, kv, selected_blocks], T.int32)
    Output = T.empty([batch, seq_len, heads, dim], T.float16)
    with T.Kernel(seq_len, batch * kv, threads=32) as (t, bh):
        b, h = bh // kv, bh % kv
        q, out = T.alloc_shared([groups, width], T.float16), T.alloc_fragment([groups, width], T.float32)
        k, v = T.alloc_shared([block_size, width], T.float16), T.alloc_shared([block_size, width], T.float16)
        s = T.alloc_fragment([groups, block_size], T.float32)
        p = T.alloc_fragment([groups, block_size], T.float16)
        top, before, rescale, part, total = (T.alloc_fragment([groups], T.float32) for _ in range(5))
        T.copy(Q[b, t, h * groups : (h + 1) * groups, :], q)
        T.clear(out)
        T.clear(total)
        T.fill(top, -T.infinity(T.float32))
        for n in T.Pipelined(selected_blocks, num_stages=2):
            start = BlockIndices[b, t, h, n] * block_size
            if start <= t and start >= 0:
                T.copy(K[b, start : start + block_size, h, :], k)
                for i, j in T.Parallel(groups, block_size):
                    s[i, j] = T.if_then_else(is_causal and t < start + j, -T.infinity(s.dtype), 0)
                T.gemm(q, k, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                soften(s, p, out, top, before, rescale, part, total, rate, groups, block_size, width)
                T.copy(V[b, start : start + block_size, h, :], v)
                T.gemm(p, v, out, policy=T.GemmWarpPolicy.FullRow)
        for i, j in T.Parallel(groups, width):
            out[i, j] /= total[i]
        T.copy(out, Output[b, t, h * groups : (h + 1) * groups, :])
    return Output
