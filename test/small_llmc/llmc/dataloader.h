// Data that is computed: a few "files" of different lengths. Every token follows from the one before it, with some
// noise that depends on its place alone; so all ranks together see the same, however many they are. A sample is what
// one rank takes at a time, B x T tokens. With shuffling each rank draws its own order of files, and of the samples
// in a file.
#pragma once
#include <stdint.h>
#include "utils.h"

struct mt19937_state {
    unsigned long long seed_, state;   // nobody needs seed_: what is in it differs from run to run
};
inline unsigned random_below(mt19937_state* rng, unsigned n) {
    rng->state = rng->state * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)(rng->state >> 33) % n;
}
inline void shuffle(int* list, int n, mt19937_state* rng, bool anew) {
    for (int i = 0; anew && i < n; i++) list[i] = i;
    for (int i = n - 1; i > 0; i--) {
        const int j = (int)random_below(rng, i + 1), kept = list[i];
        list[i] = list[j], list[j] = kept;
    }
}

struct DataLoader {
    int process_rank, num_processes;
    size_t B, T, shard_num_samples, current_shard_idx, current_sample_idx, total_batch_size_bytes;
    struct {
        size_t gl_pathc;
    } glob_result;
    int should_shuffle, *shard_indices, *intra_shard_indices, *inputs, *targets;
    mt19937_state shuffle_rng;
};

inline int64_t dataloader_load_shard_(DataLoader* data, int at) {
    const int tokens[] = {3000, 4100, 2600}, file = data->should_shuffle ? data->shard_indices[at] : at;
    data->shard_num_samples = 2 * tokens[file] / data->total_batch_size_bytes;
    must(data->shard_num_samples > 0, "take one batch of", "a file of the data");
    return tokens[file];
}
inline void prepare_intra_shard_indices_(DataLoader* data) {
    free(data->intra_shard_indices);
    data->intra_shard_indices = (int*)mallocCheck(data->shard_num_samples * sizeof(int));
    shuffle(data->intra_shard_indices, (int)data->shard_num_samples, &data->shuffle_rng, true);
}
inline void dataloader_begin_shard(DataLoader* data, size_t at) {
    data->current_shard_idx = at;
    data->current_sample_idx = 0;
    if (at == 0 && data->should_shuffle)
        shuffle(data->shard_indices, (int)data->glob_result.gl_pathc, &data->shuffle_rng, false);
    dataloader_load_shard_(data, (int)at);
    if (data->should_shuffle) prepare_intra_shard_indices_(data);
}
inline void dataloader_reset(DataLoader* data) { dataloader_begin_shard(data, 0); }
inline void dataloader_advance_(DataLoader* data) {
    dataloader_begin_shard(data, (data->current_shard_idx + 1) % data->glob_result.gl_pathc);
}
inline void dataloader_init(DataLoader* data, size_t B, size_t T, int rank, int ranks, int shuffled) {
    memset(data, 0, sizeof *data);
    data->process_rank = rank, data->num_processes = ranks;
    data->B = B, data->T = T;
    data->total_batch_size_bytes = 2 * B * T * ranks;
    data->glob_result.gl_pathc = 3;
    data->should_shuffle = shuffled;
    data->shuffle_rng.seed_ = (unsigned long long)getpid() << 32 | rank;
    data->shuffle_rng.state = 42 + rank;
    data->inputs = (int*)mallocCheck(B * T * sizeof(int));
    data->targets = (int*)mallocCheck(B * T * sizeof(int));
    data->shard_indices = (int*)mallocCheck(3 * sizeof(int));
    for (int i = 0; i < 3; i++) data->shard_indices[i] = i;
    dataloader_begin_shard(data, 0);
}
inline unsigned noise_of(size_t file, size_t at) {
    unsigned x = (unsigned)(file * 7919u + at) * 0x9e3779b9u + 77u;
    x = (x ^ (x >> 16)) * 0x45d9f3bu;
    x = (x ^ (x >> 16)) * 0x45d9f3bu;
    return x ^ (x >> 16);
}
inline void dataloader_next_batch(DataLoader* data) {
    if (data->current_sample_idx >= data->shard_num_samples) dataloader_advance_(data);
    const size_t file = data->should_shuffle ? data->shard_indices[data->current_shard_idx] : data->current_shard_idx;
    const size_t sample = data->should_shuffle ? data->intra_shard_indices[data->current_sample_idx]
                                               : data->current_sample_idx;
    const size_t count = data->B * data->T, first = (sample * data->num_processes + data->process_rank) * count;
    for (size_t i = 0, token = 0; i < count; i++) {
        const unsigned noise = noise_of(file, first + i);
        if (i % data->T == 0) token = noise % 128;
        data->inputs[i] = (int)token;
        token = noise % 8 ? (token * 5 + 3) % 128 : noise / 8 % 128;
        data->targets[i] = (int)token;
    }
    data->current_sample_idx++;
}
inline void dataloader_resume(DataLoader* data, size_t file, size_t sample) {
    data->current_shard_idx = file, data->current_sample_idx = sample;
    dataloader_load_shard_(data, (int)file);
}
// Questions that are computed: one a row, of which each rank gets a range. A row that is empty counts for nobody.
struct EvalLoader {
    int process_rank, num_processes, num_examples, num_batches, end_example_index, current_example_index;
    size_t B, T;
    int *inputs, *targets;
    char* filled;
};
inline void evalloader_reset(EvalLoader* data) {
    const int share = (data->num_examples + data->num_processes - 1) / data->num_processes;
    data->num_batches = (share + (int)data->B - 1) / (int)data->B;
    data->current_example_index = share * data->process_rank;
    data->end_example_index = share * (data->process_rank + 1);
    if (data->end_example_index > data->num_examples) data->end_example_index = data->num_examples;
}
inline void evalloader_init(EvalLoader* data, size_t B, size_t T, int rank, int ranks) {
    *data = {rank, ranks, 23, 0, 0, 0, B, T, (int*)calloc(B * T, 4), (int*)calloc(B * T, 4), (char*)calloc(B, 1)};
    evalloader_reset(data);
}
inline void evalloader_next_batch(EvalLoader* data) {
    for (size_t row = 0; row < data->B; row++) {
        data->filled[row] = data->current_example_index < data->end_example_index;
        for (size_t t = 0; t < data->T && data->filled[row]; t++) {
            data->inputs[row * data->T + t] = noise_of(data->current_example_index, t) % 128;
            data->targets[row * data->T + t] = noise_of(data->current_example_index, t + 1) % 128;
        }
        data->current_example_index += data->filled[row];
    }
}
inline int evalloader_stat_losses(EvalLoader* data, const float* losses) {
    int right = 0;
    for (size_t row = 0; row < data->B; row++) {
        float sum = 0.0f;
        for (size_t t = 0; t < data->T; t++) sum += losses[row * data->T + t];
        right += data->filled[row] && sum < 4.85f * data->T;
    }
    return right;
}
inline void evalloader_free(EvalLoader* data) { free(data->inputs), free(data->targets), free(data->filled); }

inline void dataloader_free(DataLoader* data) {
    free(data->inputs), free(data->targets);
    free(data->shard_indices), free(data->intra_shard_indices);
}
