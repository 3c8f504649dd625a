/* test/file_client.c - for LD_PRELOAD: the file calls of one process as a client of a network's file system makes them, a
   log of them, and one that fails. Files of a run only, wherever they lie: step_* (checkpoints), main.log*, summary.json*,
   and folders that are opened to be synced.

       FILE_CLIENT_CACHE=nfs      step_*: pages are kept in this process, as NFS does: what is written waits for fsync or
                                  close; a descriptor that also reads (O_RDWR) fetches a page before it changes a part of
                                  it, and the whole page goes back, with whatever another client has written beside it in
                                  the meantime undone; so for one that only writes where the page was read before. Else
                                  the changed bytes go back. Opening drops the pages of a file that another client has
                                  changed (close-to-open consistency)
       FILE_CLIENT_CACHE=whole    descriptors that only write fetch pages, too
       FILE_CLIENT_PAGE=BYTES     of a page (4096; up to 65536)
       FILE_CLIENT_LOSE=N         the N-th page that goes back does not arrive, and nobody says so
       FILE_CLIENT_DELAY=MS       each write takes so much longer
       FILE_CLIENT_LOG=FILE       a line a call: "PID CALL NAME OFFSET BYTES HOW"
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
    off_t size;              /* as far as this client has written */
    off_t seen_size;         /* of the server's file, */
    struct timespec changed; /* and when it was changed, when this client opened it or wrote to it last */
    Page* pages[PAGES];
} File;

static File files[FILES];
static struct {
    char name[128]; /* "": none of ours */
    int flags;
    File* file; /* NULL: without a cache */
} descriptors[DESCRIPTORS];

static int page_bytes(void) {
    const char* text = getenv("FILE_CLIENT_PAGE");
    return text ? atoi(text) : 4096;
}
static int caches(const char* how) {
    const char* text = getenv("FILE_CLIENT_CACHE");
    return text && (!how || strcmp(text, how) == 0);
}

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
    return strncmp(name, "step_", 5) == 0 || strncmp(name, "main.log", 8) == 0 ||
                   strncmp(name, "summary.json", 12) == 0
               ? name
               : NULL;
}
static int known(int fd) { return fd >= 0 && fd < DESCRIPTORS && descriptors[fd].name[0]; }
static int known_stream(FILE* stream) { return stream && known(fileno(stream)); }
static void remember(int fd, const char* name, int flags, File* file) {
    if (fd < 0 || fd >= DESCRIPTORS) return;
    snprintf(descriptors[fd].name, sizeof(descriptors[fd].name), "%s", name);
    descriptors[fd].flags = flags;
    descriptors[fd].file = file;
}

/* ------------------------------------------------------------------ the cache */

static void look_at_server(File* file, int fd) {
    struct stat status;
    syscall(SYS_fstat, fd, &status);
    file->seen_size = status.st_size;
    file->changed = status.st_mtim;
}

static int write_back(int fd, File* file, size_t p) {
    static int pages = 0;
    Page* page = file->pages[p];
    if (!page || page->from == page->to) return 0;
    const char* lose = getenv("FILE_CLIENT_LOSE");
    const int bytes = page->to - page->from;
    if (!lose || ++pages != atoi(lose)) {
        const long done =
            syscall(SYS_pwrite64, fd, page->data + page->from, bytes, (off_t)p * page_bytes() + page->from);
        if (done >= 0 && done < bytes) errno = ENOSPC;
        if (done < bytes) return -1;
    }
    page->from = page->to = 0;
    return 0;
}
static int write_all_back(int fd) {
    int failed = 0;
    for (size_t p = 0; p < PAGES; p++) failed |= write_back(fd, descriptors[fd].file, p);
    look_at_server(descriptors[fd].file, fd);
    return failed;
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

/* A file is opened: pages stay as long as the server's is as this client has seen it. */
static File* open_cached(int fd) {
    File* file = file_of(fd);
    const struct timespec changed = file->changed;
    const off_t size = file->seen_size;
    look_at_server(file, fd);
    if (changed.tv_sec == file->changed.tv_sec && changed.tv_nsec == file->changed.tv_nsec &&
        size == file->seen_size)
        return file;
    for (size_t p = 0; p < PAGES; p++)
        if (file->pages[p] && file->pages[p]->from == file->pages[p]->to) {
            free(file->pages[p]);
            file->pages[p] = NULL;
        }
    return file;
}

/* Reads through any descriptor: the server does not mind. */
static void fetch(Page* page, size_t p, int fd) {
    char path[64], data[PAGE_MAX] = {0};
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
    if (p >= PAGES) abort(); /* a larger file than this client is made for */
    if (!file->pages[p]) file->pages[p] = (Page*)calloc(1, sizeof(Page) + (size_t)page_bytes());
    return file->pages[p];
}

/* How far the file reaches for this client. */
static off_t size_of(File* file, int fd) {
    struct stat server;
    syscall(SYS_fstat, fd, &server);
    return server.st_size > file->size ? server.st_size : file->size;
}

static int cached_write(int fd, const char* from, size_t bytes, off_t offset) {
    File* file = descriptors[fd].file;
    const int size = page_bytes(), fetches = (descriptors[fd].flags & O_ACCMODE) == O_RDWR || caches("whole");
    const off_t end = offset + (off_t)bytes;
    file->size = size_of(file, fd);
    if (file->size < end) file->size = end;
    while (offset < end) {
        const size_t p = (size_t)(offset / size);
        const int begin = (int)(offset % size),
                  take = end - offset < size - begin ? (int)(end - offset) : size - begin;
        Page* page = page_at(file, p);
        if (fetches && take < size) fetch(page, p, fd);
        if (page->from != page->to && (begin > page->to || begin + take < page->from) &&
            write_back(fd, file, p) != 0)
            return -1;
        memcpy(page->data + begin, from, (size_t)take);
        if (page->from == page->to) page->from = begin, page->to = begin + take;
        if (begin < page->from) page->from = begin;
        if (begin + take > page->to) page->to = begin + take;
        if (take == size) page->whole = 1;
        if (page->whole) { /* all of it goes back, up to the file's end */
            const off_t left = file->size - (off_t)p * size;
            page->from = 0, page->to = left < size ? (int)left : size;
        }
        from += take, offset += take;
    }
    return 0;
}

static ssize_t cached_read(int fd, char* to, size_t bytes, off_t offset) {
    File* file = descriptors[fd].file;
    const int size = page_bytes();
    const off_t end = size_of(file, fd);
    size_t done = 0;
    if (offset >= end) return 0;
    if ((off_t)bytes > end - offset) bytes = (size_t)(end - offset);
    while (done < bytes) {
        const size_t p = (size_t)((offset + (off_t)done) / size);
        const int begin = (int)((offset + (off_t)done) % size);
        const size_t take = bytes - done < (size_t)(size - begin) ? bytes - done : (size_t)(size - begin);
        Page* page = page_at(file, p);
        fetch(page, p, fd);
        memcpy(to + done, page->data + begin, take);
        done += take;
    }
    return (ssize_t)done;
}

/* ------------------------------------------------------------------ the calls */

int open(const char* path, int flags, ...) {
    va_list arguments;
    struct stat status;
    const char* name = (flags & O_TMPFILE) == O_DIRECTORY ? "folder" : ours(path);
    int fd = -1;
    va_start(arguments, flags);
    const int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, int) : 0;
    va_end(arguments);
    if (!name) return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
    CALL("open", name, 0, 0, flags, -1, fd = (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode));
    if (fd < 0) return fd;
    syscall(SYS_fstat, fd, &status);
    const int cached = S_ISREG(status.st_mode) && strncmp(name, "step_", 5) == 0 && caches(NULL);
    remember(fd, name, flags, cached ? open_cached(fd) : NULL);
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
    if (known(fd) && (command == F_DUPFD_CLOEXEC || command == F_DUPFD))
        remember(result, descriptors[fd].name, descriptors[fd].flags, descriptors[fd].file);
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
    if (getenv("FILE_CLIENT_DELAY")) usleep(1000 * (useconds_t)atoi(getenv("FILE_CLIENT_DELAY")));
    CALL("pwrite", descriptors[fd].name, offset, bytes, descriptors[fd].flags, -1,
         if (!descriptors[fd].file) done = syscall(SYS_pwrite64, fd, from, bytes, offset);
         else if (cached_write(fd, (const char*)from, bytes, offset) != 0) done = -1);
    return done;
}
ssize_t pwrite64(int fd, const void* from, size_t bytes, off_t offset) {
    return pwrite(fd, from, bytes, offset);
}

ssize_t pread(int fd, void* to, size_t bytes, off_t offset) {
    ssize_t done = 0;
    if (!known(fd)) return syscall(SYS_pread64, fd, to, bytes, offset);
    CALL("pread", descriptors[fd].name, offset, bytes, descriptors[fd].flags, -1,
         if (descriptors[fd].file) done = cached_read(fd, (char*)to, bytes, offset);
         else done = syscall(SYS_pread64, fd, to, bytes, offset));
    return done;
}
ssize_t pread64(int fd, void* to, size_t bytes, off_t offset) { return pread(fd, to, bytes, offset); }

int fsync(int fd) {
    int result = 0;
    if (!known(fd)) return (int)syscall(SYS_fsync, fd);
    CALL("fsync", descriptors[fd].name, 0, 0, descriptors[fd].flags, -1,
         if (descriptors[fd].file) result = write_all_back(fd);
         if (result == 0) result = (int)syscall(SYS_fsync, fd));
    return result;
}

int close(int fd) {
    int after, result = 0;
    if (!known(fd)) return (int)syscall(SYS_close, fd);
    note("close", descriptors[fd].name, 0, 0, descriptors[fd].flags);
    int error = fault("close", &after);
    if (!error && descriptors[fd].file && (descriptors[fd].flags & O_ACCMODE) != O_RDONLY)
        error = write_all_back(fd) != 0 ? errno : 0;
    descriptors[fd].name[0] = '\0';
    result = (int)syscall(SYS_close, fd); /* closed, whatever it returns */
    if (after) kill(getpid(), SIGKILL);
    return error ? (errno = error, -1) : result;
}

int fallocate(int fd, int mode, off_t offset, off_t bytes) {
    int result = 0;
    if (!known(fd)) return (int)syscall(SYS_fallocate, fd, mode, offset, bytes);
    CALL("fallocate", descriptors[fd].name, offset, bytes, descriptors[fd].flags, -1,
         result = (int)syscall(SYS_fallocate, fd, mode, offset, bytes));
    return result;
}
int fallocate64(int fd, int mode, off_t offset, off_t bytes) { return fallocate(fd, mode, offset, bytes); }

int ftruncate(int fd, off_t bytes) {
    int result = 0;
    if (!known(fd)) return (int)syscall(SYS_ftruncate, fd, bytes);
    CALL("ftruncate", descriptors[fd].name, 0, bytes, descriptors[fd].flags, -1,
         result = (int)syscall(SYS_ftruncate, fd, bytes));
    return result;
}
int ftruncate64(int fd, off_t bytes) { return ftruncate(fd, bytes); }

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

/* ------------------------------------------------------------------ streams: their own calls do not come by here */

FILE* fopen(const char* path, const char* mode) {
    FILE* (*real)(const char*, const char*) =
        (FILE * (*)(const char*, const char*)) dlsym(RTLD_NEXT, "fopen");
    const int flags = strchr(mode, '+') ? O_RDWR : mode[0] == 'r' ? O_RDONLY : O_WRONLY;
    const char* name = ours(path);
    FILE* stream = NULL;
    if (!name) return real(path, mode);
    CALL("fopen", name, 0, 0, flags, NULL, stream = real(path, mode));
    if (stream) remember(fileno(stream), name, flags, NULL);
    return stream;
}
FILE* fopen64(const char* path, const char* mode) { return fopen(path, mode); }

int fflush(FILE* stream) {
    int (*real)(FILE*) = (int (*)(FILE*))dlsym(RTLD_NEXT, "fflush");
    int result = 0;
    if (!known_stream(stream)) return real(stream);
    const int fd = fileno(stream);
    CALL("fflush", descriptors[fd].name, 0, 0, descriptors[fd].flags, EOF, result = real(stream));
    return result;
}

int fclose(FILE* stream) {
    int (*real)(FILE*) = (int (*)(FILE*))dlsym(RTLD_NEXT, "fclose");
    int after;
    if (!known_stream(stream)) return real(stream);
    const int fd = fileno(stream);
    note("fclose", descriptors[fd].name, 0, 0, descriptors[fd].flags);
    const int error = fault("fclose", &after);
    descriptors[fd].name[0] = '\0';
    const int result = real(stream); /* closed, whatever it returns */
    if (after) kill(getpid(), SIGKILL);
    return error ? (errno = error, EOF) : result;
}
