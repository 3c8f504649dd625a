/* llmc_zero/checkpoint_load.cuh - loading: the file is checked by all ranks together, then each reads what it holds. The
   manual, with the numbered promises, is in checkpoint.cuh.

       ZeroLoad load;
       result = zero_load_check(&load, &z, path, &what);            // nothing of z has changed
       if (result.code == ZERO_OK) result = zero_load_apply(&load);
       zero_load_close(&load);                                      // always

   defines: ZeroLoad, zero_load_check, zero_load_apply, zero_load_close, zero_checkpoint_load
*/
#ifndef LLMC_ZERO_CHECKPOINT_LOAD_CUH_INCLUDED
#define LLMC_ZERO_CHECKPOINT_LOAD_CUH_INCLUDED

#include <fcntl.h>

#include "checkpoint_parts.cuh"

/* A file that was checked and not yet loaded. */
typedef struct ZeroLoad {
    ZeroOptimizer* z;
    ZeroArray arrays[3];
    int arrays_count, fd;
    ZeroFileHeader header;
    uint64_t t, step, samples;
    uint64_t skipped, skipped_in_row, dropped;
    struct stat status; /* when it was opened */
} ZeroLoad;

static inline void zero_load_close(ZeroLoad* load) {
    if (load->fd >= 0) close(load->fd);
    load->fd = -1;
}

static inline ZeroResult zero_load_number(const ZeroFileHeader& header, const char* key, uint64_t* value) {
    const auto found = header.strings.find(key);
    const char* at = found == header.strings.end() ? "" : found->second.c_str();
    if (zero_file_number(&at, '\0', 10, value) && *value <= ZERO_FILE_NUMBER_MAX) return zero_ok();
    return zero_error(ZERO_ERROR_FILE, "%s is \"%s\"; a whole number up to 2^63 - 1 is needed", key,
                      zero_file_quote(found == header.strings.end() ? "" : found->second).c_str());
}

/* "F32 [4,5] w" */
static inline std::string zero_file_tensor_text(const ZeroFileTensor& tensor) {
    std::string text = zero_file_quote(tensor.name) + " " + zero_file_quote(tensor.dtype) + " [";
    for (size_t d = 0; d < tensor.shape.size(); d++) text += (d ? "," : "") + std::to_string(tensor.shape[d]);
    return text + "]";
}

static inline ZeroResult zero_load_setting(const ZeroFileHeader& found, const std::string& key,
                                           const std::string& here) {
    const auto in_file = found.strings.find(key);
    std::string there = in_file == found.strings.end() ? "no such setting" : in_file->second;
    /* versions before 300 wrote numbers as the host program's locale has them: 0,9 */
    for (const char* number : {"weight_decay", "momentum", "beta1", "beta2", "eps"})
        if (key == number) std::replace(there.begin(), there.end(), ',', '.');
    if (there == here) return zero_ok();
    return zero_error(ZERO_ERROR_ARGUMENT, "%s: the file has %s, this run %s", zero_file_quote(key).c_str(),
                      zero_file_quote(there).c_str(), zero_file_quote(here).c_str());
}

/* fp32 params and the masters of bf16 ones are the same numbers; weights in bf16 alone are not. */
static inline int zero_types_change(const ZeroFileHeader& found, const std::string& here) {
    const auto there = found.strings.find("type");
    const std::string masters = "bf16 with fp32 masters";
    return there != found.strings.end() && (here == "fp32" || here == masters) &&
           (there->second == "fp32" || there->second == masters);
}

/* What is in the file against what this run would write. */
static inline ZeroResult zero_load_compare(const ZeroLoad* load, const ZeroCheckpoint* what) {
    ZeroFileHeader expected = ZeroFileHeader();
    const ZeroFileHeader& found = load->header;
    ZERO_TRY(zero_checkpoint_header(load->z, what, load->arrays, load->arrays_count, &expected));
    ZERO_TRY(zero_load_setting(found, "optimizer", expected.strings["optimizer"]));
    for (const auto& setting : zero_checkpoint_settings(load->z, what))
        ZERO_TRY(zero_load_setting(found, setting.first, setting.second));
    if (!zero_types_change(found, expected.strings["type"]))
        ZERO_TRY(zero_load_setting(found, "type", expected.strings["type"]));
    std::stable_sort(expected.tensors.begin(), expected.tensors.end(), zero_file_before);
    for (size_t i = 0; i < std::max(found.tensors.size(), expected.tensors.size()); i++) {
        const std::string a =
            i < found.tensors.size() ? zero_file_tensor_text(found.tensors[i]) : "no more tensors";
        const std::string b =
            i < expected.tensors.size() ? zero_file_tensor_text(expected.tensors[i]) : "no more tensors";
        if (a != b || found.tensors[i].name != expected.tensors[i].name)
            return zero_error(ZERO_ERROR_ARGUMENT, "tensor %zu: the file has %s, this run %s", i, a.c_str(),
                              b.c_str());
    }
    return zero_ok();
}

static inline ZeroResult zero_load_open(ZeroLoad* load, const char* path, ZeroCheckpoint* what) {
    ZERO_TRY(zero_checkpoint_callable(load->z, "zero_checkpoint_load"));
    load->arrays_count = zero_checkpoint_arrays(load->z, load->arrays);
    load->fd =
        zero_retry([&]() { return open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); }); /* a pipe would wait */
    if (load->fd < 0) return zero_error(ZERO_ERROR_SYSTEM, "cannot open it: %s", strerror(errno));
    if (fstat(load->fd, &load->status) != 0)
        return zero_error(ZERO_ERROR_SYSTEM, "fstat: %s", strerror(errno));
    ZERO_TRY(zero_file_read_header(load->fd, &load->header));
    ZERO_TRY(zero_load_compare(load, what));
    ZERO_TRY(zero_load_number(load->header, "t", &load->t));
    ZERO_TRY(zero_load_number(load->header, "step", &load->step));
    ZERO_TRY(zero_load_number(load->header, "samples", &load->samples));
    for (const auto& count :
         {std::make_pair("skipped", &load->skipped), std::make_pair("skipped_in_row", &load->skipped_in_row),
          std::make_pair("dropped", &load->dropped)})
        if (load->header.strings.count(count.first)) /* older files have none */
            ZERO_TRY(zero_load_number(load->header, count.first, count.second));
    const std::string here = zero_checkpoint_type(load->z), there = load->header.strings["type"];
    what->note[0] = '\0';
    if (here != there)
        snprintf(what->note, sizeof(what->note), "saved in %s, loaded into %s",
                 zero_file_quote(there).c_str(), here.c_str());
    return zero_ok();
}

/* The checksums of this rank's share of the pieces: those that lie where its own slices of each array are, more or less,
   so that what it reads here is what it loads next. */
static inline ZeroResult zero_load_verify(ZeroLoad* load) {
    std::vector<char> buffer(ZERO_FILE_PIECE_BYTES);
    const uint64_t ranks = (uint64_t)load->z->ranks, count = load->z->layout->model_count;
    for (size_t k = 0; k < load->header.pieces.size(); k++) {
        int a = load->arrays_count - 1;
        while (load->arrays[a].offset > load->header.pieces[k].offset) a--;
        const uint64_t element =
            (load->header.pieces[k].offset - load->arrays[a].offset) / load->arrays[a].element_bytes;
        if (element / ((count + ranks - 1) / ranks) != (uint64_t)load->z->rank) continue;
        zero_comm_progress(&load->z->comm, "load");
        ZERO_TRY(zero_file_check_piece(load->fd, load->header, k, buffer.data()));
    }
    return zero_ok();
}

/* Checks the file on all ranks; nothing of z changes (C3). On success and on an error, zero_load_close follows. what:
   tensors and strings in; step, samples and note out. */
static inline ZeroResult zero_load_check(ZeroLoad* load, ZeroOptimizer* z, const char* path,
                                         ZeroCheckpoint* what) {
    ZeroResult result = zero_guard([&]() {
        *load = ZeroLoad();
        load->z = z, load->fd = -1;
        ZERO_TRY(zero_check_between_steps(z, "zero_checkpoint_load")); /* as in zero_save_run */
        ZERO_TRY(zero_agree(z, zero_guard([&]() { return zero_load_open(load, path, what); })));
        const uint64_t own[2] = {load->header.checksum, 0};
        uint64_t words[2] = {0, 0};
        int odd;
        ZERO_TRY(zero_find_odd_rank(z, own, &odd, words));
        if (odd)
            return zero_error(ZERO_ERROR_SYSTEM, "rank %d sees another file than rank 0: header %s, not %s",
                              odd, zero_file_hex(words[1]).c_str(), zero_file_hex(words[0]).c_str());
        ZERO_TRY(zero_agree(z, zero_guard([&]() { return zero_load_verify(load); })));
        what->step = load->step, what->samples = load->samples;
        return zero_ok();
    });
    if (result.code == ZERO_OK) return result;
    return zero_error(result.code, "loading %.60s: %s", zero_base_name(path), result.text);
}

/* What was checked must be what is read: nobody has written to the file in between. */
static inline ZeroResult zero_load_unchanged(const ZeroLoad* load) {
    struct stat now;
    if (fstat(load->fd, &now) != 0) return zero_error(ZERO_ERROR_SYSTEM, "fstat: %s", strerror(errno));
    if (now.st_size == load->status.st_size && now.st_mtim.tv_sec == load->status.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == load->status.st_mtim.tv_nsec)
        return zero_ok();
    return zero_error(ZERO_ERROR_FILE, "the file was written to while it was read");
}

/* Reads the ranges that this rank holds: the device empties one buffer while the host fills the other. */
static inline ZeroResult zero_load_pieces(ZeroLoad* load, ZeroStaging* staging) {
    ZeroOptimizer* z = load->z;
    std::vector<ZeroChunk> chunks;
    size_t turns = 0;
    ZERO_TRY(zero_staging_create(staging));
    ZERO_TRY(zero_checkpoint_chunks(z, z->config.stage == 0 ? ZERO_ALL_RANKS : z->rank, &chunks));
    for (int a = 0; a < load->arrays_count; a++) {
        const ZeroArray* array = &load->arrays[a];
        ZeroSpan span = {0, 0, 0, 0};
        while (zero_next_span(chunks, ZERO_FILE_PIECE_BYTES / array->element_bytes, &span)) {
            const size_t turn = turns++ % 2;
            zero_comm_progress(&z->comm, "load");
            if (turns > 2) ZERO_TRY(zero_wait_event(&z->comm, staging->copied[turn]));
            ZERO_TRY(zero_file_read(load->fd, staging->buffer[turn], span.count * array->element_bytes,
                                    load->header.data_offset + array->offset +
                                        span.model_offset * array->element_bytes));
            ZERO_TRY(zero_copy_span(z, array, chunks, &span, staging->buffer[turn], cudaMemcpyHostToDevice));
            ZERO_TRY_CUDA(cudaEventRecord(staging->copied[turn], z->comm.compute));
        }
    }
    ZERO_TRY(zero_comm_drain(&z->comm));
    return zero_load_unchanged(load);
}

/* t and the counts of skipped steps, on the device. */
static inline ZeroResult zero_load_scalars(const ZeroLoad* load) {
    ZeroOptimizer* z = load->z;
    ZeroScalars scalars;
    ZERO_TRY_CUDA(cudaMemcpy(&scalars, z->scalars, sizeof(scalars), cudaMemcpyDeviceToHost));
    scalars.t = load->t;
    scalars.skipped = load->skipped;
    scalars.skipped_in_row = scalars.skipped_before = load->skipped_in_row;
    scalars.dropped = load->dropped;
    ZERO_TRY_CUDA(
        cudaMemcpyAsync(z->scalars, &scalars, sizeof(scalars), cudaMemcpyHostToDevice, z->comm.compute));
    ZERO_TRY(zero_comm_drain(&z->comm));
    z->status_in_flight = 0; /* what the host knows of the steps before is old */
    z->status_stale = 1;
    return zero_ok();
}

/* Loads a file that was checked. On an error z holds parts of both states: end, or load another file. */
static inline ZeroResult zero_load_apply(ZeroLoad* load) {
    ZeroOptimizer* z = load->z;
    ZeroStaging staging = {};
    ZeroResult result = zero_params_settle(z); /* earlier gathers are done before slices are written */
    if (result.code == ZERO_OK) result = zero_guard([&]() { return zero_load_pieces(load, &staging); });
    if (result.code != ZERO_OK) zero_comm_drain(&z->comm);
    zero_staging_free(&staging, &z->comm);
    result = zero_agree(z, result);
    if (result.code != ZERO_OK) return zero_error(result.code, "loading: %s", result.text);
    ZERO_TRY(zero_load_scalars(load));
    return zero_state_changed(z);
}

/* Loads what zero_checkpoint_save wrote, on any number of ranks, in any stage, bucket size and reduction; fp32 and bf16
   with masters may change into one another (what->note says so). Settings, seed, the caller's strings, names and shapes
   must be as in the file, or the error names both values; nothing has changed then. The learning rate and max_norm are
   this run's own. header: NULL, or all that the file says (strings). */
static inline ZeroResult zero_checkpoint_load(ZeroOptimizer* z, const char* path, ZeroCheckpoint* what,
                                              ZeroFileHeader* header) {
    return zero_guard([&]() {
        ZeroLoad load;
        ZeroResult result = zero_load_check(&load, z, path, what);
        if (result.code == ZERO_OK) result = zero_load_apply(&load);
        zero_load_close(&load);
        if (header && result.code == ZERO_OK) std::swap(*header, load.header);
        return result;
    });
}

#endif /* LLMC_ZERO_CHECKPOINT_LOAD_CUH_INCLUDED */
