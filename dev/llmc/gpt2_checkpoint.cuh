/* llmc_zero/gpt2_checkpoint.cuh - llm.c's checkpoints: DIR/step_00000010.safetensors in place of its state files.

   The file holds llm.c's tensors, layers stacked as in the model, with m and v (checkpoint.cuh). What llm.c's
   save_state writes beside its arrays (step, random states, place in the data, what was shuffled) is written by
   llm.c's own code into memory, and travels as a string of the metadata for each rank: "llmc.state.3", in
   hexadecimal. At as many ranks, -b and -t, llm.c's load_state reads it back as it was, so that a resumed run is the
   same to the bit. With -R ordered the data has one order for all ranks (gpt2_batches.cuh): one state stands for all, as
   one rank would write it, and any number of ranks goes on with exactly the next samples. Without it, at other ranks, and
   at another -b or -t, load_state gets a state made for it: the same place in the data.
     one batch (-a 1)   llm.c trains on the first batch of the validation data again and again; the loader goes on behind
                        the tokens that were seen
     shuffled           in llm.c every rank draws an order of its own, so that other ranks have seen other samples; the
                        rest of the epoch is drawn anew, from the same place on: some of its samples come twice, some
                        not at all
   The random state of rank r is that of rank r % RANKS, mixed with r / RANKS.

   As in llm.c, DONE_00000010 says that a checkpoint is complete, and is written last; it is removed first. Resuming
   takes the newest with a DONE that is whole, and says which it passed over. model_00000010.bin gives the sizes of
   the model; weights come from the checkpoint. State files of llm.c without llmc_zero are read too:
   gpt2_old_state.cuh.

   defines: zero_gpt2_find_max_step, zero_gpt2_begin_checkpoint, zero_gpt2_delete_checkpoint, zero_gpt2_state_begin,
            zero_gpt2_state_end, zero_gpt2_state_open, zero_gpt2_stopping, zero_gpt2_stopped
*/
#ifndef LLMC_ZERO_GPT2_CHECKPOINT_CUH_INCLUDED
#define LLMC_ZERO_GPT2_CHECKPOINT_CUH_INCLUDED

#include "gpt2_old_state.cuh"

/* ------------------------------------------------------------------ names */

/* Folder and step of llm.c's name of a state file; 0: another name (test_gpt2.cu). */
static inline int zero_gpt2_state_name(const char* filename, std::string* folder, uint64_t* step) {
    const char* base = zero_base_name(filename);
    int number, rank, end = 0;
    if (sscanf(base, "state_%8d_%5d.bin%n", &number, &rank, &end) != 2 || end == 0 || base[end] || number < 0)
        return 0;
    *folder = base == filename ? "." : base == filename + 1 ? "/" : std::string(filename, base - 1);
    *step = (uint64_t)number;
    return 1;
}

/* FOLDER/PREFIX_00000010SUFFIX */
static inline std::string zero_gpt2_path(const std::string& folder, const char* prefix, uint64_t step,
                                         const char* suffix) {
    char name[64];
    snprintf(name, sizeof(name), "/%s_%08llu%s", prefix, (unsigned long long)step, suffix);
    return folder + name;
}
static inline std::string zero_gpt2_file(const std::string& folder, uint64_t step) {
    return zero_gpt2_path(folder, "step", step, ".safetensors");
}
static inline std::string zero_gpt2_old_file(const std::string& folder, uint64_t step, int rank) {
    char suffix[32];
    snprintf(suffix, sizeof(suffix), "_%05d.bin", rank);
    return zero_gpt2_path(folder, "state", step, suffix);
}
static inline int zero_gpt2_there(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

/* The steps of the DONE markers in a folder, ascending. */
static inline ZeroResult zero_gpt2_done_steps(const std::string& folder, std::vector<uint64_t>* steps) {
    DIR* directory = opendir(folder.c_str());
    if (!directory && errno == ENOENT) return zero_ok();
    if (!directory)
        return zero_error(ZERO_ERROR_SYSTEM, "reading folder %.80s: %s", folder.c_str(), strerror(errno));
    for (struct dirent* entry; (entry = readdir(directory)) != NULL;) {
        uint64_t step;
        const char* at = entry->d_name + 5;
        if (strncmp(entry->d_name, "DONE_", 5) == 0 && zero_file_number(&at, '\0', 10, &step) &&
            step <= INT32_MAX)
            steps->push_back(step);
    }
    closedir(directory);
    std::sort(steps->begin(), steps->end());
    return zero_ok();
}

/* In place of find_max_step: the newest DONE with a model file and a checkpoint that is there and, as far as its
   header says, whole; -1: there is no DONE. Where none is fit, the newest with a model file: resuming says what is
   wrong. */
static inline int zero_gpt2_find_max_step(const char* folder) {
    const int rank = multi_gpu_config.process_rank;
    std::vector<uint64_t> steps;
    int unfit = -1;
    if (!folder) return -1;
    zeroCheck(zero_guard([&]() { return zero_gpt2_done_steps(folder, &steps); }));
    for (size_t i = steps.size(); i-- > 0;) {
        ZeroFileHeader header;
        if (!zero_gpt2_there(zero_gpt2_path(folder, "model", steps[i], ".bin"))) continue;
        const int file = open(zero_gpt2_file(folder, steps[i]).c_str(), O_RDONLY | O_CLOEXEC);
        const int fit = file >= 0 ? zero_file_read_header(file, &header).code == ZERO_OK
                                  : zero_gpt2_there(zero_gpt2_old_file(folder, steps[i], rank));
        if (file >= 0) close(file);
        if (fit) return (int)steps[i];
        if (unfit < 0) unfit = (int)steps[i];
    }
    return unfit >= 0 || steps.empty() ? unfit : (int)steps.back();
}

/* ------------------------------------------------------------------ saving */

/* Before a checkpoint is written over an older one of the same step: that is complete no longer. */
static inline void zero_gpt2_begin_checkpoint(const char* folder, int step) {
    if (multi_gpu_config.process_rank == 0)
        unlink(zero_gpt2_path(folder, "DONE", (uint64_t)step, "").c_str());
}

/* The step of the checkpoint that was resumed from, if a signal had left it between two of -n; delete_checkpoint
   does not know the model. */
static uint64_t zero_gpt2_extra_step = 0;

/* Before llm.c deletes its files of a step: first the marker, then our file. A checkpoint of a signal goes along. */
static inline void zero_gpt2_delete_checkpoint(const char* folder, int step) {
    const uint64_t extra = zero_gpt2_extra_step;
    if (multi_gpu_config.process_rank != 0) return;
    unlink(zero_gpt2_path(folder, "DONE", (uint64_t)step, "").c_str());
    unlink(zero_gpt2_file(folder, (uint64_t)step).c_str());
    if (extra == 0 || extra > (uint64_t)step) return;
    unlink(zero_gpt2_path(folder, "DONE", extra, "").c_str());
    unlink(zero_gpt2_file(folder, extra).c_str());
    unlink(zero_gpt2_path(folder, "model", extra, ".bin").c_str());
    zero_gpt2_extra_step = 0;
}

/* Where save_state writes to: memory. */
static inline FILE* zero_gpt2_state_begin(GPT2* model) {
    ZeroGpt2* zero = model->zero;
    free(zero->state);
    zero->state = NULL;
    FILE* file = open_memstream(&zero->state, &zero->state_bytes);
    if (!file) zeroCheck(zero_error(ZERO_ERROR_MEMORY, "no host memory for llm.c's state"));
    return file;
}

/* The states of all ranks, on all ranks. */
static inline ZeroResult zero_gpt2_gather_states(ZeroOptimizer* z, const std::string& own,
                                                 std::vector<std::string>* states) {
    std::vector<uint64_t> all(2 * (size_t)z->ranks);
    uint64_t words[2] = {own.size(), 0};
    size_t longest = 0;
    ZERO_TRY(zero_exchange_words(z, words, all.data()));
    states->resize((size_t)z->ranks);
    for (size_t r = 0; r < states->size(); r++) {
        (*states)[r].resize((size_t)all[2 * r]);
        longest = std::max(longest, (*states)[r].size());
    }
    const size_t count = std::max(longest / sizeof(uint64_t) + 1, (size_t)2); /* shorter ones end in zeros */
    std::vector<uint64_t> padded(count, 0);
    memcpy(padded.data(), own.data(), own.size());
    all.resize(count * (size_t)z->ranks);
    ZERO_TRY(zero_gather_words(z, padded.data(), count, all.data()));
    for (size_t r = 0; r < states->size(); r++)
        memcpy(&(*states)[r][0], &all[r * count], (*states)[r].size());
    return zero_ok();
}

static inline std::string zero_gpt2_to_hex(const std::string& bytes) {
    std::string text;
    for (char c : bytes) {
        text += "0123456789abcdef"[(unsigned char)c >> 4];
        text += "0123456789abcdef"[(unsigned char)c & 15];
    }
    return text;
}
static inline std::string zero_gpt2_from_hex(const std::string& text) {
    std::string bytes;
    for (size_t i = 0; i + 1 < text.size(); i += 2)
        bytes += (char)strtoul(text.substr(i, 2).c_str(), NULL, 16);
    return bytes;
}

/* llm.c's generator has a seed_ that nothing sets: without a value here, equal runs would leave other files. */
template <typename Generator>
static inline auto zero_gpt2_clear_seed(Generator* generator, int) -> decltype((void)generator->seed_) {
    generator->seed_ = 0;
}
template <typename Generator>
static inline void zero_gpt2_clear_seed(Generator*, long) {} /* a fork that has none */

static inline std::string zero_gpt2_own_state(const ZeroGpt2* zero, const DataLoader* loader) {
    std::string state(zero->state, zero->state_bytes);
    mt19937_state generator;
    if (!loader->should_shuffle || state.size() < sizeof(generator)) return state;
    char* last = &state[state.size() - sizeof(generator)];
    memcpy(&generator, last, sizeof(generator));
    zero_gpt2_clear_seed(&generator, 0);
    memcpy(last, &generator, sizeof(generator));
    return state;
}

/* How batches are dealt: what must be as it was for every rank's state to mean the same. */
static inline std::string zero_gpt2_dealing(const DataLoader* loader) {
    return std::to_string(loader->B) + " " + std::to_string(loader->T);
}

static inline ZeroCheckpoint zero_gpt2_describe_checkpoint(const GPT2* model) {
    ZeroGpt2* zero = model->zero;
    ZeroCheckpoint what = zero_checkpoint();
    for (int i = 0; i < NUM_PARAMETER_TENSORS; i++) {
        const ZeroGpt2Tensor* known = &zero_gpt2_tensors[i];
        const uint64_t layers = known->per_layer ? (uint64_t)zero_gpt2_layers(zero) : 1;
        const uint64_t columns = (uint64_t)known->columns * (uint64_t)model->config.channels;
        uint64_t elements = zero->layout.segments[zero->first_segment[i]].count;
        ZeroTensor* tensor = &zero->tensors[i];
        *tensor = {known->name, zero->first_segment[i], (int)layers, 0, {0}};
        if (known->per_layer) tensor->shape[tensor->dims++] = layers;
        if (columns > 0 && elements % columns == 0) {
            tensor->shape[tensor->dims++] = elements / columns;
            elements = columns;
        }
        tensor->shape[tensor->dims++] = elements;
    }
    what.tensors = zero->tensors;
    what.tensors_count = NUM_PARAMETER_TENSORS;
    what.samples = zero->samples;
    what.read_back = zero->settings.read_back;
    return what;
}

/* Before the first update: could a checkpoint be saved? */
static inline void zero_gpt2_check_saves(GPT2* model) {
    ZeroGpt2* zero = model->zero;
    const ZeroCheckpoint what = zero_gpt2_describe_checkpoint(model);
    if (zero->settings.save_every == 0) return;
    zero_gpt2_close(zero, ZERO_NO_UNIT);
    zeroCheck(zero_guard([&]() {
        const std::string path = zero_gpt2_file(zero->settings.folder, (uint64_t)zero->settings.save_every);
        return zero_checkpoint_check(&zero->z, path.c_str(), &what);
    }));
}

/* Writes the checkpoint, with what save_state has written into `file`. */
static inline ZeroResult zero_gpt2_save(GPT2* model, const char* filename, int step,
                                        const DataLoader* loader) {
    ZeroGpt2* zero = model->zero;
    ZeroCheckpoint what = zero_gpt2_describe_checkpoint(model);
    std::vector<std::string> states, texts;
    std::vector<ZeroString> strings;
    std::string folder, path = filename;
    uint64_t named = 0;
    states.push_back(zero_gpt2_own_state(zero, loader));
    if (loader->num_processes > 1) {
        const std::string own = states[0];
        ZERO_TRY(zero_gpt2_gather_states(&zero->z, own, &states));
    } else if (zero->z.ranks > 1) { /* the same on all ranks */
        zero_gpt2_set_int(&states[0], ZERO_GPT2_RANKS_WORD, 1);
        zero_gpt2_set_int(&states[0], ZERO_GPT2_RANK_WORD, 0);
    }
    for (size_t r = 0; r < states.size(); r++) {
        texts.push_back("llmc.state." + std::to_string(r));
        texts.push_back(zero_gpt2_to_hex(states[r]));
    }
    texts.push_back("llmc.batch");
    texts.push_back(zero_gpt2_dealing(loader));
    if (zero->stop && zero->settings.save_every > 0 && step % zero->settings.save_every != 0) {
        texts.push_back("llmc.extra"); /* rotation counts in steps of -n */
        texts.push_back("1");
    }
    for (size_t i = 0; i < texts.size(); i += 2) strings.push_back({texts[i].c_str(), texts[i + 1].c_str()});
    what.strings = strings.data();
    what.strings_count = (int)strings.size();
    what.step = (uint64_t)step;
    const int llmc_name = zero_gpt2_state_name(filename, &folder, &named);
    if (llmc_name) path = zero_gpt2_file(folder, named);
    ZERO_TRY(zero_checkpoint_save(&zero->z, path.c_str(), &what));
    printf0("Wrote the state of %d ranks to %s\n", multi_gpu_config.num_processes, path.c_str());
    if (llmc_name && multi_gpu_config.process_rank == 0)
        zero_checkpoint_rotate(folder.c_str(), 0, named); /* what broken saves have left */
    return zero_ok();
}

static inline void zero_gpt2_state_end(GPT2* model, FILE* file, const char* filename, int step,
                                       const DataLoader* loader) {
    if (fclose(file) != 0) zeroCheck(zero_error(ZERO_ERROR_MEMORY, "no host memory for llm.c's state"));
    zero_gpt2_close_step(model->zero);
    zeroCheck(zero_guard([&]() { return zero_gpt2_save(model, filename, step, loader); }));
}

/* ------------------------------------------------------------------ the place in the data */

/* Brings the loader to the shard that a state is of, and checks that the data is what it was. */
static inline ZeroResult zero_gpt2_find_shard(DataLoader* loader, const ZeroGpt2State& there) {
    const uint64_t shards = loader->glob_result.gl_pathc;
    if ((there.shuffled && there.shard_order.size() != shards) || there.shard >= shards)
        return zero_error(
            ZERO_ERROR_ARGUMENT,
            "it was at file %llu of the training data%s; -i names %llu files: resume with the same data",
            (unsigned long long)there.shard + 1,
            there.shuffled ? (", one of " + std::to_string(there.shard_order.size())).c_str() : "",
            (unsigned long long)shards);
    if (there.shuffled) memcpy(loader->shard_indices, there.shard_order.data(), (size_t)shards * sizeof(int));
    dataloader_load_shard_(loader, (int)there.shard);
    if (there.shuffled ? there.samples.size() != loader->shard_num_samples
                       : there.sample > loader->shard_num_samples)
        return zero_error(ZERO_ERROR_ARGUMENT,
                          "it was at sample %llu of %llu in file %llu of the training data, which has %zu "
                          "samples: resume with the same data (-i)",
                          (unsigned long long)there.sample, (unsigned long long)there.samples.size(),
                          (unsigned long long)there.shard + 1, (size_t)loader->shard_num_samples);
    return zero_ok();
}

/* Of a state for other ranks or batches: where this run goes on. tokens: that a sample of all ranks had. */
static inline ZeroResult zero_gpt2_move(DataLoader* loader, const ZeroGpt2State& there, uint64_t tokens,
                                        std::string* state, std::string* said) {
    const uint64_t shards = loader->glob_result.gl_pathc, tokens_here = loader->total_batch_size_bytes / 2;
    const uint64_t seen = there.sample * tokens;
    uint64_t shard = there.shard, sample = seen / tokens_here;
    if (there.shuffled != loader->should_shuffle) { /* -a 1 was taken away or added */
        shard = sample = 0;
        *said = "the data begins anew, because -a is another one";
    } else if (shard >= shards)
        return zero_error(
            ZERO_ERROR_ARGUMENT,
            "it was at file %llu of the training data, -i names %llu: resume with the same data",
            (unsigned long long)shard + 1, (unsigned long long)shards);
    dataloader_load_shard_(loader, (int)shard);
    sample = std::min(sample, (uint64_t)loader->shard_num_samples);
    if (loader->should_shuffle && said->empty())
        *said = "shuffled data goes on at the same place, in an order drawn anew: until the epoch ends, some "
                "samples come "
                "twice and some not at all";
    else if (said->empty() && sample * tokens_here != seen)
        *said = "data goes on at token " + std::to_string(sample * tokens_here) + " of file " +
                std::to_string(shard + 1) + ", of which " + std::to_string(seen) + " were seen";
    state->resize(ZERO_GPT2_HEADER_BYTES);
    zero_gpt2_set_int(state, ZERO_GPT2_SHUFFLE_WORD, loader->should_shuffle);
    zero_gpt2_set_long(state, ZERO_GPT2_SHARD_WORD, shard);
    zero_gpt2_set_long(state, ZERO_GPT2_SAMPLE_WORD, sample);
    if (!loader->should_shuffle) return zero_ok();
    prepare_intra_shard_indices_(loader);
    const size_t counts[] = {(size_t)shards, (size_t)loader->shard_num_samples};
    state->append((const char*)&counts[0], sizeof(size_t));
    state->append((const char*)loader->shard_indices, counts[0] * sizeof(int));
    state->append((const char*)&counts[1], sizeof(size_t));
    state->append((const char*)loader->intra_shard_indices, counts[1] * sizeof(int));
    state->append((const char*)&loader->shuffle_rng, sizeof(loader->shuffle_rng));
    return zero_ok();
}

/* What load_state shall read on this rank, from the strings of a checkpoint. The model is not touched. */
static inline ZeroResult zero_gpt2_state_for(const GPT2* model, const ZeroFileHeader& header,
                                             DataLoader* loader, std::string* state, std::string* said) {
    const int rank = loader->process_rank, ranks = loader->num_processes; /* 0 and 1 with -R ordered */
    std::map<std::string, std::string> strings = header.strings;
    ZeroGpt2State there;
    uint64_t ranks_there = 0, batch = 0, length = 0;
    while (strings.count("llmc.state." + std::to_string(ranks_there))) ranks_there++;
    const char* at = strings["llmc.batch"].c_str();
    if (ranks_there < 1 || !zero_file_number(&at, ' ', 10, &batch) ||
        !zero_file_number(&at, '\0', 10, &length))
        return zero_error(ZERO_ERROR_ARGUMENT, "it was not written by llm.c: no llmc.batch in its metadata");
    const int same = (int)ranks_there == ranks && strings["llmc.batch"] == zero_gpt2_dealing(loader);
    const uint64_t source = (uint64_t)rank % ranks_there, turn = (uint64_t)rank / ranks_there;
    *state = zero_gpt2_from_hex(strings["llmc.state." + std::to_string(source)]);
    ZERO_TRY(zero_gpt2_parse_state(*state, sizeof(loader->shuffle_rng), &there));
    if (same && there.shuffled == loader->should_shuffle) {
        ZERO_TRY(zero_gpt2_find_shard(loader, there));
    } else {
        std::string first = zero_gpt2_from_hex(strings["llmc.state.0"]);
        ZERO_TRY(zero_gpt2_parse_state(first, sizeof(loader->shuffle_rng), &there));
        ZERO_TRY(zero_gpt2_move(loader, there, ranks_there * batch * length, state, said));
    }
    for (int word = ZERO_GPT2_RNG_WORD; word <= ZERO_GPT2_LAST_RNG_WORD && turn > 0; word += 2)
        zero_gpt2_set_long(state, word, zero_gpt2_state_long(*state, word) ^ zero_mix(turn));
    zero_gpt2_set_int(state, ZERO_GPT2_RANKS_WORD, multi_gpu_config.num_processes);
    zero_gpt2_set_int(state, ZERO_GPT2_RANK_WORD, multi_gpu_config.process_rank);
    zero_gpt2_set_int(state, ZERO_GPT2_MASTERS_WORD, model->use_master_weights);
    return zero_ok();
}

/* ------------------------------------------------------------------ loading */

/* llm.c hands betas, eps and weight decay to each update: until the first one, what the file says is right. */
static inline void zero_gpt2_adopt_settings(ZeroGpt2* zero, const char* path) {
    ZeroConfig* config = &zero->z.config;
    double* const settings[] = {&config->beta1, &config->beta2, &config->eps, &config->weight_decay};
    const char* const names[] = {"beta1", "beta2", "eps", "weight_decay"};
    ZeroFileHeader header;
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    if (zero_file_read_header(file, &header).code == ZERO_OK)
        for (int i = 0; i < 4; i++) {
            double value = -1.0;
            zero_number_value(header.strings[names[i]].c_str(), &value);
            if (value >= 0.0 && value <= 3.4e38) *settings[i] = value;
        }
    close(file);
}

/* Loads one of our files. Nothing of the model has changed unless the result is ok. */
static inline ZeroResult zero_gpt2_load_file(GPT2* model, const std::string& path, DataLoader* loader,
                                             std::string* state) {
    ZeroGpt2* zero = model->zero;
    ZeroOptimizer* z = &zero->z;
    ZeroCheckpoint what = zero_gpt2_describe_checkpoint(model);
    ZeroLoad load;
    std::string said;
    zero_gpt2_adopt_settings(zero, path.c_str());
    ZeroResult result = zero_load_check(&load, z, path.c_str(), &what);
    if (result.code == ZERO_OK) {
        result = zero_agree(
            z, zero_guard([&]() { return zero_gpt2_state_for(model, load.header, loader, state, &said); }));
        if (result.code != ZERO_OK)
            result = zero_error(result.code, "%.60s: %s", zero_base_name(path.c_str()), result.text);
    }
    if (result.code == ZERO_OK) result = zero_load_apply(&load);
    zero_load_close(&load);
    if (result.code != ZERO_OK) return result;
    zero->samples = what.samples;
    zero->resumed = load.t > 0 ? z->config : ZeroConfig();
    zero_gpt2_extra_step = load.header.strings.count("llmc.extra") ? what.step : 0;
    const std::string ranks = load.header.strings["ranks"]; /* later files do not say */
    printf0("resumed from step %llu in %s%s%s%s%s%s\n", (unsigned long long)what.step, path.c_str(),
            ranks.empty() || ranks == std::to_string(z->ranks) ? ""
                                                               : (", written by " + ranks + " ranks").c_str(),
            what.note[0] ? "; " : "", what.note, said.empty() ? "" : "; ", said.c_str());
    return zero_ok();
}

/* Loads state files of llm.c without llmc_zero. */
template <typename NameOf>
static inline ZeroResult zero_gpt2_load_old(GPT2* model, NameOf name_of, DataLoader* loader,
                                            std::string* state) {
    ZeroOptimizer* z = &model->zero->z;
    ZeroGpt2OldState old;
    std::string said;
    ZeroResult result = zero_gpt2_old_open(&old, z, name_of);
    if (result.code == ZERO_OK) {
        *state = old.state;
        result = zero_agree(z, zero_guard([&]() {
                                ZeroGpt2State there;
                                ZERO_TRY(zero_gpt2_parse_state(*state, sizeof(loader->shuffle_rng), &there));
                                if (there.shuffled != loader->should_shuffle)
                                    return zero_error(ZERO_ERROR_ARGUMENT,
                                                      "written with another -a: resume with the same");
                                if (loader->num_processes == z->ranks)
                                    return zero_gpt2_find_shard(loader, there);
                                const uint64_t round = (uint64_t)z->ranks * loader->B * loader->T;
                                return zero_gpt2_move(loader, there, round, state, &said);
                            }));
    }
    if (zero_gpt2_ordered(model)) /* what is saved next has to be the same on all ranks */
        for (int word = ZERO_GPT2_RNG_WORD; word <= ZERO_GPT2_LAST_RNG_WORD && !state->empty(); word += 2)
            zero_gpt2_set_long(state, word, model->rng_state);
    if (result.code == ZERO_OK) {
        zero_gpt2_set_int(state, ZERO_GPT2_MASTERS_WORD, model->use_master_weights);
        result = zero_gpt2_old_apply(&old);
    }
    zero_gpt2_old_close(&old);
    if (result.code == ZERO_OK)
        printf0("resumed from step %llu in %s%s%s%s; the next checkpoint has the new format\n",
                (unsigned long long)old.step, name_of(0).c_str(),
                z->ranks > 1 ? " and those of the other ranks" : "", said.empty() ? "" : "; ", said.c_str());
    return result;
}

/* What a log lacks of the training lines of steps 0 .. step - 1, or has too much. */
typedef struct ZeroGpt2Log {
    uint64_t next; /* step of the training line that should follow */
    uint64_t lost, first_lost, doubled, first_doubled, foreign, first_foreign;
} ZeroGpt2Log;

/* Counts a line; 1: it is of `step` or later. Other lines than llm.c's stay: a fork may have some. */
static inline int zero_gpt2_log_line(ZeroGpt2Log* log, const char* line, size_t bytes, uint64_t number,
                                     uint64_t step) {
    unsigned long long at = 0;
    char kind[8] = "";
    const int ours = strlen(line) == bytes && sscanf(line, "s:%llu %7[a-z]:", &at, kind) == 2;
    if (ours && at >= step) return 1;
    if (!ours && log->foreign++ == 0) log->first_foreign = number;
    if (!ours || strcmp(kind, "trl") != 0) return 0;
    if (at < log->next && log->doubled++ == 0) log->first_doubled = at;
    if (at > log->next && log->lost == 0) log->first_lost = log->next;
    if (at > log->next) log->lost += at - log->next;
    log->next = std::max(log->next, (uint64_t)at + 1);
    return 0;
}

static inline void zero_gpt2_log_warn(ZeroGpt2Log* log, const char* path, uint64_t step) {
    if (log->next < step && log->lost == 0) log->first_lost = log->next;
    if (log->next < step) log->lost += step - log->next;
    if (log->foreign)
        printf0("warning: %s: %llu line(s) that are none of llm.c's, the first is line %llu\n", path,
                (unsigned long long)log->foreign, (unsigned long long)log->first_foreign);
    if (log->doubled)
        printf0("warning: %s: %llu line(s) of a step that has one before, the first of step %llu\n", path,
                (unsigned long long)log->doubled, (unsigned long long)log->first_doubled);
    if (log->lost)
        printf0("warning: %s: the lines of %llu step(s) before step %llu are lost, the first is step %llu\n",
                path, (unsigned long long)log->lost, (unsigned long long)step,
                (unsigned long long)log->first_lost);
}

/* main.log as it was when step `step` was saved: cut in place, so that its mode, group and links stay, where the first line
   of that step or a later one begins, or a last line that broke off. What is odd about the rest is said. */
static inline ZeroResult zero_gpt2_cut_log(const std::string& folder, uint64_t step) {
    const std::string path = folder + "/main.log";
    FILE* file = fopen(path.c_str(), "r+");
    ZeroGpt2Log log = ZeroGpt2Log();
    char* line = NULL;
    size_t capacity = 0;
    ssize_t bytes;
    off_t kept = 0;
    int failed = 0;
    if (!file && errno == ENOENT) zero_gpt2_log_warn(&log, path.c_str(), step);
    if (!file && errno == ENOENT) return zero_ok();
    for (uint64_t number = 1; file && (bytes = getline(&line, &capacity, file)) > 0; number++) {
        if (line[bytes - 1] != '\n' || zero_gpt2_log_line(&log, line, (size_t)bytes, number, step)) break;
        kept += bytes;
    }
    failed = !file || ferror(file) || ftruncate(fileno(file), kept) != 0;
    failed = failed || (fsync(fileno(file)) != 0 && errno != EINVAL);
    const int error = errno;
    free(line);
    if (file) fclose(file);
    if (failed)
        return zero_error(ZERO_ERROR_SYSTEM, "cutting main.log back to step %llu: %s",
                          (unsigned long long)step, strerror(error));
    zero_gpt2_log_warn(&log, path.c_str(), step);
    return zero_ok();
}

/* The newest DONE below *step that rank 0 sees, on all ranks. *kind: 0 none, 1 with our file, 2 with llm.c's own state
   files, 3 with neither. */
static inline ZeroResult zero_gpt2_next_candidate(ZeroOptimizer* z, const std::string& folder, uint64_t* step,
                                                  int* kind) {
    std::vector<uint64_t> steps, all(2 * (size_t)z->ranks);
    uint64_t own[2] = {0, 0};
    ZERO_TRY(zero_agree(z, z->rank == 0 ? zero_gpt2_done_steps(folder, &steps) : zero_ok()));
    while (!steps.empty() && steps.back() >= *step) steps.pop_back();
    if (!steps.empty()) {
        own[0] = steps.back();
        own[1] = zero_gpt2_there(zero_gpt2_file(folder, own[0]))          ? 1
                 : zero_gpt2_there(zero_gpt2_old_file(folder, own[0], 0)) ? 2
                                                                          : 3;
    }
    ZERO_TRY(zero_exchange_words(z, own, all.data()));
    *step = all[0];
    *kind = (int)all[1];
    return zero_ok();
}

/* Loads the newest checkpoint that is whole. The model was built from the model file that `filename` belongs to. */
static inline ZeroResult zero_gpt2_load(GPT2* model, const char* filename, DataLoader* loader,
                                        std::string* state) {
    ZeroOptimizer* z = &model->zero->z;
    const int weights_from_model = !z->config.masters;
    std::string folder, first_reason;
    uint64_t named = 0, step = UINT64_MAX;
    int kind = 0, tried = 0;
    if (!zero_gpt2_state_name(filename, &folder, &named)) {
        ZeroFileHeader header;
        const int file = open(filename, O_RDONLY | O_CLOEXEC);
        const int ours = file < 0 || zero_file_read_header(file, &header).code == ZERO_OK;
        if (file >= 0) close(file);
        if (ours || z->ranks > 1) return zero_gpt2_load_file(model, filename, loader, state);
        return zero_gpt2_load_old(
            model, [&](int) { return std::string(filename); }, loader, state);
    }
    for (;; tried++) {
        ZERO_TRY(zero_gpt2_next_candidate(z, folder, &step, &kind));
        if (kind == 0) break;
        ZeroResult result;
        if (kind == 1)
            result = zero_gpt2_load_file(model, zero_gpt2_file(folder, step), loader, state);
        else if (kind == 3)
            result = zero_error(ZERO_ERROR_FILE, "DONE_%08llu stands there alone", (unsigned long long)step);
        else if (weights_from_model && step != named)
            result = zero_error(ZERO_ERROR_FILE, "the model was read from step %llu: remove DONE_%08llu",
                                (unsigned long long)named, (unsigned long long)named);
        else
            result = zero_gpt2_load_old(
                model, [&](int rank) { return zero_gpt2_old_file(folder, step, rank); }, loader, state);
        if (result.code == ZERO_OK)
            return zero_agree(z, z->rank == 0 ? zero_gpt2_cut_log(folder, step) : zero_ok());
        if (result.code != ZERO_ERROR_FILE) return result;
        printf0("passed over: %s\n", result.text);
        if (tried == 0) first_reason = result.text;
    }
    return zero_error(ZERO_ERROR_FILE,
                      "none of %d checkpoints in %.60s is whole (%.120s): delete them to begin anew", tried,
                      folder.c_str(), first_reason.c_str());
}

/* What load_state reads: its state without the arrays, which are loaded now. */
static inline FILE* zero_gpt2_state_open(GPT2* model, const char* filename, DataLoader* loader) {
    ZeroGpt2* zero = model->zero;
    zeroCheck(zero_guard([&]() {
        std::string state;
        ZERO_TRY(zero_gpt2_load(model, filename, loader, &state));
        free(zero->state);
        zero->state = (char*)malloc(state.size());
        if (!zero->state) return zero_error(ZERO_ERROR_MEMORY, "no host memory for llm.c's state");
        memcpy(zero->state, state.data(), zero->state_bytes = state.size());
        return zero_ok();
    }));
    FILE* file = fmemopen(zero->state, zero->state_bytes, "rb");
    if (!file) zeroCheck(zero_error(ZERO_ERROR_MEMORY, "no host memory for llm.c's state"));
    return file;
}

/* ------------------------------------------------------------------ SIGTERM */

/* Whether a rank has got SIGTERM by the last step: the same on all ranks. */
static inline int zero_gpt2_stopping(GPT2* model) {
    ZeroGpt2* zero = model->zero;
    ZeroReport report;
    if (zero->settings.save_every == 0 || zero->steps == 0 || zero->stop) return zero->stop;
    zeroCheck(zero_report(&zero->z, &report));
    return zero->stop = report.votes > 0;
}

/* The same, behind the checkpoint. */
static inline int zero_gpt2_stopped(GPT2* model, int step) {
    if (!zero_gpt2_stopping(model)) return 0;
    printf0("stopped by a signal after step %d, which is saved: -y 1 resumes\n", step);
    return 1;
}

#endif /* LLMC_ZERO_GPT2_CHECKPOINT_CUH_INCLUDED */
