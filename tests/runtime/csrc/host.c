/* A C program that runs the sampler model (native_models.py) in every ONNX Runtime that it is given, one after the
 * other in this one process, and checks each output itself.
 *
 *     host MODEL LIBRARY MODE LIBONNXRUNTIME...
 *
 * MODE is `custom` (register the custom ops), `provider` (register the execution provider) or `plain` (neither). Ends
 * with status 0 and one line per runtime, or with the first complaint.
 */
#define _POSIX_C_SOURCE 200809L

#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ort_abi.h"

typedef struct OrtEnv OrtEnv;
typedef struct OrtMemoryInfo OrtMemoryInfo;
typedef struct OrtSession OrtSession;

/* The slots that only a host uses. */
typedef OrtStatus* (*create_env)(int level, const char* id, OrtEnv** out);
typedef OrtStatus* (*create_session)(const OrtEnv*, const char* path, const OrtSessionOptions*, OrtSession** out);
typedef OrtStatus* (*run_session)(OrtSession*, const void* options, const char* const* input_names,
                                  const OrtValue* const* inputs, size_t input_count, const char* const* output_names,
                                  size_t output_count, OrtValue** outputs);
typedef OrtStatus* (*create_options)(OrtSessionOptions** out);
typedef OrtStatus* (*set_threads)(OrtSessionOptions*, int count);
typedef OrtStatus* (*create_tensor)(const OrtMemoryInfo*, void* data, size_t bytes, const int64_t* dims, size_t rank,
                                    int type, OrtValue** out);
typedef OrtStatus* (*create_memory_info)(int allocator, int memory, OrtMemoryInfo** out);
typedef OrtStatus* (*register_ops)(OrtSessionOptions*, const char* path);
typedef OrtStatus* (*register_provider)(OrtEnv*, const char* name, const char* path);
typedef OrtStatus* (*unregister_provider)(OrtEnv*, const char* name);
typedef OrtStatus* (*get_devices)(const OrtEnv*, OrtEpDevice* const** devices, size_t* count);
typedef OrtStatus* (*append_provider)(OrtSessionOptions*, OrtEnv*, OrtEpDevice* const* devices, size_t count,
                                      const char* const* keys, const char* const* values, size_t pairs);
typedef const char* (*get_name)(const OrtEpDevice*);
typedef const char* (*get_message)(const OrtStatus*);
typedef void (*release)(void*);

enum slot {
    GET_MESSAGE = 2,
    CREATE_ENV = 3,
    CREATE_SESSION = 7,
    RUN = 9,
    CREATE_OPTIONS = 10,
    SET_LOG_SEVERITY = 22,
    SET_THREADS = 24,
    CREATE_TENSOR = 49,
    CREATE_MEMORY_INFO = 69,
    RELEASE_ENV = 92,
    RELEASE_STATUS = 93,
    RELEASE_MEMORY_INFO = 94,
    RELEASE_SESSION = 95,
    RELEASE_VALUE = 96,
    RELEASE_OPTIONS = 100,
    REGISTER_OPS = 228,
    REGISTER_PROVIDER = 301,
    UNREGISTER_PROVIDER = 302,
    GET_DEVICES = 303,
    APPEND_PROVIDER = 304,
    DEVICE_PROVIDER_NAME = 312,
};

enum { FLOAT = 1, INT64 = 7, INPUTS = 4, OUTPUTS = 4, THREADS = 4, LOG_FATAL = 4 };

#define PROVIDER "TileFuseExecutionProvider"

typedef struct runtime {
    const OrtApi* api;
    OrtMemoryInfo* memory;
    OrtSession* session;
} runtime;

/* Slot `index` as a function of type `type`. */
#define SLOT(api, index, type) (((const union { void* table; type function; }*)(api))[index].function)

static void check(const OrtApi* api, OrtStatus* status) {
    if (status == NULL) return;
    fprintf(stderr, "%s\n", SLOT(api, GET_MESSAGE, get_message)(status));
    exit(1);
}

static void require(int holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static OrtValue* tensor(const runtime* host, void* data, size_t bytes, int rank, int64_t d0, int64_t d1, int type) {
    OrtValue* value = NULL;
    int64_t dims[2] = {d0, d1};
    check(host->api,
          SLOT(host->api, CREATE_TENSOR, create_tensor)(host->memory, data, bytes, dims, (size_t)rank, type, &value));
    return value;
}

static void* data_of(const runtime* host, OrtValue* value) {
    void* data = NULL;
    check(host->api, host->api->GetTensorMutableData(value, &data));
    return data;
}

/* The sampler's outputs for x [n, m], s [k], flat [n], ids [n]; NULL and a status when it refuses. */
static OrtStatus* run_sampler(const runtime* host, int64_t n, int64_t m, int64_t k) {
    size_t cells = (size_t)(n * m);
    float* x = malloc((cells + 1) * sizeof *x);
    float* s = malloc((size_t)(k + 1) * sizeof *s);
    float* flat = malloc((size_t)(n + 1) * sizeof *flat);
    int64_t* ids = malloc((size_t)(n + 1) * sizeof *ids);
    require(x && s && flat && ids, "no memory");
    for (size_t i = 0; i < cells; i++) x[i] = (float)(i % 13) - 6;
    for (int64_t j = 0; j < k; j++) s[j] = (float)(j % 5);
    for (int64_t i = 0; i < n; i++) flat[i] = (float)i, ids[i] = i * i;
    const char* const input_names[INPUTS] = {"x", "s", "flat", "ids"};
    const char* const output_names[OUTPUTS] = {"mean", "rest", "fourfold", "triple"};
    OrtValue* inputs[INPUTS] = {
        tensor(host, x, cells * sizeof *x, 2, n, m, FLOAT),
        tensor(host, s, (size_t)k * sizeof *s, 1, k, 0, FLOAT),
        tensor(host, flat, (size_t)n * sizeof *flat, 1, n, 0, FLOAT),
        tensor(host, ids, (size_t)n * sizeof *ids, 1, n, 0, INT64),
    };
    OrtValue* outputs[OUTPUTS] = {NULL};
    OrtStatus* status = SLOT(host->api, RUN, run_session)(host->session, NULL, input_names,
                                                          (const OrtValue* const*)inputs, INPUTS, output_names, OUTPUTS,
                                                          outputs);
    if (status == NULL) {
        const float* mean = data_of(host, outputs[0]);
        const float* rest = data_of(host, outputs[1]);
        const float* fourfold = data_of(host, outputs[2]);
        const int64_t* triple = data_of(host, outputs[3]);
        for (int64_t i = 0; i < n; i++) {
            double sum = 0;
            for (int64_t j = 0; j < m; j++) sum += x[i * m + j] * s[j] + 1.0;
            if (m > 0) require(fabs(mean[i] - sum / (double)m) < 1e-4, "mean is wrong");
            for (int64_t j = 0; j < m; j++) {
                require(fabs(rest[i * m + j] - (x[i * m + j] * s[j] + 1.0 - sum / (double)m)) < 1e-4, "rest is wrong");
            }
            require(fourfold[i] == flat[i] && fourfold[n + i] == flat[i] && fourfold[2 * n + 1 + i] == flat[i],
                    "fourfold is wrong");
            for (int64_t j = 0; j < 3; j++) require(triple[i * 3 + j] == ids[i], "triple is wrong");
        }
        require(fourfold[2 * n] == 0 && fourfold[4 * n + 2] == 0, "fourfold is wrong at its zeros");
    }
    for (int i = 0; i < INPUTS; i++) SLOT(host->api, RELEASE_VALUE, release)(inputs[i]);
    for (int i = 0; i < OUTPUTS; i++) {
        if (outputs[i] != NULL) SLOT(host->api, RELEASE_VALUE, release)(outputs[i]);
    }
    free(x), free(s), free(flat), free(ids);
    return status;
}

static void* run_sizes(void* data) {
    const runtime* host = data;
    const int64_t sizes[][2] = {{1, 1}, {300, 200}, {7, 33}, {0, 5}, {1000, 64}, {3, 0}, {64, 513}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        check(host->api, run_sampler(host, sizes[i][0], sizes[i][1], sizes[i][1]));
    }
    return NULL;
}

static OrtEpDevice* find_device(const OrtApi* api, const OrtEnv* env) {
    OrtEpDevice* const* devices = NULL;
    size_t count = 0;
    check(api, SLOT(api, GET_DEVICES, get_devices)(env, &devices, &count));
    for (size_t i = 0; i < count; i++) {
        if (strcmp(SLOT(api, DEVICE_PROVIDER_NAME, get_name)(devices[i]), PROVIDER) == 0) return devices[i];
    }
    require(0, "no device of " PROVIDER);
    return NULL;
}

/* Several threads at once, then the calling one. */
static void run_threads(const runtime* host) {
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        require(pthread_create(&threads[i], NULL, run_sizes, (void*)host) == 0, "no thread");
    }
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    run_sizes((void*)host);
}

static void run_in(const char* path, const char* model, const char* library, const char* mode) {
    void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) fprintf(stderr, "%s\n", dlerror());
    require(handle != NULL, "no ONNX Runtime");
    const OrtApiBase* (*get_base)(void) = NULL;
    *(void**)&get_base = dlsym(handle, "OrtGetApiBase");
    require(get_base != NULL, "no OrtGetApiBase");
    const OrtApiBase* base = get_base();
    int provider = strcmp(mode, "provider") == 0;
    runtime host = {.api = base->GetApi(provider ? ORT_API_KERNEL_EP : ORT_API_CUSTOM_OPS)};
    const OrtApi* api = host.api;
    OrtEnv* env = NULL;
    OrtSessionOptions* options = NULL;
    check(api, SLOT(api, CREATE_ENV, create_env)(LOG_FATAL, "host", &env));
    check(api, SLOT(api, CREATE_OPTIONS, create_options)(&options));
    check(api, SLOT(api, SET_THREADS, set_threads)(options, 2));
    check(api, SLOT(api, CREATE_MEMORY_INFO, create_memory_info)(1, 0, &host.memory));
    if (strcmp(mode, "custom") == 0) check(api, SLOT(api, REGISTER_OPS, register_ops)(options, library));
    if (provider) {
        check(api, SLOT(api, REGISTER_PROVIDER, register_provider)(env, "tilefuse", library));
        OrtEpDevice* device = find_device(api, env);
        check(api, SLOT(api, APPEND_PROVIDER, append_provider)(options, env, &device, 1, NULL, NULL, 0));
    }
    check(api, SLOT(api, CREATE_SESSION, create_session)(env, model, options, &host.session));
    run_threads(&host);
    OrtStatus* refused = run_sampler(&host, 3, 5, 4);
    require(refused != NULL, "a wrong shape was not refused");
    printf("%s %s: right; refused: %s\n", base->GetVersionString(), mode,
           SLOT(api, GET_MESSAGE, get_message)(refused));
    SLOT(api, RELEASE_STATUS, release)(refused);
    SLOT(api, RELEASE_SESSION, release)(host.session);
    SLOT(api, RELEASE_OPTIONS, release)(options);
    SLOT(api, RELEASE_MEMORY_INFO, release)(host.memory);
    if (provider) check(api, SLOT(api, UNREGISTER_PROVIDER, unregister_provider)(env, "tilefuse"));
    SLOT(api, RELEASE_ENV, release)(env);
}

typedef struct arguments {
    char** values;
    int count;
} arguments;

/* Runs everything in a thread that ends, with its scratch, after the library was unregistered. */
static void* run_all(void* data) {
    const arguments* given = data;
    char** values = given->values;
    for (int i = 4; i < given->count; i++) run_in(values[i], values[1], values[2], values[3]);
    return NULL;
}

int main(int count, char** values) {
    require(count >= 5, "usage: host MODEL LIBRARY MODE LIBONNXRUNTIME...");
    arguments given = {values, count};
    pthread_t thread;
    require(pthread_create(&thread, NULL, run_all, &given) == 0, "no thread");
    pthread_join(thread, NULL);
    return 0;
}
