/* dev/cpu/faults.cpp - turns a segmentation fault in device memory or on a kernel's stack into a sentence

   Under AddressSanitizer its own report is better, and nothing is installed. It tells leaks apart by the library they are
   from, which must still be loaded at the end: plugins of Open MPI are never closed then.
*/
#include "internal.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace cuda_cpu {

#if defined(CUDA_CPU_ASAN)
void install_fault_handler() {}
void use_fault_stack() {}
extern "C" int dlclose(void*) { return 0; }
#else

static struct sigaction previous[2];

static void handle_fault(int number, siginfo_t* info, void*) {
    char where[160] = "", what[256];
    void* address = info->si_addr;
    bool kernel = kernel_running();
    if (kernel)
        snprintf(where, sizeof(where), "thread (%u,%u,%u) of block (%u,%u,%u) of a kernel", threadIdx.x,
                 threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z);
    else
        snprintf(where, sizeof(where), "host code");
    if (in_heap(address)) {
        describe_address(address, what, sizeof(what));
        fatal("%s touched device memory at %p: %s", where, address, what);
    }
    if (kernel && in_stack_guard(address))
        fatal("%s overflowed its stack; CUDA_CPU_STACK=bytes sets it", where);
    if (kernel && info->si_code != SEGV_MAPERR && info->si_code != SEGV_ACCERR)
        fatal("%s made a misaligned vector access (or used an address that cannot exist)", where);
    if (kernel) fatal("%s touched %p, which is no memory", where, address);
    sigaction(number, &previous[number == SIGBUS], NULL); // not ours: happens again under the old handler
}

/* A handler needs a stack of its own when a fiber's has overflowed; each host thread has one. */
void use_fault_stack() {
    struct FaultStack { // for the life of the thread: a fault can come at any time
        stack_t stack;
        FaultStack() {
            memset(&stack, 0, sizeof(stack));
            stack.ss_size = 64 << 10;
            stack.ss_sp = malloc(stack.ss_size);
            if (stack.ss_sp) sigaltstack(&stack, NULL);
        }
        ~FaultStack() {
            stack_t none;
            memset(&none, 0, sizeof(none));
            none.ss_flags = SS_DISABLE;
            sigaltstack(&none, NULL);
            free(stack.ss_sp);
        }
    };
    static thread_local FaultStack fault_stack;
    (void)fault_stack;
}

void install_fault_handler() {
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_sigaction = handle_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &previous[0]);
    sigaction(SIGBUS, &action, &previous[1]);
}
#endif

} // namespace cuda_cpu
