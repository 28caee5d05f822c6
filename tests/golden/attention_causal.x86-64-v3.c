/* FusedGolden_b82d8d801888: attention for x86-64-v3 */
#include "tile_kernel.h"
#include "tile_cpu.h"
#include "tile_host.h"
void tile_product_x86_64_v3(const float* restrict a, int64_t lda, int64_t step, const float* restrict b, int64_t panel,
    float* restrict c, int64_t ldc, int64_t rows, int64_t columns, int64_t depth, int clear);
static void run(const int64_t* symbols, const void* const* inputs, void* const* outputs,
                void* scratch, int64_t* copied, int64_t begin, int64_t end) {
    (void)symbols;
    (void)inputs;
    (void)outputs;
    (void)scratch;
    (void)copied;
    const int64_t n1 = symbols[1];
    const float* restrict input0 = (const float*)inputs[0];
    float* restrict output0 = (float*)outputs[0];
    char* at = (char*)scratch;
    float* restrict s_q = (float*)at;
    at += (6144);
    float* restrict s_k = (float*)at;
    const int64_t t1 = n1 + 31;
    const int64_t t2 = (t1 >> 5);
    const int64_t t3 = t2 * 8192;
    at += (t3);
    float* restrict s_v = (float*)at;
    at += (t3);
    float* restrict s_s = (float*)at;
    at += (3072);
    float* restrict s_o = (float*)at;
    at += (6144);
    float* restrict s_total = (float*)at;
    at += (128);
    float* restrict s_top = (float*)at;
    at += (128);
    float* restrict s_rescale = (float*)at;
    at += (128);
    uint8_t* once_k = (uint8_t*)at;
    const int64_t t4 = t2 + 63;
    const int64_t t5 = (t4 >> 6);
    const int64_t t6 = t5 * 64;
    at += (t6);
    uint8_t* once_v = (uint8_t*)at;
    at += (t6);
    const int64_t t7 = n1 + 23;
    const int64_t t8 = floordiv_i64(t7, 24);
    const int32_t t150 = n1 == 0;
    const i32v v151 = splat_bool(t150);
    for (int64_t task = begin; task < end; task++) {
        const int64_t m_9 = task % t8;
        const int64_t h_10 = task / t8 % 2;
        const int64_t b_11 = task / t8 / 2;
        if (task / t8 != *copied) {
            *copied = task / t8;
            memset(once_k, 0, (size_t)(t2));
            memset(once_v, 0, (size_t)(t2));
        }
        const int64_t t12 = m_9 * -24;
        const int64_t t13 = n1 + t12;
        const int64_t t14 = min_i64(24, t13);
        const int64_t t17 = n1 * b_11;
        const int64_t t18 = t17 * 384;
        const int64_t t19 = h_10 * 64;
        const int64_t t20 = t18 + t19;
        const int64_t t21 = m_9 * 9216;
        const int64_t t22 = t20 + t21;
        for (int64_t q_0_15 = 0; q_0_15 < t14; q_0_15 += 1) {
            int64_t j16 = 0;
            const int64_t t23 = q_0_15 * 384;
            const int64_t t24 = t22 + t23;
            const int64_t t27 = q_0_15 * 64;
            for (; j16 + 8 <= 64; j16 += 8) {
                const f32v v25 = load_f32(input0 + t24 + j16);
                const f32v v26 = v25 * splat_f32(0x1.0000000000000p-3f);
                store_f32(s_q + t27 + j16, v26); // attention.py:36
            }
        }
        for (int64_t row_28 = 0; row_28 < t14; row_28 += 1) {
            int64_t j29 = 0;
            const int64_t t30 = row_28 * 64;
            for (; j29 < 64; j29 += 8) {
                store_f32(s_o + t30 + j29, splat_f32(0x0.0p+0f)); // attention.py:37
            }
            s_top[row_28] = -INFINITY; // attention.py:39
            const int32_t t31 = -INFINITY == -INFINITY;
            const float t32 = t31 ? 0x0.0p+0f : s_top[row_28];
            const float t33 = -INFINITY - t32;
            const float t34 = t33 * 0x1.7154760000000p+0f;
            const float t35 = exp2_f32_s(t34);
            s_total[row_28] = t35; // attention.py:40
        }
        const int64_t t36 = t13 + -24;
        const int64_t t37 = min_i64(24, t36);
        for (int64_t q_0_38 = 0; q_0_38 < t37; q_0_38 += 1) {
            const int64_t t42 = q_0_38 * 384;
            for (int64_t line_39 = 0; line_39 < 64; line_39 += 16) {
                const int64_t t40 = t20 + line_39;
                const int64_t t41 = t40 + t21;
                const int64_t t43 = t41 + t42;
                const int64_t t44 = t43 + 9216;
                __builtin_prefetch(input0 + t44, 0);
            }
        }
        const int64_t t47 = t17 * 128;
        const int64_t t48 = t47 + t19;
        const int64_t t50 = m_9 * 3072;
        for (int64_t row_45 = 0; row_45 < t14; row_45 += 1) {
            const int64_t t52 = row_45 * 128;
            for (int64_t line_46 = 0; line_46 < 64; line_46 += 16) {
                const int64_t t49 = t48 + line_46;
                const int64_t t51 = t49 + t50;
                const int64_t t53 = t51 + t52;
                __builtin_prefetch(output0 + t53, 1);
            }
        }
        const int64_t t54 = m_9 * 24;
        const int64_t t55 = t54 + 24;
        const int64_t t56 = min_i64(n1, t55);
        const int64_t t57 = t56 + 31;
        const int64_t t58 = (t57 >> 5);
        for (int64_t n_59 = 0; n_59 < t58; n_59 += 1) {
            const int64_t t60 = n_59 * 12288;
            const int64_t t61 = t20 + t60;
            const int64_t t62 = t61 + 128;
            const int64_t t63 = n_59 * 2048;
            const int64_t t64 = n_59 * -32;
            const int64_t t65 = n1 + t64;
            const int64_t t66 = min_i64(32, t65);
            if (!once_k[n_59]) {
                once_k[n_59] = 1;
                pack_transposed_f32(input0 + t62, 384, s_k + t63, 1024, t66, 64); // attention.py:43
            }
            const int64_t t67 = t54 + t64;
            const int64_t t68 = t67 + 24;
            const int64_t t69 = min_i64(t66, t68);
            tile_product_x86_64_v3(s_q + 0, 64, 1, s_k + t63, 1024, s_s + 0, 32, t14, t69, 64, 1); // attention.py:44
            for (int64_t row_70 = 0; row_70 < t14; row_70 += 1) {
                f32v acc71 = splat_f32(-INFINITY);
                f32v acc72 = splat_f32(-INFINITY);
                f32v acc73 = splat_f32(-INFINITY);
                f32v acc74 = splat_f32(-INFINITY);
                int64_t j75 = 0;
                const int64_t t76 = t67 + row_70;
                const int64_t t77 = t76 + 1;
                const int64_t t78 = min_i64(t69, t77);
                const int64_t t82 = row_70 * 32;
                for (; j75 + 32 <= t78; j75 += 32) {
                    const f32v v83 = load_f32(s_s + t82 + j75);
                    const f32v v84 = v83;
                    acc71 = fmax_f32(acc71, v84); // attention.py:51
                    const int64_t j79 = j75 + 8;
                    const f32v v85 = load_f32(s_s + t82 + j79);
                    const f32v v86 = v85;
                    acc72 = fmax_f32(acc72, v86); // attention.py:51
                    const int64_t j80 = j75 + 16;
                    const f32v v87 = load_f32(s_s + t82 + j80);
                    const f32v v88 = v87;
                    acc73 = fmax_f32(acc73, v88); // attention.py:51
                    const int64_t j81 = j75 + 24;
                    const f32v v89 = load_f32(s_s + t82 + j81);
                    const f32v v90 = v89;
                    acc74 = fmax_f32(acc74, v90); // attention.py:51
                }
                for (; j75 + 8 <= t78; j75 += 8) {
                    const f32v v91 = load_f32(s_s + t82 + j75);
                    const f32v v92 = v91;
                    acc71 = fmax_f32(acc71, v92); // attention.py:51
                }
                for (; j75 + 8 <= t69; j75 += 8) {
                    const i32v v93 = lanes_below(t77 - j75);
                    const f32v v94 = select_f32(v93, load_masked_f32(s_s + t82 + j75, v93), splat_f32(-INFINITY));
                    const f32v v95 = v94;
                    store_f32(s_s + t82 + j75, v95); // attention.py:49
                    acc71 = fmax_f32(acc71, v95); // attention.py:51
                }
                if (j75 < t69) {
                    const i32v m96 = lanes_below(t69 - j75);
                    const i32v v97 = lanes_below(t77 - j75);
                    const f32v v98 = select_f32(v97, load_masked_f32(s_s + t82 + j75, v97), splat_f32(-INFINITY));
                    const f32v v99 = v98;
                    store_masked_f32(s_s + t82 + j75, m96, v99); // attention.py:49
                    acc71 = fmax_f32(acc71, select_f32(m96, v99, splat_f32(-INFINITY))); // attention.py:51
                }
                const float fmax_100 = fmax_lanes(fmax_f32(fmax_f32(fmax_f32(acc71, acc72), acc73), acc74)); // attention.py:51
                const float t101 = s_top[row_70];
                s_rescale[row_70] = t101; // online_softmax.py:17
                const float t102 = max_f32_s(t101, fmax_100);
                s_top[row_70] = t102; // attention.py:51
                const int32_t t103 = t102 == -INFINITY;
                const float t104 = t103 ? 0x0.0p+0f : s_top[row_70];
                const float t105 = t101 - t104;
                const float t106 = t105 * 0x1.7154760000000p+0f;
                const float t107 = exp2_f32_s(t106);
                s_rescale[row_70] = t107; // online_softmax.py:20
                const float t108 = s_total[row_70];
                const float t109 = t108 * t107;
                s_total[row_70] = t109; // online_softmax.py:21
                f32v acc110 = splat_f32(0.0f);
                int64_t j111 = 0;
                for (; j111 + 8 <= t69; j111 += 8) {
                    const f32v v112 = load_f32(s_s + t82 + j111);
                    const f32v v113 = splat_f32(t104);
                    const f32v v114 = v112 - v113;
                    const f32v v115 = v114 * splat_f32(0x1.7154760000000p+0f);
                    const f32v v116 = exp2_f32(v115);
                    const f32v v117 = v116;
                    store_f32(s_s + t82 + j111, v117); // attention.py:53
                    acc110 = acc110 + v117; // attention.py:54
                }
                if (j111 < t69) {
                    const i32v m118 = lanes_below(t69 - j111);
                    const f32v v119 = load_f32(s_s + t82 + j111);
                    const f32v v120 = splat_f32(t104);
                    const f32v v121 = v119 - v120;
                    const f32v v122 = v121 * splat_f32(0x1.7154760000000p+0f);
                    const f32v v123 = exp2_f32(v122);
                    const f32v v124 = v123;
                    store_masked_f32(s_s + t82 + j111, m118, v124); // attention.py:53
                    acc110 = acc110 + select_f32(m118, v124, splat_f32(0.0f)); // attention.py:54
                }
                const float sum_125 = sum_lanes(acc110); // attention.py:54
                const float t126 = t109 + sum_125;
                s_total[row_70] = t126; // attention.py:54
                int64_t j127 = 0;
                const int64_t t128 = row_70 * 64;
                for (; j127 < 64; j127 += 8) {
                    const f32v v129 = load_f32(s_o + t128 + j127);
                    const f32v v130 = splat_f32(t107);
                    const f32v v131 = v129 * v130;
                    store_f32(s_o + t128 + j127, v131); // attention.py:60
                }
            }
            if (!once_v[n_59]) {
                once_v[n_59] = 1;
                for (int64_t panel_132 = 0; panel_132 < 4; panel_132 += 1) {
                    const int64_t t138 = panel_132 * 16;
                    const int64_t t146 = panel_132 * 512;
                    for (int64_t depth_133 = 0; depth_133 < t66; depth_133 += 1) {
                        const int64_t t134 = depth_133 * 384;
                        const int64_t t135 = t18 + t134;
                        const int64_t t136 = t135 + t19;
                        const int64_t t137 = t136 + t60;
                        const int64_t t139 = t137 + t138;
                        const int64_t t140 = t139 + 6400;
                        __builtin_prefetch(input0 + t140, 0);
                        int64_t j141 = 0;
                        const int64_t t142 = t139 + 256;
                        const int64_t t144 = depth_133 * 16;
                        const int64_t t145 = t144 + t63;
                        const int64_t t147 = t145 + t146;
                        for (; j141 + 8 <= 16; j141 += 8) {
                            const f32v v143 = load_f32(input0 + t142 + j141);
                            store_f32(s_v + t147 + j141, v143); // attention.py:61
                        }
                    }
                }
            }
            tile_product_x86_64_v3(s_s + 0, 32, 1, s_v + t63, 512, s_o + 0, 64, t14, 64, t69, 0); // attention.py:62
        }
        const int64_t t167 = t48 + t50;
        for (int64_t row_148 = 0; row_148 < t14; row_148 += 1) {
            int64_t j149 = 0;
            const int64_t t152 = row_148 * 64;
            const int64_t t168 = row_148 * 128;
            const int64_t t169 = t167 + t168;
            for (; j149 + 8 <= 64; j149 += 8) {
                const f32v v153 = load_f32(s_o + t152 + j149);
                const float t154 = s_total[row_148];
                const float t155 = fabsf(t154);
                const int32_t t156 = t155 < 0x1.0000000000000p-126f;
                const int32_t t157 = t155 > 0x1.0000000000000p+126f;
                const float t158 = t157 ? 0x1.0000000000000p-64f : 0x1.0000000000000p+0f;
                const float t159 = t156 ? 0x1.0000000000000p+64f : t158;
                const f32v v160 = splat_f32(t159);
                const f32v v161 = v153 * v160;
                const float t162 = t154 * t159;
                const float t163 = 0x1.0000000000000p+0f / t162;
                const f32v v164 = splat_f32(t163);
                const f32v v165 = v161 * v164;
                const f32v v166 = select_f32(v151, splat_f32(0x0.0p+0f), v165);
                store_f32(output0 + t169 + j149, v166); // attention.py:72
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
static int64_t group(const int64_t* symbols) {
    (void)symbols;
    const int64_t n0 = symbols[0]; (void)n0;
    const int64_t n1 = symbols[1]; (void)n1;
    return (int64_t)(floordiv_i64((n1 + INT64_C(23)), INT64_C(24)));
}
static size_t scratch_size(const int64_t* symbols) {
    (void)symbols;
    const int64_t n0 = symbols[0]; (void)n0;
    const int64_t n1 = symbols[1]; (void)n1;
    return (size_t)((((floordiv_i64((floordiv_i64((n1 + INT64_C(31)), INT64_C(32)) + INT64_C(63)), INT64_C(64)) * INT64_C(128)) + (floordiv_i64((n1 + INT64_C(31)), INT64_C(32)) * INT64_C(16384))) + INT64_C(15744)));
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
const tile_kernel tile_kernel_FusedGolden_b82d8d801888_x86_64_v3 = {
    "FusedGolden_b82d8d801888", 1, 1, input_types, tile_outputs,
    bind, shape, tasks, group, scratch_size, work, run, NULL,
};
