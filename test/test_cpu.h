// test/test_cpu.h - what the tests of the CPU build of CUDA share
//
// Modes are switched inside the process: use() sets a variable, and cudaDeviceReset() reads it.
#pragma once
#include "../dev/cpu/runtime.h"
#include <gtest/gtest.h>
#include <cstdlib>
#include <string>
#include <vector>

#define OK(call) ASSERT_EQ(cudaSuccess, (call))
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define FAULT ::testing::ExitedWithCode(1) // its own report
#define FAULT_TEXT(text) "AddressSanitizer"
#else
#define FAULT ::testing::ExitedWithCode(99)
#define FAULT_TEXT(text) text
#endif
#define FATAL ::testing::ExitedWithCode(99)

static const char* const VARIABLES[] = {"CUDA_CPU_STREAMS",     "CUDA_CPU_SCHED",  "CUDA_CPU_DROP_WAIT",
                                        "CUDA_CPU_FAIL",        "CUDA_CPU_MEMORY", "CUDA_CPU_DEVICES",
                                        "CUDA_VISIBLE_DEVICES", "CUDA_CPU_STACK"};

static inline void use(const char* name, const std::string& value) {
    setenv(name, value.c_str(), 1);
    cudaDeviceReset();
}

class Cpu : public ::testing::Test {
  protected:
    void SetUp() override {
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_set_report_fd((void*)2); // where death tests read, whatever ASAN_OPTIONS says
#endif
        for (const char* name : VARIABLES) unsetenv(name);
        cudaDeviceReset();
    }
    void TearDown() override {
        SetUp();
        EXPECT_EQ(live_before, cudaCpuLiveBytes()) << "the test leaks device memory";
    }
    size_t live_before = cudaCpuLiveBytes();
};

template <typename T> struct Device { // n elements, freed at the end of the scope
    T* data = nullptr;
    explicit Device(size_t n) { EXPECT_EQ(cudaSuccess, cudaMalloc(&data, n * sizeof(T))); }
    ~Device() { cudaFree(data); }
    T at(size_t i) const {
        T value;
        EXPECT_EQ(cudaSuccess, cudaMemcpy(&value, data + i, sizeof(T), cudaMemcpyDeviceToHost));
        return value;
    }
};

static inline cudaLaunchConfig_t shape(dim3 grid, dim3 block, cudaStream_t stream = 0,
                                       size_t shared_bytes = 0) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = block, config.stream = stream,
    config.dynamicSmemBytes = shared_bytes;
    return config;
}

template <typename... P, typename... A>
static cudaError_t run(dim3 grid, dim3 block, cudaStream_t stream, void (*kernel)(P...), A... arguments) {
    cudaLaunchConfig_t config = shape(grid, block, stream);
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}
