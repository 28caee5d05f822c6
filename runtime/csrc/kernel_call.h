/* One call of a generated kernel from inside ONNX Runtime: shapes in, outputs allocated, tasks run on the session's
 * threads. Shared by the custom ops and by the execution provider. */
#ifndef KERNEL_CALL_H
#define KERNEL_CALL_H

#include "ort_abi.h"
#include "tile_kernel.h"

#define TILE_DOMAIN "tilefuse"
#define TILE_MAX_INPUTS 64
#define TILE_MAX_OUTPUTS 16

#define TILE_EXPORT __attribute__((visibility("default")))

/* Hands a failure of ONNX Runtime's on to the caller, who owns it then. */
#define TILE_TRY(call)                                 \
    do {                                               \
        OrtStatus* tile_status_ = (call);              \
        if (tile_status_ != NULL) return tile_status_; \
    } while (0)

/* One ONNX Runtime of the process. */
typedef struct tile_host {
    const OrtApi* api;
    bool shapes_by_reference; /* API 24: reading a shape allocates nothing */
    int64_t cores;            /* of this machine: what calls are cut for */
} tile_host;

/* True and `host` filled in; false when this ONNX Runtime is older than API 17 (its own line is on stderr then). */
bool tile_open_host(const OrtApiBase* base, tile_host* host);

/* The minor version of ONNX Runtime 1.x; very large from 2.0 on. */
unsigned tile_ort_minor(const OrtApiBase* base);

/* The library's first variant that this processor runs, or NULL. */
const tile_variant* tile_supported_variant(void);

/* What a call of a kernel is given: symbols, and where its tensors lie. */
typedef struct tile_binding {
    int64_t symbols[TILE_MAX_SYMBOLS];
    const void* inputs[TILE_MAX_INPUTS];
    void* outputs[TILE_MAX_OUTPUTS];
} tile_binding;

/* Reads the inputs of `context` and allocates its outputs, in whatever memory the node's provider has. */
OrtStatus* tile_bind_call(const tile_host* host, const tile_kernel* kernel, OrtKernelContext* context,
                          tile_binding* binding);

/* Runs `kernel` on the inputs of `context` and writes its outputs. Any number of threads may call it at once. */
OrtStatus* tile_call_kernel(const tile_host* host, const tile_kernel* kernel, OrtKernelContext* context);

/* A status "OP: MESSAGE", the message as printf has it. */
__attribute__((format(printf, 4, 5))) OrtStatus* tile_refuse(const OrtApi* api, OrtErrorCode code, const char* op,
                                                             const char* format, ...);

#endif
