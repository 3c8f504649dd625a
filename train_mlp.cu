/* train_mlp.cu - trains an MLP with its optimizer state sharded over ranks, or not: PyTorch's recipe for
   ZeroRedundancyOptimizer (20 x Linear(2000, 2000), MSE, Adam) by default.

       make train_mlp
       mpirun -np 2 ./train_mlp -z 1          # sharded;  -z 0: not;  --help: all flags

   Reads from top to bottom: the model, one step, the run, main. */
#include "llmc_zero/llmc_zero.cuh" // defines: ZeroLayout, ZeroOptimizer and the step: zero_begin ... zero_update
#include "llmc_zero/checkpoint_folder.cuh" // defines: zero_checkpoint_save, _path, _rotate, _resume
#include "llmc_zero/watchdog.cuh" // defines: ZeroWatchdog: ends a process whose peers are gone, whatever call it is in
#include "llmc_zero/world.cuh" // defines: ZeroWorld: rank, device, communicator; zero_world_agree, _gather
#include <signal.h>
#include "dev/mlp/options.h"      // defines: Options, options_parse: the command line
#include "dev/mlp/torch_random.h" // defines: TorchRandom, torch_uniform, torch_normal: PyTorch's numbers
#include "dev/mlp/loss.cuh"       // defines: loss_run (MSE), data_split (new samples each step)
#include "dev/mlp/linear.cuh" // defines: Linear, linear_forward, linear_backward_input, _params (cuBLASLt)
#include "dev/mlp/report.h"   // defines: Report: step lines, main.log, summary.json; params_sums

// ----------------------------------------------------------------------------- the model

// Looks after this process from before it meets the others until after it has left them.
static ZeroWatchdog watchdog;

typedef struct Mlp {
    const Options* options;
    ZeroWorld* world;
    int layers, micros;
    int batches; // micro-batches of a step, of all ranks; in the last micro-step some ranks may have none
    size_t width, row_count; // row_count = batch * width: elements of one activation
    size_t row_stride;       // the same, rounded up so that each activation is aligned
    ZeroDtype dtype;
    cudaStream_t stream;
    ZeroLayout layout; // segments 2l and 2l+1 are weight and bias of layer l, unit l
    ZeroMemory memory;
    ZeroOptimizer zero;
    Linear linear;
    char (*names)[24];
    ZeroTensor* tensors; // of a checkpoint: what the segments are
    // activations
    void* data;        // (x, y) of one micro-step, or of each (-I recipe, own): [sets][2][row_stride]
    void* activations; // [layers][row_stride]: outputs of the layers
    void* row_grads;   // [2][row_stride]: gradients of two neighbouring activations
    void* workspace;   // cuBLASLt's
    double* loss;      // [loss_bytes]
    long long steps_done, samples_done; // of the whole run, also those before a resume
} Mlp;

static void* row_at(const Mlp* mlp, void* rows, size_t index) {
    return (char*)rows + index * mlp->row_stride * zero_dtype_bytes(mlp->dtype);
}

// names: NULL where nobody reads them (--plan makes many layouts)
static ZeroResult mlp_layout(ZeroLayout* layout, const Options* o, int ranks, char (*names)[24]) {
    const size_t width = (size_t)o->width;
    ZeroLayoutConfig config = zero_layout_config(ranks, (ZeroDtype)o->dtype);
    ZeroSegment* segments = (ZeroSegment*)calloc(2 * (size_t)o->layers, sizeof(ZeroSegment));
    if (!segments) return zero_error(ZERO_ERROR_MEMORY, "-L %lld: no host memory", o->layers);
    for (int l = 0; l < o->layers; l++) {
        if (names) {
            snprintf(names[2 * l], sizeof(names[0]), "%d.weight", l);
            snprintf(names[2 * l + 1], sizeof(names[0]), "%d.bias", l);
        }
        segments[2 * l] = zero_segment(names ? names[2 * l] : NULL, width * width, l);
        segments[2 * l + 1] = zero_segment(names ? names[2 * l + 1] : NULL, width, l);
    }
    config.units_apart = o->bucket_unit || o->stage >= 2;
    config.bucket_bytes = (size_t)(o->bucket_mb * 1e6);
    if (o->bucket_mb > 0.0 && config.bucket_bytes == 0) config.bucket_bytes = 1;
    ZeroResult result = zero_layout(layout, segments, 2 * (int)o->layers, &config);
    free(segments);
    if (result.code == ZERO_OK) return result;
    if (o->bucket_unit) return zero_error(result.code, "-K unit -L %lld: %s", o->layers, result.text);
    return zero_error(result.code, "-K %g -L %lld -C %lld: %s", o->bucket_mb, o->layers, o->width,
                      result.text);
}

static void mlp_sizes(Mlp* mlp, const Options* o, int ranks) {
    mlp->options = o;
    mlp->layers = (int)o->layers;
    mlp->batches = o->total_batch ? (int)(o->total_batch / o->batch) : ranks;
    mlp->micros = (mlp->batches + ranks - 1) / ranks;
    mlp->width = (size_t)o->width;
    mlp->dtype = (ZeroDtype)o->dtype;
    mlp->row_count = (size_t)o->batch * mlp->width;
    mlp->row_stride = zero_round_up(mlp->row_count, ZERO_ALIGN_BYTES / zero_dtype_bytes(mlp->dtype));
}

static size_t data_sets(const Mlp* mlp) { return mlp->options->data == DATA_SPLIT ? 1 : (size_t)mlp->micros; }

static size_t activation_bytes(const Mlp* mlp) {
    return (2 * data_sets(mlp) + (size_t)mlp->layers + 2) * mlp->row_stride * zero_dtype_bytes(mlp->dtype) +
           WORKSPACE_BYTES + loss_bytes();
}

static ZeroConfig mlp_config(const Options* o) {
    ZeroConfig c = zero_config();
    c.stage = (int)o->stage;
    c.algorithm = (ZeroAlgorithm)o->algorithm;
    c.reduction = (ZeroReduction)o->reduction;
    c.accumulation = (ZeroAccumulation)o->accumulation;
    c.masters = (int)o->masters;
    c.overlap = (int)o->overlap;
    c.timing = o->trace ? ZERO_TIMING_ALL : ZERO_TIMING_WAITS;
    c.beta1 = o->beta1, c.beta2 = o->beta2, c.eps = o->eps;
    c.weight_decay = o->weight_decay;
    c.momentum = o->momentum;
    c.max_norm = o->max_norm;
    c.seed = (uint64_t)o->seed;
    c.timeout_s = o->limit_s;
    c.watch = zero_watchdog_watch(&watchdog);
    return c;
}

// What a rank needs beside what it asks for, as --plan assumes: CUDA's context, with the code of all libraries, on a
// data-centre GPU; and NCCL's buffers at 2 ranks and more, with the many channels of NVLink (544 MB at 2 ranks, 688 MB at
// 4 were counted on A100s, https://github.com/NVIDIA/nccl/issues/964). NCCL_MAX_NCHANNELS and NCCL_BUFFSIZE make it less.
static const double CONTEXT_MB = 500.0, NCCL_MB = 700.0;
static double outside_bytes(int ranks) { return 1e6 * (CONTEXT_MB + (ranks > 1 ? NCCL_MB : 0.0)); }

// Bytes that this rank will ask for, before anything is allocated.
static ZeroResult mlp_plan(const Mlp* mlp, int rank, ZeroPlan* plan) {
    const ZeroConfig config = mlp_config(mlp->options);
    const ZeroPlanChoice choice = zero_plan_choice(&config, rank);
    return zero_plan(plan, &mlp->layout, &choice);
}

static ZeroResult ask_device(int number, cudaDeviceProp* device, size_t* free_bytes) {
    size_t total_bytes;
    ZERO_TRY_CUDA(cudaMemGetInfo(free_bytes, &total_bytes));
    ZERO_TRY_CUDA(cudaGetDeviceProperties(device, number));
    return zero_ok();
}

// Refuses what cannot fit before anything is allocated. Collective, because ranks may share a device: what they want is
// added up, and all of them get the same answer. CUDA's context is there by now, and so is what NCCL takes at start-up. What
// it takes at the first collective is not counted: a run is not refused for an assumption.
static ZeroResult mlp_check_memory(const Mlp* mlp) {
    typedef struct Wish {
        char host[72], uuid[16];
        double wanted, free;
    } Wish;
    const ZeroWorld* world = mlp->world;
    size_t free_bytes = 0;
    cudaDeviceProp device;
    ZeroPlan plan;
    Wish mine, *all = (Wish*)calloc((size_t)world->ranks, sizeof(Wish));
    ZeroResult result = all ? mlp_plan(mlp, world->rank, &plan)
                            : zero_error(ZERO_ERROR_MEMORY, "no host memory for %d numbers", world->ranks);
    memset(&mine, 0, sizeof(mine));
    if (result.code == ZERO_OK) result = ask_device(world->device, &device, &free_bytes);
    result = zero_world_agree(mlp->world, result);
    if (result.code == ZERO_OK) {
        memcpy(mine.host, world->host, sizeof(mine.host));
        memcpy(mine.uuid, &device.uuid, sizeof(mine.uuid));
        mine.wanted = (double)zero_plan_total(&plan) + (double)activation_bytes(mlp);
        mine.free = (double)free_bytes;
        result = zero_world_gather(mlp->world, &mine, sizeof(mine), all);
    }
    for (int r = 0; r < world->ranks && result.code == ZERO_OK; r++) {
        int sharing = 0;
        double wanted = 0.0;
        for (int other = 0; other < world->ranks; other++)
            if (memcmp(&all[other], &all[r], sizeof(mine.host) + sizeof(mine.uuid)) == 0) {
                wanted += all[other].wanted;
                sharing++;
            }
        if (wanted > all[r].free)
            result = zero_error(
                ZERO_ERROR_MEMORY,
                "-L %d -C %zu -b %lld: need %.1f MB of device memory for %d of %d ranks, %.1f MB are "
                "free: lower one of them, or use more devices",
                mlp->layers, mlp->width, mlp->options->batch, 1e-6 * wanted, sharing, world->ranks,
                1e-6 * all[r].free);
    }
    free(all);
    return result;
}

static ZeroResult mlp_allocate(Mlp* mlp, void** pointer, const char* what, size_t bytes) {
    cudaError_t error = cudaMalloc(pointer, bytes);
    if (error != cudaSuccess) {
        *pointer = NULL;
        cudaGetLastError();
        return zero_error(ZERO_ERROR_MEMORY, "%s of %.1f MB: cudaMalloc: %s", what, 1e-6 * (double)bytes,
                          cudaGetErrorString(error));
    }
    zero_memory_add(&mlp->memory, ZERO_MEMORY_ACTIVATIONS, bytes);
    return zero_ok();
}

// fp32 numbers in the model's type, in place; returns their bytes.
static size_t narrow(const Mlp* mlp, float* host, size_t count) {
    if (mlp->dtype == ZERO_BF16) {
        uint16_t* half = (uint16_t*)host; // element i is written behind where it was read
        for (size_t i = 0; i < count; i++) {
            uint32_t bits;
            memcpy(&bits, &host[i], sizeof(bits));
            bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
            uint16_t rounded = (uint16_t)bits;
            memcpy(&half[i], &rounded, sizeof(rounded));
        }
    }
    return count * zero_dtype_bytes(mlp->dtype);
}

static ZeroResult write_segment(Mlp* mlp, int s, const void* host) {
    ZERO_TRY(zero_params_write(&mlp->zero, s, 0, mlp->layout.segments[s].count, host));
    ZERO_TRY_CUDA(cudaStreamSynchronize(mlp->stream));
    return zero_ok();
}

// The recipe's initial weights: seed, then weight and bias of each layer, as nn.Linear draws them on a CPU.
static ZeroResult mlp_initialise(Mlp* mlp, TorchRandom* random) {
    const double bound = torch_linear_bound(mlp->width);
    ZeroResult result = zero_ok();
    float* host = (float*)malloc(mlp->width * mlp->width * sizeof(float));
    if (!host) return zero_error(ZERO_ERROR_MEMORY, "-C %zu: no host memory for a weight", mlp->width);
    for (int s = 0; s < mlp->layout.segments_count && result.code == ZERO_OK; s++) {
        const ZeroSegment* segment = &mlp->layout.segments[s];
        torch_uniform(random, host, segment->count, bound);
        narrow(mlp, host, segment->count);
        result = write_segment(mlp, s, host);
    }
    free(host);
    return result;
}

static ZeroResult write_row(Mlp* mlp, size_t row, const void* host, size_t bytes) {
    ZERO_TRY_CUDA(
        cudaMemcpyAsync(row_at(mlp, mlp->data, row), host, bytes, cudaMemcpyHostToDevice, mlp->stream));
    ZERO_TRY_CUDA(cudaStreamSynchronize(mlp->stream));
    return zero_ok();
}

// -I recipe: every rank goes on with the model's random numbers; own: each from a seed of its own. Drawn once.
static ZeroResult mlp_draw_data(Mlp* mlp, TorchRandom* random) {
    if (mlp->options->data == DATA_SPLIT) return zero_ok();
    if (mlp->options->data == DATA_OWN) torch_seed(random, 1000u + (uint32_t)mlp->world->rank);
    ZeroResult result = zero_ok();
    float* host = (float*)malloc(mlp->row_count * sizeof(float));
    if (!host)
        return zero_error(ZERO_ERROR_MEMORY, "-b %lld: no host memory for a batch", mlp->options->batch);
    for (size_t row = 0; row < 2 * data_sets(mlp) && result.code == ZERO_OK; row++) {
        torch_normal(random, host, mlp->row_count);
        result = write_row(mlp, row, host, narrow(mlp, host, mlp->row_count));
    }
    free(host);
    return result;
}

static void mlp_free(Mlp* mlp) {
    linear_free(&mlp->linear);
    zero_free(&mlp->zero);
    cudaFree(mlp->loss);
    cudaFree(mlp->workspace);
    cudaFree(mlp->row_grads);
    cudaFree(mlp->activations);
    cudaFree(mlp->data);
    zero_layout_free(&mlp->layout);
    free(mlp->tensors);
    free(mlp->names);
    if (mlp->stream) cudaStreamDestroy(mlp->stream);
}

// The four moments of the recipe's memory table.
typedef struct PeakBytes {
    size_t params, grads, before_update, after_update;
} PeakBytes;

// Everything that needs no device: sizes and the layout.
static ZeroResult mlp_prepare(Mlp* mlp, const Options* o, ZeroWorld* world) {
    mlp_sizes(mlp, o, world->ranks);
    mlp->world = world;
    mlp->memory = zero_memory();
    mlp->names = (char(*)[24])calloc(2 * (size_t)o->layers, sizeof(mlp->names[0]));
    mlp->tensors = (ZeroTensor*)calloc(2 * (size_t)o->layers, sizeof(ZeroTensor));
    if (!mlp->names || !mlp->tensors)
        return zero_error(ZERO_ERROR_MEMORY, "-L %lld: no host memory", o->layers);
    for (int s = 0; s < 2 * mlp->layers; s++)
        mlp->tensors[s] = {mlp->names[s], s, 1, s % 2 ? 1 : 2, {mlp->width, mlp->width}};
    return mlp_layout(&mlp->layout, o, world->ranks, mlp->names);
}

static ZeroResult mlp_create(Mlp* mlp, PeakBytes* peaks) {
    const Options* o = mlp->options;
    const ZeroWorld* world = mlp->world;
    const size_t bytes = zero_dtype_bytes(mlp->dtype);
    const ZeroConfig config = mlp_config(o);
    TorchRandom random;
    ZERO_TRY_CUDA(cudaStreamCreateWithFlags(&mlp->stream, cudaStreamNonBlocking));
    ZERO_TRY(
        zero_init(&mlp->zero, &config, &mlp->layout, world->rank, world->comm, mlp->stream, &mlp->memory));
    ZERO_TRY(zero_alloc_params(&mlp->zero, NULL));
    torch_seed(&random, (uint32_t)o->seed);
    ZERO_TRY(mlp_initialise(mlp, &random));
    peaks->params = mlp->memory.peak_bytes;
    ZERO_TRY(zero_alloc_grads(&mlp->zero, NULL));
    peaks->grads = mlp->memory.peak_bytes;
    ZERO_TRY(zero_alloc_state(&mlp->zero));

    ZERO_TRY(mlp_allocate(mlp, &mlp->data, "data", 2 * data_sets(mlp) * mlp->row_stride * bytes));
    ZERO_TRY(
        mlp_allocate(mlp, &mlp->activations, "activations", (size_t)mlp->layers * mlp->row_stride * bytes));
    ZERO_TRY(mlp_allocate(mlp, &mlp->row_grads, "activation gradients", 2 * mlp->row_stride * bytes));
    ZERO_TRY(mlp_allocate(mlp, &mlp->workspace, "cuBLASLt's workspace", WORKSPACE_BYTES));
    ZERO_TRY(mlp_allocate(mlp, (void**)&mlp->loss, "loss", loss_bytes()));
    ZERO_TRY(
        linear_create(&mlp->linear, mlp->dtype, (int)o->batch, (int)o->width, mlp->workspace, mlp->stream));
    return mlp_draw_data(mlp, &random);
}

// ----------------------------------------------------------------------------- one step

// Set by SIGTERM on one rank or all; the ranks vote with each step's norm, so that all stop behind the same step.
static volatile sig_atomic_t stop_wanted = 0;

static void* layer_input(const Mlp* mlp, void* x, int l) {
    return l == 0 ? x : row_at(mlp, mlp->activations, (size_t)l - 1);
}

static ZeroResult mlp_forward(Mlp* mlp, void* x, int idle) {
    const size_t bias_offset = zero_unit_offset(&mlp->layout, 1) * zero_dtype_bytes(mlp->dtype);
    ZeroTimeline* timeline = zero_timeline(&mlp->zero);
    for (int l = 0; l < mlp->layers; l++) {
        void* weight;
        int span;
        ZERO_TRY(zero_params_acquire(&mlp->zero, l, &weight));
        ZERO_TRY(zero_span_begin(timeline, ZERO_ROW_COMPUTE, "forward", l, &span));
        if (!idle)
            ZERO_TRY(linear_forward(&mlp->linear, layer_input(mlp, x, l), weight, (char*)weight + bias_offset,
                                    row_at(mlp, mlp->activations, (size_t)l)));
        ZERO_TRY(zero_span_end(timeline, span));
        ZERO_TRY(zero_params_release(&mlp->zero, l));
    }
    return zero_ok();
}

// Begins with d loss / d output in row_grads[(layers - 1) % 2]. The input's gradient first: it needs no room for parameters'
// gradients, so it runs while those of the layer above are still being reduced.
static ZeroResult mlp_backward(Mlp* mlp, void* x, int idle) {
    const size_t bias_offset = zero_unit_offset(&mlp->layout, 1) * zero_dtype_bytes(mlp->dtype);
    ZeroTimeline* timeline = zero_timeline(&mlp->zero);
    for (int l = mlp->layers - 1; l >= 0; l--) {
        void *weight, *weight_grad, *y_grad = row_at(mlp, mlp->row_grads, (size_t)l % 2);
        int add, span;
        if (l > 0) {
            ZERO_TRY(zero_params_acquire(&mlp->zero, l, &weight));
            ZERO_TRY(zero_span_begin(timeline, ZERO_ROW_COMPUTE, "backward", l, &span));
            if (!idle)
                ZERO_TRY(linear_backward_input(&mlp->linear, weight, y_grad,
                                               row_at(mlp, mlp->row_grads, (size_t)(l - 1) % 2)));
            ZERO_TRY(zero_span_end(timeline, span));
            ZERO_TRY(zero_params_release(&mlp->zero, l));
        }
        ZERO_TRY(zero_grads_acquire(&mlp->zero, l, &weight_grad, &add));
        ZERO_TRY(zero_span_begin(timeline, ZERO_ROW_COMPUTE, "backward", l, &span));
        if (!idle)
            ZERO_TRY(linear_backward_params(&mlp->linear, layer_input(mlp, x, l), y_grad, weight_grad,
                                            (char*)weight_grad + bias_offset, add));
        ZERO_TRY(zero_span_end(timeline, span));
        ZERO_TRY(zero_grads_ready(&mlp->zero, l));
    }
    return zero_ok();
}

// Global micro-batch micro * ranks + rank. A rank for which there is none (idle) makes the same calls without computing.
static ZeroResult mlp_micro_step(Mlp* mlp, int micro) {
    const Options* o = mlp->options;
    const size_t set = o->data == DATA_SPLIT ? 0 : (size_t)micro;
    void *x = row_at(mlp, mlp->data, 2 * set), *y = row_at(mlp, mlp->data, 2 * set + 1);
    int idle;
    ZERO_TRY(zero_begin_batches(&mlp->zero, micro, mlp->batches, 1.0, &idle));
    if (o->data == DATA_SPLIT && !idle) {
        const long long batches_before = (long long)micro * mlp->world->ranks + mlp->world->rank;
        const long long first = mlp->samples_done + batches_before * o->batch;
        ZERO_TRY(data_split(mlp->dtype, x, y, (int)o->batch, (int)o->width, (uint64_t)o->seed,
                            (uint64_t)first, mlp->stream));
    }
    ZERO_TRY(mlp_forward(mlp, x, idle));
    if (!idle)
        ZERO_TRY(loss_run(mlp->dtype, row_at(mlp, mlp->activations, (size_t)mlp->layers - 1), y,
                          row_at(mlp, mlp->row_grads, (size_t)(mlp->layers - 1) % 2), mlp->row_count,
                          mlp->loss, mlp->stream));
    ZERO_TRY(zero_add_loss(&mlp->zero, mlp->loss));
    return mlp_backward(mlp, x, idle);
}

// One step: forward and backward of each micro-step, norm, update.
static ZeroResult mlp_step(Mlp* mlp, ZeroReport* report, PeakBytes* peaks) {
    for (int micro = 0; micro < mlp->micros; micro++) ZERO_TRY(mlp_micro_step(mlp, micro));
    peaks->before_update = mlp->memory.peak_bytes;
    zero_vote(&mlp->zero, stop_wanted);
    ZERO_TRY(zero_grad_norm(&mlp->zero, NULL));
    ZERO_TRY(zero_update(&mlp->zero, mlp->options->lr));
    peaks->after_update = mlp->memory.peak_bytes;
    // The log wants the norm. This wait also sees a peer that died; it is not for the gathers, which run on under the
    // next forward.
    ZERO_TRY(zero_report(&mlp->zero, report));
    mlp->steps_done++;
    mlp->samples_done += (long long)mlp->batches * mlp->options->batch;
    return zero_ok();
}

// ----------------------------------------------------------------------------- the run

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e3 * (double)now.tv_sec + 1e-6 * (double)now.tv_nsec;
}

static ZeroCheckpoint mlp_checkpoint(const Mlp* mlp, ZeroString* data) {
    ZeroCheckpoint what = zero_checkpoint();
    data->key = "data";
    data->value = mlp->options->data == DATA_SPLIT ? "split"
                  : mlp->options->data == DATA_OWN ? "own"
                                                   : "recipe";
    what.tensors = mlp->tensors;
    what.tensors_count = mlp->layout.segments_count;
    what.strings = data;
    what.strings_count = 1;
    what.step = (uint64_t)mlp->steps_done;
    what.samples = (uint64_t)mlp->samples_done;
    what.read_back = (int)mlp->options->read_back;
    return what;
}

// What all ranks have agreed on needs no hard end, whatever its code was.
static ZeroResult agreed(ZeroResult result) {
    if (result.code == ZERO_ERROR_SYSTEM || result.code == ZERO_ERROR_MEMORY) result.code = ZERO_ERROR_FILE;
    return result;
}

// Who wrote a file and when stands here: the file itself has the same bytes whoever wrote it.
static void print_saved(const Mlp* mlp, const char* path, double seconds) {
    const time_t now = time(NULL);
    struct tm utc;
    char date[32] = "";
    if (gmtime_r(&now, &utc)) strftime(date, sizeof(date), "%Y-%m-%d %H:%M:%S UTC", &utc);
    printf("saved %s in %.2f s (%d ranks, stage %lld, llmc_zero %d.%d.%d, %s)\n", path, seconds,
           mlp->world->ranks, mlp->options->stage, LLMC_ZERO_VERSION / 10000, LLMC_ZERO_VERSION / 100 % 100,
           LLMC_ZERO_VERSION % 100, date);
}

static ZeroResult save_checkpoint(Mlp* mlp, Report* report) {
    const Options* o = mlp->options;
    const double start_ms = now_ms();
    char path[4096];
    ZeroString data;
    const ZeroCheckpoint what = mlp_checkpoint(mlp, &data);
    ZERO_TRY(agreed(zero_agree(&mlp->zero, report_sync(report))));
    ZERO_TRY(zero_checkpoint_path(path, sizeof(path), report_place(report), what.step));
    ZERO_TRY(agreed(zero_checkpoint_save(&mlp->zero, path, &what)));
    if (mlp->world->rank != 0) return zero_ok();
    ZERO_TRY(zero_checkpoint_path(path, sizeof(path), o->directory, what.step));
    print_saved(mlp, path, 1e-3 * (now_ms() - start_ms));
    ZeroResult deleted =
        zero_checkpoint_rotate(report_place(report), (uint64_t)o->checkpoint_keep, what.step);
    if (deleted.code != ZERO_OK) printf("warning: -nk %lld: %s\n", o->checkpoint_keep, deleted.text);
    fflush(stdout);
    return zero_ok();
}

// -y 1: goes on behind the newest checkpoint that is whole.
static ZeroResult resume(Mlp* mlp) {
    const Options* o = mlp->options;
    std::vector<std::string> passed_over;
    int found = 0;
    ZeroString data;
    ZeroCheckpoint what = mlp_checkpoint(mlp, &data);
    if (!o->resume) return zero_ok();
    zero_watchdog_at(&watchdog, "load");
    ZeroResult result = zero_checkpoint_resume(&mlp->zero, o->directory, &what, NULL, &passed_over, &found);
    for (size_t i = 0; i < passed_over.size() && mlp->world->rank == 0; i++)
        printf("passed over: %s\n", passed_over[i].c_str());
    if (result.code != ZERO_OK) return agreed(zero_error(result.code, "-y 1: %s", result.text));
    mlp->steps_done = (long long)what.step;
    mlp->samples_done = (long long)what.samples;
    if (mlp->world->rank != 0) return result;
    if (found)
        printf("resumed from step %llu in %s%s%s\n", (unsigned long long)what.step, o->directory,
               what.note[0] ? ": " : "", what.note);
    else
        printf("no checkpoint in %s: starting anew\n", o->directory);
    if (mlp->steps_done >= o->steps) printf("nothing is left to do: -x %lld\n", o->steps);
    return result;
}

// Before the first step: could the first checkpoint be saved?
static ZeroResult check_saves(Mlp* mlp) {
    const Options* o = mlp->options;
    const long long every = o->checkpoint_every;
    long long first = every ? (mlp->steps_done / every + 1) * every : 0;
    char path[4096];
    ZeroString data;
    ZeroCheckpoint what = mlp_checkpoint(mlp, &data);
    if (!every || mlp->steps_done >= o->steps) return zero_ok();
    if (first > o->steps) first = o->steps;
    zero_watchdog_at(&watchdog, "check of saves");
    what.step = (uint64_t)first;
    ZeroResult result = zero_checkpoint_path(path, sizeof(path), o->directory, what.step);
    if (result.code == ZERO_OK) result = zero_checkpoint_check(&mlp->zero, path, &what);
    if (result.code == ZERO_OK) return result;
    return agreed(zero_error(result.code, "-o %.60s -n %lld: %s", o->directory, every, result.text));
}

static ZeroResult train_steps(Mlp* mlp, Report* report, PeakBytes* peaks, ZeroReport* last) {
    const Options* o = mlp->options;
    int stop = 0;
    ZERO_TRY(zero_report(&mlp->zero, last)); // of the steps before a resume
    while (mlp->steps_done < o->steps && !stop) {
        const double start_ms = now_ms();
        zero_watchdog_step(&watchdog, mlp->steps_done + 1);
        ZERO_TRY(mlp_step(mlp, last, peaks));
        const long long step = mlp->steps_done;
        stop = last->votes > 0;
        ZERO_TRY(report_step(report, step, last->loss_sum / mlp->batches, last, now_ms() - start_ms));
        if (o->hash_every && step % o->hash_every == 0) ZERO_TRY(zero_check_replicas(&mlp->zero, NULL));
        if (o->checkpoint_every && (step % o->checkpoint_every == 0 || step == o->steps || stop))
            ZERO_TRY(save_checkpoint(mlp, report));
    }
    if (stop && mlp->world->rank == 0)
        printf("stopped by a signal after step %lld of %lld, which is saved: -y 1 resumes\n", mlp->steps_done,
               o->steps);
    return zero_ok();
}

// -T FILE: can it be written? Known before the run, not behind it.
static ZeroResult open_trace(const Options* o, int writes) {
    FILE* file = o->trace && writes ? fopen(o->trace, "w") : NULL;
    if (!o->trace || !writes || (file && fclose(file) == 0)) return zero_ok();
    return zero_error(ZERO_ERROR_FILE, "-T %.160s: cannot write it: %s", o->trace, strerror(errno));
}

// -T FILE: one file for all ranks, each of which appends its events in turn.
static ZeroResult write_trace(Mlp* mlp) {
    const Options* o = mlp->options;
    const ZeroWorld* world = mlp->world;
    ZeroTimeline* timeline = zero_timeline(&mlp->zero);
    if (!o->trace) return zero_ok();
    zero_watchdog_at(&watchdog, "trace");
    ZERO_TRY(zero_comm_drain(&mlp->zero.comm));
    ZERO_TRY(zero_timeline_drain(timeline));
    const double mine = zero_timeline_first_us(timeline);
    double* all = (double*)malloc((size_t)world->ranks * sizeof(double));
    if (!all) return zero_error(ZERO_ERROR_MEMORY, "no host memory for %d numbers", world->ranks);
    ZeroResult result = zero_world_gather(mlp->world, &mine, sizeof(mine), all);
    double start_us = mine;
    for (int r = 0; r < world->ranks && result.code == ZERO_OK; r++)
        if (all[r] < start_us) start_us = all[r];
    free(all);
    for (int r = 0; r < world->ranks && result.code == ZERO_OK; r++) {
        if (r == world->rank) {
            errno = 0;
            FILE* file = fopen(o->trace, r == 0 ? "w" : "a");
            int written = file != NULL;
            if (file) {
                if (r == 0) fprintf(file, "{\"traceEvents\":[\n");
                written = zero_timeline_write(timeline, file, r, start_us);
                if (r == world->ranks - 1) fprintf(file, "\n],\"displayTimeUnit\":\"ms\"}\n");
                if (fclose(file) != 0) written = 0;
            }
            if (!written)
                result =
                    zero_error(ZERO_ERROR_FILE, "-T %.160s: cannot write it: %s", o->trace, strerror(errno));
        }
        result = zero_world_agree(mlp->world, result);
    }
    return result;
}

// Sums and hashes of the params and the state; ranks that differ are an error.
static ZeroResult compare_ranks(Mlp* mlp, ParamsDigest* digest) {
    ZERO_TRY(params_sums(digest, &mlp->zero, mlp->width));
    return zero_run_hash(&mlp->zero, &digest->hash, &digest->run);
}

static void print_result(const Mlp* mlp, const PeakBytes* peaks, const ParamsDigest* digest,
                         const ZeroReport* last) {
    printf("peak memory, MB: parameters %.1f | gradients %.1f | before the update %.1f | after the update "
           "%.1f\n",
           1e-6 * (double)peaks->params, 1e-6 * (double)peaks->grads, 1e-6 * (double)peaks->before_update,
           1e-6 * (double)peaks->after_update);
    printf("optimizer state, MB per rank: %.3f (stage %lld, %d ranks)\n",
           1e-6 * (double)mlp->memory.held_bytes[ZERO_MEMORY_STATE], mlp->options->stage, mlp->world->ranks);
    if (last->skipped) printf("skipped steps: %llu\n", (unsigned long long)last->skipped);
    printf("params sum is: %.10f\n", digest->sum);
    printf("plain sum of the parameters: %.10f\n", digest->plain_sum);
    printf("params hash: %016llx (the same on %d rank%s)\n", (unsigned long long)digest->hash,
           mlp->world->ranks, mlp->world->ranks == 1 ? "" : "s");
    printf("run hash: %016llx (parameters, optimizer state and updates)\n", (unsigned long long)digest->run);
}

static void print_header(const Mlp* mlp) {
    const Options* o = mlp->options;
    printf("train_mlp: %d x Linear(%zu, %zu), %zu parameters, %s%s, %s, stage %lld, %d ranks, batch %lld x "
           "%d micro-steps, "
           "%d buckets\n",
           mlp->layers, mlp->width, mlp->width, zero_model_count(&mlp->layout), zero_dtype_name(mlp->dtype),
           mlp->dtype == ZERO_BF16 ? (o->masters ? " with fp32 masters" : " with stochastic rounding") : "",
           o->algorithm == ZERO_ADAMW  ? "AdamW"
           : o->algorithm == ZERO_ADAM ? "Adam"
                                       : "SGD",
           o->stage, mlp->world->ranks, o->batch, mlp->micros, mlp->layout.buckets_count);
    if (mlp->dtype == ZERO_BF16 && mlp->micros > 1 && !mlp->zero.schedule.micro)
        printf("warning: gradients of %d micro-steps add up in bf16 (8 bits): small ones are lost beside "
               "large sums\n",
               mlp->micros);
}

// Everything between start-up and end; every rank calls it with the same options. What every rank can see returns on
// every rank alike; *fatal tells that the ranks are out of step (a collective failed) and must be ended together.
static ZeroResult train(ZeroWorld* world, const Options* o, int* fatal) {
    Mlp mlp;
    Report report;
    PeakBytes peaks;
    ParamsDigest digest;
    ZeroReport last;
    memset(&last, 0, sizeof(last));
    *fatal = 0;
    memset(&mlp, 0, sizeof(mlp));
    ZeroResult result = report_open(&report, o, world->rank == 0);
    if (result.code == ZERO_OK) result = open_trace(o, world->rank == 0);
    if (result.code == ZERO_OK) result = mlp_prepare(&mlp, o, world);
    result = zero_world_agree(world, result);
    if (result.code == ZERO_OK) result = mlp_check_memory(&mlp);
    if (result.code == ZERO_OK) result = zero_world_agree(world, mlp_create(&mlp, &peaks));
    if (result.code == ZERO_OK) {
        if (world->rank == 0) print_header(&mlp);
        result = resume(&mlp);
        if (result.code == ZERO_OK) result = check_saves(&mlp);
        if (result.code != ZERO_ERROR_NCCL && result.code != ZERO_ERROR_CUDA)
            result = zero_world_agree(world, result.code ? result : report_begin(&report, mlp.steps_done));
        else
            *fatal = 1;
        if (*fatal) return result;
    }
    if (result.code == ZERO_OK) {
        result = train_steps(&mlp, &report, &peaks, &last);
        if (result.code == ZERO_OK) result = write_trace(&mlp);
        if (result.code == ZERO_OK) result = compare_ranks(&mlp, &digest);
        *fatal = result.code == ZERO_ERROR_NCCL || result.code == ZERO_ERROR_CUDA ||
                 result.code == ZERO_ERROR_SYSTEM || result.code == ZERO_ERROR_MEMORY;
        if (*fatal) return result; // a stream may wait for a peer for ever: nothing is freed
        if (result.code == ZERO_OK && world->rank == 0) {
            print_result(&mlp, &peaks, &digest, &last);
            const Summary summary = {world->ranks, mlp.steps_done, last.skipped,
                                     &digest,      &peaks.params,  mlp.memory.held_bytes[ZERO_MEMORY_STATE]};
            result = report_close(&report, &summary);
        }
        if (result.code == ZERO_OK && !(digest.sum - digest.sum == 0.0))
            result = zero_error(ZERO_ERROR_ARGUMENT,
                                "-l %g -c %g: parameters are not finite at the end: lower them", o->lr,
                                o->weight_decay);
        result = zero_world_agree(world, result);
    }
    report_free(&report);
    mlp_free(&mlp);
    return result;
}

// Bytes of rank 0 with so many layers, with activations and what lies outside; the plan alone goes to *plan.
static ZeroResult plan_layers(const Options* given, long long layers, int ranks, char (*names)[24],
                              ZeroPlan* plan, double* bytes) {
    Options o = *given;
    Mlp mlp;
    o.layers = layers;
    memset(&mlp, 0, sizeof(mlp));
    mlp_sizes(&mlp, &o, ranks);
    ZeroResult result = mlp_layout(&mlp.layout, &o, ranks, names);
    if (result.code == ZERO_OK) result = mlp_plan(&mlp, 0, plan);
    if (result.code == ZERO_OK)
        *bytes = (double)zero_plan_total(plan) + (double)activation_bytes(&mlp) + outside_bytes(ranks);
    zero_layout_free(&mlp.layout);
    return result;
}

// Whether so many layers fit. What cannot be laid out at all (too many buckets, too many elements) does not.
static ZeroResult plan_fits(const Options* o, int ranks, long long layers, int* fits, double* bytes) {
    ZeroPlan plan;
    ZeroResult result = plan_layers(o, layers, ranks, NULL, &plan, bytes);
    *fits = result.code == ZERO_OK && *bytes <= 1e6 * o->device_mb;
    return result.code == ZERO_ERROR_ARGUMENT ? zero_ok() : result;
}

// The most layers whose buckets are not too many.
static long long plan_most_layers(const Options* o, int ranks) {
    const size_t bytes = zero_dtype_bytes((ZeroDtype)o->dtype), width = (size_t)o->width;
    const size_t align = ZERO_ALIGN_BYTES;
    const size_t quantum = (size_t)ranks * align;
    const size_t layer = zero_round_up(width * width * bytes, align) + zero_round_up(width * bytes, align);
    const int apart = o->stage >= 2 || o->bucket_unit;
    double bucket = floor(o->bucket_mb * 1e6 / (double)quantum) * (double)quantum, most = 1e6;
    if (o->bucket_mb > 0.0 && bucket < (double)quantum) bucket = (double)quantum;
    if (o->bucket_mb > 0.0 && !apart) most = ZERO_BUCKETS_MAX * bucket / (double)layer;
    if (apart) most = ZERO_BUCKETS_MAX;
    if (o->bucket_mb > 0.0 && apart) most /= ceil((double)zero_round_up(layer, quantum) / bucket);
    return most < 1e6 ? (long long)most : 1000000;
}

// The most layers that fit: bytes are nearly a straight line in the layers, so that two points give a guess, and a search
// from there the answer: steps that double, always between what fits and what does not.
static ZeroResult plan_largest(const Options* o, int ranks, long long* largest) {
    const long long few = 4, many = 68, limit = plan_most_layers(o, ranks), exact = 30000;
    long long fit = 0, too_many = limit + 1, at = few, stride = 1;
    double at_few = 0.0, at_many = 0.0, bytes = 0.0;
    int fits;
    ZERO_TRY(plan_fits(o, ranks, few, &fits, &at_few));
    if (fits) ZERO_TRY(plan_fits(o, ranks, many, &fits, &at_many));
    if (at_many > at_few) {
        const double guess =
            (double)few + (1e6 * o->device_mb - at_few) / ((at_many - at_few) / (double)(many - few));
        at = guess > (double)limit ? limit : (long long)guess;
    }
    if (at > exact) { // a guess has to do
        *largest = at;
        return zero_ok();
    }
    while (too_many - fit > 1) {
        if (at <= fit || at >= too_many) at = fit + (too_many - fit) / 2;
        ZERO_TRY(plan_fits(o, ranks, at, &fits, &bytes));
        if (fits)
            fit = at, at += stride;
        else
            too_many = at, at -= stride;
        stride *= 2;
    }
    *largest = fit;
    return zero_ok();
}

// Powers of two, and between them the number of ranks of this run.
static int plan_next_ranks(int ranks, int ranks_now) {
    int power = 1;
    while (power <= ranks) power *= 2;
    return ranks < ranks_now && ranks_now < power ? ranks_now : power;
}

static void print_plan_head(const Options* o) {
    printf(
        "MB (1e6 bytes) on rank 0, %lld x Linear(%lld, %lld), %s; outside: assumed for CUDA's context (%g) "
        "and, at 2 ranks and more, NCCL's buffers (%g); total: with it and activations of -b %lld; "
        "largest: the most layers that %g MB hold\n",
        o->layers, o->width, o->width, zero_dtype_name((ZeroDtype)o->dtype), CONTEXT_MB, NCCL_MB, o->batch,
        o->device_mb);
    printf("%5s %6s %11s %11s %11s %11s %8s %11s %10s\n", "stage", "ranks", "params", "gradients", "state",
           "scratch", "outside", "total", "largest -L");
}

static void print_plan_row(int stage, int ranks, const ZeroPlan* plan, double bytes, long long largest) {
    printf("%5d %6d %11.3f %11.3f %11.3f %11.3f %8.0f %11.3f %10lld", stage, ranks,
           1e-6 * (double)plan->params_bytes, 1e-6 * (double)plan->grads_bytes,
           1e-6 * (double)plan->state_bytes, 1e-6 * (double)plan->scratch_bytes, 1e-6 * outside_bytes(ranks),
           1e-6 * bytes, largest);
}

// --plan: what each rank would hold, for stages and numbers of ranks. names: room for those of all segments.
static ZeroResult print_plan(const Options* given, int ranks_now, char (*names)[24]) {
    Options o = *given;
    print_plan_head(&o);
    for (int stage = 0; stage <= 3; stage++)
        for (int ranks = 1; ranks <= 1024; ranks = plan_next_ranks(ranks, ranks_now)) {
            ZeroPlan plan;
            double bytes = 0.0;
            long long largest = 0;
            o.stage = stage;
            if (o.reduction == ZERO_REDUCE_ALLREDUCE && stage > 0) o.reduction = ZERO_REDUCE_NCCL;
            ZERO_TRY(plan_largest(&o, ranks, &largest));
            ZeroResult result = plan_layers(&o, o.layers, ranks, names, &plan, &bytes);
            if (result.code == ZERO_ERROR_ARGUMENT) { // of this stage and so many ranks only
                printf("%5d %6d %s; largest -L %lld\n", stage, ranks, result.text, largest);
                continue;
            }
            ZERO_TRY(result);
            print_plan_row(stage, ranks, &plan, bytes, largest);
            printf("%s\n", stage == given->stage && ranks == ranks_now ? "  <- this run" : "");
        }
    return zero_ok();
}

// ----------------------------------------------------------------------------- main

#ifndef TRAIN_MLP_NO_MAIN

// What start-up must know before the ranks can talk: only the -p flags. A flag without a value is found later.
static ZeroWorldConfig world_config(const Options* o) {
    ZeroWorldConfig config;
    memset(&config, 0, sizeof(config));
    config.method = o->start_method;
    config.fs_path = o->start_path;
    config.ranks = (int)o->start_ranks;
    config.rank = (int)o->start_rank;
    config.gpus_per_node = (int)o->gpus_per_node;
    config.timeout_s = o->limit_s;
    return config;
}

// Ranks that were started with different flags would train different models, or wait for each other for ever.
static ZeroResult compare_options(ZeroWorld* world, const Options* o) {
    Options mine = options_comparable(o), *all = (Options*)calloc((size_t)world->ranks, sizeof(Options));
    ZeroResult result =
        all ? zero_world_gather(world, &mine, sizeof(mine), all)
            : zero_error(ZERO_ERROR_MEMORY, "no host memory for %d sets of flags", world->ranks);
    for (int r = 1; r < world->ranks && result.code == ZERO_OK; r++) {
        const char* flag = options_difference(&all[0], &all[r]);
        if (flag)
            result = zero_error(ZERO_ERROR_ARGUMENT,
                                "%s: rank %d was started with another value than rank 0; all ranks "
                                "need the same flags",
                                flag, r);
    }
    free(all);
    return result;
}

// An error of start-up in terms of the flags that ask for it.
static ZeroResult name_start_flags(ZeroResult result, const Options* o) {
    if (result.code == ZERO_OK) return result;
    if (o->start_method && strcmp(o->start_method, "fs") == 0)
        return zero_error(result.code, "-pi fs -pf %.60s -pn %lld -pr %lld: %s", o->start_path,
                          o->start_ranks, o->start_rank, result.text);
    if (o->gpus_per_node > 0) return zero_error(result.code, "-pg %lld: %s", o->gpus_per_node, result.text);
    return result;
}

static ZeroResult run(ZeroWorld* world, const Options* o, ZeroResult parsed, int* fatal) {
    if (parsed.code == ZERO_OK && !o->help) parsed = options_check(o, world->ranks);
    ZERO_TRY(zero_world_agree(world, parsed));
    ZERO_TRY(compare_options(world, o));
    if (o->help || o->plan) {
        ZeroResult result = zero_ok();
        if (world->rank == 0 && o->help)
            options_help(stdout);
        else if (world->rank == 0) {
            char(*names)[24] = (char(*)[24])calloc(2 * (size_t)o->layers, sizeof(names[0]));
            result = names ? print_plan(o, world->ranks, names)
                           : zero_error(ZERO_ERROR_MEMORY, "-L %lld: no host memory", o->layers);
            free(names);
        }
        return zero_world_agree(world, result);
    }
    zero_watchdog_at(&watchdog, "ncclCommInitRank");
    ZeroResult result = name_start_flags(zero_world_device(world), o);
    zero_watchdog_comm(&watchdog, world->comm);
    zero_watchdog_at(&watchdog, "set-up");
    *fatal = world->broken;
    return result.code == ZERO_OK ? train(world, o, fatal) : result;
}

// One line, whatever was typed.
static void make_one_line(ZeroResult* result) {
    for (char* c = result->text; *c; c++)
        if ((unsigned char)*c < ' ') *c = '?';
}

static void print_error(ZeroResult result) {
    make_one_line(&result);
    fprintf(stderr, "train_mlp: %s\n", result.text);
}

// The one way out: word for the others first, then hard, for nothing may wait for the device. Also in the watchdog's thread.
static void end_run(void* world, const char* line) {
    const ssize_t written = write(2, line, strlen(line));
    (void)written;
    zero_world_abort((const ZeroWorld*)world, 1);
    _exit(1);
}

// A fatal error of this rank, perhaps of this rank alone.
static void give_up(ZeroWorld* world, ZeroResult result) {
    char line[512];
    while (!zero_watchdog_claim(&watchdog)) pause(); // it is ending us
    make_one_line(&result);
    zero_watchdog_line(&watchdog, result.text, line, sizeof(line));
    end_run(world, line);
}

// TERM, INT and USR1 (a job's time is up) end the run behind the current step, if that can be saved. A second TERM or INT
// ends it at once.
static void on_stop(int number) {
    if (stop_wanted && number != SIGUSR1) {
        static const char line[] = "train_mlp: a second signal: ending at once, without a save\n";
        const ssize_t written = write(2, line, sizeof(line) - 1);
        (void)written;
        _exit(128 + number);
    }
    stop_wanted = 1;
}

static void set_signals(const Options* o) {
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_handler = on_stop;
    action.sa_flags = SA_RESTART;
    if (!o->checkpoint_every) return;
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
}

// A file that may not grow (ulimit -f) is an error of the write, a reader that goes away (| head) none at all. Standard
// descriptors that the caller has closed lead nowhere; else the next file that is opened would be one of them.
static void set_process(void) {
    int fd;
    signal(SIGXFSZ, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    while ((fd = open("/dev/null", O_RDWR)) >= 0 && fd <= 2) {
    }
    if (fd > 2) close(fd);
}

int main(int argc, char** argv) {
    Options options;
    ZeroWorld world;
    int fatal = 0;
    set_process();
    memset(&world, 0, sizeof(world));
    ZeroResult parsed = options_parse(&options, argc, argv);
    if (options_check_start(&options).code !=
        ZERO_OK) { // said below, once, by ranks that MPI may have started
        const Options defaults = options_default();
        options.start_method = defaults.start_method;
    }
    const ZeroWatchdogConfig watch = {"train_mlp", options.limit_s, zero_world_peer_gone,
                                      &world,      end_run,         &world};
    ZeroWorldConfig config = world_config(&options);
    ZeroResult result = zero_watchdog_start(&watchdog, &watch);
    if (result.code == ZERO_OK) result = zero_world_start(&world, &config, &argc, &argv);
    if (result.code != ZERO_OK) {
        print_error(parsed.code != ZERO_OK ? parsed : name_start_flags(result, &options));
        zero_world_abort(&world, 1);
        _exit(1);
    }
    zero_watchdog_rank(&watchdog, world.rank);
    set_signals(&options);
    result = run(&world, &options, parsed, &fatal);
    if (fflush(stdout) != 0 && errno != EPIPE && result.code == ZERO_OK)
        result = zero_error(ZERO_ERROR_SYSTEM, "writing to standard output: %s", strerror(errno));
    if (fatal || world.broken) give_up(&world, result);
    if (result.code != ZERO_OK && world.rank == 0) print_error(result);
    zero_watchdog_at(&watchdog, "end");
    zero_watchdog_leave(&watchdog);
    zero_world_finish(&world);
    zero_watchdog_stop(&watchdog);
    return result.code != ZERO_OK;
}

#endif
