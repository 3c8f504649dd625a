/* llmc_zero/reduce.cuh - sums of gradients over ranks and micro-steps in fp32, and with them the norm's partial sums.

   One kernel for a piece of this rank's slice: it adds what the ranks have sent, in rank order, in fp32; adds that to the sum
   of the micro-steps before; stores it; and in the last micro-step adds up its squares in fp64. The order of additions is
   that of the ranks and of the micro-steps whatever the buckets, the stage and NCCL's algorithms are, so the sums are the
   same bits. Only real elements are touched, never gaps and padding.

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
    size_t grads_first; /* a multiple of four, as are piece.flat_first and piece.count */
    ZeroDtype dtype;
    const void*
        others; /* piece.count elements of each other rank, in rank order; NULL: grads are summed over ranks */
    int ranks, rank;
    float* sums;      /* where the sum goes */
    int sums_sharded; /* 1: indexed by state_offset; 0: in place of grads, which are fp32 */
    int add;          /* 1: to what is there, from earlier micro-steps */
    double* partials; /* all pieces' partial sums; NULL: not the last micro-step */
} ZeroSum;

/* kCount elements: element i of the chunk and those behind it. */
template <int kCount, typename Grad>
static __device__ __forceinline__ void zero_sum_elements(const ZeroSum& s, const ZeroChunk& chunk, uint32_t i,
                                                         double* squares) {
    const size_t flat = chunk.flat_offset + i;
    const Grad* own = (const Grad*)s.grads + (flat - s.grads_first);
    const Grad* others = (const Grad*)s.others + (flat - s.piece.flat_first);
    float* to = s.sums + (s.sums_sharded ? chunk.state_offset + i : flat - s.grads_first);
    float sum[kCount], x[kCount];
    zero_load(s.others == NULL || s.rank == 0 ? own : others, sum);
    for (int r = 1; s.others != NULL && r < s.ranks; r++) {
        zero_load(r == s.rank ? own : others + (size_t)(r < s.rank ? r : r - 1) * s.piece.count, x);
        for (int k = 0; k < kCount; k++) sum[k] = __fadd_rn(sum[k], x[k]);
    }
    if (s.add) {
        zero_load(to, x);
        for (int k = 0; k < kCount; k++) sum[k] = __fadd_rn(x[k], sum[k]);
    }
    zero_store(to, sum);
    for (int k = 0; k < kCount; k++) squares[k] = __fma_rn((double)sum[k], (double)sum[k], squares[k]);
}

/* Block b takes the chunks from b * chunks / blocks to (b + 1) * chunks / blocks, as far as they lie in the piece. */
template <typename Grad>
static __global__ void __launch_bounds__(ZERO_BLOCK_THREADS) zero_sum_kernel(const ZeroSum s, int aligned) {
    const size_t first = (size_t)blockIdx.x * s.piece.chunk_count / gridDim.x;
    const size_t last = ((size_t)blockIdx.x + 1) * s.piece.chunk_count / gridDim.x;
    const uint64_t piece_end = s.piece.flat_first + s.piece.count;
    double squares[4] = {0.0, 0.0, 0.0, 0.0};
    for (size_t c = first; c < last; c++) {
        ZeroChunk chunk = s.chunks[s.piece.chunk_first + c];
        uint32_t head, vectors;
        if (chunk.flat_offset + chunk.count > piece_end)
            chunk.count = (uint32_t)(piece_end - chunk.flat_offset);
        if (chunk.flat_offset < s.piece.flat_first) {
            const uint32_t before = (uint32_t)(s.piece.flat_first - chunk.flat_offset);
            chunk.flat_offset += before;
            chunk.state_offset += before;
            chunk.count -= before;
        }
        zero_split_chunk(chunk, aligned, &head, &vectors);
        for (uint32_t i = threadIdx.x; i < vectors; i += ZERO_BLOCK_THREADS)
            zero_sum_elements<4, Grad>(s, chunk, head + 4 * i, squares);
        for (uint32_t i = threadIdx.x; i < chunk.count - 4 * vectors; i += ZERO_BLOCK_THREADS)
            zero_sum_elements<1, Grad>(s, chunk, i < head ? i : i + 4 * vectors, squares);
    }
    if (s.partials == NULL) return;
    const double sum = zero_block_sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    if (threadIdx.x == 0) s.partials[s.piece.partial_first + blockIdx.x] = sum;
}

/* One launch on `stream`; none for a piece that is padding only. */
static inline ZeroResult zero_sum_launch(const ZeroSum* s, cudaStream_t stream) {
    cudaLaunchConfig_t config =
        zero_launch_config(zero_sum_blocks(s->piece.chunk_count), ZERO_BLOCK_THREADS, stream);
    const size_t bytes = zero_dtype_bytes(s->dtype);
    const int aligned = zero_is_aligned(s->grads, bytes) && zero_is_aligned(s->others, bytes) &&
                        zero_is_aligned(s->sums, sizeof(float)) && s->grads_first % 4 == 0;
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
