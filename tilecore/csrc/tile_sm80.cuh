// The verbs of kernels for all cards from sm_80 on: element types, fragments, products of single warps, rows. Needs no
// headers.
//
// Fragment of a 64 x N product: a thread of a warpgroup has float d[N / 2]; d[4 * g + 2 * h + e] stands in row
// 16 * warp + lane / 4 + 8 * h and column 8 * g + 2 * (lane % 4) + e. Where each warp has several strips of 16 rows, one
// after the other, d[2 * H * g + 2 * h + e] stands in row 16 * strips * warp + lane / 4 + 8 * h, with h below H = 2 * strips.
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

// ---- shared memory ----
TILE_FN u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
template <int N>
TILE_FN void pin(float (&d)[N]) {  // the compiler moves no access of d past this
  TILE_UNROLL for (int x = 0; x < N; x++) asm volatile("" : "+f"(d[x])::"memory");
}
template <int N>
TILE_FN void pin(u32 (&d)[N]) {
  TILE_UNROLL for (int x = 0; x < N; x++) asm volatile("" : "+r"(d[x])::"memory");
}

template <int First, int Count, int N>
TILE_FN void pin_part(u32 (&d)[N]) {
  TILE_UNROLL for (int x = First; x < First + Count; x++) asm volatile("" : "+r"(d[x])::"memory");
}

// ---- launches that follow each other ----
// From sm_90 on they may begin while the one before them in their stream still runs: what is read of it, or written for
// others to read, comes after `grid_wait`. Those that follow are let in there, too, so that one at most is waiting.
TILE_FN void grid_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#endif
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

// ---- scalar operations ----
TILE_FN float tile_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// c as a factor of floats and of `row`, which is taken from them: 1, which rounds nothing and is not infinite times `row`,
// for floats so large that they are the same or 64 apart.
TILE_FN float row_factor(float row, float c) { return fabsf(row) < 0x1p29f ? c : 1.0f; }
TILE_FN float tile_exp(float x) { return tile_exp2(x * 1.4426950408889634f); }
TILE_FN float tile_sigmoid(float x) { return __fdividef(1.0f, 1.0f + tile_exp(-x)); }
TILE_FN float tile_inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
TILE_FN float tile_tanh(float x) {  // without branches; what overflows divides 2 to 0, NaN stays
  const float square = x * x, small = x * (1.0f + square * (-0.333333333f + square * 0.133333333f));
  const float large = 1.0f - 2.0f * tile_inverse(1.0f + tile_exp2(2.885390082f * fabsf(x)));
  return fabsf(x) < 0.06f ? small : copysignf(large, x);
}
TILE_FN float tile_tanh_above(float x) {  // tanh(x) + 1
  return tile_inverse(fmaf(0.5f, tile_exp2(-2.885390082f * x), 0.5f));
}
TILE_FN float gate_inverse(float exponent) { return 1.0f + tile_exp2(fminf(exponent, 30.0f)); }  // NaN: as 30
template <int N>
TILE_FN void invert_fours(float (&d)[N]) {  // numbers of which four have a product that is finite
  TILE_UNROLL for (int x = 0; x < N; x += 4) {
    const float low = d[x] * d[x + 1], high = d[x + 2] * d[x + 3], all = tile_inverse(low * high);
    const float lower = all * high, higher = all * low, first = lower * d[x + 1], third = higher * d[x + 3];
    d[x + 1] = lower * d[x], d[x] = first, d[x + 3] = higher * d[x + 2], d[x + 2] = third;
  }
}
TILE_FN float tile_tanh_near(float x, float factor, float scale) {  // scale * tanh(factor * x) up to 0.5, to 2^-15.4
  const float a = scale * factor, b = factor * factor, square = x * x;
  return x * fmaf(square, fmaf(square, 0.115209699f * a * b * b, -0.33169149f * a * b), 0.999977435f * a);
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
TILE_FN int tile_abs(int x) { return x < 0 ? -x : x; }
TILE_FN i64 tile_abs(i64 x) { return x < 0 ? -x : x; }
template <class Int>
TILE_FN Int rounded_down(Int x, Int y) {
  Int q = x / y;
  return q - (Int)(q * y != x && ((x < 0) != (y < 0)));
}
TILE_FN int tile_floordiv(int x, int y) { return rounded_down(x, y); }
TILE_FN i64 tile_floordiv(i64 x, i64 y) { return rounded_down(x, y); }
TILE_FN int tile_mod(int x, int y) { return x - rounded_down(x, y) * y; }
TILE_FN i64 tile_mod(i64 x, i64 y) { return x - rounded_down(x, y) * y; }

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
template <int N>
TILE_FN bool all_within(const float (&d)[N], float limit) {  // of a warp; NaN is
  float most[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  TILE_UNROLL for (int x = 0; x < N; x++) most[x % 4] = fmaxf(most[x % 4], fabsf(d[x]));
  return __all_sync(0xffffffff, fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])) <= limit);
}
template <class Kind, int H>
TILE_FN void join_quads(float (&result)[H]) {
  TILE_UNROLL for (int h = 0; h < H; h++) {
    result[h] = Kind::join(result[h], __shfl_xor_sync(0xffffffff, result[h], 1));
    result[h] = Kind::join(result[h], __shfl_xor_sync(0xffffffff, result[h], 2));
  }
}
template <int N, int H>
TILE_FN void add_columns(const float (&d)[N], float (&result)[H]) {  // each thread its own: join_quads comes later
  TILE_UNROLL for (int h = 0; h < H; h++) {
    float even = d[2 * h], odd = d[2 * h + 1];  // two chains
    TILE_UNROLL for (int g = 1; g < N / (2 * H); g++) even += d[2 * H * g + 2 * h], odd += d[2 * H * g + 2 * h + 1];
    result[h] += even + odd;
  }
}
template <class Kind, int N, int H>
TILE_FN void reduce_columns(const float (&d)[N], float (&result)[H], bool clear) {
  TILE_UNROLL for (int h = 0; h < H; h++) {
    float even = d[2 * h], odd = d[2 * h + 1];  // two chains
    TILE_UNROLL for (int g = 1; g < N / (2 * H); g++) {
      even = Kind::join(even, d[2 * H * g + 2 * h]);
      odd = Kind::join(odd, d[2 * H * g + 2 * h + 1]);
    }
    float all = Kind::join(even, odd);
    all = Kind::join(all, __shfl_xor_sync(0xffffffff, all, 1));
    all = Kind::join(all, __shfl_xor_sync(0xffffffff, all, 2));
    result[h] = clear ? all : Kind::join(result[h], all);
  }
}

// ---- rows: runs of elements between device memory and registers, and reductions over the threads of a row ----
// What is used `once`, of tensors that no cache holds, is not to push other things out: reads leave no trace in the first
// cache, and writes are the first to leave the second one. Both together are faster, either alone is slower than neither.
TILE_FN void fetch_words(u32* to, const void* from, int words, bool once = false) {
  if (words == 4 && once)
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
  else if (words == 4)
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
  else if (words == 2)
    asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
  else
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
}
template <int Words>
TILE_FN void fetch_run(u32* to, const void* from, bool once = false) {
  constexpr int each = Words % 4 == 0 ? 4 : Words % 2 == 0 ? 2 : 1;
  TILE_UNROLL for (int x = 0; x < Words; x += each) fetch_words(to + x, (const u32*)from + x, each, once);
}
template <int Words>
TILE_FN void clear_run(u32* to) {
  TILE_UNROLL for (int x = 0; x < Words; x++) to[x] = 0;
}
template <int Words>
TILE_FN void store_run(void* to, const u32* from, bool once = false) {
  u32* at = (u32*)to;
  if constexpr (Words % 4 == 0) {
    TILE_UNROLL for (int x = 0; x < Words; x += 4)
      if (once)
        asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at + x), "r"(from[x]), "r"(from[x + 1]),
                     "r"(from[x + 2]), "r"(from[x + 3]) : "memory");
      else
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

// ---- products of a warp: 16 rows, 8 columns, 16 deep ----
#define TILE_WARP_PRODUCT(type)                                                                                      \
  TILE_FN void warp_product_##type(float* c, const u32* a, u32 b, u32 d) {                                           \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." #type "." #type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "      \
        "{%0,%1,%2,%3};"                                                                                             \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(d)); \
  }
TILE_WARP_PRODUCT(bf16)
TILE_WARP_PRODUCT(f16)
struct Bf16 {
  TILE_FN void product(float* c, const u32* a, u32 b, u32 d) { warp_product_bf16(c, a, b, d); }
};
struct F16 {
  TILE_FN void product(float* c, const u32* a, u32 b, u32 d) { warp_product_f16(c, a, b, d); }
};
// Operands lie in chunks of 64 elements (128 bytes) along their contiguous axis; units of 16 bytes are XORed with their
// row, so that 8 rows of a matrix are in different banks. A `minor` operand is not contiguous along the depth.
TILE_FN u32 unit_address(u32 tile, int chunk_bytes, int row, int element) {  // of the unit that an element begins
  return tile + element / 64 * chunk_bytes + row * 128 + ((element / 8 % 8 ^ row % 8) << 4);
}
template <bool Minor>
TILE_FN void fetch_left(u32* to, u32 tile, int chunk_bytes, int row, int depth) {  // 16 rows, 16 deep
  const int lane = threadIdx.x % 32;
  if constexpr (Minor)
    load_turned(to, unit_address(tile, chunk_bytes, depth + lane / 16 * 8 + lane % 8, row + lane / 8 % 2 * 8));
  else
    load_matrices(to, unit_address(tile, chunk_bytes, row + lane % 16, depth + lane / 16 * 8));
}
template <bool Minor>
TILE_FN void fetch_right(u32* to, u32 tile, int chunk_bytes, int column, int depth) {  // 16 columns, 16 deep
  const int lane = threadIdx.x % 32;
  if constexpr (Minor)
    load_turned(to, unit_address(tile, chunk_bytes, depth + lane / 8 % 2 * 8 + lane % 8, column + lane / 16 * 8));
  else
    load_matrices(to, unit_address(tile, chunk_bytes, column + lane / 16 * 8 + lane % 8, depth + lane / 8 % 2 * 8));
}
// d += left * right, 16 deep, of a warp's strips of 16 rows; `left` has four words per strip.
template <class Kind, int Strips, bool Minor, int N>
TILE_FN void multiply(float (&d)[N], const u32 (&left)[4 * Strips], u32 right, int chunk_bytes, int depth) {
  TILE_UNROLL for (int pair = 0; pair < N / (8 * Strips); pair++) {
    u32 b[4];
    fetch_right<Minor>(b, right, chunk_bytes, 16 * pair, depth);
    TILE_UNROLL for (int strip = 0; strip < Strips; strip++) {
      float* at = d + 8 * Strips * pair + 4 * strip;
      Kind::product(at, left + 4 * strip, b[0], b[1]);
      Kind::product(at + 4 * Strips, left + 4 * strip, b[2], b[3]);
    }
  }
}
// Words of a fragment packed in pairs: the left operand 16 * x deep.
template <int Strips, int N>
TILE_FN void packed_left(u32 (&to)[4 * Strips], const u32 (&from)[N], int x) {
  TILE_UNROLL for (int strip = 0; strip < Strips; strip++)
    TILE_UNROLL for (int y = 0; y < 4; y++)
      to[4 * strip + y] = from[4 * Strips * x + y / 2 * 2 * Strips + 2 * strip + y % 2];
}

// ---- copies from device memory to shared memory, 8 elements of 16 bits at a time ----
TILE_FN u32 own_thread() {  // told anew every time: what follows from it is computed again, and not kept in registers
  u32 thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return thread;
}
TILE_FN void copy_unit(u32 to, const u16* from, int elements) {  // from an address that 16 bytes divide
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(2 * elements)
               : "memory");
}
TILE_FN void unit_write(u32 to, const u32* words) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3]) : "memory");
}
TILE_FN void unit_read(u32* words, u32 from) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(from) : "memory");
}
TILE_FN void pair_write(u32 to, u32 pair) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(pair) : "memory"); }
TILE_FN void gather_unit(u32 to, const u16* from, int elements) {  // each element by itself
  u32 words[4];
  TILE_UNROLL for (int x = 0; x < 4; x++) {
    const u32 low = 2 * x < elements ? from[2 * x] : 0, high = 2 * x + 1 < elements ? from[2 * x + 1] : 0;
    words[x] = low | high << 16;
  }
  unit_write(to, words);
}
// A tile of `Rows` rows and chunks of 64 elements by all threads, from row `row` and element `column` of a tensor that
// has `height` and `width` of them: what is beyond is 0. Rows of the tensor are `pitch` elements apart.
template <int Rows, int Chunks, int Threads>
TILE_FN void copy_tile(u32 to, const u16* from, i64 pitch, int row, int height, int column, int width) {
  constexpr int step = Threads / 8;
  const int thread = own_thread(), first = thread / 8, own = thread % 8 * 8;
  to = unit_address(to, 0, first, own);
  from += first * pitch + own;
  TILE_UNROLL for (int chunk = 0; chunk < Chunks; chunk++) {
    const int exist = max(0, min(8, width - column - own - 64 * chunk));
    TILE_UNROLL for (int y = 0; y < Rows; y += step) {
      if (Rows % step != 0 && first + y >= Rows) break;
      const int elements = (u32)(row + first + y) < (u32)height ? exist : 0;
      const u32 at = to + (chunk * Rows + y) * 128;
      copy_unit(at, from + 64 * chunk + y * pitch, elements);
    }
  }
}
// The same where rows are no units of 16 bytes.
template <int Rows, int Chunks, int Threads>
TILE_FN void gather_tile(u32 to, const u16* from, i64 pitch, int row, int height, int column, int width) {
  _Pragma("unroll 1") for (int unit = threadIdx.x; unit < Rows * Chunks * 8; unit += Threads) {
    const int y = unit / 8 % Rows, own = unit / (8 * Rows) * 64 + unit % 8 * 8;
    const int elements = (u32)(row + y) < (u32)height ? width - column - own : 0;
    gather_unit(unit_address(to, 128 * Rows, y, own), from + y * pitch + own, elements);
  }
}
TILE_FN void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Groups>
TILE_FN void copies_wait() {  // until all but the last groups are there: of this thread's copies
  asm volatile("cp.async.wait_group %0;" ::"n"(Groups) : "memory");
}
// A warp's strips of 64 columns go to memory by way of its own shared memory, in units of 16 bytes.
TILE_FN void stage_pair(u32 at, int row, int column, u32 pair) {
  pair_write(unit_address(at, 0, row, column) + column % 8 * 2, pair);
}
TILE_FN void store_staged(void* to, u32 at, int row, int column) {
  u32 words[4];
  unit_read(words, unit_address(at, 0, row, column));
  store_run<4>(to, words);
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
