/* FusedGolden_13247e8d8c7b: attention for x86-64-v3 */
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
    float* restrict s_q = (float*)((char*)scratch + 0);
    float* restrict s_k = (float*)((char*)scratch + 6144);
    const int64_t t1 = n1 + 31;
    const int64_t t2 = (t1 >> 5);
    const int64_t t3 = t2 * 8192;
    const int64_t t4 = t3 + 6144;
    float* restrict s_v = (float*)((char*)scratch + t4);
    const int64_t t5 = t2 * 16384;
    const int64_t t6 = t5 + 6144;
    float* restrict s_s = (float*)((char*)scratch + t6);
    const int64_t t7 = t5 + 9216;
    float* restrict s_o = (float*)((char*)scratch + t7);
    const int64_t t8 = t5 + 15360;
    float* restrict s_total = (float*)((char*)scratch + t8);
    const int64_t t9 = t5 + 15488;
    float* restrict s_top = (float*)((char*)scratch + t9);
    const int64_t t10 = t5 + 15616;
    float* restrict s_rescale = (float*)((char*)scratch + t10);
    const int64_t t11 = t5 + 15744;
    uint8_t* once_k = (uint8_t*)scratch + t11;
    const int64_t t12 = t2 + 63;
    const int64_t t13 = (t12 >> 6);
    const int64_t t14 = t13 * 64;
    const int64_t t15 = t14 + t5;
    const int64_t t16 = t15 + 15744;
    uint8_t* once_v = (uint8_t*)scratch + t16;
    const int64_t t17 = n1 + 23;
    const int64_t t18 = floordiv_i64(t17, 24);
    const int32_t t180 = n1 == 0;
    const i32v v181 = splat_bool(t180);
    for (int64_t task = begin; task < end; task++) {
        const int64_t m_19 = task % t18;
        const int64_t h_20 = task / t18 % 2;
        const int64_t b_21 = task / t18 / 2;
        if (task / t18 != *copied) {
            *copied = task / t18;
            memset(once_k, 0, (size_t)(t2));
            memset(once_v, 0, (size_t)(t2));
        }
        const int64_t t22 = m_19 * -24;
        const int64_t t23 = n1 + t22;
        const int64_t t24 = min_i64(24, t23);
        const int64_t t27 = n1 * b_21;
        const int64_t t28 = t27 * 384;
        const int64_t t29 = h_20 * 64;
        const int64_t t30 = t28 + t29;
        const int64_t t31 = m_19 * 9216;
        const int64_t t32 = t30 + t31;
        for (int64_t q_0_25 = 0; q_0_25 < t24; q_0_25 += 1) {
            int64_t j26 = 0;
            const int64_t t33 = q_0_25 * 384;
            const int64_t t34 = t32 + t33;
            const int64_t t37 = q_0_25 * 64;
            for (; j26 + 8 <= 64; j26 += 8) {
                const f32v v35 = load_f32(input0 + t34 + j26);
                const f32v v36 = v35 * splat_f32(0x1.7154760000000p-3f);
                store_f32(s_q + t37 + j26, v36); // attention.py:36
            }
        }
        for (int64_t block_38 = 0; block_38 < t24; block_38 += 16) {
            const int64_t t39 = block_38 + 16;
            const int64_t t40 = min_i64(t39, t24);
            for (int64_t row_41 = block_38; row_41 < t40; row_41 += 1) {
                int64_t j42 = 0;
                const int64_t t43 = row_41 * 64;
                for (; j42 < 64; j42 += 8) {
                    store_f32(s_o + t43 + j42, splat_f32(0x0.0p+0f)); // attention.py:37
                }
            }
            const int64_t t44 = block_38 * -1;
            const int64_t t45 = t40 + t44;
            int64_t j46 = 0;
            for (; j46 < t45; j46 += 8) {
                const f32v v47 = splat_f32(-INFINITY);
                store_f32(s_top + block_38 + j46, v47); // attention.py:39
                const int32_t t48 = -INFINITY == -INFINITY;
                const float t49 = t48 ? 0x0.0p+0f : -INFINITY;
                const float t50 = -INFINITY - t49;
                const float t51 = exp2_f32_s(t50);
                const f32v v52 = splat_f32(t51);
                store_f32(s_total + block_38 + j46, v52); // attention.py:40
            }
        }
        const int64_t t53 = t23 + -24;
        const int64_t t54 = min_i64(24, t53);
        for (int64_t q_0_55 = 0; q_0_55 < t54; q_0_55 += 1) {
            const int64_t t59 = q_0_55 * 384;
            for (int64_t line_56 = 0; line_56 < 64; line_56 += 16) {
                const int64_t t57 = t30 + line_56;
                const int64_t t58 = t57 + t31;
                const int64_t t60 = t58 + t59;
                const int64_t t61 = t60 + 9216;
                __builtin_prefetch(input0 + t61, 0);
            }
        }
        const int64_t t64 = t27 * 128;
        const int64_t t65 = t64 + t29;
        const int64_t t67 = m_19 * 3072;
        for (int64_t row_62 = 0; row_62 < t24; row_62 += 1) {
            const int64_t t69 = row_62 * 128;
            for (int64_t line_63 = 0; line_63 < 64; line_63 += 16) {
                const int64_t t66 = t65 + line_63;
                const int64_t t68 = t66 + t67;
                const int64_t t70 = t68 + t69;
                __builtin_prefetch(output0 + t70, 1);
            }
        }
        const int64_t t71 = m_19 * 24;
        const int64_t t72 = t71 + 24;
        const int64_t t73 = min_i64(n1, t72);
        const int64_t t74 = t73 + 31;
        const int64_t t75 = (t74 >> 5);
        for (int64_t n_76 = 0; n_76 < t75; n_76 += 1) {
            const int64_t t77 = n_76 * 12288;
            const int64_t t78 = t30 + t77;
            const int64_t t79 = t78 + 128;
            const int64_t t80 = n_76 * 2048;
            const int64_t t81 = n_76 * -32;
            const int64_t t82 = n1 + t81;
            const int64_t t83 = min_i64(32, t82);
            if (!once_k[n_76]) {
                once_k[n_76] = 1;
                pack_transposed_f32(input0 + t79, 384, s_k + t80, 1024, t83, 64); // attention.py:43
            }
            const int64_t t84 = t71 + t81;
            const int64_t t85 = t84 + 24;
            const int64_t t86 = min_i64(t83, t85);
            tile_product_x86_64_v3(s_q + 0, 64, 1, s_k + t80, 1024, s_s + 0, 32, t24, t86, 64, 1, 0, t24); // attention.py:44
            for (int64_t block_87 = 0; block_87 < t24; block_87 += 16) {
                const int64_t t88 = block_87 + 16;
                const int64_t t89 = min_i64(t88, t24);
                for (int64_t row_90 = block_87; row_90 < t89; row_90 += 1) {
                    f32v acc91 = splat_f32(-INFINITY);
                    f32v acc92 = splat_f32(-INFINITY);
                    f32v acc93 = splat_f32(-INFINITY);
                    f32v acc94 = splat_f32(-INFINITY);
                    int64_t j95 = 0;
                    const int64_t t96 = t84 + row_90;
                    const int64_t t97 = t96 + 1;
                    const int64_t t98 = min_i64(t86, t97);
                    const int64_t t102 = row_90 * 32;
                    for (; j95 + 32 <= t98; j95 += 32) {
                        const f32v v103 = load_f32(s_s + t102 + j95);
                        const f32v v104 = v103;
                        acc91 = fmax_f32(acc91, v104); // online_softmax.py:18
                        const int64_t j99 = j95 + 8;
                        const f32v v105 = load_f32(s_s + t102 + j99);
                        const f32v v106 = v105;
                        acc92 = fmax_f32(acc92, v106); // online_softmax.py:18
                        const int64_t j100 = j95 + 16;
                        const f32v v107 = load_f32(s_s + t102 + j100);
                        const f32v v108 = v107;
                        acc93 = fmax_f32(acc93, v108); // online_softmax.py:18
                        const int64_t j101 = j95 + 24;
                        const f32v v109 = load_f32(s_s + t102 + j101);
                        const f32v v110 = v109;
                        acc94 = fmax_f32(acc94, v110); // online_softmax.py:18
                    }
                    for (; j95 + 8 <= t98; j95 += 8) {
                        const f32v v111 = load_f32(s_s + t102 + j95);
                        const f32v v112 = v111;
                        acc91 = fmax_f32(acc91, v112); // online_softmax.py:18
                    }
                    for (; j95 + 8 <= t86; j95 += 8) {
                        const i32v v113 = lanes_below(t97 - j95);
                        const f32v v114 = select_f32(v113, load_masked_f32(s_s + t102 + j95, v113), splat_f32(-INFINITY));
                        const f32v v115 = v114;
                        store_f32(s_s + t102 + j95, v115); // attention.py:49
                        acc91 = fmax_f32(acc91, v115); // online_softmax.py:18
                    }
                    if (j95 < t86) {
                        const i32v m116 = lanes_below(t86 - j95);
                        const i32v v117 = lanes_below(t97 - j95);
                        const f32v v118 = select_f32(v117, load_masked_f32(s_s + t102 + j95, v117), splat_f32(-INFINITY));
                        const f32v v119 = v118;
                        store_masked_f32(s_s + t102 + j95, m116, v119); // attention.py:49
                        acc91 = fmax_f32(acc91, select_f32(m116, v119, splat_f32(-INFINITY))); // online_softmax.py:18
                    }
                    const float fmax_120 = fmax_lanes(fmax_f32(fmax_f32(fmax_f32(acc91, acc92), acc93), acc94)); // online_softmax.py:18
                    const float t121 = s_top[row_90];
                    s_rescale[row_90] = t121; // online_softmax.py:17
                    const float t122 = max_f32_s(t121, fmax_120);
                    s_top[row_90] = t122; // online_softmax.py:18
                }
                const int64_t t123 = block_87 * -1;
                const int64_t t124 = t89 + t123;
                int64_t j125 = 0;
                for (; j125 < t124; j125 += 8) {
                    const f32v v126 = load_f32(s_rescale + block_87 + j125);
                    const f32v v127 = load_f32(s_top + block_87 + j125);
                    const i32v v128 = (v127 == splat_f32(-INFINITY));
                    const f32v v129 = select_f32(v128, splat_f32(0x0.0p+0f), v127);
                    const f32v v130 = v126 - v129;
                    const f32v v131 = exp2_f32(v130);
                    const f32v v132 = v131;
                    store_f32(s_rescale + block_87 + j125, v132); // online_softmax.py:20
                    const f32v v133 = load_f32(s_total + block_87 + j125);
                    const f32v v134 = v133 * v132;
                    store_f32(s_total + block_87 + j125, v134); // online_softmax.py:21
                }
                for (int64_t row_135 = block_87; row_135 < t89; row_135 += 1) {
                    const float t136 = s_top[row_135];
                    f32v acc137 = splat_f32(0.0f);
                    int64_t j138 = 0;
                    const int64_t t139 = row_135 * 32;
                    const int32_t t141 = t136 == -INFINITY;
                    const float t142 = t141 ? 0x0.0p+0f : t136;
                    const f32v v143 = splat_f32(t142);
                    for (; j138 + 8 <= t86; j138 += 8) {
                        const f32v v140 = load_f32(s_s + t139 + j138);
                        const f32v v144 = v140 - v143;
                        const f32v v145 = exp2_f32(v144);
                        const f32v v146 = v145;
                        store_f32(s_s + t139 + j138, v146); // attention.py:54
                        acc137 = acc137 + v146; // attention.py:55
                    }
                    if (j138 < t86) {
                        const i32v m147 = lanes_below(t86 - j138);
                        const f32v v148 = load_f32(s_s + t139 + j138);
                        const f32v v149 = v148 - v143;
                        const f32v v150 = exp2_f32(v149);
                        const f32v v151 = v150;
                        store_masked_f32(s_s + t139 + j138, m147, v151); // attention.py:54
                        acc137 = acc137 + select_f32(m147, v151, splat_f32(0.0f)); // attention.py:55
                    }
                    const float sum_152 = sum_lanes(acc137); // attention.py:55
                    const float t153 = s_total[row_135];
                    const float t154 = t153 + sum_152;
                    s_total[row_135] = t154; // attention.py:55
                    const float t155 = s_rescale[row_135];
                    int64_t j156 = 0;
                    const int64_t t157 = row_135 * 64;
                    const f32v v159 = splat_f32(t155);
                    for (; j156 < 64; j156 += 8) {
                        const f32v v158 = load_f32(s_o + t157 + j156);
                        const f32v v160 = v158 * v159;
                        store_f32(s_o + t157 + j156, v160); // attention.py:61
                    }
                }
            }
            if (!once_v[n_76]) {
                once_v[n_76] = 1;
                for (int64_t depth_161 = 0; depth_161 < t83; depth_161 += 1) {
                    const int64_t t163 = depth_161 * 384;
                    const int64_t t164 = t28 + t163;
                    const int64_t t165 = t164 + t29;
                    const int64_t t166 = t165 + t77;
                    const int64_t t173 = depth_161 * 16;
                    const int64_t t174 = t173 + t80;
                    for (int64_t panel_162 = 0; panel_162 < 4; panel_162 += 1) {
                        const int64_t t167 = panel_162 * 16;
                        const int64_t t168 = t166 + t167;
                        const int64_t t169 = t168 + 6400;
                        __builtin_prefetch(input0 + t169, 0);
                        int64_t j170 = 0;
                        const int64_t t171 = t168 + 256;
                        const int64_t t175 = panel_162 * 512;
                        const int64_t t176 = t174 + t175;
                        for (; j170 + 8 <= 16; j170 += 8) {
                            const f32v v172 = load_f32(input0 + t171 + j170);
                            store_f32(s_v + t176 + j170, v172); // attention.py:62
                        }
                    }
                }
            }
            tile_product_x86_64_v3(s_s + 0, 32, 1, s_v + t80, 512, s_o + 0, 64, t24, 64, t86, 0, 0, t24); // attention.py:63
        }
        const int64_t t196 = t65 + t67;
        for (int64_t row_177 = 0; row_177 < t24; row_177 += 1) {
            const float t178 = s_total[row_177];
            int64_t j179 = 0;
            const int64_t t182 = row_177 * 64;
            const float t184 = fabsf(t178);
            const int32_t t185 = t184 < 0x1.0000000000000p-126f;
            const int32_t t186 = t184 > 0x1.0000000000000p+126f;
            const float t187 = t186 ? 0x1.0000000000000p-64f : 0x1.0000000000000p+0f;
            const float t188 = t185 ? 0x1.0000000000000p+64f : t187;
            const f32v v189 = splat_f32(t188);
            const float t191 = t178 * t188;
            const float t192 = 0x1.0000000000000p+0f / t191;
            const f32v v193 = splat_f32(t192);
            const int64_t t197 = row_177 * 128;
            const int64_t t198 = t196 + t197;
            for (; j179 + 8 <= 64; j179 += 8) {
                const f32v v183 = load_f32(s_o + t182 + j179);
                const f32v v190 = v183 * v189;
                const f32v v194 = v190 * v193;
                const f32v v195 = select_f32(v181, splat_f32(0x0.0p+0f), v194);
                store_f32(output0 + t198 + j179, v195); // attention.py:73
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
const tile_kernel tile_kernel_FusedGolden_13247e8d8c7b_x86_64_v3 = {
    "FusedGolden_13247e8d8c7b", 1, 1, input_types, tile_outputs,
    bind, shape, tasks, group, scratch_size, work, run, NULL,
};
