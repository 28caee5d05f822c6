/* FusedGolden_8d5811cca305: attention for x86-64-v3 */
#include "tile_kernel.h"
#include "tile_cpu.h"
#include "tile_host.h"
TILE_MMA(1, 6)
TILE_MMA(1, 2)
TILE_MMA(2, 4)
TILE_MMA(2, 2)
TILE_MMA(3, 2)
TILE_MMA(4, 2)
TILE_MMA(5, 2)
TILE_MMA(6, 2)
static void product(const float* restrict a, int64_t lda, int64_t step, const float* restrict b,
                    int64_t panel, float* restrict c, int64_t ldc, int64_t rows, int64_t columns,
                    int64_t depth, int clear) {
    const int64_t panels = (columns + TILE_PANEL - 1) / TILE_PANEL;
    int64_t p = 0;
    if (rows == 1) {
        for (; p + 3 <= panels; p += 3) TILE_CALL(mma_1x6, 0);
        for (; p + 1 <= panels; p += 1) TILE_CALL(mma_1x2, 0);
        return;
    }
    if (rows == 2) {
        for (; p + 2 <= panels; p += 2) TILE_CALL(mma_2x4, 0);
        for (; p + 1 <= panels; p += 1) TILE_CALL(mma_2x2, 0);
        return;
    }
    for (; p + 1 <= panels; p += 1) {
        for (int64_t i = 0, r; i < rows; i += r) {
            r = TILE_ROWS(rows - i, 6);
            switch (r) {
            case 6: TILE_CALL(mma_6x2, i); break;
            case 5: TILE_CALL(mma_5x2, i); break;
            case 4: TILE_CALL(mma_4x2, i); break;
            case 3: TILE_CALL(mma_3x2, i); break;
            case 2: TILE_CALL(mma_2x2, i); break;
            case 1: TILE_CALL(mma_1x2, i); break;
            default: break;
            }
        }
    }
}
static void run(const int64_t* symbols, const void* const* inputs, void* const* outputs,
                void* scratch, int64_t begin, int64_t end) {
    (void)symbols;
    (void)inputs;
    (void)outputs;
    (void)scratch;
    const int64_t n0 = symbols[0];
    const int64_t n1 = symbols[1];
    const float* restrict input0 = (const float*)inputs[0];
    float* restrict output0 = (float*)outputs[0];
    char* at = (char*)scratch;
    float* restrict s_k = (float*)at;
    const int64_t t1 = n1 + 31;
    const int64_t t2 = floordiv_i64(t1, 32);
    const int64_t t3 = t2 * 8192;
    at += (t3);
    float* restrict s_v = (float*)at;
    at += (t3);
    float* restrict s_s = (float*)at;
    at += (3072);
    float* restrict s_o = (float*)at;
    at += (6144);
    float* restrict s_top = (float*)at;
    at += (128);
    float* restrict s_total = (float*)at;
    at += (128);
    float* restrict s_rescale = (float*)at;
    at += (128);
    uint8_t* once_k = (uint8_t*)at;
    const int64_t t4 = t2 + 63;
    const int64_t t5 = floordiv_i64(t4, 64);
    const int64_t t6 = t5 * 64;
    at += (t6);
    uint8_t* once_v = (uint8_t*)at;
    at += (t6);
    const int64_t t7 = n1 + 23;
    const int64_t t8 = floordiv_i64(t7, 24);
    int64_t last = -1;
    const int32_t t111 = n1 == 0;
    const i32v v112 = splat_bool(t111);
    for (int64_t task = begin; task < end; task++) {
        const int64_t m_9 = task % t8;
        const int64_t h_10 = task / t8 % 2;
        const int64_t b_11 = task / t8 / 2;
        if (task / t8 != last) {
            last = task / t8;
            memset(once_k, 0, (size_t)(t2));
            memset(once_v, 0, (size_t)(t2));
        }
        const int64_t t12 = m_9 * -24;
        const int64_t t13 = n1 + t12;
        const int64_t t14 = min_i64(24, t13);
        for (int64_t row_15 = 0; row_15 < t14; row_15 += 1) {
            int64_t j16 = 0;
            const int64_t t17 = row_15 * 64;
            for (; j16 < 64; j16 += 8) {
                store_f32(s_o + t17 + j16, splat_f32(0x0.0p+0f)); // attention.py:37
            }
            s_top[row_15] = -INFINITY; // attention.py:39
            const int32_t t18 = -INFINITY == -INFINITY;
            const float t19 = t18 ? 0x0.0p+0f : s_top[row_15];
            const float t20 = -INFINITY - t19;
            const float t21 = t20 * 0x1.7154760000000p+0f;
            const float t22 = exp2_f32_s(t21);
            s_total[row_15] = t22; // attention.py:41
        }
        const int64_t t23 = m_9 * 24;
        const int64_t t24 = t23 + 24;
        const int64_t t25 = min_i64(n1, t24);
        const int64_t t26 = t25 + 31;
        const int64_t t27 = floordiv_i64(t26, 32);
        const int64_t t29 = n1 * b_11;
        const int64_t t30 = t29 * 384;
        const int64_t t31 = h_10 * 64;
        const int64_t t32 = t30 + t31;
        const int64_t t40 = m_9 * 9216;
        const int64_t t41 = t32 + t40;
        for (int64_t n_28 = 0; n_28 < t27; n_28 += 1) {
            const int64_t t33 = n_28 * 12288;
            const int64_t t34 = t32 + t33;
            const int64_t t35 = t34 + 128;
            const int64_t t36 = n_28 * 2048;
            const int64_t t37 = n_28 * -32;
            const int64_t t38 = n1 + t37;
            const int64_t t39 = min_i64(32, t38);
            if (!once_k[n_28]) {
                once_k[n_28] = 1;
                pack_transposed(input0 + t35, 384, s_k + t36, 1024, t39, 64); // attention.py:43
            }
            const int64_t t42 = t23 + t37;
            const int64_t t43 = t42 + 24;
            const int64_t t44 = min_i64(t39, t43);
            product(input0 + t41, 384, 1, s_k + t36, 1024, s_s + 0, 32, t14, t44, 64, 1); // attention.py:44
            for (int64_t row_45 = 0; row_45 < t14; row_45 += 1) {
                f32v acc46 = splat_f32(-INFINITY);
                int64_t j47 = 0;
                const int64_t t48 = t42 + row_45;
                const int64_t t49 = t48 + 1;
                const int64_t t51 = row_45 * 32;
                for (; j47 + 8 <= t44; j47 += 8) {
                    const i32v v50 = lanes_below(t49 - j47);
                    const f32v v52 = load_f32(s_s + t51 + j47);
                    const f32v v53 = v52 * splat_f32(0x1.0000000000000p-3f);
                    const f32v v54 = select_f32(v50, v53, splat_f32(-INFINITY));
                    const f32v v55 = v54;
                    store_f32(s_s + t51 + j47, v55); // attention.py:47
                    acc46 = max_f32(acc46, v55); // attention.py:63
                }
                if (j47 < t44) {
                    const i32v m56 = lanes_below(t44 - j47);
                    const i32v v57 = lanes_below(t49 - j47);
                    const f32v v58 = load_f32(s_s + t51 + j47);
                    const f32v v59 = v58 * splat_f32(0x1.0000000000000p-3f);
                    const f32v v60 = select_f32(v57, v59, splat_f32(-INFINITY));
                    const f32v v61 = v60;
                    store_masked_f32(s_s + t51 + j47, m56, v61); // attention.py:47
                    acc46 = max_f32(acc46, select_f32(m56, v61, splat_f32(-INFINITY))); // attention.py:63
                }
                const float max_62 = max_lanes(acc46); // attention.py:63
                const float t63 = s_top[row_45];
                s_rescale[row_45] = t63; // attention.py:62
                const float t64 = max_f32_s(t63, max_62);
                s_top[row_45] = t64; // attention.py:63
                const int32_t t65 = t64 == -INFINITY;
                const float t66 = t65 ? 0x0.0p+0f : s_top[row_45];
                const float t67 = t63 - t66;
                const float t68 = t67 * 0x1.7154760000000p+0f;
                const float t69 = exp2_f32_s(t68);
                s_rescale[row_45] = t69; // attention.py:65
                const float t70 = s_total[row_45];
                const float t71 = t70 * t69;
                s_total[row_45] = t71; // attention.py:66
                f32v acc72 = splat_f32(0.0f);
                int64_t j73 = 0;
                for (; j73 + 8 <= t44; j73 += 8) {
                    const f32v v74 = load_f32(s_s + t51 + j73);
                    const f32v v75 = splat_f32(t66);
                    const f32v v76 = v74 - v75;
                    const f32v v77 = v76 * splat_f32(0x1.7154760000000p+0f);
                    const f32v v78 = exp2_f32(v77);
                    const f32v v79 = v78;
                    store_f32(s_s + t51 + j73, v79); // attention.py:68
                    acc72 = acc72 + v79; // attention.py:69
                }
                if (j73 < t44) {
                    const i32v m80 = lanes_below(t44 - j73);
                    const f32v v81 = load_f32(s_s + t51 + j73);
                    const f32v v82 = splat_f32(t66);
                    const f32v v83 = v81 - v82;
                    const f32v v84 = v83 * splat_f32(0x1.7154760000000p+0f);
                    const f32v v85 = exp2_f32(v84);
                    const f32v v86 = v85;
                    store_masked_f32(s_s + t51 + j73, m80, v86); // attention.py:68
                    acc72 = acc72 + select_f32(m80, v86, splat_f32(0.0f)); // attention.py:69
                }
                const float sum_87 = sum_lanes(acc72); // attention.py:69
                const float t88 = t71 + sum_87;
                s_total[row_45] = t88; // attention.py:69
                int64_t j89 = 0;
                const int64_t t90 = row_45 * 64;
                for (; j89 < 64; j89 += 8) {
                    const f32v v91 = load_f32(s_o + t90 + j89);
                    const f32v v92 = splat_f32(t69);
                    const f32v v93 = v91 * v92;
                    store_f32(s_o + t90 + j89, v93); // attention.py:50
                }
            }
            if (!once_v[n_28]) {
                once_v[n_28] = 1;
                for (int64_t panel_94 = 0; panel_94 < 4; panel_94 += 1) {
                    const int64_t t101 = panel_94 * 16;
                    const int64_t t107 = panel_94 * 512;
                    for (int64_t depth_95 = 0; depth_95 < t39; depth_95 += 1) {
                        int64_t j96 = 0;
                        const int64_t t97 = depth_95 * 384;
                        const int64_t t98 = t30 + t97;
                        const int64_t t99 = t98 + t31;
                        const int64_t t100 = t99 + t33;
                        const int64_t t102 = t100 + t101;
                        const int64_t t103 = t102 + 256;
                        const int64_t t105 = depth_95 * 16;
                        const int64_t t106 = t105 + t36;
                        const int64_t t108 = t106 + t107;
                        for (; j96 + 8 <= 16; j96 += 8) {
                            const f32v v104 = load_f32(input0 + t103 + j96);
                            store_f32(s_v + t108 + j96, v104); // attention.py:51
                        }
                    }
                }
            }
            product(s_s + 0, 32, 1, s_v + t36, 512, s_o + 0, 64, t14, 64, t44, 0); // attention.py:54
        }
        const int64_t t119 = t29 * 128;
        const int64_t t120 = t119 + t31;
        const int64_t t121 = m_9 * 3072;
        const int64_t t122 = t120 + t121;
        for (int64_t row_109 = 0; row_109 < t14; row_109 += 1) {
            int64_t j110 = 0;
            const int64_t t113 = row_109 * 64;
            const int64_t t123 = row_109 * 128;
            const int64_t t124 = t122 + t123;
            for (; j110 + 8 <= 64; j110 += 8) {
                const f32v v114 = load_f32(s_o + t113 + j110);
                const float t115 = s_total[row_109];
                const f32v v116 = splat_f32(t115);
                const f32v v117 = v114 / v116;
                const f32v v118 = select_f32(v112, splat_f32(0x0.0p+0f), v117);
                store_f32(output0 + t124 + j110, v118); // attention.py:57
            }
        }
    }
}
static int32_t bind(const int64_t* const* shapes, const int32_t* ranks, int64_t* symbols, char* error,
                    size_t error_size) {
    (void)shapes; (void)ranks; (void)symbols; (void)error; (void)error_size;
    TILE_CHECK_RANK(0, 5)
    const int64_t n0 = symbols[0] = shapes[0][0];
    const int64_t n1 = symbols[1] = shapes[0][1];
    (void)n0;
    (void)n1;
    TILE_CHECK_DIM(0, 2, INT64_C(3))
    TILE_CHECK_DIM(0, 3, INT64_C(2))
    TILE_CHECK_DIM(0, 4, INT64_C(64))
    return 0;
}
static int64_t tasks(const int64_t* symbols) {
    (void)symbols;
    const int64_t n0 = symbols[0]; (void)n0;
    const int64_t n1 = symbols[1]; (void)n1;
    return (int64_t)(((floordiv_i64((n1 + INT64_C(23)), INT64_C(24)) * n0) * INT64_C(2)));
}
static size_t scratch_size(const int64_t* symbols) {
    (void)symbols;
    const int64_t n0 = symbols[0]; (void)n0;
    const int64_t n1 = symbols[1]; (void)n1;
    return (size_t)((((floordiv_i64((floordiv_i64((n1 + INT64_C(31)), INT64_C(32)) + INT64_C(63)), INT64_C(64)) * INT64_C(128)) + (floordiv_i64((n1 + INT64_C(31)), INT64_C(32)) * INT64_C(16384))) + INT64_C(9600)));
}
static int64_t work(const int64_t* symbols) {
    (void)symbols;
    const int64_t n0 = symbols[0]; (void)n0;
    const int64_t n1 = symbols[1]; (void)n1;
    return (int64_t)(((((n0 * n1) * n1) * INT64_C(10)) + floordiv_i64((((n0 * n1) * n1) * INT64_C(12)), INT64_C(50))));
}
static void shape(const int64_t* symbols, int32_t output, int64_t* dims) {
    (void)symbols;
    const int64_t n0 = symbols[0]; (void)n0;
    const int64_t n1 = symbols[1]; (void)n1;
    switch (output) {
    case 0: dims[0] = n0; dims[1] = n1; dims[2] = INT64_C(128); break;
    default: break;
    }
}
static const int32_t input_types[] = {1};
static const tile_dim dims_0[] = {{TILE_DIM_INPUT, 0, 0, 0}, {TILE_DIM_INPUT, 0, 1, 0}, {TILE_DIM_CONST, 0, 0, 128}};
static const tile_output tile_outputs[] = {{1, 3, dims_0}};
const tile_kernel tile_kernel_FusedGolden_8d5811cca305_x86_64_v3 = {
    "FusedGolden_8d5811cca305", 1, 1, input_types, tile_outputs,
    bind, shape, tasks, scratch_size, work, run,
};
