/* llmc_zero - ZeRO for C training frameworks: the one include.

   The model is one flat parameter buffer; each rank owns a contiguous slice of it (of every bucket of it). Gradients
   arrive by reduce-scatter, one fused kernel updates the slice, ncclAllGather rebuilds the full parameters.
   Optimizer state falls to 1/ranks; the loss curve stays the same. With ZERO_REDUCE_ORDERED and zero_begin_batches the
   number of ranks does not change a bit of it.

   To read, in the order of a step (each header's first block is its manual):
     check.cuh        ZeroResult: a code and one line of text; the library never prints and never exits
     layout.cuh       ZeroSegment, ZeroLayout: where every parameter lies, who owns it
     schedule.cuh     ZeroSchedule: which buffers a stage needs, in which pieces gradients travel
     memory.cuh       ZeroPlan, ZeroMemory: bytes needed, bytes held
     timeline.cuh     ZeroTimeline: what ran when on which stream
     collectives.cuh  ZeroComm: reduce and gather of a bucket, every event between the two streams
     elements.cuh     loads, stores and types that the kernels share
     exact_sum.cuh    sums of doubles that do not depend on the order of adding
     grad_norm.cuh    norm, clip, skip and t on the device
     reduce.cuh       sums of gradients in fp32, one micro-batch after another
     adamw.cuh        the fused update: AdamW, Adam, SGD; fp32, bf16 with masters, bf16 with stochastic rounding
     slots.cuh        ZeroSlots: buffers that hold one unit each (stages 2 and 3)
     optimizer_setup.cuh   ZeroOptimizer: its settings and buffers
     optimizer_params.cuh  parameters, from acquire to release, and the state that belongs to them
     optimizer_grads.cuh   gradients, from acquire to the reduction
     optimizer.cuh    norm, update and report; a whole example of a step stands at its top
     optimizer_drop.cuh    a step that one rank cannot finish, with call_order.cuh: the calls it has to make up for
     replicas.cuh     do all ranks hold the same parameters? do two runs?
   and, only where a program wants it: world.cuh (rank, device and communicator from MPI or a shared folder),
   watchdog.cuh (ends a process whose peers are gone), and
   checkpoint.cuh with checkpoint_folder.cuh (save, load, resume, keep the last k; they need two header-only libraries;
   numbers.cuh writes the numbers of files, the same in every locale).

   Include it in any number of translation units: host functions are static inline, kernels templates. It needs C++17,
   CUDA 12 or later and NCCL, or ZERO_NO_NCCL defined for programs of one rank.

   defines: LLMC_ZERO_VERSION (check.cuh); CHANGES.md says what a user of an earlier version has to do
*/
#ifndef LLMC_ZERO_LLMC_ZERO_CUH_INCLUDED
#define LLMC_ZERO_LLMC_ZERO_CUH_INCLUDED

#include "optimizer_drop.cuh"
#include "replicas.cuh"

#endif /* LLMC_ZERO_LLMC_ZERO_CUH_INCLUDED */
