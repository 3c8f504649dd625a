/* dev/cpu/launch.cpp - runs a kernel: blocks one after another, the threads of a block as calls or as fibers

   All threads of a block start as plain calls in a loop on one fiber (Call::run in cuda_cpu/launch.h). The
   first one that has to wait (barrier, shuffle) keeps that fiber; from then on the block is "blocked": each
   waiting thread owns the fiber it waits on, a fiber whose thread has ended takes the next thread that has
   not started, and control goes straight from fiber to fiber, lanes of a warp first. fibers.cpp has the
   stacks and the switch.
*/
#include "machine.h"
#include <memory>
#include <stdio.h>
#include <stdlib.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

__thread uint3 threadIdx;
__thread uint3 blockIdx;
__thread dim3 blockDim;
__thread dim3 gridDim;
__thread unsigned cuda_cpu_last_x;

namespace cuda_cpu {

thread_local Machine* machine;

struct ReleaseAtThreadEnd {
    ~ReleaseAtThreadEnd() {
        free_fibers();
        free(machine->shared);
        free(machine);
        machine = NULL;
    }
};

static bool thread_ended(Machine& m);

static Machine& this_machine() {
    if (!machine) {
        machine = (Machine*)calloc(1, sizeof(Machine));
        if (!machine) fatal("no host memory left");
        describe_host_stack(&machine->host);
        use_fault_stack();
        static thread_local ReleaseAtThreadEnd release_at_thread_end;
    }
    return *machine;
}

// ----------------------------------------------------------------------------
// order

static uint3 thread_index(unsigned thread) {
    uint3 index;
    index.x = thread % blockDim.x;
    index.y = thread / blockDim.x % blockDim.y;
    index.z = thread / blockDim.x / blockDim.y;
    return index;
}

void order_warps(Machine& m) {
    WarpOrder order = options().order;
    for (unsigned i = 0; i < m.warps; i++)
        m.order[i] = (uint8_t)(order == ORDER_REVERSE ? m.warps - 1 - i : i);
    if (order != ORDER_RANDOM) return;
    for (unsigned i = m.warps; i > 1; i--) { // Fisher-Yates with splitmix64
        uint64_t z = (m.random += 0x9e3779b97f4a7c15ull);
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        unsigned j = (unsigned)((z ^ z >> 31) % i);
        uint8_t swap = m.order[i - 1];
        m.order[i - 1] = m.order[j], m.order[j] = swap;
    }
}

/* Plain calls: begins a run of threads that differ in x only, inside a warp unless the order is forward. */
static void start_run(Machine& m, unsigned thread) {
    unsigned limit = m.linear || options().order == ORDER_FORWARD ? m.threads : (thread | 31) + 1;
    if (limit > m.threads) limit = m.threads;
    threadIdx = thread_index(thread);
    unsigned row_end = thread + (blockDim.x - threadIdx.x);
    m.run_end = row_end < limit ? row_end : limit;
    cuda_cpu_last_x = threadIdx.x + (m.run_end - thread) - 1;
}

static bool next_run(Machine& m) {
    if (m.run_end == m.threads && (m.linear || options().order == ORDER_FORWARD)) return false;
    bool warp_ended = m.run_end % 32 == 0 || m.run_end == m.threads;
    if (options().order == ORDER_FORWARD || !warp_ended) {
        start_run(m, m.run_end);
        return true;
    }
    if (++m.position == m.warps) return false;
    start_run(m, m.order[m.position] * 32u);
    return true;
}

static void begin_block(Machine& m) {
    m.blocked = false;
    m.position = 0;
    if (!m.linear) order_warps(m);
    if (m.shared_bytes) memset(m.shared, 0xff, m.shared_bytes); // as undefined as on a GPU
    start_run(m, m.linear ? 0 : m.order[0] * 32u);
}

/* CUDA_CPU_SCHED=rev: the blocks too, so that one that reads what an earlier block wrote shows. */
static bool previous_block(Machine& m) {
    if (blockIdx.x-- == 0) {
        blockIdx.x = gridDim.x - 1;
        if (blockIdx.y-- == 0) {
            blockIdx.y = gridDim.y - 1;
            if (blockIdx.z-- == 0) return rest(m, NO_THREAD);
        }
    }
    begin_block(m);
    return true;
}

bool next_block(Machine& m) {
    if (m.backwards) return previous_block(m);
    if (++blockIdx.x == gridDim.x) {
        blockIdx.x = 0;
        if (++blockIdx.y == gridDim.y) {
            blockIdx.y = 0;
            if (++blockIdx.z == gridDim.z) return rest(m, NO_THREAD);
        }
    }
    begin_block(m);
    return true;
}

bool next_thread() {
    Machine& m = *machine;
    if (m.blocked) return thread_ended(m);
    return next_run(m) || next_block(m);
}

// ----------------------------------------------------------------------------
// blocked blocks

void enter_blocked(Machine& m) {
    unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    cuda_cpu_last_x = 0;
    m.blocked = true;
    m.restart = false;
    m.thread = thread;
    m.barrier_count = m.barrier_yes = 0;
    m.done_count = 0;
    if (m.indexed.x != blockDim.x || m.indexed.y != blockDim.y || m.indexed.z < blockDim.z) {
        for (unsigned i = 0; i < m.threads; i++) m.lanes[i].index = thread_index(i);
        m.indexed = blockDim;
    }
    if (m.linear) order_warps(m), m.position = thread / 32;
    for (unsigned i = 0; i < m.threads; i++) m.lanes[i].fiber = NULL;
    for (unsigned i = 0; i < m.warps; i++) {
        unsigned warp = m.order[i];
        unsigned lanes = m.threads - warp * 32 < 32 ? m.threads - warp * 32 : 32;
        uint32_t exists = lanes == 32 ? ~0u : (1u << lanes) - 1;
        uint32_t ended = i < m.position ? exists : i > m.position ? 0 : (1u << thread % 32) - 1;
        m.exists[warp] = exists;
        m.done[warp] = ended | ~exists;
        m.pending[warp] = exists & ~ended;
        m.at_barrier[warp] = m.at_warp[warp] = 0;
        m.done_count += (unsigned)__builtin_popcount(ended);
    }
}

/* A fiber without a thread: waits in the free list; true if it got another thread of the same launch. */
bool rest(Machine& m, unsigned next) {
    uint64_t launch_id = m.launch_id;
    check_stack(m.current);
    Fiber* self = m.current;
    if (next != NO_THREAD) { // the next thread has a fiber of its own
        self->next = m.free, m.free = self;
        go(m, next);
    } else { // the launch is over
        self->next = m.free, m.free = self;
        m.current = &m.host;
        switch_fiber(self, &m.host);
    }
    return m.launch_id == launch_id;
}

/* The body of every fiber: runs the kernel loop of whatever launch is on. */
void fiber_body() {
    for (;;) machine->launch->run(machine->launch->call);
}

static bool thread_ended(Machine& m) {
    unsigned warp = m.thread / 32;
    uint32_t bit = 1u << m.thread % 32;
    m.pending[warp] &= ~bit;
    m.done[warp] |= bit;
    m.done_count++;
    if (m.done_count == m.threads) return next_block(m);
    // Whoever waited for this thread waits no longer: ended threads are not waited for.
    finish_waits_for(m, warp);
    if (m.barrier_count && m.barrier_count + m.done_count == m.threads) release_barrier(m);
    unsigned next = pick(m);
    if (next == NO_THREAD) deadlock(m);
    if (m.lanes[next].fiber) return rest(m, next);
    m.thread = next;
    threadIdx = m.lanes[next].index;
    return true;
}

// ----------------------------------------------------------------------------
// a launch

struct FlushDenormals { // nvcc's -ftz=true, for the time of a kernel
#if defined(__x86_64__)
    unsigned old;
    explicit FlushDenormals(bool on) : old(_mm_getcsr()) { _mm_setcsr(on ? old | 0x8040 : old & ~0x8040u); }
    ~FlushDenormals() { _mm_setcsr(old); }
#elif defined(__aarch64__)
    uint64_t old;
    explicit FlushDenormals(bool on) {
        __asm__ volatile("mrs %0, fpcr" : "=r"(old));
        uint64_t wanted = on ? old | 1u << 24 : old & ~(1ull << 24);
        __asm__ volatile("msr fpcr, %0" ::"r"(wanted));
    }
    ~FlushDenormals() { __asm__ volatile("msr fpcr, %0" ::"r"(old)); }
#else
    explicit FlushDenormals(bool) {}
#endif
};

void run_launch(const Launch& launch) {
    Machine& m = this_machine();
    if (m.current && m.current != &m.host) fatal("a kernel cannot launch a kernel here");
    m.launch = &launch;
    m.launch_id++;
    gridDim = launch.grid, blockDim = launch.block;
    m.backwards = options().order == ORDER_REVERSE;
    blockIdx = m.backwards ? uint3{gridDim.x - 1, gridDim.y - 1, gridDim.z - 1} : uint3{0, 0, 0};
    m.threads = blockDim.x * blockDim.y * blockDim.z;
    m.warps = (m.threads + 31) / 32;
    m.linear = options().order == ORDER_FORWARD && blockDim.x == m.threads;
    m.random = options().order_seed;
    if (m.shared_bytes < launch.shared_bytes || !m.shared) {
        free(m.shared);
        m.shared = (char*)aligned_alloc(128, (launch.shared_bytes + 255) / 128 * 128);
    }
    m.shared_bytes = launch.shared_bytes;
    if (!m.free) m.free = new_fiber(options().stack_bytes);
    Fiber* fiber = m.free;
    m.free = fiber->next;
    FlushDenormals flush(launch.flush_denormals);
    begin_block(m);
    m.current = fiber;
    switch_fiber(&m.host, fiber);
}

/* The rules of CUDA's launch, in its order of errors. */
static cudaError_t check_launch(const Launch& l, const cudaLaunchAttribute* attributes,
                                unsigned attribute_count) {
    if (!l.function) return cudaErrorInvalidDeviceFunction;
    if (!l.grid.x || !l.grid.y || !l.grid.z || !l.block.x || !l.block.y || !l.block.z)
        return cudaErrorInvalidConfiguration;
    if (l.grid.x > 0x7fffffffu || l.grid.y > 65535 || l.grid.z > 65535) return cudaErrorInvalidConfiguration;
    if (l.block.x > 1024 || l.block.y > 1024 || l.block.z > 64 ||
        (uint64_t)l.block.x * l.block.y * l.block.z > 1024)
        return cudaErrorInvalidConfiguration;
    for (unsigned i = 0; i < attribute_count; i++) {
        const cudaLaunchAttribute& a = attributes[i];
        if (a.id == cudaLaunchAttributeCooperative && a.val.cooperative) return cudaErrorNotSupported;
        if (a.id == cudaLaunchAttributeClusterDimension &&
            a.val.clusterDim.x * a.val.clusterDim.y * a.val.clusterDim.z > 1)
            return cudaErrorNotSupported;
    }
    return function_shared_limit(l.function, l.shared_bytes);
}

cudaError_t launch(const char* entry, const Launch& launch, cudaStream_t stream,
                   const cudaLaunchAttribute* attributes, unsigned attribute_count) {
    std::shared_ptr<const void> call(launch.call, launch.destroy);
    if (fail_now(entry)) return set_error(cudaErrorUnknown);
    cudaError_t error = check_launch(launch, attributes, attribute_count);
    if (error != cudaSuccess) return set_error(error);
    return enqueue(stream, "kernel", [launch, call] { return run_launch(launch), cudaSuccess; });
}

bool kernel_running() { return machine && machine->current && machine->current != &machine->host; }

} // namespace cuda_cpu

extern "C" void* cudaCpuDynamicShared(void) { return cuda_cpu::machine->shared; }
