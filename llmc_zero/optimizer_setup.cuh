/* llmc_zero/optimizer_setup.cuh - ZeroOptimizer: its settings, its buffers, set-up and tear-down. The manual is in optimizer.cuh.

   defines: ZeroConfig, zero_config, ZeroOptimizer, zero_init, zero_alloc_params, zero_alloc_grads, zero_free
*/
#ifndef LLMC_ZERO_OPTIMIZER_SETUP_CUH_INCLUDED
#define LLMC_ZERO_OPTIMIZER_SETUP_CUH_INCLUDED

#include "adamw.cuh"
#include "call_order.cuh"
#include "reduce.cuh"
#include "slots.cuh"

typedef struct ZeroConfig {
    int stage; /* 0: everything everywhere; 1: state on its owner; 2: gradients, too; 3: parameters, too */
    ZeroAlgorithm algorithm;
    ZeroReduction reduction;
    ZeroAccumulation
        accumulation; /* default: micro with ZERO_REDUCE_ORDERED; in stages 2 and 3 micro always */
    int masters;      /* bf16: 1 keeps fp32 masters, 0 rounds stochastically; fp32: no difference */
    int overlap; /* 1: reduce during backward, gather during the next forward (stage 3: the next unit); 0: no */
    int timing; /* ZeroTiming: 1: zero_report tells how long the compute stream stood still; 2: trace */
    int check_use; /* 1: a slot that is released, or given out to be written, is filled with NaN first (stages 2, 3) */
    double beta1, beta2, eps, weight_decay, momentum;
    double max_norm;     /* clip the global norm to this; 0: do not clip */
    uint64_t seed;       /* of stochastic rounding; the same on all ranks */
    uint64_t skip_limit; /* so many skipped steps in a row are an error; 0: never */
    double timeout_s;    /* host waits end with an error after so long without progress */
    ZeroWatch watch;     /* who watches over the ranks, if somebody does: watchdog.cuh, or the caller's own */
    const int*
        held_units; /* stages 2 and 3: units that stay open across others, as a tied embedding does; the caller's */
    int held_units_count;
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
    char frozen;     /* no segment of it learns */
} ZeroUnitState;

typedef struct ZeroBucketState {
    int waits;        /* units that are not ready yet */
    int units;        /* units that learn: the ones to wait for. 0: never reduced, and gathered once */
    char reduced;     /* in this micro-step, or with -A step in this step */
    char pending;     /* a reduce reads its gradients, and the compute stream has not waited for that yet */
    cudaEvent_t done; /* behind that reduce; stages 0 and 1 with a reduction each micro-step */
} ZeroBucketState;

typedef struct ZeroOptimizer {
    ZeroConfig config;
    ZeroSchedule schedule;
    const ZeroLayout* layout;
    ZeroMemory* memory; /* may be NULL */
    ZeroComm comm;
    int rank, ranks;
    /* device buffers */
    void* params;      /* flat; with schedule.params_sharded the shard */
    void* grads;       /* flat; NULL in stages 2 and 3 */
    float* sums;       /* schedule.sums_sharded: the gradients' sums, a shard */
    float* exp_avg;    /* m, zero_state_count elements; so are the next two. NULL where not kept */
    float* exp_avg_sq; /* v */
    float* masters;
    ZeroSlots params_slots, grads_slots;
    ZeroChunk* chunks;       /* of this rank: norm, sums, and but for stage 0 the update */
    ZeroChunk* all_chunks;   /* stage 0 with several ranks: of the whole model */
    void* scratch;           /* schedule.scratch_bytes */
    uint64_t* own_step_sums; /* ZERO_SUM_WORDS: see ZeroNorm */
    uint64_t* step_sums;
    uint64_t* rank_words; /* 2 of each rank; see zero_check_replicas */
    ZeroScalars* scalars;
    int params_owned, grads_owned, grads_there, state_there;
    size_t chunks_count, all_chunks_count;
    size_t* bucket_chunks; /* host: chunks of bucket b in the update's table are [b] .. [b + 1] */
    ZeroPiece* pieces;     /* host: of this rank's slices; bucket b has [bucket_pieces[b]] .. [b + 1] */
    size_t* bucket_pieces;
    ZeroWindow* windows; /* host: stage 0 with sharded sums */
    size_t windows_count;
    /* what the host knows of the device, copied behind each norm */
    ZeroScalars* status; /* pinned */
    cudaEvent_t status_copied;
    int status_in_flight; /* a copy was sent and has not been seen to arrive */
    int status_stale;     /* scalars changed since the last copy was sent */
    int vote;
    /* the step */
    ZeroUnitState* units;
    ZeroBucketState* buckets;
    int micro, micros; /* micro is -1 outside a step */
    int senders;       /* ranks 0 .. senders - 1 have something to reduce in this micro-step */
    int idle;          /* this rank has no micro-batch in this micro-step */
    int norm_done;
    double grad_scale; /* what the summed gradients lack */
    int64_t batches;   /* micro-batches of the step, of all ranks */
    int drop;          /* this rank drops the step */
    ZeroCallOrder calls;
} ZeroOptimizer;

/* First of all in every call: z is empty if zero_init failed, before it and after zero_free. */
static inline ZeroResult zero_check_made(const ZeroOptimizer* z, const char* call) {
    if (z->layout) return zero_ok();
    return zero_error(
        ZERO_ERROR_ORDER,
        "%s: there is no optimizer: zero_init comes first, and has failed, was not called, or was "
        "undone by zero_free",
        call);
}

/* ------------------------------------------------------------------ memory */

static inline ZeroResult zero_device_alloc(ZeroOptimizer* z, ZeroMemoryKind kind, const char* what,
                                           size_t bytes, void** pointer) {
    cudaError_t error = cudaMalloc(pointer, bytes ? bytes : 1);
    if (error != cudaSuccess) {
        size_t free_bytes = 0, total_bytes = 0;
        *pointer = NULL;
        cudaGetLastError(); /* a refused allocation is reported here, not by the next call */
        cudaMemGetInfo(&free_bytes, &total_bytes);
        return zero_error(ZERO_ERROR_MEMORY,
                          "%s needs %.1f MB of device memory, %.1f MB are free (cudaMalloc: %s): use "
                          "more ranks, a higher stage, a smaller model or bf16",
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

static inline size_t zero_state_bytes(const ZeroOptimizer* z) {
    return zero_state_count(z->layout, z->config.stage) * sizeof(float);
}

static inline void zero_free_slots(ZeroOptimizer* z, ZeroMemoryKind kind, ZeroSlots* slots) {
    int i;
    for (i = 0; i < slots->count; i++)
        zero_device_free(z, kind, zero_slot_bytes(&slots->slots[i], z->layout), slots->slots[i].memory);
    zero_slots_free(slots);
}

static inline void zero_free_buckets(ZeroOptimizer* z) {
    int b;
    for (b = 0; z->buckets && b < z->layout->buckets_count; b++)
        if (z->buckets[b].done) cudaEventDestroy(z->buckets[b].done);
    free(z->buckets);
}

/* Waits for the work in flight, at most timeout_s, and frees what z allocated. If the streams do not come to an end (a
   peer is gone), device memory is left to the end of the process, because cudaFree would wait for ever. Safe on a z
   whose zero_init failed and on one that is all zero. */
static inline void zero_free(ZeroOptimizer* z) {
    const ZeroMemoryKind scratch = ZERO_MEMORY_SCRATCH;
    if (z->layout == NULL) return;
    zero_comm_drain(&z->comm);
    if (zero_comm_is_stuck(&z->comm)) {
        memset(z, 0, sizeof(*z));
        return;
    }
    if (z->params_owned)
        zero_device_free(z, ZERO_MEMORY_PARAMS, zero_params_bytes(&z->schedule, z->layout), z->params);
    if (z->grads_owned) zero_device_free(z, ZERO_MEMORY_GRADS, zero_flat_bytes(z->layout), z->grads);
    zero_device_free(z, ZERO_MEMORY_GRADS, zero_sums_bytes(&z->schedule, z->layout), z->sums);
    zero_free_slots(z, ZERO_MEMORY_PARAMS, &z->params_slots);
    zero_free_slots(z, ZERO_MEMORY_GRADS, &z->grads_slots);
    zero_device_free(z, ZERO_MEMORY_STATE, zero_state_bytes(z), z->exp_avg);
    zero_device_free(z, ZERO_MEMORY_STATE, zero_state_bytes(z), z->exp_avg_sq);
    zero_device_free(z, ZERO_MEMORY_STATE, zero_state_bytes(z), z->masters);
    zero_device_free(z, scratch, z->chunks_count * sizeof(ZeroChunk), z->chunks);
    zero_device_free(z, scratch, z->all_chunks_count * sizeof(ZeroChunk), z->all_chunks);
    zero_device_free(z, scratch, z->schedule.scratch_bytes, z->scratch);
    zero_device_free(z, scratch, ZERO_SUMS_BYTES, z->own_step_sums);
    zero_device_free(z, scratch, ZERO_SUMS_BYTES, z->step_sums);
    zero_device_free(z, scratch, zero_words_bytes(z->layout), z->rank_words);
    zero_device_free(z, scratch, ZERO_SCALARS_BYTES, z->scalars);
    if (z->status) cudaFreeHost(z->status);
    if (z->status_copied) cudaEventDestroy(z->status_copied);
    zero_comm_free(&z->comm);
    free(z->bucket_chunks);
    free(z->pieces);
    free(z->bucket_pieces);
    free(z->windows);
    free(z->units);
    zero_free_buckets(z);
    zero_calls_free(&z->calls);
    memset(z, 0, sizeof(*z));
}

/* ------------------------------------------------------------------ zero_init */

static inline ZeroPlanChoice zero_plan_choice(const ZeroConfig* c, int rank) {
    ZeroPlanChoice choice = {rank,         c->stage,        c->algorithm, c->momentum,   c->masters,
                             c->reduction, c->accumulation, c->overlap,   c->held_units, c->held_units_count};
    return choice;
}

/* The numbers of the optimizer, which a caller may change from step to step. */
static inline ZeroResult zero_check_numbers(const ZeroConfig* c) {
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
    for (i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++)
        if (!(ranges[i].value >= ranges[i].low && ranges[i].value <= ranges[i].high))
            return zero_error(ZERO_ERROR_ARGUMENT, "%s is %g; %g .. %g are allowed", ranges[i].name,
                              ranges[i].value, ranges[i].low, ranges[i].high);
    if (c->algorithm != ZERO_SGD && (c->beta1 >= 1.0 || c->beta2 >= 1.0 || c->eps < 1e-37))
        return zero_error(ZERO_ERROR_ARGUMENT, "betas %g and %g must be below 1, eps %g at least 1e-37",
                          c->beta1, c->beta2, c->eps);
    return zero_ok();
}

static inline ZeroResult zero_check_config(const ZeroConfig* c, const ZeroLayout* layout, int rank,
                                           ZeroNcclComm comm) {
    const ZeroPlanChoice choice = zero_plan_choice(c, rank);
    ZERO_TRY(zero_check_choice(layout, &choice));
    if (layout->ranks > 1 && comm == NULL)
        return zero_error(ZERO_ERROR_ARGUMENT, "%d ranks and no communicator", layout->ranks);
#ifdef ZERO_NO_NCCL
    if (layout->ranks > 1)
        return zero_error(ZERO_ERROR_ARGUMENT,
                          "%d ranks, but this program was built with ZERO_NO_NCCL for one", layout->ranks);
#endif
    if (layout->model_count == 0) return zero_error(ZERO_ERROR_ARGUMENT, "the model has no elements");
    return zero_check_numbers(c);
}

/* Puts a chunk table on the device. */
static inline ZeroResult zero_upload_chunks(ZeroOptimizer* z, const ZeroChunk* chunks, size_t count,
                                            ZeroChunk** device_chunks) {
    ZERO_TRY(zero_device_alloc(z, ZERO_MEMORY_SCRATCH, "a chunk table", count * sizeof(ZeroChunk),
                               (void**)device_chunks));
    if (count == 0) return zero_ok();
    /* on the stream that reads it, and finished before the host's copy goes */
    ZERO_TRY_CUDA(cudaMemcpyAsync(*device_chunks, chunks, count * sizeof(ZeroChunk), cudaMemcpyHostToDevice,
                                  z->comm.compute));
    ZERO_TRY_CUDA(cudaStreamSynchronize(z->comm.compute));
    return zero_ok();
}

/* The pieces in which this rank's slices are summed. */
static inline ZeroResult zero_init_pieces(ZeroOptimizer* z, const ZeroChunk* chunks) {
    const size_t piece_count = z->schedule.piece_count;
    const size_t count =
        zero_walk_pieces(z->layout, z->rank, piece_count, chunks, z->bucket_chunks, NULL, NULL);
    z->pieces = (ZeroPiece*)zero_alloc_array(count, sizeof(ZeroPiece));
    z->bucket_pieces = (size_t*)zero_alloc_array((size_t)z->layout->buckets_count + 1, sizeof(size_t));
    if (!z->pieces || !z->bucket_pieces)
        return zero_error(ZERO_ERROR_MEMORY, "no host memory for %zu pieces of buckets", count);
    zero_walk_pieces(z->layout, z->rank, piece_count, chunks, z->bucket_chunks, z->pieces, z->bucket_pieces);
    return zero_ok();
}

static inline ZeroResult zero_init_own_chunks(ZeroOptimizer* z) {
    ZeroChunk* chunks = NULL;
    ZeroResult result = zero_chunk_table(z->layout, z->rank, ZERO_CHUNK_MAX_COUNT, &chunks, z->bucket_chunks);
    if (result.code == ZERO_OK) {
        z->chunks_count = z->bucket_chunks[z->layout->buckets_count];
        result = zero_upload_chunks(z, chunks, z->chunks_count, &z->chunks);
    }
    if (result.code == ZERO_OK && z->schedule.sum_kernel) result = zero_init_pieces(z, chunks);
    free(chunks);
    return result;
}

/* Stage 0 with several ranks: the table of the whole model, cut at windows if the sums come that way. */
static inline ZeroResult zero_init_all_chunks(ZeroOptimizer* z) {
    ZeroChunk* chunks = NULL;
    ZeroResult result = zero_ok();
    if (!z->schedule.sums_gather) {
        result = zero_chunk_table(z->layout, ZERO_ALL_RANKS, ZERO_CHUNK_MAX_COUNT, &chunks, z->bucket_chunks);
        if (result.code == ZERO_OK) z->all_chunks_count = z->bucket_chunks[z->layout->buckets_count];
    } else {
        z->windows_count =
            zero_walk_windows(z->layout, z->schedule.window_count, NULL, NULL, &z->all_chunks_count);
        z->windows = (ZeroWindow*)zero_alloc_array(z->windows_count + 1, sizeof(ZeroWindow));
        chunks = (ZeroChunk*)zero_alloc_array(z->all_chunks_count, sizeof(ZeroChunk));
        if (!z->windows || !chunks)
            result = zero_error(ZERO_ERROR_MEMORY, "no host memory for %zu chunks", z->all_chunks_count);
        else
            zero_walk_windows(z->layout, z->schedule.window_count, z->windows, chunks, &z->all_chunks_count);
    }
    if (result.code == ZERO_OK) result = zero_upload_chunks(z, chunks, z->all_chunks_count, &z->all_chunks);
    free(chunks);
    return result;
}

/* Which units learn, and in which buckets. The chunk table, made at the same time, knows it of the segments. */
static inline void zero_init_frozen(ZeroOptimizer* z) {
    const ZeroLayout* layout = z->layout;
    int s, b, i;
    for (i = 0; i < layout->units_count; i++) z->units[i].frozen = 1;
    for (s = 0; s < layout->segments_count; s++)
        if (layout->segments[s].count > 0 && layout->segments[s].lr_factor > 0.0f)
            z->units[layout->segments[s].unit].frozen = 0;
    for (b = 0; b < layout->buckets_count; b++)
        for (i = 0; i < layout->buckets[b].units; i++)
            z->buckets[b].units += !z->units[layout->bucket_units[layout->buckets[b].units_first + i]].frozen;
}

static inline ZeroResult zero_init_buckets(ZeroOptimizer* z) {
    const size_t buckets = (size_t)z->layout->buckets_count, units = (size_t)z->layout->units_count;
    const int events = z->schedule.micro && z->config.stage < 2 && z->ranks > 1;
    int b;
    z->bucket_chunks = (size_t*)zero_alloc_array(buckets + 1, sizeof(size_t));
    z->units = (ZeroUnitState*)zero_alloc_array(units, sizeof(ZeroUnitState));
    z->buckets = (ZeroBucketState*)zero_alloc_array(buckets, sizeof(ZeroBucketState));
    if (!z->bucket_chunks || !z->units || !z->buckets)
        return zero_error(ZERO_ERROR_MEMORY, "no host memory for %zu buckets and %zu units", buckets, units);
    zero_init_frozen(z);
    for (b = 0; events && b < z->layout->buckets_count; b++)
        ZERO_TRY_CUDA(cudaEventCreateWithFlags(&z->buckets[b].done, cudaEventDisableTiming));
    return zero_ok();
}

static inline ZeroResult zero_init_parts(ZeroOptimizer* z, ZeroNcclComm comm, cudaStream_t compute) {
    const ZeroPlanChoice choice = zero_plan_choice(&z->config, z->rank);
    ZERO_TRY(zero_schedule(&z->schedule, z->layout, &choice));
    ZERO_TRY(zero_comm_create(&z->comm, z->layout, z->rank, comm, compute, z->config.timeout_s,
                              z->config.watch, (ZeroTiming)z->config.timing));
    ZERO_TRY(zero_init_buckets(z));
    ZERO_TRY(zero_init_own_chunks(z));
    if (z->config.stage == 0 && z->ranks > 1) ZERO_TRY(zero_init_all_chunks(z));
    if (z->schedule.scratch_bytes > 0)
        ZERO_TRY(
            zero_device_alloc(z, ZERO_MEMORY_SCRATCH, "scratch", z->schedule.scratch_bytes, &z->scratch));
    ZERO_TRY(zero_device_alloc(z, ZERO_MEMORY_SCRATCH, "sums", ZERO_SUMS_BYTES, (void**)&z->own_step_sums));
    ZERO_TRY(zero_device_alloc(z, ZERO_MEMORY_SCRATCH, "sums", ZERO_SUMS_BYTES, (void**)&z->step_sums));
    ZERO_TRY(zero_device_alloc(z, ZERO_MEMORY_SCRATCH, "words", zero_words_bytes(z->layout),
                               (void**)&z->rank_words));
    ZERO_TRY_CUDA(cudaMemsetAsync(z->own_step_sums, 0, ZERO_SUMS_BYTES, compute));
    ZERO_TRY(zero_device_alloc(z, ZERO_MEMORY_SCRATCH, "scalars", ZERO_SCALARS_BYTES, (void**)&z->scalars));
    ZERO_TRY_CUDA(cudaMemsetAsync(z->scalars, 0, ZERO_SCALARS_BYTES, compute));
    ZERO_TRY_CUDA(cudaMallocHost((void**)&z->status, sizeof(ZeroScalars)));
    memset(z->status, 0, sizeof(ZeroScalars));
    ZERO_TRY_CUDA(cudaEventCreateWithFlags(&z->status_copied, cudaEventDisableTiming));
    return zero_ok();
}

/* layout: kept by reference. comm: of layout->ranks ranks, `rank` among them; NULL for one rank. compute: the stream
   that the caller's kernels run on. memory: counts what is allocated, or NULL. On an error z is empty: any other call then says
   so. */
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

/* ------------------------------------------------------------------ parameters and gradients */

static inline ZeroResult zero_alloc_zeroed(ZeroOptimizer* z, ZeroMemoryKind kind, const char* what,
                                           size_t bytes, void** buffer) {
    ZERO_TRY(zero_device_alloc(z, kind, what, bytes, buffer));
    ZERO_TRY_CUDA(cudaMemsetAsync(*buffer, 0, bytes, z->comm.compute));
    return zero_ok();
}

static inline ZeroResult zero_alloc_slots(ZeroOptimizer* z, ZeroMemoryKind kind, const char* what, int common,
                                          size_t common_count, ZeroSlots* slots) {
    const ZeroPlanChoice choice = zero_plan_choice(&z->config, z->rank);
    int i;
    ZERO_TRY(zero_slots_create(slots, z->layout, &choice, common, common_count));
    for (i = 0; i < slots->count; i++)
        ZERO_TRY(zero_alloc_zeroed(z, kind, what, zero_slot_bytes(&slots->slots[i], z->layout),
                                   &slots->slots[i].memory));
    return zero_ok();
}

/* params: NULL, or the caller's device buffer, which may hold the parameters already: zero_padded_count elements, in stage 3
   this rank's shard of zero_shard_count elements (zero_params_write puts values where they belong). */
static inline ZeroResult zero_alloc_params(ZeroOptimizer* z, void* params) {
    const ZeroSchedule* s = &z->schedule;
    ZERO_TRY(zero_check_made(z, "zero_alloc_params"));
    if (z->params) return zero_error(ZERO_ERROR_ORDER, "parameters are there already");
    z->params_owned = params == NULL;
    z->params = params;
    if (!params)
        ZERO_TRY(zero_alloc_zeroed(z, ZERO_MEMORY_PARAMS, "parameters", zero_params_bytes(s, z->layout),
                                   &z->params));
    if (!s->params_sharded) return zero_ok();
    return zero_alloc_slots(z, ZERO_MEMORY_PARAMS, "a unit of parameters", s->params_slots,
                            s->params_slot_count, &z->params_slots);
}

/* The caller's flat gradients: gaps and padding become zero (L6). */
static inline ZeroResult zero_clear_gaps(ZeroOptimizer* z, void* grads) {
    const ZeroLayout* layout = z->layout;
    const size_t bytes = zero_dtype_bytes(layout->dtype);
    size_t end = 0;
    int i;
    for (i = 0; i <= layout->by_offset_count; i++) {
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

/* grads: NULL, or in stages 0 and 1 the caller's device buffer of zero_padded_count elements, whose gaps and padding are set
   to zero on the compute stream (L6). Stages 2 and 3 keep a unit or two at a time, in memory of their own. */
static inline ZeroResult zero_alloc_grads(ZeroOptimizer* z, void* grads) {
    const ZeroSchedule* s = &z->schedule;
    ZERO_TRY(zero_check_made(z, "zero_alloc_grads"));
    if (z->grads_there) return zero_error(ZERO_ERROR_ORDER, "gradients are there already");
    if (grads && z->config.stage >= 2)
        return zero_error(ZERO_ERROR_ARGUMENT,
                          "stage %d keeps gradients of its own, a unit at a time: give NULL for them",
                          z->config.stage);
    z->grads_owned = grads == NULL;
    z->grads = grads;
    if (grads)
        ZERO_TRY(zero_clear_gaps(z, grads));
    else if (z->config.stage < 2)
        ZERO_TRY(zero_alloc_zeroed(z, ZERO_MEMORY_GRADS, "gradients", zero_flat_bytes(z->layout), &z->grads));
    else
        ZERO_TRY(zero_alloc_slots(z, ZERO_MEMORY_GRADS, "a unit of gradients", s->grads_slots,
                                  s->grads_slot_count, &z->grads_slots));
    if (s->sums_sharded)
        ZERO_TRY(zero_alloc_zeroed(z, ZERO_MEMORY_GRADS, "the gradients' sums", zero_sums_bytes(s, z->layout),
                                   (void**)&z->sums));
    z->grads_there = 1;
    return zero_ok();
}

#endif /* LLMC_ZERO_OPTIMIZER_SETUP_CUH_INCLUDED */
