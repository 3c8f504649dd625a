/* llmc_zero/optimizer.cuh - ZeroOptimizer: the buffers and the step. This is what takes the place of AdamW.

       ZeroConfig config = zero_config();                 // AdamW, fp32, stage 1
       config.max_norm = 1.0;
       ZeroOptimizer z;
       zero_init(&z, &config, &layout, rank, comm, stream, &memory);
       zero_alloc_params(&z, NULL);                       // or your own buffer of zero_padded_count elements
       ... write the initial parameters to z.params + layout.segments[s].flat_offset on `stream` ...
       zero_alloc_grads(&z, NULL);
       zero_alloc_state(&z);                              // m, v = 0; masters = params

       for each step
           for micro = 0 .. micros - 1
               zero_begin(&z, micro, micros, 1.0 / micros);
               for unit = 0 .. units - 1:                 // forward
                   zero_params_acquire(&z, unit, &p); ... launch kernels on `stream` ... zero_params_release(&z, unit);
               for unit = units - 1 .. 0:                 // backward
                   zero_params_acquire(&z, unit, &p);
                   zero_grads_acquire(&z, unit, &g, &add); ... write to g, or add to it ...
                   zero_grads_ready(&z, unit);  zero_params_release(&z, unit);
           zero_grad_norm(&z, &norm);                     // NULL: nobody wants to know, the host waits for nothing
           zero_update(&z, lr);
       zero_free(&z);

   Every call returns a ZeroResult; all but the first three belong to the compute stream: they launch on it or make
   it wait, and return at once. Every rank makes the same calls in the same order. After an error of a collective the
   communicator is of no use: end all ranks.

   Who owns what: layout, comm, stream and a buffer handed in stay the caller's and must outlive z. What is passed as
   NULL is allocated by z and freed by zero_free. The gaps of the gradients are set to zero once (L6); do not write
   there.

   Invariants:
     Z1  between zero_update and the next acquire of a unit, that unit's params may be incomplete; read them through
         zero_params_acquire (or zero_params_acquire_all).
     Z2  a bucket is reduced once a step, when the last of its units is ready in the last micro-step.
     Z3  params, m, v, masters and t change in zero_update only, and only if no rank saw a gradient that is not
         finite and the norm after clipping can be squared in fp32 (Adam: below 1.8e19); then on all ranks.
     Z4  the same calls give the same bits with overlap 0 and 1.

   defines: ZeroConfig, zero_config, ZeroOptimizer, ZeroReport, zero_init, zero_alloc_params, zero_alloc_grads,
            zero_alloc_state, zero_free, zero_begin, zero_params_acquire, zero_params_release,
            zero_params_acquire_all, zero_grads_acquire, zero_grads_ready, zero_attach, zero_vote, zero_grad_norm,
            zero_skip, zero_set_step, zero_update, zero_report, zero_params_changed, zero_state_changed, zero_set_t
*/
#ifndef LLMC_ZERO_OPTIMIZER_CUH_INCLUDED
#define LLMC_ZERO_OPTIMIZER_CUH_INCLUDED

#include "adamw.cuh"
#include "collectives.cuh"

typedef struct ZeroConfig {
    int stage; /* 0: state everywhere; 1: state on its owner */
    ZeroAlgorithm algorithm;
    ZeroReduction reduction;
    ZeroAccumulation accumulation;
    int masters; /* bf16: 1 keeps fp32 masters, 0 rounds stochastically; fp32: no difference */
    int overlap; /* 1: reduce during backward, gather during the next forward; 0: all at the end of the step */
    int timing;  /* 1: zero_report tells how long the compute stream stood still for collectives */
    double beta1, beta2, eps, weight_decay, momentum;
    double max_norm;     /* clip the global norm to this; 0: do not clip */
    uint64_t seed;       /* of stochastic rounding; the same on all ranks */
    uint64_t skip_limit; /* so many skipped steps in a row are an error; 0: never */
    double timeout_s;    /* host waits end with an error after this */
} ZeroConfig;

static inline ZeroConfig zero_config(void) {
    ZeroConfig config;
    memset(&config, 0, sizeof(config));
    config.stage = 1;
    config.masters = 1;
    config.overlap = 1;
    config.beta1 = 0.9;
    config.beta2 = 0.999;
    config.eps = 1e-8;
    config.momentum = 0.9;
    config.skip_limit = 20;
    config.timeout_s = 600.0;
    return config;
}

typedef struct ZeroUnitState {
    int params_open; /* acquired and not yet released */
    char grads_open; /* acquired in this micro-step */
    char ready;      /* reported in this micro-step */
} ZeroUnitState;

typedef struct ZeroOptimizer {
    ZeroConfig config;
    const ZeroLayout* layout;
    ZeroMemory* memory; /* may be NULL */
    ZeroComm comm;
    int rank, ranks;
    /* device buffers */
    void* params;      /* flat */
    void* grads;       /* flat */
    float* exp_avg;    /* m, zero_state_count elements; so are the next two. NULL where not kept */
    float* exp_avg_sq; /* v */
    float* masters;
    ZeroChunk* chunks;     /* of this rank: norm, and in stage 1 the update */
    ZeroChunk* all_chunks; /* stage 0 with several ranks: of the whole model */
    double* partials;      /* norm; see ZeroNorm */
    double* own_sums;
    double* all_sums;
    ZeroScalars* scalars;
    int params_owned, grads_owned, state_there;
    size_t chunks_count, all_chunks_count;
    size_t* bucket_chunks; /* host: chunks of bucket b in the update's table are [b] .. [b + 1] */
    /* what the host knows of the device, copied behind each norm */
    ZeroScalars* status; /* pinned */
    cudaEvent_t status_copied;
    int status_in_flight; /* a copy was sent and has not been seen to arrive */
    int status_stale;     /* scalars changed since the last copy was sent */
    const double* passenger;
    int vote;
    /* the step */
    ZeroUnitState* units;
    int* bucket_waits; /* units that are not ready yet */
    char* bucket_reduced;
    int micro, micros; /* micro is -1 outside a step */
    int norm_done;
    double grad_scale;
} ZeroOptimizer;

/* What became of the steps so far. */
typedef struct ZeroReport {
    uint64_t t;       /* updates applied */
    uint64_t skipped; /* steps dropped because a gradient was not finite */
    uint64_t skipped_in_row;
    uint64_t dropped;     /* steps dropped by zero_skip */
    int skip;             /* the last step was one of either */
    float norm;           /* of the last step, before clipping */
    double passenger_sum; /* zero_attach */
    int votes;            /* zero_vote: ranks that had a vote in the last step */
    double exposed_ms;    /* compute stream stood still for collectives since the last report; needs timing */
} ZeroReport;

/* ------------------------------------------------------------------ set up, tear down */

static inline ZeroResult zero_device_alloc(ZeroOptimizer* z, ZeroMemoryKind kind, const char* what,
                                           size_t bytes, void** pointer) {
    cudaError_t error = cudaMalloc(pointer, bytes ? bytes : 1);
    if (error != cudaSuccess) {
        size_t free_bytes = 0, total_bytes = 0;
        *pointer = NULL;
        cudaGetLastError(); /* a refused allocation is reported here, not by the next call */
        cudaMemGetInfo(&free_bytes, &total_bytes);
        return zero_error(ZERO_ERROR_MEMORY,
                          "%s needs %.1f MB of device memory, %.1f MB are free (%s): use "
                          "more ranks, a smaller model or bf16",
                          what, 1e-6 * (double)bytes, 1e-6 * (double)free_bytes, cudaGetErrorString(error));
    }
    zero_memory_add(z->memory, kind, bytes);
    return zero_ok();
}

static inline void zero_device_free(ZeroOptimizer* z, ZeroMemoryKind kind, size_t bytes, void* pointer) {
    if (!pointer) return;
    cudaFree(pointer);
    zero_memory_remove(z->memory, kind, bytes);
}

static inline size_t zero_flat_bytes(const ZeroOptimizer* z) {
    return zero_padded_count(z->layout) * zero_dtype_bytes(z->layout->dtype);
}
static inline size_t zero_state_bytes(const ZeroOptimizer* z) {
    return zero_state_count(z->layout, z->config.stage) * sizeof(float);
}
static inline size_t zero_partials_bytes(const ZeroOptimizer* z) {
    return sizeof(double) * zero_norm_blocks(z->chunks_count);
}

/* Waits for the work in flight, at most timeout_s, and frees what z allocated. If the streams do not come to an end (a
   peer is gone), device memory is left to the end of the process, because cudaFree would wait for ever. Safe on a z
   whose zero_init failed and on one that is all zero. */
static inline void zero_free(ZeroOptimizer* z) {
    if (z->layout == NULL) return;
    if (zero_comm_drain(&z->comm).code == ZERO_ERROR_NCCL) {
        memset(z, 0, sizeof(*z));
        return;
    }
    if (z->params_owned) zero_device_free(z, ZERO_MEMORY_PARAMS, zero_flat_bytes(z), z->params);
    if (z->grads_owned) zero_device_free(z, ZERO_MEMORY_GRADS, zero_flat_bytes(z), z->grads);
    zero_device_free(z, ZERO_MEMORY_STATE, zero_state_bytes(z), z->exp_avg);
    zero_device_free(z, ZERO_MEMORY_STATE, zero_state_bytes(z), z->exp_avg_sq);
    zero_device_free(z, ZERO_MEMORY_STATE, zero_state_bytes(z), z->masters);
    zero_device_free(z, ZERO_MEMORY_SCRATCH, z->chunks_count * sizeof(ZeroChunk), z->chunks);
    zero_device_free(z, ZERO_MEMORY_SCRATCH, z->all_chunks_count * sizeof(ZeroChunk), z->all_chunks);
    zero_device_free(z, ZERO_MEMORY_SCRATCH, zero_partials_bytes(z), z->partials);
    zero_device_free(z, ZERO_MEMORY_SCRATCH, 2 * sizeof(double), z->own_sums);
    if (z->ranks > 1)
        zero_device_free(z, ZERO_MEMORY_SCRATCH, 2 * sizeof(double) * (size_t)z->ranks, z->all_sums);
    zero_device_free(z, ZERO_MEMORY_SCRATCH, ZERO_SCALARS_BYTES, z->scalars);
    if (z->status) cudaFreeHost(z->status);
    if (z->status_copied) cudaEventDestroy(z->status_copied);
    zero_comm_free(&z->comm);
    free(z->bucket_chunks);
    free(z->units);
    free(z->bucket_waits);
    free(z->bucket_reduced);
    memset(z, 0, sizeof(*z));
}

/* Builds a chunk table and puts it on the device. */
static inline ZeroResult zero_upload_chunks(ZeroOptimizer* z, int rank, ZeroChunk** device_chunks,
                                            size_t* count, size_t* bucket_first) {
    ZeroChunk* chunks = NULL;
    ZeroResult result = zero_chunk_table(z->layout, rank, ZERO_CHUNK_MAX_COUNT, &chunks, bucket_first);
    if (result.code != ZERO_OK) return result;
    *count = bucket_first[z->layout->buckets_count];
    result = zero_device_alloc(z, ZERO_MEMORY_SCRATCH, "a chunk table", *count * sizeof(ZeroChunk),
                               (void**)device_chunks);
    if (result.code == ZERO_OK && *count > 0) {
        /* on the stream that reads it, and finished before the host's copy goes */
        cudaError_t error = cudaMemcpyAsync(*device_chunks, chunks, *count * sizeof(ZeroChunk),
                                            cudaMemcpyHostToDevice, z->comm.compute);
        if (error == cudaSuccess) error = cudaStreamSynchronize(z->comm.compute);
        if (error != cudaSuccess)
            result = zero_error(ZERO_ERROR_CUDA, "copying a chunk table: %s", cudaGetErrorString(error));
    }
    free(chunks);
    return result;
}

static inline ZeroResult zero_check_config(const ZeroConfig* c, const ZeroLayout* layout, int rank,
                                           ZeroNcclComm comm) {
    const struct {
        const char* name;
        double value, low, high;
    } ranges[] = {{"beta1", c->beta1, 0.0, 1.0},
                  {"beta2", c->beta2, 0.0, 1.0},
                  {"momentum", c->momentum, 0.0, 1.0},
                  {"eps", c->eps, 0.0, 1e30},
                  {"weight_decay", c->weight_decay, 0.0, 1e30},
                  {"max_norm", c->max_norm, 0.0, 1e300},
                  {"timeout_s", c->timeout_s, 1e-3, 1e9}};
    size_t i;
    if (c->stage != 0 && c->stage != 1)
        return zero_error(ZERO_ERROR_ARGUMENT, "stage %d is not in this version; 0 and 1 are", c->stage);
    if (rank < 0 || rank >= layout->ranks)
        return zero_error(ZERO_ERROR_ARGUMENT, "rank %d; the layout has %d ranks", rank, layout->ranks);
    if (layout->ranks > 1 && comm == NULL)
        return zero_error(ZERO_ERROR_ARGUMENT, "%d ranks and no communicator", layout->ranks);
#ifdef ZERO_NO_NCCL
    if (layout->ranks > 1)
        return zero_error(ZERO_ERROR_ARGUMENT,
                          "%d ranks, but this program was built with ZERO_NO_NCCL for one", layout->ranks);
#endif
    if ((c->reduction != ZERO_REDUCE_NCCL && c->reduction != ZERO_REDUCE_ALLREDUCE) ||
        c->accumulation != ZERO_ACCUMULATE_STEP)
        return zero_error(ZERO_ERROR_ARGUMENT, "reduction %d with accumulation %d is not in this version",
                          (int)c->reduction, (int)c->accumulation);
    if (layout->model_count == 0) return zero_error(ZERO_ERROR_ARGUMENT, "the model has no elements");
    if (c->algorithm != ZERO_ADAMW && c->algorithm != ZERO_ADAM && c->algorithm != ZERO_SGD)
        return zero_error(ZERO_ERROR_ARGUMENT, "algorithm %d is not known", (int)c->algorithm);
    if (c->reduction == ZERO_REDUCE_ALLREDUCE && c->stage != 0)
        return zero_error(ZERO_ERROR_ARGUMENT, "reduction allreduce works in stage 0 only, not in stage %d",
                          c->stage);
    for (i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++)
        if (!(ranges[i].value >= ranges[i].low && ranges[i].value <= ranges[i].high))
            return zero_error(ZERO_ERROR_ARGUMENT, "%s is %g; %g .. %g are allowed", ranges[i].name,
                              ranges[i].value, ranges[i].low, ranges[i].high);
    if (c->algorithm != ZERO_SGD && (c->beta1 >= 1.0 || c->beta2 >= 1.0 || c->eps < 1e-37))
        return zero_error(ZERO_ERROR_ARGUMENT, "betas %g and %g must be below 1, eps %g at least 1e-37",
                          c->beta1, c->beta2, c->eps);
    return zero_ok();
}

static inline ZeroResult zero_init_parts(ZeroOptimizer* z, ZeroNcclComm comm, cudaStream_t compute) {
    const size_t buckets = (size_t)z->layout->buckets_count, units = (size_t)z->layout->units_count;
    const int all = z->config.stage == 0 && z->ranks > 1;
    ZERO_TRY(
        zero_comm_create(&z->comm, z->layout, z->rank, comm, compute, z->config.timeout_s, z->config.timing));
    z->bucket_chunks = (size_t*)zero_alloc_array(buckets + 1, sizeof(size_t));
    z->units = (ZeroUnitState*)zero_alloc_array(units, sizeof(ZeroUnitState));
    z->bucket_waits = (int*)zero_alloc_array(buckets, sizeof(int));
    z->bucket_reduced = (char*)zero_alloc_array(buckets, 1);
    if (!z->bucket_chunks || !z->units || !z->bucket_waits || !z->bucket_reduced)
        return zero_error(ZERO_ERROR_MEMORY, "no host memory for %zu buckets and %zu units", buckets, units);
    ZERO_TRY(zero_upload_chunks(z, z->rank, &z->chunks, &z->chunks_count, z->bucket_chunks));
    if (all)
        ZERO_TRY(
            zero_upload_chunks(z, ZERO_ALL_RANKS, &z->all_chunks, &z->all_chunks_count, z->bucket_chunks));
    ZERO_TRY(zero_device_alloc(z, ZERO_MEMORY_SCRATCH, "partial sums", zero_partials_bytes(z),
                               (void**)&z->partials));
    ZERO_TRY(zero_device_alloc(z, ZERO_MEMORY_SCRATCH, "a sum", 2 * sizeof(double), (void**)&z->own_sums));
    z->all_sums = z->own_sums;
    if (z->ranks > 1) {
        z->all_sums = NULL;
        ZERO_TRY(zero_device_alloc(z, ZERO_MEMORY_SCRATCH, "sums", 2 * sizeof(double) * (size_t)z->ranks,
                                   (void**)&z->all_sums));
    }
    ZERO_TRY(zero_device_alloc(z, ZERO_MEMORY_SCRATCH, "scalars", ZERO_SCALARS_BYTES, (void**)&z->scalars));
    ZERO_TRY_CUDA(cudaMemsetAsync(z->scalars, 0, ZERO_SCALARS_BYTES, compute));
    ZERO_TRY_CUDA(cudaMallocHost((void**)&z->status, sizeof(ZeroScalars)));
    memset(z->status, 0, sizeof(ZeroScalars));
    ZERO_TRY_CUDA(cudaEventCreateWithFlags(&z->status_copied, cudaEventDisableTiming));
    return zero_ok();
}

/* layout: kept by reference. comm: of layout->ranks ranks, `rank` among them; NULL for one rank. compute: the stream
   that the caller's kernels run on. memory: counts what is allocated, or NULL. On an error z is empty. */
static inline ZeroResult zero_init(ZeroOptimizer* z, const ZeroConfig* config, const ZeroLayout* layout,
                                   int rank, ZeroNcclComm comm, cudaStream_t compute, ZeroMemory* memory) {
    ZeroResult result;
    memset(z, 0, sizeof(*z));
    ZERO_TRY(zero_check_config(config, layout, rank, comm));
    z->config = *config;
    z->layout = layout;
    z->memory = memory;
    z->rank = rank;
    z->ranks = layout->ranks;
    z->micro = -1;
    z->comm.compute = compute;
    result = zero_init_parts(z, comm, compute);
    if (result.code != ZERO_OK) zero_free(z);
    return result;
}

/* A flat buffer: the caller's (of zero_padded_count elements, checked for nothing but NULL), or a new one, zeroed. */
static inline ZeroResult zero_take_buffer(ZeroOptimizer* z, ZeroMemoryKind kind, const char* what,
                                          void* given, void** buffer, int* owned) {
    if (*buffer) return zero_error(ZERO_ERROR_ORDER, "%s are there already", what);
    if (given) {
        *buffer = given;
        return zero_ok();
    }
    ZERO_TRY(zero_device_alloc(z, kind, what, zero_flat_bytes(z), buffer));
    *owned = 1;
    ZERO_TRY_CUDA(cudaMemsetAsync(*buffer, 0, zero_flat_bytes(z), z->comm.compute));
    return zero_ok();
}

/* params: NULL, or the caller's device buffer; it may hold the parameters already. */
static inline ZeroResult zero_alloc_params(ZeroOptimizer* z, void* params) {
    return zero_take_buffer(z, ZERO_MEMORY_PARAMS, "parameters", params, &z->params, &z->params_owned);
}

/* grads: NULL, or the caller's device buffer, whose gaps and padding are set to zero on the compute stream (L6). */
static inline ZeroResult zero_alloc_grads(ZeroOptimizer* z, void* grads) {
    const ZeroLayout* layout = z->layout;
    const size_t bytes = zero_dtype_bytes(layout->dtype);
    size_t end = 0;
    int i;
    ZERO_TRY(zero_take_buffer(z, ZERO_MEMORY_GRADS, "gradients", grads, &z->grads, &z->grads_owned));
    for (i = 0; grads != NULL && i <= layout->by_offset_count; i++) {
        int last = i == layout->by_offset_count;
        const ZeroSegment* segment = last ? NULL : &layout->segments[layout->by_offset[i]];
        size_t next = last ? layout->padded_count : segment->flat_offset;
        if (next > end)
            ZERO_TRY_CUDA(
                cudaMemsetAsync((char*)grads + end * bytes, 0, (next - end) * bytes, z->comm.compute));
        if (!last) end = segment->flat_offset + segment->count;
    }
    return zero_ok();
}

template <typename Master>
static __global__ void __launch_bounds__(ZERO_BLOCK_THREADS)
    zero_copy_masters_kernel(const ZeroChunk* chunks, const ZeroBf16* params, Master* masters) {
    const ZeroChunk& chunk = chunks[blockIdx.x];
    for (uint32_t i = threadIdx.x; i < chunk.count; i += ZERO_BLOCK_THREADS)
        masters[chunk.state_offset + i] = zero_from_bf16(params[chunk.flat_offset + i].bits);
}

template <typename Master>
static __global__ void __launch_bounds__(ZERO_BLOCK_THREADS)
    zero_round_masters_kernel(const ZeroChunk* chunks, const Master* masters, ZeroBf16* params) {
    const ZeroChunk& chunk = chunks[blockIdx.x];
    for (uint32_t i = threadIdx.x; i < chunk.count; i += ZERO_BLOCK_THREADS)
        params[chunk.flat_offset + i].bits = (uint16_t)zero_to_bf16(masters[chunk.state_offset + i]);
}

static inline const ZeroChunk* zero_update_chunks(const ZeroOptimizer* z) {
    return z->all_chunks ? z->all_chunks : z->chunks;
}

/* Tells z that params were written from outside (initial weights, weights loaded from elsewhere): masters are made
   from them again, so that they do not overwrite the new weights (case E2). Every rank must have written the same, on
   the compute stream and, once steps have run, behind zero_params_acquire_all: gathers may still be writing before. */
static inline ZeroResult zero_params_changed(ZeroOptimizer* z) {
    size_t chunks_count = z->bucket_chunks[z->layout->buckets_count];
    cudaLaunchConfig_t config = zero_launch_config(chunks_count, ZERO_BLOCK_THREADS, z->comm.compute);
    if (!z->params) return zero_error(ZERO_ERROR_ORDER, "call zero_alloc_params first");
    if (!z->masters || chunks_count == 0) return zero_ok();
    ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_copy_masters_kernel<float>, zero_update_chunks(z),
                                     (const ZeroBf16*)z->params, z->masters));
    return zero_ok();
}

/* Tells z that this rank's masters were written from outside (a resumed run), or without masters its own slices of the
   params: params are rounded from the masters as zero_update rounds them, and gathered. All ranks together, between
   steps, after zero_params_acquire_all. */
static inline ZeroResult zero_state_changed(ZeroOptimizer* z) {
    size_t chunks_count = z->bucket_chunks[z->layout->buckets_count];
    cudaLaunchConfig_t config = zero_launch_config(chunks_count, ZERO_BLOCK_THREADS, z->comm.compute);
    int b;
    if (!z->state_there) return zero_error(ZERO_ERROR_ORDER, "call zero_alloc_state first");
    if (z->micro >= 0) return zero_error(ZERO_ERROR_ORDER, "zero_state_changed in the middle of a step");
    if (z->masters && chunks_count > 0)
        ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_round_masters_kernel<float>, zero_update_chunks(z),
                                         (const float*)z->masters, (ZeroBf16*)z->params));
    for (b = 0; z->config.stage > 0 && b < z->layout->buckets_count; b++)
        ZERO_TRY(zero_comm_gather(&z->comm, b, z->params));
    return zero_ok();
}

/* Allocates m and v as zeros and masters as copies of the params, which must be written by now. */
static inline ZeroResult zero_alloc_state(ZeroOptimizer* z) {
    const ZeroConfig* c = &z->config;
    float** arrays[3] = {&z->exp_avg, &z->exp_avg_sq, &z->masters};
    const char* names[3] = {"exp_avg", "exp_avg_sq", "fp32 masters"};
    const int wanted[3] = {c->algorithm != ZERO_SGD || c->momentum != 0.0, c->algorithm != ZERO_SGD,
                           z->layout->dtype == ZERO_BF16 && c->masters};
    int i;
    if (!z->params) return zero_error(ZERO_ERROR_ORDER, "call zero_alloc_params before zero_alloc_state");
    if (z->state_there) return zero_error(ZERO_ERROR_ORDER, "the state is there already");
    for (i = 0; i < 3; i++) {
        if (!wanted[i]) continue;
        ZERO_TRY(zero_device_alloc(z, ZERO_MEMORY_STATE, names[i], zero_state_bytes(z), (void**)arrays[i]));
        ZERO_TRY_CUDA(cudaMemsetAsync(*arrays[i], 0, zero_state_bytes(z), z->comm.compute));
    }
    z->state_there = 1;
    return zero_params_changed(z);
}

/* Sets the number of updates applied so far: a resumed run, or a caller that counts for itself. */
static inline ZeroResult zero_set_t(ZeroOptimizer* z, uint64_t t) {
    return zero_set_t_launch(z->scalars, t, z->comm.compute);
}

/* ------------------------------------------------------------------ forward and backward */

static inline ZeroResult zero_check_unit(const ZeroOptimizer* z, int unit, const char* call) {
    if (unit < 0 || unit >= z->layout->units_count)
        return zero_error(ZERO_ERROR_ARGUMENT, "%s: unit %d; the layout has units 0 .. %d", call, unit,
                          z->layout->units_count - 1);
    return zero_ok();
}

static inline int zero_unit_buckets(const ZeroOptimizer* z, int unit, const int** buckets) {
    const int* first = z->layout->unit_buckets_first;
    *buckets = z->layout->unit_buckets + first[unit];
    return first[unit + 1] - first[unit];
}

/* Every unit with elements must have been reported in this micro-step. */
static inline ZeroResult zero_check_all_ready(const ZeroOptimizer* z) {
    int u, s;
    const int* buckets;
    for (u = 0; u < z->layout->units_count; u++) {
        if (z->units[u].ready || zero_unit_buckets(z, u, &buckets) == 0) continue;
        for (s = 0; s < z->layout->segments_count && z->layout->segments[s].unit != u; s++) {
        }
        return zero_error(ZERO_ERROR_ORDER,
                          "unit %d of %d (%s ...) was not reported by zero_grads_ready in micro-step "
                          "%d of %d",
                          u, z->layout->units_count, zero_segment_name(z->layout, s), z->micro, z->micros);
    }
    return zero_ok();
}

/* Begins micro-step `micro` (0 .. micros - 1) of a step. grad_scale: what the gradients of the whole step, summed
   over micro-steps, still lack: 1 if the caller has divided the loss by micros, 1/micros if not. */
static inline ZeroResult zero_begin(ZeroOptimizer* z, int micro, int micros, double grad_scale) {
    const int marks_max = 1 << 20; /* nobody reads them: begin anew */
    int b, u, expected = z->micro < 0 ? 0 : z->micro + 1;
    if (!z->params || !z->grads || !z->state_there)
        return zero_error(ZERO_ERROR_ORDER,
                          "call zero_alloc_params, zero_alloc_grads and zero_alloc_state first");
    if (micros < 1 || micro < 0 || micro >= micros)
        return zero_error(ZERO_ERROR_ARGUMENT, "micro-step %d of %d", micro, micros);
    if (micro != expected || (micro > 0 && micros != z->micros))
        return zero_error(ZERO_ERROR_ORDER,
                          "micro-step %d of %d begins, but %d of %d is next: a step ends with "
                          "zero_update",
                          micro, micros, expected, z->micro < 0 ? micros : z->micros);
    if (!(grad_scale > 0.0 && grad_scale <= 3.4e38))
        return zero_error(ZERO_ERROR_ARGUMENT, "grad_scale is %g; it must be positive, at most 3.4e38",
                          grad_scale);
    if (micro > 0) ZERO_TRY(zero_check_all_ready(z));
    z->micro = micro;
    z->micros = micros;
    z->grad_scale = grad_scale;
    z->norm_done = 0;
    if (micro == 0 && z->comm.marks_count > marks_max) z->comm.marks_count = 0;
    for (u = 0; u < z->layout->units_count; u++) z->units[u].grads_open = z->units[u].ready = 0;
    for (b = 0; b < z->layout->buckets_count; b++) {
        z->bucket_waits[b] = z->layout->buckets[b].units;
        z->bucket_reduced[b] = 0;
    }
    return zero_ok();
}

/* Gives where the unit's parameters begin (segment s of it lies zero_unit_offset(layout, s) elements behind), and
   makes the compute stream wait until they are complete. Works outside a step too (evaluation). */
static inline ZeroResult zero_params_acquire(ZeroOptimizer* z, int unit, void** params) {
    const int* buckets;
    int i, count;
    *params = NULL;
    ZERO_TRY(zero_check_unit(z, unit, "zero_params_acquire"));
    if (!z->params) return zero_error(ZERO_ERROR_ORDER, "call zero_alloc_params first");
    count = zero_unit_buckets(z, unit, &buckets);
    for (i = 0; i < count; i++) ZERO_TRY(zero_comm_wait_gathered(&z->comm, buckets[i]));
    z->units[unit].params_open++;
    *params = (char*)z->params + z->layout->unit_offset[unit] * zero_dtype_bytes(z->layout->dtype);
    return zero_ok();
}

/* The unit's parameters are not read any more by work that is not launched yet. */
static inline ZeroResult zero_params_release(ZeroOptimizer* z, int unit) {
    ZERO_TRY(zero_check_unit(z, unit, "zero_params_release"));
    if (z->units[unit].params_open == 0)
        return zero_error(ZERO_ERROR_ORDER, "unit %d is released more often than acquired", unit);
    z->units[unit].params_open--;
    return zero_ok();
}

/* Acquires all units and releases them: behind this call the compute stream may read all params until the next
   zero_update (evaluation, hashing, writing a model file). */
static inline ZeroResult zero_params_acquire_all(ZeroOptimizer* z, void** params) {
    int unit;
    void* unit_params;
    *params = NULL;
    for (unit = 0; unit < z->layout->units_count; unit++) {
        ZERO_TRY(zero_params_acquire(z, unit, &unit_params));
        ZERO_TRY(zero_params_release(z, unit));
    }
    *params = z->params;
    return zero_ok();
}

/* Gives where the unit's gradients begin, and whether to write them (*add = 0: first micro-step; what is there is
   old) or to add to them (*add = 1). A unit acquired again before its zero_grads_ready is added to: the caller has
   written its tensors then. */
static inline ZeroResult zero_grads_acquire(ZeroOptimizer* z, int unit, void** grads, int* add) {
    *grads = NULL;
    *add = 0;
    ZERO_TRY(zero_check_unit(z, unit, "zero_grads_acquire"));
    if (z->micro < 0)
        return zero_error(ZERO_ERROR_ORDER, "unit %d: zero_grads_acquire before zero_begin", unit);
    if (z->units[unit].ready)
        return zero_error(ZERO_ERROR_ORDER,
                          "unit %d: zero_grads_acquire after zero_grads_ready in micro-step %d of %d", unit,
                          z->micro, z->micros);
    *add = z->micro > 0 || z->units[unit].grads_open;
    z->units[unit].grads_open = 1;
    *grads = (char*)z->grads + z->layout->unit_offset[unit] * zero_dtype_bytes(z->layout->dtype);
    return zero_ok();
}

static inline ZeroResult zero_reduce_bucket(ZeroOptimizer* z, int b) {
    z->bucket_reduced[b] = 1;
    return zero_comm_reduce(&z->comm, b, z->grads, z->config.reduction, z->config.stage == 0);
}

/* The unit's gradients of this micro-step are final on the compute stream. In the last micro-step, with overlap, the
   buckets that this completes are reduced now (Z2). */
static inline ZeroResult zero_grads_ready(ZeroOptimizer* z, int unit) {
    const int* buckets;
    int i, count;
    ZERO_TRY(zero_check_unit(z, unit, "zero_grads_ready"));
    if (z->micro < 0)
        return zero_error(ZERO_ERROR_ORDER, "unit %d: zero_grads_ready before zero_begin", unit);
    if (z->units[unit].ready)
        return zero_error(ZERO_ERROR_ORDER, "unit %d: zero_grads_ready twice in micro-step %d of %d", unit,
                          z->micro, z->micros);
    z->units[unit].ready = 1;
    if (z->micro < z->micros - 1) return zero_ok();
    count = zero_unit_buckets(z, unit, &buckets);
    for (i = count - 1; i >= 0; i--) {
        int b = buckets[i];
        z->bucket_waits[b]--;
        if (z->bucket_waits[b] == 0 && z->config.overlap) ZERO_TRY(zero_reduce_bucket(z, b));
    }
    return zero_ok();
}

/* ------------------------------------------------------------------ norm and update */

/* One double on the device that travels with the next norms to all ranks and is added up in rank order (the loss,
   say): ZeroReport.passenger_sum. NULL: none. It must be written on the compute stream before zero_grad_norm. */
static inline void zero_attach(ZeroOptimizer* z, const double* device_value) { z->passenger = device_value; }

/* A vote that travels with the next norms: ZeroReport.votes says, on every rank alike, how many ranks gave one. For what
   one rank hears of and all must do in the same step (a signal to stop). 0 takes it back. */
static inline void zero_vote(ZeroOptimizer* z, int vote) { z->vote = vote != 0; }

static inline ZeroResult zero_check_skips(const ZeroOptimizer* z, const ZeroScalars* status) {
    if (z->config.skip_limit == 0 || status->skipped_in_row < z->config.skip_limit) return zero_ok();
    return zero_error(ZERO_ERROR_SKIPS,
                      "%llu steps in a row had gradients that are not finite (limit %llu), after %llu "
                      "good updates: lower the learning rate, clip, or look for the layer that overflows",
                      (unsigned long long)status->skipped_in_row, (unsigned long long)z->config.skip_limit,
                      (unsigned long long)status->t);
}

/* Looks at the status that has arrived, without waiting. */
static inline ZeroResult zero_poll_status(ZeroOptimizer* z) {
    int arrived;
    if (!z->status_in_flight) return zero_ok();
    ZERO_TRY(zero_query_event(z->status_copied, &arrived));
    if (!arrived) return zero_ok();
    z->status_in_flight = 0;
    return zero_check_skips(z, z->status);
}

/* Copies the scalars to the host behind what the compute stream has been given. While a copy is on its way, none is
   sent after it: a host that runs far ahead of the device would else never see one arrive. */
static inline ZeroResult zero_send_status(ZeroOptimizer* z, int even_if_in_flight) {
    z->status_stale = z->status_in_flight && !even_if_in_flight;
    if (z->status_stale) return zero_ok();
    ZERO_TRY_CUDA(
        cudaMemcpyAsync(z->status, z->scalars, sizeof(ZeroScalars), cudaMemcpyDeviceToHost, z->comm.compute));
    ZERO_TRY_CUDA(cudaEventRecord(z->status_copied, z->comm.compute));
    z->status_in_flight = 1;
    return zero_ok();
}

/* The host waits for the newest status; all zero before the first step. */
static inline ZeroResult zero_wait_status(ZeroOptimizer* z) {
    if (z->status_stale) ZERO_TRY(zero_send_status(z, 1));
    if (z->status_in_flight) ZERO_TRY(zero_wait_event(&z->comm, z->status_copied));
    z->status_in_flight = 0;
    return zero_ok();
}

static inline ZeroNorm zero_describe_norm(const ZeroOptimizer* z) {
    ZeroNorm norm = {z->chunks,   z->chunks_count, z->grads,    z->layout->dtype,
                     z->partials, z->own_sums,     z->all_sums, z->scalars};
    return norm;
}

static inline ZeroStepSettings zero_step_settings(const ZeroOptimizer* z) {
    const ZeroConfig* c = &z->config;
    /* Adam squares in fp32: beyond the root of its largest number v would stay infinite for good */
    const double norm_limit = c->algorithm == ZERO_SGD ? 3.4e38 : 1.8e19;
    ZeroStepSettings settings = {c->beta1, c->beta2,  z->grad_scale / z->ranks, c->max_norm, c->seed,
                                 z->ranks, norm_limit};
    return settings;
}

/* Finishes backward: global norm of the mean gradient before clipping, skip decision, t, clip factor; all on the
   device. norm: NULL, or where to put the norm; then the host waits for it. ZERO_ERROR_SKIPS after skip_limit skips in
   a row: in the same step on all ranks if they ask for the norm (or for zero_report); else as soon as the host hears
   of it, which may be some steps later and not in the same step on all ranks, so that they must be ended together. */
static inline ZeroResult zero_grad_norm(ZeroOptimizer* z, float* norm) {
    const ZeroNorm work = zero_describe_norm(z);
    const ZeroStepSettings settings = zero_step_settings(z);
    int b;
    if (norm) *norm = 0.0f;
    if (z->micro < 0 || z->micro != z->micros - 1)
        return zero_error(ZERO_ERROR_ORDER, "zero_grad_norm in micro-step %d of %d: it follows the last",
                          z->micro, z->micros);
    if (!z->norm_done) {
        ZERO_TRY(zero_check_all_ready(z));
        ZERO_TRY(zero_poll_status(z));
        for (b = 0; b < z->layout->buckets_count; b++)
            if (!z->bucket_reduced[b]) ZERO_TRY(zero_reduce_bucket(z, b));
        ZERO_TRY(zero_comm_wait_reduced(&z->comm));
        ZERO_TRY(zero_norm_partials(&work, z->comm.compute));
        ZERO_TRY(zero_norm_sum(&work, z->passenger, z->vote, z->comm.compute));
        ZERO_TRY(zero_comm_gather_sums(&z->comm, z->own_sums, z->all_sums));
        ZERO_TRY(zero_norm_finish(&work, &settings, z->comm.compute));
        ZERO_TRY(zero_send_status(z, 0));
        z->norm_done = 1;
    }
    if (!norm) return zero_ok();
    ZERO_TRY(zero_wait_status(z));
    *norm = z->status->norm;
    return zero_check_skips(z, z->status);
}

/* For a framework that hands over all of Adam's settings with each update (llm.c's gpt2_update). Between zero_grad_norm
   and zero_update, on every rank alike: this is update number t (from 1), with the betas and max_norm that stand in
   z->config now (the caller may change these, eps and weight_decay between two updates). clip_factor: what the
   gradients are multiplied with in place of clipping to max_norm; negative: clip. A step that zero_grad_norm has
   decided to skip stays skipped. */
static inline ZeroResult zero_set_step(ZeroOptimizer* z, uint64_t t, double clip_factor) {
    const ZeroNorm work = zero_describe_norm(z);
    ZeroStepSettings settings = zero_step_settings(z);
    if (!z->norm_done)
        return zero_error(ZERO_ERROR_ORDER,
                          "zero_set_step comes after zero_grad_norm and before zero_update");
    ZERO_TRY(zero_check_config(&z->config, z->layout, z->rank, z->comm.comm));
    if (t == 0) return zero_error(ZERO_ERROR_ARGUMENT, "update number 0; they count from 1");
    if (!(clip_factor <= 3.4e38)) /* NaN too */
        return zero_error(ZERO_ERROR_ARGUMENT,
                          "clip_factor is %g; at most 3.4e38, negative to clip to max_norm", clip_factor);
    if (clip_factor >= 0.0) {
        settings.grad_scale *= clip_factor;
        settings.max_norm = 0.0;
    }
    ZERO_TRY(zero_norm_again(&work, &settings, t, z->comm.compute));
    z->status_stale = 1;
    return zero_ok();
}

/* Drops this step, on every rank alike: params, state and t stay as they are. Between zero_grad_norm and
   zero_update (which still ends the step). */
static inline ZeroResult zero_skip(ZeroOptimizer* z) {
    if (!z->norm_done)
        return zero_error(ZERO_ERROR_ORDER, "zero_skip comes after zero_grad_norm and before zero_update");
    ZERO_TRY(zero_skip_launch(z->scalars, z->comm.compute));
    z->status_stale = 1;
    return zero_ok();
}

/* Ends the step: one launch a bucket over the own slice, its gather behind it. Without a zero_grad_norm before it,
   calls that first. With overlap the params arrive while the next forward starts (Z1). */
static inline ZeroResult zero_update(ZeroOptimizer* z, double lr) {
    const ZeroConfig* c = &z->config;
    ZeroHyper hyper = zero_hyper(lr, c->beta1, c->beta2, c->eps, c->weight_decay, c->momentum);
    ZeroUpdate update = {zero_update_chunks(z), z->params,  z->grads,         z->masters,  z->exp_avg,
                         z->exp_avg_sq,         z->scalars, z->layout->dtype, c->algorithm};
    int b;
    if (!(lr >= 0.0 && lr <= 3.4e38))
        return zero_error(ZERO_ERROR_ARGUMENT, "lr is %g; 0 .. 3.4e38 are allowed", lr);
    if (!(lr * c->weight_decay <= 3.4e38))
        return zero_error(ZERO_ERROR_ARGUMENT, "lr %g times weight_decay %g does not fit into fp32", lr,
                          c->weight_decay);
    if (!z->norm_done) ZERO_TRY(zero_grad_norm(z, NULL));
    for (b = 0; b < z->layout->buckets_count; b++) {
        ZERO_TRY(zero_update_launch(&update, &hyper, z->bucket_chunks[b],
                                    z->bucket_chunks[b + 1] - z->bucket_chunks[b], z->comm.compute));
        if (c->stage > 0) ZERO_TRY(zero_comm_gather(&z->comm, b, z->params));
    }
    if (!c->overlap && c->stage > 0)
        for (b = 0; b < z->layout->buckets_count; b++) ZERO_TRY(zero_comm_wait_gathered(&z->comm, b));
    z->micro = -1;
    z->norm_done = 0;
    return zero_ok();
}

/* What became of the last step. Waits for the device. ZERO_ERROR_SKIPS as zero_grad_norm; the report is filled. */
static inline ZeroResult zero_report(ZeroOptimizer* z, ZeroReport* report) {
    const ZeroScalars* s = z->status;
    memset(report, 0, sizeof(*report));
    ZERO_TRY(zero_wait_status(z));
    report->t = s->t;
    report->skipped = s->skipped;
    report->skipped_in_row = s->skipped_in_row;
    report->dropped = s->dropped;
    report->skip = s->skip;
    report->norm = s->norm;
    report->passenger_sum = s->passenger_sum;
    report->votes = s->votes;
    ZERO_TRY(zero_clock_read(&z->comm, &report->exposed_ms));
    return zero_check_skips(z, s);
}

#endif /* LLMC_ZERO_OPTIMIZER_CUH_INCLUDED */
