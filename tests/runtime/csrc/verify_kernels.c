/* Kernels that are right, and kernels that are wrong in the ways a compiler gets things wrong, to test `verify`.
 *
 * Every kernel maps x[n, 8] to y[n, 8] by rows; its number says which function body it stands for.
 */
#include <math.h>
#include <stdio.h>

#include "tile_kernel.h"

enum { FLOAT = 1, WIDTH = 8 };

static int32_t bind_rows(const int64_t* const* shapes, const int32_t* ranks, int64_t* symbols, char* error, size_t size) {
    if (ranks[0] != 2 || shapes[0][1] != WIDTH) {
        snprintf(error, size, "expected [n, %d]", WIDTH);
        return 1;
    }
    symbols[0] = shapes[0][0];
    return 0;
}

static void shape_rows(const int64_t* symbols, int32_t output, int64_t* dims) {
    (void)output;
    dims[0] = symbols[0];
    dims[1] = WIDTH;
}

static int64_t count_rows(const int64_t* symbols) { return symbols[0]; }

static int64_t ungrouped(const int64_t* symbols) {
    (void)symbols;
    return 1;
}

static size_t no_scratch(const int64_t* symbols) {
    (void)symbols;
    return 0;
}

#define ROW_KERNEL(id, op, inputs_of_it, types_of_it, statement)                                                  \
    static void id##_run(const int64_t* symbols, const void* const* inputs, void* const* outputs, void* scratch,    \
                         int64_t* copied, int64_t begin, int64_t end) {                                             \
        (void)scratch;                                                                                              \
        (void)copied;                                                                                               \
        int64_t rows = symbols[0];                                                                                  \
        (void)rows;                                                                                                 \
        for (int64_t i = begin; i < end; i++) {                                                                     \
            const float* x = (const float*)inputs[0] + i * WIDTH;                                                   \
            float* y = (float*)outputs[0] + i * WIDTH;                                                              \
            for (int j = 0; j < WIDTH; j++) statement                                                               \
        }                                                                                                           \
    }                                                                                                               \
    static const tile_kernel id = {                                                                                 \
        .name = op,                                                                                                 \
        .n_inputs = inputs_of_it,                                                                                   \
        .n_outputs = 1,                                                                                             \
        .input_types = types_of_it,                                                                                 \
        .outputs = (const tile_output[]){{FLOAT, 2,                                                                 \
                                          (const tile_dim[]){{TILE_DIM_INPUT, 0, 0, 0}, {TILE_DIM_CONST, 0, 0, WIDTH}}}}, \
        .bind = bind_rows,                                                                                          \
        .shape = shape_rows,                                                                                        \
        .tasks = count_rows,                                                                                        \
        .group = ungrouped,                                                                                         \
        .scratch = no_scratch,                                                                                      \
        .work = count_rows,                                                                                         \
        .run = id##_run,                                                                                            \
    };

static const int32_t one_float[] = {FLOAT};
static const int32_t two_floats[] = {FLOAT, FLOAT};

static float backwards(const float* x, const float* w, int j, int terms) {
    float sum = 0;
    for (int k = WIDTH - 1; k >= WIDTH - terms; k--) sum += x[k] * w[k * WIDTH + j];
    return sum;
}

ROW_KERNEL(linear, "Linear_right", 2, two_floats, { y[j] = backwards(x, inputs[1], j, WIDTH); })
ROW_KERNEL(linear_short, "Linear_short", 2, two_floats, {
    y[j] = backwards(x, inputs[1], j, i == rows - 1 && j == 3 ? WIDTH - 1 : WIDTH); /* a tail that is cut too early */
})
ROW_KERNEL(gelu, "Gelu_right", 1, one_float, { y[j] = 0.5f * x[j] * (1 + erff(x[j] * 0.70710678f)); })
ROW_KERNEL(gelu_tanh, "Gelu_tanh", 1, one_float, {
    y[j] = 0.5f * x[j] * (1 + tanhf(0.79788456f * (x[j] + 0.044715f * x[j] * x[j] * x[j]))); /* another function */
})
ROW_KERNEL(root, "Root_right", 1, one_float, { y[j] = sqrtf(x[j]); })
ROW_KERNEL(root_zero, "Root_zero", 1, one_float, { y[j] = x[j] < 0 ? 0 : sqrtf(x[j]); }) /* loses a NaN */

static int32_t always(void) { return 1; }

static const tile_kernel* const kernels[] = {&linear, &linear_short, &gelu, &gelu_tanh, &root, &root_zero};

static const tile_variant variants[] = {{"any", always, sizeof kernels / sizeof kernels[0], kernels}};

const tile_library tile_generated_library = {TILE_ABI_VERSION, 1, variants, NULL};
