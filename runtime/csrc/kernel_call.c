/* How one call runs. ONNX Runtime gives the input tensors; the kernel's `bind` turns their shapes into symbols or says
 * what is wrong with them; the outputs are allocated; then the tasks are cut into contiguous chunks, which the
 * session's own thread pool takes (threads of ours would fight its spinning ones).
 *
 * The path is short on purpose: a transformer has about a hundred such calls a run, some of a few microseconds.
 */
#define _POSIX_C_SOURCE 200809L

#include "kernel_call.h"
#include "tile_chunks.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum {
    MESSAGE_BYTES = 1024,
    SCRATCH_ALIGNMENT = 64,
    SCRATCH_ROUNDING = 1 << 16,
};

typedef struct call {
    const tile_kernel* kernel;
    size_t scratch_bytes;
    int64_t number; /* of all calls of the process */
    tile_chunks chunks;
    atomic_bool out_of_memory;
    tile_binding bound;
} call;

/* ---- the host ---- */

unsigned tile_ort_minor(const OrtApiBase* base) {
    unsigned major = 0;
    unsigned minor = 0;
    if (sscanf(base->GetVersionString(), "%u.%u", &major, &minor) != 2) return 0;
    return major > 1 ? UINT32_MAX : minor;
}

bool tile_open_host(const OrtApiBase* base, tile_host* host) {
    host->shapes_by_reference = tile_ort_minor(base) >= ORT_API_KERNEL_EP;
    host->api = base->GetApi(host->shapes_by_reference ? ORT_API_KERNEL_EP : ORT_API_CUSTOM_OPS);
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    host->cores = cores > 0 ? cores : 1;
    return host->api != NULL;
}

const tile_variant* tile_supported_variant(void) {
    for (int32_t i = 0; i < tile_generated_library.n_variants; i++) {
        const tile_variant* variant = &tile_generated_library.variants[i];
        if (variant->supported()) return variant;
    }
    return NULL;
}

OrtStatus* tile_refuse(const OrtApi* api, OrtErrorCode code, const char* op, const char* format, ...) {
    char text[MESSAGE_BYTES];
    int used = snprintf(text, sizeof text, "%.255s: ", op);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, sizeof text - (size_t)used, format, arguments);
    va_end(arguments);
    return api->CreateStatus(code, text);
}

/* ---- scratch: one growing block per thread, freed when the thread ends ---- */

typedef struct scratch_block {
    size_t capacity; /* usable bytes, from SCRATCH_ALIGNMENT on */
    int64_t call;    /* the number of the call that used it last */
    int64_t copied;  /* the group of that call whose copies it holds, or -1 */
} scratch_block;

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
static bool scratch_ready;
static atomic_int_fast64_t calls; /* so far, in all sessions */

static void create_scratch_key(void) { scratch_ready = pthread_key_create(&scratch_key, free) == 0; }

/* This thread's block of at least `bytes`, or NULL when there is no memory. */
static scratch_block* thread_scratch(size_t bytes) {
    pthread_once(&scratch_once, create_scratch_key);
    if (!scratch_ready) return NULL;
    scratch_block* block = pthread_getspecific(scratch_key);
    if (block == NULL || block->capacity < bytes) {
        if (bytes > SIZE_MAX - SCRATCH_ROUNDING - SCRATCH_ALIGNMENT) return NULL;
        free(block);
        size_t capacity = (bytes + SCRATCH_ROUNDING - 1) / SCRATCH_ROUNDING * SCRATCH_ROUNDING;
        block = aligned_alloc(SCRATCH_ALIGNMENT, SCRATCH_ALIGNMENT + capacity);
        if (block != NULL) *block = (scratch_block){.capacity = capacity, .call = 0, .copied = -1};
        if (pthread_setspecific(scratch_key, block) != 0) {
            free(block);
            return NULL;
        }
    }
    return block;
}

/* ---- inputs and outputs ---- */

/* The type and shape of `value` before API 24: through an object, copied into `storage`. */
static OrtStatus* copy_shape(const OrtApi* api, const OrtValue* value, int32_t* type, int64_t* storage, size_t* rank) {
    OrtTensorTypeAndShapeInfo* info = NULL;
    TILE_TRY(api->GetTensorTypeAndShape(value, &info));
    OrtStatus* status = api->GetTensorElementType(info, type);
    if (status == NULL) status = api->GetDimensionsCount(info, rank);
    if (status == NULL && *rank <= TILE_MAX_RANK) status = api->GetDimensions(info, storage, *rank);
    api->ReleaseTensorTypeAndShapeInfo(info);
    return status;
}

/* Fills in `inputs` and `symbols` of `binding`. */
static OrtStatus* bind_inputs(const tile_host* host, const tile_kernel* kernel, OrtKernelContext* context,
                              tile_binding* binding) {
    const OrtApi* api = host->api;
    int64_t storage[TILE_MAX_INPUTS][TILE_MAX_RANK];
    const int64_t* shapes[TILE_MAX_INPUTS];
    int32_t ranks[TILE_MAX_INPUTS];
    for (int32_t i = 0; i < kernel->n_inputs; i++) {
        const OrtValue* value = NULL;
        TILE_TRY(api->KernelContext_GetInput(context, (size_t)i, &value));
        if (value == NULL) return tile_refuse(api, ORT_INVALID_ARGUMENT, kernel->name, "input %d is missing", (int)i);
        int32_t type = 0;
        size_t rank = 0;
        shapes[i] = storage[i];
        if (host->shapes_by_reference) {
            TILE_TRY(api->GetTensorElementTypeAndShapeDataReference(value, &type, &shapes[i], &rank));
        } else {
            TILE_TRY(copy_shape(api, value, &type, storage[i], &rank));
        }
        if (type != kernel->input_types[i]) {
            return tile_refuse(api, ORT_INVALID_ARGUMENT, kernel->name,
                               "input %d has ONNX element type %d, expected %d", (int)i, (int)type,
                               (int)kernel->input_types[i]);
        }
        if (rank > TILE_MAX_RANK) {
            return tile_refuse(api, ORT_INVALID_ARGUMENT, kernel->name, "input %d has rank %zu, expected at most %d",
                               (int)i, rank, TILE_MAX_RANK);
        }
        ranks[i] = (int32_t)rank;
        void* data = NULL;
        TILE_TRY(api->GetTensorMutableData((OrtValue*)value, &data));
        binding->inputs[i] = data;
    }
    char error[MESSAGE_BYTES];
    error[0] = '\0';
    if (kernel->bind(shapes, ranks, binding->symbols, error, sizeof error) != 0) {
        return tile_refuse(api, ORT_INVALID_ARGUMENT, kernel->name, "%s", error);
    }
    return NULL;
}

static OrtStatus* allocate_outputs(const tile_host* host, const tile_kernel* kernel, OrtKernelContext* context,
                                   tile_binding* binding) {
    const OrtApi* api = host->api;
    for (int32_t i = 0; i < kernel->n_outputs; i++) {
        int64_t dims[TILE_MAX_RANK];
        kernel->shape(binding->symbols, i, dims);
        OrtValue* value = NULL;
        TILE_TRY(api->KernelContext_GetOutput(context, (size_t)i, dims, (size_t)kernel->outputs[i].rank, &value));
        if (value == NULL) {
            return tile_refuse(api, ORT_INVALID_ARGUMENT, kernel->name, "the node leaves out output %d", (int)i);
        }
        TILE_TRY(api->GetTensorMutableData(value, &binding->outputs[i]));
    }
    return NULL;
}

OrtStatus* tile_bind_call(const tile_host* host, const tile_kernel* kernel, OrtKernelContext* context,
                          tile_binding* binding) {
    TILE_TRY(bind_inputs(host, kernel, context, binding));
    return allocate_outputs(host, kernel, context, binding);
}

/* ---- tasks ---- */

/* Chunk `index` of the call: units in a row. */
static void run_chunk(void* data, size_t index) {
    call* job = data;
    void* scratch = NULL;
    int64_t* copied = NULL;
    if (job->scratch_bytes != 0) {
        scratch_block* block = thread_scratch(job->scratch_bytes);
        if (block == NULL) {
            atomic_store_explicit(&job->out_of_memory, true, memory_order_relaxed);
            return;
        }
        if (block->call != job->number) block->copied = -1;
        block->call = job->number;
        scratch = (char*)block + SCRATCH_ALIGNMENT;
        copied = &block->copied;
    }
    int64_t chunk = (int64_t)index;
    int64_t begin = tile_first_task(&job->chunks, chunk);
    int64_t end = tile_first_task(&job->chunks, chunk + 1);
    const tile_binding* bound = &job->bound;
    job->kernel->run(bound->symbols, bound->inputs, bound->outputs, scratch, copied, begin, end);
}

OrtStatus* tile_call_kernel(const tile_host* host, const tile_kernel* kernel, OrtKernelContext* context) {
    call job;
    job.kernel = kernel;
    TILE_TRY(bind_inputs(host, kernel, context, &job.bound));
    const int64_t* symbols = job.bound.symbols;
    if (kernel->check != NULL) {
        char error[MESSAGE_BYTES];
        error[0] = '\0';
        if (kernel->check(symbols, job.bound.inputs, error, sizeof error) != 0) {
            return tile_refuse(host->api, ORT_INVALID_ARGUMENT, kernel->name, "%s", error);
        }
    }
    TILE_TRY(allocate_outputs(host, kernel, context, &job.bound));
    int64_t tasks = kernel->tasks(symbols);
    if (tasks <= 0) return NULL;
    job.scratch_bytes = kernel->scratch(symbols);
    job.number = atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed) + 1;
    atomic_init(&job.out_of_memory, false);
    job.chunks = tile_cut(kernel, symbols, tasks, host->cores);
    if (job.chunks.count == 1) {
        run_chunk(&job, 0);
    } else {
        /* As many batches as chunks: a thread that has done its share takes over chunks of the others. */
        size_t chunks = (size_t)job.chunks.count;
        TILE_TRY(host->api->KernelContext_ParallelFor(context, run_chunk, chunks, chunks, &job));
    }
    if (atomic_load_explicit(&job.out_of_memory, memory_order_relaxed)) {
        return tile_refuse(host->api, ORT_FAIL, kernel->name, "no memory for %zu bytes of scratch per thread",
                           job.scratch_bytes);
    }
    return NULL;
}
