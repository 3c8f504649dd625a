"""The changes to one source file of llm.c, collected while edits and mends are applied (dev/llmc/patch.py).

    plan = Plan(text, shared)
    plan.item = an edit or a mend, which then calls plan.replace, plan.before, plan.body and the like
    text, changes = plan.result()

A shared file is one that programs use which are not patched (llm.c's headers; train_llama3.cu, say). They have to come
out as before, so there each statement that changes stands twice, behind #if: the new one for a source that defines
ZERO_MENDS, as the patched trainer does, the old one for all others.
"""

import re
from collections import namedtuple

from source import Missing, Source, Span

Edit = namedtuple("Edit", "name file what apply")
Mend = namedtuple("Mend", "name files reason apply covered condition")   # condition: of #if, in a shared file
Change = namedtuple("Change", "edit start end text")   # edit: the name of an edit or a mend
MENDED = "mended"   # what a mend's apply returns where there is nothing left to do
GUARD = "ZERO_MENDS"
SIGN = "// llmc_zero: "   # and the names of mends, behind #if

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

    def __init__(self, text, shared=False):
        self.source = Source(text)
        self.shared = shared
        self.conditions = {}   # by name of the edit or mend
        self.newline = "\r\n" if text.count("\r\n") * 2 > text.count("\n") else "\n"
        self.changes = []
        self.item = None   # the edit or mend that is being applied
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
            self.lost.append(f"line {self.source.line(start)}: edit '{self.item.name}' replaces code with names of this "
                             f"fork's own: {', '.join(own)}")

    def change(self, start, end, text):
        text = text.replace("\r\n", "\n").replace("\n", self.newline)   # some of it may be the file's own
        self.changes.append(Change(self.item.name, start, end, text))
        self.conditions[self.item.name] = getattr(self.item, "condition", f"defined({GUARD})")

    def replaced(self, offset):
        return any(c.start <= offset < c.end for c in self.changes)

    def replace(self, span, text):
        """Replaces statements by lines of text, indented as they were; no text: takes their lines out."""
        if isinstance(self.item, Edit):
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
        if self.shared:
            changes = [self.both(*part) for part in self.whole_statements(changes)]
        return self.with_changes(Span(0, len(self.source.text)), changes), changes

    def with_changes(self, span, changes):
        out, at = [], span.start
        for c in changes:
            if c.start < at:
                raise Missing(f"line {self.source.line(c.start)}: another edit has changed this place")
            out += [self.source.text[at:c.start], c.text]
            at = c.end
        return "".join(out) + self.source.text[at:span.end]

    # ---- shared files

    def has(self, name):
        """Whether a mend stands in a shared file already; a patch whose record is lost may have left it."""
        return self.shared and re.search(rf"{SIGN}(?:.*, )?{name}(?:,|\s*$)", self.source.text, re.M)

    def whole_statements(self, changes):
        """[(Span of whole lines that statements are on, the changes in them)]; lines that are only put in: an empty Span."""
        text, parts = self.source.text, []
        for c in changes:
            span = Span(c.start, c.end)
            put_in = c.start == c.end and c.text.startswith(self.newline)
            if not put_in and not (c.text.endswith("\n") and text[:c.end].endswith("\n")):
                statement = self.source.statement(c.start)   # no #if inside of a macro's arguments
                end = text.find("\n", max(statement.end, c.end) - 1) + 1
                span = Span(text.rfind("\n", 0, min(statement.start, c.start)) + 1, end or len(text))
            if parts and span.start < parts[-1][0].end:
                last, others = parts.pop()
                parts.append((Span(min(last.start, span.start), max(last.end, span.end)), [*others, c]))
            else:
                parts.append((span, [c]))
        return parts

    def both(self, span, changes):
        """One change in place of several on the same lines: what is new behind #if, and what was there."""
        names = ", ".join(dict.fromkeys(c.edit for c in changes))
        if len({self.conditions[c.edit] for c in changes}) > 1:
            raise Missing(f"line {self.source.line(span.start)}: {names} change the same lines, on different conditions")
        head = f"#if {self.conditions[changes[0].edit]} {SIGN}{names}{self.newline}"
        old, new = self.source.text[span.start:span.end], self.with_changes(span, changes)
        if not old:
            line_end = self.source.text.find("\n", span.end)
            alone = not self.source.text[span.end:line_end].strip()
            return Change(names, *span, self.newline + head + new[len(self.newline):] + self.newline + "#endif"
                          + ("" if alone else self.newline))
        last = "" if old.endswith("\n") else self.newline   # at the end of a file
        return Change(names, *span, head + new + last + "#else" + self.newline + old + last + "#endif"
                      + ("" if last else self.newline))
