// Normalisation of rows of C, with the sum of two inputs before it where there are two.
#pragma once
#include "cuda_common.h"

// sum = a + b (b may be NULL: a), normed = (sum - mean) * rstd * w + bias; stats: mean and rstd of each row
__global__ void fused_residual_forward_kernel5(floatX* sum, floatX* normed, float* stats, const floatX* a,
                                               const floatX* b, const floatX* w, const floatX* bias, int N,
                                                   int C) {
    const int idx = blockIdx.x * 8 + threadIdx.x;
    if( idx > N ) return;
    floatX *row = sum + (size_t)idx * C, *to = normed + (size_t)idx * C;
    float mean = 0.0f, square = 0.0f;
    for (int c = 0; c < C; c++) {
        row[c] = (floatX)((float)a[(size_t)idx * C + c] + (b ? (float)b[(size_t)idx * C + c] : 0.0f));
        mean += (float)row[c] / C;
    }
    for (int c = 0; c < C; c++) square += ((float)row[c] - mean) * ((float)row[c] - mean) / C;
    const float rstd = 1.0f / sqrtf(square + 1e-5f);
    stats[2 * idx] = mean;
    stats[2 * idx + 1] = rstd;
    for (int c = 0; c < C; c++) to[c] = (floatX)(((float)row[c] - mean)
                                                 * rstd * (float)w[c] + (float)bias[c]);
}

// dsum += what comes back through the normalisation
__global__ void norm_backward_rows(floatX* dsum, const floatX* dnormed, const floatX* sum, const floatX* w,
                                   const float* stats, int N, int C) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N) return;
    const float mean = stats[2 * i], rstd = stats[2 * i + 1];
    const floatX *d = dnormed + (size_t)i * C, *x = sum + (size_t)i * C;
    float of_d = 0.0f, of_dx = 0.0f;
    for (int c = 0; c < C; c++) {
        of_d += (float)d[c] * (float)w[c] / C;
        of_dx += (float)d[c] * (float)w[c] * ((float)x[c] - mean) * rstd / C;
    }
    for (int c = 0; c < C; c++) {
        floatX* to = dsum + (size_t)i * C + c;
        *to = (floatX)((float)*to + rstd * ((float)d[c] * (float)w[c] - of_d - ((float)x[c] - mean)
                                            * rstd * of_dx));
    }
}

__global__ void norm_backward_weights(floatX* dw, floatX* dbias, const floatX* dnormed, const floatX* sum,
                                      const float* stats, int N, int C) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) return;
    float of_w = (float)dw[c], of_bias = (float)dbias[c];
    for (int i = 0; i < N; i++) {
        const float d = (float)dnormed[(size_t)i * C + c];
        of_bias += d;
        of_w += d * ((float)sum[(size_t)i * C + c] - stats[2 * i]) * stats[2 * i + 1];
    }
    dw[c] = (floatX)of_w;
    dbias[c] = (floatX)of_bias;
}

inline void norm_forward(floatX* sum, floatX* normed, float* stats, const floatX* a, const floatX* b,
                         const floatX* w, const floatX* bias, int N, int C, cudaStream_t s) {
    fused_residual_forward_kernel5<<<blocks_for(N, 8), 8, 0, s>>>(sum, normed, stats, a, b, w, bias, N, C);
    CUDA(cudaGetLastError());
}
inline void norm_backward(floatX* dsum, floatX* dw, floatX* dbias, const floatX* dnormed, const floatX* sum,
                          const floatX* w, const float* stats, int N, int C, cudaStream_t s) {
    norm_backward_rows<<<blocks_for(N, 32), 32, 0, s>>>(dsum, dnormed, sum, w, stats, N, C);
    norm_backward_weights<<<blocks_for(C, 32), 32, 0, s>>>(dw, dbias, dnormed, sum, stats, N, C);
    CUDA(cudaGetLastError());
}
