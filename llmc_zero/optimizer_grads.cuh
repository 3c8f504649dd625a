/* llmc_zero/optimizer_grads.cuh - ZeroOptimizer: gradients of a step, from zero_begin to the reduction of the last bucket. The
   manual is in optimizer.cuh.

   defines: zero_begin, zero_begin_batches, zero_micros, zero_grads_acquire, zero_grads_ready
*/
#ifndef LLMC_ZERO_OPTIMIZER_GRADS_CUH_INCLUDED
#define LLMC_ZERO_OPTIMIZER_GRADS_CUH_INCLUDED

#include "optimizer_params.cuh"

/* Every unit with elements that learns, or was acquired, must have been reported in this micro-step. */
static inline ZeroResult zero_check_all_ready(const ZeroOptimizer* z) {
    int u, s;
    const int* buckets;
    for (u = 0; u < z->layout->units_count; u++) {
        if (z->units[u].ready || zero_unit_buckets(z, u, &buckets) == 0) continue;
        if (z->units[u].frozen && !z->units[u].grads_open) continue;
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
    sum.senders = z->senders;
    sum.rank = z->rank;
    sum.sums = z->schedule.sums_sharded ? z->sums : (float*)grads;
    sum.sums_sharded = z->schedule.sums_sharded;
    sum.add = z->schedule.micro && z->micro > 0;
    sum.own_sums = z->micro == z->micros - 1 ? z->own_step_sums : NULL;
    for (p = z->bucket_pieces[b]; p < z->bucket_pieces[b + 1]; p++) {
        sum.piece = z->pieces[p];
        if (ordered)
            ZERO_TRY(zero_comm_exchange(&z->comm, b, bucket, sum.piece.flat_first - slice, sum.piece.count,
                                        z->senders, z->scratch));
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
        if (!z->buckets[b].reduced && z->buckets[b].units > 0)
            ZERO_TRY(zero_reduce_bucket(z, b, NULL, z->buckets[b].done));
    return zero_ok();
}

/* Begins a micro-step: global micro-batches micro * ranks + rank of `batches`, of which the last ranks may have none. */
static inline ZeroResult zero_begin_micro(ZeroOptimizer* z, int micro, int micros, int64_t batches,
                                          double grad_scale) {
    const int spans_max = 1 << 20; /* nobody asks for them */
    const int64_t left = batches - (z->schedule.micro ? (int64_t)micro * z->ranks : 0);
    int b, u, expected = z->micro < 0 ? 0 : z->micro + 1;
    ZERO_TRY(zero_check_made(z, "zero_begin"));
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
    if (micro > 0) zero_calls_keep(&z->calls, 0);
    zero_calls_begin(&z->calls);
    z->micro = micro;
    z->micros = micros;
    z->batches = batches;
    z->senders = left < z->ranks ? (int)left : z->ranks;
    z->idle = (int64_t)micro * z->ranks + z->rank >= batches;
    z->grad_scale = grad_scale;
    z->norm_done = 0;
    if (micro == 0 && z->comm.timeline.spans_count > spans_max)
        ZERO_TRY(zero_timeline_drain(&z->comm.timeline));
    for (u = 0; u < z->layout->units_count; u++) z->units[u].grads_open = z->units[u].ready = 0;
    for (b = 0; b < z->layout->buckets_count; b++) {
        z->buckets[b].waits = z->buckets[b].units;
        z->buckets[b].reduced = 0;
    }
    return zero_comm_beat(&z->comm, "forward");
}

/* Begins micro-step `micro` (0 .. micros - 1) of a step. grad_scale: what the gradients of the whole step, summed
   over micro-steps, still lack: 1 if the caller has divided the loss by micros, 1/micros if not. They are averaged over the
   ranks by z. */
static inline ZeroResult zero_begin(ZeroOptimizer* z, int micro, int micros, double grad_scale) {
    return zero_begin_micro(z, micro, micros, (int64_t)micros * z->ranks, grad_scale / z->ranks);
}

/* The same for a step of so many micro-batches, of all ranks together, that ranks need not divide: micro-step `micro` of
   zero_micros(z, batches). This rank's micro-batch is number micro * ranks + rank; *idle = 1 tells that there is none: then
   make the same calls as the others, without computing; what lies in the gradients does not count. The gradients are those of
   each micro-batch's own mean loss, and z takes their mean: the sum times grad_scale / batches, in one factor (grad_scale: 1,
   or what undoes a scale of the loss). So with ZERO_REDUCE_ORDERED a step is the same to the bit for any number of ranks. */
static inline int zero_micros(const ZeroOptimizer* z, int batches) {
    return z->ranks ? (batches + z->ranks - 1) / z->ranks : 0;
}
static inline ZeroResult zero_begin_batches(ZeroOptimizer* z, int micro, int batches, double grad_scale,
                                            int* idle) {
    *idle = 0;
    ZERO_TRY(zero_check_made(z, "zero_begin_batches"));
    if (batches < 1 || batches > INT32_MAX - z->ranks)
        return zero_error(ZERO_ERROR_ARGUMENT, "%d micro-batches in a step; 1 .. %d are possible", batches,
                          INT32_MAX - z->ranks);
    ZERO_TRY(zero_begin_micro(z, micro, zero_micros(z, batches), batches, grad_scale / batches));
    *idle = z->idle;
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
   In stages 2 and 3 the pointer is good until then. A frozen unit needs neither call; who acquires it reports it. */
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
    if (!z->units[unit].frozen) zero_calls_note(&z->calls, unit, ZERO_CALL_GRADS_ACQUIRE);
    return zero_comm_beat(&z->comm, "backward");
}

/* A rank without a micro-batch: where a reduction of NCCL's takes this unit, it adds zeros. */
static inline ZeroResult zero_clear_idle(ZeroOptimizer* z, int unit) {
    const size_t bytes = zero_dtype_bytes(z->layout->dtype);
    const ZeroSlot* slot = z->config.stage >= 2 ? zero_slots_find(&z->grads_slots, unit) : NULL;
    int s;
    if (!z->idle || z->units[unit].frozen || z->config.reduction == ZERO_REDUCE_ORDERED ||
        (z->micro > 0 && !z->schedule.micro))
        return zero_ok();
    if (slot)
        ZERO_TRY_CUDA(cudaMemsetAsync(slot->memory, 0, zero_slot_bytes(slot, z->layout), z->comm.compute));
    for (s = 0; z->config.stage < 2 && s < z->layout->segments_count; s++) {
        const ZeroSegment* segment = &z->layout->segments[s];
        if (segment->unit == unit && segment->count > 0)
            ZERO_TRY_CUDA(cudaMemsetAsync((char*)z->grads + segment->flat_offset * bytes, 0,
                                          segment->count * bytes, z->comm.compute));
    }
    return zero_ok();
}

/* Stages 2 and 3: the unit's buckets are reduced out of its slot, which is free behind that. */
static inline ZeroResult zero_reduce_slot(ZeroOptimizer* z, int unit) {
    ZeroSlot* slot = zero_slots_find(&z->grads_slots, unit);
    const int* buckets;
    int i, count = zero_unit_buckets(z, unit, &buckets);
    if (count == 0) return zero_ok();
    slot->open = 0;
    if (z->units[unit].frozen) return zero_ok();
    for (i = count - 1; i >= 0; i--)
        ZERO_TRY(zero_reduce_bucket(z, buckets[i], slot, i == 0 ? slot->done : NULL));
    slot->pending = z->ranks > 1;
    return zero_ok();
}

/* The unit's gradients of this micro-step are final on the compute stream. In the last micro-step, or where each one is
   reduced, the buckets that this completes are reduced now (Z2); in stages 0 and 1 without overlap, later. Of a frozen unit nothing is reduced, and no collective waits for
   it, so that ranks may differ in whether they report it. */
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
    ZERO_TRY(zero_clear_idle(z, unit));
    z->units[unit].ready = 1;
    if (!z->units[unit].frozen) zero_calls_note(&z->calls, unit, ZERO_CALL_GRADS_READY);
    if (z->config.stage >= 2) return zero_reduce_slot(z, unit);
    if (z->units[unit].frozen) return zero_ok();
    if (z->micro < z->micros - 1 && !z->schedule.micro) return zero_ok();
    for (i = count - 1; i >= 0; i--) {
        ZeroBucketState* bucket = &z->buckets[buckets[i]];
        bucket->waits--;
        if (bucket->waits == 0 && z->config.overlap)
            ZERO_TRY(zero_reduce_bucket(z, buckets[i], NULL, bucket->done));
    }
    return zero_ok();
}

#endif /* LLMC_ZERO_OPTIMIZER_GRADS_CUH_INCLUDED */
