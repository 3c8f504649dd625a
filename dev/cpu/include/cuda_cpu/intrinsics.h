/* dev/cpu/include/cuda_cpu/intrinsics.h - device math: rounded arithmetic, bits, conversions, cached loads

   The rounded forms are plain expressions, so that the compiler vectorises them; dev/cpu/nvcc compiles with
   -ffp-contract=off, so that a product and a sum stay two roundings as __fmul_rn and __fadd_rn promise.
   Directed roundings exist for conversions only. Approximate functions (__expf, ...) are the exact ones here.
*/
#ifndef CUDA_CPU_INTRINSICS_H
#define CUDA_CPU_INTRINSICS_H

#include <math.h>
#include <stdlib.h>
#include <time.h>

// ----------------------------------------------------------------------------
// rounded to nearest

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
static inline float __frsqrt_rn(float a) { return (float)(1.0 / __builtin_sqrt((double)a)); }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __drcp_rn(double a) { return 1.0 / a; }
static inline double __dsqrt_rn(double a) { return __builtin_sqrt(a); }
static inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }

// ----------------------------------------------------------------------------
// functions that C lacks, and the approximate ones; macros where glibc declares the name itself

static inline float rsqrtf(float a) { return 1.0f / __builtin_sqrtf(a); }
static inline double rsqrt(double a) { return 1.0 / __builtin_sqrt(a); }
static inline float fdividef(float a, float b) { return a / b; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __saturatef(float a) { return !(a > 0.0f) ? 0.0f : a > 1.0f ? 1.0f : a; }
static inline float __exp10f_(float a) { return powf(10.0f, a); }
static inline float sinpif(float a) { return (float)sin(M_PI * (double)a); }
static inline float cospif(float a) { return (float)cos(M_PI * (double)a); }
static inline void sincospif(float a, float* s, float* c) { *s = sinpif(a), *c = cospif(a); }
#define __expf(a) expf(a)
#define __exp10f(a) __exp10f_(a)
#define __logf(a) logf(a)
#define __log2f(a) log2f(a)
#define __log10f(a) log10f(a)
#define __powf(a, b) powf(a, b)
#define __sinf(a) sinf(a)
#define __cosf(a) cosf(a)
#define __tanf(a) tanf(a)
#define __sincosf(a, s, c) sincosf(a, s, c)

#ifndef __clang__
#define __builtin_assume(condition) ((condition) ? (void)0 : __builtin_unreachable())
#endif
#define __assume(condition) __builtin_assume(condition)

static inline long long clock64() {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}
static inline unsigned long long __globaltimer() { return (unsigned long long)clock64(); }

// ----------------------------------------------------------------------------
// bits

template <typename To, typename From> static inline To cuda_cpu_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "reinterpretation keeps the size");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}
static inline unsigned __float_as_uint(float a) { return cuda_cpu_bits<unsigned>(a); }
static inline int __float_as_int(float a) { return cuda_cpu_bits<int>(a); }
static inline float __uint_as_float(unsigned a) { return cuda_cpu_bits<float>(a); }
static inline float __int_as_float(int a) { return cuda_cpu_bits<float>(a); }
static inline long long __double_as_longlong(double a) { return cuda_cpu_bits<long long>(a); }
static inline double __longlong_as_double(long long a) { return cuda_cpu_bits<double>(a); }
static inline int __double2hiint(double a) { return (int)(__double_as_longlong(a) >> 32); }
static inline int __double2loint(double a) { return (int)__double_as_longlong(a); }
static inline double __hiloint2double(int hi, int lo) {
    return __longlong_as_double((long long)((unsigned long long)(unsigned)hi << 32 | (unsigned)lo));
}
static inline int __popc(unsigned a) { return __builtin_popcount(a); }
static inline int __popcll(unsigned long long a) { return __builtin_popcountll(a); }
static inline int __clz(int a) { return a ? __builtin_clz((unsigned)a) : 32; }
static inline int __clzll(long long a) { return a ? __builtin_clzll((unsigned long long)a) : 64; }
static inline int __ffs(int a) { return __builtin_ffs(a); }
static inline int __ffsll(long long a) { return __builtin_ffsll(a); }
static inline unsigned long long __brevll(unsigned long long a) {
    a = (a & 0x5555555555555555ull) << 1 | (a >> 1 & 0x5555555555555555ull);
    a = (a & 0x3333333333333333ull) << 2 | (a >> 2 & 0x3333333333333333ull);
    a = (a & 0x0f0f0f0f0f0f0f0full) << 4 | (a >> 4 & 0x0f0f0f0f0f0f0f0full);
    return __builtin_bswap64(a);
}
static inline unsigned __brev(unsigned a) { return (unsigned)(__brevll(a) >> 32); }
static inline unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)((unsigned long long)a * b >> 32);
}
static inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
__extension__ typedef unsigned __int128 cuda_cpu_u128;
__extension__ typedef __int128 cuda_cpu_i128;
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((cuda_cpu_u128)a * b >> 64);
}
static inline long long __mul64hi(long long a, long long b) {
    return (long long)((cuda_cpu_i128)a * b >> 64);
}
static inline int __mul24(int a, int b) { return (int)((unsigned)(a << 8 >> 8) * (unsigned)(b << 8 >> 8)); }
static inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffffu) * (b & 0xffffffu); }
static inline unsigned __sad(int a, int b, unsigned c) {
    return c + (unsigned)(a > b ? (long)a - b : (long)b - a);
}
static inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned shift) {
    return (unsigned)((((unsigned long long)hi << 32 | lo) << (shift & 31)) >> 32);
}
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned shift) {
    return (unsigned)(((unsigned long long)hi << 32 | lo) >> (shift & 31));
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned s = selector >> 4 * i & 15;
        unsigned byte = (unsigned)(bytes >> 8 * (s & 7)) & 255;
        result |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return result;
}

// ----------------------------------------------------------------------------
// conversions; out of range saturates and NaN gives 0, as on a GPU

template <typename To> static inline To cuda_cpu_saturate(double rounded, double low, double high) {
    if (rounded != rounded) return 0;
    if (rounded <= low) return (To)(long long)low;
    if (rounded >= high) return sizeof(To) == 8 ? (To)~0ull >> ((To)-1 < 0) : (To)high;
    return (To)rounded;
}
#define CUDA_CPU_CONVERT(suffix, round)                                               \
    static inline int __float2int_##suffix(float a) {                                 \
        return cuda_cpu_saturate<int>(round((double)a), -2147483648.0, 2147483647.0); \
    }                                                                                 \
    static inline int __double2int_##suffix(double a) {                               \
        return cuda_cpu_saturate<int>(round(a), -2147483648.0, 2147483647.0);         \
    }                                                                                 \
    static inline unsigned __float2uint_##suffix(float a) {                           \
        return cuda_cpu_saturate<unsigned>(round((double)a), 0.0, 4294967295.0);      \
    }                                                                                 \
    static inline unsigned __double2uint_##suffix(double a) {                         \
        return cuda_cpu_saturate<unsigned>(round(a), 0.0, 4294967295.0);              \
    }
CUDA_CPU_CONVERT(rn, nearbyint)
CUDA_CPU_CONVERT(rz, trunc)
CUDA_CPU_CONVERT(ru, ceil)
CUDA_CPU_CONVERT(rd, floor)
#undef CUDA_CPU_CONVERT
static inline float __int2float_rn(int a) { return (float)a; }
static inline float __uint2float_rn(unsigned a) { return (float)a; }
static inline float __ll2float_rn(long long a) { return (float)a; }
static inline float __ull2float_rn(unsigned long long a) { return (float)a; }
static inline float __double2float_rn(double a) { return (float)a; }
static inline double __int2double_rn(int a) { return a; }
static inline double __uint2double_rn(unsigned a) { return a; }
static inline double __ll2double_rn(long long a) { return (double)a; }
static inline double __ull2double_rn(unsigned long long a) { return (double)a; }

// ----------------------------------------------------------------------------
// loads and stores with a cache hint: plain ones here; the type's own alignment is relied on, as on a GPU

#define CUDA_CPU_LOAD(name) \
    template <typename T> static inline T name(const T* address) { return *address; }
#define CUDA_CPU_STORE(name)                                                                            \
    template <typename T> static inline void name(T* address, typename cuda_cpu::Same<T>::type value) { \
        *address = value;                                                                               \
    }
CUDA_CPU_LOAD(__ldg)
CUDA_CPU_LOAD(__ldcg)
CUDA_CPU_LOAD(__ldca)
CUDA_CPU_LOAD(__ldcs)
CUDA_CPU_LOAD(__ldlu)
CUDA_CPU_LOAD(__ldcv)
CUDA_CPU_STORE(__stwb)
CUDA_CPU_STORE(__stcg)
CUDA_CPU_STORE(__stcs)
CUDA_CPU_STORE(__stwt)
#undef CUDA_CPU_LOAD
#undef CUDA_CPU_STORE

// ----------------------------------------------------------------------------
// min and max, with CUDA's mixtures of types

#define CUDA_CPU_MINMAX(result, a_type, b_type)                                                            \
    static inline result min(a_type a, b_type b) { return (result)a < (result)b ? (result)a : (result)b; } \
    static inline result max(a_type a, b_type b) { return (result)a > (result)b ? (result)a : (result)b; }
#define CUDA_CPU_MINMAX_INTEGER(type)                            \
    CUDA_CPU_MINMAX(type, type, type)                            \
    CUDA_CPU_MINMAX(unsigned type, unsigned type, unsigned type) \
    CUDA_CPU_MINMAX(unsigned type, type, unsigned type)          \
    CUDA_CPU_MINMAX(unsigned type, unsigned type, type)
CUDA_CPU_MINMAX_INTEGER(int)
CUDA_CPU_MINMAX_INTEGER(long)
CUDA_CPU_MINMAX_INTEGER(long long)
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }
static inline double min(float a, double b) { return fmin((double)a, b); }
static inline double max(float a, double b) { return fmax((double)a, b); }
static inline double min(double a, float b) { return fmin(a, (double)b); }
static inline double max(double a, float b) { return fmax(a, (double)b); }
#undef CUDA_CPU_MINMAX_INTEGER
#undef CUDA_CPU_MINMAX

#endif
