/* dev/cpu/cublaslt.cpp - cuBLASLt on the CPU: handle, heuristic, cublasLtMatmul.

   fp32, bf16 and fp16 matrices; fp32 computation and scale; column or row order; strided batches; alpha and
   beta on the host or on the device; epilogues DEFAULT, BIAS, RELU, RELU_BIAS, GELU (tanh), GELU_BIAS,
   GELU_AUX, GELU_AUX_BIAS, DGELU, DGELU_BGRAD, BGRADA, BGRADB. What is not known is refused with a status
   and one line on stderr. Matrices must be 16-byte aligned. An operand that is not wholly in device memory
   ends the process. The one algorithm needs no workspace; results depend on inputs and shapes only.
*/
#include "cublaslt_gemm.h"
#include <string.h>

using namespace cuda_cpu::gemm;

struct cublasLtContext {
    uint64_t magic;
};

namespace {

const uint64_t MAGIC = 0x63706c74636f6e74ull;

Matrix matrix(const Layout& x, const void* data) {
    return Matrix{data,
                  (cudaDataType_t)x.type,
                  x.order == CUBLASLT_ORDER_ROW,
                  (int64_t)x.rows,
                  (int64_t)x.cols,
                  x.ld,
                  x.batch > 1 ? x.batch_stride : 0};
}

bool known_compute(int type) {
    switch (type) {
    case CUBLAS_COMPUTE_32F:
    case CUBLAS_COMPUTE_32F_PEDANTIC:
    case CUBLAS_COMPUTE_32F_FAST_16F:
    case CUBLAS_COMPUTE_32F_FAST_16BF:
    case CUBLAS_COMPUTE_32F_FAST_TF32: return true;
    default: return false;
    }
}

/* Descriptors to a Product, or the reason why not. Pointers to data and scalars are filled in by the
   caller. */
cublasStatus_t product(const char* name, const Desc* d, const Layout* a, const Layout* b, const Layout* c,
                       const Layout* o, Product* p) {
    if (!d || !a || !b || !c || !o)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "%s: a descriptor is NULL", name);
    if (!known_compute(d->compute) || d->scale != CUDA_R_32F)
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED,
                      "%s: compute type %d with scale type %d; both must be fp32", name, d->compute,
                      d->scale);
    for (void* pointer : d->scale_pointers)
        if (pointer)
            return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "%s: fp8 scales and maxima are not in the CPU build",
                          name);
    if (d->transpose_c != CUBLAS_OP_N || d->fill != CUBLAS_FILL_MODE_FULL || d->transpose_a < 0 ||
        d->transpose_a > CUBLAS_OP_C || d->transpose_b < 0 || d->transpose_b > CUBLAS_OP_C)
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "%s: transpose %d %d %d or fill mode %d", name,
                      d->transpose_a, d->transpose_b, d->transpose_c, d->fill);
    if (d->pointer_mode != CUBLASLT_POINTER_MODE_HOST && d->pointer_mode != CUBLASLT_POINTER_MODE_DEVICE)
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "%s: pointer mode %d", name, d->pointer_mode);
    for (const Layout* x : {a, b, c, o})
        if ((x->order != CUBLASLT_ORDER_COL && x->order != CUBLASLT_ORDER_ROW) || x->batch_mode ||
            x->plane_offset || x->batch != o->batch)
            return refuse(CUBLAS_STATUS_NOT_SUPPORTED,
                          "%s: order %d, batch mode %u, plane offset, or %d and %d "
                          "matrices in a batch",
                          name, x->order, x->batch_mode, x->batch, o->batch);
    *p = Product{};
    p->transpose_a = d->transpose_a != CUBLAS_OP_N;
    p->transpose_b = d->transpose_b != CUBLAS_OP_N;
    p->a = matrix(*a, nullptr), p->b = matrix(*b, nullptr), p->c = matrix(*c, nullptr),
    p->d = matrix(*o, nullptr);
    p->batch = o->batch;
    p->epilogue = (cublasLtEpilogue_t)d->epilogue;
    p->bias = d->bias, p->bias_stride = o->batch > 1 ? d->bias_stride : 0;
    p->bias_type = d->bias_type < 0 ? p->d.type : (cudaDataType_t)d->bias_type;
    p->aux = d->aux, p->aux_ld = d->aux_ld, p->aux_stride = o->batch > 1 ? d->aux_stride : 0;
    p->aux_type = d->aux_type < 0 ? p->d.type : (cudaDataType_t)d->aux_type;
    return check(name, *p);
}

} // namespace

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    if (cuda_cpu::fail_now("cublasLtCreate")) return CUBLAS_STATUS_ALLOC_FAILED;
    if (!handle) return refuse(CUBLAS_STATUS_INVALID_VALUE, "cublasLtCreate: the result pointer is NULL");
    *handle = new cublasLtContext{MAGIC};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    if (!handle || handle->magic != MAGIC)
        return refuse(CUBLAS_STATUS_NOT_INITIALIZED, "cublasLtDestroy: not a handle");
    handle->magic = 0;
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}

size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
size_t cublasLtGetCudartVersion(void) { return CUDART_VERSION; }

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t* results, int* found) {
    const char* name = "cublasLtMatmulAlgoGetHeuristic";
    if (found) *found = 0;
    if (cuda_cpu::fail_now(name)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (!handle || handle->magic != MAGIC)
        return refuse(CUBLAS_STATUS_NOT_INITIALIZED, "%s: not a handle", name);
    if (!preference || !results || !found || wanted < 1)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "%s: preference, results, or %d wanted", name, wanted);
    for (uint32_t alignment : ((const Preference*)preference)->alignment)
        if (alignment < 16)
            return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "%s: a matrix aligned to %u bytes; 16 are needed",
                          name, alignment);
    Product p;
    cublasStatus_t status = product(name, (Desc*)desc, (Layout*)a, (Layout*)b, (Layout*)c, (Layout*)d, &p);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    memset(results, 0, sizeof *results);
    results->algo.data[0] = MAGIC;
    results->state = CUBLAS_STATUS_SUCCESS; // workspaceSize 0 is within any limit
    results->wavesCount = 1;
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* A, cublasLtMatrixLayout_t a, const void* B,
                              cublasLtMatrixLayout_t b, const void* beta, const void* C,
                              cublasLtMatrixLayout_t c, void* D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t* algo, void* workspace, size_t workspace_bytes,
                              cudaStream_t stream) {
    const char* name = "cublasLtMatmul";
    if (cuda_cpu::fail_now(name)) return CUBLAS_STATUS_EXECUTION_FAILED;
    if (!handle || handle->magic != MAGIC)
        return refuse(CUBLAS_STATUS_NOT_INITIALIZED, "%s: not a handle", name);
    if (!alpha || !beta || (workspace_bytes && !workspace) || (algo && algo->data[0] != MAGIC))
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "%s: alpha, beta, algo or workspace", name);
    Product p;
    cublasStatus_t status = product(name, (Desc*)desc, (Layout*)a, (Layout*)b, (Layout*)c, (Layout*)d, &p);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    p.a.data = A, p.b.data = B, p.c.data = C, p.d.data = D;
    if (((Desc*)desc)->pointer_mode == CUBLASLT_POINTER_MODE_HOST)
        p.alpha = *(const float*)alpha, p.beta = *(const float*)beta;
    else
        p.alpha_device = (const float*)alpha, p.beta_device = (const float*)beta;
    return launch(name, p, 16, stream);
}

} // extern "C"
