/* llmc_zero/adamw.cuh - the fused update: AdamW, Adam (L2) and SGD with momentum, in one launch over a slice.

   params fp32; or bf16 with fp32 masters; or bf16 alone with stochastic rounding. m, v and masters are fp32. One
   block of 256 threads takes one chunk; the chunk carries its segment's lr and decay factors, so that one launch
   serves however many tensors. Everything that depends on the step (t, clip, 1/ranks, skip) is read from
   ZeroScalars on the device.

   The formulas stand once each, below, written with the rounding intrinsics (__fmaf_rn, __fmul_rn, __fdiv_rn,
   __fsqrt_rn): a host framework compiles with --use_fast_math, and the vector and the scalar path must not contract
   differently. What that flag still changes: results below 1.2e-38 become 0. Source: PyTorch 2.x torch.optim.AdamW, Adam, SGD, single-tensor path; eps outside the root.

   defines: ZeroRounding, ZeroHyper, ZeroUpdate, zero_hyper, zero_update_launch, zero_round_stochastic, zero_noise
*/
#ifndef LLMC_ZERO_ADAMW_CUH_INCLUDED
#define LLMC_ZERO_ADAMW_CUH_INCLUDED

#include "grad_norm.cuh"

typedef enum ZeroRounding {
    ZERO_ROUND_NONE = 0,  /* fp32 params are their own masters */
    ZERO_ROUND_MASTERS,   /* bf16 params, rounded to nearest from fp32 masters */
    ZERO_ROUND_STOCHASTIC /* bf16 params without masters */
} ZeroRounding;

/* Settings of an update, as the kernel wants them. */
typedef struct ZeroHyper {
    float lr, weight_decay, eps, momentum;
    float beta1_complement, beta2_complement; /* 1 - beta, computed in double */
} ZeroHyper;

static inline ZeroHyper zero_hyper(double lr, double beta1, double beta2, double eps, double weight_decay,
                                   double momentum) {
    ZeroHyper hyper;
    hyper.lr = (float)lr;
    hyper.weight_decay = (float)weight_decay;
    hyper.eps = (float)eps;
    hyper.momentum = (float)momentum;
    hyper.beta1_complement = (float)(1.0 - beta1);
    hyper.beta2_complement = (float)(1.0 - beta2);
    return hyper;
}

/* One update. All pointers are device memory of the caller's, alive until the launch has run. */
typedef struct ZeroUpdate {
    const ZeroChunk* chunks; /* sorted by bucket */
    void* params;            /* flat, or with params_sharded a shard */
    const void* grads;       /* summed over ranks; see grads_fp32, grads_sharded, grads_first */
    float* masters;          /* indexed by state_offset; NULL without */
    float* exp_avg;          /* m; NULL for SGD without momentum */
    float* exp_avg_sq;       /* v; NULL for SGD */
    const ZeroScalars* scalars;
    ZeroDtype dtype;
    ZeroAlgorithm algorithm;
    int params_sharded; /* 1: params are indexed by state_offset */
    int grads_fp32;     /* 1: grads are fp32 whatever the params' type */
    int grads_sharded;  /* 1: grads are indexed by state_offset, 0: by flat_offset - grads_first */
    size_t grads_first; /* a multiple of four */
} ZeroUpdate;

/* ------------------------------------------------------------------ formulas, one element */

/* What is the same for all elements of a chunk. */
typedef struct ZeroFactors {
    float grad_factor;
    float
        grad_prescale; /* 1, or 2^-126 beside a factor that is given times 2^126: what two factors make of large gradients
                            is a normal number, and of others 0, as one would */
    float decay;     /* AdamW: lr * decay, off p; Adam and SGD: the L2 factor, into g */
    float step_size; /* Adam(W): lr / (1 - beta1^t); SGD: lr */
    float bias2_sqrt;
} ZeroFactors;

/* a + w * (b - a), as torch.lerp: from the nearer end, so that w = 1 gives b whatever a was (beta = 0) */
static __device__ __forceinline__ float zero_lerp(float a, float b, float w) {
    const float difference = __fsub_rn(b, a);
    return w < 0.5f ? __fmaf_rn(w, difference, a) : __fmaf_rn(-__fsub_rn(1.0f, w), difference, b);
}

/* p -= (lr/bc1) * m / (sqrt(v)/sqrt(bc2) + eps), after m and v took g in. `g` is scaled (and has its L2 term). */
static __device__ __forceinline__ float zero_adam_step(float p, float g, float* m, float* v,
                                                       const ZeroHyper& h, const ZeroFactors& f) {
    float denominator;
    *m = zero_lerp(*m, g, h.beta1_complement);
    *v = zero_lerp(*v, __fmul_rn(g, g), h.beta2_complement);
    denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(*v), f.bias2_sqrt), h.eps);
    return __fmaf_rn(-f.step_size, __fdiv_rn(*m, denominator), p);
}

/* The mean gradient, clipped. */
static __device__ __forceinline__ float zero_scaled(float g, const ZeroFactors& f) {
    return __fmul_rn(__fmul_rn(g, f.grad_prescale), f.grad_factor);
}

/* AdamW: the decay comes off p, with lr (Loshchilov and Hutter 2019). */
static __device__ __forceinline__ float zero_adamw(float p, float g, float* m, float* v, const ZeroHyper& h,
                                                   const ZeroFactors& f) {
    return zero_adam_step(__fmaf_rn(-f.decay, p, p), zero_scaled(g, f), m, v, h, f);
}

/* Adam: the decay is part of the gradient (L2). */
static __device__ __forceinline__ float zero_adam(float p, float g, float* m, float* v, const ZeroHyper& h,
                                                  const ZeroFactors& f) {
    return zero_adam_step(p, __fmaf_rn(f.decay, p, zero_scaled(g, f)), m, v, h, f);
}

/* SGD: m = mu * m + g, p -= lr * m (no dampening, no Nesterov; L2 decay). */
static __device__ __forceinline__ float zero_sgd(float p, float g, float* m, const ZeroHyper& h,
                                                 const ZeroFactors& f) {
    *m = __fmaf_rn(h.momentum, *m, __fmaf_rn(f.decay, p, zero_scaled(g, f)));
    return __fmaf_rn(-f.step_size, *m, p);
}

/* Noise for one element in one step: a bijection of the model index's low half (the mixer "lowbias32", C. Wellons
   2018), keyed by the step and by the index's high half. The same for any number of ranks, stage and bucket size. */
static __device__ __forceinline__ uint32_t zero_noise(const uint32_t* key, uint64_t model_index) {
    uint32_t x = (uint32_t)model_index + key[0];
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x ^= key[1] + (uint32_t)(model_index >> 32) * 0x9e3779b9u;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

/* fp32 to bf16, up with the probability of the part cut off: mean value = x. Not finite: to nearest. */
static __device__ __forceinline__ uint32_t zero_round_stochastic(float x, uint32_t noise) {
    uint32_t bits = __float_as_uint(x);
    return (bits & 0x7f800000u) == 0x7f800000u ? zero_to_bf16(x) : (bits + (noise & 0xffffu)) >> 16;
}

/* ------------------------------------------------------------------ kernel */

static __device__ __forceinline__ ZeroFactors zero_factors(const ZeroChunk& chunk, const ZeroScalars& s,
                                                           const ZeroHyper& h, ZeroAlgorithm algorithm) {
    float lr = __fmul_rn(h.lr, chunk.lr_factor);
    float decay = __fmul_rn(h.weight_decay, chunk.decay_factor);
    ZeroFactors f;
    f.grad_factor = s.grad_factor;
    f.grad_prescale = s.grad_small ? 0x1p-126f : 1.0f;
    f.decay = algorithm == ZERO_ADAMW ? __fmul_rn(lr, decay) : decay;
    f.step_size = algorithm == ZERO_SGD ? lr : __fmul_rn(lr, s.bias1_inverse);
    f.bias2_sqrt = s.bias2_sqrt;
    return f;
}

template <int kCount>
static __device__ __forceinline__ void zero_store_rounded(float* params, const float (&p)[kCount],
                                                          ZeroRounding, const ZeroScalars&, uint64_t) {
    zero_store(params, p);
}
template <int kCount>
static __device__ __forceinline__ void zero_store_rounded(ZeroBf16* params, const float (&p)[kCount],
                                                          ZeroRounding rounding, const ZeroScalars& s,
                                                          uint64_t model_index) {
    uint32_t bits[kCount];
    for (int k = 0; k < kCount; k++)
        bits[k] = rounding == ZERO_ROUND_STOCHASTIC
                      ? zero_round_stochastic(p[k], zero_noise(s.noise_key, model_index + (uint64_t)k))
                      : zero_to_bf16(p[k]);
    zero_store_bits(params, bits);
}

/* kCount elements from element i of the chunk on */
template <int kCount, ZeroAlgorithm kAlgorithm, ZeroRounding kRounding, typename Param, typename Grad>
static __device__ __forceinline__ void zero_update_elements(const ZeroUpdate& u, const ZeroChunk& chunk,
                                                            const ZeroScalars& s, const ZeroHyper& h,
                                                            const ZeroFactors& f, uint32_t i) {
    const size_t flat = chunk.flat_offset + i, state = chunk.state_offset + i;
    const bool has_m = kAlgorithm != ZERO_SGD || u.exp_avg != NULL;
    Param* params = (Param*)u.params + (u.params_sharded ? state : flat);
    float p[kCount], g[kCount], m[kCount] = {}, v[kCount] = {};
    zero_load((const Grad*)u.grads + (u.grads_sharded ? state : flat - u.grads_first), g);
    if constexpr (kRounding == ZERO_ROUND_MASTERS)
        zero_load(u.masters + state, p);
    else
        zero_load(params, p);
    if (has_m) zero_load(u.exp_avg + state, m);
    if constexpr (kAlgorithm != ZERO_SGD) zero_load(u.exp_avg_sq + state, v);
    for (int k = 0; k < kCount; k++) {
        if constexpr (kAlgorithm == ZERO_ADAMW) p[k] = zero_adamw(p[k], g[k], &m[k], &v[k], h, f);
        if constexpr (kAlgorithm == ZERO_ADAM) p[k] = zero_adam(p[k], g[k], &m[k], &v[k], h, f);
        if constexpr (kAlgorithm == ZERO_SGD) p[k] = zero_sgd(p[k], g[k], &m[k], h, f);
    }
    if (has_m) zero_store(u.exp_avg + state, m);
    if constexpr (kAlgorithm != ZERO_SGD) zero_store(u.exp_avg_sq + state, v);
    if constexpr (kRounding == ZERO_ROUND_MASTERS) zero_store(u.masters + state, p);
    zero_store_rounded<kCount>(params, p, kRounding, s, chunk.model_offset + i);
}

template <ZeroAlgorithm kAlgorithm, ZeroRounding kRounding, typename Param, typename Grad>
static __global__ void __launch_bounds__(ZERO_BLOCK_THREADS)
    zero_update_kernel(const ZeroUpdate u, const ZeroHyper h, size_t chunk_first, int aligned) {
    const ZeroScalars& s = *u.scalars;
    if (s.skip) return;
    const ZeroChunk& chunk = u.chunks[chunk_first + blockIdx.x];
    if (chunk.lr_factor == 0.0f) return; /* frozen: state and params stay to the bit */
    const ZeroFactors f = zero_factors(chunk, s, h, kAlgorithm);
    uint32_t head, vectors;
    zero_split_chunk(chunk, aligned, &head, &vectors);
    for (uint32_t i = threadIdx.x; i < vectors; i += ZERO_BLOCK_THREADS)
        zero_update_elements<4, kAlgorithm, kRounding, Param, Grad>(u, chunk, s, h, f, head + 4 * i);
    for (uint32_t i = threadIdx.x; i < chunk.count - 4 * vectors; i += ZERO_BLOCK_THREADS)
        zero_update_elements<1, kAlgorithm, kRounding, Param, Grad>(u, chunk, s, h, f,
                                                                    i < head ? i : i + 4 * vectors);
}

/* ------------------------------------------------------------------ launcher, checked entry */

template <ZeroAlgorithm kAlgorithm, ZeroRounding kRounding, typename Param>
static inline ZeroResult zero_update_dispatch_grads(const ZeroUpdate& u, const ZeroHyper& hyper,
                                                    size_t chunk_first, cudaLaunchConfig_t* config,
                                                    int aligned) {
    if (u.grads_fp32 || u.dtype == ZERO_FP32) {
        ZERO_TRY_CUDA(cudaLaunchKernelEx(config, zero_update_kernel<kAlgorithm, kRounding, Param, float>, u,
                                         hyper, chunk_first, aligned));
    } else {
        ZERO_TRY_CUDA(cudaLaunchKernelEx(config, zero_update_kernel<kAlgorithm, kRounding, Param, Param>, u,
                                         hyper, chunk_first, aligned));
    }
    return zero_ok();
}

template <ZeroAlgorithm kAlgorithm>
static inline ZeroResult zero_update_dispatch(const ZeroUpdate& u, const ZeroHyper& hyper, size_t chunk_first,
                                              cudaLaunchConfig_t* config, int aligned) {
    if (u.dtype == ZERO_FP32)
        return zero_update_dispatch_grads<kAlgorithm, ZERO_ROUND_NONE, float>(u, hyper, chunk_first, config,
                                                                              aligned);
    if (u.masters)
        return zero_update_dispatch_grads<kAlgorithm, ZERO_ROUND_MASTERS, ZeroBf16>(u, hyper, chunk_first,
                                                                                    config, aligned);
    return zero_update_dispatch_grads<kAlgorithm, ZERO_ROUND_STOCHASTIC, ZeroBf16>(u, hyper, chunk_first,
                                                                                   config, aligned);
}

/* Updates chunks [chunk_first, chunk_first + chunks_count) on `stream`: one launch; none for no chunks. */
static inline ZeroResult zero_update_launch(const ZeroUpdate* u, const ZeroHyper* hyper, size_t chunk_first,
                                            size_t chunks_count, cudaStream_t stream) {
    cudaLaunchConfig_t config = zero_launch_config(chunks_count, ZERO_BLOCK_THREADS, stream);
    const size_t bytes = zero_dtype_bytes(u->dtype);
    int aligned = zero_is_aligned(u->params, bytes) &&
                  zero_is_aligned(u->grads, u->grads_fp32 ? sizeof(float) : bytes) &&
                  u->grads_first % 4 == 0 && zero_is_aligned(u->masters, 4) &&
                  zero_is_aligned(u->exp_avg, 4) && zero_is_aligned(u->exp_avg_sq, 4);
    if (chunks_count > 0x7fffffffu)
        return zero_error(ZERO_ERROR_ARGUMENT,
                          "%zu chunks in one launch; a grid has at most 2147483647 blocks: use "
                          "smaller buckets",
                          chunks_count);
    if (u->algorithm != ZERO_SGD && (!u->exp_avg || !u->exp_avg_sq))
        return zero_error(ZERO_ERROR_ARGUMENT, "Adam and AdamW need exp_avg and exp_avg_sq");
    if (u->algorithm == ZERO_SGD && hyper->momentum != 0.0f && !u->exp_avg)
        return zero_error(ZERO_ERROR_ARGUMENT, "SGD with momentum %g needs exp_avg", (double)hyper->momentum);
    if (chunks_count == 0)
        return zero_ok(); /* behind the checks: a rank that owns nothing finds the same errors */
    switch (u->algorithm) {
    case ZERO_ADAMW: return zero_update_dispatch<ZERO_ADAMW>(*u, *hyper, chunk_first, &config, aligned);
    case ZERO_ADAM: return zero_update_dispatch<ZERO_ADAM>(*u, *hyper, chunk_first, &config, aligned);
    case ZERO_SGD: return zero_update_dispatch<ZERO_SGD>(*u, *hyper, chunk_first, &config, aligned);
    }
    return zero_error(ZERO_ERROR_ARGUMENT, "algorithm %d; ZERO_ADAMW, ZERO_ADAM and ZERO_SGD are known",
                      (int)u->algorithm);
}

#endif /* LLMC_ZERO_ADAMW_CUH_INCLUDED */
