/* FusedGolden_ec739e408af2: row for x86-64-v3 */
#include "tile_kernel.h"
#include "tile_cpu.h"
#include "tile_host.h"
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
    const float* restrict input3 = (const float*)inputs[3];
    float* restrict output0 = (float*)outputs[0];
    float* restrict output1 = (float*)outputs[1];
    float* restrict s_tile = (float*)((char*)scratch + 0);
    float* restrict s_tile1 = (float*)((char*)scratch + 1536);
    const int64_t t55 = n0 * 768;
    const int64_t t56 = t55 + 384;
    const int32_t t57 = t56 >= 11184810;
    for (int64_t task = begin; task < end; task++) {
        const int64_t m_3 = task;
        const int64_t t4 = m_3 * -8;
        const int64_t t5 = n0 + t4;
        const int64_t t6 = min_i64(8, t5);
        const int64_t t10 = m_3 * 384;
        for (int64_t row_7 = 0; row_7 < t6; row_7 += 1) {
            f32v acc8 = splat_f32(0.0f);
            int64_t j9 = 0;
            const int64_t t11 = row_7 * 48;
            const int64_t t12 = t10 + t11;
            for (; j9 + 8 <= 48; j9 += 8) {
                const f32v v13 = load_f32(input0 + t12 + j9);
                const f32v v14 = load_f32(input1 + t12 + j9);
                const f32v v15 = v13 + v14;
                const f32v v16 = v15;
                store_f32(s_tile + t11 + j9, v16); // row.py:22
                acc8 = acc8 + v16; // row.py:36
            }
            const float sum_17 = sum_lanes(acc8); // row.py:36
            f32v acc18 = splat_f32(0.0f);
            f32v acc19 = splat_f32(0.0f);
            f32v acc20 = splat_f32(0.0f);
            f32v acc21 = splat_f32(0.0f);
            int64_t j22 = 0;
            const float t27 = sum_17 / 0x1.8000000000000p+5f;
            const f32v v28 = splat_f32(t27);
            for (; j22 + 32 <= 48; j22 += 32) {
                const f32v v26 = load_f32(s_tile + t11 + j22);
                const f32v v29 = v26 - v28;
                const f32v v30 = v29;
                store_f32(s_tile1 + t11 + j22, v30); // row.py:22
                const f32v v31 = v30 * v30;
                const f32v v32 = v31;
                acc18 = acc18 + v32; // row.py:36
                const int64_t j23 = j22 + 8;
                const f32v v33 = load_f32(s_tile + t11 + j23);
                const f32v v34 = v33 - v28;
                const f32v v35 = v34;
                store_f32(s_tile1 + t11 + j23, v35); // row.py:22
                const f32v v36 = v35 * v35;
                const f32v v37 = v36;
                acc19 = acc19 + v37; // row.py:36
                const int64_t j24 = j22 + 16;
                const f32v v38 = load_f32(s_tile + t11 + j24);
                const f32v v39 = v38 - v28;
                const f32v v40 = v39;
                store_f32(s_tile1 + t11 + j24, v40); // row.py:22
                const f32v v41 = v40 * v40;
                const f32v v42 = v41;
                acc20 = acc20 + v42; // row.py:36
                const int64_t j25 = j22 + 24;
                const f32v v43 = load_f32(s_tile + t11 + j25);
                const f32v v44 = v43 - v28;
                const f32v v45 = v44;
                store_f32(s_tile1 + t11 + j25, v45); // row.py:22
                const f32v v46 = v45 * v45;
                const f32v v47 = v46;
                acc21 = acc21 + v47; // row.py:36
            }
            for (; j22 + 8 <= 48; j22 += 8) {
                const f32v v48 = load_f32(s_tile + t11 + j22);
                const f32v v49 = v48 - v28;
                const f32v v50 = v49;
                store_f32(s_tile1 + t11 + j22, v50); // row.py:22
                const f32v v51 = v50 * v50;
                const f32v v52 = v51;
                acc18 = acc18 + v52; // row.py:36
            }
            const float sum_53 = sum_lanes(acc18 + acc19 + acc20 + acc21); // row.py:36
            int64_t j54 = 0;
            const int64_t t59 = t12 + 1024;
            const float t62 = sum_53 / 0x1.8000000000000p+5f;
            const float t63 = t62 + 0x1.4f8b580000000p-17f;
            const float t64 = rsqrt_f32_s(t63);
            const f32v v65 = splat_f32(t64);
            if (t57) {
                const int64_t head58 = min_i64(48, lanes_to_vector(output0 + t12));
                if (head58 > 0) {
                    __builtin_prefetch(input0 + t59 + j54);
                    __builtin_prefetch(input1 + t59 + j54);
                    const i32v m60 = lanes_below(head58);
                    const f32v v61 = load_f32(s_tile1 + t11 + j54);
                    const f32v v66 = v61 * v65;
                    const f32v v67 = load_masked_f32(input2 + j54, m60);
                    const f32v v68 = v66 * v67;
                    const f32v v69 = load_masked_f32(input3 + j54, m60);
                    const f32v v70 = v68 + v69;
                    const f32v v71 = v70;
                    store_masked_f32(output0 + t12 + j54, m60, v71); // row.py:27
                    const f32v v72 = load_f32(s_tile + t11 + j54);
                    store_masked_f32(output1 + t12 + j54, m60, v72); // row.py:27
                }
                j54 = head58;
                for (; j54 + 8 <= 48; j54 += 8) {
                    __builtin_prefetch(input0 + t59 + j54);
                    __builtin_prefetch(input1 + t59 + j54);
                    const f32v v73 = load_f32(s_tile1 + t11 + j54);
                    const f32v v74 = v73 * v65;
                    const f32v v75 = load_f32(input2 + j54);
                    const f32v v76 = v74 * v75;
                    const f32v v77 = load_f32(input3 + j54);
                    const f32v v78 = v76 + v77;
                    const f32v v79 = v78;
                    stream_f32(output0 + t12 + j54, v79); // row.py:27
                    const f32v v80 = load_f32(s_tile + t11 + j54);
                    stream_f32(output1 + t12 + j54, v80); // row.py:27
                }
                if (j54 < 48) {
                    __builtin_prefetch(input0 + t59 + j54);
                    __builtin_prefetch(input1 + t59 + j54);
                    const i32v m81 = lanes_below(48 - j54);
                    const f32v v82 = load_f32(s_tile1 + t11 + j54);
                    const f32v v83 = v82 * v65;
                    const f32v v84 = load_masked_f32(input2 + j54, m81);
                    const f32v v85 = v83 * v84;
                    const f32v v86 = load_masked_f32(input3 + j54, m81);
                    const f32v v87 = v85 + v86;
                    const f32v v88 = v87;
                    store_masked_f32(output0 + t12 + j54, m81, v88); // row.py:27
                    const f32v v89 = load_f32(s_tile + t11 + j54);
                    store_masked_f32(output1 + t12 + j54, m81, v89); // row.py:27
                }
            }
            else {
                for (; j54 + 8 <= 48; j54 += 8) {
                    const f32v v90 = load_f32(s_tile1 + t11 + j54);
                    const f32v v91 = v90 * v65;
                    const f32v v92 = load_f32(input2 + j54);
                    const f32v v93 = v91 * v92;
                    const f32v v94 = load_f32(input3 + j54);
                    const f32v v95 = v93 + v94;
                    const f32v v96 = v95;
                    store_f32(output0 + t12 + j54, v96); // row.py:27
                    const f32v v97 = load_f32(s_tile + t11 + j54);
                    store_f32(output1 + t12 + j54, v97); // row.py:27
                }
            }
        }
    }
    if (t57) streams_done();
}
static int32_t bind(const int64_t* const* shapes, const int32_t* ranks, int64_t* symbols, char* error,
                    size_t error_size) {
    (void)shapes; (void)ranks; (void)symbols; (void)error; (void)error_size;
    TILE_CHECK_RANK(0, 2)
    const int64_t n0 = symbols[0] = shapes[0][0];
    TILE_CHECK_RANK(1, 2)
    TILE_CHECK_RANK(2, 1)
    TILE_CHECK_RANK(3, 1)
    (void)n0;
    TILE_CHECK_DIM(0, 1, INT64_C(48))
    TILE_CHECK_DIM(1, 0, n0)
    TILE_CHECK_DIM(1, 1, INT64_C(48))
    TILE_CHECK_DIM(2, 0, INT64_C(48))
    TILE_CHECK_DIM(3, 0, INT64_C(48))
    return 0;
}
static int64_t tasks(const int64_t* symbols) {
    (void)symbols;
    const int64_t n0 = symbols[0]; (void)n0;
    return (int64_t)(floordiv_i64((n0 + INT64_C(7)), INT64_C(8)));
}
static int64_t group(const int64_t* symbols) {
    (void)symbols;
    const int64_t n0 = symbols[0]; (void)n0;
    return (int64_t)(INT64_C(1));
}
static size_t scratch_size(const int64_t* symbols) {
    (void)symbols;
    const int64_t n0 = symbols[0]; (void)n0;
    return (size_t)(INT64_C(3072));
}
static int64_t work(const int64_t* symbols) {
    (void)symbols;
    const int64_t n0 = symbols[0]; (void)n0;
    return (int64_t)((n0 * INT64_C(48)));
}
static void shape(const int64_t* symbols, int32_t output, int64_t* dims) {
    (void)symbols;
    const int64_t n0 = symbols[0]; (void)n0;
    switch (output) {
    case 0: dims[0] = n0; dims[1] = INT64_C(48); break;
    case 1: dims[0] = n0; dims[1] = INT64_C(48); break;
    default: break;
    }
}
static const int32_t input_types[] = {1, 1, 1, 1};
static const tile_dim dims_0[] = {{TILE_DIM_INPUT, 0, 0, 0}, {TILE_DIM_CONST, 0, 0, 48}};
static const tile_dim dims_1[] = {{TILE_DIM_INPUT, 0, 0, 0}, {TILE_DIM_CONST, 0, 0, 48}};
static const tile_output tile_outputs[] = {{1, 2, dims_0}, {1, 2, dims_1}};
const tile_kernel tile_kernel_FusedGolden_ec739e408af2_x86_64_v3 = {
    "FusedGolden_ec739e408af2", 4, 2, input_types, tile_outputs,
    bind, shape, tasks, group, scratch_size, work, run, NULL,
};
