/* dev/cpu/fibers.h - stacks for kernel threads, and the switch from one to another

   A fiber is a stack and a saved stack pointer. Switching saves what the ABI wants kept and nothing else;
   the floating-point control word is the same for all fibers of a launch. On x86-64 the switch is inline,
   so that calls and returns stay paired for the processor's return predictor; aarch64 has a function;
   others ucontext.
*/
#pragma once
#include <stddef.h>
#include <stdint.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace cuda_cpu {

struct Fiber {
    void* stack_pointer;
    char* bottom; // lowest usable address
    size_t bytes;
    void* asan_stack;
    Fiber* next;  // free list
    Fiber* older; // all of a host thread
#if !defined(__x86_64__) && !defined(__aarch64__)
    ucontext_t context;
#endif
};

Fiber* new_fiber(size_t stack_bytes); // runs fiber_body() when first switched to
void free_fibers();                   // all that this host thread made, and their stacks
void describe_host_stack(Fiber* host);
void check_stack(const Fiber* fiber); // fatal if its last word was overwritten
[[noreturn]] void stack_overflow(const Fiber* fiber);
void fiber_body(); // launch.cpp

#if defined(__x86_64__)
static inline __attribute__((always_inline)) void switch_stacks(Fiber* from, Fiber* to) {
    void** save = &from->stack_pointer;
    void* load = to->stack_pointer;
    __asm__ volatile("leaq -128(%%rsp), %%rsp\n\t" // keep off the red zone
                     "leaq 1f(%%rip), %%rax\n\t"
                     "pushq %%rax\n\t"
                     "pushq %%rbp\n\t"
                     "movq %%rsp, (%0)\n\t"
                     "movq %1, %%rsp\n\t"
                     "popq %%rbp\n\t"
                     "popq %%rax\n\t"
                     "jmpq *%%rax\n"
                     "1:\n\t"
                     "leaq 128(%%rsp), %%rsp\n\t"
                     : "+D"(save), "+S"(load)
                     :
                     : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15",
                       "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",
                       "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
}
#elif defined(__aarch64__)
extern "C" void cuda_cpu_switch_stacks(void** save, void* load);
static inline void switch_stacks(Fiber* from, Fiber* to) {
    cuda_cpu_switch_stacks(&from->stack_pointer, to->stack_pointer);
}
#else
static inline void switch_stacks(Fiber* from, Fiber* to) { swapcontext(&from->context, &to->context); }
#endif

static inline __attribute__((always_inline)) void switch_fiber(Fiber* from, Fiber* to) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&from->asan_stack, to->bottom, to->bytes);
#endif
    switch_stacks(from, to);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from->asan_stack, NULL, NULL);
#endif
}

} // namespace cuda_cpu
