/* dev/cpu/nccl_peers.cpp - waiting for the other ranks, noticing dead ones, and reading their memory.

   Waiting: a few turns of sched_yield, then sleep on one futex word for all ("the bell"), at most 50 ms at
   a time, since there may be more ranks than cores. A rank that is missing is looked up in /proc after each
   such sleep: gone, a zombie, or another process under its number means dead. CUDA_CPU_NCCL_DEATH=silent: nobody
   looks, as inside a node NCCL's kernels do not, and the wait goes on until this rank aborts.
*/
#include "nccl_world.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <map>
#include <mutex>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace cuda_cpu {
namespace nccl {

uint64_t process_start(int pid) {
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t n = read(fd, line, sizeof line - 1);
    close(fd);
    if (n <= 0) return 0;
    line[n] = 0;
    const char* p = strrchr(line, ')'); // the name before it may hold anything
    char state = 0;
    unsigned long long start = 0;
    if (!p ||
        sscanf(p + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
               &state, &start) != 2)
        return 0;
    return state == 'Z' || state == 'X' ? 0 : (uint64_t)start;
}

int open_fd_of(int pid, int fd, int flags, std::string* text) {
    char path[64], line[200];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    int opened = open(path, flags | O_CLOEXEC);
    if (opened < 0) {
        snprintf(line, sizeof line,
                 "cannot open %s (%s): all ranks must run on one machine, under one user, and "
                 "the process that made the id must still run",
                 path, strerror(errno));
        *text = line;
    }
    return opened;
}

namespace {

double now() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

bool alive(const Slot& s) { return process_start(s.pid) == s.start_time; }

/* Where another process's heap is mapped in ours. Kept for the life of the process, since communicators come
   and go and a mapping costs address space only. */
const char* map_heap(const Slot& s, std::string* text) {
    static std::mutex mutex;
    static std::map<std::pair<int, uint64_t>, const char*> mapped;
    if (s.pid == getpid()) return heap().base;
    std::lock_guard<std::mutex> lock(mutex);
    const char*& base = mapped[std::make_pair(s.pid, s.start_time)];
    if (base) return base;
    int fd = open_fd_of(s.pid, s.heap_fd, O_RDONLY, text);
    if (fd < 0) return nullptr;
    void* p = mmap(nullptr, s.heap_bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0);
    close(fd);
    if (p == MAP_FAILED) {
        *text = std::string("cannot map the device memory of a peer: ") + strerror(errno);
        return nullptr;
    }
    return base = (const char*)p;
}

/* Says that work spins once it has waited longer than a peer that lives mostly takes, and takes it back. */
class Spin {
  public:
    void waited(double seconds) {
        if (!said && seconds > 0.25) work_spins(said = true);
    }
    ~Spin() {
        if (said) work_spins(false);
    }

  private:
    bool said = false;
};

bool sleep_on(Control* c, uint32_t bell) // true: 50 ms went by
{
    struct timespec t = {0, 50 * 1000 * 1000};
    c->sleepers.fetch_add(1);
    long r = syscall(SYS_futex, &c->bell, FUTEX_WAIT, bell, &t, nullptr, 0);
    bool timed_out = r < 0 && errno == ETIMEDOUT;
    c->sleepers.fetch_sub(1);
    return timed_out;
}

std::string list(const std::vector<int>& ranks) {
    std::string s = ranks.size() == 1 ? "rank " : "ranks ";
    for (size_t i = 0; i < ranks.size(); i++) s += (i ? ", " : "") + std::to_string(ranks[i]);
    return s;
}

/* Looks for a reason why the ranks that `lacks` names will not come. True if there is one (and says so). */
bool give_up(World& w, const char* what, const std::function<bool(int)>& lacks, double waited) {
    std::vector<int> late;
    for (int r = 0; r < w.ranks; r++) {
        Slot& s = w.control->slots[r];
        if (!lacks(r)) continue;
        late.push_back(r);
        if (s.claimed.load() != 2) continue; // not here yet
        bool left = s.left.load(), dead = !left && !alive(s);
        if ((left || dead) && lacks(r)) { // asked again: it may have arrived just before it went
            world_fail(w, ncclRemoteError, "%s: rank %d %s (noticed by rank %d)", what, r,
                       left ? "has destroyed its communicator" : "is dead", w.rank);
            return true;
        }
    }
    if (waited < timeout_seconds() || late.empty()) return false;
    world_fail(w, ncclRemoteError, "%s: rank %d has waited %.0f s for %s (CUDA_CPU_TIMEOUT)", what, w.rank,
               waited, list(late).c_str());
    return true;
}

} // namespace

void world_ring(Control* c) {
    c->bell.fetch_add(1);
    if (c->sleepers.load()) syscall(SYS_futex, &c->bell, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}

void world_fail(World& w, ncclResult_t result, const char* format, ...) {
    Control* c = w.control;
    int none = 0;
    if (!c->failure.compare_exchange_strong(none, 1)) {
        for (int i = 0; i < 100000 && c->failure.load() != 2; i++)
            sched_yield(); // another rank is writing its text
        return;
    }
    va_list args;
    va_start(args, format);
    vsnprintf(c->failure_text, sizeof c->failure_text, format, args);
    va_end(args);
    c->failure_result = result;
    c->failure.store(2);
    world_ring(c);
}

bool world_failed(const World& w, ncclResult_t* result, std::string* text) {
    if (w.control->failure.load() != 2) return false;
    if (result) *result = (ncclResult_t)w.control->failure_result;
    if (text) *text = w.control->failure_text;
    return true;
}

bool world_wait(World& w, const char* what, const std::function<bool(int)>& lacks) {
    static const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    Control* c = w.control;
    const int spins = w.ranks <= cores ? 2000 : 0, yields = spins + 20;
    double start = now(), looked = start;
    Spin spin;
    for (int turn = 0;; turn++) {
        uint32_t bell = c->bell.load();
        bool all = true;
        for (int r = 0; r < w.ranks && all; r++) all = !lacks(r);
        if (all) return true; // even if the communicator has failed since: what we wait for is there
        if (c->failure.load() == 2 || w.aborted.load()) return false;
        if (turn < spins) continue;
        if (turn < yields) {
            sched_yield();
            continue;
        }
        bool slept = sleep_on(c, bell);
        double t = now();
        if (slept || t - looked > 0.05) {
            looked = t;
            if (silent_deaths())
                spin.waited(t - start);
            else if (give_up(w, what, lacks, t - start))
                return false;
        }
    }
}

bool world_meet(World& w, const char* what) {
    uint32_t mine = ++w.meetings;
    w.control->slots[w.rank].meetings.store(mine);
    world_ring(w.control);
    return world_wait(w, what,
                      [&](int r) { return (int32_t)(w.control->slots[r].meetings.load() - mine) < 0; });
}

const char* world_memory(World& w, int rank, uint64_t offset) {
    if (!w.peer_base[rank]) {
        std::string text;
        w.peer_base[rank] = map_heap(w.control->slots[rank], &text);
        if (!w.peer_base[rank]) {
            if (silent_deaths()) { // it has died since
                world_wait(w, "device memory of a peer", [rank](int r) { return r == rank; });
                return nullptr;
            }
            world_fail(w, ncclSystemError, "rank %d: device memory of rank %d: %s", w.rank, rank,
                       text.c_str());
            return nullptr;
        }
    }
    return w.peer_base[rank] + offset;
}

} // namespace nccl
} // namespace cuda_cpu
