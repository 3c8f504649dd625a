/* dev/cpu/cublas.cpp - the few entry points of cuBLAS that llm.c needs, over the same product as cuBLASLt.

   cublasSgemm, cublasGemmEx, cublasGemmStridedBatchedEx, and the texts of the statuses: fp32, bf16 and fp16
   in column order, fp32 computation.
*/
#include "cublaslt_gemm.h"
#include <cublas_v2.h>

using namespace cuda_cpu::gemm;

struct cublasContext {
    cudaStream_t stream = nullptr;
    cublasPointerMode_t pointer_mode = CUBLAS_POINTER_MODE_HOST;
    cublasMath_t math = CUBLAS_DEFAULT_MATH;
};

namespace {

struct Operand {
    const void* data;
    cudaDataType_t type;
    int ld;
    long long stride;
};

cublasStatus_t product(const char* name, cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m,
                       int n, int k, const void* alpha, Operand a, Operand b, const void* beta, Operand c,
                       int batch, cublasComputeType_t compute) {
    if (cuda_cpu::fail_now(name)) return CUBLAS_STATUS_EXECUTION_FAILED;
    if (!h || !alpha || !beta)
        return refuse(h ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_NOT_INITIALIZED,
                      "%s: handle, alpha or beta", name);
    if (compute != CUBLAS_COMPUTE_32F && compute != CUBLAS_COMPUTE_32F_PEDANTIC &&
        compute != CUBLAS_COMPUTE_32F_FAST_16F && compute != CUBLAS_COMPUTE_32F_FAST_16BF &&
        compute != CUBLAS_COMPUTE_32F_FAST_TF32)
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "%s: compute type %d; it must be fp32", name,
                      (int)compute);
    Product p = {};
    p.transpose_a = ta != CUBLAS_OP_N;
    p.transpose_b = tb != CUBLAS_OP_N;
    p.a = Matrix{a.data, a.type, false, ta == CUBLAS_OP_N ? m : k, ta == CUBLAS_OP_N ? k : m, a.ld, a.stride};
    p.b = Matrix{b.data, b.type, false, tb == CUBLAS_OP_N ? k : n, tb == CUBLAS_OP_N ? n : k, b.ld, b.stride};
    p.c = p.d = Matrix{c.data, c.type, false, m, n, c.ld, c.stride};
    p.batch = batch;
    p.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    if (h->pointer_mode == CUBLAS_POINTER_MODE_HOST)
        p.alpha = *(const float*)alpha, p.beta = *(const float*)beta;
    else
        p.alpha_device = (const float*)alpha, p.beta_device = (const float*)beta;
    if (m == 0 || n == 0 || batch == 0) return CUBLAS_STATUS_SUCCESS;
    cublasStatus_t status = check(name, p);
    return status == CUBLAS_STATUS_SUCCESS ? launch(name, p, type_bytes(c.type), h->stream) : status;
}

} // namespace

extern "C" {

const char* cublasGetStatusName(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_ARCH_MISMATCH: return "CUBLAS_STATUS_ARCH_MISMATCH";
    case CUBLAS_STATUS_MAPPING_ERROR: return "CUBLAS_STATUS_MAPPING_ERROR";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR: return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    default: return "CUBLAS_STATUS_UNKNOWN";
    }
}

const char* cublasGetStatusString(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "the operation completed successfully";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "the library was not initialized";
    case CUBLAS_STATUS_ALLOC_FAILED: return "the resource allocation failed";
    case CUBLAS_STATUS_INVALID_VALUE: return "an unsupported value or parameter was passed to the function";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "the function failed to launch on the GPU";
    case CUBLAS_STATUS_INTERNAL_ERROR: return "an internal operation failed";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "the functionality requested is not supported";
    default: return cublasGetStatusName(status);
    }
}

const char* cublasLtGetStatusName(cublasStatus_t status) { return cublasGetStatusName(status); }
const char* cublasLtGetStatusString(cublasStatus_t status) { return cublasGetStatusString(status); }

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
    if (cuda_cpu::fail_now("cublasCreate")) return CUBLAS_STATUS_ALLOC_FAILED;
    if (!handle) return refuse(CUBLAS_STATUS_INVALID_VALUE, "cublasCreate: the result pointer is NULL");
    *handle = new cublasContext();
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetVersion_v2(cublasHandle_t, int* version) {
    *version = CUBLAS_VERSION;
    return CUBLAS_STATUS_SUCCESS;
}

#define SETTER(name, type, field)                                                            \
    cublasStatus_t name(cublasHandle_t handle, type value) {                                 \
        if (!handle) return refuse(CUBLAS_STATUS_NOT_INITIALIZED, #name ": handle is NULL"); \
        handle->field = value;                                                               \
        return CUBLAS_STATUS_SUCCESS;                                                        \
    }
#define GETTER(name, type, field)                                                          \
    cublasStatus_t name(cublasHandle_t handle, type* value) {                              \
        if (!handle || !value) return refuse(CUBLAS_STATUS_INVALID_VALUE, #name ": NULL"); \
        *value = handle->field;                                                            \
        return CUBLAS_STATUS_SUCCESS;                                                      \
    }
SETTER(cublasSetStream_v2, cudaStream_t, stream)
GETTER(cublasGetStream_v2, cudaStream_t, stream)
SETTER(cublasSetPointerMode_v2, cublasPointerMode_t, pointer_mode)
GETTER(cublasGetPointerMode_v2, cublasPointerMode_t, pointer_mode)
SETTER(cublasSetMathMode, cublasMath_t, math)
GETTER(cublasGetMathMode, cublasMath_t, math)

cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void*, size_t) {
    return handle ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED; // none is needed
}

cublasStatus_t cublasSgemm_v2(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n,
                              int k, const float* alpha, const float* A, int lda, const float* B, int ldb,
                              const float* beta, float* C, int ldc) {
    return product("cublasSgemm", h, ta, tb, m, n, k, alpha, Operand{A, CUDA_R_32F, lda, 0},
                   Operand{B, CUDA_R_32F, ldb, 0}, beta, Operand{C, CUDA_R_32F, ldc, 0}, 1,
                   CUBLAS_COMPUTE_32F);
}

cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m,
                                         int n, int k, const float* alpha, const float* A, int lda,
                                         long long stride_a, const float* B, int ldb, long long stride_b,
                                         const float* beta, float* C, int ldc, long long stride_c,
                                         int batch) {
    return product("cublasSgemmStridedBatched", h, ta, tb, m, n, k, alpha,
                   Operand{A, CUDA_R_32F, lda, stride_a}, Operand{B, CUDA_R_32F, ldb, stride_b}, beta,
                   Operand{C, CUDA_R_32F, ldc, stride_c}, batch, CUBLAS_COMPUTE_32F);
}

cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                            const void* alpha, const void* A, cudaDataType type_a, int lda, const void* B,
                            cudaDataType type_b, int ldb, const void* beta, void* C, cudaDataType type_c,
                            int ldc, cublasComputeType_t compute, cublasGemmAlgo_t) {
    return product("cublasGemmEx", h, ta, tb, m, n, k, alpha, Operand{A, type_a, lda, 0},
                   Operand{B, type_b, ldb, 0}, beta, Operand{C, type_c, ldc, 0}, 1, compute);
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m,
                                          int n, int k, const void* alpha, const void* A, cudaDataType type_a,
                                          int lda, long long stride_a, const void* B, cudaDataType type_b,
                                          int ldb, long long stride_b, const void* beta, void* C,
                                          cudaDataType type_c, int ldc, long long stride_c, int batch,
                                          cublasComputeType_t compute, cublasGemmAlgo_t) {
    return product("cublasGemmStridedBatchedEx", h, ta, tb, m, n, k, alpha, Operand{A, type_a, lda, stride_a},
                   Operand{B, type_b, ldb, stride_b}, beta, Operand{C, type_c, ldc, stride_c}, batch,
                   compute);
}

} // extern "C"
