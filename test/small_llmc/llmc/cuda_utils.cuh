// A sum over a block; memory that may live on the host if the device is full.
#pragma once
#include "cuda_common.h"

__device__ inline float warpReduceSum(float x) {
    for (int o = 16; o; o /= 2) x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
}

// Every thread gets the result. last_sync: the caller may call again at once.
template <float (*warp_reduce)(float)>
__device__ inline float blockReduce(float x, bool last_sync = false) {
    __shared__ float of_warp[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = warp_reduce(x);
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    x = warp_reduce(lane < warps ? of_warp[lane] : 0.0f);
    if (last_sync) __syncthreads();
    return x;
}

// 1 if the memory is managed
inline int cudaMallocConditionallyManaged(void** p, size_t bytes) {
    if (cudaMalloc(p, bytes) == cudaSuccess) return 0;
    (void)cudaGetLastError();
    CUDA(cudaMallocManaged(p, bytes));
    CUDA( cudaMemAdvise(*p, bytes,
                             cudaMemAdviseSetPreferredLocation, cudaCpuDeviceId) );
    return 1;
}
