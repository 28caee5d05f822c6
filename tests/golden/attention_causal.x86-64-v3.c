/* FusedGolden_6fda6881db59: attention for x86-64-v3 */
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
        for (; p + 3 <= panels; p += 3) TILE_CALL(1x6, 0);
        for (; p + 1 <= panels; p += 1) TILE_CALL(1x2, 0);
        return;
    }
    if (rows == 2) {
        for (; p + 2 <= panels; p += 2) TILE_CALL(2x4, 0);
        for (; p + 1 <= panels; p += 1) TILE_CALL(2x2, 0);
        return;
    }
    for (; p + 1 <= panels; p += 1) {
        for (int64_t i = 0, r; i < rows; i += r) {
            r = TILE_ROWS(rows - i, 6);
            switch (r) {
            case 6: TILE_CALL(6x2, i); break;
            case 5: TILE_CALL(5x2, i); break;
            case 4: TILE_CALL(4x2, i); break;
            case 3: TILE_CALL(3x2, i); break;
            case 2: TILE_CALL(2x2, i); break;
            case 1: TILE_CALL(1x2, i); break;
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
    at += (8192);
    float* restrict s_v = (float*)at;
    at += (8192);
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
    const int64_t t1 = n1 + 23;
    const int64_t t2 = floordiv_i64(t1, 24);
    const int32_t t136 = n1 == 0;
    const i32v v137 = splat_bool(t136);
    for (int64_t task = begin; task < end; task++) {
        const int64_t m_3 = task % t2;
        const int64_t h_4 = task / t2 % 2;
        const int64_t b_5 = task / t2 / 2;
        const int64_t t6 = m_3 * -24;
        const int64_t t7 = n1 + t6;
        const int64_t t8 = min_i64(24, t7);
        for (int64_t row_9 = 0; row_9 < t8; row_9 += 1) {
            int64_t j10 = 0;
            const int64_t t11 = row_9 * 64;
            for (; j10 < 64; j10 += 8) {
                store_f32(s_o + t11 + j10, splat_f32(0x0.0p+0f)); // attention.py:37
            }
            s_top[row_9] = -INFINITY; // attention.py:39
            const int32_t t12 = -INFINITY == -INFINITY;
            const float t13 = t12 ? 0x0.0p+0f : s_top[row_9];
            const float t14 = -INFINITY - t13;
            const float t15 = t14 * 0x1.7154760000000p+0f;
            const float t16 = exp2_f32_s(t15);
            s_total[row_9] = t16; // attention.py:41
        }
        const int64_t t17 = m_3 * 24;
        const int64_t t18 = t17 + 24;
        const int64_t t19 = min_i64(n1, t18);
        const int64_t t20 = t19 + 31;
        const int64_t t21 = floordiv_i64(t20, 32);
        const int64_t t23 = n1 * b_5;
        const int64_t t24 = t23 * 384;
        const int64_t t25 = h_4 * 64;
        const int64_t t26 = t24 + t25;
        const int64_t t33 = m_3 * 9216;
        const int64_t t34 = t26 + t33;
        for (int64_t n_22 = 0; n_22 < t21; n_22 += 1) {
            const int64_t t27 = n_22 * 12288;
            const int64_t t28 = t26 + t27;
            const int64_t t29 = t28 + 128;
            const int64_t t30 = n_22 * -32;
            const int64_t t31 = n1 + t30;
            const int64_t t32 = min_i64(32, t31);
            pack_transposed(input0 + t29, 384, s_k + 0, 1024, t32, 64); // attention.py:43
            product(input0 + t34, 384, 1, s_k + 0, 1024, s_s + 0, 32, t8, t32, 64, 1); // attention.py:44
            const int64_t t38 = t17 + t30;
            for (int64_t row_35 = 0; row_35 < t8; row_35 += 1) {
                f32v acc36 = splat_f32(-INFINITY);
                int64_t j37 = 0;
                const int64_t t39 = t38 + row_35;
                const int64_t t40 = t39 + 1;
                const int64_t t42 = row_35 * 32;
                for (; j37 + 8 <= t32; j37 += 8) {
                    const i32v v41 = lanes_below(t40 - j37);
                    const f32v v43 = load_f32(s_s + t42 + j37);
                    const f32v v44 = v43 * splat_f32(0x1.0000000000000p-3f);
                    const f32v v45 = select_f32(v41, v44, splat_f32(-INFINITY));
                    const f32v v46 = v45;
                    store_f32(s_s + t42 + j37, v46); // attention.py:47
                    acc36 = max_f32(acc36, v46); // attention.py:63
                }
                if (j37 < t32) {
                    const i32v m47 = lanes_below(t32 - j37);
                    const i32v v48 = lanes_below(t40 - j37);
                    const f32v v49 = load_f32(s_s + t42 + j37);
                    const f32v v50 = v49 * splat_f32(0x1.0000000000000p-3f);
                    const f32v v51 = select_f32(v48, v50, splat_f32(-INFINITY));
                    const f32v v52 = v51;
                    store_masked_f32(s_s + t42 + j37, m47, v52); // attention.py:47
                    acc36 = max_f32(acc36, select_f32(m47, v52, splat_f32(-INFINITY))); // attention.py:63
                }
                const float max_53 = max_lanes(acc36); // attention.py:63
                const float t54 = s_top[row_35];
                s_rescale[row_35] = t54; // attention.py:62
                const float t55 = max_f32_s(t54, max_53);
                s_top[row_35] = t55; // attention.py:63
                const int32_t t56 = t55 == -INFINITY;
                const float t57 = t56 ? 0x0.0p+0f : s_top[row_35];
                const float t58 = t54 - t57;
                const float t59 = t58 * 0x1.7154760000000p+0f;
                const float t60 = exp2_f32_s(t59);
                s_rescale[row_35] = t60; // attention.py:65
                const float t61 = s_total[row_35];
                const float t62 = t61 * t60;
                s_total[row_35] = t62; // attention.py:66
                f32v acc63 = splat_f32(0.0f);
                f32v acc64 = splat_f32(0.0f);
                f32v acc65 = splat_f32(0.0f);
                f32v acc66 = splat_f32(0.0f);
                int64_t j67 = 0;
                for (; j67 + 32 <= t32; j67 += 32) {
                    const f32v v71 = load_f32(s_s + t42 + j67);
                    const f32v v72 = splat_f32(t57);
                    const f32v v73 = v71 - v72;
                    const f32v v74 = v73 * splat_f32(0x1.7154760000000p+0f);
                    const f32v v75 = exp2_f32(v74);
                    const f32v v76 = v75;
                    store_f32(s_s + t42 + j67, v76); // attention.py:68
                    acc63 = acc63 + v76; // attention.py:69
                    const int64_t j68 = j67 + 8;
                    const f32v v77 = load_f32(s_s + t42 + j68);
                    const f32v v78 = splat_f32(t57);
                    const f32v v79 = v77 - v78;
                    const f32v v80 = v79 * splat_f32(0x1.7154760000000p+0f);
                    const f32v v81 = exp2_f32(v80);
                    const f32v v82 = v81;
                    store_f32(s_s + t42 + j68, v82); // attention.py:68
                    acc64 = acc64 + v82; // attention.py:69
                    const int64_t j69 = j67 + 16;
                    const f32v v83 = load_f32(s_s + t42 + j69);
                    const f32v v84 = splat_f32(t57);
                    const f32v v85 = v83 - v84;
                    const f32v v86 = v85 * splat_f32(0x1.7154760000000p+0f);
                    const f32v v87 = exp2_f32(v86);
                    const f32v v88 = v87;
                    store_f32(s_s + t42 + j69, v88); // attention.py:68
                    acc65 = acc65 + v88; // attention.py:69
                    const int64_t j70 = j67 + 24;
                    const f32v v89 = load_f32(s_s + t42 + j70);
                    const f32v v90 = splat_f32(t57);
                    const f32v v91 = v89 - v90;
                    const f32v v92 = v91 * splat_f32(0x1.7154760000000p+0f);
                    const f32v v93 = exp2_f32(v92);
                    const f32v v94 = v93;
                    store_f32(s_s + t42 + j70, v94); // attention.py:68
                    acc66 = acc66 + v94; // attention.py:69
                }
                for (; j67 + 8 <= t32; j67 += 8) {
                    const f32v v95 = load_f32(s_s + t42 + j67);
                    const f32v v96 = splat_f32(t57);
                    const f32v v97 = v95 - v96;
                    const f32v v98 = v97 * splat_f32(0x1.7154760000000p+0f);
                    const f32v v99 = exp2_f32(v98);
                    const f32v v100 = v99;
                    store_f32(s_s + t42 + j67, v100); // attention.py:68
                    acc63 = acc63 + v100; // attention.py:69
                }
                if (j67 < t32) {
                    const i32v m101 = lanes_below(t32 - j67);
                    const f32v v102 = load_f32(s_s + t42 + j67);
                    const f32v v103 = splat_f32(t57);
                    const f32v v104 = v102 - v103;
                    const f32v v105 = v104 * splat_f32(0x1.7154760000000p+0f);
                    const f32v v106 = exp2_f32(v105);
                    const f32v v107 = v106;
                    store_masked_f32(s_s + t42 + j67, m101, v107); // attention.py:68
                    acc63 = acc63 + select_f32(m101, v107, splat_f32(0.0f)); // attention.py:69
                }
                const float sum_108 = sum_lanes(acc63 + acc64 + acc65 + acc66); // attention.py:69
                const float t109 = t62 + sum_108;
                s_total[row_35] = t109; // attention.py:69
                int64_t j110 = 0;
                const int64_t t111 = row_35 * 64;
                for (; j110 < 64; j110 += 8) {
                    const f32v v112 = load_f32(s_o + t111 + j110);
                    const f32v v113 = splat_f32(t60);
                    const f32v v114 = v112 * v113;
                    store_f32(s_o + t111 + j110, v114); // attention.py:50
                }
            }
            for (int64_t panel_115 = 0; panel_115 < 4; panel_115 += 1) {
                const int64_t t117 = panel_115 * -16;
                const int64_t t118 = t117 + 64;
                const int64_t t119 = min_i64(16, t118);
                const int64_t t125 = panel_115 * 16;
                const int64_t t130 = panel_115 * 512;
                for (int64_t depth_116 = 0; depth_116 < t32; depth_116 += 1) {
                    int64_t j120 = 0;
                    const int64_t t121 = depth_116 * 384;
                    const int64_t t122 = t24 + t121;
                    const int64_t t123 = t122 + t25;
                    const int64_t t124 = t123 + t27;
                    const int64_t t126 = t124 + t125;
                    const int64_t t127 = t126 + 256;
                    const int64_t t129 = depth_116 * 16;
                    const int64_t t131 = t129 + t130;
                    for (; j120 + 8 <= t119; j120 += 8) {
                        const f32v v128 = load_f32(input0 + t127 + j120);
                        store_f32(s_v + t131 + j120, v128); // attention.py:51
                    }
                    if (j120 < t119) {
                        const i32v m132 = lanes_below(t119 - j120);
                        const f32v v133 = load_masked_f32(input0 + t127 + j120, m132);
                        store_masked_f32(s_v + t131 + j120, m132, v133); // attention.py:51
                    }
                }
            }
            product(s_s + 0, 32, 1, s_v + 0, 512, s_o + 0, 64, t8, 64, t32, 0); // attention.py:54
        }
        const int64_t t144 = t23 * 128;
        const int64_t t145 = t144 + t25;
        const int64_t t146 = m_3 * 3072;
        const int64_t t147 = t145 + t146;
        for (int64_t row_134 = 0; row_134 < t8; row_134 += 1) {
            int64_t j135 = 0;
            const int64_t t138 = row_134 * 64;
            const int64_t t148 = row_134 * 128;
            const int64_t t149 = t147 + t148;
            for (; j135 + 8 <= 64; j135 += 8) {
                const f32v v139 = load_f32(s_o + t138 + j135);
                const float t140 = s_total[row_134];
                const f32v v141 = splat_f32(t140);
                const f32v v142 = v139 / v141;
                const f32v v143 = select_f32(v137, splat_f32(0x0.0p+0f), v142);
                store_f32(output0 + t149 + j135, v143); // attention.py:57
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
    return (size_t)(INT64_C(25984));
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
const tile_kernel tile_kernel_FusedGolden_6fda6881db59_x86_64_v3 = {
    "FusedGolden_6fda6881db59", 1, 1, input_types, tile_outputs,
    bind, shape, tasks, scratch_size, work, run,
};
