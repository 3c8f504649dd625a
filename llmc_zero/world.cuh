/* llmc_zero/world.cuh - optional: which rank am I, of how many, on which GPU, and the NCCL communicator.

   For programs that have no start-up of their own. The ranks come from MPI (compile with ZERO_USE_MPI), or
   from a folder that all of them can write (plain processes on machines without MPI). Nothing else of the
   library includes this file. With ZERO_NO_NCCL it needs no nccl.h; zero_world_device then refuses more than
   one rank.

       int main(int argc, char** argv) {
           ZeroWorld world;
           ZeroWorldConfig config = {0};          // method NULL: MPI where compiled in, else one rank
           ZeroResult r = zero_world_start(&world, &config, &argc, &argv);     // ranks; no CUDA call yet
           if (r.code != ZERO_OK) {
               fprintf(stderr, "%s\n", r.text);
               zero_world_abort(&world, 1);
               return 1;
           }
           r = zero_world_agree(&world, parse_flags(argc, argv));              // any check of one's own
           if (r.code == ZERO_OK) r = zero_world_device(&world);               // GPU and world.comm
           if (r.code != ZERO_OK && world.rank == 0) fprintf(stderr, "%s\n", r.text);  // the same on all
           if (r.code == ZERO_OK) r = train(&world);  // with zero_world_wait(&world, stream) to wait
           ...                                        // train failed, on this rank perhaps alone:
               fprintf(stderr, "%s\n", r.text);       //     take the others along
               zero_world_abort(&world, 1);           //     leaves word for them; waits for nothing
               _exit(1);                              //     hard: a kernel may wait for a dead peer
           ...
           zero_world_finish(&world);
           return r.code != ZERO_OK;
       }

   Collective (every rank calls it, in the same order): start, agree, gather, device, finish. An error of
   agree or device is the same on all ranks unless a peer is gone. After an error of start, wait or gather, of one
   rank alone, or with world.broken set: abort. One thread at a time uses a world; the world owns `comm`.

   The folder. Names begin with llmc_zero.JOB.UID. where JOB is SLURM_JOB_ID, LLMC_ZERO_JOB, or both with '-'
   between, or 0: jobs of one user that use one folder at once need different ones.
   Tested in test/test_world.*:
   W1 Every file appears whole: written under a temporary name, then renamed.
   W2 A process writes hello.RANK with a random nonce. Rank 0 lists all nonces in run.answer (again when one
      changes), each client acknowledges an answer that holds its nonce, rank 0 closes with the final list.
      What a crashed run left behind holds old nonces, so it cannot be taken for an answer.
   W3 Later files are run.NONCE0.ROUND.RANK. Whoever writes round k has read round k-1, so k-2 can be deleted.
   W4 A process holds a lock on its hello file while it lives; kill -9 ends it too. A lock that was seen and
      is gone is a dead peer; so is one that comes and goes while the ranks meet. In a folder without locks (some
      network mounts) the time limit finds the dead.
   W5 zero_world_abort leaves word (run.NONCE0.0.RANKS) that zero_world_peer_gone, agree, gather and wait find. Under MPI the
      end of the process is the word: mpirun ends the others (srun with --kill-on-bad-exit).

   defines: ZeroWorldConfig, ZeroWorld, zero_world_start, _device, _agree, _gather, _wait, _peer_gone, _finish, _abort
*/
#ifndef LLMC_ZERO_WORLD_CUH_INCLUDED
#define LLMC_ZERO_WORLD_CUH_INCLUDED

#include <cuda_runtime.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifndef ZERO_NO_NCCL
#include <nccl.h>
#else
typedef struct ncclComm* ncclComm_t;
#endif
#ifdef ZERO_USE_MPI
#include <mpi.h>
#endif

#include "check.cuh"

#define ZERO_WORLD_GATHER_BYTES 4096 /* most that one rank may give to zero_world_gather */
#define ZERO_WORLD_NONCE 24          /* 16 hex digits, then zeros */
#ifndef ZERO_WORLD_LOCK_COMMAND      /* the tests set it to -1: a folder without locks */
#define ZERO_WORLD_LOCK_COMMAND F_OFD_SETLK
#endif
#ifndef ZERO_WORLD_PATIENCE /* seconds; so do the tests with this one */
#define ZERO_WORLD_PATIENCE 2.0
#endif

typedef struct ZeroWorldConfig {
    const char* method;  /* "mpi", "fs"; NULL or "": MPI where it is compiled in, else one process alone */
    const char* fs_path; /* fs: an existing folder that all ranks see and can write */
    int ranks, rank;     /* fs: how many there are, and which one this is; MPI knows by itself */
    int gpus_per_node;   /* > 0: use this many of each machine's GPUs; it must have them. 0: all */
    double timeout_s;    /* longest wait for another rank; 0: 600 */
} ZeroWorldConfig;

typedef enum ZeroWorldMethod { ZERO_WORLD_ALONE = 0, ZERO_WORLD_MPI, ZERO_WORLD_FS } ZeroWorldMethod;

typedef struct ZeroWorldHost {
    char name[72]; /* the whole name: n1.rackA and n1.rackB are two machines */
    char boot[40]; /* the kernel's boot id: two machines may have one name */
} ZeroWorldHost;

typedef struct ZeroWorld {
    int rank, ranks;             /* from zero_world_start */
    int local_rank, local_ranks; /* the same, among the ranks of this machine */
    char host[72];
    int device;      /* from zero_world_device; -1 before */
    ncclComm_t comm; /* from zero_world_device; NULL before, and for one rank without NCCL */
    int broken; /* an exchange failed, or this rank where the others may still wait for it: zero_world_abort, then
                   _exit */

    /* private */
    ZeroWorldMethod method;
    int gpus_per_node, mpi_started, hello_fd;
    double timeout_s;
    char nonce[ZERO_WORLD_NONCE];     /* this process */
    char (*nonces)[ZERO_WORLD_NONCE]; /* [ranks], agreed */
    char* watched;                    /* [ranks] 1: its lock was seen */
    char* prefix;                     /* folder and the begin of each name in it */
    unsigned long long round;
    double missed_s; /* while the ranks meet: since when one that was there is missing; 0: none is */
#ifdef ZERO_USE_MPI
    MPI_Comm mpi;
#endif
} ZeroWorld;

/* ---- small parts ---- */

static inline double zero_world_now(void) { /* seconds */
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Sleeps *seconds, then makes it half as long again, up to `ceiling`. */
static inline void zero_world_pause(double* seconds, double ceiling) {
    struct timespec t = {0, (long)(*seconds * 1e9)};
    nanosleep(&t, NULL);
    *seconds = *seconds * 1.5 < ceiling ? *seconds * 1.5 : ceiling;
}

/* Rank `rank` among the ranks whose host is the same: name and boot id, compared as strings. */
static inline void zero_world_local_rank(const ZeroWorldHost* hosts, int ranks, int rank, int* local_rank,
                                         int* local_ranks) {
    *local_rank = *local_ranks = 0;
    for (int r = 0; r < ranks; r++) {
        if (strcmp(hosts[r].name, hosts[rank].name) != 0 || strcmp(hosts[r].boot, hosts[rank].boot) != 0)
            continue;
        if (r < rank) *local_rank += 1;
        *local_ranks += 1;
    }
}

static inline void zero_world_this_host(ZeroWorldHost* host) {
    memset(host, 0, sizeof(*host));
    gethostname(host->name, sizeof(host->name) - 1);
    FILE* file = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (file != NULL) {
        if (fscanf(file, "%39s", host->boot) != 1) host->boot[0] = '\0';
        fclose(file);
    }
}

/* The device of a rank, or why there is none. `share`: NCCL was told to put several ranks on one GPU. */
static inline ZeroResult zero_world_choose_device(const char* host, int local_rank, int local_ranks,
                                                  int visible, int gpus_per_node, int share, int* device) {
    if (gpus_per_node > visible)
        return zero_error(ZERO_ERROR_ARGUMENT, "%d GPUs per node were asked for, host %.64s has %d visible",
                          gpus_per_node, host, visible);
    int usable = gpus_per_node > 0 ? gpus_per_node : visible;
    if (usable < 1 || (local_ranks > usable && !share))
        return zero_error(
            ZERO_ERROR_ARGUMENT, "%d rank%s on host %.64s, %d %s GPU%s: %s", local_ranks,
            local_ranks == 1 ? "" : "s", host, usable, gpus_per_node > 0 ? "usable" : "visible",
            usable == 1 ? "" : "s",
            usable < 1 ? "look at CUDA_VISIBLE_DEVICES and at nvidia-smi"
                       : "start fewer, look at CUDA_VISIBLE_DEVICES, or share GPUs by giving each rank "
                         "its own NCCL_HOSTID");
    *device = local_rank % usable;
    return zero_ok();
}

/* How many ranks the launcher that started this process speaks of; 0: none does. */
static inline int zero_world_launched_ranks(void) {
    const char* size = getenv("OMPI_COMM_WORLD_SIZE");
    if (size == NULL) size = getenv("PMI_SIZE");
    return size != NULL ? atoi(size) : 0;
}

/* ---- MPI: its errors come back as text, on a communicator of our own ---- */

#ifdef ZERO_USE_MPI
static inline ZeroResult zero_world_mpi_result(int code, const char* call) {
    char text[MPI_MAX_ERROR_STRING + 1] = "";
    int length = 0;
    if (code == MPI_SUCCESS) return zero_ok();
    MPI_Error_string(code, text, &length);
    return zero_error(ZERO_ERROR_SYSTEM, "%s: %s", call, text);
}

static inline ZeroResult zero_world_mpi_start(ZeroWorld* world, int* argc, char*** argv) {
    int running = 0, ended = 0;
    MPI_Initialized(&running);
    MPI_Finalized(&ended);
    if (ended)
        return zero_error(ZERO_ERROR_ORDER, "MPI has already been finalized: it starts once per process");
    if (!running) {
        ZERO_TRY(zero_world_mpi_result(MPI_Init(argc, argv), "MPI_Init"));
        world->mpi_started = 1;
    }
    world->method = ZERO_WORLD_MPI;
    ZERO_TRY(zero_world_mpi_result(MPI_Comm_dup(MPI_COMM_WORLD, &world->mpi), "MPI_Comm_dup"));
    MPI_Comm_set_errhandler(world->mpi, MPI_ERRORS_RETURN);
    ZERO_TRY(zero_world_mpi_result(MPI_Comm_rank(world->mpi, &world->rank), "MPI_Comm_rank"));
    ZERO_TRY(zero_world_mpi_result(MPI_Comm_size(world->mpi, &world->ranks), "MPI_Comm_size"));
    if (world->ranks == 1 && zero_world_launched_ranks() > 1)
        return zero_error(ZERO_ERROR_SYSTEM,
                          "the launcher started %d ranks, but MPI sees one: is this mpirun of the "
                          "MPI that the program was built with?",
                          zero_world_launched_ranks());
    return zero_ok();
}
#endif

/* ---- the folder: files ---- */

typedef struct ZeroWorldHello {
    char magic[8];
    char nonce[ZERO_WORLD_NONCE];
    char host[72];
    int ranks, pid;
} ZeroWorldHello;

typedef struct ZeroWorldPath {
    char text[PATH_MAX];
} ZeroWorldPath;

/* zero_world_fs_open has made sure that every name of ours fits. */
static inline ZeroWorldPath zero_world_path(const ZeroWorld* world, const char* kind, const char* nonce,
                                            unsigned long long round, int rank) {
    ZeroWorldPath path;
    if (nonce != NULL)
        snprintf(path.text, sizeof(path.text), "%s%s.%s.%llu.%d", world->prefix, kind, nonce, round, rank);
    else if (rank >= 0)
        snprintf(path.text, sizeof(path.text), "%s%s.%d", world->prefix, kind, rank);
    else
        snprintf(path.text, sizeof(path.text), "%s%s", world->prefix, kind);
    return path;
}

/* W1. With lock_fd the file stays open and locked (W4); that the folder has no locks is not an error. */
static inline ZeroResult zero_world_put(const ZeroWorld* world, ZeroWorldPath path, const void* data,
                                        size_t bytes, int* lock_fd) {
    char temp[PATH_MAX + 48];
    struct flock lock = {};
    snprintf(temp, sizeof(temp), "%s.%s.tmp", path.text, world->nonce);
    int fd = open(temp, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
    int failed = fd < 0;
    lock.l_type = F_WRLCK;
    if (!failed && lock_fd != NULL) (void)fcntl(fd, ZERO_WORLD_LOCK_COMMAND, &lock);
    if (!failed) failed = write(fd, data, bytes) != (ssize_t)bytes;
    if (!failed) failed = rename(temp, path.text) != 0;
    int reason = errno;
    if (failed && fd >= 0) unlink(temp);
    if (!failed && lock_fd != NULL)
        *lock_fd = fd;
    else if (fd >= 0 && close(fd) != 0 && !failed)
        failed = 1, reason = errno;
    if (!failed) return zero_ok();
    return zero_error(ZERO_ERROR_SYSTEM, "shared folder: cannot write %.120s%s: %s", path.text,
                      strlen(path.text) > 120 ? "..." : "", strerror(reason));
}

/* The file's size, of which at most `capacity` bytes go to data; -1: no such file. */
static inline ssize_t zero_world_get(ZeroWorldPath path, void* data, size_t capacity) {
    struct stat status;
    ssize_t got = -1;
    int fd = open(path.text, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    if (fstat(fd, &status) == 0 && read(fd, data, capacity) >= 0) got = (ssize_t)status.st_size;
    close(fd);
    return got;
}

/* Looks at a rank's hello: 0 there is none, 1 there is one, 2 and the process that wrote it lives. */
static inline int zero_world_look(const ZeroWorld* world, int rank, ZeroWorldHello* hello) {
    struct flock lock = {};
    int state = 0, fd = open(zero_world_path(world, "hello", NULL, 0, rank).text, O_RDONLY | O_CLOEXEC);
    memset(hello, 0, sizeof(*hello));
    if (fd < 0) return errno == ENOENT ? 0 : 1;
    if (read(fd, hello, sizeof(*hello)) == (ssize_t)sizeof(*hello) &&
        memcmp(hello->magic, "ZEROFS1", 8) == 0) {
        hello->nonce[ZERO_WORLD_NONCE - 1] = hello->host[sizeof(hello->host) - 1] = '\0';
        lock.l_type = F_WRLCK;
        state = fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK ? 2 : 1;
    }
    close(fd);
    return state;
}

/* 0: the peer has ended. A folder that cannot be read says nothing, and a lock never seen proves nothing. */
static inline int zero_world_alive(const ZeroWorld* world, int rank) {
    ZeroWorldHello hello;
    int state = zero_world_look(world, rank, &hello);
    if (state == 0 || (hello.nonce[0] != '\0' && strcmp(hello.nonce, world->nonces[rank]) != 0)) return 0;
    return state == 2 || !world->watched[rank] || hello.nonce[0] == '\0';
}

/* An error if a rank aborted, or if one of first..last has died. */
static inline ZeroResult zero_world_peers(const ZeroWorld* world, int first, int last) {
    int word[2];
    if (zero_world_get(zero_world_path(world, "run", world->nonces[0], 0, world->ranks), word,
                       sizeof(word)) == (ssize_t)sizeof(word))
        return zero_error(ZERO_ERROR_SYSTEM, "rank %d ended the run with code %d", word[0], word[1]);
    for (int r = first; r <= last; r++)
        if (r != world->rank && !zero_world_alive(world, r))
            return zero_error(ZERO_ERROR_SYSTEM, "rank %d has died or left without a word", r);
    return zero_ok();
}

/* Deletes this job's files except the hellos. */
static inline void zero_world_sweep(const ZeroWorld* world) {
    char folder[PATH_MAX], path[PATH_MAX + 300], begin[256];
    const char* base = strrchr(world->prefix, '/') + 1;
    struct dirent* entry;
    snprintf(folder, sizeof(folder), "%.*s", (int)(base - world->prefix), world->prefix);
    snprintf(begin, sizeof(begin), "%srun.", base);
    DIR* list = opendir(folder);
    while (list != NULL && (entry = readdir(list)) != NULL) {
        if (strncmp(entry->d_name, begin, strlen(begin)) != 0) continue;
        snprintf(path, sizeof(path), "%s%s", folder, entry->d_name);
        unlink(path);
    }
    if (list != NULL) closedir(list);
}

static inline ZeroResult zero_world_taken(const ZeroWorld* world, const ZeroWorldHello* by) {
    return zero_error(ZERO_ERROR_ARGUMENT,
                      "rank %d is taken by process %d on host %.64s: same rank twice, or two jobs "
                      "(give each its own LLMC_ZERO_JOB)",
                      world->rank, by->pid, by->host);
}

/* ---- the folder: meeting ---- */

/* "SLURM", "JOB", "SLURM-JOB" or "0" */
static inline ZeroResult zero_world_job(char* job, size_t capacity) {
    const char* slurm = getenv("SLURM_JOB_ID");
    const char* own = getenv("LLMC_ZERO_JOB");
    if (slurm == NULL) slurm = "";
    if (own == NULL) own = "";
    int length =
        snprintf(job, capacity, "%s%s%s", slurm, *slurm && *own ? "-" : "", *slurm || *own ? own : "0");
    if (length >= (int)capacity)
        return zero_error(ZERO_ERROR_ARGUMENT, "the job id has %d characters, at most %d are allowed", length,
                          (int)capacity - 1);
    for (int i = 0; i < length; i++)
        if (strchr("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-", job[i]) == NULL)
            return zero_error(ZERO_ERROR_ARGUMENT,
                              "the job id '%s' (SLURM_JOB_ID, LLMC_ZERO_JOB) may hold letters, "
                              "digits, _ and - only",
                              job);
    return zero_ok();
}

static inline ZeroResult zero_world_fs_open(ZeroWorld* world, const ZeroWorldConfig* config) {
    char job[64];
    unsigned long long random = 0;
    size_t length = config->fs_path != NULL ? strlen(config->fs_path) : 0;
    if (length == 0) return zero_error(ZERO_ERROR_ARGUMENT, "start-up by fs needs a shared folder");
    if (config->ranks < 1)
        return zero_error(ZERO_ERROR_ARGUMENT, "%d ranks: there must be at least one", config->ranks);
    if (config->rank < 0 || config->rank >= config->ranks)
        return zero_error(ZERO_ERROR_ARGUMENT, "rank %d of %d ranks: it must be 0 to %d", config->rank,
                          config->ranks, config->ranks - 1);
    ZERO_TRY(zero_world_job(job, sizeof(job)));
    if (length > PATH_MAX - 256)
        return zero_error(ZERO_ERROR_ARGUMENT,
                          "the shared folder's name has %zu characters, at most %d are allowed", length,
                          PATH_MAX - 256);
    int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (fd < 0 || read(fd, &random, sizeof(random)) != (ssize_t)sizeof(random))
        random = (unsigned long long)(zero_world_now() * 1e9) * 2654435761u + (unsigned long long)getpid();
    if (fd >= 0) close(fd);
    world->rank = config->rank;
    world->ranks = config->ranks;
    snprintf(world->nonce, sizeof(world->nonce), "%016llx", random);
    world->prefix = (char*)malloc(length + 128);
    world->watched = (char*)calloc((size_t)world->ranks, 1);
    world->nonces = (char(*)[ZERO_WORLD_NONCE])calloc((size_t)world->ranks, ZERO_WORLD_NONCE);
    if (world->prefix == NULL || world->watched == NULL || world->nonces == NULL)
        return zero_error(ZERO_ERROR_MEMORY, "no memory for %d ranks", world->ranks);
    snprintf(world->prefix, length + 128, "%s/llmc_zero.%s.%lu.", config->fs_path, job,
             (unsigned long)getuid());
    world->method = ZERO_WORLD_FS;
    return zero_ok();
}

/* Seconds for which what another process says of itself may be the last sign of one that is just ending. */
static inline double zero_world_patience(const ZeroWorld* world) {
    return world->timeout_s < 2 * ZERO_WORLD_PATIENCE ? world->timeout_s / 2 : ZERO_WORLD_PATIENCE;
}

/* This process takes its rank, unless a living one keeps it. */
static inline ZeroResult zero_world_hello(ZeroWorld* world, double start) {
    ZeroWorldHello hello;
    double pause = 1e-3;
    while (zero_world_look(world, world->rank, &hello) == 2) {
        if (zero_world_now() - start > zero_world_patience(world)) return zero_world_taken(world, &hello);
        zero_world_pause(&pause, 20e-3);
    }
    if (world->rank == 0) zero_world_sweep(world); /* no rank 0 lives, so these are a crashed run's */
    memset(&hello, 0, sizeof(hello));
    memcpy(hello.magic, "ZEROFS1", 8);
    memcpy(hello.nonce, world->nonce, sizeof(hello.nonce));
    memcpy(hello.host, world->host, sizeof(hello.host));
    hello.ranks = world->ranks;
    hello.pid = (int)getpid();
    return zero_world_put(world, zero_world_path(world, "hello", NULL, 0, world->rank), &hello, sizeof(hello),
                          &world->hello_fd);
}

/* W2: looks at the hellos: rank 0, or who wants the names of the missing, at all; the others at their own and
   at rank 0's. Rank 0 copies new nonces and sets *changed. A rank is missing if its hello is, or if nobody is
   seen to hold it while our own is seen to be held. `late`: we have had patience. */
static inline ZeroResult zero_world_scan(ZeroWorld* world, int late, int* changed, char* missing,
                                         size_t capacity) {
    ZeroWorldHello hello;
    int least = zero_world_look(world, world->rank, &hello), all = world->rank == 0 || missing != NULL,
        gone = -1;
    if (hello.nonce[0] != '\0' && strcmp(hello.nonce, world->nonce) != 0)
        return zero_world_taken(world, &hello);
    for (int r = 0; r < (all ? world->ranks : 1); r++) {
        int state = zero_world_look(world, r, &hello);
        if (state == 2) world->watched[r] = 1;
        if (state != 2 && world->watched[r] && gone < 0) gone = r;
        if (late && state == 2 && hello.ranks != world->ranks)
            return zero_error(ZERO_ERROR_ARGUMENT, "rank %d was started for %d ranks, rank %d for %d", r,
                              hello.ranks, world->rank, world->ranks);
        if (world->rank == 0 && strcmp(hello.nonce, world->nonces[r]) != 0) {
            memcpy(world->nonces[r], hello.nonce, ZERO_WORLD_NONCE);
            *changed = 1;
        }
        if (missing != NULL && state < least)
            snprintf(missing + strlen(missing), capacity - strlen(missing), "%s%d", missing[0] ? ", " : "",
                     r);
    }
    if (gone < 0) world->missed_s = 0;
    if (gone >= 0 && world->missed_s == 0) world->missed_s = zero_world_now();
    if (gone >= 0 &&
        zero_world_now() - world->missed_s > zero_world_patience(world)) /* not just started anew */
        return zero_error(ZERO_ERROR_SYSTEM, "rank %d was there and left before all had met", gone);
    return zero_ok();
}

/* W2, rank 0: one step. *met: all have acknowledged. */
static inline ZeroResult zero_world_meet_first(ZeroWorld* world, int late, int* changed, int* met) {
    const size_t list_bytes = (size_t)world->ranks * ZERO_WORLD_NONCE;
    char word[ZERO_WORLD_NONCE];
    ZERO_TRY(zero_world_scan(world, late, changed, NULL, 0));
    for (int r = 0; r < world->ranks; r++)
        if (world->nonces[r][0] == '\0') return zero_ok();
    if (*changed)
        ZERO_TRY(zero_world_put(world, zero_world_path(world, "run.answer", NULL, 0, -1), world->nonces,
                                list_bytes, NULL));
    *changed = 0;
    for (int r = 1; r < world->ranks; r++)
        if (zero_world_get(zero_world_path(world, "run", world->nonce, 0, r), word, sizeof(word)) < 0 ||
            memcmp(word, world->nonces[r], sizeof(word)) != 0)
            return zero_ok();
    *met = 1;
    return zero_world_put(world, zero_world_path(world, "run", world->nonce, 0, 0), world->nonces, list_bytes,
                          NULL);
}

/* W2, the others: one step. `accepted` is rank 0's nonce in the answer that this rank has acknowledged. */
static inline ZeroResult zero_world_meet_other(ZeroWorld* world, int late, char* accepted, int* met) {
    const size_t list_bytes = (size_t)world->ranks * ZERO_WORLD_NONCE;
    char(*list)[ZERO_WORLD_NONCE] = world->nonces;
    ZERO_TRY(zero_world_scan(world, late, NULL, NULL, 0));
    if (zero_world_get(zero_world_path(world, "run.answer", NULL, 0, -1), list, list_bytes) ==
            (ssize_t)list_bytes &&
        memcmp(list[world->rank], world->nonce, ZERO_WORLD_NONCE) == 0 && strcmp(list[0], accepted) != 0) {
        memcpy(accepted, list[0], ZERO_WORLD_NONCE);
        ZERO_TRY(zero_world_put(world, zero_world_path(world, "run", accepted, 0, world->rank), world->nonce,
                                ZERO_WORLD_NONCE, NULL));
    }
    *met = accepted[0] != '\0' && zero_world_get(zero_world_path(world, "run", accepted, 0, 0), list,
                                                 list_bytes) == (ssize_t)list_bytes;
    if (*met && memcmp(list[world->rank], world->nonce, ZERO_WORLD_NONCE) != 0)
        return zero_error(ZERO_ERROR_ARGUMENT, "another process has taken rank %d: same rank twice",
                          world->rank);
    return zero_ok();
}

static inline ZeroResult zero_world_meet(ZeroWorld* world) {
    char missing[100] = "", accepted[ZERO_WORLD_NONCE] = "";
    double start = zero_world_now(), pause = 1e-3;
    int changed = 1, met = 0;
    ZeroWorldHello hello;
    ZERO_TRY(zero_world_hello(world, start));
    while (!met) {
        int late = zero_world_now() - start > zero_world_patience(world);
        if (world->rank == 0)
            ZERO_TRY(zero_world_meet_first(world, late, &changed, &met));
        else
            ZERO_TRY(zero_world_meet_other(world, late, accepted, &met));
        if (!met && zero_world_now() - start > world->timeout_s) {
            ZERO_TRY(zero_world_scan(world, 1, &changed, missing, sizeof(missing)));
            return zero_error(ZERO_ERROR_SYSTEM,
                              "rank %d of %d waited %g s in the shared folder; missing: rank %s", world->rank,
                              world->ranks, world->timeout_s, missing[0] ? missing : "(none: too slow)");
        }
        if (!met) zero_world_pause(&pause, 20e-3);
    }
    for (int r = 0; r < world->ranks; r++) world->watched[r] = zero_world_look(world, r, &hello) == 2;
    return zero_ok();
}

static inline ZeroResult zero_world_fs_gather(ZeroWorld* world, const void* mine, size_t bytes, void* all) {
    const char* run = world->nonces[0];
    double start = zero_world_now(), pause = 1e-3;
    unsigned long long round = ++world->round;
    ZERO_TRY(
        zero_world_put(world, zero_world_path(world, "run", run, round, world->rank), mine, bytes, NULL));
    if (round >= 2) unlink(zero_world_path(world, "run", run, round - 2, world->rank).text); /* W3 */
    for (int r = 0; r < world->ranks; r++) {
        ZeroWorldPath path = zero_world_path(world, "run", run, round, r);
        ssize_t got;
        while ((got = zero_world_get(path, (char*)all + (size_t)r * bytes, bytes)) < 0) {
            ZeroResult peers = zero_world_peers(world, r, r);
            /* it may have written, then ended */
            if (peers.code != ZERO_OK && zero_world_get(path, (char*)all + (size_t)r * bytes, bytes) < 0)
                return peers;
            if (zero_world_now() - start > world->timeout_s)
                return zero_error(ZERO_ERROR_SYSTEM, "no word from rank %d within %g s", r, world->timeout_s);
            if (peers.code == ZERO_OK) zero_world_pause(&pause, 20e-3);
        }
        if (got != (ssize_t)bytes)
            return zero_error(ZERO_ERROR_ORDER,
                              "a gather of %zu bytes here meets one of %zd bytes on rank %d", bytes, got, r);
    }
    return zero_ok();
}

/* Removes what this process has in the folder, hello last: it guards the rest. Rank 0 waits for the others:
   the folder is empty when it returns from an orderly end. */
static inline void zero_world_fs_close(ZeroWorld* world, int orderly) {
    double start = zero_world_now(), pause = 1e-3;
    ZeroWorldHello hello;
    for (int r = 1; orderly && world->rank == 0 && r < world->ranks; r++)
        while (zero_world_alive(world, r) && zero_world_now() - start < 2) zero_world_pause(&pause, 20e-3);
    if (world->hello_fd >= 0) {
        int own = zero_world_look(world, world->rank, &hello) != 0 && strcmp(hello.nonce, world->nonce) == 0;
        if (own && world->rank == 0 && (orderly || world->round == 0)) zero_world_sweep(world);
        if (own) unlink(zero_world_path(world, "hello", NULL, 0, world->rank).text);
        close(world->hello_fd);
        world->hello_fd = -1;
    }
    free(world->prefix), free(world->nonces), free(world->watched);
    world->prefix = NULL, world->nonces = NULL, world->watched = NULL;
    world->method = ZERO_WORLD_ALONE;
}

/* ---- what programs call ---- */

/* Collective, of host memory: rank r's value goes to all + r * bytes; bytes (1 to 4096) is the same on
   all. */
static inline ZeroResult zero_world_gather(ZeroWorld* world, const void* mine, size_t bytes, void* all) {
    if (bytes < 1 || bytes > ZERO_WORLD_GATHER_BYTES)
        return zero_error(ZERO_ERROR_ARGUMENT, "a gather of %zu bytes: 1 to %d are allowed", bytes,
                          ZERO_WORLD_GATHER_BYTES);
#ifdef ZERO_USE_MPI
    if (world->method == ZERO_WORLD_MPI) /* mpirun ends us if a peer dies */
        return zero_world_mpi_result(
            MPI_Allgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, world->mpi),
            "MPI_Allgather");
#endif
    if (world->method == ZERO_WORLD_FS) {
        const ZeroResult result = zero_world_fs_gather(world, mine, bytes, all);
        if (result.code != ZERO_OK) world->broken = 1;
        return result;
    }
    memmove(all, mine, bytes);
    return zero_ok();
}

/* Collective: ok if every rank gave ok, else on all ranks the error of the lowest one that failed, after
   "rank R: " unless all have the same text. */
static inline ZeroResult zero_world_agree(ZeroWorld* world, ZeroResult mine) {
    if (world->ranks <= 1) return mine;
    ZeroResult* all = (ZeroResult*)malloc(sizeof(ZeroResult) * (size_t)world->ranks);
    if (all == NULL) return zero_error(ZERO_ERROR_MEMORY, "no memory for %d ranks' results", world->ranks);
    ZeroResult result = zero_world_gather(world, &mine, sizeof(mine), all);
    if (result.code != ZERO_OK && mine.code != ZERO_OK)
        result = mine; /* the cause, not its effect */
    else if (result.code == ZERO_OK) {
        int first = 0, same = 1;
        while (first < world->ranks && all[first].code == ZERO_OK) first++;
        for (int r = 0; first < world->ranks && r < world->ranks; r++)
            if (all[r].code == ZERO_OK || strcmp(all[r].text, all[first].text) != 0) same = 0;
        if (first < world->ranks)
            result = same ? all[first] : zero_error(all[first].code, "rank %d: %s", first, all[first].text);
    }
    free(all);
    return result;
}

/* Phase 1, collective: rank, ranks, local_rank, local_ranks, host. No CUDA call. MPI_Init only if nobody has
   called it. argc and argv go to MPI and may be NULL. */
static inline ZeroResult zero_world_start(ZeroWorld* world, const ZeroWorldConfig* config, int* argc,
                                          char*** argv) {
    const char* method = config->method != NULL ? config->method : "";
    ZeroWorldHost host;
    memset(world, 0, sizeof(*world));
    world->ranks = world->local_ranks = 1;
    world->device = world->hello_fd = -1;
    world->timeout_s = config->timeout_s > 0 ? config->timeout_s : 600;
    world->gpus_per_node = config->gpus_per_node;
    zero_world_this_host(&host);
    memcpy(world->host, host.name, sizeof(world->host));
    (void)argc, (void)argv;
    if (strcmp(method, "fs") == 0) {
        ZeroResult result = zero_world_fs_open(world, config);
        if (result.code == ZERO_OK) result = zero_world_meet(world);
        if (result.code != ZERO_OK) {
            zero_world_fs_close(world, 0);
            return result;
        }
#ifdef ZERO_USE_MPI
    } else if (*method == '\0' || strcmp(method, "mpi") == 0) {
        ZERO_TRY(zero_world_mpi_start(world, argc, argv));
#else
    } else if (strcmp(method, "mpi") == 0) {
        return zero_error(ZERO_ERROR_ARGUMENT, "start-up by mpi: this program was built without MPI");
    } else if (*method == '\0') {
        if (zero_world_launched_ranks() > 1)
            return zero_error(ZERO_ERROR_ARGUMENT,
                              "%d ranks were launched, but this program was built without MPI",
                              zero_world_launched_ranks());
#endif
    } else {
        return zero_error(ZERO_ERROR_ARGUMENT, "start-up by %.32s: %s", method,
                          strcmp(method, "tcp") == 0 ? "not in this version; use mpi or fs"
                                                     : "use mpi or fs");
    }
    ZeroWorldHost* hosts = (ZeroWorldHost*)malloc(sizeof(host) * (size_t)world->ranks);
    if (hosts == NULL) return zero_error(ZERO_ERROR_MEMORY, "no memory for %d ranks' hosts", world->ranks);
    ZeroResult result = zero_world_gather(world, &host, sizeof(host), hosts);
    if (result.code == ZERO_OK)
        zero_world_local_rank(hosts, world->ranks, world->rank, &world->local_rank, &world->local_ranks);
    free(hosts);
    return result;
}

#ifndef ZERO_NO_NCCL
static inline ZeroResult zero_world_nccl_result(ncclResult_t code, const char* call) {
    if (code == ncclSuccess || code == ncclInProgress) return zero_ok();
    const char* last = ncclGetLastError(NULL);
    if (last == NULL) last = "";
    int shm = code == ncclSystemError || strstr(last, "shm") != NULL;
    return zero_error(ZERO_ERROR_NCCL, "%s: %s%s: %.90s", call, ncclGetErrorString(code),
                      shm ? "; is /dev/shm writable and large enough (docker: --shm-size=1g)?" : "", last);
}

static inline ZeroResult zero_world_nccl_start(ZeroWorld* world) {
    ncclUniqueId id, *ids = (ncclUniqueId*)malloc(sizeof(ncclUniqueId) * (size_t)world->ranks);
    ZeroResult result = zero_ok();
    memset(&id, 0, sizeof(id));
    if (ids == NULL)
        result = zero_error(ZERO_ERROR_MEMORY, "no memory for %d ranks", world->ranks);
    else if (world->rank == 0)
        result = zero_world_nccl_result(ncclGetUniqueId(&id), "ncclGetUniqueId");
    result = zero_world_agree(world, result);
    if (result.code == ZERO_OK) result = zero_world_gather(world, &id, sizeof(id), ids);
    if (result.code == ZERO_OK) {
        result = zero_world_nccl_result(ncclCommInitRank(&world->comm, world->ranks, ids[0], world->rank),
                                        "ncclCommInitRank");
        /* A rank that fails here cannot agree on it: the others wait inside ncclCommInitRank for it. */
        if (result.code != ZERO_OK) {
            world->comm = NULL;
            world->broken = 1;
        }
    }
    free(ids);
    return result;
}
#endif

/* Phase 2, collective: world->device, made current before anything else touches a GPU, and world->comm. */
static inline ZeroResult zero_world_device(ZeroWorld* world) {
    const char* many = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    int share = getenv("NCCL_HOSTID") != NULL || (many != NULL && strcmp(many, "1") == 0), visible = 0;
    cudaError_t status = cudaGetDeviceCount(&visible);
    ZeroResult result = zero_ok();
    if (status != cudaSuccess) visible = 0, (void)cudaGetLastError();
    if (status != cudaSuccess && status != cudaErrorNoDevice)
        result = zero_error(ZERO_ERROR_CUDA, "host %.64s: no GPU can be used: cudaGetDeviceCount: %s",
                            world->host, cudaGetErrorString(status));
    else
        result = zero_world_choose_device(world->host, world->local_rank, world->local_ranks, visible,
                                          world->gpus_per_node, share, &world->device);
    if (result.code == ZERO_OK) {
        status = cudaSetDevice(world->device);
        if (status != cudaSuccess)
            result = zero_error(ZERO_ERROR_CUDA, "host %.64s: cudaSetDevice(%d): %s", world->host,
                                world->device, cudaGetErrorString(status));
    }
    ZERO_TRY(zero_world_agree(world, result));
#ifndef ZERO_NO_NCCL
    return zero_world_nccl_start(world);
#else
    if (world->ranks > 1)
        return zero_error(ZERO_ERROR_ARGUMENT, "%d ranks, but this program was built without NCCL",
                          world->ranks);
    return zero_ok();
#endif
}

/* Waits until `stream` is empty, but never for a dead peer: an error of the stream or of NCCL, a peer seen to
   be gone, or the time limit end it. */
static inline ZeroResult zero_world_wait(ZeroWorld* world, cudaStream_t stream) {
    double start = zero_world_now(), looked = start, now = start, pause = 1e-6;
    for (int turn = 0;; turn++) {
        cudaError_t status = cudaStreamQuery(stream);
        if (status == cudaErrorNotReady) (void)cudaGetLastError(); /* not an error: it must not stay as one */
#ifndef ZERO_NO_NCCL
        ncclResult_t async = ncclSuccess; /* first: a collective that failed is what the stream failed of */
        if (world->comm != NULL) {
            ZERO_TRY(
                zero_world_nccl_result(ncclCommGetAsyncError(world->comm, &async), "ncclCommGetAsyncError"));
            ZERO_TRY(zero_world_nccl_result(async, "NCCL, while waiting for a stream"));
        }
#endif
        if (status != cudaSuccess && status != cudaErrorNotReady)
            return zero_error(ZERO_ERROR_CUDA, "waiting for a stream: cudaStreamQuery: %s",
                              cudaGetErrorString(status));
        if (status == cudaSuccess) return zero_ok();
        now = zero_world_now();
        if (now - start > world->timeout_s)
            return zero_error(ZERO_ERROR_NCCL,
                              "a stream is not done after %g s: another rank is stuck or gone",
                              world->timeout_s);
        if (world->method == ZERO_WORLD_FS && now - looked > 0.05) {
            ZERO_TRY(zero_world_peers(world, 0, world->ranks - 1));
            looked = now;
        }
        if (turn < 100)
            sched_yield();
        else
            zero_world_pause(&pause, 50e-6);
    }
}

/* Collective: orderly end, also after an error that all agreed on. Ends MPI only if zero_world_start began
   it. */
static inline void zero_world_finish(ZeroWorld* world) {
    int orderly = zero_world_agree(world, zero_ok()).code == ZERO_OK;
#ifndef ZERO_NO_NCCL
    if (world->comm != NULL) (void)(orderly ? ncclCommDestroy(world->comm) : ncclCommAbort(world->comm));
#endif
    world->comm = NULL;
    if (world->method == ZERO_WORLD_FS) zero_world_fs_close(world, orderly);
#ifdef ZERO_USE_MPI
    if (world->method == ZERO_WORLD_MPI) {
        MPI_Comm_free(&world->mpi);
        if (world->mpi_started) MPI_Finalize();
        world->method = ZERO_WORLD_ALONE;
    }
#endif
    world->ranks = 1;
}

/* For a thread that watches while the program may be blocked (ZeroWatchdogConfig.peer_gone): 1 if a rank has left
   word, or if the next rank has died, which leaves word as soon as the one after it dies; and why. It looks at files only,
   and the world may be in use meanwhile, but not in zero_world_start or zero_world_finish. 0 under MPI: nobody knows. */
static inline int zero_world_peer_gone(void* of, char* why, size_t bytes) {
    const ZeroWorld* world = (const ZeroWorld*)of;
    if (world->method != ZERO_WORLD_FS || world->ranks < 2) return 0;
    const int next = (world->rank + 1) % world->ranks;
    const ZeroResult result = zero_world_peers(world, next, next);
    if (result.code != ZERO_OK) snprintf(why, bytes, "%s", result.text);
    return result.code != ZERO_OK;
}

/* This rank alone gives up: leaves word for the others, whose next agree, gather, wait or peer_gone finds it. It waits for
   nothing, neither streams nor NCCL nor MPI, and returns; call _exit then, because exit and destructors may wait for
   kernels that wait for a peer. Under MPI that end is the word. Harmless after a failed start; any thread. */
static inline void zero_world_abort(const ZeroWorld* world, int code) {
    int word[2] = {world->rank, code};
    if (world->method == ZERO_WORLD_FS)
        (void)zero_world_put(world, zero_world_path(world, "run", world->nonces[0], 0, world->ranks), word,
                             sizeof(word), NULL);
    if (world->method == ZERO_WORLD_FS) unlink(zero_world_path(world, "hello", NULL, 0, world->rank).text);
}

#endif /* LLMC_ZERO_WORLD_CUH_INCLUDED */
