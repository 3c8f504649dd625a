/* dev/cpu/events.cpp - events, and waits for them; each call site of a wait has a number */
#include "streams.h"
#include <stdio.h>
#include <string.h>

namespace cuda_cpu {

static std::map<CUevent_st*, std::shared_ptr<CUevent_st>> events;
static std::vector<std::pair<std::string, int>> wait_sites;
static std::vector<std::string> wait_texts;

void reset_events() {
    events.clear();
    wait_sites.clear();
    wait_texts.clear();
}

void report_waits() {
    static bool reported;
    Hold hold(stream_lock);
    int n = options().drop_wait;
    if (wait_sites.empty() && reported) return; // nothing ran since the last report
    reported = true;
    if (n > (int)wait_sites.size()) fprintf(stderr, "no wait %d\n", n);
}

/* At process end. */
struct ReportAtExit {
    ~ReportAtExit() { report_waits(); }
};
static ReportAtExit report_at_exit;

} // namespace cuda_cpu

using namespace cuda_cpu;

extern "C" {

// ----------------------------------------------------------------------------
// events

static std::shared_ptr<CUevent_st> find_event(cudaEvent_t event) {
    auto found = events.find(event);
    return found == events.end() ? nullptr : found->second;
}

static cudaError_t create_event(cudaEvent_t* event, unsigned int flags) {
    const unsigned known = cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess;
    if (!event || (flags & ~known)) return set_error(cudaErrorInvalidValue);
    if (flags & cudaEventInterprocess) return set_error(cudaErrorNotSupported);
    Hold hold(stream_lock);
    std::shared_ptr<CUevent_st> made = std::make_shared<CUevent_st>();
    made->flags = flags;
    events[made.get()] = made;
    *event = made.get();
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
    CUDA_CPU_ENTRY("cudaEventCreateWithFlags", cudaErrorUnknown);
    return create_event(event, flags);
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
    CUDA_CPU_ENTRY("cudaEventCreate", cudaErrorUnknown);
    return create_event(event, cudaEventDefault);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    CUDA_CPU_ENTRY("cudaEventDestroy", cudaErrorUnknown);
    Hold hold(stream_lock);
    return set_error(events.erase(event) ? cudaSuccess : cudaErrorInvalidResourceHandle);
}
static cudaError_t record_event(cudaEvent_t handle, cudaStream_t stream_handle) {
    Hold hold(stream_lock);
    std::shared_ptr<CUevent_st> event = find_event(handle);
    StreamRef stream = find_stream(stream_handle);
    if (!event || !stream) return set_error(cudaErrorInvalidResourceHandle);
    Operation op;
    op.name = "event record";
    op.record = std::make_shared<Record>();
    op.record->stream = stream;
    op.record->count = stream->enqueued + 1;
    event->record = op.record;
    return set_error(add(hold, stream, std::move(op)));
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    CUDA_CPU_ENTRY("cudaEventRecord", cudaErrorUnknown);
    return record_event(event, stream);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags) {
    CUDA_CPU_ENTRY("cudaEventRecordWithFlags", cudaErrorUnknown);
    if (flags) return set_error(cudaErrorNotSupported);
    return record_event(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
    CUDA_CPU_ENTRY("cudaEventQuery", cudaErrorUnknown);
    Hold hold(stream_lock);
    std::shared_ptr<CUevent_st> event = find_event(handle);
    if (!event) return set_error(cudaErrorInvalidResourceHandle);
    RecordRef record = event->record;
    if (!record) return cudaSuccess; // never recorded
    cudaError_t result = query_point(hold, record->stream, record->count, record->asked);
    if (result == cudaErrorNotReady) record->asked = true;
    // "not ready" is a last error, too
    return set_error(result == cudaErrorNotReady ? result : record->error);
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    CUDA_CPU_ENTRY("cudaEventSynchronize", cudaErrorUnknown);
    Hold hold(stream_lock);
    std::shared_ptr<CUevent_st> event = find_event(handle);
    if (!event) return set_error(cudaErrorInvalidResourceHandle);
    RecordRef record = event->record;
    if (!record) return cudaSuccess;
    run_until(hold, record->stream, record->count);
    return set_error(record->error);
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start_handle, cudaEvent_t end_handle) {
    CUDA_CPU_ENTRY("cudaEventElapsedTime", cudaErrorUnknown);
    if (!ms) return set_error(cudaErrorInvalidValue);
    Hold hold(stream_lock);
    std::shared_ptr<CUevent_st> start = find_event(start_handle), end = find_event(end_handle);
    if (!start || !end || !start->record || !end->record ||
        ((start->flags | end->flags) & cudaEventDisableTiming))
        return set_error(cudaErrorInvalidResourceHandle);
    if (!start->record->done || !end->record->done) return set_error(cudaErrorNotReady);
    *ms = (float)(end->record->time_ms - start->record->time_ms);
    return cudaSuccess;
}

// ----------------------------------------------------------------------------
// waits, each call site with a number

static int site_number(const char* file, int line) {
    for (size_t i = 0; i < wait_sites.size(); i++)
        if (wait_sites[i].second == line && wait_sites[i].first == file) return (int)i + 1;
    wait_sites.emplace_back(file, line);
    wait_texts.push_back(std::string(file) + ":" + std::to_string(line));
    return (int)wait_sites.size();
}

cudaError_t cudaCpuStreamWaitEvent(const char* file, int line, cudaStream_t stream_handle,
                                   cudaEvent_t event_handle, unsigned int flags) {
    CUDA_CPU_ENTRY("cudaStreamWaitEvent", cudaErrorUnknown);
    if (flags) return set_error(cudaErrorInvalidValue);
    Hold hold(stream_lock);
    std::shared_ptr<CUevent_st> event = find_event(event_handle);
    StreamRef stream = find_stream(stream_handle);
    if (!event || !stream) return set_error(cudaErrorInvalidResourceHandle);
    if (site_number(file, line) == options().drop_wait) return cudaSuccess;
    if (!event->record || event->record->stream == stream)
        return set_error(stream->error); // nothing to wait for
    Operation op;
    op.name = "wait for an event";
    op.wait = event->record;
    return set_error(add(hold, stream, std::move(op)));
}
#undef cudaStreamWaitEvent
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
    return cudaCpuStreamWaitEvent("called by address", 0, stream, event, flags);
}

int cudaCpuWaitSites(void) {
    Hold hold(stream_lock);
    return (int)wait_sites.size();
}
const char* cudaCpuWaitSite(int n) {
    Hold hold(stream_lock);
    return n >= 1 && n <= (int)wait_texts.size() ? wait_texts[(size_t)n - 1].c_str() : NULL;
}

} // extern "C"
