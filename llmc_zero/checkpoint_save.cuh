/* llmc_zero/checkpoint_save.cuh - saving: every rank writes its ranges of one file; rank 0 writes the header last. The
   manual, with the numbered promises, is in checkpoint.cuh.

   In order, all ranks agreeing after each: plan (every rank computes the same header, without checksums), create (rank 0),
   open (the others), pieces (all; each syncs its part), gather the checksums, finish (rank 0: header, sync, rename, folder).
   Host memory is asked for in steps that end in an agreement, so that a rank that gets none does not leave the others alone
   in an exchange.

   defines: ZeroSave, zero_save_remove_stale, zero_checkpoint_save
*/
#ifndef LLMC_ZERO_CHECKPOINT_SAVE_CUH_INCLUDED
#define LLMC_ZERO_CHECKPOINT_SAVE_CUH_INCLUDED

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <time.h>

#include "checkpoint_parts.cuh"

typedef struct ZeroSave {
    ZeroOptimizer* z;
    const ZeroCheckpoint* what;
    std::string path, temporary, folder;
    ZeroArray arrays[3];
    int arrays_count;
    std::vector<ZeroChunk> chunks;              /* this rank's */
    ZeroFileHeader header;                      /* with the pieces of all ranks */
    std::string text;                           /* the file's bytes before the data */
    std::vector<size_t> pieces_of;              /* how many pieces each rank writes */
    std::vector<std::pair<int, size_t>> writer; /* of header.pieces[k]: rank, and which of its pieces */
    std::vector<uint64_t> checksums;            /* of this rank's pieces */
    std::vector<uint64_t> words, gathered;      /* room for the exchange of checksums */
    uint64_t mark; /* stands at the begin of rank 0's file until the header does */
    int fd, lock;  /* lock, rank 0: holds the lock on the file until it has its name */
    int made;      /* rank 0: the temporary file is there, and its own */
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

static inline std::string zero_folder_of(const std::string& path) {
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

/* Everything that can be known before a byte is written. t comes from the device. */
static inline ZeroResult zero_save_plan(ZeroSave* save, const char* path) {
    ZeroOptimizer* z = save->z;
    ZeroFileHeader again;
    ZeroScalars scalars;
    ZERO_TRY(zero_checkpoint_callable(z, "zero_checkpoint_save"));
    save->path = path;
    save->temporary = save->path + ".tmp";
    save->folder = zero_folder_of(save->path);
    ZERO_TRY(zero_params_settle(z));
    ZERO_TRY(zero_comm_drain(&z->comm));
    ZERO_TRY_CUDA(cudaMemcpy(&scalars, z->scalars, sizeof(scalars), cudaMemcpyDeviceToHost));
    ZERO_TRY(zero_staging_create(&save->staging));
    save->arrays_count = zero_checkpoint_arrays(z, save->arrays);
    ZERO_TRY(zero_checkpoint_header(z, save->what, save->arrays, save->arrays_count, &save->header));
    ZERO_TRY(zero_checkpoint_count("t", scalars.t, &save->header));
    ZERO_TRY(zero_checkpoint_count("skipped", scalars.skipped, &save->header));
    ZERO_TRY(zero_checkpoint_count("skipped_in_row", scalars.skipped_in_row, &save->header));
    ZERO_TRY(zero_checkpoint_count("dropped", scalars.dropped, &save->header));
    ZERO_TRY(zero_checkpoint_count("step", save->what->step, &save->header));
    ZERO_TRY(zero_checkpoint_count("samples", save->what->samples, &save->header));
    ZERO_TRY(zero_save_plan_pieces(save));
    const size_t most = *std::max_element(save->pieces_of.begin(), save->pieces_of.end());
    save->checksums.reserve(most + 1);
    save->words.resize(2 * (size_t)z->ranks);
    save->gathered.resize((most + 1) * (size_t)z->ranks);
    ZERO_TRY(zero_file_describe(save->header, &save->text));
    /* what could not be read again (two tensors of one name, say) is refused now */
    ZERO_TRY(zero_file_seal(save->header.pieces, &save->text));
    ZeroResult result = zero_file_parse(save->text, save->text.size() + save->header.data_bytes, &again);
    if (result.code != ZERO_OK) result.code = ZERO_ERROR_ARGUMENT;
    return result;
}

/* All ranks must be about to write the same file. */
static inline ZeroResult zero_save_compare(ZeroSave* save) {
    const uint64_t own[2] = {XXH3_64bits(save->text.data(), save->text.size()), 0};
    uint64_t words[2] = {0, 0};
    int odd;
    ZERO_TRY(zero_find_odd_rank(save->z, own, &odd, words));
    if (!odd) return zero_ok();
    return zero_error(ZERO_ERROR_ARGUMENT,
                      "rank %d would write another header than rank 0: give all ranks the same "
                      "settings, tensors, strings, step and samples",
                      odd);
}

/* Deletes what a broken run has left under a temporary name; nothing there is fine. A process that still writes to it, as
   rank 0, holds a lock: then it is left, and *busy is 1. */
static inline ZeroResult zero_save_remove_stale(const char* name, int* busy) {
    const int fd = zero_retry([&]() { return open(name, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW); });
    *busy = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    ZeroResult result = zero_ok();
    if (!*busy && unlink(name) != 0 && errno != ENOENT)
        result = zero_error(ZERO_ERROR_SYSTEM, "%s is in the way: %s", zero_base_name(name), strerror(errno));
    if (fd >= 0) close(fd);
    return result;
}

static inline ZeroResult zero_save_room(int fd, uint64_t bytes) {
    int failed = zero_retry([&]() { return fallocate(fd, 0, 0, (off_t)bytes); }) != 0;
    if (failed && (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL || errno == EINTR))
        failed = ftruncate(fd, (off_t)bytes) != 0;
    if (!failed) return zero_ok();
    return zero_error(ZERO_ERROR_SYSTEM, "no room for %.3f MB: %s", 1e-6 * (double)bytes, strerror(errno));
}

/* Rank 0 makes the temporary file, anew: a process of a broken run may still be writing to an old one. The space is asked
   for at once where the file system can do that, so that a full disk is seen before the work. The mark tells the other
   ranks that they see this file; it is synced, so that they do on a network's file system, too. */
static inline ZeroResult zero_save_create(ZeroSave* save) {
    const char* name = save->temporary.c_str();
    struct timespec now;
    int busy;
    if (save->z->rank != 0) return zero_ok();
    ZERO_TRY(zero_save_remove_stale(name, &busy));
    if (!busy) {
        save->fd = zero_retry([&]() { return open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666); });
        if (save->fd < 0)
            return zero_error(ZERO_ERROR_SYSTEM, "cannot make %s: %s", zero_base_name(name), strerror(errno));
        save->made = 1;
        save->lock = fcntl(save->fd, F_DUPFD_CLOEXEC, 0);
        busy = flock(save->fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
        save->made = !busy;
    }
    if (busy)
        return zero_error(ZERO_ERROR_SYSTEM, "another run is writing %s: one run a folder",
                          zero_base_name(name));
    ZERO_TRY(zero_save_room(save->fd, save->text.size() + save->header.data_bytes));
    clock_gettime(CLOCK_REALTIME, &now);
    save->mark =
        zero_mix((uint64_t)now.tv_nsec ^ zero_mix((uint64_t)now.tv_sec ^ zero_mix((uint64_t)getpid())));
    ZERO_TRY(zero_file_write(save->fd, &save->mark, sizeof(save->mark), 0));
    if (zero_retry([&]() { return fsync(save->fd); }) == 0) return zero_ok();
    return zero_error(ZERO_ERROR_SYSTEM, "fsync: %s", strerror(errno));
}

/* The other ranks open what rank 0 has made, and nothing else that may stand there. */
static inline ZeroResult zero_save_open(ZeroSave* save) {
    const char* name = save->temporary.c_str();
    uint64_t mark = ~save->mark;
    if (save->z->rank == 0) return zero_ok();
    save->fd = zero_retry([&]() { return open(name, O_RDWR | O_CLOEXEC | O_NONBLOCK); });
    if (save->fd < 0)
        return zero_error(ZERO_ERROR_SYSTEM,
                          "cannot open %s, which rank 0 has made: %s; all ranks must see one folder",
                          zero_base_name(name), strerror(errno));
    ZeroResult result = zero_file_read(save->fd, &mark, sizeof(mark), 0);
    if (result.code == ZERO_ERROR_SYSTEM || mark == save->mark) return result;
    return zero_error(ZERO_ERROR_SYSTEM,
                      "%s is not the file that rank 0 has made; all ranks must see one folder",
                      zero_base_name(name));
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
    const int fd = save->fd;
    ZeroResult result = zero_ok();
    save->fd = -1;
    if (zero_retry([&]() { return fsync(fd); }) != 0)
        result = zero_error(ZERO_ERROR_SYSTEM, "fsync: %s", strerror(errno));
    if (close(fd) != 0 && errno != EINTR && result.code == ZERO_OK) /* EINTR: it is closed all the same */
        result = zero_error(ZERO_ERROR_SYSTEM, "close: %s", strerror(errno));
    return result;
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
    const size_t ranks = (size_t)save->z->ranks, most = save->gathered.size() / ranks - 1;
    save->checksums.resize(most + 1, 0);
    for (size_t i = 0; i < most; i += 2) { /* gathered: [index][rank] */
        ZERO_TRY(zero_exchange_words(save->z, &save->checksums[i], save->words.data()));
        for (size_t r = 0; r < ranks; r++) {
            save->gathered[i * ranks + r] = save->words[2 * r];
            save->gathered[(i + 1) * ranks + r] = save->words[2 * r + 1];
        }
    }
    for (size_t k = 0; k < save->header.pieces.size(); k++)
        save->header.pieces[k].checksum =
            save->gathered[save->writer[k].second * ranks + (size_t)save->writer[k].first];
    return zero_ok();
}

static inline ZeroResult zero_save_sync_folder(const std::string& folder) {
    int fd = zero_retry([&]() { return open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
    int failed = fd < 0 || (zero_retry([&]() { return fsync(fd); }) != 0 &&
                            errno != EINVAL); /* EINVAL: this file system has no such thing */
    ZeroResult result = zero_ok();
    if (failed)
        result = zero_error(ZERO_ERROR_SYSTEM,
                            "it is written and has its name, but the folder could not be synced: %s",
                            strerror(errno));
    if (fd >= 0) close(fd);
    return result;
}

/* Whether the temporary name still stands for this rank's file. */
static inline int zero_save_is_mine(const ZeroSave* save) {
    struct stat mine, there;
    return fstat(save->lock >= 0 ? save->lock : save->fd, &mine) == 0 &&
           lstat(save->temporary.c_str(), &there) == 0 && mine.st_ino == there.st_ino &&
           mine.st_dev == there.st_dev;
}

/* Rank 0, once all have written: the header, then the name (C1). */
static inline ZeroResult zero_save_finish(ZeroSave* save) {
    if (save->z->rank != 0) return zero_ok();
    ZERO_TRY(zero_file_seal(save->header.pieces, &save->text));
    ZERO_TRY(zero_file_write(save->fd, save->text.data(), save->text.size(), 0));
    save->made = zero_save_is_mine(save);
    ZERO_TRY(zero_save_close(save));
    if (!save->made)
        return zero_error(ZERO_ERROR_SYSTEM, "another run has replaced or deleted %s: one run a folder",
                          zero_base_name(save->temporary.c_str()));
    if (rename(save->temporary.c_str(), save->path.c_str()) != 0)
        return zero_error(ZERO_ERROR_SYSTEM, "cannot rename %s: %s", zero_base_name(save->temporary.c_str()),
                          strerror(errno));
    save->made = 0;
    return zero_save_sync_folder(
        save->folder); /* asks for no memory: what fails from here on is said to be late */
}

static inline ZeroResult zero_save_run(ZeroSave* save, const char* path) {
    ZeroOptimizer* z = save->z;
    /* without the others: an exchange would overwrite the sums of the step, which zero_set_step reads again */
    ZERO_TRY(zero_check_between_steps(z, "zero_checkpoint_save"));
    ZERO_TRY(zero_agree(z, zero_guard([&]() { return zero_save_plan(save, path); })));
    ZERO_TRY(zero_save_compare(save));
    ZERO_TRY(zero_agree(z, zero_save_create(save)));
    const uint64_t own[2] = {save->mark, 0};
    ZERO_TRY(zero_exchange_words(z, own, save->words.data()));
    save->mark = save->words[0];
    ZERO_TRY(zero_agree(z, zero_save_open(save)));
    ZERO_TRY(zero_agree(z, zero_guard([&]() { return zero_save_pieces(save); })));
    ZERO_TRY(zero_save_gather_checksums(save));
    return zero_agree(z, zero_guard([&]() { return zero_save_finish(save); }));
}

/* Writes the state of all ranks to `path`, whose folder must exist. what: step, samples, tensors and strings; the same on
   all ranks. The host waits; the next step may follow. On an error, an older file of that name is still there (C2). */
static inline ZeroResult zero_checkpoint_save(ZeroOptimizer* z, const char* path,
                                              const ZeroCheckpoint* what) {
    ZeroSave save = ZeroSave();
    save.z = z, save.what = what, save.fd = save.lock = -1;
    ZeroResult result = zero_guard([&]() { return zero_save_run(&save, path); });
    if (result.code != ZERO_OK) zero_comm_drain(&z->comm); /* copies into the buffers that go now */
    zero_staging_free(&save.staging);
    if (save.fd >= 0) close(save.fd);
    if (save.made) unlink(save.temporary.c_str()); /* an error */
    if (save.lock >= 0) close(save.lock);
    if (result.code == ZERO_OK) return result;
    return zero_error(result.code, "saving %.60s: %s", zero_base_name(path), result.text);
}

#endif /* LLMC_ZERO_CHECKPOINT_SAVE_CUH_INCLUDED */
