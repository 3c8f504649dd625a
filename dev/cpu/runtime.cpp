/* dev/cpu/runtime.cpp - errors and what can be asked of a kernel */
#include "internal.h"
#include <map>
#include <mutex>
#include <string.h>

namespace cuda_cpu {

// ----------------------------------------------------------------------------
// errors

static thread_local cudaError_t last_error = cudaSuccess;

cudaError_t set_error(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

struct ErrorText {
    cudaError_t code;
    const char* name;
    const char* text;
};
#define E(code, text) \
    { code, #code, text }
static const ErrorText error_texts[] = {
    E(cudaSuccess, "no error"),
    E(cudaErrorInvalidValue, "invalid argument"),
    E(cudaErrorMemoryAllocation, "out of memory"),
    E(cudaErrorInitializationError, "initialization error"),
    E(cudaErrorCudartUnloading, "driver shutting down"),
    E(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    E(cudaErrorInvalidPitchValue, "invalid pitch argument"),
    E(cudaErrorInvalidSymbol, "invalid device symbol"),
    E(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    E(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version"),
    E(cudaErrorInvalidDeviceFunction, "invalid device function"),
    E(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    E(cudaErrorInvalidDevice, "invalid device ordinal"),
    E(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    E(cudaErrorPeerAccessNotEnabled, "peer access has not been enabled"),
    E(cudaErrorHostMemoryAlreadyRegistered, "part or all of the requested memory range is already mapped"),
    E(cudaErrorHostMemoryNotRegistered, "pointer does not correspond to a registered memory region"),
    E(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    E(cudaErrorNotReady, "device not ready"),
    E(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    E(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    E(cudaErrorLaunchTimeout, "the launch timed out and was terminated"),
    E(cudaErrorLaunchFailure, "unspecified launch failure"),
    E(cudaErrorNotPermitted, "operation not permitted"),
    E(cudaErrorNotSupported, "operation not supported"),
    E(cudaErrorSystemNotReady, "system not yet initialized"),
    E(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    E(cudaErrorTimeout, "wait operation timed out"),
    E(cudaErrorUnknown, "unknown error"),
};
#undef E

static const ErrorText* find_error(cudaError_t error) {
    for (const ErrorText& e : error_texts)
        if (e.code == error) return &e;
    return NULL;
}

// ----------------------------------------------------------------------------
// kernel attributes

static std::mutex functions_lock;
static std::map<const void*, int> shared_attribute; // cudaFuncAttributeMaxDynamicSharedMemorySize

cudaError_t function_shared_limit(const void* function, size_t bytes) {
    if (bytes <= (size_t)SHARED_DEFAULT) return cudaSuccess;
    std::lock_guard<std::mutex> hold(functions_lock);
    auto found = shared_attribute.find(function);
    size_t allowed = found == shared_attribute.end() ? 0 : (size_t)found->second;
    return bytes <= allowed ? cudaSuccess : cudaErrorInvalidValue;
}

} // namespace cuda_cpu

using namespace cuda_cpu;

extern "C" {

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char* cudaGetErrorName(cudaError_t error) {
    const ErrorText* e = find_error(error);
    return e ? e->name : "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
    const ErrorText* e = find_error(error);
    return e ? e->text : "unrecognized error code";
}

// ----------------------------------------------------------------------------
// kernels

cudaError_t cudaFuncSetAttribute(const void* function, enum cudaFuncAttribute attribute, int value) {
    CUDA_CPU_ENTRY("cudaFuncSetAttribute", cudaErrorUnknown);
    if (!function) return set_error(cudaErrorInvalidDeviceFunction);
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || value > SHARED_MAX) return set_error(cudaErrorInvalidValue);
    std::lock_guard<std::mutex> hold(functions_lock);
    shared_attribute[function] = value;
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* attributes, const void* function) {
    CUDA_CPU_ENTRY("cudaFuncGetAttributes", cudaErrorUnknown);
    if (!attributes) return set_error(cudaErrorInvalidValue);
    if (!function) return set_error(cudaErrorInvalidDeviceFunction);
    memset(attributes, 0, sizeof(*attributes));
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion = 90;
    std::lock_guard<std::mutex> hold(functions_lock);
    auto found = shared_attribute.find(function);
    attributes->maxDynamicSharedSizeBytes = found == shared_attribute.end() ? SHARED_DEFAULT : found->second;
    return cudaSuccess;
}
cudaError_t cudaFuncSetCacheConfig(const void*, enum cudaFuncCache) {
    CUDA_CPU_ENTRY("cudaFuncSetCacheConfig", cudaErrorUnknown);
    return cudaSuccess;
}
static cudaError_t occupancy(int* blocks, const void* function, int block_size, size_t shared_bytes) {
    if (!blocks || block_size < 1 || block_size > 1024) return set_error(cudaErrorInvalidValue);
    if (!function) return set_error(cudaErrorInvalidDeviceFunction);
    int by_threads = 2048 / ((block_size + 31) / 32 * 32);
    int by_shared = shared_bytes ? (int)((size_t)(SHARED_MAX + 1024) / (shared_bytes + 1024)) : 32;
    *blocks = by_threads < by_shared ? by_threads : by_shared;
    if (*blocks > 32) *blocks = 32;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int block_size,
                                                          size_t shared_bytes) {
    CUDA_CPU_ENTRY("cudaOccupancyMaxActiveBlocksPerMultiprocessor", cudaErrorUnknown);
    return occupancy(blocks, function, block_size, shared_bytes);
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function,
                                                                   int block_size, size_t shared_bytes,
                                                                   unsigned int) {
    CUDA_CPU_ENTRY("cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", cudaErrorUnknown);
    return occupancy(blocks, function, block_size, shared_bytes);
}

/* Without the kernel's type its arguments cannot be copied; the typed templates of launch.h are taken instead
   wherever the type is known. */
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
    return set_error(cudaErrorInvalidDeviceFunction);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
    return set_error(cudaErrorInvalidDeviceFunction);
}

} // extern "C"
