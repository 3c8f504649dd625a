/* llmc_zero/elements.cuh - what the kernels share: types, loads and stores of several elements, bf16, launching.

   defines: ZERO_BLOCK_THREADS, ZeroBf16, zero_from_bf16, zero_to_bf16, zero_load, zero_store, zero_store_bits, zero_is_aligned,
            zero_split_chunk, zero_launch_config, zero_block_sum, zero_mix
*/
#ifndef LLMC_ZERO_ELEMENTS_CUH_INCLUDED
#define LLMC_ZERO_ELEMENTS_CUH_INCLUDED

#include <cuda_runtime.h>

#include "memory.cuh"

#define ZERO_BLOCK_THREADS 256

/* ------------------------------------------------------------------ elements, four or one at a time */

typedef struct ZeroBf16 {
    uint16_t bits;
} ZeroBf16;

static __device__ __forceinline__ float zero_from_bf16(uint32_t bits) { return __uint_as_float(bits << 16); }

/* fp32 to bf16, to nearest, ties to even; NaN stays NaN */
static __device__ __forceinline__ uint32_t zero_to_bf16(float x) {
    uint32_t bits = __float_as_uint(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded;
}

/* 16-byte accesses for fp32, 8-byte for bf16; the pointer is so aligned */
static __device__ __forceinline__ void zero_load(const float* from, float (&x)[4]) {
    float4 raw = *reinterpret_cast<const float4*>(from);
    x[0] = raw.x, x[1] = raw.y, x[2] = raw.z, x[3] = raw.w;
}
static __device__ __forceinline__ void zero_load(const ZeroBf16* from, float (&x)[4]) {
    uint2 raw = *reinterpret_cast<const uint2*>(from);
    x[0] = zero_from_bf16(raw.x & 0xffffu), x[1] = zero_from_bf16(raw.x >> 16);
    x[2] = zero_from_bf16(raw.y & 0xffffu), x[3] = zero_from_bf16(raw.y >> 16);
}
static __device__ __forceinline__ void zero_store(float* to, const float (&x)[4]) {
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
}
/* eight elements: 32 bytes of fp32, 16 of bf16; the pointer is aligned to 16 */
static __device__ __forceinline__ void zero_load(const float* from, float (&x)[8]) {
    const float4 low = reinterpret_cast<const float4*>(from)[0],
                 high = reinterpret_cast<const float4*>(from)[1];
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}
static __device__ __forceinline__ void zero_load(const ZeroBf16* from, float (&x)[8]) {
    const uint4 raw = *reinterpret_cast<const uint4*>(from);
    uint16_t bits[8];
    memcpy(bits, &raw, sizeof(bits));
    for (int k = 0; k < 8; k++) x[k] = zero_from_bf16(bits[k]);
}
static __device__ __forceinline__ void zero_store(float* to, const float (&x)[8]) {
    reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}
static __device__ __forceinline__ void zero_store_bits(ZeroBf16* to, const uint32_t (&bits)[4]) {
    *reinterpret_cast<uint2*>(to) = make_uint2(bits[0] | (bits[1] << 16), bits[2] | (bits[3] << 16));
}
/* one element: heads, tails and buffers that are not aligned */
static __device__ __forceinline__ void zero_load(const float* from, float (&x)[1]) { x[0] = *from; }
static __device__ __forceinline__ void zero_load(const ZeroBf16* from, float (&x)[1]) {
    x[0] = zero_from_bf16(from->bits);
}
static __device__ __forceinline__ void zero_store(float* to, const float (&x)[1]) { *to = x[0]; }
static __device__ __forceinline__ void zero_store_bits(ZeroBf16* to, const uint32_t (&bits)[1]) {
    to->bits = (uint16_t)bits[0];
}

/* Whether four elements of a type can be accessed at once at every multiple of four behind this pointer. */
static inline int zero_is_aligned(const void* pointer, size_t element_bytes) {
    return (uintptr_t)pointer % (4 * element_bytes) == 0;
}

/* The same for eight elements. */
static inline int zero_is_aligned_16(const void* pointer) { return (uintptr_t)pointer % 16 == 0; }

/* How a chunk splits: `head` elements up to an offset that is a multiple of four, `vectors` of four, and a tail. */
static __device__ __forceinline__ void zero_split_chunk(const ZeroChunk& chunk, int aligned, uint32_t* head,
                                                        uint32_t* vectors) {
    uint32_t to_aligned = (uint32_t)(0 - chunk.flat_offset) & 3u;
    *head = !aligned || to_aligned > chunk.count ? chunk.count : to_aligned;
    *vectors = (chunk.count - *head) / 4;
}

static inline cudaLaunchConfig_t zero_launch_config(size_t blocks, unsigned threads, cudaStream_t stream) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks, 1, 1);
    config.blockDim = dim3(threads, 1, 1);
    config.stream = stream;
    return config;
}

/* Sum over a block of ZERO_BLOCK_THREADS, in an order that is always the same; the result is thread 0's. Every
   thread calls it, once in a kernel. */
static __device__ __forceinline__ double zero_block_sum(double value) {
    __shared__ double values[ZERO_BLOCK_THREADS];
    double sum = 0.0;
    values[threadIdx.x] = value;
    __syncthreads();
    if (threadIdx.x < 32) {
        for (unsigned i = threadIdx.x; i < ZERO_BLOCK_THREADS; i += 32) sum += values[i];
        for (int distance = 16; distance > 0; distance /= 2)
            sum += __shfl_down_sync(0xffffffffu, sum, distance);
    }
    return sum;
}

/* 64 well mixed bits (the finalizer of splitmix64, Steele et al. 2014) */
static __host__ __device__ __forceinline__ uint64_t zero_mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

#endif /* LLMC_ZERO_ELEMENTS_CUH_INCLUDED */
