/* FusedGolden_e0c7de5e8797: row for x86-64-v3 */
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
    char* at = (char*)scratch;
    float* restrict s_tile = (float*)at;
    at += (1536);
    float* restrict s_result = (float*)at;
    at += (64);
    float* restrict s_tile1 = (float*)at;
    at += (1536);
    float* restrict s_tile2 = (float*)at;
    at += (1536);
    float* restrict s_result1 = (float*)at;
    at += (64);
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
            s_result[row_7] = sum_17; // row.py:36
            f32v acc18 = splat_f32(0.0f);
            f32v acc19 = splat_f32(0.0f);
            f32v acc20 = splat_f32(0.0f);
            f32v acc21 = splat_f32(0.0f);
            int64_t j22 = 0;
            for (; j22 + 32 <= 48; j22 += 32) {
                const f32v v26 = load_f32(s_tile + t11 + j22);
                const float t27 = sum_17 / 0x1.8000000000000p+5f;
                const f32v v28 = splat_f32(t27);
                const f32v v29 = v26 - v28;
                const f32v v30 = v29;
                store_f32(s_tile1 + t11 + j22, v30); // row.py:22
                const f32v v31 = v30 * v30;
                const f32v v32 = v31;
                store_f32(s_tile2 + t11 + j22, v32); // row.py:22
                acc18 = acc18 + v32; // row.py:36
                const int64_t j23 = j22 + 8;
                const f32v v33 = load_f32(s_tile + t11 + j23);
                const float t34 = sum_17 / 0x1.8000000000000p+5f;
                const f32v v35 = splat_f32(t34);
                const f32v v36 = v33 - v35;
                const f32v v37 = v36;
                store_f32(s_tile1 + t11 + j23, v37); // row.py:22
                const f32v v38 = v37 * v37;
                const f32v v39 = v38;
                store_f32(s_tile2 + t11 + j23, v39); // row.py:22
                acc19 = acc19 + v39; // row.py:36
                const int64_t j24 = j22 + 16;
                const f32v v40 = load_f32(s_tile + t11 + j24);
                const float t41 = sum_17 / 0x1.8000000000000p+5f;
                const f32v v42 = splat_f32(t41);
                const f32v v43 = v40 - v42;
                const f32v v44 = v43;
                store_f32(s_tile1 + t11 + j24, v44); // row.py:22
                const f32v v45 = v44 * v44;
                const f32v v46 = v45;
                store_f32(s_tile2 + t11 + j24, v46); // row.py:22
                acc20 = acc20 + v46; // row.py:36
                const int64_t j25 = j22 + 24;
                const f32v v47 = load_f32(s_tile + t11 + j25);
                const float t48 = sum_17 / 0x1.8000000000000p+5f;
                const f32v v49 = splat_f32(t48);
                const f32v v50 = v47 - v49;
                const f32v v51 = v50;
                store_f32(s_tile1 + t11 + j25, v51); // row.py:22
                const f32v v52 = v51 * v51;
                const f32v v53 = v52;
                store_f32(s_tile2 + t11 + j25, v53); // row.py:22
                acc21 = acc21 + v53; // row.py:36
            }
            for (; j22 + 8 <= 48; j22 += 8) {
                const f32v v54 = load_f32(s_tile + t11 + j22);
                const float t55 = sum_17 / 0x1.8000000000000p+5f;
                const f32v v56 = splat_f32(t55);
                const f32v v57 = v54 - v56;
                const f32v v58 = v57;
                store_f32(s_tile1 + t11 + j22, v58); // row.py:22
                const f32v v59 = v58 * v58;
                const f32v v60 = v59;
                store_f32(s_tile2 + t11 + j22, v60); // row.py:22
                acc18 = acc18 + v60; // row.py:36
            }
            const float sum_61 = sum_lanes(acc18 + acc19 + acc20 + acc21); // row.py:36
            s_result1[row_7] = sum_61; // row.py:36
            int64_t j62 = 0;
            for (; j62 + 8 <= 48; j62 += 8) {
                const f32v v63 = load_f32(s_tile1 + t11 + j62);
                const float t64 = sum_61 / 0x1.8000000000000p+5f;
                const float t65 = t64 + 0x1.4f8b580000000p-17f;
                const float t66 = rsqrt_f32_s(t65);
                const f32v v67 = splat_f32(t66);
                const f32v v68 = v63 * v67;
                const f32v v69 = load_f32(input2 + j62);
                const f32v v70 = v68 * v69;
                const f32v v71 = load_f32(input3 + j62);
                const f32v v72 = v70 + v71;
                const f32v v73 = v72;
                store_f32(output0 + t12 + j62, v73); // row.py:27
                const f32v v74 = load_f32(s_tile + t11 + j62);
                store_f32(output1 + t12 + j62, v74); // row.py:27
            }
        }
    }
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
    return (size_t)(INT64_C(4736));
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
const tile_kernel tile_kernel_FusedGolden_e0c7de5e8797_x86_64_v3 = {
    "FusedGolden_e0c7de5e8797", 4, 2, input_types, tile_outputs,
    bind, shape, tasks, group, scratch_size, work, run, NULL,
};
