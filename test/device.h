/* test/device.h - what the tests of single kernels share: checks, bits of a float, device memory. */
#pragma once
#include <gtest/gtest.h>
#include <stdint.h>
#include <string.h>
#include <vector>

#include "llmc_zero/grad_norm.cuh"

namespace {

inline void ok(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }
inline void ok(const ZeroResult& r) { ASSERT_EQ(r.code, ZERO_OK) << r.text; }

inline uint32_t bits_of(float x) {
    uint32_t b;
    memcpy(&b, &x, 4);
    return b;
}

/* Device memory that frees itself. */
template <typename T> struct Device {
    T* at = NULL;
    size_t count;
    explicit Device(size_t n) : count(n) { ok(cudaMalloc((void**)&at, (n ? n : 1) * sizeof(T))); }
    explicit Device(const std::vector<T>& host) : Device(host.size()) { put(host); }
    Device(const Device&) = delete;
    ~Device() { cudaFree(at); }
    void put(const std::vector<T>& host) {
        ok(cudaMemcpy(at, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    std::vector<T> get() const {
        std::vector<T> host(count);
        ok(cudaMemcpy(host.data(), at, count * sizeof(T), cudaMemcpyDeviceToHost));
        return host;
    }
};

} // namespace
