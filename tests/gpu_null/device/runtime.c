/* The CUDA runtime except memory: devices, streams, events, launches. */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "null_cuda.h"

#define CUDA_VERSION_REPORTED 13000
#define NAME "NVIDIA H100 80GB HBM3"

/* ---- devices: the properties of an H100 SXM, which determine launch configurations */

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
    *count = num_devices();
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    struct cudaDeviceProp values = {
        .name = NAME,
        .totalGlobalMem = total_memory(),
        .sharedMemPerBlock = 49152,
        .regsPerBlock = 65536,
        .warpSize = 32,
        .maxThreadsPerBlock = 1024,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .major = 9,
        .minor = 0,
        .textureAlignment = 512,
        .multiProcessorCount = 132,
        .canMapHostMemory = 1,
        .concurrentKernels = 1,
        .unifiedAddressing = 1,
        .l2CacheSize = 52428800,
        .maxThreadsPerMultiProcessor = 2048,
        .sharedMemPerMultiprocessor = 233472,
        .regsPerMultiprocessor = 65536,
        .managedMemory = 1,
        .cooperativeLaunch = 1,
        .sharedMemPerBlockOptin = 232448,
        .maxBlocksPerMultiProcessor = 32,
        .asyncEngineCount = 3,
        .streamPrioritiesSupported = 1,
        .pciBusID = device,
        .clusterLaunch = 1,
        .memoryBusWidth = 5120,
        .reservedSharedMemPerBlock = 1024,
        .uuid = {{(char)(device + 1)}},
    };
    *properties = values;
    return cudaSuccess;
}

static int attribute_value(int attribute) {
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: return 1024;
        case cudaDevAttrMaxBlockDimX: return 1024;
        case cudaDevAttrMaxBlockDimY: return 1024;
        case cudaDevAttrMaxBlockDimZ: return 64;
        case cudaDevAttrMaxGridDimX: return 2147483647;
        case cudaDevAttrMaxGridDimY: return 65535;
        case cudaDevAttrMaxGridDimZ: return 65535;
        case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
        case cudaDevAttrTotalConstantMemory: return 65536;
        case cudaDevAttrWarpSize: return 32;
        case cudaDevAttrMaxRegistersPerBlock: return 65536;
        case cudaDevAttrClockRate: return 1980000;
        case cudaDevAttrMultiProcessorCount: return 132;
        case cudaDevAttrCanMapHostMemory: return 1;
        case cudaDevAttrConcurrentKernels: return 1;
        case cudaDevAttrMemoryClockRate: return 2619000;
        case cudaDevAttrGlobalMemoryBusWidth: return 5120;
        case cudaDevAttrL2CacheSize: return 52428800;
        case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
        case cudaDevAttrAsyncEngineCount: return 3;
        case cudaDevAttrUnifiedAddressing: return 1;
        case cudaDevAttrComputeCapabilityMajor: return 9;
        case cudaDevAttrStreamPrioritiesSupported: return 1;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
        case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
        case cudaDevAttrManagedMemory: return 1;
        case cudaDevAttrCooperativeLaunch: return 1;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
        case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
        case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
        case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
        case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: return 1;
        default: return 0;
    }
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    *value = attribute_value((int)attribute);
    return cudaSuccess;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = attribute_value(attribute);
    return 0;
}

EXPORT CUresult cuDeviceGetName(char *name, int capacity, CUdevice device) {
    snprintf(name, capacity, NAME);
    return 0;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *id, int capacity, int device) {
    snprintf(id, capacity, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = 1;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *lowest, int *highest) {
    *lowest = 0;
    *highest = -5;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDA_VERSION_REPORTED;
    return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    struct location at = find_location(address);
    memset(attributes, 0, sizeof *attributes);
    attributes->type = (enum cudaMemoryType)at.kind;
    attributes->device = at.kind == PAGEABLE ? -2 : at.device;
    attributes->devicePointer = at.kind == PAGEABLE ? NULL : (void *)address;
    attributes->hostPointer = at.kind == DEVICE ? NULL : (void *)address;
    return cudaSuccess;
}

/* ---- streams and events: all work completes immediately, so only handles and waits remain. An event stores the
 * training step of its last recording.
 */

struct event {
    long step;
};

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    *stream = new_handle();
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreate(stream); }

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return cudaStreamCreate(stream);
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = 0;
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) {
    *event = new_handle();
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return cudaEventCreate(event); }

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    ((struct event *)event)->step = current_step();
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) {
    cudaEventRecord(event, stream);
    return CUDA_SUCCESS;
}

EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    *milliseconds = 1.0f;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (is_capturing(stream)) return CAPTURE_UNSUPPORTED;
    record_event(SYNC, "cudaStreamSynchronize");
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    int is_late = ((struct event *)event)->step < current_step() - 1;
    record_event(is_late ? LATE_WAIT : SYNC, "cudaEventSynchronize");
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize(void) {
    if (is_any_capturing()) return CAPTURE_UNSUPPORTED;
    record_event(SYNC, "cudaDeviceSynchronize");
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    function(data);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags) {
    function(stream, cudaSuccess, data);
    return cudaSuccess;
}

/* ---- kernels */

EXPORT cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                    cudaStream_t stream) {
    record_in_stream(stream, LAUNCH, kernel_name(function));
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    record_in_stream(config->stream, LAUNCH, kernel_name(function));
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                               size_t shared, cudaStream_t stream) {
    record_in_stream(stream, LAUNCH, kernel_name(function));
    return cudaSuccess;
}

/* nvcc's generated code requests a handle first; the handle is the host function. */
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                      cudaStream_t stream) {
    record_in_stream(stream, LAUNCH, kernel_name(kernel));
    return cudaSuccess;
}

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = 90;
    attributes->binaryVersion = 90;
    attributes->maxDynamicSharedSizeBytes = 232448;
    return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                                          size_t shared, unsigned flags) {
    *blocks = 2;
    return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads,
                                                                 size_t shared) {
    *blocks = 2;
    return cudaSuccess;
}

EXPORT cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *options,
                                       void **values, unsigned num_options, enum cudaLibraryOption *library_options,
                                       void **library_values, unsigned num_library_options) {
    *library = new_handle();
    return cudaSuccess;
}

EXPORT cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
    *kernel = new_handle();
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    static char contents[1 << 16];
    *address = contents;
    return cudaSuccess;
}

/* ---- driver functions by name: the newest version if this library defines it; others accept all arguments */

static int accept_anything(void) { return 0; }

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *result) {
    char versioned[256];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    void *found = dlsym(RTLD_DEFAULT, name);
    if (found == NULL) found = dlsym(RTLD_DEFAULT, versioned);
    *function = found != NULL ? found : (void *)accept_anything;
    if (result != NULL) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                           enum cudaDriverEntryPointQueryResult *result) {
    return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}
