#define _POSIX_C_SOURCE 200809L

#include "cuda_driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { REASON_BYTES = 512 };

static pthread_once_t once = PTHREAD_ONCE_INIT;
static cu_driver driver;
static char reason[REASON_BYTES]; /* empty when the driver is there */

/* In the order of `cu_driver`'s members. */
static const char* const names[] = {
    "cuGetErrorString",     "cuCtxGetCurrent",  "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2",
    "cuCtxGetDevice",       "cuStreamGetCtx",   "cuDeviceGetAttribute", "cuDeviceGetName",
    "cuModuleLoadData",     "cuModuleUnload",   "cuModuleGetFunction", "cuFuncSetAttribute",
    "cuOccupancyMaxActiveClusters", "cuTensorMapEncodeTiled", "cuMemsetD2D32Async", "cuLaunchKernelEx",
};

_Static_assert(sizeof names / sizeof names[0] == sizeof driver / sizeof(void*), "a name per function");

static void open_driver(void) {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char* said = dlerror();
        snprintf(reason, sizeof reason, "the CUDA driver was not found (%s)", said == NULL ? "libcuda.so.1" : said);
        return;
    }
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        void* found = dlsym(library, names[i]);
        if (found == NULL) {
            snprintf(reason, sizeof reason, "the CUDA driver has no %s: kernels need that of CUDA 12 or newer", names[i]);
            return;
        }
        memcpy((char*)&driver + i * sizeof found, &found, sizeof found);
    }
}

const cu_driver* tile_cuda_driver(const char** why) {
    pthread_once(&once, open_driver);
    *why = reason;
    return reason[0] == '\0' ? &driver : NULL;
}
