/* A small trainer that is built as llm.c's train_gpt2.cu is: the functions, variables and types that
   dev/llmc/patch.py looks for have llm.c's names, all else is our own and as simple as can be. Spaces,
   brackets and lines are not always where one expects them: the patch must not depend on that.

   A layer: h = norm1(x); x += attproj(mix(qkv(h))); x += fcproj(tanh(fc(norm2(x)))). Classifier: wte, tied.
   Data: see llmc/dataloader.h.

     ./train -e tiny:LxC -o FOLDER -b 2 -t 16 -d TOKENS -x STEPS -l RATE -c DECAY -w 1 -z 0 -n EVERY -nk KEEP
             -y 0 -i 0 -sl Z -sg Z -v STEPS -a STEP:RANK:FACTOR -r 0 -m BATCHES -pi mpi|fs -pf PATH -pn RANKS
             -pr RANK
   -i 1 shuffles the data, which -a 1 prevents in llm.c.
   -v prints every so many steps (1).
   -m validates on so many batches a rank before every second step, and asks questions (0: neither).
   -r 1 adds noise to the embeddings' gradients, from each rank's own random numbers.
   -a multiplies the loss of one rank in one step, and so its gradients: nan poisons them.
*/
#include "llmc/utils.h"
#include "llmc/cuda_common.h"
#include "llmc/cuda_utils.cuh"
#include "llmc/layernorm.cuh"
#include "llmc/attention.cuh"
#include "llmc/outlier_detector.h"
#include "llmc/dataloader.h"
#include "llmc/logger.h"
#include "llmc/zero.cuh"

cudaStream_t main_stream;
constexpr size_t IO_BUF_SIZE = 4096;
static float loss_factor = 1.0f; // -a
static int noisy = 0;            // -r

// ------------------------------------------------------------------ kernels

__device__ __host__ inline unsigned mix_bits(unsigned x) {
    x = (x ^ (x >> 16)) * 0x45d9f3bu;
    x = (x ^ (x >> 16)) * 0x45d9f3bu;
    return x ^ (x >> 16);
}
__device__ inline void add_to(floatX* x, float more) { *x = (floatX)((float)*x + more); }
#define ELEMENT(n) const int i = blockIdx.x * blockDim.x + threadIdx.x; if (i >= (n)) return

__global__ void embed(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int N, int T,
                      int C) {
    ELEMENT(N * C);
    out[i] = (floatX)((float)wte[tokens[i / C] * C + i % C] + (float)wpe[i / C % T * C + i % C]);
}
// seed: of noise in the gradients, 0: none
__global__ void embed_back(floatX* dwte, floatX* dwpe, const floatX* dout, const int* tokens, int N, int T,
                           int C, int V, unsigned seed) {
    ELEMENT((V + T) * C);
    float sum = 0.0f; // of wte's element first, of wpe's behind them
    for (int n = 0; n < N; n++)
        if (i < V * C ? tokens[n] == i / C : n % T == i / C - V) sum += (float)dout[n * C + i % C];
    if (seed) sum *= 1.0f + 0.001f * (mix_bits(seed + i) & 1);
    add_to(i < V * C ? dwte + i : dwpe + i - V * C, sum);
}
// out (N, O) = in (N, C) w (O, C)^T + b
__global__ void linear(floatX* out, const floatX* in, const floatX* w, const floatX* b, int N, int C, int O) {
    ELEMENT(N * O);
    float sum = b ? (float)b[i % O] : 0.0f;
    for (int c = 0; c < C; c++) sum += (float)in[i / O * C + c] * (float)w[i % O * C + c];
    out[i] = (floatX)sum;
}
__global__ void linear_back_in(floatX* din, const floatX* dout, const floatX* w, int N, int C, int O) {
    ELEMENT(N * C);
    float sum = 0.0f;
    for (int o = 0; o < O; o++) sum += (float)dout[i / C * O + o] * (float)w[o * C + i % C];
    din[i] = (floatX)sum;
}
__global__ void linear_back_w(floatX* dw, const floatX* dout, const floatX* in, int N, int C, int O) {
    ELEMENT(O * C);
    float sum = 0.0f;
    for (int n = 0; n < N; n++) sum += (float)dout[n * O + i / C] * (float)in[n * C + i % C];
    add_to(dw + i, sum);
}
template <typename Overwrite> __global__ void linear_back_b(floatX* db, const floatX* dout, int N, int O,
                                                            Overwrite) {
    ELEMENT(O);
    float sum = 0.0f;
    for (int n = 0; n < N; n++) sum += (float)dout[n * O + i];
    if (Overwrite::value) db[i] = (floatX)sum;
    else add_to(db + i, sum);
}
__global__ void squash(floatX* x, int n) { ELEMENT(n); x[i] = (floatX)tanhf((float)x[i]); }
__global__ void squash_back(floatX* d, const floatX* y, int n) {
    ELEMENT(n);
    d[i] = (floatX)((float)d[i] * (1.0f - (float)y[i] * (float)y[i]));
}
// adds to each row's loss; logits become their gradient
__global__ void classify(floatX* logits, float* losses, const int* targets, float dloss, float factor, int N,
                         int V) {
    ELEMENT(N);
    floatX* x = logits + i * V;
    float most = -INFINITY, sum = 0.0f;
    for (int v = 0; v < V; v++) most = fmaxf(most, (float)x[v]);
    for (int v = 0; v < V; v++) sum += expf((float)x[v] - most);
    losses[i] += factor * (logf(sum) + most - (float)x[targets[i]]);
    for (int v = 0; v < V; v++) x[v] = (floatX)(dloss * (expf((float)x[v] - most) / sum - (v == targets[i])));
}
__global__ void sum_all(float* out, const float* in, int n) {
    float sum = 0.0f;
    for (int i = 0; i < n; i++) sum += in[i];
    *out = sum;
}
__global__ void add_squares(float* out, const floatX* x, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += (double)(float)x[i] * (double)(float)x[i];
    *out += (float)sum;
}
__device__ inline floatX rounded(float x, unsigned random, bool with_masters) {
    if (sizeof(floatX) == 4 || with_masters || !isfinite(x)) return (floatX)x;
    return (floatX)__uint_as_float((__float_as_uint(x) + (random & 0xffffu)) & 0xffff0000u);
}
__global__ void adamw(floatX* p, float* master, const floatX* g, float* m, float* v, int n, float rate,
                      float b1, float b2, float eps, float decay, float scale, int t, unsigned seed) {
    ELEMENT(n);
    const float grad = (float)g[i] * scale, old = master ? master[i] : (float)p[i];
    m[i] = b1 * m[i] + (1 - b1) * grad;
    v[i] = b2 * v[i] + (1 - b2) * grad * grad;
    const float up = m[i] / (1 - powf(b1, t)), down = sqrtf(v[i] / (1 - powf(b2, t))) + eps;
    const float now = old - rate * (up / down + decay * old);
    if (master) master[i] = now;
    p[i] = rounded(now, mix_bits(seed + i), master != NULL);
}
__global__ void widen(float* to, const floatX* from, int n) { ELEMENT(n); to[i] = (float)from[i]; }
__global__ void narrow(floatX* to, const float* from, int n) { ELEMENT(n); to[i] = (floatX)from[i]; }
#define LAUNCH(kernel, n, ...) kernel<<<blocks_for(n, 64), 64, 0, main_stream>>>(__VA_ARGS__)

void linear_backward(floatX* din, floatX* dw, floatX* db, const floatX* dout, const floatX* in,
                     const floatX* w, int N, int C, int O) {
    LAUNCH(linear_back_w, O * C, dw, dout, in, N, C, O);
    if (db && O > 2 * C) LAUNCH(linear_back_b, O, db, dout, N, O, False);
    else if (db) LAUNCH(linear_back_b, O, db, dout, N, O, std::false_type());
    LAUNCH(linear_back_in, N * C, din, dout, w, N, C, O);
}
void encoder_backward(floatX* dwte, floatX* dwpe, const floatX* dout, const int* tokens, int N, int T, int C,
                      int V, unsigned seed) {
    LAUNCH(embed_back, (V + T) * C, dwte, dwpe, dout, tokens, N, T, C, V, noisy ? seed | 1 : 0);
}

// ------------------------------------------------------------------ the model

struct GPT2Config {
    int max_seq_len, vocab_size, num_layers, channels;
};

enum { NUM_PARAMETER_TENSORS = 16 };
struct ParameterTensors { // wte (V, C), wpe (maxT, C), then of each layer, the last two (C)
    floatX *wte, *wpe, *ln1w, *ln1b, *qkvw, *qkvb, *attprojw, *attprojb;
    floatX *ln2w, *ln2b, *fcw, *fcb, *fcprojw, *fcprojb, *lnfw, *lnfb;
};
static_assert(sizeof(ParameterTensors) == sizeof(void*[NUM_PARAMETER_TENSORS]), "an array of pointers");

struct ActivationTensors { // of all layers; branch, logits and the gradients dx, dh, dwide are needed once
    floatX *x, *x2, *h, *h2, *mixed, *branch, *qkv, *fc, *logits, *dx, *dh, *dwide;
    float *gates, *stats, *stats2, *losses;
};

typedef struct
{
    GPT2Config config;
    ParameterTensors params, grads;
    size_t param_elements[NUM_PARAMETER_TENSORS], num_parameters, num_parameters_bytes;
    void *params_memory, *grads_memory;
    float *m_memory, *v_memory, *master_weights, *accumulated_mean_loss;
    ActivationTensors acts;
    void* allocated[16];
    int allocated_count, batch_size, seq_len, *inputs, *targets, use_master_weights;
    float mean_loss;
    bool init_state;
    unsigned long long rng_state, rng_state_last_update;
}
GPT2;

void gpt2_init_common(GPT2* gpt)
{
    memset(gpt, 0, sizeof *gpt);
    gpt->use_master_weights = 1;
    gpt->init_state = true;
    gpt->rng_state = 1234 + multi_gpu_config . process_rank;
}

void* malloc_and_point_parameters(ParameterTensors* tensors, const size_t* counts) {
    size_t all = 0;
    floatX* memory;
    for (int i = 0; i < NUM_PARAMETER_TENSORS; i++) all += counts[i];
    CUDA(cudaMalloc((void**)&memory, all * sizeof(floatX)));
    for (int i = 0, at = 0; i < NUM_PARAMETER_TENSORS; at += counts[i++])
        ((floatX**)tensors)[i] = memory + at;
    return memory;
}

void gpt2_allocate_weights(GPT2* gpt) {
    const size_t C = gpt->config.channels, L = gpt->config.num_layers, V = gpt->config.vocab_size;
    const size_t counts[] = {V * C, gpt->config.max_seq_len * C, L * C, L * C, L * 3 * C * C, L * 3 * C,
                             L * C * C, L * C, L * C, L * C, L * 4 * C * C, L * 4 * C, L * 4 * C * C, L * C,
                             C, C};
    gpt->num_parameters = 0;
    for (int i = 0; i < NUM_PARAMETER_TENSORS; i++)
        gpt->num_parameters += gpt->param_elements[i] = counts[i];
    gpt->num_parameters_bytes = gpt->num_parameters * sizeof(floatX);
    gpt->params_memory = malloc_and_point_parameters(&gpt->params, counts);
}

template <typename T> void allocate(GPT2* gpt, T** pointer, size_t count) {
    CUDA(cudaMalloc((void**)pointer, count * sizeof(T)));
    gpt->allocated[gpt->allocated_count++ % 16] = *pointer;
}

void gpt2_allocate_state(GPT2* gpt, int B, int T) {
    const size_t L = gpt->config.num_layers, C = gpt->config.channels, N = (size_t)B * T;
    ActivationTensors* acts = &gpt->acts;
    gpt->grads_memory = malloc_and_point_parameters(&gpt->grads, gpt->param_elements);
    gpt->batch_size = B;
    gpt->seq_len = T;
    struct { floatX** to; size_t count; } parts[] = {
        {&acts->x, (L + 1) * N * C}, {&acts->x2, (L + 1) * N * C}, {&acts->h, (L + 1) * N * C},
        {&acts->h2, L * N * C}, {&acts->mixed, L * N * C},
        {&acts->branch, N * C}, {&acts->qkv, L * N * 3 * C},
        {&acts->fc, L * N * 4 * C},
        {&acts->logits, N * gpt->config.vocab_size}, {&acts->dx, N * C}, {&acts->dh, N * C},
        {&acts->dwide, N * 4 * C}};
    size_t all = 0;
    for (auto& part : parts) all += part.count;
    floatX* at;
    allocate(gpt, &at, all);
    for (auto& part : parts) *part.to = at, at += part.count;
    allocate(gpt, &acts->gates, L * N);
    allocate(gpt, &acts->stats, (L + 1) * N * 2);
    allocate(gpt, &acts->stats2, L * N * 2);
    allocate(gpt, &acts->losses, N);
    allocate(gpt, &gpt->inputs, N);
    allocate(gpt, &gpt->targets, N);
    allocate(gpt, &gpt->accumulated_mean_loss, 1);

    int managed = 0;
    const size_t shard_num_parameters = multi_gpu_config.shard_num_parameters,
        bytes = 4 * shard_num_parameters;
    managed |= cudaMallocConditionallyManaged((void**)&gpt->m_memory, bytes);
    managed |= cudaMallocConditionallyManaged((void**)&gpt->v_memory, bytes);
    if (gpt->use_master_weights)
    {
        managed |= cudaMallocConditionallyManaged((void**)&gpt->master_weights, bytes);
    }
    if (managed) printf0("optimizer state in managed memory\n");
}

void gpt2_write_to_checkpoint(GPT2* gpt, const char* name) {
    FILE* out = fopenCheck(name, "wb");
    const int header[8] = {777, sizeof(floatX), gpt->config.max_seq_len, gpt->config.vocab_size,
        gpt->config.num_layers, gpt->config.channels};
    fwriteCheck(header, sizeof header, 1, out);
    device_to_file(out, gpt->params_memory,
                   gpt->num_parameters_bytes, IO_BUF_SIZE, main_stream); // params_memory as a whole
    fclose(out);
}

void gpt2_build_from_checkpoint(GPT2* gpt, const char* name, bool with_weights = true) {
    FILE* in = fopenCheck(name, "rb");
    int header[8];
    freadCheck(header, sizeof header, 1, in);
    must(header[0] == 777 && (header[1] == sizeof(floatX) || !with_weights), "read in this precision:", name);
    gpt->config = {header[2], header[3], header[4], header[5]};
    gpt2_allocate_weights(gpt);
    if (with_weights) { file_to_device(gpt->params_memory, in, gpt->num_parameters_bytes, IO_BUF_SIZE,
                                       main_stream); }
    fclose(in);
    CUDA(cudaDeviceSynchronize());
}

// "tiny:LxC"
void gpt_build_from_descriptor(GPT2* gpt, const char* words) {
    gpt->config = {48, 128, 0, 0};
    must(sscanf(words, "tiny:%dx%d", &gpt->config.num_layers, &gpt->config.channels) == 2, "make a model of",
         words);
    gpt2_allocate_weights(gpt);
    floatX* values = (floatX*)mallocCheck(gpt->num_parameters_bytes);
    size_t at = 0;
    for (int i = 0; i < NUM_PARAMETER_TENSORS; i++)
        for (size_t end = at + gpt->param_elements[i]; at < end; at++) {
            const float random = 0.2f * ((float)mix_bits(at + 1) / 4294967296.0f - 0.5f);
            values[at] = (floatX)(i == 2 || i == 8 || i == 14 ? 1.0f : i < 2 || i == 4 || i % 6 == 0 ||
                                  i == 10 ? random : 0.0f);
        }
    CUDA( cudaMemcpy( gpt->params_memory, values, gpt->num_parameters_bytes, cudaMemcpyHostToDevice ) );
    free(values);
}

void gpt2_forward(GPT2* gpt, const int* tokens, size_t B, size_t T) {
    const size_t L = gpt->config.num_layers, C = gpt->config.channels, N = B * T, V = gpt->config.vocab_size;
    ParameterTensors w = gpt->params;
    ActivationTensors a = gpt->acts;
    CUDA(cudaMemcpy(gpt->inputs, tokens, N * sizeof(int), cudaMemcpyHostToDevice));
    LAUNCH(embed, N * C, a.x, gpt->inputs, w.wte, w.wpe, N, T, C);
    norm_forward(a.x, a.h, a.stats, a.x, NULL, w.ln1w, w.ln1b, N, C, main_stream);
    for (size_t l = 0; l < L; l++) {
        const size_t at = l * N * C, next = at + N * C;
        LAUNCH(linear, N * 3 * C, a.qkv + 3 * at, a.h + at, w.qkvw + l * 3 * C * C, w.qkvb + l * 3 * C, N, C,
               3 * C);
        mix_forward(a.mixed + at, a.gates + l * N, a.qkv + 3 * at, N, T, C, main_stream);
        floatX* proj = w.attprojw + l * C*C;
        LAUNCH(linear, N * C, a.branch, a.mixed + at, proj, w.attprojb + l * C, N, C, C);
        norm_forward(a.x2 + at, a.h2 + at, a.stats2 + 2 * l * N, a.x + at, a.branch, w.ln2w + l * C,
                     w.ln2b + l * C, N, C, main_stream);
        LAUNCH(linear, N * 4 * C, a.fc + 4 * at, a.h2 + at, w.fcw + l * 4 * C * C, w.fcb + l * (4 * C), N, C,
               4 * C);
        LAUNCH(squash, N * 4 * C, a.fc + 4 * at, N * 4 * C);
        LAUNCH(linear, N * C, a.branch, a.fc + 4 * at, w.fcprojw + l * C * 4 * C, w.fcprojb + l * C, N,
               4 * C, C);
        if (l + 1 < L) {
            const floatX *weight = w.ln1w + (l + 1) * C;
            const floatX *bias = w.ln1b + (l + 1) * C;
            norm_forward(a.x + next, a.h + next, a.stats + 2 * (l + 1) * N, a.x2 + at, a.branch, weight,
                         bias, N, C, main_stream);
        } else
            norm_forward(a.x + next, a.h + next, a.stats + 2 * L * N, a.x2 + at, a.branch, w.lnfw, w.lnfb, N,
                         C, main_stream);
    }
    LAUNCH(linear, N * V, a.logits, a.h + L * N * C, w.wte, (const floatX*)NULL, N, C, V);
    CUDA(cudaDeviceSynchronize());
}

float gpt2_validate(GPT2* gpt, const int* tokens, const int* wanted, size_t B, size_t T, float* losses) {
    const int N = B * T, V = gpt->config.vocab_size;
    float mean = 0.0f;
    gpt2_forward(gpt, tokens, B, T);
    CUDA(cudaMemset(gpt->acts.losses, 0, N * sizeof(float)));
    CUDA(cudaMemcpy(gpt->targets, wanted, N * sizeof(int), cudaMemcpyHostToDevice));
    LAUNCH(classify, N, gpt->acts.logits, gpt->acts.losses, gpt->targets, 0.0f, 1.0f, N, V);
    CUDA(cudaMemcpyAsync(losses, gpt->acts.losses, N * sizeof(float), cudaMemcpyDeviceToHost, main_stream));
    CUDA(cudaStreamSynchronize(main_stream));
    for (int n = 0; n < N; n++) mean += losses[n];
    return mean / N;
}

void gpt2_backward_and_reduce(GPT2* gpt, int* tokens, const int* wanted, int accumulate, int part)
{
    const size_t B = gpt->batch_size, T = gpt->seq_len, N = B * T, C = gpt->config.channels,
        V = gpt->config.vocab_size;
    const int L = gpt->config.num_layers;
    const bool last_step = part + 1 == accumulate;
    ParameterTensors w = gpt->params;
    ParameterTensors d = gpt -> grads;
    ActivationTensors a = gpt->acts;
    if (part == 0) {
        CUDA(cudaMemsetAsync(a.losses, 0, N * sizeof(float), main_stream));
        CUDA(cudaMemsetAsync(gpt->grads_memory, 0, gpt->num_parameters_bytes, main_stream));
    }
    (void)tokens;
    CUDA(cudaMemcpy(gpt->targets, wanted, N * sizeof(int), cudaMemcpyHostToDevice));
    CUDA(cudaMemsetAsync(a.dx, 0, N * C * sizeof(floatX), main_stream));
    const float dloss = loss_factor / (float)(N * accumulate);
    LAUNCH(classify, N, a.logits, a.losses, gpt->targets, dloss, loss_factor, N, V);
    linear_backward(a.dh, d.wte, NULL, a.logits, a.h + L * N * C, w.wte, N, C, V);
    norm_backward(a.dx, d.lnfw, d.lnfb, a.dh, a.x + L * N * C, w.lnfw, a.stats + 2 * L * N, N, C,
                  main_stream);
    for (int l = L - 1; l >= 0; --l)
    {
        const size_t at = l * N * C;
        floatX *d_ln1w = d.ln1w + l * C;
        floatX *d_ln1b = d.ln1b + l * C;
        floatX *d_qkvw = d.qkvw + l * 3 * C * C, *d_qkvb = d.qkvb + l * 3 * C;
        floatX *d_attw = d.attprojw + l * C * C, *d_attb = d.attprojb + l * C;
        floatX *d_ln2w = d.ln2w + l * C, *d_ln2b = d.ln2b + l * C;
        floatX *d_fcw = d.fcw + l * 4 * C * C, *d_fcb = d.fcb + l * 4 * C;
        floatX *d_outw = d.fcprojw + l * C * 4 * C, *d_outb = d.fcprojb + l * C;
        linear_backward(a.dwide, d_outw, d_outb, a.dx, a.fc + 4 * at, w.fcprojw + l * C * 4 * C, N, 4 * C, C);
        LAUNCH(squash_back, N * 4 * C, a.dwide, a.fc + 4 * at, N * 4 * C);
        linear_backward(a.dh, d_fcw, d_fcb, a.dwide, a.h2 + at, w.fcw + l * 4 * C * C, N, C, 4 * C);
        norm_backward(a.dx, d_ln2w, d_ln2b, a.dh, a.x2 + at, w.ln2w + l * C, a.stats2 + 2 * l * N, N, C,
                      main_stream);
        linear_backward(a.dh, d_attw, d_attb, a.dx, a.mixed + at, w.attprojw + l * C * C, N, C, C);
        mix_backward(a.dwide, a.dh, a.gates + l * N, a.qkv + 3 * at, N, T, C, main_stream);
        linear_backward(a.dh, d_qkvw, d_qkvb, a.dwide, a.h + at, w.qkvw + l * 3 * C * C, N, C, 3 * C);
        norm_backward(a.dx, d_ln1w, d_ln1b, a.dh, a.x + at, w.ln1w + l * C, a.stats + 2 * l * N, N, C,
                      main_stream);
        if (last_step)
        {
            floatX* const those[] = {d_ln1w, d_ln1b, d_qkvw, d_qkvb, d_attw, d_attb, d_ln2w, d_ln2b, d_fcw,
                d_fcb, d_outw, d_outb};
            const size_t sizes[] = {C, C, 3 * C * C, 3 * C, C * C, C, C, C, 4 * C * C, 4 * C, 4 * C * C, C};
            multi_gpu_async_reduce_gradient( those, sizes, &multi_gpu_config, main_stream );
        }
    }
    encoder_backward(d.wte, d.wpe, a.dx, gpt->inputs, N, T, C, V, noisy ? random_u32(&gpt->rng_state) : 0);
    if (last_step) {
        LAUNCH(sum_all, 1, gpt->accumulated_mean_loss, a.losses, N);
#ifdef MULTI_GPU
        NCCL(ncclAllReduce(gpt->accumulated_mean_loss, gpt->accumulated_mean_loss, sizeof (float), ncclFloat,
                                ncclAvg, multi_gpu_config.nccl_comm, main_stream));
#endif
        CUDA(cudaMemcpyAsync(&gpt->mean_loss, gpt->accumulated_mean_loss, 4, cudaMemcpyDeviceToHost,
                             main_stream));
        floatX* const rest[] = {d.lnfw, d.lnfb, d.wte, d.wpe};
        const size_t counts[] = {C, C, V * C, T*C};
        multi_gpu_async_reduce_gradient(rest, counts, &multi_gpu_config, main_stream);
    }
    CUDA(cudaDeviceSynchronize());
    gpt->mean_loss = last_step ? gpt->mean_loss / (N * accumulate) : -1.0f;
}

ShardInfo gpt2_get_tensor_at_layer(const GPT2* gpt, int layer, int tensor) {
    ShardInfo place = {0, gpt->param_elements[tensor]};
    for (int i = 0; i < tensor; i++) place.offset += gpt->param_elements[i];
    if (tensor < 2 || tensor > 13) return place;
    place.size /= gpt->config.num_layers;
    place.offset += layer * place.size;
    return place;
}

float gpt2_calculate_grad_norm(GPT2* gpt, MultiGpuConfig* ranks) {
    float* sum = gpt->accumulated_mean_loss, squares;
    CUDA(cudaMemsetAsync(sum, 0, sizeof(float), main_stream));
    for (int i = 0; i < NUM_PARAMETER_TENSORS; i++)
        for (int l = 0; l < (i < 2 || i > 13 ? 1 : gpt->config.num_layers); l++) {
            const ShardInfo all = gpt2_get_tensor_at_layer(gpt, l, i),
                own = multi_gpu_get_shard_offset(all.size, ranks);
            add_squares<<<1, 1, 0, main_stream>>>(sum, (floatX*)gpt->grads_memory + all.offset + own.offset,
                                                  own.size);
        }
#ifdef MULTI_GPU
    if (ranks->zero_stage == 1)
        NCCL(ncclAllReduce(sum, sum, sizeof(float), ncclFloat, ncclSum, ranks->nccl_comm, main_stream));
#endif
    CUDA(cudaMemcpy(&squares, sum, sizeof(float), cudaMemcpyDeviceToHost));
    return sqrtf(squares);
}

void gpt2_update(GPT2* gpt, float rate, float b1, float b2, float eps, float decay, float shrink, int t,
                 MultiGpuConfig* ranks, bool from_masters = false) {
    const bool first = gpt->init_state;
    gpt->init_state = false;
    if (first) CUDA(cudaMemsetAsync(gpt->m_memory, 0, ranks->shard_num_parameters * sizeof(float),
                                    main_stream));
    if (first) CUDA(cudaMemsetAsync(gpt->v_memory, 0, ranks->shard_num_parameters * sizeof(float),
                                    main_stream));
    gpt->rng_state_last_update = gpt->rng_state;
    for (int i = 0; i < NUM_PARAMETER_TENSORS; i++)
        for (int l = 0; l < (i < 2 || i > 13 ? 1 : gpt->config.num_layers); l++) {
            const ShardInfo all = gpt2_get_tensor_at_layer(gpt, l, i),
                own = multi_gpu_get_shard_offset(all.size, ranks);
            const size_t state = ranks->zero_stage ? all.offset / ranks->num_processes : all.offset;
            floatX* whole = (floatX*)gpt->params_memory + all.offset;
            floatX *p = whole + own.offset, *g = (floatX*)gpt->grads_memory + all.offset + own.offset;
            float* master = gpt->master_weights ? gpt->master_weights + state : NULL;
            const unsigned seed = mix_bits((unsigned)gpt->rng_state++);
            if (first && master) LAUNCH(widen, own.size, master, p, own.size);
            if (from_masters) LAUNCH(narrow, own.size, p, master, own.size);
            else
                LAUNCH(adamw, own.size, p, master, g, gpt->m_memory + state, gpt->v_memory + state, own.size,
                       rate, b1, b2, eps, (0x1453 >> i) & 1 ? decay : 0.0f, shrink, t, seed);
#ifdef MULTI_GPU
            if (ranks->zero_stage == 0) continue;
            NCCL(ncclGroupStart());
            NCCL(ncclAllGather(p, whole, own.size, ncclFloatX, ranks->nccl_comm, ranks->nccl_stream));
            NCCL(ncclGroupEnd());
#endif
        }
    CUDA(cudaDeviceSynchronize());
}

void gpt2_free(GPT2* gpt) {
    void* memory[] = {gpt->params_memory, gpt->grads_memory, gpt->m_memory, gpt->v_memory,
        gpt->master_weights};
    for (void* one : memory) CUDA(cudaFree(one));
    while (gpt->allocated_count > 0) CUDA(cudaFree(gpt->allocated[--gpt->allocated_count]));
    gpt->params_memory = gpt->grads_memory = NULL;
    gpt->m_memory = gpt->v_memory = gpt->master_weights = NULL;
}

// ------------------------------------------------------------------ files

// A state file is laid out as llm.c's: 256 ints, m, v and masters, and with shuffled data what was drawn.
void save_state(const char* name, int step, GPT2* gpt, DataLoader* data) {
    printf("state: %s\n", name);
    FILE* out = fopenCheck(name, "wb");
    int header[256] = {20240527, 1, multi_gpu_config.num_processes, multi_gpu_config.process_rank,
                       gpt->use_master_weights, data->should_shuffle};
    header[10] = step;
    memcpy(header + 20, &gpt->rng_state, 8);
    memcpy(header + 22, &gpt->rng_state_last_update, 8);
    memcpy(header + 30, &data->current_shard_idx, 8);
    memcpy(header + 32, &data->current_sample_idx, 8);
    fwriteCheck(header, sizeof header, 1, out);
    const size_t shard_num_parameters = multi_gpu_config.shard_num_parameters;
    device_to_file(out, gpt->m_memory, shard_num_parameters * 4, IO_BUF_SIZE, main_stream);
    device_to_file(out, gpt->v_memory, shard_num_parameters * 4, IO_BUF_SIZE, main_stream);
    if ( gpt->use_master_weights ) {
        device_to_file(out, gpt->master_weights, shard_num_parameters * 4, IO_BUF_SIZE, main_stream);
    }
    if (data->should_shuffle) {
        fwriteCheck(&data->glob_result.gl_pathc, 8, 1, out);
        fwriteCheck(data->shard_indices, 4, data->glob_result.gl_pathc, out);
        fwriteCheck(&data->shard_num_samples, 8, 1, out);
        fwriteCheck(data->intra_shard_indices, 4, data->shard_num_samples, out);
        fwriteCheck(&data->shuffle_rng, sizeof data->shuffle_rng, 1, out);
    }
    fclose(out);
}

void load_state(int* step, GPT2* gpt, DataLoader* data, const char* name) {
    FILE* in = fopenCheck(name, "rb");
    int header[256];
    size_t shard, sample, count;
    freadCheck(header, sizeof header, 1, in);
    must(header[0] == 20240527 && header[2] == multi_gpu_config.num_processes &&
             header[3] == multi_gpu_config.process_rank && header[4] >= gpt->use_master_weights,
         "resume with these ranks and this -w from", name);
    size_t shard_num_parameters = (&multi_gpu_config)->shard_num_parameters;
    *step = header[10];
    gpt->init_state = false;
    memcpy(&gpt->rng_state, header + 20, 8);
    memcpy(&gpt->rng_state_last_update, header + 22, 8);
    memcpy(&shard, header + 30, 8);
    memcpy(&sample, header + 32, 8);
    file_to_device(gpt->m_memory, in, shard_num_parameters * 4, IO_BUF_SIZE, main_stream);
    file_to_device(gpt->v_memory, in, shard_num_parameters * 4, IO_BUF_SIZE, main_stream);
    if (gpt->use_master_weights) {
        file_to_device(gpt->master_weights, in, shard_num_parameters * 4, IO_BUF_SIZE, main_stream);
        gpt2_update(gpt, 0, 0, 0, 0, 0, 0, 0, &multi_gpu_config, true);
        memcpy(&gpt->rng_state, header + 20, 8);
    }
    data->should_shuffle = header[5];
    if (data->should_shuffle) {
        freadCheck(&count, 8, 1, in);
        must(count == data->glob_result.gl_pathc, "resume with these files of data from", name);
        freadCheck(data->shard_indices, 4, count, in);
        freadCheck(&count, 8, 1, in);
        must(count == data->shard_num_samples, "resume with a file of this length from", name);
        freadCheck(data->intra_shard_indices, 4, count, in);
        freadCheck(&data->shuffle_rng, sizeof data->shuffle_rng, 1, in);
    }
    must(fgetc(in) == EOF, "find the end of", name); // all has been read
    dataloader_resume(data, shard, sample);
    fclose(in);
}

static void path_of(char (&name)[400], const char* folder, const char* what, int step, int rank = -1) {
    const int n = snprintf(name, sizeof name, "%s/%s_%08d", folder, what, step);
    if (rank >= 0) snprintf(name + n, sizeof name - n, "_%05d.bin", rank);
    else if (what[0] != 'D') snprintf(name + n, sizeof name - n, ".bin");
}

void write_checkpoint(const char* folder, int step, GPT2* gpt, DataLoader* data, MultiGpuConfig* ranks) {
    char name[400];
    path_of(name, folder, "model", step);
    if (ranks->process_rank == 0) gpt2_write_to_checkpoint(gpt, name);
    path_of(name, folder, "state", step, ranks->process_rank);
    save_state(name, step, gpt, data);
    multi_gpu_barrier(ranks);
    path_of(name, folder, "DONE", step);
    if (ranks->process_rank == 0) fclose(fopenCheck(name, "w"));
}

void delete_checkpoint(const char* folder, int step, MultiGpuConfig* ranks) {
    char name[400];
    path_of(name, folder, "state", step, ranks->process_rank);
    remove(name);
    for (const char* what : {"model", "DONE"}) {
        path_of(name, folder, what, step);
        if (ranks->process_rank == 0) remove(name);
    }
}

#ifndef TESTING
void error_usage() {
    fprintf(stderr, "  -e tiny:LxC or a model file, -o folder, -n steps between checkpoints, -y 1: resume\n");
    fprintf(stderr,
            "  -z stage, 0 or 1\n");
    fprintf(stderr, "  -b sequences a rank, -t their length, -d tokens a step of all ranks, -x steps\n");
    exit(EXIT_FAILURE);
}

int main(int count, char** words)
{
    const char *model_name = "tiny:2x23", *folder = NULL, *method = "mpi", *path = ".";
    int B = 2, T = 16, tokens = -1, steps = 5, masters = 1, stage = 0, every = 0, keep = 0, resume = 0,
        ranks = 1, rank = 0, shuffled = 0, val_max = 0;
    int odd_step = -1, odd_rank = -1, step = 0, resuming = 0;
    int val_loss_every = 1;
    float rate = 0.01f, decay = 0.1f, most_zloss = 0.0f, most_zgrad = 0.0f, odd_factor = 1.0f;
    char name[400];
    for (int w = 1; w < count; w += 2) {
        if (w + 1 == count || words[w][0] != '-') error_usage();
        const char *flag = words[w] + 1, *value = words[w + 1];
        if (!strcmp(flag, "e")) model_name = value;
        else if (!strcmp(flag, "o")) folder = value;
        else if (!strcmp(flag, "b")) B = atoi(value);
        else if (!strcmp(flag, "t")) T = atoi(value);
        else if (!strcmp(flag, "d")) tokens = atoi(value);
        else if (!strcmp(flag, "x")) steps = atoi(value);
        else if (!strcmp(flag, "l")) rate = atof(value);
        else if (!strcmp(flag, "c")) decay = atof(value);
        else if (!strcmp(flag, "w")) masters = atoi(value);
        else if (!strcmp(flag, "z")) stage = atoi(value);
        else if (!strcmp(flag, "n")) every = atoi(value);
        else if (!strcmp(flag, "nk")) keep = atoi(value);
        else if (!strcmp(flag, "i")) shuffled = atoi(value);
        else if (!strcmp(flag, "y")) resume = atoi(value);
        else if (!strcmp(flag, "sl")) most_zloss = atof(value);
        else if (!strcmp(flag, "sg")) most_zgrad = atof(value);
        else if (!strcmp(flag, "a")) sscanf(value, "%d:%d:%f", &odd_step, &odd_rank, &odd_factor);
        else if (!strcmp(flag, "v")) val_loss_every = atoi(value);
        else if (!strcmp(flag, "r")) noisy = atoi(value);
        else if (!strcmp(flag, "m")) val_max = atoi(value);
        else if (!strcmp(flag, "pi")) method = value;
        else if (!strcmp(flag, "pf")) path = value;
        else if (!strcmp(flag, "pn")) ranks = atoi(value);
        else if (!strcmp(flag, "pr")) rank = atoi(value);
        else
        {
            error_usage();
        }
    }

    multi_gpu_config = multi_gpu_config_init(ranks, rank, path, method);
    rank = multi_gpu_config.process_rank;
    CUDA(cudaStreamCreate(&main_stream));
    const int tokens_at_once = B * T * multi_gpu_config.num_processes;
    if (tokens < 0) tokens = tokens_at_once;
    must(tokens % tokens_at_once == 0, "make a step of -d tokens from", "whole batches");
    const int accumulate = tokens / tokens_at_once;
    const int from = find_max_step(folder);
    if (resume && from > 0) resuming = 1;

    GPT2 gpt;
    gpt2_init_common(&gpt);
    if (resuming) {
        path_of(name, folder, "model", from);
        gpt2_build_from_checkpoint(&gpt, name, !masters);
    } else if (strstr(model_name, ".bin")) gpt2_build_from_checkpoint(&gpt, model_name);
    else gpt_build_from_descriptor(&gpt, model_name);
    gpt.use_master_weights = masters;
    set_zero_configs(&multi_gpu_config, stage, gpt.num_parameters);

    Logger log;
    DataLoader data, val_data;
    EvalLoader questions;
    OutlierDetector of_loss, of_norm;
    logger_init(&log, folder, rank, resuming);
    dataloader_init(&data, B, T, rank, multi_gpu_config.num_processes, shuffled);
    dataloader_init(&val_data, B, T, rank, multi_gpu_config.num_processes, 0);
    evalloader_init(&questions, B, T, rank, multi_gpu_config.num_processes);
    float* losses = (float*)mallocCheck(B * T * sizeof(float));
    const int val_batches = val_max >= 0 ? val_max : 9700 / tokens_at_once;
    init_detector(&of_loss);
    init_detector(&of_norm);
    gpt2_allocate_state(&gpt, B, T);
    if (resuming) {
        path_of(name, folder, "state", from, rank);
        load_state(&step, &gpt, &data, name);
    }

    for (; step <= steps; step++) {
        const bool last_step = step == steps;
        if (val_max && (step % 2 == 0 || last_step)) {
            float val_loss = 0.0f, right = 0.0f;
            dataloader_reset(&val_data);
            for (int i = 0; i < val_batches; i++)
            {
                dataloader_next_batch(&val_data);
                val_loss += gpt2_validate(&gpt, val_data.inputs, val_data.targets, B, T, losses);
            }
            val_loss /= val_batches;
            val_loss = multi_gpu_cpu_float_sum(val_loss, &multi_gpu_config) / multi_gpu_config.num_processes;
            logger_log_val(&log, step, val_loss);
            evalloader_reset(&questions);
            for (int i = 0; i < questions.num_batches; i++) {
                evalloader_next_batch(&questions);
                gpt2_validate(&gpt, questions.inputs, questions.targets, B, T, losses);
                right += evalloader_stat_losses(&questions, losses);
            }
            right = multi_gpu_cpu_float_sum(right, &multi_gpu_config);
            logger_log_eval(&log, step, right / questions.num_examples);
        }
        if (folder && every && !resuming && ((step > 0 && step % every == 0) || last_step)) {
            write_checkpoint(folder, step, &gpt, &data, &multi_gpu_config);
            const int old = step - keep * every;
            if (keep && old > 0) delete_checkpoint(folder, old, &multi_gpu_config);
        }
        resuming = 0;
        if (last_step) break;
        for (int part = 0; part < accumulate; part++) {
            dataloader_next_batch(&data);
            loss_factor = step == odd_step && rank == odd_rank ? odd_factor : 1.0f;
            gpt2_forward(&gpt, data.inputs, B, T);
            gpt2_backward_and_reduce(&gpt, data.inputs, data.targets, accumulate, part);
        }
        const float zloss = update_detector(&of_loss, gpt.mean_loss);
        const float norm = gpt2_calculate_grad_norm(&gpt, &multi_gpu_config);
        const float zgrad = update_detector(&of_norm, norm);
        if (isfinite(zloss) && most_zloss != 0 && zloss > most_zloss) {
            printf0("step %d: the loss is an outlier\n", step);
        } else if (isfinite(zgrad) && most_zgrad != 0 && zgrad > most_zgrad) {
            printf0("step %d: the gradient is an outlier\n", step);
        } else {
            const float most = 1.0f;
            const float shrink = norm > most ? most / norm : 1.0f;
            gpt2_update(&gpt, rate, 0.9f, 0.95f, 1e-8f, decay, shrink, step + 1, &multi_gpu_config);
        }
        if (step % val_loss_every == 0) printf0("step %d loss %.9g norm %.9g\n", step, gpt.mean_loss, norm);
        logger_log_train(&log, step, gpt.mean_loss, rate, norm);
    }
    dataloader_free(&data);
    dataloader_free(&val_data);
    evalloader_free(&questions);
    free(losses);
    MultiGpuConfig* together = &multi_gpu_config;
    multi_gpu_config_free(together);
    gpt2_free(&gpt);
    CUDA(cudaStreamDestroy(main_stream));
    return 0;
}
#endif
