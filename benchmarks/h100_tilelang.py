# ruff: noqa: ANN001, ANN201, ANN202, E741
# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false
"""TileLang's side of the comparison: kernels as its users write them, with the tiles that its examples take on Hopper.

Comes in: arrays of a case by name. Goes out: the result, in the array that the case has for it. Kernels are compiled
when they are first asked for, and kept on disk by TileLang.
"""

from functools import cache

import tilelang
import tilelang.language as T
import torch

LOG2E = 1.4426950408889634
F32 = "float32"
FAST = {tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}
TYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float8_e4m3fn: "float8_e4m3fn"}


@cache
@tilelang.jit
def _product(M, N, K, block_m, block_n, block_k, stages, threads, dtype, scaled):
    @T.prim_func
    def main(
        A: T.Tensor((M, K), dtype), B: T.Tensor((N, K), dtype), left: T.Tensor((1,), F32),
        right: T.Tensor((1,), F32), C: T.Tensor((M, N), "bfloat16"),
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(N, block_n), T.ceildiv(M, block_m), threads=threads) as (bx, by):
            a = T.alloc_shared((block_m, block_k), dtype)
            b = T.alloc_shared((block_n, block_k), dtype)
            c = T.alloc_fragment((block_m, block_n), F32)
            T.use_swizzle(10)
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, block_k), num_stages=stages):
                T.copy(A[by * block_m, k * block_k], a)
                T.copy(B[bx * block_n, k * block_k], b)
                T.gemm(a, b, c, transpose_B=True)
            if scaled:
                for i, j in T.Parallel(block_m, block_n):
                    c[i, j] *= left[0] * right[0]
            T.copy(c, C[by * block_m, bx * block_n])

    return main


@cache
def _one(device):
    return torch.ones(1, device=device)


def product(x, w, out, scales=None):
    """out = x · wᵀ, times two scales where there are any."""
    (rows, depth), columns = x.shape, w.shape[0]
    size = x.element_size()
    wide = rows > 256 and columns > 128 * 132  # enough tiles of 256 columns
    block_m, block_n = (128, 256) if rows >= 4096 or wide else (128, 128) if rows >= 512 else (64, 64)
    threads = 256 if block_m == 128 else 128
    left, right = scales or (_one(x.device),) * 2
    stages = 3 if block_n == 256 else 4
    kernel = _product(rows, columns, depth, block_m, block_n, 128 // size, stages, threads, TYPES[x.dtype], size == 1)
    kernel(x, w, left, right, out)
    return out


@cache
@tilelang.jit(pass_configs=FAST)
def _attention(batch, heads, length, dim, causal, block_m, block_n, stages, threads, dtype):
    shape, scale = (batch, heads, length, dim), dim**-0.5 * LOG2E

    @T.prim_func
    def main(
        Q: T.Tensor(shape, dtype), K: T.Tensor(shape, dtype), V: T.Tensor(shape, dtype), O: T.Tensor(shape, dtype)
    ):
        with T.Kernel(T.ceildiv(length, block_m), heads, batch, threads=threads) as (bx, by, bz):
            q = T.alloc_shared((block_m, dim), dtype)
            k = T.alloc_shared((block_n, dim), dtype)
            v = T.alloc_shared((block_n, dim), dtype)
            o_shared = T.alloc_shared((block_m, dim), dtype)
            s = T.alloc_fragment((block_m, block_n), F32)
            p = T.alloc_fragment((block_m, block_n), dtype)
            o = T.alloc_fragment((block_m, dim), F32)
            top = T.alloc_fragment((block_m,), F32)
            before = T.alloc_fragment((block_m,), F32)
            factor = T.alloc_fragment((block_m,), F32)
            part = T.alloc_fragment((block_m,), F32)
            total = T.alloc_fragment((block_m,), F32)
            T.copy(Q[bz, by, bx * block_m : (bx + 1) * block_m, :], q)
            T.fill(o, 0)
            T.fill(total, 0)
            T.fill(top, -T.infinity(F32))
            last = T.ceildiv((bx + 1) * block_m, block_n) if causal else T.ceildiv(length, block_n)
            for n in T.Pipelined(last, num_stages=stages):
                T.copy(K[bz, by, n * block_n : (n + 1) * block_n, :], k)
                if causal:
                    for i, j in T.Parallel(block_m, block_n):
                        s[i, j] = T.if_then_else(bx * block_m + i >= n * block_n + j, 0, -T.infinity(F32))
                else:
                    T.clear(s)
                T.gemm(q, k, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(V[bz, by, n * block_n : (n + 1) * block_n, :], v)
                T.copy(top, before)
                T.fill(top, -T.infinity(F32))
                T.reduce_max(s, top, dim=1, clear=False)
                for i in T.Parallel(block_m):
                    top[i] = T.max(top[i], before[i])
                for i in T.Parallel(block_m):
                    factor[i] = T.exp2(before[i] * scale - top[i] * scale)
                for i, j in T.Parallel(block_m, block_n):
                    s[i, j] = T.exp2(s[i, j] * scale - top[i] * scale)
                T.reduce_sum(s, part, dim=1)
                for i in T.Parallel(block_m):
                    total[i] = total[i] * factor[i] + part[i]
                T.copy(s, p)
                for i, j in T.Parallel(block_m, dim):
                    o[i, j] *= factor[i]
                T.gemm(p, v, o, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(block_m, dim):
                o[i, j] /= total[i]
            T.copy(o, o_shared)
            T.copy(o_shared, O[bz, by, bx * block_m : (bx + 1) * block_m, :])

    return main


def attention(q, k, v, out, causal):
    """Self-attention of [B, H, S, D]."""
    batch, heads, length, width = q.shape
    _attention(batch, heads, length, width, causal, 128, 128, 2, 256, TYPES[q.dtype])(q, k, v, out)
    return out


@cache
@tilelang.jit(pass_configs=FAST)
def _decode(batch, shared, group, keys, dim, splits, block_n, stages, threads):
    heads, rows, scale, dtype = shared * group, 64, dim**-0.5 * LOG2E, "float16"
    each = keys // splits

    @T.prim_func
    def main(
        Q: T.Tensor((batch, heads, dim), dtype), K: T.Tensor((batch, shared, keys, dim), dtype),
        V: T.Tensor((batch, shared, keys, dim), dtype), logs: T.Tensor((batch, heads, splits), F32),
        parts: T.Tensor((batch, heads, splits, dim), F32), O: T.Tensor((batch, heads, dim), dtype),
    ):  # fmt: skip
        with T.Kernel(batch, shared, splits, threads=threads) as (bx, by, bz):
            q = T.alloc_shared((rows, dim), dtype)
            k = T.alloc_shared((block_n, dim), dtype)
            v = T.alloc_shared((block_n, dim), dtype)
            s = T.alloc_fragment((rows, block_n), F32)
            p = T.alloc_fragment((rows, block_n), dtype)
            o = T.alloc_fragment((rows, dim), F32)
            top = T.alloc_fragment((rows,), F32)
            before = T.alloc_fragment((rows,), F32)
            factor = T.alloc_fragment((rows,), F32)
            part = T.alloc_fragment((rows,), F32)
            total = T.alloc_fragment((rows,), F32)
            for i, j in T.Parallel(rows, dim):
                q[i, j] = T.if_then_else(i < group, Q[bx, by * group + T.min(i, group - 1), j], 0)
            T.fill(o, 0)
            T.fill(total, 0)
            T.fill(top, -T.infinity(F32))
            for n in T.Pipelined(T.ceildiv(each, block_n), num_stages=stages):
                T.copy(K[bx, by, bz * each + n * block_n : bz * each + (n + 1) * block_n, :], k)
                T.clear(s)
                T.gemm(q, k, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(V[bx, by, bz * each + n * block_n : bz * each + (n + 1) * block_n, :], v)
                T.copy(top, before)
                T.reduce_max(s, top, dim=1, clear=False)
                for i in T.Parallel(rows):
                    factor[i] = T.exp2(before[i] * scale - top[i] * scale)
                for i, j in T.Parallel(rows, block_n):
                    s[i, j] = T.exp2(s[i, j] * scale - top[i] * scale)
                T.reduce_sum(s, part, dim=1)
                for i in T.Parallel(rows):
                    total[i] = total[i] * factor[i] + part[i]
                T.copy(s, p)
                for i, j in T.Parallel(rows, dim):
                    o[i, j] *= factor[i]
                T.gemm(p, v, o, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(rows, dim):
                o[i, j] /= total[i]
            for i in T.Parallel(rows):
                if i < group:
                    logs[bx, by * group + i, bz] = T.log2(total[i]) + top[i] * scale
            for i, j in T.Parallel(rows, dim):
                if i < group:
                    parts[bx, by * group + i, bz, j] = o[i, j]
        with T.Kernel(heads, batch, threads=128) as (by, bz):
            own = T.alloc_fragment((dim,), F32)
            most = T.alloc_local((1,), F32)
            weight = T.alloc_local((1,), F32)
            sum_ = T.alloc_local((1,), F32)
            T.clear(own)
            most[0] = -T.infinity(F32)
            sum_[0] = 0
            for n in T.serial(splits):
                most[0] = T.max(most[0], logs[bz, by, n])
            for n in T.serial(splits):
                weight[0] = T.exp2(logs[bz, by, n] - most[0])
                sum_[0] += weight[0]
                for j in T.Parallel(dim):
                    own[j] += parts[bz, by, n, j] * weight[0]
            for j in T.Parallel(dim):
                O[bz, by, j] = own[j] / sum_[0]

    return main


def decode(q, k, v, out):
    """One query per head of [B, H, 1, D] over [B, H / 4, K, D]: parts of the keys, then their sum."""
    batch, shared, keys, width = k.shape
    heads, splits = q.shape[1], 1
    while batch * shared * splits < 132 and keys // (2 * splits) >= 512:
        splits *= 2
    logs = torch.empty(batch, heads, splits, device=q.device)
    parts = torch.empty(batch, heads, splits, width, device=q.device)
    kernel = _decode(batch, shared, heads // shared, keys, width, splits, 128, 2, 128)
    kernel(q[:, :, 0], k, v, logs, parts, out[:, :, 0])
    return out


@cache
@tilelang.jit(pass_configs=FAST)
def _latent(batch, heads, keys, dim, rotary, scale, block_h, block_n, stages, threads):
    dtype = "float16"

    @T.prim_func
    def main(
        Q: T.Tensor((batch, heads, dim + rotary), dtype), C: T.Tensor((batch, keys, dim + rotary), dtype),
        O: T.Tensor((batch, heads, dim), dtype),
    ):  # fmt: skip
        with T.Kernel(heads // block_h, batch, threads=threads) as (bx, by):
            q = T.alloc_shared((block_h, dim), dtype)
            q_rotary = T.alloc_shared((block_h, rotary), dtype)
            c = T.alloc_shared((block_n, dim), dtype)
            c_rotary = T.alloc_shared((block_n, rotary), dtype)
            p = T.alloc_shared((block_h, block_n), dtype)
            o_shared = T.alloc_shared((block_h, dim), dtype)
            s = T.alloc_fragment((block_h, block_n), F32)
            o = T.alloc_fragment((block_h, dim), F32)
            top = T.alloc_fragment((block_h,), F32)
            before = T.alloc_fragment((block_h,), F32)
            factor = T.alloc_fragment((block_h,), F32)
            part = T.alloc_fragment((block_h,), F32)
            total = T.alloc_fragment((block_h,), F32)
            T.use_swizzle(10)
            T.copy(Q[by, bx * block_h : (bx + 1) * block_h, 0:dim], q)
            T.copy(Q[by, bx * block_h : (bx + 1) * block_h, dim : dim + rotary], q_rotary)
            T.fill(o, 0)
            T.fill(total, 0)
            T.fill(top, -T.infinity(F32))
            for n in T.Pipelined(T.ceildiv(keys, block_n), num_stages=stages):
                T.copy(C[by, n * block_n : (n + 1) * block_n, 0:dim], c)
                T.copy(C[by, n * block_n : (n + 1) * block_n, dim : dim + rotary], c_rotary)
                T.gemm(q, c, s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol, clear_accum=True)
                T.gemm(q_rotary, c_rotary, s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.copy(top, before)
                T.reduce_max(s, top, dim=1, clear=False)
                for i in T.Parallel(block_h):
                    factor[i] = T.exp2(before[i] * scale - top[i] * scale)
                for i, j in T.Parallel(block_h, block_n):
                    s[i, j] = T.exp2(s[i, j] * scale - top[i] * scale)
                T.reduce_sum(s, part, dim=1)
                T.copy(s, p)
                for i in T.Parallel(block_h):
                    total[i] = total[i] * factor[i] + part[i]
                for i, j in T.Parallel(block_h, dim):
                    o[i, j] *= factor[i]
                T.gemm(p, c, o, policy=T.GemmWarpPolicy.FullCol)
            for i, j in T.Parallel(block_h, dim):
                o[i, j] /= total[i]
            T.copy(o, o_shared)
            T.copy(o_shared, O[by, bx * block_h : (bx + 1) * block_h, :])

    return main


def latent(q, c, out, scale):
    """One query per head of [B, H, 1, D + R] over one cache [B, K, D + R]; values are its first D."""
    batch, heads, _, width = q.shape
    deep = out.shape[3]
    kernel = _latent(batch, heads, c.shape[1], deep, width - deep, scale * LOG2E, 64, 64, 2, 256)
    kernel(q[:, :, 0], c, out[:, :, 0])
    return out


@cache
@tilelang.jit
def _levels(M, N, K, bits, group, block_m, block_n, stages, threads):
    each, dtype, block_k = 8 // bits, "bfloat16", 128

    @T.prim_func
    def main(
        X: T.Tensor((M, K), dtype), W: T.Tensor((N, K // each), "uint8"), scale: T.Tensor((N, K // group), dtype),
        zero: T.Tensor((N, K // group // each), "uint8"), Y: T.Tensor((M, N), dtype),
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(N, block_n), T.ceildiv(M, block_m), threads=threads) as (bx, by):
            x = T.alloc_shared((block_m, block_k), dtype)
            packed = T.alloc_shared((block_n, block_k // each), "uint8")
            level = T.alloc_fragment((block_n, block_k // each), "uint8")
            real = T.alloc_fragment((block_n, block_k), dtype)
            weight = T.alloc_shared((block_n, block_k), dtype)
            factor = T.alloc_fragment((block_n,), F32)
            nought = T.alloc_fragment((block_n,), F32)
            y = T.alloc_fragment((block_n, block_m), F32)
            T.clear(y)
            for k in T.Pipelined(K // block_k, num_stages=stages):
                T.copy(X[by * block_m, k * block_k], x)
                T.copy(W[bx * block_n, k * block_k // each], packed)
                T.copy(packed, level)
                for i in T.Parallel(block_n):
                    factor[i] = T.cast(scale[bx * block_n + i, k], F32)
                    nought[i] = T.cast(
                        (zero[bx * block_n + i, k // each] >> T.cast(k % each * bits, "uint8")) & ((1 << bits) - 1), F32
                    )
                for i, j in T.Parallel(block_n, block_k):
                    real[i, j] = T.cast(
                        (T.cast((level[i, j // each] >> T.cast(j % each * bits, "uint8")) & ((1 << bits) - 1), F32)
                         - nought[i]) * factor[i], dtype)  # fmt: skip
                T.copy(real, weight)
                T.gemm(weight, x, y, transpose_B=True)
            for i, j in T.Parallel(block_n, block_m):
                if by * block_m + j < M:
                    Y[by * block_m + j, bx * block_n + i] = T.cast(y[i, j], dtype)

    return main


def levels(x, packed, scale, zero, out, bits, group):
    """x [M, K] by weights [N, K] of `bits` bits, with a scale and a packed zero point per `group` (128) of K."""
    (rows, depth), columns = x.shape, scale.shape[0]
    block_m, block_n, threads = (16, 64, 128) if rows <= 16 else (64, 128, 128) if rows <= 64 else (128, 128, 256)
    kernel = _levels(rows, columns, depth, bits, group, block_m, block_n, 3, threads)
    kernel(x, packed.view(columns, -1), scale, zero, out)
    return out


@cache
@tilelang.jit
def _linear(batch, steps, heads, dim, width, scale, block_e, stages, threads):
    chunk, dtype = 64, "float16"

    @T.prim_func
    def main(
        Q: T.Tensor((batch, steps, heads, dim), dtype), K: T.Tensor((batch, steps, heads, dim), dtype),
        V: T.Tensor((batch, steps, heads, width), dtype), O: T.Tensor((batch, steps, heads, width), dtype),
    ):  # fmt: skip
        with T.Kernel(width // block_e, batch * heads, threads=threads) as (bx, by):
            q = T.alloc_shared((chunk, dim), dtype)
            k = T.alloc_shared((chunk, dim), dtype)
            v = T.alloc_shared((chunk, block_e), dtype)
            state = T.alloc_fragment((dim, block_e), F32)
            state_shared = T.alloc_shared((dim, block_e), dtype)
            s = T.alloc_fragment((chunk, chunk), F32)
            s_shared = T.alloc_shared((chunk, chunk), dtype)
            o = T.alloc_fragment((chunk, block_e), F32)
            o_shared = T.alloc_shared((chunk, block_e), dtype)
            b, h = by // heads, by % heads
            T.clear(state)
            for n in T.Pipelined(steps // chunk, num_stages=stages):
                T.copy(Q[b, n * chunk : (n + 1) * chunk, h, 0:dim], q)
                T.copy(K[b, n * chunk : (n + 1) * chunk, h, 0:dim], k)
                T.copy(V[b, n * chunk : (n + 1) * chunk, h, bx * block_e : (bx + 1) * block_e], v)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                T.copy(state, state_shared)
                T.gemm(q, state_shared, o, clear_accum=True)
                for i, j in T.Parallel(chunk, chunk):
                    s_shared[i, j] = T.if_then_else(i >= j, s[i, j], 0)
                T.gemm(s_shared, v, o)
                for i, j in T.Parallel(chunk, block_e):
                    o[i, j] *= scale
                T.copy(o, o_shared)
                T.copy(o_shared, O[b, n * chunk : (n + 1) * chunk, h, bx * block_e : (bx + 1) * block_e])
                T.gemm(k, v, state, transpose_A=True)

    return main


def linear(q, k, v, out, scale):
    """Causal linear attention of [B, S, H, D]."""
    batch, steps, heads, depth = q.shape
    _linear(batch, steps, heads, depth, v.shape[3], scale, 64, 2, 128)(q, k, v, out)
    return out


@cache
@tilelang.jit(pass_configs=FAST)
def _chunk_scan(batch, steps, heads, width, deep, length, block_m, block_k, stages, threads):
    chunks, dtype = steps // length, "float16"

    @T.prim_func
    def main(
        CB: T.Tensor((batch, chunks, 1, length, length), dtype), X: T.Tensor((batch, steps, heads, width), dtype),
        DT: T.Tensor((batch, heads, chunks, length), dtype), DA: T.Tensor((batch, heads, chunks, length), dtype),
        C: T.Tensor((batch, steps, 1, deep), dtype), S: T.Tensor((batch, chunks, heads, width, deep), dtype),
        D: T.Tensor((heads,), dtype), O: T.Tensor((batch, steps, heads, width), dtype),
    ):  # fmt: skip
        with T.Kernel(heads, length // block_m, batch * chunks, threads=threads) as (h, m, bz):
            c = T.alloc_shared((block_m, deep), dtype)
            state = T.alloc_shared((width, deep), dtype)
            cb_shared = T.alloc_shared((block_m, block_k), dtype)
            cb = T.alloc_fragment((block_m, block_k), dtype)
            x = T.alloc_shared((block_k, width), dtype)
            own_x = T.alloc_fragment((block_m, width), F32)
            decay_shared = T.alloc_shared((block_k,), dtype)
            weight_shared = T.alloc_shared((block_k,), dtype)
            decay = T.alloc_fragment((block_k,), F32)
            weight = T.alloc_fragment((block_k,), F32)
            own = T.alloc_fragment((block_m,), F32)
            o = T.alloc_fragment((block_m, width), F32)
            o_shared = T.alloc_shared((block_m, width), dtype)
            b, n = bz // chunks, bz % chunks
            first = n * length + m * block_m
            for i in T.Parallel(block_m):
                own[i] = T.cast(DA[b, h, n, m * block_m + i], F32) * LOG2E
            T.copy(C[b, first : first + block_m, 0, 0:deep], c)
            T.copy(S[b, n, h, 0:width, 0:deep], state)
            T.gemm(c, state, o, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(block_m, width):
                o[i, j] *= T.exp2(own[i])
            for k in T.Pipelined(T.ceildiv((m + 1) * block_m, block_k), num_stages=stages):
                T.copy(CB[b, n, 0, m * block_m : (m + 1) * block_m, k * block_k : (k + 1) * block_k], cb_shared)
                T.copy(cb_shared, cb)
                T.copy(DA[b, h, n, k * block_k : (k + 1) * block_k], decay_shared)
                T.copy(decay_shared, decay)
                T.copy(DT[b, h, n, k * block_k : (k + 1) * block_k], weight_shared)
                T.copy(weight_shared, weight)
                for i, j in T.Parallel(block_m, block_k):
                    cb[i, j] = T.if_then_else(
                        m * block_m + i >= k * block_k + j,
                        T.cast(cb[i, j], F32) * T.exp2(T.min(own[i] - decay[j] * LOG2E, 0.0)) * weight[j], 0,
                    )  # fmt: skip
                T.copy(X[b, n * length + k * block_k : n * length + (k + 1) * block_k, h, 0:width], x)
                T.gemm(cb, x, o)
            for i, j in T.Parallel(block_m, width):
                own_x[i, j] = T.cast(X[b, first + i, h, j], F32)
            for i, j in T.Parallel(block_m, width):
                o[i, j] += own_x[i, j] * T.cast(D[h], F32)
            T.copy(o, o_shared)
            T.copy(o_shared, O[b, first : first + block_m, h, 0:width])

    return main


def chunk_scan(cb, x, dt, da, c, states, d, out):
    """Mamba-2's scan inside chunks, one group."""
    batch, steps, heads, width = x.shape
    kernel = _chunk_scan(batch, steps, heads, width, c.shape[3], cb.shape[3], 64, 64, 2, 128)
    kernel(cb, x, dt, da, c, states, d, out)
    return out


@cache
@tilelang.jit(pass_configs=FAST)
def _normed(rows, columns, threads):
    @T.prim_func
    def main(
        X: T.Tensor((rows, columns), "bfloat16"), W: T.Tensor((columns,), "bfloat16"),
        Y: T.Tensor((rows, columns), "bfloat16"),
    ):  # fmt: skip
        with T.Kernel(rows, threads=threads) as bx:
            x = T.alloc_fragment((1, columns), F32)
            squares = T.alloc_fragment((1, columns), F32)
            total = T.alloc_fragment((1,), F32)
            for i, j in T.Parallel(1, columns):
                x[i, j] = T.cast(X[bx, j], F32)
            for i, j in T.Parallel(1, columns):
                squares[i, j] = x[i, j] * x[i, j]
            T.reduce_sum(squares, total, dim=1)
            for i, j in T.Parallel(1, columns):
                Y[bx, j] = T.cast(x[i, j] * T.rsqrt(total[i] / columns + 1e-5) * T.cast(W[j], F32), "bfloat16")

    return main


@cache
@tilelang.jit(pass_configs=FAST)
def _softmax(rows, columns, threads):
    @T.prim_func
    def main(X: T.Tensor((rows, columns), "bfloat16"), Y: T.Tensor((rows, columns), "bfloat16")):
        with T.Kernel(rows, threads=threads) as bx:
            x = T.alloc_fragment((1, columns), F32)
            top = T.alloc_fragment((1,), F32)
            total = T.alloc_fragment((1,), F32)
            for i, j in T.Parallel(1, columns):
                x[i, j] = T.cast(X[bx, j], F32)
            T.reduce_max(x, top, dim=1)
            for i, j in T.Parallel(1, columns):
                x[i, j] = T.exp2((x[i, j] - top[i]) * LOG2E)
            T.reduce_sum(x, total, dim=1)
            for i, j in T.Parallel(1, columns):
                Y[bx, j] = T.cast(x[i, j] / total[i], "bfloat16")

    return main


def rmsnorm(x, weight, out):
    """Rows of bf16."""
    _normed(*x.shape, 256)(x, weight, out)
    return out


def softmax(x, out):
    """Rows of bf16."""
    _softmax(*x.shape, 256)(x, out)
    return out
