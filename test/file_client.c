/* test/file_client.c - for LD_PRELOAD: the file calls of one process as a client of a network's file system makes them, a
   log of them, and one that fails. Files named step_* only (checkpoints), wherever they lie, and their folder's syncs.

       FILE_CLIENT_CACHE=1        pages are kept in this process, as NFS does: what is written waits for fsync or close; a
                                  descriptor that also reads (O_RDWR) fetches a page before it changes a part of it, and the
                                  whole page goes back, with whatever another client has written beside it in the
                                  meantime undone; so for one that only writes where the page was read before. Else
                                  the changed bytes go back. Opening drops clean pages (close-to-open consistency).
       FILE_CLIENT_PAGE=BYTES     of a page (4096; up to 65536)
       FILE_CLIENT_LOG=FILE       a line a call: "PID CALL NAME OFFSET BYTES FLAGS"
       FILE_CLIENT_FAIL=CALL:N:E  the N-th such call fails with errno E; E "kill": the process is killed before it,
                                  "killed": after it
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE_MAX = 65536, PAGES = 16384, FILES = 16, DESCRIPTORS = 1024 };

typedef struct Page {
    int whole;    /* as the server had it when it was read */
    int from, to; /* bytes to write back; from == to: none */
    char data[];
} Page;

typedef struct File { /* one of the server's, with this client's pages of it */
    dev_t device;
    ino_t inode;
    off_t size; /* as far as this client has written */
    Page* pages[PAGES];
} File;

static File files[FILES];
static struct {
    char name[128]; /* "": none of ours */
    int flags;
    File* file;
} descriptors[DESCRIPTORS];

static int page_bytes(void) {
    const char* text = getenv("FILE_CLIENT_PAGE");
    return text ? atoi(text) : 4096;
}
static int caches(void) { return getenv("FILE_CLIENT_CACHE") != NULL; }

static void note(const char* call, const char* name, long long offset, long long bytes, int flags) {
    static int log = -1;
    char line[400];
    if (!getenv("FILE_CLIENT_LOG")) return;
    if (log < 0)
        log = (int)syscall(SYS_openat, AT_FDCWD, getenv("FILE_CLIENT_LOG"),
                           O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    const int length =
        snprintf(line, sizeof(line), "%d %s %s %lld %lld %s\n", (int)getpid(), call, name, offset, bytes,
                 (flags & O_ACCMODE) == O_WRONLY ? "writes"
                 : (flags & O_ACCMODE) == O_RDWR ? "reads and writes"
                                                 : "reads");
    syscall(SYS_write, log, line, length);
}

/* The error that this call shall have, or 0. *kill_after: the process ends once it is made. */
static int fault(const char* call, int* kill_after) {
    static int seen = 0;
    const char *text = getenv("FILE_CLIENT_FAIL"), *at = text ? strchr(text, ':') : NULL;
    *kill_after = 0;
    if (!at || strncmp(text, call, (size_t)(at - text)) != 0 || call[at - text]) return 0;
    if (++seen != atoi(at + 1)) return 0;
    at = strchr(at + 1, ':') + 1;
    if (strcmp(at, "kill") == 0) kill(getpid(), SIGKILL);
    *kill_after = strcmp(at, "killed") == 0;
    return atoi(at);
}
#define CALL(call, name, offset, bytes, flags, failed, made)              \
    do {                                                                  \
        int after_;                                                       \
        note(call, name, (long long)(offset), (long long)(bytes), flags); \
        const int error_ = fault(call, &after_);                          \
        if (error_) return errno = error_, failed;                        \
        made;                                                             \
        if (after_) kill(getpid(), SIGKILL);                              \
    } while (0)

static const char* ours(const char* path) {
    const char* slash = strrchr(path, '/');
    const char* name = slash ? slash + 1 : path;
    return strncmp(name, "step_", 5) == 0 ? name : NULL;
}
static int known(int fd) { return fd >= 0 && fd < DESCRIPTORS && descriptors[fd].name[0]; }

/* ------------------------------------------------------------------ the cache */

static void write_back(int fd, File* file, size_t p) {
    Page* page = file->pages[p];
    if (!page || page->from == page->to) return;
    syscall(SYS_pwrite64, fd, page->data + page->from, page->to - page->from,
            (off_t)p * page_bytes() + page->from);
    page->from = page->to = 0;
}
static void write_all_back(int fd) {
    for (size_t p = 0; p < PAGES; p++) write_back(fd, descriptors[fd].file, p);
}

static File* file_of(int fd) {
    struct stat status;
    File* free_one = NULL;
    syscall(SYS_fstat, fd, &status);
    for (int i = 0; i < FILES; i++) {
        if (files[i].inode == status.st_ino && files[i].device == status.st_dev) return &files[i];
        if (!files[i].inode) free_one = &files[i];
    }
    if (!free_one) free_one = &files[0]; /* long forgotten */
    for (size_t p = 0; p < PAGES; p++) free(free_one->pages[p]);
    memset(free_one, 0, sizeof(*free_one));
    free_one->inode = status.st_ino, free_one->device = status.st_dev;
    return free_one;
}
static void drop_clean(File* file) {
    for (size_t p = 0; p < PAGES; p++)
        if (file->pages[p] && file->pages[p]->from == file->pages[p]->to) {
            free(file->pages[p]);
            file->pages[p] = NULL;
        }
}

/* Reads through any descriptor: the server does not mind. */
static void fetch(File* file, Page* page, size_t p, int fd) {
    char path[64], data[PAGE_MAX] = {0};
    (void)file;
    if (page->whole) return;
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    const int reader = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    syscall(SYS_pread64, reader, data, page_bytes(), (off_t)p * page_bytes());
    syscall(SYS_close, reader);
    memcpy(data + page->from, page->data + page->from, (size_t)(page->to - page->from));
    memcpy(page->data, data, (size_t)page_bytes());
    page->whole = 1;
}
static Page* page_at(File* file, size_t p) {
    if (!file->pages[p]) file->pages[p] = (Page*)calloc(1, sizeof(Page) + (size_t)page_bytes());
    return file->pages[p];
}

static void cached_write(int fd, const char* from, size_t bytes, off_t offset) {
    File* file = descriptors[fd].file;
    const int size = page_bytes();
    struct stat server;
    syscall(SYS_fstat, fd, &server);
    if (file->size < server.st_size) file->size = server.st_size;
    if (file->size < offset + (off_t)bytes) file->size = offset + (off_t)bytes;
    while (bytes > 0) {
        const size_t p = (size_t)(offset / size);
        const int begin = (int)(offset % size),
                  take = bytes < (size_t)(size - begin) ? (int)bytes : size - begin;
        Page* page = page_at(file, p);
        if ((descriptors[fd].flags & O_ACCMODE) == O_RDWR && take < size) fetch(file, page, p, fd);
        if (page->from != page->to && (begin > page->to || begin + take < page->from))
            write_back(fd, file, p);
        memcpy(page->data + begin, from, (size_t)take);
        if (page->from == page->to) page->from = begin, page->to = begin + take;
        if (begin < page->from) page->from = begin;
        if (begin + take > page->to) page->to = begin + take;
        if (page->whole) { /* all of it goes back, up to the file's end */
            page->from = 0;
            page->to = file->size - (off_t)p * size < size ? (int)(file->size - (off_t)p * size) : size;
        }
        from += take, bytes -= (size_t)take, offset += take;
    }
}

static ssize_t cached_read(int fd, char* to, size_t bytes, off_t offset) {
    File* file = descriptors[fd].file;
    const int size = page_bytes();
    struct stat server;
    size_t done = 0;
    syscall(SYS_fstat, fd, &server);
    const off_t end = server.st_size > file->size ? server.st_size : file->size;
    if (offset >= end) return 0;
    if ((off_t)bytes > end - offset) bytes = (size_t)(end - offset);
    while (done < bytes) {
        const size_t p = (size_t)((offset + (off_t)done) / size);
        const int begin = (int)((offset + (off_t)done) % size);
        const size_t take = bytes - done < (size_t)(size - begin) ? bytes - done : (size_t)(size - begin);
        Page* page = page_at(file, p);
        fetch(file, page, p, fd);
        memcpy(to + done, page->data + begin, take);
        done += take;
    }
    return (ssize_t)done;
}

/* ------------------------------------------------------------------ the calls */

int open(const char* path, int flags, ...) {
    va_list arguments;
    struct stat status;
    const char* name = ours(path);
    int fd = -1;
    va_start(arguments, flags);
    const int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, int) : 0;
    va_end(arguments);
    if (name)
        CALL("open", name, 0, 0, flags, -1, fd = (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode));
    else
        fd = (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
    if (fd < 0 || fd >= DESCRIPTORS) return fd;
    descriptors[fd].name[0] = '\0';
    syscall(SYS_fstat, fd, &status);
    if (!name && (flags & O_DIRECTORY)) name = "folder";
    if (!name || (S_ISDIR(status.st_mode) && strcmp(name, "folder") != 0)) return fd;
    snprintf(descriptors[fd].name, sizeof(descriptors[fd].name), "%s", name);
    descriptors[fd].flags = flags;
    if (S_ISREG(status.st_mode)) {
        descriptors[fd].file = file_of(fd);
        drop_clean(descriptors[fd].file);
    }
    return fd;
}
int open64(const char* path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    const int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, int) : 0;
    va_end(arguments);
    return open(path, flags, mode);
}

int fcntl64(int fd, int command, ...) {
    va_list arguments;
    va_start(arguments, command);
    void* argument = va_arg(arguments, void*);
    va_end(arguments);
    const int result = (int)syscall(SYS_fcntl, fd, command, argument);
    if (known(fd) && command == F_DUPFD_CLOEXEC && result >= 0 && result < DESCRIPTORS)
        descriptors[result] = descriptors[fd];
    return result;
}
int fcntl(int fd, int command, ...) {
    va_list arguments;
    va_start(arguments, command);
    void* argument = va_arg(arguments, void*);
    va_end(arguments);
    return fcntl64(fd, command, argument);
}

ssize_t pwrite(int fd, const void* from, size_t bytes, off_t offset) {
    ssize_t done = (ssize_t)bytes;
    if (!known(fd)) return syscall(SYS_pwrite64, fd, from, bytes, offset);
    CALL("pwrite", descriptors[fd].name, offset, bytes, descriptors[fd].flags, -1,
         if (caches()) cached_write(fd, (const char*)from, bytes, offset);
         else done = syscall(SYS_pwrite64, fd, from, bytes, offset));
    return done;
}
ssize_t pwrite64(int fd, const void* from, size_t bytes, off_t offset) {
    return pwrite(fd, from, bytes, offset);
}

ssize_t pread(int fd, void* to, size_t bytes, off_t offset) {
    ssize_t done = 0;
    if (!known(fd)) return syscall(SYS_pread64, fd, to, bytes, offset);
    CALL("pread", descriptors[fd].name, offset, bytes, descriptors[fd].flags, -1,
         if (caches()) done = cached_read(fd, (char*)to, bytes, offset);
         else done = syscall(SYS_pread64, fd, to, bytes, offset));
    return done;
}
ssize_t pread64(int fd, void* to, size_t bytes, off_t offset) { return pread(fd, to, bytes, offset); }

int fsync(int fd) {
    int result = 0;
    if (!known(fd)) return (int)syscall(SYS_fsync, fd);
    if (descriptors[fd].file && caches()) write_all_back(fd);
    CALL("fsync", descriptors[fd].name, 0, 0, descriptors[fd].flags, -1,
         result = (int)syscall(SYS_fsync, fd));
    return result;
}

int close(int fd) {
    int result = 0;
    if (!known(fd)) return (int)syscall(SYS_close, fd);
    if (descriptors[fd].file && caches() && (descriptors[fd].flags & O_ACCMODE) != O_RDONLY)
        write_all_back(fd);
    char name[128];
    memcpy(name, descriptors[fd].name, sizeof(name));
    descriptors[fd].name[0] = '\0';
    descriptors[fd].file = NULL;
    const int flags = descriptors[fd].flags;
    syscall(SYS_close, fd); /* closed, whatever it returns */
    CALL("close", name, 0, 0, flags, -1, (void)0);
    return result;
}

int fallocate(int fd, int mode, off_t offset, off_t bytes) {
    int result = 0;
    if (!known(fd)) return (int)syscall(SYS_fallocate, fd, mode, offset, bytes);
    CALL("fallocate", descriptors[fd].name, offset, bytes, descriptors[fd].flags, -1,
         result = (int)syscall(SYS_fallocate, fd, mode, offset, bytes));
    return result;
}
int fallocate64(int fd, int mode, off_t offset, off_t bytes) { return fallocate(fd, mode, offset, bytes); }

int rename(const char* from, const char* to) {
    int result = 0;
    if (!ours(from)) return (int)syscall(SYS_renameat, AT_FDCWD, from, AT_FDCWD, to);
    CALL("rename", ours(from), 0, 0, 0, -1,
         result = (int)syscall(SYS_renameat, AT_FDCWD, from, AT_FDCWD, to));
    return result;
}

int unlink(const char* path) {
    int result = 0;
    if (!ours(path)) return (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
    CALL("unlink", ours(path), 0, 0, 0, -1, result = (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0));
    return result;
}
