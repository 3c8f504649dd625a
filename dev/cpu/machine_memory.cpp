/* dev/cpu/machine_memory.cpp - how much memory the machine can still give, and the lock to ask it under */
#include "memory.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>

namespace cuda_cpu {

static const size_t NO_LIMIT = ~(size_t)0;

/* The number after `key` in a file of "key number" lines; with key "" the file is one number ("max": no
   limit). */
static size_t number_in(const std::string& path, const char* key, size_t fallback) {
    FILE* file = fopen(path.c_str(), "r");
    if (!file) return fallback;
    char line[256];
    size_t value = fallback, length = strlen(key);
    while (fgets(line, sizeof(line), file)) {
        if (strncmp(line, key, length)) continue;
        char* end;
        unsigned long long number = strtoull(line + length, &end, 10);
        if (end != line + length) value = (size_t)number;
        break;
    }
    fclose(file);
    return value;
}

/* The cgroup's free bytes and limit, over all levels that have one; its page cache counts as free. */
static void cgroup_memory(size_t* available, size_t* limit) {
    *available = *limit = NO_LIMIT;
    std::string path;
    if (FILE* file = fopen("/proc/self/cgroup", "r")) {
        char line[1024];
        while (fgets(line, sizeof(line), file))
            if (!strncmp(line, "0::", 3)) path.assign(line + 3, strcspn(line + 3, "\n"));
        fclose(file);
    }
    for (;;) { // version 2: every level up to the root
        std::string folder = "/sys/fs/cgroup" + path;
        size_t most = number_in(folder + "/memory.max", "", NO_LIMIT);
        if (most != NO_LIMIT) {
            size_t used = number_in(folder + "/memory.current", "", 0);
            size_t cache = number_in(folder + "/memory.stat", "inactive_file ", 0) +
                           number_in(folder + "/memory.stat", "active_file ", 0);
            used -= std::min(used, cache);
            *limit = std::min(*limit, most);
            *available = std::min(*available, most - std::min(most, used));
        }
        size_t slash = path.rfind('/');
        if (path.empty() || slash == std::string::npos) break;
        path.resize(slash);
    }
    size_t most = number_in("/sys/fs/cgroup/memory/memory.limit_in_bytes", "", NO_LIMIT); // version 1
    if (most < (size_t)1 << 60) {
        size_t used = number_in("/sys/fs/cgroup/memory/memory.usage_in_bytes", "", 0);
        size_t cache = number_in("/sys/fs/cgroup/memory/memory.stat", "total_inactive_file ", 0);
        used -= std::min(used, cache);
        *limit = std::min(*limit, most);
        *available = std::min(*available, most - std::min(most, used));
    }
}

size_t machine_total() {
    size_t available, limit;
    cgroup_memory(&available, &limit);
    return std::min(limit, number_in("/proc/meminfo", "MemTotal:", NO_LIMIT / 1024) * 1024);
}

size_t machine_available() {
    size_t available, limit;
    cgroup_memory(&available, &limit);
    size_t total = std::min(limit, number_in("/proc/meminfo", "MemTotal:", NO_LIMIT / 1024) * 1024);
    available = std::min(available, number_in("/proc/meminfo", "MemAvailable:", NO_LIMIT / 1024) * 1024);
    size_t reserve = std::max(total / 20, (size_t)512 << 20);
    return available > reserve ? available - reserve : 0;
}

MachineLock::MachineLock(bool wanted) : fd(-1) {
    if (!wanted) return;
    char path[64];
    snprintf(path, sizeof(path), "/tmp/cuda_cpu_%u.lock", (unsigned)getuid());
    fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    // Without the lock the check is still made, only not exclusively: a holder that is stopped stops nobody.
    for (double left = timeout_seconds(); fd >= 0 && left > 0 && flock(fd, LOCK_EX | LOCK_NB); left -= 1e-3)
        usleep(1000);
}

MachineLock::~MachineLock() {
    if (fd >= 0) close(fd);
}

} // namespace cuda_cpu
