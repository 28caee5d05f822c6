/* The generated kernels as custom ops of one ONNX Runtime: made once per runtime, kept for the life of the process. */
#ifndef CUSTOM_OPS_H
#define CUSTOM_OPS_H

#include "cuda_call.h"
#include "kernel_call.h"

typedef struct tile_op {
    OrtCustomOp op; /* first: ONNX Runtime hands back a pointer to it */
    const tile_host* host;
    const tile_kernel* kernel;
    tile_card* card; /* its kernels for NVIDIA cards, of the op for the CUDA provider; NULL of the CPU's */
} tile_op;

typedef struct tile_ops {
    const OrtApiBase* base;
    tile_host host;
    OrtCustomOpDomain* domain; /* NULL when there are no ops */
    int32_t count;    /* of ops for the CPU: one per kernel */
    int32_t on_cards; /* of ops for the CUDA provider, which follow them, under names of theirs */
    struct tile_ops* next;
    tile_op ops[];
} tile_ops;

/* The ops of the runtime `base`. `*out` is NULL when this processor or this ONNX Runtime cannot run the library: a line
 * on stderr says so, and the model runs through its function bodies. */
OrtStatus* tile_ops_for(const OrtApiBase* base, const tile_ops** out);

#endif
