/* A region's kernels for NVIDIA cards, launched from inside ONNX Runtime on the stream of its CUDA provider. */
#ifndef CUDA_CALL_H
#define CUDA_CALL_H

#include "kernel_call.h"
#include "tile_cuda.h"

/* The kernels of one region and what is loaded of them, by context. */
typedef struct tile_card tile_card;

OrtStatus* tile_create_card(const tile_host* host, const tile_kernel* kernel, const tile_cuda_kernel* cuda,
                            tile_card** out);
void tile_destroy_card(tile_card* card);

/* Loads the kernels for the calling thread's context, if there is one already: a wrong card or driver then fails a
 * session when it is made, and runs may be captured in graphs. */
OrtStatus* tile_prepare_card(const tile_host* host, const char* op, tile_card* card);

/* Enqueues the launches of one call; tensors are in device memory. Any number of threads may call it at once. */
OrtStatus* tile_call_card(const tile_host* host, const tile_kernel* kernel, tile_card* card, OrtKernelContext* context);

#endif
