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

   Frozen segments (lr_factor 0 when zero_init is called) count in nothing: their gradients need not be written and are not
   read, so that they are neither in the norm nor a reason to skip; parameters and state stay to the bit. A unit of frozen
   segments only needs no zero_grads_acquire and no zero_grads_ready, on any rank. A rank may make both calls all the same (to
   have a place for what a kernel writes), whatever the other ranks do: no collective belongs to them.

   Who owns what: layout, comm, stream and a buffer handed in stay the caller's and must outlive z. What is passed as
   NULL is allocated by z and freed by zero_free. The gaps of flat gradients are set to zero once (L6); do not write
   there.

   Invariants:
     Z1  between zero_update and the next acquire of a unit, that unit's params may be incomplete; read them through
         zero_params_acquire (or, where there are all, zero_params_acquire_all).
     Z2  a bucket is reduced once a step, when the last of its units is ready in the last micro-step; in stages 2 and 3, and
         with ZERO_ACCUMULATE_MICRO, once in every micro-step.
     Z3  params, m, v, masters and t change in zero_update only, and only if no rank saw a gradient that is not
         finite, the norm after clipping can be squared in fp32 (Adam: below 1.8e19), the clipped gradients are not too
         small for fp32, and no rank dropped the step; then on all ranks. report.skip says which (ZeroSkip).
     Z4  the same calls give the same bits with overlap 0 and 1.
     Z5  with ZERO_REDUCE_ORDERED the same calls give the same bits for any buckets and, with ZERO_ACCUMULATE_MICRO (the
         default there), in every stage; with zero_begin_batches, for any number of ranks.

   defines: ZeroReport, zero_add_loss, zero_vote, zero_grad_norm, zero_skip, zero_set_step, zero_update, zero_report
            (and with it come optimizer_setup.cuh: settings and buffers, optimizer_params.cuh: parameters and state,
            optimizer_grads.cuh: gradients)
*/
#ifndef LLMC_ZERO_OPTIMIZER_CUH_INCLUDED
#define LLMC_ZERO_OPTIMIZER_CUH_INCLUDED

#include "optimizer_grads.cuh"

/* What became of the steps so far. */
typedef struct ZeroReport {
    uint64_t t;       /* updates applied */
    uint64_t skipped; /* steps that gradients did not allow: ZERO_SKIP_NOT_FINITE, _TOO_LARGE, _TOO_SMALL */
    uint64_t skipped_in_row;
    uint64_t dropped; /* steps dropped by zero_skip and zero_drop; the latter leave skipped_in_row as it is */
    int skip;         /* ZeroSkip: why the last step was one of either (zero_skip_text), or 0 */
    float norm;       /* of the last step, before clipping */
    double
        loss_sum; /* zero_add_loss: of all micro-batches of all ranks in the last step; inf: one was not finite */
    int votes;         /* zero_vote: ranks that had a vote in the last step */
    int drops;         /* zero_drop: ranks that dropped the last step */
    double exposed_ms; /* compute stream stood still for collectives since the last report; needs timing */
} ZeroReport;

/* Adds a number on the device, a micro-batch's loss, to ZeroReport.loss_sum, which all ranks get with the norm. The sum is
   exact and rounded once: it depends on neither the number of ranks nor the order. In each micro-step, once the compute stream
   has been given what writes it; of a rank that is idle in this micro-step nothing is added. */
static inline ZeroResult zero_add_loss(ZeroOptimizer* z, const double* device_value) {
    ZERO_TRY(zero_check_made(z, "zero_add_loss"));
    if (z->micro < 0 || z->norm_done)
        return zero_error(ZERO_ERROR_ORDER, "zero_add_loss comes after zero_begin and before zero_grad_norm");
    return z->idle ? zero_ok() : zero_add_loss_launch(device_value, z->own_step_sums, z->comm.compute);
}

/* A vote that travels with the next norms: ZeroReport.votes says, on every rank alike, how many ranks gave one. For what
   one rank hears of and all must do in the same step (a signal to stop). 0 takes it back. */
static inline void zero_vote(ZeroOptimizer* z, int vote) { z->vote = vote != 0; }

static inline ZeroResult zero_check_skips(const ZeroOptimizer* z, const ZeroScalars* status) {
    if (z->config.skip_limit == 0 || status->skipped_in_row < z->config.skip_limit) return zero_ok();
    return zero_error(ZERO_ERROR_SKIPS,
                      "%llu steps in a row were skipped (limit %llu), the last because %s, after %llu "
                      "good updates: lower the learning rate, clip, or look for the layer that overflows",
                      (unsigned long long)status->skipped_in_row, (unsigned long long)z->config.skip_limit,
                      zero_skip_text(status->skip), (unsigned long long)status->t);
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
    ZeroNorm norm = {z->chunks,        z->chunks_count, z->grads,  z->layout->dtype,
                     z->own_step_sums, z->step_sums,    z->scalars};
    return norm;
}

static inline ZeroStepSettings zero_step_settings(const ZeroOptimizer* z) {
    const ZeroConfig* c = &z->config;
    /* Adam squares in fp32: beyond the root of its largest number v would stay infinite for good */
    const double norm_limit = c->algorithm == ZERO_SGD ? 3.4e38 : 1.8e19;
    ZeroStepSettings settings = {c->beta1, c->beta2, z->grad_scale, c->max_norm, c->seed, norm_limit};
    return settings;
}

/* Finishes backward: global norm of the mean gradient before clipping, skip decision, t, clip factor; all on the
   device. norm: NULL, or where to put the norm; then the host waits for it. inf: a gradient is not finite; 3.4e38, fp32's
   largest number, stands for all larger ones; NaN: a rank dropped the step. ZERO_ERROR_SKIPS after skip_limit skips in
   a row: in the same step on all ranks if they ask for the norm (or for zero_report); else as soon as the host hears
   of it, which may be some steps later and not in the same step on all ranks, so that they must be ended together. */
static inline ZeroResult zero_grad_norm(ZeroOptimizer* z, float* norm) {
    ZeroNorm work;
    ZeroStepSettings settings;
    int span;
    if (norm) *norm = 0.0f;
    ZERO_TRY(zero_check_made(z, "zero_grad_norm"));
    zero_comm_progress(&z->comm, "norm");
    work = zero_describe_norm(z);
    settings = zero_step_settings(z);
    if (z->micro < 0 || z->micro != z->micros - 1)
        return zero_error(ZERO_ERROR_ORDER, "zero_grad_norm in micro-step %d of %d: it follows the last",
                          z->micro, z->micros);
    if (!z->norm_done) {
        ZERO_TRY(zero_check_all_ready(z));
        ZERO_TRY(zero_poll_status(z));
        ZERO_TRY(zero_reduce_rest(z));
        ZERO_TRY(zero_comm_wait_reduced(&z->comm));
        ZERO_TRY(zero_span_begin(zero_timeline(z), ZERO_ROW_COMPUTE, "norm", ZERO_NO_INDEX, &span));
        if (!z->schedule.sum_kernel) ZERO_TRY(zero_norm_squares(&work, z->comm.compute));
        ZERO_TRY(zero_norm_share(&work, z->vote, z->drop, z->comm.compute));
        ZERO_TRY(zero_span_end(zero_timeline(z), span));
        ZERO_TRY(zero_comm_share_words(&z->comm, z->step_sums, ZERO_SUM_WORDS, 0));
        ZERO_TRY(zero_norm_finish(&work, &settings, z->comm.compute));
        ZERO_TRY(zero_send_status(z, 0));
        zero_calls_keep(&z->calls, 1);
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
   decided to skip stays skipped, unless it was the norm that did not fit: then these settings decide. */
static inline ZeroResult zero_set_step(ZeroOptimizer* z, uint64_t t, double clip_factor) {
    ZeroNorm work;
    ZeroStepSettings settings;
    ZERO_TRY(zero_check_made(z, "zero_set_step"));
    work = zero_describe_norm(z);
    settings = zero_step_settings(z);
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
    ZERO_TRY(zero_check_made(z, "zero_skip"));
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
        if (z->buckets[b].units > 0) ZERO_TRY(zero_comm_gather(&z->comm, b, z->params));
    }
    return zero_ok();
}

/* Ends the step: the fused update of what this rank owns, and the gathers behind it. Without a zero_grad_norm before it,
   calls that first. With overlap the params arrive while the next forward starts (Z1). */
static inline ZeroResult zero_update(ZeroOptimizer* z, double lr) {
    const ZeroConfig* c = &z->config;
    const ZeroHyper hyper = zero_hyper(lr, c->beta1, c->beta2, c->eps, c->weight_decay, c->momentum);
    int span;
    ZERO_TRY(zero_check_made(z, "zero_update"));
    if (!(lr >= 0.0 && lr <= 3.4e38))
        return zero_error(ZERO_ERROR_ARGUMENT, "lr is %g; 0 .. 3.4e38 are allowed", lr);
    if (!(lr * c->weight_decay <= 3.4e38))
        return zero_error(ZERO_ERROR_ARGUMENT, "lr %g times weight_decay %g does not fit into fp32", lr,
                          c->weight_decay);
    if (!z->norm_done) ZERO_TRY(zero_grad_norm(z, NULL));
    ZERO_TRY(zero_comm_beat(&z->comm, "update"));
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
    ZERO_TRY(zero_check_made(z, "zero_report"));
    ZERO_TRY(zero_wait_status(z));
    report->t = s->t;
    report->skipped = s->skipped;
    report->skipped_in_row = s->skipped_in_row;
    report->dropped = s->dropped;
    report->skip = s->skip;
    report->norm = s->norm;
    report->loss_sum = s->loss_sum;
    report->votes = s->votes;
    report->drops = s->drops;
    ZERO_TRY(zero_read_timeline(z));
    report->exposed_ms = zero_timeline_take_exposed(zero_timeline(z));
    return zero_check_skips(z, s);
}

#endif /* LLMC_ZERO_OPTIMIZER_CUH_INCLUDED */
