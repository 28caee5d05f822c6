/* Products of bf16, summed in f32. A part of tile_cpu.h, which includes it.
 *
 * Panels of the right operand lie in pairs of rows: (b[k][j], b[k + 1][j]) side by side for the 16 columns j of a panel.
 * That is what vdpbf16ps multiplies, what a tile register of AMX holds, and what two shifts widen elsewhere. Of an odd
 * depth the second half of the last pair is 0.
 */
#ifndef TILE_NARROW_H
#define TILE_NARROW_H

#define TILE_PAIR_AT(j) ((j) * TILE_LANES / TILE_PANEL * panel + (j) * TILE_LANES % TILE_PANEL * 2)
TILE_INLINE i32v load_words(const uint16_t* p) { i32v v; memcpy(&v, p, sizeof v); return v; }

/* ---- the register tile with a left operand of f32: both rows of a pair are widened */
#define TILE_PAIRS_STEP(MR, NV, BOTH)                                                                                  \
    do {                                                                                                               \
        i32v bv[NV];                                                                                                   \
        TILE_UNROLL for (int j = 0; j < NV; j++) bv[j] = load_words(b + TILE_PAIR_AT(j) + k * TILE_PANEL);             \
        TILE_UNROLL for (int i = 0; i < MR; i++) {                                                                     \
            const f32v even = splat_f32(a[i * lda + k * step]);                                                        \
            TILE_UNROLL for (int j = 0; j < NV; j++) acc[i][j] += even * (f32v)(bv[j] << 16);                          \
        }                                                                                                              \
        if (BOTH) TILE_UNROLL for (int i = 0; i < MR; i++) {                                                           \
            const f32v odd = splat_f32(a[i * lda + (k + 1) * step]);                                                   \
            TILE_UNROLL for (int j = 0; j < NV; j++) acc[i][j] += odd * (f32v)(bv[j] & (int32_t)0xffff0000);           \
        }                                                                                                              \
    } while (0)
#define TILE_MMA_PAIRS(MR, NV)                                                                                         \
    static __attribute__((noinline)) void mma_pairs_##MR##x##NV(                                                       \
        const float* restrict a, int64_t lda, int64_t step, const uint16_t* restrict b, int64_t panel,                 \
        float* restrict c, int64_t ldc, int64_t depth, int clear) {                                                    \
        TILE_READ_SUMS(MR, NV)                                                                                         \
        int64_t k = 0;                                                                                                 \
        for (; k + 2 <= depth; k += 2) TILE_PAIRS_STEP(MR, NV, 1);                                                     \
        if (k < depth) TILE_PAIRS_STEP(MR, NV, 0);                                                                     \
        TILE_WRITE_SUMS(MR, NV)                                                                                        \
    }

/* ---- packing of a right operand that is contiguous in depth, rounded to bf16 but widened again */
TILE_INLINE float value_f32_rounded_s(float x) { return round_bf16_s(x); }
#if defined(__AVX2__)
TILE_INLINE __m256 eight_f32_rounded(const float* p) {
    const __m256 x = _mm256_loadu_ps(p), nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    const __m256i b = (__m256i)x, odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(b, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i high = _mm256_and_si256(up, _mm256_set1_epi32((int)0xffff0000));
    return _mm256_blendv_ps((__m256)high, x, nan);
}
#endif
TILE_PACK_TRANSPOSED(f32_rounded, float)

#if defined(__AVX512BF16__)
/* ---- the register tile of both operands in bf16: a pair of the left one meets a pair of rows */
TILE_INLINE void dot_narrow(f32v* acc, int32_t a, __m512i b) {
    TILE_DOT_BF16(*acc, _mm512_set1_epi32(a), b);
}
TILE_INLINE int32_t narrow_pair(const uint16_t* a) { int32_t both; memcpy(&both, a, sizeof both); return both; }
#define TILE_FIRST_HALF(at) ((int32_t)*(at))
#define TILE_NARROW_STEP(MR, NV, PAIR, OWN)                                                                            \
    do {                                                                                                               \
        TILE_ASK_OWN(NV, OWN)                                                                                          \
        __m512i bv[NV];                                                                                                \
        TILE_UNROLL for (int j = 0; j < NV; j++) bv[j] = _mm512_loadu_si512(b + j * panel + k * TILE_PANEL);           \
        TILE_UNROLL for (int i = 0; i < MR; i++) {                                                                     \
            const int32_t av = PAIR(a + i * lda + k);                                                                  \
            TILE_UNROLL for (int j = 0; j < NV; j++) dot_narrow(&acc[i][j], av, bv[j]);                                \
        }                                                                                                              \
    } while (0)
#define TILE_MMA_NARROW(MR, NV, OWN)                                                                                   \
    static __attribute__((noinline)) void mma_narrow_##MR##x##NV(                                                      \
        const uint16_t* restrict a, int64_t lda, int64_t step, const uint16_t* restrict b, int64_t panel,              \
        float* restrict c, int64_t ldc, int64_t depth, int clear, const uint16_t* ahead, int64_t lines) {              \
        (void)step; /* 1: pairs of a lie side by side */                                                               \
        TILE_READ_SUMS(MR, NV)                                                                                         \
        int64_t k = 0;                                                                                                 \
        while (k + TILE_TURN <= depth) {                                                                               \
            TILE_ASK(NV, OWN)                                                                                          \
            TILE_UNROLL_DEPTH for (const int64_t stop = k + TILE_TURN; k < stop; k += 2)                               \
                TILE_NARROW_STEP(MR, NV, narrow_pair, OWN);                                                            \
        }                                                                                                              \
        for (; k + 2 <= depth; k += 2) TILE_NARROW_STEP(MR, NV, narrow_pair, OWN);                                     \
        if (k < depth) TILE_NARROW_STEP(MR, NV, TILE_FIRST_HALF, OWN);                                                 \
        TILE_WRITE_SUMS(MR, NV)                                                                                        \
    }

/* ---- packing in pairs */
/* (even[j], odd[j]) side by side for the 16 columns of a panel. */
TILE_INLINE void store_pairs_bf16(uint16_t* p, f32v even, f32v odd) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    const __m512i halves = _mm512_cvtepu16_epi32((__m256i){0x0003000200010000, 0x0007000600050004, 0x000b000a00090008, 0x000f000e000d000c});
    const __m512i order = _mm512_or_si512(halves, _mm512_slli_epi32(_mm512_add_epi32(halves, _mm512_set1_epi32(16)), 16));
    _mm512_storeu_si512(p, _mm512_permutexvar_epi16(order, both));
}
TILE_INLINE __m256 sixteen_f32(const float* p) { return (__m256)_mm512_cvtneps_pbh(_mm512_loadu_ps(p)); }
TILE_INLINE __m256 sixteen_bf16(const uint16_t* p) { return _mm256_loadu_ps((const float*)p); }
TILE_INLINE uint16_t narrow_f32(float x) { return bits_bf16_s(x); }
TILE_INLINE uint16_t narrow_bf16(uint16_t x) { return x; }
/* panels[p][k / 2][lane][k % 2] = source[(p * PANEL + lane) * row + k]; lanes past `columns` and a row past `depth` get 0. */
#define TILE_PACK_PAIRS(TYPE, ELEMENT)                                                                                 \
    static inline void pack_pairs_##TYPE(const ELEMENT* restrict source, int64_t row, uint16_t* restrict panels,       \
                                         int64_t panel, int64_t columns, int64_t depth) {                              \
        for (int64_t column = 0; column < columns || column % TILE_PANEL; column += 8) {                               \
            const int rows = (int)(columns - column < 8 ? columns - column : 8); /* none in a half that is left over */ \
            const ELEMENT* from = source + (rows > 0 ? column : 0) * row;                                              \
            uint16_t* to = panels + column / TILE_PANEL * panel + column % TILE_PANEL * 2;                             \
            int64_t k = 0;                                                                                             \
            for (; k + 16 <= depth; k += 16) {                                                                         \
                __m256 r[8];                                                                                           \
                TILE_UNROLL for (int i = 0; i < 8; i++)                                                                \
                    r[i] = i < rows ? sixteen_##TYPE(from + k + i * row) : _mm256_setzero_ps();                        \
                transpose_8x8(r, (float*)(void*)(to + k * TILE_PANEL));                                                \
            }                                                                                                          \
            for (; k < depth; k += 2)                                                                                  \
                for (int i = 0; i < 8; i++) {                                                                          \
                    uint16_t* pair = to + k * TILE_PANEL + 2 * i;                                                      \
                    pair[0] = i < rows ? narrow_##TYPE(from[i * row + k]) : 0;                                         \
                    pair[1] = i < rows && k + 1 < depth ? narrow_##TYPE(from[i * row + k + 1]) : 0;                    \
                }                                                                                                      \
        }                                                                                                              \
    }
TILE_PACK_PAIRS(f32, float)
TILE_PACK_PAIRS(bf16, uint16_t)
#endif

#if defined(__AMX_BF16__)
#include "tile_amx.h"
#endif

#endif
