/* llmc_zero/grad_norm.cuh - the global gradient norm, and what follows from it, on the device.

   Three launches on the compute stream, and between the second and the third one all-reduce of integers:
     1. zero_norm_squares:  squares over this rank's chunks, in fp64 from the first square, into an exact sum
     2. zero_norm_share:    that sum and the loss's, with carries, for the ranks to add up
     3. zero_norm_finish:   one thread rounds both sums, decides the skip, advances t, and writes the scalars that the
                            update reads. No number has to visit the host.
   Each rank counts only what it owns, so padding and elements held twice never count, in every stage (cases B1, B2). Frozen
   segments (lr_factor 0) count nowhere: their gradients are not read.

   The norm does not depend on ranks, stage or buckets: N1: squares are added up in cells, the elements of one segment in 64
   neighbouring places of the flat buffer, in one order. Slices, pieces and chunks start and end where cells do (L3, L5), so
   that a cell is one thread's whoever owns it. N2: cells are added exactly (exact_sum.cuh), in any order. (With
   offsets_given, as long as flat_offset modulo 64 stays what it is.)
   A gradient that is not finite makes the norm inf on every rank, so all skip together (D1); a square of an fp32 number
   cannot overflow fp64 (B4).

   defines: ZeroScalars, ZeroStepSettings, ZeroCells, zero_walk_chunk, ZeroNorm, zero_norm_blocks, zero_norm_squares,
            zero_add_loss_launch, zero_norm_share, zero_norm_finish, zero_norm_again, zero_skip_launch, zero_set_t_launch, ZeroSkip,
            zero_skip_text
*/
#ifndef LLMC_ZERO_GRAD_NORM_CUH_INCLUDED
#define LLMC_ZERO_GRAD_NORM_CUH_INCLUDED

#include "elements.cuh"
#include "exact_sum.cuh"

#define ZERO_CELL_PARTS (ZERO_CELL_COUNT / 8)
#define ZERO_CHUNK_CELLS (ZERO_CHUNK_MAX_COUNT / ZERO_CELL_COUNT)
#define ZERO_WARPS (ZERO_BLOCK_THREADS / 32)
#define ZERO_NORM_BLOCKS 528 /* fill a GPU: four on each multiprocessor of an H100 */

/* Written by zero_norm_finish, read by the update; on the device. */
typedef struct ZeroScalars {
    uint64_t t;              /* updates applied so far, this step's included unless it is skipped */
    uint64_t skipped;        /* steps dropped because the gradients or their norm did not fit into fp32 */
    uint64_t skipped_in_row; /* of these, how many have just followed one another */
    uint64_t skipped_before; /* the same before this step, for zero_norm_again */
    uint64_t dropped;        /* steps dropped by the caller (zero_skip, zero_drop) */
    double loss_sum;         /* of what zero_add_loss was given, exact, rounded once */
    float norm;              /* global norm of the mean gradient, before clipping */
    float grad_factor;       /* the mean's and the caller's scale, and clip, in one factor */
    int grad_small;          /* 1: that factor is less than fp32's normal numbers, and given times 2^126 */
    float bias1_inverse;     /* 1 / (1 - beta1^t) */
    float bias2_sqrt;        /* sqrt(1 - beta2^t) */
    uint32_t noise_key[2];   /* of stochastic rounding in this step */
    int skip;                /* ZeroSkip; not 0: the update leaves everything as it is */
    int votes;               /* ranks that gave a vote along with their sum */
    int drops;               /* ranks that dropped the step */
} ZeroScalars;

/* Why a step changes nothing. */
typedef enum ZeroSkip {
    ZERO_SKIP_NONE = 0,
    ZERO_SKIP_NOT_FINITE, /* a gradient is inf or NaN */
    ZERO_SKIP_TOO_LARGE,  /* all are finite, but their norm, after clipping, is above norm_limit */
    ZERO_SKIP_TOO_SMALL,  /* after clipping they are less than fp32's normal numbers */
    ZERO_SKIP_CALLER,     /* zero_skip */
    ZERO_SKIP_DROPPED     /* zero_drop, on some rank */
} ZeroSkip;

static inline const char* zero_skip_text(int skip) {
    switch (skip) {
    case ZERO_SKIP_NONE: return "nothing was wrong";
    case ZERO_SKIP_NOT_FINITE: return "a gradient is not finite";
    case ZERO_SKIP_TOO_LARGE: return "the norm of the gradients is too large";
    case ZERO_SKIP_TOO_SMALL: return "the clipped gradients are too small for fp32";
    case ZERO_SKIP_CALLER: return "the program dropped the step";
    default: return "a rank dropped the step";
    }
}

/* What the finish needs besides the sums. */
typedef struct ZeroStepSettings {
    double beta1, beta2;
    double grad_scale; /* what the summed gradients lack: see zero_begin */
    double max_norm;   /* clip to this norm; 0: do not clip */
    uint64_t seed;     /* of stochastic rounding */
    double norm_limit; /* a larger norm after clipping skips the step; 0: none */
} ZeroStepSettings;

/* ------------------------------------------------------------------ kernels */

/* What ranks add up in a step: exact sums of squares and of losses, with how many of them were not finite, votes and drops. */
enum {
    ZERO_SUM_SQUARES = 0,
    ZERO_SUM_SQUARES_BAD = ZERO_EXACT_WORDS,
    ZERO_SUM_LOSSES,
    ZERO_SUM_LOSSES_BAD = ZERO_SUM_LOSSES + ZERO_EXACT_WORDS,
    ZERO_SUM_VOTES,
    ZERO_SUM_DROPS,
    ZERO_SUM_WORDS
};

/* ------------------------------------------------------------------ squares, cell by cell */

/* Shared memory of a warp: the parts of a chunk's cells, those of the chunk before it, and what the warp adds to the squares.
   Parts of one cell lie in one column, so that neither writing nor reading them meets in banks. */
typedef struct ZeroCells {
    double parts[2][ZERO_CELL_PARTS][ZERO_CHUNK_CELLS + 1];
    uint64_t words[ZERO_EXACT_WORDS + 1];
} ZeroCells;

/* The squares of eight elements in a row, in one order for all that sum squares; 0 where an element is missing. */
static __device__ __forceinline__ double zero_part_of_cell(const float (&x)[8]) {
    double s[4];
    for (int k = 0; k < 4; k++) s[k] = __dmul_rn((double)x[k], (double)x[k]);
    for (int k = 0; k < 4; k++) s[k] = __fma_rn((double)x[k + 4], (double)x[k + 4], s[k]);
    return (s[0] + s[1]) + (s[2] + s[3]);
}

/* A warp takes its `turn`-th chunk, in eights of the cells' grid: values(i, x) fills x, float[8] or float[1], from element i of
   the chunk on. With cells, their squares are added to the warp's words; one sync a turn does, because the next turn writes
   the other parts. */
template <typename Values>
static __device__ __forceinline__ void zero_walk_chunk(const ZeroChunk& chunk, int aligned, ZeroCells* cells,
                                                       int turn, const Values& values) {
    const uint32_t before = (uint32_t)(chunk.flat_offset % ZERO_CELL_COUNT), end = before + chunk.count;
    const uint32_t cells_count = (end + ZERO_CELL_COUNT - 1) / ZERO_CELL_COUNT, lane = threadIdx.x % 32;
    double(*parts)[ZERO_CHUNK_CELLS + 1] = cells ? cells->parts[turn % 2] : NULL;
    uint32_t p = lane;
    for (; aligned && before == 0 && 8 * (p + 32) + 8 <= end;
         p += 64) { /* two at once: more loads on their way */
        float x[8] = {}, y[8] = {};
        values(8 * p, x);
        values(8 * (p + 32), y);
        if (!parts) continue;
        parts[p % ZERO_CELL_PARTS][p / ZERO_CELL_PARTS] = zero_part_of_cell(x);
        parts[p % ZERO_CELL_PARTS][(p + 32) / ZERO_CELL_PARTS] = zero_part_of_cell(y);
    }
    for (; p < cells_count * ZERO_CELL_PARTS; p += 32) {
        float x[8] = {};
        if (aligned && 8 * p >= before && 8 * p + 8 <= end) {
            values(8 * p - before, x);
        } else {
            for (uint32_t k = 0; k < 8; k++) {
                float one[1] = {};
                if (8 * p + k < before || 8 * p + k >= end) continue;
                values(8 * p + k - before, one);
                x[k] = one[0];
            }
        }
        if (parts) parts[p % ZERO_CELL_PARTS][p / ZERO_CELL_PARTS] = zero_part_of_cell(x);
    }
    if (!parts) return;
    __syncwarp(); /* and of the turn before, every lane has read its cells before it came here */
    for (uint32_t c = lane; c < cells_count; c += 32) {
        const double sum = ((parts[0][c] + parts[1][c]) + (parts[2][c] + parts[3][c])) +
                           ((parts[4][c] + parts[5][c]) + (parts[6][c] + parts[7][c]));
        if (!zero_exact_add_shared(cells->words, sum))
            atomicAdd((unsigned long long*)&cells->words[ZERO_SUM_SQUARES_BAD], 1ull);
    }
}

/* Every lane of a warp, before its chunks (their first sync orders this) and after them: sums gets the words of all warps. */
static __device__ __forceinline__ void zero_cells_begin(ZeroCells* cells) {
    if (threadIdx.x % 32 <= ZERO_EXACT_WORDS) cells->words[threadIdx.x % 32] = 0;
}
static __device__ __forceinline__ void zero_cells_end(const ZeroCells* cells, uint64_t* sums) {
    const uint32_t word = threadIdx.x % 32;
    __syncwarp();
    if (word <= ZERO_EXACT_WORDS && cells->words[word] != 0)
        atomicAdd((unsigned long long*)&sums[ZERO_SUM_SQUARES + word],
                  (unsigned long long)cells->words[word]);
}

/* The chunks of a warp: every ZERO_WARPS-th from where its block begins: b * chunks / blocks to (b + 1) * chunks / blocks. */
template <typename Grad>
static __global__ void __launch_bounds__(ZERO_BLOCK_THREADS, 4)
    zero_norm_squares_kernel(const ZeroChunk* chunks, size_t chunks_count, const Grad* grads, int aligned,
                             uint64_t* sums) {
    __shared__ ZeroCells cells[ZERO_WARPS];
    ZeroCells* own = &cells[threadIdx.x / 32];
    const size_t last = ((size_t)blockIdx.x + 1) * chunks_count / gridDim.x;
    size_t c = (size_t)blockIdx.x * chunks_count / gridDim.x + threadIdx.x / 32;
    zero_cells_begin(own);
    for (int turn = 0; c < last; c += ZERO_WARPS) {
        const Grad* from = grads + chunks[c].flat_offset;
        if (chunks[c].lr_factor == 0.0f) continue; /* frozen: what lies there is no gradient */
        zero_walk_chunk(chunks[c], aligned, own, turn++,
                        [from](uint32_t i, auto& x) { zero_load(from + i, x); });
    }
    zero_cells_end(own, sums);
}

/* ------------------------------------------------------------------ the step's numbers, one thread */

/* A loss goes into the sums exactly. */
template <typename Loss> static __global__ void zero_add_loss_kernel(const Loss* loss, uint64_t* sums) {
    if (!zero_exact_add(sums + ZERO_SUM_LOSSES, (double)*loss)) sums[ZERO_SUM_LOSSES_BAD]++;
}

/* This rank's sums, ready to be added up over ranks, and from zero for the next step. */
template <typename Words>
static __global__ void zero_norm_share_kernel(Words* own, int vote, int drop, Words* sums) {
    for (int i = 0; i < ZERO_SUM_WORDS; i++) {
        sums[i] = own[i];
        own[i] = 0;
    }
    zero_exact_carry(sums + ZERO_SUM_SQUARES);
    zero_exact_carry(sums + ZERO_SUM_LOSSES);
    sums[ZERO_SUM_VOTES] = vote != 0;
    sums[ZERO_SUM_DROPS] = drop != 0;
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

/* The norm, and the factor that the gradients get, from the sums of all ranks. Clip factor as in PyTorch's
   clip_grad_norm_: min(1, max_norm / (norm + 1e-6)). */
static __device__ __forceinline__ ZeroSkip zero_decide(const uint64_t* sums, const ZeroStepSettings& settings,
                                                       double* norm, double* factor) {
    const double limit = settings.norm_limit > 0.0 ? settings.norm_limit : 1.7976931348623157e308;
    const double root =
        sums[ZERO_SUM_SQUARES_BAD] ? INFINITY : sqrt(zero_exact_value(sums + ZERO_SUM_SQUARES));
    const double least = 0x1p-126; /* fp32's smallest normal number */
    *norm = root * fabs(settings.grad_scale);
    *factor = settings.grad_scale;
    if (settings.max_norm > 0.0 && settings.max_norm < *norm + 1e-6)
        *factor *= settings.max_norm / (*norm + 1e-6);
    if (sums[ZERO_SUM_DROPS]) return ZERO_SKIP_DROPPED;
    if (sums[ZERO_SUM_SQUARES_BAD]) return ZERO_SKIP_NOT_FINITE;
    if (!(root * fabs(*factor) <= limit)) return ZERO_SKIP_TOO_LARGE;
    if (fabs(*factor) < least && (root * fabs(*factor) < least || fabs(*factor) < least * least))
        return root == 0.0 ? ZERO_SKIP_NONE : ZERO_SKIP_TOO_SMALL;
    return ZERO_SKIP_NONE;
}

/* Makes what was decided the step's: t is the number of its update, and what s->t is if there is one. */
static __device__ __forceinline__ void zero_settle_step(ZeroSkip skip, double factor, uint64_t t,
                                                        const ZeroStepSettings& settings, ZeroScalars* s) {
    s->skip = skip;
    s->skipped_in_row = skip == ZERO_SKIP_NONE ? 0 : s->skipped_before + (skip != ZERO_SKIP_DROPPED);
    if (skip == ZERO_SKIP_DROPPED)
        s->dropped++;
    else if (skip != ZERO_SKIP_NONE)
        s->skipped++;
    if (skip != ZERO_SKIP_NONE) return;
    s->grad_small = fabs(factor) < 0x1p-126;
    s->grad_factor = (float)(s->grad_small ? factor * 0x1p126 : factor);
    s->t = t;
    zero_prepare_update(s, settings);
}

template <typename Settings>
static __global__ void zero_norm_finish_kernel(const uint64_t* sums, const Settings settings,
                                               ZeroScalars* s) {
    double norm = 0.0, factor = 0.0;
    const ZeroSkip skip = zero_decide(sums, settings, &norm, &factor);
    s->votes = (int)sums[ZERO_SUM_VOTES];
    s->drops = (int)sums[ZERO_SUM_DROPS];
    s->loss_sum = sums[ZERO_SUM_LOSSES_BAD] ? INFINITY : zero_exact_value(sums + ZERO_SUM_LOSSES);
    s->norm = norm <= 3.4028234663852886e38 || skip == ZERO_SKIP_NOT_FINITE ? (float)norm : 3.4028235e38f;
    if (skip == ZERO_SKIP_DROPPED) s->loss_sum = s->norm = NAN; /* of a part of the step */
    s->skipped_before = s->skipped_in_row;
    zero_settle_step(skip, factor, s->t + 1, settings, s);
}

/* Decides once more, on other settings: this is update t. What no settings can make good stays skipped. */
template <typename Settings>
static __global__ void zero_norm_again_kernel(const uint64_t* sums, const Settings settings, uint64_t t,
                                              ZeroScalars* s) {
    double norm = 0.0, factor = 0.0;
    ZeroSkip skip;
    if (s->skip == ZERO_SKIP_TOO_LARGE || s->skip == ZERO_SKIP_TOO_SMALL)
        s->skipped--; /* as if nothing had been decided yet */
    else if (s->skip == ZERO_SKIP_NONE)
        s->t--;
    else
        return;
    skip = zero_decide(sums, settings, &norm, &factor);
    zero_settle_step(skip, factor, t, settings, s);
}

/* The caller drops the step that was just decided on. */
template <typename Scalars> static __global__ void zero_skip_kernel(Scalars* s) {
    if (s->skip) return; /* dropped already, and t not advanced */
    s->skip = ZERO_SKIP_CALLER;
    s->dropped++;
    s->t--;
}

template <typename Scalars> static __global__ void zero_set_t_kernel(Scalars* s, uint64_t t) { s->t = t; }

/* ------------------------------------------------------------------ checked entries */

/* One norm: what the launches work on. All pointers are device memory of the caller's. */
typedef struct ZeroNorm {
    const ZeroChunk* chunks; /* this rank's chunk table */
    size_t chunks_count;
    const void* grads; /* flat, reduced in this rank's slices */
    ZeroDtype grads_dtype;
    uint64_t* own_sums; /* ZERO_SUM_WORDS: this rank's, growing during a step; zero before the first one */
    uint64_t* sums;     /* ZERO_SUM_WORDS: to be added up over the ranks between launches 2 and 3 */
    ZeroScalars* scalars;
} ZeroNorm;

/* Blocks for so many chunks: a chunk a warp while that fills a GPU, then up to four, for starting a warp has its price. */
static inline size_t zero_norm_blocks(size_t chunks_count) {
    const size_t one = (chunks_count + ZERO_WARPS - 1) / ZERO_WARPS, four = (one + 3) / 4;
    if (one < ZERO_NORM_BLOCKS) return one;
    return four < ZERO_NORM_BLOCKS ? ZERO_NORM_BLOCKS : four;
}

/* Launches 1 on `stream`: adds this rank's squares to own_sums. A rank that owns padding only launches nothing. */
static inline ZeroResult zero_norm_squares(const ZeroNorm* norm, cudaStream_t stream) {
    cudaLaunchConfig_t config =
        zero_launch_config(zero_norm_blocks(norm->chunks_count), ZERO_BLOCK_THREADS, stream);
    const int aligned = zero_is_aligned_16(norm->grads);
    if (norm->chunks_count == 0) return zero_ok();
    if (norm->grads_dtype == ZERO_BF16) {
        ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_norm_squares_kernel<ZeroBf16>, norm->chunks,
                                         norm->chunks_count, (const ZeroBf16*)norm->grads, aligned,
                                         norm->own_sums));
    } else {
        ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_norm_squares_kernel<float>, norm->chunks,
                                         norm->chunks_count, (const float*)norm->grads, aligned,
                                         norm->own_sums));
    }
    return zero_ok();
}

/* Adds one number on the device to own_sums' losses, whenever the stream gets there in a step. */
static inline ZeroResult zero_add_loss_launch(const double* loss, uint64_t* own_sums, cudaStream_t stream) {
    cudaLaunchConfig_t config = zero_launch_config(1, 1, stream);
    ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_add_loss_kernel<double>, loss, own_sums));
    return zero_ok();
}

/* Launch 2. vote, drop: 0 or 1, counted over the ranks in ZeroScalars.votes and .drops. */
static inline ZeroResult zero_norm_share(const ZeroNorm* norm, int vote, int drop, cudaStream_t stream) {
    cudaLaunchConfig_t config = zero_launch_config(1, 1, stream);
    ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_norm_share_kernel<uint64_t>, norm->own_sums, vote, drop,
                                     norm->sums));
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

/* Launch 3, once sums holds those of all ranks. grad_scale must fit into fp32: good gradients times inf would ruin the params. */
static inline ZeroResult zero_norm_finish(const ZeroNorm* norm, const ZeroStepSettings* settings,
                                          cudaStream_t stream) {
    cudaLaunchConfig_t config = zero_launch_config(1, 1, stream);
    ZERO_TRY(zero_check_step_settings(settings));
    ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_norm_finish_kernel<ZeroStepSettings>,
                                     (const uint64_t*)norm->sums, *settings, norm->scalars));
    return zero_ok();
}

/* Behind launch 3: the decision again, on other settings and as update number t (from 1). norm stays. */
static inline ZeroResult zero_norm_again(const ZeroNorm* norm, const ZeroStepSettings* settings, uint64_t t,
                                         cudaStream_t stream) {
    cudaLaunchConfig_t config = zero_launch_config(1, 1, stream);
    ZERO_TRY(zero_check_step_settings(settings));
    ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_norm_again_kernel<ZeroStepSettings>,
                                     (const uint64_t*)norm->sums, *settings, t, norm->scalars));
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
