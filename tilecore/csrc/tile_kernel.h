/* What a generated kernel offers to whoever runs it: the custom-op shim, the plugin EP, the Python callable.
 *
 * A host binds the symbolic dims of a call from its input shapes (`bind`), allocates the outputs (`shape`), then runs
 * tasks [begin, end) of `tasks` in any order on any threads, each thread with its own `scratch` bytes (64-byte aligned,
 * not shared while in use, contents undefined). `group` tasks in a row share copies of inputs, which stay in `scratch`:
 * `copied` is the group whose copies an earlier `run` of the same call left there, or -1. Kernels never allocate, never
 * throw, never keep state elsewhere.
 */
#ifndef TILE_KERNEL_H
#define TILE_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#define TILE_ABI_VERSION 5
#define TILE_MAX_RANK 8
#define TILE_MAX_SYMBOLS 32

enum tile_dim_kind {
    TILE_DIM_CONST = 0,    /* the dim is `value` */
    TILE_DIM_INPUT = 1,    /* the dim equals dim `axis` of input `input` */
    TILE_DIM_COMPUTED = 2, /* an expression of several dims: known at run time only, from `shape` */
};

typedef struct tile_dim {
    int32_t kind;
    int32_t input;
    int32_t axis;
    int64_t value;
} tile_dim;

typedef struct tile_output {
    int32_t type; /* ONNX TensorProto.DataType */
    int32_t rank;
    const tile_dim* dims; /* [rank], for shape inference before any input is known */
} tile_output;

typedef struct tile_kernel {
    const char* name; /* operator type in domain "tilefuse"; carries the signature hash */
    int32_t n_inputs;
    int32_t n_outputs;
    const int32_t* input_types; /* [n_inputs] ONNX TensorProto.DataType */
    const tile_output* outputs; /* [n_outputs] */

    /* Reads the symbols off the input shapes and checks every dim against the signature. Returns 0, or 1 with a
     * message in `error` that names the input, the dim, what was found and what was expected. */
    int32_t (*bind)(const int64_t* const* shapes, const int32_t* ranks, int64_t* symbols, char* error, size_t error_size);
    void (*shape)(const int64_t* symbols, int32_t output, int64_t* dims); /* writes outputs[output].rank dims */
    int64_t (*tasks)(const int64_t* symbols);  /* independent grid points; 0 when an output is empty */
    int64_t (*group)(const int64_t* symbols);  /* so many tasks in a row share copies: cheapest on one thread */
    size_t (*scratch)(const int64_t* symbols); /* bytes per thread */
    int64_t (*work)(const int64_t* symbols);   /* estimated cost of the whole call in nanoseconds of one core */
    void (*run)(const int64_t* symbols, const void* const* inputs, void* const* outputs, void* scratch, int64_t* copied,
                int64_t begin, int64_t end);
    /* Reads indices that inputs bring, before `run`: 0, or 1 with a message when one is out of range. NULL: there are
     * none. `run` itself stays inside its inputs whatever they hold, and gives NaN there. */
    int32_t (*check)(const int64_t* symbols, const void* const* inputs, char* error, size_t error_size);
} tile_kernel;

/* All kernels of one library for one instruction set. `supported` asks the running processor. */
typedef struct tile_variant {
    const char* isa; /* "x86-64-v4", "x86-64-v3", ... */
    int32_t (*supported)(void);
    int32_t n_kernels;
    const tile_kernel* const* kernels; /* the same names in the same order in every variant */
} tile_variant;

typedef struct tile_library {
    int32_t abi; /* TILE_ABI_VERSION */
    int32_t n_variants;
    const tile_variant* variants; /* best first */
    const struct tile_cuda_kernel* const* cuda; /* by position, as `kernels`; NULL where one has none, or all of it */
} tile_library;

/* Defined by the generated library.c that is linked with the shim. */
extern const tile_library tile_generated_library;

#endif
