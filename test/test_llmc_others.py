"""What dev/llmc/patch.py leaves as it is: programs that it does not patch, and that share headers with the trainer.

The second trainer is a copy of the small one (test/small_llmc) under another name; llm.c's branch llama3 has one.
"""

import re
import shutil
import subprocess
import sys

import pytest

from conftest import TOP
from test_llmc_patch import CHANGED, SMALL, edits
from test_llmc_runs import MODEL_HEADER, SIZES, STATE_HEADER, C, run_lines

SHARED = [file for file in CHANGED if file not in edits.OWN]
OTHER = "train_other.cu"


def patched(tree, *flags):
    subprocess.run([sys.executable, TOP / "dev/llmc/patch.py", tree, *flags], check=True, stdout=subprocess.PIPE)


def seen_by_others(text):
    """What a source that does not define ZERO_MENDS, and a CUDA before 13, make of a header."""
    return re.sub(r"#if (?:defined\(ZERO_MENDS\)|CUDART_VERSION >= 13000) // llmc_zero: [^\n]*\n"
                  r".*?(?:#else\r?\n(.*?))?#endif\r?(?:\n|\Z)", lambda match: match[1] or "", text, flags=re.S)


@pytest.mark.parametrize("flags", [["--drop-own-code"], ["--mends-only"]])
@pytest.mark.parametrize("rewrite, layout", [
    (lambda text: text, str), (lambda text: text.replace("\n", "\r\n"), str), (lambda text: text.rstrip("\n"), str.rstrip),
    (lambda text: text.replace("constexpr", "#define TWO_LINES(x) \\\n    (x)\nconstexpr"), str),
    (lambda text: re.sub(r"(?<=[{;])\n *(?=\w)", " ", text), str.split)],
    ids=["as it is", "line ends", "no last line end", "behind a macro", "long lines"])
def test_headers_are_to_others_what_they_were(tmp_path, flags, rewrite, layout):
    tree = shutil.copytree(SMALL, tmp_path / "tree")
    for file in SHARED:
        (tree / file).write_bytes(rewrite((SMALL / file).read_text()).encode())
    before = {file: (tree / file).read_bytes().decode() for file in SHARED}
    patched(tree, *flags)
    for file in SHARED:
        now = (tree / file).read_bytes().decode()
        assert now != before[file] and layout(seen_by_others(now)) == layout(before[file]), file
        assert not re.search(r"\\\r?\n#", now)   # a directive in the middle of a macro would be none
    assert "#define ZERO_MENDS 1" in (tree / "train_gpt2.cu").read_text()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Of the second trainer, before and after: built where the first one is patched, and run in all of its stages."""
    folder, runs = tmp_path_factory.mktemp("other"), []
    flags = ["-d 128 -x 6 -n 3", "-w 0 -x 6 -n 6", "-a 2:1:nan -sl 5 -sg 5 -x 14"]
    lines = [f"CUDA_CPU_ROUND=512 -e tiny:2x24 -t 16 -z {z} {more}" for z in (0, 1, 2) for more in flags]
    for name in ("before", "after"):
        tree = shutil.copytree(SMALL, folder / f"tree {name}")
        (tree / OTHER).write_text((SMALL / "train_gpt2.cu").read_text())
        if name == "after":
            patched(tree, "--drop-own-code")
        # without MPI: what it does at the end of a run that MPI has not started is a fault of its own
        subprocess.run([TOP / "dev/cpu/nvcc", "-std=c++17", "-O1", "-DENABLE_FP32", "-DMULTI_GPU", "-lnccl",
                        "-o", folder / f"program {name}", OTHER], cwd=tree, check=True, timeout=300)
        runs.append(run_lines(folder / f"program {name}", 2, folder / name, lines))
    return runs


def left_behind(outcome):
    """All that a run printed and wrote, but for its folder's name."""
    files = {path.name: path.read_bytes() for path in outcome.folder.iterdir() if path.name not in ("id", "out.0", "out.1")}
    for rank in ("0", "1"):
        files[f"out.{rank}"] = (outcome.folder / f"out.{rank}").read_text().replace(str(outcome.folder), "FOLDER")
    return files


def test_a_second_trainer_comes_out_as_before(outcomes):
    before, after = outcomes
    for i, (one, other) in enumerate(zip(before, after)):
        assert left_behind(one) == left_behind(other), i
        assert len(one.column("trl")) == (14 if i % 3 == 2 else 6)
        assert re.findall(r"^stage (\d)$", other.out, re.M) == [str(int(i // 3 == 1))]   # of 0, 1 and 2, it knows two
        assert "llmc_zero" not in other.out


def test_a_second_trainer_allocates_as_before(outcomes):
    """With its stage 1 a half of m and v, and none of it is lost."""
    count = sum(size // C // C * 24 * 24 if i in (4, 6, 10, 12) else size // C * 24 for i, size in enumerate(SIZES))
    for outcome, parts in ((outcomes[1][0], 1), (outcomes[1][3], 2)):
        assert len(outcome.model) == MODEL_HEADER + 4 * count
        for rank in (0, 1):
            state = outcome.folder / f"state_00000003_{rank:05}.bin"
            assert state.stat().st_size == STATE_HEADER + 3 * 4 * count // parts
    losses = [outcomes[1][i].column("trl") for i in (0, 3, 6)]
    assert losses[0] == losses[2] and max(abs(a - b) for a, b in zip(*losses[:2])) < 0.05
