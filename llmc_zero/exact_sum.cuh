/* llmc_zero/exact_sum.cuh - sums of doubles that do not depend on the order of adding.

   A sum is ZERO_EXACT_WORDS integers: word i counts multiples of 2^(32 i - 320), so a double falls into at most three words,
   32 bits of it into each (Kulisch's accumulator, with room for carries above each 32 bits). Integers may be added in any
   order, by any number of threads, blocks and ranks, word by word: the sum is the same to the bit, and rounded once, when
   it is read. What lies below 2^-320 of a double is cut off; 2^319 and above, inf and NaN are not taken.

       uint64_t words[ZERO_EXACT_WORDS] = {0};
       int taken = zero_exact_add(words, value);            // zero_exact_add_shared: with atomics
       zero_exact_carry(words);                              // once in 2^31 numbers, and before ranks add theirs up
       double sum = zero_exact_value(words);                 // to nearest, ties to even

   defines: ZERO_EXACT_WORDS, zero_exact_add, zero_exact_add_shared, zero_exact_carry, zero_exact_value
*/
#ifndef LLMC_ZERO_EXACT_SUM_CUH_INCLUDED
#define LLMC_ZERO_EXACT_SUM_CUH_INCLUDED

#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "check.cuh"

#define ZERO_EXACT_WORDS 20
#define ZERO_EXACT_LOWEST (-320) /* word 0 counts multiples of 2^-320 */

/* Calls add(word, amount) for the words that a number falls into; a negative one takes off. 0: not taken. */
template <typename Add>
static __host__ __device__ __forceinline__ int zero_exact_split(double value, const Add& add) {
    const uint64_t one = 1;
    uint64_t bits, mantissa, low, high, sign;
    int exponent, position, shift;
    memcpy(&bits, &value, sizeof(bits));
    exponent = (int)(bits >> 52 & 0x7ff);
    position = exponent - 1075 - ZERO_EXACT_LOWEST; /* of the mantissa's lowest bit, above word 0's */
    sign = 0 - (bits >> 63);                        /* all ones, or 0 */
    mantissa = (bits & ((one << 52) - 1)) | (one << 52);
    if (exponent >= 1023 + 319) return 0;
    if (position <= -53) return 1; /* zero and denormal numbers, too */
    if (position < 0) mantissa >>= -position;
    if (position < 0) position = 0;
    shift = position % 32;
    low = mantissa << shift;
    high = shift > 11 ? mantissa >> (64 - shift) : 0; /* 53 bits and 11 fit */
    add(position / 32, ((low & 0xffffffffu) ^ sign) - sign);
    add(position / 32 + 1, ((low >> 32) ^ sign) - sign);
    if (high) add(position / 32 + 2, (high ^ sign) - sign);
    return 1;
}

/* Adds a number; the words are the caller's alone. Returns 0, and adds nothing, if it is not finite or 2^319 or above. */
static __host__ __device__ __forceinline__ int zero_exact_add(uint64_t* words, double value) {
    return zero_exact_split(value, [words](int word, uint64_t amount) { words[word] += amount; });
}

/* The same where other threads add, too: words in shared or global memory. */
static __device__ __forceinline__ int zero_exact_add_shared(uint64_t* words, double value) {
    return zero_exact_split(value, [words](int word, uint64_t amount) {
        atomicAdd((unsigned long long*)&words[word], (unsigned long long)amount);
    });
}

/* The same sum with less than 2^32 in each word but the last, which has the sign. */
static __host__ __device__ __forceinline__ void zero_exact_carry(uint64_t* words) {
    int64_t carry = 0;
    for (int i = 0; i < ZERO_EXACT_WORDS - 1; i++) {
        carry += (int64_t)words[i];
        words[i] = (uint64_t)carry & 0xffffffffu;
        carry >>= 32; /* of negative numbers: down, as everywhere */
    }
    words[ZERO_EXACT_WORDS - 1] += (uint64_t)carry;
}

/* The sum as the nearest double, of two as near the even one. */
static __host__ __device__ __forceinline__ double zero_exact_value(const uint64_t* sum) {
    uint64_t words[ZERO_EXACT_WORDS], top = 0, below = 0;
    int negative, i, bits = 0;
    for (i = 0; i < ZERO_EXACT_WORDS; i++) words[i] = sum[i];
    zero_exact_carry(words);
    negative = (int64_t)words[ZERO_EXACT_WORDS - 1] < 0;
    for (i = 0; negative && i < ZERO_EXACT_WORDS; i++) words[i] = 0 - words[i];
    if (negative) zero_exact_carry(words);
    /* the first 64 bits from the highest on, and whether any follow */
    for (i = ZERO_EXACT_WORDS - 1; i >= 0 && words[i] == 0; i--) {
    }
    if (i < 0) return 0.0;
    for (top = words[i]; bits < 64 && top >> bits; bits++) {
    }
    int exponent = 32 * i + ZERO_EXACT_LOWEST + bits - 64; /* of the lowest of the 64 */
    for (i--; i >= 0 && bits < 64; i--) {
        const int take = 64 - bits < 32 ? 64 - bits : 32;
        top = top << take | words[i] >> (32 - take);
        below |= words[i] & ((1ull << (32 - take)) - 1);
        bits += take;
    }
    if (bits < 64) top <<= 64 - bits;
    for (; i >= 0; i--) below |= words[i];
    const uint64_t half = 1024, rest = top & 2047; /* 64 - 53 = 11 bits */
    top >>= 11;
    if (rest > half || (rest == half && (below || (top & 1)))) top++;
    return ldexp(negative ? -(double)top : (double)top, exponent + 11);
}

#endif /* LLMC_ZERO_EXACT_SUM_CUH_INCLUDED */
