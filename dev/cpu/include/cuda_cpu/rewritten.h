/* dev/cpu/include/cuda_cpu/rewritten.h - what dev/cpu/rewrite.py makes of CUDA's own syntax

       kernel<<<grid, block, shared, stream>>>(a, b);    ->  cuda_cpu::on(grid, block, shared, stream)
                                                                 .run(FIND, CALL, a, b);
       extern __shared__ T name[];                       ->  auto* const name =
                                                                 cuda_cpu::dynamic_shared<T>();

   FIND and CALL are generic lambdas around the kernel's name, as it was written. If that name is one
   function, FIND gives its pointer, and the arguments are converted to its parameters and copied at the
   launch. If the compiler has yet to choose (template arguments left to deduction, overloads, default
   arguments), CALL does so from the types of the arguments; they are evaluated and copied at the launch too,
   and converted in each thread. Seen by rewritten sources only.
*/
#ifndef CUDA_CPU_REWRITTEN_H
#define CUDA_CPU_REWRITTEN_H

#include <type_traits>

extern "C" void* cudaCpuDynamicShared(void);

namespace cuda_cpu {

// ----------------------------------------------------------------------------
// dynamic shared memory

template <typename T> inline T* dynamic_shared() { return (T*)cudaCpuDynamicShared(); }

/* The same, declared outside a function: where it lies is known only when a kernel runs. */
template <typename T> struct DynamicShared {
    operator T*() const { return dynamic_shared<T>(); }
    template <typename U> explicit operator U*() const { return (U*)cudaCpuDynamicShared(); }
};

// ----------------------------------------------------------------------------
// launches

/* A literal 0 or NULL among the arguments: a null pointer, or zero, whichever the parameter wants. */
struct Zero {
    template <typename T, typename = typename std::enable_if<!std::is_class<T>::value>::type>
    operator T() const {
        return T();
    }
};
template <typename T> struct AsNumber { typedef T type; };
template <> struct AsNumber<Zero> { typedef int type; };
template <typename P, typename A> struct Given { /* an argument of type A for a parameter of type P */
    typedef typename std::conditional<std::is_class<P>::value, typename AsNumber<A>::type, A>::type type;
};

template <typename... P> struct Function { void (*pointer)(P...); };
/* Not viable unless the name means one function. Tag makes the call depend on a template parameter, so that
   this is found out quietly. */
template <typename Tag, typename... P> Function<P...> find(void (*pointer)(P...)) { return {pointer}; }

template <bool Flush, typename Kernel, typename... A> struct DeducedCall {
    Kernel kernel;
    std::tuple<A...> arguments;

    template <size_t... I> static void run_with(const DeducedCall* call, std::index_sequence<I...>) {
        do { /* as Call::run_with in launch.h */
            for (unsigned x = threadIdx.x;; threadIdx.x = ++x) {
                call->kernel(std::get<I>(call->arguments)...);
                if (x >= cuda_cpu_last_x) break;
            }
        } while (next_thread());
    }
    static void run(const void* call) { run_with((const DeducedCall*)call, std::index_sequence_for<A...>()); }
    static void destroy(const void* call) { delete (const DeducedCall*)call; }
};

class On {
  public:
    On(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream)
        : grid(grid), block(block), shared_bytes(shared_bytes), stream(stream) {}

    template <typename Find, typename Kernel, typename... A> void run(Find find, Kernel kernel, A... args) {
        if constexpr (std::is_invocable<Find, int>::value)
            run_found(find(0), kernel, args...);
        else
            run_deduced(kernel, args...);
    }

  private:
    template <typename... P, typename Kernel, typename... A>
    void run_found(Function<P...> function, Kernel kernel, A... args) {
        if constexpr (sizeof...(P) != sizeof...(A)) {
            run_deduced(kernel, args...); // default arguments
        } else {
            constexpr bool fits = (std::is_convertible<typename Given<P, A>::type, P>::value && ...);
            static_assert(fits, "an argument of this launch does not convert to the kernel's parameter");
            if constexpr (fits)
                enqueue(make_launch<P...>(function.pointer, grid, block, shared_bytes,
                                          (typename Given<P, A>::type)args...));
        }
    }

    template <typename Kernel, typename... A> void run_deduced(Kernel kernel, A... args) {
        if constexpr (std::is_invocable<Kernel, typename AsNumber<A>::type...>::value)
            run_call<Kernel, typename AsNumber<A>::type...>(kernel, args...);
        else if constexpr (std::is_invocable<Kernel, A...>::value)
            run_call<Kernel, A...>(kernel, args...);
        else
            static_assert(sizeof(Kernel) == 0, "no kernel of this name takes the arguments of this launch");
    }

    /* Which function runs is known inside `kernel` only, so its cudaFuncSetAttribute cannot be looked up: the
       launch may have as much shared memory as any kernel. */
    template <typename Kernel, typename... A> void run_call(Kernel kernel, A... args) {
        typedef DeducedCall<flush_denormals, Kernel, A...> Call;
        const void* function = (const void*)&Call::run;
        if (shared_bytes > 48 * 1024)
            ::cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024);
        Launch launch = {grid,
                         block,
                         shared_bytes,
                         function,
                         flush_denormals,
                         &Call::run,
                         &Call::destroy,
                         new Call{kernel, std::tuple<A...>(args...)}};
        enqueue(launch);
    }

    void enqueue(const Launch& typed_launch) {
        (void)launch("cudaLaunchKernel", typed_launch, stream, nullptr, 0); // cudaGetLastError tells
    }

    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
};

inline On on(dim3 grid, dim3 block, size_t shared_bytes = 0, cudaStream_t stream = 0) {
    return On(grid, block, shared_bytes, stream);
}

} // namespace cuda_cpu

// ----------------------------------------------------------------------------
// CUDA 12's forms of calls that CUDA 13 changed

#if CUDART_VERSION >= 13000
static inline cudaMemLocation cuda_cpu_location(int device) {
    cudaMemLocation location = {};
    location.type = device == cudaCpuDeviceId ? cudaMemLocationTypeHost : cudaMemLocationTypeDevice;
    location.id = device == cudaCpuDeviceId ? 0 : device;
    return location;
}
static inline cudaError_t cudaMemAdvise(const void* pointer, size_t bytes, cudaMemoryAdvise advice,
                                        int device) {
    return cudaMemAdvise(pointer, bytes, advice, cuda_cpu_location(device));
}
static inline cudaError_t cudaMemPrefetchAsync(const void* pointer, size_t bytes, int device,
                                               cudaStream_t stream = 0) {
    return cudaMemPrefetchAsync(pointer, bytes, cuda_cpu_location(device), 0, stream);
}
#endif

#endif
