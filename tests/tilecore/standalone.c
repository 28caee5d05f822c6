/* Runs kernels as a program of its own: reads calls from the first file, writes their outputs to the second.
 *
 * A call: the kernel's number, then per input its rank, its dims and its bytes. Every tensor and the scratch have memory
 * of exactly their size, so that a sanitizer sees an access beyond it. Outputs and scratch start as ones in every bit.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tile_kernel.h"

enum { MAX_TENSORS = 64 };

static void fail(const char* what) {
    fprintf(stderr, "%s\n", what);
    exit(2);
}

static size_t element_bytes(int32_t type) { /* of an ONNX TensorProto.DataType */
    switch (type) {
    case 1: case 6: return 4;
    case 2: case 3: case 9: return 1;
    case 4: case 5: case 10: case 16: return 2;
    case 7: case 11: return 8;
    default: fail("unknown type"); return 0;
    }
}

static void read_exactly(FILE* file, void* to, size_t size) {
    if (size != 0 && fread(to, 1, size, file) != size) fail("the input ends early");
}

static void* filled(size_t size) {
    void* memory = NULL;
    if (posix_memalign(&memory, 64, size ? size : 1) != 0) fail("no memory");
    memset(memory, 0xff, size);
    return memory;
}

static size_t tensor_bytes(int32_t type, int64_t rank, const int64_t* dims) {
    size_t count = element_bytes(type);
    for (int64_t axis = 0; axis < rank; axis++) count *= (size_t)dims[axis];
    return count;
}

static void run_call(const tile_kernel* kernel, FILE* in, FILE* out) {
    int64_t shapes[MAX_TENSORS][TILE_MAX_RANK], symbols[TILE_MAX_SYMBOLS] = {0};
    const int64_t* rows[MAX_TENSORS];
    int32_t ranks[MAX_TENSORS];
    void *inputs[MAX_TENSORS], *outputs[MAX_TENSORS];
    size_t sizes[MAX_TENSORS];
    for (int32_t i = 0; i < kernel->n_inputs; i++) {
        int64_t rank = 0;
        read_exactly(in, &rank, sizeof rank);
        read_exactly(in, shapes[i], (size_t)rank * sizeof(int64_t));
        size_t size = tensor_bytes(kernel->input_types[i], rank, shapes[i]);
        inputs[i] = filled(size);
        read_exactly(in, inputs[i], size);
        rows[i] = shapes[i];
        ranks[i] = (int32_t)rank;
    }
    char error[256] = "";
    if (kernel->bind(rows, ranks, symbols, error, sizeof error) != 0) fail(error);
    for (int32_t i = 0; i < kernel->n_outputs; i++) {
        int64_t dims[TILE_MAX_RANK];
        kernel->shape(symbols, i, dims);
        sizes[i] = tensor_bytes(kernel->outputs[i].type, kernel->outputs[i].rank, dims);
        outputs[i] = filled(sizes[i]);
    }
    void* scratch = filled(kernel->scratch(symbols));
    int64_t copied = -1;
    kernel->run(symbols, (const void* const*)inputs, outputs, scratch, &copied, 0, kernel->tasks(symbols));
    for (int32_t i = 0; i < kernel->n_outputs; i++) {
        if (sizes[i] != 0 && fwrite(outputs[i], 1, sizes[i], out) != sizes[i]) fail("cannot write");
        free(outputs[i]);
    }
    for (int32_t i = 0; i < kernel->n_inputs; i++) free(inputs[i]);
    free(scratch);
}

int main(int argc, char** argv) {
    if (argc != 3) fail("two files are needed");
    FILE *in = fopen(argv[1], "rb"), *out = fopen(argv[2], "wb");
    if (in == NULL || out == NULL) fail("cannot open the files");
    const tile_variant* variant = &tile_generated_library.variants[0];
    int64_t number = 0;
    while (fread(&number, sizeof number, 1, in) == 1) {
        if (number < 0 || number >= variant->n_kernels) fail("no such kernel");
        run_call(variant->kernels[number], in, out);
    }
    fclose(in);
    return fclose(out) == 0 ? 0 : 2;
}
