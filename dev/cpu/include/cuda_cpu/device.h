/* dev/cpu/include/cuda_cpu/device.h - threads, blocks, shared memory, barriers, warps, atomics

   Barriers and warp operations are calls into dev/cpu/barriers.cpp, which switches to another thread of the
   block. __shared__ variables are static thread_local: blocks run one after another, and one host thread's
   launch does not see another's.
*/
#ifndef CUDA_CPU_DEVICE_H
#define CUDA_CPU_DEVICE_H

#include <stdint.h>
#include <string.h>

/* Attributes that mean nothing on a CPU. */
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __maxnreg__
#define __maxnreg__(...)
#undef __cluster_dims__
#define __cluster_dims__(...)
#undef __block_size__
#define __block_size__(...)
#undef __inline_hint__
#define __inline_hint__
#undef __grid_constant__
#define __grid_constant__
#undef __shared__
#define __shared__ static thread_local

/* __thread and not thread_local: no initialisation, so no check at each access. */
extern __thread uint3 threadIdx;
extern __thread uint3 blockIdx;
extern __thread dim3 blockDim;
extern __thread dim3 gridDim;
constexpr int warpSize = 32;

namespace cuda_cpu {

enum WarpOp {
    WARP_SYNC,
    WARP_SHUFFLE,
    WARP_UP,
    WARP_DOWN,
    WARP_XOR,
    WARP_BALLOT,
    WARP_MATCH,
    WARP_ADD,
    WARP_MIN,
    WARP_MAX,
    WARP_MIN_SIGNED,
    WARP_MAX_SIGNED,
    WARP_AND,
    WARP_OR,
    WARP_XOR_BITS
};
enum BlockOp { BLOCK_COUNT, BLOCK_AND, BLOCK_OR };

/* Waits until every live lane of `mask` has called with the same mask and operation; returns this lane's
   result. */
uint64_t warp_exchange(WarpOp op, unsigned mask, uint64_t value, int argument, int width);
int block_barrier(BlockOp op, int predicate);
unsigned live_lanes();
void spin_hint();

template <typename T> inline T shuffle(WarpOp op, unsigned mask, T value, int argument, int width) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle moves at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, (const void*)&value, sizeof(T));
    bits = warp_exchange(op, mask, bits, argument, width);
    memcpy((void*)&value, &bits, sizeof(T));
    return value;
}

template <typename T> struct Same { typedef T type; };
template <size_t bytes> struct Bits;
template <> struct Bits<2> { typedef uint16_t type; };
template <> struct Bits<4> { typedef uint32_t type; };
template <> struct Bits<8> { typedef uint64_t type; };

/* The one loop behind all atomics: replaces *address by update(old) and returns old. */
template <typename T, typename Update> inline T atomic_update(T* address, Update update) {
    typedef typename Bits<sizeof(T)>::type Word;
    Word old_bits = __atomic_load_n((Word*)address, __ATOMIC_RELAXED), new_bits;
    T old;
    do {
        memcpy((void*)&old, &old_bits, sizeof(T));
        T value = update(old);
        memcpy(&new_bits, (const void*)&value, sizeof(T));
    } while (!__atomic_compare_exchange_n((Word*)address, &old_bits, new_bits, true, __ATOMIC_SEQ_CST,
                                          __ATOMIC_RELAXED));
    return old;
}

} // namespace cuda_cpu

// ----------------------------------------------------------------------------
// barriers and fences

static inline void __syncthreads() { cuda_cpu::block_barrier(cuda_cpu::BLOCK_COUNT, 0); }
static inline int __syncthreads_count(int p) { return cuda_cpu::block_barrier(cuda_cpu::BLOCK_COUNT, p); }
static inline int __syncthreads_and(int p) { return cuda_cpu::block_barrier(cuda_cpu::BLOCK_AND, p); }
static inline int __syncthreads_or(int p) { return cuda_cpu::block_barrier(cuda_cpu::BLOCK_OR, p); }
static inline void __syncwarp(unsigned mask = 0xffffffffu) {
    cuda_cpu::warp_exchange(cuda_cpu::WARP_SYNC, mask, 0, 0, 32);
}
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __nanosleep(unsigned) { cuda_cpu::spin_hint(); }
static inline unsigned __activemask() { return cuda_cpu::live_lanes(); }
#define __trap() __builtin_trap()

// ----------------------------------------------------------------------------
// warps

template <typename T> inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    return cuda_cpu::shuffle(cuda_cpu::WARP_SHUFFLE, mask, value, lane, width);
}
template <typename T> inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return cuda_cpu::shuffle(cuda_cpu::WARP_UP, mask, value, (int)delta, width);
}
template <typename T> inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return cuda_cpu::shuffle(cuda_cpu::WARP_DOWN, mask, value, (int)delta, width);
}
template <typename T> inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
    return cuda_cpu::shuffle(cuda_cpu::WARP_XOR, mask, value, lane_mask, width);
}

/* The low half of a ballot is the lanes that said yes, the high half those that took part. */
static inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return (unsigned)cuda_cpu::warp_exchange(cuda_cpu::WARP_BALLOT, mask, predicate != 0, 0, 32);
}
static inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
static inline int __all_sync(unsigned mask, int predicate) {
    uint64_t both = cuda_cpu::warp_exchange(cuda_cpu::WARP_BALLOT, mask, predicate != 0, 0, 32);
    return (unsigned)both == (unsigned)(both >> 32);
}
template <typename T> inline unsigned __match_any_sync(unsigned mask, T value) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    return (unsigned)cuda_cpu::warp_exchange(cuda_cpu::WARP_MATCH, mask, bits, 0, 32);
}
#define CUDA_CPU_REDUCE(type, name, op)                                                            \
    static inline type name(unsigned mask, type value) {                                           \
        return (type)cuda_cpu::warp_exchange(cuda_cpu::op, mask, (uint64_t)(int64_t)value, 0, 32); \
    }
CUDA_CPU_REDUCE(unsigned, __reduce_add_sync, WARP_ADD)
CUDA_CPU_REDUCE(int, __reduce_add_sync, WARP_ADD)
CUDA_CPU_REDUCE(unsigned, __reduce_min_sync, WARP_MIN)
CUDA_CPU_REDUCE(int, __reduce_min_sync, WARP_MIN_SIGNED)
CUDA_CPU_REDUCE(unsigned, __reduce_max_sync, WARP_MAX)
CUDA_CPU_REDUCE(int, __reduce_max_sync, WARP_MAX_SIGNED)
CUDA_CPU_REDUCE(unsigned, __reduce_and_sync, WARP_AND)
CUDA_CPU_REDUCE(unsigned, __reduce_or_sync, WARP_OR)
CUDA_CPU_REDUCE(unsigned, __reduce_xor_sync, WARP_XOR_BITS)
#undef CUDA_CPU_REDUCE

// ----------------------------------------------------------------------------
// atomics: the type is that of the address, the value converts to it, as with CUDA's overloads

#define CUDA_CPU_ATOMIC(name, expression)                                                              \
    template <typename T> inline T name(T* address, typename cuda_cpu::Same<T>::type value) {          \
        return cuda_cpu::atomic_update(address, [value](T old) -> T { return expression; });           \
    }                                                                                                  \
    template <typename T> inline T name##_block(T* address, typename cuda_cpu::Same<T>::type value) {  \
        return name(address, value);                                                                   \
    }                                                                                                  \
    template <typename T> inline T name##_system(T* address, typename cuda_cpu::Same<T>::type value) { \
        return name(address, value);                                                                   \
    }
CUDA_CPU_ATOMIC(atomicAdd, (T)(old + value))
CUDA_CPU_ATOMIC(atomicSub, (T)(old - value))
CUDA_CPU_ATOMIC(atomicExch, ((void)old, value))
CUDA_CPU_ATOMIC(atomicMin, value < old ? value : old)
CUDA_CPU_ATOMIC(atomicMax, value > old ? value : old)
CUDA_CPU_ATOMIC(atomicInc, old >= value ? T(0) : T(old + 1))
CUDA_CPU_ATOMIC(atomicDec, (old == 0 || old > value) ? value : T(old - 1))
CUDA_CPU_ATOMIC(atomicAnd, old& value)
CUDA_CPU_ATOMIC(atomicOr, old | value)
CUDA_CPU_ATOMIC(atomicXor, old ^ value)
#undef CUDA_CPU_ATOMIC

/* Compares bits, as the hardware does. */
template <typename T>
inline T atomicCAS(T* address, typename cuda_cpu::Same<T>::type compare,
                   typename cuda_cpu::Same<T>::type value) {
    return cuda_cpu::atomic_update(address, [compare, value](T old) -> T {
        return memcmp(&old, &compare, sizeof(T)) == 0 ? value : old;
    });
}

#endif
