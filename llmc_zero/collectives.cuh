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

   defines: ZeroNcclComm, ZeroComm, zero_comm_create, zero_comm_free, zero_comm_begin_reduce, zero_comm_reduce_scatter,
            zero_comm_exchange, zero_comm_end_reduce, zero_comm_wait_overwrite, zero_comm_wait_reduced,
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

typedef struct ZeroComm {
    const ZeroLayout* layout;
    int rank, ranks;
    ZeroNcclComm comm;    /* the caller's */
    cudaStream_t compute; /* the caller's */
    cudaStream_t stream;  /* ours; with one rank the same as compute */
    double timeout_s;     /* of host waits */
    cudaEvent_t to_comm; /* E1, E3, E5, E8, E10: recorded and waited for in one breath, so one event serves */
    cudaEvent_t reduced; /* E2 */
    cudaEvent_t summed;  /* E4 */
    cudaEvent_t window[2]; /* E11, one for each half of the scratch */
    cudaEvent_t* gathered; /* E6, one a bucket */
    char* gather_pending;  /* one a bucket: gathered, and the compute stream has not waited for it yet */
    uint64_t order; /* hash of the collectives called so far, in their order; see zero_check_replicas */
    ZeroTimeline timeline;
} ZeroComm;

static inline void zero_comm_free(ZeroComm* c) {
    int i;
    zero_timeline_free(&c->timeline);
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
    for (b = 0; b < c->layout->buckets_count; b++)
        ZERO_TRY_CUDA(cudaEventCreateWithFlags(&c->gathered[b], cudaEventDisableTiming));
    return zero_timeline_start(&c->timeline, timing, c->compute, c->stream);
}

/* comm and compute stay the caller's and must live as long as c. On an error nothing is left. */
static inline ZeroResult zero_comm_create(ZeroComm* c, const ZeroLayout* layout, int rank, ZeroNcclComm comm,
                                          cudaStream_t compute, double timeout_s, ZeroTiming timing) {
    ZeroResult result;
    memset(c, 0, sizeof(*c));
    c->layout = layout;
    c->rank = rank;
    c->ranks = layout->ranks;
    c->comm = comm;
    c->compute = compute;
    c->timeout_s = timeout_s;
    result = zero_comm_create_parts(c, timing);
    if (result.code != ZERO_OK) zero_comm_free(c);
    return result;
}

/* ------------------------------------------------------------------ host waits */

/* Host wait for an event, never for ever: a peer that died is seen by NCCL or by the time limit (case J1). */
static inline ZeroResult zero_wait_event(ZeroComm* c, cudaEvent_t event) {
    struct timespec start, now;
    long polls = 0;
    int happened;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (;;) {
        const ZeroResult asked = zero_query_event(event, &happened);
        if (happened) return zero_ok();
#ifndef ZERO_NO_NCCL
        /* a failed collective is why a stream fails */
        if (c->comm && (polls % 64 == 63 || asked.code != ZERO_OK)) {
            ncclResult_t async = ncclSuccess;
            ZERO_TRY_NCCL(ncclCommGetAsyncError(c->comm, &async));
            ZERO_TRY_NCCL(async);
        }
#endif
        ZERO_TRY(asked);
        clock_gettime(CLOCK_MONOTONIC, &now);
        if ((double)(now.tv_sec - start.tv_sec) + 1e-9 * (double)(now.tv_nsec - start.tv_nsec) > c->timeout_s)
            return zero_error(ZERO_ERROR_NCCL,
                              "rank %d of %d waited %.0f s for the device: a peer is gone or stuck; "
                              "end all ranks and resume",
                              c->rank, c->ranks, c->timeout_s);
        if (++polls > 1000) sched_yield();
    }
}

/* Waits until both streams are done, with the same limit. */
static inline ZeroResult zero_comm_drain(ZeroComm* c) {
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
