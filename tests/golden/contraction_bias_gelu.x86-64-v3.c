/* FusedGolden_921aa5587817: matmul for x86-64-v3 */
#include "tile_kernel.h"
#include "tile_cpu.h"
#include "tile_host.h"
void tile_product_x86_64_v3(const float* restrict a, int64_t lda, int64_t step, const float* restrict b, int64_t panel,
    float* restrict c, int64_t ldc, int64_t rows, int64_t columns, int64_t depth, int clear,
    int64_t first, int64_t all);
static void run(const int64_t* symbols, const void* const* inputs, void* const* outputs,
                void* scratch, int64_t* copied, int64_t begin, int64_t end) {
    (void)symbols;
    (void)inputs;
    (void)outputs;
    (void)scratch;
    (void)copied;
    const int64_t n0 = symbols[0];
    const float* restrict input0 = (const float*)inputs[0];
    const float* restrict input1 = (const float*)inputs[1];
    const float* restrict input2 = (const float*)inputs[2];
    float* restrict output0 = (float*)outputs[0];
    float* restrict s_c = (float*)((char*)scratch + 0);
    const int64_t t1 = n0 + 23;
    const int64_t t2 = floordiv_i64(t1, 24);
    for (int64_t task = begin; task < end; task++) {
        const int64_t m_3 = task % t2;
        const int64_t n_4 = task / t2 % 1;
        const int64_t t6 = m_3 * -24;
        const int64_t t7 = n0 + t6;
        const int64_t t8 = min_i64(24, t7);
        const int64_t t11 = m_3 * 1152;
        const int64_t t13 = n_4 * 48;
        for (int64_t row_9 = 0; row_9 < t8; row_9 += 1) {
            const int64_t t15 = row_9 * 48;
            for (int64_t line_10 = 0; line_10 < 48; line_10 += 16) {
                const int64_t t12 = line_10 + t11;
                const int64_t t14 = t12 + t13;
                const int64_t t16 = t14 + t15;
                __builtin_prefetch(output0 + t16, 1);
            }
        }
        const int32_t t17 = t8 < 3;
        const int64_t t18 = t17 ? 32 : 16;
        const int64_t t19 = t18 + 47;
        const int64_t t20 = floordiv_i64(t19, t18);
        const int64_t t29 = 0 * 64;
        const int64_t t30 = m_3 * 1536;
        const int64_t t31 = t29 + t30;
        const int64_t t37 = 0 * 1024;
        const int64_t t39 = n_4 * 3072;
        const int64_t t47 = floordiv_i64(47, t18);
        for (int64_t panels_21 = 0; panels_21 < t20; panels_21 += 1) {
            const int64_t t34 = panels_21 * t18;
            const int64_t t35 = (t34 >> 4);
            const int64_t t36 = t35 * 1024;
            const int64_t t38 = t36 + t37;
            const int64_t t40 = t38 + t39;
            const int64_t t41 = t34 * -1;
            const int64_t t42 = t41 + 48;
            const int64_t t43 = min_i64(t18, t42);
            const int64_t t46 = panels_21 + 1;
            const int64_t t48 = min_i64(t46, t47);
            const int64_t t60 = t34 + t13;
            const int64_t t64 = t34 + t11;
            const int64_t t65 = t64 + t13;
            for (int64_t strip_22 = 0; strip_22 < 1; strip_22 += 1) {
                const int64_t t23 = strip_22 + 1;
                const int32_t t24 = t23 < 1;
                const int64_t t25 = strip_22 * -24;
                const int64_t t26 = t8 + t25;
                const int64_t t27 = t24 ? 24 : t26;
                const int64_t t28 = strip_22 * 24;
                const int64_t t32 = strip_22 * 1536;
                const int64_t t33 = t31 + t32;
                tile_product_x86_64_v3(input0 + t33, 64, 1, input1 + t40, 1024, s_c + 0, 32, t27, t43, 64, 1, t28, t8); // matmul.py:46
                const int64_t t49 = t24 ? panels_21 : t48;
                const int64_t t50 = t49 * t18;
                const int64_t t51 = t24 ? t23 : 0;
                const int64_t t52 = t51 * 1152;
                const int64_t t53 = t50 + t52;
                const int64_t t54 = t53 + t11;
                const int64_t t55 = t54 + t13;
                const int64_t t67 = strip_22 * 1152;
                for (int64_t row_of_block_44 = 0; row_of_block_44 < t27; row_of_block_44 += 1) {
                    int64_t j45 = 0;
                    const int64_t t56 = row_of_block_44 * 48;
                    const int64_t t57 = t55 + t56;
                    const int64_t t58 = row_of_block_44 * 32;
                    const int64_t t66 = t65 + t56;
                    const int64_t t68 = t66 + t67;
                    for (; j45 + 8 <= t43; j45 += 8) {
                        __builtin_prefetch(output0 + t57 + j45, 1);
                        const f32v v59 = load_f32(s_c + t58 + j45);
                        const f32v v61 = load_f32(input2 + t60 + j45);
                        const f32v v62 = v59 + v61;
                        const f32v v63 = gelu_f32(v62);
                        store_f32(output0 + t68 + j45, v63); // matmul.py:53
                    }
                    if (j45 < t43) {
                        __builtin_prefetch(output0 + t57 + j45, 1);
                        const i32v m69 = lanes_below(t43 - j45);
                        const f32v v70 = load_f32(s_c + t58 + j45);
                        const f32v v71 = load_masked_f32(input2 + t60 + j45, m69);
                        const f32v v72 = v70 + v71;
                        const f32v v73 = gelu_f32(v72);
                        store_masked_f32(output0 + t68 + j45, m69, v73); // matmul.py:53
                    }
                }
            }
        }
    }
}
static int32_t bind(const int64_t* const* shapes, const int32_t* ranks, int64_t* symbols, char* error,
                    size_t error_size) {
    (void)shapes; (void)ranks; (void)symbols; (void)error; (void)error_size;
    TILE_CHECK_RANK(0, 2)
    const int64_t n0 = symbols[0] = shapes[0][0];
    TILE_CHECK_RANK(1, 3)
    TILE_CHECK_RANK(2, 1)
    (void)n0;
    TILE_CHECK_DIM(0, 1, INT64_C(64))
    TILE_CHECK_DIM(1, 0, INT64_C(3))
    TILE_CHECK_DIM(1, 1, INT64_C(64))
    TILE_CHECK_DIM(1, 2, INT64_C(16))
    TILE_CHECK_DIM(2, 0, INT64_C(48))
    return 0;
}
static int64_t tasks(const int64_t* symbols) {
    (void)symbols;
    const int64_t n0 = symbols[0]; (void)n0;
    return (int64_t)(floordiv_i64((n0 + INT64_C(23)), INT64_C(24)));
}
static int64_t group(const int64_t* symbols) {
    (void)symbols;
    const int64_t n0 = symbols[0]; (void)n0;
    return (int64_t)(INT64_C(1));
}
static size_t scratch_size(const int64_t* symbols) {
    (void)symbols;
    const int64_t n0 = symbols[0]; (void)n0;
    return (size_t)(INT64_C(6016));
}
static int64_t work(const int64_t* symbols) {
    (void)symbols;
    const int64_t n0 = symbols[0]; (void)n0;
    return (int64_t)((floordiv_i64((n0 * INT64_C(44)), INT64_C(50)) + (n0 * INT64_C(122))));
}
static void shape(const int64_t* symbols, int32_t output, int64_t* dims) {
    (void)symbols;
    const int64_t n0 = symbols[0]; (void)n0;
    switch (output) {
    case 0: dims[0] = n0; dims[1] = INT64_C(48); break;
    default: break;
    }
}
static const int32_t input_types[] = {1, 1, 1};
static const tile_dim dims_0[] = {{TILE_DIM_INPUT, 0, 0, 0}, {TILE_DIM_CONST, 0, 0, 48}};
static const tile_output tile_outputs[] = {{1, 2, dims_0}};
const tile_kernel tile_kernel_FusedGolden_921aa5587817_x86_64_v3 = {
    "FusedGolden_921aa5587817", 3, 1, input_types, tile_outputs,
    bind, shape, tasks, group, scratch_size, work, run, NULL,
};
