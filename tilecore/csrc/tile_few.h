/* Products of few rows whose right operand is read where it lies, each element once: no panels. For units of their own.
 *
 * FEW_DOT: neighbours in memory are neighbours of the summed axis; sums are kept lane by lane and joined at the end.
 * FEW_SUM: neighbours in memory are neighbours of the columns; rows of b are scaled and added up. c has whole panels:
 * what is past `columns` there may be overwritten. Of b nothing is read past `columns` and `depth`. */
#ifndef TILE_FEW_H
#define TILE_FEW_H

#include "tile_cpu.h"

#define FEW_COLUMNS 4 /* of FEW_DOT at once: rows of b that are walked side by side */
#define FEW_SPAN 16   /* columns that all rows of a use before the next: their rows of b stay in the first cache */
#if TILE_LANES == 8
#define FEW_DOT_MOST 2 /* rows of a at once */
#define FEW_SUMS 8     /* vectors of sums in registers */
#else
#define FEW_DOT_MOST 4
#define FEW_SUMS 16
#endif
#define FEW_ROWS 4 /* of a at once in FEW_SUM */
#if !defined(FEW_AHEAD)
#define FEW_AHEAD 8192 /* bytes of b that FEW_DOT asks for beforehand, in whole rows */
#endif
#if !defined(FEW_CHUNK)
#define FEW_CHUNK (TILE_LANES < 16 ? 8192 : 12288) /* bytes of b that stay in the first cache until all columns of FEW_SUM have used them */
#endif
#if defined(TILE_KEEP)
#define FEW_KEEP(v) TILE_KEEP(v) /* else gcc loads it again for every use */
#else
#define FEW_KEEP(v) (void)0
#endif
#define FEW_HIDE(p) __asm__("" : "+r"(p)) /* else gcc keeps every sum of a pointer and a multiple in a register */
#define FEW_LEAST(a, b) ((a) < (b) ? (a) : (b))
#define FEW_WIDE(MR) FEW_LEAST(FEW_SUMS / ((MR) == 3 ? 4 : (MR)), 4) /* vectors of columns at once */
#define FEW_LINE(TYPE) (64 / (int64_t)sizeof(TYPE))
#define FEW_VALUE_f32(x) (x)
#define FEW_VALUE_bf16(x) value_bf16_s(x)

/* The sums of the lanes of each of FEW_COLUMNS vectors: lanes go together in fours, then the fours. */
typedef float f32four __attribute__((vector_size(16)));
#if defined(__AVX512F__)
TILE_INLINE f32four sums_of_lanes(const f32v* v) {
    const __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
    const __m512d x = (__m512d)(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
    const __m512d y = (__m512d)(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
    const __m512 fours = (__m512)_mm512_unpacklo_pd(x, y) + (__m512)_mm512_unpackhi_pd(x, y);
    const __m256 half = _mm512_castps512_ps256(fours) + (__m256)_mm512_extractf64x4_pd((__m512d)fours, 1);
    return (f32four)(_mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
}
#elif defined(__AVX2__)
TILE_INLINE f32four sums_of_lanes(const f32v* v) {
    const __m256 a = (__m256)v[0], b = (__m256)v[1], c = (__m256)v[2], d = (__m256)v[3];
    const __m256d x = (__m256d)(_mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b));
    const __m256d y = (__m256d)(_mm256_unpacklo_ps(c, d) + _mm256_unpackhi_ps(c, d));
    const __m256 fours = (__m256)_mm256_unpacklo_pd(x, y) + (__m256)_mm256_unpackhi_pd(x, y);
    return (f32four)(_mm256_castps256_ps128(fours) + _mm256_extractf128_ps(fours, 1));
}
#else
TILE_INLINE f32four sums_of_lanes(const f32v* v) {
    f32four sums = {0};
    TILE_UNROLL for (int j = 0; j < FEW_COLUMNS; j++) TILE_UNROLL for (int i = 0; i < TILE_LANES; i++) sums[j] += v[j][i];
    return sums;
}
#endif

#define FEW_DOT_STEP(MR, LOAD_A, LOAD_B, AT)                                                                           \
    f32v bv[FEW_COLUMNS];                                                                                              \
    TILE_UNROLL for (int j = 0; j < FEW_COLUMNS; j++) {                                                                \
        bv[j] = LOAD_B(from[j] + (AT));                                                                                \
        if (MR > 1) { FEW_KEEP(bv[j]); }                                                                               \
    }                                                                                                                  \
    TILE_UNROLL for (int i = 0; i < MR; i++) {                                                                         \
        f32v av = LOAD_A(a + i * lda + (AT));                                                                          \
        FEW_KEEP(av);                                                                                                  \
        TILE_UNROLL for (int j = 0; j < FEW_COLUMNS; j++) {                                                            \
            acc[i][j] += av * bv[j];                                                                                   \
            FEW_KEEP(acc[i][j]);                                                                                       \
        }                                                                                                              \
    }
/* MR rows by at most FEW_SPAN columns, of which `count` exist: in place of others, the last one is used again. With `ask`,
 * as much of b is asked for from `ahead` on: with every step, `across` elements further, a part of one of the rows. */
#define FEW_DOT_TILE(MR, NAME, A, LEFT, B, RIGHT)                                                                      \
    static __attribute__((noinline)) void NAME##_##MR(                                                                 \
        const LEFT* restrict a, int64_t lda, const RIGHT* restrict b, int64_t ldb, float* restrict c, int64_t ldc,     \
        int64_t count, int64_t depth, int clear, int ask, int64_t ahead, int64_t across) {                             \
        enum { PART = FEW_COLUMNS * TILE_LANES };                                                                      \
        const int64_t along = across == PART ? FEW_COLUMNS * PART : PART;                                              \
        for (int64_t g = 0; g < count && g < FEW_SPAN; g += FEW_COLUMNS, b += FEW_COLUMNS * ldb, c += FEW_COLUMNS) {   \
            const RIGHT *from[FEW_COLUMNS], *next = b + ahead;                                                         \
            f32v acc[MR][FEW_COLUMNS];                                                                                 \
            TILE_UNROLL for (int j = 0; j < FEW_COLUMNS; j++) {                                                        \
                from[j] = b + FEW_LEAST(j, count - g - 1) * ldb;                                                       \
                TILE_UNROLL for (int i = 0; i < MR; i++) acc[i][j] = (f32v){0};                                        \
            }                                                                                                          \
            int64_t k = 0;                                                                                             \
            for (; k + PART <= depth; k += PART, next += along) {                                                      \
                const RIGHT* line = next;                                                                              \
                TILE_UNROLL for (int t = 0; t < PART; t += TILE_LANES, line += across) {                               \
                    FEW_HIDE(line);                                                                                    \
                    if (ask)                                                                                           \
                        TILE_UNROLL for (int n = 0; n < PART; n += FEW_LINE(RIGHT)) __builtin_prefetch(line + n);      \
                    FEW_DOT_STEP(MR, load_##A, load_##B, k + t)                                                        \
                }                                                                                                      \
            }                                                                                                          \
            for (; k + TILE_LANES <= depth; k += TILE_LANES) { FEW_DOT_STEP(MR, load_##A, load_##B, k) }               \
            if (k < depth) {                                                                                           \
                const i32v m = lanes_below(depth - k);                                                                 \
                FEW_DOT_STEP(MR, FEW_MASKED_##A, FEW_MASKED_##B, k)                                                    \
            }                                                                                                          \
            TILE_UNROLL for (int i = 0; i < MR; i++) {                                                                 \
                f32four sums = sums_of_lanes(acc[i]), before;                                                          \
                if (!clear) {                                                                                          \
                    memcpy(&before, c + i * ldc, sizeof before);                                                       \
                    sums += before;                                                                                    \
                }                                                                                                      \
                memcpy(c + i * ldc, &sums, sizeof sums);                                                               \
            }                                                                                                          \
        }                                                                                                              \
    }
#define FEW_MASKED_f32(p) load_masked_f32(p, m)
#define FEW_MASKED_f16(p) load_masked_f16(p, m)
#define FEW_MASKED_bf16(p) load_masked_bf16(p, m)
#define FEW_MASKED_rounded(p) round_bf16(load_masked_f32(p, m))
#define load_rounded(p) round_bf16(load_f32(p))

/* c[r][j] (+)= sum over k of a[r][k] * b[j][k], k contiguous in both. */
#if FEW_DOT_MOST == 4
#define FEW_DOT_TILES(NAME, A, LEFT, B, RIGHT)                                                                         \
    FEW_DOT_TILE(1, NAME, A, LEFT, B, RIGHT)                                                                           \
    FEW_DOT_TILE(2, NAME, A, LEFT, B, RIGHT)                                                                           \
    FEW_DOT_TILE(3, NAME, A, LEFT, B, RIGHT)                                                                           \
    FEW_DOT_TILE(4, NAME, A, LEFT, B, RIGHT)
#define FEW_DOT_CALLS(NAME)                                                                                            \
    switch (rows - i) {                                                                                                \
    case 1: FEW_DOT_CALL(NAME##_1); break;                                                                             \
    case 2: FEW_DOT_CALL(NAME##_2); break;                                                                             \
    case 3: FEW_DOT_CALL(NAME##_3); break;                                                                             \
    default: FEW_DOT_CALL(NAME##_4); break;                                                                            \
    }
#else
#define FEW_DOT_TILES(NAME, A, LEFT, B, RIGHT)                                                                         \
    FEW_DOT_TILE(1, NAME, A, LEFT, B, RIGHT)                                                                           \
    FEW_DOT_TILE(2, NAME, A, LEFT, B, RIGHT)
#define FEW_DOT_CALLS(NAME)                                                                                            \
    if (rows - i == 1) FEW_DOT_CALL(NAME##_1);                                                                         \
    else FEW_DOT_CALL(NAME##_2);
#endif
#define FEW_DOT_CALL(tile)                                                                                             \
    tile(a + i * lda, lda, b + j * ldb, ldb, c + i * ldc + j, ldc, columns - j, depth, clear, i == 0, ahead, across)
#define TILE_FEW_DOT(NAME, A, LEFT, B, RIGHT)                                                                          \
    FEW_DOT_TILES(NAME, A, LEFT, B, RIGHT)                                                                             \
    void NAME(const LEFT* restrict a, int64_t lda, int64_t step, const RIGHT* restrict b, int64_t ldb,                 \
              float* restrict c, int64_t ldc, int64_t rows, int64_t columns, int64_t depth, int clear) {               \
        (void)step;                                                                                                    \
        const int64_t across = ldb == depth ? FEW_COLUMNS * TILE_LANES : ldb; /* without gaps, in memory's order */    \
        const int64_t ahead = (FEW_AHEAD / (int64_t)sizeof(RIGHT) / (depth + 1) + 1) * ldb;                            \
        for (int64_t j = 0; j < columns; j += FEW_SPAN)                                                                \
            for (int64_t i = 0; i < rows; i += FEW_DOT_MOST) { FEW_DOT_CALLS(NAME) }                                   \
    }

/* MR rows by NV vectors of columns; LOAD_B may leave out lanes from `count` on. */
#define FEW_SUM_TILE(MR, NV, NAME, A, LEFT, LOAD_B, RIGHT)                                                             \
    static __attribute__((noinline)) void NAME##_##MR(                                                                 \
        const LEFT* restrict a, int64_t lda, int64_t step, const RIGHT* restrict b, int64_t ldb, float* restrict c,    \
        int64_t ldc, int64_t count, int64_t depth, int clear, const RIGHT* next, int64_t along) {                      \
        const i32v m = lanes_below(count);                                                                             \
        f32v acc[MR][NV];                                                                                              \
        TILE_UNROLL for (int i = 0; i < MR; i++) TILE_UNROLL for (int j = 0; j < NV; j++) acc[i][j] =                  \
            clear ? (f32v){0} : load_f32(c + i * ldc + j * TILE_LANES);                                                \
        for (int64_t k = 0; k < depth; k++, b += ldb) {                                                                \
            f32v bv[NV];                                                                                               \
            TILE_UNROLL for (int j = 0; j < NV; j++) {                                                                 \
                bv[j] = LOAD_B(b + j * TILE_LANES);                                                                    \
                if (j * TILE_LANES % FEW_LINE(RIGHT) == 0) __builtin_prefetch(next + k * along + j * TILE_LANES);          \
            }                                                                                                          \
            TILE_UNROLL for (int i = 0; i < MR; i++) {                                                                 \
                const f32v av = splat_f32(FEW_VALUE_##A(a[i * lda + k * step]));                                       \
                TILE_UNROLL for (int j = 0; j < NV; j++) acc[i][j] += av * bv[j];                                      \
            }                                                                                                          \
        }                                                                                                              \
        (void)m;                                                                                                       \
        TILE_UNROLL for (int i = 0; i < MR; i++) TILE_UNROLL for (int j = 0; j < NV; j++)                              \
            store_f32(c + i * ldc + j * TILE_LANES, acc[i][j]);                                                        \
    }
#define FEW_SUM_TILES(MR, NAME, A, LEFT, B, RIGHT)                                                                     \
    FEW_SUM_TILE(MR, FEW_WIDE(MR), NAME##_wide, A, LEFT, load_##B, RIGHT)                             \
    FEW_SUM_TILE(MR, 1, NAME##_vector, A, LEFT, load_##B, RIGHT)                                                       \
    FEW_SUM_TILE(MR, 1, NAME##_last, A, LEFT, FEW_MASKED_##B, RIGHT)
/* c[r][j] (+)= sum over k of a[r][k] * b[k][j], j contiguous in b. Some rows of b at a time, for all columns. */
#define TILE_FEW_SUM(NAME, A, LEFT, B, RIGHT)                                                                          \
    FEW_SUM_TILES(1, NAME, A, LEFT, B, RIGHT)                                                                          \
    FEW_SUM_TILES(2, NAME, A, LEFT, B, RIGHT)                                                                          \
    FEW_SUM_TILES(3, NAME, A, LEFT, B, RIGHT)                                                                          \
    FEW_SUM_TILES(4, NAME, A, LEFT, B, RIGHT)                                                                          \
    void NAME(const LEFT* restrict a, int64_t lda, int64_t step, const RIGHT* restrict b, int64_t ldb,                 \
              float* restrict c, int64_t ldc, int64_t rows, int64_t columns, int64_t depth, int clear) {               \
        const int64_t rows_at_once = FEW_CHUNK / (columns * (int64_t)sizeof(RIGHT) + 64) + 4;                          \
        for (int64_t k = 0; k == 0 || k < depth; k += rows_at_once) {                                                  \
            const int64_t deep = FEW_LEAST(depth - k, rows_at_once);                                                   \
            const int start = clear && k == 0;                                                                         \
            for (int64_t i = 0; i < rows; i += FEW_ROWS) {                                                             \
                switch (rows - i) {                                                                                    \
                case 1: FEW_SUM_CALLS(1, NAME) break;                                                                  \
                case 2: FEW_SUM_CALLS(2, NAME) break;                                                                  \
                case 3: FEW_SUM_CALLS(3, NAME) break;                                                                  \
                default: FEW_SUM_CALLS(4, NAME) break;                                                                 \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }
#define FEW_SUM_CALLS(MR, NAME)                                                                                        \
    {                                                                                                                  \
        int64_t j = 0;                                                                                                 \
        for (; j + FEW_WIDE(MR) * TILE_LANES <= columns; j += FEW_WIDE(MR) * TILE_LANES)                               \
            FEW_SUM_CALL(NAME##_wide_##MR, FEW_WIDE(MR));                                                              \
        for (; j + TILE_LANES <= columns; j += TILE_LANES) FEW_SUM_CALL(NAME##_vector_##MR, 1);                        \
        if (j < columns) FEW_SUM_CALL(NAME##_last_##MR, 1);                                                            \
    }
/* What is asked for are the next rows, in memory's order where there are no gaps between them. */
#define FEW_SUM_CALL(tile, NV)                                                                                         \
    tile(a + i * lda + k * step, lda, step, b + k * ldb + j, ldb, c + i * ldc + j, ldc, columns - j, deep, start,      \
         b + (k + rows_at_once) * ldb + (ldb == columns ? j * deep : j), ldb == columns ? (NV) * TILE_LANES : ldb)

#endif
