/* dev/cpu/nccl_reduce.cpp - the arithmetic of the CPU build's NCCL.

   A ring reduction visits the ranks one after another and rounds the partial result to the data type at
   every hop; so does this: in[0] op in[1], rounded, op in[2], rounded, ... The caller chooses the order.
   ncclAvg is NCCL's: floating-point inputs are multiplied by 1/n in the data type before the sum (which
   biases a bf16 mean by +0.195% at n = 3), integers are divided after it.

   Blocks of 4,096 elements keep the partial result in the L1 cache, so every input is read once and the
   output written once. The loops are plain, for the compiler to vectorise.
*/
#include "nccl_world.h"
#include <string.h>
#include <type_traits>

#pragma GCC optimize("O3") // vectorise

namespace cuda_cpu {
namespace nccl {
namespace {

const size_t BLOCK = 4096;

struct Bf16 {
    uint16_t bits;
};
struct Half {
    _Float16 value;
};

/* What a stored type computes in, and how it gets there and back. */
template <class S> struct Traits {
    typedef S Compute;
    static inline Compute load(S x) { return x; }
    static inline S store(Compute x) { return x; }
};

template <> struct Traits<Bf16> {
    typedef float Compute;
    static inline float load(Bf16 x) {
        uint32_t u = (uint32_t)x.bits << 16;
        float f;
        memcpy(&f, &u, 4);
        return f;
    }
    static inline Bf16 store(float f) // to nearest, ties to even; every NaN becomes 0x7fff, as on a GPU
    {
        uint32_t u;
        memcpy(&u, &f, 4);
        uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
        return Bf16{(uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded)};
    }
};

template <> struct Traits<Half> {
    typedef float Compute;
    static inline float load(Half x) { return (float)x.value; }
    static inline Half store(float f) { return Half{(_Float16)f}; }
};

/* One step. Integers wrap around; a NaN loses against a number in min and max, as fminf and fmaxf have it. */
template <int OP, class C> inline C step(C a, C b) {
    if constexpr (std::is_integral<C>::value && (OP == ncclSum || OP == ncclAvg || OP == ncclProd)) {
        typedef typename std::make_unsigned<C>::type U;
        return OP == ncclProd ? (C)((uint64_t)(U)a * (U)b) : (C)((U)a + (U)b);
    } else if constexpr (OP == ncclSum || OP == ncclAvg) {
        return a + b;
    } else if constexpr (OP == ncclProd) {
        return a * b;
    } else if constexpr (OP == ncclMax) {
        return b > a || a != a ? b : a;
    } else {
        return b < a || a != a ? b : a;
    }
}

/* The arithmetic of one type and operation, a block at a time. */
template <class S, int OP, bool EXACT> struct Reducer {
    typedef Traits<S> T;
    typedef typename T::Compute C;
    static constexpr bool FLOATING = std::is_floating_point<C>::value;
    static constexpr bool NARROW = !std::is_same<S, C>::value;
    static constexpr bool PRE = OP == ncclAvg && FLOATING && !EXACT;
    static constexpr bool POST = OP == ncclAvg && !PRE;

    static inline C round(C x) { return NARROW && !EXACT ? T::load(T::store(x)) : x; }

    static inline C input(S x, C scale) { return PRE ? round(T::load(x) * scale) : T::load(x); }

    /* out may be an input itself (in place): element i depends on element i only, hence ivdep */
    static void block(S* out, const S* const* in, int inputs, size_t offset, size_t count, C scale) {
        const S *a = in[0] + offset, *b = in[1] + offset, *last = in[inputs - 1] + offset;
        S* o = out + offset;
        const C n = (C)inputs;
        if (inputs == 2) {
#pragma GCC ivdep
            for (size_t i = 0; i < count; i++) {
                C sum = step<OP, C>(input(a[i], scale), input(b[i], scale));
                o[i] = T::store(POST ? (C)(sum / n) : sum);
            }
            return;
        }
        C partial[BLOCK];
        for (size_t i = 0; i < count; i++)
            partial[i] = round(step<OP, C>(input(a[i], scale), input(b[i], scale)));
        for (int k = 2; k < inputs - 1; k++) {
            const S* x = in[k] + offset;
            for (size_t i = 0; i < count; i++)
                partial[i] = round(step<OP, C>(partial[i], input(x[i], scale)));
        }
#pragma GCC ivdep
        for (size_t i = 0; i < count; i++) {
            C sum = step<OP, C>(partial[i], input(last[i], scale));
            o[i] = T::store(POST ? (C)(sum / n) : sum);
        }
    }

    static void run(void* out, const void* const* in, int inputs, size_t count) {
        C scale = FLOATING ? T::load(T::store((C)1 / (C)inputs)) : (C)1;
        for (size_t i = 0; i < count; i += BLOCK)
            block((S*)out, (const S* const*)in, inputs, i, count - i < BLOCK ? count - i : BLOCK, scale);
    }
};

template <class S, bool EXACT>
void by_op(void* out, const void* const* in, int inputs, size_t count, int op) {
    switch (op) {
    case ncclSum: Reducer<S, ncclSum, EXACT>::run(out, in, inputs, count); break;
    case ncclProd: Reducer<S, ncclProd, EXACT>::run(out, in, inputs, count); break;
    case ncclMax: Reducer<S, ncclMax, EXACT>::run(out, in, inputs, count); break;
    case ncclMin: Reducer<S, ncclMin, EXACT>::run(out, in, inputs, count); break;
    default: Reducer<S, ncclAvg, EXACT>::run(out, in, inputs, count); break;
    }
}

template <class S>
bool by_mode(void* out, const void* const* in, int inputs, size_t count, int op, bool exact) {
    exact ? by_op<S, true>(out, in, inputs, count, op) : by_op<S, false>(out, in, inputs, count, op);
    return true;
}

} // namespace

bool can_reduce(int type) { return type >= 0 && type <= ncclBfloat16; }

bool reduce(void* out, const void* const* in, int inputs, size_t count, int type, int op, bool exact) {
    switch (type) {
    case ncclInt8: return by_mode<int8_t>(out, in, inputs, count, op, exact);
    case ncclUint8: return by_mode<uint8_t>(out, in, inputs, count, op, exact);
    case ncclInt32: return by_mode<int32_t>(out, in, inputs, count, op, exact);
    case ncclUint32: return by_mode<uint32_t>(out, in, inputs, count, op, exact);
    case ncclInt64: return by_mode<int64_t>(out, in, inputs, count, op, exact);
    case ncclUint64: return by_mode<uint64_t>(out, in, inputs, count, op, exact);
    case ncclFloat16: return by_mode<Half>(out, in, inputs, count, op, exact);
    case ncclFloat32: return by_mode<float>(out, in, inputs, count, op, exact);
    case ncclFloat64: return by_mode<double>(out, in, inputs, count, op, exact);
    case ncclBfloat16: return by_mode<Bf16>(out, in, inputs, count, op, exact);
    default: return false;
    }
}

} // namespace nccl
} // namespace cuda_cpu
