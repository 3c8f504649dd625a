/* test/test_exact_sum.cu - llmc_zero/exact_sum.cuh against sums in 128-bit integers and by hand, in any order. */
#include <algorithm>
#include <gtest/gtest.h>
#include <math.h>
#include <random>
#include <vector>

#include "device.h"
#include "llmc_zero/exact_sum.cuh"

namespace {

typedef std::vector<double> Doubles;

struct Sum {
    uint64_t words[ZERO_EXACT_WORDS] = {};
    int taken = 0;
    explicit Sum(const Doubles& numbers = {}) {
        for (double x : numbers) taken += zero_exact_add(words, x);
    }
    double value() const { return zero_exact_value(words); }
};

/* The nearest double of a sum of numbers that are multiples of 2^-1000 + 60 bits: by adding exactly, as the classic
   algorithm does (Shewchuk 1997, Python's fsum): a list of doubles without overlap, rounded once at the end. */
double fsum(const Doubles& numbers) {
    Doubles parts;
    for (double x : numbers) {
        size_t kept = 0;
        for (double y : parts) {
            if (fabs(x) < fabs(y)) std::swap(x, y);
            const double high = x + y, low = y - (high - x);
            if (low != 0.0) parts[kept++] = low;
            x = high;
        }
        parts.resize(kept);
        parts.push_back(x);
    }
    double high = 0.0, low = 0.0;
    while (!parts.empty()) {
        const double x = high, y = parts.back();
        parts.pop_back();
        high = x + y;
        low = y - (high - x);
        if (low != 0.0) break;
    }
    /* half way between two doubles: what is left decides */
    if (!parts.empty() && ((low < 0.0 && parts.back() < 0.0) || (low > 0.0 && parts.back() > 0.0))) {
        const double twice = 2.0 * low, x = high + twice;
        if (twice == x - high) high = x;
    }
    return high;
}

Doubles random_numbers(size_t count, int exponents, bool negative, unsigned seed) {
    std::mt19937_64 random(seed);
    Doubles numbers(count);
    for (double& x : numbers) {
        x = ldexp((double)(random() >> 11), (int)(random() % (unsigned)exponents) - exponents / 2 - 53);
        if (negative && random() % 2) x = -x;
    }
    return numbers;
}

TEST(ExactSum, OneNumberComesBack) {
    for (double x : {0.0, 1.0, -1.0, 0.1, -1e-17, 3.5e38, 1e-45, ldexp(1.0, 318), -ldexp(1.0, 318),
                     ldexp(1.0, -320), 0x1.fffffffffffffp318, 0x1.fffffffffffffp-268, 0x1.123456789abcdp31,
                     0x1.123456789abcdp32, 0x1.123456789abcdp33, 0x1.fffffffffffffp20})
        EXPECT_EQ(Sum({x}).value(), x) << x;
    for (int e = -268; e < 319; e++) {
        const double x = ldexp(0x1.fedcba9876543p0, e);
        ASSERT_EQ(Sum({x}).value(), x) << e;
        ASSERT_EQ(Sum({-x}).value(), -x) << e;
    }
}

TEST(ExactSum, WhatIsNotTaken) {
    for (double x : {(double)INFINITY, -(double)INFINITY, (double)NAN, ldexp(1.0, 319), -1e300}) {
        Sum sum({2.0, x});
        EXPECT_EQ(sum.taken, 1) << x;
        EXPECT_EQ(sum.value(), 2.0) << x;
    }
    for (double x : {1e-310, ldexp(1.0, -321), -ldexp(1.0, -400), 5e-324}) { /* below the lowest bit */
        EXPECT_EQ(Sum({x}).taken, 1) << x;
        EXPECT_EQ(Sum({x}).value(), 0.0) << x;
    }
    EXPECT_EQ(Sum({ldexp(3.0, -321)}).value(), ldexp(1.0, -320)); /* cut off, on either side of zero */
    EXPECT_EQ(Sum({-ldexp(3.0, -321)}).value(), -ldexp(1.0, -320));
}

TEST(ExactSum, RoundsOnceToNearestEven) {
    const double ulp = ldexp(1.0, -52);
    EXPECT_EQ(Sum({1.0, ulp / 2}).value(), 1.0);
    EXPECT_EQ(Sum({1.0, ulp, ulp / 2}).value(), 1.0 + 2 * ulp);
    EXPECT_EQ(Sum({1.0, ulp / 2, 1e-90}).value(), 1.0 + ulp);
    EXPECT_EQ(Sum({1.0, ulp / 2, -1e-90}).value(), 1.0);
    EXPECT_EQ(Sum({-1.0, -ulp / 2, -1e-90}).value(), -1.0 - ulp);
    EXPECT_EQ(Sum({2.0 - ulp, ulp / 2}).value(), 2.0); /* up, into the next power of two */
    EXPECT_EQ(Sum({1e17, 1.0, -1e17}).value(), 1.0);
    EXPECT_EQ(Sum({1e90, 1.0, -1e90, 1e-60}).value(), 1.0);
    EXPECT_EQ(Sum({1.0, -1.0}).value(), 0.0);
}

TEST(ExactSum, AgreesWithFsumInAnyOrder) {
    for (int exponents : {1, 10, 60, 200, 500})
        for (bool negative : {false, true}) {
            Doubles numbers = random_numbers(3000, exponents, negative, 7u + (unsigned)exponents);
            const double expected = fsum(numbers);
            const Sum first(numbers);
            EXPECT_EQ(first.value(), expected) << exponents << " " << negative;
            std::mt19937 random(3);
            for (int i = 0; i < 3; i++) {
                std::shuffle(numbers.begin(), numbers.end(), random);
                Sum again(numbers);
                EXPECT_EQ(memcmp(again.words, first.words, sizeof(first.words)), 0);
            }
        }
}

TEST(ExactSum, PartsAddUpAsTheWhole) {
    const Doubles numbers = random_numbers(1000, 300, true, 5);
    Sum whole(numbers), parts[7], total;
    for (size_t i = 0; i < numbers.size(); i++) zero_exact_add(parts[i * i % 7].words, numbers[i]);
    for (Sum& part : parts) {
        zero_exact_carry(part.words);
        for (int i = 0; i < ZERO_EXACT_WORDS - 1; i++) EXPECT_LT(part.words[i], 1ull << 32);
        for (int i = 0; i < ZERO_EXACT_WORDS; i++) total.words[i] += part.words[i];
    }
    EXPECT_EQ(total.value(), whole.value());
    zero_exact_carry(total.words);
    zero_exact_carry(whole.words);
    EXPECT_EQ(memcmp(total.words, whole.words, sizeof(whole.words)), 0);
}

/* More numbers than 32 bits hold above a word's 32: a word overflows only after 2^32 of them. */
TEST(ExactSum, ManyCarries) {
    Sum sum;
    const double x = 0x1.fffffffffffffp0;
    zero_exact_add(sum.words, x);
    const Sum one = sum;
    for (uint64_t& word : sum.words) word *= (1ull << 31);
    EXPECT_EQ(sum.value(), ldexp(x, 31));
    zero_exact_carry(sum.words);
    for (int i = 0; i < ZERO_EXACT_WORDS; i++) sum.words[i] += one.words[i];
    EXPECT_EQ(sum.value(), fsum({ldexp(x, 31), x}));
}

template <typename Number> __global__ void add_all(const Number* numbers, size_t count, uint64_t* words) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) zero_exact_add_shared(words, numbers[i]);
}

TEST(ExactSum, ManyThreadsAdd) {
    const Doubles numbers = random_numbers(5000, 100, true, 9);
    Device<double> given(numbers);
    Device<uint64_t> words(std::vector<uint64_t>(ZERO_EXACT_WORDS, 0));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(40), config.blockDim = dim3(128);
    ok(cudaLaunchKernelEx(&config, add_all<double>, (const double*)given.at, numbers.size(), words.at));
    ok(cudaDeviceSynchronize());
    EXPECT_EQ(zero_exact_value(words.get().data()), fsum(numbers));
}

} // namespace
