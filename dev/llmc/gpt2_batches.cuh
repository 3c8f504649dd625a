/* llmc_zero/gpt2_batches.cuh - which micro-batches a rank takes. Part of gpt2.cuh, which includes it.

   llm.c deals by rank: its loaders drop what the ranks do not divide, shuffle rank by rank, and validate on so many batches
   a rank. That stays so with -R nccl and allreduce. With -R ordered there is one global list of micro-batches, which does
   not know the ranks: every loader is that of rank 0 of 1, and a round of N ranks takes the next N of the list, rank r the
   one at place r. In the last round of a step, or of a validation, some ranks may have none: they compute on the last one
   of the round, and nothing of it counts.
   What depends on the number of micro-batches a rank has is said otherwise, too: the gradient of a micro-batch is that of
   its own mean loss, losses are added up exactly, and random numbers follow from the micro-batch's place in the run.

   defines: zero_gpt2_micro_steps, zero_gpt2_round, zero_gpt2_loader_rank, zero_gpt2_loader_ranks; zero_gpt2_ordered,
            zero_gpt2_next_batch, zero_gpt2_rounds, zero_gpt2_val_batch, zero_gpt2_val_loss, zero_gpt2_val_mean,
            zero_gpt2_eval_batch, zero_gpt2_loss_steps, zero_gpt2_random, zero_gpt2_add_loss, zero_gpt2_mean_loss
*/
#ifndef LLMC_ZERO_GPT2_BATCHES_CUH_INCLUDED
#define LLMC_ZERO_GPT2_BATCHES_CUH_INCLUDED

/* ------------------------------------------------------------------ for main, before there is a model */

static inline int zero_gpt2_is_ordered(const ZeroGpt2Settings* settings) {
    return settings->reduction == ZERO_REDUCE_ORDERED;
}

/* What a step must be a multiple of, in tokens: of all ranks' micro-batches, or of one. round: B * T * ranks. */
static inline int zero_gpt2_round(const ZeroGpt2Settings* settings, int round) {
    return zero_gpt2_is_ordered(settings) ? round / multi_gpu_config.num_processes : round;
}

/* Micro-steps of a step of `total` tokens. */
static inline int zero_gpt2_micro_steps(ZeroGpt2Settings* settings, int total, int round) {
    settings->batches = total / (round / multi_gpu_config.num_processes);
    return zero_gpt2_is_ordered(settings) ? (total + round - 1) / round : total / round;
}

static inline int zero_gpt2_loader_rank(const ZeroGpt2Settings* settings, int rank) {
    return zero_gpt2_is_ordered(settings) ? 0 : rank;
}
static inline int zero_gpt2_loader_ranks(const ZeroGpt2Settings* settings, int ranks) {
    return zero_gpt2_is_ordered(settings) ? 1 : ranks;
}

/* ------------------------------------------------------------------ batches */

static inline int zero_gpt2_ordered(const GPT2* model) {
    return model->zero && zero_gpt2_is_ordered(&model->zero->settings);
}

/* Of a round of a list of so many batches: how many there are, at most one a rank, and the place of this rank's. */
static inline int zero_gpt2_in_round(int round, int batches, int* place) {
    const int ranks = multi_gpu_config.num_processes, left = batches - round * ranks;
    const int count = left < ranks ? left : ranks;
    *place = multi_gpu_config.process_rank < count ? multi_gpu_config.process_rank : count - 1;
    return count;
}

/* Passes over a batch: without reading it, where llm.c has a function that goes on to the next file. */
template <typename Loader>
static inline auto zero_gpt2_pass_over(Loader* loader, int) -> decltype((void)dataloader_advance_(loader)) {
    if (loader->current_sample_idx >= loader->shard_num_samples) dataloader_advance_(loader);
    loader->current_sample_idx++;
}
template <typename Loader> static inline void zero_gpt2_pass_over(Loader* loader, long) {
    const std::vector<int> inputs(loader->inputs, loader->inputs + loader->B * loader->T);
    const std::vector<int> targets(loader->targets, loader->targets + loader->B * loader->T);
    dataloader_next_batch(loader);
    std::copy(inputs.begin(), inputs.end(), loader->inputs);
    std::copy(targets.begin(), targets.end(), loader->targets);
}

/* This rank's batch of a round. All ranks' loaders stand behind the round's last one then. */
static inline void zero_gpt2_next_in_round(DataLoader* loader, int round, int batches) {
    int place;
    const int count = zero_gpt2_in_round(round, batches, &place);
    for (int i = 0; i < place; i++) zero_gpt2_pass_over(loader, 0);
    dataloader_next_batch(loader);
    for (int i = place + 1; i < count; i++) zero_gpt2_pass_over(loader, 0);
}

/* In place of dataloader_next_batch in a step. */
static inline void zero_gpt2_next_batch(GPT2* model, DataLoader* loader, int micro_step) {
    if (!zero_gpt2_ordered(model))
        dataloader_next_batch(loader);
    else
        zero_gpt2_next_in_round(loader, micro_step, model->zero->settings.batches);
}

/* ------------------------------------------------------------------ validation, HellaSwag */

/* Rounds of a loop over so many batches. */
static inline int zero_gpt2_rounds(const GPT2* model, int batches) {
    return zero_gpt2_ordered(model) ? zero_micros(&model->zero->z, batches) : batches;
}

static inline void zero_gpt2_val_batch(GPT2* model, DataLoader* loader, int round, int batches) {
    ZeroGpt2* zero = model->zero;
    if (!zero_gpt2_ordered(model)) {
        dataloader_next_batch(loader);
        return;
    }
    if (round == 0) memset(zero->val_sum, 0, sizeof(zero->val_sum));
    zero->val_counts = round * multi_gpu_config.num_processes + multi_gpu_config.process_rank < batches;
    zero_gpt2_next_in_round(loader, round, batches);
}

/* Around the loss of a batch: what is left to add. */
static inline float zero_gpt2_val_loss(GPT2* model, float loss) {
    ZeroGpt2* zero = model->zero;
    if (!zero_gpt2_ordered(model)) return loss;
    if (zero->val_counts) zero->val_sum[ZERO_EXACT_WORDS] += !zero_exact_add(zero->val_sum, (double)loss);
    return 0.0f;
}

/* Behind the loop, with the mean that llm.c has: of the ranks' exact sums, rounded once. */
static inline void zero_gpt2_val_mean(GPT2* model, float* mean, int batches) {
    ZeroGpt2* zero = model->zero;
    if (!zero_gpt2_ordered(model) || batches < 1) return;
    zeroCheck(zero_guard([&]() {
        std::vector<uint64_t> all(2 * (size_t)zero->z.ranks), sum(ZERO_EXACT_WORDS + 2, 0);
        for (int word = 0; word < ZERO_EXACT_WORDS + 1; word += 2) {
            const uint64_t own[2] = {zero->val_sum[word],
                                     word + 1 > ZERO_EXACT_WORDS ? 0 : zero->val_sum[word + 1]};
            ZERO_TRY(zero_exchange_words(&zero->z, own, all.data()));
            for (size_t i = 0; i < all.size(); i++) sum[(size_t)word + i % 2] += all[i];
        }
        *mean = sum[ZERO_EXACT_WORDS] ? NAN : (float)(zero_exact_value(sum.data()) / batches);
        return zero_ok();
    }));
}

/* In place of evalloader_next_batch: this rank's batch of a round, or an empty one behind the last. A batch is read to pass
   over it. */
template <typename Loader> static inline void zero_gpt2_eval_batch(GPT2* model, Loader* loader, int round) {
    const int ranks = multi_gpu_config.num_processes, rank = multi_gpu_config.process_rank;
    int over = !zero_gpt2_ordered(model) ? 0 : round == 0 ? rank : ranks - 1;
    for (; over > 0; over--) evalloader_next_batch(loader);
    evalloader_next_batch(loader);
}

/* ------------------------------------------------------------------ the loss */

/* By how many micro-steps backward divides a loss. Where this rank has no micro-batch the gradient is 0. */
static inline float zero_gpt2_loss_steps(const GPT2* model, int micro_steps) {
    if (!zero_gpt2_ordered(model)) return (float)micro_steps;
    return model->zero->idle ? INFINITY : 1.0f;
}

/* Random numbers of a micro-batch, in place of a generator a rank. */
static inline unsigned zero_gpt2_random(GPT2* model) {
    return (unsigned)(zero_mix(13371337 ^ zero_mix(model->zero->micro_first)) >> 32);
}

/* The mean of the losses of a micro-batch, in one order: one block. Losses is float; a template, so that it is made where it
   is used only. */
template <typename Loss>
static __global__ void __launch_bounds__(ZERO_BLOCK_THREADS)
    zero_gpt2_loss_kernel(const Loss* losses, int count, double* mean) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < count; i += ZERO_BLOCK_THREADS) sum += (double)losses[i];
    sum = zero_block_sum(sum);
    if (threadIdx.x == 0) *mean = sum / count;
}

/* Backward has added this micro-batch's losses to losses that were cleared. */
static inline void zero_gpt2_add_loss(GPT2* model) {
    ZeroGpt2* zero = model->zero;
    cudaLaunchConfig_t config = zero_launch_config(1, ZERO_BLOCK_THREADS, main_stream);
    cudaCheck(cudaLaunchKernelEx(&config, zero_gpt2_loss_kernel<float>, (const float*)model->acts.losses,
                                 (int)(model->batch_size * model->seq_len), zero->loss));
    zeroCheck(zero_add_loss(&zero->z, zero->loss));
}

/* The end of gpt2_backward_and_reduce: after the last micro-step the mean over all micro-batches of all ranks, exact and
   rounded once. With it comes the norm. */
static inline void zero_gpt2_mean_loss(GPT2* model) {
    ZeroGpt2* zero = model->zero;
    ZeroReport report;
    if (!zero_gpt2_ordered(model) || zero->z.micro + 1 < zero->z.micros) return;
    zeroCheck(zero_grad_norm(&zero->z, NULL));
    zeroCheck(zero_report(&zero->z, &report));
    model->mean_loss = (float)(report.loss_sum / zero->settings.batches);
}

#endif /* LLMC_ZERO_GPT2_BATCHES_CUH_INCLUDED */
