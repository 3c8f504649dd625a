/* llmc_zero/checkpoint_save.cuh - saving: every rank writes its pieces of one file; rank 0 writes the header last. The
   manual, with the numbered promises, is in checkpoint.cuh; who writes what is in checkpoint_grid.cuh.

   In order, all ranks agreeing after each: plan (every rank computes the same header, without checksums), create (rank 0),
   open (the others), pieces (all; each syncs and closes its part), share the checksums, seal (rank 0: header, sync), read
   back (each what the next rank has written), finish (rank 0: rename, folder).
   Host memory is asked for in steps that end in an agreement, so that a rank that gets none does not leave the others alone
   in an exchange.

   defines: ZeroSave, zero_save_begin, zero_save_close, zero_checkpoint_save
*/
#ifndef LLMC_ZERO_CHECKPOINT_SAVE_CUH_INCLUDED
#define LLMC_ZERO_CHECKPOINT_SAVE_CUH_INCLUDED

#include "checkpoint_grid.cuh"
#include "checkpoint_temporary.cuh"

#define ZERO_MEET_ROUNDS 8 /* pieces that a rank writes between two meetings of all */

typedef struct ZeroSave {
    ZeroOptimizer* z;
    const ZeroCheckpoint* what;
    std::string path, temporary, folder;
    ZeroArray arrays[3];
    int arrays_count;
    ZeroGrid grid;
    ZeroFileHeader header;
    std::string text;                /* the file's bytes before the data */
    std::vector<uint64_t> checksums; /* of this rank's pieces, 0 for the others'; then of all */
    std::vector<uint64_t> words;     /* room for an exchange */
    uint64_t mark;                   /* stands at the begin of rank 0's file until the header does */
    int fd,
        lock; /* fd writes, and does not read. lock, rank 0: holds the lock on the file until it has its name */
    int made; /* rank 0: the temporary file is there, and its own */
    char*
        arrived; /* on the device, ZERO_FILE_PIECE_BYTES: parts of this rank's piece that other ranks have sent */
    ZeroStaging staging;
} ZeroSave;

static inline void zero_save_init(ZeroSave* save, ZeroOptimizer* z, const ZeroCheckpoint* what) {
    *save = ZeroSave();
    save->z = z, save->what = what;
    save->fd = save->lock = -1;
}

static inline void zero_save_free(ZeroSave* save) {
    zero_staging_free(&save->staging, &save->z->comm);
    if (save->arrived && !zero_comm_is_stuck(&save->z->comm)) cudaFree(save->arrived);
    if (save->fd >= 0) close(save->fd);
    if (save->made) unlink(save->temporary.c_str()); /* an error */
    if (save->lock >= 0) close(save->lock);
    save->arrived = NULL;
    save->fd = save->lock = -1;
    save->made = 0;
}

/* ------------------------------------------------------------------ before a byte is written */

/* Everything that can be known of the file. t comes from the device. */
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
    if (z->ranks > 1) ZERO_TRY_CUDA(cudaMalloc((void**)&save->arrived, ZERO_FILE_PIECE_BYTES));
    save->arrays_count = zero_checkpoint_arrays(z, save->arrays);
    ZERO_TRY(zero_checkpoint_header(z, save->what, save->arrays, save->arrays_count, &save->header));
    ZERO_TRY(zero_checkpoint_count("t", scalars.t, &save->header));
    ZERO_TRY(zero_checkpoint_count("skipped", scalars.skipped, &save->header));
    ZERO_TRY(zero_checkpoint_count("skipped_in_row", scalars.skipped_in_row, &save->header));
    ZERO_TRY(zero_checkpoint_count("dropped", scalars.dropped, &save->header));
    ZERO_TRY(zero_checkpoint_count("step", save->what->step, &save->header));
    ZERO_TRY(zero_checkpoint_count("samples", save->what->samples, &save->header));
    zero_grid(&save->grid, z, save->arrays, save->arrays_count, &save->header);
    save->checksums.resize(save->header.pieces.size());
    save->words.resize(2 * (size_t)z->ranks);
    ZERO_TRY(zero_file_describe(save->header, &save->text));
    /* what could not be read again (two tensors of one name, say) is refused now */
    ZERO_TRY(zero_file_seal(save->header.pieces, &save->text));
    ZeroResult result = zero_file_parse(save->text, save->text.size() + save->header.data_bytes, &again);
    if (result.code != ZERO_OK) result.code = ZERO_ERROR_ARGUMENT;
    return result;
}

/* All ranks must be about to write the same file, and to read it back or not. */
static inline ZeroResult zero_save_compare(ZeroSave* save) {
    const uint64_t own[2] = {
        XXH3_64bits(save->text.data(), save->text.size()) ^ (uint64_t)(save->what->read_back != 0), 0};
    uint64_t words[2] = {0, 0};
    int odd;
    ZERO_TRY(zero_find_odd_rank(save->z, own, &odd, words));
    if (!odd) return zero_ok();
    return zero_error(ZERO_ERROR_ARGUMENT,
                      "rank %d would write another header than rank 0: give all ranks the same "
                      "settings, tensors, strings, step, samples and read_back",
                      odd);
}

/* Rank 0 makes the temporary file, anew: a process of a broken run may still be writing to an old one. The mark is synced,
   so that the other ranks see it on a network's file system, too. */
static inline ZeroResult zero_save_create(ZeroSave* save) {
    const char* name = save->temporary.c_str();
    int busy;
    if (save->z->rank != 0) return zero_ok();
    ZERO_TRY(zero_save_remove_stale(name, &busy));
    if (!busy) {
        save->fd = zero_retry([&]() { return open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666); });
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
    if (save->lock < 0) return zero_error(ZERO_ERROR_SYSTEM, "a second descriptor: %s", strerror(errno));
    ZERO_TRY(zero_save_room(save->fd, save->text.size() + save->header.data_bytes));
    save->mark = zero_save_mark();
    ZERO_TRY(zero_file_write(save->fd, &save->mark, sizeof(save->mark), 0));
    return zero_save_sync_file(save->fd);
}

/* The other ranks open what rank 0 has made, and nothing else that may stand there. */
static inline ZeroResult zero_save_open(ZeroSave* save) {
    const char* name = save->temporary.c_str();
    if (save->z->rank == 0) return zero_ok();
    ZERO_TRY(zero_save_check_mark(name, save->mark));
    save->fd = zero_retry([&]() { return open(name, O_WRONLY | O_CLOEXEC | O_NONBLOCK); });
    if (save->fd >= 0) return zero_ok();
    return zero_error(ZERO_ERROR_SYSTEM, "cannot write %s: %s", zero_base_name(name), strerror(errno));
}

/* ------------------------------------------------------------------ the pieces */

static inline ZeroPart zero_save_part(const ZeroSave* save, const ZeroFilePiece& piece, uint64_t at) {
    return zero_part_at(save->z, save->arrays, save->arrays_count, at, piece.offset + piece.bytes);
}

/* This rank's side of piece k, one of the messages of a round. */
static inline ZeroResult zero_save_messages(ZeroSave* save, size_t k) {
    ZeroOptimizer* z = save->z;
    const ZeroFilePiece& piece = save->header.pieces[k];
    const int writer = save->grid.writer[k];
    for (uint64_t at = piece.offset; at < piece.offset + piece.bytes;) {
        const ZeroPart part = zero_save_part(save, piece, at);
        const size_t bytes = part.array->element_bytes;
        const ZeroDtype dtype = bytes == 2 ? ZERO_BF16 : ZERO_FP32; /* moved as they are */
        const int moves = !part.held_by_all && part.owner != writer;
        if (moves && writer == z->rank)
            ZERO_TRY(zero_comm_receive(&z->comm, save->arrived + (at - piece.offset), part.count, dtype,
                                       part.owner));
        if (moves && part.owner == z->rank)
            ZERO_TRY(
                zero_comm_send(&z->comm, part.array->device + part.first * bytes, part.count, dtype, writer));
        at += part.bytes;
    }
    return zero_ok();
}

/* Piece k from the device into a pinned buffer: its own parts from the arrays, the others' from where they arrived. */
static inline ZeroResult zero_save_collect(ZeroSave* save, size_t k, int turn) {
    ZeroOptimizer* z = save->z;
    const ZeroFilePiece& piece = save->header.pieces[k];
    for (uint64_t at = piece.offset; at < piece.offset + piece.bytes;) {
        const ZeroPart part = zero_save_part(save, piece, at);
        const uint64_t inside = at - piece.offset;
        const char* from = part.held_by_all || part.owner == z->rank
                               ? part.array->device + part.first * part.array->element_bytes
                               : save->arrived + inside;
        ZERO_TRY_CUDA(cudaMemcpyAsync(save->staging.buffer[turn] + inside, from, part.bytes,
                                      cudaMemcpyDeviceToHost, z->comm.stream));
        at += part.bytes;
    }
    ZERO_TRY_CUDA(cudaEventRecord(save->staging.copied[turn], z->comm.stream));
    return zero_ok();
}

/* Writes piece k, which lies in a buffer once its copy has ended. The kernel is told to begin with the disk. */
static inline ZeroResult zero_save_piece(ZeroSave* save, size_t k, int turn) {
    const ZeroFilePiece& piece = save->header.pieces[k];
    const uint64_t offset = save->text.size() + piece.offset;
    ZERO_TRY(zero_wait_event(&save->z->comm, save->staging.copied[turn]));
    zero_comm_progress(&save->z->comm, "save");
    save->checksums[k] = XXH3_64bits(save->staging.buffer[turn], piece.bytes);
    ZERO_TRY(zero_file_write(save->fd, save->staging.buffer[turn], piece.bytes, offset));
    sync_file_range(save->fd, (off_t)offset, (off_t)piece.bytes, SYNC_FILE_RANGE_WRITE);
    return zero_ok();
}

static inline ZeroResult zero_save_close(ZeroSave* save) {
    const int fd = save->fd;
    ZeroResult result = zero_save_sync_file(fd);
    save->fd = -1;
    if (close(fd) != 0 && errno != EINTR && result.code == ZERO_OK) /* EINTR: it is closed all the same */
        result = zero_error(ZERO_ERROR_SYSTEM, "close: %s", strerror(errno));
    return result;
}

/* The messages of the round that begins at rounds[*i]; *own: this rank's piece of it, or `none`. */
static inline ZeroResult zero_save_round(ZeroSave* save, size_t* i, size_t none, size_t* own) {
    const std::vector<std::pair<size_t, size_t>>& rounds = save->grid.rounds;
    const size_t round = rounds[*i].first;
    ZeroResult sent = zero_ok();
    *own = none;
    ZERO_TRY(zero_comm_begin_messages(&save->z->comm));
    for (; *i < rounds.size() && rounds[*i].first == round; ++*i) {
        if (sent.code == ZERO_OK) sent = zero_save_messages(save, rounds[*i].second);
        if (save->grid.writer[rounds[*i].second] == save->z->rank) *own = rounds[*i].second;
    }
    const ZeroResult ended = zero_comm_end_messages(&save->z->comm);
    return sent.code != ZERO_OK ? sent : ended;
}

/* Round after round: the ranks send one another parts, and while the host writes one piece, the device copies the next.
   All of it goes through the communication stream; the compute stream has nothing to do meanwhile (zero_save_plan has
   waited for it). A rank that cannot write or copy goes on sending what the others wait for. Now and then all of them meet:
   one whose disk is slow is not waited for at the end alone, and one that failed ends the save for all. */
static inline ZeroResult zero_save_pieces(ZeroSave* save) {
    const size_t none = save->grid.rounds.size();
    size_t waiting = none; /* the piece in the other buffer, copied or being copied, not written yet */
    ZeroResult result = zero_ok();
    int turn = 0;
    for (size_t i = 0, rounds = 0; i < save->grid.rounds.size() || waiting != none; turn = !turn) {
        size_t own = none;
        if (i < save->grid.rounds.size() && ++rounds % ZERO_MEET_ROUNDS == 0)
            ZERO_TRY(zero_agree(save->z, result));
        if (i < save->grid.rounds.size()) ZERO_TRY(zero_save_round(save, &i, none, &own));
        if (result.code == ZERO_OK && own != none) result = zero_save_collect(save, own, turn);
        if (result.code == ZERO_OK && waiting != none) result = zero_save_piece(save, waiting, !turn);
        waiting = own;
    }
    ZERO_TRY(result);
    return zero_save_close(save);
}

/* Each piece has one checksum that is not 0, its writer's: their sum is the list. Through the buffer on the device. */
static inline ZeroResult zero_save_share_checksums(ZeroSave* save) {
    ZeroOptimizer* z = save->z;
    const size_t room = ZERO_FILE_PIECE_BYTES / sizeof(uint64_t);
    for (size_t k = 0; z->ranks > 1 && k < save->checksums.size(); k += room) {
        const size_t count = std::min(room, save->checksums.size() - k), bytes = count * sizeof(uint64_t);
        ZERO_TRY_CUDA(cudaMemcpyAsync(save->arrived, &save->checksums[k], bytes, cudaMemcpyHostToDevice,
                                      z->comm.compute));
        ZERO_TRY(zero_comm_share_words(&z->comm, (uint64_t*)save->arrived, count, 0));
        ZERO_TRY(zero_comm_drain(&z->comm));
        ZERO_TRY_CUDA(cudaMemcpy(&save->checksums[k], save->arrived, bytes, cudaMemcpyDeviceToHost));
    }
    for (size_t k = 0; k < save->checksums.size(); k++) save->header.pieces[k].checksum = save->checksums[k];
    return zero_ok();
}

/* ------------------------------------------------------------------ the header, and the name */

/* Whether the temporary name still stands for this rank's file. */
static inline int zero_save_is_mine(const ZeroSave* save) {
    struct stat mine, there;
    return fstat(save->lock, &mine) == 0 && lstat(save->temporary.c_str(), &there) == 0 &&
           mine.st_ino == there.st_ino && mine.st_dev == there.st_dev;
}

/* Rank 0, once all have written and closed: the header. */
static inline ZeroResult zero_save_seal(ZeroSave* save) {
    ZERO_TRY(zero_file_seal(save->header.pieces, &save->text)); /* on all ranks: they compare it */
    if (save->z->rank != 0) return zero_ok();
    ZERO_TRY(zero_file_write(save->lock, save->text.data(), save->text.size(), 0));
    return zero_save_sync_file(save->lock);
}

/* What stands on the disk now, read by others than those who wrote it: the header on all ranks, and of the pieces those
   that the next rank has written. */
static inline ZeroResult zero_save_read_back(ZeroSave* save) {
    const ZeroOptimizer* z = save->z;
    const int other = (z->rank + 1) % z->ranks;
    if (!save->what->read_back) return zero_ok();
    const int fd =
        zero_retry([&]() { return open(save->temporary.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); });
    if (fd < 0) return zero_error(ZERO_ERROR_SYSTEM, "opening it to read it back: %s", strerror(errno));
    ZeroResult result = zero_guard([&]() {
        ZeroFileHeader found;
        const uint64_t written = zero_file_checksum(save->text, zero_file_find_checksum(save->text));
        ZERO_TRY(zero_file_read_header(fd, &found));
        if (found.checksum != written)
            return zero_error(ZERO_ERROR_FILE, "its header has checksum %s, %s was written",
                              zero_file_hex(found.checksum).c_str(), zero_file_hex(written).c_str());
        for (size_t k = 0; k < found.pieces.size(); k++)
            if (save->grid.writer[k] == other) {
                zero_comm_progress(&save->z->comm, "save");
                ZERO_TRY(zero_file_check_piece(fd, found, k, save->staging.buffer[0]));
            }
        return zero_ok();
    });
    close(fd);
    if (result.code == ZERO_OK) return result;
    return zero_error(result.code, "read back: %s", result.text);
}

/* Rank 0, once all have read: the name (C1). */
static inline ZeroResult zero_save_finish(ZeroSave* save) {
    if (save->z->rank != 0) return zero_ok();
    save->made = zero_save_is_mine(save);
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

/* Up to where every rank has the temporary file open; `call`: which public call does it, `operation`: what it is for a
   ZeroWatch. */
static inline ZeroResult zero_save_begin(ZeroSave* save, const char* path, const char* call,
                                         const char* operation) {
    ZeroOptimizer* z = save->z;
    /* without the others: an exchange would overwrite the sums of the step, which zero_set_step reads again */
    ZERO_TRY(zero_check_between_steps(z, call));
    zero_comm_progress(&z->comm, operation);
    ZERO_TRY(zero_agree(z, zero_guard([&]() { return zero_save_plan(save, path); })));
    ZERO_TRY(zero_save_compare(save));
    ZERO_TRY(zero_agree(z, zero_save_create(save)));
    const uint64_t own[2] = {save->mark, 0};
    ZERO_TRY(zero_exchange_words(z, own, save->words.data()));
    save->mark = save->words[0];
    return zero_agree(z, zero_save_open(save));
}

static inline ZeroResult zero_save_run(ZeroSave* save, const char* path) {
    ZeroOptimizer* z = save->z;
    ZERO_TRY(zero_save_begin(save, path, "zero_checkpoint_save", "save"));
    ZERO_TRY(zero_agree(z, zero_guard([&]() { return zero_save_pieces(save); })));
    ZERO_TRY(zero_save_share_checksums(save));
    ZERO_TRY(zero_agree(z, zero_guard([&]() { return zero_save_seal(save); })));
    ZERO_TRY(zero_agree(z, zero_save_read_back(save)));
    return zero_agree(z, zero_guard([&]() { return zero_save_finish(save); }));
}

/* Writes the state of all ranks to `path`, whose folder must exist. what: step, samples, tensors and strings; the same on
   all ranks. The host waits; the next step may follow. On an error, an older file of that name is still there (C2). */
static inline ZeroResult zero_checkpoint_save(ZeroOptimizer* z, const char* path,
                                              const ZeroCheckpoint* what) {
    ZeroSave save;
    zero_save_init(&save, z, what);
    ZeroResult result = zero_guard([&]() { return zero_save_run(&save, path); });
    if (result.code != ZERO_OK) zero_comm_drain(&z->comm); /* copies into the buffers that go now */
    zero_save_free(&save);
    if (result.code == ZERO_OK) return result;
    return zero_error(result.code, "saving %.60s: %s", zero_base_name(path), result.text);
}

#endif /* LLMC_ZERO_CHECKPOINT_SAVE_CUH_INCLUDED */
