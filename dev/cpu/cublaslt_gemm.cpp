/* dev/cpu/cublaslt_gemm.cpp - one product of the CPU build's cuBLAS and cuBLASLt.

   16-bit operands are widened to fp32, the smaller one whole, the larger one in panels of about 4 MB; the
   product, beta * C and the epilogue are computed in fp32; the result is rounded once. fp32 operands are used
   where they lie. beta = 0 does not read C.

   A matrix in row order is the transposed matrix in column order. If D is in row order, D^T = op(B)^T
   op(A)^T is computed instead: the operands swap, and the bias belongs to columns instead of rows.
*/
#include "cublaslt_gemm.h"
#include "internal.h"
#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#pragma GCC optimize("O3") // vectorise

namespace cuda_cpu {
namespace gemm {
namespace {

const int64_t PANEL = 1 << 20; // elements

/* ---- types ---- */

inline float widen_bf16(uint16_t x) {
    uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

inline uint16_t narrow_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
}

void widen(float* out, const void* in, cudaDataType_t type, int64_t n) {
    if (type == CUDA_R_32F)
        memcpy(out, in, n * sizeof(float));
    else if (type == CUDA_R_16BF)
        for (int64_t i = 0; i < n; i++) out[i] = widen_bf16(((const uint16_t*)in)[i]);
    else
        for (int64_t i = 0; i < n; i++) out[i] = (float)((const _Float16*)in)[i];
}

void narrow(void* out, const float* in, cudaDataType_t type, int64_t n) {
    if (type == CUDA_R_32F)
        memmove(out, in, n * sizeof(float));
    else if (type == CUDA_R_16BF)
        for (int64_t i = 0; i < n; i++) ((uint16_t*)out)[i] = narrow_bf16(in[i]);
    else
        for (int64_t i = 0; i < n; i++) ((_Float16*)out)[i] = (_Float16)in[i];
}

float read_one(const void* in, cudaDataType_t type, int64_t i) {
    float x;
    widen(&x, (const char*)in + i * type_bytes(type), type, 1);
    return x;
}

/* Host memory that grows and is kept, since the same products come again and again. */
struct Scratch {
    float* p = nullptr;
    size_t count = 0;
    ~Scratch() { free(p); }
    float* get(size_t n) {
        if (n > count) {
            free(p);
            count = (n + 1023) / 1024 * 1024;
            p = (float*)aligned_alloc(64, count * sizeof(float));
            if (!p) fatal("a matrix product needs %zu bytes of host memory", count * sizeof(float));
        }
        return p;
    }
};

thread_local Scratch scratch_a, scratch_b, scratch_d, scratch_row;

/* ---- epilogues ---- */

const float GELU_SCALE = 0.7978845608028654f; // sqrt(2 / pi)

float gelu(float x) { return 0.5f * x * (1 + tanhf(GELU_SCALE * (x + 0.044715f * x * x * x))); }

float dgelu(float x) {
    float t = tanhf(GELU_SCALE * (x + 0.044715f * x * x * x));
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * GELU_SCALE * (1 + 3 * 0.044715f * x * x);
}

char* at(const void* base, cudaDataType_t type, int64_t i) {
    return (char*)base + i * (int64_t)type_bytes(type);
}

/* One of the batch, turned so that D is in column order: m x n. */
struct Turned {
    const Product* p;
    bool swapped, ta, tb;
    int64_t m, n, k;
    const void *a, *b, *c;
    void *d, *bias, *aux;
    int64_t lda, ldb;
    cudaDataType_t type_a, type_b;
    float alpha, beta;
};

Turned turn(const Product& p, int i, float alpha, float beta) {
    Turned t = {};
    t.p = &p;
    t.swapped = p.d.row_order;
    t.m = p.d.rows, t.n = p.d.cols;
    t.k = p.transpose_a ? p.a.rows : p.a.cols;
    t.ta = p.transpose_a != p.a.row_order;
    t.tb = p.transpose_b != p.b.row_order;
    t.a = at(p.a.data, p.a.type, i * p.a.batch_stride), t.lda = p.a.ld, t.type_a = p.a.type;
    t.b = at(p.b.data, p.b.type, i * p.b.batch_stride), t.ldb = p.b.ld, t.type_b = p.b.type;
    t.c = at(p.c.data, p.c.type, i * p.c.batch_stride);
    t.d = at(p.d.data, p.d.type, i * p.d.batch_stride);
    t.bias = at(p.bias, p.bias_type, i * p.bias_stride);
    t.aux = at(p.aux, p.aux_type, i * p.aux_stride);
    t.alpha = alpha, t.beta = beta;
    if (t.swapped) {
        Turned s = t;
        t.m = s.n, t.n = s.m;
        t.a = s.b, t.lda = s.ldb, t.type_a = s.type_b, t.ta = !s.tb;
        t.b = s.a, t.ldb = s.lda, t.type_b = s.type_a, t.tb = !s.ta;
    }
    return t;
}

/* A column of m results, in fp32, through beta * C, bias, activation, to D. */
void finish_column(const Turned& t, float* x, int64_t i0, int64_t m, int64_t j, bool add_c, float* sums) {
    const Product& p = *t.p;
    float* row = scratch_row.get(m);
    if (add_c) {
        widen(row, at(t.c, p.c.type, i0 + j * p.c.ld), p.c.type, m);
        for (int64_t i = 0; i < m; i++) x[i] += t.beta * row[i];
    }
    if (adds_bias(p) && t.swapped) {
        float bias = read_one(t.bias, p.bias_type, j);
        for (int64_t i = 0; i < m; i++) x[i] += bias;
    } else if (adds_bias(p)) {
        widen(row, at(t.bias, p.bias_type, i0), p.bias_type, m);
        for (int64_t i = 0; i < m; i++) x[i] += row[i];
    }
    void* aux = at(t.aux, p.aux_type, i0 + j * p.aux_ld);
    if (is_grad(p)) {
        widen(row, aux, p.aux_type, m);
        for (int64_t i = 0; i < m; i++) x[i] *= dgelu(row[i]);
    } else if (uses_aux(p)) {
        narrow(aux, x, p.aux_type, m);
    }
    if (has(p, CUBLASLT_EPILOGUE_GELU))
        for (int64_t i = 0; i < m; i++) x[i] = gelu(x[i]);
    if (has(p, CUBLASLT_EPILOGUE_RELU))
        for (int64_t i = 0; i < m; i++) x[i] = x[i] < 0 ? 0 : x[i]; // keeps NaN
    if (p.epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD)
        for (int64_t i = 0; i < m; i++) sums[t.swapped ? j : i0 + i] += x[i];
    narrow(at(t.d, p.d.type, i0 + j * p.d.ld), x, p.d.type, m);
}

/* The sums over k of op(A)'s rows or op(B)'s columns, as the caller named them. */
void input_sums(const Turned& t, float* sums) {
    const Product& p = *t.p;
    bool of_a = p.epilogue == CUBLASLT_EPILOGUE_BGRADA;
    const Matrix& x = of_a ? p.a : p.b;
    const void* data = of_a != t.swapped ? t.a : t.b;
    bool stored_transposed = of_a ? p.transpose_a : !p.transpose_b; // then k runs along the rows of x
    int64_t vectors = x.row_order ? x.rows : x.cols, length = x.row_order ? x.cols : x.rows;
    bool along = stored_transposed != x.row_order; // k runs along the contiguous direction
    float* row = scratch_row.get(length);
    for (int64_t v = 0; v < vectors; v++) {
        widen(row, at(data, x.type, v * x.ld), x.type, length);
        for (int64_t i = 0; i < length; i++) sums[along ? v : i] += row[i];
    }
}

/* ---- the product ---- */

/* As cblas_sgemm, in one order of additions on every processor: k by k, each rounded. */
void plain_sgemm(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
                 const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
    float* sums = scratch_row.get(m);
    for (int64_t j = 0; j < n; j++) {
        memset(sums, 0, m * sizeof(float));
        for (int64_t x = 0; x < k; x++) {
            const float value = tb ? b[j + x * ldb] : b[x + j * ldb];
            for (int64_t i = 0; i < m; i++) sums[i] += (ta ? a[x + i * lda] : a[i + x * lda]) * value;
        }
        float* d = c + j * ldc;
        for (int64_t i = 0; i < m; i++) d[i] = beta == 0 ? alpha * sums[i] : alpha * sums[i] + beta * d[i];
    }
}

/* One thread a rank, unless the environment says otherwise. */
bool limit_threads() {
    if (!getenv("OPENBLAS_NUM_THREADS") && !getenv("OMP_NUM_THREADS")) openblas_set_num_threads(1);
    return true;
}

/* fp32, column order: C = alpha * op(A) op(B) + beta * C; beta 0 does not read C. */
void sgemm(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
           const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
    if (options().plain_products) return plain_sgemm(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    static const bool limited = limit_threads();
    (void)limited;
    cblas_sgemm(CblasColMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans, (int)m, (int)n,
                (int)k, alpha, a, (int)lda, b, (int)ldb, beta, c, (int)ldc);
}

/* op(X) in fp32, where `first` and `count` select along the free (not the k) direction. In place for fp32. */
const float* panel(const void* x, cudaDataType_t type, int64_t* ld, bool k_contiguous, int64_t k,
                   int64_t first, int64_t count, Scratch& scratch) {
    const char* from = at(x, type, k_contiguous ? first * *ld : first);
    if (type == CUDA_R_32F) return (const float*)from;
    int64_t vectors = k_contiguous ? count : k, length = k_contiguous ? k : count;
    float* out = scratch.get(vectors * length);
    for (int64_t v = 0; v < vectors; v++) widen(out + v * length, at(from, type, v * *ld), type, length);
    *ld = length;
    return out;
}

bool plain_epilogue(const Product& p) {
    return p.epilogue == CUBLASLT_EPILOGUE_DEFAULT || p.epilogue == CUBLASLT_EPILOGUE_BGRADA ||
           p.epilogue == CUBLASLT_EPILOGUE_BGRADB;
}

/* Rows i0.. of A and columns j0.. of B are widened: their part of D. */
void part(const Turned& t, int64_t i0, int64_t m, int64_t j0, int64_t n, const float* a, int64_t lda,
          const float* b, int64_t ldb, float* sums) {
    const Product& p = *t.p;
    if (p.d.type == CUDA_R_32F) { // straight into D
        float* d = (float*)t.d + i0 + j0 * p.d.ld;
        if (t.beta != 0 && t.c != t.d)
            for (int64_t j = 0; j < n; j++)
                memcpy(d + j * p.d.ld, (const float*)t.c + i0 + (j0 + j) * p.c.ld, m * sizeof(float));
        sgemm(t.ta, t.tb, m, n, t.k, t.alpha, a, lda, b, ldb, t.beta, d, p.d.ld);
        for (int64_t j = 0; j < n && !plain_epilogue(p); j++)
            finish_column(t, d + j * p.d.ld, i0, m, j0 + j, false, sums);
        return;
    }
    float* x = scratch_d.get(m * n);
    sgemm(t.ta, t.tb, m, n, t.k, t.alpha, a, lda, b, ldb, 0, x, m);
    for (int64_t j = 0; j < n; j++) finish_column(t, x + j * m, i0, m, j0 + j, t.beta != 0, sums);
}

void one_product(const Turned& t) {
    const Product& p = *t.p;
    int64_t sums_count = p.epilogue == CUBLASLT_EPILOGUE_BGRADB ? p.d.cols : p.d.rows;
    float* sums = sums_bias(p) ? (float*)calloc(sums_count, sizeof(float)) : nullptr;
    if (p.epilogue == CUBLASLT_EPILOGUE_BGRADA || p.epilogue == CUBLASLT_EPILOGUE_BGRADB) input_sums(t, sums);
    bool wide = t.type_a == CUDA_R_32F; // then nothing is widened, and one panel does
    bool by_rows = t.m >= t.n;          // the larger operand goes in panels
    int64_t step = wide ? (by_rows ? t.m : t.n) : PANEL / (t.k > 1 ? t.k : 1) / 48 * 48;
    step = step < 48 ? 48 : step;
    int64_t lda = t.lda, ldb = t.ldb;
    const float* a = by_rows ? nullptr : panel(t.a, t.type_a, &lda, t.ta, t.k, 0, t.m, scratch_a);
    const float* b = by_rows ? panel(t.b, t.type_b, &ldb, !t.tb, t.k, 0, t.n, scratch_b) : nullptr;
    for (int64_t x = 0; x < (by_rows ? t.m : t.n); x += step) {
        int64_t left = (by_rows ? t.m : t.n) - x, count = left < step ? left : step,
                ld = by_rows ? t.lda : t.ldb;
        if (by_rows) {
            const float* rows = panel(t.a, t.type_a, &ld, t.ta, t.k, x, count, scratch_a);
            part(t, x, count, 0, t.n, rows, ld, b, ldb, sums);
        } else {
            const float* columns = panel(t.b, t.type_b, &ld, !t.tb, t.k, x, count, scratch_b);
            part(t, 0, t.m, x, count, a, lda, columns, ld, sums);
        }
    }
    if (sums) narrow(t.bias, sums, p.bias_type, sums_count);
    free(sums);
}

} // namespace

void compute(const Product& p, int i, float alpha, float beta) { one_product(turn(p, i, alpha, beta)); }

} // namespace gemm
} // namespace cuda_cpu
