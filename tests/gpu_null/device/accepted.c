/* Calls that only return success. This file includes no CUDA header, so that it can declare the calls without
 * parameters.
 */
#include "null_cuda.h"

ACCEPT(cuCtxPopCurrent_v2)
ACCEPT(cuCtxPushCurrent_v2)
ACCEPT(cuCtxSetCurrent)
ACCEPT(cuCtxSetLimit)
ACCEPT(cuDevicePrimaryCtxRelease_v2)
ACCEPT(cuFuncSetAttribute)
ACCEPT(cuFuncSetCacheConfig)
ACCEPT(cuInit)
ACCEPT(cuLinkAddData_v2)
ACCEPT(cuLinkComplete)
ACCEPT(cuLinkCreate_v2)
ACCEPT(cuModuleUnload)
ACCEPT(cuTensorMapEncodeTiled)

/* NVML: the allocator queries NVLink fabrics for expandable segments; the device has none. */
ACCEPT(nvmlDeviceGetComputeRunningProcesses)
ACCEPT(nvmlDeviceGetGpuFabricInfoV)
ACCEPT(nvmlDeviceGetHandleByPciBusId_v2)
ACCEPT(nvmlDeviceGetNvLinkRemoteDeviceType)
ACCEPT(nvmlDeviceGetNvLinkRemotePciInfo_v2)
ACCEPT(nvmlInit_v2)
ACCEPT(nvmlSystemGetCudaDriverVersion_v2)

ACCEPT(cudaDeviceEnablePeerAccess)
ACCEPT(cudaEventDestroy)
ACCEPT(cudaEventQuery)
ACCEPT(cudaFuncSetAttribute)
ACCEPT(cudaGetLastError)
ACCEPT(cudaKernelSetAttributeForDevice)
ACCEPT(cudaLibraryUnload)
ACCEPT(cudaPeekAtLastError)
ACCEPT(cudaProfilerStart)
ACCEPT(cudaProfilerStop)
ACCEPT(cudaStreamDestroy)
ACCEPT(cudaStreamQuery)
ACCEPT(cudaStreamWaitEvent)
ACCEPT(cudaThreadExchangeStreamCaptureMode)
