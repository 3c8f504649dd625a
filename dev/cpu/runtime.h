/* dev/cpu/runtime.h - what the parts of the CPU build of CUDA tell each other (runtime.cpp implements it).

   Not for users of CUDA: those include cuda_runtime.h as on a GPU. nccl.cpp and cublaslt.cpp include this.
*/
#pragma once
#include <cuda_runtime.h>
#include <functional>
#include <stddef.h>

namespace cuda_cpu {

/* Puts `work` at the end of a stream. When it runs depends on CUDA_CPU_STREAMS; in eager mode it runs inside
   this call. What `work` returns, if not cudaSuccess, stays with the stream: it is returned by this call if the
   work ran inside it, and by every later call that waits for the stream. `name` is for messages (a literal). */
cudaError_t enqueue(cudaStream_t stream, const char* name, std::function<cudaError_t()> work);

/* What comes next on `stream` runs after what is on `earlier` now. NCCL's own order between streams: neither an
   event nor a wait of the application, so that no wait site (CUDA_CPU_DROP_WAIT) counts it. */
cudaError_t order_after(cudaStream_t stream, cudaStream_t earlier);

/* All device memory of a process is one memfd, mapped once: heap_base + offset. Peers on the same machine open
   /proc/PID/fd/FD and read it in place. */
struct Heap {
    int fd;
    char* base;
    size_t bytes;
};
Heap heap();

/* True if [pointer, pointer + bytes) lies in one live device allocation. If not, `text` says which rule is
   broken, with the numbers (not device memory; freed; N bytes from offset K in an allocation of M bytes). */
bool in_device_memory(const void* pointer, size_t bytes, char* text, size_t text_bytes);

/* CUDA_CPU_FAIL=name:n - true when this is the n-th call (from 1) of the named function in this process, which
   must then return its error. Each public entry point asks once at its start, with its own name. */
bool fail_now(const char* name);

/* A fault that a GPU would punish with a hang or with wrong numbers: prints one line "cuda-cpu: ..." to stderr
   and ends the process with exit code 99. */
[[noreturn]] void fatal(const char* format, ...) __attribute__((format(printf, 1, 2)));

/* CUDA_CPU_TIMEOUT: seconds after which a collective gives up on a peer (default 60). */
double timeout_seconds();

/* CUDA_CPU_NCCL_DEATH=silent: a collective whose peer does not come spins for ever and tells nobody. */
bool silent_deaths();

/* Said by work on a stream, true and later false: it waits for another process, perhaps for ever. Meanwhile calls
   that enqueue do not wait for what they enqueue, in no mode. */
void work_spins(bool spins);

} // namespace cuda_cpu
