/* Calls that need no answer but success. This file includes no CUDA header, so that each can be declared without its
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
