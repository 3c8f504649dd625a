/* llmc_zero/replicas.cuh - do all ranks hold the same parameters, to the bit? Do two runs?

       uint64_t hash, run;
       ZeroResult r = zero_check_replicas(&z, &hash);      // ZERO_ERROR_REPLICAS: they do not
       r = zero_run_hash(&z, &hash, &run);                 // and of the state, and t: what two people compare

   The hash is a sum, modulo 2^64, of one term for each element: its bits mixed with its model index. So it depends on
   neither ranks, stage nor bucket size, and the order of adding does not matter; an exchange of two elements or of two
   tensors changes it. It is the number that train_mlp prints as "params hash". It is made on the device, and reads the
   parameters once.

       zero_check_settings(&z, 0);   // at the start: will all ranks make the same calls?

   defines: zero_check_replicas, zero_run_hash, zero_check_settings, zero_exchange_words, zero_gather_words,
            zero_find_odd_rank
*/
#ifndef LLMC_ZERO_REPLICAS_CUH_INCLUDED
#define LLMC_ZERO_REPLICAS_CUH_INCLUDED

#include "optimizer.cuh"

#define ZERO_HASH_BLOCKS_MAX 512
#define ZERO_GATHER_BYTES ((size_t)4 << 20) /* of all ranks, at a time */

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

/* params: where the segment's parameters begin. */
static inline ZeroResult zero_hash_launch(const ZeroOptimizer* z, const ZeroSegment* segment,
                                          const void* params, unsigned long long* hash) {
    size_t blocks = (segment->count + ZERO_CHUNK_MAX_COUNT - 1) / ZERO_CHUNK_MAX_COUNT;
    cudaLaunchConfig_t config;
    if (blocks == 0) return zero_ok();
    if (blocks > ZERO_HASH_BLOCKS_MAX) blocks = ZERO_HASH_BLOCKS_MAX;
    config = zero_launch_config(blocks, ZERO_BLOCK_THREADS, z->comm.compute);
    if (z->layout->dtype == ZERO_BF16)
        ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_hash_kernel<uint16_t>, (const uint16_t*)params,
                                         segment->count, (uint64_t)segment->model_offset, hash));
    else
        ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_hash_kernel<uint32_t>, (const uint32_t*)params,
                                         segment->count, (uint64_t)segment->model_offset, hash));
    return zero_ok();
}

/* This rank's place among the words of all ranks. */
static inline uint64_t* zero_own_words(const ZeroOptimizer* z) { return z->rank_words + 2 * (size_t)z->rank; }

/* Two words of each rank, in rank order, to all ranks: all has room for 2 * ranks. own NULL: what lies in this rank's place of
   z->rank_words already. The host waits. */
static inline ZeroResult zero_exchange_words(ZeroOptimizer* z, const uint64_t* own, uint64_t* all) {
    const size_t bytes = 2 * sizeof(uint64_t);
    ZERO_TRY(zero_check_made(z, "zero_exchange_words"));
    if (own)
        ZERO_TRY_CUDA(
            cudaMemcpyAsync(zero_own_words(z), own, bytes, cudaMemcpyHostToDevice, z->comm.compute));
    ZERO_TRY(zero_comm_share_words(&z->comm, z->rank_words, 2, 1));
    ZERO_TRY(zero_comm_drain(&z->comm));
    ZERO_TRY_CUDA(cudaMemcpy(all, z->rank_words, bytes * (size_t)z->ranks, cudaMemcpyDeviceToHost));
    return zero_ok();
}

/* Room on the device for `count` words of each rank, on all ranks or on none: NULL, if one has no memory for it. */
static inline ZeroResult zero_gather_room(ZeroOptimizer* z, size_t count, uint64_t** room, uint64_t* all) {
    const size_t bytes = sizeof(uint64_t) * count * (size_t)z->ranks;
    uint64_t own[2] = {0, 0};
    int r;
    *room = NULL;
    own[0] = zero_device_alloc(z, ZERO_MEMORY_SCRATCH, "a gather", bytes, (void**)room).code == ZERO_OK;
    ZERO_TRY(zero_exchange_words(z, own, all));
    for (r = 0; r < z->ranks; r++) own[0] &= all[2 * r];
    if (own[0]) return zero_ok();
    zero_device_free(z, ZERO_MEMORY_SCRATCH, bytes, *room);
    *room = NULL;
    return zero_ok();
}

/* `count` words of each rank, in rank order, to all ranks: all has room for ranks * count, at least for 2 a rank. Every rank
   calls it with the same count, between two steps; the host waits. It goes in large messages, through device memory that is
   taken for it; where a rank has none left, two words at a time. */
static inline ZeroResult zero_gather_words(ZeroOptimizer* z, const uint64_t* own, size_t count,
                                           uint64_t* all) {
    const size_t ranks = (size_t)z->ranks, most = ZERO_GATHER_BYTES / sizeof(uint64_t) / ranks;
    const size_t wanted = count < most ? count : most;
    uint64_t* room = NULL;
    size_t step, at, r;
    if (wanted > 2) ZERO_TRY(zero_gather_room(z, wanted, &room, all));
    step = room ? wanted : 2;
    for (at = 0; at < count; at += step) {
        const size_t some = count - at < step ? count - at : step, bytes = some * sizeof(uint64_t);
        uint64_t* words = room ? room : z->rank_words;
        ZERO_TRY_CUDA(cudaMemcpyAsync(words + (size_t)z->rank * some, own + at, bytes, cudaMemcpyHostToDevice,
                                      z->comm.compute));
        ZERO_TRY(zero_comm_share_words(&z->comm, words, some, 1));
        ZERO_TRY(zero_comm_drain(&z->comm));
        for (r = 0; r < ranks; r++)
            ZERO_TRY_CUDA(cudaMemcpy(all + r * count + at, words + r * some, bytes, cudaMemcpyDeviceToHost));
    }
    /* not after an error: the device may never end, and freeing waits for it */
    zero_device_free(z, ZERO_MEMORY_SCRATCH, sizeof(uint64_t) * wanted * ranks, room);
    return zero_ok();
}

/* The first rank whose first word is not rank 0's, or 0 if there is none; words: rank 0's and that rank's. */
static inline ZeroResult zero_find_odd_rank(ZeroOptimizer* z, const uint64_t* own, int* odd,
                                            uint64_t words[2]) {
    uint64_t* all = (uint64_t*)malloc(2 * sizeof(uint64_t) * (size_t)z->ranks);
    ZeroResult result;
    int r;
    *odd = 0;
    if (!all) return zero_error(ZERO_ERROR_MEMORY, "no host memory for %d numbers", 2 * z->ranks);
    result = zero_exchange_words(z, own, all);
    for (r = z->ranks - 1; r > 0 && result.code == ZERO_OK; r--)
        if (all[2 * r] != all[0]) *odd = r;
    words[0] = result.code == ZERO_OK ? all[0] : 0;
    words[1] = result.code == ZERO_OK ? all[2 * *odd] : 0;
    free(all);
    return result;
}

static inline ZeroResult zero_check_between_steps(const ZeroOptimizer* z, const char* call) {
    ZERO_TRY(zero_check_made(z, call));
    if (z->micro < 0) return zero_ok();
    return zero_error(ZERO_ERROR_ORDER, "%s in the middle of a step; it ends with zero_update", call);
}

/* NCCL sees types and counts, not what is in a bucket: two of one size that a rank takes in another order would be mixed up. */
static inline ZeroResult zero_check_order(ZeroOptimizer* z) {
    const uint64_t own[2] = {z->comm.order, 0};
    uint64_t words[2];
    int odd;
    ZERO_TRY(zero_find_odd_rank(z, own, &odd, words));
    if (!odd) return zero_ok();
    return zero_error(
        ZERO_ERROR_ORDER,
        "rank %d of %d acquired units, or reported their gradients, in another order than rank 0: "
        "parameters are wrong by now; every rank has to make the same calls",
        odd, z->ranks);
}

/* Hash of this rank's parameters, compared over the ranks, and before it the order of the collectives so far. Every rank calls
   it, between two steps; the host waits. hash may be NULL. ZERO_ERROR_REPLICAS, ZERO_ERROR_ORDER. */
static inline ZeroResult zero_check_replicas(ZeroOptimizer* z, uint64_t* hash) {
    void* params;
    uint64_t words[2] = {0, 0};
    int i, odd, open = ZERO_NO_UNIT;
    if (hash) *hash = 0;
    zero_comm_progress(&z->comm, "compare replicas");
    ZERO_TRY(zero_check_between_steps(z, "zero_check_replicas"));
    if (!z->params) return zero_error(ZERO_ERROR_ORDER, "call zero_alloc_params before zero_check_replicas");
    ZERO_TRY(zero_check_order(z));
    ZERO_TRY_CUDA(cudaMemsetAsync(zero_own_words(z), 0, 2 * sizeof(uint64_t), z->comm.compute));
    for (i = 0; i < z->layout->by_offset_count; i++) { /* unit after unit */
        const int s = z->layout->by_offset[i];
        ZERO_TRY(zero_params_visit(z, s, &open, &params));
        ZERO_TRY(
            zero_hash_launch(z, &z->layout->segments[s], params, (unsigned long long*)zero_own_words(z)));
    }
    ZERO_TRY(zero_params_leave(z, &open));
    ZERO_TRY(zero_find_odd_rank(z, NULL, &odd, words));
    if (odd)
        return zero_error(
            ZERO_ERROR_REPLICAS,
            "params differ between ranks: hash %016llx on rank 0, %016llx on rank %d of %d: resume "
            "from a checkpoint",
            (unsigned long long)words[0], (unsigned long long)words[1], odd, z->ranks);
    if (hash) *hash = words[0];
    return zero_ok();
}

/* Adds up one state array over this rank's slices; which: tells the arrays apart. A warp takes a chunk. */
template <typename Bits>
static __global__ void __launch_bounds__(ZERO_BLOCK_THREADS)
    zero_hash_state_kernel(const ZeroChunk* chunks, size_t chunks_count, int by_flat_offset,
                           const Bits* values, uint64_t which, unsigned long long* hash) {
    const size_t warps = (size_t)gridDim.x * ZERO_WARPS;
    uint64_t sum = 0;
    for (size_t c = (size_t)blockIdx.x * ZERO_WARPS + threadIdx.x / 32; c < chunks_count; c += warps) {
        const ZeroChunk& chunk = chunks[c];
        const Bits* from = values + (by_flat_offset ? chunk.flat_offset : chunk.state_offset);
        for (uint32_t i = threadIdx.x % 32; i < chunk.count; i += 32)
            sum += zero_mix(((uint64_t)from[i] << 32 | which) ^ zero_mix(chunk.model_offset + i));
    }
    if (sum != 0) atomicAdd(hash, (unsigned long long)sum);
}

/* zero_check_replicas, and the hash of a run: parameters, m, v, masters and t. Two runs that have it in common have made the
   same updates to the last bit, whatever their ranks, stages and buckets were. Every rank calls it, between two steps; the
   host waits. */
static inline ZeroResult zero_run_hash(ZeroOptimizer* z, uint64_t* params_hash, uint64_t* run_hash) {
    float* const arrays[3] = {z->exp_avg, z->exp_avg_sq, z->masters};
    uint64_t* all = NULL;
    cudaLaunchConfig_t config;
    ZeroReport report;
    ZeroResult result;
    int i, r;
    *run_hash = 0;
    ZERO_TRY(zero_check_replicas(z, params_hash));
    if (!z->state_there) return zero_error(ZERO_ERROR_ORDER, "call zero_alloc_state before zero_run_hash");
    ZERO_TRY(zero_report(z, &report));
    ZERO_TRY_CUDA(cudaMemsetAsync(zero_own_words(z), 0, 2 * sizeof(uint64_t), z->comm.compute));
    config = zero_launch_config(zero_norm_blocks(z->chunks_count), ZERO_BLOCK_THREADS, z->comm.compute);
    for (i = 0; i < 3 && z->chunks_count > 0; i++)
        if (arrays[i])
            ZERO_TRY_CUDA(cudaLaunchKernelEx(&config, zero_hash_state_kernel<uint32_t>,
                                             (const ZeroChunk*)z->chunks, z->chunks_count,
                                             (int)(z->config.stage == 0), (const uint32_t*)arrays[i],
                                             (uint64_t)(i + 1), (unsigned long long*)zero_own_words(z)));
    all = (uint64_t*)malloc(2 * sizeof(uint64_t) * (size_t)z->ranks);
    if (!all) return zero_error(ZERO_ERROR_MEMORY, "no host memory for %d numbers", 2 * z->ranks);
    result = zero_exchange_words(z, NULL, all);
    *run_hash = *params_hash;
    for (r = 0; r < z->ranks && result.code == ZERO_OK; r++) *run_hash += all[2 * r];
    free(all);
    *run_hash = zero_mix(*run_hash ^ zero_mix(report.t));
    return result;
}

/* The layout and the settings that decide which collectives a step calls, and `extra` (anything of the caller's), must
   be the same on all ranks, or they wait for one another for ever. Every rank calls it, between two steps. */
static inline ZeroResult zero_check_settings(ZeroOptimizer* z, uint64_t extra) {
    ZERO_TRY(zero_check_between_steps(z, "zero_check_settings"));
    const ZeroLayout* layout = z->layout;
    const uint64_t numbers[] = {layout->model_count,
                                layout->padded_count,
                                (uint64_t)layout->dtype,
                                (uint64_t)layout->buckets_count,
                                (uint64_t)z->ranks,
                                (uint64_t)z->config.stage,
                                (uint64_t)z->config.reduction,
                                (uint64_t)z->config.accumulation,
                                (uint64_t)(z->config.overlap != 0),
                                extra};
    const ZeroPlanChoice choice = zero_plan_choice(&z->config, z->rank);
    uint64_t mixed[2] = {0, 0}, words[2] = {0, 0};
    size_t i;
    int b, u, odd;
    for (i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
        mixed[0] = zero_mix(mixed[0] ^ zero_mix(numbers[i]));
    for (b = 0; b < layout->buckets_count; b++) mixed[0] = zero_mix(mixed[0] ^ layout->buckets[b].count);
    /* which units share buckets and slots: the order of the gathers */
    for (u = 0; u < layout->units_count; u++)
        mixed[0] = zero_mix(mixed[0] ^ (2 * (uint64_t)layout->unit_buckets_first[u + 1] +
                                        (uint64_t)(z->config.stage >= 2 && zero_is_held(&choice, u))));
    ZERO_TRY(zero_find_odd_rank(z, mixed, &odd, words));
    if (!odd) return zero_ok();
    return zero_error(
        ZERO_ERROR_ARGUMENT,
        "rank %d was started with other flags or another model than rank 0 (rank %d: stage %d, %d "
        "buckets, %zu elements): start all ranks alike",
        odd, z->rank, z->config.stage, layout->buckets_count, layout->model_count);
}

#endif /* LLMC_ZERO_REPLICAS_CUH_INCLUDED */
