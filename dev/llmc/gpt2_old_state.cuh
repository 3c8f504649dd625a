/* llmc_zero/gpt2_old_state.cuh - reads the state files that llm.c without llmc_zero wrote (state_00000010_00003.bin,
   one of each rank), once: the next save writes the new format. The same number of ranks; any stage, bucket size and
   type here.

   Such a file: 256 ints; m, v and, with -w 1, masters, in fp32; with shuffled data what was drawn. The arrays hold the
   whole model in its order (-z 0), or of each tensor of each layer this rank's part, one after another (-z 1).

   defines: ZeroGpt2State, zero_gpt2_parse_state, zero_gpt2_state_int, zero_gpt2_state_long, zero_gpt2_set_int,
            zero_gpt2_set_long, ZeroGpt2OldState, zero_gpt2_old_open, zero_gpt2_old_apply, zero_gpt2_old_close
*/
#ifndef LLMC_ZERO_GPT2_OLD_STATE_CUH_INCLUDED
#define LLMC_ZERO_GPT2_OLD_STATE_CUH_INCLUDED

#include <fcntl.h>

#include "checkpoint_folder.cuh"

/* ------------------------------------------------------------------ llm.c's state, without the arrays */

/* Which of the 256 ints is what; RNG, SHARD and SAMPLE take two. */
enum {
    ZERO_GPT2_MAGIC_WORD = 0, /* 20240527 */
    ZERO_GPT2_RANKS_WORD = 2,
    ZERO_GPT2_RANK_WORD = 3,
    ZERO_GPT2_MASTERS_WORD = 4,
    ZERO_GPT2_SHUFFLE_WORD = 5,
    ZERO_GPT2_STEP_WORD = 10,
    ZERO_GPT2_RNG_WORD = 20,
    ZERO_GPT2_LAST_RNG_WORD = 22,
    ZERO_GPT2_SHARD_WORD = 30,
    ZERO_GPT2_SAMPLE_WORD = 32,
    ZERO_GPT2_HEADER_BYTES = 1024
};

static inline int zero_gpt2_state_int(const std::string& state, int word) {
    int value;
    memcpy(&value, state.data() + 4 * word, sizeof(value));
    return value;
}
static inline uint64_t zero_gpt2_state_long(const std::string& state, int word) {
    uint64_t value;
    memcpy(&value, state.data() + 4 * word, sizeof(value));
    return value;
}
static inline void zero_gpt2_set_int(std::string* state, int word, int value) {
    memcpy(&(*state)[4 * (size_t)word], &value, sizeof(value));
}
static inline void zero_gpt2_set_long(std::string* state, int word, uint64_t value) {
    memcpy(&(*state)[4 * (size_t)word], &value, sizeof(value));
}

/* A rank's place in the data. */
typedef struct ZeroGpt2State {
    int shuffled;
    uint64_t shard, sample; /* how many shards of this epoch are done, and samples of the next */
    std::vector<int> shard_order,
        samples; /* shuffled: what was drawn, of all shards and of this one's samples */
} ZeroGpt2State;

/* Takes `count` ints of a state at *at; each must be below `below`. */
static inline int zero_gpt2_take(const std::string& state, size_t* at, uint64_t count, uint64_t below,
                                 std::vector<int>* numbers) {
    if (count > (state.size() - *at) / sizeof(int)) return 0;
    numbers->resize((size_t)count);
    if (count) memcpy(numbers->data(), state.data() + *at, (size_t)count * sizeof(int));
    *at += (size_t)count * sizeof(int);
    for (int number : *numbers)
        if (number < 0 || (uint64_t)number >= below) return 0;
    return 1;
}

/* Every length and index is checked. state: the 256 ints and what follows the arrays. */
static inline ZeroResult zero_gpt2_parse_state(const std::string& state, size_t rng_bytes,
                                               ZeroGpt2State* parsed) {
    const ZeroResult damaged =
        zero_error(ZERO_ERROR_FILE, "llm.c's state in it, of %zu bytes, is damaged", state.size());
    size_t at = ZERO_GPT2_HEADER_BYTES;
    uint64_t count;
    if (state.size() < at || zero_gpt2_state_int(state, ZERO_GPT2_MAGIC_WORD) != 20240527 ||
        zero_gpt2_state_int(state, ZERO_GPT2_MAGIC_WORD + 1) != 1)
        return damaged;
    parsed->shuffled = zero_gpt2_state_int(state, ZERO_GPT2_SHUFFLE_WORD);
    parsed->shard = zero_gpt2_state_long(state, ZERO_GPT2_SHARD_WORD);
    parsed->sample = zero_gpt2_state_long(state, ZERO_GPT2_SAMPLE_WORD);
    if (!parsed->shuffled) return state.size() == at ? zero_ok() : damaged;
    for (int list = 0; list < 2; list++) { /* each with its length in front */
        if (state.size() - at < sizeof(count)) return damaged;
        memcpy(&count, state.data() + at, sizeof(count));
        at += sizeof(count);
        if (!zero_gpt2_take(state, &at, count, count, list ? &parsed->samples : &parsed->shard_order))
            return damaged;
    }
    if (state.size() - at != rng_bytes || parsed->shard >= parsed->shard_order.size() ||
        parsed->sample > parsed->samples.size())
        return damaged;
    return zero_ok();
}

/* ------------------------------------------------------------------ the files */

typedef struct ZeroGpt2OldState {
    ZeroOptimizer* z;
    std::vector<int> files; /* of each rank, or this one's alone (-z 0) */
    int sharded, masters;   /* as the files were written */
    uint64_t count;         /* elements of each array in a file */
    uint64_t step;
    std::string state; /* of this rank, without the arrays */
} ZeroGpt2OldState;

static inline void zero_gpt2_old_close(ZeroGpt2OldState* old) {
    for (int file : old->files)
        if (file >= 0) close(file);
    old->files.clear();
}

/* The 256 ints of a file against this run, and how many elements its arrays have: it must be as long as that asks
   for. */
static inline ZeroResult zero_gpt2_old_header(ZeroGpt2OldState* old, int file, int rank, std::string* state,
                                              uint64_t* tail) {
    const int ranks = old->z->ranks;
    const uint64_t all = old->z->layout->model_count;
    struct stat status;
    state->resize(ZERO_GPT2_HEADER_BYTES);
    if (fstat(file, &status) != 0) return zero_error(ZERO_ERROR_SYSTEM, "fstat: %s", strerror(errno));
    ZERO_TRY(zero_file_read(file, &(*state)[0], state->size(), 0));
    const uint64_t bytes = (uint64_t)status.st_size;
    const int ranks_there = zero_gpt2_state_int(*state, ZERO_GPT2_RANKS_WORD);
    if (zero_gpt2_state_int(*state, ZERO_GPT2_MAGIC_WORD) != 20240527)
        return zero_error(ZERO_ERROR_FILE, "it is no state file of llm.c");
    if (ranks_there != ranks)
        return zero_error(ZERO_ERROR_ARGUMENT,
                          "written by %d ranks without llmc_zero, this run has %d: go on with %d for one "
                          "checkpoint, which any number of ranks can read",
                          ranks_there, ranks, ranks_there);
    if (zero_gpt2_state_int(*state, ZERO_GPT2_RANK_WORD) != rank)
        return zero_error(ZERO_ERROR_FILE, "it is the file of rank %d, not %d",
                          zero_gpt2_state_int(*state, ZERO_GPT2_RANK_WORD), rank);
    old->masters = zero_gpt2_state_int(*state, ZERO_GPT2_MASTERS_WORD) != 0;
    for (int sharded = 0; sharded <= (ranks > 1 && all % (uint64_t)ranks == 0); sharded++) {
        const uint64_t count = sharded ? all / (uint64_t)ranks : all;
        const uint64_t end = ZERO_GPT2_HEADER_BYTES + (old->masters ? 3 : 2) * sizeof(float) * count;
        uint64_t shards = 0, samples = 0, expected = end;
        if (zero_gpt2_state_int(*state, ZERO_GPT2_SHUFFLE_WORD) && end + 16 <= bytes) {
            ZERO_TRY(zero_file_read(file, &shards, sizeof(shards), end));
            if (shards > (bytes - end - 16) / sizeof(int)) continue;
            ZERO_TRY(zero_file_read(file, &samples, sizeof(samples), end + 8 + sizeof(int) * shards));
            if (samples > (bytes - end - 16) / sizeof(int)) continue;
            expected += 16 + sizeof(int) * (shards + samples) + sizeof(mt19937_state);
        }
        if (expected != bytes) continue;
        old->sharded = sharded;
        old->count = count;
        *tail = end;
        return zero_ok();
    }
    return zero_error(
        ZERO_ERROR_FILE,
        "%llu bytes are not what m, v%s of %llu parameters take%s: cut off, or of another model",
        (unsigned long long)bytes, old->masters ? " and masters" : "", (unsigned long long)all,
        ranks > 1 ? ", with -z 0 or -z 1" : "");
}

/* name_of(rank): the path of a rank's file. Nothing of z changes. */
template <typename NameOf>
static inline ZeroResult zero_gpt2_old_check(ZeroGpt2OldState* old, NameOf name_of) {
    const ZeroOptimizer* z = old->z;
    const int needs_masters = z->config.masters;
    uint64_t tail = 0;
    old->files.assign((size_t)z->ranks, -1);
    old->sharded = 1; /* the own file says; then the others */
    for (int i = 0; i < (old->sharded ? z->ranks : 1); i++) {
        const int rank = (z->rank + i) % z->ranks, own_sharded = old->sharded, own_masters = old->masters;
        const std::string name = name_of(rank);
        std::string state;
        uint64_t end;
        const int file = old->files[(size_t)rank] = open(name.c_str(), O_RDONLY | O_CLOEXEC);
        ZeroResult result = file < 0 ? zero_error(ZERO_ERROR_FILE, "cannot open it: %s", strerror(errno))
                                     : zero_gpt2_old_header(old, file, rank, &state, &end);
        if (result.code != ZERO_OK)
            return zero_error(result.code, "%s: %.180s", zero_base_name(name.c_str()), result.text);
        const uint64_t step = (uint64_t)zero_gpt2_state_int(state, ZERO_GPT2_STEP_WORD);
        if (i == 0) {
            struct stat status;
            old->step = step, old->state = state, tail = end;
            if (fstat(file, &status) != 0) return zero_error(ZERO_ERROR_SYSTEM, "fstat: %s", strerror(errno));
            old->state.resize(ZERO_GPT2_HEADER_BYTES + (size_t)((uint64_t)status.st_size - tail));
            ZERO_TRY(zero_file_read(file, &old->state[ZERO_GPT2_HEADER_BYTES],
                                    old->state.size() - ZERO_GPT2_HEADER_BYTES, tail));
        } else if (old->sharded != own_sharded || old->masters != own_masters || step != old->step)
            return zero_error(ZERO_ERROR_FILE, "%s is of step %llu%s, the others are of %llu",
                              zero_base_name(name.c_str()), (unsigned long long)step,
                              step == old->step ? " and another -z or -w" : "",
                              (unsigned long long)old->step);
    }
    if (needs_masters && !old->masters)
        return zero_error(
            ZERO_ERROR_ARGUMENT,
            "state files written with -w 0 hold no masters: go on with -w 0 for one checkpoint");
    for (int s = 0; old->sharded && s < z->layout->segments_count; s++)
        if (z->layout->segments[s].count % (size_t)z->ranks)
            return zero_error(ZERO_ERROR_FILE, "%s has %zu elements, which %d ranks cannot have shared",
                              z->layout->segments[s].name, z->layout->segments[s].count, z->ranks);
    return zero_ok();
}

template <typename NameOf>
static inline ZeroResult zero_gpt2_old_open(ZeroGpt2OldState* old, ZeroOptimizer* z, NameOf name_of) {
    *old = {z, {}, 0, 0, 0, 0, ""};
    ZERO_TRY(zero_agree(z, zero_guard([&]() { return zero_gpt2_old_check(old, name_of); })));
    const uint64_t own[2] = {old->step << 2 | (uint64_t)(old->sharded << 1) | (uint64_t)old->masters, 0};
    uint64_t words[2] = {0, 0};
    int odd;
    ZERO_TRY(zero_find_odd_rank(z, own, &odd, words));
    if (!odd) return zero_ok();
    return zero_error(ZERO_ERROR_FILE,
                      "the state file of rank %d is of step %llu or other flags, rank 0's of %llu", odd,
                      (unsigned long long)(words[1] >> 2), (unsigned long long)(words[0] >> 2));
}

/* Elements model_offset .. + count - 1 of an array (0 m, 1 v, 2 masters) to host memory. */
static inline ZeroResult zero_gpt2_old_read(const ZeroGpt2OldState* old, int array, uint64_t model_offset,
                                            size_t count, float* to) {
    const ZeroLayout* layout = old->z->layout;
    const uint64_t begin = ZERO_GPT2_HEADER_BYTES + sizeof(float) * old->count * (uint64_t)array;
    const uint64_t ranks = (uint64_t)old->z->ranks;
    if (!old->sharded)
        return zero_file_read(old->files[(size_t)old->z->rank], to, count * sizeof(float),
                              begin + sizeof(float) * model_offset);
    for (int s = 0; s < layout->segments_count && count > 0; s++) {
        const ZeroSegment* segment = &layout->segments[s];
        const uint64_t part = segment->count / ranks;
        while (count > 0 && model_offset < segment->model_offset + segment->count) {
            const uint64_t at = model_offset - segment->model_offset, left = part - at % part;
            const size_t take = left < count ? (size_t)left : count;
            ZERO_TRY(zero_file_read(old->files[(size_t)(at / part)], to, take * sizeof(float),
                                    begin + sizeof(float) * (segment->model_offset / ranks + at % part)));
            model_offset += take, to += take, count -= take;
        }
    }
    return zero_ok();
}

static inline ZeroResult zero_gpt2_old_pieces(const ZeroGpt2OldState* old, ZeroStaging* staging) {
    ZeroOptimizer* z = old->z;
    std::vector<ZeroChunk> chunks;
    ZeroArray arrays[3];
    size_t turns = 0;
    ZERO_TRY(zero_staging_create(staging));
    ZERO_TRY(zero_checkpoint_chunks(z, z->config.stage == 0 ? ZERO_ALL_RANKS : z->rank, &chunks));
    const int count = zero_checkpoint_arrays(z, arrays);
    for (int a = 0; a < count; a++) {
        const int there = strcmp(arrays[a].suffix, ".exp_avg") == 0 ? 0 : arrays[a].suffix[0] ? 1 : 2;
        ZeroSpan span = {0, 0, 0, 0};
        if (there == 2 && (!old->masters || arrays[a].element_bytes != sizeof(float)))
            continue; /* the model file has been read */
        while (zero_next_span(chunks, ZERO_FILE_PIECE_BYTES / sizeof(float), &span)) {
            const size_t turn = turns++ % 2;
            if (turns > 2) ZERO_TRY(zero_wait_event(&z->comm, staging->copied[turn]));
            ZERO_TRY(
                zero_gpt2_old_read(old, there, span.model_offset, span.count, (float*)staging->buffer[turn]));
            ZERO_TRY(
                zero_copy_span(z, &arrays[a], chunks, &span, staging->buffer[turn], cudaMemcpyHostToDevice));
            ZERO_TRY_CUDA(cudaEventRecord(staging->copied[turn], z->comm.compute));
        }
    }
    return zero_comm_drain(&z->comm);
}

/* Loads m, v and masters of files that were checked; params are made from masters. */
static inline ZeroResult zero_gpt2_old_apply(const ZeroGpt2OldState* old) {
    ZeroOptimizer* z = old->z;
    ZeroStaging staging = {};
    ZeroResult result = zero_params_settle(z);
    if (result.code == ZERO_OK) result = zero_guard([&]() { return zero_gpt2_old_pieces(old, &staging); });
    if (result.code != ZERO_OK) zero_comm_drain(&z->comm);
    zero_staging_free(&staging, &z->comm);
    ZERO_TRY(zero_agree(z, result));
    ZERO_TRY(zero_set_t(z, old->step));
    z->status_stale = 1;
    return zero_state_changed(z);
}

#endif /* LLMC_ZERO_GPT2_OLD_STATE_CUH_INCLUDED */
