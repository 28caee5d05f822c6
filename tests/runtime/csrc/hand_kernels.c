/* A library of kernels written by hand, to test their hosts without the compiler.
 *
 * Two variants: one that no processor supports, then the real one. -DHAND_UNSUPPORTED leaves only the first,
 * -DHAND_EMPTY no kernel at all.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "tile_kernel.h"

enum { FLOAT = 1, INT64 = 7 };

#define DIM_CONST(number) {TILE_DIM_CONST, 0, 0, number}
#define DIM_INPUT(index, position) {TILE_DIM_INPUT, index, position, 0}
#define DIM_COMPUTED {TILE_DIM_COMPUTED, 0, 0, 0}

/* Calls of `run` since the library was loaded: tells a kernel from a function body. */
static atomic_llong calls;

__attribute__((visibility("default"))) long long hand_calls(void) { return atomic_load(&calls); }

/* Copies that AddFirst_0f has made. */
static atomic_llong copies;

__attribute__((visibility("default"))) long long hand_copies(void) { return atomic_load(&copies); }

static void count_call(void) { atomic_fetch_add(&calls, 1); }

static int64_t rows_as_tasks(const int64_t* symbols) { return symbols[0]; }
static int64_t ungrouped(const int64_t* symbols) {
    (void)symbols;
    return 1;
}
static int64_t elements_as_work(const int64_t* symbols) { return symbols[0] * symbols[1]; }
static size_t no_scratch(const int64_t* symbols) {
    (void)symbols;
    return 0;
}

/* ---- ScaleAdd_0a: y[n, m] = x[n, m] * s[m] + 1 ---- */

static int32_t scale_bind(const int64_t* const* shapes, const int32_t* ranks, int64_t* symbols, char* error,
                          size_t size) {
    if (ranks[0] != 2 || ranks[1] != 1) {
        snprintf(error, size, "ranks are %d and %d, expected 2 and 1", (int)ranks[0], (int)ranks[1]);
        return 1;
    }
    if (shapes[1][0] != shapes[0][1]) {
        snprintf(error, size, "input 1 dim 0 is %lld, expected %lld", (long long)shapes[1][0], (long long)shapes[0][1]);
        return 1;
    }
    symbols[0] = shapes[0][0];
    symbols[1] = shapes[0][1];
    return 0;
}

static void matrix_shape(const int64_t* symbols, int32_t output, int64_t* dims) {
    (void)output;
    dims[0] = symbols[0];
    dims[1] = symbols[1];
}

static void scale_run(const int64_t* symbols, const void* const* inputs, void* const* outputs, void* scratch,
                      int64_t* copied, int64_t begin, int64_t end) {
    (void)scratch;
    (void)copied;
    count_call();
    const float* x = inputs[0];
    const float* s = inputs[1];
    float* y = outputs[0];
    for (int64_t i = begin; i < end; i++) {
        for (int64_t j = 0; j < symbols[1]; j++) y[i * symbols[1] + j] = x[i * symbols[1] + j] * s[j] + 1.0f;
    }
}

static const tile_kernel scale = {
    .name = "ScaleAdd_0a",
    .n_inputs = 2,
    .n_outputs = 1,
    .input_types = (const int32_t[]){FLOAT, FLOAT},
    .outputs = (const tile_output[]){{FLOAT, 2, (const tile_dim[]){DIM_INPUT(0, 0), DIM_INPUT(0, 1)}}},
    .bind = scale_bind,
    .shape = matrix_shape,
    .tasks = rows_as_tasks,
    .group = ungrouped,
    .scratch = no_scratch,
    .work = elements_as_work,
    .run = scale_run,
};

/* ---- MeanSplit_0b: mean[n, 1] of x[n, m] over m, and x - mean: through scratch ---- */

static int32_t mean_bind(const int64_t* const* shapes, const int32_t* ranks, int64_t* symbols, char* error,
                         size_t size) {
    if (ranks[0] != 2) {
        snprintf(error, size, "input 0 has rank %d, expected 2", (int)ranks[0]);
        return 1;
    }
    symbols[0] = shapes[0][0];
    symbols[1] = shapes[0][1];
    return 0;
}

static void mean_shape(const int64_t* symbols, int32_t output, int64_t* dims) {
    dims[0] = symbols[0];
    dims[1] = output == 0 ? 1 : symbols[1];
}

static size_t row_of_scratch(const int64_t* symbols) { return (size_t)symbols[1] * sizeof(float); }

static void mean_run(const int64_t* symbols, const void* const* inputs, void* const* outputs, void* scratch,
                     int64_t* copied, int64_t begin, int64_t end) {
    (void)copied;
    count_call();
    int64_t m = symbols[1];
    float* row = scratch;
    for (int64_t i = begin; i < end; i++) {
        if (m > 0) memcpy(row, (const float*)inputs[0] + i * m, (size_t)m * sizeof(float));
        float sum = 0;
        for (int64_t j = 0; j < m; j++) sum += row[j];
        float mean = sum / (float)m;
        for (int64_t j = 0; j < m; j++) row[j] -= mean;
        ((float*)outputs[0])[i] = mean;
        if (m > 0) memcpy((float*)outputs[1] + i * m, row, (size_t)m * sizeof(float));
    }
}

static const tile_kernel mean_split = {
    .name = "MeanSplit_0b",
    .n_inputs = 1,
    .n_outputs = 2,
    .input_types = (const int32_t[]){FLOAT},
    .outputs =
        (const tile_output[]){
            {FLOAT, 2, (const tile_dim[]){DIM_INPUT(0, 0), DIM_CONST(1)}},
            {FLOAT, 2, (const tile_dim[]){DIM_INPUT(0, 0), DIM_INPUT(0, 1)}},
        },
    .bind = mean_bind,
    .shape = mean_shape,
    .tasks = rows_as_tasks,
    .group = ungrouped,
    .scratch = row_of_scratch,
    .work = elements_as_work,
    .run = mean_run,
};

/* ---- Repeat_0c: y[2 p + 1] = x, x, 0: a dim that is known at run time only ---- */

static int32_t repeat_bind(const int64_t* const* shapes, const int32_t* ranks, int64_t* symbols, char* error,
                           size_t size) {
    if (ranks[0] != 1) {
        snprintf(error, size, "input 0 has rank %d, expected 1", (int)ranks[0]);
        return 1;
    }
    symbols[0] = shapes[0][0];
    return 0;
}

static void repeat_shape(const int64_t* symbols, int32_t output, int64_t* dims) {
    (void)output;
    dims[0] = 2 * symbols[0] + 1;
}

static int64_t one_task(const int64_t* symbols) {
    (void)symbols;
    return 1;
}

static int64_t length_as_work(const int64_t* symbols) { return symbols[0]; }

static void repeat_run(const int64_t* symbols, const void* const* inputs, void* const* outputs, void* scratch,
                       int64_t* copied, int64_t begin, int64_t end) {
    (void)scratch;
    (void)copied;
    (void)begin;
    (void)end;
    count_call();
    const float* x = inputs[0];
    float* y = outputs[0];
    for (int64_t i = 0; i < 2 * symbols[0]; i++) y[i] = x[i % symbols[0]];
    y[2 * symbols[0]] = 0;
}

static const tile_kernel repeat = {
    .name = "Repeat_0c",
    .n_inputs = 1,
    .n_outputs = 1,
    .input_types = (const int32_t[]){FLOAT},
    .outputs = (const tile_output[]){{FLOAT, 1, (const tile_dim[]){DIM_COMPUTED}}},
    .bind = repeat_bind,
    .shape = repeat_shape,
    .tasks = one_task,
    .group = ungrouped,
    .scratch = no_scratch,
    .work = length_as_work,
    .run = repeat_run,
};

/* ---- Triple_0d: y[n, 3] = x[n], three times, of int64 ---- */

static void triple_shape(const int64_t* symbols, int32_t output, int64_t* dims) {
    (void)output;
    dims[0] = symbols[0];
    dims[1] = 3;
}

static void triple_run(const int64_t* symbols, const void* const* inputs, void* const* outputs, void* scratch,
                       int64_t* copied, int64_t begin, int64_t end) {
    (void)symbols;
    (void)scratch;
    (void)copied;
    count_call();
    for (int64_t i = begin * 3; i < end * 3; i++) ((int64_t*)outputs[0])[i] = ((const int64_t*)inputs[0])[i / 3];
}

static const tile_kernel triple = {
    .name = "Triple_0d",
    .n_inputs = 1,
    .n_outputs = 1,
    .input_types = (const int32_t[]){INT64},
    .outputs = (const tile_output[]){{INT64, 2, (const tile_dim[]){DIM_INPUT(0, 0), DIM_CONST(3)}}},
    .bind = repeat_bind,
    .shape = triple_shape,
    .tasks = rows_as_tasks,
    .group = ungrouped,
    .scratch = no_scratch,
    .work = length_as_work,
    .run = triple_run,
};

/* ---- Hungry_0e: ScaleAdd with more scratch than any machine has ---- */

static size_t endless_scratch(const int64_t* symbols) {
    (void)symbols;
    return (size_t)1 << 60;
}

static const tile_kernel hungry = {
    .name = "Hungry_0e",
    .n_inputs = 2,
    .n_outputs = 1,
    .input_types = (const int32_t[]){FLOAT, FLOAT},
    .outputs = (const tile_output[]){{FLOAT, 2, (const tile_dim[]){DIM_INPUT(0, 0), DIM_INPUT(0, 1)}}},
    .bind = scale_bind,
    .shape = matrix_shape,
    .tasks = rows_as_tasks,
    .group = ungrouped,
    .scratch = endless_scratch,
    .work = elements_as_work,
    .run = scale_run,
};

/* ---- AddFirst_0f: y[g, 4, m] = x[g, i, m] + x[g, 0, m]: the first row is copied once for a group of four tasks ---- */

enum { GROUP = 4 };

static int32_t first_bind(const int64_t* const* shapes, const int32_t* ranks, int64_t* symbols, char* error,
                          size_t size) {
    if (ranks[0] != 3 || shapes[0][1] != GROUP) {
        snprintf(error, size, "input 0 is not [g, %d, m]", GROUP);
        return 1;
    }
    symbols[0] = shapes[0][0];
    symbols[1] = shapes[0][2];
    return 0;
}

static void first_shape(const int64_t* symbols, int32_t output, int64_t* dims) {
    (void)output;
    dims[0] = symbols[0];
    dims[1] = GROUP;
    dims[2] = symbols[1];
}

static int64_t first_tasks(const int64_t* symbols) { return symbols[0] * GROUP; }
static int64_t four(const int64_t* symbols) {
    (void)symbols;
    return GROUP;
}
static int64_t milliseconds(const int64_t* symbols) { return symbols[0] * 1000000; }

static void first_run(const int64_t* symbols, const void* const* inputs, void* const* outputs, void* scratch,
                      int64_t* copied, int64_t begin, int64_t end) {
    count_call();
    const float* x = inputs[0];
    float* y = outputs[0];
    float* row = scratch;
    int64_t m = symbols[1];
    for (int64_t task = begin; task < end; task++) {
        if (task / GROUP != *copied) {
            *copied = task / GROUP;
            atomic_fetch_add(&copies, 1);
            memcpy(row, x + *copied * GROUP * m, (size_t)m * sizeof(float));
        }
        for (int64_t j = 0; j < m; j++) y[task * m + j] = x[task * m + j] + row[j];
    }
}

static const tile_kernel add_first = {
    .name = "AddFirst_0f",
    .n_inputs = 1,
    .n_outputs = 1,
    .input_types = (const int32_t[]){FLOAT},
    .outputs = (const tile_output[]){{FLOAT, 3, (const tile_dim[]){DIM_INPUT(0, 0), DIM_CONST(GROUP), DIM_INPUT(0, 2)}}},
    .bind = first_bind,
    .shape = first_shape,
    .tasks = first_tasks,
    .group = four,
    .scratch = row_of_scratch,
    .work = milliseconds,
    .run = first_run,
};

/* ---- the library ---- */

static int32_t never(void) { return 0; }

#ifndef HAND_UNSUPPORTED
static int32_t always(void) { return 1; }
#endif

#ifdef HAND_EMPTY
enum { KERNELS = 0 };
#else
enum { KERNELS = 6 };
#endif

static const tile_kernel* const kernels[] = {&scale, &mean_split, &repeat, &triple, &hungry, &add_first};

static const tile_variant variants[] = {
    {"imaginary", never, KERNELS, kernels},
#ifndef HAND_UNSUPPORTED
    {"any", always, KERNELS, kernels},
#endif
};

const tile_library tile_generated_library = {TILE_ABI_VERSION, sizeof variants / sizeof variants[0], variants, NULL};
