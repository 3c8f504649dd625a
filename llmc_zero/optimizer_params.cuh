/* llmc_zero/optimizer_params.cuh - ZeroOptimizer: parameters, from acquire to release in every stage, and the state that belongs to
   them. The manual is in optimizer.cuh.

   defines: zero_timeline, zero_params_acquire, zero_params_release, zero_params_settle, zero_params_acquire_all,
            zero_params_visit, zero_params_leave, zero_params_write, zero_params_changed, zero_alloc_state,
            zero_state_changed, zero_set_t
*/
#ifndef LLMC_ZERO_OPTIMIZER_PARAMS_CUH_INCLUDED
#define LLMC_ZERO_OPTIMIZER_PARAMS_CUH_INCLUDED

#include "optimizer_setup.cuh"

/* ------------------------------------------------------------------ units */

static inline ZeroResult zero_check_unit(const ZeroOptimizer* z, int unit, const char* call) {
    ZERO_TRY(zero_check_made(z, call));
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
    if (z->micro >= 0) zero_calls_note(&z->calls, unit, ZERO_CALL_PARAMS_ACQUIRE);
    return zero_comm_beat(&z->comm, NULL);
}

/* The unit's parameters are not read any more by work that is not launched yet. */
static inline ZeroResult zero_params_release(ZeroOptimizer* z, int unit) {
    ZERO_TRY(zero_check_unit(z, unit, "zero_params_release"));
    if (z->units[unit].params_open == 0)
        return zero_error(ZERO_ERROR_ORDER, "unit %d is released more often than acquired", unit);
    z->units[unit].params_open--;
    if (z->micro >= 0) zero_calls_note(&z->calls, unit, ZERO_CALL_PARAMS_RELEASE);
    return z->schedule.params_sharded ? zero_release_slot(z, unit) : zero_ok();
}

/* Behind this call no collective reads or writes what this rank holds of the parameters, until the next acquire or
   zero_update. */
static inline ZeroResult zero_params_settle(ZeroOptimizer* z) {
    int b;
    ZERO_TRY(zero_check_made(z, "zero_params_settle"));
    if (z->schedule.params_sharded) return zero_forget_slots(z);
    for (b = 0; b < z->layout->buckets_count; b++) ZERO_TRY(zero_comm_wait_gathered(&z->comm, b));
    return zero_ok();
}

/* Behind this call the compute stream may read all params until the next zero_update. Not in stage 3 on several ranks, which
   never holds them all: acquire unit by unit there, or use zero_params_visit. */
static inline ZeroResult zero_params_acquire_all(ZeroOptimizer* z, void** params) {
    *params = NULL;
    ZERO_TRY(zero_check_made(z, "zero_params_acquire_all"));
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
    int unit;
    void* first;
    *params = NULL;
    ZERO_TRY(zero_check_made(z, "zero_params_visit"));
    unit = z->layout->segments[s].unit;
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
    const ZeroSegment* segment = layout && s >= 0 && s < layout->segments_count ? &layout->segments[s] : NULL;
    const int* buckets;
    int i, buckets_count;
    size_t from, to, bytes;
    ZERO_TRY(zero_check_made(z, "zero_params_write"));
    if (!z->params) return zero_error(ZERO_ERROR_ORDER, "call zero_alloc_params first");
    if (!segment || first > segment->count || count > segment->count - first)
        return zero_error(ZERO_ERROR_ARGUMENT,
                          "zero_params_write: %zu elements from %zu on of segment %d, which has %zu", count,
                          first, s, segment ? segment->count : 0);
    buckets_count = zero_unit_buckets(z, segment->unit, &buckets);
    from = segment->flat_offset + first;
    to = from + count;
    bytes = zero_dtype_bytes(layout->dtype);
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
    ZERO_TRY(zero_check_made(z, "zero_params_changed"));
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
    ZERO_TRY(zero_check_made(z, "zero_state_changed"));
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
                           z->layout && z->layout->dtype == ZERO_BF16 && c->masters};
    int i;
    ZERO_TRY(zero_check_made(z, "zero_alloc_state"));
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
    ZERO_TRY(zero_check_made(z, "zero_set_t"));
    return zero_set_t_launch(z->scalars, t, z->comm.compute);
}

#endif /* LLMC_ZERO_OPTIMIZER_PARAMS_CUH_INCLUDED */
