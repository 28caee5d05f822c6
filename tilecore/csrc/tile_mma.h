/* The register tile of floats: c[rows][NV vectors] (+)= a[rows][depth] · b, b of TYPE in panels of TILE_PANEL columns.
 * Vector j of a row of b lies in panel j * LANES / PANEL. All accumulators live in registers: MR * NV of them.
 * A part of tile_cpu.h, which includes it.
 *
 * b comes from a cache that is far away, once for all rows. Tiles of few rows, and such as hold all rows there are, ask for
 * what they read soon (OWN). Where tiles are many, as they are not in attention, they share out the panels after theirs: each asks for `lines` lines of every such
 * panel with each TILE_TURN rows of b.
 */
#ifndef TILE_MMA_H
#define TILE_MMA_H

extern const int32_t tile_from_memory; /* whether a library's weights do not fit the last cache together */
#define TILE_AHEAD 8192 /* bytes of b, of all panels together, to ask for beforehand: the processor's own guess stops at pages */
#define TILE_TURN 32
#define TILE_SHARERS 12 /* tiles that share at least: with weights out of memory, as in a model, 128 rows gain 5 % */
#define TILE_LINE 64
/* A tile's sums from and to c. Rows are found one after the other, when they are used: the addresses of all vectors, made
 * beforehand, leave no registers to anything else, and took a tenth of the time of a tile whose depth is 64. */
TILE_INLINE float* tile_below(float* row, int64_t ldc) {
    row += ldc;
    __asm__("" : "+r"(row));
    return row;
}
#define TILE_READ_SUMS(MR, NV)                                                                                         \
    f32v acc[MR][NV];                                                                                                  \
    float* row = c;                                                                                                    \
    TILE_UNROLL for (int i = 0; i < MR; i++, row = tile_below(row, ldc))                                               \
        TILE_UNROLL for (int j = 0; j < NV; j++) acc[i][j] = clear ? (f32v){0} : load_f32(row + j * TILE_LANES);
#define TILE_WRITE_SUMS(MR, NV)                                                                                        \
    row = c;                                                                                                           \
    TILE_UNROLL for (int i = 0; i < MR; i++, row = tile_below(row, ldc))                                               \
        TILE_UNROLL for (int j = 0; j < NV; j++) store_f32(row + j * TILE_LANES, acc[i][j]);
/* With each turn a tile asks for some lines of the panels after its own. */
#define TILE_ASK(NV, OWN)                                                                                              \
    for (int64_t line = 0; !OWN && line < lines; line++, ahead += TILE_LINE / sizeof *ahead)                  \
        TILE_UNROLL for (int j = 0; j < NV * TILE_LANES; j += TILE_PANEL)                                              \
            __builtin_prefetch(ahead + j / TILE_PANEL * panel, 0, 2);
/* With each row of b, or pair of such, a tile asks for its own later ones, so many bytes ahead in all. */
#define TILE_ASK_OWN(NV, OWN) TILE_ASK_LATER(NV, OWN, TILE_AHEAD)
#define TILE_ASK_LATER(NV, OWN, BYTES)                                                                                 \
    if (OWN) {                                                                                                         \
        const int64_t later = k * TILE_PANEL + (BYTES) / (NV * TILE_LANES / TILE_PANEL * (int64_t)sizeof(*b));         \
        TILE_UNROLL for (int j = 0; j < NV * TILE_LANES; j += TILE_PANEL)                                              \
            __builtin_prefetch(b + j / TILE_PANEL * panel + later);                                                    \
    }
/* A vector of b that two or three rows use: gcc takes it out of memory for each of them otherwise. */
#if defined(TILE_KEEP)
#define TILE_HOLD(MR, v) do { if ((MR) > 1 && (MR) < 4) TILE_KEEP(v); } while (0)
#else
#define TILE_HOLD(MR, v) (void)0
#endif
#define TILE_MMA_STEP(MR, NV, TYPE, OWN)                                                                               \
    do {                                                                                                               \
        TILE_ASK_OWN(NV, OWN)                                                                                          \
        f32v bv[NV];                                                                                                   \
        TILE_UNROLL for (int j = 0; j < NV; j++) {                                                                     \
            bv[j] = load_##TYPE(b + j * TILE_LANES / TILE_PANEL * panel + j * TILE_LANES % TILE_PANEL + k * TILE_PANEL); \
            TILE_HOLD(MR, bv[j]);                                                                                      \
        }                                                                                                              \
        TILE_UNROLL for (int i = 0; i < MR; i++) {                                                                     \
            f32v av = splat_f32(a[i * lda + k * step]);                                                                \
            TILE_UNROLL for (int j = 0; j < NV; j++) acc[i][j] += av * bv[j];                                          \
        }                                                                                                              \
    } while (0)
/* Where sums leave room for one vector of b only: the others come from the first cache for every row of a. */
#define TILE_TIGHT_STEP(MR, NV, TYPE, OWN)                                                                             \
    do {                                                                                                               \
        TILE_ASK_OWN(NV, OWN)                                                                                          \
        const float* again = b + k * TILE_PANEL;                                                                       \
        const f32v first = load_f32(again);                                                                            \
        TILE_UNROLL for (int i = 0; i < MR; i++) {                                                                     \
            const f32v av = splat_f32(a[i * lda + k * step]);                                                          \
            acc[i][0] += av * first;                                                                                   \
            TILE_KEEP(acc[i][0]);                                                                                      \
            __asm__("" : "+r"(again)); /* else gcc keeps all of them, and sums in memory */                            \
            TILE_UNROLL for (int j = 1; j < NV; j++) {                                                                 \
                acc[i][j] += av * load_f32(again + j * TILE_LANES / TILE_PANEL * panel + j * TILE_LANES % TILE_PANEL); \
                TILE_KEEP(acc[i][j]);                                                                                  \
            }                                                                                                          \
        }                                                                                                              \
    } while (0)
#define TILE_MMA(MR, NV, NAME, TYPE, ELEMENT, OWN) TILE_MMA_OF(TILE_MMA_STEP, MR, NV, NAME, TYPE, ELEMENT, OWN)
#define TILE_MMA_TIGHT(MR, NV, NAME) TILE_MMA_OF(TILE_TIGHT_STEP, MR, NV, NAME, f32, float, 1)
#define TILE_MMA_OF(STEP, MR, NV, NAME, TYPE, ELEMENT, OWN)                                                            \
    static __attribute__((noinline)) void NAME##MR##x##NV(                                                             \
        const float* restrict a, int64_t lda, int64_t step, const ELEMENT* restrict b, int64_t panel,                  \
        float* restrict c, int64_t ldc, int64_t depth, int clear, const ELEMENT* ahead, int64_t lines) {               \
        TILE_READ_SUMS(MR, NV)                                                                                         \
        int64_t k = 0;                                                                                                 \
        while (k + TILE_TURN <= depth) {                                                                               \
            TILE_ASK(NV, OWN)                                                                                          \
            TILE_UNROLL_DEPTH for (const int64_t stop = k + TILE_TURN; k < stop; k++) STEP(MR, NV, TYPE, OWN);         \
        }                                                                                                              \
        for (; k < depth; k++) STEP(MR, NV, TYPE, OWN);                                                                \
        TILE_WRITE_SUMS(MR, NV)                                                                                        \
    }

/* One row: each column has several sums, of rows of b in turn, so that few panels are enough to keep the processor busy.
 * Two side by side take 0.85 to 0.93 of the time of four out of the last cache and 1.06 to 1.12 out of memory (the loop
 * alone; of a session's time 0.83 to 0.97 and 1.03 to 1.08). */
#define TILE_AHEAD_ONE 4096
#define TILE_ONE_SUMS(NV) ((7 + (NV)) / (NV))
#define TILE_ONE_STEP(SUM, NV, TYPE, ROW)                                                                              \
    do {                                                                                                               \
        const int64_t k = ROW;                                                                                         \
        TILE_ASK_LATER(NV, 1, TILE_AHEAD_ONE)                                                                          \
        const f32v av = splat_f32(a[k * step]);                                                                        \
        TILE_UNROLL for (int j = 0; j < NV; j++) acc[SUM][j] += av *                                                   \
            load_##TYPE(b + j * TILE_LANES / TILE_PANEL * panel + j * TILE_LANES % TILE_PANEL + k * TILE_PANEL);       \
    } while (0)
#define TILE_MMA_ONE(NV, NAME, TYPE, ELEMENT)                                                                          \
    static __attribute__((noinline)) void NAME##1x##NV(                                                                \
        const float* restrict a, int64_t lda, int64_t step, const ELEMENT* restrict b, int64_t panel,                  \
        float* restrict c, int64_t ldc, int64_t depth, int clear, const ELEMENT* ahead, int64_t lines) {               \
        (void)lda, (void)ldc, (void)ahead, (void)lines;                                                                \
        f32v acc[TILE_ONE_SUMS(NV)][NV];                                                                               \
        TILE_UNROLL for (int s = 0; s < TILE_ONE_SUMS(NV); s++) TILE_UNROLL for (int j = 0; j < NV; j++)               \
            acc[s][j] = s > 0 || clear ? (f32v){0} : load_f32(c + j * TILE_LANES);                                     \
        const int64_t whole = depth / TILE_ONE_SUMS(NV) * TILE_ONE_SUMS(NV);                                           \
        for (int64_t turn = 0; turn < whole; turn += TILE_ONE_SUMS(NV))                                                \
            TILE_UNROLL for (int s = 0; s < TILE_ONE_SUMS(NV); s++) TILE_ONE_STEP(s, NV, TYPE, turn + s);              \
        for (int64_t last = whole; last < depth; last++) TILE_ONE_STEP(0, NV, TYPE, last);                             \
        TILE_UNROLL for (int j = 0; j < NV; j++) {                                                                     \
            TILE_UNROLL for (int s = 1; s < TILE_ONE_SUMS(NV); s++) acc[0][j] += acc[s][j];                            \
            store_f32(c + j * TILE_LANES, acc[0][j]);                                                                  \
        }                                                                                                              \
    }

/* How `full`-row tiles of `count` panels from p share out the panels after theirs; in the last of these it is the panels'
 * next rows, where the products are a step of a deeper sum. All of a panel is TILE_UNITS runs of lines. These rows are
 * from `first` on of `all` that meet the panels, strip by strip. */
#define TILE_UNITS (TILE_TURN * TILE_PANEL * (int64_t)sizeof(*b) / TILE_LINE)
#define TILE_SHARE(full, count)                                                                                        \
    const int64_t tiles = (all + (full) - 1) / (full), size = depth * TILE_PANEL;                                      \
    const int64_t each = tiles < TILE_SHARERS ? 0 : (TILE_UNITS + tiles - 1) / tiles;                                  \
    const int64_t share = each * (depth / TILE_TURN) * (TILE_LINE / (int64_t)sizeof(*b));                              \
    int64_t next = p + 2 * (count) > panels && panel > size ? size : (p + (count)) * panel, left = each ? TILE_UNITS : 0; \
    next += first / (full) * share, left -= first / (full) * each
/* A tile at panel `at`, alone or with its share. */
#define TILE_CALL_ALONE(shape, row, at)                                                                                \
    shape(a + (row) * lda, lda, step, b + (at) * panel, panel, c + (row) * ldc + (at) * TILE_PANEL, ldc, depth, clear, \
          b, 0)
#define TILE_CALL_AHEAD(shape, row, at)                                                                                \
    do {                                                                                                               \
        shape(a + (row) * lda, lda, step, b + (at) * panel, panel, c + (row) * ldc + (at) * TILE_PANEL, ldc, depth,    \
              clear, b + next, left > 0 ? each : 0);                                                                   \
        next += share, left -= each;                                                                                   \
    } while (0)

#endif
