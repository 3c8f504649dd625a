/* dev/cpu/include/cuda_cpu/launch.h - typed launches and the templates that only nvcc's headers give

   A launch copies its arguments, converted to the kernel's parameter types, and hands the runtime one
   function that runs thread after thread. A thread that never waits costs one indirect call.
*/
#ifndef CUDA_CPU_LAUNCH_H
#define CUDA_CPU_LAUNCH_H

#include <tuple>
#include <utility>

extern __thread unsigned cuda_cpu_last_x; /* up to this threadIdx.x the next thread is the next x; 0: ask */

namespace cuda_cpu {

struct Launch {
    dim3 grid, block;
    size_t shared_bytes;
    const void* function;
    bool flush_denormals;          /* nvcc's -ftz=true, part of --use_fast_math */
    void (*run)(const void* call); /* calls the kernel for thread after thread */
    void (*destroy)(const void* call);
    const void* call; /* kernel and arguments */
};

/* Checks the configuration as CUDA does, then enqueues; destroys the call when it has run, or failed.
   `entry` is the public name, for CUDA_CPU_FAIL. */
cudaError_t launch(const char* entry, const Launch& launch, cudaStream_t stream,
                   const cudaLaunchAttribute* attributes, unsigned attribute_count);

bool next_thread(); /* decides what this stack runs next, sets threadIdx; false: nothing of this launch */

#if defined(CUDA_CPU_FAST_MATH) || defined(CUDA_CPU_FTZ)
constexpr bool flush_denormals = true;
#else
constexpr bool flush_denormals = false;
#endif

template <bool Flush, typename... P> struct Call { /* Flush only keeps builds with other flags apart */
    void (*kernel)(P...);
    std::tuple<P...> arguments;

    template <size_t... I> static void run_with(const Call* call, std::index_sequence<I...>) {
        void (*kernel)(P...) = call->kernel;
        do {
            unsigned x = threadIdx.x; /* in a register: no waiting for the last store */
            for (;;) {
                kernel(std::get<I>(call->arguments)...);
                if (x >= cuda_cpu_last_x) break;
                threadIdx.x = ++x;
            }
        } while (next_thread());
    }
    static void run(const void* call) { run_with((const Call*)call, std::index_sequence_for<P...>()); }
    static void destroy(const void* call) { delete (const Call*)call; }
};

template <typename... P>
inline Launch make_launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, P... arguments) {
    typedef Call<flush_denormals, P...> TypedCall;
    Launch launch = {grid,
                     block,
                     shared_bytes,
                     (const void*)kernel,
                     flush_denormals,
                     &TypedCall::run,
                     &TypedCall::destroy,
                     nullptr};
    launch.call = new TypedCall{kernel, std::tuple<P...>(std::move(arguments)...)};
    return launch;
}

template <typename... P, size_t... I>
inline Launch unpack_launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes,
                            void** arguments, std::index_sequence<I...>) {
    (void)arguments; /* unused without parameters */
    return make_launch<P...>(kernel, grid, block, shared_bytes,
                             *(typename std::remove_cv<P>::type*)arguments[I]...);
}

} // namespace cuda_cpu

template <typename... ExpTypes, typename... ActTypes>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(ExpTypes...),
                                             ActTypes&&... args) {
    return cuda_cpu::launch("cudaLaunchKernelEx",
                            cuda_cpu::make_launch<ExpTypes...>(kernel, config->gridDim, config->blockDim,
                                                               config->dynamicSmemBytes,
                                                               std::forward<ActTypes>(args)...),
                            config->stream, config->attrs, config->numAttrs);
}

template <typename... P>
static inline cudaError_t cudaLaunchKernel(void (*kernel)(P...), dim3 grid, dim3 block, void** args,
                                           size_t shared_bytes = 0, cudaStream_t stream = 0) {
    return cuda_cpu::launch(
        "cudaLaunchKernel",
        cuda_cpu::unpack_launch(kernel, grid, block, shared_bytes, args, std::index_sequence_for<P...>()),
        stream, nullptr, 0);
}

template <typename... P>
static inline cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, void (*kernel)(P...),
                                              void** args) {
    return cuda_cpu::launch("cudaLaunchKernelExC",
                            cuda_cpu::unpack_launch(kernel, config->gridDim, config->blockDim,
                                                    config->dynamicSmemBytes, args,
                                                    std::index_sequence_for<P...>()),
                            config->stream, config->attrs, config->numAttrs);
}

// ----------------------------------------------------------------------------
// templates that the toolkit's header hides without __CUDACC__

template <typename T>
static inline cudaError_t cudaFuncSetAttribute(T* function, cudaFuncAttribute attr, int value) {
    return ::cudaFuncSetAttribute((const void*)function, attr, value);
}
template <typename T> static inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attr, T* function) {
    return ::cudaFuncGetAttributes(attr, (const void*)function);
}
template <typename T> static inline cudaError_t cudaFuncSetCacheConfig(T* function, cudaFuncCache config) {
    return ::cudaFuncSetCacheConfig((const void*)function, config);
}
template <typename T>
static inline cudaError_t cudaMemcpyToSymbol(const T& symbol, const void* src, size_t count,
                                             size_t offset = 0,
                                             cudaMemcpyKind kind = cudaMemcpyHostToDevice) {
    return ::cudaMemcpyToSymbol((const void*)&symbol, src, count, offset, kind);
}
template <typename T>
static inline cudaError_t cudaMemcpyFromSymbol(void* dst, const T& symbol, size_t count, size_t offset = 0,
                                               cudaMemcpyKind kind = cudaMemcpyDeviceToHost) {
    return ::cudaMemcpyFromSymbol(dst, (const void*)&symbol, count, offset, kind);
}

#endif
