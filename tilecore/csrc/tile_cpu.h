/* The verbs of generated CPU kernels: vectors of TILE_LANES elements, their math, and the register-tile product.
 *
 * One source for every instruction set: vector extensions carry the arithmetic, and the few places where they are slow
 * or silent (min, max, select, rounding, masked access) have one intrinsic per instruction set. A mask is an i32 vector
 * of 0 and -1. `lanes` counts are how many leading lanes take part; access beyond them never touches memory.
 */
#ifndef TILE_CPU_H
#define TILE_CPU_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "tile_features.h"

#if defined(__AVX512F__)
#include "tile_intrinsics.h"
#define TILE_LANES 16
#elif defined(__AVX2__)
#include "tile_intrinsics.h"
#define TILE_LANES 8
#else
#define TILE_LANES 4
#endif

#define TILE_PANEL 16 /* columns of a packed panel, the same for every instruction set */
#define TILE_INLINE static inline __attribute__((always_inline))
#if !defined(TILE_UNROLL)
#define TILE_UNROLL _Pragma("GCC unroll 32")
#define TILE_UNROLL_DEPTH _Pragma("GCC unroll 4") /* a core that two threads share is short of instruction slots */
#endif

typedef float f32v __attribute__((vector_size(4 * TILE_LANES)));
typedef double f64v __attribute__((vector_size(8 * TILE_LANES)));
typedef int32_t i32v __attribute__((vector_size(4 * TILE_LANES)));
typedef int64_t i64v __attribute__((vector_size(8 * TILE_LANES)));
typedef uint64_t u64v __attribute__((vector_size(8 * TILE_LANES)));
typedef int8_t i8v __attribute__((vector_size(TILE_LANES)));
typedef uint8_t u8v __attribute__((vector_size(TILE_LANES)));
typedef int16_t i16v __attribute__((vector_size(2 * TILE_LANES)));

/* ---- splat, iota and masks */
TILE_INLINE f32v splat_f32(float x) { return x - (f32v){0}; }
TILE_INLINE f64v splat_f64(double x) { return x - (f64v){0}; }
TILE_INLINE i32v splat_i32(int32_t x) { return x - (i32v){0}; }
TILE_INLINE i64v splat_i64(int64_t x) { return x - (i64v){0}; }
TILE_INLINE i32v splat_bool(int x) { return splat_i32(-(x != 0)); }
TILE_INLINE i32v iota_i32(void) {
    i32v v;
    TILE_UNROLL for (int i = 0; i < TILE_LANES; i++) v[i] = i;
    return v;
}
TILE_INLINE i64v iota_i64(void) { return __builtin_convertvector(iota_i32(), i64v); }
TILE_INLINE int32_t clamp_lanes(int64_t n) { return (int32_t)(n < 0 ? 0 : n > TILE_LANES ? TILE_LANES : n); }
/* Lanes i with i < n; any n. */
TILE_INLINE i32v lanes_below(int64_t n) { return iota_i32() < splat_i32(clamp_lanes(n)); }
TILE_INLINE i32v lanes_from(int64_t n) { return iota_i32() >= splat_i32(clamp_lanes(n)); }
TILE_INLINE i32v narrow_mask(i64v mask) { return __builtin_convertvector(mask, i32v); }
TILE_INLINE i64v widen_mask(i32v mask) { return __builtin_convertvector(mask, i64v); }

#if defined(__AVX512F__)
TILE_INLINE __mmask16 bits_of(i32v m) { return _mm512_cmplt_epi32_mask((__m512i)m, _mm512_setzero_si512()); }
TILE_INLINE f32v select_f32(i32v m, f32v a, f32v b) { return (f32v)_mm512_mask_blend_ps(bits_of(m), (__m512)b, (__m512)a); }
TILE_INLINE f32v max_raw(f32v a, f32v b) { return (f32v)_mm512_max_ps((__m512)a, (__m512)b); } /* b if either is NaN */
TILE_INLINE f32v min_raw(f32v a, f32v b) { return (f32v)_mm512_min_ps((__m512)a, (__m512)b); }
/* NaN if either is NaN: where b is one, it stays; else the instruction gives its second operand. */
TILE_INLINE f32v max_f32(f32v a, f32v b) {
    return (f32v)_mm512_mask_max_ps((__m512)b, _mm512_cmp_ps_mask((__m512)b, (__m512)b, _CMP_ORD_Q), (__m512)b, (__m512)a);
}
TILE_INLINE f32v min_f32(f32v a, f32v b) {
    return (f32v)_mm512_mask_min_ps((__m512)b, _mm512_cmp_ps_mask((__m512)b, (__m512)b, _CMP_ORD_Q), (__m512)b, (__m512)a);
}
TILE_INLINE int has_nan(f32v x) { return _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q) != 0; }
TILE_INLINE f32v sqrt_f32v(f32v x) { return (f32v)_mm512_sqrt_ps((__m512)x); }
TILE_INLINE f32v round_f32v(f32v x) { return (f32v)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
TILE_INLINE f32v floor_f32v(f32v x) { return (f32v)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
TILE_INLINE f32v ceil_f32v(f32v x) { return (f32v)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC); }
TILE_INLINE i32v to_i32v(f32v x) { return (i32v)_mm512_cvtps_epi32((__m512)x); }
TILE_INLINE f32v load_masked_f32(const float* p, i32v m) { return (f32v)_mm512_maskz_loadu_ps(bits_of(m), p); }
TILE_INLINE void store_masked_f32(float* p, i32v m, f32v v) { _mm512_mask_storeu_ps(p, bits_of(m), (__m512)v); }
#elif defined(__AVX2__)
TILE_INLINE f32v select_f32(i32v m, f32v a, f32v b) { return (f32v)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)m); }
TILE_INLINE f32v max_raw(f32v a, f32v b) { return (f32v)_mm256_max_ps((__m256)a, (__m256)b); } /* b if either is NaN */
TILE_INLINE f32v min_raw(f32v a, f32v b) { return (f32v)_mm256_min_ps((__m256)a, (__m256)b); }
TILE_INLINE int has_nan(f32v x) { return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)x, _CMP_UNORD_Q)) != 0; }
TILE_INLINE f32v sqrt_f32v(f32v x) { return (f32v)_mm256_sqrt_ps((__m256)x); }
TILE_INLINE f32v round_f32v(f32v x) { return (f32v)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
TILE_INLINE f32v floor_f32v(f32v x) { return (f32v)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
TILE_INLINE f32v ceil_f32v(f32v x) { return (f32v)_mm256_round_ps((__m256)x, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC); }
TILE_INLINE i32v to_i32v(f32v x) { return (i32v)_mm256_cvtps_epi32((__m256)x); }
TILE_INLINE f32v load_masked_f32(const float* p, i32v m) { return (f32v)_mm256_maskload_ps(p, (__m256i)m); }
TILE_INLINE void store_masked_f32(float* p, i32v m, f32v v) { _mm256_maskstore_ps(p, (__m256i)m, (__m256)v); }
#else
TILE_INLINE f32v select_f32(i32v m, f32v a, f32v b) { return (f32v)(((i32v)a & m) | ((i32v)b & ~m)); }
TILE_INLINE f32v max_raw(f32v a, f32v b) { return select_f32(a > b, a, b); }
TILE_INLINE f32v min_raw(f32v a, f32v b) { return select_f32(a < b, a, b); }
TILE_INLINE int has_nan(f32v x) {
    int found = 0;
    TILE_UNROLL for (int i = 0; i < TILE_LANES; i++) found |= x[i] != x[i];
    return found;
}
#define TILE_EACH_LANE(name, call) \
    TILE_INLINE f32v name(f32v x) { TILE_UNROLL for (int i = 0; i < TILE_LANES; i++) x[i] = call(x[i]); return x; }
TILE_EACH_LANE(sqrt_f32v, sqrtf)
TILE_EACH_LANE(round_f32v, rintf)
TILE_EACH_LANE(floor_f32v, floorf)
TILE_EACH_LANE(ceil_f32v, ceilf)
TILE_INLINE i32v to_i32v(f32v x) { return __builtin_convertvector(x, i32v); }
TILE_INLINE f32v load_masked_f32(const float* p, i32v m) {
    f32v v = {0};
    TILE_UNROLL for (int i = 0; i < TILE_LANES; i++) if (m[i]) v[i] = p[i];
    return v;
}
TILE_INLINE void store_masked_f32(float* p, i32v m, f32v v) {
    TILE_UNROLL for (int i = 0; i < TILE_LANES; i++) if (m[i]) p[i] = v[i];
}
#endif

#if !defined(__AVX512F__)
TILE_INLINE f32v max_f32(f32v a, f32v b) { return select_f32(b != b, b, max_raw(b, a)); } /* NaN if either is NaN */
TILE_INLINE f32v min_f32(f32v a, f32v b) { return select_f32(b != b, b, min_raw(b, a)); }
#endif
TILE_INLINE i32v select_i32(i32v m, i32v a, i32v b) { return (a & m) | (b & ~m); }
TILE_INLINE i32v select_bool(i32v m, i32v a, i32v b) { return (a & m) | (b & ~m); }
TILE_INLINE i64v select_i64(i32v m, i64v a, i64v b) { i64v w = widen_mask(m); return (a & w) | (b & ~w); }
TILE_INLINE f64v select_f64(i32v m, f64v a, f64v b) { return (f64v)select_i64(m, (i64v)a, (i64v)b); }

/* ---- contiguous access: whole vectors, and under a mask (bytes are a bool in memory) */
TILE_INLINE f32v load_f32(const float* p) { f32v v; memcpy(&v, p, sizeof v); return v; }
TILE_INLINE f64v load_f64(const double* p) { f64v v; memcpy(&v, p, sizeof v); return v; }
TILE_INLINE i32v load_i32(const int32_t* p) { i32v v; memcpy(&v, p, sizeof v); return v; }
TILE_INLINE i64v load_i64(const int64_t* p) { i64v v; memcpy(&v, p, sizeof v); return v; }
TILE_INLINE i32v load_bool(const uint8_t* p) { i32v v; TILE_UNROLL for (int i = 0; i < TILE_LANES; i++) v[i] = -(p[i] != 0); return v; }
TILE_INLINE void store_f32(float* p, f32v v) { memcpy(p, &v, sizeof v); }
TILE_INLINE void store_f64(double* p, f64v v) { memcpy(p, &v, sizeof v); }
TILE_INLINE void store_i32(int32_t* p, i32v v) { memcpy(p, &v, sizeof v); }
TILE_INLINE void store_i64(int64_t* p, i64v v) { memcpy(p, &v, sizeof v); }
TILE_INLINE void store_bool(uint8_t* p, i32v v) { TILE_UNROLL for (int i = 0; i < TILE_LANES; i++) p[i] = (uint8_t)(v[i] & 1); }

/* Narrow integers are i32 in registers; `narrow` wraps a value to the type's range, as its arithmetic does. */
#define TILE_NARROW(name, element, packed, widen, shrink)                                                    \
    TILE_INLINE i32v load_##name(const element* p) { packed v; memcpy(&v, p, sizeof v); return widen(v); }   \
    TILE_INLINE void store_##name(element* p, i32v v) {                                                      \
        packed n = shrink(v, packed);                                                                        \
        memcpy(p, &n, sizeof n);                                                                             \
    }
#define TILE_SHRINK(v, packed) __builtin_convertvector(v, packed)
#if defined(__AVX512F__)
#define TILE_WIDEN_I8(v) (i32v)_mm512_cvtepi8_epi32((__m128i)(v))
#define TILE_WIDEN_U8(v) (i32v)_mm512_cvtepu8_epi32((__m128i)(v))
#define TILE_WIDEN_I16(v) (i32v)_mm512_cvtepi16_epi32((__m256i)(v))
#elif defined(__AVX2__)
#define TILE_WIDEN_I8(v) (i32v)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)&(v)))
#define TILE_WIDEN_U8(v) (i32v)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)&(v)))
#define TILE_WIDEN_I16(v) (i32v)_mm256_cvtepi16_epi32((__m128i)(v))
#else
#define TILE_WIDEN_I8(v) __builtin_convertvector(v, i32v)
#define TILE_WIDEN_U8(v) __builtin_convertvector(v, i32v)
#define TILE_WIDEN_I16(v) __builtin_convertvector(v, i32v)
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
TILE_INLINE int64_t low_bytes(i32v v) { /* gcc takes bytes out one by one */
    const __m128i every = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    __m128i low = _mm_shuffle_epi8(_mm256_castsi256_si128((__m256i)v), every);
    __m128i high = _mm_shuffle_epi8(_mm256_extracti128_si256((__m256i)v, 1), every);
    return _mm_cvtsi128_si64(_mm_unpacklo_epi32(low, high));
}
#define TILE_SHRINK_8(v, packed) (packed)low_bytes(v)
#else
#define TILE_SHRINK_8 TILE_SHRINK
#endif
TILE_NARROW(i8, int8_t, i8v, TILE_WIDEN_I8, TILE_SHRINK_8)
TILE_NARROW(u8, uint8_t, u8v, TILE_WIDEN_U8, TILE_SHRINK_8)
TILE_NARROW(i16, int16_t, i16v, TILE_WIDEN_I16, TILE_SHRINK)
TILE_INLINE i32v narrow_i8(i32v v) { return v << 24 >> 24; }
TILE_INLINE i32v narrow_u8(i32v v) { return v & 255; }
TILE_INLINE i32v narrow_i16(i32v v) { return v << 16 >> 16; }

#define TILE_MASKED(name, vector, element, read, write)                                                     \
    TILE_INLINE vector load_masked_##name(const element* p, i32v m) {                                       \
        vector v = {0};                                                                                     \
        TILE_UNROLL for (int i = 0; i < TILE_LANES; i++) if (m[i]) v[i] = read(p[i]);                       \
        return v;                                                                                           \
    }                                                                                                       \
    TILE_INLINE void store_masked_##name(element* p, i32v m, vector v) {                                    \
        TILE_UNROLL for (int i = 0; i < TILE_LANES; i++) if (m[i]) p[i] = (element)write(v[i]);             \
    }
#define TILE_AS_IS(x) (x)
#define TILE_TO_MASK(x) (-((x) != 0))
#define TILE_TO_BIT(x) ((x) & 1)
TILE_MASKED(f64, f64v, double, TILE_AS_IS, TILE_AS_IS)
TILE_MASKED(i32, i32v, int32_t, TILE_AS_IS, TILE_AS_IS)
TILE_MASKED(i64, i64v, int64_t, TILE_AS_IS, TILE_AS_IS)
TILE_MASKED(bool, i32v, uint8_t, TILE_TO_MASK, TILE_TO_BIT)
TILE_MASKED(i8, i32v, int8_t, TILE_AS_IS, TILE_AS_IS)
TILE_MASKED(u8, i32v, uint8_t, TILE_AS_IS, TILE_AS_IS)
TILE_MASKED(i16, i32v, int16_t, TILE_AS_IS, TILE_AS_IS)

/* ---- access at one offset per lane, under a mask */
#define TILE_GATHER(name, vector, element, read, write)                                                     \
    TILE_INLINE vector gather_##name(const element* p, i64v at, i32v m) {                                   \
        vector v = {0};                                                                                     \
        TILE_UNROLL for (int i = 0; i < TILE_LANES; i++) if (m[i]) v[i] = read(p[at[i]]);                   \
        return v;                                                                                           \
    }                                                                                                       \
    TILE_INLINE void scatter_##name(element* p, i64v at, i32v m, vector v) {                                \
        TILE_UNROLL for (int i = 0; i < TILE_LANES; i++) if (m[i]) p[at[i]] = (element)write(v[i]);         \
    }
TILE_GATHER(f32, f32v, float, TILE_AS_IS, TILE_AS_IS)
TILE_GATHER(f64, f64v, double, TILE_AS_IS, TILE_AS_IS)
TILE_GATHER(i32, i32v, int32_t, TILE_AS_IS, TILE_AS_IS)
TILE_GATHER(i64, i64v, int64_t, TILE_AS_IS, TILE_AS_IS)
TILE_GATHER(bool, i32v, uint8_t, TILE_TO_MASK, TILE_TO_BIT)
TILE_GATHER(i8, i32v, int8_t, TILE_AS_IS, TILE_AS_IS)
TILE_GATHER(u8, i32v, uint8_t, TILE_AS_IS, TILE_AS_IS)
TILE_GATHER(i16, i32v, int16_t, TILE_AS_IS, TILE_AS_IS)

#include "tile_half.h"

/* ---- stores past the caches, for results that none would hold; `streams_done` before anybody else reads them */
#if defined(__AVX512F__)
#define TILE_STREAM(p, v) _mm512_stream_ps(p, (__m512)(v))
#elif defined(__AVX2__)
#define TILE_STREAM(p, v) _mm256_stream_ps(p, (__m256)(v))
#else
#define TILE_STREAM store_f32
#define _mm_sfence() (void)0
#endif
/* Elements from p to the first address that is a multiple of a vector's size. */
TILE_INLINE int64_t lanes_to_vector(const float* p) { return (int64_t)(-((uintptr_t)p / sizeof *p) % TILE_LANES); }
TILE_INLINE void stream_f32(float* p, f32v v) { if (lanes_to_vector(p)) store_f32(p, v); else TILE_STREAM(p, v); }
TILE_INLINE void streams_done(void) { _mm_sfence(); }

#include "tile_math.h"

/* One lane at a time through libm: rare operations, and all of f64. */
#define TILE_UNARY(name, vector, call) \
    TILE_INLINE vector name(vector x) { for (int i = 0; i < TILE_LANES; i++) x[i] = call(x[i]); return x; }
#define TILE_BINARY(name, vector, call) \
    TILE_INLINE vector name(vector x, vector y) { for (int i = 0; i < TILE_LANES; i++) x[i] = call(x[i], y[i]); return x; }
TILE_INLINE double scalar_sign(double x) { return x > 0 ? 1 : x < 0 ? -1 : x; }
TILE_INLINE double scalar_rsqrt(double x) { return 1 / sqrt(x); }
TILE_INLINE double scalar_sigmoid(double x) { return 1 / (1 + exp(-x)); }
TILE_INLINE double scalar_max(double a, double b) { return a != a ? a : b != b ? b : a > b ? a : b; }
TILE_INLINE double scalar_min(double a, double b) { return a != a ? a : b != b ? b : a < b ? a : b; }
/* sin(x + turn * pi/2): x - n * pi/2 in three steps, each one multiply-add, then Cephes' polynomials for up to pi/4. */
TILE_INLINE f32v sin_turned_f32(f32v x, int turn) {
    f32v n = round_f32v(x * 0.636619772f);
    f32v r = x - n * 1.57079637f;
    r = r - n * -4.37113883e-8f;
    r = r - n * -1.71512451e-15f;
    i32v quarter = __builtin_convertvector(n, i32v) + turn;
    f32v z = r * r, s = splat_f32(-1.9515295891e-4f), c = splat_f32(2.443315711809948e-5f);
    s = s * z + 8.3321608736e-3f;
    s = s * z + -1.6666654611e-1f;
    s = s * (z * r) + r;
    c = c * z + -1.388731625493765e-3f;
    c = c * z + 4.166664568298827e-2f;
    c = c * (z * z) + z * -0.5f + 1.0f;
    f32v y = select_f32((quarter & 1) != 0, c, s);
    return (f32v)((i32v)y ^ ((quarter & 2) << 30));
}
TILE_INLINE int is_far_f32(f32v x) { /* whether some lane is too large for three steps, or no number */
    int far = 0;
    for (int i = 0; i < TILE_LANES; i++) far |= !(fabsf(x[i]) <= 8192.0f);
    return far;
}
TILE_UNARY(far_sin_f32, f32v, sinf)
TILE_UNARY(far_cos_f32, f32v, cosf)
TILE_INLINE f32v sin_f32(f32v x) { return is_far_f32(x) ? far_sin_f32(x) : select_f32(x == 0, x, sin_turned_f32(x, 0)); }
TILE_INLINE f32v cos_f32(f32v x) { return is_far_f32(x) ? far_cos_f32(x) : sin_turned_f32(x, 1); }
TILE_BINARY(pow_f32, f32v, powf)
TILE_UNARY(abs_f64, f64v, fabs)
TILE_UNARY(sign_f64, f64v, scalar_sign)
TILE_UNARY(floor_f64, f64v, floor)
TILE_UNARY(ceil_f64, f64v, ceil)
TILE_UNARY(round_f64, f64v, rint)
TILE_UNARY(sqrt_f64, f64v, sqrt)
TILE_UNARY(rsqrt_f64, f64v, scalar_rsqrt)
TILE_UNARY(exp_f64, f64v, exp)
TILE_UNARY(exp2_f64, f64v, exp2)
TILE_UNARY(log_f64, f64v, log)
TILE_UNARY(log2_f64, f64v, log2)
TILE_UNARY(sin_f64, f64v, sin)
TILE_UNARY(cos_f64, f64v, cos)
TILE_UNARY(tanh_f64, f64v, tanh)
TILE_UNARY(erf_f64, f64v, erf)
TILE_UNARY(sigmoid_f64, f64v, scalar_sigmoid)
TILE_BINARY(pow_f64, f64v, pow)
TILE_BINARY(max_f64, f64v, scalar_max)
TILE_BINARY(min_f64, f64v, scalar_min)

/* ---- integers: division rounds toward minus infinity; the smallest one by -1 is itself, where the processor would trap */
TILE_INLINE int64_t neg_i64(int64_t a) { return (int64_t)(0 - (uint64_t)a); }
TILE_INLINE int64_t floordiv_i64(int64_t a, int64_t b) { /* 0 for b = 0: an index into an empty axis, never used */
    if (b == 0) return 0;
    if (b == -1) return neg_i64(a);
    int64_t q = a / b;
    return q - ((a % b != 0) & ((a < 0) != (b < 0)));
}
TILE_INLINE int64_t mod_i64(int64_t a, int64_t b) {
    if (b == 0 || b == -1) return 0;
    int64_t r = a % b;
    return r + (r != 0 && (r < 0) != (b < 0) ? b : 0);
}
TILE_INLINE int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
TILE_INLINE int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
TILE_INLINE int64_t pow_i64(int64_t a, int64_t b) {
    uint64_t r = b < 0 ? (a == 1) : 1;
    for (; b > 0; b--) r *= (uint64_t)a;
    return (int64_t)r;
}
TILE_INLINE int64_t sign_i64(int64_t a) { return (a > 0) - (a < 0); }
TILE_INLINE int64_t abs_i64(int64_t a) { return a < 0 ? neg_i64(a) : a; }
#define TILE_INTEGERS(vector, suffix)                   \
    TILE_BINARY(floordiv_##suffix, vector, floordiv_i64) \
    TILE_BINARY(mod_##suffix, vector, mod_i64)           \
    TILE_BINARY(min_##suffix, vector, min_i64)           \
    TILE_BINARY(max_##suffix, vector, max_i64)           \
    TILE_BINARY(pow_##suffix, vector, pow_i64)           \
    TILE_UNARY(sign_##suffix, vector, sign_i64)          \
    TILE_UNARY(abs_##suffix, vector, abs_i64)
TILE_INTEGERS(i64v, i64v)
TILE_INTEGERS(i32v, i32v)

/* ---- one element: the vector functions on lane 0, so that scalar and vector code agree to the bit */
#define TILE_SCALAR1(name) TILE_INLINE float name##_s(float x) { return name(splat_f32(x))[0]; }
TILE_SCALAR1(exp_f32)
TILE_SCALAR1(exp_below_f32)
TILE_SCALAR1(exp2_f32)
TILE_SCALAR1(log_f32)
TILE_SCALAR1(log2_f32)
TILE_SCALAR1(tanh_f32)
TILE_SCALAR1(erf_f32)
TILE_SCALAR1(sigmoid_f32)
TILE_INLINE float max_f32_s(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }
TILE_INLINE float min_f32_s(float a, float b) { return a != a ? a : b != b ? b : a < b ? a : b; }
TILE_INLINE float sign_f32_s(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x; }
TILE_INLINE float rsqrt_f32_s(float x) { return 1.0f / sqrtf(x); }

/* ---- horizontal reduction, in a butterfly. max and min keep a NaN, which is looked for once, not in every step. */
#if defined(__clang__)
#define TILE_SHUFFLE(v, mask) __builtin_shufflevector(v, mask)
#else
#define TILE_SHUFFLE(v, mask) __builtin_shuffle(v, mask)
#endif
#define TILE_LANE_FOLD(name, join)                                                                  \
    TILE_INLINE float name(f32v v) {                                                                \
        TILE_UNROLL for (int w = TILE_LANES / 2; w; w /= 2) v = join(v, TILE_SHUFFLE(v, iota_i32() ^ w)); \
        return v[0];                                                                                \
    }
TILE_INLINE f32v add_f32(f32v a, f32v b) { return a + b; }
TILE_INLINE f32v mul_f32(f32v a, f32v b) { return a * b; }
TILE_LANE_FOLD(sum_lanes, add_f32)
TILE_LANE_FOLD(prod_lanes, mul_f32)
TILE_LANE_FOLD(max_numbers, max_raw)
TILE_LANE_FOLD(min_numbers, min_raw)
TILE_LANE_FOLD(fmax_lanes, fmax_f32)
TILE_INLINE float max_lanes(f32v v) { const float most = max_numbers(v); return has_nan(v) ? NAN : most; }
TILE_INLINE float min_lanes(f32v v) { const float least = min_numbers(v); return has_nan(v) ? NAN : least; }
TILE_INLINE double scalar_add(double a, double b) { return a + b; }
TILE_INLINE double scalar_mul(double a, double b) { return a * b; }
#define TILE_WIDE_FOLD(name, join)                                         \
    TILE_INLINE double name(f64v v) {                                      \
        double x = v[0];                                                   \
        TILE_UNROLL for (int i = 1; i < TILE_LANES; i++) x = join(x, v[i]); \
        return x;                                                          \
    }
TILE_WIDE_FOLD(sum_lanes_f64, scalar_add)
TILE_WIDE_FOLD(prod_lanes_f64, scalar_mul)
TILE_WIDE_FOLD(max_lanes_f64, scalar_max)
TILE_WIDE_FOLD(min_lanes_f64, scalar_min)

#include "tile_bits.h"
#include "tile_mma.h"

/* ---- the register tile of integers: levels in 16 bits, sums in 32, exact modulo 2^32. Two rows of b at a time:
 * `pairs` holds (b[k][j], b[k + 1][j]) for TILE_LANES columns j, and meets a pair of a, low half first. 16-bit levels lie
 * in rows, TILE_PANEL elements apart; bytes in fours of rows, of which the first (0) or the second pair (2) is taken. */
#if defined(__AVX512BW__)
typedef __m512i pairs;
TILE_INLINE pairs bytes_apart(const void* fours, int64_t first) { /* in the high halves of 16 bits */
    const __m512i order = _mm512_broadcast_i32x4(_mm_set_epi64x((int64_t)0x0d800c8009800880, 0x0580048001800080));
    const __m512i later = _mm512_set1_epi16((int16_t)(first << 8));
    return _mm512_shuffle_epi8(_mm512_loadu_si512(fours), _mm512_add_epi8(order, later));
}
TILE_INLINE pairs pairs_i8(const int8_t* fours, int64_t first) { return _mm512_srai_epi16(bytes_apart(fours, first), 8); }
TILE_INLINE pairs pairs_u8(const uint8_t* fours, int64_t first) { return _mm512_srli_epi16(bytes_apart(fours, first), 8); }
TILE_INLINE pairs pairs_i16(const int16_t* even, int64_t next) {
    __m256i x = _mm256_loadu_si256((const __m256i*)even), y = _mm256_loadu_si256((const __m256i*)(even + next));
    __m256i low = _mm256_unpacklo_epi16(x, y), high = _mm256_unpackhi_epi16(x, y);
    return _mm512_inserti64x4(
        _mm512_castsi256_si512(_mm256_permute2x128_si256(low, high, 0x20)), _mm256_permute2x128_si256(low, high, 0x31), 1
    );
}
TILE_INLINE void dot_pairs(i32v* acc, int32_t a, pairs b) {
    *acc += (i32v)_mm512_madd_epi16(_mm512_set1_epi32(a), b);
    TILE_KEEP(*acc);
}
static inline TILE_FUSED_DOT __attribute__((always_inline)) void dot_fused(i32v* acc, int32_t a, pairs b) {
    TILE_DOT_WORDS(*acc, _mm512_set1_epi32(a), b);
}
#elif defined(__AVX2__)
typedef __m256i pairs;
TILE_INLINE pairs bytes_apart(const void* fours, int64_t first) { /* in the high halves of 16 bits */
    const __m256i order = _mm256_broadcastsi128_si256(_mm_set_epi64x((int64_t)0x0d800c8009800880, 0x0580048001800080));
    const __m256i later = _mm256_set1_epi16((int16_t)(first << 8));
    return _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i*)fours), _mm256_add_epi8(order, later));
}
TILE_INLINE pairs pairs_i8(const int8_t* fours, int64_t first) { return _mm256_srai_epi16(bytes_apart(fours, first), 8); }
TILE_INLINE pairs pairs_u8(const uint8_t* fours, int64_t first) { return _mm256_srli_epi16(bytes_apart(fours, first), 8); }
TILE_INLINE pairs pairs_i16(const int16_t* even, int64_t next) {
    __m128i x = _mm_loadu_si128((const __m128i*)even), y = _mm_loadu_si128((const __m128i*)(even + next));
    return _mm256_set_m128i(_mm_unpackhi_epi16(x, y), _mm_unpacklo_epi16(x, y));
}
TILE_INLINE void dot_pairs(i32v* acc, int32_t a, pairs b) {
    *acc += (i32v)_mm256_madd_epi16(_mm256_set1_epi32(a), b);
    TILE_KEEP(*acc);
}
static inline TILE_FUSED_DOT __attribute__((always_inline)) void dot_fused(i32v* acc, int32_t a, pairs b) {
    TILE_DOT_WORDS(*acc, _mm256_set1_epi32(a), b);
}
#else
typedef struct pairs { i32v even, odd; } pairs;
#define TILE_PAIRS(name, element)                                                                  \
    TILE_INLINE pairs pairs_##name(const element* fours, int64_t first) {                          \
        pairs v;                                                                                   \
        TILE_UNROLL for (int i = 0; i < TILE_LANES; i++)                                           \
            v.even[i] = fours[4 * i + first], v.odd[i] = fours[4 * i + first + 1];                 \
        return v;                                                                                  \
    }
TILE_PAIRS(i8, int8_t)
TILE_PAIRS(u8, uint8_t)
TILE_INLINE pairs pairs_i16(const int16_t* even, int64_t next) { return (pairs){load_i16(even), load_i16(even + next)}; }
TILE_INLINE void dot_pairs(i32v* acc, int32_t a, pairs b) {
    *acc += splat_i32((int16_t)(a & 0xffff)) * b.even + splat_i32(a >> 16) * b.odd;
}
#endif
TILE_INLINE int32_t pair_at(const int16_t* a) { int32_t both; memcpy(&both, a, sizeof both); return both; }
#define TILE_ROW_AT_i16(j) ((j) * TILE_LANES / TILE_PANEL * panel + (j) * TILE_LANES % TILE_PANEL)
#define TILE_ROW_AT_i8(j) ((j) * TILE_LANES / TILE_PANEL * panel + (j) * TILE_LANES % TILE_PANEL * 4)
#define TILE_ROW_AT_u8(j) TILE_ROW_AT_i8(j)
/* Two rows of depth from k on, which stand `row` elements into the panels of b. */
#define TILE_DOT_STEP(MR, NV, NAME, DOT, PAIR, row, SECOND)                                                           \
    do {                                                                                                              \
        pairs bv[NV];                                                                                                 \
        TILE_UNROLL for (int j = 0; j < NV; j++) bv[j] = pairs_##NAME(b + TILE_ROW_AT_##NAME(j) + (row), SECOND);     \
        TILE_UNROLL for (int i = 0; i < MR; i++) {                                                                    \
            const int32_t av = PAIR(a + i * lda + k);                                                                 \
            TILE_UNROLL for (int j = 0; j < NV; j++) DOT(&acc[i][j], av, bv[j]);                                      \
        }                                                                                                             \
    } while (0)
#define TILE_LOW_HALF(at) (*(at) & 0xffff)
#define TILE_DEPTH_i16(MR, NV, NAME, DOT)                                                                             \
    for (; k + 2 <= depth; k += 2) TILE_DOT_STEP(MR, NV, NAME, DOT, pair_at, k * TILE_PANEL, TILE_PANEL);             \
    if (k < depth) TILE_DOT_STEP(MR, NV, NAME, DOT, TILE_LOW_HALF, k * TILE_PANEL, 0); /* the last of an odd depth */
#define TILE_DEPTH_i8(MR, NV, NAME, DOT)                                                                              \
    for (; k + 4 <= depth; k += 2) { /* and 2 below */                                                                \
        TILE_DOT_STEP(MR, NV, NAME, DOT, pair_at, k * TILE_PANEL, 0);                                                 \
        k += 2;                                                                                                       \
        TILE_DOT_STEP(MR, NV, NAME, DOT, pair_at, (k - 2) * TILE_PANEL, 2);                                           \
    }                                                                                                                 \
    for (const int64_t four = k * TILE_PANEL; k < depth; k += 2) {                                                    \
        if (k + 1 < depth) TILE_DOT_STEP(MR, NV, NAME, DOT, pair_at, four, k & 2);                                    \
        else TILE_DOT_STEP(MR, NV, NAME, DOT, TILE_LOW_HALF, four, k & 2);                                            \
    }
#define TILE_DEPTH_u8(MR, NV, NAME, DOT) TILE_DEPTH_i8(MR, NV, NAME, DOT)
#define TILE_DOT_WITH(MR, NV, NAME, ELEMENT, TILE, DOT)                                                               \
    static __attribute__((noinline)) void TILE##_##NAME##_##MR##x##NV(                                                \
        const int16_t* restrict a, int64_t lda, int64_t step, const ELEMENT* restrict b, int64_t panel,               \
        int32_t* restrict c, int64_t ldc, int64_t depth, int clear) {                                                 \
        (void)step; /* 1: pairs of a lie side by side */                                                              \
        i32v acc[MR][NV];                                                                                             \
        TILE_UNROLL for (int i = 0; i < MR; i++) TILE_UNROLL for (int j = 0; j < NV; j++) acc[i][j] =                 \
            clear ? (i32v){0} : load_i32(c + i * ldc + j * TILE_LANES);                                               \
        int64_t k = 0;                                                                                                \
        TILE_DEPTH_##NAME(MR, NV, NAME, DOT)                                                                          \
        TILE_UNROLL for (int i = 0; i < MR; i++) TILE_UNROLL for (int j = 0; j < NV; j++)                             \
            store_i32(c + i * ldc + j * TILE_LANES, acc[i][j]);                                                       \
    }
#define TILE_DOT(MR, NV, NAME, ELEMENT) TILE_DOT_WITH(MR, NV, NAME, ELEMENT, dot, dot_pairs)
#if defined(TILE_FUSED_DOT) /* for processors that multiply and add in one instruction (VNNI) */
#define TILE_DOT_FUSED(MR, NV, NAME, ELEMENT) TILE_FUSED_DOT TILE_DOT_WITH(MR, NV, NAME, ELEMENT, fused, dot_fused)
#endif

/* How many of the rows that are left the next tile takes: all full tiles, but the last ones in one `tall` tile that is
 * narrower, or in two even ones. */
#define TILE_ROWS(left, full, tall)                                                                                   \
    ((left) >= 2 * (full) || (left) == (full) ? (full) : (left) > (tall) ? ((left) + 1) / 2 : (left))
#define TILE_CALL(shape, row, at)                                                                                     \
    shape(a + (row) * lda, lda, step, b + (at) * panel, panel, c + (row) * ldc + (at) * TILE_PANEL, ldc, depth, clear)

#include "tile_pack.h"
#include "tile_narrow.h"
#include "tile_bytes.h"

#endif
