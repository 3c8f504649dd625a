/* llmc_zero/replicas.cuh - do all ranks hold the same parameters, to the bit?

       uint64_t hash;
       ZeroResult r = zero_check_replicas(&z, &hash);      // ZERO_ERROR_REPLICAS: they do not

   The hash is a sum, modulo 2^64, of one term for each element: its bits mixed with its model index. So it depends on
   neither ranks, stage nor bucket size, and the order of adding does not matter; an exchange of two elements or of two
   tensors changes it. It is the number that train_mlp prints as "params hash". It is made on the device, and reads the
   parameters once.

   defines: zero_check_replicas
*/
#ifndef LLMC_ZERO_REPLICAS_CUH_INCLUDED
#define LLMC_ZERO_REPLICAS_CUH_INCLUDED

#include "optimizer.cuh"

#define ZERO_HASH_BLOCKS_MAX 512

/* An element counts as the 32 bits of its value in fp32. hash is added to. */
template <typename Bits>
static __global__ void __launch_bounds__(ZERO_BLOCK_THREADS)
    zero_hash_kernel(const Bits* params, size_t count, uint64_t model_offset, unsigned long long* hash) {
    const size_t threads = (size_t)gridDim.x * ZERO_BLOCK_THREADS;
    uint64_t sum = 0;
    for (size_t i = (size_t)blockIdx.x * ZERO_BLOCK_THREADS + threadIdx.x; i < count; i += threads) {
        const uint64_t bits = (uint64_t)params[i] << (sizeof(Bits) == 2 ? 48 : 32);
        sum += zero_mix(bits ^ zero_mix(model_offset + i));
    }
    if (sum != 0) atomicAdd(hash, (unsigned long long)sum);
}

static inline ZeroResult zero_hash_launch(const ZeroOptimizer* z, const ZeroSegment* segment,
                                          unsigned long long* hash) {
    size_t blocks = (segment->count + ZERO_CHUNK_MAX_COUNT - 1) / ZERO_CHUNK_MAX_COUNT;
    cudaLaunchConfig_t config;
    if (blocks == 0) return zero_ok();
    if (blocks > ZERO_HASH_BLOCKS_MAX) blocks = ZERO_HASH_BLOCKS_MAX;
    config = zero_launch_config(blocks, ZERO_BLOCK_THREADS, z->comm.compute);
    if (z->layout->dtype == ZERO_BF16)
        ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_hash_kernel<uint16_t>,
                                         (const uint16_t*)z->params + segment->flat_offset, segment->count,
                                         (uint64_t)segment->model_offset, hash));
    else
        ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_hash_kernel<uint32_t>,
                                         (const uint32_t*)z->params + segment->flat_offset, segment->count,
                                         (uint64_t)segment->model_offset, hash));
    return zero_ok();
}

/* Hash of this rank's parameters, compared over the ranks. Every rank calls it, between two steps; the host waits. hash
   may be NULL. */
static inline ZeroResult zero_check_replicas(ZeroOptimizer* z, uint64_t* hash) {
    const size_t bytes = 2 * sizeof(double) * (size_t)z->ranks;
    void* params;
    uint64_t* all;
    ZeroResult result = zero_ok();
    int s, r;
    if (hash) *hash = 0;
    if (z->micro >= 0)
        return zero_error(ZERO_ERROR_ORDER,
                          "zero_check_replicas in the middle of a step; it ends with zero_update");
    ZERO_TRY(zero_params_acquire_all(z, &params));
    /* the two doubles that a norm exchanges carry the bits here; between steps nothing else is in them */
    ZERO_TRY_CUDA(cudaMemsetAsync(z->own_sums, 0, 2 * sizeof(double), z->comm.compute));
    for (s = 0; s < z->layout->segments_count; s++)
        ZERO_TRY(zero_hash_launch(z, &z->layout->segments[s], (unsigned long long*)z->own_sums));
    ZERO_TRY(zero_comm_gather_sums(&z->comm, z->own_sums, z->all_sums));
    all = (uint64_t*)malloc(bytes);
    if (!all) return zero_error(ZERO_ERROR_MEMORY, "no host memory for %zu bytes", bytes);
    result = zero_comm_drain(&z->comm);
    if (result.code == ZERO_OK) {
        cudaError_t error = cudaMemcpy(all, z->all_sums, bytes, cudaMemcpyDeviceToHost);
        if (error != cudaSuccess)
            result = zero_error(ZERO_ERROR_CUDA, "reading the hashes: %s", cudaGetErrorString(error));
    }
    for (r = 1; r < z->ranks && result.code == ZERO_OK; r++)
        if (all[2 * r] != all[0])
            result = zero_error(
                ZERO_ERROR_REPLICAS,
                "params differ between ranks after %llu updates: hash %016llx on rank 0, %016llx on "
                "rank %d of %d: resume from a checkpoint",
                (unsigned long long)z->status->t, (unsigned long long)all[0], (unsigned long long)all[2 * r],
                r, z->ranks);
    if (hash && result.code == ZERO_OK) *hash = all[0];
    free(all);
    return result;
}

#endif /* LLMC_ZERO_REPLICAS_CUH_INCLUDED */
