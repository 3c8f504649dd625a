/* llmc_zero/checkpoint_parts.cuh - what saving and loading share: the tensors and settings of a file, which ranges of it a
   rank holds, copies between the device and pinned buffers, agreement between ranks. checkpoint.cuh is what programs use.

   The file holds one array of all weights in model order, one of all exp_avg, one of all exp_avg_sq, as far as they are
   kept; bf16 weights come last, so that everything stays aligned. Element i of the model (its model index) lies i elements
   behind the begin of each array, whoever owns it.

   defines: ZeroTensor, ZeroString, ZeroCheckpoint, zero_checkpoint, zero_agree, ZeroArray, zero_checkpoint_arrays,
            zero_checkpoint_settings, zero_checkpoint_header, zero_checkpoint_chunks, ZeroSpan, zero_next_span,
            zero_copy_span, ZeroStaging
*/
#ifndef LLMC_ZERO_CHECKPOINT_PARTS_CUH_INCLUDED
#define LLMC_ZERO_CHECKPOINT_PARTS_CUH_INCLUDED

#include "numbers.cuh"
#include "replicas.cuh"
#include "safetensors.cuh"

/* A tensor as it stands in the file: some segments, one after another in the layout's list (the layers of a tensor). */
typedef struct ZeroTensor {
    const char* name;
    int first_segment, segments;
    int dims; /* 0 .. 8 */
    uint64_t shape[ZERO_FILE_DIMS_MAX];
} ZeroTensor;

typedef struct ZeroString {
    const char *key, *value;
} ZeroString;

typedef struct ZeroCheckpoint {
    const ZeroTensor*
        tensors; /* they cover all segments, in order; NULL: each segment is a tensor of one dimension */
    int tensors_count;
    const ZeroString*
        strings; /* the caller's, under names that are not the library's (the message tells). Saving:
                                  written. Loading: the file must have the same values */
    int strings_count;
    uint64_t step, samples; /* saving: written; loading: read */
    int read_back; /* saving: 1, and the ranks read what the others have written before the file gets its name */
    char note[128]; /* loading: "", or what was converted */
} ZeroCheckpoint;

static inline ZeroCheckpoint zero_checkpoint(void) {
    ZeroCheckpoint what;
    memset(&what, 0, sizeof(what));
    what.read_back = 1;
    return what;
}

/* ------------------------------------------------------------------ agreement */

/* ok if every rank gave ok; else, on all ranks, the error of the lowest one that failed, after "rank R: " unless all say
   the same. All ranks call it, between two steps; an error of the exchange itself is this rank's alone. So is one of NCCL
   that it is given: the others may be in another collective, and wait there for this rank; end all of them. */
static inline ZeroResult zero_agree(ZeroOptimizer* z, ZeroResult mine) {
    if (mine.code == ZERO_ERROR_NCCL && z->ranks > 1) return mine;
    ZeroResult first = mine;
    uint64_t own[2] = {(uint64_t)mine.code, XXH3_64bits(mine.text, strlen(mine.text))};
    uint64_t* all = (uint64_t*)malloc(2 * sizeof(uint64_t) * (size_t)z->ranks);
    int rank = 0, same = 1;
    if (!all) return zero_error(ZERO_ERROR_MEMORY, "no host memory for %d numbers", 2 * z->ranks);
    ZeroResult exchange = zero_exchange_words(z, own, all);
    while (exchange.code == ZERO_OK && rank < z->ranks && all[2 * rank] == ZERO_OK) rank++;
    if (exchange.code != ZERO_OK || rank == z->ranks) {
        free(all);
        return exchange.code != ZERO_OK && mine.code != ZERO_OK ? mine : exchange;
    }
    first.code = (ZeroCode)all[2 * rank];
    for (int r = 0; r < z->ranks; r++)
        same &= all[2 * r] == all[2 * rank] && all[2 * r + 1] == all[2 * rank + 1];
    for (size_t at = 0; at < sizeof(mine.text) && exchange.code == ZERO_OK; at += sizeof(own)) {
        const size_t bytes = sizeof(mine.text) - at < sizeof(own) ? sizeof(mine.text) - at : sizeof(own);
        memcpy(own, mine.text + at, bytes);
        exchange = zero_exchange_words(z, own, all);
        memcpy(first.text + at, all + 2 * rank, bytes);
    }
    free(all);
    if (exchange.code != ZERO_OK) return exchange;
    return same ? first : zero_error(first.code, "rank %d: %s", rank, first.text);
}

/* ------------------------------------------------------------------ what stands where */

/* One kind of numbers of all tensors: weights, exp_avg or exp_avg_sq. Element i of the model (its model index) lies at
   byte offset + i * element_bytes of the data. */
typedef struct ZeroArray {
    const char *suffix, *dtype;
    size_t element_bytes;
    char* device;
    int is_flat; /* 1: a flat buffer, 0: a shard (stage 0: flat too) */
    uint64_t offset;
} ZeroArray;

static inline int zero_checkpoint_arrays(const ZeroOptimizer* z, ZeroArray* arrays) {
    const int half = !z->masters && z->layout->dtype == ZERO_BF16;
    const int is_flat = !z->schedule.params_sharded;
    const ZeroArray weights = {"", half ? "BF16" : "F32", half ? 2u : 4u, (char*)z->params, is_flat, 0};
    uint64_t offset = 0;
    int count = 0;
    if (!half) arrays[count++] = weights;
    if (z->masters) arrays[0].device = (char*)z->masters, arrays[0].is_flat = 0;
    if (z->exp_avg) arrays[count++] = {".exp_avg", "F32", 4, (char*)z->exp_avg, 0, 0};
    if (z->exp_avg_sq) arrays[count++] = {".exp_avg_sq", "F32", 4, (char*)z->exp_avg_sq, 0, 0};
    if (half) arrays[count++] = weights;
    for (int a = 0; a < count; a++) {
        arrays[a].offset = offset;
        offset += arrays[a].element_bytes * z->layout->model_count;
    }
    return count;
}

static inline ZeroTensor zero_checkpoint_tensor(const ZeroOptimizer* z, const ZeroCheckpoint* what, int i) {
    ZeroTensor tensor;
    if (what->tensors) return what->tensors[i];
    memset(&tensor, 0, sizeof(tensor));
    tensor.name = z->layout->segments[i].name;
    tensor.first_segment = i;
    tensor.segments = tensor.dims = 1;
    tensor.shape[0] = z->layout->segments[i].count;
    return tensor;
}

/* The caller's tensors as tensors of the file, for one array. */
static inline ZeroResult zero_checkpoint_tensors(const ZeroOptimizer* z, const ZeroCheckpoint* what,
                                                 const ZeroArray* array, ZeroFileHeader* header) {
    const ZeroLayout* layout = z->layout;
    const int count = what->tensors ? what->tensors_count : layout->segments_count;
    int next = 0;
    for (int i = 0; i < count; i++) {
        const ZeroTensor tensor = zero_checkpoint_tensor(z, what, i);
        size_t elements = 0;
        uint64_t shape_elements = 1;
        if (!tensor.name || !tensor.name[0] || tensor.dims < 0 || tensor.dims > ZERO_FILE_DIMS_MAX ||
            tensor.first_segment != next || tensor.segments < 1 ||
            tensor.segments > layout->segments_count - next)
            return zero_error(
                ZERO_ERROR_ARGUMENT,
                "tensor %d (%.60s): %d dimensions, segments %d to %d of %d; it needs a name, 0 to %d "
                "dimensions, and begins at segment %d",
                i, tensor.name ? tensor.name : "no name", tensor.dims, tensor.first_segment,
                tensor.first_segment + tensor.segments - 1, layout->segments_count, ZERO_FILE_DIMS_MAX, next);
        const uint64_t begin = array->offset + layout->segments[next].model_offset * array->element_bytes;
        for (int s = 0; s < tensor.segments; s++) elements += layout->segments[next + s].count;
        for (int d = 0; d < tensor.dims; d++) shape_elements *= tensor.shape[d];
        if (shape_elements != elements)
            return zero_error(ZERO_ERROR_ARGUMENT,
                              "tensor %d (%.60s): its shape has %llu elements, its segments %zu", i,
                              tensor.name, (unsigned long long)shape_elements, elements);
        header->tensors.push_back({std::string(tensor.name) + array->suffix, array->dtype,
                                   std::vector<uint64_t>(tensor.shape, tensor.shape + tensor.dims), begin,
                                   begin + elements * array->element_bytes});
        next += tensor.segments;
    }
    if (next == layout->segments_count) return zero_ok();
    return zero_error(ZERO_ERROR_ARGUMENT, "the tensors cover %d of %d segments", next,
                      layout->segments_count);
}

static inline const char* zero_algorithm_name(ZeroAlgorithm algorithm) {
    return algorithm == ZERO_ADAMW ? "adamw" : algorithm == ZERO_ADAM ? "adam" : "sgd";
}

/* Whatever the locale is: a file says the same in all of them. */
static inline std::string zero_text_of(double number) { return zero_number_shortest(number).text; }

/* Loading refuses what saving does: a count that is negative as a signed number is a mistake of the caller's. */
static inline ZeroResult zero_checkpoint_count(const char* key, uint64_t value, ZeroFileHeader* header) {
    if (value > ZERO_FILE_NUMBER_MAX)
        return zero_error(ZERO_ERROR_ARGUMENT, "%s is %llu; at most 2^63 - 1 is possible", key,
                          (unsigned long long)value);
    header->strings[key] = std::to_string(value);
    return zero_ok();
}

/* Settings that a resumed run must share, because the state was made with them. */
static inline std::map<std::string, std::string> zero_checkpoint_settings(const ZeroOptimizer* z,
                                                                          const ZeroCheckpoint* what) {
    const ZeroConfig* c = &z->config;
    std::map<std::string, std::string> strings;
    strings["optimizer"] = zero_algorithm_name(c->algorithm);
    strings["weight_decay"] = zero_text_of(c->weight_decay);
    strings["seed"] = std::to_string(c->seed);
    if (c->algorithm == ZERO_SGD) strings["momentum"] = zero_text_of(c->momentum);
    if (c->algorithm != ZERO_SGD) strings["beta1"] = zero_text_of(c->beta1);
    if (c->algorithm != ZERO_SGD) strings["beta2"] = zero_text_of(c->beta2);
    if (c->algorithm != ZERO_SGD) strings["eps"] = zero_text_of(c->eps);
    for (int i = 0; i < what->strings_count; i++) strings[what->strings[i].key] = what->strings[i].value;
    return strings;
}

static inline std::string zero_checkpoint_type(const ZeroOptimizer* z) {
    return z->layout->dtype == ZERO_FP32 ? "fp32"
           : z->masters                  ? "bf16 with fp32 masters"
                                         : "bf16 with stochastic rounding";
}

/* Names of strings that are the library's own; a caller's string of such a name would be lost in a file. */
static inline int zero_checkpoint_reserved(const std::string& key) {
    for (const char* own : {"format", "pieces",         "header_xxh3", "optimizer", "weight_decay",
                            "seed",   "momentum",       "beta1",       "beta2",     "eps",
                            "type",   "ranks",          "stage",       "step",      "samples",
                            "t",      "skipped_in_row", "skipped",     "dropped",   "max_norm"})
        if (key == own) return 1;
    return 0;
}

static inline ZeroResult zero_checkpoint_check_strings(const ZeroCheckpoint* what) {
    std::set<std::string> keys;
    for (int i = 0; i < what->strings_count; i++) {
        const ZeroString* string = &what->strings[i];
        if (!string->key || !string->value)
            return zero_error(ZERO_ERROR_ARGUMENT, "string %d (%.60s) has no %s", i,
                              string->key ? string->key : "no name", string->key ? "value" : "name");
        if (zero_checkpoint_reserved(string->key) || !keys.insert(string->key).second)
            return zero_error(ZERO_ERROR_ARGUMENT,
                              "string %d: a checkpoint has another one named %.60s: rename it", i,
                              string->key);
    }
    return zero_ok();
}

/* Tensors and strings of the file that this run would write now (without t, skips, step and samples). */
static inline ZeroResult zero_checkpoint_header(const ZeroOptimizer* z, const ZeroCheckpoint* what,
                                                const ZeroArray* arrays, int arrays_count,
                                                ZeroFileHeader* header) {
    ZERO_TRY(zero_checkpoint_check_strings(what));
    for (int a = 0; a < arrays_count; a++) ZERO_TRY(zero_checkpoint_tensors(z, what, &arrays[a], header));
    header->data_bytes = header->tensors.empty() ? 0 : header->tensors.back().end;
    header->strings = zero_checkpoint_settings(z, what);
    header->strings["type"] = zero_checkpoint_type(z);
    header->strings["max_norm"] = zero_text_of(z->config.max_norm);
    return zero_ok();
}

/* ------------------------------------------------------------------ ranges and pieces */

/* What a rank holds, in model order. rank ZERO_ALL_RANKS: everything, as in stage 0. */
static inline ZeroResult zero_checkpoint_chunks(const ZeroOptimizer* z, int rank,
                                                std::vector<ZeroChunk>* chunks) {
    std::vector<size_t> bucket_first((size_t)z->layout->buckets_count + 1);
    ZeroChunk* table;
    ZERO_TRY(zero_chunk_table(z->layout, rank, ZERO_FILE_PIECE_BYTES / 4, &table, bucket_first.data()));
    ZeroResult result = zero_guard([&]() {
        chunks->assign(table, table + bucket_first.back());
        return zero_ok();
    });
    free(table);
    for (ZeroChunk& chunk : *chunks)
        if (z->config.stage == 0) chunk.state_offset = chunk.flat_offset;
    std::sort(chunks->begin(), chunks->end(),
              [](const ZeroChunk& a, const ZeroChunk& b) { return a.model_offset < b.model_offset; });
    return result;
}

/* A run of elements that follow one another in the file: from element `start` of chunk `chunk` on. */
typedef struct ZeroSpan {
    size_t chunk, start, count;
    uint64_t model_offset;
} ZeroSpan;

/* The run behind `span`, of at most max_count elements; begin with all zero. 0: there is none. */
static inline int zero_next_span(const std::vector<ZeroChunk>& chunks, size_t max_count, ZeroSpan* span) {
    size_t chunk = span->chunk, start = span->start, left = span->count;
    while (left > 0) { /* behind the last run */
        const size_t take = std::min(left, chunks[chunk].count - start);
        left -= take, start += take;
        if (start == chunks[chunk].count) chunk++, start = 0;
    }
    if (chunk == chunks.size()) return 0;
    *span = {chunk, start, 0, chunks[chunk].model_offset + start};
    while (chunk < chunks.size() && span->count < max_count &&
           chunks[chunk].model_offset + start == span->model_offset + span->count) {
        span->count += std::min(max_count - span->count, chunks[chunk].count - start);
        chunk++, start = 0;
    }
    return 1;
}

/* Copies a run between the device and host memory, on the compute stream. */
static inline ZeroResult zero_copy_span(const ZeroOptimizer* z, const ZeroArray* array,
                                        const std::vector<ZeroChunk>& chunks, const ZeroSpan* span,
                                        char* host, cudaMemcpyKind kind) {
    size_t done = 0, start = span->start;
    for (size_t c = span->chunk; done < span->count; c++, start = 0) {
        const size_t take = std::min(span->count - done, chunks[c].count - start);
        const uint64_t first = array->is_flat ? chunks[c].flat_offset : chunks[c].state_offset;
        char* device = array->device + (first + start) * array->element_bytes;
        char* place = host + done * array->element_bytes;
        const int down = kind == cudaMemcpyDeviceToHost;
        ZERO_TRY_CUDA(cudaMemcpyAsync(down ? place : device, down ? device : place,
                                      take * array->element_bytes, kind, z->comm.compute));
        done += take;
    }
    return zero_ok();
}

/* Two pinned buffers, and an event behind the copy that last used each. */
typedef struct ZeroStaging {
    char* buffer[2];
    cudaEvent_t copied[2];
} ZeroStaging;

static inline ZeroResult zero_staging_create(ZeroStaging* staging) {
    for (int i = 0; i < 2; i++) {
        ZERO_TRY_CUDA(cudaMallocHost((void**)&staging->buffer[i], ZERO_FILE_PIECE_BYTES));
        ZERO_TRY_CUDA(cudaEventCreateWithFlags(&staging->copied[i], cudaEventDisableTiming));
    }
    return zero_ok();
}

/* Nothing is freed while the streams are stuck: that would wait for them. */
static inline void zero_staging_free(ZeroStaging* staging, const ZeroComm* comm) {
    for (int i = 0; i < 2 && !zero_comm_is_stuck(comm); i++) {
        if (staging->buffer[i]) cudaFreeHost(staging->buffer[i]);
        if (staging->copied[i]) cudaEventDestroy(staging->copied[i]);
    }
    memset(staging, 0, sizeof(*staging));
}

static inline const char* zero_base_name(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static inline ZeroResult zero_checkpoint_callable(const ZeroOptimizer* z, const char* call) {
    ZERO_TRY(zero_check_made(z, call));
    if (!z->params || !z->state_there)
        return zero_error(ZERO_ERROR_ORDER, "call zero_alloc_params and zero_alloc_state before %s", call);
    return zero_check_between_steps(z, call);
}

#endif /* LLMC_ZERO_CHECKPOINT_PARTS_CUH_INCLUDED */
