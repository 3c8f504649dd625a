/* dev/cpu/streams.h - streams and events, between streams.cpp and events.cpp */
#pragma once
#include "internal.h"
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <pthread.h>
#include <sys/types.h>
#include <utility>
#include <vector>

struct CUstream_st;
typedef std::shared_ptr<CUstream_st> StreamRef;

/* One cudaEventRecord: the point in its stream, and when it was passed. */
struct Record {
    StreamRef stream;
    uint64_t count; // done once stream->done >= count
    bool done = false, asked = false;
    cudaError_t error = cudaSuccess;
    double time_ms = 0;
};
typedef std::shared_ptr<Record> RecordRef;

struct Operation {
    const char* name;
    std::function<cudaError_t()> work;
    RecordRef wait, record; // of cudaStreamWaitEvent, of cudaEventRecord
    std::vector<std::pair<StreamRef, uint64_t>>
        after; // legacy default stream: run these streams to these counts
};

struct CUstream_st {
    int id;
    unsigned flags;
    int priority = 0;
    std::deque<Operation> queue;
    uint64_t enqueued = 0, done = 0;
    uint64_t asked = 0;   // lazy: the point that a query has found not ready
    uint64_t allowed = 0; // its worker runs up to here, if work does not run by itself (CUDA_CPU_STREAMS)
    bool busy = false;
    pthread_t runner;    // if busy
    pid_t worker_of = 0; // threads: the process in which its worker runs (a forked one has none)
    bool destroyed = false;
    cudaError_t error = cudaSuccess;
};

struct CUevent_st {
    unsigned flags;
    RecordRef record;
};

namespace cuda_cpu {

extern std::mutex stream_lock; // over everything here
typedef std::unique_lock<std::mutex> Hold;

StreamRef find_stream(cudaStream_t stream); // null: destroyed, or never one
cudaError_t add(Hold& hold, const StreamRef& stream, Operation&& op);
void run_until(Hold& hold, const StreamRef& stream, uint64_t count);
cudaError_t query_point(Hold& hold, const StreamRef& stream, uint64_t count, bool asked_before);
void reset_events(); // and the wait sites; the lock is held

} // namespace cuda_cpu
