/* How one call runs on a card: the processor's `bind` reads the sizes, outputs and scratch are allocated through ONNX
 * Runtime, then every launch gets tensor maps of this call's addresses and goes to the provider's stream. Nothing waits.
 * The last map of every tensor is kept: where ONNX Runtime hands out the same memory call after call, it is encoded once.
 *
 * Scratch goes back to ONNX Runtime's arena when the launches are enqueued: what is allocated there next is used on the
 * same stream, hence after them, as with the provider's own kernels.
 */
#define _POSIX_C_SOURCE 200809L

#include "cuda_call.h"
#include "cuda_driver.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    NAME_BYTES = 128,
    MAX_TENSORS = TILE_MAX_INPUTS + TILE_MAX_OUTPUTS + TILE_CUDA_MAX_SCRATCH,
    CU_EARLY_MAJOR = 9, /* compute capability from which kernels wait for the launch before them themselves */
    MAX_ARGUMENTS = TILE_CUDA_MAX_MAPS + TILE_CUDA_MAX_POINTERS + TILE_MAX_SYMBOLS,
};

/* A tensor map and what it was encoded of; an address of NULL: nothing yet. */
typedef struct kept_map {
    void* address;
    uint64_t dims[TILE_CUDA_MAX_RANK];
    uint64_t words[sizeof(cu_tensor_map) / sizeof(uint64_t)]; /* memory of these need not be aligned as a map's is */
} kept_map;

/* A launch's function in one context, how many tiles run there at the same time, and its maps, under the card's lock. */
typedef struct entry {
    cu_function function;
    int room;
    kept_map maps[TILE_CUDA_MAX_MAPS];
} entry;

typedef struct loaded {
    cu_context context;
    struct loaded* next;
    entry entries[TILE_CUDA_MAX_LAUNCHES];
} loaded;

struct tile_card {
    const tile_cuda_kernel* cuda;
    pthread_mutex_t lock;
    loaded* contexts;
};

/* What the functions below need to say what failed. */
typedef struct session {
    const OrtApi* api;
    const char* op;
    const cu_driver* driver;
} session;

#define CU_TRY(of, call)                                                        \
    do {                                                                        \
        cu_result cu_status_ = (of)->driver->call;                              \
        if (cu_status_ != 0) return driver_failure((of), #call, cu_status_);    \
    } while (0)

static OrtStatus* driver_failure(const session* of, const char* call, cu_result status) {
    const char* text = NULL;
    if (of->driver->cuGetErrorString(status, &text) != 0 || text == NULL) text = "unknown error";
    int length = 0;
    while (call[length] != '\0' && call[length] != '(') length++;
    return tile_refuse(of->api, ORT_FAIL, of->op, "%.*s failed: %s (%d)", length, call, text, status);
}

/* ---- one region's kernels ---- */

OrtStatus* tile_create_card(const tile_host* host, const tile_kernel* kernel, const tile_cuda_kernel* cuda,
                            tile_card** out) {
    if (cuda->n_launches > TILE_CUDA_MAX_LAUNCHES || cuda->n_scratch > TILE_CUDA_MAX_SCRATCH) {
        return tile_refuse(host->api, ORT_FAIL, kernel->name, "built with %d launches and %d scratch tensors, the most are %d and %d",
                           (int)cuda->n_launches, (int)cuda->n_scratch, TILE_CUDA_MAX_LAUNCHES, TILE_CUDA_MAX_SCRATCH);
    }
    tile_card* card = calloc(1, sizeof *card);
    if (card == NULL) return tile_refuse(host->api, ORT_FAIL, kernel->name, "no memory for its kernels on cards");
    card->cuda = cuda;
    if (pthread_mutex_init(&card->lock, NULL) != 0) {
        free(card);
        return tile_refuse(host->api, ORT_FAIL, kernel->name, "no lock for its kernels on cards");
    }
    *out = card;
    return NULL;
}

/* Modules stay: by then their contexts may be gone. */
void tile_destroy_card(tile_card* card) {
    for (loaded *one = card->contexts, *next; one != NULL; one = next) {
        next = one->next;
        free(one);
    }
    pthread_mutex_destroy(&card->lock);
    free(card);
}

/* ---- loading ---- */

static OrtStatus* open_session(const tile_host* host, const char* op, session* out) {
    const char* why = NULL;
    *out = (session){.api = host->api, .op = op, .driver = tile_cuda_driver(&why)};
    if (out->driver == NULL) {
        return tile_refuse(host->api, ORT_FAIL, op, "%s; without CUDAExecutionProvider it runs on the processor", why);
    }
    return NULL;
}

static OrtStatus* check_device(const session* of, const tile_cuda_kernel* cuda, cu_device device) {
    int major = 0;
    int minor = 0;
    CU_TRY(of, cuDeviceGetAttribute(&major, CU_CAPABILITY_MAJOR, device));
    CU_TRY(of, cuDeviceGetAttribute(&minor, CU_CAPABILITY_MINOR, device));
    if (major == cuda->major && (cuda->exact ? minor == cuda->minor : minor >= cuda->minor)) return NULL;
    char name[NAME_BYTES] = "this card";
    CU_TRY(of, cuDeviceGetName(name, sizeof name, device));
    return tile_refuse(of->api, ORT_FAIL, of->op,
                       "built for %s, which is compute capability %d.%d; %s has %d.%d. Build it with --target %s, leave "
                       "CUDAExecutionProvider out, or open the model without its library",
                       cuda->arch, (int)cuda->major, (int)cuda->minor, name, major, minor,
                       major == 8 ? "cuda-sm80" : "cuda");
}

static OrtStatus* measure_room(const session* of, const tile_cuda_launch* launch, cu_device device, entry* out) {
    if (launch->cluster == 1) {
        CU_TRY(of, cuDeviceGetAttribute(&out->room, CU_PROCESSORS, device));
        out->room *= launch->blocks;
        return NULL;
    }
    cu_attribute shape = {.id = CU_CLUSTER_SHAPE, .value.cluster = {launch->cluster, 1, 1}};
    cu_launch trial = {
        .grid = {launch->cluster, 1, 1},
        .block = {launch->threads, 1, 1},
        .shared_bytes = launch->shared_bytes,
        .attributes = &shape,
        .n_attributes = 1,
    };
    CU_TRY(of, cuOccupancyMaxActiveClusters(&out->room, out->function, &trial));
    if (out->room > 0) return NULL;
    return tile_refuse(of->api, ORT_FAIL, of->op, "no cluster of %u blocks with %u bytes of shared memory each fits the card",
                       (unsigned)launch->cluster, (unsigned)launch->shared_bytes);
}

static OrtStatus* load_entry(const session* of, const tile_cuda_launch* launch, cu_device device, entry* out) {
    cu_module module = NULL;
    int room = 0;
    CU_TRY(of, cuDeviceGetAttribute(&room, CU_SHARED_BYTES, device));
    if (launch->shared_bytes > (uint32_t)room) {
        return tile_refuse(of->api, ORT_FAIL, of->op,
                           "takes %u bytes of shared memory, and this card has %d for a block. Leave "
                           "CUDAExecutionProvider out, or open the model without its library",
                           (unsigned)launch->shared_bytes, room);
    }
    CU_TRY(of, cuModuleLoadData(&module, launch->image));
    CU_TRY(of, cuModuleGetFunction(&out->function, module, launch->entry));
    CU_TRY(of, cuFuncSetAttribute(out->function, CU_MAX_DYNAMIC_SHARED, (int)launch->shared_bytes));
    if (launch->cluster > CU_PORTABLE_CLUSTER) CU_TRY(of, cuFuncSetAttribute(out->function, CU_WIDE_CLUSTER, 1));
    return measure_room(of, launch, device, out);
}

/* The entries for `context`, which is current; the caller holds the lock. */
static OrtStatus* load_context(const session* of, tile_card* card, cu_context context, entry** out) {
    for (loaded* one = card->contexts; one != NULL; one = one->next) {
        if (one->context == context) {
            *out = one->entries;
            return NULL;
        }
    }
    cu_device device = 0;
    CU_TRY(of, cuCtxGetDevice(&device));
    TILE_TRY(check_device(of, card->cuda, device));
    loaded* fresh = calloc(1, sizeof *fresh);
    if (fresh == NULL) return tile_refuse(of->api, ORT_FAIL, of->op, "no memory for its kernels on cards");
    fresh->context = context;
    for (int32_t i = 0; i < card->cuda->n_launches; i++) {
        OrtStatus* status = load_entry(of, &card->cuda->launches[i], device, &fresh->entries[i]);
        if (status != NULL) {
            free(fresh);
            return status;
        }
    }
    fresh->next = card->contexts;
    card->contexts = fresh;
    *out = fresh->entries;
    return NULL;
}

static OrtStatus* entries_of(const session* of, tile_card* card, cu_context context, entry** out) {
    pthread_mutex_lock(&card->lock);
    OrtStatus* status = load_context(of, card, context, out);
    pthread_mutex_unlock(&card->lock);
    return status;
}

OrtStatus* tile_prepare_card(const tile_host* host, const char* op, tile_card* card) {
    session of;
    TILE_TRY(open_session(host, op, &of));
    cu_context context = NULL;
    CU_TRY(&of, cuCtxGetCurrent(&context));
    entry* entries = NULL;
    return context == NULL ? NULL : entries_of(&of, card, context, &entries);
}

/* ---- launching ---- */

/* Addresses of all tensors: inputs, outputs, scratch. */
typedef struct tensors {
    void* at[MAX_TENSORS];
    int32_t count;
} tensors;

static OrtStatus* encode_map(const session* of, const tile_cuda_map* map, void* address, const uint64_t* dims,
                             cu_tensor_map* out) {
    uint64_t pitches[TILE_CUDA_MAX_RANK];
    const uint32_t steps[TILE_CUDA_MAX_RANK] = {1, 1, 1, 1, 1};
    uint64_t pitch = (uint64_t)map->element_bytes;
    for (int32_t axis = 0; axis < map->rank; axis++) {
        pitch *= dims[axis];
        pitches[axis] = pitch;
    }
    CU_TRY(of, cuTensorMapEncodeTiled(out, map->type, (uint32_t)map->rank, address, dims, pitches, map->box, steps, 0,
                                      map->swizzle, map->promotion, 0));
    return NULL;
}

/* The map that a launch was given last, if it is of the same memory, or a new one. */
static OrtStatus* find_map(const session* of, tile_card* card, const tile_cuda_launch* launch, int32_t index,
                           const int64_t* symbols, const tensors* all, kept_map* kept, cu_tensor_map* out) {
    const tile_cuda_map* map = &launch->maps[index];
    void* address = all->at[map->tensor];
    uint64_t dims[TILE_CUDA_MAX_RANK] = {0};
    launch->dims(symbols, index, dims);
    for (int32_t axis = 0; axis < map->rank; axis++) {
        if (dims[axis] == 0) {
            return tile_refuse(of->api, ORT_INVALID_ARGUMENT, of->op,
                               "tensor %d is empty, and nothing can be summed over it on a card", (int)map->tensor);
        }
    }
    pthread_mutex_lock(&card->lock);
    const bool same = kept->address == address && memcmp(kept->dims, dims, sizeof dims) == 0;
    if (same) memcpy(out, kept->words, sizeof *out);
    pthread_mutex_unlock(&card->lock);
    if (same) return NULL;
    TILE_TRY(encode_map(of, map, address, dims, out));
    pthread_mutex_lock(&card->lock);
    kept->address = address;
    memcpy(kept->dims, dims, sizeof dims);
    memcpy(kept->words, out, sizeof *out);
    pthread_mutex_unlock(&card->lock);
    return NULL;
}

static OrtStatus* launch_one(const session* of, tile_card* card, const tile_cuda_launch* launch, entry* at,
                             const int64_t* symbols, tensors* all, cu_stream stream) {
    const int64_t tiles = launch->tiles(symbols);
    if (tiles <= 0) return NULL;
    if (tiles > INT32_MAX) {
        return tile_refuse(of->api, ORT_INVALID_ARGUMENT, of->op, "%lld tiles: kernels count them in 32 bits",
                           (long long)tiles);
    }
    cu_tensor_map maps[TILE_CUDA_MAX_MAPS];
    int32_t sizes[TILE_MAX_SYMBOLS];
    void* arguments[MAX_ARGUMENTS];
    int32_t count = 0;
    for (int32_t i = 0; i < launch->n_maps; i++) {
        TILE_TRY(find_map(of, card, launch, i, symbols, all, &at->maps[i], &maps[i]));
        arguments[count++] = &maps[i];
    }
    for (int32_t i = 0; i < launch->n_pointers; i++) arguments[count++] = &all->at[launch->pointers[i]];
    for (int32_t i = 0; i < launch->n_symbols; i++) {
        sizes[i] = (int32_t)symbols[launch->symbols[i]];
        arguments[count++] = &sizes[i];
    }
    if (launch->counters > 0) {
        const void* workspace = all->at[launch->pointers[launch->n_pointers - 1]];
        CU_TRY(of, cuMemsetD2D32Async((uintptr_t)workspace, (size_t)launch->tile_words * sizeof(uint32_t), 0,
                                      (size_t)launch->counters, (size_t)tiles, stream));
    }
    const int64_t running = launch->blocks > 0 && tiles > at->room ? at->room : tiles;
    const uint32_t blocks = (uint32_t)running * launch->cluster;
    cu_attribute early = {.id = CU_EARLY, .value.early = 1};
    const cu_launch shape = {
        .grid = {blocks, 1, 1},
        .block = {launch->threads, 1, 1},
        .shared_bytes = launch->shared_bytes,
        .stream = stream,
        .attributes = &early,
        .n_attributes = card->cuda->major >= CU_EARLY_MAJOR ? 1 : 0,
    };
    CU_TRY(of, cuLaunchKernelEx(&shape, at->function, arguments, NULL));
    return NULL;
}

static OrtStatus* check_addresses(const session* of, const tensors* all) {
    for (int32_t i = 0; i < all->count; i++) {
        if ((uintptr_t)all->at[i] % TILE_CUDA_ALIGNMENT != 0) {
            return tile_refuse(of->api, ORT_INVALID_ARGUMENT, of->op,
                               "tensor %d starts at %p; kernels on cards need multiples of %d bytes", (int)i, all->at[i],
                               TILE_CUDA_ALIGNMENT);
        }
    }
    return NULL;
}

/* All launches, with scratch in place and the context current. */
static OrtStatus* launch_all(const session* of, tile_card* card, cu_context context, const int64_t* symbols,
                             tensors* all, cu_stream stream) {
    entry* entries = NULL;
    TILE_TRY(entries_of(of, card, context, &entries));
    TILE_TRY(check_addresses(of, all));
    for (int32_t i = 0; i < card->cuda->n_launches; i++) {
        TILE_TRY(launch_one(of, card, &card->cuda->launches[i], &entries[i], symbols, all, stream));
    }
    return NULL;
}

/* Launches in the context of `stream`, which need not be the one that is current. */
static OrtStatus* launch_in_context(const session* of, tile_card* card, const int64_t* symbols, tensors* all,
                                    cu_stream stream) {
    cu_context current = NULL;
    cu_context context = NULL;
    CU_TRY(of, cuCtxGetCurrent(&current));
    context = current;
    if (stream != NULL) CU_TRY(of, cuStreamGetCtx(stream, &context));
    if (context == NULL) return tile_refuse(of->api, ORT_FAIL, of->op, "no CUDA context is current, and no stream names one");
    if (context == current) return launch_all(of, card, context, symbols, all, stream);
    CU_TRY(of, cuCtxPushCurrent_v2(context));
    OrtStatus* status = launch_all(of, card, context, symbols, all, stream);
    cu_context popped = NULL;
    cu_result left = of->driver->cuCtxPopCurrent_v2(&popped);
    return status != NULL || left == 0 ? status : driver_failure(of, "cuCtxPopCurrent_v2", left);
}

/* Scratch from the allocator of output 0's memory; `*held` says how many are to be freed, also after a failure. */
static OrtStatus* allocate_scratch(const session* of, const tile_cuda_kernel* cuda, const int64_t* symbols,
                                   OrtAllocator* allocator, tensors* all, int32_t* held) {
    for (int32_t i = 0; i < cuda->n_scratch; i++) {
        TILE_TRY(of->api->AllocatorAlloc(allocator, cuda->scratch(symbols, i), &all->at[all->count]));
        all->count++;
        (*held)++;
    }
    return NULL;
}

static OrtStatus* call_with_scratch(const session* of, tile_card* card, OrtKernelContext* context,
                                    const int64_t* symbols, const int64_t* dims, size_t rank, tensors* all,
                                    cu_stream stream) {
    OrtValue* output = NULL;
    const OrtMemoryInfo* memory = NULL;
    OrtAllocator* allocator = NULL;
    TILE_TRY(of->api->KernelContext_GetOutput(context, 0, dims, rank, &output));
    TILE_TRY(of->api->GetTensorMemoryInfo(output, &memory));
    TILE_TRY(of->api->KernelContext_GetAllocator(context, memory, &allocator));
    int32_t held = 0;
    OrtStatus* status = allocate_scratch(of, card->cuda, symbols, allocator, all, &held);
    if (status == NULL) status = launch_in_context(of, card, symbols, all, stream);
    while (held-- > 0) {
        OrtStatus* freed = of->api->AllocatorFree(allocator, all->at[--all->count]);
        if (status == NULL) status = freed;
        else if (freed != NULL) of->api->ReleaseStatus(freed);
    }
    of->api->ReleaseAllocator(allocator);
    return status;
}

OrtStatus* tile_call_card(const tile_host* host, const tile_kernel* kernel, tile_card* card, OrtKernelContext* context) {
    session of;
    tile_binding bound;
    TILE_TRY(open_session(host, kernel->name, &of));
    TILE_TRY(tile_bind_call(host, kernel, context, &bound));
    char error[256];
    if (card->cuda->check(bound.symbols, error, sizeof error) != 0) {
        return tile_refuse(host->api, ORT_INVALID_ARGUMENT, kernel->name, "%s", error);
    }
    tensors all = {.count = 0};
    for (int32_t i = 0; i < kernel->n_inputs; i++) all.at[all.count++] = (void*)bound.inputs[i];
    for (int32_t i = 0; i < kernel->n_outputs; i++) all.at[all.count++] = bound.outputs[i];
    void* stream = NULL;
    TILE_TRY(host->api->KernelContext_GetGPUComputeStream(context, &stream));
    if (card->cuda->n_scratch == 0) return launch_in_context(&of, card, bound.symbols, &all, stream);
    int64_t dims[TILE_MAX_RANK];
    kernel->shape(bound.symbols, 0, dims);
    return call_with_scratch(&of, card, context, bound.symbols, dims, (size_t)kernel->outputs[0].rank, &all, stream);
}
