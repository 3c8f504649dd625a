/* dev/cpu/cublaslt_descriptors.cpp - cuBLASLt on the CPU: descriptors of matrices, products and preferences.

   A table per kind of descriptor says where each attribute lies. Attributes that are not in it are refused.
*/
#include "cublaslt_gemm.h"
#include <stddef.h>
#include <string.h>

using namespace cuda_cpu::gemm;

namespace {

/* An attribute: where it lies in the descriptor. */
struct Attribute {
    int id;
    size_t offset, bytes;
};
#define AT(id, type, field) \
    { id, offsetof(type, field), sizeof(type::field) }

const Attribute LAYOUT[] = {
    AT(CUBLASLT_MATRIX_LAYOUT_TYPE, Layout, type),
    AT(CUBLASLT_MATRIX_LAYOUT_ORDER, Layout, order),
    AT(CUBLASLT_MATRIX_LAYOUT_ROWS, Layout, rows),
    AT(CUBLASLT_MATRIX_LAYOUT_COLS, Layout, cols),
    AT(CUBLASLT_MATRIX_LAYOUT_LD, Layout, ld),
    AT(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, Layout, batch),
    AT(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, Layout, batch_stride),
    AT(CUBLASLT_MATRIX_LAYOUT_PLANE_OFFSET, Layout, plane_offset),
    AT(8 /* batch mode, CUDA 13 */, Layout, batch_mode),
};
const Attribute DESC[] = {
    AT(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, Desc, compute),
    AT(CUBLASLT_MATMUL_DESC_SCALE_TYPE, Desc, scale),
    AT(CUBLASLT_MATMUL_DESC_POINTER_MODE, Desc, pointer_mode),
    AT(CUBLASLT_MATMUL_DESC_TRANSA, Desc, transpose_a),
    AT(CUBLASLT_MATMUL_DESC_TRANSB, Desc, transpose_b),
    AT(CUBLASLT_MATMUL_DESC_TRANSC, Desc, transpose_c),
    AT(CUBLASLT_MATMUL_DESC_FILL_MODE, Desc, fill),
    AT(CUBLASLT_MATMUL_DESC_EPILOGUE, Desc, epilogue),
    AT(CUBLASLT_MATMUL_DESC_BIAS_POINTER, Desc, bias),
    AT(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, Desc, bias_stride),
    AT(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, Desc, aux),
    AT(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, Desc, aux_ld),
    AT(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, Desc, aux_stride),
    AT(CUBLASLT_MATMUL_DESC_ALPHA_VECTOR_BATCH_STRIDE, Desc, alpha_stride),
    AT(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, Desc, sm_count),
    AT(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, Desc, aux_type),
    AT(CUBLASLT_MATMUL_DESC_FAST_ACCUM, Desc, fast_accumulation),
    AT(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, Desc, bias_type),
    AT(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, Desc, scale_pointers[0]),
    AT(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, Desc, scale_pointers[1]),
    AT(CUBLASLT_MATMUL_DESC_C_SCALE_POINTER, Desc, scale_pointers[2]),
    AT(CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, Desc, scale_pointers[3]),
    AT(CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, Desc, scale_pointers[4]),
    AT(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_SCALE_POINTER, Desc, scale_pointers[5]),
    AT(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_AMAX_POINTER, Desc, scale_pointers[6]),
};
const Attribute PREFERENCE[] = {
    AT(CUBLASLT_MATMUL_PREF_SEARCH_MODE, Preference, search),
    AT(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, Preference, workspace),
    AT(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, Preference, reductions),
    AT(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, Preference, alignment[0]),
    AT(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, Preference, alignment[1]),
    AT(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, Preference, alignment[2]),
    AT(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, Preference, alignment[3]),
    AT(CUBLASLT_MATMUL_PREF_MAX_WAVES_COUNT, Preference, waves),
    AT(CUBLASLT_MATMUL_PREF_IMPL_MASK, Preference, implementations),
};

template <size_t N> const Attribute* find(const Attribute (&table)[N], int id) {
    for (const Attribute& a : table)
        if (a.id == id) return &a;
    return nullptr;
}

template <size_t N>
cublasStatus_t set(const char* name, const Attribute (&table)[N], void* object, int id, const void* in,
                   size_t bytes) {
    if (cuda_cpu::fail_now(name)) return CUBLAS_STATUS_INTERNAL_ERROR;
    const Attribute* a = find(table, id);
    if (!object || !in || !a)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "%s: attribute %d%s", name, id,
                      a ? " of or from NULL" : "");
    if (bytes < a->bytes) // NVIDIA's takes more bytes than it needs
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "%s: attribute %d has %zu bytes, not %zu", name, id,
                      a->bytes, bytes);
    memcpy((char*)object + a->offset, in, a->bytes);
    return CUBLAS_STATUS_SUCCESS;
}

template <size_t N>
cublasStatus_t get(const char* name, const Attribute (&table)[N], const void* object, int id, void* out,
                   size_t bytes, size_t* written) {
    const Attribute* a = find(table, id);
    if (!object || !a || (bytes == 0 && !written) || (bytes && (!out || bytes < a->bytes)))
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "%s: attribute %d into %zu bytes", name, id, bytes);
    if (bytes) memcpy(out, (const char*)object + a->offset, a->bytes);
    if (written) *written = a->bytes;
    return CUBLAS_STATUS_SUCCESS;
}

/* Create: a descriptor on the heap, initialised by the Init form. */
template <class Opaque> cublasStatus_t create(const char* name, Opaque** out) {
    if (cuda_cpu::fail_now(name)) return CUBLAS_STATUS_ALLOC_FAILED;
    if (!out) return refuse(CUBLAS_STATUS_INVALID_VALUE, "%s: the result pointer is NULL", name);
    *out = new Opaque();
    return CUBLAS_STATUS_SUCCESS;
}

template <class Opaque> cublasStatus_t destroy(Opaque* object) {
    delete object; // NULL too, as NVIDIA's
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t bad_init(const char* name) {
    return refuse(CUBLAS_STATUS_INVALID_VALUE, "%s: NULL, or a descriptor of another size", name);
}

} // namespace

extern "C" {

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t size,
                                                 cudaDataType type, uint64_t rows, uint64_t cols,
                                                 int64_t ld) {
    if (!layout || size < sizeof(Layout)) return bad_init("cublasLtMatrixLayoutInit");
    memset(layout, 0, size);
    Layout x = {};
    x.type = type, x.order = CUBLASLT_ORDER_COL, x.rows = rows, x.cols = cols, x.ld = ld, x.batch = 1;
    memcpy(layout, &x, sizeof x);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                                          uint64_t cols, int64_t ld) {
    cublasStatus_t status = create("cublasLtMatrixLayoutCreate", layout);
    return status ? status
                  : cublasLtMatrixLayoutInit_internal(*layout, sizeof **layout, type, rows, cols, ld);
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { return destroy(layout); }

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attr, const void* buf,
                                                size_t bytes) {
    return set("cublasLtMatrixLayoutSetAttribute", LAYOUT, layout, attr, buf, bytes);
}

cublasStatus_t cublasLtMatrixLayoutGetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attr, void* buf, size_t bytes,
                                                size_t* written) {
    return get("cublasLtMatrixLayoutGetAttribute", LAYOUT, layout, attr, buf, bytes, written);
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t desc, size_t size,
                                               cublasComputeType_t compute, cudaDataType_t scale) {
    if (!desc || size < sizeof(Desc)) return bad_init("cublasLtMatmulDescInit");
    memset(desc, 0, size);
    Desc x = {};
    x.compute = compute, x.scale = scale, x.fill = CUBLAS_FILL_MODE_FULL,
    x.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    x.aux_type = x.bias_type = -1;
    memcpy(desc, &x, sizeof x);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    cublasStatus_t status = create("cublasLtMatmulDescCreate", desc);
    return status ? status : cublasLtMatmulDescInit_internal(*desc, sizeof **desc, compute, scale);
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) { return destroy(desc); }

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attr,
                                              const void* buf, size_t bytes) {
    return set("cublasLtMatmulDescSetAttribute", DESC, desc, attr, buf, bytes);
}

cublasStatus_t cublasLtMatmulDescGetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attr,
                                              void* buf, size_t bytes, size_t* written) {
    return get("cublasLtMatmulDescGetAttribute", DESC, desc, attr, buf, bytes, written);
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t preference, size_t size) {
    if (!preference || size < sizeof(Preference)) return bad_init("cublasLtMatmulPreferenceInit");
    memset(preference, 0, size);
    Preference x = {
        0, ~(uint64_t)0, CUBLASLT_SEARCH_BEST_FIT, CUBLASLT_REDUCTION_SCHEME_MASK, {256, 256, 256, 256}, 0};
    memcpy(preference, &x, sizeof x);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
    cublasStatus_t status = create("cublasLtMatmulPreferenceCreate", preference);
    return status ? status : cublasLtMatmulPreferenceInit_internal(*preference, sizeof **preference);
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    return destroy(preference);
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attr,
                                                    const void* buf, size_t bytes) {
    return set("cublasLtMatmulPreferenceSetAttribute", PREFERENCE, preference, attr, buf, bytes);
}

cublasStatus_t cublasLtMatmulPreferenceGetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attr, void* buf,
                                                    size_t bytes, size_t* written) {
    return get("cublasLtMatmulPreferenceGetAttribute", PREFERENCE, preference, attr, buf, bytes, written);
}

} // extern "C"
