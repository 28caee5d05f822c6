/* FusedGolden_561c6640d795: attention for x86-64-v3 */
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
    float* restrict s_top = (float*)at;
    at += (128);
    float* restrict s_total = (float*)at;
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
    const int32_t t132 = n1 == 0;
    const i32v v133 = splat_bool(t132);
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
                store_f32(s_q + t27 + j16, v26); // attention.py:41
            }
        }
        for (int64_t row_28 = 0; row_28 < t14; row_28 += 1) {
            int64_t j29 = 0;
            const int64_t t30 = row_28 * 64;
            for (; j29 < 64; j29 += 8) {
                store_f32(s_o + t30 + j29, splat_f32(0x0.0p+0f)); // attention.py:42
            }
            s_top[row_28] = -INFINITY; // attention.py:44
            const int32_t t31 = -INFINITY == -INFINITY;
            const float t32 = t31 ? 0x0.0p+0f : s_top[row_28];
            const float t33 = -INFINITY - t32;
            const float t34 = t33 * 0x1.7154760000000p+0f;
            const float t35 = exp2_f32_s(t34);
            s_total[row_28] = t35; // attention.py:46
        }
        const int64_t t36 = m_9 * 24;
        const int64_t t37 = t36 + 24;
        const int64_t t38 = min_i64(n1, t37);
        const int64_t t39 = t38 + 31;
        const int64_t t40 = (t39 >> 5);
        for (int64_t n_41 = 0; n_41 < t40; n_41 += 1) {
            const int64_t t42 = n_41 * 12288;
            const int64_t t43 = t20 + t42;
            const int64_t t44 = t43 + 128;
            const int64_t t45 = n_41 * 2048;
            const int64_t t46 = n_41 * -32;
            const int64_t t47 = n1 + t46;
            const int64_t t48 = min_i64(32, t47);
            if (!once_k[n_41]) {
                once_k[n_41] = 1;
                pack_transposed_f32(input0 + t44, 384, s_k + t45, 1024, t48, 64); // attention.py:49
            }
            const int64_t t49 = t36 + t46;
            const int64_t t50 = t49 + 24;
            const int64_t t51 = min_i64(t48, t50);
            tile_product_x86_64_v3(s_q + 0, 64, 1, s_k + t45, 1024, s_s + 0, 32, t14, t51, 64, 1); // attention.py:50
            for (int64_t row_52 = 0; row_52 < t14; row_52 += 1) {
                f32v acc53 = splat_f32(-INFINITY);
                f32v acc54 = splat_f32(-INFINITY);
                f32v acc55 = splat_f32(-INFINITY);
                f32v acc56 = splat_f32(-INFINITY);
                int64_t j57 = 0;
                const int64_t t61 = t49 + row_52;
                const int64_t t62 = t61 + 1;
                const int64_t t64 = row_52 * 32;
                for (; j57 + 32 <= t51; j57 += 32) {
                    const i32v v63 = lanes_below(t62 - j57);
                    const f32v v65 = select_f32(v63, load_masked_f32(s_s + t64 + j57, v63), splat_f32(-INFINITY));
                    const f32v v66 = v65;
                    store_f32(s_s + t64 + j57, v66); // attention.py:54
                    acc53 = fmax_f32(acc53, v66); // online_softmax.py:14
                    const int64_t j58 = j57 + 8;
                    const i32v v67 = lanes_below(t62 - j58);
                    const f32v v68 = select_f32(v67, load_masked_f32(s_s + t64 + j58, v67), splat_f32(-INFINITY));
                    const f32v v69 = v68;
                    store_f32(s_s + t64 + j58, v69); // attention.py:54
                    acc54 = fmax_f32(acc54, v69); // online_softmax.py:14
                    const int64_t j59 = j57 + 16;
                    const i32v v70 = lanes_below(t62 - j59);
                    const f32v v71 = select_f32(v70, load_masked_f32(s_s + t64 + j59, v70), splat_f32(-INFINITY));
                    const f32v v72 = v71;
                    store_f32(s_s + t64 + j59, v72); // attention.py:54
                    acc55 = fmax_f32(acc55, v72); // online_softmax.py:14
                    const int64_t j60 = j57 + 24;
                    const i32v v73 = lanes_below(t62 - j60);
                    const f32v v74 = select_f32(v73, load_masked_f32(s_s + t64 + j60, v73), splat_f32(-INFINITY));
                    const f32v v75 = v74;
                    store_f32(s_s + t64 + j60, v75); // attention.py:54
                    acc56 = fmax_f32(acc56, v75); // online_softmax.py:14
                }
                for (; j57 + 8 <= t51; j57 += 8) {
                    const i32v v76 = lanes_below(t62 - j57);
                    const f32v v77 = select_f32(v76, load_masked_f32(s_s + t64 + j57, v76), splat_f32(-INFINITY));
                    const f32v v78 = v77;
                    store_f32(s_s + t64 + j57, v78); // attention.py:54
                    acc53 = fmax_f32(acc53, v78); // online_softmax.py:14
                }
                if (j57 < t51) {
                    const i32v m79 = lanes_below(t51 - j57);
                    const i32v v80 = lanes_below(t62 - j57);
                    const f32v v81 = select_f32(v80, load_masked_f32(s_s + t64 + j57, v80), splat_f32(-INFINITY));
                    const f32v v82 = v81;
                    store_masked_f32(s_s + t64 + j57, m79, v82); // attention.py:54
                    acc53 = fmax_f32(acc53, select_f32(m79, v82, splat_f32(-INFINITY))); // online_softmax.py:14
                }
                const float fmax_83 = fmax_lanes(fmax_f32(fmax_f32(fmax_f32(acc53, acc54), acc55), acc56)); // online_softmax.py:14
                const float t84 = s_top[row_52];
                s_rescale[row_52] = t84; // online_softmax.py:13
                const float t85 = max_f32_s(t84, fmax_83);
                s_top[row_52] = t85; // online_softmax.py:14
                const int32_t t86 = t85 == -INFINITY;
                const float t87 = t86 ? 0x0.0p+0f : s_top[row_52];
                const float t88 = t84 - t87;
                const float t89 = t88 * 0x1.7154760000000p+0f;
                const float t90 = exp2_f32_s(t89);
                s_rescale[row_52] = t90; // online_softmax.py:16
                const float t91 = s_total[row_52];
                const float t92 = t91 * t90;
                s_total[row_52] = t92; // online_softmax.py:17
                f32v acc93 = splat_f32(0.0f);
                int64_t j94 = 0;
                for (; j94 + 8 <= t51; j94 += 8) {
                    const f32v v95 = load_f32(s_s + t64 + j94);
                    const f32v v96 = splat_f32(t87);
                    const f32v v97 = v95 - v96;
                    const f32v v98 = v97 * splat_f32(0x1.7154760000000p+0f);
                    const f32v v99 = exp2_f32(v98);
                    const f32v v100 = v99;
                    store_f32(s_s + t64 + j94, v100); // online_softmax.py:19
                    acc93 = acc93 + v100; // online_softmax.py:20
                }
                if (j94 < t51) {
                    const i32v m101 = lanes_below(t51 - j94);
                    const f32v v102 = load_f32(s_s + t64 + j94);
                    const f32v v103 = splat_f32(t87);
                    const f32v v104 = v102 - v103;
                    const f32v v105 = v104 * splat_f32(0x1.7154760000000p+0f);
                    const f32v v106 = exp2_f32(v105);
                    const f32v v107 = v106;
                    store_masked_f32(s_s + t64 + j94, m101, v107); // online_softmax.py:19
                    acc93 = acc93 + select_f32(m101, v107, splat_f32(0.0f)); // online_softmax.py:20
                }
                const float sum_108 = sum_lanes(acc93); // online_softmax.py:20
                const float t109 = t92 + sum_108;
                s_total[row_52] = t109; // online_softmax.py:20
                int64_t j110 = 0;
                const int64_t t111 = row_52 * 64;
                for (; j110 < 64; j110 += 8) {
                    const f32v v112 = load_f32(s_o + t111 + j110);
                    const f32v v113 = splat_f32(t90);
                    const f32v v114 = v112 * v113;
                    store_f32(s_o + t111 + j110, v114); // attention.py:58
                }
            }
            if (!once_v[n_41]) {
                once_v[n_41] = 1;
                for (int64_t panel_115 = 0; panel_115 < 4; panel_115 += 1) {
                    const int64_t t122 = panel_115 * 16;
                    const int64_t t128 = panel_115 * 512;
                    for (int64_t depth_116 = 0; depth_116 < t48; depth_116 += 1) {
                        int64_t j117 = 0;
                        const int64_t t118 = depth_116 * 384;
                        const int64_t t119 = t18 + t118;
                        const int64_t t120 = t119 + t19;
                        const int64_t t121 = t120 + t42;
                        const int64_t t123 = t121 + t122;
                        const int64_t t124 = t123 + 256;
                        const int64_t t126 = depth_116 * 16;
                        const int64_t t127 = t126 + t45;
                        const int64_t t129 = t127 + t128;
                        for (; j117 + 8 <= 16; j117 += 8) {
                            const f32v v125 = load_f32(input0 + t124 + j117);
                            store_f32(s_v + t129 + j117, v125); // attention.py:59
                        }
                    }
                }
            }
            tile_product_x86_64_v3(s_s + 0, 32, 1, s_v + t45, 512, s_o + 0, 64, t14, 64, t51, 0); // attention.py:62
        }
        const int64_t t140 = t17 * 128;
        const int64_t t141 = t140 + t19;
        const int64_t t142 = m_9 * 3072;
        const int64_t t143 = t141 + t142;
        for (int64_t row_130 = 0; row_130 < t14; row_130 += 1) {
            int64_t j131 = 0;
            const int64_t t134 = row_130 * 64;
            const int64_t t144 = row_130 * 128;
            const int64_t t145 = t143 + t144;
            for (; j131 + 8 <= 64; j131 += 8) {
                const f32v v135 = load_f32(s_o + t134 + j131);
                const float t136 = s_total[row_130];
                const f32v v137 = splat_f32(t136);
                const f32v v138 = v135 / v137;
                const f32v v139 = select_f32(v133, splat_f32(0x0.0p+0f), v138);
                store_f32(output0 + t145 + j131, v139); // attention.py:69
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
const tile_kernel tile_kernel_FusedGolden_561c6640d795_x86_64_v3 = {
    "FusedGolden_561c6640d795", 1, 1, input_types, tile_outputs,
    bind, shape, tasks, group, scratch_size, work, run,
};
