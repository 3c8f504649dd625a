/* test/model.h - a small model on real ranks, for the unit tests of ZeroOptimizer: gradients and parameters are functions of the
   model index. */
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "../llmc_zero/llmc_zero.cuh"
#include "ranks.h"

// The upper half of a float's bits: exact for numbers that bf16 has, cut off for others.
static inline uint16_t upper_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)(bits >> 16);
}
static inline float from_upper_half(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// Segments of the given lengths, two to a unit; a model that may have fewer elements than ranks.
struct Model {
    ZeroLayout layout = {};
    ZeroOptimizer z = {};
    ZeroMemory memory = zero_memory();
    cudaStream_t stream = NULL;
    ZeroResult result;

    Model(const ZeroConfig& config, ZeroDtype dtype, std::vector<size_t> counts, size_t bucket_bytes,
          int units_apart) {
        std::vector<ZeroSegment> segments;
        ZeroLayoutConfig layout_config = zero_layout_config(world.ranks, dtype);
        for (size_t s = 0; s < counts.size(); s++)
            segments.push_back(zero_segment("tensor", counts[s], (int)(s / 2)));
        layout_config.bucket_bytes = bucket_bytes;
        layout_config.units_apart = units_apart || config.stage >= 2;
        result = zero_layout(&layout, segments.data(), (int)segments.size(), &layout_config);
        if (result.code == ZERO_OK) result = create(config);
    }
    ZeroResult create(const ZeroConfig& config) {
        if (!stream) ZERO_TRY_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        ZERO_TRY(zero_init(&z, &config, &layout, world.rank, world.comm, stream, &memory));
        ZERO_TRY(zero_alloc_params(&z, NULL));
        ZERO_TRY(zero_alloc_grads(&z, NULL));
        return zero_alloc_state(&z);
    }
    ~Model() {
        zero_free(&z);
        zero_layout_free(&layout);
        if (stream) cudaStreamDestroy(stream);
    }

    // writes or adds value(model index) to every element of a unit, as a caller's kernel would
    ZeroResult put(int unit, std::function<float(size_t)> value) {
        void* grads;
        int add;
        ZERO_TRY(zero_grads_acquire(&z, unit, &grads, &add));
        for (int s = 0; s < layout.segments_count; s++) {
            const ZeroSegment& segment = layout.segments[s];
            if (segment.unit != unit || segment.count == 0) continue;
            char* to = (char*)grads + zero_unit_offset(&layout, s) * zero_dtype_bytes(layout.dtype);
            std::vector<float> x(segment.count, 0.0f);
            if (add) ZERO_TRY(read(to, x));
            for (size_t i = 0; i < segment.count; i++) x[i] += value(segment.model_offset + i);
            ZERO_TRY(write(to, x));
        }
        return zero_ok();
    }
    ZeroResult give(int unit, std::function<float(size_t)> value) {
        ZERO_TRY(put(unit, value));
        return zero_grads_ready(&z, unit);
    }
    ZeroResult give_all(std::function<float(size_t)> value) {
        for (int unit = layout.units_count - 1; unit >= 0; unit--) ZERO_TRY(give(unit, value));
        return zero_ok();
    }
    ZeroResult step(std::function<float(size_t)> value, float* norm = NULL, double lr = 1.0) {
        ZERO_TRY(zero_begin(&z, 0, 1, 1.0));
        ZERO_TRY(give_all(value));
        ZERO_TRY(zero_grad_norm(&z, norm));
        return zero_update(&z, lr);
    }
    ZeroResult read(const void* from, std::vector<float>& x) {
        std::vector<uint16_t> halves(x.size());
        bool wide = layout.dtype == ZERO_FP32;
        ZERO_TRY_CUDA(cudaMemcpyAsync(wide ? (void*)x.data() : (void*)halves.data(), from,
                                      x.size() * zero_dtype_bytes(layout.dtype), cudaMemcpyDeviceToHost,
                                      stream));
        ZERO_TRY_CUDA(cudaStreamSynchronize(stream));
        if (!wide) std::transform(halves.begin(), halves.end(), x.begin(), from_upper_half);
        return zero_ok();
    }
    ZeroResult write(void* to, const std::vector<float>& x) {
        std::vector<uint16_t> halves(x.size());
        bool wide = layout.dtype == ZERO_FP32;
        std::transform(x.begin(), x.end(), halves.begin(), upper_half);
        ZERO_TRY_CUDA(cudaMemcpyAsync(to, wide ? (const void*)x.data() : (const void*)halves.data(),
                                      x.size() * zero_dtype_bytes(layout.dtype), cudaMemcpyHostToDevice,
                                      stream));
        ZERO_TRY_CUDA(cudaStreamSynchronize(stream));
        return zero_ok();
    }
    // all params in model order
    ZeroResult params(std::vector<float>* all) {
        void* at;
        int open = ZERO_NO_UNIT;
        all->clear();
        for (int s = 0; s < layout.segments_count; s++) {
            std::vector<float> x(layout.segments[s].count);
            if (x.empty()) continue;
            ZERO_TRY(zero_params_visit(&z, s, &open, &at));
            ZERO_TRY(read(at, x));
            all->insert(all->end(), x.begin(), x.end());
        }
        return zero_params_leave(&z, &open);
    }
};

static inline ZeroConfig sgd(int stage) {
    ZeroConfig config = zero_config();
    config.stage = stage;
    config.algorithm = ZERO_SGD;
    config.momentum = 0.0;
    return config;
}

struct Plan {
    std::vector<size_t> counts;
    size_t bucket_bytes;
    int units_apart;
};
static const std::vector<Plan> PLANS = {{{1}, 0, 0},
                                        {{2, 0, 1}, 0, 0},
                                        {{3, 70, 129, 0, 5, 1000}, 0, 0},
                                        {{3, 70, 129, 0, 5, 1000}, 1, 0},
                                        {{300, 1, 64, 64, 7}, 0, 1},
                                        {{5000, 33, 4097}, 2048, 1},
                                        {{5000, 33, 4097}, 2048, 0}};
