/* dev/cpu/nccl_world.cpp - start-up of the CPU build's NCCL.

   An ncclUniqueId holds pid, file descriptor and a random number. The ranks of one machine open
   /proc/PID/fd/FD, map the control block, and find there each other's heap in the same way. The process that
   made the id must live until all have joined; after that it may go.
*/
#include "nccl_world.h"
#include <algorithm>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

namespace cuda_cpu {
namespace nccl {
namespace {

const char MAGIC[8] = "cpunccl";

struct Id {
    char magic[8];
    int pid, fd;
    uint64_t nonce;
};
static_assert(sizeof(Id) <= NCCL_UNIQUE_ID_BYTES, "the id must fit");

/* CUDA_CPU_NCCL_RING: the ranks in the order of the ring. Of another length than this communicator: not meant
   for it. */
bool read_ring(int ranks, int* ring, std::string* text) {
    for (int i = 0; i < ranks; i++) ring[i] = i;
    const char* s = getenv("CUDA_CPU_NCCL_RING");
    if (!s || !*s) return true;
    std::vector<int> order;
    for (char* end; *s; s = *end == ',' ? end + 1 : end) {
        long r = strtol(s, &end, 10);
        if (end == s || (*end && *end != ',') || r < 0 || r >= MAX_RANKS) {
            *text = std::string("CUDA_CPU_NCCL_RING must be ranks with commas between, not ") + s;
            return false;
        }
        order.push_back((int)r);
    }
    std::vector<int> seen(MAX_RANKS, 0);
    for (int r : order)
        if (r >= (int)order.size() || seen[r]++) {
            *text = "CUDA_CPU_NCCL_RING must name every rank once";
            return false;
        }
    if ((int)order.size() == ranks) std::copy(order.begin(), order.end(), ring);
    return true;
}

Control* map_control(int fd) {
    void* p = mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    return p == MAP_FAILED ? nullptr : (Control*)p;
}

/* Takes our place in the block, or says why it cannot be ours. */
void take_place(World& w) {
    Control* c = w.control;
    int first = 0;
    std::string text;
    if (!c->ranks.compare_exchange_strong(first, w.ranks) && first != w.ranks)
        return world_fail(w, ncclInvalidArgument, "ncclCommInitRank: rank %d says %d ranks, another said %d",
                          w.rank, w.ranks, first);
    if (w.rank < 0 || w.rank >= w.ranks)
        return world_fail(w, ncclInvalidArgument, "ncclCommInitRank: rank %d of %d", w.rank, w.ranks);
    Slot& s = c->slots[w.rank];
    int nobody = 0;
    if (!s.claimed.compare_exchange_strong(nobody, 1))
        return world_fail(w, ncclInvalidArgument,
                          "ncclCommInitRank: two callers say that they are rank %d of %d "
                          "(processes %d and %d)",
                          w.rank, w.ranks, s.pid, (int)getpid());
    Heap h = heap();
    s.pid = getpid();
    s.start_time = process_start(s.pid);
    s.heap_fd = h.fd;
    s.heap_bytes = h.bytes;
    if (w.rank == 0) { // W2: written before rank 0 counts as joined
        const char* mode = getenv("CUDA_CPU_NCCL");
        if (mode && *mode && strcmp(mode, "exact") && strcmp(mode, "ring"))
            world_fail(w, ncclInvalidUsage, "CUDA_CPU_NCCL must be ring or exact, not %s", mode);
        c->exact = mode && !strcmp(mode, "exact");
        if (!read_ring(w.ranks, c->ring, &text)) world_fail(w, ncclInvalidUsage, "%s", text.c_str());
    }
    if (world_failed(w, nullptr, nullptr)) return; // else a peer could find everybody there and go on
    s.claimed.store(2);
    c->joined.fetch_add(1);
    world_ring(c);
}

} // namespace

World::~World() {
    if (control) munmap(control, sizeof(Control));
}

ncclResult_t world_create(ncclUniqueId* id, std::string* text) {
    Id mine = {};
    memcpy(mine.magic, MAGIC, sizeof MAGIC);
    mine.pid = getpid();
    mine.fd = memfd_create("nccl", MFD_CLOEXEC);
    if (mine.fd < 0 || ftruncate(mine.fd, sizeof(Control)) ||
        getrandom(&mine.nonce, sizeof mine.nonce, 0) != sizeof mine.nonce) {
        *text = std::string("ncclGetUniqueId: no shared memory: ") + strerror(errno);
        return ncclSystemError;
    }
    Control* c = map_control(mine.fd);
    if (!c) {
        *text = std::string("ncclGetUniqueId: cannot map shared memory: ") + strerror(errno);
        close(mine.fd);
        return ncclSystemError;
    }
    c->nonce = mine.nonce; // all else starts as zero
    munmap(c, sizeof(Control));
    memset(id, 0, sizeof *id);
    memcpy(id->internal, &mine, sizeof mine);
    return ncclSuccess;
}

ncclResult_t world_join(const ncclUniqueId& id, int ranks, int rank, WorldRef* out, std::string* text) {
    Id where;
    memcpy(&where, id.internal, sizeof where);
    if (memcmp(where.magic, MAGIC, sizeof MAGIC)) {
        *text = "ncclCommInitRank: this is no ncclUniqueId of the CPU build of NCCL";
        return ncclInvalidArgument;
    }
    int fd = open_fd_of(where.pid, where.fd, O_RDWR, text);
    while (fd < 0 && silent_deaths() && !process_start(where.pid)) sleep(1); // for ever: nobody answers
    if (fd < 0) return ncclSystemError;
    WorldRef w = std::make_shared<World>();
    w->control = lseek(fd, 0, SEEK_END) == (off_t)sizeof(Control) ? map_control(fd) : nullptr;
    close(fd);
    if (!w->control || w->control->nonce != where.nonce) {
        *text = "ncclCommInitRank: this ncclUniqueId is no longer valid (one id makes one communicator)";
        return ncclInvalidArgument;
    }
    Control* c = w->control;
    w->rank = rank;
    w->ranks = ranks;
    if (c->ranks.load() && c->joined.load() == c->ranks.load()) {
        *text = "ncclCommInitRank: all ranks of this ncclUniqueId are there already (one id makes one "
                "communicator)";
        return ncclInvalidUsage;
    }
    take_place(*w);
    ncclResult_t result = ncclInternalError;
    bool fine = !world_failed(*w, &result, text) && // a rank that is wrong must not wait as if it were right
                world_wait(*w, "ncclCommInitRank", [&](int r) { return c->slots[r].claimed.load() != 2; });
    if (!fine) {
        world_failed(*w, &result, text);
        return result;
    }
    int closer = 0; // everybody who may come has come: the maker's first rank closes the maker's descriptor
    while (closer < rank && c->slots[closer].pid != where.pid) closer++;
    if (where.pid == getpid() && closer == rank) close(where.fd);
    *out = w;
    return ncclSuccess;
}

} // namespace nccl
} // namespace cuda_cpu
