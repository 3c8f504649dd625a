/* llmc_zero/checkpoint.cuh - one file for the state of all ranks; any number of ranks loads it.

       ZeroCheckpoint what = zero_checkpoint();           // or with the tensors' shapes, strings of your own
       what.step = step, what.samples = samples;
       zero_checkpoint_save(&z, "run/step_00000010.safetensors", &what);
       ...
       zero_checkpoint_load(&z, "run/step_00000010.safetensors", &what, NULL);     // what.step, what.samples

   All ranks make the same call, between two steps; all see the same folder. They get the same result, except that an
   error of CUDA or NCCL may strike one rank alone, as in a step: end all ranks then.

   The file (safetensors.cuh) holds of each tensor NAME (the masters, or the params where there are none), NAME.exp_avg
   and NAME.exp_avg_sq, as far as they are kept: all weights in model order, all exp_avg, all exp_avg_sq (bf16 weights
   last, so that everything stays aligned). There is no padding in it, and nothing depends on ranks, stage or buckets.

   Saving: each rank writes the ranges that it owns, a piece of at most 4 MB after the other, through two pinned buffers:
   the device fills one while the host writes the other. The checksums go to rank 0, which writes the header last.
   C1  The file appears under its name by rename, after every rank has written and synced its part and said so, and after
       rank 0 has synced the header. The folder is synced behind it.
   C2  A save that fails leaves what stood under the name as it was, and no temporary file (NAME.tmp) unless the process
       dies; the next save to the name replaces that.
   Loading:
   C3  Header, names, shapes, settings and every checksum are checked, and all ranks agree that they are fine, before any
       device memory is written. The ranks share the checking, so that the file is read once for it.
   C4  Then each rank reads the ranges it holds, and params are rounded from masters and gathered as after a step.

   Host memory: 8 MB of pinned buffers and the list of pieces (32 bytes each), whatever the model's size. Not part of
   llmc_zero.cuh, because it needs xxHash and nlohmann's JSON; see safetensors.cuh.

   defines: (checkpoint_parts.cuh: ZeroTensor, ZeroString, ZeroCheckpoint, zero_checkpoint, zero_agree)
            zero_checkpoint_save, zero_checkpoint_load,
            ZeroLoad, zero_load_check, zero_load_apply, zero_load_close
*/
#ifndef LLMC_ZERO_CHECKPOINT_CUH_INCLUDED
#define LLMC_ZERO_CHECKPOINT_CUH_INCLUDED

#include <fcntl.h>
#include <stdio.h>

#include "checkpoint_parts.cuh"

/* ------------------------------------------------------------------ save */

typedef struct ZeroSave {
    ZeroOptimizer* z;
    const ZeroCheckpoint* what;
    std::string path, temporary;
    ZeroArray arrays[3];
    int arrays_count;
    std::vector<ZeroChunk> chunks;              /* this rank's */
    ZeroFileHeader header;                      /* with the pieces of all ranks */
    std::string text;                           /* the file's bytes before the data */
    std::vector<size_t> pieces_of;              /* how many pieces each rank writes */
    std::vector<std::pair<int, size_t>> writer; /* of header.pieces[k]: rank, and which of its pieces */
    std::vector<uint64_t> checksums;            /* of this rank's pieces */
    int fd;
    ZeroStaging staging;
} ZeroSave;

/* The pieces of all ranks, in order of offset. Every rank computes the same. */
static inline ZeroResult zero_save_plan_pieces(ZeroSave* save) {
    typedef struct ZeroPlanned {
        ZeroFilePiece piece;
        std::pair<int, size_t> writer;
    } ZeroPlanned;
    std::vector<ZeroPlanned> planned;
    std::vector<ZeroChunk> chunks;
    for (int rank = 0; rank < save->z->ranks; rank++) {
        ZERO_TRY(zero_checkpoint_chunks(save->z, rank, &chunks));
        if (rank == save->z->rank) save->chunks = chunks;
        save->pieces_of.push_back(0);
        for (int a = 0; a < save->arrays_count; a++) {
            const size_t bytes = save->arrays[a].element_bytes;
            ZeroSpan span = {0, 0, 0, 0};
            while (zero_next_span(chunks, ZERO_FILE_PIECE_BYTES / bytes, &span))
                planned.push_back(
                    {{save->arrays[a].offset + span.model_offset * bytes, span.count * bytes, 0},
                     {rank, save->pieces_of.back()++}});
        }
    }
    std::sort(planned.begin(), planned.end(),
              [](const ZeroPlanned& a, const ZeroPlanned& b) { return a.piece.offset < b.piece.offset; });
    for (const ZeroPlanned& p : planned) {
        save->header.pieces.push_back(p.piece);
        save->writer.push_back(p.writer);
    }
    return zero_ok();
}

/* Everything that can be known before a byte is written. t comes from the device. */
static inline ZeroResult zero_save_plan(ZeroSave* save) {
    ZeroOptimizer* z = save->z;
    ZeroFileHeader again;
    ZeroScalars scalars;
    void* params;
    ZERO_TRY(zero_checkpoint_callable(z, "zero_checkpoint_save"));
    ZERO_TRY(zero_params_acquire_all(z, &params));
    ZERO_TRY(zero_comm_drain(&z->comm));
    ZERO_TRY_CUDA(cudaMemcpy(&scalars, z->scalars, sizeof(scalars), cudaMemcpyDeviceToHost));
    ZERO_TRY(zero_staging_create(&save->staging));
    save->arrays_count = zero_checkpoint_arrays(z, save->arrays);
    ZERO_TRY(zero_checkpoint_header(z, save->what, save->arrays, save->arrays_count, &save->header));
    save->header.strings["t"] = std::to_string(scalars.t);
    save->header.strings["step"] = std::to_string(save->what->step);
    save->header.strings["samples"] = std::to_string(save->what->samples);
    ZERO_TRY(zero_save_plan_pieces(save));
    ZERO_TRY(zero_file_describe(save->header, &save->text));
    /* what could not be read again (two tensors of one name, say) is refused now */
    std::string sealed = save->text;
    ZERO_TRY(zero_file_seal(save->header.pieces, &sealed));
    ZeroResult result = zero_file_parse(sealed, sealed.size() + save->header.data_bytes, &again);
    if (result.code != ZERO_OK) result.code = ZERO_ERROR_ARGUMENT;
    return result;
}

/* All ranks must be about to write the same file. */
static inline ZeroResult zero_save_compare(ZeroSave* save) {
    const uint64_t own[2] = {XXH3_64bits(save->text.data(), save->text.size()), 0};
    std::vector<uint64_t> all(2 * (size_t)save->z->ranks);
    ZERO_TRY(zero_exchange_words(save->z, own, all.data()));
    for (int r = 1; r < save->z->ranks; r++)
        if (all[2 * (size_t)r] != all[0])
            return zero_error(ZERO_ERROR_ARGUMENT,
                              "rank %d would write another header than rank 0: give all ranks the same "
                              "settings, tensors, strings, step and samples",
                              r);
    return zero_ok();
}

/* Rank 0 makes the temporary file, anew: a process of a broken run may still be writing to an old one. The space is asked
   for at once where the file system can do that, so that a full disk is seen before the work. */
static inline ZeroResult zero_save_create(ZeroSave* save) {
    const char* name = save->temporary.c_str();
    const uint64_t bytes = save->text.size() + save->header.data_bytes;
    if (save->z->rank != 0) return zero_ok();
    if (unlink(name) != 0 && errno != ENOENT)
        return zero_error(ZERO_ERROR_SYSTEM, "%s is in the way: %s", zero_base_name(name), strerror(errno));
    save->fd = open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (save->fd < 0)
        return zero_error(ZERO_ERROR_SYSTEM, "cannot make %s: %s", zero_base_name(name), strerror(errno));
    int failed = fallocate(save->fd, 0, 0, (off_t)bytes) != 0;
    if (failed && (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL))
        failed = ftruncate(save->fd, (off_t)bytes) != 0;
    if (failed)
        return zero_error(ZERO_ERROR_SYSTEM, "no room for %.3f MB: %s", 1e-6 * (double)bytes,
                          strerror(errno));
    return zero_ok();
}

static inline ZeroResult zero_save_open(ZeroSave* save) {
    if (save->z->rank == 0) return zero_ok();
    save->fd = open(save->temporary.c_str(), O_WRONLY | O_CLOEXEC);
    if (save->fd >= 0) return zero_ok();
    return zero_error(ZERO_ERROR_SYSTEM,
                      "cannot open %s, which rank 0 has made: %s; all ranks must see one folder",
                      zero_base_name(save->temporary.c_str()), strerror(errno));
}

/* Writes the piece that lies in a buffer once its copy has ended. The kernel is told to begin with the disk. */
static inline ZeroResult zero_save_piece(ZeroSave* save, int turn, size_t bytes, uint64_t offset) {
    ZERO_TRY(zero_wait_event(&save->z->comm, save->staging.copied[turn]));
    save->checksums.push_back(XXH3_64bits(save->staging.buffer[turn], bytes));
    ZERO_TRY(zero_file_write(save->fd, save->staging.buffer[turn], bytes, save->text.size() + offset));
    sync_file_range(save->fd, (off_t)(save->text.size() + offset), (off_t)bytes, SYNC_FILE_RANGE_WRITE);
    return zero_ok();
}

static inline ZeroResult zero_save_close(ZeroSave* save) {
    const int failed = fsync(save->fd) != 0 || close(save->fd) != 0;
    save->fd = -1;
    return failed ? zero_error(ZERO_ERROR_SYSTEM, "fsync or close: %s", strerror(errno)) : zero_ok();
}

/* This rank's part: while the host works on one buffer, the device fills the other. */
static inline ZeroResult zero_save_pieces(ZeroSave* save) {
    ZeroOptimizer* z = save->z;
    size_t waiting_bytes = 0; /* in the other buffer, copied or being copied, not written yet */
    uint64_t waiting_offset = 0;
    int turn = 0;
    for (int a = 0; a < save->arrays_count; a++) {
        const ZeroArray* array = &save->arrays[a];
        ZeroSpan span = {0, 0, 0, 0};
        while (zero_next_span(save->chunks, ZERO_FILE_PIECE_BYTES / array->element_bytes, &span)) {
            ZERO_TRY(zero_copy_span(z, array, save->chunks, &span, save->staging.buffer[turn],
                                    cudaMemcpyDeviceToHost));
            ZERO_TRY_CUDA(cudaEventRecord(save->staging.copied[turn], z->comm.compute));
            if (waiting_bytes > 0) ZERO_TRY(zero_save_piece(save, !turn, waiting_bytes, waiting_offset));
            waiting_bytes = span.count * array->element_bytes;
            waiting_offset = array->offset + span.model_offset * array->element_bytes;
            turn = !turn;
        }
    }
    if (waiting_bytes > 0) ZERO_TRY(zero_save_piece(save, !turn, waiting_bytes, waiting_offset));
    return z->rank == 0 ? zero_ok() : zero_save_close(save);
}

/* Brings all checksums to the header's list, two of each rank at a time. */
static inline ZeroResult zero_save_gather_checksums(ZeroSave* save) {
    const size_t most = *std::max_element(save->pieces_of.begin(), save->pieces_of.end());
    const size_t ranks = (size_t)save->z->ranks;
    std::vector<uint64_t> all(2 * ranks), checksums(most * ranks + ranks); /* [index][rank] */
    save->checksums.resize(most + 1, 0);
    for (size_t i = 0; i < most; i += 2) {
        ZERO_TRY(zero_exchange_words(save->z, &save->checksums[i], all.data()));
        for (size_t r = 0; r < ranks; r++) {
            checksums[i * ranks + r] = all[2 * r];
            checksums[(i + 1) * ranks + r] = all[2 * r + 1];
        }
    }
    for (size_t k = 0; k < save->header.pieces.size(); k++)
        save->header.pieces[k].checksum =
            checksums[save->writer[k].second * ranks + (size_t)save->writer[k].first];
    return zero_ok();
}

static inline ZeroResult zero_sync_folder_of(const std::string& path) {
    const size_t slash = path.rfind('/');
    const std::string folder = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
    int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int failed =
        fd < 0 || (fsync(fd) != 0 && errno != EINVAL); /* EINVAL: this file system has no such thing */
    ZeroResult result =
        failed ? zero_error(ZERO_ERROR_SYSTEM, "syncing the folder: %s", strerror(errno)) : zero_ok();
    if (fd >= 0) close(fd);
    return result;
}

/* Rank 0, once all have written: the header, then the name (C1). */
static inline ZeroResult zero_save_finish(ZeroSave* save) {
    if (save->z->rank != 0) return zero_ok();
    ZERO_TRY(zero_file_seal(save->header.pieces, &save->text));
    ZERO_TRY(zero_file_write(save->fd, save->text.data(), save->text.size(), 0));
    ZERO_TRY(zero_save_close(save));
    if (rename(save->temporary.c_str(), save->path.c_str()) != 0)
        return zero_error(ZERO_ERROR_SYSTEM, "cannot rename %s: %s", zero_base_name(save->temporary.c_str()),
                          strerror(errno));
    return zero_sync_folder_of(save->path);
}

static inline ZeroResult zero_save_run(ZeroSave* save) {
    ZeroOptimizer* z = save->z;
    ZERO_TRY(zero_agree(z, zero_guard([&]() { return zero_save_plan(save); })));
    ZERO_TRY(zero_save_compare(save));
    ZERO_TRY(zero_agree(z, zero_save_create(save)));
    ZERO_TRY(zero_agree(z, zero_save_open(save)));
    ZERO_TRY(zero_agree(z, zero_guard([&]() { return zero_save_pieces(save); })));
    ZERO_TRY(zero_save_gather_checksums(save));
    return zero_agree(z, zero_guard([&]() { return zero_save_finish(save); }));
}

/* Writes the state of all ranks to `path`, whose folder must exist. what: step, samples, tensors and strings; the same on
   all ranks. The host waits; the next step may follow. On an error, an older file of that name is still there (C2). */
static inline ZeroResult zero_checkpoint_save(ZeroOptimizer* z, const char* path,
                                              const ZeroCheckpoint* what) {
    return zero_guard([&]() {
        ZeroSave save = {z, what, path, std::string(path) + ".tmp", {}, 0, {}, {}, "", {}, {}, {}, -1, {}};
        ZeroResult result = zero_guard([&]() { return zero_save_run(&save); });
        if (result.code != ZERO_OK) zero_comm_drain(&z->comm); /* copies into the buffers that go now */
        zero_staging_free(&save.staging);
        if (save.fd >= 0) close(save.fd);
        if (result.code == ZERO_OK) return result;
        if (z->rank == 0) unlink(save.temporary.c_str());
        return zero_error(result.code, "saving %.60s: %s", zero_base_name(path), result.text);
    });
}

/* ------------------------------------------------------------------ load */

/* A file that was checked and not yet loaded. */
typedef struct ZeroLoad {
    ZeroOptimizer* z;
    ZeroArray arrays[3];
    int arrays_count, fd;
    ZeroFileHeader header;
    uint64_t t, step, samples;
} ZeroLoad;

static inline void zero_load_close(ZeroLoad* load) {
    if (load->fd >= 0) close(load->fd);
    load->fd = -1;
}

static inline ZeroResult zero_load_number(const ZeroFileHeader& header, const char* key, uint64_t* value) {
    const auto found = header.strings.find(key);
    const char* at = found == header.strings.end() ? "" : found->second.c_str();
    if (zero_file_number(&at, '\0', 10, value)) return zero_ok();
    return zero_error(ZERO_ERROR_FILE, "%s is \"%s\"; a whole number is needed", key,
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
    const std::string there = in_file == found.strings.end() ? "no such setting" : in_file->second;
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
    load->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (load->fd < 0) return zero_error(ZERO_ERROR_SYSTEM, "cannot open it: %s", strerror(errno));
    ZERO_TRY(zero_file_read_header(load->fd, &load->header));
    ZERO_TRY(zero_load_compare(load, what));
    ZERO_TRY(zero_load_number(load->header, "t", &load->t));
    ZERO_TRY(zero_load_number(load->header, "step", &load->step));
    ZERO_TRY(zero_load_number(load->header, "samples", &load->samples));
    const std::string here = zero_checkpoint_type(load->z), there = load->header.strings["type"];
    what->note[0] = '\0';
    if (here != there)
        snprintf(what->note, sizeof(what->note), "saved in %s, loaded into %s",
                 zero_file_quote(there).c_str(), here.c_str());
    return zero_ok();
}

/* The checksums of this rank's share of the pieces: those that lie where its own slices of each array are, more or less,
   so that what it reads here is what it loads next. */
static inline ZeroResult zero_load_verify(const ZeroLoad* load) {
    std::vector<char> buffer(ZERO_FILE_PIECE_BYTES);
    const uint64_t ranks = (uint64_t)load->z->ranks, count = load->z->layout->model_count;
    for (size_t k = 0; k < load->header.pieces.size(); k++) {
        int a = load->arrays_count - 1;
        while (load->arrays[a].offset > load->header.pieces[k].offset) a--;
        const uint64_t element =
            (load->header.pieces[k].offset - load->arrays[a].offset) / load->arrays[a].element_bytes;
        if (element / ((count + ranks - 1) / ranks) == (uint64_t)load->z->rank)
            ZERO_TRY(zero_file_check_piece(load->fd, load->header, k, buffer.data()));
    }
    return zero_ok();
}

/* Checks the file on all ranks; nothing of z changes (C3). On success and on an error, zero_load_close follows. what:
   tensors and strings in; step, samples and note out. */
static inline ZeroResult zero_load_check(ZeroLoad* load, ZeroOptimizer* z, const char* path,
                                         ZeroCheckpoint* what) {
    ZeroResult result = zero_guard([&]() {
        *load = {z, {}, 0, -1, ZeroFileHeader(), 0, 0, 0};
        ZERO_TRY(zero_agree(z, zero_guard([&]() { return zero_load_open(load, path, what); })));
        const uint64_t own[2] = {load->header.checksum, 0};
        std::vector<uint64_t> all(2 * (size_t)z->ranks);
        ZERO_TRY(zero_exchange_words(z, own, all.data()));
        for (int r = 1; r < z->ranks; r++)
            if (all[2 * (size_t)r] != all[0])
                return zero_error(ZERO_ERROR_SYSTEM,
                                  "rank %d sees another file than rank 0: header %s, not %s", r,
                                  zero_file_hex(all[2 * (size_t)r]).c_str(), zero_file_hex(all[0]).c_str());
        ZERO_TRY(zero_agree(z, zero_guard([&]() { return zero_load_verify(load); })));
        what->step = load->step, what->samples = load->samples;
        return zero_ok();
    });
    if (result.code == ZERO_OK) return result;
    return zero_error(result.code, "loading %.60s: %s", zero_base_name(path), result.text);
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
            if (turns > 2) ZERO_TRY(zero_wait_event(&z->comm, staging->copied[turn]));
            ZERO_TRY(zero_file_read(load->fd, staging->buffer[turn], span.count * array->element_bytes,
                                    load->header.data_offset + array->offset +
                                        span.model_offset * array->element_bytes));
            ZERO_TRY(zero_copy_span(z, array, chunks, &span, staging->buffer[turn], cudaMemcpyHostToDevice));
            ZERO_TRY_CUDA(cudaEventRecord(staging->copied[turn], z->comm.compute));
        }
    }
    return zero_comm_drain(&z->comm);
}

/* Loads a file that was checked. On an error z holds parts of both states: end, or load another file. */
static inline ZeroResult zero_load_apply(ZeroLoad* load) {
    ZeroOptimizer* z = load->z;
    ZeroStaging staging = {};
    void* params;
    ZeroResult result =
        zero_params_acquire_all(z, &params); /* earlier gathers are done before slices are written */
    if (result.code == ZERO_OK) result = zero_guard([&]() { return zero_load_pieces(load, &staging); });
    if (result.code != ZERO_OK) zero_comm_drain(&z->comm);
    zero_staging_free(&staging);
    result = zero_agree(z, result);
    if (result.code != ZERO_OK) return zero_error(result.code, "loading: %s", result.text);
    ZERO_TRY(zero_set_t(z, load->t));
    z->status_stale = 1;
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
        if (header && result.code == ZERO_OK) *header = load.header;
        return result;
    });
}

#endif /* LLMC_ZERO_CHECKPOINT_CUH_INCLUDED */
