// In place of attention: each position mixes its value with that of the one before it.
// g[t] = sigmoid(q[t] . k[t] / sqrt(C))
// out[t] = g[t] * v[t] + (1 - g[t]) * v[t - 1], with v[-1] = 0. qkv is (B, T, 3C), a row is q, k, v.
#pragma once
#include "cuda_utils.cuh"

__global__ void mix_kernel(floatX* out, float* gates, const floatX* qkv, int N, int T, int C) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    const floatX *q = qkv + (size_t)row * 3 * C, *k = q + C, *v = k + C, *before = v - 3 * C;
    float dot = 0.0f;
    for (int c = 0; c < C; c++) dot += (float)q[c] * (float)k[c];
    const float g = 1.0f / (1.0f + expf(-dot / sqrtf((float)C)));
    gates[row] = g;
    for (int c = 0; c < C; c++)
        out[(size_t)row * C + c] = (floatX)(g * (float)v[c] + (row % T ? (1.0f - g) * (float)before[c] :
                                                               0.0f));
}

// dqkv of a few rows a block; channels over the threads
__global__ void softmax_autoregressive_backward_inplace_kernel(
    floatX* dqkv, const floatX* dout, const float* gates, const floatX* qkv, int N, int T, int C)
{
    constexpr int rows_a_block = 4;
    for (int r = 0; r < rows_a_block; ++r) {
        const int row = blockIdx.x * rows_a_block + r;
        if (row >= N) return;
        const floatX *q = qkv + (size_t)row * 3 * C, *k = q + C, *v = k + C, *d = dout + (size_t)row * C;
        floatX* dq = dqkv + (size_t)row * 3 * C;
        const float g = gates[row];
        const bool first = row % T == 0, last = row % T == T - 1;
        float dg = 0.0f;
        for (int c = threadIdx.x; c < C; c += blockDim.x)
            dg += (float)d[c] * ((float)v[c] - (first ? 0.0f : (float)(v - 3 * C)[c]));
        dg = blockReduce< warpReduceSum >( dg );
        const float ddot = dg * g * (1.0f - g) / sqrtf((float)C);
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            dq[c] = (floatX)(ddot * (float)k[c]);
            dq[C + c] = (floatX)(ddot * (float)q[c]);
            dq[2 * C + c] = (floatX)(g * (float)d[c] + (last ? 0.0f : (1.0f - gates[row + 1])
                                                        * (float)d[C + c]));
        }
    }
}

inline void mix_forward(floatX* out, float* gates, const floatX* qkv, int N, int T, int C, cudaStream_t s) {
    mix_kernel<<<blocks_for(N, 32), 32, 0, s>>>(out, gates, qkv, N, T, C);
    CUDA(cudaGetLastError());
}
inline void mix_backward(floatX* dqkv, const floatX* dout, const float* gates, const floatX* qkv, int N,
                         int T, int C, cudaStream_t s) {
    softmax_autoregressive_backward_inplace_kernel<<<blocks_for(N, 4), 64, 0,
        s>>>(dqkv, dout, gates, qkv, N, T, C);
    CUDA(cudaGetLastError());
}
