/* test/test_cpu_cublaslt.cu - the cuBLASLt and cuBLAS of the CPU build (dev/cpu/cublas*.cpp).

     dev/cpu/nvcc -std=c++17 -O2 test/test_cpu_cublaslt.cu -lgtest_main -lgtest -o t && ./t

   Small integers are exact whatever the order of the sums, so most tests compare to the bit with a product in
   double; random ones come after, with a tolerance. Memory that must not be read holds NaN.
*/
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <functional>
#include <math.h>
#include <string>
#include <vector>

namespace {

typedef std::function<double(int64_t i, int64_t j)> Values;

double read_as(cudaDataType_t t, const void* p, int64_t i) {
    return t == CUDA_R_32F    ? ((const float*)p)[i]
           : t == CUDA_R_16BF ? __bfloat162float(((const __nv_bfloat16*)p)[i])
                              : __half2float(((const __half*)p)[i]);
}

void write_as(cudaDataType_t t, void* p, int64_t i, double x) {
    if (t == CUDA_R_32F)
        ((float*)p)[i] = (float)x;
    else if (t == CUDA_R_16BF)
        ((__nv_bfloat16*)p)[i] = __float2bfloat16((float)x);
    else
        ((__half*)p)[i] = __float2half((float)x);
}

double rounded(cudaDataType_t t, double x) {
    char stored[8];
    write_as(t, stored, 0, x);
    return read_as(t, stored, 0);
}

/* A device matrix: logical element (i, j) of matrix b of the batch. Everything between the elements is NaN.
   */
struct Mat {
    cudaDataType_t type;
    int64_t rows, cols, ld;
    bool row;
    int batch;
    int64_t stride;
    char* p = nullptr;
    std::vector<char> host;
    Mat(cudaDataType_t t, int64_t r, int64_t c, const Values& f, int64_t extra = 0, bool row_order = false,
        int n = 1)
        : type(t), rows(r), cols(c), ld((row_order ? c : r) + extra), row(row_order), batch(n) {
        stride = ld * (row ? r : c) + 8 * (n > 1);
        host.resize((size_t)stride * n * bytes());
        for (int64_t i = 0; i < stride * n; i++) write_as(type, host.data(), i, NAN);
        for (int b = 0; b < n; b++)
            for (int64_t i = 0; i < r; i++)
                for (int64_t j = 0; j < c; j++) write_as(type, host.data(), at(i, j, b), f(i + 100 * b, j));
        EXPECT_EQ(cudaMalloc((void**)&p, host.size()), cudaSuccess);
        EXPECT_EQ(cudaMemcpy(p, host.data(), host.size(), cudaMemcpyHostToDevice), cudaSuccess);
    }
    ~Mat() { cudaFree(p); }
    size_t bytes() const { return type == CUDA_R_32F ? 4 : 2; }
    int64_t at(int64_t i, int64_t j, int b) const { return b * stride + (row ? i * ld + j : i + j * ld); }
    double get(int64_t i, int64_t j, int b = 0) const { return read_as(type, host.data(), at(i, j, b)); }
    void read() { EXPECT_EQ(cudaMemcpy(host.data(), p, host.size(), cudaMemcpyDeviceToHost), cudaSuccess); }
    cublasLtMatrixLayout_t layout() const {
        cublasLtMatrixLayout_t l;
        EXPECT_EQ(cublasLtMatrixLayoutCreate(&l, type, rows, cols, ld), CUBLAS_STATUS_SUCCESS);
        int32_t order = row ? CUBLASLT_ORDER_ROW : CUBLASLT_ORDER_COL, n = batch;
        cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_ORDER, &order, sizeof order);
        cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &n, sizeof n);
        cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                         sizeof stride);
        return l;
    }
};

/* One call: op(A) op(B), with what the descriptor needs. */
struct Gemm {
    bool ta = false, tb = false, device_scalars = false;
    float alpha = 1, beta = 0;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    void *bias = nullptr, *aux = nullptr;
    int bias_type = -1, aux_type = -1;
    int64_t aux_ld = 0, bias_stride = 0, aux_stride = 0;
    int64_t shift = 0; // bytes added to A
    cublasStatus_t run(const Mat& a, const Mat& b, const Mat& c, Mat& d, bool heuristic = true) const {
        cublasLtHandle_t handle;
        cublasLtMatmulDesc_t desc;
        EXPECT_EQ(cublasLtCreate(&handle), CUBLAS_STATUS_SUCCESS);
        EXPECT_EQ(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), CUBLAS_STATUS_SUCCESS);
        auto set = [&](cublasLtMatmulDescAttributes_t id, const void* p, size_t n) {
            EXPECT_EQ(cublasLtMatmulDescSetAttribute(desc, id, p, n), CUBLAS_STATUS_SUCCESS);
        };
        int32_t opa = ta ? CUBLAS_OP_T : CUBLAS_OP_N, opb = tb ? CUBLAS_OP_T : CUBLAS_OP_N;
        int32_t mode = device_scalars ? CUBLASLT_POINTER_MODE_DEVICE : CUBLASLT_POINTER_MODE_HOST;
        set(CUBLASLT_MATMUL_DESC_TRANSA, &opa, sizeof opa);
        set(CUBLASLT_MATMUL_DESC_TRANSB, &opb, sizeof opb);
        set(CUBLASLT_MATMUL_DESC_POINTER_MODE, &mode, sizeof mode);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
        set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
        set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias_type, sizeof bias_type);
        set(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, &bias_stride, sizeof bias_stride);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &aux, sizeof aux);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &aux_ld, sizeof aux_ld);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, &aux_type, sizeof aux_type);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, &aux_stride, sizeof aux_stride);
        cublasLtMatrixLayout_t la = a.layout(), lb = b.layout(), lc = c.layout(), ld = d.layout();
        cublasLtMatmulPreference_t preference;
        cublasLtMatmulHeuristicResult_t result;
        size_t workspace = 0;
        int found = 0;
        EXPECT_EQ(cublasLtMatmulPreferenceCreate(&preference), CUBLAS_STATUS_SUCCESS);
        cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                             sizeof workspace);
        cublasStatus_t status =
            cublasLtMatmulAlgoGetHeuristic(handle, desc, la, lb, lc, ld, preference, 1, &result, &found);
        float scalars[2] = {alpha, beta}, *on_device = nullptr;
        cudaMalloc((void**)&on_device, sizeof scalars);
        cudaMemcpy(on_device, scalars, sizeof scalars, cudaMemcpyHostToDevice);
        const float* s = device_scalars ? on_device : scalars;
        if (status == CUBLAS_STATUS_SUCCESS) {
            EXPECT_EQ(found, 1);
            EXPECT_EQ(result.workspaceSize, 0u);
            status = cublasLtMatmul(handle, desc, s, a.p + shift, la, b.p, lb, s + 1, c.p, lc, d.p, ld,
                                    heuristic ? &result.algo : nullptr, nullptr, 0, 0);
        }
        scalars[0] = scalars[1] = NAN; // host scalars are copied by the call
        d.read();
        cudaFree(on_device);
        for (cublasLtMatrixLayout_t l : {la, lb, lc, ld}) cublasLtMatrixLayoutDestroy(l);
        cublasLtMatmulPreferenceDestroy(preference);
        cublasLtMatmulDescDestroy(desc);
        cublasLtDestroy(handle);
        return status;
    }
};

/* Small whole numbers, not alike along any direction. */
double whole(int64_t i, int64_t j, int seed) { return (double)((i * 5 + j * 3 + i * j + seed) % 5) - 2; }
Values wholes(int seed) {
    return [seed](int64_t i, int64_t j) { return whole(i, j, seed); };
}
const Values NOTHING = [](int64_t, int64_t) { return (double)NAN; };

double product(const Mat& a, const Mat& b, bool ta, bool tb, int64_t i, int64_t j, int n) {
    double s = 0;
    for (int64_t x = 0; x < (ta ? a.rows : a.cols); x++)
        s += (ta ? a.get(x, i, n) : a.get(i, x, n)) * (tb ? b.get(j, x, n) : b.get(x, j, n));
    return s;
}

void expect_product(const Gemm& g, const Mat& a, const Mat& b, const Mat& c, const Mat& d,
                    const std::string& what) {
    for (int n = 0; n < d.batch; n++)
        for (int64_t j = 0; j < d.cols; j++)
            for (int64_t i = 0; i < d.rows; i++) {
                double want =
                    g.alpha * product(a, b, g.ta, g.tb, i, j, n) + (g.beta ? g.beta * c.get(i, j, n) : 0);
                if (d.get(i, j, n) != rounded(d.type, want)) {
                    ADD_FAILURE() << what << ": D[" << i << "," << j << "] of " << n << " is "
                                  << d.get(i, j, n) << ", not " << rounded(d.type, want);
                    return;
                }
            }
}

void expect_bits(const Mat& d, const std::function<double(int64_t, int64_t)>& f, double tolerance,
                 const char* what) {
    for (int64_t j = 0; j < d.cols; j++)
        for (int64_t i = 0; i < d.rows; i++)
            if (!(fabs(d.get(i, j) - f(i, j)) <= tolerance * (1 + fabs(f(i, j))))) {
                ADD_FAILURE() << what << ": [" << i << "," << j << "] is " << d.get(i, j) << ", not "
                              << f(i, j);
                return;
            }
}

double gelu(double x) { return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
double dgelu(double x) { return (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5; }

double uniform(int64_t i, int64_t j, int seed) {
    uint64_t h = ((uint64_t)i * 1000003 + j * 64 + seed + 1) * 0x9e3779b97f4a7c15ull;
    h ^= h >> 29, h *= 0xbf58476d1ce4e5b9ull, h ^= h >> 32;
    return (double)(int32_t)h / 2147483648.0;
}

} // namespace

TEST(CpuCublasLt, WholeNumbersAreExactInEveryForm) {
    struct {
        int64_t m, n, k;
    } shapes[] = {{1, 1, 1},    {7, 5, 3},      {33, 20, 40},   {130, 4, 130},
                  {50, 60, 70}, {200, 21, 130}, {513, 37, 301}, {300, 301, 19}};
    for (auto s : shapes)
        for (int form = 0; form < 128; form++) {
            bool ta = form & 1, tb = form & 2, row_a = form & 4, row_b = form & 8, row_d = form & 16;
            if (s.m > 100 && (form & (s.m < 300 ? 64 : 92))) // the long ones in fewer forms
                continue;
            Mat a(CUDA_R_32F, ta ? s.k : s.m, ta ? s.m : s.k, wholes(1), form % 3 * 4, row_a);
            Mat b(CUDA_R_32F, tb ? s.n : s.k, tb ? s.k : s.n, wholes(2), form % 5, row_b);
            Mat c(CUDA_R_32F, s.m, s.n, form & 32 ? wholes(3) : NOTHING, 8, row_d);
            Mat d(CUDA_R_32F, s.m, s.n, NOTHING, form % 2, row_d);
            Gemm g;
            g.ta = ta, g.tb = tb, g.alpha = 2, g.beta = form & 32 ? -3 : 0, g.device_scalars = form & 64;
            EXPECT_EQ(g.run(a, b, c, d), CUBLAS_STATUS_SUCCESS);
            expect_product(g, a, b, c, d,
                           "m n k " + std::to_string(s.m) + " " + std::to_string(s.n) + " " +
                               std::to_string(s.k) + " form " + std::to_string(form));
            if (form & 32) { // and C is D
                EXPECT_EQ(g.run(a, b, c, c), CUBLAS_STATUS_SUCCESS);
                expect_bits(
                    c, [&](int64_t i, int64_t j) { return d.get(i, j); }, 0, "C is D");
            }
        }
}

TEST(CpuCublasLt, SixteenBitTypesRoundOnce) {
    for (cudaDataType_t type : {CUDA_R_16BF, CUDA_R_16F})
        for (cudaDataType_t out : {type, CUDA_R_32F})
            for (int form = 0; form < 8; form++)
                for (int64_t m : {9, 600}) { // 600 rows of 2048: more than one panel
                    int64_t n = 3, k = m == 9 ? 31 : 2048;
                    bool ta = form & 1, tb = form & 2, turned = form & 4;
                    if (turned) std::swap(m, n);
                    Mat a(type, ta ? k : m, ta ? m : k, wholes(1), 8),
                        b(type, tb ? n : k, tb ? k : n, wholes(2), 8);
                    Mat c(out, m, n, wholes(3), 8), d(out, m, n, NOTHING);
                    Gemm g;
                    g.ta = ta, g.tb = tb, g.beta = form & 1;
                    EXPECT_EQ(g.run(a, b, c, d), CUBLAS_STATUS_SUCCESS);
                    expect_product(g, a, b, c, d,
                                   "type " + std::to_string(type) + " out " + std::to_string(out) + " form " +
                                       std::to_string(form) + " m " + std::to_string(m));
                    if (turned) std::swap(m, n);
                }
}

TEST(CpuCublasLt, StridedBatches) {
    for (cudaDataType_t type : {CUDA_R_32F, CUDA_R_16BF}) {
        Mat a(type, 12, 20, wholes(1), 4, false, 3), b(type, 20, 9, wholes(2), 4, false, 3);
        Mat c(type, 12, 9, wholes(3), 4, false, 3), d(type, 12, 9, NOTHING, 0, false, 3);
        Gemm g;
        g.beta = 1;
        EXPECT_EQ(g.run(a, b, c, d, false), CUBLAS_STATUS_SUCCESS);
        expect_product(g, a, b, c, d, "batch");
        cublasHandle_t h;
        float alpha = 2, beta = 0;
        EXPECT_EQ(cublasCreate(&h), CUBLAS_STATUS_SUCCESS);
        EXPECT_EQ(cublasGemmStridedBatchedEx(h, CUBLAS_OP_N, CUBLAS_OP_N, 12, 9, 20, &alpha, a.p, type,
                                             (int)a.ld, a.stride, b.p, type, (int)b.ld, b.stride, &beta, d.p,
                                             type, (int)d.ld, d.stride, 3, CUBLAS_COMPUTE_32F,
                                             CUBLAS_GEMM_DEFAULT),
                  CUBLAS_STATUS_SUCCESS);
        d.read();
        g.alpha = 2, g.beta = 0;
        expect_product(g, a, b, c, d, "cublas batch");
        EXPECT_EQ(cublasGemmEx(h, CUBLAS_OP_N, CUBLAS_OP_N, 12, 9, 20, &alpha, a.p, type, (int)a.ld, b.p,
                               type, (int)b.ld, &beta, d.p, type, (int)d.ld, CUBLAS_COMPUTE_32F,
                               CUBLAS_GEMM_DEFAULT),
                  CUBLAS_STATUS_SUCCESS);
        EXPECT_EQ(cublasDestroy(h), CUBLAS_STATUS_SUCCESS);
    }
}

TEST(CpuCublasLt, Epilogues) {
    for (cudaDataType_t type : {CUDA_R_32F, CUDA_R_16BF})
        for (bool row : {false, true}) {
            const int64_t m = 40, n = 24, k = 32;
            const double near = type == CUDA_R_32F ? 2e-6 : 4e-3;
            auto small = [](int seed) {
                return [seed](int64_t i, int64_t j) { return whole(i, j, seed) / 4; };
            };
            Mat a(type, m, k, small(1), 0, row), b(type, k, n, small(2), 0, row),
                c(type, m, n, NOTHING, 0, row);
            Mat d(type, m, n, NOTHING, 0, row), aux(type, m, n, NOTHING, 8, row), bias(type, m, 1, wholes(7));
            Mat bias_n(type, n, 1, wholes(8)), bias32(CUDA_R_32F, m, 1, wholes(9));
            auto plain = [&](int64_t i, int64_t j) { return product(a, b, false, false, i, j, 0); };
            auto with = [&](int64_t i, int64_t j) { return plain(i, j) + bias.get(i, 0); };
            Gemm g;
            auto run = [&](cublasLtEpilogue_t e, void* bias_p) {
                g.epilogue = e, g.bias = bias_p, g.aux = aux.p, g.aux_ld = aux.ld;
                EXPECT_EQ(g.run(a, b, c, d), CUBLAS_STATUS_SUCCESS) << e;
            };
            run(CUBLASLT_EPILOGUE_BIAS, bias.p);
            expect_bits(
                d, [&](int64_t i, int64_t j) { return rounded(type, with(i, j)); }, 0, "bias");
            g.bias_type = CUDA_R_32F;
            run(CUBLASLT_EPILOGUE_BIAS, bias32.p);
            expect_bits(
                d, [&](int64_t i, int64_t j) { return rounded(type, plain(i, j) + bias32.get(i, 0)); }, 0,
                "fp32 bias");
            g.bias_type = -1;
            run(CUBLASLT_EPILOGUE_RELU, nullptr);
            expect_bits(
                d, [&](int64_t i, int64_t j) { return rounded(type, fmax(plain(i, j), 0)); }, 0, "relu");
            run(CUBLASLT_EPILOGUE_RELU_BIAS, bias.p);
            expect_bits(
                d, [&](int64_t i, int64_t j) { return rounded(type, fmax(with(i, j), 0)); }, 0, "relu bias");
            run(CUBLASLT_EPILOGUE_GELU, nullptr);
            expect_bits(
                d, [&](int64_t i, int64_t j) { return gelu(plain(i, j)); }, near, "gelu");
            run(CUBLASLT_EPILOGUE_GELU_BIAS, bias.p);
            expect_bits(
                d, [&](int64_t i, int64_t j) { return gelu(with(i, j)); }, near, "gelu bias");
            aux.read();
            EXPECT_TRUE(isnan(aux.get(0, 0)));
            run(CUBLASLT_EPILOGUE_GELU_AUX, nullptr);
            expect_bits(
                d, [&](int64_t i, int64_t j) { return gelu(plain(i, j)); }, near, "gelu aux");
            aux.read();
            expect_bits(
                aux, [&](int64_t i, int64_t j) { return rounded(type, plain(i, j)); }, 0, "aux");
            run(CUBLASLT_EPILOGUE_GELU_AUX_BIAS, bias.p);
            expect_bits(
                d, [&](int64_t i, int64_t j) { return gelu(with(i, j)); }, near, "gelu aux bias");
            aux.read();
            expect_bits(
                aux, [&](int64_t i, int64_t j) { return rounded(type, with(i, j)); }, 0, "aux bias");
            auto back = [&](int64_t i, int64_t j) { return plain(i, j) * dgelu(aux.get(i, j)); };
            run(CUBLASLT_EPILOGUE_DGELU, nullptr);
            expect_bits(d, back, near, "dgelu");
            run(CUBLASLT_EPILOGUE_DGELU_BGRAD, bias.p);
            expect_bits(d, back, near, "dgelu bgrad");
            bias.read();
            expect_bits(
                bias,
                [&](int64_t i, int64_t) {
                    double s = 0;
                    for (int64_t j = 0; j < n; j++) s += back(i, j);
                    return s;
                },
                4 * near, "bgrad of dgelu");
            for (bool ta : {false, true}) { // op(A) is m x k, op(B) k x n, whichever way they are stored
                Mat at(type, ta ? k : m, ta ? m : k, wholes(1), 8, row),
                    bt(type, ta ? n : k, ta ? k : n, wholes(2), 8, row);
                g.ta = g.tb = ta;
                g.epilogue = CUBLASLT_EPILOGUE_BGRADA, g.bias = bias.p;
                EXPECT_EQ(g.run(at, bt, c, d), CUBLAS_STATUS_SUCCESS);
                expect_product(g, at, bt, c, d, "bgrada");
                bias.read();
                expect_bits(
                    bias,
                    [&](int64_t i, int64_t) {
                        double s = 0;
                        for (int64_t x = 0; x < k; x++) s += ta ? at.get(x, i) : at.get(i, x);
                        return s;
                    },
                    0, "bgrada");
                g.epilogue = CUBLASLT_EPILOGUE_BGRADB, g.bias = bias_n.p;
                EXPECT_EQ(g.run(at, bt, c, d), CUBLAS_STATUS_SUCCESS);
                bias_n.read();
                expect_bits(
                    bias_n,
                    [&](int64_t j, int64_t) {
                        double s = 0;
                        for (int64_t x = 0; x < k; x++) s += ta ? bt.get(j, x) : bt.get(x, j);
                        return s;
                    },
                    0, "bgradb");
            }
        }
}

static void linear_layer() {
    const int64_t width = 500;
    for (int64_t batch : {1, 20, 33, 100}) {
        auto values = [](int seed) { return [seed](int64_t i, int64_t j) { return uniform(i, j, seed); }; };
        Mat w(CUDA_R_32F, width, width, values(1)), x(CUDA_R_32F, width, batch, values(2));
        Mat dy(CUDA_R_32F, width, batch, values(3)), y(CUDA_R_32F, width, batch, NOTHING);
        Mat dx(CUDA_R_32F, width, batch, NOTHING), dw(CUDA_R_32F, width, width, NOTHING);
        auto near = [&](const Gemm& g, const Mat& a, const Mat& b, Mat& d, const char* what) {
            EXPECT_EQ(g.run(a, b, d, d), CUBLAS_STATUS_SUCCESS);
            std::vector<char> first = d.host;
            double k = (double)(g.ta ? a.rows : a.cols);
            for (int64_t j = 0; j < d.cols; j += 3)
                for (int64_t i = 0; i < d.rows; i += 7)
                    if (!(fabs(d.get(i, j) - product(a, b, g.ta, g.tb, i, j, 0)) < 6e-8 * k)) {
                        ADD_FAILURE() << what << " " << i << " " << j << " " << d.get(i, j);
                        return;
                    }
            EXPECT_EQ(g.run(a, b, d, d), CUBLAS_STATUS_SUCCESS);
            EXPECT_EQ(d.host, first) << what;
        };
        Gemm g;
        g.ta = true;
        near(g, w, x, y, "forward");
        g.ta = false;
        near(g, w, dy, dx, "input gradient");
        g.tb = true;
        near(g, x, dy, dw, "weight gradient");
    }
}

TEST(CpuCublasLt, ALinearLayerAgreesWithDoublesAndRepeats) { linear_layer(); }

/* CUDA_CPU_BLAS=loop: one sum after another, product and sum rounded apart, whatever the processor can do. */
TEST(CpuCublasLt, PlainLoopsHaveOneOrder) {
    setenv("CUDA_CPU_BLAS", "loop", 1);
    cudaDeviceReset();
    linear_layer();
    for (int forms = 0; forms < 4; forms++) {
        Gemm g;
        g.ta = forms & 1, g.tb = forms & 2, g.alpha = 0.3f, g.beta = 0.7f;
        const int64_t m = 67, n = 5, k = 301;
        auto values = [](int seed) { return [seed](int64_t i, int64_t j) { return uniform(i, j, seed); }; };
        Mat a(CUDA_R_32F, g.ta ? k : m, g.ta ? m : k, values(1));
        Mat b(CUDA_R_32F, g.tb ? n : k, g.tb ? k : n, values(2)), c(CUDA_R_32F, m, n, values(3));
        Mat d(CUDA_R_32F, m, n, NOTHING);
        EXPECT_EQ(g.run(a, b, c, d), CUBLAS_STATUS_SUCCESS);
        for (int64_t j = 0; j < n; j++)
            for (int64_t i = 0; i < m; i++) {
                volatile float sum = 0, term; // rounded each time
                for (int64_t x = 0; x < k; x++) {
                    term =
                        (float)(g.ta ? a.get(x, i) : a.get(i, x)) * (float)(g.tb ? b.get(j, x) : b.get(x, j));
                    sum = sum + term;
                }
                term = 0.3f * sum;
                sum = 0.7f * (float)c.get(i, j);
                sum = term + sum;
                ASSERT_EQ((float)d.get(i, j), sum) << forms << " " << i << " " << j;
            }
    }
    unsetenv("CUDA_CPU_BLAS");
    cudaDeviceReset();
}

TEST(CpuCublasLt, WhatIsWrongIsRefused) {
    Mat a(CUDA_R_32F, 8, 8, wholes(1)), b(CUDA_R_32F, 8, 8, wholes(2)), d(CUDA_R_32F, 8, 8, NOTHING);
    Mat narrow(CUDA_R_32F, 8, 7, wholes(1)), half(CUDA_R_16F, 8, 8, wholes(1)),
        bf16(CUDA_R_16BF, 8, 8, wholes(1));
    Gemm g;
    EXPECT_EQ(g.run(narrow, b, d, d), CUBLAS_STATUS_INVALID_VALUE);
    EXPECT_EQ(g.run(half, b, d, d), CUBLAS_STATUS_NOT_SUPPORTED);
    EXPECT_EQ(g.run(a, b, bf16, bf16), CUBLAS_STATUS_NOT_SUPPORTED);
    EXPECT_EQ(g.run(half, half, bf16, bf16), CUBLAS_STATUS_NOT_SUPPORTED);
    g.epilogue = CUBLASLT_EPILOGUE_RELU_AUX;
    EXPECT_EQ(g.run(a, b, d, d), CUBLAS_STATUS_NOT_SUPPORTED);
    g.epilogue = CUBLASLT_EPILOGUE_GELU_AUX;
    EXPECT_EQ(g.run(a, b, d, d), CUBLAS_STATUS_INVALID_VALUE); // aux_ld 0
    g.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    Mat large(CUDA_R_32F, 8, 9, wholes(1));
    large.cols = 8, g.shift = 4;
    testing::internal::CaptureStderr();
    EXPECT_EQ(g.run(large, b, d, d), CUBLAS_STATUS_INVALID_VALUE);
    EXPECT_NE(testing::internal::GetCapturedStderr().find("multiple of 16"), std::string::npos);
    cublasLtMatmulDesc_t desc;
    int32_t value = 0;
    EXPECT_EQ(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &value, 2),
              CUBLAS_STATUS_INVALID_VALUE);
    EXPECT_EQ(cublasLtMatmulDescSetAttribute(desc, (cublasLtMatmulDescAttributes_t)999, &value, 4),
              CUBLAS_STATUS_INVALID_VALUE);
    size_t written = 0;
    EXPECT_EQ(
        cublasLtMatmulDescGetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &value, sizeof value, &written),
        CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(value, CUBLASLT_EPILOGUE_DEFAULT);
    EXPECT_EQ(written, 4u);
    cublasLtMatmulDescDestroy(desc);
}

TEST(CpuCublasLtDeathTest, OperandsOutsideDeviceMemoryStop) {
    auto product_of = [](int64_t rows) {
        Mat a(CUDA_R_32F, 8, 8, wholes(1)), b(CUDA_R_32F, 8, 8, wholes(2)), d(CUDA_R_32F, 8, 8, NOTHING);
        Gemm g;
        d.rows = a.rows = rows, a.ld = d.ld = rows; // more than was allocated
        g.run(a, b, d, d);
    };
    testing::GTEST_FLAG(death_test_style) = "threadsafe"; // GTEST_FLAG_SET is new in 1.12
    EXPECT_EXIT(product_of(4096), testing::ExitedWithCode(99), "cublasLtMatmul: matrix A");
    EXPECT_EXIT(({
                    Mat a(CUDA_R_32F, 8, 8, wholes(1)), b(CUDA_R_32F, 8, 8, wholes(2)),
                        d(CUDA_R_32F, 8, 8, NOTHING);
                    Gemm g;
                    g.epilogue = CUBLASLT_EPILOGUE_BIAS;
                    g.bias = d.p + 240;
                    g.run(a, b, d, d);
                }),
                testing::ExitedWithCode(99), "cublasLtMatmul: bias");
}
