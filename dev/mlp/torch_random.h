/* dev/mlp/torch_random.h - the numbers that PyTorch draws on a CPU, so that our first step can be held against its.

   Source: mt19937 (Matsumoto and Nishimura 1998); PyTorch's documented uniform_ (24 random bits) and normal_ (blocks
   of 16, Box-Muller; a length that is no multiple of 16 redraws its last 16; fewer than 16 one by one in double).

   defines: TorchRandom, torch_seed, torch_uniform, torch_normal, torch_linear
*/
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>

typedef struct TorchRandom {
    uint32_t state[624];
    int next; /* of the 624 */
    int has_spare;
    double spare; /* second half of the last one-by-one normal */
} TorchRandom;

static inline void torch_seed(TorchRandom* random, uint32_t seed) {
    int i;
    random->state[0] = seed;
    for (i = 1; i < 624; i++)
        random->state[i] = 1812433253u * (random->state[i - 1] ^ (random->state[i - 1] >> 30)) + (uint32_t)i;
    random->next = 624;
    random->has_spare = 0;
}

static inline void torch_refill(TorchRandom* random) {
    uint32_t* s = random->state;
    int i;
    for (i = 0; i < 624; i++) {
        uint32_t y = (s[i] & 0x80000000u) | (s[(i + 1) % 624] & 0x7fffffffu);
        s[i] = s[(i + 397) % 624] ^ (y >> 1) ^ (y & 1u ? 0x9908b0dfu : 0u);
    }
    random->next = 0;
}

static inline uint32_t torch_bits(TorchRandom* random) {
    uint32_t y;
    if (random->next == 624) torch_refill(random);
    y = random->state[random->next++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

/* [0, 1) from 24 bits */
static inline float torch_uniform_unit(TorchRandom* random) {
    return (float)(torch_bits(random) & 0xffffffu) * (1.0f / 16777216.0f);
}

/* [0, 1) from 53 bits */
static inline double torch_uniform_double(TorchRandom* random) {
    uint64_t high = torch_bits(random);
    uint64_t bits = (high << 32) | torch_bits(random);
    return (double)(bits & 0x1fffffffffffffull) * (1.0 / 9007199254740992.0);
}

/* uniform(-bound, bound) */
static inline void torch_uniform(TorchRandom* random, float* x, size_t count, double bound) {
    const float from = (float)-bound, to = (float)bound;
    for (size_t i = 0; i < count; i++)
        x[i] = fmaf(torch_uniform_unit(random), to - from, from); /* one rounding, as PyTorch's build does */
}

/* 16 uniforms to 16 normals, in place */
static inline void torch_normal_16(float* x) {
    const float two_pi = 6.2831853071795864f;
    for (int j = 0; j < 8; j++) {
        const float radius = sqrtf(-2.0f * logf(1.0f - x[j])), angle = two_pi * x[j + 8];
        x[j] = radius * cosf(angle);
        x[j + 8] = radius * sinf(angle);
    }
}

static inline float torch_normal_single(TorchRandom* random) {
    double angle, radius;
    if (random->has_spare) {
        random->has_spare = 0;
        return (float)random->spare;
    }
    angle = 6.283185307179586 * torch_uniform_double(random);
    radius = sqrt(-2.0 * log1p(-torch_uniform_double(random)));
    random->spare = radius * sin(angle);
    random->has_spare = 1;
    return (float)(radius * cos(angle));
}

/* randn */
static inline void torch_normal(TorchRandom* random, float* x, size_t count) {
    size_t i;
    if (count < 16) {
        for (i = 0; i < count; i++) x[i] = torch_normal_single(random);
        return;
    }
    for (i = 0; i < count; i++) x[i] = torch_uniform_unit(random);
    for (i = 0; i + 16 <= count; i += 16) torch_normal_16(x + i);
    if (count % 16 == 0) return;
    for (i = count - 16; i < count; i++) x[i] = torch_uniform_unit(random);
    torch_normal_16(x + count - 16);
}

/* The bound of nn.Linear's initial weights and biases. */
static inline double torch_linear_bound(size_t fan_in) { return 1.0 / sqrt((double)fan_in); }
