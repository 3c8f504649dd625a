"""dev/llmc/patch.py on a small trainer of our own (test/small_llmc): llm.c's structure, none of its lines.

What is done, said, kept and refused; whatever goes wrong, no file is changed. test_llmc_runs.py runs what
comes out of it.
"""

import os
import re
import shutil
import stat
import sys

import pytest

from conftest import TOP, run

SMALL = TOP / "test/small_llmc"
TOOL = TOP / "dev/llmc"


sys.path.insert(0, str(TOOL))
import edits
import mends
import patch as tool

EDITS = [e.name for e in edits.EDITS]
MENDS = [m.name for m in mends.MENDS]
# what is changed in the small trainer; it has no Makefile
CHANGED = [file for file in dict.fromkeys([*(e.file for e in edits.EDITS), *(f for m in mends.MENDS for f in m.files)])
           if (SMALL / file).exists()]


@pytest.fixture
def tree(tmp_path):
    return shutil.copytree(SMALL, tmp_path / "a trainer")   # a space in its path, everywhere


@pytest.fixture
def patch(tree, capsys):
    """patch(flags ...): (exit code, all that was printed). The small trainer has macros and functions of its own in
    what is replaced: drop says that they may go."""
    def call(*flags, folder=tree, drop=True):
        drops = ["--drop-own-code"] if drop and not set(flags) & {"--revert", "--mends-only"} else []
        code = tool.main([*map(str, flags), *drops, str(folder)])
        printed = capsys.readouterr()
        return code, printed.out + printed.err
    return call


def snapshot(folder):
    """{path: (bytes, time of last change, mode)}, folders too."""
    return {path.relative_to(folder): (None if path.is_dir() else path.read_bytes(), path.is_dir() or
                                       path.stat().st_mtime_ns, stat.S_IMODE(path.stat().st_mode))
            for path in folder.rglob("*")}


def contents(folder):
    return {path: entry[::2] for path, entry in snapshot(folder).items()}


def change(tree, file, pattern, replacement, count=1):
    """Edits a file of the tree; the pattern has to be there."""
    text, n = re.subn(pattern, replacement, (tree / file).read_text(), flags=re.S)
    assert n >= count, f"{pattern} is not in {file}"
    (tree / file).write_text(text)


# ---------------------------------------------------------------------------- patch, check, revert

def test_patch_twice_and_back(tree, patch):
    original = contents(tree)
    code, said = patch()
    assert code == 0
    for file in CHANGED:
        assert f"\n{file}: " in "\n" + said and (tree / file).read_bytes() != (SMALL / file).read_bytes()
        assert (tree / "llmc_zero/unpatched" / file).read_bytes() == (SMALL / file).read_bytes()
    for header in [*TOP.glob("llmc_zero/*.cuh"), *TOOL.glob("*.cuh")]:
        assert (tree / "llmc_zero" / header.name).read_bytes() == header.read_bytes()
    assert all((tree / "llmc_zero/third_party" / name).exists() for name in ("xxhash.h", "nlohmann/json.hpp"))
    patched = snapshot(tree)
    code, said = patch()
    assert (code, snapshot(tree)) == (0, patched) and "patched already" in said
    code, said = patch("--check")
    assert (code, snapshot(tree)) == (0, patched) and said.endswith("patched\n")
    code, said = patch("--revert", "--check")
    assert (code, snapshot(tree)) == (0, patched) and all(file in said for file in CHANGED)
    code, said = patch("--revert")
    assert code == 0 and contents(tree) == original and not (tree / "llmc_zero").exists()
    before = snapshot(tree)
    code, said = patch("--revert")
    assert (code, snapshot(tree)) == (0, before) and "not patched" in said


def test_check_lists_everything_and_writes_nothing(tree, patch):
    before = snapshot(tree)
    code, said = patch("--check")
    assert (code, snapshot(tree)) == (0, before) and said.endswith("can be patched\n")
    for e in [mends.OWN_MENDS, *edits.EDITS]:
        assert re.search(rf"^  edit  {e.name} +{re.escape(e.file)} +{re.escape(e.what)}$", said, re.M), e.name
    for m in mends.MENDS:
        state = f"part of edit '{m.covered}'" if m.covered else ", ".join(m.files)
        assert re.search(rf"^  mend  {m.name} +{re.escape(state)} +{re.escape(m.reason)}$", said,
                         re.M), m.name
    code, said = patch("--check", "--mends-only", "--no-mend", "false,mem-advise")
    assert (code, snapshot(tree)) == (0, before)
    assert re.findall(r"^  edit  (.*?)  ", said, re.M) == ["own mends"]
    for name in ("false", "mem-advise"):
        assert re.search(rf"^  mend  {name} +left out +\w", said, re.M)
    assert re.search(r"^  mend  wpe-range +train_gpt2.cu +with -z 1", said, re.M)


def test_as_a_program(tree, patch, capsys):
    bad = {("--no-mend", "nothing", str(tree)): "--no-mend nothing: there is no such mend; there are: block-",
           (): "DIR is missing", ("--revert", "--mends-only", str(tree)): "--revert takes everything back",
           ("--revert", str(tree), "--no-mend", "false"): "--revert takes everything back",
           (str(tree), "--no-mend", "false,nothing"): "--no-mend nothing: there is no such mend",
           (str(tree), "--wrong"): "unrecognized arguments: --wrong"}
    before = snapshot(tree)
    for words, message in bad.items():
        with pytest.raises(SystemExit) as end:
            tool.main(list(words))
        assert end.value.code == 2 and message in capsys.readouterr().err, words
    for folder in (tree / "train_gpt2.cu", tree / "nowhere"):
        for flag in ("--check", "--revert", "--mends-only"):
            assert patch(flag, folder=folder) == (1, f"{folder} is not a folder\n")
    assert snapshot(tree) == before
    for words, code in ((["--drop-own-code"], 0), (["--revert"], 0), (["--no-mend", "nothing"], 2), (["nowhere"], 2)):
        result = run([sys.executable, TOOL / "patch.py", tree, *words], check=False)
        assert result.code == code and "Traceback" not in result.err
    assert contents(tree) == contents(SMALL)


def test_byte_code(tree, tmp_path):
    """None is left in this checkout, whatever Python would do; folders of it that are there already are in nobody's way."""
    checkout = tmp_path / "checkout"
    for folder in ("dev/llmc", "llmc_zero"):
        shutil.copytree(TOP / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / ".venv").symlink_to(TOP / ".venv")
    for folders in ([], [checkout / "dev/llmc", checkout / "llmc_zero", tree, tree / "llmc"]):
        for folder in folders:
            (folder / "__pycache__").mkdir()
            (folder / "__pycache__/edits.cpython-39.pyc").write_bytes(b"of another day")
        before = contents(checkout), contents(tree)
        for flag in ("--drop-own-code", "--revert"):
            run([sys.executable, checkout / "dev/llmc/patch.py", tree, flag])
        assert (contents(checkout), contents(tree)) == before


@pytest.mark.parametrize("ends", ["\r\n", "\n"])
@pytest.mark.parametrize("flags", [[], ["--mends-only"]])
def test_line_ends_stay(tree, patch, ends, flags):
    for file in CHANGED:
        (tree / file).write_bytes((tree / file).read_bytes().replace(b"\n", ends.encode()))
    original = contents(tree)
    assert patch(*flags)[0] == 0
    for file in CHANGED:
        data = (tree / file).read_bytes()
        assert data.count(b"\r") == data.count(b"\r\n") == (data.count(b"\n") if ends == "\r\n" else 0), file
    assert patch("--revert")[0] == 0 and contents(tree) == original


# ---------------------------------------------------------------------------- modes

def test_modes_follow_each_other(tree, patch, tmp_path):
    """From any mode to any other by running again: the same as from the unpatched trainer."""
    modes = [[], ["--mends-only"], ["--no-mend", "all"], ["--no-mend", "false", "--no-mend", "log-digits"],
             ["--mends-only", "--no-mend", "wpe-range,block-reduce"], ["--mends-only", "--no-mend", "all"]]
    expected = []
    for i, flags in enumerate(modes):
        fresh = shutil.copytree(SMALL, tmp_path / f"fresh{i}")
        assert patch(*flags, folder=fresh)[0] == 0
        expected.append(contents(fresh))
    assert len({str(sorted(e.items())) for e in expected}) == len(modes)
    for i in (0, 1, 2, 0, 3, 1, 4, 0, 4, 5, 1, 5, 2, 3, 0):
        assert patch(*modes[i])[0] == 0
        assert contents(tree) == expected[i], modes[i]
    assert patch("--revert")[0] == 0 and contents(tree) == contents(SMALL)


def test_mends_can_be_left_out(tree, patch):
    assert patch("--mends-only")[0] == 0
    complete = contents(tree)
    for m in mends.MENDS:
        assert patch("--mends-only", "--no-mend", m.name)[0] == 0
        differ = {str(path) for path, entry in contents(tree).items() if complete.get(path) != entry}
        differ |= {str(path) for path in complete if path not in contents(tree)}
        assert differ >= set(m.files) and not differ & (set(CHANGED) - set(m.files)), m.name


def test_no_mend_before_the_folder(tree, capsys):
    for words in (["--no-mend", str(tree)], ["--no-mend", "all", str(tree)], [str(tree), "--no-mend"]):
        assert tool.main(["--drop-own-code", *words]) == 0
        said = capsys.readouterr().out
        assert all(name in said.partition("left out: ")[2] or "patched already" in said for name in MENDS)
        assert b"> False;" in (tree / "llmc/cuda_common.h").read_bytes().replace(b"  ", b" ")
        assert (tree / "llmc/cuda_common.h").read_bytes() == (SMALL / "llmc/cuda_common.h").read_bytes()


def test_mended_already(tree, patch):
    """A tree whose faults are mended, by us or by others: nothing is left to do, and that is no error."""
    assert patch("--mends-only")[0] == 0
    shutil.rmtree(tree / "llmc_zero")
    before = contents(tree)
    code, said = patch("--mends-only", "--check")
    assert code == 0 and said.count("not needed: mended already") == len(MENDS)
    code, said = patch("--mends-only")
    assert code == 0 and f"mended already: {', '.join(MENDS)}" in said
    assert {path: entry for path, entry in contents(tree).items() if path.parts[0] != "llmc_zero"} == before
    assert patch()[0] == 0 and patch("--revert")[0] == 0 and contents(tree) == before


# ---------------------------------------------------------------------------- headers

def test_headers_are_replaced_by_new_ones(tree, patch, monkeypatch):
    assert patch()[0] == 0
    old = tool.own_headers()
    new = {**old, "check.cuh": b"// new\n" + old["check.cuh"], "more.cuh": b"// more\n"}
    del new["world.cuh"]
    monkeypatch.setattr(tool, "own_headers", lambda: new)
    before = snapshot(tree)
    assert patch("--check")[0] == 0 and snapshot(tree) == before
    assert patch()[0] == 0
    cuh = {name: data for name, data in new.items() if name.endswith(".cuh")}
    assert {path.name: path.read_bytes() for path in tree.glob("llmc_zero/*.cuh")} == cuh
    assert patch("--revert")[0] == 0 and contents(tree) == contents(SMALL)


def test_headers_changed_by_hand_stay(tree, patch, monkeypatch):
    assert patch()[0] == 0
    header = tree / "llmc_zero/gpt2.cuh"
    header.write_bytes(header.read_bytes() + b"// mine\n")
    mine = header.read_bytes()
    headers = {**tool.own_headers(), "gpt2.cuh": b"// new\n"}
    monkeypatch.setattr(tool, "own_headers", lambda: headers)
    for flags in ([], ["--mends-only"], ["--revert"]):
        code, said = patch(*flags)
        assert code == 0 and header.read_bytes() == mine, flags
        if flags != ["--mends-only"]:
            assert "llmc_zero/gpt2.cuh was changed by hand: left" in said
    assert [path.name for path in (tree / "llmc_zero").iterdir()] == ["gpt2.cuh"]
    assert all((tree / file).read_bytes() == (SMALL / file).read_bytes() for file in CHANGED)


def test_headers_of_others_come_from_where_the_compiler_finds_them(tree, patch, monkeypatch, tmp_path):
    """What is missing is named, with what to install; nothing is changed."""
    before = snapshot(tree)
    is_file = tool.Path.is_file
    monkeypatch.setattr(tool.Path, "is_file", lambda path: path.name != "xxhash.h" and is_file(path))
    code, said = patch()
    assert code == 3 and snapshot(tree) == before and "xxhash.h (Debian's libxxhash-dev): not found in" in said
    assert "json" not in said and "Nothing was changed." in said
    assert patch("--check")[0] == 3 and patch("--check", drop=False)[0] == 1   # its own code comes first
    assert patch("--mends-only")[0] == 0 and patch("--revert")[0] == 0
    monkeypatch.setattr(tool.Path, "is_file", is_file)
    (tmp_path / "own").mkdir()
    (tmp_path / "own/xxhash.h").write_text("// another version")
    monkeypatch.setenv("CPATH", str(tmp_path / "own"))
    assert patch()[0] == 0
    assert (tree / "llmc_zero/third_party/xxhash.h").read_text() == "// another version"


@pytest.mark.parametrize("text, expected", [
    ("NVCC_FLAGS = -O3\nNVCC_INCLUDES =\n\nall:\n",
     "NVCC_FLAGS = -O3\nNVCC_INCLUDES = -Illmc_zero/third_party\n\nall:\n"),
    ("NVCC_FLAGS := -O3 -t=0\r\n# it's\r\n", "NVCC_FLAGS := -O3 -t=0 -Illmc_zero/third_party\r\n# it's\r\n"),
    ("CFLAGS = -O3\n", None)])
def test_the_makefile_gets_the_include_path(tree, patch, text, expected):
    """The small trainer has none."""
    (tree / "Makefile").write_bytes(text.encode())
    before = snapshot(tree)
    code, said = patch()
    if expected is None:
        assert code == 1 and snapshot(tree) == before and "Makefile: edit 'include path': NVCC_INCLUDES = or" in said
        return
    assert code == 0 and (tree / "Makefile").read_bytes() == expected.encode()
    assert patch("--revert")[0] == 0 and (tree / "Makefile").read_bytes() == text.encode()


@pytest.mark.parametrize("record", [None, "", "{}", '{"version": 2}', "[1]", '{"version": 1}',
                                    '{"version": 1, "headers": {}, "files": []}'])
def test_a_folder_that_somebody_else_made(tree, patch, record):
    (tree / "llmc_zero").mkdir()
    (tree / "llmc_zero/notes.txt").write_text("not ours")
    if record is not None:
        (tree / "llmc_zero/patch.json").write_text(record)
    before = snapshot(tree)
    for flags in ([], ["--check"], ["--revert"], ["--mends-only"]):
        code, said = patch(*flags)
        assert code == 1 and snapshot(tree) == before
        assert ("was not made by this tool" if record is None else "patch.json cannot be read") in said


# ---------------------------------------------------------------------------- edits by hand

HAND = [("train_gpt2.cu", r"(?m)^void gpt2_free", "// by hand\nvoid gpt2_free"),
        ("train_gpt2.cu", r"int main\(", "static int by_hand;\nint main("),
        ("train_gpt2.cu", r"(?m)^ {12}loss_factor = step == [^\n]*\n", ""),
        ("train_gpt2.cu", r"\Z", "\n// the end"),
        ("llmc/zero.cuh", r"\A", "// the start\n"),
        ("llmc/logger.h", r"if \(!log->name\[0\]\) return;", "if (log->name[0] == 0) return;")]


@pytest.mark.parametrize("flags", [[], ["--mends-only"]])
def test_edits_by_hand_stay(tree, patch, tmp_path, flags):
    edited = shutil.copytree(SMALL, tmp_path / "edited")
    assert patch(*flags)[0] == 0
    for file, pattern, replacement in HAND:
        change(edited, file, pattern, replacement)
        change(tree, file, pattern, replacement)
    by_hand = contents(tree)
    assert patch(*flags)[0] == 0   # takes the edits into what it calls unpatched
    assert {k: v for k, v in contents(tree).items() if k.parts[0] != "llmc_zero"} == \
           {k: v for k, v in by_hand.items() if k.parts[0] != "llmc_zero"}
    assert patch("--revert")[0] == 0
    assert contents(tree) == contents(edited)


def test_edits_by_hand_inside_of_the_patch_are_refused(tree, patch):
    assert patch()[0] == 0
    wrote = {"struct": r"struct ZeroGpt2\* zero;", "update": r"zero_gpt2_update\(",
             "state": r"zero_gpt2_allocate_state",
             "forward": r"zero_gpt2_param\(gpt, w\.fcb, l\)", "flags": r"zero_gpt2_usage"}
    whole = (tree / "train_gpt2.cu").read_text()
    for name, pattern in wrote.items():
        change(tree, "train_gpt2.cu", pattern, "by_hand")
        before = snapshot(tree)
        for flags in (["--revert"], [], ["--check"], ["--mends-only"], ["--revert", "--check"]):
            code, said = patch(*flags)
            line = next(i for i, row in enumerate(whole.split("\n"), 1) if re.search(pattern, row))
            assert code == 1 and snapshot(tree) == before
            assert f"train_gpt2.cu: what edit '{name}' wrote (line " in said and "was changed since" in said
            found = int(re.search(r"\(line (\d+)", said)[1])
            assert abs(found - line) <= 2, (name, found, line)
        (tree / "train_gpt2.cu").write_text(whole)
    assert patch("--revert")[0] == 0 and contents(tree) == contents(SMALL)


def test_a_file_restored_by_hand(tree, patch):
    assert patch()[0] == 0
    complete = contents(tree)
    shutil.copy(SMALL / "train_gpt2.cu", tree)
    assert patch()[0] == 0 and contents(tree) == complete
    shutil.copy(SMALL / "llmc/zero.cuh", tree / "llmc")
    assert patch("--revert")[0] == 0 and contents(tree) == contents(SMALL)


def test_a_lost_original_is_named(tree, patch):
    assert patch()[0] == 0
    (tree / "llmc/logger.h").rename(tree / "moved.h")
    before = snapshot(tree)
    for flags in ([], ["--revert"]):
        code, said = patch(*flags)
        assert code == 1 and snapshot(tree) == before and "llmc/logger.h: No such file" in said
    (tree / "moved.h").rename(tree / "llmc/logger.h")
    (tree / "llmc_zero/unpatched/llmc/logger.h").unlink()
    before = snapshot(tree)
    code, said = patch("--revert")
    assert code == 1 and snapshot(tree) == before
    assert "logger.h is gone, so llmc/logger.h cannot be reverted" in said


# ---------------------------------------------------------------------------- anchors

def named(function):
    return [rf"\b{function}\b", "renamed"]


# edit: [(what to change in the file of the edit, and what the message must name)]
ANCHORS = {
    "struct": [(r"GPT2;", "GPT3;", "the end of GPT2's definition")],
    "init": [(*named("gpt2_init_common"), "the definition of gpt2_init_common")],
    "weights": [(*named("gpt2_allocate_weights"), "the definition of gpt2_allocate_weights"),
                (*named("malloc_and_point_parameters"), "the call of malloc_and_point_parameters")],
    "state": [(*named("gpt2_allocate_state"), "the definition of gpt2_allocate_state"),
              (r"const size_t shard_num_parameters = multi_gpu_config.shard_num_parameters,\s+bytes",
               "const size_t bytes", "the declaration of shard_num_parameters"),
              (*named("shard_num_parameters"), "the declaration of shard_num_parameters"),
              (*named("malloc_and_point_parameters"), "the call of malloc_and_point_parameters"),
              (*named("use_master_weights"), "an if on use_master_weights")],
    "model files": [(*named("gpt2_write_to_checkpoint"), "the definition of gpt2_write_to_checkpoint"),
                    (*named("gpt2_build_from_checkpoint"), "the definition of gpt2_build_from_checkpoint"),
                    (*named("gpt_build_from_descriptor"), "the definition of gpt_build_from_descriptor"),
                    (*named("device_to_file"), "the call of device_to_file with params_memory"),
                    (*named("file_to_device"), "the call of file_to_device with params_memory"),
                    (*named("cudaMemcpy"), "the call of cudaMemcpy with params_memory")],
    "forward": [(*named("gpt2_forward"), "the definition of gpt2_forward"),
                (r"ParameterTensors w = gpt->params;", "ParameterTensors& w = gpt->params;",
                 "gpt2_forward: its copy of model->params"),
                (r"\+ l \* ", "+ 2 * ", "layer * size, the layer first: not found"),
                (r"proj = w\.attprojw \+ l \* C", "proj = w.attprojw + l * -C",
                 "a product that goes on with '-'"),
                (r"void gpt2_free\(GPT2\* gpt\) \{",
                 "void gpt2_free(GPT2* gpt) { ParameterTensors p = gpt->params;",
                 "p.TENSOR + layer * size: not found")],
    "nothing else in test": [(r"(int main\([^)]*\)\s*\{)", r"\1 GPT2* p = 0; use(p->params.wte);", "uses the buffers")],
    "nothing else": [(r"a\.x, gpt->inputs, w\.wte", "a.x, gpt->inputs, gpt->params.wte", "uses the buffers"),
                     (r"d\.wte, NULL", "gpt->grads.wte, NULL", "uses the buffers"),
                     (r"(void save_state\([^)]*\)\s*\{)", r"\1 use((float*)gpt->params_memory + 7);",
                      "uses the buffers"),
                     (r"(void save_state\([^)]*\)\s*\{)", r"\1 auto& p = gpt->params;", "uses the buffers")],
    "backward": [(*named("gpt2_backward_and_reduce"), "the definition of gpt2_backward_and_reduce"),
                 (r"(void gpt2_backward_and_reduce\([^)]*)\)", r"\1, int more)",
                  "has 6 parameters, 5 were expected"),
                 (*named("last_step"), "last_step: not found"),
                 (*named("cudaMemsetAsync"), "the call of cudaMemsetAsync with grads_memory"),
                 (*named("multi_gpu_async_reduce_gradient"), "found 0 times, expected 2"),
                 (*named("encoder_backward"), "the call of encoder_backward"),
                 (r"\bif \(part == 0\)", "if (!part)", "part == 0 where losses are cleared"),
                 (r"\(N \* accumulate\);\n    LAUNCH", "(N);\n    LAUNCH", "the scale of the loss, 1 / accumulate"),
                 (r"ParameterTensors d = ", "ParameterTensors& d = ", "its copy of model->grads"),
                 (r"= d\.qkvw \+ l \* 3", "= d.qkvw + 3 * l",
                  "d.qkvw + layer * size, the layer first: not found"),
                 (r"= d\.qkvw \+ l \* 3", "= &d.qkvw[0] + l * 3",
                  "d.qkvw + layer * size, the layer first: not found"),
                 (r"if \(last_step\)\s*\{(\s*floatX\* const those)", r"{\1", "the block is not one of an if"),
                 (r"const size_t counts\[\] = \{C, C, V", "const size_t other[] = {C, C, V",
                  "the declaration of counts")],
    "tensor at layer": [(*named("gpt2_get_tensor_at_layer"), "the definition of gpt2_get_tensor_at_layer")],
    "norm": [(*named("gpt2_calculate_grad_norm"), "the definition of gpt2_calculate_grad_norm")],
    "update": [(*named("gpt2_update"), "the definition of gpt2_update"),
               (r"float decay, float shrink", "float shrink", "has 9 parameters; 9 or 10"),
               (r"MultiGpuConfig( ?\* ?\w+, bool from_masters)", r"Config\1", "the ninth a MultiGpuConfig*")],
    "free": [(*named("gpt2_free"), "the definition of gpt2_free"),
             (*named("multi_gpu_config_free"), "the call of multi_gpu_config_free"),
             (r"\bmain\(", "start(", "the definition of main")],
    "checkpoints": [(*named("find_max_step"), "the call of find_max_step"),
                    (*named("write_checkpoint"), "the definition of write_checkpoint"),
                    (*named("delete_checkpoint"), "the definition of delete_checkpoint")],
    "joining": [(r"if \(ranks->process_rank == 0\) gpt2_write_to_checkpoint\(gpt, name\);", "keep(gpt, name);",
                 "the call of gpt2_write_to_checkpoint")],
    "stop": [(r"\|\| last_step\)", "|| step == steps)", "last_step in the condition of write_checkpoint"),
             (r"if \(last_step\) break", "if (step == steps) break", "if (last_step) break"),
             (r"            write_checkpoint\(", "            keep_all(", "the call of write_checkpoint")],
    "include path": [],
    "state files": [(*named("save_state"), "the definition of save_state"),
                    (*named("load_state"), "the definition of load_state"),
                    (r"FILE\* out = fopenCheck\(name, \"wb\"\);\s+int header", "FILE* out = open_it(name); int header",
                     "the call of fopenCheck"),
                    (r"(sizeof data->shuffle_rng, 1, out\);\s+\}\s+)fclose\(out\)", r"\1shut(out)",
                     "where save_state closes its file"),
                    (*named("m_memory"), "with m_memory"),
                    (r"if \( gpt->use_master_weights \)", "if (true)", "an if on use_master_weights"),
                    (r"size_t shard_num_parameters = \(&multi_gpu_config\)->",
                     "size_t own = (&multi_gpu_config)->",
                     "the declaration of shard_num_parameters")],
    "flags": [(r"\{\s*error_usage\(\);\s*\}", "{ exit(2); }", "the end of main's chain of flags"),
              (*named("set_zero_configs"), "the call of set_zero_configs"),
              (*named("gpt2_init_common"), "the call of gpt2_init_common"),
              (r"  -z stage", "  zero stage", "the help on -z in error_usage"),
              (r"void error_usage", "void other_usage", "the definition of error_usage")],
    "batches": [(r"= tokens / tokens_at_once", "= 0 + tokens / tokens_at_once", "OF A STEP / TOKENS OF A ROUND"),
                (r"multi_gpu_config\.num_processes, shuffled", "ranks, shuffled", "num_processes: not found"),
                (r"dataloader_next_batch\(&data\)", "another_batch(&data)", "the call of dataloader_next_batch"),
                (r"i < val_batches", "i != val_batches", "NUMBER OF BATCHES: not found"),
                (r"val_loss \+= gpt2", "val_loss = val_loss + gpt2", "LOSS += gpt2_validate"),
                (r"multi_gpu_cpu_float_sum\(val_loss", "float_sum(val_loss", "multi_gpu_cpu_float_sum with val_loss")],
    "clip": [(r"shrink = norm", "shrink = 1.0f; shrink += norm", "shrink in main: found 2 times"),
             (r"most / norm", "divided(most, norm)", "LIMIT / norm : 1 was expected"),
             (r"decay, shrink, step", "decay, 1.0f, step", "1.0f in main"),
             (r"decay, shrink, step \+ 1, &multi_gpu_config", "{}",
              "fewer or more arguments than were expected")],
    "any size": [(*named("set_zero_configs"), "the call of set_zero_configs"),
                 (r"(set_zero_configs\(&multi_gpu_config, stage), gpt.num_parameters\)", r"\1)",
                  "fewer or more arguments than were expected")],
    "nothing lost": [(*named("set_zero_configs"), "the definition of set_zero_configs")],
    "test": [(r"\bmain\(", "start(", "the definition of main"),
             (*named("grads_memory"), "the call of cudaMemcpy with grads_memory"),
             (*named("gpt2_init_common"), "the call of gpt2_init_common")],
    "one-float": [(*named("ncclAllReduce"), "ncclAllReduce: not found")],
    "false": [(r"\bFalse\b", "Wrong", "the constant False")],
    "block-reduce": [(*named("softmax_autoregressive_backward_inplace_kernel"),
                      "the definition of softmax_autoregressive_backward_inplace_kernel"),
                     (*named("blockReduce"), "blockReduce in attention's backward")],
    "residual-guard": [(*named("fused_residual_forward_kernel5"),
                        "the definition of fused_residual_forward_kernel5"),
                       (*named("idx"), "the guard idx > N")],
    "mem-advise": [(r", cudaCpuDeviceId", "", "fewer or more arguments than were expected")],
    "outlier-nan": [(*named("update_detector"), "the definition of update_detector")],
    "mpi-finalize": [(*named("multi_gpu_config_free"), "the definition of multi_gpu_config_free"),
                     (*named("MPI_Finalize"), "the call of MPI_Finalize")],
    "log-digits": [(*named("logger_log_train"), "the definition of logger_log_train"),
                   (*named("logger_log_val"), "the definition of logger_log_val"),
                   (*named("fprintf"), "the call of fprintf")],
    "gather-order": [(*named("gpt2_update"), "the definition of gpt2_update"),
                     (*named("ncclGroupStart"), "the call of ncclGroupStart"),
                     (r"float decay, float shrink", "float shrink", "has 9 parameters; 9 or 10")],
    "val-every": [(*named("multi_gpu_config_init"), "the call of multi_gpu_config_init")],
    "wpe-range": [(*named("gpt2_backward_and_reduce"), "the definition of gpt2_backward_and_reduce"),
                  (r"T\*C\}", "T*C, T * C}", "T * C in the sizes of what is reduced last: found 2 times"),
                  (r"T\*C\}", "C*T}", "T * C in the sizes of what is reduced last: found 0 times"),
                  (*named("multi_gpu_async_reduce_gradient"), "multi_gpu_async_reduce_gradient")],
    "rounding-seed": [(*named("gpt2_init_common"), "the definition of gpt2_init_common"),
                      (*named("rng_state"), "rng_state: not found")],
    "nan-norm": [(*named("gpt2_calculate_grad_norm"), "the call of gpt2_calculate_grad_norm"),
                 (*named("isfinite"), "the choice whether to skip an update"),
                 (r"norm = gpt2_calculate_grad_norm", "norm = 1 * gpt2_calculate_grad_norm",
                  "the variable that gpt2_calculate_grad_norm is assigned to")],
}


def files_of(name):
    if name in EDITS:
        return [next(e.file for e in edits.EDITS if e.name == name)]
    return next(m.files for m in mends.MENDS if m.name == name)


def kind_of(name):
    return "edit" if name in EDITS else "mend"


def flags_for(name):
    return ["--mends-only"] if name in MENDS and next(m.covered for m in mends.MENDS
                                                      if m.name == name) else []


@pytest.mark.parametrize("name", EDITS + MENDS)
def test_a_missing_anchor_is_named_and_nothing_is_written(tree, patch, name):
    for file in files_of(name):
        for pattern, replacement, message in ANCHORS[name]:
            flags = flags_for(name) or (["--mends-only"] if (name, file) == ("one-float", "train_gpt2.cu")
                                        else [])
            change(tree, file, pattern, replacement)
            before = snapshot(tree)
            code, said = patch(*flags)
            assert (code, snapshot(tree)) == (1, before), said
            lines = [line for line in said.split("\n")
                     if line.startswith(f"{file}: {kind_of(name)} '{name}': ")]
            assert len(lines) == 1 and message in lines[0], (pattern, said)
            assert "Nothing was changed." in said
            if name in MENDS:
                code, said = patch(*flags, "--no-mend", name, "--check")
                assert f"mend '{name}'" not in said.replace(f"  mend  {name}", "")
            shutil.copy(SMALL / file, tree / file)


TWICE = [("struct", "struct Other { int x; } GPT2;"), ("forward", "void gpt2_forward(int x) { }"),
         ("update", "void gpt2_update(int x) { }"),
         ("nothing lost", "void set_zero_configs(int a, int b, int c) { }"),
         ("test", "int main() { }"), ("false", "std::bool_constant<true> False;"),
         ("mem-advise", "int f() { return cudaMemAdvise(0, 0, 0, 0); }"),
         ("outlier-nan", "double update_detector(int x) { }"),
         ("model files", "void gpt_build_from_descriptor(int x) const { }"), ("block-reduce", "void "
          "softmax_autoregressive_backward_inplace_kernel(int x) { }"), ("flags", "void error_usage() {}")]


@pytest.mark.parametrize("name, text", TWICE)
def test_an_anchor_that_is_there_twice(tree, patch, name, text):
    """In code that no compiler sees, too: which of the two is meant is not for a patch to guess."""
    file = files_of(name)[0]
    for more in (text, f"#if 0\n{text}\n#endif"):
        (tree / file).write_text(f"{(SMALL / file).read_text()}\n{more}\n")
        before = snapshot(tree)
        code, said = patch()
        assert (code, snapshot(tree)) == (1, before)
        assert re.search(rf"^{re.escape(file)}: {kind_of(name)} '{name}': .*: found 2 times, expected once$",
                         said, re.M)


def test_two_calls_where_one_is_expected(tree, patch):
    for file, pattern, name in [
            ("test_gpt2.cu", r"(    CUDA\(cudaMemcpy\(host, gpt\.grads_memory,.*?;\n)", "test"),
            ("train_gpt2.cu", r"(    encoder_backward\(d\.wte, .*?;\n)", "backward"),
            ("train_gpt2.cu", r"(    gpt2_init_common\(&gpt\);\n)", "flags")]:
        change(tree, file, pattern, r"\1\1")
        before = snapshot(tree)
        code, said = patch()
        assert (code, snapshot(tree)) == (1,
                                          before) and re.search(rf"{kind_of(name)} '{name}': .*found 2 times",
                                                                said)
        shutil.copy(SMALL / file, tree / file)


@pytest.mark.parametrize("file", CHANGED)
def test_a_missing_file(tree, patch, file):
    (tree / file).unlink()
    before = snapshot(tree)
    code, said = patch()
    if file == "test_gpt2.cu":   # a fork may do without
        assert code == 0 and not (tree / file).exists()
        assert patch("--revert")[0] == 0 and snapshot(tree).keys() == before.keys()
    else:
        assert (code, snapshot(tree)) == (1, before) and f"{file}: no such file in {tree}" in said


# ---------------------------------------------------------------------------- other ways to write the same

DECOYS = '''// größer als 1 °C
/* void gpt2_forward(GPT2* g) { ParameterTensors w = g->params; } } GPT2; else { error_usage(); }
   int main() { gpt2_init_common(&gpt); cudaMemcpy(a, gpt.grads_memory, b, c); ncclAllReduce(a, b, c); } */
// void gpt2_update(GPT2* gpt) { \\
   and on: void set_zero_configs(int a, int b) { blockReduce<warpReduceSum>(x); bool_constant<true> False
static const char* decoy = "} GPT2; void save_state(a, b, c) { \\" // void gpt2_free(GPT2* g)", quote = '"';
static const char* raw = R"x(void gpt2_forward(GPT2* gpt) { } " ' /* )x";
'''


def renamed(text):
    for old, new in {"gpt": "the_model", "w": "weights_of", "d": "grads_of", "last_step": "last_step",
                     "a": "acts_of",
                     "part": "micro", "accumulate": "micros", "words": "argv", "count": "argc",
                     "shrink": "by",
                     "stage": "zero", "l": "layer", "dg": "sum", "N": "N"}.items():
        text = re.sub(rf"(?<![\w.\-%:]){old}\b(?![\w:])", new, text)
    return text


def moved(text):
    """gpt2_free and gpt2_get_tensor_at_layer before gpt2_forward, save_state behind load_state."""
    for name, before in (("void gpt2_free", "void gpt2_forward"),
                         ("ShardInfo gpt2_get_tensor", "void gpt2_forward"),
                         ("void save_state", "#ifndef TESTING")):
        start = text.index(name)
        end = text.index("\n}\n", start) + 3
        function, text = text[start:end], text[:start] + text[end:]
        text = text.replace(before, function + "\n" + before, 1)
    return text


VARIANTS = {
    "decoys": (CHANGED, lambda text: text.replace("#include", DECOYS + "#include", 1)),
    "tabs": (CHANGED, lambda text: re.sub(r"(?m)^((?:    )+)", lambda m: "\t" * (len(m[1]) // 4), text)),
    "indented more": (CHANGED, lambda text: re.sub(r"(?m)^(?=[ \w])", "      ", text)),
    "moved": (["train_gpt2.cu"], moved),
    "renamed": (["train_gpt2.cu", "test_gpt2.cu"], renamed),
    "spaces": (CHANGED, lambda text: re.sub(r"(?<=\w)\((?=[\w&])(?!NUM)", " ( ", text.replace("->", " -> "))
               if "#define" not in text else text),
    "no last line end": (CHANGED, lambda text: text.rstrip("\n")),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_written_otherwise_is_found_all_the_same(tree, patch, variant):
    files, rewrite = VARIANTS[variant]
    assert patch()[0] == 0
    expected = (tree / "train_gpt2.cu").read_text()
    assert patch("--revert")[0] == 0
    for file in files:
        before = (SMALL / file).read_text()
        (tree / file).write_text(rewrite(before))
    original = contents(tree)
    assert original != contents(SMALL)
    for flags in (["--mends-only"], []):
        code, said = patch(*flags)
        assert code == 0, said
    text = (tree / "train_gpt2.cu").read_text()
    assert text.count("zero_gpt2_") == expected.count("zero_gpt2_")
    if variant in ("tabs", "indented more", "no last line end"):
        assert re.sub(r"\s+", " ", text).strip() == re.sub(r"\s+", " ", expected).strip()
    if variant == "decoys":
        define = re.search(r"#define ZERO_MENDS .*\n", text)[0]   # before the first code, which is a decoy's here
        assert text.replace(define, "").replace(DECOYS, "") == expected.replace(define, "")
    assert patch("--revert")[0] == 0 and contents(tree) == original


@pytest.mark.parametrize("before, after", [
    ("w.fcw + l * 4 * C*C + C;", "PARAM(gpt, w.fcw, l) + C;"),
    ("l ? w.fcb + l * 4 * C : w.fcb, *y = w.lnfw;",
     "l ? PARAM(gpt, w.fcb, l) : PARAM(gpt, w.fcb, 0), *y = PARAM(gpt, w.lnfw, 0);"),
    ("f(w.ln1w + (l + 1) * gpt->config.channels, w.ln1b + l * (C), 1);",
     "f(PARAM(gpt, w.ln1w, (l + 1)), PARAM(gpt, w.ln1b, l), 1);"),
    ("(w.fcw + l * size(4, C)) + l * C;", "(PARAM(gpt, w.fcw, l)) + l * C;"),
    ("(float*)w.qkvw;", "(float*)PARAM(gpt, w.qkvw, 0);"), ("a.w.x;", "a.w.x;")])
def test_how_pointers_are_written(tree, patch, before, after):
    change(tree, "train_gpt2.cu", r"(floatX\* proj = )", rf"floatX* x = {before}\n        \1")
    code, said = patch()
    assert code == 0, said
    expected = f"        floatX* x = {after}\n".replace("PARAM", "zero_gpt2_param")
    assert expected in (tree / "train_gpt2.cu").read_text()


# ---------------------------------------------------------------------------- files that cannot be written

@pytest.mark.parametrize("path", ["train_gpt2.cu", "llmc/logger.h", "llmc", "."])
def test_read_only(tree, patch, path):
    """By the mode, so that root is told, too."""
    mode = (tree / path).stat().st_mode
    os.chmod(tree / path, 0o555 if (tree / path).is_dir() else 0o444)
    before = snapshot(tree)
    try:
        code, said = patch()
        assert (code, snapshot(tree)) == (1, before)
        assert "is read-only: nothing was changed" in said and path.strip(".") in said
    finally:
        os.chmod(tree / path, mode)
    assert patch()[0] == 0
    os.chmod(tree / path, 0o555 if (tree / path).is_dir() else 0o444)
    before = snapshot(tree)
    try:
        assert patch("--revert")[0] == 1 and snapshot(tree) == before
    finally:
        os.chmod(tree / path, mode)
    assert patch("--revert")[0] == 0 and contents(tree) == contents(SMALL)


def test_modes_of_files_stay(tree, patch):
    os.chmod(tree / "train_gpt2.cu", 0o755)
    os.chmod(tree / "llmc/zero.cuh", 0o600)
    assert patch()[0] == 0
    modes = {path: stat.S_IMODE((tree / path).stat().st_mode)
             for path in ("train_gpt2.cu", "llmc/zero.cuh", "llmc_zero/gpt2.cuh", "llmc_zero/patch.json")}
    assert list(modes.values()) == [0o755, 0o600, 0o644, 0o644]


def test_a_link_stays_a_link(tree, patch, tmp_path):
    shutil.move(tree / "llmc/zero.cuh", tmp_path / "elsewhere.cuh")
    (tree / "llmc/zero.cuh").symlink_to(tmp_path / "elsewhere.cuh")
    assert patch()[0] == 0
    assert (tree / "llmc/zero.cuh").is_symlink() and b"llmc_zero" in (tmp_path / "elsewhere.cuh").read_bytes()
    assert patch("--revert")[0] == 0
    assert (tree / "llmc/zero.cuh").is_symlink()
    assert (tmp_path / "elsewhere.cuh").read_bytes() == (SMALL / "llmc/zero.cuh").read_bytes()


@pytest.mark.parametrize("way, call", [
    ("patch", "replace"), ("patch", "mkstemp"), ("patch", "copymode"), ("patch", "mkdir"),
    ("revert", "replace"),
    ("revert", "unlink"), ("to mends only", "replace"), ("to mends only", "unlink")])
def test_writing_that_fails_on_the_nth_file_changes_nothing(tree, patch, monkeypatch, way, call):
    owner = {"replace": tool.os, "mkstemp": tool.tempfile, "copymode": tool.shutil, "mkdir": tool.Path,
             "unlink": tool.Path}[call]
    real = getattr(owner, call)
    calls = {"left": 0}

    def failing(*args, **kwargs):
        calls["left"] -= 1
        if calls["left"] == 0:
            raise OSError(28, "No space left on device", str(tree))
        return real(*args, **kwargs)

    plan, plans = tool.plan_file, {}

    def plan_once(path, data, these, mends):   # the same plan for every n
        key = path, data, *(item.name for item in [*these, *mends])
        if key not in plans:
            plans[key] = plan(path, data, these, mends)
        return plans[key]

    monkeypatch.setattr(tool, "plan_file", plan_once)

    if way != "patch":
        assert patch()[0] == 0
    flags = {"patch": [], "to mends only": ["--mends-only"], "revert": ["--revert"]}[way]
    before = contents(tree)
    for n in range(1, 200):
        calls["left"] = n
        with monkeypatch.context() as patched:
            patched.setattr(owner, call, failing)
            code, said = patch(*flags)
        if calls["left"] > 0:
            break
        assert code == 1 and contents(tree) == before, (n, said)
        assert "No space left on device: nothing was changed" in said
    assert code == 0
    assert patch("--revert")[0] == 0 and contents(tree) == contents(SMALL)


def test_other_functions_that_copy_the_pointers_are_patched_too(tree, patch):
    """A fork's own evaluation, say: its pointers would lead elsewhere in a layer-major buffer."""
    more = ("float look(GPT2& other) {\n    ParameterTensors q = other.params;\n"
            "    for (int k = 0; k < num_layers; k++) { use(q.fcw + k * 4 * 23, q.wte); }\n}\n")
    (tree / "train_gpt2.cu").write_text((SMALL / "train_gpt2.cu").read_text() + more)
    assert patch()[0] == 0
    assert ("use(zero_gpt2_param(&other, q.fcw, k), zero_gpt2_param(&other, q.wte, 0));"
            in (tree / "train_gpt2.cu").read_text())


@pytest.mark.parametrize("file, before, after, word", [
    ("train_gpt2.cu", r"(void gpt2_update\([^)]*\)\s*\{)", r"\1 lion_step(gpt);", "lion_step"),
    ("train_gpt2.cu", r"(float gpt2_calculate_grad_norm\([^)]*\)\s*\{)", r"\1 loss_scale *= 2;", "loss_scale"),
    ("train_gpt2.cu", r"(void gpt2_update\([^)]*\)\s*\{)", r"\1 float wd = i == 0 || i == 5 ? decay : 0;", "tensors 0, 5"),
    ("llmc/zero.cuh", r"(void set_zero_configs\([^)]*\)\s*\{)", r"\1 offload_state = true;", "offload_state")])
def test_a_forks_own_code_is_not_dropped_without_a_word(tree, patch, file, before, after, word):
    """Names from elsewhere in what an edit replaces: what they do would be lost."""
    change(tree, file, before, after)
    untouched = snapshot(tree)
    code, said = patch(drop=False)
    assert (code, snapshot(tree)) == (1, untouched) and word in said and "--drop-own-code" in said
    assert patch()[0] == 0


@pytest.mark.parametrize("use", [
    "&w.qkvw[l * 3 * C]", "l * 3 * C + w.qkvw", "w.qkvw + (size_t)l * 3 * C", "w.qkvw + 3 * C * l", "w.wpe + l * C",
    "w.qkvw + (2 * l) * C", "hand_on(w, l)", "w.qkvw + off"])
def test_pointers_that_could_be_guessed_wrong_are_refused(tree, patch, use):
    change(tree, "train_gpt2.cu", r"(floatX\* proj = )", rf"auto x = {use};\n        \1")
    before = snapshot(tree)
    code, said = patch()
    assert (code, snapshot(tree)) == (1, before) and "train_gpt2.cu: edit '" in said, said


def test_a_loop_over_something_else_is_no_layer(tree, patch):
    change(tree, "train_gpt2.cu", r"(floatX\* proj = )",
           r"for (int b = 0; b < B; b++) use(w.qkvw + b * C);\n        \1")
    assert patch()[0] == 1


def test_a_flag_that_is_taken_is_refused(tree, patch):
    change(tree, "train_gpt2.cu", r"(const char \*flag = words\[w\] \+ 1)", r"if (words[w][1] == 'K') exit(1);\n        \1")
    code, said = patch()
    assert code == 1 and "-K is a flag of this llm.c already" in said


def test_the_clip_rule_must_be_llm_cs(tree, patch):
    for rule in ("most > 0 && norm > most ? most / norm : 1.0f", "norm > most ? most / norm : 2.0f"):
        change(tree, "train_gpt2.cu", r"norm > most \? most / norm : 1\.0f", rule)
        assert patch()[0] == 1
        shutil.copy(SMALL / "train_gpt2.cu", tree / "train_gpt2.cu")


def test_files_restored_by_hand_at_another_version(tree, patch):
    """git stash, git pull, and patch again: what upstream has changed since stays, and is patched."""
    assert patch()[0] == 0
    for path in CHANGED:
        shutil.copy(SMALL / path, tree / path)
    for path in ("train_gpt2.cu", "llmc/logger.h"):
        (tree / path).write_text("// a newer version\n" + (tree / path).read_text())
    newer = contents(tree)
    assert patch()[0] == 0 and "// a newer version" in (tree / "train_gpt2.cu").read_text()
    assert patch("--revert")[0] == 0
    assert {path: data for path, data in newer.items() if path.parts[0] != "llmc_zero"} == contents(tree)
