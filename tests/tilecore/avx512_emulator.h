/* AVX-512 and AMX in plain C, for machines that have AVX2 alone: with `-include`, kernels of the rows of targets for them
 * are compiled for AVX2, with these functions for their instructions. Only what the verbs use is here.
 *
 * Tile registers check what the processor checks: shapes, and that they were set. Sums of bf16 are taken in the order of
 * the manual's description, pair by pair; numbers below 2^-126 count as 0 in them, as there.
 */
#ifndef AVX512_EMULATOR_H
#define AVX512_EMULATOR_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tile_features.h"

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors of 64 bytes go between functions of one file only */
#ifdef __clang__
#pragma clang diagnostic ignored "-Wmacro-redefined" /* its headers have some of these as macros already */
#endif
#define TILE_INTRINSICS_H /* this file stands for it */
#define __AVX512F__ 1
#define __AVX512DQ__ 1
#define __AVX512BW__ 1
#if defined(EMULATED_AMX)
#define __AVX512BF16__ 1
#define __AMX_BF16__ 1
#endif
#define tile_x86_vnni(bits) 1
#define tile_x86_amx_bytes() 1

#define TILE_UNROLL /* loops stay loops, which compile ten times as fast */
#define TILE_UNROLL_DEPTH
#define EMULATED static __attribute__((noinline, unused))
typedef float e_f32 __attribute__((vector_size(64)));
typedef int32_t e_i32 __attribute__((vector_size(64)));
typedef uint32_t e_u32 __attribute__((vector_size(64)));
typedef int16_t e_i16 __attribute__((vector_size(64)));
typedef uint16_t e_u16 __attribute__((vector_size(64)));
typedef int8_t e_i8 __attribute__((vector_size(64)));
typedef uint8_t e_u8 __attribute__((vector_size(64)));
typedef uint16_t e_half __attribute__((vector_size(32)));
typedef int16_t e_short __attribute__((vector_size(32)));
typedef int8_t e_byte __attribute__((vector_size(16)));
typedef int8_t e_bytes __attribute__((vector_size(32)));
typedef uint8_t e_ubyte __attribute__((vector_size(16)));

/* ---- floats */
#define E_FLOATS(name, expression) \
    EMULATED __m512 name(__m512 a, __m512 b) { for (int i = 0; i < 16; i++) { const float x = a[i], y = b[i]; a[i] = (expression); } return a; }
E_FLOATS(e_max_ps, x > y ? x : y)
E_FLOATS(e_min_ps, x < y ? x : y)
EMULATED __m512 e_sqrt_ps(__m512 a) { for (int i = 0; i < 16; i++) a[i] = sqrtf(a[i]); return a; }
EMULATED float e_rounded(float x, int how) {
    how &= 7;
    return how == _MM_FROUND_TO_NEAREST_INT ? rintf(x) : how == _MM_FROUND_TO_NEG_INF ? floorf(x) : how == _MM_FROUND_TO_POS_INF ? ceilf(x) : truncf(x);
}
EMULATED __m512 e_roundscale_ps(__m512 a, int how) { for (int i = 0; i < 16; i++) a[i] = e_rounded(a[i], how); return a; }
EMULATED __m512 e_reduce_ps(__m512 a, int how) {
    for (int i = 0; i < 16; i++) a[i] = isinf(a[i]) ? 0.0f : a[i] - e_rounded(a[i], how);
    return a;
}
EMULATED __m512 e_maskz_scalef_ps(__mmask16 k, __m512 a, __m512 b) {
    for (int i = 0; i < 16; i++) {
        const float power = floorf(b[i]);
        float x = isnan(power) ? power : power > 400 ? a[i] * INFINITY : power < -400 ? a[i] * 0.0f : ldexpf(a[i], (int)power);
        a[i] = k >> i & 1 ? x : 0.0f;
    }
    return a;
}
EMULATED __mmask16 e_cmp_ps_mask(__m512 a, __m512 b, int how) {
    int k = 0;
    if (how != _CMP_NLT_UQ && how != _CMP_ORD_Q && how != _CMP_UNORD_Q) abort();
    for (int i = 0; i < 16; i++) {
        const int ordered = a[i] == a[i] && b[i] == b[i];
        k |= (how == _CMP_NLT_UQ ? !(a[i] < b[i]) : ordered == (how == _CMP_ORD_Q)) << i;
    }
    return (__mmask16)k;
}
EMULATED __m512 e_set1_ps(float x) { return (__m512)(x - (e_f32){0}); }
EMULATED __m512 e_unpack_ps(__m512 a, __m512 b, int from) { /* of every four lanes, two of each in turns */
    __m512 both;
    for (int i = 0; i < 16; i++) both[i] = (i & 1 ? b : a)[(i & ~3) + from + (i & 3) / 2];
    return both;
}
EMULATED __m512d e_unpack_pd(__m512d a, __m512d b, int from) {
    __m512d both;
    for (int i = 0; i < 8; i++) both[i] = (i & 1 ? b : a)[(i & ~1) + from];
    return both;
}
EMULATED __m256d e_extractf64x4_pd(__m512d a, int part) { return (__m256d){a[4 * part], a[4 * part + 1], a[4 * part + 2], a[4 * part + 3]}; }
EMULATED __m512i e_cvtps_epi32(__m512 a) {
    e_i32 n;
    for (int i = 0; i < 16; i++) n[i] = fabsf(a[i]) < 2147483648.0f ? (int32_t)lrintf(a[i]) : INT32_MIN;
    return (__m512i)n;
}

EMULATED __m512 e_permutex2var_ps(__m512 low, __m512i at, __m512 high) {
    __m512 v = low;
    for (int i = 0; i < 16; i++) {
        const int place = ((e_i32)at)[i] & 31;
        v[i] = place < 16 ? low[place] : high[place - 16];
    }
    return v;
}

/* ---- memory and masks */
EMULATED __m512 e_loadu_ps(const void* p) { __m512 v; memcpy(&v, p, sizeof v); return v; }
EMULATED __m512i e_loadu_si512(const void* p) { __m512i v; memcpy(&v, p, sizeof v); return v; }
EMULATED void e_storeu_si512(void* p, __m512i v) { memcpy(p, &v, sizeof v); }
EMULATED __m512 e_maskz_loadu_ps(__mmask16 k, const float* p) {
    __m512 v = (__m512)(e_f32){0};
    for (int i = 0; i < 16; i++) if (k >> i & 1) v[i] = p[i];
    return v;
}
EMULATED void e_stream_ps(float* p, __m512 v) {
    if ((uintptr_t)p % 64) abort();
    for (int i = 0; i < 16; i++) p[i] = v[i];
}
EMULATED void e_mask_storeu_ps(float* p, __mmask16 k, __m512 v) { for (int i = 0; i < 16; i++) if (k >> i & 1) p[i] = v[i]; }
EMULATED __m256i e_maskz_loadu_epi16(__mmask16 k, const uint16_t* p) {
    e_half v = {0};
    for (int i = 0; i < 16; i++) if (k >> i & 1) v[i] = p[i];
    return (__m256i)v;
}
EMULATED void e_mask_storeu_epi16(uint16_t* p, __mmask16 k, e_half v) {
    for (int i = 0; i < 16; i++) if (k >> i & 1) p[i] = v[i];
}
EMULATED __mmask16 e_sign_mask(__m512i m) {
    int k = 0;
    for (int i = 0; i < 16; i++) k |= (((e_i32)m)[i] < 0) << i;
    return (__mmask16)k;
}
EMULATED __m512 e_mask_blend_ps(__mmask16 k, __m512 a, __m512 b) {
    for (int i = 0; i < 16; i++) if (k >> i & 1) a[i] = b[i];
    return a;
}

EMULATED __m512 e_mask_max_ps(__m512 from, __mmask16 k, __m512 a, __m512 b) { return e_mask_blend_ps(k, from, e_max_ps(a, b)); }
EMULATED __m512 e_mask_min_ps(__m512 from, __mmask16 k, __m512 a, __m512 b) { return e_mask_blend_ps(k, from, e_min_ps(a, b)); }

/* ---- widths */
EMULATED __m512i e_join(__m256i low, __m256i high) { __m512i v; memcpy(&v, &low, 32); memcpy((char*)&v + 32, &high, 32); return v; }
EMULATED __m256i e_half_of(__m512i v, int which) { __m256i half; memcpy(&half, (char*)&v + 32 * which, 32); return half; }
EMULATED __m512 e_cvtph_ps(__m256i h) {
    return (__m512)e_join((__m256i)_mm256_cvtph_ps(_mm256_castsi256_si128(h)), (__m256i)_mm256_cvtph_ps(_mm256_extracti128_si256(h, 1)));
}
#define e_cvtps_ph(x, how) \
    _mm256_set_m128i(_mm256_cvtps_ph((__m256)e_half_of((__m512i)(x), 1), (how) & 7), _mm256_cvtps_ph((__m256)e_half_of((__m512i)(x), 0), (how) & 7))
EMULATED __m512i e_cvtepu16_epi32(__m256i v) { return (__m512i)__builtin_convertvector((e_half)v, e_i32); }
EMULATED __m512i e_cvtepi16_epi32(__m256i v) { return (__m512i)__builtin_convertvector((e_short)v, e_i32); }
EMULATED __m512i e_cvtepi8_epi32(__m128i v) { return (__m512i)__builtin_convertvector((e_byte)v, e_i32); }
EMULATED __m512i e_cvtepu8_epi32(__m128i v) { return (__m512i)__builtin_convertvector((e_ubyte)v, e_i32); }
EMULATED __m256i e_cvtepi32_epi16(__m512i v) { return (__m256i)__builtin_convertvector((e_i32)v, e_short); }
EMULATED __m256i e_cvtepi16_epi8(__m512i v) { return (__m256i)__builtin_convertvector((e_i16)v, e_bytes); }
EMULATED __m128i e_cvtepi32_epi8(__m512i v) { return (__m128i)__builtin_convertvector((e_i32)v, e_byte); }
EMULATED uint16_t e_bf16(float x) { /* to the nearest, ties to even; below 2^-126: 0 */
    uint32_t b;
    memcpy(&b, &x, sizeof b);
    if (isnan(x)) return (uint16_t)(b >> 16 | 0x40);
    if (fabsf(x) < 0x1p-126f) return (uint16_t)(b >> 16 & 0x8000);
    return (uint16_t)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
EMULATED __m256i e_cvtneps_pbh(__m512 a) {
    e_half h;
    for (int i = 0; i < 16; i++) h[i] = e_bf16(a[i]);
    return (__m256i)h;
}
EMULATED __m512i e_cvtne2ps_pbh(__m512 high, __m512 low) { return e_join(e_cvtneps_pbh(low), e_cvtneps_pbh(high)); }

/* ---- integers: what AVX2 has, on either half */
#define E_HALVES(name) \
    EMULATED __m512i e_##name(__m512i a, __m512i b) { \
        return e_join(_mm256_##name(e_half_of(a, 0), e_half_of(b, 0)), _mm256_##name(e_half_of(a, 1), e_half_of(b, 1))); \
    }
E_HALVES(add_epi8)
E_HALVES(add_epi16)
E_HALVES(add_epi32)
E_HALVES(sub_epi16)
E_HALVES(min_epi16)
E_HALVES(max_epi16)
E_HALVES(madd_epi16)
E_HALVES(maddubs_epi16)
E_HALVES(shuffle_epi8)
EMULATED __m512i e_and_si512(__m512i a, __m512i b) { return a & b; }
EMULATED __m512i e_or_si512(__m512i a, __m512i b) { return a | b; }
EMULATED __m512i e_slli_epi32(__m512i a, int n) { return (__m512i)((e_u32)a << n); }
EMULATED __m512i e_srli_epi16(__m512i a, int n) { return (__m512i)((e_u16)a >> n); }
EMULATED __m512i e_srai_epi16(__m512i a, int n) { return (__m512i)((e_i16)a >> n); }
EMULATED __m512i e_set1_epi8(int8_t x) { return (__m512i)((e_i8){0} + x); }
EMULATED __m512i e_set1_epi16(int16_t x) { return (__m512i)((e_i16){0} + x); }
EMULATED __m512i e_set1_epi32(int32_t x) { return (__m512i)((e_i32){0} + x); }
EMULATED __m512i e_broadcast_i32x4(__m128i v) { return e_join(_mm256_broadcastsi128_si256(v), _mm256_broadcastsi128_si256(v)); }
EMULATED __m512i e_castsi256_si512(__m256i v) { return e_join(v, v); }
EMULATED __m512i e_inserti64x4(__m512i v, __m256i half, int which) {
    return which ? e_join(e_half_of(v, 0), half) : e_join(half, e_half_of(v, 1));
}
EMULATED __m512i e_permutexvar_epi16(__m512i order, __m512i v) {
    e_u16 to;
    for (int i = 0; i < 32; i++) to[i] = ((e_u16)v)[((e_u16)order)[i] & 31];
    return (__m512i)to;
}

#define _mm512_max_ps e_max_ps
#define _mm512_min_ps e_min_ps
#define _mm512_mask_max_ps e_mask_max_ps
#define _mm512_mask_min_ps e_mask_min_ps
#define _mm512_permutex2var_ps e_permutex2var_ps
#define _mm512_sqrt_ps e_sqrt_ps
#define _mm512_roundscale_ps e_roundscale_ps
#define TILE_LOAD_MASKED_16(v, p, mask) ((v) = (u16v)e_maskz_loadu_epi16(mask, p))
#define TILE_STORE_MASKED_16(p, mask, v) e_mask_storeu_epi16(p, mask, (e_half)(v))
#define TILE_ABOVE_FLOOR(rest, x) ((rest) = (f32v)e_reduce_ps((__m512)(x), 9))
#define TILE_ABOVE_NEAREST(rest, x) ((rest) = (f32v)e_reduce_ps((__m512)(x), 8))
#define _mm512_maskz_scalef_ps e_maskz_scalef_ps
#define _mm512_cmp_ps_mask e_cmp_ps_mask
#define _mm512_set1_ps e_set1_ps
#define _mm512_unpacklo_ps(a, b) e_unpack_ps(a, b, 0)
#define _mm512_unpackhi_ps(a, b) e_unpack_ps(a, b, 2)
#define _mm512_unpacklo_pd(a, b) e_unpack_pd(a, b, 0)
#define _mm512_unpackhi_pd(a, b) e_unpack_pd(a, b, 1)
#define _mm512_extractf64x4_pd e_extractf64x4_pd
#define _mm512_castps512_ps256(a) (__m256)e_extractf64x4_pd((__m512d)(a), 0)
#define _mm512_cvtps_epi32 e_cvtps_epi32
#define _mm512_loadu_ps e_loadu_ps
#define _mm512_loadu_si512 e_loadu_si512
#define _mm512_storeu_si512 e_storeu_si512
#define _mm512_maskz_loadu_ps e_maskz_loadu_ps
#define _mm512_mask_storeu_ps e_mask_storeu_ps
#define _mm512_stream_ps e_stream_ps
#define _mm512_setzero_si512() ((__m512i){0})
#define _mm512_cmplt_epi32_mask(m, zero) e_sign_mask(m)
#define _mm512_mask_blend_ps e_mask_blend_ps
#define _mm512_cvtph_ps e_cvtph_ps
#define _mm512_cvtps_ph e_cvtps_ph
#define _mm512_cvtepu16_epi32 e_cvtepu16_epi32
#define _mm512_cvtepi16_epi32 e_cvtepi16_epi32
#define _mm512_cvtepi8_epi32 e_cvtepi8_epi32
#define _mm512_cvtepu8_epi32 e_cvtepu8_epi32
#define _mm512_cvtepi32_epi16 e_cvtepi32_epi16
#define _mm512_cvtepi16_epi8 e_cvtepi16_epi8
#define _mm512_cvtepi32_epi8 e_cvtepi32_epi8
#define _mm512_cvtneps_pbh e_cvtneps_pbh
#define _mm512_cvtne2ps_pbh e_cvtne2ps_pbh
#define _mm512_add_epi8 e_add_epi8
#define _mm512_add_epi16 e_add_epi16
#define _mm512_add_epi32 e_add_epi32
#define _mm512_sub_epi16 e_sub_epi16
#define _mm512_min_epi16 e_min_epi16
#define _mm512_max_epi16 e_max_epi16
#define _mm512_madd_epi16 e_madd_epi16
#define _mm512_maddubs_epi16 e_maddubs_epi16
#define _mm512_shuffle_epi8 e_shuffle_epi8
#define _mm512_and_si512 e_and_si512
#define _mm512_or_si512 e_or_si512
#define _mm512_slli_epi32 e_slli_epi32
#define _mm512_srli_epi16 e_srli_epi16
#define _mm512_srai_epi16 e_srai_epi16
#define _mm512_set1_epi8 e_set1_epi8
#define _mm512_set1_epi16 e_set1_epi16
#define _mm512_set1_epi32 e_set1_epi32
#define _mm512_broadcast_i32x4 e_broadcast_i32x4
#define _mm512_castsi256_si512 e_castsi256_si512
#define _mm512_inserti64x4 e_inserti64x4
#define _mm512_permutexvar_epi16 e_permutexvar_epi16

/* ---- sums of products */
#define TILE_FUSED_DOT
#define TILE_KEEP(acc)
#define TILE_DOT_WORDS(acc, a, b) ((acc) += (e_i32)e_madd_epi16(a, b))
#define TILE_DOT_BYTES(acc, bytes, signs) \
    do { \
        const e_u8 dot_x = (e_u8)(bytes); \
        const e_i8 dot_y = (e_i8)(signs); \
        for (int dot_i = 0; dot_i < 64; dot_i++) (acc)[dot_i / 4] += dot_x[dot_i] * dot_y[dot_i]; \
    } while (0)
#define TILE_DOT_BF16(acc, a, b) ((acc) = e_dot_bf16((acc), (e_u16)(a), (e_u16)(b)))
EMULATED float e_widened(uint16_t h) {
    const uint32_t b = (h & 0x7f80 ? (uint32_t)h : h & 0x8000u) << 16;
    float x;
    memcpy(&x, &b, sizeof x);
    return x;
}
EMULATED e_f32 e_dot_bf16(e_f32 acc, e_u16 a, e_u16 b) {
    for (int i = 0; i < 32; i++) acc[i / 2] += e_widened(a[i]) * e_widened(b[i]);
    return acc;
}

/* ---- tile registers */
typedef struct e_tiles {
    uint8_t rows[8], memory[8][16][64];
    uint16_t bytes[8];
    int set;
} e_tiles;
static __thread e_tiles e_state;
static inline void e_require(int what, const char* text) {
    if (what) return;
    fprintf(stderr, "AMX: %s\n", text);
    abort();
}
static inline void e_config(const void* from) {
    uint8_t shapes[64];
    memcpy(shapes, from, sizeof shapes);
    memset(&e_state, 0, sizeof e_state);
    e_require(shapes[0] == 1 && !shapes[1], "shapes of another palette");
    for (int i = 2; i < 64; i++) e_require(!shapes[i] || (i >= 16 && i < 32) || (i >= 48 && i < 56), "a reserved byte is set");
    for (int i = 0; i < 8; i++) {
        memcpy(&e_state.bytes[i], shapes + 16 + 2 * i, 2);
        e_state.rows[i] = shapes[48 + i];
        e_require(e_state.bytes[i] <= 64 && e_state.rows[i] <= 16, "a shape that is too large");
        e_require(!e_state.bytes[i] == !e_state.rows[i], "a shape without rows or without columns");
    }
    e_state.set = 1;
}
static inline void e_release(void) { memset(&e_state, 0, sizeof e_state); }
static inline void e_zero(int tile) {
    e_require(e_state.set && e_state.rows[tile], "a register without a shape");
    memset(e_state.memory[tile], 0, sizeof e_state.memory[tile]);
}
static inline void e_load(int tile, const void* p, int64_t row) {
    e_zero(tile);
    for (int i = 0; i < e_state.rows[tile]; i++) memcpy(e_state.memory[tile][i], (const char*)p + i * row, e_state.bytes[tile]);
}
static inline void e_store(int tile, void* p, int64_t row) {
    e_require(e_state.set && e_state.rows[tile], "a register without a shape");
    for (int i = 0; i < e_state.rows[tile]; i++) memcpy((char*)p + i * row, e_state.memory[tile][i], e_state.bytes[tile]);
}
static inline void e_fit(int to, int a, int b) {
    e_require(e_state.set && e_state.rows[to] && e_state.rows[a] && e_state.rows[b], "a register without a shape");
    e_require(to != a && to != b && a != b, "a product of one register");
    e_require(e_state.rows[to] == e_state.rows[a] && e_state.bytes[to] == e_state.bytes[b], "results of another shape");
    e_require(e_state.bytes[a] == 4 * e_state.rows[b], "operands of different depth");
}
#define E_PRODUCT(name, sum, left, right, each, multiply) \
    static inline void e_##name(int to, int a, int b) { \
        e_fit(to, a, b); \
        for (int m = 0; m < e_state.rows[to]; m++) \
            for (int k = 0; k < e_state.rows[b]; k++) \
                for (int n = 0; n < e_state.bytes[to] / 4; n++) { \
                    sum total; \
                    left x[each]; \
                    right y[each]; \
                    memcpy(&total, e_state.memory[to][m] + 4 * n, 4); \
                    memcpy(x, e_state.memory[a][m] + 4 * k, 4); \
                    memcpy(y, e_state.memory[b][k] + 4 * n, 4); \
                    for (int i = 0; i < each; i++) total += multiply(x[i], y[i]); \
                    memcpy(e_state.memory[to][m] + 4 * n, &total, 4); \
                } \
    }
#define E_TIMES(x, y) ((x) * (y))
#define E_TIMES_WIDENED(x, y) (e_widened(x) * e_widened(y))
E_PRODUCT(tdpbf16ps, float, uint16_t, uint16_t, 2, E_TIMES_WIDENED)
E_PRODUCT(tdpbusd, int32_t, uint8_t, int8_t, 4, E_TIMES)
E_PRODUCT(tdpbsud, int32_t, int8_t, uint8_t, 4, E_TIMES)

#define TILE_FENCE()
#define TILE_CONFIG(shapes) e_config(shapes)
#define TILE_RELEASE() e_release()
#define TILE_ZERO(tile) e_zero(tile)
#define TILE_LOAD(tile, p, row) e_load(tile, p, row)
#define TILE_STORE(tile, p, row) e_store(tile, p, row)
#define TILE_PRODUCT(name, to, a, b) e_##name(to, a, b)

#endif
