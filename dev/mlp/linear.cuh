/* dev/mlp/linear.cuh - Linear(C, C) forward and backward: matrix products by cuBLASLt, bias in the epilogue.

   Everything is row-major as in PyTorch: weight [C out][C in], activations [B][C]; cuBLASLt sees the transposes,
   column-major. fp32 computes in fp32 (no TF32), bf16 accumulates in fp32. All calls launch on one stream and return.

   defines: Linear, linear_create, linear_free, linear_forward, linear_backward_input, linear_backward_params,
            WORKSPACE_BYTES
*/
#pragma once
#include <cublasLt.h>

#include "loss.cuh"

#define WORKSPACE_BYTES ((size_t)2 << 20)

#define TRY_CUBLAS(call)                                                                                     \
    do {                                                                                                     \
        cublasStatus_t try_status = (call);                                                                  \
        if (try_status != CUBLAS_STATUS_SUCCESS)                                                             \
            return zero_error(ZERO_ERROR_CUDA, "%.*s: cuBLASLt status %d (%s:%d)", (int)strcspn(#call, "("), \
                              #call, (int)try_status, __FILE__, __LINE__);                                   \
    } while (0)

typedef struct Matmul { /* D = op(A) op(B), all column-major */
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
} Matmul;

typedef struct Linear {
    ZeroDtype dtype;
    int batch, width;
    cudaStream_t stream;
    cublasLtHandle_t handle;
    void* workspace; /* the caller's, WORKSPACE_BYTES */
    Matmul output, input_grad, weight_grad;
} Linear;

/* op_a, op_b: CUBLAS_OP_N or _T; a is [rows_a x cols_a] as stored, and so on. */
static inline ZeroResult matmul_create(Matmul* m, const Linear* linear, cublasOperation_t op_a,
                                       cublasOperation_t op_b, int rows_a, int cols_a, int rows_b, int cols_b,
                                       int rows_d, int cols_d, int with_bias) {
    const cudaDataType_t type = linear->dtype == ZERO_BF16 ? CUDA_R_16BF : CUDA_R_32F;
    const size_t workspace_bytes = WORKSPACE_BYTES;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found;
    int found_count = 0;
    TRY_CUBLAS(cublasLtMatmulDescCreate(&m->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    TRY_CUBLAS(cublasLtMatmulDescSetAttribute(m->desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof(op_a)));
    TRY_CUBLAS(cublasLtMatmulDescSetAttribute(m->desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof(op_b)));
    if (with_bias) {
        cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        TRY_CUBLAS(cublasLtMatmulDescSetAttribute(m->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                                  sizeof(epilogue)));
        TRY_CUBLAS(cublasLtMatmulDescSetAttribute(m->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type,
                                                  sizeof(type)));
        TRY_CUBLAS(cublasLtMatmulDescSetAttribute(m->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                  &linear->workspace, sizeof(linear->workspace)));
    }
    TRY_CUBLAS(cublasLtMatrixLayoutCreate(&m->a, type, (uint64_t)rows_a, (uint64_t)cols_a, rows_a));
    TRY_CUBLAS(cublasLtMatrixLayoutCreate(&m->b, type, (uint64_t)rows_b, (uint64_t)cols_b, rows_b));
    TRY_CUBLAS(cublasLtMatrixLayoutCreate(&m->d, type, (uint64_t)rows_d, (uint64_t)cols_d, rows_d));
    TRY_CUBLAS(cublasLtMatmulPreferenceCreate(&preference));
    TRY_CUBLAS(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                    &workspace_bytes, sizeof(workspace_bytes)));
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(linear->handle, m->desc, m->a, m->b, m->d, m->d,
                                                           preference, 1, &found, &found_count);
    cublasLtMatmulPreferenceDestroy(preference);
    if (status != CUBLAS_STATUS_SUCCESS || found_count == 0)
        return zero_error(
            ZERO_ERROR_CUDA,
            "cublasLtMatmulAlgoGetHeuristic: no algorithm for a %s product of [%d x %d] and [%d x %d] "
            "(status %d): try a width -C and batch -b that are multiples of 8",
            zero_dtype_name(linear->dtype), rows_a, cols_a, rows_b, cols_b, (int)status);
    m->algo = found.algo;
    return zero_ok();
}

static inline void matmul_free(Matmul* m) {
    if (m->d) cublasLtMatrixLayoutDestroy(m->d);
    if (m->b) cublasLtMatrixLayoutDestroy(m->b);
    if (m->a) cublasLtMatrixLayoutDestroy(m->a);
    if (m->desc) cublasLtMatmulDescDestroy(m->desc);
}

static inline ZeroResult matmul_run(const Matmul* m, const Linear* linear, const void* a, const void* b,
                                    void* d, int add) {
    const float alpha = 1.0f, beta = add ? 1.0f : 0.0f;
    TRY_CUBLAS(cublasLtMatmul(linear->handle, m->desc, &alpha, a, m->a, b, m->b, &beta, d, m->d, d, m->d,
                              &m->algo, linear->workspace, WORKSPACE_BYTES, linear->stream));
    return zero_ok();
}

static inline void linear_free(Linear* linear) {
    matmul_free(&linear->output);
    matmul_free(&linear->input_grad);
    matmul_free(&linear->weight_grad);
    if (linear->handle) cublasLtDestroy(linear->handle);
    memset(linear, 0, sizeof(*linear));
}

/* batch rows of width elements. On an error call linear_free. */
static inline ZeroResult linear_create(Linear* linear, ZeroDtype dtype, int batch, int width, void* workspace,
                                       cudaStream_t stream) {
    const cublasOperation_t n = CUBLAS_OP_N, t = CUBLAS_OP_T;
    memset(linear, 0, sizeof(*linear));
    linear->dtype = dtype;
    linear->batch = batch;
    linear->width = width;
    linear->workspace = workspace;
    linear->stream = stream;
    TRY_CUBLAS(cublasLtCreate(&linear->handle));
    ZERO_TRY(matmul_create(&linear->output, linear, t, n, width, width, width, batch, width, batch, 1));
    ZERO_TRY(matmul_create(&linear->input_grad, linear, n, n, width, width, width, batch, width, batch, 0));
    return matmul_create(&linear->weight_grad, linear, n, t, width, batch, width, batch, width, width, 0);
}

/* y[B][C] = x[B][C] weight^T + bias */
static inline ZeroResult linear_forward(const Linear* linear, const void* x, const void* weight,
                                        const void* bias, void* y) {
    TRY_CUBLAS(cublasLtMatmulDescSetAttribute(linear->output.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias,
                                              sizeof(bias)));
    return matmul_run(&linear->output, linear, weight, x, y, 0);
}

template <typename T>
static __global__ void bias_grad_kernel(const T* y_grad, T* bias_grad, int batch, int width, int add) {
    const size_t column = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    float x[1], sum = 0.0f;
    if (column >= (size_t)width) return;
    for (int row = 0; row < batch; row++) {
        zero_load(y_grad + (size_t)row * (size_t)width + column, x);
        sum += x[0];
    }
    if (add) {
        zero_load(bias_grad + column, x);
        sum += x[0];
    }
    store_element(bias_grad + column, sum);
}

/* weight_grad (+)= y_grad^T x, bias_grad (+)= sum of y_grad's rows. add: 0 writes them, 1 adds to them. */
static inline ZeroResult linear_backward_params(const Linear* linear, const void* x, const void* y_grad,
                                                void* weight_grad, void* bias_grad, int add) {
    cudaLaunchConfig_t config = zero_launch_config(((size_t)linear->width + 127) / 128, 128, linear->stream);
    ZERO_TRY(matmul_run(&linear->weight_grad, linear, x, y_grad, weight_grad, add));
    if (linear->dtype == ZERO_BF16) {
        ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, bias_grad_kernel<ZeroBf16>, (const ZeroBf16*)y_grad,
                                         (ZeroBf16*)bias_grad, linear->batch, linear->width, add));
    } else {
        ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, bias_grad_kernel<float>, (const float*)y_grad,
                                         (float*)bias_grad, linear->batch, linear->width, add));
    }
    return zero_ok();
}

/* x_grad = y_grad weight */
static inline ZeroResult linear_backward_input(const Linear* linear, const void* weight, const void* y_grad,
                                               void* x_grad) {
    return matmul_run(&linear->input_grad, linear, weight, y_grad, x_grad, 0);
}
