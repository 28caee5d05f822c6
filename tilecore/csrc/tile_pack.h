/* Packing of right operands into panels. A part of tile_cpu.h, which includes it. */
#ifndef TILE_PACK_H
#define TILE_PACK_H

/* ---- packing: panels[p][k][lane] = source[(p * PANEL + lane) * row + k], as f32; lanes past `columns` get 0 */
#if defined(__AVX2__)
TILE_INLINE __m256 eight_f32(const float* p) { return _mm256_loadu_ps(p); }
TILE_INLINE __m256 eight_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
TILE_INLINE __m256 eight_bf16(const uint16_t* p) {
    return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}
TILE_INLINE void transpose_8x8(__m256* restrict r, float* restrict to) {
    __m256 t[8];
    TILE_UNROLL for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    TILE_UNROLL for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    TILE_UNROLL for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * TILE_PANEL, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * TILE_PANEL, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}
#define TILE_PACK_BLOCK(TYPE)                                                                                          \
    __m256 r[8];                                                                                                       \
    TILE_UNROLL for (int i = 0; i < 8; i++) r[i] = i < rows ? eight_##TYPE(from + k + i * row) : _mm256_setzero_ps();  \
    transpose_8x8(r, to + k * TILE_PANEL);
#else
#define TILE_PACK_BLOCK(TYPE)                                                                                          \
    for (int64_t j = k; j < k + 8; j++)                                                                                \
        for (int i = 0; i < 8; i++) to[j * TILE_PANEL + i] = i < rows ? value_##TYPE##_s(from[i * row + j]) : 0.0f;
#endif
#define TILE_PACK_TRANSPOSED(TYPE, ELEMENT)                                                                            \
    static inline void pack_transposed_##TYPE(const ELEMENT* restrict source, int64_t row, float* restrict panels,     \
                                              int64_t panel, int64_t columns, int64_t depth) {                         \
        for (int64_t column = 0; column < columns || column % TILE_PANEL; column += 8) {                               \
            const int rows = (int)(columns - column < 8 ? columns - column : 8); /* none in a half that is left over */ \
            const ELEMENT* from = source + (rows > 0 ? column : 0) * row;                                              \
            float* to = panels + column / TILE_PANEL * panel + column % TILE_PANEL;                                    \
            int64_t k = 0;                                                                                             \
            for (; k + 8 <= depth; k += 8) {                                                                           \
                if (k * sizeof(ELEMENT) % 64 == 0) /* the next rows, which may lie in other pages */                   \
                    TILE_UNROLL for (int i = 8; i < 16; i++) __builtin_prefetch(from + k + i * row);                   \
                TILE_PACK_BLOCK(TYPE)                                                                                  \
            }                                                                                                          \
            for (; k < depth; k++)                                                                                     \
                for (int i = 0; i < 8; i++)                                                                            \
                    to[k * TILE_PANEL + i] = i < rows ? value_##TYPE##_s(from[i * row + k]) : 0.0f;                    \
        }                                                                                                              \
    }
TILE_INLINE float value_f32_s(float x) { return x; }
TILE_PACK_TRANSPOSED(f32, float)
TILE_PACK_TRANSPOSED(f16, uint16_t)
TILE_PACK_TRANSPOSED(bf16, uint16_t)

#endif
