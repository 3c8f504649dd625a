"""What is wrong in llm.c itself, and how dev/llmc/patch.py puts it right.

Each mend has a reason, works without edits.py too (--mends-only) and can be left out (--no-mend). A mend that an edit
makes pointless, because it replaces the place, has `covered` set. In llm.c's headers a mend is there for sources that
define ZERO_MENDS (plan.py), unless its `condition` says when else it is right for every program.
"""

import re

from edits import TRAINER, declaration, update_function
from plan import GUARD, MENDED, Edit, Mend
from source import Missing, Span

MENDS = []


def mend(name, files, reason, covered="", condition=f"defined({GUARD})"):
    return lambda apply: MENDS.append(Mend(name, files.split(), reason, apply, covered, condition)) or apply


def define_guard(plan):
    if re.search(rf"#\s*define\s+{GUARD}\b", plan.source.code):
        return
    first = re.compile(r"(?:\xef\xbb\xbf)?\s*").match(plan.source.code).end()
    plan.change(first, first, f"#define {GUARD} 1 // llmc_zero's mends in headers that other programs use too\n")


OWN_MENDS = Edit("own mends", TRAINER, f"{GUARD} is defined: mends in headers are for this trainer alone", define_guard)


def correct(plan, found, right):
    """Puts what is right in the place of a match's first group."""
    if found[1] == right:
        return MENDED
    plan.change(*found.span(1), right)


@mend("one-float", "llmc/zero.cuh train_gpt2.cu",
      "all-reduces of one float have sizeof(float) = 4 as their count: 12 bytes behind the buffer are read and written")
def mend_one_float(plan):
    found = [call.arguments[2] for call in plan.source.calls("ncclAllReduce")
             if len(call.arguments) > 2 and not plan.replaced(call.start)]
    wrong = [span for text, span in found if re.sub(r"\s", "", text) == "sizeof(float)"]
    if not found:
        raise Missing("ncclAllReduce: not found")
    for start, end in wrong:
        lead = len(plan.source.code[start:end]) - len(plan.source.code[start:end].lstrip())
        plan.change(start + lead, end, "1")
    return None if wrong else MENDED


@mend("false", "llmc/cuda_common.h",
      "the constant False is true: bias gradients of wide layers overwrite those of the micro-steps before")
def mend_false(plan):
    found = plan.source.find(r"\bbool_constant\s*<\s*(true|false)\s*>\s*False\b", what="the constant False")
    return correct(plan, found, "false")


@mend("block-reduce", "llmc/attention.cuh",
      "attention's backward reuses the shared memory of blockReduce in a loop without the final __syncthreads: a race")
def mend_block_reduce(plan):
    source = plan.source
    function = source.function("softmax_autoregressive_backward_inplace_kernel")
    found = source.find(r"\bblockReduce\s*<[^;()]*>\s*\(", function.body, "blockReduce in attention's backward")
    end = source.closing(found.end() - 1)
    arguments = source.split(found.end(), end - 1)
    if len(arguments) > 1:
        return MENDED
    plan.change(end - 1, end - 1, ", true")


@mend("residual-guard", "llmc/layernorm.cuh",
      "fused_residual_forward works on one row too many when batch times length is no multiple of 8")
def mend_residual_guard(plan):
    source = plan.source
    function = source.function("fused_residual_forward_kernel5")
    found = source.find(r"\bif\s*\(\s*idx\s*(>=?)\s*N\s*\)", function.body, "the guard idx > N")
    return correct(plan, found, ">=")


@mend("mem-advise", "llmc/cuda_utils.cuh", "cudaMemAdvise takes a cudaMemLocation since CUDA 13: it would not compile",
      condition="CUDART_VERSION >= 13000")
def mend_mem_advise(plan):
    source = plan.source
    if re.search(r"\bcudaMemLocation\b", source.code) or not source.calls("cudaMemAdvise"):
        return MENDED
    plan.change(*source.call("cudaMemAdvise").arguments[3][1], " cudaMemLocation{cudaMemLocationTypeHost, 0}")


@mend("outlier-nan", "llmc/outlier_detector.h",
      "one NaN in the sums of the outlier detector switches -sl and -sg off for good")
def mend_outlier_nan(plan):
    function = plan.source.function("update_detector")
    if re.search(r"\bisfinite\b", plan.source.code[function.body.start:function.body.end]):
        return MENDED
    plan.change(function.body.start, function.body.start,
                f'\n    if (!isfinite({function.parameters[1]})) {{ return nan(""); }} // it would stay in the sums')


@mend("mpi-finalize", "llmc/zero.cuh",
      "MPI_Finalize is called in runs that never started MPI (-pi tcp, -pi fs): MPI ends a good run with an error")
def mend_mpi_finalize(plan):
    source, function = plan.source, plan.source.function("multi_gpu_config_free")
    if re.search(r"\bMPI_Initialized\b", source.code[function.body.start:function.body.end]):
        return MENDED
    statement = source.statement(source.call("MPI_Finalize", function.body).start)
    old = source.text[statement.start:statement.end]
    plan.replace(statement, "int mpi_started = 0;\nmpiCheck(MPI_Initialized(&mpi_started));\n"
                            f"if (mpi_started) {{ {old} }}")


@mend("log-digits", "llmc/logger.h",
      "main.log has four digits of the loss: runs that differ look equal")
def mend_log_digits(plan):
    source, wrong = plan.source, 0
    for name in ("logger_log_train", "logger_log_val"):
        function = source.function(name)
        call = source.call("fprintf", function.body)
        for match in re.compile(r"%\.\d+f").finditer(source.text, call.start, call.end):
            plan.change(*match.span(), "%.9g")
            wrong += 1
    return None if wrong else MENDED


@mend("val-every", TRAINER, "-v 0 divides by zero: it means validation at the first and the last step only")
def mend_val_every(plan):
    source, main = plan.source, plan.source.function("main")
    if re.search(r"\bval_loss_every\s*(?:<=|>)\s*0", source.code[main.body.start:main.body.end]):
        return MENDED
    if not re.search(r"%\s*val_loss_every\b", source.code[main.body.start:main.body.end]):
        return MENDED   # nothing is divided by it
    start = source.statement(source.call("multi_gpu_config_init", main.body).start)
    plan.before(start, "if (val_loss_every <= 0) { val_loss_every = 1 << 30; } // first and last step only")


@mend("gather-order", TRAINER, "with -z 1 parameters are gathered without waiting for the update that writes them",
      covered="update")
def mend_gather_order(plan):
    source = plan.source
    function, names = update_function(source)
    if source.calls("cudaStreamWaitEvent", function.body):
        return MENDED
    config = names[8]
    start = source.statement(source.call("ncclGroupStart", function.body).start)
    plan.before(start, f"cudaCheck(cudaEventRecord({config}->compute_nccl_sync, main_stream));\n"
                       f"cudaCheck(cudaStreamWaitEvent({config}->nccl_stream, {config}->compute_nccl_sync));")


@mend("wpe-range", TRAINER, "with -z 1 gradients of T rows of wpe are scattered, but maxT rows are owned",
      covered="backward")
def mend_wpe_range(plan):
    source, function = plan.source, plan.source.function("gpt2_backward_and_reduce")
    calls = source.calls("multi_gpu_async_reduce_gradient", function.body)
    if not calls:
        raise Missing("the call of multi_gpu_async_reduce_gradient: not found")
    last = calls[-1]
    sizes = declaration(source, last.arguments[1][0], source.block_around(last.start))
    found = list(re.compile(r"\bT\s*\*\s*C\b").finditer(source.code, *sizes))
    if not found and re.search(r"max_seq_len", source.code[sizes.start:sizes.end]):
        return MENDED
    if len(found) != 1:
        raise Missing(f"T * C in the sizes of what is reduced last: found {len(found)} times, expected once")
    plan.change(*found[0].span(), f"(size_t){function.parameters[0]}->config.max_seq_len * C")


@mend("rounding-seed", TRAINER, "stochastic rounding is seeded by rank: replicas drift apart", covered="update")
def mend_rounding_seed(plan):
    source, function = plan.source, plan.source.function("gpt2_init_common")
    seed = source.statement(source.find(r"\brng_state\s*=", function.body, "rng_state").start())
    rank = re.compile(r"\s*\+\s*multi_gpu_config\s*\.\s*process_rank\b").search(source.code, *seed)
    if not rank:
        return MENDED
    plan.change(*rank.span(), "")


@mend("nan-norm", TRAINER, "a norm that is not finite is not clipped: m, v and weights become NaN", covered="update")
def mend_nan_norm(plan):
    source, main = plan.source, plan.source.function("main")
    call = source.call("gpt2_calculate_grad_norm", main.body)
    norm = re.compile(r"(\w+)\s*=\s*$").search(source.code, main.body.start, call.start)
    if not norm:
        raise Missing("the variable that gpt2_calculate_grad_norm is assigned to: not found")
    if re.search(rf"!\s*isfinite\s*\(\s*{norm[1]}\s*\)", source.code[call.end:main.body.end]):
        return MENDED
    choice = source.find(r"(?<!else)\s\bif\s*\(\s*isfinite\s*\(", main.body, "the choice whether to skip an update")
    plan.before(Span(choice.start() + 1, choice.start() + 1),
                f"if (!isfinite({norm[1]})) {{\n"
                f'    printf0("skipping update: the gradient is not finite\\n");\n'
                "} else")
