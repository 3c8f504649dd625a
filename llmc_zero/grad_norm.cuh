/* llmc_zero/grad_norm.cuh - the global gradient norm, and what follows from it, on the device.

   Three launches on the compute stream, and between the second and the third one all-gather of two doubles a rank:
     1. zero_norm_partials: sums of squares over this rank's chunks, in fp64 from the first square
     2. zero_norm_sum:      their sum, and beside it one number of the caller's that travels along
     3. zero_norm_finish:   one thread adds the ranks' sums in rank order, decides the skip, advances t, and writes
                            the scalars that the update reads. No number has to visit the host.
   Each rank counts only what it owns, so padding and elements held twice never count, in every stage (cases B1, B2).
   A gradient that is not finite makes the sum not finite on every rank, so all skip together (D1); a square of an
   fp32 number cannot overflow fp64 (B4).

   defines: ZeroScalars, ZeroStepSettings, ZeroNorm, zero_norm_partials, zero_norm_sum, zero_norm_finish, zero_norm_again, zero_skip_launch,
            zero_set_t_launch
*/
#ifndef LLMC_ZERO_GRAD_NORM_CUH_INCLUDED
#define LLMC_ZERO_GRAD_NORM_CUH_INCLUDED

#include "elements.cuh"

/* Written by zero_norm_finish, read by the update; on the device. */
typedef struct ZeroScalars {
    uint64_t t;              /* updates applied so far, this step's included unless it is skipped */
    uint64_t skipped;        /* steps dropped because a gradient was not finite */
    uint64_t skipped_in_row; /* of these, how many have just followed one another */
    uint64_t skipped_before; /* the same before this step, for zero_norm_again */
    uint64_t dropped;        /* steps dropped by the caller (zero_skip) */
    double passenger_sum;    /* the caller's numbers added up in rank order */
    float norm;              /* global norm of the mean gradient, before clipping */
    float grad_factor;       /* 1/ranks, grad_scale and clip in one factor */
    float bias1_inverse;     /* 1 / (1 - beta1^t) */
    float bias2_sqrt;        /* sqrt(1 - beta2^t) */
    uint32_t noise_key[2];   /* of stochastic rounding in this step */
    int skip;                /* 1: the update leaves everything as it is */
    int votes;               /* ranks that gave a vote along with their sum */
} ZeroScalars;

/* What the finish needs besides the sums. */
typedef struct ZeroStepSettings {
    double beta1, beta2;
    double grad_scale; /* what the summed gradients lack: 1/ranks times the caller's grad_scale */
    double max_norm;   /* clip to this norm; 0: do not clip */
    uint64_t seed;     /* of stochastic rounding */
    int ranks;
    double norm_limit; /* a larger norm after clipping skips the step as if it were infinite; 0: none */
} ZeroStepSettings;

/* ------------------------------------------------------------------ kernels */

/* Adds the squares of kCount elements to as many sums: independent ones, so that they need not wait for each other. */
template <int kCount, typename Grad>
static __device__ __forceinline__ void zero_add_squares(const Grad* grads, double* sums) {
    float g[kCount];
    zero_load(grads, g);
    for (int k = 0; k < kCount; k++) sums[k] = __fma_rn((double)g[k], (double)g[k], sums[k]);
}

/* Block b adds up the chunks from b * chunks / blocks to (b + 1) * chunks / blocks. */
template <typename Grad>
static __global__ void __launch_bounds__(ZERO_BLOCK_THREADS)
    zero_norm_partials_kernel(const ZeroChunk* chunks, size_t chunks_count, const Grad* grads, int aligned,
                              double* partials) {
    size_t first = (size_t)blockIdx.x * chunks_count / gridDim.x;
    size_t last = ((size_t)blockIdx.x + 1) * chunks_count / gridDim.x;
    double sums[4] = {0.0, 0.0, 0.0, 0.0};
    for (size_t c = first; c < last; c++) {
        const ZeroChunk& chunk = chunks[c];
        const Grad* g = grads + chunk.flat_offset;
        uint32_t head, vectors;
        zero_split_chunk(chunk, aligned, &head, &vectors);
        for (uint32_t i = threadIdx.x; i < vectors; i += ZERO_BLOCK_THREADS)
            zero_add_squares<4>(g + head + 4 * (size_t)i, sums);
        for (uint32_t i = threadIdx.x; i < chunk.count - 4 * vectors; i += ZERO_BLOCK_THREADS)
            zero_add_squares<1>(g + (i < head ? i : i + 4 * vectors), sums);
    }
    const double sum = zero_block_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

template <typename Passenger>
static __global__ void __launch_bounds__(ZERO_BLOCK_THREADS)
    zero_norm_sum_kernel(const double* partials, size_t partials_count, const Passenger* passenger, int vote,
                         double* own) {
    double sum = 0.0;
    for (size_t i = threadIdx.x; i < partials_count; i += ZERO_BLOCK_THREADS) sum += partials[i];
    sum = zero_block_sum(sum);
    if (threadIdx.x == 0) {
        own[0] = copysign(sum, vote ? -1.0 : 1.0); /* a sum of squares needs no sign: it carries the vote */
        own[1] = passenger ? *passenger : 0.0;
    }
}

/* base^n by squaring, in double */
static __device__ __forceinline__ double zero_power(double base, uint64_t n) {
    double power = 1.0;
    for (; n > 0; n >>= 1, base *= base)
        if (n & 1) power *= base;
    return power;
}

/* Bias corrections and noise of update t, in double, by one thread. */
static __device__ __forceinline__ void zero_prepare_update(ZeroScalars* s, const ZeroStepSettings& settings) {
    uint64_t key = zero_mix(settings.seed ^ zero_mix(s->t * 0x9e3779b97f4a7c15ull));
    s->bias1_inverse = (float)(1.0 / (1.0 - zero_power(settings.beta1, s->t)));
    s->bias2_sqrt = (float)sqrt(1.0 - zero_power(settings.beta2, s->t));
    s->noise_key[0] = (uint32_t)key;
    s->noise_key[1] = (uint32_t)(key >> 32);
}

/* The norm, and the factor that the gradients get, from the ranks' sums: {sum of squares, passenger} of each. Clip
   factor as in PyTorch's clip_grad_norm_: min(1, max_norm / (norm + 1e-6)). Returns 1 if the step must be skipped. */
static __device__ __forceinline__ int zero_decide(const double* sums, const ZeroStepSettings& settings,
                                                  double* norm, double* factor, double* passenger) {
    const double limit = settings.norm_limit > 0.0 ? settings.norm_limit : 1.7976931348623157e308;
    double squares = 0.0;
    *passenger = 0.0;
    for (int r = 0; r < settings.ranks; r++) {
        squares += fabs(sums[2 * r]);
        *passenger += sums[2 * r + 1];
    }
    *norm = sqrt(squares) * fabs(settings.grad_scale);
    *factor = settings.grad_scale;
    if (settings.max_norm > 0.0 && settings.max_norm < *norm + 1e-6)
        *factor *= settings.max_norm / (*norm + 1e-6);
    return !(sqrt(squares) * fabs(*factor) <= limit) || /* true for NaN too */
           !(fabs(*factor) >= 1.1754944e-38);           /* would be flushed to 0 in fp32 */
}

template <typename Settings>
static __global__ void zero_norm_finish_kernel(const double* sums, const Settings settings, ZeroScalars* s) {
    double norm, factor, passenger;
    s->skip = zero_decide(sums, settings, &norm, &factor, &passenger);
    s->votes = 0;
    for (int r = 0; r < settings.ranks; r++) s->votes += signbit(sums[2 * r]) != 0;
    s->passenger_sum = passenger;
    s->norm = (float)norm;
    if (s->skip) {
        s->skipped++;
        s->skipped_in_row++;
        return;
    }
    s->grad_factor = (float)factor;
    s->skipped_before = s->skipped_in_row;
    s->skipped_in_row = 0;
    s->t++;
    zero_prepare_update(s, settings);
}

/* Decides once more, on other settings: this is update t. What was skipped stays skipped. */
template <typename Settings>
static __global__ void zero_norm_again_kernel(const double* sums, const Settings settings, uint64_t t,
                                              ZeroScalars* s) {
    double norm, factor, passenger;
    if (s->skip) return;
    s->skip = zero_decide(sums, settings, &norm, &factor, &passenger);
    if (s->skip) {
        s->skipped++;
        s->skipped_in_row = s->skipped_before + 1;
        s->t--;
        return;
    }
    s->grad_factor = (float)factor;
    s->t = t;
    zero_prepare_update(s, settings);
}

/* The caller drops the step that was just decided on. */
template <typename Scalars> static __global__ void zero_skip_kernel(Scalars* s) {
    if (s->skip) return; /* dropped already, and t not advanced */
    s->skip = 1;
    s->dropped++;
    s->t--;
}

template <typename Scalars> static __global__ void zero_set_t_kernel(Scalars* s, uint64_t t) { s->t = t; }

/* ------------------------------------------------------------------ checked entries */

/* One norm: what the three launches work on. All pointers are device memory of the caller's. */
typedef struct ZeroNorm {
    const ZeroChunk* chunks; /* this rank's chunk table */
    size_t chunks_count;
    const void* grads; /* flat, reduced in this rank's slices */
    ZeroDtype grads_dtype;
    double* partials; /* min(chunks_count, ZERO_NORM_BLOCKS_MAX) */
    double* own_sums; /* 2: this rank's sum of squares (negative: a vote) and passenger, for the all-gather */
    const double* all_sums; /* 2 * ranks, in rank order; with one rank the same as own_sums */
    ZeroScalars* scalars;
    size_t partials_given; /* so many are there already (reduce.cuh); 0: zero_norm_partials makes them */
} ZeroNorm;

/* Launches 1 on `stream`. A rank that owns padding only launches nothing. */
static inline ZeroResult zero_norm_partials(const ZeroNorm* norm, cudaStream_t stream) {
    cudaLaunchConfig_t config =
        zero_launch_config(zero_norm_blocks(norm->chunks_count), ZERO_BLOCK_THREADS, stream);
    int aligned = zero_is_aligned(norm->grads, zero_dtype_bytes(norm->grads_dtype));
    if (norm->chunks_count == 0) return zero_ok();
    if (norm->grads_dtype == ZERO_BF16) {
        ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_norm_partials_kernel<ZeroBf16>, norm->chunks,
                                         norm->chunks_count, (const ZeroBf16*)norm->grads, aligned,
                                         norm->partials));
    } else {
        ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_norm_partials_kernel<float>, norm->chunks,
                                         norm->chunks_count, (const float*)norm->grads, aligned,
                                         norm->partials));
    }
    return zero_ok();
}

/* Launch 2. passenger: one double on the device, or NULL. vote: 0 or 1, counted over the ranks in ZeroScalars.votes. */
static inline ZeroResult zero_norm_sum(const ZeroNorm* norm, const double* passenger, int vote,
                                       cudaStream_t stream) {
    cudaLaunchConfig_t config = zero_launch_config(1, ZERO_BLOCK_THREADS, stream);
    const size_t count = norm->partials_given ? norm->partials_given : zero_norm_blocks(norm->chunks_count);
    ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_norm_sum_kernel<double>, (const double*)norm->partials,
                                     count, passenger, vote, norm->own_sums));
    return zero_ok();
}

static inline ZeroResult zero_check_step_settings(const ZeroStepSettings* settings) {
    if (!(settings->grad_scale >= -3.4e38 && settings->grad_scale <= 3.4e38) || !(settings->max_norm >= 0.0))
        return zero_error(ZERO_ERROR_ARGUMENT,
                          "grad_scale is %g and max_norm %g; |grad_scale| <= 3.4e38 and max_norm "
                          ">= 0 are allowed",
                          settings->grad_scale, settings->max_norm);
    return zero_ok();
}

/* Launch 3, once all_sums has arrived. grad_scale must fit into fp32: good gradients times inf would ruin the params. */
static inline ZeroResult zero_norm_finish(const ZeroNorm* norm, const ZeroStepSettings* settings,
                                          cudaStream_t stream) {
    cudaLaunchConfig_t config = zero_launch_config(1, 1, stream);
    ZERO_TRY(zero_check_step_settings(settings));
    ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_norm_finish_kernel<ZeroStepSettings>, norm->all_sums,
                                     *settings, norm->scalars));
    return zero_ok();
}

/* Behind launch 3: the decision again, on other settings and as update number t (from 1). norm stays. */
static inline ZeroResult zero_norm_again(const ZeroNorm* norm, const ZeroStepSettings* settings, uint64_t t,
                                         cudaStream_t stream) {
    cudaLaunchConfig_t config = zero_launch_config(1, 1, stream);
    ZERO_TRY(zero_check_step_settings(settings));
    ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_norm_again_kernel<ZeroStepSettings>, norm->all_sums,
                                     *settings, t, norm->scalars));
    return zero_ok();
}

/* Drops the step, behind zero_norm_finish and before the update. */
static inline ZeroResult zero_skip_launch(ZeroScalars* scalars, cudaStream_t stream) {
    cudaLaunchConfig_t config = zero_launch_config(1, 1, stream);
    ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_skip_kernel<ZeroScalars>, scalars));
    return zero_ok();
}

/* Sets the number of updates applied so far (a resumed run). */
static inline ZeroResult zero_set_t_launch(ZeroScalars* scalars, uint64_t t, cudaStream_t stream) {
    cudaLaunchConfig_t config = zero_launch_config(1, 1, stream);
    ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_set_t_kernel<ZeroScalars>, scalars, t));
    return zero_ok();
}

#endif /* LLMC_ZERO_GRAD_NORM_CUH_INCLUDED */
