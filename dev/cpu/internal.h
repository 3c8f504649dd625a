/* dev/cpu/internal.h - what the files of the runtime share; nccl*.cpp and cublas*.cpp see runtime.h only */
#pragma once
#include "runtime.h"
#include <stdint.h>
#include <string>

#if defined(__SANITIZE_ADDRESS__)
#define CUDA_CPU_ASAN 1
#endif

namespace cuda_cpu {

enum StreamMode { STREAMS_EAGER, STREAMS_LAZY, STREAMS_RUSH, STREAMS_THREADS };
enum WarpOrder { ORDER_FORWARD, ORDER_REVERSE, ORDER_RANDOM };

/* The environment, read at first use and again at cudaDeviceReset. */
struct Options {
    StreamMode streams;
    int rush_id;
    WarpOrder order;
    uint64_t order_seed;
    int drop_wait;         // 0: none
    std::string fail_name; // "": none
    long fail_call;
    std::string fail_action; // "": it fails
    size_t memory_bytes;     // 0: what the machine has
    size_t round_bytes;      // allocations are made a multiple of this
    int devices;             // as CUDA_VISIBLE_DEVICES leaves them
    size_t stack_bytes;
    double timeout_s;
    bool silent_deaths;  // of peers
    bool plain_products; // matrix products by a plain loop
};
const Options& options();
void reload_options(); // also sets the counters of CUDA_CPU_FAIL to zero

/* Keeps an error for cudaGetLastError and returns it; cudaSuccess changes nothing. */
cudaError_t set_error(cudaError_t error);

const int SHARED_DEFAULT = 48 * 1024,
          SHARED_MAX = 227 * 1024; // bytes of shared memory: plain, with the attribute

/* First line of every public entry point. */
#define CUDA_CPU_ENTRY(name, error)                  \
    do {                                             \
        if (fail_now(name)) return set_error(error); \
    } while (0)

// streams.cpp, events.cpp
cudaError_t synchronize_stream(cudaStream_t stream); // runs all that is enqueued on it
cudaError_t synchronize_device();                    // the same for every stream
void reset_streams();                                // forgets streams, what is queued, and the wait sites
void report_waits();                                 // "no wait n", if that is so

// memory.cpp
void check_canaries(); // of all live allocations; fatal if one is broken
enum Place { PLACE_PAGEABLE, PLACE_PINNED, PLACE_DEVICE, PLACE_MANAGED };
Place place_of(const void* pointer);
bool in_heap(const void* pointer);
void describe_address(const void* address, char* text, size_t text_bytes); // nearest allocation, in words

// launch.cpp
void run_launch(const Launch& launch);
bool kernel_running(); // on this host thread
bool in_stack_guard(const void* address);
cudaError_t function_shared_limit(const void* function, size_t bytes); // cudaSuccess if it may have that much

// faults.cpp
void install_fault_handler(); // once
void use_fault_stack();       // once for each host thread that launches

} // namespace cuda_cpu
