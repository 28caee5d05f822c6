// The verbs of kernels for Hopper (sm_90a): barriers, tensor copies, warpgroup products, fragments. Needs no headers.
//
// Fragment of a 64 x N product: a thread of a warpgroup has float d[N / 2]; d[4 * g + 2 * h + e] stands in row
// 16 * warp + lane / 4 + 8 * h and column 8 * g + 2 * (lane % 4) + e.
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define TILE_FN static __device__ __forceinline__
#define TILE_INF __int_as_float(0x7f800000)
#define TILE_NAN __int_as_float(0x7fffffff)
#define TILE_UNROLL _Pragma("unroll")

struct alignas(64) TensorMap {  // the bytes of a CUtensorMap
  u64 words[16];
};

// ---- shared memory and barriers ----
TILE_FN u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
TILE_FN void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
TILE_FN void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
}
TILE_FN void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
TILE_FN void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
TILE_FN void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE_%=;\nbra AGAIN_%=;\nDONE_%=:\n}" ::"r"(barrier), "r"(parity) : "memory");
}
TILE_FN void named_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
TILE_FN void named_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
template <int N>
TILE_FN void registers_raise() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
TILE_FN void registers_lower() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- clusters: blocks that share a result ----
TILE_FN void cluster_ready() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
TILE_FN u32 cluster_address(u32 address, u32 rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
TILE_FN void cluster_arrive(u32 barrier, u32 rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(cluster_address(barrier, rank))
               : "memory");
}
TILE_FN void cluster_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN_%=: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE_%=;\nbra AGAIN_%=;\nDONE_%=:\n}" ::"r"(barrier), "r"(parity) : "memory");
}
TILE_FN void exchange_write(u32 address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
template <class Kind, int Blocks>
TILE_FN float exchange_read(u32 address) {
  float parts[Blocks];
  TILE_UNROLL for (int rank = 0; rank < Blocks; rank++)
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(parts[rank]) : "r"(cluster_address(address, rank)));
  TILE_UNROLL for (int rank = 1; rank < Blocks; rank++) parts[0] = Kind::join(parts[0], parts[rank]);
  return parts[0];
}

// ---- tensor copies: coordinates innermost first ----
#define TILE_LOAD "cp.async.bulk.tensor."
#define TILE_LOAD_TAIL ".shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {"
TILE_FN void load_tile(u32 to, const TensorMap* map, u32 barrier, int a) {
  asm volatile(TILE_LOAD "1d" TILE_LOAD_TAIL "%3}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(a) : "memory");
}
TILE_FN void load_tile(u32 to, const TensorMap* map, u32 barrier, int a, int b) {
  asm volatile(TILE_LOAD "2d" TILE_LOAD_TAIL "%3,%4}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(a), "r"(b)
               : "memory");
}
TILE_FN void load_tile(u32 to, const TensorMap* map, u32 barrier, int a, int b, int c) {
  asm volatile(TILE_LOAD "3d" TILE_LOAD_TAIL "%3,%4,%5}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(a), "r"(b),
               "r"(c)
               : "memory");
}
TILE_FN void load_tile(u32 to, const TensorMap* map, u32 barrier, int a, int b, int c, int d) {
  asm volatile(TILE_LOAD "4d" TILE_LOAD_TAIL "%3,%4,%5,%6}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
TILE_FN void load_tile(u32 to, const TensorMap* map, u32 barrier, int a, int b, int c, int d, int e) {
  asm volatile(TILE_LOAD "5d" TILE_LOAD_TAIL "%3,%4,%5,%6,%7}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(a),
               "r"(b), "r"(c), "r"(d), "r"(e)
               : "memory");
}
#define TILE_STORE_TAIL ".global.shared::cta.tile.bulk_group [%0, {"
TILE_FN void store_tile(const TensorMap* map, u32 from, int a, int b) {
  asm volatile(TILE_LOAD "2d" TILE_STORE_TAIL "%2,%3}], [%1];" ::"l"(map), "r"(from), "r"(a), "r"(b) : "memory");
}
TILE_FN void store_tile(const TensorMap* map, u32 from, int a, int b, int c) {
  asm volatile(TILE_LOAD "3d" TILE_STORE_TAIL "%2,%3,%4}], [%1];" ::"l"(map), "r"(from), "r"(a), "r"(b), "r"(c)
               : "memory");
}
TILE_FN void store_tile(const TensorMap* map, u32 from, int a, int b, int c, int d) {
  asm volatile(TILE_LOAD "4d" TILE_STORE_TAIL "%2,%3,%4,%5}], [%1];" ::"l"(map), "r"(from), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
TILE_FN void store_tile(const TensorMap* map, u32 from, int a, int b, int c, int d, int e) {
  asm volatile(TILE_LOAD "5d" TILE_STORE_TAIL "%2,%3,%4,%5,%6}], [%1];" ::"l"(map), "r"(from), "r"(a), "r"(b), "r"(c),
               "r"(d), "r"(e)
               : "memory");
}
TILE_FN void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
TILE_FN void stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }  // staging is free again
TILE_FN void stores_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
TILE_FN void show_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- warpgroup products (wgmma itself is stamped out per shape and type by the generator) ----
TILE_FN void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TILE_FN void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
TILE_FN void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
template <int N>
TILE_FN void pin(float (&d)[N]) {  // the compiler moves no access of d past this
  TILE_UNROLL for (int x = 0; x < N; x++) asm volatile("" : "+f"(d[x])::"memory");
}
template <int N>
TILE_FN void pin(u32 (&d)[N]) {
  TILE_UNROLL for (int x = 0; x < N; x++) asm volatile("" : "+r"(d[x])::"memory");
}
// Operands lie in chunks of 64 elements (128 bytes, 128-byte swizzle) along their contiguous axis.
TILE_FN u64 depth_major(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62);
}
TILE_FN u64 depth_minor(u32 address, u32 chunk_bytes) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)(chunk_bytes >> 4) << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62);
}

// ---- element types ----
TILE_FN float from_bf16(u16 x) { return __int_as_float((u32)x << 16); }
TILE_FN float from_f16(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
TILE_FN u16 to_bf16(float x) {
  u16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
TILE_FN u16 to_f16(float x) {
  u16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
TILE_FN u32 pair_bf16(float low, float high) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
TILE_FN u32 pair_f16(float low, float high) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
TILE_FN void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
TILE_FN void store_turned(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
TILE_FN void load_matrices(u32* to, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}
template <int N>
TILE_FN void fetch_fragment(u32 (&to)[N], u32 tile, u32 chunk_bytes) {  // pairs of a swizzled tile as a fragment has them
  const u32 lane = threadIdx.x % 32, row = tile + (threadIdx.x % 128 / 32 * 16 + lane % 16) * 128;
  TILE_UNROLL for (int part = 0; part < N / 4; part++)
    load_matrices(to + 4 * part, row + part / 4 * chunk_bytes + ((part % 4 * 2 + lane / 16 ^ lane % 8) << 4));
}
TILE_FN void load_turned(u32* to, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}
template <int N>
TILE_FN void fetch_turned(u32 (&to)[N], u32 chunk) {  // the same of 64 columns that are a fragment's rows
  const u32 lane = threadIdx.x % 32, unit = threadIdx.x % 128 / 32 * 2 + lane / 8 % 2;
  TILE_UNROLL for (int part = 0; part < N / 4; part++)
    load_turned(to + 4 * part, chunk + (part * 16 + lane / 16 * 8 + lane % 8) * 128 + ((unit ^ lane % 8) << 4));
}
// Elements of lines: one, or two neighbours from an even one on.
TILE_FN u32 line_word(u32 address) {
  u32 word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}
TILE_FN u16 line_half(u32 address) {
  u16 half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(address) : "memory");
  return half;
}
TILE_FN float line_f32(u32 line, int x) { return __int_as_float(line_word(line + 4 * x)); }
TILE_FN float line_f16(u32 line, int x) { return from_f16(line_half(line + 2 * x)); }
TILE_FN float line_bf16(u32 line, int x) { return from_bf16(line_half(line + 2 * x)); }
TILE_FN void line_pair_f32(float* to, u32 line, int x) {
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(to[0]), "=f"(to[1]) : "r"(line + 4 * x) : "memory");
}
TILE_FN void line_pair_f16(float* to, u32 line, int x) {
  const u32 word = line_word(line + 2 * x);
  to[0] = from_f16((u16)word), to[1] = from_f16((u16)(word >> 16));
}
TILE_FN void line_pair_bf16(float* to, u32 line, int x) {
  const u32 word = line_word(line + 2 * x);
  to[0] = __int_as_float(word << 16), to[1] = __int_as_float(word & 0xffff0000u);
}
TILE_FN void line_write(u32 line, int x, float y) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(line + 4 * x), "f"(y) : "memory");
}
TILE_FN void sum_line(u32 line) {  // running sums of 64 elements, by the warp that has them
  const u32 lane = threadIdx.x % 32;
  float pair[2];
  line_pair_f32(pair, line, 2 * lane);
  float sum = pair[0] + pair[1];
  TILE_UNROLL for (u32 step = 1; step < 32; step *= 2) {
    const float below = __shfl_up_sync(0xffffffff, sum, step);
    if (lane >= step) sum = below + sum;
  }
  const float below = __shfl_up_sync(0xffffffff, sum, 1), before = lane ? below : 0.0f;
  line_write(line, 2 * lane, before + pair[0]);
  line_write(line, 2 * lane + 1, sum);
  __syncwarp();
}

// ---- packed levels: the first of two in the low bits ----
TILE_FN u32 shared_u8(u32 address) {
  u32 x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
TILE_FN u32 shared_u16(u32 address) {
  u32 x;
  asm volatile("{\n.reg .u16 y;\nld.shared.u16 y, [%1];\ncvt.u32.u16 %0, y;\n}" : "=r"(x) : "r"(address) : "memory");
  return x;
}
template <int Words>
TILE_FN void shared_words(u32* to, u32 address) {
  if constexpr (Words == 2)
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(address) : "memory");
  else
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}
// As whole numbers: in halves whose low bits they become (`Ones` has the others, and which bits to flip), and in floats
// from 2^23 on. Of a byte, of two bytes, or pair `x` of a word, whose nibbles 4 apart are one.
template <u32 Ones>
TILE_FN u32 levels_4(u32 x, u32 mask) {
  return ((x | x << 12) & mask) ^ Ones;
}
template <u32 Ones>
TILE_FN u32 level_pair_4(u32 word, int x, u32 mask) {
  return ((word >> 4 * x) & mask) ^ Ones;
}
template <u32 Ones>
TILE_FN u32 level_pair_8(u32 word, int x, u32) {
  const u32 order = x ? 0x4342 : 0x4140;
  return (Ones & 0xff) == 0 ? __byte_perm(word, Ones >> 8, order) : __byte_perm(word, 0, order) ^ Ones;
}
template <u32 Ones>
TILE_FN u32 levels_8(u32 x, u32) {
  return level_pair_8<Ones>(x, 0, 0);
}
template <int Bits, u32 Flip>
TILE_FN float level_f32(u32 x, int from) {
  return __int_as_float(((x >> from) & ((1u << Bits) - 1)) ^ (0x4b000000u | Flip));
}
// 16 elements of a column of the right operand, in the pairs in which a word's levels come.
template <int Bits>
TILE_FN void column_words(u32 (&to)[8], u32 address) {
  u32 x[8];
  shared_words<4>(x, address);
  shared_words<4>(x + 4, address ^ 16);
  TILE_UNROLL for (int y = 0; y < 8; y++)
    to[y] = Bits == 8 ? x[y] : __byte_perm(x[y / 4 * 4 + y % 4 / 2], x[y / 4 * 4 + y % 4 / 2 + 2], y % 2 ? 0x7632 : 0x5410);
}
#define TILE_WARP_PRODUCT(type)                                                                                      \
  TILE_FN void warp_product_##type(float* c, const u32* a, u32 b, u32 d) {                                           \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." #type "." #type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "      \
        "{%0,%1,%2,%3};"                                                                                             \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(d)); \
  }
TILE_WARP_PRODUCT(bf16)
TILE_WARP_PRODUCT(f16)
TILE_FN u32 subtract_bf16(u32 x, u32 y) {
  u32 z;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
TILE_FN u32 subtract_f16(u32 x, u32 y) {
  u32 z;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
TILE_FN u32 multiply_bf16(u32 x, u32 y) {
  u32 z;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
TILE_FN u32 multiply_f16(u32 x, u32 y) {
  u32 z;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// ---- scalar operations ----
TILE_FN float tile_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
TILE_FN float tile_exp(float x) { return tile_exp2(x * 1.4426950408889634f); }
TILE_FN float tile_sigmoid(float x) { return __fdividef(1.0f, 1.0f + tile_exp(-x)); }
TILE_FN float tile_tanh(float x) {
  float square = x * x;
  float small = x * (1.0f + square * (-0.333333333f + square * 0.133333333f));
  float large = 1.0f - __fdividef(2.0f, 1.0f + tile_exp(2.0f * fminf(fabsf(x), 20.0f)));
  return x != x ? x : fabsf(x) < 0.06f ? small : copysignf(large, x);
}
TILE_FN float tile_max(float x, float y) {  // NaN if either is
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
TILE_FN float tile_min(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
TILE_FN float tile_sign(float x) { return x != x ? x : (float)(x > 0.0f) - (float)(x < 0.0f); }
TILE_FN int tile_floordiv(int x, int y) {
  int q = x / y;
  return q - (int)(q * y != x && ((x < 0) != (y < 0)));
}
TILE_FN int tile_mod(int x, int y) { return x - tile_floordiv(x, y) * y; }

// ---- reductions of a fragment over its columns; every thread of a quad gets the result ----
struct Sum {
  TILE_FN float join(float x, float y) { return x + y; }
};
struct Max {  // NaN if any is
  TILE_FN float join(float x, float y) { return tile_max(x, y); }
};
struct Fmax {
  TILE_FN float join(float x, float y) { return fmaxf(x, y); }
};
struct Min {
  TILE_FN float join(float x, float y) { return tile_min(x, y); }
};
struct Prod {
  TILE_FN float join(float x, float y) { return x * y; }
};
template <class Kind>
TILE_FN void join_quads(float (&result)[2]) {
  TILE_UNROLL for (int h = 0; h < 2; h++) {
    result[h] = Kind::join(result[h], __shfl_xor_sync(0xffffffff, result[h], 1));
    result[h] = Kind::join(result[h], __shfl_xor_sync(0xffffffff, result[h], 2));
  }
}
template <int N>
TILE_FN void add_columns(const float (&d)[N], float (&result)[2]) {  // each thread its own: join_quads comes later
  TILE_UNROLL for (int h = 0; h < 2; h++) {
    float even = d[2 * h], odd = d[2 * h + 1];  // two chains
    TILE_UNROLL for (int g = 1; g < N / 4; g++) even += d[4 * g + 2 * h], odd += d[4 * g + 2 * h + 1];
    result[h] += even + odd;
  }
}
template <class Kind, int N>
TILE_FN void reduce_columns(const float (&d)[N], float (&result)[2], bool clear) {
  TILE_UNROLL for (int h = 0; h < 2; h++) {
    float even = d[2 * h], odd = d[2 * h + 1];  // two chains
    TILE_UNROLL for (int g = 1; g < N / 4; g++) {
      even = Kind::join(even, d[4 * g + 2 * h]);
      odd = Kind::join(odd, d[4 * g + 2 * h + 1]);
    }
    float all = Kind::join(even, odd);
    all = Kind::join(all, __shfl_xor_sync(0xffffffff, all, 1));
    all = Kind::join(all, __shfl_xor_sync(0xffffffff, all, 2));
    result[h] = clear ? all : Kind::join(result[h], all);
  }
}

// Row values of warpgroups that share rows, each having reduced its own columns; `at` is room for all their rows.
// Two such places taken in turn: who writes one has met the others since they read it.
template <class Kind, int Groups>
TILE_FN void join_groups(float (&result)[2], u32 at, u32 meeting) {
  const u32 row = at + (threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) * 4;
  if (threadIdx.x % 4 == 0)
    TILE_UNROLL for (int h = 0; h < 2; h++) {
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(row + threadIdx.x / 128 * 256 + 32 * h), "f"(result[h]) : "memory");
    }
  named_sync(meeting, Groups * 128);
  TILE_UNROLL for (int h = 0; h < 2; h++) {
    float parts[Groups];
    TILE_UNROLL for (int group = 0; group < Groups; group++)
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(parts[group]) : "r"(row + group * 256 + 32 * h) : "memory");
    result[h] = parts[0];
    TILE_UNROLL for (int group = 1; group < Groups; group++) result[h] = Kind::join(result[h], parts[group]);
  }
}

// ---- rows: runs of elements between device memory and registers, and reductions over the threads of a row ----
TILE_FN void fetch_words(u32* to, const void* from, int words) {
  if (words == 4)
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
  else if (words == 2)
    asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
  else
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
}
template <int Words>
TILE_FN void fetch_run(u32* to, const void* from) {
  constexpr int each = Words % 4 == 0 ? 4 : Words % 2 == 0 ? 2 : 1;
  TILE_UNROLL for (int x = 0; x < Words; x += each) fetch_words(to + x, (const u32*)from + x, each);
}
template <int Words>
TILE_FN void clear_run(u32* to) {
  TILE_UNROLL for (int x = 0; x < Words; x++) to[x] = 0;
}
template <int Words>
TILE_FN void store_run(void* to, const u32* from) {
  u32* at = (u32*)to;
  if constexpr (Words % 4 == 0) {
    TILE_UNROLL for (int x = 0; x < Words; x += 4)
      asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at + x), "r"(from[x]), "r"(from[x + 1]),
                   "r"(from[x + 2]), "r"(from[x + 3]) : "memory");
  } else if constexpr (Words % 2 == 0) {
    TILE_UNROLL for (int x = 0; x < Words; x += 2)
      asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(at + x), "r"(from[x]), "r"(from[x + 1]) : "memory");
  } else {
    TILE_UNROLL for (int x = 0; x < Words; x++) at[x] = from[x];
  }
}
TILE_FN float element_bf16(const u32* words, int x) {
  return __int_as_float(x % 2 ? words[x / 2] & 0xffff0000u : words[x / 2] << 16);
}
TILE_FN float element_f16(const u32* words, int x) { return from_f16((u16)(words[x / 2] >> (x % 2 * 16))); }
TILE_FN float element_f32(const u32* words, int x) { return __int_as_float(words[x]); }
TILE_FN int element_i32(const u32* words, int x) { return (int)words[x]; }
template <class Kind, int Lanes>
TILE_FN float reduce_lanes(float x, float* scratch) {  // every thread of the row gets the result
  TILE_UNROLL for (int step = (Lanes < 32 ? Lanes : 32) / 2; step; step /= 2)
    x = Kind::join(x, __shfl_xor_sync(0xffffffff, x, step));
  if constexpr (Lanes > 32) {
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = scratch[0];
    TILE_UNROLL for (int warp = 1; warp < Lanes / 32; warp++) x = Kind::join(x, scratch[warp]);
  }
  return x;
}

// ---- the order of tiles ----
// Columns of tiles in groups of `group` rows, so that what one wave reads stays in the L2 cache.
TILE_FN void grouped_tile(int t, int rows, int columns, int group, int& row, int& column) {
  int block = t / (group * columns), first = block * group;
  int height = min(rows - first, group), inside = t - block * group * columns;
  row = first + inside % height;
  column = inside / height;
}
// Tiles whose work grows or falls with their row: a block takes a long one and the short one that makes up for it, of
// the same head; where that would leave blocks without work, longest first, there and back again.
// The block's tile number `turn`: 0 there is none and none comes, 1 found, 2 none this time.
TILE_FN int balanced_tile(int turn, int block, int blocks, int rows, int heads, int& row, int& head) {
  int halves = (rows + 1) / 2, pairs = heads * halves;
  if (pairs >= blocks) {
    int pair = turn / 2 * blocks + block, place = pair % halves;
    head = pair / halves;
    row = turn % 2 ? place : rows - 1 - place;
    return pair >= pairs ? 0 : turn % 2 && 2 * place == rows - 1 ? 2 : 1;
  }
  int t = turn * blocks + (turn % 2 ? blocks - 1 - block : block);
  row = rows - 1 - t / heads;
  head = t % heads;
  return turn * blocks >= rows * heads ? 0 : t >= rows * heads ? 2 : 1;
}
