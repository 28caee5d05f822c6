/* The part of ONNX Runtime's C ABI that this library calls or implements, declared by slot.
 *
 * ONNX Runtime's tables only ever grow at the end, so a member's index never changes: each gap names the slots it
 * skips, and the assertions below pin every member to its index. Slots beyond those of API version 17 carry the version
 * that brought them and are read only after asking for it.
 */
#ifndef ORT_ABI_H
#define ORT_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ORT_API_CUSTOM_OPS 17 /* everything that a custom op needs */
#define ORT_API_KERNEL_EP 24  /* execution providers with a kernel registry; shapes by reference */

#define ORT_GAP(first, last) void* unused_##first[(last) - (first) + 1]
#define ORT_SLOT(table, member, index) \
    _Static_assert(offsetof(table, member) == (index) * sizeof(void*), #table "." #member " is slot " #index)

typedef enum OrtErrorCode { ORT_OK = 0, ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2 } OrtErrorCode;

typedef struct OrtAllocator OrtAllocator;
typedef struct OrtCustomOpDomain OrtCustomOpDomain;
typedef struct OrtEpDevice OrtEpDevice;
typedef struct OrtEpGraphSupportInfo OrtEpGraphSupportInfo;
typedef struct OrtDataTransferImpl OrtDataTransferImpl;
typedef struct OrtGraph OrtGraph;
typedef struct OrtHardwareDevice OrtHardwareDevice;
typedef struct OrtKernelContext OrtKernelContext;
typedef struct OrtKernelDef OrtKernelDef;
typedef struct OrtKernelDefBuilder OrtKernelDefBuilder;
typedef struct OrtKernelInfo OrtKernelInfo;
typedef struct OrtKernelRegistry OrtKernelRegistry;
typedef struct OrtKeyValuePairs OrtKeyValuePairs;
typedef struct OrtLogger OrtLogger;
typedef struct OrtMemoryInfo OrtMemoryInfo;
typedef struct OrtNode OrtNode;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtShapeInferContext OrtShapeInferContext;
typedef struct OrtStatus OrtStatus; /* NULL is success; whoever receives one owns it */
typedef struct OrtTensorTypeAndShapeInfo OrtTensorTypeAndShapeInfo;
typedef struct OrtValue OrtValue;

typedef struct OrtApi OrtApi;
typedef struct OrtCustomOp OrtCustomOp;
typedef struct OrtEp OrtEp;
typedef struct OrtEpApi OrtEpApi;
typedef struct OrtEpFactory OrtEpFactory;
typedef struct OrtKernelImpl OrtKernelImpl;

typedef struct OrtApiBase {
    const OrtApi* (*GetApi)(uint32_t version); /* NULL, and a line on stderr, when too new for this ONNX Runtime */
    const char* (*GetVersionString)(void);
} OrtApiBase;

struct OrtApi {
    OrtStatus* (*CreateStatus)(OrtErrorCode code, const char* message);
    ORT_GAP(1, 25);
    OrtStatus* (*CreateCustomOpDomain)(const char* domain, OrtCustomOpDomain** out);
    OrtStatus* (*CustomOpDomain_Add)(OrtCustomOpDomain* domain, const OrtCustomOp* op);
    OrtStatus* (*AddCustomOpDomain)(OrtSessionOptions* options, OrtCustomOpDomain* domain);
    ORT_GAP(29, 50);
    OrtStatus* (*GetTensorMutableData)(OrtValue* value, void** out);
    ORT_GAP(52, 56);
    OrtStatus* (*CreateTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo** out);
    OrtStatus* (*SetTensorElementType)(OrtTensorTypeAndShapeInfo* info, int32_t type);
    OrtStatus* (*SetDimensions)(OrtTensorTypeAndShapeInfo* info, const int64_t* dims, size_t rank);
    OrtStatus* (*GetTensorElementType)(const OrtTensorTypeAndShapeInfo* info, int32_t* out);
    OrtStatus* (*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo* info, size_t* out);
    OrtStatus* (*GetDimensions)(const OrtTensorTypeAndShapeInfo* info, int64_t* dims, size_t rank);
    OrtStatus* (*GetSymbolicDimensions)(const OrtTensorTypeAndShapeInfo* info, const char** names, size_t rank);
    ORT_GAP(64, 64);
    OrtStatus* (*GetTensorTypeAndShape)(const OrtValue* value, OrtTensorTypeAndShapeInfo** out);
    ORT_GAP(66, 74);
    OrtStatus* (*AllocatorAlloc)(OrtAllocator* allocator, size_t bytes, void** out);
    OrtStatus* (*AllocatorFree)(OrtAllocator* allocator, void* memory);
    ORT_GAP(77, 89);
    OrtStatus* (*KernelContext_GetInput)(const OrtKernelContext* context, size_t index, const OrtValue** out);
    OrtStatus* (*KernelContext_GetOutput)(OrtKernelContext* context, size_t index, const int64_t* dims, size_t rank,
                                          OrtValue** out);
    ORT_GAP(92, 92);
    void (*ReleaseStatus)(OrtStatus* status);
    ORT_GAP(94, 98);
    void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo* info);
    ORT_GAP(100, 100);
    void (*ReleaseCustomOpDomain)(OrtCustomOpDomain* domain);
    ORT_GAP(102, 131);
    void (*ReleaseAllocator)(OrtAllocator* allocator);
    ORT_GAP(133, 192);
    OrtStatus* (*KernelContext_GetGPUComputeStream)(const OrtKernelContext* context, void** borrowed);
    OrtStatus* (*GetTensorMemoryInfo)(const OrtValue* value, const OrtMemoryInfo** borrowed);
    ORT_GAP(195, 252);
    OrtStatus* (*KernelContext_GetAllocator)(const OrtKernelContext* context, const OrtMemoryInfo* info,
                                             OrtAllocator** out);
    ORT_GAP(254, 267);
    OrtStatus* (*ShapeInferContext_GetInputTypeShape)(const OrtShapeInferContext* context, size_t index,
                                                      OrtTensorTypeAndShapeInfo** borrowed);
    ORT_GAP(269, 269);
    OrtStatus* (*ShapeInferContext_SetOutputTypeShape)(const OrtShapeInferContext* context, size_t index,
                                                       const OrtTensorTypeAndShapeInfo* info);
    OrtStatus* (*SetSymbolicDimensions)(OrtTensorTypeAndShapeInfo* info, const char** names, size_t rank);
    ORT_GAP(272, 273);
    OrtStatus* (*KernelContext_ParallelFor)(const OrtKernelContext* context, void (*body)(void* data, size_t index),
                                            size_t total, size_t batches, void* data);
    ORT_GAP(275, 294);
    void (*CreateKeyValuePairs)(OrtKeyValuePairs** out);                                        /* API 22 */
    void (*AddKeyValuePair)(OrtKeyValuePairs* pairs, const char* key, const char* value);       /* API 22 */
    ORT_GAP(297, 299);
    void (*ReleaseKeyValuePairs)(OrtKeyValuePairs* pairs);                                      /* API 22 */
    ORT_GAP(301, 306);
    int32_t (*HardwareDevice_Type)(const OrtHardwareDevice* device);                            /* API 22 */
    ORT_GAP(308, 316);
    const OrtEpApi* (*GetEpApi)(void);                                                          /* API 22 */
    ORT_GAP(318, 343);
    OrtStatus* (*Graph_GetNumNodes)(const OrtGraph* graph, size_t* out);                        /* API 23 */
    OrtStatus* (*Graph_GetNodes)(const OrtGraph* graph, const OrtNode** nodes, size_t count);   /* API 23 */
    ORT_GAP(346, 413);
    OrtStatus* (*GetTensorElementTypeAndShapeDataReference)(const OrtValue* value, int32_t* type,
                                                            const int64_t** dims, size_t* rank); /* API 24 */
};

ORT_SLOT(OrtApi, CreateCustomOpDomain, 26);
ORT_SLOT(OrtApi, GetTensorMutableData, 51);
ORT_SLOT(OrtApi, CreateTensorTypeAndShapeInfo, 57);
ORT_SLOT(OrtApi, GetSymbolicDimensions, 63);
ORT_SLOT(OrtApi, GetTensorTypeAndShape, 65);
ORT_SLOT(OrtApi, AllocatorAlloc, 75);
ORT_SLOT(OrtApi, KernelContext_GetInput, 90);
ORT_SLOT(OrtApi, ReleaseStatus, 93);
ORT_SLOT(OrtApi, ReleaseTensorTypeAndShapeInfo, 99);
ORT_SLOT(OrtApi, ReleaseCustomOpDomain, 101);
ORT_SLOT(OrtApi, ReleaseAllocator, 132);
ORT_SLOT(OrtApi, KernelContext_GetGPUComputeStream, 193);
ORT_SLOT(OrtApi, KernelContext_GetAllocator, 253);
ORT_SLOT(OrtApi, ShapeInferContext_GetInputTypeShape, 268);
ORT_SLOT(OrtApi, SetSymbolicDimensions, 271);
ORT_SLOT(OrtApi, KernelContext_ParallelFor, 274);
ORT_SLOT(OrtApi, CreateKeyValuePairs, 295);
ORT_SLOT(OrtApi, ReleaseKeyValuePairs, 300);
ORT_SLOT(OrtApi, HardwareDevice_Type, 307);
ORT_SLOT(OrtApi, GetEpApi, 317);
ORT_SLOT(OrtApi, Graph_GetNumNodes, 344);
ORT_SLOT(OrtApi, GetTensorElementTypeAndShapeDataReference, 414);

/* Implemented here. ONNX Runtime calls every member up to GetInputMemoryType and the two V2 functions unchecked. */
struct OrtCustomOp {
    uint32_t version;
    void* (*CreateKernel)(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info);
    const char* (*GetName)(const OrtCustomOp* op);
    const char* (*GetExecutionProviderType)(const OrtCustomOp* op); /* NULL: the CPU provider */
    int32_t (*GetInputType)(const OrtCustomOp* op, size_t index);
    size_t (*GetInputTypeCount)(const OrtCustomOp* op);
    int32_t (*GetOutputType)(const OrtCustomOp* op, size_t index);
    size_t (*GetOutputTypeCount)(const OrtCustomOp* op);
    void (*KernelCompute)(void* kernel, OrtKernelContext* context);
    void (*KernelDestroy)(void* kernel);
    int32_t (*GetInputCharacteristic)(const OrtCustomOp* op, size_t index); /* 0: required */
    int32_t (*GetOutputCharacteristic)(const OrtCustomOp* op, size_t index);
    int32_t (*GetInputMemoryType)(const OrtCustomOp* op, size_t index); /* 0: the provider's own memory */
    ORT_GAP(13, 16);
    OrtStatus* (*CreateKernelV2)(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** kernel);
    OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext* context);
    OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp* op, OrtShapeInferContext* context);
    ORT_GAP(20, 25);
};

ORT_SLOT(OrtCustomOp, GetInputMemoryType, 12);
ORT_SLOT(OrtCustomOp, CreateKernelV2, 17);
ORT_SLOT(OrtCustomOp, InferOutputShapeFn, 19);

/* What follows needs API 24. */

typedef OrtStatus* (*OrtKernelCreateFunc)(void* state, const OrtKernelInfo* info, OrtKernelImpl** out);

struct OrtEpApi {
    OrtStatus* (*CreateEpDevice)(OrtEpFactory* factory, const OrtHardwareDevice* device,
                                 const OrtKeyValuePairs* metadata, const OrtKeyValuePairs* options, OrtEpDevice** out);
    ORT_GAP(1, 2);
    OrtStatus* (*EpGraphSupportInfo_AddSingleNode)(OrtEpGraphSupportInfo* info, const OrtNode* node);
    ORT_GAP(4, 17);
    OrtStatus* (*CreateKernelRegistry)(OrtKernelRegistry** out);
    void (*ReleaseKernelRegistry)(OrtKernelRegistry* registry);
    OrtStatus* (*KernelRegistry_AddKernel)(OrtKernelRegistry* registry, const OrtKernelDef* definition,
                                           OrtKernelCreateFunc create, void* state);
    OrtStatus* (*CreateKernelDefBuilder)(OrtKernelDefBuilder** out);
    void (*ReleaseKernelDefBuilder)(OrtKernelDefBuilder* builder);
    OrtStatus* (*KernelDefBuilder_SetOperatorType)(OrtKernelDefBuilder* builder, const char* name);
    OrtStatus* (*KernelDefBuilder_SetDomain)(OrtKernelDefBuilder* builder, const char* domain);
    OrtStatus* (*KernelDefBuilder_SetSinceVersion)(OrtKernelDefBuilder* builder, int first, int last);
    OrtStatus* (*KernelDefBuilder_SetExecutionProvider)(OrtKernelDefBuilder* builder, const char* provider);
    ORT_GAP(27, 31);
    OrtStatus* (*KernelDefBuilder_Build)(OrtKernelDefBuilder* builder, OrtKernelDef** out);
    void (*ReleaseKernelDef)(OrtKernelDef* definition);
    ORT_GAP(34, 40);
    OrtStatus* (*EpGraphSupportInfo_LookUpKernel)(OrtEpGraphSupportInfo* info, const OrtNode* node,
                                                  const OrtKernelDef** borrowed); /* NULL when there is none */
};

ORT_SLOT(OrtEpApi, EpGraphSupportInfo_AddSingleNode, 3);
ORT_SLOT(OrtEpApi, CreateKernelRegistry, 18);
ORT_SLOT(OrtEpApi, KernelDefBuilder_Build, 32);
ORT_SLOT(OrtEpApi, EpGraphSupportInfo_LookUpKernel, 41);

struct OrtKernelImpl {
    uint32_t ort_version_supported;
    uint32_t flags; /* 0; belongs to ONNX Runtime */
    OrtStatus* (*Compute)(OrtKernelImpl* self, OrtKernelContext* context);
    void (*Release)(OrtKernelImpl* self);
    void* PrePackWeight;
    void* SetSharedPrePackedWeight;
};

struct OrtEp {
    uint32_t ort_version_supported;
    const char* (*GetName)(const OrtEp* self);
    OrtStatus* (*GetCapability)(OrtEp* self, const OrtGraph* graph, OrtEpGraphSupportInfo* info);
    ORT_GAP(3, 12);
    OrtStatus* (*GetKernelRegistry)(OrtEp* self, const OrtKernelRegistry** out);
    ORT_GAP(14, 14);
};

ORT_SLOT(OrtEp, GetKernelRegistry, 13);

/* ONNX Runtime calls the first five functions, GetVersion and CreateDataTransfer unchecked. */
struct OrtEpFactory {
    uint32_t ort_version_supported;
    const char* (*GetName)(const OrtEpFactory* self);
    const char* (*GetVendor)(const OrtEpFactory* self);
    OrtStatus* (*GetSupportedDevices)(OrtEpFactory* self, const OrtHardwareDevice* const* devices, size_t device_count,
                                      OrtEpDevice** out, size_t capacity, size_t* count);
    OrtStatus* (*CreateEp)(OrtEpFactory* self, const OrtHardwareDevice* const* devices,
                           const OrtKeyValuePairs* const* metadata, size_t device_count,
                           const OrtSessionOptions* options, const OrtLogger* logger, OrtEp** out);
    void (*ReleaseEp)(OrtEpFactory* self, OrtEp* ep);
    uint32_t (*GetVendorId)(const OrtEpFactory* self);
    const char* (*GetVersion)(const OrtEpFactory* self);
    ORT_GAP(8, 10);
    OrtStatus* (*CreateDataTransfer)(OrtEpFactory* self, OrtDataTransferImpl** out);
    bool (*IsStreamAware)(const OrtEpFactory* self);
    ORT_GAP(13, 15);
    OrtStatus* (*GetNumCustomOpDomains)(OrtEpFactory* self, size_t* out);
    OrtStatus* (*GetCustomOpDomains)(OrtEpFactory* self, OrtCustomOpDomain** domains, size_t count);
};

ORT_SLOT(OrtEpFactory, GetVersion, 7);
ORT_SLOT(OrtEpFactory, CreateDataTransfer, 11);
ORT_SLOT(OrtEpFactory, GetCustomOpDomains, 17);

#endif
