/* The library as ONNX Runtime custom ops: one op of domain "tilefuse" per generated kernel, and for those that have
 * kernels for NVIDIA cards too, another of the same name for the CUDA provider. ONNX Runtime makes one schema of both.
 *
 * Where the kernels cannot run (a processor that no variant supports, an ONNX Runtime before 1.17) nothing is
 * registered, so ONNX Runtime inlines the model-local function of each node: the result is the same, the speed is not,
 * and one line on stderr says so. An op that were registered without a kernel would make session creation fail instead.
 */
#define _POSIX_C_SOURCE 200809L

#include "custom_ops.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

enum { SYMBOL_BYTES = 40 };

/* ---- what ONNX Runtime asks of an op ---- */

static const tile_kernel* kernel_of(const OrtCustomOp* op) { return ((const tile_op*)op)->kernel; }

static const char* op_name(const OrtCustomOp* op) { return kernel_of(op)->name; }

static const char* op_provider(const OrtCustomOp* op) {
    return ((const tile_op*)op)->card == NULL ? NULL : "CUDAExecutionProvider";
}

static size_t op_input_count(const OrtCustomOp* op) { return (size_t)kernel_of(op)->n_inputs; }

static size_t op_output_count(const OrtCustomOp* op) { return (size_t)kernel_of(op)->n_outputs; }

/* ONNX Runtime's element types have the numbers of TensorProto.DataType. */
static int32_t op_input_type(const OrtCustomOp* op, size_t index) { return kernel_of(op)->input_types[index]; }

static int32_t op_output_type(const OrtCustomOp* op, size_t index) { return kernel_of(op)->outputs[index].type; }

/* Every input and output is required and in the provider's own memory: both are 0. */
static int32_t op_default(const OrtCustomOp* op, size_t index) {
    (void)op;
    (void)index;
    return 0;
}

/* Kernels keep no state of a node, so the op serves all its nodes. */
static OrtStatus* op_create_kernel(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
    (void)api;
    (void)info;
    const tile_op* own = (const tile_op*)op;
    *kernel = (void*)op;
    return own->card == NULL ? NULL : tile_prepare_card(own->host, own->kernel->name, own->card);
}

static void op_destroy_kernel(void* kernel) { (void)kernel; }

static OrtStatus* op_compute(void* kernel, OrtKernelContext* context) {
    const tile_op* op = kernel;
    if (op->card != NULL) return tile_call_card(op->host, op->kernel, op->card, context);
    return tile_call_kernel(op->host, op->kernel, context);
}

/* ---- shape inference ---- */

/* One inferred dim: a value, or -1 and a symbol. */
typedef struct dim_guess {
    int64_t value;
    const char* symbol;
    char unique[SYMBOL_BYTES]; /* the symbol of a dim of which nothing is known */
} dim_guess;

/* Names a dim that equals no other: ONNX Runtime shares buffers between shapes that it believes equal. */
static void guess_unknown(dim_guess* guess) {
    static atomic_uint_fast64_t counter;
    unsigned long long number = atomic_fetch_add_explicit(&counter, 1, memory_order_relaxed);
    snprintf(guess->unique, sizeof guess->unique, "tilefuse_unknown_%llu", number);
    guess->value = -1;
    guess->symbol = guess->unique;
}

static OrtStatus* guess_input_dim(const OrtApi* api, const OrtShapeInferContext* context, const tile_dim* dim,
                                  dim_guess* guess) {
    OrtTensorTypeAndShapeInfo* info = NULL;
    TILE_TRY(api->ShapeInferContext_GetInputTypeShape(context, (size_t)dim->input, &info));
    size_t rank = 0;
    TILE_TRY(api->GetDimensionsCount(info, &rank));
    if (rank > TILE_MAX_RANK || (size_t)dim->axis >= rank) return NULL; /* the input's shape is not known yet */
    int64_t values[TILE_MAX_RANK];
    const char* symbols[TILE_MAX_RANK] = {NULL};
    TILE_TRY(api->GetDimensions(info, values, rank));
    TILE_TRY(api->GetSymbolicDimensions(info, symbols, rank));
    const char* symbol = symbols[dim->axis];
    if (symbol != NULL && symbol[0] != '\0') {
        guess->value = -1;
        guess->symbol = symbol;
    } else if (values[dim->axis] >= 0) {
        guess->value = values[dim->axis];
        guess->symbol = "";
    }
    return NULL;
}

static OrtStatus* set_output_shape(const OrtApi* api, OrtShapeInferContext* context, size_t index, int32_t type,
                                   const dim_guess* guesses, size_t rank) {
    int64_t values[TILE_MAX_RANK];
    const char* symbols[TILE_MAX_RANK];
    for (size_t axis = 0; axis < rank; axis++) {
        values[axis] = guesses[axis].value;
        symbols[axis] = guesses[axis].symbol;
    }
    OrtTensorTypeAndShapeInfo* info = NULL;
    TILE_TRY(api->CreateTensorTypeAndShapeInfo(&info));
    OrtStatus* status = api->SetTensorElementType(info, type);
    if (status == NULL) status = api->SetDimensions(info, values, rank);
    if (status == NULL) status = api->SetSymbolicDimensions(info, symbols, rank);
    if (status == NULL) status = api->ShapeInferContext_SetOutputTypeShape(context, index, info);
    api->ReleaseTensorTypeAndShapeInfo(info);
    return status;
}

static OrtStatus* op_infer_shapes(const OrtCustomOp* op, OrtShapeInferContext* context) {
    const OrtApi* api = ((const tile_op*)op)->host->api;
    const tile_kernel* kernel = kernel_of(op);
    for (int32_t i = 0; i < kernel->n_outputs; i++) {
        const tile_output* output = &kernel->outputs[i];
        dim_guess guesses[TILE_MAX_RANK];
        for (int32_t axis = 0; axis < output->rank; axis++) {
            const tile_dim* dim = &output->dims[axis];
            guess_unknown(&guesses[axis]);
            if (dim->kind == TILE_DIM_CONST) {
                guesses[axis].value = dim->value;
                guesses[axis].symbol = "";
            } else if (dim->kind == TILE_DIM_INPUT) {
                TILE_TRY(guess_input_dim(api, context, dim, &guesses[axis]));
            }
        }
        TILE_TRY(set_output_shape(api, context, (size_t)i, output->type, guesses, (size_t)output->rank));
    }
    return NULL;
}

/* ---- one set of ops per ONNX Runtime in the process ---- */

static OrtStatus* check_kernel(const OrtApi* api, const tile_kernel* kernel) {
    if (kernel->n_inputs > TILE_MAX_INPUTS || kernel->n_outputs > TILE_MAX_OUTPUTS) {
        return tile_refuse(api, ORT_FAIL, kernel->name, "built with %d inputs and %d outputs, the most are %d and %d",
                           (int)kernel->n_inputs, (int)kernel->n_outputs, TILE_MAX_INPUTS, TILE_MAX_OUTPUTS);
    }
    for (int32_t i = 0; i < kernel->n_outputs; i++) {
        if (kernel->outputs[i].rank > TILE_MAX_RANK) {
            return tile_refuse(api, ORT_FAIL, kernel->name, "built with rank %d for output %d, the most is %d",
                               (int)kernel->outputs[i].rank, (int)i, TILE_MAX_RANK);
        }
    }
    return NULL;
}

static OrtStatus* add_op(tile_ops* ops, tile_op* place, const tile_kernel* kernel, tile_card* card) {
    *place = (tile_op){
        .op =
            {
                .version = ORT_API_CUSTOM_OPS,
                .GetName = op_name,
                .GetExecutionProviderType = op_provider,
                .GetInputType = op_input_type,
                .GetInputTypeCount = op_input_count,
                .GetOutputType = op_output_type,
                .GetOutputTypeCount = op_output_count,
                .KernelDestroy = op_destroy_kernel,
                .GetInputCharacteristic = op_default,
                .GetOutputCharacteristic = op_default,
                .GetInputMemoryType = op_default,
                .CreateKernelV2 = op_create_kernel,
                .KernelComputeV2 = op_compute,
                .InferOutputShapeFn = op_infer_shapes,
            },
        .host = &ops->host,
        .kernel = kernel,
        .card = card,
    };
    return ops->host.api->CustomOpDomain_Add(ops->domain, &place->op);
}

static const tile_cuda_kernel* on_card(int32_t kernel) {
    return tile_generated_library.cuda == NULL ? NULL : tile_generated_library.cuda[kernel];
}

static OrtStatus* fill_domain(tile_ops* ops, const tile_variant* variant) {
    const OrtApi* api = ops->host.api;
    TILE_TRY(api->CreateCustomOpDomain(TILE_DOMAIN, &ops->domain));
    for (int32_t i = 0; i < ops->count; i++) {
        TILE_TRY(check_kernel(api, variant->kernels[i]));
        TILE_TRY(add_op(ops, &ops->ops[i], variant->kernels[i], NULL));
    }
    for (int32_t i = 0; i < ops->count; i++) {
        if (on_card(i) == NULL) continue;
        tile_card* card = NULL;
        TILE_TRY(tile_create_card(&ops->host, variant->kernels[i], on_card(i), &card));
        TILE_TRY(add_op(ops, &ops->ops[ops->count + ops->on_cards++], variant->kernels[i], card));
    }
    return NULL;
}

static void destroy_ops(tile_ops* ops) {
    if (ops->domain != NULL) ops->host.api->ReleaseCustomOpDomain(ops->domain);
    for (int32_t i = 0; i < ops->on_cards; i++) tile_destroy_card(ops->ops[ops->count + i].card);
    free(ops);
}

/* Why the kernels cannot run here, once a process. */
__attribute__((format(printf, 1, 2))) static void warn_once(const char* format, ...) {
    static atomic_flag warned = ATOMIC_FLAG_INIT;
    if (atomic_flag_test_and_set(&warned)) return;
    va_list arguments;
    va_start(arguments, format);
    fputs("tilefuse: ", stderr);
    vfprintf(stderr, format, arguments);
    fputs("; the model runs through its function bodies, unfused\n", stderr);
    va_end(arguments);
}

/* `*out` stays NULL, without a status, where the kernels cannot run. */
static OrtStatus* create_ops(const OrtApiBase* base, tile_ops** out) {
    tile_host host;
    if (!tile_open_host(base, &host)) {
        warn_once("ONNX Runtime %s is older than 1.%d", base->GetVersionString(), ORT_API_CUSTOM_OPS);
        return NULL;
    }
    if (tile_generated_library.abi != TILE_ABI_VERSION) {
        return tile_refuse(host.api, ORT_FAIL, TILE_DOMAIN, "the kernels have ABI version %d, expected %d",
                           (int)tile_generated_library.abi, TILE_ABI_VERSION);
    }
    const tile_variant* variant = tile_supported_variant();
    if (variant == NULL && tile_generated_library.n_variants > 0) {
        warn_once("this processor lacks %s, the least that the library was built for",
                  tile_generated_library.variants[tile_generated_library.n_variants - 1].isa);
        return NULL;
    }
    int32_t count = variant == NULL ? 0 : variant->n_kernels;
    tile_ops* ops = calloc(1, sizeof *ops + 2 * (size_t)count * sizeof ops->ops[0]);
    if (ops == NULL) return tile_refuse(host.api, ORT_FAIL, TILE_DOMAIN, "no memory for the table of ops");
    ops->base = base;
    ops->host = host;
    ops->count = count;
    OrtStatus* status = count == 0 ? NULL : fill_domain(ops, variant);
    if (status != NULL) {
        destroy_ops(ops);
        return status;
    }
    *out = ops;
    return NULL;
}

OrtStatus* tile_ops_for(const OrtApiBase* base, const tile_ops** out) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static tile_ops* all;
    pthread_mutex_lock(&lock);
    tile_ops* ops = all;
    while (ops != NULL && ops->base != base) ops = ops->next;
    OrtStatus* status = NULL;
    if (ops == NULL) {
        status = create_ops(base, &ops);
        if (ops != NULL) {
            ops->next = all;
            all = ops;
        }
    }
    pthread_mutex_unlock(&lock);
    *out = ops;
    return status;
}

/* ---- exported ---- */

TILE_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
    const tile_ops* ops = NULL;
    TILE_TRY(tile_ops_for(base, &ops));
    if (ops == NULL || ops->domain == NULL) return NULL;
    return ops->host.api->AddCustomOpDomain(options, ops->domain);
}

/* The instruction set that this processor will run, or NULL when it can run none of the library's. */
TILE_EXPORT const char* TileFuseVariant(void) {
    const tile_variant* variant = tile_supported_variant();
    return variant == NULL ? NULL : variant->isa;
}

/* The operator type of kernel `index` (any variant has the same ones), or NULL past the last. */
TILE_EXPORT const char* TileFuseKernelName(int32_t index) {
    if (tile_generated_library.n_variants == 0) return NULL;
    const tile_variant* variant = &tile_generated_library.variants[0];
    return index < 0 || index >= variant->n_kernels ? NULL : variant->kernels[index]->name;
}

/* Whether kernel `index` has one for NVIDIA cards beside it. */
TILE_EXPORT int32_t TileFuseHasCuda(int32_t index) {
    return TileFuseKernelName(index) != NULL && on_card(index) != NULL;
}
