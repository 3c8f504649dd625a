/* llmc_zero/checkpoint_temporary.cuh - the calls of the operating system around a file that has no name of its own yet.

   Nothing here knows ranks or devices. Every call that a signal may break off is made again (zero_retry).

   defines: zero_folder_of, zero_save_remove_stale, zero_save_room, zero_save_mark, zero_save_check_mark,
            zero_save_sync_file, zero_save_sync_folder
*/
#ifndef LLMC_ZERO_CHECKPOINT_TEMPORARY_CUH_INCLUDED
#define LLMC_ZERO_CHECKPOINT_TEMPORARY_CUH_INCLUDED

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <time.h>

#include "checkpoint_parts.cuh"

static inline std::string zero_folder_of(const std::string& path) {
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

/* Deletes what a broken run has left under a temporary name; nothing there is fine. A process that still writes to it, as
   rank 0, holds a lock: then it is left, and *busy is 1. */
static inline ZeroResult zero_save_remove_stale(const char* name, int* busy) {
    const int fd = zero_retry([&]() { return open(name, O_WRONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW); });
    *busy = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    ZeroResult result = zero_ok();
    if (!*busy && unlink(name) != 0 && errno != ENOENT)
        result = zero_error(ZERO_ERROR_SYSTEM, "%s is in the way: %s", zero_base_name(name), strerror(errno));
    if (fd >= 0) close(fd);
    return result;
}

/* Room on the disk, asked for where the file system can do that, so that a full one is seen before the work. */
static inline ZeroResult zero_save_room(int fd, uint64_t bytes) {
    int failed = zero_retry([&]() { return fallocate(fd, 0, 0, (off_t)bytes); }) != 0;
    if (failed && (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL || errno == EINTR))
        failed = ftruncate(fd, (off_t)bytes) != 0;
    if (!failed) return zero_ok();
    return zero_error(ZERO_ERROR_SYSTEM, "no room for %.3f MB: %s", 1e-6 * (double)bytes, strerror(errno));
}

/* A number that no other file begins with: by it the other ranks know the file that rank 0 has made. */
static inline uint64_t zero_save_mark(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return zero_mix((uint64_t)now.tv_nsec ^ zero_mix((uint64_t)now.tv_sec ^ zero_mix((uint64_t)getpid())));
}

/* Whether `name` is the file of that mark. It is read through a descriptor of its own: one that reads and writes would
   have a client of a network's file system fetch whole pages and write them back. */
static inline ZeroResult zero_save_check_mark(const char* name, uint64_t mark) {
    uint64_t found = ~mark;
    const int fd = zero_retry([&]() { return open(name, O_RDONLY | O_CLOEXEC | O_NONBLOCK); });
    if (fd < 0)
        return zero_error(ZERO_ERROR_SYSTEM,
                          "cannot open %s, which rank 0 has made: %s; all ranks must see one folder",
                          zero_base_name(name), strerror(errno));
    ZeroResult result = zero_file_read(fd, &found, sizeof(found), 0);
    close(fd);
    if (result.code == ZERO_ERROR_SYSTEM || found == mark) return result;
    return zero_error(ZERO_ERROR_SYSTEM,
                      "%s is not the file that rank 0 has made; all ranks must see one folder",
                      zero_base_name(name));
}

static inline ZeroResult zero_save_sync_file(int fd) {
    if (zero_retry([&]() { return fsync(fd); }) == 0) return zero_ok();
    return zero_error(ZERO_ERROR_SYSTEM, "fsync: %s", strerror(errno));
}

static inline ZeroResult zero_save_sync_folder(const std::string& folder) {
    int fd = zero_retry([&]() { return open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
    int failed = fd < 0 || (zero_retry([&]() { return fsync(fd); }) != 0 &&
                            errno != EINVAL); /* EINVAL: this file system has no such thing */
    ZeroResult result = zero_ok();
    if (failed)
        result = zero_error(ZERO_ERROR_SYSTEM,
                            "it is written and has its name, but the folder could not be synced: %s",
                            strerror(errno));
    if (fd >= 0) close(fd);
    return result;
}

#endif /* LLMC_ZERO_CHECKPOINT_TEMPORARY_CUH_INCLUDED */
