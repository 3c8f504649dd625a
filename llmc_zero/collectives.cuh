/* llmc_zero/collectives.cuh - reduce a bucket, gather a bucket, and every edge between the two streams.

   Collectives run on a communication stream of our own, kernels on the caller's compute stream. All cross-stream
   edges of the library are here, each an event and one cudaStreamWaitEvent:
     E1  compute -> comm   a bucket's gradients are final            -> reduce it
     E2  comm -> compute   all buckets are reduced                   -> norm and update read them
     E3  compute -> comm   this rank's sums are written              -> gather the sums
     E4  comm -> compute   every rank's sums have arrived            -> finish the norm
     E5  compute -> comm   a bucket's slice is updated               -> gather it
     E6  comm -> compute   a bucket's parameters are complete        -> forward reads them
   Orders that need no edge of their own, because these give them (the comm stream is first in, first out):
     O1  backward of the next step overwrites gradients that a reduce reads:   behind E2
     O2  the sums of the next step overwrite those that a gather reads:        behind E4
     O3  the update of the next step overwrites a slice that a gather reads:   that gather lies before the next
         step's reduces in the comm stream, so behind E2
   With one rank there is no exchange and no edge; with ZERO_NO_NCCL nothing else is possible.
   The communicator must be a blocking one (NCCL's default): with a non-blocking one a collective may reach its stream
   after the event behind it; ncclInProgress is therefore an error here. It may be shared with the host framework: the
   same calls in the same order on every rank.

   defines: ZeroNcclComm, ZeroComm, zero_comm_create, zero_comm_free, zero_comm_reduce, zero_comm_wait_reduced,
            zero_comm_gather_sums, zero_comm_gather, zero_comm_wait_gathered, zero_comm_drain, zero_wait_event,
            zero_clock_mark, zero_clock_read
*/
#ifndef LLMC_ZERO_COLLECTIVES_CUH_INCLUDED
#define LLMC_ZERO_COLLECTIVES_CUH_INCLUDED

#include <cuda_runtime.h>
#include <sched.h>
#include <time.h>
#ifndef ZERO_NO_NCCL
#include <nccl.h>
#endif

#include "memory.cuh"

#ifdef ZERO_NO_NCCL
typedef void* ZeroNcclComm;
#else
typedef ncclComm_t ZeroNcclComm;
#endif

typedef struct ZeroComm {
    const ZeroLayout* layout;
    int rank, ranks;
    ZeroNcclComm comm;     /* the caller's */
    cudaStream_t compute;  /* the caller's */
    cudaStream_t stream;   /* ours */
    double timeout_s;      /* of host waits */
    cudaEvent_t to_comm;   /* E1, E3, E5: recorded and waited for in one breath, so one event serves */
    cudaEvent_t reduced;   /* E2 */
    cudaEvent_t summed;    /* E4 */
    cudaEvent_t* gathered; /* E6, one a bucket */
    char* gather_pending;  /* one a bucket: gathered, and the compute stream has not waited for it yet */
    /* timing: pairs of events on the compute stream round every place where it may stand still for a collective */
    int timing;
    cudaEvent_t* marks;
    int marks_count, marks_capacity;
} ZeroComm;

static inline void zero_comm_free(ZeroComm* c) {
    int i;
    for (i = 0; i < c->marks_capacity; i++)
        if (c->marks[i]) cudaEventDestroy(c->marks[i]);
    free(c->marks);
    if (c->gathered) {
        for (i = 0; i < c->layout->buckets_count; i++)
            if (c->gathered[i]) cudaEventDestroy(c->gathered[i]);
    }
    free(c->gathered);
    free(c->gather_pending);
    if (c->summed) cudaEventDestroy(c->summed);
    if (c->reduced) cudaEventDestroy(c->reduced);
    if (c->to_comm) cudaEventDestroy(c->to_comm);
    if (c->stream) cudaStreamDestroy(c->stream);
    memset(c, 0, sizeof(*c));
}

static inline ZeroResult zero_comm_create_parts(ZeroComm* c) {
    int b;
    if (c->ranks == 1) return zero_ok();
    c->gathered = (cudaEvent_t*)zero_alloc_array((size_t)c->layout->buckets_count, sizeof(cudaEvent_t));
    c->gather_pending = (char*)zero_alloc_array((size_t)c->layout->buckets_count, 1);
    if (!c->gathered || !c->gather_pending)
        return zero_error(ZERO_ERROR_MEMORY, "no host memory for %d buckets", c->layout->buckets_count);
    ZERO_TRY_CUDA(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking));
    ZERO_TRY_CUDA(cudaEventCreateWithFlags(&c->to_comm, cudaEventDisableTiming));
    ZERO_TRY_CUDA(cudaEventCreateWithFlags(&c->reduced, cudaEventDisableTiming));
    ZERO_TRY_CUDA(cudaEventCreateWithFlags(&c->summed, cudaEventDisableTiming));
    for (b = 0; b < c->layout->buckets_count; b++)
        ZERO_TRY_CUDA(cudaEventCreateWithFlags(&c->gathered[b], cudaEventDisableTiming));
    return zero_ok();
}

/* comm and compute stay the caller's and must live as long as c. On an error nothing is left. */
static inline ZeroResult zero_comm_create(ZeroComm* c, const ZeroLayout* layout, int rank, ZeroNcclComm comm,
                                          cudaStream_t compute, double timeout_s, int timing) {
    ZeroResult result;
    memset(c, 0, sizeof(*c));
    c->layout = layout;
    c->rank = rank;
    c->ranks = layout->ranks;
    c->comm = comm;
    c->compute = compute;
    c->timeout_s = timeout_s;
    c->timing = timing;
    result = zero_comm_create_parts(c);
    if (result.code != ZERO_OK) zero_comm_free(c);
    return result;
}

/* ------------------------------------------------------------------ exposed time */

/* Marks a moment on the compute stream; called in pairs. */
static inline ZeroResult zero_clock_mark(ZeroComm* c) {
    if (!c->timing || c->ranks == 1) return zero_ok();
    if (c->marks_count == c->marks_capacity) {
        int capacity = c->marks_capacity ? 2 * c->marks_capacity : 32;
        cudaEvent_t* marks = (cudaEvent_t*)realloc(c->marks, (size_t)capacity * sizeof(cudaEvent_t));
        if (!marks) return zero_error(ZERO_ERROR_MEMORY, "no host memory for %d timing events", capacity);
        memset(marks + c->marks_capacity, 0, (size_t)(capacity - c->marks_capacity) * sizeof(cudaEvent_t));
        c->marks = marks;
        c->marks_capacity = capacity;
    }
    if (!c->marks[c->marks_count]) ZERO_TRY_CUDA(cudaEventCreate(&c->marks[c->marks_count]));
    ZERO_TRY_CUDA(cudaEventRecord(c->marks[c->marks_count], c->compute));
    c->marks_count++;
    return zero_ok();
}

/* Whether an event has happened; "not yet" does not stay behind as the caller's last error. */
static inline ZeroResult zero_query_event(cudaEvent_t event, int* happened) {
    cudaError_t state = cudaEventQuery(event);
    *happened = state == cudaSuccess;
    if (state == cudaErrorNotReady)
        (void)cudaGetLastError();
    else if (state != cudaSuccess)
        return zero_error(ZERO_ERROR_CUDA, "cudaEventQuery: %s: earlier work on the device failed",
                          cudaGetErrorString(state));
    return zero_ok();
}

/* Host wait for an event, never for ever: a peer that died is seen by NCCL or by the time limit (case J1). */
static inline ZeroResult zero_wait_event(ZeroComm* c, cudaEvent_t event) {
    struct timespec start, now;
    long polls = 0;
    int happened;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (;;) {
        ZERO_TRY(zero_query_event(event, &happened));
        if (happened) return zero_ok();
#ifndef ZERO_NO_NCCL
        if (c->comm && polls % 64 == 63) {
            ncclResult_t async = ncclSuccess;
            ZERO_TRY_NCCL(ncclCommGetAsyncError(c->comm, &async));
            ZERO_TRY_NCCL(async);
        }
#endif
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
    if (c->ranks == 1 || !c->stream) { /* no peer to wait for */
        ZERO_TRY_CUDA(cudaStreamSynchronize(c->compute));
        return zero_ok();
    }
    ZERO_TRY_CUDA(cudaEventRecord(c->to_comm, c->compute));
    ZERO_TRY(zero_wait_event(c, c->to_comm));
    ZERO_TRY_CUDA(cudaEventRecord(c->to_comm, c->stream));
    return zero_wait_event(c, c->to_comm);
}

/* Milliseconds that the compute stream stood still for collectives since the last call; waits for the last mark. */
static inline ZeroResult zero_clock_read(ZeroComm* c, double* exposed_ms) {
    int i;
    *exposed_ms = 0.0;
    if (c->marks_count == 0) return zero_ok();
    ZERO_TRY(zero_wait_event(c, c->marks[c->marks_count - 1]));
    for (i = 0; i + 1 < c->marks_count; i += 2) {
        float ms = 0.0f;
        ZERO_TRY_CUDA(cudaEventElapsedTime(&ms, c->marks[i], c->marks[i + 1]));
        *exposed_ms += ms;
    }
    c->marks_count = 0;
    return zero_ok();
}

/* ------------------------------------------------------------------ the exchanges */

#ifdef ZERO_NO_NCCL

static inline ZeroResult zero_comm_reduce(ZeroComm*, int, void*, ZeroReduction, int) { return zero_ok(); }
static inline ZeroResult zero_comm_wait_reduced(ZeroComm*) { return zero_ok(); }
static inline ZeroResult zero_comm_gather_sums(ZeroComm*, const double*, double*) { return zero_ok(); }
static inline ZeroResult zero_comm_gather(ZeroComm*, int, void*) { return zero_ok(); }
static inline ZeroResult zero_comm_wait_gathered(ZeroComm*, int) { return zero_ok(); }

#else

static inline ncclDataType_t zero_nccl_type(ZeroDtype dtype) {
    return dtype == ZERO_BF16 ? ncclBfloat16 : ncclFloat;
}

/* Where a bucket, and this rank's slice of it, lie in a flat buffer. Equal counts on all ranks (A7), own address at
   base + rank * count (C9). */
typedef struct ZeroBucketView {
    char* bucket;
    char* slice;
    size_t bucket_count, slice_count;
} ZeroBucketView;

static inline ZeroBucketView zero_view_bucket(const ZeroComm* c, int b, void* flat) {
    size_t bytes = zero_dtype_bytes(c->layout->dtype);
    ZeroBucketView view;
    view.bucket = (char*)flat + c->layout->buckets[b].flat_offset * bytes;
    view.slice = (char*)flat + zero_slice_offset(c->layout, b, c->rank) * bytes;
    view.bucket_count = c->layout->buckets[b].count;
    view.slice_count = zero_slice_count(c->layout, b);
    return view;
}

/* Sums a bucket of gradients over the ranks, in place, behind what the compute stream has done so far (E1): the own
   slice, or with everywhere = 1 (stage 0) the whole bucket. The reduce-scatter is the same in all stages, so that
   stage 0 sees the same bits as stage 1; together with the gather it moves what a ring all-reduce moves. */
static inline ZeroResult zero_comm_reduce(ZeroComm* c, int b, void* grads, ZeroReduction reduction,
                                          int everywhere) {
    ncclDataType_t type = zero_nccl_type(c->layout->dtype);
    ZeroBucketView g;
    if (c->ranks == 1) return zero_ok();
    g = zero_view_bucket(c, b, grads);
    ZERO_TRY(zero_clock_mark(c));
    ZERO_TRY_CUDA(cudaEventRecord(c->to_comm, c->compute));
    ZERO_TRY_CUDA(cudaStreamWaitEvent(c->stream, c->to_comm, 0)); /* E1 */
    if (reduction == ZERO_REDUCE_ALLREDUCE) {
        ZERO_TRY_NCCL(ncclAllReduce(g.bucket, g.bucket, g.bucket_count, type, ncclSum, c->comm, c->stream));
    } else {
        ZERO_TRY_NCCL(ncclReduceScatter(g.bucket, g.slice, g.slice_count, type, ncclSum, c->comm, c->stream));
        if (everywhere)
            ZERO_TRY_NCCL(ncclAllGather(g.slice, g.bucket, g.slice_count, type, c->comm, c->stream));
    }
    return zero_clock_mark(c);
}

/* The compute stream waits for every reduce issued so far (E2). */
static inline ZeroResult zero_comm_wait_reduced(ZeroComm* c) {
    if (c->ranks == 1) return zero_ok();
    ZERO_TRY(zero_clock_mark(c));
    ZERO_TRY_CUDA(cudaEventRecord(c->reduced, c->stream));
    ZERO_TRY_CUDA(cudaStreamWaitEvent(c->compute, c->reduced, 0)); /* E2 */
    return zero_clock_mark(c);
}

/* Gathers two doubles of each rank: all[2 * r] and all[2 * r + 1] are rank r's (E3, E4). */
static inline ZeroResult zero_comm_gather_sums(ZeroComm* c, const double* own, double* all) {
    if (c->ranks == 1) return zero_ok();
    ZERO_TRY(zero_clock_mark(c));
    ZERO_TRY_CUDA(cudaEventRecord(c->to_comm, c->compute));
    ZERO_TRY_CUDA(cudaStreamWaitEvent(c->stream, c->to_comm, 0)); /* E3 */
    ZERO_TRY_NCCL(ncclAllGather(own, all, 2, ncclDouble, c->comm, c->stream));
    ZERO_TRY_CUDA(cudaEventRecord(c->summed, c->stream));
    ZERO_TRY_CUDA(cudaStreamWaitEvent(c->compute, c->summed, 0)); /* E4 */
    return zero_clock_mark(c);
}

/* Sends this rank's slice of a bucket of params to all, behind the update that the compute stream has just been
   given (E5). */
static inline ZeroResult zero_comm_gather(ZeroComm* c, int b, void* params) {
    ZeroBucketView p;
    if (c->ranks == 1) return zero_ok();
    p = zero_view_bucket(c, b, params);
    ZERO_TRY(zero_clock_mark(c));
    ZERO_TRY_CUDA(cudaEventRecord(c->to_comm, c->compute));
    ZERO_TRY_CUDA(cudaStreamWaitEvent(c->stream, c->to_comm, 0)); /* E5 */
    ZERO_TRY_NCCL(ncclAllGather(p.slice, p.bucket, p.slice_count, zero_nccl_type(c->layout->dtype), c->comm,
                                c->stream));
    ZERO_TRY_CUDA(cudaEventRecord(c->gathered[b], c->stream));
    c->gather_pending[b] = 1;
    return zero_clock_mark(c);
}

/* The compute stream waits until a bucket of params is complete (E6); free if it has waited before. */
static inline ZeroResult zero_comm_wait_gathered(ZeroComm* c, int b) {
    if (c->ranks == 1 || !c->gather_pending[b]) return zero_ok();
    ZERO_TRY(zero_clock_mark(c));
    ZERO_TRY_CUDA(cudaStreamWaitEvent(c->compute, c->gathered[b], 0)); /* E6 */
    c->gather_pending[b] = 0;
    return zero_clock_mark(c);
}

#endif /* ZERO_NO_NCCL */

#endif /* LLMC_ZERO_COLLECTIVES_CUH_INCLUDED */
