"""What dev/llmc/patch.py changes in a checkout of llm.c, and where: names of functions and variables, no lines of it.

An edit is a function that gets a Plan (the source of one file and the changes collected so far) and adds to it. All of
them together make llm.c's trainer use llmc_zero.
"""

import re

from plan import Edit
from source import Missing, Span

EDITS = []

TRAINER = "train_gpt2.cu"
OPTIONAL = {"test_gpt2.cu", "Makefile"}   # a fork may do without
OWN = {TRAINER, *OPTIONAL}   # no other program uses these


def edit(name, file, what):
    return lambda apply: EDITS.append(Edit(name, file, what, apply)) or apply


# ---------------------------------------------------------------------------- the trainer


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
    cleared = source.if_around(source.call("cudaMemsetAsync", function.body, "losses").start)
    first = source.find(rf"\b{micro_step}\s*==\s*0\b", Span(cleared.start, source.code.index("{", cleared.start)),
                        f"{micro_step} == 0 where losses are cleared")
    plan.change(*first.span(), f"({first[0]} || zero_gpt2_ordered({model}))")
    encoder = source.call("encoder_backward", function.body)
    scale = source.find(rf"\b{micro_steps}\b", Span(last.end, encoder.start), f"the scale of the loss, 1 / {micro_steps}")
    plan.change(*scale.span(), f"zero_gpt2_loss_steps({model}, {micro_steps})")
    for draw in source.calls("random_u32", function.body):
        plan.change(draw.start, draw.start, f"zero_gpt2_ordered({model}) ? zero_gpt2_random({model}) : ")
    plan.change(function.body.end, function.body.end, f"    zero_gpt2_mean_loss({model});\n")
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
        plan.lost.append(f"edit '{plan.item.name}': weight decay is for tensors {', '.join(decays)} here, in llm.c for 0, "
                         "1, 4, 6, 10, 12: change zero_gpt2_tensors in llmc_zero/gpt2_layout.cuh")
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
    taken = re.compile(r"\[\s*1\s*\]\s*==\s*'([KRAOHVW])'").search(source.text, *main.body)
    if taken:
        raise Missing(f"line {source.line(taken.start())}: -{taken[1]} is a flag of this llm.c already")
    plan.before(Span(loop.start, loop.start),
                "ZeroGpt2Settings zero_settings = zero_gpt2_settings(); // -K, -R, -A, -O, -H, -V, -W\n"
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


@edit("batches", TRAINER, "with -R ordered one list of micro-batches for any number of ranks: steps, data, evaluation")
def edit_batches(plan):
    source, main = plan.source, plan.source.function("main")
    model, backward = main_model(source), source.call("gpt2_backward_and_reduce", main.body)
    micro_steps, micro_step = backward.arguments[3][0], backward.arguments[4][0]
    division = source.find(rf"\bint\s+{re.escape(micro_steps)}\s*=\s*((\w+)\s*/\s*(\w+))\s*;", main.body,
                           f"{micro_steps} = TOKENS OF A STEP / TOKENS OF A ROUND")
    total, of_round = division[2], division[3]
    plan.change(*division.span(1), f"zero_gpt2_micro_steps(&zero_settings, {total}, {of_round})")
    for use in re.compile(rf"[%/]\s*({of_round})\b").finditer(source.code, *main.body):
        if not division.start() <= use.start() < division.end():
            plan.change(*use.span(1), f"zero_gpt2_round(&zero_settings, {of_round})")
    loaders = [*source.calls("dataloader_init", main.body), *source.calls("evalloader_init", main.body)]
    for loader in loaders:
        place = next((i for i, (text, _) in enumerate(loader.arguments) if text.endswith("num_processes")), 0)
        if place == 0:
            raise Missing(f"line {source.line(loader.start)}: RANK, multi_gpu_config.num_processes: not found")
        for (text, span), what in zip(loader.arguments[place - 1:place + 1], ("rank", "ranks")):
            start = span[0] + len(source.code[slice(*span)]) - len(source.code[slice(*span)].lstrip())
            plan.change(start, span[1], f"zero_gpt2_loader_{what}(&zero_settings, {text})")
    inner, _ = source.for_around(backward.start)
    taken = source.call("dataloader_next_batch", inner)
    plan.change(taken.start, taken.end, f"zero_gpt2_next_batch({model}, {taken.arguments[0][0]}, {micro_step})")
    for call in [*source.calls("dataloader_next_batch", main.body), *source.calls("evalloader_next_batch", main.body)]:
        if call.start != taken.start:
            edit_evaluation(plan, call)


def edit_evaluation(plan, batch):
    """A loop over all batches of a loader; `batch` is the call that gets the next one."""
    source, model = plan.source, main_model(plan.source)
    of_data = source.code.startswith("dataloader", batch.start)
    loop, turn = source.for_around(batch.start)
    limit = re.compile(rf"\b{turn}\s*<\s*([^;]*?)\s*;").search(source.code, loop.start, source.code.index("{", loop.start))
    if not limit:
        raise Missing(f"line {source.line(loop.start)}: a loop {turn} < NUMBER OF BATCHES: not found")
    plan.change(*limit.span(1), f"zero_gpt2_rounds({model}, {limit[1]})")
    taken = f"{model}, {batch.arguments[0][0]}, {turn}"
    taken = f"zero_gpt2_val_batch({taken}, {limit[1]})" if of_data else f"zero_gpt2_eval_batch({taken})"
    plan.change(batch.start, batch.end, taken)
    if not of_data:
        return   # what counts are right answers
    loss = source.find(r"\b(\w+)\s*\+=\s*(?=gpt2_validate\s*\()", loop, "LOSS += gpt2_validate")
    call = source.call("gpt2_validate", loop)
    plan.change(call.start, call.start, f"zero_gpt2_val_loss({model}, ")
    plan.change(call.end, call.end, ")")
    mean = source.call("multi_gpu_cpu_float_sum", Span(loop.end, source.block_around(loop.start).end), loss[1])
    plan.after(source.statement(mean.start), f"zero_gpt2_val_mean({model}, &{loss[1]}, {limit[1]});")


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


@edit("any size", TRAINER, "main: zero_gpt2_set_configs takes any size; set_zero_configs stays for other programs")
def edit_configs(plan):
    call = plan.source.call("set_zero_configs", plan.source.function("main").body)
    _config, _stage, _count = call.arguments
    plan.change(call.start, call.start + len("set_zero_configs"), "zero_gpt2_set_configs")


@edit("nothing lost", "llmc/zero.cuh", "set_zero_configs, which the trainer calls no more, has nothing of a fork's own")
def edit_nothing_lost(plan):
    plan.replaces_code(*plan.source.function("set_zero_configs").body)


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
