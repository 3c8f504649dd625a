/* llmc_zero/watchdog.cuh - optional: ends a process that would else wait for a dead peer for ever.

   Inside a node NCCL reports nothing when a peer dies: its kernel spins, the stream neither ends nor fails, and whatever
   waits for it (cudaFree, a launch into a full queue, ncclCommInitRank) blocks in a call from which no code of the program
   comes back. So a thread of its own looks, some times a second, whether a peer is gone, whether NCCL has an error, and how
   long the program has made no progress; then it ends the process by a handler of the program's.

       static void end(void* of, const char* line) {           // in the watchdog's thread; does not return
           write(2, line, strlen(line));
           leave_word_for_the_others(of);
           _exit(1);                                           // hard: nothing may wait for the device
       }
       ZeroWatchdog watchdog;
       ZeroWatchdogConfig config = {};
       config.name = "my_trainer", config.limit_s = 600, config.end = end;
       zero_watchdog_start(&watchdog, &config);                // before MPI_Init and NCCL, if possible
       ...
       zero_watchdog_at(&watchdog, "load");                    // what is done now; counts as progress
       zero_watchdog_step(&watchdog, step);
       ZeroConfig z_config = zero_config();
       z_config.watch = zero_watchdog_watch(&watchdog);        // the library reports progress, and asks for peers
       ...
       zero_watchdog_leave(&watchdog);                         // peers that end now are no deaths
       zero_watchdog_stop(&watchdog);

   The line names rank, step, operation and seconds: "my_trainer: rank 1: step 7, norm: 5.0 s without progress: ...".
   Progress is progress: a long save reports each piece, and a device that works on a long step is seen to move. While the
   program itself is about to end with a message of its own (a wait of the library that has found the same), it calls
   zero_watchdog_claim; the thread then waits ZERO_WATCHDOG_GRACE seconds for it before it ends the process.
   The thread calls neither MPI nor CUDA; of NCCL only ncclCommGetAsyncError.

   defines: ZeroWatchdogConfig, ZeroWatchdog, zero_watchdog_start, zero_watchdog_stop, zero_watchdog_at,
            zero_watchdog_step, zero_watchdog_rank, zero_watchdog_comm, zero_watchdog_leave, zero_watchdog_claim,
            zero_watchdog_line, zero_watchdog_end_now, zero_watchdog_watch
*/
#ifndef LLMC_ZERO_WATCHDOG_CUH_INCLUDED
#define LLMC_ZERO_WATCHDOG_CUH_INCLUDED

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>

#include "collectives.cuh"

#define ZERO_WATCHDOG_GRACE 1.0 /* seconds for the program's own, better message */
#define ZERO_WATCHDOG_PAUSE 0.1 /* seconds between two looks */

typedef struct ZeroWatchdogConfig {
    const char* name; /* the program's, for the line; must outlive the watchdog, as all texts given to it */
    double limit_s;   /* without progress; 0: none */
    int (*peer_gone)(void* of, char* why, size_t bytes); /* 1: a peer is gone, and why. NULL: nobody knows */
    void* peer_of;
    void (*end)(void* of, const char* line); /* ends the process; called once, in the watchdog's thread */
    void* end_of;
} ZeroWatchdogConfig;

typedef struct ZeroWatchdog {
    ZeroWatchdogConfig config;
    pthread_t thread;
    pthread_mutex_t lock; /* held while the thread looks at peers or at NCCL */
    int started;
    /* written by the program, read by the thread, each by itself */
    int rank;       /* -1: not known yet */
    long long step; /* -1: none yet */
    const char* at; /* the operation */
    double moved_s; /* when there was progress last */
    int leaving, stopping, claimed;
    ZeroNcclComm comm;
    double claimed_s;
} ZeroWatchdog;

/* ------------------------------------------------------------------ what the program tells */

/* What is done now ("save", "norm"; a text that stays); the clock begins anew. Any thread. */
static inline void zero_watchdog_at(void* watchdog, const char* operation) {
    ZeroWatchdog* w = (ZeroWatchdog*)watchdog;
    const double now = zero_comm_now();
    if (operation) __atomic_store(&w->at, &operation, __ATOMIC_RELAXED);
    __atomic_store(&w->moved_s, &now, __ATOMIC_RELAXED);
}
static inline void zero_watchdog_step(ZeroWatchdog* w, long long step) {
    __atomic_store(&w->step, &step, __ATOMIC_RELAXED);
}
/* The ranks have met: peer_gone is asked from here on. */
static inline void zero_watchdog_rank(ZeroWatchdog* w, int rank) {
    __atomic_store(&w->rank, &rank, __ATOMIC_RELAXED);
}
/* Whose errors are looked at. NULL before the program destroys it. */
static inline void zero_watchdog_comm(ZeroWatchdog* w, ZeroNcclComm comm) {
    if (w->started) pthread_mutex_lock(&w->lock);
    w->comm = comm;
    if (w->started) pthread_mutex_unlock(&w->lock);
}
/* From here on peers may end, and what peer_gone looks at may be taken down; the clock goes on. */
static inline void zero_watchdog_leave(ZeroWatchdog* w) {
    if (w->started) pthread_mutex_lock(&w->lock);
    w->leaving = 1;
    if (w->started) pthread_mutex_unlock(&w->lock);
}
/* The program ends with a message of its own. 1: go on; 0: the watchdog is ending the process already, wait. */
static inline int zero_watchdog_claim(ZeroWatchdog* w) {
    const int before = __atomic_fetch_or(&w->claimed, 1, __ATOMIC_SEQ_CST);
    const double now = zero_comm_now();
    if (before & 2) return 0;
    if (!(before & 1)) __atomic_store(&w->claimed_s, &now, __ATOMIC_SEQ_CST);
    return 1;
}

/* ------------------------------------------------------------------ the line, and the end */

/* "NAME: rank 1: step 7, norm: 5.0 s without progress: WHY". Calls nothing that a signal handler may not. */
static inline void zero_watchdog_put(char** to, char* end, const char* text) {
    while (*text && *to < end - 1) *(*to)++ = *text++;
    **to = '\0';
}
static inline void zero_watchdog_put_number(char** to, char* end, long long number) {
    char digits[24], *at = digits + sizeof(digits) - 1;
    unsigned long long left = number < 0 ? 0 : (unsigned long long)number;
    *at = '\0';
    do *--at = (char)('0' + left % 10);
    while (left /= 10);
    zero_watchdog_put(to, end, at);
}
static inline void zero_watchdog_line(const ZeroWatchdog* w, const char* why, char* line, size_t bytes) {
    char *to = line, *end = line + bytes - 1; /* room for the newline */
    const double seconds = zero_comm_now() - w->moved_s;
    zero_watchdog_put(&to, end, w->config.name ? w->config.name : "llmc_zero");
    zero_watchdog_put(&to, end, ": ");
    if (w->rank >= 0) zero_watchdog_put(&to, end, "rank "), zero_watchdog_put_number(&to, end, w->rank);
    if (w->rank >= 0) zero_watchdog_put(&to, end, ": ");
    if (w->step >= 0) zero_watchdog_put(&to, end, "step "), zero_watchdog_put_number(&to, end, w->step);
    if (w->step >= 0) zero_watchdog_put(&to, end, ", ");
    zero_watchdog_put(&to, end, w->at ? w->at : "start-up");
    zero_watchdog_put(&to, end, ", ");
    zero_watchdog_put_number(&to, end, (long long)seconds);
    zero_watchdog_put(&to, end, ".");
    zero_watchdog_put_number(&to, end, (long long)(10.0 * seconds) % 10);
    zero_watchdog_put(&to, end, " s without progress: ");
    zero_watchdog_put(&to, end, why);
    *to++ = '\n', *to = '\0';
}

/* Ends the process at once, by the program's handler; also from a handler of a signal, if the program's is fit for that. */
static inline void zero_watchdog_end_now(ZeroWatchdog* w, const char* why) {
    char line[512];
    __atomic_fetch_or(&w->claimed, 2, __ATOMIC_SEQ_CST);
    zero_watchdog_line(w, why, line, sizeof(line));
    w->config.end(w->config.end_of, line);
}

/* ------------------------------------------------------------------ the thread */

static inline int zero_watchdog_nccl(ZeroWatchdog* w, char* why, size_t bytes) {
#ifndef ZERO_NO_NCCL
    ncclResult_t error = ncclSuccess;
    if (!w->comm || w->leaving || ncclCommGetAsyncError(w->comm, &error) != ncclSuccess) return 0;
    if (error == ncclSuccess || error == ncclInProgress) return 0;
    snprintf(why, bytes, "NCCL: %s", ncclGetErrorString(error));
    return 1;
#else
    (void)w, (void)why, (void)bytes;
    return 0;
#endif
}

/* 1: the process must end. */
static inline int zero_watchdog_look(ZeroWatchdog* w, char* why, size_t bytes) {
    double moved;
    int bad = 0;
    pthread_mutex_lock(&w->lock);
    if (!w->leaving && w->rank >= 0 && w->config.peer_gone)
        bad = w->config.peer_gone(w->config.peer_of, why, bytes);
    if (!bad) bad = zero_watchdog_nccl(w, why, bytes);
    pthread_mutex_unlock(&w->lock);
    if (bad) return 1;
    __atomic_load(&w->moved_s, &moved, __ATOMIC_RELAXED);
    if (w->config.limit_s > 0.0 && zero_comm_now() - moved > w->config.limit_s + ZERO_WATCHDOG_GRACE) {
        snprintf(why, bytes, "a peer is gone or stuck: end all ranks and resume");
        return 1;
    }
    return 0;
}

static inline void zero_watchdog_sleep(double seconds) {
    struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&t, NULL);
}

static inline void* zero_watchdog_run(void* watchdog) {
    ZeroWatchdog* w = (ZeroWatchdog*)watchdog;
    char why[256];
    double since = 0.0; /* when it was seen first */
    while (!__atomic_load_n(&w->stopping, __ATOMIC_SEQ_CST)) {
        double claimed_s;
        zero_watchdog_sleep(ZERO_WATCHDOG_PAUSE);
        const int claimed = __atomic_load_n(&w->claimed, __ATOMIC_SEQ_CST);
        __atomic_load(&w->claimed_s, &claimed_s, __ATOMIC_SEQ_CST);
        if (claimed & 1) { /* the program prints, leaves word, ends; if it can */
            if (claimed_s > 0.0 && zero_comm_now() - claimed_s > 2.0 * ZERO_WATCHDOG_GRACE)
                zero_watchdog_end_now(w, "ending, and the end blocks");
            continue;
        }
        if (!zero_watchdog_look(w, why, sizeof(why))) {
            since = 0.0;
            continue;
        }
        if (since == 0.0) since = zero_comm_now();
        if (zero_comm_now() - since < ZERO_WATCHDOG_GRACE) continue; /* its own message may come */
        if (!(__atomic_fetch_or(&w->claimed, 2, __ATOMIC_SEQ_CST) & 1)) zero_watchdog_end_now(w, why);
    }
    return NULL;
}

/* config.end is needed. No signal is delivered to the thread. */
static inline ZeroResult zero_watchdog_start(ZeroWatchdog* w, const ZeroWatchdogConfig* config) {
    sigset_t all, before;
    memset(w, 0, sizeof(*w));
    w->config = *config;
    w->rank = w->step = -1;
    zero_watchdog_at(w, NULL);
    if (!config->end)
        return zero_error(ZERO_ERROR_ARGUMENT, "a watchdog needs a function that ends the process");
    pthread_mutex_init(&w->lock, NULL);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(&w->thread, NULL, zero_watchdog_run, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) return zero_error(ZERO_ERROR_SYSTEM, "pthread_create: %s", strerror(error));
    w->started = 1;
    return zero_ok();
}

/* The thread ends; nothing happens on a watchdog that was not started. */
static inline void zero_watchdog_stop(ZeroWatchdog* w) {
    if (!w->started) return;
    __atomic_store_n(&w->stopping, 1, __ATOMIC_SEQ_CST);
    pthread_join(w->thread, NULL);
    pthread_mutex_destroy(&w->lock);
    w->started = 0;
}

/* For ZeroConfig.watch. */
static inline int zero_watchdog_peer_gone(void* watchdog, char* why, size_t bytes) {
    const ZeroWatchdog* w = (const ZeroWatchdog*)watchdog;
    return !w->leaving && w->rank >= 0 && w->config.peer_gone
               ? w->config.peer_gone(w->config.peer_of, why, bytes)
               : 0;
}
static inline ZeroWatch zero_watchdog_watch(ZeroWatchdog* w) {
    const ZeroWatch watch = {w, zero_watchdog_at, zero_watchdog_peer_gone};
    return watch;
}

#endif /* LLMC_ZERO_WATCHDOG_CUH_INCLUDED */
