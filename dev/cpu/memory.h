/* dev/cpu/memory.h - between memory.cpp (the heap), machine_memory.cpp (how much there is) and copies.cpp */
#pragma once
#include "internal.h"

namespace cuda_cpu {

/* Bytes that can still be taken without driving the machine out of memory: MemAvailable and the cgroup's
   limit, less a reserve of 5% (at least 512 MB). */
size_t machine_available();
size_t machine_total(); // MemTotal or the cgroup's limit, if that is lower

/* Held between asking machine_available and having touched the pages, so that processes of one user do not
   count the same free memory twice. */
class MachineLock {
  public:
    explicit MachineLock(bool wanted);
    ~MachineLock();
    MachineLock(const MachineLock&) = delete;
    MachineLock& operator=(const MachineLock&) = delete;

  private:
    int fd;
};

/* Pinned host memory: true if [pointer, pointer + bytes) lies in one pinned block. */
bool in_pinned_memory(const void* pointer, size_t bytes);

} // namespace cuda_cpu
