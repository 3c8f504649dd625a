/* dev/cpu/cublaslt_gemm.h - what the files of the CPU build's cuBLAS and cuBLASLt share: one product.

   cublaslt.cpp              cuBLASLt's entry points: handle, heuristic, product
   cublaslt_descriptors.cpp  and descriptors
   cublas.cpp                the few entry points of cuBLAS that llm.c needs
   cublaslt_check.cpp        what can be wrong with a product; onto the stream
   cublaslt_gemm.cpp         one product: widening, OpenBLAS, epilogues, rounding
*/
#pragma once
#include "runtime.h"
#include <cublasLt.h>
#include <stdint.h>

namespace cuda_cpu {
namespace gemm {

/* What the opaque descriptors hold. */
struct Layout {
    uint32_t type;
    int32_t order;
    uint64_t rows, cols;
    int64_t ld, batch_stride;
    int32_t batch;
    uint32_t batch_mode;
    int64_t plane_offset;
};
struct Desc {
    int32_t compute, scale, pointer_mode, transpose_a, transpose_b, transpose_c, fill;
    uint32_t epilogue;
    void *bias, *aux;
    int64_t bias_stride, aux_ld, aux_stride, alpha_stride;
    int32_t aux_type, bias_type, sm_count;
    int8_t fast_accumulation;
    void* scale_pointers[8]; // all must stay NULL
};
struct Preference {
    uint64_t workspace, implementations;
    uint32_t search, reductions, alignment[4];
    float waves;
};
static_assert(sizeof(Layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "fits");
static_assert(sizeof(Desc) <= sizeof(cublasLtMatmulDescOpaque_t), "fits");
static_assert(sizeof(Preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t), "fits");

/* A matrix as the caller describes it. Element (i, j) lies at i + j * ld, or i * ld + j in row order. */
struct Matrix {
    const void* data;
    cudaDataType_t type;
    bool row_order;
    int64_t rows, cols, ld, batch_stride;
};

/* D = epilogue(alpha * op(A) op(B) + beta * C), for each of `batch` sets of matrices. */
struct Product {
    bool transpose_a, transpose_b;
    Matrix a, b, c, d;
    int batch;
    float alpha, beta;
    const float *alpha_device, *beta_device; // if not NULL, read when the work runs
    cublasLtEpilogue_t epilogue;
    void* bias; // of `rows of D`; BGRADB: of `columns of D`
    cudaDataType_t bias_type;
    int64_t bias_stride;
    void* aux;
    cudaDataType_t aux_type;
    int64_t aux_ld, aux_stride;
};

/* What an epilogue needs. */
inline bool has(const Product& p, int flag) { return (p.epilogue & flag) == flag; }
inline bool is_grad(const Product& p) { return has(p, CUBLASLT_EPILOGUE_DGELU); }
inline bool uses_aux(const Product& p) { return is_grad(p) || has(p, CUBLASLT_EPILOGUE_GELU_AUX); }
inline bool adds_bias(const Product& p) { return has(p, CUBLASLT_EPILOGUE_BIAS); }
inline bool sums_bias(const Product& p) {
    return p.epilogue == CUBLASLT_EPILOGUE_BGRADA || p.epilogue == CUBLASLT_EPILOGUE_BGRADB ||
           p.epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD;
}
inline bool uses_bias(const Product& p) { return adds_bias(p) || sums_bias(p); }

/* Product i of the batch, here and now. */
void compute(const Product& p, int i, float alpha, float beta);

/* Everything that can be wrong with a product, in words on stderr. `name` is the entry point's. */
cublasStatus_t check(const char* name, const Product& p);

/* Stops the process, in words, if an operand is not wholly in device memory. */
void check_ranges(const char* name, const Product& p);

/* Puts the product on the stream. alignment: what cuBLASLt (16) or cuBLAS (an element) demands of matrices.
   */
cublasStatus_t launch(const char* name, const Product& p, size_t alignment, cudaStream_t stream);

cublasStatus_t refuse(cublasStatus_t status, const char* format, ...) __attribute__((format(printf, 2, 3)));

size_t type_bytes(cudaDataType_t type); // of the three types that matrices have; 0 for others

} // namespace gemm
} // namespace cuda_cpu
