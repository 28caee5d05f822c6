/* FusedGolden_f55154910fdb: attention for x86-64-v3 */
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
    const int32_t t170 = n1 == 0;
    const i32v v171 = splat_bool(t170);
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
                const f32v v26 = v25 * splat_f32(0x1.7154760000000p-3f);
                store_f32(s_q + t27 + j16, v26); // attention.py:36
            }
        }
        for (int64_t block_28 = 0; block_28 < t14; block_28 += 16) {
            const int64_t t29 = block_28 + 16;
            const int64_t t30 = min_i64(t29, t14);
            for (int64_t row_31 = block_28; row_31 < t30; row_31 += 1) {
                int64_t j32 = 0;
                const int64_t t33 = row_31 * 64;
                for (; j32 < 64; j32 += 8) {
                    store_f32(s_o + t33 + j32, splat_f32(0x0.0p+0f)); // attention.py:37
                }
            }
            const int64_t t34 = block_28 * -1;
            const int64_t t35 = t30 + t34;
            int64_t j36 = 0;
            for (; j36 < t35; j36 += 8) {
                const f32v v37 = splat_f32(-INFINITY);
                store_f32(s_top + block_28 + j36, v37); // attention.py:39
                const int32_t t38 = -INFINITY == -INFINITY;
                const float t39 = t38 ? 0x0.0p+0f : -INFINITY;
                const float t40 = -INFINITY - t39;
                const float t41 = exp2_f32_s(t40);
                const f32v v42 = splat_f32(t41);
                store_f32(s_total + block_28 + j36, v42); // attention.py:40
            }
        }
        const int64_t t43 = t13 + -24;
        const int64_t t44 = min_i64(24, t43);
        for (int64_t q_0_45 = 0; q_0_45 < t44; q_0_45 += 1) {
            const int64_t t49 = q_0_45 * 384;
            for (int64_t line_46 = 0; line_46 < 64; line_46 += 16) {
                const int64_t t47 = t20 + line_46;
                const int64_t t48 = t47 + t21;
                const int64_t t50 = t48 + t49;
                const int64_t t51 = t50 + 9216;
                __builtin_prefetch(input0 + t51, 0);
            }
        }
        const int64_t t54 = t17 * 128;
        const int64_t t55 = t54 + t19;
        const int64_t t57 = m_9 * 3072;
        for (int64_t row_52 = 0; row_52 < t14; row_52 += 1) {
            const int64_t t59 = row_52 * 128;
            for (int64_t line_53 = 0; line_53 < 64; line_53 += 16) {
                const int64_t t56 = t55 + line_53;
                const int64_t t58 = t56 + t57;
                const int64_t t60 = t58 + t59;
                __builtin_prefetch(output0 + t60, 1);
            }
        }
        const int64_t t61 = m_9 * 24;
        const int64_t t62 = t61 + 24;
        const int64_t t63 = min_i64(n1, t62);
        const int64_t t64 = t63 + 31;
        const int64_t t65 = (t64 >> 5);
        for (int64_t n_66 = 0; n_66 < t65; n_66 += 1) {
            const int64_t t67 = n_66 * 12288;
            const int64_t t68 = t20 + t67;
            const int64_t t69 = t68 + 128;
            const int64_t t70 = n_66 * 2048;
            const int64_t t71 = n_66 * -32;
            const int64_t t72 = n1 + t71;
            const int64_t t73 = min_i64(32, t72);
            if (!once_k[n_66]) {
                once_k[n_66] = 1;
                pack_transposed_f32(input0 + t69, 384, s_k + t70, 1024, t73, 64); // attention.py:43
            }
            const int64_t t74 = t61 + t71;
            const int64_t t75 = t74 + 24;
            const int64_t t76 = min_i64(t73, t75);
            tile_product_x86_64_v3(s_q + 0, 64, 1, s_k + t70, 1024, s_s + 0, 32, t14, t76, 64, 1, 0, t14); // attention.py:44
            for (int64_t block_77 = 0; block_77 < t14; block_77 += 16) {
                const int64_t t78 = block_77 + 16;
                const int64_t t79 = min_i64(t78, t14);
                for (int64_t row_80 = block_77; row_80 < t79; row_80 += 1) {
                    f32v acc81 = splat_f32(-INFINITY);
                    f32v acc82 = splat_f32(-INFINITY);
                    f32v acc83 = splat_f32(-INFINITY);
                    f32v acc84 = splat_f32(-INFINITY);
                    int64_t j85 = 0;
                    const int64_t t86 = t74 + row_80;
                    const int64_t t87 = t86 + 1;
                    const int64_t t88 = min_i64(t76, t87);
                    const int64_t t92 = row_80 * 32;
                    for (; j85 + 32 <= t88; j85 += 32) {
                        const f32v v93 = load_f32(s_s + t92 + j85);
                        const f32v v94 = v93;
                        acc81 = fmax_f32(acc81, v94); // online_softmax.py:18
                        const int64_t j89 = j85 + 8;
                        const f32v v95 = load_f32(s_s + t92 + j89);
                        const f32v v96 = v95;
                        acc82 = fmax_f32(acc82, v96); // online_softmax.py:18
                        const int64_t j90 = j85 + 16;
                        const f32v v97 = load_f32(s_s + t92 + j90);
                        const f32v v98 = v97;
                        acc83 = fmax_f32(acc83, v98); // online_softmax.py:18
                        const int64_t j91 = j85 + 24;
                        const f32v v99 = load_f32(s_s + t92 + j91);
                        const f32v v100 = v99;
                        acc84 = fmax_f32(acc84, v100); // online_softmax.py:18
                    }
                    for (; j85 + 8 <= t88; j85 += 8) {
                        const f32v v101 = load_f32(s_s + t92 + j85);
                        const f32v v102 = v101;
                        acc81 = fmax_f32(acc81, v102); // online_softmax.py:18
                    }
                    for (; j85 + 8 <= t76; j85 += 8) {
                        const i32v v103 = lanes_below(t87 - j85);
                        const f32v v104 = select_f32(v103, load_masked_f32(s_s + t92 + j85, v103), splat_f32(-INFINITY));
                        const f32v v105 = v104;
                        store_f32(s_s + t92 + j85, v105); // attention.py:49
                        acc81 = fmax_f32(acc81, v105); // online_softmax.py:18
                    }
                    if (j85 < t76) {
                        const i32v m106 = lanes_below(t76 - j85);
                        const i32v v107 = lanes_below(t87 - j85);
                        const f32v v108 = select_f32(v107, load_masked_f32(s_s + t92 + j85, v107), splat_f32(-INFINITY));
                        const f32v v109 = v108;
                        store_masked_f32(s_s + t92 + j85, m106, v109); // attention.py:49
                        acc81 = fmax_f32(acc81, select_f32(m106, v109, splat_f32(-INFINITY))); // online_softmax.py:18
                    }
                    const float fmax_110 = fmax_lanes(fmax_f32(fmax_f32(fmax_f32(acc81, acc82), acc83), acc84)); // online_softmax.py:18
                    const float t111 = s_top[row_80];
                    s_rescale[row_80] = t111; // online_softmax.py:17
                    const float t112 = max_f32_s(t111, fmax_110);
                    s_top[row_80] = t112; // online_softmax.py:18
                }
                const int64_t t113 = block_77 * -1;
                const int64_t t114 = t79 + t113;
                int64_t j115 = 0;
                for (; j115 < t114; j115 += 8) {
                    const f32v v116 = load_f32(s_rescale + block_77 + j115);
                    const f32v v117 = load_f32(s_top + block_77 + j115);
                    const i32v v118 = (v117 == splat_f32(-INFINITY));
                    const f32v v119 = select_f32(v118, splat_f32(0x0.0p+0f), v117);
                    const f32v v120 = v116 - v119;
                    const f32v v121 = exp2_f32(v120);
                    const f32v v122 = v121;
                    store_f32(s_rescale + block_77 + j115, v122); // online_softmax.py:20
                    const f32v v123 = load_f32(s_total + block_77 + j115);
                    const f32v v124 = v123 * v122;
                    store_f32(s_total + block_77 + j115, v124); // online_softmax.py:21
                }
                for (int64_t row_125 = block_77; row_125 < t79; row_125 += 1) {
                    const float t126 = s_top[row_125];
                    f32v acc127 = splat_f32(0.0f);
                    int64_t j128 = 0;
                    const int64_t t129 = row_125 * 32;
                    const int32_t t131 = t126 == -INFINITY;
                    const float t132 = t131 ? 0x0.0p+0f : t126;
                    const f32v v133 = splat_f32(t132);
                    for (; j128 + 8 <= t76; j128 += 8) {
                        const f32v v130 = load_f32(s_s + t129 + j128);
                        const f32v v134 = v130 - v133;
                        const f32v v135 = exp2_f32(v134);
                        const f32v v136 = v135;
                        store_f32(s_s + t129 + j128, v136); // attention.py:54
                        acc127 = acc127 + v136; // attention.py:55
                    }
                    if (j128 < t76) {
                        const i32v m137 = lanes_below(t76 - j128);
                        const f32v v138 = load_f32(s_s + t129 + j128);
                        const f32v v139 = v138 - v133;
                        const f32v v140 = exp2_f32(v139);
                        const f32v v141 = v140;
                        store_masked_f32(s_s + t129 + j128, m137, v141); // attention.py:54
                        acc127 = acc127 + select_f32(m137, v141, splat_f32(0.0f)); // attention.py:55
                    }
                    const float sum_142 = sum_lanes(acc127); // attention.py:55
                    const float t143 = s_total[row_125];
                    const float t144 = t143 + sum_142;
                    s_total[row_125] = t144; // attention.py:55
                    const float t145 = s_rescale[row_125];
                    int64_t j146 = 0;
                    const int64_t t147 = row_125 * 64;
                    const f32v v149 = splat_f32(t145);
                    for (; j146 < 64; j146 += 8) {
                        const f32v v148 = load_f32(s_o + t147 + j146);
                        const f32v v150 = v148 * v149;
                        store_f32(s_o + t147 + j146, v150); // attention.py:61
                    }
                }
            }
            if (!once_v[n_66]) {
                once_v[n_66] = 1;
                for (int64_t depth_151 = 0; depth_151 < t73; depth_151 += 1) {
                    const int64_t t153 = depth_151 * 384;
                    const int64_t t154 = t18 + t153;
                    const int64_t t155 = t154 + t19;
                    const int64_t t156 = t155 + t67;
                    const int64_t t163 = depth_151 * 16;
                    const int64_t t164 = t163 + t70;
                    for (int64_t panel_152 = 0; panel_152 < 4; panel_152 += 1) {
                        const int64_t t157 = panel_152 * 16;
                        const int64_t t158 = t156 + t157;
                        const int64_t t159 = t158 + 6400;
                        __builtin_prefetch(input0 + t159, 0);
                        int64_t j160 = 0;
                        const int64_t t161 = t158 + 256;
                        const int64_t t165 = panel_152 * 512;
                        const int64_t t166 = t164 + t165;
                        for (; j160 + 8 <= 16; j160 += 8) {
                            const f32v v162 = load_f32(input0 + t161 + j160);
                            store_f32(s_v + t166 + j160, v162); // attention.py:62
                        }
                    }
                }
            }
            tile_product_x86_64_v3(s_s + 0, 32, 1, s_v + t70, 512, s_o + 0, 64, t14, 64, t76, 0, 0, t14); // attention.py:63
        }
        const int64_t t186 = t55 + t57;
        for (int64_t row_167 = 0; row_167 < t14; row_167 += 1) {
            const float t168 = s_total[row_167];
            int64_t j169 = 0;
            const int64_t t172 = row_167 * 64;
            const float t174 = fabsf(t168);
            const int32_t t175 = t174 < 0x1.0000000000000p-126f;
            const int32_t t176 = t174 > 0x1.0000000000000p+126f;
            const float t177 = t176 ? 0x1.0000000000000p-64f : 0x1.0000000000000p+0f;
            const float t178 = t175 ? 0x1.0000000000000p+64f : t177;
            const f32v v179 = splat_f32(t178);
            const float t181 = t168 * t178;
            const float t182 = 0x1.0000000000000p+0f / t181;
            const f32v v183 = splat_f32(t182);
            const int64_t t187 = row_167 * 128;
            const int64_t t188 = t186 + t187;
            for (; j169 + 8 <= 64; j169 += 8) {
                const f32v v173 = load_f32(s_o + t172 + j169);
                const f32v v180 = v173 * v179;
                const f32v v184 = v180 * v183;
                const f32v v185 = select_f32(v171, splat_f32(0x0.0p+0f), v184);
                store_f32(output0 + t188 + j169, v185); // attention.py:73
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
const tile_kernel tile_kernel_FusedGolden_f55154910fdb_x86_64_v3 = {
    "FusedGolden_f55154910fdb", 1, 1, input_types, tile_outputs,
    bind, shape, tasks, group, scratch_size, work, run, NULL,
};
