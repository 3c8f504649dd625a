/* dev/mlp/loss.cuh - mean squared error and its gradient, and the data that an MLP is trained on.

   defines: store_element, Loss, loss_run, loss_bytes, data_split
*/
#pragma once
#include "../../llmc_zero/elements.cuh"

static __device__ __forceinline__ void store_element(float* to, float x) { *to = x; }
static __device__ __forceinline__ void store_element(ZeroBf16* to, float x) {
    to->bits = (uint16_t)zero_to_bf16(x);
}

#define LOSS_BLOCKS_MAX 256

/* Device memory of the caller's, loss_bytes long: [0] is the mean loss of a micro-batch; after it the blocks' partial sums. */
static inline size_t loss_bytes(void) { return (1 + LOSS_BLOCKS_MAX) * sizeof(double); }

template <typename T>
static __global__ void __launch_bounds__(ZERO_BLOCK_THREADS)
    loss_kernel(const T* y, const T* target, T* y_grad, size_t count, float grad_scale, double* partials) {
    double sum = 0.0;
    for (size_t i = (size_t)blockIdx.x * ZERO_BLOCK_THREADS + threadIdx.x; i < count;
         i += (size_t)gridDim.x * ZERO_BLOCK_THREADS) {
        float a[1], b[1];
        zero_load(y + i, a);
        zero_load(target + i, b);
        float difference = __fsub_rn(a[0], b[0]);
        sum = __fma_rn((double)difference, (double)difference, sum);
        store_element(y_grad + i, __fmul_rn(grad_scale, difference));
    }
    sum = zero_block_sum(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

template <typename Number>
static __global__ void __launch_bounds__(ZERO_BLOCK_THREADS)
    loss_sum_kernel(const Number* partials, int count, Number scale, Number* loss) {
    double sum = zero_block_sum((int)threadIdx.x < count ? partials[threadIdx.x] : 0.0);
    if (threadIdx.x == 0) *loss = sum * scale;
}

/* y_grad = d(mean (y - target)^2) / dy, over count elements; loss[0] = that mean. */
static inline ZeroResult loss_run(ZeroDtype dtype, const void* y, const void* target, void* y_grad,
                                  size_t count, double* loss, cudaStream_t stream) {
    size_t blocks = (count + 4 * ZERO_BLOCK_THREADS - 1) / (4 * ZERO_BLOCK_THREADS);
    if (blocks > LOSS_BLOCKS_MAX) blocks = LOSS_BLOCKS_MAX;
    cudaLaunchConfig_t config = zero_launch_config(blocks, ZERO_BLOCK_THREADS, stream);
    cudaLaunchConfig_t last = zero_launch_config(1, ZERO_BLOCK_THREADS, stream);
    const float grad_scale = (float)(2.0 / (double)count);
    if (dtype == ZERO_BF16) {
        ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, loss_kernel<ZeroBf16>, (const ZeroBf16*)y,
                                         (const ZeroBf16*)target, (ZeroBf16*)y_grad, count, grad_scale,
                                         loss + 1));
    } else {
        ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, loss_kernel<float>, (const float*)y, (const float*)target,
                                         (float*)y_grad, count, grad_scale, loss + 1));
    }
    ZERO_TRY_CUDA(cudaLaunchKernelEx(&last, loss_sum_kernel<double>, (const double*)(loss + 1), (int)blocks,
                                     1.0 / (double)count, loss));
    return zero_ok();
}

/* ------------------------------------------------------------------ -I split */

/* About normal, mean 0, variance 1: the sum of four 16-bit numbers (Irwin-Hall), rounded once, so that every device
   gets the same bits. */
static __device__ __forceinline__ float data_normal(uint64_t key) {
    uint64_t bits = zero_mix(key);
    int sum =
        (int)(bits & 0xffff) + (int)(bits >> 16 & 0xffff) + (int)(bits >> 32 & 0xffff) + (int)(bits >> 48);
    return __fmul_rn((float)(sum - 131070), 1.0f / 37837.227f);
}

static __device__ __forceinline__ float data_x(uint64_t sample_key, uint64_t column) {
    return data_normal(sample_key + column * 0x9e3779b97f4a7c15ull);
}

#define TEACHER_TAPS 8

/* A fixed random linear teacher: each label is a weighted sum of TEACHER_TAPS inputs. */
template <typename T>
static __global__ void data_split_kernel(T* x, T* y, size_t count, int width, uint64_t seed,
                                         uint64_t first_sample) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const uint64_t column = i % (size_t)width, sample = first_sample + i / (size_t)width;
    const uint64_t sample_key = zero_mix(zero_mix(seed + 0x5851f42d4c957f2dull) ^ sample);
    const uint64_t teacher_key = zero_mix(zero_mix(seed + 0x14057b7ef767814full) ^ column);
    float label = 0.0f;
    for (uint64_t tap = 0; tap < TEACHER_TAPS; tap++) {
        const float weight = __fmul_rn(data_normal(teacher_key + 2 * tap), 0.35355339f); /* 1/sqrt(8) */
        label = __fmaf_rn(weight, data_x(sample_key, zero_mix(teacher_key + 2 * tap + 1) % (uint64_t)width),
                          label);
    }
    store_element(x + i, data_x(sample_key, column));
    store_element(y + i, label);
}

/* Samples first_sample .. first_sample + batch - 1 of the endless sequence that the seed stands for; each one depends
   on the seed and its index alone. x, y: [batch][width] on the device. */
static inline ZeroResult data_split(ZeroDtype dtype, void* x, void* y, int batch, int width, uint64_t seed,
                                    uint64_t first_sample, cudaStream_t stream) {
    const size_t count = (size_t)batch * (size_t)width;
    cudaLaunchConfig_t config = zero_launch_config((count + 127) / 128, 128, stream);
    if (dtype == ZERO_BF16) {
        ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, data_split_kernel<ZeroBf16>, (ZeroBf16*)x, (ZeroBf16*)y,
                                         count, width, seed, first_sample));
    } else {
        ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, data_split_kernel<float>, (float*)x, (float*)y, count,
                                         width, seed, first_sample));
    }
    return zero_ok();
}
