/* llmc_zero/reduce.cuh - sums of gradients over ranks and micro-steps in fp32, and with them the norm's squares.

   One kernel for a piece of this rank's slice: to the sum so far it adds what the ranks have sent, one after another in rank
   order, in fp32 (a left fold: ((sum + g0) + g1) + ...); stores it; and in the last micro-step adds up its squares. Rank r's
   micro-step k is global micro-batch k * ranks + r, so the order of additions is that of the micro-batches, and the sum the
   same bits for any number of ranks, whatever the buckets, the stage and NCCL's algorithms are. A rank that has no micro-batch
   in the last micro-step is left out: no zero is added for it (-0 would change). Only real elements are touched, never gaps
   and padding, and none of a frozen segment.

   defines: ZeroSum, zero_sum_launch
*/
#ifndef LLMC_ZERO_REDUCE_CUH_INCLUDED
#define LLMC_ZERO_REDUCE_CUH_INCLUDED

#include "grad_norm.cuh"

/* All pointers are device memory of the caller's, alive until the launch has run. */
typedef struct ZeroSum {
    const ZeroChunk* chunks; /* this rank's chunk table */
    ZeroPiece piece;
    const void* grads;  /* this rank's own gradients; element with flat_offset f lies at f - grads_first */
    size_t grads_first; /* a multiple of a cell, as are piece.flat_first and piece.count */
    ZeroDtype dtype;
    const void*
        others; /* piece.count elements of each other sender, by rank; NULL: grads are sums over ranks */
    int senders, rank;  /* ranks 0 .. senders - 1 have a micro-batch */
    float* sums;        /* where the sum goes */
    int sums_sharded;   /* 1: indexed by state_offset; 0: in place of grads, which are fp32 */
    int add;            /* 1: to what is there, from earlier micro-steps */
    uint64_t* own_sums; /* ZeroNorm's, which the squares are added to; NULL: not the last micro-step */
} ZeroSum;

/* kCount elements from element i of the chunk on: sums and stores them. */
template <typename Grad, int kCount>
static __device__ __forceinline__ void zero_sum_elements(const ZeroSum& s, const ZeroChunk& chunk, uint32_t i,
                                                         float (&sum)[kCount]) {
    const size_t flat = chunk.flat_offset + i;
    const Grad* own = (const Grad*)s.grads + (flat - s.grads_first);
    const Grad* others = (const Grad*)s.others + (flat - s.piece.flat_first);
    const int senders = s.others ? s.senders : 1;
    float* to = s.sums + (s.sums_sharded ? chunk.state_offset + i : flat - s.grads_first);
    float x[kCount];
    if (s.add) zero_load((const float*)to, sum);
    for (int r = 0; r < senders; r++) {
        zero_load(!s.others || r == s.rank ? own : others + (size_t)(r - (r > s.rank)) * s.piece.count, x);
        for (int k = 0; k < kCount; k++) sum[k] = r == 0 && !s.add ? x[k] : __fadd_rn(sum[k], x[k]);
    }
    zero_store(to, sum);
}

/* The part of a chunk that lies in the piece. */
static __device__ __forceinline__ ZeroChunk zero_cut_to_piece(ZeroChunk chunk, const ZeroPiece& piece) {
    const uint64_t end = piece.flat_first + piece.count;
    if (chunk.flat_offset + chunk.count > end) chunk.count = (uint32_t)(end - chunk.flat_offset);
    if (chunk.flat_offset < piece.flat_first) {
        const uint32_t before = (uint32_t)(piece.flat_first - chunk.flat_offset);
        chunk.flat_offset += before;
        chunk.state_offset += before;
        chunk.count -= before;
    }
    return chunk;
}

/* The chunks of a warp as in zero_norm_squares_kernel, where they lie in the piece. */
template <typename Grad>
static __global__ void __launch_bounds__(ZERO_BLOCK_THREADS, 4)
    zero_sum_kernel(const ZeroSum s, int aligned) {
    __shared__ ZeroCells cells[ZERO_WARPS];
    ZeroCells* own = s.own_sums ? &cells[threadIdx.x / 32] : NULL;
    const size_t last = ((size_t)blockIdx.x + 1) * s.piece.chunk_count / gridDim.x;
    size_t c = (size_t)blockIdx.x * s.piece.chunk_count / gridDim.x + threadIdx.x / 32;
    if (own) zero_cells_begin(own);
    for (int turn = 0; c < last; c += ZERO_WARPS) {
        const ZeroChunk chunk = zero_cut_to_piece(s.chunks[s.piece.chunk_first + c], s.piece);
        if (chunk.lr_factor == 0.0f) continue; /* frozen: nobody reads its sums */
        zero_walk_chunk(chunk, aligned, own, turn++,
                        [&](uint32_t i, auto& x) { zero_sum_elements<Grad>(s, chunk, i, x); });
    }
    if (own) zero_cells_end(own, s.own_sums);
}

/* One launch on `stream`; none for a piece that is padding only. */
static inline ZeroResult zero_sum_launch(const ZeroSum* s, cudaStream_t stream) {
    cudaLaunchConfig_t config =
        zero_launch_config(zero_norm_blocks(s->piece.chunk_count), ZERO_BLOCK_THREADS, stream);
    const int aligned = zero_is_aligned_16(s->grads) && zero_is_aligned_16(s->others) &&
                        zero_is_aligned_16(s->sums) && s->grads_first % 8 == 0;
    if (!s->sums_sharded && s->dtype != ZERO_FP32)
        return zero_error(ZERO_ERROR_ARGUMENT, "sums in place of bf16 gradients; they need an fp32 shard");
    if (s->piece.chunk_count == 0) return zero_ok();
    if (s->dtype == ZERO_BF16) {
        ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_sum_kernel<ZeroBf16>, *s, aligned));
    } else {
        ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_sum_kernel<float>, *s, aligned));
    }
    return zero_ok();
}

#endif /* LLMC_ZERO_REDUCE_CUH_INCLUDED */
