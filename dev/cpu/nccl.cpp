/* dev/cpu/nccl.cpp - NCCL for the ranks of one machine: the entry points.

   Built with dev/cpu/nvcc; the prototypes are the toolkit's own nccl.h. One process a rank. Environment:
     CUDA_CPU_NCCL=ring|exact     rounded at each hop of a ring (default), or summed in fp32 and rounded once
     CUDA_CPU_NCCL_RING=2,0,1,3   the ranks in the order of the ring (default 0, 1, 2, ...)
     CUDA_CPU_TIMEOUT=seconds     how long a rank waits for a peer (60)
     CUDA_CPU_NCCL_DEATH=silent   it waits for ever and says nothing, as NCCL inside a node (reported)
     NCCL_DEBUG=WARN              prints every error text, as NCCL does

   A bad argument is returned (ncclInvalidArgument), with words in ncclGetLastError. What a GPU would punish
   with a hang or with wrong numbers ends the process in words: ranks that call different things, a buffer
   that is no device memory or too short, a forbidden overlap. A peer that died, left, aborted or is late:
   the work fails with cudaErrorUnknown, ncclCommGetAsyncError and every later call say ncclRemoteError.

   Work of one communicator runs in the order of the calls, also across streams: as in NCCL, what is issued
   on another stream than the last one waits for that one.
*/
#include "nccl_world.h"
#include <algorithm>
#include <mutex>
#include <set>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

using namespace cuda_cpu::nccl;

namespace {

std::mutex comms_mutex;
std::set<const ncclComm*> comms; // the living ones, so that a stale handle is an error and not a crash

} // namespace

namespace cuda_cpu {
namespace nccl {

bool living(const ncclComm* comm) {
    std::lock_guard<std::mutex> lock(comms_mutex);
    return comms.count(comm) != 0;
}

ncclResult_t bad_comm(const char* name, const ncclComm* comm) {
    return failed(ncclInvalidArgument, "%s: comm %s", name,
                  comm ? "is not a communicator, or is destroyed" : "is NULL");
}

} // namespace nccl
} // namespace cuda_cpu

namespace {

ncclResult_t init(const char* name, ncclComm_t* comm, int ranks, const ncclUniqueId& id, int rank) {
    if (!comm) return failed(ncclInvalidArgument, "%s: comm is NULL", name);
    *comm = nullptr;
    if (ranks < 1 || ranks > MAX_RANKS)
        return failed(ncclInvalidArgument, "%s: %d ranks (the CPU build takes 1 to %d)", name, ranks,
                      (int)MAX_RANKS);
    WorldRef w;
    std::string text;
    ncclResult_t result = world_join(id, ranks, rank, &w, &text);
    if (result != ncclSuccess) return failed(result, "%s", text.c_str());
    cudaGetDevice(&w->device);
    *comm = new ncclComm{w};
    std::lock_guard<std::mutex> lock(comms_mutex);
    comms.insert(*comm);
    return ncclSuccess;
}

bool bad_config(const ncclConfig_t* config) { return config && config->magic != 0xcafebeefu; }

/* Ends a handle, unless another thread has done so. Work that has not run keeps the World alive. */
void release(ncclComm* comm) {
    {
        std::lock_guard<std::mutex> lock(comms_mutex);
        if (!comms.erase(comm)) return;
    }
    WorldRef w = comm->world;
    w->control->slots[w->rank].left.store(1);
    world_ring(w->control);
    delete comm;
}

/* Everybody publishes colour and key; the first rank of each colour makes an id for it. */
ncclResult_t split(ncclComm* comm, int color, int key, ncclComm_t* out) {
    World& w = *comm->world;
    Slot* slots = w.control->slots;
    Slot& mine = slots[w.rank];
    mine.split_color = color;
    mine.split_key = key;
    if (!world_meet(w, "ncclCommSplit")) return world_error(w);
    std::vector<std::pair<int, int>> members; // (key, rank)
    for (int r = 0; r < w.ranks && color != NCCL_SPLIT_NOCOLOR; r++)
        if (slots[r].split_color == color) members.push_back(std::make_pair(slots[r].split_key, r));
    bool leader = !members.empty() && members[0].second == w.rank; // lowest rank, before sorting by key
    int leading = members.empty() ? 0 : members[0].second;
    ncclUniqueId id = {};
    std::string text;
    if (leader && world_create(&id, &text) != ncclSuccess) world_fail(w, ncclSystemError, "%s", text.c_str());
    memcpy(mine.split_id, id.internal, sizeof id.internal);
    if (!world_meet(w, "ncclCommSplit")) return world_error(w);
    memcpy(id.internal, slots[leading].split_id, sizeof id.internal);
    if (!world_meet(w, "ncclCommSplit")) // W4: all have read before anybody writes again
        return world_error(w);
    if (members.empty()) return ncclSuccess;
    std::sort(members.begin(), members.end());
    int rank = 0;
    while (members[rank].second != w.rank) rank++;
    return init("ncclCommSplit", out, (int)members.size(), id, rank);
}

} // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
    FAIL_ON_ORDER("ncclGetVersion");
    if (!version) return failed(ncclInvalidArgument, "ncclGetVersion: version is NULL");
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    FAIL_ON_ORDER("ncclGetUniqueId");
    if (!id) return failed(ncclInvalidArgument, "ncclGetUniqueId: uniqueId is NULL");
    std::string text;
    ncclResult_t result = world_create(id, &text);
    return result == ncclSuccess ? result : failed(result, "%s", text.c_str());
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
    FAIL_ON_ORDER("ncclCommInitRank");
    return init("ncclCommInitRank", comm, nranks, id, rank);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
    FAIL_ON_ORDER("ncclCommInitRankConfig");
    if (bad_config(config))
        return failed(ncclInvalidArgument,
                      "ncclCommInitRankConfig: config was not set to NCCL_CONFIG_INITIALIZER");
    return init("ncclCommInitRankConfig", comm, nranks, id, rank);
}

ncclResult_t ncclCommInitAll(ncclComm_t*, int, const int*) {
    return failed(ncclInvalidUsage,
                  "ncclCommInitAll: the CPU build has one device and one rank a process; use "
                  "ncclCommInitRank");
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config) {
    FAIL_ON_ORDER("ncclCommSplit");
    if (!living(comm)) return bad_comm("ncclCommSplit", comm);
    if (!newcomm || bad_config(config) || (color < 0 && color != NCCL_SPLIT_NOCOLOR))
        return failed(ncclInvalidArgument, "ncclCommSplit: newcomm, colour %d or config", color);
    *newcomm = nullptr;
    WorldRef w = comm->world;
    cudaError_t error = cudaSuccess;
    if (w->pending.load()) error = cudaStreamSynchronize(w->last_stream); // the ranks meet on the host now
    if (world_failed(*w, nullptr, nullptr)) return world_error(*w);
    if (error != cudaSuccess)
        return failed(ncclUnhandledCudaError, "ncclCommSplit: the last stream: %s",
                      cudaGetErrorString(error));
    return split(comm, color, key, newcomm);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    FAIL_ON_ORDER("ncclCommFinalize");
    if (!living(comm)) return bad_comm("ncclCommFinalize", comm);
    WorldRef w = comm->world;
    if (w->pending.load() && !world_failed(*w, nullptr, nullptr)) (void)cudaStreamSynchronize(w->last_stream);
    return world_error(*w);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    FAIL_ON_ORDER("ncclCommDestroy");
    if (!comm) return ncclSuccess; // as NCCL
    if (!living(comm)) return bad_comm("ncclCommDestroy", comm);
    WorldRef w = comm->world;
    if (w->pending.load() && !world_failed(*w, nullptr, nullptr)) (void)cudaStreamSynchronize(w->last_stream);
    release(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    FAIL_ON_ORDER("ncclCommAbort");
    if (!comm) return ncclSuccess;
    if (!living(comm)) return bad_comm("ncclCommAbort", comm);
    WorldRef w = comm->world;
    if (cuda_cpu::silent_deaths()) // the others do not hear of it
        w->aborted.store(true), world_ring(w->control);
    else
        world_fail(*w, ncclRemoteError, "rank %d called ncclCommAbort", w->rank);
    release(comm); // waits for nothing
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    FAIL_ON_ORDER("ncclCommGetAsyncError");
    if (!living(comm)) return bad_comm("ncclCommGetAsyncError", comm);
    if (!error) return failed(ncclInvalidArgument, "ncclCommGetAsyncError: asyncError is NULL");
    *error = world_error(*comm->world);
    return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
    }
}

#define COMM_PROPERTY(name, field, out)                                                     \
    FAIL_ON_ORDER(name);                                                                    \
    if (!living(comm)) return bad_comm(name, comm);                                         \
    if (!(out)) return failed(ncclInvalidArgument, "%s: the result pointer is NULL", name); \
    *(out) = comm->world->field;                                                            \
    return ncclSuccess

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
    COMM_PROPERTY("ncclCommCount", ranks, count);
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
    COMM_PROPERTY("ncclCommUserRank", rank, rank);
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* dev) {
    COMM_PROPERTY("ncclCommCuDevice", device, dev);
}

ncclResult_t ncclMemAlloc(void** ptr, size_t size) {
    FAIL_ON_ORDER("ncclMemAlloc");
    if (!ptr) return failed(ncclInvalidArgument, "ncclMemAlloc: ptr is NULL");
    return cudaMalloc(ptr, size) == cudaSuccess
               ? ncclSuccess
               : failed(ncclUnhandledCudaError, "ncclMemAlloc: %zu bytes of device memory", size);
}

ncclResult_t ncclMemFree(void* ptr) {
    FAIL_ON_ORDER("ncclMemFree");
    return cudaFree(ptr) == cudaSuccess ? ncclSuccess
                                        : failed(ncclUnhandledCudaError, "ncclMemFree: cudaFree(%p)", ptr);
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void*, size_t, void** handle) {
    FAIL_ON_ORDER("ncclCommRegister");
    if (!living(comm) || !handle) return bad_comm("ncclCommRegister", comm);
    *handle = nullptr; // all device memory is shared already
    return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void*) {
    FAIL_ON_ORDER("ncclCommDeregister");
    return living(comm) ? ncclSuccess : bad_comm("ncclCommDeregister", comm);
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t*, void*, ncclDataType_t, ncclScalarResidence_t,
                                      ncclComm_t) {
    return failed(ncclInvalidUsage, "ncclRedOpCreatePreMulSum: not in the CPU build");
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) {
    return failed(ncclInvalidArgument, "ncclRedOpDestroy: the CPU build has made no such operation");
}

} // extern "C"
