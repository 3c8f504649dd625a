/* dev/cpu/machine.h - the state of a running block, and the switch to its next thread

   Invariants of a blocked block: a live thread is in exactly one of pending, at_barrier, at_warp of its
   warp (the running one is pending); done holds ended threads and lanes beyond the block's end; a thread
   without a fiber has not started.
*/
#pragma once
#include "fibers.h"
#include "internal.h"

namespace cuda_cpu {

struct Lane {
    Fiber* fiber; // where it waits; NULL: not started
    uint64_t value, result;
    uint32_t mask;
    uint8_t op, source;
    uint3 index; // threadIdx
};

/* One per host thread that launches. */
struct Machine {
    Fiber host; // the host thread's own stack
    Fiber* current;
    Fiber* free;
    const Launch* launch;
    uint64_t launch_id;
    unsigned threads, warps;
    unsigned run_end;     // plain calls: threads up to here belong to the running loop
    unsigned thread;      // blocked: the running thread
    bool blocked, linear; // linear: a 1-D block in forward order
    bool backwards;       // the blocks, from the last to the first
    uint8_t order[32];    // of warps
    unsigned position;    // in order
    bool restart;         // after a barrier: look for work from position 0
    unsigned barrier_count, done_count;
    int barrier_yes, barrier_result;
    uint32_t exists[32], pending[32], done[32], at_barrier[32], at_warp[32];
    uint64_t random;
    dim3 indexed; // the block shape that lanes[].index holds
    char* shared;
    size_t shared_bytes;
    Lane lanes[1024];
};
extern thread_local Machine* machine __attribute__((tls_model("initial-exec")));

// launch.cpp
void order_warps(Machine& m);
void enter_blocked(Machine& m); // from the loop of calls to fibers, at the first wait of a block
bool next_block(Machine& m);
bool rest(Machine& m, unsigned next);
const unsigned NO_THREAD = 1024;

// barriers.cpp
[[noreturn]] void deadlock(const Machine& m);
void release_barrier(Machine& m);
void finish_waits_for(Machine& m, unsigned warp); // a lane of it has ended

/* The next thread that can run: this warp's following lanes, then the following warps. NO_THREAD: none. */
inline unsigned pick(Machine& m) {
    unsigned warp = m.thread / 32, lane = m.thread % 32;
    if (!m.restart) {
        uint32_t pending = m.pending[warp];
        if (pending) {
            uint32_t later = pending & ~((2u << lane) - 1);
            return warp * 32 + (unsigned)__builtin_ctz(later ? later : pending);
        }
    } else {
        m.position = m.warps - 1; // so that the search begins at 0
        m.restart = false;
    }
    for (unsigned i = 0; i < m.warps; i++) {
        if (++m.position >= m.warps) m.position = 0;
        warp = m.order[m.position];
        if (m.pending[warp]) return warp * 32 + (unsigned)__builtin_ctz(m.pending[warp]);
    }
    return NO_THREAD;
}

/* Continues with `next` on its fiber; returns when something switches back to the calling fiber. */
inline void go(Machine& m, unsigned next) {
    Fiber* self = m.current;
    m.thread = next;
    threadIdx = m.lanes[next].index;
    Fiber* fiber = m.lanes[next].fiber;
    if (!fiber) {
        fiber = m.free ? m.free : new_fiber(options().stack_bytes);
        m.free = fiber->next;
    }
    m.current = fiber;
    switch_fiber(self, fiber);
}

inline void wait_for_turn(Machine& m) {
    unsigned self = m.thread, next = pick(m);
    if (next == self) return;
    if (next == NO_THREAD) deadlock(m);
    m.lanes[self].fiber = m.current;
    if (__builtin_expect((char*)__builtin_frame_address(0) < m.current->bottom + 2048, 0))
        stack_overflow(m.current);
    go(m, next);
}

} // namespace cuda_cpu
