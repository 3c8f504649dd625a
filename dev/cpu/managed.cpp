/* dev/cpu/managed.cpp - advice about managed memory: checked, otherwise without effect */
#include "memory.h"

using namespace cuda_cpu;

/* The rules that CUDA has for a range: managed memory, and not empty. */
static cudaError_t check_range(const void* pointer, size_t bytes) {
    if (!pointer || !bytes || place_of(pointer) != PLACE_MANAGED) return set_error(cudaErrorInvalidValue);
    char text[300];
    if (!in_device_memory(pointer, bytes, text, sizeof text)) return set_error(cudaErrorInvalidValue);
    return cudaSuccess;
}

extern "C" {

#if CUDART_VERSION >= 13000
cudaError_t cudaMemAdvise(const void* pointer, size_t bytes, enum cudaMemoryAdvise, struct cudaMemLocation) {
    CUDA_CPU_ENTRY("cudaMemAdvise", cudaErrorUnknown);
    return check_range(pointer, bytes);
}
cudaError_t cudaMemPrefetchAsync(const void* pointer, size_t bytes, struct cudaMemLocation, unsigned int,
                                 cudaStream_t) {
    CUDA_CPU_ENTRY("cudaMemPrefetchAsync", cudaErrorUnknown);
    return check_range(pointer, bytes);
}
#else
cudaError_t cudaMemAdvise(const void* pointer, size_t bytes, enum cudaMemoryAdvise, int) {
    CUDA_CPU_ENTRY("cudaMemAdvise", cudaErrorUnknown);
    return check_range(pointer, bytes);
}
cudaError_t cudaMemPrefetchAsync(const void* pointer, size_t bytes, int, cudaStream_t) {
    CUDA_CPU_ENTRY("cudaMemPrefetchAsync", cudaErrorUnknown);
    return check_range(pointer, bytes);
}
#endif

} // extern "C"
