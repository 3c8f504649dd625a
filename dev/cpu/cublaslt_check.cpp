/* dev/cpu/cublaslt_check.cpp - what can be wrong with a product, and its way onto the stream. */
#include "cublaslt_gemm.h"
#include <stdarg.h>
#include <stdio.h>

namespace cuda_cpu {
namespace gemm {
namespace {

/* The bytes from the first to the last element of all matrices of a batch. */
size_t extent(const Matrix& x, int batch) {
    int64_t vectors = x.row_order ? x.rows : x.cols, length = x.row_order ? x.cols : x.rows;
    int64_t one = vectors && length ? (vectors - 1) * x.ld + length : 0;
    return (one + (one ? (batch - 1) * x.batch_stride : 0)) * type_bytes(x.type);
}

void must_be_device(const char* name, const char* what, const void* data, size_t bytes) {
    char text[300];
    if (bytes && !in_device_memory(data, bytes, text, sizeof text))
        fatal("%s: %s %p, %zu bytes: %s", name, what, data, bytes, text);
}

} // namespace

size_t type_bytes(cudaDataType_t type) {
    return type == CUDA_R_32F ? 4 : type == CUDA_R_16BF || type == CUDA_R_16F ? 2 : 0;
}

cublasStatus_t refuse(cublasStatus_t status, const char* format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "cuda-cpu: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    return status;
}

cublasStatus_t check(const char* name, const Product& p) {
    int64_t m = p.transpose_a ? p.a.cols : p.a.rows, k = p.transpose_a ? p.a.rows : p.a.cols;
    int64_t kb = p.transpose_b ? p.b.cols : p.b.rows, n = p.transpose_b ? p.b.rows : p.b.cols;
    if (k != kb || m != p.d.rows || n != p.d.cols || p.c.rows != p.d.rows || p.c.cols != p.d.cols)
        return refuse(CUBLAS_STATUS_INVALID_VALUE,
                      "%s: op(A) %ld x %ld, op(B) %ld x %ld, C %ld x %ld, D %ld x %ld "
                      "do not fit together",
                      name, (long)m, (long)k, (long)kb, (long)n, (long)p.c.rows, (long)p.c.cols,
                      (long)p.d.rows, (long)p.d.cols);
    const Matrix* all[] = {&p.a, &p.b, &p.c, &p.d};
    for (int i = 0; i < 4; i++) {
        const Matrix& x = *all[i];
        if (!type_bytes(x.type))
            return refuse(CUBLAS_STATUS_NOT_SUPPORTED,
                          "%s: matrix %c: data type %d; fp32, bf16 and fp16 are known", name, "ABCD"[i],
                          (int)x.type);
        if (x.rows < 0 || x.cols < 0 || x.ld < (x.row_order ? x.cols : x.rows) || x.rows > INT32_MAX ||
            x.cols > INT32_MAX || x.ld > INT32_MAX)
            return refuse(CUBLAS_STATUS_INVALID_VALUE, "%s: matrix %c: %ld x %ld with leading dimension %ld",
                          name, "ABCD"[i], (long)x.rows, (long)x.cols, (long)x.ld);
    }
    if (p.a.type != p.b.type || p.c.type != p.d.type || (p.d.type != p.a.type && p.d.type != CUDA_R_32F))
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED,
                      "%s: types of A %d, B %d, C %d, D %d: A and B must agree, C and D "
                      "too, and D be of A's type or fp32",
                      name, (int)p.a.type, (int)p.b.type, (int)p.c.type, (int)p.d.type);
    if (p.c.row_order != p.d.row_order || p.batch < 1)
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "%s: C and D in different orders, or batch count %d", name,
                      p.batch);
    switch (p.epilogue) {
    case CUBLASLT_EPILOGUE_DEFAULT:
    case CUBLASLT_EPILOGUE_RELU:
    case CUBLASLT_EPILOGUE_BIAS:
    case CUBLASLT_EPILOGUE_RELU_BIAS:
    case CUBLASLT_EPILOGUE_GELU:
    case CUBLASLT_EPILOGUE_GELU_BIAS:
    case CUBLASLT_EPILOGUE_GELU_AUX:
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
    case CUBLASLT_EPILOGUE_DGELU:
    case CUBLASLT_EPILOGUE_DGELU_BGRAD:
    case CUBLASLT_EPILOGUE_BGRADA:
    case CUBLASLT_EPILOGUE_BGRADB: break;
    default: return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "%s: epilogue %d", name, (int)p.epilogue);
    }
    if ((uses_bias(p) && !type_bytes(p.bias_type)) || (uses_aux(p) && !type_bytes(p.aux_type)))
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "%s: type of bias or of the auxiliary matrix", name);
    if (uses_aux(p) && p.aux_ld < (p.d.row_order ? p.d.cols : p.d.rows))
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "%s: leading dimension %ld of the auxiliary matrix", name,
                      (long)p.aux_ld);
    return CUBLAS_STATUS_SUCCESS;
}

void check_ranges(const char* name, const Product& p) {
    must_be_device(name, "matrix A", p.a.data, extent(p.a, p.batch));
    must_be_device(name, "matrix B", p.b.data, extent(p.b, p.batch));
    if (p.beta_device || p.beta != 0) must_be_device(name, "matrix C", p.c.data, extent(p.c, p.batch));
    must_be_device(name, "matrix D", p.d.data, extent(p.d, p.batch));
    int64_t bias = p.epilogue == CUBLASLT_EPILOGUE_BGRADB ? p.d.cols : p.d.rows;
    if (uses_bias(p))
        must_be_device(name, "bias", p.bias,
                       (bias + (p.batch - 1) * p.bias_stride) * type_bytes(p.bias_type));
    Matrix aux = {p.aux, p.aux_type, p.d.row_order, p.d.rows, p.d.cols, p.aux_ld, p.aux_stride};
    if (uses_aux(p)) must_be_device(name, "auxiliary matrix", p.aux, extent(aux, p.batch));
    if (p.alpha_device) must_be_device(name, "alpha", p.alpha_device, sizeof(float));
    if (p.beta_device) must_be_device(name, "beta", p.beta_device, sizeof(float));
}

cublasStatus_t launch(const char* name, const Product& p, size_t alignment, cudaStream_t stream) {
    const void* all[] = {p.a.data, p.b.data, p.beta_device || p.beta != 0 ? p.c.data : p.d.data, p.d.data};
    for (int i = 0; i < 4; i++)
        if (!all[i] || (uintptr_t)all[i] % alignment)
            return refuse(CUBLAS_STATUS_INVALID_VALUE,
                          "%s: matrix %c is at %p; it must be a multiple of %zu bytes", name, "ABCD"[i],
                          all[i], alignment);
    if (p.c.data == p.d.data && p.c.ld != p.d.ld && (p.beta_device || p.beta != 0))
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "%s: C is D, but their leading dimensions differ", name);
    check_ranges(name, p);
    cudaError_t error = enqueue(stream, name, [p, name] {
        check_ranges(name, p); // again: since the call something may have been freed
        float alpha = p.alpha_device ? *p.alpha_device : p.alpha,
              beta = p.beta_device ? *p.beta_device : p.beta;
        for (int i = 0; i < p.batch && p.d.rows && p.d.cols; i++) compute(p, i, alpha, beta);
        return cudaSuccess;
    });
    return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

} // namespace gemm
} // namespace cuda_cpu
