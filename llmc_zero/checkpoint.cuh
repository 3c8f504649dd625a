/* llmc_zero/checkpoint.cuh - one file for the state of all ranks; any number of ranks loads it.

       ZeroCheckpoint what = zero_checkpoint();           // or with the tensors' shapes, strings of your own
       what.step = step, what.samples = samples;
       zero_checkpoint_check(&z, "run/step_00000010.safetensors", &what);      // before step 1: would a save work?
       zero_checkpoint_save(&z, "run/step_00000010.safetensors", &what);
       ...
       zero_checkpoint_load(&z, "run/step_00000010.safetensors", &what, NULL);     // what.step, what.samples

   All ranks make the same call, between two steps; all see the same folder. They get the same result, except that an
   error of CUDA or NCCL may strike one rank alone, as in a step: end all ranks then.

   The file (safetensors.cuh) holds of each tensor NAME (the masters, or the params where there are none), NAME.exp_avg
   and NAME.exp_avg_sq, as far as they are kept: all weights in model order, all exp_avg, all exp_avg_sq (bf16 weights
   last, so that everything stays aligned). There is no padding in it, and nothing depends on ranks, stage or buckets: two
   runs of one state save the same bytes, whoever writes them. Who wrote a file, and when, is for the caller's log.

   Saving: each rank writes its pieces of 4 MB (checkpoint_grid.cuh) one after another, through two pinned buffers: the device
   fills one while the host writes the other; what other ranks own of a piece they send. Every rank learns all checksums, rank
   0 writes the header last. A page of the file (64 KB) is written by one rank only, through descriptors that only write: a
   client of a network's file system writes whole pages back.
   C1  The file appears under its name by rename, after every rank has written and synced its part and said so, after
       rank 0 has synced the header, and after other ranks than the writers have read it back (unless what.read_back is 0).
       The folder is synced after it.
   C2  A save that fails leaves what stood under the name as it was, and no temporary file (NAME.tmp) unless the process
       dies; the next save to the name replaces that. Only if it is the sync of the folder that fails (the message says
       so) the new file has its name already. A rank that sees another folder is found, and so is another run that saves
       to the same name (rank 0 holds a lock, flock, on NAME.tmp).
   Loading:
   C3  Header, names, shapes, settings and every checksum are checked, and all ranks agree that they are fine, before any
       device memory is written. The ranks share the checking, so that the file is read once for it.
   C4  Then each rank reads the ranges it holds, and params are rounded from masters and gathered as after a step.

   Numbers in a file have a point, whatever the locale of the program. A whole number above 2^63 - 1 is refused: saving, as a
   wrong argument; loading, as damage.

   Memory: 8 MB of pinned buffers, 4 MB on the device while saving, and the list of pieces (some 100 bytes each), whatever the
   model's size.
   A process that runs under a limit on file sizes should ignore SIGXFSZ: the write then fails as on a full disk. Not part
   of llmc_zero.cuh, because it needs xxHash and nlohmann's JSON; see safetensors.cuh.

   checkpoint_folder.cuh adds names, the newest whole file and the last k.

   defines: nothing of its own. checkpoint_parts.cuh: ZeroTensor, ZeroString, ZeroCheckpoint, zero_checkpoint, zero_agree;
            checkpoint_check.cuh: zero_checkpoint_check; checkpoint_save.cuh: zero_checkpoint_save; checkpoint_load.cuh:
            zero_checkpoint_load
*/
#ifndef LLMC_ZERO_CHECKPOINT_CUH_INCLUDED
#define LLMC_ZERO_CHECKPOINT_CUH_INCLUDED

#include "checkpoint_check.cuh"
#include "checkpoint_load.cuh"

#endif /* LLMC_ZERO_CHECKPOINT_CUH_INCLUDED */
