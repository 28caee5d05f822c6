/* The generated kernels as custom ops of one ONNX Runtime: made once per runtime, kept for the life of the process. */
#ifndef CUSTOM_OPS_H
#define CUSTOM_OPS_H

#include "kernel_call.h"

typedef struct tile_op {
    OrtCustomOp op; /* first: ONNX Runtime hands back a pointer to it */
    const tile_host* host;
    const tile_kernel* kernel;
} tile_op;

typedef struct tile_ops {
    const OrtApiBase* base;
    tile_host host;
    OrtCustomOpDomain* domain; /* NULL when there are no ops */
    int32_t count;
    struct tile_ops* next;
    tile_op ops[];
} tile_ops;

/* The ops of the runtime `base`. `*out` is NULL when this processor or this ONNX Runtime cannot run the library: a line
 * on stderr says so, and the model runs through its function bodies. */
OrtStatus* tile_ops_for(const OrtApiBase* base, const tile_ops** out);

#endif
