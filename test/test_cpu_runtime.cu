// test/test_cpu_runtime.cu - the CPU build of CUDA itself: fibers, warps, launch rules, arithmetic
//
//   dev/cpu/nvcc -std=c++17 -O2 test/test_cpu_runtime.cu -lgtest -lgtest_main -o build/test_cpu_runtime
#include "test_cpu.h"
#include <cuda_bf16.h>
#include <cmath>
#include <thread>

// ----------------------------------------------------------------------------
// fibers

__device__ static unsigned linear_thread() {
    return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}

__global__ void block_sum(double* sums, bool synchronize) { // of (thread + 1), in each block
    __shared__ double part[32];
    unsigned thread = linear_thread(), threads = blockDim.x * blockDim.y * blockDim.z;
    for (unsigned i = thread; i < 32; i += threads) part[i] = 0;
    __syncthreads();
    double sum = thread + 1;
    unsigned lanes = min(32u, threads - thread / 32 * 32);
    for (int delta = 16; delta; delta /= 2) {
        double other = __shfl_down_sync(0xffffffffu, sum, delta);
        if (thread % 32 + delta < lanes) sum += other;
    }
    if (thread % 32 == 0) part[thread / 32] = sum;
    if (synchronize) __syncthreads();
    if (thread == 0) {
        double total = 0;
        for (int i = 0; i < 32; i++) total += part[i];
        sums[blockIdx.x] = total;
    }
}

TEST_F(Cpu, BlockReductionInEveryOrder) {
    for (const char* order : {"fwd", "rev", "rand:1", "rand:7"})
        for (dim3 block :
             {dim3(1), dim3(31), dim3(32), dim3(100), dim3(256), dim3(1024), dim3(8, 4, 8), dim3(5, 7, 3)}) {
            use("CUDA_CPU_SCHED", order);
            Device<double> sums(3);
            OK(run(3, block, 0, block_sum, sums.data, true));
            double n = block.x * block.y * block.z;
            for (int b = 0; b < 3; b++) EXPECT_EQ(n * (n + 1) / 2, sums.at(b)) << order << " " << n;
        }
}

TEST_F(Cpu, ReverseOrderFindsAMissingSyncthreads) {
    Device<double> sum(1);
    OK(run(1, 256, 0, block_sum, sum.data, false));
    double forward = sum.at(0);
    use("CUDA_CPU_SCHED", "rev");
    OK(run(1, 256, 0, block_sum, sum.data, false));
    double right = 256 * 257 / 2;
    EXPECT_TRUE(forward != right || sum.at(0) != right); // one of the orders shows it
    OK(run(1, 256, 0, block_sum, sum.data, true));
    EXPECT_EQ(right, sum.at(0));
}

__global__ void count_threads(int* hits, uint3* last) {
    atomicAdd(&hits[linear_thread() + 1024 * (blockIdx.x + gridDim.x * blockIdx.y)], 1);
    *last = threadIdx;
}

TEST_F(Cpu, EveryThreadRunsOnceInEveryOrder) {
    for (const char* order : {"fwd", "rev", "rand:3"})
        for (dim3 block : {dim3(1), dim3(3, 5), dim3(64, 2, 8), dim3(1, 1, 64), dim3(40, 3)}) {
            use("CUDA_CPU_SCHED", order);
            Device<int> hits(1024 * 6);
            Device<uint3> last(1);
            OK(cudaMemset(hits.data, 0, 1024 * 6 * sizeof(int)));
            OK(run(dim3(2, 3), block, 0, count_threads, hits.data, last.data));
            std::vector<int> host(1024 * 6);
            OK(cudaMemcpy(host.data(), hits.data, host.size() * sizeof(int), cudaMemcpyDeviceToHost));
            for (unsigned i = 0; i < host.size(); i++)
                EXPECT_EQ(i % 1024 < block.x * block.y * block.z ? 1 : 0, host[i]) << order << " " << i;
        }
}

struct Pair {
    float a;
    int b;
};

__global__ void shuffles(double* out) { // 64 threads, 8 values each
    int t = (int)threadIdx.x, lane = t % 32;
    double* o = out + 8 * t;
    o[0] = __shfl_sync(~0u, (double)t, 5);
    o[1] = (double)__shfl_up_sync(~0u, (long long)t << 33, 3, 16);
    o[2] = __shfl_down_sync(~0u, (unsigned char)t, 3, 8);
    Pair pair = {t + 0.5f, -t};
    pair = __shfl_xor_sync(~0u, pair, 17);
    o[3] = pair.a + 1000.0 * pair.b;
    o[4] = __ballot_sync(~0u, lane % 3 == 0);
    o[5] = __any_sync(~0u, lane == 31) + 2 * __all_sync(~0u, lane < 31) + 4 * __all_sync(~0u, 1);
    o[6] = __reduce_add_sync(~0u, -lane) + 10000.0 * __reduce_max_sync(~0u, (unsigned)lane);
    unsigned half = lane < 16 ? 0xffffu : 0xffff0000u; // two groups, each in its own time
    double s = lane;
    for (int i = 0; i < (lane < 16 ? 1 : 5); i++) s = __shfl_xor_sync(half, s, 1);
    o[7] = s + 100.0 * __match_any_sync(half, lane / 8);
}

TEST_F(Cpu, WarpOperations) {
    for (const char* order : {"fwd", "rev"}) {
        use("CUDA_CPU_SCHED", order);
        Device<double> out(8 * 64);
        OK(run(1, 64, 0, shuffles, out.data));
        for (int t = 0; t < 64; t++) {
            int lane = t % 32, warp = t / 32 * 32, x = warp + (lane ^ 17);
            EXPECT_EQ(warp + 5, out.at(8 * t));
            EXPECT_EQ((double)((long long)(lane % 16 >= 3 ? t - 3 : t) << 33), out.at(8 * t + 1));
            EXPECT_EQ(lane % 8 < 5 ? t + 3 : t, out.at(8 * t + 2));
            EXPECT_EQ(x + 0.5 - 1000.0 * x, out.at(8 * t + 3));
            EXPECT_EQ((double)0x49249249u, out.at(8 * t + 4));
            EXPECT_EQ(1 + 0 + 4, out.at(8 * t + 5));
            EXPECT_EQ(-496 + 310000.0, out.at(8 * t + 6));
            EXPECT_EQ((lane ^ 1) + 100.0 * (0xffu << lane / 8 * 8), out.at(8 * t + 7));
        }
    }
}

__global__ void early_exit(int* out) {
    if (threadIdx.x >= 40) return;
    int yes = __syncthreads_count(threadIdx.x < 7);
    int all = __syncthreads_and(threadIdx.x < 39), any = __syncthreads_or(threadIdx.x == 39);
    out[threadIdx.x] = yes + 100 * all + 1000 * any + 10000 * (int)__shfl_sync(~0u, (int)threadIdx.x, 0);
}

TEST_F(Cpu, EndedThreadsAreNotWaitedFor) {
    Device<int> out(40);
    OK(run(1, 96, 0, early_exit, out.data));
    EXPECT_EQ(7 + 1000, out.at(0));
    EXPECT_EQ(7 + 1000 + 320000, out.at(39));
}

__global__ void hang() {
    if (threadIdx.x == 3)
        __syncthreads();
    else
        __syncwarp();
}
__global__ void wrong_mask() { __shfl_sync(1u, 1.0f, 0); }
__global__ void deep(int* out, int depth) {
    volatile char frame[4096];
    frame[depth] = 1;
    if (depth) deep(out, depth - 1);
    *out = frame[depth];
}

TEST_F(Cpu, HangsAndOverflowsAreSaidInWords) {
    EXPECT_EXIT(run(1, 64, 0, hang), FATAL,
                "deadlock in block \\(0,0,0\\): 1 threads wait at __syncthreads, 31 in a warp "
                "operation.*0x00000008 have "
                "not come\\), 32 have ended");
    EXPECT_EXIT(run(1, 32, 0, wrong_mask), FATAL, "mask 0x00000001 lacks its own lane 1");
    Device<int> out(1);
    OK(run(1, 1, 0, deep, out.data, 5));
    EXPECT_EXIT(run(1, 1, 0, deep, out.data, 600), FAULT, FAULT_TEXT("stack.*CUDA_CPU_STACK"));
    use("CUDA_CPU_STACK", "8000000");
    std::thread([&] {
        run(1, 1, 0, deep, out.data, 600);
    }).join(); // a thread's first launch takes new stacks
    EXPECT_EQ(1, out.at(0));
}

__global__ void dynamic_shared(double* out, int n) {
    double* values = (double*)cudaCpuDynamicShared();
    if (threadIdx.x == 0) out[1] = values[n - 1]; // fresh: NaN
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) values[i] = i;
    __syncthreads();
    if (threadIdx.x == 0) out[0] = values[n - 1];
}

TEST_F(Cpu, DynamicSharedMemoryNeedsTheAttribute) {
    Device<double> out(2);
    for (int kb : {1, 48, 100, 227, 228}) {
        cudaLaunchConfig_t config = shape(2, 64, 0, (size_t)kb * 1024);
        cudaError_t attribute = cudaSuccess,
                    error = cudaLaunchKernelEx(&config, dynamic_shared, out.data, kb * 128);
        EXPECT_EQ(kb > 48 ? cudaErrorInvalidValue : cudaSuccess, error) << kb;
        if (kb > 48)
            attribute =
                cudaFuncSetAttribute(dynamic_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, kb * 1024);
        EXPECT_EQ(kb > 227 ? cudaErrorInvalidValue : cudaSuccess, attribute) << kb;
        if (kb > 227) continue;
        OK(cudaLaunchKernelEx(&config, dynamic_shared, out.data, kb * 128));
        EXPECT_EQ(kb * 128 - 1, out.at(0));
        EXPECT_TRUE(std::isnan(out.at(1)));
    }
    cudaGetLastError();
}

// ----------------------------------------------------------------------------
// launches and arithmetic

__global__ void nothing() {}

TEST_F(Cpu, LaunchRulesAreCudas) {
    const dim3 bad[][2] = {
        {dim3(0), dim3(1)},        {dim3(1, 0), dim3(1)},        {dim3(1), dim3(0)},
        {dim3(1), dim3(1025)},     {dim3(1), dim3(32, 33)},      {dim3(1), dim3(1, 1, 65)},
        {dim3(1, 65536), dim3(1)}, {dim3(1, 1, 65536), dim3(1)}, {dim3(0x80000000u), dim3(1)}};
    for (auto& b : bad) {
        EXPECT_EQ(cudaErrorInvalidConfiguration, run(b[0], b[1], 0, nothing));
        EXPECT_EQ(cudaErrorInvalidConfiguration, cudaPeekAtLastError());
        EXPECT_EQ(cudaErrorInvalidConfiguration, cudaGetLastError());
        EXPECT_EQ(cudaSuccess, cudaGetLastError());
    }
    EXPECT_EQ(cudaErrorInvalidDeviceFunction, run(1, 1, 0, (void (*)()) nullptr));
    EXPECT_EQ(cudaErrorInvalidResourceHandle, run(1, 1, (cudaStream_t)(intptr_t)64, nothing));
    EXPECT_STREQ("cudaErrorInvalidConfiguration", cudaGetErrorName(cudaErrorInvalidConfiguration));
    EXPECT_STREQ("invalid configuration argument", cudaGetErrorString(cudaErrorInvalidConfiguration));
}

__global__ void keep(double* out, float f, size_t n, const int* p) {
    out[0] = f, out[1] = (double)n, out[2] = p == nullptr;
}

TEST_F(Cpu, ArgumentsAreConvertedAndCopiedAtTheLaunch) {
    use("CUDA_CPU_STREAMS", "lazy");
    Device<double> out(3);
    int value = 7;
    cudaLaunchConfig_t config = shape(1, 1);
    OK(cudaLaunchKernelEx(&config, keep, out.data, value, value, nullptr));
    value = 9;
    EXPECT_EQ(7, out.at(0));
    EXPECT_EQ(7, out.at(1));
    EXPECT_EQ(1, out.at(2));
    double* data = out.data;
    float f = 2.5;
    size_t n = 3;
    const int* p = nullptr;
    void* arguments[] = {&data, &f, &n, &p};
    OK(cudaLaunchKernel(keep, dim3(1), dim3(1), arguments, 0, 0));
    EXPECT_EQ(2.5, out.at(0));
}

__global__ void arithmetic(float* out, float a, float b, float c) {
    out[0] = __fadd_rn(__fmul_rn(a, b), c);
    out[1] = __fmaf_rn(a, b, c);
    out[2] = 1e-30f * (b * 1e-15f); // denormal
    float4 v = __ldg((const float4*)(out + 4));
    __stcs((float4*)(out + 8), make_float4(v.w, v.z, v.y, v.x));
}

TEST_F(Cpu, NoContractionAndFlushToZeroOnlyOnRequest) {
    Device<float> out(12);
    float four[] = {1, 2, 3, 4};
    OK(cudaMemcpy(out.data + 4, four, sizeof(four), cudaMemcpyHostToDevice));
    float a = 1.0f + 0x1p-12f, c = -(1.0f + 0x1p-11f);
    for (bool flush : {false, true}) {
        cuda_cpu::Launch launch =
            cuda_cpu::make_launch<float*, float, float, float>(arithmetic, 1, 1, 0, out.data, a, a, c);
        launch.flush_denormals = flush; // what --use_fast_math does
        OK(cuda_cpu::launch("test", launch, 0, nullptr, 0));
        EXPECT_EQ(0.0f, out.at(0)); // a product rounded before the sum
        EXPECT_EQ(0x1p-24f, out.at(1));
        EXPECT_EQ(flush, out.at(2) == 0);
        EXPECT_EQ(4, out.at(8));
        EXPECT_EQ(1, out.at(11));
        volatile float small = 1e-38f;
        EXPECT_NE(0, small * 0.01f) << "the host keeps its denormals";
    }
}

__global__ void misaligned(char* p) {
    *(volatile int*)p = ((const float4*)(p + 4))->x > 0;
    *(float4*)(p + 20) = *(float4*)(p + 36);
}

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_UNDEFINED__)
TEST_F(Cpu, MisalignedVectorsFault) {
    Device<char> data(256);
    EXPECT_EXIT(run(1, 1, 0, misaligned, data.data), FATAL, "misaligned vector access");
}
#endif

__global__ void add_all(float* f, int* i, unsigned long long* u, __nv_bfloat16* h) {
    atomicAdd(f, 1), atomicAdd(u, 3ull), atomicMax(i, (int)threadIdx.x), atomicAdd(h, __float2bfloat16(1.0f));
    if (threadIdx.x == 5) atomicCAS(i + 1, 0, 8);
}

TEST_F(Cpu, Atomics) {
    Device<char> data(64);
    OK(cudaMemset(data.data, 0, 64));
    OK(run(2, 64, 0, add_all, (float*)data.data, (int*)(data.data + 4), (unsigned long long*)(data.data + 16),
           (__nv_bfloat16*)(data.data + 24)));
    char host[64];
    OK(cudaMemcpy(host, data.data, 64, cudaMemcpyDeviceToHost));
    EXPECT_EQ(128, *(float*)host);
    EXPECT_EQ(63, ((int*)host)[1]);
    EXPECT_EQ(8, ((int*)host)[2]);
    EXPECT_EQ(384u, *(unsigned long long*)(host + 16));
    EXPECT_EQ(128, __bfloat162float(*(__nv_bfloat16*)(host + 24)));
}
