/* test/ptx_kernels.cu - makes the compiler emit every kernel of sum, norm and update, for dev/ptx_check.py to look
   at.

   The launchers choose among three algorithms times three kinds of rounding, so calling them instantiates all
   of them. Nothing here runs.
*/
#include "llmc_zero/adamw.cuh"
#include "llmc_zero/reduce.cuh"

ZeroResult zero_ptx_kernels(const ZeroNorm* norm, const ZeroStepSettings* settings, const ZeroUpdate* update,
                            const ZeroHyper* hyper, const ZeroSum* sum, size_t chunks_count,
                            const double* loss, cudaStream_t stream);

ZeroResult zero_ptx_kernels(const ZeroNorm* norm, const ZeroStepSettings* settings, const ZeroUpdate* update,
                            const ZeroHyper* hyper, const ZeroSum* sum, size_t chunks_count,
                            const double* loss, cudaStream_t stream) {
    ZERO_TRY(zero_sum_launch(sum, stream));
    ZERO_TRY(zero_norm_squares(norm, stream));
    ZERO_TRY(zero_add_loss_launch(loss, norm->own_sums, stream));
    ZERO_TRY(zero_norm_share(norm, 0, 0, stream));
    ZERO_TRY(zero_norm_finish(norm, settings, stream));
    ZERO_TRY(zero_skip_launch(norm->scalars, stream));
    ZERO_TRY(zero_set_t_launch(norm->scalars, 0, stream));
    return zero_update_launch(update, hyper, 0, chunks_count, stream);
}
