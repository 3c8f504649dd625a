/* llmc_zero/optimizer_drop.cuh - ZeroOptimizer: a step that one rank cannot finish.

       if (batch_is_bad) ZERO_TRY(zero_drop(&z));      // on this rank; the others go on as ever
       else ... forward, backward ...

   defines: zero_drop
*/
#ifndef LLMC_ZERO_OPTIMIZER_DROP_CUH_INCLUDED
#define LLMC_ZERO_OPTIMIZER_DROP_CUH_INCLUDED

#include "optimizer.cuh"

static inline ZeroResult zero_make_call(ZeroOptimizer* z, int64_t call) {
    const int unit = (int)(call / 4);
    void* pointer;
    int add;
    switch ((ZeroCall)(call % 4)) {
    case ZERO_CALL_PARAMS_ACQUIRE: return zero_params_acquire(z, unit, &pointer);
    case ZERO_CALL_PARAMS_RELEASE: return zero_params_release(z, unit);
    case ZERO_CALL_GRADS_ACQUIRE: return zero_grads_acquire(z, unit, &pointer, &add);
    case ZERO_CALL_GRADS_READY: return zero_grads_ready(z, unit);
    }
    return zero_ok();
}

/* The calls that this micro-step still lacks, as it usually makes them. */
static inline ZeroResult zero_make_usual_calls(ZeroOptimizer* z) {
    const ZeroCallList* now = &z->calls.now;
    const int64_t* calls = NULL;
    const size_t count = zero_calls_usual(&z->calls, z->micro == z->micros - 1, &calls);
    size_t i, same = 0;
    if (!count || !now->whole)
        return zero_error(ZERO_ERROR_ORDER,
                          "zero_drop in micro-step %d of %d: no micro-step like it has ended yet, so that "
                          "the order of the other ranks' calls is not known: end all ranks",
                          z->micro, z->micros);
    while (same < now->count && same < count && now->calls[same] == calls[same]) same++;
    if (same < now->count)
        return zero_error(ZERO_ERROR_ORDER,
                          "zero_drop in micro-step %d of %d: its call number %zu is another than the last "
                          "time, so that the order of the other ranks' calls is not known: end all ranks",
                          z->micro, z->micros, same + 1);
    for (i = same; i < count; i++) ZERO_TRY(zero_make_call(z, calls[i]));
    return zero_ok();
}

/* Whether collectives wait for the calls: not with one rank, nor where all reduces come at the end of a micro-step. */
static inline int zero_order_matters(const ZeroOptimizer* z) {
    return z->ranks > 1 && (z->config.stage >= 2 || z->config.overlap);
}

/* Ends this micro-step: what is not reported has been. */
static inline ZeroResult zero_finish_micro(ZeroOptimizer* z) {
    int i;
    if (zero_order_matters(z)) ZERO_TRY(zero_make_usual_calls(z));
    for (i = 0; i < z->layout->units_count; i++) z->units[i].ready = 1;
    for (i = 0; i < z->grads_slots.count; i++) z->grads_slots.slots[i].open = 0;
    return zero_ok();
}

/* Ends a step that has begun, on all ranks, because this rank cannot compute its part (a batch that cannot be read, say).
   Anywhere between zero_begin and zero_grad_norm; the other ranks make their calls as usual. This rank joins the collectives
   that remain, in the order of the step before (or of this step's first micro-step): it must have made its calls up to here
   in that order, too. ZERO_ERROR_ORDER if the order is not known yet; then all ranks must be ended together. Calls that start
   no collective of z's need not be made up for; those of the caller's own do.
   With the norm's exchange all ranks hear of it: none updates, the step counts in ZeroReport.dropped (not in skipped, nor in
   skipped_in_row, which stays), report.skip is ZERO_SKIP_DROPPED, norm and loss_sum are NaN. After this call the step is over on
   this rank, as after zero_update, and its units are closed: do not release or report them. The next call is zero_begin, or
   what the other ranks call between steps. */
static inline ZeroResult zero_drop(ZeroOptimizer* z) {
    int i;
    ZERO_TRY(zero_check_made(z, "zero_drop"));
    if (z->micro < 0) return zero_error(ZERO_ERROR_ORDER, "zero_drop: no step has begun");
    if (z->norm_done)
        return zero_error(ZERO_ERROR_ORDER,
                          "zero_drop comes before zero_grad_norm; after it, call zero_skip on every rank");
    for (;;) {
        ZERO_TRY(zero_finish_micro(z));
        if (z->micro == z->micros - 1) break;
        ZERO_TRY(zero_begin_micro(z, z->micro + 1, z->micros, z->batches, z->grad_scale));
    }
    z->drop = 1;
    ZERO_TRY(zero_grad_norm(z, NULL));
    z->drop = 0;
    for (i = 0; i < z->layout->units_count; i++) z->units[i].params_open = 0;
    for (i = 0; i < z->params_slots.count; i++) z->params_slots.slots[i].open = 0;
    return zero_update(z, 0.0);
}

#endif /* LLMC_ZERO_OPTIMIZER_DROP_CUH_INCLUDED */
