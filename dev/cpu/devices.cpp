/* dev/cpu/devices.cpp - devices: all alike, all this process's memory */
#include "memory.h"
#include <limits.h>
#include <stdio.h>
#include <string.h>

using namespace cuda_cpu;

static thread_local int current_device = 0;

extern "C" {

static bool device_exists(int device) { return device >= 0 && device < options().devices; }

cudaError_t cudaGetDeviceCount(int* count) {
    CUDA_CPU_ENTRY("cudaGetDeviceCount", cudaErrorUnknown);
    if (!count) return set_error(cudaErrorInvalidValue);
    *count = options().devices;
    return set_error(*count ? cudaSuccess : cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int device) {
    CUDA_CPU_ENTRY("cudaSetDevice", cudaErrorUnknown);
    if (!options().devices) return set_error(cudaErrorNoDevice);
    if (!device_exists(device)) return set_error(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
    CUDA_CPU_ENTRY("cudaGetDevice", cudaErrorUnknown);
    if (!device) return set_error(cudaErrorInvalidValue);
    if (!options().devices) return set_error(cudaErrorNoDevice);
    *device = current_device;
    return cudaSuccess;
}
cudaError_t cudaSetDeviceFlags(unsigned int) {
    CUDA_CPU_ENTRY("cudaSetDeviceFlags", cudaErrorUnknown);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device) {
    CUDA_CPU_ENTRY("cudaDeviceGetAttribute", cudaErrorUnknown);
    if (!value) return set_error(cudaErrorInvalidValue);
    if (!device_exists(device)) return set_error(cudaErrorInvalidDevice);
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxBlockDimX: *value = 1024; break;
    case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = INT_MAX; break;
    case cudaDevAttrMaxGridDimY: *value = 65535; break;
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = SHARED_DEFAULT; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = SHARED_MAX; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = SHARED_MAX + 1024; break;
    case cudaDevAttrTotalConstantMemory: *value = 65536; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
    case cudaDevAttrMultiProcessorCount: *value = 4; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrStreamPrioritiesSupported: *value = 1; break;
    case cudaDevAttrAsyncEngineCount: *value = 2; break;
    default: *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* p, int device) {
    CUDA_CPU_ENTRY("cudaGetDeviceProperties", cudaErrorUnknown);
    if (!p) return set_error(cudaErrorInvalidValue);
    if (!device_exists(device)) return set_error(cudaErrorInvalidDevice);
    memset(p, 0, sizeof(*p));
    snprintf(p->name, sizeof(p->name), "cuda-cpu");
    p->totalGlobalMem = options().memory_bytes ? options().memory_bytes : machine_total();
    p->major = 9, p->minor = 0;
    p->multiProcessorCount = 4;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = INT_MAX, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->sharedMemPerBlock = (size_t)SHARED_DEFAULT;
    p->sharedMemPerBlockOptin = (size_t)SHARED_MAX;
    p->sharedMemPerMultiprocessor = (size_t)SHARED_MAX + 1024;
    p->reservedSharedMemPerBlock = 1024;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->totalConstMem = 65536;
    p->memPitch = INT_MAX;
    p->textureAlignment = 512;
    p->l2CacheSize = 8 << 20;
    p->memoryBusWidth = 64;
    p->asyncEngineCount = 2;
    p->unifiedAddressing = p->managedMemory = p->concurrentKernels = p->canMapHostMemory = 1;
    p->memoryPoolsSupported = p->streamPrioritiesSupported = 1;
    p->pciBusID = device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
    CUDA_CPU_ENTRY("cudaDeviceGetPCIBusId", cudaErrorUnknown);
    if (!id || length < 13) return set_error(cudaErrorInvalidValue);
    if (!device_exists(device)) return set_error(cudaErrorInvalidDevice);
    snprintf(id, (size_t)length, "0000:%02X:00.0", (unsigned)device & 255);
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
    CUDA_CPU_ENTRY("cudaDeviceCanAccessPeer", cudaErrorUnknown);
    if (!can) return set_error(cudaErrorInvalidValue);
    if (!device_exists(device) || !device_exists(peer)) return set_error(cudaErrorInvalidDevice);
    *can = device != peer;
    return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags) {
    CUDA_CPU_ENTRY("cudaDeviceEnablePeerAccess", cudaErrorUnknown);
    if (flags) return set_error(cudaErrorInvalidValue);
    return set_error(device_exists(peer) && peer != current_device ? cudaSuccess : cudaErrorInvalidDevice);
}
cudaError_t cudaDriverGetVersion(int* version) {
    CUDA_CPU_ENTRY("cudaDriverGetVersion", cudaErrorUnknown);
    if (!version) return set_error(cudaErrorInvalidValue);
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
    CUDA_CPU_ENTRY("cudaRuntimeGetVersion", cudaErrorUnknown);
    if (!version) return set_error(cudaErrorInvalidValue);
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetLimit(size_t* value, enum cudaLimit limit) {
    CUDA_CPU_ENTRY("cudaDeviceGetLimit", cudaErrorUnknown);
    if (!value) return set_error(cudaErrorInvalidValue);
    *value = limit == cudaLimitStackSize ? 1024 : 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceSetLimit(enum cudaLimit, size_t) {
    CUDA_CPU_ENTRY("cudaDeviceSetLimit", cudaErrorUnknown);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    CUDA_CPU_ENTRY("cudaDeviceGetStreamPriorityRange", cudaErrorUnknown);
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaDeviceReset(void) {
    CUDA_CPU_ENTRY("cudaDeviceReset", cudaErrorUnknown);
    check_canaries();
    report_waits();
    reset_streams();
    reload_options();
    cudaGetLastError();
    current_device = 0;
    return cudaSuccess;
}
cudaError_t cudaProfilerStart(void) {
    CUDA_CPU_ENTRY("cudaProfilerStart", cudaErrorUnknown);
    return cudaSuccess;
}
cudaError_t cudaProfilerStop(void) {
    CUDA_CPU_ENTRY("cudaProfilerStop", cudaErrorUnknown);
    return cudaSuccess;
}

} // extern "C"
