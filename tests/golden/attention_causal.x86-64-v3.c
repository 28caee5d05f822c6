/* FusedGolden_4ba365a148e6: attention for x86-64-v3 */
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
    const int32_t t174 = n1 == 0;
    const i32v v175 = splat_bool(t174);
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
                const float t41 = t40 * 0x1.7154760000000p+0f;
                const float t42 = exp2_f32_s(t41);
                const f32v v43 = splat_f32(t42);
                store_f32(s_total + block_28 + j36, v43); // attention.py:40
            }
        }
        const int64_t t44 = t13 + -24;
        const int64_t t45 = min_i64(24, t44);
        for (int64_t q_0_46 = 0; q_0_46 < t45; q_0_46 += 1) {
            const int64_t t50 = q_0_46 * 384;
            for (int64_t line_47 = 0; line_47 < 64; line_47 += 16) {
                const int64_t t48 = t20 + line_47;
                const int64_t t49 = t48 + t21;
                const int64_t t51 = t49 + t50;
                const int64_t t52 = t51 + 9216;
                __builtin_prefetch(input0 + t52, 0);
            }
        }
        const int64_t t55 = t17 * 128;
        const int64_t t56 = t55 + t19;
        const int64_t t58 = m_9 * 3072;
        for (int64_t row_53 = 0; row_53 < t14; row_53 += 1) {
            const int64_t t60 = row_53 * 128;
            for (int64_t line_54 = 0; line_54 < 64; line_54 += 16) {
                const int64_t t57 = t56 + line_54;
                const int64_t t59 = t57 + t58;
                const int64_t t61 = t59 + t60;
                __builtin_prefetch(output0 + t61, 1);
            }
        }
        const int64_t t62 = m_9 * 24;
        const int64_t t63 = t62 + 24;
        const int64_t t64 = min_i64(n1, t63);
        const int64_t t65 = t64 + 31;
        const int64_t t66 = (t65 >> 5);
        for (int64_t n_67 = 0; n_67 < t66; n_67 += 1) {
            const int64_t t68 = n_67 * 12288;
            const int64_t t69 = t20 + t68;
            const int64_t t70 = t69 + 128;
            const int64_t t71 = n_67 * 2048;
            const int64_t t72 = n_67 * -32;
            const int64_t t73 = n1 + t72;
            const int64_t t74 = min_i64(32, t73);
            if (!once_k[n_67]) {
                once_k[n_67] = 1;
                pack_transposed_f32(input0 + t70, 384, s_k + t71, 1024, t74, 64); // attention.py:43
            }
            const int64_t t75 = t62 + t72;
            const int64_t t76 = t75 + 24;
            const int64_t t77 = min_i64(t74, t76);
            tile_product_x86_64_v3(s_q + 0, 64, 1, s_k + t71, 1024, s_s + 0, 32, t14, t77, 64, 1, 0, t14); // attention.py:44
            for (int64_t block_78 = 0; block_78 < t14; block_78 += 16) {
                const int64_t t79 = block_78 + 16;
                const int64_t t80 = min_i64(t79, t14);
                for (int64_t row_81 = block_78; row_81 < t80; row_81 += 1) {
                    f32v acc82 = splat_f32(-INFINITY);
                    f32v acc83 = splat_f32(-INFINITY);
                    f32v acc84 = splat_f32(-INFINITY);
                    f32v acc85 = splat_f32(-INFINITY);
                    int64_t j86 = 0;
                    const int64_t t87 = t75 + row_81;
                    const int64_t t88 = t87 + 1;
                    const int64_t t89 = min_i64(t77, t88);
                    const int64_t t93 = row_81 * 32;
                    for (; j86 + 32 <= t89; j86 += 32) {
                        const f32v v94 = load_f32(s_s + t93 + j86);
                        const f32v v95 = v94;
                        acc82 = fmax_f32(acc82, v95); // attention.py:51
                        const int64_t j90 = j86 + 8;
                        const f32v v96 = load_f32(s_s + t93 + j90);
                        const f32v v97 = v96;
                        acc83 = fmax_f32(acc83, v97); // attention.py:51
                        const int64_t j91 = j86 + 16;
                        const f32v v98 = load_f32(s_s + t93 + j91);
                        const f32v v99 = v98;
                        acc84 = fmax_f32(acc84, v99); // attention.py:51
                        const int64_t j92 = j86 + 24;
                        const f32v v100 = load_f32(s_s + t93 + j92);
                        const f32v v101 = v100;
                        acc85 = fmax_f32(acc85, v101); // attention.py:51
                    }
                    for (; j86 + 8 <= t89; j86 += 8) {
                        const f32v v102 = load_f32(s_s + t93 + j86);
                        const f32v v103 = v102;
                        acc82 = fmax_f32(acc82, v103); // attention.py:51
                    }
                    for (; j86 + 8 <= t77; j86 += 8) {
                        const i32v v104 = lanes_below(t88 - j86);
                        const f32v v105 = select_f32(v104, load_masked_f32(s_s + t93 + j86, v104), splat_f32(-INFINITY));
                        const f32v v106 = v105;
                        store_f32(s_s + t93 + j86, v106); // attention.py:49
                        acc82 = fmax_f32(acc82, v106); // attention.py:51
                    }
                    if (j86 < t77) {
                        const i32v m107 = lanes_below(t77 - j86);
                        const i32v v108 = lanes_below(t88 - j86);
                        const f32v v109 = select_f32(v108, load_masked_f32(s_s + t93 + j86, v108), splat_f32(-INFINITY));
                        const f32v v110 = v109;
                        store_masked_f32(s_s + t93 + j86, m107, v110); // attention.py:49
                        acc82 = fmax_f32(acc82, select_f32(m107, v110, splat_f32(-INFINITY))); // attention.py:51
                    }
                    const float fmax_111 = fmax_lanes(fmax_f32(fmax_f32(fmax_f32(acc82, acc83), acc84), acc85)); // attention.py:51
                    const float t112 = s_top[row_81];
                    s_rescale[row_81] = t112; // online_softmax.py:17
                    const float t113 = max_f32_s(t112, fmax_111);
                    s_top[row_81] = t113; // attention.py:51
                }
                const int64_t t114 = block_78 * -1;
                const int64_t t115 = t80 + t114;
                int64_t j116 = 0;
                for (; j116 < t115; j116 += 8) {
                    const f32v v117 = load_f32(s_rescale + block_78 + j116);
                    const f32v v118 = load_f32(s_top + block_78 + j116);
                    const i32v v119 = (v118 == splat_f32(-INFINITY));
                    const f32v v120 = select_f32(v119, splat_f32(0x0.0p+0f), v118);
                    const f32v v121 = v117 - v120;
                    const f32v v122 = v121 * splat_f32(0x1.7154760000000p+0f);
                    const f32v v123 = exp2_f32(v122);
                    const f32v v124 = v123;
                    store_f32(s_rescale + block_78 + j116, v124); // online_softmax.py:20
                    const f32v v125 = load_f32(s_total + block_78 + j116);
                    const f32v v126 = v125 * v124;
                    store_f32(s_total + block_78 + j116, v126); // online_softmax.py:21
                }
                for (int64_t row_127 = block_78; row_127 < t80; row_127 += 1) {
                    const float t128 = s_top[row_127];
                    f32v acc129 = splat_f32(0.0f);
                    int64_t j130 = 0;
                    const int64_t t131 = row_127 * 32;
                    const int32_t t133 = t128 == -INFINITY;
                    const float t134 = t133 ? 0x0.0p+0f : t128;
                    const f32v v135 = splat_f32(t134);
                    for (; j130 + 8 <= t77; j130 += 8) {
                        const f32v v132 = load_f32(s_s + t131 + j130);
                        const f32v v136 = v132 - v135;
                        const f32v v137 = v136 * splat_f32(0x1.7154760000000p+0f);
                        const f32v v138 = exp2_f32(v137);
                        const f32v v139 = v138;
                        store_f32(s_s + t131 + j130, v139); // attention.py:53
                        acc129 = acc129 + v139; // attention.py:54
                    }
                    if (j130 < t77) {
                        const i32v m140 = lanes_below(t77 - j130);
                        const f32v v141 = load_f32(s_s + t131 + j130);
                        const f32v v142 = v141 - v135;
                        const f32v v143 = v142 * splat_f32(0x1.7154760000000p+0f);
                        const f32v v144 = exp2_f32(v143);
                        const f32v v145 = v144;
                        store_masked_f32(s_s + t131 + j130, m140, v145); // attention.py:53
                        acc129 = acc129 + select_f32(m140, v145, splat_f32(0.0f)); // attention.py:54
                    }
                    const float sum_146 = sum_lanes(acc129); // attention.py:54
                    const float t147 = s_total[row_127];
                    const float t148 = t147 + sum_146;
                    s_total[row_127] = t148; // attention.py:54
                    const float t149 = s_rescale[row_127];
                    int64_t j150 = 0;
                    const int64_t t151 = row_127 * 64;
                    const f32v v153 = splat_f32(t149);
                    for (; j150 < 64; j150 += 8) {
                        const f32v v152 = load_f32(s_o + t151 + j150);
                        const f32v v154 = v152 * v153;
                        store_f32(s_o + t151 + j150, v154); // attention.py:60
                    }
                }
            }
            if (!once_v[n_67]) {
                once_v[n_67] = 1;
                for (int64_t depth_155 = 0; depth_155 < t74; depth_155 += 1) {
                    const int64_t t157 = depth_155 * 384;
                    const int64_t t158 = t18 + t157;
                    const int64_t t159 = t158 + t19;
                    const int64_t t160 = t159 + t68;
                    const int64_t t167 = depth_155 * 16;
                    const int64_t t168 = t167 + t71;
                    for (int64_t panel_156 = 0; panel_156 < 4; panel_156 += 1) {
                        const int64_t t161 = panel_156 * 16;
                        const int64_t t162 = t160 + t161;
                        const int64_t t163 = t162 + 6400;
                        __builtin_prefetch(input0 + t163, 0);
                        int64_t j164 = 0;
                        const int64_t t165 = t162 + 256;
                        const int64_t t169 = panel_156 * 512;
                        const int64_t t170 = t168 + t169;
                        for (; j164 + 8 <= 16; j164 += 8) {
                            const f32v v166 = load_f32(input0 + t165 + j164);
                            store_f32(s_v + t170 + j164, v166); // attention.py:61
                        }
                    }
                }
            }
            tile_product_x86_64_v3(s_s + 0, 32, 1, s_v + t71, 512, s_o + 0, 64, t14, 64, t77, 0, 0, t14); // attention.py:62
        }
        const int64_t t190 = t56 + t58;
        for (int64_t row_171 = 0; row_171 < t14; row_171 += 1) {
            const float t172 = s_total[row_171];
            int64_t j173 = 0;
            const int64_t t176 = row_171 * 64;
            const float t178 = fabsf(t172);
            const int32_t t179 = t178 < 0x1.0000000000000p-126f;
            const int32_t t180 = t178 > 0x1.0000000000000p+126f;
            const float t181 = t180 ? 0x1.0000000000000p-64f : 0x1.0000000000000p+0f;
            const float t182 = t179 ? 0x1.0000000000000p+64f : t181;
            const f32v v183 = splat_f32(t182);
            const float t185 = t172 * t182;
            const float t186 = 0x1.0000000000000p+0f / t185;
            const f32v v187 = splat_f32(t186);
            const int64_t t191 = row_171 * 128;
            const int64_t t192 = t190 + t191;
            for (; j173 + 8 <= 64; j173 += 8) {
                const f32v v177 = load_f32(s_o + t176 + j173);
                const f32v v184 = v177 * v183;
                const f32v v188 = v184 * v187;
                const f32v v189 = select_f32(v175, splat_f32(0x0.0p+0f), v188);
                store_f32(output0 + t192 + j173, v189); // attention.py:72
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
const tile_kernel tile_kernel_FusedGolden_4ba365a148e6_x86_64_v3 = {
    "FusedGolden_4ba365a148e6", 1, 1, input_types, tile_outputs,
    bind, shape, tasks, group, scratch_size, work, run, NULL,
};
