/* The CUDA driver functions that Triton and PyTorch's loader call. Memory is in memory.c. */
#include <string.h>

#include "null_cuda.h"

enum { MAX_THREADS_PER_BLOCK = 0, NUM_REGISTERS = 4 }; /* CUfunction_attribute */

/* ---- devices and contexts: a context is the number of its device */

#define CONTEXT_OF(device) ((void *)(uintptr_t)(0x1000 + (device)))

EXPORT int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return 0;
}

EXPORT int cuDeviceGetCount(int *count) {
    *count = num_devices();
    return 0;
}

EXPORT int cuDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}

EXPORT int cuDeviceTotalMem_v2(size_t *num_bytes, int device) {
    *num_bytes = total_memory();
    return 0;
}

EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    if (flags != NULL) *flags = 0;
    *is_active = device == current_device();
    return 0;
}

EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = CONTEXT_OF(device);
    return 0;
}

EXPORT int cuCtxGetCurrent(void **context) {
    *context = CONTEXT_OF(current_device());
    return 0;
}

EXPORT int cuCtxGetDevice(int *device) {
    *device = current_device();
    return 0;
}

EXPORT int cuCtxGetLimit(size_t *value, int limit) {
    *value = 8 << 20;
    return 0;
}

EXPORT int cuGetErrorString(int error, const char **text) {
    *text = "the null CUDA device reports no details";
    return 0;
}

EXPORT int cuGetErrorName(int error, const char **text) { return cuGetErrorString(error, text); }

/* ---- modules and launches */

EXPORT int cuModuleLoadData(void **module, const void *image) {
    *module = new_handle();
    return 0;
}

EXPORT int cuModuleLoad(void **module, const char *path) { return cuModuleLoadData(module, path); }

EXPORT int cuModuleLoadDataEx(void **module, const void *image, unsigned num_options, void *options, void **values) {
    return cuModuleLoadData(module, image);
}

/* A function's handle is its name. */
EXPORT int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = strdup(name);
    return 0;
}

EXPORT int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == NUM_REGISTERS ? 32 : attribute == MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return 0;
}

EXPORT int cuLaunchKernel(const char *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared, void *stream) {
    record_in_stream(stream, LAUNCH, function);
    return 0;
}

EXPORT int cuLaunchCooperativeKernel(const char *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                     unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                     void *stream) {
    return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream);
}

struct launch_config { /* the first fields of CUlaunchConfig */
    unsigned grid[3];
    unsigned block[3];
    unsigned shared;
    void *stream;
};

EXPORT int cuLaunchKernelEx(const struct launch_config *config, const char *function) {
    record_in_stream(config->stream, LAUNCH, function);
    return 0;
}

EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) {
    *blocks = 2;
    return 0;
}

EXPORT int cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *config) {
    *clusters = 16;
    return 0;
}

/* ---- streams */

EXPORT int cuStreamGetCaptureInfo_v2(void *stream, int *status) {
    *status = is_capturing(stream); /* CUstreamCaptureStatus: 0 is none, 1 is active */
    return 0;
}

EXPORT int cuStreamSynchronize(void *stream) {
    if (is_capturing(stream)) return CAPTURE_UNSUPPORTED;
    record_event(SYNC, "cuStreamSynchronize");
    return 0;
}

EXPORT int cuCtxSynchronize(void) {
    record_event(SYNC, "cuCtxSynchronize");
    return 0;
}
