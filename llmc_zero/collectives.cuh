/* llmc_zero/collectives.cuh - reduce a bucket, gather a bucket, and every edge between the two streams.

   Collectives and the kernel that sums what they bring run on a communication stream of our own, all other kernels on the
   caller's compute stream. All cross-stream edges of the library are here, each an event and one cudaStreamWaitEvent:
     E1   compute -> comm   a bucket's gradients are final            -> reduce it
     E2   comm -> compute   all buckets are reduced                   -> norm and update read them
     E3   compute -> comm   this rank's sums of the step are written  -> add them up over the ranks
     E4   comm -> compute   the sums of all ranks have arrived        -> finish the norm
     E5   compute -> comm   a bucket's slice is updated               -> gather it
     E6   comm -> compute   a bucket's parameters are complete        -> forward reads them
     E7   comm -> compute   a reduce has read a bucket or a slot      -> backward of another micro-step or unit overwrites it
     E8   compute -> comm   a slot's parameters are not read any more -> gather another unit into it (stage 3)
     E9   comm -> compute   a slot's parameters are complete          -> forward and backward read them (stage 3)
     E10  compute -> comm   half of the scratch is not read any more  -> broadcast a window of sums into it (stage 0)
     E11  comm -> compute   a window of sums has arrived              -> update it (stage 0)
   Orders that need no edge of their own, because these give them (the comm stream is first in, first out):
     O1  backward of the next step overwrites gradients that a reduce reads:   behind E2
     O2  the sums of the next step overwrite those that ranks add up:          behind E4
     O3  the update of the next step overwrites a slice that a gather reads:   that gather lies before the next
         step's reduces in the comm stream, so behind E2
     O4  the next step's sums overwrite a shard that the update reads, and its squares are added where the norm has just
         written zeros: the sum kernel lies behind E1 of that step, and the compute stream had update and norm before
     O5  a gather of stage 3 reads the shard that the update writes:           E8, recorded behind that update
   With one rank there is no exchange and no edge, and kernels of the comm stream run on the compute stream; with
   ZERO_NO_NCCL nothing else is possible.
   The communicator must be a blocking one (NCCL's default): with a non-blocking one a collective may reach its stream
   after the event behind it; ncclInProgress is therefore an error here. It may be shared with the host framework: the
   same calls in the same order on every rank.

   defines: ZeroNcclComm, ZeroWatch, ZeroComm, zero_comm_create, zero_comm_free, zero_comm_is_stuck, zero_comm_now,
            zero_comm_progress, zero_comm_beat, zero_comm_begin_reduce, zero_comm_reduce_scatter, zero_comm_exchange,
            zero_comm_end_reduce, zero_comm_wait_overwrite, zero_comm_wait_reduced,
            zero_comm_share_words, zero_comm_gather, zero_comm_wait_gathered, zero_comm_gather_slot, zero_comm_wait_slot,
            zero_comm_broadcast, zero_comm_wait_window, zero_comm_begin_messages, zero_comm_send, zero_comm_receive,
            zero_comm_end_messages, zero_comm_drain, zero_wait_event
*/
#ifndef LLMC_ZERO_COLLECTIVES_CUH_INCLUDED
#define LLMC_ZERO_COLLECTIVES_CUH_INCLUDED

#include <cuda_runtime.h>
#include <sched.h>
#include <time.h>
#ifndef ZERO_NO_NCCL
#include <nccl.h>
#endif

#include "timeline.cuh"

#ifdef ZERO_NO_NCCL
typedef void* ZeroNcclComm;
#else
typedef ncclComm_t ZeroNcclComm;
#endif

/* What a host framework that watches over its ranks is told and asked; each may be NULL. watchdog.cuh is one. */
typedef struct ZeroWatch {
    void* of;
    void (*progress)(
        void* of, const char* operation); /* the host or the device got on; operation may be NULL: the same */
    int (*peer_gone)(void* of, char* why,
                     size_t bytes); /* 1: a peer is gone, and why; asked while the host waits */
} ZeroWatch;

#define ZERO_BEATS 64 /* events on the compute stream by which a wait sees that the device gets on */

typedef struct ZeroComm {
    const ZeroLayout* layout;
    int rank, ranks;
    ZeroNcclComm comm;    /* the caller's */
    cudaStream_t compute; /* the caller's */
    cudaStream_t stream;  /* ours; with one rank the same as compute */
    double timeout_s;     /* of host waits: without progress */
    ZeroWatch watch;
    ZeroResult broken; /* of the first wait that gave up: those after it give the same at once */
    cudaEvent_t beats[ZERO_BEATS];
    unsigned long long beats_recorded, beats_seen;
    cudaEvent_t to_comm; /* E1, E3, E5, E8, E10: recorded and waited for in one breath, so one event serves */
    cudaEvent_t reduced; /* E2 */
    cudaEvent_t summed;  /* E4 */
    cudaEvent_t window[2]; /* E11, one for each half of the scratch */
    cudaEvent_t* gathered; /* E6, one a bucket */
    char* gather_pending;  /* one a bucket: gathered, and the compute stream has not waited for it yet */
    uint64_t order; /* hash of the collectives called so far, in their order; see zero_check_replicas */
    ZeroTimeline timeline;
} ZeroComm;

/* The streams will not come to an end: whatever waits for the device (cudaFree, cudaFreeHost) would block. Leave memory and
   streams to the end of the process. */
static inline int zero_comm_is_stuck(const ZeroComm* c) { return c->broken.code != ZERO_OK; }

static inline void zero_comm_free(ZeroComm* c) {
    int i;
    if (zero_comm_is_stuck(c)) {
        memset(c, 0, sizeof(*c));
        return;
    }
    zero_timeline_free(&c->timeline);
    for (i = 0; i < ZERO_BEATS; i++)
        if (c->beats[i]) cudaEventDestroy(c->beats[i]);
    if (c->gathered) {
        for (i = 0; i < c->layout->buckets_count; i++)
            if (c->gathered[i]) cudaEventDestroy(c->gathered[i]);
    }
    free(c->gathered);
    free(c->gather_pending);
    for (i = 0; i < 2; i++)
        if (c->window[i]) cudaEventDestroy(c->window[i]);
    if (c->summed) cudaEventDestroy(c->summed);
    if (c->reduced) cudaEventDestroy(c->reduced);
    if (c->to_comm) cudaEventDestroy(c->to_comm);
    if (c->stream && c->stream != c->compute) cudaStreamDestroy(c->stream);
    memset(c, 0, sizeof(*c));
}

static inline ZeroResult zero_comm_create_parts(ZeroComm* c, ZeroTiming timing) {
    int b;
    if (c->ranks == 1) {
        c->stream = c->compute;
        return zero_timeline_start(&c->timeline, timing, c->compute, c->stream);
    }
    c->gathered = (cudaEvent_t*)zero_alloc_array((size_t)c->layout->buckets_count, sizeof(cudaEvent_t));
    c->gather_pending = (char*)zero_alloc_array((size_t)c->layout->buckets_count, 1);
    if (!c->gathered || !c->gather_pending)
        return zero_error(ZERO_ERROR_MEMORY, "no host memory for %d buckets", c->layout->buckets_count);
    ZERO_TRY_CUDA(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking));
    ZERO_TRY_CUDA(cudaEventCreateWithFlags(&c->to_comm, cudaEventDisableTiming));
    ZERO_TRY_CUDA(cudaEventCreateWithFlags(&c->reduced, cudaEventDisableTiming));
    ZERO_TRY_CUDA(cudaEventCreateWithFlags(&c->summed, cudaEventDisableTiming));
    for (b = 0; b < 2; b++) ZERO_TRY_CUDA(cudaEventCreateWithFlags(&c->window[b], cudaEventDisableTiming));
    for (b = 0; b < ZERO_BEATS; b++)
        ZERO_TRY_CUDA(cudaEventCreateWithFlags(&c->beats[b], cudaEventDisableTiming));
    for (b = 0; b < c->layout->buckets_count; b++)
        ZERO_TRY_CUDA(cudaEventCreateWithFlags(&c->gathered[b], cudaEventDisableTiming));
    return zero_timeline_start(&c->timeline, timing, c->compute, c->stream);
}

/* comm and compute stay the caller's and must live as long as c. On an error nothing is left. */
static inline ZeroResult zero_comm_create(ZeroComm* c, const ZeroLayout* layout, int rank, ZeroNcclComm comm,
                                          cudaStream_t compute, double timeout_s, ZeroWatch watch,
                                          ZeroTiming timing) {
    ZeroResult result;
    memset(c, 0, sizeof(*c));
    c->layout = layout;
    c->rank = rank;
    c->ranks = layout->ranks;
    c->comm = comm;
    c->compute = compute;
    c->timeout_s = timeout_s;
    c->watch = watch;
    result = zero_comm_create_parts(c, timing);
    if (result.code != ZERO_OK) zero_comm_free(c);
    return result;
}

/* ------------------------------------------------------------------ host waits */

/* The host is at `operation` (a text that stays, or NULL). */
static inline void zero_comm_progress(ZeroComm* c, const char* operation) {
    if (c->watch.progress) c->watch.progress(c->watch.of, operation);
}

/* Once in a while behind work of the compute stream, so that a wait that lasts long sees the device get on. */
static inline ZeroResult zero_comm_beat(ZeroComm* c, const char* operation) {
    int happened = 1;
    zero_comm_progress(c, operation);
    if (c->ranks == 1) return zero_ok();
    if (c->beats_recorded - c->beats_seen == ZERO_BEATS) {
        ZERO_TRY(zero_query_event(c->beats[c->beats_seen % ZERO_BEATS], &happened));
        if (!happened) return zero_ok(); /* the host is far ahead */
        c->beats_seen++;
    }
    ZERO_TRY_CUDA(cudaEventRecord(c->beats[c->beats_recorded++ % ZERO_BEATS], c->compute));
    return zero_ok();
}

/* 1: the device has got on since this was asked last. */
static inline int zero_comm_moves(ZeroComm* c) {
    int happened = 1, moves = 0;
    while (c->beats_seen < c->beats_recorded && happened) {
        if (zero_query_event(c->beats[c->beats_seen % ZERO_BEATS], &happened).code != ZERO_OK) return moves;
        c->beats_seen += (unsigned long long)happened;
        moves |= happened;
    }
    return moves;
}

static inline double zero_comm_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Whether NCCL or the host framework knows of a peer that is gone. */
static inline ZeroResult zero_comm_ask(ZeroComm* c, int peers) {
    char why[160];
#ifndef ZERO_NO_NCCL
    ncclResult_t async = ncclSuccess;
    if (c->comm) ZERO_TRY_NCCL(ncclCommGetAsyncError(c->comm, &async));
    ZERO_TRY_NCCL(async);
#endif
    if (peers && c->watch.peer_gone && c->watch.peer_gone(c->watch.of, why, sizeof(why)))
        return zero_error(ZERO_ERROR_NCCL, "rank %d of %d: %s: end all ranks and resume", c->rank, c->ranks,
                          why);
    return zero_ok();
}

static inline ZeroResult zero_wait_polling(ZeroComm* c, cudaEvent_t event) {
    const double start = zero_comm_now();
    double moved = start, asked_peers = start;
    long polls;
    for (polls = 0;; polls++) {
        int happened;
        const ZeroResult asked = zero_query_event(event, &happened);
        const double now = zero_comm_now();
        if (happened) {
            zero_comm_progress(c, NULL);
            return zero_ok();
        }
        /* a failed collective is why a stream fails */
        if (polls % 64 == 63 || asked.code != ZERO_OK) {
            ZERO_TRY(zero_comm_ask(c, now - asked_peers > 0.1));
            if (now - asked_peers > 0.1) asked_peers = now;
        }
        ZERO_TRY(asked);
        if (polls % 64 == 63 && zero_comm_moves(c)) {
            zero_comm_progress(c, NULL);
            moved = now;
        }
        if (now - moved > c->timeout_s)
            return zero_error(ZERO_ERROR_NCCL,
                              "rank %d of %d waited %.0f s for the device: a peer is gone or stuck; "
                              "end all ranks and resume",
                              c->rank, c->ranks, now - start);
        if (polls > 1000) sched_yield();
    }
}

/* Host wait for an event, never for ever: a peer that died is seen by NCCL, by the host framework (ZeroWatch), or by the
   limit on waits without progress (case J1). After such an error streams are as stuck as they were: every later wait gives
   it again, at once. */
static inline ZeroResult zero_wait_event(ZeroComm* c, cudaEvent_t event) {
    if (c->broken.code != ZERO_OK) return c->broken;
    const ZeroResult result = zero_wait_polling(c, event);
    if (result.code == ZERO_ERROR_NCCL && c->ranks > 1) c->broken = result;
    return result;
}

/* Waits until both streams are done, with the same limit. */
static inline ZeroResult zero_comm_drain(ZeroComm* c) {
    if (c->broken.code != ZERO_OK) return c->broken;
    if (c->ranks == 1 || !c->to_comm) { /* no peer to wait for */
        ZERO_TRY_CUDA(cudaStreamSynchronize(c->compute));
        return zero_ok();
    }
    ZERO_TRY_CUDA(cudaEventRecord(c->to_comm, c->compute));
    ZERO_TRY(zero_wait_event(c, c->to_comm));
    ZERO_TRY_CUDA(cudaEventRecord(c->to_comm, c->stream));
    return zero_wait_event(c, c->to_comm);
}

/* ------------------------------------------------------------------ the exchanges */

#ifdef ZERO_NO_NCCL

static inline ZeroResult zero_comm_begin_reduce(ZeroComm*, int, int*) { return zero_ok(); }
static inline ZeroResult zero_comm_reduce_scatter(ZeroComm*, int, void*, ZeroReduction, int) {
    return zero_ok();
}
static inline ZeroResult zero_comm_exchange(ZeroComm*, int, const void*, size_t, size_t, int, void*) {
    return zero_ok();
}
static inline ZeroResult zero_comm_end_reduce(ZeroComm*, cudaEvent_t, const int*) { return zero_ok(); }
static inline ZeroResult zero_comm_wait_overwrite(ZeroComm*, cudaEvent_t) { return zero_ok(); }
static inline ZeroResult zero_comm_wait_reduced(ZeroComm*) { return zero_ok(); }
static inline ZeroResult zero_comm_share_words(ZeroComm*, uint64_t*, size_t, int) { return zero_ok(); }
static inline ZeroResult zero_comm_gather(ZeroComm*, int, void*) { return zero_ok(); }
static inline ZeroResult zero_comm_wait_gathered(ZeroComm*, int) { return zero_ok(); }
static inline ZeroResult zero_comm_gather_slot(ZeroComm*, int, const void*, void*, cudaEvent_t) {
    return zero_ok();
}
static inline ZeroResult zero_comm_wait_slot(ZeroComm*, cudaEvent_t) { return zero_ok(); }
static inline ZeroResult zero_comm_broadcast(ZeroComm*, const void*, void*, size_t, int, int) {
    return zero_ok();
}
static inline ZeroResult zero_comm_wait_window(ZeroComm*, int) { return zero_ok(); }
static inline ZeroResult zero_comm_begin_messages(ZeroComm*) { return zero_ok(); }
static inline ZeroResult zero_comm_send(ZeroComm*, const void*, size_t, ZeroDtype, int) { return zero_ok(); }
static inline ZeroResult zero_comm_receive(ZeroComm*, void*, size_t, ZeroDtype, int) { return zero_ok(); }
static inline ZeroResult zero_comm_end_messages(ZeroComm*) { return zero_ok(); }

#else

static inline ncclDataType_t zero_nccl_type(ZeroDtype dtype) {
    return dtype == ZERO_BF16 ? ncclBfloat16 : ncclFloat;
}

/* Notes that a collective for a bucket or unit is called: all ranks have to call the same ones in the same order (FNV-1a, word
   by word). */
static inline void zero_comm_note(ZeroComm* c, int kind, int which) {
    c->order = (c->order ^ (((uint64_t)kind << 32) | (uint32_t)which)) * 0x100000001b3ull;
}

/* Bytes from a bucket's begin to a rank's slice. Equal counts on all ranks (A7), own address at base + rank * count (C9). */
static inline size_t zero_slice_bytes(const ZeroComm* c, int b, int rank) {
    return (size_t)rank * zero_slice_count(c->layout, b) * zero_dtype_bytes(c->layout->dtype);
}

/* The comm stream waits for what the compute stream has been given so far (E1); reduces may follow, and
   zero_comm_end_reduce. bucket, spans: for the timeline. */
static inline ZeroResult zero_comm_begin_reduce(ZeroComm* c, int bucket, int spans[2]) {
    if (c->ranks == 1) return zero_ok();
    zero_comm_note(c, 1, bucket);
    ZERO_TRY(zero_span_begin(&c->timeline, ZERO_ROW_COMPUTE, ZERO_SPAN_ISSUE, ZERO_NO_INDEX, &spans[0]));
    ZERO_TRY_CUDA(cudaEventRecord(c->to_comm, c->compute));
    ZERO_TRY_CUDA(cudaStreamWaitEvent(c->stream, c->to_comm, 0)); /* E1 */
    return zero_span_begin(&c->timeline, ZERO_ROW_COMMUNICATION, "reduce", bucket, &spans[1]);
}

/* Sums a bucket of gradients over the ranks with NCCL, in place: the own slice, or with everywhere = 1 (stage 0) the whole
   bucket. The reduce-scatter is the same in all stages, so that stage 0 sees the same bits as stage 1; together with the
   gather it moves what a ring all-reduce moves. bucket: where the bucket begins. */
static inline ZeroResult zero_comm_reduce_scatter(ZeroComm* c, int b, void* bucket, ZeroReduction reduction,
                                                  int everywhere) {
    const ncclDataType_t type = zero_nccl_type(c->layout->dtype);
    const size_t count = zero_slice_count(c->layout, b);
    char* slice = (char*)bucket + zero_slice_bytes(c, b, c->rank);
    if (c->ranks == 1) return zero_ok();
    if (reduction == ZERO_REDUCE_ALLREDUCE) {
        ZERO_TRY_NCCL(
            ncclAllReduce(bucket, bucket, c->layout->buckets[b].count, type, ncclSum, c->comm, c->stream));
        return zero_ok();
    }
    if (reduction == ZERO_REDUCE_NCCL)
        ZERO_TRY_NCCL(ncclReduceScatter(bucket, slice, count, type, ncclSum, c->comm, c->stream));
    if (everywhere) ZERO_TRY_NCCL(ncclAllGather(slice, bucket, count, type, c->comm, c->stream));
    return zero_ok();
}

/* All-to-all of a piece: elements [first, first + count) of every rank's slice of a bucket go to that rank, from ranks
   0 .. senders - 1; what the others send of this rank's slice arrives in scratch, count elements each, in rank order without
   this rank. Not ncclAlltoAll: that wants all slices of a piece one after another in memory. */
static inline ZeroResult zero_comm_exchange(ZeroComm* c, int b, const void* bucket, size_t first,
                                            size_t count, int senders, void* scratch) {
    const ncclDataType_t type = zero_nccl_type(c->layout->dtype);
    const size_t bytes = zero_dtype_bytes(c->layout->dtype);
    char* to = (char*)scratch;
    int r;
    if (c->ranks == 1) return zero_ok();
    ZERO_TRY_NCCL(ncclGroupStart());
    for (r = 0; r < c->ranks; r++) {
        ncclResult_t sent = ncclSuccess, received = ncclSuccess;
        if (r == c->rank) continue;
        if (c->rank < senders)
            sent = ncclSend((const char*)bucket + zero_slice_bytes(c, b, r) + first * bytes, count, type, r,
                            c->comm, c->stream);
        if (r < senders) received = ncclRecv(to, count, type, r, c->comm, c->stream);
        if (sent != ncclSuccess || received != ncclSuccess) {
            ncclGroupEnd();
            ZERO_TRY_NCCL(sent);
            ZERO_TRY_NCCL(received);
        }
        to += count * bytes;
    }
    ZERO_TRY_NCCL(ncclGroupEnd());
    return zero_ok();
}

/* Behind the reduces since zero_comm_begin_reduce. done: recorded on the comm stream, or NULL. */
static inline ZeroResult zero_comm_end_reduce(ZeroComm* c, cudaEvent_t done, const int spans[2]) {
    if (c->ranks == 1) return zero_ok();
    ZERO_TRY(zero_span_end(&c->timeline, spans[1]));
    if (done) ZERO_TRY_CUDA(cudaEventRecord(done, c->stream));
    return zero_span_end(&c->timeline, spans[0]);
}

/* The compute stream may overwrite what a reduce has read; done: of that reduce (E7). */
static inline ZeroResult zero_comm_wait_overwrite(ZeroComm* c, cudaEvent_t done) {
    int span;
    if (c->ranks == 1) return zero_ok();
    ZERO_TRY(zero_span_begin(&c->timeline, ZERO_ROW_COMPUTE, ZERO_SPAN_WAIT, ZERO_NO_INDEX, &span));
    ZERO_TRY_CUDA(cudaStreamWaitEvent(c->compute, done, 0)); /* E7 */
    return zero_span_end(&c->timeline, span);
}

/* The compute stream waits for every reduce issued so far (E2). */
static inline ZeroResult zero_comm_wait_reduced(ZeroComm* c) {
    int span;
    if (c->ranks == 1) return zero_ok();
    ZERO_TRY(zero_span_begin(&c->timeline, ZERO_ROW_COMPUTE, ZERO_SPAN_WAIT, ZERO_NO_INDEX, &span));
    ZERO_TRY_CUDA(cudaEventRecord(c->reduced, c->stream));
    ZERO_TRY_CUDA(cudaStreamWaitEvent(c->compute, c->reduced, 0)); /* E2 */
    return zero_span_end(&c->timeline, span);
}

/* Adds up `count` words over the ranks, in place; or with gather = 1 gathers them: rank r's are words[r * count ...] (E3,
   E4). */
static inline ZeroResult zero_comm_share_words(ZeroComm* c, uint64_t* words, size_t count, int gather) {
    int span, share;
    if (c->ranks == 1) return zero_ok();
    ZERO_TRY(zero_span_begin(&c->timeline, ZERO_ROW_COMPUTE, ZERO_SPAN_WAIT, ZERO_NO_INDEX, &span));
    ZERO_TRY_CUDA(cudaEventRecord(c->to_comm, c->compute));
    ZERO_TRY_CUDA(cudaStreamWaitEvent(c->stream, c->to_comm, 0)); /* E3 */
    ZERO_TRY(zero_span_begin(&c->timeline, ZERO_ROW_COMMUNICATION, "sums", ZERO_NO_INDEX, &share));
    if (gather)
        ZERO_TRY_NCCL(
            ncclAllGather(words + (size_t)c->rank * count, words, count, ncclUint64, c->comm, c->stream));
    else
        ZERO_TRY_NCCL(ncclAllReduce(words, words, count, ncclUint64, ncclSum, c->comm, c->stream));
    ZERO_TRY(zero_span_end(&c->timeline, share));
    ZERO_TRY_CUDA(cudaEventRecord(c->summed, c->stream));
    ZERO_TRY_CUDA(cudaStreamWaitEvent(c->compute, c->summed, 0)); /* E4 */
    return zero_span_end(&c->timeline, span);
}

/* Sends this rank's slice of a bucket of params to all, behind the update that the compute stream has just been
   given (E5). */
static inline ZeroResult zero_comm_gather(ZeroComm* c, int b, void* params) {
    char* bucket = (char*)params + c->layout->buckets[b].flat_offset * zero_dtype_bytes(c->layout->dtype);
    int issue, span;
    if (c->ranks == 1) return zero_ok();
    zero_comm_note(c, 2, b);
    ZERO_TRY(zero_span_begin(&c->timeline, ZERO_ROW_COMPUTE, ZERO_SPAN_ISSUE, ZERO_NO_INDEX, &issue));
    ZERO_TRY_CUDA(cudaEventRecord(c->to_comm, c->compute));
    ZERO_TRY_CUDA(cudaStreamWaitEvent(c->stream, c->to_comm, 0)); /* E5 */
    ZERO_TRY(zero_span_begin(&c->timeline, ZERO_ROW_COMMUNICATION, "gather", b, &span));
    ZERO_TRY_NCCL(ncclAllGather(bucket + zero_slice_bytes(c, b, c->rank), bucket,
                                zero_slice_count(c->layout, b), zero_nccl_type(c->layout->dtype), c->comm,
                                c->stream));
    ZERO_TRY(zero_span_end(&c->timeline, span));
    ZERO_TRY_CUDA(cudaEventRecord(c->gathered[b], c->stream));
    c->gather_pending[b] = 1;
    return zero_span_end(&c->timeline, issue);
}

/* The compute stream waits until a bucket of params is complete (E6); free if it has waited before. */
static inline ZeroResult zero_comm_wait_gathered(ZeroComm* c, int b) {
    int span;
    if (c->ranks == 1 || !c->gather_pending[b]) return zero_ok();
    ZERO_TRY(zero_span_begin(&c->timeline, ZERO_ROW_COMPUTE, ZERO_SPAN_WAIT, ZERO_NO_INDEX, &span));
    ZERO_TRY_CUDA(cudaStreamWaitEvent(c->compute, c->gathered[b], 0)); /* E6 */
    c->gather_pending[b] = 0;
    return zero_span_end(&c->timeline, span);
}

/* Stage 3: gathers a unit out of the ranks' shards into a slot, behind what the compute stream has been given so far (E8).
   done is recorded behind it. */
static inline ZeroResult zero_comm_gather_slot(ZeroComm* c, int unit, const void* shard, void* slot,
                                               cudaEvent_t done) {
    const ZeroLayout* layout = c->layout;
    const size_t bytes = zero_dtype_bytes(layout->dtype);
    size_t first;
    int i, issue, span;
    zero_comm_note(c, 3, unit);
    ZERO_TRY(zero_span_begin(&c->timeline, ZERO_ROW_COMPUTE, ZERO_SPAN_ISSUE, ZERO_NO_INDEX, &issue));
    ZERO_TRY_CUDA(cudaEventRecord(c->to_comm, c->compute));
    ZERO_TRY_CUDA(cudaStreamWaitEvent(c->stream, c->to_comm, 0)); /* E8 */
    ZERO_TRY(zero_span_begin(&c->timeline, ZERO_ROW_COMMUNICATION, "gather", unit, &span));
    zero_unit_span(layout, unit, &first);
    for (i = layout->unit_buckets_first[unit]; i < layout->unit_buckets_first[unit + 1]; i++) {
        const int b = layout->unit_buckets[i];
        ZERO_TRY_NCCL(ncclAllGather((const char*)shard + zero_shard_offset(layout, b) * bytes,
                                    (char*)slot + (layout->buckets[b].flat_offset - first) * bytes,
                                    zero_slice_count(layout, b), zero_nccl_type(layout->dtype), c->comm,
                                    c->stream));
    }
    ZERO_TRY(zero_span_end(&c->timeline, span));
    ZERO_TRY_CUDA(cudaEventRecord(done, c->stream));
    return zero_span_end(&c->timeline, issue);
}

/* The compute stream waits until a slot's parameters are complete (E9). */
static inline ZeroResult zero_comm_wait_slot(ZeroComm* c, cudaEvent_t done) {
    int span;
    ZERO_TRY(zero_span_begin(&c->timeline, ZERO_ROW_COMPUTE, ZERO_SPAN_WAIT, ZERO_NO_INDEX, &span));
    ZERO_TRY_CUDA(cudaStreamWaitEvent(c->compute, done, 0)); /* E9 */
    return zero_span_end(&c->timeline, span);
}

/* Stage 0: the owner's sums of a window, to all; behind what the compute stream has been given so far (E10). sums: the
   owner's. half: which half of the scratch `window` is. */
static inline ZeroResult zero_comm_broadcast(ZeroComm* c, const void* sums, void* window, size_t count,
                                             int owner, int half) {
    int issue, span;
    ZERO_TRY(zero_span_begin(&c->timeline, ZERO_ROW_COMPUTE, ZERO_SPAN_ISSUE, ZERO_NO_INDEX, &issue));
    ZERO_TRY_CUDA(cudaEventRecord(c->to_comm, c->compute));
    ZERO_TRY_CUDA(cudaStreamWaitEvent(c->stream, c->to_comm, 0)); /* E10 */
    ZERO_TRY(zero_span_begin(&c->timeline, ZERO_ROW_COMMUNICATION, "broadcast", owner, &span));
    ZERO_TRY_NCCL(
        ncclBroadcast(c->rank == owner ? sums : window, window, count, ncclFloat, owner, c->comm, c->stream));
    ZERO_TRY(zero_span_end(&c->timeline, span));
    ZERO_TRY_CUDA(cudaEventRecord(c->window[half], c->stream));
    return zero_span_end(&c->timeline, issue);
}

/* The compute stream waits for the last broadcast into that half (E11). */
static inline ZeroResult zero_comm_wait_window(ZeroComm* c, int half) {
    int span;
    ZERO_TRY(zero_span_begin(&c->timeline, ZERO_ROW_COMPUTE, ZERO_SPAN_WAIT, ZERO_NO_INDEX, &span));
    ZERO_TRY_CUDA(cudaStreamWaitEvent(c->compute, c->window[half], 0)); /* E11 */
    return zero_span_end(&c->timeline, span);
}

/* Messages from rank to rank, of checkpoints: between begin and end any number, on the comm stream. What one rank sends
   another arrives there in that order. After an error in between, call zero_comm_end_messages, too. */
static inline ZeroResult zero_comm_begin_messages(ZeroComm* c) {
    if (c->ranks > 1) ZERO_TRY_NCCL(ncclGroupStart());
    return zero_ok();
}
static inline ZeroResult zero_comm_send(ZeroComm* c, const void* from, size_t count, ZeroDtype dtype,
                                        int rank) {
    ZERO_TRY_NCCL(ncclSend(from, count, zero_nccl_type(dtype), rank, c->comm, c->stream));
    return zero_ok();
}
static inline ZeroResult zero_comm_receive(ZeroComm* c, void* to, size_t count, ZeroDtype dtype, int rank) {
    ZERO_TRY_NCCL(ncclRecv(to, count, zero_nccl_type(dtype), rank, c->comm, c->stream));
    return zero_ok();
}
static inline ZeroResult zero_comm_end_messages(ZeroComm* c) {
    if (c->ranks > 1) ZERO_TRY_NCCL(ncclGroupEnd());
    return zero_ok();
}

#endif /* ZERO_NO_NCCL */

#endif /* LLMC_ZERO_COLLECTIVES_CUH_INCLUDED */
