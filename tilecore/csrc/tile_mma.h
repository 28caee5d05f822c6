/* The register tile of floats: c[rows][NV vectors] (+)= a[rows][depth] · b, b of TYPE in panels of TILE_PANEL columns.
 * Vector j of a row of b lies in panel j * LANES / PANEL. All accumulators live in registers: MR * NV of them.
 * A part of tile_cpu.h, which includes it.
 */
#ifndef TILE_MMA_H
#define TILE_MMA_H

#define TILE_FEW 4    /* rows that do little work for each row of b, so that its fetching shows */
#define TILE_AHEAD 32 /* rows of b to ask for beforehand: the processor's own guess stops at pages */
#define TILE_MMA(MR, NV, NAME, TYPE, ELEMENT)                                                                         \
    static __attribute__((noinline)) void NAME##MR##x##NV(const float* restrict a, int64_t lda, int64_t step,         \
                                                          const ELEMENT* restrict b, int64_t panel,                   \
                                                          float* restrict c, int64_t ldc, int64_t depth, int clear) { \
        f32v acc[MR][NV];                                                                                             \
        TILE_UNROLL for (int i = 0; i < MR; i++) TILE_UNROLL for (int j = 0; j < NV; j++) acc[i][j] =                 \
            clear ? (f32v){0} : load_f32(c + i * ldc + j * TILE_LANES);                                               \
        TILE_UNROLL_DEPTH for (int64_t k = 0; k < depth; k++) {                                                       \
            if (MR <= TILE_FEW) {                                                                                     \
                TILE_UNROLL for (int j = 0; j < NV * TILE_LANES; j += TILE_PANEL)                                     \
                    __builtin_prefetch(b + j / TILE_PANEL * panel + (k + TILE_AHEAD) * TILE_PANEL);                   \
            }                                                                                                         \
            f32v bv[NV];                                                                                              \
            TILE_UNROLL for (int j = 0; j < NV; j++) bv[j] =                                                          \
                load_##TYPE(b + j * TILE_LANES / TILE_PANEL * panel + j * TILE_LANES % TILE_PANEL + k * TILE_PANEL);  \
            TILE_UNROLL for (int i = 0; i < MR; i++) {                                                                \
                f32v av = splat_f32(a[i * lda + k * step]);                                                           \
                TILE_UNROLL for (int j = 0; j < NV; j++) acc[i][j] += av * bv[j];                                     \
            }                                                                                                         \
        }                                                                                                             \
        TILE_UNROLL for (int i = 0; i < MR; i++) TILE_UNROLL for (int j = 0; j < NV; j++)                             \
            store_f32(c + i * ldc + j * TILE_LANES, acc[i][j]);                                                       \
    }

#endif
