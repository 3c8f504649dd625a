/* llmc_zero/optimizer.cuh - ZeroOptimizer: the step. This is what takes the place of AdamW.

       ZeroConfig config = zero_config();                 // AdamW, fp32, stage 1
       config.max_norm = 1.0;
       ZeroOptimizer z;
       zero_init(&z, &config, &layout, rank, comm, stream, &memory);
       zero_alloc_params(&z, NULL);                       // or your own buffer of zero_padded_count elements
       ... zero_params_write(&z, segment, 0, count, values): the initial parameters ...
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

   This is the same in all stages. In stages 2 and 3 the pointers are good only while their unit is open, and at most two
   units may be open at once (gradients without overlap: one), beside those in ZeroConfig.held_units.

   Every call returns a ZeroResult; all but the first three belong to the compute stream: they launch on it or make
   it wait, and return at once. Every rank makes the same calls in the same order. After an error of a collective the
   communicator is of no use: end all ranks.

   Who owns what: layout, comm, stream and a buffer handed in stay the caller's and must outlive z. What is passed as
   NULL is allocated by z and freed by zero_free. The gaps of flat gradients are set to zero once (L6); do not write
   there.

   Invariants:
     Z1  between zero_update and the next acquire of a unit, that unit's params may be incomplete; read them through
         zero_params_acquire (or, where there are all, zero_params_acquire_all).
     Z2  a bucket is reduced once a step, when the last of its units is ready in the last micro-step; in stages 2 and 3, and
         with ZERO_ACCUMULATE_MICRO, once in every micro-step.
     Z3  params, m, v, masters and t change in zero_update only, and only if no rank saw a gradient that is not
         finite and the norm after clipping can be squared in fp32 (Adam: below 1.8e19); then on all ranks.
     Z4  the same calls give the same bits with overlap 0 and 1.
     Z5  with ZERO_REDUCE_ORDERED the same calls give the same bits for any buckets and, with ZERO_ACCUMULATE_MICRO, in
         every stage.

   defines: ZeroReport, zero_alloc_state, zero_set_t, zero_params_write, zero_begin, zero_params_acquire,
            zero_params_release, zero_params_acquire_all, zero_params_settle, zero_params_visit, zero_params_leave,
            zero_grads_acquire, zero_grads_ready, zero_attach, zero_vote, zero_grad_norm, zero_skip, zero_set_step,
            zero_update, zero_report, zero_params_changed, zero_state_changed, zero_timeline
            (and of optimizer_setup.cuh: ZeroConfig, zero_config, ZeroOptimizer, zero_init, zero_alloc_params,
            zero_alloc_grads, zero_free)
*/
#ifndef LLMC_ZERO_OPTIMIZER_CUH_INCLUDED
#define LLMC_ZERO_OPTIMIZER_CUH_INCLUDED

#include "optimizer_setup.cuh"

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

/* ------------------------------------------------------------------ units */

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

static inline ZeroTimeline* zero_timeline(ZeroOptimizer* z) { return &z->comm.timeline; }

/* ------------------------------------------------------------------ parameters in slots (stage 3) */

/* Starts to gather a unit into a slot. *slot NULL: all slots are open. */
static inline ZeroResult zero_gather_unit(ZeroOptimizer* z, int unit, ZeroSlot** slot) {
    *slot = zero_slots_pick(&z->params_slots, unit);
    if (!*slot) return zero_ok();
    (*slot)->pending = 1;
    return zero_comm_gather_slot(&z->comm, unit, z->params, (*slot)->memory, (*slot)->done);
}

/* With overlap: starts to gather the unit that is probably wanted next, if a slot is free. Not between norm and update, which
   writes what a gather reads. */
static inline ZeroResult zero_prefetch(ZeroOptimizer* z) {
    const int* buckets;
    ZeroSlot* slot;
    int unit;
    if (!z->schedule.params_sharded || !z->config.overlap || z->norm_done) return zero_ok();
    unit = zero_slots_next(&z->params_slots);
    if (unit == ZERO_NO_UNIT || zero_unit_buckets(z, unit, &buckets) == 0) return zero_ok();
    return zero_slots_find(&z->params_slots, unit) ? zero_ok() : zero_gather_unit(z, unit, &slot);
}

static inline void* zero_slot_pointer(const ZeroOptimizer* z, const ZeroSlot* slot, int unit) {
    size_t first;
    zero_unit_span(z->layout, unit, &first);
    return (char*)slot->memory + (z->layout->unit_offset[unit] - first) * zero_dtype_bytes(z->layout->dtype);
}

static inline ZeroResult zero_acquire_slot(ZeroOptimizer* z, int unit, void** params) {
    ZeroSlots* slots = &z->params_slots;
    ZeroSlot* slot = zero_slots_find(slots, unit);
    if (!slot) ZERO_TRY(zero_gather_unit(z, unit, &slot));
    if (!slot)
        return zero_error(
            ZERO_ERROR_ORDER,
            "zero_params_acquire: unit %d while %d others are open, one of them unit %d: stage 3 holds so "
            "many; release one first, or name units that stay open in held_units",
            unit, slots->common, zero_slots_open_unit(slots));
    if (slot->pending) ZERO_TRY(zero_comm_wait_slot(&z->comm, slot->done));
    slot->pending = 0;
    if (slot->open++ == 0) zero_slots_visit(slots, unit);
    *params = zero_slot_pointer(z, slot, unit);
    return zero_prefetch(z);
}

static inline ZeroResult zero_release_slot(ZeroOptimizer* z, int unit) {
    ZeroSlot* slot = zero_slots_find(&z->params_slots, unit);
    if (!slot || --slot->open > 0) return zero_ok();
    if (z->config.check_use) {
        ZERO_TRY_CUDA(cudaMemsetAsync(slot->memory, 0xff, zero_slot_bytes(slot, z->layout), z->comm.compute));
        slot->unit = ZERO_NO_UNIT;
    }
    return zero_prefetch(z);
}

/* Behind this the compute stream may write the shard, and nothing in the slots counts any more. */
static inline ZeroResult zero_forget_slots(ZeroOptimizer* z) {
    int i;
    for (i = 0; i < z->params_slots.count; i++) {
        ZeroSlot* slot = &z->params_slots.slots[i];
        if (slot->open)
            return zero_error(ZERO_ERROR_ORDER,
                              "unit %d is still open where its parameters change: release it first",
                              slot->unit);
        if (slot->pending)
            ZERO_TRY(zero_comm_wait_slot(&z->comm, slot->done)); /* guessed wrong: nobody has waited */
        slot->pending = 0;
        slot->unit = ZERO_NO_UNIT;
    }
    return zero_ok();
}

/* ------------------------------------------------------------------ parameters */

/* Gives where the unit's parameters begin (segment s of it lies zero_unit_offset(layout, s) elements behind), and
   makes the compute stream wait until they are complete. Works outside a step too (evaluation). In stage 3 the pointer is
   good until the unit's release. */
static inline ZeroResult zero_params_acquire(ZeroOptimizer* z, int unit, void** params) {
    const int* buckets;
    int i, count;
    *params = NULL;
    ZERO_TRY(zero_check_unit(z, unit, "zero_params_acquire"));
    if (!z->params) return zero_error(ZERO_ERROR_ORDER, "call zero_alloc_params first");
    count = zero_unit_buckets(z, unit, &buckets);
    *params = z->params; /* of a unit without elements */
    if (z->schedule.params_sharded && count > 0) {
        ZERO_TRY(zero_acquire_slot(z, unit, params));
    } else if (!z->schedule.params_sharded) {
        for (i = 0; i < count; i++) ZERO_TRY(zero_comm_wait_gathered(&z->comm, buckets[i]));
        *params = (char*)z->params + z->layout->unit_offset[unit] * zero_dtype_bytes(z->layout->dtype);
    }
    z->units[unit].params_open++;
    return zero_ok();
}

/* The unit's parameters are not read any more by work that is not launched yet. */
static inline ZeroResult zero_params_release(ZeroOptimizer* z, int unit) {
    ZERO_TRY(zero_check_unit(z, unit, "zero_params_release"));
    if (z->units[unit].params_open == 0)
        return zero_error(ZERO_ERROR_ORDER, "unit %d is released more often than acquired", unit);
    z->units[unit].params_open--;
    return z->schedule.params_sharded ? zero_release_slot(z, unit) : zero_ok();
}

/* Behind this call no collective reads or writes what this rank holds of the parameters, until the next acquire or
   zero_update. */
static inline ZeroResult zero_params_settle(ZeroOptimizer* z) {
    int b;
    if (z->schedule.params_sharded) return zero_forget_slots(z);
    for (b = 0; b < z->layout->buckets_count; b++) ZERO_TRY(zero_comm_wait_gathered(&z->comm, b));
    return zero_ok();
}

/* Behind this call the compute stream may read all params until the next zero_update. Not in stage 3 on several ranks, which
   never holds them all: acquire unit by unit there, or use zero_params_visit. */
static inline ZeroResult zero_params_acquire_all(ZeroOptimizer* z, void** params) {
    *params = NULL;
    if (!z->params) return zero_error(ZERO_ERROR_ORDER, "call zero_alloc_params first");
    if (z->schedule.params_sharded)
        return zero_error(
            ZERO_ERROR_ORDER,
            "zero_params_acquire_all: stage 3 never holds all parameters: acquire unit by unit");
    ZERO_TRY(zero_params_settle(z));
    *params = z->params;
    return zero_ok();
}

/* For a walk over segments in any order, in every stage: gives where segment s begins. Its unit stays open, and is released
   when a segment of another unit is visited, or by zero_params_leave. *open: begin with ZERO_NO_UNIT. */
static inline ZeroResult zero_params_leave(ZeroOptimizer* z, int* open) {
    const int unit = *open;
    *open = ZERO_NO_UNIT;
    return unit == ZERO_NO_UNIT ? zero_ok() : zero_params_release(z, unit);
}
static inline ZeroResult zero_params_visit(ZeroOptimizer* z, int s, int* open, void** params) {
    const int unit = z->layout->segments[s].unit;
    void* first;
    *params = NULL;
    if (*open != unit) ZERO_TRY(zero_params_leave(z, open));
    ZERO_TRY(zero_params_acquire(z, unit, &first));
    if (*open == unit) ZERO_TRY(zero_params_release(z, unit)); /* it was open already */
    *open = unit;
    *params = (char*)first + zero_unit_offset(z->layout, s) * zero_dtype_bytes(z->layout->dtype);
    return zero_ok();
}

/* Writes elements [first, first + count) of segment s, in every stage: where they all are, or those that this rank owns.
   values: count elements of the layout's type on host or device, read on the compute stream. Every rank gives the same ones;
   behind the last write call zero_params_changed (zero_alloc_state does). */
static inline ZeroResult zero_params_write(ZeroOptimizer* z, int s, size_t first, size_t count,
                                           const void* values) {
    const ZeroLayout* layout = z->layout;
    const size_t bytes = zero_dtype_bytes(layout->dtype);
    const ZeroSegment* segment = s >= 0 && s < layout->segments_count ? &layout->segments[s] : NULL;
    const int* buckets;
    int i, buckets_count;
    size_t from, to;
    if (!z->params) return zero_error(ZERO_ERROR_ORDER, "call zero_alloc_params first");
    if (!segment || first > segment->count || count > segment->count - first)
        return zero_error(ZERO_ERROR_ARGUMENT,
                          "zero_params_write: %zu elements from %zu on of segment %d, which has %zu", count,
                          first, s, segment ? segment->count : 0);
    buckets_count = zero_unit_buckets(z, segment->unit, &buckets);
    from = segment->flat_offset + first;
    to = from + count;
    if (count == 0) return zero_ok();
    if (!z->schedule.params_sharded) {
        for (i = 0; i < buckets_count; i++) ZERO_TRY(zero_comm_wait_gathered(&z->comm, buckets[i]));
        ZERO_TRY_CUDA(cudaMemcpyAsync((char*)z->params + from * bytes, values, count * bytes,
                                      cudaMemcpyDefault, z->comm.compute));
        return zero_ok();
    }
    ZERO_TRY(zero_forget_slots(z));
    for (i = 0; i < buckets_count; i++) {
        const size_t slice = zero_slice_offset(layout, buckets[i], z->rank);
        const size_t begin = from > slice ? from : slice;
        size_t end = slice + zero_slice_count(layout, buckets[i]);
        if (to < end) end = to;
        if (begin < end)
            ZERO_TRY_CUDA(cudaMemcpyAsync(
                (char*)z->params + (zero_shard_offset(layout, buckets[i]) + (begin - slice)) * bytes,
                (const char*)values + (begin - from) * bytes, (end - begin) * bytes, cudaMemcpyDefault,
                z->comm.compute));
    }
    return zero_ok();
}

/* ------------------------------------------------------------------ state */

template <typename Master>
static __global__ void __launch_bounds__(ZERO_BLOCK_THREADS)
    zero_copy_masters_kernel(const ZeroChunk* chunks, const ZeroBf16* params, int params_sharded,
                             Master* masters) {
    const ZeroChunk& chunk = chunks[blockIdx.x];
    const uint64_t first = params_sharded ? chunk.state_offset : chunk.flat_offset;
    for (uint32_t i = threadIdx.x; i < chunk.count; i += ZERO_BLOCK_THREADS)
        masters[chunk.state_offset + i] = zero_from_bf16(params[first + i].bits);
}

template <typename Master>
static __global__ void __launch_bounds__(ZERO_BLOCK_THREADS)
    zero_round_masters_kernel(const ZeroChunk* chunks, const Master* masters, int params_sharded,
                              ZeroBf16* params) {
    const ZeroChunk& chunk = chunks[blockIdx.x];
    const uint64_t first = params_sharded ? chunk.state_offset : chunk.flat_offset;
    for (uint32_t i = threadIdx.x; i < chunk.count; i += ZERO_BLOCK_THREADS)
        params[first + i].bits = (uint16_t)zero_to_bf16(masters[chunk.state_offset + i]);
}

static inline const ZeroChunk* zero_update_chunks(const ZeroOptimizer* z) {
    return z->all_chunks ? z->all_chunks : z->chunks;
}
static inline size_t zero_update_chunks_count(const ZeroOptimizer* z) {
    return z->all_chunks ? z->all_chunks_count : z->chunks_count;
}

/* Tells z that params were written from outside (initial weights, weights loaded from elsewhere): masters are made
   from them again, so that they do not overwrite the new weights (case E2). Every rank must have written the same, with
   zero_params_write, or on the compute stream and, once steps have run, behind zero_params_settle: gathers may still be
   writing before. */
static inline ZeroResult zero_params_changed(ZeroOptimizer* z) {
    const size_t chunks_count = zero_update_chunks_count(z);
    cudaLaunchConfig_t config = zero_launch_config(chunks_count, ZERO_BLOCK_THREADS, z->comm.compute);
    if (!z->params) return zero_error(ZERO_ERROR_ORDER, "call zero_alloc_params first");
    if (z->schedule.params_sharded) ZERO_TRY(zero_forget_slots(z));
    if (!z->masters || chunks_count == 0) return zero_ok();
    ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_copy_masters_kernel<float>, zero_update_chunks(z),
                                     (const ZeroBf16*)z->params, z->schedule.params_sharded, z->masters));
    return zero_ok();
}

/* Every bucket's params to all ranks, behind what the compute stream has been given. */
static inline ZeroResult zero_gather_all(ZeroOptimizer* z) {
    int b;
    if (z->config.stage == 0 || z->schedule.params_sharded) return zero_ok();
    for (b = 0; b < z->layout->buckets_count; b++) ZERO_TRY(zero_comm_gather(&z->comm, b, z->params));
    return zero_ok();
}

/* Tells z that this rank's masters were written from outside (a resumed run), or without masters its own slices of the
   params: params are rounded from the masters as zero_update rounds them, and gathered. All ranks together, between
   steps, after zero_params_settle. */
static inline ZeroResult zero_state_changed(ZeroOptimizer* z) {
    const size_t chunks_count = zero_update_chunks_count(z);
    cudaLaunchConfig_t config = zero_launch_config(chunks_count, ZERO_BLOCK_THREADS, z->comm.compute);
    if (!z->state_there) return zero_error(ZERO_ERROR_ORDER, "call zero_alloc_state first");
    if (z->micro >= 0) return zero_error(ZERO_ERROR_ORDER, "zero_state_changed in the middle of a step");
    if (z->schedule.params_sharded) ZERO_TRY(zero_forget_slots(z));
    if (z->masters && chunks_count > 0)
        ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_round_masters_kernel<float>, zero_update_chunks(z),
                                         (const float*)z->masters, z->schedule.params_sharded,
                                         (ZeroBf16*)z->params));
    return zero_gather_all(z);
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
    for (i = 0; i < 3; i++)
        if (wanted[i])
            ZERO_TRY(
                zero_alloc_zeroed(z, ZERO_MEMORY_STATE, names[i], zero_state_bytes(z), (void**)arrays[i]));
    z->state_there = 1;
    return zero_params_changed(z);
}

/* Sets the number of updates applied so far: a resumed run, or a caller that counts for itself. */
static inline ZeroResult zero_set_t(ZeroOptimizer* z, uint64_t t) {
    return zero_set_t_launch(z->scalars, t, z->comm.compute);
}

/* ------------------------------------------------------------------ gradients */

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

/* Where a bucket's gradients are: element with flat offset f lies f - *first elements behind *grads. */
static inline void zero_locate_grads(ZeroOptimizer* z, int b, ZeroSlot* slot, char** grads, size_t* first) {
    *first = 0;
    *grads = (char*)z->grads;
    if (!slot) return;
    *grads = (char*)slot->memory;
    zero_unit_span(z->layout, z->layout->bucket_units[z->layout->buckets[b].units_first], first);
}

/* Sums what lies in the pieces of a bucket, or arrives for them. grads, first: as zero_locate_grads gives them; bucket: where
   in there it begins. */
static inline ZeroResult zero_sum_bucket(ZeroOptimizer* z, int b, char* grads, size_t first,
                                         const char* bucket) {
    const int ordered = z->config.reduction == ZERO_REDUCE_ORDERED && z->ranks > 1;
    const size_t slice = zero_slice_offset(z->layout, b, z->rank);
    size_t p;
    ZeroSum sum;
    memset(&sum, 0, sizeof(sum));
    sum.chunks = z->chunks;
    sum.grads = grads;
    sum.grads_first = first;
    sum.dtype = z->layout->dtype;
    sum.others = ordered ? z->scratch : NULL;
    sum.ranks = z->ranks;
    sum.rank = z->rank;
    sum.sums = z->schedule.sums_sharded ? z->sums : (float*)grads;
    sum.sums_sharded = z->schedule.sums_sharded;
    sum.add = z->schedule.micro && z->micro > 0;
    sum.partials = z->micro == z->micros - 1 ? z->partials : NULL;
    for (p = z->bucket_pieces[b]; p < z->bucket_pieces[b + 1]; p++) {
        sum.piece = z->pieces[p];
        if (ordered)
            ZERO_TRY(zero_comm_exchange(&z->comm, b, bucket, sum.piece.flat_first - slice, sum.piece.count,
                                        z->scratch));
        ZERO_TRY(zero_sum_launch(&sum, z->comm.stream));
    }
    return zero_ok();
}

/* Reduces a bucket, in slot or, with NULL, in the flat gradients; done is recorded behind it (may be NULL). */
static inline ZeroResult zero_reduce_bucket(ZeroOptimizer* z, int b, ZeroSlot* slot, cudaEvent_t done) {
    const int everywhere = z->config.stage == 0 && !z->schedule.sums_sharded;
    const int ordered = z->config.reduction == ZERO_REDUCE_ORDERED;
    char *grads, *bucket;
    size_t first;
    int spans[2];
    z->buckets[b].reduced = 1;
    z->buckets[b].pending = done != NULL && !slot && z->ranks > 1;
    zero_locate_grads(z, b, slot, &grads, &first);
    bucket = grads + (z->layout->buckets[b].flat_offset - first) * zero_dtype_bytes(z->layout->dtype);
    ZERO_TRY(zero_comm_begin_reduce(&z->comm, b, spans));
    if (!ordered) ZERO_TRY(zero_comm_reduce_scatter(&z->comm, b, bucket, z->config.reduction, everywhere));
    if (z->schedule.sum_kernel) ZERO_TRY(zero_sum_bucket(z, b, grads, first, bucket));
    if (ordered && everywhere) /* the sums, out of the slices where they were made */
        ZERO_TRY(zero_comm_reduce_scatter(&z->comm, b, bucket, ZERO_REDUCE_ORDERED, 1));
    return zero_comm_end_reduce(&z->comm, done, spans);
}

/* Stages 0 and 1: what has not been reduced in this micro-step. */
static inline ZeroResult zero_reduce_rest(ZeroOptimizer* z) {
    int b;
    for (b = 0; z->config.stage < 2 && b < z->layout->buckets_count; b++)
        if (!z->buckets[b].reduced) ZERO_TRY(zero_reduce_bucket(z, b, NULL, z->buckets[b].done));
    return zero_ok();
}

/* Begins micro-step `micro` (0 .. micros - 1) of a step. grad_scale: what the gradients of the whole step, summed
   over micro-steps, still lack: 1 if the caller has divided the loss by micros, 1/micros if not. */
static inline ZeroResult zero_begin(ZeroOptimizer* z, int micro, int micros, double grad_scale) {
    const int spans_max = 1 << 20; /* nobody asks for them */
    int b, u, expected = z->micro < 0 ? 0 : z->micro + 1;
    if (!z->params || !z->grads_there || !z->state_there)
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
    if (micro > 0 && z->schedule.micro) ZERO_TRY(zero_reduce_rest(z));
    z->micro = micro;
    z->micros = micros;
    z->grad_scale = grad_scale;
    z->norm_done = 0;
    if (micro == 0 && z->comm.timeline.spans_count > spans_max)
        ZERO_TRY(zero_timeline_drain(&z->comm.timeline));
    for (u = 0; u < z->layout->units_count; u++) z->units[u].grads_open = z->units[u].ready = 0;
    for (b = 0; b < z->layout->buckets_count; b++) {
        z->buckets[b].waits = z->layout->buckets[b].units;
        z->buckets[b].reduced = 0;
    }
    return zero_ok();
}

/* Stages 2 and 3: a slot for a unit's gradients; *add 1 if the unit is open already. */
static inline ZeroResult zero_acquire_grads_slot(ZeroOptimizer* z, int unit, void** grads, int* add) {
    ZeroSlots* slots = &z->grads_slots;
    ZeroSlot* slot = zero_slots_find(slots, unit);
    *add = slot && slot->open;
    if (!*add) {
        slot = zero_slots_pick(slots, unit);
        if (!slot)
            return zero_error(
                ZERO_ERROR_ORDER,
                "zero_grads_acquire: unit %d while %d others are open, one of them unit %d: stage %d holds "
                "so many%s; report one ready first, or name units that stay open in held_units",
                unit, slots->common, zero_slots_open_unit(slots), z->config.stage,
                z->config.overlap ? "" : " without overlap");
        if (slot->pending) ZERO_TRY(zero_comm_wait_overwrite(&z->comm, slot->done));
        slot->pending = 0;
        slot->open = 1;
        if (z->config.check_use)
            ZERO_TRY_CUDA(
                cudaMemsetAsync(slot->memory, 0xff, zero_slot_bytes(slot, z->layout), z->comm.compute));
    }
    *grads = zero_slot_pointer(z, slot, unit);
    return zero_ok();
}

/* Stages 0 and 1 with a reduction in each micro-step: the reduce of the one before must have read them. */
static inline ZeroResult zero_wait_grads_reduced(ZeroOptimizer* z, int unit) {
    const int* buckets;
    int i, count = zero_unit_buckets(z, unit, &buckets);
    for (i = 0; i < count; i++) {
        ZeroBucketState* bucket = &z->buckets[buckets[i]];
        if (bucket->pending) ZERO_TRY(zero_comm_wait_overwrite(&z->comm, bucket->done));
        bucket->pending = 0;
    }
    return zero_ok();
}

/* Gives where the unit's gradients begin, and whether to write them (*add = 0: what is there is old) or to add to them
   (*add = 1). Without ZERO_ACCUMULATE_MICRO the first micro-step writes and the others add; with it, and in stages 2 and 3,
   each one writes. A unit acquired again before its zero_grads_ready is added to: the caller has written its tensors then.
   In stages 2 and 3 the pointer is good until then. */
static inline ZeroResult zero_grads_acquire(ZeroOptimizer* z, int unit, void** grads, int* add) {
    const int* buckets;
    *grads = NULL;
    *add = 0;
    ZERO_TRY(zero_check_unit(z, unit, "zero_grads_acquire"));
    if (z->micro < 0)
        return zero_error(ZERO_ERROR_ORDER, "unit %d: zero_grads_acquire before zero_begin", unit);
    if (z->units[unit].ready)
        return zero_error(ZERO_ERROR_ORDER,
                          "unit %d: zero_grads_acquire after zero_grads_ready in micro-step %d of %d", unit,
                          z->micro, z->micros);
    if (z->config.stage >= 2) {
        *grads = z->params; /* of a unit without elements */
        if (zero_unit_buckets(z, unit, &buckets) > 0) ZERO_TRY(zero_acquire_grads_slot(z, unit, grads, add));
    } else {
        if (z->schedule.micro) ZERO_TRY(zero_wait_grads_reduced(z, unit));
        *add = (z->micro > 0 && !z->schedule.micro) || z->units[unit].grads_open;
        *grads = (char*)z->grads + z->layout->unit_offset[unit] * zero_dtype_bytes(z->layout->dtype);
    }
    z->units[unit].grads_open = 1;
    return zero_ok();
}

/* Stages 2 and 3: the unit's buckets are reduced out of its slot, which is free behind that. */
static inline ZeroResult zero_reduce_slot(ZeroOptimizer* z, int unit) {
    ZeroSlot* slot = zero_slots_find(&z->grads_slots, unit);
    const int* buckets;
    int i, count = zero_unit_buckets(z, unit, &buckets);
    if (count == 0) return zero_ok();
    for (i = count - 1; i >= 0; i--)
        ZERO_TRY(zero_reduce_bucket(z, buckets[i], slot, i == 0 ? slot->done : NULL));
    slot->open = 0;
    slot->pending = z->ranks > 1;
    return zero_ok();
}

/* The unit's gradients of this micro-step are final on the compute stream. In the last micro-step, or where each one is
   reduced, the buckets that this completes are reduced now (Z2); in stages 0 and 1 without overlap, later. */
static inline ZeroResult zero_grads_ready(ZeroOptimizer* z, int unit) {
    const int* buckets;
    int i, count;
    ZERO_TRY(zero_check_unit(z, unit, "zero_grads_ready"));
    if (z->micro < 0)
        return zero_error(ZERO_ERROR_ORDER, "unit %d: zero_grads_ready before zero_begin", unit);
    if (z->units[unit].ready)
        return zero_error(ZERO_ERROR_ORDER, "unit %d: zero_grads_ready twice in micro-step %d of %d", unit,
                          z->micro, z->micros);
    count = zero_unit_buckets(z, unit, &buckets);
    if (!z->units[unit].grads_open && count > 0)
        return zero_error(
            ZERO_ERROR_ORDER,
            "unit %d: zero_grads_ready in micro-step %d of %d, but zero_grads_acquire did not give its "
            "gradients",
            unit, z->micro, z->micros);
    z->units[unit].ready = 1;
    if (z->config.stage >= 2) return zero_reduce_slot(z, unit);
    if (z->micro < z->micros - 1 && !z->schedule.micro) return zero_ok();
    for (i = count - 1; i >= 0; i--) {
        ZeroBucketState* bucket = &z->buckets[buckets[i]];
        bucket->waits--;
        if (bucket->waits == 0 && z->config.overlap)
            ZERO_TRY(zero_reduce_bucket(z, buckets[i], NULL, bucket->done));
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
    ZeroNorm norm = {z->chunks,        z->chunks_count, z->grads,
                     z->layout->dtype, z->partials,     z->own_sums,
                     z->all_sums,      z->scalars,      z->schedule.sum_kernel ? z->partials_count : 0};
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
    int span;
    if (norm) *norm = 0.0f;
    if (z->micro < 0 || z->micro != z->micros - 1)
        return zero_error(ZERO_ERROR_ORDER, "zero_grad_norm in micro-step %d of %d: it follows the last",
                          z->micro, z->micros);
    if (!z->norm_done) {
        ZERO_TRY(zero_check_all_ready(z));
        ZERO_TRY(zero_poll_status(z));
        ZERO_TRY(zero_reduce_rest(z));
        ZERO_TRY(zero_comm_wait_reduced(&z->comm));
        ZERO_TRY(zero_span_begin(zero_timeline(z), ZERO_ROW_COMPUTE, "norm", ZERO_NO_INDEX, &span));
        if (!z->schedule.sum_kernel) ZERO_TRY(zero_norm_partials(&work, z->comm.compute));
        ZERO_TRY(zero_norm_sum(&work, z->passenger, z->vote, z->comm.compute));
        ZERO_TRY(zero_span_end(zero_timeline(z), span));
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
    ZERO_TRY(zero_check_numbers(&z->config));
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

static inline ZeroUpdate zero_describe_update(const ZeroOptimizer* z) {
    ZeroUpdate update;
    memset(&update, 0, sizeof(update));
    update.chunks = zero_update_chunks(z);
    update.params = z->params;
    update.grads = z->schedule.sums_sharded ? (void*)z->sums : z->grads;
    update.masters = z->masters;
    update.exp_avg = z->exp_avg;
    update.exp_avg_sq = z->exp_avg_sq;
    update.scalars = z->scalars;
    update.dtype = z->layout->dtype;
    update.algorithm = z->config.algorithm;
    update.params_sharded = z->schedule.params_sharded;
    update.grads_fp32 = update.grads_sharded = z->schedule.sums_sharded;
    return update;
}

static inline ZeroResult zero_broadcast_window(ZeroOptimizer* z, size_t w) {
    const ZeroWindow* window = &z->windows[w];
    const int half = (int)(w % 2);
    const size_t in_slice = window->flat_first - zero_slice_offset(z->layout, window->bucket, window->owner);
    float* scratch = (float*)z->scratch + (size_t)half * z->schedule.window_count;
    return zero_comm_broadcast(&z->comm, z->sums + zero_shard_offset(z->layout, window->bucket) + in_slice,
                               scratch, window->count, window->owner, half);
}

/* Stage 0 with sharded sums: window by window, each broadcast by its owner into one half of the scratch while the other half
   is worked on. */
static inline ZeroResult zero_update_windows(ZeroOptimizer* z, ZeroUpdate* update, const ZeroHyper* hyper) {
    size_t w;
    update->grads_sharded = 0;
    if (z->windows_count > 0) ZERO_TRY(zero_broadcast_window(z, 0));
    for (w = 0; w < z->windows_count; w++) {
        const ZeroWindow* window = &z->windows[w];
        if (w + 1 < z->windows_count) ZERO_TRY(zero_broadcast_window(z, w + 1));
        ZERO_TRY(zero_comm_wait_window(&z->comm, (int)(w % 2)));
        update->grads = (float*)z->scratch + (w % 2) * z->schedule.window_count;
        update->grads_first = window->flat_first;
        ZERO_TRY(zero_update_launch(update, hyper, window->chunk_first,
                                    z->windows[w + 1].chunk_first - window->chunk_first, z->comm.compute));
    }
    return zero_ok();
}

/* Launches the update and, in stages 1 and 2, the gathers, bucket by bucket. */
static inline ZeroResult zero_update_buckets(ZeroOptimizer* z, const ZeroHyper* hyper) {
    const int gathers = (z->config.stage == 1 || z->config.stage == 2) && z->ranks > 1;
    ZeroUpdate update = zero_describe_update(z);
    int b;
    if (z->schedule.sums_gather) return zero_update_windows(z, &update, hyper);
    if (!gathers) return zero_update_launch(&update, hyper, 0, zero_update_chunks_count(z), z->comm.compute);
    for (b = 0; b < z->layout->buckets_count; b++) {
        ZERO_TRY(zero_update_launch(&update, hyper, z->bucket_chunks[b],
                                    z->bucket_chunks[b + 1] - z->bucket_chunks[b], z->comm.compute));
        ZERO_TRY(zero_comm_gather(&z->comm, b, z->params));
    }
    return zero_ok();
}

/* Ends the step: the fused update of what this rank owns, and the gathers behind it. Without a zero_grad_norm before it,
   calls that first. With overlap the params arrive while the next forward starts (Z1). */
static inline ZeroResult zero_update(ZeroOptimizer* z, double lr) {
    const ZeroConfig* c = &z->config;
    const ZeroHyper hyper = zero_hyper(lr, c->beta1, c->beta2, c->eps, c->weight_decay, c->momentum);
    int span;
    if (!(lr >= 0.0 && lr <= 3.4e38))
        return zero_error(ZERO_ERROR_ARGUMENT, "lr is %g; 0 .. 3.4e38 are allowed", lr);
    if (!(lr * c->weight_decay <= 3.4e38))
        return zero_error(ZERO_ERROR_ARGUMENT, "lr %g times weight_decay %g does not fit into fp32", lr,
                          c->weight_decay);
    if (!z->norm_done) ZERO_TRY(zero_grad_norm(z, NULL));
    if (z->schedule.params_sharded) ZERO_TRY(zero_forget_slots(z));
    ZERO_TRY(zero_span_begin(zero_timeline(z), ZERO_ROW_COMPUTE, "update", ZERO_NO_INDEX, &span));
    ZERO_TRY(zero_update_buckets(z, &hyper));
    ZERO_TRY(zero_span_end(zero_timeline(z), span));
    z->micro = -1;
    z->norm_done = 0;
    if (!c->overlap && !z->schedule.params_sharded) ZERO_TRY(zero_params_settle(z));
    return zero_prefetch(z);
}

/* Reads the spans that have passed; the host waits for the compute stream's last wait, as far as it has been issued. */
static inline ZeroResult zero_read_timeline(ZeroOptimizer* z) {
    ZeroTimeline* t = zero_timeline(z);
    int i;
    for (i = t->spans_count - 1; i >= 0; i--)
        if (t->spans[i].is_wait && t->spans[i].ended) break;
    if (i >= 0) ZERO_TRY(zero_wait_event(&z->comm, t->spans[i].end));
    return zero_timeline_drain(t);
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
    ZERO_TRY(zero_read_timeline(z));
    report->exposed_ms = zero_timeline_take_exposed(zero_timeline(z));
    return zero_check_skips(z, s);
}

#endif /* LLMC_ZERO_OPTIMIZER_CUH_INCLUDED */
