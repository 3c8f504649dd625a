/* dev/cpu/nccl_world.h - what the files of the CPU build's NCCL share

   nccl.cpp              entry points: communicators' lives
   nccl_calls.cpp        entry points: groups and collectives, up to the stream
   nccl_world.cpp        start-up: the control block, joining
   nccl_peers.cpp        waiting for peers, dead peers, reading a peer's device memory
   nccl_collectives.cpp  one collective: publish, meet, compare, move, meet
   nccl_messages.cpp     the sends and receives of one group
   nccl_reduce.cpp       the arithmetic, in the order of a ring

   Invariants:
   W1  The control block is a memfd of the process that called ncclGetUniqueId; it has no name in any
       folder, so that nothing stays behind, however the ranks end.
   W2  A rank writes only into its own Slot and its own Channels (to a receiver it alone writes `posted`; the
       receiver alone writes `taken`). Everything else in Control is written once, under compare-and-swap.
   W3  Peers read device memory in place and never write to it.
   W4  Between two meetings (world_meet) of one collective a rank's published arguments do not change.
*/
#pragma once
#include "runtime.h"
#include <nccl.h>
#include <atomic>
#include <functional>
#include <memory>
#include <stdint.h>
#include <string>
#include <vector>

namespace cuda_cpu {
namespace nccl {

enum { MAX_RANKS = 64, TEXT_BYTES = 512 };

enum Kind {
    ALL_REDUCE,
    REDUCE_SCATTER,
    ALL_GATHER,
    BROADCAST,
    REDUCE,
    ALL_TO_ALL,
    GATHER,
    SCATTER,
    SEND,
    RECV
};

/* One call, as its caller wrote it. count is the argument of that name (reduce-scatter: of the result). */
struct Call {
    int kind, type, op, root; // root: of a broadcast or reduce; the peer of a send or receive
    uint64_t count;
    const void* send;
    void* recv;
};

/* The part of a Call on which all ranks must agree, and where the peers find the data (bytes into the
   heap). */
struct Published {
    int kind, type, op, root;
    uint64_t count, send_offset, recv_offset;
};

/* One rank's part of the control block. */
struct Slot {
    std::atomic<int> claimed; // 1: fields below belong to a rank; 2: and they are written
    int pid, heap_fd;
    uint64_t start_time, heap_bytes;
    std::atomic<uint32_t> meetings; // how many meetings this rank has arrived at
    std::atomic<int> left;          // its communicator is destroyed
    Published published;
    char split_id[NCCL_UNIQUE_ID_BYTES]; // ncclCommSplit: the id that this rank made for its colour
    int split_color, split_key;
};

/* Messages from one rank to another, one at a time. */
struct Channel {
    std::atomic<uint32_t> posted, taken; // equal: empty
    Published send, recv;                // recv is filled in by a receiver that does not agree
    std::atomic<int> mismatch;
};

struct Control {
    uint64_t nonce;
    std::atomic<uint32_t> bell, sleepers; // futex word, rung at every change that somebody may wait for
    std::atomic<int> ranks;               // 0 until the first rank came
    std::atomic<int> joined;
    std::atomic<int> failure; // 0 none, 1 being written, 2 the text stands
    int failure_result;
    char failure_text[TEXT_BYTES];
    int exact, ring[MAX_RANKS]; // settings of rank 0, for all
    Slot slots[MAX_RANKS];
    Channel channels[MAX_RANKS * MAX_RANKS]; // [sender * MAX_RANKS + receiver]; untouched pages cost nothing
};

/* A communicator as one rank sees it. Work items hold a reference, so it outlives ncclCommDestroy. */
struct World {
    Control* control = nullptr;
    int rank = 0, ranks = 0, device = 0;
    uint32_t meetings = 0;                 // our own count, ahead of nobody's
    const char* peer_base[MAX_RANKS] = {}; // peers' heaps, mapped at first use
    std::atomic<int> pending{0};           // work items not yet run
    std::atomic<bool> aborted{false};      // by ncclCommAbort, on this rank
    cudaStream_t last_stream = nullptr;
    bool any_stream = false;
    ~World();
};
typedef std::shared_ptr<World> WorldRef;

/* ---- nccl_world.cpp, nccl_peers.cpp ---- */

uint64_t process_start(int pid); // in clock ticks since boot; 0 if it is gone or a zombie

/* Opens a file of another process through /proc; -1, with words, if that cannot be. */
int open_fd_of(int pid, int fd, int flags, std::string* text);

/* Makes a control block; `id` tells the others where it is. */
ncclResult_t world_create(ncclUniqueId* id, std::string* text);

/* Opens the block, takes the place `rank`, waits for all. On an error `text` has the words. */
ncclResult_t world_join(const ncclUniqueId& id, int ranks, int rank, WorldRef* out, std::string* text);

/* Waits until lacks(r) is false for every rank r. False: the communicator has failed (dead peer, peer that
   left, time limit, abort), and its failure text says why. `what` is what we are in, for that text. If deaths
   are silent, only our own abort and another rank's error end the wait. */
bool world_wait(World& w, const char* what, const std::function<bool(int)>& lacks);

/* Arrives at the next meeting of all ranks and waits for the others. False as above. */
bool world_meet(World& w, const char* what);

/* The first failure of a communicator stands, on all ranks; later ones are dropped. Wakes everybody. */
void world_fail(World& w, ncclResult_t result, const char* format, ...) __attribute__((format(printf, 3, 4)));
bool world_failed(const World& w, ncclResult_t* result, std::string* text);

void world_ring(Control* c);

/* The device memory of a peer (or our own) at an offset that it published; NULL, after world_fail, if its
   heap cannot be mapped. */
const char* world_memory(World& w, int rank, uint64_t offset);

/* ---- nccl_calls.cpp, nccl.cpp ---- */

/* Keeps the words for ncclGetLastError, and the result for ncclGroupEnd; returns the result. */
ncclResult_t failed(ncclResult_t result, const char* format, ...) __attribute__((format(printf, 2, 3)));
ncclResult_t world_error(World& w); // failed() with the communicator's failure, or ncclSuccess
bool living(const ncclComm* comm);
ncclResult_t bad_comm(const char* name, const ncclComm* comm);

/* CUDA_CPU_FAIL, asked once at the start of each entry point. */
#define FAIL_ON_ORDER(name) \
    if (cuda_cpu::fail_now(name)) return failed(ncclSystemError, "%s: CUDA_CPU_FAIL", name)

/* ---- nccl_collectives.cpp, nccl_messages.cpp ---- */

size_t type_bytes(int type); // 0: not a type
const char* type_name(int type);
std::string describe(const Published& p);
Published publishable(const Call& call);

/* Stops the process, in words, if a buffer is not device memory or overlaps the other in a way NCCL
   forbids. */
void check_buffers(const World& w, const Call& call);

cudaError_t run_collective(World& w, const Call& call);
cudaError_t run_messages(World& w, const std::vector<Call>& calls); // all sends and receives of a group

/* ---- nccl_reduce.cpp ---- */

/* out[i] = in[0][i] op in[1][i] op ... in that order, rounded to the type at each step; `exact`: in fp32
   (fp64 for double), rounded once. At least two inputs; out may be one of them. False if the type has no
   arithmetic. */
bool reduce(void* out, const void* const* in, int inputs, size_t count, int type, int op, bool exact);
bool can_reduce(int type);

} // namespace nccl
} // namespace cuda_cpu

struct ncclComm {
    cuda_cpu::nccl::WorldRef world;
};
