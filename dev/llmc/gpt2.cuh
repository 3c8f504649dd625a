/* llmc_zero/gpt2.cuh - what llmc_zero has to know of llm.c's GPT2. dev/llmc/patch.py puts it here and edits
   train_gpt2.cu so that the functions below are called; it is included right behind the definition of GPT2.

   The flat buffer is layer-major, so a kernel gets its pointers from zero_gpt2_param(model, params.qkvw, l) in place
   of params.qkvw + l * size; in stage 3 that waits for the layer's gather.

   One step, in the order in which the patched functions call:
     gpt2_backward_and_reduce   zero_gpt2_begin; zero_gpt2_grad; zero_gpt2_layer_done; zero_gpt2_backward_done
     gpt2_calculate_grad_norm   zero_gpt2_grad_norm
     gpt2_update                zero_gpt2_update
     gpt2_forward (the next)    zero_gpt2_param
   A step whose gpt2_update is left out (llm.c's outlier rule) is dropped when the next one begins.
   Parts, each included where what it uses is defined:
     gpt2_flags.cuh       what -K, -R, -A, -O and -H say
     gpt2_batches.cuh     which micro-batches a rank takes; losses; random numbers
     gpt2_layout.cuh      where the parts of tensors lie: segments, units
     gpt2_model_file.cuh  the parameters in llm.c's order: model files, host memory
     gpt2_checkpoint.cuh  checkpoints, resuming, SIGTERM

   llm.c's way with errors is kept: a call that fails prints one line and ends the program, the other ranks with it.
*/
#ifndef LLMC_ZERO_GPT2_CUH_INCLUDED
#define LLMC_ZERO_GPT2_CUH_INCLUDED

#if defined(ENABLE_FP16)
#error "llmc_zero shards FP32 and BF16 models: build with PRECISION=BF16 or PRECISION=FP32"
#endif
#if !defined(MULTI_GPU) && !defined(ZERO_NO_NCCL)
#define ZERO_NO_NCCL
#endif

#include <signal.h>
#include <unistd.h>

#include "llmc_zero.cuh"
/* behind the one above */
#include "checkpoint_folder.cuh"
#include "watchdog.cuh"

/* Looks after this process from main's flags on: ends it when it gets on no more. */
static ZeroWatchdog zero_gpt2_watchdog;

static void zero_gpt2_end(void*, const char* line) {
    const ssize_t written = write(2, line, strlen(line));
    (void)written;
    _exit(EXIT_FAILURE);
}

/* Before the ranks meet; the second call sets the limit only. */
static inline void zero_gpt2_start_watchdog(double limit_s) {
    const ZeroWatchdogConfig config = {
        "[llmc_zero ERROR]", limit_s > 0.0 ? limit_s : 600.0, NULL, NULL, zero_gpt2_end, NULL};
    signal(SIGPIPE, SIG_IGN); /* whoever reads our output may go */
    signal(SIGXFSZ, SIG_IGN); /* a file that may not grow (ulimit -f) is an error of the write */
    zero_watchdog_at(&zero_gpt2_watchdog, "start-up");
    if (zero_gpt2_watchdog.started) {
        zero_gpt2_watchdog.config.limit_s = config.limit_s;
        return;
    }
    const ZeroResult result = zero_watchdog_start(&zero_gpt2_watchdog, &config);
    if (result.code == ZERO_OK) return;
    fprintf(stderr, "[llmc_zero ERROR] %s\n", result.text);
    exit(EXIT_FAILURE);
}

#include "gpt2_flags.cuh"

typedef struct ZeroGpt2 {
    ZeroGpt2Settings settings;
    int stage;
    ZeroLayout layout;
    ZeroMemory memory;
    ZeroOptimizer z;
    char (*names)[32];                         /* of the segments */
    int first_segment[NUM_PARAMETER_TENSORS];  /* of tensor i; its layers follow */
    char* unit_open;                           /* parameters of a unit are acquired */
    int steps;                                 /* begun by this process */
    ZeroTensor tensors[NUM_PARAMETER_TENSORS]; /* as checkpoints describe them */
    char* state; /* what save_state writes and load_state reads beside the arrays */
    size_t state_bytes;
    uint64_t samples;     /* sequences that all ranks have seen */
    uint64_t micro_first; /* with -R ordered: how many came before this micro-batch */
    int idle;             /* with -R ordered: this rank has no micro-batch in this micro-step */
    double* loss;         /* on the device: of a micro-batch */
    uint64_t val_sum[ZERO_EXACT_WORDS + 1]; /* of this rank's batches, and how many were not finite */
    int val_counts;                         /* this round's batch counts */
    ZeroConfig
        resumed; /* betas, eps and weight decay of the checkpoint, until the first update compares them */
    int stop;    /* a rank got SIGTERM */
} ZeroGpt2;

/* Ends this process and with it the others: mpirun sees the exit code; a rank that waits must not wait for ever. Hard:
   exit(), MPI and NCCL would wait for streams that a lost peer keeps busy. */
static inline void zero_gpt2_check(ZeroResult result, const char* file, int line) {
    if (result.code == ZERO_OK) return;
    while (!zero_watchdog_claim(&zero_gpt2_watchdog)) pause(); /* it is ending us */
    fprintf(stderr, "[llmc_zero ERROR] rank %d of %d at file %s:%d:\n%s\n", multi_gpu_config.process_rank,
            multi_gpu_config.num_processes, file, line, result.text);
    fflush(NULL);
    _exit(EXIT_FAILURE);
}
#define zeroCheck(result) (zero_gpt2_check((result), __FILE__, __LINE__))

static inline void zero_gpt2_check_saves(GPT2* model); /* gpt2_checkpoint.cuh */
#include "gpt2_batches.cuh"
#include "gpt2_layout.cuh"

/* ------------------------------------------------------------------ set up, tear down */

/* Set by a signal (a job's time is up); the ranks vote with each norm, so that all stop behind the same step. A second
   TERM or INT ends the process at once. */
static volatile sig_atomic_t zero_gpt2_signalled = 0;
static void zero_gpt2_on_stop(int number) {
    if (zero_gpt2_signalled && number != SIGUSR1) {
        static const char line[] = "llmc_zero: a second signal: ending at once, without a save\n";
        const ssize_t written = write(2, line, sizeof(line) - 1);
        (void)written;
        _exit(128 + number);
    }
    zero_gpt2_signalled = 1;
}

/* TERM, INT and USR1 end the run behind the current step, if that can be saved. */
static inline void zero_gpt2_set_signals(void) {
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_handler = zero_gpt2_on_stop;
    action.sa_flags = SA_RESTART;
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
}

/* Stage and settings, before the weights are allocated. Without this call: stage 0, a bucket a layer. */
static inline void zero_gpt2_configure(GPT2* model, int stage, const ZeroGpt2Settings* settings) {
    if (stage < 0 || stage > 3) {
        printf0("-z %d: 0 (off), 1 (optimizer state sharded), 2 (and gradients) or 3 (and parameters)\n",
                stage);
        fflush(NULL);
        exit(EXIT_FAILURE);
    }
    if (!model->zero) model->zero = (ZeroGpt2*)calloc(1, sizeof(ZeroGpt2));
    if (!model->zero) zeroCheck(zero_error(ZERO_ERROR_MEMORY, "no host memory"));
    model->zero->stage = stage;
    model->zero->settings = *settings;
    if (zero_gpt2_ordered(model)) model->rng_state = 13371337; /* not this rank's: checkpoints are the same */
    if (settings->save_every > 0) zero_gpt2_set_signals();
}

/* In place of llm.c's set_zero_configs, which other trainers go on to call: any stage, and a model of any size. */
static inline void zero_gpt2_set_configs(MultiGpuConfig* config, int stage, size_t count) {
    config->zero_stage = stage;
    config->shard_num_parameters = count; /* until the state is allocated */
    printf0("| %-21s | %-50s |\n", "llmc_zero",
            stage == 0   ? "off: optimizer state on every rank"
            : stage == 1 ? "optimizer state sharded over the ranks"
            : stage == 2 ? "optimizer state and gradients sharded"
                         : "optimizer state, gradients and parameters sharded");
}

/* Frees what belongs to model->zero; llm.c's pointers to it become NULL. Before the communicator goes; the second
   call does nothing. */
static inline void zero_gpt2_free(GPT2* model) {
    ZeroGpt2* zero = model->zero;
    if (!zero) return;
    zero_watchdog_at(&zero_gpt2_watchdog, "end");
    zero_watchdog_comm(&zero_gpt2_watchdog, NULL);
    zero_free(&zero->z);
    zero_layout_free(&zero->layout);
    free(zero->names);
    free(zero->unit_open);
    free(zero->state);
    cudaFree(zero->loss);
    free(zero);
    model->zero = NULL;
    model->params_memory = NULL;
    model->grads_memory = NULL;
    model->m_memory = model->v_memory = model->master_weights = NULL;
}

/* In place of one cudaMalloc for all parameters: lays the model out and allocates what the stage needs. */
static inline void zero_gpt2_allocate_weights(GPT2* model) {
    const ZeroGpt2Settings defaults = zero_gpt2_settings();
    ZeroConfig config = zero_config();
#ifdef MULTI_GPU
    ZeroNcclComm comm = multi_gpu_config.nccl_comm;
#else
    ZeroNcclComm comm = NULL;
#endif
    static const int embeddings = 0; /* used first and last: stays open across the layers */
    if (!model->zero) zero_gpt2_configure(model, 0, &defaults);
    ZeroGpt2* zero = model->zero;
    config.stage = zero->stage;
    config.reduction = zero->settings.reduction;
    config.accumulation = zero->settings.accumulation;
    config.overlap = zero->settings.overlap;
    config.held_units = &embeddings;
    config.held_units_count = 1;
    config.timeout_s = zero->settings.limit_s;
    config.watch = zero_watchdog_watch(&zero_gpt2_watchdog);
    zero_watchdog_rank(&zero_gpt2_watchdog, multi_gpu_config.process_rank);
    zero_watchdog_comm(&zero_gpt2_watchdog, comm);
    zero_watchdog_at(&zero_gpt2_watchdog, "set-up");
    config.seed = 13371337; /* of stochastic rounding: the same on all ranks */
    zeroCheck(zero_gpt2_describe(model, multi_gpu_config.num_processes));
    zero->unit_open = (char*)calloc((size_t)zero->layout.units_count, 1);
    if (!zero->unit_open)
        zeroCheck(zero_error(ZERO_ERROR_MEMORY, "no host memory for %d units", zero->layout.units_count));
    zeroCheck(zero_init(&zero->z, &config, &zero->layout, multi_gpu_config.process_rank, comm, main_stream,
                        &zero->memory));
    zeroCheck(zero_check_settings(&zero->z, zero->settings.flags));
    zeroCheck(zero_alloc_params(&zero->z, NULL));
    model->params_memory = zero->z.params;
    zero_gpt2_point(zero, &model->params, model->params_memory);
}

static inline void zero_gpt2_allocate_grads(GPT2* model) {
    zeroCheck(zero_alloc_grads(&model->zero->z, NULL));
    /* llm.c asks whether there are any; in stages 2 and 3 they are nowhere as a whole */
    model->grads_memory = model->zero->z.grads ? model->zero->z.grads : (void*)model->zero->z.sums;
    zero_gpt2_point(model->zero, &model->grads, model->grads_memory);
}

/* m, v and, in BF16 with -w 1, masters: made now, with the parameters that are there, not in the first update. */
static inline void zero_gpt2_allocate_state(GPT2* model) {
    ZeroOptimizer* z = &model->zero->z;
    const char* names[] = {"AdamW optimizer state m", "AdamW optimizer state v", "master copy of params"};
    const size_t all = zero_state_count(z->layout, 0), own = zero_state_count(z->layout, z->config.stage);
    z->config.masters = model->use_master_weights;
    const int arrays = sizeof(floatX) == 2 && model->use_master_weights ? 3 : 2;
    for (int i = 0; i < arrays; i++)
        printf0("allocating %zu MiB for %s\n", (own * sizeof(float)) >> 20, names[i]);
    zeroCheck(zero_alloc_state(z));
    cudaCheck(cudaMalloc((void**)&model->zero->loss, sizeof(double)));
    zeroCheck(zero_check_replicas(z, NULL)); /* or each rank would give its slices of another model (-e) */
    model->m_memory = z->exp_avg;
    model->v_memory = z->exp_avg_sq;
    model->master_weights = z->masters;
    model->init_state = false;
    multi_gpu_config.shard_num_parameters = own;
    printf0("llmc_zero: stage %d, %d buckets; bytes on each rank: parameters %zu, gradients %zu, m + v%s %zu "
            "(%d x 4 x %zu of %zu elements)\n",
            z->config.stage, z->layout->buckets_count, model->zero->memory.held_bytes[ZERO_MEMORY_PARAMS],
            model->zero->memory.held_bytes[ZERO_MEMORY_GRADS], arrays == 3 ? " + masters" : "",
            (size_t)arrays * own * sizeof(float), arrays, own, all);
}

/* Releases what zero_gpt2_param has acquired; keep: but for this unit (ZERO_NO_UNIT: all of it). */
static inline void zero_gpt2_close(ZeroGpt2* zero, int keep) {
    for (int u = 0; u < zero->layout.units_count; u++) {
        if (!zero->unit_open[u] || u == keep || (u == 0 && keep != ZERO_NO_UNIT)) continue;
        zero->unit_open[u] = 0;
        zeroCheck(zero_params_release(&zero->z, u));
    }
}

#include "gpt2_model_file.cuh"

/* ------------------------------------------------------------------ the step */

/* A layer's part of a tensor; main_stream waits until it has been gathered. first: the tensor's pointer in
   model->params. The pointer is good until a tensor of another layer, but its first norm, is asked for: a layer's last
   kernel reads the next layer's first norm. So two layers are open at most. */
static inline floatX* zero_gpt2_param(GPT2* model, floatX* first, size_t layer) {
    ZeroGpt2* zero = model->zero;
    const int s = zero_gpt2_find(zero, &model->params, first, layer), unit = zero->layout.segments[s].unit;
    const int first_norm = first == model->params.ln1w || first == model->params.ln1b ||
                           first == model->params.lnfw || first == model->params.lnfb;
    void* params;
    if (!first_norm) zero_gpt2_close(zero, unit);
    zeroCheck(zero_params_acquire(&zero->z, unit, &params));
    if (zero->unit_open[unit]) zeroCheck(zero_params_release(&zero->z, unit)); /* it was open already */
    zero->unit_open[unit] = 1;
    return (floatX*)params + zero_unit_offset(&zero->layout, s);
}

/* The final layernorm's gradients are complete once those of a layer are asked for. */
static inline void zero_gpt2_final_norm_done(ZeroGpt2* zero) {
    const int unit = 1 + zero_gpt2_layers(zero);
    if (!zero->z.units[unit].ready && zero->z.units[unit].grads_open)
        zeroCheck(zero_grads_ready(&zero->z, unit));
}

/* The same for a gradient, from model->grads. llm.c adds to what is there, so that a unit is cleared where it would
   have to be written. */
static inline floatX* zero_gpt2_unit_grads(ZeroGpt2* zero, int unit) {
    void* grads;
    int add;
    zeroCheck(zero_grads_acquire(&zero->z, unit, &grads, &add));
    if (!add)
        cudaCheck(cudaMemsetAsync(grads, 0, zero_gpt2_unit_count(zero, unit) * sizeof(floatX), main_stream));
    return (floatX*)grads;
}
static inline floatX* zero_gpt2_grad(GPT2* model, floatX* first, size_t layer) {
    ZeroGpt2* zero = model->zero;
    const int s = zero_gpt2_find(zero, &model->grads, first, layer), unit = zero->layout.segments[s].unit;
    if (unit > 0 && unit <= zero_gpt2_layers(zero)) zero_gpt2_final_norm_done(zero);
    return zero_gpt2_unit_grads(zero, unit) + zero_unit_offset(&zero->layout, s);
}

/* Ends a step that was not updated, because llm.c's outlier rule dropped it. */
static inline void zero_gpt2_close_step(ZeroGpt2* zero) {
    ZeroOptimizer* z = &zero->z;
    zero_gpt2_close(zero, ZERO_NO_UNIT);
    if (!z->norm_done) return;
    zeroCheck(zero_skip(z));
    zeroCheck(zero_update(z, 0.0));
}

/* Backward begins. */
static inline void zero_gpt2_begin(GPT2* model, int micro_step, int micro_steps) {
    ZeroGpt2* zero = model->zero;
    ZeroOptimizer* z = &zero->z;
    if (micro_step == 0) {
        if (z->norm_done) zero_gpt2_close_step(zero);
        if (zero->settings.hash_every > 0 && zero->steps > 0 &&
            zero->steps % zero->settings.hash_every == 0) {
            zero_gpt2_close(zero, ZERO_NO_UNIT);
            zeroCheck(zero_check_replicas(z, NULL));
        }
        if (zero->steps++ == 0) zero_gpt2_check_saves(model);
        zero_watchdog_step(&zero_gpt2_watchdog, zero->steps);
    }
    if (!zero_gpt2_ordered(model)) {
        zeroCheck(
            zero_begin(z, micro_step, micro_steps, 1.0)); /* llm.c has divided the loss by micro_steps */
        zero_watchdog_at(&zero_gpt2_watchdog, "backward");
        zero->samples += (uint64_t)model->batch_size * (uint64_t)z->ranks;
        return;
    }
    int place;
    if (zero->settings.batches == 0) zero->settings.batches = micro_steps * z->ranks;
    zeroCheck(zero_begin_batches(z, micro_step, zero->settings.batches, 1.0, &zero->idle));
    const int count = zero_gpt2_in_round(micro_step, zero->settings.batches, &place);
    zero->micro_first = zero->samples + (uint64_t)place * (uint64_t)model->batch_size;
    zero->samples += (uint64_t)count * (uint64_t)model->batch_size;
}

/* A layer's gradients are complete, and its parameters not needed any more. The final layernorm's were before. */
static inline void zero_gpt2_layer_done(GPT2* model, int layer) {
    ZeroGpt2* zero = model->zero;
    const int layers = zero_gpt2_layers(zero);
    zero_gpt2_final_norm_done(zero);
    zeroCheck(zero_grads_ready(&zero->z, 1 + layer));
    for (int l = layers - 1; layer == model->config.num_layers - 1 && l > layer; l--) {
        zero_gpt2_unit_grads(zero,
                             1 + l); /* profile_gpt2.cu runs one layer: the others' gradients are zero */
        zeroCheck(zero_grads_ready(&zero->z, 1 + l));
    }
    zero_gpt2_close(zero, 0); /* all but the embeddings */
}

/* In place of cudaDeviceSynchronize at the end of forward and backward, which would wait for ever for a peer that
   died. */
static inline void zero_gpt2_wait(GPT2* model) { zeroCheck(zero_comm_drain(&model->zero->z.comm)); }

/* The embeddings' gradients are complete. */
static inline void zero_gpt2_backward_done(GPT2* model) {
    if (zero_gpt2_ordered(model)) zero_gpt2_add_loss(model);
    zeroCheck(zero_grads_ready(&model->zero->z, 0));
    zero_vote(&model->zero->z, zero_gpt2_signalled);
}

/* The norm of the mean gradient before clipping: the same number on every rank. */
static inline float zero_gpt2_grad_norm(GPT2* model) {
    float norm = 0.0f;
    zeroCheck(zero_grad_norm(&model->zero->z, &norm));
    return norm;
}

/* A grad_scale for gpt2_update that has the device clip the norm to max_norm. */
static inline float zero_gpt2_clip(float max_norm) { return max_norm > 0.0f ? -max_norm : 1.0f; }

/* llm.c passes floats: 0.999f is meant to be 0.999, and 1 - 0.999f is off by 1.3e-5. */
static inline double zero_gpt2_decimal(float x) {
    char text[32];
    snprintf(text, sizeof(text), "%.7g", (double)x);
    return strtod(text, NULL);
}

/* The first update of a resumed run: what makes another optimizer of the saved state is an error, another weight
   decay (-c) the user's choice. */
static inline void zero_gpt2_compare_settings(ZeroGpt2* zero) {
    const ZeroConfig *now = &zero->z.config, *then = &zero->resumed;
    if (then->beta2 == 0.0) return; /* nothing was resumed, or this is not the first update */
    if (now->beta1 != then->beta1 || now->beta2 != then->beta2 || now->eps != then->eps)
        zeroCheck(
            zero_error(ZERO_ERROR_ARGUMENT,
                       "the checkpoint was made with betas %g, %g and eps %g, this run has %g, %g and %g",
                       then->beta1, then->beta2, then->eps, now->beta1, now->beta2, now->eps));
    if (now->weight_decay != then->weight_decay)
        printf0("weight decay: the checkpoint has %g, this run %g\n", then->weight_decay, now->weight_decay);
    zero->resumed.beta2 = 0.0;
}

/* gpt2_update. grad_scale >= 0: gradients are multiplied with it; < 0: the norm is clipped to -grad_scale on the
   device. t: the number of this update, from 1. Works without gpt2_calculate_grad_norm before it. A step whose
   gradients do not fit (report.skip says why) changes nothing, on any rank. from_masters: no update; params are made
   from the masters. */
static inline void zero_gpt2_update(GPT2* model, float learning_rate, float beta1, float beta2, float eps,
                                    float weight_decay, float grad_scale, int t, bool from_masters) {
    ZeroGpt2* zero = model->zero;
    ZeroOptimizer* z = &zero->z;
    ZeroReport report;
    if (from_masters) {
        zero_gpt2_close(zero, ZERO_NO_UNIT);
        zeroCheck(zero_state_changed(z));
        return;
    }
    z->config.beta1 = zero_gpt2_decimal(beta1);
    z->config.beta2 = zero_gpt2_decimal(beta2);
    z->config.eps = zero_gpt2_decimal(eps);
    z->config.weight_decay = zero_gpt2_decimal(weight_decay);
    z->config.max_norm = grad_scale < 0.0f ? (double)-grad_scale : 0.0;
    zero_gpt2_compare_settings(zero);
    zero_gpt2_close(zero, ZERO_NO_UNIT);
    zeroCheck(zero_grad_norm(z, NULL));
    zeroCheck(zero_set_step(z, t > 0 ? (uint64_t)t : 0, grad_scale < 0.0f ? -1.0 : (double)grad_scale));
    zeroCheck(zero_report(z, &report)); /* before the update: then the host does not wait for that */
    if (report.skip)
        printf0("skipping update: %s (%llu in a row, %llu in all)\n", zero_skip_text(report.skip),
                (unsigned long long)report.skipped_in_row, (unsigned long long)report.skipped);
    zeroCheck(zero_update(z, (double)learning_rate));
}

/* The end of training, before the communicator goes: all ranks must hold the same parameters. Then as
   zero_gpt2_free. */
static inline void zero_gpt2_finish(GPT2* model) {
    uint64_t hash, run_hash;
    zero_gpt2_close_step(model->zero);
    zeroCheck(zero_run_hash(&model->zero->z, &hash, &run_hash));
    printf0("llmc_zero: parameters have hash %016llx, on each of %d ranks\n", (unsigned long long)hash,
            multi_gpu_config.num_processes);
    printf0("llmc_zero: run hash: %016llx (parameters, m, v and masters)\n", (unsigned long long)run_hash);
    zero_gpt2_free(model);
}

#include "gpt2_checkpoint.cuh"

#endif /* LLMC_ZERO_GPT2_CUH_INCLUDED */
