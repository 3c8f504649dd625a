/* dev/cpu/barriers.cpp - __syncthreads and the operations of a warp */
#include "machine.h"
#include <sched.h>

namespace cuda_cpu {

void deadlock(const Machine& m) {
    unsigned barrier = 0, shuffles = 0, example = 0;
    for (unsigned w = 0; w < m.warps; w++) {
        barrier += (unsigned)__builtin_popcount(m.at_barrier[w]);
        if (m.at_warp[w]) example = w * 32 + (unsigned)__builtin_ctz(m.at_warp[w]);
        shuffles += (unsigned)__builtin_popcount(m.at_warp[w]);
    }
    if (!shuffles)
        fatal("deadlock in block (%u,%u,%u): %u threads wait at __syncthreads, %u have ended", blockIdx.x,
              blockIdx.y, blockIdx.z, barrier, m.done_count);
    const Lane& lane = m.lanes[example];
    fatal("deadlock in block (%u,%u,%u): %u threads wait at __syncthreads, %u in a warp operation (thread "
          "(%u,%u,%u) "
          "waits for the lanes of mask 0x%08x, of which 0x%08x have not come), %u have ended",
          blockIdx.x, blockIdx.y, blockIdx.z, barrier, shuffles, lane.index.x, lane.index.y, lane.index.z,
          lane.mask, lane.mask & ~m.at_warp[example / 32] & ~m.done[example / 32], m.done_count);
}

// ----------------------------------------------------------------------------
// barriers

void release_barrier(Machine& m) {
    for (unsigned w = 0; w < m.warps; w++) {
        m.pending[w] |= m.at_barrier[w];
        m.at_barrier[w] = 0;
    }
    m.barrier_result = m.barrier_yes;
    m.barrier_count = m.barrier_yes = 0;
    order_warps(m);
    m.restart = true;
}

int block_barrier(BlockOp op, int predicate) {
    Machine& m = *machine;
    if (!m.blocked) enter_blocked(m);
    uint32_t bit = 1u << m.thread % 32;
    unsigned warp = m.thread / 32;
    m.pending[warp] &= ~bit;
    m.at_barrier[warp] |= bit;
    m.barrier_count++;
    m.barrier_yes += op == BLOCK_AND ? predicate == 0 : predicate != 0; // AND counts the noes
    if (m.barrier_count + m.done_count == m.threads) release_barrier(m);
    wait_for_turn(m);
    int yes = m.barrier_result;
    return op == BLOCK_COUNT ? yes : op == BLOCK_AND ? yes == 0 : yes != 0;
}

// ----------------------------------------------------------------------------
// warp operations

static uint8_t source_lane(WarpOp op, int lane, int argument, int width) {
    int first = lane & ~(width - 1), last = first + width - 1, source = lane;
    if (op == WARP_SHUFFLE) source = first + (argument & (width - 1));
    if (op == WARP_UP && (int64_t)lane - (unsigned)argument >= first) source = lane - argument;
    if (op == WARP_DOWN && (int64_t)lane + (unsigned)argument <= last) source = lane + argument;
    if (op == WARP_XOR && (lane ^ argument) <= last && (lane ^ argument) >= 0) source = lane ^ argument;
    return (uint8_t)source;
}

static uint64_t combine(WarpOp op, uint64_t a, uint64_t b) {
    switch (op) {
    case WARP_ADD: return a + b;
    case WARP_MIN: return (uint32_t)a < (uint32_t)b ? a : b;
    case WARP_MAX: return (uint32_t)a > (uint32_t)b ? a : b;
    case WARP_MIN_SIGNED: return (int32_t)a < (int32_t)b ? a : b;
    case WARP_MAX_SIGNED: return (int32_t)a > (int32_t)b ? a : b;
    case WARP_AND: return a & b;
    case WARP_OR: return a | b;
    default: return a ^ b;
    }
}

/* All lanes of `group` wait with one mask: gives each its result. */
static void finish_operation(Machine& m, unsigned warp, uint32_t group, WarpOp op) {
    Lane* lanes = &m.lanes[warp * 32];
    if (op >= WARP_SHUFFLE && op <= WARP_XOR) {
        for (uint32_t left = group; left; left &= left - 1) {
            Lane& lane = lanes[__builtin_ctz(left)];
            lane.result = group >> lane.source & 1 ? lanes[lane.source].value : ~0ull; // not there: NaN
        }
    } else if (op != WARP_SYNC) {
        uint64_t all = 0;
        bool first = true;
        for (uint32_t left = group; left; left &= left - 1, first = false) {
            unsigned lane = (unsigned)__builtin_ctz(left);
            if (op == WARP_BALLOT)
                all |= lanes[lane].value << lane;
            else
                all = first ? lanes[lane].value : combine(op, all, lanes[lane].value);
        }
        for (uint32_t left = group; left; left &= left - 1) {
            Lane& lane = lanes[__builtin_ctz(left)];
            lane.result = op == WARP_BALLOT ? all | (uint64_t)group << 32 : all;
            if (op != WARP_MATCH) continue;
            lane.result = 0;
            for (uint32_t other = group; other; other &= other - 1)
                if (lanes[__builtin_ctz(other)].value == lane.value) lane.result |= other & -other;
        }
    }
    m.at_warp[warp] &= ~group;
    m.pending[warp] |= group;
}

/* Finishes the operation that the lanes of `mask` wait in, if all that live have come. */
static inline bool try_operation(Machine& m, unsigned warp, uint32_t mask) {
    uint32_t group = mask & ~m.done[warp];
    if (group & ~m.at_warp[warp]) return false;
    const Lane* lanes = &m.lanes[warp * 32];
    uint8_t op = lanes[__builtin_ctz(group)].op;
    for (uint32_t left = group; left; left &= left - 1) {
        const Lane& lane = lanes[__builtin_ctz(left)];
        if (lane.mask != mask) return false;
        if (lane.op != op)
            fatal("lanes of warp %u of block (%u,%u,%u) meet in different warp operations", warp, blockIdx.x,
                  blockIdx.y, blockIdx.z);
    }
    finish_operation(m, warp, group, (WarpOp)op);
    return true;
}

uint64_t warp_exchange(WarpOp op, unsigned mask, uint64_t value, int argument, int width) {
    Machine& m = *machine;
    if (!m.blocked) enter_blocked(m);
    unsigned thread = m.thread, warp = thread / 32, lane = thread % 32;
    uint32_t bit = 1u << lane;
    if (!(mask & bit))
        fatal("thread (%u,%u,%u) of block (%u,%u,%u) calls a warp operation whose mask 0x%08x lacks its own "
              "lane %u",
              threadIdx.x, threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z, mask, lane);
    Lane& self = m.lanes[thread];
    self.value = value;
    self.mask = mask;
    self.op = (uint8_t)op;
    self.source = source_lane(op, (int)lane, argument, width);
    m.pending[warp] &= ~bit;
    m.at_warp[warp] |= bit;
    if ((m.pending[warp] & mask) || !try_operation(m, warp, mask))
        wait_for_turn(m); // usually others still have to come
    return self.result;
}

unsigned live_lanes() {
    Machine& m = *machine;
    if (!m.blocked) enter_blocked(m);
    return ~m.done[m.thread / 32];
}

void spin_hint() { sched_yield(); }

void finish_waits_for(Machine& m, unsigned warp) {
    for (uint32_t left = m.at_warp[warp]; left; left &= left - 1)
        if (m.at_warp[warp] & left & -left)
            try_operation(m, warp, m.lanes[warp * 32 + __builtin_ctz(left)].mask);
}

} // namespace cuda_cpu
