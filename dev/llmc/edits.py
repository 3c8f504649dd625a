"""What dev/llmc/patch.py changes in a checkout of llm.c, and where: names of functions and variables, no lines of it.

An edit is a function that gets a Plan (the source of one file and the changes collected so far) and adds to it.
EDITS make llm.c's trainer use llmc_zero. MENDS put right what is wrong in llm.c itself; each has a reason, works
without EDITS too (--mends-only) and can be left out (--no-mend). A mend that EDITS make pointless, because they
replace the place, has `covered` set.
"""

import re
from collections import namedtuple

from source import Missing, Source, Span

Edit = namedtuple("Edit", "name file what apply")
Mend = namedtuple("Mend", "name files reason apply covered")
Change = namedtuple("Change", "edit start end text")

OPTIONAL = {"test_gpt2.cu", "Makefile"}   # a fork may do without
MENDED = "mended"             # what a mend returns where there is nothing left to do


# The names in what edits take out of llm.c. Another name there, unless it is declared there too, is a fork's own and its
# effect would be lost.
KNOWN = set("""
    if else for return const bool int float long void char size_t ptrdiff_t unsigned sizeof true false nullptr NULL
    auto assert endif ifdef defined continue break MULTI_GPU NUM_PARAMETER_TENSORS NVTX_RANGE_FN NvtxRange
    IO_BUF_SIZE EXIT_FAILURE CEIL_DIV ShardInfo MultiGpuConfig floatX dim3 exit printf fprintf stderr printf0 sqrtf
    random_u32 C T V Vp L i l f t cudaCheck cudaMalloc cudaMallocConditionallyManaged cudaMemset cudaMemsetAsync
    cudaMemcpy cudaMemcpyHostToDevice cudaMemcpyDeviceToHost cudaGetLastError cudaDeviceSynchronize ncclCheck
    ncclAllReduce ncclAllGather ncclGroupStart ncclGroupEnd ncclFloat ncclFloatX ncclSum adamw_update
    init_from_master copy_and_cast_kernel device_to_file file_to_device global_norm_squared global_sum_deterministic
    get_max_num_block_sums gpt2_get_tensor_at_layer gpt2_update malloc_and_point_parameters
    multi_gpu_async_reduce_gradient multi_gpu_get_shard_offset multi_gpu_config model config acts output params grads
    params_memory grads_memory m_memory v_memory master_weights param_elements param_sizeof num_parameters
    num_parameters_bytes num_layers num_processes shard_num_parameters zero_stage nccl_comm nccl_stream main_stream
    use_master_weights init_state init_master_weights rng_state rng_state_last_update offset size last_step
    model_file state_file state_header params_memory_cpu memory_status wte wpe ln1w ln1b qkvw qkvb attprojw attprojb
    ln2w ln2b fcw fcb fcprojw fcprojb lnfw lnfb dl_ln1w dl_ln1b dl_qkvw dl_qkvb dl_attprojw dl_attprojb dl_ln2w
    dl_ln2b dl_fcw dl_fcb dl_fcprojw dl_fcprojb""".split())


class Plan:
    """The changes of one file. Offsets are those of the original text; changes must not overlap."""

    def __init__(self, text):
        self.source = Source(text)
        self.newline = "\r\n" if text.count("\r\n") * 2 > text.count("\n") else "\n"
        self.changes = []
        self.edit = None   # name of the edit that is being applied
        self.lost = []     # what a fork has of its own in places that edits replace

    def replaces_code(self, start, end):
        """Notes names of a fork's own in code that an edit takes out; locals of the function are none."""
        code = self.source.code
        top, bottom = self.source.function_around(start)
        local = set(re.findall(r"\w[\s*&>]+(\w+)\s*(?:=|;|\[|\{|,|\()", code[top:bottom]))
        local |= set(re.findall(r",\s*\*?\s*(?:const\s+)?(\w+)\s*=", code[top:bottom]))
        local |= set(re.findall(r"(\w+)\s*(?:=[^,()]*)?[,)]", code[top:code.index("{", top)]))
        own = [word for word in dict.fromkeys(re.findall(r"(?<![\w.])[A-Za-z_]\w*", code[start:end]))
               if word not in KNOWN and (word not in local or re.search(rf"(?<!\w)(?<!\w\s){word}\s*\(", code[start:end]))]
        if own:
            self.lost.append(f"line {self.source.line(start)}: edit '{self.edit}' replaces code with names of this "
                             f"fork's own: {', '.join(own)}")

    def change(self, start, end, text):
        text = text.replace("\r\n", "\n").replace("\n", self.newline)   # some of it may be the file's own
        self.changes.append(Change(self.edit, start, end, text))

    def replaced(self, offset):
        return any(c.start <= offset < c.end for c in self.changes)

    def replace(self, span, text):
        """Replaces statements by lines of text, indented as they were; no text: takes their lines out."""
        if self.edit not in {m.name for m in MENDS}:
            self.replaces_code(*span)
        lines = self.source.whole_lines(span)
        if lines is None:
            self.change(*span, " ".join(text.split("\n")))
            return
        indent = self.source.indentation(span.start)
        self.change(*lines, "".join((indent + line if line and line[0] != "#" else line) + "\n"
                                    for line in text.split("\n") if text))

    def before(self, span, text):
        indent = self.source.indentation(span.start)
        self.change(span.start, span.start, "".join(line + "\n" + indent for line in text.split("\n")))

    def after(self, span, text):
        indent = self.source.indentation(span.start)
        self.change(span.end, span.end, "".join("\n" + indent + line for line in text.split("\n")))

    def body(self, function, text):
        """Replaces the body of a function; a range for the profiler stays."""
        code = self.source.code[function.body.start:function.body.end]
        self.replaces_code(*function.body)
        if re.search(r"\bNVTX_RANGE_FN\s*\(", code):
            text = "NVTX_RANGE_FN();\n" + text
        self.change(*function.body, "\n" + "".join(f"    {line}\n" for line in text.split("\n")))

    def result(self):
        """(patched text, changes in order of their place)."""
        changes = sorted(self.changes, key=lambda c: (c.start, c.end))
        out, at = [], 0
        for c in changes:
            if c.start < at:
                raise Missing(f"line {self.source.line(c.start)}: another edit has changed this place")
            out += [self.source.text[at:c.start], c.text]
            at = c.end
        return "".join(out) + self.source.text[at:], changes


EDITS, MENDS = [], []


def edit(name, file, what):
    return lambda apply: EDITS.append(Edit(name, file, what, apply)) or apply


def mend(name, files, reason, covered=""):
    return lambda apply: MENDS.append(Mend(name, files.split(), reason, apply, covered)) or apply


# ---------------------------------------------------------------------------- the trainer

TRAINER = "train_gpt2.cu"


@edit("struct", TRAINER, "GPT2 gets a pointer to what llmc_zero holds; the adapter is included behind it")
def edit_struct(plan):
    end = plan.source.find(r"\}\s*GPT2\s*;", what="the end of GPT2's definition")
    plan.change(end.start(), end.start(), "    struct ZeroGpt2* zero; // llmc_zero: layout, buffers and optimizer\n")
    plan.change(end.end(), end.end(),
                "\n\n// defines: zero_gpt2_* (everything that knows GPT2 and llmc_zero)\n"
                '#include "llmc_zero/gpt2.cuh"')


@edit("init", TRAINER, "gpt2_init_common: nothing is held yet")
def edit_init(plan):
    function = plan.source.function("gpt2_init_common")
    plan.change(function.body.start, function.body.start,
                f"\n    {function.parameters[0]}->zero = NULL; // made with the weights")


@edit("weights", TRAINER, "gpt2_allocate_weights: one layer-major buffer, padded for the ranks")
def edit_weights(plan):
    function = plan.source.function("gpt2_allocate_weights")
    call = plan.source.call("malloc_and_point_parameters", function.body)
    plan.replace(plan.source.statement(call.start), f"zero_gpt2_allocate_weights({function.parameters[0]});")


@edit("state", TRAINER, "gpt2_allocate_state: gradients, and m, v and masters of the own slices, filled at once")
def edit_state(plan):
    source, function = plan.source, plan.source.function("gpt2_allocate_state")
    model = function.parameters[0]
    call = source.call("malloc_and_point_parameters", function.body)
    plan.replace(source.statement(call.start), f"zero_gpt2_allocate_grads({model});")
    span = Span(declaration(source, "shard_num_parameters", function.body).start,
                if_of(source, "use_master_weights", function.body).end)
    plan.replace(span, f"zero_gpt2_allocate_state({model});")


@edit("model files", TRAINER, "model files are written and read in llm.c's order, byte for byte")
def edit_files(plan):
    source = plan.source
    function = source.function("gpt2_write_to_checkpoint")
    call = source.call("device_to_file", function.body, "params_memory")
    plan.replace(source.statement(call.start),
                 f"zero_gpt2_params_to_file({function.parameters[0]}, {call.arguments[0][0]});")
    function = source.function("gpt2_build_from_checkpoint")
    call = source.call("file_to_device", function.body, "params_memory")
    plan.replace(source.statement(call.start),
                 f"zero_gpt2_params_from_file({function.parameters[0]}, {call.arguments[1][0]});")
    function = source.function("gpt_build_from_descriptor")
    call = source.call("cudaMemcpy", function.body, "params_memory")
    plan.replace(source.statement(call.start),
                 f"zero_gpt2_params_from_host({function.parameters[0]}, {call.arguments[1][0]});")


WITHOUT_LAYER = {"wte", "wpe", "lnfw", "lnfb"}
COPY = r"\bParameterTensors\s+(\w+)\s*=\s*([\w.>-]*?)\s*(->|\.)\s*(param|grad)s\s*;"   # of model->params


def pointers(plan, kind, expected):
    """In every function with a copy of model->params (or grads), `copy.NAME + LAYER * size` and `copy.NAME` become
    calls that know where the layer lies. expected: functions that must have such a copy."""
    source = plan.source
    wanted = {name: source.function(name).body for name in expected}
    for copy in re.compile(COPY).finditer(source.code):
        if copy[4] != kind:
            continue
        wanted = {name: body for name, body in wanted.items() if not body.start <= copy.start() < body.end}
        uses(plan, copy[1], copy[2] if copy[3] == "->" else "&" + copy[2], kind, source.block_around(copy.start()))
    for name in wanted:
        raise Missing(f"{name}: its copy of model->{kind}s: not found")


def uses(plan, name, model, kind, block):
    source, layered = plan.source, 0
    whole = re.compile(rf"(?<![\w.>]){name}\b(?!\s*\.|\s*=)").search(source.code, *block)
    if whole:
        raise Missing(f"line {source.line(whole.start())}: {name} is handed on as a whole")
    for match in re.compile(rf"(?<![.>])\b{name}\s*\.\s*(\w+)\b").finditer(source.code, *block):
        if plan.replaced(match.start()):
            continue
        layer, end = layer_of(source, match)
        plan.change(match.start(), end, f"zero_gpt2_{kind}({model}, {name}.{match[1]}, {layer or 0})")
        layered += layer is not None
    if layered == 0:
        raise Missing(f"{name}.TENSOR + layer * size: not found")


def layer_of(source, match):
    """(layer or None, end) of `copy.NAME + layer * size` or `copy.NAME`. The layer comes first and is the variable of a
    loop over layers; a part that was guessed wrong would be a wrong gradient without a word."""
    problem = f"line {source.line(match.start())}: {match[0]} + layer * size, the layer first: not found"
    in_front = source.code[:match.start()].rstrip()[-1]
    behind = re.compile(r"\s*([-+\[])").match(source.code, match.end())
    if in_front in "+-*/&%":
        raise Missing(problem)
    if not behind:
        return None, match.end()
    product = re.compile(r"\s*\+\s*(\((?:[^()]|\([^()]*\))*\)|\w+)\s*\*").match(source.code, match.end())
    loop, variable = source.for_around(match.start())
    head = source.code[loop.start:source.code.index("{", loop.start)]
    if (not product or match[1] in WITHOUT_LAYER or not re.search(r"\bL\b|layers", head)
            or not re.fullmatch(rf"\(?\s*{variable}\s*(?:[-+]\s*1\s*)?\)?", product[1])):
        raise Missing(problem)
    return product[1], source.product_end(product.end())


@edit("backward", TRAINER, "gpt2_backward_and_reduce: a layer's gradients leave when the layer is done")
def edit_backward(plan):
    source, function = plan.source, plan.source.function("gpt2_backward_and_reduce")
    if len(function.parameters) != 5:
        raise Missing(f"gpt2_backward_and_reduce has {len(function.parameters)} parameters, 5 were expected")
    model, _, _, micro_steps, micro_step = function.parameters
    last = source.statement(source.find(r"\bbool\s+last_step\s*=", function.body, "last_step").start())
    plan.after(last, f"zero_gpt2_begin({model}, {micro_step}, {micro_steps});")
    clear = source.call("cudaMemsetAsync", function.body, "grads_memory")
    plan.replace(source.statement(clear.start), "")
    reduces = source.calls("multi_gpu_async_reduce_gradient", function.body)
    if len(reduces) != 2:
        raise Missing(f"calls of multi_gpu_async_reduce_gradient in gpt2_backward_and_reduce: found "
                      f"{len(reduces)} times, expected 2 (a layer, and all else)")
    _, layer = source.for_around(reduces[0].start)
    plan.replace(source.if_around(reduces[0].start), f"zero_gpt2_layer_done({model}, {layer});")
    block = source.block_around(reduces[1].start)
    for argument in reduces[1].arguments[:2]:
        plan.replace(declaration(source, argument[0], block), "")
    plan.replace(source.statement(reduces[1].start), "")
    encoder = source.call("encoder_backward", function.body)
    plan.after(source.statement(encoder.start), f"zero_gpt2_backward_done({model});")
    pointers(plan, "grad", ["gpt2_backward_and_reduce"])


@edit("forward", TRAINER, "gpt2_forward: each tensor is waited for where it is used; no wait for a peer is for ever")
def edit_forward(plan):
    pointers(plan, "param", ["gpt2_forward", "gpt2_backward_and_reduce"])
    for name in ("gpt2_forward", "gpt2_backward_and_reduce"):
        function = plan.source.function(name)
        for wait in plan.source.calls("cudaDeviceSynchronize", function.body):
            plan.replace(plan.source.statement(wait.start), f"zero_gpt2_wait({function.parameters[0]});")


@edit("tensor at layer", TRAINER, "gpt2_get_tensor_at_layer: offsets of the layer-major buffer")
def edit_tensor_at_layer(plan):
    function = plan.source.function("gpt2_get_tensor_at_layer")
    plan.body(function, f"return zero_gpt2_tensor_at_layer({', '.join(function.parameters)});")


@edit("norm", TRAINER, "gpt2_calculate_grad_norm: own slices in fp64, added in rank order, on the device")
def edit_norm(plan):
    function = plan.source.function("gpt2_calculate_grad_norm")
    plan.body(function, f"return zero_gpt2_grad_norm({function.parameters[0]});")


@edit("update", TRAINER, "gpt2_update: one fused launch a bucket, its gather behind it, in place of sixteen launches")
def edit_update(plan):
    function, names = update_function(plan.source)
    decays = re.findall(r"==\s*(\d+)", "".join(re.findall(r"\bfloat\s+wd\s*=[^;]*;",
                                                         plan.source.code[function.body.start:function.body.end])))
    if decays and decays != "0 1 4 6 10 12".split():
        plan.lost.append(f"edit '{plan.edit}': weight decay is for tensors {', '.join(decays)} here, in llm.c for 0, 1, "
                         "4, 6, 10, 12: change zero_gpt2_tensors in llmc_zero/gpt2_layout.cuh")
    state = names[0] + "->rng_state"
    saved = f"{state}_last_update = {state}; // goes into state files\n"
    plan.body(function, (saved if re.search(r"\brng_state_last_update\b", plan.source.code) else "")
              + f"zero_gpt2_update({', '.join(names[:8] + (names[9:] or ['false']))});")


@edit("free", TRAINER, "gpt2_free; main, before the communicator goes, compares the ranks' parameters")
def edit_free(plan):
    source, function = plan.source, plan.source.function("gpt2_free")
    plan.change(function.body.start, function.body.start, f"\n    zero_gpt2_free({function.parameters[0]});")
    call = source.call("multi_gpu_config_free", source.function("main").body)
    plan.before(source.statement(call.start), f"zero_gpt2_finish({main_model(source)});")


@edit("state files", TRAINER, "save_state, load_state: one file of all ranks; all but the arrays goes through memory")
def edit_state_files(plan):
    source = plan.source
    for name, write in (("save_state", True), ("load_state", False)):
        function = source.function(name)
        filename, step, model, loader = [function.parameters[i] for i in ((0, 1, 2, 3) if write else (3, 0, 1, 2))]
        opening = source.call("fopenCheck", function.body)
        first = source.call("device_to_file" if write else "file_to_device", function.body, "m_memory")
        last = if_of(source, "use_master_weights", Span(first.end, function.body.end))
        plan.replace(Span(source.statement(first.start).start, last.end), "")
        plan.replace(declaration(source, "shard_num_parameters", function.body), "")
        if not write:
            plan.change(opening.start, opening.end, f"zero_gpt2_state_open({model}, {filename}, {loader})")
            continue
        plan.change(opening.start, opening.end, f"zero_gpt2_state_begin({model})")
        for said in source.calls("printf", Span(function.body.start, opening.start), filename):
            plan.replace(source.statement(said.start), "")   # says the name of another file
        closing = source.find(r"\bfclose(?:Check)?\s*\(\s*(\w+)\s*\)", function.body,
                              "where save_state closes its file")
        plan.change(*closing.span(), f"zero_gpt2_state_end({model}, {closing[1]}, {filename}, {step}, {loader})")


@edit("checkpoints", TRAINER, "a checkpoint's DONE goes first and comes last; -y 1 takes the newest that is whole")
def edit_checkpoints(plan):
    source, main = plan.source, plan.source.function("main")
    search = source.call("find_max_step", main.body)
    plan.change(search.start, search.start + len("find_max_step"), "zero_gpt2_find_max_step")
    function = source.function("write_checkpoint")
    plan.change(function.body.start, function.body.start,
                f"\n    zero_gpt2_begin_checkpoint({function.parameters[0]}, {function.parameters[1]});")
    function = source.function("delete_checkpoint")
    plan.change(function.body.start, function.body.start,
                f"\n    zero_gpt2_delete_checkpoint({function.parameters[0]}, {function.parameters[1]});")


@edit("stop", TRAINER, "main: SIGTERM saves behind the current step, and ends the run")
def edit_stop(plan):
    source, main = plan.source, plan.source.function("main")
    model, write = main_model(source), source.call("write_checkpoint", main.body)
    choice = source.if_around(write.start)
    head = Span(choice.start, source.code.index("{", choice.start))
    last = source.find(r"\blast_step\b", head, "last_step in the condition of write_checkpoint")
    plan.change(*last.span(), f"(last_step || zero_gpt2_stopping({model}))")
    leave = source.find(r"\bif\s*\(\s*(last_step)\s*\)\s*(?:\{\s*)?break\b", main.body, "if (last_step) break")
    plan.change(*leave.span(1), f"last_step || zero_gpt2_stopped({model}, {write.arguments[1][0]})")


@edit("joining", TRAINER, "in stage 3 all ranks join in writing the model file and in sampling")
def edit_joining(plan):
    source = plan.source
    body = source.function("write_checkpoint").body
    write = source.call("gpt2_write_to_checkpoint", body)
    bare = source.block_around(write.start).start < body.start   # if (rank == 0) call; without brackets
    choice = source.statement(write.start) if bare else source.if_around(write.start)
    plan.change(choice.end, choice.end, f" else {{ zero_gpt2_join_params_to_file({write.arguments[0][0]}); }}")
    main = source.function("main")
    condition = re.compile(r"multi_gpu_config\s*\.\s*process_rank\s*==\s*0(?=\s*&&\s*sample_every)")
    found = list(condition.finditer(source.code, *main.body))
    if not found:
        return   # a fork that does not sample
    plan.change(*found[0].span(), f"zero_gpt2_samples({main_model(source)})")
    opening = source.code.index("{", found[0].end())
    block = Span(opening, source.closing(opening))
    for said in source.calls("printf", block):
        plan.change(said.start, said.start + len("printf"), "printf0")
    for said in source.calls("safe_printf", block):
        plan.change(said.start, said.start, "if (multi_gpu_config.process_rank == 0) ")


@edit("flags", TRAINER, "-K, -R, -A, -O and -H are new; stage and bucket size are known before weights are allocated")
def edit_flags(plan):
    source, main = plan.source, plan.source.function("main")
    chain = source.find(r"\belse\s*\{\s*error_usage\s*\(", main.body, "the end of main's chain of flags")
    loop, index = source.for_around(chain.start())
    arguments = main.parameters[1]
    taken = re.compile(r"\[\s*1\s*\]\s*==\s*'([KRAOH])'").search(source.text, *main.body)
    if taken:
        raise Missing(f"line {source.line(taken.start())}: -{taken[1]} is a flag of this llm.c already")
    plan.before(Span(loop.start, loop.start),
                "ZeroGpt2Settings zero_settings = zero_gpt2_settings(); // -K, -R, -A, -O, -H\n"
                f"zero_gpt2_read_flags(&zero_settings, {main.parameters[0]}, {arguments});")
    plan.before(Span(chain.start(), chain.start()),
                f"else if (zero_gpt2_flag(&zero_settings, {arguments}[{index}], {arguments}[{index}+1])) {{ }}")
    stage = source.call("set_zero_configs", main.body).arguments[1][0]
    init = source.call("gpt2_init_common", main.body)
    plan.after(source.statement(init.start), f"zero_gpt2_configure({main_model(source)}, {stage}, &zero_settings);")
    usage = source.function("error_usage")
    prints = [call for call in source.calls("fprintf", usage.body)
              if re.search(r'"\s*-z\b', source.text[call.start:call.end])]
    if len(prints) != 1:
        raise Missing(f"the help on -z in error_usage: found {len(prints)} times, expected once")
    plan.after(source.statement(prints[0].start), "zero_gpt2_usage();")


@edit("clip", TRAINER, "main: the norm is clipped on the device")
def edit_clip(plan):
    source, main = plan.source, plan.source.function("main")
    scale = source.call("gpt2_update", main.body).arguments[6][0]
    found = source.find(rf"\b{re.escape(scale)}\s*(?:[-+*/]\s*)?=", main.body, f"{scale} in main")
    statement = source.statement(found.start())
    rule = re.fullmatch(r"\s*\(?\s*(\w+)\s*>\s*(\w+)\s*\)?\s*\?\s*\2\s*/\s*\1\s*:\s*1(?:\.0*)?f?\s*;",
                        source.code[found.end():statement.end])
    if not rule:
        raise Missing(f"line {source.line(found.start())}: {scale} = norm > LIMIT ? LIMIT / norm : 1 was expected")
    plan.change(found.end(), statement.end - 1, f" zero_gpt2_clip({rule[2]})")


@edit("any size", "llmc/zero.cuh", "set_zero_configs: no size has to divide by the number of ranks")
def edit_configs(plan):
    function = plan.source.function("set_zero_configs")
    config, stage, count = function.parameters
    plan.body(function,
              f"{config}->zero_stage = {stage};\n"
              f"{config}->shard_num_parameters = {count}; // until the state is allocated\n"
              f'printf0("| %-21s | %-50s |\\n", "llmc_zero",\n'
              f'        {stage} == 0 ? "off: optimizer state on every rank"\n'
              f'        : {stage} == 1 ? "optimizer state sharded over the ranks"\n'
              f'        : {stage} == 2 ? "optimizer state and gradients sharded"\n'
              f'                     : "optimizer state, gradients and parameters sharded");')


@edit("include path", "Makefile", "where the headers lie that checkpoints need")
def edit_makefile(plan):
    text = plan.source.text
    found = next(filter(None, (re.search(rf"(?m)^{name}[ \t]*:?=[^\r\n\\]*", text)
                               for name in ("NVCC_INCLUDES", "NVCC_FLAGS"))), None)
    if not found:
        raise Missing("NVCC_INCLUDES = or NVCC_FLAGS =: not found")
    plan.change(found.end(), found.end(), " -Illmc_zero/third_party")


@edit("test", "test_gpt2.cu", "test_gpt2.cu: gradients are looked at in llm.c's order")
def edit_test(plan):
    source, main = plan.source, plan.source.function("main")
    call = source.call("cudaMemcpy", main.body, "grads_memory")
    plan.replace(source.statement(call.start),
                 f"zero_gpt2_grads_to_host({main_model(source)}, {call.arguments[0][0]});")


BUFFERS = r"(?:->|\.)\s*(?:params|grads|(?:params|grads|m|v)_memory|master_weights)\b"


def nothing_else(plan, fine):
    source = plan.source
    found = [call.start for call in source.calls("multi_gpu_async_reduce_gradient") if not plan.replaced(call.start)]
    fine = fine + [match.span() for match in re.compile(COPY).finditer(source.code)]
    for match in re.compile(BUFFERS).finditer(source.code):
        known = plan.replaced(match.start()) or any(start <= match.start() < end for start, end in fine)
        negated = re.search(r"!\s*\w+$", source.code[max(0, match.start() - 80):match.start()])
        if not (known or negated or re.compile(r"\s*(?:[=!]=|=[^=])").match(source.code, match.end())):
            found.append(match.start())
    if found:
        raise Missing(f"line {', '.join(str(source.line(at)) for at in sorted(found))}: uses the buffers of parameters, "
                      "gradients or state in a way that is unknown here; write it with zero_gpt2_param, zero_gpt2_grad "
                      "or zero_gpt2_tensor_at_layer (llmc_zero/gpt2.cuh)")


@edit("nothing else", TRAINER, "no other line may rely on the order of llm.c's buffers, which is another one now")
def edit_leftovers(plan):
    nothing_else(plan, [plan.source.function("gpt2_free").body])


@edit("nothing else in test", "test_gpt2.cu", "nor may one of test_gpt2.cu")
def edit_test_leftovers(plan):
    nothing_else(plan, [])


# ---- places that several edits look for

def declaration(source, name, within):
    """The statement that declares a variable."""
    found = source.find(rf"\b\w+[\s*&]+(?:const\s+)?{re.escape(name)}\s*(?:\[[^]]*\]\s*)?=[^=]", within,
                        f"the declaration of {name}")
    return source.statement(found.end() - 2)


def if_of(source, word, within):
    """The first if whose condition has a word in it, with its block."""
    for match in re.compile(r"\bif\s*\(").finditer(source.code, *within):
        end = source.closing(match.end() - 1)
        block = re.compile(r"\s*\{").match(source.code, end)
        if block and re.search(rf"\b{word}\b", source.code[match.end():end]):
            span = Span(match.start(), source.closing(block.end() - 1))
            if re.compile(r"\s*else\b").match(source.code, span.end):
                raise Missing(f"line {source.line(span.start)}: an if on {word} without else: not found")
            return span
    raise Missing(f"an if on {word}: not found")


def update_function(source):
    """gpt2_update, and its parameters' names: the settings of AdamW, then the ranks; a tenth says that params are to be
    made from masters (since August 2024)."""
    function = source.function("gpt2_update")
    names = function.parameters
    ninth = rf"\bMultiGpuConfig\s*\*\s*{names[8]}\b" if len(names) in (9, 10) else "$^"
    if not re.search(ninth, source.code[function.start:function.body.start]):
        raise Missing(f"gpt2_update has {len(names)} parameters; 9 or 10 were expected, the ninth a MultiGpuConfig*")
    return function, names


def main_model(source):
    """How main writes the address of its model."""
    return source.call("gpt2_init_common", source.function("main").body).arguments[0][0]


# ---------------------------------------------------------------------------- mends

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


@mend("mem-advise", "llmc/cuda_utils.cuh", "cudaMemAdvise takes a cudaMemLocation since CUDA 13: it would not compile")
def mend_mem_advise(plan):
    source = plan.source
    if re.search(r"\bcudaMemLocation\b", source.code) or not source.calls("cudaMemAdvise"):
        return MENDED
    call = source.call("cudaMemAdvise")
    statement = source.statement(call.start)
    start, end = call.arguments[3][1]
    old = source.text[statement.start:statement.end]
    new = (source.text[statement.start:start] + " cudaMemLocation{cudaMemLocationTypeHost, 0}"
           + source.text[end:statement.end])
    plan.replace(statement, f"#if CUDART_VERSION >= 13000\n{new}\n#else\n{old}\n#endif")


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
