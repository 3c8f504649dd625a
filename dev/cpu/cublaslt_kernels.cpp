/* dev/cpu/cublaslt_kernels.cpp - products of fp32 matrices on one core.

   A Linear layer of 2000 x 2000 on a batch of 20 reads or writes 16 MB of weights for each of its three
   products of 160 MFLOP: with AVX2, arithmetic and memory cost about the same. OpenBLAS packs both operands
   first, which such short products do not earn back. So there are own kernels for the three products of a
   layer (in column order, with n = batch):
     forward        D[m,n] = sum_k A[k,m] B[k,n]    dot products, 3 rows x 4 columns at a time
     input grad     D[m,n] = sum_k A[m,k] B[k,n]    16 columns of A at a time, D stays in the cache
     weight grad    D[m,n] = sum_k A[m,k] B[n,k]    k = batch: the block of A stays in the cache
   All else goes to OpenBLAS, with one thread unless OPENBLAS_NUM_THREADS or OMP_NUM_THREADS says otherwise.
   CUDA_CPU_BLAS_ONLY=1 sends everything there, for comparison.
*/
#include "cublaslt_gemm.h"
#include <cblas.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

#pragma GCC optimize("O3") // the loops over small arrays must be unrolled into registers

namespace cuda_cpu {
namespace gemm {
namespace {

typedef float F8 __attribute__((vector_size(32), aligned(4), may_alias));

const int SHORT = 48;       // own kernels if the batch has at most so many rows
const int K_BLOCK = 16;     // columns of A that the input gradient takes at a time
const int DOT_BLOCK = 2048; // 3 rows of so many floats stay in the L1 cache
const int64_t PAST_CACHE_ELEMENTS = 1 << 20;
const int64_t WORTH = 1 << 14; // elements of the large matrix

inline F8 load(const float* p) { return *(const F8*)p; }
inline void store(float* p, F8 x) { *(F8*)p = x; }
/* A result that is larger than the caches need not be read before it is written. p: a multiple of 32 bytes.
   */
inline void store_past_cache(float* p, F8 x) {
#ifdef __AVX__
    _mm256_stream_ps(p, (__m256)x);
#else
    store(p, x);
#endif
}

inline F8 all(float x) { return F8{x, x, x, x, x, x, x, x}; }

inline F8 fma(F8 a, F8 b, F8 c) {
#ifdef __FMA__
    return (F8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* Keeps a value in a register: the compiler would load it again for each use, and loads are what limits us.
   */
inline void hold(F8& x) {
#if defined(__x86_64__) && defined(__AVX__)
    asm("" : "+x"(x));
#else
    (void)x;
#endif
}

inline float sum(F8 x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

/* ---- forward ---- */

/* out[i * SHORT + j] += row i of A times column j of B, both of length k. */
template <int MB, int NB>
inline void dots(int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* out) {
    F8 acc[MB][NB] = {};
    int64_t x = 0;
    for (; x + 8 <= k; x += 8) {
        F8 row[MB];
        for (int i = 0; i < MB; i++) {
            row[i] = load(a + i * lda + x);
            hold(row[i]);
        }
        for (int j = 0; j < NB; j++) {
            F8 column = load(b + j * ldb + x);
            hold(column);
            for (int i = 0; i < MB; i++) acc[i][j] = fma(row[i], column, acc[i][j]);
        }
    }
    for (int i = 0; i < MB; i++)
        for (int j = 0; j < NB; j++) {
            float s = sum(acc[i][j]);
            for (int64_t y = x; y < k; y++) s += a[i * lda + y] * b[j * ldb + y];
            out[i * SHORT + j] += s;
        }
}

template <int MB>
void forward_rows(int64_t n, int64_t k, float alpha, const float* a, int64_t lda, const float* b, int64_t ldb,
                  float beta, float* c, int64_t ldc) {
    float out[MB * SHORT] = {};
    for (int64_t x = 0; x < k; x += DOT_BLOCK) {
        int64_t length = k - x < DOT_BLOCK ? k - x : DOT_BLOCK, j = 0;
        for (; j + 4 <= n; j += 4) dots<MB, 4>(length, a + x, lda, b + x + j * ldb, ldb, out + j);
        for (; j < n; j++) dots<MB, 1>(length, a + x, lda, b + x + j * ldb, ldb, out + j);
    }
    for (int64_t j = 0; j < n; j++)
        for (int i = 0; i < MB; i++) {
            float* d = c + i + j * ldc;
            *d = beta == 0 ? alpha * out[i * SHORT + j] : alpha * out[i * SHORT + j] + beta * *d;
        }
}

void forward(int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda, const float* b,
             int64_t ldb, float beta, float* c, int64_t ldc) {
    int64_t i = 0;
    for (; i + 3 <= m; i += 3) forward_rows<3>(n, k, alpha, a + i * lda, lda, b, ldb, beta, c + i, ldc);
    for (; i < m; i++) forward_rows<1>(n, k, alpha, a + i * lda, lda, b, ldb, beta, c + i, ldc);
}

/* ---- gradients ---- */

/* C[MV * 8 rows, NB columns] = beta * C + A (k columns) times b, where b[x * 4 + j] holds alpha * B. */
template <int MV, int NB, bool PAST_CACHE>
inline void tile(int64_t k, const float* a, int64_t lda, const float* b, float beta, float* c, int64_t ldc) {
    F8 acc[NB][MV];
    for (int j = 0; j < NB; j++)
        for (int v = 0; v < MV; v++) acc[j][v] = beta == 0 ? all(0) : all(beta) * load(c + v * 8 + j * ldc);
    for (int64_t x = 0; x < k; x++) {
        F8 rows[MV];
        for (int v = 0; v < MV; v++) {
            rows[v] = load(a + v * 8 + x * lda);
            hold(rows[v]);
        }
        for (int j = 0; j < NB; j++) {
            F8 value = all(b[x * 4 + j]);
            hold(value);
            for (int v = 0; v < MV; v++) acc[j][v] = fma(rows[v], value, acc[j][v]);
        }
    }
    for (int j = 0; j < NB; j++)
        for (int v = 0; v < MV; v++)
            PAST_CACHE ? store_past_cache(c + v * 8 + j * ldc, acc[j][v])
                       : store(c + v * 8 + j * ldc, acc[j][v]);
}

/* As tile, for m rows; the last few one by one. */
template <int NB, bool PAST_CACHE>
void strip(int64_t m, int64_t k, const float* a, int64_t lda, const float* b, float beta, float* c,
           int64_t ldc) {
    int64_t i = 0;
    for (; i + 24 <= m; i += 24) tile<3, NB, PAST_CACHE>(k, a + i, lda, b, beta, c + i, ldc);
    for (; i + 8 <= m; i += 8) tile<1, NB, PAST_CACHE>(k, a + i, lda, b, beta, c + i, ldc);
    for (; i < m; i++)
        for (int j = 0; j < NB; j++) {
            float* d = c + i + j * ldc;
            float s = beta == 0 ? 0 : beta * *d;
            for (int64_t x = 0; x < k; x++) s += a[i + x * lda] * b[x * 4 + j];
            *d = s;
        }
}

void strip_of(int columns, int64_t m, int64_t k, const float* a, int64_t lda, const float* b, float beta,
              float* c, int64_t ldc) {
    switch (columns) {
    case 1: return strip<1, false>(m, k, a, lda, b, beta, c, ldc);
    case 2: return strip<2, false>(m, k, a, lda, b, beta, c, ldc);
    case 3: return strip<3, false>(m, k, a, lda, b, beta, c, ldc);
    default: return strip<4, false>(m, k, a, lda, b, beta, c, ldc);
    }
}

/* alpha * four columns of op(B), rows x0 to x0 + k, side by side. */
int pack(bool transpose_b, int64_t x0, int64_t k, int64_t j0, int64_t n, float alpha, const float* b,
         int64_t ldb, float* out) {
    int columns = n - j0 < 4 ? (int)(n - j0) : 4;
    for (int64_t x = 0; x < k; x++)
        for (int j = 0; j < columns; j++)
            out[x * 4 + j] = alpha * (transpose_b ? b[j0 + j + (x0 + x) * ldb] : b[x0 + x + (j0 + j) * ldb]);
    return columns;
}

void input_grad(bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
                const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
    const int64_t ROWS = 240; // rows x K_BLOCK of A stay in the L1 cache while the columns of B pass
    float packed[SHORT / 4][K_BLOCK * 4];
    for (int64_t x = 0; x < k; x += K_BLOCK) {
        int64_t kk = k - x < K_BLOCK ? k - x : K_BLOCK;
        for (int64_t j = 0; j < n; j += 4) pack(transpose_b, x, kk, j, n, alpha, b, ldb, packed[j / 4]);
        for (int64_t i = 0; i < m; i += ROWS)
            for (int64_t j = 0; j < n; j += 4)
                strip_of(n - j < 4 ? (int)(n - j) : 4, m - i < ROWS ? m - i : ROWS, kk, a + i + x * lda, lda,
                         packed[j / 4], x == 0 ? beta : 1, c + i + j * ldc, ldc);
    }
}

void weight_grad(bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
                 const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
    float packed[SHORT * 4];
    bool past_cache = beta == 0 && m * n >= PAST_CACHE_ELEMENTS && (uintptr_t)c % 32 == 0 && ldc % 8 == 0;
    for (int64_t j = 0; j < n; j += 4) { // whole columns: 4 streams for the memory
        int columns = pack(transpose_b, 0, k, j, n, alpha, b, ldb, packed);
        if (past_cache && columns == 4)
            strip<4, true>(m, k, a, lda, packed, 0, c + j * ldc, ldc);
        else
            strip_of(columns, m, k, a, lda, packed, beta, c + j * ldc, ldc);
    }
#ifdef __AVX__
    _mm_sfence(); // other ranks may read it behind a flag
#endif
}

void one_thread_per_rank() {
    static const bool done = [] {
        if (!getenv("OPENBLAS_NUM_THREADS") && !getenv("OMP_NUM_THREADS")) openblas_set_num_threads(1);
        return true;
    }();
    (void)done;
}

} // namespace

void sgemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
           int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
    static const bool own = !getenv("CUDA_CPU_BLAS_ONLY");
    if (own && k > 0) {
        if (transpose_a && !transpose_b && n <= SHORT && m * k >= WORTH)
            return forward(m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
        if (!transpose_a && n <= SHORT && m * k >= WORTH)
            return input_grad(transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
        if (!transpose_a && k <= SHORT && m * n >= WORTH)
            return weight_grad(transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    }
    one_thread_per_rank();
    cblas_sgemm(CblasColMajor, transpose_a ? CblasTrans : CblasNoTrans,
                transpose_b ? CblasTrans : CblasNoTrans, (int)m, (int)n, (int)k, alpha, a, (int)lda, b,
                (int)ldb, beta, c, (int)ldc);
}

} // namespace gemm
} // namespace cuda_cpu
