/* Products in the tile registers of AMX. A part of tile_cpu.h, which includes it.
 *
 * Registers 0 to 3 hold 32 × 32 results, 4 and 5 rows of a, 6 and 7 panels of b, 32 deep. Setting their shapes takes as
 * long as five steps of a product: a task begins with whole registers (tile_begin), and whoever needs others for the last
 * rows or the last of the depth sets those and goes back.
 */
#ifndef TILE_AMX_H
#define TILE_AMX_H

typedef struct tile_shapes {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16]; /* of a row, by register */
    uint8_t rows[16];
} tile_shapes;

enum {
    TILE_BLOCK = 32,   /* rows and columns of results that are summed at once, and the depth of a step */
    TILE_FEW_ROWS = 4, /* up to here a product waits for its right operand, and registers are as fast as tiles */
};

/* For blocks of `rows` ≤ 32 rows of a and steps of `depth` ≤ 32, an even number. */
TILE_INLINE void shape_tiles(int64_t rows, int64_t depth) {
    tile_shapes s __attribute__((aligned(64)));
    memset(&s, 0, sizeof s);
    const int64_t upper = rows < 16 ? rows : 16, lower = rows > 16 ? rows - 16 : upper; /* no register may be empty */
    s.palette = 1;
    TILE_UNROLL for (int i = 0; i < 8; i++) {
        s.bytes[i] = (uint16_t)(i == 4 || i == 5 ? 2 * depth : 64);
        s.rows[i] = (uint8_t)(i >= 6 ? depth / 2 : i == 2 || i == 3 || i == 5 ? lower : upper);
    }
    TILE_CONFIG(&s);
}
TILE_INLINE void tile_begin(void) { shape_tiles(TILE_BLOCK, TILE_BLOCK); }
TILE_INLINE void tile_end(void) { TILE_RELEASE(); }

/* Of one block: `tall` if it has more than 16 rows, `wide` if it has two panels. */
TILE_INLINE void tile_clear(void) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
}
TILE_INLINE void tile_read(const float* c, int64_t ldc, int tall, int wide) {
    TILE_LOAD(0, c, ldc * 4);
    if (wide) TILE_LOAD(1, c + TILE_PANEL, ldc * 4);
    if (tall) TILE_LOAD(2, c + 16 * ldc, ldc * 4);
    if (tall && wide) TILE_LOAD(3, c + 16 * ldc + TILE_PANEL, ldc * 4);
}
TILE_INLINE void tile_write(float* c, int64_t ldc, int tall, int wide) {
    TILE_STORE(0, c, ldc * 4);
    if (wide) TILE_STORE(1, c + TILE_PANEL, ldc * 4);
    if (tall) TILE_STORE(2, c + 16 * ldc, ldc * 4);
    if (tall && wide) TILE_STORE(3, c + 16 * ldc + TILE_PANEL, ldc * 4);
}
/* All loads first: the order makes no difference to an idle core, and an eighth to one whose other thread works. */
TILE_INLINE void tile_step(const uint16_t* a, int64_t lda, const uint16_t* b, int64_t panel, int tall, int wide) {
    TILE_LOAD(6, b, 64);
    TILE_LOAD(4, a, lda * 2);
    if (tall) TILE_LOAD(5, a + 16 * lda, lda * 2);
    if (wide) TILE_LOAD(7, b + panel, 64);
    TILE_PRODUCT(tdpbf16ps, 0, 4, 6);
    if (tall) TILE_PRODUCT(tdpbf16ps, 2, 5, 6);
    if (wide) TILE_PRODUCT(tdpbf16ps, 1, 4, 7);
    if (tall && wide) TILE_PRODUCT(tdpbf16ps, 3, 5, 7);
}
TILE_INLINE void tile_block(const uint16_t* a, int64_t lda, const uint16_t* b, int64_t panel, float* c, int64_t ldc,
                            int64_t depth, int clear, const int tall, const int wide) {
    if (clear) tile_clear();
    else tile_read(c, ldc, tall, wide);
    for (int64_t k = 0; k < depth; k += TILE_BLOCK) tile_step(a + k, lda, b + k * TILE_PANEL, panel, tall, wide);
    tile_write(c, ldc, tall, wide);
}
/* `rows` of every panel, in blocks of the shape that the registers have: panels outer, so that they stay in the cache. */
TILE_INLINE void tile_rows_of_panels(const uint16_t* a, int64_t lda, const uint16_t* b, int64_t panel, float* c,
                                     int64_t ldc, int64_t rows, int64_t panels, int64_t depth, int clear,
                                     const int tall) {
    for (int64_t p = 0; p < panels; p += 2)
        for (int64_t i = 0; i < rows; i += TILE_BLOCK) {
            float* result = c + i * ldc + p * TILE_PANEL;
            if (p + 1 < panels) tile_block(a + i * lda, lda, b + p * panel, panel, result, ldc, depth, clear, tall, 1);
            else tile_block(a + i * lda, lda, b + p * panel, panel, result, ldc, depth, clear, tall, 0);
        }
}
/* Steps of `step` ≤ 32 each. The registers have the shapes of tile_begin before and after. */
TILE_INLINE void tile_cover(const uint16_t* a, int64_t lda, const uint16_t* b, int64_t panel, float* c, int64_t ldc,
                            int64_t rows, int64_t panels, int64_t depth, int64_t step, int clear) {
    const int64_t whole = rows / TILE_BLOCK * TILE_BLOCK, left = rows - whole;
    if (whole) {
        if (step < TILE_BLOCK) shape_tiles(TILE_BLOCK, step);
        tile_rows_of_panels(a, lda, b, panel, c, ldc, whole, panels, depth, clear, 1);
    }
    if (left) {
        shape_tiles(left, step);
        const uint16_t* last = a + whole * lda;
        if (left > 16) tile_rows_of_panels(last, lda, b, panel, c + whole * ldc, ldc, left, panels, depth, clear, 1);
        else tile_rows_of_panels(last, lda, b, panel, c + whole * ldc, ldc, left, panels, depth, clear, 0);
    }
    if (left || step < TILE_BLOCK) tile_begin();
}
typedef void tile_rows_product(const uint16_t* restrict a, int64_t lda, int64_t step, const uint16_t* restrict b,
                               int64_t panel, float* restrict c, int64_t ldc, int64_t rows, int64_t columns,
                               int64_t depth, int clear);
/* The whole product but for an odd end of the depth: that, and few rows, are left to `rest`. */
static __attribute__((noinline)) void tile_amx_product(const uint16_t* a, int64_t lda, const uint16_t* b, int64_t panel,
                                                       float* c, int64_t ldc, int64_t rows, int64_t columns,
                                                       int64_t depth, int clear, tile_rows_product* rest) {
    const int64_t deep = depth / TILE_BLOCK * TILE_BLOCK, pairs = (depth - deep) / 2 * 2;
    const int64_t panels = (columns + TILE_PANEL - 1) / TILE_PANEL;
    if (rows <= TILE_FEW_ROWS || deep + pairs == 0) {
        rest(a, lda, 1, b, panel, c, ldc, rows, columns, depth, clear);
        return;
    }
    TILE_FENCE();
    if (deep) tile_cover(a, lda, b, panel, c, ldc, rows, panels, deep, TILE_BLOCK, clear);
    if (pairs) {
        const uint16_t* under = b + deep * TILE_PANEL;
        tile_cover(a + deep, lda, under, panel, c, ldc, rows, panels, TILE_BLOCK, pairs, clear && deep == 0);
    }
    TILE_FENCE();
    const int64_t done = deep + pairs;
    if (done < depth) rest(a + done, lda, 1, b + done * TILE_PANEL, panel, c, ldc, rows, columns, depth - done, 0);
}
#define TILE_AMX_PRODUCT(NAME, ROWS)                                                                                   \
    static void NAME(const uint16_t* restrict a, int64_t lda, int64_t step, const uint16_t* restrict b, int64_t panel, \
                     float* restrict c, int64_t ldc, int64_t rows, int64_t columns, int64_t depth, int clear) {        \
        (void)step;                                                                                                    \
        tile_amx_product(a, lda, b, panel, c, ldc, rows, columns, depth, clear, ROWS);                                 \
    }

/* Asks for lines of the panels that come next: they lie in the third cache as a rule, and one step at a time would wait. */
TILE_INLINE void tile_ahead(const uint16_t* from, int64_t lines) {
    for (int64_t i = 0; i < lines; i++) _mm_prefetch((const char*)from + 64 * i, _MM_HINT_T1);
}
/* A step of a block beside which the block before it is finished. */
TILE_INLINE void tile_fused_step(const uint16_t* a, int64_t lda, const uint16_t* b, int64_t panel, int tall, int wide) {
    if (tall && wide) tile_step(a, lda, b, panel, 1, 1);
    else tile_step(a, lda, b, panel, tall, wide);
}

#endif
