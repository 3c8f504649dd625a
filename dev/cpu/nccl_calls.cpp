/* dev/cpu/nccl_calls.cpp - NCCL on the CPU: groups and collectives, from the call to the stream.

   A call is checked, then handed to the stream, or kept until the outermost ncclGroupEnd. A group becomes
   one piece of work per communicator and stream: its collectives in order, then all its sends and receives
   at once. Work of one communicator runs in the order of the calls, also across streams: as in NCCL, what
   is issued on another stream than the last one waits for that one.
*/
#include "nccl_world.h"
#include <algorithm>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

using namespace cuda_cpu::nccl;

namespace {

struct Grouped {
    ncclComm* comm;
    cudaStream_t stream;
    Call call;
};

thread_local char last_error[cuda_cpu::nccl::TEXT_BYTES];
thread_local int group_depth;
thread_local std::vector<Grouped> group;
thread_local ncclResult_t group_error = ncclSuccess;

} // namespace

namespace cuda_cpu {
namespace nccl {

ncclResult_t failed(ncclResult_t result, const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    const char* debug = getenv("NCCL_DEBUG");
    if (debug && *debug && strcmp(debug, "VERSION")) fprintf(stderr, "NCCL WARN %s\n", last_error);
    if (group_depth && group_error == ncclSuccess) group_error = result;
    return result;
}

ncclResult_t world_error(World& w) {
    if (w.aborted.load()) return failed(ncclRemoteError, "rank %d called ncclCommAbort", w.rank);
    ncclResult_t result = ncclSuccess;
    std::string text;
    return world_failed(w, &result, &text) ? failed(result, "%s", text.c_str()) : ncclSuccess;
}

} // namespace nccl
} // namespace cuda_cpu

namespace {

/* ---- handing work to the stream ---- */

cudaError_t run_list(const WorldRef& w, const std::vector<Call>& calls) {
    std::vector<Call> messages;
    cudaError_t error = cudaSuccess;
    for (const Call& c : calls) {
        if (c.kind == SEND || c.kind == RECV)
            messages.push_back(c);
        else if (error == cudaSuccess && !w->aborted.load())
            error = run_collective(*w, c);
    }
    if (error == cudaSuccess && !messages.empty() && !w->aborted.load()) error = run_messages(*w, messages);
    if (w->aborted.load()) error = cudaSuccess; // a kernel that is told to stop ends like any other
    w->pending.fetch_sub(1);
    return error;
}

/* NCCL runs the work of one communicator in order: another stream than last time waits for the last one. */
cudaError_t order_streams(World& w, cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    if (w.any_stream && w.last_stream != stream && w.pending.load())
        error = cuda_cpu::order_after(stream, w.last_stream);
    w.any_stream = true;
    w.last_stream = stream;
    return error;
}

ncclResult_t issue(ncclComm* comm, cudaStream_t stream, std::vector<Call> calls, const char* name) {
    WorldRef w = comm->world;
    if (order_streams(*w, stream) != cudaSuccess)
        return failed(ncclUnhandledCudaError, "%s: cannot order the streams of one communicator", name);
    w->pending.fetch_add(1);
    cudaError_t error = cuda_cpu::enqueue(stream, name, [w, calls] { return run_list(w, calls); });
    if (error == cudaSuccess) return ncclSuccess;
    ncclResult_t result = world_error(*w);
    return result != ncclSuccess ? result
                                 : failed(ncclUnhandledCudaError, "%s: the stream has failed: %s", name,
                                          cudaGetErrorString(error));
}

/* ---- checks of one call ---- */

ncclResult_t check_call(const char* name, const ncclComm* comm, const Call& c) {
    if (!living(comm)) return bad_comm(name, comm);
    World& w = *comm->world;
    if (world_failed(w, nullptr, nullptr)) return world_error(w);
    if (!type_bytes(c.type)) return failed(ncclInvalidArgument, "%s: data type %d", name, c.type);
    bool reduces = c.kind == ALL_REDUCE || c.kind == REDUCE_SCATTER || c.kind == REDUCE;
    if (reduces && (c.op < 0 || c.op >= ncclNumOps))
        return failed(ncclInvalidArgument, "%s: reduction %d", name, c.op);
    if (reduces && !can_reduce(c.type))
        return failed(ncclInvalidArgument, "%s: the CPU build does not reduce %s", name, type_name(c.type));
    if (c.root < 0 || c.root >= w.ranks)
        return failed(ncclInvalidArgument, "%s: %s %d, but ranks are 0 to %d", name,
                      c.kind == SEND || c.kind == RECV ? "peer" : "root", c.root, w.ranks - 1);
    bool root = w.rank == c.root;
    bool needs_send = c.kind != RECV && (root || (c.kind != BROADCAST && c.kind != SCATTER));
    bool needs_recv = c.kind != SEND && (root || (c.kind != REDUCE && c.kind != GATHER));
    if (c.count && ((needs_send && !c.send) || (needs_recv && !c.recv)))
        return failed(ncclInvalidArgument, "%s: %s is NULL", name,
                      needs_send && !c.send ? "sendbuff" : "recvbuff");
    if (c.count > ((size_t)1 << 62) / type_bytes(c.type) / w.ranks)
        return failed(ncclInvalidArgument, "%s: count %zu is more than memory can hold", name,
                      (size_t)c.count);
    check_buffers(w, c);
    return ncclSuccess;
}

ncclResult_t submit(const char* name, const Call& c, ncclComm_t comm, cudaStream_t stream) {
    FAIL_ON_ORDER(name);
    ncclResult_t result = check_call(name, comm, c);
    if (result != ncclSuccess) return result;
    if (c.count == 0 && c.kind != SEND && c.kind != RECV) return ncclSuccess; // as NCCL: no exchange
    if (group_depth) {
        group.push_back(Grouped{comm, stream, c});
        return ncclSuccess;
    }
    if ((c.kind == SEND || c.kind == RECV) && c.root == comm->world->rank)
        return failed(ncclInvalidUsage, "%s to itself outside a group: nothing can match it", name);
    return issue(comm, stream, std::vector<Call>(1, c), name);
}

ncclResult_t end_group() {
    std::vector<Grouped> calls;
    calls.swap(group);
    ncclResult_t result = group_error;
    group_error = ncclSuccess;
    if (result != ncclSuccess) return result; // as NCCL: a group with a bad call starts nothing
    for (const Grouped& g : calls) {          // a message to oneself needs its other half in the same group
        int balance = 0, self = g.comm->world->rank;
        for (const Grouped& h : calls)
            if (h.comm == g.comm && h.call.root == self)
                balance += h.call.kind == SEND ? 1 : h.call.kind == RECV ? -1 : 0;
        if (balance)
            return failed(ncclInvalidUsage, "ncclGroupEnd: rank %d sends to itself %s than it receives", self,
                          balance > 0 ? "more" : "less");
    }
    /* one piece of work per communicator and stream; several communicators in an order common to all ranks */
    std::stable_sort(calls.begin(), calls.end(), [](const Grouped& a, const Grouped& b) {
        return a.comm->world->control->nonce < b.comm->world->control->nonce;
    });
    while (!calls.empty()) {
        Grouped first = calls.front();
        std::vector<Call> mine;
        std::vector<Grouped> rest;
        for (const Grouped& g : calls)
            if (g.comm == first.comm && g.stream == first.stream)
                mine.push_back(g.call);
            else
                rest.push_back(g);
        ncclResult_t r = issue(first.comm, first.stream, mine, "ncclGroupEnd");
        result = result == ncclSuccess ? r : result;
        calls.swap(rest);
    }
    return result;
}

} // namespace

extern "C" {

const char* ncclGetLastError(ncclComm_t) { return last_error; }

ncclResult_t ncclGroupStart() {
    FAIL_ON_ORDER("ncclGroupStart");
    group_depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
    if (cuda_cpu::fail_now("ncclGroupEnd")) {
        group.clear();
        group_depth = 0;
        group_error = ncclSuccess;
        return failed(ncclSystemError, "ncclGroupEnd: CUDA_CPU_FAIL");
    }
    if (!group_depth) return failed(ncclInvalidUsage, "ncclGroupEnd: no ncclGroupStart before it");
    return --group_depth ? ncclSuccess : end_group();
}

ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    return submit("ncclAllReduce", Call{ALL_REDUCE, type, op, 0, count, send, recv}, comm, stream);
}

ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return submit("ncclReduceScatter", Call{REDUCE_SCATTER, type, op, 0, count, send, recv}, comm, stream);
}

ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    return submit("ncclAllGather", Call{ALL_GATHER, type, 0, 0, count, send, recv}, comm, stream);
}

ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    return submit("ncclBroadcast", Call{BROADCAST, type, 0, root, count, send, recv}, comm, stream);
}

ncclResult_t ncclBcast(void* buff, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
    return submit("ncclBcast", Call{BROADCAST, type, 0, root, count, buff, buff}, comm, stream);
}

ncclResult_t ncclReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                        int root, ncclComm_t comm, cudaStream_t stream) {
    return submit("ncclReduce", Call{REDUCE, type, op, root, count, send, recv}, comm, stream);
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return submit("ncclSend", Call{SEND, type, 0, peer, count, send, nullptr}, comm, stream);
}

ncclResult_t ncclRecv(void* recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return submit("ncclRecv", Call{RECV, type, 0, peer, count, nullptr, recv}, comm, stream);
}

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
ncclResult_t ncclAlltoAll(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
    return submit("ncclAlltoAll", Call{ALL_TO_ALL, type, 0, 0, count, send, recv}, comm, stream);
}

ncclResult_t ncclGather(const void* send, void* recv, size_t count, ncclDataType_t type, int root,
                        ncclComm_t comm, cudaStream_t stream) {
    return submit("ncclGather", Call{GATHER, type, 0, root, count, send, recv}, comm, stream);
}

ncclResult_t ncclScatter(const void* send, void* recv, size_t count, ncclDataType_t type, int root,
                         ncclComm_t comm, cudaStream_t stream) {
    return submit("ncclScatter", Call{SCATTER, type, 0, root, count, send, recv}, comm, stream);
}
#endif

} // extern "C"
