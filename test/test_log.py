"""main.log, summary.json and the directory of a run: what a resumed run makes of a log that is odd, what is synced, what
becomes of a directory that is renamed meanwhile, a locale with a comma."""

import json
import os
import re
import shutil
import stat
import subprocess

import pytest
from conftest import end, own_lines, run
from test_checkpoint import lines, path_of, start_ranks, steps_in, wait_for_step

SMALL = "-L 2 -C 24 -b 2 -I split -l 0.002"

# What a run does with files, in order, to the file in CALLS; with LOCALE, a program that sets a locale before it.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static void say(const char* what, const char* a, const char* b) {
    FILE* calls = fopen(getenv("CALLS"), "a");
    fprintf(calls, "%s %s %s\n", what, a, b);
    fclose(calls);
}
int mkdir(const char* path, mode_t mode) {
    int result = ((int (*)(const char*, mode_t))dlsym(RTLD_NEXT, "mkdir"))(path, mode);
    if (getenv("LOCALE") && !setlocale(LC_NUMERIC, getenv("LOCALE"))) say("no locale", "", "");
    if (result == 0) say("mkdir", path, "");
    return result;
}
int rename(const char* from, const char* to) {
    say("rename", from, to);
    return ((int (*)(const char*, const char*))dlsym(RTLD_NEXT, "rename"))(from, to);
}
int fsync(int fd) {
    char link[64], path[4096] = "";
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    if (readlink(link, path, sizeof(path) - 1) > 0) say("fsync", path, "");
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """run(flags, **environment): the calls of a run on one rank."""
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "shim.so", folder / "shim.c", "-ldl"], check=True)

    def run_with(flags, **environment):
        calls = folder / "calls"
        calls.write_text("")
        run(["./train_mlp", *flags.split()], env={"LD_PRELOAD": str(folder / "shim.so"), "CALLS": str(calls), **environment})
        return [line.strip() for line in calls.read_text().splitlines()]
    return run_with


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """A run of six steps, saved at 3 and 6."""
    folder = tmp_path_factory.mktemp("six")
    assert lines([f"{SMALL} -x 6 -n 3 -o {folder / 'run'}"], 1, folder)[0] == [None]
    return folder / "run"


def resume(six, folder, text):
    """Goes on from step 3 with a main.log of this text (None: as it is there). Returns the warnings, without its path."""
    folder.mkdir(exist_ok=True)
    shutil.copy(path_of(six, 3), folder)
    if text is not None:
        (folder / "main.log").write_bytes(text)
    errors, out = lines([f"{SMALL} -x 6 -y 1 -o {folder}"], 1, folder.parent / "lines")
    assert errors == [None] and "resumed from step 3" in out
    assert not list(folder.glob("*.tmp"))
    return [line.replace(f"{folder}/main.log", "LOG") for line in out.splitlines() if line.startswith("warning: ")]


def test_a_log_is_cut_in_place(six, tmp_path):
    """Mode, group and names stay: of a file that has two, and of one elsewhere that a link leads to."""
    text = (six / "main.log").read_text()
    group = 12345 if os.geteuid() == 0 else os.getegid()
    (tmp_path / "elsewhere").mkdir()
    for name in ("hard", "soft"):
        there = tmp_path / "elsewhere" / name
        there.write_text(text + "s:7 trl:1 lr")
        there.chmod(0o640)
        os.chown(there, -1, group)
        folder = tmp_path / name
        folder.mkdir()
        (os.link if name == "hard" else os.symlink)(there, folder / "main.log")
        before = there.stat()
        assert resume(six, folder, None) == []
        after = there.stat()
        assert there.read_text() == text
        assert (after.st_ino, after.st_mode, after.st_gid) == (before.st_ino, before.st_mode, before.st_gid)
        assert os.path.samefile(there, folder / "main.log") and (folder / "main.log").is_symlink() == (name == "soft")
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == ["hard", "soft"]


ODD = {   # lines of the log, a number or text: the warnings, the steps that stay
    "foreign": ([1, "# a note\n", 2, "s:2 trl:\0\0\0\n", 3, 4],
                ["left out: 2 line(s) that are none of a run, the first is line 2"], [1, 2, 3]),
    "foreign after the end": ([1, 2, 3, "# a note\n"],
                              ["left out: 1 line(s) that are none of a run, the first is line 4"], [1, 2, 3]),
    "very long": ([1, "x" * 5000 + "\n", 2, 3], ["left out: 1 line(s) that are none of a run, the first is line 2"],
                  [1, 2, 3]),
    "doubled": ([1, "s:2 trl:9 lr:9 norm:9\n", "s:2 trl:8 lr:8 norm:8\n", "s:3 trl:9 lr:9 norm:9\n", 2, 3, 4],
                ["2 step(s) have several lines, the first is step 2: the last of each stays"], [1, 2, 3]),
    "lost in the middle": ([1, 3, 4], ["the lines of 1 step(s) before step 3 are lost, the first is step 2"], [1, 3]),
    "lost at the begin": ([3], ["the lines of 2 step(s) before step 3 are lost, the first is step 1"], [3]),
    "everything": ([2, "\n", 2], ["left out: 1 line(s) that are none of a run, the first is line 2",
                                  "1 step(s) have several lines, the first is step 2: the last of each stays",
                                  "the lines of 1 step(s) before step 2 are lost, the first is step 1",
                                  "ends at step 2: the lines up to step 3 are lost"], [2]),
    "empty": ([], ["ends at step 0: the lines up to step 3 are lost"], []),
    "fine": ([1, 2, 3, 4, 5, 6], [], [1, 2, 3])}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_log_is_said_and_mended(kind, six, tmp_path):
    """Case N19. Where a file has to be written anew, it stands where a link leads to, with the old one's mode and group."""
    text = (six / "main.log").read_text().splitlines(True)
    parts, said, stay = ODD[kind]
    there = tmp_path / "elsewhere" / "log"
    there.parent.mkdir()
    there.write_text("".join(text[part - 1] if isinstance(part, int) else part for part in parts))
    there.chmod(0o604)
    if os.geteuid() == 0:
        os.chown(there, 1234, 12345)
    before = there.stat()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/main.log").symlink_to("../elsewhere/log")
    warnings = resume(six, tmp_path / "run", None)
    assert [re.sub("^warning: LOG:? ", "", line) for line in warnings] == said
    assert there.read_text() == "".join(text[step - 1] for step in stay) + "".join(text[3:])
    after = there.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert (tmp_path / "run/main.log").is_symlink() and [path.name for path in there.parent.iterdir()] == ["log"]


def test_a_log_of_two_names_that_is_written_anew_says_so(six, tmp_path):
    text = (six / "main.log").read_text()
    (tmp_path / "run").mkdir()
    (tmp_path / "other").write_text("# a note\n" + text)
    os.link(tmp_path / "other", tmp_path / "run/main.log")
    warnings = resume(six, tmp_path / "run", None)
    assert "warning: LOG: the file has 2 names (hard links); the others stay as they are" in warnings
    assert (tmp_path / "run/main.log").read_text() == text and (tmp_path / "other").read_text() == "# a note\n" + text


def test_loss_and_norm_come_from_the_last_line(six, tmp_path):
    """Nothing is left to do: summary.json says what the log does."""
    for name in (path_of(six, 3).name, "main.log"):
        shutil.copy(six / name, tmp_path)
    assert lines([f"{SMALL} -x 3 -y 1 -o {tmp_path}"], 1, tmp_path.parent / "last")[0] == [None]
    summary, last = json.loads((tmp_path / "summary.json").read_text()), (six / "main.log").read_text().splitlines()[2]
    assert last == f"s:3 trl:{summary['loss']:.9g} lr:0.002 norm:{summary['norm']:.9g}"


def test_what_a_run_leaves_is_synced(shim, tmp_path):
    """Each folder that is made: the one above it. main.log before a checkpoint; summary.json before it gets its name, the
    folder after."""
    top = tmp_path / "a/b"
    calls = shim(f"{SMALL} -x 2 -n 2 -o {top}/")
    for path in (tmp_path / "a", top):
        at = calls.index(f"mkdir {path}")
        assert calls[at + 1] == f"fsync {path.parent}"
    named = next(i for i, call in enumerate(calls) if re.match(r"rename \S+\.safetensors\.tmp ", call))
    assert f"fsync {path_of(top, 2)}.tmp" in calls[calls.index(f"fsync {top}/main.log"):named]
    at = next(i for i, call in enumerate(calls) if re.fullmatch(r"rename \S+/summary.json.tmp \S+/summary.json", call))
    assert calls[at - 1] == f"fsync {top}/summary.json.tmp" and calls[at + 1:] == [f"fsync {top}"]


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("flags", ["-n 1 -nk 1 -x 1000000", "-x 5000"])
def test_a_directory_that_is_renamed(flags, replaced, tmp_path):
    """Nothing is written to what stands under its name now; the run ends with a line. It cannot end before, because nobody
    reads its output until then."""
    ours, away = tmp_path / "run", tmp_path / "away"
    processes = start_ranks(f"{SMALL} {flags} -o {ours}", 2, tmp_path / "meet")
    wait_for_step(processes[0], 3)
    ours.rename(away)
    if replaced:
        ours.mkdir()
        (ours / path_of(ours, 1).name).write_text("of another run")
    outputs = [end(process) for process in processes]
    assert [process.returncode for process in processes] == [1, 1], outputs
    said = own_lines("".join(err for _, err in outputs), "train_mlp: ")
    assert len(said) == 1 and f"-o {ours}: " in said[0], said
    assert "no longer the directory that this run began in" in said[0], said
    if replaced:
        assert [path.name for path in ours.iterdir()] == [path_of(ours, 1).name]
    else:
        assert not ours.exists()
    assert not list(away.glob("summary.json*"))
    assert (away / "main.log").read_text().startswith("s:1 trl:")
    assert len(steps_in(away)) == (1 if "-n" in flags else 0)


def locale_with_a_comma(folder):
    """LOCPATH of a locale named comma, as test/comma_locale.h makes it."""
    (folder / "source").write_text('comment_char %\nescape_char /\nLC_NUMERIC\ndecimal_point "<U002C>"\nthousands_sep ""\n'
                                   "grouping -1\nEND LC_NUMERIC\n")
    letters = "".join(f"<U{code:04X}> /x{code:02x}\n" for code in range(128))
    (folder / "charmap").write_text("<code_set_name> UTF-8\n<comment_char> %\n<escape_char> /\n<mb_cur_min> 1\n"
                                    f"<mb_cur_max> 6\nCHARMAP\n{letters}END CHARMAP\n")
    (folder / "locales").mkdir()
    program = shutil.which("localedef", path=os.environ["PATH"] + ":/usr/bin:/usr/sbin")
    if program:
        subprocess.run([program, "--no-archive", "-c", "-i", folder / "source", "-f", folder / "charmap",
                        folder / "locales/comma"], check=False, capture_output=True)
    if not (folder / "locales/comma/LC_NUMERIC").exists():
        pytest.skip("NO LOCALE WITH A COMMA: localedef, which is part of glibc (libc-bin), is missing or made none")
    return str(folder / "locales")


def test_no_file_depends_on_the_locale(shim, tmp_path):
    """Case N1: straight, and from one locale to the other and back; the trace is JSON."""
    comma = {"LOCPATH": locale_with_a_comma(tmp_path), "LOCALE": "comma"}
    flags = f"{SMALL} -G 0.5 -c 0.01 -n 2 -y 1"
    plan = {"point": [{}, {}], "comma": [comma, comma], "to": [{}, comma], "back": [comma, {}]}
    found = []
    for name, (first, second) in plan.items():
        for steps, environment in ((2, first), (4, second)):
            calls = shim(f"{flags} -x {steps} -o {tmp_path / name} -T {tmp_path / name}.json", **environment)
            assert "no locale" not in calls
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        events = json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"]
        assert sum("dur" in event for event in events) > 10
        found.append([(tmp_path / name / "main.log").read_text(), path_of(tmp_path / name, 4).read_bytes(),
                      {key: value for key, value in summary.items() if not key.endswith("_ms")}])
    assert all(one == found[0] for one in found)
    assert "," not in found[0][0]


def test_the_older_log_of_a_comma_is_read(six, tmp_path):
    """What a version before 300 wrote under such a locale."""
    text = (six / "main.log").read_text()
    warnings = resume(six, tmp_path / "run", text.replace(".", ",").encode())
    assert warnings == []
    assert (tmp_path / "run/main.log").read_text().splitlines()[3:] == text.splitlines()[3:]
    assert stat.S_IMODE((tmp_path / "run/main.log").stat().st_mode) == 0o644
