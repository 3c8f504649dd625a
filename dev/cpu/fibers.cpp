/* dev/cpu/fibers.cpp - where the stacks of kernel threads come from

   Stacks are cut from slabs of 2 MB, one huge page each, with a guard page below the slab. A guard page
   between two stacks would split the huge page, so there a few known words stand, checked whenever a thread
   ends; a thread that is deep when it waits is seen at once. Tops are staggered, so that the frames of a
   warp's lanes do not fall into the same cache sets. Stacks are used again and live as long as their host
   thread.
*/
#include "fibers.h"
#include "internal.h"
#include <atomic>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

namespace cuda_cpu {

static const size_t PAGE = 4096, SLAB = (size_t)2 << 20;
static const uint64_t STACK_WORD = 0x5354414b454e4421ull;
static const int STACK_WORDS = 8;

static void fiber_start() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(NULL, NULL, NULL);
#endif
    fiber_body();
    abort(); // fiber_body never returns
}

#if defined(__aarch64__)
__asm__(".text\n.global cuda_cpu_switch_stacks\n.type cuda_cpu_switch_stacks, %function\n"
        "cuda_cpu_switch_stacks:\n"
        "  sub sp, sp, #160\n"
        "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
        "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
        "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n"
        "  stp d14, d15, [sp, #144]\n"
        "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
        "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
        "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
        "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n"
        "  ldp d14, d15, [sp, #144]\n"
        "  add sp, sp, #160\n  ret\n"
        ".size cuda_cpu_switch_stacks, .-cuda_cpu_switch_stacks\n");
#endif

static void prepare(Fiber* fiber, char* top) {
#if defined(__x86_64__)
    void** stack = (void**)((uintptr_t)top & ~(uintptr_t)15);
    *--stack = NULL; // fiber_start's return address: at its entry rsp is 8 below a multiple of 16
    *--stack = (void*)&fiber_start;
    *--stack = NULL; // rbp
    fiber->stack_pointer = stack;
#elif defined(__aarch64__)
    char* stack = (char*)((uintptr_t)top & ~(uintptr_t)15) - 160;
    memset(stack, 0, 160);
    *(void**)(stack + 88) = (void*)&fiber_start; // x30
    fiber->stack_pointer = stack;
#else
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->bottom;
    fiber->context.uc_stack.ss_size = (size_t)(top - fiber->bottom);
    fiber->context.uc_link = NULL;
    makecontext(&fiber->context, fiber_start, 0);
#endif
}

/* What a host thread has; `older` slabs are found through their record. */
struct Slab {
    char* base;
    size_t bytes;
    int place;
    Slab* older;
};
static thread_local Slab* slabs;
static thread_local Fiber* fibers;
static thread_local char *unused, *unused_end;

/* Starts of all slabs, for the fault handler, which reads without a lock. */
static const int SLABS = 4096;
static std::atomic<char*> slab_starts[SLABS];

static void new_slab(size_t bytes) {
    Slab* slab = (Slab*)calloc(1, sizeof(Slab));
    if (!slab) fatal("no host memory left");
    slab->bytes = bytes + 2 * SLAB;
    slab->base = (char*)mmap(NULL, slab->bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (slab->base == MAP_FAILED)
        fatal("no memory for the stacks of kernel threads (%zu bytes): %s", bytes, strerror(errno));
    unused =
        (char*)(((uintptr_t)slab->base + SLAB) & ~(uintptr_t)(SLAB - 1)); // leaves at least a page below it
    unused_end = unused + bytes;
    if (unused == slab->base) unused += SLAB, unused_end += SLAB;
    if (mprotect(unused - PAGE, PAGE, PROT_NONE)) fatal("mprotect: %s", strerror(errno));
    madvise(unused, bytes, MADV_HUGEPAGE);
    slab->older = slabs, slabs = slab;
    for (slab->place = 0; slab->place < SLABS; slab->place++) {
        char* none = NULL;
        if (slab_starts[slab->place].compare_exchange_strong(none, unused)) break;
    }
}

Fiber* new_fiber(size_t stack_bytes) {
    static thread_local unsigned count;
    size_t bytes = (stack_bytes + PAGE - 1) / PAGE * PAGE;
    if ((size_t)(unused_end - unused) < bytes) new_slab(bytes < SLAB ? SLAB / bytes * bytes : bytes);
    Fiber* fiber = (Fiber*)calloc(1, sizeof(Fiber));
    if (!fiber) fatal("no host memory left");
    fiber->bottom = unused;
    fiber->bytes = bytes;
    fiber->older = fibers, fibers = fiber;
    unused += bytes;
    for (int i = 0; i < STACK_WORDS; i++) ((uint64_t*)fiber->bottom)[i] = STACK_WORD;
    prepare(fiber, fiber->bottom + bytes - count++ % 32 * 192 % PAGE);
    return fiber;
}

void free_fibers() {
    while (Fiber* fiber = fibers) {
        fibers = fiber->older;
        free(fiber);
    }
    while (Slab* slab = slabs) {
        slabs = slab->older;
        if (slab->place < SLABS) slab_starts[slab->place] = NULL;
        munmap(slab->base, slab->bytes);
        free(slab);
    }
    unused = unused_end = NULL;
}

void describe_host_stack(Fiber* host) {
    pthread_attr_t attributes;
    void* bottom = NULL;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &bottom, &host->bytes);
    pthread_attr_destroy(&attributes);
    host->bottom = (char*)bottom;
}

void check_stack(const Fiber* fiber) {
    for (int i = 0; i < STACK_WORDS; i++)
        if (((const uint64_t*)fiber->bottom)[i] != STACK_WORD) stack_overflow(fiber);
}

void stack_overflow(const Fiber* fiber) {
    fatal("thread (%u,%u,%u) of block (%u,%u,%u) needs more than the %zu bytes of its stack; "
          "CUDA_CPU_STACK=bytes "
          "sets it",
          threadIdx.x, threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z, fiber->bytes);
}

bool in_stack_guard(const void* address) {
    for (int i = 0; i < SLABS; i++) {
        const char* start = slab_starts[i];
        if (start && (const char*)address < start && (const char*)address >= start - PAGE) return true;
    }
    return false;
}

} // namespace cuda_cpu
