/* The library as an execution provider, for ONNX Runtime 1.24 and newer: `TileFuseExecutionProvider` on the CPU device.
 *
 * It claims exactly the nodes that its kernel registry holds. The factory also hands out the custom-op domain, whose
 * schemas keep ONNX Runtime from inlining the function bodies; the kernels are those of the custom ops.
 */
#include "custom_ops.h"

#include <stdlib.h>
#include <string.h>

#define PROVIDER_NAME "TileFuseExecutionProvider"
#define PROVIDER_VERSION "0.1.0"
#define REGISTRATION_KEY "tilefuse_registration"

enum { DEVICE_CPU = 0, SINCE_VERSION = 1 };

typedef struct factory {
    OrtEpFactory base; /* first: ONNX Runtime hands back a pointer to it */
    const OrtEpApi* ep_api;
    const tile_ops* ops;
    OrtKernelRegistry* registry;
    char* registration; /* the name the library was registered under: tells devices of two libraries apart */
} factory;

typedef struct provider {
    OrtEp base;
    const factory* owner;
} provider;

typedef struct node_kernel {
    OrtKernelImpl base;
    const tile_op* op;
} node_kernel;

/* ---- kernels ---- */

static OrtStatus* node_compute(OrtKernelImpl* self, OrtKernelContext* context) {
    const tile_op* op = ((const node_kernel*)self)->op;
    return tile_call_kernel(op->host, op->kernel, context);
}

static void node_release(OrtKernelImpl* self) { free(self); }

static OrtStatus* node_create(void* state, const OrtKernelInfo* info, OrtKernelImpl** out) {
    (void)info;
    const tile_op* op = state;
    node_kernel* node = calloc(1, sizeof *node);
    if (node == NULL) return tile_refuse(op->host->api, ORT_FAIL, op->kernel->name, "no memory for a kernel");
    node->base.ort_version_supported = ORT_API_KERNEL_EP;
    node->base.Compute = node_compute;
    node->base.Release = node_release;
    node->op = op;
    *out = &node->base;
    return NULL;
}

static OrtStatus* describe_kernel(const OrtEpApi* ep, OrtKernelDefBuilder* builder, const tile_op* op,
                                  OrtKernelDef** out) {
    TILE_TRY(ep->KernelDefBuilder_SetOperatorType(builder, op->kernel->name));
    TILE_TRY(ep->KernelDefBuilder_SetDomain(builder, TILE_DOMAIN));
    TILE_TRY(ep->KernelDefBuilder_SetSinceVersion(builder, SINCE_VERSION, SINCE_VERSION));
    TILE_TRY(ep->KernelDefBuilder_SetExecutionProvider(builder, PROVIDER_NAME));
    return ep->KernelDefBuilder_Build(builder, out);
}

/* ONNX Runtime takes the registry's `state` as mutable; node_create only reads it. */
static OrtStatus* add_kernel(const OrtEpApi* ep, OrtKernelRegistry* registry, const tile_op* op) {
    OrtKernelDefBuilder* builder = NULL;
    OrtKernelDef* definition = NULL;
    TILE_TRY(ep->CreateKernelDefBuilder(&builder));
    OrtStatus* status = describe_kernel(ep, builder, op, &definition);
    ep->ReleaseKernelDefBuilder(builder);
    if (status != NULL) return status;
    status = ep->KernelRegistry_AddKernel(registry, definition, node_create, (void*)op);
    ep->ReleaseKernelDef(definition);
    return status;
}

/* ---- the provider of one session ---- */

static const char* provider_name(const OrtEp* self) {
    (void)self;
    return PROVIDER_NAME;
}

static OrtStatus* claim_nodes(const factory* owner, const OrtNode* const* nodes, size_t count,
                              OrtEpGraphSupportInfo* info) {
    for (size_t i = 0; i < count; i++) {
        const OrtKernelDef* definition = NULL;
        TILE_TRY(owner->ep_api->EpGraphSupportInfo_LookUpKernel(info, nodes[i], &definition));
        if (definition != NULL) TILE_TRY(owner->ep_api->EpGraphSupportInfo_AddSingleNode(info, nodes[i]));
    }
    return NULL;
}

static OrtStatus* provider_capability(OrtEp* self, const OrtGraph* graph, OrtEpGraphSupportInfo* info) {
    const factory* owner = ((const provider*)self)->owner;
    const OrtApi* api = owner->ops->host.api;
    size_t count = 0;
    TILE_TRY(api->Graph_GetNumNodes(graph, &count));
    if (count == 0) return NULL;
    const OrtNode** nodes = calloc(count, sizeof *nodes);
    if (nodes == NULL) return tile_refuse(api, ORT_FAIL, PROVIDER_NAME, "no memory for a list of %zu nodes", count);
    OrtStatus* status = api->Graph_GetNodes(graph, nodes, count);
    if (status == NULL) status = claim_nodes(owner, nodes, count, info);
    free(nodes);
    return status;
}

static OrtStatus* provider_registry(OrtEp* self, const OrtKernelRegistry** out) {
    *out = ((const provider*)self)->owner->registry;
    return NULL;
}

/* ---- the factory ---- */

static const char* factory_name(const OrtEpFactory* self) {
    (void)self;
    return PROVIDER_NAME;
}

static const char* factory_vendor(const OrtEpFactory* self) {
    (void)self;
    return "TileFuse";
}

static uint32_t factory_vendor_id(const OrtEpFactory* self) {
    (void)self;
    return 0; /* no PCI vendor */
}

static const char* factory_version(const OrtEpFactory* self) {
    (void)self;
    return PROVIDER_VERSION;
}

static OrtStatus* factory_devices(OrtEpFactory* self, const OrtHardwareDevice* const* devices, size_t device_count,
                                  OrtEpDevice** out, size_t capacity, size_t* count) {
    const factory* owner = (const factory*)self;
    const OrtApi* api = owner->ops->host.api;
    *count = 0;
    for (size_t i = 0; i < device_count && capacity > 0; i++) {
        if (api->HardwareDevice_Type(devices[i]) != DEVICE_CPU) continue;
        OrtKeyValuePairs* metadata = NULL;
        api->CreateKeyValuePairs(&metadata);
        api->AddKeyValuePair(metadata, REGISTRATION_KEY, owner->registration);
        OrtStatus* status = owner->ep_api->CreateEpDevice(self, devices[i], metadata, NULL, &out[0]);
        api->ReleaseKeyValuePairs(metadata);
        if (status == NULL) *count = 1;
        return status;
    }
    return NULL;
}

static OrtStatus* factory_create_ep(OrtEpFactory* self, const OrtHardwareDevice* const* devices,
                                    const OrtKeyValuePairs* const* metadata, size_t device_count,
                                    const OrtSessionOptions* options, const OrtLogger* logger, OrtEp** out) {
    (void)devices, (void)metadata, (void)device_count, (void)options, (void)logger;
    const factory* owner = (const factory*)self;
    provider* created = calloc(1, sizeof *created);
    if (created == NULL) return tile_refuse(owner->ops->host.api, ORT_FAIL, PROVIDER_NAME, "no memory for a provider");
    created->base.ort_version_supported = ORT_API_KERNEL_EP;
    created->base.GetName = provider_name;
    created->base.GetCapability = provider_capability;
    created->base.GetKernelRegistry = provider_registry;
    created->owner = owner;
    *out = &created->base;
    return NULL;
}

static void factory_release_ep(OrtEpFactory* self, OrtEp* ep) {
    (void)self;
    free(ep);
}

/* Host memory on both sides: nothing to transfer. */
static OrtStatus* factory_data_transfer(OrtEpFactory* self, OrtDataTransferImpl** out) {
    (void)self;
    *out = NULL;
    return NULL;
}

static bool factory_is_stream_aware(const OrtEpFactory* self) {
    (void)self;
    return false;
}

static OrtStatus* factory_count_domains(OrtEpFactory* self, size_t* out) {
    *out = ((const factory*)self)->ops->domain == NULL ? 0 : 1;
    return NULL;
}

static OrtStatus* factory_domains(OrtEpFactory* self, OrtCustomOpDomain** domains, size_t count) {
    if (count > 0) domains[0] = ((const factory*)self)->ops->domain;
    return NULL;
}

static void destroy_factory(factory* owner) {
    if (owner->registry != NULL) owner->ep_api->ReleaseKernelRegistry(owner->registry);
    free(owner->registration);
    free(owner);
}

static OrtStatus* fill_registry(factory* owner) {
    TILE_TRY(owner->ep_api->CreateKernelRegistry(&owner->registry));
    for (int32_t i = 0; i < owner->ops->count; i++) {
        TILE_TRY(add_kernel(owner->ep_api, owner->registry, &owner->ops->ops[i]));
    }
    return NULL;
}

static OrtStatus* create_factory(const char* registration, const tile_ops* ops, factory** out) {
    const OrtApi* api = ops->host.api;
    factory* owner = calloc(1, sizeof *owner);
    char* name = owner == NULL ? NULL : malloc(strlen(registration) + 1);
    if (name == NULL) {
        free(owner);
        return tile_refuse(api, ORT_FAIL, PROVIDER_NAME, "no memory for the factory");
    }
    owner->registration = strcpy(name, registration);
    owner->ep_api = api->GetEpApi();
    owner->ops = ops;
    owner->base = (OrtEpFactory){
        .ort_version_supported = ORT_API_KERNEL_EP,
        .GetName = factory_name,
        .GetVendor = factory_vendor,
        .GetSupportedDevices = factory_devices,
        .CreateEp = factory_create_ep,
        .ReleaseEp = factory_release_ep,
        .GetVendorId = factory_vendor_id,
        .GetVersion = factory_version,
        .CreateDataTransfer = factory_data_transfer,
        .IsStreamAware = factory_is_stream_aware,
        .GetNumCustomOpDomains = factory_count_domains,
        .GetCustomOpDomains = factory_domains,
    };
    OrtStatus* status = fill_registry(owner);
    if (status != NULL) {
        destroy_factory(owner);
        return status;
    }
    *out = owner;
    return NULL;
}

/* ---- exported ---- */

TILE_EXPORT OrtStatus* CreateEpFactories(const char* registration, const OrtApiBase* base, const OrtLogger* logger,
                                         OrtEpFactory** factories, size_t capacity, size_t* count) {
    (void)logger;
    *count = 0;
    const tile_ops* ops = NULL;
    TILE_TRY(tile_ops_for(base, &ops));
    if (ops == NULL) return NULL; /* said on stderr why */
    if (tile_ort_minor(base) < ORT_API_KERNEL_EP) {
        return tile_refuse(ops->host.api, ORT_FAIL, PROVIDER_NAME,
                           "needs ONNX Runtime 1.%d or newer, found %s; register the library's custom ops instead",
                           ORT_API_KERNEL_EP, base->GetVersionString());
    }
    if (capacity < 1) return tile_refuse(ops->host.api, ORT_INVALID_ARGUMENT, PROVIDER_NAME, "no room for a factory");
    factory* created = NULL;
    TILE_TRY(create_factory(registration, ops, &created));
    factories[0] = &created->base;
    *count = 1;
    return NULL;
}

TILE_EXPORT OrtStatus* ReleaseEpFactory(OrtEpFactory* self) {
    destroy_factory((factory*)self);
    return NULL;
}
