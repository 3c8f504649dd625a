/* llmc_zero/gpt2.cuh - what llmc_zero has to know of llm.c's GPT2. dev/llmc/patch.py puts it here and edits
   train_gpt2.cu so that the functions below are called; it is included right behind the definition of GPT2.

   A segment is one layer's part of a tensor, a unit is a layer; unit 0 holds the embeddings, the last unit the final
   layernorm. The flat buffer is layer-major: layer l + 1 lies a constant distance behind layer l, so a kernel gets
   its pointers from zero_gpt2_param(model, params.qkvw, l) in place of params.qkvw + l * size. The model index is
   llm.c's order (tensor by tensor), so model files keep their bytes.

   One step, in the order in which the patched functions call:
     gpt2_backward_and_reduce   zero_gpt2_begin; zero_gpt2_grad; zero_gpt2_layer_done; zero_gpt2_backward_done
     gpt2_calculate_grad_norm   zero_gpt2_grad_norm
     gpt2_update                zero_gpt2_update
     gpt2_forward (the next)    zero_gpt2_param
   A step whose gpt2_update is left out (llm.c's outlier rule) is dropped when the next one begins.
   Checkpoints, resuming and SIGTERM: gpt2_checkpoint.cuh.

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

/* What -K, -R, -A, -O and -H say; -z stays llm.c's. */
typedef struct ZeroGpt2Settings {
    int units_apart;  /* -K unit: a bucket a layer */
    double bucket_mb; /* -K X: buckets of at most X MB; 0: one bucket */
    ZeroReduction reduction;
    ZeroAccumulation accumulation;
    int overlap;
    int hash_every; /* -H: compare the ranks' parameters every so many steps; 0: at the end only */
    int save_every; /* -n, with -o; 0: no checkpoints */
    uint64_t flags; /* zero_gpt2_flags: must be the same on all ranks */
} ZeroGpt2Settings;

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
    unsigned long long not_finite;             /* steps skipped so far because of the gradient */
    ZeroTensor tensors[NUM_PARAMETER_TENSORS]; /* as checkpoints describe them */
    char* state; /* what save_state writes and load_state reads beside the arrays */
    size_t state_bytes;
    uint64_t samples; /* sequences that all ranks have seen */
    ZeroConfig
        resumed; /* betas, eps and weight decay of the checkpoint, until the first update compares them */
    int stop;    /* a rank got SIGTERM */
} ZeroGpt2;

/* llm.c's tensors in its order. decays: only matrices and embeddings lose weight. columns: of a matrix, in channels;
   0: a vector. */
typedef struct ZeroGpt2Tensor {
    const char* name;
    int per_layer, decays, columns;
} ZeroGpt2Tensor;

static const ZeroGpt2Tensor zero_gpt2_tensors[] = {
    {"wte", 0, 1, 1},     {"wpe", 0, 1, 1},     {"ln1w", 1, 0, 0},     {"ln1b", 1, 0, 0},
    {"qkvw", 1, 1, 1},    {"qkvb", 1, 0, 0},    {"attprojw", 1, 1, 1}, {"attprojb", 1, 0, 0},
    {"ln2w", 1, 0, 0},    {"ln2b", 1, 0, 0},    {"fcw", 1, 1, 1},      {"fcb", 1, 0, 0},
    {"fcprojw", 1, 1, 4}, {"fcprojb", 1, 0, 0}, {"lnfw", 0, 0, 0},     {"lnfb", 0, 0, 0},
};
static_assert(sizeof(zero_gpt2_tensors) / sizeof(zero_gpt2_tensors[0]) == NUM_PARAMETER_TENSORS,
              "this llm.c has other parameter tensors: change zero_gpt2_tensors in llmc_zero/gpt2.cuh alike");

/* Ends this process and with it the others: mpirun sees the exit code; a rank that waits must not wait for ever. */
static inline void zero_gpt2_check(ZeroResult result, const char* file, int line) {
    if (result.code == ZERO_OK) return;
    fprintf(stderr, "[llmc_zero ERROR] rank %d of %d at file %s:%d:\n%s\n", multi_gpu_config.process_rank,
            multi_gpu_config.num_processes, file, line, result.text);
    fflush(NULL);
#if defined(MULTI_GPU) && defined(USE_MPI)
    int started = 0, ended = 0;
    if (MPI_Initialized(&started) == MPI_SUCCESS && started && MPI_Finalized(&ended) == MPI_SUCCESS && !ended)
        MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
#endif
    _exit(EXIT_FAILURE); /* exit() would wait for streams that a lost peer keeps busy */
}
#define zeroCheck(result) (zero_gpt2_check((result), __FILE__, __LINE__))

/* ------------------------------------------------------------------ flags */

static inline ZeroGpt2Settings zero_gpt2_settings(void) {
    ZeroGpt2Settings settings = {1, 0.0, ZERO_REDUCE_NCCL, ZERO_ACCUMULATE_STEP, 1, 0, 0, 0};
    return settings;
}

/* What all of main's flags together say. flags: one number of all but those that may differ: files and folders (-i,
   -j, -e, -o) and how ranks meet (-p?). Ranks with other steps, batches, rates or -H would wait for one another, or
   train their slices each in its own way. */
static inline void zero_gpt2_read_flags(ZeroGpt2Settings* settings, int argc, char** argv) {
    int folder = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "-n") == 0) settings->save_every = atoi(argv[i + 1]);
        if (strncmp(argv[i], "-o", 2) == 0) folder = 1;
        if (argv[i][0] == '-' && argv[i][1] && strchr("ijeop", argv[i][1])) continue;
        for (int word = i; word <= i + 1; word++)
            for (const char* c = argv[word]; c == argv[word] || c[-1]; c++)
                settings->flags = zero_mix(settings->flags * 257 + (unsigned char)*c + 1);
    }
    if (!folder || settings->save_every < 0) settings->save_every = 0;
}

static inline void zero_gpt2_usage(void) {
    fprintf(stderr, "  llmc_zero: -z 0 off, 1 optimizer state sharded, 2 and gradients, 3 and parameters\n");
    fprintf(
        stderr,
        "  -K <string> bucket size in MB, or unit = a bucket a layer, or 0 = one bucket (default = unit)\n");
    fprintf(
        stderr,
        "  -R <string> reduction of gradients: nccl, ordered (fp32, in rank order), or allreduce with -z 0\n"
        "              (default = nccl)\n");
    fprintf(stderr, "  -A <string> step: reduce once a step; micro: each micro-step, into fp32 (-z 2 and 3 "
                    "do that always)\n"
                    "              (default = step)\n");
    fprintf(stderr, "  -O <int>    overlap communication with forward and backward? (default = 1)\n");
    fprintf(
        stderr,
        "  -H <int>    compare the ranks' parameters every so many steps (default = 0, at the end only)\n");
    fprintf(stderr,
            "  -n: DIR/step_*.safetensors holds the state of all ranks; -y 1 reads it on any number of\n"
            "  ranks; SIGTERM saves behind the current step, and ends the run with 0\n");
}

/* Takes flag -K, -R, -A, -O or -H; 0 if it is none of them. A value that cannot work ends the program. */
static inline int zero_gpt2_flag(ZeroGpt2Settings* settings, const char* flag, const char* value) {
    char* end = NULL;
    if (strlen(flag) != 2 || !strchr("KRAOH", flag[1])) return 0;
    if (flag[1] == 'K' && strcmp(value, "unit") == 0) {
        settings->units_apart = 1;
        settings->bucket_mb = 0.0;
    } else if (flag[1] == 'K') {
        settings->units_apart = 0;
        settings->bucket_mb = strtod(value, &end);
        if (end == value || *end || !(settings->bucket_mb >= 0.0 && settings->bucket_mb <= 1e9)) end = NULL;
        if (!end) fprintf(stderr, "-K %s: a bucket size in MB, 0 .. 1e9, or unit\n", value);
        if (!end) exit(EXIT_FAILURE);
    } else if (flag[1] == 'R' && strcmp(value, "nccl") == 0) {
        settings->reduction = ZERO_REDUCE_NCCL;
    } else if (flag[1] == 'R' && strcmp(value, "ordered") == 0) {
        settings->reduction = ZERO_REDUCE_ORDERED;
    } else if (flag[1] == 'A' && (strcmp(value, "step") == 0 || strcmp(value, "micro") == 0)) {
        settings->accumulation = value[0] == 'm' ? ZERO_ACCUMULATE_MICRO : ZERO_ACCUMULATE_STEP;
    } else if (flag[1] == 'R' && strcmp(value, "allreduce") == 0) {
        settings->reduction = ZERO_REDUCE_ALLREDUCE;
    } else if (flag[1] == 'O' && (strcmp(value, "0") == 0 || strcmp(value, "1") == 0)) {
        settings->overlap = value[0] == '1';
    } else if (flag[1] == 'H' && *value && strlen(value) < 10 &&
               strspn(value, "0123456789") == strlen(value)) {
        settings->hash_every = atoi(value);
    } else {
        fprintf(stderr, "%s %s: %s\n", flag, value,
                flag[1] == 'R'   ? "nccl, ordered or allreduce"
                : flag[1] == 'A' ? "step or micro"
                : flag[1] == 'O' ? "0 or 1"
                                 : "a number of steps, 0 .. 999999999");
        exit(EXIT_FAILURE);
    }
    return 1;
}

/* ------------------------------------------------------------------ set up, tear down */

/* Set by SIGTERM (a job's time is up); the ranks vote with each norm, so that all stop behind the same step. */
static volatile sig_atomic_t zero_gpt2_signalled = 0;
static void zero_gpt2_on_stop(int) { zero_gpt2_signalled = 1; }

/* SIGTERM ends the run behind the current step, if that can be saved; a file that may not grow (ulimit -f) is an
   error of the write. */
static inline void zero_gpt2_set_signals(void) {
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_handler = SIG_IGN;
    sigaction(SIGXFSZ, &action, NULL);
    action.sa_handler = zero_gpt2_on_stop;
    action.sa_flags = SA_RESTART;
    sigaction(SIGTERM, &action, NULL);
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
    if (settings->save_every > 0) zero_gpt2_set_signals();
}

/* Frees what belongs to model->zero; llm.c's pointers to it become NULL. Before the communicator goes; the second
   call does nothing. */
static inline void zero_gpt2_free(GPT2* model) {
    ZeroGpt2* zero = model->zero;
    if (!zero) return;
    zero_free(&zero->z);
    zero_layout_free(&zero->layout);
    free(zero->names);
    free(zero->unit_open);
    free(zero->state);
    free(zero);
    model->zero = NULL;
    model->params_memory = NULL;
    model->grads_memory = NULL;
    model->m_memory = model->v_memory = model->master_weights = NULL;
}

static inline int zero_gpt2_layers(const ZeroGpt2* zero) { return zero->layout.units_count - 2; }

/* The segment of tensor i's part in a layer (the layer of a tensor that has none does not matter). */
static inline int zero_gpt2_segment(const ZeroGpt2* zero, int i, int layer) {
    return zero->first_segment[i] + (zero_gpt2_tensors[i].per_layer ? layer : 0);
}

static inline ZeroResult zero_gpt2_describe(GPT2* model, int ranks) {
    ZeroGpt2* zero = model->zero;
    const int layers = model->config.num_layers;
    const size_t segments_max = (size_t)NUM_PARAMETER_TENSORS * (size_t)(layers > 0 ? layers : 1);
    ZeroSegment* segments = (ZeroSegment*)calloc(segments_max, sizeof(ZeroSegment));
    ZeroLayoutConfig config = zero_layout_config(ranks, sizeof(floatX) == 2 ? ZERO_BF16 : ZERO_FP32);
    ZeroResult result = zero_ok();
    int count = 0;
    zero->names = (char(*)[32])calloc(segments_max, sizeof(*zero->names));
    config.units_apart = zero->settings.units_apart || zero->stage >= 2;
    config.bucket_bytes = (size_t)(zero->settings.bucket_mb * 1e6);
    if (zero->settings.bucket_mb > 0.0 && config.bucket_bytes == 0)
        config.bucket_bytes = 1; /* 0 is one bucket */
    if (!segments || !zero->names)
        result = zero_error(ZERO_ERROR_MEMORY, "no host memory for %zu segments", segments_max);
    if (layers < 1) result = zero_error(ZERO_ERROR_ARGUMENT, "%d layers; a model has at least 1", layers);
    for (int i = 0; i < NUM_PARAMETER_TENSORS && result.code == ZERO_OK; i++) {
        const ZeroGpt2Tensor* tensor = &zero_gpt2_tensors[i];
        const int parts = tensor->per_layer ? layers : 1;
        if (model->param_elements[i] % (size_t)parts != 0)
            result = zero_error(ZERO_ERROR_ARGUMENT,
                                "tensor %s has %zu elements, which %d layers cannot share: change "
                                "zero_gpt2_tensors in llmc_zero/gpt2.cuh",
                                tensor->name, model->param_elements[i], parts);
        zero->first_segment[i] = count;
        for (int l = 0; l < parts; l++, count++) {
            const int unit = tensor->per_layer ? 1 + l : i < 2 ? 0 : 1 + layers;
            snprintf(zero->names[count], sizeof(*zero->names), tensor->per_layer ? "h.%2$d.%1$s" : "%s",
                     tensor->name, l);
            segments[count] =
                zero_segment(zero->names[count], model->param_elements[i] / (size_t)parts, unit);
            segments[count].decay_factor = tensor->decays ? 1.0f : 0.0f;
        }
    }
    if (result.code == ZERO_OK) result = zero_layout(&zero->layout, segments, count, &config);
    free(segments);
    return result;
}

/* model->params and model->grads become names: zero_gpt2_param and zero_gpt2_grad turn them into addresses. In stages 0 to 2
   (gradients: 0 and 1) they are those of layer 0, too. */
static inline void zero_gpt2_point(const ZeroGpt2* zero, ParameterTensors* tensors, void* flat) {
    floatX** pointers =
        (floatX**)tensors; /* llm.c asserts that it is an array of NUM_PARAMETER_TENSORS pointers */
    for (int i = 0; i < NUM_PARAMETER_TENSORS; i++)
        pointers[i] = (floatX*)flat + zero->layout.segments[zero->first_segment[i]].flat_offset;
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

/* ------------------------------------------------------------------ model order: files and host memory */

typedef enum ZeroGpt2Direction { ZERO_GPT2_TO_HOST, ZERO_GPT2_FROM_HOST } ZeroGpt2Direction;

/* Releases what zero_gpt2_param has acquired; keep: but for this unit (ZERO_NO_UNIT: all of it). */
static inline void zero_gpt2_close(ZeroGpt2* zero, int keep) {
    for (int u = 0; u < zero->layout.units_count; u++) {
        if (!zero->unit_open[u] || u == keep || (u == 0 && keep != ZERO_NO_UNIT)) continue;
        zero->unit_open[u] = 0;
        zeroCheck(zero_params_release(&zero->z, u));
    }
}

/* Copies elements first .. first + count - 1 of the model, in llm.c's order, between host memory and the parameters, or
   with flat a flat device buffer, on main_stream. Pinned host memory: asynchronous. In stage 3 all ranks call it. */
static inline void zero_gpt2_copy(ZeroGpt2* zero, void* flat, size_t first, size_t count, void* host,
                                  ZeroGpt2Direction direction) {
    const ZeroLayout* layout = &zero->layout;
    int open = ZERO_NO_UNIT;
    zero_gpt2_close(zero, ZERO_NO_UNIT);
    for (int s = 0; s < layout->segments_count; s++) {
        const ZeroSegment* segment = &layout->segments[s];
        const size_t begin = segment->model_offset > first ? segment->model_offset : first;
        const size_t segment_end = segment->model_offset + segment->count;
        const size_t end = segment_end < first + count ? segment_end : first + count;
        if (begin >= end) continue;
        const size_t skip = begin - segment->model_offset;
        floatX* place = (floatX*)host + (begin - first);
        void* device = flat ? (floatX*)flat + segment->flat_offset : NULL;
        if (direction == ZERO_GPT2_FROM_HOST) {
            zeroCheck(zero_params_write(&zero->z, s, skip, end - begin, place));
            continue;
        }
        if (!flat) zeroCheck(zero_params_visit(&zero->z, s, &open, &device));
        cudaCheck(cudaMemcpyAsync(place, (floatX*)device + skip, (end - begin) * sizeof(floatX),
                                  cudaMemcpyDeviceToHost, main_stream));
    }
    zeroCheck(zero_params_leave(&zero->z, &open));
}

/* Parameters between the device and a file, in llm.c's order, through two pinned buffers of IO_BUF_SIZE bytes: the
   file works on one while the device works on the other. file NULL: takes part in the gathers only. */
static inline void zero_gpt2_params_and_file(GPT2* model, FILE* file, ZeroGpt2Direction direction) {
    const size_t all = model->zero->layout.model_count, step = IO_BUF_SIZE / sizeof(floatX);
    const size_t bytes = (all < step ? all : step) * sizeof(floatX);
    char* buffers[2];
    cudaEvent_t done[2];
    for (int i = 0; i < 2; i++) {
        cudaCheck(cudaMallocHost((void**)&buffers[i], bytes));
        cudaCheck(cudaEventCreateWithFlags(&done[i], cudaEventDisableTiming));
    }
    size_t previous = 0; /* elements of the piece before this one */
    int turn = 0;
    for (size_t first = 0; first < all; first += step, turn = !turn) {
        const size_t count = all - first < step ? all - first : step;
        if (direction == ZERO_GPT2_FROM_HOST) {
            cudaCheck(cudaEventSynchronize(
                done[turn])); /* the copy out of this buffer; at once in the first two turns */
            freadCheck(buffers[turn], sizeof(floatX), count, file);
        }
        zero_gpt2_copy(model->zero, NULL, first, count, buffers[turn], direction);
        cudaCheck(cudaEventRecord(done[turn], main_stream));
        if (direction == ZERO_GPT2_TO_HOST && previous > 0) {
            cudaCheck(cudaEventSynchronize(done[!turn]));
            if (file) fwriteCheck(buffers[!turn], sizeof(floatX), previous, file);
        }
        previous = count;
    }
    cudaCheck(cudaStreamSynchronize(main_stream));
    if (direction == ZERO_GPT2_TO_HOST && previous > 0 && file)
        fwriteCheck(buffers[!turn], sizeof(floatX), previous, file);
    for (int i = 0; i < 2; i++) {
        cudaCheck(cudaFreeHost(buffers[i]));
        cudaCheck(cudaEventDestroy(done[i]));
    }
}

static inline void zero_gpt2_params_to_file(GPT2* model, FILE* file) {
    zero_gpt2_params_and_file(model, file, ZERO_GPT2_TO_HOST);
}
/* On the ranks that do not write the model file: in stage 3 each unit has to be gathered for the one that does. */
static inline void zero_gpt2_join_params_to_file(GPT2* model) {
    if (model->zero->z.schedule.params_sharded) zero_gpt2_params_and_file(model, NULL, ZERO_GPT2_TO_HOST);
}
/* Whether this rank samples: rank 0, in stage 3 all of them, because each forward gathers. */
static inline int zero_gpt2_samples(const GPT2* model) {
    return multi_gpu_config.process_rank == 0 || model->zero->z.schedule.params_sharded;
}
/* Every rank reads the whole file. */
static inline void zero_gpt2_params_from_file(GPT2* model, FILE* file) {
    zero_gpt2_params_and_file(model, file, ZERO_GPT2_FROM_HOST);
}

static inline void zero_gpt2_params_from_host(GPT2* model, void* params) {
    zero_gpt2_copy(model->zero, NULL, 0, model->zero->layout.model_count, params, ZERO_GPT2_FROM_HOST);
    cudaCheck(cudaStreamSynchronize(main_stream));
}

/* The mean gradient over the ranks, before clipping, in llm.c's order; for a test to look at. With -z 1 this rank has
   the mean in its own slices only. */
static inline void zero_gpt2_grads_to_host(GPT2* model, void* grads) {
    const size_t count = model->zero->layout.model_count;
    if (model->zero->stage > 1)
        zeroCheck(zero_error(ZERO_ERROR_ARGUMENT, "-z %d never holds all gradients; -z 0 does",
                             model->zero->stage));
    zeroCheck(zero_grad_norm(&model->zero->z, NULL)); /* all reductions are done behind this */
    zero_gpt2_copy(model->zero, model->grads_memory, 0, count, grads, ZERO_GPT2_TO_HOST);
    cudaCheck(cudaStreamSynchronize(main_stream));
    for (size_t i = 0; multi_gpu_config.num_processes > 1 && i < count; i++)
        ((floatX*)grads)[i] = (floatX)((float)((floatX*)grads)[i] / (float)multi_gpu_config.num_processes);
}

/* llm.c's question where a tensor lies; the offset is into params_memory and grads_memory. */
static inline ShardInfo zero_gpt2_tensor_at_layer(const GPT2* model, int layer, int tensor) {
    const ZeroSegment* segment = &model->zero->layout.segments[zero_gpt2_segment(model->zero, tensor, layer)];
    return {(ptrdiff_t)segment->flat_offset, segment->count};
}

/* ------------------------------------------------------------------ the step */

/* Which segment a pointer of model->params or model->grads (at layer 0) and a layer mean; -1: none. */
static inline int zero_gpt2_find(const ZeroGpt2* zero, const ParameterTensors* tensors, const floatX* first,
                                 size_t layer) {
    floatX* const* pointers = (floatX* const*)tensors;
    for (int i = 0; i < NUM_PARAMETER_TENSORS; i++)
        if (pointers[i] == first &&
            layer < (size_t)(zero_gpt2_tensors[i].per_layer ? zero_gpt2_layers(zero) : 1))
            return zero_gpt2_segment(zero, i, (int)layer);
    zeroCheck(zero_error(ZERO_ERROR_ARGUMENT, "%p in layer %zu is no tensor of the model", (const void*)first,
                         layer));
    return -1;
}

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

/* Elements from where a unit begins to where it ends. */
static inline size_t zero_gpt2_unit_count(const ZeroGpt2* zero, int unit) {
    size_t end = 0;
    for (int i = 0; i < NUM_PARAMETER_TENSORS; i++) {
        const int per_layer = zero_gpt2_tensors[i].per_layer;
        const int s = zero_gpt2_segment(zero, i, per_layer && unit > 0 ? unit - 1 : 0);
        if (per_layer && (unit == 0 || unit > zero_gpt2_layers(zero))) continue;
        if (zero->layout.segments[s].unit != unit) continue;
        const size_t last = zero_unit_offset(&zero->layout, s) + zero->layout.segments[s].count;
        if (last > end) end = last;
    }
    return end;
}

/* The same for a gradient, from model->grads. llm.c adds to what is there, so that a unit is cleared where it would have to be
   written. */
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
        zero->steps++;
    }
    zeroCheck(zero_begin(z, micro_step, micro_steps, 1.0)); /* llm.c has divided the loss by micro_steps */
    zero->samples += (uint64_t)model->batch_size * (uint64_t)z->ranks;
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
   gradient is not finite changes nothing, on any rank. from_masters: no update; params are made from the masters. */
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
    if (report.skipped > zero->not_finite) {
        printf0("skipping update: the gradient is not finite (%llu in a row, %llu in all)\n",
                (unsigned long long)report.skipped_in_row, (unsigned long long)report.skipped);
    }
    zero->not_finite = report.skipped;
    zeroCheck(zero_update(z, (double)learning_rate));
}

/* The end of training, before the communicator goes: all ranks must hold the same parameters. Then as
   zero_gpt2_free. */
static inline void zero_gpt2_finish(GPT2* model) {
    uint64_t hash;
    zero_gpt2_close_step(model->zero);
    zeroCheck(zero_check_replicas(&model->zero->z, &hash));
    printf0("llmc_zero: parameters have hash %016llx, on each of %d ranks\n", (unsigned long long)hash,
            multi_gpu_config.num_processes);
    zero_gpt2_free(model);
}

#include "gpt2_checkpoint.cuh"

#endif /* LLMC_ZERO_GPT2_CUH_INCLUDED */
