/* dev/gpu_check.cu - how near the update and norm kernels come to the memory's own speed.

   gpu_check [ELEMENTS ...]         (10M, 124M and 1G where none are given)

   For each size and type: the time of the update, of the norm's first launch, and beside them, on the same
   memory, of a plain copy and a plain read. A row says the kernel's bandwidth (bytes that it must move, over
   its time) as a share of the faster of two copies (a kernel of 16 bytes a thread, cudaMemcpyAsync) or of the
   read. One launch is too short to time, so a sample is several launches between two events; the number is
   the median of the samples. The second size is also run as 148 tensors, as many as GPT-2 has. A size that
   does not fit is named and left out. dev/gpu_check.sh puts the rows into its table; fields end with '|'.
*/
#include <algorithm>
#include <stdio.h>
#include <stdlib.h>
#include <vector>

#include "llmc_zero/adamw.cuh"

enum Operation { COPY_KERNEL, COPY_MEMCPY, READ, UPDATE, NORM };

struct Bench {
    ZeroLayout layout;
    char* arena; /* params, gradients, masters, m, v, one after another */
    size_t arena_bytes, grads_bytes;
    ZeroChunk* chunks;
    size_t chunks_count;
    uint64_t* sums; /* this rank's, then those of all ranks, then what nobody reads */
    ZeroUpdate update;
    ZeroNorm norm;
    ZeroHyper hyper;
    cudaStream_t stream;
    cudaEvent_t start, stop;
    int launches, samples;
};

/* ------------------------------------------------------------------ plain kernels */

template <typename T>
static __global__ void __launch_bounds__(256) copy_kernel(const T* from, T* to, size_t count) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = from[i];
}

/* Each block reads 2,048 x 16 bytes, as many as the norm's blocks take at a time. */
template <typename T>
static __global__ void __launch_bounds__(256) read_kernel(const T* from, size_t count, uint64_t* out) {
    size_t first = (size_t)blockIdx.x * 2048 + threadIdx.x;
    float sum = 0.0f;
    for (int k = 0; k < 8; k++) {
        size_t i = first + (size_t)k * 256;
        if (i < count) {
            T x = from[i];
            sum += (x.x + x.y) + (x.z + x.w);
        }
    }
    if (sum == 12345.678f) *out = 1; /* never; without it the compiler drops the reads */
}

/* Numbers of either sign and about 5e-4, read as fp32 and as bf16; `mask` 0x00ff00ff leaves the sign out. */
template <typename T> static __global__ void fill_kernel(T* words, size_t count, T mask) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) words[i] = 0x3a003a00u | ((T)zero_mix(i) & mask);
}

static ZeroResult fill(void* to, size_t bytes, uint32_t mask, cudaStream_t stream) {
    cudaLaunchConfig_t config = zero_launch_config((bytes / 4 + 255) / 256, 256, stream);
    ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, fill_kernel<uint32_t>, (uint32_t*)to, bytes / 4, mask));
    return zero_ok();
}

/* ------------------------------------------------------------------ timing */

static ZeroResult launch(Bench* b, Operation operation) {
    size_t half = b->arena_bytes / 2, vectors = half / 16, read_vectors = b->grads_bytes / 16;
    float4 *from = (float4*)b->arena, *to = (float4*)(b->arena + half);
    cudaLaunchConfig_t copy = zero_launch_config((vectors + 255) / 256, 256, b->stream);
    cudaLaunchConfig_t read = zero_launch_config((read_vectors + 2047) / 2048, 256, b->stream);
    switch (operation) {
    case COPY_KERNEL:
        ZERO_TRY_CUDA(cudaLaunchKernelEx(&copy, copy_kernel<float4>, (const float4*)from, to, vectors));
        break;
    case COPY_MEMCPY:
        ZERO_TRY_CUDA(cudaMemcpyAsync(to, from, vectors * 16, cudaMemcpyDeviceToDevice, b->stream));
        break;
    case READ:
        ZERO_TRY_CUDA(cudaLaunchKernelEx(&read, read_kernel<float4>, (const float4*)b->norm.grads,
                                         read_vectors, b->sums + 2 * ZERO_SUM_WORDS));
        break;
    case UPDATE: return zero_update_launch(&b->update, &b->hyper, 0, b->chunks_count, b->stream);
    case NORM: return zero_norm_squares(&b->norm, b->stream);
    }
    return zero_ok();
}

/* ms of one launch: the median of the samples. */
static ZeroResult time_one(Bench* b, Operation operation, double* ms) {
    std::vector<float> samples;
    for (int sample = -1; sample < b->samples; sample++) { /* the first one warms up */
        float sample_ms = 0.0f;
        ZERO_TRY_CUDA(cudaEventRecord(b->start, b->stream));
        for (int i = 0; i < b->launches; i++) ZERO_TRY(launch(b, operation));
        ZERO_TRY_CUDA(cudaEventRecord(b->stop, b->stream));
        ZERO_TRY_CUDA(cudaEventSynchronize(b->stop));
        ZERO_TRY_CUDA(cudaEventElapsedTime(&sample_ms, b->start, b->stop));
        if (sample >= 0) samples.push_back(sample_ms / (float)b->launches);
    }
    std::sort(samples.begin(), samples.end());
    *ms = samples[samples.size() / 2];
    return zero_ok();
}

static void print_row(const char* what, const char* size, double bytes, double ms, const char* peer,
                      double peer_bytes, double peer_ms) {
    double rate = bytes / ms, peer_rate = peer_bytes / peer_ms;
    printf("%s|%s|%.3f ms, %.0f GB/s|%.2f of %s (%.0f)\n", what, size, ms, rate / 1e6, rate / peer_rate, peer,
           peer_rate / 1e6);
    fflush(stdout);
}

/* ------------------------------------------------------------------ one size and type */

/* n elements in `tensors` segments: one in three a matrix, the others short, the last takes the rest. */
static ZeroResult make_layout(Bench* b, size_t n, int tensors, ZeroDtype dtype) {
    std::vector<ZeroSegment> segments;
    ZeroLayoutConfig config = zero_layout_config(1, dtype);
    size_t bucket_first[2], left = n;
    ZeroChunk* chunks = NULL;
    for (int i = 0; i < tensors; i++) {
        size_t count = i == tensors - 1 ? left : i % 3 == 0 ? n / 60 : 768 + (size_t)i;
        segments.push_back(zero_segment(NULL, count, 0));
        left -= count;
    }
    ZERO_TRY(zero_layout(&b->layout, segments.data(), tensors, &config));
    ZERO_TRY(zero_chunk_table(&b->layout, 0, ZERO_CHUNK_MAX_COUNT, &chunks, bucket_first));
    b->chunks_count = bucket_first[1];
    cudaError_t error = cudaMalloc((void**)&b->chunks, b->chunks_count * sizeof(ZeroChunk));
    if (error == cudaSuccess)
        error = cudaMemcpy(b->chunks, chunks, b->chunks_count * sizeof(ZeroChunk), cudaMemcpyHostToDevice);
    free(chunks);
    ZERO_TRY_CUDA(error);
    return zero_ok();
}

static ZeroResult make_buffers(Bench* b, ZeroRounding rounding) {
    ZeroDtype dtype = rounding == ZERO_ROUND_NONE ? ZERO_FP32 : ZERO_BF16;
    size_t count = zero_padded_count(&b->layout);
    size_t values = count * zero_dtype_bytes(dtype), states = count * 4;
    size_t masters = rounding == ZERO_ROUND_MASTERS ? states : 0;
    ZeroScalars* scalars;
    ZeroStepSettings settings = {0.9, 0.999, 1.0, 0.0, 0, 0.0};
    ZeroScalars result;

    b->grads_bytes = values;
    b->arena_bytes = 2 * values + masters + 2 * states;
    ZERO_TRY_CUDA(cudaMalloc((void**)&b->arena, b->arena_bytes));
    ZERO_TRY_CUDA(cudaMalloc((void**)&b->sums, 3 * ZERO_SUMS_BYTES));
    ZERO_TRY_CUDA(cudaMemset(b->sums, 0, 3 * ZERO_SUMS_BYTES));
    ZERO_TRY_CUDA(cudaMalloc((void**)&scalars, ZERO_SCALARS_BYTES));
    ZERO_TRY_CUDA(cudaMemset(scalars, 0, ZERO_SCALARS_BYTES));
    char* after = b->arena + 2 * values;
    b->update = ZeroUpdate();
    b->update.chunks = b->chunks;
    b->update.params = b->arena;
    b->update.grads = b->arena + values;
    b->update.masters = masters ? (float*)after : NULL;
    b->update.exp_avg = (float*)(after + masters);
    b->update.exp_avg_sq = (float*)(after + masters + states);
    b->update.scalars = scalars;
    b->update.dtype = dtype;
    b->update.algorithm = ZERO_ADAMW;
    b->hyper = zero_hyper(1e-4, 0.9, 0.999, 1e-8, 0.01, 0.0);
    b->norm = ZeroNorm{b->chunks, b->chunks_count,          b->update.grads, dtype,
                       b->sums,   b->sums + ZERO_SUM_WORDS, scalars};

    ZERO_TRY(fill(b->arena, b->arena_bytes - states, 0x80ff80ffu, b->stream));
    ZERO_TRY(fill(b->update.exp_avg_sq, states, 0x00ff00ffu, b->stream));
    ZERO_TRY(zero_norm_squares(&b->norm, b->stream));
    ZERO_TRY(zero_norm_share(&b->norm, 0, 0, b->stream));
    ZERO_TRY(zero_norm_finish(&b->norm, &settings, b->stream));
    ZERO_TRY_CUDA(cudaMemcpyAsync(&result, scalars, sizeof(result), cudaMemcpyDeviceToHost, b->stream));
    ZERO_TRY_CUDA(cudaStreamSynchronize(b->stream));
    if (result.skip || result.t != 1)
        return zero_error(ZERO_ERROR_ORDER, "skip %d, t %llu: the update would do nothing", result.skip,
                          (unsigned long long)result.t);
    return zero_ok();
}

static ZeroResult measure(Bench* b, const char* type, const char* size, double update_bytes) {
    double copy_ms, memcpy_ms, read_ms, update_ms, norm_ms;
    char what[64];
    double elements = (double)zero_model_count(&b->layout);
    ZERO_TRY(time_one(b, UPDATE, &update_ms));
    ZERO_TRY(time_one(b, NORM, &norm_ms));
    ZERO_TRY(time_one(b, READ, &read_ms));
    ZERO_TRY(time_one(b, COPY_KERNEL, &copy_ms));
    ZERO_TRY(time_one(b, COPY_MEMCPY, &memcpy_ms));
    double value_bytes = (double)zero_dtype_bytes(b->update.dtype);
    snprintf(what, sizeof(what), "update AdamW %s", type);
    print_row(what, size, update_bytes * elements, update_ms, "copy", (double)(b->arena_bytes / 32 * 32),
              copy_ms < memcpy_ms ? copy_ms : memcpy_ms);
    if (b->update.masters) return zero_ok(); /* the norm is the same as of the other bf16 row */
    snprintf(what, sizeof(what), "norm %s", zero_dtype_name(b->update.dtype));
    print_row(what, size, value_bytes * elements, norm_ms, "read", (double)b->grads_bytes, read_ms);
    return zero_ok();
}

/* Bytes an element that the update reads and writes: g, p (or master), m, v; p, m, v (and master). */
static const struct Type {
    ZeroRounding rounding;
    const char* name;
    double update_bytes;
    size_t held_bytes;
} types[] = {
    {ZERO_ROUND_NONE, "fp32", 28.0, 16},
    {ZERO_ROUND_MASTERS, "bf16 + masters", 28.0, 16},
    {ZERO_ROUND_STOCHASTIC, "bf16 stochastic", 22.0, 12},
};

static void release(Bench* b) {
    cudaFree((void*)b->update.scalars);
    cudaFree(b->sums);
    cudaFree(b->arena);
    cudaFree(b->chunks);
    zero_layout_free(&b->layout);
}

static ZeroResult run_size(Bench* b, size_t n, int tensors) {
    char size[64];
    size_t free_bytes = 0, total_bytes = 0;
    double count = (double)n;
    snprintf(size, sizeof(size),
             count >= 1e9   ? "%.3gG"
             : count >= 1e6 ? "%.3gM"
                            : "%.3gK",
             count / (count >= 1e9   ? 1e9
                      : count >= 1e6 ? 1e6
                                     : 1e3));
    if (tensors > 1) snprintf(size + strlen(size), sizeof(size) - strlen(size), " in %d tensors", tensors);
    b->launches = n > 500000000 || n < 5000000 ? 2 : 10;
    b->samples = n < 5000000 ? 3 : 9; /* small ones are for trying this program on a CPU */
    for (const Type& type : types) {
        ZERO_TRY_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
        if (n * (type.held_bytes + 1) > free_bytes) {
            printf("update and norm %s|%s|did not fit: %.1f GB free|\n", type.name, size,
                   (double)free_bytes / 1e9);
            continue;
        }
        ZeroDtype dtype = type.rounding == ZERO_ROUND_NONE ? ZERO_FP32 : ZERO_BF16;
        ZeroResult result = make_layout(b, n, tensors, dtype);
        if (result.code == ZERO_OK) result = make_buffers(b, type.rounding);
        if (result.code == ZERO_OK) result = measure(b, type.name, size, type.update_bytes);
        if (result.code != ZERO_OK) return result;
        release(b);
    }
    return zero_ok();
}

static ZeroResult run(const std::vector<size_t>& sizes) {
    Bench b = {};
    ZERO_TRY_CUDA(cudaStreamCreate(&b.stream));
    ZERO_TRY_CUDA(cudaEventCreate(&b.start));
    ZERO_TRY_CUDA(cudaEventCreate(&b.stop));
    for (size_t i = 0; i < sizes.size(); i++) {
        ZERO_TRY(run_size(&b, sizes[i], 1));
        if (i == 1 && sizes[i] >= 1000000) ZERO_TRY(run_size(&b, sizes[i], 148));
    }
    return zero_ok();
}

int main(int argc, char** argv) {
    std::vector<size_t> sizes;
    for (int i = 1; i < argc; i++) {
        char* end = NULL;
        unsigned long long n = strtoull(argv[i], &end, 10);
        if (*end != '\0' || argv[i][0] == '-' || n < 1000 || n > 100000000000ull) {
            fprintf(stderr, "gpu_check: %s: a number of elements from 1000 to 1e11 is wanted\n", argv[i]);
            return 2;
        }
        sizes.push_back((size_t)n);
    }
    if (sizes.empty()) sizes = {10000000, 124000000, 1000000000};
    ZeroResult result = run(sizes);
    if (result.code != ZERO_OK) {
        fprintf(stderr, "gpu_check: %s\n", result.text);
        return 1;
    }
    return 0;
}
