/* The part of the CUDA driver's C interface that launching needs, from libcuda.so.1 when it is first asked for: the
 * library itself depends on libc alone and loads where there is no driver.
 */
#ifndef CUDA_DRIVER_H
#define CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef int cu_result; /* 0 is success */
typedef int cu_device;
typedef struct cu_context_st* cu_context;
typedef struct cu_module_st* cu_module;
typedef struct cu_function_st* cu_function;
typedef struct cu_stream_st* cu_stream;

typedef struct cu_tensor_map {
    _Alignas(64) uint64_t words[16];
} cu_tensor_map;

typedef struct cu_attribute {
    int32_t id;
    int32_t pad;
    union {
        char bytes[64];
        struct {
            uint32_t x, y, z;
        } cluster;
        int32_t early;
    } value;
} cu_attribute;

typedef struct cu_launch {
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t shared_bytes;
    cu_stream stream;
    cu_attribute* attributes;
    uint32_t n_attributes;
} cu_launch;

enum {
    CU_PROCESSORS = 16,       /* of a device */
    CU_CAPABILITY_MAJOR = 75,
    CU_CAPABILITY_MINOR = 76,
    CU_SHARED_BYTES = 97, /* that one block may have */
    CU_MAX_DYNAMIC_SHARED = 8, /* of a function */
    CU_WIDE_CLUSTER = 14,
    CU_CLUSTER_SHAPE = 4,      /* of a launch */
    CU_EARLY = 6,              /* it may begin before the one before it in its stream has ended */
    CU_PORTABLE_CLUSTER = 8,   /* blocks that any card's clusters may have */
};

typedef struct cu_driver {
    cu_result (*cuGetErrorString)(cu_result status, const char** text);
    cu_result (*cuCtxGetCurrent)(cu_context* out);
    cu_result (*cuCtxPushCurrent_v2)(cu_context context);
    cu_result (*cuCtxPopCurrent_v2)(cu_context* out);
    cu_result (*cuCtxGetDevice)(cu_device* out);
    cu_result (*cuStreamGetCtx)(cu_stream stream, cu_context* out);
    cu_result (*cuDeviceGetAttribute)(int* out, int attribute, cu_device device);
    cu_result (*cuDeviceGetName)(char* name, int bytes, cu_device device);
    cu_result (*cuModuleLoadData)(cu_module* out, const void* image);
    cu_result (*cuModuleUnload)(cu_module module);
    cu_result (*cuModuleGetFunction)(cu_function* out, cu_module module, const char* name);
    cu_result (*cuFuncSetAttribute)(cu_function function, int attribute, int value);
    cu_result (*cuOccupancyMaxActiveClusters)(int* out, cu_function function, const cu_launch* launch);
    cu_result (*cuTensorMapEncodeTiled)(cu_tensor_map* map, int type, uint32_t rank, void* address,
                                        const uint64_t* dims, const uint64_t* pitches, const uint32_t* box,
                                        const uint32_t* steps, int interleave, int swizzle, int promotion, int fill);
    cu_result (*cuMemsetD2D32Async)(uintptr_t address, size_t pitch, uint32_t word, size_t words, size_t rows,
                                    cu_stream stream);
    cu_result (*cuLaunchKernelEx)(const cu_launch* launch, cu_function function, void** arguments, void** extra);
} cu_driver;

/* The driver, or NULL with the reason in `*why`, which stays. Any number of threads may ask at once. */
const cu_driver* tile_cuda_driver(const char** why);

#endif
