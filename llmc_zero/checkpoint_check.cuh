/* llmc_zero/checkpoint_check.cuh - can this run be saved? Asked before the first step, not hours later.

       zero_checkpoint_path(path, sizeof(path), "run", first_step_that_is_saved);
       ZeroResult r = zero_checkpoint_check(&z, path, &what);     // what: as for saving; all ranks

   It does what a save does but for the data: plans the header (names, sizes, strings; the same on all ranks), makes the
   temporary file with room for everything, and on every rank finds it, opens, writes and syncs it; then deletes it. A
   process that dies meanwhile leaves FILE.tmp, which the next save or zero_checkpoint_rotate deletes.

   defines: zero_checkpoint_check
*/
#ifndef LLMC_ZERO_CHECKPOINT_CHECK_CUH_INCLUDED
#define LLMC_ZERO_CHECKPOINT_CHECK_CUH_INCLUDED

#include "checkpoint_save.cuh"

/* The last bytes of the last piece that this rank would write (a limit on file sizes would be met there), synced. A rank
   without pieces only syncs. */
static inline ZeroResult zero_check_write(ZeroSave* save) {
    const std::vector<ZeroFilePiece>& pieces = save->header.pieces;
    size_t k = pieces.size();
    while (k > 0 && save->grid.writer[k - 1] != save->z->rank) k--;
    if (k > 0) {
        const uint64_t bytes = std::min((uint64_t)sizeof(save->mark), pieces[k - 1].bytes);
        const uint64_t end = save->text.size() + pieces[k - 1].offset + pieces[k - 1].bytes;
        ZERO_TRY(zero_file_write(save->fd, &save->mark, bytes, end - bytes));
    }
    return zero_save_close(save);
}

static inline ZeroResult zero_check_run(ZeroSave* save, const char* path) {
    ZERO_TRY(zero_save_begin(save, path, "zero_checkpoint_check", "check of saves"));
    return zero_agree(save->z, zero_check_write(save));
}

/* ok: a save to `path` would have worked now. Nothing of z changes, and no file is left. All ranks call it, between two
   steps, and get the same result; the text says what a save would lack. */
static inline ZeroResult zero_checkpoint_check(ZeroOptimizer* z, const char* path,
                                               const ZeroCheckpoint* what) {
    ZeroSave save;
    zero_save_init(&save, z, what);
    ZeroResult result = zero_guard([&]() { return zero_check_run(&save, path); });
    zero_save_free(&save);
    if (result.code == ZERO_OK) return result;
    return zero_error(result.code, "this run could not be saved as %.60s: %s", zero_base_name(path),
                      result.text);
}

#endif /* LLMC_ZERO_CHECKPOINT_CHECK_CUH_INCLUDED */
