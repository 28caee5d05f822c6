# type: ignore
"""Products as written for TileLang, for `test_tilelang_examples.py`: our own texts over its published surface."""

import tilelang
import tilelang.language as T


@tilelang.jit
def clipped_matmul(A, B, block_m: int, block_n: int, block_k: int):
    M, N, K = T.const("M, N, K")
    A: T.Tensor((M, K), T.float16)
    B: T.Tensor((K, N), T.float16)
    C = T.empty((M, N), T.float16)
    with T.Kernel(T.ceildiv(N, block_n), T.ceildiv(M, block_m), threads=128) as (bx, by):
        left = T.alloc_shared((block_m, block_k), T.float16)
        right = T.alloc_shared((block_k, block_n), T.float16)
        total = T.alloc_fragment((block_m, block_n), T.float32)
        T.use_swizzle(panel_size=8, enable=True)
        T.clear(total)
        for ko in T.Pipelined(T.ceildiv(K, block_k), num_stages=3):
            T.copy(A[by * block_m, ko * block_k], left)
            T.copy(B[ko * block_k, bx * block_n], right)
            T.gemm(left, right, total)
        for i, j in T.Parallel(block_m, block_n):
            total[i, j] = T.max(total[i, j], 0)
        T.copy(total, C[by * block_m, bx * block_n])
    return C


@tilelang.jit
def matmul(A, B, block_m, block_n, block_k, dtype=T.float16, accum_dtype=T.float32):
    M, N, K = T.const("M, N, K")
    A: T.Tensor((M, K), dtype)
    B: T.Tensor((K, N), dtype)
    C = T.empty((M, N), dtype)
    with T.Kernel(T.ceildiv(N, block_n), T.ceildiv(M, block_m), threads=128) as (bx, by):
        total = T.alloc_fragment((block_m, block_n), accum_dtype)
        left, right = T.alloc_shared((block_m, block_k), dtype), T.alloc_shared((block_k, block_n), dtype)
        T.clear(total)
        for ko in T.Pipelined(T.ceildiv(K, block_k), num_stages=2):
            T.copy(A[by * block_m, ko * block_k], left)
            T.copy(B[ko * block_k, bx * block_n], right)
            T.gemm(left, right, total)
        T.copy(total, C[by * block_m, bx * block_n])
    return C


@tilelang.jit
def any_size(
    A, B, block_m, block_n, block_k, turn_a, turn_b, in_dtype, out_dtype, accum_dtype, num_stages, threads
):  # fmt: skip
    M, N, K = T.dynamic("m"), T.dynamic("n"), T.dynamic("k")
    A: T.Tensor((K, M) if turn_a else (M, K), in_dtype)
    B: T.Tensor((N, K) if turn_b else (K, N), in_dtype)
    C = T.empty((M, N), out_dtype)
    with T.Kernel(T.ceildiv(N, block_n), T.ceildiv(M, block_m), threads=threads) as (x, y):
        left = T.alloc_shared((block_k, block_m) if turn_a else (block_m, block_k), in_dtype)
        right = T.alloc_shared((block_n, block_k) if turn_b else (block_k, block_n), in_dtype)
        total = T.alloc_fragment((block_m, block_n), accum_dtype)
        T.clear(total)
        for k in T.Pipelined(T.ceildiv(K, block_k), num_stages=num_stages):
            m, n, depth = y * block_m, x * block_n, k * block_k
            if turn_a:
                T.copy(A[depth, m], left)
            else:
                T.copy(A[m, depth], left)
            if turn_b:
                T.copy(B[n, depth], right)
            else:
                T.copy(B[depth, n], right)
            T.gemm(left, right, total, turn_a, turn_b)
        T.copy(total, C[y * block_m, x * block_n])
    return C


@tilelang.jit
def split_depth(A, B, C, block_m, block_n, block_k, parts, whole_tiles=False):
    M, N, K = T.const("M, N, K")
    A: T.Tensor((M, K), T.float16)
    B: T.Tensor((K, N), T.float16)
    C: T.Tensor((M, N), T.float32)
    each = K // parts
    with T.Kernel(T.ceildiv(N, block_n), T.ceildiv(M, block_m), parts, threads=128) as (bx, by, bz):
        left, right = T.alloc_shared((block_m, block_k), T.float16), T.alloc_shared((block_k, block_n), T.float16)
        total, held = T.alloc_fragment((block_m, block_n), T.float32), T.alloc_shared((block_m, block_n), T.float32)
        T.clear(total)
        for ko in T.Pipelined(T.ceildiv(each, block_k), num_stages=0):
            T.copy(A[by * block_m, bz * each + ko * block_k], left)
            T.copy(B[bz * each + ko * block_k, bx * block_n], right)
            T.gemm(left, right, total)
        if whole_tiles:
            T.copy(total, held)
            T.atomic_add(C[by * block_m, bx * block_n], held)
        else:
            for i, j in T.Parallel(block_m, block_n):
                T.atomic_add(C[by * block_m + i, bx * block_n + j], total[i, j])


@tilelang.jit(pass_configs={tilelang.PassConfigKey.TL_DISABLE_TMA_LOWER: True})
def matrix_vector(a, x, block_m=128, block_n=128, dtype=T.float16, accum_dtype=T.float):
    M, N = T.const("M, N")
    a: T.Tensor((M, N), dtype)
    x: T.Tensor((N,), dtype)
    o = T.empty((M,), dtype)
    with T.Kernel(T.ceildiv(M, block_m), threads=256) as row:
        sums = T.alloc_reducer(block_m, accum_dtype, replication="all")
        T.clear(sums)
        for step in T.Pipelined(T.ceildiv(N, block_n), num_stages=2):
            held, part = T.alloc_shared((block_m, block_n), dtype), T.alloc_fragment(block_n, dtype)
            T.copy(a[row * block_m, step * block_n], held)
            T.copy(x[step * block_n], part)
            for i, j in T.Parallel(block_m, block_n):
                sums[i] += held[i, j] * part[j]
        T.finalize_reducer(sums)
        T.copy(sums, o[row * block_m])
    return o


def signed_nibble(byte, position):
    low = (byte >> (position.astype(T.uint8) * T.const(4, T.uint8))) & T.const(15, T.uint8)
    return T.reinterpret(T.int8, low << T.const(4, T.uint8)) >> T.const(4, T.int8)


@tilelang.jit(out_idx=[2])
def bytes_by_nibbles(M, N, K, in_dtype, out_dtype, accum_dtype, block_m=32, block_n=32, block_k=128):
    @T.prim_func
    def main(A: T.Tensor((M, K), in_dtype), B: T.Tensor((N, K // 2), T.uint8), Ct: T.Tensor((N, M), out_dtype)):
        with T.Kernel(T.ceildiv(N, block_n), T.ceildiv(M, block_m), threads=128) as (bx, by):
            a, packed = T.alloc_shared((block_m, block_k), in_dtype), T.alloc_shared((block_n, block_k // 2), T.uint8)
            b, total = T.alloc_fragment((block_n, block_k), in_dtype), T.alloc_fragment((block_n, block_m), accum_dtype)
            T.annotate_layout({packed: tilelang.layout.make_swizzled_layout(packed)})
            T.clear(total)
            for k in T.Pipelined(K // block_k, num_stages=1):
                T.copy(A[by * block_m, k * block_k], a)
                T.copy(B[bx * block_n, k * block_k // 2], packed)
                for i, j in T.Parallel(block_n, block_k):
                    b[i, j] = signed_nibble(packed[i, j // 2], j % 2)
                T.gemm(b, a, total, transpose_B=True)
            T.copy(total, Ct[bx * block_n : (bx + 1) * block_n, by * block_m : (by + 1) * block_m])

    return main


@tilelang.jit
def masked_blocks(A, B, BlockMask, block_M, block_N, block_K, num_stages, thread_num, enable_rasteration):
    M, N, K = T.const("M, N, K")
    A: T.Tensor((M, K), T.float16)
    B: T.Tensor((K, N), T.float16)
    BlockMask: T.Tensor((M // block_M, N // block_N, K // block_K), "bool")
    C = T.empty((M, N), T.float16)
    with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=thread_num) as (n, m):
        a, b = T.alloc_shared((block_M, block_K), T.float16), T.alloc_shared((block_K, block_N), T.float16)
        c = T.alloc_fragment((block_M, block_N), T.float32)
        T.use_swizzle(panel_size=8, enable=enable_rasteration)
        T.clear(c)
        for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=num_stages):
            if BlockMask[m, n, k]:
                T.copy(A[m * block_M, k * block_K], a)
                T.copy(B[k * block_K, n * block_N], b)
                T.gemm(a, b, c)
        T.copy(c, C[m * block_M, n * block_N])
    return C


streamk_programs = total_sm = iters_per_tile = streamk_full_tiles = streamk_partial_tiles = sm_patition_factor = 1


@tilelang.jit
def streams_of_depth(
    A,
    B,
    C,
    streamk_tiles,
    block_M,
    block_N,
    block_K,
    trans_A,
    trans_B,
    dtypeAB,
    dtypeC,
    accum_dtype,
    num_stages,
    threads,
):
    """Tasks share the depth of the first tiles, step by step, and take whole tiles after them."""
    M, N, K = T.const("M, N, K")
    A: T.Tensor((M, K), dtypeAB)
    B: T.Tensor((N, K), dtypeAB)
    C: T.Tensor((M, N), dtypeC)
    with T.Kernel(streamk_programs, threads=threads) as task:
        a, b = T.alloc_shared((block_M, block_K), dtypeAB), T.alloc_shared((block_N, block_K), dtypeAB)
        whole_a, whole_b = T.alloc_shared((block_M, block_K), dtypeAB), T.alloc_shared((block_N, block_K), dtypeAB)
        c = T.alloc_fragment((block_M, block_N), accum_dtype)
        first, last = T.alloc_local((1,), T.int32), T.alloc_local((1,), T.int32)
        first[0] = task * streamk_full_tiles + T.min(task, streamk_partial_tiles)
        end = (task + 1) * streamk_full_tiles + T.min(task + 1, streamk_partial_tiles)
        while first[0] < end:
            last[0] = T.min(first[0] + (iters_per_tile - first[0] % iters_per_tile), end)
            tile, done = first[0] // iters_per_tile, first[0] % iters_per_tile
            m, n = tile // T.ceildiv(N, block_N), tile % T.ceildiv(N, block_N)
            T.clear(c)
            for k in T.Pipelined(last[0] - first[0], num_stages=num_stages):
                T.copy(A[m * block_M, (k + first[0] % iters_per_tile) * block_K], a)
                T.copy(B[n * block_N, (k + first[0] % iters_per_tile) * block_K], b)
                T.gemm(a, b, c, transpose_B=trans_B)
            if done == 0 and last[0] % iters_per_tile == 0:
                T.copy(c, C[m * block_M, n * block_N])
            else:
                for i, j in T.Parallel(block_M, block_N):
                    T.atomic_add(C[m * block_M + i, n * block_N + j], c[i, j])
            first[0] = last[0]
        for turn in T.serial(sm_patition_factor):
            tile = task + streamk_tiles + turn * total_sm
            m, n = tile // T.ceildiv(N, block_N), tile % T.ceildiv(N, block_N)
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=1):
                T.copy(A[m * block_M, k * block_K], whole_a)
                T.copy(B[n * block_N, k * block_K], whole_b)
                T.gemm(whole_a, whole_b, c, transpose_B=trans_B)
            T.copy(c, C[m * block_M, n * block_N])


def nibbles(M, N, K, block_M, block_N, block_K, threads=128):
    @T.prim_func
    def main(A: T.Tensor((M, K), T.int4), B: T.Tensor((N, K), T.int4), C: T.Tensor((M, N), T.int32)):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=threads) as (x, y):
            a, b = T.alloc_shared((block_M, block_K), T.int4), T.alloc_shared((block_N, block_K), T.int4)
            c = T.alloc_fragment((block_M, block_N), T.int32)
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=3):
                T.copy(A[y * block_M, k * block_K], a)
                T.copy(B[x * block_N, k * block_K], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[y * block_M, x * block_N])

    return main


@tilelang.jit
def groups(A, B, sizes, firsts, padded, sizes_list, block_M, block_N, block_K, trans_b=False, num_stages=2):
    K, N = T.const("K, N")
    count = len(sizes_list)
    A: T.Tensor([sum(sizes_list), K], T.float16)
    B: T.Tensor([count, N, K] if trans_b else [count, K, N], T.float16)
    C = T.empty([sum(sizes_list), N], T.float16)
    sizes: T.Tensor([count], T.int32)
    firsts: T.Tensor([count], T.int32)
    padded: T.Tensor([count], T.int32)
    with T.Kernel(sum(-(-size // block_M) for size in sizes_list), T.ceildiv(N, block_N), threads=128) as (x, y):
        a = T.alloc_shared([block_M, block_K], T.float16)
        b = T.alloc_shared([block_N, block_K] if trans_b else [block_K, block_N], T.float16)
        c, group = T.alloc_fragment([block_M, block_N], T.float32), T.alloc_var(dtype=T.int32)
        group = 0
        for g in T.serial(1, count):
            if x * block_M < padded[g]:
                break
            group = T.cast(g, T.int32)
        inside = x * block_M - padded[group]
        first = firsts[group] + inside
        T.clear(c)
        for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=num_stages):
            T.copy(A[first : first + block_M, k * block_K : (k + 1) * block_K], a)
            if trans_b:
                T.copy(B[group, y * block_N : (y + 1) * block_N, k * block_K : (k + 1) * block_K], b)
            else:
                T.copy(B[group, k * block_K : (k + 1) * block_K, y * block_N : (y + 1) * block_N], b)
            T.gemm(a, b, c, transpose_B=trans_b)
        for i, j in T.Parallel(block_M, block_N):
            if inside + i < sizes[group]:
                C[first + i, y * block_N + j] = c[i, j]
    return C
