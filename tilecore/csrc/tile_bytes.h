/* Sums of levels: a left operand that is rounded to bytes times packed levels of 4 or 8 bits. A part of tile_cpu.h,
 * which includes it.
 */
#ifndef TILE_BYTES_H
#define TILE_BYTES_H

enum { TILE_PANEL_VECTORS = TILE_PANEL / TILE_LANES };

/* Whether the processor adds four products of bytes to a sum in one instruction (VNNI). What meets levels of 8 bits are
 * bytes then, in the order of their rows, in the memory of the 16 bits that they are elsewhere. */
#if defined(TILE_FUSED_DOT)
static inline int tile_fused_levels(void) {
    static int8_t known; /* 0: not asked yet */
    return TILE_ASKED(known, tile_x86_vnni(TILE_LANES * 32));
}
#else
#define tile_fused_levels() 0
#endif

/* ---- levels of a stand in the order in which masks and shifts take words of b apart: of the rows that a word holds, those
 * with even numbers before the odd ones. That is 8 rows for bytes, which meet 4 bits, 4 for 16 bits, which meet bytes. */
#if defined(__AVX512BW__)
TILE_INLINE void store_levels_i8(int8_t* row, int64_t k, i32v v) {
    const __m128i order = _mm_set_epi64x(0x0f0d0b090e0c0a08, 0x0705030106040200);
    _mm_storeu_si128((__m128i*)(row + k), _mm_shuffle_epi8(_mm512_cvtepi32_epi8((__m512i)v), order));
}
TILE_INLINE void store_levels_i16(int16_t* row, int64_t k, i32v v) {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_set_epi64x(0x0f0e0b0a0d0c0908, 0x0706030205040100));
    _mm256_storeu_si256((__m256i*)(row + k), _mm256_shuffle_epi8(_mm512_cvtepi32_epi16((__m512i)v), order));
}
TILE_INLINE void store_levels_fused(int8_t* row, int64_t k, i32v v) {
    _mm_storeu_si128((__m128i*)(row + k), _mm512_cvtepi32_epi8((__m512i)v));
}
#elif defined(__AVX2__)
TILE_INLINE void store_levels_fused(int8_t* row, int64_t k, i32v v) {
    const __m128i order = _mm_set_epi32(-1, -1, -1, 0x0c080400);
    const __m128i low = _mm_shuffle_epi8(_mm256_castsi256_si128((__m256i)v), order);
    const __m128i high = _mm_shuffle_epi8(_mm256_extracti128_si256((__m256i)v, 1), order);
    _mm_storel_epi64((__m128i*)(row + k), _mm_unpacklo_epi32(low, high));
}
TILE_INLINE void store_levels_i8(int8_t* row, int64_t k, i32v v) {
    const __m128i order = _mm_set_epi32(-1, -1, -1, 0x0c040800); /* bytes of lanes 0 2 1 3 */
    const __m128i low = _mm_shuffle_epi8(_mm256_castsi256_si128((__m256i)v), order);
    const __m128i high = _mm_shuffle_epi8(_mm256_extracti128_si256((__m256i)v, 1), order);
    _mm_storel_epi64((__m128i*)(row + k), _mm_unpacklo_epi16(low, high));
}
TILE_INLINE void store_levels_i16(int16_t* row, int64_t k, i32v v) {
    const __m128i order = _mm_set_epi64x(-1, 0x0d0c050409080100); /* 16 bits of lanes 0 2 1 3 */
    const __m128i low = _mm_shuffle_epi8(_mm256_castsi256_si128((__m256i)v), order);
    const __m128i high = _mm_shuffle_epi8(_mm256_extracti128_si256((__m256i)v, 1), order);
    _mm_storeu_si128((__m128i*)(row + k), _mm_unpacklo_epi64(low, high));
}
#else
TILE_INLINE void store_levels_i8(int8_t* row, int64_t k, i32v v) {
    TILE_UNROLL for (int64_t i = k; i < k + TILE_LANES; i++) row[(i & ~7) | (i & 1) << 2 | (i & 6) >> 1] = (int8_t)v[i - k];
}
TILE_INLINE void store_levels_i16(int16_t* row, int64_t k, i32v v) {
    TILE_UNROLL for (int64_t i = k; i < k + TILE_LANES; i++) row[(i & ~3) | (i & 1) << 1 | (i & 2) >> 1] = (int16_t)v[i - k];
}
#endif

/* ---- rounding: levels of a row are round(a[k] / scale), so that the largest of a block is 127, and 0 past `depth` up to
 * whole blocks; scales[row][block] = (scale, sum of its levels). A block that holds a NaN or an infinity has the scale
 * NaN. */
static const float TILE_LARGEST_LEVEL = 127.0f;
static const float TILE_LEAST_SCALED = 1e-30f; /* a block below is 0: the reciprocal of its scale may be infinite */
TILE_INLINE f32v load_below(const float* p, int64_t left) {
    return left >= TILE_LANES ? load_f32(p) : load_masked_f32(p, lanes_below(left));
}
#define TILE_ROUND_ROWS(TYPE, ELEMENT)                                                                                 \
    static inline void round_to_##TYPE(const float* restrict a, int64_t lda, int64_t rows, int64_t depth,            \
                                         int64_t block, ELEMENT* restrict levels, int64_t row,                         \
                                         float* restrict scales, int64_t scales_row) {                                 \
        for (int64_t i = 0; i < rows; i++, a += lda, levels += row, scales += scales_row)                              \
            for (int64_t first = 0; first < depth; first += block) {                                                   \
                f32v largest = {0};                                                                                    \
                for (int64_t k = first; k < min_i64(first + block, depth); k += TILE_LANES) {                          \
                    const f32v x = abs_f32(load_below(a + k, depth - k));                                              \
                    largest = max_raw(largest, select_f32(x < INFINITY, x, splat_f32(INFINITY)));                      \
                }                                                                                                      \
                const float top = max_lanes(largest);                                                                  \
                const int none = top < TILE_LEAST_SCALED || top == INFINITY;                                           \
                const f32v inverse = splat_f32(none ? 0.0f : TILE_LARGEST_LEVEL / top);                                \
                i32v sum = {0};                                                                                        \
                for (int64_t k = first; k < first + block; k += TILE_LANES) {                                          \
                    const f32v x = none ? (f32v){0} : load_below(a + k, depth - k) * inverse;                          \
                    const i32v level = to_i32v(round_f32v(x));                                                         \
                    store_levels_##TYPE(levels, k, level);                                                             \
                    sum += level;                                                                                      \
                }                                                                                                      \
                scales[first / block * 2] = top == INFINITY ? NAN : none ? 0.0f : top / TILE_LARGEST_LEVEL;            \
                scales[first / block * 2 + 1] = sum_lanes(__builtin_convertvector(sum, f32v));                         \
            }                                                                                                          \
    }
TILE_ROUND_ROWS(i8, int8_t)
TILE_ROUND_ROWS(i16, int16_t)
static inline void round_rows_i8(int fused, const float* a, int64_t lda, int64_t rows, int64_t depth, int64_t block,
                                 int8_t* levels, int64_t row, float* scales, int64_t scales_row) {
    (void)fused; /* the same order */
    round_to_i8(a, lda, rows, depth, block, levels, row, scales, scales_row);
}
#if defined(TILE_FUSED_DOT)
TILE_ROUND_ROWS(fused, int8_t)
#else
#define round_to_fused(a, lda, rows, depth, block, levels, row, scales, scales_row) (void)(levels)
#endif
static inline void round_rows_i16(int fused, const float* a, int64_t lda, int64_t rows, int64_t depth, int64_t block,
                                  int16_t* levels, int64_t row, float* scales, int64_t scales_row) {
    if (fused) round_to_fused(a, lda, rows, depth, block, (int8_t*)levels, row, scales, scales_row);
    else round_to_i16(a, lda, rows, depth, block, levels, row, scales, scales_row);
}

/* ---- sums[i][v] = Σ a[at + i * lda + k] · b[k][column] over `size` rows of a panel, for `rows` rows of a: exact. `size` is
 * a multiple of 16. A word of b holds 8 or 4 rows of a column, in 4 or 8 bits each, the first in the low bits. */
#if defined(__AVX2__)
#if defined(__AVX512BW__)
typedef __m512i words;
#define TILE_WORDS(what) _mm512_##what
#define TILE_LOAD_WORDS(p) _mm512_loadu_si512(p)
#define TILE_AND_WORDS(x, y) _mm512_and_si512(x, y)
#else
typedef __m256i words;
#define TILE_WORDS(what) _mm256_##what
#define TILE_LOAD_WORDS(p) _mm256_loadu_si256((const __m256i*)(p))
#define TILE_AND_WORDS(x, y) _mm256_and_si256(x, y)
#endif
TILE_INLINE words four_bytes(const int8_t* a) { int32_t x; memcpy(&x, a, sizeof x); return TILE_WORDS(set1_epi32)(x); }
TILE_INLINE void dot_levels_4_fused(const int rows, const int8_t* a, int64_t lda, const uint8_t* b, const int64_t size,
                                    i32v* sums) {
    const words low = TILE_WORDS(set1_epi8)(15), high = TILE_WORDS(set1_epi8)((char)0xf0);
    i32v more[4 * TILE_PANEL_VECTORS]; /* 16 times what odd rows give: their levels stay where they are */
    TILE_UNROLL for (int i = 0; i < rows * TILE_PANEL_VECTORS; i++) sums[i] = more[i] = (i32v){0};
    TILE_UNROLL for (int64_t k = 0; k < size; k += 8) {
        words even[TILE_PANEL_VECTORS], odd[TILE_PANEL_VECTORS];
        TILE_UNROLL for (int v = 0; v < TILE_PANEL_VECTORS; v++) {
            words both = TILE_LOAD_WORDS(b + k * (TILE_PANEL / 2) + v * TILE_LANES * 4);
            TILE_KEEP(both); /* else gcc loads it twice */
            even[v] = TILE_AND_WORDS(both, low);
            odd[v] = TILE_AND_WORDS(both, high);
        }
        TILE_UNROLL for (int i = 0; i < rows; i++) {
            const words x = four_bytes(a + i * lda + k), y = four_bytes(a + i * lda + k + 4);
            TILE_UNROLL for (int v = 0; v < TILE_PANEL_VECTORS; v++) {
                TILE_DOT_BYTES(sums[i * TILE_PANEL_VECTORS + v], even[v], x);
                TILE_DOT_BYTES(more[i * TILE_PANEL_VECTORS + v], odd[v], y);
            }
        }
    }
    TILE_UNROLL for (int i = 0; i < rows * TILE_PANEL_VECTORS; i++) sums[i] += more[i] >> 4;
}
TILE_INLINE void dot_levels_8_fused(const int rows, const int8_t* a, int64_t lda, const uint8_t* b, const int64_t size,
                                    i32v* sums) {
    i32v more[4 * TILE_PANEL_VECTORS]; /* no sum waits for the one before it */
    TILE_UNROLL for (int i = 0; i < rows * TILE_PANEL_VECTORS; i++) sums[i] = more[i] = (i32v){0};
    TILE_UNROLL for (int64_t k = 0; k < size; k += 4) {
        TILE_UNROLL for (int v = 0; v < TILE_PANEL_VECTORS; v++) {
            const words x = TILE_LOAD_WORDS(b + k * TILE_PANEL + v * TILE_LANES * 4);
            TILE_UNROLL for (int i = 0; i < rows; i++) {
                i32v* to = (k & 4 ? more : sums) + i * TILE_PANEL_VECTORS + v;
                TILE_DOT_BYTES(*to, x, four_bytes(a + i * lda + k));
            }
        }
    }
    TILE_UNROLL for (int i = 0; i < rows * TILE_PANEL_VECTORS; i++) sums[i] += more[i];
}
TILE_INLINE void dot_levels_4_apart(const int rows, const int8_t* a, int64_t lda, const uint8_t* b, const int64_t size,
                                    i32v* sums) {
    enum { RUN = 32 }; /* 8 sums of two products of at most 15 · 127 fit 16 bits */
    const words low = TILE_WORDS(set1_epi8)(15), ones = TILE_WORDS(set1_epi16)(1);
    for (int64_t start = 0; start < size; start += RUN) {
        const int64_t stop = size - start < RUN ? size : start + RUN;
        words sum[4 * TILE_PANEL_VECTORS];
        TILE_UNROLL for (int64_t k = start; k < stop; k += 8) {
            words even[TILE_PANEL_VECTORS], odd[TILE_PANEL_VECTORS];
            TILE_UNROLL for (int v = 0; v < TILE_PANEL_VECTORS; v++) {
                const words both = TILE_LOAD_WORDS(b + k * (TILE_PANEL / 2) + v * TILE_LANES * 4);
                even[v] = TILE_AND_WORDS(both, low);
                odd[v] = TILE_AND_WORDS(TILE_WORDS(srli_epi16)(both, 4), low);
            }
            TILE_UNROLL for (int i = 0; i < rows; i++) {
                const words x = four_bytes(a + i * lda + k), y = four_bytes(a + i * lda + k + 4);
                TILE_UNROLL for (int v = 0; v < TILE_PANEL_VECTORS; v++) {
                    words* to = sum + i * TILE_PANEL_VECTORS + v;
                    const words both = TILE_WORDS(add_epi16)(TILE_WORDS(maddubs_epi16)(even[v], x),
                                                             TILE_WORDS(maddubs_epi16)(odd[v], y));
                    *to = k == start ? both : TILE_WORDS(add_epi16)(*to, both);
                }
            }
        }
        TILE_UNROLL for (int i = 0; i < rows * TILE_PANEL_VECTORS; i++) {
            const i32v wide = (i32v)TILE_WORDS(madd_epi16)(sum[i], ones);
            sums[i] = start ? sums[i] + wide : wide;
        }
    }
}
TILE_INLINE void dot_levels_8_apart(const int rows, const int16_t* a, int64_t lda, const uint8_t* b, const int64_t size,
                                    i32v* sums) {
    const words low = TILE_WORDS(set1_epi16)(255);
    TILE_UNROLL for (int i = 0; i < rows * TILE_PANEL_VECTORS; i++) sums[i] = (i32v){0};
    TILE_UNROLL_DEPTH for (int64_t k = 0; k < size; k += 4) {
        words even[TILE_PANEL_VECTORS], odd[TILE_PANEL_VECTORS];
        TILE_UNROLL for (int v = 0; v < TILE_PANEL_VECTORS; v++) {
            const words both = TILE_LOAD_WORDS(b + k * TILE_PANEL + v * TILE_LANES * 4);
            even[v] = TILE_AND_WORDS(both, low);
            odd[v] = TILE_WORDS(srli_epi16)(both, 8);
        }
        TILE_UNROLL for (int i = 0; i < rows; i++) {
            const int32_t x = pair_at(a + i * lda + k), y = pair_at(a + i * lda + k + 2);
            TILE_UNROLL for (int v = 0; v < TILE_PANEL_VECTORS; v++) {
                dot_pairs(sums + i * TILE_PANEL_VECTORS + v, x, even[v]);
                dot_pairs(sums + i * TILE_PANEL_VECTORS + v, y, odd[v]);
            }
        }
    }
}
#else
#define TILE_DOT_LEVELS(BITS, ELEMENT)                                                                                 \
    TILE_INLINE void dot_levels_##BITS##_apart(const int rows, const ELEMENT* a, int64_t lda, const uint8_t* b,                \
                                       const int64_t size, i32v* sums) {                                               \
        enum { EACH = 32 / BITS }; /* levels of a word */                                                              \
        TILE_UNROLL for (int i = 0; i < rows * TILE_PANEL_VECTORS; i++) sums[i] = (i32v){0};                           \
        for (int64_t k = 0; k < size; k += EACH)                                                                       \
            TILE_UNROLL for (int v = 0; v < TILE_PANEL_VECTORS; v++) {                                                 \
                const i32v word = load_i32((const int32_t*)(const void*)(b + k * TILE_PANEL * BITS / 8) + v * TILE_LANES); \
                TILE_UNROLL for (int p = 0; p < EACH; p++) {                                                           \
                    const i32v level = word >> BITS * p & ((1 << BITS) - 1);                                           \
                    const int at = (p & 1) * (EACH / 2) + p / 2; /* even rows before odd ones */                       \
                    TILE_UNROLL for (int i = 0; i < rows; i++)                                                         \
                        sums[i * TILE_PANEL_VECTORS + v] += level * (int32_t)a[i * lda + k + at];                      \
                }                                                                                                      \
            }                                                                                                          \
    }
TILE_DOT_LEVELS(4, int8_t)
TILE_DOT_LEVELS(8, int16_t)
#define dot_levels_4_fused dot_levels_4_apart
#define dot_levels_8_fused(rows, a, ...) (void)(a)
#endif
TILE_INLINE void dot_levels_4(int fused, const int rows, const int8_t* a, int64_t at, int64_t lda, const uint8_t* b,
                              const int64_t size, i32v* sums) {
    if (fused) dot_levels_4_fused(rows, a + at, lda, b, size, sums);
    else dot_levels_4_apart(rows, a + at, lda, b, size, sums);
}
TILE_INLINE void dot_levels_8(int fused, const int rows, const int16_t* a, int64_t at, int64_t lda, const uint8_t* b,
                              const int64_t size, i32v* sums) {
    if (fused) dot_levels_8_fused(rows, (const int8_t*)a + at, lda, b, size, sums);
    else dot_levels_8_apart(rows, a + at, lda, b, size, sums);
}

/* ---- products of levels by bytes on processors that multiply bytes. A row of levels that are a byte less one zero point
 * spans at most 255: less a shift they are bytes again, of the sign that b has not, which is what the instructions take.
 * What the shift takes away comes back as the shift times the sums of b's columns. Other rows are multiplied as they are. */
#if defined(TILE_FUSED_DOT)
enum { TILE_FROM_SUMS = 2 }; /* for `clear`: sums begin at `step` times those of b's columns, which lie behind its rows */
enum { TILE_BYTE_ROWS = 64, TILE_BYTE_DEPTH = 2048, TILE_BYTE_PANELS = 64, TILE_BYTE_STRIP = 4, TILE_FEW_BYTE_ROWS = 2 };
#define TILE_DOT_BYTES_i8(acc, a, b) TILE_DOT_BYTES(*(acc), a, b)
#define TILE_DOT_BYTES_u8(acc, a, b) TILE_DOT_BYTES(*(acc), b, a)
#if defined(__clang__)
#define TILE_APART __attribute__((noinline))
#else /* gcc keeps sums in memory where it knows what callers pass */
#define TILE_APART __attribute__((noinline, noipa))
#endif
#define TILE_BYTES(MR, NV, NAME, ELEMENT)                                                                              \
    static TILE_FUSED_DOT TILE_APART void bytes_##NAME##_##MR##x##NV(                                                  \
        const uint8_t* restrict a, int64_t lda, int64_t step, const ELEMENT* restrict b, int64_t panel,                \
        int32_t* restrict c, int64_t ldc, int64_t depth, int clear) {                                                  \
        i32v acc[MR][NV], first[NV];                                                                                   \
        TILE_UNROLL for (int j = 0; j < NV; j++) {                                                                     \
            if (clear == TILE_FROM_SUMS) memcpy(&first[j], b + TILE_ROW_AT_##NAME(j) + depth * TILE_PANEL, sizeof *first); \
            first[j] = clear == TILE_FROM_SUMS ? first[j] * splat_i32((int32_t)step) : (i32v){0};                      \
        }                                                                                                              \
        TILE_UNROLL for (int i = 0; i < MR; i++) TILE_UNROLL for (int j = 0; j < NV; j++) acc[i][j] =                  \
            clear ? first[j] : load_i32(c + i * ldc + j * TILE_LANES);                                                 \
        TILE_UNROLL_DEPTH for (int64_t k = 0; k < depth; k += 4) {                                                     \
            i32v bv[NV];                                                                                               \
            TILE_UNROLL for (int j = 0; j < NV; j++) memcpy(&bv[j], b + TILE_ROW_AT_##NAME(j) + k * TILE_PANEL, sizeof bv[j]); \
            TILE_UNROLL for (int i = 0; i < MR; i++) {                                                                 \
                int32_t four;                                                                                          \
                memcpy(&four, a + i * lda + k, sizeof four);                                                           \
                const i32v av = splat_i32(four);                                                                       \
                TILE_UNROLL for (int j = 0; j < NV; j++) TILE_DOT_BYTES_##NAME(&acc[i][j], av, bv[j]);                 \
            }                                                                                                          \
        }                                                                                                              \
        TILE_UNROLL for (int i = 0; i < MR; i++) TILE_UNROLL for (int j = 0; j < NV; j++)                              \
            store_i32(c + i * ldc + j * TILE_LANES, acc[i][j]);                                                        \
    }

/* to[i] = a[i] − `by` modulo 256, 32 of them. */
TILE_INLINE void store_level_bytes(uint8_t* to, const int16_t* a, words by) {
#if defined(__AVX512BW__)
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi16_epi8(_mm512_sub_epi16(_mm512_loadu_si512(a), by)));
#else
    const __m256i low = _mm256_set1_epi16(255);
    const __m256i x = _mm256_sub_epi16(_mm256_loadu_si256((const __m256i*)a), by);
    const __m256i y = _mm256_sub_epi16(_mm256_loadu_si256((const __m256i*)(a + 16)), by);
    const __m256i bytes = _mm256_packus_epi16(_mm256_and_si256(x, low), _mm256_and_si256(y, low)); /* in halves */
    _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(bytes, 0xd8));
#endif
}
/* The least of all 16 bits, as numbers without a sign. */
TILE_INLINE uint16_t least_word(words x) {
    __m128i part[sizeof x / sizeof(__m128i)];
    memcpy(part, &x, sizeof x);
    TILE_UNROLL for (size_t i = 1; i < sizeof x / sizeof *part; i++) part[0] = _mm_min_epu16(part[0], part[i]);
    return (uint16_t)_mm_cvtsi128_si32(_mm_minpos_epu16(part[0]));
}

/* `to` = a − `shift` of a row, in bytes from 0 to 255, or −128 to 127 where `wanted` is −128; 0 up to whole vectors past
 * `depth`. Whether they fit. */
static inline int level_bytes(const int16_t* a, int64_t depth, uint8_t* to, int32_t wanted, int32_t* shift) {
    enum { EACH = sizeof(words) / sizeof *a };
    words low = TILE_WORDS(set1_epi16)(a[0]), high = low, lower = low, higher = low;
    int64_t k = 0;
    for (; k + 2 * EACH <= depth; k += 2 * EACH) {
        const words x = TILE_LOAD_WORDS(a + k), y = TILE_LOAD_WORDS(a + k + EACH);
        low = TILE_WORDS(min_epi16)(low, x), lower = TILE_WORDS(min_epi16)(lower, y);
        high = TILE_WORDS(max_epi16)(high, x), higher = TILE_WORDS(max_epi16)(higher, y);
    }
    low = TILE_WORDS(min_epi16)(low, lower), high = TILE_WORDS(max_epi16)(high, higher);
    const words least_16 = TILE_WORDS(set1_epi16)(INT16_MIN), most_16 = TILE_WORDS(set1_epi16)(INT16_MAX);
    int32_t least = INT16_MIN + least_word(TILE_WORDS(sub_epi16)(low, least_16));
    int32_t most = INT16_MAX - least_word(TILE_WORDS(sub_epi16)(most_16, high));
    for (; k < depth; k++) {
        least = a[k] < least ? a[k] : least;
        most = a[k] > most ? a[k] : most;
    }
    if (most - least > 255) return 0;
    *shift = least - wanted;
    const words by = TILE_WORDS(set1_epi16)((int16_t)*shift); /* modulo 2^16, of which a byte is left */
    for (k = 0; k + 32 <= depth; k += 32) store_level_bytes(to + k, a + k, by);
    for (; k < depth; k++) to[k] = (uint8_t)(a[k] - *shift);
    for (; k % 64; k++) to[k] = 0;
    return 1;
}

/* c = c, unless that is to be cleared, + part[row], where there is one, + shift[row] · sums[column] */
TILE_INLINE void finish_bytes(int32_t* restrict c, int64_t ldc, const int32_t* restrict part, const int32_t* sums, int64_t rows,
                              int64_t columns, const int32_t* shift, const int clear) {
    for (int64_t i = 0; i < rows; i++) {
        const i32v by = splat_i32(shift[i]);
        TILE_UNROLL_DEPTH for (int64_t j = 0; j < columns; j += TILE_LANES) {
            i32v v = by * load_i32(sums + j);
            if (part) v += load_i32(part + i * TILE_BYTE_STRIP * TILE_PANEL + j);
            if (!clear) v += load_i32(c + i * ldc + j);
            store_i32(c + i * ldc + j, v);
        }
    }
}

/* A block of rows is multiplied panel by panel, a few at a time, with a row of ones before it: what that gives is the sums of
 * the columns. Tile registers hold no such row, and leave what is no whole step of theirs. */
#define TILE_BYTE_PRODUCT(NAME, ELEMENT, WANTED)                                                                       \
    static inline void byte_block_##NAME(const uint8_t* restrict bytes, int64_t row, const ELEMENT* restrict b, int64_t panel, \
                                         int32_t* restrict c, int64_t ldc, int64_t rows, int64_t panels, int64_t depth, \
                                         const int32_t* shift, int clear) {                                            \
        enum { WIDE = TILE_BYTE_STRIP * TILE_PANEL };                                                                  \
        int32_t part[(TILE_BYTE_ROWS + 1) * WIDE] __attribute__((aligned(64)));                                        \
        const int64_t done = TILE_TILES_##NAME(bytes + row, row, b, panel, c, ldc, rows, panels, depth, clear);        \
        for (int64_t p = 0; p < panels; p += TILE_BYTE_STRIP) {                                                        \
            const int64_t columns = min_i64(panels - p, TILE_BYTE_STRIP) * TILE_PANEL;                                 \
            const ELEMENT* right = b + p * panel;                                                                      \
            int32_t* to = c + p * TILE_PANEL;                                                                          \
            product_##NAME##_bytes(bytes, row, 1, right, panel, part, WIDE, done ? 1 : rows + 1, columns, depth, 1);   \
            if (done && done < depth)                                                                                  \
                product_##NAME##_bytes(bytes + row + done, row, 1, right + done * TILE_PANEL, panel, part + WIDE, WIDE, rows, \
                                       columns, depth - done, 1);                                                      \
            if (done == depth) finish_bytes(to, ldc, NULL, part, rows, columns, shift, 0);                             \
            else if (clear && !done) finish_bytes(to, ldc, part + WIDE, part, rows, columns, shift, 1);                \
            else finish_bytes(to, ldc, part + WIDE, part, rows, columns, shift, 0);                                    \
        }                                                                                                              \
    }                                                                                                                  \
    static void byte_product_##NAME(const int16_t* restrict a, int64_t lda, int64_t step, const ELEMENT* restrict b,   \
                                    int64_t panel, int32_t* restrict c, int64_t ldc, int64_t rows, int64_t columns, int64_t depth, \
                                    int clear) {                                                                       \
        (void)step; /* 1: levels of a row lie side by side */                                                          \
        uint8_t bytes[(TILE_BYTE_ROWS + 1) * TILE_BYTE_DEPTH] __attribute__((aligned(64)));                            \
        int32_t shift[TILE_BYTE_ROWS];                                                                                 \
        const int64_t all = (columns + TILE_PANEL - 1) / TILE_PANEL;                                                   \
        if (depth == 0) product_##NAME##_plain(a, lda, 1, b, panel, c, ldc, rows, columns, depth, clear);              \
        for (int64_t k = 0; k < depth; k += TILE_BYTE_DEPTH, clear = 0) {                                              \
            const int64_t deep = min_i64(depth - k, TILE_BYTE_DEPTH), row = (deep + 63) / 64 * 64, fours = (deep + 3) / 4 * 4; \
            memset(bytes, 1, row);                                                                                     \
            for (int64_t p = 0; p < all; p += TILE_BYTE_PANELS) {                                                      \
                const int64_t panels = min_i64(all - p, TILE_BYTE_PANELS);                                             \
                const ELEMENT* right = b + p * panel + k * TILE_PANEL;                                                 \
                for (int64_t i = 0; i < rows; i += TILE_BYTE_ROWS) {                                                   \
                    const int64_t count = min_i64(rows - i, TILE_BYTE_ROWS);                                           \
                    const int16_t* left = a + i * lda + k;                                                             \
                    int32_t* to = c + i * ldc + p * TILE_PANEL;                                                        \
                    int fit = 1;                                                                                       \
                    for (int64_t r = 0; r < count && fit; r++)                                                         \
                        fit = level_bytes(left + r * lda, deep, bytes + (r + 1) * row, WANTED, shift + r);             \
                    if (fit) byte_block_##NAME(bytes, row, right, panel, to, ldc, count, panels, fours, shift, clear); \
                    else product_##NAME##_plain(left, lda, 1, right, panel, to, ldc, count, panels * TILE_PANEL, deep, clear); \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }
#define TILE_BYTE_PRODUCT_i8 TILE_BYTE_PRODUCT(i8, int8_t, 0)
#define TILE_BYTE_PRODUCT_u8 TILE_BYTE_PRODUCT(u8, uint8_t, -128)

/* The product of levels that are the bytes `a` plus `shift`: b has the sums of its columns behind its rows. */
#define TILE_LEVEL_PRODUCT(NAME, ELEMENT)                                                                              \
    static void level_product_##NAME(const uint8_t* restrict a, int64_t lda, int64_t shift, const ELEMENT* restrict b, \
                                     int64_t panel, int32_t* restrict c, int64_t ldc, int64_t rows, int64_t columns,   \
                                     int64_t depth, int clear) {                                                       \
        (void)clear; /* always */                                                                                      \
        const int64_t panels = (columns + TILE_PANEL - 1) / TILE_PANEL, fours = (depth + 3) / 4 * 4;                   \
        const int64_t done = TILE_TILES_##NAME(a, lda, b, panel, c, ldc, rows, panels, fours, 1);                      \
        if (!done) {                                                                                                   \
            product_##NAME##_bytes(a, lda, shift, b, panel, c, ldc, rows, columns, fours, TILE_FROM_SUMS);             \
            return;                                                                                                    \
        }                                                                                                              \
        if (done < fours)                                                                                              \
            product_##NAME##_bytes(a + done, lda, 1, b + done * TILE_PANEL, panel, c, ldc, rows, columns, fours - done, 0); \
        for (int64_t p = 0; p < panels; p++) {                                                                         \
            int32_t sums[TILE_PANEL];                                                                                  \
            memcpy(sums, b + p * panel + fours * TILE_PANEL, sizeof sums);                                             \
            for (int64_t i = 0; i < rows; i++)                                                                         \
                TILE_UNROLL for (int j = 0; j < TILE_PANEL; j += TILE_LANES) {                                         \
                    int32_t* to = c + i * ldc + p * TILE_PANEL + j;                                                    \
                    store_i32(to, load_i32(to) + splat_i32((int32_t)shift) * load_i32(sums + j));                      \
                }                                                                                                      \
        }                                                                                                              \
    }

#if defined(__AVX512BW__)
/* ---- the same in tile registers (AMX), whose instructions are not of this row of targets: 0 to 3 hold 32 × 32 sums, 4 and
 * 5 rows of a, 6 and 7 panels of b, 64 deep. How much of the depth was done: whole steps. */
#define TILE_TILES(NAME, ELEMENT, MULTIPLY)                                                                            \
    static inline __attribute__((always_inline, target("amx-int8"))) void tile_bytes_##NAME(                           \
        const uint8_t* a, int64_t row, const ELEMENT* b, int64_t panel, int32_t* c, int64_t ldc, int64_t depth,        \
        int clear, const int tall, const int wide) {                                                                   \
        if (clear) {                                                                                                   \
            TILE_ZERO(0);                                                                                              \
            TILE_ZERO(1);                                                                                              \
            TILE_ZERO(2);                                                                                              \
            TILE_ZERO(3);                                                                                              \
        } else {                                                                                                       \
            TILE_LOAD(0, c, ldc * 4);                                                                                  \
            if (wide) TILE_LOAD(1, c + TILE_PANEL, ldc * 4);                                                           \
            if (tall) TILE_LOAD(2, c + 16 * ldc, ldc * 4);                                                             \
            if (tall && wide) TILE_LOAD(3, c + 16 * ldc + TILE_PANEL, ldc * 4);                                        \
        }                                                                                                              \
        for (int64_t k = 0; k < depth; k += 64) {                                                                      \
            TILE_LOAD(6, b + k * TILE_PANEL, 64);                                                                      \
            TILE_LOAD(4, a + k, row);                                                                                  \
            if (tall) TILE_LOAD(5, a + 16 * row + k, row);                                                             \
            if (wide) TILE_LOAD(7, b + panel + k * TILE_PANEL, 64);                                                    \
            TILE_PRODUCT(MULTIPLY, 0, 4, 6);                                                                           \
            if (tall) TILE_PRODUCT(MULTIPLY, 2, 5, 6);                                                                 \
            if (wide) TILE_PRODUCT(MULTIPLY, 1, 4, 7);                                                                 \
            if (tall && wide) TILE_PRODUCT(MULTIPLY, 3, 5, 7);                                                         \
        }                                                                                                              \
        TILE_STORE(0, c, ldc * 4);                                                                                     \
        if (wide) TILE_STORE(1, c + TILE_PANEL, ldc * 4);                                                              \
        if (tall) TILE_STORE(2, c + 16 * ldc, ldc * 4);                                                                \
        if (tall && wide) TILE_STORE(3, c + 16 * ldc + TILE_PANEL, ldc * 4);                                           \
    }                                                                                                                  \
    static __attribute__((noinline, unused, target("amx-int8"))) int64_t tiles_##NAME(                                 \
        const uint8_t* a, int64_t row, const ELEMENT* b, int64_t panel, int32_t* c, int64_t ldc, int64_t rows,         \
        int64_t panels, int64_t depth, int clear) {                                                                    \
        static int8_t known; /* 0: not asked yet */                                                                    \
        const int64_t deep = depth / 64 * 64;                                                                          \
        if (rows < TILE_LEAST_TILE_ROWS || !deep || !TILE_ASKED(known, tile_x86_amx_bytes())) return 0;                \
        for (; rows > 0; rows -= 32, a += 32 * row, c += 32 * ldc) {                                                   \
            const int tall = rows > 16;                                                                                \
            uint8_t shapes[64] __attribute__((aligned(64))) = {1};                                                     \
            for (int i = 0; i < 8; i++) {                                                                              \
                const int64_t lower = tall ? min_i64(rows - 16, 16) : 1, upper = tall ? 16 : rows;                     \
                shapes[16 + 2 * i] = 64; /* bytes of a row */                                                          \
                shapes[48 + i] = (uint8_t)(i >= 6 ? 16 : i == 2 || i == 3 || i == 5 ? lower : upper);                  \
            }                                                                                                          \
            TILE_CONFIG(shapes);                                                                                       \
            for (int64_t p = 0; p < panels; p += 2) {                                                                  \
                const ELEMENT* right = b + p * panel;                                                                  \
                int32_t* to = c + p * TILE_PANEL;                                                                      \
                const int wide = p + 1 < panels;                                                                       \
                if (tall && wide) tile_bytes_##NAME(a, row, right, panel, to, ldc, deep, clear, 1, 1);                 \
                else if (tall) tile_bytes_##NAME(a, row, right, panel, to, ldc, deep, clear, 1, 0);                    \
                else if (wide) tile_bytes_##NAME(a, row, right, panel, to, ldc, deep, clear, 0, 1);                    \
                else tile_bytes_##NAME(a, row, right, panel, to, ldc, deep, clear, 0, 0);                              \
            }                                                                                                          \
        }                                                                                                              \
        TILE_RELEASE();                                                                                                \
        TILE_FENCE();                                                                                                  \
        return deep;                                                                                                   \
    }
enum { TILE_LEAST_TILE_ROWS = 8 };
TILE_TILES(i8, int8_t, tdpbusd)
TILE_TILES(u8, uint8_t, tdpbsud)
#define TILE_TILES_i8 tiles_i8
#define TILE_TILES_u8 tiles_u8
#else
#define TILE_TILES_i8(...) 0
#define TILE_TILES_u8(...) 0
#endif
#endif

#endif
