/* dev/cpu/nccl_collectives.cpp - one work item of the CPU build's NCCL.

   A collective: publish the arguments and where the data lies, meet, compare with everybody's arguments, read
   what is ours from the peers' device memory in place, meet again so that the buffers may be reused.

   Orders of summation, as a ring has them:
     reduce-scatter   slice r starts at the rank after r and ends at r
     all-reduce       pieces of 512 elements; piece i as if rank i % ranks owned it. So more than two ranks
                      get other bits than from a reduce-scatter, and the same bits every time.
     reduce           starts at the rank after the root and ends at the root
   "After" is in the order of CUDA_CPU_NCCL_RING. CUDA_CPU_NCCL=exact: ranks 0, 1, 2, ... in fp32, rounded
   once.

   In place is safe because the one element range that a rank overwrites before the last meeting is read by
   that rank only: its own slice (reduce-scatter, all-reduce's first half), or nothing that anybody sends
   (all-gather).
*/
#include "nccl_world.h"
#include <algorithm>
#include <string.h>

namespace cuda_cpu {
namespace nccl {
namespace {

const size_t PIECE = 512;

const char* const KINDS[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast",
                             "ncclReduce",    "ncclAlltoAll",      "ncclGather",    "ncclScatter",
                             "ncclSend",      "ncclRecv"};

struct Range {
    const char* name;
    const char* base;
    size_t bytes;
};

/* What a call reads and writes on this rank. */
void ranges(const World& w, const Call& c, Range* send, Range* recv) {
    size_t one = c.count * type_bytes(c.type), all = one * w.ranks;
    bool root = w.rank == c.root;
    size_t s = one, r = one;
    switch (c.kind) {
    case ALL_REDUCE: break;
    case REDUCE_SCATTER: s = all; break;
    case ALL_GATHER: r = all; break;
    case BROADCAST: s = root ? one : 0; break;
    case REDUCE: r = root ? one : 0; break;
    case ALL_TO_ALL: s = r = all; break;
    case GATHER: r = root ? all : 0; break;
    case SCATTER: s = root ? all : 0; break;
    case SEND: r = 0; break;
    case RECV: s = 0; break;
    }
    *send = Range{"sendbuff", (const char*)c.send, s};
    *recv = Range{"recvbuff", (const char*)c.recv, r};
}

/* The in-place forms that NCCL allows: recvbuff is the part of sendbuff that is this rank's, or the
   reverse. */
bool in_place(const World& w, const Call& c) {
    const char *s = (const char*)c.send, *r = (const char*)c.recv;
    size_t own = c.count * type_bytes(c.type) * w.rank;
    switch (c.kind) {
    case REDUCE_SCATTER:
    case SCATTER: return r == s + own;
    case ALL_GATHER:
    case GATHER: return s == r + own;
    case ALL_REDUCE:
    case BROADCAST:
    case REDUCE: return s == r;
    default: return false;
    }
}

/* The ranks in the order in which the ring sums what `owner` is to have. */
void ring_order(const World& w, int owner, int* order) {
    const int* ring = w.control->ring;
    int at = 0;
    while (ring[at] != owner) at++;
    for (int i = 0; i < w.ranks; i++) order[i] = w.control->exact ? i : ring[(at + 1 + i) % w.ranks];
}

/* The send buffers of all ranks, from a byte offset on. */
bool inputs(World& w, size_t bytes, const char** base) {
    for (int r = 0; r < w.ranks; r++) {
        base[r] = world_memory(w, r, w.control->slots[r].published.send_offset + bytes);
        if (!base[r]) return false;
    }
    return true;
}

bool sum_slice(World& w, const Call& c, int owner, size_t first) {
    int order[MAX_RANKS];
    const char* base[MAX_RANKS];
    const void* in[MAX_RANKS];
    if (!inputs(w, first * type_bytes(c.type), base)) return false;
    ring_order(w, owner, order);
    for (int i = 0; i < w.ranks; i++) in[i] = base[order[i]];
    return reduce(c.recv, in, w.ranks, c.count, c.type, c.op, w.control->exact);
}

/* The elements of an all-reduce that rank r sums: whole pieces, nearly the same number for all. */
size_t part_begin(const World& w, uint64_t count, int r) {
    size_t pieces = (count + PIECE - 1) / PIECE;
    return std::min((size_t)count, pieces * r / w.ranks * PIECE);
}

bool all_reduce(World& w, const Call& c) {
    size_t size = type_bytes(c.type), begin = part_begin(w, c.count, w.rank);
    size_t end = part_begin(w, c.count, w.rank + 1);
    const char* base[MAX_RANKS];
    const void* in[MAX_RANKS];
    int orders[MAX_RANKS][MAX_RANKS];
    if (!inputs(w, 0, base)) return false;
    for (int r = 0; r < w.ranks; r++) ring_order(w, r, orders[r]);
    for (size_t i = begin; i < end; i += PIECE) {
        const int* order = orders[i / PIECE % w.ranks];
        for (int k = 0; k < w.ranks; k++) in[k] = base[order[k]] + i * size;
        reduce((char*)c.recv + i * size, in, w.ranks, std::min(PIECE, end - i), c.type, c.op,
               w.control->exact);
    }
    if (!world_meet(w, KINDS[c.kind])) return false;
    for (int k = 1; k < w.ranks; k++) { // every rank starts with another peer
        int r = (w.rank + k) % w.ranks;
        size_t from = part_begin(w, c.count, r) * size, to = part_begin(w, c.count, r + 1) * size;
        const char* peer = world_memory(w, r, w.control->slots[r].published.recv_offset);
        if (!peer) return false;
        memcpy((char*)c.recv + from, peer + from, to - from);
    }
    return true;
}

/* out = the bytes at `offset` in the send buffer of rank r. */
bool copy_from(World& w, int r, size_t offset, void* out, size_t bytes) {
    const char* in = world_memory(w, r, w.control->slots[r].published.send_offset + offset);
    if (!in) return false;
    if (in != out && bytes) // in place; a peer's memory has another address here
        memcpy(out, in, bytes);
    return true;
}

bool copy_from_all(World& w, const Call& c, size_t offset, size_t bytes) {
    for (int k = 0; k < w.ranks; k++) {
        int r = (w.rank + k) % w.ranks;
        if (!copy_from(w, r, offset, (char*)c.recv + r * bytes, bytes)) return false;
    }
    return true;
}

bool move(World& w, const Call& c) {
    size_t bytes = c.count * type_bytes(c.type), own = bytes * w.rank;
    bool root = w.rank == c.root;
    switch (c.kind) {
    case ALL_REDUCE: return w.ranks == 1 ? copy_from(w, 0, 0, c.recv, bytes) : all_reduce(w, c);
    case REDUCE_SCATTER:
        return w.ranks == 1 ? copy_from(w, 0, 0, c.recv, bytes) : sum_slice(w, c, w.rank, c.count * w.rank);
    case REDUCE:
        return w.ranks == 1 ? copy_from(w, 0, 0, c.recv, bytes) : !root || sum_slice(w, c, w.rank, 0);
    case ALL_GATHER: return copy_from_all(w, c, 0, bytes);
    case ALL_TO_ALL: return copy_from_all(w, c, own, bytes);
    case GATHER: return !root || copy_from_all(w, c, 0, bytes);
    case BROADCAST: return copy_from(w, c.root, 0, c.recv, bytes);
    case SCATTER: return copy_from(w, c.root, own, c.recv, bytes);
    default: return false;
    }
}

bool same(const Published& a, const Published& b) {
    return a.kind == b.kind && a.count == b.count && a.type == b.type && a.op == b.op && a.root == b.root;
}

/* All have arrived: does everybody mean the same? Every rank compares with rank 0, so all find the same
   pair. */
void compare(const World& w) {
    const Slot* s = w.control->slots;
    for (int r = 1; r < w.ranks; r++)
        if (!same(s[0].published, s[r].published))
            fatal("the ranks disagree: rank 0: %s, rank %d: %s", describe(s[0].published).c_str(), r,
                  describe(s[r].published).c_str());
}

} // namespace

size_t type_bytes(int type) {
    static const size_t BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < 12 ? BYTES[type] : 0;
}

const char* type_name(int type) {
    static const char* const NAMES[] = {"int8", "uint8", "int32",  "uint32",   "int64",      "uint64",
                                        "half", "float", "double", "bfloat16", "float8e4m3", "float8e5m2"};
    return type >= 0 && type < 12 ? NAMES[type] : "no type";
}

Published publishable(const Call& c) {
    char* base = heap().base;
    return Published{c.kind,
                     c.type,
                     c.op,
                     c.root,
                     c.count,
                     c.send ? (uint64_t)((const char*)c.send - base) : 0,
                     c.recv ? (uint64_t)((char*)c.recv - base) : 0};
}

std::string describe(const Published& p) {
    static const char* const OPS[] = {"sum", "prod", "max", "min", "avg"};
    std::string s = std::string(KINDS[p.kind]) + " " + std::to_string(p.count) + " " + type_name(p.type);
    if (p.kind == ALL_REDUCE || p.kind == REDUCE_SCATTER || p.kind == REDUCE)
        s += std::string(" ") + OPS[p.op];
    if (p.kind == BROADCAST || p.kind == REDUCE || p.kind == GATHER || p.kind == SCATTER)
        s += " root " + std::to_string(p.root);
    return s;
}

void check_buffers(const World& w, const Call& call) {
    Range b[2];
    char text[300];
    ranges(w, call, &b[0], &b[1]);
    for (const Range& x : b)
        if (x.bytes && !in_device_memory(x.base, x.bytes, text, sizeof text))
            fatal("rank %d: %s: %s %p, %zu bytes: %s", w.rank, describe(publishable(call)).c_str(), x.name,
                  (const void*)x.base, x.bytes, text);
    bool overlap =
        b[0].bytes && b[1].bytes && b[0].base < b[1].base + b[1].bytes && b[1].base < b[0].base + b[0].bytes;
    if (overlap && !in_place(w, call))
        fatal("rank %d: %s: recvbuff overlaps sendbuff, and it is not the in-place form (recvbuff - sendbuff "
              "= %td "
              "bytes)",
              w.rank, describe(publishable(call)).c_str(), b[1].base - b[0].base);
}

cudaError_t run_collective(World& w, const Call& call) {
    const char* what = KINDS[call.kind];
    if (world_failed(w, nullptr, nullptr)) return cudaErrorUnknown;
    check_buffers(w, call); // again: since the call it may have been freed
    w.control->slots[w.rank].published = publishable(call);
    if (!world_meet(w, what)) return cudaErrorUnknown;
    compare(w);
    return move(w, call) && world_meet(w, what) ? cudaSuccess : cudaErrorUnknown;
}

} // namespace nccl
} // namespace cuda_cpu
