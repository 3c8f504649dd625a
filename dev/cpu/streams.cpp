/* dev/cpu/streams.cpp - streams and events as queues; when they run is CUDA_CPU_STREAMS

   eager    an operation runs inside the call that enqueues it
   lazy     it runs when something waits for it: a synchronize call, cudaFree, a synchronous or pageable copy
   rush:ID  lazy, but what is enqueued on stream ID runs at once, after what it depends on and nothing else
  threads  a worker thread for each stream, from its first operation on: streams run at the same time

   With CUDA_CPU_NCCL_DEATH=silent a collective may never end, and the host must get on as on a GPU. So all modes
   have workers then; the mode says up to where a worker may run (`allowed`), and the call that says so waits for
   it, but not while some work spins for a peer. LAUNCH_QUEUE operations may wait in a stream; then the call blocks.

   Invariants: (1) a stream's operations run in order; `done` counts those that have run. (2) An operation
   depends only on operations enqueued before it: on its predecessors, on the record that a wait saw when
   it was made, and (legacy default stream) on the counts in `after`. So forcing a dependency ends. (3) The
   lock is not held while an operation's work runs; `busy` marks its stream, and other host threads wait
   for that. In threads mode only a stream's worker runs its operations, and whoever depends on them waits.
   (4) Ids count from 1 in order of creation and start again at cudaDeviceReset; 0 is the default
   stream.
*/
#include "streams.h"
#include <condition_variable>
#include <chrono>
#include <sched.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

namespace cuda_cpu {

std::mutex stream_lock;

/* These are never destroyed: at process end a worker may still wait there. */
static std::condition_variable& changed = *new std::condition_variable;

/* Live streams by handle, drained ones of destroyed handles gone, others kept until they have run. */
static std::map<CUstream_st*, StreamRef>& handles = *new std::map<CUstream_st*, StreamRef>;
static std::map<int, StreamRef>& by_id = *new std::map<int, StreamRef>;
static int next_id = 1;

static int workers; // threads mode: that run in process workers_of
static pid_t workers_of;
static bool ending;  // workers run nothing more
static int spinning; // works of this process that wait for a peer: work_spins
static thread_local bool on_worker;

static const uint64_t LAUNCH_QUEUE = 1024; // about as CUDA

static bool with_workers() { return options().streams == STREAMS_THREADS || options().silent_deaths; }

static double now_ms() {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e3 * (double)now.tv_sec + 1e-6 * (double)now.tv_nsec;
}

static StreamRef default_stream() {
    StreamRef& zero = by_id[0];
    if (!zero) {
        zero = std::make_shared<CUstream_st>();
        zero->id = 0, zero->flags = cudaStreamDefault;
    }
    return zero;
}

/* The stream behind a handle; null if it was destroyed or never was one. */
StreamRef find_stream(cudaStream_t stream) {
    if (!stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread) return default_stream();
    auto found = handles.find(stream);
    return found == handles.end() ? nullptr : found->second;
}

// ----------------------------------------------------------------------------
// running

static void start_worker(const StreamRef& stream);

static void run_first(Hold& hold, const StreamRef& stream) {
    stream->busy = true;
    stream->runner = pthread_self();
    Operation op = std::move(stream->queue.front());
    stream->queue.pop_front();
    for (auto& other : op.after) run_until(hold, other.first, other.second);
    if (op.wait) {
        run_until(hold, op.wait->stream, op.wait->count);
        if (op.wait->error != cudaSuccess && stream->error == cudaSuccess) stream->error = op.wait->error;
    }
    if (op.work && stream->error == cudaSuccess && !ending) { // after an error nothing runs, as on a GPU
        hold.unlock();
        cudaError_t error = op.work();
        op.work = nullptr;
        hold.lock();
        if (error != cudaSuccess) stream->error = error;
    }
    stream->done++;
    if (op.record) {
        op.record->time_ms = now_ms();
        op.record->error = stream->error;
        op.record->done = true;
    }
    stream->busy = false;
    changed.notify_all();
}

/* Lets the stream's worker, which it starts if there is none in this process, run up to a count. */
static void allow(const StreamRef& stream, uint64_t count) {
    if (stream->worker_of != getpid()) start_worker(stream);
    if (stream->allowed < count) stream->allowed = count;
    changed.notify_all();
}

/* Runs the stream up to a count, but does not wait while some work spins for a peer. */
static void run_unless_spinning(Hold& hold, const StreamRef& stream, uint64_t count) {
    if (!with_workers()) return run_until(hold, stream, count);
    allow(stream, count);
    while (stream->done < count && !ending && !spinning) changed.wait(hold);
}

void work_spins(bool spins) {
    if (!on_worker) return; // a host thread: it is in no stream's way
    Hold hold(stream_lock);
    spinning += spins ? 1 : -1;
    changed.notify_all();
}

void run_until(Hold& hold, const StreamRef& stream, uint64_t count) {
    const bool workers_run = with_workers();
    if (workers_run && stream->done < count) allow(stream, count);
    while (stream->done < count && !ending) {
        if (!stream->busy && !workers_run) {
            run_first(hold, stream);
        } else {
            if (stream->busy && pthread_equal(stream->runner, pthread_self()))
                fatal("work on stream %d waits for its own stream", stream->id);
            changed.wait(hold);
        }
    }
}

/* Runs the stream's operations until it is destroyed and has none left, or all end. */
static void* work(void* argument) {
    StreamRef stream = *(StreamRef*)argument;
    delete (StreamRef*)argument;
    Hold hold(stream_lock);
    on_worker = true;
    while (!ending) {
        if (!stream->queue.empty() && stream->done < stream->allowed)
            run_first(hold, stream);
        else if (stream->queue.empty() && stream->destroyed)
            break;
        else
            changed.wait(hold);
    }
    auto found = by_id.find(stream->id);
    if (!ending && found != by_id.end() && found->second == stream) by_id.erase(found);
    workers--;
    changed.notify_all();
    return NULL;
}

/* Workers are detached and counted: nobody has to join one whose stream was destroyed. */
static void start_worker(const StreamRef& stream) {
    pthread_t thread;
    const pid_t self = getpid();
    if (workers_of != self) workers = spinning = 0, workers_of = self;
    if (stream->busy) fatal("stream %d was at work when this process was forked", stream->id);
    stream->worker_of = self;
    int error = pthread_create(&thread, NULL, work, new StreamRef(stream));
    if (error) fatal("no thread for stream %d: %s", stream->id, strerror(error));
    pthread_detach(thread);
    workers++;
}

/* What has not begun never runs. Waits for what runs, at most so many seconds and not for what spins (0: as long
   as it takes). */
static void end_workers(Hold& hold, double seconds) {
    ending = true;
    changed.notify_all();
    auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (workers && workers_of == getpid())
        if (seconds != 0 && workers <= spinning)
            return;
        else if (seconds == 0)
            changed.wait(hold);
        else if (changed.wait_until(hold, until) == std::cv_status::timeout)
            return;
    ending = false;
}

/* A worker must not run while the process takes its data down; one that waits for a peer is left behind. */
struct EndWorkersAtExit {
    ~EndWorkersAtExit() {
        Hold hold(stream_lock);
        if (workers && workers_of == getpid()) end_workers(hold, 1.0);
    }
};
static EndWorkersAtExit end_workers_at_exit;

/* Adds the operation and runs it, if the mode says so. */
cudaError_t add(Hold& hold, const StreamRef& stream, Operation&& op) {
    if (stream->id == 0) { // the legacy stream waits for all blocking streams ...
        for (auto& other : by_id)
            if (other.first && !(other.second->flags & cudaStreamNonBlocking) &&
                other.second->done < other.second->enqueued)
                op.after.emplace_back(other.second, other.second->enqueued);
    } else if (!(stream->flags & cudaStreamNonBlocking)) { // ... and they for it
        StreamRef zero = default_stream();
        if (zero->done < zero->enqueued) op.after.emplace_back(zero, zero->enqueued);
    }
    stream->queue.push_back(std::move(op));
    uint64_t count = ++stream->enqueued;
    const Options& o = options();
    if (o.streams == STREAMS_THREADS) allow(stream, count);
    if (o.streams == STREAMS_EAGER || (o.streams == STREAMS_RUSH && stream->id == o.rush_id))
        run_unless_spinning(hold, stream, count);
    if (o.silent_deaths && count > LAUNCH_QUEUE) run_until(hold, stream, count - LAUNCH_QUEUE);
    return stream->error;
}

cudaError_t enqueue(cudaStream_t handle, const char* name, std::function<cudaError_t()> work) {
    Hold hold(stream_lock);
    StreamRef stream = find_stream(handle);
    if (!stream) return set_error(cudaErrorInvalidResourceHandle);
    Operation op;
    op.name = name;
    op.work = std::move(work);
    return set_error(add(hold, stream, std::move(op)));
}

cudaError_t order_after(cudaStream_t handle, cudaStream_t earlier_handle) {
    Hold hold(stream_lock);
    StreamRef stream = find_stream(handle), earlier = find_stream(earlier_handle);
    if (!stream) return set_error(cudaErrorInvalidResourceHandle);
    for (auto& other : by_id) // a destroyed stream is kept there until its work has run
        if (!earlier && other.second.get() == earlier_handle) earlier = other.second;
    if (!earlier || earlier == stream || earlier->done == earlier->enqueued) return cudaSuccess;
    Operation op;
    op.name = "order of a communicator";
    op.after.emplace_back(earlier, earlier->enqueued);
    return set_error(add(hold, stream, std::move(op)));
}

cudaError_t synchronize_stream(cudaStream_t handle) {
    Hold hold(stream_lock);
    StreamRef stream = find_stream(handle);
    if (!stream) return set_error(cudaErrorInvalidResourceHandle);
    run_until(hold, stream, stream->enqueued);
    return set_error(stream->error);
}

static bool destroyed(const StreamRef& stream) { return stream->id && !handles.count(stream.get()); }

cudaError_t synchronize_device() {
    Hold hold(stream_lock);
    cudaError_t error = cudaSuccess;
    std::map<int, StreamRef> streams = by_id; // running may add and drop some
    for (auto& entry : streams) {
        const StreamRef& stream = entry.second;
        run_until(hold, stream, stream->enqueued);
        if (error == cudaSuccess) error = stream->error;
        if (destroyed(stream)) by_id.erase(entry.first);
    }
    return set_error(error);
}

void reset_streams() {
    Hold hold(stream_lock);
    for (auto& stream : by_id) stream.second->queue.clear(); // as a reset does: what has not run is lost
    end_workers(hold, 0);
    handles.clear();
    by_id.clear();
    next_id = 1;
    reset_events();
}

/* A query that runs nothing would let a host that polls wait for ever; the second one for the same point
   counts as the time that passes on a GPU, and runs up to it. */
cudaError_t query_point(Hold& hold, const StreamRef& stream, uint64_t count, bool asked_before) {
    if (stream->done >= count) return cudaSuccess;
    if (options().streams == STREAMS_THREADS || spinning) { // a worker wants the lock and the processor
        if (asked_before && with_workers()) allow(stream, count);
        hold.unlock();
        sched_yield();
        hold.lock();
    } else if (asked_before) {
        run_unless_spinning(hold, stream, count);
    }
    return stream->done < count ? cudaErrorNotReady : cudaSuccess;
}

} // namespace cuda_cpu

using namespace cuda_cpu;

extern "C" {

// ----------------------------------------------------------------------------
// streams

static cudaError_t create_stream(cudaStream_t* stream, unsigned int flags, int priority) {
    if (!stream || (flags & ~(unsigned)cudaStreamNonBlocking)) return set_error(cudaErrorInvalidValue);
    Hold hold(stream_lock);
    StreamRef made = std::make_shared<CUstream_st>();
    made->id = next_id++;
    made->flags = flags;
    made->priority = priority;
    handles[made.get()] = by_id[made->id] = made;
    *stream = made.get();
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags, int priority) {
    CUDA_CPU_ENTRY("cudaStreamCreateWithPriority", cudaErrorUnknown);
    return create_stream(stream, flags, priority);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
    CUDA_CPU_ENTRY("cudaStreamCreateWithFlags", cudaErrorUnknown);
    return create_stream(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    CUDA_CPU_ENTRY("cudaStreamCreate", cudaErrorUnknown);
    return create_stream(stream, cudaStreamDefault, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    CUDA_CPU_ENTRY("cudaStreamDestroy", cudaErrorUnknown);
    Hold hold(stream_lock);
    auto found = handles.find(handle);
    if (found == handles.end()) return set_error(cudaErrorInvalidResourceHandle);
    StreamRef stream = found->second;
    handles.erase(found);
    stream->destroyed = true;
    changed.notify_all();
    if (stream->done == stream->enqueued) by_id.erase(stream->id); // else it runs to its end when waited for
    return cudaSuccess;
}
cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned int* flags) {
    CUDA_CPU_ENTRY("cudaStreamGetFlags", cudaErrorUnknown);
    Hold hold(stream_lock);
    StreamRef stream = find_stream(handle);
    if (!stream) return set_error(cudaErrorInvalidResourceHandle);
    if (!flags) return set_error(cudaErrorInvalidValue);
    *flags = stream->flags;
    return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
    CUDA_CPU_ENTRY("cudaStreamGetPriority", cudaErrorUnknown);
    Hold hold(stream_lock);
    StreamRef stream = find_stream(handle);
    if (!stream) return set_error(cudaErrorInvalidResourceHandle);
    if (!priority) return set_error(cudaErrorInvalidValue);
    *priority = stream->priority;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    CUDA_CPU_ENTRY("cudaStreamSynchronize", cudaErrorUnknown);
    return synchronize_stream(handle);
}
cudaError_t cudaDeviceSynchronize(void) {
    CUDA_CPU_ENTRY("cudaDeviceSynchronize", cudaErrorUnknown);
    return synchronize_device();
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
    CUDA_CPU_ENTRY("cudaStreamQuery", cudaErrorUnknown);
    Hold hold(stream_lock);
    StreamRef stream = find_stream(handle);
    if (!stream) return set_error(cudaErrorInvalidResourceHandle);
    cudaError_t result = query_point(hold, stream, stream->enqueued, stream->asked == stream->enqueued);
    if (result == cudaErrorNotReady) {
        stream->asked = stream->enqueued;
        return set_error(result);
    }
    return set_error(stream->error);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    CUDA_CPU_ENTRY("cudaLaunchHostFunc", cudaErrorUnknown);
    if (!function) return set_error(cudaErrorInvalidValue);
    return enqueue(stream, "host function", [=] { return function(data), cudaSuccess; });
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data,
                                  unsigned int flags) {
    CUDA_CPU_ENTRY("cudaStreamAddCallback", cudaErrorUnknown);
    if (!callback || flags) return set_error(cudaErrorInvalidValue);
    return enqueue(stream, "callback", [=] { return callback(stream, cudaSuccess, data), cudaSuccess; });
}

} // extern "C"
